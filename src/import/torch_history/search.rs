//! Whether the default pools did what their search says, if everything that is gone by the end was
//! theirs, and whether each private pool did.
//!
//! The search of specs/pytorch_caching.md 3.4 takes the free range that fits best, and new memory
//! is obtained only where none fits. So where another range was taken, or memory obtained beside a
//! range that fits, the two belong to different pools:
//!
//! ```text
//!   taken or obtained   passed over      private is
//!   gone by the end     kept, default    the one taken
//!   kept, default       gone             the one passed over
//!   gone                gone             either: the one that leaves fewer such conflicts
//! ```
//!
//! Expandable memory has one more rule (5.2): no reservation is made beside one of the same pool
//! and stream that has room.
//!
//! Blocks are followed forwards with the sizes that the splitting rules give them (3.8).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::super::torch_snapshot::{RawAction, RawEntry, RawSnapshot};
use super::FastMap;
use super::memory::{Contradiction, Spans, Units, stream_of};
use super::pools::{Evidence, NO_UNIT, Shares};
use super::sizes::{SMALL_BYTES_MAX, Sizes};
use super::start::OldSegment;

/// Whether the search follows one set of rules throughout: memory of both kinds shows that settings
/// changed.
pub(super) fn apply(sizes: &Sizes, units: &Units) -> bool {
    units.units.iter().all(|unit| unit.expandable == sizes.expandable)
}

/// What a walk found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The first two units of which one must be private, though it is not known which.
    pub(super) open: Option<(u32, u32)>,
    /// How many times two such units met.
    pub(super) conflicts: u64,
    /// How many times units met that are taken for one private pool and cannot be.
    pub(super) torn: u64,
    /// Refusals, counted over the history, that the default pools cannot have meant.
    pub(super) private_ooms: Vec<usize>,
    /// Entries until the default pools did what they should not; all if they never did.
    pub(super) entries: usize,
}

impl Found {
    /// Orders what was found, the more likely first.
    pub(super) fn badness(&self) -> impl Ord + use<> {
        (Reverse(self.entries), self.torn + self.conflicts)
    }
}

/// Marks as private what cannot be of the default pools for sure.
pub(super) fn walk(evidence: &Evidence, shares: &mut Shares) -> Result<Found, Contradiction> {
    let Evidence { snapshot, entries, units, start, sizes, no_split, .. } = *evidence;
    let mut walk = Walk {
        snapshot,
        units,
        sizes,
        no_split,
        spans: Spans::new(),
        seen: vec![false; units.units.len()],
        used: BTreeMap::new(),
        guesses: BTreeSet::new(),
        free: FastMap::default(),
        pools: shares.pools(),
        shares,
        found: Found::default(),
    };
    let consistent = walk.begin(start)? && walk.run(entries)?;
    if consistent {
        walk.found.entries = entries.len();
    }
    Ok(walk.found)
}

/// Both units are known to be of the default pools: something else is at work.
struct Inconsistent;

/// A set of free ranges: what stands for its pool, its stream, whether it is of a large pool.
type SetKey = (u32, u64, bool);

/// The free ranges of the default pools while the history goes by.
struct Walk<'a> {
    snapshot: &'a RawSnapshot,
    units: &'a Units,
    sizes: &'a Sizes,
    /// Private pools whose blocks are never split.
    no_split: &'a [(u64, u64)],
    /// Segments and mapped runs.
    spans: Spans<u32>,
    /// Units that had memory already.
    seen: Vec<bool>,
    /// Blocks in use: where they end.
    used: BTreeMap<u64, u64>,
    /// Where blocks end whose size is a guess: what is free behind them may be less than it seems.
    guesses: BTreeSet<u64>,
    /// Size and address of free ranges by pool, stream and kind.
    free: FastMap<SetKey, BTreeSet<(u64, u64)>>,
    /// What stands for the private pool of a unit.
    pools: Vec<u32>,
    shares: &'a mut Shares,
    found: Found,
}

