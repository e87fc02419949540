//! The smallest capacity: hand-worked cases, and random programs against a scan of every capacity.

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::{CostProfile, GRANULARITY_BYTES};
use fraglab::engine::{
    CapacitySearch, Observe, Prepared, RunOptions, SmallestCapacity, Status, run, smallest_capacity,
};
use fraglab::trace::{Trace, read_text};
use fraglab::units::MIB;
use proptest::prelude::*;

/// Looks at every point below an answer of a program of less than 128 GiB.
const EVERY_POINT: CapacitySearch = CapacitySearch { check_points: u16::MAX };

fn options() -> RunOptions {
    RunOptions::new(CostProfile::shipped("h200").expect("ships"))
}

fn spec(name: &str) -> AllocSpec {
    name.parse().expect("a specification")
}

fn search(trace: &Trace, alloc: &str, how: CapacitySearch) -> SmallestCapacity {
    let options = options();
    smallest_capacity(&Prepared::new(trace, &options), &spec(alloc), how).expect("runs")
}

fn found(text: &str, alloc: &str) -> SmallestCapacity {
    search(&read_text(text).expect("parses"), alloc, CapacitySearch::default())
}

/// Whether a plain run on a device of this size meets every request.
fn completes(trace: &Trace, alloc: &str, capacity_bytes: u64) -> bool {
    let options = RunOptions { capacity_bytes: Some(capacity_bytes), ..options() };
    let observed = run(trace, &spec(alloc), &options, Observe::default()).expect("runs");
    observed.result.outcome.status == Status::Ok
}

/// On 82 MiB the third request empties the cache, `s` gets a segment of its own, and after another
/// flush 12 + 70 MiB fit. From 100 MiB on the first 40 MiB stay and `s` pins them: 40 + 70 MiB do
/// not fit below 110 MiB.
const PINNED: &str = "\
alloc a 40MiB
free a
alloc x 60MiB
alloc s 12MiB
free x
alloc y 70MiB
";

#[test]
fn less_may_be_enough_where_more_is_not() {
    let trace = read_text(PINNED).expect("parses");
    let by_hand = |mib: u64| (82..100).contains(&mib) || mib >= 110;
    for mib in (60..130).step_by(2) {
        assert_eq!(completes(&trace, "caching", mib * MIB), by_hand(mib), "{mib} MiB");
    }
    let smallest = found(PINNED, "caching");
    assert_eq!(smallest.capacity_bytes, Some(82 * MIB));
    assert_eq!(smallest.over_requested_bytes, Some(0));
    assert!(smallest.non_monotone);
    assert_eq!(smallest.refused_bytes_max, Some(108 * MIB));
    let native = found(PINNED, "native");
    assert_eq!((native.capacity_bytes, native.non_monotone), (Some(82 * MIB), false));
}

#[test]
fn what_is_charged_may_be_more_than_what_is_reserved() {
    // Three mallocs of 1 MiB take a unit of 2 MiB each; five of 512 KiB share two units.
    let large = found("alloc a 1MiB\nalloc b 1MiB\nalloc c 1MiB\n", "native");
    assert_eq!(large.capacity_bytes, Some(6 * MIB));
    assert_eq!(large.over_requested_bytes, Some(3 * MIB));
    assert_eq!(large.over_requested, Some(1.0));
    assert_eq!(large.refused_bytes_max, Some(4 * MIB));
    let small = found("repeat 5\n  alloc _ 512KiB\nend\n", "native");
    assert_eq!(small.capacity_bytes, Some(4 * MIB));
    assert_eq!(small.over_requested_bytes, Some(3 * MIB / 2));
}

#[test]
fn an_allocator_that_takes_half_needs_twice() {
    // 100 MiB within half of the device: 200 MiB, far above the reserved peak.
    let text = "conf per_process_memory_fraction:0.5\nalloc a 100MiB\n";
    assert_eq!(found(text, "caching").capacity_bytes, Some(200 * MIB));
}

#[test]
fn the_capacity_of_the_trace_does_not_bound_the_search() {
    let text = "capacity 16MiB\nalloc a 100MiB\n";
    assert_eq!(found(text, "native").capacity_bytes, Some(100 * MIB));
}

#[test]
fn nothing_needs_nothing() {
    let smallest = found("mark step0\n", "caching");
    assert_eq!((smallest.capacity_bytes, smallest.over_requested), (Some(0), None));
}

