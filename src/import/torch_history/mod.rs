//! The history of one device of a snapshot → a trace: the structural half of
//! specs/pytorch_caching.md 13.2. No allocator runs here; only to tell private pools that the
//! snapshot does not list, `search` follows where the default pools would have placed a block.
//!
//! ```text
//!   final segments and blocks ─┬─ memory, start ──> what was there when the history begins
//!   entries ───────────────────┼─ pools, search ──> private pools: entered, left, deleted
//!                              └──────────────────> blocks, events, actions
//! ```
//!
//! The log shows what the allocator did; a trace says what the program asked. A free whose
//! completion follows at once was an ordinary free, any other one waited for a stream. What lies
//! between two operations is a group, and its shape tells who caused it:
//!
//! ```text
//!   ... alloc | free_completed  segment_free  segment_alloc | alloc ...
//!               c               R             N               closing entry
//!
//!   closed by        R   N   reading
//!   free or the end  -   -   completions: Done
//!   free or the end  R   ·   the program called empty_cache
//!   alloc            -   ·   completions, then the alloc (which obtains N)
//!   alloc            R   -   empty_cache, then the alloc
//!   alloc            R   N   one malloc: its flush waited for c, released R, obtained N
//!   oom              ·   ·   one refused malloc, likewise
//! ```
//!
//! A flush or empty_cache waits for *all* deferred blocks. If some are still deferred after the
//! group, its completions cannot come from one: they stand before it. So do completions in front of
//! released segments when more completions follow: every malloc looks for finished streams first.
//!
//! A malloc flushes only after a refusal. Where limit and device had room for what the malloc
//! obtained, R and N in one group were an empty_cache and a malloc (DeepSpeed does that). If neither
//! is known, there was room for what the run held at another time.

mod memory;
mod noted;
mod pools;
mod search;
mod sizes;
mod start;

use std::collections::HashMap;

use self::memory::{Contradiction, Reservations, Units};
use self::noted::Noted;
use self::pools::Pools;
use self::sizes::Sizes;
use self::start::{OldBlock, OldSegment};
use super::notes::{self, Note, Sums};
use super::torch_snapshot::{NO_ID, RawAction, RawEntry, RawSettings, RawSnapshot, SnapshotError};
use crate::trace::{
    Block, Event, Frame, Header, History, Op, RecordedAction, RecordedKind, Recording, Role,
    Source, SourceKind, StartBlock, StartLayout, StartSegment, StartState, Stream, Trace,
    room_on_device,
};
use crate::units::{BlockId, Bytes, FrameId, MIB, NameId, PhaseId, PoolId, SiteId, StreamId};

type FastMap<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// Makes a trace of the history of one device: of `gpu`, or of the only one that has a history.
/// Also returns what a reader of the trace should know, a line each.
///
/// A snapshot without any history gives a trace without events and a warning: its settings can be
/// shown, but there is nothing to replay.
///
/// If the history begins late, the blocks and segments that were there become the trace's start, as
/// far as the final blocks tell.
///
/// # Errors
/// If `gpu` is not in the snapshot, if several devices have a history and none was chosen, or if
/// there are more than four billion blocks or events.
pub fn trace_from_snapshot(
    snapshot: &RawSnapshot,
    gpu: Option<u32>,
    known: KnownMemory,
) -> Result<(Trace, Vec<String>), SnapshotError> {
    trace_with_notes(snapshot, gpu, known, None)
}

/// What a program noted beside its history.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// In order.
    pub(super) notes: Vec<Note>,
    /// Index of the device that the rest of the truth file is about.
    pub(super) device: Option<u32>,
    /// Sums after the last entry.
    pub(super) sums_at_end: Option<Sums>,
    /// The settings string before the first note.
    pub(super) settings: Option<String>,
    /// The limit in bytes before the first note.
    pub(super) limit_bytes: Option<u64>,
    /// Whether any malloc flushed, as the statistics at the end say.
    pub(super) flushes: Option<bool>,
}

/// [`trace_from_snapshot`] with what the program noted of its own calls.
///
/// # Errors
/// As there.
pub(super) fn trace_with_notes(
    snapshot: &RawSnapshot,
    gpu: Option<u32>,
    known: KnownMemory,
    notes: Option<&Notes>,
) -> Result<(Trace, Vec<String>), SnapshotError> {
    let device = choose_device(snapshot, gpu)?;
    let past = device.map(|device| Past::of(snapshot, device, known.device_total_bytes));
    let mut reader = HistoryReader::new(snapshot, past.unwrap_or_default());
    if let Some(device) = device {
        reader.begin()?;
        let granted_bytes = || reader.reserved_peak(&snapshot.devices[device]);
        reader.room_bytes = known.room_bytes.unwrap_or_else(|| room_on_device(granted_bytes()));
        (reader.device, reader.device_total_bytes) = (device as u32, known.device_total_bytes);
        if let Some(notes) = notes {
            let entries = snapshot.devices[device].iter().filter(|entry| is_kept(entry));
            let is_own = notes.device == Some(reader.device);
            let sums = notes.sums_at_end.as_ref().filter(|_| is_own);
            let placed = notes::place(&notes.notes, reader.device, sums, entries);
            reader.noted = Noted::new(placed, notes, is_own);
        }
        reader.read(&snapshot.devices[device])?;
    }
    Ok(reader.finish(device))
}

