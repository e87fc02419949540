//! Settings: from the environment, and what the program configures, which wins.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::gpu::GpuChoice;
use crate::alloc::planned::{self, PlanFiles, Profile};
use crate::alloc::registry::{self, Visitor};
use crate::alloc::spec::AllocSpec;
use crate::alloc::{Allocator, BuildInputs};
use crate::chunk;
use crate::engine::first_steps;
use crate::import::{ReadOptions, read_trace};
use crate::plan::stalloc::files::PlanFile;
use crate::trace::Compression;
use crate::units::Bytes;

/// What a setting is called by the program and in the environment; of several variables the first
/// that is set counts.
const KEYS: [(&str, &[&str]); 8] = [
    ("alloc", &["FRAGLAB_ALLOC"]),
    ("mode", &["FRAGLAB_MODE"]),
    ("trace", &["FRAGLAB_TRACE"]),
    ("profile", &["FRAGLAB_PROFILE"]),
    ("limit", &["FRAGLAB_LIMIT"]),
    ("log", &["FRAGLAB_LOG"]),
    ("conf", &["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]),
    ("device", &["FRAGLAB_DEVICE"]),
];

/// Where traces go unless it is said.
const TRACE_DEFAULT: &str = "fraglab-%p-%d.json.zst";

/// Texts by key.
pub(super) type Given = BTreeMap<String, String>;

/// Where statistics go at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Log {
    /// Nowhere.
    Nowhere,
    /// To standard error.
    Stderr,
    /// Into this file; `%p` is the process.
    File(String),
}

/// Settings that are understood.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// The allocator.
    pub(super) spec: AllocSpec,
    /// Record a trace.
    pub(super) records: bool,
    /// Where it goes.
    pub(super) trace: String,
    /// Most bytes that an allocator may hold.
    pub(super) limit_bytes: Option<u64>,
    /// Where statistics go.
    pub(super) log: Log,
    /// Settings of `caching`.
    pub(super) conf: Option<String>,
    /// Which devices.
    pub(super) device: GpuChoice,
    /// What an allocator that plans ahead plans from.
    profile: Option<Arc<Profile>>,
    plan_files: Option<Arc<PlanFiles>>,
}

/// What a program gives, as a JSON object or as lines `key=value`.
///
/// # Errors
/// What is not understood, and what was expected.
pub(super) fn parse(text: &str) -> Result<Given, String> {
    let given =
        if text.trim_start().starts_with('{') { parse_json(text) } else { parse_lines(text) }?;
    let known = |key: &String| KEYS.iter().any(|(name, _)| name == key);
    match given.keys().find(|key| !known(key)) {
        Some(key) => {
            let names: Vec<&str> = KEYS.iter().map(|(name, _)| *name).collect();
            Err(format!("no setting {key:?}; there are: {}", names.join(", ")))
        }
        None => Ok(given),
    }
}

fn parse_json(text: &str) -> Result<Given, String> {
    let object: BTreeMap<String, serde_json::Value> = serde_json::from_str(text)
        .map_err(|error| format!("settings are no JSON object of texts: {error}"))?;
    let mut given = Given::new();
    for (key, value) in object {
        match value {
            serde_json::Value::Null => {}
            serde_json::Value::String(text) => drop(given.insert(key, text)),
            serde_json::Value::Number(number) => drop(given.insert(key, number.to_string())),
            other => return Err(format!("{key}: expected a text, found {other}")),
        }
    }
    Ok(given)
}

fn parse_lines(text: &str) -> Result<Given, String> {
    let mut given = Given::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| format!("{line:?} is no setting: expected key=value"))?;
        given.insert(key.trim().to_owned(), value.trim().to_owned());
    }
    Ok(given)
}

/// What the environment says, where the program gave nothing.
pub(super) fn with_environment(given: &Given, variable: impl Fn(&str) -> Option<String>) -> Given {
    let mut all = given.clone();
    for (key, variables) in KEYS {
        let found = variables.iter().find_map(|name| variable(name).filter(|it| !it.is_empty()));
        if let (false, Some(text)) = (all.contains_key(key), found) {
            all.insert(key.to_owned(), text);
        }
    }
    all
}

impl Settings {
    /// Reads texts, and the files that they name.
    ///
    /// # Errors
    /// The first that is not understood, with what was expected.
    pub(super) fn read(given: &Given) -> Result<Settings, String> {
        let text = |key: &str| given.get(key).map(String::as_str);
        let mut spec: AllocSpec = text("alloc")
            .unwrap_or("caching")
            .parse()
            .map_err(|error| format!("FRAGLAB_ALLOC: {error}"))?;
        if let Some(profile) = text("profile") {
            give_profile(&mut spec, profile)?;
        }
        if spec.name == chunk::NAME {
            return Err(
                "FRAGLAB_ALLOC: chunk moves the tensors of a trace, which a library cannot: \
                        expected one of the other allocators"
                    .to_owned(),
            );
        }
        // Who says where a trace goes wants one.
        let mode = if text("trace").is_some() { "trace" } else { "alloc" };
        let records = match text("mode").unwrap_or(mode) {
            "alloc" => false,
            "trace" => true,
            other => return Err(format!("FRAGLAB_MODE={other}: expected alloc or trace")),
        };
        let trace = text("trace").unwrap_or(TRACE_DEFAULT).to_owned();
        check_trace_name(&trace)?;
        if records {
            check_folder(&trace)?;
        }
        let mut settings = Settings {
            records,
            trace,
            limit_bytes: text("limit").map(|it| size("FRAGLAB_LIMIT", it)).transpose()?,
            log: match text("log") {
                None => Log::Nowhere,
                Some("stderr") => Log::Stderr,
                Some(file) => Log::File(file.to_owned()),
            },
            conf: text("conf").map(str::to_owned),
            device: device(text("device").unwrap_or("cuda"))?,
            profile: None,
            plan_files: None,
            spec,
        };
        settings.read_files()?;
        settings.check()?;
        Ok(settings)
    }

