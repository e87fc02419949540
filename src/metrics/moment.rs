//! A moment of a replay: what the allocator holds, what is free in it and what stands in the way.
//!
//! The one design decision: a moment is read from a layout and a trace, never from the loop. The
//! engine stops a second pass at the event and hands over what lies there.
//!
//! ```text
//!   layout at event e ──┬─ split    the five kinds of reserved − requested, for one request
//!                       ├─ holes    by stream and pool
//!                       └─ pins ──with the trace's events──> site, phase and age of each
//! ```

use std::collections::BTreeMap;

use serde::Serialize;

use super::holes::{HoleGroup, holes};
use super::pins::{Pin, pins};
use super::split::{Split, SplitAt, split};
use crate::alloc::{BlockState, LayoutBlock, Levels};
use crate::trace::{Op, Role, Trace};
use crate::units::{BlockId, PhaseId, StreamId};

/// The request that a moment is looked at for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MomentRequest {
    /// Its event.
    pub event_index: u64,
    /// Bytes that it asks for.
    pub size_bytes: u64,
    /// The stream it is asked on.
    pub stream: StreamId,
    /// The pool it belongs to, by the allocator's number.
    pub pool: u32,
    /// Where in the program it is asked, where the trace tells.
    pub site: Option<String>,
    /// The phase it is asked in.
    pub phase: Option<String>,
    /// The private pool that is entered then, the innermost.
    pub private_pool: Option<String>,
}

/// What an allocator holds at one event.
#[derive(Clone, Debug)]
pub struct Moment {
    /// reserved − requested by kind, for the request.
    pub split: Split,
    /// What the moment is looked at for: the request of its event, or the next one after it.
    pub request: MomentRequest,
    /// Sum of live requests in bytes.
    pub requested_bytes: u64,
    /// What the allocator holds.
    pub levels: Levels,
    /// The largest free range that could serve the request without a device call, in bytes.
    pub largest_hole_bytes: u64,
    /// What the device still has, in bytes; nothing for a device without end.
    pub device_free_bytes: Option<u64>,
    /// Free ranges by stream and pool, most bytes first.
    pub holes: Vec<HoleGroup>,
    /// Blocks in use that strand free memory, those that strand most first.
    pub pins: Vec<NamedPin>,
    /// Names of the pools by the allocator's numbers, of those that have one.
    pub pool_names: BTreeMap<u32, String>,
    /// Every block, in address order, segment by segment.
    pub layout: Vec<LayoutBlock>,
}

/// A pin and what the trace knows of its block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPin {
    /// Where it lies and what it strands.
    pub pin: Pin,
    /// The name that a person gave it.
    pub name: Option<String>,
    /// Where in the program it was asked for.
    pub site: Option<String>,
    /// The phase it was asked for in.
    pub phase: Option<String>,
    /// What it holds.
    pub role: Role,
    /// The event that asked for it; nothing if it was there before the first.
    pub born_event: Option<u64>,
    /// Events since.
    pub age_events: u64,
    /// Nanoseconds of the recorded run since.
    pub age_ns: u64,
}

/// Pins of one site, phase and role together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PinGroup {
    /// Where in the program they were asked for.
    pub site: Option<String>,
    /// The phase they were asked for in.
    pub phase: Option<String>,
    /// What they hold.
    pub role: Role,
    /// The names that people gave them, each once, in the order of the pins; at most a few.
    pub names: Vec<String>,
    /// Number of blocks.
    pub blocks: u64,
    /// Their sizes as rounded, together.
    pub size_bytes: u64,
    /// What they strand.
    pub stranded_bytes: u64,
    /// Of that in places which one of them holds alone.
    pub alone_bytes: u64,
    /// The segments that they lie in.
    pub segments: u64,
    /// The most events that one of them has lived for.
    pub age_events_max: u64,
    /// The longest that one of them has lived for, in nanoseconds of the recorded run.
    pub age_ns_max: u64,
}

/// What the engine saw when it stopped.
#[derive(Clone, Debug)]
pub struct Stopped {
    /// Which moment it is.
    pub at: SplitAt,
    /// The event at which it stopped: the last that was replayed, or the first that was not.
    pub at_event: u64,
    /// Event and block of the request it is looked at for.
    pub request: (u64, BlockId),
    /// The pool of that request by the allocator's number.
    pub pool: u32,
    /// Sum of live requests in bytes.
    pub requested_bytes: u64,
    /// What the allocator holds.
    pub levels: Levels,
    /// The largest free range that could serve the request, in bytes.
    pub largest_hole_bytes: u64,
    /// What the device still has.
    pub device_free_bytes: Option<u64>,
    /// Names of pools.
    pub pool_names: BTreeMap<u32, String>,
    /// Every block.
    pub layout: Vec<LayoutBlock>,
}

/// How many names a group of pins keeps.
const NAMES_MAX: usize = 3;

impl Moment {
    /// Reads a moment off what the engine saw. The blocks of the layout are those of `trace`.
    pub fn new(trace: &Trace, stopped: Stopped) -> Moment {
        let (event, block) = stopped.request;
        let asked = trace.blocks[block.index()];
        let births = Births::new(trace, stopped.at_event);
        let request = MomentRequest {
            event_index: event,
            size_bytes: asked.size_bytes,
            stream: asked.stream,
            pool: stopped.pool,
            site: trace.site_in_model(asked.site),
            phase: births.phase_at(event).and_then(|phase| phase_name(trace, phase)),
            private_pool: entered_pool(trace, event),
        };
        let layout = &stopped.layout;
        let pins = pins(layout, asked.stream, stopped.pool);
        Moment {
            split: split(layout, asked.stream, stopped.pool, stopped.at, stopped.at_event),
            request,
            requested_bytes: stopped.requested_bytes,
            levels: stopped.levels,
            largest_hole_bytes: stopped.largest_hole_bytes,
            device_free_bytes: stopped.device_free_bytes,
            holes: holes(layout),
            pins: pins.into_iter().map(|pin| births.named(pin)).collect(),
            pool_names: stopped.pool_names,
            layout: stopped.layout,
        }
    }

