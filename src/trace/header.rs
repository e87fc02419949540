//! The head of a trace: where it comes from, what it ran on, what is expected of it.

use serde::{Deserialize, Serialize};

use super::Model;

/// What kind of file or program a trace came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// Not known.
    #[default]
    Unknown,
    /// A snapshot of PyTorch's CUDA caching allocator.
    TorchSnapshot,
    /// A log of RMM's logging resource adaptor.
    RmmCsv,
    /// A trace of PyTorch's profiler.
    Kineto,
    /// A log of STAlloc's recorder.
    StallocLog,
    /// Buffers with lifetimes in MiniMalloc's CSV.
    MinimallocCsv,
    /// Written by a person in the text form.
    Text,
    /// Generated from a model description.
    Generated,
    /// Merged from the traces of several ranks.
    Merged,
}

/// Where a trace comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Kind of file or program.
    #[serde(default)]
    pub kind: SourceKind,
    /// Version of the program that recorded it (`2.11.0+cu130`), where a file tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// The device of the recorded run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceInfo {
    /// Name, as `NVIDIA H200`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Index of the device in the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Total memory that the device reports (`device_total`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Physical capacity for the simulated device (`capacity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// Most bytes of addresses that the simulated device gives out (`address_space`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_bytes_max: Option<u64>,
    /// Most mappings that the simulated device allows at once (`mappings`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mappings_max: Option<u64>,
}

/// How much of a device's total a process can surely get: contexts and libraries take memory that
/// no recording shows, so a device counts as full when less than a thirty-second of it is left.
pub fn room_on_device(total_bytes: u64) -> u64 {
    total_bytes - total_bytes / 32
}

/// Addresses that a reservation of an expandable segment covers on a device, before it is rounded
/// up to whole pages (specs/pytorch_caching.md 5.1): 1.125 times its total.
pub fn reservation_span_bytes(total_bytes: u64) -> u64 {
    total_bytes.saturating_add(total_bytes / 8)
}

/// Which addresses a simulated device gives out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddressPolicy {
    /// The driver model of [`crate::device::sim::addresses`]: 32 MiB chunks, descending, leftovers
    /// of the newest filled first.
    #[default]
    Chunks,
    /// Each range above all earlier ones, never reused.
    Ascending,
    /// Each range below all earlier ones, never reused.
    Descending,
    /// The bases that a recording shows, by size and order.
    Recorded,
}

/// A call that an allocator may make of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceCall {
    /// `cudaMalloc`.
    Malloc,
    /// `cudaFree`.
    Free,
    /// `cuMemAddressReserve`.
    AddressReserve,
    /// `cuMemAddressFree`.
    AddressFree,
    /// `cuMemCreate`.
    Create,
    /// `cuMemRelease`.
    Release,
    /// `cuMemMap`.
    Map,
    /// `cuMemUnmap`.
    Unmap,
    /// `cuMemSetAccess`.
    SetAccess,
}

impl DeviceCall {
    /// Every call, in the order of the results' `calls` object.
    pub const ALL: [DeviceCall; 9] = [
        DeviceCall::Malloc,
        DeviceCall::Free,
        DeviceCall::AddressReserve,
        DeviceCall::AddressFree,
        DeviceCall::Create,
        DeviceCall::Release,
        DeviceCall::Map,
        DeviceCall::Unmap,
        DeviceCall::SetAccess,
    ];

    /// The name in files and results: `malloc`, `address_reserve`, ...
    pub fn name(self) -> &'static str {
        match self {
            DeviceCall::Malloc => "malloc",
            DeviceCall::Free => "free",
            DeviceCall::AddressReserve => "address_reserve",
            DeviceCall::AddressFree => "address_free",
            DeviceCall::Create => "create",
            DeviceCall::Release => "release",
            DeviceCall::Map => "map",
            DeviceCall::Unmap => "unmap",
            DeviceCall::SetAccess => "set_access",
        }
    }

    /// The call of that name.
    pub fn from_name(name: &str) -> Option<DeviceCall> {
        DeviceCall::ALL.into_iter().find(|call| call.name() == name)
    }
}

/// Which calls of a kind fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultWhen {
    /// The n-th, counted from 1.
    Nth(u64),
    /// Every one.
    All,
}

/// An injected failure: `fail create 12`, `fail map all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// The call that fails.
    pub call: DeviceCall,
    /// Which ones.
    pub when: FaultWhen,
}

/// A number or word that a run of this trace must give: `expect caching reserved_bytes_peak
/// 220MiB`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Allocator as on the command line.
    pub allocator: String,
    /// Name of a field of the JSON result, with dots for nesting where a bare name would be
    /// ambiguous (`calls.free`).
    pub field: String,
    /// The value as written; sizes may have units.
    pub value: String,
    /// Line of the text trace, from 1; 0 when not from a text.
    #[serde(default)]
    pub line: u32,
}

/// How much of the recorded run the file shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct History {
    /// Frees of blocks whose alloc came before the history begins.
    #[serde(default)]
    pub frees_without_alloc: u64,
    /// Allocs in the history.
    #[serde(default)]
    pub allocs: u64,
    /// Blocks that were live or deferred when the history begins.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub blocks_at_start: u64,
    /// Allocs of the whole run, where the recorded allocator told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocs_of_run: Option<u64>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl History {
    /// Allocs of the run that the history does not hold. Where the run's number is not known, those
    /// blocks stand for them that were there when the history begins: there are at least as many.
    pub fn allocs_unseen(&self) -> u64 {
        let told = self.allocs_of_run.map_or(0, |allocs| allocs.saturating_sub(self.allocs));
        told.max(self.frees_without_alloc).max(self.blocks_at_start)
    }

    /// Whether [`History::share`] is only an upper bound.
    pub fn share_is_bound(&self) -> bool {
        let told = self.allocs_of_run.unwrap_or(0);
        told < self.allocs.saturating_add(self.allocs_unseen())
    }

    /// Share of the run's allocs that the history holds, 0 to 1; an upper bound where the run's
    /// number is not known.
    pub fn share(&self) -> f64 {
        let all = self.allocs.saturating_add(self.allocs_unseen());
        if all == 0 { 1.0 } else { self.allocs as f64 / all as f64 }
    }
}

/// The head of a trace. Every field but the name may be absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Name of the job, usually the file's stem.
    #[serde(default)]
    pub name: String,
    /// Where it comes from.
    #[serde(default)]
    pub source: Source,
    /// What it ran on.
    #[serde(default)]
    pub device: DeviceInfo,
    /// The settings string (`PYTORCH_CUDA_ALLOC_CONF`) of the recorded run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// The allocator's own memory limit in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Address policy for the simulated device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_policy: Option<AddressPolicy>,
    /// Failures that the simulated device must show.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
    /// Strategies of the job: recompute, offload, zero3, ...
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strategies: Vec<String>,
    /// What runs of this trace must give.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Expectation>,
    /// How much of the run was seen.
    #[serde(default)]
    pub history: History,
    /// Unix time of the first event in nanoseconds, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_unix_ns: Option<u64>,
    /// The model, for allocators that manage model data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
}
