//! Random programs under random knobs on random devices: the model keeps its own invariants, and
//! `stitch+policy=shipped` must do what the model does, call by call.

use std::fmt::Write;

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, Observed, RunOptions, run};
use fraglab::metrics::DecisionRow;
use fraglab::trace::{AddressPolicy, Op, Trace, read_text};
use fraglab::units::MIB;
use serde_json::Value;

use super::model::{Deed, Done, Model};
use super::replay::{Replayed, device_of, replay};
use super::settings::Settings;
use crate::model::random::Random;

/// Programs that the model and the allocator run.
const PROGRAMS: u64 = if cfg!(debug_assertions) { 200 } else { 2000 };
/// Most operations of a program.
const STEPS_MAX: u64 = 160;

/// Sizes at and around every border of 2.1.
const BORDERS: [u64; 17] = [
    1,
    512,
    513,
    MIB - 512,
    MIB - 1,
    MIB,
    MIB + 1,
    2 * MIB,
    2 * MIB + 1,
    4 * MIB,
    10 * MIB - 1,
    10 * MIB,
    10 * MIB + 1,
    19 * MIB,
    20 * MIB,
    20 * MIB + 1,
    40 * MIB,
];

/// An operation of a program; blocks by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Alloc { block: u64, bytes: u64, stream: u64 },
    Free(u64),
    Defer(u64),
    Done(u64),
    EmptyCache,
}

impl Step {
    fn block(self) -> Option<u64> {
        match self {
            Step::Alloc { block, .. }
            | Step::Free(block)
            | Step::Defer(block)
            | Step::Done(block) => Some(block),
            Step::EmptyCache => None,
        }
    }
}

/// A program, the device it runs on, and the knobs.
#[derive(Clone, Debug)]
struct Program {
    spec: String,
    header: Vec<String>,
    steps: Vec<Step>,
}

/// What a program is made for: most for nothing special, some for rules that are met too rarely
/// else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theme {
    Any,
    /// Much is stitched, and addresses run out for a while: collections between attempts.
    Addresses,
    /// Small tensors in large stitched blocks, and flushes: what an active block maps is kept.
    Prefixes,
    /// Tensors of hundreds of MiB, which the default limits let stitch.
    Large,
    /// A device with few addresses or mappings.
    Capped,
    /// Most tensors are deferred: stitched blocks keep the events of their parts.
    Deferred,
}

impl Program {
    fn random(seed: u64) -> Program {
        let random = &mut Random::new(seed);
        let theme = match random.range(0..=11) {
            0 => Theme::Addresses,
            1 => Theme::Prefixes,
            2 => Theme::Large,
            3 => Theme::Capped,
            4 => Theme::Deferred,
            5 => return Program::at_the_brim(random),
            _ => Theme::Any,
        };
        let mut header = Vec::new();
        let scale = if theme == Theme::Large { 20 } else { 1 };
        match random.range(0..=3) {
            0 | 1 if theme != Theme::Addresses => {
                header.push(format!("capacity {}MiB", scale * random.range(30..=260)));
            }
            2 => header.push("capacity 4000MiB".to_owned()),
            _ => {}
        }
        let limited = matches!(theme, Theme::Any | Theme::Large) && random.percent(40);
        if limited {
            header.push(format!("limit {}MiB", scale * random.range(30..=260)));
        }
        if theme == Theme::Capped {
            caps(random, &mut header);
        }
        if theme == Theme::Addresses {
            no_addresses(random, &mut header);
        } else if random.percent(35) {
            faults(random, &mut header);
        }
        let spec = match theme {
            Theme::Any | Theme::Capped => spec(random, limited, &SMALL_KNOBS),
            Theme::Large => spec(random, limited, &LARGE_KNOBS),
            Theme::Deferred => {
                let auto_gc = random.pick(&["64MiB", "128MiB", "256MiB"]);
                format!("stitch+policy=shipped+frag_limit=2MiB+reuse_limit=1+auto_gc={auto_gc}")
            }
            _ => {
                let limit = random.pick(&["100", "100", "1"]);
                format!("stitch+policy=shipped+frag_limit=2MiB+reuse_limit={limit}")
            }
        };
        let steps = if theme == Theme::Prefixes { prefixes(random) } else { steps(random, theme) };
        Program { spec, header, steps }
    }

