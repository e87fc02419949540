//! Fits in order of time, as an allocator that knows no lifetimes would: no tree is needed.
//!
//! Whoever comes later starts later, so only what is live at its start can be in its way; the
//! free gaps of that instant are one sorted list.

use super::super::core::Core;
use super::super::work::Work;
use super::unit::Unit;
use super::{Limits, Run};

/// Which gap an item takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest that is large enough.
    First,
    /// The smallest that is large enough; of equals the lowest.
    Best,
}

/// Which way time runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    /// An item begins where it ends, and ends where it begins.
    Reversed,
}

impl Direction {
    /// When an item begins and ends, this way.
    fn span(self, core: &Core, index: u32) -> (u32, u32) {
        let item = &core.items[index as usize];
        match self {
            Direction::Forward => (item.start, item.end),
            Direction::Reversed => (core.instants - item.end, core.instants - item.start),
        }
    }
}

/// A free gap, `[low, high)`.
#[derive(Clone, Copy, Debug)]
struct Gap<U> {
    low: U,
    high: U,
}

/// Gaps by their low end, disjoint and not adjacent; the last has no end.
struct Gaps<U>(Vec<Gap<U>>);

impl<U: Unit> Gaps<U> {
    /// The gap for a size. There is one: the last.
    fn find(&self, size: U, fit: Fit) -> usize {
        let last = self.0.len() - 1;
        let fits = |gap: &Gap<U>| gap.high - gap.low >= size;
        match fit {
            Fit::First => self.0[..last].iter().position(fits).unwrap_or(last),
            Fit::Best => {
                let mut best = (U::of(U::HEIGHT_MAX), last);
                for (at, gap) in self.0[..last].iter().enumerate() {
                    if fits(gap) && gap.high - gap.low < best.0 {
                        best = (gap.high - gap.low, at);
                    }
                }
                best.1
            }
        }
    }

    fn take(&mut self, at: usize, size: U) -> U {
        let low = self.0[at].low;
        self.0[at].low = low + size;
        if self.0[at].low == self.0[at].high {
            self.0.remove(at);
        }
        low
    }

    /// Frees what was taken. The gap with no end always comes after it.
    fn give(&mut self, low: U, high: U) {
        let at = self.0.partition_point(|gap| gap.high < low);
        let joins_above = |gap: &Gap<U>| gap.low == high;
        if self.0[at].high == low {
            self.0[at].high = high;
            if self.0.get(at + 1).is_some_and(joins_above) {
                self.0[at].high = self.0[at + 1].high;
                self.0.remove(at + 1);
            }
        } else if joins_above(&self.0[at]) {
            self.0[at].low = low;
        } else {
            self.0.insert(at, Gap { low, high });
        }
    }
}

/// Items by an instant below `instants`, those of one instant by index: counted, not compared.
pub(super) fn by_instant(items: usize, instants: u32, instant: impl Fn(u32) -> u32) -> Vec<u32> {
    let mut place = vec![0u32; instants as usize + 2];
    for item in 0..items as u32 {
        place[instant(item) as usize + 1] += 1;
    }
    for at in 1..place.len() {
        place[at] += place[at - 1];
    }
    let mut sorted = vec![0; items];
    for item in 0..items as u32 {
        let at = &mut place[instant(item) as usize];
        sorted[*at as usize] = item;
        *at += 1;
    }
    sorted
}

/// Places the items of a simple core in order of time.
pub(super) fn place<U: Unit>(
    core: &Core,
    fit: Fit,
    direction: Direction,
    limits: &Limits<'_>,
    work: &mut Work<'_>,
) -> Run {
    let count = core.items.len();
    let begin = by_instant(count, core.instants, |index| direction.span(core, index).0);
    let end = by_instant(count, core.instants, |index| direction.span(core, index).1);
    let mut ending = end.into_iter().peekable();
    let mut offsets = vec![0; count];
    let mut gaps = Gaps(vec![Gap { low: U::of(0), high: U::of(2 * U::HEIGHT_MAX) }]);
    let mut run = Run::default();
    for index in begin {
        let (start, _) = direction.span(core, index);
        while let Some(dead) = ending.next_if(|&dead| direction.span(core, dead).1 <= start) {
            let (low, size) = (offsets[dead as usize], core.items[dead as usize].size);
            gaps.give(U::of(low), U::of(low + size));
        }
        let size = core.items[index as usize].size;
        let at = gaps.find(U::of(size), fit);
        // Gaps are read several at a time.
        let steps = 1 + at as u64 / 4;
        run.units += steps;
        let offset = gaps.take(at, U::of(size)).wide();
        let top = offset + size;
        if top > U::HEIGHT_MAX || !run.grow(top, limits) || !work.spend(steps) {
            return run;
        }
        offsets[index as usize] = offset;
    }
    run.offsets = Some(offsets);
    run
}
