//! Random operations under random settings on random devices: whatever the allocator under test
//! says and does must be what the model says and does, operation by operation.

use std::collections::BTreeMap;

use fraglab::alloc::{Action, ActionKind, Allocator, LayoutBlock, Levels, OutOfMemory, Request};
use fraglab::device::DeviceCall;
use fraglab::trace::{Pool, PoolKind};
use fraglab::units::{BlockId, MIB, PoolId, SettingsId, StreamId};

use crate::model::device::{Bases, TestDevice};
use crate::model::driver::Driver;
use crate::model::random::Random;
use crate::model::settings::{Options, Settings};
use crate::model::{Inputs, Model, Mutation};

/// Operations of all runs together. Unoptimized builds do fewer, because they are 20 times slower.
const OPERATIONS: u64 = if cfg!(debug_assertions) { 50_000 } else { 1_000_000 };
/// Layout and statistics are compared every so many operations.
const FULL_COMPARISON_EVERY: u64 = 50;

/// What a case is made for: most for nothing special, some for rules that are met too rarely else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theme {
    Any,
    /// Reservations so small that they are mapped from end to end, beside ordinary segments, under
    /// garbage collection.
    FullReservations,
    /// Reservations with many holes on a device that refuses often.
    TornReservations,
    /// Expandable segments switched on where a limit of splits left ordinary segments uncut.
    SplitsSwitched,
}

/// The world of one run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    theme: Theme,
    /// What the model needs to know; the fields up to `device_total_bytes` say the same to others.
    inputs: Inputs,
    /// The first settings as a `PYTORCH_CUDA_ALLOC_CONF` string; it sets the limit if it can.
    pub(crate) conf: String,
    /// The settings strings that come later.
    pub(crate) settings_changes: Vec<String>,
    /// The limit where `conf` does not set it.
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) device_total_bytes: u64,
    pub(crate) device: TestDevice,
    /// Sizes that are asked for again and again, so that free blocks of equal size are common.
    sizes: Vec<u64>,
    size_max: u64,
    /// Percent of the requests that take one of `sizes`.
    repeats: u64,
    /// Percent of the frees that wait for another stream.
    defers: u64,
    /// Blocks that may be live or deferred at once. With few, whole segments become free often.
    blocks_max: u64,
    /// One operation in so many gives memory back.
    empty_cache_one_in: u64,
    pub(crate) operations: u64,
}

impl Case {
    fn new(random: &mut Random) -> Case {
        let theme = match random.range(0..=99) {
            0..=3 => Theme::FullReservations,
            4..=8 => Theme::TornReservations,
            9..=10 => Theme::SplitsSwitched,
            _ => Theme::Any,
        };
        let any = theme == Theme::Any;
        let size_max = match theme {
            Theme::FullReservations => 12 * MIB,
            Theme::TornReservations => 200 * MIB,
            _ => random.pick(&[12, 30, 60, 200]) * MIB,
        };
        let mut capacity_bytes = match random.range(0..=3) {
            0 => random.range(20..=100) * MIB,
            1 => random.range(100..=500) * MIB,
            2 => random.range(500..=3000) * MIB,
            _ => 1 << 36,
        };
        let mut device_total_bytes = capacity_bytes + random.range(0..=64) * MIB;
        match theme {
            // Any request fits into a reservation.
            Theme::FullReservations => {
                device_total_bytes = 2 * size_max + random.range(0..=20) * MIB;
                capacity_bytes = 4 * device_total_bytes;
            }
            Theme::TornReservations => capacity_bytes = random.range(150..=600) * MIB,
            Theme::SplitsSwitched => capacity_bytes = random.range(100..=300) * MIB,
            Theme::Any => {}
        }
        device_total_bytes = device_total_bytes.min(capacity_bytes + 64 * MIB);
        let bases = random.pick(&[
            Bases::Ascending,
            Bases::Descending,
            Bases::Scrambled,
            Bases::LowestFree,
        ]);
        let mut device = TestDevice::new(capacity_bytes, bases);
        if theme == Theme::TornReservations {
            device = device.refusing(random.range(20..=60));
        } else if any && random.percent(15) {
            device = device.refusing(random.range(3..=40));
        }
        let sizes = match theme {
            Theme::FullReservations => (0..4).map(|_| random.range(4..=12) * MIB).collect(),
            Theme::TornReservations => (0..6).map(|_| random.range(4..=90) * MIB).collect(),
            _ => (0..random.range(2..=8)).map(|_| size(random, size_max)).collect(),
        };
        let mut case = Case {
            theme,
            inputs: Inputs {
                stream_handles: stream_handles(random, if any { 4 } else { 1 }),
                pools: if any { pools(random) } else { Vec::new() },
                device_total_bytes,
                research_after_flush: random.percent(30),
                ..Inputs::default()
            },
            conf: String::new(),
            settings_changes: Vec::new(),
            limit_bytes: None,
            device_total_bytes,
            device,
            sizes,
            size_max,
            repeats: if any { random.pick(&[0, 30, 60, 95]) } else { 95 },
            defers: random.pick(&[0, 0, 10, 30, 70]),
            blocks_max: if any { random.pick(&[8, 25, 60, 60]) } else { random.range(4..=12) },
            empty_cache_one_in: match theme {
                Theme::TornReservations => 8,
                _ => random.pick(&[20, 200, 200]),
            },
            operations: random.range(50..=700),
        };
        case.choose_settings(random);
        case
    }

