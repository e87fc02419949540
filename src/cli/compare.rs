//! `fraglab compare`: traces through allocators on devices, side by side.
//!
//! Every trace is read once and dropped after its last cell, and there are never more of them in
//! memory than threads; cells and the probes of their searches run in parallel, and what comes out
//! is collected in the order asked for.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::input;
use super::interrupt::{self, Partial, partial_path};
use super::output;
use super::progress::Progress;
use super::report_dir::{ReportArgs, ReportCell, ReportDir};
use super::setup::{self, CellArgs, ReadArgs, SetupArgs, parse_size};
use crate::alloc::registry;
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::device::CostProfile;
use crate::engine::{
    self, CapacitySearch, CompareCell, Compared, Observed, Order, Prepared, RunError, RunOptions,
};
use crate::import::ReadOptions;
use crate::report::html::IndexEntry;
use crate::report::json;
use crate::report::table::{self, TableFormat};
use crate::report::text::{self, Style, TraceComparison};
use crate::trace::Trace;
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab compare --trace snapshot.pickle
      every allocator, and the smallest device on which each completes
  fraglab compare --trace runs/*.pickle.gz --alloc caching,expandable,native -o results.csv
  fraglab compare --trace job.json --alloc caching,expandable --capacity 80GiB,40GiB
  fraglab compare --trace job.json --capacity auto,80GiB --sort capacity --format md
  fraglab compare --trace job.json --alloc caching,expandable,stitch --report report
      a page to look at: report/index.html
  fraglab compare --trace job.json --format json | jq '.[] | .smallest_capacity.capacity_bytes'

The table, a row an allocator and capacity: reserved peak is what the allocator held of the device, \
excess = reserved - requested peak, frag = 1 - requested / reserved peak, util = allocated / \
reserved peak, waste removed = 1 - excess / excess of caching on the same device (if caching is \
among the allocators and both complete); device calls and what they cost by the profile, time share \
= that cost / the recorded time (for traces with times); smallest capacity = the smallest multiple \
of 2 MiB of device memory at which every request is met, over = how far that is above the requested \
peak. On a terminal the best figure of a column is green.

The smallest capacity is found by bisection; then points below it are looked at, since an allocator \
that empties its cache under pressure may live on less than it fails on. A note tells if a larger \
capacity is not enough.

CSV and Parquet hold raw numbers: bytes, nanoseconds, fractions of one. JSON is always an array: the \
objects of `run --json`, with smallest_capacity {capacity_bytes, over_requested_bytes, \
over_requested, non_monotone, refused_bytes_max, probes, message} if it was looked for, and \
waste_removed.

Exit codes: 0 done, running out of memory is a result; 2 something could not be done; 130 \
interrupted: the cells that were done until then are shown and kept as partial, in \
results.partial.csv for results.csv.";

const CAPACITY_HELP: &str = "\
Devices, with commas: `auto`, or sizes as in 80GiB,40GiB

`auto` is the trace's own capacity, else what the recorded device had, else unlimited; with it the \
smallest capacity is looked for. A size gives a row for a device of that size, and nothing is looked \
for.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    #[command(flatten)]
    cells: CellArgs,

    /// Devices, with commas: `auto`, or sizes as in 80GiB,40GiB
    #[arg(long, value_name = "auto|SIZE,...", default_value = "auto", value_delimiter = ',')]
    #[arg(value_parser = parse_capacity, long_help = capacity_help())]
    capacity: Vec<Capacity>,

    /// Points below a smallest capacity that are looked at, beside the 8 just below it
    #[arg(long, value_name = "N", default_value_t = CapacitySearch::default().check_points)]
    check_points: u16,

    #[command(flatten)]
    setup: SetupArgs,

    /// Order of the rows of a trace; those of one capacity stand together
    #[arg(long, value_enum, value_name = "ORDER", default_value = "reserved")]
    sort: Sort,

    /// How to write the comparison [default: table, with --output what the name ends in]
    #[arg(long, value_enum, value_name = "FORMAT")]
    format: Option<Format>,

    /// Write the comparison to a file: .csv, .parquet, .md, .json or .txt
    ///
    /// Standard output then shows the table, unless --quiet is given.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Write the results as JSON too, `-` for standard output and nothing else there
    ///
    /// Always an array. What a clock measured stands under `wall`; everything else is the same in
    /// every run.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    reading: ReadArgs,
}

fn capacity_help() -> String {
    format!("{CAPACITY_HELP} {}", super::SIZES_HELP)
}

/// One `--capacity`: nothing for `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Capacity(Option<u64>);

fn parse_capacity(text: &str) -> Result<Capacity, String> {
    match text.trim() {
        "auto" => Ok(Capacity(None)),
        size => match parse_size(size) {
            Ok(size) => Ok(Capacity(Some(size.0))),
            Err(error) => Err(format!("{error}; or `auto`")),
        },
    }
}

/// Orders as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// Completed first, then by reserved peak, device time, name
    Reserved,
    /// By smallest capacity
    Capacity,
    /// Completed first, then by device time
    Time,
    /// By name
    Name,
    /// As given
    Given,
}

impl From<Sort> for Order {
    fn from(sort: Sort) -> Self {
        match sort {
            Sort::Reserved => Order::Reserved,
            Sort::Capacity => Order::Capacity,
            Sort::Time => Order::Time,
            Sort::Name => Order::Name,
            Sort::Given => Order::Given,
        }
    }
}

/// In which form a comparison is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table a trace, for people
    Table,
    /// One GitHub table
    Md,
    /// Raw numbers with a line of column names
    Csv,
    /// An array of results
    Json,
    /// As CSV; needs --output
    Parquet,
}

impl Format {
    fn from_path(path: &Path) -> anyhow::Result<Format> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("csv") => Ok(Format::Csv),
            Some("parquet") => Ok(Format::Parquet),
            Some("md") => Ok(Format::Md),
            Some("json") => Ok(Format::Json),
            Some("txt") => Ok(Format::Table),
            _ => anyhow::bail!(
                "{}: the name must end in .csv, .parquet, .md, .json or .txt to say what to write, \
                 or give --format",
                path.display()
            ),
        }
    }
}

/// What goes where.
struct Outputs {
    /// What standard output shows.
    shown: Option<Format>,
    /// What a file gets.
    file: Option<(PathBuf, Format)>,
    /// JSON beside it.
    json: Option<PathBuf>,
}

impl Outputs {
    fn plan(
        format: Option<Format>,
        output: Option<PathBuf>,
        json: Option<PathBuf>,
        quiet: bool,
    ) -> anyhow::Result<Outputs> {
        let file = match output.filter(|path| !input::is_stdio(path)) {
            Some(path) => {
                let format = format.map_or_else(|| Format::from_path(&path), Ok)?;
                Some((path, format))
            }
            None => None,
        };
        let table = (!quiet).then_some(Format::Table);
        let shown = if file.is_some() { table } else { format.or(table) };
        let json_is_shown = json.as_deref().is_some_and(input::is_stdio);
        anyhow::ensure!(
            !json_is_shown || file.is_some() || format.is_none(),
            "-: --format and --json both write to standard output: give one of them a file"
        );
        let outputs = Outputs { shown: shown.filter(|_| !json_is_shown), file, json };
        outputs.check_parquet()?;
        Ok(outputs)
    }

    fn check_parquet(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.shown != Some(Format::Parquet),
            "Parquet is not written to standard output: give --output FILE.parquet"
        );
        if let Some((path, Format::Parquet)) = &self.file {
            TableFormat::Parquet.check().with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Sends the comparison to files beside those that were named.
    fn keep_partial(&mut self) {
        let file = self.file.as_mut().map(|(path, _)| path);
        file.into_iter().chain(&mut self.json).for_each(|path| *path = partial_path(path));
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        let file = self.file.as_ref().map(|(path, _)| path);
        file.into_iter().chain(&self.json).map(PathBuf::as_path)
    }
}

/// What is to be done.
struct Plan {
    traces: Vec<PathBuf>,
    /// The cells of every trace.
    cells: Vec<CompareCell>,
    /// No allocators were named, so that one which has nothing to plan from is left out.
    by_default: bool,
    options: RunOptions,
    order: Order,
    outputs: Outputs,
    report: Option<ReportDir>,
    gpu: Option<u32>,
    quiet: bool,
}

impl Plan {
    fn new(args: Args) -> anyhow::Result<Plan> {
        let (traces, mut specs) = args.cells.paths_and_specs()?;
        let ReadArgs { gpu, quiet } = args.reading;
        let outputs = Outputs::plan(args.format, args.output, args.json, quiet)?;
        let report = args.report.plan(&traces)?;
        let report_files = report.as_ref().map(ReportDir::paths).unwrap_or_default();
        let report_files = report_files.iter().map(PathBuf::as_path);
        output::check_places(&traces, outputs.paths().chain(report_files))?;
        let by_default = specs.is_empty();
        if by_default {
            specs = default_specs()?;
        }
        let options = RunOptions { stop: interrupt::stop(), ..args.setup.options(&specs)? };
        let mut capacities = args.capacity;
        let mut seen = Vec::new();
        capacities.retain(|capacity| {
            let is_new = !seen.contains(capacity);
            seen.push(*capacity);
            is_new
        });
        // A misspelt allocator is told before any file is read.
        for (spec, capacity) in matrix(&specs, &capacities) {
            setup::check_spec(spec, &options, capacity.0)?;
        }
        let search = CapacitySearch { check_points: args.check_points };
        let cells = matrix(&specs, &capacities).map(|(spec, capacity)| CompareCell {
            spec: spec.clone(),
            capacity_bytes: capacity.0,
            search: capacity.0.is_none().then_some(search),
        });
        let cells = cells.collect();
        Ok(Plan {
            traces,
            cells,
            by_default,
            options,
            order: args.sort.into(),
            outputs,
            report,
            gpu,
            quiet,
        })
    }
}

impl Plan {
    /// The cell that a row is of.
    fn cell_of(&self, row: &Compared) -> Option<&CompareCell> {
        let mut devices: Vec<Option<u64>> = Vec::new();
        self.cells.iter().find(|cell| {
            if !devices.contains(&cell.capacity_bytes) {
                devices.push(cell.capacity_bytes);
            }
            // Cells of one device stand together, in the order of the groups.
            devices.len() == row.group + 1 && cell.spec.to_string() == row.result.allocator.name
        })
    }
}

/// Every allocator on every device, one device after the other.
fn matrix<'a>(
    specs: &'a [AllocSpec],
    capacities: &'a [Capacity],
) -> impl Iterator<Item = (&'a AllocSpec, Capacity)> {
    capacities.iter().flat_map(move |&capacity| specs.iter().map(move |spec| (spec, capacity)))
}

/// Every allocator that can be built from its name alone.
fn default_specs() -> anyhow::Result<Vec<AllocSpec>> {
    let plain = RunOptions::new(CostProfile::shipped("h200")?);
    let names = registry::list().into_iter();
    let specs = names.map(|info| AllocSpec { name: info.name.to_owned(), params: Vec::new() });
    Ok(specs.filter(|spec| setup::check_spec(spec, &plain, None).is_ok()).collect())
}

/// What is kept of one trace.
struct TraceRows {
    warnings: Vec<String>,
    settings: Option<String>,
    share_is_bound: bool,
    recorded_refusal: Option<(u64, u64)>,
    rows: Vec<Compared>,
    /// The page written for it.
    report: Option<IndexEntry>,
    /// Cells that could not be done.
    errors: Vec<anyhow::Error>,
    /// Cells that nobody asked for by name and that the trace has nothing for.
    left_out: usize,
}

/// Runs every cell of every trace.
///
/// # Errors
/// If the plan makes no sense or an output cannot be written. What goes wrong with one trace is
/// told, and the others go on.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    let mut plan = Plan::new(args)?;
    let mut capacities: Vec<u64> =
        plan.cells.iter().filter_map(|cell| cell.capacity_bytes).collect();
    capacities.dedup();
    setup::tell_doubts(capacities, plan.options.limit_bytes, console);
    let tell = |path: &Path, trace: &TraceRows| tell_problems(&plan, path, trace, console);
    let (mut traces, verdict) = setup::kept(&plan.traces, compare_all(&plan), tell, console);
    tell_apart(&mut traces);
    let partial = (verdict == Verdict::Interrupted).then(|| partial(&plan, &traces));
    if partial.is_some() {
        plan.outputs.keep_partial();
    }
    let has_rows = traces.iter().any(|(_, trace)| !trace.rows.is_empty());
    if has_rows {
        let traces: Vec<TraceRows> = traces.into_iter().map(|(_, trace)| trace).collect();
        if let Some(dir) = plan.report.as_ref().filter(|_| partial.is_none()) {
            let named = |trace: &TraceRows| {
                let name = trace.rows.first()?.result.trace.name.clone();
                Some(IndexEntry { name, ..trace.report.clone()? })
            };
            let entries = traces.iter().filter_map(named);
            dir.write_index(&entries.collect::<Vec<_>>())?;
        }
        write_all(&plan.outputs, &traces, partial, console)?;
    }
    if let Some(partial) = partial {
        partial.tell(has_rows, plan.outputs.paths(), console);
    } else if has_rows {
        interrupt::remove_partial(&plan.traces, plan.outputs.paths())?;
    }
    Ok(verdict)
}

/// What was done before Ctrl-C.
fn partial(plan: &Plan, traces: &[(&Path, TraceRows)]) -> Partial {
    let is_done = |error: &&anyhow::Error| !interrupt::is_interrupt(error);
    let done = traces.iter().map(|(_, trace)| {
        trace.rows.len() + trace.left_out + trace.errors.iter().filter(is_done).count()
    });
    Partial { done: done.sum(), all: plan.traces.len() * plan.cells.len(), part: "cell" }
}

fn compare_all(plan: &Plan) -> Vec<anyhow::Result<TraceRows>> {
    let cells = plan.traces.len().saturating_mul(plan.cells.len());
    let progress = Progress::over_cells(&plan.traces, cells, plan.quiet);
    let options = ReadOptions {
        limit_is_told: plan.options.limit_bytes.is_some(),
        ..progress.read_options(plan.gpu)
    };
    // A thread that waits for its cells may begin another trace, so that their number would have no
    // bound but for the parts.
    let places: Vec<(usize, &PathBuf)> = plan.traces.iter().enumerate().collect();
    let parts = places.chunks(rayon::current_num_threads().max(1));
    let compared = parts.flat_map(|part| {
        let part = part.par_iter().map(|&(place, path)| {
            let rows = compare_one(plan, (place, path), &options, &progress);
            if rows.is_err() {
                progress.cells_done(plan.cells.len(), String::new());
            }
            rows
        });
        part.collect::<Vec<_>>()
    });
    compared.collect()
}

fn compare_one(
    plan: &Plan,
    (place, path): (usize, &Path),
    options: &ReadOptions,
    progress: &Progress,
) -> anyhow::Result<TraceRows> {
    let imported = input::read(path, options)?;
    let trace = &imported.trace;
    let prepared = Prepared::new(trace, &plan.options);
    let cells = engine::compare(&prepared, &plan.cells, |cell| {
        progress.cells_done(1, format!("{}: {}", text::printable(&trace.header.name), cell.spec));
    });
    let mut rows = Vec::new();
    let mut errors: Vec<anyhow::Error> = Vec::new();
    let mut left_out = 0;
    for cell in cells {
        if plan.by_default && matches!(cell, Err(RunError::Spec(SpecError::NoProfile { .. }))) {
            left_out += 1;
            continue;
        }
        match cell.with_context(|| path.display().to_string()) {
            Ok(row) => rows.push(row),
            Err(error) => errors.push(error),
        }
    }
    plan.order.sort(&mut rows);
    // A page of an earlier run is worth more than one that lacks allocators.
    let report = plan.report.as_ref().filter(|_| !errors.iter().any(interrupt::is_interrupt));
    let report = report.map(|dir| {
        let written = write_report(dir, plan, place, trace, &prepared, &rows);
        written.with_context(|| path.display().to_string())
    });
    Ok(TraceRows {
        rows,
        report: report.transpose()?.flatten(),
        errors,
        left_out,
        recorded_refusal: trace.first_attempt(),
        share_is_bound: trace.header.history.share_is_bound(),
        settings: plan.options.settings.clone().or_else(|| trace.header.settings.clone()),
        warnings: imported.warnings,
    })
}

/// Writes the page of a trace. What a page shows beside the results is seen in one more replay a
/// cell.
fn write_report(
    dir: &ReportDir,
    plan: &Plan,
    place: usize,
    trace: &Trace,
    prepared: &Prepared<'_>,
    rows: &[Compared],
) -> anyhow::Result<Option<IndexEntry>> {
    let observe = ReportDir::observe(rows.len());
    let watched = rows.par_iter().map(|row| {
        let cell = plan.cell_of(row).context("a row without a cell")?;
        let mut observed = prepared.run(&cell.spec, cell.capacity_bytes, observe)?;
        observed.result = row.result.clone();
        Ok((cell, row, observed))
    });
    let watched: Vec<(&CompareCell, &Compared, Observed)> =
        watched.collect::<anyhow::Result<_>>()?;
    let several_devices = rows.iter().any(|row| row.group != rows[0].group);
    let cells = watched.iter().map(|(cell, row, observed)| {
        let capacity = cell.capacity_bytes.filter(|_| several_devices);
        let name = cell.spec.to_string();
        ReportCell {
            spec: &cell.spec,
            capacity_bytes: cell.capacity_bytes,
            label: capacity.map_or(name.clone(), |bytes| format!("{name}, {}", Bytes(bytes))),
            observed,
            compared: Some(row),
        }
    });
    dir.write(place, trace, &plan.options, &cells.collect::<Vec<_>>())
}

/// Tells warnings, and errors of single cells.
fn tell_problems(plan: &Plan, path: &Path, trace: &TraceRows, console: &Console) -> Verdict {
    if !plan.quiet {
        for warning in &trace.warnings {
            console.warn(path, warning);
        }
    }
    let rows = trace.rows.iter().map(|row| (&*row.result.allocator.name, Ok(&row.result)));
    let errors = trace.errors.iter().map(|error| ("", Err(error)));
    let cells = rows.chain(errors).map(|(name, cell)| setup::tell_cell(path, name, cell, console));
    cells.max().unwrap_or(Verdict::Good)
}

/// Calls traces of one name by their paths.
fn tell_apart(traces: &mut [(&Path, TraceRows)]) {
    let name = |trace: &TraceRows| trace.rows.first().map(|row| row.result.trace.name.clone());
    let names: Vec<(&Path, String)> =
        traces.iter().map(|(path, trace)| (*path, name(trace).unwrap_or_default())).collect();
    for (path, (_, trace)) in setup::paths_for_names(&names).into_iter().zip(traces) {
        let Some(path) = path else { continue };
        for row in &mut trace.rows {
            row.result.trace.name = path.display().to_string();
        }
    }
}

fn write_all(
    outputs: &Outputs,
    traces: &[TraceRows],
    partial: Option<Partial>,
    console: &Console,
) -> anyhow::Result<()> {
    let text = |format, style| formatted(traces, format, partial.is_some(), style);
    if let Some((path, format)) = &outputs.file {
        output::save(path, |file| match format {
            Format::Parquet => {
                Ok(table::write_comparison(&all_rows(traces), TableFormat::Parquet, file)?)
            }
            _ => Ok(file.write_all(text(*format, Style::default())?.as_bytes())?),
        })?;
    }
    if let Some(path) = &outputs.json {
        output::save_text(path, &text(Format::Json, Style::default())?, console)?;
    }
    if let Some(format) = outputs.shown {
        if let (Some(partial), Format::Table) = (partial, format) {
            console.print(&partial.heading(console))?;
        }
        console.print(&text(format, console.style())?)?;
    }
    Ok(())
}

fn all_rows(traces: &[TraceRows]) -> Vec<&Compared> {
    traces.iter().flat_map(|trace| &trace.rows).collect()
}

/// The comparison as text.
fn formatted(
    traces: &[TraceRows],
    format: Format,
    is_partial: bool,
    style: Style,
) -> anyhow::Result<String> {
    match format {
        Format::Table => Ok(tables(traces, style)),
        Format::Md => Ok(text::compare_markdown(&comparisons(traces))),
        Format::Json => Ok(json::all_or_partial(&all_rows(traces), false, is_partial)?),
        Format::Csv | Format::Parquet => {
            let mut bytes = Vec::new();
            table::write_comparison(&all_rows(traces), TableFormat::Csv, &mut bytes)?;
            Ok(String::from_utf8(bytes)?)
        }
    }
}

fn comparisons(traces: &[TraceRows]) -> Vec<TraceComparison<'_>> {
    let comparison = |trace| {
        let TraceRows { settings, share_is_bound, recorded_refusal, rows, .. }: &TraceRows = trace;
        TraceComparison {
            settings: settings.as_deref(),
            share_is_bound: *share_is_bound,
            recorded_refusal: *recorded_refusal,
            rows,
        }
    };
    traces.iter().map(comparison).collect()
}

fn tables(traces: &[TraceRows], style: Style) -> String {
    let comparisons = comparisons(traces);
    let screens = comparisons.iter().map(|comparison| text::compare(comparison, style));
    let screens: Vec<String> = screens.filter(|screen| !screen.is_empty()).collect();
    screens.join("\n")
}
