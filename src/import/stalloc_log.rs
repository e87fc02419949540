//! Logs of STAlloc's recorder, `mem_log_dev<D>.txt`: read and written.
//!
//! ```text
//!   1 0x7f0000000000 8192 0            malloc: pointer, bytes as requested, stream
//!   Iteration Index : 0                mark step0
//!   micro-batch : F                    mark step0.forward; B: step0.backward
//!   layers.3.mlp->MoELayer Layer : F-start     enter module "layers.3.mlp->MoELayer : F"
//!   0 0x7f0000000000 8192 0            free
//!   Iteration Index : end              mark end: nothing but requests counts from here on
//! ```
//!
//! The order of lines is all that a log has of time: every event is at 0 ns. What comes before the
//! first iteration stands under the mark `head`. A malloc that gave no pointer becomes an attempt.
//!
//! A log has no deferred frees. Written, a deferred block is freed where its use ends (`done`),
//! which is when its memory is free.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};

use super::counted_warnings;
use crate::trace::{
    BLOCK_BYTES_MAX, Block, Event, Header, History, HookedModule, Op, Role, Source, SourceKind,
    StartState, Stream, Trace, backward_phase, step_name, validate,
};
use crate::units::{BlockId, ModuleId, NameId, PhaseId, SiteId, StreamId};

/// Phase before the first iteration and phase after the last.
const HEAD: &str = "head";
const END: &str = "end";

/// A log is wrong at a line.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {found}; expected {expected}")]
pub struct StallocLogError {
    /// Line in the file, from 1.
    pub line: u64,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: &'static str,
}

/// Reads a log of STAlloc's recorder. Also returns what a reader of the trace should know, a line
/// each.
///
/// # Errors
/// The first malformed line, a free of another size than its malloc, or a file that cannot be read.
pub fn read_stalloc_log(mut reader: impl BufRead) -> Result<(Trace, Vec<String>), StallocLogError> {
    let mut log = Log::default();
    let mut bytes = Vec::new();
    let mut line = 0;
    loop {
        line += 1;
        bytes.clear();
        let wrong = |(found, expected)| StallocLogError { line, found, expected };
        let read = reader.read_until(b'\n', &mut bytes);
        if read.map_err(|error| wrong((error.to_string(), "a readable file")))? == 0 {
            return Ok(log.finish());
        }
        log.line(&String::from_utf8_lossy(&bytes)).map_err(wrong)?;
    }
}

