//! The text form: one screen, for people to write and review. The grammar is in `traces/README.md`.
//!
//! Reading takes two steps, so that repeated lines are parsed once and every error, also one of the
//! thousandth turn, names the token that a person can change:
//!
//! ```text
//!   lines ── parse ──> steps with line and column ── run, with an explicit stack ──> events
//! ```
//!
//! The number of events is known before the run, because every line gives a fixed number; a
//! `repeat` that would fill the memory is refused before anything is laid out.

mod write;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use serde::de::value::{Error as WordError, StrDeserializer};
use serde::de::{DeserializeOwned, IntoDeserializer};

use super::validate::{BLOCK_BYTES_MAX, EnteredPools, LIVE_BYTES_MAX};
use super::{
    Block, DeviceCall, Direction, Event, Expectation, Fault, FaultWhen, Limits, ModelParameter,
    ModelUnit, Op, Pool, PoolKind, Role, Source, SourceKind, Trace, Transfer,
};
use crate::units::{
    BlockId, Bytes, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
    caret_under,
};
use write::show_time;
pub use write::write_text;

/// Deepest nesting of `repeat`.
pub const REPEAT_DEPTH_MAX: usize = 16;

/// The name of blocks that are never freed and never spoken of again.
const NAMELESS: &str = "_";

const EVENT_WORDS: &str = "alloc, attempt, free, defer, done, access, mark, empty_cache, \
    settings, pool, enter, leave, transfer, repeat, end";
const HEADER_WORDS: &str = "name, source, device, device_index, start_unix_ns, capacity, \
    device_total, address_space, mappings, limit, conf, addresses, fail, strategies, \
    ranks, unit, option, expect";

/// A text trace is wrong at a place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct TextError {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// What is wrong, what was expected.
    pub message: String,
    /// The line as it stands in the file.
    pub source_line: String,
}

impl TextError {
    /// The line and, below it, a caret at the column. Of a very long line only the part around it.
    pub fn excerpt(&self) -> String {
        caret_under(&self.source_line, self.column)
    }
}

/// Whether the first line that says something begins with a word of the text form, after a time
/// perhaps, or no line says anything. The rest may still be wrong.
pub fn is_text_trace(text: &str) -> bool {
    let says = |line: &&str| !line.is_empty() && !line.starts_with('#');
    let Some(line) = text.lines().map(str::trim).find(says) else { return true };
    let is_end = |c: char| c.is_whitespace() || c == '#';
    let (first, rest) = line.split_at(line.find(is_end).unwrap_or(line.len()));
    let word = match first.starts_with('@') {
        true => rest.trim_start().split(is_end).next().unwrap_or_default(),
        false => first,
    };
    [HEADER_WORDS, EVENT_WORDS].iter().any(|words| words.split(", ").any(|known| known == word))
}

/// An error inside a line, before its place is worked out.
struct Wrong {
    /// Byte offset in the line.
    at: usize,
    message: String,
}

impl Wrong {
    fn new(at: usize, message: impl Into<String>) -> Wrong {
        Wrong { at, message: message.into() }
    }

    fn in_line(self, line: u32, source_line: &str) -> TextError {
        let before = source_line.get(..self.at).unwrap_or(source_line);
        TextError {
            line,
            column: u32::try_from(before.chars().count() + 1).unwrap_or(u32::MAX),
            message: self.message,
            source_line: source_line.to_owned(),
        }
    }
}

/// Reads the text form, of at most [`EVENTS_MAX_DEFAULT`](super::EVENTS_MAX_DEFAULT) events.
///
/// # Errors
/// The first thing wrong, with line and column.
pub fn read_text(text: &str) -> Result<Trace, TextError> {
    read_text_within(text, &Limits::default())
}

/// Reads the text form, of at most so many events: those of every `repeat` are counted before the
/// first is made.
///
/// # Errors
/// The first thing wrong, with line and column.
pub fn read_text_within(text: &str, limits: &Limits) -> Result<Trace, TextError> {
    let mut parser = Parser { limits: limits.clone(), ..Parser::default() };
    let mut tokens = Vec::new();
    let mut line_number = 0;
    for line in text.lines() {
        line_number = next_line(line_number, line)?;
        tokenize(line, &mut tokens)
            .and_then(|end| parser.line(line_number, Args::new(&tokens, end)))
            .map_err(|wrong| wrong.in_line(line_number, line))?;
    }
    let at_step = |wrong: Wrong, step: u32| {
        wrong.in_line(step, text.lines().nth(step as usize - 1).unwrap_or_default())
    };
    if let Some(open) = parser.open.last() {
        let wrong = Wrong::new(open.at as usize, "this `repeat` has no `end`");
        return Err(at_step(wrong, open.line));
    }
    let Parser { mut trace, steps, header_lines, .. } = parser;
    if !header_lines.contains_key("source") {
        trace.header.source.kind = SourceKind::Text;
    }
    Runner::new(trace).run(&steps).map_err(|(wrong, line)| at_step(wrong, line))
}

