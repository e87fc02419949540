//! Packing containers while the pickle streams by.

use std::collections::HashMap;

use super::{
    NO_ID, RawAction, RawAnnotation, RawBlock, RawBlockState, RawEntry, RawFrame, RawSegment,
    SEEN_ADDRESS, SEEN_SIZE,
};
use crate::import::intern::Interner;
use crate::import::pickle::{Atoms, Build, Complaint, Kind, Value};
use crate::trace::BLOCK_BYTES_MAX;

/// Texts that the collector knows; their ids are their numbers.
macro_rules! known_texts {
    ($($name:ident $text:literal),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Known { $($name),* }

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

pub(super) fn known(value: Value) -> Option<Known> {
    match value.kind() {
        Kind::Text(id) => KNOWN.get(id as usize).map(|&(known, _)| known),
        _ => None,
    }
}

/// What a container turned out to be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Object {
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
pub(super) struct SegmentDraft {
    pub(super) segment: RawSegment,
    pub(super) blocks: Value,
    pub(super) pool_id: Value,
}

impl SegmentDraft {
    pub(super) fn new() -> Self {
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
pub(super) struct Collector {
    pub(super) objects: Vec<Object>,
    pub(super) entries: Vec<RawEntry>,
    pub(super) segments: Vec<SegmentDraft>,
    pub(super) blocks: Vec<RawBlock>,
    pub(super) annotations: Vec<RawAnnotation>,
    pub(super) dicts: Vec<Vec<(Value, Value)>>,
    pub(super) lists: Vec<Vec<Value>>,
    pub(super) frames: Vec<RawFrame>,
    frame_ids: FastMap<(u32, u32, u32), u32>,
    pub(super) stacks: Interner<u32>,
    pub(super) streams: Vec<u64>,
    stream_ids: FastMap<u64, u32>,
    pub(super) unknown_action: Option<u32>,
    scratch: Vec<u32>,
}

impl Collector {
    pub(super) fn new() -> Self {
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

    /// Atoms that know the texts of [`Known`].
    pub(super) fn known_texts() -> Atoms {
        let texts: Vec<&str> = KNOWN.iter().map(|&(_, text)| text).collect();
        Atoms::with_known(&texts)
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

    pub(super) fn update_entry(
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
    pub(super) fn frame(
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

pub(super) fn too_many() -> Complaint {
    Complaint { found: "too many values".to_owned(), expected: "fewer than four billion" }
}

pub(super) fn last_index<T>(items: &[T]) -> Result<u32, Complaint> {
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

pub(super) fn truth(value: Value) -> bool {
    matches!(value.kind(), Kind::Bool(true))
}

pub(super) fn update_segment(
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

pub(super) fn update_block(
    block: &mut RawBlock,
    pairs: &[Value],
    atoms: &Atoms,
) -> Result<(), Complaint> {
    for (key, value) in in_pairs(pairs) {
        match known(key) {
            Some(Known::Address) => block.address = word("address", value, atoms)?,
            Some(Known::Size) => block.size_bytes = size("size", value, atoms)?,
            Some(Known::RequestedSize) => {
                block.requested_bytes = size("requested_size", value, atoms)?;
            }
            Some(Known::Frames) => {
                if let Kind::Object(id) = value.kind() {
                    block.stack = id;
                }
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
