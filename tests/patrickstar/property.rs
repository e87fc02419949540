//! Random programs on random machines: the room `chunk` must do what the model does, line by line.

use fraglab::chunk::{
    self, ChunkConfig, ChunkError, ChunkEvent, ChunkEventKind, ChunkRun, ChunkSize, Exact,
    LinkCosts, Ratio, StepSummary,
};

use super::build;
use super::model::{Entry, Model, Options, Peaks, What};
use super::program::{Layer, Program, Stage, Unit};
use super::random::Case;

/// Programs that both run.
const PROGRAMS: u64 = if cfg!(debug_assertions) { 200 } else { 2000 };
/// More than any program asks for.
const GPU_BYTES: u64 = 1 << 40;

fn ratio(thousandths: i128) -> Ratio {
    let text = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
    Ratio::of_text(&text).expect("a ratio of thousandths")
}

/// The options as the room `chunk` has them.
pub(crate) fn config(options: &Options) -> ChunkConfig {
    let quirks = options.quirks;
    ChunkConfig {
        chunk_size: ChunkSize::Elements(options.chunk_elements),
        use_hybrid_adam: options.hybrid,
        with_mem_saving_comm: options.saving,
        with_mem_cache: options.cache,
        with_async_mem_monitor: options.monitor,
        with_static_partition: options.fixed_split,
        use_fake_dist: options.shared_gpu,
        warmup_gpu_chunk_mem_ratio: ratio(options.warmup),
        overall_gpu_mem_ratio: ratio(options.overall_gpu),
        overall_cpu_mem_ratio: ratio(options.overall_cpu),
        margin_use_ratio: ratio(options.margin_use),
        gpu_bytes: Some(options.gpu_bytes),
        host_bytes: options.host_bytes,
        rank: options.rank as u32,
        adam_temporaries: false,
        quirks: chunk::Quirks {
            bwd_reserve: quirks.backward_reserve,
            oom_fallback: true,
            phantom_host: quirks.phantom,
            host_budget: quirks.host_divided,
            margin: quirks.strict_margin,
            write_back: quirks.wide_write_back,
            over_budget: quirks.over_budget,
            skipped_adam: quirks.skipped_adam,
            overflow_leak: quirks.leak,
        },
        ..ChunkConfig::default()
    }
}

fn stage(stage: Stage) -> chunk::Stage {
    match stage {
        Stage::Init => chunk::Stage::Init,
        Stage::Forward => chunk::Stage::Forward,
        Stage::Backward => chunk::Stage::Backward,
        Stage::Adam => chunk::Stage::Adam,
    }
}

fn kind(what: What) -> ChunkEventKind {
    match what {
        What::ToGpu => ChunkEventKind::ToGpu,
        What::ToHost => ChunkEventKind::ToHost,
        What::Allocate => ChunkEventKind::Allocate,
        What::Drop => ChunkEventKind::Drop,
        What::AllGather => ChunkEventKind::AllGather,
        What::ReduceScatter => ChunkEventKind::ReduceScatter,
        What::Broadcast => ChunkEventKind::Broadcast,
        What::Reduce => ChunkEventKind::Reduce,
        What::GradientRead => ChunkEventKind::GradientRead,
        What::WriteBack => ChunkEventKind::WriteBack,
        What::OverBudget => ChunkEventKind::OverBudget,
        What::CannotMove => ChunkEventKind::CannotMove,
    }
}

fn event(entry: &Entry) -> ChunkEvent {
    ChunkEvent {
        step: entry.step,
        stage: stage(entry.stage),
        moment: entry.moment as u32,
        kind: kind(entry.what),
        chunk: entry.chunk as u32,
        bytes: entry.bytes,
    }
}

/// Runs the room `chunk` on the trace of a program.
pub(crate) fn run(case: &Case, gpu_bytes: u64) -> Result<ChunkRun, ChunkError> {
    let trace = build::trace(&case.program, &case.options);
    let mut gpu = Exact::new(gpu_bytes);
    let config = config(&case.options);
    chunk::run(&trace, &config, &LinkCosts::default(), &mut gpu)
}

