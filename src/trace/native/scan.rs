//! The columns of a native trace, read without going through serde.
//!
//! A trace is mostly long lists of numbers, and reading them is most of what a fleet of small traces
//! costs. This scanner knows the form that [`print`](super::print) writes and whatever spacing and
//! order of keys people add to it.
//!
//! The one design decision: it never says what is wrong. Whatever it does not expect gives nothing,
//! and the document is read again by serde, which then accepts it or names the place. So errors are
//! those of serde, to the letter, and a file without errors is read once.

use serde::de::DeserializeOwned;

use super::{
    ActionColumns, BlockColumns, Body, EventColumns, NATIVE_VERSION, RecordingTables, VERSION_KEY,
    one_ns,
};

/// The document, or nothing if serde has to look at it.
pub(super) fn body(text: &[u8]) -> Option<Body> {
    let mut scan = Scan { text, at: 0 };
    let mut body = None;
    scan.object(|scan, key| {
        if key == VERSION_KEY {
            let version: u32 = scan.number()?;
            let known = body.is_none() && (1..=NATIVE_VERSION).contains(&version);
            body = known.then(Sections::default);
            return known.then_some(());
        }
        body.as_mut()?.section(scan, key)
    })?;
    scan.skip_space();
    (scan.at == text.len()).then_some(body?.into())
}

/// Sections of the outer object that were there.
#[derive(Default)]
struct Sections {
    header: Option<super::Header>,
    streams: Option<Vec<u64>>,
    pools: Option<Vec<super::Pool>>,
    settings_changes: Option<Vec<String>>,
    phases: Option<Vec<String>>,
    modules: Option<Vec<String>>,
    transfers: Option<super::TransferColumns>,
    names: Option<Vec<String>>,
    sites: Option<super::SiteTables>,
    blocks: Option<BlockColumns>,
    start: Option<Option<super::StartTables>>,
    events: Option<EventColumns>,
    recording: Option<RecordingTables>,
}

impl Sections {
    fn section(&mut self, scan: &mut Scan<'_>, key: &str) -> Option<()> {
        match key {
            "header" => once(&mut self.header, scan.value()?),
            "streams" => once(&mut self.streams, scan.numbers()?),
            "pools" => once(&mut self.pools, scan.value()?),
            "settings_changes" => once(&mut self.settings_changes, scan.value()?),
            "phases" => once(&mut self.phases, scan.value()?),
            "modules" => once(&mut self.modules, scan.value()?),
            "transfers" => once(&mut self.transfers, scan.value()?),
            "names" => once(&mut self.names, scan.value()?),
            "sites" => once(&mut self.sites, scan.value()?),
            "blocks" => once(&mut self.blocks, scan.blocks()?),
            "start" => once(&mut self.start, scan.value()?),
            "events" => once(&mut self.events, scan.events()?),
            "recording" => once(&mut self.recording, scan.recording()?),
            _ => None,
        }
    }
}

impl From<Sections> for Body {
    fn from(found: Sections) -> Body {
        Body {
            header: found.header.unwrap_or_default(),
            streams: found.streams.unwrap_or_default(),
            pools: found.pools.unwrap_or_default(),
            settings_changes: found.settings_changes.unwrap_or_default(),
            phases: found.phases.unwrap_or_default(),
            modules: found.modules.unwrap_or_default(),
            transfers: found.transfers.unwrap_or_default(),
            names: found.names.unwrap_or_default(),
            sites: found.sites.unwrap_or_default(),
            blocks: found.blocks.unwrap_or_default(),
            start: found.start.flatten(),
            events: found.events.unwrap_or_default(),
            recording: found.recording,
        }
    }
}

/// Fills a place; nothing if it is filled: a key that comes twice.
fn once<T>(place: &mut Option<T>, value: T) -> Option<()> {
    place.is_none().then(|| *place = Some(value))
}

