//! Importers: torch snapshots, the truth beside them, RMM logs.
//!
//! Fixtures and the digests of the recordings come from CPython's own pickle module: see
//! `tests/import/make_fixtures.py`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use fraglab::import::{
    ImportError, Imported, KnownMemory, RawAction, RawBlockState, RawSnapshot, ReadOptions,
    import_rmm_csv, import_snapshot, read_rmm_csv, read_torch_snapshot, read_trace,
    trace_from_snapshot,
};
use fraglab::trace::{
    EntryKind, Op, PoolKind, RecordedKind, StartState, Trace, recorded_entries, validate,
};
use fraglab::units::{BlockId, PoolId};

use crate::common::{Rng, shared_dir};

mod forward;

use forward::{Forward, State};

const BASE: u64 = 0x7f00_0000_0000;

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Imports a pickle that has no truth file beside it.
fn import(pickle: &[u8]) -> Result<Imported, ImportError> {
    import_on(pickle, None)
}

fn import_on(pickle: &[u8], gpu: Option<u32>) -> Result<Imported, ImportError> {
    import_snapshot(Path::new("-"), pickle, &ReadOptions { gpu, ..ReadOptions::default() })
}

fn error_of(pickle: &[u8]) -> String {
    import(pickle).expect_err("must not be read").to_string()
}

fn ops(trace: &Trace) -> Vec<Op> {
    trace.events.iter().map(|event| event.op).collect()
}

fn open_recording(dir: &Path, name: &str) -> (PathBuf, MultiGzDecoder<File>) {
    let path = dir.join(format!("{name}.pickle.gz"));
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (path, MultiGzDecoder::new(file))
}

fn import_recording(dir: &Path, name: &str) -> Imported {
    let (path, reader) = open_recording(dir, name);
    import_snapshot(&path, reader, &ReadOptions::default())
        .unwrap_or_else(|error| panic!("{error}"))
}

// ------------------------------------------------------------------------------ recordings

/// The digest that `make_fixtures.py` computes from what CPython reads.
fn digest(trace: &Trace) -> (usize, String) {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut count = 0;
    for entry in recorded_entries(trace) {
        let action = match entry.kind {
            EntryKind::Alloc => 0,
            EntryKind::FreeRequested => 1,
            EntryKind::FreeCompleted => 2,
            EntryKind::SegmentAlloc => 3,
            EntryKind::SegmentFree => 4,
            EntryKind::SegmentMap => 5,
            EntryKind::SegmentUnmap => 6,
            EntryKind::Oom => 7,
        };
        let stream = trace.streams[entry.stream.index()].handle;
        for word in [action, entry.address, entry.size_bytes, stream] {
            hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3);
        }
        count += 1;
    }
    (count, format!("{hash:016x}"))
}

#[test]
fn every_recording_can_be_rebuilt_exactly_from_its_trace() {
    let Some(dir) = shared_dir() else { return };
    let table = String::from_utf8(fixture("recordings.csv")).unwrap();
    let mut seen = 0;
    for row in table.lines().skip(1) {
        let [name, entries, missing, expected] =
            row.split(',').collect::<Vec<_>>().try_into().unwrap();
        let Imported { trace, warnings } = import_recording(&dir, name);
        let (count, digest) = digest(&trace);
        assert_eq!(count.to_string(), entries, "{name}: number of entries");
        assert_eq!(digest, expected, "{name}: entries in order");
        assert_eq!(trace.header.history.frees_without_alloc.to_string(), missing, "{name}");
        assert_eq!(trace.header.name, name);
        // The second pool of `mempool` is gone from its snapshot; the other has a refusal and no
        // truth file.
        let told = ["mempool", "llama-1b-plain.oom40.stacks"].contains(&name);
        let expected_warnings = usize::from(missing != "0") + usize::from(told);
        assert_eq!(warnings.len(), expected_warnings, "{name}: {warnings:?}");
        check_replayable(&trace, name);
        seen += 1;
    }
    assert_eq!(seen, 60);
}

/// What the replay loop relies on, checked apart from the importer.
fn check_replayable(trace: &Trace, name: &str) {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Life {
        New,
        Live,
        Deferred,
        Gone,
    }
    validate(trace).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut lives = vec![Life::New; trace.blocks.len()];
    for (_, block) in trace.start.iter().flat_map(|start| start.blocks_in_use()) {
        let life = if block.state == StartState::Live { Life::Live } else { Life::Deferred };
        lives[block.block.index()] = life;
    }
    let mut time_ns = 0;
    for (index, event) in trace.events.iter().enumerate() {
        assert!(event.time_ns >= time_ns, "{name}: time goes back at event {index}");
        time_ns = event.time_ns;
        let (block, from, to) = match event.op {
            Op::Alloc(block) => (block, Life::New, Life::Live),
            Op::Attempt(block) => (block, Life::New, Life::Gone),
            Op::Free(block) => (block, Life::Live, Life::Gone),
            Op::Defer(block) => (block, Life::Live, Life::Deferred),
            Op::Done(block) => (block, Life::Deferred, Life::Gone),
            _ => continue,
        };
        assert_eq!(lives[block.index()], from, "{name}: event {index} {:?}", event.op);
        lives[block.index()] = to;
    }
    let recording = trace.recording.as_ref().unwrap();
    assert_eq!(recording.block_addresses.len(), trace.blocks.len());
    assert!(recording.actions.is_sorted_by_key(|action| action.event));
    assert!(recording.actions.iter().all(|a| (a.event as usize) < trace.events.len()));
    assert!(trace.blocks.iter().all(|block| block.size_bytes > 0));
}

/// How often pools are entered, and what happens to them, is told by the jobs: weights are loaded
/// into a pool, fourteen blocks go to a second one that is dropped at once; a graph is captured.
#[test]
fn private_pools_of_recordings_are_told() {
    let Some(dir) = shared_dir() else { return };
    let count = |trace: &Trace, name: &str| {
        pools_of_allocs(trace).iter().filter(|pool| pool.as_deref() == Some(name)).count()
    };
    let pool_ops = |trace: &Trace| -> Vec<Op> {
        let is_pool_op =
            |op: &Op| matches!(op, Op::PoolEnter(_) | Op::PoolLeave(_) | Op::PoolDelete(_));
        ops(trace).into_iter().filter(is_pool_op).collect()
    };
    let (p0, p1) = (PoolId(0), PoolId(1));
    let trace = import_recording(&dir, "mempool").trace;
    let names: Vec<&str> = trace.pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["mempool (0, 1)", "unlisted pool 1"]);
    assert!(trace.pools.iter().all(|pool| pool.kind == PoolKind::MemPool && !pool.no_split));
    let loaded = [Op::PoolEnter(p0), Op::PoolLeave(p0)];
    let dropped = [Op::PoolEnter(p1), Op::PoolLeave(p1), Op::PoolDelete(p1)];
    assert_eq!(pool_ops(&trace), [&loaded[..], &dropped, &[Op::PoolDelete(p0)]].concat());
    // All that the phase `load` asks for before the model's buffers.
    assert_eq!(
        pools_of_allocs(&trace).iter().position(Option::is_none),
        Some(count(&trace, names[0]))
    );
    let releases = |trace: &Trace, wanted: Op| {
        let event = ops(trace).iter().position(|&op| op == wanted).unwrap() as u32;
        let actions = &trace.recording.as_ref().unwrap().actions;
        actions.iter().filter(|action| action.event == event).count()
    };
    assert_eq!(releases(&trace, Op::PoolDelete(p1)), 14);
    assert_eq!(releases(&trace, Op::PoolDelete(p0)), 9);
    assert_eq!(releases(&trace, Op::EmptyCache), 22);

    let trace = import_recording(&dir, "graph-train").trace;
    assert_eq!(trace.pools.len(), 1);
    assert_eq!(
        (trace.pools[0].name.as_str(), trace.pools[0].kind),
        ("graph (1, 0)", PoolKind::Capture)
    );
    assert_eq!(pool_ops(&trace), loaded);
    // The two numbers of 8 bytes that a capture asks for first are in the default pools.
    let allocs = trace.events.iter().filter_map(|event| match event.op {
        Op::Alloc(block) => Some(trace.blocks[block.index()]),
        _ => None,
    });
    let allocs: Vec<_> = allocs.collect();
    let first = pools_of_allocs(&trace).iter().position(Option::is_some).unwrap();
    let handle = |at: usize| trace.streams[allocs[at].stream.index()].handle;
    assert!([1, 2].iter().all(|back| allocs[first - back].size_bytes == 8));
    assert!([1, 2].iter().all(|back| handle(first - back) == handle(first)));
    assert_ne!(handle(first - 3), handle(first));
}

#[test]
fn the_truth_beside_a_recording_fills_the_header() {
    let Some(dir) = shared_dir() else { return };
    let trace = import_recording(&dir, "llama-3b-recompute.cap34").trace;
    let header = &trace.header;
    assert_eq!(header.device.total_bytes, Some(150_109_880_320));
    assert_eq!(header.device.name.as_deref(), Some("NVIDIA H200"));
    assert_eq!(header.source.version.as_deref(), Some("2.11.0+cu130"));
    // 34 GiB, through the fraction in double arithmetic.
    assert_eq!(header.limit_bytes, Some(36_507_222_016));
    assert_eq!(header.settings.as_deref(), Some(""));
    let truth = trace.recording.unwrap().truth.unwrap();
    assert_eq!(truth.outcome.as_deref(), Some("ok"));
    assert_eq!(truth.stats["num_alloc_retries"], 1);
    assert!(!truth.peak_stats_reset);

    let trace = import_recording(&dir, "random.expandable.gc30").trace;
    // 0.7 of 4 GiB, rounded down.
    assert_eq!(trace.header.limit_bytes, Some(3_006_477_107));
    let trace = import_recording(&dir, "llama-1b-zero3.rank1").trace;
    assert_eq!(trace.header.device.index, Some(1), "the only device with a history");
    assert_eq!(trace.header.limit_bytes, None);
    let truth = import_recording(&dir, "deepspeed-opt-1-3b-N.rank0").trace.recording.unwrap().truth;
    assert!(truth.unwrap().peak_stats_reset);
}

