//! `fraglab verify`: does `caching` do what the recorded allocator did?

use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::Verdict;
use super::console::Console;
use super::input::{self, Files};
use super::interrupt::{self, Partial};
use super::progress::Progress;
use crate::device::CostProfile;
use crate::engine::{self, PredictError, PredictResult, RunOptions, VerifyResult};
use crate::import::{Imported, ReadOptions};
use crate::report::json;
use crate::report::text::{self, VerifyTally};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab verify snapshot.pickle
  fraglab verify runs/*.pickle.gz
  fraglab verify --json snapshot.pickle | jq .first_difference
  fraglab verify --limit 60GiB snapshot.pickle
  fraglab verify --predict runs/*.pickle.gz
      how well a run without anything of the recorded allocator foretells it

A file NAME.truth.json beside NAME.pickle supplies what a snapshot lacks: memory limit, device \
total, final statistics. Without it the limit is taken from refusals and retries and the total from \
the distance of reservations, as far as there are any; --limit and --capacity give both.

JSON fields: file, exact, events, segment_events, blocks, refusals, statistics (how many of each were \
compared), ambiguous_groups, version (of the torch that recorded), rules (whose were applied), \
history_share (0 to 1), first_difference {event_index, expected, got}, possible_causes, compared, \
not_compared, taken_from_recording.

Exit codes: 0 every file is reproduced exactly (with --predict: in its segment events), 1 some \
file differs, 2 some file could not be read or compared (the others are verified all the same), 130 \
interrupted: what was verified until then is shown as partial.";

const PREDICT_HELP: &str = "\
Predict from the program's acts alone: no addresses and no refusals from the recording

Replays the requests, streams, frees, calls of empty_cache and settings as `run` does, on a \
simulated device of the recorded size with the model of a driver's addresses, and compares with \
the recording: whether all segment events are the same, how many blocks lie in the same segment at \
the same offset, the peaks and the refusals. A file agrees if its segment events do. JSON fields: \
file, identical, events, segment_events, segment_events_predicted, first_difference {event_index, \
segment_event, phase, expected, got}, blocks, blocks_placed_same, same_placement (0 to 1), \
refusals, refusals_predicted, refusals_identical, recorded and predicted {requested_bytes_peak, \
allocated_bytes_peak, active_bytes_peak, reserved_bytes_peak}, taken_from_recording.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: Files,

    /// Predict from the program's acts alone: no addresses and no refusals from the recording
    #[arg(long, long_help = PREDICT_HELP)]
    predict: bool,

    /// Memory limit of the recorded runs, as in 60GiB, where no truth file tells
    #[arg(long, value_name = "SIZE", value_parser = super::setup::parse_size)]
    limit: Option<Bytes>,

    /// Total memory of the recorded device, as in 80GiB, where no truth file tells
    #[arg(long, value_name = "SIZE", value_parser = super::setup::parse_size)]
    capacity: Option<Bytes>,
}

struct Verified {
    result: VerifyResult,
    warnings: Vec<String>,
}

/// Verifies every recording that can be read.
///
/// # Errors
/// If standard output cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    input::check_stdin_once(&args.files.traces)?;
    if args.predict {
        return predict_all(args, console);
    }
    let mut verdict = Verdict::Good;
    let mut tally = VerifyTally::default();
    let mut results = Vec::new();
    let mut cut = 0;
    for (path, verified) in args.files.traces.iter().zip(for_each_file(args, verify)) {
        match verified {
            Ok(Verified { result, warnings }) => {
                for warning in &warnings {
                    console.warn(path, warning);
                }
                if result.exact {
                    tally.exact += 1;
                } else {
                    tally.different += 1;
                    verdict = verdict.max(Verdict::No);
                }
                results.push(result);
            }
            Err(error) if interrupt::is_interrupt(&error) => {
                interrupt::tell_how_far(&error, console);
                cut += 1;
            }
            Err(error) => {
                console.error(&error);
                tally.unreadable += 1;
                verdict = Verdict::Failed;
            }
        }
    }
    let partial = partial(args, cut);
    if !args.files.json {
        if let Some(partial) = partial {
            console.print(&partial.heading(console))?;
        }
        let mut out: String =
            results.iter().map(|result| text::verify(result, console.style())).collect();
        out.push_str(&text::verify_summary(tally, console.style()));
        // The same for every file that was compared without a difference.
        let complete = results.iter().find(|result| result.exact && result.statistics > 0);
        if let Some(result) = complete.or(results.first()) {
            out.push_str(&text::verify_legend(result));
        }
        console.print(&out)?;
    } else if !results.is_empty() {
        console.print(&shown_json(args, &results, partial)?)?;
    }
    Ok(told(partial, !results.is_empty(), console).unwrap_or(verdict))
}

/// What was done before Ctrl-C cut some files off.
fn partial(args: &Args, cut: usize) -> Option<Partial> {
    let all = args.files.traces.len();
    (cut > 0).then_some(Partial { done: all - cut, all, part: "file" })
}

/// Tells of an interrupt, if there was one.
fn told(partial: Option<Partial>, is_kept: bool, console: &Console) -> Option<Verdict> {
    partial?.tell(is_kept, [], console);
    Some(Verdict::Interrupted)
}

fn shown_json<T: Serialize>(
    args: &Args,
    results: &[T],
    partial: Option<Partial>,
) -> serde_json::Result<String> {
    json::all_or_partial(results, args.files.traces.len() == 1, partial.is_some())
}

/// Predicts every recording that can be read.
fn predict_all(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    // Costs bear on no decision.
    let options =
        RunOptions { stop: interrupt::stop(), ..RunOptions::new(CostProfile::shipped("h200")?) };
    let mut verdict = Verdict::Good;
    let mut results = Vec::new();
    let (mut unreadable, mut cut) = (0, 0);
    for (path, predicted) in args
        .files
        .traces
        .iter()
        .zip(for_each_file(args, |path, imported| predict(path, imported, &options)))
    {
        match predicted {
            Ok((result, warnings)) => {
                for warning in &warnings {
                    console.warn(path, warning);
                }
                if !result.identical {
                    verdict = verdict.max(Verdict::No);
                }
                results.push(result);
            }
            Err(error) if interrupt::is_interrupt(&error) => {
                interrupt::tell_how_far(&error, console);
                cut += 1;
            }
            Err(error) => {
                console.error(&error);
                unreadable += 1;
                verdict = Verdict::Failed;
            }
        }
    }
    let partial = partial(args, cut);
    if !args.files.json {
        if let Some(partial) = partial {
            console.print(&partial.heading(console))?;
        }
        console.print(&text::predictions(&results, unreadable, console.style()))?;
    } else if !results.is_empty() {
        console.print(&shown_json(args, &results, partial)?)?;
    }
    Ok(told(partial, !results.is_empty(), console).unwrap_or(verdict))
}

fn for_each_file<T: Send>(
    args: &Args,
    answer: impl Fn(&Path, Imported) -> anyhow::Result<T> + Sync,
) -> Vec<anyhow::Result<T>> {
    let progress = Progress::over(&args.files.traces, false);
    let options = ReadOptions { stop: interrupt::stop(), ..progress.read_options(args.files.gpu) };
    let answers = args.files.traces.par_iter().map(|path| {
        let answer = read(path, args, &options).and_then(|imported| answer(path, imported));
        progress.file_done();
        answer
    });
    answers.collect()
}

/// Reads a recording, with what was typed in place of what it does not know.
fn read(path: &Path, args: &Args, options: &ReadOptions) -> anyhow::Result<Imported> {
    let mut imported = input::read(path, options)?;
    let header = &mut imported.trace.header;
    if let Some(limit) = args.limit {
        header.limit_bytes = Some(limit.0);
    }
    if let Some(capacity) = args.capacity {
        header.device.total_bytes = Some(capacity.0);
        header.device.capacity_bytes = None;
    }
    Ok(imported)
}

fn predict(
    path: &Path,
    imported: Imported,
    options: &RunOptions,
) -> anyhow::Result<(PredictResult, Vec<String>)> {
    // Logs of blocks alone show nothing that could be foretold.
    let predicted = match imported.trace.segments_recorded() {
        Some(_) => engine::predict(&imported.trace, options),
        None => Err(PredictError::NoRecording),
    };
    let mut result = predicted.map_err(|error| {
        let message = input::located(path, &error);
        anyhow::Error::from(error).context(message)
    })?;
    result.file = path.display().to_string();
    Ok((result, imported.warnings))
}

fn verify(path: &Path, imported: Imported) -> anyhow::Result<Verified> {
    let mut result = engine::verify(&imported.trace)
        .map_err(|error| anyhow::Error::msg(input::located(path, &error)))?;
    result.file = path.display().to_string();
    Ok(Verified { result, warnings: imported.warnings })
}
