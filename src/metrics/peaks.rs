//! The four peaks of DESIGN 2, each its own maximum, and where each was first reached.

use serde::Serialize;

use crate::alloc::Levels;

/// The peaks in bytes, each its own maximum, and the event at which each was first reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peaks {
    /// Sum of live requests; the same for every allocator that refused nothing.
    pub requested_bytes_peak: u64,
    /// Live blocks at rounded size.
    pub allocated_bytes_peak: u64,
    /// Allocated and deferred.
    pub active_bytes_peak: u64,
    /// Physical memory held.
    pub reserved_bytes_peak: u64,
    /// Event of the requested peak.
    pub requested_event: u64,
    /// Event of the allocated peak.
    pub allocated_event: u64,
    /// Event of the active peak.
    pub active_event: u64,
    /// Event of the reserved peak.
    pub reserved_event: u64,
}

/// Follows the levels. Cheap enough for the hot loop: levels rise only when a block is handed out,
/// so the loop shows them only then.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeakTracker {
    peaks: Peaks,
}

impl PeakTracker {
    /// Levels after an event that may have raised them.
    #[inline]
    pub fn observe(&mut self, event_index: u64, requested_bytes: u64, levels: Levels) {
        let peaks = &mut self.peaks;
        let raise = |peak: &mut u64, event: &mut u64, now: u64| {
            if now > *peak {
                *peak = now;
                *event = event_index;
            }
        };
        raise(&mut peaks.requested_bytes_peak, &mut peaks.requested_event, requested_bytes);
        raise(&mut peaks.allocated_bytes_peak, &mut peaks.allocated_event, levels.allocated_bytes);
        raise(&mut peaks.active_bytes_peak, &mut peaks.active_event, levels.active_bytes);
        self.observe_reserved(event_index, levels);
    }

    /// The reserved level alone: after an event that handed nothing out.
    #[inline]
    pub fn observe_reserved(&mut self, event_index: u64, levels: Levels) {
        if levels.reserved_bytes > self.peaks.reserved_bytes_peak {
            self.peaks.reserved_bytes_peak = levels.reserved_bytes;
            self.peaks.reserved_event = event_index;
        }
    }

    /// The peaks so far.
    pub fn peaks(&self) -> Peaks {
        self.peaks
    }
}
