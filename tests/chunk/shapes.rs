//! Models and traces of other shapes than the spec's tables: frozen and shared parameters, units on
//! the host, dummies, errors, the derived trace, time.

use fraglab::chunk::{
    ChunkConfig, ChunkError, ChunkEvent, ChunkEventKind, ChunkList, ChunkRun, ChunkSize, Exact,
    LinkCosts, Stage, run,
};
use fraglab::trace::{Op, Role, read_text};

use super::scenario::{CHUNK_ELEMENTS, F, Program, Unit, config};

const ROOM: &str = "host=1000000+overall_gpu_mem_ratio=1+overall_cpu_mem_ratio=1";

fn events(run: &ChunkRun, kind: ChunkEventKind, step: u32) -> Vec<&ChunkEvent> {
    run.log.iter().filter(|event| event.kind == kind && event.step == step).collect()
}

#[test]
fn frozen_chunks_have_no_state_and_no_gradients() {
    let mut program = Program::equal(4);
    program.units[1].frozen = true;
    let run = program.run(100 * F, ROOM);
    let chunks: Vec<u64> = run.summary.lists.iter().map(|list| list.chunks).collect();
    assert_eq!(chunks, [4, 3, 3, 3]);
    let gradients = run.trace.blocks.iter().filter(|block| block.role == Role::Gradient);
    assert_eq!(gradients.count(), 3 * 5, "three of four, in five steps");
    let of_second = [3, 10, 11];
    assert!(run.log.iter().all(|event| !of_second.contains(&event.chunk)));
    // 14 bytes an element of what is trained, 2 of what is not.
    let bytes = run.summary.gpu_chunk_bytes_final + run.summary.host_chunk_bytes_final;
    assert_eq!(bytes, (3 * 14 + 2) * CHUNK_ELEMENTS);
}

#[test]
fn chunk_bytes_are_14_an_element_of_local_chunks_after_the_first_adam() {
    // 8.2; five chunks on three ranks: rank 0 owns 0 and 3, rank 2 owns 2 and a dummy.
    for (rank, elements, dummies) in [(0, 14 * 2, 0), (1, 14 * 2, 0), (2, 14, 2)] {
        for mode in ["true", "false"] {
            let program = Program { ranks: 3, local_ranks: 3, ..Program::equal(5) };
            let spec = format!("{ROOM}+rank={rank}+with_mem_saving_comm={mode}");
            let run = program.run(100 * F, &spec);
            assert_eq!(run.summary.dummy_chunks, 1);
            let bytes = run.summary.gpu_chunk_bytes_final + run.summary.host_chunk_bytes_final;
            // With memory-saving communication a dummy is never touched (4.3).
            let dummies = if mode == "true" { 0 } else { dummies };
            assert_eq!(bytes, (elements + dummies) * CHUNK_ELEMENTS, "rank {rank}, {mode}");
        }
    }
}

#[test]
fn a_leaf_keeps_its_group_until_adam_and_is_summed_there() {
    let mut program = Program { ranks: 2, local_ranks: 2, steps: 3, ..Program::equal(4) };
    program.units[0].leaf = true;
    let run = program.run(100 * F, ROOM);
    let sums = events(&run, ChunkEventKind::ReduceScatter, 2);
    let at: Vec<(Stage, u32)> = sums.iter().map(|event| (event.stage, event.moment)).collect();
    // Moments: 4 + 4 + ADAM. The leaf's group is summed after ADAM's tick.
    assert_eq!(at, [(Stage::Backward, 6), (Stage::Adam, 9)]);
    let dropped = events(&run, ChunkEventKind::Drop, 2);
    assert_eq!(dropped.last().map(|event| event.moment), Some(9));
}

