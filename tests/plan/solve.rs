//! What `solve` gives: valid packings, bounds that hold, proofs that are true, clear refusals.

use fraglab::plan::check::check;
use fraglab::plan::{
    BYTES_MAX, BadProblem, Binding, Buffer, Gap, Planner, Problem, SolveOptions, Solved, solve,
};
use proptest::prelude::*;

use super::brute::optimum;
use super::problems::{Limits, SMALL, problems};
use super::{needs, ticks};

fn options(planner: Planner, work_units: u64) -> SolveOptions {
    SolveOptions { planner, time: None, work_units: Some(work_units), ..SolveOptions::default() }
}

/// A packing that the validator accepts, with the heights that it finds, and bounds below them.
fn solved(problem: &Problem, options: &SolveOptions) -> Solved {
    let solved = solve(problem, options).expect("not contradictory");
    let packing = &solved.packing;
    let heights = check(problem, &packing.offsets_bytes).expect("valid");
    assert!(packing.pools.len() >= heights.len());
    for (at, pool) in packing.pools.iter().enumerate() {
        assert_eq!(pool.height_bytes, heights.get(at).copied().unwrap_or(0), "pool {at}");
        assert!(pool.lower_bound_bytes <= pool.height_bytes, "pool {at}");
        assert!(pool.lower_bound_bytes >= load(problem, at as u32), "pool {at}");
        assert_eq!(pool.proven, pool.lower_bound_bytes == pool.height_bytes, "pool {at}");
        let ordered = pool.binding.windows(2).all(|pair| pair[0].end <= pair[1].start);
        assert!(ordered, "pool {at}: {:?}", pool.binding);
    }
    solved
}

/// Bytes that are needed at a tick in a pool: those of aliases once.
pub(super) fn needed(problem: &Problem, pool: u32, tick: u64) -> u64 {
    let mut bytes = 0;
    let mut groups = std::collections::BTreeMap::<u32, Vec<(u64, u64)>>::new();
    for buffer in problem.buffers.iter().filter(|buffer| buffer.pool() == pool) {
        let Some((low, high)) = needs(problem, buffer, tick) else { continue };
        match super::extra(buffer).alias {
            None => bytes += high - low,
            Some(alias) => groups.entry(alias).or_default().push((low, high)),
        }
    }
    for mut ranges in groups.into_values() {
        ranges.sort_unstable();
        let mut end = 0;
        for (low, high) in ranges {
            bytes += high.saturating_sub(low.max(end));
            end = end.max(high);
        }
    }
    bytes
}

