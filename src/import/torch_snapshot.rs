//! The dicts of a PyTorch memory snapshot, packed while the pickle streams by.
//!
//! A snapshot (specs/pytorch_caching.md 9.2) is one dict of a few known shapes repeated millions of
//! times. The [`Collector`] looks at the keys of every batch of items: a dict with `action` becomes
//! a 40-byte [`RawEntry`] on the spot, a list of frame dicts one interned stack. What fits no shape
//! (and what arrives in pieces, which no writer does) is kept as it is and looked at once more when
//! all is read, so the order in which containers are filled does not matter.
//!
//! Unknown keys are read over: newer versions add some (`pool_id`, `fx_*`, `forward_frames`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;

use super::intern::Interner;
use super::pickle::{
    Atoms, Build, Complaint, Kind, Pickle, PickleError, Value, read_pickle, shorten,
};
use crate::trace::BLOCK_BYTES_MAX;

/// Stands for "no text", "no stack" or "no object" in packed records.
pub(super) const NO_ID: u32 = u32::MAX;

/// Texts that the collector knows; their ids are their numbers.
macro_rules! known_texts {
    ($($name:ident $text:literal),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Known { $($name),* }

        const KNOWN: &[(Known, &str)] = &[$((Known::$name, $text)),*];
    };
}

known_texts! {
    Action "action", Addr "addr", DeviceFree "device_free", Size "size", Stream "stream",
    TimeUs "time_us", UserMetadata "user_metadata", Frames "frames",
    Alloc "alloc", FreeRequested "free_requested", FreeCompleted "free_completed",
    SegmentAlloc "segment_alloc", SegmentFree "segment_free", SegmentMap "segment_map",
    SegmentUnmap "segment_unmap", Snapshot "snapshot", Oom "oom",
    Name "name", Filename "filename", Line "line",
    Device "device", Address "address", TotalSize "total_size", AllocatedSize "allocated_size",
    ActiveSize "active_size", RequestedSize "requested_size", SegmentType "segment_type",
    SegmentPoolId "segment_pool_id", IsExpandable "is_expandable", Blocks "blocks",
    State "state", ActiveAllocated "active_allocated", ActivePendingFree "active_pending_free",
    Inactive "inactive", Large "large", Stage "stage", Start "START",
    Segments "segments", DeviceTraces "device_traces", AllocatorSettings "allocator_settings",
    ExternalAnnotations "external_annotations", Conf "PYTORCH_CUDA_ALLOC_CONF",
    MaxSplitSize "max_split_size", GcThreshold "garbage_collection_threshold",
    Expandable "expandable_segments", Roundup "roundup_power2_divisions",
}

