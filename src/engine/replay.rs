//! The replay loop: one, compiled for each allocator, device and sink.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;

use super::chunked;
use super::completions::Completions;
use super::hardware::HardwareError;
use super::loading::Loading;
use super::prepared::{DeviceSize, Prepared};
use super::result::{
    AddressSpread, AllocatorSummary, CardSummary, DeviceSummary, FinalLevels, Outcome, RunResult,
    SCHEMA_VERSION, SimulatedTime, StartSummary, Status, Wall, caps,
};
use super::steps::{StepMeter, step_begins};
use crate::alloc::planned::PlanFiles;
use crate::alloc::registry::{self, Visitor};
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::alloc::{
    Action, Allocator, BuildInputs, Env, Handle, LayoutBlock, OutOfMemory, Request,
};
use crate::chunk::{self, ChunkError, ChunkEvent, Gpu, GpuBlock, LinkCostsError};
use crate::device::sim::addresses::Addresses;
use crate::device::{CallCounts, CostProfile, Counting, Device, Faulty, RefusedCall, Sim};
use crate::metrics::{
    DecisionRow, Decisions, Envelope, EnvelopePoint, MapSink, MemoryMap, Moment, NoSink,
    PeakTracker, Peaks, Shadow, Sink, Split, SplitAt, StepPeakTracker, StepPeaks, Stopped,
    Timeline, TimelineRow, split,
};
use crate::trace::{
    AddressPolicy, Event, Op, SourceKind, StartBlock, StartLayout, StartState, Trace,
    resident_bytes_peak,
};
use crate::units::{BlockId, Bytes, PoolId, SettingsId, Stop, StreamId, grouped};

/// How to run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Physical capacity; else the trace's, else the recorded device's total, else unlimited.
    pub capacity_bytes: Option<u64>,
    /// The allocator's own limit; else that of the settings, else the trace's.
    pub limit_bytes: Option<u64>,
    /// Most bytes of addresses, those of mallocs and of reservations together; else the trace's,
    /// else as many as the address policy has.
    pub address_bytes_max: Option<u64>,
    /// Most mappings at once; else the trace's, else any number.
    pub mappings_max: Option<u64>,
    /// The settings string; else the trace's.
    pub settings: Option<String>,
    /// What device calls cost.
    pub profile: CostProfile,
    /// Where addresses come from; else the trace's, else `chunks` for allocators that depend on
    /// addresses and the cheaper `ascending` for those that do not.
    pub address_policy: Option<AddressPolicy>,
    /// End at the first refused request.
    pub stop_on_oom: bool,
    /// Check the contract after every event with an independent shadow map.
    pub paranoid: bool,
    /// Address policies to try for [`RunResult::address_spread`]: 0 for none of it.
    pub address_seeds: u32,
    /// How many steps at the beginning of a trace are the profile of allocators that plan ahead;
    /// else as many as [`steps_to_profile`](super::steps_to_profile) says.
    pub profile_steps: Option<u64>,
    /// Whole traces that are profiles, by the name that a specification calls them (`trace=NAME`).
    pub profiles: BTreeMap<String, Arc<Trace>>,
    /// Plans from files of STAlloc, by the name that a specification calls them (`plan=NAME`).
    pub plans: BTreeMap<String, Arc<PlanFiles>>,
    /// Asks the replay to end early, with [`RunError::Interrupted`].
    pub stop: Stop,
}

impl RunOptions {
    /// Everything from the trace, costs from `profile`.
    pub fn new(profile: CostProfile) -> Self {
        RunOptions {
            capacity_bytes: None,
            limit_bytes: None,
            address_bytes_max: None,
            mappings_max: None,
            settings: None,
            profile,
            address_policy: None,
            stop_on_oom: false,
            paranoid: false,
            address_seeds: 0,
            profile_steps: None,
            profiles: BTreeMap::new(),
            plans: BTreeMap::new(),
            stop: Stop::default(),
        }
    }

    /// The plan that a specification names.
    fn plan_files_of(&self, spec: &AllocSpec) -> Option<Arc<PlanFiles>> {
        let (_, name) = spec.params.iter().find(|(key, _)| key == "plan")?;
        self.plans.get(name).cloned()
    }
}

/// What to watch beside the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observe {
    /// Keep a row an action.
    pub decisions: bool,
    /// Keep a row an event.
    pub timeline: bool,
    /// Keep at most so many points of the time line, each the highest levels of a stretch of events.
    pub envelope: Option<usize>,
    /// Keep the peaks of every step.
    pub steps: bool,
    /// Keep a map of memory with at most so many blocks exactly.
    pub map_blocks: Option<usize>,
}

/// A result and what was watched.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The result.
    pub result: RunResult,
    /// A row an action, empty unless asked for.
    pub decisions: Vec<DecisionRow>,
    /// A row an event, empty unless asked for.
    pub timeline: Vec<TimelineRow>,
    /// The time line in a bounded number of points, empty unless asked for.
    pub envelope: Vec<EnvelopePoint>,
    /// A row a step, and one for what lies before, between and after them; empty unless asked for.
    pub steps: Vec<StepPeaks>,
    /// The map of memory, if it was asked for.
    pub map: Option<MemoryMap>,
    /// What the manager of `chunk` decided; empty for other allocators.
    pub chunk_log: Vec<ChunkEvent>,
}

/// A run could not be done.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The allocator could not be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The trace cannot go through the chunk manager.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The costs of moves that ship cannot be read: a mistake of this program.
    #[error("costs of moves between host and GPU: {0}")]
    LinkCosts(#[from] LinkCostsError),
    /// Recorded addresses are asked for, but there are none.
    #[error(
        "address policy `recorded` needs a recording of device addresses, and this trace has none; \
         use chunks, ascending or descending"
    )]
    NoRecordedAddresses,
    /// The allocator broke its contract (`paranoid`).
    #[error("{allocator} broke the contract at event {event}: {message}")]
    Contract {
        /// The allocator.
        allocator: String,
        /// Index of the event.
        event: u64,
        /// What was broken.
        message: String,
    },
    /// The hardware could not be used.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// [`RunOptions::stop`] was asked.
    #[error(
        "{allocator}: interrupted at event {} of {}, {} reserved at most until then",
        grouped(*.event), grouped(*.events), Bytes(*.reserved_bytes_peak)
    )]
    Interrupted {
        /// The allocator.
        allocator: String,
        /// Index of the event that would have been next; 0 if the replay had not begun.
        event: u64,
        /// Events of the trace.
        events: u64,
        /// Most bytes that were reserved until then: no less than that would have been the peak.
        reserved_bytes_peak: u64,
    },
}

impl RunError {
    /// What is said of a replay that was not begun because somebody asked to stop; nothing if nobody
    /// did.
    fn if_asked(prepared: &Prepared<'_>, spec: &AllocSpec) -> Result<(), RunError> {
        if !prepared.options().stop.is_asked() {
            return Ok(());
        }
        Err(RunError::Interrupted {
            allocator: spec.to_string(),
            event: 0,
            events: prepared.trace().events.len() as u64,
            reserved_bytes_peak: 0,
        })
    }
}

/// Events between two looks at [`RunOptions::stop`]: a look costs nothing beside so many, and even
/// where the shadow map checks each of them they do not take long.
const STOP_EVENTS: usize = 1 << 8;

