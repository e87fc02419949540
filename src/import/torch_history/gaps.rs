//! Segments that were obtained although the default pool had a free range that surely fits.
//!
//! The search of specs/pytorch_caching.md 3.4 takes such a range first, so either the new segment
//! or the one with the range belongs to another pool:
//!
//! ```text
//!   new segment       range in                           private is
//!   gone by the end   a default pool, there at the end   the new segment
//!   there at the end  a segment that is gone             that segment
//!   gone by the end   a segment that is gone             the new one, most likely
//! ```
//!
//! Blocks are taken for as large as their rounded requests. In large pools a block can be up to
//! 1 MiB larger, so a range must be that much larger than what is asked for.

use std::collections::{BTreeMap, BTreeSet};

use super::super::torch_snapshot::{RawAction, RawEntry};
use super::FastMap;
use super::memory::{Contradiction, Spans, Units};
use super::pools::Shares;
use super::sizes::{SMALL_BYTES_MAX, Sizes};
use super::start::OldSegment;

/// Whether the search takes any range that is large enough, under these settings.
pub(super) fn apply(sizes: &Sizes, units: &Units) -> bool {
    let plain = !sizes.expandable && !sizes.collects && sizes.max_split_bytes == u64::MAX;
    plain && !units.units.iter().any(|unit| unit.expandable)
}

/// Marks as private what cannot be of the default pools; `among_gone` looks at gone segments with
/// ranges in gone ones too. Whether the default pools did what they should otherwise.
pub(super) fn note_unfit(
    entries: &[RawEntry],
    units: &Units,
    start: &[OldSegment],
    sizes: &Sizes,
    among_gone: bool,
    shares: &mut Shares,
) -> Result<bool, Contradiction> {
    let mut walk = Walk {
        units,
        sizes,
        spans: units.spans_at_start()?,
        used: BTreeMap::new(),
        free: FastMap::default(),
        shares,
    };
    for segment in start {
        for block in &segment.blocks {
            walk.used.insert(block.address, block.address + block.size_bytes);
        }
        walk.show(segment.address, segment.address + segment.size_bytes, segment.unit);
    }
    let mut obtained = units.obtained.iter();
    // Completions of a group may have come after the search.
    let mut completed: Vec<u64> = Vec::new();
    let mut freed = None;
    for (index, entry) in entries.iter().enumerate() {
        let (address, size_bytes) = (entry.address, entry.size_bytes);
        match entry.action {
            RawAction::FreeCompleted if freed == Some(address) => walk.complete(address),
            RawAction::FreeCompleted => completed.push(address),
            RawAction::SegmentAlloc => {
                let &unit = obtained.next().ok_or(Contradiction)?;
                if let Some(request) = entries.get(index + 1)
                    && request.action == RawAction::Alloc
                    && !walk.is_fit(unit, sizes.round(request.size_bytes), among_gone)
                {
                    return Ok(false);
                }
                walk.spans.insert(address, size_bytes, false, unit)?;
                walk.show(address, address + size_bytes, unit);
            }
            RawAction::SegmentFree => {
                let (_, span) = walk.spans.at(address).ok_or(Contradiction)?;
                walk.hide(address, span.end, span.tag);
                walk.spans.remove_segment(address, size_bytes)?;
            }
            RawAction::Alloc => {
                completed.drain(..).for_each(|address| walk.complete(address));
                walk.alloc(address, size_bytes);
            }
            RawAction::Oom | RawAction::FreeRequested => {
                completed.drain(..).for_each(|address| walk.complete(address));
            }
            _ => {}
        }
        freed = (entry.action == RawAction::FreeRequested).then_some(address);
    }
    Ok(true)
}

/// Free ranges of one pool by size, with their addresses: of what is there at the end, and of what
/// is gone.
#[derive(Default)]
struct Free([BTreeSet<(u64, u64)>; 2]);

/// The free ranges of the default pools while the history goes by.
struct Walk<'a> {
    units: &'a Units,
    sizes: &'a Sizes,
    spans: Spans<u32>,
    /// Blocks in use: where they end.
    used: BTreeMap<u64, u64>,
    /// By stream and kind.
    free: FastMap<(u64, bool), Free>,
    shares: &'a mut Shares,
}

