//! `explain` for traces: replays them, and replays what might have helped.

use anyhow::Context as _;

use super::Args;
use crate::cli::Verdict;
use crate::cli::console::Console;
use crate::cli::input;
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::engine::RunOptions;
use crate::experiment::explain::explain;
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::text;
use crate::trace::Input;
use crate::units::counted;

/// Explains a trace that is opened and not yet read; `args.file` names it.
///
/// # Errors
/// If it cannot be read or replayed, or an output cannot be written.
pub(super) fn execute(
    args: &Args,
    input: Input,
    progress: Progress,
    console: &Console,
) -> anyhow::Result<Verdict> {
    let reading =
        ReadOptions { limit_is_told: args.setup.has_limit(), ..progress.read_options(args.gpu) };
    let imported = input::read_opened(&args.file, input, &reading)?;
    drop(progress);
    if !args.quiet {
        for warning in &imported.warnings {
            console.warn(&args.file, warning);
        }
    }
    let events = imported.trace.events.len() as u64;
    if let Some(event) = args.at.filter(|&event| event >= events) {
        anyhow::bail!(
            "--at {event}: {} has {}: expected an index below that",
            args.file.display(),
            counted(events, "event")
        );
    }
    let options = RunOptions {
        capacity_bytes: args.capacity.map(|size| size.0),
        ..args.setup.clone().options(&[])?
    };
    let bar = Progress::over_replays(args.quiet);
    let explanation = explain(&imported.trace, &options, args.at, &|done, all| bar.at(done, all))
        .with_context(|| args.file.display().to_string())?;
    drop(bar);
    if let Some(path) = &args.json {
        output::save_text(path, &json::explanation(&explanation)?, console)?;
    }
    if args.shows_text() {
        console.print(&text::explain(&explanation, args.full, console.style()))?;
    }
    Ok(Verdict::Good)
}
