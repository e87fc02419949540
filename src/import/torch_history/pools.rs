//! Which private pool every alloc belongs to.
//!
//! Entries name no pool, but every segment and every reservation belongs to one pool as long as it
//! lives, and the final segments name theirs (specs/pytorch_caching.md 13.3). What is gone by then
//! belongs to the default pools, unless the history shows that it cannot:
//!
//! ```text
//!   an alloc obtained it although a default pool    the search would have found that range:
//!   had a free range that surely fits               see `search`
//!   it was released while a segment of the default  an empty_cache or flush releases those first:
//!   pools stayed that no block was in               so it was the end of a MemPool
//! ```
//!
//! What is released in one go between two such segments shares their pool, and so does what serves
//! one alloc after the other without a default pool in between: a listed pool, or one of those that
//! are gone altogether.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::torch_snapshot::{RawAction, RawEntry, RawSnapshot};
use super::memory::{Contradiction, Units, final_segments};
use super::search::{self, Found};
use super::sizes::{MIN_BLOCK_BYTES, SMALL_BYTES_MAX, Sizes};
use super::start::OldSegment;
use crate::trace::{Pool, PoolKind};
use crate::units::PoolId;

/// Memory that lies in no segment, as far as the history tells.
pub(super) const NO_UNIT: u32 = u32::MAX;

/// The private pools of a history.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) pools: Vec<Pool>,
    /// The pool of every unit; empty if there is no private one.
    pub(super) of_unit: Vec<PoolId>,
    /// The pool of every alloc in order; empty if there is no private one.
    pub(super) of_alloc: Vec<PoolId>,
    /// Pools of refused requests that the default pools cannot have meant, by the ordinal of the
    /// refusal.
    pub(super) of_oom: BTreeMap<usize, PoolId>,
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

/// Who releases a run: first MemPools that end, each its small pool and then its large one; then
/// the default pools, large and small, in an empty_cache or flush; then the private pools whose
/// owners have let them go, small and large.
///
/// ```text
///   small large │ small large │ large small │ small large │ small large
///   └─ MemPool ─┘             └─ default ───┘ └─ let go ──┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    EndedSmall,
    EndedLarge,
    /// A malloc, in front of its flush.
    Picked,
    DefaultLarge,
    DefaultSmall,
    LetGoSmall,
    LetGoLarge,
}

impl Place {
    const COUNT: usize = 7;
    const ALL: [Place; Place::COUNT] = [
        Place::EndedSmall,
        Place::EndedLarge,
        Place::Picked,
        Place::DefaultLarge,
        Place::DefaultSmall,
        Place::LetGoSmall,
        Place::LetGoLarge,
    ];

    fn is_large(self) -> bool {
        !matches!(self, Place::EndedSmall | Place::DefaultSmall | Place::LetGoSmall)
    }

    fn is_private(self) -> bool {
        !matches!(self, Place::Picked | Place::DefaultLarge | Place::DefaultSmall)
    }

    /// Whether a run here goes on with what released the run before it.
    fn continues(self, before: Place) -> bool {
        matches!(
            (before, self),
            (Place::EndedSmall, Place::EndedLarge)
                | (Place::Picked, Place::Picked)
                | (Place::DefaultLarge, Place::DefaultSmall)
                | (Place::LetGoSmall, Place::LetGoLarge)
        )
    }

    /// Whether a run may stand here right behind one there.
    fn follows(self, before: Place) -> bool {
        let ended = matches!(before, Place::EndedSmall | Place::EndedLarge);
        match self {
            Place::EndedSmall | Place::EndedLarge => ended,
            Place::Picked | Place::DefaultLarge => ended || before == Place::Picked,
            Place::DefaultSmall => ended || matches!(before, Place::Picked | Place::DefaultLarge),
            Place::LetGoSmall | Place::LetGoLarge => true,
        }
    }
}

impl Group {
    /// A malloc may have picked this very segment, by garbage collection or a targeted release.
    fn may_pick(&self, units: &Units, sizes: &Sizes, release: &Release) -> bool {
        let unit = &units.units[release.unit as usize];
        let picks = sizes.collects || release.size_bytes >= sizes.max_split_bytes;
        self.in_malloc && picks && unit.large == Some(true) && !unit.expandable
    }

