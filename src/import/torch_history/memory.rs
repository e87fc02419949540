//! Device memory by address through the history: which segments and pages were there when it
//! begins, and what belongs to one reservation. Only segment entries are looked at.
//!
//! The final segments are the one place where a snapshot tells kinds and pools, so they are
//! followed backwards: every `segment_alloc` and `segment_map` takes away what it had added and
//! learns which final segment that has become; every `segment_free` and `segment_unmap` puts back
//! what is gone by the end, of which nothing is told. What is left was there at the start.

use std::collections::BTreeMap;

use super::super::torch_snapshot::{RawAction, RawEntry, RawSegment, RawSnapshot};
use crate::trace::reservation_span_bytes;
use crate::units::MIB;

/// Segments and pages of small pools are of this size, those of large pools never.
pub(super) const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Stands for memory that is gone before the end.
const GONE: u32 = u32::MAX;

/// More reservations than this at once do not fit in an address space.
const OPEN_RESERVATIONS_MAX: usize = 1024;

/// The history contradicts the final segments or blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contradiction;

/// A range of device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<T> {
    pub(super) end: u64,
    /// Pages of a reservation, else a whole segment.
    pub(super) expandable: bool,
    pub(super) tag: T,
}

/// Ranges of device memory by their first address. None overlap.
#[derive(Clone, Debug)]
pub(super) struct Spans<T>(BTreeMap<u64, Span<T>>);

impl<T: Copy> Spans<T> {
    pub(super) fn new() -> Self {
        Spans(BTreeMap::new())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Span<T>)> + '_ {
        self.0.iter().map(|(&start, &span)| (start, span))
    }

    /// The first range at or behind an address.
    pub(super) fn from(&self, address: u64) -> Option<(u64, Span<T>)> {
        self.0.range(address..).next().map(|(&start, &span)| (start, span))
    }

    /// The range that an address lies in, with its start.
    pub(super) fn at(&self, address: u64) -> Option<(u64, Span<T>)> {
        let (&start, &span) = self.0.range(..=address).next_back()?;
        (address < span.end).then_some((start, span))
    }

    pub(super) fn insert(
        &mut self,
        start: u64,
        size_bytes: u64,
        expandable: bool,
        tag: T,
    ) -> Result<(), Contradiction> {
        let end = start.checked_add(size_bytes).ok_or(Contradiction)?;
        let before = self.0.range(..end).next_back();
        if size_bytes == 0 || before.is_some_and(|(_, span)| span.end > start) {
            return Err(Contradiction);
        }
        self.0.insert(start, Span { end, expandable, tag });
        Ok(())
    }

    /// Takes a whole segment away.
    pub(super) fn remove_segment(
        &mut self,
        start: u64,
        size_bytes: u64,
    ) -> Result<T, Contradiction> {
        let span = self.0.remove(&start).filter(|span| !span.expandable).ok_or(Contradiction)?;
        if span.end - start == size_bytes { Ok(span.tag) } else { Err(Contradiction) }
    }

    /// Takes pages away, all of which must be there, and shows the tag of every piece.
    pub(super) fn remove_pages(
        &mut self,
        start: u64,
        size_bytes: u64,
        mut removed: impl FnMut(T),
    ) -> Result<(), Contradiction> {
        let end = start.checked_add(size_bytes).ok_or(Contradiction)?;
        let mut at = start;
        while at < end {
            let (first, span) = self.at(at).filter(|(_, s)| s.expandable).ok_or(Contradiction)?;
            self.0.remove(&first);
            if first < at {
                self.0.insert(first, Span { end: at, ..span });
            }
            if span.end > end {
                self.0.insert(end, span);
            }
            removed(span.tag);
            at = span.end.min(end);
        }
        Ok(())
    }
}

/// What a piece of memory is while the history is walked backwards.
#[derive(Clone, Copy, Debug)]
struct Piece {
    stream: u64,
    /// Index of the final segment that it is part of, or [`GONE`].
    end: u32,
}

/// Something that memory belongs to as a whole: a segment from its alloc to its free, or a
/// reservation from its first page to its last.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// Handle of its stream.
    pub(super) stream: u64,
    pub(super) expandable: bool,
    /// Belongs to a large pool, where that is known.
    pub(super) large: Option<bool>,
    /// Its pool in the final snapshot; nothing if it is gone by then.
    pub(super) pool: Option<(u64, u64)>,
    /// Its lowest address ever seen in use.
    pub(super) base: u64,
}

/// All units of a history, and where they are.
#[derive(Clone, Debug, Default)]
pub(super) struct Units {
    pub(super) units: Vec<Unit>,
    /// Unit of every `segment_alloc` and `segment_map`, in their order.
    pub(super) obtained: Vec<u32>,
    /// What was there when the history begins: address, size, unit; ascending.
    pub(super) start: Vec<(u64, u64, u32)>,
    /// Addresses that a reservation covers, to which a part of a page may come.
    pub(super) reservation_bytes: u64,
}

/// What is needed to tell reservations apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reservations {
    /// Addresses that one covers.
    pub(super) span_bytes: u64,
    /// A page of a large pool.
    pub(super) large_page_bytes: u64,
}