/// Lines and offsets in them are kept in 32 bits.
fn next_line(line_number: u32, line: &str) -> Result<u32, TextError> {
    match line_number.checked_add(1) {
        Some(next) if u32::try_from(line.len()).is_ok() => Ok(next),
        _ => {
            let message = "too long for a text trace: write native JSON".to_owned();
            Err(Wrong { at: 0, message }.in_line(line_number, ""))
        }
    }
}

/// A word of a line.
struct Token<'a> {
    /// Byte offset in the line.
    at: usize,
    text: Cow<'a, str>,
    quoted: bool,
}

impl Token<'_> {
    fn wrong(&self, message: impl Into<String>) -> Wrong {
        Wrong::new(self.at, message)
    }

    /// A unit that stands apart from its number.
    fn loose_unit(&self) -> Wrong {
        self.wrong(format!("unexpected `{0}`: a size is one word, as in 5{0}", self.text))
    }
}

/// Whether a word is a unit of sizes, without a number. Single letters are taken for names.
fn is_unit(word: &str) -> bool {
    let letters = word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_alphabetic());
    letters && format!("1{word}").parse::<Bytes>().is_ok()
}

/// Splits a line at white space and drops its comment. A word in double quotes may hold both, with
/// the escapes of JSON. Returns where the words end.
fn tokenize<'a>(line: &'a str, tokens: &mut Vec<Token<'a>>) -> Result<usize, Wrong> {
    tokens.clear();
    let mut at = 0;
    let mut end = 0;
    loop {
        let rest = &line[at..];
        let Some(skipped) = rest.find(|c: char| !c.is_whitespace()) else { return Ok(end) };
        at += skipped;
        let rest = &line[at..];
        if rest.starts_with('#') {
            return Ok(end);
        }
        let (length, text) = if rest.starts_with('"') {
            let length = quoted_length(rest)
                .ok_or_else(|| Wrong::new(at, "this quote is not closed: expected another `\"`"))?;
            let text: String = serde_json::from_str(&rest[..length]).map_err(|_| {
                Wrong::new(at, "bad quoted text: expected JSON escapes, as in \"a\\\"b\"")
            })?;
            (length, Cow::Owned(text))
        } else {
            let length = rest.find(|c: char| c.is_whitespace() || c == '#').unwrap_or(rest.len());
            (length, Cow::Borrowed(&rest[..length]))
        };
        let quoted = rest.starts_with('"');
        tokens.push(Token { at, text, quoted });
        at += length;
        end = at;
        let follows = line[at..].chars().next();
        if quoted && follows.is_some_and(|c| !c.is_whitespace() && c != '#') {
            return Err(Wrong::new(at, "expected white space after the quoted text"));
        }
    }
}

/// Length in bytes of the quoted text that `rest` begins with, quotes included.
fn quoted_length(rest: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in rest.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// The words of a line that are still to be read.
struct Args<'t, 'a> {
    tokens: &'t [Token<'a>],
    /// Where the words end: the place of what is missing.
    end: usize,
}

impl<'t, 'a> Args<'t, 'a> {
    fn new(tokens: &'t [Token<'a>], end: usize) -> Self {
        Args { tokens, end }
    }

    fn next(&mut self) -> Option<&'t Token<'a>> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn require(&mut self, what: &str) -> Result<&'t Token<'a>, Wrong> {
        let end = self.end;
        self.next().ok_or_else(|| Wrong::new(end, format!("expected {what}")))
    }

    fn finish(&mut self) -> Result<(), Wrong> {
        match self.next() {
            None => Ok(()),
            Some(token) if is_unit(&token.text) => Err(token.loose_unit()),
            Some(token) => Err(token.wrong(format!(
                "unexpected `{}`: expected the end of the line (words with spaces go in quotes)",
                token.text
            ))),
        }
    }

    fn require_last(&mut self, what: &str) -> Result<&'t Token<'a>, Wrong> {
        let token = self.require(what)?;
        self.finish()?;
        Ok(token)
    }
}