    /// Number of segments, and of those without any block in use.
    pub fn segments(&self) -> (u64, u64) {
        let segments = self.layout.chunk_by(|a, b| a.segment == b.segment);
        segments.fold((0, 0), |(all, whole), blocks| {
            let free = blocks.iter().all(|block| block.state == BlockState::Free);
            (all + 1, whole + u64::from(free))
        })
    }

    /// The pins by site, phase and role, those that strand most first.
    pub fn pin_groups(&self) -> Vec<PinGroup> {
        let mut groups: BTreeMap<GroupKey<'_>, Vec<&NamedPin>> = BTreeMap::new();
        for pin in &self.pins {
            let key = (pin.site.as_deref(), pin.phase.as_deref(), pin.role as u8);
            groups.entry(key).or_default().push(pin);
        }
        let mut groups: Vec<PinGroup> = groups.into_values().map(|pins| group(&pins)).collect();
        // Stable: groups of equal weight stay in the order of their keys.
        groups.sort_by_key(|group| std::cmp::Reverse(group.stranded_bytes));
        groups
    }
}

/// Site, phase and role.
type GroupKey<'a> = (Option<&'a str>, Option<&'a str>, u8);

/// One group of pins, not empty.
fn group(pins: &[&NamedPin]) -> PinGroup {
    let mut segments: Vec<u32> = pins.iter().map(|pin| pin.pin.block.segment).collect();
    segments.sort_unstable();
    segments.dedup();
    let mut names: Vec<String> = Vec::new();
    for name in pins.iter().filter_map(|pin| pin.name.as_ref()) {
        if names.len() < NAMES_MAX && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let first = pins[0];
    PinGroup {
        site: first.site.clone(),
        phase: first.phase.clone(),
        role: first.role,
        names,
        blocks: pins.len() as u64,
        size_bytes: pins.iter().map(|pin| pin.pin.block.size_bytes).sum(),
        stranded_bytes: pins.iter().map(|pin| pin.pin.stranded_bytes).sum(),
        alone_bytes: pins.iter().map(|pin| pin.pin.alone_bytes).sum(),
        segments: segments.len() as u64,
        age_events_max: pins.iter().map(|pin| pin.age_events).max().unwrap_or(0),
        age_ns_max: pins.iter().map(|pin| pin.age_ns).max().unwrap_or(0),
    }
}

/// The innermost private pool that is entered before an event.
fn entered_pool(trace: &Trace, event: u64) -> Option<String> {
    let before = usize::try_from(event).unwrap_or(usize::MAX).min(trace.events.len());
    let mut entered = Vec::new();
    for event in &trace.events[..before] {
        match event.op {
            Op::PoolEnter(pool) => entered.push(pool),
            Op::PoolLeave(_) => {
                entered.pop();
            }
            _ => {}
        }
    }
    Some(trace.pools.get(entered.last()?.index())?.name.clone())
}

fn phase_name(trace: &Trace, phase: PhaseId) -> Option<String> {
    trace.phases.get(phase.index()).cloned()
}

/// When the blocks of a trace were asked for, as far as an event.
struct Births<'t> {
    trace: &'t Trace,
    at_event: u64,
    /// By block: the last event up to there that asked for it.
    born: Vec<Option<u32>>,
    /// Marks up to there, and those after it that a request may come behind.
    marks: Vec<(u64, PhaseId)>,
}

impl<'t> Births<'t> {
    fn new(trace: &'t Trace, at_event: u64) -> Births<'t> {
        let mut births =
            Births { trace, at_event, born: vec![None; trace.blocks.len()], marks: Vec::new() };
        for (index, event) in (0_u32..).zip(&trace.events) {
            match event.op {
                Op::Mark(phase) => births.marks.push((u64::from(index), phase)),
                Op::Alloc(block) | Op::Attempt(block) if u64::from(index) <= at_event => {
                    births.born[block.index()] = Some(index);
                }
                _ => {}
            }
        }
        births
    }

    /// The phase that an event lies in.
    fn phase_at(&self, event: u64) -> Option<PhaseId> {
        let after = self.marks.partition_point(|mark| mark.0 <= event);
        Some(self.marks[after.checked_sub(1)?].1)
    }

    fn named(&self, pin: Pin) -> NamedPin {
        let id = pin.block.block;
        let block = self.trace.blocks.get(id.index());
        let born = self.born.get(id.index()).copied().flatten();
        let time_ns = |event: u64| {
            let event = usize::try_from(event).ok().and_then(|event| self.trace.events.get(event));
            event.map_or(0, |event| event.time_ns)
        };
        let born_event = born.map(u64::from);
        let name = block.and_then(|block| block.name.some());
        NamedPin {
            pin,
            name: name.and_then(|name| self.trace.names.get(name.index()).cloned()),
            site: block.and_then(|block| self.trace.site_in_model(block.site)),
            phase: born_event
                .and_then(|event| self.phase_at(event))
                .and_then(|phase| phase_name(self.trace, phase)),
            role: block.map_or(Role::Unknown, |block| block.role),
            born_event,
            age_events: self.at_event - born_event.unwrap_or(0).min(self.at_event),
            age_ns: time_ns(self.at_event).saturating_sub(time_ns(born_event.unwrap_or(0))),
        }
    }
}
