//! Generated recordings: programs like training loops run through the independent model of
//! [`model`](crate::model), which keeps a log as PyTorch does. Its log and last layout are made a
//! snapshot, cut or whole, and the importer and `verify` must make of it what the model did.
//!
//! `GENERATED_PROGRAMS=200 cargo test --release generated -- --nocapture` runs more programs of
//! every category and prints the table of shares.

use std::collections::BTreeMap;

use fraglab::alloc::{Action, ActionKind, BlockState, LayoutBlock, Request};
use fraglab::device::sim::Sim;
use fraglab::device::sim::addresses::Addresses;
use fraglab::engine::{VerifyResult, verify};
use fraglab::import::{
    KnownMemory, RawAction, RawBlock, RawBlockState, RawEntry, RawSegment, RawSettings,
    RawSnapshot, trace_from_snapshot,
};
use fraglab::trace::{Pool, PoolKind, Truth, room_on_device, validate};
use fraglab::units::{BlockId, MIB, PoolId, StreamId};
use rayon::prelude::*;

use crate::model::driver::Driver;
use crate::model::random::Random;
use crate::model::settings::{Options, Settings};
use crate::model::{Inputs, Model};

/// Programs of every category.
const PROGRAMS: u64 = 12;
/// How often each history is cut, beside the whole one.
const CUTS: u64 = 2;

const COMPUTE: StreamId = StreamId(0);
const COPY: StreamId = StreamId(1);
const CAPTURE: StreamId = StreamId(2);
const STREAM_HANDLES: [u64; 3] = [0, 0x5581_2f00_3c70, 0x5581_2f00_9a10];

const WEIGHTS: PoolId = PoolId(0);
const GRAPH: PoolId = PoolId(1);
const SCRATCH: PoolId = PoolId(2);

/// What is special about the programs of a category.
#[derive(Clone, Copy, Debug, Default)]
struct Traits {
    expandable: bool,
    /// Weights are loaded inside a `MemPool`, which may be entered again.
    mem_pool: bool,
    /// A graph is captured, and may be deleted.
    capture: bool,
    /// Pools that are made and dropped.
    dropped_pools: bool,
    /// A memory limit that the program reaches.
    limit: bool,
    /// A device that the program fills.
    small_device: bool,
    gc: bool,
    max_split: bool,
    roundup: bool,
    /// Requests of any size, in no order.
    chaos: bool,
}

const PLAIN: Traits = Traits {
    expandable: false,
    mem_pool: false,
    capture: false,
    dropped_pools: false,
    limit: false,
    small_device: false,
    gc: false,
    max_split: false,
    roundup: false,
    chaos: false,
};

const CATEGORIES: [(&str, Traits); 22] = [
    ("plain", PLAIN),
    ("roundup", Traits { roundup: true, ..PLAIN }),
    ("limit", Traits { limit: true, ..PLAIN }),
    ("small device", Traits { small_device: true, ..PLAIN }),
    ("gc", Traits { limit: true, gc: true, ..PLAIN }),
    ("max_split", Traits { max_split: true, ..PLAIN }),
    ("max_split + limit", Traits { max_split: true, limit: true, ..PLAIN }),
    ("expandable", Traits { expandable: true, ..PLAIN }),
    ("expandable + limit", Traits { expandable: true, limit: true, ..PLAIN }),
    ("expandable + small device", Traits { expandable: true, small_device: true, ..PLAIN }),
    ("expandable + gc", Traits { expandable: true, limit: true, gc: true, ..PLAIN }),
    ("mem_pool", Traits { mem_pool: true, ..PLAIN }),
    ("capture", Traits { capture: true, ..PLAIN }),
    ("dropped pools", Traits { dropped_pools: true, ..PLAIN }),
    ("all pools", Traits { mem_pool: true, capture: true, dropped_pools: true, ..PLAIN }),
    (
        "all pools + limit",
        Traits { mem_pool: true, capture: true, dropped_pools: true, limit: true, ..PLAIN },
    ),
    ("expandable + mem_pool", Traits { expandable: true, mem_pool: true, ..PLAIN }),
    ("expandable + capture", Traits { expandable: true, capture: true, ..PLAIN }),
    (
        "expandable + all pools",
        Traits { expandable: true, mem_pool: true, capture: true, dropped_pools: true, ..PLAIN },
    ),
    (
        "max_split + all pools",
        Traits { max_split: true, mem_pool: true, capture: true, dropped_pools: true, ..PLAIN },
    ),
    ("chaos", Traits { chaos: true, small_device: true, ..PLAIN }),
    ("expandable + chaos", Traits { expandable: true, chaos: true, small_device: true, ..PLAIN }),
];