/// What is wrong with a line, and what it should be.
type Wrong = (String, &'static str);

fn shown(line: &str) -> String {
    let shown: String = line.chars().take(80).collect();
    format!("{shown:?}")
}

/// The trace as it grows.
#[derive(Default)]
struct Log {
    trace: Trace,
    live: HashMap<u64, BlockId, foldhash::fast::RandomState>,
    streams: HashMap<u64, StreamId, foldhash::fast::RandomState>,
    phases: HashMap<String, PhaseId>,
    modules: HashMap<String, ModuleId>,
    /// `head`, `stepN` or `end`; nothing before the first line that counts.
    iteration: Option<String>,
    frees_without_alloc: u64,
    frees_lost: u64,
    frees_elsewhere: u64,
    sizes_zero: u64,
    marks_unknown: u64,
}

impl Log {
    fn line(&mut self, line: &str) -> Result<(), Wrong> {
        let line = line.trim();
        if line.is_empty() {
            return Ok(());
        }
        if line.starts_with(|first: char| first.is_ascii_digit()) {
            return self.request(line);
        }
        if self.iteration.as_deref() == Some(END) {
            // As STAlloc's parser: what follows the end is no part of the job.
            return Ok(());
        }
        if let Some(index) = line.strip_prefix("Iteration Index :") {
            return self.iteration(line, index.trim());
        }
        if let Some(pass) = line.strip_prefix("micro-batch :") {
            return self.micro_batch(line, pass.trim());
        }
        self.module(line)
    }

    fn request(&mut self, line: &str) -> Result<(), Wrong> {
        const EXPECTED: &str = "1 or 0, a pointer, a size in bytes and a stream";
        let wrong = || (shown(line), EXPECTED);
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [kind @ ("0" | "1"), pointer, size, stream] = fields[..] else { return Err(wrong()) };
        let pointer = handle(pointer).ok_or_else(wrong)?;
        let stream = handle(stream).ok_or_else(wrong)?;
        let digits = size.bytes().all(|byte| byte.is_ascii_digit());
        let size_bytes: u64 = size.parse().ok().filter(|_| digits).ok_or_else(wrong)?;
        if size_bytes > BLOCK_BYTES_MAX {
            return Err((shown(line), "a size of less than 2^60 bytes"));
        }
        if self.iteration.is_none() {
            self.begin(HEAD.to_owned());
        }
        if size_bytes == 0 {
            self.sizes_zero += 1;
            return Ok(());
        }
        match kind {
            "1" => self.malloc(pointer, size_bytes, stream),
            _ => self.free(line, pointer, size_bytes, stream),
        }
    }

    fn malloc(&mut self, pointer: u64, size_bytes: u64, stream: u64) -> Result<(), Wrong> {
        let too_many = || ("too many blocks".to_owned(), "fewer than four billion");
        let id = u32::try_from(self.trace.blocks.len()).ok().filter(|&id| id != u32::MAX);
        let block = BlockId(id.ok_or_else(too_many)?);
        let streams = &mut self.trace.streams;
        let stream = *self.streams.entry(stream).or_insert_with(|| {
            streams.push(Stream { handle: stream });
            StreamId(streams.len() as u32 - 1)
        });
        let (site, name, role) = (SiteId::NONE, NameId::NONE, Role::Unknown);
        self.trace.blocks.push(Block { size_bytes, stream, site, name, role });
        if pointer == 0 {
            self.push(Op::Attempt(block));
            return Ok(());
        }
        if self.live.insert(pointer, block).is_some() {
            self.frees_lost += 1;
        }
        self.push(Op::Alloc(block));
        Ok(())
    }

    fn free(
        &mut self,
        line: &str,
        pointer: u64,
        size_bytes: u64,
        stream: u64,
    ) -> Result<(), Wrong> {
        let Some(block) = self.live.remove(&pointer) else {
            self.frees_without_alloc += u64::from(pointer != 0);
            return Ok(());
        };
        let row = self.trace.blocks[block.index()];
        if row.size_bytes != size_bytes {
            return Err((shown(line), "the size of the malloc that gave this pointer"));
        }
        if self.trace.streams[row.stream.index()].handle != stream {
            self.frees_elsewhere += 1;
        }
        self.push(Op::Free(block));
        Ok(())
    }

    fn iteration(&mut self, line: &str, index: &str) -> Result<(), Wrong> {
        if index == END {
            self.begin(END.to_owned());
            return Ok(());
        }
        let digits = index.bytes().all(|byte| byte.is_ascii_digit());
        let number: Option<u64> = index.parse().ok().filter(|_| digits);
        let number = number.ok_or_else(|| (shown(line), "the number of an iteration, or end"))?;
        self.begin(format!("step{number}"));
        Ok(())
    }

    fn micro_batch(&mut self, line: &str, pass: &str) -> Result<(), Wrong> {
        let pass = match pass {
            "F" => "forward",
            "B" => "backward",
            _ => return Err((shown(line), "micro-batch : F or micro-batch : B")),
        };
        let iteration = self.iteration.get_or_insert_with(|| HEAD.to_owned());
        let phase = format!("{iteration}.{pass}");
        self.mark(phase);
        Ok(())
    }

    /// A module begins or ends. Lines of hooks that were never meant for the log have no `Layer`.
    fn module(&mut self, line: &str) -> Result<(), Wrong> {
        const EXPECTED: &str = "a request, `Iteration Index : N`, `micro-batch : F` or `B`, or \
                                `PATH->CLASS Layer : F-start`, F-end, B-start or B-end";
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (name, what) = match fields[..] {
            [name, "Layer", ":", what] => (Some(name), what),
            [_, ":", what] => (None, what),
            _ => return Err((shown(line), EXPECTED)),
        };
        let (backward, start) = match what {
            "F-start" => (false, true),
            "F-end" => (false, false),
            "B-start" => (true, true),
            "B-end" => (true, false),
            _ => return Err((shown(line), EXPECTED)),
        };
        let Some(name) = name else {
            self.marks_unknown += 1;
            return Ok(());
        };
        let (path, class) = name.split_once("->").unwrap_or((name, ""));
        let name = HookedModule { path, class, backward: Some(backward) }.name();
        let modules = &mut self.trace.modules;
        let module = *self.modules.entry(name).or_insert_with_key(|name| {
            modules.push(name.clone());
            ModuleId(modules.len() as u32 - 1)
        });
        self.push(if start { Op::ModuleEnter(module) } else { Op::ModuleLeave(module) });
        Ok(())
    }

    fn begin(&mut self, iteration: String) {
        self.iteration = Some(iteration.clone());
        self.mark(iteration);
    }

    fn mark(&mut self, phase: String) {
        let phases = &mut self.trace.phases;
        let phase = *self.phases.entry(phase).or_insert_with_key(|phase| {
            phases.push(phase.clone());
            PhaseId(phases.len() as u32 - 1)
        });
        self.push(Op::Mark(phase));
    }

    fn push(&mut self, op: Op) {
        self.trace.events.push(Event { time_ns: 0, op });
    }

    fn finish(mut self) -> (Trace, Vec<String>) {
        let warnings = counted_warnings(&[
            (
                self.frees_without_alloc,
                "frees of blocks that were allocated before the log begins are left out",
            ),
            (
                self.frees_lost,
                "mallocs gave pointers that were still in use: the older blocks are never freed",
            ),
            (
                self.frees_elsewhere,
                "frees on another stream than the malloc's: taken as frees on the malloc's stream",
            ),
            (self.sizes_zero, "requests of 0 bytes are left out"),
            (self.marks_unknown, "lines of hooks without a layer are left out"),
        ]);
        let is_alloc = |event: &&Event| matches!(event.op, Op::Alloc(_));
        let allocs = self.trace.events.iter().filter(is_alloc).count() as u64;
        let frees_without_alloc = self.frees_without_alloc;
        self.trace.header = Header {
            source: Source { kind: SourceKind::StallocLog, version: None },
            history: History { frees_without_alloc, allocs, ..History::default() },
            ..Header::default()
        };
        (self.trace, warnings)
    }
}

/// A pointer or stream as a log prints it: `0x7f00`, or `0`.
fn handle(text: &str) -> Option<u64> {
    let digits = match text.strip_prefix("0x") {
        Some(digits) => digits,
        None => return (text == "0").then_some(0),
    };
    if digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

/// How to write a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StallocLogOptions {
    /// If the trace has iterations and no end: end it, and free what is still live, in the order of
    /// allocation. STAlloc's parser refuses a log without.
    pub finish: bool,
}

impl Default for StallocLogOptions {
    fn default() -> Self {
        StallocLogOptions { finish: true }
    }
}

/// Writes a trace as a log of STAlloc's recorder: a fresh pointer for every request. Returns
/// warnings about what a log cannot hold.
///
/// # Errors
/// If writing fails; [`io::ErrorKind::InvalidInput`] for a trace that is not [valid](validate).
pub fn write_stalloc_log(
    trace: &Trace,
    options: StallocLogOptions,
    writer: impl Write,
) -> io::Result<Vec<String>> {
    validate(trace).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let mut out = LogWriter::new(trace, writer);
    for start in trace.start.iter().flat_map(|start| &start.blocks) {
        if start.state != StartState::Free {
            out.malloc(start.block)?;
        }
    }
    let is_step = |event: &Event| match event.op {
        Op::Mark(phase) => step_name(&trace.phases[phase.index()]).is_some(),
        _ => false,
    };
    let last_step = trace.events.iter().rposition(is_step);
    for (at, event) in trace.events.iter().enumerate() {
        out.event(event.op, last_step.is_none_or(|last| at > last))?;
    }
    if options.finish && last_step.is_some() && !out.ended {
        out.finish()?;
    }
    out.writer.flush()?;
    Ok(out.warnings())
}

/// The first pointer, and how far apart they are: any will do, if none comes twice.
const POINTER_FIRST: u64 = 0x0100_0000_0000;
const POINTER_STEP: u64 = 512;

struct LogWriter<'a, W> {
    trace: &'a Trace,
    writer: W,
    /// Live blocks have their pointers.
    pointers: Vec<Option<u64>>,
    requests: u64,
    step: Option<&'a str>,
    backward: bool,
    ended: bool,
    deferred: u64,
    freed_at_end: u64,
    phases_lost: u64,
    names_changed: u64,
    lost: u64,
    lost_timing: bool,
}