    /// The releases of each private pool, in the reading with the fewest pools; among those, the
    /// one that leaves most to the default pools. Nothing if two are as good, unless all that the
    /// searches tell is `settled`.
    fn parts(
        &self,
        units: &Units,
        sizes: &Sizes,
        private: &[bool],
        settled: bool,
    ) -> Vec<Range<usize>> {
        let runs = self.runs(units, private);
        // For every run and place the cheapest reading up to it: its cost, the place before.
        let mut readings: Vec<[Option<(u32, Place)>; Place::COUNT]> = Vec::new();
        for run in &runs {
            let first = &self.releases[run.start];
            let is_large = units.units[first.unit as usize].large == Some(true);
            let is_private = private[first.unit as usize];
            let picked = self.releases[run.clone()].iter();
            let picked = picked.into_iter().all(|release| self.may_pick(units, sizes, release));
            let cheapest_at = |place: Place| {
                let closed = match place {
                    Place::Picked => !picked || is_private,
                    Place::DefaultLarge | Place::DefaultSmall => is_private || self.spares_default,
                    _ => false,
                };
                if place.is_large() != is_large || closed {
                    return None;
                }
                let taken = place.is_private() && !is_private;
                let cost_after = |before: Option<Place>, cost: u32| {
                    let goes_on = before.is_some_and(|before| place.continues(before));
                    cost + 2 * u32::from(!goes_on) + u32::from(taken)
                };
                let Some(last) = readings.last() else { return Some((cost_after(None, 0), place)) };
                let before = Place::ALL.into_iter().filter(|&before| place.follows(before));
                before
                    .filter_map(|before| {
                        let (cost, _) = last[before as usize]?;
                        Some((cost_after(Some(before), cost), before))
                    })
                    .min_by_key(|&(cost, _)| cost)
            };
            readings.push(Place::ALL.map(cheapest_at));
        }
        self.parts_of(&runs, &readings, settled)
    }

    /// The runs of private pools in the cheapest of all readings, joined where they continue.
    fn parts_of(
        &self,
        runs: &[Range<usize>],
        readings: &[[Option<(u32, Place)>; Place::COUNT]],
        settled: bool,
    ) -> Vec<Range<usize>> {
        let ends =
            readings.last().map(|last| Place::ALL.map(|place| (last[place as usize], place)));
        let ends = ends.into_iter().flatten().filter_map(|(best, place)| Some((best?.0, place)));
        let mut ends: Vec<(u32, Place)> = ends.collect();
        ends.sort_by_key(|&(cost, _)| cost);
        let tied = ends.windows(2).next().is_some_and(|pair| pair[0].0 == pair[1].0);
        let Some(&(_, mut place)) = ends.first().filter(|_| settled || !tied) else {
            return Vec::new();
        };
        let mut parts: Vec<Range<usize>> = Vec::new();
        let mut continued = false;
        for (run, reading) in runs.iter().zip(readings).rev() {
            if place.is_private() {
                match parts.last_mut() {
                    Some(part) if continued => part.start = run.start,
                    _ => parts.push(run.clone()),
                }
            }
            let Some((_, before)) = reading[place as usize] else { break };
            continued = place.continues(before);
            place = before;
        }
        parts.reverse();
        parts
    }

