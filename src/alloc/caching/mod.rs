//! PyTorch's CUDA caching allocator, exactly (torch 2.11; specs/pytorch_caching.md).
//!
//! The device gives *segments*; each is cut into *blocks* that form a list in address order and cover
//! it without gaps. Free blocks of one stream and pool lie in a [`free_set`], ordered by (size, address):
//!
//! ```text
//!   segment 20 MiB at 0x7f..  ┌────────────┬──────┬───────────────┬──────────────┐
//!                             │ A 3 MiB    │ free │ P (pending)   │ free         │
//!                             └────────────┴──────┴───────────────┴──────────────┘
//!                               prev <──> next      waits for another stream
//!   free set of (stream, large pool):   (1.5 MiB, 0x7f..) < (11 MiB, 0x7f..)
//! ```
//!
//! A malloc rounds the size, takes the first fit, and only when there is none goes down the ladder of
//! spec 3.3: garbage collection, the device, targeted release, flush and retry, out of memory. The first
//! two lines are the hot path; the ladder is in `ladder.rs`.
//!
//! Deviations from the shipped allocator: the order in which several deferred blocks complete in one
//! batch is the order that the engine gives (the shipped one iterates a hash table, spec 3.6). It only
//! shows in accumulated and peak values of `inactive_split*`.

mod config;
mod free_set;
mod ladder;
mod stats;

pub use config::{Config, ConfigError};

use super::spec::{Params, SpecError};
use super::{
    Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle, LayoutBlock, Levels,
    OutOfMemory, Request,
};
use crate::units::{BlockId, MIB, StreamId};
use config::MIN_BLOCK_BYTES;
use free_set::{Entry, FreeSet};
use stats::{Kind, LARGE, SMALL, Stats};

/// Largest size of the small pool (kSmallSize).
const SMALL_SIZE_BYTES: u64 = MIB;
/// Segment size of the small pool (kSmallBuffer).
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Sizes of at least this get a segment of their own size (kMinLargeAlloc).
const OWN_SEGMENT_BYTES: u64 = 10 * MIB;
/// Such segments are multiples of this (kRoundLarge).
const SEGMENT_ROUNDING_BYTES: u64 = 2 * MIB;
/// A large remainder must exceed this to be split off (spec 3.8).
const LARGE_REMAINDER_BYTES: u64 = MIB;
/// The largest request (spec 1).
const LARGEST_REQUEST_BYTES: u64 = (1 << 60) - 1;

/// No block.
const NONE: u32 = u32::MAX;

/// A contiguous piece of a segment.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    size_bytes: u64,
    /// The request of its last allocation.
    requested_bytes: u64,
    /// Value of its pool's search counter when it last became free.
    gc_base: u64,
    prev: u32,
    next: u32,
    segment: u32,
    /// The free set it belongs to: stream and kind of pool.
    set: u32,
    /// The trace's block while allocated or pending.
    owner: BlockId,
    state: BlockState,
}

impl Block {
    fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }
}

/// Memory obtained from the device in one call.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    size_bytes: u64,
    /// Its block with the lowest address; [`NONE`] once returned.
    first: u32,
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Caching {
    config: Config,
    limit_bytes: Option<u64>,
    blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    spare: Vec<u32>,
    /// Every segment ever obtained, by ordinal.
    segments: Vec<Segment>,
    /// Free sets, by [`set_of`].
    free: Vec<FreeSet>,
    /// Streams in ascending order of their handles.
    streams: Vec<StreamId>,
    /// Searches of the small and the large pool, counted while garbage collection is on.
    searches: [u64; 2],
    reserved_bytes: u64,
    stats: Stats,
}

/// Index of the free set of a stream and kind of pool.
#[inline]
fn set_of(stream: StreamId, kind: Kind) -> u32 {
    stream.0 * 2 + kind as u32
}

/// The kind of pool that serves a rounded size (spec 2.3).
#[inline]
fn kind_for(size_bytes: u64) -> Kind {
    if size_bytes <= SMALL_SIZE_BYTES { SMALL } else { LARGE }
}

/// The kind of pool behind a set.
#[inline]
fn kind_of(set: u32) -> Kind {
    (set & 1) as Kind
}

