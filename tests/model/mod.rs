//! A slow, obvious model of PyTorch's CUDA caching allocator: an independent second opinion on the
//! crate's `caching`, written from the rules alone (`specs/pytorch_caching.md`, whose paragraphs
//! the comments name). There is no data structure but lists that are scanned from end to end.
//!
//! ```text
//!   segment       │ block │ block    │ block                │      obtained as a whole
//!   reservation   │ block │ block │ unmapped │ block │ unmapped │  mapped page by page
//! ```

pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod random;
pub(crate) mod settings;
mod statistics;

use std::collections::BTreeMap;

use fraglab::alloc::{
    Action, ActionKind, Allocator, BlockState, Env, Handle, LayoutBlock, Levels, OutOfMemory,
    Request,
};
use fraglab::device::{Device, PhysicalHandle};
use fraglab::trace::{self, PoolKind};
use fraglab::units::{BlockId, MIB, PoolId, SettingsId, StreamId};

use settings::{Options, Settings, round_up, rounded};
use statistics::{Kind, Stat, Statistics};

/// What the model knows from outside.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    /// The options at the start, and the memory limit.
    pub(crate) settings: Settings,
    /// The settings strings that come later.
    pub(crate) changes: Vec<Options>,
    pub(crate) pools: Vec<trace::Pool>,
    pub(crate) stream_handles: Vec<u64>,
    /// Total memory that the device reports.
    pub(crate) device_total_bytes: u64,
    /// Search once more after a flush, before the last device attempt: the remedy for V21.
    pub(crate) research_after_flush: bool,
}

/// A rule of the model changed on purpose: a comparison that does not see it proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Best fit does not count what a block can grow by (3.4).
    TailIgnored,
    /// Requests of ordinary memory take expandable blocks (3.4).
    ExpandableNotSkipped,
    /// Garbage collection does not count the ages of expandable blocks (3.5).
    ExpandableAgesIgnored,
    /// No pool helps out (3.3 step 6).
    NoOverflow,
    /// A pool that helps out gives expandable blocks too (3.3 step 6).
    OverflowGivesExpandable,
    /// Targeted release stops at an expandable block (3.3 step 7).
    TargetedReleaseStops,
    /// The flush works while a pool is entered (6.3).
    FlushInPools,
    /// Completions are looked at while a pool is entered (6.3).
    CompletionsInPools,
    /// Blocks of a pool without splits are cut (6.6).
    SplitsInNoSplit,
    /// The deletion of a `MemPool` returns no memory (6.4).
    DeletionReleasesNothing,
    /// Pools are released in the opposite order (3.3 step 8).
    PoolsReversed,
    /// Expandable memory is cut only where more than 1 MiB is left (3.8).
    ExpandableCutCoarse,
    /// The free block before an unmapped one is not counted as room (5.2).
    RoomWithoutPrevious,
    /// Pages mapped before a later one failed are given back (5.3).
    PartialMapUndone,
    /// Only blocks that begin and end at pages are unmapped (5.4).
    UnmapsWholeBlocksOnly,
    /// The page size of new reservations stays that of the first settings (5.1).
    PageOfFirstSettings,
    /// New settings strings reset nothing (7.1).
    NothingReset,
    /// No second search after the flush, though it is asked for.
    NoResearch,
    /// Pages of a map that failed are not given back (5.3).
    FailedMapLeaks,
    /// A segment that the device does not take back is forgotten.
    RefusedFreeForgotten,
    /// Pages that the device does not unmap count as unmapped.
    RefusedUnmapForgotten,
}

impl Mutation {
    /// Those that show on a device that takes everything back.
    pub(crate) const RULES: [Mutation; 19] = [
        Mutation::TailIgnored,
        Mutation::ExpandableNotSkipped,
        Mutation::ExpandableAgesIgnored,
        Mutation::NoOverflow,
        Mutation::OverflowGivesExpandable,
        Mutation::TargetedReleaseStops,
        Mutation::FlushInPools,
        Mutation::CompletionsInPools,
        Mutation::SplitsInNoSplit,
        Mutation::DeletionReleasesNothing,
        Mutation::PoolsReversed,
        Mutation::ExpandableCutCoarse,
        Mutation::RoomWithoutPrevious,
        Mutation::PartialMapUndone,
        Mutation::UnmapsWholeBlocksOnly,
        Mutation::PageOfFirstSettings,
        Mutation::NothingReset,
        Mutation::NoResearch,
        Mutation::FailedMapLeaks,
    ];
    /// Those that show where a device call fails.
    pub(crate) const FAULTS: [Mutation; 3] =
        [Mutation::FailedMapLeaks, Mutation::RefusedFreeForgotten, Mutation::RefusedUnmapForgotten];
}

