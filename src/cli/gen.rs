//! `fraglab gen`: the description of a job becomes a trace.

use std::path::{Path, PathBuf};

use super::Verdict;
use super::console::Console;
use super::convert::{self, Format};
use super::gen_ranks::{self, Fleet, RanksArgs};
use super::input::is_stdio;
use super::job::{JobArgs, read_job_file};
use super::output;
use super::progress::Progress;
use crate::report::text;
use crate::trace::Compression;
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
  fraglab gen job.toml --ranks 512 -o 'ranks/job.rank{rank}.json.zst'
      a trace for each data-parallel rank, seeds by rank; --keep goes on after an interruption
  fraglab run --trace job.json.zst --alloc caching,expandable

The description is TOML; traces/README.md has every key. --set and the options replace what it \
says. The same description gives the same bytes everywhere, on any number of threads.

Sizes of a generated trace are those that the operations ask for, times are operations and bytes \
over the rates of [hardware]: estimates, where a recording measured.

The name of the output says the format, as for `fraglab convert`: NAME.json (native, holds \
everything), NAME.parquet, NAME.txt; with .gz or .zst behind it, compressed.

Exit codes: 0 good, 2 it could not be done, 130 interrupted.";

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

    /// The trace to write; its name says the format. `-` is standard output, with --to; with --ranks
    /// the name has {rank}
    #[arg(long, short, value_name = "FILE")]
    #[arg(required_unless_present_any = ["example", "list", "resolve"])]
    output: Option<PathBuf>,

    /// The format on standard output; `stalloc` also for a file
    #[arg(long, value_enum, value_name = "FORMAT", requires = "output")]
    to: Option<Format>,

    #[command(flatten)]
    ranks: RanksArgs,

    /// Level of Zstandard for NAME.zst: 1 (fast) to 19 (small) [default: 19; with --ranks 1]
    #[arg(long, value_name = "LEVEL", requires = "output")]
    #[arg(value_parser = clap::value_parser!(i32).range(1..=19))]
    level: Option<i32>,

    /// Seed of everything that is drawn, as train.seed of the description
    #[arg(long, value_name = "SEED")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64))]
    seed: Option<u64>,

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
    let mut beside = args.job.beside();
    beside.extend(args.seed.map(|seed| ("train.seed".to_owned(), seed.to_string())));
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
            Some(output) if !args.resolve => return write(args, spec, output, &beside, console),
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
) -> anyhow::Result<Verdict> {
    convert::check_format(output, args.to)?;
    anyhow::ensure!(
        args.level.is_none() || Compression::of_name(output) == Compression::Zstd,
        "{}: --level is of Zstandard: expected a name that ends in .zst",
        output.display()
    );
    output::refuse_overwrite(std::slice::from_ref(spec), output)?;
    let job = read_job_file(spec, beside)?;
    if let Some(count) = args.ranks.count() {
        let fleet = Fleet { spec, job: &job, output, to: args.to, level: args.level };
        return gen_ranks::execute(&fleet, &args.ranks, count, console);
    }
    anyhow::ensure!(
        !output.to_string_lossy().contains(gen_ranks::PLACE),
        "{}: {} is the number of a rank: say how many ranks there are, as in --ranks 8",
        output.display(),
        gen_ranks::PLACE
    );
    let trace = {
        let _progress = Progress::spinner("generating");
        generate(&job).map_err(|error| anyhow::anyhow!("{}: {error}", spec.display()))?
    };
    convert::put(&trace, output, args.to, args.level, console)?;
    if !is_stdio(output) {
        console.print(&text::generated(&job, &trace, console.style()))?;
    }
    Ok(Verdict::Good)
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
