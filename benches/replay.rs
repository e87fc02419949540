//! Events a second of the replay loop, per allocator and trace that ships.
//!
//! `cargo bench --bench replay`. Only the loop is timed (`wall.seconds` of the results): no
//! reading, no report.

use std::path::{Path, PathBuf};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, RunResult, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::Trace;

const TRACES: [&str; 4] =
    ["llama-1b-varlen", "llama-7b-lora-recompute", "mixtral-moe", "llama-3b-recompute"];
const ALLOCATORS: [&str; 7] = [
    "caching",
    "best-fit",
    "stitch",
    "stitch+policy=shipped",
    "stitch+policy=best",
    "planned",
    "native",
];

fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("traces/{name}.json.zst"))
}

fn replay(trace: &Trace, spec: &AllocSpec, options: &RunOptions) -> RunResult {
    run(trace, spec, options, Observe::default()).expect("the trace runs").result
}

fn bench(criterion: &mut Criterion) {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    for name in TRACES {
        let imported = read_trace(&path_of(name), &ReadOptions::default());
        let trace = imported.expect("a trace that ships").trace;
        let mut group = criterion.benchmark_group(format!("replay/{name}"));
        for allocator in ALLOCATORS {
            let spec: AllocSpec = allocator.parse().expect("a name");
            let wall = replay(&trace, &spec, &options).wall;
            let events = (wall.events_per_second * wall.seconds).round() as u64;
            group.throughput(Throughput::Elements(events));
            group.bench_function(allocator, |bencher| {
                bencher.iter_custom(|iterations| {
                    let seconds =
                        (0..iterations).map(|_| replay(&trace, &spec, &options).wall.seconds);
                    Duration::from_secs_f64(seconds.sum())
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(4));
    targets = bench
}
criterion_main!(benches);
