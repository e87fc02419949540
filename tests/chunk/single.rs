//! One GPU: spec patrickstar 8.3, 8.4.

use fraglab::chunk::{ChunkEvent, ChunkEventKind, ChunkRun, Stage};

use super::scenario::{F, Program, Unit};

/// `+` to the GPU and `-` to the host, by chunk, as spec patrickstar 8.4 writes them.
pub(super) fn moves(run: &ChunkRun, step: u32, stage: Stage) -> String {
    let of = |event: &&ChunkEvent| event.step == step && event.stage == stage;
    let sign = |event: &ChunkEvent| match event.kind {
        ChunkEventKind::ToGpu => Some(format!("+{}", event.chunk)),
        ChunkEventKind::ToHost => Some(format!("-{}", event.chunk)),
        _ => None,
    };
    run.log.iter().filter(of).filter_map(sign).collect::<Vec<_>>().join(" ")
}

fn tiny_a() -> Program {
    let unit = |elements: &[u64]| Unit { elements: elements.to_vec(), ..Unit::default() };
    let mut units = vec![Unit { leaf: true, ..unit(&[60]) }];
    units.extend((0..5).map(|_| unit(&[50, 10])));
    units.push(unit(&[30]));
    Program { steps: 4, ..Program::of(units) }
}

/// Ratios of spec patrickstar 8.4.
const TINY: &str =
    "host=100000+overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1+warmup_gpu_chunk_mem_ratio=0.5";

#[test]
fn trace_a_moves_as_the_published_code_does() {
    for quirks in ["quirks=true", "quirks=false"] {
        let run = tiny_a().run(5 * F, &format!("{TINY}+{quirks}"));
        let stages = |step| [Stage::Forward, Stage::Backward].map(|stage| moves(&run, step, stage));
        assert_eq!(
            stages(0),
            ["+0 +2 -0 +4 -2 +6 -4 +8 -6 +10", "-8 +6 -6 +4 -4 +2 -2 +0"],
            "warm-up, {quirks}"
        );
        assert_eq!(stages(1), ["+2 +4 -0 +6 -2 +8", "-10 -8 +2 -6 +0"], "{quirks}");
        for step in [2, 3] {
            assert_eq!(stages(step), ["+6 -0 +8 -2 +10", "-10 -8 +2 -6 +0"], "{quirks}");
        }
        let samples: Vec<i64> = [0, 0, 0, 0, 0, 0, 0, 60, 120, 120, 120, 120, 120, 120, 120].into();
        assert_eq!(run.summary.other_gpu_bytes, samples);
        assert_eq!(run.summary.moments, 15);
        let margin = run.summary.margin.expect("a backward pass has ended");
        assert!((margin - -0.2133).abs() < 1e-3, "{margin}");
        assert_eq!(run.summary.gpu_chunk_bytes_peak, 4 * F);
        assert_eq!(run.summary.hard_stop, None);
    }
}

#[test]
fn trace_b_moves_as_the_rules_say() {
    // By hand. Samples: 0 in the forward pass, then 1 F; so budgets of 4 F, and of 3 F from the last
    // forward module on. Chunk 2i is used at moments i and 11 - i of 13.
    let program = Program { steps: 4, ..Program::equal(6) };
    for quirks in ["quirks=true", "quirks=false"] {
        let run = program.run(5 * F, &format!("{TINY}+use_hybrid_adam=false+{quirks}"));
        let stages = |step| [Stage::Forward, Stage::Backward].map(|stage| moves(&run, step, stage));
        assert_eq!(
            stages(0),
            ["+0 +2 -0 +4 -2 +6 -4 +8 -6 +10", "-8 +6 -6 +4 -4 +2 -2 +0"],
            "warm-up, {quirks}"
        );
        assert_eq!(stages(1), ["+2 +4 -0 +6 -2 +8", "-10 -8 +2 -6 +0"], "{quirks}");
        for step in [2, 3] {
            assert_eq!(stages(step), ["+6 -0 +8 -2 -4 +10", "-10 +4 -8 +2 -6 +0"], "{quirks}");
        }
        assert_eq!(run.summary.moments, 13);
    }
}

