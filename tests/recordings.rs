//! The recordings of real jobs: `caching` must do exactly what the recorded allocator did.

use std::path::{Path, PathBuf};

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run, verify};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::{RecordedKind, Trace};
use rayon::prelude::*;

use crate::common::shared_dir;

/// Recordings whose features come later: growing segments, private pools, histories that begin
/// late.
fn is_plain(name: &str) -> bool {
    let later = ["expandable", "graph-train", "mempool", ".late.", ".overflow."];
    name.ends_with(".pickle.gz") && !later.iter().any(|part| name.contains(part))
}

fn plain_recordings(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("the folder can be read");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut plain: Vec<PathBuf> = paths
        .filter(|path| path.file_name().is_some_and(|n| is_plain(&n.to_string_lossy())))
        .collect();
    plain.sort();
    plain
}

fn trace_of(path: &Path) -> Trace {
    let imported = read_trace(path, &ReadOptions::default());
    imported.unwrap_or_else(|error| panic!("{error}")).trace
}

#[test]
fn every_plain_recording_is_reproduced_exactly() {
    let Some(dir) = shared_dir() else { return };
    let paths = plain_recordings(&dir);
    assert_eq!(paths.len(), 42, "recordings without expandable segments, pools and late starts");
    let outcomes: Vec<String> = paths
        .par_iter()
        .map(|path| {
            let trace = trace_of(path);
            let result =
                verify(&trace).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(result.exact, "{}: {:?}", result.file, result.first_difference);
            let truth = trace.recording.as_ref().and_then(|recording| recording.truth.as_ref());
            let left_out = truth.map_or(0, |truth| {
                let peaks = truth.stats.keys().filter(|name| name.ends_with(".peak")).count();
                // An empty_cache that releases nothing leaves no entry, so this one may differ.
                (if truth.peak_stats_reset { peaks } else { 0 }) + 1
            });
            let expected = truth.map_or(0, |truth| truth.stats.len());
            assert!(
                result.statistics as usize + left_out >= expected,
                "{}: {result:?}",
                result.file
            );
            format!("{} {}", result.file, result.segment_events)
        })
        .collect();
    assert_eq!(outcomes.len(), 42);
}

/// A comparison that finds nothing wrong proves nothing unless it finds what is.
#[test]
fn a_changed_recording_is_found() {
    let Some(dir) = shared_dir() else { return };
    let original = trace_of(&dir.join("gpt2-small.pickle.gz"));
    let changed = |change: &dyn Fn(&mut Trace)| {
        let mut trace = original.clone();
        change(&mut trace);
        let result = verify(&trace).expect("can be compared");
        assert!(!result.exact);
        result.first_difference.expect("the difference is named")
    };
    let recording = original.recording.as_ref().expect("recorded");
    let (index, segment) = recording
        .actions
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, action)| action.kind == RecordedKind::SegmentAlloc)
        .nth(40)
        .expect("dozens of segments");
    let difference = changed(&|trace| {
        trace.recording.as_mut().expect("recorded").actions[index].size_bytes += 2 << 20;
    });
    assert_eq!(difference.event_index, u64::from(segment.event));
    let block = original.blocks.len() / 2;
    let difference = changed(&|trace| {
        trace.recording.as_mut().expect("recorded").block_addresses[block] += 512;
    });
    assert!(difference.expected.contains("alloc"), "{difference:?}");
    let difference = changed(&|trace| {
        let truth = trace.recording.as_mut().and_then(|recording| recording.truth.as_mut());
        *truth.expect("has truth").stats.get_mut("active.all.peak").expect("a statistic") += 1;
    });
    assert!(difference.expected.starts_with("active.all.peak"), "{difference:?}");
}

/// Without any address from the recording a run reserves what the real
/// allocator reported, to the byte, on 36 of the 38 plain recordings that have a truth file. One
/// of the others filled the card; the other got its addresses from no driver.
#[test]
fn a_run_reserves_what_the_recorded_allocator_reserved() {
    let Some(dir) = shared_dir() else { return };
    let outcomes: Vec<f64> = plain_recordings(&dir)
        .par_iter()
        .filter_map(|path| {
            let trace = trace_of(path);
            let truth = trace.recording.as_ref().and_then(|recording| recording.truth.as_ref())?;
            let recorded = truth.stats["reserved_bytes.all.peak"];
            let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
            let spec: AllocSpec = "caching".parse().expect("a name");
            let observed = run(&trace, &spec, &options, Observe::default()).expect("runs");
            let reserved = observed.result.peaks.reserved_bytes_peak;
            Some((reserved as f64 - recorded as f64).abs() / recorded as f64)
        })
        .collect();
    assert_eq!(outcomes.len(), 38);
    let exact = outcomes.iter().filter(|&&error| error == 0.0).count();
    assert!(exact >= 36, "{exact} of 38 are exact");
    assert!(outcomes.iter().all(|&error| error < 0.025), "{outcomes:?}");
}