impl Reservations {
    /// 1.125 times the device's memory (specs/pytorch_caching.md 5.1), or of 1 TiB if that is
    /// unknown: no device has more, and reservations lie far apart.
    pub(super) fn new(device_total_bytes: Option<u64>, large_page_bytes: u64) -> Self {
        let total_bytes = device_total_bytes.unwrap_or(1 << 40).min(1 << 60);
        Reservations { span_bytes: reservation_span_bytes(total_bytes), large_page_bytes }
    }
}

/// The final segments of a device, by index into the snapshot's.
pub(super) fn final_segments(
    snapshot: &RawSnapshot,
    device: usize,
) -> impl Iterator<Item = (u32, &RawSegment)> {
    let segments = snapshot.segments.iter().zip(0..GONE);
    segments.filter_map(move |(segment, index)| {
        (segment.device as usize == device).then_some((index, segment))
    })
}

impl Units {
    /// Follows the segments of a device through its history. `kind_of` tells of a run that was
    /// there at the start whether its blocks are those of a large pool, as far as they show.
    pub(super) fn of_history(
        snapshot: &RawSnapshot,
        device: usize,
        reservations: Reservations,
        kind_of: impl Fn(u64, u64) -> Option<bool>,
    ) -> Result<Units, Contradiction> {
        let (start, ends) = walk_back(snapshot, device)?;
        let mut walk = UnitWalk {
            snapshot,
            reservations,
            units: Units { reservation_bytes: reservations.span_bytes, ..Units::default() },
            spans: Spans::new(),
            mapped: Vec::new(),
            open: Vec::new(),
        };
        walk.begin(&start, kind_of)?;
        walk.run(&snapshot.devices[device], &ends)?;
        Ok(walk.units)
    }

    /// The spans at the start, tagged with their units.
    pub(super) fn spans_at_start(&self) -> Result<Spans<u32>, Contradiction> {
        let mut spans = Spans::new();
        for &(address, size_bytes, unit) in &self.start {
            let expandable = self.units[unit as usize].expandable;
            spans.insert(address, size_bytes, expandable, unit)?;
        }
        Ok(spans)
    }
}

/// What was there at the start, and for every `segment_alloc` and `segment_map` in order the final
/// segment that it has become a part of.
fn walk_back(
    snapshot: &RawSnapshot,
    device: usize,
) -> Result<(Spans<Piece>, Vec<u32>), Contradiction> {
    let mut spans = Spans::new();
    for (end, segment) in final_segments(snapshot, device) {
        let piece = Piece { stream: segment.stream_handle, end };
        spans.insert(segment.address, segment.total_bytes, segment.expandable, piece)?;
    }
    let mut ends = Vec::new();
    for entry in snapshot.devices[device].iter().rev() {
        let (address, size_bytes) = (entry.address, entry.size_bytes);
        let gone = || Piece { stream: stream_of(snapshot, entry), end: GONE };
        match entry.action {
            RawAction::SegmentAlloc => ends.push(spans.remove_segment(address, size_bytes)?.end),
            RawAction::SegmentMap => {
                let mut end = GONE;
                spans.remove_pages(address, size_bytes, |piece| end = end.min(piece.end))?;
                ends.push(end);
            }
            RawAction::SegmentFree => spans.insert(address, size_bytes, false, gone())?,
            RawAction::SegmentUnmap => spans.insert(address, size_bytes, true, gone())?,
            _ => {}
        }
    }
    ends.reverse();
    Ok((spans, ends))
}

/// The handle of an entry's stream; an entry that names none ran on the default one.
pub(super) fn stream_of(snapshot: &RawSnapshot, entry: &RawEntry) -> u64 {
    snapshot.streams.get(entry.stream as usize).copied().unwrap_or(0)
}

/// Follows the segment entries forwards and makes the units.
struct UnitWalk<'a> {
    snapshot: &'a RawSnapshot,
    reservations: Reservations,
    units: Units,
    spans: Spans<u32>,
    /// Bytes mapped now, by unit.
    mapped: Vec<u64>,
    /// Reservations with a page mapped now.
    open: Vec<u32>,
}

