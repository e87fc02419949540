//! From a log to a plan: importer, profile, synthesis.

use std::collections::BTreeMap;

use fraglab::alloc::planned::synthesis::{
    Aborts, StallocPlanner, Synthesis, SynthesisError, SynthesisOptions, synthesize,
};
use fraglab::engine::first_steps;
use fraglab::import::{StallocLogOptions, read_stalloc_log, write_stalloc_log};
use fraglab::trace::{Op, Trace, step_name, validate};

use crate::common::Rng;
use crate::common::program::{Folder, assert_code, assert_one_error, fraglab, stdout};
use crate::common::stalloc_job::{Block, Dense, Log};

fn read(log: &str) -> Trace {
    let (trace, warnings) = read_stalloc_log(log.as_bytes()).expect("a log");
    assert!(warnings.is_empty(), "{warnings:?}");
    validate(&trace).expect("makes sense");
    trace
}

fn options(planner: StallocPlanner, faithful: bool) -> SynthesisOptions {
    SynthesisOptions { planner, faithful, work_units: 200_000, ..SynthesisOptions::default() }
}

fn plan_of(
    trace: &Trace,
    steps: usize,
    options: &SynthesisOptions,
) -> Result<Synthesis, SynthesisError> {
    synthesize(&first_steps(trace, steps), options)
}

/// Golden vector E: a block `c` that each iteration leaves to the next. `late`: it is freed in the
/// backward pass, which has the name of the phase that made it.
fn golden_e(iterations: usize, late: bool) -> String {
    let mut log = Log::default();
    let w = log.malloc(8192);
    let mut c: Option<Block> = None;
    for iteration in 0..iterations {
        log.line(&format!("Iteration Index : {iteration}"));
        log.line("micro-batch : F");
        log.brief(4096);
        log.brief(1024);
        let old = c.take();
        if let Some(old) = old.filter(|_| !late) {
            log.free(old);
        }
        log.line("micro-batch : B");
        if let Some(old) = old.filter(|_| late) {
            log.free(old);
        }
        c = Some(log.malloc(1024));
    }
    log.line("Iteration Index : end");
    log.free(c.expect("an iteration"));
    log.free(w);
    log.text
}

const PLAN_E: &str = include_str!("../golden/stalloc_plan_e.txt");

/// Static requests of a run that find their planned place taken, iteration by iteration: a plan
/// replayed in order of requests, the second iteration for all later ones. Runs without layers.
fn overlaps(trace: &Trace, synthesis: &Synthesis) -> Vec<u64> {
    let plan = &synthesis.plan;
    let (first, steady) = (plan.first_requests, plan.steady_requests);
    let mut places: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    let mut position = 0;
    let mut counts = vec![0];
    let mut step = None;
    for event in &trace.events {
        match event.op {
            Op::Alloc(block) => {
                let size_bytes = trace.blocks[block.index()].size_bytes;
                if size_bytes <= 512 {
                    continue;
                }
                let planned = plan.requests[position as usize];
                position += 1;
                if position == first + steady {
                    position = first;
                }
                assert_eq!(planned.size_bytes, size_bytes);
                let start = planned.offset_bytes.expect("is planned");
                let end = start + size_bytes.div_ceil(512) * 512;
                if places.values().any(|&(other, other_end)| start < other_end && other < end) {
                    *counts.last_mut().expect("not empty") += 1;
                } else {
                    places.insert(block.index(), (start, end));
                }
            }
            Op::Free(block) => {
                places.remove(&block.index());
            }
            Op::Mark(phase) => {
                let name = step_name(&trace.phases[phase.index()]);
                if name.is_some() && name != step {
                    step = name;
                    counts.push(0);
                }
            }
            _ => {}
        }
    }
    counts
}

#[test]
fn golden_vector_e_to_the_letter() {
    let trace = read(&golden_e(3, false));
    let faithful = options(StallocPlanner::SizeClasses, true);
    let synthesis = plan_of(&trace, usize::MAX, &faithful).expect("a plan");
    assert_eq!(synthesis.plan.to_text(), PLAN_E);
    assert_eq!(
        synthesis.activations.to_text(),
        "1 2 4096\n3 4 1024\n5 10 1024\n6 7 4096\n8 9 1024\n11 16 1024\n"
    );
    assert_eq!(synthesis.cross.to_text(), "0 0\n");
    assert_eq!(synthesis.intra.to_text(), "");
    let report = synthesis.report.to_text();
    let last = "max_allocated=13312, max_reserved=13312, utilization=100.00%\n";
    assert!(report.ends_with(last), "{report}");
    let files = synthesis.files(0);
    assert_eq!(files[0], ("output/plan/dev_0.txt".to_owned(), PLAN_E.to_owned()));
}

