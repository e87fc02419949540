//! A [`Job`] as the TOML that gives it, and descriptions to begin with.
//!
//! The one design decision: the lines are made from [`JOB_KEYS`] and
//! [`OPTIONS`](super::options::OPTIONS), so that a description to begin with shows every key there
//! is, and reading what was written gives the same job.

use std::fmt::Write as _;

use super::gpus::{GPUS, GpuInfo};
use super::options::{OPTIONS, OptionKind};
use super::read::{
    ACTIVATION_OFFLOADS, AUTOCASTS, DTYPES, FAMILIES, HEADS, OPTIMIZER_OFFLOADS, OPTIMIZERS,
    RECOMPUTES, TARGETS, word_of,
};
use super::{Family, JOB_KEYS, Job, JobError, Recompute, read_job};
use crate::units::GIB;

/// Columns that a key and its value get before the comment.
const COMMENT_COLUMN: usize = 36;

/// Keys that everyone decides on: written out in a description to begin with, where all others are
/// comments that show their defaults.
const DECIDED: [&str; 8] = [
    "name",
    "model.type",
    "model.layers",
    "model.hidden",
    "train.batch",
    "train.sequence",
    "train.steps",
    "hardware.gpu",
];

/// The description of a job, with every key that it has.
pub fn write_job(job: &Job) -> String {
    let mut lines = Lines::default();
    for key in JOB_KEYS {
        if let Some(value) = value_of(job, key.path) {
            lines.key(key.path, &value, "", true);
        }
    }
    for (name, value) in &job.options {
        lines.key(&format!("options.{name}"), &option_value(name, value), "", true);
    }
    lines.text
}

/// A description to begin with: the keys that everyone decides on, and all others as comments with
/// their defaults and meaning.
///
/// # Errors
/// Never for a family whose defaults go together; the reader checks them like any others.
pub fn example_job(family: Family) -> Result<String, JobError> {
    let name = word_of(&FAMILIES, family);
    let (layers, hidden) = match family {
        Family::Bert => (24, 1024),
        Family::Moe => (12, 1024),
        Family::Gpt | Family::Opt | Family::Llama => (24, 2048),
    };
    let text = format!("[model]\ntype = \"{name}\"\nlayers = {layers}\nhidden = {hidden}\n");
    let job = read_job(&text, &[])?;
    let mut lines = Lines::default();
    lines.text.push_str(
        "# The description of a job. Lines that are commented out show what holds without them.\n",
    );
    for key in JOB_KEYS {
        let decided = DECIDED.contains(&key.path);
        // Figures that follow from others would be wrong as soon as these are changed.
        let value = value_of(&job, key.path).or_else(|| placeholder(family, key.path));
        if let Some(value) = value {
            // A default that the line shows already needs no second telling.
            let shown = decided || value.trim_matches('"') == key.default;
            let default = if shown { String::new() } else { format!(" [{}]", key.default) };
            let note = format!("{}{default}", key.summary);
            lines.key(key.path, &value, &note, decided);
        }
    }
    for option in OPTIONS {
        let value = option_value(option.name, option.default);
        lines.key(&format!("options.{}", option.name), &value, option.summary, false);
    }
    Ok(lines.text)
}

/// Lines of a description, table by table.
#[derive(Default)]
struct Lines {
    text: String,
    table: String,
}

impl Lines {
    /// Adds a key; one that is not `given` as a comment.
    fn key(&mut self, path: &str, value: &str, note: &str, given: bool) {
        let (table, name) = path.rsplit_once('.').unwrap_or(("", path));
        if table != self.table {
            // A table that nothing is given of must not come into being.
            let hidden = matches!(table, "strategy.lora" | "lengths") && !given;
            let mark = if hidden { "# " } else { "" };
            let _ = write!(self.text, "\n{mark}[{table}]\n");
            table.clone_into(&mut self.table);
        }
        let mark = if given { "" } else { "# " };
        let line = format!("{mark}{name} = {value}");
        let comment = if note.is_empty() { String::new() } else { format!("  # {note}") };
        let width = if note.is_empty() { 0 } else { COMMENT_COLUMN };
        let _ = writeln!(self.text, "{line:width$}{comment}");
    }
}

/// What stands in a comment for a key that the job does not have.
fn placeholder(family: Family, path: &str) -> Option<String> {
    let value = match path {
        "model.preset" => match family {
            Family::Bert => "\"bert-large\"",
            Family::Gpt => "\"gpt2-xl\"",
            Family::Opt => "\"opt-1.3b\"",
            Family::Llama => "\"llama-7b\"",
            Family::Moe => "\"mixtral-8x7b\"",
        },
        "strategy.lora.rank" => "16",
        "strategy.lora.targets" => "[\"q\", \"v\"]",
        "strategy.lora.dropout" => "0.0",
        "lengths.min" => "256",
        "lengths.max" => "2048",
        "lengths.tokens" => "16384",
        _ => return None,
    };
    Some(value.to_owned())
}

/// The value of a key as TOML; nothing if the job does not have it.
fn value_of(job: &Job, path: &str) -> Option<String> {
    let (table, key) = path.rsplit_once('.').unwrap_or(("", path));
    match table {
        "" => Some(quoted(&job.name)),
        "model" => model_value(job, key),
        "train" => train_value(job, key),
        "strategy" => strategy_value(job, key),
        "strategy.lora" => lora_value(job, key),
        "parallel" => parallel_value(job, key),
        "lengths" => lengths_value(job, key),
        "moe" => (job.shape.family == Family::Moe).then(|| float(job.expert_imbalance)),
        _ => hardware_value(job, key),
    }
}