impl<'a, W: Write> LogWriter<'a, W> {
    fn new(trace: &'a Trace, writer: W) -> LogWriter<'a, W> {
        LogWriter {
            trace,
            writer,
            pointers: vec![None; trace.blocks.len()],
            requests: 0,
            step: None,
            backward: false,
            ended: false,
            deferred: 0,
            freed_at_end: 0,
            phases_lost: 0,
            names_changed: 0,
            lost: 0,
            lost_timing: trace.events.iter().any(|event| event.time_ns != 0),
        }
    }

    /// One event; `last` if no iteration begins after it.
    fn event(&mut self, op: Op, last: bool) -> io::Result<()> {
        match op {
            Op::Alloc(block) => self.malloc(block),
            Op::Attempt(block) => self.request('1', 0, block),
            Op::Free(block) => self.free(block),
            Op::Done(block) => {
                self.deferred += 1;
                self.free(block)
            }
            // Freed when its use ends.
            Op::Defer(_) => Ok(()),
            Op::Mark(phase) => self.mark(phase, last),
            Op::ModuleEnter(module) => self.module(module, "start"),
            Op::ModuleLeave(module) => self.module(module, "end"),
            Op::EmptyCache
            | Op::Settings(_)
            | Op::PoolEnter(_)
            | Op::PoolLeave(_)
            | Op::PoolDelete(_)
            | Op::Access(_)
            | Op::Transfer(_) => {
                self.lost += 1;
                Ok(())
            }
        }
    }

    fn malloc(&mut self, block: BlockId) -> io::Result<()> {
        self.requests += 1;
        let pointer = POINTER_FIRST + self.requests * POINTER_STEP;
        self.pointers[block.index()] = Some(pointer);
        self.request('1', pointer, block)
    }

    fn free(&mut self, block: BlockId) -> io::Result<()> {
        match self.pointers[block.index()].take() {
            Some(pointer) => self.request('0', pointer, block),
            None => Ok(()),
        }
    }

    fn request(&mut self, kind: char, pointer: u64, block: BlockId) -> io::Result<()> {
        let row = self.trace.blocks[block.index()];
        let stream = self.trace.streams[row.stream.index()].handle;
        let (pointer, stream) = (show_handle(pointer), show_handle(stream));
        writeln!(self.writer, "{kind} {pointer} {} {stream}", row.size_bytes)
    }

    fn mark(&mut self, phase: PhaseId, last: bool) -> io::Result<()> {
        let name = self.trace.phases[phase.index()].as_str();
        if self.ended {
            self.phases_lost += 1;
            return Ok(());
        }
        let step = step_name(name);
        if let Some(step) = step.filter(|_| step != self.step) {
            self.step = Some(step);
            // `step007` is iteration 7.
            let number = step["step".len()..].trim_start_matches('0');
            let number = if number.is_empty() { "0" } else { number };
            writeln!(self.writer, "Iteration Index : {number}")?;
        }
        if step.is_none() && matches!(name, END | "tail") && last && self.step.is_some() {
            return self.end();
        }
        let first = name.split('.').next().unwrap_or(name);
        let counts = step.is_some() || (first == HEAD && self.step.is_none());
        match backward_phase(name).filter(|_| counts) {
            Some(backward) => {
                self.backward = backward;
                let pass = if backward { 'B' } else { 'F' };
                writeln!(self.writer, "micro-batch : {pass}")
            }
            None => {
                self.phases_lost += u64::from(!counts || first != name);
                Ok(())
            }
        }
    }

    fn end(&mut self) -> io::Result<()> {
        self.ended = true;
        writeln!(self.writer, "Iteration Index : {END}")
    }

    fn module(&mut self, module: ModuleId, what: &str) -> io::Result<()> {
        if self.ended {
            self.lost += 1;
            return Ok(());
        }
        let name = self.trace.modules[module.index()].as_str();
        let HookedModule { path, class, backward } = HookedModule::of_name(name);
        let pass = if backward.unwrap_or(self.backward) { 'B' } else { 'F' };
        let name = HookedModule { path, class, backward: None }.name();
        let blank = |c: char| c.is_whitespace() || c.is_control();
        let word = name.replace(blank, "_");
        // A line that begins with a digit would be read as a request.
        let bare = word.is_empty() || word.starts_with(|first: char| first.is_ascii_digit());
        let word = if bare { format!("_{word}") } else { word };
        self.names_changed += u64::from(word != name);
        writeln!(self.writer, "{word} Layer : {pass}-{what}")
    }

    /// Ends the log as a job that ran to its end.
    fn finish(&mut self) -> io::Result<()> {
        self.end()?;
        let mut live: Vec<(u64, usize)> = self
            .pointers
            .iter()
            .enumerate()
            .filter_map(|(block, pointer)| Some(((*pointer)?, block)))
            .collect();
        live.sort_unstable();
        self.freed_at_end = live.len() as u64;
        for (_, block) in live {
            self.free(BlockId(block as u32))?;
        }
        Ok(())
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |count: u64, text: &str| {
            if count > 0 {
                warnings.push(format!("{count} {text}"));
            }
        };
        warn(self.deferred, "deferred frees stand where the use ended: a log has no other");
        warn(
            self.freed_at_end,
            "blocks that are never freed are freed at the end, after `Iteration Index : end`",
        );
        warn(self.phases_lost, "marks are left out: a log has iterations, F and B");
        warn(self.names_changed, "names of modules had to change: blanks, or a digit in front");
        warn(self.lost, "events of pools, caches, settings, accesses and transfers are left out");
        if self.trace.start.is_some() {
            warnings.push("blocks that were there at the start are the first requests".to_owned());
        }
        if self.lost_timing {
            warnings.push("times are left out: a log has only the order of events".to_owned());
        }
        warnings
    }
}

fn show_handle(handle: u64) -> String {
    if handle == 0 { "0".to_owned() } else { format!("{handle:#x}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(log: &str) -> Result<(Trace, Vec<String>), StallocLogError> {
        read_stalloc_log(log.as_bytes())
    }

    #[test]
    fn every_kind_of_line_is_read() {
        let log = "\
1 0x7f0000000200 8192 0
micro-batch : F
Iteration Index : 0
micro-batch : F
a.mlp->MoELayer Layer : F-start
1 0x7f0000000400 100 0x55aa
1 0 4096 0
a.mlp->MoELayer Layer : F-end
token_permutation : F-start
micro-batch : B
0 0x7f0000000400 100 0x55aa

Iteration Index : end
micro-batch : B
0 0x7f0000000200 8192 0
";
        let (trace, warnings) = read(log).expect("reads");
        let ops: Vec<Op> = trace.events.iter().map(|event| event.op).collect();
        let (mark, block, module) = (|id| Op::Mark(PhaseId(id)), BlockId, ModuleId(0));
        assert_eq!(
            ops,
            [
                mark(0),
                Op::Alloc(block(0)),
                mark(1),
                mark(2),
                mark(3),
                Op::ModuleEnter(module),
                Op::Alloc(block(1)),
                Op::Attempt(block(2)),
                Op::ModuleLeave(module),
                mark(4),
                Op::Free(block(1)),
                mark(5),
                Op::Free(block(0)),
            ]
        );
        let phases = ["head", "head.forward", "step0", "step0.forward", "step0.backward", "end"];
        assert_eq!(trace.phases, phases);
        assert_eq!(trace.modules, ["a.mlp->MoELayer : F"]);
        assert_eq!(trace.blocks[1].size_bytes, 100);
        assert_eq!(trace.streams[1].handle, 0x55aa);
        assert_eq!(warnings, ["1 lines of hooks without a layer are left out"]);
    }

    #[test]
    fn a_wrong_line_is_named() {
        let wrong = [
            "1 0x10 512",
            "2 0x10 512 0",
            "1 10 512 0",
            "1 0x10 -1 0",
            "1 0x10 +1 0",
            "1 0x+10 1 0",
            "1 0x10 99999999999999999999 0",
            "1 0x10 1152921504606846976 0",
            "1 0x10 512 0 0",
            "Iteration Index : soon",
            "Iteration Index : 99999999999999999999",
            "micro-batch : C",
            "a.mlp Layer : F-begin",
            "some words",
        ];
        for line in wrong {
            let error = read(&format!("1 0x200 5 0\n{line}\n")).expect_err(line);
            assert_eq!(error.line, 2, "{line}");
        }
        let error = read("1 0x200 5 0\n0 0x200 6 0\n").expect_err("sizes differ");
        assert!(error.to_string().starts_with("line 2: "), "{error}");
    }

    #[test]
    fn odd_requests_are_told() {
        let log = "0 0x100 5 0\n1 0x200 5 0\n1 0x200 6 0\n0 0x200 6 0x1\n1 0x300 0 0\n0 0 9 0\n";
        let (trace, warnings) = read(log).expect("reads");
        assert_eq!(trace.blocks.len(), 2);
        assert_eq!(warnings.len(), 4, "{warnings:?}");
        assert_eq!(trace.header.history.frees_without_alloc, 1);
        validate(&trace).expect("makes sense");
    }
}