/// The devices of a replay, one around the other.
pub(super) type Wrapped<D> = Counting<Faulty<D>>;

/// Those of a simulated one.
type SimDevice = Wrapped<Sim>;

/// Everything that may watch a replay beside what its caller looks for: decisions, time line,
/// envelope and peaks of steps, the shadow map and the map of memory.
pub(super) type Sinks = (
    Option<Decisions>,
    (
        Option<Timeline>,
        ((Option<Envelope>, Option<StepPeakTracker>), (Option<Shadow>, Option<MapSink>)),
    ),
);

/// Takes a trace through one allocator on a simulated device.
///
/// # Errors
/// If the allocator cannot be built from its specification. Running out of memory is a result, not
/// an error.
pub fn run(
    trace: &Trace,
    spec: &AllocSpec,
    options: &RunOptions,
    observe: Observe,
) -> Result<Observed, RunError> {
    Prepared::new(trace, options).run(spec, None, observe)
}

/// Takes a prepared trace through one allocator on a device of this size.
///
/// # Errors
/// As [`run`].
pub(super) fn run_on(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    observe: Observe,
) -> Result<Observed, RunError> {
    RunError::if_asked(prepared, spec)?;
    if spec.name == chunk::NAME {
        return chunked::run(prepared, spec, size, observe);
    }
    let (runner, inputs) = prepare(prepared, spec, size, observe);
    registry::build(spec, &inputs, runner)?
}

/// Lets `drive` ask an allocator for memory request by request, on a device as the trace's replay
/// has it.
///
/// # Errors
/// As [`run`].
pub(super) fn live<R>(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    drive: impl FnOnce(&mut dyn Gpu) -> R,
) -> Result<R, RunError> {
    let (runner, inputs) = prepare(prepared, spec, size, Observe::default());
    registry::build(spec, &inputs, Live { runner, drive })?
}

/// Takes a prepared trace through one allocator with a sink of the caller's, and nothing else.
///
/// # Errors
/// As [`run`].
pub(super) fn watch<S: Sink>(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    stop_on_oom: bool,
    sink: S,
) -> Result<(Watched, S), RunError> {
    RunError::if_asked(prepared, spec)?;
    if spec.name == chunk::NAME {
        return chunked::watch_managed(prepared, spec, size, stop_on_oom, sink);
    }
    let (mut runner, inputs) = prepare(prepared, spec, size, Observe::default());
    runner.stop_on_oom = stop_on_oom;
    registry::build(spec, &inputs, Watcher { runner, sink })?
}

/// What a replay gives that is not asked for anything else: one pass, no split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brief {
    /// The peaks.
    pub peaks: Peaks,
    /// The last call that the device refused for the first refused request; absent if nothing was
    /// refused, or the allocator refused by itself.
    pub refused_call: Option<RefusedCall>,
    /// Requests that were refused.
    pub refusals: u64,
    /// What the real allocator would not have survived.
    pub failure: Option<String>,
    /// Device calls that succeeded.
    pub calls: CallCounts,
    /// What they cost by the profile, in nanoseconds.
    pub device_ns: u64,
    /// How often the allocator gave its cache back and asked the device again.
    pub alloc_retries: u64,
}

impl Brief {
    /// How it ended.
    pub fn status(&self) -> Status {
        match (&self.failure, self.refusals) {
            (Some(_), _) => Status::Failed,
            (None, 0) => Status::Ok,
            (None, _) => Status::Oom,
        }
    }

    /// 1 − requested peak / reserved peak; 0 when nothing was reserved.
    pub fn fragmentation(&self) -> f64 {
        match self.peaks.reserved_bytes_peak {
            0 => 0.0,
            reserved => 1.0 - self.peaks.requested_bytes_peak as f64 / reserved as f64,
        }
    }
}

/// Takes a trace through one allocator and tells no more than its levels, refusals and calls: half
/// the work of [`run`].
///
/// # Errors
/// As [`run`].
pub fn brief(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    capacity_bytes: Option<u64>,
) -> Result<Brief, RunError> {
    let size = capacity_bytes.map_or(prepared.asked_size(), DeviceSize::Bytes);
    let stop_on_oom = prepared.options().stop_on_oom;
    let (watched, _) = watch(prepared, spec, size, stop_on_oom, NoSink)?;
    Ok(Brief {
        peaks: watched.peaks,
        refused_call: watched.refusal.and_then(|refusal| refusal.refused_call),
        refusals: watched.refusals,
        failure: watched.failure,
        calls: watched.calls,
        device_ns: watched.device_ns,
        alloc_retries: watched.alloc_retries,
    })
}

/// When to look at what an allocator holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// After the event at which most is reserved.
    ReservedPeak,
    /// After the first request that is refused, what the allocator tried for it included.
    FirstRefusal,
    /// Before this event.
    Before(u64),
    /// After this event.
    After(u64),
}

/// Takes a trace through one allocator on a device of `capacity_bytes` (else of the size that the
/// options or the trace name) and looks at what it holds at some moments. A moment that never comes
/// is nothing. Costs a replay, and one more a moment.
///
/// # Errors
/// As [`run`].
pub fn moments(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    capacity_bytes: Option<u64>,
    whens: &[When],
) -> Result<Vec<Option<Moment>>, RunError> {
    let size = capacity_bytes.map_or(prepared.asked_size(), DeviceSize::Bytes);
    moments_on(prepared, spec, size, whens)
}

/// [`moments`] on a device of this size.
///
/// # Errors
/// As [`run`].
pub(super) fn moments_on(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    whens: &[When],
) -> Result<Vec<Option<Moment>>, RunError> {
    if spec.name == chunk::NAME {
        return chunked::moments(prepared, spec, size, whens);
    }
    let (runner, inputs) = prepare(prepared, spec, size, Observe::default());
    registry::build(spec, &inputs, Looker { runner, whens })?
}

/// What [`watch`] leaves behind, beside the sink.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    /// The peaks.
    pub(super) peaks: Peaks,
    /// What the real allocator would not have survived.
    pub(super) failure: Option<String>,
    /// The first refused request.
    pub(super) refusal: Option<Refusal>,
    /// Requests that were refused.
    pub(super) refusals: u64,
    /// Device calls that succeeded.
    pub(super) calls: CallCounts,
    /// What they cost, in nanoseconds.
    pub(super) device_ns: u64,
    /// The allocator's counter of that name.
    pub(super) alloc_retries: u64,
    /// What bounds the run.
    pub(super) bounds: Bounds,
    /// The allocator took over the layout that the history begins with.
    pub(super) layout_kept: bool,
}

/// The runner of a trace and what its allocator may know.
pub(super) fn prepare<'a>(
    prepared: &'a Prepared<'a>,
    spec: &'a AllocSpec,
    size: DeviceSize,
    observe: Observe,
) -> (Runner<'a>, BuildInputs) {
    let (trace, options) = (prepared.trace(), prepared.options());
    let (capacity_bytes, total_bytes) = size.capacity_and_total_bytes(trace);
    let inputs = BuildInputs {
        profile: prepared.profile(spec),
        plan_files: options.plan_files_of(spec),
        ..build_inputs(trace, options, total_bytes)
    };
    let runner = Runner {
        prepared,
        trace,
        spec,
        options,
        observe,
        capacity_bytes,
        total_bytes,
        as_on_card: matches!(size, DeviceSize::Card { .. }),
        stop_on_oom: options.stop_on_oom,
        loading: None,
    };
    (runner, inputs)
}

