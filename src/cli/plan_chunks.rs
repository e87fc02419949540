//! `fraglab plan-chunks`: which chunk size suits a model on a machine.

use std::path::{Path, PathBuf};

use super::Verdict;
use super::console::Console;
use super::input::is_stdio;
use super::job::{JobArgs, read_job_file};
use super::output;
use super::setup::parse_size;
use crate::chunk::layout::MI;
use crate::chunk::search::Machine;
use crate::engine::{ChunkPlan, plan_chunks};
use crate::report::{json, text};
use crate::units::{Bytes, counted};
use crate::workload::{Job, activation_estimate, family_name, read_job, strategy_words, units};

const AFTER_HELP: &str = "\
Examples:
  fraglab plan-chunks --model GPT3_8B
      PatrickStar's 8B model as BERT type, on its search's 32 GiB GPU and 240 GiB host
  fraglab plan-chunks --model GPT3_12B --type gpt --use_ckp --ranks 8
  fraglab plan-chunks job.toml --host 1TB --gpu 40GiB --use_cpu_embedding
  fraglab plan-chunks --model GPT_DS_20B --with_tiling_linear --chunk_size 248Mi
  fraglab plan-chunks job.toml --json - | jq .fine.managed.best.chunk_elements

A row a size of PatrickStar's grid. A chunk holds whole modules: their own parameters must lie in \
one chunk, so a size can be too small, and the rest of a chunk that the next module does not fit \
into is wasted. `used` is what is not wasted, `data` the four lists of chunks (fp16 and fp32 \
parameters, momentum, variance: 14 bytes an element) of all ranks, `a rank` that of the rank that \
has most.

  searched   what PatrickStar's own search would say: one chunk of CS elements, taken for 2 CS bytes,
             in one GPU's room in warm-up; all data in that and the host
  corrected  the same with two fp16 chunks, and with all GPUs of a host
  managed    whether its manager could run: model construction, working memory beside the chunks in
             use, all data from the first ADAM on; on the rank that has most

A misfit names the room that is short and by how much: warm-up (a GPU's room for chunks in the \
first step), memory (GPUs and host together), start (the host when the model is built), GPU (beside \
working memory).

Shares of memory are those that PatrickStar's script gives its search (0.9 of GPU and host, 0.1 of \
that in warm-up), with memory-saving communication; options of the description or the command line \
replace them. Working memory is estimated for BERT, GPT and OPT with plain attention; for others \
give --working.

Exit codes: 0 good, 1 no chunk size fits by the manager's budgets, 2 it could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The description of a job in TOML; `-` is standard input
    #[arg(value_name = "MODEL.toml", required_unless_present = "model")]
    spec: Option<PathBuf>,

    /// A named shape instead of a file (`fraglab gen --list` names them)
    #[arg(long, value_name = "NAME", conflicts_with = "spec")]
    model: Option<String>,

    /// The type of a named shape: PatrickStar's benchmark models are bert or gpt [default: bert]
    #[arg(long = "type", value_name = "TYPE", requires = "model")]
    family: Option<String>,

    /// Memory of a host [default: the description's; with --model 240GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    host: Option<Bytes>,

    /// Memory of a GPU [default: the description's; with --model 32GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    gpu: Option<Bytes>,

    /// Ranks that share the chunks, a GPU each [default: the description's parallel.data]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,

    /// Ranks on one host [default: the description's gpus_per_host, 8]
    #[arg(long, value_name = "N")]
    local_ranks: Option<u32>,

    /// GPU memory of a rank beside chunks, at its peak [default: an estimate from the description]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    working: Option<Bytes>,

    /// Write JSON, `-` for standard output and nothing else there
    ///
    /// {schema_version, model: {elements, model_data_bytes, smallest_chunk_elements, ...}, machine,
    /// rows: [{chunk_elements, candidate}], shipped, fine}. A candidate is {chunk_elements, chunks,
    /// dummies, utilization, bytes, rank_bytes, searched, corrected, managed}, each rule null where
    /// it fits, else {room, need_bytes, have_bytes}; null if the size does not hold the model.
    /// `shipped` is the best of the rows, `fine` of every Mi: {tightest, searched: {best,
    /// nearest_elements, misfit}, corrected, managed}.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    #[command(flatten)]
    job: JobArgs,
}

