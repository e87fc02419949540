//! `fraglab gen`: the description of a job becomes a trace.

use std::path::{Path, PathBuf};

use super::Verdict;
use super::console::Console;
use super::convert::{self, Format};
use super::input::is_stdio;
use super::job::{JobArgs, read_job_file};
use super::output;
use super::progress::Progress;
use crate::report::text;
use crate::workload::{Family, example_job, generate, write_job};

const AFTER_HELP: &str = "\
Examples:
  fraglab gen --example llama -o job.toml
      a description to begin with: every key, its default and its meaning
  fraglab gen job.toml -o job.json.zst
      what that job asks of its allocator, step after step
  fraglab gen job.toml -o big.json.zst --set train.batch=32 --use_ckp
  fraglab gen job.toml -o - --to text --set train.steps=1 | less
  for z in 0 1 2 3; do fraglab gen job.toml -o z$z.json.zst --set strategy.zero=$z; done
  fraglab gen --example gpt3-8b | fraglab gen - -o tide.json.zst --with_mem_saving_com
  fraglab run --trace job.json.zst --alloc caching,expandable

The description is TOML; traces/README.md has every key. --set and the options replace what it \
says. The same description gives the same bytes everywhere.

Sizes of a generated trace are those that the operations ask for, times are operations and bytes \
over the rates of [hardware]: estimates, where a recording measured.

The name of the output says the format, as for `fraglab convert`: NAME.json (native, holds \
everything), NAME.parquet, NAME.txt; with .gz or .zst behind it, compressed.

Exit codes: 0 good, 2 it could not be done.";

/// Descriptions that ship, by name.
const SHIPPED: [(&str, &str); 14] = [
    ("gpt2-xl-plain", include_str!("../../traces/models/gpt2-xl-plain.toml")),
    ("gpt3-8b", include_str!("../../traces/models/gpt3-8b.toml")),
    ("llama-1b-plain", include_str!("../../traces/models/llama-1b-plain.toml")),
    ("llama-1b-varlen", include_str!("../../traces/models/llama-1b-varlen.toml")),
    ("llama-1b-zero3.rank0", include_str!("../../traces/models/llama-1b-zero3.rank0.toml")),
    ("llama-3b-recompute", include_str!("../../traces/models/llama-3b-recompute.toml")),
    ("llama-7b-lora", include_str!("../../traces/models/llama-7b-lora.toml")),
    ("llama-7b-lora-recompute", include_str!("../../traces/models/llama-7b-lora-recompute.toml")),
    ("llama-7b-lora-zero3-8", include_str!("../../traces/models/llama-7b-lora-zero3-8.toml")),
    ("mixtral-moe", include_str!("../../traces/models/mixtral-moe.toml")),
    ("opt-1-3b-act-offload", include_str!("../../traces/models/opt-1-3b-act-offload.toml")),
    (
        "opt-1-3b-recompute-offload",
        include_str!("../../traces/models/opt-1-3b-recompute-offload.toml"),
    ),
    ("pipeline-1f1b", include_str!("../../traces/models/pipeline-1f1b.toml")),
    ("pipeline-1f1b-recompute", include_str!("../../traces/models/pipeline-1f1b-recompute.toml")),
];

/// Families that a description to begin with is made for.
const FAMILIES: [(&str, Family); 5] = [
    ("bert", Family::Bert),
    ("gpt", Family::Gpt),
    ("opt", Family::Opt),
    ("llama", Family::Llama),
    ("moe", Family::Moe),
];

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The description of a job in TOML; `-` is standard input
    #[arg(value_name = "SPEC.toml", required_unless_present_any = ["example", "list"])]
    spec: Option<PathBuf>,

    /// The trace to write; its name says the format. `-` is standard output, with --to
    #[arg(long, short, value_name = "FILE")]
    #[arg(required_unless_present_any = ["example", "list", "resolve"])]
    output: Option<PathBuf>,

    /// The format on standard output; `stalloc` also for a file
    #[arg(long, value_enum, value_name = "FORMAT", requires = "output")]
    to: Option<Format>,

    /// Print a description to begin with: bert, gpt, opt, llama, moe, or one that ships (--list)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["spec", "list"])]
    example: Option<String>,

    /// Name the shapes, GPUs and descriptions that ship
    #[arg(long, conflicts_with_all = ["spec", "output"])]
    list: bool,

    /// Print the description with every key and nothing left to defaults; write no trace
    #[arg(long, conflicts_with_all = ["output", "example", "list"])]
    resolve: bool,

    #[command(flatten)]
    job: JobArgs,
}

/// Generates a trace, or prints what there is to choose from.
///
/// # Errors
/// If the description is wrong, is of a job that is not modelled, or nothing can be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    let beside = args.job.beside();
    if args.list {
        let names: Vec<&str> = SHIPPED.iter().map(|(name, _)| *name).collect();
        console.print(&text::job_choices(&names, console.style()))?;
    } else if let Some(name) = &args.example {
        anyhow::ensure!(
            beside.is_empty(),
            "--example {name}: prints a description as it is: replace its keys when it is read"
        );
        let output = args.output.as_deref().unwrap_or(Path::new("-"));
        output::save_text(output, &example(name)?, console)?;
    } else if let Some(spec) = &args.spec {
        match &args.output {
            Some(output) if !args.resolve => write(args, spec, output, &beside, console)?,
            _ => console.print(&write_job(&read_job_file(spec, &beside)?))?,
        }
    }
    Ok(Verdict::Good)
}

fn write(
    args: &Args,
    spec: &PathBuf,
    output: &Path,
    beside: &[(String, String)],
    console: &Console,
) -> anyhow::Result<()> {
    convert::check_format(output, args.to)?;
    output::refuse_overwrite(std::slice::from_ref(spec), output)?;
    let job = read_job_file(spec, beside)?;
    let trace = {
        let _progress = Progress::spinner("generating");
        generate(&job).map_err(|error| anyhow::anyhow!("{}: {error}", spec.display()))?
    };
    convert::put(&trace, output, args.to, console)?;
    if !is_stdio(output) {
        console.print(&text::generated(&job, &trace, console.style()))?;
    }
    Ok(())
}

/// A description to begin with.
fn example(name: &str) -> anyhow::Result<String> {
    if let Some((_, text)) = SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
        return Ok((*text).to_owned());
    }
    let family = FAMILIES.iter().find(|(family, _)| *family == name);
    let names = FAMILIES.iter().map(|(name, _)| *name).chain(SHIPPED.iter().map(|(name, _)| *name));
    let (_, family) = family.ok_or_else(|| {
        anyhow::anyhow!(
            "--example {name}: no such description: expected one of {}",
            names.collect::<Vec<_>>().join(", ")
        )
    })?;
    Ok(example_job(*family)?)
}
