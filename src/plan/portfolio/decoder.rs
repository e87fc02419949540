//! First fit without a graph of conflicts: the lowest gap that is free over a stretch of time.
//!
//! Time is cut into leaves of [`LEAF`] instants, and a binary tree stands on them. A node keeps
//! occupied ranges of units, sorted and joined where they meet: those of rectangles that *cover*
//! its time (and not its parent's), and those of all that *touch* it. What covers only a part of
//! a leaf lies there as it is.
//!
//! ```text
//!            ┌───────── a ─────────┐           a covers nodes 2 and 6
//!              ┌─ b ──┐                        b covers no node: a part of leaf 4, one of leaf 5
//!     ┌───────── 1 ──────────┐
//!     ├──── 2 ────┬──── 3 ───┤                 where may c lie? Ask
//!     ├─ 4 ─┬─ 5 ─┼─ 6 ─┬─ 7 ┤                   covered by: all nodes above its first and last
//!               ├─── c ────┤                                 leaf, and these
//!                                                touched:    nodes wholly in between
//!                                                parts:      of its first and last leaf
//! ```
//!
//! Each node's ranges are read upwards once, in step with all others, until a gap is common to
//! all. If whoever is placed earlier always contains the first or the last instant of whom it
//! meets (long ones first), nothing need be asked in between and `touch` is not kept at all.

use super::super::core::{Core, Rect};
use super::unit::Unit;

/// Instants of a leaf, as a power of two.
const LEAF_LOG2: u32 = 4;
/// Instants of a leaf.
const LEAF: u32 = 1 << LEAF_LOG2;

/// `[low, high)` in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range<U> {
    low: U,
    high: U,
}

/// A rectangle that covers a part of a leaf.
#[derive(Clone, Copy, Debug)]
struct Part<U> {
    start: u32,
    end: u32,
    range: Range<U>,
}

/// Occupied ranges, sorted, disjoint and not adjacent.
#[derive(Clone, Debug)]
struct Ranges<U>(Vec<Range<U>>);

impl<U: Unit> Ranges<U> {
    /// Adds a range that may overlap what is there.
    fn add(&mut self, range: Range<U>) {
        let ranges = &mut self.0;
        // Most come on top of what is there, or near it.
        let from = match ranges.last() {
            Some(last) if last.high < range.low => ranges.len(),
            _ => ranges.partition_point(|other| other.high < range.low),
        };
        let meets = ranges[from..].iter().take_while(|other| other.low <= range.high).count();
        match meets {
            0 => ranges.insert(from, range),
            _ => {
                let high = ranges[from + meets - 1].high.max(range.high);
                let first = &mut ranges[from];
                first.low = first.low.min(range.low);
                first.high = high;
                ranges.drain(from + 1..from + meets);
            }
        }
    }
}

/// Whoever is asked for a gap, with the range that must be free in it relative to the offset.
struct Asked<'a, U> {
    ranges: &'a [Range<U>],
    low: U,
    high: U,
}

/// What is placed so far.
pub(super) struct Decoder<U> {
    /// Leaves of the tree: a power of two. Node 1 is the root, `leaves + i` is leaf `i`.
    leaves: usize,
    cover: Vec<Ranges<U>>,
    /// Empty if nobody asks.
    touch: Vec<Ranges<U>>,
    parts: Vec<Vec<Part<U>>>,
    /// Parts that an item meets, sorted; here to be used again.
    met: Vec<Range<U>>,
}

impl<U: Unit> Decoder<U> {
    /// Nothing placed in `0..instants`. `ends_tell`: whatever is placed contains the first or the
    /// last instant of whatever it meets that is asked for later.
    pub(super) fn new(instants: u32, ends_tell: bool) -> Decoder<U> {
        let leaves = (instants.div_ceil(LEAF) as usize).next_power_of_two();
        Decoder {
            leaves,
            cover: vec![Ranges(Vec::new()); 2 * leaves],
            touch: if ends_tell { Vec::new() } else { vec![Ranges(Vec::new()); 2 * leaves] },
            parts: vec![Vec::new(); leaves],
            met: Vec::new(),
        }
    }

    /// Occupies a rectangle.
    pub(super) fn add(&mut self, start: u32, end: u32, low: U, high: U) {
        let range = Range { low, high };
        if low == high {
            return;
        }
        let (first, last) = ((start >> LEAF_LOG2) as usize, ((end - 1) >> LEAF_LOG2) as usize);
        let part = Part { start, end, range };
        let from = start.div_ceil(LEAF) as usize;
        let to = (end >> LEAF_LOG2) as usize;
        if from > first {
            self.parts[first].push(part);
        }
        if to <= last && (last > first || from == first) {
            self.parts[last].push(part);
        }
        let (cover, touch) = (&mut self.cover, &mut self.touch);
        nodes_between(self.leaves, from, to, |node| {
            cover[node].add(range);
            if let Some(touch) = touch.get_mut(node) {
                touch.add(range);
            }
        });
        if !self.touch.is_empty() {
            nodes_above(self.leaves, first, last, |node| self.touch[node].add(range));
        }
    }

