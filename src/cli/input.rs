//! Reading traces, and telling where in a file an error stands.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::alloc::caching::ConfigError;
use crate::experiment::DescriptionError;
use crate::import::{
    self, ImportError, Imported, MemoryText, MinimallocCsv, ReadOptions, read_input,
    read_minimalloc_csv, trace_name,
};
use crate::trace::{FileError, Input, TextError, TraceFormat};
use crate::units::Bytes;
use crate::workload::{JobError, Place};

/// How much of a text is looked at to tell what else than a trace it may be.
const TEXT_HEAD_BYTES: u64 = 1 << 20;

/// The files of a command that answers for each of them.
#[derive(Debug, clap::Args)]
pub(super) struct Files {
    /// Traces of any format, told by content; `-` is standard input
    #[arg(required = true, value_name = "TRACE")]
    pub(super) traces: Vec<PathBuf>,

    /// Write JSON: an object for one trace, an array for several
    #[arg(long)]
    pub(super) json: bool,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    pub(super) gpu: Option<u32>,
}

/// Reads a trace, `-` for standard input.
///
/// # Errors
/// One line that begins with the file name.
pub(super) fn read(path: &Path, options: &ReadOptions) -> Result<Imported, ReadFailure> {
    let input = open(path, options)?;
    read_opened(path, input, options)
}

/// Reads a whole text file that is no trace, `-` for standard input.
///
/// # Errors
/// If it cannot be read, or is not UTF-8 or larger than `bytes_max`, and so hardly `expected`.
pub(super) fn read_text(path: &Path, bytes_max: u64, expected: &str) -> anyhow::Result<String> {
    if is_stdio(path) {
        return text_of(path, &mut io::stdin().lock(), bytes_max, expected);
    }
    anyhow::ensure!(!path.is_dir(), "{}: is a folder: expected {expected}", path.display());
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    text_of(path, &mut file, bytes_max, expected)
}

/// As [`read_text`], from what is opened; `path` names it.
///
/// # Errors
/// As [`read_text`].
pub(super) fn text_of(
    path: &Path,
    reader: &mut dyn Read,
    bytes_max: u64,
    expected: &str,
) -> anyhow::Result<String> {
    let shown = path.display();
    let mut bytes = Vec::new();
    reader.take(bytes_max + 1).read_to_end(&mut bytes).with_context(|| shown.to_string())?;
    anyhow::ensure!(
        bytes.len() as u64 <= bytes_max,
        "{shown}: has more than {}: expected {expected}",
        Bytes(bytes_max)
    );
    String::from_utf8(bytes)
        .map_err(|_| anyhow::anyhow!("{shown}: is no text in UTF-8: expected {expected}"))
}

/// Opens a trace, or what may be one, `-` for standard input.
///
/// # Errors
/// One line that begins with the file name; of a folder, what to do with it.
pub(super) fn open(path: &Path, options: &ReadOptions) -> Result<Input, ReadFailure> {
    if !is_stdio(path) && path.is_dir() {
        return Err(ReadFailure::of_folder(path));
    }
    import::open_input(path, options).map_err(|error| ReadFailure::new(path, &error.into()))
}

/// Reads a trace from what is opened; `path` names it.
///
/// # Errors
/// One line that begins with the file name.
pub(super) fn read_opened(
    path: &Path,
    mut input: Input,
    options: &ReadOptions,
) -> Result<Imported, ReadFailure> {
    let wrong = |error: ImportError| ReadFailure::new(path, &error);
    let head = text_head(path, &mut input).map_err(|error| wrong(error.into()))?;
    read_input(path, input, options).map_err(|error| {
        let in_first_line = text_error(&error).is_some_and(|error| is_first_line(error, &head));
        match in_first_line && tells_of_memory(&head) {
            true => ReadFailure::of_memory_text(path),
            false => wrong(error),
        }
    })
}

/// The beginning of what is told to be a trace in text form, which then stands to be read again;
/// nothing of other formats.
fn text_head(path: &Path, input: &mut Input) -> Result<String, FileError> {
    if input.format().ok() != Some(TraceFormat::Text) {
        return Ok(String::new());
    }
    let mut head = Vec::new();
    let read = input.reader.by_ref().take(TEXT_HEAD_BYTES).read_to_end(&mut head);
    read.map_err(|source| FileError { path: path.display().to_string(), source })?;
    let text = String::from_utf8_lossy(&head).into_owned();
    let rest = std::mem::replace(&mut input.reader, Box::new(io::empty()));
    input.reader = Box::new(Cursor::new(head).chain(rest));
    Ok(text)
}

/// Whether a text is about memory. A trace may quote a message in its comments.
fn tells_of_memory(head: &str) -> bool {
    let lines: Vec<&str> = head.lines().filter(|line| !is_comment(line)).collect();
    !MemoryText::read(&lines.join("\n")).is_empty()
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with('#')
}

/// Whether nothing before the place of an error says anything: what is wrong there already may be
/// no trace at all.
fn is_first_line(error: &TextError, head: &str) -> bool {
    let says = |line: &str| !line.trim().is_empty() && !is_comment(line);
    head.lines().position(says).is_some_and(|line| line as u64 + 1 == u64::from(error.line))
}