/// What is known of the recorded run's memory beside the snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub struct KnownMemory {
    /// What the allocator could reserve in bytes without any refusal by limit or device.
    pub room_bytes: Option<u64>,
    /// Total memory of the device in bytes, as it reports it.
    pub device_total_bytes: Option<u64>,
}

/// The device to read; nothing if none has a history and none was asked for.
fn choose_device(snapshot: &RawSnapshot, gpu: Option<u32>) -> Result<Option<usize>, SnapshotError> {
    let choices = || {
        let list = snapshot.devices.iter().enumerate();
        let list: Vec<String> =
            list.map(|(gpu, entries)| format!("GPU {gpu} has {} entries", entries.len())).collect();
        if list.is_empty() { "no GPU has a history".to_owned() } else { list.join(", ") }
    };
    if let Some(gpu) = gpu {
        let index = gpu as usize;
        if index < snapshot.devices.len() {
            return Ok(Some(index));
        }
        let found = format!("the snapshot has no GPU {gpu}");
        return Err(SnapshotError::Gpu { found, choices: choices() });
    }
    let mut with_history = (0..snapshot.devices.len()).filter(|&i| !snapshot.devices[i].is_empty());
    match (with_history.next(), with_history.next()) {
        (first, None) => Ok(first),
        _ => {
            let found = "several GPUs have a history".to_owned();
            Err(SnapshotError::Gpu { found, choices: choices() })
        }
    }
}

/// Why the layout at the start is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartUnknown {
    /// The file does not hold the final blocks of every segment.
    NoBlockLists,
    /// They contradict the history.
    Contradicted,
}

/// What the final segments and blocks tell of the history.
#[derive(Default)]
struct Past {
    units: Units,
    /// What was there when the history begins; nothing, if it begins with the first segment.
    segments: Vec<OldSegment>,
    start_unknown: Option<StartUnknown>,
    pools: Pools,
    /// The segments contradict the history, so pools are not known.
    pools_unknown: bool,
}

impl Past {
    fn of(snapshot: &RawSnapshot, device: usize, device_total_bytes: Option<u64>) -> Past {
        let mut past = Past::default();
        // Without any segment the file may just lack them.
        let has_segments = memory::final_segments(snapshot, device).next().is_some();
        let complete = has_segments && start::has_block_lists(snapshot, device);
        let unknown =
            if complete { StartUnknown::Contradicted } else { StartUnknown::NoBlockLists };
        if let Err(Contradiction) = past.walk(snapshot, device, unknown, device_total_bytes) {
            let start_unknown = Some(unknown);
            past = Past { start_unknown, pools_unknown: true, ..Past::default() };
        }
        past
    }

    fn walk(
        &mut self,
        snapshot: &RawSnapshot,
        device: usize,
        unknown: StartUnknown,
        device_total_bytes: Option<u64>,
    ) -> Result<(), Contradiction> {
        let sizes = Sizes::new(snapshot.settings.as_ref());
        let reservations = Reservations::new(device_total_bytes, sizes.large_page_bytes);
        let blocks = if start::has_block_lists(snapshot, device) {
            start::blocks_in_use(snapshot, device)
        } else {
            Err(Contradiction)
        };
        let kind_of = |from, to| start::kind_of_run(blocks.as_ref().ok()?, &sizes, from, to);
        self.units = Units::of_history(snapshot, device, reservations, kind_of)?;
        let units = &self.units;
        let no_split = pools::no_split_pools(snapshot, device, &sizes);
        let whole = |unit: u32| {
            units.units[unit as usize].pool.is_some_and(|pool| no_split.contains(&pool))
        };
        let segments = blocks.and_then(|blocks| start::layout(units, &blocks, &sizes, whole));
        // Where there was no memory there were no blocks.
        let nothing_before = units.start.is_empty();
        match segments {
            Ok(segments) => self.segments = segments,
            Err(Contradiction) => self.start_unknown = Some(unknown),
        }
        let start_known = nothing_before || self.start_unknown.is_none();
        let start = start_known.then_some(self.segments.as_slice());
        self.pools = pools::attribute(snapshot, device, units, start, &sizes)?;
        Ok(())
    }
}

/// A block that has not completed yet.
#[derive(Clone, Copy)]
struct Live {
    block: BlockId,
    /// Freed by the program, waiting for a stream.
    pending: bool,
}

/// An entry between two operations.
#[derive(Clone, Copy)]
enum GroupItem {
    Completed(BlockId, RawEntry),
    Segment(RawEntry),
}

impl GroupItem {
    fn releases(&self) -> bool {
        matches!(self, GroupItem::Segment(entry)
            if matches!(entry.action, RawAction::SegmentFree | RawAction::SegmentUnmap))
    }

    fn obtains(&self) -> bool {
        matches!(self, GroupItem::Segment(entry)
            if matches!(entry.action, RawAction::SegmentAlloc | RawAction::SegmentMap))
    }

