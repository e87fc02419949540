//! Replays on a real GPU: the same loop and the same allocators, with the driver's calls in place
//! of the simulated ones.
//!
//! ```text
//!   warm-up: calls that do not count, then
//!   Prepared ──> Replay<A, Counting<Faulty<Card's device>>, sinks> ──> RunResult
//!                  │  wait until it is time for the event (`Pace::Recorded`)
//!                  │  the event: driver calls, a clock around each
//!                  │      └─ log ──> TouchSink: writes and checks blocks, between the calls
//!                  └─ cuMemGetInfo, when more is reserved than ever
//!   Prepared ──> the same on a simulated device of the card's size ──> SimulatedCell, beside it
//! ```
//!
//! The one design decision: a card is asked for through [`Card`], which opens a fresh device a
//! pass. A device cannot be cloned as a simulated one can; what a pass leaves on it is given back
//! before the next begins, so a card never has to hold two.
//!
//! A recording that starts late never lends its layout to a card: its blocks are asked for. The
//! simulated cell beside it begins the same way.

mod pacer;
mod sampler;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::chunked;
use super::prepared::{DeviceSize, Prepared};
use super::replay::{
    End, Observe, Observed, Replay, Replayed, RunError, Runner, Seen, Sinks, Started, Wrapped,
    prepare, split_at, watch,
};
use super::result::{
    CallTimes, CardMemory, CardSummary, HardwareSummary, HardwareWall, Outcome, Repeats, RunResult,
    SimulatedCell, Status,
};
use crate::alloc::spec::AllocSpec;
use crate::alloc::{Allocator, registry};
use crate::chunk;
use crate::device::{
    CallTime, Device, DeviceCall, Faulty, MemoryInfo, RefusedCall, Touch, TouchError,
};
use crate::metrics::{NoSink, Split, SplitAt, TouchMode, TouchReport, TouchSink};
use crate::trace::Trace;
pub use pacer::Pace;
use pacer::Pacer;
use sampler::Sampler;

/// Events between two signs of progress.
const PROGRESS_EVENTS: usize = 256;

/// A GPU that replays may use, one after the other.
pub trait Card {
    /// What drives it.
    type Device: Device;

    /// A device that holds nothing yet, and gives back what it holds when it is dropped.
    ///
    /// `capacity_bytes` is the most that it may hold; without it, what the card has.
    ///
    /// # Errors
    /// Why the card cannot be used, or not any more.
    fn open(&self, capacity_bytes: Option<u64>) -> Result<Self::Device, HardwareError>;

    /// Makes the card ready to be timed, as an idle one is slow at first. What goes wrong then
    /// shows again in the replay.
    fn warm_up(&self);

    /// What reads and writes the memory of a device.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn toucher(&self, device: &Self::Device) -> Result<Box<dyn Touch>, HardwareError>;

    /// What a clock says of the calls of one kind to a device so far.
    fn measured(&self, device: &Self::Device, call: DeviceCall) -> CallTime;

    /// Free and total memory of the card, as its driver tells it.
    fn memory_info(&self) -> MemoryInfo;

    /// Which one it is.
    fn summary(&self) -> CardSummary;
}

/// How to replay on a card.
pub struct Bench<'a, C> {
    /// The card.
    pub card: &'a C,
    /// How much of every block is written and checked.
    pub touch: TouchMode,
    /// When events take place.
    pub pace: Pace,
    /// How often the trace is replayed. What the result tells is of the pass whose calls took the
    /// median time in all, the lesser of two; a pass in which a block did not hold its pattern is
    /// the last, and the one that is told.
    pub passes: NonZeroU32,
    /// Tell what the fragmentation is made of, which takes a second pass on the card, untouched and
    /// fast.
    pub split: bool,
    /// Told now and then how many events are done, and of how many.
    pub progress: &'a dyn Fn(u64, u64),
}

/// Hardware could not be used, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum HardwareError {
    /// There is no such card, or it cannot be used.
    #[error(transparent)]
    Card(Box<dyn std::error::Error + Send + Sync>),
    /// A block could not be written or read.
    #[error(
        "{allocator} at event {event}: block {block} has no memory: {error}; this ends all work on \
         the GPU"
    )]
    Touch {
        /// The allocator.
        allocator: String,
        /// Index of the event.
        event: u64,
        /// The block of the trace.
        block: u32,
        /// What the driver said.
        error: TouchError,
    },
    /// The driver answered with an error that is no lack of memory.
    #[error("{allocator} at event {event}: the GPU refused {call}")]
    Driver {
        /// The allocator.
        allocator: String,
        /// Index of the event.
        event: u64,
        /// The call, and what the driver said.
        call: RefusedCall,
    },
}

