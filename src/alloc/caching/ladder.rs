//! What a malloc does when no free block fits: spec 3.3 steps 4 to 9, and the flush.
//!
//! ```text
//!   garbage collection ─> device ─> overflow pools ─> targeted release ─> device
//!   (limit and threshold)          (use_on_oom)      (max_split_size)        │
//!                              out of memory <─ device <─ flush <────────────┘
//!                                                (wait, release all; not inside a private pool)
//! ```

use super::stats::{Kind, LARGE, SMALL};
use super::{
    Block, Caching, Found, NONE, OWN_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Segment, State, kind_of,
    set_of,
};
use crate::alloc::free_set::Entry;
use crate::alloc::{Action, ActionKind, Env, OutOfMemory, Request};
use crate::device::Device;
use crate::units::BlockId;

impl Caching {
    /// A block for a request that no free block fits. It is in no set and may be larger than asked.
    #[cold]
    #[inline(never)]
    pub(super) fn obtain<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Result<Found, OutOfMemory> {
        if self.collects_garbage {
            self.collect_garbage(env);
        }
        let expandable = self.config.expandable_segments;
        let found = |block| Found { block, expandable };
        if let Some(block) = self.attempt(env, set, size_bytes, request) {
            return Ok(found(block));
        }
        let overflow_last = self.config.version.overflow_pools_last();
        if !overflow_last && let Some(overflow) = self.take_overflow(set, size_bytes) {
            return Ok(overflow);
        }
        if self.config.max_split_size_bytes != u64::MAX
            && self.release_targeted(env, set, size_bytes)
            && let Some(block) = self.attempt(env, set, size_bytes, request)
        {
            return Ok(found(block));
        }
        // While a private pool is entered there is no flush (spec 6.3).
        if self.entered.is_empty() {
            self.flush(env);
            self.stats.num_alloc_retries += 1;
            if self.researches
                && let Some(block) = self.search::<true>(set, size_bytes, expandable)
            {
                return Ok(found(block));
            }
            if let Some(block) = self.attempt(env, set, size_bytes, request) {
                return Ok(found(block));
            }
        }
        if overflow_last && let Some(overflow) = self.take_overflow(set, size_bytes) {
            return Ok(overflow);
        }
        Err(self.out_of_memory(env, size_bytes, request))
    }

    /// Counts and logs a refusal.
    pub(super) fn out_of_memory<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> OutOfMemory {
        self.stats.num_ooms += 1;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    /// The segment that a size asks for (spec 2.3).
    fn segment_size(&self, kind: Kind, size_bytes: u64) -> u64 {
        if kind == SMALL {
            SMALL_SEGMENT_BYTES
        } else if size_bytes < OWN_SEGMENT_BYTES {
            self.config.large_segment_size_bytes
        } else {
            size_bytes.next_multiple_of(self.segment_rounding_bytes)
        }
    }

    /// A device attempt (spec 3.3 step 5): a block in no set that holds the size.
    fn attempt<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Option<u32> {
        let segment_bytes = self.segment_size(kind_of(set), size_bytes);
        let within_limit = self
            .limit_bytes
            .is_none_or(|limit| self.reserved_bytes.saturating_add(segment_bytes) <= limit);
        let obtained = match (within_limit, self.config.expandable_segments) {
            (false, _) => None,
            (true, true) => self.obtain_pages(env, set, size_bytes),
            (true, false) => self.obtain_segment(env, set, segment_bytes),
        };
        if E::LOG && obtained.is_none() {
            let kind = ActionKind::DeviceRefused;
            env.log(Action::notice(kind, request.block, request.stream, segment_bytes));
        }
        obtained
    }

    /// A whole segment as one block.
    fn obtain_segment<E: Env>(&mut self, env: &mut E, set: u32, segment_bytes: u64) -> Option<u32> {
        let address = env.device().malloc(segment_bytes).ok()?;
        let at = self.new_segment(address, segment_bytes, set);
        if E::LOG {
            let segment = self.blocks[at as usize].segment;
            env.log(self.segment_action(ActionKind::SegmentAlloc, segment, set));
        }
        Some(at)
    }

    /// Enters memory of the device as a segment of one free block, which is in no set.
    pub(super) fn new_segment(&mut self, address: u64, size_bytes: u64, set: u32) -> u32 {
        let kind = kind_of(set);
        let segment = self.segments.len() as u32;
        let at = self.new_id();
        let block = Block {
            gc_base: self.searches[kind],
            state: State::Free,
            expandable: false,
            ..Block::unmapped(address, size_bytes, segment, set)
        };
        self.put_block(at, block);
        self.segments.push(Segment { address, size_bytes, page_bytes: 0, first: at });
        self.gain(set, size_bytes);
        self.stats.segment(kind, 1, size_bytes);
        if size_bytes >= self.config.max_split_size_bytes {
            self.stats.oversize_segments.change(1);
        }
        at
    }

    fn segment_action(&self, kind: ActionKind, segment: u32, set: u32) -> Action {
        let Segment { address, size_bytes, .. } = self.segments[segment as usize];
        Action {
            kind,
            block: BlockId::NONE,
            segment,
            stream: self.stream_of(set),
            offset_bytes: 0,
            size_bytes,
            address,
        }
    }

    /// Returns a free, unsplit block's segment to the device. A device that refuses the call keeps
    /// the segment in use, so the block stays free.
    fn release_segment<E: Env>(&mut self, env: &mut E, at: u32) -> bool {
        let block = self.blocks[at as usize];
        if env.device().free(block.address).is_err() {
            return false;
        }
        self.free[block.set as usize].remove(block.entry(at));
        self.spare.push(at);
        self.segments[block.segment as usize].first = NONE;
        self.lose(block.set, block.size_bytes);
        self.stats.segment(kind_of(block.set), -1, block.size_bytes);
        if block.size_bytes >= self.config.max_split_size_bytes {
            self.stats.oversize_segments.change(-1);
        }
        if E::LOG {
            env.log(self.segment_action(ActionKind::SegmentFree, block.segment, block.set));
        }
        true
    }

    /// Returns old, unsplit blocks of the large pool until the reserved memory is below the
    /// threshold (spec 3.5).
    fn collect_garbage<E: Env>(&mut self, env: &mut E) {
        let Some(limit_bytes) = self.limit_bytes else { return };
        let threshold = self.config.garbage_collection_threshold;
        let threshold_bytes = (threshold * limit_bytes as f64) as u64;
        if self.reserved_bytes <= threshold_bytes {
            return;
        }
        let target_bytes = self.reserved_bytes - threshold_bytes;
        // Whole reservations count among the ages, but never go back here.
        let mut candidates = self.unsplit_free(0, LARGE);
        let age = |caching: &Caching, at: u32| {
            caching.searches[LARGE] - caching.blocks[at as usize].gc_base
        };
        let mut age_sum: u64 = candidates.iter().map(|&at| age(self, at)).sum();
        let mut reclaimed_bytes = 0;
        let mut released_any = true;
        while reclaimed_bytes < target_bytes && released_any && !candidates.is_empty() {
            released_any = false;
            let age_threshold = age_sum as f64 / candidates.len() as f64;
            let pass = std::mem::take(&mut candidates);
            for at in pass {
                let age = age(self, at);
                let size_bytes = self.blocks[at as usize].size_bytes;
                let expandable = self.blocks[at as usize].expandable;
                if !expandable && age as f64 >= age_threshold && self.release_segment(env, at) {
                    released_any = true;
                    reclaimed_bytes += size_bytes;
                    age_sum -= age;
                } else {
                    candidates.push(at);
                }
            }
        }
    }

    /// Free blocks of a pool and kind, in order (spec 3.2). `sets` is where the pool's sets begin.
    fn free_blocks(&self, sets: u32, kind: Kind) -> impl Iterator<Item = u32> + '_ {
        let streams = self.streams.iter();
        let sets = streams.map(move |&stream| &self.free[(sets + set_of(stream, kind)) as usize]);
        sets.flat_map(|set| set.iter()).map(|entry| entry.block)
    }

