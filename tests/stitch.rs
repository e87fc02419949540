//! The stitching allocator: the golden traces of specs/gmlake.md 8.1 with the figures that the
//! published class gave, calls by action (2.8), and convergence (8.2).

use std::fmt::Write;

use fraglab::alloc::ActionKind;
use fraglab::device::{CallCounts, CostProfile};
use fraglab::engine::{Observe, Observed, RunOptions, Status, run};
use fraglab::metrics::DecisionRow;
use fraglab::trace::{AddressPolicy, read_text};
use fraglab::units::MIB;

use crate::common::Rng;

const SHIPPED: &str = "stitch+policy=shipped+frag_limit=2MiB";
const RE_ALLOC: &str = "stitch+policy=shipped+frag_limit=2MiB+re_alloc=true";
const PAPER: &str = "stitch+frag_limit=2MiB";

/// Up to the fifth allocation of G1: 100 and 300 MiB are free, each in a segment with blocks in use.
const SCATTERED: &str = "
    alloc b1 400MiB
    alloc b2 600MiB
    free b1 b2
    alloc b3 200MiB
    alloc b4 100MiB
    alloc b5 300MiB
";

/// Runs a text with ascending addresses and every check.
fn observe(text: &str, spec: &str) -> Observed {
    let mut trace = read_text(text).expect("a valid text");
    trace.header.address_policy.get_or_insert(AddressPolicy::Ascending);
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.capacity_bytes = trace.header.device.capacity_bytes.or(Some(4000 * MIB));
    options.paranoid = true;
    let spec = spec.parse().expect("a specification");
    let observe = Observe { decisions: true, timeline: true, ..Observe::default() };
    run(&trace, &spec, &options, observe).unwrap_or_else(|error| panic!("{spec}: {error}"))
}

fn calls(text: &str, spec: &str) -> CallCounts {
    observe(text, spec).result.calls
}

/// Reserved, active and stitched MiB after the last event.
fn final_mib(observed: &Observed) -> (u64, u64, u64) {
    let levels = observed.result.final_levels.levels;
    let stitched_bytes = observed.result.counters["stitched_bytes"];
    (levels.reserved_bytes / MIB, levels.active_bytes / MIB, stitched_bytes / MIB)
}

fn rows(observed: &Observed, kind: ActionKind) -> Vec<DecisionRow> {
    observed.decisions.iter().filter(|row| row.action == kind.name()).copied().collect()
}

/// Addresses in the order of the rows of a kind.
fn addresses(observed: &Observed, kind: ActionKind) -> Vec<u64> {
    rows(observed, kind).iter().filter_map(|row| row.address).collect()
}

fn virtual_calls(reserve: u64, create: u64, map: u64) -> CallCounts {
    CallCounts { address_reserve: reserve, create, map, set_access: map, ..CallCounts::default() }
}

fn after_scattered(rest: &str) -> String {
    format!("{SCATTERED}{rest}")
}

#[test]
fn g1_stitches_the_largest_first() {
    let text = after_scattered("alloc b6 400MiB");
    for spec in [SHIPPED, PAPER] {
        let observed = observe(&text, spec);
        assert_eq!(final_mib(&observed), (1000, 1000, 400), "{spec}");
        assert_eq!(observed.result.calls, virtual_calls(3, 500, 700), "{spec}");
    }
    let high_limit = observe(&text, "stitch+policy=shipped");
    assert_eq!(final_mib(&high_limit), (1400, 1000, 0));
}

#[test]
fn g2_gets_the_missing_part_only_where_asked_to() {
    let text = "
        alloc r1 100MiB
        alloc r2 100MiB
        free r1 r2
        alloc r3 200MiB
        free r3
        alloc r4 400MiB
        free r4
        alloc r5 100MiB
        alloc r6 450MiB
    ";
    assert_eq!(final_mib(&observe(text, SHIPPED)).0, 600);
    for spec in [RE_ALLOC, PAPER] {
        let observed = observe(text, spec);
        assert_eq!(final_mib(&observed).0, 550, "{spec}");
        assert_eq!(observed.result.calls, virtual_calls(7, 275, 800), "{spec}");
    }
    let off = "stitch+policy=shipped+vmm_defragment=false";
    assert_eq!(final_mib(&observe(text, off)).0, 1250);
}

