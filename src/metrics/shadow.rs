//! An independent check of an allocator's contract, from nothing but its log and the device's books
//! (`--paranoid`).
//!
//! Shares no code with any allocator: ordered maps of segments, mapped pages and blocks in use.
//! The same memory may have several addresses, so blocks are looked at twice:
//!
//! ```text
//!   addresses   │ segment │ block │      │ stitched range: block │      blocks must not overlap here
//!                    │                      │          │
//!   memory      │ piece │ piece │ piece │ piece │ ...                   nor here, as the device says
//! ```

use std::collections::BTreeMap;

use super::Sink;
use crate::alloc::{ALIGNMENT_BYTES, Action, ActionKind, BlockState, LayoutBlock, Levels};
use crate::device::{Extent, PhysicalHandle};

/// The first breach of the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// Event during or after which it showed.
    pub event_index: u64,
    /// What was broken.
    pub message: String,
}

/// The shadow map.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    /// Segments held: base → end.
    segments: BTreeMap<u64, u64>,
    /// Mapped pages, neighbours joined: start → end.
    mapped: BTreeMap<u64, u64>,
    /// Bytes of both.
    held_bytes: u64,
    /// Second ranges of addresses of memory held: start → end.
    stitched: BTreeMap<u64, u64>,
    /// What lies behind blocks in use, by their addresses.
    memory: BTreeMap<u64, Vec<Extent>>,
    /// The same by piece and offset: start → end.
    extents: BTreeMap<(Option<PhysicalHandle>, u64), u64>,
    /// Blocks in use or waiting: address → end.
    blocks: BTreeMap<u64, u64>,
    breach: Option<Breach>,
}

impl Shadow {
    /// The first breach, if any.
    pub fn breach(&self) -> Option<&Breach> {
        self.breach.as_ref()
    }

    fn report(&mut self, event_index: u64, message: String) {
        self.breach.get_or_insert(Breach { event_index, message });
    }

    fn alloc(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address.saturating_add(action.size_bytes));
        if start % ALIGNMENT_BYTES != 0 {
            let message = format!("block at {start:#x} is not aligned to {ALIGNMENT_BYTES}");
            self.report(event_index, message);
        }
        if overlaps(&self.blocks, start, end) {
            self.report(event_index, format!("block at {start:#x} overlaps one in use"));
        }
        let ranges = [&self.segments, &self.mapped, &self.stitched];
        if !ranges.into_iter().any(|ranges| contains(ranges, start, end)) {
            let message = format!("block {start:#x}..{end:#x} lies outside the memory held");
            self.report(event_index, message);
        }
        self.blocks.insert(start, end);
    }

    fn stitch(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address.saturating_add(action.size_bytes));
        let ranges = [&self.segments, &self.mapped, &self.stitched];
        if ranges.into_iter().any(|ranges| overlaps(ranges, start, end)) {
            self.report(event_index, format!("stitched range {start:#x} overlaps other memory"));
        }
        self.stitched.insert(start, end);
    }

    fn unstitch(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address.saturating_add(action.size_bytes));
        if overlaps(&self.blocks, start, end) {
            let message = format!("stitched range {start:#x} went with a block in use");
            self.report(event_index, message);
        }
        if self.stitched.remove(&start) != Some(end) {
            self.report(event_index, format!("stitched range {start:#x} went but was not there"));
        }
    }

    /// Takes the memory behind a new block, of which nobody else may have any part.
    fn take_memory(&mut self, event_index: u64, address: u64, memory: Option<Vec<Extent>>) {
        let Some(memory) = memory else {
            self.report(event_index, format!("block at {address:#x} is not wholly mapped"));
            return;
        };
        for extent in &memory {
            let (start, end) = (extent.offset_bytes, extent.offset_bytes + extent.size_bytes);
            let below = self.extents.range(..(extent.piece, end)).next_back();
            if below.is_some_and(|(&(piece, _), &to)| piece == extent.piece && to > start) {
                let message = format!("block at {address:#x} shares memory with one in use");
                self.report(event_index, message);
            }
            self.extents.insert((extent.piece, start), end);
        }
        self.memory.insert(address, memory);
    }

    /// Gives the memory behind a block back; it must be what it was when the block came.
    fn leave_memory(&mut self, event_index: u64, address: u64, memory: Option<Vec<Extent>>) {
        // Blocks that were there at the start were not looked at.
        let Some(taken) = self.memory.remove(&address) else { return };
        for extent in &taken {
            self.extents.remove(&(extent.piece, extent.offset_bytes));
        }
        if memory != Some(taken) {
            let message = format!("the memory behind the block at {address:#x} changed");
            self.report(event_index, message);
        }
    }

    fn segment_alloc(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address.saturating_add(action.size_bytes));
        if overlaps(&self.segments, start, end) || overlaps(&self.mapped, start, end) {
            self.report(event_index, format!("segment at {start:#x} overlaps other memory"));
        }
        self.segments.insert(start, end);
        self.held_bytes += action.size_bytes;
    }

    fn segment_map(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address + action.size_bytes);
        if overlaps(&self.segments, start, end) || overlaps(&self.mapped, start, end) {
            self.report(event_index, format!("pages at {start:#x} overlap other memory"));
        }
        self.add_mapped(start, end);
        self.held_bytes += action.size_bytes;
    }

    /// Joins a mapped range with its neighbours.
    fn add_mapped(&mut self, mut start: u64, mut end: u64) {
        if let Some((&below, _)) = self.mapped.range(..start).next_back().filter(|b| *b.1 == start)
        {
            start = below;
        }
        end = self.mapped.remove(&end).unwrap_or(end);
        self.mapped.insert(start, end);
    }

    fn segment_unmap(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address + action.size_bytes);
        if overlaps(&self.blocks, start, end) {
            let message = format!("pages at {start:#x} were unmapped with a block in use");
            self.report(event_index, message);
        }
        let run = self.mapped.range(..=start).next_back().map(|(&low, &high)| (low, high));
        let Some((low, high)) = run.filter(|&(_, high)| end <= high) else {
            self.report(event_index, format!("pages at {start:#x} were unmapped but not mapped"));
            return;
        };
        self.mapped.remove(&low);
        for (from, to) in [(low, start), (end, high)] {
            if from < to {
                self.mapped.insert(from, to);
            }
        }
        self.held_bytes -= action.size_bytes;
    }

    fn segment_free(&mut self, event_index: u64, action: Action) {
        let (start, end) = (action.address, action.address.saturating_add(action.size_bytes));
        if overlaps(&self.blocks, start, end) {
            let message = format!("segment at {start:#x} was returned with a block in use");
            self.report(event_index, message);
        }
        if self.segments.remove(&start) == Some(end) {
            self.held_bytes -= action.size_bytes;
        } else {
            self.report(event_index, format!("segment at {start:#x} was returned but not held"));
        }
    }
}

