//! The policy `best`: stitching of our own design.
//!
//! GMLake maps every chunk of 2 MiB by itself, and on an H200 that is what it pays for: 42 µs to
//! obtain a chunk and 29 µs to give it a second address, whatever its size up to 32 MiB
//! (`reports/vmm_ranges.md`). It also rounds every large request to 2 MiB, and stitches nothing
//! below a limit. `best` keeps the idea, memory with several addresses, and changes the rest:
//!
//! ```text
//!   home     │ used │ free    │ used │ free   │ ... grows at its end, blocks of 512 bytes
//!   pieces   │ 16 MiB │ 16 MiB │ 16 MiB │ 4 MiB │
//!                  └───┬────┘          └─┬─┘
//!   view            │ 16 MiB │ 4 MiB │          a second range for what lies apart at home
//! ```
//!
//! - **Home** ([`heap`]): all memory of a stream lies in few large ranges that grow at their end as
//!   expandable segments do, so that most requests need no view; blocks are cut and joined there at
//!   512 bytes, best fit. Nothing is rounded to a piece.
//! - **Large pieces**: memory is obtained in pieces of up to 16 MiB (by the device's costs, see
//!   [`config`]), one for a smaller growth. A view maps whole pieces, but what is used of them is a
//!   matter of bytes: its first piece may give its back only, its last its front ([`gather`]).
//! - **Growth or view, whichever takes less new memory.** A view counts if what it saves is worth
//!   what it costs: no more than new memory costs a byte in the smallest unit. Below 1/128 over the
//!   active peak so far, memory grows without a view: most of those would be for memory that is
//!   needed soon after in any case.
//! - **Views stay** ([`views`]) for requests of their size or down to half of it. Idle ones go, the
//!   least recently used first, above 32 GiB or a quarter of the reserved memory. A view that has to
//!   be made again after that shows that the program repeats itself; the limit doubles.
//! - **The device is waited for** only when a request would be refused otherwise, and only if all
//!   that could come back is enough for it. Then deferred frees are completed, and if that is not
//!   enough, other streams give whole free pieces back.
//!
//! # Periodic programs
//!
//! A program that repeats itself, with everything free between two rounds, needs no device call from
//! some round on. A request looks at home first, then for the *oldest* view that fits, then makes a
//! view from what is free, all by rules that know nothing but what lies where. If a round added no
//! memory and evicted nothing, the next one begins in the same state but for more views, all of
//! them younger than those that the round looked at; so it finds the same block at home, or the
//! same oldest view, or the view that was made then: the same state again, and no call.
//!
//! # Figures
//!
//! On the 25 recorded jobs with PyTorch's default settings (`reports/stitching.md`) it holds less
//! memory than `paper` and `shipped` on every one, 1.2 % above the requested peak in the median,
//! with an eighth and a seventh of their device calls. It settles later than they do, and takes more
//! addresses than `shipped`, which stitches less.

mod config;
mod gather;
mod growth;
mod heap;
mod views;

use std::collections::BTreeSet;

use crate::alloc::spec::{Params, SpecError};
use crate::alloc::{
    ALIGNMENT_BYTES, Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle,
    LayoutBlock, Levels, OutOfMemory, Request,
};
use crate::device::Device;
use crate::units::{BlockId, MIB, StreamId};
use config::Config;
use gather::{Gathered, RUNS_MAX, RUNS_USUAL};
use heap::{Heap, Live, NONE, State, UNIT_BYTES};

pub(super) use config::help;

/// Requests up to this have memory of their own.
const SMALL_BYTES: u64 = MIB;