/// A free stitched block of exactly the size, and a larger primitive one.
#[test]
fn g3_shipped_cuts_a_primitive_block_and_paper_takes_the_exact_one() {
    let text = after_scattered("alloc b6 400MiB\nalloc big 500MiB\nfree b6 big\nalloc b7 400MiB");
    let taken = |spec| {
        let observed = observe(&text, spec);
        assert_eq!(final_mib(&observed), (1500, 1000, 400), "{spec}");
        let stitch = addresses(&observed, ActionKind::Stitch)[0];
        addresses(&observed, ActionKind::Alloc).last() == Some(&stitch)
    };
    assert!(!taken(SHIPPED));
    assert!(taken(PAPER));
}

#[test]
fn g4_a_stitched_block_serves_a_smaller_request_without_device_calls() {
    let six = after_scattered("alloc b6 400MiB");
    let text = format!("{six}\nfree b6\nalloc b7 350MiB\nalloc b8 50MiB\nfree b7 b8");
    let observed = observe(&text, SHIPPED);
    assert_eq!(observed.result.calls, virtual_calls(3, 500, 700));
    assert_eq!(observed.result.counters["stitch_reuses"], 1);
    let stitch = addresses(&observed, ActionKind::Stitch)[0];
    let allocs = addresses(&observed, ActionKind::Alloc);
    assert_eq!(allocs[6], stitch);
    // The tail of the stitched block is 50 MiB of the free 100 of the first segment.
    let segment = addresses(&observed, ActionKind::SegmentAlloc)[0];
    assert_eq!(allocs[7], segment + 350 * MIB);
    // Handed out in part, it does not hold what it does not use.
    let timeline = &observed.timeline;
    assert_eq!(timeline[timeline.len() - 4].active_bytes, 950 * MIB);
}

#[test]
fn g6_streams_are_not_stitched_together() {
    let text = "
        alloc a 100MiB stream=1
        alloc b 100MiB stream=2
        free a b
        alloc s 200MiB stream=1
    ";
    let observed = observe(text, SHIPPED);
    assert_eq!(final_mib(&observed), (400, 200, 0));
}

#[test]
fn g7_small_requests_do_not_come_in_chunks() {
    for spec in [SHIPPED, PAPER] {
        let observed = observe("alloc a 100\nalloc b 1MiB\nalloc c 1.0001MiB", spec);
        assert_eq!(final_mib(&observed).0, 22, "{spec}");
        assert_eq!(observed.result.calls, CallCounts { malloc: 1, ..virtual_calls(1, 10, 10) });
        let levels = observed.result.final_levels.levels;
        assert_eq!(levels.allocated_bytes, 512 + MIB + 2 * MIB, "{spec}");
    }
}

#[test]
fn g8_the_missing_part_alone_fits() {
    let text = "
        capacity 1000MiB
        alloc a 400MiB
        alloc b 400MiB
        alloc c 100MiB
        free a b
        alloc d 300MiB
        alloc e 300MiB
        alloc s 300MiB
    ";
    let refused = observe(text, SHIPPED).result;
    assert_eq!(refused.outcome.status, Status::Oom);
    assert_eq!((refused.counters["alloc_retries"], refused.counters["ooms"]), (1, 1));
    for spec in [RE_ALLOC, PAPER] {
        let observed = observe(text, spec);
        assert_eq!(observed.result.outcome.status, Status::Ok, "{spec}");
        assert_eq!(final_mib(&observed), (1000, 1000, 300), "{spec}");
    }
}

/// The published table says which chunks; that they are these is seen by what is left.
#[test]
fn g11_the_last_block_is_cut() {
    let text = "
        alloc a 100MiB
        alloc b 100MiB
        alloc c 100MiB
        free a b c
        alloc s 150MiB
        alloc x 50MiB
        alloc y 100MiB
    ";
    let observed = observe(text, SHIPPED);
    assert_eq!(observed.result.calls, virtual_calls(4, 150, 225));
    let segments = addresses(&observed, ActionKind::SegmentAlloc);
    let allocs = addresses(&observed, ActionKind::Alloc);
    assert_eq!(allocs[4], segments[1] + 50 * MIB, "the rest of b");
    assert_eq!(allocs[5], segments[0], "all of a");
}

