//! The devices of the process: each made when it is first used, behind a mutex of its own.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::gpu::Gpu;
use super::record::Recorder;
use super::served::{Equipment, Served, Server, new_world};
use super::settings::{Given, Log, Settings, parse, with_environment};
use super::stats::Stats;
use crate::alloc::Allocator;
use crate::alloc::registry::{self, Visitor};
use crate::device::{CostProfile, Counting, Device};
use crate::trace::{DeviceInfo, Header, OutputFile, write_trace};

/// Most devices of a process.
pub(super) const DEVICES_MAX: usize = 64;

type Slot = Mutex<Box<dyn Server>>;

static DEVICES: [OnceLock<Slot>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

static COMMON: Mutex<Common> = Mutex::new(Common {
    given: Given::new(),
    settings: None,
    fractions: BTreeMap::new(),
    phase: None,
    written_events: BTreeMap::new(),
    first: None,
});

/// The process that uses the devices, or 0: forked ones write nothing.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// What all devices have in common.
struct Common {
    /// What the program configured.
    given: Given,
    /// What holds; not yet looked for before it is needed.
    settings: Option<Arc<Settings>>,
    /// Shares of devices that may be held, by ordinal.
    fractions: BTreeMap<usize, f64>,
    /// The phase that the program marked last.
    phase: Option<String>,
    /// Events of the traces that were written, by ordinal.
    written_events: BTreeMap<usize, u64>,
    /// The device that was used first.
    first: Option<u32>,
}

impl Common {
    /// Where the trace of a device goes. A name without `%d` is that of the device that was used
    /// first; the others' files have their number in it, or one would take the place of the other.
    fn trace_path(&self, ordinal: u32) -> Option<String> {
        let pattern = &self.settings.as_ref()?.trace;
        let is_first = self.first.is_none_or(|first| first == ordinal);
        Some(match pattern.rfind(".json") {
            Some(at) if !is_first && !pattern.contains("%d") => {
                let (stem, ending) = pattern.split_at(at);
                filled(&format!("{stem}-%d{ending}"), ordinal)
            }
            _ => filled(pattern, ordinal),
        })
    }
}

/// Nothing in this room leaves these halfway when it panics.
fn common() -> MutexGuard<'static, Common> {
    COMMON.lock().unwrap_or_else(PoisonError::into_inner)
}

fn used() -> impl Iterator<Item = (usize, &'static Slot)> {
    DEVICES.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.get()?)))
}

/// What is said of a device after a panic in its allocator.
const BROKEN: &str = "an earlier error inside fraglab (see standard error) left this device's \
                      allocator unusable: please report it";

fn lock(slot: &'static Slot) -> Result<MutexGuard<'static, Box<dyn Server>>, String> {
    slot.lock().map_err(|_| BROKEN.to_owned())
}

/// Takes settings from the program.
///
/// # Errors
/// What is wrong with them; that a device is in use already.
pub(super) fn configure(text: &str) -> Result<(), String> {
    let more = parse(text)?;
    let mut common = common();
    if used().next().is_some() {
        return Err(
            "GPU memory is in use already: configure before the first allocation".to_owned()
        );
    }
    let mut given = common.given.clone();
    given.extend(more);
    let settings = read_settings(&given)?;
    common.given = given;
    common.settings = Some(Arc::new(settings));
    Ok(())
}

fn read_settings(given: &Given) -> Result<Settings, String> {
    Settings::read(&with_environment(given, |name| std::env::var(name).ok()))
}

/// The device of this number, made if it is new.
///
/// # Errors
/// Wrong settings; no such device.
#[inline]
pub(super) fn server(ordinal: i32) -> Result<MutexGuard<'static, Box<dyn Server>>, String> {
    let slot = usize::try_from(ordinal).ok().and_then(|at| DEVICES.get(at));
    let slot = slot.ok_or_else(|| {
        format!("device {ordinal}: fraglab serves devices 0 to {}", DEVICES_MAX - 1)
    })?;
    match slot.get() {
        Some(slot) => lock(slot),
        None => lock(make(ordinal as usize)?),
    }
}

/// The device of this number, if it is in use.
#[inline]
pub(super) fn known(ordinal: i32) -> Option<MutexGuard<'static, Box<dyn Server>>> {
    let slot = usize::try_from(ordinal).ok().and_then(|at| DEVICES.get(at))?;
    lock(slot.get()?).ok()
}

/// Does something with every device in use, in their order.
pub(super) fn for_each(mut action: impl FnMut(&mut dyn Server)) {
    for (_, slot) in used() {
        if let Ok(mut server) = lock(slot) {
            action(&mut **server);
        }
    }
}

/// A phase begins, on every device in use and on those that come.
pub(super) fn mark(phase: &str) {
    common().phase = Some(phase.to_owned());
    for_each(|server| server.mark(phase));
}

#[cold]
fn make(ordinal: usize) -> Result<&'static Slot, String> {
    let mut common = common();
    if let Some(slot) = DEVICES[ordinal].get() {
        return Ok(slot);
    }
    let settings = match &common.settings {
        Some(settings) => Arc::clone(settings),
        None => {
            let settings = Arc::new(read_settings(&common.given)?);
            common.settings = Some(Arc::clone(&settings));
            settings
        }
    };
    let gpu = Gpu::open(settings.device, ordinal as u32)?;
    let fraction = common.fractions.get(&ordinal).copied();
    let path = common.trace_path(ordinal as u32).unwrap_or_default();
    let mut server = build(&settings, gpu, ordinal as u32, fraction, &path)?;
    common.first.get_or_insert(ordinal as u32);
    if let Some(phase) = &common.phase {
        server.mark(phase);
    }
    if PROCESS.swap(std::process::id(), Ordering::Relaxed) == 0 {
        super::entry::finish_at_exit();
    }
    Ok(DEVICES[ordinal].get_or_init(|| Mutex::new(server)))
}