/// The stream behind a set.
#[inline]
fn stream_of(set: u32) -> StreamId {
    StreamId(set / 2)
}

/// What `fraglab list` says about the parameters.
pub(super) fn parameter_help() -> Vec<(&'static str, &'static str)> {
    let mut help = config::KEYS.to_vec();
    help.push(("torch", "version whose rules apply; 2.11"));
    help
}

impl Caching {
    /// Builds the allocator. Parameters are the keys of `PYTORCH_CUDA_ALLOC_CONF`; they come after, and
    /// so override, the settings string of the inputs.
    ///
    /// # Errors
    /// Settings that PyTorch refuses, and those that are not modelled.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Caching, SpecError> {
        let mut settings = inputs.settings.clone().unwrap_or_default();
        for (key, _) in config::KEYS {
            if let Some(value) = params.take(key) {
                let value = match value.as_str() {
                    "true" => "True",
                    "false" => "False",
                    other => other,
                };
                let comma = if settings.trim().is_empty() { "" } else { "," };
                settings.push_str(&format!("{comma}{key}:{value}"));
            }
        }
        if let Some(version) = params.take("torch")
            && !(version == "2.11" || version.starts_with("2.11."))
        {
            let message = format!("torch={version} is not modelled; 2.11 is");
            return Err(params.value_error(message));
        }
        let config =
            Config::parse(&settings).map_err(|error| params.value_error(error.to_string()))?;
        if config.expandable_segments {
            let message = "expandable_segments:True is not modelled yet; `run --pytorch-conf ''` \
                           replays the trace with ordinary segments";
            return Err(params.value_error(message));
        }
        if inputs.private_pools {
            let message = "the trace uses private pools (MemPool or graph capture), \
                           which are not modelled yet";
            return Err(params.value_error(message));
        }
        params.finish()?;
        Ok(Caching::new(config, inputs))
    }

    /// Builds the allocator from parsed settings; `settings` of the inputs is not read.
    pub fn new(config: Config, inputs: &BuildInputs) -> Caching {
        let fraction_limit = config.limit_bytes(inputs.device_total_bytes);
        let mut streams: Vec<StreamId> =
            (0..inputs.stream_handles.len() as u32).map(StreamId).collect();
        streams.sort_by_key(|stream| inputs.stream_handles[stream.index()]);
        Caching {
            limit_bytes: inputs.limit_bytes.or(fraction_limit).or(inputs.recorded_limit_bytes),
            config,
            blocks: Vec::new(),
            spare: Vec::new(),
            segments: Vec::new(),
            free: vec![FreeSet::default(); streams.len() * 2],
            streams,
            searches: [0; 2],
            reserved_bytes: 0,
            stats: Stats::default(),
        }
    }

    /// The settings in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Completes a deferred block outside any malloc: something else waited for the device.
    pub(crate) fn complete_deferred<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.complete(env, handle.0);
    }

    /// Whether ages of free blocks matter (spec 3.4 step 0).
    #[inline]
    fn collects_garbage(&self) -> bool {
        self.limit_bytes.is_some() && self.config.garbage_collection_threshold > 0.0
    }

    /// Takes a fitting free block out of its set (spec 3.4).
    #[inline]
    fn search(&mut self, set: u32, size_bytes: u64) -> Option<u32> {
        if self.collects_garbage() {
            self.searches[kind_of(set)] += 1;
        }
        let split_limit_bytes = self.config.max_split_size_bytes;
        let slack_bytes = self.config.max_non_split_rounding_bytes;
        self.free[set as usize].take_first_fit(size_bytes, |candidate_bytes| {
            if size_bytes < split_limit_bytes {
                candidate_bytes < split_limit_bytes
            } else {
                candidate_bytes < size_bytes.saturating_add(slack_bytes)
            }
        })
    }

    /// Hands out a block that is in no set: splits it if the rules say so (spec 3.3 step 10, 3.8).
    #[inline]
    fn hand_out<E: Env>(
        &mut self,
        env: &mut E,
        at: u32,
        size_bytes: u64,
        request: Request,
    ) -> Handle {
        let block = self.blocks[at as usize];
        let kind = kind_of(block.set);
        let remainder_bytes = block.size_bytes - size_bytes;
        let splits = if kind == SMALL {
            remainder_bytes >= MIN_BLOCK_BYTES
        } else {
            size_bytes < self.config.max_split_size_bytes && remainder_bytes > LARGE_REMAINDER_BYTES
        };
        let handed_bytes = if splits { size_bytes } else { block.size_bytes };
        if splits {
            self.split(at, block, size_bytes);
            if block.is_split() {
                self.stats.inactive_split_bytes.change(kind, -(size_bytes as i64));
            } else {
                self.stats.inactive_split.change(kind, 1);
                self.stats.inactive_split_bytes.change(kind, remainder_bytes as i64);
            }
        } else if block.is_split() {
            self.stats.inactive_split_bytes.change(kind, -(block.size_bytes as i64));
            self.stats.inactive_split.change(kind, -1);
        }
        let handed = &mut self.blocks[at as usize];
        handed.size_bytes = handed_bytes;
        handed.requested_bytes = request.size_bytes;
        handed.state = BlockState::Allocated;
        handed.owner = request.block;
        self.stats.alloc(kind, handed_bytes, request.size_bytes);
        if handed_bytes >= self.config.max_split_size_bytes {
            self.stats.oversize_allocations.change(1);
        }
        if E::LOG {
            let action = self.block_action(ActionKind::Alloc, at);
            env.log(action);
        }
        Handle(at)
    }

    /// Makes the high end of a block a free block of its own.
    #[inline]
    fn split(&mut self, at: u32, block: Block, size_bytes: u64) {
        let kind = kind_of(block.set);
        let rest = Block {
            address: block.address + size_bytes,
            size_bytes: block.size_bytes - size_bytes,
            requested_bytes: 0,
            gc_base: self.searches[kind],
            prev: at,
            next: block.next,
            state: BlockState::Free,
            owner: BlockId::NONE,
            ..block
        };
        let rest_at = self.add_block(rest);
        self.blocks[at as usize].next = rest_at;
        if block.next != NONE {
            self.blocks[block.next as usize].prev = rest_at;
        }
        self.insert_free(rest_at);
    }

    #[inline]
    fn add_block(&mut self, block: Block) -> u32 {
        match self.spare.pop() {
            Some(at) => {
                self.blocks[at as usize] = block;
                at
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        }
    }

    #[inline]
    fn insert_free(&mut self, at: u32) {
        let block = &self.blocks[at as usize];
        let entry = Entry { size_bytes: block.size_bytes, address: block.address, block: at };
        self.free[block.set as usize].insert(entry);
    }

    /// The memory of a freed block becomes reusable: merges it with free neighbours (spec 4.5).
    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, at: u32) {
        if E::LOG {
            let action = self.block_action(ActionKind::FreeCompleted, at);
            env.log(action);
        }
        let mut block = self.blocks[at as usize];
        let kind = kind_of(block.set);
        self.stats.free_completed(kind, block.size_bytes, block.requested_bytes);
        let mut absorbed = 0i64;
        let mut absorbed_bytes = 0i64;
        if block.prev != NONE && self.blocks[block.prev as usize].is_free() {
            let prev = self.blocks[block.prev as usize];
            self.free[block.set as usize].remove(prev.size_bytes, prev.address);
            self.spare.push(block.prev);
            block.address = prev.address;
            block.size_bytes += prev.size_bytes;
            block.prev = prev.prev;
            match prev.prev {
                NONE => self.segments[block.segment as usize].first = at,
                before => self.blocks[before as usize].next = at,
            }
            absorbed += 1;
            absorbed_bytes += prev.size_bytes as i64;
        }
        if block.next != NONE && self.blocks[block.next as usize].is_free() {
            let next = self.blocks[block.next as usize];
            self.free[block.set as usize].remove(next.size_bytes, next.address);
            self.spare.push(block.next);
            block.size_bytes += next.size_bytes;
            block.next = next.next;
            if next.next != NONE {
                self.blocks[next.next as usize].prev = at;
            }
            absorbed += 1;
            absorbed_bytes += next.size_bytes as i64;
        }
        block.state = BlockState::Free;
        block.owner = BlockId::NONE;
        block.gc_base = self.searches[kind];
        self.blocks[at as usize] = block;
        self.insert_free(at);
        let (still, still_bytes) =
            if block.is_split() { (1, block.size_bytes as i64) } else { (0, 0) };
        self.stats.inactive_split.change(kind, still - absorbed);
        self.stats.inactive_split_bytes.change(kind, still_bytes - absorbed_bytes);
    }

    /// What every free begins with (spec 4.2 steps 1 to 3).
    #[inline]
    fn begin_free<E: Env>(&mut self, env: &mut E, at: u32) {
        let block = &self.blocks[at as usize];
        self.stats.free_requested(kind_of(block.set), block.size_bytes);
        if block.size_bytes >= self.config.max_split_size_bytes {
            self.stats.oversize_allocations.change(-1);
        }
        if E::LOG {
            let action = self.block_action(ActionKind::FreeRequested, at);
            env.log(action);
        }
    }

    fn block_action(&self, kind: ActionKind, at: u32) -> Action {
        let block = &self.blocks[at as usize];
        Action {
            kind,
            block: block.owner,
            segment: block.segment,
            stream: stream_of(block.set),
            offset_bytes: block.address - self.segments[block.segment as usize].address,
            size_bytes: block.requested_bytes,
            address: block.address,
        }
    }
}