fn load(problem: &Problem, pool: u32) -> u64 {
    ticks(problem).into_iter().map(|tick| needed(problem, pool, tick)).max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn small_problems_agree_with_exhaustive_search(
        problem in problems(SMALL),
        work_units in prop_oneof![Just(0u64), Just(200), Just(20_000)],
    ) {
        for planner in [Planner::Best, Planner::GreedyBySize] {
            let Solved { packing, .. } = solved(&problem, &options(planner, work_units));
            for (at, pool) in packing.pools.iter().enumerate() {
                let lowest = optimum(&problem, at as u32, pool.height_bytes);
                prop_assert!(pool.lower_bound_bytes <= lowest, "pool {}: {:?}", at, pool);
                if pool.proven {
                    prop_assert_eq!(pool.height_bytes, lowest);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn large_problems_are_packed_validly(
        problem in problems(Limits { buffers: 300, ticks: 200, size_bytes: 4000, special: 10 }),
        seed: u64,
    ) {
        let options = SolveOptions { seed, ..options(Planner::Best, 300_000) };
        let one = solved(&problem, &options);
        // The same again, on any number of threads.
        prop_assert_eq!(&one, &solved(&problem, &options));
        prop_assert_eq!(&one, &solved(&problem, &SolveOptions { threads: 3, ..options.clone() }));
        solved(&problem, &SolveOptions { planner: Planner::GreedyBySize, ..options });
    }

    /// Of plain problems the binding intervals are checked tick by tick.
    #[test]
    fn bounds_bind_where_they_are_said_to(
        problem in problems(Limits { buffers: 60, ticks: 30, size_bytes: 50, special: 0 }),
    ) {
        let solved = solved(&problem, &options(Planner::GreedyBySize, 100_000));
        for pool in &solved.packing.pools {
            let load = load(&problem, 0);
            prop_assert_eq!(pool.lower_bound_bytes, load);
            prop_assert_eq!(pool.binding.is_empty(), load == 0);
            let first = ticks(&problem).into_iter().find(|&tick| needed(&problem, 0, tick) == load);
            prop_assert_eq!(pool.binding.first().map(|binding| binding.start), first);
            for &Binding { start, end, buffers } in &pool.binding {
                prop_assert!(start < end);
                let inside = ticks(&problem).into_iter().filter(|tick| (start..end).contains(tick));
                for tick in inside {
                    prop_assert_eq!(needed(&problem, 0, tick), load);
                }
                let live = problem.buffers.iter();
                let live = live.filter(|buffer| needs(&problem, buffer, start).is_some()).count();
                prop_assert_eq!(buffers, live as u64);
            }
        }
    }
}

fn of(buffers: Vec<Buffer>) -> Problem {
    Problem { buffers, ..Problem::default() }
}

fn refusal(problem: &Problem) -> BadProblem {
    solve(problem, &options(Planner::Best, 1000)).expect_err("contradictory")
}

#[test]
fn contradictions_are_named() {
    let plain = || Buffer::new(0, 4, 8);
    let fixed = |offset| plain().with(|extra| extra.fixed_offset_bytes = Some(offset));
    let alias = |buffer: Buffer| buffer.with(|extra| extra.alias = Some(u32::MAX));
    assert_eq!(
        refusal(&of(vec![plain(), Buffer::new(5, 4, 0)])),
        BadProblem::Backwards { buffer: 1, start: 5, end: 4 }
    );
    assert_eq!(
        refusal(&of(vec![plain().with(|extra| extra.alignment_bytes = 0)])),
        BadProblem::NoAlignment { buffer: 0 }
    );
    let aligned = fixed(8).with(|extra| extra.alignment_bytes = 16);
    assert_eq!(
        refusal(&of(vec![plain(), aligned])),
        BadProblem::FixedAlignment { buffer: 1, offset: 8, alignment: 16 }
    );
    let grainy = Problem { granularity_bytes: 512, ..of(vec![fixed(8)]) };
    assert_eq!(
        refusal(&grainy),
        BadProblem::FixedAlignment { buffer: 0, offset: 8, alignment: 512 }
    );
    assert_eq!(
        refusal(&of(vec![fixed(8), plain(), fixed(15)])),
        BadProblem::FixedOverlap { first: 0, second: 2 }
    );
    assert!(matches!(
        refusal(&of(vec![alias(fixed(8)), alias(plain()), alias(fixed(16))])),
        BadProblem::AliasConflict { .. }
    ));
    assert!(matches!(
        refusal(&of(vec![alias(plain()), alias(plain().with(|extra| extra.pool = 1))])),
        BadProblem::AliasConflict { .. }
    ));
    assert!(matches!(
        refusal(&Problem { granularity_bytes: 0, ..of(vec![plain()]) }),
        BadProblem::Whole(_)
    ));
    assert!(matches!(
        refusal(&of(vec![plain().with(|extra| extra.pool = u32::MAX)])),
        BadProblem::Whole(_)
    ));
}

#[test]
fn gaps_that_make_no_sense_are_named() {
    let with =
        |gaps: &[Gap]| of(vec![Buffer::new(2, 9, 8).with(|extra| extra.gaps = gaps.to_vec())]);
    let gap = |start, end| Gap { start, end, window_bytes: None };
    let window = |start, end, low, high| Gap { window_bytes: Some((low, high)), ..gap(start, end) };
    let wrong = [
        (with(&[gap(1, 3)]), 0),
        (with(&[gap(8, 10)]), 0),
        (with(&[gap(4, 4)]), 0),
        (with(&[gap(5, 4)]), 0),
        (with(&[gap(0, u64::MAX)]), 0),
        (with(&[gap(4, 6), gap(5, 7)]), 1),
        (with(&[gap(4, 6), gap(2, 3)]), 1),
        (with(&[gap(3, 4), window(4, 6, 0, 9)]), 1),
        (with(&[window(4, 6, 5, 4)]), 0),
        (with(&[window(4, 6, u64::MAX, u64::MAX)]), 0),
    ];
    for (problem, gap) in wrong {
        assert_eq!(refusal(&problem), BadProblem::Gap { buffer: 0, gap }, "{problem:?}");
    }
    for right in [with(&[gap(2, 9)]), with(&[window(2, 4, 0, 8), window(4, 9, 3, 3)])] {
        solved(&right, &options(Planner::Best, 1000));
    }
}

/// Numbers near 2^60 and 2^64 are packed or refused, and nothing overflows.
#[test]
fn huge_numbers_are_packed_or_refused() {
    let huge = [1, BYTES_MAX - 1, BYTES_MAX, BYTES_MAX + 1, 1 << 62, 1 << 63, u64::MAX];
    let mut packed = 0;
    let mut try_all =
        |problem: &Problem, within: bool| match solve(problem, &options(Planner::Best, 1000)) {
            Ok(solved) => {
                packed += 1;
                assert!(check(problem, &solved.packing.offsets_bytes).is_ok(), "{problem:?}");
            }
            Err(BadProblem::TooLarge { .. } | BadProblem::Whole(_)) => {
                assert!(!within, "refused: {problem:?}");
            }
            Err(BadProblem::FixedAlignment { .. } | BadProblem::FixedOverlap { .. }) => {}
            Err(other) => panic!("{other}: {problem:?}"),
        };
    for one in huge {
        try_all(&of(vec![Buffer::new(u64::MAX - 1, u64::MAX, one)]), one <= BYTES_MAX);
        try_all(&Problem { granularity_bytes: one, ..of(vec![Buffer::new(0, 1, 3)]) }, false);
        for other in huge {
            try_all(&of(vec![Buffer::new(0, one, other), Buffer::new(0, one, 1)]), false);
            try_all(&of(vec![Buffer::new(0, 9, one), Buffer::new(3, 9, other)]), false);
            let one_after_other = of(vec![Buffer::new(0, 3, one), Buffer::new(3, 9, other)]);
            // Sums are limited too, of what comes one after the other as well.
            try_all(&one_after_other, one.saturating_add(other) < BYTES_MAX);
            let aligned = Buffer::new(0, 9, 5).with(|extra| extra.alignment_bytes = one);
            try_all(&of(vec![aligned.clone(), Buffer::new(0, 9, other), aligned]), false);
            let fixed = Buffer::new(0, 9, one).with(|extra| extra.fixed_offset_bytes = Some(other));
            try_all(&of(vec![fixed, Buffer::new(0, 9, 5)]), false);
            let wish = Buffer::new(0, 9, 7).with(|extra| extra.hint_offset_bytes = Some(other));
            try_all(&of(vec![wish.clone(), wish, Buffer::new(0, 9, 5)]), true);
            let pair = [3, one, other].map(|alignment| {
                Buffer::new(0, 9, 5).with(|extra| {
                    extra.alignment_bytes = alignment;
                    extra.alias = Some(7);
                })
            });
            try_all(&of(pair.to_vec()), false);
        }
    }
    assert!(packed > 50, "{packed}");
}

/// What needs no room lies somewhere that its wishes allow.
#[test]
fn what_needs_no_room_has_an_offset_all_the_same() {
    let empty = Buffer::new(3, 3, 8);
    let fixed = empty.clone().with(|extra| extra.fixed_offset_bytes = Some(96));
    let member = |buffer: Buffer| buffer.with(|extra| extra.alias = Some(0));
    let problem = of(vec![
        Buffer::new(0, 9, 8),
        Buffer::new(0, 9, 0),
        empty.clone(),
        fixed,
        member(Buffer::new(0, 9, 8)),
        member(empty),
        Buffer::new(0, 9, 0).with(|extra| extra.pool = 2),
    ]);
    let solved = solved(&problem, &options(Planner::Best, 1000));
    assert_eq!(solved.packing.height_bytes(), 16);
    assert!(solved.packing.proven());
    let offsets = solved.packing.offsets_bytes;
    assert_eq!((offsets[3], offsets[4]), (96, offsets[5]));
    assert_eq!(solve(&Problem::default(), &options(Planner::Best, 9)).map(|s| s.work_units), Ok(0));
}

/// A fixed buffer that needs one byte at first and all of its own from the next tick on: what lies
/// above its first byte must not be there for longer. An early repair put the buffer of 2210 bytes
/// onto it.
#[test]
fn a_fixed_buffer_that_grows_is_kept_clear() {
    let fixed = |start, end, size, offset| {
        Buffer::new(start, end, size).with(|extra| extra.fixed_offset_bytes = Some(offset))
    };
    let window = Gap { start: 0, end: 1, window_bytes: Some((0, 1)) };
    let problem = of(vec![
        fixed(44, 45, 1, 1188),
        Buffer::new(0, 98, 1298).with(|extra| extra.hint_offset_bytes = Some(0)),
        fixed(24, 150, 1129, 1248),
        fixed(0, 42, 3697, 9996),
        Buffer::new(47, 48, 1),
        Buffer::new(48, 49, 1),
        Buffer::new(0, 112, 1189),
        fixed(150, 151, 300, 696),
        Buffer::new(42, 46, 2725),
        Buffer::new(0, 151, 2210),
        Buffer::new(0, 54, 1190),
        fixed(0, 2, 1182, 2928).with(|extra| extra.gaps = vec![window]),
    ]);
    for seed in 0..30 {
        for work_units in [0, 300, 3_000, 30_000, 300_000] {
            solved(&problem, &SolveOptions { seed, ..options(Planner::Best, work_units) });
        }
    }
}
