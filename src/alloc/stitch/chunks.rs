//! The physical chunks: which are in use, and which primitive block each belongs to.
//!
//! Chunks have dense ids, those of one segment in a row, so that a set of chunks is a row of bits
//! and a stretch of them a few words:
//!
//! ```text
//!   ids       0         50                  150        ids that a segment gave back are used again
//!   busy      1111111110 00000000001111111111          in a tensor's hands
//!   starts    1000000000 10000000001000000000          a primitive block begins here
//!   block_at  7          3         9                   which one
//!   handles   h h h h h  h h h ...                     what the device calls the chunk
//! ```
//!
//! Hence nothing is marked chunk by chunk, and a stitched block needs no notice of what happens to
//! its chunks: whether all are free is looked up when somebody asks.

use std::collections::BTreeMap;

use crate::device::{GRANULARITY_BYTES, PhysicalHandle};

/// Size of a chunk in bytes (gmlake spec 2.1).
pub(super) const CHUNK_BYTES: u64 = GRANULARITY_BYTES;

/// Most ids there may be: 128 TiB of chunks.
const CHUNKS_MAX: u64 = 1 << 26;

/// No chunk: memory that does not come in chunks.
pub(super) const NO_CHUNK: u32 = u32::MAX;

/// Chunks with ids in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) count: u32,
}

impl Run {
    /// The chunks of a block that begins with `first`.
    pub(super) fn of_bytes(first: u32, size_bytes: u64) -> Run {
        Run { first, count: (size_bytes / CHUNK_BYTES) as u32 }
    }

    pub(super) fn end(self) -> u32 {
        self.first + self.count
    }

    fn range(self) -> std::ops::Range<usize> {
        self.first as usize..self.end() as usize
    }

    /// The words of a row of bits that it covers, each with its part of the bits.
    #[inline]
    fn words(self) -> impl Iterator<Item = (usize, u64)> {
        let (first, last) = (self.first as usize, (self.end() - 1) as usize);
        (first / 64..=last / 64).map(move |word| {
            let mut mask = u64::MAX;
            if word == first / 64 {
                mask &= u64::MAX << (first % 64);
            }
            if word == last / 64 {
                mask &= u64::MAX >> (63 - last % 64);
            }
            (word, mask)
        })
    }
}

/// A set of chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    /// An empty set for ids below `count`.
    pub(super) fn for_count(count: usize) -> Bits {
        Bits(vec![0; count.div_ceil(64)])
    }

    #[inline]
    pub(super) fn set(&mut self, run: Run) {
        for (word, mask) in run.words() {
            self.0[word] |= mask;
        }
    }

    #[inline]
    pub(super) fn clear(&mut self, run: Run) {
        for (word, mask) in run.words() {
            self.0[word] &= !mask;
        }
    }

    /// The first of a run that is in the set.
    #[inline]
    fn first_of(&self, run: Run) -> Option<u32> {
        let mut hits = run.words().map(|(word, mask)| (word, self.0[word] & mask));
        let (word, bits) = hits.find(|&(_, bits)| bits != 0)?;
        Some(word as u32 * 64 + bits.trailing_zeros())
    }

    /// Whether none of a run is in the set.
    #[inline]
    pub(super) fn has_none_of(&self, run: Run) -> bool {
        run.words().all(|(word, mask)| self.0[word] & mask == 0)
    }

    /// Whether all of a run is in the set.
    pub(super) fn has_all_of(&self, run: Run) -> bool {
        run.words().all(|(word, mask)| self.0[word] & mask == mask)
    }

    /// How many of a run are in the set.
    pub(super) fn count_of(&self, run: Run) -> u32 {
        run.words().map(|(word, mask)| (self.0[word] & mask).count_ones()).sum()
    }

    /// The last member at or before `chunk`.
    #[inline]
    fn last_upto(&self, chunk: u32) -> u32 {
        let mut word = chunk as usize / 64;
        let mut bits = self.0[word] & (u64::MAX >> (63 - chunk as usize % 64));
        while bits == 0 && word > 0 {
            word -= 1;
            bits = self.0[word];
        }
        (word * 64) as u32 + 63_u32.saturating_sub(bits.leading_zeros())
    }
}

/// All chunks that there are.
#[derive(Clone, Debug, Default)]
pub(super) struct Chunks {
    handles: Vec<PhysicalHandle>,
    busy: Bits,
    starts: Bits,
    block_at: Vec<u32>,
    /// Ids that stand for nothing, neighbours joined: first id → count.
    spare: BTreeMap<u32, u32>,
}

impl Chunks {
    /// Number of ids, spare ones included.
    pub(super) fn len(&self) -> usize {
        self.handles.len()
    }

    /// Whether so many more can be kept.
    pub(super) fn has_room_for(&self, count: u64) -> bool {
        self.handles.len() as u64 + count <= CHUNKS_MAX
    }

