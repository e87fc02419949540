//! The keys of a job description, and the words that some of them take.

use super::JobFault;
use super::document::shortened;
use crate::workload::options::{OPTIONS, option_named};
use crate::workload::{
    ActivationOffload, Dtype, Family, Head, LoraTarget, Optimizer, OptimizerOffload, Recompute,
};

/// A key of a job description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobKey {
    /// Its table and name: `train.batch`.
    pub path: &'static str,
    /// What it is if nothing is said.
    pub default: &'static str,
    /// One line about it.
    pub summary: &'static str,
}

const fn key(path: &'static str, default: &'static str, summary: &'static str) -> JobKey {
    JobKey { path, default, summary }
}

/// Every key but those of `[options]`, which are [`OPTIONS`].
///
/// `hidden / 64` and the like are of the model's own figures. Defaults of the table `[model]` are
/// those of transformers where it has them; where a preset is named, its figures come first.
pub const JOB_KEYS: [JobKey; 52] = [
    key("name", "the preset, else the type", "name of the trace"),
    key("model.preset", "none", "a shape by name; the keys below change it"),
    key("model.type", "the preset's", "bert, gpt, opt, llama, moe"),
    key("model.layers", "required", "layers"),
    key("model.hidden", "required", "width of the residual stream"),
    key(
        "model.heads",
        "hidden / 64; llama, moe: hidden / 128",
        "attention heads; they divide hidden",
    ),
    key("model.kv_heads", "heads", "heads of keys and values; they divide heads"),
    key(
        "model.ffn",
        "4 hidden; llama: 8/3 hidden, up to a multiple of 256; moe: 7/2 hidden",
        "width of the feed-forward part, of one expert",
    ),
    key("model.vocabulary", "bert 30522, gpt 50257, opt 50272, llama and moe 32000", "tokens"),
    key(
        "model.positions",
        "bert 512, gpt 1024, opt 2048, or the longest sequence; llama, moe: 0, rotary",
        "entries of the position embedding",
    ),
    key("model.experts", "moe: 8", "experts a layer"),
    key("model.top_k", "moe: 2", "experts that a token goes to"),
    key("model.head", "lm", "lm (logits over the vocabulary) or classifier"),
    key(
        "model.tied_head",
        "bert, gpt, opt with lm: true",
        "the head's weight is the token embedding's",
    ),
    key("model.dropout", "bert, gpt: 0.1; others 0", "dropout probability"),
    key("train.batch", "8", "samples of a micro-batch on one rank"),
    key(
        "train.sequence",
        "bert 512, gpt 1024, others 2048, or positions if fewer",
        "tokens of a sample",
    ),
    key("train.steps", "3", "steps to generate"),
    key("train.dtype", "bf16; on v100-32g fp16", "type of the weights: bf16, fp16, fp32"),
    key("train.autocast", "none", "type of matrix products, as torch.autocast: bf16, fp16, none"),
    key("train.optimizer", "adamw", "adamw (foreach), adamw_fused, sgd, none"),
    key(
        "train.clip",
        "true; with a pipeline or gradients offloaded false",
        "gradients are clipped by their norm",
    ),
    key(
        "train.micro_batches",
        "1; with a pipeline its stages",
        "micro-batches of a step: accumulated, or a pipeline's",
    ),
    key("train.seed", "0", "seed of everything that is drawn"),
    key(
        "strategy.recompute",
        "none",
        "none, full, selective (attention only), or k: every k-th layer",
    ),
    key("strategy.activation_offload", "none", "none, saved (save_on_cpu), checkpoints"),
    key("strategy.cpu_embedding", "false", "embedding tables stay on the host"),
    key("strategy.tiled_linear", "false", "bert: feed-forward linears in four tiles"),
    key(
        "strategy.optimizer_offload",
        "none",
        "none, state (state and update on the host), gradients (and each gradient as it is made)",
    ),
    key("strategy.zero", "0", "ZeRO stage, 0 to 3"),
    key(
        "strategy.zero_loads_whole",
        "false",
        "zero 3: the whole model is on the GPU before it is shared out, not layer by layer",
    ),
    key("strategy.lora", "none", "a table {rank, targets, dropout}, or none"),
    key("strategy.lora.rank", "16", "rank of the adapters"),
    key("strategy.lora.targets", "q, v", "linears that they adapt: q, k, v, o, gate, up, down"),
    key("strategy.lora.dropout", "0", "dropout in front of the adapters"),
    key("parallel.data", "1", "data-parallel ranks"),
    key("parallel.tensor", "1", "tensor-parallel ranks"),
    key("parallel.pipeline", "1", "pipeline stages"),
    key(
        "parallel.virtual_stages",
        "1",
        "chunks of layers that a stage holds; 2 or more interleave",
    ),
    key("parallel.stage", "0", "the stage whose trace it is"),
    key("lengths.min", "1", "shortest sequence, drawn anew each step"),
    key("lengths.max", "train.sequence", "longest"),
    key(
        "lengths.tokens",
        "train.batch x train.sequence",
        "tokens of a batch: as many samples as fit",
    ),
    key(
        "moe.imbalance",
        "0",
        "0: tokens go to experts alike; 1: shares drawn exponentially; more: steeper",
    ),
    key("hardware.gpu", "h200", "h200, h100-80g, a100-80g, a100-40g, v100-32g"),
    key("hardware.memory", "the GPU's", "memory of a GPU, as in \"80GiB\""),
    key("hardware.host_memory", "2 TiB; a100-40g 1 TiB; v100-32g 240 GiB", "memory of a host"),
    key("hardware.gpus_per_host", "8", "GPUs that share a host"),
    key(
        "hardware.flops",
        "half the data sheet's",
        "operations a second that matrix products reach",
    ),
    key(
        "hardware.memory_bandwidth",
        "0.8 of the data sheet's",
        "bytes a second that element-wise operations reach",
    ),
    key(
        "hardware.link_bandwidth",
        "0.8 of the data sheet's",
        "bytes a second, host to GPU, pinned",
    ),
    key("hardware.peer_bandwidth", "0.8 of the data sheet's", "bytes a second between GPUs"),
];

