//! What a run tells: the log of the manager's decisions, and figures (spec patrickstar 9).

use serde::Serialize;

use super::clock::StepTimes;
use super::states::{ChunkList, Device};
use crate::units::Bytes;

/// What the job is doing (spec patrickstar 2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The model is being built.
    #[default]
    Init,
    /// The forward pass.
    Forward,
    /// The backward pass, with what it recomputes.
    Backward,
    /// The optimizer's step.
    Adam,
}

/// A decision of the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkEventKind {
    /// The payload moves to the GPU.
    ToGpu,
    /// The payload moves to the host: an eviction, or the host needs it for ADAM.
    ToHost,
    /// A payload is allocated, on the GPU or the host.
    Allocate,
    /// The payload of another rank's chunk is dropped.
    Drop,
    /// The group of this local chunk is gathered: bytes of all its chunks.
    AllGather,
    /// The gradients of the group of this local chunk are summed: bytes of all its chunks.
    ReduceScatter,
    /// The chunk is broadcast from its owner.
    Broadcast,
    /// The chunk's gradients are summed at its owner.
    Reduce,
    /// ADAM reads the chunk's gradients over the link.
    GradientRead,
    /// ADAM writes the chunk's parameters over the link.
    WriteBack,
    /// The chunk needs so many bytes on a device, and no room could be made within the budget: it
    /// is allocated or moved all the same.
    OverBudget,
    /// The chunk had to move and the other device's budget has no room: training stops.
    CannotMove,
}

/// A line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChunkEvent {
    /// N of the phase `stepN...`; 0 while the model is built.
    pub step: u32,
    /// What the job is doing.
    pub stage: Stage,
    /// Moments of the step that have ended.
    pub moment: u32,
    /// What happens.
    pub kind: ChunkEventKind,
    /// Id of the chunk (spec patrickstar 1.1).
    pub chunk: u32,
    /// Bytes moved, allocated, or asked for.
    pub bytes: u64,
}

/// Why training stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "step {step}: chunk {chunk} of {} must leave the {from}, and the {to}'s budget has {} left",
    Bytes(*.chunk_bytes), Bytes(u64::try_from(*.remaining_bytes).unwrap_or(0))
)]
pub struct HardStop {
    /// The step.
    pub step: u32,
    /// What the job was doing.
    pub stage: Stage,
    /// Moments of the step that had ended.
    pub moment: u32,
    /// Id of the chunk.
    pub chunk: u32,
    /// Its size.
    pub chunk_bytes: u64,
    /// Where it is.
    pub from: Device,
    /// Where it should go.
    pub to: Device,
    /// What is left of the budget there; may be negative.
    pub remaining_bytes: i64,
}

/// The first request that the GPU refused for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RefusedRequest {
    /// Index of its event in the derived trace.
    pub event_index: u64,
    /// Bytes asked for.
    pub requested_bytes: u64,
}

/// Copies between the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// How many to the GPU.
    pub h2d: u64,
    /// Their bytes.
    pub h2d_bytes: u64,
    /// How many to the host.
    pub d2h: u64,
    /// Their bytes.
    pub d2h_bytes: u64,
}

impl Traffic {
    /// A copy to the device.
    pub fn add(&mut self, to: Device, bytes: u64) {
        match to {
            Device::Gpu => {
                self.h2d += 1;
                self.h2d_bytes = self.h2d_bytes.saturating_add(bytes);
            }
            Device::Host => {
                self.d2h += 1;
                self.d2h_bytes = self.d2h_bytes.saturating_add(bytes);
            }
        }
    }

    /// Adds another's copies.
    pub fn join(&mut self, other: Traffic) {
        self.h2d += other.h2d;
        self.h2d_bytes = self.h2d_bytes.saturating_add(other.h2d_bytes);
        self.d2h += other.d2h;
        self.d2h_bytes = self.d2h_bytes.saturating_add(other.d2h_bytes);
    }
}

/// Calls of collectives and the bytes they hand out, as PatrickStar logs them: whole chunks of all
/// ranks (spec patrickstar 4.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Collectives {
    /// All-gathers of groups.
    pub all_gathers: u64,
    /// Their bytes.
    pub all_gather_bytes: u64,
    /// Reduce-scatters of groups.
    pub reduce_scatters: u64,
    /// Their bytes.
    pub reduce_scatter_bytes: u64,
    /// Broadcasts of chunks.
    pub broadcasts: u64,
    /// Their bytes.
    pub broadcast_bytes: u64,
    /// Reductions of chunks.
    pub reduces: u64,
    /// Their bytes.
    pub reduce_bytes: u64,
    /// Bytes of fp32 gradients on the host that torch sums over the ranks; their time is not known.
    pub host_all_reduce_bytes: u64,
}