/// What `plan` can pack.
pub(super) enum Plannable {
    /// A trace of any format.
    Trace(Box<Imported>),
    /// Buffers as their file has them.
    Buffers {
        /// Name of the file without its endings.
        name: String,
        /// The rows.
        csv: MinimallocCsv,
    },
}

/// Reads a trace or a CSV of buffers, `-` for standard input.
///
/// # Errors
/// One line that begins with the file name.
pub(super) fn read_plannable(path: &Path, options: &ReadOptions) -> Result<Plannable, ReadFailure> {
    let wrong = |error: ImportError| ReadFailure::new(path, &error);
    let input = open(path, options)?;
    if input.format().ok() == Some(TraceFormat::MinimallocCsv) {
        let csv = read_minimalloc_csv(input.reader).map_err(|source| {
            wrong(ImportError::Minimalloc { file: path.display().to_string(), source })
        })?;
        let name = trace_name(path).unwrap_or_else(|| path.display().to_string());
        return Ok(Plannable::Buffers { name, csv });
    }
    let imported = read_opened(path, input, options)?;
    Ok(Plannable::Trace(Box::new(imported)))
}

/// An input could not be read: one line that says which, and the place in a text trace or string.
#[derive(Debug)]
pub(super) struct ReadFailure {
    message: String,
    excerpt: Option<String>,
}

impl ReadFailure {
    fn new(path: &Path, error: &ImportError) -> ReadFailure {
        let excerpt = text_error(error).map(TextError::excerpt);
        ReadFailure { message: located(path, error), excerpt }
    }

    /// A folder where a trace was expected.
    pub(super) fn of_folder(path: &Path) -> ReadFailure {
        let folder = path.display();
        let message = format!(
            "{folder}: is a folder, expected a trace: `fraglab info --all {folder}` looks at all \
             traces in it"
        );
        ReadFailure { message, excerpt: None }
    }

    /// A text about memory where a trace was expected.
    fn of_memory_text(path: &Path) -> ReadFailure {
        let file = path.display();
        let message = format!(
            "{file}: the text of an out-of-memory message or a log about memory, no trace: \
             `fraglab explain {file}` explains it"
        );
        ReadFailure { message, excerpt: None }
    }

    /// A settings string that is not accepted.
    pub(super) fn of_settings(error: &ConfigError) -> ReadFailure {
        let message = format!("settings, character {}: {}", error.position, error.message);
        ReadFailure { message, excerpt: Some(error.excerpt()) }
    }

    /// The description of a job that is not accepted.
    pub(super) fn of_job(path: &Path, error: &JobError) -> ReadFailure {
        let separator = if matches!(error.place, Place::Text { .. }) { "" } else { " " };
        let message = format!("{}:{separator}{error}", path.display());
        ReadFailure { message, excerpt: error.excerpt() }
    }

    /// The description of an experiment that is not accepted.
    pub(super) fn of_description(path: &Path, error: &DescriptionError) -> ReadFailure {
        let message = format!("{}:{error}", path.display());
        ReadFailure { message, excerpt: Some(error.excerpt()) }
    }

    /// The line that is wrong, with a caret under the place.
    pub(super) fn excerpt(&self) -> Option<&str> {
        self.excerpt.as_deref()
    }
}

impl fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ReadFailure {}

/// The message of an error with the file name in front, unless it begins with it already.
pub(super) fn located(path: &Path, error: &dyn Error) -> String {
    let (file, message) = (path.display().to_string(), error.to_string());
    let begins_with_file =
        message.strip_prefix(&file).is_some_and(|rest| rest.starts_with([':', ' ']));
    if begins_with_file { message } else { format!("{file}: {message}") }
}

/// The place in a text trace that an error is about.
fn text_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TextError> {
    std::iter::successors(Some(error), |&error| error.source())
        .find_map(|error| error.downcast_ref::<TextError>())
}

/// Whether a path stands for standard input or output.
pub(super) fn is_stdio(path: &Path) -> bool {
    path == Path::new("-")
}

/// Size of a file on the disk in bytes; nothing for standard input or what cannot be looked at.
pub(super) fn size_on_disk(path: &Path) -> Option<u64> {
    if is_stdio(path) {
        return None;
    }
    std::fs::metadata(path).ok().map(|metadata| metadata.len())
}

/// Refuses a list of inputs that reads standard input twice.
///
/// # Errors
/// If `-` stands in it more than once.
pub(super) fn check_stdin_once(paths: &[PathBuf]) -> anyhow::Result<()> {
    anyhow::ensure!(
        paths.iter().filter(|path| is_stdio(path)).count() <= 1,
        "-: standard input can be read only once: name it once"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Message(&'static str);

    #[test]
    fn the_file_name_stands_in_front_exactly_once() {
        let text = |message| located(Path::new("a.txt"), &Message(message));
        assert_eq!(text("3:1: what"), "a.txt: 3:1: what");
        assert_eq!(text("a.txt:3:1: what"), "a.txt:3:1: what");
        assert_eq!(text("a.txt.gz is another"), "a.txt: a.txt.gz is another");
    }
}