    /// Those that are whole segments.
    fn unsplit_free(&self, sets: u32, kind: Kind) -> Vec<u32> {
        let unsplit = |&at: &u32| !self.blocks[at as usize].is_split();
        self.free_blocks(sets, kind).filter(unsplit).collect()
    }

    /// Releases oversize blocks that make room for this request (spec 3.3 step 7).
    fn release_targeted<E: Env>(&mut self, env: &mut E, set: u32, size_bytes: u64) -> bool {
        let split_limit_bytes = self.config.max_split_size_bytes;
        let key_bytes = size_bytes.max(split_limit_bytes);
        let fit = self.free[set as usize].first_fit(key_bytes);
        if let Some(fit) = fit.filter(|fit| !self.blocks[fit.block as usize].expandable) {
            return self.release_whole(env, fit.block);
        }
        // Backwards from there: the largest below the key first.
        let below: Vec<Entry> = self.free[set as usize].at_least(split_limit_bytes).collect();
        let mut released_bytes = 0;
        for entry in below.into_iter().rev().filter(|entry| entry.size_bytes < key_bytes) {
            if released_bytes >= key_bytes {
                break;
            }
            if self.blocks[entry.block as usize].expandable {
                continue;
            }
            if !self.release_whole(env, entry.block) {
                break;
            }
            released_bytes += entry.size_bytes;
        }
        released_bytes >= key_bytes
    }

    /// Releases a segment that a targeted release picked, unless it is split: PyTorch does not look
    /// and hands a part of a segment to the device (spec 7.3).
    fn release_whole<E: Env>(&mut self, env: &mut E, at: u32) -> bool {
        if self.blocks[at as usize].is_split() {
            self.fail(
                "max_split_size_mb with expandable_segments split a block that a targeted release \
                 then gave to the device in part, which corrupts PyTorch's own allocator",
            );
            return false;
        }
        self.release_segment(env, at)
    }

    /// Waits for all deferred blocks, then returns what can be returned: the default pools, then
    /// deleted ones (spec 3.3 step 8).
    pub(super) fn flush<E: Env>(&mut self, env: &mut E) {
        self.stats.num_sync_all_streams += 1;
        while let Some(handle) = env.wait_completed() {
            self.complete_deferred(env, handle);
        }
        self.release_pool(env, 0, LARGE);
        self.release_pool(env, 0, SMALL);
        for pool in std::mem::take(&mut self.freeable) {
            self.release_deleted(env, pool);
        }
    }

    /// Returns whole segments of a pool in order, then the whole pages of reservations (spec 3.7).
    pub(super) fn release_pool<E: Env>(&mut self, env: &mut E, sets: u32, kind: Kind) {
        let (expandable, ordinary): (Vec<u32>, Vec<u32>) =
            self.free_blocks(sets, kind).partition(|&at| self.blocks[at as usize].expandable);
        for at in ordinary {
            if !self.blocks[at as usize].is_split() {
                self.release_segment(env, at);
            }
        }
        for at in expandable {
            self.unmap(env, at);
        }
    }
}