/// Categories in which a log does not always tell the pools: a request is refused inside one of
/// them without a trace, or a malloc picks single segments around the end of another.
const UNDETERMINED: [&str; 3] = ["dropped pools", "all pools + limit", "max_split + all pools"];

/// A recorded program.
struct Recorded {
    log: Vec<Action>,
    layout: Vec<LayoutBlock>,
    stats: BTreeMap<String, i64>,
    settings: RawSettings,
    limit_bytes: Option<u64>,
    total_bytes: u64,
}

/// A program on its way through the model.
struct Program {
    random: Random,
    traits: Traits,
    driver: Driver<Model, Sim>,
    log: Vec<Action>,
    blocks: u32,
    /// Percent of the frees that wait for another stream.
    defers: u64,
    /// Sizes of the parameters of a layer.
    parameters: Vec<u64>,
    /// Sizes of the activations of a layer at full length, and whether each is kept.
    activations: Vec<(u64, bool)>,
    layers: u64,
    lengths_vary: bool,
    recomputes: bool,
    empties_cache: bool,
}

impl Program {
    fn record(traits: Traits, seed: u64) -> Recorded {
        let mut random = Random::new(seed);
        let hidden = random.pick(&[256, 320, 512, 768]);
        let tokens = random.range(2..=16) * 128;
        let wide = random.pick(&[2, 4]) * hidden;
        let parameters =
            vec![hidden * hidden * 2, hidden * wide * 2, wide * hidden * 2, hidden * 2];
        let mut activations = vec![
            (tokens * hidden * 2, true),
            (tokens * hidden * 2, true),
            (tokens * wide * 2, true),
            (tokens * wide * 2, false),
            (tokens * hidden * 4, false),
            (tokens * 4, true),
            (tokens * tokens / 8, random.percent(50)),
        ];
        random.shuffle(&mut activations);
        let layers = random.range(2..=6);
        let per_layer: u64 = activations.iter().map(|&(bytes, _)| bytes).sum::<u64>()
            + 8 * parameters.iter().sum::<u64>();
        let need_bytes = layers * per_layer + 8 * tokens * 1000;
        let tight_bytes = need_bytes * random.range(40..=110) / 100 + 40 * MIB;
        let roomy_bytes = 8 * need_bytes + 2048 * MIB;
        let room_bytes = if traits.small_device { tight_bytes } else { roomy_bytes };
        let total_bytes = room_bytes.next_multiple_of(64 * MIB);
        let (settings, raw) = settings(traits, &mut random, tight_bytes);
        let pool = |name: &str, kind| Pool {
            name: name.to_owned(),
            kind,
            no_split: false,
            use_on_oom: false,
        };
        let inputs = Inputs {
            settings: settings.clone(),
            pools: vec![
                pool("weights", PoolKind::MemPool),
                pool("graph", PoolKind::Capture),
                pool("scratch", PoolKind::MemPool),
            ],
            stream_handles: STREAM_HANDLES.to_vec(),
            device_total_bytes: total_bytes,
            ..Inputs::default()
        };
        let device =
            Sim::new(Some(room_on_device(total_bytes)), Some(total_bytes), Addresses::chunks());
        let mut program = Program {
            traits,
            driver: Driver::new(Model::new(inputs), device),
            log: Vec::new(),
            blocks: 0,
            defers: random.pick(&[0, 5, 30]),
            parameters,
            activations,
            layers,
            lengths_vary: random.percent(40),
            recomputes: random.percent(30),
            empties_cache: random.percent(40),
            random,
        };
        if traits.chaos {
            program.chaos();
        } else {
            program.train();
        }
        Recorded {
            log: program.log,
            layout: program.driver.layout(),
            stats: program.driver.stats(),
            settings: raw,
            limit_bytes: settings.limit,
            total_bytes,
        }
    }

    fn note(&mut self) {
        self.log.extend(self.driver.take_log());
        // Work of other streams ends now and then, oldest first.
        let pending = self.driver.pending();
        if !pending.is_empty() && self.random.percent(15) {
            let ended = self.random.range(1..=pending.len() as u64) as usize;
            pending[..ended].iter().for_each(|&block| self.driver.done(block));
        }
    }

    fn alloc(&mut self, size_bytes: u64, stream: StreamId) -> Option<BlockId> {
        let size_bytes = size_bytes.max(1);
        for attempt in 0..2 {
            let block = BlockId(self.blocks);
            self.blocks += 1;
            let result = self.driver.malloc(Request { block, size_bytes, stream });
            self.note();
            if result.is_ok() {
                return Some(block);
            }
            if attempt == 0 && self.random.percent(50) {
                self.empty_cache();
            }
        }
        None
    }