    /// A case with few operations, few device calls and no refusals but for want of memory.
    pub(crate) fn small(random: &mut Random) -> Case {
        let mut case = Case::new(random);
        // No more than reported, so that a reservation holds whatever the device does.
        let capacity_bytes = case.device_total_bytes.min(random.range(60..=400) * MIB);
        let bases = random.pick(&[Bases::Ascending, Bases::LowestFree]);
        case.device = TestDevice::new(capacity_bytes, bases);
        case.operations = random.range(20..=60);
        case
    }

    fn choose_settings(&mut self, random: &mut Random) {
        let any = self.theme == Theme::Any;
        let mut options = Vec::new();
        if self.theme == Theme::FullReservations || any && random.percent(60) {
            self.choose_limit(random, &mut options);
        }
        let expands = !any || random.percent(50);
        let mut chooser = Chooser {
            theme: self.theme,
            expands,
            limited: self.inputs.settings.limit.is_some(),
            large_mb: 20,
            split_mb: None,
        };
        let large_mbs: &[u64] = if expands { &[12, 16, 32, 64] } else { &[11, 12, 13, 16, 32, 64] };
        if any && random.percent(25) {
            chooser.large_mb = random.pick(large_mbs);
        }
        if self.theme == Theme::SplitsSwitched || any && random.percent(45) {
            let mb = chooser.large_mb + random.pick(&[0, 1, 3, 10, 20, 60]);
            chooser.split_mb = Some(mb);
            // Around the limit and above it, where blocks are matched and released by other rules.
            let limit = mb * MIB;
            self.sizes.extend([limit - 512, limit, limit + limit / 2, 2 * limit + MIB]);
        }
        let first = chooser.first(random, &mut options);
        self.inputs.settings.give(first);
        random.shuffle(&mut options);
        self.conf = options.join(",");
        let changes = match self.theme {
            Theme::Any if random.percent(50) => random.range(1..=6),
            Theme::FullReservations | Theme::SplitsSwitched => 8,
            _ => 0,
        };
        for _ in 0..changes {
            let mut options = Vec::new();
            self.inputs.changes.push(chooser.later(random, &mut options));
            random.shuffle(&mut options);
            self.settings_changes.push(options.join(","));
        }
    }

