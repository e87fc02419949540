//! `fraglab run --device cuda` on the fake driver: every allocator with real addresses and real
//! aliasing, checked by what was written into the memory.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use fraglab::alloc::registry;
use fraglab::trace::{
    Op, StartBlock, StartLayout, StartSegment, StartState, read_text, write_trace,
};
use fraglab::units::{BlockId, PoolId};
use serde_json::Value;

use crate::common::program::*;
use crate::common::{fake_driver, shared_dir};

/// What the driver says when everything came back.
const NOTHING: &str = "mallocs 0 handles 0 mappings 0 reservations 0 contexts 0 modules 0";

/// A program whose blocks split, join, wait for streams, and leave holes; with `mark` before it,
/// one of the steps that allocators which plan ahead learn from. 11 blocks are ever live in it.
const STEP: &str = "\
alloc a 3MiB
alloc b 2MiB stream=7
alloc c 700KiB
alloc d 5
free a
alloc e 1MiB
alloc f 1MiB
defer b
alloc g 5MiB
free e
done b
alloc h 3MiB
free f
empty_cache
alloc i 4MiB stream=7
free c g
alloc j 6MiB
alloc _ 100KiB
free h i j d
";

/// Two blocks, of which a device of 64 MiB holds one.
const TIGHT: &str = "alloc a 40MiB\nalloc b 40MiB\nfree a\n";

