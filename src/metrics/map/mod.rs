//! The memory map: which block lay where in the memory held, and from when to when.
//!
//! Address spaces have gaps of tebibytes, so what is held is set side by side, in true sizes:
//!
//! ```text
//!   device            ─│ seg 0 │──── 3 TiB ────│ seg 1 │───│ reservation, mapped up to here ┊ ..│
//!                        ╲                  ╱                 ╱
//!   position (bytes)  ├─ shelf: segments ──────────┼─ lane of the reservation ─┤
//!                     0                                                    height
//! ```
//!
//! - A segment that the device gave as a whole stands on the *shelf*, in the smallest gap that it
//!   fits, and leaves a gap behind when it goes. So a segment of `native`, which is one tensor, takes
//!   over the place of one that is gone, and the map is about as high as the peak.
//! - A reservation that is mapped page by page has a *lane* of its own, as high as the part of it
//!   that ever was mapped; lanes follow the shelf in order of appearance.
//! - A block of a stitched range lies in the memory behind it, in as many parts as that has: the
//!   device tells ([`Sink::backing`]).
//!
//! The one design decision: memory is bounded however long the replay. The lives with the largest
//! area (bytes × events) are kept exactly, and all others go into a coarse raster of how much of
//! each field they cover ([`Shade`]), so that nothing vanishes.

mod keep;
mod shade;
mod shelf;

use std::collections::BTreeMap;

use foldhash::{HashMap, HashMapExt};

pub use shade::Shade;

use self::keep::Keep;
use self::shelf::Shelf;
use super::Sink;
use crate::alloc::{Action, ActionKind, BlockState, LayoutBlock};
use crate::device::{Extent, PhysicalHandle};
use crate::trace::{Role, Trace};
use crate::units::{BlockId, NameId, SiteId, StreamId};

/// The lane of the shelf.
const SHELF: u32 = 0;
/// Of this many blocks kept, one stretch of memory is kept too: those are few but for `native`.
const BLOCKS_A_STRETCH: usize = 4;

/// Where something lies: a lane and the bytes from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Spot {
    lane: u32,
    offset_bytes: u64,
}

impl Spot {
    fn plus(self, bytes: u64) -> Spot {
        Spot { offset_bytes: self.offset_bytes.saturating_add(bytes), ..self }
    }
}

/// A rectangle of the map: some bytes for some events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Life {
    block: BlockId,
    from_event: u64,
    /// When the program freed it; [`Self::to_event`] unless another stream still used it then.
    freed_event: u64,
    to_event: u64,
    spot: Spot,
    size_bytes: u64,
}

/// Memory that is held now.
#[derive(Clone, Copy, Debug)]
struct Held {
    size_bytes: u64,
    from_event: u64,
    spot: Spot,
}

/// Watches a replay for its map.
#[derive(Clone, Debug)]
pub struct MapSink {
    /// Memory held now, by address.
    held: BTreeMap<u64, Held>,
    shelf: Shelf,
    /// The lane of every reservation, by the ordinal of its segment, and where it begins and ends.
    lanes: BTreeMap<u32, Lane>,
    /// Where each physical piece lies.
    pieces: HashMap<PhysicalHandle, Spot>,
    /// Blocks that are in use or waited for, in all their parts.
    live: HashMap<BlockId, Vec<Life>>,
    blocks: Keep,
    stretches: Keep,
}

#[derive(Clone, Copy, Debug)]
struct Lane {
    number: u32,
    from_bytes: u64,
    to_bytes: u64,
}

/// A block in the map, or one part of a block that lies in several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapBlock {
    /// The trace's block.
    pub block: BlockId,
    /// The event that asked for it; 0 if it was there before.
    pub from_event: u64,
    /// The event that freed it, or the end of the replay.
    pub freed_event: u64,
    /// The event at which its memory was free again: later, if another stream still used it.
    pub to_event: u64,
    /// Where it begins, in bytes from the foot of the map.
    pub position_bytes: u64,
    /// Bytes that the program asked for, as far as they lie here.
    pub size_bytes: u64,
    /// Where in the program, or [`SiteId::NONE`].
    pub site: SiteId,
    /// The name in a text trace, or [`NameId::NONE`].
    pub name: NameId,
    /// What it holds.
    pub role: Role,
    /// The stream it was asked on.
    pub stream: StreamId,
}