fn size_of(token: &Token<'_>) -> Result<u64, Wrong> {
    let bytes: Bytes = token.text.parse().map_err(|error| token.wrong(format!("{error}")))?;
    match bytes.0 {
        0 => Err(token.wrong("a size of 0 bytes: expected 1 byte or more")),
        1..=BLOCK_BYTES_MAX => Ok(bytes.0),
        _ => Err(token.wrong("the size is too large: sizes end at 2^60 - 1 bytes")),
    }
}

/// `MODULE [leaf] [host] PARAMETER=ELEMENTS[:frozen]...`.
fn unit_of(args: &mut Args<'_, '_>) -> Result<ModelUnit, Wrong> {
    let module = args.require("the path of a module")?.text.to_string();
    let mut unit = ModelUnit { module, ..ModelUnit::default() };
    let what = "a parameter and its number of elements, as in weight=4096 or weight=4096:frozen";
    let mut token = args.require(what)?;
    loop {
        match (&*token.text, token.text.rsplit_once('=')) {
            ("leaf", _) => unit.leaf = true,
            ("host", _) => unit.host = true,
            (_, Some((name, elements))) => {
                let (elements, frozen) = match elements.strip_suffix(":frozen") {
                    Some(elements) => (elements, true),
                    None => (elements, false),
                };
                let elements = number_of(token, elements, "a number of elements")?;
                let name = name.to_owned();
                unit.parameters.push(ModelParameter { name, elements, frozen });
            }
            (word, None) => {
                return Err(token.wrong(format!("unexpected `{word}`: expected {what}")));
            }
        }
        match args.next() {
            Some(next) => token = next,
            None => return Ok(unit),
        }
    }
}

/// A decimal or `0x` number.
fn number_of(token: &Token<'_>, text: &str, what: &str) -> Result<u64, Wrong> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        None if !text.starts_with('+') => text.parse().ok(),
        _ => None,
    };
    parsed.ok_or_else(|| token.wrong(format!("`{text}` is not {what}")))
}

/// A word that names a variant of an enum, by the names of the native format.
fn word_of<T: DeserializeOwned>(token: &Token<'_>, text: &str) -> Result<T, Wrong> {
    let words: StrDeserializer<'_, WordError> = text.into_deserializer();
    T::deserialize(words).map_err(|error| {
        let message = error.to_string();
        token.wrong(message.strip_prefix("unknown variant ").unwrap_or(&message).to_owned())
    })
}

/// The name of an enum's variant in the native format.
pub(super) fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// A time in front of an event: `@1.5ms` since the start, `@+20us` since the event before.
fn time_of(token: &Token<'_>) -> Result<StepKind, Wrong> {
    let text = token.text.strip_prefix('@').unwrap_or_default();
    let (relative, text) = match text.strip_prefix('+') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let wrong = || {
        token.wrong(format!(
            "`{}` is not a time: expected @ and a number of whole ns with a unit ns, us, ms or s, \
             as in @1.5ms or @+20us",
            token.text
        ))
    };
    let time_ns = parse_nanos(text).ok_or_else(wrong)?;
    Ok(if relative { StepKind::After(time_ns) } else { StepKind::At(time_ns) })
}

