//! `fraglab merge-ranks`: several traces as one, on one device and one clock.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::convert::{self, Format};
use super::folders::{self, Inputs};
use super::input::{self, ReadFailure};
use super::output;
use super::progress::Progress;
use super::setup::parse_time;
use crate::import::{Imported, trace_name};
use crate::report::text::counted;
use crate::trace::{Align, MergeOptions, Merged, RankTrace, merge, rank_labels};

const AFTER_HELP: &str = "\
Examples:
  fraglab merge-ranks actor.pickle critic.pickle -o both.json.zst
  fraglab run --trace both.json.zst --alloc caching,expandable --capacity 80GiB
      whether actor and critic fit one GPU together, and under which settings
  fraglab merge-ranks ranks/ -o node.json.zst
      every trace of a folder: a node's time line as one
  fraglab merge-ranks server.json job.json -o shared.json --align end --without-empty-cache
      a server in a process of its own beside a job, both at their end
  fraglab merge-ranks job.json job.json job.json -o three.json --stagger 500ms
      three of the same job, each half a second after the one before
  fraglab merge-ranks a.json b.json -o - --to text | less

Ranks share the device and nothing else: each keeps its own streams, private pools, blocks and \
modules under new ids, so that an allocator that keeps freed memory on its stream hands none of it \
to another rank. Names get that of the rank in front: the part of its file's name, between dots, \
that is its own. Blocks that were there when a recording \
began become allocs where its rank begins; what the recorded allocators did is left out.

Events stand by time. At the same time, and in traces that tell no times, ranks take turns, each as \
often as it has events. Marks stand in the steps of the first rank that has steps: rank1's \
`step3.forward` is `step3.rank1.forward` while the first rank is in step 3, and \
`step4.rank1.step3.forward` once that one is in step 4; so tables of steps and allocators that plan \
ahead by steps see those of the first.

Device, capacity and settings hold if all ranks say the same, else none does and a warning says so; \
limits, which are of one rank each, add up. An empty_cache of one rank empties the cache of all, as \
in one process; for processes of their own leave them out with --without-empty-cache. A flush when \
memory runs out is that of all ranks, too.

Exit codes: 0 good, 2 it could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// Traces of any format, or folders of them; the same one may be named more than once
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// The file to write; its name says the format. `-` is standard output, with --to
    #[arg(long, short, value_name = "OUT")]
    output: PathBuf,

    /// The format on standard output; `stalloc` also for a file
    #[arg(long, value_enum, value_name = "FORMAT")]
    to: Option<Format>,

    /// How the ranks' clocks are laid over each other
    #[arg(long, value_enum, value_name = "HOW", default_value = "start")]
    align: AlignTo,

    /// Let every rank begin so much later than the one before it, as in 500ms or 2s
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    stagger: Option<Duration>,

    /// Leave empty_cache events out, which would empty the cache of all ranks
    #[arg(long)]
    without_empty_cache: bool,

    /// Name of the merged trace [default: that of OUT]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Which GPU of snapshots with several
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
}

/// How clocks are laid over each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AlignTo {
    /// All begin together
    Start,
    /// All end together
    End,
    /// As the clocks of their machines said, for recordings that tell when they began
    Clock,
    /// Without times: ranks take turns
    None,
}

/// Reads the ranks, merges them and writes the trace.
///
/// # Errors
/// If a rank cannot be read, they do not fit into one trace, or it cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    convert::check_format(&args.output, args.to)?;
    input::check_stdin_once(&args.traces)?;
    anyhow::ensure!(
        args.stagger.is_none() || args.align != AlignTo::None,
        "--stagger needs times, which --align none leaves out: use another --align"
    );
    let Inputs { traces: paths, others, .. } = folders::expanded(&args.traces, false)?;
    folders::tell_passed_over(&others, console);
    output::refuse_overwrite(&paths, &args.output)?;
    let ranks = read(&paths, args.gpu)?;
    for (path, rank) in paths.iter().zip(&ranks) {
        folders::tell_some(&rank.warnings, |text| console.warn(path, text), console);
    }
    // Ranks of one job may all bear its name; their files do not.
    let name = |(path, rank): (&PathBuf, &Imported)| {
        trace_name(path).unwrap_or_else(|| rank.trace.header.name.clone())
    };
    let names: Vec<String> = paths.iter().zip(&ranks).map(name).collect();
    let labels = rank_labels(&names);
    let labelled = labels.iter().zip(&ranks);
    let labelled: Vec<RankTrace<'_>> =
        labelled.map(|(label, rank)| RankTrace { label, trace: &rank.trace }).collect();
    let Merged { mut trace, warnings } = merge(&labelled, options(args))?;
    for warning in &warnings {
        console.warn(&args.output, warning);
    }
    let default = || trace_name(&args.output).unwrap_or_else(|| labels.join("+"));
    trace.header.name = args.name.clone().unwrap_or_else(default);
    console.note(&format!(
        "fraglab: merged {}: {}",
        counted(ranks.len() as u64, "rank"),
        few(&labels)
    ));
    drop(labelled);
    drop(ranks);
    convert::put(&trace, &args.output, args.to, None, console)?;
    Ok(Verdict::Good)
}

/// All ranks stay in memory: an event of the last may come before one of the first.
fn read(paths: &[PathBuf], gpu: Option<u32>) -> Result<Vec<Imported>, ReadFailure> {
    let progress = Progress::over(paths, false);
    let options = progress.read_options(gpu);
    let read = paths.par_iter().map(|path| {
        let read = input::read(path, &options);
        progress.file_done();
        read
    });
    // The first failure in the order of the ranks, whichever thread met one first.
    let read: Vec<Result<Imported, ReadFailure>> = read.collect();
    read.into_iter().collect()
}

fn options(args: &Args) -> MergeOptions {
    let stagger_ns = args.stagger.map_or(0, |stagger| stagger.as_nanos());
    MergeOptions {
        align: match args.align {
            AlignTo::Start => Align::Start,
            AlignTo::End => Align::End,
            AlignTo::Clock => Align::Clock,
            AlignTo::None => Align::Turns,
        },
        stagger_ns: u64::try_from(stagger_ns).unwrap_or(u64::MAX),
        without_empty_cache: args.without_empty_cache,
    }
}

/// The first and the last of many names.
fn few(names: &[String]) -> String {
    match names {
        [first, second, .., last] if names.len() > 4 => format!("{first}, {second}, ... {last}"),
        names => names.join(", "),
    }
}
