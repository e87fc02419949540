//! Trace files: every format gives back what was written, and says what is wrong with a file that
//! is not a trace, and where.

use std::io::{Read, Write};
use std::path::Path;

use fraglab::report::text::FileFacts;
use fraglab::trace::{
    BLOCK_BYTES_MAX, Compression, EVENTS_MAX_DEFAULT, Event, History, Input, InvalidTrace,
    NativeError, Op, OutputFile, Pool, PoolKind, Recording, Role, SourceKind, StartBlock,
    StartLayout, StartSegment, StartState, StartStats, TextError, Trace, TraceFormat,
    WriteTraceError, read_native, read_text, stats, validate, write_native, write_text,
    write_trace,
};
use fraglab::units::{BlockId, MIB, PhaseId, PoolId, SettingsId, StreamId};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

use crate::common::trace_gen::{any_traces, text_traces};

/// The example of the design page, which the README's chapter on the text form repeats.
const EXAMPLE: &str = "\
# a comment runs to the end of the line
capacity 4000MiB            # header lines, all optional: device capacity (physical),
device_total 80GiB          #   total memory the device reports, limit (the allocator's own), settings,
limit 50MiB                 #   address policy of the simulated device, injected failures
conf max_split_size_mb:40
addresses descending        # ascending | descending | chunks
fail create 12              # the 12th call fails; `fail map all`
alloc a 100MiB              # NAME SIZE [stream=N]
alloc _ 2MiB                # the name _ is never freed
alloc b 1.5KiB stream=0x1f role=gradient
free a b                    # one or more names
alloc a 7
defer a
done a
mark step1.forward
empty_cache
settings expandable_segments:True
pool enter p no_split       # pool enter P [no_split] [use_on_oom] / pool leave P / pool delete P
repeat 100                  # the lines up to the matching `end`, 100 times; may nest
  alloc x 91MiB
  free x
end
pool leave p
pool delete p
expect caching reserved_bytes_peak 220MiB     # checked by `fraglab run --check-expect`
";

fn native_bytes(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_native(trace, &mut bytes).expect("writes");
    bytes
}

fn text_of(trace: &Trace) -> String {
    let mut bytes = Vec::new();
    write_text(trace, &mut bytes).expect("writes");
    String::from_utf8(bytes).expect("UTF-8")
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).expect("compresses");
    encoder.finish().expect("compresses")
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).expect("compresses")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn input_of(bytes: &[u8]) -> Input {
    let reader = Box::new(std::io::Cursor::new(bytes.to_vec()));
    Input::from_reader(Path::new("file"), reader).expect("opens")
}

fn read_input(path: &Path) -> Trace {
    let input = Input::open(path).expect("opens");
    match input.format().expect("is known") {
        TraceFormat::NativeJson => read_native(input.reader).expect("reads"),
        #[cfg(feature = "analytics")]
        TraceFormat::Parquet => fraglab::trace::read_parquet(input.reader).expect("reads"),
        TraceFormat::Text => {
            let mut input = input;
            read_text(&input.read_to_string().expect("reads")).expect("parses")
        }
        other => panic!("{other:?}"),
    }
}

/// The layout at the start as events: the deferred blocks of all segments, then the live ones, each
/// in the pool of its segment.
fn start_as_events(trace: &Trace) -> Vec<Event> {
    let mut ops = Vec::new();
    let Some(start) = &trace.start else { return Vec::new() };
    for state in [StartState::Deferred, StartState::Live] {
        let mut first = 0;
        for segment in &start.segments {
            let blocks = &start.blocks[first..first + segment.blocks as usize];
            first += segment.blocks as usize;
            let before = ops.len();
            for block in blocks.iter().filter(|block| block.state == state) {
                ops.push(Op::Alloc(block.block));
                if state == StartState::Deferred {
                    ops.push(Op::Defer(block.block));
                }
            }
            if ops.len() > before && segment.pool != PoolId::NONE {
                ops.insert(before, Op::PoolEnter(segment.pool));
                ops.push(Op::PoolLeave(segment.pool));
            }
        }
    }
    ops.into_iter().map(|op| Event { time_ns: 0, op }).collect()
}

/// What a trace says, whatever its tables look like: blocks by the order in which they are asked
/// for, everything else by name. What was there at the start is asked for first.
fn meaning(trace: &Trace) -> Vec<(u64, String)> {
    let mut order = vec![usize::MAX; trace.blocks.len()];
    let mut asked = 0;
    let mut entered = vec![false; trace.pools.len()];
    let mut lines = Vec::new();
    for event in start_as_events(trace).iter().chain(&trace.events) {
        let mut ask = |block: BlockId| {
            order[block.index()] = asked;
            asked += 1;
            let block = &trace.blocks[block.index()];
            let handle = trace.streams[block.stream.index()].handle;
            format!("{} {handle} {:?}", block.size_bytes, block.role)
        };
        let line = match event.op {
            Op::Alloc(b) => format!("alloc {}", ask(b)),
            Op::Attempt(b) => format!("attempt {}", ask(b)),
            Op::Free(b) => format!("free {}", order[b.index()]),
            Op::Defer(b) => format!("defer {}", order[b.index()]),
            Op::Done(b) => format!("done {}", order[b.index()]),
            Op::Access(b) => format!("access {}", order[b.index()]),
            Op::Mark(p) => format!("mark {}", trace.phases[p.index()]),
            Op::EmptyCache => "empty_cache".to_owned(),
            Op::Settings(s) => format!("settings {}", trace.settings_changes[s.index()]),
            Op::PoolEnter(p) => {
                entered[p.index()] = true;
                format!("enter {:?}", trace.pools[p.index()])
            }
            Op::PoolLeave(p) => format!("leave {:?}", trace.pools[p.index()]),
            // The text form has no place for the end of a pool that was never entered.
            Op::PoolDelete(p) if !entered[p.index()] => continue,
            Op::PoolDelete(p) => format!("delete {:?}", trace.pools[p.index()]),
            Op::ModuleEnter(m) => format!("( {}", trace.modules[m.index()]),
            Op::ModuleLeave(m) => format!(") {}", trace.modules[m.index()]),
            Op::Transfer(t) => format!("{:?}", trace.transfers[t.index()]),
        };
        lines.push((event.time_ns, line));
    }
    lines
}

fn without_lines(mut trace: Trace) -> Trace {
    trace.header.expectations.iter_mut().for_each(|expectation| expectation.line = 0);
    trace
}

