//! GPT-2, OPT and BERT against recordings and published counts: what is live, in which order, what
//! goes to the host, how often modules are entered.

use std::collections::BTreeMap;

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::{Direction, HookedModule, Op, Role, Trace};
use fraglab::workload::shapes::named as shape_named;
use fraglab::workload::{
    ActivationOffload, Dtype, Family, Head, Job, Lora, LoraTarget, Optimizer, OptimizerOffload,
    Recompute, Shape, generate,
};

use crate::common::jobs::job;
use crate::common::shared_dir;

const GIB: f64 = (1u64 << 30) as f64;

/// A job of the recordings: an H200, AdamW, clipping.
fn recorded(shape: &str, batch: u64, sequence: u64, steps: u64) -> Job {
    let mut job = job(shape_named(shape).expect("a shape"));
    job.train.batch = batch;
    job.train.sequence = sequence;
    job.train.steps = steps;
    job.train.clip = true;
    job.train.dtype = Dtype::Bf16;
    job.hardware.gpu = "NVIDIA H200".to_owned();
    job.hardware.gpu_bytes = 150_109_880_320;
    job
}

fn gpt2(size: &str, batch: u64, sequence: u64, steps: u64) -> Job {
    let mut job = recorded(&format!("gpt2-{size}"), batch, sequence, steps);
    job.train.dtype = Dtype::Fp32;
    job.train.autocast = Some(Dtype::Bf16);
    job
}

fn jobs() -> Vec<(&'static str, Job)> {
    let mut accumulated = gpt2("large", 4, 1024, 3);
    accumulated.train.micro_batches = 4;
    let mut saved = recorded("opt-1.3b", 8, 1024, 3);
    saved.strategy.activation_offload = ActivationOffload::Saved;
    let mut recomputed = recorded("opt-1.3b", 16, 2048, 3);
    recomputed.strategy.recompute = Recompute::Every(1);
    recomputed.strategy.optimizer_offload = OptimizerOffload::Gradients;
    recomputed.train.optimizer = Optimizer::Sgd;
    vec![
        ("gpt2-small", gpt2("small", 4, 512, 2)),
        ("gpt2-xl-plain", gpt2("xl", 8, 1024, 3)),
        ("gpt2-large-accum", accumulated),
        ("opt-1-3b-act-offload", saved),
        ("opt-1-3b-recompute-offload", recomputed),
    ]
}

fn reserved_peak(trace: &Trace) -> u64 {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec: AllocSpec = "caching".parse().expect("a name");
    let observed = run(trace, &spec, &options, Observe::default()).expect("runs");
    observed.result.peaks.reserved_bytes_peak
}

/// Sizes of the blocks of each phase in order, of 4 KiB and more: smaller ones are scratch of sorts
/// and losses. What comes after the last step is the program's end, which is not generated.
fn sizes_by_phase(trace: &Trace) -> BTreeMap<String, Vec<u64>> {
    let mut sizes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut phase = "load".to_owned();
    for event in &trace.events {
        match event.op {
            Op::Mark(id) => phase.clone_from(&trace.phases[id.index()]),
            Op::Alloc(block) => {
                let bytes = trace.blocks[block.index()].size_bytes;
                if bytes >= 4096 {
                    sizes.entry(phase.clone()).or_default().push(bytes);
                }
            }
            _ => {}
        }
    }
    sizes
}

