//! What shows only from inside: counts of chunks, the order of destruction, and the invariants
//! after every one of many random operations.

use std::collections::{BTreeMap, VecDeque};

use super::Stitch;
use super::chunks::Run;
use super::gmlake::Gmlake;
use super::stitched::Stitched;
use crate::alloc::spec::{AllocSpec, Params};
use crate::alloc::{
    Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle, LayoutBlock, Request,
};
use crate::device::sim::addresses::Addresses;
use crate::device::{Device, DeviceCall, Faulty, Sim};
use crate::trace::{Fault, FaultWhen};
use crate::units::{BlockId, MIB, StreamId};

/// A device, deferred frees, and what was logged.
#[derive(Clone)]
struct World {
    device: Faulty<Sim>,
    ended: VecDeque<Handle>,
    waiting: VecDeque<Handle>,
    log: Vec<Action>,
}

impl Env for World {
    type Device = Faulty<Sim>;
    const LOG: bool = true;

    fn device(&mut self) -> &mut Faulty<Sim> {
        &mut self.device
    }

    fn next_completed(&mut self) -> Option<Handle> {
        self.ended.pop_front()
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.ended.pop_front().or_else(|| self.waiting.pop_front())
    }

    fn wait_completed_of(&mut self, _wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        None
    }

    fn log(&mut self, action: Action) {
        self.log.push(action);
    }
}

/// An allocator in its world, with blocks by name.
#[derive(Clone)]
struct Bench {
    stitch: Gmlake,
    world: World,
    live: BTreeMap<u32, Handle>,
}

impl Bench {
    fn new(spec: &str, capacity_mib: u64, faults: Vec<Fault>) -> Bench {
        let spec: AllocSpec = spec.parse().expect("a specification");
        let inputs = BuildInputs { stream_handles: vec![0, 256, 512], ..BuildInputs::default() };
        let sim = Sim::new(Some(capacity_mib * MIB), None, Addresses::ascending());
        Bench {
            stitch: match Stitch::build(Params::new(&spec), &inputs) {
                Ok(Stitch::Gmlake(stitch)) => stitch,
                other => panic!("{other:?}"),
            },
            world: World {
                device: Faulty::new(sim, faults),
                ended: VecDeque::new(),
                waiting: VecDeque::new(),
                log: Vec::new(),
            },
            live: BTreeMap::new(),
        }
    }

    /// The allocator of the golden traces (spec 8.1).
    fn golden() -> Bench {
        Bench::new("stitch+policy=shipped+frag_limit=2MiB", 4000, Vec::new())
    }

    fn checked(&self, what: &str) {
        self.stitch.check().unwrap_or_else(|broken| panic!("{what}: {broken}"));
    }

    fn try_alloc(&mut self, name: u32, size_bytes: u64, stream: u32) -> bool {
        let request = Request { block: BlockId(name), size_bytes, stream: StreamId(stream) };
        let handed = self.stitch.malloc(&mut self.world, request);
        self.checked("malloc");
        handed.is_ok_and(|handle| self.live.insert(name, handle).is_none())
    }

    fn alloc(&mut self, name: u32, size_mib: u64) {
        assert!(self.try_alloc(name, size_mib * MIB, 0), "{name} is refused");
    }

    fn free(&mut self, names: &[u32]) {
        for name in names {
            let handle = self.live.remove(name).expect("a live block");
            self.stitch.free(&mut self.world, handle);
            self.checked("free");
        }
    }

    fn defer(&mut self, name: u32) {
        let handle = self.live.remove(&name).expect("a live block");
        self.world.waiting.push_back(handle);
        self.stitch.defer(&mut self.world, handle);
        self.checked("defer");
    }

    /// Deferred blocks end in the order of their frees; an allocation looks.
    fn end(&mut self) {
        self.world.ended.append(&mut self.world.waiting);
    }

    /// Used and free chunks of a stitched block, and whether all are free (spec 1.1).
    fn counts(&self, id: usize) -> (u32, u32) {
        let stitched: &Stitched = &self.stitch.stitched[id];
        let count = |run: Run| run.count;
        let used = stitched.parts.iter().map(|&part| {
            let run = self.stitch.blocks[part as usize].run();
            run.map_or(0, count)
        });
        let total: u32 = stitched.runs.iter().copied().map(count).sum();
        let busy = stitched.runs.iter().map(|&run| self.stitch.chunks.busy().count_of(run));
        (used.sum(), total - busy.sum::<u32>())
    }

    fn layout(&self) -> Vec<LayoutBlock> {
        let mut layout = Vec::new();
        self.stitch.layout(&mut |block| layout.push(block));
        layout
    }
}

