//! One range of addresses, its memory and the blocks in it: whatever the plan says, what is free is
//! known here.
//!
//! The design decision: blocks are found by where they lie, not by size. A planned request names its
//! offset; the few that are placed on line look at all free ranges anyway, since which of them is
//! best depends on the plan.
//!
//! ```text
//!   range: 1.125 x the device, reserved at the first request
//!   ┌ memory, in units of 2 MiB ────────────────────────────────────────┬───────────────────┐
//!   │ A  s │ free s │ B  s    │ free s │ C  t │ free t │ shared         │ addresses only ... │
//!   └──────┴────────┴─────────┴────────┴──────┴────────┴────────────────┴───────────────────┘
//! ```
//!
//! The rule of streams is that of the heap that other allocators share (`heap.rs`): freed memory
//! serves only the stream that used it last, until the allocator has waited for the device; memory
//! that nothing has used since then is *shared*. Here free neighbours join only if they are of one
//! stream or both shared, so that what one stream frees does not take over memory that the plan has
//! for another; a claim may reach over its own and shared neighbours.

use std::collections::BTreeMap;

use crate::alloc::pieces::Pieces;
use crate::alloc::{
    Action, ActionKind, BlockState, BuildInputs, Env, LayoutBlock, Levels, Request,
};
use crate::device::GRANULARITY_BYTES;
use crate::units::{BlockId, StreamId};

/// No block.
const NONE: u32 = u32::MAX;

/// A contiguous piece of the memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    offset: u64,
    size_bytes: u64,
    /// The request it is handed out for.
    requested_bytes: u64,
    prev: u32,
    next: u32,
    /// The stream that used it last; [`StreamId::NONE`] if it is shared.
    stream: StreamId,
    /// The trace's block that it is handed out for.
    owner: BlockId,
    state: BlockState,
    /// Which request of the program it is for.
    tag: Tag,
}

impl Block {
    fn end(&self) -> u64 {
        self.offset + self.size_bytes
    }

    fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }

    /// Whether it is free for a request of the stream.
    fn serves(&self, stream: StreamId) -> bool {
        self.is_free() && (self.stream == stream || self.stream == StreamId::NONE)
    }
}

/// Which request of the program a block is for, and how its place was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// The section, counted from the program's beginning.
    pub(super) section: u32,
    /// The position in its track, or [`u32::MAX`].
    pub(super) position: u32,
    /// Its number in the record of the section.
    pub(super) number: u32,
    /// It was placed at run time.
    pub(super) online: bool,
}

impl Tag {
    /// That of no request.
    const NONE: Tag = Tag { section: 0, position: u32::MAX, number: u32::MAX, online: false };
}

/// Half-open ranges of offsets, in order and disjoint.
pub(super) type Ranges = Vec<(u64, u64)>;

/// What is known of a block that was taken back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freed {
    /// What the program asked for.
    pub(super) requested_bytes: u64,
    /// What the block held.
    pub(super) size_bytes: u64,
    /// Which request it was for.
    pub(super) tag: Tag,
}

/// The range, its memory and its blocks. See the [module docs](self).
#[derive(Clone, Debug)]
pub(super) struct Memory {
    blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    spare: Vec<u32>,
    /// Every block by its offset; they cover the memory without gaps.
    by_offset: BTreeMap<u64, u32>,
    levels: Levels,
    pieces: Pieces,
}

impl Memory {
    /// Without memory, in a range for the device that the inputs tell of.
    pub(super) fn new(inputs: &BuildInputs) -> Memory {
        Memory {
            blocks: Vec::new(),
            spare: Vec::new(),
            by_offset: BTreeMap::new(),
            levels: Levels::default(),
            pieces: Pieces::new(inputs),
        }
    }

    #[inline]
    pub(super) fn levels(&self) -> Levels {
        self.levels
    }

    pub(super) fn limit_bytes(&self) -> Option<u64> {
        self.pieces.limit_bytes()
    }

