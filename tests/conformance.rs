//! One suite for every registered allocator: the contract of `src/alloc/mod.rs`.
//!
//! Programs are random but end by freeing everything and emptying the cache, so that every byte
//! must come back. Each runs with the paranoid checker, which shares no code with any allocator.

use std::fmt::Write;
use std::sync::Arc;

use fraglab::alloc::planned::PlanFiles;
use fraglab::alloc::registry;
use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, Observed, RunOptions, Status, run};
use fraglab::plan::stalloc::files::{PlanFile, PlannedRequest};
use fraglab::trace::{AddressPolicy, DeviceCall, Fault, FaultWhen, Trace, read_text};
use fraglab::units::MIB;

use crate::common::Rng;

/// Sizes around every border that allocators care about.
const SIZES: [u64; 15] = [
    1,
    511,
    513,
    100_000,
    MIB - 512,
    MIB,
    MIB + 1,
    2 * MIB,
    5 * MIB,
    10 * MIB - 1,
    10 * MIB,
    20 * MIB + 1,
    33 * MIB,
    64 * MIB,
    130 * MIB,
];

/// Most calls of one kind that are made to fail in turn; of more, every second, third, ...
const FAULTS_PER_CALL_MAX: u64 = 150;

/// A random program of about `steps` operations on three streams, in the text form. It frees
/// everything at the end, waits for all streams and empties the cache, twice: what a device did not
/// take back at first, it is given again.
fn program(seed: u64, steps: usize) -> Trace {
    let mut rng = Rng(seed);
    let mut text = String::new();
    let mut live: Vec<usize> = Vec::new();
    let mut waiting: Vec<usize> = Vec::new();
    let line = |text: &mut String, what: std::fmt::Arguments<'_>| {
        text.write_fmt(what).expect("a string takes it");
        text.push('\n');
    };
    for step in 0..steps {
        match rng.below(10) {
            0..=4 => {
                let size = SIZES[rng.below(SIZES.len())];
                let stream = rng.below(3) * 256;
                line(&mut text, format_args!("alloc b{step} {size} stream={stream}"));
                live.push(step);
            }
            5..=7 if !live.is_empty() => {
                let block = live.swap_remove(rng.below(live.len()));
                line(&mut text, format_args!("free b{block}"));
            }
            8 if !live.is_empty() => {
                let block = live.swap_remove(rng.below(live.len()));
                line(&mut text, format_args!("defer b{block}"));
                waiting.push(block);
            }
            9 if !waiting.is_empty() => {
                let block = waiting.swap_remove(rng.below(waiting.len()));
                line(&mut text, format_args!("done b{block}"));
            }
            _ if rng.below(20) == 0 => line(&mut text, format_args!("empty_cache")),
            _ => {}
        }
    }
    for block in live {
        line(&mut text, format_args!("free b{block}"));
    }
    for block in waiting {
        line(&mut text, format_args!("done b{block}"));
    }
    line(&mut text, format_args!("empty_cache"));
    line(&mut text, format_args!("empty_cache"));
    read_text(&text).expect("a valid program")
}

fn options(capacity_mib: u64) -> RunOptions {
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.capacity_bytes = Some(capacity_mib * MIB);
    options.paranoid = true;
    // Allocators that plan ahead know one of these programs, which helps a little with the others.
    let profile = program(0, 400);
    options.plans.insert(PROFILE.to_owned(), Arc::new(plan_of(&profile)));
    options.profiles.insert(PROFILE.to_owned(), Arc::new(profile));
    options
}

/// A plan for a program in STAlloc's form: its requests one behind the other in a pool of 350 MiB,
/// round and round. Most places are taken by others when their time comes.
fn plan_of(program: &Trace) -> PlanFiles {
    let static_reserved_bytes = 350 * MIB;
    let mut end = 0;
    let mut place = |size_bytes: u64| {
        let rounded_bytes = size_bytes.next_multiple_of(512);
        let start = if end + rounded_bytes > static_reserved_bytes { 0 } else { end };
        end = start + rounded_bytes;
        PlannedRequest { offset_bytes: Some(start), size_bytes }
    };
    let sizes = program.blocks.iter().map(|block| block.size_bytes).filter(|&size| size > 512);
    let requests: Vec<PlannedRequest> = sizes.map(&mut place).collect();
    let steady_requests = requests.len() as u64 / 2;
    let plan = PlanFile {
        unreleased: vec![5, 30],
        static_max_allocated_bytes: static_reserved_bytes,
        static_reserved_bytes,
        first_requests: requests.len() as u64 - steady_requests,
        steady_requests,
        var_peak_bytes: 4096,
        requests,
    };
    PlanFiles { source: "by hand".to_owned(), plan, ..PlanFiles::default() }
}