/// What an allocator may know of this trace.
fn build_inputs(
    trace: &Trace,
    options: &RunOptions,
    device_total_bytes: Option<u64>,
) -> BuildInputs {
    BuildInputs {
        settings: options.settings.clone().or_else(|| trace.header.settings.clone()),
        recorded_settings: trace.header.settings.clone(),
        limit_bytes: options.limit_bytes,
        recorded_limit_bytes: trace.header.limit_bytes,
        device_total_bytes,
        costs: Some(options.profile.clone()),
        stream_handles: trace.streams.iter().map(|stream| stream.handle).collect(),
        pools: trace.pools.clone(),
        // Settings asked for in place of the recorded ones hold to the end.
        settings_changes: match options.settings {
            Some(_) => Vec::new(),
            None => trace.settings_changes.clone(),
        },
        profile: None,
        plan_files: None,
    }
}

/// Runs an allocator whose type is known.
pub(super) struct Runner<'a> {
    pub(super) prepared: &'a Prepared<'a>,
    pub(super) trace: &'a Trace,
    spec: &'a AllocSpec,
    pub(super) options: &'a RunOptions,
    observe: Observe,
    capacity_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// The device is a card, or stands for one: it starts empty and knows no caps of the trace.
    as_on_card: bool,
    pub(super) stop_on_oom: bool,
    /// How the program loads, for the driver model.
    loading: Option<Loading>,
}

impl Visitor for Runner<'_> {
    type Output = Result<Observed, RunError>;

    fn visit<A: Allocator + Send + 'static>(mut self, allocator: A) -> Self::Output {
        let policy = self.address_policy::<A>();
        self.find_loading(policy);
        let fresh = allocator.clone();
        let mut allocator = allocator;
        let mut sim = self.sim(policy)?;
        let started = self.start(&mut allocator, &mut sim);
        let device = self.wrapped(sim);
        // The unwatched loop is compiled without any sink; whatever is watched shares one other.
        let (run, seen) = if self.is_watched() {
            let sinks = self.sinks();
            let (run, sinks) =
                self.replay(allocator.clone(), device.clone(), sinks, u64::MAX, &started)?;
            let seen = self.seen(sinks, run.last_event)?;
            (run, seen)
        } else {
            let (run, _) =
                self.replay(allocator.clone(), device.clone(), NoSink, u64::MAX, &started)?;
            (run, Seen::default())
        };
        let address_spread = self.address_spread(&run, fresh, policy)?;
        let split = self.split(&run, allocator, device, &started)?;
        let device = self.simulated_device(&run, policy);
        let mut result = self.result(run, split, device);
        result.start = self.start_summary(&started);
        result.address_spread = address_spread;
        Ok(seen.with(result))
    }
}

/// What the sinks of a replay kept.
#[derive(Default)]
pub(super) struct Seen {
    decisions: Vec<DecisionRow>,
    timeline: Vec<TimelineRow>,
    envelope: Vec<EnvelopePoint>,
    steps: Vec<StepPeaks>,
    map: Option<MemoryMap>,
}

impl Seen {
    /// The result and what was watched.
    pub(super) fn with(self, result: RunResult) -> Observed {
        let Seen { decisions, timeline, envelope, steps, map } = self;
        let chunk_log = Vec::new();
        Observed { result, decisions, timeline, envelope, steps, map, chunk_log }
    }
}

/// Looks at moments of a replay with an allocator whose type is known.
struct Looker<'a> {
    runner: Runner<'a>,
    whens: &'a [When],
}

impl Visitor for Looker<'_> {
    type Output = Result<Vec<Option<Moment>>, RunError>;

    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Self::Output {
        let Looker { mut runner, whens } = self;
        let policy = runner.address_policy::<A>();
        runner.find_loading(policy);
        let mut sim = runner.sim(policy)?;
        let mut allocator = allocator;
        let started = runner.start(&mut allocator, &mut sim);
        let device = runner.wrapped(sim);
        let needs_run =
            whens.iter().any(|when| matches!(when, When::ReservedPeak | When::FirstRefusal));
        let run = needs_run
            .then(|| runner.replay(allocator.clone(), device.clone(), NoSink, u64::MAX, &started));
        let run = run.transpose()?.map(|(run, _)| run);
        let place = |when: &When| {
            Some(match when {
                When::ReservedPeak => {
                    let event = run.as_ref()?.peaks.reserved_event;
                    (SplitAt::ReservedPeak, event, event + 1)
                }
                When::FirstRefusal => {
                    let event = run.as_ref()?.refusal?.event;
                    (SplitAt::Oom, event, event + 1)
                }
                When::Before(event) => (SplitAt::Event, *event, *event),
                When::After(event) => (SplitAt::Event, *event, event.saturating_add(1)),
            })
        };
        let moments = whens.iter().map(|when| {
            let Some((at, event, events_end)) = place(when) else { return Ok(None) };
            let (allocator, device) = (allocator.clone(), device.clone());
            let stopped = runner.stopped(allocator, device, &started, (at, event), events_end)?;
            Ok(stopped.map(|stopped| Moment::new(runner.trace, stopped)))
        });
        moments.collect()
    }
}

/// Runs an allocator whose type is known, with a sink of the caller's.
struct Watcher<'a, S> {
    runner: Runner<'a>,
    sink: S,
}

impl<S: Sink> Visitor for Watcher<'_, S> {
    type Output = Result<(Watched, S), RunError>;

    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Self::Output {
        let mut runner = self.runner;
        let policy = runner.address_policy::<A>();
        runner.find_loading(policy);
        let mut sim = runner.sim(policy)?;
        let mut allocator = allocator;
        let started = runner.start(&mut allocator, &mut sim);
        let (run, sink) =
            runner.replay(allocator, runner.wrapped(sim), self.sink, u64::MAX, &started)?;
        let bounds = runner.bounds(&run.allocator);
        let counters = run.allocator.counters();
        let retries = counters.iter().find(|(name, _)| *name == "alloc_retries");
        let watched = Watched {
            refusals: run.refusals,
            calls: run.device.calls(),
            device_ns: run.device.cost_ns(),
            alloc_retries: retries.map_or(0, |&(_, count)| count),
            peaks: run.peaks,
            failure: run.allocator.failure(),
            refusal: run.refusal,
            bounds,
            layout_kept: matches!(started, Started::TakenOver(_)),
        };
        Ok((watched, sink))
    }
}

/// Lets something drive an allocator whose type is known.
struct Live<'a, F> {
    runner: Runner<'a>,
    drive: F,
}

impl<R, F: FnOnce(&mut dyn Gpu) -> R> Visitor for Live<'_, F> {
    type Output = Result<R, RunError>;

    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Self::Output {
        let policy = self.runner.address_policy::<A>();
        let device = self.runner.wrapped(self.runner.sim(policy)?);
        let completions = Completions::default();
        let env = ReplayEnv { device, sink: NoSink, event: 0, completions };
        let mut gpu = LiveGpu { allocator, env, asked: 0, blocks: Vec::new() };
        Ok((self.drive)(&mut gpu))
    }
}

