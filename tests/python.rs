//! `fraglab python` and the file that it prints: what a job records about itself is complete.
//!
//! The file runs in a real Python, on a stand-in for torch whose allocator plays a recorded
//! history (`tests/python/torch_stub`). A job calls `phase` and `empty_cache` on the way; the trace
//! that comes out must have them where the job made them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fraglab::import::{RawAction, RawEntry, ReadOptions, read_torch_snapshot, read_trace};
use fraglab::trace::{Input, Op, Trace};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::program::{assert_code, fraglab, stderr, stdout};
use crate::common::shared_dir;

const SOURCE: &str = include_str!("../src/cli/fraglab_torch.py");

fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python")
}

/// Python with the file and the stand-in for torch. Where there is no Python the caller returns; on
/// CI that is a failure.
fn python(folder: &Path) -> Option<Command> {
    let there = Command::new("python3").arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "python3 is missing");
        eprintln!("skipped: python3 is missing");
        return None;
    }
    let file = folder.join("fraglab_torch.py");
    assert_code(&fraglab(&["python", "-o", file.to_str().expect("UTF-8")]), 0);
    let mut command = Command::new("python3");
    let path = std::env::join_paths([folder, &tests_folder().join("torch_stub")]).expect("a path");
    command.env("PYTHONPATH", path).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("FRAGLAB", env!("CARGO_BIN_EXE_fraglab"));
    command.env_remove("RANK").env_remove("WORLD_SIZE");
    Some(command)
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}\n{}", stdout(output), stderr(output));
    stdout(output)
}

