//! The result of one trace through one allocator: plain data, serialised as scripts rely on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::alloc::Levels;
use crate::alloc::planned::PlanSummary;
use crate::chunk::{ChunkSummary, Traffic};
use crate::device::CallCounts;
use crate::metrics::{Peaks, Split, TouchReport};
use crate::trace::AddressPolicy;
use crate::units::{Bytes, counted};

/// Version of the JSON results.
pub const SCHEMA_VERSION: u32 = 1;

/// The whole result. Field names are the JSON names; see DESIGN 7.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// Version of this layout.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// The trace.
    pub trace: TraceSummary,
    /// The allocator.
    pub allocator: AllocatorSummary,
    /// The device.
    pub device: DeviceSummary,
    /// How it ended.
    pub outcome: Outcome,
    /// The peaks, each its own maximum.
    pub peaks: Peaks,
    /// What was there before the first event, if the history begins late.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartSummary>,
    /// Levels after the last event.
    #[serde(rename = "final")]
    pub final_levels: FinalLevels,
    /// requested peak / reserved peak; 1 when nothing was reserved.
    pub efficiency: f64,
    /// 1 − efficiency.
    pub fragmentation: f64,
    /// reserved peak − requested peak.
    pub excess_bytes: i64,
    /// allocated peak / reserved peak: STAlloc's E.
    pub utilization: f64,
    /// reserved peak − allocated peak in bytes: STAlloc's W.
    pub wasted_bytes: u64,
    /// active peak / reserved peak.
    pub active_utilization: f64,
    /// What the fragmentation is made of, at one event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
    /// How far the answer hangs on the addresses that a driver happens to give out; if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_spread: Option<AddressSpread>,
    /// Device calls that succeeded.
    pub calls: CallCounts,
    /// The allocator's counters.
    pub counters: BTreeMap<String, u64>,
    /// PyTorch's own statistics; `caching` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_stats: Option<BTreeMap<String, i64>>,
    /// What was planned ahead and what became of it; allocators that plan only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanSummary>,
    /// What moved between host and device; absent if nothing did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfers: Option<Traffic>,
    /// What the chunk manager did; `chunk` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<ChunkSummary>,
    /// Simulated time.
    pub time: SimulatedTime,
    /// What a replay on a real GPU showed beside the allocator's own books; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hardware: Option<HardwareSummary>,
    /// What a clock measured. Never compared.
    pub wall: Wall,
}

/// The trace in a result.
#[derive(Clone, Debug, Serialize)]
pub struct TraceSummary {
    /// Its name.
    pub name: String,
    /// Number of events.
    pub events: u64,
    /// Number of allocs.
    pub allocs: u64,
    /// Largest sum of live requests.
    pub requested_bytes_peak: u64,
    /// Number of streams.
    pub streams: u64,
    /// Kind of source, with version: `torch_snapshot 2.11.0`.
    pub source: String,
    /// Share of the history that was seen, 0 to 1.
    pub history_share: f64,
}

/// How a replay of a history that begins late began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StartSummary {
    /// Blocks in use before the first event.
    pub blocks: u64,
    /// What the program had asked for them.
    pub requested_bytes: u64,
    /// Memory that the recorded allocator held.
    pub reserved_bytes: u64,
    /// The allocator took over the recorded layout; else it was asked for these blocks first.
    pub layout_kept: bool,
}

/// The allocator in a result.
#[derive(Clone, Debug, Serialize)]
pub struct AllocatorSummary {
    /// Name as on the command line, parameters included.
    pub name: String,
    /// Effective parameters.
    pub params: BTreeMap<String, String>,
    /// Memory limit, if any.
    pub limit_bytes: Option<u64>,
}

