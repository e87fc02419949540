//! Why a capacity cannot be met, against exhaustive search.

use std::collections::BTreeMap;

use fraglab::engine::problem_from_minimalloc;
use fraglab::import::read_minimalloc_csv;
use fraglab::plan::reason::{Reason, irreducible};
use fraglab::plan::work::Work;
use fraglab::plan::{Buffer, Problem};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::brute::fits;
use super::problems::{SMALL, problems};
use super::solve::needed;

/// The problem that some of the buffers pose.
fn part(problem: &Problem, buffers: &[usize]) -> Problem {
    let buffers = buffers.iter().map(|&index| problem.buffers[index].clone()).collect();
    Problem { buffers, ..problem.clone() }
}

/// Whether some buffers do not fit and any fewer do.
fn is_irreducible(problem: &Problem, pool: u32, capacity: u64, buffers: &[usize]) -> bool {
    let without = |at: usize| [&buffers[..at], &buffers[at + 1..]].concat();
    !fits(&part(problem, buffers), pool, capacity)
        && (0..buffers.len()).all(|at| fits(&part(problem, &without(at)), pool, capacity))
}

/// Checks an answer and gives its kind.
fn judge(problem: &Problem, pool: u32, capacity: u64, work_units: u64) -> &'static str {
    let mut work = Work::new(work_units, None);
    let reason = irreducible(problem, pool, capacity, &mut work).expect("not contradictory");
    if let Reason::Load { buffers, .. }
    | Reason::Irreducible { buffers }
    | Reason::Reduced { buffers } = &reason
    {
        assert!(buffers.windows(2).all(|pair| pair[0] < pair[1]), "{buffers:?}");
        assert!(buffers.iter().all(|&index| problem.buffers[index].pool() == pool));
    }
    match reason {
        Reason::Load { tick, buffers, bytes } => {
            assert_eq!(needed(&part(problem, &buffers), pool, tick), bytes);
            assert!(bytes > capacity);
            assert!(is_irreducible(problem, pool, capacity, &buffers) || work_units == 0);
            "load"
        }
        Reason::Irreducible { buffers } => {
            assert!(is_irreducible(problem, pool, capacity, &buffers), "{buffers:?}");
            "irreducible"
        }
        Reason::Reduced { buffers } => {
            assert!(!fits(&part(problem, &buffers), pool, capacity), "{buffers:?}");
            "reduced"
        }
        Reason::Unknown => "unknown",
        Reason::Fits => {
            assert!(fits(problem, pool, capacity));
            "fits"
        }
    }
}

#[test]
fn reasons_agree_with_exhaustive_search() {
    let mut kinds = BTreeMap::new();
    let counted = std::cell::RefCell::new(&mut kinds);
    let config = Config { cases: 2500, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let cases = (problems(SMALL), 0..2u32, 0..24u64);
    TestRunner::new_with_rng(config, rng)
        .run(&cases, |(problem, pool, capacity)| {
            let kind = judge(&problem, pool, capacity, 1 << 24);
            prop_assert!(kind != "unknown" && kind != "reduced", "work was left");
            *counted.borrow_mut().entry(kind).or_insert(0) += 1;
            // Without work there is less of an answer, but none that is wrong.
            judge(&problem, pool, capacity, 0);
            Ok(())
        })
        .expect("judged alike");
    for kind in ["load", "irreducible", "fits"] {
        assert!(kinds.get(kind).is_some_and(|&count| count > 20), "{kind}: {kinds:?}");
    }
}

/// At tick 4 all but the last are live, 10 + 9 + 8 + 1 + 1 bytes: the three largest are enough.
#[test]
fn the_largest_of_what_is_live_is_named() {
    let sizes = [1, 9, 10, 1, 8];
    let mut buffers: Vec<_> =
        (0..).zip(sizes).map(|(start, size)| Buffer::new(start, 9, size)).collect();
    buffers.push(Buffer::new(9, 12, 20));
    let problem = Problem { buffers, ..Problem::default() };
    let reason = irreducible(&problem, 0, 26, &mut Work::unlimited());
    assert_eq!(reason, Ok(Reason::Load { tick: 4, buffers: vec![1, 2, 4], bytes: 27 }));
    let reason = irreducible(&problem, 0, 19, &mut Work::unlimited());
    assert_eq!(reason, Ok(Reason::Load { tick: 4, buffers: vec![1, 2, 4], bytes: 27 }));
    let reason = irreducible(&problem, 0, 18, &mut Work::unlimited());
    assert_eq!(reason, Ok(Reason::Load { tick: 4, buffers: vec![1, 2], bytes: 19 }));
    assert_eq!(irreducible(&problem, 0, 29, &mut Work::unlimited()), Ok(Reason::Fits));
    assert_eq!(irreducible(&problem, 3, 0, &mut Work::unlimited()), Ok(Reason::Fits));
}

/// Seven buffers of 6 bytes and two that are only fixed or aligned too high: one is reason enough.
#[test]
fn what_cannot_lie_low_enough_is_named_alone() {
    let mut buffers = vec![Buffer::new(0, 9, 6); 7];
    buffers.push(Buffer::new(20, 21, 1).with(|extra| extra.fixed_offset_bytes = Some(50)));
    let problem = Problem { buffers, ..Problem::default() };
    let reason = irreducible(&problem, 0, 50, &mut Work::unlimited());
    assert_eq!(reason, Ok(Reason::Irreducible { buffers: vec![7] }));
    assert_eq!(irreducible(&problem, 0, 51, &mut Work::unlimited()), Ok(Reason::Fits));
}

/// The load of a published problem is the least that it could need; a byte less is too little.
#[test]
fn a_published_problem_needs_its_load() {
    let Some(dir) = crate::common::shared("data/minimalloc") else { return };
    let bytes = std::fs::read(dir.join("challenging/A.1048576.csv")).expect("readable");
    let rows = read_minimalloc_csv(&bytes[..]).expect("well formed").rows;
    let problem = problem_from_minimalloc(&rows);
    let reason = irreducible(&problem, 0, 1_048_575, &mut Work::new(1, None));
    let Ok(Reason::Load { tick, buffers, bytes }) = reason else { panic!("{reason:?}") };
    assert_eq!(bytes, 1_048_576);
    assert_eq!(needed(&part(&problem, &buffers), 0, tick), bytes);
}
