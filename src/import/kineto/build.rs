//! From the events of a profile to a trace of one device.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::KinetoError;
use super::phases::{Mark, marks};
use super::read::{DeviceKey, MemoryEvent, Profile};
use crate::import::counted_warnings;
use crate::trace::{
    BLOCK_BYTES_MAX, Block, DeviceInfo, Event, Header, History, Op, Recording, Role, Source,
    SourceKind, Stream, Trace, Truth,
};
use crate::units::{BlockId, Bytes, NameId, PhaseId, SiteId, StreamId};

/// PyTorch's number of the host's memory.
const HOST: i32 = 0;
/// What the block is called that stands for memory in use before the profile and to its end.
const BEFORE: &str = "before_profile";

/// Makes the trace of one device, and says what should be known about it.
pub(super) fn trace(
    mut profile: Profile,
    gpu: Option<u32>,
) -> Result<(Trace, Vec<String>), KinetoError> {
    let device = choose(&profile, gpu)?;
    let mut events = std::mem::take(&mut profile.memory);
    events.retain(|event| event.device == device);
    // Stable, so that the order of the file decides between events that nothing else tells apart.
    events.sort_by_key(|event| (event.time_ns, event.index));
    let marks = marks(&profile);
    let first_ns = events.first().map_or(0, |event| event.time_ns);
    let mut builder = Builder::new(first_ns);
    builder.blocks_before(&events)?;
    let mut marks = marks.into_iter().peekable();
    for event in &events {
        while let Some(mark) = marks.next_if(|mark| mark.time_ns <= event.time_ns) {
            builder.mark(mark)?;
        }
        builder.memory(event)?;
    }
    // What begins after the last event holds no memory, but it is a step or a phase of the run.
    for mark in marks {
        builder.mark(mark)?;
    }
    builder.header(&profile, device);
    Ok(builder.finish(&profile, device))
}

/// The device asked for, or the only one.
fn choose(profile: &Profile, gpu: Option<u32>) -> Result<DeviceKey, KinetoError> {
    let mut counts: BTreeMap<DeviceKey, u64> = BTreeMap::new();
    for event in &profile.memory {
        *counts.entry(event.device).or_default() += 1;
    }
    let gpus: Vec<DeviceKey> = counts.keys().copied().filter(|key| key.kind != HOST).collect();
    let choices = || {
        let known = gpus.iter().map(|key| {
            let count = counts.get(key).copied().unwrap_or(0);
            format!("GPU {} has {count} memory events", key.index)
        });
        let known: Vec<String> = known.collect();
        if known.is_empty() { "there is only host memory".to_owned() } else { known.join(", ") }
    };
    if let Some(gpu) = gpu {
        let wanted = gpus.iter().find(|key| i64::from(key.index) == i64::from(gpu));
        return wanted.copied().ok_or_else(|| KinetoError::Gpu {
            found: format!("the profile has no memory events of GPU {gpu}"),
            choices: choices(),
        });
    }
    match gpus[..] {
        [one] => Ok(one),
        [] => match counts.keys().next() {
            Some(&host) => Ok(host),
            None if profile.without_address > 0 => {
                Err(KinetoError::NoAddresses { events: profile.without_address })
            }
            None => Err(KinetoError::NoMemory { events: profile.events }),
        },
        _ => Err(KinetoError::Gpu {
            found: "several GPUs have memory events".to_owned(),
            choices: choices(),
        }),
    }
}

/// The trace as it grows.
struct Builder {
    trace: Trace,
    recording: Recording,
    /// Blocks by address.
    live: HashMap<u64, BlockId, foldhash::fast::RandomState>,
    phases: HashMap<String, PhaseId>,
    first_ns: i64,
    allocs: u64,
    refusals: i64,
    /// Blocks from before the profile that it frees.
    before: u64,
    /// What else was in use then and to the end, in bytes.
    before_bytes: u64,
    allocated_bytes: Option<u64>,
    allocated_bytes_peak: Option<u64>,
    reserved_bytes_peak: Option<u64>,
    counts: Counts,
}

/// What is told at the end.
#[derive(Default)]
struct Counts {
    frees_lost: u64,
    sizes_differ: u64,
    sizes_zero: u64,
    totals_differ: u64,
}