/// G1 up to its fifth allocation: 100 and 300 MiB are free.
fn scattered(bench: &mut Bench) {
    bench.alloc(1, 400);
    bench.alloc(2, 600);
    bench.free(&[1, 2]);
    bench.alloc(3, 200);
    bench.alloc(4, 100);
    bench.alloc(5, 300);
}

#[test]
fn g4_counts_used_and_free_chunks() {
    let mut bench = Bench::golden();
    scattered(&mut bench);
    bench.alloc(6, 400);
    assert_eq!(bench.counts(0), (200, 0));
    bench.free(&[6]);
    assert_eq!(bench.counts(0), (0, 200));
    bench.alloc(7, 350);
    assert_eq!(bench.counts(0), (175, 25));
    bench.alloc(8, 50);
    assert_eq!(bench.counts(0), (175, 0));
    bench.free(&[7]);
    assert_eq!(bench.counts(0), (0, 175));
    assert!(bench.stitch.stitched[0].busy_chunk(&bench.stitch.chunks).is_some());
    bench.free(&[8]);
    assert_eq!(bench.counts(0), (0, 200));
}

/// B1: a stitch that fails leaves everything as it was.
#[test]
fn g14_rolls_back_to_the_same_layout() {
    let call = DeviceCall::AddressReserve;
    // Three attempts at three levels and two new segments, each in 8 rounds.
    let faults = (3..3 + 88).map(|nth| Fault { call, when: FaultWhen::Nth(nth) }).collect();
    let mut bench = Bench::new("stitch+policy=shipped+frag_limit=2MiB", 4000, faults);
    scattered(&mut bench);
    let before = bench.layout();
    assert!(!bench.try_alloc(6, 350 * MIB, 0));
    assert_eq!(bench.layout(), before);
}

/// What a stitched block has is listed where it lies: 300 of 350 MiB in the second segment, then 50
/// of the 100 in the first, with the request's bytes in the same order.
#[test]
fn the_layout_shows_a_stitched_block_in_its_parts() {
    let mut bench = Bench::golden();
    scattered(&mut bench);
    assert!(bench.try_alloc(6, 350 * MIB - 1000, 0));
    let layout = bench.layout();
    let parts: Vec<(u64, u64, u64)> = layout
        .iter()
        .filter(|block| block.block == BlockId(6))
        .map(|it| (it.address - it.segment_address, it.size_bytes, it.requested_bytes))
        .collect();
    let expected = [(300 * MIB, 50 * MIB, 50 * MIB - 1000), (300 * MIB, 300 * MIB, 300 * MIB)];
    assert_eq!(parts, expected);
    let all: u64 = layout.iter().map(|block| block.size_bytes).sum();
    assert_eq!(all, 1000 * MIB, "every byte once");
}

/// Two stitched blocks of 200: s (1, 2), whose free was deferred, and t (3, 4), freed before that
/// free ended. Both have a busy chunk.
fn two_fragmented() -> Bench {
    let mut bench = Bench::golden();
    for name in 1..=4 {
        bench.alloc(name, 100);
    }
    bench.free(&[1, 2]);
    bench.alloc(10, 200);
    bench.free(&[3, 4]);
    bench.alloc(11, 200);
    bench.defer(10);
    bench.free(&[11]);
    bench.end();
    // The lowest of the free blocks of 100, then the next two.
    bench.alloc(20, 2);
    bench.alloc(21, 100);
    bench.alloc(22, 100);
    bench
}

/// A deferred free does not renew the event (spec 3.1, 2), so s is the older one; four times the
/// 50 MiB wanted are enough at level 0, which is one block (spec 3.3).
#[test]
fn idle_blocks_go_in_the_order_of_their_events_until_it_is_enough() {
    let mut bench = two_fragmented();
    let addresses = [0, 1].map(|id| bench.stitch.stitched[id].address);
    let gone_bytes = bench.stitch.collect_idle(&mut bench.world, 0, 50 * MIB);
    bench.checked("level 0");
    assert_eq!(gone_bytes, 200 * MIB);
    let gone = bench.world.log.iter().filter(|action| action.kind == ActionKind::Unstitch);
    assert_eq!(gone.map(|action| action.address).collect::<Vec<u64>>(), addresses[..1]);
}

/// Level 0 leaves those alone whose chunks are all free, whatever is wanted; level 1 does not.
#[test]
fn free_blocks_go_from_level_1_on() {
    let mut bench = two_fragmented();
    bench.free(&[20, 21, 22]);
    assert_eq!(bench.stitch.collect_idle(&mut bench.world, 0, 1000 * MIB), 0);
    assert_eq!(bench.stitch.collect_idle(&mut bench.world, 1, MIB), 400 * MIB);
    bench.checked("level 1");
    assert_eq!(bench.stitch.stitched_bytes, 0);
}

