//! How fast problems are packed, and how well.
//!
//! `cargo bench --bench plan` measures with criterion what it takes to reach a height: training
//! runs of 10^4 and 10^5 buffers to within 1.0005 of the bound, minimalloc's A to K (where they
//! lie beside the repository) to within 1.2, everything from the problem to the offsets.
//!
//! `cargo bench --bench plan -- --once SECONDS PROBLEM...` packs each problem once and prints
//! buffers, bound, ratios, CPU seconds, the peak of resident memory and what found the packing. A
//! problem is a shape (`moe:1e6,seed=3`) or one of A to K. The floor-adjusted ratio leaves out
//! what is live throughout, which flatters the other. The peak is that of the whole run so far:
//! give one problem at a time where it matters.

use std::path::Path;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use fraglab::plan::synthetic::{self, Shape};
use fraglab::plan::{Buffer, Problem, SolveOptions, solve};

const SHAPES: [&str; 5] = ["dense:1e4", "moe:1e4", "dense:1e5", "moe:1e5", "thin:1e5"];

/// Units of work that are enough for the heights promised above, with a margin.
const SHAPE_UNITS_PER_BUFFER: u64 = 150;
const CHALLENGE_UNITS: u64 = 4_000_000;

/// One of minimalloc's challenging files by its letter, if it is there.
fn challenge(letter: &str) -> Option<Problem> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/minimalloc/challenging");
    let text = std::fs::read_to_string(dir.join(format!("{letter}.1048576.csv"))).ok()?;
    let buffers = text.lines().skip(1).filter_map(|line| {
        let mut fields = line.split(',').skip(1).map_while(|field| field.trim().parse().ok());
        Some(Buffer::new(fields.next()?, fields.next()?, fields.next()?))
    });
    Some(Problem { buffers: buffers.collect(), ..Problem::default() })
}

fn shape(text: &str) -> Problem {
    synthetic::problem(&text.parse::<Shape>().expect("a shape"))
}

fn measure(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    let shapes = SHAPES.iter().map(|&name| (name.to_owned(), shape(name)));
    let letters = ('A'..='K').map(String::from);
    let challenges = letters.filter_map(|letter| challenge(&letter).map(|it| (letter, it)));
    for (name, problem) in shapes.chain(challenges) {
        let buffers = problem.buffers.len() as u64;
        let units =
            if name.len() == 1 { CHALLENGE_UNITS } else { buffers * SHAPE_UNITS_PER_BUFFER };
        let options =
            SolveOptions { time: None, work_units: Some(units), ..SolveOptions::default() };
        let packing = solve(&problem, &options).expect("not contradictory").packing;
        let ratio = packing.height_bytes() as f64 / packing.lower_bound_bytes() as f64;
        group.throughput(Throughput::Elements(buffers));
        group.bench_function(format!("{name}/{ratio:.5}"), |bencher| {
            bencher.iter(|| solve(&problem, &options).map(|solved| solved.work_units));
        });
    }
    group.finish();
}

/// CPU seconds of this process so far, where the system tells: ticks of a hundredth.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // User and system time are the 14th and 15th field; the name was the second.
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Peak of resident memory in MiB, where the system tells.
fn peak_rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 10
}

/// Bytes of buffers that live throughout.
fn floor_bytes(problem: &Problem) -> u64 {
    let start = problem.buffers.iter().map(|buffer| buffer.start).min().unwrap_or(0);
    let end = problem.buffers.iter().map(|buffer| buffer.end).max().unwrap_or(0);
    let throughout = |buffer: &&Buffer| (buffer.start, buffer.end) == (start, end);
    problem.buffers.iter().filter(throughout).map(|buffer| buffer.size_bytes).sum()
}

fn once(seconds: &str, names: &[String]) {
    let seconds: f64 = seconds.parse().expect("seconds before the problems");
    println!("problem buffers bound_bytes ratio floor_adjusted proven cpu_s peak_mib found_by");
    for name in names {
        let problem = challenge(name).unwrap_or_else(|| shape(name));
        let time = Some(Duration::from_secs_f64(seconds));
        let before = cpu_seconds();
        let solved = solve(&problem, &SolveOptions { time, ..SolveOptions::default() });
        let cpu = cpu_seconds() - before;
        let packing = solved.expect("not contradictory").packing;
        let (height, bound) = (packing.height_bytes(), packing.lower_bound_bytes());
        let floor = floor_bytes(&problem);
        println!(
            "{name} {} {bound} {:.6} {:.6} {} {cpu:.2} {} {}",
            problem.buffers.len(),
            height as f64 / bound as f64,
            (height - floor) as f64 / (bound - floor).max(1) as f64,
            packing.proven(),
            peak_rss_mib(),
            packing.pools.first().map_or("", |pool| &pool.found_by),
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--once") {
        let names: Vec<String> =
            arguments[at + 2..].iter().filter(|name| *name != "--bench").cloned().collect();
        return once(&arguments[at + 1], &names);
    }
    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion);
    criterion.final_summary();
}
