//! Makes a packing lower: puts what sticks out where least is in the way, and what was in the way
//! somewhere else.
//!
//! A height is set, and whatever sticks out above it is taken out. One after another is put back:
//! into a free gap, or else where those that must leave are cheapest to place again. An item that
//! had to drive others out grows dearer itself, so that whoever is hard to place stays, and the
//! easy ones look for other places (guided ejection search, as Nagata and Bräysy use it to save
//! vehicles in routing, 2009).
//!
//! ```text
//!   ─ ─ ─ ─ ─ ─ ─ ┌───┐ ─ ─ height now               ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
//!   ──────────────┤ x ├──── height set ────────────  ──────────────────────
//!      ┌───────┬──┴┬──┘            x comes in,          ┌───────┬───┬──┐
//!      │   c   │ d │               d leaves and    ==>  │   c   │ x │
//!      └──┬────┴───┼──┐            finds a gap          └──┬────┴───┴─┬┐
//!         │   e    │                                       │   e  │ d │
//! ```
//!
//! The target itself is tried first. If that fails, the way down to it is gone in small parts, and
//! in smaller ones the closer it gets. What is reached is kept, so nothing ever gets higher.

mod neighbours;

use self::neighbours::Neighbours;
use super::core::{Core, Rect};
use super::portfolio::Placed;
use super::work::Work;
use crate::units::random::Random;

/// Offset of an item that is taken out.
const OUT: u64 = u64::MAX;
/// Cost of what cannot leave. Sums of all others stay below it.
const NEVER: u64 = 1 << 62;
/// Highest weight of an item: sums of 2^32 of them at the highest price stay below [`NEVER`].
const WEIGHT_MAX: u64 = 1 << 20;
/// Highest price of an item, in parts of its weight.
const PRICE_MAX: u64 = 1 << 9;
/// Price of an item that never drove anyone out: so many parts of its weight.
const PRICE_FIRST: u64 = 8;

/// Units of work without progress after which a height is given up, at first. Twice as many at
/// every further height that is given up.
const PATIENCE_UNITS: u64 = 200_000;
/// One part in so many of the way to the target is tried once the target itself is given up. The
/// parts halve with every height that is given up.
const PARTS_FIRST: u64 = 8;

/// Lowers `placed`, which is a packing, towards `target` until the work is done. Never makes it
/// higher. With a limit in units of work the result depends on the arguments alone.
pub fn repair(core: &Core, placed: &mut Placed, target: u64, seed: u64, work: &mut Work<'_>) {
    let target = target.max(highest_alone(core));
    if placed.height <= target {
        return;
    }
    let mut search = Search::of(core, seed);
    let mut patience_units = PATIENCE_UNITS;
    let mut parts = 1;
    while placed.height > target && !work.over() {
        let way = placed.height - target;
        let cap = placed.height - (way / parts).max(1);
        if search.lower(placed, cap, patience_units, work) {
            placed.height = core.height(&search.offsets);
            placed.offsets.copy_from_slice(&search.offsets);
            placed.found_by = "repair";
        } else if parts == 1 {
            parts = PARTS_FIRST;
        } else {
            parts = (2 * parts).min(way);
            patience_units = patience_units.saturating_mul(2);
        }
    }
}

/// The end of the highest obstacle or largest item: no packing is lower.
fn highest_alone(core: &Core) -> u64 {
    let fixed = core.obstacles.iter().map(|fixed| fixed.high);
    fixed.chain(core.items.iter().map(|item| item.size)).max().unwrap_or(0)
}

/// Offsets `y` that would clash with something: `low < y < high`.
#[derive(Clone, Copy, Debug)]
struct Ban {
    low: i64,
    high: i64,
    /// What it costs to drive it out.
    cost: u64,
    /// Who it is; nobody for what is fixed.
    item: Option<u32>,
}