    fn free(&mut self, block: Option<BlockId>) {
        let Some(block) = block else { return };
        if self.random.percent(self.defers) {
            self.driver.defer(block);
        } else {
            self.driver.free(block);
        }
        self.note();
    }

    fn empty_cache(&mut self) {
        self.driver.empty_cache();
        self.note();
    }

    fn enter(&mut self, pool: PoolId) {
        self.driver.pool_enter(pool);
    }

    fn leave(&mut self, pool: PoolId) {
        self.driver.pool_leave(pool);
    }

    fn delete(&mut self, pool: PoolId) {
        self.driver.pool_delete(pool);
        self.note();
    }

    fn train(&mut self) {
        if self.traits.mem_pool {
            self.enter(WEIGHTS);
        }
        let parameters = self.parameters.clone();
        let layers = self.layers as usize;
        let weights: Vec<_> =
            (0..layers).flat_map(|_| &parameters).map(|&b| self.alloc(b, COMPUTE)).collect();
        if self.traits.mem_pool {
            self.leave(WEIGHTS);
        }
        let mut states = Vec::new();
        let mut graph = Vec::new();
        let steps = self.random.range(2..=5);
        let capture_at = self.random.range(1..=steps - 1);
        for step in 0..steps {
            if self.traits.dropped_pools && self.random.percent(50) {
                self.scratch();
            }
            if self.traits.mem_pool && self.random.percent(30) {
                self.enter(WEIGHTS);
                let extra = self.alloc(parameters[0], COMPUTE);
                let kept = self.alloc(parameters[3], COMPUTE);
                self.free(extra);
                self.leave(WEIGHTS);
                states.push(kept);
            }
            if self.traits.capture && step == capture_at {
                graph = self.capture();
            }
            self.step(&mut states);
            if self.traits.capture && step > capture_at && self.random.percent(30) {
                graph.drain(..).for_each(|block| self.free(block));
                self.delete(GRAPH);
                self.traits.capture = false;
            }
            if self.empties_cache && self.random.percent(60) {
                self.empty_cache();
            }
        }
        if self.random.percent(50) {
            states.into_iter().for_each(|block| self.free(block));
        }
        if self.random.percent(30) {
            weights.into_iter().for_each(|block| self.free(block));
            if self.traits.mem_pool {
                self.delete(WEIGHTS);
            }
        }
        if self.random.percent(40) {
            self.empty_cache();
        }
    }

    /// Forward, backward and optimizer.
    fn step(&mut self, states: &mut Vec<Option<BlockId>>) {
        let length = if self.lengths_vary { self.random.range(20..=100) } else { 100 };
        let batch = self.alloc(length * 163, COPY);
        let mut kept = Vec::new();
        for _ in 0..self.layers {
            self.layer(length, COMPUTE, &mut kept);
            if self.recomputes {
                let drop_from = kept.len().saturating_sub(3);
                let dropped: Vec<_> = kept.drain(drop_from..).collect();
                dropped.into_iter().for_each(|block| self.free(block));
            }
        }
        let logits = self.alloc(length * 80_000, COMPUTE);
        let loss = self.alloc(4, COMPUTE);
        let gradient = self.alloc(length * 80_000, COMPUTE);
        self.free(logits);
        let mut gradients = Vec::new();
        let per_layer = kept.len() / self.layers as usize;
        for _ in 0..self.layers {
            if self.recomputes {
                let mut again = Vec::new();
                self.layer(length, COMPUTE, &mut again);
                again.into_iter().rev().for_each(|block| self.free(block));
            }
            for _ in 0..per_layer {
                let work = self.alloc(self.activations[0].0 * length / 100, COMPUTE);
                let block = kept.pop().flatten();
                self.free(block);
                self.free(work);
            }
            for bytes in self.parameters.clone() {
                gradients.push(self.alloc(bytes, COMPUTE));
            }
        }
        kept.into_iter().for_each(|block| self.free(block));
        self.free(gradient);
        self.free(loss);
        self.free(batch);
        if states.is_empty() {
            for bytes in self.parameters.repeat(2 * self.layers as usize) {
                states.push(self.alloc(bytes, COMPUTE));
            }
        }
        gradients.into_iter().for_each(|block| self.free(block));
    }

    fn layer(&mut self, length: u64, stream: StreamId, kept: &mut Vec<Option<BlockId>>) {
        let mut passing = Vec::new();
        for (bytes, is_kept) in self.activations.clone() {
            let block = self.alloc(bytes * length / 100, stream);
            if is_kept {
                kept.push(block)
            } else {
                passing.push(block)
            }
            if passing.len() > 1 {
                let block = passing.remove(0);
                self.free(block);
            }
        }
        passing.into_iter().for_each(|block| self.free(block));
    }