/// An allocator that is asked for memory by something that reacts to it.
struct LiveGpu<A> {
    allocator: A,
    env: ReplayEnv<SimDevice, NoSink>,
    /// Requests so far: the n-th is for block n of the trace that comes of them.
    asked: u32,
    /// What became of every request, by its number.
    blocks: Vec<Handle>,
}

impl<A: Allocator> Gpu for LiveGpu<A> {
    fn malloc(&mut self, size_bytes: u64, stream: StreamId) -> Result<GpuBlock, OutOfMemory> {
        let block = BlockId(self.asked);
        self.asked += 1;
        let request = Request { block, size_bytes, stream };
        let handle = self.allocator.malloc(&mut self.env, request);
        self.blocks.push(handle.unwrap_or(Handle::NONE));
        handle.map(|_| GpuBlock(block.0))
    }

    fn free(&mut self, block: GpuBlock) {
        let handle = std::mem::replace(&mut self.blocks[block.0 as usize], Handle::NONE);
        if handle != Handle::NONE {
            self.allocator.free(&mut self.env, handle);
        }
    }

    fn defer(&mut self, block: GpuBlock) {
        let handle = self.blocks[block.0 as usize];
        if handle != Handle::NONE {
            self.env.completions.defer(BlockId(block.0), handle, self.blocks.len());
            self.allocator.defer(&mut self.env, handle);
        }
    }

    fn done(&mut self, block: GpuBlock) {
        let handle = std::mem::replace(&mut self.blocks[block.0 as usize], Handle::NONE);
        if handle != Handle::NONE {
            self.env.completions.done(BlockId(block.0), handle);
        }
    }

    fn allocated_bytes(&self) -> u64 {
        self.allocator.levels().allocated_bytes
    }

    fn empty_cache(&mut self) {
        self.allocator.empty_cache(&mut self.env);
    }

    fn settings(&mut self, settings: SettingsId) {
        self.allocator.change_settings(&mut self.env, settings);
    }

    fn pool_enter(&mut self, pool: PoolId) {
        self.allocator.pool_enter(&mut self.env, pool);
    }

    fn pool_leave(&mut self, pool: PoolId) {
        self.allocator.pool_leave(&mut self.env, pool);
    }

    fn pool_delete(&mut self, pool: PoolId) {
        self.allocator.pool_delete(&mut self.env, pool);
    }
}

/// How a replay begins.
#[derive(Clone, Debug)]
pub(super) enum Started {
    /// With nothing.
    Empty,
    /// With the layout of the recorded allocator: handles of the blocks in use, in their order.
    TakenOver(Vec<Handle>),
    /// With the blocks that were in use, asked for one by one.
    Asked,
}

/// What a replay leaves behind.
pub(super) struct Replayed<A, D> {
    pub(super) allocator: A,
    pub(super) device: Counting<D>,
    pub(super) peaks: Peaks,
    requested_bytes: u64,
    pub(super) refusal: Option<Refusal>,
    /// Requests that were refused.
    refusals: u64,
    pub(super) seconds: f64,
    memory_events: u64,
    steps: StepMeter,
    /// Index of the last event that was replayed.
    pub(super) last_event: usize,
}

impl<A, D> Replayed<A, D> {
    /// Takes a replay that is over apart; the clock gave it `seconds`.
    pub(super) fn of<S>(replay: Replay<'_, A, Counting<D>, S>, seconds: f64) -> (Self, S) {
        let replayed = Replayed {
            allocator: replay.allocator,
            peaks: replay.peaks.peaks(),
            requested_bytes: replay.requested_bytes,
            refusal: replay.refusal,
            refusals: replay.refusals,
            seconds,
            memory_events: replay.memory_events,
            steps: replay.steps,
            last_event: replay.env.event as usize,
            device: replay.env.device,
        };
        (replayed, replay.env.sink)
    }
}

/// The first refused request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    /// Index of the event.
    pub(super) event: u64,
    requested_bytes: u64,
    largest_hole_bytes: u64,
    /// What the allocator held then.
    pub(super) reserved_bytes: u64,
    /// The last call that the device refused for it; none if the allocator refused by itself.
    pub(super) refused_call: Option<RefusedCall>,
}

impl Refusal {
    /// One line for people, with everything that may have been in the way.
    pub(super) fn message(&self, bounds: &Bounds) -> String {
        let mut parts = vec![
            format!("largest hole {}", Bytes(self.largest_hole_bytes)),
            format!("{} reserved", Bytes(self.reserved_bytes)),
        ];
        parts.extend(self.refused_call.map(|call| format!("the device refused {call}")));
        parts.extend(bounds.told());
        format!(
            "event {} asked for {}: {}",
            grouped(self.event),
            Bytes(self.requested_bytes),
            parts.join(", ")
        )
    }
}

/// What bounds a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    capacity_bytes: Option<u64>,
    /// The allocator's limit in bytes.
    pub(super) limit_bytes: Option<u64>,
    address_bytes_max: Option<u64>,
    mappings_max: Option<u64>,
}

impl Bounds {
    /// Those in force, in words.
    fn told(&self) -> Vec<String> {
        let sizes = [("capacity", self.capacity_bytes), ("limit", self.limit_bytes)].into_iter();
        let sizes = sizes.filter_map(|(name, bytes)| Some(format!("{name} {}", Bytes(bytes?))));
        sizes.chain(caps(self.address_bytes_max, self.mappings_max)).collect()
    }
}