impl Walk<'_> {
    /// The set for the ranges of a unit; nothing if it is of a private pool.
    fn set(&mut self, unit: u32) -> Option<&mut BTreeSet<(u64, u64)>> {
        if self.shares.is_private(unit) {
            return None;
        }
        let unit = &self.units.units[unit as usize];
        let free = self.free.entry((unit.stream, unit.large == Some(true))).or_default();
        Some(&mut free.0[usize::from(unit.pool.is_none())])
    }

    fn add(&mut self, from: u64, to: u64, unit: u32) {
        if from < to
            && let Some(set) = self.set(unit)
        {
            set.insert((to - from, from));
        }
    }

    fn remove(&mut self, from: u64, to: u64, unit: u32) {
        if from < to
            && let Some(set) = self.set(unit)
        {
            set.remove(&(to - from, from));
        }
    }

    /// The free ranges between two addresses.
    fn ranges(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut end = from;
        for (&address, &block_end) in self.used.range(from..to) {
            ranges.push((end, address));
            end = block_end;
        }
        ranges.push((end, to));
        ranges
    }

    fn show(&mut self, from: u64, to: u64, unit: u32) {
        self.ranges(from, to).into_iter().for_each(|(from, to)| self.add(from, to, unit));
    }

    /// Takes a segment out, with blocks that completed just now.
    fn hide(&mut self, from: u64, to: u64, unit: u32) {
        self.ranges(from, to).into_iter().for_each(|(from, to)| self.remove(from, to, unit));
        let blocks: Vec<u64> = self.used.range(from..to).map(|(&address, _)| address).collect();
        blocks.iter().for_each(|address| {
            self.used.remove(address);
        });
    }

    /// The free range around an address that no block covers, and its unit.
    fn around(&self, address: u64) -> Option<(u64, u64, u32)> {
        let (start, span) = self.spans.at(address)?;
        let before = self.used.range(start..address).next_back();
        let from = before.map_or(start, |(_, &end)| end);
        let to = self.used.range(address..span.end).next().map_or(span.end, |(&next, _)| next);
        Some((from, to, span.tag))
    }

    fn alloc(&mut self, address: u64, request_bytes: u64) {
        let Some((from, to, unit)) = self.around(address) else { return };
        let end = address.saturating_add(self.sizes.round(request_bytes)).min(to);
        self.remove(from, to, unit);
        self.add(from, address, unit);
        self.add(end, to, unit);
        self.used.insert(address, end);
    }

    fn complete(&mut self, address: u64) {
        let Some(end) = self.used.remove(&address) else { return };
        let Some((from, to, unit)) = self.around(address) else { return };
        self.remove(from, address, unit);
        self.remove(end, to, unit);
        self.add(from, to, unit);
    }

    /// Compares a new segment for a block of `size_bytes` with the free ranges. Not if a default
    /// pool passed over a range of its own: something else is at work then.
    fn is_fit(&mut self, unit: u32, size_bytes: u64, among_gone: bool) -> bool {
        if self.shares.is_private(unit) {
            return true;
        }
        let known = &self.units.units[unit as usize];
        let large = known.large == Some(true);
        let need_bytes = size_bytes.saturating_add(if large { SMALL_BYTES_MAX } else { 0 });
        let Some(Free([kept, gone])) = self.free.get(&(known.stream, large)) else { return true };
        let fits = |set: &BTreeSet<(u64, u64)>| set.last().is_some_and(|last| last.0 >= need_bytes);
        let is_gone = known.pool.is_none();
        match (is_gone, fits(kept)) {
            (false, true) => return false,
            (true, true) => self.shares.set_private(unit),
            (true, false) if among_gone && fits(gone) => self.shares.set_private(unit),
            (false, false) if !among_gone => {
                let holders: Vec<u64> =
                    gone.range((need_bytes, 0)..).map(|&(_, address)| address).collect();
                holders.into_iter().for_each(|address| self.give_up(address));
            }
            _ => {}
        }
        true
    }

    /// The segment around an address belongs to a private pool after all.
    fn give_up(&mut self, address: u64) {
        let Some((start, span)) = self.spans.at(address) else { return };
        for (from, to) in self.ranges(start, span.end) {
            self.remove(from, to, span.tag);
        }
        self.shares.set_private(span.tag);
    }
}
