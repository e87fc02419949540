//! Which private pool every alloc belongs to.
//!
//! Entries name no pool, but every segment and every reservation belongs to one pool as long as it
//! lives, and the final segments name theirs (specs/pytorch_caching.md 13.3). What is gone by then
//! belongs to the default pools, unless the history shows that it cannot:
//!
//! ```text
//!   an alloc obtained it although a default pool    the search would have found that range:
//!   had a free range that surely fits               see `gaps`
//!   it was released while a segment of the default  an empty_cache or flush releases those first:
//!   pools stayed that no block was in               so it was the end of a MemPool
//! ```
//!
//! What is released in one go between two such segments shares their pool, and so does what serves
//! one alloc after the other without a default pool in between: a listed pool, or one of those that
//! are gone altogether.

use std::collections::BTreeMap;

use super::super::torch_snapshot::{RawAction, RawEntry, RawSnapshot};
use super::gaps;
use super::memory::{Contradiction, Units, final_segments};
use super::sizes::{MIN_BLOCK_BYTES, SMALL_BYTES_MAX, Sizes};
use super::start::OldSegment;
use crate::trace::{Pool, PoolKind};
use crate::units::PoolId;

/// Memory that lies in no segment, as far as the history tells.
const NO_UNIT: u32 = u32::MAX;

/// The private pools of a history.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) pools: Vec<Pool>,
    /// The pool of every unit; empty if there is no private one.
    pub(super) of_unit: Vec<PoolId>,
    /// The pool of every alloc in order; empty if there is no private one.
    pub(super) of_alloc: Vec<PoolId>,
    /// Where pools go, by their first release.
    pub(super) deletions: Vec<Deletion>,
    /// Segments and reservations of pools that are gone at the end.
    pub(super) units_of_gone: u64,
}

impl Pools {
    /// The pool of a unit.
    pub(super) fn pool_of(&self, unit: u32) -> PoolId {
        self.of_unit.get(unit as usize).copied().unwrap_or(PoolId::NONE)
    }
}

/// The end of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deletion {
    /// The release before which the pool goes, counted over the history: the first of its group, or
    /// the first of its own if these come at once.
    pub(super) release: u32,
    /// How many releases from there on are its own doing. None if they come with an empty_cache or
    /// a flush.
    pub(super) own: u32,
    pub(super) pool: PoolId,
}

/// What was released between two operations.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Ordinal of its first release.
    first: u32,
    /// Allocs before it.
    allocs: usize,
    pub(super) releases: Vec<Release>,
    /// It obtained memory too, or was refused.
    in_malloc: bool,
    /// A segment of a default pool stayed that no block was in.
    spares_default: bool,
}

/// A segment_free or segment_unmap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    unit: u32,
    size_bytes: u64,
    address: u64,
}

/// Pools whose blocks are whole segments: one in use has a rest that would have been split off.
pub(super) fn no_split_pools(
    snapshot: &RawSnapshot,
    device: usize,
    sizes: &Sizes,
) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for (_, segment) in final_segments(snapshot, device) {
        let exact = !segment.large || segment.expandable;
        let rest_max = if exact { MIN_BLOCK_BYTES - 1 } else { SMALL_BYTES_MAX };
        let whole = segment.blocks.iter().filter(|block| block.in_use()).any(|block| {
            let rounded_bytes = sizes.round(block.requested_bytes);
            (exact || rounded_bytes < sizes.max_split_bytes)
                && block.size_bytes.saturating_sub(rounded_bytes) > rest_max
        });
        if whole && segment.pool_id != (0, 0) {
            found.push(segment.pool_id);
        }
    }
    found
}

