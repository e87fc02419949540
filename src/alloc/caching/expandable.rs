//! Expandable segments (spec 5): reservations of addresses whose pages get memory as needed.
//!
//! ```text
//!   reservation of a stream in a pool: 1.125 x the device, page by page
//!   ┌ page 0 ──────┬ page 1 ──────┬ page 2 ──────┬ page 3 ───────────────────────────────┐
//!   │ A    │ B            │ free  │   unmapped   │   unmapped ...                        │
//!   └──────┴──────────────┴───────┴──────────────┴───────────────────────────────────────┘
//!                           a request that needs more than `free` maps page 2 and takes both
//! ```
//!
//! One list of blocks covers the reservation, mapped or not. Pages are mapped from the start of an
//! unmapped block, and unmapped when a flush finds them wholly free.

use super::stats::{Kind, SMALL};
use super::{Block, Caching, NONE, SMALL_SEGMENT_BYTES, Segment, State, kind_of};
use crate::alloc::free_set::Entry;
use crate::alloc::{Action, ActionKind, Env};
use crate::device::{Device, GRANULARITY_BYTES, PhysicalHandle};
use crate::trace::reservation_span_bytes;
use crate::units::BlockId;

/// Most pages mapped at once: 8 TiB of the smallest. No device has as many, and the books of more
/// would fill this machine's memory.
pub(super) const PAGES_MAX: u64 = 1 << 22;

impl Caching {
    /// The block to take in place of a first fit that lies in a reservation (spec 3.4 step 2).
    ///
    /// With expandable segments on, a block that can still grow counts with what it could grow by,
    /// so that a closed hole is taken first. With them off, such blocks are passed over.
    pub(super) fn pass_expandable(&self, set: u32, fit: Entry, expandable: bool) -> Option<Entry> {
        let free = &self.free[set as usize];
        let mut candidate = fit;
        while self.blocks[candidate.block as usize].expandable {
            if !expandable {
                candidate = free.after(candidate)?;
                continue;
            }
            let growable_bytes = self.growable_bytes(candidate);
            // What follows is no smaller, so a block that cannot grow is not passed over.
            if growable_bytes == candidate.size_bytes {
                break;
            }
            match free.after(candidate) {
                Some(next) if self.growable_bytes(next) < growable_bytes => candidate = next,
                _ => break,
            }
        }
        Some(candidate)
    }

    /// Size of a free block with the unmapped block behind it.
    fn growable_bytes(&self, entry: Entry) -> u64 {
        match self.blocks.get(self.blocks[entry.block as usize].next as usize) {
            Some(next) if next.state == State::Unmapped => entry.size_bytes + next.size_bytes,
            _ => entry.size_bytes,
        }
    }

    /// Page size of the reservations of a kind of pool made from here on.
    pub(super) fn page_bytes(&self, kind: Kind) -> u64 {
        if kind == SMALL { SMALL_SEGMENT_BYTES } else { self.config.large_segment_size_bytes }
    }

    /// Size of a reservation: 1.125 times the device in whole pages.
    pub(super) fn reservation_bytes(&self, page_bytes: u64) -> u64 {
        reservation_span_bytes(self.device_total_bytes).next_multiple_of(page_bytes)
    }

    /// A free block of at least `size_bytes` in a reservation, in no set, with pages mapped as
    /// needed (spec 5.3). When the device refuses, pages mapped before stay, free.
    pub(super) fn obtain_pages<E: Env>(
        &mut self,
        env: &mut E,
        set: u32,
        size_bytes: u64,
    ) -> Option<u32> {
        let mut at = match self.expandable_room(set, size_bytes) {
            Some(at) => at,
            None => self.reserve(env, set)?,
        };
        if self.blocks[at as usize].state == State::Unmapped {
            at = self.map(env, at, size_bytes)?;
        }
        while self.blocks[at as usize].size_bytes < size_bytes {
            let Block { size_bytes: mapped_bytes, next, .. } = self.blocks[at as usize];
            let unmapped = self.blocks.get(next as usize)?.state == State::Unmapped;
            at = if unmapped {
                self.map(env, next, size_bytes - mapped_bytes)?
            } else {
                return None;
            };
        }
        self.take_out(at);
        Some(at)
    }

