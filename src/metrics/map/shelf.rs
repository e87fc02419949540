//! Where segments stand side by side: the smallest gap that fits, else on top.

use std::collections::{BTreeMap, BTreeSet};

/// Places for segments, reused once they are gone.
#[derive(Clone, Debug, Default)]
pub(super) struct Shelf {
    height_bytes: u64,
    /// Gaps by position, neighbours joined: size in bytes.
    gaps: BTreeMap<u64, u64>,
    /// The same by size.
    by_size: BTreeSet<(u64, u64)>,
}

impl Shelf {
    /// How high it ever was, in bytes.
    pub(super) fn height_bytes(&self) -> u64 {
        self.height_bytes
    }

    /// Takes a place; gives its position.
    pub(super) fn take(&mut self, size_bytes: u64) -> u64 {
        let Some(&(gap_bytes, at)) = self.by_size.range((size_bytes, 0)..).next() else {
            let at = self.height_bytes;
            self.height_bytes = at.saturating_add(size_bytes);
            return at;
        };
        self.remove(at, gap_bytes);
        if gap_bytes > size_bytes {
            self.insert(at + size_bytes, gap_bytes - size_bytes);
        }
        at
    }

    /// Gives a place back.
    pub(super) fn give(&mut self, at: u64, size_bytes: u64) {
        let (mut from, mut to) = (at, at.saturating_add(size_bytes));
        let below = self.gaps.range(..from).next_back().map(|(&at, &bytes)| (at, bytes));
        if let Some((at, bytes)) = below.filter(|(at, bytes)| at + bytes == from) {
            self.remove(at, bytes);
            from = at;
        }
        if let Some(&bytes) = self.gaps.get(&to) {
            self.remove(to, bytes);
            to += bytes;
        }
        self.insert(from, to - from);
    }

    fn insert(&mut self, at: u64, bytes: u64) {
        self.gaps.insert(at, bytes);
        self.by_size.insert((bytes, at));
    }

    fn remove(&mut self, at: u64, bytes: u64) {
        self.gaps.remove(&at);
        self.by_size.remove(&(bytes, at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_gap_that_fits_is_taken_and_neighbours_join() {
        let mut shelf = Shelf::default();
        assert_eq!([10, 20, 30, 40].map(|bytes| shelf.take(bytes)), [0, 10, 30, 60]);
        shelf.give(10, 20);
        shelf.give(60, 40);
        assert_eq!(shelf.take(15), 10, "20 is the smallest that fits 15");
        assert_eq!(shelf.take(5), 25, "what is left of it");
        shelf.give(30, 30);
        assert_eq!(shelf.take(70), 30, "30 and 40 are one gap now");
        assert_eq!(shelf.take(1), 100, "nothing is free below the top");
        assert_eq!(shelf.height_bytes(), 101);
    }
}
