//! A trace: what a program asked of its GPU memory allocator, in order.
//!
//! The one design decision: blocks, streams, phases and sites have *dense ids*, given once when the
//! trace is read. The replay loop then indexes vectors and hashes nothing, and an event is 16
//! bytes:
//!
//! ```text
//!   events   ┌ time_ns ┬ Alloc(b0) ┐┌ time_ns ┬ Alloc(b1) ┐┌ time_ns ┬ Free(b0) ┐ ...
//!                          │
//!   blocks                 └──> b0: size_bytes, stream, site, name, role
//! ```
//!
//! Beside the events, never fed to an allocator, stands the [`Recording`]: what the allocator of
//! the recorded run did, so that `verify` can compare.

mod anonymize;
mod file;
mod fingerprint;
mod header;
mod hooked;
mod limits;
mod merge;
mod model;
mod native;
#[cfg(feature = "analytics")]
mod parquet;
mod recording;
mod roles;
#[cfg(feature = "analytics")]
pub(crate) mod seal;
mod start;
mod stats;
mod text;
mod validate;

pub use anonymize::{AnonymizeOptions, Anonymized, anonymize};
pub use file::{
    Compression, FileError, Input, OutputFile, TraceFormat, WriteTraceError, abandon_part_files,
    unwritten, write_trace, write_trace_at_level, write_trace_to,
};
pub use fingerprint::fingerprint;
pub use header::{
    AddressPolicy, DeviceCall, DeviceInfo, Expectation, Fault, FaultWhen, Header, History, Source,
    SourceKind, reservation_span_bytes, room_on_device,
};
pub use hooked::{HookedModule, backward_phase};
pub use limits::{
    EVENTS_MAX, EVENTS_MAX_DEFAULT, Limits, OverLimit, memory_bytes_default, resident_bytes,
    resident_bytes_peak,
};
pub use merge::{Align, MergeError, MergeOptions, Merged, RankTrace, merge, rank_labels};
pub use model::{ELEMENTS_MAX, Model, ModelParameter, ModelUnit};
pub use native::{NATIVE_VERSION, NativeError, read_native, read_native_within, write_native};
#[cfg(feature = "analytics")]
pub use parquet::{ParquetError, read_parquet, read_parquet_within, write_parquet};
pub use recording::{
    EntryKind, RecordedAction, RecordedEntries, RecordedEntry, RecordedKind, Recording, Truth,
    recorded_entries,
};
pub use roles::LiveByRole;
pub use start::{StartBlock, StartLayout, StartSegment, StartState};
pub use stats::{
    RecordedStats, SizeClass, SizeStats, StartStats, StreamStats, TraceStats, stats, step_name,
};
pub use text::{
    REPEAT_DEPTH_MAX, TextError, is_text_trace, read_text, read_text_within, write_text,
};
pub use validate::{BLOCK_BYTES_MAX, InvalidTrace, LIVE_BYTES_MAX, validate};

use serde::{Deserialize, Serialize};

use crate::units::{
    BlockId, FrameId, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
};

/// What a block holds, where the source says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Role {
    /// Not known: recordings of PyTorch's allocator do not tell.
    #[default]
    Unknown,
    /// A weight.
    Parameter,
    /// A gradient of a weight.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// An activation kept for the backward pass.
    Activation,
    /// The input of a recomputed region.
    Checkpoint,
    /// Workspace of one operation.
    Temporary,
    /// A buffer of a collective.
    Communication,
}

impl Role {
    /// Every role, in the order of their numbers.
    pub const ALL: [Role; 8] = [
        Role::Unknown,
        Role::Parameter,
        Role::Gradient,
        Role::Optimizer,
        Role::Activation,
        Role::Checkpoint,
        Role::Temporary,
        Role::Communication,
    ];

    /// The name in files: `parameter`.
    pub fn name(self) -> &'static str {
        match self {
            Role::Unknown => "unknown",
            Role::Parameter => "parameter",
            Role::Gradient => "gradient",
            Role::Optimizer => "optimizer",
            Role::Activation => "activation",
            Role::Checkpoint => "checkpoint",
            Role::Temporary => "temporary",
            Role::Communication => "communication",
        }
    }
}

/// One request for memory: the block from its `alloc` to its `free`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes that the program asked for, before any rounding. Never 0.
    pub size_bytes: u64,
    /// The stream it was asked on.
    pub stream: StreamId,
    /// Where in the program, or [`SiteId::NONE`].
    pub site: SiteId,
    /// The name in a text trace, or [`NameId::NONE`].
    pub name: NameId,
    /// What it holds.
    pub role: Role,
}

