//! A check of an allocator's contract by the hardware itself (`--touch`): every block gets a
//! pattern when it is handed out, which must still be there when it is freed.
//!
//! What two live blocks share shows in the one that was written first; memory without a mapping is
//! refused by the hardware at once.
//!
//! ```text
//!   full    │■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■│
//!   edges   │■■■■│        │■        │■        │■       │■■■■│   4 KiB, words at borders of
//!                         2 MiB     2 MiB     2 MiB             2 MiB pages, 4 KiB
//! ```
//!
//! The one design decision: the pattern of a block hangs on its id and on the event that asked for
//! it, and is never kept. What must be there is computed again where it is checked, by the GPU for
//! the bulk of it, so that 100 GiB of blocks need no host memory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Sink;
use crate::alloc::{Action, ActionKind};
use crate::device::{GRANULARITY_BYTES, Mismatch, Touch, TouchError};
use crate::units::random::Random;
use crate::units::{BlockId, Bytes, counted, grouped};

/// Blocks up to this size are touched whole whatever the mode: one call is cheaper than several.
const WHOLE_BYTES_MAX: u64 = 64 << 10;

/// What is touched of a block at either end.
const EDGE_BYTES: u64 = 4 << 10;

/// What is touched at the border of a page, in bytes: a word.
const WORD_BYTES: u64 = 4;

/// Most pages of a block that are touched between its ends: each is a call of its own, which takes
/// the GPU as long as writing tens of megabytes.
const PAGES_MAX: u64 = 14;

/// How much of every block is written and checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TouchMode {
    /// Nothing.
    #[default]
    None,
    /// Both ends, and the first word of some pages of 2 MiB in between.
    Edges,
    /// All of it.
    Full,
}

impl TouchMode {
    /// The name on the command line: `none`, `edges`, `full`.
    pub fn name(self) -> &'static str {
        match self {
            TouchMode::None => "none",
            TouchMode::Edges => "edges",
            TouchMode::Full => "full",
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TouchReport {
    /// How much of every block was written and checked.
    pub mode: TouchMode,
    /// Blocks that were written and checked.
    pub blocks: u64,
    /// Bytes of them that were written and checked.
    pub bytes: u64,
    /// Blocks that did not hold what was written there.
    pub mismatches: u64,
    /// The first of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<TouchMismatch>,
}

impl TouchReport {
    /// What was broken, in one line; nothing if nothing was.
    pub fn broken(&self) -> Option<String> {
        let first = self.first?;
        let others = match self.mismatches {
            0 | 1 => String::new(),
            count => format!("; {} blocks in all", grouped(count)),
        };
        Some(format!("{first}{others}"))
    }
}

/// A block that did not hold what was written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TouchMismatch {
    /// Event at which it was checked: it was freed, or the trace was over.
    pub event_index: u64,
    /// Event at which it was handed out and written.
    pub alloc_event_index: u64,
    /// The block of the trace.
    pub block_id: u32,
    /// Its first address.
    pub address: u64,
    /// Its size, as the program asked for it.
    pub size_bytes: u64,
    /// Where the first word that differs lies, in bytes from its first address.
    pub offset_bytes: u64,
    /// What was written there.
    pub expected: u32,
    /// What is there.
    pub found: u32,
    /// Words of 4 bytes that differ.
    pub words: u64,
}

impl std::fmt::Display for TouchMismatch {
    /// One line: which block, and how it differs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TouchMismatch { event_index, alloc_event_index, block_id, address, .. } = *self;
        let TouchMismatch { size_bytes, offset_bytes, expected, found, words, .. } = *self;
        write!(
            f,
            "memory was not the block's own: block {block_id} ({} at {address:#x}, handed out at \
             event {}) held {found:#010x} at offset {} at event {}, expected {expected:#010x}; {} \
             of 4 bytes differ",
            Bytes(size_bytes),
            grouped(alloc_event_index),
            grouped(offset_bytes),
            grouped(event_index),
            counted(words, "word"),
        )
    }
}

