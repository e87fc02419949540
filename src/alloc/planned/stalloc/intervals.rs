//! What is free in the static pool, and whose stream used it last.
//!
//! ```text
//!   offsets   0        8 KiB            12 KiB     16 KiB
//!   pool      │ weights │ free           │ block    │ free ...     free ranges never touch
//!   listed            ├──── window ────────────┤                 free during a layer
//!   candidates        ├──┤ listed and free                       best fit: the smallest that fits
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use crate::units::StreamId;

/// Free ranges of the pool: start to end. No two touch.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeIntervals {
    free: BTreeMap<u64, u64>,
}

impl FreeIntervals {
    /// A pool of which all is free.
    pub(super) fn whole(pool_bytes: u64) -> FreeIntervals {
        let whole = (pool_bytes > 0).then_some((0, pool_bytes));
        FreeIntervals { free: whole.into_iter().collect() }
    }

    /// Free ranges, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.free.iter().map(|(&start, &end)| start..end)
    }

    /// Whether all of a range is free.
    pub(super) fn holds(&self, range: &Range<u64>) -> bool {
        let below = self.free.range(..=range.start).next_back();
        below.is_some_and(|(_, &end)| range.end <= end)
    }

    /// Takes a range if all of it is free.
    pub(super) fn claim(&mut self, range: &Range<u64>) -> bool {
        let below = self.free.range(..=range.start).next_back().map(|(&start, &end)| (start, end));
        let Some((start, end)) = below.filter(|&(_, end)| range.end <= end) else { return false };
        if start == range.start {
            self.free.remove(&start);
        } else {
            self.free.insert(start, range.start);
        }
        if range.end < end {
            self.free.insert(range.end, end);
        }
        true
    }

    /// Gives a range back, which must not be free.
    pub(super) fn release(&mut self, range: Range<u64>) {
        let end = self.free.remove(&range.end).unwrap_or(range.end);
        let below = self.free.range_mut(..range.start).next_back();
        match below.filter(|(_, below_end)| **below_end == range.start) {
            Some((_, below_end)) => *below_end = end,
            None => {
                self.free.insert(range.start, end);
            }
        }
    }

    /// Start of the smallest free range that holds `size_bytes`, the lowest of several.
    pub(super) fn best_fit(&self, size_bytes: u64) -> Option<u64> {
        smallest(self.iter(), size_bytes)
    }

    /// The same among what is both free and listed. `listed` ascends.
    pub(super) fn best_fit_in(&self, listed: &[Range<u64>], size_bytes: u64) -> Option<u64> {
        let pieces = listed.iter().flat_map(|wanted| {
            let first =
                self.free.range(..=wanted.start).next_back().map(|(&start, &end)| start..end);
            let others = self.free.range(wanted.start.saturating_add(1)..);
            let others = others.map(|(&start, &end)| start..end);
            first
                .into_iter()
                .chain(others.take_while(|free| free.start < wanted.end))
                .map(|free| free.start.max(wanted.start)..free.end.min(wanted.end))
        });
        // A free range that ends before the window has an end below its start.
        smallest(pieces.filter(|piece| piece.start < piece.end), size_bytes)
    }

    /// Size of the largest free range in bytes.
    pub(super) fn largest_bytes(&self) -> u64 {
        self.iter().map(|free| free.end - free.start).max().unwrap_or(0)
    }
}

/// Start of the smallest range that holds `size_bytes`, the lowest of several.
fn smallest(ranges: impl Iterator<Item = Range<u64>>, size_bytes: u64) -> Option<u64> {
    let fitting = ranges.filter(|range| range.end - range.start >= size_bytes);
    let best = fitting.min_by_key(|range| (range.end - range.start, range.start));
    best.map(|range| range.start)
}

/// Which stream used free memory last, where that is asked: start to end and stream. Memory in no
/// range is good for any stream.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUses {
    uses: BTreeMap<u64, (u64, StreamId)>,
}