    /// Where an item is placed, and how many steps it took to find: at the offset wished for if
    /// it can be, else at the lowest.
    pub(super) fn place_at(&mut self, core: &Core, index: usize, wish: u64) -> (U, u64) {
        let item = &core.items[index];
        let mut steps = 0;
        if wish <= U::HEIGHT_MAX && wish.is_multiple_of(item.align) {
            let (offset, spent) = self.lowest(core, index, U::of(wish));
            if offset.wide() == wish {
                return (offset, spent);
            }
            steps = spent;
        }
        let (offset, spent) = self.lowest(core, index, U::of(0));
        (offset, steps + spent)
    }

    /// The lowest offset from `from` on, both multiples of the item's alignment, at which all of
    /// its rectangles are free, and how many steps it took to find.
    fn lowest(&mut self, core: &Core, index: usize, from: U) -> (U, u64) {
        let item = &core.items[index];
        let align = U::of(item.align);
        let mut met = std::mem::take(&mut self.met);
        met.clear();
        let found = if item.plain() {
            let rect = Rect { start: item.start, end: item.end, low: 0, high: item.size };
            self.meet(&rect, &mut met);
            let mut asked = Vec::with_capacity(64);
            self.ask(&rect, &met, &mut asked);
            climb(&mut asked, from, align)
        } else {
            // Every rectangle meets parts of its own.
            let mut bounds = vec![0];
            for rect in core.rects(index) {
                self.meet(&rect, &mut met);
                bounds.push(met.len());
            }
            let mut asked = Vec::with_capacity(64);
            for (rect, bound) in core.rects(index).zip(bounds.windows(2)) {
                self.ask(&rect, &met[bound[0]..bound[1]], &mut asked);
            }
            climb(&mut asked, from, align)
        };
        self.met = met;
        found
    }

    /// Gathers the parts of a rectangle's first and last leaf that it meets.
    fn meet(&self, rect: &Rect, met: &mut Vec<Range<U>>) {
        let (first, last) = ends(rect);
        let from = met.len();
        let meets = |part: &&Part<U>| part.start < rect.end && rect.start < part.end;
        met.extend(self.parts[first].iter().filter(meets).map(|part| part.range));
        if last > first {
            met.extend(self.parts[last].iter().filter(meets).map(|part| part.range));
        }
        met[from..].sort_unstable_by_key(|range| range.low);
        join(met, from);
    }

    /// Gathers whose ranges a rectangle must keep clear of.
    fn ask<'a>(&'a self, rect: &Rect, met: &'a [Range<U>], asked: &mut Vec<Asked<'a, U>>) {
        let (low, high) = (U::of(rect.low), U::of(rect.high));
        let mut ask = |ranges: &'a [Range<U>]| {
            if !ranges.is_empty() {
                asked.push(Asked { ranges, low, high });
            }
        };
        ask(met);
        let (first, last) = ends(rect);
        nodes_above(self.leaves, first, last, |node| ask(&self.cover[node].0));
        if !self.touch.is_empty() && last > first + 1 {
            nodes_between(self.leaves, first + 1, last, |node| ask(&self.touch[node].0));
        }
    }
}

/// Joins ranges that overlap or are adjacent; those from `from` on are sorted by their low end.
fn join<U: Unit>(ranges: &mut Vec<Range<U>>, from: usize) {
    let mut kept = from;
    for at in from..ranges.len() {
        let range = ranges[at];
        if kept > from && ranges[kept - 1].high >= range.low {
            ranges[kept - 1].high = ranges[kept - 1].high.max(range.high);
        } else {
            ranges[kept] = range;
            kept += 1;
        }
    }
    ranges.truncate(kept);
}

/// First and last leaf of a rectangle.
fn ends(rect: &Rect) -> (usize, usize) {
    ((rect.start >> LEAF_LOG2) as usize, ((rect.end - 1) >> LEAF_LOG2) as usize)
}

/// Nodes that make up leaves `from..to`, none of them above another.
fn nodes_between(leaves: usize, from: usize, to: usize, mut visit: impl FnMut(usize)) {
    let (mut from, mut to) = (from + leaves, to.max(from) + leaves);
    while from < to {
        if from & 1 == 1 {
            visit(from);
            from += 1;
        }
        if to & 1 == 1 {
            to -= 1;
            visit(to);
        }
        (from, to) = (from >> 1, to >> 1);
    }
}

/// Two leaves and all nodes above either.
fn nodes_above(leaves: usize, first: usize, last: usize, mut visit: impl FnMut(usize)) {
    let (mut first, mut last) = (first + leaves, last + leaves);
    while first != last {
        visit(first);
        visit(last);
        (first, last) = (first >> 1, last >> 1);
    }
    while first > 0 {
        visit(first);
        first >>= 1;
    }
}

/// Rises until nobody objects.
fn climb<U: Unit>(asked: &mut [Asked<'_, U>], from: U, align: U) -> (U, u64) {
    let mut offset = from;
    let mut steps = asked.len() as u64;
    let mut content = 0;
    let mut at = 0;
    while content < asked.len() {
        let one = &mut asked[at];
        let skip = one.ranges.iter().take(8).take_while(|range| range.high <= offset + one.low);
        let mut skip = skip.count();
        if skip == 8 {
            skip += one.ranges[8..].partition_point(|range| range.high <= offset + one.low);
        }
        one.ranges = &one.ranges[skip..];
        steps += skip as u64;
        content += 1;
        if let Some(range) = one.ranges.first()
            && range.low < offset + one.high
        {
            offset = (range.high - one.low).up_to(align);
            content = 0;
        }
        at = if at + 1 == asked.len() { 0 } else { at + 1 };
    }
    (offset, steps)
}