/// What a step did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepSummary {
    /// N of the phase `stepN...`.
    pub step: u32,
    /// Whether the tracer was still warming up.
    pub warm_up: bool,
    /// Moments.
    pub moments: u32,
    /// Moves of chunks in the forward pass.
    pub forward: Traffic,
    /// Moves of chunks in the backward pass.
    pub backward: Traffic,
    /// Moves of chunks in ADAM.
    pub adam: Traffic,
    /// Gradients that ADAM reads over the link.
    pub gradient_reads: Traffic,
    /// Parameters that ADAM writes over the link.
    pub write_backs: Traffic,
    /// Transfers of the trace itself.
    pub transfers: Traffic,
    /// Collectives.
    pub collectives: Collectives,
    /// Allocations over the budget.
    pub over_budget: u64,
    /// Most bytes allocated on the GPU at once.
    pub gpu_bytes_peak: u64,
    /// Most of them that were chunks', with cached payloads.
    pub gpu_chunk_bytes_peak: u64,
    /// Most bytes on the host: chunks, staging buffers, and what torch itself keeps there.
    pub host_bytes_peak: u64,
    /// Time, simulated.
    pub times: StepTimes,
}

/// Chunks of one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ListSummary {
    /// Which list.
    pub list: ChunkList,
    /// Chunks of all ranks; dummies are not counted.
    pub chunks: u64,
    /// Those of this rank.
    pub local_chunks: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

/// Figures of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkSummary {
    /// Elements of a chunk.
    pub chunk_elements: u64,
    /// The four lists.
    pub lists: Vec<ListSummary>,
    /// Chunks that fill the last communication group up.
    pub dummy_chunks: u64,
    /// Mean share of a chunk that holds tensors, 0 to 1.
    pub utilization: f64,
    /// Ranks, and the one that was simulated.
    pub ranks: u32,
    /// The rank that was simulated.
    pub rank: u32,
    /// G: the GPU's quota in bytes.
    pub gpu_quota_bytes: u64,
    /// C: this rank's quota of the host in bytes.
    pub host_quota_bytes: u64,
    /// Moments of the warm-up.
    pub moments: u32,
    /// S: bytes on the GPU that are not chunks', by moment of the warm-up.
    pub other_gpu_bytes: Vec<i64>,
    /// Most bytes on the host that are not chunks', as the tracer took them for.
    pub other_host_bytes_max: u64,
    /// The margin in groups; absent before the first backward pass has ended, 0 without hybrid
    /// ADAM.
    pub margin: Option<f64>,
    /// Groups whose ADAM runs on the GPU.
    pub gpu_adam_groups: u64,
    /// Peak of the host while the model is built, in bytes: its parameters in fp32 and the chunks.
    pub construction_host_bytes_peak: u64,
    /// Bytes of torch's own on the host: parameters used there, their gradients, and ADAM's state.
    pub torch_host_bytes: u64,
    /// Bytes that moves to the GPU left in the host's count.
    pub phantom_host_bytes: u64,
    /// Bytes that cached payloads and leaks still hold of each count at the end: chunk bytes on the
    /// GPU.
    pub gpu_chunk_bytes_final: u64,
    /// The same on the host.
    pub host_chunk_bytes_final: u64,
    /// Moves of chunks while the model was built: what the host's quota had no room for.
    pub construction: Traffic,
    /// Time before the first step, simulated.
    pub construction_times: StepTimes,
    /// Every step.
    pub steps: Vec<StepSummary>,
    /// Sum of the moves of chunks in every stage and step, without ADAM's copies.
    pub moves: Traffic,
    /// Sum of ADAM's copies.
    pub adam_copies: Traffic,
    /// Sum of the trace's own transfers.
    pub transfers: Traffic,
    /// Largest of the steps' peaks.
    pub gpu_bytes_peak: u64,
    /// Largest of the steps' peaks.
    pub gpu_chunk_bytes_peak: u64,
    /// Largest of the steps' peaks.
    pub host_bytes_peak: u64,
    /// Requests that the GPU's allocator saw.
    pub gpu_mallocs: u64,
    /// Payloads and buffers that were really allocated.
    pub payload_allocations: u64,
    /// Those that the cache had.
    pub cache_hits: u64,
    /// Requests that the GPU refused for good.
    pub refusals: u64,
    /// The first of them.
    pub first_refused: Option<RefusedRequest>,
    /// Why training stopped before the trace ended.
    pub hard_stop: Option<HardStop>,
}

impl Device {
    fn word(self) -> &'static str {
        match self {
            Device::Host => "host",
            Device::Gpu => "GPU",
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}
