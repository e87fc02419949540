//! The calls of the program, and the books: what both policies share.
//!
//! ```text
//!   malloc ─> round ─> policy finds ─┬─ a primitive block ─> cut, busy ────> Handle(block)
//!                                    └─ a stitched block, its parts busy ──> Handle(top bit, id)
//!   free ───> its blocks are free and merged; a stitched block stays, idle
//! ```
//!
//! A handle names a primitive block, or a stitched one: then its top bit is set.

use super::blocks::Block;
use super::chunks::{CHUNK_BYTES, Chunks};
use super::config::{Config, Policy};
use super::idle::IdleSet;
use super::segments::{Remains, Segment};
use super::stitched::Stitched;
use crate::alloc::free_set::FreeSet;
use crate::alloc::spec::{Params, SpecError};
use crate::alloc::{
    ALIGNMENT_BYTES, Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle,
    LayoutBlock, Levels, OutOfMemory, Request,
};
use crate::units::{BlockId, MIB, StreamId};

/// Largest size of the small pool (spec 2.1).
pub(super) const SMALL_SIZE_BYTES: u64 = MIB;
/// The largest request, as PyTorch's.
const LARGEST_REQUEST_BYTES: u64 = (1 << 60) - 1;
/// Set in handles of stitched blocks.
const STITCHED: u32 = 1 << 31;

/// No block, no segment.
pub(super) const NONE: u32 = u32::MAX;

/// Small pool, large pool: as layouts number them.
pub(super) const SMALL: u32 = 0;
pub(super) const LARGE: u32 = 1;

/// What was done so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) segment_allocs: u64,
    pub(super) segment_frees: u64,
    pub(super) alloc_retries: u64,
    pub(super) ooms: u64,
    pub(super) device_syncs: u64,
    /// Stitched blocks made.
    pub(super) stitches: u64,
    /// Stitched blocks handed out once more.
    pub(super) stitch_reuses: u64,
    /// Stitched blocks destroyed.
    pub(super) stitch_evictions: u64,
    pub(super) stitched_bytes_peak: u64,
    /// Bytes of stitched blocks that the shipped code would forget to take off its sum (B8).
    pub(super) forgotten_bytes: u64,
    /// Large requests by the state in which the paper's search ended: S1 to S5.
    pub(super) states: [u64; 5],
}

/// GMLake.
#[derive(Clone, Debug)]
pub struct Gmlake {
    pub(super) config: Config,
    pub(super) limit_bytes: Option<u64>,
    pub(super) blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    pub(super) spare: Vec<u32>,
    pub(super) segments: Vec<Segment>,
    pub(super) spare_segments: Vec<u32>,
    pub(super) chunks: Chunks,
    /// Free primitive blocks by [`set_of`].
    pub(super) free: Vec<FreeSet>,
    pub(super) stitched: Vec<Stitched>,
    pub(super) spare_stitched: Vec<u32>,
    /// Stitched blocks in nobody's hands by stream, whether their chunks are free or not.
    pub(super) idle: Vec<IdleSet>,
    /// Addresses of all stitched blocks in bytes.
    pub(super) stitched_bytes: u64,
    /// What the device did not take back.
    pub(super) remains: Vec<Remains>,
    /// Streams in ascending order of their handles.
    pub(super) streams: Vec<StreamId>,
    /// Handles of the streams, by [`StreamId`].
    pub(super) stream_handles: Vec<u64>,
    /// Number of frees so far: stands for the event ids of spec 1.2.
    pub(super) clock: u64,
    /// Whether ages of free blocks matter: there is a limit and a threshold.
    pub(super) collects_garbage: bool,
    /// Searches of the small and the large pool, counted while ages matter.
    pub(super) searches: [u32; 2],
    /// Segments and stitched blocks ever made.
    pub(super) ordinals: u32,
    pub(super) levels: Levels,
    pub(super) counters: Counters,
}