/// Ours (B4): what a stitched block in use has mapped is not released. T has 400 of 600 MiB; the
/// other 200 are a whole free segment, and stay: reserved is what is mapped.
#[test]
fn g13_memory_that_is_mapped_is_reserved() {
    let text = "
        alloc a 200MiB
        alloc b 200MiB
        alloc c 200MiB
        free a b c
        alloc s 600MiB
        free s
        alloc t 400MiB
        alloc x 3500MiB
        alloc u 200MiB
        free u
        free t
        empty_cache
    ";
    let observed = observe(text, SHIPPED);
    assert_eq!(observed.result.outcome.status, Status::Oom);
    assert_eq!(observed.result.outcome.event_index, Some(9));
    let after = |event: usize| {
        let row = &observed.timeline[event];
        (row.reserved_bytes / MIB, row.active_bytes / MIB)
    };
    assert_eq!(after(9), (600, 400), "after the flush");
    assert_eq!(after(10), (600, 600), "what stayed is usable");
    assert_eq!(after(12), (600, 0));
    assert_eq!(after(13), (0, 0), "nothing was lost");
    // 3400 of the chunks of x's attempts came and went: 3400 of 3500 MiB do not fit twice.
    let calls = observed.result.calls;
    assert_eq!(calls.create, calls.release);
    assert_eq!((calls.address_reserve, calls.unmap, calls.address_free), (4, 4, 4));
}

/// Ours (B1): a stitch that cannot be mapped is undone.
#[test]
fn g14_a_stitch_that_fails_is_undone() {
    let text = format!("fail map all\n{SCATTERED}");
    assert_eq!(final_mib(&observe(&text, SHIPPED)).0, 0, "no segment either");
    // The first 500 maps are those of the two segments. The next ones fail: three attempts at each
    // of three levels to stitch, and two new segments, all in up to 8 rounds.
    let rounds = 8 * (3 * 3 + 2);
    let mut faults = String::new();
    for nth in 501..501 + rounds {
        writeln!(faults, "fail map {nth}").expect("a string");
    }
    let text = format!("{faults}{SCATTERED}alloc b6 400MiB\nalloc b7 300MiB\nalloc b8 100MiB");
    let observed = observe(&text, SHIPPED);
    assert_eq!(observed.result.outcome.status, Status::Oom);
    assert_eq!(observed.result.outcome.event_index, Some(7));
    let row = &observed.timeline[7];
    let mib = [row.reserved_bytes, row.active_bytes, row.allocated_bytes].map(|it| it / MIB);
    assert_eq!(mib, [1000, 600, 600]);
    assert_eq!(final_mib(&observed), (1000, 1000, 0), "what was free is free");
    let calls = observed.result.calls;
    // Nothing was mapped in any round, so nothing had to be unmapped (B13).
    let ranges = (calls.address_reserve, calls.address_free, calls.unmap);
    assert_eq!(ranges, (2 + rounds, rounds, 0));
    assert_eq!((calls.create, calls.release, calls.map), (500 + 400, 400, 500));
}

/// One transient failure costs one range (B2): the mapped beginning goes by one call.
#[test]
fn a_single_failure_costs_one_round() {
    let text = format!("fail map 601\n{SCATTERED}alloc b6 400MiB");
    let observed = observe(&text, SHIPPED);
    assert_eq!(final_mib(&observed), (1000, 1000, 400));
    let calls = observed.result.calls;
    assert_eq!((calls.address_reserve, calls.address_free, calls.unmap), (4, 1, 1));
    assert_eq!((calls.map, calls.set_access), (500 + 100 + 200, 800));
}

/// A chunk that was mapped but not made accessible is unmapped with the others.
#[test]
fn a_refused_access_leaves_no_mapping() {
    let text = format!("fail set_access 501\n{SCATTERED}alloc b6 400MiB");
    let observed = observe(&text, SHIPPED);
    let calls = observed.result.calls;
    assert_eq!((calls.address_reserve, calls.address_free, calls.unmap), (4, 1, 1));
    assert_eq!((calls.map, calls.set_access), (500 + 1 + 200, 700));
}

