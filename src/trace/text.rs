//! The text form.
use std::io::Write;

use super::Trace;

/// A text trace is wrong at a place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct TextError {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// What is wrong, what was expected.
    pub message: String,
}

/// Reads the text form.
///
/// # Errors
/// With line and column.
pub fn read_text(_text: &str) -> Result<Trace, TextError> {
    unimplemented!()
}

/// Writes the text form.
///
/// # Errors
/// If writing fails.
pub fn write_text(_trace: &Trace, _writer: impl Write) -> std::io::Result<()> {
    unimplemented!()
}
