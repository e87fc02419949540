//! What device calls cost: simulated time by steps, derived profiles, on hand-worked traces and on
//! the recordings that ship.

use std::path::Path;

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, RunResult, SimulatedTime, StepTime, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::{Trace, read_native, read_text};

use crate::common::shared_dir;

/// Every call costs the same whatever its size: malloc 10 µs, free 5, and 1, 2, 3, 4 for
/// address_reserve, create, map and set_access; 6, 7 and 8 for unmap, release and address_free.
fn flat() -> RunOptions {
    let profile = CostProfile::from_json(
        r#"{"name": "flat", "gpu": "none", "driver": "none", "date": "none", "method": "by hand",
            "calls": {"malloc": [[2, 10]], "free": [[2, 5]], "address_reserve": [[2, 1]],
                      "create": [[2, 2]], "map": [[2, 3]], "set_access": [[2, 4]],
                      "unmap": [[2, 6]], "release": [[2, 7]], "address_free": [[2, 8]]}}"#,
    );
    RunOptions::new(profile.expect("a profile"))
}

fn trace(text: &str) -> Trace {
    read_text(text).expect("a trace")
}

fn replay(trace: &Trace, allocator: &str, options: &RunOptions) -> RunResult {
    let spec = allocator.parse().expect("an allocator");
    run(trace, &spec, options, Observe::default()).expect("runs").result
}

/// Name, recorded, program and device time in µs, calls.
fn row(step: &StepTime) -> (&str, u64, u64, u64, u64) {
    let us = |ns: u64| {
        assert_eq!(ns % 1000, 0, "{step:?}");
        ns / 1000
    };
    let StepTime { name, recorded_ns, program_ns, allocator_device_ns, calls, .. } = step;
    (name, us(*recorded_ns), us(*program_ns), us(*allocator_device_ns), *calls)
}

/// The recorded run made a malloc of 10 µs in each of events 0, 2, 5 and 15, and two frees of 5 µs
/// in its empty_cache, which has the time of the first.
///
/// | µs | event | gap | less recorded calls |
/// |---|---|---|---|
/// | 0 | alloc | – | before the first event |
/// | 100 | mark step0.forward | 100 | |
/// | 150, 160 | alloc, free | 50, 10 | 10 of the 50 |
/// | 160, 165 | mark step0.backward, alloc | 0, 5 | 5 of 5: the rest of 10 is dropped |
/// | 265 | free, mark step1.forward | 100 | |
/// | 300, 300 | alloc, free | 35 | |
/// | 400 | mark eval | 100 | |
/// | 410 | empty_cache | 10 | |
/// | 450 | mark step2.forward | 40 | 10: the frees came after 410 |
/// | 480 | mark step2.backward, alloc | 30 | 10: the mark shares the alloc's gap |
/// | 500 | free | 20 | |
const RECORDED: &str = r#"{"fraglab_trace": 2,
 "header": {"name": "by-hand"},
 "streams": [0],
 "phases": ["step0.forward", "step0.backward", "step1.forward", "eval", "step2.forward",
            "step2.backward"],
 "blocks": {"size_bytes": [2097152, 2097152, 2097152, 2097152, 2097152]},
 "events": {"ops": "amafmafmafmcmmaf", "ids": [0, 1, 1, 1, 2, 1, 3, 4, 5, 1],
            "time_unit_ns": 1000,
            "time_deltas": [0, 100, 50, 10, 0, 5, 100, 0, 35, 0, 100, 10, 40, 30, 0, 20]},
 "recording": {
  "address_table": [33554432, 67108864, 100663296, 134217728],
  "address": [0, 1, 2, 0, 3],
  "actions": {"event_deltas": [0, 2, 3, 6, 0, 3], "kind": "SSSssS",
              "block": [null, null, null, null, null, null], "stream": [0, 0, 0, 0, 0, 0],
              "address": [0, 1, 2, 1, 2, 3],
              "size_bytes": [2097152, 2097152, 2097152, 2097152, 2097152, 2097152]}}}"#;

