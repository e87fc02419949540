//! Many orders, each decoded by first fit.
//!
//! No order is good everywhere, and the best differs by problem: so many are tried, cheapest
//! first. An order is given up as soon as it is no lower than one of a lower rank: it could not
//! win, since of equal heights the lower rank wins. That makes the winner the same on any number
//! of threads:
//!
//! ```text
//!   rank 0  life-start   ████████████████ 104      first: always to its end
//!   rank 1  life-end     █████████▌ ≥ 104          given up
//!   rank 2  online ...   ████████████████ 101      the new limit for ranks above 2, not below
//!   rank 3  size-start   ███▌ ≥ 101
//! ```
//!
//! What an order costs in units of work is counted as if the orders ran one after the other, so
//! that a budget in units means the same on any number of threads, too.

mod decoder;
mod online;
mod orders;
mod unit;

use std::thread;

use self::decoder::Decoder;
use self::orders::{Method, Order};
use self::unit::Unit;
use super::core::Core;
use super::work::{Incumbent, Work};

/// Cores up to this many items get every order, at any cost.
const SMALL_ITEMS: usize = 200_000;
/// Units of work an item that an order may take on larger cores: what a good order takes three
/// times over, and what one that splinters the memory passes.
const ITEM_UNITS_MAX: u64 = 100;
/// Heights above this are counted in 64 bits: first fit stays within four times of it in 32.
const NARROW_MAX: u64 = u32::HEIGHT_MAX / 4;

/// Offsets for every item of a core.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Offsets in units, by item.
    pub offsets: Vec<u64>,
    /// End of the highest item or obstacle, in units.
    pub height: u64,
    /// What found it.
    pub found_by: &'static str,
}

/// How to go through the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortfolioOptions {
    /// Nothing below this height is of use; reaching it ends the search.
    pub target: u64,
    /// For the random parts of orders.
    pub seed: u64,
    /// Threads that may be used at once; the result does not depend on it.
    pub threads: usize,
}

/// The lowest packing that the orders give. The first order always runs to its end, so there is
/// always a packing; others end with `work`, or when the incumbent is stopped.
pub fn portfolio(
    core: &Core,
    options: &PortfolioOptions,
    incumbent: &Incumbent,
    work: &mut Work<'_>,
) -> Placed {
    let mut best = first_order(core, work);
    incumbent.tell(best.height);
    let methods = &orders::methods(core, options.seed)[1..];
    compete(core, methods, options, incumbent, &mut best, work);
    best
}

/// The packing of the first order alone.
pub fn first_order(core: &Core, work: &mut Work<'_>) -> Placed {
    first(core, &orders::methods(core, 0)[0], work)
}

/// Lowers a packing by all orders but the first, as far as they can.
pub fn other_orders(
    core: &Core,
    options: &PortfolioOptions,
    best: &mut Placed,
    work: &mut Work<'_>,
) {
    let methods = &orders::methods(core, options.seed)[1..];
    compete(core, methods, options, &Incumbent::default(), best, work);
}

/// Lowers a packing by so many orders drawn at random, as far as they can.
pub fn drawn_orders(
    core: &Core,
    count: u64,
    options: &PortfolioOptions,
    best: &mut Placed,
    work: &mut Work<'_>,
) {
    let methods = orders::drawn(count, options.seed);
    compete(core, &methods, options, &Incumbent::default(), best, work);
}

/// Runs methods in the order of their ranks, after whatever gave the best so far.
fn compete(
    core: &Core,
    methods: &[Method],
    options: &PortfolioOptions,
    incumbent: &Incumbent,
    best: &mut Placed,
    work: &mut Work<'_>,
) {
    for methods in methods.chunks(options.threads.max(1)) {
        if best.height <= options.target || work.over() || incumbent.stopped() {
            break;
        }
        for (method, run) in methods.iter().zip(batch(core, methods, best.height, options, work)) {
            // Alone it would have been cut short at the end of the budget.
            let cost_units = run.cost_units(best.height).min(work.left_units().saturating_add(1));
            if best.height <= options.target || !work.spend(cost_units) {
                break;
            }
            if let Some(offsets) = run.offsets.filter(|_| run.height < best.height) {
                *best = Placed { offsets, height: run.height, found_by: method.name() };
                incumbent.tell(best.height);
            }
        }
    }
}

/// Largest first, then earliest, at the lowest offset: what several frameworks do.
pub fn largest_first(core: &Core) -> Placed {
    first(core, &Method::Decode(Order::Largest), &mut Work::unlimited())
}

/// Runs a method to its end, whatever it costs.
fn first(core: &Core, method: &Method, work: &mut Work<'_>) -> Placed {
    let free = Limits { below: &[], start: u64::MAX, target: 0, units: u64::MAX };
    let mut run = method.run(core, &free, &mut Work::unlimited());
    if run.offsets.is_none() {
        // It did not fit in 32 bits.
        run = method.run_wide(core, &free, &mut Work::unlimited());
    }
    work.spend(run.units);
    let offsets = run.offsets.unwrap_or_default();
    Placed { offsets, height: run.height, found_by: method.name() }
}