fn overlaps(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    ranges.range(..end).next_back().is_some_and(|(_, &below_end)| below_end > start)
}

/// Whether one range holds all of [start, end).
fn contains(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    ranges.range(..=start).next_back().is_some_and(|(_, &range_end)| end <= range_end)
}

impl Sink for Shadow {
    const LOG: bool = true;
    const LEVELS: bool = true;

    fn start(&mut self, layout: &[LayoutBlock]) {
        for block in layout {
            let (start, end) = (block.address, block.address + block.size_bytes);
            if block.page_bytes > 0 {
                self.add_mapped(start, end);
            } else if block.address == block.segment_address {
                self.segments.insert(start, start + block.segment_bytes);
            }
            self.held_bytes += block.size_bytes;
            if block.state != BlockState::Free {
                self.blocks.insert(start, end);
            }
        }
    }

    fn action(&mut self, event_index: u64, action: Action) {
        match action.kind {
            ActionKind::Alloc => self.alloc(event_index, action),
            ActionKind::FreeCompleted => {
                if self.blocks.remove(&action.address).is_none() {
                    let message = format!("{:#x} completed but was not in use", action.address);
                    self.report(event_index, message);
                }
            }
            ActionKind::SegmentAlloc => self.segment_alloc(event_index, action),
            ActionKind::SegmentFree => self.segment_free(event_index, action),
            ActionKind::SegmentMap => self.segment_map(event_index, action),
            ActionKind::SegmentUnmap => self.segment_unmap(event_index, action),
            ActionKind::Stitch => self.stitch(event_index, action),
            ActionKind::Unstitch => self.unstitch(event_index, action),
            ActionKind::FreeRequested
            | ActionKind::Oom
            | ActionKind::EmptyCache
            | ActionKind::DeviceRefused => {}
        }
    }

    fn wants_backing(&self, action: &Action) -> bool {
        matches!(action.kind, ActionKind::Alloc | ActionKind::FreeCompleted)
    }

