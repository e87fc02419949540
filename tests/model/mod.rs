//! A slow, obvious model of PyTorch's CUDA caching allocator: an independent second opinion on the
//! crate's `caching`, written from the rules alone (`specs/pytorch_caching.md`, whose paragraphs
//! the comments name). There is no data structure but lists that are scanned from end to end.
//! Expandable segments and private pools are not in it.

pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod random;
mod statistics;

use fraglab::alloc::{
    Action, ActionKind, Allocator, BlockState, Env, Handle, LayoutBlock, Levels, OutOfMemory,
    Request,
};
use fraglab::device::Device;
use fraglab::units::{BlockId, MIB, StreamId};

use statistics::{Pool, Stat, Statistics};

/// What the options and the memory limit come to (7.2, 7.3).
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// `max_split_size_mb` in bytes; `u64::MAX` is unlimited.
    pub(crate) max_split_size: u64,
    /// `max_non_split_rounding_mb` in bytes.
    pub(crate) max_non_split_rounding: u64,
    /// `garbage_collection_threshold`; 0 is off.
    pub(crate) gc_threshold: f64,
    /// Divisions by power of two, 1 MiB first (2.2).
    pub(crate) roundup: [u64; 16],
    /// `large_segment_size_mb` in bytes.
    pub(crate) large_segment_size: u64,
    /// Memory limit in bytes.
    pub(crate) limit: Option<u64>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            max_split_size: u64::MAX,
            max_non_split_rounding: 20 * MIB,
            gc_threshold: 0.0,
            roundup: [0; 16],
            large_segment_size: 20 * MIB,
            limit: None,
        }
    }
}

/// A request rounded (2.1, 2.2).
pub(crate) fn rounded(request: u64, roundup: &[u64; 16]) -> u64 {
    if request < 512 {
        return 512;
    }
    let log2 = (0..64).rev().find(|&bit| request >> bit & 1 == 1).expect("not 0");
    let entry = if log2 < 20 { 0 } else { (log2 - 20).min(15) };
    let divisions = roundup[entry];
    if divisions > 1 && request > 512 * divisions {
        let floor = 1u64 << log2;
        return if request == floor { request } else { round_up(request, floor / divisions) };
    }
    round_up(request, 512)
}

fn round_up(bytes: u64, unit: u64) -> u64 {
    bytes.div_ceil(unit) * unit
}

#[derive(Clone, Debug)]
struct Block {
    address: u64,
    size: u64,
    state: BlockState,
    /// Of its last allocation.
    request: u64,
    id: BlockId,
    handle: Handle,
    /// The pool's search counter when it last became free.
    gc_base: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    ordinal: u32,
    address: u64,
    size: u64,
    pool: Pool,
    stream: StreamId,
    /// In address order, without gaps.
    blocks: Vec<Block>,
}

/// Where a block stands: its segment's and its own place in the lists.
#[derive(Clone, Copy, Debug)]
struct Place {
    segment: usize,
    block: usize,
}

/// A free block with what orders it (3.2).
#[derive(Clone, Copy, Debug)]
struct Candidate {
    stream_handle: u64,
    size: u64,
    address: u64,
    place: Place,
}

/// The model.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    settings: Settings,
    stream_handles: Vec<u64>,
    segments: Vec<Segment>,
    segments_made: u32,
    handles_made: u32,
    /// Searches so far in the small and in the large pool, counted for garbage collection only.
    searches: [u64; 2],
    statistics: Statistics,
}

impl Model {
    pub(crate) fn new(settings: Settings, stream_handles: Vec<u64>) -> Model {
        Model {
            settings,
            stream_handles,
            segments: Vec::new(),
            segments_made: 0,
            handles_made: 0,
            searches: [0; 2],
            statistics: Statistics::default(),
        }
    }

    /// Flushes so far that a malloc made.
    pub(crate) fn retries(&self) -> i64 {
        self.statistics.num_alloc_retries
    }

    fn block(&self, place: Place) -> &Block {
        &self.segments[place.segment].blocks[place.block]
    }

    fn block_mut(&mut self, place: Place) -> &mut Block {
        &mut self.segments[place.segment].blocks[place.block]
    }