    fn choose_limit(&mut self, random: &mut Random, options: &mut Vec<String>) {
        if self.theme == Theme::Any && random.percent(50) {
            let text = format!("0.{:03}", random.range(1..=999));
            let fraction: f64 = text.parse().expect("a fraction");
            self.inputs.settings.limit = Some((fraction * self.device_total_bytes as f64) as u64);
            options.push(format!("per_process_memory_fraction:{text}"));
        } else {
            // Whole segments, so that the limit can be reached exactly, or any number of bytes.
            let uneven = if random.percent(50) { random.range(0..=MIB) } else { 0 };
            let units = if self.theme == Theme::Any { 10..=500 } else { 30..=60 };
            self.limit_bytes = Some(random.range(units) * 2 * MIB + uneven);
            self.inputs.settings.limit = self.limit_bytes;
        }
    }

    pub(crate) fn model(&self) -> Model {
        Model::new(self.inputs.clone())
    }

    pub(crate) fn stream_handles(&self) -> &[u64] {
        &self.inputs.stream_handles
    }

    pub(crate) fn pools(&self) -> &[Pool] {
        &self.inputs.pools
    }

    /// The options at the start, and the limit.
    pub(crate) fn settings(&self) -> &Settings {
        &self.inputs.settings
    }

    pub(crate) fn research_after_flush(&self) -> bool {
        self.inputs.research_after_flush
    }
}

/// Chooses settings strings one after the other, so that each is allowed after those before.
struct Chooser {
    theme: Theme,
    /// Expandable segments occur. Their pages must be whole units of the device.
    expands: bool,
    /// There is a memory limit.
    limited: bool,
    large_mb: u64,
    /// Once it is lifted no string may set it again.
    split_mb: Option<u64>,
}

impl Chooser {
    fn first(&mut self, random: &mut Random, texts: &mut Vec<String>) -> Options {
        let mut options = Options::default();
        if self.large_mb != 20 {
            options.large_segment_size = Some(self.large_mb * MIB);
            texts.push(format!("large_segment_size_mb:{}", self.large_mb));
        }
        let on = self.theme != Theme::SplitsSwitched && random.percent(70);
        if on && self.expands || self.theme == Theme::TornReservations {
            options.expandable = Some(true);
            texts.push("expandable_segments:True".to_owned());
        }
        self.rest(random, &mut options, texts);
        options
    }

    fn later(&mut self, random: &mut Random, texts: &mut Vec<String>) -> Options {
        let mut options = Options::default();
        let any = self.theme == Theme::Any;
        if any && self.split_mb.is_some() && random.percent(20) {
            self.split_mb = None;
        }
        if any && self.split_mb.is_none() && random.percent(20) {
            self.large_mb = random.pick(&[12, 20, 32]);
            options.large_segment_size = Some(self.large_mb * MIB);
            texts.push(format!("large_segment_size_mb:{}", self.large_mb));
        }
        // Where splits are limited, expandable segments switched on bring PyTorch to an end soon.
        let on = random.percent(if any && self.split_mb.is_some() { 15 } else { 50 });
        if self.expands && random.percent(70) {
            options.expandable = Some(on);
            texts.push(format!("expandable_segments:{}", if on { "True" } else { "False" }));
        }
        self.rest(random, &mut options, texts);
        options
    }

    /// The options that fall back if they are not given.
    fn rest(&self, random: &mut Random, options: &mut Options, texts: &mut Vec<String>) {
        if let Some(mb) = self.split_mb {
            options.max_split_size = Some(mb * MIB);
            texts.push(format!("max_split_size_mb:{mb}"));
        }
        if random.percent(20) {
            let mb = self.large_mb + random.pick(&[0, 1, 5, 40]);
            options.max_non_split_rounding = Some(mb * MIB);
            texts.push(format!("max_non_split_rounding_mb:{mb}"));
        }
        if random.percent(40) {
            let (table, text) =
                if random.percent(40) { roundup_single(random) } else { roundup_list(random) };
            options.roundup = Some(table);
            texts.push(format!("roundup_power2_divisions:{text}"));
        }
        if self.limited && (self.theme == Theme::FullReservations || random.percent(60)) {
            let text = format!("0.{:02}", random.range(1..=99));
            options.gc_threshold = Some(text.parse().expect("a fraction"));
            texts.push(format!("garbage_collection_threshold:{text}"));
        }
    }
}

