//! Home addresses: slabs, the blocks that tile them, and the pieces of memory behind them.
//!
//! ```text
//!   slab     │ used │ free            │ used │ free │ without memory      │    blocks, 512 bytes
//!   pieces   │ 16 MiB  │ 16 MiB  │ 16 MiB  │ 6 MiB  │                       2 MiB to 16 MiB
//!                          └ wholly free: may be mapped into a view
//! ```
//!
//! Books only; nothing here calls the device. A piece knows the block that holds its first byte,
//! so whether it is free is one look. To keep that cheap, a split leaves the old name with the
//! larger part and a merge keeps that of the larger one: only pieces that begin in the smaller part
//! are told.

use std::collections::{BTreeMap, BTreeSet};

use super::views::View;
use crate::alloc::free_set::{Entry, FreeSet};
use crate::device::{GRANULARITY_BYTES, PhysicalHandle};
use crate::units::BlockId;

/// No block, piece or view.
pub(super) const NONE: u32 = u32::MAX;

/// Physical memory and home addresses come in multiples of this.
pub(super) const UNIT_BYTES: u64 = GRANULARITY_BYTES;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Memory that nobody uses. In the free set of its arena; no neighbour is free too.
    Free,
    /// In the program's hands.
    Used,
    /// Freed by the program, in use by another stream.
    Deferred,
    /// Addresses without memory, whole units. No neighbour is one too.
    Unmapped,
}

/// A range of home addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// Neighbours in the slab.
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) slab: u32,
    pub(super) state: State,
    /// The next part of the same live block: in a view, a live block has several.
    pub(super) chain: u32,
    /// What the first part of a live block knows of it.
    pub(super) live: Live,
}

/// A live block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    /// The view that it lies in, or [`NONE`] at home.
    pub(super) view: u32,
    /// The trace's block.
    pub(super) request: BlockId,
    /// What was asked for.
    pub(super) requested_bytes: u64,
    /// The same, rounded; 0 for all blocks but first parts.
    pub(super) size_bytes: u64,
}

impl Live {
    /// Not a live block's first part.
    pub(super) const NONE: Live =
        Live { view: NONE, request: BlockId::NONE, requested_bytes: 0, size_bytes: 0 };
}

impl Block {
    pub(super) fn end(&self) -> u64 {
        self.address + self.size_bytes
    }

    fn entry(&self, block: u32) -> Entry {
        Entry { size_bytes: self.size_bytes, address: self.address, block }
    }
}

/// A reserved range of addresses that belongs to one arena. Stays in the list when it is given
/// back, with `first` as [`NONE`].
#[derive(Clone, Debug)]
pub(super) struct Slab {
    pub(super) base: u64,
    pub(super) size_bytes: u64,
    pub(super) arena: u32,
    /// Place in the order of segments and views.
    pub(super) ordinal: u32,
    /// The block that begins at `base`.
    pub(super) first: u32,
    /// The piece behind every unit, or [`NONE`].
    pub(super) units: Vec<u32>,
}

impl Slab {
    fn unit(&self, address: u64) -> usize {
        ((address - self.base) / UNIT_BYTES) as usize
    }

    /// The first border of units at or above an address.
    fn unit_border(&self, address: u64) -> u64 {
        self.base + (address - self.base).next_multiple_of(UNIT_BYTES)
    }
}

/// A piece of physical memory at its home.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) slab: u32,
    pub(super) ordinal: u32,
    /// None once released: the memory is then there as long as it is mapped, but can be mapped
    /// nowhere else.
    pub(super) handle: Option<PhysicalHandle>,
    /// The block that holds its first byte.
    pub(super) block: u32,
    /// Views that map it.
    pub(super) views: Vec<u32>,
}

impl Piece {
    pub(super) fn end(&self) -> u64 {
        self.address + self.size_bytes
    }
}

/// What one stream has of one kind: requests up to 1 MiB, or larger ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Arena {
    pub(super) free: FreeSet,
    /// Blocks without memory by address.
    pub(super) unmapped: BTreeMap<u64, u32>,
    pub(super) mapped_bytes: u64,
    /// Views by power of two of their room, oldest first.
    pub(super) views: Vec<Vec<u32>>,
}

/// All arenas: stream `s` has arena `2 s` for large requests and `2 s + 1` for small ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Heap {
    pub(super) blocks: Vec<Block>,
    spare_blocks: Vec<u32>,
    pub(super) slabs: Vec<Slab>,
    pub(super) pieces: Vec<Piece>,
    spare_pieces: Vec<u32>,
    pub(super) arenas: Vec<Arena>,
    pub(super) views: Vec<View>,
    pub(super) spare_views: Vec<u32>,
    /// Views that no live block lies in, by last use.
    pub(super) idle_views: BTreeSet<(u64, u32)>,
}