/// How often the rare rules came to pass.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Met {
    /// Searches in which a block that can grow gave way to another.
    pub(crate) tail_steps: u64,
    /// Searches that passed over expandable blocks, since the option was off.
    pub(crate) expandable_skipped: u64,
    /// Passes of garbage collection over a pool with an unsplit expandable block.
    pub(crate) expandable_ages: u64,
    /// Segments that garbage collection returned.
    pub(crate) collected: u64,
    /// Segments that a targeted release returned.
    pub(crate) targeted: u64,
    /// Requests served by a pool that helps out.
    pub(crate) overflows: u64,
    /// Requests refused for want of a flush, as a pool was entered.
    pub(crate) flushes_missed: u64,
    /// Second searches after a flush that found a block.
    pub(crate) research_hits: u64,
    /// Attempts that failed with pages mapped, which stay.
    pub(crate) partial_maps: u64,
    /// Maps that failed with some of their pages created.
    pub(crate) pages_undone: u64,
    /// Segments and runs of pages that private pools gave back.
    pub(crate) pool_releases: u64,
    /// Runs of pages unmapped inside a block, so that a part stayed.
    pub(crate) unmaps_inside: u64,
    /// Reservations that the device did not take back.
    pub(crate) reservations_kept: u64,
    /// Whole blocks handed out in a pool without splits that would have been cut.
    pub(crate) unsplit: u64,
}

impl Met {
    pub(crate) fn by_name(&self) -> [(&'static str, u64); 14] {
        [
            ("tail_steps", self.tail_steps),
            ("expandable_skipped", self.expandable_skipped),
            ("expandable_ages", self.expandable_ages),
            ("collected", self.collected),
            ("targeted", self.targeted),
            ("overflows", self.overflows),
            ("flushes_missed", self.flushes_missed),
            ("research_hits", self.research_hits),
            ("partial_maps", self.partial_maps),
            ("pages_undone", self.pages_undone),
            ("pool_releases", self.pool_releases),
            ("unmaps_inside", self.unmaps_inside),
            ("reservations_kept", self.reservations_kept),
            ("unsplit", self.unsplit),
        ]
    }
}

/// A default pool, or that of a private pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pool {
    owner: Option<PoolId>,
    kind: Kind,
}

#[derive(Clone, Debug)]
struct Block {
    address: u64,
    size: u64,
    /// There is memory behind it; always so outside reservations. Unmapped blocks count as free.
    mapped: bool,
    state: BlockState,
    /// Of its last allocation.
    request: u64,
    id: BlockId,
    handle: Handle,
    /// The pool's search counter when it last became free.
    gc_base: u64,
}

impl Block {
    fn new(address: u64, size: u64, mapped: bool) -> Block {
        Block {
            address,
            size,
            mapped,
            state: BlockState::Free,
            request: 0,
            id: BlockId::NONE,
            handle: Handle::NONE,
            gc_base: 0,
        }
    }

    fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }
}

/// A segment or a reservation.
#[derive(Clone, Debug)]
struct Segment {
    ordinal: u32,
    address: u64,
    size: u64,
    pool: Pool,
    stream: StreamId,
    /// Size of a page of a reservation; 0 for a segment.
    page: u64,
    /// What is mapped in a reservation, by address.
    pages: BTreeMap<u64, PhysicalHandle>,
    /// In address order, without gaps.
    blocks: Vec<Block>,
}

impl Segment {
    fn is_expandable(&self) -> bool {
        self.page != 0
    }

    fn is_split(&self) -> bool {
        self.blocks.len() > 1
    }
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
    /// The segment's, which stays when others go.
    ordinal: u32,
    expandable: bool,
    /// With the unmapped block behind it.
    effective_size: u64,
}

/// What a malloc looks for.
#[derive(Clone, Copy, Debug)]
struct Want {
    pool: Pool,
    size: u64,
    stream: StreamId,
    /// Memory may be mapped for it, and expandable blocks serve it.
    expandable: bool,
}

/// The model.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    inputs: Inputs,
    settings: Settings,
    mutation: Option<Mutation>,
    segments: Vec<Segment>,
    segments_made: u32,
    handles_made: u32,
    /// Searches so far by pool, counted for garbage collection only.
    searches: BTreeMap<Pool, u64>,
    /// Pools entered and not left, innermost last.
    entered: Vec<PoolId>,
    /// Pools that help out, in the order in which they were first entered.
    overflow: Vec<PoolId>,
    /// Pools that nobody owns any more, in the order of their deletion.
    freeable: Vec<PoolId>,
    statistics: Statistics,
    failure: Option<String>,
    pub(crate) met: Met,
}

impl Model {
    pub(crate) fn new(inputs: Inputs) -> Model {
        Model {
            settings: inputs.settings.clone(),
            inputs,
            mutation: None,
            segments: Vec::new(),
            segments_made: 0,
            handles_made: 0,
            searches: BTreeMap::new(),
            entered: Vec::new(),
            overflow: Vec::new(),
            freeable: Vec::new(),
            statistics: Statistics::default(),
            failure: None,
            met: Met::default(),
        }
    }

    /// The model with a rule changed.
    pub(crate) fn mutated(mut self, mutation: Mutation) -> Model {
        self.mutation = Some(mutation);
        self
    }