    /// `torch.cuda.graph`: an empty_cache, the random-number state in the default pools, then the
    /// captured stream alone.
    fn capture(&mut self) -> Vec<Option<BlockId>> {
        self.empty_cache();
        let seeds = [self.alloc(8, CAPTURE), self.alloc(8, CAPTURE)];
        self.enter(GRAPH);
        let mut kept = Vec::new();
        for _ in 0..self.layers {
            self.layer(100, CAPTURE, &mut kept);
        }
        let outputs = kept.split_off(kept.len().saturating_sub(2));
        kept.into_iter().rev().for_each(|block| self.free(block));
        self.leave(GRAPH);
        outputs.into_iter().chain(seeds).collect()
    }

    /// A pool that is made and dropped.
    fn scratch(&mut self) {
        self.enter(SCRATCH);
        let blocks: Vec<_> = (0..self.random.range(1..=14))
            .map(|_| {
                let bytes =
                    self.random.pick(&[self.parameters[0], self.parameters[1], 3 * MIB, 700]);
                self.alloc(bytes, COMPUTE)
            })
            .collect();
        self.leave(SCRATCH);
        blocks.into_iter().for_each(|block| self.free(block));
        self.delete(SCRATCH);
        self.traits.dropped_pools = false;
    }

    /// Requests of any size and frees in any order.
    fn chaos(&mut self) {
        let mut live = Vec::new();
        for _ in 0..self.random.range(500..=2500) {
            if live.len() > 60 || self.random.percent(45) && !live.is_empty() {
                let at = self.random.range(0..=live.len() as u64 - 1) as usize;
                let block = live.swap_remove(at);
                self.free(Some(block));
            } else {
                let bytes = match self.random.range(0..=3) {
                    0 => self.random.range(1..=4096),
                    1 => self.random.range(1..=MIB),
                    2 => self.random.range(MIB..=10 * MIB),
                    _ => self.random.range(10 * MIB..=40 * MIB),
                };
                let stream = self.random.pick(&[COMPUTE, COMPUTE, COPY]);
                live.extend(self.alloc(bytes, stream));
            }
            if self.random.range(0..=199) == 0 {
                self.empty_cache();
            }
        }
    }
}

fn settings(traits: Traits, random: &mut Random, limit_bytes: u64) -> (Settings, RawSettings) {
    let mut options = Options::default();
    let mut raw = RawSettings::default();
    let mut parts = Vec::new();
    if traits.expandable {
        options.expandable = Some(true);
        raw.expandable = true;
        parts.push("expandable_segments:True".to_owned());
    }
    if traits.max_split {
        let mb = random.pick(&[20, 32, 64]);
        options.max_split_size = Some(mb * MIB);
        raw.max_split_bytes = Some(mb * MIB);
        parts.push(format!("max_split_size_mb:{mb}"));
    }
    if traits.gc {
        options.gc_threshold = Some(0.6);
        raw.gc_threshold = 0.6;
        parts.push("garbage_collection_threshold:0.6".to_owned());
    }
    if traits.roundup {
        let divisions = random.pick(&[2, 4, 8]);
        options.roundup = Some([divisions; 16]);
        raw.roundup_divisions = (0..16).map(|class| (1 << class, divisions)).collect();
        parts.push(format!("roundup_power2_divisions:{divisions}"));
    }
    raw.conf = parts.join(",");
    let mut settings = Settings::default();
    settings.give(options);
    settings.limit = traits.limit.then_some(limit_bytes);
    (settings, raw)
}

