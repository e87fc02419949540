//! Blocks that split, coalesce, and stay on their stream: what best-fit, first-fit and bfc share.
//!
//! A [`Heap`] is segments cut into blocks. It never calls the device: where a segment comes from
//! and when it goes is its owner's business.
//!
//! The design decision is the rule of streams. A kernel that still runs may use freed memory, and
//! only later work of the same stream waits for it. So free memory belongs to the stream that used
//! it last and serves only that one, until the owner has waited for the device: then all of it is
//! *shared*, free for any stream. Memory that nothing has used yet is shared from the beginning.
//!
//! ```text
//!   segment  │ live s │ free s │ free t │ live t │ shared │      s and t do not join
//!   s frees  │ free s          │ free t │ live t │ shared │
//!   t frees  │ free s          │ free t                   │      t's takes shared neighbours in
//!   a wait   │ shared                                     │
//! ```
//!
//! Free neighbours join unless they belong to two different streams. A shared block that joins
//! takes the stream of its neighbour: with one stream this is plain coalescing.

use super::free_set::{Entry, FreeSet};
use super::{
    ALIGNMENT_BYTES, Action, ActionKind, BlockState, Env, LayoutBlock, Levels, OutOfMemory, Request,
};
use crate::units::{BlockId, StreamId};

/// No block.
const NONE: u32 = u32::MAX;

/// The set of blocks that are free for any stream; those of a stream are in set 1 + its id.
const SHARED: u32 = 0;

/// Free blocks, and which of several that fit is taken.
pub trait FreeOrder: Clone + Default {
    /// Adds a block.
    fn insert(&mut self, entry: Entry);

    /// Takes a block out, which must be in the set.
    fn remove(&mut self, entry: Entry);

    /// The block to take for a request of `size_bytes`, a multiple of [`ALIGNMENT_BYTES`].
    fn fit(&self, size_bytes: u64) -> Option<Entry>;

    /// Whether `one` is to be taken rather than `other`, of another set, if both fit.
    fn prefers(one: Entry, other: Entry) -> bool;

    /// Whether there is no block.
    fn is_empty(&self) -> bool;

    /// Size of the largest block in bytes; 0 without blocks.
    fn largest_bytes(&self) -> u64;
}

/// Best fit: the smallest block, among equal ones the lowest address.
impl FreeOrder for FreeSet {
    #[inline(always)]
    fn insert(&mut self, entry: Entry) {
        FreeSet::insert(self, entry);
    }

    #[inline(always)]
    fn remove(&mut self, entry: Entry) {
        FreeSet::remove(self, entry);
    }

    #[inline(always)]
    fn fit(&self, size_bytes: u64) -> Option<Entry> {
        self.first_fit(size_bytes)
    }

    #[inline(always)]
    fn prefers(one: Entry, other: Entry) -> bool {
        one < other
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        FreeSet::is_empty(self)
    }

    fn largest_bytes(&self) -> u64 {
        self.largest().map_or(0, |entry| entry.size_bytes)
    }
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
    prev: u32,
    next: u32,
    segment: u32,
    /// The stream that used it last, as the number of a set.
    set: u32,
    /// The trace's block that it was last handed out for.
    owner: BlockId,
    state: BlockState,
}

impl Block {
    #[inline]
    fn entry(&self, at: u32) -> Entry {
        Entry { size_bytes: self.size_bytes, address: self.address, block: at }
    }

    #[inline]
    fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }

    /// Whether it is free and may join a free block of `set`.
    #[inline]
    fn joins(&self, set: u32) -> bool {
        self.is_free() && (self.set == set || self.set == SHARED || set == SHARED)
    }
}

/// Memory or addresses that blocks cover from the beginning without gaps.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    /// What the layout says of it: bytes obtained, or addresses reserved.
    size_bytes: u64,
    /// Its first and last blocks; [`NONE`] if it has none.
    first: u32,
    last: u32,
}

/// Segments, blocks and levels. See the [module docs](self).
#[derive(Clone, Debug)]
pub(super) struct Heap<F> {
    blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    spare: Vec<u32>,
    /// Every segment ever added, by ordinal.
    segments: Vec<Segment>,
    /// Ordinals of those that are still there.
    present: Vec<u32>,
    /// Free blocks: the shared ones, then those of each stream.
    free: Vec<F>,
    levels: Levels,
    /// Unit in which segments get memory, for the layout; 0 if they are obtained as a whole.
    page_bytes: u64,
}