/// What `fraglab run --device cuda` says with the fake driver and these settings of it. Nothing
/// where there is no C compiler.
fn on_gpu(settings: &[(&str, &str)], args: &[&str]) -> Option<Output> {
    let dir = fake_driver::library_dir()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    command.args(["run", "--device", "cuda"]).args(args);
    for name in fake_driver::settings_around() {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", dir).envs(settings.iter().copied());
    Some(command.output().expect("runs"))
}

/// A weight and three steps as a file: 34 blocks.
fn program(dir: &Path) -> String {
    let steps = (0..3).map(|step| format!("mark step{step}\n{STEP}"));
    let path = dir.join("steps.txt");
    let text = format!("alloc w 1MiB\n{}", steps.collect::<String>());
    std::fs::write(&path, text).expect("a file");
    path.display().to_string()
}

fn file(dir: &Path, text: &str) -> String {
    let path = dir.join("trace.txt");
    std::fs::write(&path, text).expect("a file");
    path.display().to_string()
}

/// A text without its line ends.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Every registered allocator, and the policies that do something else.
fn allocators() -> String {
    let names = registry::list().into_iter().map(|info| info.name);
    let policies = ["stitch+policy=shipped", "stitch+policy=best", "planned+mode=stalloc"];
    names.chain(policies).collect::<Vec<_>>().join(",")
}

#[test]
fn every_allocator_keeps_what_was_written() {
    let dir = dir();
    let trace = program(dir.path());
    let leaks = dir.path().join("leaks");
    let leaks = leaks.to_str().expect("UTF-8");
    let alloc = allocators();
    let args = ["--trace", &trace, "--alloc", &alloc, "--touch", "full", "--json", "-"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_LEAK_CHECK", leaks)], &args) else { return };
    assert_code(&output, 0);
    let results = json(&output);
    let results = results.as_array().expect("several");
    assert_eq!(results.len(), registry::list().len() + 3);
    for result in results {
        let name = &result["allocator"]["name"];
        assert_eq!(result["outcome"]["status"], "ok", "{name}");
        assert_eq!(result["hardware"]["touch"]["mismatches"], 0, "{name}");
        assert_eq!(result["hardware"]["touch"]["blocks"], 34, "{name}");
        let wall = result["wall"]["device_calls"].as_object().expect("calls");
        let made: u64 = wall.values().filter_map(|times| times["calls"].as_u64()).sum();
        let calls = result["calls"].as_object().expect("calls").values();
        assert_eq!(made, calls.filter_map(Value::as_u64).sum::<u64>(), "{name}");
    }
    let left = std::fs::read_to_string(leaks).expect("the driver wrote it");
    assert!(left.lines().all(|line| line.starts_with(NOTHING)), "{left}");
}

/// An allocator that does not look at addresses does on a GPU what it does on a simulated device.
#[test]
fn calls_are_those_of_the_simulated_device() {
    let dir = dir();
    let trace = program(dir.path());
    let alloc = allocators();
    let seeds = ["--address-seeds", "2", "--json", "-"];
    let simulated = fraglab(&[&["run", "--trace", &trace, "--alloc", &alloc][..], &seeds].concat());
    let simulated = json(&simulated);
    let args = ["--trace", &trace, "--alloc", &alloc, "--paranoid", "--json", "-"];
    let Some(output) = on_gpu(&[], &args) else { return };
    assert_code(&output, 0);
    let mut compared = 0;
    for (result, simulated) in json(&output)
        .as_array()
        .expect("several")
        .iter()
        .zip(simulated.as_array().expect("several"))
    {
        assert_eq!(result["allocator"], simulated["allocator"]);
        if simulated["address_spread"]["addresses_matter"] == false {
            assert_eq!(result["calls"], simulated["calls"], "{}", result["allocator"]["name"]);
            assert_eq!(result["peaks"], simulated["peaks"], "{}", result["allocator"]["name"]);
            assert_eq!(result["hardware"]["simulated"]["calls"], result["calls"]);
            compared += 1;
        }
    }
    assert!(compared >= 3, "native and those with one range at least: {compared}");
}

#[test]
fn cases_are_touched_at_their_edges() {
    let cases = ["gmlake-g01-two-fragments", "gmlake-g13-flush", "hand-deferred-free"];
    let cases = cases.map(|case| format!("{}/traces/cases/{case}.txt", env!("CARGO_MANIFEST_DIR")));
    let alloc = "native,caching,expandable,best-fit,bfc,stitch,stitch+policy=shipped";
    let mut args = vec!["--alloc", alloc, "--touch", "edges", "--json", "-", "--trace"];
    args.extend(cases.iter().map(String::as_str));
    let Some(output) = on_gpu(&[("FAKE_CUDA_MEMORY", "200000000000")], &args) else { return };
    assert!(code(&output) <= 1, "some may be out of memory: {}", stderr(&output));
    for result in json(&output).as_array().expect("several") {
        let touch = &result["hardware"]["touch"];
        let name = (&result["trace"]["name"], &result["allocator"]["name"]);
        assert_eq!(touch["mode"], "edges");
        assert_eq!(touch["mismatches"], 0, "{name:?}");
        assert!(touch["blocks"].as_u64() > Some(0), "{name:?}");
    }
}

/// What the driver says is used: 3 and 5 MiB of native in units of 2 MiB are 10, then 6.
#[test]
fn the_result_tells_of_the_card() {
    let dir = dir();
    let trace = file(dir.path(), "alloc a 3MiB\nalloc b 5MiB\nfree a\n");
    let args = ["--trace", &trace, "--alloc", "native", "--json", "-"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_MEMORY", "1073741824")], &args) else { return };
    assert_code(&output, 0);
    let result = json(&output);
    assert_eq!(result["device"]["kind"], "cuda");
    assert_eq!(result["device"]["ordinal"], 0);
    assert!(result["device"]["name"].as_str().is_some_and(|name| name.starts_with("Fake GPU")));
    assert_eq!(result["device"]["address_policy"], Value::Null);
    let memory = &result["hardware"]["memory"];
    const MIB: u64 = 1 << 20;
    assert_eq!(memory["at_reserved_peak"]["event_index"], 1);
    assert_eq!(memory["at_reserved_peak"]["reserved_bytes"], 8 * MIB);
    assert_eq!(memory["at_reserved_peak"]["used_bytes"], 10 * MIB);
    assert_eq!(memory["at_end"]["reserved_bytes"], 5 * MIB);
    assert_eq!(memory["at_end"]["used_bytes"], 6 * MIB);
    let wall = &result["wall"];
    assert_eq!(wall["device_calls"]["malloc"]["calls"], 2);
    assert_eq!(wall["device_calls"]["free"]["calls"], 1);
    assert!(wall["allocator_device_ns_measured"].as_u64() > Some(0));
}

/// A history that begins when 3 MiB are there, as a file: they lie in a segment of 20 MiB, of which
/// a GPU knows nothing. 5 MiB come, then the 3 go.
fn late(dir: &Path) -> String {
    let mut trace = read_text("alloc a 3MiB\nalloc b 5MiB\nfree a\n").expect("a trace");
    let a = match trace.events.remove(0).op {
        Op::Alloc(block) => block,
        op => panic!("{op:?}"),
    };
    let state = |block, state, size_bytes| StartBlock { size_bytes, block, state, guessed: false };
    let segment = StartSegment {
        address: 1 << 40,
        size_bytes: 20 << 20,
        stream: trace.blocks[a.index()].stream,
        pool: PoolId::NONE,
        large: true,
        reservation: None,
        blocks: 2,
    };
    let blocks =
        vec![state(a, StartState::Live, 3 << 20), state(BlockId::NONE, StartState::Free, 17 << 20)];
    trace.start = Some(StartLayout { segments: vec![segment], blocks });
    let path = dir.join("late.json");
    let told = write_trace(&trace, &path).expect("a valid trace");
    assert!(told.is_empty(), "{told:?}");
    path.display().to_string()
}

/// Native holds 3 and 5 MiB, in units of 2 MiB 4 and 6, after the first event, then the 5. It was
/// asked for 2 blocks, and wrote both: the one that was there before the first event too.
#[test]
fn blocks_that_were_there_are_asked_for() {
    let dir = dir();
    let trace = late(dir.path());
    let args = ["--trace", &trace, "--alloc", "native,caching", "--touch", "full"];
    let Some(output) = on_gpu(&[], &[&args[..], &["--json", "-"]].concat()) else { return };
    assert_code(&output, 0);
    let results = json(&output);
    const MIB: u64 = 1 << 20;
    let memory = &results[0]["hardware"]["memory"];
    assert_eq!(memory["at_reserved_peak"]["event_index"], 0);
    assert_eq!(memory["at_reserved_peak"]["reserved_bytes"], 8 * MIB);
    assert_eq!(memory["at_reserved_peak"]["used_bytes"], 10 * MIB);
    assert_eq!(memory["at_end"]["used_bytes"], 6 * MIB);
    assert_eq!(results[0]["wall"]["device_calls"]["malloc"]["calls"], 2);
    // Both fit into PyTorch's segment of 20 MiB for what is smaller than 10: a single malloc.
    assert_eq!(results[1]["wall"]["device_calls"]["malloc"]["calls"], 1);
    for result in results.as_array().expect("two") {
        assert_eq!(result["start"]["layout_kept"], false);
        assert_eq!(result["hardware"]["touch"]["blocks"], 2);
        assert_eq!(result["hardware"]["touch"]["mismatches"], 0);
        assert_eq!(result["hardware"]["simulated"]["calls"], result["calls"]);
    }
    let text = stdout(&on_gpu(&[], &args).expect("built before"));
    assert!(words(&text).contains("a GPU begins with nothing"), "{text}");
}

/// The recording whose ring buffer overflowed: what is live at its start is asked for, and the card
/// then holds what the simulator says, which it also says itself.
#[test]
fn a_recording_that_starts_late_runs() {
    let Some(recordings) = shared_dir() else { return };
    let trace = recordings.join("llama-1b-varlen.late.pickle.gz").display().to_string();
    let args = ["--trace", &trace, "--alloc", "caching", "--quiet", "--json", "-"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_MEMORY", "150000000000")], &args) else { return };
    assert_code(&output, 0);
    let result = json(&output);
    let at_peak = &result["hardware"]["memory"]["at_reserved_peak"];
    assert_eq!(result["start"]["layout_kept"], false);
    assert_eq!(result["hardware"]["simulated"]["status"], "ok");
    let peak = &result["peaks"]["reserved_bytes_peak"];
    assert_eq!(&at_peak["reserved_bytes"], peak);
    assert_eq!(&at_peak["used_bytes"], peak, "segments are whole units of 2 MiB");
}

/// A second passes between the events, and is no time of the replay's own.
#[test]
fn events_come_at_their_recorded_time() {
    let dir = dir();
    let trace = file(dir.path(), "@5s alloc a 3MiB\n@6s free a\n");
    let args = ["--trace", &trace, "--alloc", "native", "--pace", "recorded", "--json", "-"];
    let begun = Instant::now();
    let Some(output) = on_gpu(&[], &args) else { return };
    let elapsed = begun.elapsed();
    assert_code(&output, 0);
    assert!(elapsed >= Duration::from_secs(1), "{elapsed:?}");
    let seconds = json(&output)["wall"]["seconds"].as_f64();
    assert!(seconds.is_some_and(|seconds| seconds < 0.9), "{seconds:?}");
}

/// A job with a model, which `chunk` asks for, and steps, which `planned` learns from.
const JOB: &str = r#"
name = "small"
[model]
type = "bert"
layers = 2
hidden = 256
heads = 4
vocabulary = 1000
head = "classifier"
[train]
batch = 2
sequence = 64
steps = 3
dtype = "fp16"
[hardware]
gpu = "a100-40g"
"#;

#[test]
fn allocators_that_need_more_of_a_trace_run() {
    let dir = dir();
    let job = dir.path().join("small.toml");
    std::fs::write(&job, JOB).expect("a file");
    let trace = dir.path().join("small.json").display().to_string();
    let made = fraglab(&["gen", &job.display().to_string(), "-o", &trace]);
    assert_code(&made, 0);
    let alloc = "chunk+chunk_size=1Mi+inner=caching,chunk+chunk_size=1Mi+inner=expandable,planned";
    let args = ["--trace", &trace, "--alloc", alloc, "--touch", "full", "--json", "-"];
    let Some(output) = on_gpu(&[], &args) else { return };
    assert_code(&output, 0);
    let results = json(&output);
    let results = results.as_array().expect("several");
    assert_eq!(results.len(), 3);
    for result in results {
        let hardware = &result["hardware"];
        assert_eq!(result["outcome"]["status"], "ok");
        assert_eq!(hardware["touch"]["mismatches"], 0);
        assert!(hardware["touch"]["blocks"].as_u64() > Some(100), "{hardware}");
        let simulated = &hardware["simulated"]["reserved_bytes_peak"];
        assert_eq!(simulated, &result["peaks"]["reserved_bytes_peak"]);
    }
    assert!(results[0]["chunk"]["gpu_bytes_peak"].as_u64() > Some(0), "{}", results[0]["chunk"]);
}

/// As in a simulation: what goes wrong with one is told, and the others are written.
#[test]
fn an_allocator_that_refuses_the_trace_does_not_end_the_others() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let alloc = "planned+mode=stalloc,native,chunk,caching";
    let out = dir.path().join("out.json").display().to_string();
    let args = ["--trace", &trace, "--alloc", alloc, "--quiet", "--json", &out];
    let simulated = fraglab(&[&["run"][..], &args].concat());
    let Some(output) = on_gpu(&[], &args) else { return };
    assert_code(&output, 2);
    assert_eq!(stderr(&output), stderr(&simulated));
    assert_eq!(stderr(&output).lines().count(), 2);
    let written = std::fs::read(&out).expect("written");
    let results: Value = serde_json::from_slice(&written).expect("JSON");
    let names: Vec<&Value> =
        results.as_array().expect("two").iter().map(|r| &r["allocator"]["name"]).collect();
    assert_eq!(names, ["native", "caching"]);
    assert!(results[0]["hardware"].is_object());
}

/// Calls are those of one pass, and none of the warm-up's are among them.
#[test]
fn the_median_of_several_passes_is_told() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let args = ["--trace", &trace, "--alloc", "native,expandable", "--repeats", "3"];
    let Some(output) = on_gpu(&[], &[&args[..], &["--json", "-"]].concat()) else { return };
    assert_code(&output, 0);
    let results = json(&output);
    for result in results.as_array().expect("two") {
        let wall = &result["wall"];
        let ns = |value: &Value| value.as_u64().expect("a time");
        let told = ns(&wall["allocator_device_ns_measured"]);
        assert_eq!(wall["repeats"]["count"], 3);
        assert!(ns(&wall["repeats"]["least_ns"]) <= told, "{wall}");
        assert!(told <= ns(&wall["repeats"]["most_ns"]), "{wall}");
        let calls = wall["device_calls"].as_object().expect("by name");
        for (name, times) in calls {
            assert_eq!(times["calls"], result["calls"][name], "{name}");
        }
    }
    assert_eq!(results[0]["wall"]["device_calls"]["malloc"]["calls"], 2);
    let text = stdout(&on_gpu(&[], &args).expect("built before"));
    let words = words(&text);
    assert!(words.contains("measured is of the median pass: native "), "{text}");
    assert_eq!(words.matches(" in 3 passes").count(), 2, "{text}");
}

#[test]
fn a_table_stands_below_the_answer() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let args = ["--trace", &trace, "--alloc", "native", "--touch", "full"];
    let Some(output) = on_gpu(&[], &args) else { return };
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("device: Fake GPU 0 (cuda:0, driver "), "{text}");
    assert!(text.contains("\non the card "), "{text}");
    assert!(text.contains("\ndevice calls "), "{text}");
    assert!(text.contains("2 blocks written and checked whole, 80 MiB in all: every"), "{text}");
}