fn snapshot(recorded: &Recorded, cut_percent: u64) -> RawSnapshot {
    let entries = recorded.log.iter().map(|action| {
        let kind = match action.kind {
            ActionKind::Alloc => RawAction::Alloc,
            ActionKind::FreeRequested => RawAction::FreeRequested,
            ActionKind::FreeCompleted => RawAction::FreeCompleted,
            ActionKind::SegmentAlloc => RawAction::SegmentAlloc,
            ActionKind::SegmentFree => RawAction::SegmentFree,
            ActionKind::SegmentMap => RawAction::SegmentMap,
            ActionKind::SegmentUnmap => RawAction::SegmentUnmap,
            ActionKind::Oom => RawAction::Oom,
            other => panic!("{other:?} is no entry of PyTorch's log"),
        };
        RawEntry::new(kind, action.address, action.size_bytes, action.stream.0)
    });
    let skipped = recorded.log.len() * cut_percent as usize / 100;
    let entries = entries.skip(skipped).collect();
    let mut segments: Vec<RawSegment> = Vec::new();
    let mut run = None;
    for block in &recorded.layout {
        let large = block.pool % 2 == 1;
        let pool_id = match (block.pool / 2).checked_sub(1).map(PoolId) {
            None => (0, 0),
            Some(GRAPH) => (1, 0),
            Some(pool) => (0, 1 + u64::from(pool.0)),
        };
        if run != Some((block.segment, block.address)) {
            segments.push(RawSegment {
                device: 0,
                address: block.address,
                stream_handle: STREAM_HANDLES[block.stream.index()],
                large,
                expandable: block.page_bytes > 0,
                pool_id,
                ..RawSegment::default()
            });
        }
        run = Some((block.segment, block.address + block.size_bytes));
        let segment = segments.last_mut().expect("just pushed");
        segment.total_bytes += block.size_bytes;
        let state = match block.state {
            BlockState::Allocated => RawBlockState::Allocated,
            BlockState::Deferred => RawBlockState::Pending,
            BlockState::Free => RawBlockState::Inactive,
        };
        let requested_bytes = block.requested_bytes;
        segment.blocks.push(RawBlock::new(block.address, block.size_bytes, requested_bytes, state));
    }
    RawSnapshot::new(entries, STREAM_HANDLES.to_vec(), segments, recorded.settings.clone())
}

/// Imports and verifies what a snapshot and a truth file tell.
fn reproduce(recorded: &Recorded, cut_percent: u64) -> Result<VerifyResult, String> {
    let room_bytes = room_on_device(recorded.total_bytes);
    let known = KnownMemory {
        room_bytes: Some(recorded.limit_bytes.map_or(room_bytes, |limit| limit.min(room_bytes))),
        device_total_bytes: Some(recorded.total_bytes),
    };
    let snapshot = snapshot(recorded, cut_percent);
    let (mut trace, warnings) =
        trace_from_snapshot(&snapshot, None, known).map_err(|error| error.to_string())?;
    validate(&trace).map_err(|error| error.to_string())?;
    trace.header.limit_bytes = recorded.limit_bytes;
    trace.header.device.total_bytes = Some(recorded.total_bytes);
    if let Some(recording) = &mut trace.recording {
        recording.truth =
            Some(Truth { stats: recorded.stats.clone(), outcome: None, ..Truth::default() });
    }
    let result = verify(&trace).map_err(|error| format!("{error}; {warnings:?}"))?;
    if let Some(difference) = &result.first_difference {
        return Err(format!("{difference:?}; {:?}; {warnings:?}", result.possible_causes));
    }
    Ok(result)
}

#[derive(Default)]
struct Share {
    exact: u64,
    all: u64,
    failures: Vec<String>,
}

fn shares_of(name: &str, traits: Traits, programs: u64) -> [Share; 2] {
    let mut shares = [Share::default(), Share::default()];
    for number in 0..programs {
        let recorded = Program::record(traits, number);
        let mut random = Random::new(number);
        let cuts = (0..CUTS).map(|_| random.range(1..=95));
        for cut_percent in [0].into_iter().chain(cuts) {
            let share = &mut shares[usize::from(cut_percent > 0)];
            share.all += 1;
            match reproduce(&recorded, cut_percent) {
                Ok(_) => share.exact += 1,
                Err(error) => {
                    share.failures.push(format!("{name} {number} from {cut_percent} %: {error}"));
                }
            }
        }
    }
    shares
}

#[test]
fn generated_recordings_are_reproduced() {
    let programs = std::env::var("GENERATED_PROGRAMS").ok();
    let programs = programs.map_or(PROGRAMS, |text| text.parse().expect("a number of programs"));
    let shares: Vec<_> = CATEGORIES
        .par_iter()
        .map(|&(name, traits)| (name, shares_of(name, traits, programs)))
        .collect();
    for (name, [whole, cut]) in &shares {
        println!("| {name} | {}/{} | {}/{} |", whole.exact, whole.all, cut.exact, cut.all);
    }
    for (name, of_category) in &shares {
        for share in of_category {
            let failures = &share.failures;
            failures.iter().for_each(|failure| println!("{failure}"));
            if !UNDETERMINED.contains(name) {
                assert!(failures.is_empty(), "{name}: {failures:?}");
            }
            assert!(20 * failures.len() as u64 <= share.all, "{name}: {failures:?}");
            let named = |failure: &String| failure.contains("private pools: ");
            assert!(failures.iter().all(named), "{name}: no cause is named: {failures:?}");
        }
    }
}
