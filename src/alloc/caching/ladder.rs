//! What a malloc does when no free block fits: spec 3.3 steps 4 to 9, and the flush.
//!
//! ```text
//!   garbage collection ─> device ─> targeted release ─> device ─> flush ─> device ─> out of memory
//!   (limit and threshold)          (max_split_size)              (wait, release all)
//! ```

use super::stats::{Kind, LARGE, SMALL};
use super::{
    Block, Caching, NONE, OWN_SEGMENT_BYTES, SEGMENT_ROUNDING_BYTES, SMALL_SEGMENT_BYTES, Segment,
    kind_of, set_of, stream_of,
};
use crate::alloc::{Action, ActionKind, BlockState, Env, OutOfMemory, Request};
use crate::device::Device;
use crate::units::{BlockId, StreamId};

/// A log entry that is about no block and no segment.
pub(super) fn notice(kind: ActionKind, stream: StreamId, size_bytes: u64) -> Action {
    Action {
        kind,
        block: BlockId::NONE,
        segment: u32::MAX,
        stream,
        offset_bytes: 0,
        size_bytes,
        address: 0,
    }
}

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
    ) -> Result<u32, OutOfMemory> {
        if self.collects_garbage {
            self.collect_garbage(env);
        }
        let segment_bytes = self.segment_size(kind_of(set), size_bytes);
        if let Some(at) = self.obtain_segment(env, set, segment_bytes, request) {
            return Ok(at);
        }
        if self.config.max_split_size_bytes != u64::MAX
            && self.release_targeted(env, set, size_bytes)
            && let Some(at) = self.obtain_segment(env, set, segment_bytes, request)
        {
            return Ok(at);
        }
        self.flush(env);
        self.stats.num_alloc_retries += 1;
        if let Some(at) = self.obtain_segment(env, set, segment_bytes, request) {
            return Ok(at);
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
            let oom = notice(ActionKind::Oom, request.stream, size_bytes);
            env.log(Action { block: request.block, ..oom });
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
            size_bytes.next_multiple_of(SEGMENT_ROUNDING_BYTES)
        }
    }

    /// A device attempt (spec 3.3 step 5): the whole segment as one block, in no set.
    fn obtain_segment<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        segment_bytes: u64,
        request: Request,
    ) -> Option<u32> {
        let within_limit = self
            .limit_bytes
            .is_none_or(|limit| self.reserved_bytes.saturating_add(segment_bytes) <= limit);
        let address = if within_limit { env.device().malloc(segment_bytes).ok() } else { None };
        let Some(address) = address else {
            if E::LOG {
                let refused = notice(ActionKind::DeviceRefused, request.stream, segment_bytes);
                env.log(Action { block: request.block, ..refused });
            }
            return None;
        };
        let kind = kind_of(set);
        let segment = self.segments.len() as u32;
        let at = self.spare.pop().unwrap_or(self.blocks.len() as u32);
        let block = Block {
            address,
            size_bytes: segment_bytes,
            requested_bytes: 0,
            gc_base: self.searches[kind],
            prev: NONE,
            next: NONE,
            segment,
            set,
            owner: BlockId::NONE,
            state: BlockState::Free,
        };
        self.put_block(at, block);
        self.segments.push(Segment { address, size_bytes: segment_bytes, first: at });
        self.reserved_bytes += segment_bytes;
        self.stats.segment(kind, 1, segment_bytes);
        if segment_bytes >= self.config.max_split_size_bytes {
            self.stats.oversize_segments.change(1);
        }
        if E::LOG {
            env.log(self.segment_action(ActionKind::SegmentAlloc, segment, set));
        }
        Some(at)
    }

    fn segment_action(&self, kind: ActionKind, segment: u32, set: u32) -> Action {
        let Segment { address, size_bytes, .. } = self.segments[segment as usize];
        Action {
            kind,
            block: BlockId::NONE,
            segment,
            stream: stream_of(set),
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
        self.reserved_bytes -= block.size_bytes;
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
        let mut candidates = self.unsplit_free(LARGE);
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
                if age as f64 >= age_threshold && self.release_segment(env, at) {
                    released_any = true;
                    reclaimed_bytes += size_bytes;
                    age_sum -= age;
                } else {
                    candidates.push(at);
                }
            }
        }
    }

    /// Free blocks of a kind of pool that are whole segments, in order (spec 3.2).
    fn unsplit_free(&self, kind: Kind) -> Vec<u32> {
        let sets = self.streams.iter().map(|&stream| &self.free[set_of(stream, kind) as usize]);
        sets.flat_map(|set| set.iter())
            .map(|entry| entry.block)
            .filter(|&at| !self.blocks[at as usize].is_split())
            .collect()
    }

    /// Releases oversize blocks that make room for this request (spec 3.3 step 7).
    fn release_targeted<E: Env>(&mut self, env: &mut E, set: u32, size_bytes: u64) -> bool {
        let split_limit_bytes = self.config.max_split_size_bytes;
        let key_bytes = size_bytes.max(split_limit_bytes);
        if let Some(fit) = self.free[set as usize].first_fit(key_bytes) {
            return self.release_segment(env, fit.block);
        }
        // No block reaches the key, so the walk backwards starts at the largest of this stream.
        let mut released_bytes = 0;
        while released_bytes < key_bytes {
            let Some(entry) = self.free[set as usize].largest() else { break };
            if entry.size_bytes < split_limit_bytes || !self.release_segment(env, entry.block) {
                break;
            }
            released_bytes += entry.size_bytes;
        }
        released_bytes >= key_bytes
    }

    /// Waits for all deferred blocks, then returns every whole segment: the large pool first, then
    /// the small one (spec 3.3 step 8, 3.7).
    pub(super) fn flush<E: Env>(&mut self, env: &mut E) {
        self.stats.num_sync_all_streams += 1;
        while let Some(handle) = env.wait_completed() {
            self.complete_deferred(env, handle);
        }
        for kind in [LARGE, SMALL] {
            for at in self.unsplit_free(kind) {
                self.release_segment(env, at);
            }
        }
    }
}
