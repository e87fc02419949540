//! Whether the keys of a job go together, and whether the job can be written down.

use super::document::Document;
use super::{FAMILIES, JobError, JobFault, has_rotary, word_of};
use crate::trace::{ELEMENTS_MAX, Limits, OverLimit};
use crate::units::grouped;
use crate::workload::{
    ActivationOffload, Dtype, Family, Job, LoraTarget, Optimizer, OptimizerOffload, Recompute,
};

/// Memory that an event takes while a trace is generated, with blocks, tables and the graph that
/// makes them.
const EVENT_BYTES: u128 = 500;

/// Most bytes that the activations of a job may have, so that no sum of a trace overflows.
const ACTIVATION_BYTES_MAX: u128 = 1 << 58;

/// Checks everything.
pub(super) fn check(document: &Document<'_>, job: &Job, limits: &Limits) -> Result<(), JobError> {
    check_heads(document, job)?;
    check_family(document, job)?;
    check_positions(document, job)?;
    check_training(document, job)?;
    check_offload(document, job)?;
    check_lora(document, job)?;
    check_tensor(document, job)?;
    check_pipeline(document, job)?;
    check_zero(document, job)?;
    check_size(document, job, limits)
}

fn check_heads(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let shape = &job.shape;
    let (hidden, heads, kv_heads) = (shape.hidden, shape.heads, shape.kv_heads);
    if !hidden.is_multiple_of(heads) {
        let message = format!(
            "heads = {heads} do not divide hidden = {hidden}: expected a divisor, as {}",
            nearest_divisor(hidden, heads)
        );
        return Err(document.conflict(&["model.heads", "model.hidden"], message));
    }
    if !heads.is_multiple_of(kv_heads) {
        let message = format!(
            "kv_heads = {kv_heads} do not divide heads = {heads}: expected a divisor, as {}",
            nearest_divisor(heads, kv_heads)
        );
        return Err(document.conflict(&["model.kv_heads", "model.heads"], message));
    }
    Ok(())
}

