//! Sinks that watch a replay, and pure functions of a layout.
//!
//! A [`Sink`] is compiled into the replay loop. What it does not want costs nothing: the loop asks
//! `LOG` and `LEVELS` at compile time.

mod decisions;
mod envelope;
mod growth;
mod holes;
mod map;
mod moment;
mod peaks;
mod pins;
mod shadow;
mod split;
mod steps;
mod timeline;
mod touch;

pub use decisions::{DecisionRow, Decisions};
pub use envelope::{ENVELOPE_POINTS, Envelope, EnvelopePoint, FourLevels};
pub use growth::Growth;
pub use holes::{HoleGroup, holes};
pub use map::{MapBlock, MapSink, MapStretch, MemoryMap, Shade};
pub use moment::{Moment, MomentRequest, NamedPin, PinGroup, Stopped};
pub use peaks::{PeakTracker, Peaks};
pub use pins::{Pin, pins};
pub use shadow::Shadow;
pub use split::{Split, SplitAt, split};
pub use steps::{StepPeakTracker, StepPeaks};
pub use timeline::{Timeline, TimelineRow};
pub use touch::{TouchFailure, TouchMismatch, TouchMode, TouchReport, TouchSink};

use crate::alloc::{Action, LayoutBlock, Levels};
use crate::device::Extent;

/// Watches a replay.
pub trait Sink {
    /// Whether [`Self::action`] does anything.
    const LOG: bool;
    /// Whether [`Self::after_event`] does anything.
    const LEVELS: bool;

    /// The replay begins with memory that was there before: the layout, in address order.
    #[inline]
    fn start(&mut self, _layout: &[LayoutBlock]) {}

    /// The allocator did something during an event.
    #[inline]
    fn action(&mut self, _event_index: u64, _action: Action) {}

    /// Whether [`Self::backing`] does anything for an action just told, one that names a block or
    /// memory obtained.
    #[inline]
    fn wants_backing(&self, _action: &Action) -> bool {
        false
    }

    /// What physical memory lies behind the block or the memory of an action just told; nothing if
    /// part of it has none. Also told if another sink wanted it.
    #[inline]
    fn backing(&mut self, _event_index: u64, _action: Action, _memory: Option<Vec<Extent>>) {}

    /// Whether the allocator is to check its own books after every event.
    #[inline]
    fn wants_invariants(&self) -> bool {
        false
    }

    /// The allocator found its own books broken after an event.
    #[inline]
    fn broken(&mut self, _event_index: u64, _message: &str) {}

    /// Levels after an event: its index, the sum of live requests in bytes, what the allocator
    /// holds, and the cost of all device calls so far in nanoseconds.
    #[inline]
    fn after_event(
        &mut self,
        _event_index: u64,
        _requested_bytes: u64,
        _levels: Levels,
        _device_ns: u64,
    ) {
    }
}

/// Watches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSink;

impl Sink for NoSink {
    const LOG: bool = false;
    const LEVELS: bool = false;
}

/// Two sinks as one; chains to any number.
impl<A: Sink, B: Sink> Sink for (A, B) {
    const LOG: bool = A::LOG || B::LOG;
    const LEVELS: bool = A::LEVELS || B::LEVELS;

    fn start(&mut self, layout: &[LayoutBlock]) {
        self.0.start(layout);
        self.1.start(layout);
    }

    fn action(&mut self, event_index: u64, action: Action) {
        self.0.action(event_index, action);
        self.1.action(event_index, action);
    }

    fn wants_backing(&self, action: &Action) -> bool {
        self.0.wants_backing(action) || self.1.wants_backing(action)
    }

    fn backing(&mut self, event_index: u64, action: Action, memory: Option<Vec<Extent>>) {
        self.0.backing(event_index, action, memory.clone());
        self.1.backing(event_index, action, memory);
    }

    fn wants_invariants(&self) -> bool {
        self.0.wants_invariants() || self.1.wants_invariants()
    }

    fn broken(&mut self, event_index: u64, message: &str) {
        self.0.broken(event_index, message);
        self.1.broken(event_index, message);
    }

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, device_ns: u64) {
        self.0.after_event(event, requested_bytes, levels, device_ns);
        self.1.after_event(event, requested_bytes, levels, device_ns);
    }
}

/// A sink that may be absent at run time: for what is rare, so that the loop is not compiled for
/// every combination.
impl<S: Sink> Sink for Option<S> {
    const LOG: bool = S::LOG;
    const LEVELS: bool = S::LEVELS;

    fn start(&mut self, layout: &[LayoutBlock]) {
        if let Some(sink) = self {
            sink.start(layout);
        }
    }

    fn action(&mut self, event_index: u64, action: Action) {
        if let Some(sink) = self {
            sink.action(event_index, action);
        }
    }

    fn wants_backing(&self, action: &Action) -> bool {
        self.as_ref().is_some_and(|sink| sink.wants_backing(action))
    }

    fn backing(&mut self, event_index: u64, action: Action, memory: Option<Vec<Extent>>) {
        if let Some(sink) = self {
            sink.backing(event_index, action, memory);
        }
    }

    fn wants_invariants(&self) -> bool {
        self.as_ref().is_some_and(S::wants_invariants)
    }

    fn broken(&mut self, event_index: u64, message: &str) {
        if let Some(sink) = self {
            sink.broken(event_index, message);
        }
    }

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, device_ns: u64) {
        if let Some(sink) = self {
            sink.after_event(event, requested_bytes, levels, device_ns);
        }
    }
}