    /// Releases in the order of one free set: by stream, size and address, segments before pages,
    /// whose blocks may have been larger. What lies between two private ones is private.
    fn runs(&self, units: &Units, private: &[bool]) -> Vec<Range<usize>> {
        let of = |release: &Release| &units.units[release.unit as usize];
        let same_set = |a: &Release, b: &Release| {
            let (one, other) = (of(a), of(b));
            let ordered = match (one.expandable, other.expandable) {
                (false, false) => {
                    (one.stream, a.size_bytes, a.address) < (other.stream, b.size_bytes, b.address)
                }
                (true, true) => one.stream <= other.stream,
                (before, _) => !before,
            };
            one.large == other.large && ordered
        };
        let mut runs = Vec::new();
        let mut start = 0;
        for run in self.releases.chunk_by(same_set) {
            let end = start + run.len();
            let is_private = |release: &Release| private[release.unit as usize];
            let first = run.iter().position(is_private).unwrap_or(run.len());
            let behind = run.iter().rposition(is_private).map_or(first, |last| last + 1);
            for part in [start..start + first, start + first..start + behind, start + behind..end] {
                runs.extend((!part.is_empty()).then_some(part));
            }
            start = end;
        }
        runs
    }
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
    let mut shares = Shares::new(units, &log, &listed, sizes);
    let no_split = no_split_pools(snapshot, device, sizes);
    let mut private_ooms = Vec::new();
    if may_be_gone {
        let (start, no_split) = (start.unwrap_or_default(), no_split.as_slice());
        let evidence = Evidence { snapshot, entries, units, start, sizes, no_split, log: &log };
        private_ooms = shares.find_gone(&evidence)?;
    }
    let mut pools = shares.settle(units, &log, &listed, &no_split);
    pools.note_ooms(&private_ooms, listed.len());
    Ok(pools)
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

/// What is looked at to find pools that are gone.
pub(super) struct Evidence<'a> {
    pub(super) snapshot: &'a RawSnapshot,
    pub(super) entries: &'a [RawEntry],
    pub(super) units: &'a Units,
    /// What was there when the history begins.
    pub(super) start: &'a [OldSegment],
    pub(super) sizes: &'a Sizes,
    /// Ids of private pools whose blocks are never split.
    pub(super) no_split: &'a [(u64, u64)],
    log: &'a Log,
}

/// Which units share a pool, as it comes out bit by bit.
#[derive(Clone)]
pub(super) struct Shares {
    /// A unit of the same pool, nearer to the one that stands for all of them.
    parent: Vec<u32>,
    /// The listed pool of those that a unit stands for.
    listed: Vec<Option<u32>>,
    /// When the pool of those that a unit stands for was in use.
    time: Vec<Time>,
    /// Belongs to a private pool.
    private: Vec<bool>,
}

/// Allocs counted over the history.
#[derive(Clone, Copy, Debug)]
struct Time {
    /// Behind the last alloc in it.
    allocs_end: usize,
    /// At its first release, which means that its owner has let it go.
    released: usize,
}

/// Decisions between two units, each of which needs two more walks.
const DECISIONS_MAX: usize = 16;

