//! STAlloc's run time, `planned+mode=stalloc` (specs/stalloc.md 3 and 4.2), on programs and plans
//! that are written by hand: what goes where follows from the rules, not from a run.

use std::fmt::Write;
use std::sync::Arc;

use fraglab::alloc::planned::{PlanFiles, StepSummary};
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, RunResult, Status, run};
use fraglab::import::read_stalloc_log;
use fraglab::plan::stalloc::files::{PlanFile, SpareFile};
use fraglab::trace::{Block, Event, Op, Trace, read_text};
use fraglab::units::{BlockId, MIB};

use crate::common::Rng;
use crate::common::program::{Folder, assert_code, assert_one_error, fraglab, json, stdout};
use crate::common::stalloc_job::{Block as LogBlock, Dense, Log};

fn options() -> RunOptions {
    let mut options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    options.paranoid = true;
    options
}

fn files(plan: &str, cross: &str, intra: &str) -> PlanFiles {
    PlanFiles {
        source: "by hand".to_owned(),
        plan: PlanFile::parse(plan).expect("a plan"),
        cross: SpareFile::parse(cross).expect("spare addresses"),
        intra: SpareFile::parse(intra).expect("spare addresses"),
    }
}

/// A replay with a plan, under parameters that follow `planned+mode=stalloc+plan=p`.
fn replay_with(program: &str, files: &PlanFiles, params: &str, options: RunOptions) -> RunResult {
    let trace = read_text(program).unwrap_or_else(|error| panic!("{error}\n{program}"));
    let spec = format!("planned+mode=stalloc+plan=p{params}").parse().expect("a specification");
    let mut options = options;
    options.plans.insert("p".to_owned(), Arc::new(files.clone()));
    let observed = run(&trace, &spec, &options, Observe::default());
    observed.unwrap_or_else(|error| panic!("{params}: {error}")).result
}

fn replay(program: &str, files: &PlanFiles, params: &str) -> RunResult {
    replay_with(program, files, params, options())
}

/// Requests of every step: planned, mismatched, overlapping, online.
fn steps(result: &RunResult) -> Vec<(&str, [u64; 4])> {
    let plan = result.plan.as_ref().expect("it plans");
    let counts = |row: &StepSummary| [row.planned, row.mismatched, row.overlapping, row.online];
    plan.steps.iter().map(|row| (row.name.as_str(), counts(row))).collect()
}

/// Golden vector E of the specification, this many iterations.
fn vector_e(iterations: usize) -> String {
    let mut text = "mark head\nalloc w 8192\n".to_owned();
    for iteration in 0..iterations {
        let _ = write!(
            text,
            "mark step{iteration}.forward\nalloc a 4096\nfree a\nalloc b 1024\nfree b\n"
        );
        if iteration > 0 {
            let _ = writeln!(text, "free c");
        }
        let _ = write!(text, "mark step{iteration}.backward\nalloc c 1024\n");
    }
    text + "mark end\nfree c\nfree w\nempty_cache\n"
}

/// Its plan, as the specification prints it.
const PLAN_E: &str = include_str!("golden/stalloc_plan_e.txt");

#[test]
fn vector_e_overlaps_in_steady_state() {
    let result = replay(&vector_e(6), &files(PLAN_E, "0 0\n", ""), "");
    let late = [1, 0, 2, 2];
    let expected = [
        ("before", [1, 0, 0, 0]),
        ("step0", [3, 0, 0, 0]),
        ("step1", [3, 0, 0, 0]),
        ("step2", late),
        ("step3", late),
        ("step4", late),
        ("step5", late),
    ];
    assert_eq!(steps(&result)[..7], expected);
    // The pool in one call, then one small segment of the caching allocator.
    assert_eq!(result.calls.malloc, 2);
    assert_eq!(result.peaks.reserved_bytes_peak, 13_312 + 2 * MIB);
    let plan = result.plan.as_ref().expect("it plans");
    assert_eq!((plan.planned_bytes, plan.lower_bound_bytes), (13_312, 13_312));
    let fallback = |name: &str| {
        let row = plan.steps.iter().find(|row| row.name == name).expect("a step");
        (row.fallback_bytes_peak, row.fallback_reserved_bytes_peak, row.live_bytes_peak)
    };
    assert_eq!(fallback("step1"), (0, 0, 8192 + 4096 + 1024));
    assert_eq!(fallback("step2"), (4096, 2 * MIB, 8192 + 4096 + 1024));
    assert_eq!((result.counters["mismatches"], result.counters["overlaps"]), (0, 8));
    assert_eq!(result.final_levels.levels.reserved_bytes, 0);
}