/// The free set of a stream and kind of pool.
#[inline]
pub(super) fn set_of(stream: StreamId, kind: u32) -> u32 {
    stream.0 * 2 + kind
}

/// The kind of pool that serves a rounded size.
#[inline]
pub(super) fn kind_for(size_bytes: u64) -> u32 {
    if size_bytes <= SMALL_SIZE_BYTES { SMALL } else { LARGE }
}

/// The kind of pool behind a set.
#[inline]
pub(super) fn kind_of(set: u32) -> u32 {
    set & 1
}

/// The stream behind a set.
#[inline]
pub(super) fn stream_of(set: u32) -> StreamId {
    StreamId(set / 2)
}

/// What a search found for a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    /// A primitive block in no set, that may be larger than asked.
    Primitive(u32),
    /// A stitched block whose chunks are busy for this request already.
    Stitched(u32),
}

impl Gmlake {
    /// Builds the allocator.
    ///
    /// # Errors
    /// A value that is not accepted, and a parameter that the policy does not know.
    pub(super) fn build(
        mut params: Params,
        inputs: &BuildInputs,
        policy: Policy,
    ) -> Result<Gmlake, SpecError> {
        let config = Config::take(&mut params, policy)?;
        params.finish()?;
        let limit_bytes = inputs.limit_bytes.or(inputs.recorded_limit_bytes);
        let mut streams: Vec<StreamId> =
            (0..inputs.stream_handles.len() as u32).map(StreamId).collect();
        streams.sort_by_key(|stream| inputs.stream_handles[stream.index()]);
        Ok(Gmlake {
            collects_garbage: limit_bytes.is_some()
                && config.torch.garbage_collection_threshold > 0.0,
            limit_bytes,
            config,
            blocks: Vec::new(),
            spare: Vec::new(),
            segments: Vec::new(),
            spare_segments: Vec::new(),
            chunks: Chunks::default(),
            free: vec![FreeSet::default(); streams.len() * 2],
            stitched: Vec::new(),
            spare_stitched: Vec::new(),
            idle: vec![IdleSet::default(); streams.len()],
            stitched_bytes: 0,
            remains: Vec::new(),
            streams,
            stream_handles: inputs.stream_handles.clone(),
            clock: 0,
            searches: [0; 2],
            ordinals: 0,
            levels: Levels::default(),
            counters: Counters::default(),
        })
    }

    /// Makes room for one more stream.
    pub(super) fn add_stream(&mut self, stream: StreamId, handle: u64) {
        if stream.index() != self.stream_handles.len() {
            return;
        }
        let handles = &self.stream_handles;
        let place = self.streams.partition_point(|other| handles[other.index()] <= handle);
        self.streams.insert(place, stream);
        self.stream_handles.push(handle);
        self.free.resize_with(self.streams.len() * 2, FreeSet::default);
        self.idle.resize_with(self.streams.len(), IdleSet::default);
    }

    /// The next number for a segment or a stitched block.
    pub(super) fn next_ordinal(&mut self) -> u32 {
        let ordinal = self.ordinals;
        self.ordinals = self.ordinals.wrapping_add(1);
        ordinal
    }

    /// Hands out a primitive block that is in no set; splits it if the rules say so.
    #[inline]
    pub(super) fn hand_out<E: Env>(
        &mut self,
        env: &mut E,
        at: u32,
        size_bytes: u64,
        request: Request,
    ) -> Handle {
        let block = &mut self.blocks[at as usize];
        block.requested_bytes = request.size_bytes;
        block.owner = request.block;
        let rest_bytes = block.size_bytes - size_bytes;
        let splits = if kind_of(block.set) == SMALL {
            rest_bytes >= ALIGNMENT_BYTES
        } else {
            rest_bytes >= CHUNK_BYTES && size_bytes < self.config.torch.max_split_size_bytes
        };
        if splits {
            let rest = self.cut(at, size_bytes);
            self.pool(rest);
        }
        self.occupy(at);
        self.levels.allocated_bytes += size_bytes;
        if E::LOG {
            env.log(self.block_action(ActionKind::Alloc, at));
        }
        Handle(at)
    }