#[test]
fn a_full_card_is_out_of_memory() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let args = ["--trace", &trace, "--alloc", "native,caching", "--touch", "edges", "--json", "-"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_MEMORY", "67108864")], &args) else { return };
    assert_code(&output, 1);
    for result in json(&output).as_array().expect("two") {
        assert_eq!(result["outcome"]["status"], "oom");
        assert_eq!(result["outcome"]["event_index"], 1);
        assert_eq!(result["hardware"]["simulated"]["status"], "oom");
        assert_eq!(result["hardware"]["touch"]["mismatches"], 0);
    }
    // The same by --capacity on a larger one.
    let args = [&args[..], &["--capacity", "64MiB"]].concat();
    let output = on_gpu(&[], &args).expect("built before");
    assert_code(&output, 1);
    let result = &json(&output)[0];
    assert_eq!(result["device"]["capacity_bytes"], 64 << 20);
    assert_eq!(result["outcome"]["event_index"], 1);
}

#[test]
fn an_error_of_the_driver_ends_all_that_would_follow() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let args = ["--trace", &trace, "--alloc", "expandable,native"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_FAIL", "map all 700")], &args) else { return };
    assert_code(&output, 2);
    let expected = format!(
        "fraglab: {trace}: expandable at event 0: the GPU refused map (driver error 700)\nfraglab: \
         {trace}: native was not replayed: an earlier replay ended all work on the GPU\n"
    );
    assert_eq!(stderr(&output), expected);
}