/// The name of the profile of allocators that plan ahead.
const PROFILE: &str = "program";

/// Allocators with parameters under which they are something else. The stitching ones stitch what
/// these programs ask for.
const VARIANTS: [&str; 14] = [
    "stitch+policy=best",
    "stitch+policy=best+piece=2MiB+slack=0+view_limit=0",
    "stitch+policy=best+piece=32MiB+slack=1",
    "stitch+policy=shipped",
    "stitch+frag_limit=2MiB",
    "stitch+frag_limit=20MiB+split_limit=20MiB+stitch_limit=200MiB",
    "stitch+policy=shipped+frag_limit=2MiB",
    "stitch+policy=shipped+frag_limit=2MiB+re_alloc=true+auto_gc=200MiB",
    "stitch+policy=shipped+frag_limit=20MiB+defrag_level=1+max_split_size_mb=30",
    "planned+trace=program",
    "planned+mode=stalloc+plan=program",
    "planned+mode=stalloc+plan=program+faithful=false",
    "planned+mode=stalloc+plan=program+planner=best+realign=iteration+inner=caching",
    "planned+mode=stalloc+plan=program+static_fallback=1+inner=best-fit",
];

fn every_allocator() -> Vec<AllocSpec> {
    // These programs have no steps that could be a profile.
    let names = registry::list().into_iter().map(|info| info.name).filter(|&it| it != "planned");
    let specs: Vec<AllocSpec> =
        names.chain(VARIANTS).map(|spec| spec.parse().expect("a specification")).collect();
    assert!(specs.len() > VARIANTS.len());
    specs
}

fn replay(trace: &Trace, spec: &AllocSpec, options: &RunOptions) -> Observed {
    let observe = Observe { decisions: true, ..Observe::default() };
    run(trace, spec, options, observe).unwrap_or_else(|error| panic!("{spec}: {error}"))
}

/// Nothing is left and nothing was lost.
fn assert_all_came_back(observed: &Observed, what: &str) {
    let result = &observed.result;
    let levels = result.final_levels;
    assert_eq!(levels.requested_bytes, 0, "{what}");
    assert_eq!(levels.levels.active_bytes, 0, "{what}");
    assert_eq!(levels.levels.reserved_bytes, 0, "{what}");
    assert_eq!(result.calls.malloc, result.calls.free, "{what}");
    assert_eq!(result.calls.create, result.calls.release, "{what}");
    // Addresses are no memory: PyTorch keeps a reservation that never got any.
    assert!(result.calls.address_reserve >= result.calls.address_free, "{what}");
}

#[test]
fn the_contract_holds_with_room_and_without() {
    for spec in every_allocator() {
        let mut refused = 0;
        for seed in 0..60 {
            let trace = program(seed, 400);
            for capacity_mib in [100_000, 700, 200] {
                let what = format!("{spec}, seed {seed}, {capacity_mib} MiB");
                let observed = replay(&trace, &spec, &options(capacity_mib));
                assert_all_came_back(&observed, &what);
                let peaks = observed.result.peaks;
                assert!(peaks.reserved_bytes_peak <= capacity_mib * MIB, "{what}");
                let oom = observed.result.outcome.status == Status::Oom;
                assert_eq!(oom, observed.result.counters["ooms"] > 0, "{what}");
                if capacity_mib == 100_000 {
                    assert!(!oom, "{what}: there is room for everything");
                    assert_eq!(peaks.requested_bytes_peak, trace.requested_bytes_peak(), "{what}");
                }
                refused += u64::from(oom);
            }
        }
        assert!(refused > 60, "{spec}: tight devices must refuse");
    }
}