    pub(super) fn hand_out_found<E: Env>(
        &mut self,
        env: &mut E,
        found: Found,
        size_bytes: u64,
        request: Request,
    ) -> Handle {
        match found {
            Found::Primitive(at) => self.hand_out(env, at, size_bytes, request),
            Found::Stitched(id) => self.hand_out_stitched(env, id, size_bytes, request),
        }
    }

    /// Hands out a stitched block whose chunks are busy for it.
    pub(super) fn hand_out_stitched<E: Env>(
        &mut self,
        env: &mut E,
        id: u32,
        size_bytes: u64,
        request: Request,
    ) -> Handle {
        let stitched = &mut self.stitched[id as usize];
        stitched.state = BlockState::Allocated;
        stitched.owner = request.block;
        stitched.requested_bytes = request.size_bytes;
        let mut left_bytes = request.size_bytes;
        for &part in &stitched.parts {
            let block = &mut self.blocks[part as usize];
            block.owner = request.block;
            block.requested_bytes = left_bytes.min(block.size_bytes);
            left_bytes -= block.requested_bytes;
        }
        self.levels.allocated_bytes += size_bytes;
        if E::LOG {
            env.log(self.stitched_action(ActionKind::Alloc, id));
        }
        Handle(STITCHED | id)
    }

    /// The memory of a block becomes reusable. A deferred one keeps its event (spec 3.1, 2).
    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        if handle.0 & STITCHED != 0 {
            return self.complete_stitched(env, handle.0 & !STITCHED);
        }
        let at = handle.0;
        if E::LOG {
            env.log(self.block_action(ActionKind::FreeCompleted, at));
        }
        let block = &mut self.blocks[at as usize];
        if block.state == BlockState::Allocated {
            self.clock += 1;
            block.event = self.clock;
        }
        block.gc_base = self.searches[kind_of(block.set) as usize];
        self.vacate(at);
        self.merge_into_pool(at);
    }

    /// Its primitive blocks become free; the stitched block stays, in nobody's hands.
    fn complete_stitched<E: Env>(&mut self, env: &mut E, id: u32) {
        if E::LOG {
            env.log(self.stitched_action(ActionKind::FreeCompleted, id));
        }
        self.clock += 1;
        let stitched = &mut self.stitched[id as usize];
        if stitched.state == BlockState::Allocated {
            stitched.event = self.clock;
        }
        stitched.last_use = self.clock;
        stitched.state = BlockState::Free;
        let event = stitched.event;
        let mut parts = std::mem::take(&mut stitched.parts);
        self.idle[stitched.stream.index()].insert(id, stitched);
        for &part in &parts {
            let block = &mut self.blocks[part as usize];
            block.event = block.event.max(event);
            block.gc_base = self.searches[kind_of(block.set) as usize];
            self.vacate(part);
            self.merge_into_pool(part);
        }
        parts.clear();
        self.stitched[id as usize].parts = parts;
    }

    /// What every free begins with.
    #[inline]
    fn begin_free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let requested_bytes = if handle.0 & STITCHED != 0 {
            let id = handle.0 & !STITCHED;
            if E::LOG {
                env.log(self.stitched_action(ActionKind::FreeRequested, id));
            }
            self.stitched[id as usize].requested_bytes
        } else {
            if E::LOG {
                env.log(self.block_action(ActionKind::FreeRequested, handle.0));
            }
            self.blocks[handle.0 as usize].requested_bytes
        };
        self.levels.allocated_bytes -= self.config.round_size(requested_bytes);
    }

    /// Waits for the device and takes back what waited for it. Says whether anything did.
    pub(super) fn wait<E: Env>(&mut self, env: &mut E) -> bool {
        self.counters.device_syncs += 1;
        let mut any = false;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
            any = true;
        }
        any
    }

    /// Counts and logs a refusal.
    #[cold]
    pub(super) fn out_of_memory<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> OutOfMemory {
        self.counters.ooms += 1;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    fn block_action(&self, kind: ActionKind, at: u32) -> Action {
        let block = &self.blocks[at as usize];
        let segment = &self.segments[block.segment as usize];
        Action {
            kind,
            block: block.owner,
            segment: segment.ordinal,
            stream: stream_of(block.set),
            offset_bytes: block.address - segment.address,
            size_bytes: block.requested_bytes,
            address: block.address,
        }
    }

    /// The set that a request is served from.
    fn set_for(&self, request: Request) -> u32 {
        let size_bytes = self.config.round_size(request.size_bytes.clamp(1, LARGEST_REQUEST_BYTES));
        set_of(request.stream, kind_for(size_bytes))
    }
}