/// Takes a prepared trace through one allocator on a card.
///
/// The result has what a simulated one has. `hardware` stands beside it: what the card says is
/// used, what was written and checked, and the same cell simulated; `wall` has what a clock said of
/// the calls. A block that did not hold its pattern makes the outcome [`Status::Failed`].
///
/// # Errors
/// As [`run`](super::run), and [`HardwareError`].
pub fn run_on_hardware<C: Card>(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    bench: &Bench<'_, C>,
    observe: Observe,
) -> Result<Observed, RunError> {
    let info = bench.card.memory_info();
    let asked = asked_capacity(prepared);
    let size = match asked {
        Some((capacity_bytes, total_bytes)) => DeviceSize::Card { capacity_bytes, total_bytes },
        None => DeviceSize::Card { capacity_bytes: info.free_bytes, total_bytes: info.total_bytes },
    };
    let limited_bytes = asked.map(|(capacity_bytes, _)| capacity_bytes);
    let run = |prepared: &Prepared<'_>, spec: &AllocSpec| {
        let simulated = simulated(prepared, spec, size)?;
        let (runner, inputs) = prepare(prepared, spec, size, observe);
        let on_card = OnCard { runner, spec, bench, limited_bytes, simulated };
        registry::build(spec, &inputs, on_card)?
    };
    if spec.name == chunk::NAME {
        return chunked::run_managed(prepared, spec, size, run);
    }
    run(prepared, spec)
}

/// Capacity and total that the options or the trace ask for by name, in bytes.
fn asked_capacity(prepared: &Prepared<'_>) -> Option<(u64, u64)> {
    let device = &prepared.trace().header.device;
    let asked = prepared.options().capacity_bytes.map(|bytes| (bytes, bytes));
    let traced = device.capacity_bytes.map(|bytes| (bytes, device.total_bytes.unwrap_or(bytes)));
    asked.or(traced)
}

/// The same cell on a simulated device.
fn simulated(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
) -> Result<SimulatedCell, RunError> {
    let stop_on_oom = prepared.options().stop_on_oom;
    let (watched, _) = watch(prepared, spec, size, stop_on_oom, NoSink)?;
    let status = match (&watched.failure, watched.refusals) {
        (Some(_), _) => Status::Failed,
        (None, 0) => Status::Ok,
        (None, _) => Status::Oom,
    };
    Ok(SimulatedCell {
        status,
        reserved_bytes_peak: watched.peaks.reserved_bytes_peak,
        allocator_device_ns: watched.device_ns,
        calls: watched.calls,
    })
}

/// Runs an allocator whose type is known on a card.
struct OnCard<'a, C> {
    runner: Runner<'a>,
    spec: &'a AllocSpec,
    bench: &'a Bench<'a, C>,
    /// The most that the device may hold, if less than the card has.
    limited_bytes: Option<u64>,
    simulated: SimulatedCell,
}

/// The sinks of a replay on a card.
type CardSinks = (Option<TouchSink>, Sinks);

/// The first pass over the trace, done.
struct FirstPass<A, D> {
    run: Replayed<A, D>,
    sinks: Sinks,
    touch: TouchReport,
    touch_time: Duration,
    memory: CardMemory,
}

/// What came of one pass.
struct Pass {
    result: RunResult,
    seen: Seen,
    /// Where to split.
    moment: Option<SplitMoment>,
    /// Time of its calls in all.
    measured_ns: u64,
}

impl Pass {
    fn has_failed(&self) -> bool {
        self.result.outcome.status == Status::Failed
    }
}

/// The one of at least one pass that is told, and in it how far they lie apart.
fn told(mut passes: Vec<Pass>) -> Pass {
    passes.sort_by_key(|pass| (!pass.has_failed(), pass.measured_ns));
    let middle = (passes.len() - 1) / 2;
    let at = if passes[0].has_failed() { 0 } else { middle };
    let times = || passes.iter().map(|pass| pass.measured_ns);
    let repeats = Repeats {
        count: passes.len() as u32,
        least_ns: times().min().unwrap_or(0),
        most_ns: times().max().unwrap_or(0),
    };
    let mut told = passes.swap_remove(at);
    if let Some(wall) = &mut told.result.wall.hardware {
        wall.repeats = repeats;
    }
    told
}

impl<C: Card> registry::Visitor for OnCard<'_, C> {
    type Output = Result<Observed, RunError>;

    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Self::Output {
        let mut passes = vec![self.pass(allocator.clone())?];
        let wanted = self.bench.passes.get() as usize;
        while passes.len() < wanted && !passes.iter().any(Pass::has_failed) {
            passes.push(self.pass(allocator.clone())?);
        }
        let Pass { result: mut told, seen, moment, .. } = told(passes);
        if let Some((moment, hardware)) =
            moment.filter(|_| self.bench.split).zip(told.hardware.as_mut())
        {
            told.split = self.second_pass(allocator, moment, &mut hardware.memory)?;
        }
        Ok(seen.with(told))
    }
}

