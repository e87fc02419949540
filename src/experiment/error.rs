//! What can be wrong with an experiment.

use std::path::PathBuf;
use std::sync::Arc;

use crate::alloc::spec::SpecError;
use crate::engine::RunError;
use crate::import::ImportError;
use crate::units::caret_under;
use crate::workload::{GenerateError, JobError};

/// The description is wrong at a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct DescriptionError {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// What is wrong, what was expected, what to do.
    pub message: String,
    /// The line as it stands in the text.
    pub source_line: String,
}

impl DescriptionError {
    /// An error at a byte of a text.
    pub(super) fn at(text: &str, at: usize, message: String) -> DescriptionError {
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let line = before.matches('\n').count();
        DescriptionError {
            line: count(line + 1),
            column: count(before[line_start..].chars().count() + 1),
            message,
            source_line: text.split('\n').nth(line).unwrap_or_default().trim_end().to_owned(),
        }
    }

    /// The line that is wrong and a caret under the place.
    pub fn excerpt(&self) -> String {
        caret_under(&self.source_line, self.column)
    }
}

/// A trace of an experiment cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The description of its job cannot be read.
    #[error("{file}: {source}", file = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The description of its job is wrong.
    #[error("{file}: {source}", file = .path.display())]
    Job {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: JobError,
    },
    /// The trace of its job cannot be made.
    #[error("{file}: {source}", file = .path.display())]
    Generate {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: GenerateError,
    },
}

/// A cell could not be done.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// Its trace cannot be had.
    #[error(transparent)]
    Trace(#[from] Arc<TraceError>),
    /// The replay cannot be done.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The allocator cannot be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no such cost profile.
    #[error("{0}")]
    Profile(String),
    /// The engine gave nothing.
    #[error("the cell gave no result")]
    NoResult,
}
