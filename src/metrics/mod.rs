//! Sinks that watch a replay, and pure functions of a layout.

use serde::Serialize;

/// One row of the decision log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DecisionRow {
    /// Index of the event during which it happened.
    pub event_index: u64,
    /// alloc, free, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom,
    /// empty_cache or device_refused.
    pub action: &'static str,
    /// The block concerned.
    pub block_id: Option<u32>,
    /// Ordinal of the segment in order of creation.
    pub segment_id: Option<u32>,
    /// Offset in the segment.
    pub offset_bytes: Option<u64>,
    /// Bytes: for blocks what the program asked for.
    pub size_bytes: u64,
    /// Address, where there is one.
    pub address: Option<u64>,
}

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
