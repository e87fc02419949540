//! The layout at the start of a history that begins late: its final segments and blocks walked
//! backwards.
//!
//! At every moment the layout is told by the segments and the blocks in use, since free neighbours
//! are always one block. Undone backwards, an alloc takes its block away, a completion puts one
//! back that is deferred, a free makes it live. What is left was there at the start.
//!
//! A block that is still in use at the end has its size in the final list. One that was freed is as
//! large as its rounded request, unless it was handed out with a rest that was too small to split
//! off:
//!
//! ```text
//!   addr       + rounded request     next block in use, or the end of the segment
//!   │ request      │ rest?  free?        │
//!   ┊              └─────── gap ─────────┘
//!   gap of at most 1 MiB   all of it is rest: in large pools nothing free is that small
//!   a later alloc here     begins where the block ends: free blocks are carved from their start
//!   else                   not known; no rest is the likely case
//! ```

use std::collections::BTreeMap;

use super::super::torch_snapshot::{RawAction, RawBlockState, RawEntry, RawSnapshot};
use super::FastMap;
use super::memory::{Contradiction, SMALL_SEGMENT_BYTES, Units, final_segments};
use super::sizes::{MIN_BLOCK_BYTES, SMALL_BYTES_MAX, Sizes};
use crate::trace::LIVE_BYTES_MAX;

/// A block in use at the start.
#[derive(Clone, Copy, Debug)]
pub(super) struct OldBlock {
    pub(super) address: u64,
    pub(super) request_bytes: u64,
    pub(super) size_bytes: u64,
    /// Freed by the program already.
    pub(super) deferred: bool,
    /// The size may be too small.
    pub(super) guessed: bool,
    /// Stack id, or `NO_ID`.
    pub(super) stack: u32,
}

/// A segment, or a mapped run, at the start.
#[derive(Clone, Debug)]
pub(super) struct OldSegment {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// Index into the units.
    pub(super) unit: u32,
    /// Its blocks in use, by ascending address.
    pub(super) blocks: Vec<OldBlock>,
}

/// A block in use while the history is walked backwards.
#[derive(Clone, Copy, Debug)]
struct InUse {
    request_bytes: u64,
    /// From the final list; 0 if the block was freed.
    size_bytes: u64,
    pending: bool,
    stack: u32,
}

/// Blocks in use at the start by ascending address.
pub(super) type InUseAtStart = BTreeMap<u64, UsedBlock>;

/// A block in use at the start, before its size is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedBlock {
    used: InUse,
    /// The lowest address at which something was handed out right behind it while it was in use.
    next_alloc: u64,
}

/// Whether every final segment of the device has its blocks.
pub(super) fn has_block_lists(snapshot: &RawSnapshot, device: usize) -> bool {
    final_segments(snapshot, device).all(|(_, segment)| !segment.blocks.is_empty())
}

/// The blocks in use when the history begins.
pub(super) fn blocks_in_use(
    snapshot: &RawSnapshot,
    device: usize,
) -> Result<InUseAtStart, Contradiction> {
    let entries = &snapshot.devices[device];
    let at_end = blocks_at_end(snapshot, device)?;
    let mut blocks = at_end.clone();
    for entry in entries.iter().rev() {
        undo(&mut blocks, entry)?;
    }
    let mut at_start: InUseAtStart = blocks
        .into_iter()
        .map(|(address, used)| (address, UsedBlock { used, next_alloc: u64::MAX }))
        .collect();
    if at_start.values().any(|block| block.used.size_bytes == 0) {
        note_allocs_behind(&mut at_start, at_end, entries);
    }
    Ok(at_start)
}

fn blocks_at_end(
    snapshot: &RawSnapshot,
    device: usize,
) -> Result<FastMap<u64, InUse>, Contradiction> {
    let mut blocks = FastMap::default();
    for (_, segment) in final_segments(snapshot, device) {
        for block in segment.blocks.iter().filter(|block| block.in_use()) {
            let used = InUse {
                request_bytes: block.requested_bytes,
                size_bytes: block.size_bytes,
                pending: block.state == RawBlockState::Pending,
                stack: block.stack,
            };
            let twice = blocks.insert(block.address, used).is_some();
            if twice || block.size_bytes == 0 || block.requested_bytes == 0 {
                return Err(Contradiction);
            }
        }
    }
    Ok(blocks)
}