/// Pieces of a text trace in no order.
const GARBAGE: &str = "([a-z_#\"@ 0-9\n]{0,6}|alloc a 1|free a|end|repeat 2|settings a b|\
                       pool (enter|leave|delete) p|\n){0,30}";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn generated_traces_are_valid(any in any_traces(), text in text_traces()) {
        prop_assert_eq!(validate(&any), Ok(()));
        prop_assert_eq!(validate(&text), Ok(()));
    }

    #[test]
    fn native_gives_back_what_was_written(trace in any_traces()) {
        let bytes = native_bytes(&trace);
        prop_assert_eq!(&read_native(&bytes[..]).expect("reads"), &trace);
    }

    #[test]
    fn text_gives_back_what_was_written(trace in text_traces()) {
        let text = text_of(&trace);
        let read = read_text(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(without_lines(read), trace, "{}", text);
    }

    #[test]
    fn text_of_any_trace_means_the_same(trace in any_traces()) {
        let text = text_of(&trace);
        let read = read_text(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(validate(&read), Ok(()));
        prop_assert_eq!(meaning(&read), meaning(&trace), "{}", text);
        // Through the native form and back nothing changes any more.
        let native = read_native(&native_bytes(&read)[..]).expect("reads");
        prop_assert_eq!(&native, &read);
        prop_assert_eq!(text_of(&native), text);
    }

    #[test]
    fn garbage_is_no_text_and_no_panic(text in GARBAGE) {
        if let Err(error) = read_text(&text) {
            prop_assert!(error.line >= 1 && error.column >= 1);
            prop_assert_eq!(text.lines().nth(error.line as usize - 1), Some(error.source_line.as_str()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn files_of_every_name_give_back_what_was_written(any in any_traces(), text in text_traces()) {
        let folder = folder();
        for name in ["t.json", "t.json.gz", "t.json.zst"] {
            let path = folder.path().join(name);
            prop_assert_eq!(write_trace(&any, &path).expect("writes"), Vec::<String>::new());
            prop_assert_eq!(&read_input(&path), &any, "{}", name);
        }
        for name in ["t.txt", "t.trace.gz", "t.ftx.zst"] {
            let path = folder.path().join(name);
            prop_assert_eq!(write_trace(&text, &path).expect("writes"), Vec::<String>::new());
            prop_assert_eq!(&without_lines(read_input(&path)), &text, "{}", name);
        }
    }
}

#[cfg(feature = "analytics")]
mod parquet {
    use polars::prelude::*;

    use super::*;
    use fraglab::trace::{ParquetError, read_parquet, write_parquet};

    fn parquet_bytes(trace: &Trace) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_parquet(trace, &mut bytes).expect("writes");
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn parquet_gives_back_what_was_written(trace in any_traces()) {
            let bytes = parquet_bytes(&trace);
            prop_assert_eq!(&read_parquet(&bytes[..]).expect("reads"), &trace);
        }
    }

    #[test]
    fn the_name_says_parquet_and_the_content_too() {
        let folder = folder();
        let trace = read_text(EXAMPLE).expect("parses");
        for name in ["t.parquet", "t.parquet.zst"] {
            let path = folder.path().join(name);
            write_trace(&trace, &path).expect("writes");
            let format = Input::open(&path).expect("opens").format();
            assert_eq!(format.expect("is known"), TraceFormat::Parquet);
            assert_eq!(read_input(&path), trace);
        }
    }

    /// As another program sees the file: rows of a block carry the block's columns, no row
    /// another's.
    #[test]
    fn rows_are_denormalised() {
        let text = "alloc a 100 stream=7 role=gradient\nmark p\n@5ns free a\ntransfer 9 d2h";
        let mut trace = read_text(text).expect("parses");
        let recording = fraglab::trace::Recording {
            block_addresses: vec![0x7f00_0000_0200],
            ..Default::default()
        };
        trace.recording = Some(recording);
        let bytes = std::io::Cursor::new(parquet_bytes(&trace));
        let frame = ParquetReader::new(bytes).finish().expect("reads");
        let column = |name: &str| {
            let column = frame.column(name).expect("is there");
            (0..4).map(|row| column.get(row).expect("is there").to_string()).collect::<Vec<_>>()
        };
        assert_eq!(column("event_index"), ["0", "1", "2", "3"]);
        assert_eq!(column("time_ns"), ["0", "0", "5", "5"]);
        assert_eq!(column("event"), ["\"alloc\"", "\"mark\"", "\"free\"", "\"transfer\""]);
        assert_eq!(column("size_bytes"), ["100", "null", "100", "9"]);
        assert_eq!(column("stream"), ["7", "null", "7", "null"]);
        assert_eq!(column("role"), ["\"gradient\"", "null", "\"gradient\"", "null"]);
        assert_eq!(column("phase"), ["null", "\"p\"", "\"p\"", "\"p\""]);
        assert_eq!(column("object"), ["null", "\"p\"", "null", "\"d2h\""]);
        let address = 0x7f00_0000_0200u64.to_string();
        assert_eq!(column("address"), [&address, "null", &address, "null"]);
    }

    #[test]
    fn a_start_pools_and_settings_are_kept() {
        let mut trace = late_trace();
        trace.settings_changes.push("expandable_segments:True".to_owned());
        trace.events.insert(1, Event { time_ns: 5, op: Op::Settings(SettingsId(0)) });
        trace.pools[0].kind = PoolKind::Capture;
        let bytes = parquet_bytes(&trace);
        assert_eq!(read_parquet(&bytes[..]).expect("reads"), trace);
        let frame = ParquetReader::new(std::io::Cursor::new(bytes)).finish().expect("reads");
        let cell = |name: &str, row| {
            let column = frame.column(name).expect("is there");
            column.get(row).expect("is there").to_string()
        };
        assert_eq!(cell("event", 1), "\"settings\"");
        assert_eq!(cell("object", 1), "\"expandable_segments:True\"");
        // A block of the start in its free row: 1 MiB at the address recorded.
        assert_eq!(cell("size_bytes", 0), MIB.to_string());
        assert_eq!(cell("address", 0), 0x1_0200.to_string());
    }

    /// Another program may choose other widths, and does not know our checksum.
    #[test]
    fn files_written_again_by_others_are_read() {
        let trace = read_text(EXAMPLE).expect("parses");
        let rewrite = |change: fn(&mut DataFrame)| {
            let mut reader = ParquetReader::new(std::io::Cursor::new(parquet_bytes(&trace)));
            let pairs = reader.get_metadata().expect("reads").key_value_metadata.clone();
            let kept = pairs.expect("is there").into_iter().filter(|pair| pair.key.contains("_t"));
            let unused = ("fraglab_unused_blocks".to_owned(), "[]".to_owned());
            let kept = kept.map(|pair| (pair.key, pair.value.expect("has a value")));
            let metadata = KeyValueMetadata::from_static(kept.chain([unused]).collect());
            let mut frame = reader.finish().expect("reads");
            change(&mut frame);
            let mut bytes = Vec::new();
            ParquetWriter::new(&mut bytes)
                .with_key_value_metadata(Some(metadata))
                .finish(&mut frame)
                .expect("writes");
            read_parquet(&bytes[..])
        };
        let read = rewrite(|frame| {
            for name in ["event_index", "time_ns", "block_id", "size_bytes", "stream", "object_id"]
            {
                let column = frame.column(name).expect("is there").cast(&DataType::Int64);
                frame.with_column(column.expect("casts")).expect("fits");
            }
        });
        assert_eq!(read.expect("reads"), trace);
        let error = |change| rewrite(change).expect_err("must fail").to_string();
        let float = error(|frame| {
            let column = frame.column("size_bytes").expect("is there").cast(&DataType::Float64);
            frame.with_column(column.expect("casts")).expect("fits");
        });
        assert_eq!(float, "column `size_bytes`: has type f64, expected u64");
        let turned = error(|frame| *frame = frame.reverse());
        assert!(turned.starts_with("row 0: is not the event_index"), "{turned}");
        let missing = error(|frame| {
            frame.drop_in_place("stream").expect("is there");
        });
        assert_eq!(missing, "column `stream`: is missing");
    }

    /// Cut or changed bytes give an error, or a trace that is valid.
    #[test]
    fn damaged_parquet_never_panics() {
        let bytes = parquet_bytes(&read_text(EXAMPLE).expect("parses"));
        let mut random = Random(7);
        let mut refused = 0;
        for _ in 0..20_000 {
            let damaged = damage(&bytes, &mut random);
            match read_parquet(&damaged[..]) {
                Ok(trace) => assert_eq!(validate(&trace), Ok(())),
                Err(ParquetError::Checksum { .. }) => refused += 1,
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        assert!(refused > 10_000, "the checksum comes before everything else: {refused}");
        assert!(read_parquet(&b"PAR1"[..]).is_err());
        assert!(read_parquet(&bytes[..bytes.len() - 9]).is_err());
    }
}

// ---- native -----------------------------------------------------------------------------------

/// The example of the README's chapter on the native form.
const NATIVE_EXAMPLE: &str = r#"{"fraglab_trace": 3,
 "header": {"name": "by-hand", "limit_bytes": 52428800},
 "streams": [0, 7],
 "phases": ["step0.forward"],
 "blocks": {"size_bytes": [1048576, 2097152, 512], "stream": [0, 0, 1]},
 "events": {"ops": "maafafc", "ids": [0, 2, 2], "time_unit_ns": 1000,
            "time_deltas": [0, 5, 1, 10, 0, 3, 0]}}
"#;

#[test]
fn the_native_example_means_what_the_readme_says() {
    let trace = read_native(NATIVE_EXAMPLE.as_bytes()).expect("reads");
    let event = |time_ns, op| Event { time_ns, op };
    let block = BlockId;
    assert_eq!(
        trace.events,
        [
            event(0, Op::Mark(PhaseId(0))),
            event(5_000, Op::Alloc(block(0))),
            event(6_000, Op::Alloc(block(1))),
            // Two blocks back from block 2, which is the next.
            event(16_000, Op::Free(block(0))),
            event(16_000, Op::Alloc(block(2))),
            // Two blocks back from block 3.
            event(19_000, Op::Free(block(1))),
            event(19_000, Op::EmptyCache),
        ]
    );
    assert_eq!(trace.streams[trace.blocks[2].stream.index()].handle, 7);
    assert_eq!(trace.header.limit_bytes, Some(50 * MIB));
}

#[test]
fn files_of_version_1_are_read_as_they_were() {
    let old = NATIVE_EXAMPLE.replace("\"fraglab_trace\": 3", "\"fraglab_trace\": 1");
    assert_ne!(old, NATIVE_EXAMPLE);
    let read = |text: &str| read_native(text.as_bytes()).expect("reads");
    assert_eq!(read(&old), read(NATIVE_EXAMPLE));
}

#[test]
fn the_readme_shows_the_examples_that_are_tested() {
    let readme = include_str!("../traces/README.md");
    assert!(readme.contains(NATIVE_EXAMPLE), "traces/README.md lost the native example");
    for line in EXAMPLE.lines().filter(|line| !line.is_empty()) {
        let code = line.split('#').next().unwrap_or_default().trim();
        assert!(readme.contains(code), "traces/README.md does not show {code:?}");
    }
}

fn native_error(text: &str) -> NativeError {
    read_native(text.as_bytes()).expect_err("must fail")
}

#[test]
fn native_errors_say_what_and_where() {
    let cases: [(&str, &str); 22] = [
        ("", "1:0: EOF while parsing a value"),
        ("[1]", "1:0: invalid type: sequence, expected a JSON object that begins with"),
        ("{}", "expected \"fraglab_trace\""),
        (
            "{\"header\":{},\"fraglab_trace\":1}",
            "the first key is \"header\", expected \"fraglab_trace\"",
        ),
        (
            "{\"fraglab_trace\":4,\"columns\":[1,{}]}",
            "version 4 of the native trace format; this fraglab reads versions 1 to 3",
        ),
        ("{\"fraglab_trace\":0}", "version 0"),
        ("{\"fraglab_trace\":-1}", "1:19: invalid value: integer `-1`, expected u32"),
        (
            "{\"fraglab_trace\":1,\n \"blcks\":{}}",
            "2:8: unknown field `blcks`, expected one of `header`",
        ),
        ("{\"fraglab_trace\":1,\"header\":{\"limit\":5}}", "unknown field `limit`"),
        ("{\"fraglab_trace\":1} x", "1:21: trailing characters"),
        ("{\"fraglab_trace\":1,\"phases\":[],\"phases\":[]}", "duplicate field `phases`"),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"caz\"}}",
            "blocks.size_bytes has 0 entries, expected 1",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"ccz\"}}",
            "events.ops: entry 2 is 'z', expected one of aA",
        ),
        ("{\"fraglab_trace\":1,\"events\":{\"ops\":\"cµ\"}}", "events.ops: entry 1 is 'µ'"),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"m\"}}",
            "events.ids has 0 entries, expected 1",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"m\",\"ids\":[-1]}}",
            "events.ids: entry 0 is -1, no index",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"m\",\"ids\":[0]}}",
            "event 0: phase 0 does not exist: there are 0",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"c\",\"ids\":[0]}}",
            "events.ids has 1 entries, expected 0",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"cc\",\"time_deltas\":[1]}}",
            "events.time_deltas has 1 entries, expected 2",
        ),
        (
            "{\"fraglab_trace\":1,\"events\":{\"ops\":\"cc\",\"time_unit_ns\":1000,\"time_deltas\":[1,18446744073709551]}}",
            "events.time_deltas: entry 1 passes 2^64 ns",
        ),
        (
            "{\"fraglab_trace\":1,\"blocks\":{\"size_bytes\":[1,2],\"role\":\".z\"}}",
            "blocks.role: entry 1 is 'z'",
        ),
        (
            "{\"fraglab_trace\":1,\"streams\":[0],\"blocks\":{\"size_bytes\":[8,0]}}",
            "blocks 1: 0 is not between 1 and 2^60 - 1",
        ),
    ];
    for (text, expected) in cases {
        let error = native_error(text).to_string();
        assert!(error.contains(expected), "{text}\n  gives    {error}\n  expected {expected}");
    }
}

#[test]
fn references_out_of_range_are_errors_not_panics() {
    let event = |ops: &str, ids: &str| {
        native_error(&format!(
            "{{\"fraglab_trace\":1,\"streams\":[0],\"blocks\":{{\"size_bytes\":[8]}},\
             \"events\":{{\"ops\":\"{ops}\",\"ids\":{ids}}}}}"
        ))
        .to_string()
    };
    let min = i64::MIN;
    assert!(event("af", "[2]").contains("events.ids: entry 0 leads to none of the 1 blocks"));
    assert!(event("af", "[0]").contains("events.ids: entry 0 leads to none of the 1 blocks"));
    assert!(event("af", &format!("[{min}]")).contains("leads to none"));
    assert!(event("A", "[4294967295]").contains("leads to none"));
    assert!(event("m", "[4294967296]").contains("no index of a table"));
    assert!(event("aff", "[1,1]").contains("event 2: free of block 0, which is already gone"));
    let recording = |text: &str| {
        native_error(&format!(
            "{{\"fraglab_trace\":1,\"streams\":[0],\"blocks\":{{\"size_bytes\":[8]}},\
             \"events\":{{\"ops\":\"a\"}},\"recording\":{text}}}"
        ))
        .to_string()
    };
    assert!(recording("{}").contains("0 addresses for 1 blocks"));
    assert!(recording("{\"address\":[1]}").contains("recording.address: entry 0 is 1"));
    let action = |event: &str, kind: &str, block: &str| {
        recording(&format!(
            "{{\"address_table\":[512],\"address\":[0],\"actions\":{{\"event_deltas\":[{event}],\
             \"kind\":\"{kind}\",\"block\":[{block}],\"address\":[0],\"size_bytes\":[0]}}}}"
        ))
    };
    assert!(action("1", "S", "null").contains("recorded action 0: event 1 does not exist"));
    assert!(action("0", "S", "0").contains("only free_completed may do"));
    assert!(
        action("0", "c", "0").contains("free_completed of block 0, which was not asked for yet")
    );
    assert!(action("0", "c", "null").contains("does not exist"));
    assert!(action("0", "?", "null").contains("recording.actions.kind: entry 0 is '?'"));
}

/// A small generator of numbers, so that the damage is the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// Changes, inserts, removes or repeats some bytes, or cuts the end off.
fn damage(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + random.next(3) {
        let at = random.next(bytes.len());
        match random.next(6) {
            0 => bytes[at] = random.next(256) as u8,
            1 => bytes[at] ^= 1 << random.next(8),
            2 => bytes.insert(at, b"0123456789-[]{}\",eE."[random.next(20)]),
            3 => bytes[at] = b"0123456789-[]{}\",afnS"[random.next(21)],
            4 => {
                bytes.remove(at);
            }
            _ => bytes.truncate(at.max(1)),
        }
        if bytes.is_empty() {
            return vec![0];
        }
    }
    bytes
}

#[test]
fn damaged_native_files_never_panic() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut random = Random(1);
    let mut still_valid = 0;
    let mut generate = || any_traces().new_tree(&mut runner).expect("generates").current();
    let traces: Vec<Trace> = (0..8).map(|_| generate()).chain([late_trace()]).collect();
    for trace in &traces {
        let plain = native_bytes(trace);
        for (packed, rounds) in [(plain.clone(), 500), (gzip(&plain), 250), (zst(&plain), 250)] {
            for _ in 0..rounds {
                let bytes = damage(&packed, &mut random);
                let reader = Box::new(std::io::Cursor::new(bytes));
                let Ok(input) = Input::from_reader(Path::new("t"), reader) else { continue };
                match read_native(input.reader) {
                    Ok(trace) => {
                        assert_eq!(validate(&trace), Ok(()));
                        still_valid += 1;
                    }
                    Err(error) => assert!(!error.to_string().is_empty()),
                }
            }
        }
    }
    assert!(still_valid > 0, "some damage, as of a size, leaves a valid trace");
}

// ---- text -------------------------------------------------------------------------------------

#[test]
fn the_text_example_reads() {
    let trace = read_text(EXAMPLE).expect("parses");
    assert_eq!(validate(&trace), Ok(()));
    assert_eq!(trace.header.source.kind, SourceKind::Text);
    assert_eq!(trace.header.device.capacity_bytes, Some(4000 * MIB));
    assert_eq!(trace.header.device.total_bytes, Some(80 << 30));
    assert_eq!(trace.header.expectations[0].line, 25);
    assert_eq!(trace.settings_changes, ["expandable_segments:True"]);
    assert_eq!(trace.header.expectations[0].value, "220MiB");
    // a, _, b, a again, and x a hundred times.
    assert_eq!(trace.blocks.len(), 4 + 100);
    assert_eq!(trace.blocks[2].size_bytes, 1536);
    assert_eq!(trace.blocks[2].role, Role::Gradient);
    assert_eq!(trace.streams[trace.blocks[2].stream.index()].handle, 0x1f);
    // 3 allocs, 2 frees, alloc, defer, done, mark, empty_cache, settings, enter, 200 of the repeat,
    // leave, delete.
    assert_eq!(trace.events.len(), 3 + 2 + 3 + 3 + 1 + 200 + 2);
}

#[test]
fn repeats_nest_and_names_may_be_used_again() {
    let text =
        "alloc x 1\nrepeat 3\n free x\n repeat 2\n  alloc y 2\n  free y\n end\n alloc x 3\nend\n";
    let sizes: Vec<u64> =
        read_text(text).expect("parses").blocks.iter().map(|b| b.size_bytes).collect();
    assert_eq!(sizes, [1, 2, 2, 3, 2, 2, 3, 2, 2, 3]);
}

#[test]
fn times_are_absolute_relative_or_those_of_the_event_before() {
    let text = "empty_cache\n@1.5ms empty_cache\nempty_cache\nrepeat 2\n@+20us empty_cache\nend\n\
                @0.0025s empty_cache\n@18446744073709551615ns empty_cache";
    let times: Vec<u64> =
        read_text(text).expect("parses").events.iter().map(|e| e.time_ns).collect();
    assert_eq!(times, [0, 1_500_000, 1_500_000, 1_520_000, 1_540_000, 2_500_000, u64::MAX]);
}

fn text_error(text: &str) -> TextError {
    read_text(text).expect_err("must fail")
}

#[test]
fn text_errors_point_at_the_token() {
    let live = "alloc a 1\n";
    let cases: Vec<(String, u32, u32, &str)> = vec![
        ("alloc a".into(), 1, 8, "expected a size"),
        ("alloc".into(), 1, 6, "expected a name"),
        ("alloc  # no name".into(), 1, 6, "expected a name"),
        ("alloc a 12parsecs".into(), 1, 9, "is not a unit"),
        ("alloc a 0".into(), 1, 9, "0 bytes"),
        ("alloc a 0.0MiB".into(), 1, 9, "0 bytes"),
        ("alloc a 1152921504606846976".into(), 1, 9, "2^60 - 1"),
        ("alloc a 99999999999999999999999TiB".into(), 1, 9, "too large"),
        ("alloc a 5 MiB".into(), 1, 11, "unexpected `MiB`"),
        ("alloc a 5 stream=x".into(), 1, 11, "`x` is not the handle of a stream"),
        ("alloc a 5 stream=-1".into(), 1, 11, "`-1` is not the handle"),
        ("alloc a 5 stream=1 stream=2".into(), 1, 20, "`stream=` stands twice"),
        ("alloc a 5 role=king".into(), 1, 11, "`king`, expected one of `unknown`, `parameter`"),
        ("alloc a 5 colour=red".into(), 1, 11, "expected stream=HANDLE, role=ROLE"),
        ("  allocate a 5".into(), 1, 3, "unknown word `allocate`: expected an event (alloc, "),
        ("free a".into(), 1, 6, "unknown name `a`"),
        (format!("{live}free a b"), 2, 8, "unknown name `b`"),
        (format!("{live}free a\n\tfree a"), 3, 7, "`a` is already freed"),
        (format!("{live}free a a"), 2, 8, "`a` is already freed"),
        (format!("{live}defer a\nfree a"), 3, 6, "`a` is already freed and deferred"),
        (format!("{live}defer a\ndefer a"), 3, 7, "already freed and deferred"),
        (format!("{live}done a"), 2, 6, "expected `defer` before `done`"),
        (format!("{live}free a\ndone a"), 3, 6, "`done` goes with `defer`"),
        (format!("{live}free a\naccess a"), 3, 8, "`a` is already freed"),
        ("attempt a 5\nfree a".into(), 2, 6, "was an attempt"),
        (format!("{live}alloc a 2"), 2, 7, "`a` is still live since line 1"),
        (format!("{live}defer a\nalloc a 2"), 3, 7, "`a` is deferred and not done"),
        ("repeat 2\n alloc a 1\nend".into(), 2, 8, "`a` is still live since line 2 in the turn"),
        ("alloc a 5 MiB".into(), 1, 11, "unexpected `MiB`: a size is one word, as in 5MiB"),
        ("limit 5 gb".into(), 1, 9, "a size is one word, as in 5gb"),
        ("mark a b".into(), 1, 8, "words with spaces go in quotes"),
        ("alloc _ 1\nfree _".into(), 2, 6, "`_` is never freed"),
        ("alloc _ 1\ndefer _".into(), 2, 7, "`_` is never freed"),
        ("repeat 2\nempty_cache".into(), 1, 1, "this `repeat` has no `end`"),
        ("empty_cache\n end".into(), 2, 2, "no `repeat`"),
        ("repeat".into(), 1, 7, "expected how many times"),
        ("repeat some\nend".into(), 1, 8, "`some` is not a number"),
        ("repeat 0\nend".into(), 1, 8, "0 times"),
        ("repeat 2 times\nend".into(), 1, 10, "unexpected `times`"),
        ("empty_cache\nlimit 5MiB".into(), 2, 1, "before the first event, which is in line 1"),
        ("repeat 2\nlimit 5MiB\nend".into(), 2, 1, "before the first event"),
        ("limit 5MiB\nlimit 6MiB".into(), 2, 1, "`limit` stands already in line 1"),
        ("limit 0".into(), 1, 7, "0 bytes"),
        ("addresses up".into(), 1, 11, "`up`, expected one of `chunks`, `ascending`"),
        ("fail steal 1".into(), 1, 6, "`steal` is no device call: expected malloc, free"),
        ("fail map 0".into(), 1, 10, "counted from 1"),
        ("fail map some".into(), 1, 10, "a number from 1, or `all`"),
        ("source heaven".into(), 1, 8, "`heaven`, expected one of `unknown`"),
        ("name two words".into(), 1, 10, "unexpected `words`"),
        ("name \"two".into(), 1, 6, "not closed"),
        ("name \"two\\q\"".into(), 1, 6, "JSON escapes"),
        ("name \"two\"words".into(), 1, 11, "expected white space"),
        ("expect caching x".into(), 1, 17, "expected the expected value"),
        ("repeat 2\nexpect caching x 1\nempty_cache\nend".into(), 2, 1, "outside of `repeat`"),
        ("pool open p".into(), 1, 6, "expected enter, leave or delete"),
        ("pool enter p nosplit".into(), 1, 14, "expected no_split, use_on_oom, capture"),
        ("pool leave p".into(), 1, 12, "unknown pool `p`"),
        (
            "pool enter p\npool leave p\npool leave p".into(),
            3,
            12,
            "leaves pool `p`, but is in none",
        ),
        ("pool enter p\npool enter q\npool leave p".into(), 3, 12, "but is in pool `q`"),
        ("pool enter p\npool delete p".into(), 2, 13, "while in it"),
        ("pool enter p\npool enter p".into(), 2, 12, "enters pool `p`, but is in it already"),
        ("repeat 2\n pool enter p\nend".into(), 2, 13, "enters pool `p`, but is in it already"),
        (
            "pool enter p\npool leave p\npool enter q\npool delete p".into(),
            4,
            13,
            "deletes pool `p` while in pool `q`",
        ),
        ("settings".into(), 1, 9, "expected the settings"),
        ("settings # none".into(), 1, 9, "expected the settings"),
        ("pool enter p\npool leave p\npool enter p no_split".into(), 3, 14, "other properties"),
        ("transfer 5MiB up".into(), 1, 15, "expected h2d or d2h"),
        ("empty_cache now".into(), 1, 13, "unexpected `now`"),
        ("mark".into(), 1, 5, "expected the name of a phase"),
        ("@5 empty_cache".into(), 1, 1, "`@5` is not a time"),
        ("@1.5ns empty_cache".into(), 1, 1, "whole ns"),
        ("@99999999999999999999s empty_cache".into(), 1, 1, "is not a time"),
        ("@5ms".into(), 1, 5, "expected an event after the time"),
        ("@5ms limit 5MiB".into(), 1, 6, "`limit` has no time"),
        ("@5ms repeat 2\nend".into(), 1, 6, "`repeat` has no time"),
        ("@5ms empty_cache\n @4999us empty_cache".into(), 2, 2, "the event before is at 5ms"),
        ("repeat 2\n@5ms empty_cache\n@6ms mark x\nend".into(), 2, 1, "the event before is at 6ms"),
        ("@18446744073709551615ns mark x\n@+1ns mark x".into(), 2, 1, "passes 2^64 ns"),
        ("# Größe\nmark größe größer".into(), 2, 12, "unexpected `größer`"),
    ];
    for (text, line, column, message) in cases {
        let error = text_error(&text);
        assert_eq!((error.line, error.column), (line, column), "{text:?} gives {error}");
        assert!(error.message.contains(message), "{text:?} gives {error}\n  expected {message}");
        assert_eq!(text.lines().nth(line as usize - 1), Some(&*error.source_line));
    }
}

#[test]
fn an_error_shows_its_line_with_a_caret() {
    let error = text_error("alloc a 1\n\tfree a b");
    assert_eq!(error.to_string(), "2:9: unknown name `b`: expected the name of an alloc above");
    assert_eq!(error.excerpt(), "\tfree a b\n\t       ^");
    // Of a long line only a part is shown, with the caret still under the token.
    let error = text_error(&format!("mark {} {}", "x".repeat(500), "y".repeat(500)));
    let excerpt = error.excerpt();
    let (shown, caret) = excerpt.split_once('\n').expect("two lines");
    assert!(shown.len() <= 120, "{shown}");
    assert_eq!(shown.find('y'), caret.find('^'));
}

#[test]
fn repeat_bombs_are_refused_before_they_fill_the_memory() {
    let bomb = format!("{}empty_cache\n{}", "repeat 10000\n".repeat(16), "end\n".repeat(16));
    let error = text_error(&bomb);
    assert_eq!(
        (error.line, error.column),
        (20, 1),
        "the third repeat out passes 2 * 10^8: {error}"
    );
    assert!(
        error.message.contains("line 14") && error.message.contains("no trace has more than 4,294"),
        "{error}"
    );
    let error = text_error(&format!("repeat {}\nempty_cache\nend", EVENTS_MAX_DEFAULT + 1));
    assert_eq!((error.line, error.column), (3, 1));
    // Turns without events take no time.
    let empty = format!("{}{}", "repeat 18446744073709551615\n".repeat(16), "end\n".repeat(16));
    assert_eq!(read_text(&empty).expect("parses").events, []);
    let deep = format!("{}empty_cache\n{}", "repeat 1\n".repeat(17), "end\n".repeat(17));
    let error = text_error(&deep);
    assert_eq!((error.line, error.column), (17, 1));
    assert!(error.message.contains("16 deep"));
}

#[test]
fn too_many_live_bytes_are_refused() {
    let nine = "alloc _ 1152921504606846975\n".repeat(9);
    let error = text_error(&nine);
    assert_eq!((error.line, error.column), (9, 7));
    assert!(error.message.contains("2^63 - 1"));
}

#[test]
fn text_warns_of_what_it_cannot_hold() {
    let mut trace =
        read_text("alloc a 1\nfree a\nalloc a 2\npool enter p\npool leave p").expect("parses");
    assert_eq!(write_text(&trace, Vec::new()).expect("writes"), Vec::<String>::new());
    // Two live blocks of one name, by hand: a text could not say so.
    trace.events.remove(1);
    trace.sites.stacks.push(Vec::new());
    trace.recording =
        Some(fraglab::trace::Recording { block_addresses: vec![0; 2], ..Default::default() });
    let warnings = write_text(&trace, Vec::new()).expect("writes").join("\n");
    for expected in ["call sites (1)", "addresses and actions", "two live blocks of one name"] {
        assert!(warnings.contains(expected), "{warnings}");
    }
    assert!(text_of(&trace).contains("alloc a 1\nalloc b1 2\n"));
}

#[test]
fn settings_changes_take_the_rest_of_the_line() {
    let text = "settings max_split_size_mb:20,  expandable_segments:True # both\n\
                repeat 2\n  settings \"\"\n  settings \"a # b\"\nend\nsettings \"\"";
    let trace = read_text(text).expect("parses");
    let strings = ["max_split_size_mb:20, expandable_segments:True", "", "a # b"];
    assert_eq!(trace.settings_changes, strings);
    let given: Vec<Op> = trace.events.iter().map(|event| event.op).collect();
    assert_eq!(given, [0, 1, 2, 1, 2, 1].map(|id| Op::Settings(SettingsId(id))));
    assert_eq!(
        text_of(&trace).lines().take(3).collect::<Vec<_>>(),
        [
            "settings \"max_split_size_mb:20, expandable_segments:True\"",
            "settings \"\"",
            "settings \"a # b\"",
        ]
    );
}

#[test]
fn every_property_of_a_pool_is_kept() {
    let mut trace = Trace::default();
    trace.header.source.kind = SourceKind::Text;
    for number in 0..8 {
        let kind = [PoolKind::MemPool, PoolKind::Capture][number & 1];
        let (no_split, use_on_oom) = (number & 2 == 2, number & 4 == 4);
        trace.pools.push(Pool { name: format!("pool {number}"), kind, no_split, use_on_oom });
        let op = Op::PoolEnter(PoolId(number as u32));
        trace.events.push(Event { time_ns: 0, op });
    }
    assert_eq!(read_text(&text_of(&trace)).expect("parses"), trace);
    assert_eq!(read_native(&native_bytes(&trace)[..]).expect("reads"), trace);
    let text = text_of(&trace);
    assert!(text.contains("pool enter \"pool 7\" no_split use_on_oom capture\n"), "{text}");
}

#[test]
fn text_asks_first_for_what_was_there() {
    let mut trace = late_trace();
    trace.header.history = History { allocs: 3, allocs_of_run: Some(10), ..History::default() };
    let mut bytes = Vec::new();
    let warnings = write_text(&trace, &mut bytes).expect("writes").join("\n");
    let text = String::from_utf8(bytes).expect("UTF-8");
    let expected = "\
pool enter p no_split
alloc b1 700 stream=0x7
defer b1
pool leave p
alloc b0 1MiB
pool enter p
alloc _ 1KiB stream=0x7
pool leave p
@5ns free b0
alloc _ 3MiB
@9ns done b1
";
    assert_eq!(text, format!("source unknown\n{expected}"));
    for part in ["recorded allocator's addresses", "only their blocks in use (2)", "(7)"] {
        assert!(warnings.contains(part), "{part} is missing in {warnings}");
    }
}

// ---- files ------------------------------------------------------------------------------------

#[test]
fn formats_are_told_by_content() {
    let cases: [(&[u8], TraceFormat); 13] = [
        (b"\x80\x02}q\x00.", TraceFormat::Pickle),
        (b"\x80\x05\x95", TraceFormat::Pickle),
        (b"PAR1....", TraceFormat::Parquet),
        (b" \n\t {\"fraglab_trace\":1}", TraceFormat::NativeJson),
        (b"\xef\xbb\xbf{\"fraglab_trace\":1}", TraceFormat::NativeJson),
        (b"Thread,Time,Action,Pointer,Size,Stream\n", TraceFormat::RmmCsv),
        (b"1 0x7f00 8192 0\n", TraceFormat::StallocLog),
        (b"\nIteration Index : 0\n", TraceFormat::StallocLog),
        (b"m.mlp->MLP Layer : F-start\n", TraceFormat::StallocLog),
        (b"1 2 3 4\n", TraceFormat::Text),
        (b"alloc a 5\n", TraceFormat::Text),
        (b"# Gr\xc3\xb6\xc3\x9fe\n", TraceFormat::Text),
        (b"x", TraceFormat::Text),
    ];
    for (bytes, expected) in cases {
        for packed in [bytes.to_vec(), gzip(bytes), zst(bytes)] {
            let mut input = input_of(&packed);
            assert_eq!(input.format().expect("is known"), expected, "{bytes:?}");
            let rest = input.read_to_end().expect("reads");
            assert_eq!(
                rest,
                bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes),
                "nothing is lost"
            );
        }
    }
    // A character cut in two by the end of what is looked at is still text.
    let long = format!("{}ö and more", "#".repeat(4095));
    assert_eq!(input_of(long.as_bytes()).format().expect("is known"), TraceFormat::Text);
    for (bytes, expected) in [
        (&b""[..], "the file is empty"),
        (b"\x80\x01", "begins with the bytes 80 01"),
        (b"MZ\0\0", "begins with the bytes 4d 5a 00 00"),
        (b"alloc \xff", "not a trace"),
    ] {
        let error = input_of(bytes).format().expect_err("must fail").to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(input_of(&gzip(b"")).format().expect_err("empty").to_string().contains("empty"));
}

#[test]
fn several_members_and_frames_are_one_stream() {
    let halves = [&b"alloc a 5\n"[..], b"free a\n"];
    for pack in [gzip, zst] {
        let mut input = input_of(&halves.map(pack).concat());
        assert_eq!(input.read_to_string().expect("reads"), "alloc a 5\nfree a\n");
    }
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9][..], &zst(halves[0])].concat();
    assert_eq!(input_of(&skippable).read_to_end().expect("reads"), halves[0]);
}