impl Builder {
    fn new(first_ns: i64) -> Builder {
        Builder {
            trace: Trace { streams: vec![Stream { handle: 0 }], ..Trace::default() },
            recording: Recording::default(),
            live: HashMap::default(),
            phases: HashMap::new(),
            first_ns,
            allocs: 0,
            refusals: 0,
            before: 0,
            before_bytes: 0,
            allocated_bytes: None,
            allocated_bytes_peak: None,
            reserved_bytes_peak: None,
            counts: Counts::default(),
        }
    }

    /// Asks for what was live when the profile begins: one block for all that it never frees, then
    /// the others by address.
    fn blocks_before(&mut self, events: &[MemoryEvent]) -> Result<(), KinetoError> {
        let mut known: BTreeMap<u64, u64> = BTreeMap::new();
        let mut seen: HashSet<u64, foldhash::fast::RandomState> = HashSet::default();
        for event in events.iter().filter(|event| !event.refused) {
            // The first event of an address tells: a block that is freed was there before.
            if seen.insert(event.address) && event.bytes < 0 {
                known.insert(event.address, event.bytes.unsigned_abs().min(BLOCK_BYTES_MAX));
            }
        }
        let total_bytes = events.first().and_then(|first| {
            first.allocated_bytes?.checked_add_signed(first.change_bytes().checked_neg()?)
        });
        let known_bytes = known.values().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        self.allocated_bytes = total_bytes;
        self.allocated_bytes_peak = total_bytes;
        self.before = known.len() as u64;
        self.before_bytes = total_bytes.unwrap_or(0).saturating_sub(known_bytes);
        self.before_bytes = self.before_bytes.min(BLOCK_BYTES_MAX);
        if self.before_bytes > 0 {
            let block = self.block(self.before_bytes, 0)?;
            self.trace.names.push(BEFORE.to_owned());
            self.trace.blocks[block.index()].name = NameId(0);
            self.push(0, Op::Alloc(block));
        }
        for (address, bytes) in known {
            let block = self.block(bytes, address)?;
            self.live.insert(address, block);
            self.push(0, Op::Alloc(block));
        }
        Ok(())
    }

    fn memory(&mut self, event: &MemoryEvent) -> Result<(), KinetoError> {
        let time_ns = self.time_ns(event.time_ns);
        let size_bytes = event.bytes.unsigned_abs();
        self.totals(event);
        if size_bytes == 0 || size_bytes > BLOCK_BYTES_MAX {
            self.counts.sizes_zero += 1;
        } else if event.refused {
            let block = self.block(size_bytes, 0)?;
            self.refusals += 1;
            self.push(time_ns, Op::Attempt(block));
        } else if event.bytes > 0 {
            let block = self.block(size_bytes, event.address)?;
            self.allocs += 1;
            if let Some(older) = self.live.insert(event.address, block) {
                self.counts.frees_lost += 1;
                self.push(time_ns, Op::Free(older));
            }
            self.push(time_ns, Op::Alloc(block));
        } else if let Some(block) = self.live.remove(&event.address) {
            let asked_bytes = self.trace.blocks[block.index()].size_bytes;
            self.counts.sizes_differ += u64::from(asked_bytes != size_bytes);
            self.push(time_ns, Op::Free(block));
        } else {
            // A second free of one address: the first took the block.
            self.counts.frees_lost += 1;
        }
        Ok(())
    }

    /// Follows what the recorded allocator said of itself. Refusals tell it too: a flush before one
    /// gives memory back.
    fn totals(&mut self, event: &MemoryEvent) {
        self.reserved_bytes_peak = self.reserved_bytes_peak.max(event.reserved_bytes);
        self.allocated_bytes_peak = self.allocated_bytes_peak.max(event.allocated_bytes);
        let expected =
            self.allocated_bytes.and_then(|bytes| bytes.checked_add_signed(event.change_bytes()));
        let differ = expected.zip(event.allocated_bytes).is_some_and(|(a, b)| a != b);
        self.counts.totals_differ += u64::from(differ);
        self.allocated_bytes = event.allocated_bytes;
    }

    fn mark(&mut self, mark: Mark) -> Result<(), KinetoError> {
        let phases = &mut self.trace.phases;
        let next = u32::try_from(phases.len()).ok().filter(|&id| id != u32::MAX);
        let phase = match self.phases.get(&mark.phase) {
            Some(&phase) => phase,
            None => {
                let phase = PhaseId(next.ok_or(KinetoError::TooMany("phases"))?);
                phases.push(mark.phase.clone());
                self.phases.insert(mark.phase, phase);
                phase
            }
        };
        let time_ns = self.time_ns(mark.time_ns);
        self.push(time_ns, Op::Mark(phase));
        Ok(())
    }