/// Tables that keys stand in.
const TABLES: [&str; 9] = [
    "model",
    "train",
    "strategy",
    "strategy.lora",
    "parallel",
    "lengths",
    "moe",
    "hardware",
    "options",
];

/// A word that a key takes, and what it means.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word<T> {
    pub(crate) text: &'static str,
    pub(crate) value: T,
}

const fn word<T>(text: &'static str, value: T) -> Word<T> {
    Word { text, value }
}

/// Words of `model.type`.
pub(crate) const FAMILIES: [Word<Family>; 5] = [
    word("bert", Family::Bert),
    word("gpt", Family::Gpt),
    word("opt", Family::Opt),
    word("llama", Family::Llama),
    word("moe", Family::Moe),
];

/// Words of `model.head`.
pub(crate) const HEADS: [Word<Head>; 2] =
    [word("lm", Head::Lm), word("classifier", Head::Classifier)];

/// Words of `train.dtype`.
pub(crate) const DTYPES: [Word<Dtype>; 3] =
    [word("bf16", Dtype::Bf16), word("fp16", Dtype::Fp16), word("fp32", Dtype::Fp32)];

/// Words of `train.autocast`.
pub(crate) const AUTOCASTS: [Word<Option<Dtype>>; 3] =
    [word("none", None), word("bf16", Some(Dtype::Bf16)), word("fp16", Some(Dtype::Fp16))];

/// Words of `train.optimizer`.
pub(crate) const OPTIMIZERS: [Word<Optimizer>; 4] = [
    word("adamw", Optimizer::Adamw),
    word("adamw_fused", Optimizer::AdamwFused),
    word("sgd", Optimizer::Sgd),
    word("none", Optimizer::None),
];

/// Words of `strategy.recompute`.
pub(crate) const RECOMPUTES: [Word<Recompute>; 3] = [
    word("none", Recompute::None),
    word("full", Recompute::Every(1)),
    word("selective", Recompute::Selective),
];

/// Words of `strategy.activation_offload`.
pub(crate) const ACTIVATION_OFFLOADS: [Word<ActivationOffload>; 3] = [
    word("none", ActivationOffload::None),
    word("saved", ActivationOffload::Saved),
    word("checkpoints", ActivationOffload::Checkpoints),
];

/// Words of `strategy.optimizer_offload`.
pub(crate) const OPTIMIZER_OFFLOADS: [Word<OptimizerOffload>; 3] = [
    word("none", OptimizerOffload::None),
    word("state", OptimizerOffload::State),
    word("gradients", OptimizerOffload::Gradients),
];