    fn is_mutated(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// The options in force.
    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    fn block(&self, place: Place) -> &Block {
        &self.segments[place.segment].blocks[place.block]
    }

    fn block_mut(&mut self, place: Place) -> &mut Block {
        &mut self.segments[place.segment].blocks[place.block]
    }

    /// The block that `wanted` picks.
    fn find_block(&self, wanted: impl Fn(&Segment, &Block) -> bool) -> Option<Place> {
        for (segment, of_segment) in self.segments.iter().enumerate() {
            if let Some(block) = of_segment.blocks.iter().position(|b| wanted(of_segment, b)) {
                return Some(Place { segment, block });
            }
        }
        None
    }

    fn place_of(&self, handle: Handle) -> Place {
        self.find_block(|_, block| !block.is_free() && block.handle == handle)
            .unwrap_or_else(|| panic!("{handle:?} is no block of the model"))
    }

    fn place_of_segment(&self, ordinal: u32) -> usize {
        self.segments.iter().position(|s| s.ordinal == ordinal).expect("is there")
    }

    fn stream_handle(&self, stream: StreamId) -> u64 {
        self.inputs.stream_handles[stream.index()]
    }

    fn searches_of(&self, pool: Pool) -> u64 {
        self.searches.get(&pool).copied().unwrap_or(0)
    }

    /// Segments and mapped pages.
    fn reserved(&self) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.mapped).map(|block| block.size).sum()
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

    /// The pool of a rounded size now: that of the innermost pool entered, or a default one.
    fn pool_for(&self, size: u64) -> Pool {
        Pool { owner: self.entered.last().copied(), kind: kind_of(size) }
    }