fn parse_nanos(text: &str) -> Option<u64> {
    const DECIMALS_MAX: usize = 9;
    let unit_at = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (number, unit) = text.split_at(unit_at);
    let unit_decimals = match unit {
        "ns" => 0,
        "us" | "µs" => 3,
        "ms" => 6,
        "s" => DECIMALS_MAX,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let fraction = fraction.trim_end_matches('0');
    if whole.is_empty() || fraction.len() > unit_decimals || fraction.contains('.') {
        return None;
    }
    let scale = |digits: usize| 10u64.pow((unit_decimals - digits) as u32);
    let part = if fraction.is_empty() { 0 } else { fraction.parse::<u64>().ok()? };
    let whole = whole.parse::<u64>().ok()?.checked_mul(scale(0))?;
    whole.checked_add(part * scale(fraction.len()))
}

/// What one part of a line does when it is run.
enum StepKind {
    /// The next event is at this time in nanoseconds.
    At(u64),
    /// The next event is this many nanoseconds after the last.
    After(u64),
    /// `alloc` or `attempt`.
    Ask {
        block: Block,
        attempt: bool,
    },
    Free(NameId),
    Defer(NameId),
    Done(NameId),
    Access(NameId),
    Op(Op),
    /// Begins this many turns.
    Repeat(u64),
    /// The body begins at step `body`.
    End {
        body: usize,
    },
}

struct Step {
    line: u32,
    /// Byte offset in the line.
    at: u32,
    kind: StepKind,
}

/// A `repeat` whose `end` has not come yet.
struct OpenRepeat {
    line: u32,
    at: u32,
    /// Index of its step.
    step: usize,
    count: u64,
    /// Events that one turn gives so far.
    events: u64,
}

/// Turns lines into steps and tables.
#[derive(Default)]
struct Parser {
    limits: Limits,
    trace: Trace,
    steps: Vec<Step>,
    open: Vec<OpenRepeat>,
    /// Events outside of open repeats.
    events: u64,
    names: HashMap<String, NameId>,
    phases: HashMap<String, u32>,
    modules: HashMap<String, u32>,
    settings: HashMap<String, u32>,
    /// Index into the pools of the trace.
    pools: HashMap<String, usize>,
    streams: HashMap<u64, StreamId>,
    transfers: HashMap<(u64, bool), TransferId>,
    /// Header words seen, with their lines.
    header_lines: BTreeMap<&'static str, u32>,
    /// Line of the first event or repeat.
    first_event_line: Option<u32>,
}

impl Parser {
    fn line(&mut self, line: u32, mut args: Args<'_, '_>) -> Result<(), Wrong> {
        let Some(mut first) = args.next() else { return Ok(()) };
        let time = match first.text.starts_with('@') && !first.quoted {
            true => Some((time_of(first)?, first.at)),
            false => None,
        };
        if time.is_some() {
            first = args.require("an event after the time")?;
        }
        if self.header_line(line, first, &mut args, time.is_some())? {
            return Ok(());
        }
        self.first_event_line.get_or_insert(line);
        if let Some((kind, at)) = time {
            if matches!(&*first.text, "repeat" | "end") {
                return Err(first.wrong(format!("`{}` has no time: it is no event", first.text)));
            }
            self.push(line, at, kind);
        }
        match &*first.text {
            "repeat" => self.repeat(line, first, &mut args),
            "end" => self.end(first, &mut args),
            _ => self.event(line, first, &mut args),
        }
    }

    fn push(&mut self, line: u32, at: usize, kind: StepKind) {
        // `next_line` has seen to it that offsets fit.
        self.steps.push(Step { line, at: at as u32, kind });
    }

    fn push_event(&mut self, line: u32, at: usize, kind: StepKind) -> Result<(), Wrong> {
        self.push(line, at, kind);
        self.count_events(1, at)
    }

    fn count_events(&mut self, more: u64, at: usize) -> Result<(), Wrong> {
        let events = self.open.last_mut().map_or(&mut self.events, |open| &mut open.events);
        *events = events.saturating_add(more);
        self.limits.check_events(*events).map_err(|over| Wrong::new(at, over.to_string()))
    }

    fn repeat(
        &mut self,
        line: u32,
        word: &Token<'_>,
        args: &mut Args<'_, '_>,
    ) -> Result<(), Wrong> {
        let token = args.require_last("how many times to repeat")?;
        let count = number_of(token, &token.text, "a number of repeats")?;
        if count == 0 {
            return Err(token.wrong("repeats 0 times: expected 1 or more"));
        }
        if self.open.len() == REPEAT_DEPTH_MAX {
            return Err(word.wrong(format!("repeats nest at most {REPEAT_DEPTH_MAX} deep")));
        }
        let at = word.at as u32;
        self.open.push(OpenRepeat { line, at, step: self.steps.len(), count, events: 0 });
        self.push(line, token.at, StepKind::Repeat(count));
        Ok(())
    }

    fn end(&mut self, word: &Token<'_>, args: &mut Args<'_, '_>) -> Result<(), Wrong> {
        args.finish()?;
        let Some(open) = self.open.pop() else {
            return Err(word.wrong("there is no `repeat` that this `end` could end"));
        };
        // A turn without events would take time and give nothing.
        if open.events == 0 {
            self.steps.truncate(open.step);
            return Ok(());
        }
        self.push(open.line, open.at as usize, StepKind::End { body: open.step + 1 });
        let events = open.events.saturating_mul(open.count);
        self.count_events(events, word.at).map_err(|wrong| {
            word.wrong(format!("with the `repeat` of line {}, {}", open.line, wrong.message))
        })
    }

    /// Reads a header line, or says that it is none.
    fn header_line(
        &mut self,
        line: u32,
        word: &Token<'_>,
        args: &mut Args<'_, '_>,
        timed: bool,
    ) -> Result<bool, Wrong> {
        let Some(known) = HEADER_WORDS.split(", ").find(|known| *known == word.text) else {
            return Ok(false);
        };
        if timed {
            return Err(word.wrong(format!("`{known}` has no time: it is no event")));
        }
        if known == "expect" {
            return self.expectation(line, word, args).map(|()| true);
        }
        if let Some(first) = self.first_event_line {
            return Err(word.wrong(format!(
                "`{known}` belongs before the first event, which is in line {first}"
            )));
        }
        if !matches!(known, "fail" | "unit" | "option")
            && let Some(earlier) = self.header_lines.insert(known, line)
        {
            return Err(word.wrong(format!("`{known}` stands already in line {earlier}")));
        }
        self.header_value(known, args).map(|()| true)
    }

    fn header_value(&mut self, word: &str, args: &mut Args<'_, '_>) -> Result<(), Wrong> {
        let header = &mut self.trace.header;
        match word {
            "name" => header.name = args.require_last("the name of the job")?.text.to_string(),
            "device" => {
                header.device.name =
                    Some(args.require_last("the name of the device")?.text.to_string());
            }
            "device_index" => {
                let token = args.require_last("the index of the device")?;
                let index = number_of(token, &token.text, "an index")?;
                let index = u32::try_from(index).map_err(|_| token.wrong("the index is too large"));
                header.device.index = Some(index?);
            }
            "start_unix_ns" => {
                let token = args.require_last("nanoseconds since 1970")?;
                header.start_unix_ns =
                    Some(number_of(token, &token.text, "a number of nanoseconds")?);
            }
            "capacity" => {
                header.device.capacity_bytes = Some(size_of(args.require_last("a size")?)?)
            }
            "device_total" => {
                header.device.total_bytes = Some(size_of(args.require_last("a size")?)?)
            }
            "address_space" => {
                header.device.address_bytes_max = Some(size_of(args.require_last("a size")?)?)
            }
            "mappings" => {
                let token = args.require_last("the most mappings at once")?;
                header.device.mappings_max = Some(number_of(token, &token.text, "a number")?);
            }
            "limit" => header.limit_bytes = Some(size_of(args.require_last("a size")?)?),
            "conf" => header.settings = Some(args.require_last("the settings")?.text.to_string()),
            "addresses" => {
                let token = args.require_last("ascending, descending, chunks or recorded")?;
                header.address_policy = Some(word_of(token, &token.text)?);
            }
            "strategies" => {
                let token = args.require_last("strategies, with commas between them")?;
                header.strategies = token.text.split(',').map(str::to_owned).collect();
            }
            "source" => {
                let token = args.require("the kind of the source")?;
                let kind = word_of(token, &token.text)?;
                let version = args.next().map(|version| version.text.to_string());
                header.source = Source { kind, version };
                args.finish()?;
            }
            "ranks" => {
                let model = header.model.get_or_insert_default();
                let count = |token: &Token<'_>| {
                    let count = number_of(token, &token.text, "a number of ranks")?;
                    u32::try_from(count).map_err(|_| token.wrong("too many ranks"))
                };
                model.ranks = count(args.require("the number of data-parallel ranks")?)?;
                model.local_ranks = match args.next() {
                    Some(local) => count(local)?,
                    None => model.ranks,
                };
                args.finish()?;
            }
            "option" => {
                let key = args.require("the name of an option")?.text.to_string();
                let value = args.require_last("its value")?.text.to_string();
                header.model.get_or_insert_default().options.insert(key, value);
            }
            "unit" => header.model.get_or_insert_default().units.push(unit_of(args)?),
            _ => header.faults.push(fault_of(args)?),
        }
        Ok(())
    }

    fn expectation(
        &mut self,
        line: u32,
        word: &Token<'_>,
        args: &mut Args<'_, '_>,
    ) -> Result<(), Wrong> {
        if !self.open.is_empty() {
            return Err(word.wrong("`expect` stands outside of `repeat`"));
        }
        let allocator = args.require("an allocator")?.text.to_string();
        let field = args.require("the name of a result")?.text.to_string();
        let value = args.require_last("the expected value")?.text.to_string();
        self.trace.header.expectations.push(Expectation { allocator, field, value, line });
        Ok(())
    }

    fn event(&mut self, line: u32, word: &Token<'_>, args: &mut Args<'_, '_>) -> Result<(), Wrong> {
        let op = match &*word.text {
            "alloc" => return self.ask(line, args, false),
            "attempt" => return self.ask(line, args, true),
            "free" => return self.named(line, args, StepKind::Free),
            "defer" => return self.named(line, args, StepKind::Defer),
            "done" => return self.named(line, args, StepKind::Done),
            "access" => return self.named(line, args, StepKind::Access),
            "pool" => return self.pool(line, args),
            "empty_cache" => args.finish().map(|()| Op::EmptyCache),
            "mark" => {
                let phase = args.require_last("the name of a phase")?;
                let id = intern(&mut self.phases, &mut self.trace.phases, &phase.text);
                Ok(Op::Mark(PhaseId(id)))
            }
            "settings" => self.settings(args).map(Op::Settings),
            "enter" => self.module(args).map(Op::ModuleEnter),
            "leave" => self.module(args).map(Op::ModuleLeave),
            "transfer" => self.transfer(args).map(Op::Transfer),
            other => Err(word.wrong(format!(
                "unknown word `{other}`: expected an event ({EVENT_WORDS}) or a header line \
                 ({HEADER_WORDS})"
            ))),
        }?;
        self.push_event(line, word.at, StepKind::Op(op))
    }

    /// All words to the end of the line: settings are often written with a space after a comma.
    fn settings(&mut self, args: &mut Args<'_, '_>) -> Result<SettingsId, Wrong> {
        let mut settings = args.require("the settings")?.text.to_string();
        while let Some(more) = args.next() {
            settings.push(' ');
            settings.push_str(&more.text);
        }
        let id = intern(&mut self.settings, &mut self.trace.settings_changes, &settings);
        Ok(SettingsId(id))
    }

    fn module(&mut self, args: &mut Args<'_, '_>) -> Result<ModuleId, Wrong> {
        let module = args.require_last("the name of a module")?;
        Ok(ModuleId(intern(&mut self.modules, &mut self.trace.modules, &module.text)))
    }

    fn transfer(&mut self, args: &mut Args<'_, '_>) -> Result<TransferId, Wrong> {
        let size_bytes = size_of(args.require("a size")?)?;
        let token = args.require_last("the direction, h2d or d2h")?;
        let direction = match &*token.text {
            "h2d" => Direction::HostToDevice,
            "d2h" => Direction::DeviceToHost,
            other => {
                return Err(token.wrong(format!("`{other}` is no direction: expected h2d or d2h")));
            }
        };
        let transfers = &mut self.trace.transfers;
        let key = (size_bytes, direction == Direction::HostToDevice);
        Ok(*self.transfers.entry(key).or_insert_with(|| {
            transfers.push(Transfer { size_bytes, direction });
            TransferId(transfers.len() as u32 - 1)
        }))
    }

    fn ask(&mut self, line: u32, args: &mut Args<'_, '_>, attempt: bool) -> Result<(), Wrong> {
        let name_token = args.require("a name")?;
        let size_bytes = size_of(args.require("a size")?)?;
        let mut handle = None;
        let mut role = None;
        while let Some(option) = args.next() {
            let text = if option.quoted { "" } else { &*option.text };
            match text.split_once('=') {
                Some(("stream", value)) if handle.is_none() => {
                    handle = Some(number_of(option, value, "the handle of a stream")?);
                }
                Some(("role", value)) if role.is_none() => {
                    role = Some(word_of::<Role>(option, value)?);
                }
                Some((twice @ ("stream" | "role"), _)) => {
                    return Err(option.wrong(format!("`{twice}=` stands twice")));
                }
                _ if is_unit(text) => return Err(option.loose_unit()),
                _ => {
                    return Err(option.wrong(format!(
                        "unexpected `{}`: expected stream=HANDLE, role=ROLE or the end of the line",
                        option.text
                    )));
                }
            }
        }
        let name = match &*name_token.text {
            NAMELESS if !name_token.quoted => NameId::NONE,
            name => self.name(name),
        };
        let stream = self.stream(handle.unwrap_or(0));
        let role = role.unwrap_or_default();
        let block = Block { size_bytes, stream, site: SiteId::NONE, name, role };
        self.push_event(line, name_token.at, StepKind::Ask { block, attempt })
    }

    fn name(&mut self, name: &str) -> NameId {
        if let Some(&id) = self.names.get(name) {
            return id;
        }
        let id = NameId(self.trace.names.len() as u32);
        self.trace.names.push(name.to_owned());
        self.names.insert(name.to_owned(), id);
        id
    }

    fn stream(&mut self, handle: u64) -> StreamId {
        *self.streams.entry(handle).or_insert_with(|| self.trace.stream_with_handle(handle))
    }

    /// `free a b`: one event a name.
    fn named(
        &mut self,
        line: u32,
        args: &mut Args<'_, '_>,
        kind: fn(NameId) -> StepKind,
    ) -> Result<(), Wrong> {
        let mut token = args.require("one or more names")?;
        loop {
            if token.text == NAMELESS && !token.quoted {
                return Err(token.wrong("the name `_` is never freed: give the block a name"));
            }
            // Lines run for the first time in the order in which they stand, so a name that no line
            // above has given is unknown in every turn of every repeat.
            let Some(&name) = self.names.get(&*token.text) else {
                return Err(token.wrong(format!(
                    "unknown name `{}`: expected the name of an alloc above",
                    token.text
                )));
            };
            self.push_event(line, token.at, kind(name))?;
            match args.next() {
                Some(next) => token = next,
                None => return Ok(()),
            }
        }
    }

    fn pool(&mut self, line: u32, args: &mut Args<'_, '_>) -> Result<(), Wrong> {
        let action = args.require("enter, leave or delete")?;
        let name = args.require("the name of a pool")?;
        let known = self.pools.get(&*name.text).copied();
        let op = match &*action.text {
            "enter" => Op::PoolEnter,
            "leave" => Op::PoolLeave,
            "delete" => Op::PoolDelete,
            other => {
                return Err(action
                    .wrong(format!("unknown word `{other}`: expected enter, leave or delete")));
            }
        };
        let index = match (&*action.text, known) {
            ("enter", _) => self.enter_pool(known, name, args)?,
            (_, Some(index)) => index,
            (_, None) => {
                return Err(name.wrong(format!(
                    "unknown pool `{}`: expected a pool entered above",
                    name.text
                )));
            }
        };
        args.finish()?;
        self.push_event(line, name.at, StepKind::Op(op(PoolId(index as u32))))
    }

    /// The pool's index in its table. Its first line says what kind it is; later ones may repeat
    /// that.
    fn enter_pool(
        &mut self,
        known: Option<usize>,
        name: &Token<'_>,
        args: &mut Args<'_, '_>,
    ) -> Result<usize, Wrong> {
        let mut pool = Pool {
            name: name.text.to_string(),
            kind: PoolKind::MemPool,
            no_split: false,
            use_on_oom: false,
        };
        let mut told_at = None;
        while let Some(option) = args.next() {
            match &*option.text {
                "no_split" => pool.no_split = true,
                "use_on_oom" => pool.use_on_oom = true,
                "capture" => pool.kind = PoolKind::Capture,
                other => {
                    return Err(option.wrong(format!(
                        "unexpected `{other}`: expected no_split, use_on_oom, capture or the end \
                         of the line"
                    )));
                }
            }
            told_at.get_or_insert(option.at);
        }
        let Some(index) = known else {
            let index = self.trace.pools.len();
            self.pools.insert(pool.name.clone(), index);
            self.trace.pools.push(pool);
            return Ok(index);
        };
        match told_at {
            Some(at) if self.trace.pools[index] != pool => Err(Wrong::new(
                at,
                format!("pool `{}` was first entered with other properties", name.text),
            )),
            _ => Ok(index),
        }
    }
}

