//! Search for shapes that overhang: which of two items is the upper one, pair by pair.
//!
//! ```text
//!        ┌──────┐        A part may begin above its item's offset, and others may lie below it:
//!        │  a   └──┐     then lowest-first is no complete order, and two items may even reach
//!        └──┐      │     over each other.
//!    ┌───┐  └──────┘
//!    │ b └──────┐        For two items the distance of their offsets must avoid some ranges. Each
//!    └──────────┘        range leaves two ways: at most this, or at least that.
//! ```
//!
//! Offsets are lower bounds: the least ones that keep what was decided. While two items overlap at
//! their bounds, one range between them is decided either way; when none do, the bounds are a
//! packing. Complete for everything that a [`Core`] can hold, and slower than the search of
//! valleys, which is tried first.

use super::Outcome;
use crate::plan::core::{Core, Rect};
use crate::plan::work::Work;

/// Most pairs; above it there is no answer.
const PAIRS_MAX: usize = 1 << 20;

/// A range that the offset of `second` less that of `first` must avoid: half-open.
#[derive(Clone, Copy, Debug)]
struct Clash {
    first: u32,
    second: u32,
    from: i64,
    to: i64,
}

/// The offset of one item is at least that of another plus `by`.
#[derive(Clone, Copy, Debug)]
struct Above {
    upper: u32,
    by: i64,
}

#[derive(Clone, Copy, Debug)]
enum Undo {
    Bound {
        item: u32,
        bound: i64,
    },
    /// The latest arc from an item.
    Arc {
        lower: u32,
    },
    /// The clash goes back to those that are not decided.
    Open {
        clash: u32,
    },
}

/// A decision that can still be turned.
#[derive(Clone, Copy, Debug)]
struct Decision {
    clash: u32,
    second_above: bool,
    mark: usize,
}

struct Pairs<'a> {
    core: &'a Core,
    /// Highest offset of every item.
    latest: Vec<i64>,
    /// Offsets that what is fixed forbids, by item: half-open, ascending and disjoint.
    forbidden: Vec<Vec<(i64, i64)>>,
    clashes: Vec<Clash>,
    decided: Vec<bool>,
    bounds: Vec<i64>,
    arcs: Vec<Vec<Above>>,
    trail: Vec<Undo>,
    queue: Vec<u32>,
    /// Items looked at.
    units: u64,
}

/// What is to be done about the ranges that are not decided.
enum Next {
    /// Nothing: the bounds are a packing.
    Packed,
    /// This one cannot be decided either way.
    Stuck,
    /// Only one way is left.
    Forced(u32, bool),
    /// Both ways are; the better first.
    Branch(u32, bool),
}

/// Seeks a packing of at most `cap` units, whatever the core holds.
pub(super) fn search(core: &Core, cap: u64, work: &mut Work<'_>) -> Outcome {
    let Some(clashes) = clashes(core) else { return Outcome::Unknown };
    let too_high = core.items.iter().any(|item| item.size > cap)
        || core.obstacles.iter().any(|fixed| fixed.high > cap);
    if too_high {
        return Outcome::Infeasible;
    }
    let mut pairs = Pairs {
        core,
        latest: core.items.iter().map(|item| (cap - item.size) as i64).collect(),
        forbidden: (0..core.items.len()).map(|index| forbidden(core, index)).collect(),
        decided: vec![false; clashes.len()],
        clashes,
        bounds: vec![0; core.items.len()],
        arcs: vec![Vec::new(); core.items.len()],
        trail: Vec::new(),
        queue: Vec::new(),
        units: 0,
    };
    pairs.run(work)
}