/// The first line in which two logs differ, with what comes before.
fn log_difference(expected: &[ChunkEvent], found: &[ChunkEvent]) -> Option<String> {
    let length = expected.len().max(found.len());
    let at = (0..length).find(|&line| expected.get(line) != found.get(line))?;
    let show = |log: &[ChunkEvent]| {
        let lines = (at.saturating_sub(6)..at + 3).filter_map(|line| Some((line, log.get(line)?)));
        lines.map(|(line, event)| format!("  {line}: {event:?}\n")).collect::<String>()
    };
    Some(format!("line {at}\nmodel:\n{}manager:\n{}", show(expected), show(found)))
}

fn peaks(step: &StepSummary) -> Peaks {
    Peaks {
        gpu: step.gpu_bytes_peak,
        gpu_chunks: step.gpu_chunk_bytes_peak,
        host: step.host_bytes_peak,
    }
}

fn unequal<T: PartialEq + std::fmt::Debug>(what: &str, model: T, manager: T) -> Option<String> {
    (model != manager).then(|| format!("{what}: model {model:?}, manager {manager:?}"))
}

/// How model and manager differ on a case; nothing if they do not.
fn difference(case: &Case) -> Option<String> {
    let mut model = Model::new(&case.program, &case.options).expect("units fit chunks");
    model.run();
    let run = match run(case, GPU_BYTES) {
        Ok(run) => run,
        Err(ChunkError::HostTooSmall { .. }) if !model.can_be_built() => return None,
        Err(why) => return Some(format!("manager: {why}")),
    };
    let expected: Vec<ChunkEvent> = model.log.iter().map(event).collect();
    let summary = &run.summary;
    let list: Vec<i64> = model.gpu_list.iter().map(|&bytes| bytes as i64).collect();
    let found: Vec<Peaks> = summary.steps.iter().map(peaks).collect();
    log_difference(&expected, &run.log)
        .or_else(|| unequal("stopped", model.stopped, summary.hard_stop.is_some()))
        .or_else(|| unequal("S", list, summary.other_gpu_bytes.clone()))
        .or_else(|| {
            unequal("S of the host", model.host_most() as u64, summary.other_host_bytes_max)
        })
        .or_else(|| unequal("peaks", model.step_peaks.clone(), found))
        .or_else(|| {
            let margin = model.last_margin().map(|(above, below)| above as f64 / below as f64);
            let close = match (margin, summary.margin) {
                (Some(model), Some(manager)) => (model - manager).abs() < 1e-6,
                (model, manager) => model == manager,
            };
            let groups = model.last_margin().map_or(0, |margin| model.gpu_groups(margin)) as u64;
            (!close)
                .then(|| format!("margin: model {margin:?}, manager {:?}", summary.margin))
                .or_else(|| unequal("groups", groups, summary.gpu_adam_groups))
        })
}

#[test]
fn the_manager_does_what_the_model_does() {
    let seeds = std::env::var("PATRICKSTAR_SEEDS").ok().and_then(|text| {
        let (first, last) = text.split_once("..")?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    let (first, last) = seeds.unwrap_or((0, PROGRAMS));
    for seed in first..last {
        let case = Case::random(seed);
        if difference(&case).is_some() {
            let case = case.shrunk(|case| difference(case).is_some());
            let why = difference(&case).expect("shrunk to cases that differ");
            panic!("seed {seed}: {why}\n{case:#?}");
        }
    }
}

/// Spec 1.3, 2.1: a leaf unit's temporary gradient of 20 bytes stays until the optimizer, whose own
/// moment still sees it; so also where only what is there at a tick counts.
#[test]
fn adams_moment_sees_stuck_gradients() {
    let mut case = Case::random(0);
    case.program = Program {
        units: vec![Unit::of(&[1]), Unit::leaf(&[10])],
        layers: vec![Layer { units: vec![0, 1], ..Layer::default() }],
        steps: 1,
        ..Program::default()
    };
    case.options.host_bytes = 1 << 40;
    case.options.monitor = false;
    case.options.ranks_down(1);
    let run = run(&case, GPU_BYTES).expect("the host has room");
    assert_eq!(run.summary.other_gpu_bytes, [0, 0, 20, 20 + 2, 20]);
}