/// What a free block has of pieces that can be mapped elsewhere, in the order of addresses.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// A piece whose back lies in the block, and how much of it.
    pub(super) back: Option<(u32, u64)>,
    /// Pieces that lie in it wholly.
    pub(super) whole: Vec<u32>,
    pub(super) whole_bytes: u64,
    /// A piece whose front lies in the block, and how much of it.
    pub(super) front: Option<(u32, u64)>,
}

impl Heap {
    /// Enters a new slab, all of it without memory, and gives its one block.
    pub(super) fn add_slab(&mut self, arena: u32, base: u64, size_bytes: u64, ordinal: u32) -> u32 {
        let slab = self.slabs.len() as u32;
        let block = self.new_block(Block {
            address: base,
            size_bytes,
            prev: NONE,
            next: NONE,
            slab,
            state: State::Unmapped,
            chain: NONE,
            live: Live::NONE,
        });
        let units = vec![NONE; (size_bytes / UNIT_BYTES) as usize];
        self.slabs.push(Slab { base, size_bytes, arena, ordinal, first: block, units });
        self.arenas[arena as usize].unmapped.insert(base, block);
        block
    }

    /// Takes a slab out that is one block without memory.
    pub(super) fn drop_slab(&mut self, block: u32) {
        let Block { address, slab, .. } = self.blocks[block as usize];
        let slab = &mut self.slabs[slab as usize];
        slab.first = NONE;
        slab.units = Vec::new();
        self.arenas[slab.arena as usize].unmapped.remove(&address);
        self.spare_blocks.push(block);
    }

