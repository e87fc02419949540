//! Logs of RMM's logging resource adaptor: `Thread,Time,Action,Pointer,Size,Stream`.
//!
//! Every stream is honoured and a refused request becomes an attempt; RMM's own replayer reads each
//! stream as 0 and skips the refusals. A log has no deferred frees: RMM frees in stream order.

use std::collections::HashMap;
use std::io::Read;

use super::counted_warnings;
use crate::trace::{
    BLOCK_BYTES_MAX, Block, Event, Header, History, Op, Recording, Role, Source, SourceKind,
    Stream, Trace,
};
use crate::units::{BlockId, NameId, SiteId, StreamId};

const HEADER: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];
const HALF_DAY_NS: u64 = 12 * 3600 * 1_000_000_000;
const DAY_NS: u64 = 2 * HALF_DAY_NS;

/// An RMM log is wrong at a line.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {found}; expected {expected}")]
pub struct RmmError {
    /// Line in the file, from 1.
    pub line: u64,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: &'static str,
}

/// Reads an RMM log. Also returns what a reader of the trace should know, a line each.
///
/// # Errors
/// The first malformed row, with its line.
pub fn read_rmm_csv(reader: impl Read) -> Result<(Trace, Vec<String>), RmmError> {
    let mut rows =
        csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(reader);
    let header = rows.byte_headers().map_err(|error| csv_error(&error))?;
    if header.iter().ne(HEADER.iter().map(|name| name.as_bytes())) {
        let found: Vec<_> = header.iter().map(String::from_utf8_lossy).collect();
        let found = format!("the header {:?}", found.join(","));
        return Err(RmmError {
            line: 1,
            found,
            expected: "Thread,Time,Action,Pointer,Size,Stream",
        });
    }
    let mut log = Log::default();
    let mut record = csv::StringRecord::new();
    while rows.read_record(&mut record).map_err(|error| csv_error(&error))? {
        let line = record.position().map_or(0, csv::Position::line);
        parse_row(&record).and_then(|row| log.row(&row)).map_err(|(found, expected)| RmmError {
            line,
            found,
            expected,
        })?;
    }
    Ok(log.finish())
}

fn csv_error(error: &csv::Error) -> RmmError {
    let line = error.position().map_or(0, csv::Position::line);
    RmmError { line, found: error.to_string(), expected: "rows of six fields" }
}

/// What is wrong with a field, and what it should be.
type Wrong = (String, &'static str);

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    AllocateFailure,
    Free,
}

struct Row {
    time_ns: u64,
    /// The time is one of a day, which wraps at midnight.
    time_of_day: bool,
    action: Action,
    pointer: u64,
    size_bytes: u64,
    stream_handle: u64,
}

fn parse_row(record: &csv::StringRecord) -> Result<Row, Wrong> {
    if record.len() != HEADER.len() {
        return Err((format!("a row of {} fields", record.len()), "six fields, as in the header"));
    }
    let action = match &record[2] {
        "allocate" => Action::Allocate,
        "allocate failure" => Action::AllocateFailure,
        "free" | "deallocate" => Action::Free,
        other => {
            return Err((format!("action {other:?}"), "allocate, allocate failure or free"));
        }
    };
    let (time_ns, time_of_day) = parse_time(&record[1]).ok_or_else(|| {
        (format!("time {:?}", &record[1]), "seconds, or HH:MM:SS with microseconds")
    })?;
    let pointer = parse_handle(&record[3])
        .ok_or_else(|| (format!("pointer {:?}", &record[3]), "an address in hexadecimal digits"))?;
    let size_bytes = record[4]
        .parse()
        .ok()
        .filter(|&bytes: &u64| bytes <= BLOCK_BYTES_MAX)
        .ok_or_else(|| (format!("size {:?}", &record[4]), "a number of bytes below 2^60"))?;
    let stream_handle = parse_handle(&record[5])
        .ok_or_else(|| (format!("stream {:?}", &record[5]), "a handle in hexadecimal digits"))?;
    Ok(Row { time_ns, time_of_day, action, pointer, size_bytes, stream_handle })
}

/// `0x7f00`, `7f00` (RMM wrote both) or `(nil)`.
fn parse_handle(text: &str) -> Option<u64> {
    if text == "(nil)" {
        return Some(0);
    }
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    if digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

/// Nanoseconds of `1634567890.123456`, `15:47:02.841961` or `15:47:02:841961`; and whether it is a
/// time of day.
fn parse_time(text: &str) -> Option<(u64, bool)> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u64>().ok()).flatten()
    };
    let fraction_ns = |digits: &str| {
        let digits = digits.get(..9).unwrap_or(digits);
        Some(number(digits)? * 10u64.pow(9 - digits.len() as u32))
    };
    let in_ns =
        |seconds: u64, fraction: u64| seconds.checked_mul(1_000_000_000)?.checked_add(fraction);
    let mut parts = text.split([':', '.']);
    if !text.contains(':') {
        let seconds = number(parts.next()?)?;
        let fraction = parts.next().map_or(Some(0), fraction_ns)?;
        return parts.next().is_none().then_some((in_ns(seconds, fraction)?, false));
    }
    let hour = number(parts.next()?).filter(|&hour| hour < 24)?;
    let minute = number(parts.next()?).filter(|&minute| minute < 60)?;
    let second = number(parts.next()?).filter(|&second| second < 61)?;
    let fraction = parts.next().map_or(Some(0), fraction_ns)?;
    let seconds = hour * 3600 + minute * 60 + second;
    parts.next().is_none().then_some((in_ns(seconds, fraction)?, true))
}

