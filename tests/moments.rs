//! Moments of a replay: splits, holes and pins that add up, on hand-worked cases and recordings.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use fraglab::alloc::BlockState;
use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, Prepared, RunOptions, When, moments};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::metrics::{ENVELOPE_POINTS, Moment};
use fraglab::trace::{Trace, read_text};
use fraglab::units::{GIB, MIB};

use crate::common::shared_dir;

fn options() -> RunOptions {
    RunOptions::new(CostProfile::shipped("h200").expect("ships"))
}

fn spec(name: &str) -> AllocSpec {
    name.parse().expect("a specification")
}

fn moment(trace: &Trace, alloc: &str, when: When) -> Option<Moment> {
    let options = options();
    let prepared = Prepared::new(trace, &options);
    moments(&prepared, &spec(alloc), None, &[when]).expect("runs").remove(0)
}

fn case(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/cases").join(name);
    read_text(&fs::read_to_string(path).expect("a case")).expect("parses")
}

/// The issue's own figures: 29 small blocks keep 11,144,173,568 B of one segment.
#[test]
fn the_blocks_of_step_2_pin_the_huge_segment() {
    let moment =
        moment(&case("pytorch-35901.txt"), "caching", When::FirstRefusal).expect("refused");
    assert_eq!(moment.request.size_bytes, 11_643_387_904);
    assert_eq!(moment.largest_hole_bytes, 11_125_982_208);
    assert_eq!(moment.device_free_bytes, Some(16 * GIB - 5552 * 2 * MIB));
    // 2 of 16,515,072, 1 of 11,400,192 and 1 + 24 of 18,191,360 B.
    assert_eq!(moment.pins.len(), 28);
    let groups = moment.pin_groups();
    assert_eq!(groups.len(), 1);
    assert_eq!((groups[0].blocks, groups[0].segments), (28, 1));
    assert_eq!(groups[0].phase.as_deref(), Some("step2"));
    assert_eq!(groups[0].stranded_bytes, 11_144_173_568);
    assert_eq!(groups[0].size_bytes, 499_214_336);
    // The hole in the middle and the tail, both on a segment with live blocks.
    assert_eq!(moment.holes.len(), 1);
    let holes = &moment.holes[0];
    assert_eq!((holes.holes, holes.size_bytes), (2, 18_191_360 + 11_125_982_208));
    assert_eq!((holes.whole_bytes, holes.largest_bytes), (0, 11_125_982_208));
    assert_eq!(moment.pool_names[&holes.pool], "large");
    assert_eq!(moment.segments(), (1, 0));
}

/// In the last script of the developer log t1 and t3 live on; four segments of 16 MiB and one of 32.
#[test]
fn whole_segments_are_holes_without_pins() {
    let trace = case("pytorch-devlog-survivors.txt");
    let moment = moment(&trace, "caching", When::ReservedPeak).expect("a peak");
    assert_eq!(moment.pins, []);
    assert_eq!((moment.holes[0].holes, moment.holes[0].whole_bytes), (2, 32 * MIB));
    assert_eq!(moment.segments(), (5, 2));
    // In pages of 20 MiB they are pins: [0, 20) and [20, 40) hold t1, [40, 60) and [60, 80) t3.
    let moment = self::moment(&trace, "expandable", When::ReservedPeak).expect("a peak");
    let of = |name: &str| {
        let pins = moment.pins.iter().filter(|pin| pin.name.as_deref() == Some(name));
        pins.map(|pin| pin.pin.stranded_bytes / MIB).sum::<u64>()
    };
    // [0, 16) lies on t1's first page, [32, 40) on its second, [40, 48) on t3's first; big holds the
    // 4 MiB behind itself.
    assert_eq!((of("t1"), of("t3"), of("big")), (16 + 8, 8, 4));
}

#[test]
fn a_moment_before_an_event_does_not_hold_it() {
    let trace = read_text("alloc a 20MiB\nmark late\nalloc b 30MiB\nfree a\nalloc c 40MiB\n");
    let trace = trace.expect("parses");
    let at = |event| moment(&trace, "caching", When::Before(event));
    let first = at(0).expect("a request follows");
    assert_eq!((first.requested_bytes, first.levels.reserved_bytes), (0, 0));
    assert_eq!((first.request.event_index, first.request.phase), (0, None));
    assert_eq!(first.request.private_pool, None);
    // The request of a moment is the next one.
    let second = at(1).expect("a request follows");
    assert_eq!((second.requested_bytes, second.request.event_index), (20 * MIB, 2));
    assert_eq!(second.request.phase.as_deref(), Some("late"));
    assert_eq!(at(4).expect("a request").split.soft_bytes, 20 * MIB);
    assert!(at(5).is_none() && at(u64::MAX).is_none());
}

