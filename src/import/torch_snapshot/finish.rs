//! From the packed containers to a snapshot, once all is read.

use std::cell::Cell;
use std::ops::Range;

use super::collect::{
    Collector, Known, Object, SegmentDraft, known, last_index, too_many, truth, update_block,
    update_segment,
};
use super::{
    NO_ID, RawAction, RawAnnotation, RawBlock, RawEntry, RawSegment, RawSettings, RawSnapshot,
    SEEN_ADDRESS, SEEN_SIZE, SnapshotError,
};
use crate::import::pickle::{Atoms, Complaint, Kind, Pickle, Value, shorten};

/// Makes a snapshot of what was collected.
pub(super) struct Finisher {
    top: Value,
    atoms: Atoms,
    collector: Collector,
    /// How many more items may be copied out of containers. What stands in one place is copied
    /// once; a list that a small file puts in a million places must not fill memory.
    copies_left: Cell<usize>,
}

/// Copies beyond what is there, for containers that stand in several places.
const SHARED_COPIES_MAX: usize = 1 << 20;

const SNAPSHOT_SHAPE: &str = "the dict with 'segments' and 'device_traces' that \
     torch.cuda.memory._dump_snapshot writes, or a list of segments";

impl Finisher {
    pub(super) fn new(pickle: Pickle<Collector>) -> Self {
        let Pickle { top, atoms, builder: collector } = pickle;
        let pairs: usize = collector.dicts.iter().map(Vec::len).sum();
        let items: usize = collector.lists.iter().map(Vec::len).sum();
        // An item may be a frame whose three keys came one by one.
        let copies_left = Cell::new(SHARED_COPIES_MAX + pairs + 4 * items);
        Finisher { top, atoms, collector, copies_left }
    }

    pub(super) fn finish(mut self) -> Result<RawSnapshot, SnapshotError> {
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
        let mut segments = self.segments(segments_at)?;
        let annotations = self.annotations();
        let settings = self.settings();
        let devices = self.devices(traces_at)?;
        self.resolve_block_stacks(&mut segments)?;
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

    fn spend(&self, copies: usize) -> Result<(), Complaint> {
        let left = self.copies_left.get().checked_sub(copies).ok_or_else(|| Complaint {
            found: "lists or dicts that stand in too many places".to_owned(),
            expected: "few shared containers, as a snapshot has",
        })?;
        self.copies_left.set(left);
        Ok(())
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
            let segment = self.segment_draft(item).and_then(|draft| self.segment(draft));
            segments.push(segment.map_err(|complaint| {
                shape(format!("segment {index}: {}", complaint.found), complaint.expected)
            })?);
        }
        Ok(segments)
    }

    fn segment_draft(&self, item: Value) -> Result<SegmentDraft, Complaint> {
        match self.object(item) {
            Some(Object::Segment(index)) => Ok(self.collector.segments[index as usize].clone()),
            Some(Object::Dict(_)) => {
                let mut draft = SegmentDraft::new();
                update_segment(&mut draft, &self.flat_pairs(item)?, &self.atoms)?;
                Ok(draft)
            }
            _ => {
                Err(Complaint { found: self.atoms.describe(item), expected: "a dict of a segment" })
            }
        }
    }

    fn flat_pairs(&self, dict: Value) -> Result<Vec<Value>, Complaint> {
        let pairs = self.pairs(dict);
        self.spend(pairs.len())?;
        Ok(pairs.iter().flat_map(|&(key, value)| [key, value]).collect())
    }

    fn segment(&self, draft: SegmentDraft) -> Result<RawSegment, Complaint> {
        let mut segment = draft.segment;
        if let Some(&[first, second]) = self.items(draft.pool_id) {
            let part = |value| self.atoms.word(value).unwrap_or(0);
            segment.pool_id = (part(first), part(second));
        }
        let blocks = self.items(draft.blocks).unwrap_or(&[]);
        self.spend(blocks.len())?;
        for &item in blocks {
            match self.object(item) {
                Some(Object::Block(index)) => {
                    segment.blocks.push(self.collector.blocks[index as usize]);
                }
                Some(Object::Dict(_)) => {
                    let mut block = RawBlock::default();
                    update_block(&mut block, &self.flat_pairs(item)?, &self.atoms)?;
                    segment.blocks.push(block);
                }
                _ => {}
            }
        }
        Ok(segment)
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
        let wrong = |index, complaint: Complaint| {
            let Complaint { found, expected } = complaint;
            SnapshotError::Entry { gpu, index, found, expected }
        };
        self.spend(self.collector.lists[list].len()).map_err(|complaint| wrong(0, complaint))?;
        let items = std::mem::take(&mut self.collector.lists[list]);
        let mut order = Order::Row(next..next);
        for (index, &item) in items.iter().enumerate() {
            order.push(self.entry(item).map_err(|complaint| wrong(index, complaint))?);
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
        let pairs = self.flat_pairs(dict)?;
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
            self.collector.entries[index].stack = self.resolve_stack(list)?;
        }
        Ok(())
    }

    /// The same for the blocks in use: nothing is known of what is free.
    fn resolve_block_stacks(&mut self, segments: &mut [RawSegment]) -> Result<(), SnapshotError> {
        for block in segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
            block.stack = if block.in_use() { self.resolve_stack(block.stack)? } else { NO_ID };
        }
        Ok(())
    }

    /// The stack of a list of frames, or [`NO_ID`] for anything else.
    fn resolve_stack(&mut self, list: u32) -> Result<u32, SnapshotError> {
        if list == NO_ID {
            return Ok(NO_ID);
        }
        Ok(match self.collector.objects[list as usize] {
            Object::Stack(stack) => stack,
            Object::List(items) => {
                let stack = self.late_stack(items).map_err(|complaint| {
                    let Complaint { found, expected } = complaint;
                    SnapshotError::Shape { found: format!("a stack: {found}"), expected }
                })?;
                self.collector.objects[list as usize] = Object::Stack(stack);
                stack
            }
            _ => NO_ID,
        })
    }

    /// The stack of a list that was filled before all its frames were, or piece by piece.
    fn late_stack(&mut self, list: u32) -> Result<u32, Complaint> {
        let items = std::mem::take(&mut self.collector.lists[list as usize]);
        let mut stack = Vec::new();
        for item in items {
            match self.object(item) {
                Some(Object::Frame(frame)) => stack.push(frame),
                Some(Object::Dict(_)) => {
                    let pairs = self.flat_pairs(item)?;
                    stack.push(self.collector.frame(None, &pairs, &self.atoms)?);
                }
                _ => {}
            }
        }
        self.collector.stacks.intern(&stack).ok_or_else(too_many)
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