/// Every block that PyTorch asked for, in its order and of its size.
#[test]
fn generated_jobs_ask_for_what_the_recorded_ones_asked_for() {
    let Some(dir) = shared_dir() else { return };
    for (name, job) in jobs() {
        let path = dir.join(format!("{name}.pickle.gz"));
        let recording = read_trace(&path, &ReadOptions::default()).expect("can be read").trace;
        let trace = generate(&job).expect("a trace");
        let (found, expected) = (trace.requested_bytes_peak(), recording.requested_bytes_peak());
        let error = found.abs_diff(expected) as f64 / expected as f64;
        assert!(error < 1e-4, "{name}: {found} bytes live, {expected} recorded");
        let (found, expected) = (reserved_peak(&trace), reserved_peak(&recording));
        let error = found.abs_diff(expected) as f64 / expected as f64;
        println!(
            "{name}: {:.3} GiB reserved, {:.3} recorded",
            found as f64 / GIB,
            expected as f64 / GIB
        );
        assert!(error < 0.02, "{name}: {found} bytes reserved, {expected} recorded");
        let (found, mut expected) = (sizes_by_phase(&trace), sizes_by_phase(&recording));
        expected.retain(|phase, _| phase != "end");
        let phases = |sizes: &BTreeMap<String, Vec<u64>>| sizes.keys().cloned().collect::<Vec<_>>();
        assert_eq!(phases(&found), phases(&expected), "{name}");
        for (phase, expected) in expected {
            let found = &found[&phase];
            let pairs = found.iter().zip(&expected);
            let first = pairs.clone().position(|(found, expected)| found != expected);
            assert_eq!(first, None, "{name} {phase}: {:?}", first.map(|at| pairs.clone().nth(at)));
            assert_eq!(found.len(), expected.len(), "{name} {phase}");
        }
    }
}

/// Buckets of `DistributedDataParallel` beside gradients.
#[test]
fn ranks_that_do_not_shard_hold_buckets_as_recorded() {
    let Some(dir) = shared_dir() else { return };
    let path = dir.join("gpt2-xl-ddp.rank0.pickle.gz");
    let recording = read_trace(&path, &ReadOptions::default()).expect("can be read").trace;
    let mut job = gpt2("xl", 4, 1024, 3);
    job.parallel.data = 2;
    let trace = generate(&job).expect("a trace");
    let (found, expected) = (trace.requested_bytes_peak(), recording.requested_bytes_peak());
    assert!(found.abs_diff(expected) < 1 << 20, "{found} bytes live, {expected} recorded");
    let (found, expected) = (reserved_peak(&trace), reserved_peak(&recording));
    let error = found.abs_diff(expected) as f64 / expected as f64;
    assert!(error < 0.02, "{found} bytes reserved, {expected} recorded");
    let buckets = |trace: &Trace| {
        let sizes = sizes_by_phase(trace);
        let forward = &sizes["step1.forward"];
        forward.iter().copied().take_while(|bytes| *bytes > 26_214_400).collect::<Vec<_>>()
    };
    assert_eq!(buckets(&trace), buckets(&recording));
    assert_eq!(buckets(&trace).len(), 145);
}

/// A benchmark model of PatrickStar's in fp16, as either type.
fn benchmark(family: Family, layers: u64) -> Job {
    let shape = Shape {
        family,
        layers,
        hidden: 1024,
        heads: 16,
        kv_heads: 16,
        ffn: 4096,
        vocabulary: 30_000,
        positions: 512,
        experts: 0,
        top_k: 0,
        head: Head::Classifier,
        tied_head: false,
        dropout: 0.1,
    };
    let mut job = job(shape);
    (job.train.batch, job.train.sequence, job.train.steps) = (4, 512, 1);
    job
}

/// How often modules with parameters on the device are entered, by name and pass.
fn enters(trace: &Trace) -> BTreeMap<String, u64> {
    let units = &trace.header.model.as_ref().expect("a model").units;
    let mut counts = BTreeMap::new();
    for event in &trace.events {
        let Op::ModuleEnter(id) = event.op else { continue };
        let name = &trace.modules[id.index()];
        let module = HookedModule::of_name(name);
        if units.iter().any(|unit| !unit.host && unit.module == module.path) {
            *counts.entry(name.clone()).or_insert(0) += 1;
        }
    }
    counts
}

