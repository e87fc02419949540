//! Packs a problem, checks the packing, and says how good it is.

use std::time::Instant;

use serde::Serialize;

use super::replay::peak_rss_bytes;
use super::result::SCHEMA_VERSION;
use crate::plan::check::{Broken, beyond_capacity, check};
use crate::plan::reason::{Reason, irreducible};
use crate::plan::work::Work;
use crate::plan::{
    BadProblem, Binding, Packing, Planner, PoolPacking, Problem, SolveOptions, Solved, solve,
};

/// A problem could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It contradicts itself.
    #[error(transparent)]
    Problem(#[from] BadProblem),
    /// The solvers gave a packing that the independent check refuses.
    #[error("this is an error in fraglab, please report it: the packing is wrong: {0}")]
    Wrong(#[from] Broken),
}

impl PlanError {
    /// Buffers that the message names by their number.
    pub fn buffers(&self) -> Vec<u64> {
        let buffers = match self {
            PlanError::Problem(problem) => problem.buffers(),
            PlanError::Wrong(_) => Vec::new(),
        };
        buffers.into_iter().map(|at| at as u64).collect()
    }
}

/// Where a problem comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanSource {
    /// Its name.
    pub name: String,
    /// `trace`, `buffers` or `synthetic`.
    pub kind: &'static str,
    /// What a tick is: `event` or `tick`.
    pub tick: &'static str,
}

/// How well a problem could be packed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanResult {
    /// Version of this object.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// Where the problem comes from.
    pub source: PlanSource,
    /// Which planner.
    pub planner: &'static str,
    /// Seed of everything random.
    pub seed: u64,
    /// Buffers, those without bytes or life included.
    pub buffers: u64,
    /// Sizes are rounded up to multiples of this.
    pub granularity_bytes: u64,
    /// Bytes that the packing needs: heights of all pools together.
    pub height_bytes: u64,
    /// No packing needs less.
    pub lower_bound_bytes: u64,
    /// The height is the lowest possible.
    pub proven: bool,
    /// Work was asked to stop before its end. A valid packing all the same, but a longer search might
    /// have found a lower one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// height / lower bound − 1.
    pub gap: f64,
    /// Bytes of buffers that live from the first instant to the last: what no plan can move.
    pub full_span_bytes: u64,
    /// (height − full span) / (lower bound − full span) − 1: the gap in what can be planned.
    pub gap_above_full_span: f64,
    /// Pools one by one.
    pub pools: Vec<PoolPacking>,
    /// When the lower bound is reached, of all pools.
    pub binding: Vec<BindingInstant>,
    /// Whether it fits, if a capacity was given.
    pub capacity: Option<CapacityAnswer>,
    /// What a clock measured.
    pub wall: PlanWall,
}

/// An interval at which a pool's lower bound is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BindingInstant {
    /// Number of the pool.
    pub pool: u64,
    /// First tick and the first after it, and how many buffers are live.
    #[serde(flatten)]
    pub binding: Binding,
    /// The phase at its first tick, where the source has phases.
    pub phase: Option<String>,
}

/// Whether a packing fits into a capacity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CapacityAnswer {
    /// The capacity of each pool.
    pub capacity_bytes: u64,
    /// A packing that fits was found.
    pub fits: bool,
    /// Whether it is known that none fits.
    pub impossible: bool,
    /// Why not.
    pub reason: Option<CapacityReason>,
}

/// Why a capacity cannot be met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CapacityReason {
    /// `load`: these are live at once and need more; `shape`: these cannot be packed, and without
    /// any one of them could; `reduced`: these cannot be packed, perhaps fewer cannot either;
    /// `unknown`: no packing was found, and that there is none was not proven.
    pub kind: &'static str,
    /// The tick at which they are live at once.
    pub tick: Option<u64>,
    /// What they need together, in bytes, for `load`.
    pub bytes: Option<u64>,
    /// Buffers that do not fit: indices.
    pub buffers: Vec<u64>,
}

/// What a clock measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PlanWall {
    /// Seconds from the problem to checked offsets.
    pub seconds: f64,
    /// Of these, seconds of the check.
    pub check_seconds: f64,
    /// Processor seconds of this process for the packing, all threads, without the check; nothing
    /// where the system does not tell.
    pub cpu_seconds: Option<f64>,
    /// Units of work that the search spent.
    pub work_units: u64,
    /// Largest resident size of this process so far.
    pub peak_rss_bytes: u64,
}

/// A packing and what is said of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// The packing.
    pub packing: Packing,
    /// What is said of it.
    pub result: PlanResult,
}

/// Packs a problem and checks the result with code that the solvers do not share.
///
/// # Errors
/// If the problem contradicts itself.
pub fn plan(
    source: PlanSource,
    problem: &Problem,
    options: &SolveOptions,
) -> Result<Planned, PlanError> {
    let watch = Stopwatch::start();
    let Solved { packing, work_units } = solve(problem, options)?;
    planned(source, problem, packing, options.planner.name(), options, &watch, work_units)
}

/// When a search began.
pub(super) struct Stopwatch {
    started: Instant,
    cpu_seconds: Option<f64>,
}

impl Stopwatch {
    pub(super) fn start() -> Stopwatch {
        Stopwatch { started: Instant::now(), cpu_seconds: cpu_seconds() }
    }
}

