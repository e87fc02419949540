//! Private pools: `torch.cuda.MemPool` and the pools of graph captures (spec 6).
//!
//! A private pool has free sets of its own, so nothing of it serves a request of another pool:
//!
//! ```text
//!   free sets   │ default pools           │ first pool entered      │ second ...
//!               │ stream 0   stream 1     │ stream 0   stream 1     │
//!               │ small large small large │ small large small large │
//!                                           ^ route: requests go here while it is entered
//! ```
//!
//! While any pool is entered, for the whole device: no deferred block completes in a malloc, and no
//! malloc flushes.
//!
//! Taken from the order of events, where the shipped allocator iterates hash tables (spec 3.6):
//! overflow pools are tried in the order in which they were created, deleted pools are flushed in
//! the order of their deletion.

use std::collections::BTreeMap;

use super::stats::{LARGE, SMALL};
use super::{Caching, Found};
use crate::alloc::Env;
use crate::alloc::free_set::FreeSet;
use crate::trace::{Pool, PoolKind};
use crate::units::{PoolId, StreamId};

/// A private pool of the trace.
#[derive(Clone, Debug)]
pub(super) struct PrivatePool {
    name: String,
    kind: PoolKind,
    no_split: bool,
    use_on_oom: bool,
    /// Where its free sets begin, once it was entered.
    sets: Option<u32>,
    /// Device memory in it.
    reserved_bytes: u64,
}

impl PrivatePool {
    pub(super) fn new(pool: &Pool) -> PrivatePool {
        PrivatePool {
            name: pool.name.clone(),
            kind: pool.kind,
            no_split: pool.no_split,
            use_on_oom: pool.use_on_oom,
            sets: None,
            reserved_bytes: 0,
        }
    }

    /// Its name in the trace.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// Gives every pool `width` sets, of which the last ones are new.
fn widened<T: Default>(sets: Vec<T>, pools: usize, width: usize) -> Vec<T> {
    let before = sets.len() / pools;
    let mut sets = sets.into_iter();
    let mut wide = Vec::with_capacity(pools * width);
    for _ in 0..pools {
        wide.extend(sets.by_ref().take(before));
        wide.resize_with(wide.len() + width - before, T::default);
    }
    wide
}

impl Caching {
    /// Where the free sets of a pool begin; makes the pool if it is new.
    pub(super) fn pool_sets(&mut self, id: PoolId) -> u32 {
        let begin = self.free.len();
        let end = begin + self.sets_per_pool() as usize;
        let pool = &mut self.pools[id.index()];
        if let Some(sets) = pool.sets {
            return sets;
        }
        pool.sets = Some(begin as u32);
        self.pools_with_sets.push(id);
        self.special = true;
        self.free.resize(end, FreeSet::default());
        self.unmapped.resize(end, BTreeMap::new());
        begin as u32
    }

    /// Makes room for one more stream: the free sets of every pool get two more at their end, and
    /// what names a set by its number follows.
    pub(super) fn add_stream(&mut self, stream: StreamId, handle: u64) {
        if stream.index() != self.stream_handles.len() {
            return;
        }
        let before = self.sets_per_pool();
        let handles = &self.stream_handles;
        let place = self.streams.partition_point(|other| handles[other.index()] <= handle);
        self.streams.insert(place, stream);
        self.stream_handles.push(handle);
        let after = self.sets_per_pool();
        let pools = 1 + self.pools_with_sets.len();
        self.free = widened(std::mem::take(&mut self.free), pools, after as usize);
        self.unmapped = widened(std::mem::take(&mut self.unmapped), pools, after as usize);
        if before == 0 {
            return;
        }
        let moved = |set: u32| set / before * after + set % before;
        self.route = moved(self.route);
        self.blocks.iter_mut().for_each(|block| block.set = moved(block.set));
        let begins = self.pools.iter_mut().filter_map(|pool| pool.sets.as_mut());
        begins.for_each(|set| *set = moved(*set));
    }