    fn is_completion(&self) -> bool {
        matches!(self, GroupItem::Completed(..))
    }

    fn entry(&self) -> &RawEntry {
        match self {
            GroupItem::Completed(_, entry) | GroupItem::Segment(entry) => entry,
        }
    }
}

/// What was odd, counted.
#[derive(Default)]
struct Oddities {
    frees_without_alloc: u64,
    frees_lost: u64,
    completions_lost: u64,
    requests_lost: u64,
    times_back: u64,
    sizes_zero: u64,
    unknown_actions: u64,
    trailing_segments: u64,
}

struct HistoryReader<'a> {
    snapshot: &'a RawSnapshot,
    /// Index of the device, and its total memory where that is known.
    device: u32,
    device_total_bytes: Option<u64>,
    /// Reserved memory up to which nothing is refused.
    room_bytes: u64,
    /// Reserved by the segments of all events so far.
    reserved_bytes: u64,
    trace: Trace,
    recording: Recording,
    live: FastMap<u64, Live>,
    /// Blocks in `live` that are pending.
    pending: usize,
    group: Vec<GroupItem>,
    /// Segment entries that wait for an event to stand before.
    carried: Vec<RawEntry>,
    time_first_us: Option<u64>,
    time_last_us: u64,
    /// Text id of the phase that runs.
    phase_now: u32,
    phases: FastMap<u32, PhaseId>,
    /// By handle.
    streams: FastMap<u64, StreamId>,
    /// The stream of the last entry, which is mostly the next one's too.
    stream_last: Option<(u64, StreamId)>,
    sites: FastMap<u32, SiteId>,
    frames: FastMap<u32, FrameId>,
    oddities: Oddities,
    noted: Noted,
    past: Past,
    /// Blocks that were there when the history begins. They have the first ids.
    blocks_at_start: u32,
    /// Entries seen so far that make a block, that refuse one, that release memory, that end a pool.
    allocs: usize,
    ooms: usize,
    releases: u32,
    deletions: usize,
    /// The pool that the program is in.
    entered: PoolId,
    /// The pool of every block; empty if there is no private one.
    block_pools: Vec<PoolId>,
}

impl<'a> HistoryReader<'a> {
    fn new(snapshot: &'a RawSnapshot, past: Past) -> Self {
        HistoryReader {
            snapshot,
            device: 0,
            device_total_bytes: None,
            room_bytes: 0,
            reserved_bytes: 0,
            trace: Trace::default(),
            recording: Recording::default(),
            live: FastMap::default(),
            pending: 0,
            group: Vec::new(),
            carried: Vec::new(),
            time_first_us: None,
            time_last_us: 0,
            phase_now: NO_ID,
            phases: FastMap::default(),
            streams: FastMap::default(),
            stream_last: None,
            sites: FastMap::default(),
            frames: FastMap::default(),
            oddities: Oddities::default(),
            noted: Noted::default(),
            past,
            blocks_at_start: 0,
            allocs: 0,
            ooms: 0,
            releases: 0,
            deletions: 0,
            entered: PoolId::NONE,
            block_pools: Vec::new(),
        }
    }

    /// The most that the recorded allocator held, in bytes. Where neither limit nor device is
    /// known, so much was granted at some time, and a little less was surely never refused.
    fn reserved_peak(&self, entries: &[RawEntry]) -> u64 {
        let (mut reserved_bytes, mut peak_bytes) = (self.reserved_bytes, self.reserved_bytes);
        for entry in entries {
            reserved_bytes = match entry.action {
                RawAction::SegmentAlloc | RawAction::SegmentMap => {
                    reserved_bytes.saturating_add(entry.size_bytes)
                }
                RawAction::SegmentFree | RawAction::SegmentUnmap => {
                    reserved_bytes.saturating_sub(entry.size_bytes)
                }
                _ => continue,
            };
            peak_bytes = peak_bytes.max(reserved_bytes);
        }
        peak_bytes
    }

    /// Takes over what was there when the history begins.
    fn begin(&mut self) -> Result<(), SnapshotError> {
        self.trace.pools = std::mem::take(&mut self.past.pools.pools);
        let segments = std::mem::take(&mut self.past.segments);
        if segments.is_empty() {
            return Ok(());
        }
        let mut start = StartLayout::default();
        for segment in &segments {
            let unit = self.past.units.units[segment.unit as usize].clone();
            let pool = self.past.pools.pool_of(segment.unit);
            let stream = self.stream_of_handle(unit.stream)?;
            let first = start.blocks.len();
            let mut end = segment.address;
            for old in &segment.blocks {
                start.blocks.extend(free_between(end, old.address));
                start.blocks.push(self.old_block(old, stream, pool)?);
                end = old.address + old.size_bytes;
            }
            start.blocks.extend(free_between(end, segment.address + segment.size_bytes));
            start.segments.push(StartSegment {
                address: segment.address,
                size_bytes: segment.size_bytes,
                stream,
                pool,
                large: unit.large == Some(true),
                reservation: unit.expandable.then_some(unit.base),
                blocks: dense_id(start.blocks.len() - first, "blocks")?,
            });
            self.reserved_bytes = self.reserved_bytes.saturating_add(segment.size_bytes);
        }
        self.blocks_at_start = dense_id(self.trace.blocks.len(), "blocks")?;
        self.trace.start = Some(start);
        Ok(())
    }

