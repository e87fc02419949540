//! `chunk` through the engine and the command line: a live allocator, then the replay of what it was
//! asked for.

use fraglab::device::CostProfile;
use fraglab::engine::{
    CapacitySearch, Observe, Prepared, RunError, RunOptions, RunResult, Status, run,
    smallest_capacity,
};
use fraglab::trace::{Op, Trace};
use fraglab::units::{GIB, MIB};
use fraglab::workload::{generate, read_job};

use crate::common::program::{code, fraglab, stderr};

/// A small BERT with recomputation, its checkpoints on the host.
const SMALL: &str = r#"
name = "small"
[model]
type = "bert"
layers = 4
hidden = 512
heads = 8
vocabulary = 4000
head = "classifier"
[train]
batch = 4
sequence = 128
steps = 3
dtype = "fp16"
[hardware]
gpu = "a100-40g"
[options]
use_ckp = true
with_activation_offload = true
"#;

fn small(sets: &[(&str, &str)]) -> Trace {
    let sets: Vec<_> = sets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    generate(&read_job(SMALL, &sets).expect("a job")).expect("a trace")
}

fn options() -> RunOptions {
    RunOptions::new(CostProfile::shipped("h200").expect("ships"))
}

fn run_spec(trace: &Trace, spec: &str, options: &RunOptions) -> RunResult {
    let spec = spec.parse().expect("a specification");
    run(trace, &spec, options, Observe::default()).expect("runs").result
}

/// The second pass sees what the manager saw: the same allocator, asked for the same, holds the
/// same at its peak. And no allocator under the manager breaks the contract.
#[test]
fn the_replay_holds_what_the_manager_measured() {
    let trace = small(&[]);
    let options = RunOptions { paranoid: true, ..options() };
    for inner in ["caching", "expandable", "best-fit", "bfc", "native", "[stitch+policy=best]"] {
        let spec = format!("chunk+chunk_size=4Mi+inner={inner}");
        let result = run_spec(&trace, &spec, &options);
        let chunk = result.chunk.as_ref().expect("a summary");
        assert_eq!(result.outcome.status, Status::Ok, "{inner}");
        assert_eq!(result.peaks.allocated_bytes_peak, chunk.gpu_bytes_peak, "{inner}");
        assert_eq!(result.trace.events, trace.events.len() as u64);
        assert_eq!(result.allocator.params["inner"], inner);
    }
}

/// Bytes each way are those of chunks, of ADAM and of the program, whose offloaded checkpoints the
/// trace shows.
#[test]
fn transfers_are_the_sum_of_all_moves() {
    let trace = small(&[]);
    let of_trace = |direction| -> u64 {
        let transfer = |op| match op {
            Op::Transfer(id) => Some(&trace.transfers[id.index()]),
            _ => None,
        };
        let all = trace.events.iter().filter_map(|event| transfer(event.op));
        all.filter(|transfer| transfer.direction == direction).map(|t| t.size_bytes).sum()
    };
    let up = of_trace(fraglab::trace::Direction::HostToDevice);
    let down = of_trace(fraglab::trace::Direction::DeviceToHost);
    // Four layers, three steps, a checkpoint of 4 x 128 x 512 halves each.
    assert!(down >= 4 * 3 * 4 * 128 * 512 * 2, "{down}");
    let plain = run_spec(&trace, "caching", &options()).transfers.expect("the program's own");
    assert_eq!((plain.h2d_bytes, plain.d2h_bytes), (up, down));
    let result = run_spec(&trace, "chunk+chunk_size=4Mi+gpu=100MiB", &options());
    let chunk = result.chunk.expect("a summary");
    let all = result.transfers.expect("moves");
    assert_eq!(
        all.h2d_bytes,
        chunk.moves.h2d_bytes + chunk.adam_copies.h2d_bytes + chunk.transfers.h2d_bytes
    );
    assert_eq!((chunk.transfers.h2d_bytes, chunk.transfers.d2h_bytes), (up, down));
    assert!(chunk.moves.h2d_bytes > 0 && chunk.adam_copies.d2h_bytes > 0);
}

/// The device of the run is the GPU of the budgets, unless the specification names another.
#[test]
fn the_capacity_is_the_gpu_of_the_budgets() {
    let trace = small(&[]);
    let quota = |options: &RunOptions, spec: &str| {
        run_spec(&trace, spec, options).chunk.expect("a summary").gpu_quota_bytes
    };
    let small_device = RunOptions { capacity_bytes: Some(10 * GIB), ..options() };
    assert_eq!(quota(&small_device, "chunk+overall_gpu_mem_ratio=0.5"), 5 * GIB);
    assert_eq!(quota(&small_device, "chunk+overall_gpu_mem_ratio=0.5+gpu=4GiB"), 2 * GIB);
    let total = trace.header.device.total_bytes.expect("of the description");
    assert_eq!(quota(&options(), "chunk+overall_gpu_mem_ratio=1"), total);
}

