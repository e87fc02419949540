//! Progress on a terminal, for work that takes long; silent in a pipe.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::input::size_on_disk;
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
        let total_bytes: u64 = files.iter().filter_map(|file| size_on_disk(file)).sum();
        let target = if quiet || total_bytes < LONG_BYTES {
            ProgressDrawTarget::hidden()
        } else {
            // Hides itself where standard error is no terminal.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(files.len() as u64), target);
        let read_bytes = Arc::new(AtomicU64::new(0));
        if !bar.is_hidden() {
            bar.set_style(style(Arc::clone(&read_bytes), total_bytes));
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress { bar, read_bytes }
    }

    /// How to read these files so that the bar moves while one is read.
    pub(super) fn read_options(&self, gpu: Option<u32>) -> ReadOptions {
        let counter = (!self.bar.is_hidden()).then(|| Arc::clone(&self.read_bytes));
        ReadOptions { gpu, progress: counter }
    }

    /// One file is done.
    pub(super) fn file_done(&self) {
        self.bar.inc(1);
    }
}

fn style(read_bytes: Arc<AtomicU64>, total_bytes: u64) -> ProgressStyle {
    let read = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        let done = Bytes(read_bytes.load(Ordering::Relaxed));
        // A bar that cannot be drawn is no loss.
        let _ = write!(out, "{done} of {}", Bytes(total_bytes));
    };
    ProgressStyle::with_template("{bar:30} {pos}/{len} files done, {read} read, {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("read", read)
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
