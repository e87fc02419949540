//! Layouts at the start that no real allocator leaves, and those at unusual addresses.

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{
    CapacitySearch, Observe, Prepared, RunOptions, RunResult, run, smallest_capacity,
};
use fraglab::trace::{
    AddressPolicy, Block, Event, Op, Pool, PoolKind, StartBlock, StartLayout, StartSegment,
    StartState, Stream, Trace,
};
use fraglab::units::{BlockId, MIB, NameId, PoolId, SiteId, StreamId};

const PAGE_BYTES: u64 = 20 * MIB;

fn block(size_bytes: u64) -> Block {
    Block {
        size_bytes,
        stream: StreamId(0),
        site: SiteId::NONE,
        name: NameId::NONE,
        role: fraglab::trace::Role::Unknown,
    }
}

/// A segment of a large pool, wholly one live block, or wholly free.
#[derive(Clone, Copy)]
struct Segment {
    address: u64,
    size_bytes: u64,
    reservation: Option<u64>,
    live: bool,
}

fn ordinary(address: u64, size_bytes: u64) -> Segment {
    Segment { address, size_bytes, reservation: None, live: true }
}

fn run_of(reservation: u64, address: u64, size_bytes: u64) -> Segment {
    Segment { address, size_bytes, reservation: Some(reservation), live: true }
}

/// A trace that begins with `segments` and then asks for blocks.
fn late_trace(conf: &str, segments: &[Segment], asked_bytes: &[u64]) -> Trace {
    let mut trace = Trace { streams: vec![Stream { handle: 0 }], ..Trace::default() };
    let mut start = StartLayout::default();
    for segment in segments {
        let id = BlockId(trace.blocks.len() as u32);
        if segment.live {
            trace.blocks.push(block(segment.size_bytes));
        }
        start.segments.push(StartSegment {
            address: segment.address,
            size_bytes: segment.size_bytes,
            stream: StreamId(0),
            pool: PoolId::NONE,
            large: true,
            reservation: segment.reservation,
            blocks: 1,
        });
        start.blocks.push(StartBlock {
            size_bytes: segment.size_bytes,
            block: if segment.live { id } else { BlockId::NONE },
            state: if segment.live { StartState::Live } else { StartState::Free },
            guessed: false,
        });
    }
    for &size_bytes in asked_bytes {
        let id = BlockId(trace.blocks.len() as u32);
        trace.blocks.push(block(size_bytes));
        trace.events.push(Event { time_ns: 0, op: Op::Alloc(id) });
    }
    trace.header.settings = Some(conf.to_owned());
    trace.start = Some(start);
    fraglab::trace::validate(&trace).expect("valid");
    trace
}

/// Runs `caching` under the paranoid checker, which fails where memory overlaps.
fn result(trace: &Trace, change: impl Fn(&mut RunOptions)) -> RunResult {
    let spec: AllocSpec = "caching".parse().expect("a name");
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.paranoid = true;
    change(&mut options);
    let observed = run(trace, &spec, &options, Observe::default());
    observed.unwrap_or_else(|error| panic!("{error}")).result
}

fn layout_kept(result: &RunResult) -> bool {
    result.start.as_ref().expect("a start").layout_kept
}

/// No policy runs out of addresses, wherever the memory of before lies, or gives out what is held.
#[test]
fn policies_keep_clear_of_what_was_there() {
    let addresses = [65_536, 0x3_0200_0000, (1 << 43) - 16 * MIB, 0x7e00_0000_0000, 1 << 62];
    for address in addresses.into_iter().chain([(1 << 63) - 64 * MIB]) {
        let held = [ordinary(address, 40 * MIB), ordinary(address + 40 * MIB, 20 * MIB)];
        let trace = late_trace("", &held, &[30 * MIB; 20]);
        for policy in [AddressPolicy::Chunks, AddressPolicy::Ascending, AddressPolicy::Descending] {
            let result = result(&trace, |options| options.address_policy = Some(policy));
            assert!(layout_kept(&result));
            // 60 MiB were there, and each of the others is a segment of its own.
            let peak = result.peaks.reserved_bytes_peak;
            assert_eq!(peak, 660 * MIB, "{address:#x} {policy:?}");
        }
        let result = result(&trace, |options| options.address_seeds = 12);
        let spread = result.address_spread.expect("asked for");
        assert_eq!(spread.ooms_max, 0, "{address:#x}");
        let peaks = (spread.reserved_bytes_peak_min, spread.reserved_bytes_peak_max);
        assert_eq!(peaks, (660 * MIB, 660 * MIB), "{address:#x}");
    }
}

/// A reservation ends where something else begins: the second request would reach across.
#[test]
fn a_reservation_ends_below_an_ordinary_segment() {
    let base = 1 << 44;
    let held = [run_of(base, base, PAGE_BYTES), ordinary(base + 5 * PAGE_BYTES, PAGE_BYTES)];
    let trace =
        late_trace("expandable_segments:True", &held, &[PAGE_BYTES, 4 * PAGE_BYTES, PAGE_BYTES]);
    let result = result(&trace, |_| {});
    assert!(layout_kept(&result));
    assert_eq!(result.peaks.reserved_bytes_peak, 8 * PAGE_BYTES);
}

/// Where ordinary segments are asked for, they keep clear of the pages that were there.
#[test]
fn segments_keep_clear_of_reservations() {
    for base in [PAGE_BYTES, 1 << 44] {
        let held = [run_of(base, base, PAGE_BYTES), ordinary(base + 5 * PAGE_BYTES, PAGE_BYTES)];
        let trace = late_trace("", &held, &[2 * PAGE_BYTES; 8]);
        for policy in [AddressPolicy::Chunks, AddressPolicy::Ascending, AddressPolicy::Descending] {
            let result = result(&trace, |options| options.address_policy = Some(policy));
            assert!(layout_kept(&result));
            assert_eq!(result.peaks.reserved_bytes_peak, 18 * PAGE_BYTES, "{base:#x} {policy:?}");
        }
    }
}