/// The same as STAlloc's recorder logs it, and a plan made of that.
#[test]
fn vector_e_from_its_log() {
    let mut log = Log::default();
    let w = log.malloc(8192);
    let mut c = None;
    for iteration in 0..3 {
        log.line(&format!("Iteration Index : {iteration}"));
        log.line("micro-batch : F");
        log.brief(4096);
        log.brief(1024);
        if let Some(c) = c {
            log.free(c);
        }
        log.line("micro-batch : B");
        c = Some(log.malloc(1024));
    }
    log.line("Iteration Index : end");
    log.free(c.expect("three iterations"));
    log.free(w);
    let (profile, _) = read_stalloc_log(log.text.as_bytes()).expect("a log");
    let replay = |params: &str| {
        let mut options = options();
        options.profiles.insert("log".to_owned(), Arc::new(profile.clone()));
        let trace = read_text(&vector_e(6)).expect("a trace");
        let spec = format!("planned+mode=stalloc+trace=log{params}").parse().expect("a spec");
        run(&trace, &spec, &options, Observe::default()).expect("runs").result
    };
    let by_hand = self::replay(&vector_e(6), &files(PLAN_E, "0 0\n", ""), "");
    let faithful = replay("");
    assert_eq!(steps(&faithful), steps(&by_hand));
    assert_eq!(faithful.peaks, by_hand.peaks);
    // Surprise 4: a plan that thinks of the next iteration has a place for everyone.
    for planner in ["stalloc-size", "stalloc-group", "greedy-by-size", "best"] {
        let mended = replay(&format!("+faithful=false+planner={planner}"));
        assert_eq!((mended.counters["overlaps"], mended.counters["mismatches"]), (0, 0));
        assert_eq!(mended.calls.malloc, 1, "{planner}: the pool and nothing else");
    }
}

/// Figures of specs 9.4, for a job of the same shapes: its sizes are not those of the original, so
/// the trends are what can be compared.
#[test]
fn a_dense_job_is_served_from_two_device_mallocs() {
    let job = Dense { layers: 4, micro_batches: 4, iterations: 6 };
    let (trace, _) = read_stalloc_log(job.log().as_bytes()).expect("a log");
    let run_with = |trace: &Trace, params: &str| {
        let spec = format!("planned+mode=stalloc{params}").parse().expect("a specification");
        run(trace, &spec, &options(), Observe::default()).expect("runs").result
    };
    for params in ["", "+static_fallback=1", "+faithful=false"] {
        let result = run_with(&trace, params);
        assert_eq!(result.calls.malloc, 2, "{params}: the two pools");
        let counters = &result.counters;
        assert_eq!((counters["mismatches"], counters["overlaps"], counters["online"]), (0, 0, 0));
        assert!(result.efficiency > 0.95, "{params}: {}", result.efficiency);
    }
    let clean = run_with(&trace, "");
    // One request more in iteration 2, as the original experiment had it.
    let at = trace.events.iter().position(|event| match event.op {
        Op::Mark(phase) => trace.phases[phase.index()].starts_with("step2"),
        _ => false,
    });
    let mut more = trace.clone();
    let block = BlockId(more.blocks.len() as u32);
    more.blocks.push(Block { size_bytes: 12_345_678, ..more.blocks[0] });
    let at = at.expect("a third iteration") + 1;
    let event = more.events[at];
    let extra = [Op::Alloc(block), Op::Free(block)].map(|op| Event { op, ..event });
    more.events.splice(at..at, extra);
    let shifted = run_with(&more, "");
    let per_step = steps(&clean)[3].1[0];
    assert!(shifted.counters["mismatches"] > 2 * per_step, "four steps, most of their requests");
    assert!(shifted.calls.malloc > 20, "{}", shifted.calls.malloc);
    let (more_bytes, clean_bytes) =
        (shifted.peaks.reserved_bytes_peak, clean.peaks.reserved_bytes_peak);
    assert!(more_bytes as f64 > 1.2 * clean_bytes as f64, "{more_bytes} after {clean_bytes}");
    let realigned = run_with(&more, "+realign=iteration");
    let late = &steps(&realigned)[4..7];
    assert!(late.iter().all(|(_, counts)| counts[1] == 0), "{late:?}");
}