    fn new_block(&mut self, block: Block) -> u32 {
        match self.spare_blocks.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        }
    }

    /// Enters a piece; the block behind it is set by the caller's [`Self::set_free`].
    pub(super) fn add_piece(&mut self, piece: Piece) {
        let Piece { address, size_bytes, slab, .. } = piece;
        let id = match self.spare_pieces.pop() {
            Some(id) => {
                self.pieces[id as usize] = piece;
                id
            }
            None => {
                self.pieces.push(piece);
                (self.pieces.len() - 1) as u32
            }
        };
        self.fill_units(slab, address, size_bytes, id);
    }

    /// Takes a free piece out; the block of its addresses is then without memory. Gives that block,
    /// joined with its neighbours.
    pub(super) fn drop_piece(&mut self, id: u32) -> u32 {
        let Piece { address, size_bytes, slab, block, .. } = self.pieces[id as usize];
        self.take_out(block);
        let block = self.carve(block, address, size_bytes);
        self.fill_units(slab, address, size_bytes, NONE);
        self.spare_pieces.push(id);
        self.set_unmapped(block)
    }

    fn fill_units(&mut self, slab: u32, address: u64, size_bytes: u64, piece: u32) {
        let slab = &mut self.slabs[slab as usize];
        let first = slab.unit(address);
        slab.units[first..first + (size_bytes / UNIT_BYTES) as usize].fill(piece);
    }

    /// Points the pieces that begin in [start, end) to a block.
    #[inline]
    fn point_pieces(&mut self, slab: u32, start: u64, end: u64, block: u32) {
        let slab = &self.slabs[slab as usize];
        let mut at = slab.unit_border(start);
        while at < end {
            let piece = &mut self.pieces[slab.units[slab.unit(at)] as usize];
            if piece.address == at {
                piece.block = block;
            }
            at = piece.end();
        }
    }

    fn arena_of(&mut self, id: u32) -> &mut Arena {
        let slab = self.blocks[id as usize].slab;
        &mut self.arenas[self.slabs[slab as usize].arena as usize]
    }

    fn put_in(&mut self, id: u32) {
        let entry = self.blocks[id as usize].entry(id);
        self.arena_of(id).free.insert(entry);
    }

    fn take_out(&mut self, id: u32) {
        let entry = self.blocks[id as usize].entry(id);
        self.arena_of(id).free.remove(entry);
    }

    /// Takes [address, address + size) of a free block into use. Gives its block.
    #[inline]
    pub(super) fn use_range(&mut self, id: u32, address: u64, size_bytes: u64) -> u32 {
        self.take_out(id);
        let id = self.carve(id, address, size_bytes);
        let block = &mut self.blocks[id as usize];
        block.state = State::Used;
        block.chain = NONE;
        id
    }

    /// Cuts [address, address + size) out of a free block that is in no set. What is left of it
    /// goes back in.
    fn carve(&mut self, id: u32, address: u64, size_bytes: u64) -> u32 {
        let mut id = id;
        let block = self.blocks[id as usize];
        if block.address < address {
            id = self.split(id, address - block.address);
            self.put_in(self.blocks[id as usize].prev);
        }
        if self.blocks[id as usize].size_bytes > size_bytes {
            let rest = self.split(id, size_bytes);
            self.put_in(rest);
            id = self.blocks[rest as usize].prev;
        }
        id
    }

    /// Splits a block that is in no set. Gives the back part.
    fn split(&mut self, id: u32, front_bytes: u64) -> u32 {
        let whole = self.blocks[id as usize];
        let border = whole.address + front_bytes;
        let back_bytes = whole.size_bytes - front_bytes;
        let has_pieces = whole.state != State::Unmapped;
        if back_bytes >= front_bytes {
            let front = self.new_block(Block { size_bytes: front_bytes, next: id, ..whole });
            let back = &mut self.blocks[id as usize];
            back.address = border;
            back.size_bytes = back_bytes;
            back.prev = front;
            self.link_next_of(whole.prev, whole.slab, front);
            if has_pieces {
                self.point_pieces(whole.slab, whole.address, border, front);
            }
            return id;
        }
        let back = Block { address: border, size_bytes: back_bytes, prev: id, ..whole };
        let back = self.new_block(back);
        let front = &mut self.blocks[id as usize];
        front.size_bytes = front_bytes;
        front.next = back;
        self.link_prev_of(whole.next, back);
        if has_pieces {
            self.point_pieces(whole.slab, border, whole.end(), back);
        }
        back
    }

    fn link_next_of(&mut self, prev: u32, slab: u32, block: u32) {
        match prev {
            NONE => self.slabs[slab as usize].first = block,
            prev => self.blocks[prev as usize].next = block,
        }
    }

    fn link_prev_of(&mut self, next: u32, block: u32) {
        if next != NONE {
            self.blocks[next as usize].prev = block;
        }
    }

    /// Joins a block with the next one; both are of one kind and in no set. Gives the one that
    /// stays.
    fn join_next(&mut self, id: u32) -> u32 {
        let front = self.blocks[id as usize];
        let next = front.next;
        let back = self.blocks[next as usize];
        let has_pieces = front.state != State::Unmapped;
        if front.size_bytes >= back.size_bytes {
            if has_pieces {
                self.point_pieces(front.slab, back.address, back.end(), id);
            }
            let joined = &mut self.blocks[id as usize];
            joined.size_bytes += back.size_bytes;
            joined.next = back.next;
            self.link_prev_of(back.next, id);
            self.spare_blocks.push(next);
            return id;
        }
        if has_pieces {
            self.point_pieces(front.slab, front.address, front.end(), next);
        }
        let joined = &mut self.blocks[next as usize];
        joined.address = front.address;
        joined.size_bytes += front.size_bytes;
        joined.prev = front.prev;
        self.link_next_of(front.prev, front.slab, next);
        self.spare_blocks.push(id);
        next
    }

    #[inline]
    fn is(&self, id: u32, state: State) -> bool {
        self.blocks.get(id as usize).is_some_and(|block| block.state == state)
    }

    /// Makes a block free and joins it with free neighbours.
    #[inline]
    pub(super) fn set_free(&mut self, id: u32) {
        let mut id = id;
        let block = &mut self.blocks[id as usize];
        block.state = State::Free;
        block.live = Live::NONE;
        let Block { prev, next, .. } = *block;
        if self.is(next, State::Free) {
            self.take_out(next);
            id = self.join_next(id);
        }
        if self.is(prev, State::Free) {
            self.take_out(prev);
            id = self.join_next(prev);
        }
        self.put_in(id);
    }

    /// Makes a block whose pieces are gone one without memory.
    fn set_unmapped(&mut self, id: u32) -> u32 {
        let mut id = id;
        self.blocks[id as usize].state = State::Unmapped;
        let Block { prev, next, .. } = self.blocks[id as usize];
        if self.is(next, State::Unmapped) {
            let address = self.blocks[next as usize].address;
            self.arena_of(next).unmapped.remove(&address);
            id = self.join_next(id);
        }
        if self.is(prev, State::Unmapped) {
            let address = self.blocks[prev as usize].address;
            self.arena_of(prev).unmapped.remove(&address);
            id = self.join_next(prev);
        }
        let address = self.blocks[id as usize].address;
        self.arena_of(id).unmapped.insert(address, id);
        id
    }

    /// Cuts the first `size_bytes` off a block without memory. The caller enters pieces for them
    /// and calls [`Self::set_mapped`].
    pub(super) fn begin_of_unmapped(&mut self, id: u32, size_bytes: u64) -> u32 {
        let block = self.blocks[id as usize];
        self.arena_of(id).unmapped.remove(&block.address);
        if block.size_bytes == size_bytes {
            return id;
        }
        let back = self.split(id, size_bytes);
        self.arena_of(back).unmapped.insert(block.address + size_bytes, back);
        self.blocks[back as usize].prev
    }

    /// Makes a block of [`Self::begin_of_unmapped`] free memory.
    pub(super) fn set_mapped(&mut self, id: u32) {
        let Block { slab, address, .. } = self.blocks[id as usize];
        let end = self.blocks[id as usize].end();
        self.point_pieces(slab, address, end, id);
        self.set_free(id);
    }

    /// The free block that holds all of [offset, offset + size) of a piece.
    #[inline]
    pub(super) fn free_block_at(&self, piece: u32, offset: u64, size_bytes: u64) -> Option<u32> {
        let piece = &self.pieces[piece as usize];
        let start = piece.address + offset;
        let mut at = piece.block;
        while self.blocks[at as usize].end() <= start {
            at = self.blocks[at as usize].next;
        }
        let block = &self.blocks[at as usize];
        (block.state == State::Free && block.end() >= start + size_bytes).then_some(at)
    }

    /// The pieces behind a block that has memory, in order; the first and the last may reach beyond
    /// it.
    pub(super) fn pieces_over(&self, block: &Block) -> impl Iterator<Item = (u32, &Piece)> {
        let slab = &self.slabs[block.slab as usize];
        let (mut at, end) = (block.address, block.end());
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let id = slab.units[slab.unit(at)];
            let piece = &self.pieces[id as usize];
            at = piece.end();
            Some((id, piece))
        })
    }

    /// All pieces that lie wholly in a block.
    pub(super) fn pieces_in(&self, id: u32) -> impl Iterator<Item = u32> {
        let block = &self.blocks[id as usize];
        let is_inside =
            |piece: &Piece| block.address <= piece.address && piece.end() <= block.end();
        self.pieces_over(block).filter(move |(_, piece)| is_inside(piece)).map(|(id, _)| id)
    }

    /// What a free block has of pieces.
    pub(super) fn run(&self, id: u32) -> Run {
        let block = &self.blocks[id as usize];
        let mut run = Run::default();
        for (id, piece) in self.pieces_over(block).filter(|(_, piece)| piece.handle.is_some()) {
            match (block.address <= piece.address, piece.end() <= block.end()) {
                (true, true) => {
                    run.whole.push(id);
                    run.whole_bytes += piece.size_bytes;
                }
                (true, false) => run.front = Some((id, block.end() - piece.address)),
                (false, true) => run.back = Some((id, piece.end() - block.address)),
                (false, false) => {}
            }
        }
        run
    }

    /// Checks the books from scratch: blocks tile slabs, no two neighbours should be one, pieces
    /// know their block, sets hold what they should.
    ///
    /// # Errors
    /// What is broken.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut free = vec![0usize; self.arenas.len()];
        let mut unmapped = vec![0usize; self.arenas.len()];
        for (number, slab) in self.slabs.iter().enumerate().filter(|(_, slab)| slab.first != NONE) {
            let (mut at, mut prev, mut id) = (slab.base, NONE, slab.first);
            while id != NONE {
                let block = &self.blocks[id as usize];
                let place = (block.address, block.prev, block.slab) == (at, prev, number as u32);
                let twin = prev != NONE && self.blocks[prev as usize].state == block.state;
                if !place || block.size_bytes == 0 {
                    return Err(format!("block {id} of slab {number} does not follow {prev}"));
                }
                if twin && matches!(block.state, State::Free | State::Unmapped) {
                    return Err(format!("blocks {prev} and {id} should be one"));
                }
                match block.state {
                    State::Free => free[slab.arena as usize] += 1,
                    State::Unmapped => unmapped[slab.arena as usize] += 1,
                    State::Used | State::Deferred => {}
                }
                (at, prev, id) = (block.end(), id, block.next);
            }
            if at != slab.base + slab.size_bytes {
                return Err(format!("the blocks of slab {number} end at {at:#x}"));
            }
            self.check_pieces(slab)?;
        }
        for (number, arena) in self.arenas.iter().enumerate() {
            let counts = (arena.free.iter().count(), arena.unmapped.len());
            if counts != (free[number], unmapped[number]) {
                return Err(format!("the sets of arena {number} hold {counts:?} blocks"));
            }
        }
        Ok(())
    }

    fn check_pieces(&self, slab: &Slab) -> Result<(), String> {
        for (unit, &id) in slab.units.iter().enumerate().filter(|(_, id)| **id != NONE) {
            let piece = &self.pieces[id as usize];
            let block = &self.blocks[piece.block as usize];
            let address = slab.base + unit as u64 * UNIT_BYTES;
            if !(piece.address..piece.end()).contains(&address) {
                return Err(format!("piece {id} is not at {address:#x}"));
            }
            if !(block.address..block.end()).contains(&piece.address) {
                return Err(format!("block {} does not hold piece {id}", piece.block));
            }
            if piece.views.iter().any(|&view| !self.views[view as usize].pieces.contains(&id)) {
                return Err(format!("piece {id} knows a view that does not map it"));
            }
        }
        Ok(())
    }
}