/// Runs methods of neighbouring ranks, each on a thread of its own if there are several.
fn batch(
    core: &Core,
    methods: &[Method],
    start: u64,
    options: &PortfolioOptions,
    work: &Work<'_>,
) -> Vec<Run> {
    let small = core.items.len() <= SMALL_ITEMS;
    let units = if small { u64::MAX } else { core.items.len() as u64 * ITEM_UNITS_MAX };
    let reached: Vec<Incumbent> = methods.iter().map(|_| Incumbent::default()).collect();
    let run = |rank: usize| {
        let below = &reached[..rank];
        let limits = Limits { below, start, target: options.target, units };
        let run = methods[rank].run(core, &limits, &mut work.part(u64::MAX));
        if run.offsets.is_some() {
            reached[rank].tell(run.height);
        }
        run
    };
    if let [_] = methods {
        return vec![run(0)];
    }
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            (0..methods.len()).map(|rank| scope.spawn(move || run(rank))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        // A thread that panicked found nothing.
        joined.map(Result::unwrap_or_default).collect()
    })
}

/// When to give up.
struct Limits<'a> {
    /// Heights reached by lower ranks that run at the same time.
    below: &'a [Incumbent],
    /// The lowest height reached before.
    start: u64,
    /// Whoever reaches this has won over all higher ranks.
    target: u64,
    /// Most units of work.
    units: u64,
}

impl Limits<'_> {
    /// Who is not below this cannot win.
    fn height(&self) -> u64 {
        let height = self.below.iter().fold(self.start, |height, other| height.min(other.height()));
        if height <= self.target { 0 } else { height }
    }
}

/// What became of a method.
#[derive(Debug, Default)]
struct Run {
    /// None if it was given up.
    offsets: Option<Vec<u64>>,
    height: u64,
    units: u64,
    /// Every time that the height grew: the new height, and the units spent until then.
    growth: Vec<(u64, u64)>,
}

impl Run {
    /// Notes the top of an item; whether to go on.
    fn grow(&mut self, top: u64, limits: &Limits<'_>) -> bool {
        if top > self.height {
            self.height = top;
            self.growth.push((top, self.units));
            return top < limits.height() && self.units <= limits.units;
        }
        self.units <= limits.units
    }

    /// Units until it passed a height: what it would have cost with that as its only limit.
    fn cost_units(&self, limit: u64) -> u64 {
        let passed = self.growth.iter().find(|(height, _)| *height >= limit);
        passed.map_or(self.units, |&(_, units)| units)
    }
}

impl Method {
    /// Runs it in as few bits as promise to do.
    fn run(&self, core: &Core, limits: &Limits<'_>, work: &mut Work<'_>) -> Run {
        if narrow(core) {
            self.run_in::<u32>(core, limits, work)
        } else {
            self.run_wide(core, limits, work)
        }
    }

    /// Runs it in 64 bits.
    fn run_wide(&self, core: &Core, limits: &Limits<'_>, work: &mut Work<'_>) -> Run {
        self.run_in::<u64>(core, limits, work)
    }

    fn run_in<U: Unit>(&self, core: &Core, limits: &Limits<'_>, work: &mut Work<'_>) -> Run {
        match *self {
            Method::Online(fit, direction) => {
                online::place::<U>(core, fit, direction, limits, work)
            }
            Method::Decode(order) => decode::<U>(core, order, limits, work),
        }
    }
}

/// Whether heights promise to fit in 32 bits with room to spare.
fn narrow(core: &Core) -> bool {
    let load = core.loads().max().unwrap_or(0);
    let fixed = core.obstacles.iter().map(|rect| rect.high).max().unwrap_or(0);
    let asked = core.items.iter().map(|item| item.align.max(item.size)).max().unwrap_or(0);
    load.max(fixed).max(asked) <= NARROW_MAX
}

/// First fit in an order.
fn decode<U: Unit>(core: &Core, order: Order, limits: &Limits<'_>, work: &mut Work<'_>) -> Run {
    let ends_tell = order.ends_tell() && core.parts.is_empty() && core.obstacles.is_empty();
    let mut decoder = Decoder::<U>::new(core.instants, ends_tell);
    let mut run = Run::default();
    for fixed in &core.obstacles {
        decoder.add(fixed.start, fixed.end, U::of(fixed.low), U::of(fixed.high));
        run.height = run.height.max(fixed.high);
    }
    let mut offsets = vec![0; core.items.len()];
    for index in order.of(core) {
        let index = index as usize;
        let wish = if order.at_hint() { core.items[index].hint } else { u64::MAX };
        let (offset, steps) = decoder.place_at(core, index, wish);
        run.units += steps;
        let top = offset.wide() + core.items[index].size;
        if top > U::HEIGHT_MAX || !run.grow(top, limits) || !work.spend(steps) {
            return run;
        }
        for rect in core.rects(index) {
            let (low, high) = (U::of(rect.low), U::of(rect.high));
            decoder.add(rect.start, rect.end, offset + low, offset + high);
        }
        offsets[index] = offset.wide();
    }
    run.offsets = Some(offsets);
    run
}

#[cfg(test)]
pub(super) mod tests;
