//! What must hold of every run of the room `chunk`, whatever the program.

use std::collections::BTreeMap;

use fraglab::chunk::{
    self, ChunkEvent, ChunkEventKind, ChunkRun, Exact, LinkCosts, Stage, Traffic,
};
use fraglab::trace::{Op, Trace, validate};

use super::build;
use super::model::Options;
use super::property::{config, run};
use super::random::Case;

/// Programs.
const PROGRAMS: u64 = if cfg!(debug_assertions) { 50 } else { 500 };
/// More than any program asks for.
const GPU_BYTES: u64 = 1 << 40;

/// Runs of random programs that were not refused from the start.
fn runs() -> impl Iterator<Item = (u64, Case, ChunkRun)> {
    (0..PROGRAMS).filter_map(|seed| {
        let case = Case::random(seed);
        let run = run(&case, GPU_BYTES).ok()?;
        Some((seed, case, run))
    })
}

fn bytes_live_at_the_end(trace: &Trace) -> u64 {
    let bytes = |block: fraglab::units::BlockId| trace.blocks[block.index()].size_bytes;
    trace.events.iter().fold(0, |live, event| match event.op {
        Op::Alloc(block) => live + bytes(block),
        Op::Free(block) => live - bytes(block),
        _ => live,
    })
}

#[test]
fn the_derived_trace_is_what_the_gpu_was_asked_for() {
    for (seed, case, run) in runs() {
        validate(&run.trace).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        let others = case.program.constant_bytes;
        let live = bytes_live_at_the_end(&run.trace);
        if run.summary.hard_stop.is_none() && case.program.skipped.is_empty() {
            let left = live - run.summary.gpu_chunk_bytes_final;
            assert_eq!(left, 0, "seed {seed}: chunks only, the constant {others} is freed");
        }
        let peak = run.trace.requested_bytes_peak();
        assert_eq!(peak, run.summary.gpu_bytes_peak, "seed {seed}");
        let again = super::property::run(&case, GPU_BYTES).expect("ran before");
        assert_eq!(
            (again.log, again.summary),
            (run.log, run.summary),
            "seed {seed}: the same twice"
        );
    }
}

/// Follows each chunk: from where to where it goes must fit.
fn follow(log: &[ChunkEvent]) -> Result<(), ChunkEvent> {
    #[derive(Clone, Copy, PartialEq)]
    enum Place {
        Somewhere,
        Gpu,
        Host,
    }
    let mut places: BTreeMap<u32, Place> = BTreeMap::new();
    for event in log {
        let place = places.get(&event.chunk).copied();
        let (fits, next) = match event.kind {
            ChunkEventKind::ToGpu => {
                (matches!(place, Some(Place::Somewhere | Place::Host)), Some(Place::Gpu))
            }
            ChunkEventKind::ToHost => {
                (matches!(place, Some(Place::Somewhere | Place::Gpu)), Some(Place::Host))
            }
            ChunkEventKind::Allocate => (place.is_none(), Some(Place::Somewhere)),
            ChunkEventKind::Drop => (place.is_some(), None),
            _ => continue,
        };
        if !fits {
            return Err(*event);
        }
        match next {
            Some(next) => places.insert(event.chunk, next),
            None => places.remove(&event.chunk),
        };
    }
    Ok(())
}

/// Spec 8.9: what goes up less what goes down is what there is more on the GPU.
#[test]
fn moves_add_up() {
    for (seed, case, run) in runs() {
        follow(&run.log).unwrap_or_else(|event| panic!("seed {seed}: {event:?} in {case:#?}"));
        let sum = |kind| -> u64 {
            let events = run.log.iter().filter(|event| event.kind == kind);
            events.map(|event| event.bytes).sum()
        };
        let moves = run.summary.moves;
        assert_eq!(moves.h2d_bytes, sum(ChunkEventKind::ToGpu), "seed {seed}");
        assert_eq!(moves.d2h_bytes, sum(ChunkEventKind::ToHost), "seed {seed}");
        let all = run.summary.gpu_chunk_bytes_final + run.summary.host_chunk_bytes_final;
        let made = sum(ChunkEventKind::Allocate) - sum(ChunkEventKind::Drop);
        if !case.options.cache && run.summary.hard_stop.is_none() {
            assert_eq!(all, made, "seed {seed}");
        }
    }
}

