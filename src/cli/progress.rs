//! Progress on a terminal, for work that takes long; silent in a pipe.

use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::input::size_on_disk;

/// Files that together are smaller than this are done before a bar could be read.
const LONG_BYTES: u64 = 8 << 20;

/// A bar on standard error that goes away when it is dropped.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// A bar over files; it shows if standard error is a terminal, `quiet` is not asked for, and the
    /// work on these files is long.
    pub(super) fn over(files: &[PathBuf], quiet: bool) -> Progress {
        let bytes: u64 = files.iter().filter_map(|file| size_on_disk(file)).sum();
        let target = if quiet || bytes < LONG_BYTES {
            ProgressDrawTarget::hidden()
        } else {
            // Hides itself where standard error is no terminal.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(files.len() as u64), target);
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} files, {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Progress(bar)
    }

    /// One file is done.
    pub(super) fn file_done(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
