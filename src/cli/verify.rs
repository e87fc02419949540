//! `fraglab verify`: does `caching` do what the recorded allocator did?

use std::path::Path;

use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::input::{self, Files};
use super::progress::Progress;
use crate::engine::{self, VerifyResult};
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::text::{self, VerifyTally};

const AFTER_HELP: &str = "\
Examples:
  fraglab verify snapshot.pickle
  fraglab verify runs/*.pickle.gz
  fraglab verify --json snapshot.pickle | jq .first_difference

A file NAME.truth.json beside NAME.pickle supplies what a snapshot lacks: memory limit, device \
total, final statistics.

Exit codes: 0 every file is reproduced exactly, 1 some file differs, 2 some file could not be read \
or compared (the others are verified all the same).";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: Files,
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
    let mut verdict = Verdict::Good;
    let mut tally = VerifyTally::default();
    let mut results = Vec::new();
    for (path, verified) in args.files.traces.iter().zip(verify_all(args)) {
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
            Err(error) => {
                console.error(&error);
                tally.unreadable += 1;
                verdict = Verdict::Failed;
            }
        }
    }
    if !args.files.json {
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
        console.print(&json::one_or_many(&results, args.files.traces.len() == 1)?)?;
    }
    Ok(verdict)
}

fn verify_all(args: &Args) -> Vec<anyhow::Result<Verified>> {
    let progress = Progress::over(&args.files.traces, false);
    let options = progress.read_options(args.files.gpu);
    let verified = args.files.traces.par_iter().map(|path| {
        let verified = verify(path, &options);
        progress.file_done();
        verified
    });
    verified.collect()
}

fn verify(path: &Path, options: &ReadOptions) -> anyhow::Result<Verified> {
    let imported = input::read(path, options)?;
    let mut result = engine::verify(&imported.trace)
        .map_err(|error| anyhow::Error::msg(input::located(path, &error)))?;
    result.file = path.display().to_string();
    Ok(Verified { result, warnings: imported.warnings })
}