struct Search<'a> {
    core: &'a Core,
    neighbours: Neighbours,
    random: Random,
    /// What it costs to drive an item out: its weight times its price.
    costs: Vec<u64>,
    weights: Vec<u32>,
    /// How often an item had to drive others out.
    struggles: Vec<u32>,
    offsets: Vec<u64>,
    /// Items that are taken out.
    out: Vec<u32>,
    bans: Vec<Ban>,
    /// The same by their high end, for the search of the cheapest place.
    ends: Vec<(i64, u64)>,
}

impl<'a> Search<'a> {
    fn of(core: &'a Core, seed: u64) -> Search<'a> {
        let weight = |item: &super::core::Item| {
            let area = item.size as f64 * f64::from(item.end - item.start);
            (area.sqrt() as u64).clamp(1, WEIGHT_MAX) as u32
        };
        let weights: Vec<u32> = core.items.iter().map(weight).collect();
        Search {
            core,
            neighbours: Neighbours::of(core),
            random: Random::new(seed),
            costs: weights.iter().map(|&weight| u64::from(weight) * PRICE_FIRST).collect(),
            weights,
            struggles: vec![1; core.items.len()],
            offsets: Vec::new(),
            out: Vec::new(),
            bans: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Seeks a packing of at most `cap` units from `placed`; leaves it in `offsets` if there was
    /// progress at least every `patience` units of work, until all was placed.
    fn lower(&mut self, placed: &Placed, cap: u64, patience: u64, work: &mut Work<'_>) -> bool {
        work.spend(self.core.items.len() as u64);
        self.offsets.clone_from(&placed.offsets);
        self.out.clear();
        for (index, item) in self.core.items.iter().enumerate() {
            if self.offsets[index] + item.size > cap {
                self.offsets[index] = OUT;
                self.out.push(index as u32);
            }
        }
        let mut fewest = self.out.len();
        let mut give_up = work.spent_units().saturating_add(patience);
        while !self.out.is_empty() {
            if self.out.len() < fewest {
                fewest = self.out.len();
                give_up = work.spent_units().saturating_add(patience);
            }
            let at = self.random.below(self.out.len() as u64) as usize;
            let index = self.out.swap_remove(at) as usize;
            self.gather(index);
            let units = 4 * (1 + self.bans.len() as u64);
            if work.spent_units() > give_up || !work.spend(units) || !self.insert(index, cap) {
                return false;
            }
        }
        true
    }

    /// Gathers the bans on an item's offset by all that is placed.
    fn gather(&mut self, index: usize) {
        let Search { core, neighbours, bans, offsets, costs, .. } = self;
        bans.clear();
        let item = &core.items[index];
        neighbours.visit(item.start, item.end, |other| {
            let offset = offsets[other];
            if offset == OUT || other == index {
                return;
            }
            let (cost, who) = (costs[other], Some(other as u32));
            if item.plain() && core.items[other].plain() {
                let (low, high) = (offset, offset + core.items[other].size);
                let low = low as i64 - item.size as i64;
                bans.push(Ban { low, high: high as i64, cost, item: who });
                return;
            }
            for mine in core.rects(index) {
                let clash = core.rects(other).filter_map(|rect| ban(&mine, &rect, offset));
                bans.extend(clash.map(|(low, high)| Ban { low, high, cost, item: who }));
            }
        });
        for fixed in &core.obstacles {
            let clash = core.rects(index).filter_map(|mine| ban(&mine, fixed, 0));
            bans.extend(clash.map(|(low, high)| Ban { low, high, cost: NEVER, item: None }));
        }
        bans.sort_unstable_by_key(|ban| (ban.low, ban.high));
    }

    /// Puts an item, whose bans are gathered, to the lowest free offset or the cheapest; false if
    /// nothing but what is fixed is in the way everywhere.
    fn insert(&mut self, index: usize, cap: u64) -> bool {
        let item = &self.core.items[index];
        let (align, last) = (item.align as i64, (cap - item.size) as i64);
        if let Some(offset) = self.free(align, last) {
            self.offsets[index] = offset as u64;
            return true;
        }
        let Some(offset) = self.cheapest(align, last) else { return false };
        for at in 0..self.bans.len() {
            let ban = self.bans[at];
            if let Some(other) = ban.item
                && ban.low < offset
                && offset < ban.high
                && self.offsets[other as usize] != OUT
            {
                self.offsets[other as usize] = OUT;
                self.out.push(other);
            }
        }
        self.offsets[index] = offset as u64;
        self.struggle(index);
        true
    }

    /// The lowest offset that nothing bans.
    fn free(&self, align: i64, last: i64) -> Option<i64> {
        let mut offset = 0;
        for ban in &self.bans {
            if ban.low >= offset {
                // The others begin no lower.
                break;
            }
            if ban.high > offset {
                offset = up_to(ban.high, align);
            }
        }
        (offset <= last).then_some(offset)
    }

    /// The offset that drives out least, at random among equals. Only offsets at which an item
    /// comes to lie against another, or against one of the limits, are looked at.
    fn cheapest(&mut self, align: i64, last: i64) -> Option<i64> {
        let Search { bans, ends, random, .. } = self;
        ends.clear();
        ends.extend(bans.iter().map(|ban| (ban.high, ban.cost)));
        ends.sort_unstable();
        let mut tour = Tour { bans, ends, begun: 0, ended: 0, cost: 0, fixed: 0 };
        let mut best = (NEVER, None);
        let mut equals = 0;
        let mut look = |offset: i64, tour: &mut Tour<'_>| {
            let cost = tour.cost_at(offset);
            if cost < best.0 {
                best = (cost, Some(offset));
                equals = 1;
            } else if cost == best.0 && cost < NEVER {
                equals += 1;
                if random.below(equals) == 0 {
                    best.1 = Some(offset);
                }
            }
        };
        // Offsets to look at, rising: against the ends of bans above, against their begins below.
        let (mut above, mut below) = (0, 0);
        look(0, &mut tour);
        loop {
            let on_top = ends.get(above).map_or(i64::MAX, |&(high, _)| up_to(high, align));
            let hanging = bans.get(below).map_or(i64::MAX, |ban| ban.low.div_euclid(align) * align);
            let offset = on_top.min(hanging);
            if offset > last {
                break;
            }
            above += usize::from(on_top <= hanging);
            below += usize::from(hanging <= on_top);
            if offset > 0 {
                look(offset, &mut tour);
            }
        }
        look(last.div_euclid(align) * align, &mut tour);
        best.1
    }

    /// Makes an item dearer that had to drive others out.
    fn struggle(&mut self, index: usize) {
        self.struggles[index] = self.struggles[index].saturating_add(1);
        let price = (f64::from(self.struggles[index]).sqrt() * PRICE_FIRST as f64) as u64;
        self.costs[index] = u64::from(self.weights[index]) * price.min(PRICE_MAX);
    }
}

/// Costs of rising offsets.
struct Tour<'a> {
    /// By their low end.
    bans: &'a [Ban],
    /// High ends in order, with costs.
    ends: &'a [(i64, u64)],
    begun: usize,
    ended: usize,
    /// Of all bans that have begun and not ended, without those that cannot leave.
    cost: u64,
    /// How many of them cannot leave.
    fixed: u32,
}

impl Tour<'_> {
    /// Cost of an offset that is no lower than the one before.
    fn cost_at(&mut self, offset: i64) -> u64 {
        while let Some(ban) = self.bans.get(self.begun).filter(|ban| ban.low < offset) {
            match ban.cost {
                NEVER => self.fixed += 1,
                cost => self.cost += cost,
            }
            self.begun += 1;
        }
        while let Some(&(_, cost)) = self.ends.get(self.ended).filter(|(high, _)| *high <= offset) {
            match cost {
                NEVER => self.fixed -= 1,
                cost => self.cost -= cost,
            }
            self.ended += 1;
        }
        if self.fixed > 0 { NEVER } else { self.cost }
    }
}