#[test]
fn trace_c_keeps_two_groups_on_the_gpu() {
    // The buffer of 4 bytes an element comes with the write-back as fp32. The [run] stood in for
    // torch without the results in between of ADAM.
    let quirks = "quirk_write_back=true+quirk_margin=true+adam_temporaries=false";
    let run = Program::equal(6).run(26 * F, &format!("{TINY}+{quirks}"));
    assert_eq!(moves(&run, 0, Stage::Forward), "+0 +2 +4 +6 +8 +10");
    assert_eq!(moves(&run, 0, Stage::Adam), "+1 +3");
    let margin = run.summary.margin.expect("a backward pass has ended");
    assert!((margin - 2.5333).abs() < 1e-3, "{margin}");
    assert_eq!(run.summary.gpu_adam_groups, 2);
    for step in &run.summary.steps {
        assert_eq!((step.gradient_reads.d2h, step.gradient_reads.h2d), (4, 0));
        assert_eq!(step.gradient_reads.d2h_bytes, 4 * F);
        assert_eq!((step.write_backs.h2d, step.write_backs.d2h), (4, 0));
        assert_eq!(step.write_backs.h2d_bytes, 3 * 2 * F + F, "the last at 2 bytes an element");
    }
    for step in &run.summary.steps[1..] {
        for traffic in [step.forward, step.backward, step.adam] {
            assert_eq!((traffic.h2d, traffic.d2h), (0, 0));
        }
    }
    assert_eq!(run.summary.gpu_chunk_bytes_peak, 18 * F);
    assert_eq!(run.summary.gpu_bytes_peak, 21 * F);
}

#[test]
fn without_quirks_trace_c_writes_back_two_bytes_an_element() {
    let run = Program::equal(6).run(28 * F, TINY);
    let step = &run.summary.steps[2];
    assert_eq!(step.write_backs.h2d_bytes, step.write_backs.h2d * F);
    // 3.3: three results in between of 4 bytes an element of the tensor, which fills the chunk, and
    // the buffer of 2 bytes an element, beside 6 fp16 chunks and 2 groups of 6 F.
    assert_eq!(run.summary.gpu_bytes_peak, (6 + 12 + 6 + 1) * F);
}

#[test]
fn closed_forms_hold_for_equal_chunks() {
    // 8.3: K = 10 - 1 reserve - 1 temporary gradient.
    for quirks in ["quirks=true", "quirks=false"] {
        let spec = format!("{TINY}+use_hybrid_adam=false+{quirks}");
        let run = Program::equal(16).run(10 * F, &spec);
        let warm_up = &run.summary.steps[0];
        assert_eq!((warm_up.forward.h2d, warm_up.forward.d2h), (16, 11), "{quirks}");
        assert_eq!((warm_up.backward.h2d, warm_up.backward.d2h), (11, 11), "{quirks}");
        for step in &run.summary.steps[3..] {
            assert_eq!((step.forward.h2d, step.forward.d2h), (8, 8), "{quirks}");
            assert_eq!((step.backward.h2d, step.backward.d2h), (8, 8), "{quirks}");
            assert_eq!((step.gradient_reads.d2h, step.gradient_reads.h2d), (8, 0));
            assert_eq!((step.write_backs.h2d, step.write_backs.d2h), (8, 0));
        }
        assert_eq!(run.summary.moments, 33);
        assert_eq!(run.summary.refusals, 0);
    }
}

#[test]
fn phantom_bytes_are_one_chunk_for_each_move_to_the_gpu_in_the_warm_up() {
    // 7.2: 16 + 11 moves of the warm-up, no host use beside chunks.
    let spec = format!("{TINY}+use_hybrid_adam=false+quirk_phantom_host=true");
    let run = Program::equal(16).run(10 * F, &spec);
    assert_eq!(run.summary.other_host_bytes_max, 27 * F);
    let cached = Program::equal(16).run(10 * F, &format!("{spec}+with_mem_cache=true"));
    assert_eq!(cached.summary.other_host_bytes_max, 0, "the cache keeps the count right");
    let mended = Program::equal(16).run(10 * F, &format!("{TINY}+use_hybrid_adam=false"));
    assert_eq!(mended.summary.other_host_bytes_max, 0);
}
