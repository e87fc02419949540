//! The native format: one JSON object, laid out in columns.
//!
//! Columns instead of an object an event, because LLM jobs repeat themselves: step after step gives
//! the same run of letters, sizes and distances, which zstd folds away. The format is documented in
//! `traces/README.md`.
//!
//! ```text
//!   "ops"          a a f m ...      one letter an event
//!   "ids"          · · 2 0 ...      a number for the letters that take one
//!   "time_deltas"  0 5 1 0 ...      since the event before
//! ```

mod scan;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{
    Block, Direction, Event, Frame, Header, InvalidTrace, Limits, Op, OverLimit, Pool,
    RecordedAction, RecordedKind, Recording, Role, Sites, StartBlock, StartLayout, StartSegment,
    StartState, Stream, Trace, Transfer, Truth, validate,
};
use crate::units::{
    BlockId, FrameId, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
    harmless_json,
};

/// Version of the native format that is written, and the newest that is read. Version 1 knew
/// neither `settings_changes` nor `start`, version 2 no `model` in the header; whatever they hold means
/// the same in version 3.
pub const NATIVE_VERSION: u32 = 3;

/// The first key of a native trace; its value is the version.
const VERSION_KEY: &str = "fraglab_trace";

/// A native trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// The bytes could not be read or decompressed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not JSON, or not the JSON of a trace.
    #[error("{line}:{column}: {message}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column in bytes, from 1.
        column: usize,
        /// What is wrong.
        message: String,
    },
    /// Of a version that this program does not know.
    #[error(
        "version {found} of the native trace format; this fraglab reads versions 1 to \
         {NATIVE_VERSION}"
    )]
    Version {
        /// The version found.
        found: u32,
    },
    /// Two columns of one table do not match.
    #[error("{column} has {found} entries, expected {expected}: one {each}")]
    Length {
        /// Name of the column.
        column: &'static str,
        /// Its entries.
        found: usize,
        /// Entries that it should have.
        expected: usize,
        /// What each entry stands for.
        each: &'static str,
    },
    /// A letter of a column that holds one letter an entry is unknown.
    #[error("{column}: entry {index} is {letter:?}, expected one of {known}")]
    Letter {
        /// Name of the column.
        column: &'static str,
        /// Index of the entry.
        index: usize,
        /// What stands there.
        letter: char,
        /// The letters there are.
        known: &'static str,
    },
    /// A number that is a difference or a reference leads nowhere.
    #[error("{column}: entry {index} {message}")]
    Number {
        /// Name of the column.
        column: &'static str,
        /// Index of the entry.
        index: usize,
        /// What is wrong.
        message: String,
    },
    /// More events than are taken.
    #[error(transparent)]
    Limit(#[from] OverLimit),
    /// Well-formed, but the trace contradicts itself.
    #[error(transparent)]
    Invalid(#[from] InvalidTrace),
}

impl From<serde_json::Error> for NativeError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let suffix = format!(" at line {line} column {column}");
        let message = text.strip_suffix(&suffix).unwrap_or(&text).to_owned();
        NativeError::Json { line, column, message }
    }
}

/// Reads native JSON to its end and validates the trace.
///
/// # Errors
/// What is wrong and where: line and column, or the column and entry, or the event.
pub fn read_native(reader: impl Read) -> Result<Trace, NativeError> {
    read_native_within(reader, &Limits::default())
}

/// Reads native JSON of at most so many events to its end and validates the trace.
///
/// # Errors
/// What is wrong and where: line and column, or the column and entry, or the event.
pub fn read_native_within(mut reader: impl Read, limits: &Limits) -> Result<Trace, NativeError> {
    // Parsing from memory is a third faster than from a reader, and the columns stay in memory
    // anyway. The buffer grows with what is really there.
    let mut text = Vec::new();
    reader.read_to_end(&mut text)?;
    let trace = parse(&text, limits)?;
    drop(text);
    validate(&trace)?;
    Ok(trace)
}

/// Reads native JSON without validating the trace.
pub(super) fn parse(text: &[u8], limits: &Limits) -> Result<Trace, NativeError> {
    if let Some(body) = scan::body(text) {
        return body.into_trace(limits);
    }
    match serde_json::from_slice::<Document>(text)? {
        Document::Unknown(found) => Err(NativeError::Version { found }),
        Document::Known(body) => body.into_trace(limits),
    }
}