/// The allocator.
#[derive(Clone, Debug)]
pub struct Best {
    config: Config,
    heap: Heap,
    levels: Levels,
    /// Largest sum of active blocks so far, a request under way included.
    active_bytes_peak: u64,
    counts: Counts,
    /// Addresses that the device did not take back.
    refused_addresses: Vec<(u64, u64)>,
    /// Signatures of evicted views.
    evicted: BTreeSet<u64>,
    /// The limit of idle views, in times what it was at first.
    view_raise: u64,
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    segment_allocs: u64,
    segment_frees: u64,
    alloc_retries: u64,
    ooms: u64,
    device_syncs: u64,
    stitches: u64,
    stitched_bytes: u64,
    stitched_bytes_peak: u64,
    stitch_reuses: u64,
    stitch_evictions: u64,
    /// Segments, pieces and views so far.
    ordinals: u32,
    /// Uses of views so far: the clock of eviction.
    ticks: u64,
}

/// The arena of a request.
#[inline]
fn arena_index(stream: StreamId, size_bytes: u64) -> usize {
    stream.index() * 2 + usize::from(size_bytes <= SMALL_BYTES)
}

impl Best {
    /// Builds the allocator.
    ///
    /// # Errors
    /// A parameter that it does not know, or a value that is not accepted.
    pub(super) fn build(mut params: Params, inputs: &BuildInputs) -> Result<Best, SpecError> {
        let config = Config::take(&mut params, inputs)?;
        params.finish()?;
        Ok(Best {
            config,
            heap: Heap::default(),
            levels: Levels::default(),
            active_bytes_peak: 0,
            counts: Counts::default(),
            refused_addresses: Vec::new(),
            evicted: BTreeSet::new(),
            view_raise: 1,
        })
    }

    fn next_ordinal(&mut self) -> u32 {
        self.counts.ordinals += 1;
        self.counts.ordinals - 1
    }

    fn tick(&mut self) -> u64 {
        self.counts.ticks += 1;
        self.counts.ticks
    }

    #[inline]
    fn arena(&mut self, stream: StreamId, size_bytes: u64) -> u32 {
        let arena = arena_index(stream, size_bytes);
        if arena >= self.heap.arenas.len() {
            self.heap.arenas.resize_with(arena + 1, Default::default);
        }
        arena as u32
    }

    /// Memory that is there: at home, best fit, else in a view.
    #[inline]
    fn take_cached(&mut self, arena: u32, size_bytes: u64) -> Option<u32> {
        if let Some(first) = self.take_home(arena, size_bytes) {
            return Some(first);
        }
        let view = self.heap.oldest_view(arena, size_bytes)?;
        self.counts.stitch_reuses += 1;
        self.take_view(view, size_bytes)
    }

    #[inline]
    fn take_home(&mut self, arena: u32, size_bytes: u64) -> Option<u32> {
        let entry = self.heap.arenas[arena as usize].free.first_fit(size_bytes)?;
        Some(self.heap.use_range(entry.block, entry.address, size_bytes))
    }

    /// Takes the memory behind the first `size_bytes` of a view that has it free.
    fn take_view(&mut self, id: u32, size_bytes: u64) -> Option<u32> {
        let now = self.tick();
        self.heap.begin_use(id, now);
        let view = &self.heap.views[id as usize];
        let parts: Vec<(u32, u64, u64)> = self.heap.parts(view, size_bytes).collect();
        let (mut first, mut last) = (None, NONE);
        for (piece, offset, bytes) in parts {
            let block = self.heap.free_block_at(piece, offset, bytes)?;
            let address = self.heap.pieces[piece as usize].address + offset;
            let part = self.heap.use_range(block, address, bytes);
            match first {
                None => first = Some(part),
                Some(_) => self.heap.blocks[last as usize].chain = part,
            }
            last = part;
        }
        self.heap.blocks[first? as usize].live.view = id;
        first
    }

