//! Segments: memory that the device gives, and takes back or not.
//!
//! ```text
//!   new        create × N ─> reserve ─> (map, set access) × N        refused half-way: undone,
//!                            └───────── `shipped`: 8 rounds ┘        and then the chunks too
//!   release    unmap ─> release × N ─> free the range
//!                 │          └──────────────┴─ refused: `Remains`, tried again at the next flush
//!                 └─ refused: the block stays free and usable
//! ```

use super::blocks::Block;
use super::chunks::{CHUNK_BYTES, NO_CHUNK, Run};
use super::config::Policy;
use super::gmlake::{Gmlake, LARGE, NONE, SMALL, kind_of, set_of, stream_of};
use crate::alloc::free_set::Entry;
use crate::alloc::{Action, ActionKind, BlockState, Env, LayoutBlock, Request};
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{Device, PhysicalHandle};
use crate::units::{BlockId, MIB, StreamId};

/// Segment size of the small pool (spec 2.1).
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Segment size for large sizes below [`OWN_SEGMENT_BYTES`].
const LARGE_SEGMENT_BYTES: u64 = 20 * MIB;
/// Sizes of at least this get a segment of their own size.
const OWN_SEGMENT_BYTES: u64 = 10 * MIB;
/// Attempts to map, with idle stitched blocks destroyed after each (spec 2.1).
pub(super) const ATTEMPTS: u32 = 3;
/// Rounds of reserving and mapping within an attempt of the published code (spec 2.1). What failed
/// once may succeed in the next round (B2 mended).
const MAPPING_ROUNDS: u32 = 8;
/// Pool of memory that is held but serves nobody, in layouts.
const NO_POOL: u32 = 2;

/// Memory obtained at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// Its block with the lowest address; [`NONE`] once returned.
    pub(super) first: u32,
    pub(super) ordinal: u32,
}

/// What is left of a range of addresses or a segment that the device did not wholly take back.
#[derive(Clone, Debug)]
pub(super) struct Remains {
    /// Address and size of the range, if there is one.
    pub(super) range: Option<(u64, u64)>,
    /// How much of its beginning is mapped.
    pub(super) mapped_bytes: u64,
    /// Chunks that are still held.
    pub(super) handles: Vec<PhysicalHandle>,
    /// Of a segment: ordinal and stream, until its last chunk went. So long it counts as reserved.
    pub(super) segment: Option<(u32, StreamId)>,
}

/// The segment that a rounded size asks for (spec 2.3).
pub(super) fn segment_bytes_for(size_bytes: u64) -> u64 {
    if size_bytes <= super::gmlake::SMALL_SIZE_BYTES {
        SMALL_SEGMENT_BYTES
    } else if size_bytes < OWN_SEGMENT_BYTES {
        LARGE_SEGMENT_BYTES
    } else {
        size_bytes
    }
}

impl Gmlake {
    /// Whether so many bytes more are within the limit.
    pub(super) fn is_within_limit(&self, more_bytes: u64) -> bool {
        let reserved_bytes = self.levels.reserved_bytes.saturating_add(more_bytes);
        self.limit_bytes.is_none_or(|limit| reserved_bytes <= limit)
    }