    fn place_of(&self, handle: Handle) -> Place {
        for (segment, of_segment) in self.segments.iter().enumerate() {
            for (block, b) in of_segment.blocks.iter().enumerate() {
                if b.state != BlockState::Free && b.handle == handle {
                    return Place { segment, block };
                }
            }
        }
        panic!("{handle:?} is no block of the model");
    }

    fn is_split(&self, place: Place) -> bool {
        self.segments[place.segment].blocks.len() > 1
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.stream_handles[stream.index()]
    }

    fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.size).sum()
    }

    fn unlimited_split(&self) -> bool {
        self.settings.max_split_size == u64::MAX
    }

    fn is_oversize(&self, size: u64) -> bool {
        size >= self.settings.max_split_size
    }

    /// Bytes of segment for a rounded size (2.3).
    fn segment_size(&self, size: u64) -> u64 {
        if size <= MIB {
            2 * MIB
        } else if size < 10 * MIB {
            self.settings.large_segment_size
        } else {
            round_up(size, 2 * MIB)
        }
    }

    /// The free set of a pool in its order (3.2).
    fn free_set(&self, pool: Pool) -> Vec<Candidate> {
        let mut set = Vec::new();
        for (segment, of_segment) in self.segments.iter().enumerate() {
            if of_segment.pool != pool {
                continue;
            }
            for (block, b) in of_segment.blocks.iter().enumerate() {
                if b.state == BlockState::Free {
                    set.push(Candidate {
                        stream_handle: self.stream_handle(of_segment.stream),
                        size: b.size,
                        address: b.address,
                        place: Place { segment, block },
                    });
                }
            }
        }
        set.sort_by_key(|c| (c.stream_handle, c.size, c.address));
        set
    }

    fn collects_garbage(&self) -> bool {
        self.settings.limit.is_some() && self.settings.gc_threshold > 0.0
    }

    /// Search of a pool (3.4).
    fn search(&mut self, pool: Pool, size: u64, stream: StreamId) -> Option<Place> {
        if self.collects_garbage() {
            self.searches[pool as usize] += 1;
        }
        let stream_handle = self.stream_handle(stream);
        let candidate = self
            .free_set(pool)
            .into_iter()
            .find(|c| (c.stream_handle, c.size) >= (stream_handle, size))?;
        if candidate.stream_handle != stream_handle {
            return None;
        }
        if !self.is_oversize(size) && self.is_oversize(candidate.size) {
            return None;
        }
        if self.is_oversize(size)
            && candidate.size >= size.saturating_add(self.settings.max_non_split_rounding)
        {
            return None;
        }
        Some(candidate.place)
    }

    /// Garbage collection (3.5).
    fn collect_garbage<E: Env>(&mut self, env: &mut E) {
        let Some(limit) = self.settings.limit else { return };
        if !self.collects_garbage() {
            return;
        }
        let threshold = (self.settings.gc_threshold * limit as f64) as u64;
        let reserved = self.reserved();
        if reserved <= threshold {
            return;
        }
        let target = reserved - threshold;
        let mut reclaimed = 0;
        loop {
            let ages = self.unsplit_ages();
            if reclaimed >= target || ages.is_empty() {
                return;
            }
            let sum: u64 = ages.iter().map(|&(_, age, _)| age).sum();
            let average = sum as f64 / ages.len() as f64;
            let before = reclaimed;
            for (ordinal, age, size) in ages {
                if age as f64 >= average {
                    self.release(env, ordinal);
                    reclaimed += size;
                }
            }
            if reclaimed == before {
                return;
            }
        }
    }

    /// The unsplit free blocks of the large pool in order: segment, age and size.
    fn unsplit_ages(&self) -> Vec<(u32, u64, u64)> {
        let searches = self.searches[Pool::Large as usize];
        let mut ages = Vec::new();
        for candidate in self.free_set(Pool::Large) {
            if !self.is_split(candidate.place) {
                let age = searches - self.block(candidate.place).gc_base;
                ages.push((self.segments[candidate.place.segment].ordinal, age, candidate.size));
            }
        }
        ages
    }

    /// A device attempt without expandable segments (3.3 step 5).
    fn attempt<E: Env>(
        &mut self,
        env: &mut E,
        pool: Pool,
        size: u64,
        stream: StreamId,
    ) -> Option<Place> {
        let size = self.segment_size(size);
        if self.settings.limit.is_some_and(|limit| self.reserved() + size > limit) {
            return None;
        }
        let address = env.device().malloc(size).ok()?;
        let ordinal = self.segments_made;
        self.segments_made += 1;
        let block = Block {
            address,
            size,
            state: BlockState::Free,
            request: 0,
            id: BlockId::NONE,
            handle: Handle::NONE,
            gc_base: 0,
        };
        self.segments.push(Segment { ordinal, address, size, pool, stream, blocks: vec![block] });
        self.statistics.change(Stat::Segment, pool, 1);
        self.statistics.change(Stat::ReservedBytes, pool, size as i64);
        self.statistics.num_device_alloc += 1;
        if self.is_oversize(size) {
            self.statistics.oversize_segments.change(1);
        }
        let place = Place { segment: self.segments.len() - 1, block: 0 };
        self.log_segment(env, ActionKind::SegmentAlloc, place.segment);
        Some(place)
    }

    /// Gives a segment back to the device.
    fn release<E: Env>(&mut self, env: &mut E, ordinal: u32) {
        let at = self.segments.iter().position(|s| s.ordinal == ordinal).expect("is there");
        assert_eq!(self.segments[at].blocks.len(), 1, "a split block is never released");
        self.log_segment(env, ActionKind::SegmentFree, at);
        let segment = self.segments.remove(at);
        env.device().free(segment.address).expect("the device gave it");
        self.statistics.change(Stat::Segment, segment.pool, -1);
        self.statistics.change(Stat::ReservedBytes, segment.pool, -(segment.size as i64));
        self.statistics.num_device_free += 1;
        if self.is_oversize(segment.size) {
            self.statistics.oversize_segments.change(-1);
        }
    }

    /// Targeted release (3.3 step 7): whether the device is worth another attempt.
    fn release_oversize<E: Env>(
        &mut self,
        env: &mut E,
        pool: Pool,
        size: u64,
        stream: StreamId,
    ) -> bool {
        let key = size.max(self.settings.max_split_size);
        let stream_handle = self.stream_handle(stream);
        let set = self.free_set(pool);
        let ordinals: Vec<u32> =
            set.iter().map(|c| self.segments[c.place.segment].ordinal).collect();
        let at = set
            .iter()
            .position(|c| (c.stream_handle, c.size) >= (stream_handle, key))
            .unwrap_or(set.len());
        if at < set.len() && set[at].stream_handle == stream_handle {
            self.release(env, ordinals[at]);
            return true;
        }
        let mut released = 0;
        for before in (0..at).rev() {
            let candidate = set[before];
            let goes_on = released < key
                && self.is_oversize(candidate.size)
                && candidate.stream_handle == stream_handle;
            if !goes_on {
                break;
            }
            self.release(env, ordinals[before]);
            released += candidate.size;
        }
        released >= key
    }

    /// Waits for all events, then releases the default pools (3.7, 4.4).
    fn flush<E: Env>(&mut self, env: &mut E) {
        self.statistics.num_sync_all_streams += 1;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
        }
        for pool in [Pool::Large, Pool::Small] {
            let unsplit: Vec<u32> = self
                .free_set(pool)
                .into_iter()
                .filter(|c| !self.is_split(c.place))
                .map(|c| self.segments[c.place.segment].ordinal)
                .collect();
            for ordinal in unsplit {
                self.release(env, ordinal);
            }
        }
    }

    /// Steps 3 to 8 of 3.3.
    fn find_room<E: Env>(
        &mut self,
        env: &mut E,
        pool: Pool,
        size: u64,
        stream: StreamId,
    ) -> Option<Place> {
        if let Some(place) = self.search(pool, size, stream) {
            return Some(place);
        }
        self.collect_garbage(env);
        if let Some(place) = self.attempt(env, pool, size, stream) {
            return Some(place);
        }
        if !self.unlimited_split()
            && self.release_oversize(env, pool, size, stream)
            && let Some(place) = self.attempt(env, pool, size, stream)
        {
            return Some(place);
        }
        self.flush(env);
        self.statistics.num_alloc_retries += 1;
        self.attempt(env, pool, size, stream)
    }

    /// Whether a block is cut for a request of this size (3.8).
    fn splits(&self, pool: Pool, size: u64, block_size: u64) -> bool {
        let rest = block_size - size;
        match pool {
            Pool::Small => rest >= 512,
            Pool::Large => size < self.settings.max_split_size && rest > MIB,
        }
    }

    /// Step 10 of 3.3.
    fn hand_out<E: Env>(&mut self, env: &mut E, place: Place, size: u64, request: Request) {
        let pool = self.segments[place.segment].pool;
        let was_split = self.is_split(place);
        let whole = self.block(place).size;
        if self.splits(pool, size, whole) {
            let rest = Block {
                address: self.block(place).address + size,
                size: whole - size,
                gc_base: self.searches[pool as usize],
                ..self.block(place).clone()
            };
            let rest_size = rest.size;
            self.segments[place.segment].blocks.insert(place.block + 1, rest);
            self.block_mut(place).size = size;
            if was_split {
                self.statistics.change(Stat::InactiveSplitBytes, pool, -(size as i64));
            } else {
                self.statistics.change(Stat::InactiveSplit, pool, 1);
                self.statistics.change(Stat::InactiveSplitBytes, pool, rest_size as i64);
            }
        } else if was_split {
            self.statistics.change(Stat::InactiveSplitBytes, pool, -(whole as i64));
            self.statistics.change(Stat::InactiveSplit, pool, -1);
        }
        let handle = Handle(self.handles_made);
        self.handles_made += 1;
        let block = self.block_mut(place);
        block.state = BlockState::Allocated;
        block.request = request.size_bytes;
        block.id = request.block;
        block.handle = handle;
        let given = block.size;
        self.statistics.change(Stat::Allocation, pool, 1);
        self.statistics.change(Stat::AllocatedBytes, pool, given as i64);
        self.statistics.change(Stat::Active, pool, 1);
        self.statistics.change(Stat::ActiveBytes, pool, given as i64);
        self.statistics.change(Stat::RequestedBytes, pool, request.size_bytes as i64);
        if self.is_oversize(given) {
            self.statistics.oversize_allocations.change(1);
        }
        self.log_block(env, ActionKind::Alloc, place);
    }

    /// What every free begins with (4.2, 1 to 3).
    fn free_requested<E: Env>(&mut self, env: &mut E, place: Place) {
        let pool = self.segments[place.segment].pool;
        let size = self.block(place).size;
        self.statistics.change(Stat::Allocation, pool, -1);
        self.statistics.change(Stat::AllocatedBytes, pool, -(size as i64));
        self.log_block(env, ActionKind::FreeRequested, place);
        if self.is_oversize(size) {
            self.statistics.oversize_allocations.change(-1);
        }
    }

    /// The memory of a freed block becomes reusable (4.5, 8).
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let place = self.place_of(handle);
        self.log_block(env, ActionKind::FreeCompleted, place);
        let freed = self.block(place).clone();
        let searches = self.searches;
        let segment = &mut self.segments[place.segment];
        let pool = segment.pool;
        let mut count = 0;
        let mut bytes = 0;
        // The neighbour above first, so that the place of the block stays what it is.
        let mut at = place.block;
        if segment.blocks.get(at + 1).is_some_and(|next| next.state == BlockState::Free) {
            let next = segment.blocks.remove(at + 1);
            segment.blocks[at].size += next.size;
            count -= 1;
            bytes -= next.size as i64;
        }
        if at > 0 && segment.blocks[at - 1].state == BlockState::Free {
            let previous = segment.blocks.remove(at - 1);
            at -= 1;
            segment.blocks[at].address = previous.address;
            segment.blocks[at].size += previous.size;
            count -= 1;
            bytes -= previous.size as i64;
        }
        let merged = &mut segment.blocks[at];
        merged.state = BlockState::Free;
        merged.id = BlockId::NONE;
        merged.handle = Handle::NONE;
        merged.gc_base = searches[pool as usize];
        if merged.size < segment.size {
            count += 1;
            bytes += merged.size as i64;
        }
        self.statistics.change(Stat::InactiveSplit, pool, count);
        self.statistics.change(Stat::InactiveSplitBytes, pool, bytes);
        self.statistics.change(Stat::Active, pool, -1);
        self.statistics.change(Stat::ActiveBytes, pool, -(freed.size as i64));
        self.statistics.change(Stat::RequestedBytes, pool, -(freed.request as i64));
    }

    fn log_block<E: Env>(&self, env: &mut E, kind: ActionKind, place: Place) {
        let segment = &self.segments[place.segment];
        let block = self.block(place);
        env.log(Action {
            kind,
            block: block.id,
            segment: segment.ordinal,
            stream: segment.stream,
            offset_bytes: block.address - segment.address,
            size_bytes: block.request,
            address: block.address,
        });
    }

    fn log_segment<E: Env>(&self, env: &mut E, kind: ActionKind, at: usize) {
        let segment = &self.segments[at];
        env.log(Action {
            kind,
            block: BlockId::NONE,
            segment: segment.ordinal,
            stream: segment.stream,
            offset_bytes: 0,
            size_bytes: segment.size,
            address: segment.address,
        });
    }

    /// Bytes of all blocks in one of these states.
    fn bytes_in(&self, states: &[BlockState]) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| states.contains(&block.state)).map(|block| block.size).sum()
    }
}