/// Words of `strategy.lora.targets`.
pub(crate) const TARGETS: [Word<LoraTarget>; 7] = [
    word("q", LoraTarget::Q),
    word("k", LoraTarget::K),
    word("v", LoraTarget::V),
    word("o", LoraTarget::O),
    word("gate", LoraTarget::Gate),
    word("up", LoraTarget::Up),
    word("down", LoraTarget::Down),
];

/// The word that means a value.
pub(crate) fn word_of<T: Copy + PartialEq>(words: &[Word<T>], value: T) -> &'static str {
    words.iter().find(|word| word.value == value).map_or("", |word| word.text)
}

/// `bf16, fp16 or fp32`.
pub(super) fn one_of<T>(words: &[Word<T>]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{}\"", word.text)).collect();
    let Some((last, others)) = quoted.split_last() else { return String::new() };
    if others.is_empty() { last.clone() } else { format!("{} or {last}", others.join(", ")) }
}

/// The full name of a key or table of the table `prefix` (empty: the top level), if it is known.
pub(super) fn known_path(prefix: &str, name: &str) -> Option<String> {
    if prefix == "options" {
        return option_named(name).map(|option| format!("options.{}", option.name));
    }
    let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    (is_key(&path) || is_table(&path)).then_some(path)
}

/// Whether a path is a key.
pub(super) fn is_key(path: &str) -> bool {
    match path.strip_prefix("options.") {
        Some(name) => option_named(name).is_some(),
        None => JOB_KEYS.iter().any(|key| key.path == path),
    }
}

/// Whether a path is a table.
pub(super) fn is_table(path: &str) -> bool {
    TABLES.contains(&path)
}

/// Names of the keys and tables that stand directly in a table.
fn names_in(prefix: &str) -> Vec<&'static str> {
    if prefix == "options" {
        return OPTIONS.iter().map(|option| option.name).collect();
    }
    let name_in = |path: &'static str| {
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        (parent == prefix).then_some(name)
    };
    let mut names: Vec<&str> =
        JOB_KEYS.iter().map(|key| key.path).chain(TABLES).filter_map(name_in).collect();
    names.dedup();
    names
}

/// An unknown key or table, with what may have been meant.
pub(super) fn unknown(prefix: &str, name: &str, is_table: bool) -> JobFault {
    let known = names_in(prefix);
    let what = if is_table { "table" } else { "key" };
    let shown = shortened(name);
    let path = if prefix.is_empty() { shown } else { format!("{}.{shown}", shortened(prefix)) };
    let elsewhere = || {
        let mut places = TABLES.iter().filter(|table| names_in(table).contains(&name));
        places.next().map(|table| format!("; did you mean {table}.{name}?"))
    };
    let hint = match meant(name, known.iter().copied()) {
        text if !text.is_empty() => text,
        _ => elsewhere().unwrap_or_else(|| match known.is_empty() {
            true => format!("; the tables are {}", TABLES.join(", ")),
            false => format!("; expected one of {}", known.join(", ")),
        }),
    };
    JobFault::Unknown { what, path, hint }
}

/// `; did you mean NAME?` if a name is near, else nothing.
pub(crate) fn meant<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> String {
    let near = names.map(|name| (distance(text, name), name)).min();
    match near {
        Some((distance, name)) if distance <= 1 + name.len() / 4 => {
            format!("; did you mean {name}?")
        }
        _ => String::new(),
    }
}

/// Letters to change, put in or take out, to make one word of another (Levenshtein). Words that are
/// much longer than any name are far from all.
fn distance(one: &str, other: &str) -> usize {
    if one.len() > 100 {
        return usize::MAX;
    }
    let one: Vec<char> = one.to_lowercase().replace('-', "_").chars().collect();
    let other: Vec<char> = other.replace('-', "_").chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let substituted = corner + usize::from(a != b);
            corner = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(corner + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_told_and_far_ones_are_not() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(meant("btach", ["batch", "steps"].into_iter()), "; did you mean batch?");
        assert_eq!(meant("Adamw", ["adamw", "sgd"].into_iter()), "; did you mean adamw?");
        assert_eq!(meant("zzz", ["batch", "steps"].into_iter()), "");
    }

    #[test]
    fn keys_stand_in_tables_that_exist_and_once() {
        let mut seen = std::collections::BTreeSet::new();
        for key in JOB_KEYS {
            assert!(seen.insert(key.path), "{} twice", key.path);
            if let Some((table, _)) = key.path.rsplit_once('.') {
                assert!(is_table(table), "{table}");
            }
        }
    }
}
