//! Two runs on one axis: which sites and phases explain the difference.
//!
//! The one design decision: live blocks are a matter of the trace alone, so that what two jobs
//! asked for is told apart from what two allocators made of it. Groups of live blocks add up to the
//! live bytes exactly, and their differences to the difference.
//!
//! ```text
//!   trace A ──┬─ replay ──> peaks, steps, split ──┐
//!             └─ live at an event, by group ──────┤
//!   trace B ──┬─ replay ──> ...                   ├─> TraceDiff
//!             └─ live ... ────────────────────────┘
//!   result A, result B ── figures by their path ───> ResultDiff
//! ```

mod live;
mod results;

use std::collections::BTreeMap;

use serde::Serialize;

pub use live::{GroupBy, Live, LiveGroup, LiveMoment, live_at, requested_peak_event};
pub use results::{CellDiff, FigureDiff, ResultDiff, ResultsError, diff_results, parse_results};

use crate::alloc::spec::AllocSpec;
use crate::engine::{
    Observe, Observed, Outcome, Prepared, RunError, RunOptions, RunResult, SCHEMA_VERSION,
};
use crate::metrics::{Peaks, Split, StepPeaks};
use crate::trace::{Op, Trace};
use crate::units::signed_difference;

/// At which events live blocks are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffAt {
    /// Where each trace has most bytes live.
    RequestedPeak,
    /// Where each allocator holds most.
    ReservedPeak,
    /// At an event of A and one of B.
    Events(u64, u64),
}

/// What is asked of a comparison of two traces.
#[derive(Clone, Debug)]
pub struct DiffRequest<'a> {
    /// The allocator of A.
    pub spec: &'a AllocSpec,
    /// Where to compare.
    pub at: DiffAt,
    /// By what to group; each gives a table.
    pub by: Vec<GroupBy>,
}

/// One of the two runs.
#[derive(Clone, Debug, Serialize)]
pub struct DiffSide {
    /// Name of the trace.
    pub name: String,
    /// Its source.
    pub source: String,
    /// The settings string that it was recorded with.
    pub settings: Option<String>,
    /// Number of events.
    pub events: u64,
    /// Number of allocs.
    pub allocs: u64,
    /// Most bytes that the program asks for at once, granted or not.
    pub requested_bytes_peak: u64,
    /// The allocator.
    pub allocator: String,
    /// Physical memory of the device in bytes; nothing without end.
    pub capacity_bytes: Option<u64>,
    /// How the replay ended.
    pub outcome: Outcome,
    /// The peaks of the replay; what was refused does not count.
    pub peaks: Peaks,
    /// 1 − requested peak / reserved peak.
    pub fragmentation: f64,
    /// What the unused memory is made of.
    pub split: Option<Split>,
    /// Device calls tried again after a flush.
    pub alloc_retries: u64,
    /// Device calls of all kinds.
    pub device_calls: u64,
    /// Where live blocks are compared: the event, or nothing before the first.
    pub at_event: Option<u64>,
    /// The phase then.
    pub at_phase: Option<String>,
}

impl DiffSide {
    fn new(trace: &Trace, result: RunResult, at_event: Option<u64>) -> DiffSide {
        DiffSide {
            name: result.trace.name,
            source: result.trace.source,
            settings: trace.header.settings.clone(),
            events: result.trace.events,
            allocs: result.trace.allocs,
            requested_bytes_peak: result.trace.requested_bytes_peak,
            allocator: result.allocator.name,
            capacity_bytes: result.device.capacity_bytes,
            outcome: result.outcome,
            peaks: result.peaks,
            fragmentation: result.fragmentation,
            split: result.split,
            alloc_retries: result.counters.get("alloc_retries").copied().unwrap_or(0),
            device_calls: result.calls.total(),
            at_event,
            at_phase: at_event.and_then(|event| trace.phase_at(event)).map(str::to_owned),
        }
    }
}

/// A group of live blocks in both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupDiff {
    /// What they have in common.
    pub group: String,
    /// Those of A.
    pub a: Live,
    /// Those of B.
    pub b: Live,
    /// Bytes of B − bytes of A.
    pub delta_bytes: i64,
}