#[test]
fn steps_take_what_a_hand_calculation_says() {
    let result = replay(&read_native(RECORDED.as_bytes()).expect("a trace"), "native", &flat());
    // `native` makes a malloc an alloc and a free a free.
    let rows: Vec<_> = result.time.steps.iter().map(row).collect();
    assert_eq!(
        rows,
        [
            ("before", 100, 100, 10, 1),
            ("step0", 165, 150, 30, 4),
            ("step1", 135, 135, 15, 2),
            ("after", 50, 40, 0, 0),
            ("step2", 50, 40, 15, 2),
        ]
    );
    assert_eq!(result.time.allocator_device_ns, 70_000);
    assert_eq!(result.time.recorded_ns, 500_000);
    assert_eq!(result.time.recorded_device_ns, 35_000);
    assert_eq!(result.time.simulated_ns, 535_000);
    assert_eq!(result.time.steps[1].simulated_ns, 180_000);
    assert_eq!(result.time.steps[1].share, Some(30.0 / 165.0));
    assert_eq!(result.time.steps[3].share, Some(0.0));
}

#[test]
fn map_calls_are_told_by_step() {
    let text = "\
@0us mark step0
@10us alloc a 30MiB
@20us free a
@30us mark step1
@40us alloc b 30MiB
@50us free b
";
    let result = replay(&trace(text), "expandable", &flat());
    let [first, second] = &result.time.steps[..] else { panic!("{:?}", result.time) };
    // A reservation, two pages of 20 MiB, one set_access for both: 1 + 2·2 + 2·3 + 2·4 µs.
    assert_eq!(row(first), ("step0", 30, 30, 19, 6));
    assert_eq!(first.map_calls, 2);
    assert_eq!(row(second), ("step1", 20, 20, 0, 0));
    assert_eq!(second.map_calls, 0);
}

/// Three pages of 20 MiB are mapped and made accessible at once, but unmapped and released one by
/// one: PyTorch's `ExpandableSegment` does so.
#[test]
fn pages_are_unmapped_one_by_one() {
    let result = replay(&trace("alloc a 50MiB\nfree a\nempty_cache\n"), "expandable", &flat());
    let calls = result.calls;
    assert_eq!((calls.create, calls.map, calls.set_access), (3, 3, 1));
    assert_eq!((calls.unmap, calls.release, calls.address_free), (3, 3, 1));
}

#[test]
fn without_times_or_steps_nothing_is_made_up() {
    let untimed = replay(&trace("mark step0\nalloc a 1MiB\n"), "native", &flat());
    assert_eq!(untimed.time.steps.len(), 1);
    assert_eq!(untimed.time.steps[0].share, None);
    let stepless = replay(&trace("@5us mark eval\nalloc a 1MiB\n"), "native", &flat());
    assert_eq!(stepless.time.steps, []);
}

#[test]
fn a_replay_that_ends_early_ends_its_times_there() {
    let text = "\
capacity 4MiB
@0us mark step0
@10us alloc a 4MiB
@20us mark step1
@30us alloc b 4MiB
@40us free a
@90us mark step2
";
    let mut options = flat();
    options.stop_on_oom = true;
    let time = replay(&trace(text), "native", &options).time;
    assert_eq!((time.recorded_ns, time.allocator_device_ns), (30_000, 10_000));
    let rows: Vec<_> = time.steps.iter().map(row).collect();
    assert_eq!(rows, [("step0", 20, 20, 10, 1), ("step1", 10, 10, 0, 0)]);
}

/// The traces that ship, each with the recording of what PyTorch's allocator did.
fn shipped() -> Vec<Trace> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let files = std::fs::read_dir(dir).expect("ships");
    let mut paths: Vec<_> = files.map(|file| file.expect("an entry").path()).collect();
    paths.retain(|path| path.to_string_lossy().ends_with(".json.zst"));
    paths.sort();
    let read = |path: &std::path::PathBuf| read_trace(path, &ReadOptions::default());
    paths.iter().map(|path| read(path).expect("a trace").trace).collect()
}

fn h200() -> RunOptions {
    RunOptions::new(CostProfile::shipped("h200").expect("ships"))
}

