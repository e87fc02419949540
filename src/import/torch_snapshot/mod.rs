//! The dicts of a PyTorch memory snapshot, packed while the pickle streams by.
//!
//! A snapshot (specs/pytorch_caching.md 9.2) is one dict of a few known shapes repeated millions of
//! times. The [`Collector`] looks at the keys of every batch of items: a dict with `action` becomes
//! a 40-byte [`RawEntry`] on the spot, a list of frame dicts one interned stack. What fits no shape
//! (and what arrives in pieces, which no writer does) is kept as it is and looked at once more when
//! all is read, so the order in which containers are filled does not matter.
//!
//! Unknown keys are read over: newer versions add some (`pool_id`, `fx_*`, `forward_frames`).

mod collect;
mod finish;

use std::borrow::Cow;
use std::io::Read;

use self::collect::Collector;
use self::finish::Finisher;
use super::intern::Interner;
use super::pickle::{PickleError, read_pickle};

/// Stands for "no text", "no stack" or "no object" in packed records.
pub(super) const NO_ID: u32 = u32::MAX;

/// What an entry of a device's trace records (specs/pytorch_caching.md 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawAction {
    /// A block is handed out.
    Alloc,
    /// The program frees a block.
    FreeRequested,
    /// A freed block becomes reusable.
    FreeCompleted,
    /// Device memory is obtained.
    SegmentAlloc,
    /// Device memory is returned.
    SegmentFree,
    /// Pages are mapped.
    SegmentMap,
    /// Pages are unmapped.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request is refused.
    Oom,
    /// An action that this reader does not know.
    Unknown,
}

/// One entry of a device's trace, packed.
#[derive(Clone, Copy, Debug)]
pub struct RawEntry {
    /// Block, segment or first page; for [`RawAction::Oom`] the free bytes of the device.
    pub address: u64,
    /// Bytes: the request of a block, the size of a segment, the rounded size of an oom.
    pub size_bytes: u64,
    /// Unix time in microseconds; 0 if absent.
    pub time_us: u64,
    /// Index into [`RawSnapshot::streams`]; beyond it if the entry names no stream.
    pub stream: u32,
    /// Text id of a non-empty `user_metadata`.
    pub(super) user_metadata: u32,
    /// Stack id; while collecting, object id of the list of frames.
    pub(super) stack: u32,
    /// What happened.
    pub action: RawAction,
    /// Which of the needed keys were there.
    seen: u8,
}

const _: () = assert!(size_of::<RawEntry>() <= 40, "a snapshot has millions of entries");

const SEEN_ADDRESS: u8 = 1;
const SEEN_SIZE: u8 = 2;

impl RawEntry {
    const EMPTY: RawEntry = RawEntry {
        address: 0,
        size_bytes: 0,
        time_us: 0,
        stream: NO_ID,
        user_metadata: NO_ID,
        stack: NO_ID,
        action: RawAction::Unknown,
        seen: 0,
    };

    /// Nothing but a time, for what has no entry.
    pub(super) fn at_time(time_us: u64) -> RawEntry {
        RawEntry { time_us, ..RawEntry::EMPTY }
    }

    /// An entry without a stack; `stream` is an index into [`RawSnapshot::streams`].
    pub fn new(action: RawAction, address: u64, size_bytes: u64, stream: u32) -> RawEntry {
        let seen = SEEN_ADDRESS | SEEN_SIZE;
        RawEntry { action, address, size_bytes, stream, seen, ..RawEntry::EMPTY }
    }
}

/// State of a block at the moment of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RawBlockState {
    /// In use by the program.
    Allocated,
    /// Freed, but another stream still uses it.
    Pending,
    /// Free.
    #[default]
    Inactive,
}

/// A block of a segment at the moment of the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct RawBlock {
    /// Where it begins.
    pub address: u64,
    /// Its rounded size.
    pub size_bytes: u64,
    /// The request; a leftover without meaning if the block is inactive.
    pub requested_bytes: u64,
    /// Its state.
    pub state: RawBlockState,
    /// Id of the stack that asked for it; while collecting, object id of the list of frames.
    pub(super) stack: u32,
}

impl RawBlock {
    /// Whether its memory cannot be handed out: in the program's hands, or waiting for a stream.
    pub(super) fn in_use(&self) -> bool {
        self.state != RawBlockState::Inactive
    }

    /// A block without a stack.
    pub fn new(
        address: u64,
        size_bytes: u64,
        requested_bytes: u64,
        state: RawBlockState,
    ) -> RawBlock {
        RawBlock { address, size_bytes, requested_bytes, state, ..RawBlock::default() }
    }
}

impl Default for RawBlock {
    fn default() -> Self {
        RawBlock {
            address: 0,
            size_bytes: 0,
            requested_bytes: 0,
            state: RawBlockState::Inactive,
            stack: NO_ID,
        }
    }
}

