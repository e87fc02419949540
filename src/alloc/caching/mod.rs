//! PyTorch's CUDA caching allocator, exactly (torch 2.11; specs/pytorch_caching.md).
//!
//! The device gives *segments*; each is cut into *blocks* that form a list in address order and
//! cover it without gaps. Free blocks of one stream and pool lie in a free set, ordered by
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
//! With `expandable_segments` a segment is a *reservation* of addresses whose pages are mapped as
//! they are needed (`expandable.rs`); private pools have free sets of their own (`pools.rs`); a
//! history that begins late starts from a given layout (`start.rs`).
//!
//! A malloc rounds the size, takes the first fit, and only when there is none goes down the ladder
//! of spec 3.3: garbage collection, the device, targeted release, flush and retry, out of memory.
//! The first two lines are the hot path; the ladder is in `ladder.rs`.
//!
//! Deviations from the shipped allocator: the order in which several deferred blocks complete in
//! one batch is the order that the engine gives (the shipped one iterates a hash table, spec 3.6).
//! It only shows in accumulated and peak values of `inactive_split*`.

mod config;
mod expandable;
mod ladder;
mod pools;
mod start;
mod stats;
mod traps;
mod version;

pub use config::{Config, ConfigError, GivenOption};
pub use traps::{Circumstances, Lint, SettingsVariable, Trap, lint};
pub use version::{ParseVersionError, TorchVersion};

use super::free_set::{Entry, FreeSet};
use super::spec::{Params, SpecError};
use std::collections::BTreeMap;

use super::{
    Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle, LayoutBlock, Levels,
    OutOfMemory, Request,
};
use crate::device::PhysicalHandle;
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::trace::{self, StartLayout};
use crate::units::{BlockId, Bytes, MIB, PoolId, SettingsId, StreamId};
use config::MIN_BLOCK_BYTES;

use pools::PrivatePool;
use stats::{Kind, LARGE, SMALL, Stats};

/// Largest size of the small pool (kSmallSize).
const SMALL_SIZE_BYTES: u64 = MIB;
/// Segment size of the small pool (kSmallBuffer).
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Sizes of at least this get a segment of their own size (kMinLargeAlloc).
const OWN_SEGMENT_BYTES: u64 = 10 * MIB;
/// Such segments are multiples of this (kRoundLarge), unless `segment_rounding` says otherwise.
const SEGMENT_ROUNDING_BYTES: u64 = 2 * MIB;
/// A large remainder must exceed this to be split off (spec 3.8).
const LARGE_REMAINDER_BYTES: u64 = MIB;
/// The largest request (spec 1).
const LARGEST_REQUEST_BYTES: u64 = (1 << 60) - 1;

/// Most pairs of a private pool and a stream, each of which has free sets: no process has as many.
const POOL_STREAMS_MAX: usize = 1 << 19;

/// No block.
const NONE: u32 = u32::MAX;

/// State of a block. Free neighbours merge, and so do unmapped ones; the two never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Allocated,
    /// Freed by the program, waiting for another stream.
    Deferred,
    Free,
    /// Addresses of a reservation without memory.
    Unmapped,
}

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
    state: State,
    /// It lies in a reservation.
    expandable: bool,
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
        self.state == State::Free
    }
}

const _: () = assert!(size_of::<Block>() == 64, "a block is one cache line");

