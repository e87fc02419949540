//! Memory of CUDA graphs. A graph replays with the addresses that it was captured with, so what was
//! allocated while it was captured belongs to it until its pool is released, whoever freed it.
//!
//! The one design decision: this is kept away from the allocators, few of which know private pools.
//! What is freed stays allocated in their eyes; here it serves requests of the same size, stream
//! and pool again, which is what most of a graph's requests are.
//!
//! ```text
//!   pool_begin ── requests on the streams that its filter picks ── pool_end    frees: kept here
//!   pool_release: what is kept goes back; what is still live goes back when it is freed
//! ```

use std::collections::BTreeMap;

use crate::alloc::Handle;
use crate::units::{PoolId, StreamId};

/// Name of a pool as PyTorch gives it.
pub(super) type PoolName = (u64, u64);

/// Which streams a capture concerns.
pub(super) trait Filter {
    /// Whether requests on this stream go to the pool.
    fn picks(&self, stream: u64) -> bool;
}

/// A pool.
struct GraphPool {
    name: PoolName,
    /// Captures that use it, less those that released it.
    uses: u32,
    /// Freed blocks by stream and size, the last freed last: the allocator's name and the address.
    kept: BTreeMap<(StreamId, u64), Vec<(Handle, u64)>>,
    /// Freed blocks that other streams used too: nobody says when these are done with them.
    set_aside: Vec<Handle>,
    /// Its number in the trace, if one is recorded.
    recorded: PoolId,
}

/// A capture under way.
struct Capture {
    pool: u32,
    filter: Box<dyn Filter + Send>,
}

/// A block that the program freed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freed {
    pub(super) handle: Handle,
    pub(super) address: u64,
    pub(super) stream: StreamId,
    pub(super) size_bytes: u64,
    /// Other streams use it.
    pub(super) is_shared: bool,
}

/// All pools of a device.
#[derive(Default)]
pub(super) struct Graphs {
    /// Pools by number; numbers are not given twice.
    pools: Vec<GraphPool>,
    captures: Vec<Capture>,
}

/// No pool.
pub(super) const NO_POOL: u32 = u32::MAX;

impl Graphs {
    /// Requests go to a pool from here on, if the filter picks their stream. Gives the pool's number
    /// and whether it is new.
    pub(super) fn begin(&mut self, name: PoolName, filter: Box<dyn Filter + Send>) -> (u32, bool) {
        let known = self.pools.iter().rposition(|pool| pool.name == name && pool.uses > 0);
        let number = known.unwrap_or_else(|| {
            self.pools.push(GraphPool {
                name,
                uses: 0,
                kept: BTreeMap::new(),
                set_aside: Vec::new(),
                recorded: PoolId::NONE,
            });
            self.pools.len() - 1
        });
        self.pools[number].uses += 1;
        self.captures.push(Capture { pool: number as u32, filter });
        (number as u32, known.is_none())
    }

    /// They no longer do. Gives the pool's number, if it had begun.
    pub(super) fn end(&mut self, name: PoolName) -> Option<u32> {
        let pools = &self.pools;
        let named = |capture: &Capture| pools[capture.pool as usize].name == name;
        let at = self.captures.iter().rposition(named)?;
        Some(self.captures.remove(at).pool)
    }

    /// An owner lets the pool go. If it was the last one, gives the pool's number and what is to be
    /// given back.
    pub(super) fn release(&mut self, name: PoolName) -> Option<(u32, Vec<Handle>)> {
        let number = self.pools.iter().rposition(|pool| pool.name == name && pool.uses > 0)?;
        let pool = &mut self.pools[number];
        pool.uses -= 1;
        if pool.uses > 0 {
            return None;
        }
        let kept = std::mem::take(&mut pool.kept).into_values().flatten();
        let set_aside = std::mem::take(&mut pool.set_aside);
        let handles = kept.map(|(handle, _)| handle).chain(set_aside).collect();
        Some((number as u32, handles))
    }

    /// The pool that a request on this stream goes to; [`NO_POOL`] for none.
    #[inline]
    pub(super) fn pool_for(&self, stream: u64) -> u32 {
        if self.captures.is_empty() {
            return NO_POOL;
        }
        let picked = self.captures.iter().rev().find(|capture| capture.filter.picks(stream));
        picked.map_or(NO_POOL, |capture| capture.pool)
    }

    /// A freed block of the pool that serves this request, and its address.
    pub(super) fn take(
        &mut self,
        pool: u32,
        stream: StreamId,
        size_bytes: u64,
    ) -> Option<(Handle, u64)> {
        self.pools.get_mut(pool as usize)?.kept.get_mut(&(stream, size_bytes))?.pop()
    }

    /// Keeps a freed block. Says no if its pool is gone, and the block has to go back.
    pub(super) fn keep(&mut self, pool: u32, freed: Freed) -> bool {
        let Some(pool) = self.pools.get_mut(pool as usize).filter(|pool| pool.uses > 0) else {
            return false;
        };
        let Freed { stream, size_bytes, handle, address, is_shared } = freed;
        if is_shared {
            pool.set_aside.push(handle);
        } else {
            pool.kept.entry((stream, size_bytes)).or_default().push((handle, address));
        }
        true
    }

    /// The number of a pool in the trace.
    pub(super) fn recorded(&mut self, pool: u32) -> Option<&mut PoolId> {
        Some(&mut self.pools.get_mut(pool as usize)?.recorded)
    }
}
