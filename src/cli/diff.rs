//! `fraglab diff`: two recordings, or two results, on one axis.

use std::io::BufRead as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use serde_json::Value;

use super::Verdict;
use super::console::Console;
use super::input::{self, is_stdio};
use super::setup::{SetupArgs, parse_size};
use super::{limits, output};
use crate::alloc::spec::AllocSpec;
use crate::engine::RunOptions;
use crate::experiment::diff::{
    DiffAt, DiffRequest, GroupBy, TraceDiff, diff_results, diff_traces, parse_results,
    usual_grouping,
};
use crate::import::{Imported, ReadOptions};
use crate::report::{json, text};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab diff before.pickle after.pickle
      peaks side by side, and which call sites explain the difference in live memory
  fraglab diff job.pickle job.expandable.pickle
      the same job with two settings: what each allocator made of the same requests
  fraglab diff rank0.pickle rank1.pickle --by phase --at reserved
  fraglab diff a.json.zst b.json.zst --at 1200,1350 --by size --full
  fraglab run --trace job.json --json a.json; ...; fraglab diff a.json b.json
      two results, figure by figure, largest relative change first

A and B are both traces of any format or both results of `run --json` or `compare --json`, told \
by content. Traces are replayed through PyTorch's allocator with the settings that each was \
recorded with, or through --alloc. Live blocks are those that the program asked for and has not \
freed, by their sizes as asked for; groups add up to all of them. Phases are named as seen from \
the event: `this step: forward`, `an earlier step: optimizer`.

JSON of traces: kind (traces), a and b {name, source, settings, events, allocs, \
requested_bytes_peak, allocator, capacity_bytes, outcome, peaks, fragmentation, split, \
alloc_retries, device_calls, at_event, at_phase}, same_requests, same_sizes, at, live_a, live_b {blocks, \
bytes}, tables {by, groups {group, a, b, delta_bytes}}, steps {step, a, b}, sizes_only_a, \
sizes_only_b {size_bytes, allocs}. Of results: kind (results), cells {a, b, same, figures \
{figure, a, b, delta, relative}}, only_a, only_b.

Exit codes: 0 done, whatever differs; 2 something could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The first trace or result, of any format; `-` is standard input
    #[arg(value_name = "A")]
    a: PathBuf,

    /// The second
    #[arg(value_name = "B")]
    b: PathBuf,

    /// Replay both through this allocator [default: caching]
    #[arg(long, value_name = "SPEC")]
    alloc: Option<AllocSpec>,

    /// Physical memory of the simulated device, as in 80GiB; by default each trace's own
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<Bytes>,

    #[command(flatten)]
    setup: SetupArgs,

    /// How to group live blocks, with commas [default: site,phase; without sites phase-and-size]
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    by: Vec<By>,

    /// Where to compare live blocks: `peak` (of what is requested), `reserved` (the reserved peak),
    /// an event, or an event of A and one of B as in 1200,1350
    #[arg(long, value_name = "WHERE", default_value = "peak", value_parser = parse_at)]
    at: DiffAt,

    /// Rows of a table that are shown
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,

    /// Show every row, and live blocks by every criterion
    #[arg(long)]
    full: bool,

    /// Write the difference as JSON, `-` for standard output and nothing else there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// Print no tables or warnings; what failed still shows
    #[arg(long, short)]
    quiet: bool,
}

/// Criteria as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Innermost stack frame outside of PyTorch
    Site,
    /// Phase of the alloc
    Phase,
    /// What blocks hold, where the trace tells
    Role,
    /// Size, from a power of two to the next
    Size,
    /// Phase and size together
    PhaseAndSize,
}

impl From<By> for GroupBy {
    fn from(by: By) -> Self {
        match by {
            By::Site => GroupBy::Site,
            By::Phase => GroupBy::Phase,
            By::Role => GroupBy::Role,
            By::Size => GroupBy::Size,
            By::PhaseAndSize => GroupBy::PhaseAndSize,
        }
    }
}

fn parse_at(text: &str) -> Result<DiffAt, String> {
    let event = |text: &str| text.trim().replace('_', "").parse::<u64>().ok();
    let events = || match text.split_once(',') {
        Some((a, b)) => Some(DiffAt::Events(event(a)?, event(b)?)),
        None => event(text).map(|event| DiffAt::Events(event, event)),
    };
    match text.trim() {
        "peak" | "requested" => Ok(DiffAt::RequestedPeak),
        "reserved" => Ok(DiffAt::ReservedPeak),
        _ => events().ok_or_else(|| "expected peak, reserved, N or N,M (events)".to_owned()),
    }
}

/// What is to be done.
struct Plan {
    paths: [PathBuf; 2],
    spec: AllocSpec,
    options: RunOptions,
    reading: ReadOptions,
    at: DiffAt,
    by: Vec<GroupBy>,
    full: bool,
    top: usize,
    json: Option<PathBuf>,
    quiet: bool,
}

