//! `fraglab check`: a gate for CI.
//!
//! Every trace is read once, however many entries of the baseline name it, and there are never more
//! of them in memory than threads. A baseline is written only when every entry could be measured.

mod baseline;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use rayon::prelude::*;

use baseline::{folder_of, new_entries, start};

use super::Verdict;
use super::console::{Console, one_line};
use super::interrupt::{self, Partial, partial_path};
use super::progress::Progress;
use super::setup::{self, AllocList, parse_alloc_list, parse_size};
use super::{input, named, output};
use crate::alloc::planned;
use crate::alloc::spec::AllocSpec;
use crate::engine::RunOptions;
use crate::experiment::check::{
    Baseline, CheckReport, CheckVerdict, Entry, EntryCheck, EntryFailure, FigureName, check_entry,
};
use crate::experiment::fits;
use crate::report::{json, junit, text};
use crate::trace::Trace;
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab check --baseline traces/baseline.json --init --trace traces/*.zst --alloc caching,stitch
      write the first baseline, to be committed
  fraglab check --baseline traces/baseline.json
      in CI: exit code 1 if a figure grew
  fraglab check --baseline traces/baseline.json --summary \"$GITHUB_STEP_SUMMARY\" --junit check.xml
  fraglab check --baseline traces/baseline.json --update
      take the figures of now as the new ones, in a commit of its own
  fraglab check --baseline traces/baseline.json --update --trace job.pickle --alloc caching
      add entries
  fraglab check --baseline traces/baseline.json --only varlen --only '*/expandable'

An entry is a trace, an allocator and a device. Its gated figures: status (whether every request \
was met; always gated), fragmentation (1 - requested / reserved peak, on the entry's device), \
reserved_bytes_peak, smallest_capacity_bytes (of a device on which every request is met) and \
alloc_retries. requested_bytes_peak is what the job asks for and told only, unless --gate names \
it. A replay begins with nothing, so that the figures are the same on any machine and on any \
number of threads.

A figure regresses if it grew by more than the tolerance in bytes and by more than that in \
percent. Both are 0 unless the baseline says otherwise, as a whole or for an entry \
({\"tolerance\": {\"bytes\": 2097152, \"percent\": 0.5}}). For fragmentation, percent are \
percentage points and bytes the share of the reserved peak that they are; for alloc_retries only \
percent count. A trace that asks for something else than when the baseline was written is told as \
changed, and its figures are compared all the same.

JSON: schema_version, fraglab_version, verdict (passed | regression | failed), updated, added, \
regressions, improvements, held, entries {trace, allocator, variant, is_new, trace_changed, \
figures {figure, gated, verdict (regression | improvement | tolerated | told | incomparable | same), \
before, after, delta, delta_percent, place {event_index, phase, requested_bytes, message}}}, \
failures {trace, case, message}.

Exit codes: 0 good, 1 a figure regressed, 2 something could not be done: an entry could not be \
checked, a file is missing, 130 interrupted: the baseline is left as it is, and what was checked \
until then is told as partial, in check.partial.json for check.json.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The baseline: JSON with entries, figures and tolerances, to be committed
    #[arg(long, value_name = "FILE")]
    baseline: PathBuf,

    /// Write a new baseline from --trace and --alloc
    #[arg(long, conflicts_with_all = ["update", "only"], requires = "trace")]
    init: bool,

    /// Take the figures of now into the baseline, and tell what moved; with --trace only those of
    /// the entries named by --trace and --alloc, which are added where they are not there
    #[arg(long)]
    update: bool,

    /// Traces of new entries; the baseline names them relative to its own folder
    #[arg(long, num_args = 1.., value_name = "TRACE")]
    trace: Vec<PathBuf>,

    /// Allocators of new entries, with commas [default: caching]
    #[arg(long, value_name = "A[,B...]", value_parser = parse_alloc_list, requires = "trace")]
    alloc: Vec<AllocList>,

    #[command(flatten)]
    device: DeviceArgs,

    /// Figures of new entries that are gated, with commas [default: all but requested_bytes_peak]
    ///
    /// Without smallest_capacity_bytes it is not looked for, which is quicker.
    #[arg(long, value_enum, value_name = "FIGURE,...", value_delimiter = ',', requires = "trace")]
    gate: Vec<Gate>,

    /// Growth in bytes that is no regression, as in 2MiB, for entries that do not say
    ///
    /// In place of the baseline's. With --init or --update it is written into it.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    tolerance_bytes: Option<Bytes>,

    /// Growth in percent that is no regression, as in 0.5, for entries that do not say
    ///
    /// As --tolerance-bytes.
    #[arg(
        long,
        value_name = "PERCENT",
        value_parser = parse_percent,
        allow_hyphen_values = true
    )]
    tolerance_percent: Option<f64>,

    /// Only entries whose TRACE/ALLOCATOR contains this; `*` stands for anything
    #[arg(long, value_name = "TEXT", conflicts_with = "trace")]
    only: Vec<String>,

    #[command(flatten)]
    outputs: OutputArgs,
}