    /// Two segments, a stitched block over both, idle and fragmented, and a request for new memory
    /// of its size: about as much as the device still has, while reservations fail.
    fn at_the_brim(random: &mut Random) -> Program {
        let (low, high) = (2 * random.range(5..=15), 2 * random.range(5..=15));
        let sum = low + high;
        let capacity = 2 * sum + random.pick(&[0, 0, 2]) - random.pick(&[0, 2]);
        let refused = 8 * random.range(1..=3) - random.pick(&[0, 0, 1]);
        let mut header = vec![format!("capacity {capacity}MiB")];
        // The two segments and the stitched block are reservations 1 to 3.
        header.extend((4..4 + refused).map(|number| format!("fail address_reserve {number}")));
        let mut steps = Vec::new();
        let sizes = [low, high, sum, 2 * random.range(1..=4), sum];
        for (block, mib) in (0..).zip(sizes) {
            steps.push(Step::Alloc { block, bytes: mib * MIB, stream: 0 });
            match block {
                1 => steps.extend([Step::Free(0), Step::Free(1)]),
                2 => steps.push(Step::Free(2)),
                _ => {}
            }
        }
        let spec = "stitch+policy=shipped+frag_limit=2MiB".to_owned();
        Program { spec, header, steps }
    }

    fn text(&self) -> String {
        let mut text = self.header.join("\n");
        text.push('\n');
        for step in &self.steps {
            match step {
                Step::Alloc { block, bytes, stream } => {
                    writeln!(text, "alloc b{block} {bytes} stream={stream}")
                }
                Step::Free(block) => writeln!(text, "free b{block}"),
                Step::Defer(block) => writeln!(text, "defer b{block}"),
                Step::Done(block) => writeln!(text, "done b{block}"),
                Step::EmptyCache => writeln!(text, "empty_cache"),
            }
            .expect("a string takes it");
        }
        text
    }

    fn trace(&self) -> Trace {
        read_text(&self.text()).expect("a valid program")
    }

    fn settings(&self) -> Settings {
        Settings::of_spec(&self.spec).expect("the shipped policy")
    }

    /// Without a line of the header, a knob, a block, a free, a wait or a flush.
    fn smaller(&self) -> Vec<Program> {
        let without = |keep: &dyn Fn(usize, &Step) -> bool| {
            let steps = self.steps.iter().enumerate().filter(|&(at, step)| keep(at, step));
            Program { steps: steps.map(|(_, &step)| step).collect(), ..self.clone() }
        };
        let mut smaller: Vec<Program> = (0..self.header.len())
            .map(|at| {
                let mut program = self.clone();
                program.header.remove(at);
                program
            })
            .collect();
        let knobs: Vec<&str> = self.spec.split('+').collect();
        smaller.extend((2..knobs.len()).map(|at| {
            let mut fewer = knobs.clone();
            fewer.remove(at);
            Program { spec: fewer.join("+"), ..self.clone() }
        }));
        for (at, step) in self.steps.iter().enumerate() {
            match *step {
                Step::Alloc { block, .. } => {
                    smaller.push(without(&|_, step| step.block() != Some(block)));
                }
                Step::EmptyCache => smaller.push(without(&|other, _| other != at)),
                // What is never freed is a smaller program too.
                Step::Free(_) => smaller.push(without(&|other, _| other != at)),
                Step::Defer(block) => smaller.push(without(&|_, step| {
                    *step != Step::Defer(block) && *step != Step::Done(block)
                })),
                Step::Done(_) => smaller.push(without(&|other, _| other != at)),
            }
        }
        smaller
    }

    /// The smallest program by leaving out that still fails, with what fails.
    fn shrunk(mut self, fails: impl Fn(&Program) -> Option<String>) -> (Program, String) {
        let mut why = fails(&self).expect("it fails");
        loop {
            let next = self.smaller().into_iter().find_map(|p| fails(&p).map(|why| (p, why)));
            let Some((program, reason)) = next else { return (self, why) };
            (self, why) = (program, reason);
        }
    }
}

/// Calls that fail: single ones and runs.
fn faults(random: &mut Random, header: &mut Vec<String>) {
    for _ in 0..random.range(1..=4) {
        let (call, last) = random.pick(&[
            ("malloc", 4),
            ("address_reserve", 20),
            ("create", 300),
            ("map", 500),
            ("set_access", 500),
            ("free", 4),
            ("unmap", 20),
            ("release", 200),
            ("address_free", 20),
        ]);
        let first = random.range(1..=last);
        let count = if random.percent(50) { 1 } else { random.pick(&[2, 8, 17, 25, 80]) };
        header.extend((first..first + count).map(|number| format!("fail {call} {number}")));
    }
    header.sort();
    header.dedup();
}

