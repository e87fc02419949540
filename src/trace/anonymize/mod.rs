//! A trace without what tells whose it is, so that it can be attached to a public issue.
//!
//! The one design decision: what no allocator looks at goes, and what one looks at is renamed, one
//! name for one name. So every allocator decides as before, `verify` finds the same, and what is
//! left is what fragmentation is made of: sizes, order, streams, settings.
//!
//! ```text
//!   gone        call sites, names of trace, blocks and pools, index of the device, Unix time,
//!               text of an error, strategies and expectations in other than the usual words
//!   renamed     words of phases and modules (but steps, numbers and what every job has),
//!               parameters of the model with them
//!   renumbered  times (1 µs from one to the next), handles of streams (same order)
//!   kept        sizes, order, roles, settings, limits, GPU model, version, addresses
//! ```

mod words;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use self::words::{Words, is_usual_strategy};
use super::{Sites, SourceKind, Trace, Truth};
use crate::units::{NameId, SiteId};

/// From one time to the next in nanoseconds, where times are renumbered.
const TICK_NS: u64 = 1000;

/// What to keep of what goes by default, and what to drop of what stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnonymizeOptions {
    /// Keep the times between events.
    pub keep_times: bool,
    /// Keep the names of phases.
    pub keep_phases: bool,
    /// Drop what the recorded allocator did: its segments, addresses and statistics.
    pub drop_recording: bool,
}

/// What was taken out of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Anonymized {
    /// The trace had a name.
    pub name: bool,
    /// Different stack frames: functions, files, lines.
    pub frames: u64,
    /// Different call sites.
    pub call_sites: u64,
    /// Names of blocks that are gone.
    pub block_names: u64,
    /// Phases with another name.
    pub phases: u64,
    /// Modules with another name.
    pub modules: u64,
    /// Parameters of the model with another name.
    pub parameters: u64,
    /// Private pools with another name.
    pub pools: u64,
    /// Streams with another handle.
    pub streams: u64,
    /// Strategies that are gone.
    pub strategies: u64,
    /// Expectations that are gone.
    pub expectations: u64,
    /// Times were renumbered.
    pub times: bool,
    /// The date is gone.
    pub date: bool,
    /// The index of the device is gone.
    pub device_index: bool,
    /// Local part of the version is gone (`+git1a2b3c`).
    pub version: bool,
    /// The text of an error is gone.
    pub message: bool,
    /// The recording is gone.
    pub recording: bool,
}

/// Takes out of a [valid](super::validate) trace what tells whose it is, and says what that was. The
/// trace stays valid, and every allocator decides as before.
pub fn anonymize(trace: &mut Trace, options: AnonymizeOptions) -> Anonymized {
    let mut found = Anonymized::default();
    let mut words = Words::default();
    drop_sites(trace, &mut found);
    if !options.keep_phases {
        found.phases = rename(&mut trace.phases, |phase| words.phase(phase));
    }
    found.modules = rename(&mut trace.modules, |module| words.module(module));
    rename_model(trace, &mut words, &mut found);
    rename_pools(trace, &mut found);
    renumber_streams(trace, &mut found);
    if !options.keep_times {
        renumber_times(trace, &mut found);
    }
    clean_header(trace, &mut found);
    clean_recording(trace, options, &mut found);
    found
}

/// Gives new names, and counts those that differ.
fn rename(names: &mut [String], mut new_name: impl FnMut(&str) -> String) -> u64 {
    let mut renamed = 0;
    for name in names {
        let new = new_name(name);
        renamed += u64::from(new != *name);
        *name = new;
    }
    renamed
}

fn drop_sites(trace: &mut Trace, found: &mut Anonymized) {
    let Sites { frames, stacks } = std::mem::take(&mut trace.sites);
    found.frames = frames.len() as u64;
    found.call_sites = stacks.len() as u64;
    for block in &mut trace.blocks {
        block.site = SiteId::NONE;
    }
}

