//! The command line: strings in, text and files out. The only room that prints and that knows
//! flags.
//!
//! The one design decision: what was typed and what is to be done are different types. Each
//! subcommand has a file with its clap `Args` (strings, as typed), which become a plan of paths,
//! specifications and options; nothing below `cli` ever sees a flag.
//!
//! ```text
//!   Args ──> plan ──> import ──> engine ──> report ──> Console, files
//! ```
//!
//! # Exit codes
//!
//! 0: good. 1: the answer is "no" (`Verdict::No`). 2: it could not be done, which wins over 1.
//! Every error is one line on standard error, `fraglab: FILE: message`; an error in a text trace or
//! a settings string is followed by the line it stands in and a caret. A closed pipe is no error.
//! 130: interrupted by Ctrl-C or SIGTERM, which a script must not take for an answer, even where
//! part of one is kept. `interrupt` tells what then becomes of results and files.

mod advise;
mod anonymize;
mod calibrate;
mod check;
mod compare;
mod console;
mod convert;
mod diff;
mod expectations;
mod experiment;
mod explain;
mod folders;
mod r#gen;
mod gen_ranks;
mod hardware;
mod info;
mod input;
mod interrupt;
mod job;
mod limits;
mod lint_conf;
mod list;
mod merge_ranks;
mod named;
mod output;
mod plan;
mod plan_chunks;
mod progress;
mod python;
mod report_dir;
mod run;
mod setup;
mod verify;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

use console::{ColorWhen, Console};

/// How sizes are written, for the long help.
const SIZES_HELP: &str = "\
Sizes are plain bytes or numbers with a unit: KiB, MiB, GiB, TiB (powers of 1024; K, M, G, T for \
short) or KB, MB, GB, TB (powers of 1000). Fractions are fine: 1.5GiB.";

const AFTER_HELP: &str = "\
Examples:
  fraglab run --trace snapshot.pickle --alloc caching,native
      what PyTorch's allocator would reserve, and what one device malloc per tensor would
  fraglab explain oom.txt
      whether an out-of-memory message, or a snapshot, is about fragmentation, and what would help
  fraglab advise snapshot.pickle
      the PYTORCH_CUDA_ALLOC_CONF line to paste, what it saves and what it costs
  fraglab compare --trace snapshot.pickle
      every allocator side by side, and the smallest device on which each completes
  fraglab check --baseline traces/baseline.json
      in CI: fails if a figure of these traces grew
  fraglab diff before.pickle after.pickle
      which call sites and phases explain the difference between two runs
  fraglab plan snapshot.pickle -o plan.json
      where every block would lie if all lives were known ahead
  fraglab verify snapshot.pickle
      whether the simulated allocator does exactly what the recorded one did
  fraglab gen job.toml -o job.json.zst
      the trace of a job that nobody has run yet
  fraglab info snapshot.pickle
      what is in a file
  fraglab info --all ranks/
      a table of every trace in a folder, and which of them are alike
  fraglab python > fraglab_torch.py
      the file that a PyTorch job imports to record itself
  fraglab lint-conf max_split_size_mb:128,expandable_segments:True
      what a PYTORCH_CUDA_ALLOC_CONF string does, and its traps

Exit codes: 0 good, 1 the answer is \"no\" (out of memory, a mismatch), 2 it could not be done, 130 \
interrupted by Ctrl-C or SIGTERM: commands that take long then keep what is done, marked as partial, \
in files of their own (results.partial.json for results.json); Ctrl-C again ends at once.";

