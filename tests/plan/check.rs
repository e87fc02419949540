//! The validator against the slow model.

use std::collections::BTreeMap;

use fraglab::plan::check::{Broken, beyond_capacity, check};
use fraglab::plan::{Buffer, Gap, Problem, SolveOptions, solve};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::problems::{Limits, SMALL, collide, problems};
use super::{are_aliases, extra, needs, ticks};

/// Heights by pool, tick by tick.
fn heights(problem: &Problem, offsets: &[u64]) -> Vec<u64> {
    let mut heights = BTreeMap::new();
    for tick in ticks(problem) {
        for (buffer, offset) in problem.buffers.iter().zip(offsets) {
            if let Some((_, high)) = needs(problem, buffer, tick) {
                let height = heights.entry(buffer.pool()).or_insert(0);
                *height = (offset + high).max(*height);
            }
        }
    }
    let pools = heights.keys().next_back().map_or(0, |&pool| pool + 1);
    (0..pools).map(|pool| heights.get(&pool).copied().unwrap_or(0)).collect()
}

/// Whether one offset alone is allowed.
fn allowed(problem: &Problem, index: usize, offset: u64) -> bool {
    let extra = extra(&problem.buffers[index]);
    offset.is_multiple_of(problem.granularity_bytes)
        && offset.is_multiple_of(extra.alignment_bytes)
        && extra.fixed_offset_bytes.is_none_or(|fixed| fixed == offset)
}

/// Whether two buffers may lie where they do as far as aliasing goes.
fn together(problem: &Problem, offsets: &[u64], one: usize, other: usize) -> bool {
    let (first, second) = (&problem.buffers[one], &problem.buffers[other]);
    let place = |index: usize| (offsets[index], problem.buffers[index].pool());
    !are_aliases(first, second) || place(one) == place(other)
}

/// All collisions as pool, tick and the two buffers.
fn collisions(problem: &Problem, offsets: &[u64]) -> Vec<(u32, u64, usize, usize)> {
    let pairs = (0..offsets.len()).flat_map(|two| (0..two).map(move |one| (one, two)));
    let mut found: Vec<_> = pairs
        .filter_map(|(one, two)| {
            let tick = collide(problem, (one, offsets[one]), (two, offsets[two]))?;
            Some((problem.buffers[one].pool(), tick, one, two))
        })
        .collect();
    found.sort_unstable();
    found
}

/// What `check` says is what the model says: of a good packing its heights, of a broken one a
/// breach that is there, and no earlier one. Gives the kind of the breach.
fn judge(problem: &Problem, offsets: &[u64]) -> &'static str {
    let alone = (0..offsets.len()).all(|index| allowed(problem, index, offsets[index]));
    let pairs = || (0..offsets.len()).flat_map(|two| (0..two).map(move |one| (one, two)));
    let joined = pairs().all(|(one, two)| together(problem, offsets, one, two));
    match check(problem, offsets) {
        Ok(found) => {
            assert!(alone && joined, "a breach was missed");
            assert_eq!(collisions(problem, offsets), []);
            assert_eq!(found, heights(problem, offsets));
            "none"
        }
        Err(Broken::Misaligned { buffer, offset_bytes, multiple_bytes }) => {
            let asked =
                [problem.granularity_bytes, extra(&problem.buffers[buffer]).alignment_bytes];
            assert!(asked.contains(&multiple_bytes));
            assert_eq!(offset_bytes, offsets[buffer]);
            assert_ne!(offset_bytes % multiple_bytes, 0);
            "misaligned"
        }
        Err(Broken::Moved { buffer, offset_bytes, fixed_bytes }) => {
            assert_eq!(extra(&problem.buffers[buffer]).fixed_offset_bytes, Some(fixed_bytes));
            assert_eq!(offset_bytes, offsets[buffer]);
            assert_ne!(offset_bytes, fixed_bytes);
            "moved"
        }
        Err(Broken::Apart { first, second, first_bytes, second_bytes, .. }) => {
            assert!(first < second && !together(problem, offsets, first, second));
            assert_eq!((first_bytes, second_bytes), (offsets[first], offsets[second]));
            "apart"
        }
        Err(Broken::Overlap { first, second, pool, tick, low_bytes, high_bytes }) => {
            assert!(alone && joined, "a breach of one buffer or of aliases comes first");
            let collisions = collisions(problem, offsets);
            assert!(collisions.contains(&(pool, tick, first, second)), "{collisions:?}");
            assert_eq!((pool, tick), (collisions[0].0, collisions[0].1), "there is an earlier one");
            let range = |index: usize| {
                let needed = needs(problem, &problem.buffers[index], tick).expect("in use");
                (offsets[index] + needed.0, offsets[index] + needed.1)
            };
            let (one, two) = (range(first), range(second));
            assert_eq!((low_bytes, high_bytes), (one.0.max(two.0), one.1.min(two.1)));
            "overlap"
        }
        Err(other) => panic!("{other}"),
    }
}

