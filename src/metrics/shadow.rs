//! An independent check of an allocator's contract, from nothing but its log (`--paranoid`).
//!
//! Shares no code with any allocator: ordered maps of segments, mapped pages and blocks in use.

use std::collections::BTreeMap;

use super::Sink;
use crate::alloc::{ALIGNMENT_BYTES, Action, ActionKind, BlockState, LayoutBlock, Levels};

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
        if !contains(&self.segments, start, end) && !contains(&self.mapped, start, end) {
            let message = format!("block {start:#x}..{end:#x} lies outside the memory held");
            self.report(event_index, message);
        }
        self.blocks.insert(start, end);
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
            ActionKind::FreeRequested
            | ActionKind::Oom
            | ActionKind::EmptyCache
            | ActionKind::DeviceRefused => {}
        }
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
