//! `fraglab advise`: the settings of PyTorch's allocator that a job should have had.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;

use super::Verdict;
use super::console::Console;
use super::input;
use super::interrupt::{self, partial_path};
use super::output;
use super::progress::Progress;
use super::setup::{self, ReadArgs, SetupArgs, parse_size};
use crate::alloc::spec::AllocSpec;
use crate::engine::{CapacitySearch, Prepared, RunOptions};
use crate::experiment::advise::{Advice, AdviceRequest, Goal, advise};
use crate::experiment::settings::{SettingsLine, Trial};
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::text::{self, Warning};
use crate::trace::{Op, Trace};
use crate::units::{Bytes, counted};

const AFTER_HELP: &str = "\
Examples:
  fraglab advise snapshot.pickle
      the line to paste, what it saves and what it costs in device calls
  fraglab advise snapshot.pickle --capacity 40GiB
      settings with which the job runs on a smaller card
  fraglab advise snapshot.pickle --limit 55GiB --for retries
  fraglab advise snapshot.pickle --for capacity --full
  fraglab advise snapshot.pickle --json - | jq -r .advised_settings

Tried is every value of every option alone that can matter on this trace, then the combinations of \
those that helped; what is known to grow without bound is left out. Of settings that are as good as \
the best to half a percent the plainest is advised. Everything is replayed, nothing estimated: the \
trace must stand for the job.

Exit codes: 0 advised (also if nothing is better), 2 it could not be done, 130 interrupted: the \
advice is then the best of what was tried, and marked partial.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// A trace of any format, told by content; `-` is standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// What is to be least
    #[arg(long = "for", value_enum, value_name = "GOAL", default_value = "reserved")]
    goal: GoalArg,

    /// Physical memory of the device, as in 80GiB; by default the trace's
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<Bytes>,

    #[command(flatten)]
    setup: SetupArgs,

    /// Look for no smallest capacities, which take most of the time
    #[arg(long)]
    no_capacity: bool,

    /// Name no other allocators
    #[arg(long)]
    no_what_ifs: bool,

    /// Show every settings string that was tried
    #[arg(long)]
    full: bool,

    /// Write JSON, `-` for standard output and nothing else there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    #[command(flatten)]
    reading: ReadArgs,
}

/// Goals as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GoalArg {
    /// The reserved peak
    Reserved,
    /// Retries: the cache given back because the device or the limit refused
    Retries,
    /// The smallest device on which every request is met
    Capacity,
}

impl From<GoalArg> for Goal {
    fn from(goal: GoalArg) -> Goal {
        match goal {
            GoalArg::Reserved => Goal::Reserved,
            GoalArg::Retries => Goal::Retries,
            GoalArg::Capacity => Goal::Capacity,
        }
    }
}

/// Searches and advises.
///
/// # Errors
/// If the trace cannot be read or replayed, or an output cannot be written.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    anyhow::ensure!(
        args.goal != GoalArg::Capacity || !args.no_capacity,
        "--for capacity needs the smallest capacities: leave out --no-capacity"
    );
    let inputs = std::slice::from_ref(&args.trace);
    output::check_places(inputs, args.json.as_deref().into_iter())?;
    let options = RunOptions {
        capacity_bytes: args.capacity.map(|size| size.0),
        stop: interrupt::stop(),
        ..args.setup.clone().options(&[])?
    };
    setup::tell_doubts(options.capacity_bytes, options.limit_bytes, console);
    let quiet = args.reading.quiet;
    let reading = Progress::over(inputs, quiet);
    let read_options = ReadOptions {
        limit_is_told: options.limit_bytes.is_some(),
        ..reading.read_options(args.reading.gpu)
    };
    let imported = input::read(&args.trace, &read_options)?;
    drop(reading);
    if !quiet {
        for warning in &imported.warnings {
            console.warn(&args.trace, warning);
        }
    }
    let trace = &imported.trace;
    let request = AdviceRequest {
        goal: args.goal.into(),
        what_ifs: if args.no_what_ifs { Vec::new() } else { what_ifs(trace)? },
        capacity: (!args.no_capacity).then(CapacitySearch::default),
    };
    let bar = Progress::over_replays(quiet);
    let advice = advise(trace, &options, &request, &|done, all| bar.at(done, all))
        .with_context(|| args.trace.display().to_string())?;
    drop(bar);
    let prepared = Prepared::new(trace, &options);
    let json = args.json.as_ref();
    let json = json.map(|path| if advice.partial { partial_path(path) } else { path.clone() });
    if let Some(path) = &json {
        output::save_text(path, &json::advice(prepared.summary(), &advice)?, console)?;
    }
    let json_on_stdout = args.json.as_deref().is_some_and(input::is_stdio);
    if !quiet && !json_on_stdout {
        print(&args, trace, &options, &advice, console)?;
    }
    if advice.partial {
        let kept = json.filter(|path| !input::is_stdio(path));
        let kept = kept.map_or_else(String::new, |path| format!(", kept in {}", path.display()));
        console.note(&format!(
            "fraglab: interrupted after {}: the advice is the best of those{kept}; the same command \
             begins anew",
            counted(advice.replays, "replay")
        ));
        return Ok(Verdict::Interrupted);
    }
    interrupt::remove_partial(inputs, args.json.as_deref())?;
    Ok(Verdict::Good)
}

fn print(
    args: &Args,
    trace: &Trace,
    options: &RunOptions,
    advice: &Advice,
    console: &Console,
) -> anyhow::Result<()> {
    let trial = Trial::new(trace, options)?;
    let advised = advice.advised.and_then(|index| advice.tried.get(index));
    let line = advised.map(|tried| SettingsLine::parse(&tried.settings, trial.version));
    let traps = line.transpose()?.map_or_else(Vec::new, |line| trial.traps(&line));
    let warnings: Vec<Warning<'_>> =
        traps.iter().map(|trap| Warning { text: &trap.text, address: trap.address }).collect();
    let prepared = Prepared::new(trace, options);
    let text = text::advise(prepared.summary(), advice, &warnings, args.full, console.style());
    console.print(&text)?;
    Ok(())
}

/// Other allocators that can run on this trace.
fn what_ifs(trace: &Trace) -> anyhow::Result<Vec<AllocSpec>> {
    let mut names = vec!["stitch", "stitch+policy=best", "planned"];
    if trace.events.iter().any(|event| matches!(event.op, Op::Access(_))) {
        names.push("chunk");
    }
    let specs = names.into_iter().map(|name| name.parse::<AllocSpec>());
    Ok(specs.collect::<Result<_, _>>()?)
}