/// Memory obtained from the device in one call, or a reservation of addresses.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    /// Bytes obtained, or addresses reserved.
    size_bytes: u64,
    /// Size of the pages of a reservation; 0 for ordinary segments.
    page_bytes: u64,
    /// Its block with the lowest address; [`NONE`] once returned.
    first: u32,
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Caching {
    config: Config,
    limit_bytes: Option<u64>,
    /// No limit was asked for, so that the changes of the recorded program hold.
    limit_is_recorded: bool,
    blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    spare: Vec<u32>,
    /// Every segment ever obtained, by ordinal.
    segments: Vec<Segment>,
    /// Free sets: those of the default pools, then those of each private pool ever entered. In
    /// each, [`set_of`] tells the place.
    free: Vec<FreeSet>,
    /// Unmapped blocks of the reservations of each free set, by address.
    unmapped: Vec<BTreeMap<u64, u32>>,
    /// Physical memory behind mapped pages, by address of the page. Pages of a starting layout
    /// have none.
    pages: BTreeMap<u64, PhysicalHandle>,
    /// Streams in ascending order of their handles.
    streams: Vec<StreamId>,
    /// Handles of the streams, by [`StreamId`].
    stream_handles: Vec<u64>,
    /// Whether ages of free blocks matter: there is a limit and a threshold (spec 3.4 step 0).
    collects_garbage: bool,
    /// No request is rounded but to 512 bytes.
    rounds_plainly: bool,
    /// Expandable segments or private pools came up: their rules apply. The hot path is compiled
    /// with and without them, so that a program without them pays one branch an operation.
    special: bool,
    /// Searches of the small and the large default pool, counted while garbage collection is on.
    searches: [u64; 2],
    reserved_bytes: u64,
    stats: Stats,
    /// Private pools, by [`PoolId`].
    pools: Vec<PrivatePool>,
    /// Private pools that have free sets, in the order of these.
    pools_with_sets: Vec<PoolId>,
    /// Private pools entered, the innermost last.
    entered: Vec<PoolId>,
    /// Free set of the first stream in the innermost pool entered; 0 for the default pools.
    route: u32,
    /// Pools that requests fall back on when the device refuses, in the order of their creation.
    overflow: Vec<PoolId>,
    /// Deleted pools that hold memory, which goes back in a flush, in the order of their deletion.
    freeable: Vec<PoolId>,
    /// What a reservation is made for: total memory of the device in bytes.
    device_total_bytes: u64,
    /// Settings strings of the program, each with the parameters that override it.
    settings_changes: Vec<String>,
    /// The settings are those of the recorded run.
    as_recorded: bool,
    /// Search again after a flush (`research_after_flush`).
    researches: bool,
    /// What segments of their own size are multiples of (`segment_rounding`).
    segment_rounding_bytes: u64,
    /// `max_split_size` of the settings at the beginning, for the statistic of that name.
    first_max_split_size_bytes: u64,
    failure: Option<String>,
}

/// Place of a stream and kind of pool among the free sets of a pool.
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

/// What `fraglab list` says about the parameters.
pub(super) fn parameter_help() -> Vec<(&'static str, &'static str)> {
    let mut help = config::KEYS.to_vec();
    help.push(("torch", "release whose rules apply, as far as known: 2.11, the default, is exact"));
    help.push(("research_after_flush", "true: look for a free block again after a flush"));
    help.push(("segment_rounding", "what segments of 10 MiB and more are multiples of; 2MiB"));
    help
}

/// A block to hand out, in no set, and whether the rules of expandable segments apply to the
/// request.
#[derive(Clone, Copy, Debug)]
struct Found {
    block: u32,
    expandable: bool,
}

/// The parameters that are settings, as a settings string.
fn take_overrides(params: &mut Params) -> String {
    let mut overrides = Vec::new();
    for (key, _) in config::KEYS {
        if let Some(value) = params.take(key) {
            let value = match value.as_str() {
                "true" => "True",
                "false" => "False",
                other => other,
            };
            overrides.push(format!("{key}:{value}"));
        }
    }
    overrides.join(",")
}

/// What segments of their own size are multiples of: STAlloc's allocator, made from an older one of
/// PyTorch, takes 512 bytes (specs/stalloc.md 3.4).
fn take_segment_rounding(params: &mut Params) -> Result<u64, SpecError> {
    let Some(text) = params.take("segment_rounding") else { return Ok(SEGMENT_ROUNDING_BYTES) };
    let sizes = MIN_BLOCK_BYTES..=SEGMENT_ROUNDING_BYTES;
    let bytes = text.parse().ok().map(|Bytes(bytes)| bytes);
    bytes.filter(|bytes| bytes.is_power_of_two() && sizes.contains(bytes)).ok_or_else(|| {
        let message = format!("segment_rounding={text}: expected a power of two, 512 to 2MiB");
        params.value_error(message)
    })
}

