//! Files of any kind: compression and format by content, output that appears whole or not at all.
//!
//! Reading looks at bytes, never at names; writing goes by the name, because there is nothing else
//! to go by. A recording is often still called `.pickle` when someone has compressed it.
//!
//! ```text
//!   file or - ──> gzip | zstd | neither ──> head (peeked, tells the format) + rest ──> reader
//!   writer ──> gzip | zstd | neither ──> a hidden file beside the target ── commit ──> the target
//! ```
//!
//! What is written beside the target, and what becomes of it when the program is ended, stands in
//! `part`.

mod part;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use part::PartFile;
pub use part::abandon_part_files;

use super::native::write_native;
use super::text::{is_text_trace, write_text};
use super::{InvalidTrace, Limits, OverLimit, Trace, validate};

/// Bytes of the decompressed stream that are looked at to tell the format.
const HEAD_BYTES: usize = 4096;
const BUFFER_BYTES: usize = 1 << 17;
/// Window that a zstd file may ask for, as a power of two: what `zstd --ultra --long=31` writes.
/// The window takes no more memory than the file has bytes, and the process's is watched.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;
/// Level of Zstandard where nothing else is asked for: traces are written once and read often.
const ZSTD_LEVEL: i32 = 19;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip, also of several members.
    Gzip,
    /// Zstandard, also of several frames.
    Zstd,
}

impl Compression {
    /// Told by the first bytes of a file.
    pub fn of_bytes(head: &[u8]) -> Compression {
        match head {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            // A skippable frame, as parallel compressors write it first.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }

    /// Told by the end of a name, `.gz` or `.zst`.
    pub fn of_name(path: &Path) -> Compression {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Compression::Gzip,
            Some("zst") => Compression::Zstd,
            _ => Compression::None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Compression::None => "uncompressed",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        }
    }
}

/// Whether these are words, as people and other programs write them: no bytes of a binary file, and
/// more than the few that are left of a file that was cut.
fn is_plain_text(head: &[u8]) -> bool {
    let is_control = |byte: &u8| byte.is_ascii_control() && !byte.is_ascii_whitespace();
    head.len() > CUT_BYTES_MAX && !head.iter().any(is_control)
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
    /// A trace of PyTorch's profiler, in Chrome's trace format.
    Kineto,
    /// A log of STAlloc's recorder.
    StallocLog,
    /// MiniMalloc's CSV of buffers.
    MinimallocCsv,
}

impl TraceFormat {
    /// The format of a decompressed file that begins with `head`: its first [`HEAD_BYTES`], or all
    /// of it. Nothing if it is binary and of no known kind.
    fn of_bytes(head: &[u8]) -> Option<TraceFormat> {
        if matches!(head, [0x80, 2..=5, ..]) {
            return Some(TraceFormat::Pickle);
        }
        if head.starts_with(b"PAR1") {
            return Some(TraceFormat::Parquet);
        }
        let binary = match std::str::from_utf8(head) {
            Ok(text) => text.contains('\0'),
            // A character cut by the end of the head is no error.
            Err(error) => error.error_len().is_some(),
        };
        if binary {
            return None;
        }
        match head.trim_ascii_start() {
            json if is_chrome_trace(json) => return Some(TraceFormat::Kineto),
            [b'{', ..] => return Some(TraceFormat::NativeJson),
            _ => {}
        }
        if head.starts_with(b"Thread,Time,Action") {
            return Some(TraceFormat::RmmCsv);
        }
        if is_stalloc_log(head) {
            return Some(TraceFormat::StallocLog);
        }
        if names_buffers(head) {
            return Some(TraceFormat::MinimallocCsv);
        }
        Some(TraceFormat::Text)
    }
}

/// Whether JSON is a trace in Chrome's format: a list of events, or an object that begins with what
/// the profiler writes first. Native JSON names itself with its first key.
fn is_chrome_trace(json: &[u8]) -> bool {
    let has = |text: &[u8]| json.windows(text.len()).any(|window| window == text);
    match json {
        [b'[', rest @ ..] => rest.trim_ascii_start().starts_with(b"{") && has(b"\"ph\""),
        [b'{', rest @ ..] => {
            let keys: [&[u8]; 5] = [
                b"\"traceEvents\"",
                b"\"schemaVersion\"",
                b"\"deviceProperties\"",
                b"\"displayTimeUnit\"",
                b"\"baseTimeNanoseconds\"",
            ];
            !rest.trim_ascii_start().starts_with(b"\"fraglab_trace\"")
                && keys.iter().any(|key| has(key))
        }
        _ => false,
    }
}

/// Whether the first line that is not empty is one of STAlloc's recorder: a request, `1 PTR SIZE
/// STREAM` or `0 PTR SIZE STREAM`, or one of its marks. No line of the text form begins so.
fn is_stalloc_log(head: &[u8]) -> bool {
    let head = String::from_utf8_lossy(head);
    let Some(line) = head.lines().find(|line| !line.trim().is_empty()) else { return false };
    let line = line.trim();
    let marks = ["Iteration Index :", "micro-batch :"];
    let request = || {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        matches!(fields[..], ["0" | "1", pointer, size, _]
            if digits(size) && (pointer == "0" || pointer.starts_with("0x")))
    };
    marks.iter().any(|mark| line.starts_with(mark)) || line.contains(" Layer : ") || request()
}

/// Whether the first line has the columns of buffers: a size, and when life begins and ends.
fn names_buffers(head: &[u8]) -> bool {
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let names: Vec<&[u8]> = line.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).collect();
    let any = |wanted: &[&[u8]]| names.iter().any(|name| wanted.contains(name));
    any(&[b"size"]) && any(&[b"lower", b"begin", b"start"]) && any(&[b"upper", b"end"])
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

impl FileError {
    fn new(path: &Path, source: io::Error) -> FileError {
        FileError { path: path.display().to_string(), source }
    }

