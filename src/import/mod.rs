//! Other people's files → traces: snapshots of PyTorch's allocator, traces of its profiler, RMM
//! logs, logs of STAlloc, MiniMalloc's buffers.
//!
//! Importers never panic, never execute what they read, and return the trace with their warnings.
//! No field of a file sizes an allocation; memory grows with the bytes that are really there.
//!
//! ```text
//!   bytes ── pickle ── torch_snapshot ── torch_history ──┐
//!            stack     dicts → packed    entries →       ├── truth ── Trace + warnings
//!            machine   records           events          │   what the pickle lacks
//!   bytes ── kineto | rmm_csv | stalloc_log ─────────────┘
//!   text ── oom_text | memory_summary | step_log ──> MemoryText: what people paste about memory
//! ```
//!
//! One more format is one more file here, a variant of [`TraceFormat`] and an arm in
//! [`read_trace`]. MiniMalloc's CSV is a packing problem first: its rows
//! stay as they are, and make a trace where one is asked for.

mod folder;
mod intern;
mod kineto;
mod memory_summary;
mod minimalloc_csv;
mod minimalloc_trace;
mod notes;
mod oom_text;
mod pickle;
mod refusals;
mod rmm_csv;
mod stalloc_log;
mod step_log;
mod torch_history;
mod torch_snapshot;
mod truth;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use folder::is_file_or_lost;
pub use folder::{FolderTraces, traces_in};
pub use kineto::{KinetoError, read_kineto};
pub use memory_summary::{MemorySummary, SummaryClass, SummaryDiagnosis, SummaryRow};
pub use minimalloc_csv::{
    MinimallocColumn, MinimallocCsv, MinimallocError, MinimallocField, MinimallocGap,
    MinimallocRow, MinimallocWriteError, read_minimalloc_csv, write_minimalloc_csv,
};
pub use minimalloc_trace::trace_from_minimalloc;
pub use oom_text::{
    Advice, Amount, Certainty, Class, Contradiction, Diagnosis, IsFragmentation, MemoryText,
    NEGLIGIBLE_SHARE, OomMessage, ProcessUse, Severity, Wording, diagnose,
};
pub use pickle::PickleError;
pub use rmm_csv::{RmmError, read_rmm_csv};
pub use stalloc_log::{StallocLogError, StallocLogOptions, read_stalloc_log, write_stalloc_log};
pub use step_log::{CurveClass, CurveDiagnosis, CurveGrowth, CurveRow, Framework, ReferenceCurve};
pub use torch_history::{KnownMemory, trace_from_snapshot};
pub use torch_snapshot::{
    RawAction, RawAnnotation, RawBlock, RawBlockState, RawEntry, RawSegment, RawSettings,
    RawSnapshot, SnapshotError, read_torch_snapshot,
};
pub use truth::{TruthError, trace_name};

use crate::trace::{
    FileError, Input, InvalidTrace, Limits, NativeError, OverLimit, TextError, Trace, TraceFormat,
    read_native_within, read_text_within, validate,
};
#[cfg(feature = "analytics")]
use crate::trace::{ParquetError, read_parquet_within};
use crate::units::Stop;
use refusals::room_from_refusals;
use torch_history::trace_with_notes;
use truth::{TruthFile, limit_from_settings};

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
    /// The reader has a memory limit of its own, so that none that is guessed is worth a warning.
    pub limit_is_told: bool,
    /// Counts the bytes of the file that are read so far, as they lie on disk.
    pub progress: Option<Arc<AtomicU64>>,
    /// Asks the reader to end early, with an error.
    pub stop: Stop,
    /// The most that is taken. [`open_input`] watches memory, the readers count events.
    pub limits: Limits,
}

