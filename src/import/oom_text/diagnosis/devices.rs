//! Allocators that tell other figures than the caching one: the driver's own pool and Apple's.

use super::super::message::OomMessage;
use super::{
    CONTEXT_BYTES, Class, Diagnosis, IsFragmentation, LIMIT_SHARE, OUTSIDE_SHARE_MIN,
    SUM_SLACK_SHARE, bare, clamped, share,
};

/// The driver's own pool: what it holds beside what is allocated is not told.
pub(super) fn diagnose_async(message: &OomMessage) -> Option<Diagnosis> {
    let requested = message.requested?;
    let capacity = message.capacity.filter(|capacity| capacity.bytes > 0)?;
    let allocated = message.allocated?;
    let free = message.free?;
    let (wanted, room) = (i128::from(requested.bytes), i128::from(free.bytes));
    let limit = message.allowed.filter(|limit| share(limit.bytes, capacity.bytes) < LIMIT_SHARE);
    let is_limited =
        limit.is_some_and(|limit| i128::from(allocated.bytes) + wanted > i128::from(limit.bytes));
    let outside = capacity.minus(allocated).minus(free);
    let hidden = i128::from(outside.bytes) - CONTEXT_BYTES;
    let class = if wanted > i128::from(capacity.bytes) {
        Class::LargerThanDevice
    } else if allocated.low() as f64 > capacity.bytes as f64 * (1.0 + SUM_SLACK_SHARE) {
        Class::Oversubscribed
    } else if is_limited {
        Class::Limit
    } else if room >= wanted {
        Class::Driver
    } else if hidden as f64 >= OUTSIDE_SHARE_MIN * capacity.bytes as f64 && hidden + room >= wanted
    {
        Class::DriverPool
    } else {
        Class::NotFragmentation
    };
    let answer = match class {
        Class::DriverPool => IsFragmentation::CannotBeTold,
        _ => IsFragmentation::No,
    };
    let mut diagnosis = bare(class, answer);
    diagnosis.room_bytes = Some(free.bytes);
    diagnosis.outside = Some(outside);
    diagnosis.missing_bytes = Some(clamped(wanted - room - hidden.max(0)));
    Some(diagnosis)
}

/// Apple's unified memory: a limit that PyTorch sets itself.
pub(super) fn diagnose_mps(message: &OomMessage) -> Option<Diagnosis> {
    let requested = message.requested?;
    let (allocated, allowed) = (message.allocated?, message.allowed?);
    let others = message.other_allocations.unwrap_or_default();
    let mut diagnosis = bare(Class::Limit, IsFragmentation::No);
    let in_use = allocated.plus(others);
    let room = i128::from(allowed.bytes) - i128::from(in_use.bytes);
    let missing = i128::from(requested.bytes) - room;
    // What others hold decides if the request fits without.
    if i128::from(others.bytes) >= missing && others.bytes > allocated.bytes {
        diagnosis.class = Class::Outside;
    }
    if requested.bytes > allowed.bytes {
        diagnosis.class = Class::LargerThanDevice;
    }
    diagnosis.room_bytes = Some(u64::try_from(room).unwrap_or(0));
    diagnosis.missing_bytes = Some(clamped(missing));
    diagnosis.outside = Some(others);
    Some(diagnosis)
}