/// What happens at an event. See the table in the crate's `traces/README.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The program asks for the block.
    Alloc(BlockId),
    /// An alloc that the recorded run was refused: if granted here, freed before the next event and
    /// left out of the requested peak.
    Attempt(BlockId),
    /// Freed and reusable at once.
    Free(BlockId),
    /// Freed by the program, but another stream still uses the memory.
    Defer(BlockId),
    /// The use that `Defer` waited for has ended.
    Done(BlockId),
    /// A phase starts.
    Mark(PhaseId),
    /// The program asked the allocator to give back what it can.
    EmptyCache,
    /// The program gave the allocator a new settings string.
    Settings(SettingsId),
    /// Allocations go to this private pool from here on.
    PoolEnter(PoolId),
    /// The innermost entered pool ends; the id names it.
    PoolLeave(PoolId),
    /// The pool's owner lets it go.
    PoolDelete(PoolId),
    /// Execution enters a module.
    ModuleEnter(ModuleId),
    /// Execution leaves a module.
    ModuleLeave(ModuleId),
    /// The program reads or writes the block.
    Access(BlockId),
    /// Bytes move between host and device.
    Transfer(TransferId),
}

/// An event and when it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Nanoseconds since the first event. Never decreases.
    pub time_ns: u64,
    /// What happened.
    pub op: Op,
}

const _: () = assert!(size_of::<Event>() <= 16, "the replay loop streams over events");
const _: () = assert!(size_of::<Block>() <= 24, "blocks stay compact");

/// A stream of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// The handle as the source shows it; 0 is the default stream. Allocators order by it.
    pub handle: u64,
}

/// What kind of private pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolKind {
    /// `torch.cuda.MemPool`.
    #[default]
    MemPool,
    /// The pool of a CUDA graph capture.
    Capture,
}

/// A private pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// What kind of pool.
    #[serde(default)]
    pub kind: PoolKind,
    /// Every block is a whole segment.
    #[serde(default)]
    pub no_split: bool,
    /// Others may take from it when the device refuses.
    #[serde(default)]
    pub use_on_oom: bool,
}

/// Which way a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Host to device.
    HostToDevice,
    /// Device to host.
    DeviceToHost,
}

/// A transfer between host and device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Bytes moved.
    pub size_bytes: u64,
    /// Which way.
    pub direction: Direction,
}

/// One stack frame.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Frame {
    /// Function name.
    pub name: String,
    /// Source file.
    pub filename: String,
    /// Line number; 0 when unknown.
    pub line: u32,
}

impl Frame {
    /// `file.py:12 function`, without folders.
    pub fn short(&self) -> String {
        let file = self.filename.rsplit(['/', '\\']).next().unwrap_or(&self.filename);
        format!("{file}:{} {}", self.line, self.name)
    }

    /// Whether it lies in PyTorch's own code, or in none that has a file, by its path.
    pub fn is_of_torch(&self) -> bool {
        let file = self.filename.replace('\\', "/");
        let library = ["/torch/", "/c10/", "/aten/", "/ATen/"];
        file.starts_with('<') || file.is_empty() || library.iter().any(|part| file.contains(part))
    }
}

/// Call sites: interned stacks of interned frames, innermost frame first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sites {
    /// Every frame once.
    pub frames: Vec<Frame>,
    /// Stacks; [`SiteId`] indexes them.
    pub stacks: Vec<Vec<FrameId>>,
}

impl Sites {
    /// The stack of a site, and which of its frames is its place in the program: the innermost that
    /// is not one of PyTorch's own, else the innermost of all.
    pub fn in_model(&self, site: SiteId) -> Option<(&[FrameId], usize)> {
        let stack = self.stacks.get(site.some()?.index())?;
        let is_own =
            |id: &FrameId| self.frames.get(id.index()).is_some_and(|frame| !frame.is_of_torch());
        Some((stack, stack.iter().position(is_own).unwrap_or(0)))
    }
}

/// A whole trace. Build it through an importer, a reader or a generator, then [`validate`] it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Where it comes from and what it ran on.
    pub header: Header,
    /// Blocks; [`BlockId`] indexes them.
    pub blocks: Vec<Block>,
    /// Streams; [`StreamId`] indexes them.
    pub streams: Vec<Stream>,
    /// Private pools; [`PoolId`] indexes them.
    pub pools: Vec<Pool>,
    /// Settings strings given while the program ran; [`SettingsId`] indexes them.
    pub settings_changes: Vec<String>,
    /// Phase names; [`PhaseId`] indexes them.
    pub phases: Vec<String>,
    /// Module names; [`ModuleId`] indexes them.
    pub modules: Vec<String>,
    /// Transfers; [`TransferId`] indexes them.
    pub transfers: Vec<Transfer>,
    /// Names that people gave to blocks; [`NameId`] indexes them.
    pub names: Vec<String>,
    /// Call sites.
    pub sites: Sites,
    /// What was there before the first event, if the history begins late.
    pub start: Option<StartLayout>,
    /// What happened, in order.
    pub events: Vec<Event>,
    /// What the recorded allocator did, where that is known.
    pub recording: Option<Recording>,
}

