//! The page about a real card: what `experiments/gpu/results.py` and `report.py` make of archives
//! whose figures are written by hand here.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// Runs a program that must succeed.
fn run(program: &str, args: &[&str]) {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Whether the scripts can run here; on CI they must.
fn can_run() -> bool {
    let there = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let both = there("python3") && there("tar");
    assert!(both || std::env::var("CI").as_deref() != Ok("true"), "python3 or tar is missing");
    if !both {
        eprintln!("skipped: python3 or tar is missing");
    }
    both
}

/// A replay of `job` on a card: what the simulator said, what a clock said, blocks that were wrong.
fn replay(allocator: &str, simulated_ns: u64, measured_ns: u64, mismatches: u64) -> Value {
    json!({
        "trace": {"name": "job"},
        "allocator": {"name": allocator},
        "device": {"name": "Card", "driver": "1.2", "profile": "p"},
        "outcome": {"status": "ok"},
        "peaks": {"reserved_bytes_peak": 3 * GIB},
        "calls": {"malloc": 5, "free": 2},
        "hardware": {
            "memory": {
                "at_reserved_peak": {"reserved_bytes": 3 * GIB, "used_bytes": 3 * GIB + 4096},
            },
            "touch": {"blocks": 1000, "bytes": 1_u64 << 40, "mismatches": mismatches},
            "simulated": {
                "reserved_bytes_peak": if allocator == "stitch" { 2 * GIB } else { 3 * GIB },
                "allocator_device_ns": simulated_ns,
            },
        },
        "wall": {"allocator_device_ns_measured": measured_ns},
    })
}

/// A training run with this loss, three gibibytes reserved, and steps of these seconds.
fn training(allocator: &str, loss: &str, reserved: u64) -> Value {
    json!({
        "job": "llama-1b-varlen-recompute", "allocator": allocator, "seed": 1, "gpu": "Card",
        "driver": "1.2", "torch": "2.11.0", "date": "2026-12-01", "parameters": 7, "status": "ok",
        "recorded": false, "losses": [loss], "weights": 5, "utilization": 0.5,
        "step_seconds": [9.0, 1.0, 1.0, 0.25], "step_seconds_median": 0.25, "steps_timed": 1,
        "held": {"allocated_bytes_peak": 2 * GIB, "reserved_bytes_peak": reserved},
        "device_used_bytes": 5 * GIB, "statistics": {},
    })
}

/// Packs files as a stage's archive.
fn archive(results: &Path, scratch: &Path, stage: &str, files: &[(&str, String)]) {
    let folder = scratch.join(stage);
    fs::create_dir_all(&folder).unwrap();
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
    let file = results.join(format!("{stage}.tar.gz"));
    run("tar", &["-czf", file.to_str().unwrap(), "-C", scratch.to_str().unwrap(), stage]);
}

#[test]
fn page_tells_what_was_wrong() {
    if !can_run() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let (results, reports) = (scratch.path().join("results"), scratch.path().join("reports"));
    fs::create_dir_all(&results).unwrap();
    fs::create_dir_all(&reports).unwrap();
    // caching: 120 ms in the mean of 110 and 130 for 100 simulated; stitch: 140 for 100.
    let cells = |caching, stitch| {
        json!([
            replay("caching", 100_000_000, caching, 0),
            replay("stitch", 100_000_000, stitch, 3)
        ])
        .to_string()
    };
    archive(
        &results,
        scratch.path(),
        "replay",
        &[
            ("touch-job.json", cells(1, 1)),
            ("timing-1-job.json", cells(110_000_000, 140_000_000)),
            ("timing-2-job.json", cells(130_000_000, 140_000_000)),
            ("parts.csv", "touch-job,0,3\nsanitizer,99,7\n".to_owned()),
            ("sanitizer.log", "first\n/tmp/a/kit/fraglab: 2 errors\n".to_owned()),
        ],
    );
    let predicted =
        json!({"allocator": {"name": "stitch"}, "peaks": {"reserved_bytes_peak": 2 * GIB}});
    archive(
        &results,
        scratch.path(),
        "train",
        &[
            ("train-default.json", training("default", "0x1p0", 4 * GIB).to_string()),
            ("train-plugin-stitch.json", training("plugin:stitch", "0x1p1", 3 * GIB).to_string()),
            ("predict.json", json!([predicted]).to_string()),
        ],
    );

    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments/gpu");
    let script = |name: &str| scripts.join(name).to_str().unwrap().to_owned();
    let (results, to) = (results.to_str().unwrap(), reports.to_str().unwrap());
    run("python3", &["-B", &script("results.py"), results, to]);
    run("python3", &["-B", &script("report.py"), to]);
    let page = fs::read_to_string(reports.join("gpu.md")).unwrap();
    for line in [
        "| `job` | 1,000 (1.00) | **3 wrong** |",
        "2,000 blocks, 2.0 TiB, 3 mismatches.",
        "| `job`, `stitch` | 2.000 | 3.000 | +50.00 % |",
        "| `job` | 1.20 | **1.40** |",
        "1 of 2 pairs are within 25 %.",
        "| `job`, `stitch` | 100.0 | 140.0 | 1.40 | 0.0 % | 7 |",
        "| `default` | yes | 2.00 | 4.00 | – | – | 50.0 % | 250 | 11.00 |",
        "| `plugin:stitch` | within 1e+00 | 2.00 | 3.00 | 2.00 | +50.00 % | 50.0 % | 250 | 11.00 |",
        "| `replay` | no | fraglab: 2 errors |",
        "| `replay sanitizer` | 99 | fraglab: 2 errors |",
    ] {
        assert!(page.contains(line), "no line {line} in\n{page}");
    }
    let rows = fs::read_to_string(reports.join("gpu_replays.csv")).unwrap();
    assert!(rows.contains(",2,120000000,0.16666666666666666,1.2\n"), "{rows}");
}

/// The page that ships is the one of the CSV files that ship.
#[test]
fn page_is_that_of_its_files() {
    if !can_run() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    for name in ["gpu_replays.csv", "gpu_training.csv", "gpu_checks.csv"] {
        fs::copy(root.join("reports").join(name), scratch.path().join(name)).unwrap();
    }
    let script = root.join("experiments/gpu/report.py");
    run("python3", &["-B", script.to_str().unwrap(), scratch.path().to_str().unwrap()]);
    let made = fs::read_to_string(scratch.path().join("gpu.md")).unwrap();
    assert!(made == fs::read_to_string(root.join("reports/gpu.md")).unwrap(), "reports/gpu.md");
}