/// What new entries say of the device and its allocator's settings.
#[derive(Debug, clap::Args)]
struct DeviceArgs {
    /// Physical memory of the device of new entries, as in 80GiB; by default the trace's
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "trace")]
    capacity: Option<Bytes>,

    /// Memory limit of the allocator of new entries, as in 60GiB; by default the trace's
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "trace")]
    limit: Option<Bytes>,

    /// PYTORCH_CUDA_ALLOC_CONF of new entries; by default the trace's
    #[arg(long, value_name = "STRING", requires = "trace")]
    pytorch_conf: Option<String>,

    /// Costs of device calls for allocators that weigh them, by name [default: h200]
    #[arg(long, value_name = "PROFILE", requires = "trace")]
    profile: Option<String>,

    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N", requires = "trace")]
    gpu: Option<u32>,
}

/// What is written where.
#[derive(Debug, clap::Args)]
struct OutputArgs {
    /// Write Markdown for a pull request; `-` is standard output
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,

    /// Write JUnit's XML; `-` is standard output
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,

    /// Write the check as JSON; `-` is standard output, and nothing else goes there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print nothing but what could not be done
    #[arg(long, short)]
    quiet: bool,
}

impl OutputArgs {
    /// Sends what was checked to files beside those that were named.
    fn keep_partial(&mut self) {
        let files = [&mut self.summary, &mut self.junit, &mut self.json];
        files.into_iter().flatten().for_each(|path| *path = partial_path(path));
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.summary, &self.junit, &self.json].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// Figures as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Gate {
    Status,
    Fragmentation,
    ReservedBytesPeak,
    SmallestCapacityBytes,
    AllocRetries,
    RequestedBytesPeak,
}

impl From<Gate> for FigureName {
    fn from(gate: Gate) -> Self {
        match gate {
            Gate::Status => FigureName::Status,
            Gate::Fragmentation => FigureName::Fragmentation,
            Gate::ReservedBytesPeak => FigureName::ReservedBytesPeak,
            Gate::SmallestCapacityBytes => FigureName::SmallestCapacityBytes,
            Gate::AllocRetries => FigureName::AllocRetries,
            Gate::RequestedBytesPeak => FigureName::RequestedBytesPeak,
        }
    }
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.trim().trim_end_matches('%').parse::<f64>();
    let percent = percent.ok().filter(|percent| percent.is_finite() && *percent >= 0.0);
    percent.ok_or_else(|| "expected a number from 0 up, as in 0.5".to_owned())
}

/// What is to be done.
struct Plan {
    path: PathBuf,
    baseline: Baseline,
    /// Places of the entries to check.
    chosen: Vec<usize>,
    writes: bool,
    outputs: OutputArgs,
}

impl Plan {
    fn new(args: Args) -> anyhow::Result<Plan> {
        let writes = args.init || args.update;
        anyhow::ensure!(
            writes || args.trace.is_empty(),
            "--trace names new entries: give --init to write a baseline, or --update to add to one"
        );
        anyhow::ensure!(
            !(writes && input::is_stdio(&args.baseline)),
            "-: a baseline is written into a file: give --baseline FILE"
        );
        let mut baseline = start(&args.baseline, args.init)?;
        if let Some(Bytes(bytes)) = args.tolerance_bytes {
            baseline.tolerance.bytes = bytes;
        }
        if let Some(percent) = args.tolerance_percent {
            baseline.tolerance.percent = percent;
        }
        let named = new_entries(&args)?;
        for entry in &named {
            match baseline.entries.iter_mut().find(|known| known.is_same_replay(entry)) {
                Some(known) if entry.gate.is_some() => known.gate.clone_from(&entry.gate),
                Some(_) => {}
                None => baseline.entries.push(entry.clone()),
            }
        }
        baseline.sort();
        let only: Vec<String> = args.only.iter().map(|part| format!("*{part}*")).collect();
        let chosen = baseline.entries.iter().enumerate().filter(|(_, entry)| {
            let asked = only.is_empty() || only.iter().any(|it| fits(it, &entry.name()));
            asked && (named.is_empty() || named.iter().any(|other| other.is_same_replay(entry)))
        });
        let chosen: Vec<usize> = chosen.map(|(place, _)| place).collect();
        let shown = args.baseline.display();
        anyhow::ensure!(!baseline.entries.is_empty(), "{shown}: has no entries to check");
        anyhow::ensure!(
            !chosen.is_empty(),
            "{shown}: no entry matches --only {}; there are: {}",
            args.only.join(" or "),
            named_entries(&baseline.entries)
        );
        let plan = Plan { path: args.baseline, baseline, chosen, writes, outputs: args.outputs };
        plan.check_places()?;
        plan.check_specs(&named)?;
        Ok(plan)
    }

