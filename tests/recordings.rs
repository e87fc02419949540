//! The recordings of real jobs: `caching` must do exactly what the recorded allocator did.

use std::fs::File;
use std::path::{Path, PathBuf};

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run, verify};
use fraglab::import::{ReadOptions, import_snapshot, read_trace};
use fraglab::trace::{RecordedKind, Trace};
use rayon::prelude::*;

use crate::common::shared_dir;

fn all_recordings(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("the folder can be read");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut recordings: Vec<PathBuf> =
        paths.filter(|path| path.to_string_lossy().ends_with(".pickle.gz")).collect();
    recordings.sort();
    recordings
}

fn trace_of(path: &Path) -> Trace {
    let imported = read_trace(path, &ReadOptions::default());
    imported.unwrap_or_else(|error| panic!("{error}")).trace
}

#[test]
fn every_recording_is_reproduced_exactly() {
    let Some(dir) = shared_dir() else { return };
    let paths = all_recordings(&dir);
    assert_eq!(paths.len(), 60);
    paths.par_iter().for_each(|path| {
        let trace = trace_of(path);
        let result = verify(&trace).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(result.exact, "{}: {:?}", result.file, result.first_difference);
        let truth = trace.recording.as_ref().and_then(|recording| recording.truth.as_ref());
        let left_out = truth.map_or(0, |truth| {
            // A history that begins late has not seen what counts from the beginning.
            let late = trace.start.is_some();
            let unseen = truth.stats.keys().filter(|name| late && !name.ends_with(".current"));
            let peaks = truth.stats.keys().filter(|name| name.ends_with(".peak"));
            let reset = if truth.peak_stats_reset { peaks.count() } else { 0 };
            // An empty_cache that releases nothing leaves no entry, and one before a malloc looks
            // like a flush: two counts may differ.
            unseen.count() + reset + 2
        });
        let expected = truth.map_or(0, |truth| truth.stats.len());
        let compared = result.statistics as usize;
        assert!(compared + left_out >= expected, "{}: {result:?}", result.file);
        assert!(expected == 0 || compared >= 29, "{}: {compared} statistics", result.file);
    });
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

fn reserved_peak(trace: &Trace, settings: Option<&str>) -> u64 {
    let options = RunOptions {
        settings: settings.map(str::to_owned),
        ..RunOptions::new(CostProfile::shipped("h200").expect("ships"))
    };
    let spec: AllocSpec = "caching".parse().expect("a name");
    let observed = run(trace, &spec, &options, Observe::default()).expect("runs");
    observed.result.peaks.reserved_bytes_peak
}

fn recorded_reserved_peak(trace: &Trace) -> Option<u64> {
    let truth = trace.recording.as_ref().and_then(|recording| recording.truth.as_ref())?;
    Some(truth.stats["reserved_bytes.all.peak"] as u64)
}

fn error_of(found: u64, expected: u64) -> f64 {
    found.abs_diff(expected) as f64 / expected as f64
}

/// The claim of README.md: without any address from the recording a run reserves what the real
/// allocator reported, to the byte, on all complete H200 recordings but one, which filled the card.
/// Of the random programs, whose addresses no driver gave, one hangs on them.
#[test]
fn a_run_reserves_what_the_recorded_allocator_reserved() {
    let Some(dir) = shared_dir() else { return };
    let errors: Vec<(f64, PathBuf)> = all_recordings(&dir)
        .into_par_iter()
        .filter_map(|path| {
            let trace = trace_of(&path);
            let recorded = recorded_reserved_peak(&trace).filter(|_| trace.start.is_none())?;
            Some((error_of(reserved_peak(&trace, None), recorded), path))
        })
        .collect();
    assert_eq!(errors.len(), 54);
    let (random, jobs): (Vec<_>, Vec<_>) =
        errors.iter().partition(|(_, path)| path.to_string_lossy().contains("/random."));
    for (group, bound) in [(jobs, 0.0065), (random, 0.025)] {
        let inexact: Vec<_> = group.iter().filter(|(error, _)| *error > 0.0).collect();
        assert!(inexact.len() <= 1, "{inexact:?}");
        assert!(inexact.iter().all(|(error, _)| *error < bound), "{inexact:?}");
    }
}

/// Jobs that were recorded with and without expandable segments: each recording, replayed with the
/// other's settings, reserves what the other run reserved.
///
/// The DeepSpeed pair is the exception: in steps 2 and 3 deferred frees ended at other times on the
/// GPU, whatever the allocator, and no trace tells when those of another run end
/// (`reports/expandable.md`).
#[test]
fn expandable_segments_are_predicted_from_runs_without_them_and_back() {
    let Some(dir) = shared_dir() else { return };
    let recordings = all_recordings(&dir);
    let pairs: Vec<(PathBuf, PathBuf)> = recordings
        .iter()
        .filter_map(|with| {
            let without = with.to_string_lossy().replace(".expandable", "");
            let without = recordings.iter().find(|path| path.to_string_lossy() == without)?;
            (without != with).then(|| (without.clone(), with.clone()))
        })
        .collect();
    assert_eq!(pairs.len(), 11);
    pairs.par_iter().for_each(|(without, with)| {
        let (ordinary, expandable) = (trace_of(without), trace_of(with));
        let cases = [
            (&ordinary, "expandable_segments:True", &expandable),
            (&expandable, "expandable_segments:False", &ordinary),
        ];
        for (trace, settings, other) in cases {
            let recorded = recorded_reserved_peak(other).expect("has a truth file");
            let foretold = reserved_peak(trace, Some(settings));
            let error = error_of(foretold, recorded);
            let name = &trace.header.name;
            println!("{name} with {settings}: {recorded} bytes measured, {foretold} foretold");
            let bound = if name.starts_with("deepspeed") { 0.0103 } else { 0.001 };
            assert!(error < bound, "{name} with {settings}: {error} off");
        }
    });
}

/// Without truth files, as most people's snapshots are: the device's total shows in the distance of
/// reservations, and only garbage collection needs a limit that nothing shows.
#[test]
fn recordings_without_truth_files_are_reproduced_too() {
    let Some(dir) = shared_dir() else { return };
    let collects = |path: &PathBuf| {
        ["gc80", "gc40", "gc30"].iter().any(|gc| path.to_string_lossy().contains(gc))
    };
    let mut paths = all_recordings(&dir);
    paths.retain(|path| !collects(path));
    assert_eq!(paths.len(), 57);
    paths.par_iter().for_each(|path| {
        let pickle = flate2::read::GzDecoder::new(File::open(path).expect("opens"));
        let alone = Path::new("no-truth-file-here.pickle");
        let imported = import_snapshot(alone, pickle, &ReadOptions::default());
        let trace = imported.unwrap_or_else(|error| panic!("{error}")).trace;
        assert_eq!(trace.header.device.total_bytes, None);
        let result = verify(&trace).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(result.exact, "{}: {:?}", path.display(), result.first_difference);
    });
}

/// Without a truth file, what was refused shows the limit: in a run the same request fails.
#[test]
fn refusals_show_the_limit_of_a_recording_without_a_truth_file() {
    let Some(dir) = shared_dir() else { return };
    let trace = trace_of(&dir.join("llama-1b-plain.oom40.stacks.pickle.gz"));
    let limit_bytes = trace.header.limit_bytes.expect("is found");
    // The job ran under 40 GiB; its peak and the refused segment leave less than 2 GiB of doubt.
    assert!((40 << 30..41 << 30).contains(&limit_bytes), "{limit_bytes}");
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec: AllocSpec = "caching".parse().expect("a name");
    let outcome = run(&trace, &spec, &options, Observe::default()).expect("runs").result.outcome;
    assert_eq!(outcome.event_index, trace.first_attempt().map(|(event, _)| event));
}
