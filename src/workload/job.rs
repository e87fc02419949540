//! A job: a model, how it is trained, on what. The TOML that people write becomes this, checked.
//!
//! The one design decision: a [`Job`] holds no optional numbers. Defaults, names of shapes and the
//! options by their PatrickStar names are resolved when the TOML is read (`read`), so that the
//! generators below never ask what was meant.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Which family a model belongs to: which modules it has and which operations they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// BERT: post-norm encoder, biases, GELU, three embeddings.
    Bert,
    /// GPT-2: pre-norm decoder, biases, GELU, learned positions.
    Gpt,
    /// OPT: pre-norm decoder, biases, ReLU, learned positions.
    Opt,
    /// Llama: RMSNorm, SwiGLU, rotary positions, no biases.
    Llama,
    /// Mixtral: Llama with experts in place of the feed-forward part.
    Moe,
}

/// What stands on top of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Head {
    /// Logits over the vocabulary and their loss.
    Lm,
    /// A classifier of two classes, as in PatrickStar's benchmarks (spec patrickstar 1.4).
    Classifier,
}

/// Type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    Fp16,
    /// IEEE single precision.
    Fp32,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
        }
    }
}

/// Sizes of a model. Heads divide `hidden`, `kv_heads` divide `heads`; nothing is 0 but `experts`
/// and `top_k` of models without experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Which modules and operations.
    pub family: Family,
    /// Layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Width of the feed-forward part; of one expert.
    pub ffn: u64,
    /// Entries of the token embedding.
    pub vocabulary: u64,
    /// Entries of the learned position embedding; 0 for rotary positions.
    pub positions: u64,
    /// Experts a layer; 0 without.
    pub experts: u64,
    /// Experts that a token goes to; 0 without.
    pub top_k: u64,
    /// What stands on top.
    pub head: Head,
    /// The head's weight is the token embedding's.
    pub tied_head: bool,
    /// Dropout probability; 0 for none.
    pub dropout: f64,
}

impl Shape {
    /// Elements of one head.
    pub fn head_elements(&self) -> u64 {
        self.hidden / self.heads
    }

    /// Width of keys, and of values.
    pub fn kv_hidden(&self) -> u64 {
        self.head_elements() * self.kv_heads
    }
}

/// How weights are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// `torch.optim.AdamW` with its defaults: foreach.
    Adamw,
    /// The same, fused: no temporaries.
    AdamwFused,
    /// Plain SGD without momentum.
    Sgd,
    /// None: gradients are made and dropped.
    None,
}

/// How a model is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Train {
    /// Samples of a micro-batch on one rank.
    pub batch: u64,
    /// Tokens of a sample.
    pub sequence: u64,
    /// Steps to generate.
    pub steps: u64,
    /// Type of the weights.
    pub dtype: Dtype,
    /// Type that matrix products are cast to, as `torch.autocast` does; nothing for none.
    pub autocast: Option<Dtype>,
    /// How weights are updated.
    pub optimizer: Optimizer,
    /// Gradients are clipped by their norm.
    pub clip: bool,
    /// Micro-batches whose gradients are summed before an update. With a pipeline: its
    /// micro-batches.
    pub micro_batches: u64,
    /// Seed of everything that is drawn.
    pub seed: u64,
}

/// Which layers recompute their activations in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// None.
    None,
    /// Every k-th layer, the first included; 1 for all.
    Every(u64),
    /// The attention of every layer only: its scores, softmax and context.
    Selective,
}

/// What goes to the host between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationOffload {
    /// Nothing.
    None,
    /// Whatever autograd saves (`save_on_cpu`).
    Saved,
    /// The inputs of recomputed layers.
    Checkpoints,
}

/// What the optimizer keeps and does on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerOffload {
    /// Nothing.
    None,
    /// State and update: gradients go to the host in the optimizer's phase, weights come back.
    State,
    /// As `state`, but each gradient is copied to the host and freed as it is made.
    Gradients,
}

/// A linear layer that LoRA adapts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoraTarget {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The attention's output.
    O,
    /// Gate of SwiGLU.
    Gate,
    /// Into the feed-forward part: Llama's `up_proj`, OPT's `fc1`, GPT-2's `c_fc`.
    Up,
    /// Out of it: `down_proj`, `fc2`, `c_proj`.
    Down,
}

/// Low-rank adapters; the base is frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rank of the adapters.
    pub rank: u64,
    /// What they adapt, ascending, each once.
    pub targets: Vec<LoraTarget>,
    /// Dropout in front of the adapters; 0 for none.
    pub dropout: f64,
}

/// Strategies, each by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// Activation checkpointing.
    pub recompute: Recompute,
    /// Activations on the host.
    pub activation_offload: ActivationOffload,
    /// Embedding tables stay on the host.
    pub cpu_embedding: bool,
    /// Linears of the feed-forward part in four tiles (spec patrickstar 5.4).
    pub tiled_linear: bool,
    /// Optimizer on the host.
    pub optimizer_offload: OptimizerOffload,
    /// Adapters.
    pub lora: Option<Lora>,
    /// ZeRO stage, 0 to 3; 3 as FSDP2 does it, a layer a group.
    pub zero: u64,
    /// With stage 3 the whole model is on the GPU before it is shared out; else layer by layer.
    pub zero_loads_whole: bool,
}

/// How the work is split over GPUs. The trace is that of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// Data-parallel ranks.
    pub data: u64,
    /// Tensor-parallel ranks: they divide heads, feed-forward part and vocabulary.
    pub tensor: u64,
    /// Pipeline stages.
    pub pipeline: u64,
    /// Chunks of layers that a stage holds: 1 for 1F1B, more for the interleaved schedule.
    pub virtual_stages: u64,
    /// The pipeline stage whose trace it is, from 0.
    pub stage: u64,
}

/// Lengths that vary from step to step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Shortest.
    pub min: u64,
    /// Longest.
    pub max: u64,
    /// Tokens of a batch: as many samples as fit, at least one.
    pub tokens: u64,
}

/// What the job runs on.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// Name of the GPU, for the trace's header.
    pub gpu: String,
    /// Its memory in bytes.
    pub gpu_bytes: u64,
    /// Memory of a host in bytes.
    pub host_bytes: u64,
    /// GPUs that share a host.
    pub gpus_per_host: u64,
    /// Floating-point operations a second that matrix products reach.
    pub flops: f64,
    /// Bytes a second that element-wise operations reach.
    pub memory_bytes_per_s: f64,
    /// Bytes a second between host and GPU, pinned.
    pub link_bytes_per_s: f64,
    /// Bytes a second between GPUs, as a collective of two sees it.
    pub peer_bytes_per_s: f64,
}

/// A whole job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its name; the trace's.
    pub name: String,
    /// The model.
    pub shape: Shape,
    /// How it is trained.
    pub train: Train,
    /// Strategies.
    pub strategy: Strategy,
    /// How it is split.
    pub parallel: Parallel,
    /// Lengths that vary; nothing if every batch is `train.batch` × `train.sequence`.
    pub lengths: Option<Lengths>,
    /// How unevenly tokens go to experts: 0 for alike, 1 for shares drawn from an exponential
    /// distribution, more for steeper ones.
    pub expert_imbalance: f64,
    /// What it runs on.
    pub hardware: Hardware,
    /// Options of allocators that manage model data, by their own names (`[options]`).
    pub options: BTreeMap<String, String>,
}