    /// How often memory was added, and how many pieces went.
    pub(super) fn growths_and_shrinks(&self) -> (u64, u64) {
        self.pieces.growths_and_shrinks()
    }

    /// Takes `[offset, offset + size_bytes)` if all of it is memory that is free for the request's
    /// stream, and hands it out.
    pub(super) fn claim<E: Env>(
        &mut self,
        env: &mut E,
        offset: u64,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        let end = offset.checked_add(size_bytes)?;
        let (_, &first) = self.by_offset.range(..=offset).next_back()?;
        let mut last = first;
        loop {
            let block = self.blocks.get(last as usize)?;
            if !block.serves(request.stream) {
                return None;
            }
            if block.end() >= end {
                break;
            }
            last = block.next;
        }
        let mut at = first;
        if self.blocks[first as usize].offset < offset {
            at = self.cut(first, offset);
            if last == first {
                last = at;
            }
        }
        if self.blocks[last as usize].end() > end {
            self.cut(last, end);
        }
        while self.blocks[at as usize].end() < end {
            self.join_next(at);
        }
        let block = &mut self.blocks[at as usize];
        block.stream = request.stream;
        block.owner = request.block;
        block.requested_bytes = request.size_bytes;
        block.state = BlockState::Allocated;
        block.tag = tag;
        self.levels.allocated_bytes += size_bytes;
        self.levels.active_bytes += size_bytes;
        if E::LOG {
            env.log(self.action(ActionKind::Alloc, at));
        }
        Some(at)
    }

    /// The program frees a block; its memory is not free before [`Self::complete`].
    #[inline]
    pub(super) fn begin_free<E: Env>(&mut self, env: &mut E, at: u32) -> Freed {
        let block = &mut self.blocks[at as usize];
        block.state = BlockState::Deferred;
        let Block { requested_bytes, size_bytes, tag, .. } = *block;
        self.levels.allocated_bytes -= size_bytes;
        if E::LOG {
            env.log(self.action(ActionKind::FreeRequested, at));
        }
        Freed { requested_bytes, size_bytes, tag }
    }

    /// A freed block becomes free memory of its stream.
    #[inline]
    pub(super) fn complete<E: Env>(&mut self, env: &mut E, at: u32) {
        if E::LOG {
            env.log(self.action(ActionKind::FreeCompleted, at));
        }
        let block = &mut self.blocks[at as usize];
        block.state = BlockState::Free;
        let (prev, stream) = (block.prev, block.stream);
        self.levels.active_bytes -= block.size_bytes;
        self.join_if(at, stream);
        if self.blocks.get(prev as usize).is_some_and(|it| it.is_free() && it.stream == stream) {
            self.join_next(prev);
        }
    }

    /// The device was waited for: all free memory is shared, and free neighbours are one.
    pub(super) fn share_all(&mut self) {
        let mut at = self.by_offset.first_key_value().map_or(NONE, |(_, &first)| first);
        while let Some(block) = self.blocks.get_mut(at as usize) {
            if block.is_free() {
                block.stream = StreamId::NONE;
                let next = |memory: &Memory| memory.blocks[at as usize].next;
                while self.blocks.get(next(self) as usize).is_some_and(Block::is_free) {
                    self.join_next(at);
                }
            }
            at = self.blocks[at as usize].next;
        }
    }

    /// What is free for a stream: each range as long as possible.
    pub(super) fn free_ranges(&self, stream: StreamId) -> Ranges {
        let mut ranges: Ranges = Vec::new();
        let mut at = self.by_offset.first_key_value().map_or(NONE, |(_, &first)| first);
        while let Some(block) = self.blocks.get(at as usize) {
            if block.serves(stream) {
                match ranges.last_mut() {
                    Some((_, end)) if *end == block.offset => *end = block.end(),
                    _ => ranges.push((block.offset, block.end())),
                }
            }
            at = block.next;
        }
        ranges
    }

    /// Which request a block is for.
    #[inline]
    pub(super) fn tag(&self, at: u32) -> Tag {
        self.blocks[at as usize].tag
    }