/// Calls by action: the table of specs/gmlake.md 2.8 for N = 50 chunks.
#[test]
fn actions_make_the_calls_of_the_table() {
    let counts = |text: &str| calls(text, SHIPPED);
    let segment = counts("alloc a 100MiB");
    assert_eq!(segment, virtual_calls(1, 50, 50), "new segment");
    let failing = counts("capacity 60MiB\nalloc a 100MiB");
    // Twice, with a flush between: 30 chunks come and go.
    assert_eq!(failing, CallCounts { create: 60, release: 60, ..CallCounts::default() });
    let two = "alloc a 60MiB\nalloc b 40MiB\nfree a b\n";
    let stitch = format!("{two}alloc s 100MiB\n");
    assert_eq!(counts(&stitch), virtual_calls(3, 50, 100), "stitch");
    let more = "free s\nalloc t 100MiB\nfree t\nalloc u 30MiB\nalloc v 30MiB\nfree u v\n";
    let more = format!("{stitch}{more}");
    assert_eq!(counts(&more), virtual_calls(3, 50, 100), "reuse, split, merge and free");
    let released = counts("alloc a 100MiB\nfree a\nempty_cache");
    let back = CallCounts { unmap: 1, release: 50, address_free: 1, ..segment };
    assert_eq!(released, back, "release a segment");
    let destroyed = counts(&format!("{stitch}free s\nalloc c 2MiB\nempty_cache"));
    // c is cut from the segment of 40, which stays; that of 60 goes, and the stitched block.
    let back = CallCounts { unmap: 2, release: 30, address_free: 2, ..virtual_calls(3, 50, 100) };
    assert_eq!(destroyed, back, "destroy a stitched block");
}

/// A mapping that fails half-way is undone: 29 chunks mapped. `shipped` maps the same 50 chunks in
/// another round; `paper` gives them back and asks again after a flush.
#[test]
fn a_segment_that_cannot_be_mapped_is_undone() {
    let undone = CallCounts { unmap: 1, address_free: 1, ..virtual_calls(2, 50, 79) };
    let again = CallCounts { create: 100, release: 50, ..undone };
    for (spec, calls, retries) in [(SHIPPED, undone, 0), (PAPER, again, 1)] {
        let observed = observe("fail map 30\nalloc a 100MiB", spec);
        assert_eq!(observed.result.calls, calls, "{spec}");
        assert_eq!(final_mib(&observed), (100, 100, 0), "{spec}");
        assert_eq!(observed.result.counters["alloc_retries"], retries, "{spec}");
    }
}

/// B6: a size between powers of two is a whole number of chunks all the same.
#[test]
fn rounding_between_powers_of_two_keeps_whole_chunks() {
    let spec = format!("{SHIPPED}+roundup_power2_divisions=16");
    let observed = observe("alloc a 16.5MiB", &spec);
    assert_eq!(observed.result.final_levels.levels.allocated_bytes, 18 * MIB);
    let spec = format!("{SHIPPED}+roundup_power2_divisions=4");
    let observed = observe("alloc a 2.3MiB\nalloc b 20.1MiB\nalloc c 800KiB", &spec);
    // 2.5 → 4, 24, and 0.875 MiB.
    let allocated_bytes = observed.result.final_levels.levels.allocated_bytes;
    assert_eq!(allocated_bytes, 4 * MIB + 24 * MIB + 896 * 1024);
}

/// B7: a request that may not be stitched is got in full, and nothing is flushed.
#[test]
fn re_alloc_leaves_requests_below_the_limit_alone() {
    let text = "alloc a 100MiB\nfree a\nalloc b 200MiB";
    let spec = "stitch+policy=shipped+frag_limit=512MiB+re_alloc=true";
    let observed = observe(text, spec);
    assert_eq!(final_mib(&observed), (300, 200, 0));
    assert_eq!(observed.result.calls, virtual_calls(2, 150, 150));
    assert_eq!(observed.result.counters["alloc_retries"], 0);
}