/// A file could not be read as a trace. The message is one line: file, position, what was found and
/// what was expected.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be opened, decompressed or told.
    #[error(transparent)]
    File(#[from] FileError),
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
    /// A trace of PyTorch's profiler is wrong.
    #[error("{file}: {source}")]
    Kineto {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: KinetoError,
    },
    /// An RMM log is wrong.
    #[error("{file}: {source}")]
    Rmm {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: RmmError,
    },
    /// A log of STAlloc is wrong.
    #[error("{file}: {source}")]
    StallocLog {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: StallocLogError,
    },
    /// A CSV of buffers is wrong.
    #[error("{file}: {source}")]
    Minimalloc {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: MinimallocError,
    },
    /// A native trace is wrong.
    #[error("{file}: {source}")]
    Native {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: NativeError,
    },
    /// A text trace is wrong.
    #[error("{file}:{source}")]
    Text {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: TextError,
    },
    /// A Parquet trace is wrong.
    #[cfg(feature = "analytics")]
    #[error("{file}: {source}")]
    Parquet {
        /// The file.
        file: String,
        /// What is wrong.
        #[source]
        source: ParquetError,
    },
    /// A Parquet trace, which this build cannot read.
    #[cfg(not(feature = "analytics"))]
    #[error(
        "{file}: a Parquet trace; expected another format: this fraglab was built without \
             the feature \"analytics\""
    )]
    NoParquet {
        /// The file.
        file: String,
    },
    /// More than the reader takes.
    #[error("{file}: {source}")]
    Limit {
        /// The file.
        file: String,
        /// Which limit.
        #[source]
        source: OverLimit,
    },
    /// What was read contradicts itself.
    #[error("{file}: {source}; expected a trace that makes sense: the file is damaged")]
    Invalid {
        /// The file.
        file: String,
        /// The first rule broken.
        #[source]
        source: InvalidTrace,
    },
}

/// Reads a trace of any format, told by content; `-` is standard input.
///
/// # Errors
/// One clear line with file and position.
pub fn read_trace(path: &Path, options: &ReadOptions) -> Result<Imported, ImportError> {
    read_input(path, open_input(path, options)?, options)
}

/// Reads a trace from an input that is open already; `path` names it.
///
/// # Errors
/// One clear line with file and position.
pub fn read_input(
    path: &Path,
    input: Input,
    options: &ReadOptions,
) -> Result<Imported, ImportError> {
    let reached = input.reached();
    read_format(path, input, options).map_err(|error| match reached.get() {
        Some(&source) => ImportError::Limit { file: path.display().to_string(), source },
        None => error,
    })
}

fn read_format(path: &Path, input: Input, options: &ReadOptions) -> Result<Imported, ImportError> {
    let file = || path.display().to_string();
    let alone = |trace| Imported { trace, warnings: Vec::new() };
    let mut imported = match input.format()? {
        TraceFormat::Pickle => return import_snapshot(path, input.reader, options),
        TraceFormat::RmmCsv => return import_rmm_csv(path, input.reader, options),
        TraceFormat::Kineto => read_kineto(input.reader, options.gpu)
            .map(|(trace, warnings)| Imported { trace, warnings })
            .map_err(|source| ImportError::Kineto { file: file(), source })?,
        TraceFormat::StallocLog => read_stalloc_log(input.reader)
            .map(|(trace, warnings)| Imported { trace, warnings })
            .map_err(|source| ImportError::StallocLog { file: file(), source })?,
        TraceFormat::MinimallocCsv => return import_minimalloc_csv(path, input.reader, options),
        TraceFormat::NativeJson => read_native_within(input.reader, &options.limits)
            .map(alone)
            .map_err(|source| ImportError::Native { file: file(), source })?,
        TraceFormat::Text => read_text_trace(input, &options.limits).map(alone)?,
        TraceFormat::Parquet => read_parquet_trace(input, &options.limits).map(alone)?,
    };
    if imported.trace.header.name.is_empty() {
        imported.trace.header.name = trace_name(path).unwrap_or_default();
    }
    checked(path, imported, options)
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
    let mut truth = TruthFile::beside(path)?;
    let notes = truth.as_mut().and_then(TruthFile::take_notes);
    let known = truth.as_ref().map(TruthFile::known_memory).unwrap_or_default();
    let (mut trace, mut warnings) =
        trace_with_notes(&snapshot, options.gpu, known, notes.as_ref()).map_err(wrong)?;
    drop(snapshot);
    trace.header.name = trace_name(path).unwrap_or_default();
    if let Some(truth) = truth {
        truth.complete(&mut trace);
    }
    warnings.extend(limit_from_settings(&mut trace));
    let guessed = room_from_refusals(&mut trace);
    let is_idle = options.limit_is_told && trace.header.limit_bytes.is_some();
    warnings.extend(guessed.filter(|_| !is_idle));
    checked(path, Imported { trace, warnings }, options)
}