/// The live blocks of both by one criterion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupTable {
    /// The criterion.
    pub by: GroupBy,
    /// Largest difference first.
    pub groups: Vec<GroupDiff>,
}

/// The peaks of a step in both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepDiff {
    /// `stepN`.
    pub step: String,
    /// Peaks of A in bytes; nothing where it has no such step.
    pub a: Option<StepLevels>,
    /// Peaks of B.
    pub b: Option<StepLevels>,
}

/// Peaks of a step in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepLevels {
    /// Live requests.
    pub requested_bytes_peak: u64,
    /// Live blocks as rounded.
    pub allocated_bytes_peak: u64,
    /// Memory held.
    pub reserved_bytes_peak: u64,
}

impl StepLevels {
    /// A step may have several rows: whichever is highest counts.
    fn join(&mut self, row: &StepPeaks) {
        let StepLevels { requested_bytes_peak, allocated_bytes_peak, reserved_bytes_peak } = self;
        *requested_bytes_peak = row.requested_bytes_peak.max(*requested_bytes_peak);
        *allocated_bytes_peak = row.allocated_bytes_peak.max(*allocated_bytes_peak);
        *reserved_bytes_peak = row.reserved_bytes_peak.max(*reserved_bytes_peak);
    }
}

/// A size that one asks for and the other does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SizeCount {
    /// Bytes.
    pub size_bytes: u64,
    /// How often.
    pub allocs: u64,
}

/// Two traces on one axis.
#[derive(Clone, Debug, Serialize)]
pub struct TraceDiff {
    /// Version of this layout.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// `traces`.
    pub kind: &'static str,
    /// The first.
    pub a: DiffSide,
    /// The second.
    pub b: DiffSide,
    /// Both ask for the same sizes and free the same blocks, in one order.
    pub same_requests: bool,
    /// Both ask for the same sizes equally often, in whatever order.
    pub same_sizes: bool,
    /// Which moment live blocks are compared at: `requested_peak`, `reserved_peak` or `event`.
    pub at: &'static str,
    /// Live blocks of A there.
    pub live_a: Live,
    /// Live blocks of B there.
    pub live_b: Live,
    /// Live blocks by criterion.
    pub tables: Vec<GroupTable>,
    /// Peaks step by step.
    pub steps: Vec<StepDiff>,
    /// Sizes that only A asks for, most bytes first.
    pub sizes_only_a: Vec<SizeCount>,
    /// Sizes that only B asks for, most bytes first.
    pub sizes_only_b: Vec<SizeCount>,
}

/// Compares two traces. Each is replayed with its own settings through one allocator.
///
/// # Errors
/// If one of the replays cannot be done.
pub fn diff_traces(
    [a, b]: [&Trace; 2],
    request: &DiffRequest<'_>,
    options: &RunOptions,
) -> Result<TraceDiff, RunError> {
    let observe = Observe { steps: true, ..Observe::default() };
    let run = |trace: &Trace| Prepared::new(trace, options).run(request.spec, None, observe);
    let (run_a, run_b) = rayon::join(|| run(a), || run(b));
    let (run_a, run_b) = (run_a?, run_b?);
    let event = |trace: &Trace, run: &Observed, asked: Option<u64>| match request.at {
        DiffAt::RequestedPeak => requested_peak_event(trace),
        DiffAt::ReservedPeak => Some(run.result.peaks.reserved_event),
        DiffAt::Events(..) => asked,
    };
    let asked = match request.at {
        DiffAt::Events(a, b) => (Some(a), Some(b)),
        _ => (None, None),
    };
    let (event_a, event_b) = (event(a, &run_a, asked.0), event(b, &run_b, asked.1));
    let (live_a, live_b) = (live_at(a, event_a), live_at(b, event_b));
    let tables = request.by.iter().map(|&by| table([a, b], by, [&live_a, &live_b]));
    let (sizes_a, sizes_b) = (sizes(a), sizes(b));
    Ok(TraceDiff {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        kind: "traces",
        same_requests: requests(a).eq(requests(b)),
        same_sizes: sizes_a == sizes_b,
        at: match request.at {
            DiffAt::RequestedPeak => "requested_peak",
            DiffAt::ReservedPeak => "reserved_peak",
            DiffAt::Events(..) => "event",
        },
        live_a: live_a.total(a),
        live_b: live_b.total(b),
        tables: tables.collect(),
        steps: steps(&run_a.steps, &run_b.steps),
        sizes_only_a: only(&sizes_a, &sizes_b),
        sizes_only_b: only(&sizes_b, &sizes_a),
        a: DiffSide::new(a, run_a.result, event_a),
        b: DiffSide::new(b, run_b.result, event_b),
    })
}