fn intern(ids: &mut HashMap<String, u32>, names: &mut Vec<String>, name: &str) -> u32 {
    if let Some(&id) = ids.get(name) {
        return id;
    }
    let id = names.len() as u32;
    names.push(name.to_owned());
    ids.insert(name.to_owned(), id);
    id
}

fn fault_of(args: &mut Args<'_, '_>) -> Result<Fault, Wrong> {
    let token = args.require("a device call")?;
    let call = DeviceCall::from_name(&token.text).ok_or_else(|| {
        let known: Vec<&str> = DeviceCall::ALL.into_iter().map(DeviceCall::name).collect();
        token.wrong(format!("`{}` is no device call: expected {}", token.text, known.join(", ")))
    })?;
    let token = args.require_last("which call fails: a number from 1, or `all`")?;
    let when = match &*token.text {
        "all" => FaultWhen::All,
        text => match number_of(token, text, "a number from 1, or `all`")? {
            0 => return Err(token.wrong("calls are counted from 1")),
            nth => FaultWhen::Nth(nth),
        },
    };
    Ok(Fault { call, when })
}

/// Where the block of a name is in its life.
#[derive(Clone, Copy)]
enum NameState {
    /// No block, and why.
    Gone(&'static str),
    /// Asked for in that line.
    Live(BlockId, u32),
    Deferred(BlockId),
}

/// Runs steps: unrolls repeats, gives blocks their ids, and checks what depends on order.
struct Runner {
    trace: Trace,
    states: Vec<NameState>,
    entered: EnteredPools,
    time_ns: u64,
    live_bytes: u64,
}

impl Runner {
    fn new(trace: Trace) -> Runner {
        let states = vec![NameState::Gone("is not asked for yet"); trace.names.len()];
        let entered = EnteredPools::new(trace.pools.len());
        Runner { trace, states, entered, time_ns: 0, live_bytes: 0 }
    }