#[test]
fn damaged_compression_is_named() {
    let text: Vec<u8> =
        (0..20_000u32).flat_map(|i| format!("alloc n{i} {}\n", i * 7 + 1).into_bytes()).collect();
    for (pack, name, compression) in [
        (gzip as fn(&[u8]) -> Vec<u8>, "gzip", Compression::Gzip),
        (zst, "zstd", Compression::Zstd),
    ] {
        let whole = pack(&text);
        let mut input = input_of(&whole[..whole.len() / 2]);
        assert_eq!(input.compression, compression);
        let error = input.read_to_end().expect_err("must fail").to_string();
        assert!(error.contains(&format!("the {name} file is truncated")), "{error}");
        let error =
            input_of(&[&whole[..], b"garbage of more than a header"].concat()).read_to_end();
        let error = error.map(|_| ()).expect_err("must fail").to_string();
        assert!(error.contains(&format!("the {name} file is corrupt")), "{error}");
    }
}

#[test]
fn checksums_are_written_and_checked() {
    let folder = folder();
    for (name, from_end) in [("t.txt.gz", 8), ("t.txt.zst", 1), ("t.txt.gz", 40), ("t.txt.zst", 40)]
    {
        let path = folder.path().join(name);
        write_trace(&read_text(EXAMPLE).expect("parses"), &path).expect("writes");
        let mut bytes = std::fs::read(&path).expect("reads");
        let at = bytes.len() - from_end;
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).expect("writes");
        let read = Input::open(&path).and_then(|mut input| input.read_to_end());
        let error = read.expect_err("must fail").to_string();
        assert!(error.contains("file is corrupt: "), "{error}");
        assert!(from_end > 8 || error.contains("checksum"), "{error}");
    }
}

