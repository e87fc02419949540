//! Statistics as JSON. The fields are listed in the [room's docs](super).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::alloc::Levels;
use crate::device::CallCounts;
use crate::engine::SCHEMA_VERSION;
use crate::metrics::Peaks;

/// What the program asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Requests {
    /// Blocks handed out.
    pub(super) allocs: u64,
    /// Blocks freed by the program.
    pub(super) frees: u64,
    /// Of these, blocks that waited for another stream.
    pub(super) deferred: u64,
    /// Requests refused.
    pub(super) refused: u64,
    /// Streams on which something was asked for, the default stream included.
    pub(super) streams: u64,
    /// Marks.
    pub(super) marks: u64,
}

/// Levels at this moment.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Current {
    /// What the program asked for and has not freed.
    pub(super) requested_bytes: u64,
    /// The allocator's levels.
    #[serde(flatten)]
    pub(super) levels: Levels,
}

/// Everything that statistics are made of.
pub(super) struct Snapshot {
    pub(super) ordinal: u32,
    pub(super) device_kind: &'static str,
    pub(super) device_name: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) total_bytes: u64,
    pub(super) free_bytes: Option<u64>,
    pub(super) allocator: String,
    pub(super) params: Vec<(String, String)>,
    pub(super) limit_bytes: Option<u64>,
    pub(super) ceiling_bytes: Option<u64>,
    pub(super) current: Current,
    pub(super) peaks: Peaks,
    pub(super) requests: Requests,
    pub(super) waiting: u64,
    pub(super) calls: CallCounts,
    pub(super) device_ns: Option<BTreeMap<&'static str, u64>>,
    pub(super) counters: Vec<(&'static str, u64)>,
    pub(super) torch_stats: Option<Vec<(String, i64)>>,
    pub(super) failure: Option<String>,
    /// Events, bytes in memory, and whether it is full.
    pub(super) recorded: Option<(u64, u64, bool)>,
}

/// The object of one device.
#[derive(Debug, Serialize)]
pub(super) struct Stats {
    schema_version: u32,
    fraglab_version: &'static str,
    mode: &'static str,
    device: DeviceStats,
    allocator: AllocatorStats,
    current: Current,
    peaks: PeakStats,
    efficiency: f64,
    fragmentation: f64,
    utilization: f64,
    active_utilization: f64,
    requests: Requests,
    waiting: u64,
    calls: CallCounts,
    device_ns: Option<BTreeMap<&'static str, u64>>,
    counters: BTreeMap<&'static str, u64>,
    torch_stats: Option<BTreeMap<String, i64>>,
    failure: Option<String>,
    trace: Option<TraceStats>,
}

#[derive(Debug, Serialize)]
struct DeviceStats {
    index: u32,
    kind: &'static str,
    name: Option<String>,
    driver: Option<String>,
    total_bytes: u64,
    free_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct AllocatorStats {
    name: String,
    params: BTreeMap<String, String>,
    limit_bytes: Option<u64>,
    ceiling_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PeakStats {
    requested_bytes_peak: u64,
    allocated_bytes_peak: u64,
    active_bytes_peak: u64,
    reserved_bytes_peak: u64,
}

#[derive(Debug, Serialize)]
struct TraceStats {
    events: u64,
    bytes_in_memory: u64,
    is_full: bool,
    path: String,
}

impl Snapshot {
    /// The object. `path`: where the trace goes, if one is recorded.
    pub(super) fn stats(self, path: Option<String>) -> Stats {
        let peaks = self.peaks;
        let share = |part: u64| match peaks.reserved_bytes_peak {
            0 => 1.0,
            reserved => part as f64 / reserved as f64,
        };
        let efficiency = share(peaks.requested_bytes_peak);
        let trace = self.recorded.map(|(events, bytes_in_memory, is_full)| TraceStats {
            events,
            bytes_in_memory,
            is_full,
            path: path.unwrap_or_default(),
        });
        Stats {
            schema_version: SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION"),
            mode: if trace.is_some() { "trace" } else { "alloc" },
            device: DeviceStats {
                index: self.ordinal,
                kind: self.device_kind,
                name: self.device_name,
                driver: self.driver,
                total_bytes: self.total_bytes,
                free_bytes: self.free_bytes,
            },
            allocator: AllocatorStats {
                name: self.allocator,
                params: self.params.into_iter().collect(),
                limit_bytes: self.limit_bytes,
                ceiling_bytes: self.ceiling_bytes,
            },
            current: self.current,
            peaks: PeakStats {
                requested_bytes_peak: peaks.requested_bytes_peak,
                allocated_bytes_peak: peaks.allocated_bytes_peak,
                active_bytes_peak: peaks.active_bytes_peak,
                reserved_bytes_peak: peaks.reserved_bytes_peak,
            },
            efficiency,
            fragmentation: 1.0 - efficiency,
            utilization: share(peaks.allocated_bytes_peak),
            active_utilization: share(peaks.active_bytes_peak),
            requests: self.requests,
            waiting: self.waiting,
            calls: self.calls,
            device_ns: self.device_ns,
            counters: self.counters.into_iter().collect(),
            torch_stats: self.torch_stats.map(|stats| stats.into_iter().collect()),
            failure: self.failure,
            trace,
        }
    }
}