fn undo(blocks: &mut FastMap<u64, InUse>, entry: &RawEntry) -> Result<(), Contradiction> {
    let (address, request_bytes) = (entry.address, entry.size_bytes);
    match entry.action {
        RawAction::Alloc => {
            let used = blocks.remove(&address).ok_or(Contradiction)?;
            if used.pending || used.request_bytes != request_bytes {
                return Err(Contradiction);
            }
        }
        RawAction::FreeRequested => {
            let used = blocks.get_mut(&address).ok_or(Contradiction)?;
            if !used.pending || used.request_bytes != request_bytes {
                return Err(Contradiction);
            }
            used.pending = false;
        }
        RawAction::FreeCompleted => {
            let stack = super::NO_ID;
            let used = InUse { request_bytes, size_bytes: 0, pending: true, stack };
            if request_bytes == 0 || blocks.insert(address, used).is_some() {
                return Err(Contradiction);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Finds what was handed out right behind the blocks of the start. Needs the blocks in order, which
/// costs more than the walk itself and is for late histories alone.
fn note_allocs_behind(
    at_start: &mut InUseAtStart,
    at_end: FastMap<u64, InUse>,
    entries: &[RawEntry],
) {
    // The end of the block right before, as far as allocs show it, by address.
    let mut in_use: BTreeMap<u64, u64> =
        at_end.into_keys().map(|address| (address, u64::MAX)).collect();
    for entry in entries.iter().rev() {
        match entry.action {
            RawAction::Alloc => {
                in_use.remove(&entry.address);
                if let Some((_, next)) = in_use.range_mut(..entry.address).next_back() {
                    *next = entry.address.min(*next);
                }
            }
            RawAction::FreeCompleted => {
                in_use.insert(entry.address, u64::MAX);
            }
            _ => {}
        }
    }
    for (address, block) in at_start {
        block.next_alloc = in_use.get(address).copied().unwrap_or(u64::MAX);
    }
}

/// Whether the blocks at the start show that a run of pages is of a large pool.
pub(super) fn kind_of_run(
    blocks: &InUseAtStart,
    sizes: &Sizes,
    start: u64,
    end: u64,
) -> Option<bool> {
    let (_, block) = blocks.range(start..end).next()?;
    Some(sizes.round(block.used.request_bytes) > SMALL_BYTES_MAX)
}

/// The segments at the start with their blocks, all sizes settled. `whole` tells of a unit that its
/// blocks are never split.
pub(super) fn layout(
    units: &Units,
    blocks: &InUseAtStart,
    sizes: &Sizes,
    whole: impl Fn(u32) -> bool,
) -> Result<Vec<OldSegment>, Contradiction> {
    let mut segments = Vec::new();
    let (mut placed, mut total_bytes) = (0, 0u64);
    for &(address, size_bytes, unit) in &units.start {
        let end = address.checked_add(size_bytes).ok_or(Contradiction)?;
        total_bytes = size_bytes.checked_add(total_bytes).ok_or(Contradiction)?;
        let aligned = address != 0 && (address | size_bytes).is_multiple_of(MIN_BLOCK_BYTES);
        if !aligned || total_bytes > LIVE_BYTES_MAX {
            return Err(Contradiction);
        }
        let known = &units.units[unit as usize];
        let place = Place {
            address,
            end,
            large: known.large == Some(true),
            expandable: known.expandable,
            whole: whole(unit),
        };
        let mut inside = blocks.range(address..end).peekable();
        let mut settled = Vec::new();
        while let Some((&address, block)) = inside.next() {
            let next = inside.peek().map_or(end, |&(&next, _)| next);
            settled.push(place.settle(address, block, next, sizes)?);
        }
        placed += settled.len();
        segments.push(OldSegment { address, size_bytes, unit, blocks: settled });
    }
    if placed == blocks.len() { Ok(segments) } else { Err(Contradiction) }
}

/// Where a block lies.
struct Place {
    address: u64,
    end: u64,
    large: bool,
    expandable: bool,
    /// Blocks are never split here.
    whole: bool,
}

impl Place {
    /// The size of the block at `address`, in front of what lies at `next`.
    fn settle(
        &self,
        address: u64,
        block: &UsedBlock,
        next: u64,
        sizes: &Sizes,
    ) -> Result<OldBlock, Contradiction> {
        let used = block.used;
        let room_bytes = next - address;
        let (size_bytes, guessed) = if used.size_bytes > 0 {
            (used.size_bytes, false)
        } else {
            self.size_of_freed(address, block, next, sizes)
        };
        let aligned = (address | size_bytes).is_multiple_of(MIN_BLOCK_BYTES);
        if !aligned || !(used.request_bytes..=room_bytes).contains(&size_bytes) {
            return Err(Contradiction);
        }
        Ok(OldBlock {
            address,
            request_bytes: used.request_bytes,
            size_bytes,
            deferred: used.pending,
            guessed,
            stack: used.stack,
        })
    }

    fn size_of_freed(
        &self,
        address: u64,
        block: &UsedBlock,
        next: u64,
        sizes: &Sizes,
    ) -> (u64, bool) {
        let room_bytes = next - address;
        let rounded_bytes = sizes.round(block.used.request_bytes);
        if rounded_bytes > room_bytes {
            // Other settings may have rounded it.
            return (block.used.request_bytes.next_multiple_of(MIN_BLOCK_BYTES), true);
        }
        let is_alone = address == self.address && next == self.end;
        let oversize = self.large && rounded_bytes >= sizes.max_split_bytes;
        if is_alone && !self.expandable && (self.whole || oversize) {
            return (room_bytes, false);
        }
        if self.whole && self.expandable {
            let small = SMALL_SEGMENT_BYTES;
            let page_bytes = if self.large { sizes.large_page_bytes } else { small };
            return (rounded_bytes.next_multiple_of(page_bytes).min(room_bytes), false);
        }
        if !self.large || self.expandable {
            return (rounded_bytes, false);
        }
        let gap_bytes = room_bytes - rounded_bytes;
        if gap_bytes <= SMALL_BYTES_MAX {
            // While memory comes in pages, ordinary segments are split to the last bytes too.
            return (room_bytes, gap_bytes > 0 && sizes.expandable);
        }
        let shown_bytes = block.next_alloc.saturating_sub(address);
        if (rounded_bytes..=rounded_bytes + SMALL_BYTES_MAX).contains(&shown_bytes) {
            return (shown_bytes, false);
        }
        // A rest would have left more than 1 MiB behind it.
        (rounded_bytes, gap_bytes > SMALL_BYTES_MAX + MIN_BLOCK_BYTES)
    }
}
