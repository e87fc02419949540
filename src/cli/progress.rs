//! Progress on a terminal, for work that takes long; silent in a pipe.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::input::size_on_disk;
use super::{interrupt, limits};
use crate::import::ReadOptions;
use crate::units::Bytes;

/// Files that together are smaller than this are done before a bar could be read.
const LONG_BYTES: u64 = 8 << 20;

/// A bar on standard error that goes away when it is dropped.
pub(super) struct Progress {
    bar: ProgressBar,
    read_bytes: Arc<AtomicU64>,
}

impl Progress {
    /// A bar over files; it shows if standard error is a terminal, `quiet` is not asked for, and
    /// the work on these files is long.
    pub(super) fn over(files: &[PathBuf], quiet: bool) -> Progress {
        let is_short = bytes_of(files) < LONG_BYTES;
        Progress::new(files, files.len(), "files", quiet || is_short)
    }

    /// A bar over the cells of a comparison, each of which is many replays; it names the newest.
    pub(super) fn over_cells(files: &[PathBuf], cells: usize, quiet: bool) -> Progress {
        Progress::new(files, cells, "cells", quiet)
    }

    /// A bar over the cells of an experiment, with the time that is left; it names the newest.
    pub(super) fn over_experiment(cells: usize, quiet: bool) -> Progress {
        let progress = Progress::new(&[], cells, "cells", quiet);
        let template = "{bar:30} {pos}/{len} cells done, {elapsed}, about {eta} left {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            progress.bar.set_style(style);
        }
        progress
    }

    /// A bar over replays, the number of which may rise while they go on.
    pub(super) fn over_replays(quiet: bool) -> Progress {
        Progress::new(&[], 0, "replays", quiet)
    }

    /// A bar over traces that are made.
    pub(super) fn over_traces(count: usize) -> Progress {
        Progress::new(&[], count, "traces", false)
    }

    /// A bar over the events of replays that take as long as a real GPU does.
    pub(super) fn over_events(quiet: bool) -> Progress {
        Progress::new(&[], 0, "events", quiet)
    }

    /// What the bar is over now.
    pub(super) fn name(&self, newest: String) {
        self.bar.set_message(newest);
    }

    /// A bar over rounds of measuring, and what is measured.
    pub(super) fn over_rounds(quiet: bool, what: String) -> Progress {
        let progress = Progress::new(&[], 0, "rounds", quiet);
        progress.bar.set_message(what);
        progress
    }

    /// So many replays are done, of those that are known to come.
    pub(super) fn at(&self, done: u64, all: u64) {
        self.bar.set_length(all);
        self.bar.set_position(done);
    }

    /// A sign of life for work whose end is not known, on a terminal.
    pub(super) fn spinner(what: &'static str) -> Progress {
        let bar = ProgressBar::new_spinner().with_message(what);
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress { bar, read_bytes: Arc::default() }
    }

    fn new(files: &[PathBuf], count: usize, unit: &'static str, hidden: bool) -> Progress {
        let target = if hidden {
            ProgressDrawTarget::hidden()
        } else {
            // Hides itself where standard error is no terminal.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(count as u64), target);
        let read_bytes = Arc::new(AtomicU64::new(0));
        if !bar.is_hidden() {
            bar.set_style(style(Arc::clone(&read_bytes), bytes_of(files), unit));
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress { bar, read_bytes }
    }

    /// How to read these files so that the bar moves while one is read.
    pub(super) fn read_options(&self, gpu: Option<u32>) -> ReadOptions {
        let counter = (!self.bar.is_hidden()).then(|| Arc::clone(&self.read_bytes));
        ReadOptions { gpu, progress: counter, stop: interrupt::wish(), ..limits::read_options() }
    }

    /// One file is done.
    pub(super) fn file_done(&self) {
        self.bar.inc(1);
    }

    /// Cells are done, or will never be.
    pub(super) fn cells_done(&self, count: usize, newest: String) {
        self.bar.set_message(newest);
        self.bar.inc(count as u64);
    }
}

fn bytes_of(files: &[PathBuf]) -> u64 {
    files.iter().filter_map(|file| size_on_disk(file)).sum()
}

fn style(read_bytes: Arc<AtomicU64>, total_bytes: u64, unit: &str) -> ProgressStyle {
    let read = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        let done = Bytes(read_bytes.load(Ordering::Relaxed));
        // A bar that cannot be drawn is no loss.
        let _ = write!(out, "{done} of {}", Bytes(total_bytes));
    };
    let read_part = if total_bytes > 0 { "{read} read, " } else { "" };
    let template =
        format!("{{bar:30}} {{pos}}/{{len}} {unit} done, {read_part}{{elapsed}} {{msg}}");
    ProgressStyle::with_template(&template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("read", read)
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