#[test]
fn phases_and_sites_of_a_recording_are_there() {
    let Some(dir) = shared_dir() else { return };
    let trace = import_recording(&dir, "tiny.stacks").trace;
    // As the truth file of `tiny` lists them; nothing is allocated in the other phases.
    let phases: Vec<&str> = trace.phases.iter().map(String::as_str).collect();
    assert!(phases.starts_with(&["step0.data", "step0.forward", "step0.backward"]), "{phases:?}");
    let marks = ops(&trace).iter().filter(|op| matches!(op, Op::Mark(_))).count();
    assert_eq!(marks, phases.len(), "each phase of this run starts once");
    let site = trace.blocks[2].site;
    let label = trace.site_label(site).unwrap();
    assert!(label.contains("site-packages/torch/nn/modules/module.py:"), "{label}");
    assert!(trace.sites.stacks.len() < trace.blocks.len() / 2, "stacks are interned");
}

// ------------------------------------------------------------------- histories that begin late

/// Recordings with a whole history, most of them without block lists.
const WHOLE: [&str; 20] = [
    "graph-train",
    "mempool",
    "streams-offload",
    "random.default",
    "random.expandable.gc30",
    "random.expandable.tight",
    "random.gc40",
    "random.roundupmix",
    "random.split40",
    "tiny.stacks",
    "gpt2-small.stacks",
    "llama-1b-plain.oom40.stacks",
    "llama-1b-varlen.s4.stacks",
    "mixtral-moe.stacks",
    "gpt2-small.roundup4",
    "llama-1b-varlen",
    "llama-1b-varlen.expandable.cap49",
    "opt-1-3b-act-offload.split128",
    "pipeline-1f1b.expandable",
    "deepspeed-opt-1-3b-LRO.rank0",
];

fn raw_recording(dir: &Path, name: &str) -> RawSnapshot {
    let (_, reader) = open_recording(dir, name);
    read_torch_snapshot(reader).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The total memory that a recording's truth file tells.
fn known_of(dir: &Path, name: &str) -> KnownMemory {
    let (path, reader) = open_recording(dir, name);
    let imported = import_snapshot(&path, reader, &ReadOptions::default()).unwrap();
    let device_total_bytes = imported.trace.header.device.total_bytes;
    KnownMemory { room_bytes: None, device_total_bytes }
}

#[test]
fn late_recordings_lead_to_their_final_blocks() {
    let Some(dir) = shared_dir() else { return };
    for (name, blocks) in [("llama-1b-varlen.late", 661), ("llama-3b-recompute.overflow", 761)] {
        let raw = raw_recording(&dir, name);
        let trace = import_recording(&dir, name).trace;
        let (_, end) = Forward::follow(&trace, &[]);
        end.expect(&raw.segments, name);
        let history = trace.header.history;
        // Freed in the history, and the two that are still there at the end.
        assert_eq!(history.frees_without_alloc + 2, blocks, "{name}");
        assert_eq!(history.blocks_at_start, blocks, "{name}");
        let truth = trace.recording.as_ref().unwrap().truth.as_ref().unwrap();
        let allocs_of_run = truth.stats["allocation.all.allocated"];
        assert_eq!(history.allocs_of_run, Some(allocs_of_run as u64), "{name}");
    }
}

/// The final list tells where a block was asked for, the history of a cut does not.
#[test]
fn blocks_that_outlive_a_late_history_keep_their_stacks() {
    let Some(dir) = shared_dir() else { return };
    let mut raw = raw_recording(&dir, "tiny.stacks");
    let stacks_at_end = |trace: &Trace| {
        let addresses = &trace.recording.as_ref().unwrap().block_addresses;
        let freed = ops(trace).into_iter().filter_map(|op| match op {
            Op::Free(block) | Op::Done(block) => Some(block.index()),
            _ => None,
        });
        let freed: Vec<usize> = freed.collect();
        let kept = (0..trace.blocks.len()).filter(|block| !freed.contains(block));
        let mut stacks: Vec<(u64, Vec<String>)> = kept
            .map(|block| {
                // Autograd's own thread has no Python stack.
                let stack = trace.sites.stacks.get(trace.blocks[block].site.index());
                let frames =
                    stack.into_iter().flatten().map(|frame| &trace.sites.frames[frame.index()]);
                let frames = frames.map(|f| format!("{} {} {}", f.name, f.filename, f.line));
                (addresses[block], frames.collect())
            })
            .collect();
        stacks.sort();
        stacks
    };
    let known = KnownMemory::default();
    let whole = trace_from_snapshot(&raw, None, known).unwrap().0;
    raw.devices[0].drain(..3000);
    let late = trace_from_snapshot(&raw, None, known).unwrap().0;
    let kept = stacks_at_end(&late);
    assert_eq!(kept, stacks_at_end(&whole));
    let depths: Vec<usize> = kept.iter().map(|(_, stack)| stack.len()).collect();
    assert_eq!(depths, [18, 0], "as CPython reads them");
}

/// The pool that each alloc goes to, by name; those that are gone are not told apart.
fn pools_of_allocs(trace: &Trace) -> Vec<Option<String>> {
    let mut entered = Vec::new();
    let mut pools = Vec::new();
    for event in &trace.events {
        match event.op {
            Op::PoolEnter(pool) => entered.push(pool),
            Op::PoolLeave(pool) => assert_eq!(entered.pop(), Some(pool)),
            Op::Alloc(_) => {
                let name = |pool: &PoolId| trace.pools[pool.index()].name.clone();
                let pool = entered.last().map(name);
                pools.push(pool.map(|name| name.trim_end_matches(char::is_numeric).to_owned()));
            }
            _ => {}
        }
    }
    pools
}

/// Cuts of whole histories, of which the layout at the cut is known by following the whole.
#[test]
fn the_start_of_a_cut_history_is_what_the_whole_one_shows() {
    let Some(dir) = shared_dir() else { return };
    let (mut exact, mut guessed, mut wrong) = (0, 0, 0);
    for name in WHOLE {
        let mut raw = raw_recording(&dir, name);
        let known = known_of(&dir, name);
        let device = raw.devices.iter().position(|entries| !entries.is_empty()).unwrap();
        let (whole, _) = trace_from_snapshot(&raw, None, known).unwrap();
        assert_eq!(whole.start, None, "{name}");
        let entries = raw.devices[device].clone();
        let cuts = [1, 2, 3].map(|quarter| entries.len() * quarter / 4);
        let (at_cuts, end) = Forward::follow(&whole, &cuts);
        if raw.segments.iter().any(|segment| segment.blocks.is_empty()) {
            end.fill(&mut raw.segments);
        }
        end.expect(&raw.segments, name);
        for (cut, shown) in cuts.into_iter().zip(at_cuts) {
            let name = format!("{name} from entry {cut}");
            raw.devices[device] = entries[cut..].to_vec();
            let (trace, warnings) = trace_from_snapshot(&raw, None, known).unwrap();
            check_replayable(&trace, &name);
            let start = trace.start.as_ref().unwrap_or_else(|| panic!("{name}: {warnings:?}"));
            assert!(warnings[0].starts_with("the history begins late: "), "{name}: {warnings:?}");
            let begun = Forward::at_start(&trace);
            assert_eq!(begun.memory, shown.memory, "{name}: segments at the start");
            let tail = pools_of_allocs(&trace);
            let of_whole = pools_of_allocs(&whole);
            assert!(of_whole.ends_with(&tail), "{name}: pools");
            let in_use = |forward: &Forward| {
                let blocks = forward.blocks.iter().filter(|(_, b)| b.state != State::Free);
                blocks.map(|(&address, &block)| (address, block)).collect::<Vec<_>>()
            };
            let (begun, shown) = (in_use(&begun), in_use(&shown));
            assert_eq!(begun.len(), shown.len(), "{name}: blocks in use at the start");
            assert_eq!(trace.header.history.blocks_at_start, shown.len() as u64, "{name}");
            for ((found, expected), (_, block)) in
                begun.iter().zip(&shown).zip(start.blocks_in_use())
            {
                if block.guessed {
                    guessed += 1;
                    wrong += usize::from(found != expected);
                } else {
                    exact += 1;
                    assert_eq!(found, expected, "{name}");
                }
            }
            let (_, end) = Forward::follow(&trace, &[]);
            end.expect(&raw.segments, &name);
        }
    }
    // A guess is a good one, and few are needed.
    assert!(wrong * 100 < guessed && guessed * 10 < exact, "{exact} {guessed} {wrong}");
}

// -------------------------------------------------------------------------------- dialects

/// What the `snapshot()` of `make_fixtures.py` must become.
fn check_fixture(trace: &Trace) {
    let b = BlockId;
    let marks: Vec<String> = trace
        .events
        .iter()
        .filter_map(|event| match event.op {
            Op::Mark(phase) => Some(trace.phases[phase.index()].clone()),
            _ => None,
        })
        .collect();
    assert_eq!(marks, ["step0.forward", "step0.backward", "step0.forward"]);
    let without_marks: Vec<Op> =
        ops(trace).into_iter().filter(|op| !matches!(op, Op::Mark(_))).collect();
    let expected = [
        Op::Alloc(b(0)),
        Op::Alloc(b(1)),
        Op::Defer(b(1)),
        Op::Free(b(0)),
        Op::Done(b(1)),
        Op::Alloc(b(2)),
        Op::Attempt(b(3)),
    ];
    assert_eq!(without_marks, expected);
    let sizes: Vec<u64> = trace.blocks.iter().map(|block| block.size_bytes).collect();
    assert_eq!(sizes, [1000, 300, 70000, 3 << 40]);
    let handles: Vec<u64> =
        trace.blocks.iter().map(|block| trace.streams[block.stream.index()].handle).collect();
    assert_eq!(handles, [0, 0x5566_7788_9900, 0, 0]);
    let labels: Vec<_> =
        trace.blocks.iter().map(|block| trace.site_label(block.site).unwrap()).collect();
    assert_eq!(labels[0], "forward (model.py:12)");
    assert_eq!(labels[2], "main (train.py:70000)");
    assert_eq!(trace.blocks[0].site, trace.blocks[1].site, "one stack, shared");
    let addresses = &trace.recording.as_ref().unwrap().block_addresses;
    assert_eq!(addresses, &[BASE, BASE + 1024, BASE, 0]);
    assert_eq!(trace.header.settings.as_deref(), Some("garbage_collection_threshold:0.8"));
    assert_eq!(trace.header.device.index, Some(1));
    assert_eq!(trace.header.start_unix_ns, Some(1_795_964_913_482_800_000));
    // The oom is the tenth entry, 7 µs after another.
    assert_eq!(trace.events.last().unwrap().time_ns, 9 * 7_000);
    let oom = trace.recording.as_ref().unwrap().actions.last().unwrap();
    assert_eq!((oom.kind, oom.address, oom.size_bytes), (RecordedKind::Oom, 123_456_789, 3 << 40));
}

#[test]
fn pickles_of_every_protocol_and_dialect_say_the_same() {
    for name in [
        "protocol2.pickle",
        "protocol3.pickle",
        "protocol4.pickle",
        "protocol5.pickle",
        "cpp.pickle",
        "odd/same_list_twice.pickle",
    ] {
        let imported = import_on(&fixture(name), Some(1));
        let Imported { trace, warnings } = imported.unwrap_or_else(|e| panic!("{name}: {e}"));
        // The fixture has a refusal, which shows what its device could give.
        assert_eq!(warnings.len(), 1, "{name}: {warnings:?}");
        assert!(warnings[0].contains("taken as its capacity"), "{name}: {warnings:?}");
        check_fixture(&trace);
        check_replayable(&trace, name);
    }
}

#[test]
fn segments_blocks_settings_and_annotations_stay_in_the_raw_snapshot() {
    for name in ["protocol4.pickle", "cpp.pickle"] {
        let raw = read_torch_snapshot(fixture(name).as_slice()).unwrap();
        let [segment] = raw.segments.as_slice() else { panic!("one segment") };
        assert_eq!((segment.address, segment.total_bytes, segment.device), (BASE, 2_097_152, 1));
        assert!(!segment.large && !segment.expandable && segment.pool_id == (0, 0));
        let blocks: Vec<_> =
            segment.blocks.iter().map(|b| (b.size_bytes, b.requested_bytes, b.state)).collect();
        assert_eq!(
            blocks,
            [(70144, 70000, RawBlockState::Allocated), (2_027_008, 0, RawBlockState::Inactive)]
        );
        let settings = raw.settings.as_ref().unwrap();
        assert_eq!((settings.max_split_bytes, settings.gc_threshold), (None, 0.8));
        assert_eq!(settings.roundup_divisions.len(), 16);
        let notes: Vec<_> =
            raw.annotations.iter().map(|a| (raw.annotation_name(a), a.start, a.device)).collect();
        assert_eq!(
            notes,
            [("ProfilerStep#0".into(), true, 1), ("ProfilerStep#0".into(), false, 1)]
        );
    }
}

#[test]
fn a_dict_that_stands_twice_is_two_entries() {
    let trace = import(&fixture("odd/same_dict_twice.pickle")).unwrap().trace;
    let kinds: Vec<_> = recorded_entries(&trace).map(|entry| entry.kind).collect();
    // The third entry, a segment_alloc again, ends the history without an event to stand before.
    assert_eq!(kinds, [EntryKind::SegmentAlloc, EntryKind::Alloc]);
}

#[test]
fn cycles_are_harmless() {
    let trace = import(&fixture("odd/cyclic.pickle")).unwrap().trace;
    assert_eq!(trace.blocks.len(), 4);
    // A list of frames that holds itself has no frames.
    assert_eq!(trace.site_label(trace.blocks[0].site), None);
    // A top-level list that holds itself: ] MEMOIZE BINGET 0 APPEND.
    let error = error_of(b"\x80\x04]\x94h\x00a.");
    assert!(error.contains("segment 0: a container"), "{error}");
}

#[test]
fn a_stack_that_comes_in_batches_is_whole() {
    let trace = import(&fixture("odd/long_stack.pickle")).unwrap().trace;
    let stack = &trace.sites.stacks[trace.blocks[0].site.index()];
    assert_eq!(stack.len(), 2500);
    let last = &trace.sites.frames[stack[2499].index()];
    assert_eq!((last.name.as_str(), last.line), ("f2499", 2499));
}

#[test]
fn containers_filled_after_they_were_shared_are_whole() {
    // {'segments': [], 'device_traces': [D]} where the trace D, its entry E, the entry's stack S
    // and the frame F are each in the memo and in their parents before a single item is in them,
    // and are filled item by item afterwards.
    let mut p = PickleWriter::new();
    p.raw(b"}q\x00");
    p.text("segments").raw(b"]s");
    p.text("device_traces").raw(b"]q\x01s");
    p.raw(b"h\x01]q\x02a0"); // D appended empty, then dropped from the stack
    p.raw(b"h\x02}q\x03a0"); // E
    p.raw(b"h\x03").text("frames").raw(b"]q\x04s0"); // S
    p.raw(b"h\x04}q\x05a0"); // F
    p.raw(b"h\x05").text("name").text("late").raw(b"s");
    p.text("filename").text("late.py").raw(b"s").text("line").int(7).raw(b"s0");
    p.raw(b"h\x03").text("size").int(512).raw(b"s").text("addr").int(BASE as i64).raw(b"s");
    p.text("action").text("alloc").raw(b"s0");
    let trace = import(&p.finish()).unwrap().trace;
    assert_eq!(ops(&trace), [Op::Alloc(BlockId(0))]);
    assert_eq!(trace.site_label(trace.blocks[0].site).as_deref(), Some("late (late.py:7)"));
}

#[test]
fn a_bare_list_of_segments_has_no_history() {
    let Imported { trace, warnings } = import(&fixture("odd/segments_only.pickle")).unwrap();
    assert!(trace.events.is_empty());
    assert!(warnings[0].contains("no history"), "{warnings:?}");
    let raw = read_torch_snapshot(fixture("odd/segments_only.pickle").as_slice()).unwrap();
    assert_eq!(raw.segments[0].blocks.len(), 2);
}

// -------------------------------------------------------------------------- what is refused

#[test]
fn opcodes_that_need_code_are_refused_with_their_place() {
    let cases: [(&[u8], &str); 12] = [
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.", "byte 2: GLOBAL \"os.system\""),
        (b"\x80\x02}cbuiltins\neval\n.", "byte 3: GLOBAL \"builtins.eval\""),
        (b"\x80\x02ctorch.jit._pickle\nbuild_tensor_from_id\n.", "byte 2: GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "byte 14: STACK_GLOBAL \"os.system\""),
        (b"\x80\x02](ios\nsystem\n.", "byte 4: INST \"os.system\""),
        (b"\x80\x02N)R.", "byte 4: REDUCE"),
        (b"\x80\x02}}b.", "byte 4: BUILD"),
        (b"\x80\x02N)\x81.", "byte 4: NEWOBJ"),
        (b"\x80\x04N)}\x92.", "byte 5: NEWOBJ_EX"),
        (b"\x80\x02\x82\x01.", "byte 2: EXT1"),
        (b"\x80\x02Nq\x00Q.", "byte 5: BINPERSID"),
        (b"\x80\x02(o.", "byte 3: OBJ"),
    ];
    for (pickle, expected) in cases {
        let error = error_of(pickle);
        assert!(error.starts_with(&format!("-: {expected}")), "{error}\nshould name {expected}");
        assert!(error.contains("refused"), "{error}");
    }
}

