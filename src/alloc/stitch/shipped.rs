//! The order of attempts of the published code (gmlake spec 2.4 to 2.7, 3.3).
//!
//! ```text
//!   primitive ─> stitched ─> stitch ─> old blocks ─> new ─> oversize ─> new ─> stitch
//!   best fit     in part     level 0   go (limit)           go                 level 1
//!                                        out of memory <─ stitch <─ new <─ flush ──┘
//!                                                         level 2
//! ```

use super::chunks::CHUNK_BYTES;
use super::gmlake::{Found, Gmlake, LARGE, kind_for, kind_of, set_of, stream_of};
use super::segments::segment_bytes_for;
use crate::alloc::free_set::Entry;
use crate::alloc::{Env, Handle, OutOfMemory, Request};
use crate::units::StreamId;

/// The attempt that stitches what there is with the part that was missing: no `defrag_level`
/// forbids it (spec 2.7).
const LEVEL_AFTER_SHORTFALL: u8 = 4;

impl Gmlake {
    /// A malloc of a rounded size.
    #[inline]
    pub(super) fn malloc_shipped<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        let set = set_of(request.stream, kind_for(size_bytes));
        let searched = self.search(set, size_bytes);
        if let Ok(Some(at)) = searched {
            return Ok(self.hand_out(env, at, size_bytes, request));
        }
        let found = self.obtain_shipped(env, set, size_bytes, request, searched.is_ok())?;
        Ok(self.hand_out_found(env, found, size_bytes, request))
    }

    /// Everything after the search for a primitive block. `reuses` is false where a block was large
    /// enough but not allowed: then stitched ones are not looked at (spec 2.5).
    #[cold]
    #[inline(never)]
    fn obtain_shipped<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
        reuses: bool,
    ) -> Result<Found, OutOfMemory> {
        if reuses && let Some(id) = self.find_stitched(set, size_bytes) {
            self.take_stitched(id, size_bytes);
            return Ok(Found::Stitched(id));
        }
        if let Some(id) = self.stitch_free(env, 0, set, size_bytes) {
            return Ok(Found::Stitched(id));
        }
        if self.collects_garbage {
            self.collect_garbage(env);
        }
        if let Some(found) = self.new_physical(env, set, size_bytes, request) {
            return Ok(found);
        }
        if self.config.torch.max_split_size_bytes != u64::MAX
            && self.release_targeted(env, set, size_bytes)
            && let Some(found) = self.new_physical(env, set, size_bytes, request)
        {
            return Ok(found);
        }
        if let Some(id) = self.stitch_free(env, 1, set, size_bytes) {
            return Ok(Found::Stitched(id));
        }
        self.wait(env);
        self.release_cache(env);
        self.counters.alloc_retries += 1;
        if let Some(found) = self.new_physical(env, set, size_bytes, request) {
            return Ok(found);
        }
        if let Some(id) = self.stitch_free(env, 2, set, size_bytes) {
            return Ok(Found::Stitched(id));
        }
        Err(self.out_of_memory(env, size_bytes, request))
    }

    /// The smallest free stitched block that may serve a request (spec 2.5 b).
    fn find_stitched(&mut self, set: u32, size_bytes: u64) -> Option<u32> {
        if kind_of(set) != LARGE || !self.config.vmm {
            return None;
        }
        let sizes = size_bytes..=(size_bytes as f64 * self.config.reuse_limit) as u64;
        self.idle[stream_of(set).index()].find_free(sizes, &self.stitched, &self.chunks)
    }

    /// Stitches free blocks, the largest first, if that is allowed at this attempt (spec 2.6).
    fn stitch_free<E: Env>(
        &mut self,
        env: &mut E,
        level: u8,
        set: u32,
        size_bytes: u64,
    ) -> Option<u32> {
        if !self.stitches(set, size_bytes) || level < self.config.defrag_level {
            return None;
        }
        let mut entries: Vec<Entry> = Vec::new();
        let mut sum_bytes = 0u64;
        let mut pooled = self.free[set as usize].at_least(CHUNK_BYTES).rev();
        while sum_bytes < size_bytes {
            let entry = pooled.next()?;
            sum_bytes = sum_bytes.saturating_add(entry.size_bytes);
            entries.push(entry);
        }
        // The only free block of a stream is not stitched.
        if entries.len() == 1 && pooled.next().is_none() {
            return None;
        }
        drop(pooled);
        let parts = self.gather(&entries, size_bytes);
        let id = self.stitch(env, stream_of(set), parts, size_bytes)?;
        if self.stitched_bytes > self.config.auto_gc_bytes {
            self.destroy_all_idle(env);
        }
        Some(id)
    }

    /// Whether requests of a size may be stitched at all.
    fn stitches(&self, set: u32, size_bytes: u64) -> bool {
        self.config.vmm && kind_of(set) == LARGE && size_bytes >= self.config.frag_limit_bytes
    }

    /// New memory (spec 2.7), which is within the limit as a whole or not asked for.
    fn new_physical<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Option<Found> {
        let segment_bytes = segment_bytes_for(size_bytes);
        // B7 mended: what may not be stitched is got in full.
        if self.config.re_alloc && self.stitches(set, size_bytes) {
            let free_bytes: u64 = self.free[set as usize].iter().map(|it| it.size_bytes).sum();
            if free_bytes > 0 {
                if !self.is_within_limit(segment_bytes) {
                    self.log_refused(env, segment_bytes, request);
                    return None;
                }
                let missing_bytes = size_bytes.checked_sub(free_bytes).filter(|&it| it > 0)?;
                let at = self.obtain(env, set, segment_bytes_for(missing_bytes), request)?;
                if self.blocks[at as usize].size_bytes >= size_bytes {
                    return Some(Found::Primitive(at));
                }
                self.pool(at);
                let stitched = self.stitch_free(env, LEVEL_AFTER_SHORTFALL, set, size_bytes);
                return stitched.map(Found::Stitched);
            }
        }
        self.obtain(env, set, segment_bytes, request).map(Found::Primitive)
    }

    /// Destroys idle stitched blocks of every stream, the first freed first (spec 3.3): at level 0
    /// those with a busy chunk until 4 times what is wanted went, at 1 until 16 times and then all
    /// others too, at 2 all. Gives the bytes of addresses that went.
    pub(super) fn collect_idle<E: Env>(
        &mut self,
        env: &mut E,
        level: u32,
        wanted_bytes: u64,
    ) -> u64 {
        let enough_bytes = match level {
            0 | 1 if wanted_bytes > 0 => wanted_bytes.saturating_mul(4 << (2 * level)),
            _ => u64::MAX,
        };
        let (fragmented, free): (Vec<_>, Vec<_>) =
            self.streams.iter().map(|&stream| self.idle_by_event(stream)).unzip();
        let mut gone_bytes = 0u64;
        for ids in fragmented {
            for id in ids {
                gone_bytes += self.destroyed_bytes(env, id);
                if gone_bytes >= enough_bytes {
                    break;
                }
            }
        }
        for id in free.into_iter().flatten().filter(|_| level >= 1) {
            gone_bytes += self.destroyed_bytes(env, id);
        }
        gone_bytes
    }

    fn destroyed_bytes<E: Env>(&mut self, env: &mut E, id: u32) -> u64 {
        let size_bytes = self.stitched[id as usize].size_bytes;
        if self.destroy(env, id) { size_bytes } else { 0 }
    }

    /// Idle stitched blocks of a stream in the order (event, size, address): those with a busy
    /// chunk, and those without.
    fn idle_by_event(&self, stream: StreamId) -> (Vec<u32>, Vec<u32>) {
        let mut ids: Vec<u32> = self.idle[stream.index()].iter().collect();
        // The set gives them by size and address, and the sort is stable.
        ids.sort_by_key(|&id| self.stitched[id as usize].event);
        let is_busy = |&id: &u32| self.stitched[id as usize].busy_chunk(&self.chunks).is_some();
        ids.into_iter().partition(is_busy)
    }

    /// Returns old whole segments of the large pool until the reserved memory is below the
    /// threshold, as PyTorch does (spec 2.4, 5).
    fn collect_garbage<E: Env>(&mut self, env: &mut E) {
        let Some(limit_bytes) = self.limit_bytes else { return };
        let threshold = self.config.torch.garbage_collection_threshold;
        let threshold_bytes = (threshold * limit_bytes as f64) as u64;
        let target_bytes = self.levels.reserved_bytes.saturating_sub(threshold_bytes);
        let now = self.searches[LARGE as usize];
        let age = |base: u32| u64::from(now.wrapping_sub(base));
        let aged = |&at: &u32| (at, age(self.blocks[at as usize].gc_base));
        let mut candidates: Vec<(u32, u64)> = self.releasable(LARGE).iter().map(aged).collect();
        let mut age_sum: u64 = candidates.iter().map(|&(_, age)| age).sum();
        let mut reclaimed_bytes = 0;
        let mut released_any = true;
        while reclaimed_bytes < target_bytes && released_any && !candidates.is_empty() {
            released_any = false;
            let age_threshold = age_sum as f64 / candidates.len() as f64;
            for (at, age) in std::mem::take(&mut candidates) {
                let released_bytes =
                    if age as f64 >= age_threshold { self.release(env, &[at]) } else { 0 };
                if released_bytes > 0 {
                    released_any = true;
                    reclaimed_bytes += released_bytes;
                    age_sum -= age;
                } else {
                    candidates.push((at, age));
                }
            }
        }
    }

    /// Releases oversize blocks that make room for this request (spec 2.4, 7): the smallest that is
    /// large enough, or the largest ones until they are enough together. Stock PyTorch never splits
    /// such blocks. Stitching does; what may not be released is passed over.
    fn release_targeted<E: Env>(&mut self, env: &mut E, set: u32, size_bytes: u64) -> bool {
        let split_limit_bytes = self.config.torch.max_split_size_bytes;
        let key_bytes = size_bytes.max(split_limit_bytes);
        let oversize = self.free[set as usize].at_least(split_limit_bytes);
        let going = self.may_be_released(oversize);
        let fits = |&&at: &&u32| self.blocks[at as usize].size_bytes >= key_bytes;
        if let Some(&fit) = going.iter().find(fits) {
            return self.release(env, &[fit]) > 0;
        }
        let mut released_bytes = 0;
        for &at in going.iter().rev() {
            if released_bytes >= key_bytes {
                break;
            }
            released_bytes += self.release(env, &[at]);
        }
        released_bytes >= key_bytes
    }
}