/// A GPU without virtual memory calls still has cudaMalloc.
#[test]
fn a_call_that_the_gpu_does_not_support_ends_one_replay() {
    let dir = dir();
    let trace = file(dir.path(), TIGHT);
    let args = ["--trace", &trace, "--alloc", "expandable,native", "--json", "-", "--quiet"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_VMM", "off")], &args) else { return };
    assert_code(&output, 2);
    let expected = format!(
        "fraglab: {trace}: expandable at event 0: the GPU refused address_reserve (driver error \
         801)\n"
    );
    assert_eq!(stderr(&output), expected);
    let result = &json(&output)[0];
    assert_eq!(result["allocator"]["name"], "native");
    assert_eq!(result["peaks"]["reserved_bytes_peak"], 80 << 20);
}

/// Two pages of 20 MiB are created and not mapped; at the second attempt memory is out.
#[test]
fn an_error_of_the_driver_is_not_hidden_by_a_lack_of_memory_behind_it() {
    let dir = dir();
    let trace = file(dir.path(), &format!("fail create 3\n{TIGHT}"));
    let args = ["--trace", &trace, "--alloc", "expandable", "--quiet"];
    let Some(output) = on_gpu(&[("FAKE_CUDA_FAIL", "map all 999")], &args) else { return };
    assert_code(&output, 2);
    let expected = "expandable at event 0: the GPU refused map (driver error 999)";
    assert!(stderr(&output).contains(expected), "{}", stderr(&output));
}

#[test]
fn a_card_that_is_not_there_is_told_before_any_trace() {
    let Some(dir) = fake_driver::library_dir() else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    command.args(["run", "--device", "cuda:9", "--trace", "nowhere.json"]);
    for name in fake_driver::settings_around() {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", dir).env("FAKE_CUDA_DEVICES", "2");
    let output = command.output().expect("runs");
    let text = assert_one_error(&output);
    assert_eq!(text, "fraglab: --device cuda:9: there is no GPU 9: there are 2, 0 to 1\n");
}

#[test]
fn flags_that_do_not_go_together_are_told() {
    let error = |args: &[&str]| {
        assert_one_error(&fraglab(&[&["run", "--trace", "nowhere.json"][..], args].concat()))
    };
    assert_eq!(
        error(&["--touch", "full"]),
        "fraglab: --touch needs --device cuda: there is nothing to write to in a simulated device\n"
    );
    assert_eq!(
        error(&["--pace", "recorded"]),
        "fraglab: --pace needs --device cuda: a simulated device waits for nothing\n"
    );
    assert_eq!(
        error(&["--repeats", "2"]),
        "fraglab: --repeats needs --device cuda: a simulated device is the same every time\n"
    );
    let simulated = [
        ["--addresses", "ascending"],
        ["--mappings", "7"],
        ["--address-space", "1TiB"],
        ["--address-seeds", "2"],
    ];
    for flag in simulated {
        let text = error(&["--device", "cuda", flag[0], flag[1]]);
        let name = flag[0];
        let expected =
            format!("fraglab: {name} does not go with --device cuda: there the driver decides\n");
        assert_eq!(text, expected);
    }
}