#[test]
fn damaged_pickles_name_place_and_expectation() {
    let cases: [(&[u8], &str); 14] = [
        (b"", "byte 0: an empty file; expected a pickle of protocol 2 to 5"),
        (b"(dp0\n.", "byte 0: byte 0x28; expected a pickle of protocol 2 to 5"),
        (b"\x80\x06N.", "byte 0: pickle protocol 6"),
        (b"\x80\x04\xff", "byte 2: byte 0xff is no pickle opcode"),
        (b"\x80\x04]", "byte 3: the file ends here"),
        (b"\x80\x04\x8c\x09abc", "byte 7: the file ends here"),
        (b"\x80\x04.", "byte 2: an opcode that takes more values than there are"),
        (b"\x80\x04u", "byte 2: an opcode that needs a MARK"),
        (b"\x80\x04h\x07.", "byte 2: memo entry 7"),
        (b"\x80\x04}(K\x01u.", "byte 6: a key without a value"),
        (b"\x80\x04]K\x01K\x02s.", "byte 7: keys set in a list"),
        (b"\x80\x04}K\x01a.", "byte 5: items appended to a dict"),
        (b"\x80\x04K\x05K\x01a.", "byte 6: items for 5"),
        (b"\x80\x04I5\n.", "byte 2: INT: nothing in a snapshot needs protocol 0"),
    ];
    for (pickle, expected) in cases {
        let error = error_of(pickle);
        assert!(error.contains(expected), "{error}\nshould contain {expected}");
    }
    let deep: Vec<u8> = [b"\x80\x04".as_slice(), &[b'('; 5000]].concat();
    assert!(error_of(&deep).contains("byte 1002: containers nested more than 1000 deep"));
}

#[test]
fn other_pickles_say_what_they_hold() {
    let error = error_of(b"\x80\x04}\x8c\x05modelK\x01s.");
    assert!(error.contains("a dict with the keys \"model\"; expected the dict with"), "{error}");
    assert!(error_of(b"\x80\x04K\x05.").contains("the pickle holds 5; expected the dict"));
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"N").text("device_traces").raw(b"]u");
    assert!(error_of(&p.finish()).contains("'segments' is None; expected a list of segments"));
    let error = error_of(&snapshot(&[&[("alloc", BASE, -1)]]));
    assert!(error.contains("\"size\" is -1; expected a number of bytes"), "{error}");
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"]").text("device_traces").raw(b"](](}(");
    p.text("action").text("alloc").text("size").int(5).raw(b"ueeu");
    let error = error_of(&p.finish());
    assert!(error.contains("entry 0 of GPU 0: no \"addr\"; expected 'addr' and 'size'"), "{error}");
}

#[test]
fn lengths_that_lie_do_not_allocate() {
    let cases: [&[u8]; 7] = [
        b"\x80\x04X\xff\xff\xff\xffab",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffab",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab",
        b"\x80\x04B\xff\xff\xff\xffab",
        b"\x80\x04\x8b\xff\xff\xff\x7fab",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04\x8b\x00\x00\x00\x80ab",
    ];
    for pickle in cases {
        let error = error_of(pickle);
        assert!(
            error.contains("ends here") || error.contains("an integer of -2147483648"),
            "{error}"
        );
    }
    // Memo indices far apart: each costs one entry, none a table up to it.
    let mut p = PickleWriter::new();
    p.raw(b"}");
    for k in 0..2000_u32 {
        p.raw(b"r").raw(&(u32::MAX - k * 1_000_003).to_le_bytes());
    }
    p.raw(b"(").text("segments").raw(b"]").text("device_traces").raw(b"]u");
    p.raw(b"j").raw(&u32::MAX.to_le_bytes());
    assert!(import(&p.finish()).unwrap().trace.events.is_empty());
}

