//! What the allocator of the recorded run did: kept for comparison, never fed to an allocator.
//!
//! The recorded order of everything can be rebuilt from the events and this table. Event `i` stands
//! for the actions with `event == i`, in order, followed by what the event itself implies:
//!
//! ```text
//!   Alloc(b)    segment_free*, free_completed*, segment_alloc ... then  alloc at address(b)
//!   Attempt(b)  ...                                                then  (an Oom action is listed)
//!   Free(b)                     free_requested at address(b), free_completed at address(b)
//!   Defer(b)                    free_requested at address(b)
//!   Done(b)                     free_completed at address(b), unless an action already listed it
//!   EmptyCache  free_completed*, segment_free*, segment_unmap*
//! ```
//!
//! [`recorded_entries`] does that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Op, Trace};
use crate::units::{BlockId, StreamId};

/// What kind of recorded action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedKind {
    /// Device memory obtained.
    SegmentAlloc,
    /// Device memory returned.
    SegmentFree,
    /// Pages mapped.
    SegmentMap,
    /// Pages unmapped.
    SegmentUnmap,
    /// A deferred block completed inside this event (a flush or an empty_cache waited for it).
    FreeCompleted,
    /// The request was refused. `address` holds the device's free bytes, `size_bytes` the rounded
    /// size.
    Oom,
}

/// One recorded action that an event does not imply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedAction {
    /// Index of the event during which it happened.
    pub event: u32,
    /// What happened.
    pub kind: RecordedKind,
    /// The completed block for `FreeCompleted`, else [`BlockId::NONE`].
    pub block: BlockId,
    /// Stream of the segment.
    pub stream: StreamId,
    /// Base of the segment or first page. For `Oom`: free bytes of the device.
    pub address: u64,
    /// Size of the segment or of the mapped pages. For `Oom`: the rounded size.
    pub size_bytes: u64,
}

impl RecordedAction {
    /// Memory held after it, in bytes, given what was held before.
    pub fn reserved_after(&self, reserved_bytes: u64) -> u64 {
        match self.kind {
            RecordedKind::SegmentAlloc | RecordedKind::SegmentMap => {
                reserved_bytes.saturating_add(self.size_bytes)
            }
            RecordedKind::SegmentFree | RecordedKind::SegmentUnmap => {
                reserved_bytes.saturating_sub(self.size_bytes)
            }
            RecordedKind::FreeCompleted | RecordedKind::Oom => reserved_bytes,
        }
    }
}

/// What a `NAME.truth.json` tells beside a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truth {
    /// `torch.cuda.memory_stats()` at the end, flat names.
    pub stats: BTreeMap<String, i64>,
    /// How the recorded run ended: `ok`, or the text of its error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// The job reset peak statistics while it ran, so peaks count from an unknown moment.
    #[serde(default)]
    pub peak_stats_reset: bool,
    /// The program noted its own calls: every `empty_cache` it made is an event, also those that
    /// released nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub calls_noted: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What the recorded allocator did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Address of every block when it was handed out, by [`BlockId`]; 0 where unknown (an
    /// attempt). As long as the block table.
    pub block_addresses: Vec<u64>,
    /// Actions that the events do not imply, in order of `event`.
    pub actions: Vec<RecordedAction>,
    /// What the recorded allocator reported of itself.
    pub truth: Option<Truth>,
}

impl Recording {
    /// Total memory of the device in bytes as the reservations of expandable segments show it, each
    /// of which takes 1.125 times as many addresses (specs/pytorch_caching.md 5.1): an upper bound,
    /// and mostly right, since a driver reserves one beside the other. Nothing where only one
    /// stream and kind of pool mapped pages.
    ///
    /// ```text
    ///   │ pages of 2 MiB ...                │ pages of 20 MiB ...
    ///   ^ base                              ^ base: at most the size of a reservation above
    /// ```
    pub fn device_total_from_reservations(&self) -> Option<u64> {
        // A small pool maps one page of 2 MiB at a time, a large one more.
        const SMALL_PAGE_BYTES: u64 = 2 << 20;
        // Reservations are rounded up to pages, and begin at rounder addresses still.
        const ROUNDING_BYTES: u64 = 64 << 20;
        let maps = self.actions.iter().filter(|action| action.kind == RecordedKind::SegmentMap);
        let mut pages: Vec<(u64, StreamId, bool)> =
            maps.map(|map| (map.address, map.stream, map.size_bytes == SMALL_PAGE_BYTES)).collect();
        pages.sort_unstable();
        // The first page of every stretch of one stream and kind.
        pages.dedup_by_key(|&mut (_, stream, small)| (stream, small));
        let distances = pages.windows(2).map(|pair| pair[1].0 - pair[0].0);
        let span_bytes = distances.min()?.checked_sub(ROUNDING_BYTES)?;
        Some(span_bytes / 9 * 8)
    }
}