fn pool_of(size: u64) -> Pool {
    if size <= MIB { Pool::Small } else { Pool::Large }
}

impl Allocator for Model {
    const ADDRESSES_MATTER: bool = true;

    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle);
        }
        let size = rounded(request.size_bytes, &self.settings.roundup);
        let Some(place) = self.find_room(env, pool_of(size), size, request.stream) else {
            env.log(Action {
                kind: ActionKind::Oom,
                block: request.block,
                segment: u32::MAX,
                stream: request.stream,
                offset_bytes: 0,
                size_bytes: size,
                address: 0,
            });
            self.statistics.num_ooms += 1;
            return Err(OutOfMemory { size_bytes: size });
        };
        self.hand_out(env, place, size, request);
        Ok(self.block(place).handle)
    }

    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.free_requested(env, self.place_of(handle));
        self.complete(env, handle);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let place = self.place_of(handle);
        self.free_requested(env, place);
        self.block_mut(place).state = BlockState::Deferred;
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        self.flush(env);
    }

    fn levels(&self) -> Levels {
        Levels {
            allocated_bytes: self.bytes_in(&[BlockState::Allocated]),
            active_bytes: self.bytes_in(&[BlockState::Allocated, BlockState::Deferred]),
            reserved_bytes: self.reserved(),
        }
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let pool = pool_of(rounded(request.size_bytes, &self.settings.roundup));
        let stream_handle = self.stream_handle(request.stream);
        let holes = self.free_set(pool).into_iter().filter(|c| c.stream_handle == stream_handle);
        holes.map(|c| c.size).max().unwrap_or(0)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.settings.limit
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("segment_allocs", self.statistics.num_device_alloc as u64),
            ("segment_frees", self.statistics.num_device_free as u64),
            ("alloc_retries", self.statistics.num_alloc_retries as u64),
            ("ooms", self.statistics.num_ooms as u64),
        ]
    }

    fn torch_stats(&self) -> Option<Vec<(String, i64)>> {
        let max_split_size = i64::try_from(self.settings.max_split_size).unwrap_or(-1);
        Some(self.statistics.flat(max_split_size))
    }

    fn params(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut segments: Vec<&Segment> = self.segments.iter().collect();
        segments.sort_by_key(|segment| segment.address);
        for segment in segments {
            for block in &segment.blocks {
                visit(LayoutBlock {
                    block: block.id,
                    segment: segment.ordinal,
                    segment_address: segment.address,
                    segment_bytes: segment.size,
                    page_bytes: 0,
                    address: block.address,
                    size_bytes: block.size,
                    requested_bytes: if block.state == BlockState::Free {
                        0
                    } else {
                        block.request
                    },
                    stream: segment.stream,
                    pool: segment.pool as u32,
                    state: block.state,
                });
            }
        }
    }
}
