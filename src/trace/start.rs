//! What was there before the first event: histories are ring buffers and often cut.
//!
//! ```text
//!   segments   ┌ segment 0 ─────────────────────────┐   ┌ segment 1 ──────────┐
//!   blocks     │ live b7 │ free    │ deferred b3    │   │ live b9             │
//!              └─────────┴─────────┴────────────────┘   └─────────────────────┘
//!               each segment is covered without gaps; free neighbours are one block
//! ```
//!
//! Never part of the events: `caching` starts from this layout as it stands, any other allocator is
//! asked for the live blocks before the first event.

use serde::{Deserialize, Serialize};

use crate::units::{BlockId, PoolId, StreamId};

/// The memory that the recorded allocator held when the history begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartLayout {
    /// Segments and mapped runs, by ascending address.
    pub segments: Vec<StartSegment>,
    /// The blocks of all segments, segment by segment, by ascending address.
    pub blocks: Vec<StartBlock>,
}

/// An ordinary segment, or a mapped run of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartSegment {
    /// Where it begins.
    pub address: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Its stream.
    pub stream: StreamId,
    /// Its private pool, or [`PoolId::NONE`] for the default pools.
    pub pool: PoolId,
    /// It belongs to a large pool, else to a small one.
    pub large: bool,
    /// For pages of an expandable segment: the address at which the reservation begins, as far as
    /// it can be told. Runs of one reservation name the same one.
    pub reservation: Option<u64>,
    /// How many of the blocks are its own.
    pub blocks: u32,
}

/// State of a block at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartState {
    /// In the program's hands.
    Live,
    /// Freed by the program, waiting for another stream.
    Deferred,
    /// Free.
    Free,
}

/// A block of the starting layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartBlock {
    /// Its size in bytes, as the allocator rounded it.
    pub size_bytes: u64,
    /// The block of the trace, or [`BlockId::NONE`] if free.
    pub block: BlockId,
    /// Its state.
    pub state: StartState,
    /// The size is a guess: the block was freed later, and may have been handed out with more than
    /// its rounded size.
    pub guessed: bool,
}

impl StartLayout {
    /// Every segment with its blocks.
    pub fn iter(&self) -> impl Iterator<Item = (StartSegment, &[StartBlock])> {
        let mut rest = self.blocks.as_slice();
        self.segments.iter().map(move |&segment| {
            let (blocks, later) = rest.split_at((segment.blocks as usize).min(rest.len()));
            rest = later;
            (segment, blocks)
        })
    }

    /// Memory held, in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.segments.iter().fold(0, |sum, segment| segment.size_bytes.saturating_add(sum))
    }

    /// Every block in use with its address.
    pub fn blocks_in_use(&self) -> impl Iterator<Item = (u64, StartBlock)> {
        self.iter().flat_map(|(segment, blocks)| {
            let mut address = segment.address;
            blocks.iter().filter_map(move |&block| {
                let at = address;
                address += block.size_bytes;
                (block.state != StartState::Free).then_some((at, block))
            })
        })
    }
}
