//! `fraglab experiment`: every cell of a figure or table, in parallel; results, figures, a report.
//!
//! Results of cells are kept in a folder as they come, so that an experiment that was stopped goes
//! on where it was. Files appear when all cells are done, and are the same in every run.

mod parts;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rayon::prelude::*;

use super::Verdict;
use super::console::Console;
use super::folders::{tell_passed_over, tell_some};
use super::input::{self, ReadFailure};
use super::progress::Progress;
use super::setup::{AllocList, parse_alloc_list};
use super::{interrupt, limits, named, output, setup};
use crate::alloc::spec::AllocSpec;
use crate::device::CostProfile;
use crate::engine::RunOptions;
use crate::experiment::{
    Cell, CellError, CellOutcome, CellRunner, Description, DescriptionError, Filter, Folders, Key,
    KeyBuilder, Kind, Rows, Shard, Step, Store, TraceError, TraceSource, by_trace,
    cells_and_others, check_fleet, fleet, fleet_rows, latency_rows, name_columns, read_description,
    rows,
};
use crate::report::experiment::{ReportNames, cells_text, experiment_markdown};
use crate::report::figure::experiment_svg;
use crate::report::json;
use crate::report::rows::{read_rows, row_objects, write_rows};
use crate::report::table::TableFormat;
use crate::report::text;
use crate::units::{counted, grouped};

