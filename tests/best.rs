//! The policy `best` of `stitch`: hand-worked programs, and properties that follow from its rules.
//!
//! Costs are those of the H200: a piece is 16 MiB, a second address for it costs 29.5 µs, and a MiB
//! of new memory in its smallest unit 21.6 µs.

use std::fmt::Write;

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::{CostProfile, DeviceCall};
use fraglab::engine::{Observe, RunOptions, RunResult, Status, run};
use fraglab::trace::read_text;
use fraglab::units::MIB;

use crate::common::Rng;

fn options() -> RunOptions {
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.paranoid = true;
    options
}

fn replay_with(options: &RunOptions, text: &str, params: &str) -> RunResult {
    let trace = read_text(text).expect("a valid program");
    let spec: AllocSpec = format!("stitch+policy=best{params}").parse().expect("a specification");
    run(&trace, &spec, options, Observe::default()).expect("runs").result
}

fn replay(text: &str, params: &str) -> RunResult {
    replay_with(&options(), text, params)
}

/// The H200 with other costs of access: `per_piece_us` at every size.
fn with_access_cost(per_piece_us: f64) -> RunOptions {
    let mut options = options();
    let mut profile = options.profile.clone();
    profile.calls.insert(DeviceCall::SetAccess, vec![(2.0, per_piece_us)]);
    let json = serde_json::to_string(&profile).expect("serialises");
    options.profile = CostProfile::from_json(&json).expect("a profile");
    options
}

fn reserved_mib(result: &RunResult) -> u64 {
    result.peaks.reserved_bytes_peak / MIB
}

/// Three ranges of 64 MiB, four pieces each; the first and the last are free when 128 are asked for.
/// Nothing new is needed: eight pieces get a second address, for 236 µs against 128 MiB saved.
#[test]
fn free_pieces_that_lie_apart_serve_one_request() {
    let text = "alloc a 64MiB\nalloc b 64MiB\nalloc c 64MiB\nfree a c\nalloc d 128MiB\n";
    let result = replay(text, "");
    assert_eq!(reserved_mib(&result), 192);
    assert_eq!((result.calls.create, result.calls.map), (12, 12 + 8));
    assert_eq!(result.calls.set_access, 12 + 1, "one call for the view");
    assert_eq!(result.calls.address_reserve, 3 + 1);
    assert_eq!(result.counters["stitches"], 1);
    // Freed and asked for again, the view serves without a call; a smaller block fits it too, one of
    // half its size does not, but fits home.
    let again = format!("{text}free d\nalloc e 128MiB\nfree e\nalloc f 100MiB\nfree f\n");
    let again = replay(&again, "");
    assert_eq!(again.calls, result.calls);
    assert_eq!(again.counters["stitch_reuses"], 2);
}

/// ```text
///   a  │ b 8 │ free 56          │   of b's piece the back is free: 8 MiB
///   c  │ e 60              │ 4  │
/// ```
/// 60 MiB: 56 are free in one range from the middle of a piece, 4 more are created and mapped
/// behind them. The back of c's last piece is of no use: only one piece can give its back.
#[test]
fn a_view_may_begin_inside_a_piece() {
    let text =
        "alloc a 64MiB\nalloc c 64MiB\nfree a c\nalloc b 8MiB\nalloc e 60MiB\nalloc f 60MiB\n";
    let result = replay(text, "");
    assert_eq!(reserved_mib(&result), 128 + 4);
    assert_eq!((result.calls.create, result.calls.map), (8 + 1, 9 + 5));
    assert_eq!(result.counters["stitches"], 1);
}

/// The same with the free part at the front of a piece: the view ends there.
///
/// ```text
///   a  │ free 56          │ b 8 │   b took the rest of what x left
///   c  │ free 64                │
/// ```
#[test]
fn a_view_may_end_inside_a_piece() {
    let text = "alloc x 56MiB\nalloc y 64MiB\nfree x y\nalloc x 56MiB\nalloc y 64MiB\n\
                alloc k 64MiB\nfree x y\nalloc d 120MiB\n";
    // 56 MiB are pieces of 16, 16, 16 and 8; nothing else is created for d.
    let result = replay(text, "");
    assert_eq!(reserved_mib(&result), 56 + 64 + 64);
    assert_eq!(result.counters["stitches"], 1);
    let cut = "alloc a 64MiB\nfree a\nalloc x 56MiB\nalloc b 8MiB\nalloc c 64MiB\nfree x c\n\
               alloc d 120MiB\n";
    // Of a's last piece the front 8 MiB are free: 64 of c, 48 whole ones of a, and these 8.
    let result = replay(cut, "");
    assert_eq!(reserved_mib(&result), 128);
    assert_eq!((result.calls.create, result.calls.map), (8, 8 + 8));
    assert_eq!(result.counters["stitches"], 1);
}

