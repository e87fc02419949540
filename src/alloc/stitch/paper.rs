//! The published search (gmlake spec 4.1).
//!
//! ```text
//!   free, largest first   S1 exact size: handed out, primitive before stitched
//!   ┌───────┐             S2 one larger: the smallest of them is split
//!   │ 400   │             S3 several smaller: 300 + 160 + 40 of the 90, stitched: 500
//!   ├─────┬─┘             S4 too little: all of them and new memory for what is missing, stitched
//!   │ 300 │               S5 no such memory: wait, evict, release, search again, out of memory
//!   └─────┘
//! ```
//!
//! Two limits keep fragments large. Blocks below `frag_limit` are not stitched. The published limit
//! is "the smallest block considered for splitting or stitching", which read by the letter also
//! forbids to split smaller blocks; that is `split_limit`, since the two do very different things.
//! Where splits are free, as by default, the recorded jobs need less, with few exceptions:
//! `split_limit=128MiB` takes 26 % more for gpt2-xl-plain and 79 % more for llama-1b-varlen.
//!
//! `stitch_limit` is far above what recorded jobs stitch (at most 79 GiB of addresses, 182 with
//! `frag_limit=32MiB`): below what one iteration needs, nothing is ever found again.
//!
//! A primitive block of the exact size goes before a stitched one: it takes one block instead of
//! several, and the stitched one stays for the request that needs it.

use super::config::Policy;
use super::gmlake::{Found, Gmlake, LARGE, SMALL, kind_for, kind_of, set_of, stream_of};
use super::segments::segment_bytes_for;
use crate::alloc::free_set::Entry;
use crate::alloc::{Env, Handle, OutOfMemory, Request};

/// Places of the states in the counters.
const S1: usize = 0;
const S2: usize = 1;
const S3: usize = 2;
const S4: usize = 3;
const S5: usize = 4;

