//! `fraglab anonymize`: a trace that can be shown to strangers.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::Verdict;
use super::console::Console;
use super::convert::{self, InOut};
use super::input::{self, is_stdio};
use super::output;
use super::progress::Progress;
use crate::alloc::caching::{Circumstances, TorchVersion, lint};
use crate::report::json;
use crate::report::text;
use crate::trace::{AnonymizeOptions, Anonymized, Trace, anonymize};

const AFTER_HELP: &str = "\
Examples:
  fraglab anonymize snapshot.pickle for-the-issue.json.gz
  fraglab anonymize snapshot.pickle - --to text | less
  fraglab anonymize --keep-phases --keep-times job.json job.parquet

Gone are call sites, names, the date and the index of the GPU. Words of phases and modules are \
renamed, but for `stepN`, numbers and what every job has (forward, backward, optimizer, ...); times \
and streams are renumbered in their order. Sizes, order, settings, GPU model and version stay: \
every allocator decides as before, and `fraglab verify` finds the same.

Exit codes: 0 good, 2 it could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: InOut,

    /// Give the trace a name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Keep the times between events
    #[arg(long)]
    keep_times: bool,

    /// Keep the names of phases
    #[arg(long)]
    keep_phases: bool,

    /// Drop what the recorded allocator did: addresses, segments, statistics
    ///
    /// `fraglab verify` then has nothing to compare. Addresses tell only where the driver put
    /// things in one process.
    #[arg(long)]
    drop_recording: bool,

    /// Write what is gone as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

/// The JSON.
#[derive(Serialize)]
struct Report<'a> {
    file: String,
    output: String,
    gone: &'a Anonymized,
}

/// Reads one trace and writes what may be shown of it.
///
/// # Errors
/// If it cannot be read or written, or an output is the input.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    convert::check_format(&args.files.output, args.files.to)?;
    let outputs = [Some(args.files.output.as_path()), args.json.as_deref()];
    output::check_places(std::slice::from_ref(&args.files.input), outputs.into_iter().flatten())?;
    let mut imported = {
        let progress = Progress::over(std::slice::from_ref(&args.files.input), args.quiet);
        input::read(&args.files.input, &progress.read_options(args.files.gpu))?
    };
    if !args.quiet {
        for warning in &imported.warnings {
            console.warn(&args.files.input, warning);
        }
    }
    let options = AnonymizeOptions {
        keep_times: args.keep_times,
        keep_phases: args.keep_phases,
        drop_recording: args.drop_recording,
    };
    let found = anonymize(&mut imported.trace, options);
    drop_unreadable_settings(&mut imported.trace, &args.files.input, console);
    if let Some(name) = &args.name {
        imported.trace.header.name.clone_from(name);
    }
    if args.quiet {
        convert::put_quietly(&imported.trace, &args.files.output, args.files.to, None)?;
    } else {
        convert::put(&imported.trace, &args.files.output, args.files.to, None, console)?;
    }
    tell(args, &found, &imported.trace, console)?;
    Ok(Verdict::Good)
}

/// Empties settings strings that PyTorch would refuse: nobody knows what such words say.
fn drop_unreadable_settings(trace: &mut Trace, file: &Path, console: &Console) {
    let versions = ["2.11", "2.12"].map(|version| version.parse::<TorchVersion>());
    let is_read = |text: &String| {
        versions.iter().flatten().any(|&version| {
            lint(text, &Circumstances { version, ..Circumstances::default() }).is_ok()
        })
    };
    let changes = trace.settings_changes.iter_mut();
    for text in trace.header.settings.iter_mut().chain(changes).filter(|text| !is_read(text)) {
        text.clear();
        console.warn(file, "a settings string that PyTorch would refuse is left empty");
    }
}

/// Tells what is gone, where standard output is not taken.
fn tell(args: &Args, found: &Anonymized, trace: &Trace, console: &Console) -> anyhow::Result<()> {
    let file = args.files.input.display().to_string();
    if let Some(path) = &args.json {
        let output = args.files.output.display().to_string();
        let report = Report { file: file.clone(), output, gone: found };
        output::save_text(path, &json::pretty(&report)?, console)?;
    }
    let taken = is_stdio(&args.files.output) || args.json.as_deref().is_some_and(is_stdio);
    if !args.quiet && !taken {
        console.print(&text::anonymized(&file, found, trace, console.style()))?;
    }
    Ok(())
}
