//! Several ranks: spec patrickstar 8.7 and the counts of 4.4.

use fraglab::chunk::{ChunkRun, StepSummary};

use super::scenario::{F, Program};

const MSC: &str = "with_mem_saving_comm=true";
const COLLECTIVE: &str = "with_mem_saving_comm=false";

fn layers(ranks: u32, chunks: usize, chunks_of_a_layer: usize) -> Program {
    let program = Program::equal(chunks).checkpointed(chunks_of_a_layer, F / 2);
    Program { ranks, local_ranks: ranks, working_bytes: 2 * F, steps: 4, ..program }
}

fn run(gpu: u64, mode: &str, quirks: &str) -> ChunkRun {
    let spec = format!("host=10000000+{mode}+{quirks}");
    layers(4, 32, 1).run(gpu * F, &spec)
}

fn check(run: &ChunkRun, margin: f64, groups: u64, chunk_peak: u64) -> &StepSummary {
    let found = run.summary.margin.expect("a backward pass has ended");
    assert!((found - margin).abs() < 0.0005, "margin {found}, expected {margin}");
    assert_eq!(run.summary.gpu_adam_groups, groups);
    assert_eq!(run.summary.moments, 97);
    let step = &run.summary.steps[3];
    assert_eq!(step.gpu_chunk_bytes_peak, chunk_peak * F);
    step
}

/// Moves up and down in the forward pass, the backward pass, ADAM.
fn moves(step: &StepSummary) -> [u64; 6] {
    let [f, b, a] = [step.forward, step.backward, step.adam];
    [f.h2d, f.d2h, b.h2d, b.d2h, a.h2d, a.d2h]
}

#[test]
fn a_large_gpu_moves_nothing_but_what_is_communicated() {
    for quirks in ["quirks=true", "quirks=false"] {
        let collective = run(120, COLLECTIVE, quirks);
        let step = check(&collective, 8.800, 8, 59);
        assert_eq!(moves(step), [0; 6]);
        let calls = step.collectives;
        assert_eq!((calls.all_gathers, calls.reduce_scatters), (16, 8));
        assert_eq!((calls.all_gather_bytes, calls.reduce_scatter_bytes), (64 * F, 32 * F));
        assert_eq!((calls.broadcasts, calls.reduces), (0, 0));

        let saving = run(120, MSC, quirks);
        let step = check(&saving, 9.067, 8, 57);
        assert_eq!(moves(step), [0; 6]);
        let calls = step.collectives;
        assert_eq!((calls.broadcasts, calls.reduces), (96, 32));
        assert_eq!((calls.broadcast_bytes, calls.reduce_bytes), (96 * F, 32 * F));
        assert_eq!((calls.all_gathers, calls.reduce_scatters), (0, 0));
    }
}

#[test]
fn the_squared_reserve_sends_optimizer_chunks_away_and_back() {
    let quirky = run(60, COLLECTIVE, "quirk_bwd_reserve=true");
    let step = check(&quirky, 2.400, 2, 23);
    assert_eq!(moves(step), [0, 0, 0, 5, 5, 0]);
    assert_eq!((step.backward.d2h_bytes, step.adam.h2d_bytes), (10 * F, 10 * F));
    let mended = run(60, COLLECTIVE, "quirks=false");
    let step = check(&mended, 2.400, 2, 23);
    assert_eq!(moves(step), [0; 6]);
}

#[test]
fn a_small_gpu_swaps_in_collective_mode_and_not_with_memory_saving() {
    let collective = run(40, COLLECTIVE, "quirks=true");
    let step = check(&collective, 0.267, 0, 11);
    assert_eq!(moves(step)[..4], [4, 0, 4, 8]);
    assert!(step.over_budget > 0);
    for quirks in ["quirks=true", "quirks=false"] {
        let saving = run(40, MSC, quirks);
        let step = check(&saving, 0.533, 0, 9);
        assert_eq!(moves(step)[..4], [0; 4]);
        assert_eq!(step.over_budget, 0);
    }
}

#[test]
fn checkpointing_adds_a_fetch_where_a_layer_holds_all_that_is_fetched_at_once() {
    // 4.4: ranks, chunks of a layer, mode, fetches.
    let cases = [
        (2, 2, MSC, 96),
        (4, 2, MSC, 96),
        (8, 2, MSC, 96),
        (2, 2, COLLECTIVE, 48),
        (4, 2, COLLECTIVE, 16),
        (8, 2, COLLECTIVE, 8),
    ];
    for (ranks, chunks_of_a_layer, mode, fetches) in cases {
        let run =
            layers(ranks, 32, chunks_of_a_layer).run(400 * F, &format!("host=9000000+{mode}"));
        let calls = run.summary.steps[3].collectives;
        let found = if mode == MSC { calls.broadcasts } else { calls.all_gathers };
        assert_eq!(found, fetches, "{ranks} ranks, {mode}");
    }
    // 64 chunks, 8 of a layer, 4 ranks: 48 instead of 32, 192 instead of 128.
    for (mode, with, without) in [(COLLECTIVE, 48, 32), (MSC, 192, 128)] {
        for (checkpointing, fetches) in [(true, with), (false, without)] {
            let mut program = layers(4, 64, 8);
            if !checkpointing {
                program.checkpointed.clear();
            }
            let run = program.run(400 * F, &format!("host=9000000+{mode}"));
            let calls = run.summary.steps[3].collectives;
            let found = if mode == MSC { calls.broadcasts } else { calls.all_gathers };
            assert_eq!(found, fetches, "{mode}, checkpointing: {checkpointing}");
        }
    }
}
