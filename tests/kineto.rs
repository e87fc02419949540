//! Traces of PyTorch's profiler.
//!
//! `whole.json.gz` and `whole.pickle.gz` are one run of PyTorch 2.11.0 on an H200, seen by the
//! profiler and by the allocator's own history at once: two layers of a transformer, three steps,
//! a side stream, a refused request of 400 GiB at the end. `late.json.gz` is a second run in the
//! same process, profiled from its second step on (of the file's other events a few are kept);
//! `host.json.gz` a run on the CPU. Expected figures are `torch.cuda.memory_stats()` of those runs,
//! or worked out by hand.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::{Path, PathBuf};

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run};
use fraglab::import::{ImportError, Imported, KinetoError, ReadOptions, read_kineto, read_trace};
use fraglab::metrics::Peaks;
use fraglab::trace::{Op, SourceKind, Trace, validate};
use fraglab::units::BlockId;

use crate::common::program::*;
use crate::common::{Rng, shared_dir};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kineto").join(name)
}

fn import(name: &str) -> Imported {
    read_trace(&fixture(name), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn read(text: &str) -> (Trace, Vec<String>) {
    let (trace, warnings) =
        read_kineto(text.as_bytes(), None).unwrap_or_else(|error| panic!("{error}: {text}"));
    validate(&trace).unwrap_or_else(|error| panic!("{error}: {text}"));
    (trace, warnings)
}

fn error_of(text: &str) -> String {
    read_kineto(text.as_bytes(), None).expect_err("must not be read").to_string()
}

/// Address, bytes and time of a memory event, above 0 handed out, below 0 freed, on GPU 0.
fn memory(time_us: f64, address: u64, bytes: i64) -> String {
    on_gpu(0, time_us, address, bytes)
}

fn on_gpu(gpu: i32, time_us: f64, address: u64, bytes: i64) -> String {
    format!(
        r#"{{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 7,
        "ts": {time_us:.3}, "args": {{"Bytes": {bytes}, "Device Id": {gpu}, "Device Type": 1,
        "Addr": {address}}}}}"#
    )
}

fn annotation(time_us: f64, duration_us: f64, thread: u64, name: &str) -> String {
    format!(
        r#"{{"ph": "X", "cat": "user_annotation", "name": "{name}", "pid": 7, "tid": {thread},
        "ts": {time_us:.3}, "dur": {duration_us:.3}, "args": {{"External id": 3}}}}"#
    )
}