impl LastUses {
    /// Memory comes back that a stream has used.
    pub(super) fn note(&mut self, range: &Range<u64>, stream: StreamId) {
        self.uses.insert(range.start, (range.end, stream));
    }

    /// Whether a stream may have a free range without waiting for another.
    pub(super) fn allow(&self, range: &Range<u64>, stream: StreamId) -> bool {
        self.overlapping(range).all(|(_, _, used_by)| used_by == stream)
    }

    /// A free range is handed out: what was noted of it is no more.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        let inside: Vec<(u64, u64, StreamId)> = self.overlapping(range).collect();
        for (start, end, stream) in inside {
            self.uses.remove(&start);
            if start < range.start {
                self.uses.insert(start, (range.start, stream));
            }
            if range.end < end {
                self.uses.insert(range.end, (end, stream));
            }
        }
    }

    /// The device was waited for: no use lasts.
    pub(super) fn clear(&mut self) {
        self.uses.clear();
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, u64, StreamId)> + '_ {
        let below = self.uses.range(..range.start).next_back();
        let below = below.filter(|(_, (end, _))| *end > range.start);
        let inside = self.uses.range(range.start..range.end);
        below.into_iter().chain(inside).map(|(&start, &(end, stream))| (start, end, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(ranges: &FreeIntervals) -> Vec<Range<u64>> {
        ranges.iter().collect()
    }

    #[test]
    fn what_is_claimed_comes_back_and_joins() {
        let mut pool = FreeIntervals::whole(100);
        assert!(pool.claim(&(10..20)) && pool.claim(&(20..30)) && pool.claim(&(90..100)));
        assert!(!pool.claim(&(5..11)), "the end is taken");
        assert!(!pool.claim(&(15..16)), "inside");
        assert_eq!(free(&pool), [0..10, 30..90]);
        pool.release(20..30);
        assert_eq!(free(&pool), [0..10, 20..90]);
        pool.release(10..20);
        pool.release(90..100);
        assert!(pool.iter().eq(std::iter::once(0..100)), "whole again");
        assert!(FreeIntervals::whole(0).iter().next().is_none());
    }

    #[test]
    fn the_smallest_that_fits_and_the_lowest_of_these() {
        let mut pool = FreeIntervals::whole(100);
        // Free: 0..30, 40..50, 60..70, 80..100.
        for taken in [30..40, 50..60, 70..80] {
            assert!(pool.claim(&taken));
        }
        assert_eq!(pool.best_fit(10), Some(40));
        assert_eq!(pool.best_fit(11), Some(80));
        assert_eq!(pool.best_fit(31), None);
        assert_eq!(pool.largest_bytes(), 30);
        // Listed and free: 20..30, 40..50, 60..70, 80..85.
        let listed = [20..50, 55..85];
        assert_eq!(pool.best_fit_in(&listed, 5), Some(80));
        assert_eq!(pool.best_fit_in(&listed, 6), Some(20));
        assert_eq!(pool.best_fit_in(&listed, 11), None);
        assert_eq!(pool.best_fit_in(&[50..60, 30..40], 1), None, "taken");
    }

    #[test]
    fn memory_is_good_for_the_stream_that_used_it_last() {
        let (one, two) = (StreamId(1), StreamId(2));
        let mut uses = LastUses::default();
        uses.note(&(10..20), one);
        uses.note(&(20..30), two);
        assert!(uses.allow(&(0..20), one) && uses.allow(&(21..40), two));
        assert!(!uses.allow(&(19..21), one) && !uses.allow(&(15..16), two));
        uses.forget(&(15..25));
        assert!(uses.allow(&(15..25), StreamId(3)));
        assert!(!uses.allow(&(14..15), two) && !uses.allow(&(25..26), one));
        uses.clear();
        assert!(uses.allow(&(0..40), two));
    }
}
