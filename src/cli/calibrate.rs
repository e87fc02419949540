//! `fraglab calibrate`: what the driver's calls cost on the GPU at hand, as a profile for
//! `--profile`; and what is in a profile.

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::Context as _;
use serde::Serialize;

use super::Verdict;
use super::console::Console;
use super::hardware::gpu_ordinal;
use super::input::is_stdio;
use super::output;
use super::progress::Progress;
use super::setup::{self, parse_size};
use crate::device::calibrate::{
    self, BuiltRatios, CalibrateOptions, Calibration, ProfileNames, built_ratios,
};
use crate::device::cuda::{Cuda, CudaInfo};
use crate::device::{CostProfile, Device as _};
use crate::engine::SCHEMA_VERSION;
use crate::report::{json, text};
use crate::trace::OutputFile;
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab calibrate -o mine.json
  fraglab run --trace job.json --alloc caching,stitch --profile mine.json
  fraglab calibrate -o mine.json --csv all.csv
      beside the profile everything that was measured, a row a call and circumstance
  fraglab calibrate --show h200
      the tables of a profile, and GMLake's Table 1 beside it; needs no GPU

Takes up to a minute; leave the GPU idle meanwhile. Calls are measured as allocators make them: \
memory of all sizes comes and goes in random order, and every call is timed. Memory: at most 60% of \
what is free, given back at the end; what does not fit is left out and told.

The profile: microseconds by size, medians in `calls`, and in `tails` what a call takes beyond its \
median on average (the mean of all calls less the median; a call counts with 50 ms at most). A \
replay is charged both, but malloc and create their tail only for memory that it freed before: now \
and then a large one waits milliseconds for freed memory that is still being cleared.

CSV: case (mixed: among others, memory freed just before; settled: memory that lay free for 0.2 s; \
whole: one call for all pieces of a range), call, size_bytes, pieces of the call, samples, and \
median, tenth and nine tenths, mean and largest in microseconds a piece. JSON: {schema_version, \
fraglab_version, profile, ratios, measured, wall}; with --show the first four.

Exit codes: 0 done, 2 it could not be done.";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The GPU: cuda, or cuda:N for another than the first
    #[arg(long, value_name = "DEVICE", default_value = "cuda", value_parser = parse_device)]
    device: u32,

    /// Write the profile; `-` is standard output [required unless --show]
    #[arg(long, short, value_name = "FILE.json", required_unless_present = "show")]
    output: Option<PathBuf>,

    /// Name of the profile [default: that of the GPU, as in h200]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: Option<String>,

    /// Largest piece that is measured, as in 4GiB
    #[arg(long, value_name = "SIZE", default_value = "64GiB", value_parser = parse_size)]
    max_size: Bytes,

    /// Do exactly so many rounds, however long they take [default: until medians stand still]
    #[arg(long, value_name = "N", conflicts_with = "quick")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=10_000))]
    repeats: Option<u64>,

    /// Take about ten seconds; for a first look
    #[arg(long)]
    quick: bool,

    /// Write everything that was measured as CSV; `-` is standard output
    #[arg(long, value_name = "FILE.csv")]
    csv: Option<PathBuf>,

    /// Show a profile that ships, or that of a file NAME.json; measures nothing
    #[arg(long, value_name = "PROFILE")]
    #[arg(conflicts_with_all = ["output", "name", "repeats", "quick", "csv"])]
    show: Option<String>,

    /// Write profile, ratios and all that was measured as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

fn parse_device(text: &str) -> Result<u32, String> {
    gpu_ordinal(text).ok_or_else(|| "expected cuda or cuda:N, as in cuda:0".to_owned())
}

fn parse_name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("expected a name, as in h200".to_owned()),
        name => Ok(name.to_owned()),
    }
}

/// The JSON.
#[derive(Serialize)]
struct Report<'a> {
    schema_version: u32,
    fraglab_version: &'static str,
    profile: &'a CostProfile,
    ratios: [BuiltRatios; 3],
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<&'a Calibration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wall: Option<Wall>,
}

/// How long it took.
#[derive(Serialize)]
struct Wall {
    seconds: f64,
}

impl Args {
    fn outputs(&self) -> impl Iterator<Item = &Path> {
        [&self.output, &self.csv, &self.json].into_iter().flatten().map(PathBuf::as_path)
    }

    fn options(&self) -> CalibrateOptions {
        let options = match (self.quick, self.repeats) {
            (true, _) => CalibrateOptions::quick(),
            (false, None) => CalibrateOptions::default(),
            (false, Some(rounds)) => CalibrateOptions {
                rounds_min: rounds,
                rounds_max: rounds,
                budget_ns: u64::MAX,
                ..CalibrateOptions::default()
            },
        };
        CalibrateOptions { size_bytes_max: self.max_size.0, ..options }
    }
}

