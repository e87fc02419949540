//! The free blocks of one stream in one pool, ordered by (size, address).
//!
//! The order must be exact, since it decides which of several fitting blocks is taken (spec 3.2). A
//! balanced tree would do; this is faster, because a free set is small and requests repeat:
//!
//! ```text
//!   size ──class──> bin:  [ (size, address, block), ... ]   sorted, mostly 0 to 3 entries
//!
//!   occupied: one bit a bin, one summary bit a word of bits: the next non-empty bin in two steps
//! ```
//!
//! A class is a power of two of 512-byte units, cut in 32; below 16 KiB every size has its own.

use super::config::MIN_BLOCK_BYTES;

/// Bins a power of two is cut in: 2^5.
const SUB_BITS: u32 = 5;
/// Classes: sizes up to 2^63 bytes are 2^54 units.
const CLASSES: usize = (54 - SUB_BITS as usize + 2) << SUB_BITS;
const WORDS: usize = CLASSES.div_ceil(64);

/// A free block in the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) size_bytes: u64,
    pub(super) address: u64,
    pub(super) block: u32,
}

/// Free blocks in the order (size, address).
#[derive(Clone, Debug)]
pub(super) struct FreeSet {
    bins: Box<[Vec<Entry>]>,
    occupied: [u64; WORDS],
    summary: u64,
}

const _: () = assert!(WORDS <= 64, "one summary word covers all words");

impl Default for FreeSet {
    fn default() -> Self {
        FreeSet { bins: vec![Vec::new(); CLASSES].into(), occupied: [0; WORDS], summary: 0 }
    }
}

/// The bin of a size, which is a multiple of 512 and not 0.
#[inline]
fn class(size_bytes: u64) -> usize {
    let units = size_bytes / MIN_BLOCK_BYTES;
    let top = units.ilog2();
    if top < SUB_BITS {
        return units as usize;
    }
    let shift = top - SUB_BITS;
    (((shift + 1) as usize) << SUB_BITS) + ((units >> shift) as usize & ((1 << SUB_BITS) - 1))
}

impl FreeSet {
    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        let class = class(entry.size_bytes);
        let bin = &mut self.bins[class];
        let at = position(bin, entry.size_bytes, entry.address);
        bin.insert(at, entry);
        self.occupied[class / 64] |= 1 << (class % 64);
        self.summary |= 1 << (class / 64);
    }

    /// Takes a block out.
    #[inline]
    pub(super) fn remove(&mut self, size_bytes: u64, address: u64) {
        let class = class(size_bytes);
        let at = position(&self.bins[class], size_bytes, address);
        self.remove_at(class, at);
    }

    #[inline]
    fn remove_at(&mut self, class: usize, at: usize) {
        let bin = &mut self.bins[class];
        bin.remove(at);
        if bin.is_empty() {
            let word = &mut self.occupied[class / 64];
            *word &= !(1 << (class % 64));
            if *word == 0 {
                self.summary &= !(1 << (class / 64));
            }
        }
    }

    /// The first block of at least this size: the smallest, and among equals the lowest address.
    #[inline]
    pub(super) fn first_fit(&self, size_bytes: u64) -> Option<Entry> {
        let class = class(size_bytes);
        let fit = self.bins[class].iter().find(|entry| entry.size_bytes >= size_bytes);
        match fit {
            Some(entry) => Some(*entry),
            None => self.bins[self.next_occupied(class + 1)?].first().copied(),
        }
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<Entry> {
        self.bins[self.previous_occupied(CLASSES)?].last().copied()
    }

    /// Every block in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.bins.iter().flatten().copied()
    }

    /// The first occupied bin at or after `class`.
    #[inline]
    fn next_occupied(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.occupied[word] & (u64::MAX << (class % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let later = self.summary & (u64::MAX << word) & !(1 << word);
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }

    /// The last occupied bin before `class`.
    fn previous_occupied(&self, class: usize) -> Option<usize> {
        (0..class).rev().find(|&at| self.occupied[at / 64] >> (at % 64) & 1 == 1)
    }
}

/// Where an entry stands, or would stand, in a sorted bin.
#[inline]
fn position(bin: &[Entry], size_bytes: u64, address: u64) -> usize {
    // Bins are short nearly always; a long one (thousands of equal blocks) is searched by halves.
    if bin.len() > 16 {
        return bin
            .partition_point(|entry| (entry.size_bytes, entry.address) < (size_bytes, address));
    }
    bin.iter()
        .position(|entry| (entry.size_bytes, entry.address) >= (size_bytes, address))
        .unwrap_or(bin.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn classes_are_monotone_and_in_range() {
        let mut last = 0;
        for exponent in 0..54u32 {
            for sub in 0..64u64 {
                let units = (1u64 << exponent) + ((sub << exponent) >> 6);
                let class = class(units * MIN_BLOCK_BYTES);
                assert!(class >= last && class < CLASSES, "units {units}");
                last = class;
            }
        }
    }

    #[test]
    fn behaves_as_an_ordered_set() {
        let mut set = FreeSet::default();
        let mut model: BTreeSet<Entry> = BTreeSet::new();
        let mut state = 0x1234_5678_9abc_def0u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for step in 0..20_000u32 {
            let units = 1 + random() % (1 << (random() % 24));
            let size_bytes = units * MIN_BLOCK_BYTES;
            if random() % 3 > 0 || model.is_empty() {
                let entry = Entry { size_bytes, address: random() % 97 * 512, block: step };
                if !model.iter().any(|e| (e.size_bytes, e.address) == (size_bytes, entry.address)) {
                    set.insert(entry);
                    model.insert(entry);
                }
            } else {
                let index = random() as usize % model.len();
                let entry = *model.iter().nth(index).expect("in range");
                set.remove(entry.size_bytes, entry.address);
                model.remove(&entry);
            }
            let key = Entry { size_bytes, address: 0, block: 0 };
            assert_eq!(set.first_fit(size_bytes), model.range(key..).next().copied());
            assert_eq!(set.largest(), model.last().copied());
            if step % 512 == 0 {
                assert!(set.iter().eq(model.iter().copied()));
            }
        }
    }
}