#[test]
fn tied_weights_are_summed_after_their_last_backward_use() {
    let text = "unit emb leaf emb.w=100\nunit mid mid.w=100\n\
        alloc emb.w 200 role=parameter\nalloc mid.w 200 role=parameter\n\
        mark step0.forward\n\
        enter \"emb->E : F\"\naccess emb.w\nleave \"emb->E : F\"\n\
        enter \"mid->M : F\"\naccess mid.w\nleave \"mid->M : F\"\n\
        enter \"head->H : F\"\naccess emb.w\nleave \"head->H : F\"\n\
        mark step0.backward\n\
        enter \"head->H : B\"\naccess emb.w\nleave \"head->H : B\"\n\
        enter \"mid->M : B\"\naccess mid.w\nleave \"mid->M : B\"\n\
        enter \"emb->E : B\"\naccess emb.w\nleave \"emb->E : B\"\n\
        mark step0.optimizer\n";
    let trace = read_text(text).expect("a well-formed text");
    let config = config(&format!("chunk_size=100+gpu=100000+{ROOM}"));
    let result = run(&trace, &config, &LinkCosts::default(), &mut Exact::new(100_000));
    let result = result.expect("runs");
    assert_eq!(result.summary.moments, 7, "three modules each way, and ADAM");
    let gradients: Vec<usize> = (0..result.trace.blocks.len())
        .filter(|&block| result.trace.blocks[block].role == Role::Gradient)
        .collect();
    assert_eq!(gradients.len(), 2, "one for each parameter, though one is used twice");
    let frees = result.trace.events.iter().filter_map(|event| match event.op {
        Op::Free(block) if gradients.contains(&block.index()) => Some(block.index()),
        _ => None,
    });
    assert_eq!(frees.collect::<Vec<_>>(), [gradients[1], gradients[0]], "the shared one last");
}

#[test]
fn units_on_the_host_are_no_chunks_and_no_moments() {
    let mut program = Program { ranks: 2, local_ranks: 1, ..Program::equal(3) };
    program.units[0].host = true;
    let run = program.run(100 * F, ROOM);
    assert_eq!(run.summary.lists[0].chunks, 2);
    assert_eq!(run.summary.moments, 5);
    assert_eq!(run.summary.torch_host_bytes, 16 * CHUNK_ELEMENTS);
    assert_eq!(run.summary.steps[1].collectives.host_all_reduce_bytes, 4 * CHUNK_ELEMENTS);
}

#[test]
fn construction_holds_the_own_or_all_parameters_in_fp32() {
    // 4.6: 4P/N + 6P/N or 4P + 6P/N for chunks without waste.
    let program = Program { ranks: 4, local_ranks: 4, ..Program::equal(8) };
    let parameters = 8 * CHUNK_ELEMENTS;
    for (all, own) in [(false, parameters / 4), (true, parameters)] {
        let run = program.run(100 * F, &format!("{ROOM}+release_after_init={all}"));
        let peak = run.summary.construction_host_bytes_peak;
        assert_eq!(peak, 4 * own + 6 * parameters / 4);
    }
}

#[test]
fn the_cache_spares_allocations() {
    let program = Program::equal(16);
    let spec = format!("{ROOM}+use_hybrid_adam=false+warmup_gpu_chunk_mem_ratio=0.5");
    let plain = program.run(10 * F, &spec).summary;
    let cached = program.run(10 * F, &format!("{spec}+with_mem_cache=true")).summary;
    assert_eq!(plain.cache_hits, 0);
    assert!(cached.cache_hits > 0);
    assert!(cached.payload_allocations < plain.payload_allocations);
    // Without it every move allocates, and the 4 · 16 chunks once each.
    assert_eq!(plain.payload_allocations, plain.moves.h2d + plain.moves.d2h + 64);
}

#[test]
fn a_loss_scaler_looks_at_gradients_through_fp32_copies() {
    // 2.2: the largest linear layer has its gradient of 2 and the copy of 4 bytes an element.
    let mut program = Program::equal(3);
    program.units[1].elements = vec![60, 20];
    let samples = |spec: &str| {
        let run = program.run(100 * F, &format!("{ROOM}+{spec}"));
        run.summary.other_gpu_bytes
    };
    // Slots 4 to 6 hold the peaks of the backward passes of units 2, 1, 0, or the gradient that the
    // next one has attached by then.
    let plain = samples("loss_scaler=false");
    assert_eq!(plain[4..], [200, 200, 200]);
    let scaled = samples("loss_scaler=true");
    assert_eq!(scaled[4..], [600, 160 + 240, 600]);
}

#[test]
fn page_locked_memory_may_come_in_powers_of_two() {
    let peak = |spec: &str| {
        let run = Program::equal(4).run(100 * F, &format!("{ROOM}+use_hybrid_adam=false+{spec}"));
        run.summary.host_bytes_peak
    };
    // At the first step 4 fp16 chunks, and fp32 chunks; in ADAM, with the former on the GPU, 12
    // chunks of 4 bytes an element and a buffer of 2.
    assert_eq!(peak("pinned_power_of_two=false"), 12 * 400 + 200);
    assert_eq!(peak("pinned_power_of_two=true"), 12 * 512 + 256);
}

