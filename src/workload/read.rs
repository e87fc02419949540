//! The TOML of a job: what people write becomes a [`Job`], checked.
//!
//! The one design decision: nothing is left to be found out later. Names, defaults and
//! PatrickStar's options are resolved here, and every combination that makes no sense is told with
//! the place where it stands, what was expected and what to do; the generators ask no questions.
//!
//! ```text
//!   text, KEY=VALUE ── document ──> keys with places ── here ──> Job ── check ──> Job
//! ```
//!
//! Every key and its default stands in [`JOB_KEYS`], every option in
//! [`OPTIONS`](super::options::OPTIONS). A key given beside the text replaces the text's; so does
//! an option that sets a strategy. Within the text, an option that contradicts a strategy is an
//! error.

mod check;
mod document;
mod keys;

use std::collections::BTreeMap;
use std::fmt;

use document::{Document, Entry, Origin, Value};
pub(crate) use keys::meant;
pub(super) use keys::{
    ACTIVATION_OFFLOADS, AUTOCASTS, DTYPES, FAMILIES, HEADS, OPTIMIZER_OFFLOADS, OPTIMIZERS,
    RECOMPUTES, TARGETS, word_of,
};
pub use keys::{JOB_KEYS, JobKey};

use super::gpus::{GPUS, GpuInfo};
use super::options::{OptionKind, OptionUse, option_named};
use super::{
    ActivationOffload, Family, Hardware, Head, Job, Lengths, Lora, LoraTarget, Optimizer,
    OptimizerOffload, Parallel, Recompute, Shape, Strategy, Train, shapes,
};
use crate::trace::Limits;
use crate::units::caret_under;

/// Where in a description something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the text.
    Text {
        /// Line, from 1.
        line: u32,
        /// Column in characters, from 1.
        column: u32,
    },
    /// In what was given beside it.
    Beside {
        /// The key.
        key: String,
        /// The value as typed.
        value: String,
    },
}