    fn other(path: &Path, message: String) -> FileError {
        FileError::new(path, io::Error::new(io::ErrorKind::InvalidData, message))
    }

    /// Whether the reader of a pipe has gone, which is no error to the user.
    pub fn is_broken_pipe(&self) -> bool {
        self.source.kind() == io::ErrorKind::BrokenPipe
    }
}

fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// An opened input, decompressed while it is read.
pub struct Input {
    /// Path as given.
    pub path: PathBuf,
    /// How the file is compressed.
    pub compression: Compression,
    head: Vec<u8>,
    /// The limit that ended the reading, once one did.
    reached: Arc<OnceLock<OverLimit>>,
    /// The decompressed bytes, from the first.
    pub reader: Box<dyn BufRead + Send>,
}

/// Text of so few bytes is what is left of a file that was cut.
const CUT_BYTES_MAX: usize = 8;

impl Input {
    /// Opens a file, `-` for standard input. Waits for its first bytes.
    ///
    /// # Errors
    /// If it cannot be opened, or its first bytes cannot be decompressed.
    pub fn open(path: &Path) -> Result<Input, FileError> {
        let raw: Box<dyn Read + Send> = if is_dash(path) {
            Box::new(io::stdin())
        } else {
            Box::new(File::open(path).map_err(|error| FileError::new(path, error))?)
        };
        Input::from_reader(path, raw)
    }

    /// An input of bytes from anywhere, with a path for messages. Waits for the first bytes.
    ///
    /// # Errors
    /// If the first bytes cannot be read or decompressed.
    pub fn from_reader(path: &Path, raw: Box<dyn Read + Send>) -> Result<Input, FileError> {
        Input::decode(path, raw).map_err(|error| FileError::new(path, error))
    }