    /// Memory that is not there yet, or not in one range.
    #[cold]
    fn take_new<E: Env>(&mut self, env: &mut E, arena: u32, size_bytes: u64) -> Option<u32> {
        self.active_bytes_peak =
            self.active_bytes_peak.max(self.levels.active_bytes.saturating_add(size_bytes));
        let mut place = self.place_for(arena, size_bytes);
        if let Some(got) = self.view_that_pays(arena, size_bytes, place.more_bytes) {
            let first = self.take_stitched(env, arena, size_bytes, got);
            if first.is_some() {
                return first;
            }
            place = self.place_for(arena, size_bytes);
        }
        if self.add_memory(env, arena, place) {
            return self.take_home(arena, size_bytes);
        }
        if size_bytes <= SMALL_BYTES {
            return None;
        }
        let got = self.gather(arena, size_bytes, RUNS_MAX);
        self.take_stitched(env, arena, size_bytes, got)
    }

    /// What a view would be made of, if it is worth it against adding `home_bytes` of memory at
    /// home.
    fn view_that_pays(&self, arena: u32, size_bytes: u64, home_bytes: u64) -> Option<Gathered> {
        let slack_bytes = (self.active_bytes_peak as f64 * self.config.slack) as u64;
        let grown_bytes = self.levels.reserved_bytes.saturating_add(home_bytes);
        if size_bytes <= SMALL_BYTES || grown_bytes <= self.active_bytes_peak + slack_bytes {
            return None;
        }
        let got = self.gather(arena, size_bytes, RUNS_USUAL);
        let saved_bytes = home_bytes.saturating_sub(got.missing_bytes(size_bytes));
        let cost_ns = got.pieces.len() as f64 * self.config.map_ns;
        let pays = saved_bytes > 0 && cost_ns <= saved_bytes as f64 * self.config.byte_ns;
        pays.then_some(got)
    }

    /// A block in a new view of what was gathered, and of new memory for what is missing.
    fn take_stitched<E: Env>(
        &mut self,
        env: &mut E,
        arena: u32,
        size_bytes: u64,
        mut got: Gathered,
    ) -> Option<u32> {
        let more_bytes = got.missing_bytes(size_bytes);
        if more_bytes > 0 {
            let place = self.place_of(arena, more_bytes);
            if got.bytes == 0 || !self.add_memory(env, arena, place) {
                return None;
            }
            // What was added may have closed a gap at home.
            if let Some(first) = self.take_home(arena, size_bytes) {
                return Some(first);
            }
            got = self.gather(arena, size_bytes, got.runs_max);
        }
        if got.bytes < size_bytes {
            return None;
        }
        let view = self.make_view(env, arena, got, size_bytes)?;
        let first = self.take_view(view, size_bytes);
        self.evict(env);
        first
    }

    /// What can be had by waiting for the device.
    #[cold]
    fn take_after_wait<E: Env>(&mut self, env: &mut E, arena: u32, size_bytes: u64) -> Option<u32> {
        if !self.waiting_may_help(env, size_bytes) {
            return None;
        }
        self.counts.alloc_retries += 1;
        if self.wait(env) {
            let first = self.take_cached(arena, size_bytes);
            let first = first.or_else(|| self.take_new(env, arena, size_bytes));
            if first.is_some() {
                return first;
            }
        }
        let mut missing_bytes = self.place_for(arena, size_bytes).more_bytes;
        for other in (0..self.heap.arenas.len() as u32).filter(|&other| other != arena) {
            missing_bytes = missing_bytes.saturating_sub(self.trim(env, other, missing_bytes));
        }
        self.take_new(env, arena, size_bytes).or_else(|| {
            // The last resort: whole pieces of its own that no view could be made of.
            self.trim(env, arena, size_bytes.next_multiple_of(UNIT_BYTES));
            self.take_new(env, arena, size_bytes)
        })
    }

