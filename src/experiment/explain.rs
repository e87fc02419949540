//! Is it fragmentation, which kind, what pins it, what would fix it, how much would have been enough.
//!
//! The one design decision: nothing is read off two peaks. The class comes from one moment, that of
//! the first refusal or else of the reserved peak, for the request of that moment; and what helps is
//! not deduced but replayed.
//!
//! ```text
//!   trace ──> replay ──┬─ a refusal? ──> moment ──> does live + request fit at all?   no: none
//!                      │                              └─ yes: the largest part of the split
//!                      └─ none ──> moment of the reserved peak: under 2 % unused?     yes: none
//!   then: settings (without one of them it is half gone), leak (live memory grows step by step)
//! ```

use rayon::prelude::*;
use serde::Serialize;

use super::settings::{SettingsLine, Trial, TrialError, Tried, with_empty_cache_each_step};
use crate::alloc::spec::AllocSpec;
use crate::device::{DeviceError, RefusedCall};
use crate::engine::{
    CapacitySearch, Observe, Prepared, RunOptions, RunResult, Status, When, brief, moments,
};
use crate::import::IsFragmentation;
use crate::metrics::{Growth, HoleGroup, Moment, PinGroup, Split};
use crate::trace::{Op, Trace, step_name};
use crate::units::StreamId;

/// Below this share of what is held, unused memory is no matter: what remains cannot be had by any
/// setting of an allocator. From the threads in which users tuned in vain over gaps of 0.1 to 2 %.
pub const NO_MATTER_SHARE: f64 = 0.02;
/// From this share on the loss is severe: utilization below 90 % is what STAlloc calls so.
pub const SEVERE_SHARE: f64 = 0.1;
/// Fixes are told that remove at least this share of what is unused.
const FIX_SHARE: f64 = 0.1;
/// How many groups of pins are kept.
const PINS_MAX: usize = 20;

/// What is the matter, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Not fragmentation: what is unused is no matter, or live memory and the request are too much
    /// for any allocator.
    None,
    /// Live blocks lie between what is free.
    Hard,
    /// Free memory in pieces that can never join.
    Soft,
    /// Free, but for another stream or pool, or in a pool that cannot give it back.
    Stream,
    /// Lost to rounding.
    Internal,
    /// Freed, and waiting for another stream.
    Deferred,
    /// The device refused although it had room.
    Driver,
    /// The settings themselves: without one of them it is gone or half gone.
    Settings,
    /// Live memory grows from step to step.
    Leak,
}

impl Class {
    /// The word in files: `none`, `hard`, `soft`, ...
    pub fn name(self) -> &'static str {
        match self {
            Class::None => "none",
            Class::Hard => "hard",
            Class::Soft => "soft",
            Class::Stream => "stream",
            Class::Internal => "internal",
            Class::Deferred => "deferred",
            Class::Driver => "driver",
            Class::Settings => "settings",
            Class::Leak => "leak",
        }
    }

    /// Whether an allocator, or its settings, could do better.
    pub fn is_fragmentation(self) -> IsFragmentation {
        match self {
            Class::None | Class::Deferred | Class::Driver | Class::Leak => IsFragmentation::No,
            _ => IsFragmentation::Yes,
        }
    }
}

/// Holes of one stream and pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HoleFigures {
    /// Raw handle of the stream; absent if any stream may use them.
    pub stream: Option<u64>,
    /// Name of the pool, if it has one.
    pub pool: Option<String>,
    /// Number of holes.
    pub holes: u64,
    /// Their sizes together.
    pub size_bytes: u64,
    /// The largest.
    pub largest_bytes: u64,
    /// Of them in segments, or on pages, without any block in use.
    pub whole_bytes: u64,
    /// Holes by size, smallest first.
    pub by_size: Vec<HoleSizes>,
}

/// Holes of about one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HoleSizes {
    /// They are of this size, a power of two, or larger, and below twice of it.
    pub from_bytes: u64,
    /// Number of holes.
    pub holes: u64,
    /// Their sizes together.
    pub size_bytes: u64,
}