/// Up to three pools, of which captures have no options.
fn pools(random: &mut Random) -> Vec<Pool> {
    let count = if random.percent(50) { random.range(1..=3) } else { 0 };
    let pool = |number| {
        let kind = if random.percent(25) { PoolKind::Capture } else { PoolKind::MemPool };
        let of_mem_pool =
            |share, random: &mut Random| kind == PoolKind::MemPool && random.percent(share);
        Pool {
            name: format!("p{number}"),
            kind,
            no_split: of_mem_pool(25, random),
            use_on_oom: of_mem_pool(50, random),
        }
    };
    (0..count).map(pool).collect()
}

fn stream_handles(random: &mut Random, most: u64) -> Vec<u64> {
    let mut handles = [0, 1, 0x7100, 0x8100, 0x5581_2f00_3c70, (1 << 63) - 1, 1 << 63, u64::MAX];
    random.shuffle(&mut handles);
    handles[..random.range(1..=most) as usize].to_vec()
}

/// The single value: all 16 entries (2.2).
fn roundup_single(random: &mut Random) -> ([u64; 16], String) {
    let divisions = random.pick(&[1, 2, 4, 8, 16, 64]);
    ([divisions; 16], divisions.to_string())
}

/// The list: entry by entry, as 2.2 says.
fn roundup_list(random: &mut Random) -> ([u64; 16], String) {
    let mut table = [0; 16];
    let mut parts = Vec::new();
    let mut last = 0;
    for entry in 0..16 {
        if !random.percent(20) {
            continue;
        }
        let divisions = random.pick(&[0, 1, 2, 4, 8, 16]);
        table[entry] = divisions;
        if parts.is_empty() {
            table[..entry].fill(divisions);
        }
        parts.push(format!("{}:{divisions}", 1u64 << entry));
        last = entry;
    }
    if parts.is_empty() || random.percent(50) {
        let divisions = random.pick(&[1, 2, 4, 8]);
        table[last + 1..].fill(divisions);
        parts.push(format!(">:{divisions}"));
    }
    (table, format!("[{}]", parts.join(",")))
}

/// A size of any order of magnitude, often at a border of the rules.
fn size(random: &mut Random, size_max: u64) -> u64 {
    let size = match random.range(0..=9) {
        0 => random.range(1..=4096),
        1 | 2 => random.range(1..=MIB),
        3 => MIB - 1024 + random.range(0..=2048),
        4 => 10 * MIB - 1024 + random.range(0..=2048),
        5 | 6 => random.range(MIB..=10 * MIB),
        7 => (1 << random.range(8..=27)) + random.range(0..=2) - 1,
        8 => random.range(1..=100) * MIB,
        _ => random.range(10 * MIB..=size_max),
    };
    size.clamp(1, size_max)
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Malloc(Request),
    Free(BlockId),
    Defer(BlockId),
    Done(BlockId),
    EmptyCache,
    Settings(SettingsId),
    PoolEnter(PoolId),
    PoolLeave(PoolId),
    PoolDelete(PoolId),
}

/// What can be seen of an allocator after every operation.
#[derive(Debug, PartialEq)]
pub(crate) struct Seen {
    refused: Option<OutOfMemory>,
    log: Vec<Action>,
    levels: Levels,
    /// Device calls by kind. In how many calls pages are unmapped is an allocator's own business.
    calls: Vec<(DeviceCall, u64)>,
    used_bytes: u64,
    failed: bool,
}