/// Writes native JSON: one line a table, nothing that is empty or all default.
///
/// # Errors
/// If writing fails; [`io::ErrorKind::InvalidInput`] for a trace that is not [valid](validate).
pub fn write_native(trace: &Trace, writer: impl Write) -> io::Result<()> {
    validate(trace).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    print(trace, writer)
}

/// Writes native JSON. Relies on times and actions that ascend, and on nothing else of a valid
/// trace.
pub(super) fn print(trace: &Trace, writer: impl Write) -> io::Result<()> {
    let mut writer = Sections { writer };
    write!(writer.writer, "{{\"{VERSION_KEY}\":{NATIVE_VERSION}")?;
    writer.section("header", &trace.header)?;
    let handles: Vec<u64> = trace.streams.iter().map(|stream| stream.handle).collect();
    writer.section_unless_empty("streams", &handles)?;
    writer.section_unless_empty("pools", &trace.pools)?;
    writer.section_unless_empty("settings_changes", &trace.settings_changes)?;
    writer.section_unless_empty("phases", &trace.phases)?;
    writer.section_unless_empty("modules", &trace.modules)?;
    if !trace.transfers.is_empty() {
        writer.section("transfers", &TransferColumns::from(&trace.transfers[..]))?;
    }
    writer.section_unless_empty("names", &trace.names)?;
    if trace.sites != Sites::default() {
        writer.section("sites", &SiteTables::from(&trace.sites))?;
    }
    if !trace.blocks.is_empty() {
        writer.section("blocks", &BlockColumns::from(&trace.blocks[..]))?;
    }
    if let Some(start) = &trace.start {
        writer.section("start", &StartTables::from(start))?;
    }
    if !trace.events.is_empty() {
        writer.section("events", &EventColumns::from(&trace.events[..]))?;
    }
    if let Some(recording) = &trace.recording {
        writer.section("recording", &RecordingTables::from(recording))?;
    }
    writer.writer.write_all(b"}\n")?;
    writer.writer.flush()
}

/// Writes the keys of the outer object.
struct Sections<W> {
    writer: W,
}

impl<W: Write> Sections<W> {
    fn section(&mut self, key: &str, value: &impl Serialize) -> io::Result<()> {
        write!(self.writer, ",\n\"{key}\":")?;
        // An error of the writer keeps its kind, so that a closed pipe is still known as one.
        let mut serializer = serde_json::Serializer::with_formatter(&mut self.writer, Harmless);
        value.serialize(&mut serializer).map_err(io::Error::from)
    }

    fn section_unless_empty<T: Serialize>(&mut self, key: &str, values: &[T]) -> io::Result<()> {
        if values.is_empty() { Ok(()) } else { self.section(key, &values) }
    }
}

/// Without spaces, and with escapes for what a terminal may obey: a trace may go to one.
struct Harmless;

impl serde_json::ser::Formatter for Harmless {
    fn write_string_fragment<W>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()>
    where
        W: ?Sized + Write,
    {
        writer.write_all(harmless_json(fragment).as_bytes())
    }
}

/// The outer object, once its version is known.
enum Document {
    /// A version that we do not read.
    Unknown(u32),
    Known(Box<Body>),
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VersionFirst;

        impl<'de> Visitor<'de> for VersionFirst {
            type Value = Document;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a JSON object that begins with \"{VERSION_KEY}\": {NATIVE_VERSION}")
            }

            /// The version comes first so that a newer file is told by its version and not by the
            /// first field that we happen not to know.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
                match map.next_key::<String>()? {
                    Some(key) if key == VERSION_KEY => {}
                    found => {
                        let found = found.unwrap_or_default();
                        return Err(A::Error::custom(format!(
                            "the first key is \"{found}\", expected \"{VERSION_KEY}\""
                        )));
                    }
                }
                let version: u32 = map.next_value()?;
                if (1..=NATIVE_VERSION).contains(&version) {
                    return Body::deserialize(MapAccessDeserializer::new(map))
                        .map(|body| Document::Known(Box::new(body)));
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Document::Unknown(version))
            }
        }

        deserializer.deserialize_map(VersionFirst)
    }
}