    /// A new segment as one free block in no set (spec 2.7), within the limit. Logs a refusal.
    pub(super) fn obtain<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        segment_bytes: u64,
        request: Request,
    ) -> Option<u32> {
        let obtained = if !self.is_within_limit(segment_bytes) {
            None
        } else if kind_of(set) == SMALL || !self.config.vmm {
            self.malloc_segment(env, set, segment_bytes)
        } else {
            self.create_segment(env, set, segment_bytes)
        };
        if obtained.is_none() {
            self.log_refused(env, segment_bytes, request);
        }
        obtained
    }

    /// Logs that no segment was to be had.
    pub(super) fn log_refused<E: Env>(&self, env: &mut E, size_bytes: u64, request: Request) {
        if E::LOG {
            let kind = ActionKind::DeviceRefused;
            env.log(Action::notice(kind, request.block, request.stream, size_bytes));
        }
    }

    fn malloc_segment<E: Env>(&mut self, env: &mut E, set: u32, size_bytes: u64) -> Option<u32> {
        let address = env.device().malloc(size_bytes).ok()?;
        Some(self.enter_segment(env, set, address, size_bytes, NO_CHUNK))
    }

    /// A segment of chunks. Where memory is not what is short, idle stitched blocks are destroyed
    /// for addresses or mappings, and the device is asked again (spec 2.7).
    fn create_segment<E: Env>(&mut self, env: &mut E, set: u32, size_bytes: u64) -> Option<u32> {
        for level in 0..ATTEMPTS {
            if let Some(at) = self.try_create_segment(env, set, size_bytes) {
                return Some(at);
            }
            let idle_bytes = self.idle[stream_of(set).index()].bytes();
            if env.device().memory_info().free_bytes <= size_bytes || idle_bytes < size_bytes {
                return None;
            }
            self.destroy_idle(env, level, size_bytes);
        }
        None
    }

    fn try_create_segment<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
    ) -> Option<u32> {
        let count = size_bytes / CHUNK_BYTES;
        // No device holds more than its memory: it need not be asked chunk by chunk.
        let total_bytes = env.device().memory_info().total_bytes.max(UNLIMITED_TOTAL_BYTES);
        if size_bytes > total_bytes || !self.chunks.has_room_for(count) {
            return None;
        }
        let mut handles = Vec::new();
        if env.device().create_each(CHUNK_BYTES, count, &mut handles).is_ok() {
            for _ in 0..self.mapping_rounds() {
                let pieces = std::iter::once(handles.as_slice());
                match map_round(env.device(), pieces, size_bytes) {
                    Ok(address) => {
                        let run = self.chunks.enter(&handles);
                        return Some(self.enter_segment(env, set, address, size_bytes, run.first));
                    }
                    Err(remains) => self.bury_range(env, remains),
                }
            }
        }
        self.bury(env, Remains { range: None, mapped_bytes: 0, handles, segment: None });
        None
    }

    /// How often a range is reserved and mapped before an attempt counts as failed. The paper says
    /// nothing of repetitions.
    pub(super) fn mapping_rounds(&self) -> u32 {
        match self.config.policy {
            Policy::Paper => 1,
            Policy::Shipped => MAPPING_ROUNDS,
        }
    }

    /// Enters memory of the device as a segment of one free block, which is in no set.
    fn enter_segment<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        address: u64,
        size_bytes: u64,
        chunk: u32,
    ) -> u32 {
        let ordinal = self.next_ordinal();
        let segment = self.spare_segments.pop().unwrap_or(self.segments.len() as u32);
        let at = self.put_block(Block {
            address,
            size_bytes,
            requested_bytes: 0,
            event: 0,
            gc_base: self.searches[kind_of(set) as usize],
            prev: NONE,
            next: NONE,
            segment,
            set,
            chunk,
            owner: BlockId::NONE,
            state: BlockState::Free,
        });
        let entered = Segment { address, size_bytes, first: at, ordinal };
        match self.segments.get_mut(segment as usize) {
            Some(place) => *place = entered,
            None => self.segments.push(entered),
        }
        self.levels.reserved_bytes += size_bytes;
        self.counters.segment_allocs += 1;
        if E::LOG {
            let action = ActionKind::SegmentAlloc;
            env.log(segment_action(action, ordinal, stream_of(set), address, size_bytes));
        }
        at
    }

    /// Gives remains back as far as the device takes them, and keeps the rest.
    pub(super) fn bury<E: Env>(&mut self, env: &mut E, mut remains: Remains) {
        if !self.give_back(env, &mut remains) {
            self.remains.push(remains);
        }
    }

    /// [`Self::bury`] for what a round of mapping left, if it left anything.
    pub(super) fn bury_range<E: Env>(&mut self, env: &mut E, remains: Option<Remains>) {
        if let Some(remains) = remains {
            self.bury(env, remains);
        }
    }

    /// Gives remains back. Says whether nothing is left of them.
    fn give_back<E: Env>(&mut self, env: &mut E, remains: &mut Remains) -> bool {
        if let Some((address, _)) = remains.range
            && remains.mapped_bytes > 0
        {
            if env.device().unmap(address, remains.mapped_bytes).is_err() {
                return false;
            }
            remains.mapped_bytes = 0;
        }
        remains.handles.retain(|&handle| env.device().release(handle).is_err());
        if !remains.handles.is_empty() {
            return false;
        }
        let Some((address, size_bytes)) = remains.range else { return true };
        if let Some((ordinal, stream)) = remains.segment.take() {
            self.count_segment_free(env, ordinal, stream, address, size_bytes);
        }
        env.device().address_free(address, size_bytes).is_ok()
    }

    fn count_segment_free<E: Env>(
        &mut self,
        env: &mut E,
        ordinal: u32,
        stream: StreamId,
        address: u64,
        size_bytes: u64,
    ) {
        self.levels.reserved_bytes -= size_bytes;
        self.counters.segment_frees += 1;
        if E::LOG {
            let action = ActionKind::SegmentFree;
            env.log(segment_action(action, ordinal, stream, address, size_bytes));
        }
    }

    /// Gives back what the device refused before, then all whole segments (spec 3.4).
    pub(super) fn release_cache<E: Env>(&mut self, env: &mut E) {
        for remains in std::mem::take(&mut self.remains) {
            self.bury(env, remains);
        }
        for kind in [LARGE, SMALL] {
            let going = self.releasable(kind);
            self.release(env, &going);
        }
    }

    /// Free blocks that may be released, in the order of their streams, sizes and addresses.
    pub(super) fn releasable(&self, kind: u32) -> Vec<u32> {
        let sets = self.streams.iter().map(|&stream| &self.free[set_of(stream, kind) as usize]);
        self.may_be_released(sets.flat_map(|set| set.iter()))
    }

    /// Of free blocks those that may be released: whole segments, without chunks that a stitched
    /// block in use has too.
    pub(super) fn may_be_released(&self, entries: impl Iterator<Item = Entry>) -> Vec<u32> {
        let kept = self.kept_chunks();
        let may_go = |&at: &u32| {
            let block = &self.blocks[at as usize];
            !block.is_split() && block.run().is_none_or(|run| kept.has_none_of(run))
        };
        entries.map(|entry| entry.block).filter(may_go).collect()
    }

    /// Releases free blocks that may be released, in this order, each after the idle stitched blocks
    /// that have chunks of it (spec 3.4). Gives the bytes released.
    pub(super) fn release<E: Env>(&mut self, env: &mut E, going: &[u32]) -> u64 {
        let mut stitched = self.idle_over(going);
        let mut released_bytes = 0;
        for &at in going {
            let stitched = stitched.remove(&at).unwrap_or_default();
            let block = self.blocks[at as usize];
            let released = stitched.into_iter().all(|id| self.unstitch(env, id))
                && match block.run() {
                    None => self.free_segment(env, at),
                    Some(run) => self.unmap_segment(env, at, run),
                };
            released_bytes += if released { block.size_bytes } else { 0 };
        }
        released_bytes
    }

    /// Returns a device malloc. Says whether the device took it.
    fn free_segment<E: Env>(&mut self, env: &mut E, at: u32) -> bool {
        let block = self.blocks[at as usize];
        if env.device().free(block.address).is_err() {
            return false;
        }
        let Segment { address, size_bytes, ordinal, .. } = self.forget_segment(at);
        self.count_segment_free(env, ordinal, stream_of(block.set), address, size_bytes);
        true
    }

    /// Returns a segment of chunks, none of which is mapped anywhere else. Says whether it is no
    /// longer a block.
    fn unmap_segment<E: Env>(&mut self, env: &mut E, at: u32, run: Run) -> bool {
        let block = self.blocks[at as usize];
        if env.device().unmap(block.address, block.size_bytes).is_err() {
            return false;
        }
        let handles = self.chunks.leave(run);
        let ordinal = self.forget_segment(at).ordinal;
        let range = Some((block.address, block.size_bytes));
        let segment = Some((ordinal, stream_of(block.set)));
        self.bury(env, Remains { range, mapped_bytes: 0, handles, segment });
        true
    }

    /// Takes a free block that is a whole segment, and the segment, out of the books.
    fn forget_segment(&mut self, at: u32) -> Segment {
        self.take(at);
        let segment = self.blocks[at as usize].segment;
        let forgotten = self.segments[segment as usize];
        self.segments[segment as usize].first = NONE;
        self.spare.push(at);
        self.spare_segments.push(segment);
        forgotten
    }

    /// Every block in address order, segment by segment, and what the device refused to take back.
    pub(super) fn visit_layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut rows = Vec::new();
        for segment in self.segments.iter().filter(|segment| segment.first != NONE) {
            let mut at = segment.first;
            while at != NONE {
                let block = &self.blocks[at as usize];
                rows.push(self.layout_block(segment, block));
                at = block.next;
            }
        }
        for remains in &self.remains {
            let (Some((address, size_bytes)), Some((ordinal, stream))) =
                (remains.range, remains.segment)
            else {
                continue;
            };
            rows.push(LayoutBlock {
                block: BlockId::NONE,
                segment: ordinal,
                segment_address: address,
                segment_bytes: size_bytes,
                page_bytes: CHUNK_BYTES,
                address,
                size_bytes,
                requested_bytes: 0,
                stream,
                pool: NO_POOL,
                state: BlockState::Free,
            });
        }
        rows.sort_by_key(|row| row.address);
        rows.into_iter().for_each(visit);
    }

    fn layout_block(&self, segment: &Segment, block: &Block) -> LayoutBlock {
        let free = block.is_free();
        LayoutBlock {
            block: if free { BlockId::NONE } else { block.owner },
            segment: segment.ordinal,
            segment_address: segment.address,
            segment_bytes: segment.size_bytes,
            page_bytes: if block.chunk == NO_CHUNK { 0 } else { CHUNK_BYTES },
            address: block.address,
            size_bytes: block.size_bytes,
            requested_bytes: if free { 0 } else { block.requested_bytes },
            stream: stream_of(block.set),
            pool: kind_of(block.set),
            state: block.state,
        }
    }
}

