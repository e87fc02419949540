//! Random operations under random settings on random devices: whatever the allocator under test
//! says and does must be what the model says and does, operation by operation.

use fraglab::alloc::{Action, ActionKind, Allocator, Levels, OutOfMemory, Request};
use fraglab::units::{BlockId, MIB, StreamId};

use crate::model::device::{Bases, TestDevice};
use crate::model::driver::Driver;
use crate::model::random::Random;
use crate::model::{Model, Settings};

/// Operations of all runs together. Unoptimized builds do fewer, because they are 20 times slower.
const OPERATIONS: u64 = if cfg!(debug_assertions) { 50_000 } else { 1_000_000 };
/// Blocks that may be live or deferred at once.
const BLOCKS_MAX: usize = 60;
/// Layout and statistics are compared every so many operations.
const FULL_COMPARISON_EVERY: u64 = 50;

/// The world of one run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    settings: Settings,
    /// The same settings as a `PYTORCH_CUDA_ALLOC_CONF` string; it sets the limit if it can.
    pub(crate) conf: String,
    /// The limit where `conf` does not set it.
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) device_total_bytes: u64,
    pub(crate) stream_handles: Vec<u64>,
    device: TestDevice,
    /// Sizes that are asked for again and again, so that free blocks of equal size are common.
    sizes: Vec<u64>,
    size_max: u64,
    /// Percent of the requests that take one of `sizes`.
    repeats: u64,
    /// Percent of the frees that wait for another stream.
    defers: u64,
    operations: u64,
}

impl Case {
    fn new(random: &mut Random) -> Case {
        let capacity_bytes = match random.range(0..=3) {
            0 => random.range(20..=100) * MIB,
            1 => random.range(100..=500) * MIB,
            2 => random.range(500..=3000) * MIB,
            _ => 1 << 40,
        };
        let device_total_bytes = capacity_bytes + random.range(0..=64) * MIB;
        let bases = random.pick(&[
            Bases::Ascending,
            Bases::Descending,
            Bases::Scrambled,
            Bases::LowestFree,
        ]);
        let mut device = TestDevice::new(capacity_bytes, bases);
        if random.percent(15) {
            device = device.refusing(random.range(3..=40));
        }
        let size_max = random.pick(&[12, 30, 60, 200]) * MIB;
        let sizes = (0..random.range(2..=8)).map(|_| size(random, size_max)).collect();
        let mut case = Case {
            settings: Settings::default(),
            conf: String::new(),
            limit_bytes: None,
            device_total_bytes,
            stream_handles: stream_handles(random),
            device,
            sizes,
            size_max,
            repeats: random.pick(&[0, 30, 60, 95]),
            defers: random.pick(&[0, 0, 10, 30, 70]),
            operations: random.range(50..=700),
        };
        case.choose_settings(random);
        case
    }

    fn choose_settings(&mut self, random: &mut Random) {
        let mut options = Vec::new();
        if random.percent(25) {
            let mb = random.pick(&[11, 12, 13, 16, 32, 64]);
            self.settings.large_segment_size = mb * MIB;
            self.settings.max_non_split_rounding = mb * MIB;
            options.push(format!("large_segment_size_mb:{mb}"));
        }
        let large_mb = self.settings.large_segment_size / MIB;
        if random.percent(45) {
            let mb = large_mb + random.pick(&[0, 1, 3, 10, 20, 60]);
            self.settings.max_split_size = mb * MIB;
            options.push(format!("max_split_size_mb:{mb}"));
            // Around the limit and above it, where blocks are matched and released by other rules.
            let limit = mb * MIB;
            self.sizes.extend([limit - 512, limit, limit + limit / 2, 2 * limit + MIB]);
            if random.percent(40) {
                let mb = large_mb + random.pick(&[0, 1, 5, 40]);
                self.settings.max_non_split_rounding = mb * MIB;
                options.push(format!("max_non_split_rounding_mb:{mb}"));
            }
        }
        if random.percent(40) {
            let (table, text) =
                if random.percent(40) { roundup_single(random) } else { roundup_list(random) };
            self.settings.roundup = table;
            options.push(format!("roundup_power2_divisions:{text}"));
        }
        if random.percent(60) {
            self.choose_limit(random, &mut options);
        }
        random.shuffle(&mut options);
        self.conf = options.join(",");
    }

