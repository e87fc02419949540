//! What fragmentation is made of at one moment (DESIGN 2): a pure function of a layout.
//!
//! ```text
//!   segment 1 (stream 0)  │ live 3.9 of 4 │ free 6 │ live │   free 6: hard (pinned by live blocks)
//!   segment 2 (stream 0)  │ free 20                  │        free 20: soft (a whole segment)
//!   segment 3 (stream 7)  │ free 20                  │        free 20: stream (not the request's)
//!                                      4 − 3.9: internal       waiting for a stream: deferred
//! ```

use serde::{Deserialize, Serialize};

use crate::alloc::{BlockState, LayoutBlock};
use crate::units::StreamId;

/// At which moment a split was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitAt {
    /// At the reserved peak.
    ReservedPeak,
    /// At the first refused request.
    Oom,
    /// At an event that was asked for.
    Event,
}

/// reserved − requested at one event, by kind; adds up exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Split {
    /// The event.
    pub at_event: u64,
    /// Which moment.
    pub at: SplitAt,
    /// Rounding inside allocated blocks.
    pub internal_bytes: u64,
    /// Freed by the program, waiting for another stream.
    pub deferred_bytes: u64,
    /// Free, in a segment that also holds a live block.
    pub hard_bytes: u64,
    /// Every other free byte.
    pub soft_bytes: u64,
    /// Free on another stream or pool than the request's.
    pub stream_bytes: u64,
}

/// Splits a layout, whose blocks come segment by segment, for a request on `stream` and `pool`.
pub fn split(
    layout: &[LayoutBlock],
    stream: StreamId,
    pool: u32,
    at: SplitAt,
    at_event: u64,
) -> Split {
    let mut split = Split {
        at_event,
        at,
        internal_bytes: 0,
        deferred_bytes: 0,
        hard_bytes: 0,
        soft_bytes: 0,
        stream_bytes: 0,
    };
    for segment in layout.chunk_by(|a, b| a.segment == b.segment) {
        let pinned = segment.iter().any(|block| block.state != BlockState::Free);
        for block in segment {
            if block.state == BlockState::Free && block.page_bytes > 0 {
                // A page wholly inside a free block holds no live block, any other one does:
                // memory is mapped in whole pages, and free neighbours are one block.
                let foreign = is_foreign(block, stream, pool);
                let soft_bytes = whole_page_bytes(block);
                if foreign {
                    split.stream_bytes += block.size_bytes;
                } else {
                    split.soft_bytes += soft_bytes;
                    split.hard_bytes += block.size_bytes - soft_bytes;
                }
                continue;
            }
            let class = match block.state {
                BlockState::Allocated => {
                    split.internal_bytes += block.size_bytes - block.requested_bytes;
                    continue;
                }
                BlockState::Deferred => &mut split.deferred_bytes,
                BlockState::Free if is_foreign(block, stream, pool) => &mut split.stream_bytes,
                BlockState::Free if pinned => &mut split.hard_bytes,
                BlockState::Free => &mut split.soft_bytes,
            };
            *class += block.size_bytes;
        }
    }
    split
}

/// Whether a free block serves other streams or another pool only.
pub(super) fn is_foreign(block: &LayoutBlock, stream: StreamId, pool: u32) -> bool {
    let any_stream = block.stream == StreamId::NONE;
    (block.stream != stream && !any_stream) || block.pool != pool
}

/// Bytes of the pages that lie wholly inside a block.
pub(super) fn whole_page_bytes(block: &LayoutBlock) -> u64 {
    let start = block.address - block.segment_address;
    let end = start + block.size_bytes;
    let first = start.next_multiple_of(block.page_bytes);
    let last = end - end % block.page_bytes;
    last.saturating_sub(first)
}