impl Runner<'_> {
    fn address_policy<A: Allocator>(&self) -> AddressPolicy {
        let asked = self.options.address_policy.or(self.trace.header.address_policy);
        let default =
            if A::ADDRESSES_MATTER { AddressPolicy::Chunks } else { AddressPolicy::Ascending };
        asked.unwrap_or(default)
    }

    /// Looks where the program stops loading, which only the driver model wants to know. A history
    /// that begins late shows nothing of it.
    fn find_loading(&mut self, policy: AddressPolicy) {
        let wanted = policy == AddressPolicy::Chunks || self.options.address_seeds > 0;
        // A generated trace shows no driver, and what the chunk manager asks for comes from one; a
        // merged one is several programs.
        let made = [SourceKind::Generated, SourceKind::Merged];
        let recorded = !made.contains(&self.trace.header.source.kind);
        if wanted && recorded && self.trace.start.is_none() {
            self.loading = self.prepared.loading();
        }
    }

    fn sim(&self, policy: AddressPolicy) -> Result<Sim, RunError> {
        let addresses = match policy {
            AddressPolicy::Chunks => self.driver_model(),
            AddressPolicy::Ascending => Addresses::ascending(),
            AddressPolicy::Descending => Addresses::descending(),
            AddressPolicy::Recorded => match &self.trace.recording {
                Some(recording) => Addresses::recorded(recording),
                None => return Err(RunError::NoRecordedAddresses),
            },
        };
        Ok(self.sim_with(addresses))
    }

    fn sim_with(&self, addresses: Addresses) -> Sim {
        let sim = Sim::new(self.capacity_bytes, self.total_bytes, addresses);
        sim.capped(self.address_bytes_max(), self.mappings_max())
    }

    fn bounds<A: Allocator>(&self, allocator: &A) -> Bounds {
        Bounds {
            capacity_bytes: self.capacity_bytes,
            limit_bytes: allocator.limit_bytes(),
            address_bytes_max: self.address_bytes_max(),
            mappings_max: self.mappings_max(),
        }
    }

    fn address_bytes_max(&self) -> Option<u64> {
        let traced = self.trace.header.device.address_bytes_max.filter(|_| !self.as_on_card);
        self.options.address_bytes_max.or(traced)
    }

    fn mappings_max(&self) -> Option<u64> {
        let traced = self.trace.header.device.mappings_max.filter(|_| !self.as_on_card);
        self.options.mappings_max.or(traced)
    }

    /// A device that refuses what the trace says, counted.
    pub(super) fn wrapped<D: Device>(&self, device: D) -> Wrapped<D> {
        let faulty = Faulty::new(device, self.trace.header.faults.clone());
        Counting::new(faulty, self.options.profile.clone())
    }

    /// Whether anything is to be watched.
    fn is_watched(&self) -> bool {
        self.observe != Observe::default() || self.options.paranoid
    }

    /// The sinks for what is to be watched.
    pub(super) fn sinks(&self) -> Sinks {
        let Observe { decisions, timeline, envelope, steps, map_blocks } = self.observe;
        let steps = steps.then(|| StepPeakTracker::new(step_begins(self.trace)));
        let map = map_blocks.map(|blocks_max| self.map_sink(blocks_max));
        (
            decisions.then(Decisions::default),
            (
                timeline.then(Timeline::default),
                (
                    (envelope.map(Envelope::new), steps),
                    (self.options.paranoid.then(Shadow::default), map),
                ),
            ),
        )
    }

    /// What the sinks kept in a replay that ended with an event.
    ///
    /// # Errors
    /// If the shadow map saw the contract broken.
    pub(super) fn seen(&self, sinks: Sinks, last_event: usize) -> Result<Seen, RunError> {
        let (decisions, (timeline, ((envelope, steps), (shadow, map)))) = sinks;
        if let Some(breach) = shadow.as_ref().and_then(Shadow::breach) {
            return Err(RunError::Contract {
                allocator: self.spec.to_string(),
                event: breach.event_index,
                message: breach.message.clone(),
            });
        }
        let program_ns = self.prepared.program_times();
        let mut envelope = envelope.map_or_else(Vec::new, Envelope::into_points);
        self.time_envelope(&mut envelope, program_ns);
        let events_end = last_event as u64 + 1;
        Ok(Seen {
            decisions: decisions.map_or_else(Vec::new, |sink| sink.rows),
            timeline: timeline.map_or_else(Vec::new, |sink| self.timed(sink.rows, program_ns)),
            envelope,
            steps: steps.map_or_else(Vec::new, StepPeakTracker::into_rows),
            map: map.map(|sink| sink.finish(self.trace, events_end)),
        })
    }

    /// The run again under other address policies: seed 0 is the driver model, the others those of
    /// [`Addresses::seeded`]. An allocator that does not look at addresses does the same under all.
    fn address_spread<A: Allocator + Send>(
        &self,
        run: &Replayed<A, Faulty<Sim>>,
        allocator: A,
        policy: AddressPolicy,
    ) -> Result<Option<AddressSpread>, RunError> {
        let seeds = u64::from(self.options.address_seeds);
        if seeds == 0 {
            return Ok(None);
        }
        let figures = |run: &Replayed<A, Faulty<Sim>>| (run.peaks, run.refusals);
        let mut runs: Vec<(Peaks, u64)> = Vec::new();
        if policy == AddressPolicy::Chunks || !A::ADDRESSES_MATTER {
            runs.push(figures(run));
        }
        if A::ADDRESSES_MATTER {
            let others = (runs.len() as u64..seeds).into_par_iter();
            let others = others.map_with(allocator, |allocator, seed| {
                let addresses = match seed {
                    0 => self.driver_model(),
                    _ => Addresses::seeded(seed),
                };
                let replayed = self.replay_on(self.sim_with(addresses), allocator.clone(), NoSink);
                replayed.map(|(run, _)| figures(&run))
            });
            runs.extend(others.collect::<Result<Vec<_>, RunError>>()?);
        }
        let range = |figure: fn(&(Peaks, u64)) -> u64| {
            let figures = runs.iter().map(figure);
            (figures.clone().min().unwrap_or(0), figures.max().unwrap_or(0))
        };
        let (allocated_bytes_peak_min, allocated_bytes_peak_max) =
            range(|(peaks, _)| peaks.allocated_bytes_peak);
        let (active_bytes_peak_min, active_bytes_peak_max) =
            range(|(peaks, _)| peaks.active_bytes_peak);
        let (reserved_bytes_peak_min, reserved_bytes_peak_max) =
            range(|(peaks, _)| peaks.reserved_bytes_peak);
        let (ooms_min, ooms_max) = range(|&(_, ooms)| ooms);
        let with_oom = runs.iter().filter(|(_, ooms)| *ooms > 0).count() as u64;
        Ok(Some(AddressSpread {
            addresses_matter: A::ADDRESSES_MATTER,
            seeds,
            allocated_bytes_peak_min,
            allocated_bytes_peak_max,
            active_bytes_peak_min,
            active_bytes_peak_max,
            reserved_bytes_peak_min,
            reserved_bytes_peak_max,
            ooms_min,
            ooms_max,
            // Where addresses do not matter, one run stands for all.
            seeds_with_oom: if A::ADDRESSES_MATTER { with_oom } else { with_oom * seeds },
        }))
    }

    fn driver_model(&self) -> Addresses {
        match self.loading {
            Some(_) => Addresses::chunks_of_loading(),
            None => Addresses::chunks(),
        }
    }

    /// A whole replay on a fresh device.
    fn replay_on<A: Allocator, S: Sink>(
        &self,
        mut sim: Sim,
        mut allocator: A,
        sink: S,
    ) -> Result<(Replayed<A, Faulty<Sim>>, S), RunError> {
        let started = self.start(&mut allocator, &mut sim);
        self.replay(allocator, self.wrapped(sim), sink, u64::MAX, &started)
    }

    /// Lets allocator and device begin with what was there when the history begins.
    fn start<A: Allocator>(&self, allocator: &mut A, sim: &mut Sim) -> Started {
        let Some(start) = &self.trace.start else { return Started::Empty };
        if self.as_on_card {
            return Started::Asked;
        }
        let Some(handles) = allocator.adopt(start, &self.trace.blocks) else {
            return Started::Asked;
        };
        let mut layout = Vec::new();
        allocator.layout(&mut |block| layout.push(block));
        for segment in layout.chunk_by(|a, b| a.segment == b.segment) {
            let LayoutBlock { segment_address, segment_bytes, page_bytes, .. } = segment[0];
            if page_bytes == 0 {
                sim.hold(segment_address, segment_bytes);
                continue;
            }
            sim.hold_reservation(segment_address, segment_bytes);
            // Blocks do not end with pages, but the runs that they make up do.
            let mut mapped_to = segment_address;
            for block in segment {
                let end = block.address + block.size_bytes;
                mapped_to = mapped_to.max(block.address);
                while mapped_to < end {
                    sim.hold_page(mapped_to, page_bytes);
                    mapped_to += page_bytes;
                }
            }
        }
        Started::TakenOver(handles)
    }

    pub(super) fn start_summary(&self, started: &Started) -> Option<StartSummary> {
        let start = self.trace.start.as_ref()?;
        let in_use = start.blocks_in_use();
        let size = |block: BlockId| self.trace.blocks[block.index()].size_bytes;
        let (blocks, requested_bytes) =
            in_use.fold((0, 0), |(count, sum), (_, block)| (count + 1, sum + size(block.block)));
        let reserved_bytes = start.reserved_bytes();
        let layout_kept = matches!(started, Started::TakenOver(_));
        Some(StartSummary { blocks, requested_bytes, reserved_bytes, layout_kept })
    }

    fn map_sink(&self, blocks_max: usize) -> MapSink {
        MapSink::new(self.trace.events.len() as u64, blocks_max)
    }

    /// One pass over the events of the trace before `events_end`.
    ///
    /// # Errors
    /// If somebody asks to stop.
    fn replay<A: Allocator, S: Sink>(
        &self,
        allocator: A,
        device: SimDevice,
        sink: S,
        events_end: u64,
        started: &Started,
    ) -> Result<(Replayed<A, Faulty<Sim>>, S), RunError> {
        let mut replay = Replay::new(self.trace, allocator, device, sink);
        if let Some(start) = &self.trace.start {
            replay.start(start, started);
        }
        let end = usize::try_from(events_end).unwrap_or(usize::MAX);
        let events = &self.trace.events[..end.min(self.trace.events.len())];
        let loading_events = self.loading.map_or(0, |loading| loading.events);
        let (loading, computing) = events.split_at(loading_events.min(events.len()));
        let started = Instant::now();
        let stop = &self.options.stop;
        let mut end = replay.run(0, loading, self.stop_on_oom, stop);
        if end == End::Reached {
            if let Some(loading) = self.loading {
                replay.env.device.inner_mut().inner_mut().load_kernels(loading.last_copy);
            }
            end = replay.run(loading.len(), computing, self.stop_on_oom, stop);
        }
        if let End::Asked { event } = end {
            return Err(self.interrupted(event, replay.reserved_bytes_peak()));
        }
        let seconds = started.elapsed().as_secs_f64();
        Ok(Replayed::of(replay, seconds))
    }

    /// What is said of a replay that was to stop before an event.
    pub(super) fn interrupted(&self, event: u64, reserved_bytes_peak: u64) -> RunError {
        RunError::Interrupted {
            allocator: self.spec.to_string(),
            event,
            events: self.trace.events.len() as u64,
            reserved_bytes_peak,
        }
    }

    /// What fragmentation is made of at the first refusal, else at the reserved peak: a second pass
    /// that stops there and reads the layout.
    fn split<A: Allocator>(
        &self,
        run: &Replayed<A, Faulty<Sim>>,
        allocator: A,
        device: SimDevice,
        started: &Started,
    ) -> Result<Option<Split>, RunError> {
        let Some((at, event)) = split_at(run) else { return Ok(None) };
        let stopped = self.stopped(allocator, device, started, (at, event), event + 1)?;
        Ok(stopped.map(|stopped| self.split_of(&stopped)))
    }

    /// What fragmentation is made of where a replay stopped.
    pub(super) fn split_of(&self, stopped: &Stopped) -> Split {
        let stream = self.trace.blocks[stopped.request.1.index()].stream;
        split(&stopped.layout, stream, stopped.pool, stopped.at, stopped.at_event)
    }

    /// What lies there after the events before `events_end`: the moment that is called `at`, looked
    /// at for the next request from `event` on. Nothing if none follows.
    fn stopped<A: Allocator>(
        &self,
        allocator: A,
        device: SimDevice,
        started: &Started,
        (at, event): (SplitAt, u64),
        events_end: u64,
    ) -> Result<Option<Stopped>, RunError> {
        if self.request_from(event).is_none() {
            return Ok(None);
        }
        let (stopped, _) = self.replay(allocator, device, NoSink, events_end, started)?;
        Ok(self.looked_at(&stopped, at, event))
    }

    /// The first request from an event on: its event and its block.
    pub(super) fn request_from(&self, event: u64) -> Option<(u64, BlockId)> {
        // Memory that was there at the start may be the most there ever is: then the first request.
        let from = usize::try_from(event).ok()?;
        let mut events = self.trace.events.get(from..)?.iter().zip(event..);
        events.find_map(|(event, index)| match event.op {
            Op::Alloc(block) | Op::Attempt(block) => Some((index, block)),
            _ => None,
        })
    }

    /// What lies there where a replay stopped: the moment that is called `at`, looked at for the
    /// next request from `event` on. Nothing if none follows.
    pub(super) fn looked_at<A: Allocator, D: Device>(
        &self,
        stopped: &Replayed<A, D>,
        at: SplitAt,
        event: u64,
    ) -> Option<Stopped> {
        let request = self.request_from(event)?;
        let block = self.trace.blocks[request.1.index()];
        let mut layout = Vec::new();
        stopped.allocator.layout(&mut |block| layout.push(block));
        let asked =
            Request { block: BlockId::NONE, size_bytes: block.size_bytes, stream: block.stream };
        let pools: BTreeSet<u32> = layout.iter().map(|block| block.pool).collect();
        let pool_name = |pool| Some((pool, stopped.allocator.pool_name(pool)?));
        Some(Stopped {
            at,
            at_event: event,
            request,
            pool: stopped.allocator.pool_of(asked),
            requested_bytes: stopped.requested_bytes,
            levels: stopped.allocator.levels(),
            largest_hole_bytes: stopped.allocator.largest_hole(asked),
            device_free_bytes: self.capacity_bytes.map(|_| stopped.device.memory_info().free_bytes),
            pool_names: pools.into_iter().filter_map(pool_name).collect(),
            layout,
        })
    }

    /// Adds the program's own time and the phase to rows that hold device time only.
    fn timed(&self, mut rows: Vec<TimelineRow>, program_ns: &[u64]) -> Vec<TimelineRow> {
        let mut phase = None;
        for row in &mut rows {
            let index = row.event_index as usize;
            if let Op::Mark(mark) = self.trace.events[index].op {
                phase = Some(mark.0);
            }
            row.time_ns = row.time_ns.saturating_add(program_ns[index]);
            row.phase = phase;
        }
        rows
    }

    /// Adds the program's own time and the phase to points that hold device time only.
    fn time_envelope(&self, points: &mut [EnvelopePoint], program_ns: &[u64]) {
        let mut phase = None;
        for point in points {
            let (begin, end) = (point.event_begin as usize, point.event_end as usize);
            for event in &self.trace.events[begin..end] {
                if let Op::Mark(mark) = event.op {
                    phase = Some(mark.0);
                }
            }
            point.phase = phase;
            point.time_ns = point.time_ns.saturating_add(program_ns[end - 1]);
        }
    }

    fn simulated_device<A>(
        &self,
        run: &Replayed<A, Faulty<Sim>>,
        policy: AddressPolicy,
    ) -> DeviceSummary {
        let sim = run.device.inner().inner();
        DeviceSummary {
            address_bytes_max: self.address_bytes_max(),
            mappings_max: self.mappings_max(),
            address_policy: Some(policy),
            address_bytes_peak: Some(sim.reservation_bytes_peak()),
            mappings_peak: Some(sim.mappings_peak()),
            ..self.device("sim", None)
        }
    }

    /// A device of a kind, a card if it is one.
    pub(super) fn device(&self, kind: &'static str, card: Option<CardSummary>) -> DeviceSummary {
        DeviceSummary {
            kind,
            card,
            profile: self.options.profile.name.clone(),
            profile_derived: self.options.profile.derived,
            capacity_bytes: self.capacity_bytes,
            address_bytes_max: None,
            mappings_max: None,
            address_policy: None,
            address_bytes_peak: None,
            mappings_peak: None,
        }
    }

    pub(super) fn result<A: Allocator, D: Device>(
        &self,
        run: Replayed<A, D>,
        split: Option<Split>,
        device: DeviceSummary,
    ) -> RunResult {
        let program_ns = self.prepared.program_times();
        let peaks = run.peaks;
        let share = |part: u64| {
            if peaks.reserved_bytes_peak == 0 {
                1.0
            } else {
                part as f64 / peaks.reserved_bytes_peak as f64
            }
        };
        let efficiency = share(peaks.requested_bytes_peak);
        let counters = run.allocator.counters().into_iter();
        let counters = counters.map(|(name, count)| (name.to_owned(), count)).collect();
        RunResult {
            schema_version: SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION"),
            trace: self.prepared.summary().clone(),
            allocator: AllocatorSummary {
                name: self.spec.to_string(),
                params: run.allocator.params().into_iter().collect(),
                limit_bytes: run.allocator.limit_bytes(),
            },
            device,
            outcome: self.outcome(&run),
            peaks,
            start: None,
            final_levels: FinalLevels {
                requested_bytes: run.requested_bytes,
                levels: run.allocator.levels(),
            },
            efficiency,
            fragmentation: 1.0 - efficiency,
            excess_bytes: peaks.reserved_bytes_peak as i64 - peaks.requested_bytes_peak as i64,
            utilization: share(peaks.allocated_bytes_peak),
            wasted_bytes: peaks.reserved_bytes_peak.saturating_sub(peaks.allocated_bytes_peak),
            active_utilization: share(peaks.active_bytes_peak),
            split,
            address_spread: None,
            calls: run.device.calls(),
            counters,
            torch_stats: run.allocator.torch_stats().map(|stats| stats.into_iter().collect()),
            plan: run.allocator.plan_summary(),
            transfers: self.prepared.traffic(),
            chunk: None,
            time: self.simulated_time(&run, program_ns),
            wall: Wall {
                events_per_second: run.memory_events as f64 / run.seconds.max(1e-9),
                seconds: run.seconds,
                peak_rss_bytes: peak_rss_bytes(),
                hardware: None,
            },
            hardware: None,
        }
    }

    fn outcome<A: Allocator, D>(&self, run: &Replayed<A, D>) -> Outcome {
        if let Some(message) = run.allocator.failure() {
            return Outcome {
                status: Status::Failed,
                event_index: None,
                requested_bytes: None,
                largest_hole_bytes: None,
                refused_call: None,
                message: Some(message),
            };
        }
        let Some(refusal) = run.refusal else {
            return Outcome::ok();
        };
        Outcome {
            status: Status::Oom,
            event_index: Some(refusal.event),
            requested_bytes: Some(refusal.requested_bytes),
            largest_hole_bytes: Some(refusal.largest_hole_bytes),
            refused_call: refusal.refused_call.map(|call| call.to_string()),
            message: Some(refusal.message(&self.bounds(&run.allocator))),
        }
    }

    fn simulated_time<A, D: Device>(
        &self,
        run: &Replayed<A, D>,
        program_ns: &[u64],
    ) -> SimulatedTime {
        let trace = self.trace;
        let time_ns = |event: usize| trace.events.get(event).map_or(0, |event| event.time_ns);
        let recorded_ns = time_ns(run.last_event).saturating_sub(time_ns(0));
        let program_ns_all = program_ns.get(run.last_event).copied().unwrap_or(0);
        let allocator_device_ns = run.device.cost_ns();
        SimulatedTime {
            allocator_device_ns,
            recorded_ns,
            recorded_device_ns: recorded_ns.saturating_sub(program_ns_all),
            simulated_ns: program_ns_all.saturating_add(allocator_device_ns),
            steps: run.steps.steps(trace, program_ns, run.last_event, &run.device),
        }
    }
}