    fn choose_limit(&mut self, random: &mut Random, options: &mut Vec<String>) {
        if random.percent(60) {
            let text = format!("0.{:02}", random.range(1..=99));
            self.settings.gc_threshold = text.parse().expect("a fraction");
            options.push(format!("garbage_collection_threshold:{text}"));
        }
        if random.percent(50) {
            let text = format!("0.{:03}", random.range(1..=999));
            let fraction: f64 = text.parse().expect("a fraction");
            self.settings.limit = Some((fraction * self.device_total_bytes as f64) as u64);
            options.push(format!("per_process_memory_fraction:{text}"));
        } else {
            // Whole segments, so that the limit can be reached exactly, or any number of bytes.
            let uneven = if random.percent(50) { random.range(0..=MIB) } else { 0 };
            self.limit_bytes = Some(random.range(10..=500) * 2 * MIB + uneven);
            self.settings.limit = self.limit_bytes;
        }
    }

    fn model(&self) -> Model {
        Model::new(self.settings.clone(), self.stream_handles.clone())
    }
}

fn stream_handles(random: &mut Random) -> Vec<u64> {
    let mut handles = [0, 1, 0x7100, 0x8100, 0x5581_2f00_3c70, (1 << 63) - 1, 1 << 63, u64::MAX];
    random.shuffle(&mut handles);
    handles[..random.range(1..=4) as usize].to_vec()
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
enum Op {
    Malloc(Request),
    Free(BlockId),
    Defer(BlockId),
    Done(BlockId),
    EmptyCache,
}

/// What can be seen of an allocator after every operation.
#[derive(Debug, PartialEq)]
struct Seen {
    refused: Option<OutOfMemory>,
    log: Vec<Action>,
    levels: Levels,
    malloc_calls: u64,
    free_calls: u64,
}

fn apply<A: Allocator>(driver: &mut Driver<A>, op: Op) -> Seen {
    let mut refused = None;
    match op {
        Op::Malloc(request) => refused = driver.malloc(request).err(),
        Op::Free(block) => driver.free(block),
        Op::Defer(block) => driver.defer(block),
        Op::Done(block) => driver.done(block),
        Op::EmptyCache => driver.empty_cache(),
    }
    Seen {
        refused,
        log: driver.take_log(),
        levels: driver.allocator.levels(),
        malloc_calls: driver.device().malloc_calls,
        free_calls: driver.device().free_calls,
    }
}

/// Chooses operations by the state of the model.
struct Program<'a> {
    case: &'a Case,
    random: Random,
    blocks_made: u32,
    /// Percent of operations that ask for memory; changes from time to time.
    growth: u64,
}

impl Program<'_> {
    fn next(&mut self, model: &Driver<Model>) -> Op {
        if self.random.percent(2) {
            self.growth = self.random.pick(&[10, 40, 55, 90]);
        }
        let (live, pending) = (model.live(), model.pending());
        let full = live.len() + pending.len() >= BLOCKS_MAX;
        if self.random.range(0..=199) == 0 {
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

    fn request(&mut self) -> Request {
        let size_bytes = if self.random.percent(self.case.repeats) {
            self.random.pick(&self.case.sizes)
        } else {
            size(&mut self.random, self.case.size_max)
        };
        let stream =
            StreamId(self.random.range(0..=self.case.stream_handles.len() as u64 - 1) as u32);
        self.blocks_made += 1;
        Request { block: BlockId(self.blocks_made - 1), size_bytes, stream }
    }
}

/// How often the interesting things happened: a generator that misses them proves nothing.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    runs: u64,
    operations: u64,
    ooms: i64,
    flushes: i64,
    completions_in_malloc: u64,
    /// Segments that garbage collection gave back.
    collected: u64,
    /// Segments given back to make room for an oversize request.
    targeted: u64,
    oversize_allocations: i64,
    clones: u64,
}

