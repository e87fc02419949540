//! `merge-ranks`: that each rank stays what it is, and that they share a device and nothing else.

use std::fs;

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Brief, Prepared, RunOptions, brief, steps_of};
use fraglab::trace::{
    Align, LIVE_BYTES_MAX, MergeError, MergeOptions, Op, RankTrace, StartState, Trace, merge,
    read_native, read_text, step_name, validate, write_text,
};
use fraglab::units::{BlockId, ModuleId, PoolId, SettingsId, StreamId, TransferId};
use proptest::prelude::*;

use crate::common::Rng;
use crate::common::program::*;
use crate::common::trace_gen::any_traces;

/// Labels that no generated phase has inside.
const LABELS: [&str; 4] = ["§0", "§1", "§2", "§3"];

fn merged(traces: &[Trace], options: MergeOptions) -> Trace {
    let ranks = traces.iter().zip(LABELS).map(|(trace, label)| RankTrace { label, trace });
    let merged = merge(&ranks.collect::<Vec<_>>(), options).expect("merged").trace;
    validate(&merged).expect("valid");
    merged
}

fn text(text: &str) -> Trace {
    read_text(text).expect("a trace")
}

fn written(trace: &Trace) -> String {
    let mut bytes = Vec::new();
    write_text(trace, &mut bytes).expect("written");
    String::from_utf8(bytes).expect("text")
}

fn replayed(trace: &Trace, allocator: &str) -> Brief {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec: AllocSpec = allocator.parse().expect("a spec");
    brief(&Prepared::new(trace, &options), &spec, None).expect("replayed")
}

/// The ids of each rank begin behind those of the ranks before.
fn before(traces: &[Trace], rank: usize, count: fn(&Trace) -> usize) -> u32 {
    traces[..rank].iter().map(|trace| count(trace) as u32).sum()
}

/// Which rank an id is of, and its id there.
fn own(traces: &[Trace], id: u32, count: fn(&Trace) -> usize) -> (usize, u32) {
    let rank = (0..traces.len())
        .rev()
        .find(|&rank| before(traces, rank, count) <= id && count(&traces[rank]) > 0);
    let rank = rank.expect("an id of some rank");
    (rank, id - before(traces, rank, count))
}

/// An event as its rank had it; nothing where the rank cannot be told by an id.
fn back(traces: &[Trace], op: Op) -> Option<(usize, Op)> {
    let block = |id: BlockId| {
        let (rank, own) = own(traces, id.0, |trace| trace.blocks.len());
        (rank, BlockId(own))
    };
    let with = |(rank, id): (usize, BlockId), op: fn(BlockId) -> Op| Some((rank, op(id)));
    match op {
        Op::Alloc(id) => with(block(id), Op::Alloc),
        Op::Attempt(id) => with(block(id), Op::Attempt),
        Op::Free(id) => with(block(id), Op::Free),
        Op::Defer(id) => with(block(id), Op::Defer),
        Op::Done(id) => with(block(id), Op::Done),
        Op::Access(id) => with(block(id), Op::Access),
        Op::Settings(id) => {
            let (rank, id) = own(traces, id.0, |trace| trace.settings_changes.len());
            Some((rank, Op::Settings(SettingsId(id))))
        }
        Op::ModuleEnter(id) => {
            let (rank, id) = own(traces, id.0, |trace| trace.modules.len());
            Some((rank, Op::ModuleEnter(ModuleId(id))))
        }
        Op::ModuleLeave(id) => {
            let (rank, id) = own(traces, id.0, |trace| trace.modules.len());
            Some((rank, Op::ModuleLeave(ModuleId(id))))
        }
        Op::Transfer(id) => {
            let (rank, id) = own(traces, id.0, |trace| trace.transfers.len());
            Some((rank, Op::Transfer(TransferId(id))))
        }
        Op::PoolDelete(id) => {
            let (rank, id) = own(traces, id.0, |trace| trace.pools.len());
            Some((rank, Op::PoolDelete(PoolId(id))))
        }
        Op::Mark(_) | Op::EmptyCache | Op::PoolEnter(_) | Op::PoolLeave(_) => None,
    }
}

