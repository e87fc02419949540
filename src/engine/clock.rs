//! The program's own time: what a recording shows between events, less its device calls.
//!
//! Recorded gaps contain the recorded allocator's device calls. A replay makes its own, so the cost
//! of the recorded ones, by the same profile, is taken out first (DESIGN 5); a gap never falls
//! below zero.
//!
//! ```text
//!   recorded   ├──────── gap ────────┤ alloc          gap = program + recorded cudaMalloc
//!   simulated  ├─ program ─┤ + own device calls
//! ```

use crate::device::{CostProfile, DeviceCall};
use crate::trace::{RecordedAction, RecordedKind, Trace};
use crate::units::MIB;

/// Pages of expandable segments in the large pool; those of the small pool are 2 MiB.
const LARGE_PAGE_BYTES: u64 = 20 * MIB;
const SMALL_PAGE_BYTES: u64 = 2 * MIB;

/// Program time of every event in nanoseconds since the first.
pub(super) fn program_times(trace: &Trace, profile: &CostProfile) -> Vec<u64> {
    let actions = trace.recording.as_ref().map_or(&[][..], |recording| &recording.actions);
    let mut actions = actions.iter().peekable();
    let mut last_ns = trace.events.first().map_or(0, |event| event.time_ns);
    let mut now_ns = 0u64;
    let mut times = Vec::with_capacity(trace.events.len());
    for (index, event) in trace.events.iter().enumerate() {
        let mut cost_ns = 0.0;
        while let Some(action) = actions.next_if(|action| action.event as usize <= index) {
            cost_ns += recorded_cost_ns(action, profile);
        }
        let gap_ns = event.time_ns.saturating_sub(last_ns);
        last_ns = event.time_ns;
        now_ns += gap_ns.saturating_sub(cost_ns as u64);
        times.push(now_ns);
    }
    times
}

/// What the device calls behind a recorded action cost.
fn recorded_cost_ns(action: &RecordedAction, profile: &CostProfile) -> f64 {
    let size = action.size_bytes;
    let (page_bytes, pages) = if size.is_multiple_of(LARGE_PAGE_BYTES) {
        (LARGE_PAGE_BYTES, size / LARGE_PAGE_BYTES)
    } else {
        (SMALL_PAGE_BYTES, size.div_ceil(SMALL_PAGE_BYTES))
    };
    let per_page = |calls: &[DeviceCall]| -> f64 {
        let one: f64 = calls.iter().map(|&call| profile.cost_ns(call, page_bytes)).sum();
        one * pages as f64
    };
    match action.kind {
        RecordedKind::SegmentAlloc => profile.cost_ns(DeviceCall::Malloc, size),
        RecordedKind::SegmentFree => profile.cost_ns(DeviceCall::Free, size),
        RecordedKind::SegmentMap => {
            per_page(&[DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess])
        }
        RecordedKind::SegmentUnmap => per_page(&[DeviceCall::Unmap, DeviceCall::Release]),
        RecordedKind::FreeCompleted | RecordedKind::Oom => 0.0,
    }
}