/// One moment in figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MomentFigures {
    /// reserved − requested by kind.
    pub split: Split,
    /// Sum of live requests.
    pub requested_bytes: u64,
    /// Live blocks at rounded size.
    pub allocated_bytes: u64,
    /// Allocated and deferred.
    pub active_bytes: u64,
    /// Memory held.
    pub reserved_bytes: u64,
    /// The event of the request it is looked at for.
    pub request_event: u64,
    /// Bytes of that request.
    pub request_bytes: u64,
    /// Where in the program it is made.
    pub request_site: Option<String>,
    /// The phase it is made in.
    pub request_phase: Option<String>,
    /// Raw handle of its stream.
    pub request_stream: u64,
    /// Name of its pool.
    pub request_pool: Option<String>,
    /// The private pool that is entered then.
    pub private_pool: Option<String>,
    /// The largest hole that could serve it: when it was refused, or before it was met.
    pub largest_hole_bytes: u64,
    /// What the device still has; absent for one without end.
    pub device_free_bytes: Option<u64>,
    /// Number of segments.
    pub segments: u64,
    /// Segments without any block in use.
    pub whole_segments: u64,
    /// Free memory by stream and pool.
    pub holes: Vec<HoleFigures>,
    /// What pins, most first; at most 20 groups.
    pub pins: Vec<PinGroup>,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RefusalFigures {
    /// The recorded run was refused it.
    pub recorded: bool,
    /// The replay was, too. If not, it met the request: what bounded the recorded run is not known.
    pub replayed: bool,
    /// What the allocator may hold at most: the smaller of its limit and the capacity.
    pub bound_bytes: Option<u64>,
    /// The allocator's limit.
    pub limit_bytes: Option<u64>,
    /// The capacity of the device.
    pub capacity_bytes: Option<u64>,
    /// By how much live memory and the request are too much for the bound, if they are.
    pub short_bytes: Option<u64>,
    /// Requests that were refused in the replay.
    pub refusals: u64,
    /// The moment.
    pub moment: MomentFigures,
}

/// Something that would have helped, replayed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fix {
    /// What to do.
    pub kind: FixKind,
    /// The settings string, or a word for what else it is.
    pub what: String,
    /// What it gives.
    #[serde(flatten)]
    pub tried: Tried,
}

/// What kind of help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FixKind {
    /// A settings string.
    Settings,
    /// `torch.cuda.empty_cache()` at the beginning of each step.
    EmptyCache,
    /// A proposed change of the allocator: to search again after it waited for the device.
    ResearchAfterFlush,
}

/// Growth and its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GrowthFigures {
    /// Steps that it was taken over.
    pub steps: u64,
    /// The last of them.
    pub last_step: u64,
    /// Growth of live requests, in bytes a step.
    pub requested_bytes_per_step: u64,
    /// Growth of reserved memory, in bytes a step.
    pub reserved_bytes_per_step: u64,
    /// The step at which the bound would be reached, if it went on like this.
    pub runs_out_at_step: Option<u64>,
}

/// The whole answer.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// What is the matter.
    pub class: Class,
    /// Whether an allocator, or its settings, could do better.
    pub is_fragmentation: IsFragmentation,
    /// Unused at the moment that decides, as a share of what is held then.
    pub unused_share: f64,
    /// The settings in force; empty for the defaults.
    pub settings: String,
    /// The replay with them.
    #[serde(skip)]
    pub result: RunResult,
    /// At the reserved peak.
    pub peak: Option<MomentFigures>,
    /// At the first refusal.
    pub refusal: Option<RefusalFigures>,
    /// After the event that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<MomentFigures>,
    /// What would have helped, the best first.
    pub fixes: Vec<Fix>,
    /// Settings and the like that were replayed.
    pub replays: u64,
    /// The smallest device on which every request is met with the same settings and no limit.
    pub smallest_capacity_bytes: Option<u64>,
    /// What grows from step to step.
    pub growth: Option<GrowthFigures>,
}