impl<C: Card> OnCard<'_, C> {
    fn trace(&self) -> &Trace {
        self.runner.trace
    }

    /// A card begins with nothing, or with blocks that are asked for.
    fn started(&self) -> Started {
        self.trace().start.as_ref().map_or(Started::Empty, |_| Started::Asked)
    }

    fn opened(&self) -> Result<C::Device, HardwareError> {
        self.bench.card.open(self.limited_bytes)
    }

    /// The trace once, and what came of it.
    fn pass<A: Allocator>(&self, allocator: A) -> Result<Pass, RunError> {
        self.bench.card.warm_up();
        let FirstPass { run, sinks, touch, touch_time, memory } = self.first_pass(allocator)?;
        let seen = self.runner.seen(sinks, run.last_event)?;
        let moment = SplitMoment::of(&run);
        let wall = self.wall(&run.device, touch_time);
        let device = self.runner.device("cuda", Some(self.bench.card.summary()));
        // The device goes with the run: what it held is the card's again.
        let mut result = self.runner.result(run, None, device);
        if let Some(message) = touch.broken() {
            let event_index = touch.first.map(|first| first.event_index);
            let status = Status::Failed;
            result.outcome =
                Outcome { status, event_index, message: Some(message), ..Outcome::ok() };
        }
        result.start = self.runner.start_summary(&self.started());
        let simulated = self.simulated.clone();
        result.hardware = Some(HardwareSummary { memory, touch, simulated });
        let measured_ns = wall.allocator_device_ns_measured;
        result.wall.hardware = Some(wall);
        Ok(Pass { result, seen, moment, measured_ns })
    }

    /// The replay: timed, touched, watched.
    fn first_pass<A: Allocator>(
        &self,
        allocator: A,
    ) -> Result<FirstPass<A, Faulty<C::Device>>, RunError> {
        let device = self.opened()?;
        let touch = match self.bench.touch {
            TouchMode::None => None,
            mode => Some(TouchSink::new(self.bench.card.toucher(&device)?, mode)),
        };
        let sinks = (touch, self.runner.sinks());
        let mut replay = Replay::new(self.trace(), allocator, self.runner.wrapped(device), sinks);
        // What touches memory takes some of its own.
        let before = self.bench.card.memory_info();
        let mut sampler = Sampler::new(before);
        let mut pace = Pacer::new(self.bench.pace, &self.trace().events);
        let begun = Instant::now();
        if let Some(start) = &self.trace().start {
            replay.start(start, &self.started());
        }
        self.all_events(&mut replay, &mut sampler, &mut pace)?;
        if let Some(touch) = &mut replay.env.sink.0 {
            touch.finish(self.trace().events.len().saturating_sub(1) as u64);
        }
        self.check(&replay)?;
        let touch_time = replay.env.sink.0.as_ref().map_or(Duration::ZERO, TouchSink::spent);
        let others = touch_time + sampler.spent + pace.spent;
        let seconds = begun.elapsed().saturating_sub(others).as_secs_f64();
        let (run, (touch, sinks)) = Replayed::of(replay, seconds);
        let reserved_bytes = run.allocator.levels().reserved_bytes;
        let at_end = sampler.sample(self.bench.card, run.last_event as u64, reserved_bytes);
        let memory = CardMemory {
            total_bytes: before.total_bytes,
            free_bytes: before.free_bytes,
            at_reserved_peak: sampler.at_peak,
            at_end,
        };
        let touch = touch.map_or_else(TouchReport::default, TouchSink::into_report);
        Ok(FirstPass { run, sinks, touch, touch_time, memory })
    }

    /// Takes the events, each when it is time for it.
    fn all_events<A: Allocator>(
        &self,
        replay: &mut Replay<'_, A, Wrapped<C::Device>, CardSinks>,
        sampler: &mut Sampler,
        pace: &mut Pacer,
    ) -> Result<(), RunError> {
        let events = &self.trace().events;
        let stop = &self.runner.options.stop;
        sampler.after(self.bench.card, 0, replay.allocator.levels().reserved_bytes);
        for (index, event) in events.iter().enumerate() {
            let waited = pace.wait(event.time_ns, stop);
            // A driver's call takes longer than a look.
            if stop.is_asked() {
                return Err(self.runner.interrupted(index as u64, replay.reserved_bytes_peak()));
            }
            if waited || index % PROGRESS_EVENTS == 0 {
                (self.bench.progress)(index as u64, events.len() as u64);
            }
            replay.event(index as u64, event.op);
            let reserved_bytes = replay.allocator.levels().reserved_bytes;
            sampler.after(self.bench.card, index as u64, reserved_bytes);
            self.check(replay)?;
            if self.runner.stop_on_oom && replay.refusal.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Whether the card still does what it is told.
    fn check<A>(
        &self,
        replay: &Replay<'_, A, Wrapped<C::Device>, CardSinks>,
    ) -> Result<(), HardwareError> {
        let allocator = || self.spec.to_string();
        let failure = replay.env.sink.0.as_ref().and_then(TouchSink::failure);
        if let Some(failure) = failure {
            return Err(HardwareError::Touch {
                allocator: allocator(),
                event: failure.event_index,
                block: failure.block_id,
                error: failure.error,
            });
        }
        // Not the last call that was refused: the allocator may have gone on and run out of memory.
        match replay.env.device.driver_error() {
            Some(call) => {
                let event = replay.env.event();
                Err(HardwareError::Driver { allocator: allocator(), event, call })
            }
            None => Ok(()),
        }
    }

    /// Goes to the moment again and looks at what lies there, and at the card's memory. Nothing if
    /// the card did not come to the same point.
    fn second_pass<A: Allocator>(
        &self,
        allocator: A,
        moment: SplitMoment,
        memory: &mut CardMemory,
    ) -> Result<Option<Split>, RunError> {
        let SplitMoment { at, event, reserved_bytes } = moment;
        if self.runner.request_from(event).is_none() {
            return Ok(None);
        }
        let device = self.runner.wrapped(self.opened()?);
        let mut sampler = Sampler::new(self.bench.card.memory_info());
        let mut replay = Replay::new(self.trace(), allocator, device, NoSink);
        if let Some(start) = &self.trace().start {
            replay.start(start, &self.started());
        }
        let events_end = self.trace().events.len().min(event as usize + 1);
        let stop = &self.runner.options.stop;
        let events = &self.trace().events[..events_end];
        if let End::Asked { event } = replay.run(0, events, self.runner.stop_on_oom, stop) {
            return Err(self.runner.interrupted(event, replay.reserved_bytes_peak()));
        }
        let (stopped, _) = Replayed::of(replay, 0.0);
        let held_bytes = stopped.allocator.levels().reserved_bytes;
        let is_same = match at {
            SplitAt::Oom => stopped
                .refusal
                .is_some_and(|r| (r.event, r.reserved_bytes) == (event, reserved_bytes)),
            _ => held_bytes == reserved_bytes,
        };
        if !is_same {
            return Ok(None);
        }
        if at == SplitAt::ReservedPeak && memory.at_reserved_peak.reserved_bytes < held_bytes {
            memory.at_reserved_peak = sampler.sample(self.bench.card, event, held_bytes);
        }
        let stopped = self.runner.looked_at(&stopped, at, event);
        Ok(stopped.map(|stopped| self.runner.split_of(&stopped)))
    }

    /// What a clock said of the calls beside what the profile says.
    fn wall(&self, device: &Wrapped<C::Device>, touch_time: Duration) -> HardwareWall {
        let card_device = device.inner().inner();
        let times = DeviceCall::ALL.into_iter().map(|call| {
            let CallTime { count, ns, refused, .. } = self.bench.card.measured(card_device, call);
            let simulated_ns = device.cost_ns_of(call);
            (call.name(), CallTimes { calls: count, refused, measured_ns: ns, simulated_ns })
        });
        let device_calls: BTreeMap<&'static str, CallTimes> =
            times.filter(|(_, time)| time.calls + time.refused > 0).collect();
        let measured_ns = device_calls.values().map(|time| time.measured_ns).sum();
        let simulated_ns = device.cost_ns();
        HardwareWall {
            device_calls,
            allocator_device_ns_measured: measured_ns,
            measured_over_simulated: (simulated_ns > 0)
                .then(|| measured_ns as f64 / simulated_ns as f64),
            repeats: Repeats { count: 1, least_ns: measured_ns, most_ns: measured_ns },
            touch_seconds: touch_time.as_secs_f64(),
        }
    }
}

/// Where to split, and what was reserved there.
#[derive(Clone, Copy, Debug)]
struct SplitMoment {
    at: SplitAt,
    event: u64,
    reserved_bytes: u64,
}

impl SplitMoment {
    fn of<A, D>(run: &Replayed<A, D>) -> Option<SplitMoment> {
        let (at, event) = split_at(run)?;
        let reserved_bytes = match run.refusal {
            Some(refusal) => refusal.reserved_bytes,
            None => run.peaks.reserved_bytes_peak,
        };
        Some(SplitMoment { at, event, reserved_bytes })
    }
}

#[cfg(test)]
mod tests;