#[test]
fn steps_add_up_to_the_run() {
    let traces = shipped();
    assert_eq!(traces.len(), 8);
    for trace in &traces {
        for allocator in ["caching", "native", "expandable"] {
            let result = replay(trace, allocator, &h200());
            let SimulatedTime { steps, .. } = &result.time;
            let name = &trace.header.name;
            let sum = |field: fn(&StepTime) -> u64| steps.iter().map(field).sum::<u64>();
            assert_eq!(sum(|step| step.recorded_ns), result.time.recorded_ns, "{name}");
            assert_eq!(
                sum(|step| step.program_ns),
                result.time.recorded_ns - result.time.recorded_device_ns,
                "{name}"
            );
            let device_ns = sum(|step| step.allocator_device_ns);
            assert_eq!(device_ns, result.time.allocator_device_ns, "{name} {allocator}");
            assert_eq!(sum(|step| step.simulated_ns), result.time.simulated_ns, "{name}");
            assert_eq!(sum(|step| step.calls), result.calls.total(), "{name} {allocator}");
            assert_eq!(sum(|step| step.map_calls), result.calls.map, "{name} {allocator}");
            let steps_marked = fraglab::trace::stats(trace).steps;
            let named = steps.iter().filter(|step| step.is_step()).count() as u64;
            assert_eq!(named, steps_marked, "{name}");
        }
    }
}

/// An exact replay makes the recorded calls, so that it takes as long as the recorded run: what is
/// taken out of the gaps comes back, but for calls that were faster than the profile's.
#[test]
fn an_exact_replay_takes_the_recorded_time() {
    for trace in shipped() {
        let time = replay(&trace, "caching", &h200()).time;
        let (simulated, recorded) = (time.simulated_ns as f64, time.recorded_ns as f64);
        assert!((simulated / recorded - 1.0).abs() < 1e-3, "{}: {time:?}", trace.header.name);
    }
}

/// PyTorch's cache exists so that steady steps ask little of the device (the first one fills it).
#[test]
fn steady_steps_of_caching_hardly_call_the_device() {
    let traces = shipped();
    let trace = traces.iter().find(|trace| trace.header.name == "llama-3b-recompute");
    let trace = trace.expect("ships");
    let caching = replay(trace, "caching", &h200()).time;
    let native = replay(trace, "native", &h200()).time;
    for (step, native) in caching.steps.iter().zip(&native.steps).filter(|(s, _)| s.is_step()) {
        if step.name != "step0" {
            assert!(step.share.expect("has a time") < 0.01, "{step:?}");
            assert!(native.share.expect("has a time") > 0.1, "one malloc a tensor: {native:?}");
        }
    }
}