fn object(events: &[String]) -> String {
    format!(r#"{{"schemaVersion": 1, "traceEvents": [{}]}}"#, events.join(",\n"))
}

/// Every event in short: letter, size in bytes or phase, time in ns.
fn story(trace: &Trace) -> Vec<(char, String, u64)> {
    let size = |block: BlockId| trace.blocks[block.index()].size_bytes.to_string();
    let short = |op: Op| match op {
        Op::Alloc(block) => ('a', size(block)),
        Op::Attempt(block) => ('t', size(block)),
        Op::Free(block) => ('f', size(block)),
        Op::Mark(phase) => ('m', trace.phases[phase.index()].clone()),
        other => panic!("a profile has no {other:?}"),
    };
    trace
        .events
        .iter()
        .map(|event| (short(event.op), event.time_ns))
        .map(|((l, s), t)| (l, s, t))
        .collect()
}

fn told<'a>(events: &'a [(char, &'a str, u64)]) -> Vec<(char, String, u64)> {
    events.iter().map(|&(letter, what, time)| (letter, what.to_owned(), time)).collect()
}

fn phases_begun(trace: &Trace) -> Vec<&str> {
    let begun = trace.events.iter().filter_map(|event| match event.op {
        Op::Mark(phase) => Some(trace.phases[phase.index()].as_str()),
        _ => None,
    });
    begun.collect()
}

mod real {
    use super::*;

    /// Size of every block in the order in which they were handed out, with its address.
    fn blocks(trace: &Trace) -> Vec<(u64, u64)> {
        let addresses = &trace.recording.as_ref().unwrap().block_addresses;
        let allocs = trace.events.iter().filter_map(|event| match event.op {
            Op::Alloc(block) => {
                Some((addresses[block.index()], trace.blocks[block.index()].size_bytes))
            }
            _ => None,
        });
        allocs.collect()
    }

    #[test]
    fn a_profile_tells_the_same_story_as_the_snapshot_of_the_same_run() {
        let (profile, snapshot) = (import("whole.json.gz").trace, import("whole.pickle.gz").trace);
        let (seen, real) = (blocks(&profile), blocks(&snapshot));
        assert_eq!(seen.len(), 603);
        assert_eq!(seen.len(), real.len());
        let mut unsplit = 0;
        for (&(address, bytes), &(real_address, real_bytes)) in seen.iter().zip(&real) {
            assert_eq!(address, real_address);
            let rounded_bytes = real_bytes.next_multiple_of(512);
            assert!(bytes >= rounded_bytes, "{bytes} for {real_bytes}");
            unsplit += u64::from(bytes > rounded_bytes);
        }
        // 1,049,600 bytes were asked for where a hole of 1,966,080 was free, twice.
        assert_eq!(unsplit, 2);
        let frees = |trace: &Trace, letters: fn(Op) -> Option<BlockId>| -> Vec<u64> {
            let addresses = &trace.recording.as_ref().unwrap().block_addresses;
            let blocks = trace.events.iter().filter_map(|event| letters(event.op));
            blocks.map(|block| addresses[block.index()]).collect()
        };
        let gone = |op: Op| match op {
            Op::Free(block) | Op::Defer(block) => Some(block),
            _ => None,
        };
        assert_eq!(frees(&profile, gone), frees(&snapshot, gone));
        assert_eq!(frees(&profile, gone).len(), 519);
    }

    #[test]
    fn its_peaks_are_those_that_pytorch_reported() {
        let Imported { trace, warnings } = import("whole.json.gz");
        // torch.cuda.memory_stats() at the end of the run.
        assert_eq!(trace.requested_bytes_peak(), 147_800_576, "allocated_bytes.all.peak");
        assert_eq!(trace.recorded_reserved_bytes_peak(), Some(199_229_440));
        let truth =
            trace.recording.as_ref().and_then(|recording| recording.truth.as_ref()).unwrap();
        assert_eq!(truth.stats["num_ooms"], 1);
        assert_eq!(trace.first_attempt().unwrap().1, 400 << 30);
        let header = &trace.header;
        assert_eq!(header.source.kind, SourceKind::Kineto);
        assert_eq!(header.device.name.as_deref(), Some("NVIDIA H200"));
        assert_eq!(header.device.index, Some(0));
        assert_eq!(header.device.total_bytes, Some(150_109_880_320));
        assert_eq!((header.history.allocs, header.history.share()), (603, 1.0));
        // The first alloc of the snapshot's history is at 1,796,117,712.142739 s.
        let start_us = header.start_unix_ns.unwrap() / 1000;
        assert!(start_us.abs_diff(1_796_117_712_142_739) < 1000, "{start_us}");
        let only = ["a profile shows no streams"];
        assert_eq!(warnings.len(), only.len(), "{warnings:?}");
        assert!(warnings[0].starts_with(only[0]));
    }

    #[test]
    fn what_was_in_use_before_a_late_profile_is_there() {
        let Imported { trace, warnings } = import("late.json.gz");
        // The same model in the same state: the peak of the whole run, of which 93,267,968 bytes
        // (weights and Adam's two moments) live from before the profile to its end.
        assert_eq!(trace.requested_bytes_peak(), 147_800_576);
        assert_eq!(trace.blocks[0].size_bytes, 93_267_968);
        assert_eq!(trace.events[0].op, Op::Alloc(BlockId(0)));
        assert_eq!(trace.names, ["before_profile"]);
        assert_eq!(trace.header.history.allocs, 519);
        assert_eq!(trace.header.history.blocks_at_start, 1);
        assert!(warnings[1].starts_with("88.95 MiB were in use before"), "{warnings:?}");
    }

    #[test]
    fn annotations_become_phases() {
        let step = ["data", "forward", "backward", "optimizer"];
        let trace = import("whole.json.gz").trace;
        // Without a schedule the profiler marks no steps.
        assert_eq!(phases_begun(&trace), step.repeat(3));
    }

    #[test]
    fn a_profile_of_the_host_alone_is_read_with_a_warning() {
        let Imported { trace, warnings } = import("host.json.gz");
        assert!(warnings[0].contains("host only"), "{warnings:?}");
        // Linear(256, 512): 512 x 256 floats, then 512; Linear(512, 10): 10 x 512, then 10.
        let sizes: Vec<u64> = trace.blocks.iter().map(|block| block.size_bytes).collect();
        for bytes in [524_288, 2_048, 20_480, 40] {
            assert!(sizes.contains(&bytes), "{bytes} in {sizes:?}");
        }
        assert_eq!(trace.header.device.total_bytes, None);
    }
}

/// A recording written as the profiler would have shown it comes back as it was.
mod round_trip {
    use super::*;

    /// The profiler's view of a trace, with sizes in multiples of `unit_bytes`: of 1, nothing is
    /// lost.
    fn as_profile(trace: &Trace, unit_bytes: u64) -> String {
        let addresses = &trace.recording.as_ref().unwrap().block_addresses;
        let mut events: Vec<String> = Vec::new();
        for event in &trace.events {
            let (block, sign) = match event.op {
                Op::Alloc(block) => (block, 1),
                Op::Free(block) => (block, -1),
                _ => continue,
            };
            let bytes = trace.blocks[block.index()].size_bytes.next_multiple_of(unit_bytes);
            let bytes = bytes as i64 * sign;
            let address = addresses[block.index()];
            events.push(format!(
                r#"{{"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":1,"tid":1,
                "ts":{}.{:03},"args":{{"Bytes":{bytes},"Addr":{address},"Device Id":0,
                "Device Type":1,"Ev Idx":{}}}}}"#,
                event.time_ns / 1000,
                event.time_ns % 1000,
                events.len(),
            ));
        }
        let total = trace.header.device.total_bytes.unwrap();
        let device = format!(r#"{{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": {total}}}"#);
        // The order of the file means nothing where times and indices tell.
        events.reverse();
        format!(r#"{{"deviceProperties": [{device}], "traceEvents": [{}]}}"#, events.join(","))
    }

    fn peaks(trace: &Trace) -> Peaks {
        let spec = AllocSpec { name: "caching".to_owned(), params: Vec::new() };
        let options = RunOptions::new(CostProfile::shipped("h200").unwrap());
        let observed = run(trace, &spec, &options, Observe::default()).unwrap();
        observed.result.peaks
    }

    #[test]
    fn of_a_job_on_one_stream() {
        let Some(dir) = shared_dir() else { return };
        for name in ["tiny", "gpt2-small"] {
            let path = dir.join(format!("{name}.pickle.gz"));
            let mut original = read_trace(&path, &ReadOptions::default()).unwrap().trace;
            let others = original.events.iter().filter(|event| matches!(event.op, Op::Defer(_)));
            assert_eq!(others.count(), 0, "{name} has frees that a profile cannot show");
            let (again, _) = read(&as_profile(&original, 1));
            original.events.retain(|event| matches!(event.op, Op::Alloc(_) | Op::Free(_)));
            let first_ns = original.events[0].time_ns;
            original.events.iter_mut().for_each(|event| event.time_ns -= first_ns);
            assert_eq!(again.events, original.events, "{name}");
            let sizes = |trace: &Trace| -> Vec<u64> {
                trace.blocks.iter().map(|block| block.size_bytes).collect()
            };
            assert_eq!(sizes(&again), sizes(&original), "{name}");
            let addresses =
                |trace: &Trace| trace.recording.as_ref().unwrap().block_addresses.clone();
            assert_eq!(addresses(&again), addresses(&original), "{name}");
            // So the caching allocator reserves what PyTorch's did.
            let recorded = original.recorded_reserved_bytes_peak().unwrap();
            assert_eq!(peaks(&again).reserved_bytes_peak, recorded, "{name}");
            assert_eq!(peaks(&again), peaks(&original), "{name}");
            // PyTorch's profiler shows sizes rounded up to 512 bytes, which are rounded no more.
            let (rounded, _) = read(&as_profile(&original, 512));
            let known = |peaks: Peaks| (peaks.allocated_bytes_peak, peaks.reserved_bytes_peak);
            assert_eq!(known(peaks(&rounded)), known(peaks(&original)), "{name}");
        }
    }
}

mod by_hand {
    use super::*;

    #[test]
    fn times_order_events_and_indices_those_of_one_time() {
        let indexed = |event: String, index: u64| {
            event.replace(r#""Addr""#, &format!(r#""Ev Idx": {index}, "Addr""#))
        };
        // Freed and handed out again within a nanosecond, written in reverse by two threads.
        let text = object(&[
            indexed(memory(12.5, 0x1000, -512), 9),
            indexed(memory(11.25, 0x1000, 512), 8),
            indexed(memory(11.25, 0x1000, -1024), 7),
            indexed(memory(10.0, 0x1000, 1024), 20),
        ]);
        let (trace, _) = read(&text);
        let expected =
            [("a", "1024", 0), ("f", "1024", 1250), ("a", "512", 1250), ("f", "512", 2500)];
        let expected = expected.map(|(l, s, t)| (l.chars().next().unwrap(), s, t));
        assert_eq!(story(&trace), told(&expected));
        assert_eq!(trace.recording.unwrap().block_addresses, [0x1000, 0x1000]);
    }

    #[test]
    fn without_indices_the_file_orders_events_of_one_time() {
        let text = object(&[
            memory(5.0, 0x1000, 1024),
            memory(5.0, 0x1000, -1024),
            memory(5.0, 0x1000, 2048),
        ]);
        let (trace, warnings) = read(&text);
        assert_eq!(story(&trace), told(&[('a', "1024", 0), ('f', "1024", 0), ('a', "2048", 0)]));
        assert_eq!(warnings.len(), 1, "{warnings:?}");
    }

    #[test]
    fn keys_come_in_any_order_and_in_a_bare_list() {
        let text = r#" [{"args": {"Addr": 4096, "Bytes": 512, "Device Id": 0, "Device Type": 1},
            "name": "[memory]", "ph": "i", "ts": 3},
            {"args": [1, {"Addr": 1}], "name": "x", "ph": "X", "ts": "soon"},
            {"args": null, "name": 5, "ph": null},
            {"args": {"Addr": {"Addr": [1]}, "Bytes": "no"}, "name": "[memory] ", "ph": "i"},
            {"args": {"Addr": 4096, "Bytes": -512, "Device Id": 0, "Device Type": 1},
            "name": "[memory]", "ph": "i", "ts": 4}]"#;
        let (trace, _) = read(text);
        assert_eq!(story(&trace), told(&[('a', "512", 0), ('f', "512", 1000)]));
    }

    #[test]
    fn what_is_no_memory_event_is_walked_over_however_deep() {
        let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
        let long = "x".repeat(300_000);
        let text = format!(
            r#"{{"other": {deep}, "traceEvents": [
                {{"ph": "X", "name": "a", "args": {{"nested": {deep}}}}},
                {{"args": {{"nested": {deep}, "text": "{long}"}}, "ph": "X", "name": "{long}"}},
                {}], "more": {{"a": {deep}}}}}"#,
            memory(1.0, 0x1000, 512)
        );
        assert_eq!(story(&read(&text).0), told(&[('a', "512", 0)]));
    }

    #[test]
    fn blocks_from_before_the_profile_are_asked_for_first() {
        let total = |event: String, bytes: u64| {
            event.replace(r#""Addr""#, &format!(r#""Total Allocated": {bytes}, "Addr""#))
        };
        // In use before: 8192 bytes, of which 1024 and 512 are freed later.
        let text = object(&[
            total(memory(1.0, 0x9000, 2048), 10_240),
            total(memory(2.0, 0x4000, -1024), 9_216),
            total(memory(3.0, 0x2000, -512), 8_704),
            total(memory(4.0, 0x4000, 4096), 12_800),
        ]);
        let (trace, warnings) = read(&text);
        let rest = 8192 - 1024 - 512;
        let expected = [
            ('a', "6656", 0),
            ('a', "512", 0),
            ('a', "1024", 0),
            ('a', "2048", 0),
            ('f', "1024", 1000),
            ('f', "512", 2000),
            ('a', "4096", 3000),
        ];
        assert_eq!(rest, 6656);
        assert_eq!(story(&trace), told(&expected));
        assert_eq!(trace.requested_bytes_peak(), 12_800, "as the allocator said");
        let history = trace.header.history;
        assert_eq!((history.allocs, history.frees_without_alloc), (2, 2));
        assert_eq!(history.blocks_at_start, 3);
        assert_eq!(warnings.len(), 3, "{warnings:?}");
    }

    #[test]
    fn events_that_do_not_fit_are_counted() {
        let text = object(&[
            memory(1.0, 0x1000, 512),
            memory(2.0, 0x1000, 1024),
            memory(3.0, 0x1000, -2048),
            memory(4.0, 0x1000, -1024),
            memory(5.0, 0x5000, 0),
        ]);
        let (trace, warnings) = read(&text);
        let expected =
            [('a', "512", 0), ('f', "512", 1000), ('a', "1024", 1000), ('f', "1024", 2000)];
        assert_eq!(story(&trace), told(&expected));
        let of = |text: &str| warnings.iter().any(|warning| warning.starts_with(text));
        assert!(of("2 events do not fit"), "{warnings:?}");
        assert!(of("1 frees of another size"), "{warnings:?}");
        assert!(of("1 events of 0 bytes"), "{warnings:?}");
    }

    #[test]
    fn missing_events_show_in_the_totals() {
        let total = |event: String, bytes: u64| {
            event.replace(r#""Addr""#, &format!(r#""Total Allocated": {bytes}, "Addr""#))
        };
        let text = object(&[
            total(memory(1.0, 0x1000, 512), 512),
            total(memory(2.0, 0x2000, 512), 2048),
            total(memory(3.0, 0x3000, 512), 2560),
        ]);
        let (_, warnings) = read(&text);
        assert!(warnings.iter().any(|w| w.starts_with("1 totals do not follow")), "{warnings:?}");
    }

    #[test]
    fn a_refused_request_is_an_attempt() {
        let refused = memory(2.0, 0, 1 << 30).replace("[memory]", "[OutOfMemory]");
        let refused = refused.replace("\"Addr\": 0", "\"finished\": false");
        let text = object(&[memory(1.0, 0x1000, 512), refused, memory(3.0, 0x1000, -512)]);
        let (trace, _) = read(&text);
        let expected = [('a', "512", 0), ('t', "1073741824", 1000), ('f', "512", 2000)];
        assert_eq!(story(&trace), told(&expected));
        assert_eq!(trace.first_attempt(), Some((1, 1 << 30)));
    }

    #[test]
    fn old_traces_have_unix_time_in_whole_microseconds() {
        let at = |us: &str, bytes: i64| memory(0.0, 0x1000, bytes).replace("0.000", us);
        let text = object(&[at("1696875132123456", 512), at("1696875132123459", -512)]);
        let (trace, _) = read(&text);
        assert_eq!(story(&trace), told(&[('a', "512", 0), ('f', "512", 3000)]));
        assert_eq!(trace.header.start_unix_ns, Some(1_696_875_132_123_456_000));
    }

    #[test]
    fn steps_and_their_outermost_ranges_become_phases() {
        let text = object(&[
            annotation(100.0, 1000.0, 7, "ProfilerStep#3"),
            annotation(1100.0, 900.0, 7, "ProfilerStep#4"),
            annotation(110.0, 300.0, 7, "## forward ##"),
            annotation(120.0, 50.0, 7, "attention"),
            annotation(500.0, 300.0, 7, "backward"),
            annotation(510.0, 900.0, 8, "on another thread"),
            annotation(900.0, 100.0, 7, "Optimizer.step#AdamW.step"),
            annotation(1000.0, 50.0, 7, "Optimizer.zero_grad#AdamW.zero_grad"),
            annotation(
                1100.0,
                90.0,
                7,
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            ),
            memory(130.0, 0x1000, 512),
            memory(1500.0, 0x1000, -512),
        ]);
        let (trace, _) = read(&text);
        let expected = [
            ('m', "step3", 0),
            ('m', "step3.forward", 0),
            ('a', "512", 0),
            ('m', "step3.backward", 370_000),
            ('m', "step3.optimizer", 770_000),
            ('m', "step3.zero_grad", 870_000),
            ('m', "step4", 970_000),
            ('m', "step4.data", 970_000),
            ('f', "512", 1_370_000),
        ];
        assert_eq!(story(&trace), told(&expected));
    }

    #[test]
    fn one_of_several_gpus_is_chosen() {
        let text = object(&[
            on_gpu(0, 1.0, 0x1000, 512),
            on_gpu(1, 2.0, 0x1000, 1024),
            on_gpu(1, 3.0, 0x1000, -1024),
            on_gpu(-1, 4.0, 0x7000, 64).replace(r#""Device Type": 1"#, r#""Device Type": 0"#),
        ]);
        let error = read_kineto(text.as_bytes(), None).expect_err("two GPUs");
        assert!(matches!(error, KinetoError::Gpu { .. }));
        let error = error.to_string();
        assert!(error.contains("GPU 0 has 1 memory events, GPU 1 has 2"), "{error}");
        assert!(error.contains("--gpu N"), "{error}");
        let (trace, _) = read_kineto(text.as_bytes(), Some(1)).unwrap();
        assert_eq!(story(&trace), told(&[('a', "1024", 0), ('f', "1024", 1000)]));
        assert_eq!(trace.header.device.index, Some(1));
        let error = read_kineto(text.as_bytes(), Some(2)).expect_err("no such GPU").to_string();
        assert!(error.contains("no memory events of GPU 2"), "{error}");
    }
}

mod wrong {
    use super::*;

    #[test]
    fn errors_say_where_and_what() {
        let cases = [
            (r#"{"traceEvents": []}"#, "no [memory] events in 0 events"),
            (r#"{"schemaVersion": 1}"#, "no traceEvents in the object"),
            (
                r#"{"traceEvents": [{"ph": "i", "name": "[memory]"}]}"#,
                "1:49: a [memory] event has no number `Bytes`",
            ),
            (r#"{"traceEvents": [1]}"#, "expected an event"),
            (r#"{"traceEvents": {}}"#, "expected a list of events"),
            ("{\"traceEvents\": [\n{\"ph\": \"i\",, }]}", "2:12: "),
            (r#"{"traceEvents": [{"ph": "i", "name": "[mem"#, "the file was cut short"),
            (r#"{"traceEvents": []} x"#, "trailing"),
        ];
        for (text, expected) in cases {
            let error = error_of(text);
            assert!(error.contains(expected), "{error:?} for {text}");
            assert!(error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn properties_of_odd_types_are_no_reason_to_refuse_the_rest() {
        let event = memory(1.0, 0x1000, 512);
        let with = |properties: &str| {
            let text = format!(r#"{{"deviceProperties": {properties}, "traceEvents": [{event}]}}"#);
            let device = read(&text).0.header.device;
            (device.name, device.total_bytes)
        };
        let nothing = ["null", "7", "\"x\"", "true", "-0.5", "{}", "[]", "[null, 1, [2], \"x\"]"];
        for properties in nothing {
            assert_eq!(with(properties), (None, None), "{properties}");
        }
        let odd = r#"[{"id": "0"}, {"id": 0, "name": 7, "totalGlobalMem": 8589934592, "x": [{}]}]"#;
        assert_eq!(with(odd), (None, Some(8 << 30)));
        let good = r#"[[], {"name": "GPU", "id": 0, "totalGlobalMem": null}]"#;
        assert_eq!(with(good), (Some("GPU".to_owned()), None));
    }

    #[test]
    fn memory_without_addresses_is_of_an_old_pytorch() {
        let text = object(&[memory(1.0, 1, 512).replace(",\n        \"Addr\": 1", "")]);
        assert!(!text.contains("Addr"));
        assert!(error_of(&text).contains("none of 1 [memory] events has an address"));
    }

    #[test]
    fn every_cut_and_every_wrong_byte_is_told_or_read() {
        let text = object(&[
            annotation(0.5, 9.0, 7, "ProfilerStep#1"),
            memory(1.0, 0x1000, 512),
            memory(2.5, u64::MAX, i64::MAX),
            memory(2.5, 0x1000, i64::MIN),
            memory(1e300, 7, 512),
            memory(-1e300, 7, -512),
        ]);
        for end in 0..text.len() {
            assert!(read_kineto(&text.as_bytes()[..end], None).is_err(), "{end}");
        }
        let mut rng = Rng(14);
        let mut read = 0;
        for _ in 0..20_000 {
            let mut bytes = text.clone().into_bytes();
            for _ in 0..=rng.below(3) {
                let place = rng.below(bytes.len());
                bytes[place] = b"0123456789-.eE[]{}\",: \\x\xff"[rng.below(25)];
            }
            if let Ok((trace, _)) = read_kineto(bytes.as_slice(), None) {
                read += 1;
                // Sums beyond 2^63 are told here, and nothing else goes wrong.
                let _ = validate(&trace).map_err(|error| error.to_string());
            }
        }
        assert!(read > 100, "{read}");
    }
}

mod program {
    use super::*;

    #[test]
    fn profiles_are_told_by_their_content() {
        let folder = Folder::new();
        let events = [memory(1.0, 0x1000, 512), memory(2.0, 0x1000, -512)];
        let bare = format!("\n[{}]", events.join(","));
        for (name, text) in [("a.pickle", object(&events)), ("b.txt", bare)] {
            let facts = json(&fraglab(&["info", "--json", &folder.file(name, &text)]));
            assert_eq!(facts["header"]["source"]["kind"], "kineto", "{name}");
            assert_eq!(facts["stats"]["requested_bytes_peak"], 512);
        }
        let text = object(&events);
        let facts = json(&fraglab_reading(&text, &["info", "--json", "-"]));
        assert_eq!(facts["header"]["source"]["kind"], "kineto");
        let native =
            fraglab_reading(r#"{"fraglab_trace": 3, "phases": ["traceEvents"]}"#, &["info", "-"]);
        assert_code(&native, 0);
    }

    #[test]
    fn a_profile_is_run_and_compared_with_what_it_reserved() {
        let path = fixture("whole.json.gz");
        let output = fraglab(&["run", path.to_str().unwrap(), "--alloc", "caching,native"]);
        assert_code(&output, 1);
        let text = stdout(&output);
        assert!(
            text.contains("the recorded run reserved 190 MiB: a profile shows neither"),
            "{text}"
        );
        let info = stdout(&fraglab(&["info", path.to_str().unwrap()]));
        assert!(info.contains("trace of PyTorch's profiler"), "{info}");
        assert!(info.contains("allocated peak 140.95 MiB, reserved peak 190 MiB"), "{info}");
        assert!(!info.contains("segment"), "{info}");
        // There are no decisions to compare with.
        for flags in [&["verify"][..], &["verify", "--predict"]] {
            let verify = fraglab(&[flags, &[path.to_str().unwrap()]].concat());
            assert_code(&verify, 2);
            let error = stderr(&verify);
            assert!(error.contains("no record of what its allocator did"), "{error}");
        }
    }

    #[test]
    fn the_gpu_is_chosen_with_a_flag() {
        let folder = Folder::new();
        let both = object(&[on_gpu(0, 1.0, 0x1000, 512), on_gpu(3, 2.0, 0x1000, 1024)]);
        let path = folder.file("two.json", &both);
        let error = assert_one_error(&fraglab(&["run", &path]));
        assert!(error.contains("two.json: several GPUs") && error.contains("--gpu"), "{error}");
        let result = json(&fraglab(&["run", &path, "--gpu", "3", "--json", "-"]));
        assert_eq!(result["peaks"]["requested_bytes_peak"], 1024);
    }

    #[test]
    fn errors_name_the_file() {
        let error = read_trace(&fixture("nothing.json"), &ReadOptions::default());
        assert!(matches!(error, Err(ImportError::File(_))));
        let folder = Folder::new();
        let path = folder.file("cut.json", r#"{"traceEvents": [{"ph": "i""#);
        let error = assert_one_error(&fraglab(&["info", &path]));
        assert!(error.contains("cut.json: 1:"), "{error}");
    }
}