/// Where to split the fragmentation of a replay: its first refusal, else its reserved peak. Nothing
/// if nothing was reserved.
pub(super) fn split_at<A, D>(run: &Replayed<A, D>) -> Option<(SplitAt, u64)> {
    let peaks = &run.peaks;
    (peaks.reserved_bytes_peak > 0).then_some(())?;
    Some(match run.refusal {
        Some(refusal) => (SplitAt::Oom, refusal.event),
        None => (SplitAt::ReservedPeak, peaks.reserved_event),
    })
}

/// Largest resident size of this process so far; 0 where the system does not tell.
pub(super) fn peak_rss_bytes() -> u64 {
    resident_bytes_peak().unwrap_or(0)
}

/// What the loop needs of a block, in one place.
#[derive(Clone, Copy, Debug)]
struct Slot {
    size_bytes: u64,
    stream: StreamId,
    /// [`Handle::NONE`] before the alloc, after the free, and if the request was refused.
    handle: Handle,
}

/// The world around the allocator in a replay.
pub(super) struct ReplayEnv<D, S> {
    pub(super) device: D,
    pub(super) sink: S,
    event: u64,
    completions: Completions,
}

impl<D, S> ReplayEnv<D, S> {
    /// Index of the event under way.
    pub(super) fn event(&self) -> u64 {
        self.event
    }
}