    fn old_block(
        &mut self,
        old: &OldBlock,
        stream: StreamId,
        pool: PoolId,
    ) -> Result<StartBlock, SnapshotError> {
        let site = self.site(old.stack)?;
        let block = self.new_block(old.request_bytes, stream, site, old.address)?;
        self.note_pool(pool);
        self.live.insert(old.address, Live { block, pending: old.deferred });
        self.pending += usize::from(old.deferred);
        let state = if old.deferred { StartState::Deferred } else { StartState::Live };
        Ok(StartBlock { size_bytes: old.size_bytes, block, state, guessed: old.guessed })
    }

    fn read(&mut self, entries: &[RawEntry]) -> Result<(), SnapshotError> {
        let unknown = entries.iter().filter(|entry| entry.action == RawAction::Unknown).count();
        self.oddities.unknown_actions = unknown as u64;
        let mut entries = entries.iter().filter(|entry| is_kept(entry)).enumerate().peekable();
        while let Some((index, entry)) = entries.next() {
            self.notes_before(index, Some(entry))?;
            self.note_time(entry);
            match entry.action {
                RawAction::Alloc | RawAction::Oom => self.malloc(entry)?,
                RawAction::FreeRequested => {
                    let completion = entries.next_if(|(_, next)| {
                        next.action == RawAction::FreeCompleted && next.address == entry.address
                    });
                    self.free_requested(entry, completion.is_some())?;
                    if let Some((_, completion)) = completion {
                        self.note_time(completion);
                    }
                }
                RawAction::FreeCompleted => self.free_completed(entry)?,
                _ => self.group.push(GroupItem::Segment(*entry)),
            }
        }
        self.notes_before(usize::MAX, None)?;
        self.close_group()?;
        self.oddities.trailing_segments = self.carried.len() as u64;
        Ok(())
    }

    /// Counts times that go back: the order of the list is what holds.
    fn note_time(&mut self, entry: &RawEntry) {
        self.time_first_us.get_or_insert(entry.time_us);
        if entry.time_us < self.time_last_us {
            self.oddities.times_back += 1;
        }
        self.time_last_us = self.time_last_us.max(entry.time_us);
    }

    fn malloc(&mut self, entry: &RawEntry) -> Result<(), SnapshotError> {
        let refused = entry.action == RawAction::Oom;
        if entry.size_bytes == 0 {
            self.oddities.sizes_zero += 1;
            return self.close_group();
        }
        let (stream, site) = (self.stream(entry)?, self.site(entry.stack)?);
        let address = if refused { 0 } else { entry.address };
        let block = self.new_block(entry.size_bytes, stream, site, address)?;
        let mut pool = self.entered;
        if refused {
            pool = self.past.pools.of_oom.get(&self.ooms).copied().unwrap_or(pool);
            self.ooms += 1;
        } else {
            pool = self.past.pools.of_alloc.get(self.allocs).copied().unwrap_or(PoolId::NONE);
            self.allocs += 1;
            self.occupy(entry, block)?;
        }
        self.note_pool(pool);
        let group = self.end_pools()?;
        let releases = group.iter().any(GroupItem::releases);
        let obtains = group.iter().any(GroupItem::obtains);
        let inside = if releases && !refused && !(obtains && self.may_flush(&group)) {
            let after = self.empty_cache(&group)?;
            let (before, inside) = self.split_at_wait(after, false);
            self.apply(before)?;
            inside
        } else {
            let waits = refused || releases;
            let (before, inside) = self.split_at_wait(&group, waits);
            self.apply(before)?;
            inside
        };
        self.mark_phase(entry)?;
        // Nothing flushes or waits while a pool is entered.
        let waited = refused && !inside.is_empty();
        self.be_in(if waited { PoolId::NONE } else { pool }, entry)?;
        let op = if refused { Op::Attempt(block) } else { Op::Alloc(block) };
        self.emit_with(inside, entry, op)?;
        self.done(inside)
    }

    /// Whether a malloc may itself have released what this group releases: because it was refused
    /// what it then obtained, or by garbage collection.
    fn may_flush(&self, group: &[GroupItem]) -> bool {
        let collects = self.snapshot.settings.as_ref().is_some_and(|s| s.gc_threshold > 0.0);
        if let Some(flushes) = self.noted.flushes {
            return collects || flushes;
        }
        let obtained = group.iter().filter(|item| item.obtains());
        let obtained_bytes =
            obtained.fold(0u64, |sum, item| sum.saturating_add(item.entry().size_bytes));
        let reserved_bytes = self.reserved_bytes.saturating_add(obtained_bytes);
        collects || reserved_bytes > self.room_bytes
    }