/// Explains a trace: how its recorded allocator fared, or fares on the device and below the limit of
/// the options. `at_event` asks for one moment more: after that event. `done` is called with the
/// replays that are done and those known to come.
///
/// # Errors
/// If the settings are none or a replay could not be done.
pub fn explain(
    trace: &Trace,
    options: &RunOptions,
    at_event: Option<u64>,
    done: &(impl Fn(u64, u64) + Sync),
) -> Result<Explanation, TrialError> {
    let trial = Trial::new(trace, options)?;
    let prepared = Prepared::new(trace, options);
    let spec: AllocSpec = caching(&[]);
    let observe = Observe { steps: true, ..Observe::default() };
    let observed = prepared.run(&spec, None, observe)?;
    let result = observed.result;
    let attempt = trace.first_attempt();
    let recorded_before = attempt.map(|(event, _)| When::Before(event));
    let whens: Vec<When> =
        [When::ReservedPeak, When::FirstRefusal].into_iter().chain(recorded_before).collect();
    let seen = moments(&prepared, &spec, None, &whens)?;
    let refusal = refusal(trace, &result, &seen, attempt);
    let mut peak = seen[0].as_ref().map(|moment| figures(trace, moment));
    if let Some(peak) = &mut peak {
        // After the event the request lies in what was a hole, or in a new segment.
        let before = [When::Before(peak.request_event)];
        let before = moments(&prepared, &spec, None, &before)?.remove(0);
        peak.largest_hole_bytes = before.map_or(0, |moment| moment.largest_hole_bytes);
    }
    let asked = match at_event {
        Some(event) => moments(&prepared, &spec, None, &[When::After(event)])?.remove(0),
        None => None,
    };
    let asked = asked.map(|moment| figures(trace, &moment));
    let growth = Growth::of(&observed.steps).map(|growth| GrowthFigures {
        steps: growth.steps,
        last_step: growth.last_step,
        requested_bytes_per_step: growth.requested_bytes_per_step,
        reserved_bytes_per_step: growth.reserved_bytes_per_step,
        runs_out_at_step: bound_of(&result).and_then(|bound| growth.runs_out_at(bound)),
    });
    let candidates = candidates(&trial, trace);
    let (fixes, without) = fixes(&trial, &result, candidates, done)?;
    let deciding = refusal.as_ref().map(|refusal| &refusal.moment).or(peak.as_ref());
    let unused_share = deciding.map_or(0.0, unused_share);
    let mut class = match (&refusal, &peak) {
        (Some(refusal), _) => {
            let brief = brief(&prepared, &spec, None)?;
            class_of_refusal(refusal, brief.refused_call)
        }
        // What is unused at one moment and used at a later one could not have been saved.
        (None, Some(peak)) if result.fragmentation >= NO_MATTER_SHARE => largest_part(&peak.split),
        (None, _) => Class::None,
    };
    let is_too_much = refusal.as_ref().is_some_and(|refusal| refusal.short_bytes.is_some());
    let leaks = growth.is_some_and(|growth| is_leak(&growth, &result, deciding));
    if leaks && (refusal.is_none() || is_too_much) {
        class = Class::Leak;
    } else if class != Class::None && without.is_some_and(|tried| is_half_gone(&result, &tried)) {
        class = Class::Settings;
    }
    let smallest_capacity_bytes =
        trial.smallest_capacity(&trial.base, CapacitySearch::default())?;
    Ok(Explanation {
        class,
        is_fragmentation: class.is_fragmentation(),
        unused_share,
        settings: trial.base.to_string(),
        replays: fixes.1,
        fixes: fixes.0,
        result,
        peak,
        refusal,
        asked,
        smallest_capacity_bytes,
        growth,
    })
}

fn caching(params: &[(&str, &str)]) -> AllocSpec {
    let params = params.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
    AllocSpec { name: "caching".to_owned(), params: params.collect() }
}

/// What the allocator may hold at most.
fn bound_of(result: &RunResult) -> Option<u64> {
    let (limit, capacity) = (result.allocator.limit_bytes, result.device.capacity_bytes);
    limit.into_iter().chain(capacity).min()
}

/// The first refusal: the replay's, else the recorded run's.
fn refusal(
    trace: &Trace,
    result: &RunResult,
    seen: &[Option<Moment>],
    attempt: Option<(u64, u64)>,
) -> Option<RefusalFigures> {
    let replayed = seen[1].as_ref();
    let recorded = seen.get(2).and_then(Option::as_ref);
    let moment = figures(trace, replayed.or(recorded)?);
    let bound_bytes = bound_of(result);
    let short_bytes = bound_bytes.and_then(|bound| {
        let wanted = moment.requested_bytes.saturating_add(moment.request_bytes);
        wanted.checked_sub(bound).filter(|&short| short > 0)
    });
    let refusals = result.counters.get("ooms").copied().unwrap_or(0);
    Some(RefusalFigures {
        recorded: attempt.is_some_and(|(event, _)| event == moment.request_event),
        replayed: replayed.is_some(),
        bound_bytes,
        limit_bytes: result.allocator.limit_bytes,
        capacity_bytes: result.device.capacity_bytes,
        short_bytes,
        refusals,
        moment,
    })
}