/// Memory that was held for some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapStretch {
    /// The event that obtained it.
    pub from_event: u64,
    /// The event that gave it back, or the end of the replay.
    pub to_event: u64,
    /// Where it begins, in bytes from the foot of the map.
    pub position_bytes: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// The finished map.
#[derive(Clone, Debug, Default)]
pub struct MemoryMap {
    /// Its width: events of the trace.
    pub events: u64,
    /// Its height in bytes.
    pub height_bytes: u64,
    /// Where the shelf ends and each lane of a reservation ends, in bytes from the foot.
    pub lane_ends_bytes: Vec<u64>,
    /// The largest blocks by bytes × events, in order of their beginnings.
    pub blocks: Vec<MapBlock>,
    /// Blocks, or parts of such, that there were in all.
    pub blocks_total: u64,
    /// The longest stretches of memory held, in order of their beginnings.
    pub stretches: Vec<MapStretch>,
    /// The other blocks.
    pub block_shade: Shade,
    /// The other stretches.
    pub stretch_shade: Shade,
    /// Some block lies in several parts.
    pub has_parts: bool,
}

impl MapSink {
    /// For a trace of `events`; keeps at most `blocks_max` blocks exactly.
    pub fn new(events: u64, blocks_max: usize) -> MapSink {
        MapSink {
            held: BTreeMap::new(),
            shelf: Shelf::default(),
            lanes: BTreeMap::new(),
            pieces: HashMap::new(),
            live: HashMap::new(),
            blocks: Keep::new(events, blocks_max),
            stretches: Keep::new(events, blocks_max / BLOCKS_A_STRETCH),
        }
    }

    /// The map of a replay of `trace` that ended before `end_event`.
    pub fn finish(mut self, trace: &Trace, end_event: u64) -> MemoryMap {
        for (_, held) in std::mem::take(&mut self.held) {
            self.give_back(held, end_event);
        }
        let mut live: Vec<Life> = std::mem::take(&mut self.live).into_values().flatten().collect();
        live.sort_unstable_by_key(|life| (life.from_event, life.spot));
        for life in live {
            let freed_event = life.freed_event.min(end_event);
            self.blocks.add(Life { freed_event, to_event: end_event, ..life });
        }
        let bases = self.lane_bases();
        let position = |spot: Spot| bases[spot.lane as usize].plus(spot.offset_bytes);
        let lane_ends_bytes: Vec<u64> = bases.iter().map(|base| base.end_bytes).collect();
        let height_bytes = lane_ends_bytes.last().copied().unwrap_or(0);
        let rasterise = |cells: &shade::Cells| cells.raster(height_bytes, position);
        let blocks_total = self.blocks.count();
        let (blocks, block_cells) = self.blocks.finish();
        let (stretches, stretch_cells) = self.stretches.finish();
        MemoryMap {
            events: trace.events.len() as u64,
            height_bytes,
            block_shade: rasterise(&block_cells),
            stretch_shade: rasterise(&stretch_cells),
            has_parts: blocks.windows(2).any(|pair| pair[0].block == pair[1].block),
            blocks: blocks.iter().map(|life| map_block(trace, life, position(life.spot))).collect(),
            blocks_total,
            stretches: stretches.iter().map(|life| stretch(life, position(life.spot))).collect(),
            lane_ends_bytes,
        }
    }

    /// Where each lane begins in the finished map, by its number.
    fn lane_bases(&self) -> Vec<LaneBase> {
        let mut end_bytes = self.shelf.height_bytes();
        let mut bases = vec![LaneBase { begin_bytes: 0, skip_bytes: 0, end_bytes }];
        let mut lanes: Vec<&Lane> = self.lanes.values().collect();
        lanes.sort_by_key(|lane| lane.number);
        for lane in lanes {
            let begin_bytes = end_bytes;
            end_bytes += lane.to_bytes - lane.from_bytes;
            bases.push(LaneBase { begin_bytes, skip_bytes: lane.from_bytes, end_bytes });
        }
        bases
    }

    /// The spot of an address in memory held.
    fn spot(&self, address: u64) -> Option<Spot> {
        let (&from, held) = self.held.range(..=address).next_back()?;
        let inside = address - from;
        (inside < held.size_bytes).then(|| held.spot.plus(inside))
    }

