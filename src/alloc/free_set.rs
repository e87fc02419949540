//! Free blocks ordered by (size, address), for every allocator that takes the best fit.
//!
//! The order must be exact, since it decides which of several fitting blocks is taken
//! (specs/pytorch_caching.md 3.2). A
//! balanced tree would do; this is faster, because most bins hold no block or one:
//!
//! ```text
//!   size ──class──> bin:  first │ rest: [ (size, address, block), ... ]  in order, open at both ends
//!
//!   occupied: one bit a bin, one summary bit a word of bits: the next non-empty bin in two steps
//! ```
//!
//! A class is a power of two of 512-byte units, cut in 32; below 16 KiB every size has its own.
//! Long bins are mostly of one size, and change near their ends: mallocs take the lowest address,
//! and what a forward pass leaves or a backward pass merges lies at the highest. Hence a deque,
//! which moves the shorter side.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;

use super::ALIGNMENT_BYTES;

/// Bins a power of two is cut in: 2^5.
const SUB_BITS: u32 = 5;
/// Classes: sizes up to 2^63 bytes are 2^54 units.
const CLASSES: usize = (54 - SUB_BITS as usize + 2) << SUB_BITS;
const WORDS: usize = CLASSES.div_ceil(64);

/// A free block in the set. Ordered by size, then address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its size, a multiple of 512 and not 0.
    pub size_bytes: u64,
    /// Its first address.
    pub address: u64,
    /// The allocator's own number for it.
    pub block: u32,
}

impl Entry {
    /// Stands for no entry, and comes after all others.
    const NONE: Entry = Entry { size_bytes: u64::MAX, address: u64::MAX, block: u32::MAX };

    /// Size and address as one number.
    #[inline]
    fn key(&self) -> u128 {
        u128::from(self.size_bytes) << 64 | u128::from(self.address)
    }
}

/// The entries of one class of sizes, in one cache line.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Bin {
    /// The first in order, or [`Entry::NONE`].
    first: Entry,
    /// All others in order.
    rest: VecDeque<Entry>,
    /// All others instead, once they are so many that moving entries would cost more than a tree.
    #[expect(clippy::box_collection, reason = "bins are read at every malloc and should be small")]
    many: Option<Box<BTreeSet<Entry>>>,
}

/// A bin with more entries than this keeps them in a tree. Recorded jobs stay far below.
const REST_MAX: usize = 1024;

/// Free blocks in the order (size, address).
#[derive(Clone, Debug)]
pub struct FreeSet {
    /// As many as the largest class so far needs: a process may have many streams, most with few
    /// sizes.
    bins: Vec<Bin>,
    occupied: [u64; WORDS],
    summary: u64,
}

const _: () = assert!(WORDS <= 64, "one summary word covers all words");

impl Default for FreeSet {
    fn default() -> Self {
        FreeSet { bins: Vec::new(), occupied: [0; WORDS], summary: 0 }
    }
}

/// The bin of a size, which is a multiple of 512 and not 0.
#[inline]
fn class(size_bytes: u64) -> usize {
    let units = size_bytes / ALIGNMENT_BYTES;
    let top = units.ilog2();
    if top < SUB_BITS {
        return units as usize;
    }
    let shift = top - SUB_BITS;
    (((shift + 1) as usize) << SUB_BITS) + ((units >> shift) as usize & ((1 << SUB_BITS) - 1))
}

impl Bin {
    const EMPTY: Bin = Bin { first: Entry::NONE, rest: VecDeque::new(), many: None };

    #[inline]
    fn is_empty(&self) -> bool {
        self.first.block == u32::MAX
    }

    /// Whether the first entry is the only one.
    #[inline]
    fn is_alone(&self) -> bool {
        self.rest.is_empty() && self.many.is_none()
    }

    /// The first entry of at least this size behind the first.
    #[inline(never)]
    fn later_fit(&self, size_bytes: u64) -> Option<Entry> {
        if let Some(many) = &self.many {
            return many.range(Entry { size_bytes, address: 0, block: 0 }..).next().copied();
        }
        self.rest.get(position(&self.rest, u128::from(size_bytes) << 64)).copied()
    }

    /// Adds an entry to a bin that has some. The parts come one by one so that they travel in
    /// registers: an [`Entry`] would be stored and loaded again in wider pieces, which stalls.
    #[inline(never)]
    fn insert_later(&mut self, size_bytes: u64, address: u64, block: u32) {
        let entry = Entry { size_bytes, address, block };
        if self.many.is_some() || self.rest.len() >= REST_MAX {
            self.insert_many(entry);
        } else if entry.key() < self.first.key() {
            self.rest.push_front(std::mem::replace(&mut self.first, entry));
        } else {
            match position(&self.rest, entry.key()) {
                at if at == self.rest.len() => self.rest.push_back(entry),
                at => self.rest.insert(at, entry),
            }
        }
    }

