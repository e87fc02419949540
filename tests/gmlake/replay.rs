//! A trace through the model, observed as the engine observes an allocator.

use std::collections::BTreeMap;

use fraglab::alloc::Levels;
use fraglab::trace::{DeviceCall, Op, Trace};
use fraglab::units::BlockId;
use serde_json::{Value, json};

use super::device::SlowDevice;
use super::model::{Counters, Done, Model};
use super::settings::Settings;

/// What a replay leaves behind.
#[derive(Clone, Debug)]
pub(super) struct Replayed {
    pub(super) model: Model,
    /// The largest allocated, active and reserved levels after a request that was met.
    pub(super) peaks: Levels,
    /// Index and bytes of the first refused request.
    pub(super) refusal: Option<(u64, u64)>,
    /// What was done, with the index of its event.
    pub(super) log: Vec<(u64, Done)>,
}

/// The device that the header of a trace describes.
pub(super) fn device_of(trace: &Trace) -> SlowDevice {
    let device = &trace.header.device;
    SlowDevice::new(device.capacity_bytes, &trace.header.faults)
        .capped(device.address_bytes_max, device.mappings_max)
}

/// Takes a trace through a fresh model.
pub(super) fn replay(trace: &Trace, settings: &Settings) -> Replayed {
    let mut settings = settings.clone();
    settings.limit = settings.limit.or(trace.header.limit_bytes);
    let device = device_of(trace);
    let mut run = Replayed {
        model: Model::new(settings, device),
        peaks: Levels::default(),
        refusal: None,
        log: Vec::new(),
    };
    let mut handles = BTreeMap::new();
    for (index, event) in trace.events.iter().enumerate() {
        run.step(trace, index as u64, event.op, &mut handles);
        run.log.extend(run.model.take_log().into_iter().map(|done| (index as u64, done)));
    }
    run
}

impl Replayed {
    fn step(&mut self, trace: &Trace, event: u64, op: Op, handles: &mut BTreeMap<BlockId, u64>) {
        match op {
            Op::Alloc(block) => {
                if let Some(handle) = self.malloc(trace, event, block) {
                    handles.insert(block, handle);
                    let Levels { allocated_bytes, active_bytes, .. } = self.model.levels();
                    let peaks = &mut self.peaks;
                    peaks.allocated_bytes = peaks.allocated_bytes.max(allocated_bytes);
                    peaks.active_bytes = peaks.active_bytes.max(active_bytes);
                    self.observe_reserved();
                }
            }
            Op::Attempt(block) => {
                let handle = self.malloc(trace, event, block);
                self.observe_reserved();
                if let Some(handle) = handle {
                    self.model.free(handle);
                }
            }
            Op::Free(block) => {
                if let Some(handle) = handles.remove(&block) {
                    self.model.free(handle);
                }
            }
            Op::Defer(block) => {
                if let Some(&handle) = handles.get(&block) {
                    self.model.defer(handle);
                }
            }
            Op::Done(block) => {
                if let Some(handle) = handles.remove(&block) {
                    self.model.complete(handle);
                }
            }
            Op::EmptyCache => self.model.empty_cache(),
            _ => {}
        }
    }

    fn malloc(&mut self, trace: &Trace, event: u64, block: BlockId) -> Option<u64> {
        let asked = &trace.blocks[block.index()];
        let stream = trace.streams[asked.stream.index()].handle;
        let handle = self.model.malloc(asked.size_bytes, stream);
        if handle.is_none() && self.refusal.is_none() {
            self.refusal = Some((event, asked.size_bytes));
        }
        handle
    }

    fn observe_reserved(&mut self) {
        let reserved = self.model.levels().reserved_bytes;
        self.peaks.reserved_bytes = self.peaks.reserved_bytes.max(reserved);
    }

    /// Calls that succeeded, by name.
    pub(super) fn calls(&self) -> BTreeMap<&'static str, u64> {
        let calls = DeviceCall::ALL.into_iter();
        calls.map(|call| (call.name(), self.model.device.calls(call))).collect()
    }

    /// The counters under their names in results.
    pub(super) fn counters(&self) -> BTreeMap<&'static str, u64> {
        let Counters {
            stitches,
            stitched_bytes_peak,
            stitch_reuses,
            stitch_evictions,
            forgotten_bytes,
            segment_allocs,
            segment_frees,
            alloc_retries,
            ooms,
        } = self.model.counters;
        let quirks = self.model.quirks();
        let mut counters = BTreeMap::from([
            ("stitches", stitches),
            ("stitched_bytes", self.model.stitched_bytes()),
            ("stitched_bytes_peak", stitched_bytes_peak),
            ("stitch_reuses", stitch_reuses),
            ("stitch_evictions", stitch_evictions),
            ("segment_allocs", segment_allocs + if quirks { stitches } else { 0 }),
            ("segment_frees", segment_frees),
            ("alloc_retries", alloc_retries),
            ("ooms", ooms),
        ]);
        if quirks {
            let drifted_bytes = self.model.stitched_bytes() + forgotten_bytes;
            counters.insert("stitched_bytes_drifted", drifted_bytes);
        }
        counters
    }

    /// The part of the JSON result that the model knows.
    pub(super) fn json(&self) -> Value {
        let levels = self.model.levels();
        json!({
            "outcome": {
                "status": if self.refusal.is_some() { "oom" } else { "ok" },
                "event_index": self.refusal.map(|(event, _)| event),
                "requested_bytes": self.refusal.map(|(_, bytes)| bytes),
            },
            "peaks": {
                "allocated_bytes_peak": self.peaks.allocated_bytes,
                "active_bytes_peak": self.peaks.active_bytes,
                "reserved_bytes_peak": self.peaks.reserved_bytes,
            },
            "final": {
                "allocated_bytes": levels.allocated_bytes,
                "active_bytes": levels.active_bytes,
                "reserved_bytes": levels.reserved_bytes,
            },
            "calls": self.calls(),
            "counters": self.counters(),
        })
    }
}