    fn decode(path: &Path, mut raw: Box<dyn Read + Send>) -> io::Result<Input> {
        let magic = read_head(&mut raw, 4)?;
        let compression = Compression::of_bytes(&magic);
        let raw = BufReader::with_capacity(BUFFER_BYTES, Cursor::new(magic).chain(raw));
        let mut plain: Box<dyn BufRead + Send> = match compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => decompressed(MultiGzDecoder::new(raw), compression),
            Compression::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(raw)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                decompressed(decoder, compression)
            }
        };
        let mut head = read_head(&mut plain, HEAD_BYTES)?;
        // A byte order mark, as some editors put it in front of text.
        if head.starts_with(b"\xef\xbb\xbf") {
            head.drain(..3);
        }
        let reader = Box::new(Cursor::new(head.clone()).chain(plain));
        Ok(Input { path: path.to_owned(), compression, head, reached: Arc::default(), reader })
    }

    /// The format, told by the content. May be asked at any time.
    ///
    /// # Errors
    /// If the file is empty, or of a known kind that is no trace, or binary and of no known kind.
    pub fn format(&self) -> Result<TraceFormat, FileError> {
        if self.head.is_empty() {
            return Err(FileError::other(&self.path, "the file is empty".to_owned()));
        }
        if self.is_memory_timeline() {
            let message = "a memory timeline of PyTorch's profiler, which tells no addresses; \
                expected a trace: record with profile_memory=True and give what \
                prof.export_chrome_trace(\"trace.json.gz\") writes";
            return Err(FileError::other(&self.path, message.to_owned()));
        }
        TraceFormat::of_bytes(&self.head).ok_or_else(|| {
            let begin: Vec<String> =
                self.head.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            let message = format!(
                "not a trace: begins with the bytes {}, expected a torch snapshot (pickle, \
                 protocol 2 to 5), a trace of PyTorch's profiler, Parquet, native JSON, RMM CSV, MiniMalloc CSV, a log of STAlloc or \
                 the text form",
                begin.join(" ")
            );
            FileError::other(&self.path, message)
        })
    }

    /// Whether it is clearly another kind of file than a trace, although its name is that of one:
    /// JSON that is not native, text that does not begin as a trace does. What is damaged is not:
    /// a file that is empty, cut in its first words or begins with zeros, and one whose content is
    /// of another kind than its name says.
    pub fn is_foreign(&self) -> bool {
        const NATIVE: &[u8] = b"\"fraglab_trace\"";
        let ending = || self.path.extension().and_then(|ending| ending.to_str());
        let is_packed = matches!(ending(), Some("gz" | "zst"));
        let name = if is_packed { self.path.with_extension("") } else { self.path.clone() };
        let is_named_json = name.extension().is_some_and(|ending| ending == "json");
        let is_named_text = ["txt", "csv", "log"]
            .iter()
            .any(|text| name.extension().is_some_and(|ending| ending == *text));
        if self.compression != Compression::of_name(&self.path) {
            return false;
        }
        let head = self.head.trim_ascii_start();
        let is_json = head.starts_with(b"{") || head.starts_with(b"[");
        match TraceFormat::of_bytes(&self.head) {
            Some(TraceFormat::NativeJson) | None if is_named_json && is_json => {
                let first = head[1..].trim_ascii_start();
                !first.starts_with(NATIVE) && !NATIVE.starts_with(first)
            }
            Some(TraceFormat::Text) | None if is_named_text => {
                is_plain_text(head) && !is_text_trace(&String::from_utf8_lossy(&self.head))
            }
            _ => false,
        }
    }

    /// Whether it is the JSON that `export_memory_timeline` of PyTorch's profiler writes: a list of
    /// `[time, action, bytes, category]`, or one of times and one of sums. It is no trace.
    pub(crate) fn is_memory_timeline(&self) -> bool {
        fn after(json: &[u8], byte: u8) -> Option<&[u8]> {
            json.trim_ascii_start().strip_prefix(&[byte])
        }
        let number = after(&self.head, b'[').and_then(|json| after(json, b'['));
        let Some(number) = number.map(<[u8]>::trim_ascii_start) else { return false };
        let number = number.strip_prefix(b"-").unwrap_or(number);
        let digits = number.iter().take_while(|byte| byte.is_ascii_digit()).count();
        digits > 0 && after(&number[digits..], b',').is_some()
    }

    /// The same input, which fails when the process has grown beyond these limits.
    pub fn within(self, limits: &Limits) -> Input {
        Input { reader: limits.watch(self.reader, Arc::clone(&self.reached)), ..self }
    }

    /// Tells, also when the reader is gone, which limit ended the reading.
    pub(crate) fn reached(&self) -> Arc<OnceLock<OverLimit>> {
        Arc::clone(&self.reached)
    }

    /// The rest of the file.
    ///
    /// # Errors
    /// If it cannot be read or decompressed.
    pub fn read_to_end(&mut self) -> Result<Vec<u8>, FileError> {
        let mut bytes = Vec::new();
        match self.reader.read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(error) => Err(FileError::new(&self.path, error)),
        }
    }

    /// The rest of the file as text.
    ///
    /// # Errors
    /// If it cannot be read or decompressed, or is not UTF-8: which line.
    pub fn read_to_string(&mut self) -> Result<String, FileError> {
        String::from_utf8(self.read_to_end()?).map_err(|error| {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + good.iter().filter(|&&byte| byte == b'\n').count();
            FileError::other(&self.path, format!("line {line} is not UTF-8 text"))
        })
    }
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input")
            .field("path", &self.path)
            .field("compression", &self.compression)
            .finish_non_exhaustive()
    }
}

