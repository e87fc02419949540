//! What `run` and `compare` ask alike: traces, allocators, and the options of a replay.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;

use super::Verdict;
use super::console::Console;
use super::{input, interrupt, named};
use crate::alloc::registry::{self, Visitor};
use crate::alloc::spec::{AllocSpec, Params, SpecError};
use crate::alloc::{Allocator, BuildInputs};
use crate::chunk::{self, ChunkConfig};
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{CostProfile, GRANULARITY_BYTES};
use crate::engine::{RunOptions, RunResult, Status};
use crate::trace::AddressPolicy;
use crate::units::Bytes;

/// Which traces through which allocators.
#[derive(Debug, clap::Args)]
pub(super) struct CellArgs {
    /// Traces of any format, told by content; `-` is standard input
    #[arg(long = "trace", num_args = 1.., value_name = "TRACE", required_unless_present = "more")]
    traces: Vec<PathBuf>,

    /// The same without --trace
    #[arg(value_name = "TRACE", id = "more")]
    more_traces: Vec<PathBuf>,

    /// Allocators, with commas: NAME[+key=value]... [default: caching; compare: all that need no
    /// more than a name]
    ///
    /// `fraglab list` names them and their parameters. `caching` is PyTorch's own and takes the
    /// recorded settings. Commas inside brackets or quotes do not split:
    /// caching+roundup_power2_divisions=[256:1,>:8].
    #[arg(long = "alloc", value_name = "A[,B...]", value_parser = parse_alloc_list)]
    allocs: Vec<AllocList>,
}

impl CellArgs {
    /// All of them, in order.
    ///
    /// # Errors
    /// If standard input is named twice.
    pub(super) fn paths_and_specs(self) -> anyhow::Result<(Vec<PathBuf>, Vec<AllocSpec>)> {
        let mut paths = self.traces;
        paths.extend(self.more_traces);
        input::check_stdin_once(&paths)?;
        Ok((paths, self.allocs.into_iter().flat_map(|list| list.0).collect()))
    }
}

/// How to replay.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct SetupArgs {
    /// What device calls cost: a profile that ships (see `fraglab list`) or a file NAME.json
    #[arg(long, value_name = "PROFILE", default_value = "h200")]
    profile: String,

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

    /// How many first steps of a trace are the profile of allocators that plan ahead
    ///
    /// By default two, of which the first tells of the beginning and the second of what repeats;
    /// one of a trace with two. Steps are what marks `stepN` or `stepN.phase` begin. A whole other
    /// trace is given as planned+trace=FILE.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    profile_steps: Option<u64>,

    /// Which addresses the simulated device gives out [default: the trace's, else chunks]
    #[arg(long, value_enum, value_name = "POLICY")]
    addresses: Option<Addresses>,
}

impl SetupArgs {
    /// Whether a memory limit of the allocator is asked for.
    pub(super) fn has_limit(&self) -> bool {
        self.limit.is_some()
    }

    /// A flag that is given and says what only a simulated device can be told.
    pub(super) fn flag_of_simulated_device(&self) -> Option<&'static str> {
        let flags = [
            (self.address_space.is_some(), "--address-space"),
            (self.mappings.is_some(), "--mappings"),
            (self.addresses.is_some(), "--addresses"),
        ];
        flags.into_iter().find_map(|(is_given, flag)| is_given.then_some(flag))
    }

    /// The options of a replay through these allocators, with the files that they name.
    ///
    /// # Errors
    /// If there is no such cost profile, or a file cannot be read.
    pub(super) fn options(self, specs: &[AllocSpec]) -> anyhow::Result<RunOptions> {
        let mut options = RunOptions {
            limit_bytes: self.limit.map(|size| size.0),
            address_bytes_max: self.address_space.map(|size| size.0),
            mappings_max: self.mappings,
            settings: self.pytorch_conf,
            address_policy: self.addresses.map(Into::into),
            profile_steps: self.profile_steps,
            ..RunOptions::new(profile(&self.profile)?)
        };
        // A misspelt allocator is told before any file is read.
        for spec in specs {
            check_spec(spec, &options, None)?;
        }
        named::read(specs, &mut options)?;
        Ok(options)
    }
}

/// How to read, and how much to tell.
#[derive(Debug, clap::Args)]
pub(super) struct ReadArgs {
    /// Which GPU of a snapshot with several
    #[arg(long, value_name = "N")]
    pub(super) gpu: Option<u32>,

