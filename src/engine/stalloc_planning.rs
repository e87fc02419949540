//! STAlloc's planners on a whole problem, beside our own.
//!
//! They take times that are all different, the second step's bounds, and, for the group planner,
//! which phases a request lies between. Times come from the order of the problem's ticks (at one
//! tick, ends before starts); the rest from the marks of a trace.

use std::collections::HashMap;

use super::lifetimes::Lifetimes;
use super::planning::{PlanError, PlanSource, Planned, Stopwatch, planned};
use super::profile::steps_of;
use crate::plan::bound::load_bytes;
use crate::plan::stalloc::files::{ALIGNMENT_BYTES, ListedRequest};
use crate::plan::stalloc::group::{GroupError, GroupSettings, plan_groups};
use crate::plan::stalloc::size_classes::{self, Settings, SteadyIteration};
use crate::plan::{Buffer, Packing, PoolPacking, Problem, SolveOptions};
use crate::trace::{Op, Trace};

/// A planner of STAlloc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallocWay {
    /// By size classes: the tool's default.
    Size,
    /// By phases: the paper's.
    Group,
}

/// What STAlloc's planners want to know beside lifetimes and sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StallocHints {
    /// Ticks of the second step, half-open; nothing if there is none.
    pub steady: Option<(u64, u64)>,
    /// For every buffer, the number of its group: those that begin in one phase of the first or
    /// second step and end in another.
    pub groups: Vec<Option<u32>>,
}

/// A problem that STAlloc's planners cannot take.
#[derive(Debug, thiserror::Error)]
pub enum StallocPlanError {
    /// It asks for what they do not know.
    #[error(
        "buffer {buffer} has an alignment, a gap, a fixed offset or an alias, which STAlloc's \
         planners do not know; use --planner best"
    )]
    Special {
        /// The buffer.
        buffer: u64,
    },
    /// Blocks of several pools.
    #[error("STAlloc's planners know one memory only; use --streams together")]
    Pools,
    /// Sizes in other units.
    #[error(
        "STAlloc's planners place in multiples of {ALIGNMENT_BYTES} bytes; expected a granularity \
         that divides it"
    )]
    Granularity,
    /// The group planner.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The problem contradicts itself, or the packing is wrong.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// What the marks of a trace tell of its buffers.
pub fn stalloc_hints(trace: &Trace, lives: &Lifetimes) -> StallocHints {
    let steps = steps_of(trace);
    let steady = steps.get(1).map(|step| (step.start as u64, step.end as u64));
    // The number of the last mark before each event; 0 before the first.
    let mut phase_at = Vec::with_capacity(trace.events.len());
    let mut phase = 0u32;
    for event in &trace.events {
        phase += u32::from(matches!(event.op, Op::Mark(_)));
        phase_at.push(phase);
    }
    let last = trace.events.len() as u64;
    let mut numbers: HashMap<(usize, u32, u32), u32> = HashMap::new();
    let group = |buffer: &Buffer| {
        let within = |step: &std::ops::Range<usize>| step.contains(&(buffer.start as usize));
        let step = steps.iter().take(2).position(within)?;
        let ends = (buffer.end < last).then(|| phase_at[buffer.end as usize])?;
        let begins = phase_at[buffer.start as usize];
        let next = numbers.len() as u32;
        (begins != ends).then(|| *numbers.entry((step, begins, ends)).or_insert(next))
    };
    StallocHints { steady, groups: lives.problem.buffers.iter().map(group).collect() }
}