/// Reservations that fail, about as many as an attempt makes or some more.
fn no_addresses(random: &mut Random, header: &mut Vec<String>) {
    let mut first = random.range(4..=20);
    for _ in 0..random.range(1..=4) {
        let count = random.pick(&[7, 8, 8, 9, 16, 17, 24]);
        header
            .extend((first..first + count).map(|number| format!("fail address_reserve {number}")));
        first += count + random.range(1..=12);
    }
}

/// Caps that are reached now and then.
fn caps(random: &mut Random, header: &mut Vec<String>) {
    let which = random.range(0..=2);
    if which > 0 {
        header.push(format!("mappings {}", random.range(20..=250)));
    }
    if which < 2 {
        header.push(format!("address_space {}MiB", random.range(60..=600)));
    }
}

/// Values of the knobs that are sizes.
struct Knobs {
    frag_limit: [&'static str; 6],
    auto_gc: [&'static str; 4],
    max_split_size_mb: [&'static str; 4],
}

const SMALL_KNOBS: Knobs = Knobs {
    frag_limit: ["2MiB", "2MiB", "8MiB", "12MiB", "20MiB", "32MiB"],
    auto_gc: ["20MiB", "64MiB", "256MiB", "1GiB"],
    max_split_size_mb: ["21", "24", "33", "50"],
};
/// 512 MiB and 1000 GiB are the defaults.
const LARGE_KNOBS: Knobs = Knobs {
    frag_limit: ["512MiB", "512MiB", "512MiB", "512MiB", "128MiB", "256MiB"],
    auto_gc: ["1000GiB", "600MiB", "2GiB", "6GiB"],
    max_split_size_mb: ["21", "200", "400", "560"],
};

fn spec(random: &mut Random, limited: bool, knobs: &Knobs) -> String {
    let mut spec = "stitch+policy=shipped".to_owned();
    let mut knob = |name: &str, value: &str| {
        spec.push_str(&format!("+{name}={value}"));
    };
    knob("frag_limit", random.pick(&knobs.frag_limit));
    if random.percent(40) {
        knob("reuse_limit", random.pick(&["1", "1.5", "2", "4", "100"]));
    }
    if random.percent(35) {
        knob("defrag_level", random.pick(&["1", "2"]));
    }
    if random.percent(35) {
        knob("auto_gc", random.pick(&knobs.auto_gc));
    }
    if random.percent(40) {
        knob("re_alloc", "true");
    }
    if random.percent(7) {
        knob("vmm_defragment", "false");
    }
    if random.percent(30) {
        knob("max_split_size_mb", random.pick(&knobs.max_split_size_mb));
    }
    if random.percent(if limited { 60 } else { 10 }) {
        knob("garbage_collection_threshold", random.pick(&["0.1", "0.35", "0.6", "0.9"]));
    }
    if random.percent(20) {
        knob("roundup_power2_divisions", random.pick(&["2", "4", "8"]));
    }
    if random.percent(15) {
        knob("quirks", "true");
    }
    spec
}

fn steps(random: &mut Random, theme: Theme) -> Vec<Step> {
    let range = match theme {
        Theme::Large => 130 * MIB..=random.pick(&[300, 600, 600]) * MIB,
        _ => 1..=random.pick(&[12, 30, 70]) * MIB,
    };
    let mut sizes: Vec<u64> = (0..5).map(|_| random.range(range.clone())).collect();
    if theme == Theme::Large {
        sizes.extend((0..4).map(|_| random.range(512 * MIB..=600 * MIB)));
    }
    sizes.extend((0..3).map(|_| random.pick(&BORDERS)));
    let any = matches!(theme, Theme::Any | Theme::Capped | Theme::Large);
    let streams = match theme {
        Theme::Any => random.pick(&[0, 1, 2, 3, 8]),
        _ => random.range(0..=1),
    };
    let (blocks_max, flushes) = match theme {
        _ if any => (random.pick(&[4, 10, 30]), random.pick(&[0, 1, 4])),
        Theme::Deferred => (random.pick(&[6, 10, 15]), 3),
        _ => (random.pick(&[6, 15]), 0),
    };
    let defers = match theme {
        Theme::Deferred => 80,
        _ if any => random.pick(&[0, 0, 10, 40]),
        _ => 0,
    };
    let completions = if theme == Theme::Deferred { 35 } else { 15 };
    let repeats = if any { random.pick(&[20, 60, 95]) } else { 20 };
    let (mut live, mut waiting): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    let mut steps = Vec::new();
    let mut next = 0;
    for _ in 0..random.range(5..=STEPS_MAX) {
        if random.percent(flushes) {
            steps.push(Step::EmptyCache);
        } else if !waiting.is_empty() && random.percent(completions) {
            let at = random.range(0..=waiting.len() as u64 - 1) as usize;
            steps.push(Step::Done(waiting.swap_remove(at)));
        } else if live.len() as u64 >= blocks_max || !live.is_empty() && random.percent(45) {
            let block = live.swap_remove(random.range(0..=live.len() as u64 - 1) as usize);
            if random.percent(defers) {
                steps.push(Step::Defer(block));
                waiting.push(block);
            } else {
                steps.push(Step::Free(block));
            }
        } else {
            let bytes = match random.percent(repeats) {
                true => random.pick(&sizes),
                false if random.percent(30) => random.pick(&BORDERS),
                false => random.range(range.clone()),
            };
            steps.push(Step::Alloc { block: next, bytes, stream: random.range(0..=streams) });
            live.push(next);
            next += 1;
        }
    }
    steps
}

/// Whole segments are stitched, part of the stitched block is taken, and something happens to what
/// is left of it.
fn prefixes(random: &mut Random) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut next = 0;
    let mut alloc = |steps: &mut Vec<Step>, bytes| {
        steps.push(Step::Alloc { block: next, bytes, stream: 0 });
        next += 1;
        next - 1
    };
    for _ in 0..random.range(1..=4) {
        let sizes: Vec<u64> =
            (0..random.range(2..=5)).map(|_| 2 * MIB * random.range(5..=10)).collect();
        let parts: Vec<u64> = sizes.iter().map(|&bytes| alloc(&mut steps, bytes)).collect();
        steps.extend(parts.into_iter().map(Step::Free));
        let sum: u64 = sizes.iter().sum();
        let whole = alloc(&mut steps, sum);
        steps.push(Step::Free(whole));
        let taken = alloc(&mut steps, random.range(sum / 3..=sum));
        let waits = random.percent(20);
        if waits {
            steps.push(Step::Defer(taken));
        }
        for _ in 0..random.range(1..=3) {
            match random.range(0..=2) {
                0 => steps.push(Step::EmptyCache),
                1 => drop(alloc(&mut steps, 400 * MIB)),
                _ => drop(alloc(&mut steps, random.range(1..=30 * MIB))),
            }
        }
        if waits {
            steps.push(Step::Done(taken));
        } else if random.percent(60) {
            steps.push(Step::Free(taken));
        }
    }
    steps
}

/// The invariants hold after every event under all knobs and failures, and everything comes back.
#[test]
fn the_model_keeps_its_invariants() {
    let mut met = [0u64; 6];
    for seed in 0..PROGRAMS / 4 {
        let program = Program::random(seed);
        let trace = program.trace();
        let device = device_of(&trace);
        let limit = trace.header.limit_bytes;
        let mut model = Model::new(Settings { limit, ..program.settings() }, device);
        let mut handles = vec![None; trace.blocks.len()];
        for event in &trace.events {
            match event.op {
                Op::Alloc(block) => {
                    let Some(asked) = trace.blocks.get(block.index()) else { continue };
                    let stream = trace.streams[asked.stream.index()].handle;
                    handles[block.index()] = model.malloc(asked.size_bytes, stream);
                }
                Op::Free(block) => {
                    handles[block.index()].take().into_iter().for_each(|h| model.free(h));
                }
                Op::Defer(block) => handles[block.index()].iter().for_each(|&h| model.defer(h)),
                Op::Done(block) => {
                    handles[block.index()].take().into_iter().for_each(|h| model.complete(h));
                }
                Op::EmptyCache => model.empty_cache(),
                _ => {}
            }
            model.check();
            let reserved = model.levels().reserved_bytes;
            assert!(limit.is_none_or(|limit| reserved <= limit), "seed {seed}: over the limit");
        }
        model.empty_cache();
        model.check();
        let counters = model.counters;
        let seen = [
            counters.stitches,
            counters.stitch_reuses,
            counters.stitch_evictions,
            counters.segment_frees,
            counters.alloc_retries,
            counters.ooms,
        ];
        met.iter_mut().zip(seen).for_each(|(sum, count)| *sum += count);
    }
    assert!(met.iter().all(|&count| count > 100), "hardly met: {met:?}");
}

fn observe(program: &Program, spec: &str) -> Result<Observed, String> {
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.address_policy = Some(AddressPolicy::Ascending);
    options.paranoid = true;
    let spec = spec.parse().expect("a specification");
    let observe = Observe { decisions: true, ..Observe::default() };
    run(&program.trace(), &spec, &options, observe).map_err(|error| error.to_string())
}

/// The rows that are compared: event, action, address and size.
type Row = (u64, &'static str, Option<u64>, u64);

fn model_rows(run: &Replayed) -> Vec<Row> {
    let name = |deed| match deed {
        Deed::Alloc => "alloc",
        Deed::SegmentAlloc => "segment_alloc",
        Deed::SegmentFree => "segment_free",
        Deed::Stitch => "stitch",
        Deed::Unstitch => "unstitch",
    };
    let row = |&(event, Done { deed, address, size })| (event, name(deed), Some(address), size);
    run.log.iter().map(row).collect()
}

/// Both sides give out the same addresses from the same bases.
fn allocator_rows(rows: &[DecisionRow]) -> Vec<Row> {
    const COMPARED: [&str; 5] = ["alloc", "segment_alloc", "segment_free", "stitch", "unstitch"];
    let rows = rows.iter().filter(|row| COMPARED.contains(&row.action));
    rows.map(|row| (row.event_index, row.action, row.address, row.size_bytes)).collect()
}

/// What the allocator of this specification does otherwise than the model, if anything. Counters
/// that the allocator does not have are no difference if `counters_vary`.
fn difference(program: &Program, spec: &str, counters_vary: bool) -> Option<String> {
    let expected = replay(&program.trace(), &program.settings());
    let observed = match observe(program, spec) {
        Ok(observed) => observed,
        Err(error) => return Some(error),
    };
    let (ours, theirs) = (model_rows(&expected), allocator_rows(&observed.decisions));
    let first = (0..ours.len().max(theirs.len())).find(|&at| ours.get(at) != theirs.get(at));
    if let Some(at) = first {
        let (ours, theirs) = (ours.get(at), theirs.get(at));
        return Some(format!("row {at}: the model has {ours:x?}, the allocator {theirs:x?}"));
    }
    let result = serde_json::to_value(&observed.result).expect("plain data");
    let expected = expected.json();
    for section in ["calls", "peaks", "final", "outcome", "counters"] {
        let fields = expected[section].as_object().expect("an object");
        for (name, value) in fields {
            let got = result[section].get(name);
            let other = counters_vary && section == "counters" && got.is_none();
            let got = got.unwrap_or(&Value::Null);
            if got != value && !other {
                return Some(format!(
                    "{section}.{name}: the model has {value}, the allocator {got}"
                ));
            }
        }
    }
    None
}

#[test]
fn the_allocator_does_what_the_model_does() {
    let seeds = std::env::var("GMLAKE_SEEDS").ok().and_then(|text| {
        let (first, last) = text.split_once("..")?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    let (first, last) = seeds.unwrap_or((0, PROGRAMS));
    for seed in first..last {
        let program = Program::random(seed);
        let differs = |program: &Program| difference(program, &program.spec, false);
        if differs(&program).is_some() {
            let (program, why) = program.shrunk(differs);
            panic!("seed {seed}: {why}\n--alloc {}\n{}", program.spec, program.text());
        }
    }
}

/// Up to 1 MiB both allocators are PyTorch's: the comparison itself is tested on `caching`.
#[test]
fn small_requests_go_as_in_caching() {
    for seed in 0..PROGRAMS / 10 {
        let mut program = Program::random(seed);
        program.spec = "stitch+policy=shipped".to_owned();
        for step in &mut program.steps {
            if let Step::Alloc { bytes, .. } = step {
                *bytes = 1 + (*bytes - 1) % MIB;
            }
        }
        let tight = program.header.iter_mut().filter(|line| line.starts_with("limit"));
        tight.for_each(|line| *line = "limit 5MiB".to_owned());
        let differs = |program: &Program| difference(program, "caching", true);
        if differs(&program).is_some() {
            let (program, why) = program.shrunk(differs);
            panic!("seed {seed}: {why}\n{}", program.text());
        }
    }
}