    /// Every block that is not free: its tag, offset and size in bytes, by offset.
    pub(super) fn in_use(&self) -> impl Iterator<Item = (Tag, u64, u64)> + '_ {
        let blocks = self.by_offset.values().map(|&at| &self.blocks[at as usize]);
        let in_use = blocks.filter(|block| !block.is_free());
        in_use.map(|block| (block.tag, block.offset, block.size_bytes))
    }

    /// Sees to it that there is memory up to `end`, a byte offset; up to `wished_end` if the device
    /// gives that at once. Nothing changes but the range's being reserved if the limit, the range or
    /// the device refuse.
    #[inline]
    pub(super) fn reach<E: Env>(&mut self, env: &mut E, end: u64, wished_end: u64) -> bool {
        end <= self.levels.reserved_bytes || self.grow_to(env, end, wished_end)
    }

    #[cold]
    fn grow_to<E: Env>(&mut self, env: &mut E, end: u64, wished_end: u64) -> bool {
        (wished_end > end && self.grow(env, wished_end)) || self.grow(env, end)
    }

    fn grow<E: Env>(&mut self, env: &mut E, end: u64) -> bool {
        let held_bytes = self.levels.reserved_bytes;
        let Some(end) = end.checked_next_multiple_of(GRANULARITY_BYTES) else { return false };
        let size_bytes = end - held_bytes;
        if self.pieces.grow(env.device(), held_bytes, size_bytes).is_none() {
            return false;
        }
        if E::LOG {
            env.log(self.segment_action(ActionKind::SegmentMap, held_bytes, size_bytes));
        }
        self.append(size_bytes);
        true
    }

    /// Adds free memory at the end.
    fn append(&mut self, size_bytes: u64) {
        let offset = self.levels.reserved_bytes;
        self.levels.reserved_bytes += size_bytes;
        let last = self.by_offset.last_key_value().map_or(NONE, |(_, &last)| last);
        if let Some(block) = self.blocks.get_mut(last as usize)
            && block.is_free()
            && block.stream == StreamId::NONE
        {
            block.size_bytes += size_bytes;
            return;
        }
        let at = self.new_block(Block {
            offset,
            size_bytes,
            requested_bytes: 0,
            prev: last,
            next: NONE,
            stream: StreamId::NONE,
            owner: BlockId::NONE,
            state: BlockState::Free,
            tag: Tag::NONE,
        });
        if let Some(block) = self.blocks.get_mut(last as usize) {
            block.next = at;
        }
    }

    /// Gives back the pieces at the end that are wholly free; all free memory is shared.
    pub(super) fn shrink<E: Env>(&mut self, env: &mut E) {
        let Some((_, &last)) = self.by_offset.last_key_value() else { return };
        let free_bytes = match &self.blocks[last as usize] {
            block if block.is_free() => block.size_bytes,
            _ => 0,
        };
        let held_bytes = self.levels.reserved_bytes;
        let gone = self.pieces.shrink(env.device(), held_bytes, free_bytes);
        let Some((_, gone_bytes)) = gone else { return };
        let end = held_bytes - gone_bytes;
        self.levels.reserved_bytes = end;
        let block = &mut self.blocks[last as usize];
        block.size_bytes -= gone_bytes;
        if block.size_bytes == 0 {
            let (offset, prev) = (block.offset, block.prev);
            self.by_offset.remove(&offset);
            self.spare.push(last);
            if let Some(before) = self.blocks.get_mut(prev as usize) {
                before.next = NONE;
            }
        }
        if E::LOG {
            env.log(self.segment_action(ActionKind::SegmentUnmap, end, gone_bytes));
        }
    }

    fn new_block(&mut self, block: Block) -> u32 {
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
        self.by_offset.insert(block.offset, at);
        at
    }

    /// Cuts a free block in two at an offset inside it; gives the high part.
    fn cut(&mut self, at: u32, offset: u64) -> u32 {
        let low = self.blocks[at as usize];
        let high = self.new_block(Block {
            offset,
            size_bytes: low.end() - offset,
            prev: at,
            owner: BlockId::NONE,
            requested_bytes: 0,
            ..low
        });
        self.blocks[at as usize].size_bytes = offset - low.offset;
        self.blocks[at as usize].next = high;
        if let Some(next) = self.blocks.get_mut(low.next as usize) {
            next.prev = high;
        }
        high
    }

    /// Makes a block one with the one behind it if that is free and of the stream.
    fn join_if(&mut self, at: u32, stream: StreamId) {
        let next = self.blocks[at as usize].next;
        if self.blocks.get(next as usize).is_some_and(|it| it.is_free() && it.stream == stream) {
            self.join_next(at);
        }
    }

    /// Makes a block one with the block behind it.
    fn join_next(&mut self, at: u32) {
        let gone = self.blocks[at as usize].next;
        let Block { offset, size_bytes, next, .. } = self.blocks[gone as usize];
        self.by_offset.remove(&offset);
        self.spare.push(gone);
        let block = &mut self.blocks[at as usize];
        block.size_bytes += size_bytes;
        block.next = next;
        if let Some(next) = self.blocks.get_mut(next as usize) {
            next.prev = at;
        }
    }

    fn segment_action(&self, kind: ActionKind, offset_bytes: u64, size_bytes: u64) -> Action {
        Action {
            kind,
            block: BlockId::NONE,
            segment: 0,
            stream: StreamId::NONE,
            offset_bytes,
            size_bytes,
            address: self.pieces.base().unwrap_or(0) + offset_bytes,
        }
    }

    fn action(&self, kind: ActionKind, at: u32) -> Action {
        let block = &self.blocks[at as usize];
        Action {
            block: block.owner,
            stream: block.stream,
            size_bytes: block.requested_bytes,
            ..self.segment_action(kind, block.offset, 0)
        }
    }

    /// As [`Allocator::layout`](crate::alloc::Allocator::layout).
    pub(super) fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let base = self.pieces.base().unwrap_or(0);
        for &at in self.by_offset.values() {
            let block = &self.blocks[at as usize];
            let free = block.is_free();
            visit(LayoutBlock {
                block: if free { BlockId::NONE } else { block.owner },
                segment: 0,
                segment_address: base,
                segment_bytes: self.pieces.span_bytes(),
                page_bytes: GRANULARITY_BYTES,
                address: base + block.offset,
                size_bytes: block.size_bytes,
                requested_bytes: if free { 0 } else { block.requested_bytes },
                stream: block.stream,
                pool: 0,
                state: block.state,
            });
        }
    }

    /// Looks from scratch whether blocks cover the memory, are linked in order and add up.
    pub(super) fn check(&self) -> Result<(), String> {
        let (mut end, mut prev) = (0, NONE);
        let mut sums = [0; 2];
        for (&offset, &at) in &self.by_offset {
            let block = &self.blocks[at as usize];
            if block.offset != offset || offset != end || block.prev != prev {
                return Err(format!("block {at} at {offset} does not follow {prev}, end {end}"));
            }
            if block.size_bytes == 0 {
                return Err(format!("block {at} at {offset} is empty"));
            }
            if let Some(before) = self.blocks.get(prev as usize)
                && (before.next != at
                    || (before.is_free() && block.is_free() && before.stream == block.stream))
            {
                return Err(format!("blocks {prev} and {at} are not linked or not joined"));
            }
            sums[0] += if block.state == BlockState::Allocated { block.size_bytes } else { 0 };
            sums[1] += if block.is_free() { 0 } else { block.size_bytes };
            end = block.end();
            prev = at;
        }
        let mapped = self.pieces.mapped_bytes();
        let Levels { allocated_bytes, active_bytes, reserved_bytes } = self.levels;
        let levels = [allocated_bytes, active_bytes, reserved_bytes, reserved_bytes];
        if levels != [sums[0], sums[1], end, mapped] {
            return Err(format!("levels {levels:?}, blocks {sums:?} up to {end}, mapped {mapped}"));
        }
        Ok(())
    }
}