#[test]
fn a_missing_file_and_text_that_is_none_are_named() {
    let error = Input::open(Path::new("no/such/file")).expect_err("must fail").to_string();
    assert!(error.starts_with("no/such/file: "), "{error}");
    let bytes = [&"fine\n".repeat(2000).into_bytes()[..], b"\xff\n"].concat();
    let error = input_of(&bytes).read_to_string().expect_err("must fail").to_string();
    assert!(error.ends_with("line 2001 is not UTF-8 text"), "{error}");
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("lists");
    entries.map(|e| e.expect("lists").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn output_appears_whole_or_not_at_all() {
    let folder = folder();
    for name in ["plain.csv", "packed.csv.gz", "packed.csv.zst"] {
        let path = folder.path().join(name);
        let mut file = OutputFile::create(&path).expect("creates");
        file.write_all(&[b'x'; 300_000]).expect("writes");
        assert!(!path.exists(), "not before the commit");
        drop(file);
        assert_eq!(names_in(folder.path()), Vec::<String>::new(), "nothing is left of {name}");
        let mut file = OutputFile::create(&path).expect("creates");
        file.write_all(b"hello").expect("writes");
        file.commit().expect("commits");
        let mut text = String::new();
        Input::open(&path).expect("opens").reader.read_to_string(&mut text).expect("reads");
        assert_eq!(text, "hello");
        std::fs::remove_file(&path).expect("removes");
    }
    let error = OutputFile::create(folder.path()).err().expect("a folder is no file").to_string();
    assert!(error.contains("is a folder"), "{error}");
    assert!(OutputFile::create(&folder.path().join("no/such/folder.csv")).is_err());
}

#[cfg(unix)]
#[test]
fn output_has_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = folder();
    let mode = |name: &str| {
        std::fs::metadata(folder.path().join(name)).expect("exists").permissions().mode() & 0o777
    };
    let commit = |name: &str| {
        OutputFile::create(&folder.path().join(name)).expect("creates").commit().expect("commits");
    };
    std::fs::write(folder.path().join("other"), "").expect("writes");
    commit("new");
    assert_eq!(mode("new"), mode("other"));
    // A file that is replaced keeps its own, and a link stays a link.
    let private = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(folder.path().join("other"), private).expect("sets");
    std::os::unix::fs::symlink("other", folder.path().join("link")).expect("links");
    commit("link");
    assert_eq!(mode("other"), 0o640);
    assert!(folder.path().join("link").is_symlink());
}

#[cfg(unix)]
#[test]
fn a_device_is_written_and_not_replaced() {
    let mut file = OutputFile::create(Path::new("/dev/null")).expect("opens");
    file.write_all(b"gone").expect("writes");
    file.commit().expect("commits");
    assert!(!std::fs::metadata("/dev/null").expect("exists").is_file());
}

#[test]
fn names_that_say_no_format_are_refused() {
    let folder = folder();
    let trace = read_text("alloc a 1").expect("parses");
    for name in ["t", "t.pickle", "t.gz", "t.csv.zst"] {
        let error = write_trace(&trace, &folder.path().join(name)).expect_err("must fail");
        assert!(matches!(error, WriteTraceError::Extension { .. }), "{error}");
        assert!(
            error.to_string().contains(".json (native), .txt, .trace or .ftx (text) or .parquet")
        );
    }
    let mut broken = trace.clone();
    broken.events.push(trace.events[0]);
    for name in ["t.json", "t.txt"] {
        let error = write_trace(&broken, &folder.path().join(name)).expect_err("must fail");
        assert!(error.to_string().contains("event 1: alloc of block 0, which is live"), "{error}");
    }
    assert_eq!(names_in(folder.path()), Vec::<String>::new());
}

/// A writer whose reader has gone.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_pipe_is_known_as_one() {
    let trace = read_text(EXAMPLE).expect("parses");
    let kind = |result: std::io::Result<()>| result.expect_err("must fail").kind();
    assert_eq!(kind(write_native(&trace, Closed)), std::io::ErrorKind::BrokenPipe);
    assert_eq!(kind(write_text(&trace, Closed).map(drop)), std::io::ErrorKind::BrokenPipe);
}

