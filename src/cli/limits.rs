//! `--max-events` and `--max-memory`: what every command takes at most.
//!
//! Readers look at both while they read, and name the file. Everything else that may make much out
//! of little (a description, a replay, a page) is watched by a thread, which ends the program with
//! one line before the system ends it with none. Files that it was writing are then gone.

use std::sync::OnceLock;
use std::time::Duration;

use super::console::Console;
use crate::import::ReadOptions;
use crate::trace::{
    EVENTS_MAX, Limits, OverLimit, abandon_part_files, memory_bytes_default, resident_bytes,
};
use crate::units::{Bytes, MIB, whole_number};

/// Time between two looks at the memory of the process.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);
/// Exit code of what could not be done.
const EXIT_CODE: i32 = 2;

static LIMITS: OnceLock<Limits> = OnceLock::new();

/// The flags.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Most events of a trace that is read or made, as in 400000000 or 4e8
    ///
    /// By default 200 million: with their blocks they take about 10 GB. No trace has more than
    /// 4294967295.
    #[arg(long, global = true, value_name = "N", help_heading = "Global options")]
    #[arg(value_parser = parse_events)]
    max_events: Option<u64>,

    /// Most memory of this process, as in 16GiB
    ///
    /// By default 80 % of what the machine, and the control group that the program runs in, have
    /// left when it starts. What needs more ends with one line and exit code 2. Only Linux tells
    /// it; elsewhere memory is not watched.
    #[arg(long, global = true, value_name = "SIZE", help_heading = "Global options")]
    max_memory: Option<Bytes>,
}

fn parse_events(text: &str) -> Result<u64, String> {
    let events = whole_number(&text.replace(['_', ','], "")).filter(|&events| events > 0);
    events.filter(|&events| events <= EVENTS_MAX).ok_or_else(|| {
        format!("expected a whole number from 1 to {EVENTS_MAX}, as in 400000000 or 4e8")
    })
}

/// Makes the flags hold from now on, and begins to watch the memory.
///
/// # Errors
/// If no thread can be started.
pub(super) fn hold(args: &Args, console: Console) -> std::io::Result<()> {
    let default = Limits::default();
    let limits = Limits {
        events_max: args.max_events.unwrap_or(default.events_max),
        memory_bytes_max: args.max_memory.map(|size| size.0).or_else(memory_bytes_default),
    };
    if let Some(bytes_max) = limits.memory_bytes_max {
        let watch = move || watch_memory(bytes_max, console);
        std::thread::Builder::new().name("memory".to_owned()).spawn(watch)?;
    }
    LIMITS.get_or_init(|| limits);
    Ok(())
}

/// What is taken at most.
pub(super) fn limits() -> Limits {
    LIMITS.get().cloned().unwrap_or_default()
}

/// How to read within these limits.
pub(super) fn read_options() -> ReadOptions {
    ReadOptions { limits: limits(), ..ReadOptions::default() }
}

/// Ends the program when it has grown beyond its memory: a little later than readers do, which can
/// say of which file.
fn watch_memory(bytes_max: u64, console: Console) {
    let end_bytes = bytes_max.saturating_add(bytes_max / 16).saturating_add(16 * MIB);
    while resident_bytes().is_some_and(|bytes| bytes <= end_bytes) {
        std::thread::sleep(WATCH_INTERVAL);
    }
    if resident_bytes().is_some() {
        console.error(&OverLimit::Memory { bytes_max }.into());
        abandon_part_files();
        std::process::exit(EXIT_CODE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_numbers_that_ids_can_count() {
        assert_eq!(parse_events("4e8"), Ok(400_000_000));
        assert_eq!(parse_events("200,000,000"), Ok(200_000_000));
        assert_eq!(parse_events("4294967295"), Ok(EVENTS_MAX));
        for wrong in ["0", "-1", "1.5", "4294967296", "1e30", "many", ""] {
            assert!(parse_events(wrong).is_err(), "{wrong}");
        }
    }
}
