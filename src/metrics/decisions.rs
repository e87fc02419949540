//! The decision log: a row an action.

use serde::Serialize;

use super::Sink;
use crate::alloc::Action;

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

impl DecisionRow {
    /// The row of an action.
    pub fn new(event_index: u64, action: Action) -> DecisionRow {
        let placed = action.segment != u32::MAX;
        DecisionRow {
            event_index,
            action: action.kind.name(),
            block_id: action.block.some().map(|block| block.0),
            segment_id: placed.then_some(action.segment),
            offset_bytes: placed.then_some(action.offset_bytes),
            size_bytes: action.size_bytes,
            address: placed.then_some(action.address),
        }
    }
}

/// Keeps every row.
#[derive(Clone, Debug, Default)]
pub struct Decisions {
    /// The rows so far.
    pub rows: Vec<DecisionRow>,
}

impl Sink for Decisions {
    const LOG: bool = true;
    const LEVELS: bool = false;

    fn action(&mut self, event_index: u64, action: Action) {
        self.rows.push(DecisionRow::new(event_index, action));
    }
}