    /// Puts a block at its address, which may still be in use as far as the history tells.
    fn occupy(&mut self, entry: &RawEntry, block: BlockId) -> Result<(), SnapshotError> {
        self.trace.header.history.allocs += 1;
        match self.live.insert(entry.address, Live { block, pending: false }) {
            None => Ok(()),
            Some(Live { pending: false, .. }) => {
                self.oddities.frees_lost += 1;
                Ok(())
            }
            Some(Live { block, pending: true }) => {
                self.oddities.completions_lost += 1;
                self.pending -= 1;
                self.emit(entry, Op::Done(block))
            }
        }
    }

    /// Splits a group before a malloc into what stands before the malloc and what lies inside it.
    fn split_at_wait<'g>(
        &self,
        group: &'g [GroupItem],
        waits: bool,
    ) -> (&'g [GroupItem], &'g [GroupItem]) {
        let leading = group.iter().take_while(|item| item.is_completion()).count();
        let completes_later = group[leading..].iter().any(GroupItem::is_completion);
        let leading_from_wait = waits && !completes_later && self.pending == 0;
        group.split_at(if leading_from_wait { 0 } else { leading })
    }

    /// An empty_cache that released the group up to its last release; returns what follows.
    fn empty_cache<'g>(
        &mut self,
        group: &'g [GroupItem],
    ) -> Result<&'g [GroupItem], SnapshotError> {
        let end = group.iter().rposition(GroupItem::releases).map_or(0, |last| last + 1);
        let (group, after) = group.split_at(end);
        let (before, inside) = self.split_at_wait(group, true);
        self.apply(before)?;
        if let Some(first) = inside.first() {
            self.mark_phase(first.entry())?;
            self.be_in(PoolId::NONE, first.entry())?;
            self.emit_with(inside, first.entry(), Op::EmptyCache)?;
            self.done(inside)?;
        }
        Ok(after)
    }

    /// Takes the group, and emits the ends of pools that show in it. What a MemPool releases at its
    /// end is no longer in the group then.
    fn end_pools(&mut self) -> Result<Vec<GroupItem>, SnapshotError> {
        let mut group = std::mem::take(&mut self.group);
        self.releases += dense_id(group.iter().filter(|i| i.releases()).count(), "segments")?;
        while let Some(&deletion) = self.past.pools.deletions.get(self.deletions)
            && deletion.release < self.releases
        {
            self.deletions += 1;
            let releases = group.iter().enumerate().filter(|(_, item)| item.releases());
            let last = releases.take(deletion.own as usize).last();
            let after = group.split_off(last.map_or(0, |(index, _)| index + 1));
            // It waits for its own blocks alone.
            let pool_of = |block: BlockId| self.block_pools.get(block.index()).copied();
            let others = group.iter().any(|item| match item {
                GroupItem::Completed(block, _) => pool_of(*block) != Some(deletion.pool),
                GroupItem::Segment(_) => false,
            });
            let (before, inside) = self.split_at_wait(&group, !others);
            self.apply(before)?;
            if let Some(first) = inside.first().or(after.first()) {
                self.mark_phase(first.entry())?;
                self.be_in(PoolId::NONE, first.entry())?;
                self.push_event(first.entry(), Op::PoolDelete(deletion.pool), inside)?;
                self.done(inside)?;
            }
            group = after;
        }
        Ok(group)
    }

    fn note_pool(&mut self, pool: PoolId) {
        if !self.trace.pools.is_empty() {
            self.block_pools.push(pool);
        }
    }

    /// Leaves and enters pools, to be in this one.
    fn be_in(&mut self, pool: PoolId, entry: &RawEntry) -> Result<(), SnapshotError> {
        if pool == self.entered {
            return Ok(());
        }
        if !self.entered.is_none() {
            self.push_event(entry, Op::PoolLeave(self.entered), &[])?;
        }
        if !pool.is_none() {
            self.push_event(entry, Op::PoolEnter(pool), &[])?;
        }
        self.entered = pool;
        Ok(())
    }

    /// Ends a group that no malloc closes.
    fn close_group(&mut self) -> Result<(), SnapshotError> {
        let group = self.end_pools()?;
        let after =
            if group.iter().any(GroupItem::releases) { self.empty_cache(&group)? } else { &group };
        self.apply(after)
    }

    /// Completions as events of their own; segments wait for the next event.
    fn apply(&mut self, items: &[GroupItem]) -> Result<(), SnapshotError> {
        for item in items {
            match item {
                GroupItem::Segment(entry) => self.carried.push(*entry),
                GroupItem::Completed(block, entry) => {
                    self.mark_phase(entry)?;
                    self.emit(entry, Op::Done(*block))?;
                }
            }
        }
        Ok(())
    }

    /// The `Done` events of completions that the event before them lists as actions.
    fn done(&mut self, inside: &[GroupItem]) -> Result<(), SnapshotError> {
        for item in inside {
            if let GroupItem::Completed(block, entry) = item {
                self.emit(entry, Op::Done(*block))?;
            }
        }
        Ok(())
    }

    fn free_requested(&mut self, entry: &RawEntry, at_once: bool) -> Result<(), SnapshotError> {
        self.close_group()?;
        let Some(live) = self.live.get_mut(&entry.address).filter(|live| !live.pending) else {
            self.oddities.frees_without_alloc += 1;
            return Ok(());
        };
        let block = live.block;
        live.pending = true;
        if block.0 < self.blocks_at_start {
            self.oddities.frees_without_alloc += 1;
        }
        self.mark_phase(entry)?;
        if at_once {
            self.live.remove(&entry.address);
            return self.emit(entry, Op::Free(block));
        }
        self.pending += 1;
        self.emit(entry, Op::Defer(block))
    }

    fn free_completed(&mut self, entry: &RawEntry) -> Result<(), SnapshotError> {
        match self.live.get(&entry.address).copied() {
            // Freed and allocated before the history begins.
            None => Ok(()),
            Some(Live { block, pending: true }) => {
                self.live.remove(&entry.address);
                self.pending -= 1;
                self.group.push(GroupItem::Completed(block, *entry));
                Ok(())
            }
            Some(Live { block, pending: false }) => {
                self.oddities.requests_lost += 1;
                self.close_group()?;
                self.live.remove(&entry.address);
                self.mark_phase(entry)?;
                self.emit(entry, Op::Free(block))
            }
        }
    }

    /// A phase starts when the last non-empty `user_metadata` changes.
    fn mark_phase(&mut self, entry: &RawEntry) -> Result<(), SnapshotError> {
        let text = entry.user_metadata;
        if text == NO_ID || text == self.phase_now || self.noted.phases {
            return Ok(());
        }
        self.phase_now = text;
        let phase = match self.phases.get(&text) {
            Some(&phase) => phase,
            None => {
                let phase = PhaseId(dense_id(self.trace.phases.len(), "phases")?);
                self.trace.phases.push(self.snapshot.text(text).into_owned());
                self.phases.insert(text, phase);
                phase
            }
        };
        self.emit(entry, Op::Mark(phase))
    }

    fn emit(&mut self, entry: &RawEntry, op: Op) -> Result<(), SnapshotError> {
        self.emit_with(&[], entry, op)
    }

    /// Adds an event at the time of `entry`, with the actions that lie inside it, and before them
    /// those that waited for an event.
    fn emit_with(
        &mut self,
        inside: &[GroupItem],
        entry: &RawEntry,
        op: Op,
    ) -> Result<(), SnapshotError> {
        let event = dense_id(self.trace.events.len(), "events")?;
        let carried = std::mem::take(&mut self.carried);
        for entry in &carried {
            self.act(event, entry, BlockId::NONE)?;
        }
        self.push_event(entry, op, inside)
    }

    /// Adds an event at the time of `entry`, with the actions that lie inside it.
    fn push_event(
        &mut self,
        entry: &RawEntry,
        op: Op,
        inside: &[GroupItem],
    ) -> Result<(), SnapshotError> {
        let event = dense_id(self.trace.events.len(), "events")?;
        for item in inside {
            match item {
                GroupItem::Segment(entry) => self.act(event, entry, BlockId::NONE)?,
                GroupItem::Completed(block, entry) => self.act(event, entry, *block)?,
            }
        }
        if let Op::Attempt(_) = op {
            self.act(event, entry, BlockId::NONE)?;
        }
        let since_first_us = entry.time_us.saturating_sub(self.time_first_us.unwrap_or(0));
        let last_ns = self.trace.events.last().map_or(0, |event| event.time_ns);
        let time_ns = since_first_us.saturating_mul(1000).max(last_ns);
        self.trace.events.push(Event { time_ns, op });
        Ok(())
    }

    fn act(&mut self, event: u32, entry: &RawEntry, block: BlockId) -> Result<(), SnapshotError> {
        let kind = match entry.action {
            RawAction::SegmentAlloc => RecordedKind::SegmentAlloc,
            RawAction::SegmentFree => RecordedKind::SegmentFree,
            RawAction::SegmentMap => RecordedKind::SegmentMap,
            RawAction::SegmentUnmap => RecordedKind::SegmentUnmap,
            RawAction::FreeCompleted => RecordedKind::FreeCompleted,
            RawAction::Oom => RecordedKind::Oom,
            _ => return Ok(()),
        };
        let stream = self.stream(entry)?;
        let (address, size_bytes) = (entry.address, entry.size_bytes);
        let action = RecordedAction { event, kind, block, stream, address, size_bytes };
        self.reserved_bytes = action.reserved_after(self.reserved_bytes);
        self.recording.actions.push(action);
        Ok(())
    }

    fn new_block(
        &mut self,
        size_bytes: u64,
        stream: StreamId,
        site: SiteId,
        address: u64,
    ) -> Result<BlockId, SnapshotError> {
        let block = BlockId(dense_id(self.trace.blocks.len(), "blocks")?);
        let (name, role) = (NameId::NONE, Role::Unknown);
        self.trace.blocks.push(Block { size_bytes, stream, site, name, role });
        self.recording.block_addresses.push(address);
        Ok(block)
    }

    fn stream(&mut self, entry: &RawEntry) -> Result<StreamId, SnapshotError> {
        self.stream_of_handle(memory::stream_of(self.snapshot, entry))
    }

    fn stream_of_handle(&mut self, handle: u64) -> Result<StreamId, SnapshotError> {
        if let Some((last, stream)) = self.stream_last
            && last == handle
        {
            return Ok(stream);
        }
        let stream = match self.streams.get(&handle) {
            Some(&stream) => stream,
            None => {
                let stream = StreamId(dense_id(self.trace.streams.len(), "streams")?);
                self.trace.streams.push(Stream { handle });
                self.streams.insert(handle, stream);
                stream
            }
        };
        self.stream_last = Some((handle, stream));
        Ok(stream)
    }

    fn site(&mut self, raw: u32) -> Result<SiteId, SnapshotError> {
        if raw == NO_ID {
            return Ok(SiteId::NONE);
        }
        if let Some(&site) = self.sites.get(&raw) {
            return Ok(site);
        }
        let mut stack = Vec::new();
        for &frame in self.snapshot.stack(raw) {
            stack.push(self.frame(frame)?);
        }
        let site = SiteId(dense_id(self.trace.sites.stacks.len(), "stacks")?);
        self.trace.sites.stacks.push(stack);
        self.sites.insert(raw, site);
        Ok(site)
    }

    fn frame(&mut self, raw: u32) -> Result<FrameId, SnapshotError> {
        if let Some(&frame) = self.frames.get(&raw) {
            return Ok(frame);
        }
        let frame = FrameId(dense_id(self.trace.sites.frames.len(), "frames")?);
        let (name, filename, line) = self.snapshot.frame(raw);
        let (name, filename) = (name.into_owned(), filename.into_owned());
        self.trace.sites.frames.push(Frame { name, filename, line });
        self.frames.insert(raw, frame);
        Ok(frame)
    }

    fn finish(mut self, device: Option<usize>) -> (Trace, Vec<String>) {
        let warnings = self.warnings(device);
        let settings = self.noted.settings_of_start();
        let settings = settings.or_else(|| self.snapshot.settings.as_ref().map(settings_string));
        self.trace.header = Header {
            source: Source { kind: SourceKind::TorchSnapshot, version: None },
            settings,
            limit_bytes: self.noted.limit_bytes,
            history: History {
                frees_without_alloc: self.oddities.frees_without_alloc,
                allocs: self.trace.header.history.allocs,
                blocks_at_start: u64::from(self.blocks_at_start),
                allocs_of_run: None,
            },
            start_unix_ns: self.time_first_us.and_then(|us| us.checked_mul(1000)),
            ..Header::default()
        };
        self.trace.header.device.index = device.map(|device| device as u32);
        self.trace.recording = Some(self.recording);
        (self.trace, warnings)
    }

    /// What to know of a history that begins late.
    fn warning_of_start(&self) -> Option<String> {
        if let Some(start) = &self.trace.start {
            let in_use = || start.blocks.iter().filter(|block| block.state != StartState::Free);
            let bytes = in_use().fold(0u64, |sum, block| sum.saturating_add(block.size_bytes));
            let count = in_use().count();
            let guessed = in_use().filter(|block| block.guessed).count();
            return Some(format!(
                "the history begins late: {count} blocks ({} as rounded) were there, taken from \
                 the final snapshot walked backwards; {guessed} of them may have been larger",
                Bytes(bytes)
            ));
        }
        let frees = self.oddities.frees_without_alloc;
        let left_out = (frees > 0).then(|| {
            format!(
                "{frees} frees of blocks that were allocated before the history begins are left \
                 out: what lived then is missing, and all peaks are too low"
            )
        });
        match self.past.start_unknown? {
            StartUnknown::NoBlockLists => left_out.map(|left_out| {
                format!("{left_out}; dump the snapshot with the blocks of its segments")
            }),
            StartUnknown::Contradicted => {
                let contradicted = "the history contradicts the final segments and blocks, so what \
                                    was there when it begins is not known";
                Some(match left_out {
                    Some(left_out) => format!("{contradicted}; {left_out}"),
                    None => contradicted.to_owned(),
                })
            }
        }
    }

    fn warnings(&self, device: Option<usize>) -> Vec<String> {
        let odd = &self.oddities;
        let mut warnings = Vec::new();
        let empty = device.is_none_or(|device| self.snapshot.devices[device].is_empty());
        if empty {
            warnings.push(
                "the snapshot has no history, so there is nothing to replay: call \
                 torch.cuda.memory._record_memory_history(max_entries=...) before the job"
                    .to_owned(),
            );
        }
        let private = device.filter(|_| self.past.pools_unknown).map_or(0, |device| {
            let segments = memory::final_segments(self.snapshot, device);
            segments.filter(|(_, segment)| segment.pool_id != (0, 0)).count() as u64
        });
        warnings.extend(self.warning_of_start());
        warnings.extend(self.noted.warnings());
        let mut warn = |count: u64, text: &str| {
            if count > 0 {
                warnings.push(format!("{count} {text}"));
            }
        };
        warn(
            odd.frees_lost,
            "allocs at addresses that were still in use: frees are missing in the history, the \
             older blocks are never freed",
        );
        warn(
            odd.completions_lost,
            "allocs at addresses whose free had not completed: taken as completed",
        );
        warn(odd.requests_lost, "frees have only their completion: taken as plain frees");
        warn(odd.times_back, "entries are earlier than the one before: their times were raised");
        warn(odd.sizes_zero, "allocs of 0 bytes are left out");
        warn(
            private,
            "segments belong to private pools (MemPool or CUDA graph), but the history contradicts \
             the final segments: their blocks are replayed in the default pools",
        );
        warn(
            self.past.pools.units_of_gone,
            "segments belong to private pools that are gone from the snapshot, as the history shows",
        );
        warn(
            odd.trailing_segments,
            "segment entries at the end belong to no event and are left out",
        );
        let unknown = self.snapshot.unknown_action().unwrap_or_default();
        warn(
            odd.unknown_actions,
            &format!("entries with unknown actions such as {unknown:?} are left out"),
        );
        warnings
    }
}