#[test]
fn golden_vector_e_collides_from_the_third_iteration_on_unless_mended() {
    let run = read(&golden_e(6, false));
    for planner in StallocPlanner::ALL {
        let synthesis = plan_of(&run, 2, &options(planner, false)).expect("a plan");
        assert_eq!(overlaps(&run, &synthesis), [0; 7], "{}", planner.name());
    }
    // From the whole run and from its first iterations.
    let three = read(&golden_e(3, false));
    let faithful = options(StallocPlanner::SizeClasses, true);
    let synthesis = plan_of(&three, usize::MAX, &faithful).expect("a plan");
    assert_eq!(overlaps(&run, &synthesis), [0, 0, 0, 2, 2, 2, 2]);
    // The plan must hold c of one iteration beside a of the next, and c beside the old c: 5120.
    let mended = options(StallocPlanner::SizeClasses, false);
    let synthesis = plan_of(&three, usize::MAX, &mended).expect("a plan");
    assert_eq!(synthesis.plan.static_reserved_bytes, 13312);
    assert_eq!(overlaps(&run, &synthesis), [0; 7]);
}

#[test]
fn a_block_freed_in_an_equally_named_phase_stops_the_tool() {
    let trace = read(&golden_e(3, true));
    let faithful = options(StallocPlanner::SizeClasses, true);
    let error = plan_of(&trace, usize::MAX, &faithful).expect_err("aborts");
    // The last c is freed after the end, so it is no temporary like those before.
    let expected = Aborts::Unsteady { iteration: 2, position: 2 };
    assert!(matches!(&error, SynthesisError::Aborts(it) if *it == expected), "{error}");
    let mended = options(StallocPlanner::SizeClasses, false);
    let synthesis = plan_of(&trace, usize::MAX, &mended).expect("a plan");
    assert_eq!(synthesis.report.warnings.len(), 1, "{:?}", synthesis.report.warnings);
    assert_eq!(overlaps(&read(&golden_e(6, true)), &synthesis), [0; 7]);
}

#[test]
fn where_the_tool_stops_and_the_mended_one_does_not() {
    let stops = |log: &str, steps: usize| {
        let trace = read(log);
        let faithful = options(StallocPlanner::SizeClasses, true);
        let mended = options(StallocPlanner::SizeClasses, false);
        let synthesis = plan_of(&trace, steps, &mended).expect("a plan");
        assert!(synthesis.plan.requests.iter().all(|it| it.size_bytes > 0));
        match plan_of(&trace, steps, &faithful).expect_err("aborts") {
            SynthesisError::Aborts(aborts) => aborts,
            other => panic!("{other}"),
        }
    };
    assert_eq!(stops(&golden_e(3, false), 1), Aborts::OneIteration);
    let one_pass = golden_e(3, false).replace("micro-batch : B\n", "");
    assert_eq!(stops(&one_pass, usize::MAX), Aborts::Passes { forward: 1, backward: 0 });
    let no_weight = golden_e(3, false).replace("8192", "512");
    assert_eq!(stops(&no_weight, usize::MAX), Aborts::NoWeight);
    let killed = {
        let log = golden_e(3, false);
        let lines: Vec<&str> = log.lines().collect();
        lines[..lines.len() - 1].join("\n")
    };
    assert_eq!(stops(&killed, usize::MAX), Aborts::NeverFreed { start: 0 });
    let mut churn = Log::default();
    for _ in 0..20 {
        churn.brief(4096);
    }
    let churn = churn.text.replace("0x7", "0x6") + &golden_e(3, false);
    let expected = Aborts::InitTooLarge { init_bytes: 20 * 4096, room_bytes: 5120 };
    assert_eq!(stops(&churn, usize::MAX), expected);
}

#[test]
fn a_beginning_that_fits_lies_over_what_comes_later() {
    let mut log = Log::default();
    log.brief(4096);
    let log = log.text.replace("0x7", "0x6") + &golden_e(3, false);
    let faithful = options(StallocPlanner::SizeClasses, true);
    let plan = plan_of(&read(&log), usize::MAX, &faithful).expect("a plan").plan;
    assert_eq!((plan.first_requests, plan.static_reserved_bytes), (5, 13312));
    assert_eq!(plan.requests[0].offset_bytes, Some(8192), "behind the weights");
}

