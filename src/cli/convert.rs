//! `fraglab convert`: a trace in another format.

use std::io::{self, Seek as _, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;

use super::Verdict;
use super::console::Console;
use super::input::{self, is_stdio};
use super::output;
use super::progress::Progress;
use crate::import::{StallocLogOptions, write_stalloc_log};
use crate::report::text::counted;
use crate::trace::{
    FileError, OutputFile, Trace, WriteTraceError, unwritten, write_trace_at_level, write_trace_to,
};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab convert snapshot.pickle job.json.zst
  fraglab convert snapshot.pickle job.parquet
  fraglab convert job.json - --to text | less
  zcat log.csv.gz | fraglab convert - job.json --name etl
  fraglab convert snapshot.pickle job.json.zst --strategies recompute,lora
  fraglab convert snapshot.pickle mem_log_dev0.txt --to stalloc

The name of OUT says the format: NAME.json (native, holds everything), NAME.parquet, NAME.txt (for \
people); with .gz or .zst behind it, compressed. --to stalloc writes the log of STAlloc's \
recorder, whatever the name. Warnings tell what the format cannot hold.

Exit codes: 0 good, 2 it could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    files: InOut,

    /// Give the trace another name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Say which strategies the job used: recompute, offload, zero3, ... with commas between
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    strategies: Option<Vec<String>>,
}

/// What is read and what is written.
#[derive(Debug, clap::Args)]
pub(super) struct InOut {
    /// A trace of any format, told by content; `-` is standard input
    #[arg(value_name = "IN")]
    pub(super) input: PathBuf,

    /// The file to write; its name says the format. `-` is standard output, with --to
    #[arg(value_name = "OUT")]
    pub(super) output: PathBuf,

    /// The format on standard output; `stalloc` also for a file
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(super) to: Option<Format>,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    pub(super) gpu: Option<u32>,
}

/// A format that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Native JSON, holds everything
    Json,
    /// One screen for people
    Text,
    /// A row an event
    Parquet,
    /// The log of STAlloc's recorder, as its planner reads it
    Stalloc,
}

impl Format {
    /// A file name whose ending asks for the format.
    fn file_name(self) -> &'static str {
        match self {
            Format::Json => "trace.json",
            Format::Text => "trace.txt",
            Format::Parquet => "trace.parquet",
            Format::Stalloc => "mem_log_dev0.txt",
        }
    }
}

/// Reads one trace and writes it.
///
/// # Errors
/// If it cannot be read or written, or if the output is the input.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    check(args)?;
    let mut imported = {
        let progress = Progress::over(std::slice::from_ref(&args.files.input), false);
        input::read(&args.files.input, &progress.read_options(args.files.gpu))?
    };
    for warning in &imported.warnings {
        console.warn(&args.files.input, warning);
    }
    if let Some(name) = &args.name {
        imported.trace.header.name.clone_from(name);
    }
    if let Some(strategies) = &args.strategies {
        imported.trace.header.strategies.clone_from(strategies);
    }
    put(&imported.trace, &args.files.output, args.files.to, None, console)?;
    Ok(Verdict::Good)
}

/// Writes a trace to a file or to standard output, at a level of Zstandard or at the default, and
/// tells what was written.
///
/// # Errors
/// If it cannot be written; nothing is left half written.
pub(super) fn put(
    trace: &Trace,
    output: &Path,
    to: Option<Format>,
    level: Option<i32>,
    console: &Console,
) -> anyhow::Result<()> {
    let (warnings, written_bytes) = put_quietly(trace, output, to, level)?;
    for warning in &warnings {
        console.warn(output, warning);
    }
    let events = counted(trace.events.len() as u64, "event");
    let size = written_bytes.map_or_else(String::new, |bytes| format!(", {}", Bytes(bytes)));
    console.note(&format!("fraglab: wrote {}: {events}{size}", output.display()));
    Ok(())
}

/// Writes a trace to a file or to standard output; tells nothing, but gives the warnings and how
/// many bytes were written.
///
/// # Errors
/// If it cannot be written; nothing is left half written.
pub(super) fn put_quietly(
    trace: &Trace,
    output: &Path,
    to: Option<Format>,
    level: Option<i32>,
) -> anyhow::Result<(Vec<String>, Option<u64>)> {
    match to {
        Some(format) if is_stdio(output) => write_stdout(trace, format),
        to => Ok((write(trace, output, to, level)?, input::size_on_disk(output))),
    }
}

fn check(args: &Args) -> anyhow::Result<()> {
    check_format(&args.files.output, args.files.to)?;
    output::refuse_overwrite(std::slice::from_ref(&args.files.input), &args.files.output)
}

/// Refuses an output whose format nothing says, or two things say.
///
/// # Errors
/// If standard output has no format, or a file another one than its name's.
pub(super) fn check_format(output: &Path, to: Option<Format>) -> anyhow::Result<()> {
    match (is_stdio(output), to) {
        (true, None) => anyhow::bail!(
            "-: standard output has no name that says the format: add --to json, text, parquet \
             or stalloc"
        ),
        (false, Some(Format::Json | Format::Text | Format::Parquet)) => anyhow::bail!(
            "{}: the name of a file says its format: --to goes with standard output, `-`",
            output.display()
        ),
        _ => Ok(()),
    }
}

/// Writes a file, in the format that its name says unless it is a log of STAlloc.
fn write(
    trace: &Trace,
    path: &Path,
    format: Option<Format>,
    level: Option<i32>,
) -> Result<Vec<String>, WriteTraceError> {
    if format != Some(Format::Stalloc) {
        return write_trace_at_level(trace, path, level);
    }
    let mut file = OutputFile::create_at_level(path, level)?;
    let warnings = write_log(trace, path, &mut file)?;
    file.commit()?;
    Ok(warnings)
}

fn write_log(
    trace: &Trace,
    path: &Path,
    writer: &mut impl Write,
) -> Result<Vec<String>, WriteTraceError> {
    let written = write_stalloc_log(trace, StallocLogOptions::default(), writer);
    Ok(written.map_err(|source| FileError { path: path.display().to_string(), source })?)
}

/// Writes to standard output by way of a temporary file: nothing comes out if writing fails half
/// way. The file has no name, so that it is gone however the program ends.
fn write_stdout(trace: &Trace, format: Format) -> anyhow::Result<(Vec<String>, Option<u64>)> {
    let of_temporary = || format!("-: a temporary file in {}", std::env::temp_dir().display());
    let mut file = tempfile::tempfile().map_err(unwritten).with_context(of_temporary)?;
    let name = Path::new(format.file_name());
    let mut writer = io::BufWriter::new(&mut file);
    let written = match format {
        Format::Stalloc => write_log(trace, name, &mut writer),
        _ => write_trace_to(trace, name, &mut writer),
    };
    let warnings = match written {
        Ok(warnings) => warnings,
        Err(WriteTraceError::File(error)) => {
            return Err(unwritten(error.source)).with_context(of_temporary);
        }
        // The user never chose the name that says the format.
        Err(error) => anyhow::bail!(error.to_string().replacen(format.file_name(), "-", 1)),
    };
    writer.flush().map_err(unwritten).with_context(of_temporary)?;
    drop(writer);
    file.rewind().with_context(of_temporary)?;
    let mut stdout = OutputFile::create(Path::new("-"))?;
    let written_bytes = io::copy(&mut file, &mut stdout).map_err(unwritten).context("-")?;
    stdout.commit()?;
    Ok((warnings, Some(written_bytes)))
}