/// Spec patrickstar 2.1: moments of an iteration, with one for ADAM.
#[test]
fn modules_are_entered_as_often_as_patrickstar_counts_moments() {
    let moments = |job: &Job| {
        let trace = generate(job).expect("a trace");
        let counts = enters(&trace);
        let recomputed = |name: &str| {
            job.strategy.recompute != Recompute::None
                && name.ends_with(" : F")
                && (name.contains(".layer.") || name.contains(".h."))
        };
        for (name, count) in &counts {
            assert_eq!(*count, if recomputed(name) { 2 } else { 1 }, "{name}");
        }
        counts.values().sum::<u64>() + 1
    };
    let layers = 3;
    for (family, plain, again, host) in [
        (Family::Bert, 16 * layers + 13, 24 * layers + 13, 6),
        (Family::Gpt, 12 * layers + 9, 18 * layers + 9, 4),
    ] {
        let mut job = benchmark(family, layers);
        assert_eq!(moments(&job), plain, "{family:?}");
        job.strategy.recompute = Recompute::Every(1);
        assert_eq!(moments(&job), again, "{family:?}");
        job.strategy.cpu_embedding = true;
        assert_eq!(moments(&job), again - host, "{family:?}");
        job.strategy.recompute = Recompute::None;
        assert_eq!(moments(&job), plain - host, "{family:?}");
    }
    let mut tiled = benchmark(Family::Bert, layers);
    tiled.strategy.tiled_linear = true;
    assert_eq!(moments(&tiled), 28 * layers + 13);
    tiled.strategy.recompute = Recompute::Every(1);
    assert_eq!(moments(&tiled), 42 * layers + 13);
}

/// Bytes of live blocks of a role when the first backward pass begins.
fn live_before_backward(trace: &Trace, role: Role) -> u64 {
    let mut live_bytes = 0;
    for event in &trace.events {
        match event.op {
            Op::Mark(phase) if trace.phases[phase.index()].ends_with(".backward") => break,
            Op::Alloc(block) if trace.blocks[block.index()].role == role => {
                live_bytes += trace.blocks[block.index()].size_bytes;
            }
            Op::Free(block) if trace.blocks[block.index()].role == role => {
                live_bytes -= trace.blocks[block.index()].size_bytes;
            }
            _ => {}
        }
    }
    live_bytes
}

/// What one layer more keeps, in bytes.
fn kept_by_a_layer(role: Role, of: impl Fn(u64) -> Job) -> u64 {
    let kept = |layers| live_before_backward(&generate(&of(layers)).expect("a trace"), role);
    kept(3) - kept(2)
}

/// Spec patrickstar 5: 34·u + 5·a·S²·B bytes, u = B·S·h, and what every count leaves out: mean and
/// deviation of each row of two norms in fp32.
#[test]
fn a_layer_of_bert_keeps_what_is_published() {
    let (samples, sequence, hidden, heads) = (4u64, 512u64, 1024u64, 16u64);
    let u = samples * sequence * hidden;
    let scores = 5 * heads * sequence * sequence * samples;
    let norms = 2 * 2 * 4 * samples * sequence;
    fn with(strategy: fn(&mut Job)) -> impl Fn(u64) -> Job {
        move |layers| {
            let mut job = benchmark(Family::Bert, layers);
            strategy(&mut job);
            job
        }
    }
    let kept = kept_by_a_layer(Role::Activation, with(|_| {}));
    assert_eq!(kept, 34 * u + scores + norms);
    // Selective: all but the scores. Queries, keys and values are kept as they were made.
    let selective = with(|job| job.strategy.recompute = Recompute::Selective);
    let kept = kept_by_a_layer(Role::Activation, &selective)
        + kept_by_a_layer(Role::Checkpoint, &selective);
    assert_eq!(kept, 34 * u + norms);
    // Full: a layer's input. On the host: nothing.
    let full = with(|job| job.strategy.recompute = Recompute::Every(1));
    assert_eq!(kept_by_a_layer(Role::Activation, &full), 0);
    assert_eq!(kept_by_a_layer(Role::Checkpoint, &full), 2 * u);
    let offloaded = with(|job| {
        job.strategy.recompute = Recompute::Every(1);
        job.strategy.activation_offload = ActivationOffload::Checkpoints;
    });
    assert_eq!(kept_by_a_layer(Role::Activation, &offloaded), 0);
    assert_eq!(kept_by_a_layer(Role::Checkpoint, &offloaded), 0);
}