#[test]
fn up_less_down_is_the_change_of_residency() {
    // 8.9, by the log of payloads alone.
    let program = Program { working_bytes: 2 * F, ..Program::equal(12).checkpointed(1, F) };
    let run = program.run(20 * F, "host=1000000");
    let mut resident = 0i64;
    for step in &run.summary.steps {
        for (stage, traffic) in [
            (Stage::Forward, step.forward),
            (Stage::Backward, step.backward),
            (Stage::Adam, step.adam),
        ] {
            let of = |event: &&ChunkEvent| event.step == step.step && event.stage == stage;
            let moves = run.log.iter().filter(of).map(|event| match event.kind {
                ChunkEventKind::ToGpu => event.bytes as i64,
                ChunkEventKind::ToHost => -(event.bytes as i64),
                _ => 0,
            });
            let change: i64 = moves.sum();
            assert_eq!(change, traffic.h2d_bytes as i64 - traffic.d2h_bytes as i64);
            resident += change;
        }
    }
    assert_eq!(resident, run.summary.gpu_chunk_bytes_final as i64);
}

#[test]
fn dynamic_budgets_move_no_more_than_a_small_static_one() {
    // 8.9, where G · rw is below every G - S - F.
    for gpu in [30, 40, 60] {
        let program = Program { working_bytes: 4 * F, ..Program::equal(16).checkpointed(1, F) };
        let moves = |fixed: bool| {
            let spec = format!("host=1000000+use_hybrid_adam=false+with_static_partition={fixed}");
            let steps = program.run(gpu * F, &spec).summary.steps;
            steps[4].forward.h2d + steps[4].backward.h2d
        };
        assert!(moves(false) <= moves(true), "{gpu} F");
    }
}

#[test]
fn without_hybrid_adam_no_bytes_less_cross_the_link() {
    // 8.9: where fp16 chunks are on the GPU.
    let bytes = |hybrid: bool| {
        let run = Program::equal(6).run(60 * F, &format!("{ROOM}+use_hybrid_adam={hybrid}"));
        let step = run.summary.steps.into_iter().next_back().expect("steps");
        let copies = [step.gradient_reads, step.write_backs, step.adam];
        copies.iter().map(|copies| copies.h2d_bytes + copies.d2h_bytes).sum::<u64>()
    };
    assert!(bytes(true) < bytes(false));
}

#[test]
fn the_derived_trace_holds_what_the_program_kept_and_no_parameters_of_its_own() {
    let program =
        Program { working_bytes: 3 * F, steps: 2, ..Program::equal(2).checkpointed(1, F) };
    let run = program.run(100 * F, ROOM);
    let sizes = |role: Role| {
        let blocks = run.trace.blocks.iter().filter(move |block| block.role == role);
        blocks.map(|block| block.size_bytes).collect::<Vec<_>>()
    };
    assert_eq!(sizes(Role::Checkpoint), [F; 4]);
    assert_eq!(sizes(Role::Gradient), [F; 4]);
    assert_eq!(sizes(Role::Parameter), [F; 2], "payloads of two chunks, which stay");
    let fp32 = run.trace.blocks.iter().find(|block| block.role == Role::Optimizer);
    let site = fp32.and_then(|block| run.trace.site_label(block.site));
    assert_eq!(site.as_deref(), Some("fp32 chunk (chunk manager:0)"));
    assert_eq!(run.trace.header.model, None);
    let peak_bytes = run.trace.requested_bytes_peak();
    assert_eq!(peak_bytes, run.summary.gpu_bytes_peak, "an exact GPU grants what is asked");
    let marks = run.trace.events.iter().filter(|event| matches!(event.op, Op::Mark(_)));
    assert_eq!(marks.count(), 6);
}

#[test]
fn moves_take_time_and_overlap_if_asked_to() {
    let slow = Program { pass_ns: 1_000_000, working_bytes: 1, steps: 3, ..Program::equal(16) };
    let spec = format!("{ROOM}+use_hybrid_adam=false+warmup_gpu_chunk_mem_ratio=0.5");
    let step_ns = |spec: &str| {
        let times = slow.run(10 * F, spec).summary.steps[2].times;
        assert_eq!(times.compute_ns, 32 * 1_000_000, "16 passes each way");
        times.step_ns
    };
    let (sync, overlapped) = (step_ns(&spec), step_ns(&format!("{spec}+with_async_move=true")));
    assert!(overlapped < sync, "{overlapped} < {sync}");
    assert!(overlapped >= 32 * 1_000_000);
    let free = slow.run(1000 * F, &spec).summary.steps[2].times;
    assert_eq!(free.transfer_ns, 0, "everything fits");
}