    /// Print no tables, warnings or progress; what failed still shows
    #[arg(long, short)]
    pub(super) quiet: bool,
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
pub(super) struct AllocList(pub(super) Vec<AllocSpec>);

/// Reads it.
pub(super) fn parse_alloc_list(text: &str) -> Result<AllocList, SpecError> {
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

/// Whether an allocator can be built with these options, on a device of some size if none is asked
/// for.
///
/// # Errors
/// Why not.
pub(super) fn check_spec(
    spec: &AllocSpec,
    options: &RunOptions,
    capacity_bytes: Option<u64>,
) -> Result<(), SpecError> {
    if spec.name == chunk::NAME {
        // What the model's options say shows when the trace is read.
        let config = ChunkConfig::build(Params::new(spec), &BTreeMap::new())?;
        return check_spec(&AllocSpec::nested(&config.inner)?, options, capacity_bytes);
    }
    let inputs = BuildInputs {
        settings: options.settings.clone(),
        limit_bytes: options.limit_bytes,
        device_total_bytes: Some(capacity_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES)),
        costs: Some(options.profile.clone()),
        // Whether a trace has steps to learn from shows when it is read.
        profile: Some(Arc::default()),
        plan_files: Some(Arc::default()),
        ..BuildInputs::default()
    };
    registry::build(spec, &inputs, Buildable)
}

/// Wants to know only whether an allocator can be built.
struct Buildable;

impl Visitor for Buildable {
    type Output = ();

    fn visit<A: Allocator + Send + 'static>(self, _allocator: A) {}
}

/// A stretch of time, for clap.
///
/// # Errors
/// What was expected.
pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text);
    time.map_err(|_| format!("{text:?} is no time: expected a number and a unit, as in 500ms, 10s"))
}

/// Largest profile in bytes: what is larger is some other file.
const PROFILE_BYTES_MAX: u64 = 16 << 20;

/// A profile that ships, or one from a file.
///
/// # Errors
/// If there is none of that name, or the file cannot be read.
pub(super) fn profile(name: &str) -> anyhow::Result<CostProfile> {
    if !name.ends_with(".json") {
        return Ok(CostProfile::shipped(name)?);
    }
    let expected = "a profile, as `fraglab calibrate` writes it";
    let text = input::read_text(Path::new(name), PROFILE_BYTES_MAX, expected)?;
    CostProfile::from_json(&text).context(name.to_owned())
}

/// Tells what was typed but can hardly be meant.
pub(super) fn tell_doubts(
    capacities: impl IntoIterator<Item = u64>,
    limit_bytes: Option<u64>,
    console: &Console,
) {
    let capacities = capacities.into_iter().map(|bytes| ("--capacity", bytes));
    let limits = limit_bytes.into_iter().map(|bytes| ("--limit", bytes));
    let small = capacities.chain(limits).filter(|&(_, bytes)| bytes < GRANULARITY_BYTES);
    for (flag, bytes) in small {
        console.note(&format!(
            "fraglab: warning: {flag} {} holds not one segment of {}: a number without a unit is \
             bytes",
            Bytes(bytes),
            Bytes(GRANULARITY_BYTES)
        ));
    }
}

/// Keeps the traces that could be read, with their paths, and tells why others could not, unless it
/// was Ctrl-C. `tell` tells what went wrong with one that is kept.
pub(super) fn kept<'p, T>(
    paths: &'p [PathBuf],
    read: Vec<anyhow::Result<T>>,
    tell: impl Fn(&Path, &T) -> Verdict,
    console: &Console,
) -> (Vec<(&'p Path, T)>, Verdict) {
    let mut verdict = Verdict::Good;
    let mut traces = Vec::new();
    for (path, trace) in paths.iter().zip(read) {
        match trace {
            Ok(trace) => {
                verdict = verdict.max(tell(path, &trace));
                traces.push((path.as_path(), trace));
            }
            Err(error) if interrupt::is_interrupt(&error) => verdict = Verdict::Interrupted,
            Err(error) => {
                console.error(&error);
                verdict = verdict.max(Verdict::Failed);
            }
        }
    }
    (traces, verdict)
}

/// Tells if a cell could not be done, or ended where the real allocator would not have survived.
pub(super) fn tell_cell(
    path: &Path,
    allocator: &str,
    cell: Result<&RunResult, &anyhow::Error>,
    console: &Console,
) -> Verdict {
    match cell {
        Ok(result) if result.outcome.status == Status::Failed => {
            let message = result.outcome.message.as_deref();
            let message = message.unwrap_or("the replay could not be done");
            console.error(&anyhow::anyhow!("{}: {allocator}: {message}", path.display()));
        }
        Ok(_) => return Verdict::Good,
        Err(error) if interrupt::is_interrupt(error) => {
            interrupt::tell_how_far(error, console);
            return Verdict::Interrupted;
        }
        Err(error) => console.error(error),
    }
    Verdict::Failed
}

/// Traces of one name are called by their paths, so that tables and JSON tell them apart: the paths
/// by which to call them, nothing for those that keep their name.
pub(super) fn paths_for_names<'a>(traces: &[(&'a Path, String)]) -> Vec<Option<&'a Path>> {
    let shared = |name: &str| traces.iter().filter(|(_, other)| other == name).count() > 1;
    traces.iter().map(|(path, name)| shared(name).then_some(*path)).collect()
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