/// Reservations that reach into each other cannot be taken over; their blocks are asked for.
#[test]
fn interleaved_reservations_are_not_taken_over() {
    let (low, high) = (1 << 44, (1 << 44) + 2 * PAGE_BYTES);
    let held = [
        run_of(low, low, PAGE_BYTES),
        run_of(high, high, PAGE_BYTES),
        run_of(low, low + 5 * PAGE_BYTES, PAGE_BYTES),
    ];
    let trace = late_trace("expandable_segments:True", &held, &[PAGE_BYTES; 4]);
    let result = result(&trace, |_| {});
    assert!(!layout_kept(&result));
    assert_eq!(result.peaks.reserved_bytes_peak, 7 * PAGE_BYTES);
}

/// A run of 2^35 pages is no reason to keep books for each.
#[test]
fn a_start_with_more_pages_than_any_device_is_not_taken_over() {
    let pages = Segment { live: false, ..run_of(PAGE_BYTES, PAGE_BYTES, PAGE_BYTES << 35) };
    let trace = late_trace("expandable_segments:True", &[pages], &[PAGE_BYTES]);
    assert!(!layout_kept(&result(&trace, |_| {})));
}

/// Memory without any block in use is held all the same.
#[test]
fn free_memory_at_the_start_counts() {
    let free = Segment { live: false, ..ordinary(1 << 46, 40 * MIB) };
    let trace = late_trace("", &[free], &[MIB]);
    let result = result(&trace, |_| {});
    assert!(layout_kept(&result));
    // A request of 1 MiB is of the small pool.
    assert_eq!(result.peaks.reserved_bytes_peak, 42 * MIB);
    let nothing_asked = late_trace("", &[free], &[]);
    let result = self::result(&nothing_asked, |_| {});
    assert_eq!(result.peaks.reserved_bytes_peak, 40 * MIB);
}

/// 800 TiB are 42 million pages of 20 MiB.
#[test]
fn requests_of_more_pages_than_any_device_has_are_refused() {
    let mut trace = late_trace("expandable_segments:True", &[], &[800 << 40, 5 * MIB]);
    trace.start = None;
    let result = result(&trace, |options| options.capacity_bytes = Some(900 << 40));
    assert_eq!(result.outcome.event_index, Some(0));
    assert_eq!(result.calls.create, 1, "only for the second request");
    assert_eq!(result.peaks.reserved_bytes_peak, PAGE_BYTES);
}

/// The driver's units are 2 MiB.
#[test]
fn pages_of_an_odd_number_of_mib_are_a_failure() {
    let mut trace = late_trace("", &[], &[5 * MIB]);
    trace.start = None;
    for (mib, fails) in [(21, true), (22, false)] {
        let conf = format!("expandable_segments:True,large_segment_size_mb:{mib}");
        trace.header.settings = Some(conf);
        let result = result(&trace, |_| {});
        let told = result.outcome.message.is_some_and(|told| told.contains("large_segment_size"));
        assert_eq!(told, fails, "{mib}");
    }
}

/// The memory of a deleted pool is released once more when its last block is back.
#[test]
fn deleted_pools_are_remembered_until_they_are_empty() {
    let mut trace = late_trace("", &[], &[]);
    trace.start = None;
    let kind = PoolKind::Capture;
    let pool = Pool { name: "p".to_owned(), kind, no_split: false, use_on_oom: false };
    trace.pools.push(pool);
    trace.blocks.extend([block(30 * MIB), block(40 * MIB)]);
    let (pool, first, second) = (PoolId(0), BlockId(0), BlockId(1));
    let ops = [
        Op::PoolEnter(pool),
        Op::Alloc(first),
        Op::Alloc(second),
        Op::PoolLeave(pool),
        Op::PoolDelete(pool),
        Op::Free(first),
        Op::EmptyCache,
        Op::Free(second),
        Op::EmptyCache,
    ];
    trace.events.extend(ops.map(|op| Event { time_ns: 0, op }));
    for (events, reserved_bytes) in [(6, 70 * MIB), (7, 40 * MIB), (8, 40 * MIB), (9, 0)] {
        let mut trace = trace.clone();
        trace.events.truncate(events);
        let result = result(&trace, |_| {});
        assert_eq!(result.final_levels.levels.reserved_bytes, reserved_bytes, "{events}");
    }
}

/// A device that could not hold what was there when the history begins is no answer, even if the
/// program needs less from there on.
#[test]
fn the_smallest_capacity_holds_what_was_there() {
    let held = [
        ordinary(0x7e00_0000_0000, 40 * MIB),
        Segment { live: false, ..ordinary(0x7e00_0400_0000, 20 * MIB) },
    ];
    // The 10 MiB go into the 20 MiB that are free.
    let trace = late_trace("", &held, &[10 * MIB]);
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let prepared = Prepared::new(&trace, &options);
    let smallest = |alloc: &str| {
        let spec: AllocSpec = alloc.parse().expect("a name");
        let found = smallest_capacity(&prepared, &spec, CapacitySearch::default());
        found.expect("runs").capacity_bytes
    };
    assert_eq!(smallest("caching"), Some(60 * MIB));
    // Asked for the 40 MiB first, it holds these and the 10 MiB.
    assert_eq!(smallest("native"), Some(50 * MIB));
}