/// The hardware could not be written or read at a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchFailure {
    /// Event at which it showed.
    pub event_index: u64,
    /// The block of the trace.
    pub block_id: u32,
    /// What the driver said.
    pub error: TouchError,
}

/// A live block.
#[derive(Clone, Copy, Debug)]
struct Live {
    address: u64,
    size_bytes: u64,
    event_index: u64,
}

/// Writes every block that is handed out, and checks it when its memory is free again.
pub struct TouchSink {
    touch: Box<dyn Touch>,
    live: BTreeMap<BlockId, Live>,
    report: TouchReport,
    failure: Option<TouchFailure>,
    spent: Duration,
}

impl TouchSink {
    /// Touches memory through `touch`, as much of every block as `mode` says.
    pub fn new(touch: Box<dyn Touch>, mode: TouchMode) -> TouchSink {
        TouchSink {
            touch,
            live: BTreeMap::new(),
            report: TouchReport { mode, ..TouchReport::default() },
            failure: None,
            spent: Duration::ZERO,
        }
    }

    /// Why nothing can be touched any more, if so.
    pub fn failure(&self) -> Option<TouchFailure> {
        self.failure
    }

    /// How long writing and checking took so far.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Checks the blocks that are still live after the last event.
    pub fn finish(&mut self, event_index: u64) {
        let live = std::mem::take(&mut self.live);
        for (block, live) in live {
            self.timed(event_index, block, |sink| sink.check(event_index, block, live));
        }
    }

    /// What came of it.
    pub fn into_report(self) -> TouchReport {
        self.report
    }

    /// Does something with the memory of a block unless nothing works any more.
    fn timed(
        &mut self,
        event_index: u64,
        block: BlockId,
        what: impl FnOnce(&mut TouchSink) -> Result<(), TouchError>,
    ) {
        if self.failure.is_some() {
            return;
        }
        let begun = Instant::now();
        if let Err(error) = what(self) {
            self.failure = Some(TouchFailure { event_index, block_id: block.0, error });
        }
        self.spent += begun.elapsed();
    }

    fn fill(&mut self, event_index: u64, action: Action) -> Result<(), TouchError> {
        let Action { block, address, size_bytes, .. } = action;
        let seed = seed(block, event_index);
        for (offset_bytes, part_bytes) in parts(self.report.mode, address, size_bytes) {
            let seed = mixed(seed ^ offset_bytes);
            self.touch.fill(address.wrapping_add(offset_bytes), part_bytes, seed)?;
        }
        self.live.insert(block, Live { address, size_bytes, event_index });
        Ok(())
    }

    fn check(&mut self, event_index: u64, block: BlockId, live: Live) -> Result<(), TouchError> {
        let Live { address, size_bytes, event_index: alloc_event_index } = live;
        let seed = seed(block, alloc_event_index);
        let mut first: Option<Mismatch> = None;
        for (offset_bytes, part_bytes) in parts(self.report.mode, address, size_bytes) {
            self.report.bytes += part_bytes;
            let seed = mixed(seed ^ offset_bytes);
            let at = address.wrapping_add(offset_bytes);
            let Some(found) = self.touch.check(at, part_bytes, seed)? else { continue };
            let words = first.map_or(0, |first| first.words) + found.words;
            let found = Mismatch { offset_bytes: offset_bytes + found.offset_bytes, ..found };
            first = Some(Mismatch { words, ..first.unwrap_or(found) });
        }
        self.report.blocks += 1;
        if let Some(Mismatch { words, offset_bytes, expected, found }) = first {
            self.report.mismatches += 1;
            self.report.first.get_or_insert(TouchMismatch {
                event_index,
                alloc_event_index,
                block_id: block.0,
                address,
                size_bytes,
                offset_bytes,
                expected,
                found,
                words,
            });
        }
        Ok(())
    }
}

impl Sink for TouchSink {
    const LOG: bool = true;
    const LEVELS: bool = false;