/// What comes of a settings string given at run time (spec 7.1), or why PyTorch would not survive
/// it: with another `max_split_size_mb`, a targeted release may hand a part of a segment to the
/// device (spec 7.3).
fn changed(config: &Config, text: &str) -> Result<Config, String> {
    let changed = config.change(text).map_err(|error| error.to_string())?;
    let split_limit_bytes = changed.max_split_size_bytes;
    if split_limit_bytes != u64::MAX && split_limit_bytes != config.max_split_size_bytes {
        return Err("max_split_size_mb changes while the program runs, which corrupts PyTorch's \
                    own allocator: give it from the beginning, as in --pytorch-conf"
            .to_owned());
    }
    Ok(changed)
}

/// The memory limit in bytes that a program set while it ran, or none: `limit:BYTES` and
/// `limit:none` stand among its settings strings in a trace, though they are not PyTorch's. It calls
/// `set_per_process_memory_fraction` for that.
fn limit_change(text: &str) -> Option<Option<u64>> {
    match text.strip_prefix("limit:")? {
        "none" => Some(None),
        bytes => bytes.parse().ok().map(Some),
    }
}

/// Checks the settings strings of a program, each following the one before.
fn check_changes(config: &Config, changes: &[String]) -> Result<(), String> {
    let mut config = config.clone();
    for change in changes.iter().filter(|change| limit_change(change).is_none()) {
        config = changed(&config, change)?;
    }
    Ok(())
}

