//! What a trace says by itself, summed up once however often it is replayed.
//!
//! The one design decision: whatever hangs on the trace and the options alone is found when it is
//! first wanted and kept. A replay of its own then costs no second pass over the events, and a
//! probe of [`smallest_capacity`](super::smallest_capacity), which wants none of it, costs no first.
//!
//! ```text
//!   Trace, RunOptions ──> Prepared ──┬─ run(spec, capacity) ──> RunResult
//!                                    ├─ run(spec, capacity) ──> RunResult
//!                                    └─ probes, one a capacity
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::chunked::traffic_of_program;
use super::clock::program_times;
use super::loading::Loading;
use super::profile::ProfileKey;
use super::replay::{Observe, Observed, RunError, RunOptions, run_on};
use super::result::TraceSummary;
use crate::alloc::planned::Profile;
use crate::alloc::spec::AllocSpec;
use crate::chunk::Traffic;
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::trace::{Event, Op, Trace};

/// A trace with the options of its replays, and what is known of both before any of them.
#[derive(Debug)]
pub struct Prepared<'t> {
    trace: &'t Trace,
    options: &'t RunOptions,
    summary: OnceLock<TraceSummary>,
    program_ns: OnceLock<Vec<u64>>,
    loading: OnceLock<Option<Loading>>,
    traffic: OnceLock<Option<Traffic>>,
    /// Profiles that were cut, by where they come from.
    profiles: Mutex<BTreeMap<ProfileKey, Option<Arc<Profile>>>>,
}

impl<'t> Prepared<'t> {
    /// A trace to be replayed with these options.
    pub fn new(trace: &'t Trace, options: &'t RunOptions) -> Self {
        Prepared {
            trace,
            options,
            summary: OnceLock::new(),
            program_ns: OnceLock::new(),
            loading: OnceLock::new(),
            traffic: OnceLock::new(),
            profiles: Mutex::default(),
        }
    }

    /// Takes the trace through one allocator: [`run`](super::run) on a device of `capacity_bytes`;
    /// where that is absent, of the size that the options or the trace name.
    ///
    /// # Errors
    /// As [`run`](super::run).
    pub fn run(
        &self,
        spec: &AllocSpec,
        capacity_bytes: Option<u64>,
        observe: Observe,
    ) -> Result<Observed, RunError> {
        let size = capacity_bytes.map_or(self.asked_size(), DeviceSize::Bytes);
        run_on(self, spec, size, observe)
    }

    /// The trace as results tell of it.
    pub fn summary(&self) -> &TraceSummary {
        self.summary.get_or_init(|| summary(self.trace))
    }

    pub(super) fn trace(&self) -> &'t Trace {
        self.trace
    }

    pub(super) fn options(&self) -> &'t RunOptions {
        self.options
    }

    /// The device that the options ask for.
    pub(super) fn asked_size(&self) -> DeviceSize {
        self.options.capacity_bytes.map_or(DeviceSize::OfTrace, DeviceSize::Bytes)
    }

    /// Program time of every event in nanoseconds, by the profile of the options.
    pub(super) fn program_times(&self) -> &[u64] {
        self.program_ns.get_or_init(|| program_times(self.trace, &self.options.profile))
    }

    /// What an allocator that plans ahead may know: the first steps of this trace, or another trace.
    /// Nothing for allocators that do not, and where there is no step to learn from.
    pub(super) fn profile(&self, spec: &AllocSpec) -> Option<Arc<Profile>> {
        let key = ProfileKey::of(spec, self.options)?;
        // A thread that panicked while it cut a profile left none behind.
        let mut profiles = self.profiles.lock().unwrap_or_else(PoisonError::into_inner);
        let cut = || key.clone().cut(self.trace, self.options).map(Arc::new);
        profiles.entry(key.clone()).or_insert_with(cut).clone()
    }

    /// What the program itself moves between host and device.
    pub(super) fn traffic(&self) -> Option<Traffic> {
        *self.traffic.get_or_init(|| traffic_of_program(self.trace))
    }

    /// How the program loads its weights, if it does.
    pub(super) fn loading(&self) -> Option<Loading> {
        *self.loading.get_or_init(|| Loading::of(self.trace))
    }
}

/// How large the simulated device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceSize {
    /// As the trace says: its capacity, else what the recorded device had, else without end.
    OfTrace,
    /// So many bytes, which it also reports as its total.
    Bytes(u64),
    /// Without end; it reports [`UNLIMITED_TOTAL_BYTES`].
    Unlimited,
    /// That of a card, or of one simulated as this: it starts empty, whatever the trace says.
    Card {
        /// Bytes that can be had of it.
        capacity_bytes: u64,
        /// What it reports as its total.
        total_bytes: u64,
    },
}

impl DeviceSize {
    /// Physical capacity and the total that the device reports, in bytes; nothing for no end.
    pub(super) fn capacity_and_total_bytes(self, trace: &Trace) -> (Option<u64>, Option<u64>) {
        let device = &trace.header.device;
        match self {
            DeviceSize::OfTrace => {
                let capacity_bytes = device.capacity_bytes.or(device.total_bytes);
                (capacity_bytes, device.total_bytes.or(capacity_bytes))
            }
            DeviceSize::Bytes(bytes) => (Some(bytes), Some(bytes)),
            DeviceSize::Unlimited => (None, Some(UNLIMITED_TOTAL_BYTES)),
            DeviceSize::Card { capacity_bytes, total_bytes } => {
                (Some(capacity_bytes), Some(total_bytes))
            }
        }
    }
}

fn summary(trace: &Trace) -> TraceSummary {
    let is_alloc = |event: &&Event| matches!(event.op, Op::Alloc(_));
    let source = &trace.header.source;
    let kind = serde_json::to_value(source.kind).ok();
    let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or("unknown");
    TraceSummary {
        name: trace.header.name.clone(),
        events: trace.events.len() as u64,
        allocs: trace.events.iter().filter(is_alloc).count() as u64,
        requested_bytes_peak: trace.requested_bytes_peak(),
        streams: trace.streams.len() as u64,
        source: match &source.version {
            Some(version) => format!("{kind} {version}"),
            None => kind.to_owned(),
        },
        history_share: trace.header.history.share(),
    }
}
