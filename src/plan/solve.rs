//! From a problem to offsets: which solver runs on what, for how long.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::binding::{self, Run};
use super::bound::{Bound, load_bound};
use super::core::{Normal, PoolCores, Stretch};
use super::portfolio::{
    Placed, PortfolioOptions, drawn_orders, first_order, largest_first, other_orders, portfolio,
};
use super::problem::{BINDING_MAX, BadProblem, Packing, PoolPacking, Problem};
use super::work::{Incumbent, Work};
use super::{exact, repair};
use crate::units::Stop;

/// What found the height of a pool in which nothing needs room.
const NOTHING: &str = "nothing to place";

/// Which planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Planner {
    /// Portfolio, repair and exact search.
    #[default]
    Best,
    /// Largest first, then earliest, each at the lowest offset: what several frameworks do.
    GreedyBySize,
}

impl Planner {
    /// Every planner.
    pub const ALL: [Planner; 2] = [Planner::Best, Planner::GreedyBySize];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Planner::Best => "best",
            Planner::GreedyBySize => "greedy-by-size",
        }
    }
}

/// How to solve.
#[derive(Clone, Debug)]
pub struct SolveOptions {
    /// Which planner.
    pub planner: Planner,
    /// How long, by the clock.
    pub time: Option<Duration>,
    /// How long, in units of work: then the result depends on nothing else.
    pub work_units: Option<u64>,
    /// For everything random.
    pub seed: u64,
    /// Threads that may be used at once.
    pub threads: usize,
    /// Asks the search to end with the best packing so far.
    pub stop: Stop,
}

impl Default for SolveOptions {
    fn default() -> Self {
        SolveOptions {
            planner: Planner::Best,
            time: Some(Duration::from_secs(10)),
            work_units: None,
            seed: 0,
            threads: 1,
            stop: Stop::default(),
        }
    }
}

/// A packing and what it took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Solved {
    /// The packing.
    pub packing: Packing,
    /// Units of work spent.
    pub work_units: u64,
}

/// Packs a problem.
///
/// # Errors
/// If the problem contradicts itself. A problem that does not fit its capacities is none: heights
/// tell. Where a pool has a capacity, the search for it ends as soon as its packing fits.
pub fn solve(problem: &Problem, options: &SolveOptions) -> Result<Solved, BadProblem> {
    let deadline = options.time.map(|time| Instant::now() + time);
    let normal = Normal::of(problem)?;
    let units = options.work_units.unwrap_or(u64::MAX);
    let mut work = Work::new(units, deadline).unless_asked(&options.stop);
    let unit_bytes = normal.unit_bytes;
    let pools = normal.pools.iter().map(|pool| Descent::of(problem, pool, unit_bytes));
    let mut pools: Vec<Descent<'_>> = pools.collect();
    // The first round places everything, whatever it costs. Then pools take turns.
    pools.iter_mut().for_each(|pool| pool.round(options, &mut work));
    while !work.over() && pools.iter().any(|pool| !pool.settled) {
        let waiting = pools.iter_mut().filter(|pool| !pool.settled);
        waiting.for_each(|pool| pool.round(options, &mut work));
    }
    let mut packing = Packing::default();
    let mut offsets = Vec::new();
    for pool in pools {
        let at = pool.pool.pool as usize;
        packing.pools.resize_with(packing.pools.len().max(at + 1), empty_pool);
        packing.pools[at] = pool.summary(problem, unit_bytes);
        offsets.push(pool.jobs.into_iter().map(|job| job.placed.offsets).collect());
    }
    packing.offsets_bytes = normal.offsets_bytes(&offsets);
    Ok(Solved { packing, work_units: work.spent_units() })
}

/// What is said of a pool without buffers: nothing is lower than nothing.
fn empty_pool() -> PoolPacking {
    PoolPacking { proven: true, found_by: NOTHING.to_owned(), ..PoolPacking::default() }
}

/// A pool on its way down: the highest lower bound of its stretches is as low as any of them
/// need be.
struct Descent<'a> {
    pool: &'a PoolCores,
    bounds: Vec<Bound>,
    jobs: Vec<Job<'a>>,
    /// The highest load of any stretch, floor included.
    load: u64,
    /// A height that fits its capacity: there is no need to go below.
    enough: u64,
    /// No packing is lower, as far as exact search could raise that above the load.
    proven: u64,
    /// As low as it can be, or need be.
    settled: bool,
}

