//! Native JSON.
use std::io::{Read, Write};

use super::Trace;

/// Version of the native format.
pub const NATIVE_VERSION: u32 = 1;

/// Not a native trace.
#[derive(Debug, thiserror::Error)]
#[error("not a native trace")]
pub struct NativeError;

/// Reads native JSON.
///
/// # Errors
/// If it is malformed.
pub fn read_native(_reader: impl Read) -> Result<Trace, NativeError> {
    unimplemented!()
}

/// Writes native JSON.
///
/// # Errors
/// If writing fails.
pub fn write_native(_trace: &Trace, _writer: impl Write) -> std::io::Result<()> {
    unimplemented!()
}
