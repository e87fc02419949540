//! `fraglab lint-conf`: what a settings string of PyTorch's allocator does, and its traps.

use std::io::{self, Read};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use super::Verdict;
use super::console::Console;
use super::input::ReadFailure;
use super::setup::parse_size;
use crate::alloc::caching::{self, Circumstances, Lint, SettingsVariable, TorchVersion};
use crate::report::json;
use crate::report::text::{self, Effect};
use crate::units::Bytes;

const AFTER_HELP: &str = "\
Examples:
  fraglab lint-conf max_split_size_mb:128,expandable_segments:True
  fraglab lint-conf garbage_collection_threshold:0.8,per_process_memory_fraction:0.9 --total 80GiB
  fraglab lint-conf --torch 2.9.1 --env PYTORCH_ALLOC_CONF expandable_segments:True
  fraglab lint-conf \"export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'\"
  echo \"$PYTORCH_CUDA_ALLOC_CONF\" | fraglab lint-conf - --json | jq -r '.traps[].id'

Exit codes: 0 PyTorch accepts the string, whatever its traps, 2 it refuses it, or the string asks \
for what is not modelled (backend:cudaMallocAsync).";

/// More than this is no settings string.
const INPUT_BYTES_MAX: u64 = 1 << 20;

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// The settings, as in max_split_size_mb:128,garbage_collection_threshold:0.8; `-` is standard
    /// input
    #[arg(value_name = "STRING")]
    settings: String,

    /// The release of PyTorch that reads it, as in 2.11 or 2.9.1+cu128
    #[arg(long, value_name = "VERSION", default_value_t)]
    torch: TorchVersion,

    /// Total memory that the device reports, as in 80GiB: shares of it are then told in bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    total: Option<Bytes>,

    /// Memory limit set in the program, as in 60GiB
    ///
    /// What torch.cuda.set_per_process_memory_fraction sets; it stands in place of
    /// per_process_memory_fraction.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<Bytes>,

    /// The environment variable that holds the string: adds what goes wrong with its name; by
    /// default the one that the string is assigned to, as in PYTORCH_ALLOC_CONF=...
    #[arg(long, value_enum, value_name = "NAME")]
    env: Option<Variable>,

    /// Write JSON: {settings, torch, variable, effective, changed, traps, differences}
    #[arg(long)]
    json: bool,
}

/// The variables, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Variable {
    #[value(name = "PYTORCH_ALLOC_CONF")]
    Alloc,
    #[value(name = "PYTORCH_CUDA_ALLOC_CONF")]
    CudaAlloc,
    #[value(name = "PYTORCH_HIP_ALLOC_CONF")]
    HipAlloc,
}

impl From<Variable> for SettingsVariable {
    fn from(variable: Variable) -> Self {
        match variable {
            Variable::Alloc => SettingsVariable::Alloc,
            Variable::CudaAlloc => SettingsVariable::CudaAlloc,
            Variable::HipAlloc => SettingsVariable::HipAlloc,
        }
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    settings: &'a str,
    torch: String,
    variable: Option<&'static str>,
    effective: Effective,
    changed: Vec<Effect>,
    traps: Vec<TrapEntry<'a>>,
    differences: &'static [&'static str],
}

/// The settings in force.
#[derive(Serialize)]
struct Effective {
    large_segment_size_bytes: u64,
    /// None is unlimited.
    max_split_size_bytes: Option<u64>,
    max_non_split_rounding_bytes: u64,
    garbage_collection_threshold: f64,
    garbage_collection_bytes: Option<u64>,
    roundup_power2_divisions: Vec<u64>,
    expandable_segments: bool,
    per_process_memory_fraction: f64,
    limit_bytes: Option<u64>,
}

#[derive(Serialize)]
struct TrapEntry<'a> {
    id: &'static str,
    text: &'a str,
    reason: &'static str,
    address: Option<&'static str>,
}

/// Tells what the string does and what goes wrong with it.
///
/// # Errors
/// If PyTorch would refuse the string, or standard input or output fails.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    let settings = match args.settings.as_str() {
        "-" => read_stdin()?,
        typed => typed.to_owned(),
    };
    let (assigned, settings) = without_assignment(settings.trim());
    let variable = args.env.or(assigned).map(SettingsVariable::from);
    let circumstances = Circumstances {
        version: args.torch,
        device_total_bytes: args.total.map(|size| size.0),
        limit_bytes: args.limit.map(|size| size.0),
        variable,
    };
    let lint = caching::lint(settings, &circumstances)
        .map_err(|error| ReadFailure::of_settings(&error))?;
    let text = if args.json {
        json::pretty(&answer(settings, variable, &lint))?
    } else {
        text::lint(settings, &lint, console.style())
    };
    console.print(&text)?;
    Ok(Verdict::Good)
}

/// A string as pasted from a shell, `export PYTORCH_CUDA_ALLOC_CONF='...'`: the variable, and what
/// it is set to.
fn without_assignment(typed: &str) -> (Option<Variable>, &str) {
    let exported = typed.strip_prefix("export").filter(|rest| rest.starts_with([' ', '\t']));
    let assigned = exported.unwrap_or(typed).trim_start().split_once('=');
    let found = assigned
        .and_then(|(name, value)| Some((Variable::from_str(name, false).ok()?, value.trim())));
    let Some((variable, value)) = found else { return (None, typed) };
    let unquoted = ['"', '\'']
        .into_iter()
        .find_map(|quote| value.strip_prefix(quote).and_then(|value| value.strip_suffix(quote)));
    (Some(variable), unquoted.unwrap_or(value))
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let mut limited = io::stdin().lock().take(INPUT_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).context("-: standard input cannot be read")?;
    anyhow::ensure!(
        bytes.len() as u64 <= INPUT_BYTES_MAX,
        "-: more than {} is no settings string",
        Bytes(INPUT_BYTES_MAX)
    );
    String::from_utf8(bytes).context("-: expected text in UTF-8")
}

fn answer<'a>(settings: &'a str, variable: Option<SettingsVariable>, lint: &'a Lint) -> Answer<'a> {
    let config = &lint.config;
    let max_split_size_bytes = config.max_split_size_bytes;
    let effective = Effective {
        large_segment_size_bytes: config.large_segment_size_bytes,
        max_split_size_bytes: (max_split_size_bytes != u64::MAX).then_some(max_split_size_bytes),
        max_non_split_rounding_bytes: config.max_non_split_rounding_bytes,
        garbage_collection_threshold: config.garbage_collection_threshold,
        garbage_collection_bytes: lint.garbage_collection_bytes,
        roundup_power2_divisions: config.roundup_power2_divisions.to_vec(),
        expandable_segments: config.expandable_segments,
        per_process_memory_fraction: config.per_process_memory_fraction,
        limit_bytes: lint.limit_bytes,
    };
    let trap = |trap: &'a caching::Trap| TrapEntry {
        id: trap.id,
        text: &trap.text,
        reason: trap.reason,
        address: trap.address,
    };
    Answer {
        settings,
        torch: config.version.to_string(),
        variable: variable.map(SettingsVariable::name),
        effective,
        changed: text::effects(lint),
        traps: lint.traps.iter().map(trap).collect(),
        differences: config.version.differences(),
    }
}