impl<'a> Descent<'a> {
    fn of(problem: &Problem, pool: &'a PoolCores, unit_bytes: u64) -> Descent<'a> {
        let bounds: Vec<_> =
            pool.stretches.iter().map(|stretch| load_bound(&stretch.core, BINDING_MAX)).collect();
        let totals = pool.stretches.iter().zip(&bounds);
        let load = totals.map(|(stretch, bound)| stretch.floor_units + bound.height).max();
        let load = load.unwrap_or(0);
        let capacity = problem.capacities_bytes.get(pool.pool as usize).copied().flatten();
        let enough = match capacity.map(|bytes| bytes / unit_bytes) {
            None => 0,
            // Nothing can fit; any packing will do.
            Some(units) if units < load => u64::MAX,
            Some(units) => units,
        };
        let jobs = pool.stretches.iter().map(Job::new).collect();
        Descent { pool, bounds, jobs, load, enough, proven: load, settled: false }
    }

    /// Places all stretches the first time; then works on the highest of them, with more effort
    /// each time.
    ///
    /// Who takes part in a round, and what each may spend, depends on the rounds before and on
    /// nothing else; so the number of threads does not matter.
    fn round(&mut self, options: &SolveOptions, work: &mut Work<'_>) {
        let target = self.proven.max(self.enough);
        let highest = self.jobs.iter().map(Job::height).max().unwrap_or(0);
        // Those close to the highest are its next successors.
        let above = highest - highest.saturating_sub(target).div_ceil(4);
        let takes_part = |job: &&mut Job<'_>| job.steps == 0 || job.height() > above.max(target);
        let mut part: Vec<_> = self.jobs.iter_mut().filter(takes_part).collect();
        round(&mut part, target, options, work);
        self.proven = self.jobs.iter().fold(self.proven, |proven, job| proven.max(job.proven));
        let highest = self.jobs.iter().map(Job::height).max().unwrap_or(0);
        self.settled =
            highest <= self.proven.max(self.enough) || options.planner == Planner::GreedyBySize;
    }

    fn summary(&self, problem: &Problem, unit_bytes: u64) -> PoolPacking {
        let mut summary = PoolPacking { found_by: NOTHING.to_owned(), ..Default::default() };
        let mut height = 0;
        for job in &self.jobs {
            if job.height() > height {
                height = job.height();
                job.placed.found_by.clone_into(&mut summary.found_by);
            }
        }
        let stretches = self.pool.stretches.iter().zip(&self.bounds).enumerate();
        let reached = stretches
            .filter(|(_, (stretch, bound))| stretch.floor_units + bound.height == self.load);
        let runs = reached.flat_map(|(at, (stretch, bound))| {
            bound.binding.iter().map(move |(run, buffers)| Run {
                stretch: at,
                instants: run.clone(),
                buffers: buffers + stretch.floor_owners,
            })
        });
        summary.binding = binding::intervals(problem, self.pool, runs);
        summary.height_bytes = height * unit_bytes;
        summary.lower_bound_bytes = self.proven * unit_bytes;
        summary.proven = height == self.proven;
        summary
    }
}

/// Lets some jobs take a step each, side by side.
fn round(jobs: &mut [&mut Job<'_>], target: u64, options: &SolveOptions, work: &mut Work<'_>) {
    let inner = SolveOptions { threads: options.threads / jobs.len().max(1), ..options.clone() };
    let share = work.left_units() / jobs.len().max(1) as u64;
    let step = |job: &mut Job<'_>, work: &Work<'_>| job.step(target, &inner, work.part(share));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads);
    // Without a pool the result is the same, only later.
    let pool = if jobs.len() > 1 && options.threads > 1 { pool.build().ok() } else { None };
    match pool {
        Some(pool) => {
            let work = &*work;
            pool.install(|| jobs.par_iter_mut().for_each(|job| step(job, work)));
        }
        None => jobs.iter_mut().for_each(|job| step(job, work)),
    }
    work.spend(jobs.iter().map(|job| job.spent_units).sum());
}

/// Up to so many items, all orders are tried at once: it takes a few milliseconds.
const SMALL_ITEMS: usize = 2000;
/// Units of work an item that a first repair may take: some steps for every hundredth item.
const QUICK_UNITS: u64 = 100;
/// Units of work of the first search after the quick ones; each later one gets twice as many.
const SEARCH_UNITS: u64 = 1 << 21;

/// Orders that are drawn at random before every such search.
const DRAWN: u64 = 32;

/// A stretch on its way down.
struct Job<'a> {
    stretch: &'a Stretch,
    placed: Placed,
    /// Steps taken.
    steps: u32,
    /// Units that the last step took.
    spent_units: u64,
    /// No packing of the stretch is lower, floor included, as far as exact search knows.
    proven: u64,
}

