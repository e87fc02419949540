//! Histories that begin late: every recording, cut at a quarter, a half and three quarters of its
//! history, is reproduced from there on.
//!
//! The cut is what a ring buffer leaves: the last entries, and the segments and blocks of the end.
//! Most recordings were stored without their blocks; those are then written from the exact
//! reproduction of the whole history, which `recordings.rs` proves.

use std::fs::File;
use std::path::Path;

use fraglab::alloc::{BlockState, LayoutBlock};
use fraglab::engine::{VerifyResult, verify};
use fraglab::import::{
    KnownMemory, RawBlock, RawBlockState, RawSnapshot, ReadOptions, read_torch_snapshot,
    read_trace, trace_from_snapshot,
};
use fraglab::trace::{Header, room_on_device};
use rayon::prelude::*;

use crate::common::shared_dir;

/// Where a history is cut, in hundredths of its entries.
const CUTS_PERCENT: [usize; 3] = [25, 50, 75];

fn snapshot(path: &Path) -> RawSnapshot {
    let file = File::open(path).expect("the recording opens");
    let pickle = flate2::read::GzDecoder::new(file);
    read_torch_snapshot(pickle).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Gives every segment of the end its blocks, where the file has none.
fn write_blocks(snapshot: &mut RawSnapshot, layout: &[LayoutBlock]) {
    for segment in &mut snapshot.segments {
        if !segment.blocks.is_empty() {
            continue;
        }
        let end = segment.address + segment.total_bytes;
        let inside = layout.partition_point(|block| block.address < segment.address)
            ..layout.partition_point(|block| block.address < end);
        segment.blocks = layout[inside]
            .iter()
            .map(|block| {
                let state = match block.state {
                    BlockState::Allocated => RawBlockState::Allocated,
                    BlockState::Deferred => RawBlockState::Pending,
                    BlockState::Free => RawBlockState::Inactive,
                };
                RawBlock::new(block.address, block.size_bytes, block.requested_bytes, state)
            })
            .collect();
        let covered: u64 = segment.blocks.iter().map(|block| block.size_bytes).sum();
        assert_eq!(covered, segment.total_bytes, "blocks cover their segment");
    }
}

/// What comes of the last part of a history.
fn verify_from(snapshot: &RawSnapshot, header: &Header) -> VerifyResult {
    let device_total_bytes = header.device.total_bytes;
    let physical_bytes = device_total_bytes.map(room_on_device);
    let room_bytes =
        physical_bytes.map(|bytes| header.limit_bytes.map_or(bytes, |limit| limit.min(bytes)));
    let known = KnownMemory { room_bytes, device_total_bytes };
    let (mut trace, _) = trace_from_snapshot(snapshot, None, known).expect("a trace");
    let history = trace.header.history;
    trace.header = Header { history, ..header.clone() };
    verify(&trace).unwrap_or_else(|error| panic!("{}: {error}", header.name))
}

struct Outcome {
    name: String,
    percent: usize,
    result: VerifyResult,
}

fn outcomes_of(path: &Path) -> Vec<Outcome> {
    let imported = read_trace(path, &ReadOptions::default());
    let trace = imported.unwrap_or_else(|error| panic!("{error}")).trace;
    let whole = verify(&trace).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(whole.exact, "{}: {:?}", path.display(), whole.first_difference);
    let mut snapshot = snapshot(path);
    write_blocks(&mut snapshot, &whole.layout);
    let device = snapshot.devices.iter().position(|entries| !entries.is_empty()).expect("one");
    let entries = snapshot.devices[device].len();
    let mut dropped = 0;
    let cuts = CUTS_PERCENT.iter().map(|&percent| {
        let keep_from = entries * percent / 100;
        snapshot.devices[device].drain(..keep_from - dropped);
        dropped = keep_from;
        let result = verify_from(&snapshot, &trace.header);
        Outcome { name: trace.header.name.clone(), percent, result }
    });
    cuts.collect()
}

#[test]
fn every_recording_is_reproduced_from_a_cut_on() {
    let Some(dir) = shared_dir() else { return };
    let mut paths: Vec<_> = std::fs::read_dir(&dir)
        .expect("the folder can be read")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.to_string_lossy().ends_with(".pickle.gz"))
        .collect();
    paths.sort();
    let outcomes: Vec<Outcome> = paths.par_iter().flat_map_iter(|path| outcomes_of(path)).collect();
    assert_eq!(outcomes.len(), 3 * 60);
    let mut inexact = 0;
    for Outcome { name, percent, result } in &outcomes {
        let what = format!("{name} from {percent} % on: {:?}", result.first_difference);
        if result.exact {
            continue;
        }
        // Random requests fill every gap, so that the size of a freed block cannot always be told.
        assert!(name.starts_with("random."), "{what}");
        let named = |cause: &String| cause.contains("stale sizes") || cause.contains("garbage");
        assert!(result.possible_causes.iter().any(named), "{what}: {:?}", result.possible_causes);
        println!("{what}");
        inexact += 1;
    }
    println!("{} of {} cuts are exact", outcomes.len() - inexact, outcomes.len());
    assert!(inexact <= 3, "{inexact} cuts of random programs are not exact");
}
