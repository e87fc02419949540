//! What keeps a trace from being run through the manager.

use super::layout::LayoutError;
use crate::units::Bytes;

/// A trace cannot be run through the manager.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChunkError {
    /// The trace does not say which parameters there are.
    #[error(
        "chunk needs the model: which modules have which parameters. This trace does not say; `fraglab \
         gen` writes it, and so does a recording made with the module hooks of `fraglab python`"
    )]
    NoModel,
    /// No module of the model is ever entered.
    #[error(
        "chunk needs to know when a module starts and ends, and this trace enters none of its model: \
         `fraglab gen` writes that, and so does a recording made with the module hooks of `fraglab python`"
    )]
    NoModules,
    /// No parameter is ever accessed.
    #[error(
        "chunk needs access events of parameters, and this trace has none: `fraglab gen` writes them, \
         and so does a recording made with the module hooks of `fraglab python`"
    )]
    NoAccesses,
    /// Nobody said how large the GPU is.
    #[error("chunk needs the size of the GPU, and the trace does not say it: give chunk+gpu=80GiB")]
    NoGpuSize,
    /// The chunk size is still to be searched for.
    #[error("chunk_size=auto must be settled before a run: expected a number of elements, as 64Mi")]
    ChunkSizeOpen,
    /// A unit fits no chunk.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Numbers of ranks that cannot be.
    #[error("{local_ranks} of {ranks} ranks on a host: expected 1 <= local ranks <= ranks <= 8192")]
    Ranks {
        /// Ranks.
        ranks: u32,
        /// Those on a host.
        local_ranks: u32,
    },
    /// No such rank.
    #[error("rank={rank}: the model runs on {ranks} ranks, counted from 0")]
    Rank {
        /// The rank asked for.
        rank: u32,
        /// Ranks.
        ranks: u32,
    },
    /// Asynchronous moves are for one GPU (spec patrickstar 5.11).
    #[error("with_async_move=true works on one GPU only, and the model runs on {ranks} ranks")]
    AsyncMove {
        /// Ranks.
        ranks: u32,
    },
    /// The chunks of the built model fit neither the host's nor the GPU's quota.
    #[error(
        "the model's chunks of {} fit neither the host's quota of {} nor, with it, the GPU's of {}: more \
         host memory (chunk+host=...), or a chunk size that wastes less",
        Bytes(*.needed_bytes), Bytes(*.host_quota_bytes), Bytes(*.gpu_quota_bytes)
    )]
    HostTooSmall {
        /// Bytes of this rank's chunks when the model is built.
        needed_bytes: u64,
        /// This rank's quota of the host.
        host_quota_bytes: u64,
        /// The GPU's quota.
        gpu_quota_bytes: u64,
    },
    /// A step with more than one forward and backward pass.
    #[error(
        "phase {phase}: chunk runs one forward and one backward pass in a step, in this order, because \
         gradients take their parameters' place; gradient accumulation and pipelines are not for it"
    )]
    Passes {
        /// N of `stepN`.
        step: u32,
        /// The phase.
        phase: String,
    },
    /// A module runs where no pass does.
    #[error(
        "module {module} is entered outside of a {} pass: expected a mark stepN.{} before it",
        word(*.backward), word(*.backward)
    )]
    OutsidePass {
        /// The module's name in the trace.
        module: String,
        /// Whether it is its backward pass.
        backward: bool,
    },
    /// A step has more moments than the warm-up had.
    #[error(
        "step {step} enters modules more often than the warm-up, which had {known} moments: chunk \
         expects every step to do the same"
    )]
    LongStep {
        /// N of `stepN`.
        step: u32,
        /// Moments of the warm-up.
        known: u32,
    },
}

fn word(backward: bool) -> &'static str {
    if backward { "backward" } else { "forward" }
}
