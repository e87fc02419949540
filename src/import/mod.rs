//! Other people's files → traces: snapshots of PyTorch's allocator, RMM logs.
//!
//! Importers never panic, never execute what they read, and return the trace with their warnings.
//! No field of a file sizes an allocation; memory grows with the bytes that are really there.
//!
//! ```text
//!   bytes ── pickle ── torch_snapshot ── torch_history ──┐
//!            stack     dicts → packed    entries →       ├── truth ── Trace + warnings
//!            machine   records           events          │   what the pickle lacks
//!   bytes ── rmm_csv ────────────────────────────────────┘
//! ```
//!
//! One more format is one more file here, a variant of [`TraceFormat`] and an arm in [`read_trace`].

mod intern;
mod pickle;
mod rmm_csv;
mod torch_history;
mod torch_snapshot;
mod truth;

use std::io::Read;
use std::path::Path;

pub use pickle::PickleError;
pub use rmm_csv::{RmmError, read_rmm_csv};
pub use torch_history::trace_from_snapshot;
pub use torch_snapshot::{
    RawAction, RawAnnotation, RawBlock, RawBlockState, RawEntry, RawSegment, RawSettings,
    RawSnapshot, SnapshotError, read_torch_snapshot,
};
pub use truth::TruthError;

use crate::trace::Trace;
use truth::{TruthFile, limit_from_settings, snapshot_name};

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

/// A file could not be read as a trace. The message is one line: file, position, what was found and
/// what was expected.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A torch snapshot is wrong.
    #[error("{file}: {source}")]
    Snapshot {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: SnapshotError,
    },
    /// The file beside a snapshot is wrong.
    #[error(transparent)]
    Truth(#[from] TruthError),
    /// An RMM log is wrong.
    #[error("{file}: {source}")]
    Rmm {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: RmmError,
    },
}

/// Reads a trace of any format, told by content; `-` is standard input.
///
/// # Errors
/// One clear line with file and position.
pub fn read_trace(_path: &Path, _options: &ReadOptions) -> Result<Imported, ImportError> {
    unimplemented!()
}

/// Reads a torch snapshot from its decompressed pickle, with the truth file beside `path` if there
/// is one. `path` also names the trace.
///
/// # Errors
/// If the pickle or the truth file is malformed, or the device to read is not clear.
pub fn import_snapshot(
    path: &Path,
    reader: impl Read,
    options: &ReadOptions,
) -> Result<Imported, ImportError> {
    let wrong = |source| ImportError::Snapshot { file: path.display().to_string(), source };
    let snapshot = read_torch_snapshot(reader).map_err(wrong)?;
    let (mut trace, mut warnings) = trace_from_snapshot(&snapshot, options.gpu).map_err(wrong)?;
    drop(snapshot);
    trace.header.name = snapshot_name(path).unwrap_or_default();
    if let Some(truth) = TruthFile::beside(path)? {
        truth.complete(&mut trace);
    }
    warnings.extend(limit_from_settings(&mut trace));
    Ok(Imported { trace, warnings })
}

/// Reads an RMM log. `path` names the trace.
///
/// # Errors
/// The first malformed row, with its line.
pub fn import_rmm_csv(path: &Path, reader: impl Read) -> Result<Imported, ImportError> {
    let (mut trace, warnings) = read_rmm_csv(reader)
        .map_err(|source| ImportError::Rmm { file: path.display().to_string(), source })?;
    trace.header.name = snapshot_name(path).unwrap_or_default();
    Ok(Imported { trace, warnings })
}