/// Offsets of an item at which one of its rectangles clashes with one that is placed: all between
/// the two, if they meet in time.
fn ban(mine: &Rect, other: &Rect, offset: u64) -> Option<(i64, i64)> {
    let meet = mine.start < other.end && other.start < mine.end;
    let low = (other.low + offset) as i64 - mine.high as i64;
    let high = (other.high + offset) as i64 - mine.low as i64;
    meet.then_some((low, high))
}

/// The next multiple.
fn up_to(offset: i64, multiple: i64) -> i64 {
    (offset + multiple - 1).div_euclid(multiple) * multiple
}

#[cfg(test)]
mod tests {
    use super::super::bound::load_bound;
    use super::super::portfolio::tests::{assert_packing, random_core};
    use super::super::portfolio::{PortfolioOptions, largest_first, portfolio};
    use super::super::work::Incumbent;
    use super::*;

    #[test]
    fn repair_gives_packings_that_are_never_higher() {
        let mut lowered = 0;
        for seed in 0..300 {
            let core = random_core(seed);
            let before = largest_first(&core);
            let target = load_bound(&core, 0).height;
            let mut after = before.clone();
            repair(&core, &mut after, target, seed, &mut Work::new(20_000, None));
            assert_packing(&core, &after.offsets);
            assert_eq!(after.height, core.height(&after.offsets));
            assert!(target <= after.height && after.height <= before.height, "seed {seed}");
            lowered += u64::from(after.height < before.height);
        }
        assert!(lowered > 20, "only {lowered} were lowered");
    }