    fn segment_alloc(&mut self, event: u64, action: Action) {
        let offset_bytes = self.shelf.take(action.size_bytes);
        let spot = Spot { lane: SHELF, offset_bytes };
        self.hold(event, action.address, action.size_bytes, spot);
    }

    fn segment_map(&mut self, event: u64, segment: u32, offset: u64, address: u64, bytes: u64) {
        let number = u32::try_from(self.lanes.len() + 1).unwrap_or(u32::MAX);
        let end = offset.saturating_add(bytes);
        let lane =
            self.lanes.entry(segment).or_insert(Lane { number, from_bytes: offset, to_bytes: end });
        lane.from_bytes = lane.from_bytes.min(offset);
        lane.to_bytes = lane.to_bytes.max(end);
        let spot = Spot { lane: lane.number, offset_bytes: offset };
        self.hold(event, address, bytes, spot);
    }

    fn hold(&mut self, from_event: u64, address: u64, size_bytes: u64, spot: Spot) {
        self.held.insert(address, Held { size_bytes, from_event, spot });
    }

    /// Memory from `address` on is given back, whatever runs it was obtained in.
    fn release(&mut self, event: u64, address: u64, size_bytes: u64) {
        let end = address.saturating_add(size_bytes);
        let first = self.held.range(..=address).next_back();
        let first = first.filter(|(from, held)| *from + held.size_bytes > address);
        let from = first.map_or(address, |(from, _)| *from);
        let touched: Vec<(u64, Held)> =
            self.held.range(from..end).map(|(&at, &held)| (at, held)).collect();
        for (at, held) in touched {
            self.held.remove(&at);
            let held_end = at + held.size_bytes;
            let (cut_from, cut_to) = (at.max(address), held_end.min(end));
            if at < cut_from {
                self.held.insert(at, Held { size_bytes: cut_from - at, ..held });
            }
            if cut_to < held_end {
                let spot = held.spot.plus(cut_to - at);
                self.held.insert(cut_to, Held { size_bytes: held_end - cut_to, spot, ..held });
            }
            let spot = held.spot.plus(cut_from - at);
            self.give_back(Held { size_bytes: cut_to - cut_from, spot, ..held }, event);
        }
    }

    fn give_back(&mut self, held: Held, event: u64) {
        if held.spot.lane == SHELF {
            self.shelf.give(held.spot.offset_bytes, held.size_bytes);
        }
        self.stretches.add(Life {
            block: BlockId::NONE,
            from_event: held.from_event,
            freed_event: event,
            to_event: event,
            spot: held.spot,
            size_bytes: held.size_bytes,
        });
    }

    fn begin(&mut self, event: u64, block: BlockId, spot: Spot, size_bytes: u64) {
        let life = Life {
            block,
            from_event: event,
            freed_event: u64::MAX,
            to_event: u64::MAX,
            spot,
            size_bytes,
        };
        self.live.entry(block).or_default().push(life);
    }

    fn freed(&mut self, event: u64, block: BlockId) {
        for life in self.live.get_mut(&block).into_iter().flatten() {
            life.freed_event = life.freed_event.min(event);
        }
    }

    fn end(&mut self, event: u64, block: BlockId) {
        for life in self.live.remove(&block).into_iter().flatten() {
            let freed_event = life.freed_event.min(event);
            self.blocks.add(Life { freed_event, to_event: event, ..life });
        }
    }

    /// Remembers where the pieces behind memory just obtained lie.
    fn place_pieces(&mut self, action: Action, memory: &[Extent]) {
        let Some(mut spot) = self.spot(action.address) else { return };
        for extent in memory {
            if let (Some(piece), 0) = (extent.piece, extent.offset_bytes) {
                self.pieces.insert(piece, spot);
            }
            spot = spot.plus(extent.size_bytes);
        }
    }

    /// Begins a block of a stitched range in the memory behind it.
    fn begin_in_parts(&mut self, event: u64, block: BlockId, memory: &[Extent]) {
        let mut parts: Vec<(Spot, u64)> = Vec::new();
        for extent in memory {
            let piece = extent.piece.and_then(|piece| self.pieces.get(&piece));
            let Some(spot) = piece.map(|spot| spot.plus(extent.offset_bytes)) else { continue };
            match parts.last_mut() {
                Some((first, bytes)) if first.plus(*bytes) == spot => *bytes += extent.size_bytes,
                _ => parts.push((spot, extent.size_bytes)),
            }
        }
        for (spot, size_bytes) in parts {
            self.begin(event, block, spot, size_bytes);
        }
    }
}