/// Names of blocks go, but for those that say which parameter of the model a block holds.
fn rename_model(trace: &mut Trace, words: &mut Words, found: &mut Anonymized) {
    let mut parameters = BTreeMap::new();
    for unit in trace.header.model.iter_mut().flat_map(|model| &mut model.units) {
        unit.module = words.path(&unit.module);
        for parameter in &mut unit.parameters {
            let new = words.path(&parameter.name);
            found.parameters += u64::from(new != parameter.name);
            let old = std::mem::replace(&mut parameter.name, new.clone());
            parameters.insert(old, new);
        }
    }
    let old_names = std::mem::take(&mut trace.names);
    found.block_names = old_names.len() as u64;
    let new_id = |name: String| {
        let Some(new) = parameters.get(&name) else { return NameId::NONE };
        found.block_names -= 1;
        trace.names.push(new.clone());
        NameId(trace.names.len() as u32 - 1)
    };
    let new_ids: Vec<NameId> = old_names.into_iter().map(new_id).collect();
    for block in &mut trace.blocks {
        block.name = block.name.some().map_or(NameId::NONE, |name| new_ids[name.index()]);
    }
}

fn rename_pools(trace: &mut Trace, found: &mut Anonymized) {
    for (index, pool) in trace.pools.iter_mut().enumerate() {
        let new = format!("pool{index}");
        found.pools += u64::from(new != pool.name);
        pool.name = new;
    }
}

/// Handles are addresses in the process. Allocators go by their order, and by which is 0.
fn renumber_streams(trace: &mut Trace, found: &mut Anonymized) {
    let handles: BTreeSet<u64> = trace.streams.iter().map(|stream| stream.handle).collect();
    let others = handles.into_iter().filter(|&handle| handle != 0);
    let numbers: BTreeMap<u64, u64> = others.zip(1..).chain([(0, 0)]).collect();
    for stream in &mut trace.streams {
        let new = numbers.get(&stream.handle).copied().unwrap_or(0);
        found.streams += u64::from(new != stream.handle);
        stream.handle = new;
    }
}

/// Events of one time stay together. Times that no clock measured tell nothing.
fn renumber_times(trace: &mut Trace, found: &mut Anonymized) {
    if matches!(trace.header.source.kind, SourceKind::Generated | SourceKind::Text) {
        return;
    }
    let mut last_ns = trace.events.first().map_or(0, |event| event.time_ns);
    let mut now_ns = 0;
    for event in &mut trace.events {
        if event.time_ns != last_ns {
            last_ns = event.time_ns;
            now_ns += TICK_NS;
        }
        found.times |= event.time_ns != now_ns;
        event.time_ns = now_ns;
    }
}

fn clean_header(trace: &mut Trace, found: &mut Anonymized) {
    let header = &mut trace.header;
    found.name = !header.name.is_empty();
    header.name.clear();
    found.device_index = header.device.index.take().is_some();
    found.date = header.start_unix_ns.take().is_some();
    if let Some(version) = &mut header.source.version {
        let length = public_version(version).len();
        found.version = length < version.len();
        version.truncate(length);
    }
    let strategies = header.strategies.len();
    header.strategies.retain(|word| is_usual_strategy(word));
    found.strategies = (strategies - header.strategies.len()) as u64;
    // An allocator may be given files.
    let expectations = header.expectations.len();
    header.expectations.retain(|expected| {
        !["trace=", "plan=", "/", "\\"].iter().any(|part| expected.allocator.contains(part))
    });
    found.expectations = (expectations - header.expectations.len()) as u64;
}

/// A version with its local part only where that names a platform: `2.11.0+cu130`.
fn public_version(version: &str) -> &str {
    let Some((public, local)) = version.split_once('+') else { return version };
    let platform = local.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if matches!(platform, "cpu" | "cu" | "rocm" | "xpu") { version } else { public }
}

fn clean_recording(trace: &mut Trace, options: AnonymizeOptions, found: &mut Anonymized) {
    if options.drop_recording {
        found.recording = trace.recording.take().is_some();
        return;
    }
    let truth = trace.recording.as_mut().and_then(|recording| recording.truth.as_mut());
    let Some(Truth { stats, outcome, .. }) = truth else { return };
    // PyTorch's own names of statistics.
    stats.retain(|name, _| {
        name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.'))
    });
    if let Some(text) = outcome {
        let short = match text.as_str() {
            "ok" | "oom" => return,
            long if long.contains("out of memory") => "out of memory",
            _ => "error",
        };
        found.message = short != text;
        *outcome = Some(short.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_of_ones_own_have_only_their_release() {
        let kept = ["2.11.0", "2.11.0+cu130", "2.9.1+rocm6.4", "2.4.0+cpu", "2.9.0+cu"];
        for version in kept {
            assert_eq!(public_version(version), version);
        }
        assert_eq!(public_version("2.12.0a0+git1a2b3c"), "2.12.0a0");
        assert_eq!(public_version("2.8.0+corp.cu128"), "2.8.0");
    }
}