impl Allocator for Caching {
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle.0);
        }
        if request.size_bytes > LARGEST_REQUEST_BYTES {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        }
        let size_bytes = self.config.round_size(request.size_bytes);
        let set = set_of(request.stream, kind_for(size_bytes));
        let found = match self.search(set, size_bytes) {
            Some(at) => at,
            None => self.obtain(env, set, size_bytes, request)?,
        };
        Ok(self.hand_out(env, found, size_bytes, request))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle.0);
        self.complete(env, handle.0);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle.0);
        self.blocks[handle.0 as usize].state = BlockState::Deferred;
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(ladder::notice(ActionKind::EmptyCache, StreamId::NONE, 0));
        }
        self.flush(env);
    }

    #[inline]
    fn levels(&self) -> Levels {
        Levels {
            allocated_bytes: self.stats.all_now.allocated_bytes,
            active_bytes: self.stats.all_now.active_bytes,
            reserved_bytes: self.reserved_bytes,
        }
    }

    fn pool_of(&self, request: Request) -> u32 {
        let size_bytes = self.config.round_size(request.size_bytes.min(LARGEST_REQUEST_BYTES));
        kind_for(size_bytes) as u32
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let kind = self.pool_of(request) as Kind;
        let set = &self.free[set_of(request.stream, kind) as usize];
        set.largest().map_or(0, |entry| entry.size_bytes)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("segment_allocs", self.stats.num_device_alloc),
            ("segment_frees", self.stats.num_device_free),
            ("alloc_retries", self.stats.num_alloc_retries),
            ("ooms", self.stats.num_ooms),
            ("device_syncs", self.stats.num_sync_all_streams),
        ]
    }

    fn torch_stats(&self) -> Option<Vec<(String, i64)>> {
        let max_split_size = match self.config.max_split_size_bytes {
            u64::MAX => -1,
            bytes => bytes as i64,
        };
        Some(self.stats.flat(max_split_size))
    }

    fn params(&self) -> Vec<(String, String)> {
        self.config.params()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut live: Vec<(u32, &Segment)> =
            (0u32..).zip(&self.segments).filter(|(_, segment)| segment.first != NONE).collect();
        live.sort_by_key(|(_, segment)| segment.address);
        for (ordinal, segment) in live {
            let mut at = segment.first;
            while at != NONE {
                let block = &self.blocks[at as usize];
                visit(LayoutBlock {
                    block: block.owner,
                    segment: ordinal,
                    segment_address: segment.address,
                    address: block.address,
                    size_bytes: block.size_bytes,
                    requested_bytes: if block.is_free() { 0 } else { block.requested_bytes },
                    stream: stream_of(block.set),
                    pool: kind_of(block.set) as u32,
                    state: block.state,
                });
                at = block.next;
            }
        }
    }
}