    fn backing(&mut self, event_index: u64, action: Action, memory: Option<Vec<Extent>>) {
        match action.kind {
            ActionKind::Alloc => self.take_memory(event_index, action.address, memory),
            ActionKind::FreeCompleted => self.leave_memory(event_index, action.address, memory),
            _ => {}
        }
    }

    fn wants_invariants(&self) -> bool {
        true
    }

    fn broken(&mut self, event_index: u64, message: &str) {
        self.report(event_index, format!("the allocator's own books: {message}"));
    }

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, _device_ns: u64) {
        let held = self.held_bytes;
        let Levels { allocated_bytes, active_bytes, reserved_bytes } = levels;
        let ordered = requested_bytes <= allocated_bytes
            && allocated_bytes <= active_bytes
            && active_bytes <= reserved_bytes;
        if !ordered {
            let message = format!(
                "requested {requested_bytes} <= allocated {allocated_bytes} <= active \
                 {active_bytes} <= reserved {reserved_bytes} does not hold"
            );
            self.report(event, message);
        }
        if held != reserved_bytes {
            let message = format!("reserved is {reserved_bytes}, the memory held is {held}");
            self.report(event, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{BlockId, MIB, StreamId};

    fn action(kind: ActionKind, address: u64, size_bytes: u64) -> Action {
        let stream = StreamId(0);
        Action {
            kind,
            block: BlockId::NONE,
            segment: 0,
            stream,
            offset_bytes: 0,
            size_bytes,
            address,
        }
    }

    fn extent(piece: u64, offset_bytes: u64, size_bytes: u64) -> Extent {
        Extent { piece: Some(PhysicalHandle(piece)), offset_bytes, size_bytes }
    }

    /// A segment of 4 MiB at 16 MiB, whose memory has a second range at 32 MiB.
    fn stitched() -> Shadow {
        let mut shadow = Shadow::default();
        shadow.action(0, action(ActionKind::SegmentAlloc, 16 * MIB, 4 * MIB));
        shadow.action(0, action(ActionKind::Stitch, 32 * MIB, 4 * MIB));
        shadow
    }

    fn alloc(shadow: &mut Shadow, address: u64, size_bytes: u64, memory: Option<Vec<Extent>>) {
        let action = action(ActionKind::Alloc, address, size_bytes);
        shadow.action(1, action);
        shadow.backing(1, action, memory);
    }

    #[test]
    fn two_addresses_of_one_memory_are_told() {
        let mut shadow = stitched();
        alloc(&mut shadow, 16 * MIB, 3 * MIB, Some(vec![extent(7, 0, 3 * MIB)]));
        assert_eq!(shadow.breach(), None);
        alloc(&mut shadow, 33 * MIB, MIB, Some(vec![extent(8, 0, MIB)]));
        assert_eq!(shadow.breach(), None, "other memory");
        alloc(&mut shadow, 34 * MIB, MIB, Some(vec![extent(7, 2 * MIB, MIB)]));
        assert!(shadow.breach().expect("told").message.contains("shares memory"));
    }

    #[test]
    fn memory_that_changes_under_a_block_is_told() {
        let mut shadow = stitched();
        alloc(&mut shadow, 32 * MIB, MIB, Some(vec![extent(7, 0, MIB)]));
        let free = action(ActionKind::FreeCompleted, 32 * MIB, MIB);
        shadow.action(2, free);
        shadow.backing(2, free, Some(vec![extent(7, MIB, MIB)]));
        assert!(shadow.breach().expect("told").message.contains("changed"));
    }

    #[test]
    fn a_block_without_memory_or_outside_is_told() {
        let mut shadow = stitched();
        alloc(&mut shadow, 32 * MIB, MIB, None);
        assert!(shadow.breach().expect("told").message.contains("not wholly mapped"));
        let mut shadow = stitched();
        alloc(&mut shadow, 64 * MIB, MIB, Some(vec![extent(7, 0, MIB)]));
        assert!(shadow.breach().expect("told").message.contains("outside the memory held"));
    }

    #[test]
    fn a_stitched_range_goes_whole_and_unused() {
        let mut shadow = stitched();
        shadow.action(3, action(ActionKind::Unstitch, 32 * MIB, 4 * MIB));
        assert_eq!(shadow.breach(), None);
        let mut shadow = stitched();
        alloc(&mut shadow, 32 * MIB, MIB, Some(vec![extent(7, 0, MIB)]));
        shadow.action(3, action(ActionKind::Unstitch, 32 * MIB, 4 * MIB));
        assert!(shadow.breach().expect("told").message.contains("with a block in use"));
    }
}