fn model_value(job: &Job, key: &str) -> Option<String> {
    let shape = &job.shape;
    let is_moe = shape.family == Family::Moe;
    let has_table = !matches!(shape.family, Family::Llama | Family::Moe);
    Some(match key {
        "type" => quoted(word_of(&FAMILIES, shape.family)),
        "layers" => shape.layers.to_string(),
        "hidden" => shape.hidden.to_string(),
        "heads" => shape.heads.to_string(),
        "kv_heads" => shape.kv_heads.to_string(),
        "ffn" => shape.ffn.to_string(),
        "vocabulary" => shape.vocabulary.to_string(),
        "positions" if has_table => shape.positions.to_string(),
        "experts" if is_moe => shape.experts.to_string(),
        "top_k" if is_moe => shape.top_k.to_string(),
        "head" => quoted(word_of(&HEADS, shape.head)),
        "tied_head" => shape.tied_head.to_string(),
        "dropout" => float(shape.dropout),
        _ => return None,
    })
}

fn train_value(job: &Job, key: &str) -> Option<String> {
    let train = &job.train;
    Some(match key {
        "batch" => train.batch.to_string(),
        "sequence" => train.sequence.to_string(),
        "steps" => train.steps.to_string(),
        "dtype" => quoted(word_of(&DTYPES, train.dtype)),
        "autocast" => quoted(word_of(&AUTOCASTS, train.autocast)),
        "optimizer" => quoted(word_of(&OPTIMIZERS, train.optimizer)),
        "clip" => train.clip.to_string(),
        "micro_batches" => train.micro_batches.to_string(),
        "seed" => train.seed.to_string(),
        _ => return None,
    })
}

fn strategy_value(job: &Job, key: &str) -> Option<String> {
    let strategy = &job.strategy;
    Some(match key {
        "recompute" => match strategy.recompute {
            Recompute::Every(every) if every > 1 => every.to_string(),
            value => quoted(word_of(&RECOMPUTES, value)),
        },
        "activation_offload" => quoted(word_of(&ACTIVATION_OFFLOADS, strategy.activation_offload)),
        "cpu_embedding" => strategy.cpu_embedding.to_string(),
        "tiled_linear" => strategy.tiled_linear.to_string(),
        "optimizer_offload" => quoted(word_of(&OPTIMIZER_OFFLOADS, strategy.optimizer_offload)),
        "lora" if strategy.lora.is_none() => quoted("none"),
        "zero" => strategy.zero.to_string(),
        "zero_loads_whole" => strategy.zero_loads_whole.to_string(),
        _ => return None,
    })
}

fn lora_value(job: &Job, key: &str) -> Option<String> {
    let lora = job.strategy.lora.as_ref()?;
    Some(match key {
        "rank" => lora.rank.to_string(),
        "targets" => {
            let words = lora.targets.iter().map(|target| quoted(word_of(&TARGETS, *target)));
            format!("[{}]", words.collect::<Vec<_>>().join(", "))
        }
        "dropout" => float(lora.dropout),
        _ => return None,
    })
}

fn parallel_value(job: &Job, key: &str) -> Option<String> {
    let parallel = &job.parallel;
    let value = match key {
        "data" => parallel.data,
        "tensor" => parallel.tensor,
        "pipeline" => parallel.pipeline,
        "virtual_stages" => parallel.virtual_stages,
        "stage" => parallel.stage,
        _ => return None,
    };
    Some(value.to_string())
}

fn lengths_value(job: &Job, key: &str) -> Option<String> {
    let lengths = job.lengths.as_ref()?;
    let value = match key {
        "min" => lengths.min,
        "max" => lengths.max,
        "tokens" => lengths.tokens,
        _ => return None,
    };
    Some(value.to_string())
}

fn hardware_value(job: &Job, key: &str) -> Option<String> {
    let hardware = &job.hardware;
    Some(match key {
        "gpu" => quoted(gpu_of(job)?.name),
        "memory" => size(hardware.gpu_bytes),
        "host_memory" => size(hardware.host_bytes),
        "gpus_per_host" => hardware.gpus_per_host.to_string(),
        "flops" => float(hardware.flops),
        "memory_bandwidth" => float(hardware.memory_bytes_per_s),
        "link_bandwidth" => float(hardware.link_bytes_per_s),
        "peer_bandwidth" => float(hardware.peer_bytes_per_s),
        _ => return None,
    })
}

fn gpu_of(job: &Job) -> Option<&'static GpuInfo> {
    GPUS.iter().find(|gpu| gpu.device == job.hardware.gpu)
}

/// An option's value as TOML.
fn option_value(name: &str, value: &str) -> String {
    let option = OPTIONS.iter().find(|option| option.name == name);
    match option.map(|option| option.kind) {
        Some(OptionKind::Switch | OptionKind::Ratio) => value.to_owned(),
        _ => quoted(value),
    }
}

/// A number that TOML reads as a float, in as few digits as give it back.
fn float(value: f64) -> String {
    if value.abs() >= 1e6 { format!("{value:e}") } else { format!("{value:?}") }
}

/// A size as people write it, where that is exact.
fn size(bytes: u64) -> String {
    match bytes.is_multiple_of(GIB) {
        true => quoted(&format!("{}GiB", bytes / GIB)),
        false => bytes.to_string(),
    }
}

/// A TOML string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