impl Trace {
    /// The stream with this handle, added if it is new. Linear in the number of streams, which is
    /// small: importers with many look-ups keep a map of their own.
    pub fn stream_with_handle(&mut self, handle: u64) -> StreamId {
        let found = self.streams.iter().position(|s| s.handle == handle);
        let index = found.unwrap_or_else(|| {
            self.streams.push(Stream { handle });
            self.streams.len() - 1
        });
        StreamId(index as u32)
    }

    /// The largest sum of live requests in bytes. Attempts do not count.
    pub fn requested_bytes_peak(&self) -> u64 {
        let size = |block: BlockId| self.blocks.get(block.index()).map_or(0, |b| b.size_bytes);
        let live_at_start = self.start.iter().flat_map(|start| &start.blocks);
        let live_at_start = live_at_start.filter(|block| block.state == StartState::Live);
        let mut live_bytes = live_at_start.fold(0u64, |sum, b| sum.saturating_add(size(b.block)));
        let mut peak_bytes = live_bytes;
        for event in &self.events {
            match event.op {
                Op::Alloc(block) => {
                    live_bytes = live_bytes.saturating_add(size(block));
                    peak_bytes = peak_bytes.max(live_bytes);
                }
                Op::Free(block) | Op::Defer(block) => {
                    live_bytes = live_bytes.saturating_sub(size(block));
                }
                _ => {}
            }
        }
        peak_bytes
    }

    /// The most that the recorded allocator held at once, in bytes: what its segments show, else
    /// what it said of itself.
    pub fn recorded_reserved_bytes_peak(&self) -> Option<u64> {
        let recording = self.recording.as_ref()?;
        if self.segments_recorded().is_none() {
            let reported = recording.truth.as_ref()?.stats.get("reserved_bytes.all.peak");
            return reported.and_then(|&bytes| u64::try_from(bytes).ok());
        }
        let mut reserved_bytes = self.start.as_ref().map_or(0, StartLayout::reserved_bytes);
        let mut peak_bytes = reserved_bytes;
        for action in &recording.actions {
            reserved_bytes = action.reserved_after(reserved_bytes);
            peak_bytes = peak_bytes.max(reserved_bytes);
        }
        Some(peak_bytes)
    }

    /// The recording, if it shows the segments of its allocator: what other logs than snapshots hold
    /// are blocks alone, from which no decision can be told.
    pub fn segments_recorded(&self) -> Option<&Recording> {
        let recording = self.recording.as_ref()?;
        (self.start.is_some() || !recording.actions.is_empty() || self.blocks.is_empty())
            .then_some(recording)
    }

    /// The first request that the recorded run was refused: index of its event and bytes.
    pub fn first_attempt(&self) -> Option<(u64, u64)> {
        let attempts = self.events.iter().enumerate().find_map(|(index, event)| match event.op {
            Op::Attempt(block) => Some((index as u64, block)),
            _ => None,
        });
        let (event, block) = attempts?;
        Some((event, self.blocks.get(block.index())?.size_bytes))
    }

    /// The phase that the last mark up to and including an event began, if any.
    pub fn phase_at(&self, event_index: u64) -> Option<&str> {
        let end = self.events.len().min((event_index as usize).saturating_add(1));
        let mark = self.events[..end].iter().rev().find_map(|event| match event.op {
            Op::Mark(phase) => Some(phase),
            _ => None,
        })?;
        self.phases.get(mark.index()).map(String::as_str)
    }

    /// Where in the program a site is, as `file.py:12 function`: the innermost frame that is not one
    /// of PyTorch's own, else the innermost of all. Nothing without a stack.
    pub fn site_in_model(&self, site: SiteId) -> Option<String> {
        let (stack, own) = self.sites.in_model(site)?;
        Some(self.sites.frames.get(stack.get(own)?.index())?.short())
    }

    /// The innermost frames of a site as `function (file:line)`, or nothing.
    pub fn site_label(&self, site: SiteId) -> Option<String> {
        let stack = self.sites.stacks.get(site.some()?.index())?;
        let frame = self.sites.frames.get(stack.first()?.index())?;
        Some(format!("{} ({}:{})", frame.name, frame.filename, frame.line))
    }
}