/// What a rebuilt entry of the recording says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A block was handed out.
    Alloc,
    /// The program freed a block.
    FreeRequested,
    /// A freed block became reusable.
    FreeCompleted,
    /// Device memory obtained.
    SegmentAlloc,
    /// Device memory returned.
    SegmentFree,
    /// Pages mapped.
    SegmentMap,
    /// Pages unmapped.
    SegmentUnmap,
    /// A request was refused.
    Oom,
}

/// One entry of the recorded allocator's own log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedEntry {
    /// What happened.
    pub kind: EntryKind,
    /// Block, segment or first page. For `Oom`: free bytes of the device.
    pub address: u64,
    /// Bytes: the request of a block, the size of a segment, the rounded size of an `Oom`.
    pub size_bytes: u64,
    /// Stream of the block or segment.
    pub stream: StreamId,
    /// The block, or [`BlockId::NONE`] for segments and refusals.
    pub block: BlockId,
    /// Index of the event that the entry belongs to.
    pub event: u32,
}

/// The log of the recorded allocator in its order, rebuilt from events and recording. Empty if the
/// trace has no recording. A block id that is not in the tables ends it.
pub fn recorded_entries(trace: &Trace) -> RecordedEntries<'_> {
    RecordedEntries {
        trace,
        event: 0,
        action: 0,
        implied: [None; 2],
        completed: vec![false; trace.blocks.len()],
    }
}

/// Iterator of [`recorded_entries`].
#[derive(Clone, Debug)]
pub struct RecordedEntries<'a> {
    trace: &'a Trace,
    /// Next event whose own entries are to come.
    event: usize,
    /// Next action.
    action: usize,
    /// What the last event implies and was not given yet.
    implied: [Option<RecordedEntry>; 2],
    /// Blocks whose completion an action listed.
    completed: Vec<bool>,
}

impl RecordedEntries<'_> {
    fn action_entry(&mut self, action: RecordedAction) -> Option<RecordedEntry> {
        if action.kind == RecordedKind::FreeCompleted {
            *self.completed.get_mut(action.block.index())? = true;
        }
        let kind = match action.kind {
            RecordedKind::SegmentAlloc => EntryKind::SegmentAlloc,
            RecordedKind::SegmentFree => EntryKind::SegmentFree,
            RecordedKind::SegmentMap => EntryKind::SegmentMap,
            RecordedKind::SegmentUnmap => EntryKind::SegmentUnmap,
            RecordedKind::FreeCompleted => EntryKind::FreeCompleted,
            RecordedKind::Oom => EntryKind::Oom,
        };
        Some(RecordedEntry {
            kind,
            address: action.address,
            size_bytes: action.size_bytes,
            stream: action.stream,
            block: action.block,
            event: action.event,
        })
    }

    fn block_entry(&self, kind: EntryKind, block: BlockId) -> Option<RecordedEntry> {
        let addresses = &self.trace.recording.as_ref()?.block_addresses;
        let row = self.trace.blocks.get(block.index())?;
        Some(RecordedEntry {
            kind,
            address: *addresses.get(block.index())?,
            size_bytes: row.size_bytes,
            stream: row.stream,
            block,
            event: self.event as u32,
        })
    }

    /// Sets what the next event implies. Nothing at the end, or if a block is not in the
    /// tables.
    fn imply(&mut self) -> Option<()> {
        let event = self.trace.events.get(self.event)?;
        self.implied = match event.op {
            Op::Alloc(block) => [Some(self.block_entry(EntryKind::Alloc, block)?), None],
            Op::Defer(block) => [Some(self.block_entry(EntryKind::FreeRequested, block)?), None],
            Op::Free(block) => [
                Some(self.block_entry(EntryKind::FreeRequested, block)?),
                Some(self.block_entry(EntryKind::FreeCompleted, block)?),
            ],
            Op::Done(block) if !*self.completed.get(block.index())? => {
                [Some(self.block_entry(EntryKind::FreeCompleted, block)?), None]
            }
            _ => [None; 2],
        };
        self.event += 1;
        Some(())
    }
}

impl Iterator for RecordedEntries<'_> {
    type Item = RecordedEntry;

    fn next(&mut self) -> Option<RecordedEntry> {
        loop {
            if let Some(entry) = self.implied[0].take().or_else(|| self.implied[1].take()) {
                return Some(entry);
            }
            let actions = &self.trace.recording.as_ref()?.actions;
            match actions.get(self.action) {
                Some(&action) if action.event as usize <= self.event => {
                    self.action += 1;
                    return self.action_entry(action);
                }
                _ => self.imply()?,
            }
        }
    }
}
