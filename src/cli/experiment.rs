//! `fraglab experiment`: every cell of a figure or table, in parallel; results, figures, a report.
//!
//! Results of cells are kept in a folder as they come, so that an experiment that was stopped goes
//! on where it was. Files appear when all cells are done, and are the same in every run.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::input::{self, ReadFailure};
use super::progress::Progress;
use super::{named, output, setup};
use crate::alloc::spec::AllocSpec;
use crate::device::CostProfile;
use crate::engine::RunOptions;
use crate::experiment::{
    Cell, CellError, CellOutcome, CellRunner, Description, Filter, Folders, KeyBuilder, Kind, Rows,
    Store, TraceError, TraceOutcome, by_trace, cells, latency_rows, name_columns, read_description,
    rows,
};
use crate::report::experiment::{ReportNames, cells_text, experiment_markdown};
use crate::report::figure::experiment_svg;
use crate::report::json;
use crate::report::rows::{read_rows, row_objects, write_rows};
use crate::report::table::TableFormat;
use crate::report::text;

const AFTER_HELP: &str = "\
Examples:
  fraglab experiment experiments/oom-frontier.toml
      reports/oom-frontier.csv, .md and a figure each as .svg
  fraglab experiment experiments/*.toml -o reports-new
  fraglab experiment mine.toml --list
      the cells, without running them
  fraglab experiment mine.toml --only 'trace=llama*' --only allocator=caching
      rows of these cells on standard output; no report is written
  fraglab experiment mine.toml --figures-only
      figures and report again from the CSV that is there, as after a change of a title

The description is TOML; experiments/README.md has every key. Cells run on all threads and are \
kept in --cache as they are done: after an interruption the same command runs only what is missing. \
What is kept is found by the bytes of the trace, the allocator, the options and the program itself.

CSV and Parquet hold raw numbers: bytes, nanoseconds, fractions of one. The same description gives \
the same files, byte for byte, on any number of threads.

Exit codes: 0 done, running out of memory is a result; 2 something could not be done.";

/// Largest description in bytes: what is larger is some other file.
const DESCRIPTION_BYTES_MAX: u64 = 4 << 20;

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// Descriptions of experiments in TOML
    #[arg(required = true, value_name = "X.toml")]
    descriptions: Vec<PathBuf>,

    /// Folder for results, figures and reports
    #[arg(long, short, value_name = "DIR", default_value = "reports")]
    output: PathBuf,

    /// What {recordings} stands for [default: ../../shared/recordings from X.toml]
    #[arg(long, value_name = "DIR")]
    recordings: Option<PathBuf>,

    /// Where results of cells are kept between runs
    #[arg(long, value_name = "DIR", default_value = "target/fraglab-experiments")]
    cache: PathBuf,

    /// Keep nothing and take up nothing that was kept
    #[arg(long, conflicts_with = "cache")]
    fresh: bool,

    /// Run only cells whose column has a value, as in trace=llama* or set!=frontier; all must hold
    ///
    /// Columns are those up to `limit`; several values stand with | between them. The rows go to
    /// standard output as CSV, and no files are written. `waste_removed` needs the row of `caching`
    /// among them.
    #[arg(long, value_name = "COLUMN=VALUE")]
    only: Vec<Filter>,

    /// Tell the cells and how many are still to run; run nothing
    #[arg(long, visible_alias = "dry-run")]
    list: bool,

    /// Make figures and report from the CSV that is in the folder; run nothing
    #[arg(long, conflicts_with_all = ["list", "only"])]
    figures_only: bool,

    /// Write the rows as JSON too, `-` for standard output and nothing else there
    ///
    /// Always an array, an object a row, with the names of the CSV's columns.
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    json: Option<PathBuf>,

    /// Print no summary or progress; what failed still shows
    #[arg(long, short)]
    quiet: bool,
}

/// An experiment and what is kept of it.
struct Experiment<'a> {
    path: &'a Path,
    description: Description,
    cells: Vec<Cell>,
    store: Store,
}

/// Runs experiments one after the other.
///
/// # Errors
/// If a description is wrong or an output cannot be written. Cells that could not be done are told,
/// and the others go on.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    output::check_places(&args.descriptions, args.json.as_deref().into_iter())?;
    let shows_json = args.json.as_deref().is_some_and(input::is_stdio);
    // What is wrong with any of them is told before the first is run.
    let mut experiments = Vec::new();
    let mut names = BTreeSet::new();
    for path in &args.descriptions {
        let experiment = open(path, args)?;
        let name = &experiment.description.name;
        anyhow::ensure!(
            names.insert(name.clone()),
            "{}: another experiment is called {name} too: give each a name of its own",
            path.display()
        );
        experiments.push(experiment);
    }
    let mut verdict = Verdict::Good;
    let mut objects = Vec::new();
    for experiment in &experiments {
        if args.list {
            list(experiment, &runner_options(experiment)?, console)?;
            continue;
        }
        let (rows, is_whole) = if args.figures_only {
            (committed(experiment, &args.output)?, true)
        } else {
            let ran = run(experiment, args, console)?;
            verdict = verdict.max(ran.verdict);
            (ran.rows, ran.is_whole)
        };
        if args.json.is_some() {
            objects.extend(row_objects(&rows));
        }
        let name = format!("{}.csv", experiment.description.name);
        if args.only.is_empty() && !is_whole && args.output.join(name).exists() {
            // Results of an earlier run are worth more than rows without any.
            console.note(&format!(
                "fraglab: {}: files of its results are left as they are",
                text::printable(&experiment.description.name)
            ));
        } else if args.only.is_empty() {
            write(experiment, &rows, args, console, shows_json)?;
        } else if !shows_json {
            let mut bytes = Vec::new();
            write_rows(&rows, TableFormat::Csv, &mut bytes)?;
            console.print(&String::from_utf8(bytes)?)?;
        }
    }
    if let Some(path) = &args.json {
        output::save_text(path, &json::pretty(&objects)?, console)?;
    }
    Ok(verdict)
}

fn open<'a>(path: &'a Path, args: &Args) -> anyhow::Result<Experiment<'a>> {
    let text = description_text(path)?;
    let description =
        read_description(&text).map_err(|error| ReadFailure::of_description(path, &error))?;
    if args.figures_only {
        // No trace is needed, so none need be there.
        return Ok(Experiment { path, description, cells: Vec::new(), store: Store::forgetful() });
    }
    let base = path.parent().unwrap_or(Path::new("")).to_owned();
    let beside = base.join("../../shared/recordings");
    let folders = Folders { recordings: args.recordings.clone().unwrap_or(beside), base };
    let mut cells =
        cells(&description, &folders).map_err(|error| ReadFailure::of_description(path, &error))?;
    let known = name_columns(&description);
    for filter in &args.only {
        anyhow::ensure!(
            known.contains(&filter.column),
            "--only {filter}: cells have no {}: expected one of {}",
            filter.column,
            known.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        );
    }
    let plain = RunOptions::new(CostProfile::shipped("h200")?);
    for cell in &cells {
        let options = RunOptions { settings: cell.settings.clone(), ..plain.clone() };
        setup::check_spec(&cell.allocator, &options, None)
            .map_err(|error| description.error_of(cell, error.to_string()))
            .map_err(|error| ReadFailure::of_description(path, &error))?;
    }
    let mut inputs: Vec<PathBuf> =
        by_trace(&cells).iter().map(|(source, _)| source.path().to_owned()).collect();
    inputs.push(path.to_owned());
    for file in file_names(&description).iter().filter(|_| !args.list && args.only.is_empty()) {
        output::refuse_overwrite(&inputs, &args.output.join(file))?;
    }
    cells.retain(|cell| cell.passes(&description, &args.only));
    anyhow::ensure!(
        !cells.is_empty()
            || args.only.is_empty()
            || matches!(description.kind, Kind::DeviceLatency(_)),
        "{}: no cell passes --only: `fraglab experiment {} --list` tells them",
        path.display(),
        path.display()
    );
    let store = if args.fresh || cells.is_empty() {
        Store::forgetful()
    } else {
        let file = args.cache.join(format!("{}.jsonl", description.name));
        Store::open(&file).with_context(|| file.display().to_string())?
    };
    Ok(Experiment { path, description, cells, store })
}

/// Every file that an experiment may write into its folder.
fn file_names(description: &Description) -> Vec<String> {
    let name = &description.name;
    let endings = ["csv", "parquet", "md"].map(|ending| format!("{name}.{ending}"));
    endings.into_iter().chain(figure_names(description)).collect()
}

/// The file of each figure.
fn figure_names(description: &Description) -> Vec<String> {
    let figures = description.figures.iter();
    figures.map(|figure| format!("{}-{}.svg", description.name, figure.name)).collect()
}

fn description_text(path: &Path) -> anyhow::Result<String> {
    use std::io::Read as _;

    let name = || path.display().to_string();
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(name)?;
    file.take(DESCRIPTION_BYTES_MAX + 1).read_to_end(&mut bytes).with_context(name)?;
    let text = Some(bytes).filter(|bytes| bytes.len() as u64 <= DESCRIPTION_BYTES_MAX);
    text.and_then(|bytes| String::from_utf8(bytes).ok()).with_context(|| {
        format!("{}: is not the description of an experiment: expected TOML", path.display())
    })
}

/// Options of all cells, with the files that their allocators name.
fn runner_options(experiment: &Experiment<'_>) -> anyhow::Result<RunOptions> {
    let mut specs: Vec<AllocSpec> = Vec::new();
    for cell in &experiment.cells {
        if !specs.contains(&cell.resolved) {
            specs.push(cell.resolved.clone());
        }
    }
    let mut options = RunOptions::new(CostProfile::shipped("h200")?);
    named::read(&specs, &mut options)?;
    Ok(options)
}

/// What tells this program from another build of it: its own bytes.
fn program() -> anyhow::Result<String> {
    let bytes = std::env::current_exe().and_then(std::fs::read);
    let bytes = bytes.context("cannot read the program, whose bytes tell builds of it apart")?;
    let key = KeyBuilder::default().with(env!("CARGO_PKG_VERSION")).with(bytes).key();
    Ok(format!("{key:?}"))
}

fn list(
    experiment: &Experiment<'_>,
    options: &RunOptions,
    console: &Console,
) -> anyhow::Result<()> {
    let Experiment { description, cells, store, .. } = experiment;
    if let Kind::DeviceLatency(_) = description.kind {
        let count = latency(experiment)?.rows.len();
        console.print(&format!("{}: {count} points, nothing is replayed\n", description.name))?;
        return Ok(());
    }
    let program = program()?;
    let runner = CellRunner::new(store, &program, options)?;
    let mut kept = vec![false; cells.len()];
    for (_, places) in by_trace(cells) {
        let of_trace: Vec<&Cell> = places.iter().map(|&at| &cells[at]).collect();
        for (at, is_kept) in places.iter().zip(runner.kept(&of_trace)) {
            kept[*at] = is_kept;
        }
    }
    console.print(&cells_text(description, cells, &kept))?;
    Ok(())
}

fn latency(experiment: &Experiment<'_>) -> anyhow::Result<Rows> {
    let rows = latency_rows(&experiment.description);
    Ok(rows.map_err(|error| ReadFailure::of_description(experiment.path, &error))?)
}

/// What became of the cells.
struct Ran {
    rows: Rows,
    verdict: Verdict,
    /// Every trace could be read.
    is_whole: bool,
}

fn run(experiment: &Experiment<'_>, args: &Args, console: &Console) -> anyhow::Result<Ran> {
    let Experiment { description, cells, store, .. } = experiment;
    if let Kind::DeviceLatency(_) = description.kind {
        return Ok(Ran { rows: latency(experiment)?, verdict: Verdict::Good, is_whole: true });
    }
    let options = runner_options(experiment)?;
    let program = program()?;
    let runner = CellRunner::new(store, &program, &options)?;
    let traces = by_trace(cells);
    let files: Vec<PathBuf> = traces.iter().map(|(source, _)| source.path().to_owned()).collect();
    let progress = Progress::over_cells(&files, cells.len(), args.quiet);
    let mut warnings: Vec<(&Path, String)> = Vec::new();
    let mut outcomes: Vec<Option<CellOutcome>> = cells.iter().map(|_| None).collect();
    // A thread that waits for its cells may begin another trace, so that their number would have no
    // bound but for the parts.
    for part in traces.chunks(rayon::current_num_threads().max(1)) {
        let done: Vec<TraceOutcome> = part
            .par_iter()
            .map(|(_, places)| {
                let of_trace: Vec<&Cell> = places.iter().map(|&at| &cells[at]).collect();
                runner.run(&of_trace, |cell| {
                    let newest = format!("{}: {}", text::printable(&cell.trace), cell.allocator);
                    progress.cells_done(1, newest);
                })
            })
            .collect();
        for ((source, places), done) in part.iter().zip(done) {
            for warning in done.warnings {
                warnings.push((source.path(), warning));
            }
            for (&at, outcome) in places.iter().zip(done.cells) {
                outcomes[at] = Some(outcome);
            }
        }
    }
    drop(progress);
    for (path, warning) in warnings.iter().filter(|_| !args.quiet) {
        console.warn(path, warning);
    }
    let outcomes: Vec<CellOutcome> = outcomes.into_iter().flatten().collect();
    let verdict = tell_errors(experiment, &outcomes, console);
    if !args.quiet && args.only.is_empty() {
        let kept = outcomes.iter().filter(|outcome| outcome.is_kept).count();
        console.note(&format!(
            "fraglab: {}: {} cells, {kept} of them kept from before",
            description.name,
            cells.len()
        ));
    }
    let is_unread = |outcome: &CellOutcome| matches!(outcome.error, Some(CellError::Trace(_)));
    let is_whole = !outcomes.iter().any(is_unread);
    Ok(Ran { rows: rows(description, cells, &outcomes), verdict, is_whole })
}

/// Tells why cells could not be done, each reason once.
fn tell_errors(
    experiment: &Experiment<'_>,
    outcomes: &[CellOutcome],
    console: &Console,
) -> Verdict {
    let mut told = BTreeSet::new();
    for (cell, outcome) in experiment.cells.iter().zip(outcomes) {
        let Some(error) = &outcome.error else { continue };
        let error = match error {
            CellError::Trace(error) => match &**error {
                TraceError::Job { path, source } => ReadFailure::of_job(path, source).into(),
                other => anyhow::anyhow!("{other}"),
            },
            other => anyhow::anyhow!(
                "{}: {} on {}: {other}",
                experiment.path.display(),
                cell.allocator,
                cell.trace
            ),
        };
        if told.insert(error.to_string()) {
            console.error(&error);
        }
    }
    if told.is_empty() { Verdict::Good } else { Verdict::Failed }
}

/// The rows that lie in the folder.
fn committed(experiment: &Experiment<'_>, folder: &Path) -> anyhow::Result<Rows> {
    let path = folder.join(format!("{}.csv", experiment.description.name));
    let name = || path.display().to_string();
    let file = File::open(&path).with_context(name)?;
    read_rows(experiment.description.columns(), file).with_context(name)
}

fn write(
    experiment: &Experiment<'_>,
    rows: &Rows,
    args: &Args,
    console: &Console,
    is_silent: bool,
) -> anyhow::Result<()> {
    let Experiment { path, description, .. } = experiment;
    let name = &description.name;
    let of = |error: &dyn std::fmt::Display| anyhow::anyhow!("{}: {error}", path.display());
    let figures = figure_names(description);
    let drawn: Result<Vec<String>, _> =
        description.figures.iter().map(|figure| experiment_svg(figure, rows)).collect();
    let drawn = drawn.map_err(|error| of(&error))?;
    let results = format!("{name}.csv");
    let names = ReportNames {
        command: &format!("fraglab experiment {}", shown_path(path)),
        version: env!("CARGO_PKG_VERSION"),
        figures: &figures,
        results: &results,
    };
    let report = experiment_markdown(description, rows, names).map_err(|error| of(&error))?;
    std::fs::create_dir_all(&args.output).with_context(|| args.output.display().to_string())?;
    let mut written = Vec::new();
    let mut save = |file: &str, text: &[u8]| {
        written.push(args.output.join(file));
        output::save(&args.output.join(file), |to| Ok(to.write_all(text)?))
    };
    if !args.figures_only {
        let mut bytes = Vec::new();
        write_rows(rows, TableFormat::Csv, &mut bytes)?;
        save(&results, &bytes)?;
        if TableFormat::Parquet.check().is_ok() {
            let mut bytes = Vec::new();
            write_rows(rows, TableFormat::Parquet, &mut bytes)?;
            save(&format!("{name}.parquet"), &bytes)?;
        }
    }
    for (file, svg) in figures.iter().zip(&drawn) {
        save(file, svg.as_bytes())?;
    }
    save(&format!("{name}.md"), report.as_bytes())?;
    if !args.quiet && !is_silent {
        if !args.figures_only && TableFormat::Parquet.check().is_err() {
            console.note(
                "fraglab: this fraglab was built without the feature `analytics`, which writes \
                 Parquet: results are in CSV only",
            );
        }
        for path in written {
            console.print(&format!("{}\n", path.display()))?;
        }
    }
    Ok(())
}

/// A description as a command names it from the folder around its own, so that a report does not
/// hang on where the repository lies.
fn shown_path(path: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let file = name(path).unwrap_or_default();
    match path.parent().and_then(name) {
        Some(folder) => format!("{folder}/{file}"),
        None => file,
    }
}