/// Spec patrickstar 8.8, 8B: B = 16, S = 1024, h = 3072: queries, keys and values 96 MiB each,
/// the rest of attention 1,424, intermediate 384 and output 432 MiB.
#[test]
fn parts_of_a_layer_of_the_8b_model_keep_what_is_published() {
    let mut job = job(Shape { layers: 1, ..shape_named("GPT3_8B").expect("a shape") });
    (job.train.batch, job.train.sequence, job.train.steps) = (16, 1024, 1);
    let trace = generate(&job).expect("a trace");
    let mut kept: BTreeMap<&str, u64> = BTreeMap::new();
    let mut live = vec![false; trace.blocks.len()];
    for event in &trace.events {
        match event.op {
            Op::Mark(id) if trace.phases[id.index()].ends_with(".backward") => break,
            Op::Alloc(block) => live[block.index()] = true,
            Op::Free(block) => live[block.index()] = false,
            _ => {}
        }
    }
    for (block, _) in trace
        .blocks
        .iter()
        .zip(&live)
        .filter(|(block, live)| **live && block.role == Role::Activation)
    {
        let frame = trace.sites.stacks[block.site.index()][0];
        let path = trace.sites.frames[frame.index()].filename.as_str();
        let part = [".attention.self", ".attention.output", ".intermediate", ".output"]
            .into_iter()
            .find(|part| path.contains(part) && !path.ends_with("LayerNorm"));
        *kept.entry(part.unwrap_or("others")).or_default() += block.size_bytes;
    }
    let mib = |part: &str| kept[part] >> 20;
    // The sum with the residual, kept by the norm, counts with the norms there.
    let sums = 2 * 96;
    assert_eq!(mib(".attention.self") + mib(".attention.output"), 3 * 96 + 1424 + sums / 2);
    assert_eq!(mib(".intermediate") + mib(".output"), 384 + 384 + 48 + sums / 2);
}

/// Bytes that pass in each direction, first to the device.
fn moved_in(trace: &Trace) -> [u64; 2] {
    let mut bytes = [0, 0];
    for event in &trace.events {
        let Op::Transfer(id) = event.op else { continue };
        let transfer = &trace.transfers[id.index()];
        bytes[usize::from(transfer.direction == Direction::DeviceToHost)] += transfer.size_bytes;
    }
    bytes
}

#[test]
fn strategies_move_what_their_formulas_say() {
    let (samples, sequence, hidden, layers) = (4u64, 512u64, 1024u64, 3u64);
    let tokens = samples * sequence;
    let moved = |job: &Job| moved_in(&generate(job).expect("a trace"));
    for family in [Family::Bert, Family::Gpt] {
        let plain = benchmark(family, layers);
        assert_eq!(moved(&plain), [0, 0]);
        // Spec patrickstar 5.3: 8 bytes an id down, rows up and gradients down in fp32.
        let rows = if family == Family::Bert { 2 * tokens + sequence } else { tokens + sequence };
        let mut job = plain.clone();
        job.strategy.cpu_embedding = true;
        assert_eq!(moved(&job), [4 * rows * hidden, 8 * rows + 4 * rows * hidden]);
        // Spec patrickstar 5.2: the input of every layer, both ways.
        let mut job = plain.clone();
        job.strategy.recompute = Recompute::Every(1);
        job.strategy.activation_offload = ActivationOffload::Checkpoints;
        assert_eq!(moved(&job), [layers * 2 * tokens * hidden; 2]);
        // Gradients down in fp16, weights up in fp32.
        for offload in [OptimizerOffload::Gradients, OptimizerOffload::State] {
            let mut job = plain.clone();
            job.strategy.optimizer_offload = offload;
            let trace = generate(&job).expect("a trace");
            let elements = trace.header.model.as_ref().expect("a model").elements();
            assert_eq!(moved_in(&trace), [4 * elements, 2 * elements]);
        }
        // What is saved goes down once and comes up once.
        let mut job = plain;
        job.strategy.activation_offload = ActivationOffload::Saved;
        let [up, down] = moved(&job);
        assert_eq!(up, down);
        assert!(up > layers * 30 * tokens * hidden, "{up}");
    }
}

