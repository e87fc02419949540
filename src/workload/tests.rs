//! What holds for every generated trace, on jobs small enough to run in a moment.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ActivationOffload, Dtype, Family, Hardware, Head, Job, Lora, LoraTarget, Optimizer,
    OptimizerOffload, Parallel, Recompute, Shape, Strategy, Train, generate,
};
use crate::trace::{HookedModule, Op, Role, Trace};

/// A Llama of two layers.
pub(super) fn small_job() -> Job {
    Job {
        name: "small".to_owned(),
        shape: Shape {
            family: Family::Llama,
            layers: 2,
            hidden: 64,
            heads: 4,
            kv_heads: 2,
            ffn: 96,
            vocabulary: 500,
            positions: 0,
            experts: 0,
            top_k: 0,
            head: Head::Lm,
            tied_head: false,
            dropout: 0.0,
        },
        train: Train {
            batch: 2,
            sequence: 32,
            steps: 2,
            dtype: Dtype::Bf16,
            autocast: None,
            optimizer: Optimizer::Adamw,
            clip: true,
            micro_batches: 1,
            seed: 1,
        },
        strategy: Strategy {
            recompute: Recompute::None,
            activation_offload: ActivationOffload::None,
            cpu_embedding: false,
            tiled_linear: false,
            optimizer_offload: OptimizerOffload::None,
            lora: None,
            zero: 0,
            zero_loads_whole: false,
        },
        parallel: Parallel { data: 1, tensor: 1, pipeline: 1, virtual_stages: 1, stage: 0 },
        lengths: None,
        expert_imbalance: 0.0,
        hardware: Hardware {
            gpu: "NVIDIA H200".to_owned(),
            gpu_bytes: 150_109_880_320,
            host_bytes: 1 << 40,
            gpus_per_host: 8,
            flops: 400e12,
            memory_bytes_per_s: 3e12,
            link_bytes_per_s: 50e9,
            peer_bytes_per_s: 300e9,
        },
        options: BTreeMap::new(),
    }
}

/// Llama's and Mixtral's jobs with every strategy of theirs that changes what runs.
fn variants() -> Vec<Job> {
    let mut jobs = Vec::new();
    for experts in [0, 4] {
        for recompute in [Recompute::None, Recompute::Every(1), Recompute::Every(2)] {
            for lora in [false, true] {
                for zero in [0, 1, 2, 3] {
                    let mut job = small_job();
                    if experts > 0 {
                        job.shape.family = Family::Moe;
                        (job.shape.experts, job.shape.top_k) = (experts, 2);
                    }
                    job.strategy.recompute = recompute;
                    let targets = vec![LoraTarget::Q, LoraTarget::O];
                    job.strategy.lora = lora.then_some(Lora { rank: 4, targets, dropout: 0.1 });
                    job.strategy.zero = zero;
                    job.parallel.data = if zero > 0 { 2 } else { 1 };
                    job.name = format!("{experts} {recompute:?} {lora} {zero}");
                    jobs.push(job);
                }
            }
        }
    }
    jobs
}

/// Enters of a module with parameters between two marks, forward and backward.
fn enters(trace: &Trace, phase: &str) -> BTreeMap<(String, bool), u64> {
    let mut counts = BTreeMap::new();
    let mut inside = false;
    for event in &trace.events {
        match event.op {
            Op::Mark(id) => inside = trace.phases[id.index()] == phase,
            Op::ModuleEnter(id) if inside => {
                let module = HookedModule::of_name(&trace.modules[id.index()]);
                let backward = module.backward.unwrap_or(false);
                *counts.entry((module.path.to_owned(), backward)).or_insert(0) += 1;
            }
            _ => {}
        }
    }
    counts
}

#[test]
fn modules_with_parameters_are_entered_once_a_pass() {
    for job in variants() {
        let trace = generate(&job).unwrap();
        let model = trace.header.model.as_ref().unwrap();
        let forward = enters(&trace, "step1.forward");
        let backward = enters(&trace, "step1.backward");
        for unit in &model.units {
            let name = format!("{}: {}", job.name, unit.module);
            let count = |counts: &BTreeMap<(String, bool), u64>, backward| {
                counts.get(&(unit.module.clone(), backward)).copied().unwrap_or(0)
            };
            assert_eq!(count(&forward, false), 1, "{name}");
            assert_eq!(count(&forward, true), 0, "{name}");
            let layer = unit.module.strip_prefix("model.layers.");
            let layer: Option<u64> = layer
                .and_then(|rest| rest.split('.').next())
                .and_then(|number| number.parse().ok());
            let again = match (job.strategy.recompute, layer) {
                (Recompute::Every(every), Some(layer)) => u64::from(layer % every == 0),
                _ => 0,
            };
            assert_eq!(count(&backward, false), again, "{name}");
            // A frozen embedding has no backward pass.
            let runs = !(job.strategy.lora.is_some() && unit.module == "model.embed_tokens");
            assert_eq!(count(&backward, true), u64::from(runs), "{name}");
        }
    }
}

#[test]
fn everything_has_a_role_and_parameters_their_names() {
    for job in variants() {
        let trace = generate(&job).unwrap();
        let model = trace.header.model.as_ref().unwrap();
        let known: BTreeSet<&str> =
            model.units.iter().flat_map(|unit| &unit.parameters).map(|p| p.name.as_str()).collect();
        let mut named = BTreeSet::new();
        let mut roles = BTreeSet::new();
        for block in &trace.blocks {
            assert_ne!(block.role, Role::Unknown, "{}", job.name);
            roles.insert(format!("{:?}", block.role));
            if block.role == Role::Parameter {
                let name = trace.names[block.name.index()].as_str();
                assert!(known.contains(name), "{}: {name}", job.name);
                assert!(named.insert(name), "{}: {name} twice", job.name);
            }
        }
        assert_eq!(named, known, "{}", job.name);
        for role in ["Gradient", "Optimizer", "Activation", "Temporary"] {
            assert!(roles.contains(role), "{}: no {role}", job.name);
        }
    }
}

/// What is live when a step begins is what was live when the step before began.
#[test]
fn steps_leave_nothing_behind() {
    for mut job in variants() {
        job.train.steps = 4;
        let trace = generate(&job).unwrap();
        let mut live = 0i128;
        let mut at_start = Vec::new();
        for event in &trace.events {
            match event.op {
                Op::Mark(id) if trace.phases[id.index()].ends_with(".data") => at_start.push(live),
                Op::Alloc(block) => live += i128::from(trace.blocks[block.index()].size_bytes),
                Op::Free(block) | Op::Done(block) => {
                    live -= i128::from(trace.blocks[block.index()].size_bytes);
                }
                _ => {}
            }
        }
        assert_eq!(at_start.len(), 4, "{}", job.name);
        assert_eq!(at_start[2], at_start[3], "{}", job.name);
    }
}

#[test]
fn a_job_is_the_same_trace_every_time() {
    for job in variants() {
        assert_eq!(generate(&job).unwrap(), generate(&job).unwrap(), "{}", job.name);
    }
}