#[test]
fn classes_by_lifetime_are_those_of_the_description() {
    let mut log = Log::default();
    let (weight, moved, small) = (log.malloc(2048), log.malloc(1024), log.malloc(512));
    log.brief(512 + 1);
    let mut workspace = None;
    let mut state = None;
    for iteration in 0..3 {
        log.line(&format!("Iteration Index : {iteration}"));
        log.line("micro-batch : F");
        if iteration == 0 {
            log.free(moved);
            workspace = Some(log.malloc(700));
        }
        let scoped = log.malloc(3000);
        log.brief(3000);
        log.line("micro-batch : B");
        log.free(scoped);
        if iteration == 0 {
            state = Some(log.malloc(4000));
        }
    }
    log.line("Iteration Index : end");
    for block in [weight, small].into_iter().chain(state) {
        log.free(block);
    }
    assert!(workspace.is_some(), "never freed");
    let faithful = options(StallocPlanner::SizeClasses, true);
    let synthesis = plan_of(&read(&log.text), usize::MAX, &faithful).expect("a plan");
    let rows: BTreeMap<&str, (u64, u64)> = synthesis
        .report
        .classes
        .iter()
        .map(|class| (class.name, (class.requests, class.peak_bytes)))
        .collect();
    assert_eq!(rows["weight & gradient"], (1, 2048));
    assert_eq!(rows["init phase"], (1, 1024));
    assert_eq!(rows["optimizer state"], (1, 4096));
    assert_eq!(rows["activation group"], (3, 3072));
    assert_eq!(rows["activation temporary"], (3, 3072));
    // The one is freed before the other is made.
    assert_eq!(rows["unreleased"], (2, 1024));
    assert_eq!(rows["var"], (1, 512));
    // Mallocs of more than 512 bytes: weight 0, moved 1, init 2, workspace 3.
    assert_eq!(synthesis.plan.unreleased, [1, 3]);
    assert_eq!(synthesis.plan.var_peak_bytes, 512);
}

#[test]
fn a_plan_does_not_depend_on_pointers() {
    let log = Dense { layers: 2, micro_batches: 3, iterations: 3 }.log();
    let moved = log.replace("0x7", "0x5");
    let faithful = options(StallocPlanner::SizeClasses, true);
    let plan = |log: &str| plan_of(&read(log), usize::MAX, &faithful).expect("a plan");
    assert_eq!(plan(&log), plan(&moved));
}

#[test]
fn every_planner_gives_a_plan_that_runs_on_a_dense_stage() {
    let run = read(&Dense { layers: 2, micro_batches: 3, iterations: 6 }.log());
    for planner in StallocPlanner::ALL {
        for (faithful, steps) in [(true, usize::MAX), (false, 2), (false, 1), (true, 2)] {
            let synthesis = plan_of(&run, steps, &options(planner, faithful));
            let synthesis = synthesis.unwrap_or_else(|error| panic!("{}: {error}", planner.name()));
            let plan = &synthesis.plan;
            let why = format!("{} faithful={faithful} steps={steps}", planner.name());
            let offsets = plan.requests.iter().filter_map(|it| it.offset_bytes);
            assert!(offsets.clone().all(|offset| offset % 512 == 0), "{why}");
            assert!(plan.static_reserved_bytes >= plan.static_max_allocated_bytes, "{why}");
            // A profile of one step cannot tell that optimizer states come only once.
            if steps != 1 {
                assert_eq!(overlaps(&run, &synthesis), [0; 7], "{why}");
            }
        }
    }
}

fn rewritten(trace: &Trace, finish: bool) -> String {
    let mut bytes = Vec::new();
    write_stalloc_log(trace, StallocLogOptions { finish }, &mut bytes).expect("writes");
    String::from_utf8(bytes).expect("text")
}

#[test]
fn a_log_is_read_as_it_was_written() {
    for log in [
        Dense { layers: 1, micro_batches: 2, iterations: 3 }.log(),
        golden_e(3, false),
        mixture_log(),
    ] {
        let trace = read(&log);
        let again = rewritten(&trace, true);
        assert_eq!(read(&again), trace);
        let lines = |log: &str| -> Vec<String> {
            let without_pointer = |line: &str| {
                let fields: Vec<&str> = line.split(' ').collect();
                match fields[..] {
                    [kind @ ("0" | "1"), _, size, stream] => format!("{kind} {size} {stream}"),
                    _ => line.to_owned(),
                }
            };
            log.lines().map(without_pointer).collect()
        };
        assert_eq!(lines(&again), lines(&log));
    }
}