/// The outer object after its version.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    #[serde(default)]
    header: Header,
    #[serde(default)]
    streams: Vec<u64>,
    #[serde(default)]
    pools: Vec<Pool>,
    #[serde(default)]
    settings_changes: Vec<String>,
    #[serde(default)]
    phases: Vec<String>,
    #[serde(default)]
    modules: Vec<String>,
    #[serde(default)]
    transfers: TransferColumns,
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    sites: SiteTables,
    #[serde(default)]
    blocks: BlockColumns,
    #[serde(default)]
    start: Option<StartTables>,
    #[serde(default)]
    events: EventColumns,
    #[serde(default)]
    recording: Option<RecordingTables>,
}

impl Body {
    fn into_trace(self, limits: &Limits) -> Result<Trace, NativeError> {
        // Told before tables of that length are made: a column that is left out takes no bytes of
        // the file.
        limits.check_events(self.events.ops.len() as u64)?;
        let blocks = self.blocks.into_blocks()?;
        let events = self.events.into_events(blocks.len())?;
        Ok(Trace {
            header: self.header,
            streams: self.streams.into_iter().map(|handle| Stream { handle }).collect(),
            pools: self.pools,
            settings_changes: self.settings_changes,
            phases: self.phases,
            modules: self.modules,
            transfers: self.transfers.into_transfers()?,
            names: self.names,
            sites: self.sites.into(),
            start: self.start.map(|start| start.into_layout()).transpose()?,
            recording: self.recording.map(|r| r.into_recording()).transpose()?,
            blocks,
            events,
        })
    }
}

fn check_length(
    column: &'static str,
    found: usize,
    expected: usize,
    each: &'static str,
) -> Result<(), NativeError> {
    if found == expected {
        Ok(())
    } else {
        Err(NativeError::Length { column, found, expected, each })
    }
}

/// A column may be left out when every entry has its default.
fn or_default<T: Clone>(
    column: &'static str,
    values: Vec<T>,
    default: T,
    length: usize,
    each: &'static str,
) -> Result<Vec<T>, NativeError> {
    if values.is_empty() {
        return Ok(vec![default; length]);
    }
    check_length(column, values.len(), length, each)?;
    Ok(values)
}

/// The column, or nothing if every entry is the default.
fn unless_all<T: PartialEq>(values: Vec<T>, default: &T) -> Vec<T> {
    if values.iter().all(|value| value == default) { Vec::new() } else { values }
}