    /// What an allocator may know.
    pub(super) fn inputs(&self, total_bytes: u64, limit_bytes: Option<u64>) -> BuildInputs {
        BuildInputs {
            settings: self.conf.clone(),
            recorded_settings: self.conf.clone(),
            limit_bytes,
            device_total_bytes: Some(total_bytes),
            stream_handles: vec![super::served::DEFAULT_STREAM],
            profile: self.profile.clone(),
            plan_files: self.plan_files.clone(),
            ..BuildInputs::default()
        }
    }

    /// Settings as PyTorch writes them, for the head of a trace: those of `caching` with its
    /// parameters. Nothing for other allocators, and where a parameter is none of PyTorch's.
    pub(super) fn torch_settings(&self) -> Option<String> {
        let mut parts: Vec<String> = self.conf.iter().cloned().collect();
        match self.spec.name.as_str() {
            "caching" => {}
            "expandable" => parts.push("expandable_segments:True".to_owned()),
            _ => return None,
        }
        let foreign = ["torch", "research_after_flush", "segment_rounding"];
        for (key, value) in &self.spec.params {
            if foreign.contains(&key.as_str()) {
                return None;
            }
            parts.push(format!("{key}:{value}"));
        }
        Some(parts.join(","))
    }

    fn read_files(&mut self) -> Result<(), String> {
        let spec = self.spec.clone();
        for (key, name) in planned::files(&spec) {
            let path = Path::new(name);
            if key == "trace" {
                let read = read_trace(path, &ReadOptions::default());
                let trace = read.map_err(|error| format!("{spec}: {error}"))?.trace;
                self.profile = Some(Arc::new(first_steps(&trace, usize::MAX)));
            } else {
                let text =
                    std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"));
                let plan = PlanFile::parse(&text?).map_err(|error| format!("{name}: {error}"))?;
                let source = name.to_owned();
                self.plan_files =
                    Some(Arc::new(PlanFiles { source, plan, ..PlanFiles::default() }));
            }
        }
        Ok(())
    }

    /// Builds the allocator once for nothing, so that what it does not take is said at once.
    fn check(&self) -> Result<(), String> {
        struct Built;

        impl Visitor for Built {
            type Output = ();

            fn visit<A: Allocator + Send + 'static>(self, _allocator: A) {}
        }

        if self.spec.name == planned::NAME && self.profile.is_none() && self.plan_files.is_none() {
            return Err(
                "planned needs a profile: record one step or more with FRAGLAB_MODE=trace, \
                        then set FRAGLAB_PROFILE to that trace"
                    .to_owned(),
            );
        }
        let total_bytes = self.limit_bytes.unwrap_or(1 << 40);
        let built = registry::build(&self.spec, &self.inputs(total_bytes, self.limit_bytes), Built);
        built.map_err(|error| format!("FRAGLAB_ALLOC: {error}"))
    }
}

/// `planned` takes its profile from a file; others need none.
fn give_profile(spec: &mut AllocSpec, profile: &str) -> Result<(), String> {
    if spec.name != planned::NAME {
        return Err(format!(
            "FRAGLAB_PROFILE is for the allocator planned, and FRAGLAB_ALLOC is {spec}"
        ));
    }
    if spec.params.iter().any(|(key, _)| key == "trace") {
        return Err(format!("FRAGLAB_PROFILE, and {spec}: give the profile once"));
    }
    spec.params.push(("trace".to_owned(), profile.to_owned()));
    Ok(())
}

fn size(name: &str, text: &str) -> Result<u64, String> {
    let Bytes(bytes) = text.parse().map_err(|error| format!("{name}={text}: {error}"))?;
    Ok(bytes)
}

/// Traces are native JSON, compressed or not.
fn check_trace_name(name: &str) -> Result<(), String> {
    let path = Path::new(name);
    let inner = match Compression::of_name(path) {
        Compression::None => path.to_owned(),
        Compression::Gzip | Compression::Zstd => path.with_extension(""),
    };
    if inner.extension().is_some_and(|extension| extension == "json") {
        return Ok(());
    }
    Err(format!("FRAGLAB_TRACE={name}: expected a name that ends in .json, .json.gz or .json.zst"))
}

/// A job of hours must not learn at its end that its trace has no place.
fn check_folder(name: &str) -> Result<(), String> {
    let folder = match Path::new(name).parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Whether it can be written to is best known to who writes; the file vanishes when dropped.
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(error) => {
            let folder = folder.display();
            Err(format!("FRAGLAB_TRACE={name}: the folder {folder} cannot be written: {error}"))
        }
    }
}

fn device(text: &str) -> Result<GpuChoice, String> {
    if text == "cuda" {
        return Ok(GpuChoice::Cuda);
    }
    let capacity = text.strip_prefix("sim:").ok_or_else(|| {
        format!("FRAGLAB_DEVICE={text}: expected cuda, or sim:SIZE as in sim:8GiB")
    })?;
    match size("FRAGLAB_DEVICE", capacity)? {
        0 => Err(format!("FRAGLAB_DEVICE={text}: expected a size above 0, as in sim:8GiB")),
        capacity_bytes => Ok(GpuChoice::Sim { capacity_bytes }),
    }
}
