//! What a recorded refusal tells of the memory there was: a snapshot itself knows neither the
//! limit of its process nor the size of its device.
//!
//! ```text
//!   reserved when refused          + the segment asked for
//!   ├──────────────────────────────┼──────────────────┤
//!   0                              the limit lies in here, if the device had room: it refuses the
//!                                  segment, and let everything before it pass
//! ```
//!
//! Where the device had no room for the segment, reserved and free memory together are what the
//! process could have of it.

use crate::trace::{Op, RecordedKind, StartLayout, Trace};
use crate::units::{Bytes, MIB};

use super::truth::number_in;

/// A request that the recorded run was refused.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    /// Reserved after everything was released that could be.
    reserved_bytes: u64,
    /// The segment that the request needed (specs/pytorch_caching.md 2.3).
    segment_bytes: u64,
    /// What the device reported as free.
    free_bytes: u64,
}

/// Gives the trace the limit or capacity that its refusals show, where nothing else tells either,
/// and says so. Refusals that contradict each other tell nothing.
pub(super) fn room_from_refusals(trace: &mut Trace) -> Option<String> {
    let header = &trace.header;
    let known = [header.limit_bytes, header.device.total_bytes, header.device.capacity_bytes];
    if known.iter().any(Option::is_some) {
        return None;
    }
    let Refusals { refusals, reserved_bytes_peak, retried_bytes } = Refusals::of(trace);
    let wanted = |refusal: &Refusal| refusal.reserved_bytes.saturating_add(refusal.segment_bytes);
    let refused_bytes = refusals.iter().map(wanted).min();
    // What looks like a retry may be an empty_cache of the program.
    let retried_bytes = retried_bytes.filter(|&bytes| reserved_bytes_peak < bytes);
    let least_wanted_bytes = match (refused_bytes, retried_bytes) {
        (Some(refused), Some(retried)) => refused.min(retried),
        (one, other) => one.or(other)?,
    };
    let most_bytes = least_wanted_bytes - 1;
    if reserved_bytes_peak > most_bytes {
        return None;
    }
    if refusals.iter().all(|refusal| refusal.free_bytes >= refusal.segment_bytes) {
        trace.header.limit_bytes = Some(most_bytes);
        let how = if refusals.is_empty() {
            "a request was refused until memory was released: taken as a memory limit"
        } else {
            "a request was refused while the device had room: a memory limit"
        };
        return Some(format!(
            "{how} between {} and {}, of which the larger holds here; give --limit if you know it",
            Bytes(reserved_bytes_peak),
            Bytes(most_bytes)
        ));
    }
    let capacity = |refusal: &Refusal| refusal.reserved_bytes.checked_add(refusal.free_bytes);
    let capacity_bytes = refusals.iter().filter_map(capacity).max()?;
    if !(reserved_bytes_peak..=most_bytes).contains(&capacity_bytes) {
        return None;
    }
    trace.header.device.capacity_bytes = Some(capacity_bytes);
    Some(format!(
        "a request was refused by a device on which the process could have {}: taken as its \
         capacity; give --capacity for another",
        Bytes(capacity_bytes)
    ))
}

/// The segment that a rounded size asks for (specs/pytorch_caching.md 2.3).
fn segment_bytes(size_bytes: u64, large_segment_bytes: u64) -> u64 {
    match size_bytes {
        ..=MIB => 2 * MIB,
        size if size < 10 * MIB => large_segment_bytes,
        size => size.checked_next_multiple_of(2 * MIB).unwrap_or(u64::MAX),
    }
}

/// The refusals of a recording.
struct Refusals {
    /// Those that were final.
    refusals: Vec<Refusal>,
    /// The most that was ever reserved, and so granted.
    reserved_bytes_peak: u64,
    /// The least sum of reserved bytes and a segment that was refused at first and then obtained,
    /// once memory had been released.
    retried_bytes: Option<u64>,
}

impl Refusals {
    fn of(trace: &Trace) -> Refusals {
        let settings = trace.header.settings.as_deref().unwrap_or_default();
        let large_segment_bytes = number_in(settings, "large_segment_size_mb")
            .map_or(20 * MIB, |mb| (mb as u64).saturating_mul(MIB));
        // Garbage collection releases before anything is refused, and requests that are rounded up
        // show too small.
        let collects = settings.contains("garbage_collection_threshold");
        let rounds_up = settings.contains("roundup_power2_divisions");
        let mut reserved_bytes = trace.start.as_ref().map_or(0, StartLayout::reserved_bytes);
        let mut found = Refusals {
            refusals: Vec::new(),
            reserved_bytes_peak: reserved_bytes,
            retried_bytes: None,
        };
        // A malloc that releases memory before it obtains any was refused first.
        let mut released: Option<(u32, u64)> = None;
        for action in trace.recording.iter().flat_map(|recording| &recording.actions) {
            let size_bytes = action.size_bytes;
            match action.kind {
                RecordedKind::SegmentAlloc | RecordedKind::SegmentMap => {
                    let before = released.take().filter(|&(event, _)| event == action.event);
                    let asked_bytes = match action.kind {
                        RecordedKind::SegmentAlloc => Some(size_bytes),
                        _ if rounds_up => None,
                        _ => request_at(trace, action.event)
                            .map(|request| segment_bytes(request, large_segment_bytes)),
                    };
                    if let (Some((_, before)), Some(asked), false) = (before, asked_bytes, collects)
                    {
                        let wanted = before.saturating_add(asked);
                        found.retried_bytes =
                            Some(found.retried_bytes.map_or(wanted, |least| least.min(wanted)));
                    }
                }
                RecordedKind::SegmentFree | RecordedKind::SegmentUnmap => {
                    if released.is_none_or(|(event, _)| event != action.event) {
                        released = Some((action.event, reserved_bytes));
                    }
                }
                RecordedKind::Oom => {
                    let segment_bytes = segment_bytes(size_bytes, large_segment_bytes);
                    let free_bytes = action.address;
                    found.refusals.push(Refusal { reserved_bytes, segment_bytes, free_bytes });
                }
                RecordedKind::FreeCompleted => {}
            }
            reserved_bytes = action.reserved_after(reserved_bytes);
            found.reserved_bytes_peak = found.reserved_bytes_peak.max(reserved_bytes);
        }
        found
    }
}