/// Measures a GPU, or shows a profile.
///
/// # Errors
/// If there is no GPU or profile, a call fails, or a file cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    if let Some(name) = &args.show {
        let inputs = [PathBuf::from(name)];
        output::check_places(&inputs, args.outputs())?;
        tell(args, &setup::profile(name)?, None, console)?;
        return Ok(Verdict::Good);
    }
    output::check_places(&[], args.outputs())?;
    // That a file cannot be written shows now, not after a minute.
    for path in args.outputs().filter(|path| !is_stdio(path)) {
        drop(OutputFile::create(path)?);
    }
    let of_device = || format!("--device cuda:{}", args.device);
    let mut cuda = Cuda::open(args.device).with_context(of_device)?;
    anyhow::ensure!(
        cuda.info().granularity_bytes > 0,
        "{}: {} has no virtual memory calls to measure",
        of_device(),
        cuda.info().name
    );
    tell_if_shared(&cuda, args, console);
    let names = names(args, cuda.info());
    let start = Instant::now();
    let calibration = {
        let progress = Progress::over_rounds(args.quiet, format!("on {}", names.gpu));
        let clock = || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut at = |now: calibrate::CalibrateProgress| progress.at(now.rounds, now.rounds_max);
        calibrate::calibrate(&mut cuda, clock, &args.options(), &mut at).with_context(of_device)?
    };
    let wall = Wall { seconds: start.elapsed().as_secs_f64() };
    drop(cuda);
    let profile = calibration.profile(names)?;
    if !args.quiet {
        for note in text::calibration_notes(&calibration) {
            console.note(&format!("fraglab: {note}"));
        }
    }
    if let Some(path) = &args.output {
        output::save_text(path, &profile.to_json()?, console)?;
    }
    if let Some(path) = &args.csv {
        output::save_text(path, &text::calibration_csv(&calibration.rows), console)?;
    }
    tell(args, &profile, Some((&calibration, wall)), console)?;
    Ok(Verdict::Good)
}

/// Others on the same GPU make figures doubtful.
fn tell_if_shared(cuda: &Cuda, args: &Args, console: &Console) {
    let memory = cuda.memory_info();
    let used_bytes = memory.total_bytes.saturating_sub(memory.free_bytes);
    if !args.quiet && used_bytes > memory.total_bytes / 10 {
        console.note(&format!(
            "fraglab: warning: {} of this GPU are in use by others: what they do shows in the \
             figures",
            Bytes(used_bytes)
        ));
    }
}

fn names(args: &Args, info: &CudaInfo) -> ProfileNames {
    let day = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    ProfileNames {
        name: args.name.clone().unwrap_or_else(|| short_name(&info.name)),
        gpu: info.name.clone(),
        driver: info.driver.clone(),
        date: day.chars().take_while(|&c| c != 'T').collect(),
    }
}

/// `NVIDIA A100-SXM4-80GB` as `a100-sxm4-80gb`.
fn short_name(gpu: &str) -> String {
    let lower = gpu.to_lowercase();
    let words = lower.strip_prefix("nvidia").unwrap_or(&lower);
    let parts: Vec<&str> =
        words.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty()).collect();
    if parts.is_empty() { "gpu".to_owned() } else { parts.join("-") }
}

/// Writes the JSON, and shows the tables where standard output is not taken.
fn tell(
    args: &Args,
    profile: &CostProfile,
    measured: Option<(&Calibration, Wall)>,
    console: &Console,
) -> anyhow::Result<()> {
    if let Some(path) = &args.json {
        let (measured, wall) = measured.unzip();
        let report = Report {
            schema_version: SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION"),
            profile,
            ratios: built_ratios(profile),
            measured,
            wall,
        };
        output::save_text(path, &json::pretty(&report)?, console)?;
    }
    if !args.quiet && !args.outputs().any(is_stdio) {
        console.print(&text::cost_profile(profile, console.style()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_have_short_names() {
        assert_eq!(short_name("NVIDIA H200"), "h200");
        assert_eq!(short_name("NVIDIA A100-SXM4-80GB"), "a100-sxm4-80gb");
        assert_eq!(short_name("NVIDIA GeForce RTX 4090"), "geforce-rtx-4090");
        assert_eq!(short_name("/"), "gpu");
    }

    #[test]
    fn devices_are_gpus() {
        assert_eq!(parse_device("cuda"), Ok(0));
        assert_eq!(parse_device("cuda:3"), Ok(3));
        assert!(parse_device("sim").unwrap_err().contains("cuda:0"));
        assert!(parse_device("cuda:x").is_err() && parse_device("cuda:99999999999").is_err());
    }
}