// ---- the layout at the start ------------------------------------------------------------------

/// Two segments that were there before the first event:
///
/// ```text
///   0x10000   stream 0            free 512 │ live b0, 1 MiB
///   0x200000  stream 7, in pool   live b2, 1024 │ deferred b1, 1024 for 700
/// ```
fn late_trace() -> Trace {
    let event = |time_ns, op| Event { time_ns, op };
    let text = "alloc _ 1MiB\nalloc _ 700 stream=7\nalloc _ 1KiB stream=7\nalloc _ 3MiB";
    let Trace { blocks, streams, .. } = read_text(text).expect("parses");
    let segment = StartSegment {
        address: 0x1_0000,
        size_bytes: MIB + 512,
        stream: StreamId(0),
        pool: PoolId::NONE,
        large: true,
        reservation: None,
        blocks: 2,
    };
    let block = |size_bytes, id: Option<u32>, state| {
        let block = id.map_or(BlockId::NONE, BlockId);
        StartBlock { size_bytes, block, state, guessed: id == Some(1) }
    };
    let start = StartLayout {
        segments: vec![
            segment,
            StartSegment {
                address: 0x20_0000,
                size_bytes: 2048,
                stream: StreamId(1),
                pool: PoolId(0),
                large: false,
                reservation: Some(0x1f_0000),
                ..segment
            },
        ],
        blocks: vec![
            block(512, None, StartState::Free),
            block(MIB, Some(0), StartState::Live),
            block(1024, Some(2), StartState::Live),
            block(1024, Some(1), StartState::Deferred),
        ],
    };
    let pool =
        Pool { name: "p".to_owned(), kind: PoolKind::MemPool, no_split: true, use_on_oom: false };
    Trace {
        blocks,
        streams,
        pools: vec![pool],
        start: Some(start),
        events: vec![
            event(5, Op::Free(BlockId(0))),
            event(5, Op::Alloc(BlockId(3))),
            event(9, Op::Done(BlockId(1))),
        ],
        recording: Some(Recording {
            block_addresses: vec![0x1_0200, 0x20_0400, 0x20_0000, 0x30_0000],
            ..Recording::default()
        }),
        ..Trace::default()
    }
}