    /// Whether there is anything to wait for, and all that could come of it is enough.
    fn waiting_may_help<E: Env>(&self, env: &mut E, size_bytes: u64) -> bool {
        let Levels { allocated_bytes, active_bytes, reserved_bytes } = self.levels;
        let any_free =
            self.heap.arenas.iter().any(|arena| arena.free.at_least(UNIT_BYTES).next().is_some());
        let device_bytes = env.device().memory_info().free_bytes.min(self.room_to_limit_bytes());
        let could_be_free = (reserved_bytes - allocated_bytes).saturating_add(device_bytes);
        (active_bytes > allocated_bytes || any_free) && could_be_free >= size_bytes
    }

    /// Waits for the device: no freed memory is in use after that. Says whether anything was.
    fn wait<E: Env>(&mut self, env: &mut E) -> bool {
        self.counts.device_syncs += 1;
        let mut any = false;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
            any = true;
        }
        any
    }

    #[inline]
    fn begin_free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.levels.allocated_bytes -= self.heap.blocks[handle.0 as usize].live.size_bytes;
        if E::LOG {
            env.log(self.block_action(ActionKind::FreeRequested, handle.0));
        }
    }

    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        if E::LOG {
            env.log(self.block_action(ActionKind::FreeCompleted, handle.0));
        }
        let Live { view, size_bytes, .. } = self.heap.blocks[handle.0 as usize].live;
        self.levels.active_bytes -= size_bytes;
        if view != NONE {
            self.heap.end_use(view);
        }
        let mut part = handle.0;
        while part != NONE {
            let next = self.heap.blocks[part as usize].chain;
            self.heap.set_free(part);
            part = next;
        }
    }

    fn block_action(&self, kind: ActionKind, first: u32) -> Action {
        let block = &self.heap.blocks[first as usize];
        let slab = &self.heap.slabs[block.slab as usize];
        let (segment, offset_bytes, address) = match block.live.view {
            NONE => (slab.ordinal, block.address - slab.base, block.address),
            view => {
                let view = &self.heap.views[view as usize];
                (view.ordinal, view.skip_bytes, view.address + view.skip_bytes)
            }
        };
        Action {
            kind,
            block: block.live.request,
            segment,
            stream: StreamId(slab.arena / 2),
            offset_bytes,
            size_bytes: block.live.requested_bytes,
            address,
        }
    }

    #[cold]
    fn out_of_memory<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> OutOfMemory {
        self.counts.ooms += 1;
        if E::LOG {
            for kind in [ActionKind::DeviceRefused, ActionKind::Oom] {
                env.log(Action::notice(kind, request.block, request.stream, size_bytes));
            }
        }
        OutOfMemory { size_bytes }
    }

    /// What every part of a live block holds of what was asked for.
    fn owners(&self) -> Vec<(BlockId, u64)> {
        let mut owners = vec![(BlockId::NONE, 0); self.heap.blocks.len()];
        for (id, block) in self.heap.blocks.iter().enumerate() {
            if block.live.size_bytes == 0 {
                continue;
            }
            let mut left = block.live.requested_bytes;
            let mut part = id as u32;
            while part != NONE {
                let at = &self.heap.blocks[part as usize];
                let bytes = left.min(at.size_bytes);
                owners[part as usize] = (block.live.request, bytes);
                left -= bytes;
                part = at.chain;
            }
        }
        owners
    }

    /// Tells a block piece by piece: a piece can be given back if all of it is free.
    fn lay_out(&self, id: u32, owner: (BlockId, u64), visit: &mut dyn FnMut(LayoutBlock)) {
        let block = &self.heap.blocks[id as usize];
        let stream = StreamId(self.heap.slabs[block.slab as usize].arena / 2);
        let pool = self.heap.slabs[block.slab as usize].arena % 2;
        let state = match block.state {
            State::Free => BlockState::Free,
            State::Used => BlockState::Allocated,
            State::Deferred => BlockState::Deferred,
            State::Unmapped => return,
        };
        let (request, mut requested_left) = owner;
        for (_, piece) in self.heap.pieces_over(block) {
            let at = piece.address.max(block.address);
            let size_bytes = piece.end().min(block.end()) - at;
            let requested_bytes = requested_left.min(size_bytes);
            requested_left -= requested_bytes;
            visit(LayoutBlock {
                block: request,
                segment: piece.ordinal,
                segment_address: piece.address,
                segment_bytes: piece.size_bytes,
                page_bytes: 0,
                address: at,
                size_bytes,
                requested_bytes,
                stream,
                pool,
                state,
            });
        }
    }
}