    /// The private pool that a set belongs to; nothing for the default pools.
    fn private_pool(&self, set: u32) -> Option<PoolId> {
        let nth = (set / self.sets_per_pool()).checked_sub(1)?;
        self.pools_with_sets.get(nth as usize).copied()
    }

    /// Counts memory that the device gave.
    pub(super) fn gain(&mut self, set: u32, size_bytes: u64) {
        self.reserved_bytes += size_bytes;
        if let Some(pool) = self.private_pool(set) {
            self.pools[pool.index()].reserved_bytes += size_bytes;
        }
    }

    /// Counts memory that the device took back.
    pub(super) fn lose(&mut self, set: u32, size_bytes: u64) {
        self.reserved_bytes -= size_bytes;
        if let Some(pool) = self.private_pool(set) {
            self.pools[pool.index()].reserved_bytes -= size_bytes;
        }
    }

    /// Sends requests to a pool.
    pub(super) fn enter(&mut self, id: PoolId) {
        self.route = self.pool_sets(id);
        self.freeable.retain(|&deleted| deleted != id);
        if self.pools[id.index()].use_on_oom && !self.overflow.contains(&id) {
            self.overflow.push(id);
        }
        if self.entered.contains(&id) {
            self.fail("a pool is entered twice at once, which PyTorch refuses");
        }
        self.entered.push(id);
    }

    /// Ends the innermost pool.
    pub(super) fn leave(&mut self, id: PoolId) {
        if self.entered.last() == Some(&id) {
            self.entered.pop();
        }
        let outer = self.entered.last().and_then(|pool| self.pools[pool.index()].sets);
        self.route = outer.unwrap_or(0);
    }

    /// The owner lets a pool go. What a `MemPool` holds goes back at once as far as it can, that of
    /// a graph in the next flush (spec 6.4).
    pub(super) fn delete<E: Env>(&mut self, env: &mut E, id: PoolId) {
        let sets = self.pool_sets(id);
        self.overflow.retain(|&pool| pool != id);
        self.freeable.retain(|&pool| pool != id);
        if self.pools[id.index()].kind == PoolKind::Capture {
            self.note_freeable(id);
            return;
        }
        if !self.entered.is_empty() {
            self.fail("a MemPool is deleted while another pool is entered, which aborts PyTorch");
            self.note_freeable(id);
            return;
        }
        self.stats.num_sync_all_streams += 1;
        let own = sets..sets + self.sets_per_pool();
        loop {
            let blocks = &self.blocks;
            let mut wanted =
                |handle: crate::alloc::Handle| own.contains(&blocks[handle.0 as usize].set);
            let Some(handle) = env.wait_completed_of(&mut wanted) else { break };
            self.complete_deferred(env, handle);
        }
        self.release_deleted(env, id);
    }

    /// Returns what a deleted pool can return: the small pool first, unlike the default ones.
    /// Remembers the pool if something stays.
    pub(super) fn release_deleted<E: Env>(&mut self, env: &mut E, id: PoolId) {
        let sets = self.pool_sets(id);
        self.release_pool(env, sets, SMALL);
        self.release_pool(env, sets, LARGE);
        self.note_freeable(id);
    }

    fn note_freeable(&mut self, id: PoolId) {
        if self.pools[id.index()].reserved_bytes > 0 {
            self.freeable.push(id);
        }
    }

    /// Whether a set belongs to a pool whose blocks are whole segments.
    pub(super) fn never_splits(&self, set: u32) -> bool {
        self.private_pool(set).is_some_and(|pool| self.pools[pool.index()].no_split)
    }

    /// A block of a pool that others may take from when the device refuses (spec 3.3 step 6). Only
    /// requests of the default pools look there.
    pub(super) fn take_overflow(&mut self, set: u32, size_bytes: u64) -> Option<Found> {
        if set >= self.sets_per_pool() {
            return None;
        }
        for at in 0..self.overflow.len() {
            let pool = self.overflow[at];
            let Some(sets) = self.pools[pool.index()].sets else { continue };
            if let Some(block) = self.search::<true>(sets + set, size_bytes, false) {
                return Some(Found { block, expandable: false });
            }
        }
        None
    }
}