/// Random operations, on a device that refuses one in `refused` calls of each kind, if that is given.
fn random_programs(spec: &str, refused: Option<u64>) {
    for (seed, capacity_mib) in [(1u64, 100_000), (2, 1500), (3, 700)] {
        let nth = (1..=40).filter_map(|times| refused.map(|every| times * every));
        let faults = nth.flat_map(|nth| {
            DeviceCall::ALL.into_iter().map(move |call| Fault { call, when: FaultWhen::Nth(nth) })
        });
        let mut bench = Bench::new(spec, capacity_mib, faults.collect());
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for step in 0..3000u32 {
            let pick = |bench: &Bench, at: u64| {
                bench.live.keys().nth(at as usize % bench.live.len().max(1)).copied()
            };
            match below(20) {
                0..=9 => {
                    // Large ones of few sizes, so that stitched blocks are handed out again.
                    let size_bytes = match below(4) {
                        0 => 1 + below(MIB),
                        1 => 1 + below(20 * MIB),
                        _ => 40 * MIB * (1 + below(6)),
                    };
                    let stream = u32::from(below(8) == 0);
                    bench.try_alloc(step, size_bytes, stream);
                }
                10..=16 => {
                    if let Some(name) = pick(&bench, below(1 << 20)) {
                        bench.free(&[name]);
                    }
                }
                17 => {
                    if let Some(name) = pick(&bench, below(1 << 20)) {
                        bench.defer(name);
                    }
                }
                18 => bench.end(),
                _ if below(15) == 0 => {
                    bench.stitch.empty_cache(&mut bench.world);
                    bench.checked("empty_cache");
                }
                _ => {}
            }
        }
        let counters = bench.stitch.counters;
        let (stitches, reuses) = (counters.stitches, counters.stitch_reuses);
        assert!(
            refused.is_some() || stitches > 20 && reuses > 5,
            "{spec}, {capacity_mib}: {stitches}, {reuses}"
        );
        let twin = bench.clone();
        for mut bench in [bench, twin] {
            let names: Vec<u32> = bench.live.keys().copied().collect();
            bench.free(&names);
            for _ in 0..100 {
                bench.stitch.empty_cache(&mut bench.world);
                bench.checked("the end");
            }
            assert!(bench.layout().is_empty(), "{spec}, {capacity_mib} MiB");
            assert!(bench.stitch.remains.is_empty(), "{spec}, {capacity_mib} MiB");
            assert_eq!(bench.stitch.levels(), crate::alloc::Levels::default());
            let free_bytes = bench.world.device.memory_info().free_bytes;
            assert_eq!(free_bytes, capacity_mib * MIB, "{spec}");
        }
    }
}

#[test]
fn invariants_hold_after_every_operation_as_shipped() {
    random_programs("stitch+policy=shipped+frag_limit=20MiB", None);
    random_programs("stitch+policy=shipped+frag_limit=2MiB+re_alloc=true+auto_gc=2GiB", None);
}

#[test]
fn invariants_hold_after_every_operation_as_published() {
    random_programs("stitch+frag_limit=20MiB", None);
    random_programs("stitch+frag_limit=2MiB+split_limit=10MiB+stitch_limit=1GiB", None);
}

/// Whatever the device refuses, also while something is undone, nothing is lost.
#[test]
fn invariants_hold_while_the_device_refuses_calls() {
    for every in [7, 97] {
        random_programs("stitch+policy=shipped+frag_limit=20MiB+auto_gc=2GiB", Some(every));
        random_programs("stitch+frag_limit=20MiB+stitch_limit=1GiB", Some(every));
    }
}

#[test]
fn deferred_parts_stay_busy() {
    let mut bench = Bench::golden();
    scattered(&mut bench);
    bench.alloc(6, 400);
    bench.defer(6);
    let states = bench.layout().into_iter().map(|block| block.state);
    assert_eq!(states.filter(|&state| state == BlockState::Deferred).count(), 2);
    let levels = bench.stitch.levels();
    assert_eq!((levels.allocated_bytes, levels.active_bytes), (600 * MIB, 1000 * MIB));
    bench.stitch.empty_cache(&mut bench.world);
    bench.checked("empty_cache");
    assert_eq!(bench.stitch.levels().active_bytes, 600 * MIB);
    assert_eq!(bench.stitch.stitched_bytes, 0, "idle ones go");
}