/// ```text
///   │ a 40, free │ w 480                 │ b │ x 38, free  │ 26 without memory │
/// ```
/// 42 MiB are asked for. At home 4 more behind x would do. A view of a's three pieces and one of x
/// saves these for four second addresses: 4 x 29.5 = 118 µs, and 4 MiB cost 4 x 21.7 = 87 µs. With
/// access for 7 µs a piece it is 4 x 8.2 = 33 µs against 4 x 11.0 = 44 µs.
#[test]
fn a_view_must_be_worth_its_cost() {
    let text = "alloc a 40MiB\nalloc w 480MiB\nalloc b 2MiB\nalloc x 38MiB\nfree a x\n\
                alloc c 42MiB\n";
    let result = replay(text, "+slack=0+piece=16MiB");
    assert_eq!((result.counters["stitches"], reserved_mib(&result)), (0, 564));
    let cheap = with_access_cost(7.0);
    let result = replay_with(&cheap, text, "+slack=0+piece=16MiB");
    assert_eq!((result.counters["stitches"], reserved_mib(&result)), (1, 560));
}

/// A limit of 100 MiB. 60 are deferred and 30 in use when 80 are asked for: with 10 more that the
/// limit allows only 70 could be had, so nobody waits. For 50 waiting is enough.
#[test]
fn the_device_is_waited_for_only_if_that_can_be_enough() {
    let text = "limit 100MiB\nalloc a 60MiB\nalloc b 30MiB\ndefer a\nalloc c 80MiB\n";
    let result = replay(text, "");
    assert_eq!((result.outcome.status, result.counters["device_syncs"]), (Status::Oom, 0));
    let result = replay(&format!("{text}alloc d 50MiB\n"), "");
    assert_eq!((result.counters["ooms"], result.counters["device_syncs"]), (1, 1));
    assert_eq!(reserved_mib(&result), 90);
}

/// What another stream freed may be had after a wait: 64 MiB of it are given back and created anew.
#[test]
fn other_streams_give_their_pieces_back() {
    let text = "limit 128MiB\nalloc a 128MiB stream=1\nfree a\nalloc b 64MiB stream=2\n";
    let result = replay(text, "");
    assert_eq!(result.outcome.status, Status::Ok);
    assert_eq!((result.calls.release, result.counters["device_syncs"]), (4, 1));
    assert_eq!(result.final_levels.levels.reserved_bytes, 128 * MIB);
}

/// Views of 128 MiB with a limit of 0: each goes as soon as it is idle and another one is made.
/// A view that comes again raises the limit, here from 0 to 0; a quarter of the reserved memory is
/// the least, so both may stay once 4 x 256 MiB are reserved.
#[test]
fn idle_views_go_the_least_recently_used_first() {
    let mut text = String::new();
    for name in ["a", "k", "b", "l", "c", "m", "d", "n"] {
        writeln!(text, "alloc {name} 64MiB").expect("a string takes it");
    }
    text.push_str("free a b\nalloc v 128MiB\nfree v\nfree c d\nalloc w 256MiB\nfree w\n");
    let result = replay(&text, "+view_limit=0");
    // 512 MiB are reserved: 128 of addresses may stay. The view of 256 is over that, so making it
    // evicted the one of 128; it stays itself until another one is made.
    assert_eq!(result.counters["stitches"], 2);
    assert_eq!(result.counters["stitch_evictions"], 1);
    assert_eq!(result.counters["stitched_bytes"], 256 * MIB);
    let roomy = replay(&text, "");
    assert_eq!(roomy.counters["stitch_evictions"], 0);
}

/// A program of allocs of whole units above 1 MiB on one stream, sizes in MiB.
fn random_program(seed: u64, steps: usize) -> String {
    let mut rng = Rng(seed);
    let mut text = String::new();
    let mut live: Vec<usize> = Vec::new();
    for step in 0..steps {
        if live.len() > 3 && rng.below(100) < 48 {
            let block = live.swap_remove(rng.below(live.len()));
            writeln!(text, "free b{block}").expect("a string takes it");
        } else {
            let most = if rng.below(4) == 0 { 100 } else { 12 };
            let size_mib = 2 * (1 + rng.below(most));
            writeln!(text, "alloc b{step} {size_mib}MiB").expect("a string takes it");
            live.push(step);
        }
    }
    text
}

/// In pieces of one unit every free byte can be part of any view: with no more device memory than
/// the program ever has in use at once, nothing is refused.
#[test]
fn in_the_smallest_pieces_nothing_is_lost() {
    for seed in 0..60 {
        let text = random_program(seed, 400);
        let trace = read_text(&text).expect("a valid program");
        let spec: AllocSpec = "stitch+policy=best+piece=2MiB".parse().expect("a specification");
        let mut options = options();
        options.capacity_bytes = Some(trace.requested_bytes_peak());
        let result = run(&trace, &spec, &options, Observe::default()).expect("runs").result;
        assert_eq!(result.outcome.status, Status::Ok, "seed {seed}: {:?}", result.outcome);
        assert_eq!(result.peaks.reserved_bytes_peak, trace.requested_bytes_peak(), "seed {seed}");
    }
}
