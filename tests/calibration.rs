//! Generated traces of Llama and Mixtral against recorded ones: what is asked for in which order,
//! what is live, what PyTorch's allocator holds.

use std::path::Path;

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::{Op, Trace};
use fraglab::workload::{generate, read_job};

use crate::common::shared_dir;

/// Jobs whose recordings have the same name (traces/models).
const JOBS: [&str; 6] = [
    "llama-1b-plain",
    "llama-3b-recompute",
    "llama-7b-lora",
    "llama-7b-lora-recompute",
    "llama-1b-zero3.rank0",
    "mixtral-moe",
];

fn generated(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("traces/models/{name}.toml"));
    let text = std::fs::read_to_string(path).expect("the job is there");
    generate(&read_job(&text, &[]).expect("a job")).expect("a trace")
}

fn recorded(dir: &Path, name: &str) -> Trace {
    let path = dir.join(format!("{name}.pickle.gz"));
    read_trace(&path, &ReadOptions::default()).expect("can be read").trace
}

fn reserved_peak(trace: &Trace) -> u64 {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec: AllocSpec = "caching".parse().expect("a name");
    let observed = run(trace, &spec, &options, Observe::default()).expect("runs");
    observed.result.peaks.reserved_bytes_peak
}

/// How far a figure is from another, as a share of that.
fn error(found: u64, expected: u64) -> f64 {
    found.abs_diff(expected) as f64 / expected as f64
}

/// A phase of a step.
struct Phase {
    name: String,
    /// Most bytes that were live in it.
    live_peak_bytes: u64,
    /// Sizes of its blocks in order, and which block was freed: the k-th of the trace.
    allocs: Vec<u64>,
    frees: Vec<u32>,
}

/// What was asked for and freed, by phases. What comes after the last step is the program's end,
/// which is not generated.
fn phases(trace: &Trace) -> Vec<Phase> {
    let phase = |name: &str, live| Phase {
        name: name.to_owned(),
        live_peak_bytes: live,
        allocs: Vec::new(),
        frees: Vec::new(),
    };
    let mut phases = vec![phase("load", 0)];
    let mut live = 0u64;
    for event in &trace.events {
        let last = phases.last_mut().expect("one at least");
        match event.op {
            Op::Mark(id) => match trace.phases[id.index()].as_str() {
                "end" => break,
                name if name == last.name => {}
                name => phases.push(phase(name, live)),
            },
            Op::Alloc(block) => {
                let bytes = trace.blocks[block.index()].size_bytes;
                live += bytes;
                last.live_peak_bytes = last.live_peak_bytes.max(live);
                last.allocs.push(bytes);
            }
            Op::Free(block) => {
                live -= trace.blocks[block.index()].size_bytes;
                last.frees.push(block.0);
            }
            _ => {}
        }
    }
    phases
}

#[test]
fn generated_jobs_need_what_the_recorded_ones_needed() {
    let Some(dir) = shared_dir() else { return };
    for name in JOBS {
        let (trace, recording) = (generated(name), recorded(&dir, name));
        let (found, expected) = (trace.requested_bytes_peak(), recording.requested_bytes_peak());
        assert!(error(found, expected) < 0.002, "{name}: {found} live, {expected} recorded");
        let (found, expected) = (reserved_peak(&trace), reserved_peak(&recording));
        assert!(error(found, expected) < 0.01, "{name}: {found} reserved, {expected} recorded");
        let (found, expected) = (phases(&trace), phases(&recording));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.name, expected.name, "{name}");
            let phase = format!("{name} {}", found.name);
            let error = error(found.live_peak_bytes, expected.live_peak_bytes);
            assert!(error < 0.002, "{phase}: {error}");
        }
    }
}

/// Every block that PyTorch asked for, in its order, of its size, and freed in its turn. How many
/// tokens an expert got is not known, so that Mixtral's sizes are left out.
#[test]
fn generated_jobs_ask_for_and_free_what_the_recorded_ones_did() {
    let Some(dir) = shared_dir() else { return };
    for name in JOBS {
        let (found, expected) = (phases(&generated(name)), phases(&recorded(&dir, name)));
        for (found, expected) in found.iter().zip(&expected) {
            let phase = format!("{name} {}", found.name);
            assert_eq!(found.allocs.len(), expected.allocs.len(), "{phase}");
            if name != "mixtral-moe" {
                let mut pairs = found.allocs.iter().zip(&expected.allocs);
                assert_eq!(pairs.position(|(a, b)| a != b), None, "{phase}");
            }
            assert_eq!(found.frees.len(), expected.frees.len(), "{phase}");
            // FSDP's last buffer goes just before the logits, not just after them.
            let moved = found.frees.iter().zip(&expected.frees).filter(|(a, b)| a != b).count();
            assert!(moved <= 2, "{phase}: {moved} frees in another order");
        }
    }
}