impl Allocator for Best {
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle);
        }
        // What no device of this size has is refused without asking for it piece by piece.
        let rounded = request.size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES);
        let Some(size_bytes) = rounded.filter(|&size| size <= self.config.request_bytes_max) else {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        };
        let arena = self.arena(request.stream, size_bytes);
        let first = self.take_cached(arena, size_bytes);
        let first = first.or_else(|| self.take_new(env, arena, size_bytes));
        let first = first.or_else(|| self.take_after_wait(env, arena, size_bytes));
        let Some(first) = first else {
            return Err(self.out_of_memory(env, size_bytes, request));
        };
        let live = &mut self.heap.blocks[first as usize].live;
        live.request = request.block;
        live.requested_bytes = request.size_bytes;
        live.size_bytes = size_bytes;
        self.levels.allocated_bytes += size_bytes;
        self.levels.active_bytes += size_bytes;
        if E::LOG {
            env.log(self.block_action(ActionKind::Alloc, first));
        }
        Ok(Handle(first))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.complete(env, handle);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        let mut part = handle.0;
        while part != NONE {
            let block = &mut self.heap.blocks[part as usize];
            block.state = State::Deferred;
            part = block.chain;
        }
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        self.wait(env);
        for arena in 0..self.heap.arenas.len() as u32 {
            self.trim(env, arena, u64::MAX);
        }
        self.retry_addresses(env);
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.levels
    }

    fn pool_of(&self, request: Request) -> u32 {
        u32::from(request.size_bytes <= SMALL_BYTES)
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let arena = arena_index(request.stream, request.size_bytes);
        let Some(arena) = self.heap.arenas.get(arena) else { return 0 };
        let home = arena.free.largest().map_or(0, |entry| entry.size_bytes);
        let views = arena.views.iter().flatten().filter_map(|&id| {
            let view = &self.heap.views[id as usize];
            let is_free = !view.is_live && self.heap.is_free(view, view.room_bytes);
            is_free.then_some(view.room_bytes)
        });
        views.fold(home, u64::max)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.config.limit_bytes
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.heap.check()?;
        let reserved: u64 = self.heap.arenas.iter().map(|arena| arena.mapped_bytes).sum();
        if reserved != self.levels.reserved_bytes {
            return Err(format!(
                "arenas hold {reserved} bytes, reserved is {}",
                self.levels.reserved_bytes
            ));
        }
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counts = &self.counts;
        vec![
            ("segment_allocs", counts.segment_allocs),
            ("segment_frees", counts.segment_frees),
            ("alloc_retries", counts.alloc_retries),
            ("ooms", counts.ooms),
            ("device_syncs", counts.device_syncs),
            ("stitches", counts.stitches),
            ("stitched_bytes", counts.stitched_bytes),
            ("stitched_bytes_peak", counts.stitched_bytes_peak),
            ("stitch_reuses", counts.stitch_reuses),
            ("stitch_evictions", counts.stitch_evictions),
        ]
    }

    fn params(&self) -> Vec<(String, String)> {
        self.config.shown()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let owners = self.owners();
        let mut slabs: Vec<_> = self.heap.slabs.iter().filter(|slab| slab.first != NONE).collect();
        slabs.sort_by_key(|slab| slab.base);
        for slab in slabs {
            let mut id = slab.first;
            while id != NONE {
                self.lay_out(id, owners[id as usize], visit);
                id = self.heap.blocks[id as usize].next;
            }
        }
    }
}