const AFTER_HELP: &str = "\
Examples:
  fraglab experiment experiments/oom-frontier.toml
      reports/oom-frontier.csv, .md and a figure each as .svg
  fraglab experiment ranks/ --alloc caching,expandable -o out
      every trace of a folder through two allocators: out/ranks.csv and .md
  fraglab experiment experiments/*.toml -o reports-new
  fraglab experiment mine.toml --list
      the cells, without running them
  fraglab experiment mine.toml --only 'trace=llama*' --only allocator=caching
      rows of these cells on standard output; no report is written
  fraglab experiment mine.toml --figures-only
      figures and report again from the CSV that is there, as after a change of a title
  fraglab experiment ranks.toml --shard 3/16 -o parts
      the third of 16 parts, as on one of 16 machines: parts/ranks.shard-03-of-16.parquet
  fraglab experiment ranks.toml --merge parts -o out
      all 16 joined: the same files as a run that was not divided

The description is TOML; experiments/README.md has every key. Cells run on all threads, with at most \
one trace a thread in memory, and are kept in --cache as they are done: after Ctrl-C or a kill the \
same command runs only what is missing. What is kept is found by the bytes of the trace, the \
allocator, the options and the program itself. Ctrl-C leaves the rows that are done in \
NAME.partial.csv.

CSV and Parquet hold raw numbers: bytes, nanoseconds, fractions of one. The same description gives \
the same files, byte for byte, on any number of threads and in any number of parts.

Exit codes: 0 done, running out of memory is a result; 2 something could not be done; \
130 interrupted.";

/// Allocators of a folder where none are named.
const FOLDER_ALLOCATORS: &str = "caching,expandable";

/// Largest description in bytes: what is larger is some other file.
const DESCRIPTION_BYTES_MAX: u64 = 4 << 20;

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// Descriptions of experiments in TOML, or folders of traces
    #[arg(required = true, value_name = "X.toml|DIR")]
    descriptions: Vec<PathBuf>,

    /// Allocators for the traces of a folder [default: caching,expandable]
    ///
    /// The folder stands for a description that is called as it is and has all its traces: files
    /// whose names end as those of traces do, rank2 before rank10. Folders inside are not entered.
    #[arg(long = "alloc", value_name = "A[,B...]", value_parser = parse_alloc_list)]
    allocs: Vec<AllocList>,

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

    /// Run only the I-th of N parts, from 1, and write its rows into one file for --merge
    ///
    /// The traces go to the parts in turn. Parts may run at once, also with one --cache: each keeps
    /// its results in a file of its own, and all of them are taken up. Needs the feature
    /// `analytics`.
    #[arg(long, value_name = "I/N", conflicts_with_all = ["only", "figures_only", "merge"])]
    shard: Option<Shard>,

    /// Join the parts that lie in a folder, as --shard wrote them; run nothing, read no trace
    ///
    /// All parts must be there, each once, of one description and one build of fraglab.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["only", "list", "figures_only", "fresh"])]
    merge: Option<PathBuf>,

    /// Join parts although different builds of this version of fraglab made them
    ///
    /// Builds of one version on machines of different kinds differ in their bytes. Whether they
    /// come from the same source is then yours to know.
    #[arg(long, requires = "merge")]
    allow_mixed_builds: bool,

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
    /// Allocators of a folder; nothing for a description.
    allocators: Vec<AllocSpec>,
    /// Where names are looked for.
    folders: Folders,
    /// All cells, also those of other parts.
    cells: Vec<Cell>,
    store: Store,
}

impl<'a> Experiment<'a> {
    /// Reads a description, or makes that of a folder. No trace is needed yet.
    fn read(path: &'a Path, args: &Args) -> anyhow::Result<Experiment<'a>> {
        let allocators: Vec<AllocSpec> =
            args.allocs.iter().flat_map(|list| list.0.clone()).collect();
        // Where parts are merged the folder need not be there.
        let is_folder = path.is_dir() || (!allocators.is_empty() && !path.exists());
        let recordings = |base: &Path| {
            args.recordings.clone().unwrap_or_else(|| base.join("../../shared/recordings"))
        };
        let (description, base, allocators) = if is_folder {
            let (base, folder) = folder_names(path)?;
            let allocators = match allocators.is_empty() {
                true => AllocSpec::parse_list(FOLDER_ALLOCATORS)?,
                false => allocators,
            };
            refuse_twins(&allocators)?;
            (Description::of_folder(&folder, &allocators), base, allocators)
        } else {
            anyhow::ensure!(
                allocators.is_empty(),
                "{}: --alloc goes with a folder of traces: a description names its allocators itself",
                path.display()
            );
            let text = description_text(path)?;
            let description = read_description(&text)
                .map_err(|error| ReadFailure::of_description(path, &error))?;
            (description, path.parent().unwrap_or(Path::new("")).to_owned(), allocators)
        };
        let folders = Folders { recordings: recordings(&base), base };
        let (cells, store) = (Vec::new(), Store::forgetful());
        Ok(Experiment { path, description, allocators, folders, cells, store })
    }

    /// The traces of this part, or all.
    fn traces(&self, shard: Option<Shard>) -> Vec<(&TraceSource, Vec<usize>)> {
        let all = by_trace(&self.cells).into_iter().enumerate();
        let own = all.filter(|(at, _)| shard.is_none_or(|shard| shard.has(*at)));
        own.map(|(_, trace)| trace).collect()
    }

    /// What its files are called, without endings.
    fn stem(&self, args: &Args) -> String {
        let name = &self.description.name;
        args.shard.map_or_else(|| name.clone(), |shard| shard.stem(name))
    }

    /// The command that makes its results, as a report tells it.
    fn command(&self) -> String {
        let mut command = format!("fraglab experiment {}", shown_path(self.path));
        if !self.allocators.is_empty() {
            let allocators = self.allocators.iter().map(ToString::to_string);
            command += &format!(" --alloc {}", allocators.collect::<Vec<_>>().join(","));
        }
        command
    }

    fn failure(&self, error: &dyn std::fmt::Display) -> anyhow::Error {
        anyhow::anyhow!("{}: {error}", self.path.display())
    }
}

/// Refuses an allocator that is named twice: its results would stand twice, too.
fn refuse_twins(allocators: &[AllocSpec]) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    let twin = allocators.iter().map(ToString::to_string).find(|name| !seen.insert(name.clone()));
    twin.map_or(Ok(()), |name| {
        Err(anyhow::anyhow!("--alloc: {name} is named twice: once is enough"))
    })
}

/// The folder around a folder, and its own name.
fn folder_names(path: &Path) -> anyhow::Result<(PathBuf, String)> {
    // `.` has no name until it is told which folder that is.
    let whole = match path.file_name() {
        Some(_) => path.to_owned(),
        None => path.canonicalize().with_context(|| path.display().to_string())?,
    };
    let name = whole.file_name().map(|name| name.to_string_lossy().into_owned());
    let base = whole.parent().unwrap_or(Path::new("")).to_owned();
    Ok((base, name.unwrap_or_default()))
}

/// Runs experiments one after the other.
///
/// # Errors
/// If a description is wrong or an output cannot be written. Cells that could not be done are told,
/// and the others go on.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    output::check_places(&args.descriptions, args.json.as_deref().into_iter())?;
    if args.shard.is_some() || args.merge.is_some() {
        parts::check_build()?;
    }
    // What is wrong with any of them is told before the first is run.
    let mut experiments = Vec::new();
    let mut names = BTreeSet::new();
    for path in &args.descriptions {
        let experiment = open(path, args, console)?;
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
            list(experiment, args, console)?;
            continue;
        }
        let ran = results(experiment, args, console)?;
        verdict = verdict.max(ran.verdict);
        if args.json.is_some() {
            objects.extend(row_objects(&ran.rows));
        }
        if ran.verdict == Verdict::Interrupted {
            keep_partial_json(args, &objects, console)?;
            return Ok(verdict);
        }
        put(experiment, &ran, args, console)?;
    }
    if let Some(path) = &args.json {
        output::save_text(path, &json::pretty(&objects)?, console)?;
    }
    Ok(verdict)
}

/// Writes the rows that are done beside the JSON of an earlier run, each marked as partial.
fn keep_partial_json<T: serde::Serialize>(
    args: &Args,
    objects: &[T],
    console: &Console,
) -> anyhow::Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    let path = interrupt::partial_path(path);
    output::save_text(&path, &json::all_or_partial(objects, false, true)?, console)?;
    if !input::is_stdio(&path) {
        console.note(&format!("fraglab: rows that are done are in {}", path.display()));
    }
    Ok(())
}

/// The results of an experiment: run, joined from parts, or as they lie in the folder.
fn results(experiment: &Experiment<'_>, args: &Args, console: &Console) -> anyhow::Result<Ran> {
    if let Some(folder) = &args.merge {
        return parts::merge(experiment, folder, args, console);
    }
    if args.figures_only {
        return Ok(Ran::whole(committed(experiment, &args.output)?));
    }
    run(experiment, args, console)
}

/// Writes what was asked for: files, a part, or rows on standard output.
fn put(
    experiment: &Experiment<'_>,
    ran: &Ran,
    args: &Args,
    console: &Console,
) -> anyhow::Result<()> {
    let shows_json = args.json.as_deref().is_some_and(input::is_stdio);
    if !args.only.is_empty() {
        if !shows_json {
            let mut bytes = Vec::new();
            write_rows(&ran.rows, TableFormat::Csv, &mut bytes)?;
            console.print(&String::from_utf8(bytes)?)?;
        }
        return Ok(());
    }
    let stem = experiment.stem(args);
    let ending = if args.shard.is_some() { "parquet" } else { "csv" };
    if !ran.is_whole && args.output.join(format!("{stem}.{ending}")).exists() {
        // Results of an earlier run are worth more than rows without any.
        console.note(&format!("fraglab: {stem}: files of its results are left as they are"));
        return Ok(());
    }
    match args.shard {
        Some(shard) => {
            make_folder(&args.output)?;
            let file = parts::write(experiment, ran, shard, &args.output)?;
            remove_partial(&stem, args)?;
            if !args.quiet && !shows_json {
                console.print(&format!("{}\n", file.display()))?;
            }
        }
        None => write(experiment, &ran.rows, args, console, shows_json)?,
    }
    Ok(())
}

/// Takes away what an interrupted run left: the whole is there now. It goes before anything is
/// printed, which fails when the reader has left.
fn remove_partial(stem: &str, args: &Args) -> anyhow::Result<()> {
    let partial = args.output.join(partial_name(stem));
    match std::fs::remove_file(&partial) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| partial.display().to_string())
        }
        _ => Ok(()),
    }
}

fn make_folder(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

/// File of the rows of a run that was interrupted.
fn partial_name(stem: &str) -> String {
    format!("{stem}.partial.csv")
}

fn open<'a>(path: &'a Path, args: &Args, console: &Console) -> anyhow::Result<Experiment<'a>> {
    let mut experiment = Experiment::read(path, args)?;
    if args.figures_only || args.merge.is_some() {
        // No trace is needed, so none need be there.
        return Ok(experiment);
    }
    let description = &experiment.description;
    let (mut cells, others) = cells_and_others(description, &experiment.folders)
        .map_err(|error| wrong(path, description, &error))?;
    check_fleet(description, &cells).map_err(|error| experiment.failure(&error))?;
    if !args.quiet {
        tell_passed_over(&others.into_iter().collect::<Vec<_>>(), console);
    }
    let known = name_columns(description);
    for filter in &args.only {
        anyhow::ensure!(
            known.contains(&filter.column),
            "--only {filter}: cells have no {}: expected one of {}",
            filter.column,
            known.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        );
    }
    check_specs(path, description, &cells)?;
    let mut inputs: Vec<PathBuf> =
        by_trace(&cells).iter().map(|(source, _)| source.path().to_owned()).collect();
    inputs.push(path.to_owned());
    let files = file_names(&experiment, args);
    for file in files.iter().filter(|_| !args.list && args.only.is_empty()) {
        output::refuse_overwrite(&inputs, &args.output.join(file))?;
    }
    let columns = description.columns();
    cells.retain(|cell| cell.passes(description, &columns, &args.only));
    let is_latency = matches!(description.kind, Kind::DeviceLatency(_));
    anyhow::ensure!(
        !is_latency || args.shard.is_none(),
        "{}: --shard: nothing is replayed, so there is nothing to divide",
        path.display()
    );
    anyhow::ensure!(
        !cells.is_empty() || args.only.is_empty() || is_latency,
        "{}: no cell passes --only: `fraglab experiment {} --list` tells them",
        path.display(),
        path.display()
    );
    if !args.fresh && !cells.is_empty() {
        experiment.store = Store::open(&args.cache, &description.name, &experiment.stem(args))?;
    }
    experiment.cells = cells;
    Ok(experiment)
}

/// Whether every allocator can be built, each tried once.
fn check_specs(path: &Path, description: &Description, cells: &[Cell]) -> anyhow::Result<()> {
    let plain = RunOptions::new(CostProfile::shipped("h200")?);
    let mut checked = BTreeSet::new();
    for cell in cells {
        if !checked.insert((cell.allocator.to_string(), cell.settings.clone())) {
            continue;
        }
        let settings = cell.settings.as_deref().map(str::to_owned);
        let options = RunOptions { settings, ..plain.clone() };
        setup::check_spec(&cell.allocator, &options, None)
            .map_err(|error| description.error_of(cell, error.to_string()))
            .map_err(|error| wrong(path, description, &error))?;
    }
    Ok(())
}

/// What is wrong with a description; that of a folder has no text with a place in it.
fn wrong(path: &Path, description: &Description, error: &DescriptionError) -> anyhow::Error {
    if description.is_of_folder() {
        return anyhow::anyhow!("{}: {}", path.display(), error.message);
    }
    ReadFailure::of_description(path, error).into()
}

/// Every file that an experiment may write into its folder.
fn file_names(experiment: &Experiment<'_>, args: &Args) -> Vec<String> {
    let stem = experiment.stem(args);
    let endings = ["csv", "parquet", "md", "partial.csv"];
    let endings = endings.map(|ending| format!("{stem}.{ending}"));
    let description = &experiment.description;
    let fleet = description.fleet.as_ref().map(|_| fleet_name(description));
    endings.into_iter().chain(figure_names(description)).chain(fleet).collect()
}

/// The file of the summary over ranks.
fn fleet_name(description: &Description) -> String {
    format!("{}-fleet.csv", description.name)
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
    let mut seen = BTreeSet::new();
    let cells = experiment.cells.iter();
    let specs = cells.filter(|cell| seen.insert(cell.resolved.to_string()));
    let specs: Vec<AllocSpec> = specs.map(|cell| AllocSpec::clone(&cell.resolved)).collect();
    let mut options = RunOptions::new(CostProfile::shipped("h200")?);
    named::read(&specs, &mut options)?;
    Ok(options)
}

/// What tells this program from another build of it: its own bytes.
fn program() -> anyhow::Result<Key> {
    let bytes = std::env::current_exe().and_then(std::fs::read);
    let bytes = bytes.context("cannot read the program, whose bytes tell builds of it apart")?;
    Ok(KeyBuilder::default().with(env!("CARGO_PKG_VERSION")).with(bytes).key())
}

fn list(experiment: &Experiment<'_>, args: &Args, console: &Console) -> anyhow::Result<()> {
    let Experiment { description, cells, store, .. } = experiment;
    if let Kind::DeviceLatency(_) = description.kind {
        let count = latency(experiment)?.rows.len();
        console.print(&format!("{}: {count} points, nothing is replayed\n", description.name))?;
        return Ok(());
    }
    let options = runner_options(experiment)?;
    let runner = CellRunner::new(store, program()?, &options, limits::read_options())?;
    let traces = experiment.traces(args.shard);
    let places: usize = traces.iter().map(|(_, places)| places.len()).sum();
    // Every trace is hashed, which takes long where there are many.
    let progress = Progress::over_experiment(places, args.quiet);
    let known = traces.par_iter().map(|(_, places)| {
        let of_trace: Vec<&Cell> = places.iter().map(|&at| &cells[at]).collect();
        let kept = runner.kept(&of_trace);
        progress.cells_done(places.len(), String::new());
        places.iter().copied().zip(kept).collect::<Vec<_>>()
    });
    let mut known: Vec<(usize, bool)> = known.collect::<Vec<_>>().into_iter().flatten().collect();
    drop(progress);
    known.sort_unstable();
    let shown: Vec<&Cell> = known.iter().map(|(at, _)| &cells[*at]).collect();
    let kept: Vec<bool> = known.iter().map(|(_, kept)| *kept).collect();
    console.print(&cells_text(description, &shown, &kept))?;
    Ok(())
}

fn latency(experiment: &Experiment<'_>) -> anyhow::Result<Rows> {
    let rows = latency_rows(&experiment.description);
    Ok(rows.map_err(|error| ReadFailure::of_description(experiment.path, &error))?)
}

/// What became of the cells.
struct Ran {
    rows: Rows,
    /// The place of the cell of each row, with a key of the content of its trace; nothing where
    /// rows are read from files.
    #[cfg_attr(not(feature = "analytics"), expect(dead_code))]
    of_rows: Vec<(u64, Option<Key>)>,
    verdict: Verdict,
    /// Every trace could be read.
    is_whole: bool,
}

impl Ran {
    /// Rows of which nothing is missing.
    fn whole(rows: Rows) -> Ran {
        Ran { rows, of_rows: Vec::new(), verdict: Verdict::Good, is_whole: true }
    }
}

fn run(experiment: &Experiment<'_>, args: &Args, console: &Console) -> anyhow::Result<Ran> {
    let Experiment { description, cells, store, .. } = experiment;
    if let Kind::DeviceLatency(_) = description.kind {
        return Ok(Ran::whole(latency(experiment)?));
    }
    let stop = interrupt::stop();
    let options = RunOptions { stop: stop.clone(), ..runner_options(experiment)? };
    let traces = experiment.traces(args.shard);
    let count: usize = traces.iter().map(|(_, places)| places.len()).sum();
    let progress = Progress::over_experiment(count, args.quiet);
    let runner = CellRunner::new(store, program()?, &options, progress.read_options(None))?;
    let outcomes = runner.run(cells, &traces, rayon::current_num_threads(), |step| match step {
        Step::Reads(cell) => progress.name(text::printable(&cell.trace).into_owned()),
        Step::Done(cell) => progress.cells_done(1, text::printable(&cell.trace).into_owned()),
    });
    drop(progress);
    let told: Vec<(&Path, &String)> =
        outcomes.warnings.iter().map(|(at, told)| (traces[*at].0.path(), told)).collect();
    if !args.quiet {
        tell_some(&told, |(path, warning)| console.warn(path, warning), console);
    }
    let mut contents = vec![None; cells.len()];
    for ((_, places), content) in traces.iter().zip(&outcomes.contents) {
        places.iter().for_each(|&at| contents[at] = *content);
    }
    let done = outcomes.cells.into_iter().enumerate();
    let done = done.filter_map(|(at, outcome)| Some((at, outcome?)));
    let (places, done): (Vec<usize>, Vec<CellOutcome>) = done.unzip();
    let of_rows = places.iter().map(|&at| (at as u64, contents[at])).collect();
    let done_cells: Vec<&Cell> = places.iter().map(|&at| &cells[at]).collect();
    let mut verdict = tell_errors(experiment, &done_cells, &done, console);
    if let Some(error) = outcomes.store_error {
        let file = args.cache.join(format!("{}.jsonl", experiment.stem(args)));
        anyhow::bail!(
            "{}: cannot keep results: {error}; what it holds stays good: make room and run the same \
             command again, or say --fresh to keep nothing",
            file.display()
        );
    }
    let is_unread = |outcome: &CellOutcome| matches!(outcome.error, Some(CellError::Trace(_)));
    let is_whole = !done.iter().any(is_unread);
    let kept = done.iter().filter(|outcome| outcome.is_kept).count();
    let rows = rows(description, &done_cells, done);
    if rows.rows.len() < count {
        verdict = Verdict::Interrupted;
        tell_interrupt(experiment, &rows, count, args, console)?;
    } else if !args.quiet && args.only.is_empty() {
        let name = experiment.stem(args);
        console.note(&format!("fraglab: {name}: {count} cells, {kept} of them kept from before"));
    }
    Ok(Ran { rows, of_rows, verdict, is_whole })
}

/// Writes the rows that are done beside the files of an earlier run, and tells where.
fn tell_interrupt(
    experiment: &Experiment<'_>,
    rows: &Rows,
    count: usize,
    args: &Args,
    console: &Console,
) -> anyhow::Result<()> {
    let stem = experiment.stem(args);
    let done = grouped(rows.rows.len() as u64);
    let mut told = format!("fraglab: {stem}: interrupted: {done} of ");
    told += &format!("{} done", counted(count as u64, "cell"));
    if args.only.is_empty() {
        let path = args.output.join(partial_name(&stem));
        make_folder(&args.output)?;
        output::save(&path, |file| Ok(write_rows(rows, TableFormat::Csv, file)?))?;
        told += &format!(", in {}", path.display());
    }
    let next = if args.fresh { "begins anew: nothing was kept" } else { "goes on from there" };
    console.note(&format!("{told}; the same command {next}"));
    Ok(())
}

/// Tells why cells could not be done, each reason once.
fn tell_errors(
    experiment: &Experiment<'_>,
    cells: &[&Cell],
    outcomes: &[CellOutcome],
    console: &Console,
) -> Verdict {
    let mut seen = BTreeSet::new();
    let mut errors = Vec::new();
    for (cell, outcome) in cells.iter().zip(outcomes) {
        let Some(error) = &outcome.error else { continue };
        let error = match error {
            CellError::Trace(error) => match &**error {
                TraceError::Job { path, source } => ReadFailure::of_job(path, source).into(),
                other => anyhow::anyhow!("{other}"),
            },
            other => experiment.failure(&format!("{} on {}: {other}", cell.allocator, cell.trace)),
        };
        if seen.insert(error.to_string()) {
            errors.push(error);
        }
    }
    tell_some(&errors, |error| console.error(error), console);
    if errors.is_empty() { Verdict::Good } else { Verdict::Failed }
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
    let description = &experiment.description;
    let name = &description.name;
    let figures = figure_names(description);
    let drawn: Result<Vec<String>, _> =
        description.figures.iter().map(|figure| experiment_svg(figure, rows)).collect();
    let drawn = drawn.map_err(|error| experiment.failure(&error))?;
    let results = format!("{name}.csv");
    let names = ReportNames {
        command: &experiment.command(),
        version: env!("CARGO_PKG_VERSION"),
        figures: &figures,
        results: &results,
    };
    let report = experiment_markdown(description, rows, names);
    let report = report.map_err(|error| experiment.failure(&error))?;
    let fleet = description.fleet.as_ref().map(|spec| fleet(rows, spec)).transpose();
    let fleet = fleet.map_err(|error| experiment.failure(&error))?;
    make_folder(&args.output)?;
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
    if let Some(fleet) = &fleet {
        let mut bytes = Vec::new();
        write_rows(&fleet_rows(fleet), TableFormat::Csv, &mut bytes)?;
        save(&fleet_name(description), &bytes)?;
    }
    for (file, svg) in figures.iter().zip(&drawn) {
        save(file, svg.as_bytes())?;
    }
    save(&format!("{name}.md"), report.as_bytes())?;
    remove_partial(&experiment.stem(args), args)?;
    if !args.quiet && !is_silent {
        if let Some(fleet) = &fleet {
            console.print(&format!("{}\n", text::fleet(fleet, console.style())))?;
        }
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