    /// Takes chunks in, free and without a block. The caller asked [`Self::has_room_for`].
    pub(super) fn enter(&mut self, handles: &[PhysicalHandle]) -> Run {
        let count = handles.len() as u32;
        let fit = self.spare.iter().find(|&(_, &spare)| spare >= count);
        let first = match fit.map(|(&first, &spare)| (first, spare)) {
            Some((first, spare)) => {
                self.spare.remove(&first);
                if spare > count {
                    self.spare.insert(first + count, spare - count);
                }
                self.handles[first as usize..(first + count) as usize].copy_from_slice(handles);
                first
            }
            None => {
                let first = self.handles.len() as u32;
                self.handles.extend_from_slice(handles);
                let words = self.handles.len().div_ceil(64);
                self.busy.0.resize(words, 0);
                self.starts.0.resize(words, 0);
                self.block_at.resize(self.handles.len(), u32::MAX);
                first
            }
        };
        Run { first, count }
    }

    /// Takes chunks out, which are free.
    pub(super) fn leave(&mut self, run: Run) -> Vec<PhysicalHandle> {
        self.starts.clear(run);
        let (mut first, mut count) = (run.first, run.count);
        if let Some((&below, &spare)) = self.spare.range(..first).next_back()
            && below + spare == first
        {
            first = below;
            count += spare;
        }
        if let Some(spare) = self.spare.remove(&(first + count)) {
            count += spare;
        }
        self.spare.insert(first, count);
        self.handles(run).to_vec()
    }

    pub(super) fn handles(&self, run: Run) -> &[PhysicalHandle] {
        &self.handles[run.range()]
    }

    #[inline]
    pub(super) fn occupy(&mut self, run: Run) {
        self.busy.set(run);
    }

    #[inline]
    pub(super) fn vacate(&mut self, run: Run) {
        self.busy.clear(run);
    }

    /// Whether all chunks of a run are free.
    #[inline]
    pub(super) fn all_free(&self, run: Run) -> bool {
        self.busy.has_none_of(run)
    }

    /// The first busy chunk of a run.
    #[inline]
    pub(super) fn first_busy(&self, run: Run) -> Option<u32> {
        self.busy.first_of(run)
    }

    /// Whether a chunk is busy.
    #[inline]
    pub(super) fn is_busy(&self, chunk: u32) -> bool {
        self.busy.0[chunk as usize / 64] >> (chunk % 64) & 1 == 1
    }

    /// The busy chunks.
    pub(super) fn busy(&self) -> &Bits {
        &self.busy
    }

    /// A block begins with this chunk from here on.
    #[inline]
    pub(super) fn begin(&mut self, chunk: u32, block: u32) {
        self.starts.set(Run { first: chunk, count: 1 });
        self.block_at[chunk as usize] = block;
    }

    /// The block that began with this chunk belongs to the one before it.
    #[inline]
    pub(super) fn join(&mut self, chunk: u32) {
        self.starts.clear(Run { first: chunk, count: 1 });
    }

    /// The block that a chunk belongs to.
    #[inline]
    pub(super) fn block_of(&self, chunk: u32) -> u32 {
        self.block_at[self.starts.last_upto(chunk) as usize]
    }

    /// Whether a block begins at the first chunk of a run, and no other at the rest.
    pub(super) fn is_block(&self, run: Run, block: u32) -> bool {
        self.starts.count_of(run) == 1 && self.block_of(run.first) == block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u32, count: u32) -> Run {
        Run { first, count }
    }

    #[test]
    fn runs_across_words_are_set_and_looked_up() {
        let mut bits = Bits::for_count(300);
        bits.set(run(60, 140));
        assert!(bits.has_none_of(run(0, 60)) && bits.has_none_of(run(200, 100)));
        assert!(bits.has_all_of(run(60, 140)) && !bits.has_all_of(run(59, 2)));
        bits.clear(run(64, 64));
        assert_eq!(bits.count_of(run(0, 300)), 140 - 64);
        assert_eq!(bits.last_upto(127), 63);
        assert_eq!(bits.last_upto(299), 199);
    }

    #[test]
    fn ids_of_a_segment_that_went_are_used_again() {
        let mut chunks = Chunks::default();
        let handles = |from: u64, count: u64| {
            (from..from + count).map(PhysicalHandle).collect::<Vec<PhysicalHandle>>()
        };
        let low = chunks.enter(&handles(0, 100));
        let middle = chunks.enter(&handles(100, 50));
        let high = chunks.enter(&handles(150, 10));
        chunks.begin(low.first, 1);
        chunks.begin(middle.first, 2);
        chunks.begin(high.first, 3);
        assert_eq!(chunks.block_of(149), 2);
        assert_eq!(chunks.leave(middle), handles(100, 50));
        assert_eq!(chunks.leave(low).len(), 100);
        assert_eq!(chunks.enter(&handles(200, 120)), run(0, 120), "joined neighbours");
        assert_eq!(chunks.handles(run(119, 1)), handles(319, 1));
        assert_eq!(chunks.enter(&handles(400, 31)), run(160, 31), "30 were left");
        assert_eq!(chunks.len(), 191);
    }
}
