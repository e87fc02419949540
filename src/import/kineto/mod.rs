//! Traces of PyTorch's profiler (kineto): Chrome's trace format with `[memory]` events.
//!
//! The one design decision: the file streams by. A profile is gigabytes of operators and kernels
//! around a few million memory events, so the reader keeps 64 bytes a memory event and 32 an
//! annotation, and walks over everything else without storing it.
//!
//! ```text
//!   {"deviceProperties": [..], "baseTimeNanoseconds": N, "traceEvents": [
//!      {"ph": "i", "name": "[memory]", "ts": µs, "args": {"Addr", "Bytes", ..}}  ──> events ─┐
//!      {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", ..}       ──> phases ─┤
//!      everything else                                                           ──> nothing │
//!   ]}                                                                                       │
//!   one device, by time:  Trace + warnings  <── build ───────────────────────────────────────┘
//! ```
//!
//! What a profile tells, and what it does not (seen in PyTorch 2.11's own files beside its
//! snapshots of the same runs):
//!
//! - `Bytes` is the size of the allocator's *block*, positive when it is handed out and negative
//!   when it is freed: the request rounded up to 512 bytes, or more where the allocator split
//!   nothing off. What the program asked for is not there.
//! - There are no streams, and no segments. A block that another stream still uses is freed when
//!   the program frees it.
//! - Events of one thread stand together, in the file and by `Ev Idx`; only times order them all.
//! - `Total Allocated` is what the allocator has handed out after the event. Before the first one
//!   that is what was live already, of which the file shows only what is freed later; the rest
//!   stands in the trace as one block.

mod build;
mod phases;
mod read;
mod value;

use std::io::Read;

use crate::trace::Trace;

/// A profiler's trace is wrong.
#[derive(Debug, thiserror::Error)]
pub enum KinetoError {
    /// It is no JSON of this kind, or it ends early.
    #[error("{line}:{column}: {message}; expected {expected}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// What is wrong.
        message: String,
        /// What should be there.
        expected: &'static str,
    },
    /// The bytes could not be read or decompressed.
    #[error("{0}")]
    Io(String),
    /// No memory was profiled.
    #[error(
        "no [memory] events in {events} events; expected some: record with \
         torch.profiler.profile(profile_memory=True)"
    )]
    NoMemory {
        /// Events of any kind.
        events: u64,
    },
    /// Memory events of a PyTorch that did not tell addresses yet.
    #[error(
        "none of {events} [memory] events has an address; expected `Addr` in their `args`, as \
         PyTorch writes it since 1.11"
    )]
    NoAddresses {
        /// Memory events.
        events: u64,
    },
    /// Several devices have memory events and none was chosen, or one was that has none.
    #[error("{found}: {choices}; expected one of them: choose with --gpu N")]
    Gpu {
        /// What is wrong.
        found: String,
        /// The devices with their numbers of events.
        choices: String,
    },
    /// More than four billion of something.
    #[error("too many {0}; expected fewer than four billion: profile a shorter part of the run")]
    TooMany(&'static str),
}

impl From<serde_json::Error> for KinetoError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let suffix = format!(" at line {line} column {column}");
        let message = text.strip_suffix(&suffix).unwrap_or(&text).to_owned();
        let expected = match error.classify() {
            serde_json::error::Category::Io => return KinetoError::Io(message),
            serde_json::error::Category::Eof => "the rest of the trace: the file was cut short",
            serde_json::error::Category::Syntax => "JSON, as the profiler's export writes it",
            serde_json::error::Category::Data => "events in Chrome's trace format",
        };
        KinetoError::Json { line, column, message, expected }
    }
}

/// Reads a profiler's trace: an object with `traceEvents`, or the bare list of events. `gpu` says
/// which device if there are several. Also returns what a reader of the trace should know, a line
/// each.
///
/// # Errors
/// What is wrong and where, or why there is no trace in it.
pub fn read_kineto(
    reader: impl Read,
    gpu: Option<u32>,
) -> Result<(Trace, Vec<String>), KinetoError> {
    build::trace(read::profile(reader)?, gpu)
}