    fn run(mut self, steps: &[Step]) -> Result<Trace, (Wrong, u32)> {
        // Turns left of the repeats that are running, innermost last.
        let mut turns: Vec<u64> = Vec::new();
        let mut position = 0;
        while let Some(step) = steps.get(position) {
            position += 1;
            match step.kind {
                StepKind::Repeat(count) => turns.push(count),
                StepKind::End { body } => {
                    if let Some(left) = turns.last_mut() {
                        *left -= 1;
                        if *left > 0 {
                            position = body;
                        } else {
                            turns.pop();
                        }
                    }
                }
                _ => self
                    .step(step)
                    .map_err(|message| (Wrong::new(step.at as usize, message), step.line))?,
            }
        }
        Ok(self.trace)
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        let op = match step.kind {
            StepKind::At(time_ns) if time_ns < self.time_ns => {
                return Err(format!(
                    "the time goes back: the event before is at {}",
                    show_time(self.time_ns)
                ));
            }
            StepKind::At(time_ns) => {
                self.time_ns = time_ns;
                return Ok(());
            }
            StepKind::After(delta_ns) => {
                self.time_ns =
                    self.time_ns.checked_add(delta_ns).ok_or("the time passes 2^64 ns")?;
                return Ok(());
            }
            StepKind::Ask { block, attempt } => self.ask(block, attempt, step.line)?,
            StepKind::Free(name) => {
                let block = self.live(name)?;
                self.release(block);
                self.states[name.index()] = NameState::Gone("is already freed");
                Op::Free(block)
            }
            StepKind::Defer(name) => {
                let block = self.live(name)?;
                self.states[name.index()] = NameState::Deferred(block);
                Op::Defer(block)
            }
            StepKind::Done(name) => Op::Done(self.done(name)?),
            StepKind::Access(name) => Op::Access(self.live(name)?),
            StepKind::Op(op) => {
                let pools = &self.trace.pools;
                let show = |pool: PoolId| format!("pool `{}`", pools[pool.index()].name);
                self.entered.apply(op, pools, show)?;
                op
            }
            StepKind::Repeat(_) | StepKind::End { .. } => return Ok(()),
        };
        self.trace.events.push(Event { time_ns: self.time_ns, op });
        Ok(())
    }

