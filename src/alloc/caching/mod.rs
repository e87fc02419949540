//! PyTorch's CUDA caching allocator, exactly (torch 2.11; specs/pytorch_caching.md).
//!
//! The device gives *segments*; each is cut into *blocks* that form a list in address order and
//! cover it without gaps. Free blocks of one stream and pool lie in a `free_set`, ordered by
//! (size, address):
//!
//! ```text
//!   segment 20 MiB at 0x7f..  ┌────────────┬──────┬───────────────┬──────────────┐
//!                             │ A 3 MiB    │ free │ P (pending)   │ free         │
//!                             └────────────┴──────┴───────────────┴──────────────┘
//!                               prev <──> next      waits for another stream
//!   free set of (stream, large pool):   (1.5 MiB, 0x7f..) < (11 MiB, 0x7f..)
//! ```
//!
//! A malloc rounds the size, takes the first fit, and only when there is none goes down the ladder
//! of spec 3.3: garbage collection, the device, targeted release, flush and retry, out of memory.
//! The first two lines are the hot path; the ladder is in `ladder.rs`.
//!
//! Deviations from the shipped allocator: the order in which several deferred blocks complete in
//! one batch is the order that the engine gives (the shipped one iterates a hash table, spec 3.6).
//! It only shows in accumulated and peak values of `inactive_split*`.

mod config;
mod free_set;
mod ladder;
mod stats;
mod traps;
mod version;

pub use config::{Config, ConfigError, GivenOption};
pub use traps::{Circumstances, Lint, SettingsVariable, Trap, lint};
pub use version::{ParseVersionError, TorchVersion};

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

/// A contiguous piece of a segment. Each lies in one cache line: neighbours in memory are looked at
/// at every free.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
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
    /// The trace's block that it was last handed out for.
    owner: BlockId,
    state: BlockState,
}

impl Block {
    fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    /// Its entry in a free set.
    #[inline]
    fn entry(&self, at: u32) -> Entry {
        Entry { size_bytes: self.size_bytes, address: self.address, block: at }
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
    /// Whether ages of free blocks matter: there is a limit and a threshold (spec 3.4 step 0).
    collects_garbage: bool,
    /// No request is rounded but to 512 bytes.
    rounds_plainly: bool,
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
    /// Builds the allocator. Parameters are the keys of `PYTORCH_CUDA_ALLOC_CONF`; they come after,
    /// and so override, the settings string of the inputs.
    ///
    /// # Errors
    /// Settings that PyTorch refuses, and those that are not modelled.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Caching, SpecError> {
        let allocator = params.allocator().to_owned();
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
        params.finish()?;
        let fraction_limit = match inputs.device_total_bytes {
            Some(total_bytes) => config.limit_bytes(total_bytes),
            None if config.per_process_memory_fraction < 1.0 => {
                let message = "per_process_memory_fraction is a share of the device, whose size is \
                               not known here: give --capacity";
                return Err(SpecError::Value { allocator, message: message.to_owned() });
            }
            None => None,
        };
        let mut streams: Vec<StreamId> =
            (0..inputs.stream_handles.len() as u32).map(StreamId).collect();
        streams.sort_by_key(|stream| inputs.stream_handles[stream.index()]);
        let limit_bytes = inputs.limit_bytes.or(fraction_limit).or(inputs.recorded_limit_bytes);
        Ok(Caching {
            limit_bytes,
            collects_garbage: limit_bytes.is_some() && config.garbage_collection_threshold > 0.0,
            rounds_plainly: config.roundup_power2_divisions.iter().all(|&count| count <= 1),
            config,
            blocks: Vec::new(),
            spare: Vec::new(),
            segments: Vec::new(),
            free: vec![FreeSet::default(); streams.len() * 2],
            streams,
            searches: [0; 2],
            reserved_bytes: 0,
            stats: Stats::default(),
        })
    }