/// B11, as shipped: without chunks sizes and splits are those of chunks, not PyTorch's.
#[test]
fn without_chunks_sizes_stay_multiples_of_two_mebibytes() {
    let spec = "stitch+policy=shipped+vmm_defragment=false";
    let observed = observe("alloc a 1.5MiB\nalloc b 16.5MiB", spec);
    assert_eq!(final_mib(&observed), (20 + 18 - 18, 2 + 18, 0), "b is the rest of the segment");
    assert_eq!(observed.result.calls, CallCounts { malloc: 1, ..CallCounts::default() });
}

/// B8, B9: statistics are right, and wrong as the shipped ones where that is asked for.
#[test]
fn quirks_touch_statistics_only() {
    let text = format!("{SCATTERED}alloc b6 400MiB\nfree b3 b4 b5 b6\nempty_cache");
    let right = observe(&text, SHIPPED).result;
    let quirky = observe(&text, &format!("{SHIPPED}+quirks=true")).result;
    assert_eq!(right.counters["segment_allocs"], 2);
    assert_eq!(right.counters["stitched_bytes"], 0);
    assert_eq!(quirky.counters["segment_allocs"], 3, "the stitched block counts");
    assert_eq!(quirky.counters["segment_frees"], 2, "and is never taken off");
    assert_eq!(quirky.counters["stitched_bytes_drifted"], 400 * MIB);
    assert_eq!((right.calls, right.peaks), (quirky.calls, quirky.peaks));
}

/// As PyTorch: above the threshold old whole segments go before new memory is got.
#[test]
fn old_segments_go_above_the_threshold() {
    let text = "limit 1000MiB\nalloc a 200MiB\nalloc b 200MiB\nfree a\nalloc c 250MiB";
    assert_eq!(final_mib(&observe(text, SHIPPED)).0, 650);
    let collecting = observe(text, &format!("{SHIPPED}+garbage_collection_threshold=0.3"));
    assert_eq!(final_mib(&collecting).0, 450, "400 > 300: a's segment went");
    assert_eq!(collecting.result.counters["alloc_retries"], 0);
}

/// As PyTorch: a block that may not be split is not used for less, and goes when room is short.
#[test]
fn oversize_blocks_go_before_a_flush() {
    let text = "capacity 100MiB\nalloc a 100MiB\nfree a\nalloc b 30MiB";
    let observed = observe(text, &format!("{SHIPPED}+max_split_size_mb=40"));
    assert_eq!(final_mib(&observed), (30, 30, 0));
    assert_eq!(observed.result.counters["alloc_retries"], 0);
    let slack = "alloc a 100MiB\nfree a\nalloc b 90MiB";
    let observed = observe(slack, &format!("{SHIPPED}+max_split_size_mb=40"));
    assert_eq!(final_mib(&observed), (100, 100, 0), "within 20 MiB: handed out whole");
    assert_eq!(observed.result.final_levels.levels.allocated_bytes, 90 * MIB);
}

/// S5 of the published search: what waits for a stream is waited for before anything is released.
#[test]
fn paper_waits_before_it_releases() {
    let text = "
        capacity 400MiB
        alloc a 200MiB
        alloc b 100MiB stream=1
        free b
        defer a
        alloc c 200MiB
        free c
        alloc d 300MiB
    ";
    let observed = observe(text, PAPER);
    assert_eq!(observed.result.outcome.status, Status::Ok);
    let refused = rows(&observed, ActionKind::DeviceRefused);
    assert_eq!(refused.len(), 1, "c needs 200, 100 are left; after the wait a's block is there");
    let counters = &observed.result.counters;
    assert_eq!((counters["device_syncs"], counters["alloc_retries"]), (1, 0));
    // d: a's 200 and the missing 100, which are there.
    assert_eq!(final_mib(&observed), (400, 300, 300));
}