fn optional(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

/// Reads a column of one letter an entry.
fn letters<T>(
    column: &'static str,
    text: &str,
    known: &'static str,
    value: impl Fn(usize) -> T,
) -> Result<Vec<T>, NativeError> {
    text.chars()
        .enumerate()
        .map(|(index, letter)| match known.find(letter) {
            Some(position) => Ok(value(position)),
            None => Err(NativeError::Letter { column, index, letter, known }),
        })
        .collect()
}

/// From the host, from the device.
const DIRECTION_LETTERS: &str = "hd";

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TransferColumns {
    size_bytes: Vec<u64>,
    /// A letter each: from the `h`ost or from the `d`evice.
    from: String,
}

impl From<&[Transfer]> for TransferColumns {
    fn from(transfers: &[Transfer]) -> Self {
        let letter = |transfer: &Transfer| match transfer.direction {
            Direction::HostToDevice => 'h',
            Direction::DeviceToHost => 'd',
        };
        TransferColumns {
            size_bytes: transfers.iter().map(|transfer| transfer.size_bytes).collect(),
            from: transfers.iter().map(letter).collect(),
        }
    }
}

impl TransferColumns {
    fn into_transfers(self) -> Result<Vec<Transfer>, NativeError> {
        const DIRECTIONS: [Direction; 2] = [Direction::HostToDevice, Direction::DeviceToHost];
        let directions =
            letters("transfers.from", &self.from, DIRECTION_LETTERS, |i| DIRECTIONS[i])?;
        let count = self.size_bytes.len();
        check_length("transfers.from", directions.len(), count, "a transfer")?;
        Ok(self
            .size_bytes
            .into_iter()
            .zip(directions)
            .map(|(size_bytes, direction)| Transfer { size_bytes, direction })
            .collect())
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SiteTables {
    /// Function, file, line.
    #[serde(default)]
    frames: Vec<(String, String, u32)>,
    #[serde(default)]
    stacks: Vec<Vec<FrameId>>,
}

impl From<&Sites> for SiteTables {
    fn from(sites: &Sites) -> Self {
        let row = |frame: &Frame| (frame.name.clone(), frame.filename.clone(), frame.line);
        SiteTables { frames: sites.frames.iter().map(row).collect(), stacks: sites.stacks.clone() }
    }
}

impl From<SiteTables> for Sites {
    fn from(tables: SiteTables) -> Self {
        let frame = |(name, filename, line)| Frame { name, filename, line };
        Sites { frames: tables.frames.into_iter().map(frame).collect(), stacks: tables.stacks }
    }
}

/// In the order of [`Role::ALL`]: parameter, gradient, optimizer, activation, checkpoint,
/// temporary, communication.
const ROLE_LETTERS: &str = ".pgoactm";

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockColumns {
    size_bytes: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stream: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    site: Vec<Option<u32>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    name: Vec<Option<u32>>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    role: String,
}

impl From<&[Block]> for BlockColumns {
    fn from(blocks: &[Block]) -> Self {
        let role: String =
            blocks.iter().map(|b| char::from(ROLE_LETTERS.as_bytes()[b.role as usize])).collect();
        BlockColumns {
            size_bytes: blocks.iter().map(|block| block.size_bytes).collect(),
            stream: unless_all(blocks.iter().map(|block| block.stream.0).collect(), &0),
            site: unless_all(blocks.iter().map(|block| optional(block.site.0)).collect(), &None),
            name: unless_all(blocks.iter().map(|block| optional(block.name.0)).collect(), &None),
            role: if role.bytes().all(|letter| letter == b'.') { String::new() } else { role },
        }
    }
}

impl BlockColumns {
    fn into_blocks(self) -> Result<Vec<Block>, NativeError> {
        const EACH: &str = "a block";
        let count = self.size_bytes.len();
        let streams = or_default("blocks.stream", self.stream, 0, count, EACH)?;
        let sites = or_default("blocks.site", self.site, None, count, EACH)?;
        let names = or_default("blocks.name", self.name, None, count, EACH)?;
        let roles = letters("blocks.role", &self.role, ROLE_LETTERS, |i| Role::ALL[i])?;
        let roles = or_default("blocks.role", roles, Role::Unknown, count, EACH)?;
        let columns = self.size_bytes.into_iter().zip(streams).zip(sites).zip(names).zip(roles);
        Ok(columns
            .map(|((((size_bytes, stream), site), name), role)| Block {
                size_bytes,
                stream: StreamId(stream),
                site: site.map_or(SiteId::NONE, SiteId),
                name: name.map_or(NameId::NONE, NameId),
                role,
            })
            .collect())
    }
}

/// Small, large.
const POOL_SIZE_LETTERS: &str = "sl";

/// Live, deferred, free.
const STATE_LETTERS: &str = "ld.";

const STATES: [StartState; 3] = [StartState::Live, StartState::Deferred, StartState::Free];

/// A size that is known, a guess.
const GUESS_LETTERS: &str = ".g";

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StartTables {
    #[serde(default)]
    segments: StartSegmentColumns,
    #[serde(default)]
    blocks: StartBlockColumns,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StartSegmentColumns {
    address: Vec<u64>,
    size_bytes: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stream: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pool: Vec<Option<u32>>,
    /// A letter a segment: of a `s`mall or of a `l`arge pool.
    large: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    reservation: Vec<Option<u64>>,
    /// Number of blocks.
    blocks: Vec<u32>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StartBlockColumns {
    size_bytes: Vec<u64>,
    block: Vec<Option<u32>>,
    /// A letter a block: `l`ive, `d`eferred or `.` for free.
    state: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    guessed: String,
}

impl From<&StartLayout> for StartTables {
    fn from(start: &StartLayout) -> Self {
        let StartLayout { segments, blocks } = start;
        let guessed: String = match blocks.iter().any(|block| block.guessed) {
            true => blocks.iter().map(|b| if b.guessed { 'g' } else { '.' }).collect(),
            false => String::new(),
        };
        StartTables {
            segments: StartSegmentColumns {
                address: segments.iter().map(|segment| segment.address).collect(),
                size_bytes: segments.iter().map(|segment| segment.size_bytes).collect(),
                stream: unless_all(segments.iter().map(|s| s.stream.0).collect(), &0),
                pool: unless_all(segments.iter().map(|s| optional(s.pool.0)).collect(), &None),
                large: segments.iter().map(|s| if s.large { 'l' } else { 's' }).collect(),
                reservation: unless_all(segments.iter().map(|s| s.reservation).collect(), &None),
                blocks: segments.iter().map(|segment| segment.blocks).collect(),
            },
            blocks: StartBlockColumns {
                size_bytes: blocks.iter().map(|block| block.size_bytes).collect(),
                block: blocks.iter().map(|block| optional(block.block.0)).collect(),
                state: blocks.iter().map(|block| state_letter(block.state)).collect(),
                guessed,
            },
        }
    }
}

fn state_letter(state: StartState) -> char {
    match state {
        StartState::Live => 'l',
        StartState::Deferred => 'd',
        StartState::Free => '.',
    }
}

impl StartTables {
    fn into_layout(self) -> Result<StartLayout, NativeError> {
        Ok(StartLayout {
            segments: self.segments.into_segments()?,
            blocks: self.blocks.into_blocks()?,
        })
    }
}

impl StartSegmentColumns {
    fn into_segments(self) -> Result<Vec<StartSegment>, NativeError> {
        const EACH: &str = "a segment";
        let count = self.address.len();
        let large = letters("start.segments.large", &self.large, POOL_SIZE_LETTERS, |i| i == 1)?;
        check_length("start.segments.size_bytes", self.size_bytes.len(), count, EACH)?;
        check_length("start.segments.large", large.len(), count, EACH)?;
        check_length("start.segments.blocks", self.blocks.len(), count, EACH)?;
        let streams = or_default("start.segments.stream", self.stream, 0, count, EACH)?;
        let pools = or_default("start.segments.pool", self.pool, None, count, EACH)?;
        let bases = or_default("start.segments.reservation", self.reservation, None, count, EACH)?;
        let segment = |index: usize| StartSegment {
            address: self.address[index],
            size_bytes: self.size_bytes[index],
            stream: StreamId(streams[index]),
            pool: pools[index].map_or(PoolId::NONE, PoolId),
            large: large[index],
            reservation: bases[index],
            blocks: self.blocks[index],
        };
        Ok((0..count).map(segment).collect())
    }
}

impl StartBlockColumns {
    fn into_blocks(self) -> Result<Vec<StartBlock>, NativeError> {
        const EACH: &str = "a block of the start";
        let count = self.size_bytes.len();
        let states = letters("start.blocks.state", &self.state, STATE_LETTERS, |i| STATES[i])?;
        check_length("start.blocks.state", states.len(), count, EACH)?;
        check_length("start.blocks.block", self.block.len(), count, EACH)?;
        let guessed = letters("start.blocks.guessed", &self.guessed, GUESS_LETTERS, |i| i == 1)?;
        let guessed = or_default("start.blocks.guessed", guessed, false, count, EACH)?;
        let columns = self.size_bytes.into_iter().zip(self.block).zip(states).zip(guessed);
        Ok(columns
            .map(|(((size_bytes, block), state), guessed)| StartBlock {
                size_bytes,
                block: block.map_or(BlockId::NONE, BlockId),
                state,
                guessed,
            })
            .collect())
    }
}

/// Every letter of `events.ops`, for messages.
const OP_LETTERS: &str = "aAtTfdnumcs[]x()>";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventColumns {
    /// One letter an event.
    ops: String,
    /// The numbers that letters take, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ids: Vec<i64>,
    /// Unit of the time deltas in nanoseconds.
    #[serde(default = "one_ns")]
    time_unit_ns: u64,
    /// Time since the event before, or nothing if all is at time 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    time_deltas: Vec<u64>,
}

fn one_ns() -> u64 {
    1
}

impl Default for EventColumns {
    fn default() -> Self {
        EventColumns {
            ops: String::new(),
            ids: Vec::new(),
            time_unit_ns: one_ns(),
            time_deltas: Vec::new(),
        }
    }
}

impl From<&[Event]> for EventColumns {
    fn from(events: &[Event]) -> Self {
        let mut columns = EventColumns::default();
        let mut last_ns = 0;
        // The id that the next alloc has if blocks are numbered as they are asked for.
        let mut next = 0;
        for event in events {
            columns.push_op(event.op, &mut next);
            columns.time_deltas.push(event.time_ns - last_ns);
            last_ns = event.time_ns;
        }
        columns.time_deltas = unless_all(columns.time_deltas, &0);
        columns.scale_time();
        columns
    }
}

impl EventColumns {
    fn push_op(&mut self, op: Op, next: &mut i64) {
        let (letter, id) = match op {
            Op::Alloc(block) => new_block(block, next, ('a', 'A')),
            Op::Attempt(block) => new_block(block, next, ('t', 'T')),
            Op::Free(block) => ('f', Some(*next - i64::from(block.0))),
            Op::Defer(block) => ('d', Some(*next - i64::from(block.0))),
            Op::Done(block) => ('n', Some(*next - i64::from(block.0))),
            Op::Access(block) => ('u', Some(*next - i64::from(block.0))),
            Op::Mark(phase) => ('m', Some(phase.0.into())),
            Op::EmptyCache => ('c', None),
            Op::Settings(settings) => ('s', Some(settings.0.into())),
            Op::PoolEnter(pool) => ('[', Some(pool.0.into())),
            Op::PoolLeave(pool) => (']', Some(pool.0.into())),
            Op::PoolDelete(pool) => ('x', Some(pool.0.into())),
            Op::ModuleEnter(module) => ('(', Some(module.0.into())),
            Op::ModuleLeave(module) => (')', Some(module.0.into())),
            Op::Transfer(transfer) => ('>', Some(transfer.0.into())),
        };
        self.ops.push(letter);
        self.ids.extend(id);
    }

    /// Writes times in the largest unit that is exact: recordings count in microseconds, and a
    /// column of their zeros would be read and written for nothing.
    fn scale_time(&mut self) {
        for unit_ns in [1_000_000, 1_000] {
            if self.time_deltas.iter().all(|delta| delta.is_multiple_of(unit_ns)) {
                self.time_unit_ns = if self.time_deltas.is_empty() { 1 } else { unit_ns };
                self.time_deltas.iter_mut().for_each(|delta| *delta /= unit_ns);
                return;
            }
        }
    }

    fn into_events(self, blocks: usize) -> Result<Vec<Event>, NativeError> {
        if self.time_unit_ns == 0 {
            return Err(NativeError::Number {
                column: "events.time_unit_ns",
                index: 0,
                message: "is 0, expected at least 1".to_owned(),
            });
        }
        let count = self.ops.len();
        let deltas = or_default("events.time_deltas", self.time_deltas, 0, count, "an event")?;
        let mut reader = OpReader { ids: self.ids.iter(), used: 0, next: 0, blocks };
        let mut events = Vec::with_capacity(count);
        let mut time_ns: u64 = 0;
        for (index, (letter, delta)) in self.ops.bytes().zip(deltas).enumerate() {
            let op = reader.op(index, letter, &self.ops)?;
            time_ns = delta
                .checked_mul(self.time_unit_ns)
                .and_then(|delta_ns| time_ns.checked_add(delta_ns))
                .ok_or_else(|| NativeError::Number {
                    column: "events.time_deltas",
                    index,
                    message: "passes 2^64 ns".to_owned(),
                })?;
            events.push(Event { time_ns, op });
        }
        check_length("events.ids", self.ids.len(), reader.used, "a letter that takes a number")?;
        Ok(events)
    }
}

fn new_block(block: BlockId, next: &mut i64, letters: (char, char)) -> (char, Option<i64>) {
    let id = i64::from(block.0);
    let expected = std::mem::replace(next, id + 1);
    if id == expected { (letters.0, None) } else { (letters.1, Some(id)) }
}

/// Turns letters and numbers into events.
struct OpReader<'a> {
    ids: std::slice::Iter<'a, i64>,
    used: usize,
    next: i64,
    blocks: usize,
}

impl OpReader<'_> {
    fn op(&mut self, index: usize, letter: u8, ops: &str) -> Result<Op, NativeError> {
        Ok(match letter {
            b'a' => Op::Alloc(self.new_block(self.next)?),
            b't' => Op::Attempt(self.new_block(self.next)?),
            b'A' => Op::Alloc(self.explicit()?),
            b'T' => Op::Attempt(self.explicit()?),
            b'f' => Op::Free(self.back()?),
            b'd' => Op::Defer(self.back()?),
            b'n' => Op::Done(self.back()?),
            b'u' => Op::Access(self.back()?),
            b'm' => Op::Mark(PhaseId(self.id()?)),
            b'c' => Op::EmptyCache,
            b's' => Op::Settings(SettingsId(self.id()?)),
            b'[' => Op::PoolEnter(PoolId(self.id()?)),
            b']' => Op::PoolLeave(PoolId(self.id()?)),
            b'x' => Op::PoolDelete(PoolId(self.id()?)),
            b'(' => Op::ModuleEnter(ModuleId(self.id()?)),
            b')' => Op::ModuleLeave(ModuleId(self.id()?)),
            b'>' => Op::Transfer(TransferId(self.id()?)),
            _ => {
                // Every letter before this one is ASCII, so the index is that of a character.
                let letter = ops[index..].chars().next().unwrap_or_default();
                let known = OP_LETTERS;
                return Err(NativeError::Letter { column: "events.ops", index, letter, known });
            }
        })
    }

    fn number(&mut self) -> Result<i64, NativeError> {
        let number = *self.ids.next().ok_or(NativeError::Length {
            column: "events.ids",
            found: self.used,
            expected: self.used + 1,
            each: "a letter that takes a number, or more",
        })?;
        self.used += 1;
        Ok(number)
    }

    fn wrong(&self, message: String) -> NativeError {
        NativeError::Number { column: "events.ids", index: self.used.saturating_sub(1), message }
    }

    /// An index into a table; `validate` checks it against the table.
    fn id(&mut self) -> Result<u32, NativeError> {
        let number = self.number()?;
        u32::try_from(number).map_err(|_| self.wrong(format!("is {number}, no index of a table")))
    }

    fn block(&self, id: Option<i64>) -> Result<BlockId, NativeError> {
        id.and_then(|id| u32::try_from(id).ok())
            .filter(|&id| (id as usize) < self.blocks)
            .map(BlockId)
            .ok_or_else(|| self.wrong(format!("leads to none of the {} blocks", self.blocks)))
    }

    fn new_block(&mut self, id: i64) -> Result<BlockId, NativeError> {
        if id as usize >= self.blocks {
            return Err(NativeError::Length {
                column: "blocks.size_bytes",
                found: self.blocks,
                expected: self.blocks + 1,
                each: "a block that events.ops asks for, or more",
            });
        }
        self.next = id + 1;
        self.block(Some(id))
    }

    fn explicit(&mut self) -> Result<BlockId, NativeError> {
        let number = self.number()?;
        let block = self.block(Some(number))?;
        self.next = number + 1;
        Ok(block)
    }

    fn back(&mut self) -> Result<BlockId, NativeError> {
        let number = self.number()?;
        self.block(self.next.checked_sub(number))
    }
}

/// Segment alloc, free, map, unmap; free completed; out of memory.
const ACTION_LETTERS: &str = "SsMmco";

const ACTION_KINDS: [RecordedKind; 6] = [
    RecordedKind::SegmentAlloc,
    RecordedKind::SegmentFree,
    RecordedKind::SegmentMap,
    RecordedKind::SegmentUnmap,
    RecordedKind::FreeCompleted,
    RecordedKind::Oom,
];

fn action_letter(kind: RecordedKind) -> char {
    match kind {
        RecordedKind::SegmentAlloc => 'S',
        RecordedKind::SegmentFree => 's',
        RecordedKind::SegmentMap => 'M',
        RecordedKind::SegmentUnmap => 'm',
        RecordedKind::FreeCompleted => 'c',
        RecordedKind::Oom => 'o',
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordingTables {
    /// Every address once, in order of first use: a caching allocator hands out few, again and
    /// again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    address_table: Vec<u64>,
    /// Index into the table, a block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    address: Vec<u32>,
    #[serde(default)]
    actions: ActionColumns,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    truth: Option<Truth>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ActionColumns {
    /// Difference to the event of the action before.
    #[serde(default)]
    event_deltas: Vec<u32>,
    #[serde(default)]
    kind: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    block: Vec<Option<u32>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stream: Vec<u32>,
    #[serde(default)]
    address: Vec<u64>,
    #[serde(default)]
    size_bytes: Vec<u64>,
}

impl From<&Recording> for RecordingTables {
    fn from(recording: &Recording) -> Self {
        let mut tables = RecordingTables {
            actions: ActionColumns::from(&recording.actions[..]),
            truth: recording.truth.clone(),
            ..Default::default()
        };
        let mut known: HashMap<u64, u32, foldhash::fast::FixedState> = HashMap::default();
        for &address in &recording.block_addresses {
            let index = *known.entry(address).or_insert_with(|| {
                tables.address_table.push(address);
                tables.address_table.len() as u32 - 1
            });
            tables.address.push(index);
        }
        tables
    }
}

impl RecordingTables {
    fn into_recording(self) -> Result<Recording, NativeError> {
        let address = |(index, &entry): (usize, &u32)| {
            self.address_table.get(entry as usize).copied().ok_or_else(|| NativeError::Number {
                column: "recording.address",
                index,
                message: format!("is {entry}: address_table has {}", self.address_table.len()),
            })
        };
        Ok(Recording {
            block_addresses: self
                .address
                .iter()
                .enumerate()
                .map(address)
                .collect::<Result<_, _>>()?,
            actions: self.actions.into_actions()?,
            truth: self.truth,
        })
    }
}

impl From<&[RecordedAction]> for ActionColumns {
    fn from(actions: &[RecordedAction]) -> Self {
        let mut last = 0;
        let delta =
            |action: &RecordedAction| action.event - std::mem::replace(&mut last, action.event);
        ActionColumns {
            event_deltas: actions.iter().map(delta).collect(),
            kind: actions.iter().map(|action| action_letter(action.kind)).collect(),
            block: unless_all(actions.iter().map(|a| optional(a.block.0)).collect(), &None),
            stream: unless_all(actions.iter().map(|action| action.stream.0).collect(), &0),
            address: actions.iter().map(|action| action.address).collect(),
            size_bytes: actions.iter().map(|action| action.size_bytes).collect(),
        }
    }
}

impl ActionColumns {
    fn into_actions(self) -> Result<Vec<RecordedAction>, NativeError> {
        const EACH: &str = "an action";
        let kinds =
            letters("recording.actions.kind", &self.kind, ACTION_LETTERS, |i| ACTION_KINDS[i])?;
        let count = kinds.len();
        let deltas = self.event_deltas;
        check_length("recording.actions.event_deltas", deltas.len(), count, EACH)?;
        check_length("recording.actions.address", self.address.len(), count, EACH)?;
        check_length("recording.actions.size_bytes", self.size_bytes.len(), count, EACH)?;
        let blocks = or_default("recording.actions.block", self.block, None, count, EACH)?;
        let streams = or_default("recording.actions.stream", self.stream, 0, count, EACH)?;
        let mut event: u32 = 0;
        let mut actions = Vec::with_capacity(count);
        for (index, kind) in kinds.into_iter().enumerate() {
            event = event.checked_add(deltas[index]).ok_or_else(|| NativeError::Number {
                column: "recording.actions.event_deltas",
                index,
                message: "passes 2^32 events".to_owned(),
            })?;
            actions.push(RecordedAction {
                event,
                kind,
                block: blocks[index].map_or(BlockId::NONE, BlockId),
                stream: StreamId(streams[index]),
                address: self.address[index],
                size_bytes: self.size_bytes[index],
            });
        }
        Ok(actions)
    }
}