    /// The free set of a pool in its order (3.2).
    fn free_set(&self, pool: Pool) -> Vec<Candidate> {
        let mut set = Vec::new();
        for (segment, of_segment) in self.segments.iter().enumerate() {
            if of_segment.pool != pool {
                continue;
            }
            for (block, b) in of_segment.blocks.iter().enumerate() {
                if b.is_free() && b.mapped {
                    let next = of_segment.blocks.get(block + 1).filter(|next| !next.mapped);
                    set.push(Candidate {
                        stream_handle: self.stream_handle(of_segment.stream),
                        size: b.size,
                        address: b.address,
                        place: Place { segment, block },
                        ordinal: of_segment.ordinal,
                        expandable: of_segment.is_expandable(),
                        effective_size: b.size + next.map_or(0, |next| next.size),
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
    fn search(&mut self, want: Want) -> Option<Place> {
        if self.collects_garbage() {
            *self.searches.entry(want.pool).or_default() += 1;
        }
        let key = (self.stream_handle(want.stream), want.size);
        let set = self.free_set(want.pool);
        let of_stream = |at: usize| set.get(at).filter(|c| c.stream_handle == key.0);
        let mut at = set.iter().position(|c| (c.stream_handle, c.size) >= key)?;
        let first = of_stream(at)?;
        if first.expandable && want.expandable && !self.is_mutated(Mutation::TailIgnored) {
            while set[at].expandable
                && of_stream(at + 1).is_some_and(|c| c.effective_size < set[at].effective_size)
            {
                at += 1;
            }
            self.met.tail_steps += u64::from(set[at].address != first.address);
        }
        if first.expandable && !want.expandable && !self.is_mutated(Mutation::ExpandableNotSkipped)
        {
            while of_stream(at)?.expandable {
                at += 1;
            }
            self.met.expandable_skipped += 1;
        }
        let candidate = of_stream(at)?;
        if !self.is_oversize(want.size) && self.is_oversize(candidate.size) {
            return None;
        }
        let slack = self.settings.max_non_split_rounding;
        if self.is_oversize(want.size) && candidate.size >= want.size.saturating_add(slack) {
            return None;
        }
        Some(candidate.place)
    }

    /// Garbage collection (3.5): in the default large pool, whatever the request.
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
        let pool = Pool { owner: None, kind: Kind::Large };
        let mut reclaimed = 0;
        loop {
            let mut unsplit = self.free_set(pool);
            unsplit.retain(|c| !self.segments[c.place.segment].is_split());
            if self.is_mutated(Mutation::ExpandableAgesIgnored) {
                unsplit.retain(|c| !c.expandable);
            }
            if reclaimed >= target || unsplit.is_empty() {
                return;
            }
            self.met.expandable_ages += u64::from(unsplit.iter().any(|c| c.expandable));
            let searches = self.searches_of(pool);
            let ages: Vec<u64> =
                unsplit.iter().map(|c| searches - self.block(c.place).gc_base).collect();
            let average = ages.iter().sum::<u64>() as f64 / ages.len() as f64;
            let before = reclaimed;
            for (candidate, age) in unsplit.into_iter().zip(ages) {
                if !candidate.expandable
                    && age as f64 >= average
                    && self.release(env, candidate.ordinal)
                {
                    reclaimed += candidate.size;
                    self.met.collected += 1;
                }
            }
            if reclaimed == before {
                return;
            }
        }
    }

    /// A device attempt (3.3 step 5).
    fn attempt<E: Env>(&mut self, env: &mut E, want: Want) -> Option<Place> {
        let segment_size = self.segment_size(want.size);
        if self.settings.limit.is_some_and(|limit| self.reserved() + segment_size > limit) {
            return None;
        }
        if want.expandable {
            self.grow(env, want)
        } else {
            self.obtain(env, want.pool, segment_size, want.stream)
        }
    }

    /// A new ordinary segment.
    fn obtain<E: Env>(
        &mut self,
        env: &mut E,
        pool: Pool,
        size: u64,
        stream: StreamId,
    ) -> Option<Place> {
        let address = env.device().malloc(size).ok()?;
        let place = self.push_segment(pool, stream, address, size, 0);
        self.statistics.change(Stat::Segment, pool.kind, 1);
        self.statistics.change(Stat::ReservedBytes, pool.kind, size as i64);
        self.statistics.num_device_alloc += 1;
        if self.is_oversize(size) {
            self.statistics.oversize_segments.change(1);
        }
        self.log_segment(env, ActionKind::SegmentAlloc, place.segment, address, size);
        Some(place)
    }

    fn push_segment(
        &mut self,
        pool: Pool,
        stream: StreamId,
        address: u64,
        size: u64,
        page: u64,
    ) -> Place {
        let blocks = vec![Block::new(address, size, page == 0)];
        let ordinal = self.segments_made;
        let pages = BTreeMap::new();
        self.segments_made += 1;
        self.segments.push(Segment { ordinal, address, size, pool, stream, page, pages, blocks });
        Place { segment: self.segments.len() - 1, block: 0 }
    }

    /// Memory of an expandable segment (5.3).
    fn grow<E: Env>(&mut self, env: &mut E, want: Want) -> Option<Place> {
        let mut place = match self.find_addresses(want) {
            Some(place) => place,
            None => self.reserve(env, want)?,
        };
        let mut mapped = Vec::new();
        if !self.block(place).mapped {
            let bytes = want.size.min(self.block(place).size);
            mapped.push(self.block(place).address);
            place = self.map(env, place, bytes)?;
        }
        while self.block(place).size < want.size {
            let missing = want.size - self.block(place).size;
            let next = Place { block: place.block + 1, ..place };
            let left = self.segments[next.segment].blocks.get(next.block)?;
            let (address, bytes) = (left.address, missing.min(left.size));
            match self.map(env, next, bytes) {
                Some(merged) => place = merged,
                None => {
                    self.met.partial_maps += u64::from(!mapped.is_empty());
                    if self.is_mutated(Mutation::PartialMapUndone) && !mapped.is_empty() {
                        self.unmap(env, self.block(place).address);
                    }
                    return None;
                }
            }
            mapped.push(address);
        }
        Some(place)
    }

    /// Free addresses that hold the size, at or just before an unmapped block (5.2).
    fn find_addresses(&self, want: Want) -> Option<Place> {
        let mut found: Vec<(u64, Place)> = Vec::new();
        for (segment, s) in self.segments.iter().enumerate() {
            if s.pool != want.pool || s.stream != want.stream {
                continue;
            }
            for unmapped in (0..s.blocks.len()).filter(|&at| !s.blocks[at].mapped) {
                let with_previous = unmapped > 0
                    && s.blocks[unmapped - 1].is_free()
                    && !self.is_mutated(Mutation::RoomWithoutPrevious);
                let start = if with_previous { unmapped - 1 } else { unmapped };
                let run = s.blocks[start..].iter().take_while(|block| block.is_free());
                if run.map(|block| block.size).sum::<u64>() >= want.size {
                    found.push((s.blocks[unmapped].address, Place { segment, block: start }));
                }
            }
        }
        found.into_iter().min_by_key(|&(address, _)| address).map(|(_, place)| place)
    }

    /// A new reservation, nothing of it mapped (5.1).
    fn reserve<E: Env>(&mut self, env: &mut E, want: Want) -> Option<Place> {
        let page = match want.pool.kind {
            Kind::Small => 2 * MIB,
            Kind::Large if self.is_mutated(Mutation::PageOfFirstSettings) => {
                self.inputs.settings.large_segment_size
            }
            Kind::Large => self.settings.large_segment_size,
        };
        let total = self.inputs.device_total_bytes;
        let size = round_up(total + total / 8, page);
        let address = env.device().address_reserve(size).ok()?;
        Some(self.push_segment(want.pool, want.stream, address, size, page))
    }

    /// Maps `bytes` at the start of an unmapped block, rounded up to pages; gives the free block
    /// that holds them (5.3).
    fn map<E: Env>(&mut self, env: &mut E, place: Place, bytes: u64) -> Option<Place> {
        let segment = &self.segments[place.segment];
        let (pool, base) = (segment.pool, segment.address);
        let start = self.block(place).address;
        let page = segment.page;
        assert_eq!((start - base) % page, 0, "unmapped blocks begin at pages");
        let bytes = round_up(start - base + bytes, page) - (start - base);
        let pages = self.map_pages(env.device(), start, bytes, page)?;
        let segment = &mut self.segments[place.segment];
        segment.pages.extend(pages);
        let block = &mut segment.blocks[place.block];
        let rest = block.size - bytes;
        *block = Block::new(start, bytes, true);
        if rest > 0 {
            segment.blocks.insert(place.block + 1, Block::new(start + bytes, rest, false));
        }
        let place = self.merge(place).0;
        self.block_mut(place).gc_base = self.searches_of(pool);
        self.statistics.change(Stat::ReservedBytes, pool.kind, bytes as i64);
        self.statistics.num_device_alloc += 1;
        self.log_segment(env, ActionKind::SegmentMap, place.segment, start, bytes);
        Some(place)
    }

    /// The device calls of one map; a failure undoes all of them.
    fn map_pages<D: Device>(
        &mut self,
        device: &mut D,
        start: u64,
        bytes: u64,
        page: u64,
    ) -> Option<Vec<(u64, PhysicalHandle)>> {
        let mut pages = Vec::new();
        let mut mapped = 0;
        let result = (|| {
            for address in (start..start + bytes).step_by(page as usize) {
                pages.push((address, device.create(page)?));
            }
            for &(address, handle) in &pages {
                device.map(address, handle)?;
                mapped += page;
            }
            device.set_access(start, bytes)
        })();
        if result.is_ok() {
            return Some(pages);
        }
        self.met.pages_undone += u64::from(!pages.is_empty());
        if mapped > 0 {
            device.unmap(start, mapped).expect("just mapped");
        }
        if self.is_mutated(Mutation::FailedMapLeaks) {
            return None;
        }
        for (_, handle) in pages {
            // A handle that the device does not take is lost, and the memory with it.
            let _ = device.release(handle);
        }
        None
    }

    /// Unmaps the full pages of a free mapped block (5.4).
    fn unmap<E: Env>(&mut self, env: &mut E, address: u64) {
        let place = self.find_block(|_, b| b.address == address).expect("is there");
        let segment = &self.segments[place.segment];
        let (base, pool) = (segment.address, segment.pool);
        let size = self.block(place).size;
        let first = base + round_up(address - base, segment.page);
        let end = base + (address + size - base) / segment.page * segment.page;
        let inside = (first, end) != (address, address + size);
        if first >= end || inside && self.is_mutated(Mutation::UnmapsWholeBlocksOnly) {
            return;
        }
        // A device that does not unmap leaves everything as it is.
        if env.device().unmap(first, end - first).is_err()
            && !self.is_mutated(Mutation::RefusedUnmapForgotten)
        {
            return;
        }
        let segment = &mut self.segments[place.segment];
        for (_, &handle) in segment.pages.range(first..end) {
            // As in `map_pages`.
            let _ = env.device().release(handle);
        }
        segment.pages.retain(|&page, _| page < first || end <= page);
        let parts = [(address, first, true), (first, end, false), (end, address + size, true)];
        let mut blocks: Vec<Block> = parts
            .into_iter()
            .filter(|(from, to, _)| from < to)
            .map(|(from, to, mapped)| Block::new(from, to - from, mapped))
            .collect();
        let searches = self.searches_of(pool);
        for block in &mut blocks {
            block.gc_base = searches;
        }
        let middle = usize::from(address < first);
        self.segments[place.segment].blocks.splice(place.block..=place.block, blocks);
        self.merge(Place { block: place.block + middle, ..place });
        self.statistics.change(Stat::ReservedBytes, pool.kind, -((end - first) as i64));
        self.statistics.num_device_free += 1;
        self.met.unmaps_inside += u64::from(inside);
        self.met.pool_releases += u64::from(pool.owner.is_some());
        self.log_segment(env, ActionKind::SegmentUnmap, place.segment, first, end - first);
        let segment = &self.segments[place.segment];
        if !segment.is_split() {
            if env.device().address_free(base, segment.size).is_ok() {
                self.segments.remove(place.segment);
            } else {
                self.met.reservations_kept += 1;
            }
        }
    }

    /// Joins a free block with its free neighbours, mapped with mapped and unmapped with unmapped
    /// (4.5). Gives its new place, and the count and bytes of what it absorbed.
    fn merge(&mut self, place: Place) -> (Place, i64, i64) {
        let blocks = &mut self.segments[place.segment].blocks;
        let mapped = blocks[place.block].mapped;
        let joins = |block: &Block| block.is_free() && block.mapped == mapped;
        let (mut at, mut count, mut bytes) = (place.block, 0, 0);
        // The neighbour above first, so that the place of the block stays what it is.
        if blocks.get(at + 1).is_some_and(joins) {
            let next = blocks.remove(at + 1);
            blocks[at].size += next.size;
            count += 1;
            bytes += next.size as i64;
        }
        if at > 0 && joins(&blocks[at - 1]) {
            let previous = blocks.remove(at - 1);
            at -= 1;
            blocks[at].address = previous.address;
            blocks[at].size += previous.size;
            count += 1;
            bytes += previous.size as i64;
        }
        (Place { block: at, ..place }, count, bytes)
    }

    /// Gives a segment back to the device; whether that took it.
    fn release<E: Env>(&mut self, env: &mut E, ordinal: u32) -> bool {
        let at = self.place_of_segment(ordinal);
        assert_eq!(self.segments[at].blocks.len(), 1, "a split block is never released");
        let Segment { address, size, pool, .. } = self.segments[at];
        if env.device().free(address).is_err() && !self.is_mutated(Mutation::RefusedFreeForgotten) {
            return false;
        }
        self.log_segment(env, ActionKind::SegmentFree, at, address, size);
        self.segments.remove(at);
        self.statistics.change(Stat::Segment, pool.kind, -1);
        self.statistics.change(Stat::ReservedBytes, pool.kind, -(size as i64));
        self.statistics.num_device_free += 1;
        if self.is_oversize(size) {
            self.statistics.oversize_segments.change(-1);
        }
        self.met.pool_releases += u64::from(pool.owner.is_some());
        true
    }

    /// Targeted release (3.3 step 7): whether the device is worth another attempt.
    fn release_oversize<E: Env>(&mut self, env: &mut E, want: Want) -> bool {
        let key = want.size.max(self.settings.max_split_size);
        let stream_handle = self.stream_handle(want.stream);
        let set = self.free_set(want.pool);
        let at = set
            .iter()
            .position(|c| (c.stream_handle, c.size) >= (stream_handle, key))
            .unwrap_or(set.len());
        if let Some(one) = set.get(at)
            && one.stream_handle == stream_handle
            && !one.expandable
        {
            return self.release_one(env, one);
        }
        let mut released = 0;
        for candidate in set[..at].iter().rev() {
            let goes_on = released < key
                && self.is_oversize(candidate.size)
                && candidate.stream_handle == stream_handle;
            if !goes_on {
                break;
            }
            if candidate.expandable {
                if self.is_mutated(Mutation::TargetedReleaseStops) {
                    break;
                }
            } else if self.release_one(env, candidate) {
                released += candidate.size;
            }
        }
        released >= key
    }

    /// Upstream does not look whether the block is split; what then happens is not defined.
    fn release_one<E: Env>(&mut self, env: &mut E, candidate: &Candidate) -> bool {
        if self.segments[self.place_of_segment(candidate.ordinal)].is_split() {
            self.failure = Some("a split segment was to be released".to_owned());
            return false;
        }
        let released = self.release(env, candidate.ordinal);
        self.met.targeted += u64::from(released);
        released
    }

    /// Releases a pool (3.7): its unsplit segments, then the full pages of its expandable blocks.
    fn release_pool<E: Env>(&mut self, env: &mut E, pool: Pool) {
        let (expandable, ordinary): (Vec<Candidate>, Vec<Candidate>) =
            self.free_set(pool).into_iter().partition(|c| c.expandable);
        for candidate in ordinary {
            if !self.segments[self.place_of_segment(candidate.ordinal)].is_split() {
                self.release(env, candidate.ordinal);
            }
        }
        for candidate in expandable {
            self.unmap(env, candidate.address);
        }
    }

    /// Waits for all events, then releases the default pools and those that nobody owns (3.3 step
    /// 8, 3.7, 4.4).
    fn flush<E: Env>(&mut self, env: &mut E) {
        self.statistics.num_sync_all_streams += 1;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
        }
        for kind in [Kind::Large, Kind::Small] {
            self.release_pool(env, Pool { owner: None, kind });
        }
        let mut freeable = self.freeable.clone();
        if self.is_mutated(Mutation::PoolsReversed) {
            freeable.reverse();
        }
        for owner in freeable {
            for kind in [Kind::Small, Kind::Large] {
                self.release_pool(env, Pool { owner: Some(owner), kind });
            }
        }
    }

    /// Steps 3 to 8 of 3.3: a free block, and what was wanted in the end.
    fn find_room<E: Env>(&mut self, env: &mut E, want: Want) -> Option<(Place, Want)> {
        if let Some(place) = self.search(want) {
            return Some((place, want));
        }
        self.collect_garbage(env);
        if let Some(place) = self.attempt(env, want) {
            return Some((place, want));
        }
        if want.pool.owner.is_none() && !self.is_mutated(Mutation::NoOverflow) {
            for owner in self.overflow.clone() {
                let pool = Pool { owner: Some(owner), ..want.pool };
                let gives_expandable = self.is_mutated(Mutation::OverflowGivesExpandable);
                let expandable = want.expandable && gives_expandable;
                let other = Want { pool, expandable, ..want };
                if let Some(place) = self.search(other) {
                    self.met.overflows += 1;
                    return Some((place, other));
                }
            }
        }
        if self.settings.max_split_size != u64::MAX
            && self.release_oversize(env, want)
            && let Some(place) = self.attempt(env, want)
        {
            return Some((place, want));
        }
        if !self.entered.is_empty() && !self.is_mutated(Mutation::FlushInPools) {
            self.met.flushes_missed += 1;
            return None;
        }
        self.flush(env);
        self.statistics.num_alloc_retries += 1;
        if self.inputs.research_after_flush
            && !self.is_mutated(Mutation::NoResearch)
            && let Some(place) = self.search(want)
        {
            self.met.research_hits += 1;
            return Some((place, want));
        }
        self.attempt(env, want).map(|place| (place, want))
    }

    /// Whether a block is cut (3.8).
    fn splits(&mut self, want: Want, block_size: u64) -> bool {
        let rest = block_size - want.size;
        let fine = want.pool.kind == Kind::Small
            || want.expandable && !self.is_mutated(Mutation::ExpandableCutCoarse);
        let cut =
            if fine { rest >= 512 } else { want.size < self.settings.max_split_size && rest > MIB };
        let no_split =
            want.pool.owner.is_some_and(|owner| self.inputs.pools[owner.index()].no_split);
        if no_split && !self.is_mutated(Mutation::SplitsInNoSplit) {
            self.met.unsplit += u64::from(cut);
            return false;
        }
        cut
    }

    /// Step 10 of 3.3.
    fn hand_out<E: Env>(&mut self, env: &mut E, place: Place, want: Want, request: Request) {
        let pool = want.pool;
        let was_split = self.segments[place.segment].is_split();
        let ordinary = !self.segments[place.segment].is_expandable();
        let whole = self.block(place).size;
        if self.splits(want, whole) {
            let rest_size = whole - want.size;
            let mut rest = Block::new(self.block(place).address + want.size, rest_size, true);
            rest.gc_base = self.searches_of(pool);
            self.segments[place.segment].blocks.insert(place.block + 1, rest);
            self.block_mut(place).size = want.size;
            if ordinary && was_split {
                let bytes = -(want.size as i64);
                self.statistics.change(Stat::InactiveSplitBytes, pool.kind, bytes);
            } else if ordinary {
                self.statistics.change(Stat::InactiveSplit, pool.kind, 1);
                self.statistics.change(Stat::InactiveSplitBytes, pool.kind, rest_size as i64);
            }
        } else if ordinary && was_split {
            self.statistics.change(Stat::InactiveSplitBytes, pool.kind, -(whole as i64));
            self.statistics.change(Stat::InactiveSplit, pool.kind, -1);
        }
        let handle = Handle(self.handles_made);
        self.handles_made += 1;
        let block = self.block_mut(place);
        block.state = BlockState::Allocated;
        block.request = request.size_bytes;
        block.id = request.block;
        block.handle = handle;
        let given = block.size;
        self.statistics.change(Stat::Allocation, pool.kind, 1);
        self.statistics.change(Stat::AllocatedBytes, pool.kind, given as i64);
        self.statistics.change(Stat::Active, pool.kind, 1);
        self.statistics.change(Stat::ActiveBytes, pool.kind, given as i64);
        self.statistics.change(Stat::RequestedBytes, pool.kind, request.size_bytes as i64);
        if self.is_oversize(given) {
            self.statistics.oversize_allocations.change(1);
        }
        self.log_block(env, ActionKind::Alloc, place);
    }

    /// What every free begins with (4.2, 1 to 3).
    fn free_requested<E: Env>(&mut self, env: &mut E, place: Place) {
        let kind = self.segments[place.segment].pool.kind;
        let size = self.block(place).size;
        self.statistics.change(Stat::Allocation, kind, -1);
        self.statistics.change(Stat::AllocatedBytes, kind, -(size as i64));
        self.log_block(env, ActionKind::FreeRequested, place);
        if self.is_oversize(size) {
            self.statistics.oversize_allocations.change(-1);
        }
    }

    /// The memory of a freed block becomes reusable (4.5, 8).
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let place = self.place_of(handle);
        self.log_block(env, ActionKind::FreeCompleted, place);
        let Block { address, size, request, .. } = *self.block(place);
        *self.block_mut(place) = Block::new(address, size, true);
        let (place, absorbed, absorbed_bytes) = self.merge(place);
        let segment = &self.segments[place.segment];
        let (pool, expandable) = (segment.pool, segment.is_expandable());
        let (mut count, mut bytes) = (-absorbed, -absorbed_bytes);
        if segment.is_split() {
            count += 1;
            bytes += self.block(place).size as i64;
        }
        self.block_mut(place).gc_base = self.searches_of(pool);
        if !expandable {
            self.statistics.change(Stat::InactiveSplit, pool.kind, count);
            self.statistics.change(Stat::InactiveSplitBytes, pool.kind, bytes);
        }
        self.statistics.change(Stat::Active, pool.kind, -1);
        self.statistics.change(Stat::ActiveBytes, pool.kind, -(size as i64));
        self.statistics.change(Stat::RequestedBytes, pool.kind, -(request as i64));
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

    fn log_segment<E: Env>(
        &self,
        env: &mut E,
        kind: ActionKind,
        at: usize,
        address: u64,
        size: u64,
    ) {
        let segment = &self.segments[at];
        env.log(Action {
            kind,
            block: BlockId::NONE,
            segment: segment.ordinal,
            stream: segment.stream,
            offset_bytes: address - segment.address,
            size_bytes: size,
            address,
        });
    }

    /// Bytes of all blocks in one of these states.
    fn bytes_in(&self, states: &[BlockState]) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| states.contains(&block.state)).map(|block| block.size).sum()
    }
}

fn kind_of(size: u64) -> Kind {
    if size <= MIB { Kind::Small } else { Kind::Large }
}

/// Small and large of the default pools, then of the private pools.
fn pool_number(pool: Pool) -> u32 {
    let owner = pool.owner.map_or(0, |owner| owner.0 + 1);
    2 * owner + pool.kind as u32
}

impl Allocator for Model {
    const ADDRESSES_MATTER: bool = true;

    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        if self.entered.is_empty() || self.is_mutated(Mutation::CompletionsInPools) {
            while let Some(handle) = env.next_completed() {
                self.complete(env, handle);
            }
        }
        let size = rounded(request.size_bytes, &self.settings.roundup);
        let want = Want {
            pool: self.pool_for(size),
            size,
            stream: request.stream,
            expandable: self.settings.expandable,
        };
        let Some((place, want)) = self.find_room(env, want) else {
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
        self.hand_out(env, place, want, request);
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
        // PyTorch asserts that no pool is entered.
        if self.entered.is_empty() {
            self.flush(env);
        }
    }

    fn change_settings<E: Env>(&mut self, _env: &mut E, settings: SettingsId) {
        let before = self.settings.clone();
        self.settings.give(self.inputs.changes[settings.index()]);
        if self.is_mutated(Mutation::NothingReset) {
            self.settings.gc_threshold = before.gc_threshold;
            self.settings.roundup = before.roundup;
            self.settings.max_split_size = before.max_split_size;
        }
    }

    fn pool_enter<E: Env>(&mut self, _env: &mut E, pool: PoolId) {
        self.entered.push(pool);
        self.freeable.retain(|&other| other != pool);
        if self.inputs.pools[pool.index()].use_on_oom && !self.overflow.contains(&pool) {
            self.overflow.push(pool);
        }
    }

    fn pool_leave<E: Env>(&mut self, _env: &mut E, pool: PoolId) {
        assert_eq!(self.entered.pop(), Some(pool), "the innermost pool is left");
    }

    fn pool_delete<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        self.freeable.push(pool);
        if self.inputs.pools[pool.index()].kind == PoolKind::Capture {
            return;
        }
        self.overflow.retain(|&other| other != pool);
        self.statistics.num_sync_all_streams += 1;
        let of_pool = self.segments.iter().filter(|segment| segment.pool.owner == Some(pool));
        let blocks = of_pool.flat_map(|segment| &segment.blocks);
        let handles: Vec<Handle> = blocks.map(|block| block.handle).collect();
        while let Some(handle) = env.wait_completed_of(&mut |handle| handles.contains(&handle)) {
            self.complete(env, handle);
        }
        if self.is_mutated(Mutation::DeletionReleasesNothing) {
            return;
        }
        for kind in [Kind::Small, Kind::Large] {
            self.release_pool(env, Pool { owner: Some(pool), kind });
        }
    }

    fn levels(&self) -> Levels {
        Levels {
            allocated_bytes: self.bytes_in(&[BlockState::Allocated]),
            active_bytes: self.bytes_in(&[BlockState::Allocated, BlockState::Deferred]),
            reserved_bytes: self.reserved(),
        }
    }

    fn pool_of(&self, request: Request) -> u32 {
        pool_number(self.pool_for(rounded(request.size_bytes, &self.settings.roundup)))
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let pool = self.pool_for(rounded(request.size_bytes, &self.settings.roundup));
        let stream_handle = self.stream_handle(request.stream);
        let set = self.free_set(pool).into_iter();
        set.filter(|c| c.stream_handle == stream_handle)
            .filter(|c| self.settings.expandable || !c.expandable)
            .map(|c| c.size)
            .max()
            .unwrap_or(0)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.settings.limit
    }

    fn failure(&self) -> Option<String> {
        self.failure.clone()
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
        let at_start = self.inputs.settings.max_split_size;
        Some(self.statistics.flat(i64::try_from(at_start).unwrap_or(-1)))
    }

    fn params(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut segments: Vec<&Segment> = self.segments.iter().collect();
        segments.sort_by_key(|segment| segment.address);
        for segment in segments {
            for block in segment.blocks.iter().filter(|block| block.mapped) {
                visit(LayoutBlock {
                    block: block.id,
                    segment: segment.ordinal,
                    segment_address: segment.address,
                    segment_bytes: segment.size,
                    page_bytes: segment.page,
                    address: block.address,
                    size_bytes: block.size,
                    requested_bytes: block.request,
                    stream: segment.stream,
                    pool: pool_number(segment.pool),
                    state: block.state,
                });
            }
        }
    }
}