fn build(
    settings: &Settings,
    gpu: Gpu,
    ordinal: u32,
    fraction: Option<f64>,
    trace_path: &str,
) -> Result<Box<dyn Server>, String> {
    let events = gpu.events();
    let device_name = gpu.name();
    let total_bytes = gpu.memory_info().total_bytes;
    let share = fraction.map(|fraction| (fraction * total_bytes as f64) as u64);
    let limit_bytes = settings.limit_bytes.into_iter().chain(share).min();
    let profile = CostProfile::shipped("h200").map_err(|error| error.to_string())?;
    let mut inputs = settings.inputs(total_bytes, limit_bytes);
    inputs.costs = Some(profile.clone());
    let torch_settings = settings.torch_settings();
    let header = Header {
        name: trace_name(trace_path),
        device: DeviceInfo {
            name: device_name.clone(),
            index: Some(ordinal),
            total_bytes: Some(total_bytes),
            ..DeviceInfo::default()
        },
        limit_bytes,
        start_unix_ns: unix_ns(),
        settings: torch_settings.clone().filter(|settings| !settings.is_empty()),
        ..Header::default()
    };
    let equipment = Equipment {
        world: new_world(Counting::new(gpu, profile), events, settings.records),
        ordinal,
        name: settings.spec.to_string(),
        recorder: settings.records.then(|| Recorder::new(header, torch_settings.is_some())),
        device_name,
    };
    registry::build(&settings.spec, &inputs, Employ(equipment))
        .map_err(|error| format!("FRAGLAB_ALLOC: {error}"))
}

/// Puts an allocator whose type is known to work.
struct Employ(Equipment);

impl Visitor for Employ {
    type Output = Box<dyn Server>;

    fn visit<A: Allocator + Send + 'static>(self, allocator: A) -> Box<dyn Server> {
        Box::new(Served::new(allocator, self.0))
    }
}

fn unix_ns() -> Option<u64> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

/// A file name with the process and the device filled in.
fn filled(pattern: &str, ordinal: u32) -> String {
    pattern.replace("%p", &std::process::id().to_string()).replace("%d", &ordinal.to_string())
}

/// The stem of a trace's file.
fn trace_name(path: &str) -> String {
    let file = Path::new(path).file_name().and_then(|file| file.to_str()).unwrap_or("trace");
    file.split(".json").next().unwrap_or(file).to_owned()
}

/// No more than this share of the device may be held.
pub(super) fn set_fraction(ordinal: i32, fraction: f64) {
    let Ok(at) = usize::try_from(ordinal) else { return };
    let mut common = common();
    common.fractions.insert(at, fraction);
    if let Some(mut server) = known(ordinal) {
        server.set_fraction(fraction);
    }
}

/// Statistics of a device; −1: of all in use.
///
/// # Errors
/// The device is not in use.
pub(super) fn stats(ordinal: i32) -> Result<String, String> {
    // Apart from the figures: whoever holds a device does not wait for what all have in common.
    let path = |ordinal: u32| common().trace_path(ordinal);
    let text = if ordinal < 0 {
        let mut all = Vec::new();
        for_each(|server| all.push(server.snapshot(true)));
        let told = all.into_iter().map(|it| (path(it.ordinal), it));
        let all: Vec<Stats> = told.map(|(path, snapshot)| snapshot.stats(path)).collect();
        serde_json::to_string(&all)
    } else {
        let server = known(ordinal).ok_or_else(|| format!("device {ordinal} is not in use"))?;
        let snapshot = server.snapshot(true);
        drop(server);
        let path = path(snapshot.ordinal);
        serde_json::to_string(&snapshot.stats(path))
    };
    text.map_err(|error| error.to_string())
}

/// Writes traces and the log.
///
/// # Errors
/// The first that could not be written; the others are written nevertheless.
pub(super) fn finish(asks_device: bool) -> Result<(), String> {
    // First of all: in a forked process the locks may be held by threads that are not there.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return Ok(());
    }
    let mut common = common();
    let Some(settings) = common.settings.clone() else { return Ok(()) };
    let mut wrong = None;
    let mut lines = String::new();
    for (ordinal, slot) in used() {
        let Ok(mut server) = lock(slot) else { continue };
        let path = common.trace_path(ordinal as u32).unwrap_or_default();
        let stats = server.snapshot(asks_device).stats(Some(path.clone()));
        lines.extend(serde_json::to_string(&stats).map(|line| line + "\n"));
        let Some(trace) = server.trace() else { continue };
        let events = trace.events.len() as u64;
        if common.written_events.get(&ordinal) == Some(&events) {
            continue;
        }
        match write_trace(trace, Path::new(&path)) {
            Ok(_) => drop(common.written_events.insert(ordinal, events)),
            Err(error) => drop(wrong.get_or_insert(error.to_string())),
        }
    }
    if let Err(error) = write_log(&settings.log, &lines) {
        wrong.get_or_insert(error);
    }
    wrong.map_or(Ok(()), Err)
}

fn write_log(log: &Log, lines: &str) -> Result<(), String> {
    match log {
        Log::Nowhere => {}
        // A closed standard error is nobody's fault.
        Log::Stderr => drop(std::io::stderr().write_all(lines.as_bytes())),
        Log::File(name) => {
            let name = filled(name, 0);
            let path = Path::new(&name);
            let mut file = OutputFile::create(path).map_err(|error| error.to_string())?;
            file.write_all(lines.as_bytes()).map_err(|error| format!("{name}: {error}"))?;
            file.commit().map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}