impl Shares {
    fn new(units: &Units, log: &Log, pools: &[(u64, u64)], sizes: &Sizes) -> Self {
        let mut first_of: Vec<Option<u32>> = vec![None; pools.len()];
        let count = units.units.len();
        let mut shares = Shares {
            parent: (0..count as u32).collect(),
            listed: vec![None; count],
            time: vec![Time { allocs_end: 0, released: usize::MAX }; count],
            private: vec![false; count],
        };
        for (alloc, &unit) in log.allocs.iter().enumerate() {
            if let Some(time) = shares.time.get_mut(unit as usize) {
                time.allocs_end = alloc + 1;
            }
        }
        for group in &log.groups {
            for release in group.releases.iter().filter(|r| !group.may_pick(units, sizes, r)) {
                let released = &mut shares.time[release.unit as usize].released;
                *released = group.allocs.min(*released);
            }
        }
        for (unit, known) in (0..).zip(&units.units) {
            let pool = known.pool.and_then(|id| pools.binary_search(&id).ok());
            if let Some(pool) = pool {
                shares.private[unit as usize] = true;
                shares.listed[unit as usize] = Some(pool as u32);
                let first = *first_of[pool].get_or_insert(unit);
                shares.parent[unit as usize] = first;
                shares.time[first as usize] = shares.time_of_both(first, unit);
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

    fn time_of_both(&self, a: u32, b: u32) -> Time {
        let (a, b) = (self.time[a as usize], self.time[b as usize]);
        Time { allocs_end: a.allocs_end.max(b.allocs_end), released: a.released.min(b.released) }
    }

    /// Puts two units in one pool, unless they belong to different listed ones, or one was used
    /// after the pool of the other had been let go. Whether they were apart and are not now.
    fn join(&mut self, a: u32, b: u32) -> bool {
        let (a, b) = (self.root(a), self.root(b));
        let listed = match (self.listed[a as usize], self.listed[b as usize]) {
            (Some(one), Some(other)) if one != other => return false,
            (one, other) => one.or(other),
        };
        let time = self.time_of_both(a, b);
        if a == b || time.allocs_end > time.released {
            return false;
        }
        let (low, high) = (a.min(b), a.max(b));
        self.parent[high as usize] = low;
        self.listed[low as usize] = listed;
        self.time[low as usize] = time;
        true
    }

    /// What stands for the private pool of every unit; the largest number for the default pools.
    pub(super) fn pools(&mut self) -> Vec<u32> {
        let units = 0..self.parent.len() as u32;
        units.map(|unit| if self.is_private(unit) { self.root(unit) } else { NO_UNIT }).collect()
    }

    /// Finds what is of private pools that are gone, and which refusals these must have meant.
    fn find_gone(&mut self, evidence: &Evidence) -> Result<Vec<usize>, Contradiction> {
        self.part(evidence, false);
        let searches = search::apply(evidence.sizes, evidence.units);
        let mut found = Found::default();
        if searches {
            found = self.walk(evidence)?;
            for _ in 0..DECISIONS_MAX {
                let Some((taken, passed_over)) = found.open else { break };
                let mut choices = Vec::new();
                for private in [taken, passed_over] {
                    let mut shares = self.clone();
                    shares.set_private(private);
                    shares.part(evidence, false);
                    let found = shares.walk(evidence)?;
                    choices.push((shares, found));
                }
                let best = choices.into_iter().min_by_key(|(_, found)| found.badness());
                let Some((shares, of_best)) = best else { break };
                if of_best.badness() > found.badness() {
                    break;
                }
                (*self, found) = (shares, of_best);
            }
        }
        self.part(evidence, true);
        // Allocs one after the other, with no default pool between them, are of one pool.
        let mut tries = 0;
        for (one, other) in self.neighbours(evidence.units, &evidence.log.allocs) {
            let mut joined = self.clone();
            if !joined.join(one, other) {
                continue;
            }
            tries += 1;
            if searches && tries <= DECISIONS_MAX {
                let after = joined.walk(evidence)?;
                if after.badness() > found.badness() {
                    continue;
                }
                found = after;
            }
            *self = joined;
        }
        Ok(found.private_ooms)
    }

    /// Marks what is certain, and what follows from it.
    fn walk(&mut self, evidence: &Evidence) -> Result<Found, Contradiction> {
        loop {
            let before = self.private.clone();
            let found = search::walk(evidence, self)?;
            if self.private == before {
                return Ok(found);
            }
            self.part(evidence, false);
        }
    }

    /// Tells in all groups which pool each run of releases belongs to.
    fn part(&mut self, evidence: &Evidence, settled: bool) {
        for group in &evidence.log.groups {
            for part in group.parts(evidence.units, evidence.sizes, &self.private, settled) {
                let first = group.releases[part.start].unit;
                for release in &group.releases[part] {
                    if evidence.units.units[release.unit as usize].pool.is_none() {
                        self.set_private(release.unit);
                    }
                    self.join(first, release.unit);
                }
            }
        }
    }

    /// Private units that serve one alloc after the other.
    fn neighbours(&self, units: &Units, allocs: &[u32]) -> Vec<(u32, u32)> {
        let mut pairs = Vec::new();
        for pair in allocs.windows(2) {
            let (before, unit) = (pair[0], pair[1]);
            if before == unit || !self.is_private(before) || !self.is_private(unit) {
                continue;
            }
            let (one, other) = (&units.units[before as usize], &units.units[unit as usize]);
            // A capture routes only its own streams.
            let captures = [one, other].iter().any(|u| u.pool.is_some_and(|id| id.0 != 0));
            if !captures || one.stream == other.stream {
                pairs.push((before.min(unit), before.max(unit)));
            }
        }
        pairs.sort_unstable();
        pairs.dedup();
        pairs
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
                    *gone.entry(root).or_insert_with(|| pools.new_unlisted(listed.len()))
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
    /// Which pool refused does not show. One that never got any memory would have, whatever the
    /// others had free.
    fn note_ooms(&mut self, private_ooms: &[usize], listed: usize) {
        if !private_ooms.is_empty() {
            let pool = self.new_unlisted(listed);
            self.of_oom.extend(private_ooms.iter().map(|&oom| (oom, pool)));
        }
    }

    /// A pool that the final segments do not name, of which there are `listed`.
    fn new_unlisted(&mut self, listed: usize) -> PoolId {
        let name = format!("unlisted pool {}", self.pools.len() - listed + 1);
        let kind = PoolKind::MemPool;
        self.pools.push(Pool { name, kind, no_split: false, use_on_oom: false });
        PoolId(self.pools.len() as u32 - 1)
    }

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