/// The stream of a set; [`StreamId::NONE`], the last number, for the shared one.
fn stream_of(set: u32) -> StreamId {
    StreamId(set.wrapping_sub(1))
}

/// The set of a stream: the shared one for [`StreamId::NONE`].
#[inline]
fn set_of(stream: StreamId) -> u32 {
    stream.0.wrapping_add(1)
}

/// The size of a block for a request: a multiple of [`ALIGNMENT_BYTES`].
///
/// # Errors
/// If there is no such multiple.
#[inline]
pub(super) fn round_up(size_bytes: u64) -> Result<u64, OutOfMemory> {
    size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES).ok_or(OutOfMemory { size_bytes })
}

impl<F: FreeOrder> Heap<F> {
    /// Without segments, for streams with ids below `streams` and any that come up later.
    pub(super) fn new(streams: usize, page_bytes: u64) -> Heap<F> {
        Heap {
            blocks: Vec::new(),
            spare: Vec::new(),
            segments: Vec::new(),
            present: Vec::new(),
            free: vec![F::default(); streams + 1],
            levels: Levels::default(),
            page_bytes,
        }
    }

    #[inline]
    pub(super) fn levels(&self) -> Levels {
        self.levels
    }

    /// Takes the block that fits best out of those that are free for the stream.
    #[inline]
    pub(super) fn take_fit(&mut self, stream: StreamId, size_bytes: u64) -> Option<u32> {
        let set = set_of(stream);
        let own = self.free.get(set as usize).and_then(|free| free.fit(size_bytes));
        // Mostly there is nothing shared: memory is, until it is used.
        let shared = &mut self.free[SHARED as usize];
        if !shared.is_empty()
            && let Some(entry) = shared.fit(size_bytes)
            && own.is_none_or(|own| F::prefers(entry, own))
        {
            shared.remove(entry);
            return Some(entry.block);
        }
        let own = own?;
        self.free[set as usize].remove(own);
        Some(own.block)
    }

    /// Hands out the first `size_bytes` of a block that is in no set. The rest stays free where it
    /// was.
    #[inline]
    pub(super) fn hand_out<E: Env>(
        &mut self,
        env: &mut E,
        at: u32,
        size_bytes: u64,
        request: Request,
    ) {
        if self.blocks[at as usize].size_bytes > size_bytes {
            let rest = self.cut(at, size_bytes);
            self.put_in(rest);
        }
        let set = set_of(request.stream);
        if set as usize >= self.free.len() {
            self.free.resize(set as usize + 1, F::default());
        }
        let block = &mut self.blocks[at as usize];
        block.set = set;
        block.state = BlockState::Allocated;
        block.owner = request.block;
        block.requested_bytes = request.size_bytes;
        self.levels.allocated_bytes += size_bytes;
        self.levels.active_bytes += size_bytes;
        if E::LOG {
            env.log(self.action(ActionKind::Alloc, at));
        }
    }

    /// The program frees a block.
    #[inline]
    pub(super) fn begin_free<E: Env>(&mut self, env: &mut E, at: u32) {
        self.levels.allocated_bytes -= self.blocks[at as usize].size_bytes;
        if E::LOG {
            env.log(self.action(ActionKind::FreeRequested, at));
        }
    }

    /// The program freed a block that another stream still uses.
    pub(super) fn defer<E: Env>(&mut self, env: &mut E, at: u32) {
        self.begin_free(env, at);
        self.blocks[at as usize].state = BlockState::Deferred;
    }

