//! `fraglab run`: traces through allocators.
//!
//! Every trace is read once, by the thread that replays it, and dropped after its last allocator;
//! the cells run in parallel and their results are collected in the order asked for.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::expectations::{ExpectReport, Expected, place};
use super::hardware::{CudaCard, GpuPlan, HardwareArgs};
use super::input;
use super::interrupt::{self, Partial, partial_path};
use super::output;
use super::progress::Progress;
use super::report_dir::{ReportArgs, ReportCell, ReportDir};
use super::setup::{self, CellArgs, ReadArgs, SetupArgs, parse_size};
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::engine::{
    self, Bench, Observe, Observed, Prepared, RunError, RunOptions, RunResult, Status,
};
use crate::import::ReadOptions;
use crate::metrics::{EnvelopePoint, TimelineRow};
use crate::report::html::IndexEntry;
use crate::report::json;
use crate::report::table::{self, Part, TableFormat};
use crate::report::text::{self, TraceRuns};
use crate::trace::{Expectation, Trace};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab run --trace snapshot.pickle
      what PyTorch's allocator reserves for this job, with the settings that it was recorded with
  fraglab run --trace job.json --alloc caching,caching+max_split_size_mb=128,native
  fraglab run --trace job.json --pytorch-conf max_split_size_mb:128 --capacity 80GiB
  fraglab run --trace runs/*.pickle.gz --json - | jq '.[] | {n: .trace.name, f: .fragmentation}'
  fraglab run --trace traces/cases/*.txt --check-expect --quiet
  fraglab run --trace snapshot.pickle --alloc caching,expandable --report report
      a page to look at: report/index.html
  fraglab run --trace job.json --alloc caching,stitch --device cuda --touch full
      the same calls on a real GPU, timed, every block written and checked
  printf 'alloc a 100MiB\\nfree a\\n' | fraglab run --trace - --alloc native

The table: requested is what the program asked for, allocated the same as rounded, reserved what the \
allocator held of the device; excess = reserved - requested peak, frag = 1 - requested / reserved \
peak. Unused at an event: internal (rounding), deferred (freed, in use by another stream), other \
stream or pool (free, but not for this request), hard (free, in a segment with a live block), soft \
(free, in a wholly free segment). Device time a step: what the device calls cost from one mark \
stepN.* to that of the next step, and how much that is of the recorded time.

Exit codes: 0 good, 1 some allocator ran out of memory, an expectation failed, or a block on a GPU \
did not hold what was written there, 2 something could not be done, 130 interrupted: the cells that \
were done until then are shown and kept as partial, in results.partial.json for results.json.";

const CHECK_EXPECT_HELP: &str = "\
Check the `expect` lines of the traces

Runs the allocators that the lines name, and those of --alloc if it is given. A line is `expect \
ALLOCATOR FIELD VALUE`. FIELD is a name of the JSON result (reserved_bytes_peak, status) or the end \
of its path (calls.malloc, final.reserved_bytes); a bare name that occurs several times is looked \
for in peaks, final, counters, torch_stats and calls, in this order, and any other choice is an \
error that names the candidates. VALUE is an integer, a size with a unit, a fraction or percentage \
(compared at the precision written), a word, or none. Prints a line for every expectation that \
fails and exits with 1, else how many hold. Running out of memory is then no failure by itself \
where some expectation is about it (status, ooms, ...).";

const ADDRESS_SEEDS_HELP: &str = "\
Run again under N address policies and tell how far the answer hangs on addresses

Ties between free blocks of equal size go to the lower address, and what addresses a driver gives \
out differs from process to process. Policy 0 is the model of --addresses chunks, 1 descending, \
2 ascending; each of the others deals the ranges out at random to 2 to 9 ranges of addresses, some \
of which grow upwards, the same in every run. Tells the least and the largest reserved peak, and \
how many policies end out of memory. JSON: address_spread {addresses_matter, seeds, least and \
largest of each peak as in reserved_bytes_peak_min and reserved_bytes_peak_max, ooms_min, \
ooms_max, seeds_with_oom}. The answer itself and the exit code stay those of the one policy asked \
for.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    cells: CellArgs,

    #[command(flatten)]
    hardware: HardwareArgs,

    /// Physical memory of the device, as in 80GiB
    ///
    /// By default the trace's own, else what the recorded device had, else unlimited.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, long_help = capacity_help())]
    capacity: Option<Bytes>,

    #[command(flatten)]
    setup: SetupArgs,

    /// Run again under N address policies and tell how far the answer hangs on addresses
    #[arg(long, value_name = "N", long_help = ADDRESS_SEEDS_HELP)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    address_seeds: Option<u32>,

    /// Write the results as JSON, `-` for standard output and nothing else there
    ///
    /// An object for one trace and one allocator, an array for anything more. What a clock measured
    /// stands under `wall`; everything else is the same in every run.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write what the allocators did, a row an action, to FILE.csv or FILE.parquet
    ///
    /// With more than one trace or allocator the columns `trace` and `allocator` stand first.
    #[arg(long, value_name = "FILE")]
    decisions: Option<PathBuf>,

    /// Write the memory levels after every event to FILE.csv or FILE.parquet
    ///
    /// With more than one trace or allocator the columns `trace` and `allocator` stand first.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,

    /// Write at most N rows to --timeline, whatever the number of events
    ///
    /// A row then stands for a stretch of events: it has the highest of each level in it, so that no
    /// peak is lost, at the index and the time of its last event.
    #[arg(long, value_name = "N", requires = "timeline")]
    #[arg(value_parser = clap::value_parser!(u32).range(2..))]
    timeline_points: Option<u32>,

    /// Print what another tool would after every step, in place of the tables
    ///
    /// stalloc: the lines of STAlloc, `dev0, iter3 : max_reserved:9.13, max_allocated:8.97,
    /// utilization:98.28%`, in GB of 2^30 bytes. Each has the peaks since the one before; a trace
    /// without steps has one line, without `iter`.
    #[arg(long, value_enum, value_name = "STYLE")]
    log_style: Option<LogStyle>,

    /// Check the `expect` lines of the traces
    #[arg(long, long_help = CHECK_EXPECT_HELP)]
    check_expect: bool,

    /// End a replay at the first refused request instead of going on without the block
    #[arg(long)]
    stop_on_oom: bool,

    /// Check every allocator after every event against an independent map of memory; slow
    #[arg(long)]
    paranoid: bool,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    reading: ReadArgs,
}

/// Lines of another tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogStyle {
    /// STAlloc's statistics lines
    Stalloc,
}

fn capacity_help() -> String {
    format!(
        "Physical memory of the device, as in 80GiB\n\nBy default the trace's own, else what the \
         recorded device had, else unlimited. {}",
        super::SIZES_HELP
    )
}

/// A table to write and its form.
struct TableFile {
    path: PathBuf,
    format: TableFormat,
}

impl TableFile {
    fn plan(path: Option<PathBuf>) -> anyhow::Result<Option<TableFile>> {
        let Some(path) = path else { return Ok(None) };
        let format = TableFormat::from_path(&path).with_context(|| path.display().to_string())?;
        Ok(Some(TableFile { path, format }))
    }
}

/// What is to be done.
struct Plan {
    traces: Vec<PathBuf>,
    /// Allocators asked for; empty if none were and the expectations name them.
    specs: Vec<AllocSpec>,
    options: RunOptions,
    observe: Observe,
    gpu: Option<u32>,
    json: Option<PathBuf>,
    decisions: Option<TableFile>,
    timeline: Option<TableFile>,
    report: Option<ReportDir>,
    check_expect: bool,
    log_style: Option<LogStyle>,
    /// Cells run on a real GPU.
    on_card: bool,
    quiet: bool,
}

impl Plan {
    fn new(args: Args, on_card: bool) -> anyhow::Result<Plan> {
        let (traces, mut specs) = args.cells.paths_and_specs()?;
        let outputs = [&args.json, &args.decisions, &args.timeline].map(Option::as_deref);
        let report = args.report.plan(&traces)?;
        let report_files = report.as_ref().map(ReportDir::paths).unwrap_or_default();
        let report_files = report_files.iter().map(PathBuf::as_path);
        output::check_places(&traces, outputs.into_iter().flatten().chain(report_files))?;
        if specs.is_empty() && !args.check_expect {
            specs.push(AllocSpec { name: "caching".to_owned(), params: Vec::new() });
        }
        let options = RunOptions {
            capacity_bytes: args.capacity.map(|size| size.0),
            stop_on_oom: args.stop_on_oom,
            paranoid: args.paranoid,
            address_seeds: args.address_seeds.unwrap_or(0),
            stop: interrupt::stop(),
            ..args.setup.options(&specs)?
        };
        let plan = Plan {
            traces,
            specs,
            options,
            observe: Observe {
                decisions: args.decisions.is_some(),
                timeline: args.timeline.is_some() && args.timeline_points.is_none(),
                envelope: args.timeline_points.map(|points| points as usize),
                steps: args.log_style.is_some(),
                map_blocks: None,
            },
            gpu: args.reading.gpu,
            json: args.json,
            decisions: TableFile::plan(args.decisions)?,
            timeline: TableFile::plan(args.timeline)?,
            report,
            check_expect: args.check_expect,
            log_style: args.log_style,
            on_card,
            quiet: args.reading.quiet,
        };
        // A misspelt allocator is told before any file is read.
        for spec in &plan.specs {
            plan.check_spec(spec)?;
        }
        Ok(plan)
    }

    fn check_spec(&self, spec: &AllocSpec) -> Result<(), SpecError> {
        setup::check_spec(spec, &self.options, self.options.capacity_bytes)
    }

    /// What to watch in each of so many cells of a trace.
    fn observe(&self, cells: usize) -> Observe {
        if self.report.is_none() {
            return self.observe;
        }
        let Observe { envelope, steps, map_blocks, .. } = ReportDir::observe(cells);
        let envelope = self.observe.envelope.or(envelope);
        Observe { envelope, steps, map_blocks, ..self.observe }
    }

    /// Sends results to files beside those that were named.
    fn keep_partial(&mut self) {
        let tables = [&mut self.decisions, &mut self.timeline].into_iter().flatten();
        let paths = tables.map(|table| &mut table.path).chain(&mut self.json);
        paths.for_each(|path| *path = partial_path(path));
    }

    /// The files of results, the report not among them.
    fn files(&self) -> impl Iterator<Item = &Path> {
        let tables = [&self.decisions, &self.timeline].into_iter().flatten();
        self.json.iter().chain(tables.map(|table| &table.path)).map(PathBuf::as_path)
    }

    /// Whether nothing is asked to be other than it was recorded.
    fn asks_for_the_recorded_run(&self) -> bool {
        let RunOptions { capacity_bytes, limit_bytes, settings, address_policy, .. } =
            &self.options;
        let RunOptions { address_bytes_max, mappings_max, .. } = &self.options;
        !self.on_card
            && capacity_bytes.is_none()
            && limit_bytes.is_none()
            && address_bytes_max.is_none()
            && mappings_max.is_none()
            && settings.is_none()
            && address_policy.is_none()
    }

    /// The allocators for one trace: those its expectations name, then those asked for.
    fn specs_for(&self, path: &Path, trace: &Trace) -> anyhow::Result<Vec<AllocSpec>> {
        if !self.check_expect {
            return Ok(self.specs.clone());
        }
        let mut specs = Vec::new();
        for expectation in &trace.header.expectations {
            let spec: AllocSpec =
                expectation.allocator.parse().with_context(|| place(path, expectation))?;
            self.check_spec(&spec).with_context(|| place(path, expectation))?;
            if !specs.contains(&spec) {
                specs.push(spec);
            }
        }
        for spec in &self.specs {
            if !specs.contains(spec) {
                specs.push(spec.clone());
            }
        }
        Ok(specs)
    }
}

/// What is kept of one trace after its replays.
struct TraceRun {
    warnings: Vec<String>,
    settings: Option<String>,
    share_is_bound: bool,
    recorded_refusal: Option<(u64, u64)>,
    recorded_reserved_bytes_peak: Option<u64>,
    phases: Vec<String>,
    expectations: Vec<Expectation>,
    /// The page written for it.
    report: Option<IndexEntry>,
    cells: Vec<Cell>,
}

/// One trace through one allocator.
struct Cell {
    spec: AllocSpec,
    outcome: anyhow::Result<Observed>,
}

impl Cell {
    fn result(&self) -> Option<&RunResult> {
        self.outcome.as_ref().ok().map(|observed| &observed.result)
    }

    /// Whether Ctrl-C came before it was done.
    fn is_cut(&self) -> bool {
        self.outcome.as_ref().is_err_and(interrupt::is_interrupt)
    }
}

impl TraceRun {
    fn name(&self) -> &str {
        self.cells.iter().find_map(Cell::result).map_or("", |result| &result.trace.name)
    }

    fn results(&self) -> Vec<&RunResult> {
        self.cells.iter().filter_map(Cell::result).collect()
    }

    fn is_cut(&self) -> bool {
        self.cells.iter().any(Cell::is_cut)
    }
}

/// Replays every trace through every allocator.
///
/// # Errors
/// If the plan makes no sense or an output cannot be written. What goes wrong with one trace is
/// told, and the others go on.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    let gpu = args.hardware.open(&args.setup, args.address_seeds.is_some())?;
    let mut plan = Plan::new(args, gpu.is_some())?;
    setup::tell_doubts(plan.options.capacity_bytes, plan.options.limit_bytes, console);
    let tell = |path: &Path, run: &TraceRun| tell_problems(&plan, path, run, console);
    let replayed = match &gpu {
        None => replay_all(&plan),
        Some(gpu) => replay_all_on(&plan, gpu, console),
    };
    let paths = plan.traces.clone();
    let (mut runs, mut verdict) = setup::kept(&paths, replayed, tell, console);
    let single = plan.traces.len() == 1 && runs.iter().all(|(_, run)| run.cells.len() == 1);
    tell_apart(&mut runs);
    let partial = (verdict == Verdict::Interrupted).then(|| partial(&plan, &runs));
    if partial.is_some() {
        plan.keep_partial();
    }
    write_files(&plan, &runs, single, partial.is_some(), console)?;
    let json_on_stdout = plan.json.as_deref().is_some_and(input::is_stdio);
    if !plan.quiet && !json_on_stdout {
        if let Some(partial) = partial.filter(|partial| partial.done > 0) {
            console.print(&partial.heading(console))?;
        }
        match plan.log_style {
            None => print_tables(&runs, console)?,
            Some(LogStyle::Stalloc) => print_stalloc_log(&runs, plan.gpu, console)?,
        }
    }
    if plan.check_expect {
        let report = ExpectReport::of(results_with_expectations(&runs));
        verdict = verdict.max(report.verdict());
        report.print(plan.quiet, json_on_stdout, console)?;
    } else if results(&runs).any(|result| result.outcome.status == Status::Oom) {
        verdict = verdict.max(Verdict::No);
    }
    let has_results = results(&runs).next().is_some();
    if let Some(partial) = partial {
        partial.tell(has_results, plan.files(), console);
    } else if has_results {
        interrupt::remove_partial(&paths, plan.files())?;
    }
    Ok(verdict)
}

/// What was done before Ctrl-C. How many allocators the expectations of a trace name shows only
/// when it is read, so that traces are counted there.
fn partial(plan: &Plan, runs: &[(&Path, TraceRun)]) -> Partial {
    if plan.check_expect {
        let done = runs.iter().filter(|(_, run)| !run.is_cut()).count();
        return Partial { done, all: plan.traces.len(), part: "trace" };
    }
    let cells = runs.iter().flat_map(|(_, run)| &run.cells);
    let done = cells.filter(|cell| !cell.is_cut()).count();
    Partial { done, all: plan.traces.len() * plan.specs.len(), part: "cell" }
}

/// Calls traces of one name by their paths.
fn tell_apart(runs: &mut [(&Path, TraceRun)]) {
    let names: Vec<(&Path, String)> =
        runs.iter().map(|(path, run)| (*path, run.name().to_owned())).collect();
    for (path, (_, run)) in setup::paths_for_names(&names).into_iter().zip(runs) {
        let Some(path) = path else { continue };
        for observed in run.cells.iter_mut().filter_map(|cell| cell.outcome.as_mut().ok()) {
            observed.result.trace.name = path.display().to_string();
        }
    }
}

fn observed<'a>(runs: &'a [(&Path, TraceRun)]) -> impl Iterator<Item = &'a Observed> {
    runs.iter().flat_map(|(_, run)| run.cells.iter().filter_map(|cell| cell.outcome.as_ref().ok()))
}

fn results<'a>(runs: &'a [(&Path, TraceRun)]) -> impl Iterator<Item = &'a RunResult> {
    runs.iter().flat_map(|(_, run)| run.cells.iter().filter_map(Cell::result))
}

fn results_with_expectations<'a>(
    runs: &'a [(&Path, TraceRun)],
) -> impl Iterator<Item = Expected<'a>> {
    runs.iter().flat_map(|(path, run)| {
        let cells = run.cells.iter().filter_map(|cell| Some((&cell.spec, cell.result()?)));
        cells.map(|(spec, result)| Expected { path, spec, result, lines: &run.expectations })
    })
}

fn replay_all(plan: &Plan) -> Vec<anyhow::Result<TraceRun>> {
    let progress = Progress::over(&plan.traces, plan.quiet);
    let options = ReadOptions {
        limit_is_told: plan.options.limit_bytes.is_some(),
        ..progress.read_options(plan.gpu)
    };
    let simulate = |trace: &Trace, path: &Path, specs: Vec<AllocSpec>, observe| {
        let cells = specs.into_par_iter().map(|spec| {
            let outcome = engine::run(trace, &spec, &plan.options, observe)
                .with_context(|| path.display().to_string());
            Cell { spec, outcome }
        });
        cells.collect()
    };
    let runs = plan.traces.par_iter().enumerate().map(|(place, path)| {
        let run = replay(plan, place, path, &options, simulate);
        progress.file_done();
        run
    });
    runs.collect()
}

/// Replays on a GPU, a cell after the other.
fn replay_all_on(plan: &Plan, gpu: &GpuPlan, console: &Console) -> Vec<anyhow::Result<TraceRun>> {
    let progress = Progress::over_events(plan.quiet);
    let options = ReadOptions {
        limit_is_told: plan.options.limit_bytes.is_some(),
        ..progress.read_options(plan.gpu)
    };
    let run_cells = |trace: &Trace, path: &Path, specs: Vec<AllocSpec>, observe| {
        let wait = gpu.long_wait(trace, specs.len()).filter(|_| !plan.quiet);
        if let Some(wait) = wait {
            console.warn(path, &wait);
        }
        let prepared = Prepared::new(trace, &plan.options);
        let bench = Bench {
            card: &gpu.card,
            touch: gpu.touch,
            pace: gpu.pace,
            passes: gpu.passes,
            split: plan.report.is_some() || specs.len() == 1,
            progress: &|done, all| progress.at(done, all),
        };
        let cells = specs.into_iter().map(|spec| {
            progress.name(format!("{} {spec}", trace.header.name));
            let outcome = run_on(&prepared, &spec, &bench, observe);
            let outcome = outcome.with_context(|| path.display().to_string());
            Cell { spec, outcome }
        });
        cells.collect()
    };
    let traces = plan.traces.iter().enumerate();
    traces.map(|(place, path)| replay(plan, place, path, &options, run_cells)).collect()
}

/// One cell on a GPU, unless nothing works there any more.
fn run_on(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    bench: &Bench<'_, CudaCard>,
    observe: Observe,
) -> anyhow::Result<Observed> {
    anyhow::ensure!(
        !bench.card.is_lost(),
        "{spec} was not replayed: an earlier replay ended all work on the GPU"
    );
    let end = engine::run_on_hardware(prepared, spec, bench, observe);
    if let Err(RunError::Hardware(error)) = &end {
        bench.card.learn(error);
    }
    Ok(end?)
}

/// Reads a trace and replays it through its allocators by `run_cells`.
fn replay(
    plan: &Plan,
    place: usize,
    path: &Path,
    options: &ReadOptions,
    run_cells: impl FnOnce(&Trace, &Path, Vec<AllocSpec>, Observe) -> Vec<Cell>,
) -> anyhow::Result<TraceRun> {
    let imported = input::read(path, options)?;
    let trace = &imported.trace;
    anyhow::ensure!(
        !plan.check_expect || !trace.header.expectations.is_empty(),
        "{}: has no expect lines to check",
        path.display()
    );
    let specs = plan.specs_for(path, trace)?;
    let observe = plan.observe(specs.len());
    let cells = run_cells(trace, path, specs, observe);
    // A page of an earlier run is worth more than one that lacks allocators.
    let report = plan.report.as_ref().filter(|_| !cells.iter().any(Cell::is_cut));
    let report = report.map(|dir| write_report(dir, plan, place, trace, &cells));
    Ok(TraceRun {
        cells,
        report: report.transpose()?.flatten(),
        recorded_refusal: trace.first_attempt(),
        recorded_reserved_bytes_peak: trace
            .recorded_reserved_bytes_peak()
            .filter(|_| plan.asks_for_the_recorded_run()),
        share_is_bound: trace.header.history.share_is_bound(),
        warnings: imported.warnings,
        settings: plan.options.settings.clone().or(imported.trace.header.settings),
        phases: imported.trace.phases,
        expectations: imported.trace.header.expectations,
    })
}

/// Writes the page of a trace with the allocators that could be replayed.
fn write_report(
    dir: &ReportDir,
    plan: &Plan,
    place: usize,
    trace: &Trace,
    cells: &[Cell],
) -> anyhow::Result<Option<IndexEntry>> {
    let replayed = cells.iter().filter_map(|cell| {
        Some(ReportCell {
            spec: &cell.spec,
            capacity_bytes: None,
            label: cell.spec.to_string(),
            observed: cell.outcome.as_ref().ok()?,
            compared: None,
        })
    });
    dir.write(place, trace, &plan.options, &replayed.collect::<Vec<_>>())
}

/// Tells warnings, and errors of single allocators.
fn tell_problems(plan: &Plan, path: &Path, run: &TraceRun, console: &Console) -> Verdict {
    if !plan.quiet {
        for warning in &run.warnings {
            console.warn(path, warning);
        }
    }
    let cells = run.cells.iter().map(|cell| {
        let outcome = cell.outcome.as_ref().map(|observed| &observed.result);
        let verdict = setup::tell_cell(path, &cell.spec.to_string(), outcome, console);
        // The replay itself could be done: the answer is that the allocator is wrong.
        let broken = |result: &RunResult| Some(result.hardware.as_ref()?.touch.mismatches > 0);
        match outcome.ok().and_then(broken) {
            Some(true) => Verdict::No,
            _ => verdict,
        }
    });
    cells.max().unwrap_or(Verdict::Good)
}

fn write_files(
    plan: &Plan,
    runs: &[(&Path, TraceRun)],
    single: bool,
    is_partial: bool,
    console: &Console,
) -> anyhow::Result<()> {
    if results(runs).next().is_none() {
        return Ok(());
    }
    if let Some(file) = &plan.decisions {
        let parts = parts(runs, |observed| &observed.decisions);
        output::save(&file.path, |writer| {
            Ok(table::write_decisions(&parts, !single, file.format, writer)?)
        })?;
    }
    if let Some(file) = &plan.timeline {
        let rows: Vec<Vec<TimelineRow>> = match plan.observe.envelope {
            Some(_) => observed(runs)
                .map(|observed| observed.envelope.iter().map(EnvelopePoint::row).collect())
                .collect(),
            None => Vec::new(),
        };
        let mut parts = parts(runs, |observed| &observed.timeline);
        for (part, rows) in parts.iter_mut().zip(&rows) {
            part.rows = rows;
        }
        output::save(&file.path, |writer| {
            Ok(table::write_timeline(&parts, !single, file.format, writer)?)
        })?;
    }
    if let Some(dir) = plan.report.as_ref().filter(|_| !is_partial) {
        let named = |run: &TraceRun| {
            Some(IndexEntry { name: run.name().to_owned(), ..run.report.clone()? })
        };
        let entries = runs.iter().filter_map(|(_, run)| named(run));
        dir.write_index(&entries.collect::<Vec<_>>())?;
    }
    if let Some(path) = &plan.json {
        let results: Vec<&RunResult> = results(runs).collect();
        let text = json::all_or_partial(&results, single, is_partial)?;
        output::save_text(path, &text, console)?;
    }
    Ok(())
}

fn parts<'a, R>(
    runs: &'a [(&Path, TraceRun)],
    rows: impl Fn(&'a Observed) -> &'a Vec<R>,
) -> Vec<Part<'a, R>> {
    let mut parts = Vec::new();
    for (_, run) in runs {
        for observed in run.cells.iter().filter_map(|cell| cell.outcome.as_ref().ok()) {
            parts.push(Part {
                trace: &observed.result.trace.name,
                allocator: &observed.result.allocator.name,
                phases: &run.phases,
                rows: rows(observed),
            });
        }
    }
    parts
}

/// The lines of every replay, one after the other.
fn print_stalloc_log(
    runs: &[(&Path, TraceRun)],
    gpu: Option<u32>,
    console: &Console,
) -> anyhow::Result<()> {
    for (_, run) in runs {
        for observed in run.cells.iter().filter_map(|cell| cell.outcome.as_ref().ok()) {
            let text = text::stalloc_log(&observed.result, &observed.steps, gpu.unwrap_or(0));
            console.print(&text)?;
        }
    }
    Ok(())
}

fn print_tables(runs: &[(&Path, TraceRun)], console: &Console) -> anyhow::Result<()> {
    let screens = runs.iter().map(|(_, run)| {
        let results = run.results();
        let settings = run.settings.as_deref();
        let runs = TraceRuns {
            settings,
            share_is_bound: run.share_is_bound,
            recorded_refusal: run.recorded_refusal,
            recorded_reserved_bytes_peak: run.recorded_reserved_bytes_peak,
            results: &results,
        };
        text::run(&runs, console.style())
    });
    let screens: Vec<String> = screens.filter(|screen| !screen.is_empty()).collect();
    console.print(&screens.join("\n"))?;
    Ok(())
}