/// Three requests a step that leave nothing behind, and a weight.
fn regular(steps: usize, extra_in: Option<usize>) -> String {
    let mut text = "alloc w 8192\n".to_owned();
    for step in 0..steps {
        let _ = writeln!(text, "mark step{step}.forward");
        if extra_in == Some(step) {
            let _ = write!(text, "alloc x 12345678\nfree x\n");
        }
        let _ = write!(text, "alloc a 4096\nalloc b 1024\nmark step{step}.backward\nfree a\n");
        let _ = write!(text, "alloc c 2048\nfree c\nfree b\n");
    }
    text + "mark end\nfree w\nempty_cache\n"
}

const PLAN_REGULAR: &str = "
13312 13312 4 3 0
0 8192
8192 4096
12288 1024
8192 2048
8192 4096
12288 1024
8192 2048
";

#[test]
fn the_second_iteration_is_replayed_for_all_later_ones() {
    let result = replay(&regular(9, None), &files(PLAN_REGULAR, "0 0\n", ""), "");
    for (name, counts) in &steps(&result)[1..10] {
        assert_eq!(counts, &[3, 0, 0, 0], "{name}");
    }
    assert_eq!(result.calls.malloc, 1, "the pool and nothing else");
    assert_eq!(result.efficiency, 1.0);
}

/// Surprise 1: one request more shifts the sequence, and nothing finds it again.
#[test]
fn an_extra_request_mismatches_for_ever_unless_steps_realign() {
    let files = files(PLAN_REGULAR, "0 0\n", "");
    let program = regular(6, Some(2));
    let result = replay(&program, &files, "");
    let counts = steps(&result);
    assert_eq!(counts[2].1, [3, 0, 0, 0], "before it");
    assert_eq!(counts[3].1, [0, 4, 0, 4], "x, a, b and c meet a, b, c and a");
    for (name, counts) in &counts[4..7] {
        assert_eq!(counts, &[0, 3, 0, 3], "{name}: three sizes that differ, shifted by one");
    }
    let result = replay(&program, &files, "+realign=iteration");
    let counts = steps(&result);
    assert_eq!(counts[3].1, [0, 4, 0, 4]);
    for (name, counts) in &counts[4..7] {
        assert_eq!(counts, &[3, 0, 0, 0], "{name}");
    }
}

/// Steps with a static request between layers of experts; in `busy` an expert's block is still
/// there when the static request comes.
fn experts(steps: usize, busy: usize) -> String {
    let mlp = "layers.0.mlp.experts->SequentialMLP : F";
    let moe = "layers.0.mlp->MoELayer : F";
    let mut text = "alloc w 8192\n".to_owned();
    for step in 0..steps {
        let _ = write!(
            text,
            "mark step{step}.forward\nenter \"{moe}\"\nenter \"{mlp}\"\nalloc e 3000\n"
        );
        let _ = write!(text, "leave \"{mlp}\"\nleave \"{moe}\"\n");
        if step == busy {
            let _ = write!(text, "alloc a 4096\nfree e\nfree a\n");
        } else {
            let _ = write!(text, "free e\nalloc a 4096\nfree a\n");
        }
    }
    text + "mark end\nfree w\nempty_cache\n"
}

/// Surprise 2: a planned block that was refused its place by an expert's block stays registered.
#[test]
fn a_leaked_place_is_blocked_for_ever() {
    let plan = "\n12288 12288 2 1 0\n0 8192\n8192 4096\n8192 4096\n";
    let files = files(plan, "1 1\nmlp-F-0 (8192,12288)\nmlp-F-1 (8192,12288)\n", "");
    let overlapping = |params: &str| {
        let params = format!("+reuse_static=1+expert_per_gpu=4{params}");
        let result = replay(&experts(5, 1), &files, &params);
        assert_eq!(result.counters["dynamic_reused"], 5, "{params}: every expert's block");
        let counts = steps(&result);
        counts[1..6].iter().map(|(_, counts)| counts[2]).collect::<Vec<u64>>()
    };
    assert_eq!(overlapping(""), [0, 1, 0, 0, 0], "only while it is there");
    assert_eq!(overlapping("+static_fallback=1"), [0, 1, 1, 1, 1]);
    assert_eq!(overlapping("+static_fallback=1+leak=false"), [0, 1, 0, 0, 0]);
}