pub(crate) fn apply<A: Allocator>(driver: &mut Driver<A>, op: Op) -> Seen {
    let mut refused = None;
    match op {
        Op::Malloc(request) => refused = driver.malloc(request).err(),
        Op::Free(block) => driver.free(block),
        Op::Defer(block) => driver.defer(block),
        Op::Done(block) => driver.done(block),
        Op::EmptyCache => driver.empty_cache(),
        Op::Settings(settings) => driver.change_settings(settings),
        Op::PoolEnter(pool) => driver.pool_enter(pool),
        Op::PoolLeave(pool) => driver.pool_leave(pool),
        Op::PoolDelete(pool) => driver.pool_delete(pool),
    }
    let calls = DeviceCall::ALL.into_iter();
    let calls = calls.filter(|call| !matches!(call, DeviceCall::Unmap | DeviceCall::Release));
    Seen {
        refused,
        log: driver.take_log(),
        levels: driver.allocator.levels(),
        calls: calls.map(|call| (call, driver.device().calls(call))).collect(),
        used_bytes: driver.device().used_bytes(),
        failed: driver.allocator.failure().is_some(),
    }
}

/// What the program has done with a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolState {
    New,
    InUse,
    Deleted,
}

/// Chooses operations by the state of the model.
pub(crate) struct Program<'a> {
    case: &'a Case,
    random: Random,
    blocks_made: u32,
    /// Percent of operations that ask for memory; changes from time to time.
    growth: u64,
    settings_given: u32,
    pools: Vec<PoolState>,
    /// Pools entered and not left, innermost last.
    entered: Vec<PoolId>,
}

impl Program<'_> {
    pub(crate) fn new(case: &Case, random: Random) -> Program<'_> {
        Program {
            case,
            random,
            blocks_made: 0,
            growth: 55,
            settings_given: 0,
            pools: vec![PoolState::New; case.pools().len()],
            entered: Vec::new(),
        }
    }

    pub(crate) fn next(&mut self, model: &Driver<Model>) -> Op {
        if self.random.percent(2) {
            self.growth = self.random.pick(&[10, 40, 55, 90]);
        }
        if self.random.percent(7)
            && let Some(op) = self.pool_op()
        {
            return op;
        }
        let more = (self.settings_given as usize) < self.case.settings_changes.len();
        if more && self.random.percent(3) {
            self.settings_given += 1;
            return Op::Settings(SettingsId(self.settings_given - 1));
        }
        let (live, pending) = (model.live(), model.pending());
        let full = (live.len() + pending.len()) as u64 >= self.case.blocks_max;
        if self.random.range(1..=self.case.empty_cache_one_in) == 1 {
            return Op::EmptyCache;
        }
        if !pending.is_empty() && (self.random.percent(12) || full && live.is_empty()) {
            return Op::Done(self.random.pick(&pending));
        }
        if live.is_empty() || !full && self.random.percent(self.growth) {
            return Op::Malloc(self.request());
        }
        let block = self.random.pick(&live);
        if self.random.percent(self.case.defers) { Op::Defer(block) } else { Op::Free(block) }
    }

    /// A pool is entered, left or deleted, in an order that PyTorch allows.
    fn pool_op(&mut self) -> Option<Op> {
        if !self.entered.is_empty() && self.random.percent(75) {
            return self.entered.pop().map(Op::PoolLeave);
        }
        let mut pools: Vec<PoolId> = (0..self.pools.len() as u32).map(PoolId).collect();
        if self.entered.is_empty() && self.random.percent(20) {
            pools.retain(|pool| self.pools[pool.index()] == PoolState::InUse);
            let pool = *pools.get(self.random.range(0..=2) as usize)?;
            self.pools[pool.index()] = PoolState::Deleted;
            return Some(Op::PoolDelete(pool));
        }
        // Whether a pool that is used again helps out again PyTorch does not say: there it cannot.
        let spent = |pool: &PoolId| {
            self.pools[pool.index()] == PoolState::Deleted
                && self.case.pools()[pool.index()].use_on_oom
        };
        pools.retain(|pool| !self.entered.contains(pool) && !spent(pool));
        let pool = *pools.get(self.random.range(0..=2) as usize)?;
        self.entered.push(pool);
        self.pools[pool.index()] = PoolState::InUse;
        Some(Op::PoolEnter(pool))
    }

    fn request(&mut self) -> Request {
        let size_bytes = if self.random.percent(self.case.repeats) {
            self.random.pick(&self.case.sizes)
        } else {
            size(&mut self.random, self.case.size_max)
        };
        let streams = self.case.stream_handles().len() as u64;
        let stream = StreamId(self.random.range(0..=streams - 1) as u32);
        self.blocks_made += 1;
        Request { block: BlockId(self.blocks_made - 1), size_bytes, stream }
    }

    /// What is left to do once all blocks are free, so that all memory goes back.
    pub(crate) fn ending(&self) -> Vec<Op> {
        let mut ops: Vec<Op> = self.entered.iter().rev().copied().map(Op::PoolLeave).collect();
        let pools = (0..self.pools.len() as u32).map(PoolId);
        let in_use = pools.filter(|pool| self.pools[pool.index()] == PoolState::InUse);
        ops.extend(in_use.map(Op::PoolDelete));
        ops.push(Op::EmptyCache);
        ops
    }
}