    /// A misspelt allocator is told before any trace is read.
    fn check_specs(&self, named: &[Entry]) -> anyhow::Result<()> {
        let folder = folder_of(&self.path);
        named.iter().try_for_each(|entry| Job::new(entry, &folder).map(drop))
    }

    /// What is read and stays as it is.
    fn inputs(&self) -> Vec<PathBuf> {
        let folder = folder_of(&self.path);
        let entries = self.entries().map(|(_, entry)| folder.join(&entry.trace));
        let own = (!self.writes).then(|| self.path.clone());
        entries.chain(own).collect()
    }

    fn check_places(&self) -> anyhow::Result<()> {
        let own = self.writes.then_some(self.path.as_path());
        output::check_places(&self.inputs(), own.into_iter().chain(self.outputs.paths()))
    }

    /// The entries to check.
    fn entries(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.chosen.iter().map(|&place| (place, &self.baseline.entries[place]))
    }
}

/// The names of the first entries, and how many more there are.
fn named_entries(entries: &[Entry]) -> String {
    const NAMES_MAX: usize = 5;
    let names: Vec<String> = entries.iter().take(NAMES_MAX).map(Entry::name).collect();
    let more = match entries.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    names.join(", ") + &more
}

/// An entry and how to replay it.
struct Job {
    spec: AllocSpec,
    options: RunOptions,
}

impl Job {
    fn new(entry: &Entry, folder: &Path) -> anyhow::Result<Job> {
        let spec: AllocSpec = entry.allocator.parse()?;
        let file = |file: &str| {
            let path = folder.join(file);
            let text = path.to_str().map(str::to_owned);
            text.with_context(|| format!("{}: is no UTF-8", path.display()))
        };
        let spec = planned::with_files(&spec, file)?;
        let mut options = RunOptions {
            capacity_bytes: entry.capacity_bytes,
            limit_bytes: entry.limit_bytes,
            settings: entry.settings.clone(),
            stop: interrupt::stop(),
            ..RunOptions::new(setup::profile(entry.profile.as_deref().unwrap_or("h200"))?)
        };
        setup::check_spec(&spec, &options, entry.capacity_bytes)?;
        named::read(std::slice::from_ref(&spec), &mut options)?;
        Ok(Job { spec, options })
    }
}

/// What became of an entry.
type Answer = anyhow::Result<EntryCheck>;

/// Checks, writes and tells.
///
/// # Errors
/// If the plan makes no sense, the baseline cannot be read, or an output cannot be written.
pub(super) fn execute(args: Args, console: &Console) -> anyhow::Result<Verdict> {
    let mut plan = Plan::new(args)?;
    let (mut checks, mut failures) = (BTreeMap::new(), BTreeMap::new());
    let mut cut = 0;
    for (places, answers) in check_all(&plan) {
        let failure = |place: usize, error: &anyhow::Error| {
            let Entry { trace, .. } = &plan.baseline.entries[place];
            let case = plan.baseline.entries[place].case();
            let file = folder_of(&plan.path).join(trace);
            let message = match interrupt::is_interrupt(error) {
                true => "not checked: interrupted".to_owned(),
                false => without_file(&one_line(error), &file),
            };
            EntryFailure { trace: trace.clone(), case, message }
        };
        match answers {
            // Told once, however many entries the trace has.
            Err(error) => {
                if interrupt::is_interrupt(&error) {
                    cut += places.len();
                } else {
                    console.error(&error);
                }
                failures.extend(places.into_iter().map(|place| (place, failure(place, &error))));
            }
            Ok(answers) => {
                for (place, answer) in places.into_iter().zip(answers) {
                    match answer {
                        Ok(check) => drop(checks.insert(place, check)),
                        Err(error) => {
                            failures.insert(place, failure(place, &error));
                            if interrupt::is_interrupt(&error) {
                                cut += 1;
                                interrupt::tell_how_far(&error, console);
                            } else {
                                console.error(&error.context(plan.baseline.entries[place].name()));
                            }
                        }
                    }
                }
            }
        }
    }
    let updates = plan.writes && failures.is_empty();
    if updates {
        for (&place, check) in &checks {
            let entry = &mut plan.baseline.entries[place];
            *entry = check.measured.recorded_in(entry);
        }
        output::save_text(&plan.path, &json::pretty(&plan.baseline)?, console)?;
        if !plan.outputs.quiet {
            checks.values().for_each(|check| warn_of_refusal(check, console));
        }
    } else if plan.writes {
        console.note(&format!("fraglab: {}: left as it is", plan.path.display()));
    }
    let (checks, failures) = (checks.into_values().collect(), failures.into_values().collect());
    let report = CheckReport::new(checks, failures, updates);
    let all = plan.chosen.len();
    let partial = (cut > 0).then_some(Partial { done: all - cut, all, part: "check" });
    if partial.is_some() {
        plan.outputs.keep_partial();
    }
    write_all(&plan.outputs, &report, partial, console)?;
    if let Some(partial) = partial {
        partial.tell(partial.done > 0, plan.outputs.paths(), console);
        return Ok(Verdict::Interrupted);
    }
    let kept = [plan.inputs(), vec![plan.path]].concat();
    interrupt::remove_partial(&kept, plan.outputs.paths())?;
    Ok(match report.verdict {
        CheckVerdict::Passed => Verdict::Good,
        CheckVerdict::Regression => Verdict::No,
        CheckVerdict::Failed => Verdict::Failed,
    })
}