impl UnitWalk<'_> {
    fn begin(
        &mut self,
        start: &Spans<Piece>,
        kind_of: impl Fn(u64, u64) -> Option<bool>,
    ) -> Result<(), Contradiction> {
        // Neighbouring pages are one run, and belong together whatever became of them.
        let mut runs: Vec<(u64, Span<Piece>)> = Vec::new();
        for (address, span) in start.iter() {
            match runs.last_mut() {
                Some((_, run))
                    if run.end == address
                        && run.expandable
                        && span.expandable
                        && run.tag.stream == span.tag.stream =>
                {
                    run.end = span.end;
                    run.tag.end = run.tag.end.min(span.tag.end);
                }
                _ => runs.push((address, span)),
            }
        }
        for (address, run) in runs {
            let size_bytes = run.end - address;
            let shown = if run.expandable { kind_of(address, run.end) } else { None };
            let unit = self.obtain(address, size_bytes, run.expandable, run.tag, shown)?;
            self.units.start.push((address, size_bytes, unit));
        }
        Ok(())
    }

    fn run(&mut self, entries: &[RawEntry], ends: &[u32]) -> Result<(), Contradiction> {
        let mut ends = ends.iter();
        for entry in entries {
            let (address, size_bytes) = (entry.address, entry.size_bytes);
            match entry.action {
                RawAction::SegmentAlloc | RawAction::SegmentMap => {
                    let expandable = entry.action == RawAction::SegmentMap;
                    let end = ends.next().copied().unwrap_or(GONE);
                    let piece = Piece { stream: stream_of(self.snapshot, entry), end };
                    // A small pool maps page by page; a page of a large one is bigger.
                    let kind = expandable.then_some(size_bytes != SMALL_SEGMENT_BYTES);
                    let unit = self.obtain(address, size_bytes, expandable, piece, kind)?;
                    self.units.obtained.push(unit);
                }
                RawAction::SegmentFree => {
                    self.spans.remove_segment(address, size_bytes)?;
                }
                RawAction::SegmentUnmap => self.unmap(address, size_bytes)?,
                _ => {}
            }
        }
        let page_bytes = self.reservations.large_page_bytes;
        let mut owners = BTreeMap::new();
        for &(address, size_bytes, unit) in &self.units.start {
            let known = &self.units.units[unit as usize];
            if known.expandable && *owners.entry(known.base).or_insert(unit) != unit {
                return Err(Contradiction);
            }
            // Nothing else shows what was never used and is gone.
            let unit = &mut self.units.units[unit as usize];
            let pages = size_bytes.is_multiple_of(page_bytes)
                && (address - unit.base).is_multiple_of(page_bytes);
            unit.large.get_or_insert(pages);
        }
        Ok(())
    }

    /// Adds memory; returns its unit.
    fn obtain(
        &mut self,
        address: u64,
        size_bytes: u64,
        expandable: bool,
        piece: Piece,
        kind: Option<bool>,
    ) -> Result<u32, Contradiction> {
        let end = self.snapshot.segments.get(piece.end as usize);
        let kind = end.map(|segment| segment.large).or(kind);
        let kind = if expandable { kind } else { kind.or(Some(size_bytes != SMALL_SEGMENT_BYTES)) };
        let pool = end.map(|segment| segment.pool_id);
        let found = if expandable {
            self.reservation(address, size_bytes, piece.stream, kind, pool)
        } else {
            None
        };
        let unit = match found {
            Some(unit) => unit,
            None => {
                let unit = u32::try_from(self.units.units.len()).map_err(|_| Contradiction)?;
                self.units.units.push(Unit {
                    stream: piece.stream,
                    expandable,
                    large: kind,
                    pool,
                    base: address,
                });
                self.mapped.push(0);
                if expandable && self.open.len() >= OPEN_RESERVATIONS_MAX {
                    return Err(Contradiction);
                }
                if expandable {
                    self.open.push(unit);
                }
                unit
            }
        };
        let known = &mut self.units.units[unit as usize];
        known.large = known.large.or(kind);
        known.pool = known.pool.or(pool);
        known.base = known.base.min(address);
        self.mapped[unit as usize] += size_bytes;
        self.spans.insert(address, size_bytes, expandable, unit)?;
        Ok(unit)
    }

    /// The reservation with pages mapped now that these ones belong to: the nearest that is not
    /// another one for sure.
    fn reservation(
        &self,
        address: u64,
        size_bytes: u64,
        stream: u64,
        kind: Option<bool>,
        pool: Option<(u64, u64)>,
    ) -> Option<u32> {
        let same = |unit: &Unit| {
            let may_be = unit.stream == stream
                && (unit.large.is_none() || kind.is_none() || unit.large == kind)
                && (unit.pool.is_none() || pool.is_none() || unit.pool == pool);
            let large = unit.large.or(kind) == Some(true);
            let page_bytes =
                if large { self.reservations.large_page_bytes } else { SMALL_SEGMENT_BYTES };
            let low = unit.base.min(address);
            let reach = (address - low).saturating_add(size_bytes);
            let span_bytes = self.reservations.span_bytes.next_multiple_of(page_bytes);
            may_be
                && reach <= span_bytes
                && unit.base - low <= span_bytes
                && unit.base.abs_diff(address).is_multiple_of(page_bytes)
        };
        let open = self.open.iter().copied();
        let near = open.filter(|&unit| same(&self.units.units[unit as usize]));
        near.min_by_key(|&unit| self.units.units[unit as usize].base.abs_diff(address))
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<(), Contradiction> {
        let mut owner = None;
        self.spans.remove_pages(address, size_bytes, |unit| owner = Some(unit))?;
        let unit = owner.ok_or(Contradiction)?;
        let mapped = &mut self.mapped[unit as usize];
        *mapped = mapped.checked_sub(size_bytes).ok_or(Contradiction)?;
        if *mapped == 0 {
            // The addresses are given back, and may be another reservation's next.
            self.open.retain(|&open| open != unit);
        }
        Ok(())
    }
}