/// For every request the innermost pool that is entered then.
fn pools_of_requests(trace: &Trace) -> Vec<(BlockId, Option<PoolId>)> {
    let mut entered = Vec::new();
    let mut pools = Vec::new();
    for event in &trace.events {
        match event.op {
            Op::PoolEnter(pool) => entered.push(pool),
            Op::PoolLeave(_) => {
                entered.pop();
            }
            Op::Alloc(block) | Op::Attempt(block) => pools.push((block, entered.last().copied())),
            _ => {}
        }
    }
    pools
}

fn blocks_at_start(trace: &Trace, state: StartState) -> Vec<BlockId> {
    let rows = trace.start.iter().flat_map(|start| &start.blocks);
    rows.filter(|row| row.state == state).map(|row| row.block).collect()
}

/// Whether a mark of the merged trace is this phase of this rank.
fn names_phase(merged: &str, label: &str, own: &str) -> bool {
    if merged == format!("{label}.{own}") {
        return true;
    }
    let Some((step, rest)) = merged.split_once('.').filter(|_| step_name(merged).is_some()) else {
        return false;
    };
    rest == format!("{label}.{own}")
        || (rest == label && own == step)
        || rest.strip_prefix(&format!("{label}.")).is_some_and(|part| {
            own == format!("{step}.{part}") || (own == format!("{step}.") && part.is_empty())
        })
        || (rest == label && own == format!("{step}."))
}