/// Attributes all memory of a history. `start` is what was there when it begins; nothing if that is
/// not known, and then only pools that are listed are found.
pub(super) fn attribute(
    snapshot: &RawSnapshot,
    device: usize,
    units: &Units,
    start: Option<&[OldSegment]>,
    sizes: &Sizes,
) -> Result<Pools, Contradiction> {
    let entries = &snapshot.devices[device];
    let listed = listed_pools(snapshot, device);
    let releases =
        |e: &RawEntry| matches!(e.action, RawAction::SegmentFree | RawAction::SegmentUnmap);
    let may_be_gone = start.is_some() && entries.iter().any(releases);
    if listed.is_empty() && !may_be_gone {
        return Ok(Pools::default());
    }
    let log = Log::of(entries, units, start)?;
    let mut shares = Shares::new(units, &listed);
    if may_be_gone {
        shares.note_releases(units, &log.groups, sizes);
        if gaps::apply(sizes, units) {
            // First what is certain, then what is gone against what is gone.
            for among_gone in [false, true] {
                let start = start.unwrap_or_default();
                if !gaps::note_unfit(entries, units, start, sizes, among_gone, &mut shares)? {
                    break;
                }
                shares.spread(units, &log.groups);
            }
        }
        shares.join_neighbours(units, &log.allocs);
    }
    let no_split = no_split_pools(snapshot, device, sizes);
    Ok(shares.settle(units, &log, &listed, &no_split))
}

/// Ids of the private pools in the final segments, ascending.
fn listed_pools(snapshot: &RawSnapshot, device: usize) -> Vec<(u64, u64)> {
    let ids = final_segments(snapshot, device).map(|(_, segment)| segment.pool_id);
    let mut listed: Vec<(u64, u64)> = ids.filter(|&id| id != (0, 0)).collect();
    listed.sort_unstable();
    listed.dedup();
    listed
}

/// What the entries say of units.
#[derive(Default)]
struct Log {
    /// Unit of every alloc.
    allocs: Vec<u32>,
    groups: Vec<Group>,
}

impl Log {
    fn of(
        entries: &[RawEntry],
        units: &Units,
        start: Option<&[OldSegment]>,
    ) -> Result<Log, Contradiction> {
        let mut log = Log::default();
        let mut spans = units.spans_at_start()?;
        let mut unused = Unused::new(units, start);
        let mut obtained = units.obtained.iter();
        let mut group = Group::default();
        let mut released = 0;
        for entry in entries {
            let (address, size_bytes) = (entry.address, entry.size_bytes);
            match entry.action {
                RawAction::Alloc if size_bytes > 0 => {
                    let unit = spans.at(address).map_or(NO_UNIT, |(_, span)| span.tag);
                    log.allocs.push(unit);
                    unused.take(unit);
                }
                RawAction::FreeCompleted => {
                    if let Some((_, span)) = spans.at(address) {
                        unused.give_back(span.tag);
                    }
                }
                RawAction::SegmentAlloc | RawAction::SegmentMap => {
                    let expandable = entry.action == RawAction::SegmentMap;
                    let &unit = obtained.next().ok_or(Contradiction)?;
                    spans.insert(address, size_bytes, expandable, unit)?;
                    unused.begin(unit);
                    group.in_malloc = true;
                }
                RawAction::SegmentFree | RawAction::SegmentUnmap => {
                    let mut unit = NO_UNIT;
                    if entry.action == RawAction::SegmentFree {
                        unit = spans.remove_segment(address, size_bytes)?;
                    } else {
                        spans.remove_pages(address, size_bytes, |tag| unit = tag)?;
                    }
                    if group.releases.is_empty() {
                        group.first = released;
                        group.allocs = log.allocs.len();
                        group.spares_default = unused.of_default > 0;
                    }
                    group.releases.push(Release { unit, size_bytes, address });
                    released += 1;
                }
                _ => {}
            }
            let ends = matches!(
                entry.action,
                RawAction::Alloc | RawAction::Oom | RawAction::FreeRequested
            );
            if ends {
                group.in_malloc |= entry.action == RawAction::Oom;
                let group = std::mem::take(&mut group);
                log.groups.extend((!group.releases.is_empty()).then_some(group));
            }
        }
        log.groups.extend((!group.releases.is_empty()).then_some(group));
        Ok(log)
    }
}

/// Counts the blocks in every unit.
struct Unused {
    /// The blocks of a unit.
    blocks: Vec<u32>,
    /// A whole segment of a default pool, which is there at the end.
    is_default: Vec<bool>,
    /// How many of those are there now without any block.
    of_default: u32,
}

impl Unused {
    fn new(units: &Units, start: Option<&[OldSegment]>) -> Self {
        let is_default = units.units.iter();
        let is_default = is_default.map(|unit| !unit.expandable && unit.pool == Some((0, 0)));
        let is_default = if start.is_some() {
            is_default.collect()
        } else {
            // What is in use is not known.
            vec![false; units.units.len()]
        };
        let blocks = vec![0; units.units.len()];
        let mut unused = Unused { blocks, is_default, of_default: 0 };
        for segment in start.unwrap_or_default() {
            unused.begin(segment.unit);
            segment.blocks.iter().for_each(|_| unused.take(segment.unit));
        }
        unused
    }