impl Gmlake {
    /// A malloc of a rounded size.
    #[inline]
    pub(super) fn malloc_paper<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        let set = set_of(request.stream, kind_for(size_bytes));
        let found = match self.find_free(set, size_bytes) {
            Some(found) => found,
            None => self.obtain_paper(env, set, size_bytes, request)?,
        };
        Ok(self.hand_out_found(env, found, size_bytes, request))
    }

    /// S1 and S2, which need no device call.
    #[inline]
    fn find_free(&mut self, set: u32, size_bytes: u64) -> Option<Found> {
        let mut fit = self.free[set as usize].first_fit(size_bytes);
        if kind_of(set) == LARGE {
            if let Some(entry) = fit
                && entry.size_bytes == size_bytes
            {
                self.counters.states[S1] += 1;
            } else if let Some(id) = self.find_exact_stitched(set, size_bytes) {
                self.take_stitched(id, size_bytes);
                self.counters.states[S1] += 1;
                return Some(Found::Stitched(id));
            } else {
                let least_bytes = self.config.split_limit_bytes.max(size_bytes);
                if least_bytes > size_bytes {
                    fit = self.free[set as usize].first_fit(least_bytes);
                }
                self.counters.states[S2] += u64::from(fit.is_some());
            }
        }
        let entry = fit?;
        self.free[set as usize].remove(entry);
        Some(Found::Primitive(entry.block))
    }

    /// A free stitched block of exactly this size, with the lowest address.
    #[inline]
    fn find_exact_stitched(&mut self, set: u32, size_bytes: u64) -> Option<u32> {
        // Every stitched block is larger than its first part; and its memory must be free.
        let free_bytes = self.levels.reserved_bytes - self.levels.active_bytes;
        if size_bytes <= self.config.frag_limit_bytes || size_bytes > free_bytes {
            return None;
        }
        let idle = &mut self.idle[stream_of(set).index()];
        idle.find_free(size_bytes..=size_bytes, &self.stitched, &self.chunks)
    }

    /// S3 to S5.
    #[cold]
    #[inline(never)]
    fn obtain_paper<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Result<Found, OutOfMemory> {
        if let Some(found) = self.stitch_or_grow(env, set, size_bytes, request) {
            return Ok(found);
        }
        // What a stream held may be enough, and waiting costs less than a release.
        if self.wait(env)
            && let Some(found) = self.search_all(env, set, size_bytes, request)
        {
            return Ok(found);
        }
        self.destroy_all_idle(env);
        self.release_cache(env);
        self.counters.alloc_retries += 1;
        if let Some(found) = self.search_all(env, set, size_bytes, request) {
            return Ok(found);
        }
        self.counters.states[S5] += u64::from(kind_of(set) == LARGE);
        Err(self.out_of_memory(env, size_bytes, request))
    }

    /// S1 to S4.
    fn search_all<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Option<Found> {
        let found = self.find_free(set, size_bytes);
        found.or_else(|| self.stitch_or_grow(env, set, size_bytes, request))
    }

    /// S3 and S4.
    fn stitch_or_grow<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
        request: Request,
    ) -> Option<Found> {
        if kind_of(set) == SMALL {
            let segment_bytes = segment_bytes_for(size_bytes);
            return self.obtain(env, set, segment_bytes, request).map(Found::Primitive);
        }
        let (entries, missing_bytes) = self.candidates(set, size_bytes);
        if !entries.is_empty() {
            let extra = match missing_bytes {
                0 => None,
                _ => Some(self.obtain(env, set, missing_bytes, request)?),
            };
            let mut parts = self.gather(&entries, size_bytes);
            parts.extend(extra);
            if let Some(id) = self.stitch(env, stream_of(set), parts, size_bytes) {
                self.counters.states[if missing_bytes == 0 { S3 } else { S4 }] += 1;
                self.evict_to_limit(env);
                return Some(Found::Stitched(id));
            }
        }
        let segment_bytes = match segment_bytes_for(size_bytes) {
            // What may not be split is not got larger than needed.
            bytes if bytes < self.config.split_limit_bytes => size_bytes,
            bytes => bytes,
        };
        let at = self.obtain(env, set, segment_bytes, request)?;
        self.counters.states[S4] += 1;
        Some(Found::Primitive(at))
    }

    /// Free blocks to stitch, the largest first, and how much is missing. All are smaller than the
    /// request: a larger one would have been split.
    fn candidates(&self, set: u32, size_bytes: u64) -> (Vec<Entry>, u64) {
        let least_bytes = self.config.frag_limit_bytes.max(super::chunks::CHUNK_BYTES);
        let mut missing_bytes = size_bytes;
        let mut entries = Vec::new();
        let pooled = self.free[set as usize].at_least(least_bytes).rev();
        for entry in pooled.filter(|entry| entry.size_bytes < size_bytes) {
            if missing_bytes == 0 {
                break;
            }
            let splits = entry.size_bytes > missing_bytes;
            if splits && entry.size_bytes < self.config.split_limit_bytes {
                continue;
            }
            entries.push(entry);
            missing_bytes = missing_bytes.saturating_sub(entry.size_bytes);
        }
        (entries, missing_bytes)
    }

    /// Destroys idle stitched blocks, the least recently used first, until 4 times what is wanted
    /// went at level 0, 16 times at 1, all at 2.
    pub(super) fn evict_oldest<E: Env>(&mut self, env: &mut E, level: u32, wanted_bytes: u64) {
        let enough_bytes = match level {
            0 | 1 => wanted_bytes.saturating_mul(4 << (2 * level)),
            _ => u64::MAX,
        };
        let before_bytes = self.stitched_bytes;
        while before_bytes - self.stitched_bytes < enough_bytes && self.evict(env) {}
    }

    /// Evicts until stitched addresses are within `stitch_limit`, or none is idle.
    fn evict_to_limit<E: Env>(&mut self, env: &mut E) {
        debug_assert_eq!(self.config.policy, Policy::Paper);
        while self.stitched_bytes > self.config.stitch_limit_bytes && self.evict(env) {}
    }

    /// Destroys the idle stitched block that was used least recently. Says whether one went.
    fn evict<E: Env>(&mut self, env: &mut E) -> bool {
        let last_use = |&id: &u32| {
            let stitched = &self.stitched[id as usize];
            (stitched.last_use, stitched.ordinal)
        };
        match self.idle_ids().min_by_key(last_use) {
            Some(id) => self.destroy(env, id),
            None => false,
        }
    }
}