/// The stitched pool shrinks from its least recently used end, one block at a time.
#[test]
fn paper_evicts_the_least_recently_used() {
    // Two stitched blocks of 200 over the same memory cannot be; so four segments of 100, held two
    // by two.
    let text = "
        alloc a 100MiB
        alloc b 100MiB
        alloc c 100MiB
        alloc d 100MiB
        free a b
        alloc s 200MiB
        free c d
        alloc t 200MiB
        free t
        free s
        alloc big 400MiB
    ";
    let observed = observe(text, &format!("{PAPER}+stitch_limit=600MiB"));
    let stitches = addresses(&observed, ActionKind::Stitch);
    let gone = addresses(&observed, ActionKind::Unstitch);
    // 200 + 200 + 400 > 600: t, freed first, goes and that is enough.
    assert_eq!((stitches.len(), gone.len()), (3, 1));
    assert_eq!(gone[0], stitches[1]);
    assert_eq!(final_mib(&observed).2, 600);
    assert_eq!(observed.result.counters["stitch_evictions"], 1);
}

/// Blocks below `split_limit` serve their own size only.
#[test]
fn paper_does_not_split_below_its_limit() {
    let text = "alloc a 100MiB\nfree a\nalloc b 60MiB\nfree b\nalloc c 100MiB\nalloc d 2MiB";
    let free = observe(text, "stitch");
    assert_eq!(final_mib(&free).0, 120, "d has a segment of 20");
    let observed = observe(text, "stitch+split_limit=128MiB");
    assert_eq!(final_mib(&observed).0, 162, "60 anew, and d has a segment of 2");
    assert_eq!(observed.result.counters["s2_single"], 0);
}

#[test]
fn parameters_of_the_other_policy_are_refused_with_the_reason() {
    let error = |spec: &str| {
        let trace = read_text("alloc a 1MiB").expect("valid");
        let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
        let spec = spec.parse().expect("a specification");
        run(&trace, &spec, &options, Observe::default()).expect_err("refused").to_string()
    };
    let said = error("stitch+reuse_limit=3");
    assert!(said.contains("reuse_limit needs policy=shipped"), "{said}");
    let said = error("stitch+policy=shipped+stitch_limit=1GiB");
    assert!(said.contains("stitch_limit needs policy=paper"), "{said}");
    assert!(error("stitch+policy=none").contains("expected paper, shipped or best"));
    let said = error("stitch+policy=best+frag_limit=2MiB");
    assert!(
        said.ends_with("frag_limit needs policy=paper or shipped, this is policy=best"),
        "{said}"
    );
    let said = error("stitch+piece=2MiB");
    assert!(said.ends_with("piece needs policy=best, this is policy=paper"), "{said}");
    assert!(error("stitch+policy=best+colour=red").contains("it knows: policy, piece"));
    assert!(error("stitch+policy=best+piece=3MiB").contains("no multiple of 2 MiB"));
    assert!(error("stitch+policy=best+slack=2").contains("a number from 0 to 1"));
    assert!(error("stitch+policy=best+view_limit=much").contains("view_limit=much: "));
    assert!(error("stitch+frag_limit=many").contains("frag_limit=many: "));
    let said = error("stitch+frag_limit=128");
    assert!(
        said.ends_with(
            "frag_limit=128: 128 bytes are less than a chunk: give a unit, as in 128MiB"
        )
    );
    assert!(error("stitch+policy=best+view_limit=32").contains("give a unit"));
    assert!(error("stitch+policy=shipped+defrag_level=3").contains("expected 0, 1 or 2"));
    assert!(error("stitch+policy=shipped+reuse_limit=nan").contains("a number of at least 0"));
    assert!(error("stitch+policy=shipped+max_split_size_mb=1").contains("at least 20"));
    assert!(error("stitch+colour=red").contains("no parameter \"colour\""));
}

/// `count` allocations and their frees in random order, the same in every iteration.
fn periodic(seed: u64, count: usize, iterations: usize) -> String {
    let mut rng = Rng(seed);
    let mut text = format!("capacity 200GiB\nrepeat {iterations}\n");
    let mut live: Vec<usize> = Vec::new();
    let mut made = 0;
    while made < count || !live.is_empty() {
        if made < count && (live.is_empty() || rng.below(5) < 3) {
            // Half are of a few megabytes, half are large.
            let bound = [60, 700][rng.below(2)];
            let size_mib = 1 + rng.below(bound);
            writeln!(text, "alloc b{made} {size_mib}MiB").expect("a string");
            live.push(made);
            made += 1;
        } else {
            let block = live.swap_remove(rng.below(live.len()));
            writeln!(text, "free b{block}").expect("a string");
        }
    }
    text + "end\n"
}