/// A new range of addresses with these pieces behind it, which have `size_bytes`.
///
/// # Errors
/// What is left of the range if the device refused a call; nothing if it had no addresses.
pub(super) fn map_round<'a, D: Device>(
    device: &mut D,
    pieces: impl Iterator<Item = &'a [PhysicalHandle]>,
    size_bytes: u64,
) -> Result<u64, Option<Remains>> {
    let address = device.address_reserve(size_bytes).map_err(|_| None)?;
    let mut mapped = 0;
    for handles in pieces {
        let at = address + mapped as u64 * CHUNK_BYTES;
        if device.map_each(at, CHUNK_BYTES, handles, &mut mapped).is_err() {
            let range = Some((address, size_bytes));
            let mapped_bytes = mapped as u64 * CHUNK_BYTES;
            return Err(Some(Remains { range, mapped_bytes, handles: Vec::new(), segment: None }));
        }
    }
    Ok(address)
}

/// A log entry about a segment or a stitched range.
pub(super) fn segment_action(
    kind: ActionKind,
    ordinal: u32,
    stream: StreamId,
    address: u64,
    size_bytes: u64,
) -> Action {
    Action {
        kind,
        block: BlockId::NONE,
        segment: ordinal,
        stream,
        offset_bytes: 0,
        size_bytes,
        address,
    }
}
