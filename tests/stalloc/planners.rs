//! The planners against a literal reading of their description.

use fraglab::plan::stalloc::files::ListedRequest;
use fraglab::plan::stalloc::group::{GroupError, GroupSettings, plan_groups};
use fraglab::plan::stalloc::size_classes::{Settings, SteadyIteration, plan};

use super::{activations, literal};
use crate::common::Rng;
use crate::common::stalloc_job::Dense;

/// Two iterations of random lives whose times are all different. `wide`: many sizes; some requests
/// cross into the next iteration.
fn random_job(rng: &mut Rng, count: usize, wide: bool) -> (Vec<ListedRequest>, SteadyIteration) {
    let half: Vec<(usize, usize, u64)> = {
        let mut times: Vec<usize> = (0..2 * count).collect();
        for at in (1..times.len()).rev() {
            times.swap(at, rng.below(at + 1));
        }
        let near = rng.below(4) == 0;
        if near {
            times.sort_unstable();
            for at in 0..count {
                let other = (2 * at + 1 + rng.below(8)).min(2 * count - 1);
                times.swap(2 * at + 1, other);
            }
        }
        let sizes = if wide { 4000 } else { 8 };
        let pairs = times.chunks(2).map(|pair| {
            let size = 1 + rng.below(sizes) as u64 * if wide { 7 } else { 700 };
            let crosses = rng.below(8) == 0;
            let (start, end) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            // One that crosses begins late and ends early in the next iteration.
            if crosses { (end, start + 2 * count, size) } else { (start, end, size) }
        });
        pairs.collect()
    };
    let period = 2 * count as u64;
    let base = 1 + rng.below(3) as u64;
    let mut requests = Vec::new();
    for iteration in 0..2 {
        let shift = base + iteration * period;
        requests.extend(half.iter().map(|&(start, end, size_bytes)| ListedRequest {
            start: start as u64 + shift,
            end: end as u64 + shift,
            size_bytes,
        }));
    }
    requests.sort_by_key(|request| request.start);
    let in_second = requests.iter().filter(|request| request.start >= base + period);
    let start = in_second.map(|request| request.start).min().expect("requests");
    let ended = requests.iter().filter(|request| request.end < base + 2 * period);
    let end = ended.map(|request| request.end).max().unwrap_or(start).max(start);
    (requests, SteadyIteration { start, end })
}

/// No two requests that are live at once overlap; both ends of a life count.
fn assert_disjoint(requests: &[ListedRequest], offsets: &[u64], why: &str) {
    for (at, one) in requests.iter().enumerate() {
        for (other_at, other) in requests.iter().enumerate().skip(at + 1) {
            let together = one.start < other.end && other.start < one.end;
            let apart = offsets[at] + one.size_bytes <= offsets[other_at]
                || offsets[other_at] + other.size_bytes <= offsets[at];
            assert!(!together || apart, "{why}: {one:?} and {other:?}");
        }
    }
}

#[test]
fn the_fast_planner_is_the_literal_one() {
    for seed in 0..400 {
        let mut rng = Rng(seed);
        let count = 1 + rng.below(if seed % 10 == 0 { 160 } else { 40 });
        let (requests, steady) = random_job(&mut rng, count, seed % 3 == 0);
        let fast = plan(&requests, &Settings { steady, wrap_safe: false });
        let slow = literal::plan(&requests, steady);
        assert_eq!(fast.offsets_bytes, slow.offsets, "seed {seed}: {requests:?} {steady:?}");
        assert_eq!((fast.peak_bytes, fast.layers), (slow.peak, slow.layers), "seed {seed}");
        assert!(fast.offsets_bytes.iter().all(|offset| offset % 512 == 0));
        assert_disjoint(&requests, &fast.offsets_bytes, &format!("seed {seed}"));
    }
}

#[test]
fn the_fast_planner_is_the_literal_one_on_a_dense_stage() {
    let log = Dense { layers: 2, micro_batches: 3, iterations: 3 }.log();
    let (requests, steady) = activations(&log);
    let fast = plan(&requests, &Settings { steady, wrap_safe: false });
    let slow = literal::plan(&requests, steady);
    assert_eq!(fast.offsets_bytes, slow.offsets);
    assert_eq!((fast.peak_bytes, fast.layers), (slow.peak, slow.layers));
}