#[test]
fn the_file_is_printed_as_it_is() {
    assert_eq!(stdout(&fraglab(&["python"])), SOURCE);
    let help = stdout(&fraglab(&["python", "--help"]));
    for use_of_it in ["fraglab.record(", "fraglab.phase(", "fraglab.install("] {
        assert!(help.contains(use_of_it), "{help}");
    }
    let nowhere = fraglab(&["python", "-o", "/no/such/folder/fraglab_torch.py"]);
    assert_code(&nowhere, 2);
    assert!(SOURCE.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn the_file_does_what_it_says() {
    let folder = TempDir::new().unwrap();
    let Some(mut python) = python(folder.path()) else { return };
    let library = folder.path().join("plugged.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &tests_folder().join("plugged.c")])
        .output();
    if compiled.is_ok_and(|output| output.status.success()) {
        python.env("STUB_LIBRARY", &library);
    } else {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cc is missing");
    }
    let output = python.arg(tests_folder().join("unit.py")).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

/// A job recorded once more, with calls of its own.
struct Recorded {
    _folder: TempDir,
    trace: Trace,
    path: PathBuf,
    /// Indices of the entries in front of which it called `phase`.
    marks: Vec<usize>,
    /// Calls of `empty_cache`.
    caches: usize,
}

fn record(name: &str, options: &[&str]) -> Option<Recorded> {
    let dir = shared_dir()?;
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join(format!("{name}.json.zst"));
    let output = python(folder.path())?
        .arg(tests_folder().join("job.py"))
        .args([&dir.join(format!("{name}.pickle.gz")), &path])
        .args(options)
        .output()
        .expect("runs");
    let told: Value = serde_json::from_str(&succeeded(&output)).expect("JSON");
    let marks = told["marks"].as_array().expect("a list").iter();
    let marks = marks.map(|mark| mark.as_u64().expect("a number") as usize).collect();
    let caches = told["caches"].as_u64().expect("a number") as usize;
    let trace = read_trace(&path, &ReadOptions::default()).unwrap_or_else(|e| panic!("{e}")).trace;
    Some(Recorded { _folder: folder, trace, path, marks, caches })
}

fn entries_of(name: &str) -> Vec<RawEntry> {
    let path = shared_dir().expect("recordings").join(format!("{name}.pickle.gz"));
    let snapshot =
        read_torch_snapshot(Input::open(&path).expect("opens").reader).expect("a snapshot");
    let kept = |entry: &&RawEntry| entry.action != RawAction::Snapshot;
    snapshot.devices[0].iter().filter(kept).copied().collect()
}

/// What the program did, as far as both the entries and the events tell.
fn is_request(op: Op) -> bool {
    matches!(op, Op::Alloc(_) | Op::Attempt(_) | Op::Free(_) | Op::Defer(_))
}

#[test]
fn phases_stand_where_the_job_began_them() {
    // One stream; side streams with deferred frees; refused; a CUDA graph; expandable segments.
    for name in
        ["tiny", "streams-offload", "llama-1b-plain.oom40", "graph-train", "tiny.expandable"]
    {
        let Some(recorded) = record(name, &["marks"]) else { return };
        let entries = entries_of(name);
        let trace = &recorded.trace;
        let mut requests = 0;
        let mut placed = Vec::new();
        for event in &trace.events {
            requests += usize::from(is_request(event.op));
            if let Op::Mark(phase) = event.op {
                placed.push((trace.phases[phase.index()].clone(), requests));
            }
        }
        let expected = recorded.marks.iter().enumerate().map(|(step, &index)| {
            let requests = entries[..index].iter().filter(|entry| {
                use RawAction::{Alloc, FreeRequested, Oom};
                matches!(entry.action, Alloc | Oom | FreeRequested)
            });
            (format!("step{step}.entry{index}"), requests.count())
        });
        assert_eq!(placed, expected.collect::<Vec<_>>(), "{name}");
        assert!(placed.len() >= 25, "{name}: {}", placed.len());
    }
}

#[test]
fn a_recording_of_the_recorder_is_exact() {
    for (name, calls) in [
        ("graph-train", 1),
        ("tiny", 0),
        ("mempool", 0),
        ("opt-1-3b-act-offload.cap14", 0),
        ("streams-offload", 0),
    ] {
        let options: &[&str] = match name {
            // A MemPool that ends looks to the stand-in like an empty_cache.
            "mempool" => &["marks"],
            // Refusals are predicted from the limit: it must be the one that was set last.
            "opt-1-3b-act-offload.cap14" => &["marks", "later"],
            _ => &["marks", "caches", "twice", "resets"],
        };
        let Some(recorded) = record(name, options) else { return };
        assert_eq!(recorded.caches, calls, "{name}");
        let output = fraglab(&["verify", recorded.path.to_str().unwrap(), "--json", "-"]);
        let result: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let result = result.as_array().map_or(&result, |results| &results[0]);
        assert_eq!(result["exact"], true, "{name}: {result:#}");
        // Every statistic, with those that a history alone leaves open.
        assert_eq!(result["not_compared"], serde_json::json!([]), "{name}");
        let truth = recorded.trace.recording.as_ref().unwrap().truth.as_ref().unwrap();
        assert_eq!(result["statistics"], truth.stats.len(), "{name}");
        if options.contains(&"later") {
            let path = shared_dir().unwrap().join(format!("{name}.pickle.gz"));
            let original = read_trace(&path, &ReadOptions::default()).unwrap().trace;
            let limit = original.header.limit_bytes.expect("a limit");
            assert_eq!(recorded.trace.settings_changes, [format!("limit:{limit}")]);
        }
        if calls > 0 {
            // The second call released nothing, and is there. So is the one before the capture, which
            // the job's stand-in does not make: no malloc of the run flushed.
            let empties = recorded.trace.events.iter().filter(|event| event.op == Op::EmptyCache);
            assert_eq!(empties.count(), 2 * calls + 1, "{name}");
        }
    }
}

#[test]
fn a_limit_that_is_set_later_holds_from_there() {
    // 60 MiB fit below 100 MiB, 100 MiB more only below 200 MiB.
    let run = |change: &str, args: &[&str]| {
        let text =
            format!("capacity 1GiB\nlimit 100MiB\nalloc a 60MiB\n{change}\nalloc b 100MiB\n");
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("job.txt");
        fs::write(&path, text).unwrap();
        let args = [&["run", "--trace", path.to_str().unwrap(), "--json", "-"], args].concat();
        let result: Value = serde_json::from_str(&stdout(&fraglab(&args))).expect("JSON");
        result["outcome"]["status"].as_str().unwrap().to_owned()
    };
    assert_eq!(run("", &[]), "oom");
    assert_eq!(run("settings limit:209715200", &[]), "ok");
    assert_eq!(run("settings limit:none", &[]), "ok");
    assert_eq!(run("settings limit:125829120", &[]), "oom");
    // A limit that is asked for holds all along.
    assert_eq!(run("settings limit:209715200", &["--limit", "100MiB"]), "oom");
}

/// The same history without notes, as it was recorded: nothing but notes is added.
#[test]
fn notes_change_no_request() {
    for name in ["tiny", "graph-train", "opt-1-3b-act-offload.cap14"] {
        let Some(recorded) = record(name, &["marks", "caches"]) else { return };
        let path = shared_dir().unwrap().join(format!("{name}.pickle.gz"));
        let original = read_trace(&path, &ReadOptions::default()).unwrap().trace;
        let without_marks = |trace: &Trace| {
            let ops = trace.events.iter().map(|event| event.op);
            ops.filter(|op| !matches!(op, Op::Mark(_))).collect::<Vec<_>>()
        };
        let (noted, plain) = (without_marks(&recorded.trace), without_marks(&original));
        let difference = noted.iter().zip(&plain).position(|(noted, plain)| noted != plain);
        assert_eq!((difference, noted.len()), (None, plain.len()), "{name}");
        assert_eq!(recorded.trace.header.limit_bytes, original.header.limit_bytes, "{name}");
        assert_eq!(recorded.trace.blocks, original.blocks, "{name}");
    }
}

#[test]
fn a_job_that_fails_leaves_its_recording() {
    let Some(dir) = shared_dir() else { return };
    let folder = TempDir::new().unwrap();
    let Some(mut python) = python(folder.path()) else { return };
    let path = folder.path().join("failed.pickle.gz");
    let output = python
        .arg(tests_folder().join("job.py"))
        .args([&dir.join("tiny.pickle.gz"), &path])
        .arg("fail")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("OutOfMemoryError: CUDA out of memory"),
        "{}",
        stderr(&output)
    );
    let info = stdout(&fraglab(&["info", path.to_str().unwrap()]));
    assert!(info.contains("oom"), "{info}");
    let truth = fs::read_to_string(folder.path().join("failed.truth.json")).unwrap();
    // A note that is none is told with its place, and so is one that a later recorder writes.
    for (from, to, expected) in [
        ("\"notes\": []", "\"notes\": [[\"mark\"]]", "a note: [kind, what, time_us"),
        ("\"notes_version\": 1", "\"notes_version\": 2", "notes_version is 2; expected 1"),
        ("\"memory_fraction\": 1.0", "\"memory_fraction\": 7.0", "expected a share, 0 to 1"),
    ] {
        assert!(truth.contains(from), "{truth}");
        fs::write(folder.path().join("failed.truth.json"), truth.replace(from, to)).unwrap();
        let output = fraglab(&["info", path.to_str().unwrap()]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}