#[test]
fn a_limit_is_obeyed() {
    for spec in every_allocator() {
        let trace = program(7, 400);
        for limit_mib in [0, 1, 64, 301] {
            let mut options = options(100_000);
            options.limit_bytes = Some(limit_mib * MIB);
            let observed = replay(&trace, &spec, &options);
            let reserved = observed.result.peaks.reserved_bytes_peak;
            // PyTorch checks the limit before it knows how many pages of 20 MiB a request needs.
            let slack = if observed.result.calls.map > 0 { 20 * MIB } else { 0 };
            assert!(reserved <= limit_mib * MIB + slack, "{spec}: {reserved} over {limit_mib} MiB");
            assert_eq!(observed.result.allocator.limit_bytes, Some(limit_mib * MIB));
            assert_all_came_back(&observed, &spec.to_string());
        }
    }
}

#[test]
fn a_failure_at_any_device_call_leaves_the_allocator_usable() {
    for spec in every_allocator() {
        let clean = program(3, 150);
        let calls = replay(&clean, &spec, &options(100_000)).result.calls;
        let counts = serde_json::to_value(calls).expect("counts");
        let failing = |call, when| {
            let mut trace = clean.clone();
            trace.header.faults = vec![Fault { call, when }];
            replay(&trace, &spec, &options(100_000))
        };
        let mut injected = 0;
        for call in DeviceCall::ALL {
            let count = counts[call.name()].as_u64().expect("a count");
            injected += count;
            let stride = count.div_ceil(FAULTS_PER_CALL_MAX).max(1);
            for nth in (1..=count).step_by(stride as usize) {
                let observed = failing(call, FaultWhen::Nth(nth));
                assert_all_came_back(&observed, &format!("{spec}, {} {nth} fails", call.name()));
            }
        }
        // An allocator may ask the device seldom: bfc obtains and returns ten regions.
        assert!(injected >= 20, "{spec}: {counts}");
        for call in [DeviceCall::Malloc, DeviceCall::AddressReserve, DeviceCall::Create] {
            if counts[call.name()] == 0 {
                continue;
            }
            let observed = failing(call, FaultWhen::All);
            assert_eq!(observed.result.outcome.status, Status::Oom);
            // Some get memory by two kinds of call: then the other kind still works.
            let mixed = counts["malloc"] != 0 && counts["create"] != 0;
            assert!(mixed || observed.result.peaks.reserved_bytes_peak == 0);
            assert_all_came_back(&observed, &format!("{spec}, every {} fails", call.name()));
        }
    }
}

#[test]
fn the_same_input_gives_the_same_decisions() {
    for spec in every_allocator() {
        let trace = program(11, 600);
        for policy in [AddressPolicy::Chunks, AddressPolicy::Ascending, AddressPolicy::Descending] {
            let mut options = options(500);
            options.address_policy = Some(policy);
            let first = replay(&trace, &spec, &options);
            let second = replay(&trace, &spec, &options);
            assert_eq!(first.decisions, second.decisions, "{spec}");
            // Watching changes nothing.
            options.paranoid = false;
            let unwatched = run(&trace, &spec, &options, Observe::default()).expect("runs");
            assert_eq!(unwatched.result.peaks, first.result.peaks, "{spec}");
            assert_eq!(unwatched.result.counters, first.result.counters, "{spec}");
        }
    }
}

/// The split of DESIGN 2 adds up exactly to reserved − requested at its event.
#[test]
fn the_split_adds_up() {
    for spec in every_allocator() {
        for seed in 100..130 {
            let trace = program(seed, 300);
            for capacity_mib in [100_000, 300] {
                let observe = Observe { timeline: true, ..Observe::default() };
                let observed = run(&trace, &spec, &options(capacity_mib), observe).expect("runs");
                let Some(split) = observed.result.split else { continue };
                let row = observed.timeline[split.at_event as usize];
                let sum = split.internal_bytes
                    + split.deferred_bytes
                    + split.hard_bytes
                    + split.soft_bytes
                    + split.stream_bytes;
                assert_eq!(sum, row.reserved_bytes - row.requested_bytes, "{spec}, seed {seed}");
                assert_eq!(split.deferred_bytes, row.active_bytes - row.allocated_bytes);
            }
        }
    }
}