/// An iteration of training: layers forward, whose results are kept for the way back, in which each
/// is recomputed; parameters of each are gathered for the time they are needed; then the optimizer.
fn training(seed: u64, layers: usize, iterations: usize) -> String {
    let mut rng = Rng(seed);
    let mut text = format!("capacity 200GiB\nrepeat {iterations}\n");
    let line = |text: &mut String, line: std::fmt::Arguments<'_>| {
        text.write_fmt(line).expect("a string");
        text.push('\n');
    };
    let hidden: Vec<usize> = (0..4).map(|_| 20 + rng.below(300)).collect();
    let work = |text: &mut String, name: &str| {
        line(text, format_args!("alloc w{name} {}MiB", hidden[0]));
        for (index, size_mib) in hidden.iter().enumerate() {
            line(text, format_args!("alloc x{name}_{index} {size_mib}MiB"));
        }
        for index in 0..hidden.len() {
            line(text, format_args!("free x{name}_{index}"));
        }
        line(text, format_args!("free w{name}"));
    };
    for layer in 0..layers {
        line(&mut text, format_args!("alloc kept{layer} {}MiB", hidden[1] / 2 + layer % 5));
        work(&mut text, &format!("f{layer}"));
    }
    for layer in (0..layers).rev() {
        line(&mut text, format_args!("alloc grad{layer} {}MiB", hidden[2]));
        work(&mut text, &format!("b{layer}"));
        line(&mut text, format_args!("free kept{layer}"));
    }
    for layer in 0..layers {
        line(&mut text, format_args!("alloc step{layer} {}MiB", hidden[2] * 2));
        line(&mut text, format_args!("free step{layer} grad{layer}"));
    }
    text + "end\n"
}

fn maps(text: &str, spec: &str) -> u64 {
    let trace = read_text(text).expect("valid");
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec = spec.parse().expect("a specification");
    let observed = run(&trace, &spec, &options, Observe::default()).expect("runs");
    assert_eq!(observed.result.outcome.status, Status::Ok);
    observed.result.calls.map
}

const PERIODIC: [&str; 5] = [
    "stitch+policy=best",
    "stitch",
    "stitch+frag_limit=32MiB",
    "stitch+policy=shipped",
    "stitch+policy=shipped+frag_limit=32MiB",
];

/// Programs that repeat stop calling the device: for training, from the fourth iteration on.
#[test]
fn training_needs_no_call_from_the_fourth_iteration_on() {
    for spec in PERIODIC {
        for seed in 0..4 {
            for layers in [6, 30] {
                let maps = |iterations| maps(&training(seed, layers, iterations), spec);
                let what = format!("{spec}, seed {seed}, {layers} layers");
                assert_eq!(maps(12), maps(3), "{what}");
            }
        }
    }
}

/// Random programs are harder. The published class, with its limit at 32 MiB, needed no call from
/// the fourth iteration on in 8 of 8 (specs/gmlake.md 8.2), and so does this. Nothing is said of
/// other limits, and of the published algorithm only for training: these settle as well.
#[test]
fn random_periodic_programs_settle() {
    for spec in PERIODIC {
        let settled = match spec {
            "stitch+policy=shipped+frag_limit=32MiB" => 3,
            "stitch+policy=best" => 4,
            _ => 8,
        };
        for seed in 0..4 {
            for count in [60, 300] {
                let maps = |iterations| maps(&periodic(seed, count, iterations), spec);
                assert_eq!(maps(14), maps(settled), "{spec}, seed {seed}, {count} allocations");
            }
        }
    }
}

/// With less room for stitched blocks than an iteration needs it never settles.
#[test]
fn a_limit_below_the_working_set_stitches_for_ever() {
    for spec in [
        "stitch+frag_limit=32MiB+stitch_limit=1GiB",
        "stitch+policy=shipped+frag_limit=32MiB+auto_gc=1GiB",
    ] {
        let counts: Vec<u64> = (8..12).map(|n| maps(&periodic(1, 300, n), spec)).collect();
        assert!(counts.windows(2).all(|pair| pair[1] > pair[0]), "{spec}: {counts:?}");
    }
}