#[test]
fn small_files_with_much_sharing_do_not_fill_memory() {
    // 30,000 devices that share a trace of 30,000 references to one entry: 200 kB of file would
    // become 900 million entries. Likewise segments that share their blocks.
    let entry = |p: &mut PickleWriter| {
        p.raw(b"}(").text("action").text("alloc").text("addr").int(1).text("size").int(1);
        p.raw(b"u");
    };
    let block = |p: &mut PickleWriter| {
        p.raw(b"}(").text("state").text("inactive").text("size").int(1).raw(b"u");
    };
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"]").text("device_traces").raw(b"](](");
    entry(&mut p);
    p.raw(b"q\x01").raw(&b"h\x01".repeat(30_000)).raw(b"eq\x02");
    p.raw(&b"h\x02".repeat(30_000)).raw(b"eu");
    assert!(error_of(&p.finish()).contains("stand in too many places"));

    let mut p = PickleWriter::new();
    p.raw(b"}(").text("device_traces").raw(b"]").text("segments").raw(b"](}(");
    p.text("total_size").int(1).text("blocks").raw(b"](");
    block(&mut p);
    p.raw(b"q\x01").raw(&b"h\x01".repeat(30_000)).raw(b"euq\x02");
    p.raw(&b"h\x02".repeat(30_000)).raw(b"eu");
    assert!(error_of(&p.finish()).contains("stand in too many places"));
}

#[test]
fn truncations_and_flipped_bits_never_panic() {
    let whole = fixture("protocol4.pickle");
    let cpp = fixture("cpp.pickle");
    let mut rng = Rng(7);
    for pickle in [&whole, &cpp] {
        for length in 0..pickle.len() - 1 {
            let error = error_of(&pickle[..length]);
            assert!(error.contains("byte "), "{error}");
        }
        for at in 0..pickle.len() {
            let mut damaged = pickle.clone();
            damaged[at] ^= 1 << rng.below(8);
            let _ = import(&damaged);
        }
    }
}

#[test]
fn damage_to_a_real_snapshot_never_panics() {
    let Some(dir) = shared_dir() else { return };
    let packed = std::fs::read(dir.join("tiny.pickle.gz")).unwrap();
    let mut whole = Vec::new();
    MultiGzDecoder::new(packed.as_slice()).read_to_end(&mut whole).unwrap();
    let mut rng = Rng(20_261_129);
    for _ in 0..1500 {
        let length = rng.below(whole.len());
        assert!(import(&whole[..length]).is_err(), "cut at {length}");
        let mut damaged = whole.clone();
        for _ in 0..=rng.below(3) {
            damaged[rng.below(whole.len())] ^= 1 << rng.below(8);
        }
        if let Ok(Imported { trace, .. }) = import(&damaged) {
            assert!(trace.events.len() <= 2 * 3827, "no more events than entries and phases");
            check_replayable_events(&trace);
        }
    }
    for _ in 0..500 {
        let cut = &packed[..rng.below(packed.len())];
        let read =
            import_snapshot(Path::new("-"), MultiGzDecoder::new(cut), &ReadOptions::default());
        assert!(read.is_err(), "cut at {}", cut.len());
        let mut damaged = packed.clone();
        damaged[rng.below(packed.len())] ^= 1 << rng.below(8);
        let damaged = MultiGzDecoder::new(damaged.as_slice());
        let _ = import_snapshot(Path::new("-"), damaged, &ReadOptions::default());
    }
}

/// Every number of a late history with pools may be wrong, and the trace is still one.
#[test]
fn damage_to_a_late_history_never_panics() {
    let Some(dir) = shared_dir() else { return };
    let mut rng = Rng(20_261_130);
    let mut fallen_back = 0;
    for name in ["mempool", "random.expandable.tight", "graph-train"] {
        let mut raw = raw_recording(&dir, name);
        let half = raw.devices[0].len() / 2;
        let entries = raw.devices[0].split_off(half);
        let segments = raw.segments.clone();
        for _ in 0..300 {
            raw.devices[0].clone_from(&entries);
            raw.segments.clone_from(&segments);
            for _ in 0..=rng.below(2) {
                damage(&mut raw, &mut rng);
            }
            let (trace, _) = trace_from_snapshot(&raw, None, KnownMemory::default()).unwrap();
            check_replayable(&trace, name);
            fallen_back += usize::from(trace.start.is_none());
        }
    }
    assert!((100..800).contains(&fallen_back), "{fallen_back} of 900");
}

fn damage(raw: &mut RawSnapshot, rng: &mut Rng) {
    let actions = [
        RawAction::Alloc,
        RawAction::FreeRequested,
        RawAction::FreeCompleted,
        RawAction::SegmentAlloc,
        RawAction::SegmentFree,
        RawAction::SegmentMap,
        RawAction::SegmentUnmap,
        RawAction::Oom,
    ];
    let entries = &mut raw.devices[0];
    let (one, other) = (rng.below(entries.len()), rng.below(entries.len()));
    let segment = rng.below(raw.segments.len());
    let segment = &mut raw.segments[segment];
    let odd = [0, 1, 512, 100, 1 << 20, (1 << 60) - 1, u64::MAX - 511, u64::MAX, rng.next()];
    let odd = odd[rng.below(odd.len())];
    let odd_size = odd.min((1 << 60) - 1);
    match rng.below(12) {
        0 => entries[one].address = odd,
        1 => entries[one].size_bytes = odd_size,
        2 => entries[one].action = actions[rng.below(actions.len())],
        3 => entries[one].address = entries[other].address,
        4 => entries[one].stream = rng.below(9) as u32,
        5 => entries.swap(one, other),
        6 => drop(entries.remove(one)),
        7 => segment.address = odd,
        8 => segment.total_bytes = odd_size,
        9 => segment.pool_id = (odd, 0),
        10 => segment.expandable = !segment.expandable,
        _ => {
            let block = rng.below(segment.blocks.len());
            let block = &mut segment.blocks[block];
            match rng.below(3) {
                0 => block.address = odd,
                1 => block.size_bytes = odd_size,
                _ => block.state = RawBlockState::Pending,
            }
        }
    }
}

/// Damage may change what a trace says, never whether it makes sense.
fn check_replayable_events(trace: &Trace) {
    check_replayable(trace, "damaged");
    assert!(recorded_entries(trace).count() >= trace.blocks.len().saturating_sub(1) / 2);
}

// ------------------------------------------------------------- groups between two operations

/// Writes pickles of protocol 2 by hand.
struct PickleWriter(Vec<u8>);

impl PickleWriter {
    fn new() -> Self {
        PickleWriter(b"\x80\x02".to_vec())
    }

    fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.raw(b"X").raw(&(text.len() as u32).to_le_bytes()).raw(text.as_bytes())
    }

    fn int(&mut self, int: i64) -> &mut Self {
        self.raw(b"\x8a\x08").raw(&int.to_le_bytes())
    }

    fn finish(&mut self) -> Vec<u8> {
        self.raw(b".");
        std::mem::take(&mut self.0)
    }
}

/// A snapshot with one trace per device, an entry being (action, addr, size).
fn snapshot(devices: &[&[(&str, u64, i64)]]) -> Vec<u8> {
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"]").text("device_traces").raw(b"](");
    let mut time_us = 1_000_000;
    for entries in devices {
        p.raw(b"](");
        for &(action, addr, size) in *entries {
            let key = if action == "oom" { "device_free" } else { "addr" };
            p.raw(b"}(").text("action").text(action).text(key).int(addr as i64);
            p.text("size").int(size).text("stream").int(0).text("time_us").int(time_us);
            p.raw(b"u");
            time_us += 1;
        }
        p.raw(b"e");
    }
    p.raw(b"eu");
    p.finish()
}

/// Two blocks at 1 and 2, then both deferred.
const TWO_DEFERRED: [(&str, u64, i64); 5] = [
    ("segment_alloc", 1, 2048),
    ("alloc", 1, 512),
    ("alloc", 2, 512),
    ("free_requested", 1, 512),
    ("free_requested", 2, 512),
];

/// Events after [`TWO_DEFERRED`] and `more`, and the actions inside them by event; and that the
/// recording can be rebuilt from them.
fn read_group(more: &[(&str, u64, i64)]) -> (Vec<Op>, Vec<(u32, RecordedKind)>) {
    let entries: Vec<_> = TWO_DEFERRED.iter().chain(more).copied().collect();
    let trace = import(&snapshot(&[&entries])).unwrap().trace;
    let rebuilt: Vec<_> =
        recorded_entries(&trace).map(|entry| (entry.kind, entry.address)).collect();
    let kind = |action: &str| match action {
        "alloc" => EntryKind::Alloc,
        "free_requested" => EntryKind::FreeRequested,
        "free_completed" => EntryKind::FreeCompleted,
        "segment_alloc" => EntryKind::SegmentAlloc,
        "segment_free" => EntryKind::SegmentFree,
        "segment_map" => EntryKind::SegmentMap,
        "segment_unmap" => EntryKind::SegmentUnmap,
        _ => EntryKind::Oom,
    };
    let expected: Vec<_> = entries.iter().map(|&(action, addr, _)| (kind(action), addr)).collect();
    assert_eq!(rebuilt, expected);
    check_replayable(&trace, "group");
    let actions = &trace.recording.as_ref().unwrap().actions;
    let actions = actions.iter().skip(1).map(|a| (a.event - 4, a.kind)).collect();
    (ops(&trace).split_off(4), actions)
}

const B0: BlockId = BlockId(0);
const B1: BlockId = BlockId(1);
const B2: BlockId = BlockId(2);

#[test]
fn completions_before_a_plain_alloc_stand_before_it() {
    let (ops, actions) =
        read_group(&[("free_completed", 1, 512), ("segment_alloc", 9, 2048), ("alloc", 9, 512)]);
    assert_eq!(ops, [Op::Done(B0), Op::Alloc(B2)]);
    assert_eq!(actions, [(1, RecordedKind::SegmentAlloc)]);
}

#[test]
fn a_release_without_a_malloc_is_an_empty_cache() {
    let group = [("free_completed", 1, 512), ("free_completed", 2, 512), ("segment_free", 5, 64)];
    let expected = [Op::EmptyCache, Op::Done(B0), Op::Done(B1)];
    let inside = [
        (0, RecordedKind::FreeCompleted),
        (0, RecordedKind::FreeCompleted),
        (0, RecordedKind::SegmentFree),
    ];
    let (ops, actions) = read_group(&group);
    assert_eq!((ops.as_slice(), actions.as_slice()), (&expected[..], &inside[..]));
    // An alloc that obtains nothing cannot have released anything: the same, then the alloc.
    let (ops, actions) = read_group(&[&group[..], &[("alloc", 1, 512)]].concat());
    assert_eq!(ops[..3], expected);
    assert_eq!(ops[3], Op::Alloc(B2));
    assert_eq!(actions, inside);
}