impl Place {
    fn beside(key: &str, value: &str) -> Place {
        Place::Beside { key: document::shortened(key), value: document::shortened(value) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Text { line, column } => write!(f, "{line}:{column}"),
            Place::Beside { key, value } => write!(f, "{key}={value}"),
        }
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobFault {
    /// It is no TOML.
    #[error("not TOML: {0}")]
    Syntax(String),
    /// There is no such key.
    #[error("unknown {what} {path}{hint}")]
    Unknown {
        /// Key or table.
        what: &'static str,
        /// Its path.
        path: String,
        /// What may have been meant, after a semicolon.
        hint: String,
    },
    /// The value is of the wrong kind or out of range.
    #[error("{key} is {found}: expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A key that has no default is missing.
    #[error("{key} is missing: {why}")]
    Missing {
        /// The key.
        key: &'static str,
        /// What it is for, what to write.
        why: String,
    },
    /// Keys do not go together.
    #[error("{0}")]
    Conflict(String),
    /// The job would be too large to be written down.
    #[error("{0}")]
    TooLarge(String),
}

/// The description of a job is wrong at a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct JobError {
    /// Where.
    pub place: Place,
    /// What.
    pub fault: Box<JobFault>,
    /// The line as it stands in the text; empty for what was given beside it.
    pub source_line: String,
}

impl JobError {
    /// The line that is wrong and a caret under the place; nothing for what stands in no line.
    pub fn excerpt(&self) -> Option<String> {
        match self.place {
            Place::Text { column, .. } if !self.source_line.is_empty() => {
                Some(caret_under(&self.source_line, column))
            }
            _ => None,
        }
    }
}

/// Reads the description of a job. `beside` are keys that replace those of the text, as
/// `("train.batch", "4")`.
///
/// # Errors
/// The first thing that is wrong, and where.
pub fn read_job(text: &str, beside: &[(String, String)]) -> Result<Job, JobError> {
    read_job_within(text, beside, &Limits::default())
}

/// Reads the description of a job whose trace keeps within these limits.
///
/// # Errors
/// As [`read_job`].
pub fn read_job_within(
    text: &str,
    beside: &[(String, String)],
    limits: &Limits,
) -> Result<Job, JobError> {
    let document = Document::read(text, beside)?;
    let gpu = gpu(&document)?;
    let family = family(&document)?;
    let preset = preset(&document, family)?;
    let parallel = parallel(&document)?;
    let sequence = document.whole("train.sequence", 1, SEQUENCE_MAX)?;
    let longest = document.whole("lengths.max", 1, SEQUENCE_MAX)?.max(sequence);
    let shape = shape(&document, family, preset.as_ref(), longest)?;
    let train = train(&document, &shape, &parallel, gpu)?;
    let job = Job {
        name: name(&document, &shape)?,
        strategy: strategy(&document)?,
        lengths: lengths(&document, &train)?,
        expert_imbalance: imbalance(&document)?,
        hardware: hardware(&document, gpu, &train)?,
        options: options(&document)?,
        shape,
        train,
        parallel,
    };
    check::check(&document, &job, limits)?;
    Ok(job)
}

const LAYERS_MAX: u64 = 100_000;
const WIDTH_MAX: u64 = 1 << 24;
const TABLE_MAX: u64 = 1 << 28;
const EXPERTS_MAX: u64 = 4096;
const BATCH_MAX: u64 = 1 << 20;
const SEQUENCE_MAX: u64 = 1 << 24;
const STEPS_MAX: u64 = 1_000_000;
const RANKS_MAX: u64 = 1 << 20;
const TOKENS_MAX: u64 = 1 << 40;
const HARDWARE_BYTES_MAX: u64 = 1 << 50;
const IMBALANCE_MAX: f64 = 100.0;

fn name(document: &Document<'_>, shape: &Shape) -> Result<String, JobError> {
    if let Some(name) = document.text("name")? {
        return Ok(name);
    }
    let preset = document.text("model.preset")?;
    Ok(preset.unwrap_or_else(|| word_of(&FAMILIES, shape.family).to_owned()))
}

fn gpu(document: &Document<'_>) -> Result<&'static GpuInfo, JobError> {
    let words: Vec<_> = GPUS.iter().map(|gpu| keys::Word { text: gpu.name, value: gpu }).collect();
    Ok(document.word("hardware.gpu", &words)?.unwrap_or(&GPUS[0]))
}

/// The family by the description; nothing if only a preset tells.
fn family(document: &Document<'_>) -> Result<Option<Family>, JobError> {
    let family = document.word("model.type", &FAMILIES)?;
    if family.is_none() && !document.has("model.preset") {
        let why =
            "say which family the model is of, type = \"llama\" for one, or preset = \"llama-7b\"";
        let fault = JobFault::Missing { key: "model.type", why: why.to_owned() };
        return Err(document.fault(&["model"], fault));
    }
    Ok(family)
}

/// The named shape, of the family that was asked for.
fn preset(document: &Document<'_>, family: Option<Family>) -> Result<Option<Shape>, JobError> {
    let Some(entry) = document.get("model.preset") else { return Ok(None) };
    let name = document.text("model.preset")?.unwrap_or_default();
    let Some(shape) = shapes::named(&name) else {
        let near = keys::meant(&name, shapes::names());
        let all = || format!("; there are {}", shapes::names().collect::<Vec<_>>().join(", "));
        let hint = if near.is_empty() { all() } else { near };
        return Err(document.wrong("model.preset", entry, format!("the name of a shape{hint}")));
    };
    let Some(family) = family else { return Ok(Some(shape)) };
    let told = shapes::named_as(&name, family).ok_or_else(|| {
        let (is, asked) = (word_of(&FAMILIES, shape.family), word_of(&FAMILIES, family));
        let message = format!("preset {name} is of type {is}, not {asked}: leave type away");
        document.conflict(&["model.type"], message)
    })?;
    Ok(Some(told))
}

/// The shape: what is given, else the preset's, else the family's defaults.
fn shape(
    document: &Document<'_>,
    family: Option<Family>,
    preset: Option<&Shape>,
    longest: Option<u64>,
) -> Result<Shape, JobError> {
    let family = family.or(preset.map(|shape| shape.family)).unwrap_or(Family::Llama);
    let required = |key: &'static str, max| -> Result<u64, JobError> {
        let told = document.whole(key, 1, max)?;
        let of_preset = preset.map(|shape| match key {
            "model.layers" => shape.layers,
            _ => shape.hidden,
        });
        told.or(of_preset).ok_or_else(|| {
            let why = "say it, or name a preset".to_owned();
            document.fault(&["model"], JobFault::Missing { key, why })
        })
    };
    let layers = required("model.layers", LAYERS_MAX)?;
    let hidden = required("model.hidden", WIDTH_MAX)?;
    let heads = match document.whole("model.heads", 1, WIDTH_MAX)? {
        Some(heads) => heads,
        None => match preset {
            Some(shape) => shape.heads,
            None => default_heads(document, family, hidden)?,
        },
    };
    // Figures of the preset that follow from others hold as long as these do.
    let same_heads = preset.filter(|shape| shape.heads == heads);
    let same_hidden = preset.filter(|shape| shape.hidden == hidden);
    let head = document.word("model.head", &HEADS)?;
    let head = head.or(preset.map(|shape| shape.head)).unwrap_or(Head::Lm);
    let same_head = preset.filter(|shape| shape.head == head);
    let whole = |key, max, of_preset: Option<u64>, default: u64| {
        let told = document.whole(key, 1, max)?;
        Ok::<u64, JobError>(told.or(of_preset).unwrap_or(default))
    };
    let is_moe = family == Family::Moe;
    let dropout = document.number("model.dropout", is_probability, PROBABILITY)?;
    Ok(Shape {
        family,
        layers,
        hidden,
        heads,
        kv_heads: whole("model.kv_heads", WIDTH_MAX, same_heads.map(|s| s.kv_heads), heads)?,
        ffn: whole("model.ffn", 1 << 26, same_hidden.map(|s| s.ffn), default_ffn(family, hidden))?,
        vocabulary: whole(
            "model.vocabulary",
            TABLE_MAX,
            preset.map(|s| s.vocabulary),
            default_vocabulary(family),
        )?,
        positions: match document.whole("model.positions", 0, TABLE_MAX)? {
            Some(positions) => positions,
            None => preset.map_or_else(|| default_positions(family, longest), |s| s.positions),
        },
        experts: if is_moe || document.has("model.experts") {
            whole("model.experts", EXPERTS_MAX, preset.map(|s| s.experts), 8)?
        } else {
            0
        },
        top_k: if is_moe || document.has("model.top_k") {
            whole("model.top_k", EXPERTS_MAX, preset.map(|s| s.top_k), 2)?
        } else {
            0
        },
        head,
        tied_head: document
            .switch("model.tied_head")?
            .or(same_head.map(|shape| shape.tied_head))
            .unwrap_or(default_tied(family, head)),
        dropout: dropout.or(preset.map(|shape| shape.dropout)).unwrap_or(default_dropout(family)),
    })
}

/// Heads of 64 elements, of 128 for Llama and Mixtral.
fn default_heads(document: &Document<'_>, family: Family, hidden: u64) -> Result<u64, JobError> {
    let elements = if has_rotary(family) { 128 } else { 64 };
    if hidden.is_multiple_of(elements) {
        return Ok(hidden / elements);
    }
    let why = format!(
        "hidden = {hidden} is no multiple of {elements}, which would give their number: say it"
    );
    Err(document.fault(&["model.hidden"], JobFault::Missing { key: "model.heads", why }))
}

/// Whether a family has rotary positions, and no table of them.
fn has_rotary(family: Family) -> bool {
    matches!(family, Family::Llama | Family::Moe)
}

/// Llama's rule: two thirds of four times the width, up to a multiple of 256; Mixtral's: 3.5 times.
fn default_ffn(family: Family, hidden: u64) -> u64 {
    match family {
        Family::Llama => (8 * hidden).div_ceil(3).next_multiple_of(256),
        Family::Moe => (7 * hidden).div_ceil(2),
        Family::Bert | Family::Gpt | Family::Opt => 4 * hidden,
    }
}

fn default_vocabulary(family: Family) -> u64 {
    match family {
        Family::Bert => 30_522,
        Family::Gpt => 50_257,
        Family::Opt => 50_272,
        Family::Llama | Family::Moe => 32_000,
    }
}

fn default_positions(family: Family, longest: Option<u64>) -> u64 {
    let usual = match family {
        Family::Bert => 512,
        Family::Gpt => 1024,
        Family::Opt => 2048,
        Family::Llama | Family::Moe => return 0,
    };
    longest.map_or(usual, |longest| longest.max(usual))
}

fn default_tied(family: Family, head: Head) -> bool {
    head == Head::Lm && !has_rotary(family)
}

fn default_dropout(family: Family) -> f64 {
    if matches!(family, Family::Bert | Family::Gpt) { 0.1 } else { 0.0 }
}

/// The usual length, or as many positions as there are.
fn default_sequence(shape: &Shape) -> u64 {
    let usual = match shape.family {
        Family::Bert => 512,
        Family::Gpt => 1024,
        Family::Opt | Family::Llama | Family::Moe => 2048,
    };
    if shape.positions == 0 { usual } else { usual.min(shape.positions) }
}

const PROBABILITY: &str = "a probability, 0 to below 1";

fn is_probability(value: f64) -> bool {
    (0.0..1.0).contains(&value)
}

fn train(
    document: &Document<'_>,
    shape: &Shape,
    parallel: &Parallel,
    gpu: &GpuInfo,
) -> Result<Train, JobError> {
    let whole = |key, min, max, default: u64| {
        Ok::<u64, JobError>(document.whole(key, min, max)?.unwrap_or(default))
    };
    let offload = document.word("strategy.optimizer_offload", &OPTIMIZER_OFFLOADS)?;
    // No gradient is left on the GPU whose norm could be taken.
    let streams_out = offload == Some(OptimizerOffload::Gradients);
    Ok(Train {
        batch: whole("train.batch", 1, BATCH_MAX, 8)?,
        sequence: whole("train.sequence", 1, SEQUENCE_MAX, default_sequence(shape))?,
        steps: whole("train.steps", 1, STEPS_MAX, 3)?,
        dtype: document.word("train.dtype", &DTYPES)?.unwrap_or(gpu.dtype),
        autocast: document.word("train.autocast", &AUTOCASTS)?.unwrap_or(None),
        optimizer: document.word("train.optimizer", &OPTIMIZERS)?.unwrap_or(Optimizer::Adamw),
        clip: document.switch("train.clip")?.unwrap_or(parallel.pipeline == 1 && !streams_out),
        micro_batches: whole("train.micro_batches", 1, BATCH_MAX, parallel.pipeline)?,
        seed: whole("train.seed", 0, i64::MAX as u64, 0)?,
    })
}

fn strategy(document: &Document<'_>) -> Result<Strategy, JobError> {
    let recompute = Setting {
        option: "use_ckp",
        key: "strategy.recompute",
        on: Recompute::Every(1),
        off: Recompute::None,
        fits: |value| matches!(value, Recompute::Every(_)),
    };
    let offload = Setting {
        option: "with_activation_offload",
        key: "strategy.activation_offload",
        on: ActivationOffload::Checkpoints,
        off: ActivationOffload::None,
        fits: |value| value == ActivationOffload::Checkpoints,
    };
    let switch = |option, key| Setting { option, key, on: true, off: false, fits: |value| value };
    let cpu_embedding = switch("use_cpu_embedding", "strategy.cpu_embedding");
    let tiled_linear = switch("with_tiling_linear", "strategy.tiled_linear");
    let optimizer_offload = document.word("strategy.optimizer_offload", &OPTIMIZER_OFFLOADS)?;
    Ok(Strategy {
        recompute: recompute.resolve(document, read_recompute(document)?)?,
        activation_offload: offload.resolve(
            document,
            document.word("strategy.activation_offload", &ACTIVATION_OFFLOADS)?,
        )?,
        cpu_embedding: cpu_embedding
            .resolve(document, document.switch("strategy.cpu_embedding")?)?,
        tiled_linear: tiled_linear.resolve(document, document.switch("strategy.tiled_linear")?)?,
        optimizer_offload: optimizer_offload.unwrap_or(OptimizerOffload::None),
        lora: lora(document)?,
        zero: document.whole("strategy.zero", 0, 3)?.unwrap_or(0),
        zero_loads_whole: document.switch("strategy.zero_loads_whole")?.unwrap_or(false),
    })
}

/// A word, or a number k: every k-th layer.
fn read_recompute(document: &Document<'_>) -> Result<Option<Recompute>, JobError> {
    let path = "strategy.recompute";
    let Some(entry) = document.get(path) else { return Ok(None) };
    match entry.value {
        Value::Whole(Some(every), _) if (1..=LAYERS_MAX).contains(&every) => {
            Ok(Some(Recompute::Every(every)))
        }
        Value::Text(_) => document.word(path, &RECOMPUTES),
        _ => {
            let words = keys::one_of(&RECOMPUTES);
            Err(document.wrong(path, entry, format!("{words}, or k for every k-th layer")))
        }
    }
}

/// A strategy that PatrickStar's page has an option for.
struct Setting<T> {
    option: &'static str,
    key: &'static str,
    /// What the option sets.
    on: T,
    /// What holds without it.
    off: T,
    /// Whether a value of the key is one with which the option may be on.
    fits: fn(T) -> bool,
}

impl<T: Copy + PartialEq> Setting<T> {
    /// The strategy by its key and its option. If one of them stands beside the text and the other
    /// in it, the former counts.
    fn resolve(&self, document: &Document<'_>, by_key: Option<T>) -> Result<T, JobError> {
        let option = format!("options.{}", self.option);
        let by_option = document.switch(&option)?;
        let (Some(value), Some(on)) = (by_key, by_option) else {
            let by_option = by_option.map(|on| if on { self.on } else { self.off });
            return Ok(by_key.or(by_option).unwrap_or(self.off));
        };
        if on == (self.fits)(value) && (on || value == self.off) {
            return Ok(value);
        }
        let is_beside = |path: &str| {
            document.get(path).is_some_and(|entry| matches!(entry.origin, Origin::Beside(_)))
        };
        match (is_beside(&option), is_beside(self.key)) {
            (true, false) => Ok(if on { self.on } else { self.off }),
            (false, true) => Ok(value),
            _ => {
                let (option_name, key) = (self.option, self.key);
                let message = format!(
                    "option {option_name} = {on} contradicts {key}, which says otherwise: leave \
                     one of the two away"
                );
                Err(document.conflict(&[&option], message))
            }
        }
    }
}

fn lora(document: &Document<'_>) -> Result<Option<Lora>, JobError> {
    if let Some(entry) = document.get("strategy.lora") {
        return match &entry.value {
            Value::Text(text) if text == "none" => Ok(None),
            _ => {
                let expected = "a table {rank, targets, dropout}, or \"none\"".to_owned();
                Err(document.wrong("strategy.lora", entry, expected))
            }
        };
    }
    if !document.has_table("strategy.lora") {
        return Ok(None);
    }
    let targets = document.words("strategy.lora.targets", &TARGETS)?;
    let mut targets = targets.unwrap_or_else(|| vec![LoraTarget::Q, LoraTarget::V]);
    targets.sort_unstable();
    targets.dedup();
    let dropout = document.number("strategy.lora.dropout", is_probability, PROBABILITY)?;
    Ok(Some(Lora {
        rank: document.whole("strategy.lora.rank", 1, 1 << 16)?.unwrap_or(16),
        targets,
        dropout: dropout.unwrap_or(0.0),
    }))
}

fn parallel(document: &Document<'_>) -> Result<Parallel, JobError> {
    let ranks = |key| Ok::<u64, JobError>(document.whole(key, 1, RANKS_MAX)?.unwrap_or(1));
    Ok(Parallel {
        data: ranks("parallel.data")?,
        tensor: ranks("parallel.tensor")?,
        pipeline: ranks("parallel.pipeline")?,
        virtual_stages: ranks("parallel.virtual_stages")?,
        stage: document.whole("parallel.stage", 0, RANKS_MAX)?.unwrap_or(0),
    })
}

fn lengths(document: &Document<'_>, train: &Train) -> Result<Option<Lengths>, JobError> {
    if !document.has_table("lengths") {
        return Ok(None);
    }
    let whole = |key, max, default: u64| {
        Ok::<u64, JobError>(document.whole(key, 1, max)?.unwrap_or(default))
    };
    let tokens = train.batch.saturating_mul(train.sequence);
    Ok(Some(Lengths {
        min: whole("lengths.min", SEQUENCE_MAX, 1)?,
        max: whole("lengths.max", SEQUENCE_MAX, train.sequence)?,
        tokens: whole("lengths.tokens", TOKENS_MAX, tokens)?,
    }))
}

fn imbalance(document: &Document<'_>) -> Result<f64, JobError> {
    let good = |value| (0.0..=IMBALANCE_MAX).contains(&value);
    Ok(document.number("moe.imbalance", good, "a number from 0 to 100")?.unwrap_or(0.0))
}

fn hardware(document: &Document<'_>, gpu: &GpuInfo, train: &Train) -> Result<Hardware, JobError> {
    let named = gpu.hardware(train.autocast.unwrap_or(train.dtype));
    let size = |key, default: u64| {
        Ok::<u64, JobError>(document.size(key, HARDWARE_BYTES_MAX)?.unwrap_or(default))
    };
    let rate = |key, default: f64| Ok::<f64, JobError>(document.rate(key)?.unwrap_or(default));
    let flops = document.number("hardware.flops", |value| value > 0.0, "a number above 0");
    let gpus_per_host = document.whole("hardware.gpus_per_host", 1, 1024)?;
    Ok(Hardware {
        gpu_bytes: size("hardware.memory", named.gpu_bytes)?,
        host_bytes: size("hardware.host_memory", named.host_bytes)?,
        gpus_per_host: gpus_per_host.unwrap_or(named.gpus_per_host),
        flops: flops?.unwrap_or(named.flops),
        memory_bytes_per_s: rate("hardware.memory_bandwidth", named.memory_bytes_per_s)?,
        link_bytes_per_s: rate("hardware.link_bandwidth", named.link_bytes_per_s)?,
        peer_bytes_per_s: rate("hardware.peer_bandwidth", named.peer_bytes_per_s)?,
        gpu: named.gpu,
    })
}

/// The options that are told to the allocator of model data, as texts.
fn options(document: &Document<'_>) -> Result<BTreeMap<String, String>, JobError> {
    let mut options = BTreeMap::new();
    for name in document.options() {
        let path = format!("options.{name}");
        let (Some(option), Some(entry)) = (option_named(name), document.get(&path)) else {
            continue;
        };
        let value = option_text(document, &path, entry, option.kind)?;
        if option.used == OptionUse::Chunk {
            options.insert(name.to_owned(), value);
        }
    }
    Ok(options)
}

fn option_text(
    document: &Document<'_>,
    path: &str,
    entry: &Entry,
    kind: OptionKind,
) -> Result<String, JobError> {
    match kind {
        OptionKind::Switch => Ok(document.switch(path)?.unwrap_or_default().to_string()),
        OptionKind::Ratio => {
            let expected = "a share above 0, at most 1";
            let good = |value| value > 0.0 && value <= 1.0;
            Ok(document.number(path, good, expected)?.unwrap_or_default().to_string())
        }
        OptionKind::Elements => match &entry.value {
            Value::Whole(Some(elements), _) if *elements > 0 => Ok(elements.to_string()),
            Value::Text(text) if text == "auto" || is_elements(text) => Ok(text.clone()),
            _ => {
                let expected = "elements of a chunk, as in \"64Mi\" or 67108864, or \"auto\"";
                Err(document.wrong(path, entry, expected.to_owned()))
            }
        },
    }
}

/// Whether a text is a number of elements: `67108864`, or with 2^20 of them each `64Mi`.
fn is_elements(text: &str) -> bool {
    let digits = text.strip_suffix("Mi").unwrap_or(text);
    digits.parse::<u64>().is_ok_and(|number| number > 0)
}