fn known(value: Value) -> Option<Known> {
    match value.kind() {
        Kind::Text(id) => KNOWN.get(id as usize).map(|&(known, _)| known),
        _ => None,
    }
}

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
#[derive(Clone, Copy, Debug, Default)]
pub struct RawBlock {
    /// Where it begins.
    pub address: u64,
    /// Its rounded size.
    pub size_bytes: u64,
    /// The request; a leftover without meaning if the block is inactive.
    pub requested_bytes: u64,
    /// Its state.
    pub state: RawBlockState,
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
/// A bare list of segments, as `torch.cuda.memory_snapshot()` returns it, is accepted too: it has no
/// device with a history.
///
/// # Errors
/// If it is no pickle of plain data or no snapshot; the message names the position.
pub fn read_torch_snapshot(reader: impl Read) -> Result<RawSnapshot, SnapshotError> {
    let known: Vec<&str> = KNOWN.iter().map(|&(_, text)| text).collect();
    let pickle = read_pickle(reader, Atoms::with_known(&known), Collector::new())?;
    Finisher::new(pickle).finish()
}

/// What a container turned out to be.
#[derive(Clone, Copy, Debug)]
enum Object {
    NewDict,
    NewList,
    Event(u32),
    Frame(u32),
    Segment(u32),
    Block(u32),
    Annotation(u32),
    /// Another dict: index into `dicts`.
    Dict(u32),
    /// Another list, or a tuple: index into `lists`.
    List(u32),
    Tuple(u32),
    /// A list of frames.
    Stack(u32),
}

/// A segment while its blocks and pool id are still references.
#[derive(Clone, Debug)]
struct SegmentDraft {
    segment: RawSegment,
    blocks: Value,
    pool_id: Value,
}

impl SegmentDraft {
    fn new() -> Self {
        SegmentDraft {
            segment: RawSegment::default(),
            blocks: Value::ABSENT,
            pool_id: Value::ABSENT,
        }
    }
}

type FastMap<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// Packs containers as they are filled.
#[derive(Debug)]
struct Collector {
    objects: Vec<Object>,
    entries: Vec<RawEntry>,
    segments: Vec<SegmentDraft>,
    blocks: Vec<RawBlock>,
    annotations: Vec<RawAnnotation>,
    dicts: Vec<Vec<(Value, Value)>>,
    lists: Vec<Vec<Value>>,
    frames: Vec<RawFrame>,
    frame_ids: FastMap<(u32, u32, u32), u32>,
    stacks: Interner<u32>,
    streams: Vec<u64>,
    stream_ids: FastMap<u64, u32>,
    unknown_action: Option<u32>,
    scratch: Vec<u32>,
}

impl Collector {
    fn new() -> Self {
        Collector {
            objects: Vec::new(),
            entries: Vec::new(),
            segments: Vec::new(),
            blocks: Vec::new(),
            annotations: Vec::new(),
            dicts: Vec::new(),
            lists: Vec::new(),
            frames: Vec::new(),
            frame_ids: FastMap::default(),
            stacks: Interner::new(),
            streams: Vec::new(),
            stream_ids: FastMap::default(),
            unknown_action: None,
            scratch: Vec::new(),
        }
    }

    fn new_object(&mut self, object: Object) -> Option<u32> {
        // Below NO_ID, which packed records use for "none".
        let id = u32::try_from(self.objects.len()).ok().filter(|&id| id < NO_ID)?;
        self.objects.push(object);
        Some(id)
    }

    /// The first batch of a dict decides what it is.
    fn classify(&mut self, pairs: &[Value], atoms: &Atoms) -> Result<Object, Complaint> {
        let discriminator = pairs.chunks_exact(2).find_map(|pair| match known(pair[0]) {
            Some(
                key @ (Known::Action
                | Known::Filename
                | Known::TotalSize
                | Known::Blocks
                | Known::State
                | Known::Stage),
            ) => Some(key),
            _ => None,
        });
        Ok(match discriminator {
            Some(Known::Action) => {
                let mut entry = RawEntry::EMPTY;
                self.update_entry(&mut entry, pairs, atoms)?;
                self.entries.push(entry);
                Object::Event(last_index(&self.entries)?)
            }
            Some(Known::Filename) => Object::Frame(self.frame(None, pairs, atoms)?),
            Some(Known::TotalSize | Known::Blocks) => {
                let mut draft = SegmentDraft::new();
                update_segment(&mut draft, pairs, atoms)?;
                self.segments.push(draft);
                Object::Segment(last_index(&self.segments)?)
            }
            Some(Known::State) => {
                let mut block = RawBlock::default();
                update_block(&mut block, pairs, atoms)?;
                self.blocks.push(block);
                Object::Block(last_index(&self.blocks)?)
            }
            Some(Known::Stage) => {
                self.annotations.push(annotation(None, pairs, atoms)?);
                Object::Annotation(last_index(&self.annotations)?)
            }
            _ => {
                self.dicts.push(in_pairs(pairs).collect());
                Object::Dict(last_index(&self.dicts)?)
            }
        })
    }

