//! `fraglab info`: what is in a trace, or a table of many.
//!
//! With `--all` a trace is read, replayed and dropped; its facts stay. There are never more traces
//! in memory than threads.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::folders::{self, Inputs};
use super::input::{self, Files, ReadFailure};
use super::output;
use super::progress::Progress;
use crate::device::CostProfile;
use crate::engine::RunOptions;
use crate::experiment::survey::{Survey, TraceFacts, survey_rows};
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::rows::{row_objects, write_rows};
use crate::report::table::TableFormat;
use crate::report::text::{self, FileFacts, PassedOver};

const AFTER_HELP: &str = "\
Examples:
  fraglab info snapshot.pickle
  fraglab info --json runs/*.pickle.gz | jq '.[] | {file, events: .stats.events}'
  zcat job.csv.gz | fraglab info -
  fraglab info --all ranks/
      a table of every trace in a folder: events, peaks, fragmentation, which are alike
  fraglab info --all --sort reserved ranks/ other/job.json
      those that need most memory first
  fraglab info --all ranks/ --csv ranks.csv
  fraglab info --all --json ranks/ | jq -r '.[] | select(.same_as == null) | .file'
      one of each that differ

The table of --all, a row a trace: request = the most that the program had asked for and not freed; \
recorded = the most that the recorded allocator held, where the trace tells; caching = the most that \
PyTorch's allocator holds in a replay with the trace's own settings, limit and device; frag = 1 - \
request / caching, or OOM; seen = share of the run's allocs that the trace shows, if some show less \
than all; like = traces of the same letter ask for the same (names, call sites and times aside). \
The last rows are the smallest, middle and largest figure of each column.

In a folder, files are traces if their names end in .json, .parquet, .txt, .csv, .log, .pickle or \
.pkl, with .gz or .zst behind it or not, and they begin as a trace does; others are passed over and \
counted. Folders inside are not looked into without --recursive.

JSON of --all is always an array, an object a trace, with the names of the CSV's columns: file, \
file_bytes, name, source, events, allocs, streams, steps, duration_ns, history_share, \
requested_bytes_peak, recorded_reserved_bytes_peak, status (ok, oom or failed), \
reserved_bytes_peak, excess_bytes, fragmentation, fingerprint (the same for traces that ask for the \
same), same_as (the file of the first such trace; null for that one itself).

Exit codes: 0 good, 2 a file could not be read (the others are told all the same).";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: Files,

    /// A table of all traces: a row each. Folders stand for the traces in them
    #[arg(long)]
    all: bool,

    /// With --all, look into folders inside folders
    #[arg(long, requires = "all")]
    recursive: bool,

    /// With --all, by what rows are sorted: names ascend, numbers descend
    #[arg(long, value_enum, value_name = "COLUMN", default_value = "name", requires = "all")]
    sort: Sort,

    /// With --all, write the table as CSV, or as Parquet by its name
    #[arg(long, value_name = "FILE", requires = "all")]
    csv: Option<PathBuf>,
}

/// By what the rows of a table are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// In the order of the folder: names, with numbers in their own order
    Name,
    /// Number of events
    Events,
    /// Requested peak
    Requested,
    /// Reserved peak that was recorded
    Recorded,
    /// Reserved peak under caching
    Reserved,
    /// Fragmentation under caching
    Fragmentation,
    /// Share of the run that the trace shows
    History,
    /// Size of the file
    Bytes,
}

/// Tells about every trace that can be read.
///
/// # Errors
/// If an output cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    input::check_stdin_once(&args.files.traces)?;
    if args.all {
        return table(args, console);
    }
    if let Some(folder) = args.files.traces.iter().find(|path| path.is_dir()) {
        return Err(ReadFailure::of_folder(folder).into());
    }
    let mut verdict = Verdict::Good;
    let mut known = Vec::new();
    for (path, facts) in args.files.traces.iter().zip(all_facts(args)) {
        match facts {
            Ok(facts) => {
                for warning in &facts.warnings {
                    console.warn(path, warning);
                }
                known.push(facts);
            }
            Err(failure) => {
                console.error(&failure.into());
                verdict = Verdict::Failed;
            }
        }
    }
    if !args.files.json {
        let texts: Vec<String> =
            known.iter().map(|facts| text::info(facts, console.style())).collect();
        console.print(&texts.join("\n"))?;
    } else if !known.is_empty() {
        console.print(&json::one_or_many(&known, args.files.traces.len() == 1)?)?;
    }
    Ok(verdict)
}

fn all_facts(args: &Args) -> Vec<Result<FileFacts, ReadFailure>> {
    let progress = Progress::over(&args.files.traces, false);
    let options = progress.read_options(args.files.gpu);
    let facts = args.files.traces.par_iter().map(|path| {
        let facts = facts(path, &options);
        progress.file_done();
        facts
    });
    facts.collect()
}

fn facts(path: &Path, options: &ReadOptions) -> Result<FileFacts, ReadFailure> {
    let imported = input::read(path, options)?;
    let file = path.display().to_string();
    Ok(FileFacts::new(file, input::size_on_disk(path), &imported.trace, imported.warnings))
}

/// A table of all traces.
fn table(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    let format = args.csv.as_deref().map(TableFormat::from_path).transpose();
    let format = format.with_context(|| folders::shown(args.csv.as_deref()))?;
    let Inputs { traces, others, folders, unreadable } =
        folders::readable(&args.files.traces, args.recursive)?;
    output::check_places(&traces, args.csv.as_deref().into_iter())?;
    folders::tell_passed_over(&others, console);
    let mut known = Vec::new();
    let mut errors: Vec<anyhow::Error> = unreadable.into_iter().map(Into::into).collect();
    let mut warnings = Vec::new();
    for (path, found) in traces.iter().zip(survey(&traces, args.files.gpu)?) {
        let file = path.display();
        match found {
            Ok(found) => {
                warnings.extend(found.warnings.iter().map(|text| format!("{file}: {text}")));
                errors.extend(found.error.map(|error| anyhow::anyhow!("{file}: {error}")));
                known.push(found.facts);
            }
            Err(failure) => errors.push(failure.into()),
        }
    }
    folders::tell_some(
        &warnings,
        |text| console.note(&format!("fraglab: warning: {text}")),
        console,
    );
    folders::tell_some(&errors, |error| console.error(error), console);
    sort(&mut known, args.sort);
    let rows = survey_rows(&known);
    if let (Some(path), Some(format)) = (&args.csv, format) {
        output::save(path, |file| Ok(write_rows(&rows, format, file)?))?;
    }
    if args.files.json {
        console.print(&json::pretty(&row_objects(&rows))?)?;
    } else if errors.is_empty() || !known.is_empty() {
        let names = folders::short_names(known.iter().map(|facts| facts.file.as_str()));
        let passed_over = PassedOver { others: others.len() as u64, folders };
        console.print(&text::survey(&known, &names, passed_over, console.style()))?;
    }
    Ok(if errors.is_empty() { Verdict::Good } else { Verdict::Failed })
}

/// What became of a trace that could be read.
struct Found {
    facts: TraceFacts,
    warnings: Vec<String>,
    error: Option<String>,
}

fn survey(traces: &[PathBuf], gpu: Option<u32>) -> anyhow::Result<Vec<Result<Found, ReadFailure>>> {
    let survey = Survey::new(RunOptions::new(CostProfile::shipped("h200")?));
    let progress = Progress::over(traces, false);
    let options = progress.read_options(gpu);
    let found = traces.par_iter().map(|path| {
        let found = input::read(path, &options).map(|imported| {
            let (file, bytes) = (path.display().to_string(), input::size_on_disk(path));
            let (facts, error) = survey.facts(file, bytes, &imported.trace);
            let error = error.map(|error| error.to_string());
            Found { facts, warnings: imported.warnings, error }
        });
        progress.file_done();
        found
    });
    Ok(found.collect())
}

/// Rows of equal figures stay in the order of their names.
fn sort(known: &mut [TraceFacts], by: Sort) {
    fn descending(known: &mut [TraceFacts], read: impl Fn(&TraceFacts) -> Option<u64>) {
        known.sort_by_key(|facts| std::cmp::Reverse(read(facts)));
    }
    match by {
        Sort::Name => {}
        Sort::Events => descending(known, |facts| Some(facts.events)),
        Sort::Requested => descending(known, |facts| Some(facts.requested_bytes_peak)),
        Sort::Recorded => descending(known, |facts| facts.recorded_reserved_bytes_peak),
        Sort::Reserved => descending(known, |facts| Some(facts.replay?.reserved_bytes_peak)),
        Sort::Bytes => descending(known, |facts| facts.file_bytes),
        Sort::Fragmentation => known.sort_by(|one, other| {
            let read = |facts: &TraceFacts| facts.replay.map_or(-1.0, |it| it.fragmentation);
            read(other).total_cmp(&read(one))
        }),
        Sort::History => {
            known.sort_by(|one, other| other.history_share.total_cmp(&one.history_share));
        }
    }
}