    fn action(&mut self, event_index: u64, action: Action) {
        let block = action.block;
        match action.kind {
            ActionKind::Alloc => {
                self.timed(event_index, block, |sink| sink.fill(event_index, action));
            }
            ActionKind::FreeCompleted => {
                if let Some(live) = self.live.remove(&block) {
                    self.timed(event_index, block, |sink| sink.check(event_index, block, live));
                }
            }
            _ => {}
        }
    }
}

/// The parts of a block that are touched: offset and size in bytes, in order, none of them sharing
/// a word with another.
fn parts(mode: TouchMode, address: u64, size_bytes: u64) -> Vec<(u64, u64)> {
    match mode {
        TouchMode::None => return Vec::new(),
        TouchMode::Full => return vec![(0, size_bytes)],
        TouchMode::Edges if size_bytes <= WHOLE_BYTES_MAX => return vec![(0, size_bytes)],
        TouchMode::Edges => {}
    }
    let last = (size_bytes - EDGE_BYTES) / WORD_BYTES * WORD_BYTES;
    let mut parts = vec![(0, EDGE_BYTES)];
    // Offset of the first border of a page behind the first part, and how many there are.
    let to_border = |offset: u64| {
        (offset + address % GRANULARITY_BYTES).next_multiple_of(GRANULARITY_BYTES)
            - address % GRANULARITY_BYTES
    };
    let first = to_border(EDGE_BYTES);
    let pages = last.saturating_sub(first).div_ceil(GRANULARITY_BYTES);
    let touched = pages.min(PAGES_MAX);
    let page = |nth: u64| first + nth * pages / touched.max(1) * GRANULARITY_BYTES;
    parts.extend((0..touched).map(|nth| (page(nth), WORD_BYTES)));
    parts.push((last, size_bytes - last));
    parts
}

/// What the pattern of a block hangs on.
fn seed(block: BlockId, event_index: u64) -> u64 {
    mixed(u64::from(block.0) << 32 ^ event_index)
}

/// Numbers that differ in one bit become unlike each other.
fn mixed(seed: u64) -> u64 {
    Random::new(seed).bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    #[test]
    fn small_blocks_are_touched_whole() {
        for mode in [TouchMode::Edges, TouchMode::Full] {
            assert_eq!(parts(mode, 512, 5), [(0, 5)]);
            assert_eq!(parts(mode, 512, 64 << 10), [(0, 64 << 10)]);
        }
        assert_eq!(parts(TouchMode::Full, 512, 9 * MIB), [(0, 9 * MIB)]);
    }

    /// 5 MiB at 3 MiB: borders of pages at 4 and 6 MiB, offsets 1 and 3 MiB. 8 MiB is its end.
    #[test]
    fn edges_are_both_ends_and_borders_of_pages() {
        let expected = [(0, 4096), (MIB, 4), (3 * MIB, 4), (5 * MIB - 4096, 4096)];
        assert_eq!(parts(TouchMode::Edges, 3 * MIB, 5 * MIB), expected);
        // Three bytes more: the last part begins at a word, three bytes are its own.
        let last = parts(TouchMode::Edges, 3 * MIB, 5 * MIB - 509).pop();
        let from = (5 * MIB - 509 - 4096) / 4 * 4;
        assert_eq!(last, Some((from, 5 * MIB - 509 - from)));
    }

    /// 1 GiB has 511 borders between its ends; 14 of them, evenly: 0, 511 / 14 = 36, 73, ...
    #[test]
    fn large_blocks_are_touched_in_few_places() {
        let parts = parts(TouchMode::Edges, 0, 1 << 30);
        assert_eq!(parts.len(), 16);
        assert_eq!(parts[1], (2 * MIB, 4));
        assert_eq!(parts[2], (2 * MIB + 36 * 2 * MIB, 4));
        assert!(parts.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{parts:?}");
    }

    #[test]
    fn no_two_blocks_have_one_pattern() {
        let seeds = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(id, event)| seed(BlockId(id), event));
        assert!((1..4).all(|nth| !seeds[..nth].contains(&seeds[nth])), "{seeds:?}");
    }
}