/// Two bases of eleven requests each that are freed last in, first out, and a smaller group of nine
/// whose requests start where those of a base end.
fn trapezoids(bases: u64) -> (Vec<ListedRequest>, Vec<Option<u32>>) {
    let mut requests = Vec::new();
    let mut groups = Vec::new();
    for base in 0..bases {
        for at in 0..11 {
            let (start, end) = (1 + 20 * base + at, 310 + 3 * base - 10 * at);
            requests.push(ListedRequest { start, end, size_bytes: 512 });
            groups.push(Some(base as u32));
        }
    }
    for at in 0..9 {
        let (start, end) = (316 - 10 * at, 500 + at);
        requests.push(ListedRequest { start, end, size_bytes: 512 });
        groups.push(Some(bases as u32));
    }
    (requests, groups)
}

fn group_settings(faithful: bool) -> GroupSettings {
    let steady = SteadyIteration { start: u64::MAX, end: u64::MAX };
    GroupSettings { base: Settings { steady, wrap_safe: false }, faithful }
}

#[test]
fn a_group_is_fused_into_the_space_that_another_leaves() {
    let (requests, groups) = trapezoids(1);
    for faithful in [true, false] {
        let placement = plan_groups(&requests, &groups, &group_settings(faithful));
        let placement = placement.expect("a plan");
        // Twenty requests within the height of the eleven.
        assert_eq!(placement.peak_bytes, 11 * 512);
        assert_eq!(placement.layers, 1);
        assert_disjoint(&requests, &placement.offsets_bytes, "fused");
    }
}

#[test]
fn the_tool_fuses_a_group_twice() {
    let (requests, groups) = trapezoids(2);
    assert_eq!(requests.len(), 31);
    let error = plan_groups(&requests, &groups, &group_settings(true)).expect_err("aborts");
    assert_eq!(error, GroupError::Duplicates { duplicates: 9 });
    let placement = plan_groups(&requests, &groups, &group_settings(false)).expect("a plan");
    assert_eq!(placement.peak_bytes, 22 * 512, "both bases are live at once");
    assert_disjoint(&requests, &placement.offsets_bytes, "fused once");
}

#[test]
fn groups_of_any_kind_give_a_plan_without_overlaps() {
    for seed in 0..300 {
        let mut rng = Rng(seed);
        let count = 1 + rng.below(60);
        let (requests, steady) = random_job(&mut rng, count, seed % 3 == 0);
        // Whoever is live at one of a few instants is in its group.
        let last = requests.iter().map(|request| request.end).max().expect("requests");
        let instants: Vec<u64> = (0..1 + rng.below(6)).map(|_| rng.next() % last).collect();
        let group = |request: &ListedRequest| {
            let at = instants.iter().position(|&it| request.start < it && it < request.end);
            at.filter(|_| !request.size_bytes.is_multiple_of(3)).map(|at| at as u32)
        };
        let groups: Vec<Option<u32>> = requests.iter().map(group).collect();
        for faithful in [true, false] {
            let base = Settings { steady, wrap_safe: !faithful };
            let settings = GroupSettings { base, faithful };
            match plan_groups(&requests, &groups, &settings) {
                Ok(placement) => {
                    let why = format!("seed {seed} faithful={faithful}");
                    assert_disjoint(&requests, &placement.offsets_bytes, &why);
                    let tops = placement.offsets_bytes.iter().zip(&requests);
                    let top = tops.map(|(at, it)| at + it.size_bytes).max().expect("requests");
                    assert!(top <= placement.peak_bytes, "{why}");
                    assert!(placement.offsets_bytes.iter().all(|at| at % 512 == 0), "{why}");
                }
                Err(error) => assert!(faithful, "seed {seed}: {error}"),
            }
        }
    }
}

/// A plan that is wrap-safe can be replayed: the second iteration as it comes again overlaps
/// nothing that the first run of it left.
#[test]
fn wrap_safe_plans_can_be_replayed() {
    for seed in 0..200 {
        let mut rng = Rng(seed);
        let count = 1 + rng.below(40);
        let (requests, _) = random_job(&mut rng, count, false);
        let period = 2 * count as u64;
        let start = requests.iter().map(|request| request.start).min().expect("requests");
        let start = start - start % period + period;
        let begins = requests.iter().filter(|it| it.start >= start).map(|it| it.start).min();
        let start = begins.unwrap_or(start);
        let settings =
            Settings { steady: SteadyIteration { start, end: start + period }, wrap_safe: true };
        let placement = plan(&requests, &settings);
        let mut offsets = placement.offsets_bytes.clone();
        let mut all = requests.clone();
        for (request, offset) in requests.iter().zip(&placement.offsets_bytes) {
            // A life longer than an iteration meets its own next one wherever it lies.
            if request.start >= start && request.end - request.start < period {
                let (start, end) = (request.start + period, request.end + period);
                all.push(ListedRequest { start, end, ..*request });
                offsets.push(*offset);
            }
        }
        assert_disjoint(&all, &offsets, &format!("seed {seed}"));
    }
}