/// Replays recorded LLM jobs through interchangeable GPU memory allocators and says how much memory
/// each would have reserved, where the fragmentation comes from and what it costs in time.
#[derive(Debug, Parser)]
#[command(name = "fraglab", version, after_help = AFTER_HELP, max_term_width = 100)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
struct Cli {
    /// When to colour: on a terminal and without NO_COLOR, always, or never
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value = "auto")]
    #[arg(help_heading = "Global options")]
    color: ColorWhen,

    /// Threads to work on; results are the same on any number
    ///
    /// By default one per core. The event rate (events a second) is measured while the other cells
    /// run: use --threads 1 for undisturbed ones.
    #[arg(long, global = true, value_name = "N", help_heading = "Global options")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    #[command(flatten)]
    limits: limits::Args,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replay traces through allocators and show what each reserves
    Run(run::Args),
    /// Show allocators side by side, and the smallest device on which each completes
    Compare(compare::Args),
    /// Tell whether running out of memory was fragmentation, which kind, and what would help
    Explain(explain::Args),
    /// Search the settings of PyTorch's allocator that need least memory for a trace
    Advise(advise::Args),
    /// Fail if traces need more memory than a committed baseline says: a gate for CI
    Check(check::Args),
    /// Tell what sets two recordings apart, or two results: which sites and phases explain it
    Diff(diff::Args),
    /// Run every cell of a description, and write results, figures and a report
    Experiment(experiment::Args),
    /// Pack a trace's blocks or a CSV's buffers ahead of time, and tell how far from the best
    Plan(plan::Args),
    /// Tell which chunk size suits a model on a machine, for PatrickStar's manager
    PlanChunks(plan_chunks::Args),
    /// Compare the simulated PyTorch allocator with what a recording's real one did
    Verify(verify::Args),
    /// Print the Python file that records a PyTorch job, or runs it on one of these allocators
    Python(python::Args),
    /// Tell what is in a trace: its source, settings, history and statistics
    Info(info::Args),
    /// Make the trace of a job from a description of model, strategies and hardware
    Gen(r#gen::Args),
    /// Write a trace in another format
    Convert(convert::Args),
    /// Make one trace of several that share a device: ranks of a node, models on one GPU
    MergeRanks(merge_ranks::Args),
    /// Write a trace without what tells whose it is, to attach it to a public issue
    Anonymize(anonymize::Args),
    /// Measure what device calls cost on a GPU, as a profile; or show a profile
    Calibrate(calibrate::Args),
    /// Tell what a settings string of PyTorch's allocator does, and its traps
    LintConf(lint_conf::Args),
    /// List the allocators with their parameters, the cost profiles and the trace formats
    List(list::Args),
}

/// How a command ended, in rising weight: the heaviest of several decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// Good.
    Good,
    /// The answer is "no".
    No,
    /// Something could not be done; the errors are already told.
    Failed,
    /// Ctrl-C came before all was done; what is missing is already told.
    Interrupted,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        ExitCode::from(match verdict {
            Verdict::Good => 0,
            Verdict::No => 1,
            Verdict::Failed => 2,
            Verdict::Interrupted => interrupt::EXIT_CODE,
        })
    }
}

/// Runs the program on the arguments of this process: parse, run, exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let console = Console::new(cli.color);
    if let Err(error) = interrupt::watch() {
        console.note(&format!("fraglab: warning: Ctrl-C will end the program at once: {error}"));
    }
    match execute(cli, &console) {
        Ok(verdict) => verdict.into(),
        // Ctrl-C ends a whole pipe, its readers first.
        Err(error) if interrupt::is_asked() && console::is_closed_pipe(&error) => {
            Verdict::Interrupted.into()
        }
        Err(error) if console::is_closed_pipe(&error) => Verdict::Good.into(),
        Err(error) if interrupt::is_interrupt(&error) => {
            interrupt::tell_how_far(&error, &console);
            console.note("fraglab: interrupted: nothing is kept");
            Verdict::Interrupted.into()
        }
        Err(error) => {
            console.error(&error);
            Verdict::Failed.into()
        }
    }
}

fn execute(cli: Cli, console: &Console) -> anyhow::Result<Verdict> {
    if let Some(threads) = cli.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(usize::from(threads))
            .build_global()
            .context("cannot start the threads")?;
    }
    limits::hold(&cli.limits, *console).context("cannot watch the memory")?;
    match cli.command {
        Command::Run(args) => run::execute(args, console),
        Command::Compare(args) => compare::execute(args, console),
        Command::Advise(args) => advise::execute(args, console),
        Command::Calibrate(args) => calibrate::execute(&args, console),
        Command::Check(args) => check::execute(args, console),
        Command::Plan(args) => plan::execute(args, console),
        Command::PlanChunks(args) => plan_chunks::execute(&args, console),
        Command::Verify(args) => verify::execute(&args, console),
        Command::Info(args) => info::execute(&args, console),
        Command::Explain(args) => explain::execute(&args, console),
        Command::Gen(args) => r#gen::execute(&args, console),
        Command::Convert(args) => convert::execute(&args, console),
        Command::MergeRanks(args) => merge_ranks::execute(&args, console),
        Command::Experiment(args) => experiment::execute(&args, console),
        Command::Anonymize(args) => anonymize::execute(&args, console),
        Command::Python(args) => python::execute(&args, console),
        Command::LintConf(args) => lint_conf::execute(&args, console),
        Command::Diff(args) => diff::execute(args, console),
        Command::List(args) => list::execute(&args, console),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }

    #[test]
    fn could_not_be_done_wins_over_no() {
        assert_eq!(Verdict::No.max(Verdict::Failed), Verdict::Failed);
        assert_eq!(Verdict::Good.max(Verdict::No), Verdict::No);
    }
}