impl Coverage {
    fn add(&mut self, case: &Case, op: Op, seen: &Seen, flushed: bool) {
        self.operations += 1;
        if !matches!(op, Op::Malloc(_)) {
            return;
        }
        let of_kind = |kind| seen.log.iter().filter(|action| action.kind == kind).count() as u64;
        self.completions_in_malloc += of_kind(ActionKind::FreeCompleted);
        // What a malloc without a flush gave back, where only one rule can have done it.
        if !flushed && case.settings.max_split_size == u64::MAX {
            self.collected += of_kind(ActionKind::SegmentFree);
        } else if !flushed && case.settings.gc_threshold == 0.0 {
            self.targeted += of_kind(ActionKind::SegmentFree);
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
    let mut program = Program { case: &case, random, blocks_made: 0, growth: 55 };
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
        let op = program.next(&model);
        let retries = model.retries();
        let expected = apply(&mut model, op);
        coverage.add(&case, op, &expected, model.retries() != retries);
        let both = std::iter::once(&mut tested).chain(&mut original);
        for (which, driver) in both.enumerate() {
            let which = ["the allocator", "its original"][which];
            let seen = apply(driver, op);
            if seen != expected {
                let what = format!("{op:?}\nexpected {expected:#?}\n{which} {seen:#?}");
                return Err(told(number, what));
            }
            let full = number % FULL_COMPARISON_EVERY == 0 || number + 1 == case.operations;
            if full && let Some(difference) = difference(&model, driver, &case) {
                return Err(told(number, format!("after {op:?}, {which}: {difference}")));
            }
        }
    }
    let stats = model.stats();
    coverage.runs += 1;
    coverage.ooms += stats["num_ooms"];
    coverage.flushes += stats["num_alloc_retries"];
    coverage.oversize_allocations += stats["oversize_allocations.allocated"];
    give_everything_back(&mut tested).map_err(|what| told(case.operations, what))
}

/// Layout, statistics and holes: the first that differs, in words.
fn difference<A: Allocator>(
    model: &Driver<Model>,
    tested: &Driver<A>,
    case: &Case,
) -> Option<String> {
    let (expected, found) = (model.layout(), tested.layout());
    if expected != found {
        let at = (0..).find(|&at| expected.get(at) != found.get(at)).expect("they differ");
        let (expected, found) = (expected.get(at), found.get(at));
        return Some(format!("block {at} of the layout is {found:#?}, expected {expected:#?}"));
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
    let (expected, found) = (case.settings.limit, tested.allocator.limit_bytes());
    if expected != found {
        return Some(format!("limit {found:?}, expected {expected:?}"));
    }
    // With a split limit, which holes "could serve" a request depends on its size.
    if case.settings.max_split_size != u64::MAX {
        return None;
    }
    for stream in 0..case.stream_handles.len() as u32 {
        for size_bytes in [1, MIB, MIB + 1, 50 * MIB] {
            let request = Request { block: BlockId::NONE, size_bytes, stream: StreamId(stream) };
            let expected = model.allocator.largest_hole(request);
            let found = tested.allocator.largest_hole(request);
            if found != expected {
                return Some(format!("largest hole {found}, expected {expected}: {request:?}"));
            }
        }
    }
    None
}

/// Everything freed, nothing may be left on the device.
fn give_everything_back<A: Allocator>(driver: &mut Driver<A>) -> Result<(), String> {
    for block in driver.live() {
        driver.free(block);
    }
    driver.empty_cache();
    let levels = driver.allocator.levels();
    let device = driver.device();
    if levels != Levels::default() || device.used_bytes() != 0 {
        return Err(format!("all freed, but {levels:?} and {} bytes used", device.used_bytes()));
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
    let thousandth = coverage.operations / 1000;
    assert!(coverage.ooms as u64 > 20 * thousandth, "{coverage:?}");
    assert!(coverage.flushes as u64 > 20 * thousandth, "{coverage:?}");
    assert!(coverage.completions_in_malloc > 10 * thousandth, "{coverage:?}");
    assert!(coverage.collected > thousandth, "{coverage:?}");
    assert!(coverage.targeted > thousandth, "{coverage:?}");
    assert!(coverage.oversize_allocations as u64 > 5 * thousandth, "{coverage:?}");
    assert!(coverage.clones > coverage.runs / 10, "{coverage:?}");
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
        let found = (0..500).any(|seed| {
            let build = |case: &Case| {
                let mut settings = case.settings.clone();
                change(&mut settings);
                Model::new(settings, case.stream_handles.clone())
            };
            run_case(seed, build, &mut Coverage::default()).is_err()
        });
        assert!(found, "{name}: 500 random runs saw no difference");
    }
}
