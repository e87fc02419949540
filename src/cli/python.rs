//! `fraglab python`: the file that a PyTorch program imports to record its run, or to run on one of
//! our allocators.
//!
//! The one design decision: it is a part of the program, so that file, program and library are of
//! one version, and nothing else has to be installed where a job runs.

use std::path::PathBuf;

use super::Verdict;
use super::console::Console;
use super::output;

const AFTER_HELP: &str = "\
Examples:
  fraglab python > fraglab_torch.py
  fraglab python -o jobs/fraglab_torch.py

In a training script:
  import fraglab_torch as fraglab

  with fraglab.record(\"job.json.zst\"):        record the run, for every other command
      train()

  fraglab.phase(\"step3.backward\")            name what runs: in recordings, tables, figures
  fraglab.watch_modules(model)               and which layer asks for what

  fraglab.install(\"stitch\")                  run on another allocator (needs libfraglab.so)

The file needs Python 3.8 and torch 2.1 or later, and nothing else; help(fraglab_torch) tells more.

Exit codes: 0 good, 2 it could not be written.";

/// The file.
const FRAGLAB_TORCH: &str = include_str!("fraglab_torch.py");

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The file to write; `-` is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
}

/// Writes the file.
///
/// # Errors
/// If it cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    output::save_text(&args.output, FRAGLAB_TORCH, console)?;
    Ok(Verdict::Good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_of_this_version() {
        let line = format!("__version__ = \"{}\"\n", env!("CARGO_PKG_VERSION"));
        assert!(FRAGLAB_TORCH.contains(&line), "fraglab_torch.py: expected {line}");
    }
}
