//! GMLake's strategies on the recordings of the same job, `deepspeed-opt-1-3b-*`, against what was
//! published (specs/gmlake.md 6.4 and 8.3); and that the tables in `reports/` are still what the
//! program gives.

use std::path::Path;

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, RunResult, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::Trace;
use fraglab::units::GIB;

use crate::common::program::{assert_code, fraglab, stdout};
use crate::common::shared_dir;

/// None, recomputation, LoRA, offload, in the order of the published table.
const STRATEGIES: [&str; 5] = ["N", "R", "LR", "RO", "LRO"];

/// Both published algorithms at the limits of spec 8.3 point 4, and our own.
const STITCHING: [&str; 10] = [
    "stitch+policy=paper+frag_limit=32MiB",
    "stitch+policy=paper+frag_limit=128MiB",
    "stitch+policy=paper+frag_limit=512MiB",
    "stitch+policy=shipped+frag_limit=32MiB",
    "stitch+policy=shipped+frag_limit=128MiB",
    "stitch+policy=shipped+frag_limit=512MiB",
    "stitch+policy=shipped+frag_limit=32MiB+re_alloc=true",
    "stitch+policy=shipped+frag_limit=128MiB+re_alloc=true",
    "stitch+policy=shipped+frag_limit=512MiB+re_alloc=true",
    "stitch+policy=best",
];

fn replay(trace: &Trace, allocator: &str) -> RunResult {
    let spec = allocator.parse().expect("an allocator");
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    run(trace, &spec, &options, Observe::default()).expect("runs").result
}

/// The job with each strategy, in the order of [`STRATEGIES`].
fn strategies() -> Option<Vec<(&'static str, Trace)>> {
    let dir = shared_dir()?;
    let read = |strategy: &'static str| {
        let path = dir.join(format!("deepspeed-opt-1-3b-{strategy}.rank0.pickle.gz"));
        (strategy, read_trace(&path, &ReadOptions::default()).expect("a snapshot").trace)
    };
    Some(STRATEGIES.map(read).into())
}

/// Spec 8.3 point 3: over all published charts PyTorch's active utilization is 0.53 to 0.97 and
/// GMLake's 0.78 to 1. Stitching never holds more than PyTorch's allocator on any of them.
#[test]
fn utilization_lies_in_the_published_bands() {
    let Some(strategies) = strategies() else { return };
    for (strategy, trace) in &strategies {
        let caching = replay(trace, "caching");
        let utilization = caching.active_utilization;
        assert!((0.53..=0.97).contains(&utilization), "{strategy}, caching: {utilization}");
        for allocator in STITCHING {
            let result = replay(trace, allocator);
            let utilization = result.active_utilization;
            assert!((0.78..=1.0).contains(&utilization), "{strategy}, {allocator}: {utilization}");
            let peaks = (result.peaks.reserved_bytes_peak, caching.peaks.reserved_bytes_peak);
            assert!(peaks.0 <= peaks.1, "{strategy}, {allocator}: {peaks:?}");
        }
    }
}

/// Spec 8.3 point 1: what is active does not depend on the allocator; published figures agree
/// within 2 % for most rows. Rounding to 2 MiB is all that can differ, and these blocks are large.
#[test]
fn as_much_is_active_under_every_allocator() {
    let Some(strategies) = strategies() else { return };
    for (strategy, trace) in &strategies {
        let caching = replay(trace, "caching").peaks.active_bytes_peak as f64;
        for allocator in STITCHING {
            let active = replay(trace, allocator).peaks.active_bytes_peak as f64;
            let off = (active / caching - 1.0).abs();
            assert!(off < 0.02, "{strategy}, {allocator}: {off}");
        }
    }
}