/// Reads up to `length` bytes, fewer only where the stream ends.
fn read_head(reader: &mut (impl Read + ?Sized), length: usize) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(length);
    reader.take(length as u64).read_to_end(&mut head)?;
    Ok(head)
}

fn decompressed(
    decoder: impl Read + Send + 'static,
    compression: Compression,
) -> Box<dyn BufRead + Send> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, Decompressed { decoder, compression }))
}

/// Says of a decoder's errors that the file is damaged; their own words (`unexpected end of file`,
/// `Restored data doesn't match checksum`) do not tell whose fault it is.
struct Decompressed<R> {
    decoder: R,
    compression: Compression,
}

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(buffer).map_err(|error| {
            // What the system says (an unreadable disk) is not the file's fault.
            if error.raw_os_error().is_some() || error.kind() == io::ErrorKind::Interrupted {
                return error;
            }
            let name = self.compression.name();
            let message = if error.kind() == io::ErrorKind::UnexpectedEof {
                format!("the {name} file is truncated: it ends in the middle of its data")
            } else {
                format!("the {name} file is corrupt: {error}")
            };
            io::Error::new(error.kind(), message)
        })
    }
}

/// A file that appears whole or not at all: written beside its place, and moved there by
/// [`commit`](OutputFile::commit). Dropped before, it leaves nothing behind. Compressed by the end
/// of its name. Standard output and devices are written directly.
pub struct OutputFile {
    path: PathBuf,
    encoder: Encoder,
}

enum Encoder {
    Plain(BufWriter<Target>),
    Gzip(GzEncoder<BufWriter<Target>>),
    Zstd(zstd::Encoder<'static, BufWriter<Target>>),
}

enum Target {
    Stdout(io::Stdout),
    /// A pipe or device, which must not be replaced by a file.
    Direct(File),
    /// A part file beside its place.
    Beside(PartFile),
}

impl OutputFile {
    /// Starts writing beside `path`; `-` is standard output.
    ///
    /// # Errors
    /// If the folder cannot be written, or `path` is a folder.
    pub fn create(path: &Path) -> Result<OutputFile, FileError> {
        OutputFile::create_at_level(path, None)
    }

    /// The same at a level of Zstandard, 1 (fast) to 22, or at the default, which is 19. Only `.zst`
    /// has levels.
    ///
    /// # Errors
    /// If the folder cannot be written, or `path` is a folder.
    pub fn create_at_level(path: &Path, level: Option<i32>) -> Result<OutputFile, FileError> {
        let compression = Compression::of_name(path);
        Target::create(path)
            .and_then(|target| {
                let target = BufWriter::with_capacity(BUFFER_BYTES, target);
                Encoder::new(target, compression, level.unwrap_or(ZSTD_LEVEL))
            })
            .map(|encoder| OutputFile { path: path.to_owned(), encoder })
            .map_err(|error| FileError::new(path, error))
    }

    /// Makes the file appear.
    ///
    /// # Errors
    /// If the last bytes cannot be written or the rename fails; then nothing has appeared.
    pub fn commit(self) -> Result<(), FileError> {
        let OutputFile { path, encoder } = self;
        encoder.finish().and_then(Target::commit).map_err(|error| FileError::new(&path, error))
    }
}

impl Write for OutputFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match &mut self.encoder {
            Encoder::Plain(writer) => writer.write(buffer),
            Encoder::Gzip(writer) => writer.write(buffer),
            Encoder::Zstd(writer) => writer.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.encoder {
            Encoder::Plain(writer) => writer.flush(),
            Encoder::Gzip(writer) => writer.flush(),
            Encoder::Zstd(writer) => writer.flush(),
        }
    }
}