    /// Time since the first memory event. Phases that begin before it stand at 0.
    fn time_ns(&self, time_ns: i64) -> u64 {
        u64::try_from(time_ns.saturating_sub(self.first_ns)).unwrap_or(0)
    }

    fn push(&mut self, time_ns: u64, op: Op) {
        self.trace.events.push(Event { time_ns, op });
    }

    fn block(&mut self, size_bytes: u64, address: u64) -> Result<BlockId, KinetoError> {
        let id = u32::try_from(self.trace.blocks.len()).ok().filter(|&id| id != u32::MAX);
        let block = BlockId(id.ok_or(KinetoError::TooMany("blocks"))?);
        self.trace.blocks.push(Block {
            size_bytes,
            stream: StreamId(0),
            site: SiteId::NONE,
            name: NameId::NONE,
            role: Role::Unknown,
        });
        self.recording.block_addresses.push(address);
        Ok(block)
    }

    fn header(&mut self, profile: &Profile, device: DeviceKey) {
        let of_device = |id: i64| device.kind != HOST && id == i64::from(device.index);
        let known = profile.devices.iter().find(|known| known.id.whole().is_some_and(of_device));
        let total_bytes = known.and_then(|known| known.total_bytes.count());
        let start_ns = profile.base_time_ns.unwrap_or(0).checked_add(self.first_ns);
        self.trace.header = Header {
            source: Source { kind: SourceKind::Kineto, version: None },
            device: DeviceInfo {
                name: known.map(|known| known.name.clone()).filter(|name| !name.is_empty()),
                index: u32::try_from(device.index).ok(),
                total_bytes: total_bytes.filter(|&bytes| (1..=BLOCK_BYTES_MAX).contains(&bytes)),
                ..DeviceInfo::default()
            },
            history: History {
                frees_without_alloc: self.before,
                allocs: self.allocs,
                blocks_at_start: self.before + u64::from(self.before_bytes > 0),
                allocs_of_run: None,
            },
            start_unix_ns: start_ns.and_then(|ns| u64::try_from(ns).ok()).filter(|&ns| ns > 0),
            ..Header::default()
        };
    }

    fn finish(mut self, profile: &Profile, device: DeviceKey) -> (Trace, Vec<String>) {
        let mut warnings = Vec::new();
        if device.kind == HOST {
            warnings.push("the profile has memory events of the host only: these are they".into());
        } else {
            warnings.push(
                "a profile shows no streams, and sizes as the allocator rounded them: results \
                 come close to those of a snapshot, no more"
                    .into(),
            );
        }
        if self.before_bytes > 0 {
            warnings.push(format!(
                "{} were in use before the profile and to its end: they stand in one block, \
                 `{BEFORE}`",
                Bytes(self.before_bytes)
            ));
        }
        let counts = &self.counts;
        warnings.extend(counted_warnings(&[
            (self.before, "blocks that the profile frees were in use before: asked for first"),
            (
                counts.frees_lost,
                "events do not fit: memory in use handed out again, or freed twice",
            ),
            (counts.sizes_differ, "frees of another size than was handed out"),
            (counts.sizes_zero, "events of 0 bytes or of 2^60 and more are left out"),
            (profile.without_address, "memory events without an address are left out"),
            (counts.totals_differ, "totals do not follow from the event: some events are missing"),
        ]));
        self.recording.truth = self.truth();
        self.trace.recording = Some(self.recording);
        (self.trace, warnings)
    }

    /// The most that the events saw, under the names of `torch.cuda.memory_stats()`.
    fn truth(&self) -> Option<Truth> {
        let stats = [
            ("allocated_bytes.all.peak", self.allocated_bytes_peak),
            // The host's allocator holds nothing back, and says 0.
            ("reserved_bytes.all.peak", self.reserved_bytes_peak.filter(|&bytes| bytes > 0)),
        ];
        let stats = stats
            .into_iter()
            .filter_map(|(name, bytes)| Some((name.to_owned(), i64::try_from(bytes?).ok()?)));
        let mut stats: BTreeMap<String, i64> = stats.collect();
        if stats.is_empty() {
            return None;
        }
        stats.insert("num_ooms".to_owned(), self.refusals);
        Some(Truth { stats, outcome: None, ..Truth::default() })
    }
}