impl<D: Device, S: Sink> Env for ReplayEnv<D, S> {
    type Device = D;
    const LOG: bool = S::LOG;

    #[inline]
    fn device(&mut self) -> &mut D {
        &mut self.device
    }

    #[inline]
    fn next_completed(&mut self) -> Option<Handle> {
        self.completions.ended()
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.completions.wait()
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.completions.wait_of(wanted)
    }

    #[inline]
    fn log(&mut self, action: Action) {
        self.sink.action(self.event, action);
        if self.sink.wants_backing(&action) {
            let mut extents = Vec::new();
            let Action { address, size_bytes, .. } = action;
            let whole = self.device.backing(address, size_bytes, &mut |part| extents.push(part));
            self.sink.backing(self.event, action, whole.then_some(extents));
        }
    }
}

/// Why a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The events are over.
    Reached,
    /// A request was refused, and the first refusal was to be the end.
    Refused,
    /// Somebody asked to stop.
    Asked {
        /// Index of the event that would have been next.
        event: u64,
    },
}

/// A replay under way.
pub(super) struct Replay<'t, A, D, S> {
    trace: &'t Trace,
    pub(super) allocator: A,
    pub(super) env: ReplayEnv<D, S>,
    slots: Vec<Slot>,
    peaks: PeakTracker,
    requested_bytes: u64,
    pub(super) refusal: Option<Refusal>,
    refusals: u64,
    /// alloc, attempt, free, defer and done events.
    memory_events: u64,
    steps: StepMeter,
}

impl<'t, A: Allocator, D: Device, S: Sink> Replay<'t, A, Counting<D>, S> {
    pub(super) fn new(trace: &'t Trace, allocator: A, device: Counting<D>, sink: S) -> Self {
        let slots = trace.blocks.iter().map(|block| Slot {
            size_bytes: block.size_bytes,
            stream: block.stream,
            handle: Handle::NONE,
        });
        Replay {
            trace,
            allocator,
            env: ReplayEnv { device, sink, event: 0, completions: Completions::default() },
            slots: slots.collect(),
            peaks: PeakTracker::default(),
            requested_bytes: 0,
            refusal: None,
            refusals: 0,
            memory_events: 0,
            steps: StepMeter::new(&trace.phases),
        }
    }