impl Encoder {
    fn new(
        writer: BufWriter<Target>,
        compression: Compression,
        zstd_level: i32,
    ) -> io::Result<Encoder> {
        Ok(match compression {
            Compression::None => Encoder::Plain(writer),
            Compression::Gzip => Encoder::Gzip(GzEncoder::new(writer, flate2::Compression::best())),
            Compression::Zstd => {
                let mut encoder = zstd::Encoder::new(writer, zstd_level)?;
                encoder.include_checksum(true)?;
                Encoder::Zstd(encoder)
            }
        })
    }

    fn finish(self) -> io::Result<Target> {
        let writer = match self {
            Encoder::Plain(writer) => writer,
            Encoder::Gzip(encoder) => encoder.finish()?,
            Encoder::Zstd(encoder) => encoder.finish()?,
        };
        writer.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

impl Target {
    fn create(path: &Path) -> io::Result<Target> {
        if is_dash(path) {
            return Ok(Target::Stdout(io::stdout()));
        }
        let (place, old) = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(io::Error::new(
                    io::ErrorKind::IsADirectory,
                    "is a folder, expected the name of a file to write",
                ));
            }
            Ok(metadata) if !metadata.is_file() => {
                return File::options().write(true).open(path).map(Target::Direct);
            }
            Ok(metadata) => (fs::canonicalize(path)?, Some(metadata)),
            Err(_) => (path.to_owned(), None),
        };
        let part = PartFile::create(place)?;
        if let Some(old) = old {
            part.file().set_permissions(old.permissions())?;
        }
        Ok(Target::Beside(part))
    }

    fn commit(self) -> io::Result<()> {
        match self {
            Target::Stdout(mut stdout) => stdout.flush(),
            Target::Direct(mut file) => file.flush(),
            Target::Beside(part) => part.commit(),
        }
    }
}

impl Write for Target {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = match self {
            Target::Stdout(stdout) => stdout.write(buffer),
            Target::Direct(file) => file.write(buffer),
            Target::Beside(part) => part.file().write(buffer),
        };
        written.map_err(unwritten)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = match self {
            Target::Stdout(stdout) => stdout.flush(),
            Target::Direct(file) => file.flush(),
            Target::Beside(part) => part.file().flush(),
        };
        flushed.map_err(unwritten)
    }
}

/// Says of what keeps a file from being written what can be done about it, where the system's words
/// do not.
pub fn unwritten(error: io::Error) -> io::Error {
    let message = match error.kind() {
        io::ErrorKind::StorageFull => {
            "the disk is full: free some space, or name a file on another disk"
        }
        io::ErrorKind::QuotaExceeded => {
            "the disk quota is used up: free some space, or name a file on another disk"
        }
        io::ErrorKind::FileTooLarge => {
            "the file would be larger than is allowed here: raise the limit (`ulimit -f`), or name \
             a file on another disk"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "the disk can only be read: name a file on another disk"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), message)
}

/// A trace could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteTraceError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The name does not say a format.
    #[error(
        "{path}: the name does not say which format to write: expected .json (native), .txt, \
         .trace or .ftx (text) or .parquet, each also with .gz or .zst behind"
    )]
    Extension {
        /// The path.
        path: String,
    },
    /// The trace contradicts itself.
    #[error("{path}: not written, the trace is not valid: {source}")]
    Invalid {
        /// The path.
        path: String,
        /// What is wrong.
        source: InvalidTrace,
    },
    /// This program was built without Parquet.
    #[error("{path}: this fraglab was built without Parquet (feature `analytics`); write .json")]
    NoParquet {
        /// The path.
        path: String,
    },
    /// Parquet would not have it.
    #[cfg(feature = "analytics")]
    #[error("{path}: {source}")]
    Parquet {
        /// The path.
        path: String,
        /// What is wrong.
        source: super::ParquetError,
    },
}