/// How often the interesting things happened: a generator that misses them proves nothing.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    runs: u64,
    operations: u64,
    ooms: u64,
    flushes: u64,
    completions_in_malloc: u64,
    oversize_allocations: u64,
    clones: u64,
    maps: u64,
    unmaps: u64,
    /// Frees deferred while a pool was entered.
    deferrals_in_pools: u64,
    /// Settings that turned expandable segments on or off.
    switches: u64,
    deletions: u64,
    failures: u64,
    /// By name, of the model.
    met: BTreeMap<&'static str, u64>,
}

impl Coverage {
    fn add(&mut self, op: Op, seen: &Seen, in_pool: bool) {
        self.operations += 1;
        let of_kind = |kind| seen.log.iter().filter(|action| action.kind == kind).count() as u64;
        self.maps += of_kind(ActionKind::SegmentMap);
        self.unmaps += of_kind(ActionKind::SegmentUnmap);
        self.deferrals_in_pools += u64::from(in_pool && matches!(op, Op::Defer(_)));
        self.deletions += u64::from(matches!(op, Op::PoolDelete(_)));
        if matches!(op, Op::Malloc(_)) {
            self.completions_in_malloc += of_kind(ActionKind::FreeCompleted);
        }
    }

    fn add_run(&mut self, model: &Driver<Model>) {
        let stats = model.stats();
        self.runs += 1;
        self.ooms += stats["num_ooms"] as u64;
        self.flushes += stats["num_alloc_retries"] as u64;
        self.oversize_allocations += stats["oversize_allocations.allocated"] as u64;
        for (name, count) in model.allocator.met.by_name() {
            *self.met.entry(name).or_default() += count;
        }
    }
}

/// Runs one random case on the allocator that `build` makes and on the model.
///
/// The first difference is returned in words; the seed alone repeats it.
fn run_case<A: Allocator>(
    seed: u64,
    build: impl Fn(&Case) -> A,
    coverage: &mut Coverage,
) -> Result<(), String> {
    let mut random = Random::new(seed);
    let case = Case::new(&mut random);
    let clone_at = random.percent(25).then(|| random.range(0..=case.operations));
    let mut program = Program::new(&case, random);
    let mut model = Driver::new(case.model(), case.device.clone());
    let mut tested = Driver::new(build(&case), case.device.clone());
    let mut original = None;
    let told =
        |number: u64, what: String| format!("seed {seed}, operation {number}: {what}\n{case:#?}");
    for number in 0..case.operations {
        if clone_at == Some(number) {
            let clone = tested.clone();
            original = Some(std::mem::replace(&mut tested, clone));
            coverage.clones += 1;
        }
        let in_pool = !program.entered.is_empty();
        let op = program.next(&model);
        let expandable = model.allocator.settings().expandable;
        let expected = apply(&mut model, op);
        coverage.add(op, &expected, in_pool);
        let switched = model.allocator.settings().expandable != expandable;
        coverage.switches += u64::from(switched);
        let both = std::iter::once(&mut tested).chain(&mut original);
        for (which, driver) in both.enumerate() {
            let which = ["the allocator", "its original"][which];
            let seen = apply(driver, op);
            // What comes after a failure of the real allocator is not defined.
            if seen != expected && !(seen.failed && expected.failed) {
                let what = format!("{op:?}\nexpected {expected:#?}\n{which} {seen:#?}");
                return Err(told(number, what));
            }
            let full = number % FULL_COMPARISON_EVERY == 0 || number + 1 == case.operations;
            if full
                && !expected.failed
                && let Some(difference) = difference(&model, driver, &case)
            {
                return Err(told(number, format!("after {op:?}, {which}: {difference}")));
            }
        }
        if expected.failed {
            coverage.failures += 1;
            coverage.add_run(&model);
            return Ok(());
        }
    }
    coverage.add_run(&model);
    let frees = model.live().into_iter().map(Op::Free);
    for op in frees.chain(program.ending()) {
        let (expected, seen) = (apply(&mut model, op), apply(&mut tested, op));
        if seen != expected {
            let what = format!("{op:?}\nexpected {expected:#?}\nthe allocator {seen:#?}");
            return Err(told(case.operations, what));
        }
    }
    check_all_came_back(&tested).map_err(|what| told(case.operations, what))
}

