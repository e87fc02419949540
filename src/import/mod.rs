//! Other people's files: torch snapshot pickles, RMM logs. Never panics, never executes what it reads.
use std::path::Path;

use crate::trace::Trace;

/// A trace and what should be known about how it was read.
#[derive(Debug)]
pub struct Imported {
    /// The trace, validated.
    pub trace: Trace,
    /// One line each.
    pub warnings: Vec<String>,
}

/// How to read.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// Which device of a snapshot with several.
    pub gpu: Option<u32>,
}

/// A file could not be read as a trace.
#[derive(Debug, thiserror::Error)]
#[error("cannot read")]
pub struct ImportError;

/// Reads a trace of any format, told by content; `-` is standard input.
///
/// # Errors
/// One clear line with file and position.
pub fn read_trace(_path: &Path, _options: &ReadOptions) -> Result<Imported, ImportError> {
    unimplemented!()
}
