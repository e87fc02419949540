//! Which free pieces make up a view.
//!
//! Of all free blocks, the one with the largest back of a piece gives the first piece and the whole
//! ones behind it; the one with the largest front of a piece gives the last, and the whole ones
//! before it; between them come whole pieces, from the blocks that have most of them.
//!
//! ```text
//!   free blocks   │▒▒▒│ 2 │ 3 │▒│     │▒│ 8 │▒▒▒│      │ 20 │ 21 │ 22 │
//!   view          │▒▒▒│ 2 │ 3 │ 20 │ 21 │ 22 │ 8 │▒▒▒│       ▒: part of a piece
//! ```

use super::Best;
use super::heap::{Heap, Run, UNIT_BYTES};

/// Free blocks that are looked at, the largest, while new memory can be had: a view of more would
/// cost more than it saves, and looking at them takes time.
pub(super) const RUNS_USUAL: usize = 256;
/// The same where nothing else is left.
pub(super) const RUNS_MAX: usize = 4096;

/// Pieces for a view.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    pub(super) pieces: Vec<u32>,
    /// Bytes of the first piece that are not free.
    pub(super) skip_bytes: u64,
    /// Room for a block.
    pub(super) bytes: u64,
    /// Free blocks that were looked at, at most.
    pub(super) runs_max: usize,
}

impl Gathered {
    /// Memory that has to be added for a block.
    pub(super) fn missing_bytes(&self, size_bytes: u64) -> u64 {
        size_bytes.saturating_sub(self.bytes).next_multiple_of(UNIT_BYTES)
    }

    fn add(&mut self, heap: &Heap, whole: &[u32], wanted_bytes: u64) {
        for &piece in whole {
            if self.bytes >= wanted_bytes {
                break;
            }
            self.pieces.push(piece);
            self.bytes += heap.pieces[piece as usize].size_bytes;
        }
    }
}

impl Best {
    /// Free pieces for a block of `size_bytes` from the largest `runs_max` free blocks, or all that
    /// these have if they are not enough.
    pub(super) fn gather(&self, arena: u32, size_bytes: u64, runs_max: usize) -> Gathered {
        let heap = &self.heap;
        let free = heap.arenas[arena as usize].free.at_least(UNIT_BYTES / 2).rev();
        let mut runs: Vec<Run> = free.take(runs_max).map(|entry| heap.run(entry.block)).collect();
        let mut got = Gathered { runs_max, ..Gathered::default() };
        if let Some(first) = take_largest(&mut runs, |run| run.back)
            && let Some((piece, bytes)) = first.back
        {
            got.pieces.push(piece);
            got.skip_bytes = heap.pieces[piece as usize].size_bytes - bytes;
            got.bytes = bytes;
            got.add(heap, &first.whole, size_bytes);
        }
        let last = take_largest(&mut runs, |run| run.front).unwrap_or_default();
        let last_bytes = last.whole_bytes + last.front.map_or(0, |(_, bytes)| bytes);
        runs.sort_by_key(|run| std::cmp::Reverse(run.whole_bytes));
        for run in &runs {
            got.add(heap, &run.whole, size_bytes.saturating_sub(last_bytes));
        }
        got.add(heap, &last.whole, size_bytes);
        if let Some((piece, bytes)) = last.front.filter(|_| got.bytes < size_bytes) {
            got.pieces.push(piece);
            got.bytes += bytes;
        }
        got
    }
}

/// Takes the run with the largest part of a piece at one end out, the first of equals.
fn take_largest(runs: &mut Vec<Run>, end: fn(&Run) -> Option<(u32, u64)>) -> Option<Run> {
    let bytes = |at: &usize| end(&runs[*at]).map(|(_, bytes)| (bytes, std::cmp::Reverse(*at)));
    let at = (0..runs.len()).filter(|at| bytes(at).is_some()).max_by_key(bytes)?;
    Some(runs.remove(at))
}