/// A packing that is valid or nearly so: that of the solver with some offsets changed, each by a
/// few bytes; the members of a group together or alone.
fn mutate(problem: &Problem, changes: &[(usize, i64, bool)]) -> Vec<u64> {
    let options = SolveOptions { time: None, work_units: Some(1_000), ..SolveOptions::default() };
    let mut offsets = solve(problem, &options).expect("valid").packing.offsets_bytes;
    for &(index, by, group) in changes.iter().filter(|_| !problem.buffers.is_empty()) {
        let index = index % problem.buffers.len();
        let moved = &problem.buffers[index];
        for (at, buffer) in problem.buffers.iter().enumerate() {
            if at == index || group && are_aliases(moved, buffer) {
                offsets[at] = offsets[at].saturating_add_signed(by * 2);
            }
        }
    }
    offsets
}

/// Judges random packings of random problems; gives how often each kind of answer came.
fn judged(
    cases: u32,
    packings: impl Strategy<Value = (Problem, Vec<u64>)>,
) -> BTreeMap<&'static str, u32> {
    let kinds = std::cell::RefCell::new(BTreeMap::new());
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, rng)
        .run(&packings, |(problem, offsets)| {
            *kinds.borrow_mut().entry(judge(&problem, &offsets)).or_insert(0) += 1;
            Ok(())
        })
        .expect("judged alike");
    kinds.into_inner()
}

#[test]
fn every_breach_is_found_and_nothing_valid_refused() {
    for limits in [SMALL, Limits { buffers: 14, ticks: 10, size_bytes: 8, special: 40 }] {
        let change = (any::<usize>(), -6i64..6, prop::bool::weighted(0.6));
        let packings = (problems(limits), vec(change, 0..4)).prop_map(|(problem, changes)| {
            let offsets = mutate(&problem, &changes);
            (problem, offsets)
        });
        let kinds = judged(3000, packings);
        for kind in ["none", "misaligned", "moved", "apart", "overlap"] {
            assert!(kinds.get(kind).is_some_and(|&count| count > 10), "{kind}: {kinds:?}");
        }
    }
}

/// Two groups, each with many members of which each needs a window, beside one another, and a few
/// wide buffers alone that may lie over both: what is shared is torn in every way.
#[test]
fn groups_with_windows_are_judged_alike() {
    let life = (0..12u64, 1..12u64);
    let members = vec((life.clone(), (0..9u64, 1..9u64), 0..2u32), 1..9);
    let alone = vec((life, 0..40u64, 1..30u64), 0..3);
    let packings = (members, alone, vec(0..4u64, 2)).prop_map(|(members, alone, places)| {
        let mut problem = Problem::default();
        let mut offsets = Vec::new();
        for ((start, ticks), (low, bytes), group) in members {
            let window = Gap { start, end: start + ticks, window_bytes: Some((low, low + bytes)) };
            let buffer = Buffer::new(start, start + ticks, low + bytes);
            problem.buffers.push(buffer.with(|extra| {
                extra.gaps = vec![window];
                extra.alias = Some(group);
            }));
            offsets.push(places[group as usize] + u64::from(group) * 14);
        }
        for ((start, ticks), offset, bytes) in alone {
            problem.buffers.push(Buffer::new(start, start + ticks, bytes));
            offsets.push(offset);
        }
        (problem, offsets)
    });
    let kinds = judged(5000, packings);
    for kind in ["none", "overlap"] {
        assert!(kinds.get(kind).is_some_and(|&count| count > 500), "{kind}: {kinds:?}");
    }
}