    fn ask(&mut self, block: Block, attempt: bool, line: u32) -> Result<Op, String> {
        let id = BlockId(self.trace.blocks.len() as u32);
        if let Some(name) = block.name.some() {
            let shown = &self.trace.names[name.index()];
            match self.states[name.index()] {
                NameState::Gone(_) => {}
                NameState::Live(_, since) if since == line => {
                    return Err(format!(
                        "`{shown}` is still live since line {since} in the turn before: free it \
                         before the `end`, or call it `_` if it stays"
                    ));
                }
                NameState::Live(_, since) => {
                    return Err(format!(
                        "`{shown}` is still live since line {since}: free it first, or take \
                         another name"
                    ));
                }
                NameState::Deferred(_) => {
                    return Err(format!("`{shown}` is deferred and not done: take another name"));
                }
            }
            self.states[name.index()] = match attempt {
                true => NameState::Gone("was an attempt, which is freed by itself"),
                false => NameState::Live(id, line),
            };
        }
        self.trace.blocks.push(block);
        if attempt {
            return Ok(Op::Attempt(id));
        }
        // Neither addend reaches 2^63, so the sum is exact.
        self.live_bytes += block.size_bytes;
        if self.live_bytes > LIVE_BYTES_MAX {
            return Err("more than 2^63 - 1 bytes are live at once".to_owned());
        }
        Ok(Op::Alloc(id))
    }

    fn release(&mut self, block: BlockId) {
        self.live_bytes -= self.trace.blocks[block.index()].size_bytes;
    }

    fn live(&self, name: NameId) -> Result<BlockId, String> {
        let shown = &self.trace.names[name.index()];
        match self.states[name.index()] {
            NameState::Live(block, _) => Ok(block),
            NameState::Deferred(_) => Err(format!("`{shown}` is already freed and deferred")),
            NameState::Gone(why) => Err(format!("`{shown}` {why}")),
        }
    }

    fn done(&mut self, name: NameId) -> Result<BlockId, String> {
        let shown = &self.trace.names[name.index()];
        match self.states[name.index()] {
            NameState::Deferred(block) => {
                self.release(block);
                self.states[name.index()] = NameState::Gone("is already freed");
                Ok(block)
            }
            NameState::Live(..) => {
                Err(format!("`{shown}` is live: expected `defer` before `done`"))
            }
            NameState::Gone(why) => Err(format!("`{shown}` {why}: `done` goes with `defer`")),
        }
    }
}