#[test]
fn a_run_without_an_end_gets_one_for_the_tool() {
    let log = golden_e(3, false);
    let cut = log.split("Iteration Index : end").next().expect("text");
    let trace = read(cut);
    assert_eq!(read(&rewritten(&trace, false)), trace);
    let finished = rewritten(&trace, true);
    let faithful = options(StallocPlanner::SizeClasses, true);
    let plan = plan_of(&read(&finished), usize::MAX, &faithful).expect("a plan").plan;
    assert_eq!(plan.to_text(), PLAN_E);
}

/// One mixture with experts, forward and backward, in each of three iterations.
fn mixture_log() -> String {
    let mut log = Log::default();
    let w = log.malloc(8192);
    for iteration in 0..3 {
        log.line(&format!("Iteration Index : {iteration}"));
        let mut saved = None;
        for pass in ['F', 'B'] {
            log.line(&format!("micro-batch : {pass}"));
            log.line(&format!("layers.0.mlp->MoELayer Layer : {pass}-start"));
            let routed = log.malloc(4096);
            log.line(&format!("layers.0.mlp.experts->SequentialMLP Layer : {pass}-start"));
            log.brief(2048 + 512 * iteration);
            log.line(&format!("layers.0.mlp.experts->SequentialMLP Layer : {pass}-end"));
            log.free(routed);
            log.line(&format!("layers.0.mlp->MoELayer Layer : {pass}-end"));
            match saved.take() {
                None => saved = Some(log.malloc(1024)),
                Some(block) => log.free(block),
            }
        }
    }
    log.line("Iteration Index : end");
    log.free(w);
    log.text
}

/// Times: w 0; iteration 0: routed 1, expert 2-3, routed freed 4, saved 5, routed 6, expert 7-8,
/// routed freed 9, saved freed 10; iteration 1 the same ten later.
#[test]
fn windows_of_a_mixture() {
    let trace = read(&mixture_log());
    let faithful = options(StallocPlanner::SizeClasses, true);
    let synthesis = plan_of(&trace, usize::MAX, &faithful).expect("a plan");
    assert_eq!(
        synthesis.cross_intervals.to_text(),
        "2 2\nmlp-F-0 mlp-B-1 2 8\nmlp-F-2 mlp-B-3 12 18\n"
    );
    // The saved block fills the planned space in both windows.
    assert_eq!(synthesis.cross.to_text(), "2 2\nmlp-F-0\nmlp-F-2\n");
    // One request in each layer: the window ends at 0, and all is said to be free.
    assert_eq!(
        synthesis.intra_intervals.to_text(),
        "moe-F-0 1 0\nmoe-B-1 6 0\nmoe-F-2 11 0\nmoe-B-3 16 0\n"
    );
    assert_eq!(
        synthesis.intra.to_text(),
        "moe-F-0 (8192,9216)\nmoe-B-1 (8192,9216)\nmoe-F-2 (8192,9216)\nmoe-B-3 (8192,9216)\n"
    );
    let rows = &synthesis.report.classes;
    let dynamic = |name: &str| rows.iter().find(|class| class.name == name).expect("a class");
    assert_eq!(dynamic("dynamic moe").requests, 6);
    assert_eq!(dynamic("dynamic mlp").peak_bytes, 2048 + 1024);

    let mended = options(StallocPlanner::SizeClasses, false);
    let synthesis = plan_of(&trace, usize::MAX, &mended).expect("a plan");
    assert_eq!(
        synthesis.intra_intervals.to_text(),
        "moe-F-0 1 4\nmoe-B-1 6 9\nmoe-F-2 11 14\nmoe-B-3 16 19\n"
    );
    assert_eq!(
        synthesis.intra.to_text(),
        "moe-F-0 (8192,9216)\nmoe-B-1\nmoe-F-2 (8192,9216)\nmoe-B-3\n"
    );
    assert_eq!(synthesis.cross_intervals.intervals.len(), 2);
}