    /// Costs of what cannot leave are not added up: a hundred of them are as many as one.
    #[test]
    fn many_fixed_rectangles_are_in_the_way_as_one_is() {
        let item = |size| super::super::core::Item {
            start: 0,
            end: 200,
            size,
            align: 1,
            hint: u64::MAX,
            parts: (0, 0),
        };
        let fixed = |at: u32| Rect { start: 2 * at, end: 2 * at + 1, low: 3, high: 5 };
        let core = Core {
            instants: 200,
            items: vec![item(2), item(3), item(1)],
            obstacles: (0..100).map(fixed).collect(),
            ..Core::default()
        };
        // Below the fixed ones there is room for 3, above them for the others.
        let mut placed = Placed { offsets: vec![0, 6, 5], height: 9, found_by: "by hand" };
        assert_packing(&core, &placed.offsets);
        repair(&core, &mut placed, 8, 0, &mut Work::new(100_000, None));
        assert_eq!(placed.height, 8);
        assert_packing(&core, &placed.offsets);
    }

    #[test]
    fn as_many_units_give_the_same_packing() {
        for seed in 0..30 {
            let core = random_core(seed);
            let run = || {
                let mut placed = largest_first(&core);
                let mut work = Work::new(5000, None);
                repair(&core, &mut placed, 0, seed, &mut work);
                (placed, work.spent_units())
            };
            assert_eq!(run(), run());
        }
    }

    /// Two columns of three thirds, cut differently, and a bar across that first fit lays too
    /// high: the packing of height 6 is known from how the pieces were cut.
    #[test]
    fn repair_finds_a_packing_that_is_known_to_exist() {
        let item = |start, end, size| super::super::core::Item {
            start,
            end,
            size,
            align: 1,
            hint: u64::MAX,
            parts: (0, 0),
        };
        let items = vec![item(0, 2, 2), item(2, 4, 3), item(0, 4, 1), item(0, 2, 3), item(2, 4, 2)];
        let core = Core { instants: 4, items, ..Core::default() };
        let mut placed = Placed { offsets: vec![0, 0, 3, 4, 4], height: 7, found_by: "by hand" };
        assert_packing(&core, &placed.offsets);
        repair(&core, &mut placed, 6, 0, &mut Work::new(10_000, None));
        assert_eq!(placed.height, 6);
    }

    #[test]
    fn a_target_that_is_reached_costs_nothing() {
        let core = random_core(1);
        let mut work = Work::unlimited();
        let options = PortfolioOptions { target: 0, seed: 0, threads: 1 };
        let mut placed = portfolio(&core, &options, &Incumbent::default(), &mut work);
        let (before, height) = (work.spent_units(), placed.height);
        repair(&core, &mut placed, height, 0, &mut work);
        assert_eq!(work.spent_units(), before);
    }
}