    #[cold]
    fn insert_many(&mut self, entry: Entry) {
        let rest = &mut self.rest;
        let many = self.many.get_or_insert_with(|| Box::new(rest.drain(..).collect()));
        let later = if entry.key() < self.first.key() {
            std::mem::replace(&mut self.first, entry)
        } else {
            entry
        };
        many.insert(later);
    }

    /// Takes the first of several in order out.
    #[inline(never)]
    fn pop_first(&mut self) {
        let second = match &mut self.many {
            None => self.rest.pop_front(),
            Some(many) => many.pop_first(),
        };
        self.first = second.unwrap_or(Entry::NONE);
    }

    /// Takes an entry out that is not the first.
    #[inline(never)]
    fn remove_later(&mut self, size_bytes: u64, address: u64, block: u32) {
        let entry = Entry { size_bytes, address, block };
        if let Some(many) = &mut self.many {
            let found = many.remove(&entry);
            debug_assert!(found, "the entry is in the set");
            return;
        }
        let removed = self.rest.remove(position(&self.rest, entry.key()));
        debug_assert_eq!(removed, Some(entry), "the entry is in the set");
    }

    fn largest(&self) -> Entry {
        let later = match &self.many {
            None => self.rest.back(),
            Some(many) => many.last(),
        };
        *later.unwrap_or(&self.first)
    }

    /// The entry that follows one of this bin.
    fn after(&self, entry: Entry) -> Option<Entry> {
        if let Some(many) = &self.many {
            let behind = (Bound::Excluded(entry), Bound::Unbounded);
            return many.range(behind).next().copied();
        }
        let at = if entry == self.first { 0 } else { position(&self.rest, entry.key()) + 1 };
        self.rest.get(at).copied()
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = Entry> + '_ {
        let first = (!self.is_empty()).then_some(&self.first);
        let many = self.many.iter().flat_map(|many| many.iter());
        first.into_iter().chain(&self.rest).chain(many).copied()
    }
}

impl FreeSet {
    /// Adds a block.
    #[inline(always)]
    pub fn insert(&mut self, entry: Entry) {
        let class = class(entry.size_bytes);
        if class >= self.bins.len() {
            self.grow(class);
        }
        let bin = &mut self.bins[class];
        if bin.is_empty() {
            bin.first = entry;
            self.occupied[class / 64] |= 1 << (class % 64);
            self.summary |= 1 << (class / 64);
        } else {
            bin.insert_later(entry.size_bytes, entry.address, entry.block);
        }
    }

    #[cold]
    fn grow(&mut self, class: usize) {
        self.bins.resize(class + 1, Bin::EMPTY);
    }

    /// Takes a block out, which must be in the set.
    #[inline(always)]
    pub fn remove(&mut self, entry: Entry) {
        let class = class(entry.size_bytes);
        let bin = &mut self.bins[class];
        if bin.first.block != entry.block {
            bin.remove_later(entry.size_bytes, entry.address, entry.block);
        } else if bin.is_alone() {
            bin.first.block = u32::MAX;
            self.vacate(class);
        } else {
            bin.pop_first();
            if bin.is_empty() {
                self.vacate(class);
            }
        }
    }

    #[inline(always)]
    fn vacate(&mut self, class: usize) {
        let word = &mut self.occupied[class / 64];
        *word &= !(1 << (class % 64));
        if *word == 0 {
            self.summary &= !(1 << (class / 64));
        }
    }

    /// The first block of at least this size: the smallest, and among equals the lowest address.
    #[inline(always)]
    pub fn first_fit(&self, size_bytes: u64) -> Option<Entry> {
        let class = class(size_bytes);
        let bin = self.bins.get(class)?;
        if !bin.is_empty() {
            if bin.first.size_bytes >= size_bytes {
                return Some(bin.first);
            }
            if let Some(entry) = bin.later_fit(size_bytes) {
                return Some(entry);
            }
        }
        self.next_occupied(class + 1).map(|class| self.bins[class].first)
    }

    /// The block that follows one in order, which must be in the set.
    pub fn after(&self, entry: Entry) -> Option<Entry> {
        let class = class(entry.size_bytes);
        let later = self.bins[class].after(entry);
        later.or_else(|| self.next_occupied(class + 1).map(|class| self.bins[class].first))
    }

    /// Every block of at least this size, in order.
    pub fn at_least(&self, size_bytes: u64) -> impl DoubleEndedIterator<Item = Entry> + '_ {
        let bins = self.occupied_from(class(size_bytes));
        bins.flat_map(Bin::iter).filter(move |entry| entry.size_bytes >= size_bytes)
    }

    /// The largest block.
    pub fn largest(&self) -> Option<Entry> {
        self.occupied_from(0).next_back().map(Bin::largest)
    }

    /// Whether there is no block.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.summary == 0
    }

    /// Every block in order.
    pub fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.occupied_from(0).flat_map(Bin::iter)
    }

    /// Every bin with entries at or after `class`, in order. Takes no longer for bins without: a
    /// process may have thousands of streams whose sets are empty.
    fn occupied_from(&self, class: usize) -> impl DoubleEndedIterator<Item = &Bin> + '_ {
        let words = Bits(self.summary & (u64::MAX << (class / 64)));
        words.flat_map(move |word| {
            let first = if word == class / 64 { class % 64 } else { 0 };
            let bits = Bits(self.occupied[word] & (u64::MAX << first));
            bits.map(move |bit| &self.bins[word * 64 + bit])
        })
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
}