/// Spec 8.3 point 2, and 6.4 for OPT-1.3B: the plain job gains least, every combination more. The
/// published combinations gain 16 to 17 GB of 58 to 64; these jobs are smaller and fragment less,
/// so that only the order and a gain of several GiB are asked for. Without the step that gets the
/// missing part only (S4, `re_alloc`), the shipped code gains nothing from LR and LRO: it has no
/// free memory to stitch a whole request from. No published figure says that; it is the gap
/// between the paper and the code that spec 8 wants seen.
#[test]
fn the_plain_job_gains_least_where_the_shortfall_is_filled() {
    let Some(strategies) = strategies() else { return };
    let saved = |allocator: &str| -> Vec<f64> {
        let peak = |trace, name| replay(trace, name).peaks.reserved_bytes_peak as f64;
        let gain = |trace| (peak(trace, "caching") - peak(trace, allocator)) / GIB as f64;
        strategies.iter().map(|(_, trace)| gain(trace)).collect()
    };
    for allocator in STITCHING {
        let saved = saved(allocator);
        if allocator.contains("policy=shipped") && !allocator.contains("re_alloc") {
            assert!(saved[2] < 0.5 && saved[4] < 0.5, "{allocator}: {saved:?}");
            continue;
        }
        assert!(saved[1..].iter().all(|&gain| gain > saved[0]), "{allocator}: {saved:?}");
        assert!(saved.iter().all(|&gain| gain > 4.0), "{allocator}: {saved:?}");
    }
}

/// Rows of a table in `reports/` about one trace, and what `fraglab compare` now gives for it.
fn kept_and_given(report: &str, trace: &str, allocators: &str) -> Option<(Vec<String>, String)> {
    let path = shared_dir()?.join(format!("{trace}.pickle.gz"));
    let report = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports").join(report);
    let kept = std::fs::read_to_string(report).expect("kept in the repository");
    let rows = kept.lines().filter(|line| line.starts_with(&format!("{trace},")));
    let rows = rows.map(str::to_owned).collect();
    let path = path.to_str().expect("UTF-8");
    let args = ["compare", "--trace", path, "--alloc", allocators];
    let output = fraglab(&[&args[..], &["--sort", "given", "--format", "csv"]].concat());
    assert_code(&output, 0);
    Some((rows, stdout(&output)))
}

/// `experiments/stitching.sh` was run with this program.
#[test]
fn the_reports_hold_what_the_program_gives() {
    let all = "native,caching,expandable,best-fit,stitch+policy=paper,stitch+policy=shipped,\
               stitch+policy=best";
    let limits = "caching,expandable,best-fit,stitch+policy=best,\
                  stitch+policy=paper+frag_limit=32MiB,\
                  stitch+policy=shipped+frag_limit=256MiB+re_alloc=true";
    for (report, trace, allocators, rows) in [
        ("stitching.csv", "opt-1-3b-act-offload", all, 7),
        ("stitching.csv", "tiny", all, 7),
        ("stitching_strategies.csv", "deepspeed-opt-1-3b-N.rank0", limits, 18),
    ] {
        let Some((kept, given)) = kept_and_given(report, trace, allocators) else { return };
        assert_eq!(kept.len(), rows, "{report}: {trace}");
        for row in given.lines().skip(1) {
            assert!(kept.iter().any(|line| line == row), "{report}: run stitching.sh; lacks {row}");
        }
    }
}

/// The table of README.md about stitching holds what `reports/stitching.csv` does.
#[test]
fn the_table_of_readme_is_that_of_the_report() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| std::fs::read_to_string(root.join(name)).expect("ships");
    let (readme, report) = (read("README.md"), read("reports/stitching.csv"));
    let mut lines = report.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let head = lines.next().expect("column names");
    let column = |name| head.iter().position(|&column| column == name).expect("a column");
    let (requested, reserved) = (column("requested_bytes_peak"), column("reserved_bytes_peak"));
    let cells: Vec<_> = lines.collect();
    let gib = |bytes: &str| format!("{:.2}", bytes.parse::<f64>().expect("bytes") / GIB as f64);
    let table = readme.lines().skip_while(|line| !line.starts_with("| reserved peak, GiB |"));
    let rows: Vec<&str> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(rows.len(), 8, "the traces that ship");
    for row in rows {
        let name = row.split('|').nth(1).expect("a name").trim();
        let of_trace: Vec<_> = cells.iter().filter(|cells| cells[0] == name).collect();
        let mut figures = vec![name.to_owned(), gib(of_trace[0][requested])];
        figures.extend(of_trace[1..].iter().map(|cells| gib(cells[reserved])));
        assert_eq!(row, format!("| {} |", figures.join(" | ")), "native is left out");
    }
}