#[test]
fn completions_after_the_last_release_of_an_empty_cache_belong_to_the_alloc() {
    let (ops, actions) = read_group(&[
        ("segment_unmap", 5, 64),
        ("free_completed", 1, 512),
        ("free_completed", 2, 512),
        ("alloc", 1, 512),
    ]);
    assert_eq!(ops, [Op::EmptyCache, Op::Done(B0), Op::Done(B1), Op::Alloc(B2)]);
    assert_eq!(actions, [(0, RecordedKind::SegmentUnmap)]);
}

#[test]
fn a_malloc_that_released_and_obtained_waited_for_all() {
    let (ops, actions) = read_group(&[
        ("free_completed", 1, 512),
        ("free_completed", 2, 512),
        ("segment_free", 5, 64),
        ("segment_alloc", 9, 2048),
        ("alloc", 9, 512),
    ]);
    assert_eq!(ops, [Op::Alloc(B2), Op::Done(B0), Op::Done(B1)]);
    assert_eq!(actions.iter().filter(|(event, _)| *event == 0).count(), 4);
}

#[test]
fn completions_that_leave_others_deferred_come_from_no_wait() {
    let (ops, actions) = read_group(&[
        ("free_completed", 1, 512),
        ("segment_free", 5, 64),
        ("segment_alloc", 9, 2048),
        ("alloc", 9, 512),
    ]);
    assert_eq!(ops, [Op::Done(B0), Op::Alloc(B2)]);
    assert_eq!(actions, [(1, RecordedKind::SegmentFree), (1, RecordedKind::SegmentAlloc)]);
}

#[test]
fn completions_on_both_sides_of_a_release_are_told_apart() {
    let (ops, actions) = read_group(&[
        ("free_completed", 1, 512),
        ("segment_free", 5, 64),
        ("free_completed", 2, 512),
        ("segment_free", 6, 64),
        ("segment_alloc", 9, 2048),
        ("alloc", 9, 512),
    ]);
    assert_eq!(ops, [Op::Done(B0), Op::Alloc(B2), Op::Done(B1)]);
    assert_eq!(actions.len(), 4);
    assert_eq!(actions[1], (1, RecordedKind::FreeCompleted));
}

#[test]
fn a_refusal_is_an_attempt_of_the_rounded_size() {
    let (ops, actions) = read_group(&[
        ("free_completed", 1, 512),
        ("free_completed", 2, 512),
        ("oom", 77, 1024),
        ("alloc", 1, 100),
    ]);
    assert_eq!(ops, [Op::Attempt(B2), Op::Done(B0), Op::Done(B1), Op::Alloc(BlockId(3))]);
    assert_eq!(actions[2], (0, RecordedKind::Oom));
}

#[test]
fn a_wait_without_a_release_is_plain_completions() {
    let (ops, actions) = read_group(&[("free_completed", 1, 512), ("free_completed", 2, 512)]);
    assert_eq!(ops, [Op::Done(B0), Op::Done(B1)]);
    assert!(actions.is_empty());
}

// ------------------------------------------------------------ starts and pools, worked by hand

const MIB: u64 = 1 << 20;

/// A final segment: address, size, pool; whether its pages are mapped one by one; blocks in order as
/// (size, request, state), a request of 0 being a free block.
struct Final {
    address: u64,
    size: u64,
    pool: (i64, i64),
    expandable: bool,
    blocks: Vec<(u64, u64)>,
}

fn ordinary(address: u64, size: u64, blocks: &[(u64, u64)]) -> Final {
    Final { address, size, pool: (0, 0), expandable: false, blocks: blocks.to_vec() }
}

fn pages(address: u64, size: u64, blocks: &[(u64, u64)]) -> Final {
    Final { expandable: true, ..ordinary(address, size, blocks) }
}

fn of_pool(pool: (i64, i64), segment: Final) -> Final {
    Final { pool, ..segment }
}

/// A snapshot of one device with final segments and the settings `conf`.
fn whole_snapshot(segments: &[Final], entries: &[(&str, u64, i64)], conf: &str) -> Vec<u8> {
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"](");
    for segment in segments {
        p.raw(b"}(").text("device").int(0).text("address").int(segment.address as i64);
        p.text("total_size").int(segment.size as i64).text("stream").int(0);
        let large = segment.blocks.iter().any(|&(size, _)| size > 2 * MIB);
        p.text("segment_type").text(if large { "large" } else { "small" });
        p.text("segment_pool_id").int(segment.pool.0).int(segment.pool.1).raw(b"\x86");
        p.text("is_expandable").raw(if segment.expandable { b"\x88" } else { b"\x89" });
        p.text("blocks").raw(b"](");
        let mut address = segment.address;
        for &(size, request) in &segment.blocks {
            let state = if request == 0 { "inactive" } else { "active_allocated" };
            p.raw(b"}(").text("address").int(address as i64).text("size").int(size as i64);
            p.text("requested_size").int(request as i64).text("state").text(state).raw(b"u");
            address += size;
        }
        assert_eq!(address, segment.address + segment.size);
        p.raw(b"eu");
    }
    p.raw(b"e").text("device_traces").raw(b"](](");
    for (time_us, &(action, addr, size)) in (1_000_000..).zip(entries) {
        let key = if action == "oom" { "device_free" } else { "addr" };
        p.raw(b"}(").text("action").text(action).text(key).int(addr as i64);
        p.text("size").int(size).text("stream").int(0).text("time_us").int(time_us).raw(b"u");
    }
    p.raw(b"ee").text("allocator_settings").raw(b"}(");
    p.text("PYTORCH_CUDA_ALLOC_CONF").text(conf);
    let max_split = conf.strip_prefix("max_split_size_mb:").map_or(-1, |mb| mb.parse().unwrap());
    p.text("max_split_size").int(if max_split < 0 { -1 } else { max_split << 20 });
    let expandable = conf.contains("expandable_segments:True");
    p.text("expandable_segments").raw(if expandable { b"\x88" } else { b"\x89" });
    p.raw(b"uu");
    p.finish()
}

/// A block of a start: size, request (0 if free), state, whether it is a guess.
type Started = (u64, u64, StartState, bool);

/// The segments at the start: address, large, reservation, blocks. Checks that the history leads
/// from there to the final blocks.
fn start_of(
    segments: &[Final],
    entries: &[(&str, u64, i64)],
    conf: &str,
) -> Vec<(u64, bool, Option<u64>, Vec<Started>)> {
    let pickle = whole_snapshot(segments, entries, conf);
    let Imported { trace, warnings } = import(&pickle).unwrap();
    check_replayable(&trace, "start");
    assert!(warnings[0].starts_with("the history begins late: "), "{warnings:?}");
    let (_, end) = Forward::follow(&trace, &[]);
    end.expect(&read_torch_snapshot(pickle.as_slice()).unwrap().segments, "start");
    let request = |block: BlockId| block.some().map_or(0, |b| trace.blocks[b.index()].size_bytes);
    let started = trace.start.as_ref().unwrap().iter().map(|(segment, blocks)| {
        let blocks = blocks.iter().map(|b| (b.size_bytes, request(b.block), b.state, b.guessed));
        (segment.address, segment.large, segment.reservation, blocks.collect())
    });
    started.collect()
}

const LIVE: StartState = StartState::Live;
const FREE: StartState = StartState::Free;