impl Args {
    /// The job, with what the flags replace.
    fn job(&self) -> anyhow::Result<Job> {
        let mut keys = Vec::new();
        let mut key = |name: &str, value: String| keys.push((name.to_owned(), value));
        if let Some(model) = &self.model {
            key("model.preset", model.clone());
            // The machine that PatrickStar's search has written in.
            let written = Machine::default();
            key("hardware.gpu", "v100-32g".to_owned());
            key("hardware.memory", Bytes(written.gpu_bytes).to_string());
            key("hardware.host_memory", Bytes(written.host_bytes).to_string());
        }
        if let Some(family) = &self.family {
            key("model.type", family.clone());
        }
        keys.extend(self.job.beside());
        let mut key = |name: &str, value: Option<String>| {
            keys.extend(value.map(|value| (format!("hardware.{name}"), value)));
        };
        key("memory", self.gpu.map(|size| size.0.to_string()));
        key("host_memory", self.host.map(|size| size.0.to_string()));
        key("gpus_per_host", self.local_ranks.map(|ranks| ranks.to_string()));
        keys.extend(self.ranks.map(|ranks| ("parallel.data".to_owned(), ranks.to_string())));
        match &self.spec {
            Some(path) => read_job_file(path, &keys),
            None => Ok(read_job("", &keys)?),
        }
    }
}

/// Searches chunk sizes and shows them.
///
/// # Errors
/// If the description is wrong or the answer cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    let inputs: Vec<PathBuf> = args.spec.iter().cloned().collect();
    output::check_places(&inputs, args.json.iter().map(PathBuf::as_path))?;
    let plan = planned(&args.job()?, args.working);
    if let Some(path) = &args.json {
        output::save_text(path, &json::pretty(&plan)?, console)?;
    }
    if !args.json.as_deref().is_some_and(|path: &Path| is_stdio(path)) {
        console.print(&text::chunks(&plan, console.style()))?;
    }
    let fits = plan.shipped.managed.best.is_some() || plan.fine.managed.best.is_some();
    Ok(if fits { Verdict::Good } else { Verdict::No })
}

fn planned(job: &Job, working: Option<Bytes>) -> ChunkPlan {
    let units = units(job);
    let estimate = activation_estimate(job, &units).unwrap_or_default();
    let working_bytes = working.map_or(estimate.gpu_bytes, |size| size.0);
    let machine = machine(job, working_bytes, estimate.host_bytes);
    let asked = job.options.get("chunk_size").and_then(|text| chunk_elements(text));
    plan_chunks(job.name.clone(), description(job), &units, asked, machine)
}

/// The machine of a job, with its options where it has them.
fn machine(job: &Job, working_bytes: u64, host_working_bytes: u64) -> Machine {
    let written = Machine::default();
    let ratio = |name: &str, default: f64| {
        job.options.get(name).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let switch = |name: &str, default: bool| {
        job.options.get(name).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let count = |ranks: u64| u32::try_from(ranks).unwrap_or(u32::MAX).max(1);
    let ranks = count(job.parallel.data);
    let local_ranks = count(job.hardware.gpus_per_host).min(ranks);
    let shared = if switch("use_fake_dist", false) { f64::from(local_ranks) } else { 1.0 };
    Machine {
        gpu_bytes: job.hardware.gpu_bytes,
        host_bytes: job.hardware.host_bytes,
        ranks,
        local_ranks,
        gpu_ratio: ratio("overall_gpu_mem_ratio", written.gpu_ratio) / shared,
        host_ratio: ratio("overall_cpu_mem_ratio", written.host_ratio),
        warmup_ratio: ratio("warmup_gpu_chunk_mem_ratio", written.warmup_ratio),
        memory_saving: switch("with_mem_saving_com", written.memory_saving),
        working_bytes,
        host_working_bytes,
    }
}

/// `bert, 72 layers of 3072, batch 8 x 1024, recompute`
fn description(job: &Job) -> String {
    let (shape, train) = (&job.shape, &job.train);
    let mut words = vec![
        family_name(shape.family).to_owned(),
        format!("{} of {}", counted(shape.layers, "layer"), shape.hidden),
        format!("batch {} x {}", train.batch, train.sequence),
    ];
    words.extend(strategy_words(job));
    words.join(", ")
}

/// Elements of a chunk as the option has them; nothing for `auto`.
fn chunk_elements(text: &str) -> Option<u64> {
    match text.strip_suffix("Mi") {
        Some(mi) => mi.parse::<u64>().ok()?.checked_mul(MI),
        None => text.parse().ok(),
    }
}