/// Surprise 3: without EXPERT_PER_GPU no expert reuses anything, and with it the first expert of
/// every later layer does not.
#[test]
fn experts_reuse_as_their_count_allows() {
    let row = "layers.0.mlp.local_experts.0.fc2->RowParallelLinear : F";
    let (moe, mlp) = ("layers.0.mlp->MoELayer : F", "layers.0.mlp.experts->SequentialMLP : F");
    let mut text = "alloc w 8192\nmark step0.forward\nalloc a 40960\nfree a\n".to_owned();
    for _ in 0..3 {
        let _ = write!(text, "enter \"{moe}\"\nalloc m 600\nenter \"{mlp}\"\n");
        for _ in 0..2 {
            let _ = write!(
                text,
                "alloc e 3000\nenter \"{row}\"\nalloc r 2000\nleave \"{row}\"\nfree e r\n"
            );
        }
        let _ = write!(text, "leave \"{mlp}\"\nleave \"{moe}\"\nfree m\n");
    }
    let text = text + "mark end\nfree w\nempty_cache\n";
    let files = files("\n49152 49152 2 0 0\n0 8192\n8192 40960\n", "3 0\n", "");
    let reused = |params: &str| {
        let result = replay(&text, &files, params);
        assert_eq!(result.outcome.status, Status::Ok, "{params}");
        let counters = &result.counters;
        assert_eq!(counters["dynamic_reused"] + counters["dynamic_fallbacks"], 15, "{params}");
        counters["dynamic_reused"]
    };
    assert_eq!(reused(""), 0);
    assert_eq!(reused("+reuse_static=1"), 0, "EXPERT_PER_GPU is not set");
    // Two blocks an expert; of three layers with two experts each, two experts go without.
    assert_eq!(reused("+reuse_static=1+expert_per_gpu=2"), 2 * (6 - 2));
    assert_eq!(reused("+reuse_static=1+expert_per_gpu=2+expert_counter=layer"), 12);
    assert_eq!(reused("+reuse_static=1+expert_per_gpu=all"), 12);
    // m is a mixture's own; its label is in no window.
    let mended = replay(&text, &files, "+faithful=false");
    assert_eq!(mended.counters["dynamic_reused"], 12);
}

/// A backward mixture looks into the intra file, and a missing line ends the process.
#[test]
fn a_backward_mixture_needs_its_line() {
    let moe = "layers.0.mlp->MoELayer : B";
    let text = format!(
        "alloc w 8192\nmark step0.forward\nalloc a 4096\nfree a\nenter \"{moe}\"\nalloc m 4000\n\
         leave \"{moe}\"\nfree m\nmark end\nfree w\nempty_cache\n"
    );
    let plan = "\n12288 12288 2 0 0\n0 8192\n8192 4096\n";
    let listed = files(plan, "1 0\n", "moe-B-0 (8192,12288)\n");
    let result = replay(&text, &listed, "+reuse_static=1");
    assert_eq!(result.counters["dynamic_reused"], 1);
    let unlisted = files(plan, "1 0\n", "");
    let result = replay(&text, &unlisted, "+reuse_static=1");
    assert_eq!(result.outcome.status, Status::Failed);
    assert!(result.outcome.message.expect("told").contains("intra file"));
    let result = replay(&text, &unlisted, "+faithful=false");
    assert_eq!(result.outcome.status, Status::Ok, "mended it only falls back");
    assert_eq!(replay(&text, &unlisted, "").counters["dynamic_fallbacks"], 1, "without reuse");
}

#[test]
fn small_requests_get_slots_of_512_bytes() {
    // Four at once, for which the plan has two slots: the pool begins with four, then doubles.
    let mut text = "alloc s0 1\nalloc s1 512\nalloc s2 3\nalloc s3 4\n".to_owned();
    let plan = files("\n0 0 0 0 1024\n", "0 0\n", "");
    let result = replay(&format!("{text}free s0 s1 s2 s3\nempty_cache\n"), &plan, "");
    assert_eq!((result.calls.malloc, result.peaks.reserved_bytes_peak), (1, 2048));
    assert_eq!(result.peaks.allocated_bytes_peak, 4 * 512, "a slot each");
    text += "alloc s4 5\nfree s0 s1 s2 s3 s4\nempty_cache\n";
    let result = replay(&text, &plan, "");
    assert_eq!((result.calls.malloc, result.peaks.reserved_bytes_peak), (2, 4096));
    assert_eq!(result.counters["online"], 0);
    assert_eq!(replay("alloc b 513\nfree b\n", &plan, "").counters["mismatches"], 1);
}

/// A request of the list of unreleased ones goes to the caching allocator and uses up no place.
#[test]
fn unreleased_requests_are_counted_from_0_without_the_small_ones() {
    let plan = files("1\n8704 8704 2 0 512\n0 8192\n8192 512\n", "0 0\n", "");
    let text = "alloc s 100\nalloc w 8192\nalloc u 700\nfree s u\nfree w\nempty_cache\n";
    let result = replay(text, &plan, "");
    assert_eq!(result.counters["unreleased"], 1);
    assert_eq!((result.counters["planned"], result.counters["mismatches"]), (2, 0));
}