/// By what two traces are best grouped where nothing is asked for: sites and phases where either
/// has sites, else phases with sizes, which every trace has.
pub fn usual_grouping(traces: [&Trace; 2]) -> Vec<GroupBy> {
    let has_sites = traces.iter().any(|trace| !trace.sites.stacks.is_empty());
    if has_sites { vec![GroupBy::Site, GroupBy::Phase] } else { vec![GroupBy::PhaseAndSize] }
}

fn table(traces: [&Trace; 2], by: GroupBy, moments: [&LiveMoment; 2]) -> GroupTable {
    let mut groups: BTreeMap<String, [Live; 2]> = BTreeMap::new();
    for (side, (trace, moment)) in traces.into_iter().zip(moments).enumerate() {
        for LiveGroup { group, live } in moment.groups(trace, by) {
            groups.entry(group).or_default()[side] = live;
        }
    }
    let group = |(group, [a, b]): (String, [Live; 2])| GroupDiff {
        group,
        a,
        b,
        delta_bytes: signed_difference(a.bytes, b.bytes),
    };
    let mut groups: Vec<GroupDiff> = groups.into_iter().map(group).collect();
    // Stable: groups of one difference stay in the order of their names.
    groups.sort_by_key(|it| {
        std::cmp::Reverse((it.delta_bytes.unsigned_abs(), it.a.bytes.max(it.b.bytes)))
    });
    GroupTable { by, groups }
}

/// What a program asks for and gives back, in order: a size for an alloc, and for a free how many
/// allocs ago its block was asked for.
fn requests(trace: &Trace) -> impl Iterator<Item = (bool, u64)> + '_ {
    let mut asked = 0_u64;
    let mut born = vec![0_u64; trace.blocks.len()];
    trace.events.iter().filter_map(move |event| match event.op {
        Op::Alloc(block) => {
            asked += 1;
            *born.get_mut(block.index())? = asked;
            Some((true, trace.blocks[block.index()].size_bytes))
        }
        Op::Free(block) | Op::Defer(block) => Some((false, asked - *born.get(block.index())?)),
        _ => None,
    })
}

/// How often each size is asked for.
fn sizes(trace: &Trace) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for event in &trace.events {
        if let Op::Alloc(block) = event.op
            && let Some(block) = trace.blocks.get(block.index())
        {
            *sizes.entry(block.size_bytes).or_default() += 1;
        }
    }
    sizes
}

fn only(sizes: &BTreeMap<u64, u64>, others: &BTreeMap<u64, u64>) -> Vec<SizeCount> {
    let mine = sizes.iter().filter(|(size, _)| !others.contains_key(size));
    let mut mine: Vec<SizeCount> =
        mine.map(|(&size_bytes, &allocs)| SizeCount { size_bytes, allocs }).collect();
    mine.sort_by_key(|it| std::cmp::Reverse(u128::from(it.size_bytes) * u128::from(it.allocs)));
    mine
}

/// Steps of both by their names, those of A first; what lies outside of steps is left out.
fn steps(a: &[StepPeaks], b: &[StepPeaks]) -> Vec<StepDiff> {
    let mut steps: Vec<StepDiff> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let rows = a.iter().map(|row| (row, true)).chain(b.iter().map(|row| (row, false)));
    for (row, is_of_a) in rows.filter(|(row, _)| row.is_step()) {
        let place = *places.entry(&row.name).or_insert(steps.len());
        if place == steps.len() {
            steps.push(StepDiff { step: row.name.clone(), a: None, b: None });
        }
        let step = &mut steps[place];
        let side = if is_of_a { &mut step.a } else { &mut step.b };
        side.get_or_insert_default().join(row);
    }
    steps
}
