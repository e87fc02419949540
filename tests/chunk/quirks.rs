//! What the published code does that surprises, each with and without: spec patrickstar 7.1, 7.2.

use fraglab::chunk::{ChunkEventKind, ChunkRun, Device, Stage};
use fraglab::trace::Op;

use super::scenario::{F, Program};

const ROOM: &str = "host=1000000+overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1";

fn kinds(run: &ChunkRun, kind: ChunkEventKind) -> usize {
    run.log.iter().filter(|event| event.kind == kind).count()
}

#[test]
fn a_refused_payload_moves_others_away_unless_the_fallback_is_the_published_one() {
    // 7.1.2: three movable chunks, ample host. The manager is told of 6 F and the GPU has 3: the
    // fourth chunk is refused.
    let program = Program { steps: 1, ..Program::equal(4) };
    let spec = format!("{ROOM}+warmup_gpu_chunk_mem_ratio=1");
    let mended = program.run_on(3 * F + 10, 6 * F, &spec);
    let forward = mended.summary.steps[0].forward;
    assert_eq!((forward.h2d, forward.d2h), (4, 1), "one moves away and the fourth is granted");
    let attempts = mended.trace.events.iter().filter(|event| matches!(event.op, Op::Attempt(_)));
    assert!(attempts.count() >= 1, "the refused request stands as an attempt");

    let quirky = program.run_on(3 * F + 10, 6 * F, &format!("{spec}+quirk_oom_fallback=true"));
    let forward = quirky.summary.steps[0].forward;
    assert_eq!((forward.h2d, forward.d2h), (4, 0), "nothing moves away");
    let refused = quirky.summary.first_refused.expect("it is refused for good");
    assert_eq!(refused.requested_bytes, F);
    let event = quirky.trace.events[refused.event_index as usize];
    assert!(matches!(event.op, Op::Alloc(_)), "and stands as a request");
}

#[test]
fn the_margin_of_exactly_two_groups_gives_one_in_the_published_code() {
    // S is the temporary gradient, 1 F: 1.0 · (21 - 1 - 8) ÷ 6 = 2.
    let spec = format!("{ROOM}+margin_use_ratio=1");
    for (quirk, groups) in [(true, 1), (false, 2)] {
        let run =
            Program::equal(8).run_on(u64::MAX, 21 * F, &format!("{spec}+quirk_margin={quirk}"));
        assert_eq!(run.summary.margin, Some(2.0));
        assert_eq!(run.summary.gpu_adam_groups, groups);
    }
}

#[test]
fn a_budget_below_the_need_still_evicts_unless_asked_not_to() {
    // The quota of a warm-up of 1 F - 1 byte holds no chunk.
    let spec = format!("{ROOM}+warmup_gpu_chunk_mem_ratio=0.199+quirk_over_budget=");
    let program = Program { steps: 1, ..Program::equal(4) };
    let mended = program.run_on(u64::MAX, 5 * F, &format!("{spec}false")).summary.steps[0].forward;
    assert_eq!((mended.h2d, mended.d2h), (4, 3), "one at a time");
    let run = program.run_on(u64::MAX, 5 * F, &format!("{spec}true"));
    let quirky = run.summary.steps[0].forward;
    assert_eq!((quirky.h2d, quirky.d2h), (4, 0), "they pile up");
    assert_eq!(run.summary.steps[0].over_budget, 4, "each with a warning");
    assert_eq!(kinds(&run, ChunkEventKind::OverBudget), 4);
}

#[test]
fn a_warm_up_without_adam_is_repeated_unless_the_published_code_is_asked_for() {
    let program = Program { skipped_adam: vec![0], steps: 3, ..Program::equal(4) };
    let mended = program.run(60 * F, ROOM);
    let warm_ups: Vec<bool> = mended.summary.steps.iter().map(|step| step.warm_up).collect();
    assert_eq!(warm_ups, [true, true, false]);
    let quirky = program.run(60 * F, &format!("{ROOM}+quirk_skipped_adam=true"));
    let warm_ups: Vec<bool> = quirky.summary.steps.iter().map(|step| step.warm_up).collect();
    assert_eq!(warm_ups, [true, false, false]);
    for run in [mended, quirky] {
        assert_eq!(run.summary.moments, 9, "two passes of four, and the optimizer's call");
    }
}

#[test]
fn with_the_cache_a_skipped_adam_leaks_one_chunk_of_the_hosts_count() {
    let program = Program { skipped_adam: vec![1, 2], steps: 4, ..Program::equal(4) };
    let spec = format!("{ROOM}+with_mem_cache=true");
    let mended = program.run(60 * F, &spec).summary.host_chunk_bytes_final;
    let quirky = program.run(60 * F, &format!("{spec}+quirk_overflow_leak=true"));
    assert_eq!(quirky.summary.host_chunk_bytes_final - mended, 2 * F);
    let without = program.run(60 * F, &format!("{ROOM}+quirk_overflow_leak=true"));
    let plain = program.run(60 * F, ROOM);
    let leaked = without.summary.host_chunk_bytes_final - plain.summary.host_chunk_bytes_final;
    assert_eq!(leaked, 0, "only the cache leaks");
}

#[test]
fn a_host_without_room_stops_training_by_name() {
    // Four chunks need 6 F each... of fp16 and fp32 3 F: 12 F. All are on the host, and ADAM's
    // state needs 16 F more.
    let program = Program { steps: 2, ..Program::equal(4) };
    let spec = "host=4000+overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1+use_hybrid_adam=false";
    let run = program.run_on(u64::MAX, 12 * F, spec);
    let stop = run.summary.hard_stop.expect("no room on either side");
    assert_eq!((stop.step, stop.stage), (0, Stage::Adam));
    assert_eq!((stop.from, stop.to), (Device::Host, Device::Gpu));
    let last = run.log.last().expect("a log");
    assert_eq!((last.kind, last.chunk), (ChunkEventKind::CannotMove, stop.chunk));
    assert!(stop.to_string().contains("must leave the host"), "{stop}");
}

#[test]
fn what_torch_keeps_on_the_host_is_taken_off_its_budget_once_and_always() {
    // 7.1.4, two local ranks: 16 bytes for each of 100 elements used there.
    let mut program = Program { ranks: 2, local_ranks: 2, steps: 3, ..Program::equal(4) };
    program.units[0].host = true;
    let spec = "overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1+use_hybrid_adam=false";
    // Chunks of this rank: 2 of 14 bytes an element. Torch has 1600 bytes.
    let chunks_bytes = 2 * 14 * 100;
    let host = |rank_bytes: u64| format!("host={}+{spec}", 2 * rank_bytes);
    let enough = program.run_on(u64::MAX, 60 * F, &host(chunks_bytes + 1600));
    assert_eq!(enough.summary.other_host_bytes_max, 1600);
    assert_eq!(enough.summary.hard_stop, None);
    let evicts = |quirk: bool| {
        let spec = format!("{}+quirk_host_budget={quirk}", host(chunks_bytes + 200));
        let run = program.run_on(u64::MAX, 60 * F, &spec);
        run.log
            .iter()
            .any(|event| event.stage == Stage::Adam && event.kind == ChunkEventKind::ToGpu)
    };
    assert!(evicts(false), "the host is full of what torch keeps");
    assert!(!evicts(true), "ADAM ignores it");
}
