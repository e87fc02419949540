//! What the threads behind the cases print on the way, step by step: `expect` lines of a case see
//! only peaks and ends.

use std::fs;

use crate::common::program::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Levels after one event.
struct Moment {
    phase: String,
    requested_bytes: u64,
    reserved_bytes: u64,
}

/// The levels after every event of a case.
fn moments(case: &str, args: &[&str]) -> Vec<Moment> {
    let folder = Folder::new();
    let out = folder.path("levels.csv");
    let trace = format!("{}/traces/cases/{case}.txt", env!("CARGO_MANIFEST_DIR"));
    let base = ["run", "--trace", &trace, "--timeline", &out, "--quiet"];
    assert_code(&fraglab(&[&base[..], args].concat()), 0);
    let text = fs::read_to_string(&out).expect("the levels");
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().expect("a header");
    let column = |name: &str| header.iter().position(|cell| *cell == name).expect("the column");
    let columns = ["phase", "requested_bytes", "reserved_bytes"].map(column);
    lines
        .map(|cells| Moment {
            phase: cells[columns[0]].to_owned(),
            requested_bytes: cells[columns[1]].parse().expect("a number"),
            reserved_bytes: cells[columns[2]].parse().expect("a number"),
        })
        .collect()
}

fn reserved_mib(moments: &[Moment], events: impl Iterator<Item = usize>) -> Vec<u64> {
    events.map(|event| moments[event].reserved_bytes / MIB).collect()
}

/// The last moment of a phase.
fn end_of<'m>(moments: &'m [Moment], phase: &str) -> &'m Moment {
    moments.iter().rfind(|moment| moment.phase == phase).expect("the phase")
}

/// GiB rounded to three decimals, as the script of that thread prints them.
fn thousandths_of_gib(bytes: u64) -> u64 {
    (bytes * 1000 + GIB / 2) / GIB
}

/// The devlog prints what is mapped after each of the eight allocations of 16 MiB.
#[test]
fn expandable_segments_grow_by_the_devlogs_pages() {
    let moments = moments("pytorch-devlog-order-small-first", &["--alloc", "expandable"]);
    let grown = reserved_mib(&moments, 0..8);
    assert_eq!(grown, [20, 40, 60, 80, 80, 100, 120, 140]);
    let later = reserved_mib(&moments, 8..moments.len());
    assert!(later.iter().all(|&mib| mib == 140), "the order stops mattering: {later:?}");
}

/// The devlog's first table: 128 MiB after the small ones, 32 MiB more for every large one.
#[test]
fn small_ones_first_add_a_segment_for_every_large_one() {
    let moments = moments("pytorch-devlog-order-small-first", &[]);
    assert_eq!(reserved_mib(&moments, 0..8), [16, 32, 48, 64, 80, 96, 112, 128]);
    assert_eq!(reserved_mib(&moments, 16..20), [160, 192, 224, 256]);
}

/// The reproducer prints every twentieth cycle: reserved, and 66 to 266 MiB live.
#[test]
fn both_options_together_grow_as_the_thread_s_table_does() {
    let moments = moments("pytorch-123548-recorded", &[]);
    // The buffer, then five events a cycle.
    let ends = || (0..=100).step_by(20).map(|cycle| 5 * (cycle + 1));
    assert_eq!(reserved_mib(&moments, ends()), [220, 2_980, 5_760, 8_520, 11_300, 14_060]);
    let live: Vec<u64> = ends().map(|event| moments[event].requested_bytes / MIB).collect();
    assert_eq!(live, [66, 106, 146, 186, 226, 266]);
}

/// "Either option alone stays under 500 MiB reserved, as do defaults", in every cycle.
#[test]
fn either_option_alone_stays_under_500_mib() {
    for alloc in ["caching", "caching+max_split_size_mb=128", "expandable"] {
        let moments = moments("pytorch-123548-cycles", &["--alloc", alloc]);
        let most = moments.iter().map(|moment| moment.reserved_bytes / MIB).max();
        assert!(most.is_some_and(|mib| mib < 500), "{alloc}: {most:?}");
    }
}

/// The one-layer script prints allocated and reserved before and after each stage, in GiB.
#[test]
fn wrapping_a_layer_in_fsdp_passes_the_thread_s_stages() {
    let moments = moments("pytorch-124260", &[]);
    let stage = |phase: &str| {
        let end = end_of(&moments, phase);
        (thousandths_of_gib(end.requested_bytes), thousandths_of_gib(end.reserved_bytes))
    };
    assert_eq!(stage("load"), (758, 775));
    assert_eq!(stage("sync"), (758, 1_367));
    // After the flat tensor, before the parameters go.
    let flat =
        moments.iter().find(|moment| moment.phase == "flatten" && moment.requested_bytes > GIB);
    let flat = flat.expect("the flat tensor");
    assert_eq!(thousandths_of_gib(flat.requested_bytes), 1_512);
    assert_eq!(thousandths_of_gib(flat.reserved_bytes), 2_123);
}

/// With room the pool of the thread goes from 9.18 to 14.44 GiB, live memory from 9.08 to 9.61.
/// The case has no 0.10 GiB of other tensors in the pool.
#[test]
fn a_pool_keeps_what_conversion_replaced() {
    let moments = moments("vllm-49151", &["--capacity", "80GiB"]);
    let before = &moments[5];
    assert_eq!(before.requested_bytes, 9_298 * MIB, "9.08 GiB");
    assert_eq!(before.reserved_bytes, 9_298 * MIB);
    let after = moments.last().expect("events");
    assert_eq!(after.requested_bytes, (4_450 + 4 * 1_346) * MIB, "9.60 GiB");
    assert_eq!(after.reserved_bytes, (9_298 + 4 * 1_346) * MIB, "5.26 GiB more");
}

/// The save adds 452 MiB, and nothing gives them back.
#[test]
fn a_checkpoint_is_a_step_in_reserved_memory() {
    let moments = moments("pytorch-137151", &[]);
    let ends = ["step1", "step2", "save", "later_step"].map(|phase| end_of(&moments, phase));
    assert_eq!(ends.map(|end| end.reserved_bytes / MIB), [1_344, 1_796, 2_248, 2_248]);
}

/// The most that is live in a frame: 25 MiB more than in the last, 2,150 MiB more every step.
#[test]
fn every_frame_leaves_25_mib_behind() {
    let moments = moments("rmm-1421", &["--limit", "80GiB"]);
    let falls = moments.windows(2).filter(|pair| pair[1].requested_bytes < pair[0].requested_bytes);
    let peaks: Vec<u64> = falls.map(|pair| pair[0].requested_bytes / MIB).collect();
    assert_eq!((peaks.len(), peaks[0]), (516, 12_880));
    assert!(peaks.windows(2).all(|pair| pair[1] - pair[0] == 25), "{peaks:?}");
    let ends = (0..6).map(|step| end_of(&moments, &format!("step{step}")).requested_bytes / MIB);
    // The last step ends with the tensor that was refused.
    assert!(ends.eq([2_150, 4_300, 6_450, 8_600, 10_750, 12_900 + 12_880]));
}
