//! Settings of PyTorch's allocator to try on a trace, and what each gives.
//!
//! The one design decision: a candidate is a whole settings string, made from the recorded one by
//! replacing or leaving out options, and goes through the same reader as any other. So what is tried
//! is what would be pasted.

use std::fmt;

use serde::Serialize;

use crate::alloc::caching::{Circumstances, ConfigError, TorchVersion, Trap, lint};
use crate::alloc::spec::AllocSpec;
use crate::engine::{
    Brief, CapacitySearch, Prepared, RunError, RunOptions, Status, brief, smallest_capacity,
};
use crate::trace::{Event, Op, SourceKind, Trace, step_name};
use crate::units::MIB;

/// The allocator whose settings they are.
const CACHING: &str = "caching";

/// Sizes in MiB that blocks may be split below: from the smallest that every release accepts to what
/// only the largest tensors reach.
const SPLIT_MB: [u64; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Divisions between powers of two that sizes may be rounded up to.
const ROUNDUP_DIVISIONS: [u64; 5] = [2, 4, 8, 16, 32];
/// Shares of the limit above which free segments are given back.
const GARBAGE_THRESHOLDS: [&str; 3] = ["0.6", "0.8", "0.9"];
/// Sizes in MiB of the segments for requests of 1 to 10 MiB, beside the default of 20.
const SEGMENT_MB: [u64; 3] = [32, 64, 128];

/// The option that bounds the allocator by a share of the device.
const FRACTION: &str = "per_process_memory_fraction";

/// A settings string as its options, in order, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SettingsLine {
    options: Vec<(String, String)>,
}

impl SettingsLine {
    /// Reads a settings string. Of an option that is given twice the last counts.
    ///
    /// # Errors
    /// The first word that PyTorch would refuse.
    pub fn parse(text: &str, version: TorchVersion) -> Result<SettingsLine, ConfigError> {
        let circumstances = Circumstances { version, ..Circumstances::default() };
        let given = lint(text, &circumstances)?.given;
        let mut line = SettingsLine::default();
        for option in given {
            line.set(&option.key, &option.value);
        }
        Ok(line)
    }

    fn set(&mut self, key: &str, value: &str) {
        match self.options.iter_mut().find(|option| option.0 == key) {
            Some(option) => value.clone_into(&mut option.1),
            None => self.options.push((key.to_owned(), value.to_owned())),
        }
    }

    /// The same with an option set.
    #[must_use]
    pub fn with(&self, key: &str, value: &str) -> SettingsLine {
        let mut line = self.clone();
        line.set(key, value);
        line
    }

    /// The same without an option.
    #[must_use]
    pub fn without(&self, key: &str) -> SettingsLine {
        let options = self.options.iter().filter(|option| option.0 != key);
        SettingsLine { options: options.cloned().collect() }
    }

    /// The value of an option, if it is given.
    pub fn get(&self, key: &str) -> Option<&str> {
        let option = self.options.iter().find(|option| option.0 == key)?;
        Some(&option.1)
    }

    /// The names of the options, in their order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.options.iter().map(|option| option.0.as_str())
    }

    /// The same with options left out, each way that is worth a try: one of them, and all. A share
    /// of the device is no way to use memory but a bound, and stays.
    pub fn shorter(&self) -> Vec<SettingsLine> {
        let keys: Vec<&str> = self.keys().filter(|&key| key != FRACTION).collect();
        let mut lines: Vec<SettingsLine> = keys.iter().map(|key| self.without(key)).collect();
        if keys.len() > 1 {
            lines.push(keys.iter().fold(self.clone(), |line, key| line.without(key)));
        }
        lines
    }
}

impl fmt::Display for SettingsLine {
    /// As it stands in the environment: `key:value,key:value`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let option = |(key, value): &(String, String)| format!("{key}:{value}");
        let options: Vec<String> = self.options.iter().map(option).collect();
        f.write_str(&options.join(","))
    }
}

/// One option and the values of it that are worth a try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Name of the option.
    pub key: &'static str,
    /// Its values, as they stand in a settings string.
    pub values: Vec<String>,
}

/// Settings in which one thing differs from those that they are measured against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Single {
    /// The option that is set and its value; nothing where options are left out.
    pub set: Option<(&'static str, String)>,
    /// The whole string.
    pub line: SettingsLine,
}

/// A trace and what its settings are judged by.
#[derive(Clone, Debug)]
pub struct Trial<'t> {
    trace: &'t Trace,
    options: &'t RunOptions,
    /// The settings that the others are measured against: those asked for, else the recorded ones.
    pub base: SettingsLine,
    /// The release whose settings they are.
    pub version: TorchVersion,
    /// The allocator's limit in bytes, if it has one.
    pub limit_bytes: Option<u64>,
}