impl Plan {
    fn new(args: Args) -> anyhow::Result<Plan> {
        let paths = [args.a, args.b];
        input::check_stdin_once(&paths)?;
        output::check_places(&paths, args.json.as_deref().into_iter())?;
        let caching = || AllocSpec { name: "caching".to_owned(), params: Vec::new() };
        let spec = args.alloc.unwrap_or_else(caching);
        let options = RunOptions {
            capacity_bytes: args.capacity.map(|size| size.0),
            ..args.setup.options(std::slice::from_ref(&spec))?
        };
        let mut by: Vec<GroupBy> = Vec::new();
        for one in args.by.into_iter().map(GroupBy::from) {
            if !by.contains(&one) {
                by.push(one);
            }
        }
        Ok(Plan {
            paths,
            spec,
            options,
            reading: ReadOptions { gpu: args.gpu, ..limits::read_options() },
            at: args.at,
            by,
            full: args.full,
            top: if args.full { usize::MAX } else { args.top },
            json: args.json,
            quiet: args.quiet,
        })
    }
}

/// What a file holds.
enum Side {
    Trace(Box<Imported>),
    Results(Vec<Value>),
}

/// Reads both, compares and tells.
///
/// # Errors
/// If something cannot be read, replayed or written, or the two are of different kinds.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    let plan = Plan::new(args)?;
    let [path_a, path_b] = &plan.paths;
    let (a, b) = rayon::join(|| read(path_a, &plan.reading), || read(path_b, &plan.reading));
    let top = plan.top;
    let (text, json) = match (a?, b?) {
        (Side::Results(a), Side::Results(b)) => {
            let diff = diff_results(&a, &b);
            (text::diff_results(&diff, top, console.style()), json::pretty(&diff)?)
        }
        (Side::Trace(a), Side::Trace(b)) => {
            if !plan.quiet {
                for (path, side) in plan.paths.iter().zip([&a, &b]) {
                    side.warnings.iter().for_each(|warning| console.warn(path, warning));
                }
            }
            let diff = compare([&a, &b], &plan)?;
            (text::diff_traces(&diff, top, console.style()), json::pretty(&diff)?)
        }
        (Side::Trace(_), Side::Results(_)) => return Err(two_kinds(path_a, path_b)),
        (Side::Results(_), Side::Trace(_)) => return Err(two_kinds(path_b, path_a)),
    };
    if let Some(path) = &plan.json {
        output::save_text(path, &json, console)?;
    }
    if !plan.quiet && !plan.json.as_deref().is_some_and(is_stdio) {
        console.print(&text)?;
    }
    Ok(Verdict::Good)
}

fn two_kinds(trace: &Path, result: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{} is a trace and {} a result: give two traces or two results",
        trace.display(),
        result.display()
    )
}

fn compare(sides: [&Imported; 2], plan: &Plan) -> anyhow::Result<TraceDiff> {
    let traces = sides.map(|side| &side.trace);
    if let DiffAt::Events(a, b) = plan.at {
        for ((event, trace), path) in [a, b].into_iter().zip(traces).zip(&plan.paths) {
            let events = trace.events.len() as u64;
            anyhow::ensure!(
                event < events,
                "{}: has no event {event}: expected one from 0 to {}",
                path.display(),
                events.saturating_sub(1)
            );
        }
    }
    let mut by = plan.by.clone();
    if by.is_empty() {
        by = usual_grouping(traces);
    }
    if plan.full {
        for more in [GroupBy::Phase, GroupBy::Role, GroupBy::Size] {
            if !by.contains(&more) {
                by.push(more);
            }
        }
    }
    let request = DiffRequest { spec: &plan.spec, at: plan.at, by };
    let diff = diff_traces(traces, &request, &plan.options);
    let [a, b] = &plan.paths;
    diff.with_context(|| format!("{} and {}", a.display(), b.display()))
}

/// Most bytes of results, unpacked: those of hundreds of thousands of replays.
const RESULTS_BYTES_MAX: u64 = 1 << 30;

/// Reads a trace, or results: JSON whose first key is `schema_version`.
fn read(path: &Path, options: &ReadOptions) -> anyhow::Result<Side> {
    let shown = || path.display().to_string();
    let mut input = input::open(path, options)?;
    let head = input.reader.fill_buf().with_context(shown)?;
    if begins_as_results(head) {
        let expected = "results of fewer replays in a file";
        let text = input::text_of(path, &mut input.reader, RESULTS_BYTES_MAX, expected)?;
        return Ok(Side::Results(parse_results(&text).with_context(shown)?));
    }
    Ok(Side::Trace(Box::new(input::read_opened(path, input, options)?)))
}

fn begins_as_results(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    let text = text.trim_start();
    let object = text.strip_prefix('[').unwrap_or(text).trim_start();
    // An empty array is no trace either.
    let first_key = object.strip_prefix('{').map(str::trim_start);
    first_key.is_some_and(|key| key.starts_with("\"schema_version\"")) || text.starts_with("[]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_word_or_events() {
        assert_eq!(parse_at("peak"), Ok(DiffAt::RequestedPeak));
        assert_eq!(parse_at("reserved"), Ok(DiffAt::ReservedPeak));
        assert_eq!(parse_at("7"), Ok(DiffAt::Events(7, 7)));
        assert_eq!(parse_at("7, 1_000"), Ok(DiffAt::Events(7, 1000)));
        for text in ["", "soon", "1,2,3", "-1"] {
            assert!(parse_at(text).is_err(), "{text}");
        }
    }

    #[test]
    fn results_are_told_by_their_first_key() {
        assert!(begins_as_results(b"[\n  {\n    \"schema_version\": 1"));
        assert!(begins_as_results(b"{\"schema_version\": 1"));
        assert!(!begins_as_results(b"{\"fraglab_trace\": 3"));
        assert!(!begins_as_results(b"alloc a 3MiB"));
    }
}
