//! The program's own time: what a recording shows between events, less its device calls.
//!
//! Recorded gaps contain the recorded allocator's device calls. A replay makes its own, so the cost
//! of the recorded ones, by the same profile, is taken out first (DESIGN 5).
//!
//! ```text
//!   recorded   ├──────── gap ────────┤ alloc          gap = program + recorded cudaMalloc
//!   simulated  ├─ program ─┤ + own device calls
//! ```
//!
//! The one design decision: a cost is taken out of the gap that holds the calls, and what that gap
//! is too short for is dropped, not carried on. A call that took longer than its gap is impossible:
//! the recorded one was faster than the profile's, and later gaps are the program's own. If much is
//! dropped, the profile is not that of the recorded GPU, and no rule could mend that.
//!
//! PyTorch's calls: `cudaMalloc` and `cudaFree` a segment; in expandable segments a create and a
//! map a page and one set_access for all pages mapped at once, which costs what it costs for each
//! (`reports/vmm_ranges.md`); an unmap and a release a page. The reservation of their addresses
//! leaves no trace; it takes microseconds once a pool and stream.

use std::collections::HashSet;

use crate::alloc::caching::Config;
use crate::device::{CostMeter, CostProfile, DeviceCall};
use crate::trace::{Event, Op, RecordedAction, RecordedKind, Trace};
use crate::units::MIB;

/// Page of expandable segments in small pools (specs/pytorch_caching.md 5.1).
const SMALL_PAGE_BYTES: u64 = 2 * MIB;

/// Program time of every event in nanoseconds since the first.
pub(super) fn program_times(trace: &Trace, profile: &CostProfile) -> Vec<u64> {
    let actions = trace.recording.as_ref().map_or(&[][..], |recording| &recording.actions);
    let mut actions = actions.iter().peekable();
    let mut costs = RecordedCosts::new(trace, profile);
    let mut last_ns = trace.events.first().map_or(0, |event| event.time_ns);
    let mut now_ns = 0u64;
    // Cost of calls that were made after the time of their event.
    let mut late_ns = 0.0;
    let mut times = Vec::with_capacity(trace.events.len());
    // Events of one instant, as a mark and the alloc behind it, have the gap before them in common.
    for instant in trace.events.chunk_by(|a, b| a.time_ns == b.time_ns) {
        let mut cost_ns = std::mem::take(&mut late_ns);
        for (index, event) in (times.len()..).zip(instant) {
            let mut is_first = true;
            while let Some(action) = actions.next_if(|action| action.event as usize <= index) {
                let calls_ns = costs.of(action);
                let side =
                    if is_late(event, action, is_first) { &mut late_ns } else { &mut cost_ns };
                *side += calls_ns;
                is_first = false;
            }
        }
        let gap_ns = instant[0].time_ns.saturating_sub(last_ns);
        last_ns = instant[0].time_ns;
        now_ns = now_ns.saturating_add(gap_ns.saturating_sub(cost_ns as u64));
        times.resize(times.len() + instant.len(), now_ns);
    }
    times
}

/// Whether an action's calls were made after the time of its event. An alloc has the time of its
/// own entry, which PyTorch notes last; other events have the time of the first action in them: a
/// free of a segment is noted before the call, unmapped pages after it.
fn is_late(event: &Event, action: &RecordedAction, is_first: bool) -> bool {
    match event.op {
        Op::Alloc(_) | Op::Attempt(_) => false,
        _ => !is_first || action.kind != RecordedKind::SegmentUnmap,
    }
}

/// What the device calls behind recorded actions cost.
struct RecordedCosts {
    meter: CostMeter,
    /// Page of expandable segments in large pools.
    large_page_bytes: u64,
    /// Addresses where a page of a small pool was mapped.
    small_pages: HashSet<u64>,
}

impl RecordedCosts {
    fn new(trace: &Trace, profile: &CostProfile) -> Self {
        let settings = trace.header.settings.as_deref().unwrap_or_default();
        let config = Config::parse(settings).unwrap_or_default();
        let large_page_bytes = config.large_segment_size_bytes;
        let meter = CostMeter::new(profile.clone());
        RecordedCosts { meter, large_page_bytes, small_pages: HashSet::new() }
    }

    /// Cost of the calls behind the next action in nanoseconds.
    fn of(&mut self, action: &RecordedAction) -> f64 {
        let size = action.size_bytes;
        match action.kind {
            RecordedKind::SegmentAlloc => self.meter.next_ns(DeviceCall::Malloc, size, 1),
            RecordedKind::SegmentFree => self.meter.next_ns(DeviceCall::Free, size, 1),
            RecordedKind::SegmentMap => {
                // A small pool needs one page at a time, and a large one has larger pages.
                let is_small = size == SMALL_PAGE_BYTES;
                if is_small {
                    self.small_pages.insert(action.address);
                } else {
                    self.small_pages.remove(&action.address);
                }
                let calls = [DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess];
                self.per_page(&calls, size, is_small)
            }
            RecordedKind::SegmentUnmap => {
                let is_small = self.small_pages.contains(&action.address);
                self.per_page(&[DeviceCall::Unmap, DeviceCall::Release], size, is_small)
            }
            RecordedKind::FreeCompleted | RecordedKind::Oom => 0.0,
        }
    }

    /// Cost of the calls on every page of a range of so many bytes.
    fn per_page(&mut self, calls: &[DeviceCall], size_bytes: u64, is_small: bool) -> f64 {
        let large = !is_small && size_bytes.is_multiple_of(self.large_page_bytes);
        let page_bytes = if large { self.large_page_bytes } else { SMALL_PAGE_BYTES };
        let pages = size_bytes.div_ceil(page_bytes);
        calls.iter().map(|&call| self.meter.next_ns(call, page_bytes, pages)).sum()
    }
}