/// The trace as it grows.
#[derive(Default)]
struct Log {
    trace: Trace,
    recording: Recording,
    live: HashMap<u64, BlockId, foldhash::fast::RandomState>,
    streams: HashMap<u64, StreamId, foldhash::fast::RandomState>,
    time_first_ns: Option<u64>,
    /// Time of the last row as the file gives it, and what midnights have added so far.
    time_row_ns: u64,
    midnights_ns: u64,
    frees_without_alloc: u64,
    frees_lost: u64,
    frees_elsewhere: u64,
    sizes_zero: u64,
    times_back: u64,
}

impl Log {
    fn row(&mut self, row: &Row) -> Result<(), Wrong> {
        let time_ns = self.time_ns(row);
        match row.action {
            Action::Allocate | Action::AllocateFailure if row.size_bytes == 0 => {
                self.sizes_zero += 1;
            }
            Action::Allocate => {
                let block = self.new_block(row, row.pointer)?;
                if self.live.insert(row.pointer, block).is_some() {
                    self.frees_lost += 1;
                }
                self.trace.events.push(Event { time_ns, op: Op::Alloc(block) });
            }
            Action::AllocateFailure => {
                let block = self.new_block(row, 0)?;
                self.trace.events.push(Event { time_ns, op: Op::Attempt(block) });
            }
            // RMM hands out no memory for a request of 0 bytes, so its free is as empty.
            Action::Free if row.size_bytes == 0 => self.sizes_zero += 1,
            Action::Free => match self.live.remove(&row.pointer) {
                None => self.frees_without_alloc += 1,
                Some(block) => {
                    let stream = self.trace.blocks[block.index()].stream;
                    if self.trace.streams[stream.index()].handle != row.stream_handle {
                        self.frees_elsewhere += 1;
                    }
                    self.trace.events.push(Event { time_ns, op: Op::Free(block) });
                }
            },
        }
        Ok(())
    }

    /// Time since the first row; never goes back. Rows of several threads may be out of order a
    /// little; a time of day that falls by more than half a day has passed midnight.
    fn time_ns(&mut self, row: &Row) -> u64 {
        if row.time_of_day && row.time_ns.saturating_add(HALF_DAY_NS) < self.time_row_ns {
            self.midnights_ns = self.midnights_ns.saturating_add(DAY_NS);
        }
        self.time_row_ns = row.time_ns;
        let time_ns = row.time_ns.saturating_add(self.midnights_ns);
        let since_first = time_ns.saturating_sub(*self.time_first_ns.get_or_insert(time_ns));
        let last = self.trace.events.last().map_or(0, |event| event.time_ns);
        if since_first < last {
            self.times_back += 1;
        }
        since_first.max(last)
    }

    fn new_block(&mut self, row: &Row, address: u64) -> Result<BlockId, Wrong> {
        let too_many = || ("too many blocks".to_owned(), "fewer than four billion");
        let id = u32::try_from(self.trace.blocks.len()).ok().filter(|&id| id != u32::MAX);
        let block = BlockId(id.ok_or_else(too_many)?);
        let streams = &mut self.trace.streams;
        let stream = *self.streams.entry(row.stream_handle).or_insert_with(|| {
            streams.push(Stream { handle: row.stream_handle });
            StreamId(streams.len() as u32 - 1)
        });
        self.trace.blocks.push(Block {
            size_bytes: row.size_bytes,
            stream,
            site: SiteId::NONE,
            name: NameId::NONE,
            role: Role::Unknown,
        });
        self.recording.block_addresses.push(address);
        Ok(block)
    }

    fn finish(mut self) -> (Trace, Vec<String>) {
        let warnings = counted_warnings(&[
            (
                self.frees_without_alloc,
                "frees of blocks that were allocated before the log begins are left out",
            ),
            (
                self.frees_lost,
                "allocates at addresses that were still in use: the older blocks are never freed",
            ),
            (
                self.frees_elsewhere,
                "frees on another stream than the allocate's: taken as frees on the allocate's stream",
            ),
            (self.sizes_zero, "rows of 0 bytes are left out"),
            (self.times_back, "rows are earlier than the one before: their times were raised"),
        ]);
        let is_alloc = |event: &&Event| matches!(event.op, Op::Alloc(_));
        let allocs = self.trace.events.iter().filter(is_alloc).count() as u64;
        self.trace.header = Header {
            source: Source { kind: SourceKind::RmmCsv, version: None },
            history: History {
                frees_without_alloc: self.frees_without_alloc,
                allocs,
                ..History::default()
            },
            ..Header::default()
        };
        self.trace.recording = Some(self.recording);
        (self.trace, warnings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_in_every_form() {
        assert_eq!(parse_time("1634567890.123456"), Some((1_634_567_890_123_456_000, false)));
        assert_eq!(parse_time("12"), Some((12_000_000_000, false)));
        let of_day = ((15 * 60 + 47) * 60 + 2) * 1_000_000_000 + 841_961_000;
        assert_eq!(parse_time("15:47:02.841961"), Some((of_day, true)));
        assert_eq!(parse_time("15:47:02:841961"), Some((of_day, true)));
        for bad in ["", "noon", "25:00:00.0", "1.2.3", "1:2", "-5", "12:00:00.x"] {
            assert_eq!(parse_time(bad), None, "{bad}");
        }
    }

    #[test]
    fn handles_are_hexadecimal_with_or_without_prefix() {
        assert_eq!(parse_handle("0x7f8a40000000"), Some(0x7f8a_4000_0000));
        assert_eq!(parse_handle("7f8a40000000"), Some(0x7f8a_4000_0000));
        assert_eq!(parse_handle("(nil)"), Some(0));
        assert_eq!(parse_handle("0x"), None);
        assert_eq!(parse_handle("+1"), None);
    }
}
