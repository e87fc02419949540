//! Which settings of PyTorch's allocator a job should have had.
//!
//! The one design decision: a search in two rounds whose second depends on the first as a whole,
//! never on which replay ended first, so that the advice is the same on any number of threads.
//!
//! ```text
//!   round 1   every value of every option alone        axes of the trace, ≈ 20 replays
//!               └─ values that helped, best 2 an option
//!   round 2   their combinations, an option at most once, no known trap    ≈ 10 replays
//!   round 3   the smallest capacity of the best few, and of what was recorded
//! ```
//!
//! Pruned: values that cannot matter on the trace ([`Trial::axes`]), combinations with a value that
//! did not help alone, combinations that are known to grow without bound.

use std::collections::BTreeSet;

use rayon::prelude::*;
use serde::Serialize;

use super::settings::{SettingsLine, Single, Trial, TrialError, Tried};
use crate::alloc::spec::AllocSpec;
use crate::engine::{CapacitySearch, Prepared, RunError, RunOptions, Status, brief};
use crate::trace::Trace;

/// What is to be least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// The reserved peak.
    #[default]
    Reserved,
    /// Retries: the cache given back because the device or the limit refused. Then the reserved
    /// peak.
    Retries,
    /// The smallest device on which every request is met.
    Capacity,
}

/// What to search, and how hard.
#[derive(Clone, Debug)]
pub struct AdviceRequest {
    /// What is to be least.
    pub goal: Goal,
    /// Other allocators to name beside the settings.
    pub what_ifs: Vec<AllocSpec>,
    /// How hard to look for smallest capacities; nothing for not at all.
    pub capacity: Option<CapacitySearch>,
}

/// What another allocator would do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The allocator as on the command line.
    pub allocator: String,
    /// Whether every request was met; absent if it could not be run on this trace.
    pub status: Option<Status>,
    /// Most memory that it held, in bytes.
    pub reserved_bytes_peak: u64,
    /// Device calls of all kinds.
    pub device_calls: u64,
    /// What they cost by the profile, in nanoseconds.
    pub device_ns: u64,
    /// Why it could not be run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// What was to be least.
    pub goal: Goal,
    /// With the settings asked for, else the recorded ones.
    pub recorded: Tried,
    /// What was tried, best first.
    pub tried: Vec<Tried>,
    /// The place in `tried` of what is advised: the plainest of those that are as good as the best.
    /// Absent if nothing is better than what was recorded, or nothing meets every request.
    pub advised: Option<usize>,
    /// Replays of whole traces, those of the capacity searches not counted.
    pub replays: u64,
    /// Combinations that were left out.
    pub pruned: u64,
    /// What other allocators would do.
    pub what_ifs: Vec<WhatIf>,
    /// Time that the recorded run took, in nanoseconds; 0 if the trace has no times.
    pub recorded_ns: u64,
    /// What the allocator may hold at most, in bytes: the smaller of its limit and the capacity.
    pub bound_bytes: Option<u64>,
    /// The event at which the recorded run was refused a request; such a trace ends early.
    pub refused_event: Option<u64>,
    /// Somebody asked to stop before the search was done: the advice is the best of what was tried.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
}

/// What counts as equally good: a two-hundredth of the figure.
const EQUAL_SHARE: u64 = 200;
/// What is no gain: less than a thousandth of the figure.
const NO_GAIN_SHARE: u64 = 1000;
/// Values of an option that combinations are made of.
const COMBINED_VALUES: usize = 2;
/// Strings whose smallest capacity is looked for, beside the recorded one.
const FINALISTS: usize = 3;
/// The same where the smallest capacity is the goal.
const FINALISTS_FOR_CAPACITY: usize = 10;
/// A trap that no combination may have: reserved memory can grow without bound.
const GROWS_WITHOUT_BOUND: &str = "max-split-with-expandable";