    /// Begins with the blocks that were in use when the history begins.
    pub(super) fn start(&mut self, start: &StartLayout, started: &Started) {
        let handles = match started {
            Started::TakenOver(handles) => Some(handles),
            Started::Empty | Started::Asked => None,
        };
        if S::LOG && handles.is_some() {
            let mut layout = Vec::new();
            self.allocator.layout(&mut |block| layout.push(block));
            self.env.sink.start(&layout);
        }
        // What was taken over may hold memory without any block in use.
        self.peaks.observe(0, self.requested_bytes, self.allocator.levels());
        let mut handles = handles.into_iter().flatten().copied();
        for (segment, rows) in start.iter() {
            // Blocks that are asked for go where they were.
            let pool = segment.pool.some().filter(|_| matches!(started, Started::Asked));
            if let Some(pool) = pool {
                self.allocator.pool_enter(&mut self.env, pool);
            }
            for row in rows.iter().filter(|row| row.state != StartState::Free) {
                self.start_block(row, handles.next());
            }
            if let Some(pool) = pool {
                self.allocator.pool_leave(&mut self.env, pool);
            }
        }
    }

    /// Begins with one block: taken over, or asked for.
    fn start_block(&mut self, row: &StartBlock, taken_over: Option<Handle>) {
        let block = row.block;
        let handle = taken_over.unwrap_or_else(|| self.malloc(block));
        let slot = &mut self.slots[block.index()];
        slot.handle = handle;
        if handle == Handle::NONE {
            return;
        }
        if row.state == StartState::Live {
            self.requested_bytes += slot.size_bytes;
        } else {
            let blocks = self.slots.len();
            self.env.completions.defer(block, handle, blocks);
            if taken_over.is_none() {
                self.allocator.defer(&mut self.env, handle);
            }
        }
        self.peaks.observe(0, self.requested_bytes, self.allocator.levels());
    }

    /// Takes the next events, the first of which has the index `first`, and tells why it ended.
    pub(super) fn run(
        &mut self,
        first: usize,
        events: &[Event],
        stop_on_oom: bool,
        stop: &Stop,
    ) -> End {
        for (part, events) in events.chunks(STOP_EVENTS).enumerate() {
            let first = first + part * STOP_EVENTS;
            if stop.is_asked() {
                return End::Asked { event: first as u64 };
            }
            for (index, event) in (first..).zip(events) {
                self.event(index as u64, event.op);
                if stop_on_oom && self.refusal.is_some() {
                    return End::Refused;
                }
            }
        }
        End::Reached
    }

    /// Most bytes reserved so far.
    pub(super) fn reserved_bytes_peak(&self) -> u64 {
        self.peaks.peaks().reserved_bytes_peak
    }

    /// Takes one event, and tells the sinks what it left.
    #[inline(always)]
    pub(super) fn event(&mut self, index: u64, op: Op) {
        self.env.event = index;
        self.step(op);
        if S::LEVELS {
            let levels = self.allocator.levels();
            let device_ns = self.env.device.cost_ns();
            let requested_bytes = self.requested_bytes;
            self.env.sink.after_event(index, requested_bytes, levels, device_ns);
            if self.env.sink.wants_invariants()
                && let Err(message) = self.allocator.check_invariants()
            {
                self.env.sink.broken(index, &message);
            }
        }
    }

    #[inline]
    fn step(&mut self, op: Op) {
        match op {
            Op::Alloc(block) => {
                self.memory_events += 1;
                let handle = self.malloc(block);
                let slot = &mut self.slots[block.index()];
                slot.handle = handle;
                if handle != Handle::NONE {
                    self.requested_bytes += slot.size_bytes;
                    let levels = self.allocator.levels();
                    self.peaks.observe(self.env.event, self.requested_bytes, levels);
                }
            }
            Op::Free(block) => {
                self.memory_events += 1;
                let slot = &mut self.slots[block.index()];
                let handle = std::mem::replace(&mut slot.handle, Handle::NONE);
                if handle != Handle::NONE {
                    self.requested_bytes -= slot.size_bytes;
                    self.allocator.free(&mut self.env, handle);
                }
            }
            Op::Attempt(block) => {
                self.memory_events += 1;
                let handle = self.malloc(block);
                // Memory held for it was held; the block itself stays out of the peaks.
                self.peaks.observe_reserved(self.env.event, self.allocator.levels());
                if handle != Handle::NONE {
                    self.allocator.free(&mut self.env, handle);
                }
            }
            Op::Defer(block) => {
                self.memory_events += 1;
                let slot = self.slots[block.index()];
                if slot.handle != Handle::NONE {
                    self.requested_bytes -= slot.size_bytes;
                    let blocks = self.slots.len();
                    self.env.completions.defer(block, slot.handle, blocks);
                    self.allocator.defer(&mut self.env, slot.handle);
                }
            }
            Op::Done(block) => {
                self.memory_events += 1;
                let slot = &mut self.slots[block.index()];
                let handle = std::mem::replace(&mut slot.handle, Handle::NONE);
                if handle != Handle::NONE {
                    self.env.completions.done(block, handle);
                }
            }
            Op::EmptyCache => self.allocator.empty_cache(&mut self.env),
            Op::Settings(settings) => self.allocator.change_settings(&mut self.env, settings),
            Op::PoolEnter(pool) => self.allocator.pool_enter(&mut self.env, pool),
            Op::PoolLeave(pool) => self.allocator.pool_leave(&mut self.env, pool),
            Op::PoolDelete(pool) => self.allocator.pool_delete(&mut self.env, pool),
            Op::Mark(phase) => {
                self.steps.mark(self.env.event, phase, &self.env.device);
                self.allocator.mark(&mut self.env, &self.trace.phases[phase.index()]);
            }
            Op::ModuleEnter(module) => {
                self.allocator.module_enter(&mut self.env, &self.trace.modules[module.index()]);
            }
            Op::ModuleLeave(module) => {
                self.allocator.module_leave(&mut self.env, &self.trace.modules[module.index()]);
            }
            // Who manages blocks and not data has no use for these.
            Op::Access(_) | Op::Transfer(_) => {}
        }
    }

    #[inline]
    fn malloc(&mut self, block: BlockId) -> Handle {
        let slot = self.slots[block.index()];
        let request = Request { block, size_bytes: slot.size_bytes, stream: slot.stream };
        let refusals_before = self.env.device.refusals();
        match self.allocator.malloc(&mut self.env, request) {
            Ok(handle) => handle,
            Err(_) => {
                self.refused(request, refusals_before);
                Handle::NONE
            }
        }
    }

    /// Keeps the first refusal. The device had refused `refusals_before` calls before the request.
    #[cold]
    fn refused(&mut self, request: Request, refusals_before: u64) {
        self.refusals += 1;
        if self.refusal.is_none() {
            let device = &self.env.device;
            self.refusal = Some(Refusal {
                event: self.env.event,
                requested_bytes: request.size_bytes,
                largest_hole_bytes: self.allocator.largest_hole(request),
                reserved_bytes: self.allocator.levels().reserved_bytes,
                refused_call: device.refused().filter(|_| device.refusals() > refusals_before),
            });
        }
    }
}