/// Whether an entry says what the allocator did.
fn is_kept(entry: &RawEntry) -> bool {
    !matches!(entry.action, RawAction::Snapshot | RawAction::Unknown)
}

/// The free block between two addresses.
fn free_between(from: u64, to: u64) -> Option<StartBlock> {
    let size_bytes = to.checked_sub(from).filter(|&size_bytes| size_bytes > 0)?;
    let (block, state) = (BlockId::NONE, StartState::Free);
    Some(StartBlock { size_bytes, block, state, guessed: false })
}

fn dense_id(count: usize, what: &'static str) -> Result<u32, SnapshotError> {
    // The largest number stands for "none".
    let id = u32::try_from(count).ok().filter(|&id| id != u32::MAX);
    id.ok_or(SnapshotError::TooMany(what))
}

/// The settings as a `PYTORCH_CUDA_ALLOC_CONF` string: the recorded one, or one that has the same
/// effect if options differ from their defaults without it. `expandable_segments` outlives later
/// strings (specs/pytorch_caching.md 7.1), so it is added where the recorded string lacks it.
fn settings_string(settings: &RawSettings) -> String {
    let mut parts = Vec::new();
    if settings.conf.trim().is_empty() {
        if let Some(bytes) = settings.max_split_bytes {
            parts.push(format!("max_split_size_mb:{}", bytes / MIB));
        }
        if settings.gc_threshold > 0.0 {
            parts.push(format!("garbage_collection_threshold:{}", settings.gc_threshold));
        }
        parts.extend(roundup_string(&settings.roundup_divisions));
    } else {
        parts.push(settings.conf.clone());
    }
    if settings.expandable && !settings.conf.contains("expandable_segments") {
        parts.push("expandable_segments:True".to_owned());
    }
    parts.join(",")
}

