//! The baseline of a check: where it lies, what is in it, and what the command line adds.

use std::path::{Component, Path, PathBuf};

use anyhow::Context as _;

use super::Args;
use crate::alloc::planned::with_files;
use crate::alloc::spec::AllocSpec;
use crate::cli::input;
use crate::experiment::check::{Baseline, Entry, FigureName, Figures};

/// Largest baseline in bytes: hundreds of thousands of entries.
const BYTES_MAX: u64 = 256 << 20;
/// What stands in a baseline's file.
const EXPECTED: &str = "the JSON that `fraglab check --init` writes; traces are named inside it, or \
                        given by --trace";

/// The baseline that there is, or an empty one.
pub(super) fn start(path: &Path, init: bool) -> anyhow::Result<Baseline> {
    let shown = path.display();
    if init {
        anyhow::ensure!(
            !path.exists(),
            "{shown}: is there already: give --update to change it, or remove it first"
        );
        return Ok(Baseline::default());
    }
    anyhow::ensure!(
        input::is_stdio(path) || path.exists(),
        "{shown}: there is no such file: --init with --trace and --alloc writes a new baseline"
    );
    let text = input::read_text(path, BYTES_MAX, EXPECTED)?;
    let mut baseline = Baseline::parse(&text).with_context(|| shown.to_string())?;
    baseline.fraglab_version = Baseline::default().fraglab_version;
    Ok(baseline)
}

/// The entries that the command line names.
pub(super) fn new_entries(args: &Args) -> anyhow::Result<Vec<Entry>> {
    let folder = folder_of(&args.baseline);
    let mut specs: Vec<AllocSpec> = args.alloc.iter().flat_map(|list| list.0.clone()).collect();
    if specs.is_empty() {
        specs.push(AllocSpec { name: "caching".to_owned(), params: Vec::new() });
    }
    let gate = args.gate.iter().map(|&gate| FigureName::from(gate)).collect();
    let gate = (!args.gate.is_empty()).then_some(gate);
    let mut entries: Vec<Entry> = Vec::new();
    for path in &args.trace {
        let trace = relative(&folder, path)?;
        for spec in &specs {
            let entry = Entry {
                trace: trace.clone(),
                trace_fingerprint: String::new(),
                allocator: with_files(spec, |file| relative(&folder, Path::new(file)))?.to_string(),
                gpu: args.device.gpu,
                capacity_bytes: args.device.capacity.map(|size| size.0),
                limit_bytes: args.device.limit.map(|size| size.0),
                settings: args.device.pytorch_conf.clone(),
                profile: args.device.profile.clone(),
                gate: gate.clone(),
                tolerance: None,
                figures: Figures::UNKNOWN,
            };
            if !entries.iter().any(|other| other.is_same_replay(&entry)) {
                entries.push(entry);
            }
        }
    }
    Ok(entries)
}

/// The folder from which a baseline's traces are named.
pub(super) fn folder_of(baseline: &Path) -> PathBuf {
    baseline.parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The way from a folder to a file, with `/` between its parts.
fn relative(folder: &Path, file: &Path) -> anyhow::Result<String> {
    anyhow::ensure!(!input::is_stdio(file), "-: a baseline names files: give the trace's");
    let place = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        path.canonicalize().with_context(|| path.display().to_string())
    };
    // The file may be a link with a telling name: only its folder is looked up.
    anyhow::ensure!(file.exists(), "{}: there is no such file", file.display());
    let name = file.file_name().with_context(|| format!("{}: is no file", file.display()))?;
    let from = place(folder)?;
    let to = place(&folder_of(file))?.join(name);
    let (from, to): (Vec<_>, Vec<_>) = (from.components().collect(), to.components().collect());
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(Component::ParentDir, from.len() - shared);
    let parts = up.chain(to[shared..].iter().copied()).map(|part| part.as_os_str().to_str());
    let parts: Option<Vec<&str>> = parts.collect();
    let parts = parts.with_context(|| format!("{}: is no UTF-8", file.display()))?;
    Ok(parts.join("/"))
}
