//! Parquet.
use std::fs::File;

use super::Trace;

/// Not a Parquet trace.
#[derive(Debug, thiserror::Error)]
#[error("not a Parquet trace")]
pub struct ParquetError;

/// Reads a Parquet trace.
///
/// # Errors
/// If it is malformed.
pub fn read_parquet(_file: File) -> Result<Trace, ParquetError> {
    unimplemented!()
}

/// Writes a Parquet trace.
///
/// # Errors
/// If writing fails.
pub fn write_parquet(_trace: &Trace, _writer: impl std::io::Write) -> Result<(), ParquetError> {
    unimplemented!()
}
