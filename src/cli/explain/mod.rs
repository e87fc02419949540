//! `fraglab explain`: is it fragmentation, which kind, and what to do next.
//!
//! One input is read once and told by its content. A text with an out-of-memory message, a
//! `memory_summary()` table or lines of a log is explained by [`message`]; everything else is a
//! trace, explained by [`trace`].

mod message;
mod trace;

use std::io::{BufRead as _, Cursor, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::Verdict;
use super::console::Console;
use super::input;
use super::limits::limits;
use super::output;
use super::progress::Progress;
use super::setup::{SetupArgs, parse_size};
use crate::import::MemoryText;
use crate::trace::{Input, TraceFormat, is_text_trace, read_text_within};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab explain oom.txt
      a pasted message, a whole traceback or log: is it fragmentation, and what would help
  python train.py 2>&1 | fraglab explain -
  fraglab explain summary.txt --full
      the table that torch.cuda.memory_summary() prints, with every figure and the arithmetic
  fraglab explain deepspeed.log --capacity 80GiB
      memory lines of a log: growth a step, and when the device would be full
  fraglab explain snapshot.pickle
      a recorded run: what was refused or held, of which kind the loss is, what pins it, and which
      settings would have helped in replay
  fraglab explain snapshot.pickle --at 91528 --full
      what is held and free after event 91,528 as well, and holes by stream and pool
  fraglab explain snapshot.pickle --json answer.json

Understood are messages of CUDA, HIP, XPU, NPU, MPS, cudaMallocAsync, JAX and RMM, tables of \
memory_summary(), memory lines of DeepSpeed, Megatron, torchtune, llama-recipes and STAlloc, and \
every trace that `fraglab info` reads.

Exit codes: 0 explained, 2 the input cannot be read or holds nothing that is understood.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// A text with a message, table or log about memory, or a trace; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Everything: also the figures as read and the arithmetic
    #[arg(long)]
    full: bool,

    /// Write JSON, `-` for standard output and nothing else there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Which GPU, where there are several
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// Memory of the device, as in 80GiB
    ///
    /// A trace is replayed on a device of that size; of a log that grows it is told when it would be
    /// full.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<Bytes>,

    /// Show what a trace's allocator holds after this event, too
    ///
    /// Events are counted from 0, as --decisions and --timeline of `fraglab run` number them.
    #[arg(long, value_name = "EVENT")]
    at: Option<u64>,

    #[command(flatten)]
    setup: SetupArgs,

    /// Print nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

impl Args {
    /// Whether the answer for people goes to standard output.
    fn shows_text(&self) -> bool {
        !self.quiet && !self.json.as_deref().is_some_and(input::is_stdio)
    }
}

/// Longer texts are not looked through for messages. Traces in text form may be longer.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// Explains a text or a trace.
///
/// # Errors
/// If the input cannot be read or is nothing that is understood, or an output cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    output::check_places(std::slice::from_ref(&args.file), args.json.as_deref().into_iter())?;
    let progress = Progress::over(std::slice::from_ref(&args.file), args.quiet);
    let input = input::open(&args.file, &progress.read_options(args.gpu))?;
    match told(&args.file, input, TEXT_BYTES_MAX)? {
        Told::Text(text) => {
            drop(progress);
            anyhow::ensure!(
                args.at.is_none(),
                "--at: {} is a text, which has no events: expected a trace",
                args.file.display()
            );
            message::execute(args, *text, console)
        }
        Told::Trace(input) => trace::execute(args, input, progress, console),
    }
}

/// What the input is.
enum Told {
    /// Something about memory, written for people.
    Text(Box<MemoryText>),
    /// Anything else that may be a trace, not yet read.
    Trace(Input),
}

/// Tells texts from traces. A text of up to `text_bytes_max` is read whole, and what is no memory
/// text is handed on as if nobody had read it, so that a trace in text form gets its own errors.
fn told(path: &Path, mut input: Input, text_bytes_max: u64) -> anyhow::Result<Told> {
    if !may_be_text(&mut input)? {
        return Ok(Told::Trace(input));
    }
    let mut bytes = Vec::new();
    let read = input.reader.by_ref().take(text_bytes_max + 1).read_to_end(&mut bytes);
    read.with_context(|| path.display().to_string())?;
    if bytes.len() as u64 > text_bytes_max {
        anyhow::ensure!(
            input.is_memory_timeline() || is_text_trace(&String::from_utf8_lossy(&bytes)),
            "{}: a text of more than {}: cut out the lines about memory first",
            path.display(),
            Bytes(text_bytes_max)
        );
        let whole = Cursor::new(bytes).chain(input.reader);
        let input = Input::from_reader(path, Box::new(whole))?;
        return Ok(Told::Trace(input.within(&limits())));
    }
    let text = MemoryText::decode(&bytes);
    let found = MemoryText::read(&text);
    // A trace in text form may quote a message in a comment.
    if !found.is_empty() && read_text_within(&text, &limits()).is_err() {
        return Ok(Told::Text(Box::new(found)));
    }
    let is_json = matches!(input.format(), Ok(TraceFormat::NativeJson));
    if !is_json && !input.is_memory_timeline() && !is_text_trace(&text) {
        anyhow::bail!("{}: {}", path.display(), MemoryText::EXPECTED);
    }
    let input = Input::from_reader(path, Box::new(Cursor::new(bytes)))?;
    Ok(Told::Trace(input.within(&limits())))
}

/// Whether the beginning allows for a text about memory.
fn may_be_text(input: &mut Input) -> anyhow::Result<bool> {
    let format = input.format();
    let head = input.reader.fill_buf().with_context(|| input.path.display().to_string())?;
    Ok(match format {
        Ok(TraceFormat::Text) => true,
        Ok(TraceFormat::NativeJson) => is_json_log(&MemoryText::decode(head)),
        Ok(_) => false,
        // Another encoding than UTF-8 is no reason to refuse a pasted log.
        Err(_) => !head.is_empty() && MemoryText::is_probable_text(head),
    })
}

/// Whether a file that begins with a brace is a log: an object a line, or one that holds a message.
fn is_json_log(head: &str) -> bool {
    // The first key of a native trace.
    if head.contains("\"fraglab_trace\"") {
        return false;
    }
    let first = head.split_once('\n').map(|(first, _)| first.trim_end());
    first.is_some_and(|first| first.ends_with('}')) || MemoryText::is_hinted(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told_of(text: &'static str, text_bytes_max: u64) -> anyhow::Result<Told> {
        let path = Path::new("-");
        let input = Input::from_reader(path, Box::new(text.as_bytes())).expect("opens");
        told(path, input, text_bytes_max)
    }

    #[test]
    fn a_trace_longer_than_texts_may_be_is_read_to_its_end() {
        let text = "# long\n@1ms alloc a 3MiB\nfree a\n";
        for text_bytes_max in [20, text.len() as u64 - 1, text.len() as u64] {
            let Ok(Told::Trace(mut input)) = told_of(text, text_bytes_max) else {
                panic!("{text_bytes_max}: no trace")
            };
            assert_eq!(input.read_to_string().expect("reads"), text);
        }
        let error = told_of("a log\nof something\n", 10).err().expect("refused").to_string();
        assert!(error.contains("more than 10 B: cut out the lines"), "{error}");
    }
}