/// The device in a result.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceSummary {
    /// `sim`, or `cuda` for a card.
    pub kind: &'static str,
    /// The card.
    #[serde(flatten)]
    pub card: Option<CardSummary>,
    /// Name of the cost profile.
    pub profile: String,
    /// The profile is derived from published figures, not measured; absent if it is measured.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub profile_derived: bool,
    /// Physical capacity; absent when unlimited.
    pub capacity_bytes: Option<u64>,
    /// Most bytes of addresses that it gave out at once; absent without a cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_bytes_max: Option<u64>,
    /// Most mappings that it allowed at once; absent without a cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mappings_max: Option<u64>,
    /// Where addresses come from; nothing on a card, whose driver says.
    pub address_policy: Option<AddressPolicy>,
    /// Most bytes of addresses that were reserved at once (virtual memory calls only); simulated
    /// devices only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_bytes_peak: Option<u64>,
    /// Most mappings that there were at once; simulated devices only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mappings_peak: Option<u64>,
}

/// A real GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CardSummary {
    /// Its name, as its driver tells it: `NVIDIA H200`.
    pub name: String,
    /// Version of the driver.
    pub driver: String,
    /// Which one of the machine, from 0.
    pub ordinal: u32,
}

impl DeviceSummary {
    /// The caps in words: `2 TiB of addresses`, `at most 600 mappings`.
    pub fn caps(&self) -> Vec<String> {
        caps(self.address_bytes_max, self.mappings_max)
    }
}

/// Caps of a device in words.
pub(super) fn caps(address_bytes_max: Option<u64>, mappings_max: Option<u64>) -> Vec<String> {
    let addresses = address_bytes_max.map(|bytes| format!("{} of addresses", Bytes(bytes)));
    let mappings = mappings_max.map(|count| format!("at most {}", counted(count, "mapping")));
    addresses.into_iter().chain(mappings).collect()
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Every request was met.
    Ok,
    /// Some request was refused.
    Oom,
    /// The replay could not be done.
    Failed,
}

impl Status {
    /// The name in files: `ok`, `oom`, `failed`.
    pub fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Oom => "oom",
            Status::Failed => "failed",
        }
    }
}

/// How a run ended, with the first refusal.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The first event that was refused.
    pub event_index: Option<u64>,
    /// What it asked for.
    pub requested_bytes: Option<u64>,
    /// Largest free range that could have served a request of its stream and pool.
    pub largest_hole_bytes: Option<u64>,
    /// The last call that the device refused for it, and why; absent if the allocator refused by
    /// itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_call: Option<String>,
    /// One line for people.
    pub message: Option<String>,
}

impl Outcome {
    /// Every request was met.
    pub(super) fn ok() -> Outcome {
        Outcome {
            status: Status::Ok,
            event_index: None,
            requested_bytes: None,
            largest_hole_bytes: None,
            refused_call: None,
            message: None,
        }
    }
}

/// The same run under several address policies. Each figure is an extreme of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AddressSpread {
    /// Whether the allocator looks at addresses at all; if not, one run stands for all.
    pub addresses_matter: bool,
    /// Number of policies.
    pub seeds: u64,
    /// Smallest allocated peak in bytes.
    pub allocated_bytes_peak_min: u64,
    /// Largest allocated peak in bytes.
    pub allocated_bytes_peak_max: u64,
    /// Smallest active peak in bytes.
    pub active_bytes_peak_min: u64,
    /// Largest active peak in bytes.
    pub active_bytes_peak_max: u64,
    /// Smallest reserved peak in bytes.
    pub reserved_bytes_peak_min: u64,
    /// Largest reserved peak in bytes.
    pub reserved_bytes_peak_max: u64,
    /// Fewest refused requests of a run.
    pub ooms_min: u64,
    /// Most refused requests of a run.
    pub ooms_max: u64,
    /// Policies under which some request was refused.
    pub seeds_with_oom: u64,
}

/// Levels after the last event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FinalLevels {
    /// Sum of live requests.
    pub requested_bytes: u64,
    /// The allocator's levels.
    #[serde(flatten)]
    pub levels: Levels,
}

/// Simulated time, from the first event to the last that was replayed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SimulatedTime {
    /// Cost of the allocator's device calls by the profile.
    pub allocator_device_ns: u64,
    /// Time that the recorded run took.
    pub recorded_ns: u64,
    /// The part of it that the recorded run's own device calls took, by the profile.
    pub recorded_device_ns: u64,
    /// The simulated run: recorded, less the recorded run's device calls, plus the allocator's.
    pub simulated_ns: u64,
    /// The same by steps, in their order. Together they hold all events: `before` stands for those
    /// before the first step, `after` for those after a step. Empty without any step.
    pub steps: Vec<StepTime>,
}