/// Searches the settings of PyTorch's allocator for a trace. `done` is called with the replays that
/// are done and those that are known to come, after each. If the options are asked to stop, what was
/// tried until then is all there is.
///
/// # Errors
/// If the recorded settings are none, or a replay could not be done; if the very first was not done
/// when somebody asked to stop.
pub fn advise(
    trace: &Trace,
    options: &RunOptions,
    request: &AdviceRequest,
    done: &(impl Fn(u64, u64) + Sync),
) -> Result<Advice, TrialError> {
    let trial = Trial::new(trace, options)?;
    let steps = Steps::new(done);
    let recorded = trial.run(&trial.base)?;
    let mut alone = trial.singles();
    alone.retain(|single| is_bounded(&trial, &single.line));
    steps.expect(alone.len());
    let (alone, first): (Vec<Single>, Vec<Tried>) =
        try_all(&trial, alone, &steps)?.into_iter().unzip();
    let (combined, pruned) = combinations(&trial, &recorded, &alone, &first, request.goal);
    steps.expect(combined.len() + request.what_ifs.len());
    let second = try_all(&trial, combined, &steps)?;
    let lines = alone.into_iter().map(|single| single.line);
    let mut tried: Vec<(SettingsLine, Tried)> = lines.zip(first).chain(second).collect();
    tried.sort_by_cached_key(|(_, tried)| rank(request.goal, tried));
    let what_ifs = request.what_ifs.par_iter().map(|spec| {
        let what_if = what_if(&trial, spec);
        steps.step();
        what_if
    });
    let what_ifs = what_ifs.filter_map(unless_cut).collect::<Result<Vec<WhatIf>, TrialError>>()?;
    let replays = 1 + tried.len() as u64 + what_ifs.len() as u64;
    let mut advice = Advice {
        goal: request.goal,
        recorded,
        tried: Vec::new(),
        advised: None,
        replays,
        pruned,
        what_ifs,
        recorded_ns: trace.events.last().map_or(0, |event| event.time_ns),
        bound_bytes: bound_bytes(&trial),
        refused_event: trace.first_attempt().map(|(event, _)| event),
        partial: false,
    };
    if let Some(search) = request.capacity {
        find_capacities(&trial, &mut advice, &mut tried, search, &steps)?;
    }
    advice.tried = tried.into_iter().map(|(_, tried)| tried).collect();
    let rows: Vec<&Tried> = advice.tried.iter().collect();
    advice.advised = advised(request.goal, &advice.recorded, &rows);
    advice.partial = options.stop.is_asked();
    Ok(advice)
}

/// What the allocator may hold at most.
fn bound_bytes(trial: &Trial<'_>) -> Option<u64> {
    let device = &trial.trace().header.device;
    let capacity = trial.options().capacity_bytes.or(device.capacity_bytes).or(device.total_bytes);
    trial.limit_bytes.into_iter().chain(capacity).min()
}

/// Counts replays for whoever shows progress.
struct Steps<'a, F> {
    done: std::sync::atomic::AtomicU64,
    known: std::sync::atomic::AtomicU64,
    tell: &'a F,
}

impl<'a, F: Fn(u64, u64) + Sync> Steps<'a, F> {
    fn new(tell: &'a F) -> Self {
        Steps { done: 0.into(), known: 0.into(), tell }
    }

    fn expect(&self, more: usize) {
        self.known.fetch_add(more as u64, std::sync::atomic::Ordering::Relaxed);
    }

    fn step(&self) {
        let done = self.done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        (self.tell)(done, self.known.load(std::sync::atomic::Ordering::Relaxed));
    }
}

impl AsRef<SettingsLine> for Single {
    fn as_ref(&self) -> &SettingsLine {
        &self.line
    }
}

impl AsRef<SettingsLine> for SettingsLine {
    fn as_ref(&self) -> &SettingsLine {
        self
    }
}

/// Whether a string is not known to let memory grow without bound.
fn is_bounded(trial: &Trial<'_>, line: &SettingsLine) -> bool {
    !trial.traps(line).iter().any(|trap| trap.id == GROWS_WITHOUT_BOUND)
}