fn figures(trace: &Trace, moment: &Moment) -> MomentFigures {
    let handle = |stream: StreamId| trace.streams.get(stream.index()).map(|stream| stream.handle);
    let pool = |pool: u32| moment.pool_names.get(&pool).cloned();
    let sizes = |&(exponent, holes, size_bytes): &(u32, u64, u64)| HoleSizes {
        from_bytes: 1 << exponent,
        holes,
        size_bytes,
    };
    let hole = |group: &HoleGroup| HoleFigures {
        stream: handle(group.stream),
        pool: pool(group.pool),
        holes: group.holes,
        size_bytes: group.size_bytes,
        largest_bytes: group.largest_bytes,
        whole_bytes: group.whole_bytes,
        by_size: group.by_size.iter().map(sizes).collect(),
    };
    let (segments, whole_segments) = moment.segments();
    MomentFigures {
        split: moment.split,
        requested_bytes: moment.requested_bytes,
        allocated_bytes: moment.levels.allocated_bytes,
        active_bytes: moment.levels.active_bytes,
        reserved_bytes: moment.levels.reserved_bytes,
        request_event: moment.request.event_index,
        request_bytes: moment.request.size_bytes,
        request_site: moment.request.site.clone(),
        request_phase: moment.request.phase.clone(),
        request_stream: handle(moment.request.stream).unwrap_or(0),
        request_pool: pool(moment.request.pool),
        private_pool: moment.request.private_pool.clone(),
        largest_hole_bytes: moment.largest_hole_bytes,
        device_free_bytes: moment.device_free_bytes,
        segments,
        whole_segments,
        holes: moment.holes.iter().map(hole).collect(),
        pins: moment.pin_groups().into_iter().take(PINS_MAX).collect(),
    }
}

/// Unused at a moment as a share of what is held.
fn unused_share(moment: &MomentFigures) -> f64 {
    let unused = moment.reserved_bytes.saturating_sub(moment.requested_bytes);
    unused as f64 / moment.reserved_bytes.max(1) as f64
}

/// The kind of which there is most.
fn largest_part(split: &Split) -> Class {
    let parts = [
        (split.hard_bytes, Class::Hard),
        (split.soft_bytes, Class::Soft),
        (split.stream_bytes, Class::Stream),
        (split.deferred_bytes, Class::Deferred),
        (split.internal_bytes, Class::Internal),
    ];
    // Of equal ones the first, which more can be done about.
    let most = parts.iter().map(|part| part.0).max().unwrap_or(0);
    let found = parts.iter().find(|part| part.0 == most && most > 0);
    found.map_or(Class::None, |part| part.1)
}

/// Why a request was refused.
fn class_of_refusal(refusal: &RefusalFigures, refused_call: Option<RefusedCall>) -> Class {
    let moment = &refusal.moment;
    if refusal.short_bytes.is_some() {
        return Class::None;
    }
    // After it had waited for the device there was a hole, and it was not looked at again.
    if refusal.replayed && moment.largest_hole_bytes >= moment.request_bytes {
        return Class::Deferred;
    }
    let has_room = match (refusal.replayed, refused_call.map(|call| call.error)) {
        (true, Some(DeviceError::OutOfMemory { requested_bytes, free_bytes, .. })) => {
            free_bytes >= requested_bytes
        }
        // No addresses, no mappings.
        (true, Some(_)) => true,
        (true, None) => false,
        // The replay met the request although it knows of a bound.
        (false, _) => {
            refusal.bound_bytes.is_some()
                && (unused_share(moment) < NO_MATTER_SHARE
                    || moment.largest_hole_bytes >= moment.request_bytes)
        }
    };
    if has_room {
        return Class::Driver;
    }
    if unused_share(moment) < NO_MATTER_SHARE {
        return Class::None;
    }
    match largest_part(&moment.split) {
        // Whole segments are given back in a flush, but never while a private pool is entered.
        Class::Soft if moment.private_pool.is_some() => Class::Stream,
        class => class,
    }
}

/// What could be replayed.
struct Candidate {
    kind: FixKind,
    line: SettingsLine,
    /// The base with options left out.
    leaves_out: bool,
}

/// Every value of every option alone, the base without each of its options, and the like.
fn candidates(trial: &Trial<'_>, trace: &Trace) -> Vec<Candidate> {
    let settings = trial.singles().into_iter().map(|single| Candidate {
        kind: FixKind::Settings,
        leaves_out: single.set.is_none(),
        line: single.line,
    });
    let mut candidates: Vec<Candidate> = settings.collect();
    let other = |kind| Candidate { kind, line: trial.base.clone(), leaves_out: false };
    if trace.phases.iter().any(|phase| step_name(phase).is_some()) {
        candidates.push(other(FixKind::EmptyCache));
    }
    if trace.events.iter().any(|event| matches!(event.op, Op::Defer(_))) {
        candidates.push(other(FixKind::ResearchAfterFlush));
    }
    candidates
}

/// Those that help, how many were replayed, and the best of those that leave out an option.
type Fixes = ((Vec<Fix>, u64), Option<Tried>);

