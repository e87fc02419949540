//! Files of any kind: compression and format by content, output that appears whole or not at all.
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};

use super::Trace;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

/// The format of a trace file, told by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// Native JSON.
    NativeJson,
    /// Parquet.
    Parquet,
    /// Text form.
    Text,
    /// A pickle (torch snapshot).
    Pickle,
    /// RMM CSV.
    RmmCsv,
}

/// A file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct FileError {
    /// The path, `-` for standard input or output.
    pub path: String,
    /// What the system said.
    #[source]
    pub source: io::Error,
}

/// An opened, decompressed input.
pub struct Input {
    /// Path as given.
    pub path: PathBuf,
    /// The decompressed bytes.
    pub reader: Box<dyn BufRead + Send>,
}

impl Input {
    /// Opens a file, `-` for standard input.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(_path: &Path) -> Result<Input, FileError> {
        unimplemented!()
    }
}

/// A file that appears whole or not at all.
pub struct OutputFile;

impl OutputFile {
    /// Starts writing beside `path`.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn create(_path: &Path) -> Result<OutputFile, FileError> {
        unimplemented!()
    }

    /// Makes the file appear.
    ///
    /// # Errors
    /// If the rename fails.
    pub fn commit(self) -> Result<(), FileError> {
        unimplemented!()
    }
}

impl Write for OutputFile {
    fn write(&mut self, _buf: &[u8]) -> io::Result<usize> {
        unimplemented!()
    }
    fn flush(&mut self) -> io::Result<()> {
        unimplemented!()
    }
}

/// A trace could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteTraceError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Writes a trace in the format and compression that the name of `path` asks for. Returns warnings
/// about what that format cannot hold.
///
/// # Errors
/// If the file cannot be written.
pub fn write_trace(_trace: &Trace, _path: &Path) -> Result<Vec<String>, WriteTraceError> {
    unimplemented!()
}