/// Replays with each of some settings; those that were not done when somebody asked to stop are left
/// out.
fn try_all<L: AsRef<SettingsLine> + Send>(
    trial: &Trial<'_>,
    lines: Vec<L>,
    steps: &Steps<'_, impl Fn(u64, u64) + Sync>,
) -> Result<Vec<(L, Tried)>, TrialError> {
    let tried = lines.into_par_iter().map(|line| {
        let tried = trial.run(line.as_ref());
        steps.step();
        Ok((line, tried?))
    });
    tried.filter_map(unless_cut).collect()
}

/// An answer, unless it was not found because somebody asked to stop.
fn unless_cut<T>(answer: Result<T, TrialError>) -> Option<Result<T, TrialError>> {
    match answer {
        Err(TrialError::Run(RunError::Interrupted { .. })) => None,
        answer => Some(answer),
    }
}

/// Combinations of values that helped alone, and how many were left out.
fn combinations(
    trial: &Trial<'_>,
    recorded: &Tried,
    singles: &[Single],
    first: &[Tried],
    goal: Goal,
) -> (Vec<SettingsLine>, u64) {
    let mut helped: Vec<(&Single, &Tried)> =
        singles.iter().zip(first).filter(|(_, tried)| is_better(goal, tried, recorded)).collect();
    helped.sort_by_cached_key(|(_, tried)| rank(goal, tried));
    let mut kept: Vec<(&SettingsLine, &'static str, &str)> = Vec::new();
    for (single, _) in helped {
        let Some((key, value)) = &single.set else { continue };
        let of_option = kept.iter().filter(|other| other.1 == *key).count();
        if of_option < COMBINED_VALUES {
            kept.push((&single.line, key, value));
        }
    }
    let mut lines = BTreeSet::new();
    for (index, (line, key, _)) in kept.iter().enumerate() {
        for (_, other, value) in kept[index + 1..].iter().filter(|other| other.1 != *key) {
            lines.insert(line.with(other, value));
        }
    }
    lines.retain(|line| trial.accepts(line) && is_bounded(trial, line));
    let pruned = pairs_of(trial).saturating_sub(lines.len() as u64);
    (lines.into_iter().collect(), pruned)
}

/// Pairs of values of two options.
fn pairs_of(trial: &Trial<'_>) -> u64 {
    let axes = trial.axes();
    let counts: Vec<u64> = axes.iter().map(|axis| axis.values.len() as u64).collect();
    let pairs = counts.iter().enumerate();
    pairs.map(|(index, count)| count * counts[index + 1..].iter().sum::<u64>()).sum()
}

/// By what settings are ordered, best first; the string last, so that no two are equal.
type Rank = (u64, [u64; 5], String);

fn rank(goal: Goal, tried: &Tried) -> Rank {
    let reserved = tried.reserved_bytes_peak;
    let capacity = tried.smallest_capacity_bytes.unwrap_or(u64::MAX);
    let options = tried.keys.len() as u64;
    let figures = match goal {
        Goal::Reserved => [reserved, tried.alloc_retries, tried.device_ns, options, capacity],
        Goal::Retries => [tried.alloc_retries, reserved, tried.device_ns, options, capacity],
        Goal::Capacity => [capacity, reserved, tried.alloc_retries, tried.device_ns, options],
    };
    let failed = u64::from(tried.status == Status::Failed) << 32;
    (failed + tried.refusals, figures, tried.settings.clone())
}

/// The figure that is to be least.
fn figure(goal: Goal, tried: &Tried) -> u64 {
    match goal {
        Goal::Reserved => tried.reserved_bytes_peak,
        Goal::Retries => tried.alloc_retries,
        Goal::Capacity => tried.smallest_capacity_bytes.unwrap_or(tried.reserved_bytes_peak),
    }
}

/// Whether settings gain anything over others: fewer refusals, else less by a thousandth.
fn is_better(goal: Goal, tried: &Tried, than: &Tried) -> bool {
    let weight = |tried: &Tried| (tried.status == Status::Failed, tried.refusals);
    if weight(tried) != weight(than) {
        return weight(tried) < weight(than);
    }
    let (new, old) = (figure(goal, tried), figure(goal, than));
    new < old && (old - new) > old / NO_GAIN_SHARE
        || goal == Goal::Retries && new == old && is_better(Goal::Reserved, tried, than)
}

/// The plainest settings that are as good as the best, if those meet every request.
fn advised(goal: Goal, recorded: &Tried, tried: &[&Tried]) -> Option<usize> {
    let best = *tried.first()?;
    if best.status != Status::Ok || !is_better(goal, best, recorded) {
        return None;
    }
    let enough = |bytes: u64| bytes.saturating_add(bytes / EQUAL_SHARE);
    let equal = |tried: &Tried| {
        tried.status == Status::Ok
            && figure(goal, tried) <= enough(figure(goal, best))
            && tried.reserved_bytes_peak <= enough(best.reserved_bytes_peak)
            && is_better(goal, tried, recorded)
    };
    let equals = tried.iter().enumerate().filter(|(_, tried)| equal(tried));
    let plainest = equals.min_by_key(|(index, tried)| (tried.keys.len(), *index));
    plainest.map(|(index, _)| index)
}

fn find_capacities(
    trial: &Trial<'_>,
    advice: &mut Advice,
    tried: &mut [(SettingsLine, Tried)],
    search: CapacitySearch,
    steps: &Steps<'_, impl Fn(u64, u64) + Sync>,
) -> Result<(), TrialError> {
    let finalists = match advice.goal {
        Goal::Capacity => FINALISTS_FOR_CAPACITY,
        Goal::Reserved | Goal::Retries => FINALISTS,
    };
    let rows: Vec<&Tried> = tried.iter().map(|(_, tried)| tried).collect();
    let likely = advised(advice.goal, &advice.recorded, &rows);
    let places: BTreeSet<usize> = (0..finalists.min(tried.len())).chain(likely).collect();
    steps.expect(places.len() + 1);
    let capacity = |line: &SettingsLine| {
        let capacity = trial.smallest_capacity(line, search);
        steps.step();
        capacity
    };
    let capacity = |line: &SettingsLine| unless_cut(capacity(line)).transpose();
    advice.recorded.smallest_capacity_bytes = capacity(&trial.base)?.flatten();
    let places = tried.par_iter_mut().enumerate().filter(|(place, _)| places.contains(place));
    places.try_for_each(|(_, (line, tried))| -> Result<(), TrialError> {
        tried.smallest_capacity_bytes = capacity(line)?.flatten();
        Ok(())
    })?;
    if advice.goal == Goal::Capacity {
        tried.sort_by_cached_key(|(_, tried)| rank(Goal::Capacity, tried));
    }
    Ok(())
}

/// # Errors
/// If somebody asked to stop. That it cannot be run on this trace is an answer.
fn what_if(trial: &Trial<'_>, spec: &AllocSpec) -> Result<WhatIf, TrialError> {
    let prepared = Prepared::new(trial.trace(), trial.options());
    let mut what_if = WhatIf {
        allocator: spec.to_string(),
        status: None,
        reserved_bytes_peak: 0,
        device_calls: 0,
        device_ns: 0,
        message: None,
    };
    match brief(&prepared, spec, None) {
        Ok(brief) => {
            what_if.status = Some(brief.status());
            what_if.reserved_bytes_peak = brief.peaks.reserved_bytes_peak;
            what_if.device_calls = brief.calls.total();
            what_if.device_ns = brief.device_ns;
            what_if.message = brief.failure;
        }
        Err(error @ RunError::Interrupted { .. }) => return Err(error.into()),
        Err(error) => what_if.message = Some(error.to_string()),
    }
    Ok(what_if)
}