/// The numbers of the bits that are set, in order.
#[derive(Clone, Copy, Debug)]
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let lowest = (self.0 != 0).then(|| self.0.trailing_zeros())?;
        self.0 &= self.0 - 1;
        Some(lowest as usize)
    }
}

impl DoubleEndedIterator for Bits {
    fn next_back(&mut self) -> Option<usize> {
        let highest = self.0.checked_ilog2()?;
        self.0 &= !(1 << highest);
        Some(highest as usize)
    }
}

/// How many entries come before a key: the place where an entry with that key is or would go.
#[inline]
fn position(rest: &VecDeque<Entry>, key: u128) -> usize {
    let before = |entry: &Entry| entry.key() < key;
    match (rest.front(), rest.back()) {
        (Some(_), Some(last)) if before(last) => rest.len(),
        (Some(next), Some(_)) if before(next) => rest.partition_point(before),
        _ => 0,
    }
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
                let class = class(units * ALIGNMENT_BYTES);
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
            let size_bytes = units * ALIGNMENT_BYTES;
            if random() % 3 > 0 || model.is_empty() {
                let entry = Entry { size_bytes, address: random() % 97 * 512, block: step };
                if !model.iter().any(|e| (e.size_bytes, e.address) == (size_bytes, entry.address)) {
                    set.insert(entry);
                    model.insert(entry);
                }
            } else {
                let index = random() as usize % model.len();
                let entry = *model.iter().nth(index).expect("in range");
                set.remove(entry);
                model.remove(&entry);
            }
            let key = Entry { size_bytes, address: 0, block: 0 };
            assert_eq!(set.first_fit(size_bytes), model.range(key..).next().copied());
            assert_eq!(set.largest(), model.last().copied());
            if let Some(fit) = set.first_fit(size_bytes) {
                let behind = (Bound::Excluded(fit), Bound::Unbounded);
                assert_eq!(set.after(fit), model.range(behind).next().copied());
            }
            if step % 512 == 0 {
                assert!(set.iter().eq(model.iter().copied()));
                assert!(set.at_least(size_bytes).rev().eq(model.range(key..).rev().copied()));
            }
        }
    }

    /// Bins of a few dozen equal blocks, changed at random, at the ends and in the middle.
    #[test]
    fn a_bin_of_equal_blocks_behaves_as_an_ordered_set() {
        let mut set = FreeSet::default();
        let mut model: BTreeSet<Entry> = BTreeSet::new();
        let mut state = 1u64;
        for block in 0..20_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let random = (state >> 33) as usize;
            let grow = model.len() < 20 || (random.is_multiple_of(2) && model.len() < 90);
            if grow {
                let address = (random as u64 % 1_000) * 4_096;
                let entry = Entry { size_bytes: 20 << 20, address, block };
                if !model.iter().any(|known| known.address == address) {
                    set.insert(entry);
                    model.insert(entry);
                }
            } else {
                let at = [0, model.len() - 1, random % model.len()][random % 3];
                let entry = *model.iter().nth(at).expect("in range");
                set.remove(entry);
                model.remove(&entry);
            }
            assert_eq!(set.first_fit(20 << 20), model.first().copied());
            assert_eq!(set.first_fit((20 << 20) + 512), None);
            assert_eq!(set.largest(), model.last().copied());
        }
        assert!(set.iter().eq(model.iter().copied()));
    }

    /// A bin of thousands of equal blocks goes over to a tree and behaves as before.
    #[test]
    fn a_long_bin_behaves_as_an_ordered_set() {
        let mut set = FreeSet::default();
        let mut model: BTreeSet<Entry> = BTreeSet::new();
        let entry = |block: u32| {
            // 4,099 is prime: addresses in no order.
            let address = u64::from(block) * 1_237 % 4_099 * 4_096;
            Entry { size_bytes: 20 << 20, address, block }
        };
        for block in 0..4_000 {
            set.insert(entry(block));
            model.insert(entry(block));
            assert_eq!(set.first_fit(11 << 20), model.first().copied());
            assert_eq!(set.largest(), model.last().copied());
        }
        assert!(set.iter().eq(model.iter().copied()));
        for block in (0..4_000).rev() {
            set.remove(entry(block));
            model.remove(&entry(block));
            assert_eq!(set.first_fit(20 << 20), model.first().copied());
        }
        assert_eq!(set.iter().next(), None);
        set.insert(entry(1));
        assert_eq!(set.first_fit(512), Some(entry(1)));
    }
}