#[test]
fn a_start_stands_in_columns() {
    let bytes = native_bytes(&late_trace());
    let text = String::from_utf8(bytes).expect("UTF-8");
    let expected: String = r#"
        "start":{"segments":{"address":[65536,2097152],"size_bytes":[1049088,2048],"stream":[0,1],
        "pool":[null,0],"large":"ls","reservation":[null,2031616],"blocks":[2,2]},
        "blocks":{"size_bytes":[512,1048576,1024,1024],"block":[null,0,2,1],"state":".lld",
        "guessed":"...g"}}"#
        .split_whitespace()
        .collect();
    assert!(text.lines().any(|line| line.trim_end_matches(',') == expected), "{text}");
    let readme: String = include_str!("../traces/README.md").split_whitespace().collect();
    assert!(readme.contains(&expected), "traces/README.md lost the example");
    assert_eq!(read_native(text.as_bytes()).expect("reads"), late_trace());
    // Nothing there at the start is not the same as nothing known of it.
    let empty = Trace { start: Some(StartLayout::default()), ..Trace::default() };
    assert_eq!(read_native(&native_bytes(&empty)[..]).expect("reads"), empty);
    assert!(!String::from_utf8_lossy(&native_bytes(&Trace::default())).contains("start"));
}

#[test]
fn columns_of_a_start_must_match() {
    let good = String::from_utf8(native_bytes(&late_trace())).expect("UTF-8");
    for (from, to, expected) in [
        (r#""large":"ls""#, r#""large":"l""#, "start.segments.large has 1 entries, expected 2"),
        (r#""large":"ls""#, r#""large":"lx""#, "start.segments.large: entry 1 is 'x'"),
        (r#""blocks":[2,2]"#, r#""blocks":[4]"#, "start.segments.blocks has 1 entries"),
        ("[1049088,2048]", "[1049088]", "start.segments.size_bytes has 1 entries, expected 2"),
        (r#""pool":[null,0]"#, r#""pool":[0]"#, "start.segments.pool has 1 entries"),
        ("[null,2031616]", "[null]", "start.segments.reservation has 1 entries"),
        (r#""stream":[0,1],"pool""#, r#""stream":[0],"pool""#, "start.segments.stream has 1"),
        ("[null,0,2,1]", "[null,0,2]", "start.blocks.block has 3 entries, expected 4"),
        (".lld", ".ll", "start.blocks.state has 3 entries"),
        (".lld", ".l?d", "start.blocks.state: entry 2 is '?'"),
        ("...g", "..g", "start.blocks.guessed has 3 entries"),
        (r#""blocks":[2,2]"#, r#""blocks":[2,3]"#, "the segments list 5 of 4 blocks"),
        (r#""blocks":[2,2]"#, r#""blocks":[2,4294967296]"#, "invalid value"),
        (r#""state":".lld","#, "", "missing field `state`"),
    ] {
        assert!(good.contains(from), "{from} is not in {good}");
        let error = native_error(&good.replacen(from, to, 1)).to_string();
        assert!(error.contains(expected), "{to}\n  gives    {error}\n  expected {expected}");
    }
}

#[test]
fn every_rule_of_a_start_is_checked() {
    assert_eq!(validate(&late_trace()), Ok(()));
    type Break = fn(&mut StartLayout, &mut Trace);
    let breaks: [(&str, Break); 32] = [
        ("start.segments 2: the segments list 3 of 4 blocks", |s, _| s.segments[0].blocks = 1),
        ("start.segments 0: stream 2 does not exist", |s, _| s.segments[0].stream.0 = 2),
        ("start.segments 1: pool 1 does not exist", |s, _| s.segments[1].pool.0 = 1),
        ("start.segments 0: address 0x0 is no multiple", |s, _| s.segments[0].address = 0),
        ("start.segments 0: address 0x10001 is no multiple", |s, _| s.segments[0].address += 1),
        ("start.segments 1: address 0x200000 is below its reservation, 0x200200", |s, _| {
            s.segments[1].reservation = Some(0x20_0200);
        }),
        ("start.segments 1: has 2560 bytes, but its 2 blocks have 2048", |s, _| {
            s.segments[1].size_bytes += 512;
        }),
        ("start.segments 0: has 1049088 bytes, but its 2 blocks have 1049600", |s, _| {
            s.blocks[0].size_bytes += 512;
        }),
        ("start.segments 0: has 0 bytes, but its 0 blocks have 0", |s, _| {
            s.segments.insert(0, StartSegment { size_bytes: 0, blocks: 0, ..s.segments[0] });
        }),
        ("start.segments 0: has 1049088 bytes, but its 2 blocks have more than 2^64", |s, _| {
            s.blocks[0].size_bytes = u64::MAX - 511;
        }),
        ("start.segments 0: has 512 bytes, but its 2 blocks have more", |s, _| {
            // Their sum wraps around to the segment's size.
            s.blocks[0].size_bytes = 1024;
            s.blocks[1].size_bytes = u64::MAX - 511;
            s.segments[0].size_bytes = 512;
        }),
        ("start.segments 1: ends beyond address 2^64", |s, _| {
            s.segments[1].address = u64::MAX - 1023;
        }),
        (
            "start.segments 1: address 0x110000 is below 0x110200, where the segment before",
            |s, _| {
                s.segments[1].address = 0x11_0000;
                s.segments[1].reservation = None;
            },
        ),
        ("start.segments 1: address 0x200000 is below 0x500200", |s, t| {
            s.segments[0].address = 0x40_0000;
            t.recording = None;
        }),
        ("start.segments 0: more than 2^63 - 1 bytes", |s, _| {
            s.blocks[0].size_bytes = 1 << 63;
            s.segments[0].size_bytes = (1 << 63) + MIB;
        }),
        ("start.segments 1: differs in stream, pool or large from segment 0", |s, _| {
            s.segments[0].reservation = Some(0x1_0000);
            s.segments[1].reservation = Some(0x1_0000);
        }),
        ("start.blocks 2: size 1 is no multiple of 512 above 0", |s, _| {
            s.blocks[2].size_bytes = 1;
            s.blocks[3].size_bytes = 2047;
        }),
        ("start.blocks 0: size 0 is no multiple", |s, _| {
            s.blocks[0].size_bytes = 0;
            s.segments[0].size_bytes = MIB;
        }),
        ("start.blocks 0: is free, but names block 3", |s, _| s.blocks[0].block = BlockId(3)),
        ("start.blocks 1: is in use, but names no block", |s, _| {
            s.blocks[1].block = BlockId::NONE;
        }),
        ("start.blocks 3: is free as the block before", |s, _| {
            for block in &mut s.blocks[2..] {
                block.block = BlockId::NONE;
                block.state = StartState::Free;
            }
        }),
        ("start.blocks 1: block 4 does not exist", |s, _| s.blocks[1].block = BlockId(4)),
        ("start.blocks 2: has 1024 bytes, but block 2 asked for 1025", |_, t| {
            t.blocks[2].size_bytes = 1025;
        }),
        ("start.blocks 2: block 2 is of stream 0, its segment of 1", |_, t| {
            t.blocks[2].stream = StreamId(0);
        }),
        ("start.blocks 3: block 1 is at 0x200400, but recorded at 0x200000", |_, t| {
            t.recording.as_mut().expect("is there").block_addresses[1] = 0x20_0000;
        }),
        ("start.blocks 3: block 2 stands in two places", |s, t| {
            s.blocks[3].block = BlockId(2);
            t.recording = None;
        }),
        ("event 0: free of block 3, which was not asked for yet", |_, t| {
            t.events[0].op = Op::Free(BlockId(3));
        }),
        ("event 0: free of block 1, which is already freed and deferred", |_, t| {
            t.events[0].op = Op::Free(BlockId(1));
        }),
        ("event 0: done of block 0, which is live", |_, t| t.events[0].op = Op::Done(BlockId(0))),
        ("event 0: alloc of block 0, which is live", |_, t| {
            t.events[0].op = Op::Alloc(BlockId(0));
        }),
        ("event 0: alloc of block 1, which is already freed and deferred", |_, t| {
            t.events[0].op = Op::Attempt(BlockId(1));
        }),
        ("event 2: done of block 1, which is already gone", |_, t| {
            t.events[1].op = Op::Done(BlockId(1));
        }),
    ];
    for (expected, change) in breaks {
        let mut trace = late_trace();
        let mut start = trace.start.take().expect("is there");
        change(&mut start, &mut trace);
        trace.start = Some(start);
        let error = validate(&trace).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected {expected}\n  gives  {error}");
    }
}

/// Runs of one reservation, segments that touch, and a start without events are all fine.
#[test]
fn a_start_may_look_in_many_ways() {
    let good: [fn(&mut StartLayout); 4] = [
        |s| s.segments[1].address = 0x20_0000,
        |s| s.segments[0].address = 0x20_0000 - (MIB + 512),
        |s| {
            let run =
                StartSegment { address: 0x40_0000, size_bytes: 512, blocks: 1, ..s.segments[1] };
            s.segments.push(run);
            let state = StartState::Free;
            let block = BlockId::NONE;
            s.blocks.push(StartBlock { size_bytes: 512, block, state, guessed: false });
        },
        |s| s.segments[0].pool = PoolId(0),
    ];
    for change in good {
        let mut trace = late_trace();
        trace.recording = None;
        change(trace.start.as_mut().expect("is there"));
        assert_eq!(validate(&trace), Ok(()));
        assert_eq!(read_native(&native_bytes(&trace)[..]).expect("reads"), trace);
        trace.events.clear();
        assert_eq!(validate(&trace), Ok(()));
    }
}

/// What is live at the start counts in what may live at once: 8 blocks of 2^60 - 1 bytes with the
/// one here are just too many.
#[test]
fn live_bytes_begin_with_the_start() {
    let mut trace = late_trace();
    trace.events.clear();
    trace.recording = None;
    for id in 4..12 {
        trace.blocks.push(trace.blocks[3]);
        trace.blocks[id].size_bytes = BLOCK_BYTES_MAX;
        trace.events.push(Event { time_ns: 0, op: Op::Alloc(BlockId(id as u32)) });
    }
    let error = validate(&trace).expect_err("too many").to_string();
    assert_eq!(error, "event 7: block 11: more than 2^63 - 1 bytes live at once");
    trace.start = None;
    assert_eq!(validate(&trace), Ok(()));
}

#[test]
fn statistics_count_what_was_there() {
    let mut trace = late_trace();
    trace.settings_changes.push("x:1".to_owned());
    let s = stats(&trace);
    let at_start = StartStats {
        segments: 2,
        reserved_bytes: MIB + 512 + 2048,
        live_blocks: 2,
        requested_bytes: MIB + 1024,
        deferred_blocks: 1,
        deferred_bytes: 700,
        guessed_blocks: 1,
    };
    assert_eq!(s.at_start, Some(at_start));
    // b0 goes, 3 MiB come beside b2.
    assert_eq!((s.requested_bytes_peak, s.requested_peak_event), (3 * MIB + 1024, Some(1)));
    assert_eq!(s.requested_bytes_peak, trace.requested_bytes_peak());
    assert_eq!((s.requested_bytes_final, s.live_blocks_peak), (3 * MIB + 1024, 2));
    assert_eq!((s.never_freed_blocks, s.allocs, s.alloc_bytes_total), (2, 1, 3 * MIB));
    assert_eq!((s.frees, s.dones, s.settings_changes), (1, 1, 0));
    let recorded = s.recorded.expect("is there");
    assert_eq!((recorded.reserved_bytes_peak, recorded.addresses), (MIB + 512 + 2048, 4));
    trace.events[1].op = Op::Settings(SettingsId(0));
    let s = stats(&trace);
    assert_eq!((s.requested_bytes_peak, s.requested_peak_event), (MIB + 1024, None));
    assert_eq!((s.requested_bytes_final, s.settings_changes), (1024, 1));
}

#[test]
fn info_tells_what_was_there_as_json() {
    let mut trace = late_trace();
    trace.settings_changes.push("x:1".to_owned());
    let facts = FileFacts::new("late.json".to_owned(), None, &trace, Vec::new());
    let json = serde_json::to_value(&facts).expect("serialises");
    assert_eq!(json["stats"]["at_start"]["segments"], 2);
    assert_eq!(json["stats"]["at_start"]["deferred_bytes"], 700);
    assert_eq!(json["stats"]["settings_changes"], 0);
    assert_eq!(json["settings_changes"], serde_json::json!(["x:1"]));
    let pool = serde_json::json!(
        {"name": "p", "kind": "mem_pool", "no_split": true, "use_on_oom": false}
    );
    assert_eq!(json["pools"], serde_json::json!([pool]));
    trace.start = None;
    trace.recording = None;
    let facts = FileFacts::new("whole.json".to_owned(), None, &trace, Vec::new());
    let json = serde_json::to_value(&facts).expect("serialises");
    assert_eq!(json["stats"]["at_start"], serde_json::Value::Null);
}

#[test]
fn the_share_of_a_history_takes_the_best_that_is_known() {
    let share = |frees_without_alloc, blocks_at_start, allocs_of_run| {
        let history = History { allocs: 30, frees_without_alloc, blocks_at_start, allocs_of_run };
        (history.allocs_unseen(), history.share())
    };
    assert_eq!(share(0, 0, None), (0, 1.0));
    assert_eq!(share(10, 0, None), (10, 0.75));
    assert_eq!(share(10, 30, None), (30, 0.5));
    assert_eq!(share(10, 30, Some(120)), (90, 0.25));
    // A number that cannot be does not give more than there is.
    assert_eq!(share(10, 30, Some(20)), (30, 0.5));
    assert_eq!(share(0, 0, Some(u64::MAX)).0, u64::MAX - 30);
    assert_eq!(History::default().share(), 1.0);
}

// ---- validate and stats -----------------------------------------------------------------------

#[test]
fn every_rule_of_a_valid_trace_is_checked() {
    let good = read_text(
        "alloc a 4\n@5us access a\ndefer a\ndone a\nattempt t 3\nmark p\npool enter q\npool leave q\n\
         enter m\ntransfer 5 h2d",
    )
    .expect("parses");
    assert_eq!(validate(&good), Ok(()));
    type Break = fn(&mut Trace);
    let breaks: [(&str, Break); 25] = [
        ("0 is not between 1", |t| t.blocks[0].size_bytes = 0),
        ("not between 1 and 2^60 - 1", |t| t.blocks[1].size_bytes = BLOCK_BYTES_MAX + 1),
        ("stream 9 does not exist", |t| t.blocks[0].stream.0 = 9),
        ("site 0 does not exist", |t| t.blocks[0].site.0 = 0),
        ("name 7 does not exist", |t| t.blocks[0].name.0 = 7),
        ("frame 0 does not exist", |t| t.sites.stacks.push(vec![fraglab::units::FrameId(0)])),
        ("handle 0x0 is also that of stream 0", |t| {
            t.streams.push(fraglab::trace::Stream { handle: 0 });
        }),
        ("event 3: time 0 ns is before 5000 ns", |t| t.events[3].time_ns = 0),
        ("block 4 does not exist", |t| t.events[1].op = Op::Access(BlockId(4))),
        ("access of block 1, which was not asked for yet", |t| {
            t.events[1].op = Op::Access(BlockId(1));
        }),
        ("event 2: free of block 0, which is already gone", |t| {
            t.events[1].op = Op::Free(BlockId(0));
            t.events[2].op = Op::Free(BlockId(0));
        }),
        ("done of block 0, which is live", |t| t.events[2].op = Op::EmptyCache),
        ("access of block 0, which is already freed and deferred", |t| {
            t.events[3].op = Op::Access(BlockId(0));
        }),
        ("free of block 1, which is already gone", |t| t.events[5].op = Op::Free(BlockId(1))),
        ("alloc of block 1, which is already gone", |t| t.events[5].op = Op::Alloc(BlockId(1))),
        ("phase 0 does not exist", |t| t.phases.clear()),
        ("leaves pool 0, but is in none", |t| t.events[6].op = Op::EmptyCache),
        ("event 7: enters pool 0, but is in it already", |t| t.events[7].op = t.events[6].op),
        ("event 7: deletes pool 0 while in it", |t| {
            t.events[7].op = Op::PoolDelete(PoolId(0));
        }),
        ("event 7: deletes pool 1 while in pool 0", |t| {
            t.pools.push(t.pools[0].clone());
            t.events[7].op = Op::PoolDelete(PoolId(1));
        }),
        ("pool 0 does not exist", |t| t.pools.clear()),
        ("settings 0 does not exist", |t| t.events[5].op = Op::Settings(SettingsId(0))),
        ("module 0 does not exist", |t| t.modules.clear()),
        ("transfers 0: 0 is not", |t| t.transfers[0].size_bytes = 0),
        ("header.limit_bytes 0: 0 is not", |t| t.header.limit_bytes = Some(0)),
    ];
    for (expected, change) in breaks {
        let mut trace = good.clone();
        change(&mut trace);
        let error = validate(&trace).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected {expected}\n  gives  {error}");
    }
}

/// PyTorch aborts when a MemPool is deleted while another pool is entered, not for a graph.
#[test]
fn a_graph_may_be_deleted_inside_another_pool() {
    let text = "pool enter g capture\npool leave g\npool enter q\npool delete g\npool leave q";
    assert_eq!(validate(&read_text(text).expect("parses")), Ok(()));
    assert!(read_text(&text.replace(" capture", "")).is_err());
}

#[test]
fn a_completion_inside_a_flush_may_be_followed_by_done() {
    use fraglab::trace::{RecordedAction, RecordedKind, Recording};
    let mut trace = read_text("alloc a 4\ndefer a\nalloc b 4\ndone a").expect("parses");
    let completed = |event| RecordedAction {
        event,
        kind: RecordedKind::FreeCompleted,
        block: BlockId(0),
        stream: trace.blocks[0].stream,
        address: 0,
        size_bytes: 4,
    };
    let (inside, early) = (completed(2), completed(1));
    trace.recording =
        Some(Recording { block_addresses: vec![512, 0], actions: vec![inside], truth: None });
    assert_eq!(validate(&trace), Ok(()));
    let mut with = |actions: Vec<RecordedAction>| {
        trace.recording.as_mut().expect("is there").actions = actions;
        validate(&trace)
    };
    assert!(matches!(with(vec![inside, inside]), Err(InvalidTrace::Action { action: 1, .. })));
    assert!(
        matches!(with(vec![early]), Err(InvalidTrace::Action { action: 0, .. })),
        "not yet deferred"
    );
    assert!(
        matches!(with(vec![inside, early]), Err(InvalidTrace::Action { action: 1, .. })),
        "order"
    );
}

#[test]
fn statistics_of_a_trace_worked_out_by_hand() {
    let text = "\
mark step0.forward
alloc a 100
alloc b 300 stream=5
mark step0.backward
alloc c 100
attempt big 1GiB
defer b
@2us mark step12
done b
free a
alloc d 64
mark stepping
empty_cache
";
    let s = stats(&read_text(text).expect("parses"));
    assert_eq!((s.events, s.allocs, s.attempts), (13, 4, 1));
    assert_eq!((s.frees, s.defers, s.dones, s.empty_caches), (1, 1, 1, 1));
    assert_eq!((s.streams, s.phases, s.steps, s.duration_ns), (2, 4, 2, 2_000));
    assert_eq!((s.requested_bytes_peak, s.requested_peak_event), (500, Some(4)));
    assert_eq!(s.requested_peak_phase.as_deref(), Some("step0.backward"));
    assert_eq!((s.requested_bytes_final, s.live_blocks_peak, s.never_freed_blocks), (164, 3, 2));
    assert_eq!(s.alloc_bytes_total, 564);
    // 64, 100, 100, 300: classes 64..128 and 256..512.
    assert_eq!((s.sizes.distinct, s.sizes.median_bytes, s.sizes.largest_bytes), (3, 100, 300));
    let classes: Vec<_> =
        s.sizes.classes.iter().map(|c| (c.min_bytes, c.allocs, c.bytes)).collect();
    assert_eq!(classes, [(64, 3, 264), (256, 1, 300)]);
    let streams: Vec<_> = s.by_stream.iter().map(|s| (s.handle, s.allocs, s.bytes)).collect();
    assert_eq!(streams, [(0, 3, 264), (5, 1, 300)]);
    assert!((s.by_stream[1].share - 300.0 / 564.0).abs() < 1e-12);
    assert_eq!((s.history_share, s.recorded), (1.0, None));
}

#[test]
fn statistics_of_a_recording() {
    use fraglab::trace::{RecordedAction, RecordedKind, RecordedStats, Recording};
    use fraglab::units::StreamId;
    let mut trace = read_text("alloc a 4\nattempt b 9\nempty_cache").expect("parses");
    let action = |event, kind, size_bytes| RecordedAction {
        event,
        kind,
        block: BlockId::NONE,
        stream: StreamId(0),
        address: 0,
        size_bytes,
    };
    let actions = vec![
        action(0, RecordedKind::SegmentAlloc, 10),
        action(0, RecordedKind::SegmentMap, 5),
        action(1, RecordedKind::SegmentUnmap, 5),
        action(1, RecordedKind::SegmentAlloc, 2),
        action(1, RecordedKind::Oom, 1000),
        action(2, RecordedKind::SegmentFree, 10),
    ];
    trace.recording = Some(Recording { block_addresses: vec![512, 0], actions, truth: None });
    assert_eq!(
        stats(&trace).recorded,
        Some(RecordedStats {
            segment_allocs: 3,
            segment_frees: 2,
            reserved_bytes_peak: 15,
            ooms: 1,
            addresses: 1,
        })
    );
}

/// Units, ranks and options of a model survive text and native JSON.
#[test]
fn a_model_goes_through_text_and_native() {
    let text = "ranks 4 2\noption chunk_size 100\nunit emb leaf emb.w=60\n\
                unit \"a b\" host w=50 b=10:frozen\nalloc emb.w 120 role=parameter\n";
    let trace = read_text(text).expect("a text");
    let model = trace.header.model.clone().expect("a model");
    assert_eq!((model.ranks, model.local_ranks, model.elements()), (4, 2, 120));
    assert_eq!(model.options["chunk_size"], "100");
    assert!(model.units[0].leaf && model.units[1].host && model.units[1].parameters[1].frozen);
    let mut native = Vec::new();
    write_native(&trace, &mut native).expect("written");
    assert_eq!(read_native(&native[..]).expect("read").header.model, Some(model.clone()));
    let mut again = Vec::new();
    write_text(&trace, &mut again).expect("written");
    let again = String::from_utf8(again).expect("text");
    assert_eq!(read_text(&again).expect("read").header.model, Some(model));
}

#[test]
fn a_model_that_contradicts_itself_is_refused() {
    for (lines, message) in [
        ("ranks 0", "0 of 0 ranks on a host"),
        ("ranks 2 3", "3 of 2 ranks on a host"),
        ("unit a w=1\nunit a v=1", "module `a` is there twice"),
        ("unit a w=1\nunit b w=1", "parameter `w` is there twice"),
        ("unit a leaf", "module `a` has no parameters"),
        ("unit a w=0", "parameter `w` has 0 elements"),
        ("unit a w=72057594037927937", "parameter `w` has 72057594037927937 elements"),
    ] {
        let error = match read_text(lines) {
            Err(error) => error.to_string(),
            Ok(trace) => validate(&trace).expect_err(lines).to_string(),
        };
        assert!(error.contains(message), "{lines}: {error}");
    }
}