/// A number of a column.
trait Number: Sized {
    fn of(magnitude: u64, is_negative: bool) -> Option<Self>;
}

impl Number for u64 {
    #[inline]
    fn of(magnitude: u64, is_negative: bool) -> Option<u64> {
        (!is_negative).then_some(magnitude)
    }
}

impl Number for u32 {
    #[inline]
    fn of(magnitude: u64, is_negative: bool) -> Option<u32> {
        u64::of(magnitude, is_negative)?.try_into().ok()
    }
}

impl Number for i64 {
    #[inline]
    fn of(magnitude: u64, is_negative: bool) -> Option<i64> {
        let magnitude = i64::try_from(magnitude).ok()?;
        Some(if is_negative { -magnitude } else { magnitude })
    }
}

/// Most digits of a number that cannot pass 64 bits.
const DIGITS_MAX: usize = 19;

/// A place in the text.
struct Scan<'t> {
    text: &'t [u8],
    at: usize,
}

impl Scan<'_> {
    #[inline]
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    #[inline]
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Goes behind the next byte that is not space, if it is this one.
    #[inline]
    fn expect(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// Goes behind a comma, or behind the end of a list or object. Says whether more follows.
    #[inline]
    fn goes_on(&mut self, end: u8) -> Option<bool> {
        self.skip_space();
        let byte = self.peek()?;
        self.at += 1;
        match byte {
            b',' => Some(true),
            byte if byte == end => Some(false),
            _ => None,
        }
    }

    /// Whether the list or object that was opened ends at once; goes behind its end then.
    fn is_empty(&mut self, end: u8) -> bool {
        self.expect(end).is_some()
    }

    /// An object, key by key.
    fn object(&mut self, mut field: impl FnMut(&mut Self, &str) -> Option<()>) -> Option<()> {
        self.expect(b'{')?;
        if self.is_empty(b'}') {
            return Some(());
        }
        loop {
            let key = self.plain_string()?;
            self.expect(b':')?;
            field(self, &key)?;
            if !self.goes_on(b'}')? {
                return Some(());
            }
        }
    }

    /// A list, entry by entry.
    #[inline]
    fn list<T>(&mut self, entry: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut entries = Vec::new();
        self.expect(b'[')?;
        if self.is_empty(b']') {
            return Some(entries);
        }
        loop {
            entries.push(entry(self)?);
            if !self.goes_on(b']')? {
                return Some(entries);
            }
        }
    }

    fn numbers<T: Number>(&mut self) -> Option<Vec<T>> {
        self.list(Self::number)
    }

    fn optional_numbers(&mut self) -> Option<Vec<Option<u32>>> {
        self.list(|scan| {
            scan.skip_space();
            if scan.peek()? != b'n' {
                return scan.number().map(Some);
            }
            let rest = scan.text[scan.at..].strip_prefix(b"null")?;
            scan.at = scan.text.len() - rest.len();
            Some(None)
        })
    }

    /// A whole number. What follows it tells whether it ends there.
    #[inline]
    fn number<T: Number>(&mut self) -> Option<T> {
        self.skip_space();
        let is_negative = self.peek()? == b'-';
        self.at += usize::from(is_negative);
        let first = self.at;
        let mut magnitude: u64 = 0;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            magnitude = magnitude.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.at += 1;
        }
        let digits = self.at - first;
        // JSON knows no 007, and -0 is no whole number to serde.
        let is_odd = self.text[first..].first() == Some(&b'0') && (digits > 1 || is_negative);
        if digits == 0 || digits > DIGITS_MAX || is_odd {
            return None;
        }
        T::of(magnitude, is_negative)
    }

    /// A string of ASCII in which nothing is escaped.
    fn plain_string(&mut self) -> Option<String> {
        self.expect(b'"')?;
        let rest = &self.text[self.at..];
        let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
        let length = rest.iter().position(|&byte| !is_plain(byte))?;
        let (string, end) = rest.split_at(length);
        if end.first() != Some(&b'"') {
            return None;
        }
        self.at += length + 1;
        String::from_utf8(string.to_vec()).ok()
    }

    /// Anything else, by serde.
    fn value<T: DeserializeOwned>(&mut self) -> Option<T> {
        let mut values = serde_json::Deserializer::from_slice(&self.text[self.at..]).into_iter();
        let value = values.next()?.ok()?;
        self.at += values.byte_offset();
        Some(value)
    }

    fn blocks(&mut self) -> Option<BlockColumns> {
        let (mut size_bytes, mut stream, mut site) = (None, None, None);
        let (mut name, mut role) = (None, None);
        self.object(|scan, key| match key {
            "size_bytes" => once(&mut size_bytes, scan.numbers()?),
            "stream" => once(&mut stream, scan.numbers()?),
            "site" => once(&mut site, scan.optional_numbers()?),
            "name" => once(&mut name, scan.optional_numbers()?),
            "role" => once(&mut role, scan.plain_string()?),
            _ => None,
        })?;
        Some(BlockColumns {
            size_bytes: size_bytes?,
            stream: stream.unwrap_or_default(),
            site: site.unwrap_or_default(),
            name: name.unwrap_or_default(),
            role: role.unwrap_or_default(),
        })
    }

    fn events(&mut self) -> Option<EventColumns> {
        let (mut ops, mut ids, mut time_unit_ns, mut time_deltas) = (None, None, None, None);
        self.object(|scan, key| match key {
            "ops" => once(&mut ops, scan.plain_string()?),
            "ids" => once(&mut ids, scan.numbers()?),
            "time_unit_ns" => once(&mut time_unit_ns, scan.number()?),
            "time_deltas" => once(&mut time_deltas, scan.numbers()?),
            _ => None,
        })?;
        Some(EventColumns {
            ops: ops?,
            ids: ids.unwrap_or_default(),
            time_unit_ns: time_unit_ns.unwrap_or_else(one_ns),
            time_deltas: time_deltas.unwrap_or_default(),
        })
    }

    fn recording(&mut self) -> Option<RecordingTables> {
        let (mut address_table, mut address) = (None, None);
        let (mut actions, mut truth) = (None, None);
        self.object(|scan, key| match key {
            "address_table" => once(&mut address_table, scan.numbers()?),
            "address" => once(&mut address, scan.numbers()?),
            "actions" => once(&mut actions, scan.actions()?),
            "truth" => once(&mut truth, scan.value()?),
            _ => None,
        })?;
        Some(RecordingTables {
            address_table: address_table.unwrap_or_default(),
            address: address.unwrap_or_default(),
            actions: actions.unwrap_or_default(),
            truth: truth.flatten(),
        })
    }

    fn actions(&mut self) -> Option<ActionColumns> {
        let (mut event_deltas, mut kind, mut block) = (None, None, None);
        let (mut stream, mut address, mut size_bytes) = (None, None, None);
        self.object(|scan, key| match key {
            "event_deltas" => once(&mut event_deltas, scan.numbers()?),
            "kind" => once(&mut kind, scan.plain_string()?),
            "block" => once(&mut block, scan.optional_numbers()?),
            "stream" => once(&mut stream, scan.numbers()?),
            "address" => once(&mut address, scan.numbers()?),
            "size_bytes" => once(&mut size_bytes, scan.numbers()?),
            _ => None,
        })?;
        Some(ActionColumns {
            event_deltas: event_deltas.unwrap_or_default(),
            kind: kind.unwrap_or_default(),
            block: block.unwrap_or_default(),
            stream: stream.unwrap_or_default(),
            address: address.unwrap_or_default(),
            size_bytes: size_bytes.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Document, Limits, NativeError, Trace, parse};
    use super::*;

    /// A document with every section, in another spacing than ours.
    const WHOLE: &str = r#"{"fraglab_trace": 3,
        "header": {"name": "a \"b\" é"}, "streams": [0, 9223372036854775807],
        "pools": [{"name": "p"}], "settings_changes": [], "phases": ["step0"], "modules": ["m"],
        "transfers": {"size_bytes": [7], "from": "h"}, "names": ["x"],
        "sites": {"frames": [["f", "a.py", 3]], "stacks": [[0]]},
        "blocks": {"size_bytes": [512, 1024 , 10], "stream": [0,1,0], "site": [null, 0,null],
                   "name": [0,null,null], "role": ".pg"},
        "start": {"segments": {"address": [], "size_bytes": [], "large": "", "blocks": []},
                  "blocks": {"size_bytes": [], "block": [], "state": ""}},
        "events": {"ops": "maafAf>", "ids": [0, 2, 2, -0, 1, 0], "time_unit_ns": 1000,
                   "time_deltas": [0,1,2,3,4,5,6]},
        "recording": {"address_table": [140000000000000], "address": [0,0,0],
                      "actions": {"event_deltas": [1], "kind": "S", "address": [1],
                                  "size_bytes": [2097152]}, "truth": null}
    }"#;

    fn by_serde(text: &[u8]) -> Result<Trace, String> {
        let document = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        match document {
            Document::Unknown(found) => Err(format!("version {found}")),
            Document::Known(body) => {
                body.into_trace(&Limits::default()).map_err(|error| error.to_string())
            }
        }
    }

    fn by_scan(text: &[u8]) -> Option<Result<Trace, String>> {
        body(text).map(|body| {
            body.into_trace(&Limits::default()).map_err(|error: NativeError| error.to_string())
        })
    }

    #[test]
    fn every_section_is_read_as_serde_reads_it() {
        let text = WHOLE.replace("-0", "-1");
        let scanned = by_scan(text.as_bytes()).expect("nothing that serde has to look at");
        assert_eq!(scanned, by_serde(text.as_bytes()));
    }

    #[test]
    fn a_trace_that_we_write_needs_no_serde() {
        let text = "alloc a 1MiB stream=1\nmark step0\ndefer a\ndone a\nalloc _ 3\nempty_cache\n";
        let trace = super::super::super::read_text(text).expect("valid");
        let mut json = Vec::new();
        super::super::print(&trace, &mut json).expect("to memory");
        assert_eq!(by_scan(&json).expect("scanned"), Ok(trace));
    }

    /// Every byte replaced by others, every byte left out, every end: what is scanned is what serde
    /// reads, and what serde refuses is never scanned.
    #[test]
    fn what_serde_reads_otherwise_is_left_to_it() {
        let whole = WHOLE.replace("-0", "-1").into_bytes();
        let mut scanned = 0;
        let mut check = |text: &[u8]| {
            if let Some(found) = by_scan(text) {
                scanned += 1;
                assert_eq!(found, by_serde(text), "{}", String::from_utf8_lossy(text));
            }
        };
        for at in 0..whole.len() {
            for byte in *b"09-.e,]}\"\\ \xff" {
                let mut text = whole.clone();
                text[at] = byte;
                check(&text);
                text[at] = whole[at];
                text.insert(at, byte);
                check(&text);
            }
            let mut text = whole.clone();
            text.remove(at);
            check(&text);
            check(&whole[..at]);
        }
        assert!(scanned > 1_000, "most changes of a digit are read by both: {scanned}");
    }

    #[test]
    fn errors_are_those_of_serde() {
        for (from, to, message) in [
            ("512,", "5.5,", "6:37: invalid type: floating point `5.5`, expected u64"),
            ("[0,1,0]", "[0,-1,0]", "invalid value: integer `-1`, expected u32"),
            ("\"ids\"", "\"ops\"", "duplicate field `ops`"),
        ] {
            let text = WHOLE.replace("-0", "-1").replace(from, to);
            let error =
                parse(text.as_bytes(), &Limits::default()).expect_err("refused").to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