/// Reads an RMM log. `path` names the trace.
///
/// # Errors
/// The first malformed row, with its line.
pub fn import_rmm_csv(
    path: &Path,
    reader: impl Read,
    options: &ReadOptions,
) -> Result<Imported, ImportError> {
    let (mut trace, warnings) = read_rmm_csv(reader)
        .map_err(|source| ImportError::Rmm { file: path.display().to_string(), source })?;
    trace.header.name = trace_name(path).unwrap_or_default();
    checked(path, Imported { trace, warnings }, options)
}

/// Reads MiniMalloc's CSV as a trace. `path` names it.
///
/// # Errors
/// The first malformed line.
pub fn import_minimalloc_csv(
    path: &Path,
    reader: impl Read,
    options: &ReadOptions,
) -> Result<Imported, ImportError> {
    let wrong = |source| ImportError::Minimalloc { file: path.display().to_string(), source };
    let (mut trace, warnings) = trace_from_minimalloc(&read_minimalloc_csv(reader).map_err(wrong)?);
    trace.header.name = trace_name(path).unwrap_or_default();
    checked(path, Imported { trace, warnings }, options)
}

fn checked(
    path: &Path,
    imported: Imported,
    options: &ReadOptions,
) -> Result<Imported, ImportError> {
    let file = || path.display().to_string();
    let limits = &options.limits;
    limits
        .check_events(imported.trace.events.len() as u64)
        .and_then(|()| limits.check_memory())
        .map_err(|source| ImportError::Limit { file: file(), source })?;
    match validate(&imported.trace) {
        Ok(()) => Ok(imported),
        Err(source) => Err(ImportError::Invalid { file: file(), source }),
    }
}

fn read_text_trace(mut input: Input, limits: &Limits) -> Result<Trace, ImportError> {
    let text = input.read_to_string()?;
    read_text_within(&text, limits)
        .map_err(|source| ImportError::Text { file: input.path.display().to_string(), source })
}

#[cfg(feature = "analytics")]
fn read_parquet_trace(input: Input, limits: &Limits) -> Result<Trace, ImportError> {
    let file = input.path.display().to_string();
    read_parquet_within(input.reader, limits)
        .map_err(|source| ImportError::Parquet { file, source })
}

#[cfg(not(feature = "analytics"))]
fn read_parquet_trace(input: Input, _limits: &Limits) -> Result<Trace, ImportError> {
    Err(ImportError::NoParquet { file: input.path.display().to_string() })
}

/// A line for everything that was met at least once: how often, and what.
fn counted_warnings(met: &[(u64, &str)]) -> Vec<String> {
    let met = met.iter().filter(|(count, _)| *count > 0);
    met.map(|(count, text)| format!("{count} {text}")).collect()
}

/// Opens a file, or standard input for `-`, and looks at its beginning.
///
/// # Errors
/// If it cannot be read or decompressed.
pub fn open_input(path: &Path, options: &ReadOptions) -> Result<Input, FileError> {
    let raw: Box<dyn Read + Send> = if path.as_os_str() == "-" {
        Box::new(io::stdin())
    } else {
        let file = File::open(path);
        Box::new(file.map_err(|source| FileError { path: path.display().to_string(), source })?)
    };
    input_of(path, raw, options)
}

/// An input of bytes from anywhere, as [`open_input`] gives it for a file; `path` names it.
///
/// # Errors
/// If its beginning cannot be read or decompressed.
pub fn input_of(
    path: &Path,
    raw: Box<dyn Read + Send>,
    options: &ReadOptions,
) -> Result<Input, FileError> {
    let (progress, stop) = (options.progress.clone(), options.stop.clone());
    let input = Input::from_reader(path, Box::new(Watched { raw, progress, stop }))?;
    Ok(input.within(&options.limits))
}

/// Counts what passes, and ends when somebody asks to stop.
struct Watched {
    raw: Box<dyn Read + Send>,
    progress: Option<Arc<AtomicU64>>,
    stop: Stop,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.is_asked() {
            return Err(io::Error::other("interrupted"));
        }
        let count = self.raw.read(buffer)?;
        if let Some(bytes) = &self.progress {
            bytes.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(count)
    }
}