/// What the alloc of an event asks for, in bytes.
fn request_at(trace: &Trace, event: u32) -> Option<u64> {
    match trace.events.get(event as usize)?.op {
        Op::Alloc(block) => Some(trace.blocks.get(block.index())?.size_bytes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{RecordedAction, Recording};
    use crate::units::{BlockId, GIB, StreamId};

    /// A recording of these actions, each in an event of its own but for those marked as the same.
    fn trace(actions: &[(RecordedKind, u64, u64, bool)]) -> Trace {
        let mut event = 0;
        let actions = actions.iter().map(|&(kind, size_bytes, address, same_event)| {
            event += u32::from(!same_event);
            let (block, stream) = (BlockId::NONE, StreamId(0));
            RecordedAction { event, kind, block, stream, address, size_bytes }
        });
        let recording = Recording { actions: actions.collect(), ..Recording::default() };
        Trace { recording: Some(recording), ..Trace::default() }
    }

    use RecordedKind::{Oom, SegmentAlloc, SegmentFree};

    #[test]
    fn a_refusal_with_room_on_the_device_shows_a_limit() {
        let mut trace = trace(&[
            (SegmentAlloc, 3 * GIB, 0, false),
            (SegmentAlloc, GIB, 0, false),
            (SegmentFree, GIB, 0, false),
            (Oom, 2 * GIB, 50 * GIB, true),
        ]);
        let text = room_from_refusals(&mut trace).expect("is told");
        assert!(text.contains("a memory limit between 4 GiB and"), "{text}");
        // 3 GiB were left when 2 more were refused, 4 had been granted.
        assert_eq!(trace.header.limit_bytes, Some(5 * GIB - 1));
        assert_eq!(room_from_refusals(&mut trace), None, "a known limit stands");
    }

    #[test]
    fn a_retry_narrows_the_limit() {
        let mut trace = trace(&[
            (SegmentAlloc, 3 * GIB, 0, false),
            (SegmentAlloc, GIB, 0, false),
            // Refused 512 MiB at 4 GiB, released 1 GiB, obtained them.
            (SegmentFree, GIB, 0, false),
            (SegmentAlloc, GIB / 2, 0, true),
            (Oom, 2 * GIB, 50 * GIB, false),
        ]);
        room_from_refusals(&mut trace).expect("is told");
        assert_eq!(trace.header.limit_bytes, Some(4 * GIB + GIB / 2 - 1));
    }

    #[test]
    fn a_retry_alone_is_taken_as_a_limit_unless_garbage_is_collected() {
        let actions = [
            (SegmentAlloc, 3 * GIB, 0, false),
            (SegmentAlloc, GIB, 0, false),
            (SegmentFree, GIB, 0, false),
            (SegmentAlloc, GIB / 2, 0, true),
        ];
        let mut retried = trace(&actions);
        room_from_refusals(&mut retried).expect("is told");
        assert_eq!(retried.header.limit_bytes, Some(4 * GIB + GIB / 2 - 1));
        let mut collected = trace(&actions);
        collected.header.settings = Some("garbage_collection_threshold:0.8".to_owned());
        assert_eq!(room_from_refusals(&mut collected), None);
    }

    #[test]
    fn a_refusal_by_a_full_device_shows_its_capacity() {
        let mut trace = trace(&[(SegmentAlloc, 3 * GIB, 0, false), (Oom, 2 * GIB, GIB, false)]);
        room_from_refusals(&mut trace).expect("is told");
        assert_eq!(trace.header.device.capacity_bytes, Some(4 * GIB));
        assert_eq!(trace.header.limit_bytes, None);
    }

    #[test]
    fn refusals_that_contradict_what_was_granted_tell_nothing() {
        // Refused 1 GiB at 1 GiB, although 3 were granted before.
        let mut trace = trace(&[
            (SegmentAlloc, 3 * GIB, 0, false),
            (SegmentFree, 3 * GIB, 0, false),
            (SegmentAlloc, GIB, 0, false),
            (Oom, GIB, 50 * GIB, false),
        ]);
        assert_eq!(room_from_refusals(&mut trace), None);
        assert_eq!(trace.header.limit_bytes, None);
    }
}
