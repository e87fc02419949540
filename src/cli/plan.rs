//! `fraglab plan`: offsets ahead of time, and how far from the best they can be.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;

use super::Verdict;
use super::console::Console;
use super::input::{self, is_stdio};
use super::interrupt::{self, Partial, partial_path};
use super::output;
use super::progress::Progress;
use super::setup::{parse_size, parse_time};
use crate::alloc::planned::synthesis::{StallocPlanner, SynthesisOptions, synthesize};
use crate::engine::{
    self, PlanResult, PlanSource, Planned, StallocHints, StallocWay, StreamRule, lifetimes,
    plan_as_stalloc, problem_from_minimalloc, stalloc_hints,
};
use crate::import::{Imported, MinimallocCsv, ReadOptions, write_minimalloc_csv};
use crate::plan::synthetic::{self, Shape};
use crate::plan::{Planner, Problem, SolveOptions};
use crate::report::figure::{PackingLabels, packing_svg};
use crate::report::plan_file::write_plan;
use crate::report::{json, text};
use crate::trace::Trace;
use crate::units::{Bytes, whole_number};

const AFTER_HELP: &str = "\
Examples:
  fraglab plan snapshot.pickle -o plan.json
      offsets for every block of a run, as if all lives were known ahead
  fraglab plan recordings/*.pickle.gz
      a row a trace: height, lower bound, gap
  fraglab plan buffers.csv --capacity 1048576 -o placed.csv
      MiniMalloc's CSV in and out; exit code 1 and the reason if it cannot fit
  fraglab plan snapshot.pickle --time 1m --figure packing.svg
  fraglab plan mem_log_dev0.txt --planner stalloc-size --format stalloc -o Synthesizer
      the plan and interval files that STAlloc's tool would write into that folder
  fraglab plan --synthetic dense:1e5 --json - | jq .gap
      an LLM-shaped problem made on the spot

The lower bound is what is live at one instant; where search proves more, that. `proven` means that \
no packing can be lower. A search ends when the bound is reached, when the --capacity is met, or \
with --time. With --work in place of --time the result is the same on every machine and with any \
number of threads.

All lives of the trace are known here: it is the best that could be done. What can be done from the \
first steps alone is what `fraglab run --alloc planned` shows.

Lives are counted in events: a block lives from its alloc to its free, or until the other stream is \
done with it. With --streams together blocks of all streams share memory as if streams waited for \
each other; apart gives each stream a pool of its own.

MiniMalloc's CSV has columns id,lower,upper,size[,alignment,hint,gaps,offset]; a number in offset is \
the only place that buffer may have. It is told by its first line.

Ctrl-C ends a search as --time does: what was found so far is a valid packing. It is shown and \
marked `partial`, and written beside what was asked for, into plan.partial.json for plan.json.

Exit codes: 0 packed, 1 it does not fit into --capacity, 2 something could not be done, 130 \
interrupted.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// Traces of any format or CSVs of buffers, told by content; `-` is standard input
    #[arg(value_name = "TRACE", required_unless_present = "synthetic")]
    inputs: Vec<PathBuf>,

    /// An LLM-shaped problem instead of files: dense:1e5, moe:1e6,seed=3, thin:1e4
    ///
    /// KIND:BLOCKS[,KEY=VALUE]... with kinds dense, moe, thin and keys seed, layers, in_flight,
    /// micro_batches, hidden. The same shape is the same problem everywhere.
    #[arg(long, value_name = "SHAPE", conflicts_with = "inputs")]
    synthetic: Option<Shape>,

    /// Longest time for one problem, as in 500ms, 10s, 1h
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_time)]
    time: Duration,

    /// Most work for one problem in place of --time, in units of about one buffer looked at
    #[arg(long, value_name = "UNITS", conflicts_with = "time", value_parser = parse_count)]
    work: Option<u64>,

    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Memory that the packing must fit into, as in 80GiB; ends with the first that does
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<Bytes>,

    /// Which planner
    #[arg(long, value_enum, value_name = "NAME", default_value = "best")]
    planner: PlannerName,

    /// Round sizes up to multiples of this [default: 512 for traces, 1 for CSV]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    granularity: Option<Bytes>,

    /// Whether streams may share memory
    #[arg(long, value_enum, value_name = "RULE", default_value = "together")]
    streams: Streams,

    /// Write the offsets to a file: plan.json, or MiniMalloc's CSV for a name in .csv; with --format
    /// stalloc a folder
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// The form of --output [default: by its name]
    #[arg(long, value_enum, value_name = "FORMAT", requires = "output")]
    format: Option<Format>,

    /// With --format stalloc: refuse what STAlloc's own synthesizer refuses, and keep its faults
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    faithful: bool,

    /// Draw the packing as SVG
    #[arg(long, value_name = "FILE.svg")]
    figure: Option<PathBuf>,

    /// Write how good the packing is as JSON, `-` for standard output and nothing else there
    ///
    /// {height_bytes, lower_bound_bytes, proven, buffers, binding: [...], wall, ...}: an object for
    /// one problem, an array for several. What a clock measured stands under `wall`.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,

    /// Print no text, warnings or progress; what failed still shows
    #[arg(long, short)]
    quiet: bool,
}

impl Args {
    /// The form of a file, by what was asked for or by its name.
    fn output_format(&self, path: &Path) -> anyhow::Result<Format> {
        let name = path.to_string_lossy().to_ascii_lowercase();
        let bare = name.trim_end_matches(".gz").trim_end_matches(".zst");
        match self.format {
            Some(Format::Stalloc) if is_stdio(path) => {
                anyhow::bail!("-: --format stalloc writes a folder: give --output a name")
            }
            Some(format) => Ok(format),
            None if bare.ends_with(".csv") => Ok(Format::Csv),
            None if bare.ends_with(".json") || is_stdio(path) => Ok(Format::Json),
            None => anyhow::bail!(
                "{}: the name must end in .json or .csv to say what to write, or give --format",
                path.display()
            ),
        }
    }
}

/// Planners as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PlannerName {
    /// Many orders, repair, exact search
    Best,
    /// Largest first, each at the lowest place: what several frameworks do
    GreedyBySize,
    /// STAlloc's default planner: size classes and layers
    StallocSize,
    /// STAlloc's planner by phases; needs a trace with steps to differ from stalloc-size
    StallocGroup,
}

/// Rules for streams as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Streams {
    /// All in one memory
    Together,
    /// Each in a memory of its own
    Apart,
}

/// Forms of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Buffers and offsets with the result
    Json,
    /// MiniMalloc's CSV
    Csv,
    /// A folder with STAlloc's plan and interval files, made from the trace's steps
    Stalloc,
}

/// A count, with an exponent if one likes: `1e9`.
fn parse_count(text: &str) -> Result<u64, String> {
    let count = text.replace('_', "").parse().ok().or_else(|| whole_number(text));
    count
        .filter(|&count| count > 0)
        .ok_or_else(|| format!("{text:?} is no count: expected a whole number above 0, as in 1e9"))
}

/// One problem, and what its buffers are called.
struct Job {
    /// What errors begin with: the file.
    file: String,
    source: PlanSource,
    problem: Problem,
    names: Names,
    /// What STAlloc's planners want to know.
    hints: StallocHints,
}

/// What buffers are called.
enum Names {
    Trace { trace: Box<Trace>, blocks: Vec<crate::units::BlockId> },
    Rows(MinimallocCsv),
    Numbers,
}

impl Job {
    fn of_trace(file: String, trace: Trace, args: &Args) -> Job {
        let granularity = args.granularity.map_or(crate::alloc::ALIGNMENT_BYTES, |size| size.0);
        let rule = match args.streams {
            Streams::Together => StreamRule::Together,
            Streams::Apart => StreamRule::Apart,
        };
        let lives = lifetimes(&trace, granularity, rule);
        let name = trace.header.name.clone();
        let source = PlanSource { name, kind: "trace", tick: "event" };
        let hints = stalloc_hints(&trace, &lives);
        let names = Names::Trace { trace: Box::new(trace), blocks: lives.blocks };
        Job { file, source, problem: lives.problem, names, hints }
    }

    fn of_rows(file: String, name: String, csv: MinimallocCsv, args: &Args) -> Job {
        let mut problem = problem_from_minimalloc(&csv.rows);
        problem.granularity_bytes = args.granularity.map_or(1, |size| size.0);
        let source = PlanSource { name, kind: "buffers", tick: "tick" };
        Job { file, source, problem, names: Names::Rows(csv), hints: StallocHints::default() }
    }

    fn of_shape(shape: &Shape, args: &Args) -> Job {
        let mut problem = synthetic::problem(shape);
        problem.granularity_bytes =
            args.granularity.map_or(problem.granularity_bytes, |size| size.0);
        let source = PlanSource { name: shape.to_string(), kind: "synthetic", tick: "event" };
        Job {
            file: shape.to_string(),
            source,
            problem,
            names: Names::Numbers,
            hints: StallocHints::default(),
        }
    }

    /// Packs it.
    fn plan(&self, options: &SolveOptions) -> anyhow::Result<Planned> {
        engine::plan(self.source.clone(), &self.problem, options).map_err(|error| {
            let buffers = error.buffers().into_iter();
            let about = buffers.map(|at| format!("; buffer {at} is {}", self.name(at)));
            anyhow::anyhow!("{}: {error}{}", self.file, about.collect::<String>())
        })
    }

    /// Packs it as STAlloc would.
    fn plan_as_stalloc(&self, way: StallocWay, options: &SolveOptions) -> anyhow::Result<Planned> {
        let source = self.source.clone();
        let planned = plan_as_stalloc(source, &self.problem, way, &self.hints, options);
        planned.with_context(|| self.file.clone())
    }

    /// What people know a buffer by.
    fn name(&self, buffer: u64) -> String {
        let index = buffer as usize;
        let size = Bytes(self.problem.buffers.get(index).map_or(0, |buffer| buffer.size_bytes));
        match &self.names {
            Names::Rows(csv) => format!("{} ({size})", csv.rows[index].id),
            Names::Numbers => format!("{buffer} ({size})"),
            Names::Trace { trace, blocks } => {
                let block = &trace.blocks[blocks[index].index()];
                let name = block.name.some().map(|name| trace.names[name.index()].clone());
                let label = name.or_else(|| trace.site_label(block.site));
                let start = self.problem.buffers[index].start;
                match label {
                    Some(label) => format!("{label} ({size})"),
                    None => format!("the {size} of event {start}"),
                }
            }
        }
    }

    /// The phase at a tick, in a trace.
    fn phase(&self, tick: u64) -> Option<String> {
        let Names::Trace { trace, .. } = &self.names else { return None };
        let events = trace.events.get(..=tick as usize).unwrap_or(&trace.events);
        let mark = events.iter().rev().find_map(|event| match event.op {
            crate::trace::Op::Mark(phase) => Some(phase),
            _ => None,
        })?;
        Some(trace.phases[mark.index()].clone())
    }
}

/// Packs every input.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    input::check_stdin_once(&args.inputs)?;
    let outputs = [&args.output, &args.figure, &args.json].into_iter().flatten();
    output::check_places(&args.inputs, outputs.clone().map(PathBuf::as_path))?;
    let many = args.inputs.len() > 1;
    anyhow::ensure!(
        !many || (args.output.is_none() && args.figure.is_none()),
        "--output and --figure take one input: give one trace at a time"
    );
    if let Some(path) = &args.output {
        args.output_format(path)?;
    }
    let to_stdout = outputs.filter(|path| is_stdio(path)).count();
    anyhow::ensure!(to_stdout <= 1, "-: standard output can take one of several outputs only");
    let talks = to_stdout == 0 && !args.quiet;
    let progress = Progress::over_cells(&args.inputs, args.inputs.len(), args.quiet);
    let mut verdict = Verdict::Good;
    let mut results = Vec::new();
    let mut unreadable: usize = 0;
    for job in jobs(&args, &progress, console) {
        let planned = job.and_then(|mut job| Ok((plan_one(&args, &mut job)?, job)));
        let (planned, job) = match planned {
            Ok(planned) => planned,
            Err(error) if interrupt::is_interrupt(&error) => break,
            Err(error) => {
                console.error(&error);
                verdict = Verdict::Failed;
                unreadable += 1;
                continue;
            }
        };
        if planned.result.capacity.as_ref().is_some_and(|answer| !answer.fits) {
            verdict = verdict.max(Verdict::No);
        }
        if let Err(error) = write_files(&args, &job, &planned, console) {
            console.error(&error);
            verdict = Verdict::Failed;
            unreadable += 1;
            continue;
        }
        if talks && !many {
            console.print(&text::plan(&planned.result, console.style()))?;
            if let Some(answer) = &planned.result.capacity
                && let Some(reason) = &answer.reason
            {
                console.print(&text::capacity_reason(&planned.result, answer, reason, |at| {
                    job.name(at)
                }))?;
            }
        }
        progress.cells_done(1, planned.result.source.name.clone());
        results.push(planned.result);
        if interrupt::is_asked() {
            break;
        }
    }
    drop(progress);
    let whole = results.iter().filter(|result| !result.partial).count();
    let all = args.inputs.len().max(1);
    let is_partial = interrupt::is_asked() && whole + unreadable < all;
    let partial = is_partial.then_some(Partial { done: whole + unreadable, all, part: "problem" });
    if is_partial {
        results.iter_mut().for_each(|result| result.partial = true);
        verdict = Verdict::Interrupted;
    }
    if talks && many {
        if let Some(partial) = partial {
            console.print(&partial.heading(console))?;
        }
        console.print(&text::plans(&results, unreadable as u64, console.style()))?;
    }
    // With nothing to say of the one input that was asked for, nothing is written.
    let silent = !many && results.is_empty();
    let json = args.json.as_ref().filter(|_| !silent);
    let json = json.map(|path| if is_partial { partial_path(path) } else { path.clone() });
    if let Some(path) = &json {
        output::save_text(path, &json::one_or_many(&results, !many)?, console)?;
    }
    if let Some(partial) = partial {
        tell_partial(&args, partial, &results, json.as_deref(), console);
    } else if !silent {
        let files = [&args.output, &args.figure, &args.json].into_iter().flatten();
        interrupt::remove_partial(&args.inputs, files.map(PathBuf::as_path))?;
    }
    Ok(verdict)
}

/// Tells what became of work that was interrupted.
fn tell_partial(
    args: &Args,
    partial: Partial,
    results: &[PlanResult],
    json: Option<&Path>,
    console: &Console,
) {
    let files = [&args.output, &args.figure].map(|path| path.as_deref().map(partial_path));
    // What does not fit, and what STAlloc reads, was told not to be written.
    let written = files.iter().flatten().filter(|path| path.is_file()).map(PathBuf::as_path);
    partial.tell(!results.is_empty(), written.chain(json), console);
}

/// The problems asked for, read one at a time.
fn jobs<'a>(
    args: &'a Args,
    progress: &'a Progress,
    console: &'a Console,
) -> Box<dyn Iterator<Item = anyhow::Result<Job>> + 'a> {
    if let Some(shape) = &args.synthetic {
        return Box::new(std::iter::once(Ok(Job::of_shape(shape, args))));
    }
    let options = progress.read_options(args.gpu);
    Box::new(args.inputs.iter().map(move |path| read_job(path, args, &options, console)))
}

fn read_job(
    path: &Path,
    args: &Args,
    options: &ReadOptions,
    console: &Console,
) -> anyhow::Result<Job> {
    match input::read_plannable(path, options)? {
        input::Plannable::Trace(imported) => {
            let Imported { trace, warnings } = *imported;
            if !args.quiet {
                warnings.iter().for_each(|warning| console.warn(path, warning));
            }
            Ok(Job::of_trace(path.display().to_string(), trace, args))
        }
        input::Plannable::Buffers { name, csv } => {
            if !args.quiet {
                csv.warnings().iter().for_each(|warning| console.warn(path, warning));
            }
            Ok(Job::of_rows(path.display().to_string(), name, csv, args))
        }
    }
}

/// Packs one problem and answers whether it fits.
fn plan_one(args: &Args, job: &mut Job) -> anyhow::Result<Planned> {
    if let Some(capacity) = args.capacity {
        let pools = job.problem.buffers.iter().map(|buffer| buffer.pool()).max().unwrap_or(0);
        job.problem.capacities_bytes = vec![Some(capacity.0); pools as usize + 1];
    }
    let options = SolveOptions {
        planner: match args.planner {
            PlannerName::Best => Planner::Best,
            // STAlloc's own do not go through these solvers.
            _ => Planner::GreedyBySize,
        },
        time: args.work.is_none().then_some(args.time),
        work_units: args.work,
        seed: args.seed,
        threads: rayon::current_num_threads(),
        stop: interrupt::stop(),
    };
    let mut planned = match args.planner {
        PlannerName::Best | PlannerName::GreedyBySize => job.plan(&options)?,
        PlannerName::StallocSize => job.plan_as_stalloc(StallocWay::Size, &options)?,
        PlannerName::StallocGroup => job.plan_as_stalloc(StallocWay::Group, &options)?,
    };
    for instant in &mut planned.result.binding {
        instant.phase = job.phase(instant.binding.start);
    }
    Ok(planned)
}

fn write_files(args: &Args, job: &Job, planned: &Planned, console: &Console) -> anyhow::Result<()> {
    let fits = planned.result.capacity.as_ref().is_none_or(|answer| answer.fits);
    let place = |path: &PathBuf| match planned.result.partial {
        true => partial_path(path),
        false => path.clone(),
    };
    match &args.output {
        Some(path) if planned.result.partial && args.format == Some(Format::Stalloc) => {
            console.warn(path, "not written: interrupted");
        }
        Some(path) if fits => write_offsets(args, (path, &place(path)), job, planned)?,
        Some(path) => console.warn(path, "not written: the packing does not fit"),
        None => {}
    }
    if let Some(path) = &args.figure.as_ref().map(place) {
        let labels = PackingLabels {
            title: format!("{}, {} buffers", job.source.name, planned.result.buffers),
            tick: job.source.tick.to_owned(),
        };
        let pools = planned.result.pools.iter().enumerate();
        let tallest = pools.max_by_key(|(_, pool)| pool.height_bytes).map_or(0, |(at, _)| at);
        let svg = packing_svg(&job.problem, &planned.packing, tallest as u32, &labels)?;
        output::save_text(path, &svg, console)?;
    }
    Ok(())
}

/// Writes STAlloc's files for a trace into a folder, each whole or not at all.
fn write_stalloc(args: &Args, folder: &Path, job: &Job) -> anyhow::Result<()> {
    let Names::Trace { trace, .. } = &job.names else {
        anyhow::bail!("{}: --format stalloc needs a trace with steps", job.file);
    };
    let options = SynthesisOptions {
        planner: match args.planner {
            PlannerName::Best => StallocPlanner::Best,
            PlannerName::GreedyBySize => StallocPlanner::GreedyBySize,
            PlannerName::StallocSize => StallocPlanner::SizeClasses,
            PlannerName::StallocGroup => StallocPlanner::Groups,
        },
        faithful: args.faithful,
        ..SynthesisOptions::default()
    };
    let profile = engine::first_steps(trace, usize::MAX);
    let made = synthesize(&profile, &options).map_err(|error| {
        let text = error.to_string().replace("faithful=false", "--faithful false");
        anyhow::anyhow!("{}: {text}", job.file)
    })?;
    for (name, text) in made.files(trace.header.device.index.unwrap_or(0)) {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        output::save(&path, |file| Ok(std::io::Write::write_all(file, text.as_bytes())?))?;
    }
    Ok(())
}

/// Writes what was asked for under a name to a place.
fn write_offsets(
    args: &Args,
    (name, path): (&Path, &Path),
    job: &Job,
    planned: &Planned,
) -> anyhow::Result<()> {
    let offsets = &planned.packing.offsets_bytes;
    match args.output_format(name)? {
        Format::Json => output::save(path, |file| {
            let names = match &job.names {
                Names::Rows(csv) => csv.rows.iter().map(|row| row.id.as_str()).collect(),
                _ => Vec::new(),
            };
            Ok(write_plan(&planned.result, &job.problem, &planned.packing, &names, file)?)
        }),
        Format::Stalloc => write_stalloc(args, path, job),
        Format::Csv => {
            let made;
            let csv = match &job.names {
                Names::Rows(csv) => csv,
                _ => {
                    made = engine::minimalloc_rows(&job.problem);
                    &made
                }
            };
            output::save(path, |file| Ok(write_minimalloc_csv(csv, Some(offsets), file)?))
        }
    }
}