/// During evaluation every request takes the best fit in the pool.
#[test]
fn evaluation_takes_any_free_space() {
    let text = regular(2, None).replace(
        "mark end\n",
        "mark eval\nalloc v 5000\nalloc x 600\nfree v x\nmark step2.forward\nalloc a 4096\n\
         free a\nmark end\n",
    );
    let result = replay(&text, &files(PLAN_REGULAR, "0 0\n", ""), "");
    // 5120 bytes are free above the weight; the second request finds nothing left.
    assert_eq!(result.counters["evaluation"], 2);
    assert_eq!(result.peaks.reserved_bytes_peak, 13_312 + 2 * MIB);
    assert_eq!(result.counters["mismatches"], 0, "and the sequence stands still meanwhile");
}

/// Surprise 7: memory that stream 1 freed goes to stream 2 at once, unless streams are kept.
#[test]
fn memory_stays_on_its_stream_if_asked() {
    let text = "alloc a 4096 stream=1\nfree a\nalloc b 4096 stream=2\nfree b\nempty_cache\n";
    let plan = files("\n4096 4096 2 0 0\n0 4096\n0 4096\n", "0 0\n", "");
    assert_eq!(replay(text, &plan, "").counters["planned"], 2);
    let kept = replay(text, &plan, "+streams=kept");
    assert_eq!((kept.counters["planned"], kept.counters["overlaps"]), (1, 1));
    let waited =
        "alloc w 512 stream=1\n".to_owned() + &text.replace("alloc b", "empty_cache\nalloc b");
    let plan = files("\n4096 4096 2 0 512\n0 4096\n0 4096\n", "0 0\n", "");
    let waited = replay(&waited, &plan, "+streams=kept");
    assert_eq!(waited.counters["overlaps"], 0, "the device was waited for");
}

/// A deferred block keeps its place until its use has ended.
#[test]
fn a_deferred_block_is_not_reused_early() {
    let plan = files("\n4096 4096 2 0 0\n0 4096\n0 4096\n", "0 0\n", "");
    let early = "alloc a 4096\ndefer a\nalloc b 4096\ndone a\nfree b\nempty_cache\n";
    assert_eq!(replay(early, &plan, "").counters["overlaps"], 1);
    let late = "alloc a 4096\ndefer a\ndone a\nalloc b 4096\nfree b\nempty_cache\n";
    assert_eq!(replay(late, &plan, "").counters["planned"], 2);
}

/// Spec 3.4: segments of their own size are multiples of 512 bytes, and the cache is trimmed.
#[test]
fn the_built_in_caching_allocator_rounds_to_512_and_trims() {
    let plan = files("\n0 0 0 0 0\n", "0 0\n", "");
    let size = 11 * MIB + 512;
    let text = format!("alloc a {size}\nfree a\nempty_cache\n");
    assert_eq!(replay(&text, &plan, "").peaks.reserved_bytes_peak, size);
    let plain = replay(&text, &plan, "+inner=caching");
    assert_eq!(plain.peaks.reserved_bytes_peak, 12 * MIB);
    // 30 MiB lie idle when 40 MiB are obtained.
    let text = "alloc a 30MiB\nfree a\nmark step0\nalloc b 40MiB\nfree b\nempty_cache\n";
    let held = |params| {
        let result = replay(text, &plan, params);
        (result.counters["trims"], result.peaks.reserved_bytes_peak / MIB)
    };
    assert_eq!(held(""), (0, 70));
    // The peak of the step counts what came before the segment: nothing, so 70 MiB are idle.
    assert_eq!(held("+dynamic_utilization=50+dynamic_diff_mb=70"), (1, 40));
    assert_eq!(held("+dynamic_utilization=50+dynamic_diff_mb=71"), (0, 70));
}

#[test]
fn a_device_too_small_for_the_pool_refuses_or_does_without() {
    let files = files("\n104857600 104857600 1 0 0\n0 104857600\n", "0 0\n", "");
    let small = || RunOptions { capacity_bytes: Some(50 * MIB), ..options() };
    let text = "alloc a 1MiB\nfree a\nempty_cache\n";
    let faithful = replay_with(text, &files, "", small());
    assert_eq!(faithful.outcome.status, Status::Oom);
    let mended = replay_with(text, &files, "+faithful=false", small());
    assert_eq!(mended.outcome.status, Status::Ok);
    let limited = || RunOptions { limit_bytes: Some(50 * MIB), ..options() };
    assert_eq!(replay_with(text, &files, "", limited()).outcome.status, Status::Oom);
    let mended = replay_with(text, &files, "+faithful=false", limited());
    assert_eq!(mended.outcome.status, Status::Ok);
}