/// Layout, statistics and holes: the first that differs, in words.
fn difference<A: Allocator>(
    model: &Driver<Model>,
    tested: &Driver<A>,
    case: &Case,
) -> Option<String> {
    let (expected, found) = (model.layout(), tested.layout());
    // The numbers of pools are the allocator's own, but they must keep apart what the model does.
    let mut numbers = BTreeMap::new();
    for at in 0..expected.len().max(found.len()) {
        let (Some(expected), Some(found)) = (expected.get(at), found.get(at)) else {
            return Some(format!("{} blocks, expected {}", found.len(), expected.len()));
        };
        let number = *numbers.entry(expected.pool).or_insert(found.pool);
        if (LayoutBlock { pool: number, ..*expected }) != *found {
            return Some(format!("block {at} of the layout is {found:#?}, expected {expected:#?}"));
        }
    }
    let mut distinct: Vec<u32> = numbers.values().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() != numbers.len() {
        return Some(format!("pools share a number: {numbers:?}"));
    }
    let (expected, found) = (model.stats(), tested.stats());
    if expected != found {
        let wrong = |name: &&String| expected.get(*name) != found.get(*name);
        let names: Vec<String> = expected
            .keys()
            .chain(found.keys())
            .filter(wrong)
            .map(|name| format!("{name} {:?}, not {:?}", found.get(name), expected.get(name)))
            .collect();
        return Some(format!("statistics: {}", names.join("; ")));
    }
    let settings = model.allocator.settings();
    let (expected, found) = (settings.limit, tested.allocator.limit_bytes());
    if expected != found {
        return Some(format!("limit {found:?}, expected {expected:?}"));
    }
    for stream in 0..case.stream_handles().len() as u32 {
        for size_bytes in [1, MIB, MIB + 1, 50 * MIB] {
            let request = Request { block: BlockId::NONE, size_bytes, stream: StreamId(stream) };
            let expected = model.allocator.pool_of(request);
            let found = tested.allocator.pool_of(request);
            if numbers.get(&expected).is_some_and(|&number| number != found) {
                return Some(format!(
                    "pool {found}: {request:?}, expected {:?}",
                    numbers[&expected]
                ));
            }
            // With a split limit, which holes "could serve" a request depends on its size.
            if settings.max_split_size != u64::MAX {
                continue;
            }
            let expected = model.allocator.largest_hole(request);
            let found = tested.allocator.largest_hole(request);
            if found != expected {
                return Some(format!("largest hole {found}, expected {expected}: {request:?}"));
            }
        }
    }
    None
}

/// Nothing may be left on the device. A reservation may, where the device refused something.
fn check_all_came_back<A: Allocator>(driver: &Driver<A>) -> Result<(), String> {
    let levels = driver.allocator.levels();
    let device = driver.device();
    let reservations = if device.refused() == 0 { device.reservations() } else { 0 };
    if levels != Levels::default() || device.used_bytes() != 0 || reservations != 0 {
        return Err(format!(
            "all freed, but {levels:?}, {} bytes used, {reservations} reservations",
            device.used_bytes()
        ));
    }
    Ok(())
}