    /// The first free or unmapped block from which enough room follows (spec 5.2).
    fn expandable_room(&self, set: u32, size_bytes: u64) -> Option<u32> {
        self.unmapped[set as usize].values().copied().find_map(|unmapped| {
            let prev = self.blocks[unmapped as usize].prev;
            let start = match self.blocks.get(prev as usize) {
                Some(prev_block) if prev_block.is_free() => prev,
                _ => unmapped,
            };
            let mut room_bytes = 0;
            let mut at = start;
            while let Some(block) = self.blocks.get(at as usize)
                && matches!(block.state, State::Free | State::Unmapped)
            {
                room_bytes += block.size_bytes;
                if room_bytes >= size_bytes {
                    return Some(start);
                }
                at = block.next;
            }
            None
        })
    }

    /// Reserves addresses; one unmapped block spans them.
    fn reserve<E: Env>(&mut self, env: &mut E, set: u32) -> Option<u32> {
        let page_bytes = self.page_bytes(kind_of(set));
        if !page_bytes.is_multiple_of(GRANULARITY_BYTES) {
            self.fail(
                "with expandable_segments, large_segment_size_mb is the size of a page, and the \
                 driver has none of an odd number of MiB: PyTorch stops with an error",
            );
            return None;
        }
        let size_bytes = self.reservation_bytes(page_bytes);
        let address = env.device().address_reserve(size_bytes).ok()?;
        Some(self.new_reservation(address, size_bytes, set, page_bytes))
    }

    /// One unmapped block over a reserved range.
    pub(super) fn new_reservation(
        &mut self,
        address: u64,
        size_bytes: u64,
        set: u32,
        page_bytes: u64,
    ) -> u32 {
        self.special = true;
        let segment = self.segments.len() as u32;
        let at = self.new_id();
        self.put_block(at, Block::unmapped(address, size_bytes, segment, set));
        self.segments.push(Segment { address, size_bytes, page_bytes, first: at });
        self.unmapped[set as usize].insert(address, at);
        at
    }

    /// Maps as many pages at the start of an unmapped block as hold `size_bytes`, or all of it.
    /// Gives the free block that they are part of. Nothing changes if the device refuses.
    fn map<E: Env>(&mut self, env: &mut E, at: u32, size_bytes: u64) -> Option<u32> {
        let Block { address, size_bytes: room_bytes, segment, set, prev, next, .. } =
            self.blocks[at as usize];
        let page_bytes = self.segments[segment as usize].page_bytes;
        let mapped_bytes = size_bytes.min(room_bytes).next_multiple_of(page_bytes);
        self.map_pages(env, address, mapped_bytes, page_bytes)?;
        self.unmapped[set as usize].remove(&address);
        let kind = kind_of(set);
        let rest_bytes = room_bytes - mapped_bytes;
        let block = &mut self.blocks[at as usize];
        block.state = State::Free;
        block.size_bytes = mapped_bytes;
        block.gc_base = self.searches[kind];
        if rest_bytes > 0 {
            let rest = Block::unmapped(address + mapped_bytes, rest_bytes, segment, set);
            let rest_at = self.insert_after(at, Block { next, ..rest });
            self.unmapped[set as usize].insert(rest.address, rest_at);
        } else if self.is_free_at(next) {
            self.take_out(next);
            self.join_next(at);
        }
        let mut merged = at;
        if self.is_free_at(prev) {
            self.take_out(prev);
            merged = self.join_next(prev);
        }
        self.put_in(merged);
        self.gain(set, mapped_bytes);
        self.stats.mapped(kind, mapped_bytes);
        if E::LOG {
            env.log(self.pages_action(ActionKind::SegmentMap, segment, set, address, mapped_bytes));
        }
        Some(merged)
    }