/// Checks a packing and says how good it is. The search began with `watch` and has just ended.
///
/// # Errors
/// If the check refuses the packing.
pub(super) fn planned(
    source: PlanSource,
    problem: &Problem,
    packing: Packing,
    planner: &'static str,
    options: &SolveOptions,
    watch: &Stopwatch,
    work_units: u64,
) -> Result<Planned, PlanError> {
    let cpu_seconds = watch.cpu_seconds.and_then(|before| Some(cpu_seconds()? - before));
    let check_started = Instant::now();
    check(problem, &packing.offsets_bytes)?;
    let check_seconds = check_started.elapsed().as_secs_f64();
    let seconds = watch.started.elapsed().as_secs_f64();
    let capacity = capacity_answer(problem, &packing, options)?;
    let (height, bound) = (packing.height_bytes(), packing.lower_bound_bytes());
    let full_span_bytes = full_span_bytes(problem);
    let ratio = |height: u64, bound: u64| {
        if bound == 0 { 0.0 } else { height as f64 / bound as f64 - 1.0 }
    };
    let of_pool = |(pool, packing): (u64, &PoolPacking)| {
        let binding = packing.binding.iter().copied();
        let instants = binding.map(|binding| BindingInstant { pool, binding, phase: None });
        instants.collect::<Vec<_>>()
    };
    let result = PlanResult {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        source,
        planner,
        seed: options.seed,
        buffers: problem.buffers.len() as u64,
        granularity_bytes: problem.granularity_bytes,
        height_bytes: height,
        lower_bound_bytes: bound,
        proven: packing.proven(),
        partial: is_partial(&packing, capacity.as_ref(), options),
        gap: ratio(height, bound),
        full_span_bytes,
        gap_above_full_span: ratio(height - full_span_bytes, bound - full_span_bytes),
        pools: packing.pools.clone(),
        binding: (0..).zip(&packing.pools).flat_map(of_pool).collect(),
        capacity,
        wall: PlanWall {
            seconds,
            check_seconds,
            cpu_seconds,
            work_units,
            peak_rss_bytes: peak_rss_bytes(),
        },
    };
    Ok(Planned { packing, result })
}

/// Whether a longer search might have found a lower packing, but somebody asked to stop.
fn is_partial(
    packing: &Packing,
    capacity: Option<&CapacityAnswer>,
    options: &SolveOptions,
) -> bool {
    let is_done = packing.proven() || capacity.is_some_and(|answer| answer.fits);
    options.planner == Planner::Best && options.stop.is_asked() && !is_done
}

/// Whether a packing fits into the capacities of its problem, and if not, why. The reason may take
/// `time`, or `work_units`.
///
/// # Errors
/// If the problem contradicts itself.
fn capacity_answer(
    problem: &Problem,
    packing: &Packing,
    options: &SolveOptions,
) -> Result<Option<CapacityAnswer>, BadProblem> {
    let Some(capacity_bytes) = problem.capacities_bytes.iter().copied().flatten().min() else {
        return Ok(None);
    };
    let heights: Vec<u64> = packing.pools.iter().map(|pool| pool.height_bytes).collect();
    let Some(&pool) = beyond_capacity(problem, &heights).first() else {
        let answer = CapacityAnswer { capacity_bytes, fits: true, impossible: false, reason: None };
        return Ok(Some(answer));
    };
    let capacity_bytes = problem.capacities_bytes[pool].unwrap_or(capacity_bytes);
    let impossible = packing.pools[pool].lower_bound_bytes > capacity_bytes;
    let deadline = options.time.map(|time| Instant::now() + time);
    let units = options.work_units.unwrap_or(u64::MAX);
    let mut work = Work::new(units, deadline).unless_asked(&options.stop);
    let numbers = |buffers: Vec<usize>| buffers.into_iter().map(|at| at as u64).collect();
    let unknown = CapacityReason { kind: "unknown", tick: None, bytes: None, buffers: Vec::new() };
    let reason = match irreducible(problem, pool as u32, capacity_bytes, &mut work)? {
        Reason::Load { tick, buffers, bytes } => CapacityReason {
            kind: "load",
            tick: Some(tick),
            bytes: Some(bytes),
            buffers: numbers(buffers),
        },
        Reason::Irreducible { buffers } => {
            CapacityReason { kind: "shape", buffers: numbers(buffers), ..unknown }
        }
        Reason::Reduced { buffers } => {
            CapacityReason { kind: "reduced", buffers: numbers(buffers), ..unknown }
        }
        Reason::Fits | Reason::Unknown => unknown,
    };
    let impossible = impossible || reason.kind != "unknown";
    let answer = CapacityAnswer { capacity_bytes, fits: false, impossible, reason: Some(reason) };
    Ok(Some(answer))
}

/// Bytes of plain buffers that are live from the first tick of their pool to its last.
fn full_span_bytes(problem: &Problem) -> u64 {
    let mut spans: std::collections::BTreeMap<u32, (u64, u64)> = std::collections::BTreeMap::new();
    let roomy = || problem.buffers.iter().filter(|it| it.size_bytes > 0 && it.start < it.end);
    for buffer in roomy() {
        let span = spans.entry(buffer.pool()).or_insert((buffer.start, buffer.end));
        *span = (span.0.min(buffer.start), span.1.max(buffer.end));
    }
    let plain = |buffer: &&crate::plan::Buffer| {
        let special = |extra: &crate::plan::Extra| extra.alias.is_some() || !extra.gaps.is_empty();
        let throughout = spans.get(&buffer.pool()) == Some(&(buffer.start, buffer.end));
        throughout && !buffer.extra.as_deref().is_some_and(special)
    };
    let granule = problem.granularity_bytes;
    roomy().filter(plain).map(|buffer| buffer.size_bytes.div_ceil(granule) * granule).sum()
}

/// Processor seconds that this process has used, where the system tells.
fn cpu_seconds() -> Option<f64> {
    /// The kernel's unit in this file, whatever its own clock is.
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program stands in brackets and may hold blanks.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_A_SECOND)
}