impl WriteTraceError {
    /// Whether the reader of a pipe has gone, which is no error to the user.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, WriteTraceError::File(error) if error.is_broken_pipe())
    }
}

/// Formats that can be written.
#[derive(Clone, Copy)]
enum WriteFormat {
    Native,
    Text,
    Parquet,
}

impl WriteFormat {
    /// Standard output gets the native format: it holds everything, and another fraglab reads it.
    fn of_name(path: &Path) -> Option<WriteFormat> {
        if is_dash(path) {
            return Some(WriteFormat::Native);
        }
        let inner = match Compression::of_name(path) {
            Compression::None => path.to_owned(),
            Compression::Gzip | Compression::Zstd => path.with_extension(""),
        };
        match inner.extension()?.to_str()? {
            "json" => Some(WriteFormat::Native),
            "txt" | "trace" | "ftx" => Some(WriteFormat::Text),
            "parquet" => Some(WriteFormat::Parquet),
            _ => None,
        }
    }
}

/// Writes a trace in the format and compression that the name of `path` asks for (`-`: native JSON
/// to standard output). Returns warnings about what that format cannot hold.
///
/// # Errors
/// If the name says no format, the trace is not [valid](validate) or the file cannot be written.
pub fn write_trace(trace: &Trace, path: &Path) -> Result<Vec<String>, WriteTraceError> {
    write_trace_at_level(trace, path, None)
}

/// [`write_trace`] at a level of Zstandard ([`OutputFile::create_at_level`]).
///
/// # Errors
/// If the name says no format, the trace is not [valid](validate) or the file cannot be written.
pub fn write_trace_at_level(
    trace: &Trace,
    path: &Path,
    level: Option<i32>,
) -> Result<Vec<String>, WriteTraceError> {
    let format = checked_format(trace, path)?;
    let mut file = OutputFile::create_at_level(path, level)?;
    let warnings = write_as(format, trace, path, &mut file)?;
    file.commit()?;
    Ok(warnings)
}

/// Writes a trace in the format that a file of this name would have, uncompressed. Returns warnings
/// about what that format cannot hold.
///
/// # Errors
/// As [`write_trace`]; `path` stands for the writer.
pub fn write_trace_to(
    trace: &Trace,
    path: &Path,
    writer: &mut impl Write,
) -> Result<Vec<String>, WriteTraceError> {
    write_as(checked_format(trace, path)?, trace, path, writer)
}

/// The format that a name asks for, for a trace that may be written.
fn checked_format(trace: &Trace, path: &Path) -> Result<WriteFormat, WriteTraceError> {
    let shown = || path.display().to_string();
    let format =
        WriteFormat::of_name(path).ok_or_else(|| WriteTraceError::Extension { path: shown() })?;
    validate(trace).map_err(|source| WriteTraceError::Invalid { path: shown(), source })?;
    Ok(format)
}

fn write_as(
    format: WriteFormat,
    trace: &Trace,
    path: &Path,
    writer: &mut impl Write,
) -> Result<Vec<String>, WriteTraceError> {
    let warnings = match format {
        WriteFormat::Native => write_native(trace, writer).map(|()| Vec::new()),
        WriteFormat::Text => write_text(trace, writer),
        WriteFormat::Parquet => write_parquet_to(trace, path, writer)?,
    };
    Ok(warnings.map_err(|error| FileError::new(path, error))?)
}

#[cfg(feature = "analytics")]
fn write_parquet_to(
    trace: &Trace,
    path: &Path,
    writer: &mut impl Write,
) -> Result<io::Result<Vec<String>>, WriteTraceError> {
    match super::write_parquet(trace, writer) {
        Ok(()) => Ok(Ok(Vec::new())),
        Err(super::ParquetError::Io(error)) => Ok(Err(error)),
        Err(source) => Err(WriteTraceError::Parquet { path: path.display().to_string(), source }),
    }
}

#[cfg(not(feature = "analytics"))]
fn write_parquet_to(
    _trace: &Trace,
    path: &Path,
    _writer: &mut impl Write,
) -> Result<io::Result<Vec<String>>, WriteTraceError> {
    Err(WriteTraceError::NoParquet { path: path.display().to_string() })
}