    /// Memory for pages: created one by one, mapped, made accessible. All or nothing, and nothing
    /// beyond [`PAGES_MAX`].
    fn map_pages<E: Env>(
        &mut self,
        env: &mut E,
        address: u64,
        size_bytes: u64,
        page_bytes: u64,
    ) -> Option<()> {
        if size_bytes / page_bytes > PAGES_MAX.saturating_sub(self.pages.len() as u64) {
            return None;
        }
        let device = env.device();
        let mut handles: Vec<PhysicalHandle> = Vec::new();
        let created = (0..size_bytes / page_bytes)
            .all(|_| device.create(page_bytes).map(|handle| handles.push(handle)).is_ok());
        let mut mapped_bytes = 0;
        let mapped = created
            && handles.iter().all(|&handle| {
                let done = device.map(address + mapped_bytes, handle).is_ok();
                mapped_bytes += if done { page_bytes } else { 0 };
                done
            });
        if mapped && device.set_access(address, size_bytes).is_ok() {
            let addresses = (address..address + size_bytes).step_by(page_bytes as usize);
            self.pages.extend(addresses.zip(handles));
            return Some(());
        }
        // A device that refuses these too keeps the memory; there is nobody to tell.
        if mapped_bytes > 0 {
            let _ = device.unmap(address, mapped_bytes);
        }
        for handle in handles {
            let _ = device.release(handle);
        }
        None
    }

    /// Gives the whole pages of a free block in a reservation back to the device (spec 5.4).
    pub(super) fn unmap<E: Env>(&mut self, env: &mut E, at: u32) {
        let Block { address, size_bytes, segment, set, .. } = self.blocks[at as usize];
        let Segment { address: base, page_bytes, .. } = self.segments[segment as usize];
        let first = base + (address - base).next_multiple_of(page_bytes);
        let end = address + size_bytes;
        let end_wanted = end - (end - base) % page_bytes;
        if first >= end_wanted {
            return;
        }
        let Some(unmapped_bytes) = self.unmap_pages(env, first, end_wanted - first, page_bytes)
        else {
            return;
        };
        let kind = kind_of(set);
        self.take_out(at);
        // before │ middle │ after: the middle loses its memory, the rest stays free.
        let mut middle = at;
        if first > address {
            middle = self.cut(at, first - address);
            self.put_in(at);
        }
        if first + unmapped_bytes < end {
            let after = self.cut(middle, unmapped_bytes);
            self.put_in(after);
        }
        self.blocks[middle as usize].state = State::Unmapped;
        middle = self.merge_unmapped(middle);
        self.lose(set, unmapped_bytes);
        self.stats.unmapped(kind, unmapped_bytes);
        if E::LOG {
            let kind = ActionKind::SegmentUnmap;
            env.log(self.pages_action(kind, segment, set, first, unmapped_bytes));
        }
        self.give_reservation_back(env, middle);
    }

    /// Takes the memory from pages, as PyTorch does by an unmap and a release for each; gives how
    /// many bytes of them, from the first on, the device took back. Handles go first: a page whose
    /// handle the device does not take stays as it is, and one that it does not unmap is tried
    /// again, without a handle.
    fn unmap_pages<E: Env>(
        &mut self,
        env: &mut E,
        address: u64,
        size_bytes: u64,
        page_bytes: u64,
    ) -> Option<u64> {
        let mut unmapped_bytes = 0;
        while unmapped_bytes < size_bytes {
            let page = address + unmapped_bytes;
            if let Some(&handle) = self.pages.get(&page) {
                if env.device().release(handle).is_err() {
                    break;
                }
                self.pages.remove(&page);
            }
            if env.device().unmap(page, page_bytes).is_err() {
                break;
            }
            unmapped_bytes += page_bytes;
        }
        (unmapped_bytes > 0).then_some(unmapped_bytes)
    }

