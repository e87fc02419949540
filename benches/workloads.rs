//! Small fixed pieces of work, for what compares programs: instructions that they take, seconds,
//! memory.
//!
//! ```text
//!   workloads                      their names, one a line
//!   workloads NAME                 does one of them once, for callgrind (experiments/callgrind.sh)
//!   workloads --time RUNS NAME     does it RUNS times and prints, separated by tabs: the least
//!                                  seconds, the median, its units (events, buffers) and its bytes
//! ```
//!
//! The one design decision: what is counted stands alone in [`measured`], which is never inlined, so
//! that a tool can count from its beginning to its end and leaves out how the input came to be.

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fraglab::device::CostProfile;
use fraglab::engine::{Prepared, RunOptions, brief};
use fraglab::import::{ReadOptions, import_snapshot, read_trace};
use fraglab::plan::{SolveOptions, solve, synthetic};
use fraglab::trace::{Trace, read_native, write_native};

/// Short ones, since a tool that counts is fifty times slower.
const TRACES: [&str; 2] = ["llama-3b-recompute", "opt-1-3b-act-offload"];
const ALLOCATORS: [&str; 5] = ["caching", "expandable", "best-fit", "stitch", "planned"];
/// A snapshot as PyTorch writes it, among the tests' files.
const SNAPSHOT: &str = "tests/import/protocol4.pickle";
/// How often the snapshot is read: it is small.
const SNAPSHOT_READS: usize = 200;
const PROBLEM: &str = "moe:1e4,seed=1";
const PLAN_UNITS: u64 = 1_000_000;

fn names() -> Vec<String> {
    let replays = TRACES.iter().flat_map(|trace| {
        // A plan for the second takes a minute under a tool that counts.
        let allocators =
            ALLOCATORS.iter().filter(move |&&it| it != "planned" || *trace == TRACES[0]);
        allocators.map(move |allocator| format!("replay/{trace}/{allocator}"))
    });
    let reads = TRACES.iter().map(|trace| format!("native/{trace}"));
    replays.chain(reads).chain(["snapshot".to_owned(), "plan".to_owned()]).collect()
}

/// What a workload worked on.
#[derive(Clone, Copy, Debug)]
struct Amount {
    /// Events, or buffers of a plan.
    units: u64,
    /// Bytes read; 0 where nothing is.
    bytes: u64,
}

/// The work that counts, and nothing else.
#[inline(never)]
fn measured<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

/// Does the work `runs` times; gives the seconds of each, the least first.
fn repeated<R>(runs: usize, mut work: impl FnMut() -> R) -> Vec<f64> {
    let mut seconds: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            measured(&mut work);
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

fn path_of(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn trace_of(name: &str) -> Result<Trace, Box<dyn Error>> {
    let path = path_of(&format!("traces/{name}.json.zst"));
    Ok(read_trace(&path, &ReadOptions::default())?.trace)
}

fn run(name: &str, runs: usize) -> Result<(Amount, Vec<f64>), Box<dyn Error>> {
    match name.split('/').collect::<Vec<_>>()[..] {
        ["replay", trace, allocator] => replay(&trace_of(trace)?, allocator, runs),
        ["native", trace] => {
            let trace = trace_of(trace)?;
            let mut text = Vec::new();
            write_native(&trace, &mut text)?;
            let amount = Amount { units: trace.events.len() as u64, bytes: text.len() as u64 };
            Ok((amount, repeated(runs, || read_native(text.as_slice()).is_ok())))
        }
        ["snapshot"] => {
            let pickle = std::fs::read(path_of(SNAPSHOT))?;
            let options = ReadOptions::default();
            let read = || import_snapshot(Path::new("-"), pickle.as_slice(), &options);
            let events = read()?.trace.events.len();
            let amount = Amount {
                units: (SNAPSHOT_READS * events) as u64,
                bytes: (SNAPSHOT_READS * pickle.len()) as u64,
            };
            let work = || (0..SNAPSHOT_READS).filter(|_| read().is_ok()).count();
            Ok((amount, repeated(runs, work)))
        }
        ["plan"] => {
            let problem = synthetic::problem(&PROBLEM.parse()?);
            let work_units = Some(PLAN_UNITS);
            let options = SolveOptions { time: None, work_units, ..SolveOptions::default() };
            let amount = Amount { units: problem.buffers.len() as u64, bytes: 0 };
            Ok((amount, repeated(runs, || solve(&problem, &options).is_ok())))
        }
        _ => Err(format!("no workload {name}; there are: {}", names().join(", ")).into()),
    }
}

/// One pass through the allocator, built anew each time; what hangs on the trace alone is there.
fn replay(
    trace: &Trace,
    allocator: &str,
    runs: usize,
) -> Result<(Amount, Vec<f64>), Box<dyn Error>> {
    let options = RunOptions::new(CostProfile::shipped("h200")?);
    let prepared = Prepared::new(trace, &options);
    let spec = allocator.parse()?;
    brief(&prepared, &spec, None)?;
    let amount = Amount { units: trace.events.len() as u64, bytes: 0 };
    Ok((amount, repeated(runs, || brief(&prepared, &spec, None).is_ok())))
}

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds `--bench`.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => names().iter().for_each(|name| println!("{name}")),
        ["--time", runs, name] => {
            let (amount, seconds) = run(name, runs.parse::<usize>()?.max(1))?;
            let (least, median) = (seconds[0], seconds[seconds.len() / 2]);
            println!("{least:.9}\t{median:.9}\t{}\t{}", amount.units, amount.bytes);
        }
        [name] => run(name, 1).map(|_| ())?,
        _ => return Err("expected nothing, NAME, or --time RUNS NAME".into()),
    }
    Ok(())
}