/// A random program of iterations like one another, but for a few requests: a plan, and steps.
fn random(seed: u64) -> (String, PlanFiles) {
    let mut rng = Rng(seed);
    let sizes = [100, 513, 5_000, 70_000, MIB, 3 * MIB, 12 * MIB + 3];
    let count = 6 + rng.below(10);
    let template: Vec<u64> = (0..count).map(|_| sizes[rng.below(sizes.len())]).collect();
    let modules =
        ["l.mlp->MoELayer : F", "l.mlp->MoELayer : B", "l.mlp.experts->SequentialMLP : F"];
    let mut text = "alloc w 8192\n".to_owned();
    let mut live: Vec<String> = Vec::new();
    let mut waiting: Vec<String> = Vec::new();
    for step in 0..6 {
        let _ = writeln!(text, "mark step{step}.forward");
        for (at, &size) in template.iter().enumerate() {
            let size = if rng.below(15) == 0 { sizes[rng.below(sizes.len())] } else { size };
            let module = (rng.below(6) == 0).then(|| modules[rng.below(modules.len())]);
            let name = format!("b{step}_{at}");
            if let Some(module) = module {
                let _ = writeln!(text, "enter \"{module}\"");
            }
            let _ = writeln!(text, "alloc {name} {size} stream={}", rng.below(2));
            if let Some(module) = module {
                let _ = writeln!(text, "leave \"{module}\"");
            }
            live.push(name);
            while live.len() > 4 + rng.below(4) {
                let name = live.swap_remove(rng.below(live.len()));
                if rng.below(4) == 0 {
                    let _ = writeln!(text, "defer {name}");
                    waiting.push(name);
                } else {
                    let _ = writeln!(text, "free {name}");
                }
            }
            if rng.below(5) == 0 && !waiting.is_empty() {
                let _ = writeln!(text, "done {}", waiting.swap_remove(rng.below(waiting.len())));
            }
        }
        if rng.below(4) == 0 {
            let _ = writeln!(text, "mark eval\nempty_cache");
        }
    }
    live.iter().for_each(|name| text += &format!("free {name}\n"));
    waiting.iter().for_each(|name| text += &format!("done {name}\n"));
    text += "free w\nempty_cache\nempty_cache\n";
    (text, random_plan(&mut rng, &template))
}

/// Places for the requests of a template, right or wrong: nobody has checked them.
fn random_plan(rng: &mut Rng, template: &[u64]) -> PlanFiles {
    let planned: Vec<u64> = template.iter().copied().filter(|&size| size > 512).collect();
    let pool_bytes = 40 * MIB;
    let mut plan = format!(
        "3\n{pool_bytes} {pool_bytes} {} {} 1024\n0 8192\n",
        planned.len() + 1,
        planned.len()
    );
    for size in planned.iter().chain(&planned) {
        let places = (pool_bytes - size) / 512;
        let _ = writeln!(plan, "{} {size}", 512 * rng.below(places as usize) as u64);
    }
    files(&plan, "2 2\nmlp-F-1 (8192,9000000)\n", "moe-B-1 (100000,20000000)\n")
}

/// Whatever the plan says and the program does, no block overlaps another, and all comes back.
#[test]
fn random_programs_under_random_plans_keep_the_contract() {
    let settings = [
        "",
        "+static_fallback=1+reuse_static=1+expert_per_gpu=1",
        "+faithful=false",
        "+faithful=false+inner=best-fit+static_fallback=1",
        "+streams=kept+inner=[stitch+policy=best]",
        "+realign=iteration+reuse_static=all+expert_per_gpu=all+dynamic_utilization=90",
    ];
    for seed in 0..40 {
        let (text, files) = random(seed);
        for params in settings {
            for capacity_mib in [10_000, 90, 44, 20] {
                let what = format!("seed {seed}, {params}, {capacity_mib} MiB");
                let options = RunOptions { capacity_bytes: Some(capacity_mib * MIB), ..options() };
                let result = replay_with(&text, &files, params, options);
                let levels = result.final_levels.levels;
                assert_eq!((levels.active_bytes, levels.reserved_bytes), (0, 0), "{what}");
                assert_eq!(result.calls.malloc, result.calls.free, "{what}");
                // A mixture without its line in the intra file ends the process before that.
                let status = result.outcome.status;
                let refused = result.counters["ooms"] > 0;
                assert!(status == Status::Failed || (status == Status::Oom) == refused, "{what}");
            }
        }
    }
}