    fn begin(&mut self, unit: u32) {
        self.of_default += u32::from(self.is_default[unit as usize]);
    }

    fn take(&mut self, unit: u32) {
        if let Some(blocks) = self.blocks.get_mut(unit as usize) {
            self.of_default -= u32::from(*blocks == 0 && self.is_default[unit as usize]);
            *blocks += 1;
        }
    }

    fn give_back(&mut self, unit: u32) {
        if let Some(blocks) = self.blocks.get_mut(unit as usize).filter(|blocks| **blocks > 0) {
            *blocks -= 1;
            self.of_default += u32::from(*blocks == 0 && self.is_default[unit as usize]);
        }
    }
}

/// Which units share a pool, as it comes out bit by bit.
pub(super) struct Shares {
    /// A unit of the same pool, nearer to the one that stands for all of them.
    parent: Vec<u32>,
    /// The listed pool of those that a unit stands for.
    listed: Vec<Option<u32>>,
    /// Belongs to a private pool.
    private: Vec<bool>,
}

impl Shares {
    fn new(units: &Units, pools: &[(u64, u64)]) -> Self {
        let mut first_of: Vec<Option<u32>> = vec![None; pools.len()];
        let mut shares = Shares {
            parent: (0..units.units.len() as u32).collect(),
            listed: vec![None; units.units.len()],
            private: vec![false; units.units.len()],
        };
        for (unit, known) in (0..).zip(&units.units) {
            let pool = known.pool.and_then(|id| pools.binary_search(&id).ok());
            if let Some(pool) = pool {
                shares.private[unit as usize] = true;
                shares.listed[unit as usize] = Some(pool as u32);
                let first = *first_of[pool].get_or_insert(unit);
                shares.parent[unit as usize] = first;
            }
        }
        shares
    }

    pub(super) fn is_private(&self, unit: u32) -> bool {
        self.private.get(unit as usize).copied().unwrap_or(false)
    }

    pub(super) fn set_private(&mut self, unit: u32) {
        self.private[unit as usize] = true;
    }

    fn root(&mut self, unit: u32) -> u32 {
        let mut unit = unit;
        while self.parent[unit as usize] != unit {
            let above = self.parent[self.parent[unit as usize] as usize];
            self.parent[unit as usize] = above;
            unit = above;
        }
        unit
    }

