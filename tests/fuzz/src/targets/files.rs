//! Readers of files: other people's, and our own.

use std::cell::RefCell;
use std::fs;
use std::io::Cursor;
use std::path::Path;

use tempfile::TempDir;

use fraglab::alloc::planned::PlanFiles;
use fraglab::alloc::spec::AllocSpec;
use fraglab::engine::{
    PlanSource, StreamRule, lifetimes, minimalloc_rows, packing_from_minimalloc, plan,
    problem_from_minimalloc,
};
use fraglab::import::{
    ImportError, ReadOptions, StallocLogOptions, import_snapshot, read_input, read_kineto,
    read_minimalloc_csv, read_rmm_csv, read_stalloc_log, trace_from_minimalloc,
    write_minimalloc_csv, write_stalloc_log,
};
use fraglab::plan::check::check;
use fraglab::plan::stalloc::files::{
    IntervalFile, PlacementFile, PlanFile, RequestFile, SpareFile,
};
use fraglab::plan::{Problem, SolveOptions};
use fraglab::trace::{Input, Trace, TraceFormat, read_native, read_text, write_native, write_text};

use super::traces::{assert_said, options, replay_with, use_trace};
use super::{as_text, in_two};

/// Units of work of a planner: enough for a few rounds.
const PLAN_WORK_UNITS: u64 = 20_000;
/// Larger problems are not packed.
const PLANNED_BUFFERS_MAX: usize = 64;
/// Most devices of a snapshot that are read one by one.
const DEVICES_MAX: u32 = 4;

/// A torch snapshot: the pickle alone.
pub(super) fn snapshot(data: &[u8]) {
    // No file is beside a path that does not exist.
    let path = Path::new("no-such-folder/input.pickle");
    for gpu in std::iter::once(None).chain((0..DEVICES_MAX).map(Some)) {
        let options = ReadOptions { gpu, ..ReadOptions::default() };
        match import_snapshot(path, data, &options) {
            Ok(imported) => use_trace(&imported.trace, imported.warnings),
            Err(error) => {
                assert_said(&error);
                // Another device does not make a damaged pickle good.
                if gpu.is_none() && !error.to_string().contains("device") {
                    return;
                }
            }
        }
    }
}

/// A torch snapshot with the file of notes and statistics beside it: JSON, a byte 0, the pickle.
pub(super) fn snapshot_notes(data: &[u8]) {
    thread_local! {
        static FOLDER: RefCell<Option<TempDir>> = const { RefCell::new(None) };
    }
    let (truth, pickle) = in_two(data);
    FOLDER.with_borrow_mut(|folder| {
        let folder = folder.get_or_insert_with(|| tempfile::tempdir().expect("a folder"));
        fs::write(folder.path().join("input.truth.json"), truth).expect("writes");
        let path = folder.path().join("input.pickle");
        match import_snapshot(&path, pickle, &ReadOptions::default()) {
            Ok(imported) => use_trace(&imported.trace, imported.warnings),
            Err(error) => assert_said(&error),
        }
    });
}

/// A trace of PyTorch's profiler.
pub(super) fn kineto(data: &[u8]) {
    read(data, Some(TraceFormat::Kineto));
    if let Err(error) = read_kineto(data, Some(0)) {
        assert_said(&error);
    }
}

/// A log of RMM.
pub(super) fn rmm_csv(data: &[u8]) {
    read(data, Some(TraceFormat::RmmCsv));
    if let Err(error) = read_rmm_csv(data) {
        assert_said(&error);
    }
}

/// A log of STAlloc's recorder; behind a byte 0, a file of its planner: a plan goes into an allocator.
pub(super) fn stalloc(data: &[u8]) {
    let (log, file) = in_two(data);
    let log = match read_stalloc_log(log) {
        Ok((trace, warnings)) => {
            use_trace(&trace, warnings);
            let mut written = Vec::new();
            write_stalloc_log(&trace, StallocLogOptions::default(), &mut written)
                .expect("a valid trace can be written");
            let (again, _) = read_stalloc_log(&written[..]).expect("what was written can be read");
            assert_eq!(again.requested_bytes_peak(), trace.requested_bytes_peak());
            Some(trace)
        }
        Err(error) => {
            assert_said(&error);
            None
        }
    };
    let Some(text) = as_text(file) else { return };
    if let Ok(plan) = PlanFile::parse(text) {
        let again = PlanFile::parse(&plan.to_text()).expect("what was written can be read");
        assert_eq!(again, plan);
        if let Some(trace) = log {
            follow(&trace, plan);
        }
    }
    macro_rules! keeps {
        ($($file:ident),*) => {$(
            if let Ok(file) = $file::parse(text) {
                let again = $file::parse(&file.to_text()).expect("what was written can be read");
                assert_eq!(again, file);
            }
        )*};
    }
    keeps!(SpareFile, IntervalFile, RequestFile, PlacementFile);
}

/// Takes a trace through an allocator that follows a plan, however little it fits.
fn follow(trace: &Trace, plan: PlanFile) {
    if trace.events.len() > 400 {
        return;
    }
    let mut options = options();
    let plan = PlanFiles { source: "input".to_owned(), plan, ..PlanFiles::default() };
    options.plans.insert("input".to_owned(), plan.into());
    let spec: AllocSpec = "planned+mode=stalloc+plan=input".parse().expect("a specification");
    replay_with(trace, &spec, &options);
}

