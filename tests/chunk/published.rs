//! The published profile of GPT3_8B: spec patrickstar 8.8, and what 2.1, 3.1 and 7.2 say of its
//! layout.

use fraglab::chunk::{ChunkEventKind, ChunkRun, Stage};
use fraglab::units::{GIB, MIB};

use super::scenario::{Program, Unit};

const HIDDEN: u64 = 3072;
const LAYERS: usize = 72;
const CHUNK_BYTES: u64 = 128 * MIB;
/// What one V100 reports.
const GPU_BYTES: u64 = 32_510 * MIB;

/// BERT of 72 layers, its embeddings on the host, batch 16, every layer checkpointed; `saved` says
/// whether activations are kept at all.
fn bert_8b(saved: bool) -> Program {
    let h = HIDDEN;
    let unit = |elements: &[u64], saved_mib: u64| Unit {
        elements: elements.to_vec(),
        saved_bytes: if saved { saved_mib * MIB } else { 0 },
        ..Unit::default()
    };
    let square = [h * h, h];
    let norm = [h, h];
    let mut units = vec![
        Unit { host: true, leaf: true, ..unit(&[30_522 * h], 0) },
        Unit { host: true, leaf: true, ..unit(&[1024 * h], 0) },
        Unit { host: true, leaf: true, ..unit(&[2 * h], 0) },
        unit(&norm, 0),
    ];
    for _ in 0..LAYERS {
        units.extend([unit(&square, 96), unit(&square, 96), unit(&square, 96)]);
        units.extend([unit(&square, 1424), unit(&norm, 96)]);
        units.extend([unit(&[4 * h * h, 4 * h], 384), unit(&[4 * h * h, h], 432)]);
        units.push(unit(&norm, 96));
    }
    units.extend([unit(&square, 0), unit(&[2 * h, 2], 0)]);
    let layers = (0..LAYERS).map(|layer| 4 + 8 * layer..4 + 8 * (layer + 1));
    Program {
        checkpointed: layers.collect(),
        checkpoint_bytes: if saved { 96 * MIB } else { 0 },
        steps: 4,
        ..Program::of(units)
    }
}

fn run(saved: bool, constant_mib: u64, spec: &str) -> ChunkRun {
    let shape = "chunk_size=64Mi+host=400GiB+warmup_gpu_chunk_mem_ratio=0.2";
    let program = Program { constant_bytes: constant_mib * MIB, ..bert_8b(saved) };
    program.run_on(1 << 50, GPU_BYTES, &format!("{shape}+{spec}"))
}

#[test]
fn the_warm_up_of_8b_moves_and_counts_as_the_published_code_does() {
    let run = run(false, 0, "quirks=true");
    let summary = &run.summary;
    assert_eq!(summary.lists[0].chunks, 145);
    assert_eq!(summary.moments, 1735);
    let warm_up = &summary.steps[0];
    assert_eq!((warm_up.forward.h2d, warm_up.backward.h2d), (145, 263));
    let in_passes = residency(&run).into_iter().filter(|at| at.0 == 0 && at.1 != Stage::Adam);
    let most = in_passes.map(|at| at.2).max();
    assert_eq!(most, Some(40), "floor(0.2 * 0.8 * 32510 MiB / 128 MiB)");
    // 7.2: 51.0 GiB of phantom bytes, beside 16 bytes for each element on the host.
    let torch_bytes = 16 * (30_522 + 1024 + 2) * HIDDEN;
    assert_eq!(summary.torch_host_bytes, torch_bytes);
    assert_eq!(summary.other_host_bytes_max - torch_bytes, 51 * GIB);
}

#[test]
fn the_profile_of_8b_is_the_published_one() {
    // With 800 to 1,100 MiB of other memory: 24 to 26 chunks cycle, peaks of 25,984 to 25,996 MiB.
    for (constant_mib, cycling, peak_mib) in [(800, 24, 25_984), (1100, 26, 25_996)] {
        let run = run(true, constant_mib, "quirks=true");
        for step in &run.summary.steps[2..] {
            assert_eq!(step.forward.d2h + step.backward.d2h, cycling);
            assert_eq!(step.forward.h2d + step.backward.h2d, cycling);
            assert_eq!(step.gpu_bytes_peak, peak_mib * MIB);
            assert_eq!(step.gpu_chunk_bytes_peak, 18_560 * MIB, "all fp16 chunks in ADAM");
        }
        assert_eq!(run.summary.gpu_quota_bytes, 26_008 * MIB);
        assert_eq!(run.summary.gpu_adam_groups, 0);
    }
}

#[test]
fn the_figures_plateaus_follow_from_the_rules() {
    // A peak of 10,942 MiB beside chunks, of which the temporary gradient of a whole chunk is one
    // chunk: 26,008 - 10,942 - 128 = 14,938 MiB, 116 chunks.
    let unit = Unit { elements: vec![64 * MIB], ..Unit::default() };
    let program = Program {
        working_bytes: 10_942 * MIB - CHUNK_BYTES,
        steps: 3,
        ..Program::of(vec![unit; 145])
    };
    let shape = "chunk_size=64Mi+host=400GiB+warmup_gpu_chunk_mem_ratio=0.2";
    let run = program.run_on(1 << 50, GPU_BYTES, shape);
    let resident = residency(&run);
    let of = |step: u32, stage: Stage| {
        resident.iter().filter(move |at| (at.0, at.1) == (step, stage)).map(|at| at.2)
    };
    assert_eq!(of(0, Stage::Forward).max(), Some(40), "floor(0.2 * 26,008 / 128)");
    assert_eq!(of(0, Stage::Backward).max(), Some(40));
    assert_eq!(of(2, Stage::Backward).max(), Some(116));
}

/// Chunks on the GPU after each move: step, stage, how many.
fn residency(run: &ChunkRun) -> Vec<(u32, Stage, i64)> {
    let mut on_gpu = 0;
    let mut resident = Vec::new();
    for event in &run.log {
        on_gpu += match event.kind {
            ChunkEventKind::ToGpu => 1,
            ChunkEventKind::ToHost => -1,
            _ => continue,
        };
        resident.push((event.step, event.stage, on_gpu));
    }
    resident
}