/// Random cases until the operations are spent.
pub(crate) fn compare_random_programs<A: Allocator>(build: impl Fn(&Case) -> A) -> Coverage {
    let mut coverage = Coverage::default();
    while coverage.operations < OPERATIONS {
        if let Err(difference) = run_case(coverage.runs, &build, &mut coverage) {
            panic!("{difference}");
        }
    }
    coverage
}

/// The generator reaches what the comparison is for.
fn check_coverage(coverage: &Coverage) {
    println!("{coverage:#?}");
    assert!(coverage.clones > coverage.runs / 10, "{coverage:?}");
    let met = |name| coverage.met[name];
    // At least so many in a million operations: about half of what the generator reaches.
    for (name, count, least) in [
        ("requests refused", coverage.ooms, 50_000),
        ("flushes", coverage.flushes, 40_000),
        ("completions in malloc", coverage.completions_in_malloc, 30_000),
        ("oversize blocks", coverage.oversize_allocations, 12_000),
        ("segments collected", met("collected"), 3_000),
        ("segments released to make room", met("targeted"), 1_200),
        ("maps", coverage.maps, 20_000),
        ("unmaps", coverage.unmaps, 12_000),
        ("unmaps inside a block", met("unmaps_inside"), 3_000),
        ("maps undone", met("pages_undone"), 5_000),
        ("attempts that left pages mapped", met("partial_maps"), 4),
        ("reservations not taken back", met("reservations_kept"), 100),
        ("steps past what can grow", met("tail_steps"), 2_500),
        ("expandable blocks skipped", met("expandable_skipped"), 600),
        ("ages of expandable blocks", met("expandable_ages"), 20),
        ("switches of expandable segments", coverage.switches, 500),
        ("frees deferred in pools", coverage.deferrals_in_pools, 6_000),
        ("flushes missed in pools", met("flushes_missed"), 15_000),
        ("pools that helped out", met("overflows"), 1_000),
        ("blocks not split in pools", met("unsplit"), 4_000),
        ("pools deleted", coverage.deletions, 700),
        ("releases from pools", met("pool_releases"), 2_500),
        ("blocks found after a flush", met("research_hits"), 50),
        ("failures of the real allocator", coverage.failures, 1),
    ] {
        // Small samples may miss what is rare.
        let least = if cfg!(debug_assertions) { least / 4 } else { least };
        let enough = count >= least * coverage.operations / 1_000_000;
        assert!(enough, "{name}: {count}, at least {least} in a million expected: {coverage:?}");
    }
}

#[test]
fn random_programs_reach_the_rare_rules() {
    check_coverage(&compare_random_programs(Case::model));
}

/// A comparison that cannot fail proves nothing: rules changed by one step must be seen.
#[test]
fn a_changed_rule_is_found() {
    type Change = fn(&mut Settings);
    let changes: [(&str, Change); 5] = [
        ("limit", |s| s.limit = s.limit.map(|limit| limit - 1)),
        ("garbage collection", |s| s.gc_threshold *= 0.9),
        ("split limit", |s| s.max_split_size = s.max_split_size.saturating_add(MIB)),
        ("oversize match", |s| s.max_non_split_rounding += 2 * MIB),
        ("rounding", |s| s.roundup[3] *= 2),
    ];
    for (name, change) in changes {
        assert_found(name, |case| {
            let mut inputs = case.inputs.clone();
            change(&mut inputs.settings);
            Model::new(inputs)
        });
    }
    for mutation in Mutation::RULES {
        assert_found(&format!("{mutation:?}"), |case| case.model().mutated(mutation));
    }
}

fn assert_found(name: &str, build: impl Fn(&Case) -> Model) {
    let seed = (0..2000).find(|&seed| run_case(seed, &build, &mut Coverage::default()).is_err());
    assert!(seed.is_some(), "{name}: 2000 random runs saw no difference");
}