/// The largest divisor of `number` that is at most `wanted`.
fn nearest_divisor(number: u64, wanted: u64) -> u64 {
    (1..=wanted.min(number)).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

fn check_family(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let shape = &job.shape;
    let family = word_of(&FAMILIES, shape.family);
    if shape.family != Family::Moe {
        for key in ["model.experts", "model.top_k", "moe.imbalance"] {
            if document.has(key) {
                let message = format!(
                    "{key} is for type moe, and this model is of type {family}: leave it away"
                );
                return Err(document.conflict(&[key], message));
            }
        }
    } else if shape.top_k > shape.experts {
        let message =
            format!("top_k = {} is more than there are experts, {}", shape.top_k, shape.experts);
        return Err(document.conflict(&["model.top_k", "model.experts"], message));
    }
    if job.strategy.tiled_linear && shape.family != Family::Bert {
        let message = format!(
            "tiled linears are for type bert only, as in PatrickStar, and this model is of type \
             {family}"
        );
        let keys = ["strategy.tiled_linear", "options.with_tiling_linear"];
        return Err(document.conflict(&keys, message));
    }
    if job.strategy.tiled_linear && !shape.ffn.is_multiple_of(4) {
        let message =
            format!("tiled linears cut ffn = {} into four: expected a multiple", shape.ffn);
        return Err(document.conflict(&["model.ffn", "strategy.tiled_linear"], message));
    }
    if job.strategy.cpu_embedding && shape.tied_head {
        let message = "the embedding is the head's weight too (tied_head), which the GPU needs: it \
                       cannot stay on the host; say tied_head = false or head = \"classifier\"";
        let keys = ["strategy.cpu_embedding", "options.use_cpu_embedding"];
        return Err(document.conflict(&keys, message.to_owned()));
    }
    Ok(())
}

fn check_positions(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let positions = job.shape.positions;
    if has_rotary(job.shape.family) {
        if positions == 0 {
            return check_lengths(document, job);
        }
        let message = "positions are rotary in this family and have no table: leave positions away";
        return Err(document.conflict(&["model.positions"], message.to_owned()));
    }
    let longest = job.lengths.as_ref().map_or(0, |lengths| lengths.max).max(job.train.sequence);
    if longest > positions {
        let message = format!(
            "sequences of {longest} tokens are longer than the table of {positions} positions: \
             lower them, or say positions = {longest}"
        );
        let keys = ["lengths.max", "train.sequence", "model.positions"];
        return Err(document.conflict(&keys, message));
    }
    check_lengths(document, job)
}

fn check_lengths(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let Some(lengths) = &job.lengths else { return Ok(()) };
    if lengths.min > lengths.max {
        let message = format!(
            "the shortest sequence, min = {}, is longer than the longest, max = {}",
            lengths.min, lengths.max
        );
        return Err(document.conflict(&["lengths.min", "lengths.max"], message));
    }
    if lengths.tokens < lengths.max {
        let message = format!(
            "tokens = {} of a batch do not hold one sequence of max = {}",
            lengths.tokens, lengths.max
        );
        return Err(document.conflict(&["lengths.tokens", "lengths.max"], message));
    }
    Ok(())
}

fn check_training(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let train = &job.train;
    if train.autocast.is_some() && train.dtype != Dtype::Fp32 {
        let message =
            "autocast casts weights of 32 bits: say dtype = \"fp32\", or leave autocast away";
        return Err(document.conflict(&["train.autocast"], message.to_owned()));
    }
    if train.clip && job.strategy.optimizer_offload == OptimizerOffload::Gradients {
        let message = "gradients go to the host as they are made, and none is left to clip: say \
                       clip = false, or optimizer_offload = \"state\"";
        return Err(document.conflict(&["train.clip"], message.to_owned()));
    }
    let offloaded = job.strategy.optimizer_offload != OptimizerOffload::None;
    if offloaded && train.optimizer == Optimizer::None {
        let message = "there is no optimizer to keep on the host (train.optimizer = \"none\")";
        return Err(document.conflict(&["strategy.optimizer_offload"], message.to_owned()));
    }
    Ok(())
}

fn check_offload(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let strategy = &job.strategy;
    let recomputes_layers = matches!(strategy.recompute, Recompute::Every(_));
    if strategy.activation_offload == ActivationOffload::Checkpoints && !recomputes_layers {
        let message = "only recomputed layers have checkpoints to keep on the host: say \
                       recompute = \"full\" (use_ckp), or activation_offload = \"saved\" for all \
                       that is saved";
        let keys = ["strategy.activation_offload", "options.with_activation_offload"];
        return Err(document.conflict(&keys, message.to_owned()));
    }
    if let Recompute::Every(every) = strategy.recompute
        && every > job.shape.layers
    {
        let message = format!(
            "every {every}th layer of {} is the first only: expected at most as many as there are",
            job.shape.layers
        );
        return Err(document.conflict(&["strategy.recompute"], message));
    }
    Ok(())
}

fn check_lora(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let Some(lora) = &job.strategy.lora else { return Ok(()) };
    let has = |target| lora.targets.contains(&target);
    let family = job.shape.family;
    let told = word_of(&FAMILIES, family);
    let keys = ["strategy.lora.targets", "strategy.lora"];
    if has(LoraTarget::Gate) && !has_rotary(family) {
        let message = format!("a model of type {told} has no gate to adapt: leave it away");
        return Err(document.conflict(&keys, message));
    }
    let in_experts = [LoraTarget::Gate, LoraTarget::Up, LoraTarget::Down].into_iter().any(has);
    if family == Family::Moe && in_experts {
        let message = "experts are not adapted: expected targets among q, k, v, o for type moe";
        return Err(document.conflict(&keys, message.to_owned()));
    }
    Ok(())
}

fn check_tensor(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let (shape, ranks) = (&job.shape, job.parallel.tensor);
    let divided = [
        ("heads", shape.heads),
        ("kv_heads", shape.kv_heads),
        ("ffn", shape.ffn),
        ("vocabulary", shape.vocabulary),
    ];
    for (name, count) in divided {
        if !count.is_multiple_of(ranks) {
            let message = format!(
                "tensor = {ranks} ranks do not divide {name} = {count}: expected a divisor, \
                 or {name} = {}",
                count.next_multiple_of(ranks)
            );
            return Err(document.conflict(&["parallel.tensor"], message));
        }
    }
    Ok(())
}

fn check_pipeline(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let (parallel, layers) = (&job.parallel, job.shape.layers);
    let (stages, chunks) = (parallel.pipeline, parallel.virtual_stages);
    if chunks > 1 && stages == 1 {
        let message = format!(
            "virtual_stages = {chunks} need a pipeline of several stages: say pipeline, or \
             leave it away"
        );
        return Err(document.conflict(&["parallel.virtual_stages"], message));
    }
    if layers < stages.saturating_mul(chunks) {
        let message = format!(
            "layers = {layers} are fewer than pipeline x virtual_stages, {stages} x \
             {chunks}: lower these"
        );
        let keys = ["parallel.virtual_stages", "parallel.pipeline", "model.layers"];
        return Err(document.conflict(&keys, message));
    }
    if parallel.stage >= stages {
        let message = format!(
            "stage = {} does not exist: stages are counted from 0, and pipeline = {stages}",
            parallel.stage
        );
        return Err(document.conflict(&["parallel.stage"], message));
    }
    let micro_batches = job.train.micro_batches;
    if chunks > 1 && !micro_batches.is_multiple_of(stages) {
        let message = format!(
            "micro_batches = {micro_batches} is no multiple of pipeline = {stages}, which the \
             interleaved schedule (virtual_stages) needs: expected {}",
            micro_batches.next_multiple_of(stages)
        );
        return Err(document.conflict(&["train.micro_batches", "parallel.virtual_stages"], message));
    }
    Ok(())
}

fn check_zero(document: &Document<'_>, job: &Job) -> Result<(), JobError> {
    let zero = job.strategy.zero;
    if zero == 0 {
        return Ok(());
    }
    if job.parallel.data == 1 {
        let message = format!(
            "ZeRO shares model data out among data-parallel ranks, and there is 1: say data = 8 in \
             [parallel], or zero = 0 in place of {zero}"
        );
        return Err(document.conflict(&["strategy.zero"], message));
    }
    if job.parallel.pipeline > 1 {
        let message = "ZeRO with a pipeline is not modelled: say pipeline = 1 or zero = 0";
        return Err(document.conflict(&["strategy.zero"], message.to_owned()));
    }
    Ok(())
}

fn check_size(document: &Document<'_>, job: &Job, limits: &Limits) -> Result<(), JobError> {
    let elements = elements_bound(job);
    if elements >= u128::from(ELEMENTS_MAX) {
        let message =
            "more than 2^56 parameters: lower model.layers, hidden, ffn, experts or vocabulary";
        let keys = ["model.hidden", "model.layers", "model.preset"];
        return Err(document.fault(&keys, JobFault::TooLarge(message.to_owned())));
    }
    if activation_bytes_bound(job) >= ACTIVATION_BYTES_MAX {
        let message = "the activations of a step are more than 2^58 bytes: lower train.batch or \
                       train.sequence (lengths.max, lengths.tokens)";
        let keys = ["train.batch", "lengths.tokens", "train.sequence", "lengths.max", "train"];
        return Err(document.fault(&keys, JobFault::TooLarge(message.to_owned())));
    }
    if let Some(why) = over_limits(events_estimate(job), limits) {
        let message =
            what_makes_events(job).map_or(why.clone(), |keys| format!("{why}; or lower {keys}"));
        let keys = ["train.steps", "train.micro_batches", "model.layers", "model.experts"];
        return Err(document.fault(&keys, JobFault::TooLarge(message)));
    }
    Ok(())
}

/// An estimate to three digits.
fn rounded(events: u64) -> u64 {
    let unit = 10u64.pow(events.checked_ilog10().unwrap_or(0).saturating_sub(2));
    events / unit * unit
}

/// The keys of a job that its number of events grows with and that can be lowered, with their values.
fn what_makes_events(job: &Job) -> Option<String> {
    let keys = [
        ("train.steps", job.train.steps),
        ("train.micro_batches", job.train.micro_batches),
        ("model.layers", job.shape.layers),
        ("model.experts", job.shape.experts),
    ];
    let keys = keys.iter().filter(|(_, value)| *value > 1);
    let keys: Vec<String> = keys.map(|(key, value)| format!("{key} = {value}")).collect();
    let (last, rest) = keys.split_last()?;
    Some(if rest.is_empty() { last.clone() } else { format!("{} or {last}", rest.join(", ")) })
}

/// Why a trace of about so many events is not made, if it is not.
fn over_limits(events: u128, limits: &Limits) -> Option<String> {
    let events = u64::try_from(events).unwrap_or(u64::MAX);
    let about = format!("the trace would have about {} events", grouped(rounded(events)));
    if let Err(over) = limits.check_events(events) {
        return Some(format!("{about}, {over}"));
    }
    let bytes_max = limits.memory_bytes_max?;
    let is_over = u128::from(events) * EVENT_BYTES > u128::from(bytes_max);
    is_over.then(|| format!("{about} and {}", OverLimit::Memory { bytes_max }))
}

/// No less than the parameters of the whole model, adapters included. All factors are bounded by
/// the reader, so that 128 bits hold every product.
fn elements_bound(job: &Job) -> u128 {
    let shape = &job.shape;
    let [layers, hidden, ffn] = [shape.layers, shape.hidden, shape.ffn].map(u128::from);
    let experts = u128::from(shape.experts.max(1));
    let rank = job.strategy.lora.as_ref().map_or(0, |lora| u128::from(lora.rank));
    let attention = 4 * hidden * hidden;
    let feed_forward = experts * (3 * hidden * ffn + 2 * ffn + hidden);
    let adapters = rank * (10 * hidden + 4 * ffn);
    let tables = 2 * u128::from(shape.vocabulary) + u128::from(shape.positions) + 16;
    let layer = attention + feed_forward + adapters + 16 * hidden;
    layers * layer + tables * hidden + hidden * hidden
}

/// No less than the bytes of all activations that are live at once.
fn activation_bytes_bound(job: &Job) -> u128 {
    let (shape, train) = (&job.shape, &job.train);
    let (tokens, sequence) = match &job.lengths {
        Some(lengths) => (lengths.tokens, lengths.max),
        None => (train.batch.saturating_mul(train.sequence), train.sequence),
    };
    let [tokens, sequence] = [tokens, sequence].map(u128::from);
    let [hidden, ffn, heads] = [shape.hidden, shape.ffn, shape.heads].map(u128::from);
    let widths = 64 * hidden + 16 * ffn * u128::from(shape.top_k.max(1));
    let layer = tokens.saturating_mul(4 * widths + 16 * heads * sequence);
    let in_flight = u128::from(job.parallel.pipeline) * u128::from(job.parallel.virtual_stages);
    let layers = layer.saturating_mul(u128::from(shape.layers)).saturating_mul(in_flight);
    layers.saturating_add(tokens * u128::from(shape.vocabulary) * 16)
}

/// About how many events the trace will have: as many as were counted of a layer with adapters and
/// recomputation, 682, which is more than most layers have.
fn events_estimate(job: &Job) -> u128 {
    let shape = &job.shape;
    let layer = 700 + 150 * u128::from(shape.experts);
    let layers = u128::from(shape.layers.div_ceil(job.parallel.pipeline)) + 1;
    let passes = u128::from(job.train.steps) * u128::from(job.train.micro_batches);
    passes * layers * layer
}
