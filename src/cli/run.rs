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
use super::input;
use super::output;
use super::progress::Progress;
use crate::alloc::registry::{self, Visitor};
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::alloc::{Allocator, BuildInputs};
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{CostProfile, GRANULARITY_BYTES};
use crate::engine::{self, Observe, Observed, RunOptions, RunResult, Status};
use crate::import::ReadOptions;
use crate::report::json;
use crate::report::table::{self, Part, TableFormat};
use crate::report::text::{self, TraceRuns};
use crate::trace::{AddressPolicy, Expectation, Trace};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab run --trace snapshot.pickle
      what PyTorch's allocator reserves for this job, with the settings that it was recorded with
  fraglab run --trace job.json --alloc caching,caching+max_split_size_mb=128,native
  fraglab run --trace job.json --pytorch-conf max_split_size_mb:128 --capacity 80GiB
  fraglab run --trace runs/*.pickle.gz --json - | jq '.[] | {n: .trace.name, f: .fragmentation}'
  fraglab run --trace traces/cases/*.txt --check-expect --quiet
  printf 'alloc a 100MiB\\nfree a\\n' | fraglab run --trace - --alloc native

The table: requested is what the program asked for, allocated the same as rounded, reserved what the \
allocator held of the device; excess = reserved - requested peak, frag = 1 - requested / reserved \
peak. Unused at an event: internal (rounding), deferred (freed, in use by another stream), other \
stream or pool (free, but not for this request), hard (free, in a segment with a live block), soft \
(free, in a wholly free segment). Device time a step: what the device calls cost from one mark \
stepN.* to that of the next step, and how much that is of the recorded time.

Exit codes: 0 good, 1 some allocator ran out of memory or an expectation failed, 2 something could \
not be done.";

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
    /// Traces of any format, told by content; `-` is standard input
    #[arg(long = "trace", num_args = 1.., value_name = "TRACE", required_unless_present = "more")]
    traces: Vec<PathBuf>,

    /// The same without --trace
    #[arg(value_name = "TRACE", id = "more")]
    more_traces: Vec<PathBuf>,

    /// Allocators, with commas: NAME[+key=value]... [default: caching]
    ///
    /// `fraglab list` names them and their parameters. `caching` is PyTorch's own and takes the
    /// recorded settings. Commas inside brackets or quotes do not split:
    /// caching+roundup_power2_divisions=[256:1,>:8].
    #[arg(long = "alloc", value_name = "A[,B...]", value_parser = parse_alloc_list)]
    allocs: Vec<AllocList>,

    /// What device calls cost: a profile that ships (see `fraglab list`) or a file NAME.json
    #[arg(long, value_name = "PROFILE", default_value = "h200")]
    profile: String,

    /// Physical memory of the simulated device, as in 80GiB
    ///
    /// By default the trace's own, else what the recorded device had, else unlimited.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, long_help = capacity_help())]
    capacity: Option<Bytes>,

    /// Most addresses that the device gives out, as in 2TiB; by default the trace's, else no end
    ///
    /// Counts the bytes of its mallocs and of the ranges that virtual memory calls reserve, mapped
    /// or not: an expandable segment reserves more than the device has, and a stitched block takes
    /// addresses of its own. Units as for --capacity.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    address_space: Option<Bytes>,

    /// Most mappings that the device allows at once; by default the trace's, else any number
    ///
    /// Each driver process tolerates a limited number of mappings. A page of an expandable segment
    /// is one, and so is every piece of a stitched block.
    #[arg(long, value_name = "N")]
    mappings: Option<u64>,

    /// Memory limit of the allocator, as in 60GiB; by default the trace's
    ///
    /// What torch.cuda.set_per_process_memory_fraction sets. Units as for --capacity.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<Bytes>,

    /// A PYTORCH_CUDA_ALLOC_CONF string in place of the recorded one
    ///
    /// As in max_split_size_mb:128,garbage_collection_threshold:0.8; an empty string means
    /// PyTorch's defaults. Settings that the program gave while it ran are then left out.
    /// Parameters of --alloc come on top.
    #[arg(long, value_name = "STRING")]
    pytorch_conf: Option<String>,

    /// Which addresses the simulated device gives out [default: the trace's, else chunks]
    #[arg(long, value_enum, value_name = "POLICY")]
    addresses: Option<Addresses>,

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

    /// Check the `expect` lines of the traces
    #[arg(long, long_help = CHECK_EXPECT_HELP)]
    check_expect: bool,

    /// End a replay at the first refused request instead of going on without the block
    #[arg(long)]
    stop_on_oom: bool,

    /// Check every allocator after every event against an independent map of memory; slow
    #[arg(long)]
    paranoid: bool,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// Print no tables, warnings or progress; errors and failed expectations still show
    #[arg(long, short)]
    quiet: bool,
}

fn capacity_help() -> String {
    format!(
        "Physical memory of the simulated device, as in 80GiB\n\nBy default the trace's own, else \
         what the recorded device had, else unlimited. {}",
        super::SIZES_HELP
    )
}

/// Address policies as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Addresses {
    /// As the driver does it: 32 MiB chunks, descending, leftovers of the newest filled first
    Chunks,
    /// Each range above all earlier ones
    Ascending,
    /// Each range below all earlier ones
    Descending,
    /// The addresses that the recording shows
    Recorded,
}

impl From<Addresses> for AddressPolicy {
    fn from(addresses: Addresses) -> Self {
        match addresses {
            Addresses::Chunks => AddressPolicy::Chunks,
            Addresses::Ascending => AddressPolicy::Ascending,
            Addresses::Descending => AddressPolicy::Descending,
            Addresses::Recorded => AddressPolicy::Recorded,
        }
    }
}

/// One `--alloc`.
#[derive(Clone, Debug)]
struct AllocList(Vec<AllocSpec>);

fn parse_alloc_list(text: &str) -> Result<AllocList, crate::alloc::spec::SpecError> {
    AllocSpec::parse_list(text).map(AllocList)
}

/// A size of which nothing would be no size.
pub(super) fn parse_size(text: &str) -> Result<Bytes, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(0)) => Err("expected a size above 0, as in 80GiB".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
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
    check_expect: bool,
    quiet: bool,
}

impl Plan {
    fn new(mut args: Args) -> anyhow::Result<Plan> {
        args.traces.append(&mut args.more_traces);
        input::check_stdin_once(&args.traces)?;
        let outputs: Vec<&PathBuf> =
            [&args.json, &args.decisions, &args.timeline].into_iter().flatten().collect();
        for (index, output) in outputs.iter().enumerate() {
            output::refuse_overwrite(&args.traces, output)?;
            anyhow::ensure!(
                !outputs[..index].iter().any(|other| output::same_place(other, output)),
                "{}: is named for two outputs: give each a file of its own",
                output.display()
            );
        }
        let mut specs: Vec<AllocSpec> = args.allocs.into_iter().flat_map(|list| list.0).collect();
        if specs.is_empty() && !args.check_expect {
            specs.push(AllocSpec { name: "caching".to_owned(), params: Vec::new() });
        }
        let options = RunOptions {
            capacity_bytes: args.capacity.map(|size| size.0),
            limit_bytes: args.limit.map(|size| size.0),
            address_bytes_max: args.address_space.map(|size| size.0),
            mappings_max: args.mappings,
            settings: args.pytorch_conf,
            address_policy: args.addresses.map(Into::into),
            stop_on_oom: args.stop_on_oom,
            paranoid: args.paranoid,
            address_seeds: args.address_seeds.unwrap_or(0),
            ..RunOptions::new(profile(&args.profile)?)
        };
        let plan = Plan {
            traces: args.traces,
            specs,
            options,
            observe: Observe {
                decisions: args.decisions.is_some(),
                timeline: args.timeline.is_some(),
            },
            gpu: args.gpu,
            json: args.json,
            decisions: TableFile::plan(args.decisions)?,
            timeline: TableFile::plan(args.timeline)?,
            check_expect: args.check_expect,
            quiet: args.quiet,
        };
        plan.check_specs()?;
        Ok(plan)
    }

    /// A misspelt allocator is told before any file is read.
    fn check_specs(&self) -> anyhow::Result<()> {
        for spec in &self.specs {
            self.check_spec(spec)?;
        }
        Ok(())
    }

    /// Whether an allocator can be built on a device of some size.
    fn check_spec(&self, spec: &AllocSpec) -> Result<(), SpecError> {
        let total_bytes = self.options.capacity_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES);
        let inputs = BuildInputs {
            settings: self.options.settings.clone(),
            limit_bytes: self.options.limit_bytes,
            device_total_bytes: Some(total_bytes),
            ..BuildInputs::default()
        };
        registry::build(spec, &inputs, Buildable)
    }

    /// Whether nothing is asked to be other than it was recorded.
    fn asks_for_the_recorded_run(&self) -> bool {
        let RunOptions { capacity_bytes, limit_bytes, settings, address_policy, .. } =
            &self.options;
        let RunOptions { address_bytes_max, mappings_max, .. } = &self.options;
        capacity_bytes.is_none()
            && limit_bytes.is_none()
            && address_bytes_max.is_none()
            && mappings_max.is_none()
            && settings.is_none()
            && address_policy.is_none()
    }

    /// What was typed but can hardly be meant.
    fn doubts(&self) -> Vec<String> {
        let sizes =
            [("--capacity", self.options.capacity_bytes), ("--limit", self.options.limit_bytes)];
        let small = sizes.into_iter().filter_map(|(flag, bytes)| {
            let bytes = bytes.filter(|&bytes| bytes < GRANULARITY_BYTES)?;
            Some(format!(
                "{flag} {} holds not one segment of {}: a number without a unit is bytes",
                Bytes(bytes),
                Bytes(GRANULARITY_BYTES)
            ))
        });
        small.collect()
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

/// Wants to know only whether an allocator can be built.
struct Buildable;

impl Visitor for Buildable {
    type Output = ();

    fn visit<A: Allocator + Send + 'static>(self, _allocator: A) {}
}

/// A profile that ships, or one from a file.
fn profile(name: &str) -> anyhow::Result<CostProfile> {
    if !name.ends_with(".json") {
        return Ok(CostProfile::shipped(name)?);
    }
    let text = std::fs::read_to_string(name).context(name.to_owned())?;
    CostProfile::from_json(&text).context(name.to_owned())
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
}

impl TraceRun {
    fn name(&self) -> &str {
        self.cells.iter().find_map(Cell::result).map_or("", |result| &result.trace.name)
    }

    fn results(&self) -> Vec<&RunResult> {
        self.cells.iter().filter_map(Cell::result).collect()
    }
}

/// Replays every trace through every allocator.
///
/// # Errors
/// If the plan makes no sense or an output cannot be written. What goes wrong with one trace is
/// told, and the others go on.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    let plan = Plan::new(args)?;
    for doubt in plan.doubts() {
        console.note(&format!("fraglab: warning: {doubt}"));
    }
    let mut verdict = Verdict::Good;
    let mut runs = Vec::new();
    let mut single = plan.traces.len() == 1;
    for (path, run) in plan.traces.iter().zip(replay_all(&plan)) {
        match run {
            Ok(run) => {
                single &= run.cells.len() == 1;
                verdict = verdict.max(tell_problems(&plan, path, &run, console));
                runs.push((path.as_path(), run));
            }
            Err(error) => {
                console.error(&error);
                verdict = Verdict::Failed;
            }
        }
    }
    tell_apart(&mut runs);
    write_files(&plan, &runs, single, console)?;
    let json_on_stdout = plan.json.as_deref().is_some_and(input::is_stdio);
    if !plan.quiet && !json_on_stdout {
        print_tables(&runs, console)?;
    }
    if plan.check_expect {
        let report = ExpectReport::of(results_with_expectations(&runs));
        verdict = verdict.max(report.verdict());
        report.print(plan.quiet, json_on_stdout, console)?;
    } else if results(&runs).any(|result| result.outcome.status == Status::Oom) {
        verdict = verdict.max(Verdict::No);
    }
    Ok(verdict)
}

/// Traces of one name are called by their paths, so that tables and JSON tell them apart.
fn tell_apart(runs: &mut [(&Path, TraceRun)]) {
    let names: Vec<String> = runs.iter().map(|(_, run)| run.name().to_owned()).collect();
    for (path, run) in runs {
        if names.iter().filter(|name| *name == run.name()).count() > 1 {
            for observed in run.cells.iter_mut().filter_map(|cell| cell.outcome.as_mut().ok()) {
                observed.result.trace.name = path.display().to_string();
            }
        }
    }
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
    let options = progress.read_options(plan.gpu);
    let runs = plan.traces.par_iter().map(|path| {
        let run = replay(plan, path, &options);
        progress.file_done();
        run
    });
    runs.collect()
}

fn replay(plan: &Plan, path: &Path, options: &ReadOptions) -> anyhow::Result<TraceRun> {
    let imported = input::read(path, options)?;
    let trace = &imported.trace;
    anyhow::ensure!(
        !plan.check_expect || !trace.header.expectations.is_empty(),
        "{}: has no expect lines to check",
        path.display()
    );
    let cells = plan.specs_for(path, trace)?.into_par_iter().map(|spec| {
        let outcome = engine::run(trace, &spec, &plan.options, plan.observe)
            .with_context(|| path.display().to_string());
        Cell { spec, outcome }
    });
    let cells = cells.collect();
    Ok(TraceRun {
        cells,
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

/// Tells warnings, and errors of single allocators.
fn tell_problems(plan: &Plan, path: &Path, run: &TraceRun, console: &Console) -> Verdict {
    if !plan.quiet {
        for warning in &run.warnings {
            console.warn(path, warning);
        }
    }
    let mut verdict = Verdict::Good;
    for cell in &run.cells {
        match &cell.outcome {
            Ok(observed) if observed.result.outcome.status == Status::Failed => {
                let message = observed.result.outcome.message.as_deref();
                console.error(&anyhow::anyhow!(
                    "{}: {}: {}",
                    path.display(),
                    cell.spec,
                    message.unwrap_or("the replay could not be done")
                ));
                verdict = Verdict::Failed;
            }
            Ok(_) => {}
            Err(error) => {
                console.error(error);
                verdict = Verdict::Failed;
            }
        }
    }
    verdict
}

fn write_files(
    plan: &Plan,
    runs: &[(&Path, TraceRun)],
    single: bool,
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
        let parts = parts(runs, |observed| &observed.timeline);
        output::save(&file.path, |writer| {
            Ok(table::write_timeline(&parts, !single, file.format, writer)?)
        })?;
    }
    if let Some(path) = &plan.json {
        let results: Vec<&RunResult> = results(runs).collect();
        output::save_text(path, &json::one_or_many(&results, single)?, console)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_nothing_are_refused() {
        assert_eq!(parse_size("80GiB"), Ok(Bytes(80 << 30)));
        assert!(parse_size("0MiB").unwrap_err().contains("above 0"));
        assert!(parse_size("lots").unwrap_err().contains("is not a unit"));
    }
}