/// A segment, or a mapped run of a reservation, at the moment of the snapshot.
#[derive(Clone, Debug, Default)]
pub struct RawSegment {
    /// Index of the device.
    pub device: u32,
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub total_bytes: u64,
    /// Raw handle of its stream.
    pub stream_handle: u64,
    /// Belongs to a large pool.
    pub large: bool,
    /// Pages of an expandable segment.
    pub expandable: bool,
    /// Owning private pool; (0, 0) is the default pool.
    pub pool_id: (u64, u64),
    /// Its blocks in address order, where the file has them.
    pub blocks: Vec<RawBlock>,
}

/// A `record_function` range border.
#[derive(Clone, Copy, Debug)]
pub struct RawAnnotation {
    name: u32,
    /// A range begins; else it ends.
    pub start: bool,
    /// Index of the device.
    pub device: u32,
    /// Unix time in microseconds.
    pub time_us: u64,
}

/// The allocator's settings at the moment of the snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawSettings {
    /// The last settings string that the allocator parsed.
    pub conf: String,
    /// `max_split_size` in bytes; nothing if unlimited.
    pub max_split_bytes: Option<u64>,
    /// `garbage_collection_threshold`; 0 is off.
    pub gc_threshold: f64,
    /// `expandable_segments`.
    pub expandable: bool,
    /// `roundup_power2_divisions`: size class in MiB, divisions; ascending.
    pub roundup_divisions: Vec<(u64, u64)>,
}

/// One frame of a stack.
#[derive(Clone, Copy, Debug)]
struct RawFrame {
    name: u32,
    filename: u32,
    line: u32,
}

/// A snapshot as the file holds it.
#[derive(Debug)]
pub struct RawSnapshot {
    /// The entries of every device, oldest first.
    pub devices: Vec<Vec<RawEntry>>,
    /// Raw stream handles by index.
    pub streams: Vec<u64>,
    /// The segments of all devices at the moment of the snapshot.
    pub segments: Vec<RawSegment>,
    /// Settings, where the file has them.
    pub settings: Option<RawSettings>,
    /// `record_function` ranges.
    pub annotations: Vec<RawAnnotation>,
    texts: Interner<u8>,
    stacks: Interner<u32>,
    frames: Vec<RawFrame>,
    unknown_action: Option<String>,
}

impl RawSnapshot {
    /// A snapshot of the first device, without stacks. `streams` are the raw handles that `entries`
    /// index.
    pub fn new(
        entries: Vec<RawEntry>,
        streams: Vec<u64>,
        segments: Vec<RawSegment>,
        settings: RawSettings,
    ) -> RawSnapshot {
        RawSnapshot {
            devices: vec![entries],
            streams,
            segments,
            settings: Some(settings),
            annotations: Vec::new(),
            texts: Interner::new(),
            stacks: Interner::new(),
            frames: Vec::new(),
            unknown_action: None,
        }
    }

    /// The name of an annotation.
    pub fn annotation_name(&self, annotation: &RawAnnotation) -> Cow<'_, str> {
        self.texts.text(annotation.name)
    }

    /// The first action that this reader does not know.
    pub fn unknown_action(&self) -> Option<&str> {
        self.unknown_action.as_deref()
    }

    pub(super) fn text(&self, id: u32) -> Cow<'_, str> {
        self.texts.text(id)
    }

    /// Frame ids of a stack, innermost first.
    pub(super) fn stack(&self, id: u32) -> &[u32] {
        self.stacks.get(id)
    }

    /// Function, file and line of a frame.
    pub(super) fn frame(&self, id: u32) -> (Cow<'_, str>, Cow<'_, str>, u32) {
        let frame = &self.frames[id as usize];
        (self.text(frame.name), self.text(frame.filename), frame.line)
    }
}

/// A pickle is no snapshot, or one without what a trace needs.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The pickle itself cannot be read.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// The pickle holds something else.
    #[error("{found}; expected {expected}")]
    Shape {
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// An entry of a device's trace lacks something.
    #[error("entry {index} of GPU {gpu}: {found}; expected {expected}")]
    Entry {
        /// Index of the device.
        gpu: usize,
        /// Index in its trace.
        index: usize,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// Several devices have a history and none was chosen, or one was that is not there.
    #[error("{found}: {choices}; expected one of them: choose with --gpu N")]
    Gpu {
        /// What is wrong.
        found: String,
        /// The devices with their numbers of entries.
        choices: String,
    },
    /// More than four billion of something.
    #[error("too many {0}; expected fewer than four billion: record a shorter part of the run")]
    TooMany(&'static str),
}

/// Reads a snapshot from a decompressed pickle.
///
/// A bare list of segments, as `torch.cuda.memory_snapshot()` returns it, is accepted too: it has
/// no device with a history.
///
/// # Errors
/// If it is no pickle of plain data or no snapshot; the message names the position.
pub fn read_torch_snapshot(reader: impl Read) -> Result<RawSnapshot, SnapshotError> {
    let pickle = read_pickle(reader, Collector::known_texts(), Collector::new())?;
    Finisher::new(pickle).finish()
}