/// `roundup_power2_divisions` (2.2): every size class is listed, so none is filled by a neighbour.
fn roundup_string(divisions: &[(u64, u64)]) -> Option<String> {
    let first = divisions.first()?.1;
    if divisions.iter().all(|&(_, count)| count <= 1) {
        return None;
    }
    if divisions.iter().all(|&(_, count)| count == first) {
        return Some(format!("roundup_power2_divisions:{first}"));
    }
    let classes: Vec<String> =
        divisions.iter().map(|(mib, count)| format!("{mib}:{count}")).collect();
    Some(format!("roundup_power2_divisions:[{}]", classes.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roundup(counts: [u64; 16]) -> Vec<(u64, u64)> {
        counts.iter().enumerate().map(|(class, &count)| (1 << class, count)).collect()
    }

    #[test]
    fn a_recorded_settings_string_is_kept() {
        let settings = RawSettings {
            conf: "max_split_size_mb:128".to_owned(),
            max_split_bytes: Some(128 << 20),
            ..RawSettings::default()
        };
        assert_eq!(settings_string(&settings), "max_split_size_mb:128");
    }

    #[test]
    fn expandable_segments_outlives_a_later_string() {
        let settings = RawSettings {
            conf: "max_split_size_mb:128".to_owned(),
            expandable: true,
            ..RawSettings::default()
        };
        let text = settings_string(&settings);
        assert_eq!(text, "max_split_size_mb:128,expandable_segments:True");
    }

    #[test]
    fn settings_without_a_string_are_written_as_one() {
        let settings = RawSettings {
            conf: String::new(),
            max_split_bytes: Some(40 << 20),
            gc_threshold: 0.8,
            expandable: true,
            roundup_divisions: roundup([4; 16]),
        };
        assert_eq!(
            settings_string(&settings),
            "max_split_size_mb:40,garbage_collection_threshold:0.8,roundup_power2_divisions:4,\
             expandable_segments:True"
        );
        assert_eq!(settings_string(&RawSettings::default()), "");
    }

    #[test]
    fn mixed_divisions_are_listed_class_by_class() {
        let mut counts = [0; 16];
        counts[2] = 2;
        counts[3] = 4;
        assert_eq!(
            roundup_string(&roundup(counts)).expect("differs from the default"),
            "roundup_power2_divisions:[1:0,2:0,4:2,8:4,16:0,32:0,64:0,128:0,256:0,512:0,1024:0,\
             2048:0,4096:0,8192:0,16384:0,32768:0]"
        );
        assert_eq!(roundup_string(&roundup([1; 16])), None, "one division rounds nothing");
    }
}