#[test]
fn where_no_capacity_is_enough_it_says_why() {
    let limited = found("limit 50MiB\nalloc a 40MiB\nalloc b 40MiB\n", "caching");
    assert_eq!(limited.capacity_bytes, None);
    assert_eq!((limited.over_requested_bytes, limited.over_requested), (None, None));
    let message = limited.message.expect("a reason");
    assert!(message.contains("event 1 asked for 40 MiB"), "{message}");
    assert!(message.contains("limit 50 MiB"), "{message}");
    let faulty = found("fail malloc all\nalloc a 40MiB\n", "native");
    assert!(faulty.message.is_some_and(|message| message.contains("without end")));
}

#[test]
fn the_recorded_limit_holds_while_the_device_grows() {
    // The limit makes the second request empty the cache, on any device.
    let text = "limit 100MiB\nalloc a 40MiB\nfree a\nalloc b 70MiB\n";
    assert_eq!(found(text, "caching").capacity_bytes, Some(70 * MIB));
}

#[test]
fn the_answer_hangs_on_no_thread() {
    let trace = read_text(PINNED).expect("parses");
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("starts");
        pool.install(|| search(&trace, "caching", CapacitySearch::default()))
    };
    assert_eq!(on(1), on(4));
}

/// A program of a few blocks on two streams as text, from numbers.
fn program(steps: &[(u8, u8, bool)]) -> String {
    const SIZES: [&str; 8] = ["700KiB", "1MiB", "3MiB", "9MiB", "12MiB", "20MiB", "26MiB", "37MiB"];
    let mut text = String::new();
    let mut live: Vec<usize> = Vec::new();
    let mut deferred: Vec<usize> = Vec::new();
    for (at, &(what, which, other_stream)) in steps.iter().enumerate() {
        let line = match what % 12 {
            8 | 9 if !live.is_empty() => {
                format!("free b{}", live.remove(usize::from(which) % live.len()))
            }
            10 if !live.is_empty() => {
                let block = live.remove(usize::from(which) % live.len());
                deferred.push(block);
                format!("defer b{block}")
            }
            10 if !deferred.is_empty() => format!("done b{}", deferred.remove(0)),
            11 if which % 8 == 0 => "empty_cache".to_owned(),
            // Never more than a few at once, so that the scan of every capacity stays short.
            _ if live.len() >= 4 => {
                format!("free b{}", live.remove(usize::from(which) % live.len()))
            }
            size => {
                live.push(at);
                let stream = if other_stream && which % 4 == 0 { " stream=1" } else { "" };
                format!("alloc b{at} {}{stream}", SIZES[usize::from(size) % SIZES.len()])
            }
        };
        text.push_str(&line);
        text.push('\n');
    }
    text
}

fn programs() -> impl Strategy<Value = String> {
    let step = (any::<u8>(), any::<u8>(), any::<bool>());
    prop::collection::vec(step, 1..40).prop_map(|steps| program(&steps))
}

/// The smallest capacity of all, by trying each from nothing on.
fn scanned(trace: &Trace, alloc: &str, up_to_bytes: u64) -> Option<u64> {
    let mut sizes = (0..=up_to_bytes).step_by(GRANULARITY_BYTES as usize);
    sizes.find(|&bytes| completes(trace, alloc, bytes))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn looking_everywhere_finds_what_a_scan_finds(text in programs()) {
        let trace = read_text(&text).expect("parses");
        for alloc in ["native", "caching"] {
            let smallest = search(&trace, alloc, EVERY_POINT);
            let answer = smallest.capacity_bytes.expect("no limit");
            prop_assert_eq!(scanned(&trace, alloc, answer), Some(answer), "{} {}", alloc, text);
            prop_assert!(alloc != "native" || !smallest.non_monotone, "{}", text);
        }
    }

    #[test]
    fn the_answer_completes_and_the_point_below_does_not(text in programs()) {
        let trace = read_text(&text).expect("parses");
        for alloc in ["native", "caching", "expandable"] {
            let smallest = search(&trace, alloc, CapacitySearch::default());
            let answer = smallest.capacity_bytes.expect("no limit");
            prop_assert!(completes(&trace, alloc, answer), "{} {} {}", alloc, answer, text);
            if answer > 0 {
                let below = answer - GRANULARITY_BYTES;
                prop_assert!(!completes(&trace, alloc, below), "{} {} {}", alloc, answer, text);
            }
            let over = smallest.over_requested_bytes.expect("an answer");
            prop_assert_eq!(answer - over, trace.requested_bytes_peak());
        }
    }
}