impl Allocator for Gmlake {
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle);
        }
        if request.size_bytes > LARGEST_REQUEST_BYTES {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        }
        let size_bytes = self.config.round_size(request.size_bytes);
        match self.config.policy {
            Policy::Paper => self.malloc_paper(env, size_bytes, request),
            Policy::Shipped => self.malloc_shipped(env, size_bytes, request),
        }
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.complete(env, handle);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        if handle.0 & STITCHED == 0 {
            self.blocks[handle.0 as usize].state = BlockState::Deferred;
            return;
        }
        let stitched = &mut self.stitched[(handle.0 & !STITCHED) as usize];
        stitched.state = BlockState::Deferred;
        for &part in &stitched.parts {
            self.blocks[part as usize].state = BlockState::Deferred;
        }
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        self.wait(env);
        self.release_cache(env);
        self.destroy_all_idle(env);
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.levels
    }

    fn pool_of(&self, request: Request) -> u32 {
        kind_of(self.set_for(request))
    }

    fn pool_name(&self, pool: u32) -> Option<String> {
        ["small", "large"].get(pool as usize).map(|&name| name.to_owned())
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let set = self.set_for(request);
        let primitive = self.free[set as usize].largest().map_or(0, |entry| entry.size_bytes);
        if kind_of(set) == SMALL || self.config.policy == Policy::Paper {
            // The paper's stitched blocks serve their own size only.
            return primitive;
        }
        let idle = self.idle[request.stream.index()].iter().map(|id| &self.stitched[id as usize]);
        let free = idle.filter(|stitched| stitched.busy_chunk(&self.chunks).is_none());
        primitive.max(free.map(|stitched| stitched.size_bytes).max().unwrap_or(0))
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.check()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let Counters { segment_allocs, stitches, states, .. } = self.counters;
        let quirk = if self.config.quirks { stitches } else { 0 };
        let mut counters = vec![
            // The shipped code counts a stitched block as a segment, and never takes it off (B9).
            ("segment_allocs", segment_allocs + quirk),
            ("segment_frees", self.counters.segment_frees),
            ("alloc_retries", self.counters.alloc_retries),
            ("ooms", self.counters.ooms),
            ("device_syncs", self.counters.device_syncs),
            ("stitches", stitches),
            ("stitched_bytes", self.stitched_bytes),
            ("stitched_bytes_peak", self.counters.stitched_bytes_peak),
            ("stitch_reuses", self.counters.stitch_reuses),
            ("stitch_evictions", self.counters.stitch_evictions),
        ];
        if self.config.quirks {
            let drifted_bytes = self.stitched_bytes + self.counters.forgotten_bytes;
            counters.push(("stitched_bytes_drifted", drifted_bytes));
        }
        if self.config.policy == Policy::Paper {
            let names =
                ["s1_exact", "s2_single", "s3_stitched", "s4_insufficient", "s5_out_of_memory"];
            counters.extend(names.into_iter().zip(states));
        }
        counters
    }

    fn params(&self) -> Vec<(String, String)> {
        self.config.params()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        self.visit_layout(visit);
    }
}
