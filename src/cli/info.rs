//! `fraglab info`: what is in a trace.

use std::path::Path;

use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::input::{self, Files, ReadFailure};
use super::progress::Progress;
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::text::{self, FileFacts};

const AFTER_HELP: &str = "\
Examples:
  fraglab info snapshot.pickle
  fraglab info --json runs/*.pickle.gz | jq '.[] | {file, events: .stats.events}'
  zcat job.csv.gz | fraglab info -

Exit codes: 0 good, 2 a file could not be read (the others are told all the same).";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: Files,
}

/// Tells about every trace that can be read.
///
/// # Errors
/// If standard output cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    input::check_stdin_once(&args.files.traces)?;
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