/// Two layers of which the first is recomputed. Ids in the forward pass 0, 1; in the backward pass
/// the second layer's backward 2, the first's forward again 3, its backward 4.
#[test]
fn recomputed_layers_have_windows_within_the_backward_pass() {
    let mut log = Log::default();
    let w = log.malloc(8192);
    let layer = |log: &mut Log, layer: usize, pass: char| {
        log.line(&format!("l.{layer}.mlp->MoELayer Layer : {pass}-start"));
        log.line(&format!("l.{layer}.mlp.experts->SequentialMLP Layer : {pass}-start"));
        log.brief(2048);
        log.line(&format!("l.{layer}.mlp.experts->SequentialMLP Layer : {pass}-end"));
        log.line(&format!("l.{layer}.mlp->MoELayer Layer : {pass}-end"));
    };
    for iteration in 0..3 {
        log.line(&format!("Iteration Index : {iteration}"));
        log.line("micro-batch : F");
        layer(&mut log, 0, 'F');
        layer(&mut log, 1, 'F');
        let kept = log.malloc(1024);
        log.line("micro-batch : B");
        layer(&mut log, 1, 'B');
        layer(&mut log, 0, 'F');
        layer(&mut log, 0, 'B');
        log.free(kept);
    }
    log.line("Iteration Index : end");
    log.free(w);
    let trace = read(&log.text);
    for faithful in [true, false] {
        let options = options(StallocPlanner::SizeClasses, faithful);
        let synthesis = plan_of(&trace, usize::MAX, &options).expect("a plan");
        let mut pairs: Vec<(String, String)> = synthesis
            .cross_intervals
            .intervals
            .iter()
            .map(|it| (it.label.clone(), it.backward_label.clone().expect("a pair")))
            .collect();
        pairs.sort();
        let pair = |one: &str, other: &str| (one.to_owned(), other.to_owned());
        assert_eq!(
            pairs,
            [
                pair("mlp-F-1", "mlp-B-2"),
                pair("mlp-F-3", "mlp-B-4"),
                pair("mlp-F-6", "mlp-B-7"),
                pair("mlp-F-8", "mlp-B-9"),
            ],
            "faithful={faithful}"
        );
        assert_eq!(synthesis.cross.layers, Some((5, 5)));
    }
}

#[test]
fn the_program_writes_and_reads_logs() {
    let folder = Folder::new();
    let log = folder.file("mem_log_dev0.txt", &golden_e(3, false));
    let again = folder.path("again.txt");
    let native = folder.path("job.json");
    assert_code(&fraglab(&["convert", &log, &native]), 0);
    assert_code(&fraglab(&["convert", &native, &again, "--to", "stalloc"]), 0);
    let trace = read(&std::fs::read_to_string(&again).expect("was written"));
    assert_eq!(trace, read(&golden_e(3, false)));
    let out = fraglab(&["convert", &native, "-", "--to", "stalloc"]);
    assert_eq!(stdout(&out), std::fs::read_to_string(&again).expect("was written"));
    let broken = folder.file("broken.txt", "1 0x10 512 0\n1 0x10\n");
    assert!(assert_one_error(&fraglab(&["info", &broken])).contains("line 2: "));
}

/// Lines of every kind in any order, and cut in the middle: a trace or an error, never a panic.
#[test]
fn any_log_is_a_trace_or_an_error() {
    let lines = [
        "1 0x200 4096 0",
        "1 0x400 100 0x7",
        "0 0x200 4096 0",
        "0 0x400 100 0",
        "1 0 8 0",
        "Iteration Index : 0",
        "Iteration Index : 1",
        "Iteration Index : end",
        "micro-batch : F",
        "micro-batch : B",
        "a.mlp->MoELayer Layer : F-start",
        "a.mlp->MoELayer Layer : B-end",
        "a.mlp.experts->SequentialMLP Layer : F-start",
        "a.router->TopKRouter Layer : F-end",
        "x : F-start",
        "\u{fffd} Layer :",
        "9 9 9",
    ];
    for seed in 0..3000 {
        let mut rng = Rng(seed);
        let known = if seed % 2 == 0 { lines.len() - 2 } else { lines.len() };
        let text: Vec<&str> = (0..rng.below(40)).map(|_| lines[rng.below(known)]).collect();
        let text = text.join("\n");
        let cut = if seed % 3 == 0 { rng.below(text.len() + 1) } else { text.len() };
        let Ok((trace, _)) = read_stalloc_log(&text.as_bytes()[..cut]) else { continue };
        validate(&trace).expect("makes sense");
        for planner in StallocPlanner::ALL {
            for faithful in [true, false] {
                // Whatever it is, it ends.
                let _ = plan_of(&trace, usize::MAX, &options(planner, faithful));
            }
        }
        rewritten(&trace, seed % 5 == 0);
    }
}