/// What a settings string gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The settings string; empty for the defaults.
    pub settings: String,
    /// Whether every request was met.
    pub status: Status,
    /// Requests that were refused.
    pub refusals: u64,
    /// Largest sum of live requests in bytes.
    pub requested_bytes_peak: u64,
    /// Most memory that was held, in bytes.
    pub reserved_bytes_peak: u64,
    /// 1 − requested peak / reserved peak.
    pub fragmentation: f64,
    /// How often the cache was given back to ask the device again.
    pub alloc_retries: u64,
    /// Device calls of all kinds.
    pub device_calls: u64,
    /// What they cost by the profile, in nanoseconds.
    pub device_ns: u64,
    /// The smallest device on which every request is met, in bytes; absent if it was not looked for
    /// or there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smallest_capacity_bytes: Option<u64>,
    /// What is known to go wrong with such a string, by name.
    pub traps: Vec<&'static str>,
    /// The options given, by name, sorted.
    #[serde(skip)]
    pub keys: Vec<String>,
}

impl Tried {
    /// What a replay with these settings gave.
    pub fn of(line: &SettingsLine, brief: &Brief, traps: Vec<&'static str>) -> Tried {
        let peaks = brief.peaks;
        let mut keys: Vec<String> = line.keys().map(str::to_owned).collect();
        keys.sort_unstable();
        Tried {
            keys,
            settings: line.to_string(),
            status: brief.status(),
            refusals: brief.refusals,
            requested_bytes_peak: peaks.requested_bytes_peak,
            reserved_bytes_peak: peaks.reserved_bytes_peak,
            fragmentation: brief.fragmentation(),
            alloc_retries: brief.alloc_retries,
            device_calls: brief.calls.total(),
            device_ns: brief.device_ns,
            smallest_capacity_bytes: None,
            traps,
        }
    }
}

/// A settings string cannot be tried.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The settings are none.
    #[error(transparent)]
    Settings(#[from] ConfigError),
    /// The replay could not be done.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl<'t> Trial<'t> {
    /// For a trace, on the device and below the limit that the options or the trace name.
    ///
    /// # Errors
    /// If the settings asked for, or the recorded ones, are none.
    pub fn new(trace: &'t Trace, options: &'t RunOptions) -> Result<Trial<'t>, TrialError> {
        let version = version_of(trace);
        let settings = options.settings.as_ref().or(trace.header.settings.as_ref());
        let base = SettingsLine::parse(settings.map_or("", |settings| settings.as_str()), version)?;
        let device = &trace.header.device;
        let total_bytes = options.capacity_bytes.or(device.total_bytes).or(device.capacity_bytes);
        let circumstances = Circumstances {
            version,
            device_total_bytes: total_bytes,
            limit_bytes: options.limit_bytes,
            variable: None,
        };
        let of_settings = lint(&base.to_string(), &circumstances)?.limit_bytes;
        let limit_bytes = of_settings.or(trace.header.limit_bytes);
        Ok(Trial { trace, options, base, version, limit_bytes })
    }

    /// The trace.
    pub fn trace(&self) -> &'t Trace {
        self.trace
    }

    /// The options of its replays.
    pub fn options(&self) -> &'t RunOptions {
        self.options
    }

    /// Whether PyTorch takes a settings string.
    pub fn accepts(&self, line: &SettingsLine) -> bool {
        let circumstances = Circumstances { version: self.version, ..Circumstances::default() };
        lint(&line.to_string(), &circumstances).is_ok()
    }

    /// What goes wrong with a settings string here.
    pub fn traps(&self, line: &SettingsLine) -> Vec<Trap> {
        let circumstances = Circumstances {
            version: self.version,
            device_total_bytes: self.trace.header.device.total_bytes,
            limit_bytes: self.limit_bytes,
            variable: None,
        };
        lint(&line.to_string(), &circumstances).map_or_else(|_| Vec::new(), |lint| lint.traps)
    }

    /// The options that can matter on this trace, each with its values but for the one in force:
    /// none to split below what is never asked for, none to collect garbage without a limit, none
    /// that the release does not know.
    pub fn axes(&self) -> Vec<Axis> {
        let largest_bytes = self.trace.blocks.iter().map(|block| block.size_bytes).max();
        let largest_mb = largest_bytes.unwrap_or(0).div_ceil(MIB);
        let numbers = |values: &[u64]| values.iter().map(u64::to_string).collect::<Vec<_>>();
        // To leave it out is tried anyway.
        let expandable = match self.base.get("expandable_segments") {
            Some("True") => Vec::new(),
            _ => vec!["True".to_owned()],
        };
        let mut splits = numbers(&SPLIT_MB);
        splits.retain(|mb| mb.parse::<u64>().is_ok_and(|mb| mb < largest_mb));
        let garbage = match self.limit_bytes {
            Some(_) => GARBAGE_THRESHOLDS.map(str::to_owned).to_vec(),
            None => Vec::new(),
        };
        let segments = if self.version.is_older() { Vec::new() } else { numbers(&SEGMENT_MB) };
        let axes = [
            ("expandable_segments", expandable),
            ("max_split_size_mb", splits),
            ("roundup_power2_divisions", numbers(&ROUNDUP_DIVISIONS)),
            ("garbage_collection_threshold", garbage),
            ("large_segment_size_mb", segments),
        ];
        let axes = axes.into_iter().map(|(key, mut values)| {
            values.retain(|value| self.base.get(key) != Some(value));
            Axis { key, values }
        });
        axes.filter(|axis| !axis.values.is_empty()).collect()
    }

    /// Every value of every option alone, and the base with options left out, as far as PyTorch
    /// takes the string. No two are the same, and none is the base.
    pub fn singles(&self) -> Vec<Single> {
        let mut singles = Vec::new();
        for Axis { key, values } in self.axes() {
            singles.extend(values.into_iter().map(|value| {
                let line = self.base.with(key, &value);
                Single { set: Some((key, value)), line }
            }));
        }
        singles.extend(self.base.shorter().into_iter().map(|line| Single { set: None, line }));
        singles.retain(|single| self.accepts(&single.line));
        singles
    }

    /// Replays the trace with these settings; with the recorded ones, and their changes while the
    /// program ran, if they are the base and none were asked for.
    ///
    /// # Errors
    /// If they are no settings, or the replay could not be done.
    pub fn run(&self, line: &SettingsLine) -> Result<Tried, TrialError> {
        let options = self.options_with(line);
        let prepared = Prepared::new(self.trace, &options);
        let brief = brief(&prepared, &self.spec(), None)?;
        let traps = self.traps(line).iter().map(|trap| trap.id).collect();
        Ok(Tried::of(line, &brief, traps))
    }

    /// The smallest device on which every request of the trace is met with these settings. The
    /// recorded limit stands only where garbage is collected below it: how much would have been
    /// enough is the question.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn smallest_capacity(
        &self,
        line: &SettingsLine,
        search: CapacitySearch,
    ) -> Result<Option<u64>, TrialError> {
        let mut options = self.options_with(line);
        if line.get("garbage_collection_threshold").is_none() {
            options.limit_bytes = Some(NO_LIMIT_BYTES);
        }
        let prepared = Prepared::new(self.trace, &options);
        Ok(smallest_capacity(&prepared, &self.spec(), search)?.capacity_bytes)
    }

    fn spec(&self) -> AllocSpec {
        AllocSpec { name: CACHING.to_owned(), params: Vec::new() }
    }

    fn options_with(&self, line: &SettingsLine) -> RunOptions {
        let as_recorded = self.options.settings.is_none() && *line == self.base;
        RunOptions {
            settings: if as_recorded { None } else { Some(line.to_string()) },
            ..self.options.clone()
        }
    }
}

