//! The time line: levels after every event.

use serde::Serialize;

use super::Sink;
use crate::alloc::Levels;

/// One row of the time line: levels after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TimelineRow {
    /// Index of the event.
    pub event_index: u64,
    /// Simulated nanoseconds since the first event.
    pub time_ns: u64,
    /// Index into the trace's phases, if one has begun.
    pub phase: Option<u32>,
    /// Sum of live requests.
    pub requested_bytes: u64,
    /// Live blocks at rounded size.
    pub allocated_bytes: u64,
    /// Allocated and deferred.
    pub active_bytes: u64,
    /// Physical memory held.
    pub reserved_bytes: u64,
}

/// Keeps a row an event. Until the engine adds the program's own time, `time_ns` is the device's
/// alone.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The rows so far.
    pub rows: Vec<TimelineRow>,
}

impl Sink for Timeline {
    const LOG: bool = false;
    const LEVELS: bool = true;

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, device_ns: u64) {
        self.rows.push(TimelineRow {
            event_index: event,
            time_ns: device_ns,
            phase: None,
            requested_bytes,
            allocated_bytes: levels.allocated_bytes,
            active_bytes: levels.active_bytes,
            reserved_bytes: levels.reserved_bytes,
        });
    }
}