impl Pairs<'_> {
    fn run(&mut self, work: &mut Work<'_>) -> Outcome {
        let mut decisions: Vec<Decision> = Vec::new();
        let mut good = (0..self.bounds.len()).all(|item| self.raise(item, 0));
        loop {
            let units = std::mem::take(&mut self.units);
            if !work.spend(units / 8 + 1) {
                return Outcome::Unknown;
            }
            if !good {
                let Some(last) = decisions.pop() else { return Outcome::Infeasible };
                self.undo(last.mark);
                good = self.decide(last.clash, !last.second_above, work);
                continue;
            }
            match self.next() {
                Next::Packed => {
                    return Outcome::Found(self.bounds.iter().map(|&bound| bound as u64).collect());
                }
                Next::Stuck => good = false,
                Next::Forced(clash, second_above) => {
                    good = self.decide(clash, second_above, work);
                }
                Next::Branch(clash, second_above) => {
                    decisions.push(Decision { clash, second_above, mark: self.trail.len() });
                    good = self.decide(clash, second_above, work);
                }
            }
        }
    }

    /// Looks at all ranges that are not decided, and picks the one with the fewest ways; among
    /// those with two the one whose better way raises most.
    fn next(&mut self) -> Next {
        self.units += self.clashes.len() as u64;
        let mut best: Option<(i64, u32, bool)> = None;
        for (index, clash) in self.clashes.iter().enumerate() {
            if self.decided[index] {
                continue;
            }
            let (first, second) = (clash.first as usize, clash.second as usize);
            let up_second = self.bounds[first] + clash.to;
            let up_first = self.bounds[second] - clash.from + 1;
            let (can_second, can_first) =
                (up_second <= self.latest[second], up_first <= self.latest[first]);
            let distance = self.bounds[second] - self.bounds[first];
            let overlap = clash.from <= distance && distance < clash.to;
            match (can_second, can_first) {
                (false, false) => return Next::Stuck,
                (true, false) => return Next::Forced(index as u32, true),
                (false, true) => return Next::Forced(index as u32, false),
                (true, true) if overlap => {
                    let by_second = up_second - self.bounds[second];
                    let by_first = up_first - self.bounds[first];
                    let least = by_second.min(by_first);
                    if best.is_none_or(|(most, ..)| least > most) {
                        best = Some((least, index as u32, by_second <= by_first));
                    }
                }
                (true, true) => {}
            }
        }
        best.map_or(Next::Packed, |(_, clash, second_above)| Next::Branch(clash, second_above))
    }

    /// Decides a range; false if the cap cannot be met then.
    fn decide(&mut self, clash: u32, second_above: bool, work: &mut Work<'_>) -> bool {
        let Clash { first, second, from, to } = self.clashes[clash as usize];
        let (lower, upper, by) =
            if second_above { (first, second, to) } else { (second, first, 1 - from) };
        self.decided[clash as usize] = true;
        self.trail.push(Undo::Open { clash });
        self.arcs[lower as usize].push(Above { upper, by });
        self.trail.push(Undo::Arc { lower });
        self.raise(upper as usize, self.bounds[lower as usize] + by) && self.spread(work)
    }

    /// Raises whoever is above something that was raised, until nothing changes.
    fn spread(&mut self, work: &mut Work<'_>) -> bool {
        while let Some(lower) = self.queue.pop() {
            for at in 0..self.arcs[lower as usize].len() {
                let Above { upper, by } = self.arcs[lower as usize][at];
                self.units += 1;
                let bound = self.bounds[lower as usize] + by;
                if !self.raise(upper as usize, bound) || !work.spend(1) {
                    self.queue.clear();
                    return false;
                }
            }
        }
        true
    }

    /// Raises a bound to the next offset that its item allows; false if there is none.
    fn raise(&mut self, item: usize, bound: i64) -> bool {
        let align = self.core.items[item].align as i64;
        let round_up = |offset: i64| (offset + align - 1).div_euclid(align) * align;
        let mut fit = round_up(bound.max(0));
        for &(from, to) in &self.forbidden[item] {
            if from <= fit && fit < to {
                fit = round_up(to);
            }
        }
        let old = self.bounds[item];
        if fit > old {
            self.trail.push(Undo::Bound { item: item as u32, bound: old });
            self.bounds[item] = fit;
            self.queue.push(item as u32);
        }
        let good = fit <= self.latest[item];
        if !good {
            self.queue.clear();
        }
        good
    }

    fn undo(&mut self, mark: usize) {
        for undo in self.trail.drain(mark..).rev() {
            match undo {
                Undo::Bound { item, bound } => self.bounds[item as usize] = bound,
                Undo::Arc { lower } => drop(self.arcs[lower as usize].pop()),
                Undo::Open { clash } => self.decided[clash as usize] = false,
            }
        }
    }
}

/// Every range to be avoided between two items; nothing if there are too many.
fn clashes(core: &Core) -> Option<Vec<Clash>> {
    let mut clashes = Vec::new();
    for second in 0..core.items.len() {
        for first in 0..second {
            let (a, b) = (&core.items[first], &core.items[second]);
            if a.start >= b.end || b.start >= a.end {
                continue;
            }
            let mut ranges = Vec::new();
            for one in core.rects(first) {
                for other in core.rects(second).filter(|other| meet(&one, other)) {
                    // They overlap if the distance is above the one and below the other.
                    let from = one.low as i64 - other.high as i64 + 1;
                    ranges.push((from, one.high as i64 - other.low as i64));
                }
            }
            let (first, second) = (first as u32, second as u32);
            for (from, to) in merged(ranges) {
                clashes.push(Clash { first, second, from, to });
            }
            if clashes.len() > PAIRS_MAX {
                return None;
            }
        }
    }
    Some(clashes)
}

fn meet(one: &Rect, other: &Rect) -> bool {
    one.start < other.end && other.start < one.end
}

/// Offsets that what is fixed forbids an item.
fn forbidden(core: &Core, index: usize) -> Vec<(i64, i64)> {
    let mut ranges = Vec::new();
    for rect in core.rects(index) {
        for fixed in core.obstacles.iter().filter(|fixed| meet(&rect, fixed)) {
            let from = fixed.low as i64 - rect.high as i64 + 1;
            ranges.push((from, fixed.high as i64 - rect.low as i64));
        }
    }
    merged(ranges)
}

/// Half-open ranges, ascending and disjoint.
fn merged(mut ranges: Vec<(i64, i64)>) -> Vec<(i64, i64)> {
    ranges.sort_unstable();
    let mut merged: Vec<(i64, i64)> = Vec::new();
    for (from, to) in ranges.into_iter().filter(|range| range.0 < range.1) {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => merged.push((from, to)),
        }
    }
    merged
}