/// Whether all of them may be live at once in one trace.
fn fit_together(traces: &[Trace]) -> bool {
    let blocks = traces.iter().flat_map(|trace| &trace.blocks);
    blocks.map(|block| u128::from(block.size_bytes)).sum::<u128>() <= u128::from(LIVE_BYTES_MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_merged_trace_is_each_of_its_ranks(
        traces in prop::collection::vec(any_traces(), 1..=4),
        align in prop::sample::select(vec![Align::Start, Align::End, Align::Turns]),
    ) {
        prop_assume!(fit_together(&traces));
        let merged = merged(&traces, MergeOptions { align, ..MergeOptions::default() });
        // Back on each rank: the blocks that it began with, then exactly its own events.
        let mut found: Vec<Vec<Op>> = vec![Vec::new(); traces.len()];
        for event in &merged.events {
            if let Some((rank, op)) = back(&traces, event.op) {
                found[rank].push(op);
            }
        }
        for (trace, found) in traces.iter().zip(&found) {
            let deferred = blocks_at_start(trace, StartState::Deferred).into_iter();
            let mut expected: Vec<Op> =
                deferred.flat_map(|block| [Op::Alloc(block), Op::Defer(block)]).collect();
            expected.extend(blocks_at_start(trace, StartState::Live).into_iter().map(Op::Alloc));
            let told = trace.events.iter().map(|event| event.op);
            expected.extend(told.filter(|op| back(std::slice::from_ref(trace), *op).is_some()));
            prop_assert_eq!(found, &expected);
        }
        // Marks, in the order of each rank, and what names no rank: as many.
        for (rank, (trace, label)) in traces.iter().zip(LABELS).enumerate() {
            let marks = |trace: &Trace| -> Vec<String> {
                let marks = trace.events.iter().filter_map(|event| match event.op {
                    Op::Mark(phase) => Some(trace.phases[phase.index()].clone()),
                    _ => None,
                });
                marks.collect()
            };
            let all = marks(&merged);
            let of_rank: Vec<&String> = all.iter().filter(|name| name.contains(label)).collect();
            let own = marks(trace);
            prop_assert_eq!(of_rank.len(), own.len());
            for (name, own) in of_rank.iter().zip(&own) {
                prop_assert!(names_phase(name, label, own), "{} {} {}", rank, name, own);
            }
        }
        let empties = |trace: &Trace| {
            trace.events.iter().filter(|event| event.op == Op::EmptyCache).count()
        };
        prop_assert_eq!(empties(&merged), traces.iter().map(empties).sum::<usize>());
        // Every request goes to the pool that it went to.
        let pools: Vec<(BlockId, Option<PoolId>)> = pools_of_requests(&merged);
        for (rank, trace) in traces.iter().enumerate() {
            let blocks = before(&traces, rank, |trace| trace.blocks.len());
            let first_pool = before(&traces, rank, |trace| trace.pools.len());
            for (block, pool) in pools_of_requests(trace) {
                let block = BlockId(blocks + block.0);
                let expected = pool.map(|pool| PoolId(first_pool + pool.0));
                let found = pools.iter().find(|(other, _)| *other == block);
                prop_assert_eq!(found.map(|(_, pool)| *pool), Some(expected));
            }
            // Blocks keep their size, role and, among the streams of their rank, their stream.
            let streams = before(&traces, rank, |trace| trace.streams.len());
            for (at, own) in trace.blocks.iter().enumerate() {
                let block = merged.blocks[blocks as usize + at];
                prop_assert_eq!((block.size_bytes, block.role), (own.size_bytes, own.role));
                prop_assert_eq!(block.stream, StreamId(streams + own.stream.0));
                prop_assert_eq!(merged.site_label(block.site), trace.site_label(own.site));
            }
        }
    }

    #[test]
    fn together_they_ask_for_no_more_than_the_sum_and_no_less_than_the_largest(
        traces in prop::collection::vec(any_traces(), 1..=4),
    ) {
        prop_assume!(fit_together(&traces));
        let merged = merged(&traces, MergeOptions::default());
        let largest = traces.iter().map(Trace::requested_bytes_peak).max().expect("one");
        // A block that waits for another stream at the start is asked for first and freed at once.
        let bound = traces.iter().map(|trace| {
            let deferred = blocks_at_start(trace, StartState::Deferred).into_iter();
            let deferred = deferred.map(|block| trace.blocks[block.index()].size_bytes).max();
            u128::from(trace.requested_bytes_peak().max(deferred.unwrap_or(0)))
        });
        let peak = merged.requested_bytes_peak();
        prop_assert!(peak >= largest && u128::from(peak) <= bound.sum::<u128>());
    }
}

/// Allocs and frees of random sizes on two streams, at random times.
fn busy(seed: u64) -> Trace {
    let mut rng = Rng(seed);
    let (mut lines, mut live, mut time_us) = (String::new(), Vec::new(), 0);
    for number in 0..400 {
        time_us += rng.below(90);
        if live.len() > 20 || (!live.is_empty() && rng.below(3) == 0) {
            let name: String = live.swap_remove(rng.below(live.len()));
            lines.push_str(&format!("@{time_us}us free {name}\n"));
            continue;
        }
        let (kib, stream) = (1 + rng.below(30_000), [0, 7][rng.below(2)]);
        lines.push_str(&format!("@{time_us}us alloc b{number} {kib}KiB stream={stream}\n"));
        live.push(format!("b{number}"));
    }
    text(&lines)
}

#[test]
fn ranks_share_the_device_and_nothing_else() {
    let traces = [busy(1), busy(2), busy(3)];
    for align in [Align::Start, Align::End, Align::Turns] {
        let merged = merged(&traces, MergeOptions { align, ..MergeOptions::default() });
        // Nothing runs out and no cache is emptied, so what is reserved only grows, and no memory of
        // one stream serves another: together they hold what each alone holds in the end.
        for allocator in ["caching", "expandable"] {
            let alone = traces.iter().map(|trace| replayed(trace, allocator));
            let sum: u64 = alone.map(|alone| alone.peaks.reserved_bytes_peak).sum();
            let together = replayed(&merged, allocator).peaks;
            assert_eq!(together.reserved_bytes_peak, sum, "{allocator} {align:?}");
        }
    }
}

#[test]
fn one_rank_asks_for_what_it_asked_for() {
    let trace = text(
        "capacity 1GiB\nlimit 300MiB\nconf max_split_size_mb:40\nmark step0.forward\n\
         alloc a 100MiB stream=9\npool enter p\nalloc b 30MiB\npool leave p\nfree a\n\
         alloc c 150MiB\nempty_cache\ndefer b\ndone b\nalloc d 90MiB\n",
    );
    let alone = merged(std::slice::from_ref(&trace), MergeOptions::default());
    for allocator in ["caching", "expandable", "native", "best-fit"] {
        assert_eq!(replayed(&alone, allocator), replayed(&trace, allocator), "{allocator}");
    }
    assert_eq!(alone.events.len(), trace.events.len());
}

#[test]
fn a_rank_in_a_private_pool_takes_no_other_along() {
    // Alone, the second rank holds 20 MiB for its 4 MiB; the first 20 MiB in its pool.
    let one = text("pool enter p\nalloc a 4MiB\nalloc b 4MiB\npool leave p\npool delete p\n");
    let two = text("alloc x 4MiB\nfree x\nalloc y 4MiB\n");
    let merged = merged(&[one, two], MergeOptions::default());
    // By progress, beginnings counted: a after 2 of 6, b after 3 of 6, free x after 2 of 4.
    let written = written(&merged);
    let events = written.lines().filter(|line| !line.starts_with("source"));
    assert_eq!(
        events.collect::<Vec<_>>(),
        [
            "pool enter §0.p",
            "pool leave §0.p",
            "alloc §1.x 4MiB stream=0x1",
            "pool enter §0.p",
            "alloc §0.a 4MiB",
            "alloc §0.b 4MiB",
            "free §1.x",
            "pool leave §0.p",
            "alloc §1.y 4MiB stream=0x1",
            "pool delete §0.p",
        ]
    );
    assert_eq!(replayed(&merged, "caching").peaks.reserved_bytes_peak, 40 << 20);
}

/// `TIME BLOCK` of every alloc.
fn allocs(trace: &Trace) -> Vec<String> {
    let alloc = |event: &fraglab::trace::Event| match event.op {
        Op::Alloc(block) => {
            let name = trace.blocks[block.index()].name;
            Some(format!("{} {}", event.time_ns, trace.names[name.index()]))
        }
        _ => None,
    };
    trace.events.iter().filter_map(alloc).collect()
}

#[test]
fn events_stand_by_time_and_at_the_same_time_in_turn() {
    let one = text("@0ns alloc a 1\n@10ns alloc b 1\n@10ns alloc c 1\n@40ns alloc d 1\n");
    let two = text("@0ns alloc x 1\n@10ns alloc y 1\n@30ns alloc z 1\n");
    let merged_as = |options| allocs(&merged(&[one.clone(), two.clone()], options));
    // At 10 ns the ranks have done 2 of 5 and 2 of 4 (beginning and first event): the first is less
    // far, then 3 of 5 is farther than 2 of 4.
    let start = ["0 §0.a", "0 §1.x", "10 §0.b", "10 §1.y", "10 §0.c", "30 §1.z", "40 §0.d"];
    assert_eq!(merged_as(MergeOptions::default()), start);
    // The second begins at 10 ns, when it has done nothing; at 40 ns it has done 3 of 4.
    let end = ["0 §0.a", "10 §1.x", "10 §0.b", "10 §0.c", "20 §1.y", "40 §1.z", "40 §0.d"];
    assert_eq!(merged_as(MergeOptions { align: Align::End, ..Default::default() }), end);
    let late = ["0 §0.a", "10 §0.b", "10 §0.c", "40 §0.d", "100 §1.x", "110 §1.y", "130 §1.z"];
    assert_eq!(merged_as(MergeOptions { stagger_ns: 100, ..Default::default() }), late);
    let turns = ["0 §0.a", "0 §1.x", "0 §0.b", "0 §1.y", "0 §0.c", "0 §1.z", "0 §0.d"];
    assert_eq!(merged_as(MergeOptions { align: Align::Turns, ..Default::default() }), turns);
}

#[test]
fn ranks_without_times_are_spread_over_the_longest() {
    let timed = text("@0ns alloc a 1\n@400ns alloc b 1\n");
    let timeless = text("alloc x 1\nalloc y 1\nalloc z 1\n");
    let ranks = [
        RankTrace { label: "timed", trace: &timed },
        RankTrace { label: "other", trace: &timeless },
    ];
    let merged = merge(&ranks, MergeOptions::default()).expect("merged");
    // A beginning and three events in 400 ns.
    let expected = ["0 timed.a", "100 other.x", "200 other.y", "300 other.z", "400 timed.b"];
    assert_eq!(allocs(&merged.trace), expected);
    assert!(merged.warnings.iter().any(|text| text.contains("1 of 2 ranks tell no times")));
}

#[test]
fn clocks_of_machines_are_laid_over_each_other() {
    let mut early = text("@0ns alloc a 1\n@50ns alloc b 1\n");
    let mut late = text("@0ns alloc x 1\n@50ns alloc y 1\n");
    early.header.start_unix_ns = Some(1_000_000);
    late.header.start_unix_ns = Some(1_000_020);
    let options = MergeOptions { align: Align::Clock, ..MergeOptions::default() };
    let both = merged(&[late.clone(), early.clone()], options);
    assert_eq!(allocs(&both), ["0 §1.a", "20 §0.x", "50 §1.b", "70 §0.y"]);
    assert_eq!(both.header.start_unix_ns, Some(1_000_000));
    late.header.start_unix_ns = None;
    let ranks = [("a", &early), ("b", &late)].map(|(label, trace)| RankTrace { label, trace });
    let error = merge(&ranks, options).expect_err("no clock");
    assert_eq!(error, MergeError::NoClock { rank: "b".to_owned() });
}

#[test]
fn the_steps_are_those_of_the_first_rank_that_has_steps() {
    let step = |at: usize, number: usize| {
        format!("@{at}us mark step{number}.forward\n@{at}us alloc a 1MiB\n@{at}us free a\n")
    };
    let server = text("@0us alloc weights 5MiB\n@3us mark request\n@90us alloc cache 2MiB\n");
    let first = text(&(step(0, 0) + &step(20, 1) + &step(40, 2) + "@60us mark end\n"));
    let second = text(&(step(0, 0) + &step(30, 1) + &step(70, 2)));
    let merged = merged(&[server, first.clone(), second], MergeOptions::default());
    assert_eq!(steps_of(&first).len(), 3);
    assert_eq!(steps_of(&merged).len(), 3);
    let marks = merged.events.iter().filter_map(|event| match event.op {
        Op::Mark(phase) => Some(merged.phases[phase.index()].as_str()),
        _ => None,
    });
    assert_eq!(
        marks.collect::<Vec<_>>(),
        [
            "step0.§1.forward",
            "step0.§2.forward",
            "step0.§0.request",
            "step1.§1.forward",
            "step1.§2.forward",
            "step2.§1.forward",
            "§1.end",
            "§2.step2.forward",
        ]
    );
}

#[test]
fn the_head_says_what_all_ranks_say() {
    let head = "device_total 80GiB\ncapacity 70GiB\nlimit 20GiB\nconf max_split_size_mb:128\n";
    let (same, other) = (text(&format!("{head}alloc a 1\n")), text("limit 5GiB\nalloc a 1\n"));
    let ranks = |two: &Trace| {
        let ranks = [("a", &same), ("b", two)].map(|(label, trace)| RankTrace { label, trace });
        merge(&ranks, MergeOptions::default()).expect("merged")
    };
    let agree = ranks(&same).trace.header;
    assert_eq!(agree.device.total_bytes, Some(80 << 30));
    assert_eq!(agree.device.capacity_bytes, Some(70 << 30));
    assert_eq!(agree.settings.as_deref(), Some("max_split_size_mb:128"));
    // Each may hold 20 GiB.
    assert_eq!(agree.limit_bytes, Some(40 << 30));
    let differ = ranks(&other);
    assert_eq!(differ.trace.header.device.capacity_bytes, None);
    assert_eq!(differ.trace.header.settings, None);
    assert_eq!(differ.trace.header.limit_bytes, Some(25 << 30));
    let told = |part: &str| differ.warnings.iter().any(|text| text.contains(part));
    assert!(told("no settings: a has \"max_split_size_mb:128\", b has none"));
    assert!(told("no capacity of the device: a has 70 GiB, b has none"));
}

fn two_ranks(folder: &Folder) -> [String; 2] {
    [
        folder.file("job.rank0.txt", "capacity 1GiB\nalloc a 8MiB\nempty_cache\nfree a\n"),
        folder.file("job.rank1.txt", "capacity 1GiB\nalloc b 6MiB\nfree b\n"),
    ]
}

#[test]
fn files_and_folders_become_one_file() {
    let folder = Folder::new();
    let [one, two] = two_ranks(&folder);
    let out = folder.path("out.json");
    let output = fraglab(&["merge-ranks", &one, &two, &one, "-o", &out]);
    assert_code(&output, 0);
    let trace = read_native(&*fs::read(&out).expect("there")).expect("a trace");
    assert_eq!(trace.header.name, "out");
    assert_eq!(trace.names, ["rank0.a", "rank1.b", "rank0-2.a"]);
    let told = stderr(&output);
    assert!(told.contains("merged 3 ranks: rank0, rank1, rank0-2"), "{told}");
    assert!(told.contains("2 empty_cache events empty the cache of all ranks"), "{told}");
    let inside = Folder::new();
    two_ranks(&inside);
    inside.file("README.md", "# Ranks");
    let output = fraglab(&[
        "merge-ranks",
        &inside.path(""),
        "-o",
        "-",
        "--to",
        "text",
        "--without-empty-cache",
        "--name",
        "both",
    ]);
    assert_code(&output, 0);
    assert_eq!(
        stdout(&output),
        "name both\nsource merged\ncapacity 1GiB\nalloc rank0.a 8MiB\n\
         alloc rank1.b 6MiB stream=0x1\nfree rank1.b\nfree rank0.a\n"
    );
}

#[test]
fn what_cannot_be_merged_is_one_clear_line() {
    let folder = Folder::new();
    let [one, two] = two_ranks(&folder);
    let out = folder.path("out.json");
    let error =
        |args: &[&str]| assert_one_error(&fraglab(&[&["merge-ranks", "-o", &out], args].concat()));
    assert!(error(&[&one, &two, "--align", "clock"]).contains("rank0 does not tell when"));
    assert!(error(&[&one, "--align", "none", "--stagger", "1s"]).contains("--stagger needs times"));
    let no_unit = fraglab(&["merge-ranks", "-o", &out, &one, "--stagger", "2"]);
    assert_code(&no_unit, 2);
    assert!(stderr(&no_unit).contains("expected a number and a unit"), "{}", stderr(&no_unit));
    assert!(error(&[&one, &folder.path("none.json")]).contains("none.json"));
    let empty = Folder::new();
    empty.file("README.md", "nothing");
    assert!(error(&[&empty.path("")]).contains("no traces in it: 1 file"));
    let output = fraglab(&["merge-ranks", &one, &two, "-o", &two]);
    assert!(assert_one_error(&output).contains("would overwrite the input"));
}
