//! Figures of one message that cannot all be true: devices that share memory, drivers that do not
//! tell.

use serde::Serialize;

use super::super::amount::Amount;
use super::super::message::OomMessage;
use super::SUM_SLACK_SHARE;

/// Figures of one message that cannot all be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Contradiction {
    /// More is free than the device has.
    FreeExceedsCapacity,
    /// Reserved and free together exceed the device.
    SumExceedsCapacity,
    /// The process uses less than its allocator has reserved.
    ProcessBelowReserved,
    /// More is allocated than reserved.
    AllocatedExceedsReserved,
    /// The processes together use more than the device has.
    ProcessesExceedCapacity,
}

/// The contradictions in a message.
pub(super) fn contradictions(message: &OomMessage) -> Vec<Contradiction> {
    let mut found = Vec::new();
    let exceeds = |sum: Amount, whole: Amount| {
        sum.low() as f64 > whole.high() as f64 * (1.0 + SUM_SLACK_SHARE)
    };
    if let (Some(capacity), Some(free)) = (message.capacity, message.free) {
        if exceeds(free, capacity) {
            found.push(Contradiction::FreeExceedsCapacity);
        } else if message.reserved.is_some_and(|reserved| exceeds(reserved.plus(free), capacity)) {
            found.push(Contradiction::SumExceedsCapacity);
        }
    }
    if let (Some(in_use), Some(reserved)) = (message.in_use_by_process, message.reserved)
        && exceeds(reserved, in_use)
    {
        found.push(Contradiction::ProcessBelowReserved);
    }
    let in_use = message.processes.iter().map(|process| process.in_use);
    let in_use = in_use.fold(message.in_use_by_process.unwrap_or_default(), Amount::plus);
    if message.capacity.is_some_and(|capacity| exceeds(in_use, capacity)) {
        found.push(Contradiction::ProcessesExceedCapacity);
    }
    if let (Some(allocated), Some(reserved)) = (message.allocated, message.reserved)
        && exceeds(allocated, reserved)
    {
        found.push(Contradiction::AllocatedExceedsReserved);
    }
    found
}