    fn update_entry(
        &mut self,
        entry: &mut RawEntry,
        pairs: &[Value],
        atoms: &Atoms,
    ) -> Result<(), Complaint> {
        for (key, value) in in_pairs(pairs) {
            match known(key) {
                Some(Known::Action) => entry.action = self.action(value, atoms)?,
                Some(Known::Addr | Known::DeviceFree) => {
                    entry.address = word("addr", value, atoms)?;
                    entry.seen |= SEEN_ADDRESS;
                }
                Some(Known::Size) => {
                    entry.size_bytes = size("size", value, atoms)?;
                    entry.seen |= SEEN_SIZE;
                }
                Some(Known::Stream) => {
                    entry.stream = self.stream(word("stream", value, atoms)?)?;
                }
                Some(Known::TimeUs) => entry.time_us = word("time_us", value, atoms)?,
                Some(Known::UserMetadata) => entry.user_metadata = non_empty_text(value, atoms),
                Some(Known::Frames) => {
                    if let Kind::Object(id) = value.kind() {
                        entry.stack = id;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn action(&mut self, value: Value, atoms: &Atoms) -> Result<RawAction, Complaint> {
        Ok(match known(value) {
            Some(Known::Alloc) => RawAction::Alloc,
            Some(Known::FreeRequested) => RawAction::FreeRequested,
            Some(Known::FreeCompleted) => RawAction::FreeCompleted,
            Some(Known::SegmentAlloc) => RawAction::SegmentAlloc,
            Some(Known::SegmentFree) => RawAction::SegmentFree,
            Some(Known::SegmentMap) => RawAction::SegmentMap,
            Some(Known::SegmentUnmap) => RawAction::SegmentUnmap,
            Some(Known::Snapshot) => RawAction::Snapshot,
            Some(Known::Oom) => RawAction::Oom,
            _ => match value.kind() {
                Kind::Text(id) => {
                    self.unknown_action.get_or_insert(id);
                    RawAction::Unknown
                }
                _ => return Err(wrong("action", value, atoms, "the name of an action")),
            },
        })
    }

    fn stream(&mut self, handle: u64) -> Result<u32, Complaint> {
        if let Some(&id) = self.stream_ids.get(&handle) {
            return Ok(id);
        }
        self.streams.push(handle);
        let id = last_index(&self.streams)?;
        self.stream_ids.insert(handle, id);
        Ok(id)
    }

    /// The id of the frame that `old` becomes with these items.
    fn frame(
        &mut self,
        old: Option<u32>,
        pairs: &[Value],
        atoms: &Atoms,
    ) -> Result<u32, Complaint> {
        let mut frame = match old {
            Some(id) => self.frames[id as usize],
            None => RawFrame { name: NO_ID, filename: NO_ID, line: 0 },
        };
        for (key, value) in in_pairs(pairs) {
            match known(key) {
                Some(Known::Name) => frame.name = non_empty_text(value, atoms),
                Some(Known::Filename) => frame.filename = non_empty_text(value, atoms),
                // Lines beyond 32 bits, or none, read as unknown.
                Some(Known::Line) => {
                    let line = atoms.unsigned(value).and_then(|line| u32::try_from(line).ok());
                    frame.line = line.unwrap_or(0);
                }
                _ => {}
            }
        }
        let key = (frame.name, frame.filename, frame.line);
        if let Some(&id) = self.frame_ids.get(&key) {
            return Ok(id);
        }
        self.frames.push(frame);
        let id = last_index(&self.frames)?;
        self.frame_ids.insert(key, id);
        Ok(id)
    }

    /// The stack that these items form, if every one is a frame by now.
    fn stack(&mut self, items: &[Value]) -> Option<u32> {
        self.scratch.clear();
        for item in items {
            let Kind::Object(id) = item.kind() else { return None };
            let Object::Frame(frame) = self.objects[id as usize] else { return None };
            self.scratch.push(frame);
        }
        self.stacks.intern(&self.scratch)
    }

    /// Makes a plain list of a stack that grows on, as lists beyond a thousand items do. Were each
    /// longer stack interned, a file could make memory grow with the square of its size.
    fn unpack_stack(&mut self, stack: u32) -> Result<u32, Complaint> {
        let frames = self.stacks.get(stack).to_vec();
        let mut items = Vec::new();
        for frame in frames {
            let object = self.new_object(Object::Frame(frame)).ok_or_else(too_many)?;
            items.push(Value::object(object));
        }
        self.lists.push(items);
        last_index(&self.lists)
    }
}

impl Build for Collector {
    fn new_dict(&mut self) -> Option<u32> {
        self.new_object(Object::NewDict)
    }

    fn new_list(&mut self) -> Option<u32> {
        self.new_object(Object::NewList)
    }

    fn new_tuple(&mut self, items: &[Value]) -> Option<u32> {
        let list = u32::try_from(self.lists.len()).ok()?;
        self.lists.push(items.to_vec());
        self.new_object(Object::Tuple(list))
    }

    fn append(&mut self, list: u32, items: &[Value]) -> Result<(), Complaint> {
        let index = match self.objects[list as usize] {
            Object::NewList if items.is_empty() => return Ok(()),
            Object::NewList => {
                if let Some(stack) = self.stack(items) {
                    self.objects[list as usize] = Object::Stack(stack);
                    return Ok(());
                }
                self.lists.push(Vec::new());
                last_index(&self.lists)?
            }
            Object::Stack(stack) => self.unpack_stack(stack)?,
            Object::List(index) => index,
            _ => {
                let found = "items appended to a dict or tuple".to_owned();
                return Err(Complaint { found, expected: "a list below the items" });
            }
        };
        self.objects[list as usize] = Object::List(index);
        self.lists[index as usize].extend_from_slice(items);
        Ok(())
    }

    fn set_items(&mut self, dict: u32, pairs: &[Value], atoms: &Atoms) -> Result<(), Complaint> {
        match self.objects[dict as usize] {
            Object::NewDict if pairs.is_empty() => {}
            Object::NewDict => self.objects[dict as usize] = self.classify(pairs, atoms)?,
            Object::Event(index) => {
                let mut entry = self.entries[index as usize];
                self.update_entry(&mut entry, pairs, atoms)?;
                self.entries[index as usize] = entry;
            }
            Object::Frame(frame) => {
                let frame = self.frame(Some(frame), pairs, atoms)?;
                self.objects[dict as usize] = Object::Frame(frame);
            }
            Object::Segment(index) => {
                update_segment(&mut self.segments[index as usize], pairs, atoms)?;
            }
            Object::Block(index) => update_block(&mut self.blocks[index as usize], pairs, atoms)?,
            Object::Annotation(index) => {
                let old = self.annotations[index as usize];
                self.annotations[index as usize] = annotation(Some(old), pairs, atoms)?;
            }
            Object::Dict(index) => self.dicts[index as usize].extend(in_pairs(pairs)),
            Object::NewList | Object::List(_) | Object::Tuple(_) | Object::Stack(_) => {
                let found = "keys set in a list or tuple".to_owned();
                return Err(Complaint { found, expected: "a dict below the items" });
            }
        }
        Ok(())
    }

    fn first_of_tuple(&self, tuple: u32) -> Option<Value> {
        match self.objects[tuple as usize] {
            Object::Tuple(list) => self.lists[list as usize].first().copied(),
            _ => None,
        }
    }
}

fn in_pairs(pairs: &[Value]) -> impl Iterator<Item = (Value, Value)> + '_ {
    pairs.chunks_exact(2).map(|pair| (pair[0], pair[1]))
}

fn too_many() -> Complaint {
    Complaint { found: "too many values".to_owned(), expected: "fewer than four billion" }
}

fn last_index<T>(items: &[T]) -> Result<u32, Complaint> {
    u32::try_from(items.len().wrapping_sub(1)).map_err(|_| too_many())
}

fn wrong(key: &str, value: Value, atoms: &Atoms, expected: &'static str) -> Complaint {
    Complaint { found: format!("{key:?} is {}", atoms.describe(value)), expected }
}

/// An address, handle or time: 64 bits, which the C++ writer gives as a signed number.
fn word(key: &str, value: Value, atoms: &Atoms) -> Result<u64, Complaint> {
    atoms.word(value).ok_or_else(|| wrong(key, value, atoms, "a 64-bit integer"))
}

fn size(key: &str, value: Value, atoms: &Atoms) -> Result<u64, Complaint> {
    let bytes = atoms.unsigned(value).filter(|&bytes| bytes <= BLOCK_BYTES_MAX);
    bytes.ok_or_else(|| wrong(key, value, atoms, "a number of bytes from 0 to 2^60 - 1"))
}

fn device(value: Value, atoms: &Atoms) -> Result<u32, Complaint> {
    let index = atoms.unsigned(value).and_then(|int| u32::try_from(int).ok());
    index.ok_or_else(|| wrong("device", value, atoms, "the index of a device"))
}

/// The text's id, or [`NO_ID`] if it is empty or no text.
fn non_empty_text(value: Value, atoms: &Atoms) -> u32 {
    match value.kind() {
        Kind::Text(id) if !atoms.strings.get(id).is_empty() => id,
        _ => NO_ID,
    }
}

fn truth(value: Value) -> bool {
    matches!(value.kind(), Kind::Bool(true))
}

fn update_segment(
    draft: &mut SegmentDraft,
    pairs: &[Value],
    atoms: &Atoms,
) -> Result<(), Complaint> {
    let segment = &mut draft.segment;
    for (key, value) in in_pairs(pairs) {
        match known(key) {
            Some(Known::Device) => segment.device = device(value, atoms)?,
            Some(Known::Address) => segment.address = word("address", value, atoms)?,
            Some(Known::TotalSize) => segment.total_bytes = size("total_size", value, atoms)?,
            Some(Known::Stream) => segment.stream_handle = word("stream", value, atoms)?,
            Some(Known::SegmentType) => segment.large = known(value) == Some(Known::Large),
            Some(Known::IsExpandable) => segment.expandable = truth(value),
            Some(Known::SegmentPoolId) => draft.pool_id = value,
            Some(Known::Blocks) => draft.blocks = value,
            _ => {}
        }
    }
    Ok(())
}

fn update_block(block: &mut RawBlock, pairs: &[Value], atoms: &Atoms) -> Result<(), Complaint> {
    for (key, value) in in_pairs(pairs) {
        match known(key) {
            Some(Known::Address) => block.address = word("address", value, atoms)?,
            Some(Known::Size) => block.size_bytes = size("size", value, atoms)?,
            Some(Known::RequestedSize) => {
                block.requested_bytes = size("requested_size", value, atoms)?;
            }
            Some(Known::State) => {
                block.state = match known(value) {
                    Some(Known::ActiveAllocated) => RawBlockState::Allocated,
                    Some(Known::ActivePendingFree) => RawBlockState::Pending,
                    Some(Known::Inactive) => RawBlockState::Inactive,
                    _ => {
                        return Err(wrong(
                            "state",
                            value,
                            atoms,
                            "active_allocated, active_pending_free or inactive",
                        ));
                    }
                };
            }
            _ => {}
        }
    }
    Ok(())
}

fn annotation(
    old: Option<RawAnnotation>,
    pairs: &[Value],
    atoms: &Atoms,
) -> Result<RawAnnotation, Complaint> {
    let empty = RawAnnotation { name: NO_ID, start: false, device: 0, time_us: 0 };
    let mut annotation = old.unwrap_or(empty);
    for (key, value) in in_pairs(pairs) {
        match known(key) {
            Some(Known::Name) => annotation.name = non_empty_text(value, atoms),
            Some(Known::Stage) => annotation.start = known(value) == Some(Known::Start),
            Some(Known::Device) => annotation.device = device(value, atoms)?,
            Some(Known::TimeUs) => annotation.time_us = word("time_us", value, atoms)?,
            _ => {}
        }
    }
    Ok(annotation)
}

/// Makes a snapshot of what was collected.
struct Finisher {
    top: Value,
    atoms: Atoms,
    collector: Collector,
}

const SNAPSHOT_SHAPE: &str = "the dict with 'segments' and 'device_traces' that \
     torch.cuda.memory._dump_snapshot writes, or a list of segments";

impl Finisher {
    fn new(pickle: Pickle<Collector>) -> Self {
        Finisher { top: pickle.top, atoms: pickle.atoms, collector: pickle.builder }
    }

    fn finish(mut self) -> Result<RawSnapshot, SnapshotError> {
        let segments_at = match self.object(self.top) {
            Some(Object::Dict(_)) => self.item(self.top, Known::Segments),
            Some(Object::NewList | Object::List(_)) => Some(self.top),
            _ => {
                let found = format!("the pickle holds {}", self.atoms.describe(self.top));
                return Err(SnapshotError::Shape { found, expected: SNAPSHOT_SHAPE });
            }
        };
        let traces_at = self.item(self.top, Known::DeviceTraces);
        if segments_at.is_none() && traces_at.is_none() {
            let found = format!("the pickle holds a dict with {}", self.keys(self.top));
            return Err(SnapshotError::Shape { found, expected: SNAPSHOT_SHAPE });
        }
        let segments = self.segments(segments_at)?;
        let annotations = self.annotations();
        let settings = self.settings();
        let devices = self.devices(traces_at)?;
        let unknown_action = self.collector.unknown_action.map(|id| self.text(id));
        Ok(RawSnapshot {
            devices,
            streams: self.collector.streams,
            segments,
            settings,
            annotations,
            texts: self.atoms.strings,
            stacks: self.collector.stacks,
            frames: self.collector.frames,
            unknown_action,
        })
    }

    fn text(&self, id: u32) -> String {
        shorten(&self.atoms.strings.text(id)).to_owned()
    }

    fn object(&self, value: Value) -> Option<Object> {
        match value.kind() {
            Kind::Object(id) => Some(self.collector.objects[id as usize]),
            _ => None,
        }
    }

    /// The pairs of a dict that fits no shape.
    fn pairs(&self, value: Value) -> &[(Value, Value)] {
        match self.object(value) {
            Some(Object::Dict(index)) => &self.collector.dicts[index as usize],
            _ => &[],
        }
    }

    /// The value under a key; of several the last, as in Python.
    fn item(&self, dict: Value, key: Known) -> Option<Value> {
        let found = self.pairs(dict).iter().rev().find(|&&(k, _)| known(k) == Some(key));
        found.map(|&(_, value)| value)
    }

    fn keys(&self, dict: Value) -> String {
        let pairs = self.pairs(dict);
        let mut keys: Vec<String> =
            pairs.iter().take(8).map(|&(key, _)| self.atoms.describe(key)).collect();
        if pairs.len() > keys.len() {
            keys.push("...".to_owned());
        }
        format!("the keys {}", keys.join(", "))
    }

    /// The items of a list or tuple; nothing for anything else.
    fn items(&self, value: Value) -> Option<&[Value]> {
        match self.object(value)? {
            Object::NewList => Some(&[]),
            Object::List(index) | Object::Tuple(index) => {
                Some(&self.collector.lists[index as usize])
            }
            _ => None,
        }
    }

    fn segments(&mut self, at: Option<Value>) -> Result<Vec<RawSegment>, SnapshotError> {
        let Some(at) = at else { return Ok(Vec::new()) };
        let shape = |found: String, expected| SnapshotError::Shape { found, expected };
        let Some(items) = self.items(at) else {
            let found = format!("'segments' is {}", self.atoms.describe(at));
            return Err(shape(found, "a list of segments"));
        };
        let items = items.to_vec();
        let mut segments = Vec::new();
        for (index, &item) in items.iter().enumerate() {
            let draft = self.segment_draft(item).map_err(|complaint| {
                shape(format!("segment {index}: {}", complaint.found), complaint.expected)
            })?;
            segments.push(self.segment(draft));
        }
        Ok(segments)
    }

    fn segment_draft(&self, item: Value) -> Result<SegmentDraft, Complaint> {
        match self.object(item) {
            Some(Object::Segment(index)) => Ok(self.collector.segments[index as usize].clone()),
            Some(Object::Dict(_)) => {
                let mut draft = SegmentDraft::new();
                update_segment(&mut draft, &self.flat_pairs(item), &self.atoms)?;
                Ok(draft)
            }
            _ => {
                Err(Complaint { found: self.atoms.describe(item), expected: "a dict of a segment" })
            }
        }
    }

    fn flat_pairs(&self, dict: Value) -> Vec<Value> {
        self.pairs(dict).iter().flat_map(|&(key, value)| [key, value]).collect()
    }

    fn segment(&self, draft: SegmentDraft) -> RawSegment {
        let mut segment = draft.segment;
        if let Some(&[first, second]) = self.items(draft.pool_id) {
            let part = |value| self.atoms.word(value).unwrap_or(0);
            segment.pool_id = (part(first), part(second));
        }
        for &item in self.items(draft.blocks).unwrap_or(&[]) {
            match self.object(item) {
                Some(Object::Block(index)) => {
                    segment.blocks.push(self.collector.blocks[index as usize]);
                }
                Some(Object::Dict(_)) => {
                    let mut block = RawBlock::default();
                    if update_block(&mut block, &self.flat_pairs(item), &self.atoms).is_ok() {
                        segment.blocks.push(block);
                    }
                }
                _ => {}
            }
        }
        segment
    }

    fn annotations(&self) -> Vec<RawAnnotation> {
        let Some(list) = self.item(self.top, Known::ExternalAnnotations) else {
            return Vec::new();
        };
        let kept = |&item: &Value| match self.object(item) {
            Some(Object::Annotation(index)) => Some(self.collector.annotations[index as usize]),
            _ => None,
        };
        self.items(list).unwrap_or(&[]).iter().filter_map(kept).collect()
    }

    fn settings(&self) -> Option<RawSettings> {
        let dict = self.item(self.top, Known::AllocatorSettings)?;
        let conf = match self.item(dict, Known::Conf)?.kind() {
            Kind::Text(id) => self.atoms.strings.text(id).into_owned(),
            _ => String::new(),
        };
        let unsigned = |key| self.atoms.unsigned(self.item(dict, key)?);
        let float = |key| self.atoms.float(self.item(dict, key)?);
        Some(RawSettings {
            conf,
            max_split_bytes: unsigned(Known::MaxSplitSize),
            gc_threshold: float(Known::GcThreshold).unwrap_or(0.0),
            expandable: self.item(dict, Known::Expandable).is_some_and(truth),
            roundup_divisions: self.roundup_divisions(dict),
        })
    }

    fn roundup_divisions(&self, settings: Value) -> Vec<(u64, u64)> {
        let Some(dict) = self.item(settings, Known::Roundup) else { return Vec::new() };
        let class = |&(key, value): &(Value, Value)| {
            let Kind::Text(id) = key.kind() else { return None };
            let mib = self.atoms.strings.text(id).parse().ok()?;
            Some((mib, self.atoms.unsigned(value)?))
        };
        let mut classes: Vec<(u64, u64)> = self.pairs(dict).iter().filter_map(class).collect();
        classes.sort_unstable();
        classes
    }

    fn devices(&mut self, at: Option<Value>) -> Result<Vec<Vec<RawEntry>>, SnapshotError> {
        let Some(at) = at else { return Ok(Vec::new()) };
        let Some(traces) = self.items(at) else {
            let found = format!("'device_traces' is {}", self.atoms.describe(at));
            return Err(SnapshotError::Shape { found, expected: "a list with a list per device" });
        };
        let mut orders = Vec::new();
        let mut next = 0;
        let traces = traces.to_vec();
        for (gpu, trace) in traces.into_iter().enumerate() {
            let order = self.order(gpu, trace, next)?;
            next = order.end();
            orders.push(order);
        }
        self.resolve_stacks()?;
        Ok(self.in_order(&orders))
    }

    /// Where the entries of one device lie, oldest first. They usually lie there in a row, from
    /// `next` on.
    fn order(&mut self, gpu: usize, trace: Value, next: u32) -> Result<Order, SnapshotError> {
        let list = match self.object(trace) {
            Some(Object::NewList) => return Ok(Order::Row(next..next)),
            Some(Object::List(list) | Object::Tuple(list)) => list as usize,
            _ => {
                let found = format!("trace of GPU {gpu} is {}", self.atoms.describe(trace));
                return Err(SnapshotError::Shape { found, expected: "a list of entries" });
            }
        };
        let items = std::mem::take(&mut self.collector.lists[list]);
        let mut order = Order::Row(next..next);
        for (index, &item) in items.iter().enumerate() {
            let entry = self.entry(item).map_err(|complaint| {
                let Complaint { found, expected } = complaint;
                SnapshotError::Entry { gpu, index, found, expected }
            })?;
            order.push(entry);
        }
        // The same list may stand for another device too.
        self.collector.lists[list] = items;
        Ok(order)
    }

    /// The index of the entry that an item of a trace is.
    fn entry(&mut self, item: Value) -> Result<u32, Complaint> {
        let index = match self.object(item) {
            Some(Object::Event(index)) => index,
            Some(Object::Dict(_)) => self.late_entry(item)?,
            _ => {
                let found = self.atoms.describe(item);
                return Err(Complaint { found, expected: "a dict with 'action', 'addr', 'size'" });
            }
        };
        let RawEntry { action, seen, .. } = self.collector.entries[index as usize];
        let needs_nothing = matches!(action, RawAction::Snapshot | RawAction::Unknown);
        if !needs_nothing && seen != SEEN_ADDRESS | SEEN_SIZE {
            let key = if seen & SEEN_SIZE == 0 { "size" } else { "addr" };
            let found = format!("no {key:?}");
            return Err(Complaint { found, expected: "'addr' and 'size' in every entry" });
        }
        Ok(index)
    }

    /// An entry whose dict was filled piece by piece.
    fn late_entry(&mut self, dict: Value) -> Result<u32, Complaint> {
        let pairs = self.flat_pairs(dict);
        if !pairs.chunks_exact(2).any(|pair| known(pair[0]) == Some(Known::Action)) {
            let found = format!("a dict with {}", self.keys(dict));
            return Err(Complaint { found, expected: "a dict with 'action'" });
        }
        let mut entry = RawEntry::EMPTY;
        self.collector.update_entry(&mut entry, &pairs, &self.atoms)?;
        self.collector.entries.push(entry);
        last_index(&self.collector.entries)
    }

    /// Replaces the list of frames in every entry by the id of its stack.
    fn resolve_stacks(&mut self) -> Result<(), SnapshotError> {
        for index in 0..self.collector.entries.len() {
            let list = self.collector.entries[index].stack;
            if list == NO_ID {
                continue;
            }
            let stack = match self.collector.objects[list as usize] {
                Object::Stack(stack) => stack,
                Object::List(items) => {
                    let stack = self.late_stack(items)?;
                    self.collector.objects[list as usize] = Object::Stack(stack);
                    stack
                }
                _ => NO_ID,
            };
            self.collector.entries[index].stack = stack;
        }
        Ok(())
    }

    /// The stack of a list that was filled before all its frames were, or piece by piece.
    fn late_stack(&mut self, list: u32) -> Result<u32, SnapshotError> {
        let items = std::mem::take(&mut self.collector.lists[list as usize]);
        let mut stack = Vec::new();
        for item in items {
            match self.object(item) {
                Some(Object::Frame(frame)) => stack.push(frame),
                Some(Object::Dict(_)) => {
                    let pairs = self.flat_pairs(item);
                    let frame = self.collector.frame(None, &pairs, &self.atoms);
                    stack.push(frame.map_err(|_| SnapshotError::TooMany("frames"))?);
                }
                _ => {}
            }
        }
        self.collector.stacks.intern(&stack).ok_or(SnapshotError::TooMany("stacks"))
    }

    /// The entries of each device in its order.
    fn in_order(&mut self, orders: &[Order]) -> Vec<Vec<RawEntry>> {
        let mut entries = std::mem::take(&mut self.collector.entries);
        let rows = orders.iter().all(|order| matches!(order, Order::Row(_)));
        let whole = orders.last().is_some_and(|order| order.end() as usize == entries.len());
        if !(rows && whole) {
            let at = |index: u32| entries[index as usize];
            let gather = |order: &Order| match order {
                Order::Row(row) => row.clone().map(at).collect(),
                Order::Scattered(indices) => indices.iter().copied().map(at).collect(),
            };
            return orders.iter().map(gather).collect();
        }
        let mut devices: Vec<Vec<RawEntry>> = Vec::new();
        for order in orders.iter().rev() {
            let Order::Row(row) = order else { continue };
            devices.push(entries.split_off(row.start as usize));
        }
        devices.reverse();
        devices
    }
}

/// Indices of the entries of a device.
enum Order {
    Row(Range<u32>),
    Scattered(Vec<u32>),
}

impl Order {
    fn push(&mut self, entry: u32) {
        match self {
            Order::Row(row) if row.end == entry => row.end += 1,
            Order::Row(row) => *self = Order::Scattered(row.clone().chain([entry]).collect()),
            Order::Scattered(indices) => indices.push(entry),
        }
    }

    /// The index after the last of a row; beyond all entries otherwise.
    fn end(&self) -> u32 {
        match self {
            Order::Row(row) => row.end,
            Order::Scattered(_) => u32::MAX,
        }
    }
}