/// Replays the candidates.
fn fixes(
    trial: &Trial<'_>,
    result: &RunResult,
    candidates: Vec<Candidate>,
    done: &(impl Fn(u64, u64) + Sync),
) -> Result<Fixes, TrialError> {
    let count = std::sync::atomic::AtomicU64::new(0);
    let all = candidates.len() as u64;
    let tried = candidates.par_iter().map(|candidate| -> Result<Tried, TrialError> {
        let tried = match candidate.kind {
            FixKind::Settings => trial.run(&candidate.line)?,
            FixKind::EmptyCache => {
                let trace = with_empty_cache_each_step(trial.trace());
                of_brief(&Prepared::new(&trace, trial.options()), &caching(&[]), trial)?
            }
            FixKind::ResearchAfterFlush => {
                let prepared = Prepared::new(trial.trace(), trial.options());
                of_brief(&prepared, &caching(&[("research_after_flush", "true")]), trial)?
            }
        };
        done(count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1, all);
        Ok(tried)
    });
    let tried = tried.collect::<Result<Vec<Tried>, TrialError>>()?;
    let left_out = candidates.iter().zip(&tried).filter(|(candidate, _)| candidate.leaves_out);
    let without = left_out.map(|(_, tried)| tried.clone()).min_by_key(order);
    let mut fixes: Vec<Fix> = Vec::new();
    for (candidate, tried) in candidates.into_iter().zip(tried) {
        if helps(result, &tried) {
            let what = match candidate.kind {
                FixKind::Settings => tried.settings.clone(),
                FixKind::EmptyCache => "empty_cache at each step".to_owned(),
                FixKind::ResearchAfterFlush => "research_after_flush".to_owned(),
            };
            fixes.push(Fix { kind: candidate.kind, what, tried });
        }
    }
    fixes.sort_by_cached_key(|fix| (order(&fix.tried), fix.what.clone()));
    Ok(((fixes, all), without))
}

fn of_brief(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    trial: &Trial<'_>,
) -> Result<Tried, TrialError> {
    let brief = brief(prepared, spec, None)?;
    Ok(Tried::of(&trial.base, &brief, Vec::new()))
}

/// Fewest refusals first, then by what is held and what it costs.
fn order(tried: &Tried) -> (bool, u64, u64, u64) {
    let failed = tried.status == Status::Failed;
    (failed, tried.refusals, tried.reserved_bytes_peak, tried.device_ns)
}

/// Whether a run is better in what matters: fewer refusals, else less held by a tenth of what is
/// unused.
fn helps(result: &RunResult, tried: &Tried) -> bool {
    let refusals = result.counters.get("ooms").copied().unwrap_or(0);
    if tried.status == Status::Failed || tried.refusals > refusals {
        return false;
    }
    if tried.refusals < refusals {
        return true;
    }
    let (old, new) = (result.peaks.reserved_bytes_peak, tried.reserved_bytes_peak);
    let unused = old.saturating_sub(result.peaks.requested_bytes_peak) as f64;
    refusals == 0 && old.saturating_sub(new) as f64 >= (FIX_SHARE * unused).max(1.0)
}

/// Whether half of what is unused, or every refusal, is gone.
fn is_half_gone(result: &RunResult, tried: &Tried) -> bool {
    let refusals = result.counters.get("ooms").copied().unwrap_or(0);
    if refusals > 0 {
        return tried.status == Status::Ok;
    }
    let (old, new) = (result.peaks.reserved_bytes_peak, tried.reserved_bytes_peak);
    let unused = old.saturating_sub(result.peaks.requested_bytes_peak);
    tried.status == Status::Ok && old.saturating_sub(new) >= unused.div_ceil(2).max(1)
}

/// Whether it is live memory that grows: at least half of what is held more from step to step, and
/// over all steps more than what does not matter; where nothing was refused also more than what is
/// unused, which else is the matter.
fn is_leak(growth: &GrowthFigures, result: &RunResult, moment: Option<&MomentFigures>) -> bool {
    let per_step = growth.requested_bytes_per_step;
    let all = per_step.saturating_mul(growth.last_step + 1);
    let matters = all as f64 >= NO_MATTER_SHARE * result.peaks.reserved_bytes_peak as f64;
    let unused =
        moment.map_or(0, |moment| moment.reserved_bytes.saturating_sub(moment.requested_bytes));
    let refused = result.outcome.status == Status::Oom;
    per_step > 0
        && per_step.saturating_mul(2) >= growth.reserved_bytes_per_step
        && matters
        && (refused || all >= unused)
}