    /// Puts two units in one pool, unless they belong to different listed ones.
    fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.root(a), self.root(b));
        let listed = match (self.listed[a as usize], self.listed[b as usize]) {
            (Some(one), Some(other)) if one != other => return,
            (one, other) => one.or(other),
        };
        let (low, high) = (a.min(b), a.max(b));
        self.parent[high as usize] = low;
        self.listed[low as usize] = listed;
    }

    /// Finds groups that spare the default pools.
    fn note_releases(&mut self, units: &Units, groups: &[Group], sizes: &Sizes) {
        // Inside a malloc these release single segments.
        let picks = sizes.collects || sizes.max_split_bytes != u64::MAX;
        let ends_of_pools = groups.iter().filter(|g| g.spares_default && !(picks && g.in_malloc));
        for group in ends_of_pools {
            for release in &group.releases {
                if units.units[release.unit as usize].pool.is_none() {
                    self.set_private(release.unit);
                    self.join(group.releases[0].unit, release.unit);
                }
            }
        }
        self.spread(units, groups);
    }

    /// What is released between two private segments, in the order of one free set, is private too.
    fn spread(&mut self, units: &Units, groups: &[Group]) {
        let key = |release: &Release| {
            let unit = &units.units[release.unit as usize];
            (unit.stream, release.size_bytes, release.address)
        };
        let is_large = |release: &Release| units.units[release.unit as usize].large;
        for group in groups {
            let same_set = |a: &Release, b: &Release| is_large(a) == is_large(b) && key(a) < key(b);
            for run in group.releases.chunk_by(same_set) {
                let first = run.iter().position(|release| self.is_private(release.unit));
                let last = run.iter().rposition(|release| self.is_private(release.unit));
                let (Some(first), Some(last)) = (first, last) else { continue };
                for release in &run[first..=last] {
                    if units.units[release.unit as usize].pool.is_none() {
                        self.set_private(release.unit);
                        self.join(run[first].unit, release.unit);
                    }
                }
            }
        }
    }

    /// Allocs one after the other, with no default pool between them, are of one pool.
    fn join_neighbours(&mut self, units: &Units, allocs: &[u32]) {
        for pair in allocs.windows(2) {
            let (before, unit) = (pair[0], pair[1]);
            if before == unit || !self.is_private(before) || !self.is_private(unit) {
                continue;
            }
            let (one, other) = (&units.units[before as usize], &units.units[unit as usize]);
            // A capture routes only its own streams.
            let captures = [one, other].iter().any(|u| u.pool.is_some_and(|id| id.0 != 0));
            if !captures || one.stream == other.stream {
                self.join(before, unit);
            }
        }
    }

    /// The pools as they are now known.
    fn settle(
        mut self,
        units: &Units,
        log: &Log,
        listed: &[(u64, u64)],
        no_split: &[(u64, u64)],
    ) -> Pools {
        let mut pools = Pools::default();
        for id in listed {
            let (word, kind) = match id {
                (0, _) => ("mempool", PoolKind::MemPool),
                _ => ("graph", PoolKind::Capture),
            };
            let name = format!("{word} ({}, {})", id.0, id.1);
            let no_split = no_split.contains(id);
            pools.pools.push(Pool { name, kind, no_split, use_on_oom: false });
        }
        let mut gone: BTreeMap<u32, PoolId> = BTreeMap::new();
        for unit in 0..units.units.len() as u32 {
            if !self.is_private(unit) {
                pools.of_unit.push(PoolId::NONE);
                continue;
            }
            let root = self.root(unit);
            let pool = match self.listed[root as usize] {
                Some(pool) => PoolId(pool),
                None => {
                    pools.units_of_gone += 1;
                    *gone.entry(root).or_insert_with(|| {
                        let number = pools.pools.len() - listed.len() + 1;
                        let name = format!("unlisted pool {number}");
                        let kind = PoolKind::MemPool;
                        pools.pools.push(Pool { name, kind, no_split: false, use_on_oom: false });
                        PoolId(pools.pools.len() as u32 - 1)
                    })
                }
            };
            pools.of_unit.push(pool);
        }
        if pools.pools.is_empty() {
            return Pools::default();
        }
        pools.of_alloc = log.allocs.iter().map(|&unit| pools.pool_of(unit)).collect();
        pools.note_deletions(&log.groups);
        pools
    }
}

impl Pools {
    /// A pool gives memory back only when its owner has let it go. Nobody can be in it after that.
    fn note_deletions(&mut self, groups: &[Group]) {
        let mut allocs_end = vec![0; self.pools.len()];
        for (alloc, pool) in self.of_alloc.iter().enumerate() {
            if let Some(end) = allocs_end.get_mut(pool.index()) {
                *end = alloc + 1;
            }
        }
        let mut deleted = vec![false; self.pools.len()];
        for group in groups {
            // A MemPool releases its own at once, before anything else can.
            let mut leads = true;
            let mut release = group.first;
            let same = |a: &Release, b: &Release| self.pool_of(a.unit) == self.pool_of(b.unit);
            let runs: Vec<(PoolId, u32)> = group
                .releases
                .chunk_by(same)
                .map(|run| (self.pool_of(run[0].unit), run.len() as u32))
                .collect();
            for (pool, count) in runs {
                let at = release;
                release += count;
                let Some(known) = self.pools.get_mut(pool.index()) else {
                    leads = false;
                    continue;
                };
                let used_later = allocs_end[pool.index()] > group.allocs;
                if used_later || std::mem::replace(&mut deleted[pool.index()], true) {
                    continue;
                }
                let own = leads && known.kind == PoolKind::MemPool;
                if !own {
                    // What an empty_cache had to release was no MemPool.
                    known.kind = PoolKind::Capture;
                }
                let (release, own) = if own { (at, count) } else { (group.first, 0) };
                leads &= own > 0;
                self.deletions.push(Deletion { release, own, pool });
            }
        }
        self.deletions.sort_by_key(|deletion| deletion.release);
    }
}