/// Every block has a role; weights and gradients are as large as the parameters, gradients that go
/// to the host leave at once.
#[test]
fn roles_add_up() {
    for family in [Family::Bert, Family::Gpt, Family::Opt] {
        let mut job = benchmark(family, 2);
        let trace = generate(&job).expect("a trace");
        assert!(trace.blocks.iter().all(|block| block.role != Role::Unknown));
        let elements = trace.header.model.as_ref().expect("a model").elements();
        assert_eq!(live_before_backward(&trace, Role::Parameter), 2 * elements, "{family:?}");
        let of = |trace: &Trace, role| -> u64 {
            let blocks = trace.blocks.iter().filter(|block| block.role == role);
            blocks.map(|block| block.size_bytes).sum()
        };
        assert_eq!(of(&trace, Role::Gradient), 2 * elements, "{family:?}");
        assert_eq!(of(&trace, Role::Optimizer), 4 * elements, "{family:?}");
        job.strategy.optimizer_offload = OptimizerOffload::Gradients;
        let trace = generate(&job).expect("a trace");
        assert_eq!(of(&trace, Role::Gradient), 2 * elements, "{family:?}");
        assert_eq!(of(&trace, Role::Optimizer), 0, "{family:?}");
    }
}

/// Strategies that need each other's help run together, and no block is left behind by a step.
#[test]
fn strategies_combine() {
    let offloads =
        [ActivationOffload::None, ActivationOffload::Saved, ActivationOffload::Checkpoints];
    let recomputes =
        [Recompute::None, Recompute::Every(1), Recompute::Every(2), Recompute::Selective];
    let adapters = Lora { rank: 4, targets: vec![LoraTarget::Q, LoraTarget::Up], dropout: 0.1 };
    for family in [Family::Bert, Family::Gpt, Family::Opt] {
        for (head, autocast) in [(Head::Classifier, None), (Head::Lm, Some(Dtype::Bf16))] {
            for offload in offloads {
                for recompute in recomputes {
                    for lora in [None, Some(adapters.clone())] {
                        let mut job = benchmark(family, 3);
                        (job.train.batch, job.train.sequence, job.train.steps) = (2, 64, 3);
                        job.shape.head = head;
                        job.train.autocast = autocast;
                        if autocast.is_some() {
                            job.train.dtype = Dtype::Fp32;
                        }
                        job.strategy.activation_offload = offload;
                        job.strategy.recompute = recompute;
                        job.strategy.lora = lora;
                        assert_steps_alike(&generate(&job).expect("a trace"));
                    }
                }
            }
        }
    }
}

/// After the first step, which makes what lasts, every step ends with the same bytes live.
fn assert_steps_alike(trace: &Trace) {
    let mut live_bytes = 0u64;
    let mut at_step = Vec::new();
    for event in &trace.events {
        match event.op {
            Op::Mark(id) if trace.phases[id.index()].ends_with(".data") => at_step.push(live_bytes),
            Op::Alloc(block) => live_bytes += trace.blocks[block.index()].size_bytes,
            Op::Free(block) => live_bytes -= trace.blocks[block.index()].size_bytes,
            _ => {}
        }
    }
    assert_eq!(at_step.len(), 3);
    assert_eq!(at_step[1], at_step[2]);
    assert_eq!(at_step[2], live_bytes);
}

#[test]
fn a_tied_head_and_a_table_on_the_host_contradict_each_other() {
    let mut job = benchmark(Family::Gpt, 2);
    job.shape.head = Head::Lm;
    job.strategy.cpu_embedding = true;
    generate(&job).expect("an untied head has its own weight");
    job.shape.tied_head = true;
    let error = generate(&job).expect_err("the head needs the table").to_string();
    assert!(error.contains("untie the head"), "{error}");
}