/// Buffers in MiniMalloc's CSV, as a trace and as a problem to pack.
pub(super) fn minimalloc(data: &[u8]) {
    let csv = match read_minimalloc_csv(data) {
        Ok(csv) => csv,
        Err(error) => return assert_said(&error),
    };
    let mut written = Vec::new();
    write_minimalloc_csv(&csv, None, &mut written).expect("what was read can be written");
    let again = read_minimalloc_csv(&written[..]).expect("what was written can be read");
    assert_eq!(again.rows, csv.rows);
    let (trace, warnings) = trace_from_minimalloc(&csv);
    if fraglab::trace::validate(&trace).is_ok() {
        use_trace(&trace, warnings);
        pack(&lifetimes(&trace, 512, StreamRule::Apart).problem);
    }
    let problem = problem_from_minimalloc(&csv.rows);
    pack(&problem);
    assert_eq!(minimalloc_rows(&problem).rows.len(), csv.rows.len());
    if let Some((problem, offsets)) = packing_from_minimalloc(&csv.rows)
        && let Err(broken) = check(&problem, &offsets)
    {
        assert_said(&broken);
    }
}

/// Packs a small problem; the packing is checked by code that no solver shares.
fn pack(problem: &Problem) {
    if problem.buffers.len() > PLANNED_BUFFERS_MAX {
        return;
    }
    let options =
        SolveOptions { time: None, work_units: Some(PLAN_WORK_UNITS), ..SolveOptions::default() };
    match plan(PlanSource::default(), problem, &options) {
        Ok(planned) => {
            let result = &planned.result;
            assert!(result.lower_bound_bytes <= result.height_bytes, "{result:?}");
        }
        Err(error @ fraglab::engine::PlanError::Wrong(_)) => panic!("{error}"),
        Err(error) => assert_said(&error),
    }
}

/// Our own JSON.
pub(super) fn native(data: &[u8]) {
    match read_native(data) {
        Ok(trace) => {
            if fraglab::trace::validate(&trace).is_ok() {
                let mut first = Vec::new();
                write_native(&trace, &mut first).expect("a valid trace can be written");
                let mut second = Vec::new();
                let again = read_native(&first[..]).expect("what was written can be read");
                write_native(&again, &mut second).expect("a valid trace can be written");
                assert_eq!(first, second, "written twice, it is the same");
                use_trace(&trace, Vec::new());
            }
        }
        Err(error) => assert_said(&error),
    }
}

/// The text form.
pub(super) fn text(data: &[u8]) {
    let Some(text) = as_text(data).filter(|text| !repeats_much(text)) else { return };
    match read_text(text) {
        Ok(trace) => {
            use_trace(&trace, Vec::new());
            let mut first = Vec::new();
            write_text(&trace, &mut first).expect("a valid trace can be written");
            let first = String::from_utf8(first).expect("text");
            let again = read_text(&first).expect("what was written can be read");
            assert_eq!(again.events.len(), trace.events.len(), "{first}");
            let mut second = Vec::new();
            write_text(&again, &mut second).expect("a valid trace can be written");
            assert_eq!(first.as_bytes(), second, "written twice, it is the same");
        }
        Err(error) => {
            assert_said(&error);
            error.excerpt();
        }
    }
}

/// Whether its repeats would make more events than a target has time for.
pub(super) fn repeats_much(text: &str) -> bool {
    let counts = text.split_whitespace().zip(text.split_whitespace().skip(1));
    let counts = counts.filter(|(word, _)| word.ends_with("repeat"));
    let product = counts
        .map(|(_, count)| count.replace('_', "").parse::<u64>().unwrap_or(1).max(1))
        .fold(1u64, u64::saturating_mul);
    product > 1000
}

/// A trace in Parquet.
#[cfg(feature = "analytics")]
pub(super) fn parquet(data: &[u8]) {
    use fraglab::trace::{read_parquet, write_parquet};

    match read_parquet(data) {
        Ok(trace) => {
            if fraglab::trace::validate(&trace).is_ok() {
                use_trace(&trace, Vec::new());
                let mut file = Vec::new();
                write_parquet(&trace, &mut file).expect("a valid trace can be written");
                let again = read_parquet(&file[..]).expect("what was written can be read");
                assert_eq!(again, trace, "Parquet lost something");
            }
        }
        Err(error) => assert_said(&error),
    }
}

/// A file of any kind, compressed or not, told by its content.
pub(super) fn container(data: &[u8]) {
    read(data, None);
}

/// Reads a file through the front door; only if it is taken for one of `format`.
fn read(data: &[u8], format: Option<TraceFormat>) {
    let path = Path::new("no-such-folder/input");
    let imported = Input::from_reader(path, Box::new(Cursor::new(data.to_vec())))
        .map_err(ImportError::from)
        .and_then(|input| {
            let told = input.format()?;
            if format.is_some_and(|format| format != told) {
                return Ok(None);
            }
            read_input(path, input, &ReadOptions::default()).map(Some)
        });
    match imported {
        Ok(Some(imported)) => use_trace(&imported.trace, imported.warnings),
        Ok(None) => {}
        Err(error) => assert_said(&error),
    }
}