impl<'a> Job<'a> {
    fn new(stretch: &'a Stretch) -> Job<'a> {
        Job { stretch, placed: Placed::default(), steps: 0, spent_units: 0, proven: 0 }
    }

    /// Its height, floor included.
    fn height(&self) -> u64 {
        self.stretch.floor_units + self.placed.height
    }

    /// Takes the next step towards a height of the pool, each more costly than the one before.
    fn step(&mut self, target: u64, options: &SolveOptions, mut work: Work<'_>) {
        let core = &self.stretch.core;
        let target = target - self.stretch.floor_units;
        let items = core.items.len();
        let small = items <= SMALL_ITEMS;
        let seed = options.seed.wrapping_add(u64::from(self.steps));
        let orders = PortfolioOptions { target, seed: options.seed, threads: options.threads };
        match self.steps {
            0 if options.planner == Planner::GreedyBySize => self.placed = largest_first(core),
            0 if small => self.placed = portfolio(core, &orders, &Incumbent::default(), &mut work),
            0 => self.placed = first_order(core, &mut work),
            1 if !small => other_orders(core, &orders, &mut self.placed, &mut work),
            // A small problem is often solved at once by asking for the target.
            1 if small => self.search(target, seed, 4 * SEARCH_UNITS, options, &mut work),
            1 | 2 => {
                let mut quick = work.part(items as u64 * QUICK_UNITS + SEARCH_UNITS / 8);
                repair::repair(core, &mut self.placed, target, seed, &mut quick);
                work.spend(quick.spent_units());
            }
            steps => {
                let units = SEARCH_UNITS.max(items as u64 * QUICK_UNITS) << (steps - 2).min(40);
                self.search(target, seed, units, options, &mut work);
                let target = target.max(self.proven.saturating_sub(self.stretch.floor_units));
                if self.placed.height > target && !work.over() {
                    let mut search = work.part(units);
                    let orders = PortfolioOptions { seed, ..orders };
                    drawn_orders(core, DRAWN, &orders, &mut self.placed, &mut search);
                    repair::repair(core, &mut self.placed, target, seed, &mut search);
                    work.spend(search.spent_units());
                }
            }
        }
        self.steps += 1;
        self.spent_units = work.spent_units();
    }

    /// Exact search with so many units.
    fn search(
        &mut self,
        target: u64,
        seed: u64,
        units: u64,
        options: &SolveOptions,
        work: &mut Work<'_>,
    ) {
        if self.placed.height <= target || work.over() {
            return;
        }
        let core = &self.stretch.core;
        let mut search = work.part(units);
        let threads = options.threads.max(1);
        let bound = exact::minimize(core, &mut self.placed, target, seed, threads, &mut search);
        // What it was told is no proof: a capacity may be above the bound.
        if bound > target {
            self.proven = self.proven.max(self.stretch.floor_units + bound);
        }
        work.spend(search.spent_units());
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{self, Shape};
    use super::*;

    fn solved(problem: &Problem, threads: usize, units: u64) -> Solved {
        let options = SolveOptions {
            time: None,
            work_units: Some(units),
            threads,
            ..SolveOptions::default()
        };
        solve(problem, &options).expect("not contradictory")
    }

    /// Several stretches of several steps each, cut off at every stage.
    #[test]
    fn units_alone_tell_the_result_on_any_number_of_threads() {
        for text in ["thin:9e3", "dense:8e3,layers=4", "moe:8e3,layers=4"] {
            let shape: Shape = text.parse().expect("a shape");
            let problem = synthetic::problem(&shape);
            for units in [0, 100_000, 1_000_000, 4_000_000] {
                let alone = solved(&problem, 1, units);
                for threads in [1, 2, 4] {
                    let same = solved(&problem, threads, units) == alone;
                    assert!(same, "{text}, {units} units, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn more_units_give_no_higher_packing() {
        let shape: Shape = "moe:8e3,layers=4".parse().expect("a shape");
        let problem = synthetic::problem(&shape);
        let heights =
            [0, 300_000, 3_000_000].map(|units| solved(&problem, 1, units).packing.height_bytes());
        assert!(heights.is_sorted_by(|more, less| more >= less), "{heights:?}");
    }
}