impl Walk<'_> {
    fn begin(&mut self, start: &[OldSegment]) -> Result<bool, Contradiction> {
        for segment in start {
            for block in &segment.blocks {
                let end = block.address + block.size_bytes;
                self.used.insert(block.address, end);
                self.guesses.extend(block.guessed.then_some(end));
            }
            let size_bytes = segment.size_bytes;
            if self.reserve(segment.unit, 0).is_err() {
                return Ok(false);
            }
            self.show(segment.address, size_bytes, segment.unit)?;
        }
        Ok(true)
    }

    /// Follows the history as long as it makes sense.
    fn run(&mut self, entries: &[RawEntry]) -> Result<bool, Contradiction> {
        let mut obtained = self.units.obtained.iter();
        // Completions of a group that obtains memory may have come after the search.
        let mut completed: Vec<u64> = Vec::new();
        let (mut obtains, mut waited, mut released) = (false, false, false);
        let mut ooms = 0;
        let mut freed = None;
        for (index, entry) in entries.iter().enumerate() {
            self.found.entries = index;
            let (address, size_bytes) = (entry.address, entry.size_bytes);
            match entry.action {
                RawAction::FreeCompleted if freed == Some(address) => self.complete(address),
                RawAction::FreeCompleted => completed.push(address),
                RawAction::SegmentAlloc | RawAction::SegmentMap => {
                    let &unit = obtained.next().ok_or(Contradiction)?;
                    // They only ever add room, except that they make blocks oversize.
                    waited |= self.sizes.max_split_bytes != u64::MAX && !completed.is_empty();
                    if let Some(request) = entries.get(index + 1)
                        && request.action == RawAction::Alloc
                        && !obtains
                        && !waited
                        && self.obtain(unit, self.sizes.round(request.size_bytes)).is_err()
                    {
                        return Ok(false);
                    }
                    self.show(address, size_bytes, unit)?;
                    obtains = true;
                }
                RawAction::SegmentFree | RawAction::SegmentUnmap => {
                    released = true;
                    waited |= !completed.is_empty();
                    completed.drain(..).for_each(|address| self.complete(address));
                    let whole = entry.action == RawAction::SegmentFree;
                    self.hide(address, size_bytes, whole)?;
                }
                RawAction::Alloc => {
                    completed.drain(..).for_each(|address| self.complete(address));
                    if self.alloc(address, size_bytes, obtains).is_err() {
                        return Ok(false);
                    }
                }
                RawAction::Oom | RawAction::FreeRequested => {
                    if entry.action == RawAction::Oom && size_bytes > 0 {
                        // What completed right before may have waited for this flush.
                        let before = index.checked_sub(1).map(|before| entries[before].action);
                        let alone = before != Some(RawAction::FreeCompleted) && !released;
                        let stream = stream_of(self.snapshot, entry);
                        if alone && self.would_not_refuse(stream, size_bytes) {
                            self.found.private_ooms.push(ooms);
                        }
                        ooms += 1;
                    }
                    completed.drain(..).for_each(|address| self.complete(address));
                }
                _ => {}
            }
            freed = (entry.action == RawAction::FreeRequested).then_some(address);
            let closes = matches!(
                entry.action,
                RawAction::Alloc | RawAction::Oom | RawAction::FreeRequested
            );
            if closes {
                (obtains, waited, released) = (false, false, false);
            }
        }
        Ok(true)
    }

    /// The set that the ranges of a unit belong to.
    fn set(&self, unit: u32) -> SetKey {
        let known = &self.units.units[unit as usize];
        (self.pools[unit as usize], known.stream, known.large == Some(true))
    }

    fn add(&mut self, from: u64, to: u64, unit: u32) {
        if from < to {
            self.free.entry(self.set(unit)).or_default().insert((to - from, from));
        }
    }

    fn remove(&mut self, from: u64, to: u64, unit: u32) {
        if from < to
            && let Some(set) = self.free.get_mut(&self.set(unit))
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

    /// Memory appears, with the blocks that are in it.
    fn show(&mut self, address: u64, size_bytes: u64, unit: u32) -> Result<(), Contradiction> {
        self.seen[unit as usize] = true;
        let expandable = self.units.units[unit as usize].expandable;
        let end = address.checked_add(size_bytes).ok_or(Contradiction)?;
        if !expandable {
            self.spans.insert(address, size_bytes, false, unit)?;
            self.ranges(address, end).into_iter().for_each(|(from, to)| self.add(from, to, unit));
            return Ok(());
        }
        // Neighbouring pages of a reservation are one, and so are the free ranges in them.
        let (mut start, mut stop, mut from, mut to) = (address, end, address, end);
        if let Some((first, _)) = self.run_at(address.wrapping_sub(1), unit) {
            start = first;
            from = self.used.range(first..address).next_back().map_or(first, |(_, &end)| end);
            self.remove(from, address, unit);
            self.spans.remove_pages(first, address - first, |_| {})?;
        }
        if let Some((_, last)) = self.run_at(end, unit) {
            stop = last;
            to = self.used.range(end..last).next().map_or(last, |(&address, _)| address);
            self.remove(end, to, unit);
            self.spans.remove_pages(end, last - end, |_| {})?;
        }
        self.spans.insert(start, stop - start, true, unit)?;
        self.ranges(from, to).into_iter().for_each(|(from, to)| self.add(from, to, unit));
        Ok(())
    }

    /// The mapped run of a reservation around an address.
    fn run_at(&self, address: u64, unit: u32) -> Option<(u64, u64)> {
        let (start, span) = self.spans.at(address)?;
        (span.expandable && span.tag == unit).then_some((start, span.end))
    }

    /// Memory goes.
    fn hide(&mut self, address: u64, size_bytes: u64, whole: bool) -> Result<(), Contradiction> {
        let (_, span) = self.spans.at(address).ok_or(Contradiction)?;
        let end = address.checked_add(size_bytes).ok_or(Contradiction)?;
        let unit = span.tag;
        let (from, to) = match self.around(address) {
            Some((from, to, _)) if !whole && to >= end => (from, to),
            _ => (address, end),
        };
        self.ranges(from, to).into_iter().for_each(|(from, to)| self.remove(from, to, unit));
        let blocks: Vec<u64> = self.used.range(address..end).map(|(&address, _)| address).collect();
        blocks.iter().for_each(|address| {
            self.used.remove(address);
        });
        if whole {
            self.spans.remove_segment(address, size_bytes)?;
        } else {
            self.spans.remove_pages(address, size_bytes, |_| {})?;
            self.add(from, address, unit);
            self.add(end, to, unit);
        }
        Ok(())
    }

    /// The free range around an address that no block covers, and its unit.
    fn around(&self, address: u64) -> Option<(u64, u64, u32)> {
        let (start, span) = self.spans.at(address)?;
        let before = self.used.range(start..=address).next_back();
        let from = before.map_or(start, |(_, &end)| end);
        let to = self.used.range(address..span.end).next().map_or(span.end, |(&next, _)| next);
        (from <= address && address < to).then_some((from, to, span.tag))
    }

    fn complete(&mut self, address: u64) {
        let Some(end) = self.used.remove(&address) else { return };
        self.guesses.remove(&end);
        let Some((from, to, unit)) = self.around(address) else { return };
        self.remove(from, address, unit);
        self.remove(end, to, unit);
        self.add(from, to, unit);
    }

    /// A block is handed out, after memory was obtained for it or not.
    fn alloc(
        &mut self,
        address: u64,
        request_bytes: u64,
        obtained: bool,
    ) -> Result<(), Inconsistent> {
        let Some((mut from, to, unit)) = self.around(address) else { return Ok(()) };
        // Free ranges are handed out from their start, which is where the block before ends.
        let guessed = self.guesses.remove(&from);
        if from != address {
            let before = self.used.range_mut(..address).next_back();
            let (true, Some((_, end))) = (guessed, before) else { return Err(Inconsistent) };
            *end = address;
            self.remove(from, to, unit);
            self.add(address, to, unit);
            from = address;
        }
        let size_bytes = self.sizes.round(request_bytes);
        if !obtained {
            self.compare(unit, size_bytes, Some(from))?;
        }
        let known = &self.units.units[unit as usize];
        let fine = known.large != Some(true) || known.expandable;
        let whole = known.pool.is_some_and(|pool| self.no_split.contains(&pool));
        let rest_bytes = to.saturating_sub(address.saturating_add(size_bytes));
        let splits = !whole
            && (fine || size_bytes < self.sizes.max_split_bytes && rest_bytes > SMALL_BYTES_MAX);
        let end = if splits { to - rest_bytes } else { to };
        self.remove(from, to, unit);
        self.add(end, to, unit);
        self.used.insert(address, end);
        Ok(())
    }

    /// New memory for a block of `size_bytes`.
    fn obtain(&mut self, unit: u32, size_bytes: u64) -> Result<(), Inconsistent> {
        self.compare(unit, size_bytes, None)?;
        self.reserve(unit, size_bytes)
    }

    /// Compares what was taken in a unit, or nothing if memory was obtained, with the search.
    fn compare(
        &mut self,
        unit: u32,
        size_bytes: u64,
        taken: Option<u64>,
    ) -> Result<(), Inconsistent> {
        // That much is there even where the block before is larger than it seems.
        let need_bytes = size_bytes.saturating_add(SMALL_BYTES_MAX);
        while let Some(best) = self.search(self.set(unit), size_bytes)
            && taken != Some(best)
        {
            if self.guesses.contains(&best)
                && self.around(best).is_none_or(|(from, to, _)| to - from < need_bytes)
            {
                break;
            }
            let Some((_, span)) = self.spans.at(best) else { return Err(Inconsistent) };
            if !self.settle(unit, span.tag)? {
                break;
            }
        }
        Ok(())
    }

    /// Looks for a reservation with room beside one that is made.
    fn reserve(&mut self, unit: u32, size_bytes: u64) -> Result<(), Inconsistent> {
        let known = &self.units.units[unit as usize];
        if !known.expandable || self.seen[unit as usize] {
            return Ok(());
        }
        let mut others: Vec<u32> = self.spans.iter().map(|(_, span)| span.tag).collect();
        others.sort_unstable();
        others.dedup();
        for other in others {
            let beside = &self.units.units[other as usize];
            let same = beside.expandable
                && beside.stream == known.stream
                && beside.large == known.large
                && self.pools[other as usize] == self.pools[unit as usize];
            if other != unit && same && self.room_behind(other) >= size_bytes {
                self.settle(unit, other)?;
            }
        }
        Ok(())
    }

    /// Whether the default pools would have served a request of a rounded size, or would have given
    /// something back before they refused it.
    fn would_not_refuse(&self, stream: u64, size_bytes: u64) -> bool {
        let large = size_bytes > SMALL_BYTES_MAX;
        if self.search((NO_UNIT, stream, large), size_bytes).is_some() {
            return true;
        }
        let of_default = self.free.iter().filter(|((pool, ..), _)| *pool == NO_UNIT);
        of_default.flat_map(|(_, ranges)| ranges).any(|&(range_bytes, address)| {
            let span = self.spans.at(address);
            span.is_some_and(|(start, span)| {
                !span.expandable && start == address && span.end - start == range_bytes
            })
        })
    }

    /// Bytes of a reservation behind its last page.
    fn room_behind(&self, unit: u32) -> u64 {
        let end = self.units.units[unit as usize].base.saturating_add(self.units.reservation_bytes);
        let runs = self.spans.iter().filter(|(_, span)| span.tag == unit);
        end.saturating_sub(runs.map(|(_, span)| span.end).max().unwrap_or(end))
    }

    /// Two units are of different pools; whether it is now known how.
    fn settle(&mut self, taken: u32, passed_over: u32) -> Result<bool, Inconsistent> {
        if taken == passed_over {
            return Err(Inconsistent);
        }
        if self.shares.is_private(taken) {
            self.found.torn += 1;
            return Ok(false);
        }
        let is_gone = |unit: u32| self.units.units[unit as usize].pool.is_none();
        match (is_gone(taken), is_gone(passed_over)) {
            (false, false) => return Err(Inconsistent),
            (true, false) => self.give_up(taken),
            (false, true) => self.give_up(passed_over),
            (true, true) => {
                self.found.conflicts += 1;
                self.found.open.get_or_insert((taken, passed_over));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A unit belongs to a private pool after all.
    fn give_up(&mut self, unit: u32) {
        let spans = self.spans.iter().filter(|(_, span)| span.tag == unit);
        let ranges: Vec<(u64, u64)> =
            spans.flat_map(|(start, span)| self.ranges(start, span.end)).collect();
        ranges.iter().for_each(|&(from, to)| self.remove(from, to, unit));
        self.shares.set_private(unit);
        self.pools[unit as usize] = unit;
        ranges.iter().for_each(|&(from, to)| self.add(from, to, unit));
    }

    /// Where the range begins that the search takes in a set.
    fn search(&self, set: SetKey, size_bytes: u64) -> Option<u64> {
        let set = self.free.get(&set)?;
        let mut fitting = set.range((size_bytes, 0)..).copied();
        let mut best = fitting.next()?;
        if self.sizes.expandable {
            let mut grown_bytes = self.grown(best);
            for next in fitting {
                let next_bytes = self.grown(next);
                if next_bytes >= grown_bytes {
                    break;
                }
                (best, grown_bytes) = (next, next_bytes);
            }
        }
        let (range_bytes, address) = best;
        let max = self.sizes.max_split_bytes;
        let fits = if size_bytes < max {
            range_bytes < max
        } else {
            range_bytes < size_bytes.saturating_add(self.sizes.max_non_split_rounding_bytes)
        };
        fits.then_some(address)
    }

    /// Size of a range with the unmapped addresses right behind it.
    fn grown(&self, (size_bytes, address): (u64, u64)) -> u64 {
        let end = address + size_bytes;
        let Some((_, span)) = self.spans.at(address).filter(|(_, span)| span.end == end) else {
            return size_bytes;
        };
        let base = self.units.units[span.tag as usize].base;
        let next = self.spans.from(end).filter(|(_, next)| next.tag == span.tag);
        let next = next.map(|(start, _)| start);
        let end = next.unwrap_or(base.saturating_add(self.units.reservation_bytes));
        end.saturating_sub(address)
    }
}