/// Simulated time of a step: from a mark `stepN` or `stepN.anything` to the first of another step
/// or none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// `stepN`, or `before` or `after`, which are no steps.
    pub name: String,
    /// Time that it took in the recorded run.
    pub recorded_ns: u64,
    /// That, less the recorded run's device calls.
    pub program_ns: u64,
    /// Cost of the allocator's device calls in it.
    pub allocator_device_ns: u64,
    /// The program and the allocator's device calls.
    pub simulated_ns: u64,
    /// `allocator_device_ns` / `recorded_ns`; nothing where the recording shows no time.
    pub share: Option<f64>,
    /// The allocator's device calls in it, of all kinds.
    pub calls: u64,
    /// Those of them that map memory.
    pub map_calls: u64,
}

impl StepTime {
    /// Whether it is a step, not what lies before or after one.
    pub fn is_step(&self) -> bool {
        !matches!(self.name.as_str(), "before" | "after")
    }
}

/// What a replay on a real GPU showed beside the allocator's own books.
#[derive(Clone, Debug, Serialize)]
pub struct HardwareSummary {
    /// What the card says is used, beside what the allocator says it holds.
    pub memory: CardMemory,
    /// What was written into blocks and checked.
    pub touch: TouchReport,
    /// The same cell on a simulated device of the card's size.
    pub simulated: SimulatedCell,
}

/// Memory as the driver tells it (`cuMemGetInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CardMemory {
    /// All bytes of the card.
    pub total_bytes: u64,
    /// Free bytes before the first event.
    pub free_bytes: u64,
    /// When most was reserved, or the last time before that it was looked at.
    pub at_reserved_peak: MemorySample,
    /// After the last event.
    pub at_end: MemorySample,
}

/// What is used at a moment, by the driver and by the allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemorySample {
    /// Index of the event after which it was looked at.
    pub event_index: u64,
    /// What the allocator says it holds.
    pub reserved_bytes: u64,
    /// How much less is free than before the first event. Negative where other processes gave
    /// memory back meanwhile.
    pub used_bytes: i64,
}

/// What the simulator says of a cell that was run on a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SimulatedCell {
    /// How it ended.
    pub status: Status,
    /// Most that it reserved, in bytes.
    pub reserved_bytes_peak: u64,
    /// Cost of its device calls by the profile.
    pub allocator_device_ns: u64,
    /// Its device calls.
    pub calls: CallCounts,
}

/// What a clock measured of calls to a card, beside what the profile says of the same calls.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HardwareWall {
    /// By the name of the call; only calls that were made.
    pub device_calls: BTreeMap<&'static str, CallTimes>,
    /// Time of all successful calls together.
    pub allocator_device_ns_measured: u64,
    /// That over `time.allocator_device_ns`; nothing if no call costs anything.
    pub measured_over_simulated: Option<f64>,
    /// How far the passes lie apart of which this is one.
    pub repeats: Repeats,
    /// Seconds that filling and checking blocks took, beside the replay loop.
    pub touch_seconds: f64,
}

/// The passes over a trace on a card, of which one is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Repeats {
    /// How many there were.
    pub count: u32,
    /// Time of all successful calls in the quickest, in nanoseconds.
    pub least_ns: u64,
    /// And in the slowest.
    pub most_ns: u64,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CallTimes {
    /// Calls that succeeded.
    pub calls: u64,
    /// Calls that the driver refused.
    pub refused: u64,
    /// What a clock says of those that succeeded.
    pub measured_ns: u64,
    /// What the profile says of them.
    pub simulated_ns: u64,
}

/// What a clock measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Wall {
    /// alloc, attempt, free, defer and done events over the time of the replay loop.
    pub events_per_second: f64,
    /// Seconds in the replay loop.
    pub seconds: f64,
    /// Largest resident size of the process so far.
    pub peak_rss_bytes: u64,
    /// Calls to a card; absent without one.
    #[serde(flatten)]
    pub hardware: Option<HardwareWall>,
}