/// A block is freed at once.
fn freed(address: u64, size: u64) -> [(&'static str, u64, i64); 2] {
    [("free_requested", address, size as i64), ("free_completed", address, size as i64)]
}

#[test]
fn small_blocks_at_the_start_have_their_rounded_size() {
    let a = 2 * MIB;
    let entries = [&freed(a + 512, 700)[..], &[("alloc", a + 512, 600), ("free_completed", a, 9)]];
    let segment = ordinary(a, 2 * MIB, &[(512, 0), (1024, 600), (2 * MIB - 1536, 0)]);
    let start = start_of(&[segment], &entries.concat(), "");
    let blocks = vec![
        (512, 9, StartState::Deferred, false),
        (1024, 700, LIVE, false),
        (2 * MIB - 1536, 0, FREE, false),
    ];
    assert_eq!(start, [(a, false, None, blocks)]);
}

#[test]
fn a_gap_of_up_to_a_mebibyte_behind_a_large_block_is_its_rest() {
    let a = 32 * MIB;
    let segment = || ordinary(a, 20 * MIB, &[(20 * MIB, 0)]);
    // Up to the end of the segment: 19 MiB asked for, 1 MiB left; one byte less leaves more.
    let start = start_of(&[segment()], &freed(a, 19 * MIB), "");
    assert_eq!(start, [(a, true, None, vec![(20 * MIB, 19 * MIB, LIVE, false)])]);
    let start = start_of(&[segment()], &freed(a, 19 * MIB - 1024), "");
    let split = vec![(19 * MIB - 1024, 19 * MIB - 1024, LIVE, true), (MIB + 1024, 0, FREE, false)];
    assert_eq!(start, [(a, true, None, split)]);
    // The least that can be left free is more than 1 MiB, so no rest fits in front of it.
    let start = start_of(&[segment()], &freed(a, 19 * MIB - 512), "");
    let split = vec![(19 * MIB - 512, 19 * MIB - 512, LIVE, false), (MIB + 512, 0, FREE, false)];
    assert_eq!(start, [(a, true, None, split)]);
    // Up to the next block in use.
    let next = a + 6 * MIB;
    let entries = [freed(a, 5 * MIB + MIB / 2), freed(next, 2 * MIB)].concat();
    let start = start_of(&[segment()], &entries, "");
    let blocks = vec![
        (6 * MIB, 5 * MIB + MIB / 2, LIVE, false),
        (2 * MIB, 2 * MIB, LIVE, true),
        (12 * MIB, 0, FREE, false),
    ];
    assert_eq!(start, [(a, true, None, blocks)]);
}

#[test]
fn an_alloc_right_behind_a_block_shows_where_it_ends() {
    let a = 32 * MIB;
    let behind = a + 5 * MIB + MIB / 4;
    let entries = [&[("alloc", behind, 2 << 20)], &freed(a, 5 * MIB)[..]].concat();
    let rest = 20 * MIB - 5 * MIB - MIB / 4 - 2 * MIB;
    let blocks = [(5 * MIB + MIB / 4, 0), (2 * MIB, 2 * MIB), (rest, 0)];
    let start = start_of(&[ordinary(a, 20 * MIB, &blocks)], &entries, "");
    let shown = vec![(5 * MIB + MIB / 4, 5 * MIB, LIVE, false), (rest + 2 * MIB, 0, FREE, false)];
    assert_eq!(start, [(a, true, None, shown)]);
    // Not so if the block was freed before: the range is another one then.
    let entries = [&freed(a, 5 * MIB)[..], &[("alloc", a, 7 << 20)]].concat();
    let blocks = [(7 * MIB, 7 * MIB), (13 * MIB, 0)];
    let start = start_of(&[ordinary(a, 20 * MIB, &blocks)], &entries, "");
    let guess = vec![(5 * MIB, 5 * MIB, LIVE, true), (15 * MIB, 0, FREE, false)];
    assert_eq!(start, [(a, true, None, guess)]);
}

#[test]
fn oversize_blocks_and_blocks_still_there_have_their_true_size() {
    let a = 64 * MIB;
    // 40 MiB and more are never split, whatever is left.
    let entries = freed(a, 42 * MIB);
    let segment = || ordinary(a, 44 * MIB, &[(44 * MIB, 0)]);
    let start = start_of(&[segment()], &entries, "max_split_size_mb:40");
    assert_eq!(start, [(a, true, None, vec![(44 * MIB, 42 * MIB, LIVE, false)])]);
    let start = start_of(&[segment()], &entries, "max_split_size_mb:50");
    assert_eq!(start[0].3[0], (42 * MIB, 42 * MIB, LIVE, true));
    // The final list tells of what is never freed; here and there nothing else does.
    let segment = ordinary(a, 20 * MIB, &[(4 * MIB, 3 * MIB + 5), (16 * MIB, 0)]);
    let start = start_of(&[segment], &[("free_completed", a + 4 * MIB, 2 << 20)], "");
    let blocks = vec![
        (4 * MIB, 3 * MIB + 5, LIVE, false),
        (2 * MIB, 2 * MIB, StartState::Deferred, true),
        (14 * MIB, 0, FREE, false),
    ];
    assert_eq!(start, [(a, true, None, blocks)]);
}

#[test]
fn segments_that_are_gone_at_the_end_were_there_too() {
    let (a, b) = (32 * MIB, 64 * MIB);
    let entries = [
        &freed(a, 1000)[..],
        &[("segment_free", a, 2 << 20), ("segment_alloc", a, 20 << 20), ("alloc", a, 20 << 20)],
        &freed(b, 512),
    ];
    let segments =
        [ordinary(a, 20 * MIB, &[(20 * MIB, 20 * MIB)]), ordinary(b, 2 * MIB, &[(2 * MIB, 0)])];
    let start = start_of(&segments, &entries.concat(), "");
    let blocks =
        |size, request| vec![(size, request, LIVE, false), (2 * MIB - size, 0, FREE, false)];
    assert_eq!(start, [(a, false, None, blocks(1024, 1000)), (b, false, None, blocks(512, 512))]);
}

#[test]
fn mapped_runs_at_the_start_belong_to_reservations() {
    let conf = "expandable_segments:True";
    let page = 20 * MIB;
    let (large, small) = (1 << 40, 5 << 40);
    // Two runs of one large reservation, whose first page was unmapped before and is mapped again;
    // the second run is unmapped in the middle. A small reservation far away.
    let entries = [
        &freed(small + 2 * MIB, 512)[..],
        &freed(large + 4 * page, 7 * MIB),
        &[("segment_unmap", large + 4 * page, 20 << 20)],
        &[("segment_map", large, 20 << 20), ("alloc", large, 9 << 20)],
    ];
    let segments = [
        pages(large, 2 * page, &[(9 * MIB, 9 * MIB), (31 * MIB, 0)]),
        pages(large + 3 * page, page, &[(page, 0)]),
        pages(large + 5 * page, page, &[(page, 0)]),
        pages(small + 2 * MIB, 2 * MIB, &[(2 * MIB, 0)]),
    ];
    let start = start_of(&segments, &entries.concat(), conf);
    let in_large = vec![
        (page, 0, FREE, false),
        (7 * MIB, 7 * MIB, LIVE, false),
        (2 * page - 7 * MIB, 0, FREE, false),
    ];
    let in_small = vec![(512, 512, LIVE, false), (2 * MIB - 512, 0, FREE, false)];
    let expected = [
        (large + page, true, Some(large), vec![(page, 0, FREE, false)]),
        (large + 3 * page, true, Some(large), in_large),
        (small + 2 * MIB, false, Some(small + 2 * MIB), in_small),
    ];
    assert_eq!(start, expected);
}

#[test]
fn a_start_that_cannot_be_is_left_out_with_a_warning() {
    let a = 32 * MIB;
    let whole = || ordinary(a, 20 * MIB, &[(20 * MIB, 0)]);
    let warning = |segments: &[Final], entries: &[(&str, u64, i64)]| {
        let imported = import(&whole_snapshot(segments, entries, "")).unwrap();
        check_replayable(&imported.trace, "contradiction");
        assert_eq!(imported.trace.start, None);
        imported.warnings.into_iter().next().unwrap()
    };
    let contradicted = [
        // Outside all segments.
        (vec![whole()], freed(a - MIB, 512).to_vec()),
        // One block in the other.
        (vec![whole()], [freed(a, 5 * MIB), freed(a + MIB, 2 * MIB)].concat()),
        // Beyond the end of its segment.
        (vec![whole()], freed(a + 15 * MIB, 6 * MIB).to_vec()),
        // Segments that overlap, or are released without being there.
        (vec![whole(), ordinary(a + MIB, 2 * MIB, &[(2 * MIB, 0)])], freed(a, 512).to_vec()),
        (vec![whole()], vec![("segment_free", a, 20 << 20)]),
        (vec![whole()], vec![("segment_alloc", a, 2 << 20)]),
        // Not where blocks begin.
        (vec![whole()], freed(a + 100, 512).to_vec()),
        // Handed out, and not there at the end.
        (vec![whole()], vec![("alloc", a, 512)]),
    ];
    for (segments, entries) in &contradicted {
        let warning = warning(segments, entries);
        assert!(warning.starts_with("the history contradicts the final segments"), "{warning}");
    }
    let lists_missing = [Final { blocks: Vec::new(), size: 0, ..whole() }];
    let warning = warning(&lists_missing, &freed(a, 512));
    assert!(warning.starts_with("1 frees of blocks that were allocated before"), "{warning}");
    assert!(warning.ends_with("dump the snapshot with the blocks of its segments"), "{warning}");
}

/// Names of the pools, the events, and how many actions lie inside each event that releases.
fn pools_of(
    segments: &[Final],
    entries: &[(&str, u64, i64)],
) -> (Vec<String>, Vec<Op>, Vec<(Op, usize)>) {
    let pickle = whole_snapshot(segments, entries, "");
    let trace = import(&pickle).unwrap().trace;
    check_replayable(&trace, "pools");
    let rebuilt: Vec<_> = recorded_entries(&trace).map(|entry| entry.address).collect();
    let expected: Vec<_> = entries.iter().map(|&(_, address, _)| address).collect();
    assert_eq!(rebuilt, expected, "no entry is lost");
    let inside = trace.events.iter().zip(0..).filter_map(|(event, index)| {
        let actions = &trace.recording.as_ref().unwrap().actions;
        let releases = actions
            .iter()
            .filter(|action| action.event == index && action.kind == RecordedKind::SegmentFree);
        let count = releases.count();
        (count > 0).then_some((event.op, count))
    });
    let inside = inside.collect();
    (trace.pools.iter().map(|pool| pool.name.clone()).collect(), ops(&trace), inside)
}

fn obtained(address: u64, size: u64) -> [(&'static str, u64, i64); 2] {
    [("segment_alloc", address, size as i64), ("alloc", address, size as i64)]
}

const P0: PoolId = PoolId(0);

#[test]
fn allocs_go_to_the_pool_of_their_segment() {
    let (a, b, c) = (32 * MIB, 64 * MIB, 96 * MIB);
    let size = 20 * MIB;
    let entries = [obtained(a, size), obtained(b, size), obtained(c, size)].concat();
    let segments = [
        ordinary(a, size, &[(size, size)]),
        of_pool((0, 4), ordinary(b, size, &[(size, size)])),
        of_pool((7, 0), ordinary(c, size, &[(size, size)])),
    ];
    let (names, ops, _) = pools_of(&segments, &entries);
    assert_eq!(names, ["mempool (0, 4)", "graph (7, 0)"]);
    let p1 = PoolId(1);
    let expected = [
        Op::Alloc(B0),
        Op::PoolEnter(P0),
        Op::Alloc(B1),
        Op::PoolLeave(P0),
        Op::PoolEnter(p1),
        Op::Alloc(B2),
    ];
    assert_eq!(ops, expected);
}

#[test]
fn a_base_that_is_used_again_belongs_to_the_pool_of_its_time() {
    let (a, b, size) = (32 * MIB, 64 * MIB, 20 * MIB);
    let entries = [
        &obtained(a, size)[..],
        &obtained(b, 2 * size),
        &freed(a, size),
        &[("segment_free", a, size as i64)],
        &freed(b, 2 * size),
        &obtained(a, size),
    ];
    let segments = [
        of_pool((0, 1), ordinary(a, size, &[(size, size)])),
        ordinary(b, 2 * size, &[(2 * size, 0)]),
    ];
    let (_, ops, _) = pools_of(&segments, &entries.concat());
    assert_eq!(ops[2..5], [Op::Free(B0), Op::EmptyCache, Op::Free(B1)]);
    assert_eq!(ops[5..], [Op::PoolEnter(P0), Op::Alloc(B2)]);
}

#[test]
fn a_release_that_spares_a_default_segment_is_the_end_of_a_pool() {
    let (a, b, c) = (32 * MIB, 64 * MIB, 96 * MIB);
    let (size, big) = (20 * MIB, 24 * MIB);
    // The default segment at `a` is free when the one at `b` is released, and stays.
    let entries = [
        &obtained(a, size)[..],
        &obtained(b, big),
        &freed(a, size),
        &freed(b, big),
        &[("segment_free", b, big as i64)],
        &obtained(c, 30 * MIB),
    ];
    let segments =
        [ordinary(a, size, &[(size, 0)]), ordinary(c, 30 * MIB, &[(30 * MIB, 30 * MIB)])];
    let (names, ops, inside) = pools_of(&segments, &entries.concat());
    assert_eq!(names, ["unlisted pool 1"]);
    let expected = [
        Op::Alloc(B0),
        Op::PoolEnter(P0),
        Op::Alloc(B1),
        Op::Free(B0),
        Op::Free(B1),
        Op::PoolLeave(P0),
        Op::PoolDelete(P0),
        Op::Alloc(B2),
    ];
    assert_eq!(ops, expected);
    assert_eq!(inside, [(Op::PoolDelete(P0), 1)]);
}

#[test]
fn a_segment_obtained_beside_a_fitting_range_is_of_a_pool_that_is_gone() {
    let (a, b, c) = (32 * MIB, 64 * MIB, 128 * MIB);
    let history = |size: u64| {
        let entries = [
            &obtained(c, 2 * MIB)[..],
            &obtained(a, 30 * MIB),
            &freed(a, 30 * MIB),
            &obtained(b, size),
            &freed(b, size),
            // An empty_cache gives both back: the pool can have been a graph's.
            &[("segment_free", a, 30 << 20), ("segment_free", b, size as i64)],
            &freed(c, 2 * MIB),
        ];
        let segments = [ordinary(c, 2 * MIB, &[(2 * MIB, 0)])];
        pools_of(&segments, &entries.concat())
    };
    // 28 MiB fit in 30, and 30 MiB + 512 do not.
    let (names, ops, inside) = history(28 * MIB);
    assert_eq!(names, ["unlisted pool 1"]);
    assert_eq!(ops[3..5], [Op::PoolEnter(P0), Op::Alloc(B2)]);
    assert_eq!(ops[6..9], [Op::PoolLeave(P0), Op::PoolDelete(P0), Op::EmptyCache]);
    assert_eq!(inside, [(Op::EmptyCache, 2)]);
    assert!(history(30 * MIB + 512).0.is_empty());
    // A segment that the default pools keep shows that the range was not theirs.
    let entries = [
        &obtained(a, 30 * MIB)[..],
        &freed(a, 30 * MIB),
        &obtained(b, 20 * MIB),
        &[("segment_free", a, 30 << 20)],
    ];
    let segments = [ordinary(b, 20 * MIB, &[(20 * MIB, 20 * MIB)])];
    let (_, ops, inside) = pools_of(&segments, &entries.concat());
    assert_eq!(ops[..2], [Op::PoolEnter(P0), Op::Alloc(B0)]);
    assert_eq!(inside, [(Op::PoolDelete(P0), 1)]);
}

#[test]
fn a_flush_that_completes_a_block_does_not_make_its_range_fit() {
    let (a, b, c) = (32 * MIB, 64 * MIB, 128 * MIB);
    // The block at `a` completes inside the malloc of `b`, after its search.
    let entries = [
        &[
            ("segment_alloc", a, 60 << 20),
            ("alloc", a, 30 << 20),
            ("alloc", a + 30 * MIB, 30 << 20),
        ][..],
        &obtained(c, 20 * MIB),
        &freed(c, 20 * MIB),
        &[("free_requested", a, 30 << 20), ("free_completed", a, 30 << 20)][..1],
        &[("free_completed", a, 30 << 20), ("segment_free", c, 20 << 20)],
        &obtained(b, 24 * MIB),
        &freed(b, 24 * MIB),
        &[("segment_free", b, 24 << 20)],
    ];
    let segments = [ordinary(a, 60 * MIB, &[(30 * MIB, 0), (30 * MIB, 30 * MIB)])];
    let (names, _, inside) = pools_of(&segments, &entries.concat());
    assert!(names.is_empty());
    assert_eq!(inside.last(), Some(&(Op::EmptyCache, 1)));
}

#[test]
fn what_serves_allocs_in_a_row_is_one_pool() {
    let (a, b, c, d) = (32 * MIB, 64 * MIB, 96 * MIB, 128 * MIB);
    let size = 20 * MIB;
    // As in the recording: a pool is deleted while one of its segments is in use, and stays listed.
    let entries = [
        &obtained(d, size)[..],
        &obtained(a, size),
        &obtained(b, 22 * MIB),
        &obtained(c, 24 * MIB),
        &freed(d, size),
        &freed(b, 22 * MIB),
        &freed(c, 24 * MIB),
        &[("segment_free", b, 22 << 20), ("segment_free", c, 24 << 20)],
    ];
    let segments =
        [of_pool((0, 1), ordinary(a, size, &[(size, size)])), ordinary(d, size, &[(size, 0)])];
    let (names, ops, inside) = pools_of(&segments, &entries.concat());
    assert_eq!(names, ["mempool (0, 1)"]);
    assert_eq!(ops[1..5], [Op::PoolEnter(P0), Op::Alloc(B1), Op::Alloc(B2), Op::Alloc(BlockId(3))]);
    assert_eq!(inside, [(Op::PoolDelete(P0), 2)]);
}

#[test]
fn a_pool_that_is_used_later_is_not_deleted() {
    let (a, b, c) = (32 * MIB, 64 * MIB, 96 * MIB);
    let size = 20 * MIB;
    let history = |again: &[(&'static str, u64, i64)]| {
        let entries = [
            &obtained(c, size)[..],
            &obtained(a, size),
            &obtained(b, size),
            &freed(c, size),
            &freed(b, size),
            &[("segment_free", b, size as i64)],
            &freed(a, size),
            again,
        ];
        let segments = [
            of_pool((0, 1), ordinary(a, size, &[(size, if again.is_empty() { 0 } else { size })])),
            ordinary(c, size, &[(size, 0)]),
        ];
        pools_of(&segments, &entries.concat()).1
    };
    assert!(history(&[]).contains(&Op::PoolDelete(P0)));
    let ops = history(&[("alloc", a, size as i64)]);
    assert!(!ops.contains(&Op::PoolDelete(P0)));
    assert!(ops.ends_with(&[Op::PoolEnter(P0), Op::Alloc(BlockId(3))]), "{ops:?}");
}

#[test]
fn a_pool_of_whole_segments_is_never_split() {
    let (a, b) = (2 * MIB, 4 * MIB);
    let segments = [
        of_pool((0, 1), ordinary(a, 2 * MIB, &[(2 * MIB, 100)])),
        of_pool((0, 1), ordinary(b, 2 * MIB, &[(2 * MIB, 0)])),
        of_pool((0, 2), ordinary(3 * b, 2 * MIB, &[(1024, 1000), (2 * MIB - 1024, 0)])),
    ];
    // The history begins late: the blocks that are freed in it were whole segments as well.
    let trace = import(&whole_snapshot(&segments, &freed(b, 300), "")).unwrap().trace;
    let no_split: Vec<bool> = trace.pools.iter().map(|pool| pool.no_split).collect();
    assert_eq!(no_split, [true, false]);
    let start = trace.start.as_ref().unwrap();
    let sizes: Vec<u64> = start.blocks.iter().map(|block| block.size_bytes).collect();
    assert_eq!(sizes, [2 * MIB, 2 * MIB, 1024, 2 * MIB - 1024]);
    let pools: Vec<PoolId> = start.segments.iter().map(|segment| segment.pool).collect();
    assert_eq!(pools, [P0, P0, PoolId(1)]);
}

// --------------------------------------------------------------------- odd histories, devices

fn warnings_of(entries: &[(&str, u64, i64)]) -> (Vec<Op>, Vec<String>) {
    let Imported { trace, warnings } = import(&snapshot(&[entries])).unwrap();
    check_replayable(&trace, "odd");
    (ops(&trace), warnings)
}

#[test]
fn histories_with_gaps_are_read_with_a_warning() {
    let (ops, warnings) = warnings_of(&[
        ("free_requested", 7, 512),
        ("free_completed", 7, 512),
        ("free_requested", 8, 512),
        ("alloc", 1, 512),
        ("free_completed", 8, 512),
        ("alloc", 2, 512),
    ]);
    assert_eq!(ops, [Op::Alloc(B0), Op::Alloc(B1)]);
    assert!(
        warnings[0].starts_with("2 frees of blocks that were allocated before"),
        "{warnings:?}"
    );

    let (ops, warnings) = warnings_of(&[("alloc", 1, 512), ("alloc", 1, 256)]);
    assert_eq!(ops, [Op::Alloc(B0), Op::Alloc(B1)]);
    assert!(warnings[0].starts_with("1 allocs at addresses that were still in use"));

    let (ops, warnings) =
        warnings_of(&[("alloc", 1, 512), ("free_requested", 1, 512), ("alloc", 1, 256)]);
    assert_eq!(ops, [Op::Alloc(B0), Op::Defer(B0), Op::Done(B0), Op::Alloc(B1)]);
    assert!(warnings[0].starts_with("1 allocs at addresses whose free had not completed"));

    let (ops, warnings) = warnings_of(&[("alloc", 1, 512), ("free_completed", 1, 512)]);
    assert_eq!(ops, [Op::Alloc(B0), Op::Free(B0)]);
    assert!(warnings[0].starts_with("1 frees have only their completion"));

    let (ops, warnings) = warnings_of(&[("alloc", 1, 0), ("teleport", 1, 1), ("alloc", 2, 5)]);
    assert_eq!(ops, [Op::Alloc(B0)]);
    assert_eq!(warnings.len(), 2);
    assert!(warnings[1].contains("unknown actions such as \"teleport\""), "{warnings:?}");
}

#[test]
fn the_device_is_the_one_with_a_history_or_the_chosen_one() {
    let one: &[(&str, u64, i64)] = &[("alloc", 1, 512)];
    let two: &[(&str, u64, i64)] = &[("alloc", 1, 512), ("alloc", 2, 512)];
    let allocs = |pickle: &[u8], gpu| import_on(pickle, gpu).map(|i| i.trace.blocks.len());
    assert_eq!(allocs(&snapshot(&[&[], one]), None).unwrap(), 1);
    let both = snapshot(&[one, two]);
    assert_eq!(allocs(&both, Some(0)).unwrap(), 1);
    assert_eq!(allocs(&both, Some(1)).unwrap(), 2);
    let error = allocs(&both, None).unwrap_err().to_string();
    assert_eq!(
        error,
        "-: several GPUs have a history: GPU 0 has 1 entries, GPU 1 has 2 entries; expected one of \
         them: choose with --gpu N"
    );
    let error = allocs(&both, Some(2)).unwrap_err().to_string();
    assert!(error.starts_with("-: the snapshot has no GPU 2: GPU 0 has 1 entries"), "{error}");
    // Chosen, but without a history: there is nothing to replay, and it says so.
    let imported = import_on(&snapshot(&[&[], one]), Some(0)).unwrap();
    assert!(imported.warnings[0].contains("no history"));
}

#[test]
fn entries_without_stream_or_time_get_the_default() {
    let mut p = PickleWriter::new();
    p.raw(b"}(").text("segments").raw(b"]").text("device_traces").raw(b"](](}(");
    p.text("action").text("alloc").text("addr").int(-4096).text("size").int(5).raw(b"ueeu");
    let raw = read_torch_snapshot(p.finish().as_slice()).unwrap();
    let (trace, warnings) = trace_from_snapshot(&raw, None, KnownMemory::default()).unwrap();
    assert!(warnings.is_empty());
    assert_eq!(trace.streams[trace.blocks[0].stream.index()].handle, 0);
    // The C++ writer gives addresses as signed numbers.
    assert_eq!(trace.recording.unwrap().block_addresses, [0_u64.wrapping_sub(4096)]);
}

// ----------------------------------------------------------------------------------- truth

fn import_with_truth(truth: &str) -> Result<Imported, ImportError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("run.truth.json"), truth).unwrap();
    let path = dir.path().join("run.pickle.gz");
    let pickle = snapshot(&[&[("alloc", 1, 512)]]);
    import_snapshot(&path, Cursor::new(pickle), &ReadOptions::default())
}

#[test]
fn a_truth_file_may_tell_everything_or_nothing() {
    let header = import_with_truth("{}").unwrap().trace.header;
    assert_eq!((header.limit_bytes, header.device.total_bytes), (None, None));
    assert_eq!(header.name, "run");
    let total = 80_u64 << 30;
    let header = import_with_truth(&format!(r#"{{"cap_gib": 0, "total_memory": {total}}}"#));
    assert_eq!(header.unwrap().trace.header.limit_bytes, None, "0 is no limit");
    let header = import_with_truth(&format!(r#"{{"cap_gib": 20.5, "total_memory": {total}}}"#));
    assert_eq!(header.unwrap().trace.header.limit_bytes, Some(41 << 29));
    // The settings of the truth stand in where the snapshot has none, and hold over the cap.
    let truth = format!(
        r#"{{"cap_gib": 20, "total_memory": {total}, "stats": {{"num_ooms": 0}}, "other": [1],
             "conf": "per_process_memory_fraction:0.25"}}"#
    );
    let Imported { trace, warnings } = import_with_truth(&truth).unwrap();
    assert_eq!(trace.header.limit_bytes, Some(20 << 30));
    assert!(warnings.is_empty());
    assert_eq!(trace.recording.unwrap().truth.unwrap().stats["num_ooms"], 0);
    let truth = r#"{"conf": "per_process_memory_fraction:0.25"}"#;
    let Imported { trace, warnings } = import_with_truth(truth).unwrap();
    assert_eq!(trace.header.limit_bytes, None);
    assert!(warnings[0].contains("whose total is not known: give --limit"), "{warnings:?}");
}

#[test]
fn a_malformed_truth_file_is_named() {
    for truth in ["", "{", "[1]", r#"{"stats": {"num_ooms": "none"}}"#, r#"{"total_memory": -1}"#] {
        let error = import_with_truth(truth).expect_err(truth).to_string();
        assert!(error.contains("run.truth.json: "), "{error}");
        assert!(error.contains("line ") || truth.is_empty(), "{error}");
    }
    let error = import_with_truth(r#"{"cap_gib": -3}"#).expect_err("negative").to_string();
    assert!(error.contains("run.truth.json: cap_gib is -3; expected GiB"), "{error}");
}

// ------------------------------------------------------------------------------------- RMM

const RMM: &str = "\
Thread,Time,Action,Pointer,Size,Stream
1,23:59:59.999999,allocate,0x30a000000,256,0x0
2,00:00:00.000001,allocate,30a000100,512,0x2
1,00:00:00:000002,allocate failure,(nil),1099511627776,0x2
1,00:00:00.000003,free,0x30a000000,256,0x0
1,00:00:00.000003,allocate,0x0,0,0x0
1,00:00:00.000004,free,0x7777,64,0x0
2,00:00:00.000003,free,0x30a000100,512,0x0
";

#[test]
fn an_rmm_log_becomes_a_trace_with_streams_and_refusals() {
    let Imported { trace, warnings } =
        import_rmm_csv(Path::new("logs/rmm.dev0.csv"), RMM.as_bytes(), &ReadOptions::default())
            .unwrap();
    assert_eq!(
        ops(&trace),
        [Op::Alloc(B0), Op::Alloc(B1), Op::Attempt(B2), Op::Free(B0), Op::Free(B1)]
    );
    // 2 µs over midnight, then 1 µs a row; the last row is late and stays at the time before.
    let times: Vec<u64> = trace.events.iter().map(|event| event.time_ns).collect();
    assert_eq!(times, [0, 2000, 3000, 4000, 4000]);
    let handles: Vec<u64> =
        trace.blocks.iter().map(|b| trace.streams[b.stream.index()].handle).collect();
    assert_eq!(handles, [0, 2, 2]);
    let addresses = &trace.recording.as_ref().unwrap().block_addresses;
    assert_eq!(addresses, &[0x30a0_00000, 0x30a0_00100, 0]);
    assert_eq!(trace.header.name, "rmm.dev0");
    assert_eq!(trace.header.history.frees_without_alloc, 1);
    let starts = ["1 frees of blocks", "1 frees on another stream", "1 rows of 0 bytes"];
    assert_eq!(warnings.len(), starts.len(), "{warnings:?}");
    for (warning, start) in warnings.iter().zip(starts) {
        assert!(warning.starts_with(start), "{warning}");
    }
    check_replayable(&trace, "rmm");
}

#[test]
fn rmm_errors_name_line_and_field() {
    let cases = [
        ("1,0.5,allocate,0x1,256", "line 3: a row of 5 fields; expected six fields"),
        ("1,0.5,grab,0x1,256,0x0", "line 3: action \"grab\"; expected allocate"),
        ("1,noon,allocate,0x1,256,0x0", "line 3: time \"noon\"; expected seconds"),
        ("1,0.5,allocate,zz,256,0x0", "line 3: pointer \"zz\"; expected an address"),
        ("1,0.5,allocate,0x1,-1,0x0", "line 3: size \"-1\"; expected a number of bytes"),
        ("1,0.5,allocate,0x1,99999999999999999999,0x0", "line 3: size"),
        ("1,0.5,allocate,0x1,256,main", "line 3: stream \"main\"; expected a handle"),
    ];
    for (row, expected) in cases {
        let first = "1,1634567890.123456,allocate,0x1,1,0x0";
        let log = format!("Thread,Time,Action,Pointer,Size,Stream\n{first}\n{row}\n");
        let error = read_rmm_csv(log.as_bytes()).expect_err(row).to_string();
        assert!(error.starts_with(expected), "{error}\nshould begin {expected}");
    }
    let error = import_rmm_csv(
        Path::new("a.csv"),
        b"Event Type,Device ID\n".as_slice(),
        &ReadOptions::default(),
    );
    let error = error.expect_err("another header").to_string();
    assert!(error.starts_with("a.csv: line 1: the header \"Event Type,Device ID\""), "{error}");
}

// ------------------------------------------------------------------------- files of any format

#[test]
fn read_trace_tells_formats_by_content() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let read = |path: &Path| read_trace(path, &ReadOptions::default()).unwrap().trace;
    let snapshot = fixture("protocol4.pickle");
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::copy(&mut snapshot.as_slice(), &mut gz).unwrap();
    let packed = gz.finish().unwrap();
    // Names that say nothing, or lie.
    for (name, bytes) in [
        ("a.pickle", snapshot.clone()),
        ("b.json", packed.clone()),
        ("c", zstd::encode_all(snapshot.as_slice(), 1).unwrap()),
    ] {
        check_fixture(&read(&write(name, &bytes)));
    }
    assert_eq!(read(&write("log.txt", RMM.as_bytes())).blocks.len(), 3);
    let trace = read(&write("small.trace", b"alloc a 1MiB\nfree a\n"));
    assert_eq!((trace.events.len(), trace.header.name.as_str()), (2, "small"));

    let error =
        |path: &Path| read_trace(path, &ReadOptions::default()).expect_err("must fail").to_string();
    let path = write("cut.pickle", &snapshot[..100]);
    let expected = format!("{}: byte 100: the file ends here; expected", path.display());
    assert!(error(&path).starts_with(&expected), "{}", error(&path));
    let path = write("cut.pickle.gz", &packed[..packed.len() / 2]);
    let message = error(&path);
    assert!(message.starts_with(&format!("{}: ", path.display())), "{message}");
    assert!(message.contains("truncated"), "{message}");
    assert_eq!(message.lines().count(), 1);
    let path = write("bad.trace", b"alloc a 1MiB\nfree b\n");
    assert!(error(&path).starts_with(&format!("{}:2:", path.display())), "{}", error(&path));
    assert!(error(&dir.path().join("absent.pickle")).contains("absent.pickle: "));
}

#[test]
fn progress_counts_the_bytes_of_the_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import/odd/long_stack.pickle");
    let progress = std::sync::Arc::default();
    let options =
        ReadOptions { progress: Some(std::sync::Arc::clone(&progress)), ..ReadOptions::default() };
    read_trace(&path, &options).unwrap();
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert_eq!(progress.load(std::sync::atomic::Ordering::Relaxed), bytes);
}

/// A compressed file is read to its very end, so that its checksum is looked at, and a snapshot is
/// all that a file may hold.
#[test]
fn damage_behind_the_last_opcode_is_found() {
    let Some(dir) = shared_dir() else { return };
    let original = std::fs::read(dir.join("tiny.pickle.gz")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.pickle.gz");
    let error = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        read_trace(&path, &ReadOptions::default()).err().map(|error| error.to_string())
    };
    assert_eq!(error(&original), None);
    let end = original.len();
    for at in [end - 8, end - 5, end - 4, end - 1] {
        let mut flipped = original.clone();
        flipped[at] ^= 1;
        assert!(error(&flipped).is_some(), "byte {at} of checksum or size is wrong");
    }
    for cut in [1, 4, 8] {
        assert!(error(&original[..end - cut]).is_some(), "{cut} bytes are cut");
    }
    let mut pickle = Vec::new();
    MultiGzDecoder::new(&original[..]).read_to_end(&mut pickle).unwrap();
    assert_eq!(error(&pickle), None);
    pickle.extend_from_slice(b"xx");
    let message = error(&pickle).expect("bytes follow");
    assert!(message.contains("behind the pickle's STOP"), "{message}");
    let twice = [original.clone(), original].concat();
    assert!(error(&twice).expect("two snapshots").contains("one snapshot a file"));
}