/// The same decisions whether it is watched or not, and from a copy as from the original.
#[test]
fn replays_repeat() {
    for seed in 40..50 {
        let (text, files) = random(seed);
        let first = replay(&text, &files, "+faithful=false");
        let unwatched = RunOptions { paranoid: false, ..options() };
        let second = replay_with(&text, &files, "+faithful=false", unwatched);
        assert_eq!((first.peaks, first.plan), (second.peaks, second.plan));
        assert_eq!(first.counters, second.counters);
    }
}

/// A folder with vector E and its plan where STAlloc's tool writes it.
fn folder_e() -> (Folder, String, String) {
    let folder = Folder::new();
    let trace = folder.file("e.txt", &vector_e(4));
    std::fs::create_dir_all(folder.path("output/plan")).expect("a folder");
    let plan = folder.file("output/plan/dev_0.txt", PLAN_E);
    (folder, trace, plan)
}

#[test]
fn a_plan_is_read_from_the_folder_or_the_file() {
    let (folder, trace, plan) = folder_e();
    for place in [folder.path(""), plan] {
        let spec = format!("planned+mode=stalloc+plan={place}");
        let output = fraglab(&["run", "--trace", &trace, "--alloc", &spec, "--json", "-"]);
        assert_code(&output, 0);
        let result = json(&output);
        assert_eq!(result["counters"]["overlaps"], 4, "{place}");
        assert_eq!(result["plan"]["steps"][3]["name"], "step2");
        assert_eq!(result["plan"]["steps"][3]["overlapping"], 2);
        assert_eq!(result["wasted_bytes"], 2 * MIB);
        let screen = stdout(&fraglab(&["run", "--trace", &trace, "--alloc", &spec]));
        assert!(screen.contains("plan of 13 KiB for 13 KiB live at once (100.0%)"), "{screen}");
        assert!(screen.contains("step2 to step3"), "{screen}");
    }
}

/// Spec 3.6: a header, the parts, the total; GB of 2^30 bytes.
#[test]
fn lines_as_stalloc_prints_them() {
    let (folder, trace, _) = folder_e();
    let spec = format!("planned+mode=stalloc+plan={}", folder.path(""));
    let lines = |spec: &str| {
        let output =
            fraglab(&["run", "--trace", &trace, "--alloc", spec, "--log-style", "stalloc"]);
        assert_code(&output, 0);
        stdout(&output).lines().map(str::to_owned).collect::<Vec<String>>()
    };
    let lines_of_plan = lines(&spec);
    assert_eq!(lines_of_plan.len(), 4 * 4);
    let zero = "max_reserved:0.00, max_allocated:0.00, utilization";
    assert_eq!(lines_of_plan[1], format!("static : {zero}:100.00%"));
    assert_eq!(lines_of_plan[2], format!("dynamic : {zero}:100.00%"), "never used");
    assert_eq!(lines_of_plan[7], format!("dev0, iter1 : {zero}:100.00%"));
    // 4096 bytes of a segment of 2 MiB; 13312 of that and the pool.
    assert_eq!(lines_of_plan[10], format!("dynamic : {zero}:0.20%"));
    assert_eq!(lines_of_plan[11], format!("dev0, iter2 : {zero}:0.63%"));
    let lines_of_caching = lines("caching");
    // One segment of 2 MiB, in use 12288 bytes at first, then c of the iteration before as well.
    let expected = ["0.59", "0.63", "0.63", "0.63"].into_iter().enumerate();
    let expected = expected.map(|(iter, percent)| format!("dev0, iter{iter} : {zero}:{percent}%"));
    assert_eq!(lines_of_caching, expected.collect::<Vec<String>>());
}

#[test]
fn plans_and_profiles_that_cannot_be_read_are_named() {
    let (folder, trace, _) = folder_e();
    let refused =
        |spec: String| assert_one_error(&fraglab(&["run", "--trace", &trace, "--alloc", &spec]));
    let empty = folder.path("output");
    std::fs::create_dir_all(folder.path("empty")).expect("a folder");
    assert!(
        refused(format!("planned+mode=stalloc+plan={}", folder.path("empty")))
            .contains("no plan in it")
    );
    let bad = folder.file("bad.txt", "\n13312 13312 1 0 0\n100 8192\n");
    let message = refused(format!("planned+mode=stalloc+plan={bad}"));
    assert!(message.contains("bad.txt") && message.contains("line 3"), "{message}");
    let message = refused(format!("planned+mode=stalloc+trace={empty}/none.json"));
    assert!(message.contains("none.json"), "{message}");
    let message = refused("planned+mode=stalloc+realign=maybe".to_owned());
    assert!(message.contains("expected none or iteration"), "{message}");
}