/// Spec 8.2: after the first ADAM there are 14 bytes for each element of a local chunk.
#[test]
fn chunk_bytes_are_conserved() {
    for (seed, case, run) in runs() {
        let Options { chunk_elements, ranks, rank, cache, .. } = case.options;
        let last = case.program.steps - 1;
        let ended = run.summary.hard_stop.is_none() && !case.program.skipped.contains(&last);
        if cache || !ended {
            continue;
        }
        let local = run.summary.lists[0].local_chunks;
        // A dummy of this rank, once its group was gathered, is an fp16 chunk too.
        let owns_dummy = rank >= ranks - run.summary.dummy_chunks;
        let gathered = owns_dummy && !case.options.saving;
        let expected = 14 * chunk_elements * local + if gathered { 2 * chunk_elements } else { 0 };
        let found = run.summary.gpu_chunk_bytes_final + run.summary.host_chunk_bytes_final;
        assert_eq!(found, expected, "seed {seed}: {case:#?}");
    }
}

/// Moves of chunks in forward and backward of the last step.
fn steady(run: &ChunkRun) -> u64 {
    let step = run.summary.steps.last().expect("programs have steps");
    let count = |traffic: Traffic| traffic.h2d + traffic.d2h;
    count(step.forward) + count(step.backward)
}

/// Spec 8.9: a static partition below what the tide leaves free never moves less.
#[test]
fn no_more_moves_than_with_a_static_partition() {
    let mut compared = 0;
    for seed in 0..PROGRAMS {
        let mut case = Case::random(seed);
        case.options.hybrid = false;
        case.options.ranks = 1;
        case.options.local_ranks = 1;
        case.options.rank = 0;
        case.options.cache = false;
        case.options.host_bytes = 1 << 40;
        case.options.fixed_split = false;
        case.program.skipped.clear();
        let dynamic = run(&case, GPU_BYTES).expect("the host has room");
        let quota = dynamic.summary.gpu_quota_bytes as i64;
        let fixed = quota * case.options.warmup as i64 / 1000;
        let half = 2 * case.options.chunk_elements as i64;
        let most = dynamic.summary.other_gpu_bytes.iter().max().copied().unwrap_or(0);
        // Below a chunk the partition would not be kept at all (spec 2.5).
        if fixed < half || fixed > quota - most - half {
            continue;
        }
        case.options.fixed_split = true;
        let fixed = run(&case, GPU_BYTES).expect("the host has room");
        assert!(steady(&dynamic) <= steady(&fixed), "seed {seed}: {case:#?}");
        compared += 1;
    }
    assert!(compared > PROGRAMS / 20, "{compared} of {PROGRAMS} are compared");
}

/// Without hybrid ADAM nothing of the optimizer's comes to the GPU (spec 2.3).
#[test]
fn without_hybrid_adam_its_chunks_stay_on_the_host() {
    for (seed, case, run) in runs() {
        if case.options.hybrid || case.options.host_bytes < 1 << 40 {
            continue;
        }
        let wide = 4 * case.options.chunk_elements;
        let ups = run.log.iter().filter(|event| event.kind == ChunkEventKind::ToGpu);
        assert!(ups.clone().all(|event| event.bytes < wide), "seed {seed}");
        assert!(run.log.iter().all(|event| event.stage != Stage::Adam
            || event.kind != ChunkEventKind::ToHost
            || event.bytes < wide));
        assert_eq!(config(&case.options).rank, run.summary.rank);
    }
}

/// A GPU no larger than the manager believes refuses now and then, as `overall_gpu_mem_ratio` may
/// be 1: the run goes on, and what was granted fits.
#[test]
fn a_gpu_may_refuse() {
    let mut refused = 0;
    for seed in 0..PROGRAMS {
        let case = Case::random(seed);
        let trace = build::trace(&case.program, &case.options);
        for fallback in [false, true] {
            let mut config = config(&case.options);
            config.quirks.oom_fallback = fallback;
            let capacity_bytes = case.options.gpu_bytes;
            let mut gpu = Exact::new(capacity_bytes);
            let run = chunk::run(&trace, &config, &LinkCosts::default(), &mut gpu);
            let Ok(run) = run else { continue };
            validate(&run.trace).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
            assert!(run.summary.gpu_bytes_peak <= capacity_bytes, "seed {seed}");
            assert_eq!(run.summary.refusals > 0, run.summary.first_refused.is_some());
            refused += run.summary.refusals;
        }
    }
    assert!(refused > 0, "some are refused");
}