/// Packs a problem as STAlloc would, and checks the result.
///
/// # Errors
/// If the problem asks for what these planners do not know, or contradicts itself, and where the
/// group planner of the tool aborts.
pub fn plan_as_stalloc(
    source: PlanSource,
    problem: &Problem,
    way: StallocWay,
    hints: &StallocHints,
    options: &SolveOptions,
) -> Result<Planned, StallocPlanError> {
    let watch = Stopwatch::start();
    if let Some(buffer) = problem.buffers.iter().position(|buffer| buffer.extra.is_some()) {
        let pools = problem.buffers[buffer].pool() > 0;
        let special = StallocPlanError::Special { buffer: buffer as u64 };
        return Err(if pools { StallocPlanError::Pools } else { special });
    }
    if !ALIGNMENT_BYTES.is_multiple_of(problem.granularity_bytes.max(1)) {
        return Err(StallocPlanError::Granularity);
    }
    let load_bytes = load_bytes(problem).map_err(PlanError::from)?;
    let roomy = |buffer: &Buffer| buffer.size_bytes > 0 && buffer.start < buffer.end;
    let placed: Vec<usize> =
        (0..problem.buffers.len()).filter(|&at| roomy(&problem.buffers[at])).collect();
    let times = Times::of(problem, &placed);
    let requests: Vec<ListedRequest> = times.requests(problem, &placed);
    let steady = hints.steady.map_or(
        // Nothing begins then: no request is taken to repeat.
        SteadyIteration { start: u64::MAX, end: u64::MAX },
        |(start, end)| SteadyIteration { start: times.at(start), end: times.at(end) },
    );
    let base = Settings { steady, wrap_safe: false };
    let placement = match way {
        StallocWay::Size => size_classes::plan(&requests, &base),
        StallocWay::Group => {
            let group = |at: &usize| hints.groups.get(*at).copied().flatten();
            let groups: Vec<Option<u32>> = placed.iter().map(group).collect();
            plan_groups(&requests, &groups, &GroupSettings { base, faithful: false })?
        }
    };
    let mut packing = Packing {
        offsets_bytes: vec![0; problem.buffers.len()],
        pools: vec![PoolPacking::default()],
    };
    for (&at, &offset) in placed.iter().zip(&placement.offsets_bytes) {
        packing.offsets_bytes[at] = offset;
    }
    let tops = placed.iter().map(|&at| {
        let size = problem.buffers[at].size_bytes.next_multiple_of(problem.granularity_bytes);
        packing.offsets_bytes[at] + size
    });
    let height_bytes = tops.max().unwrap_or(0);
    let name = match way {
        StallocWay::Size => "stalloc-size",
        StallocWay::Group => "stalloc-group",
    };
    packing.pools[0] = PoolPacking {
        height_bytes,
        lower_bound_bytes: load_bytes,
        proven: height_bytes == load_bytes,
        binding: Vec::new(),
        found_by: name.to_owned(),
    };
    Ok(planned(source, problem, packing, name, options, &watch, 0)?)
}

/// Ticks as times that are all different.
struct Times {
    /// Ends (0) and starts (1) by tick, with the position among the placed buffers.
    order: Vec<(u64, u8, usize)>,
}

impl Times {
    fn of(problem: &Problem, placed: &[usize]) -> Times {
        let ends = placed.iter().enumerate();
        let mut order: Vec<(u64, u8, usize)> = ends
            .flat_map(|(at, &buffer)| {
                let buffer = &problem.buffers[buffer];
                [(buffer.start, 1, at), (buffer.end, 0, at)]
            })
            .collect();
        order.sort_unstable();
        Times { order }
    }

    /// The first time at or after a tick.
    fn at(&self, tick: u64) -> u64 {
        self.order.partition_point(|&(other, ..)| other < tick) as u64
    }

    fn requests(&self, problem: &Problem, placed: &[usize]) -> Vec<ListedRequest> {
        let size = |&at: &usize| problem.buffers[at].size_bytes;
        let blank = |size_bytes| ListedRequest { start: 0, end: 0, size_bytes };
        let mut requests: Vec<ListedRequest> = placed.iter().map(size).map(blank).collect();
        for (time, &(_, kind, at)) in (0u64..).zip(&self.order) {
            if kind == 1 {
                requests[at].start = time;
            } else {
                requests[at].end = time;
            }
        }
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{StreamRule, lifetimes};
    use crate::trace::read_text;

    const TWO_STEPS: &str = "\
alloc w 4KiB
mark step0.forward
alloc a 2KiB
alloc t 1KiB
free t
mark step0.backward
free a
mark step1.forward
alloc b 2KiB
mark step1.backward
free b
mark end
";

    #[test]
    fn groups_are_what_lies_between_the_same_two_phases_of_a_step() {
        let trace = read_text(TWO_STEPS).expect("a trace");
        let lives = lifetimes(&trace, 512, StreamRule::Together);
        let hints = stalloc_hints(&trace, &lives);
        assert_eq!(hints.steady, Some((7, 11)));
        assert_eq!(hints.groups, [None, Some(0), None, Some(1)]);
    }

    #[test]
    fn both_planners_place_what_is_easy_at_the_bound() {
        let trace = read_text(TWO_STEPS).expect("a trace");
        let lives = lifetimes(&trace, 512, StreamRule::Together);
        let hints = stalloc_hints(&trace, &lives);
        for way in [StallocWay::Size, StallocWay::Group] {
            let options = SolveOptions::default();
            let source = PlanSource::default();
            let planned = plan_as_stalloc(source, &lives.problem, way, &hints, &options);
            let result = planned.expect("a plain problem").result;
            assert_eq!((result.height_bytes, result.lower_bound_bytes), (7 << 10, 7 << 10));
        }
    }
}