impl Caching {
    /// Builds the allocator. Parameters are the keys of `PYTORCH_CUDA_ALLOC_CONF`; they come after,
    /// and so override, the settings string of the inputs.
    ///
    /// # Errors
    /// Settings that PyTorch refuses, and those that are not modelled.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Caching, SpecError> {
        let allocator = params.allocator().to_owned();
        let overrides = take_overrides(&mut params);
        let version = match params.take("torch") {
            None => TorchVersion::REFERENCE,
            Some(text) => text
                .parse()
                .map_err(|error: ParseVersionError| params.value_error(error.to_string()))?,
        };
        let researches = match params.take("research_after_flush").as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(other) => {
                let message = format!("research_after_flush={other}: expected true or false");
                return Err(params.value_error(message));
            }
        };
        let segment_rounding_bytes = take_segment_rounding(&mut params)?;
        let with_overrides = |settings: &str| match (settings.trim().is_empty(), &*overrides) {
            (_, "") => settings.to_owned(),
            (true, overrides) => overrides.to_owned(),
            (false, overrides) => format!("{settings},{overrides}"),
        };
        let settings = with_overrides(inputs.settings.as_deref().unwrap_or_default());
        let config = Config::parse_for(version, &settings)
            .map_err(|error| params.value_error(error.to_string()))?;
        let settings_changes =
            inputs.settings_changes.iter().map(|change| match limit_change(change) {
                Some(_) => change.clone(),
                None => with_overrides(change),
            });
        let settings_changes: Vec<String> = settings_changes.collect();
        check_changes(&config, &settings_changes).map_err(|message| params.value_error(message))?;
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
        if inputs.pools.len().saturating_mul(streams.len()) > POOL_STREAMS_MAX {
            let (pools, streams) = (inputs.pools.len(), streams.len());
            let message = format!(
                "{pools} private pools for {streams} streams each are more than the \
                 {POOL_STREAMS_MAX} pairs that this allocator keeps apart"
            );
            return Err(SpecError::Value { allocator, message });
        }
        let limit_bytes = inputs.limit_bytes.or(fraction_limit).or(inputs.recorded_limit_bytes);
        let recorded =
            Config::parse_for(version, inputs.recorded_settings.as_deref().unwrap_or_default());
        let mut caching = Caching {
            limit_bytes,
            limit_is_recorded: inputs.limit_bytes.is_none(),
            collects_garbage: false,
            rounds_plainly: false,
            special: false,
            as_recorded: recorded.as_ref() == Ok(&config),
            first_max_split_size_bytes: config.max_split_size_bytes,
            config: Config::default(),
            blocks: Vec::new(),
            spare: Vec::new(),
            segments: Vec::new(),
            free: vec![FreeSet::default(); streams.len() * 2],
            unmapped: vec![BTreeMap::new(); streams.len() * 2],
            pages: BTreeMap::new(),
            streams,
            stream_handles: inputs.stream_handles.clone(),
            searches: [0; 2],
            reserved_bytes: 0,
            stats: Stats::default(),
            pools: inputs.pools.iter().map(PrivatePool::new).collect(),
            pools_with_sets: Vec::new(),
            entered: Vec::new(),
            route: 0,
            overflow: Vec::new(),
            freeable: Vec::new(),
            device_total_bytes: inputs.device_total_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES),
            settings_changes,
            researches,
            segment_rounding_bytes,
            failure: None,
        };
        caching.configure(config);
        Ok(caching)
    }

    /// [`Self::build`] with expandable segments, whatever the settings string says.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn build_expandable(
        mut params: Params,
        inputs: &BuildInputs,
    ) -> Result<Caching, SpecError> {
        params.preset("expandable_segments", "True");
        Caching::build(params, inputs)
    }

    /// Lets a configuration hold from here on.
    fn configure(&mut self, config: Config) {
        self.collects_garbage =
            self.limit_bytes.is_some() && config.garbage_collection_threshold > 0.0;
        self.rounds_plainly = config.roundup_power2_divisions.iter().all(|&count| count <= 1);
        self.special |= config.expandable_segments;
        self.config = config;
    }

    /// Whether free blocks are collected by age: there is a limit and a threshold (spec 3.5).
    pub fn collects_garbage(&self) -> bool {
        self.collects_garbage
    }

    /// Number of free sets that a pool has, one a stream and kind.
    fn sets_per_pool(&self) -> u32 {
        self.streams.len() as u32 * 2
    }

    /// The stream behind a set.
    fn stream_of(&self, set: u32) -> StreamId {
        StreamId(set % self.sets_per_pool() / 2)
    }

    /// Number of a pool behind a set as layouts show it: 0 and 1 are the default pools.
    fn pool_behind(&self, set: u32) -> u32 {
        set / self.sets_per_pool() * 2 + kind_of(set) as u32
    }

    /// Notes that PyTorch would not have got beyond this point.
    fn fail(&mut self, what: &str) {
        self.failure.get_or_insert_with(|| what.to_owned());
    }

    #[inline(never)]
    fn malloc_special<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        self.malloc_by::<true, E>(env, request)
    }

    #[inline(never)]
    fn complete_special<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.complete::<true, E>(env, handle.0);
    }

    /// A malloc, with the rules of expandable segments and private pools if they came up.
    #[inline]
    fn malloc_by<const SPECIAL: bool, E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        // While a private pool is entered, nobody looks (spec 3.3 step 1).
        if !SPECIAL || self.entered.is_empty() {
            while let Some(handle) = env.next_completed() {
                self.complete_deferred(env, handle);
            }
        }
        if request.size_bytes > LARGEST_REQUEST_BYTES {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        }
        let size_bytes = if self.rounds_plainly {
            request.size_bytes.next_multiple_of(MIN_BLOCK_BYTES)
        } else {
            self.config.round_size(request.size_bytes)
        };
        let pool = if SPECIAL { self.route } else { 0 };
        let set = pool + set_of(request.stream, kind_for(size_bytes));
        let expandable = SPECIAL && self.config.expandable_segments;
        let found = match self.search::<SPECIAL>(set, size_bytes, expandable) {
            Some(block) => Found { block, expandable },
            None => self.obtain(env, set, size_bytes, request)?,
        };
        Ok(self.hand_out::<SPECIAL, E>(env, found, size_bytes, request))
    }

    /// Takes a fitting free block out of its set (spec 3.4).
    #[inline]
    fn search<const SPECIAL: bool>(
        &mut self,
        set: u32,
        size_bytes: u64,
        expandable: bool,
    ) -> Option<u32> {
        if self.collects_garbage && set < self.sets_per_pool() {
            self.searches[kind_of(set)] += 1;
        }
        let split_limit_bytes = self.config.max_split_size_bytes;
        let slack_bytes = self.config.max_non_split_rounding_bytes;
        let mut candidate = self.free[set as usize].first_fit(size_bytes)?;
        if SPECIAL {
            candidate = self.pass_expandable(set, candidate, expandable)?;
        }
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
    fn hand_out<const SPECIAL: bool, E: Env>(
        &mut self,
        env: &mut E,
        Found { block: at, expandable }: Found,
        size_bytes: u64,
        request: Request,
    ) -> Handle {
        let never_splits = SPECIAL && self.never_splits(self.blocks[at as usize].set);
        let block = &mut self.blocks[at as usize];
        let (block_bytes, was_split) = (block.size_bytes, block.is_split());
        let kind = kind_of(block.set);
        let remainder_bytes = block_bytes - size_bytes;
        let splits = if never_splits {
            false
        } else if kind == SMALL || (SPECIAL && expandable) {
            remainder_bytes >= MIN_BLOCK_BYTES
        } else {
            size_bytes < self.config.max_split_size_bytes && remainder_bytes > LARGE_REMAINDER_BYTES
        };
        block.requested_bytes = request.size_bytes;
        block.state = State::Allocated;
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
        if SPECIAL && self.blocks[at as usize].expandable {
            (split_count, split_bytes) = (0, 0);
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
        let rest_at = self.new_id();
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
            state: State::Free,
            expandable: block.expandable,
        };
        self.put_block(rest_at, rest);
        if next != NONE {
            self.blocks[next as usize].prev = rest_at;
        }
        self.free[rest.set as usize].insert(rest.entry(rest_at));
    }

    /// An id for a new block.
    #[inline]
    fn new_id(&mut self) -> u32 {
        self.spare.pop().unwrap_or(self.blocks.len() as u32)
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
    fn complete<const SPECIAL: bool, E: Env>(&mut self, env: &mut E, at: u32) {
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
        block.state = State::Free;
        block.gc_base = self.searches[kind];
        let expandable = SPECIAL && block.expandable;
        let entry = block.entry(at);
        self.free[set as usize].insert(entry);
        if prev != NONE || next != NONE {
            split_count += 1;
            split_bytes += size_bytes as i64;
        }
        if expandable {
            (split_count, split_bytes) = (0, 0);
        }
        self.stats.inactive_split.change(kind, split_count);
        self.stats.inactive_split_bytes.change(kind, split_bytes);
    }

    /// The free set that a request is served from.
    fn set_for(&self, request: Request) -> u32 {
        let size_bytes = self.config.round_size(request.size_bytes.min(LARGEST_REQUEST_BYTES));
        self.route + set_of(request.stream, kind_for(size_bytes))
    }

    /// A deferred block completes: a malloc looked, or something waited for the device.
    pub(crate) fn complete_deferred<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let block = &self.blocks[handle.0 as usize];
        self.stats.end_defer(kind_of(block.set), block.size_bytes);
        self.complete_special(env, handle);
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
            stream: self.stream_of(block.set),
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
        if self.special {
            return self.malloc_special(env, request);
        }
        self.malloc_by::<false, E>(env, request)
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle.0);
        if self.special {
            return self.complete_special(env, handle);
        }
        self.complete::<false, E>(env, handle.0);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle.0);
        let block = &mut self.blocks[handle.0 as usize];
        block.state = State::Deferred;
        self.stats.defer(kind_of(block.set), block.size_bytes);
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        // With a private pool entered nothing is waited for or released (spec 4.4, 6.3).
        if self.entered.is_empty() {
            self.flush(env);
        }
    }

    fn adopt(&mut self, start: &StartLayout, blocks: &[trace::Block]) -> Option<Vec<Handle>> {
        if !self.as_recorded {
            return None;
        }
        // On a copy: a layout that does not fit leaves no trace.
        let mut started = self.clone();
        let handles = started.start_from(start, blocks)?;
        *self = started;
        Some(handles)
    }

    fn change_settings<E: Env>(&mut self, _env: &mut E, settings: SettingsId) {
        let Some(text) = self.settings_changes.get(settings.index()) else { return };
        if let Some(limit_bytes) = limit_change(text) {
            if self.limit_is_recorded {
                self.limit_bytes = limit_bytes;
                self.configure(self.config.clone());
            }
            return;
        }
        match changed(&self.config, text) {
            Ok(config) => self.configure(config),
            Err(message) => self.fail(&message),
        }
    }

    fn pool_enter<E: Env>(&mut self, _env: &mut E, pool: PoolId) {
        self.enter(pool);
    }

    fn pool_leave<E: Env>(&mut self, _env: &mut E, pool: PoolId) {
        self.leave(pool);
    }

    fn pool_delete<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        self.delete(env, pool);
    }

    fn stream_added(&mut self, stream: StreamId, handle: u64) {
        self.add_stream(stream, handle);
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
        self.pool_behind(self.set_for(request))
    }

    fn pool_name(&self, pool: u32) -> Option<String> {
        let kind = if pool.is_multiple_of(2) { "small" } else { "large" };
        let private = (pool / 2).checked_sub(1);
        let private = private.and_then(|nth| self.pools_with_sets.get(nth as usize));
        Some(match private.and_then(|id| self.pools.get(id.index())) {
            Some(private) => format!("{}, {kind}", private.name()),
            None => kind.to_owned(),
        })
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let set = &self.free[self.set_for(request) as usize];
        if self.special && !self.config.expandable_segments {
            let ordinary = |entry: &Entry| !self.blocks[entry.block as usize].expandable;
            return set.iter().filter(ordinary).last().map_or(0, |entry| entry.size_bytes);
        }
        set.largest().map_or(0, |entry| entry.size_bytes)
    }

    fn failure(&self) -> Option<String> {
        self.failure.clone()
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
        let max_split_size = match self.first_max_split_size_bytes {
            u64::MAX => -1,
            bytes => bytes as i64,
        };
        Some(self.stats.flat(max_split_size))
    }

    fn params(&self) -> Vec<(String, String)> {
        let mut params = self.config.params();
        if self.config.version != TorchVersion::REFERENCE {
            params.push(("torch".to_owned(), self.config.version.to_string()));
        }
        if self.researches {
            params.push(("research_after_flush".to_owned(), "true".to_owned()));
        }
        if self.segment_rounding_bytes != SEGMENT_ROUNDING_BYTES {
            let rounding = Bytes(self.segment_rounding_bytes).to_string();
            params.push(("segment_rounding".to_owned(), rounding));
        }
        params
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut live: Vec<(u32, &Segment)> =
            (0u32..).zip(&self.segments).filter(|(_, segment)| segment.first != NONE).collect();
        live.sort_by_key(|(_, segment)| segment.address);
        for (ordinal, segment) in live {
            let mut at = segment.first;
            while at != NONE {
                let block = &self.blocks[at as usize];
                let state = match block.state {
                    State::Allocated => Some(BlockState::Allocated),
                    State::Deferred => Some(BlockState::Deferred),
                    State::Free => Some(BlockState::Free),
                    State::Unmapped => None,
                };
                if let Some(state) = state {
                    visit(LayoutBlock {
                        block: if block.is_free() { BlockId::NONE } else { block.owner },
                        segment: ordinal,
                        segment_address: segment.address,
                        segment_bytes: segment.size_bytes,
                        page_bytes: segment.page_bytes,
                        address: block.address,
                        size_bytes: block.size_bytes,
                        requested_bytes: if block.is_free() { 0 } else { block.requested_bytes },
                        stream: self.stream_of(block.set),
                        pool: self.pool_behind(block.set),
                        state,
                    });
                }
                at = block.next;
            }
        }
    }
}