/// A message without the file that it begins with, where an entry names its trace already.
fn without_file(message: &str, file: &Path) -> String {
    let rest = message.strip_prefix(&*file.to_string_lossy());
    rest.and_then(|rest| rest.strip_prefix(": ")).unwrap_or(message).to_owned()
}

/// A new entry that runs out of memory is hardly what was meant: a peak that the device cuts off
/// cannot grow.
fn warn_of_refusal(check: &EntryCheck, console: &Console) {
    let Some(refusal) = check.measured.refusal.as_ref().filter(|_| check.is_new) else { return };
    let message = refusal.message.as_deref().unwrap_or("a request is refused");
    let text = format!(
        "{} runs out of memory and is added so: its reserved peak is bounded by the device or the \
         limit, and it has no fragmentation; first refusal: {message}",
        check.case()
    );
    console.warn(Path::new(&check.trace), &text);
}

fn write_all(
    outputs: &OutputArgs,
    report: &CheckReport,
    partial: Option<Partial>,
    console: &Console,
) -> anyhow::Result<()> {
    if let Some(path) = &outputs.summary {
        output::save_text(path, &text::check_markdown(report), console)?;
    }
    if let Some(path) = &outputs.junit {
        output::save_text(path, &junit::check_junit(report), console)?;
    }
    if let Some(path) = &outputs.json {
        output::save_text(path, &json::pretty_or_partial(report, partial.is_some())?, console)?;
    }
    if !outputs.quiet && !outputs.paths().any(input::is_stdio) {
        if let Some(partial) = partial {
            console.print(&partial.heading(console))?;
        }
        console.print(&text::check(report, console.style()))?;
    }
    Ok(())
}

/// Every trace of the chosen entries: their places, and what became of them.
fn check_all(plan: &Plan) -> Vec<(Vec<usize>, anyhow::Result<Vec<Answer>>)> {
    let folder = folder_of(&plan.path);
    let mut by_trace: BTreeMap<(&str, Option<u32>), Vec<usize>> = BTreeMap::new();
    for (place, entry) in plan.entries() {
        by_trace.entry((&entry.trace, entry.gpu)).or_default().push(place);
    }
    let traces: Vec<_> = by_trace.into_iter().collect();
    let files: Vec<PathBuf> = traces.iter().map(|((trace, _), _)| folder.join(trace)).collect();
    let progress = Progress::over_cells(&files, plan.chosen.len(), plan.outputs.quiet);
    // A thread that waits for its entries may begin another trace: the parts bound their number.
    let parts = traces.chunks(rayon::current_num_threads().max(1));
    let checked = parts.flat_map(|part| {
        let part = part.par_iter().map(|((trace, gpu), places)| {
            let answers = check_trace(plan, &folder.join(trace), *gpu, places, &progress);
            if answers.is_err() {
                progress.cells_done(places.len(), String::new());
            }
            (places.clone(), answers)
        });
        part.collect::<Vec<_>>()
    });
    checked.collect()
}

/// The entries of one trace.
fn check_trace(
    plan: &Plan,
    path: &Path,
    gpu: Option<u32>,
    places: &[usize],
    progress: &Progress,
) -> anyhow::Result<Vec<Answer>> {
    let trace = input::read(path, &progress.read_options(gpu))?.trace;
    let answers = places.par_iter().map(|&place| {
        let entry = &plan.baseline.entries[place];
        let answer = check_one(plan, &trace, entry);
        progress.cells_done(1, text::printable(&entry.name()).into_owned());
        answer
    });
    Ok(answers.collect())
}

fn check_one(plan: &Plan, trace: &Trace, entry: &Entry) -> Answer {
    let job = Job::new(entry, &folder_of(&plan.path))?;
    Ok(check_entry(trace, entry, &job.spec, plan.baseline.tolerance, &job.options)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_are_numbers_from_nothing_up() {
        assert_eq!(parse_percent("0.5%"), Ok(0.5));
        for text in ["-1", "nan", "inf", "much"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
    }
}
