//! Primitive blocks: the pieces of a segment, cut and merged as PyTorch does (gmlake spec 3.2).
//!
//! ```text
//!   segment   ┌ A ───────┬ free ──────────┬ part of S1 ┬ part of S1 ┐
//!             └──────────┴────────────────┴────────────┴────────────┘   prev <──> next
//!   chunks    1 1 1 1 1 1 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1 1   busy
//! ```
//!
//! A block's chunks are all busy or all free (spec 1.4, 1). Cutting and merging is bookkeeping: the
//! device is not called.

use super::chunks::{NO_CHUNK, Run};
use super::gmlake::{Gmlake, NONE, kind_of};
use crate::alloc::BlockState;
use crate::alloc::free_set::Entry;
use crate::units::BlockId;

/// A primitive block. Each lies in one cache line: neighbours in memory are looked at at every free.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// What the program asked for; of a stitched block the part that lies here.
    pub(super) requested_bytes: u64,
    /// When it was last freed (spec 1.2, `self_last_event`); 0 for never.
    pub(super) event: u64,
    /// Value of its pool's search counter when it last became free.
    pub(super) gc_base: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) segment: u32,
    /// The free set it belongs to: stream and kind of pool.
    pub(super) set: u32,
    /// Its first chunk, or [`NO_CHUNK`].
    pub(super) chunk: u32,
    /// The trace's block that it was last handed out for.
    pub(super) owner: BlockId,
    pub(super) state: BlockState,
}

impl Block {
    #[inline]
    pub(super) fn entry(&self, at: u32) -> Entry {
        Entry { size_bytes: self.size_bytes, address: self.address, block: at }
    }

    pub(super) fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    pub(super) fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }

    /// Its chunks, if it has any.
    #[inline]
    pub(super) fn run(&self) -> Option<Run> {
        (self.chunk != NO_CHUNK).then(|| Run::of_bytes(self.chunk, self.size_bytes))
    }
}

const _: () = assert!(size_of::<Block>() == 64, "a block is one cache line");

impl Gmlake {
    /// An id for a new block.
    #[inline]
    pub(super) fn put_block(&mut self, block: Block) -> u32 {
        let at = match self.spare.pop() {
            Some(at) => {
                self.blocks[at as usize] = block;
                at
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        };
        if block.chunk != NO_CHUNK {
            self.chunks.begin(block.chunk, at);
        }
        at
    }

    /// Takes a free block out of its set.
    #[inline]
    pub(super) fn take(&mut self, at: u32) {
        let block = &self.blocks[at as usize];
        self.free[block.set as usize].remove(block.entry(at));
    }

    /// Puts a free block into its set.
    #[inline]
    pub(super) fn pool(&mut self, at: u32) {
        let block = &self.blocks[at as usize];
        self.free[block.set as usize].insert(block.entry(at));
    }

    /// Makes a block that is in no set busy.
    #[inline]
    pub(super) fn occupy(&mut self, at: u32) {
        let block = &mut self.blocks[at as usize];
        block.state = BlockState::Allocated;
        self.levels.active_bytes += block.size_bytes;
        if let Some(run) = block.run() {
            self.chunks.occupy(run);
        }
    }

    /// Makes a busy block free; it is in no set then.
    #[inline]
    pub(super) fn vacate(&mut self, at: u32) {
        let block = &mut self.blocks[at as usize];
        block.state = BlockState::Free;
        self.levels.active_bytes -= block.size_bytes;
        if let Some(run) = block.run() {
            self.chunks.vacate(run);
        }
    }

    /// Cuts a block that is in no set at `size_bytes`. Gives its high end, free and in no set.
    #[inline]
    pub(super) fn cut(&mut self, at: u32, size_bytes: u64) -> u32 {
        let block = &mut self.blocks[at as usize];
        let rest = Block {
            address: block.address + size_bytes,
            size_bytes: block.size_bytes - size_bytes,
            requested_bytes: 0,
            gc_base: self.searches[kind_of(block.set) as usize],
            prev: at,
            chunk: match block.chunk {
                NO_CHUNK => NO_CHUNK,
                first => Run::of_bytes(first, size_bytes).end(),
            },
            owner: BlockId::NONE,
            state: BlockState::Free,
            ..*block
        };
        block.size_bytes = size_bytes;
        let rest_at = self.put_block(rest);
        self.blocks[at as usize].next = rest_at;
        if rest.next != NONE {
            self.blocks[rest.next as usize].prev = rest_at;
        }
        rest_at
    }

    /// Lets a block in no set have the memory of the next one too, which is in no set either.
    #[inline]
    fn join_next(&mut self, at: u32) {
        let next = self.blocks[at as usize].next;
        let high = self.blocks[next as usize];
        let block = &mut self.blocks[at as usize];
        block.size_bytes += high.size_bytes;
        block.next = high.next;
        block.event = block.event.max(high.event);
        if high.next != NONE {
            self.blocks[high.next as usize].prev = at;
        }
        if high.chunk != NO_CHUNK {
            self.chunks.join(high.chunk);
        }
        self.spare.push(next);
    }

    /// Puts a free block that is in no set into its set, merged with its free neighbours.
    #[inline]
    pub(super) fn merge_into_pool(&mut self, mut at: u32) {
        let Block { prev, next, gc_base, .. } = self.blocks[at as usize];
        if next != NONE && self.blocks[next as usize].is_free() {
            self.take(next);
            self.join_next(at);
        }
        if prev != NONE && self.blocks[prev as usize].is_free() {
            self.take(prev);
            self.join_next(prev);
            self.blocks[prev as usize].gc_base = gc_base;
            at = prev;
        }
        self.pool(at);
    }

    /// Takes a fitting free block out of its set (spec 2.5 a). `Err` says that a block was large
    /// enough, but may not be taken for this request.
    #[inline]
    pub(super) fn search(&mut self, set: u32, size_bytes: u64) -> Result<Option<u32>, ()> {
        if self.collects_garbage {
            let searches = &mut self.searches[kind_of(set) as usize];
            *searches = searches.wrapping_add(1);
        }
        let Some(fit) = self.free[set as usize].first_fit(size_bytes) else { return Ok(None) };
        let split_limit_bytes = self.config.torch.max_split_size_bytes;
        let accepted = if size_bytes < split_limit_bytes {
            fit.size_bytes < split_limit_bytes
        } else {
            let slack_bytes = self.config.torch.max_non_split_rounding_bytes;
            fit.size_bytes < size_bytes.saturating_add(slack_bytes)
        };
        if !accepted {
            return Err(());
        }
        self.free[set as usize].remove(fit);
        Ok(Some(fit.block))
    }
}