/// A mixture of experts with full recomputation as the recorder logs it: every expert sees another
/// number of tokens each time; the logits at the end of a forward pass leave space for later.
struct Moe {
    log: Log,
    rng: Rng,
}

const MOE_LAYERS: usize = 3;
const MOE_EXPERTS: usize = 4;

impl Moe {
    fn log(iterations: usize) -> String {
        let mut moe = Moe { log: Log::default(), rng: Rng(9) };
        let weight = moe.log.malloc(300 * MIB);
        for iteration in 0..iterations {
            moe.log.line(&format!("Iteration Index : {iteration}"));
            for _ in 0..2 {
                moe.micro_batch();
            }
        }
        moe.log.line("Iteration Index : end");
        moe.log.free(weight);
        moe.log.text
    }

    fn micro_batch(&mut self) {
        self.log.line("micro-batch : F");
        let mut inputs = Vec::new();
        for layer in 0..MOE_LAYERS {
            inputs.push(self.log.malloc(8 * MIB));
            let kept = self.forward(layer);
            kept.into_iter().for_each(|block| self.log.free(block));
        }
        self.log.brief(400 * MIB);
        self.log.line("micro-batch : B");
        for layer in (0..MOE_LAYERS).rev() {
            let kept = self.forward(layer);
            self.pass(layer, "mlp->MoELayer", 'B', true);
            self.pass(layer, "mlp.experts->SequentialMLP", 'B', true);
            for block in kept {
                self.log.brief(4 * MIB);
                self.log.free(block);
            }
            self.pass(layer, "mlp.experts->SequentialMLP", 'B', false);
            self.pass(layer, "mlp->MoELayer", 'B', false);
            let input = inputs.pop().expect("one a layer");
            self.log.free(input);
        }
    }

    /// What an experts' pass leaves to be freed.
    fn forward(&mut self, layer: usize) -> Vec<LogBlock> {
        self.pass(layer, "mlp->MoELayer", 'F', true);
        self.pass(layer, "mlp.router->TopKRouter", 'F', true);
        self.log.brief(MIB);
        self.pass(layer, "mlp.router->TopKRouter", 'F', false);
        let mut kept = vec![self.log.malloc(6 * MIB)];
        self.pass(layer, "mlp.experts->SequentialMLP", 'F', true);
        for expert in 0..MOE_EXPERTS {
            let size_bytes = 2 * MIB + 512 * self.rng.below(20_000) as u64;
            kept.push(self.log.malloc(size_bytes));
            let row = format!("mlp.experts.local_experts.{expert}.fc2->RowParallelLinear");
            self.pass(layer, &row, 'F', true);
            kept.push(self.log.malloc(size_bytes / 2));
            self.pass(layer, &row, 'F', false);
        }
        self.pass(layer, "mlp.experts->SequentialMLP", 'F', false);
        self.pass(layer, "mlp->MoELayer", 'F', false);
        kept
    }

    fn pass(&mut self, layer: usize, module: &str, direction: char, starts: bool) {
        let edge = if starts { "start" } else { "end" };
        self.log.line(&format!("layers.{layer}.{module} Layer : {direction}-{edge}"));
    }
}

/// Trends of specs 9.4: experts reuse the pool only if their number is given, then the caching
/// allocator needs less; without the surprises still less.
#[test]
fn experts_reuse_the_pool_of_a_recomputing_job() {
    let (trace, _) = read_stalloc_log(Moe::log(5).as_bytes()).expect("a log");
    let figures = |params: &str| {
        let spec = format!("planned+mode=stalloc{params}").parse().expect("a specification");
        let result = run(&trace, &spec, &options(), Observe::default()).expect("runs").result;
        assert_eq!(result.outcome.status, Status::Ok, "{params}: {:?}", result.outcome.message);
        let counters = &result.counters;
        assert_eq!(counters["mismatches"], 0, "{params}: what is static is regular");
        (counters["dynamic_reused"], counters["fallback_bytes_peak"])
    };
    let (none, unset) = (figures(""), figures("+reuse_static=1"));
    let given = figures(&format!("+reuse_static=1+expert_per_gpu={MOE_EXPERTS}"));
    let mended = figures("+faithful=false");
    assert_eq!(none.0, 0);
    assert!(unset.1 <= none.1 && unset.0 < given.0, "{none:?} {unset:?} {given:?}");
    assert!(given.1 < none.1, "{none:?} {given:?}");
    assert!(mended.0 > given.0 && mended.1 <= given.1, "{given:?} {mended:?}");
}