/// What a moment says must add up, at the reserved peak of every recorded job in every allocator.
#[test]
fn splits_holes_and_pins_add_up_on_recordings() {
    let Some(dir) = shared_dir() else { return };
    let options = options();
    for name in ["llama-1b-plain.oom40.stacks", "streams-offload", "mempool", "random.gc40", "tiny"]
    {
        let path = dir.join(format!("{name}.pickle.gz"));
        let trace = read_trace(&path, &ReadOptions::default()).expect("reads").trace;
        let prepared = Prepared::new(&trace, &options);
        for alloc in ["caching", "expandable", "best-fit", "stitch+policy=shipped", "native"] {
            let whens = [When::ReservedPeak, When::FirstRefusal];
            let moments = moments(&prepared, &spec(alloc), None, &whens).expect("runs");
            let observed = prepared.run(&spec(alloc), None, Observe::default()).expect("runs");
            let result = observed.result;
            let refused = result.outcome.event_index.is_some();
            assert_eq!(moments[1].is_some(), refused, "{name} {alloc}");
            let of_result = if refused { &moments[1] } else { &moments[0] };
            let split = of_result.as_ref().map(|moment| moment.split);
            assert_eq!(split, result.split, "{name} {alloc}");
            for moment in moments.iter().flatten() {
                check(moment, &format!("{name} {alloc}"));
            }
        }
    }
}

fn check(moment: &Moment, what: &str) {
    let split = moment.split;
    let parts = split.internal_bytes
        + split.deferred_bytes
        + split.hard_bytes
        + split.soft_bytes
        + split.stream_bytes;
    assert_eq!(parts, moment.levels.reserved_bytes - moment.requested_bytes, "{what}");
    let free = split.hard_bytes + split.soft_bytes + split.stream_bytes;
    let in_holes = moment.holes.iter().map(|group| group.size_bytes).sum::<u64>();
    assert_eq!(in_holes, free, "{what}");
    let stranded = moment.pins.iter().map(|pin| pin.pin.stranded_bytes).sum::<u64>();
    assert_eq!(stranded, split.hard_bytes, "{what}");
    let groups = moment.pin_groups().iter().map(|group| group.stranded_bytes).sum::<u64>();
    assert_eq!(groups, split.hard_bytes, "{what}");
    for pin in &moment.pins {
        assert_ne!(pin.pin.block.state, BlockState::Free, "{what}");
        assert!(pin.pin.alone_bytes <= pin.pin.stranded_bytes, "{what}");
        assert!(pin.born_event.is_none_or(|event| event <= split.at_event), "{what}");
    }
}

#[test]
fn pins_of_a_recording_with_stacks_name_lines_of_the_model() {
    let Some(dir) = shared_dir() else { return };
    let path = dir.join("llama-1b-varlen.s4.stacks.pickle.gz");
    let trace = read_trace(&path, &ReadOptions::default()).expect("reads").trace;
    let moment = moment(&trace, "caching", When::ReservedPeak).expect("a peak");
    let groups = moment.pin_groups();
    assert!(!groups.is_empty());
    let site = groups[0].site.as_deref().expect("a stack");
    assert!(!site.contains('/') && site.contains(".py:"), "{site}");
}

/// A bounded time line has the peaks of the run, and its rows the highest levels of their stretch.
#[test]
fn a_time_line_in_few_points_keeps_the_peaks() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/llama-1b-varlen.json.zst");
    let dir = tempfile::tempdir().expect("a folder");
    let rows = |name: &str, more: &[&str]| {
        let file = dir.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
        let command = command.arg("run").arg("--trace").arg(&trace).arg("--timeline").arg(&file);
        command.args(more).arg("--quiet").assert().success();
        let text = fs::read_to_string(file).expect("written");
        let lines: Vec<String> = text.lines().skip(1).map(str::to_owned).collect();
        lines
    };
    let all = rows("all.csv", &[]);
    let few = rows("few.csv", &["--timeline-points", &ENVELOPE_POINTS.to_string()]);
    assert!(few.len() <= ENVELOPE_POINTS && few.len() > ENVELOPE_POINTS / 2);
    let columns = |line: &str| {
        let fields: Vec<String> = line.split(',').map(str::to_owned).collect();
        let levels: Vec<u64> =
            fields[3..].iter().map(|field| field.parse().expect("bytes")).collect();
        (fields[0].parse::<usize>().expect("an index"), fields[1..3].to_vec(), levels)
    };
    let mut begin = 0;
    for line in &few {
        let (last, time_and_phase, levels) = columns(line);
        let stretch = all[begin..=last].iter().map(|line| columns(line).2);
        let highest = stretch.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect());
        assert_eq!(Some(levels), highest, "{line}");
        assert_eq!(time_and_phase, columns(&all[last]).1, "{line}");
        begin = last + 1;
    }
    assert_eq!(begin, all.len());
}