    /// A freed block becomes free memory of its stream and joins its neighbours.
    #[inline]
    pub(super) fn complete<E: Env>(&mut self, env: &mut E, at: u32) {
        if E::LOG {
            env.log(self.action(ActionKind::FreeCompleted, at));
        }
        let Block { mut address, mut size_bytes, mut prev, mut next, segment, set, .. } =
            self.blocks[at as usize];
        self.levels.active_bytes -= size_bytes;
        if prev != NONE {
            let low = &self.blocks[prev as usize];
            if low.joins(set) {
                self.free[low.set as usize].remove(low.entry(prev));
                self.spare.push(prev);
                address = low.address;
                size_bytes += low.size_bytes;
                prev = low.prev;
                if prev == NONE {
                    self.segments[segment as usize].first = at;
                } else {
                    self.blocks[prev as usize].next = at;
                }
            }
        }
        if next != NONE {
            let high = &self.blocks[next as usize];
            if high.joins(set) {
                self.free[high.set as usize].remove(high.entry(next));
                self.spare.push(next);
                size_bytes += high.size_bytes;
                next = high.next;
                if next == NONE {
                    self.segments[segment as usize].last = at;
                } else {
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
        let entry = block.entry(at);
        self.free[set as usize].insert(entry);
    }

    /// The device was waited for: all free memory is shared, and free neighbours are one.
    pub(super) fn share_all(&mut self) {
        // Shared neighbours are one already.
        if self.free[1..].iter().all(F::is_empty) {
            return;
        }
        self.free.fill(F::default());
        for ordinal in 0..self.present.len() {
            let mut at = self.segments[self.present[ordinal] as usize].first;
            while at != NONE {
                if self.blocks[at as usize].is_free() {
                    self.blocks[at as usize].set = SHARED;
                    while self.next_is_free(at) {
                        self.join_next(at);
                    }
                    self.put_in(at);
                }
                at = self.blocks[at as usize].next;
            }
        }
    }

    /// Adds a segment without blocks; gives its ordinal.
    pub(super) fn add_segment(&mut self, address: u64, size_bytes: u64) -> u32 {
        let ordinal = self.segments.len() as u32;
        self.segments.push(Segment { address, size_bytes, first: NONE, last: NONE });
        self.present.push(ordinal);
        ordinal
    }

    /// Bytes at the end of a segment's blocks that are free for a stream.
    pub(super) fn free_tail_bytes(&self, segment: u32, stream: StreamId) -> u64 {
        let last = self.segments[segment as usize].last;
        match self.blocks.get(last as usize) {
            Some(block) if block.is_free() && [SHARED, set_of(stream)].contains(&block.set) => {
                block.size_bytes
            }
            _ => 0,
        }
    }

    /// Adds `size_bytes` of memory behind a segment's blocks. Gives the free block at its end, now
    /// in no set: the one that was there, made longer, if the stream may use it, else a new one.
    pub(super) fn grow(&mut self, segment: u32, stream: StreamId, size_bytes: u64) -> u32 {
        self.levels.reserved_bytes += size_bytes;
        let Segment { address, last, .. } = self.segments[segment as usize];
        if self.free_tail_bytes(segment, stream) > 0 {
            self.take_out(last);
            self.blocks[last as usize].size_bytes += size_bytes;
            return last;
        }
        let end = self.blocks.get(last as usize);
        let block = Block {
            address: end.map_or(address, |end| end.address + end.size_bytes),
            size_bytes,
            requested_bytes: 0,
            prev: last,
            next: NONE,
            segment,
            set: SHARED,
            owner: BlockId::NONE,
            state: BlockState::Free,
        };
        let at = self.new_block(block);
        match self.blocks.get_mut(last as usize) {
            Some(end) => end.next = at,
            None => self.segments[segment as usize].first = at,
        }
        self.segments[segment as usize].last = at;
        at
    }

    /// Takes `size_bytes` of memory from the end of a segment's blocks, all of it free and shared.
    pub(super) fn shrink(&mut self, segment: u32, size_bytes: u64) {
        self.levels.reserved_bytes -= size_bytes;
        let last = self.segments[segment as usize].last;
        self.take_out(last);
        let block = &mut self.blocks[last as usize];
        block.size_bytes -= size_bytes;
        if block.size_bytes > 0 {
            return self.put_in(last);
        }
        let prev = block.prev;
        self.spare.push(last);
        match self.blocks.get_mut(prev as usize) {
            Some(before) => before.next = NONE,
            None => self.segments[segment as usize].first = NONE,
        }
        self.segments[segment as usize].last = prev;
    }

    /// Segments that are one free block: ordinal, address and bytes, in order of their creation.
    pub(super) fn free_segments(&self) -> Vec<(u32, u64, u64)> {
        let whole = |segment: &Segment| {
            let first = self.blocks.get(segment.first as usize);
            segment.first == segment.last && first.is_some_and(Block::is_free)
        };
        let present =
            self.present.iter().map(|&ordinal| (ordinal, self.segments[ordinal as usize]));
        let free = present.filter(|(_, segment)| whole(segment));
        free.map(|(ordinal, segment)| (ordinal, segment.address, segment.size_bytes)).collect()
    }

    /// Forgets a segment that is one free block.
    pub(super) fn remove_segment(&mut self, ordinal: u32) {
        let Segment { size_bytes, first, .. } = self.segments[ordinal as usize];
        self.levels.reserved_bytes -= size_bytes;
        self.take_out(first);
        self.spare.push(first);
        self.segments[ordinal as usize].first = NONE;
        self.segments[ordinal as usize].last = NONE;
        self.present.retain(|&present| present != ordinal);
    }

    /// Puts a free block into its set.
    #[inline]
    pub(super) fn put_in(&mut self, at: u32) {
        let block = &self.blocks[at as usize];
        self.free[block.set as usize].insert(block.entry(at));
    }

    /// Size of a block in bytes.
    #[inline]
    pub(super) fn size_bytes(&self, at: u32) -> u64 {
        self.blocks[at as usize].size_bytes
    }

    /// Size in bytes of the largest block that is free for a stream.
    pub(super) fn largest_bytes(&self, stream: StreamId) -> u64 {
        let own = self.free.get(set_of(stream) as usize).map_or(0, F::largest_bytes);
        own.max(self.free[SHARED as usize].largest_bytes())
    }

    /// An entry of the log about part of a segment.
    pub(super) fn segment_action(
        &self,
        kind: ActionKind,
        segment: u32,
        stream: StreamId,
        address: u64,
        size_bytes: u64,
    ) -> Action {
        let offset_bytes = address - self.segments[segment as usize].address;
        let block = BlockId::NONE;
        Action { kind, block, segment, stream, offset_bytes, size_bytes, address }
    }

    /// As [`Allocator::layout`](super::Allocator::layout).
    pub(super) fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let segment = |&ordinal: &u32| (ordinal, &self.segments[ordinal as usize]);
        let mut present: Vec<(u32, &Segment)> = self.present.iter().map(segment).collect();
        present.sort_by_key(|(_, segment)| segment.address);
        for (ordinal, segment) in present {
            let mut at = segment.first;
            while at != NONE {
                let block = &self.blocks[at as usize];
                let free = block.is_free();
                visit(LayoutBlock {
                    block: if free { BlockId::NONE } else { block.owner },
                    segment: ordinal,
                    segment_address: segment.address,
                    segment_bytes: segment.size_bytes,
                    page_bytes: self.page_bytes,
                    address: block.address,
                    size_bytes: block.size_bytes,
                    requested_bytes: if free { 0 } else { block.requested_bytes },
                    stream: stream_of(block.set),
                    pool: 0,
                    state: block.state,
                });
                at = block.next;
            }
        }
    }

    fn take_out(&mut self, at: u32) {
        let block = &self.blocks[at as usize];
        self.free[block.set as usize].remove(block.entry(at));
    }

    #[inline]
    fn new_block(&mut self, block: Block) -> u32 {
        match self.spare.pop() {
            Some(at) => {
                self.blocks[at as usize] = block;
                at
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        }
    }

    /// Cuts a block in two; gives the high part, which is in no set.
    #[inline]
    fn cut(&mut self, at: u32, low_bytes: u64) -> u32 {
        let Block { address, size_bytes, next, segment, set, .. } = self.blocks[at as usize];
        let high = self.new_block(Block {
            address: address + low_bytes,
            size_bytes: size_bytes - low_bytes,
            requested_bytes: 0,
            prev: at,
            next,
            segment,
            set,
            owner: BlockId::NONE,
            state: BlockState::Free,
        });
        let low = &mut self.blocks[at as usize];
        low.size_bytes = low_bytes;
        low.next = high;
        match self.blocks.get_mut(next as usize) {
            Some(next) => next.prev = high,
            None => self.segments[segment as usize].last = high,
        }
        high
    }

    fn next_is_free(&self, at: u32) -> bool {
        let next = self.blocks[at as usize].next;
        self.blocks.get(next as usize).is_some_and(Block::is_free)
    }

    /// Makes a block one with the block behind it, which is in no set.
    fn join_next(&mut self, at: u32) {
        let gone = self.blocks[at as usize].next;
        let Block { size_bytes, next, segment, .. } = self.blocks[gone as usize];
        self.spare.push(gone);
        let block = &mut self.blocks[at as usize];
        block.size_bytes += size_bytes;
        block.next = next;
        match self.blocks.get_mut(next as usize) {
            Some(next) => next.prev = at,
            None => self.segments[segment as usize].last = at,
        }
    }

    fn action(&self, kind: ActionKind, at: u32) -> Action {
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