    /// Takes a fitting free block out of its set (spec 3.4).
    #[inline]
    fn search(&mut self, set: u32, size_bytes: u64) -> Option<u32> {
        if self.collects_garbage {
            self.searches[kind_of(set)] += 1;
        }
        let split_limit_bytes = self.config.max_split_size_bytes;
        let slack_bytes = self.config.max_non_split_rounding_bytes;
        let candidate = self.free[set as usize].first_fit(size_bytes)?;
        let accepted = if size_bytes < split_limit_bytes {
            candidate.size_bytes < split_limit_bytes
        } else {
            candidate.size_bytes < size_bytes.saturating_add(slack_bytes)
        };
        if !accepted {
            return None;
        }
        self.free[set as usize].remove(candidate);
        Some(candidate.block)
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
        let block = &mut self.blocks[at as usize];
        let (block_bytes, was_split) = (block.size_bytes, block.is_split());
        let kind = kind_of(block.set);
        let remainder_bytes = block_bytes - size_bytes;
        let splits = if kind == SMALL {
            remainder_bytes >= MIN_BLOCK_BYTES
        } else {
            size_bytes < self.config.max_split_size_bytes && remainder_bytes > LARGE_REMAINDER_BYTES
        };
        block.requested_bytes = request.size_bytes;
        block.state = BlockState::Allocated;
        block.owner = request.block;
        let (mut handed_bytes, mut split_count, mut split_bytes) = (block_bytes, 0, 0);
        if splits {
            handed_bytes = size_bytes;
            (split_count, split_bytes) =
                if was_split { (0, -(size_bytes as i64)) } else { (1, remainder_bytes as i64) };
            self.split(at, size_bytes);
        } else if was_split {
            (split_count, split_bytes) = (-1, -(block_bytes as i64));
        }
        self.stats.inactive_split.change(kind, split_count);
        self.stats.inactive_split_bytes.change(kind, split_bytes);
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

    /// Makes the high end of a block, beyond `size_bytes`, a free block of its own.
    #[inline]
    fn split(&mut self, at: u32, size_bytes: u64) {
        let rest_at = self.spare.pop().unwrap_or(self.blocks.len() as u32);
        let block = &mut self.blocks[at as usize];
        let next = std::mem::replace(&mut block.next, rest_at);
        let rest_bytes = block.size_bytes - size_bytes;
        block.size_bytes = size_bytes;
        let rest = Block {
            address: block.address + size_bytes,
            size_bytes: rest_bytes,
            requested_bytes: 0,
            gc_base: self.searches[kind_of(block.set)],
            prev: at,
            next,
            segment: block.segment,
            set: block.set,
            owner: BlockId::NONE,
            state: BlockState::Free,
        };
        self.put_block(rest_at, rest);
        if next != NONE {
            self.blocks[next as usize].prev = rest_at;
        }
        self.free[rest.set as usize].insert(rest.entry(rest_at));
    }

    /// Stores a block under an id that is spare or the next new one.
    #[inline]
    fn put_block(&mut self, at: u32, block: Block) {
        match self.blocks.get_mut(at as usize) {
            Some(place) => *place = block,
            None => self.blocks.push(block),
        }
    }

    /// The memory of a freed block becomes reusable: merges it with free neighbours (spec 4.5).
    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, at: u32) {
        if E::LOG {
            let action = self.block_action(ActionKind::FreeCompleted, at);
            env.log(action);
        }
        let &Block {
            mut address, mut size_bytes, requested_bytes, mut prev, mut next, set, ..
        } = &self.blocks[at as usize];
        let kind = kind_of(set);
        self.stats.free_completed(kind, requested_bytes);
        let (mut split_count, mut split_bytes) = (0i64, 0i64);
        if prev != NONE {
            let low = &self.blocks[prev as usize];
            if low.is_free() {
                self.free[set as usize].remove(low.entry(prev));
                self.spare.push(prev);
                split_count -= 1;
                split_bytes -= low.size_bytes as i64;
                address = low.address;
                size_bytes += low.size_bytes;
                prev = low.prev;
                if prev == NONE {
                    self.segments[low.segment as usize].first = at;
                } else {
                    self.blocks[prev as usize].next = at;
                }
            }
        }
        if next != NONE {
            let high = &self.blocks[next as usize];
            if high.is_free() {
                self.free[set as usize].remove(high.entry(next));
                self.spare.push(next);
                split_count -= 1;
                split_bytes -= high.size_bytes as i64;
                size_bytes += high.size_bytes;
                next = high.next;
                if next != NONE {
                    self.blocks[next as usize].prev = at;
                }
            }
        }
        let block = &mut self.blocks[at as usize];
        block.address = address;
        block.size_bytes = size_bytes;
        block.prev = prev;
        block.next = next;
        block.state = BlockState::Free;
        block.gc_base = self.searches[kind];
        let entry = block.entry(at);
        self.free[set as usize].insert(entry);
        if prev != NONE || next != NONE {
            split_count += 1;
            split_bytes += size_bytes as i64;
        }
        self.stats.inactive_split.change(kind, split_count);
        self.stats.inactive_split_bytes.change(kind, split_bytes);
    }

    /// A deferred block completes: a malloc looked, or something waited for the device.
    pub(crate) fn complete_deferred<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let block = &self.blocks[handle.0 as usize];
        self.stats.end_defer(kind_of(block.set), block.size_bytes);
        self.complete(env, handle.0);
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
            self.complete_deferred(env, handle);
        }
        if request.size_bytes > LARGEST_REQUEST_BYTES {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        }
        let size_bytes = if self.rounds_plainly {
            request.size_bytes.next_multiple_of(MIN_BLOCK_BYTES)
        } else {
            self.config.round_size(request.size_bytes)
        };
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
        let block = &mut self.blocks[handle.0 as usize];
        block.state = BlockState::Deferred;
        self.stats.defer(kind_of(block.set), block.size_bytes);
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
            allocated_bytes: self.stats.allocated_bytes(),
            active_bytes: self.stats.active_bytes(),
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
                    block: if block.is_free() { BlockId::NONE } else { block.owner },
                    segment: ordinal,
                    segment_address: segment.address,
                    segment_bytes: segment.size_bytes,
                    page_bytes: 0,
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