/// Where a lane stands in the finished map.
#[derive(Clone, Copy, Debug)]
struct LaneBase {
    begin_bytes: u64,
    /// Bytes at the beginning of the lane that never were mapped.
    skip_bytes: u64,
    end_bytes: u64,
}

impl LaneBase {
    fn plus(self, offset_bytes: u64) -> u64 {
        self.begin_bytes.saturating_add(offset_bytes.saturating_sub(self.skip_bytes))
    }
}

fn map_block(trace: &Trace, life: &Life, position_bytes: u64) -> MapBlock {
    let block = trace.blocks.get(life.block.index());
    MapBlock {
        block: life.block,
        from_event: life.from_event,
        freed_event: life.freed_event,
        to_event: life.to_event,
        position_bytes,
        size_bytes: life.size_bytes,
        site: block.map_or(SiteId::NONE, |block| block.site),
        name: block.map_or(NameId::NONE, |block| block.name),
        role: block.map_or(Role::Unknown, |block| block.role),
        stream: block.map_or(StreamId::NONE, |block| block.stream),
    }
}

fn stretch(life: &Life, position_bytes: u64) -> MapStretch {
    let &Life { from_event, to_event, size_bytes, .. } = life;
    MapStretch { from_event, to_event, position_bytes, size_bytes }
}

impl Sink for MapSink {
    const LOG: bool = true;
    const LEVELS: bool = false;

    fn start(&mut self, layout: &[LayoutBlock]) {
        for segment in layout.chunk_by(|a, b| a.segment == b.segment) {
            let LayoutBlock { segment_address, segment_bytes, page_bytes, .. } = segment[0];
            if page_bytes == 0 {
                let offset_bytes = self.shelf.take(segment_bytes);
                self.hold(0, segment_address, segment_bytes, Spot { lane: SHELF, offset_bytes });
            }
            for block in segment {
                if page_bytes > 0 {
                    let offset = block.address - segment_address;
                    self.segment_map(0, block.segment, offset, block.address, block.size_bytes);
                }
                let Some(spot) = self.spot(block.address) else { continue };
                if block.state != BlockState::Free && !block.block.is_none() {
                    self.begin(0, block.block, spot, block.requested_bytes);
                }
                if block.state == BlockState::Deferred {
                    self.freed(0, block.block);
                }
            }
        }
    }

    fn action(&mut self, event: u64, action: Action) {
        let Action { block, address, size_bytes, .. } = action;
        match action.kind {
            ActionKind::Alloc => {
                if let Some(spot) = self.spot(address) {
                    self.begin(event, block, spot, size_bytes);
                }
            }
            ActionKind::FreeRequested => self.freed(event, block),
            ActionKind::FreeCompleted => self.end(event, block),
            ActionKind::SegmentAlloc => self.segment_alloc(event, action),
            ActionKind::SegmentMap => {
                self.segment_map(event, action.segment, action.offset_bytes, address, size_bytes);
            }
            ActionKind::SegmentFree | ActionKind::SegmentUnmap => {
                self.release(event, address, size_bytes);
            }
            ActionKind::Stitch
            | ActionKind::Unstitch
            | ActionKind::Oom
            | ActionKind::EmptyCache
            | ActionKind::DeviceRefused => {}
        }
    }

    fn wants_backing(&self, action: &Action) -> bool {
        match action.kind {
            ActionKind::SegmentAlloc | ActionKind::SegmentMap => true,
            ActionKind::Alloc => self.spot(action.address).is_none(),
            _ => false,
        }
    }

    fn backing(&mut self, event: u64, action: Action, memory: Option<Vec<Extent>>) {
        let Some(memory) = memory else { return };
        match action.kind {
            ActionKind::SegmentAlloc | ActionKind::SegmentMap => self.place_pieces(action, &memory),
            ActionKind::Alloc if self.spot(action.address).is_none() => {
                self.begin_in_parts(event, action.block, &memory);
            }
            _ => {}
        }
    }
}