fn fraglab(args: &[&str]) -> String {
    let output = assert_cmd::Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(args)
        .write_stdin("@0ms mark step0\n@1ms alloc a 5MiB\n@2ms free a\n")
        .output()
        .expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn derived_costs_are_told_apart_from_measured_ones() {
    let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let list = words(fraglab(&["list"]));
    assert!(list.contains("h200: measured on NVIDIA H200, driver 580, 2026-11"), "{list}");
    assert!(list.contains("a100-80g: derived for NVIDIA A100-SXM4-80GB"), "{list}");
    let list: serde_json::Value = serde_json::from_str(&fraglab(&["list", "--json"])).unwrap();
    let derived = |name: &str| {
        let profiles = list["profiles"].as_array().expect("an array");
        profiles.iter().find(|profile| profile["name"] == name).expect("listed")["derived"].clone()
    };
    assert_eq!((derived("h200"), derived("a100-80g")), (false.into(), true.into()));

    let screen = fraglab(&["run", "-", "--alloc", "native", "--profile", "a100-80g"]);
    assert!(screen.contains("costs of a100-80g (derived)"), "{screen}");
    assert!(screen.contains("device time a step: step0"), "{screen}");
    let args = ["run", "-", "--alloc", "native", "--json", "-", "--profile"];
    let json = |profile| -> serde_json::Value {
        serde_json::from_str(&fraglab(&[&args[..], &[profile]].concat())).expect("JSON")
    };
    let (a100, h200) = (json("a100-80g"), json("h200"));
    assert_eq!(a100["device"]["profile"], "a100-80g");
    assert_eq!(a100["device"]["profile_derived"], true);
    assert!(h200["device"].get("profile_derived").is_none());
    assert_eq!(a100["time"]["steps"][0]["name"], "step0");
    assert_eq!(a100["time"]["steps"][0]["calls"], 2);
}

/// An expandable segment reserves 1.125 times the device: 9 GiB for 8, in pages of 20 MiB.
const CAPPED: &str = "\
device_total 8GiB
capacity 8GiB
address_space 20GiB
mappings 3
alloc a 50MiB
alloc b 20MiB stream=1
free a
alloc c 60MiB
alloc d 1MiB
";

#[test]
fn a_device_with_caps_refuses_what_is_beyond() {
    let trace = trace(CAPPED);
    // Pages: 3 for `a`, which `c` gets again; none for `b`; `d` needs a third reservation.
    let result = replay(&trace, "expandable", &flat());
    assert_eq!(result.counters["ooms"], 2, "{result:?}");
    assert_eq!(result.outcome.event_index, Some(1));
    assert_eq!(
        (result.device.address_bytes_max, result.device.mappings_max),
        (Some(20 << 30), Some(3))
    );
    assert_eq!(result.device.mappings_peak, Some(3));
    assert_eq!(result.calls.address_reserve, 2);
    // Options go before the trace's. With a fourth mapping `b` is met, without a third range `d` is
    // not.
    let options = RunOptions { mappings_max: Some(4), ..flat() };
    let result = replay(&trace, "expandable", &options);
    assert_eq!((result.counters["ooms"], result.outcome.event_index), (1, Some(4)));
    let options = RunOptions { mappings_max: Some(5), address_bytes_max: Some(30 << 30), ..flat() };
    let result = replay(&trace, "expandable", &options);
    assert_eq!(result.counters["ooms"], 0);
    assert_eq!((result.calls.map, result.calls.address_reserve), (5, 3));
    // One malloc a tensor needs no mappings, and no addresses but its own: 20 + 60 + 1 MiB at last.
    let result =
        replay(&trace, "native", &RunOptions { address_bytes_max: Some(81 << 20), ..flat() });
    assert_eq!(result.counters["ooms"], 0);
    let result =
        replay(&trace, "native", &RunOptions { address_bytes_max: Some(60 << 20), ..flat() });
    assert_eq!(result.outcome.event_index, Some(1));
}

#[test]
fn caps_are_asked_for_and_told() {
    let args = ["run", "-", "--alloc", "native", "--address-space", "1GiB", "--mappings", "500"];
    let screen = fraglab(&args);
    assert!(screen.contains("; 1 GiB of addresses; at most 500 mappings"), "{screen}");
    let json: serde_json::Value =
        serde_json::from_str(&fraglab(&[&args[..], &["--json", "-"]].concat())).expect("JSON");
    assert_eq!(json["device"]["address_bytes_max"], 1 << 30);
    assert_eq!(json["device"]["mappings_max"], 500);
    let plain: serde_json::Value =
        serde_json::from_str(&fraglab(&["run", "-", "--json", "-"])).expect("JSON");
    assert!(plain["device"].get("mappings_max").is_none());
    assert!(plain["device"].get("address_bytes_max").is_none());
}

/// Under memory pressure the allocator gives pages and segments back; the replay's calls then still
/// take about as long as the recorded run's.
#[test]
fn replays_of_full_devices_make_the_recorded_calls() {
    let Some(dir) = shared_dir() else { return };
    for name in ["llama-1b-varlen.expandable.cap49", "llama-1b-varlen.gc80cap60"] {
        let path = dir.join(format!("{name}.pickle.gz"));
        let trace = read_trace(&path, &ReadOptions::default()).expect("a snapshot").trace;
        let time = replay(&trace, "caching", &h200()).time;
        let ratio = time.allocator_device_ns as f64 / time.recorded_device_ns as f64;
        assert!((ratio - 1.0).abs() < 0.03, "{name}: {ratio}");
    }
}