#[test]
fn a_transfers_time_is_in_the_gap_behind_it_and_counts_once() {
    let text = format!(
        "{UNIT}mark step0.forward\n{PASS}transfer 6250000 h2d\n@+10ms mark step0.backward\n"
    );
    let trace = read_text(&text).expect("a well-formed text");
    let result = run(
        &trace,
        &config("chunk_size=100+gpu=1GiB+host=1GiB"),
        &LinkCosts::default(),
        &mut Exact::new(1 << 30),
    );
    let times = result.expect("runs").summary.steps[0].times;
    // 6.25 GB/s of the assumed link, and 10 µs to start; one chunk of 200 bytes moves as well.
    let transfer_ns = 1_010_000;
    assert_eq!(times.compute_ns, 10_000_000 - transfer_ns);
    assert_eq!(times.transfer_ns, transfer_ns + 10_008);
}

fn error_of(text: &str, spec: &str) -> ChunkError {
    let trace = read_text(text).expect("a well-formed text");
    let config = config(&format!("chunk_size=100+{spec}"));
    let result = run(&trace, &config, &LinkCosts::default(), &mut Exact::new(u64::MAX));
    result.map(|run| run.summary).expect_err("cannot be run")
}

const UNIT: &str = "unit u w=100\nalloc w 200 role=parameter\n";
const PASS: &str = "enter \"u->U : F\"\naccess w\nleave \"u->U : F\"\n";

#[test]
fn what_is_missing_is_said_with_the_way_to_get_it() {
    let gpu = "gpu=1GiB+host=1GiB";
    let case = |text: String, spec: &str| error_of(&text, spec).to_string();
    assert!(case("alloc a 5\n".to_owned(), gpu).contains("`fraglab gen`"));
    assert!(case(UNIT.to_owned(), gpu).contains("enters none"));
    let entered = format!("{UNIT}mark step0.forward\nenter u\nleave u\n");
    assert!(case(entered, gpu).contains("access events"));
    let whole = format!("{UNIT}mark step0.forward\n{PASS}");
    assert!(case(whole.clone(), "host=1GiB").contains("size of the GPU"));
    assert!(case(whole.clone(), &format!("{gpu}+rank=1")).contains("rank=1"));
    let small = case(whole.replace("w=100", "w=101"), gpu);
    assert!(small.contains("101") && small.contains("100"), "{small}");
    let host = case(whole.clone(), "gpu=100+host=500");
    assert!(host.contains("600 B") && host.contains("400 B"), "{host}");
    assert!(case(format!("{UNIT}{PASS}"), gpu).contains("outside of a forward pass"));
    let twice =
        format!("{UNIT}mark step0.forward\n{PASS}mark step0.backward\nmark step0.forward\n{PASS}");
    assert!(case(twice, gpu).contains("gradient accumulation"));
    let longer = format!(
        "{UNIT}mark step0.forward\n{PASS}mark step0.backward\nmark step0.optimizer\n\
         mark step1.forward\n{PASS}{PASS}{PASS}mark step1.backward\n"
    );
    assert!(case(longer, gpu).contains("warm-up"));
    assert!(
        case(format!("ranks 2\n{whole}"), &format!("{gpu}+with_async_move=true"))
            .contains("one GPU")
    );
    let auto = ChunkConfig { chunk_size: ChunkSize::Auto, ..config(gpu) };
    let trace = read_text(&whole).expect("a well-formed text");
    let error = run(&trace, &auto, &LinkCosts::default(), &mut Exact::new(1));
    assert_eq!(error.map(|run| run.log).expect_err("not settled"), ChunkError::ChunkSizeOpen);
}

#[test]
fn a_unit_of_many_parameters_lies_in_one_chunk() {
    let unit = Unit { elements: vec![30, 20, 10], ..Unit::default() };
    let run = Program::of(vec![unit; 3]).run(100 * F, ROOM);
    let fp16 = run.summary.lists.iter().find(|list| list.list == ChunkList::Fp16);
    assert_eq!(fp16.map(|list| list.chunks), Some(3), "60 of 100: no two in one");
    assert!((run.summary.utilization - 0.6).abs() < 1e-12);
}