/// Chunks leave room for each other, so a device may be smaller than all model data together.
#[test]
fn the_smallest_capacity_lies_below_the_model_data() {
    let trace = small(&[]);
    let options = options();
    let prepared = Prepared::new(&trace, &options);
    let spec = "chunk+chunk_size=4Mi".parse().expect("a specification");
    let search = CapacitySearch { check_points: 2 };
    let found = smallest_capacity(&prepared, &spec, search).expect("searched");
    let capacity = found.capacity_bytes.expect("some capacity is enough");
    let model = trace.header.model.as_ref().expect("a model").elements();
    assert!(capacity < 14 * model, "{capacity} {model}");
    let there = RunOptions { capacity_bytes: Some(capacity), ..options.clone() };
    assert_eq!(run_spec(&trace, "chunk+chunk_size=4Mi", &there).outcome.status, Status::Ok);
    let below = RunOptions { capacity_bytes: Some(capacity - 2 * MIB), ..options.clone() };
    assert_eq!(run_spec(&trace, "chunk+chunk_size=4Mi", &below).outcome.status, Status::Oom);
}

#[test]
fn a_host_without_room_for_the_model_is_an_error_that_names_both_quotas() {
    let trace = small(&[]);
    let spec = "chunk+chunk_size=4Mi+host=64MiB+gpu=64MiB".parse().expect("a specification");
    match run(&trace, &spec, &options(), Observe::default()) {
        Err(RunError::Chunk(error)) => {
            let said = error.to_string();
            // Eight tenths of both.
            assert!(said.contains("host's quota of 51.20 MiB"), "{said}");
        }
        other => panic!("{:?}", other.map(|observed| observed.result.outcome)),
    }
}

#[test]
fn what_chunk_cannot_run_is_said_in_one_line() {
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/traces/llama-3b-recompute.json.zst");
    for (spec, said) in [
        ("chunk", "module hooks of `fraglab python`"),
        ("chunk+inner=x", "no allocator \"x\""),
        ("chunk+chunk_sise=1", "no parameter \"chunk_sise\""),
        ("chunk+inner=chunk", "inner=chunk"),
        ("chunk+inner=planned", "inner=planned"),
    ] {
        let output = fraglab(&["run", "--trace", recorded, "--alloc", spec]);
        let said_of_it = stderr(&output);
        assert_eq!(code(&output), 2, "{said_of_it}");
        assert!(said_of_it.contains(said), "{said_of_it}");
        assert_eq!(said_of_it.lines().count(), 1, "{said_of_it}");
        assert!(output.stdout.is_empty());
    }
}

/// The case of PatrickStar's trace A, with these header lines in front.
fn trace_a(header: &str) -> Trace {
    let case = include_str!("../traces/cases/patrickstar-8-4-a.txt");
    let (before, after) = case.split_once("capacity 80GiB\n").expect("a capacity");
    fraglab::trace::read_text(&format!("{before}{header}\n{after}")).expect("a trace")
}

/// The device of the replay fails as the one that the manager saw.
#[test]
fn injected_failures_hold_in_both_passes() {
    for fault in ["fail malloc all", "fail malloc 1"] {
        let trace = trace_a(&format!("capacity 80GiB\n{fault}"));
        let result = run_spec(&trace, "chunk+inner=native", &options());
        let chunk = result.chunk.expect("a summary");
        assert_eq!(result.peaks.allocated_bytes_peak, chunk.gpu_bytes_peak, "{fault}");
        let refused = chunk.refusals > 0;
        assert_eq!(result.outcome.status == Status::Oom, refused, "{fault}");
    }
    let trace = trace_a("capacity 80GiB\nfail malloc all");
    assert_eq!(run_spec(&trace, "chunk", &options()).outcome.status, Status::Oom);
}

/// A payload that is refused at first and granted once chunks have left is no end of the job.
#[test]
fn room_that_the_manager_makes_is_no_refusal() {
    let trace = trace_a("capacity 29MiB");
    let spec = "chunk+inner=native+quirks=false+gpu=100MiB+with_mem_cache=true";
    let result = run_spec(&trace, spec, &options());
    assert!(result.counters["ooms"] > 0, "the device is too small for all chunks");
    assert_eq!(result.chunk.expect("a summary").refusals, 0);
    assert_eq!(result.outcome.status, Status::Ok);
}