/// A limit that no trace reaches: the largest sum of live blocks is below 2^63.
const NO_LIMIT_BYTES: u64 = 1 << 63;

/// The release that recorded a snapshot; the reference where it is not told.
fn version_of(trace: &Trace) -> TorchVersion {
    let source = &trace.header.source;
    let told = source.version.as_ref().filter(|_| source.kind == SourceKind::TorchSnapshot);
    told.and_then(|version| version.parse().ok()).unwrap_or_default()
}

/// A trace in which the program empties the cache wherever a step begins.
pub fn with_empty_cache_each_step(trace: &Trace) -> Trace {
    let mut changed = trace.clone();
    changed.recording = None;
    changed.events.clear();
    let mut current = None;
    for event in &trace.events {
        changed.events.push(*event);
        let Op::Mark(phase) = event.op else { continue };
        let step = trace.phases.get(phase.index()).and_then(|phase| step_name(phase));
        // What lies between the parts of a step does not end it.
        if step.is_some() && step != current {
            changed.events.push(Event { op: Op::EmptyCache, ..*event });
            current = step;
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_keeps_what_is_not_replaced() {
        let text = "max_split_size_mb:64, expandable_segments:True,max_split_size_mb:128";
        let line = SettingsLine::parse(text, TorchVersion::REFERENCE).unwrap();
        assert_eq!(line.to_string(), "max_split_size_mb:128,expandable_segments:True");
        let changed = line.with("roundup_power2_divisions", "4").without("expandable_segments");
        assert_eq!(changed.to_string(), "max_split_size_mb:128,roundup_power2_divisions:4");
        assert_eq!(line.with("max_split_size_mb", "32").get("max_split_size_mb"), Some("32"));
        assert!(SettingsLine::parse("no_such_option:1", TorchVersion::REFERENCE).is_err());
    }
}