/// One buffer over several groups, which the ranges that are shared know as "several" only.
#[test]
fn a_buffer_over_several_groups_is_found() {
    let group = |alias| Buffer::new(0, 9, 4).with(|extra| extra.alias = Some(alias));
    let over = Buffer::new(1, 9, 16);
    let buffers = vec![group(0), group(1), group(2), group(3), over];
    let problem = Problem { buffers, ..Problem::default() };
    let overlap =
        Broken::Overlap { first: 0, second: 4, pool: 0, tick: 1, low_bytes: 0, high_bytes: 4 };
    assert_eq!(check(&problem, &[0, 4, 8, 12, 0]), Err(overlap));
    assert_eq!(check(&problem, &[0, 4, 8, 12, 16]), Ok(vec![32]));
}

#[test]
fn numbers_that_do_not_fit_are_named() {
    let problem = Problem { buffers: vec![Buffer::new(0, 1, 2)], ..Problem::default() };
    assert_eq!(check(&problem, &[]), Err(Broken::Count { buffers: 1, offsets: 0 }));
    assert_eq!(check(&problem, &[u64::MAX - 2]), Ok(vec![u64::MAX]));
    let too_high = |offset| Broken::TooHigh { buffer: 0, offset_bytes: offset, size_bytes: 2 };
    assert_eq!(check(&problem, &[u64::MAX - 1]), Err(too_high(u64::MAX - 1)));
    let wide = Problem { granularity_bytes: 1 << 63, ..problem.clone() };
    assert_eq!(check(&wide, &[1 << 63]), Err(too_high(1 << 63)));
    let far = Buffer::new(0, 1, 2).with(|extra| extra.pool = u32::MAX);
    let far = Problem { buffers: vec![far], ..Problem::default() };
    assert_eq!(check(&far, &[0]), Err(Broken::Pool { buffer: 0, pool: u32::MAX }));
}

#[test]
fn problems_that_make_no_sense_are_judged_without_panic() {
    let gap = |start, end, window_bytes| Gap { start, end, window_bytes };
    let gaps = vec![
        gap(9, 3, Some((8, 1))),
        gap(0, u64::MAX, Some((0, u64::MAX))),
        gap(2, 1, None),
        gap(u64::MAX, 0, Some((u64::MAX, u64::MAX))),
    ];
    let odd = Buffer::new(5, 3, 7).with(|extra| {
        extra.gaps = gaps.clone();
        extra.alignment_bytes = 0;
    });
    let long = Buffer::new(0, u64::MAX, 7).with(|extra| extra.gaps = gaps);
    let problem = Problem { buffers: vec![odd, long], granularity_bytes: 0, ..Problem::default() };
    assert_eq!(check(&problem, &[0, 0]), Ok(vec![7]));
    assert!(matches!(check(&problem, &[1, 0]), Err(Broken::Misaligned { buffer: 0, .. })));
}

#[test]
fn capacities_are_another_question() {
    let mut problem = Problem {
        buffers: vec![Buffer::new(0, 2, 8), Buffer::new(0, 2, 4).with(|extra| extra.pool = 2)],
        capacities_bytes: vec![Some(8), Some(0), Some(3)],
        ..Problem::default()
    };
    let heights = check(&problem, &[0, 0]).expect("valid");
    assert_eq!(heights, [8, 0, 4]);
    assert_eq!(beyond_capacity(&problem, &heights), [2]);
    problem.capacities_bytes = vec![Some(7), None];
    assert_eq!(beyond_capacity(&problem, &heights), [0]);
}