    /// Joins an unmapped block with unmapped neighbours and enters it among the unmapped.
    fn merge_unmapped(&mut self, at: u32) -> u32 {
        let Block { set, prev, next, .. } = self.blocks[at as usize];
        let is_unmapped = |caching: &Caching, id: u32| {
            caching.blocks.get(id as usize).is_some_and(|block| block.state == State::Unmapped)
        };
        if is_unmapped(self, next) {
            let next_address = self.blocks[next as usize].address;
            self.unmapped[set as usize].remove(&next_address);
            self.join_next(at);
        }
        let merged = if is_unmapped(self, prev) { self.join_next(prev) } else { at };
        let address = self.blocks[merged as usize].address;
        self.unmapped[set as usize].insert(address, merged);
        merged
    }

    /// Gives a reservation back that holds no memory any more. If the device refuses, it stays.
    fn give_reservation_back<E: Env>(&mut self, env: &mut E, at: u32) {
        let Block { address, size_bytes, segment, set, .. } = self.blocks[at as usize];
        let spans_all = size_bytes == self.segments[segment as usize].size_bytes;
        if spans_all && env.device().address_free(address, size_bytes).is_ok() {
            self.unmapped[set as usize].remove(&address);
            self.segments[segment as usize].first = NONE;
            self.spare.push(at);
        }
    }

    /// Takes a free block out of its set.
    fn take_out(&mut self, id: u32) {
        let block = &self.blocks[id as usize];
        self.free[block.set as usize].remove(block.entry(id));
    }

    /// Puts a free block into its set.
    pub(super) fn put_in(&mut self, id: u32) {
        let block = &self.blocks[id as usize];
        self.free[block.set as usize].insert(block.entry(id));
    }

    fn is_free_at(&self, id: u32) -> bool {
        self.blocks.get(id as usize).is_some_and(Block::is_free)
    }

    /// Puts a block behind another in the list. Gives its id.
    pub(super) fn insert_after(&mut self, at: u32, block: Block) -> u32 {
        let id = self.new_id();
        self.put_block(id, Block { prev: at, ..block });
        self.blocks[at as usize].next = id;
        if let Some(next) = self.blocks.get_mut(block.next as usize) {
            next.prev = id;
        }
        id
    }

    /// Cuts a block in two; gives the id of the high part. Neither is put into a set.
    pub(super) fn cut(&mut self, at: u32, low_bytes: u64) -> u32 {
        let block = self.blocks[at as usize];
        self.blocks[at as usize].size_bytes = low_bytes;
        let high = Block {
            address: block.address + low_bytes,
            size_bytes: block.size_bytes - low_bytes,
            ..block
        };
        self.insert_after(at, high)
    }

    /// Makes a block one with the block behind it.
    fn join_next(&mut self, at: u32) -> u32 {
        let gone = self.blocks[at as usize].next;
        let Block { size_bytes, next, .. } = self.blocks[gone as usize];
        self.spare.push(gone);
        let block = &mut self.blocks[at as usize];
        block.size_bytes += size_bytes;
        block.next = next;
        if let Some(next) = self.blocks.get_mut(next as usize) {
            next.prev = at;
        }
        at
    }

    fn pages_action(
        &self,
        kind: ActionKind,
        segment: u32,
        set: u32,
        address: u64,
        size_bytes: u64,
    ) -> Action {
        Action {
            kind,
            block: BlockId::NONE,
            segment,
            stream: self.stream_of(set),
            offset_bytes: address - self.segments[segment as usize].address,
            size_bytes,
            address,
        }
    }
}

impl Block {
    /// Addresses of a reservation without memory.
    pub(super) fn unmapped(address: u64, size_bytes: u64, segment: u32, set: u32) -> Block {
        Block {
            address,
            size_bytes,
            requested_bytes: 0,
            gc_base: 0,
            prev: NONE,
            next: NONE,
            segment,
            set,
            owner: BlockId::NONE,
            state: State::Unmapped,
            expandable: true,
        }
    }
}
