//! What a job holds beside model data, estimated without generating its trace.
//!
//! The one design decision: this is the standard count of what 16-bit training with plain attention
//! and dropout saves (spec patrickstar 5), for quick questions such as which chunk size fits. A
//! generated trace says more.
//!
//! ```text
//!   forward ─> │ L × kept │ logits │          kept: all that a layer saves, or its input alone
//!   backward   │ L × kept │ layer  │ gradient │
//! ```

use super::{ActivationOffload, Dtype, Family, Head, Job, Recompute};
use crate::trace::ModelUnit;

/// Memory of one rank beside model data in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationEstimate {
    /// Highest on the GPU: saved activations, a layer at work, a module's temporary gradient.
    pub gpu_bytes: u64,
    /// On the host: offloaded activations, and tables that stay there with gradient and optimizer
    /// state (16 bytes an element, spec patrickstar 5.3).
    pub host_bytes: u64,
}

/// Bytes of units that stay on the host: fp32 parameters, gradients and ADAM's two states.
const HOST_UNIT_BYTES: u64 = 16;

/// What this job holds beside model data; `units` are its own. Nothing for what the count is not
/// made for: other families than BERT, GPT and OPT, and pipelines, which hold several batches.
pub fn activation_estimate(job: &Job, units: &[ModelUnit]) -> Option<ActivationEstimate> {
    let known = matches!(job.shape.family, Family::Bert | Family::Gpt | Family::Opt);
    if !known || job.parallel.pipeline > 1 {
        return None;
    }
    let sizes = Sizes::of(job);
    let (kept, at_work) = sizes.kept(job);
    let offloaded = match job.strategy.activation_offload {
        ActivationOffload::None => 0,
        ActivationOffload::Saved | ActivationOffload::Checkpoints => kept,
    };
    let on_gpu = kept - offloaded;
    let tables = units.iter().filter(|unit| unit.host).map(ModelUnit::elements);
    let tables = tables.fold(0, u64::saturating_add);
    let forward = on_gpu.saturating_add(sizes.logits(job));
    let gradient = largest_gradient(job, units);
    let backward = on_gpu.saturating_add(at_work).saturating_add(gradient);
    Some(ActivationEstimate {
        gpu_bytes: forward.max(backward).max(leaf_gradients(units)),
        host_bytes: offloaded.saturating_add(tables.saturating_mul(HOST_UNIT_BYTES)),
    })
}

/// Bytes of what one layer holds.
struct Sizes {
    /// A layer's input.
    input: u64,
    /// All that a layer saves, but for the next.
    linear: u64,
    /// Scores, softmax and dropout of its attention.
    scores: u64,
    /// What tiling adds while a layer is at work.
    tiles: u64,
}

impl Sizes {
    /// Spec patrickstar 5: 34·B·S·h + 5·a·S²·B bytes a layer, of which tensor parallelism divides
    /// all but 10·B·S·h.
    fn of(job: &Job) -> Sizes {
        let (shape, train) = (&job.shape, &job.train);
        let tensor = job.parallel.tensor.max(1);
        let tokens = train.batch.saturating_mul(train.sequence);
        let hidden = tokens.saturating_mul(shape.hidden);
        let ffn = tokens.saturating_mul(shape.ffn);
        let divided = hidden.saturating_mul(8).saturating_add(ffn.saturating_mul(4)) / tensor;
        let scores = tokens.saturating_mul(train.sequence).saturating_mul(shape.heads);
        let tiled = job.strategy.tiled_linear && shape.family == Family::Bert;
        Sizes {
            input: hidden.saturating_mul(2),
            linear: hidden.saturating_mul(10).saturating_add(divided),
            scores: scores.saturating_mul(5) / tensor,
            tiles: if tiled { hidden.saturating_mul(16) } else { 0 },
        }
    }

    /// Bytes that stay from forward to backward, and bytes of a layer at work in backward.
    fn kept(&self, job: &Job) -> (u64, u64) {
        let layers = job.shape.layers;
        let layer = self.linear.saturating_add(self.scores);
        let (kept, again) = match job.strategy.recompute {
            Recompute::None => (layers.saturating_mul(layer), 0),
            Recompute::Every(step) => {
                let recomputed = layers.div_ceil(step.max(1));
                let inputs = recomputed.saturating_mul(self.input);
                let whole = (layers - recomputed).saturating_mul(layer);
                (inputs.saturating_add(whole), layer)
            }
            Recompute::Selective => (layers.saturating_mul(self.linear), self.scores),
        };
        // What comes back from the host for one layer is there beside what it computes.
        let back = match (job.strategy.activation_offload, job.strategy.recompute) {
            (ActivationOffload::None, _) => 0,
            (_, Recompute::None) => layer,
            (_, Recompute::Every(_)) => self.input,
            (_, Recompute::Selective) => self.linear,
        };
        (kept, again.saturating_add(back).saturating_add(self.tiles))
    }

    /// Logits over the vocabulary in 16 bits, their fp32 copy and its gradient.
    fn logits(&self, job: &Job) -> u64 {
        if job.shape.head != Head::Lm {
            return 0;
        }
        let vocabulary = job.shape.vocabulary.div_ceil(job.parallel.tensor.max(1));
        let tokens = job.train.batch.saturating_mul(job.train.sequence);
        tokens.saturating_mul(vocabulary).saturating_mul(2 + 4 + 4)
    }
}

/// The temporary gradient of the largest module that gets one in backward, and the fp32 copy that
/// the overflow check of fp16 training makes of it (spec patrickstar 2.2).
fn largest_gradient(job: &Job, units: &[ModelUnit]) -> u64 {
    let bytes = if job.train.dtype == Dtype::Fp16 { 2 + 4 } else { 2 };
    let inner = units.iter().filter(|unit| !unit.host && !unit.leaf);
    inner.map(ModelUnit::elements).max().unwrap_or(0).saturating_mul(bytes)
}

/// Gradients of embeddings, which stay until the optimizer runs (spec patrickstar 1.3).
fn leaf_gradients(units: &[ModelUnit]) -> u64 {
    let leaves = units.iter().filter(|unit| !unit.host && unit.leaf).map(ModelUnit::elements);
    leaves.fold(0, u64::saturating_add).saturating_mul(2)
}
