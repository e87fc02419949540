//! What needs the device: memory for slabs, views over it, and giving both back.

use super::Best;
use super::config::VIEW_LIMIT_BYTES;
use super::gather::Gathered;
use super::heap::{Block, NONE, Piece, Slab, State, UNIT_BYTES};
use super::views::View;
use crate::alloc::{Action, ActionKind, Env};
use crate::device::{Device, PhysicalHandle};
use crate::units::{BlockId, MIB, StreamId};

/// A slab has room for this share more of what its arena holds, so that later memory lies beside
/// earlier.
const SLAB_SHARE: u64 = 8;
/// Least size of a slab for large requests.
const LARGE_SLAB_BYTES: u64 = 20 * MIB;
/// Views are dropped above this number, whatever their size: a driver has an end to its mappings,
/// and looking for a view takes time.
const VIEWS_MAX: usize = 4096;
/// Evicted views that are remembered.
const SIGNATURES_MAX: usize = 4096;
/// The limit of idle views is raised to this many times what it was at first.
const VIEW_RAISE_MAX: u64 = 1024;

/// Where memory can be added so that a request fits at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Memory to add at the start of the block.
    pub(super) more_bytes: u64,
    address: u64,
    /// A block without memory, or [`NONE`] for a new slab.
    block: u32,
}

impl Best {
    /// Where least memory has to be added for a home block of `size_bytes`: behind a free block, in
    /// addresses that have none yet, else in a new slab.
    pub(super) fn place_for(&self, arena: u32, size_bytes: u64) -> Place {
        let heap = &self.heap;
        let places = heap.arenas[arena as usize].unmapped.values().filter_map(|&id| {
            let block = &heap.blocks[id as usize];
            let before = heap.blocks.get(block.prev as usize);
            let before = before.filter(|before| before.state == State::Free);
            let missing = size_bytes.checked_sub(before.map_or(0, |before| before.size_bytes))?;
            let more_bytes = missing.next_multiple_of(UNIT_BYTES);
            let fits = more_bytes > 0 && more_bytes <= block.size_bytes;
            fits.then_some(Place { more_bytes, address: block.address, block: id })
        });
        let new = Place {
            more_bytes: size_bytes.next_multiple_of(UNIT_BYTES),
            address: u64::MAX,
            block: NONE,
        };
        places.min().map_or(new, |place| place.min(new))
    }

    /// Where `more_bytes` of memory go that shall be part of a view: the lowest addresses that have
    /// none and are enough, else a new slab.
    pub(super) fn place_of(&self, arena: u32, more_bytes: u64) -> Place {
        let unmapped = self.heap.arenas[arena as usize].unmapped.iter();
        let fits =
            |&(_, &id): &(&u64, &u32)| self.heap.blocks[id as usize].size_bytes >= more_bytes;
        match unmapped.clone().find(fits) {
            Some((&address, &block)) => Place { more_bytes, address, block },
            None => Place { more_bytes, address: u64::MAX, block: NONE },
        }
    }

    /// Adds memory. Says whether it could be had; if not, nothing has changed but perhaps a new
    /// slab.
    pub(super) fn add_memory<E: Env>(&mut self, env: &mut E, arena: u32, place: Place) -> bool {
        let Place { more_bytes, .. } = place;
        let block = match place.block {
            NONE => self.add_slab(env, arena, more_bytes),
            block => Some(block),
        };
        let Some(block) = block.filter(|_| more_bytes <= self.room_to_limit_bytes()) else {
            return false;
        };
        let address = self.heap.blocks[block as usize].address;
        let Some(pieces) = self.make_pieces(env, address, more_bytes) else { return false };
        let block = self.heap.begin_of_unmapped(block, more_bytes);
        let slab = self.heap.blocks[block as usize].slab;
        let mut at = address;
        for (size_bytes, handle) in pieces {
            let ordinal = self.next_ordinal();
            self.heap.add_piece(Piece {
                address: at,
                size_bytes,
                slab,
                ordinal,
                handle: Some(handle),
                block,
                views: Vec::new(),
            });
            at += size_bytes;
        }
        self.heap.set_mapped(block);
        self.heap.arenas[arena as usize].mapped_bytes += more_bytes;
        self.levels.reserved_bytes += more_bytes;
        self.counts.segment_allocs += 1;
        if E::LOG {
            env.log(self.memory_action(ActionKind::SegmentMap, slab, address, more_bytes));
        }
        true
    }

    /// What may be added without exceeding the limit.
    pub(super) fn room_to_limit_bytes(&self) -> u64 {
        let limit = self.config.limit_bytes.unwrap_or(u64::MAX);
        limit.saturating_sub(self.levels.reserved_bytes)
    }

    fn add_slab<E: Env>(&mut self, env: &mut E, arena: u32, size_bytes: u64) -> Option<u32> {
        let more = self.heap.arenas[arena as usize].mapped_bytes / SLAB_SHARE;
        let least = if arena.is_multiple_of(2) { LARGE_SLAB_BYTES } else { UNIT_BYTES };
        let wanted = size_bytes.max(more.next_multiple_of(UNIT_BYTES)).max(least);
        let (base, size_bytes) = match env.device().address_reserve(wanted) {
            Ok(base) => (base, wanted),
            Err(_) => (env.device().address_reserve(size_bytes).ok()?, size_bytes),
        };
        let ordinal = self.next_ordinal();
        Some(self.heap.add_slab(arena, base, size_bytes, ordinal))
    }

    /// Creates pieces for a range and maps them there. If anything fails, all is undone.
    fn make_pieces<E: Env>(
        &self,
        env: &mut E,
        address: u64,
        size_bytes: u64,
    ) -> Option<Vec<(u64, PhysicalHandle)>> {
        let device = env.device();
        let mut pieces = Vec::new();
        let mut mapped_bytes = 0;
        let mut done_bytes = 0;
        while done_bytes < size_bytes {
            let at = address + done_bytes;
            let bytes = self.config.piece_bytes.min(size_bytes - done_bytes);
            let Ok(handle) = device.create(bytes) else { break };
            pieces.push((bytes, handle));
            if device.map(at, handle).is_err() {
                break;
            }
            mapped_bytes += bytes;
            if device.set_access(at, bytes).is_err() {
                break;
            }
            done_bytes += bytes;
        }
        if done_bytes == size_bytes {
            return Some(pieces);
        }
        // A device that refuses these too keeps the memory; there is nobody to tell.
        if mapped_bytes > 0 {
            let _ = device.unmap(address, mapped_bytes);
        }
        for (_, handle) in pieces {
            let _ = device.release(handle);
        }
        None
    }

    /// Makes a view for a block of `block_bytes`. None if the device refuses; then nothing has
    /// changed.
    pub(super) fn make_view<E: Env>(
        &mut self,
        env: &mut E,
        arena: u32,
        got: Gathered,
        block_bytes: u64,
    ) -> Option<u32> {
        let size = |&piece: &u32| self.heap.pieces[piece as usize].size_bytes;
        let size_bytes: u64 = got.pieces.iter().map(size).sum();
        let address = self.map_view(env, &got.pieces, size_bytes)?;
        self.counts.stitches += 1;
        self.counts.stitched_bytes += size_bytes;
        self.counts.stitched_bytes_peak =
            self.counts.stitched_bytes_peak.max(self.counts.stitched_bytes);
        let view = View {
            address,
            size_bytes,
            pieces: got.pieces,
            skip_bytes: got.skip_bytes,
            room_bytes: block_bytes.next_multiple_of(UNIT_BYTES).min(got.bytes),
            is_live: false,
            last_used: self.tick(),
            number: self.counts.stitches,
            arena,
            ordinal: self.next_ordinal(),
        };
        // One that was there before was evicted too early.
        if self.evicted.remove(&view.signature()) {
            self.view_raise = (self.view_raise * 2).min(VIEW_RAISE_MAX);
        }
        let id = self.heap.add_view(view);
        if E::LOG {
            env.log(self.view_action(ActionKind::Stitch, id));
        }
        Some(id)
    }

    fn map_view<E: Env>(&mut self, env: &mut E, pieces: &[u32], size_bytes: u64) -> Option<u64> {
        let device = env.device();
        let address = device.address_reserve(size_bytes).ok()?;
        let mut mapped_bytes = 0;
        for &piece in pieces {
            let piece = &self.heap.pieces[piece as usize];
            let mapped = piece
                .handle
                .is_some_and(|handle| device.map(address + mapped_bytes, handle).is_ok());
            if !mapped {
                break;
            }
            mapped_bytes += piece.size_bytes;
        }
        if mapped_bytes == size_bytes && device.set_access(address, size_bytes).is_ok() {
            return Some(address);
        }
        if mapped_bytes > 0 && device.unmap(address, mapped_bytes).is_err() {
            // The device keeps pieces mapped where nobody will look for them.
            return None;
        }
        self.free_addresses(env, address, size_bytes);
        None
    }

    /// Gives addresses back, now or at the next [`empty_cache`](Best::retry_addresses).
    fn free_addresses<E: Env>(&mut self, env: &mut E, address: u64, size_bytes: u64) {
        if env.device().address_free(address, size_bytes).is_err() {
            self.refused_addresses.push((address, size_bytes));
        }
    }

    /// Offers the device again what addresses it did not take back.
    pub(super) fn retry_addresses<E: Env>(&mut self, env: &mut E) {
        for (address, size_bytes) in std::mem::take(&mut self.refused_addresses) {
            self.free_addresses(env, address, size_bytes);
        }
    }

    /// Drops a view that is not live. Says whether the device took it.
    fn drop_view<E: Env>(&mut self, env: &mut E, id: u32) -> bool {
        let View { address, size_bytes, .. } = self.heap.views[id as usize];
        if env.device().unmap(address, size_bytes).is_err() {
            return false;
        }
        if E::LOG {
            env.log(self.view_action(ActionKind::Unstitch, id));
        }
        self.free_addresses(env, address, size_bytes);
        self.heap.drop_view(id);
        self.counts.stitched_bytes -= size_bytes;
        self.counts.stitch_evictions += 1;
        true
    }

    /// Drops idle views, the least recently used first, until views take no more addresses than
    /// they may.
    pub(super) fn evict<E: Env>(&mut self, env: &mut E) {
        let usual_bytes = VIEW_LIMIT_BYTES.max(self.levels.reserved_bytes / 4);
        let limit_bytes = self.config.view_limit_bytes;
        let limit_bytes = limit_bytes.unwrap_or(usual_bytes.saturating_mul(self.view_raise));
        loop {
            let views = self.heap.views.len() - self.heap.spare_views.len();
            if self.counts.stitched_bytes <= limit_bytes && views <= VIEWS_MAX {
                return;
            }
            let Some(&(_, id)) = self.heap.idle_views.first() else { return };
            let signature = self.heap.views[id as usize].signature();
            if !self.drop_view(env, id) {
                return;
            }
            if self.evicted.len() >= SIGNATURES_MAX {
                self.evicted.clear();
            }
            self.evicted.insert(signature);
        }
    }

    /// Gives free pieces of an arena back until `wanted_bytes` came back. Says how many did.
    pub(super) fn trim<E: Env>(&mut self, env: &mut E, arena: u32, wanted_bytes: u64) -> u64 {
        let free = self.heap.arenas[arena as usize].free.at_least(UNIT_BYTES).rev();
        let mut pieces: Vec<u32> = Vec::new();
        for entry in free {
            pieces.extend(self.heap.pieces_in(entry.block));
        }
        let mut given_bytes = 0;
        for piece in pieces {
            if given_bytes >= wanted_bytes {
                break;
            }
            let size_bytes = self.heap.pieces[piece as usize].size_bytes;
            given_bytes += if self.give_back(env, piece) { size_bytes } else { 0 };
        }
        given_bytes
    }

    /// Gives a free piece back, and the views that map it. Says whether the device took it; a piece
    /// whose handle it takes but does not unmap stays free memory at its home.
    fn give_back<E: Env>(&mut self, env: &mut E, id: u32) -> bool {
        for view in self.heap.pieces[id as usize].views.clone() {
            if self.heap.views[view as usize].is_live || !self.drop_view(env, view) {
                return false;
            }
        }
        let Piece { address, size_bytes, slab, handle, .. } = self.heap.pieces[id as usize];
        if let Some(handle) = handle {
            if env.device().release(handle).is_err() {
                return false;
            }
            self.heap.pieces[id as usize].handle = None;
        }
        if env.device().unmap(address, size_bytes).is_err() {
            return false;
        }
        let block = self.heap.drop_piece(id);
        let arena = self.heap.slabs[slab as usize].arena;
        self.heap.arenas[arena as usize].mapped_bytes -= size_bytes;
        self.levels.reserved_bytes -= size_bytes;
        self.counts.segment_frees += 1;
        if E::LOG {
            env.log(self.memory_action(ActionKind::SegmentUnmap, slab, address, size_bytes));
        }
        self.give_slab_back(env, block);
        true
    }

    /// Gives the addresses of a slab back if a block without memory is all of it.
    fn give_slab_back<E: Env>(&mut self, env: &mut E, block: u32) {
        let Block { address, size_bytes, slab, .. } = self.heap.blocks[block as usize];
        let is_whole = self.heap.slabs[slab as usize].size_bytes == size_bytes;
        if is_whole && env.device().address_free(address, size_bytes).is_ok() {
            self.heap.drop_slab(block);
        }
    }

    fn memory_action(&self, kind: ActionKind, slab: u32, address: u64, size_bytes: u64) -> Action {
        let Slab { base, arena, ordinal, .. } = self.heap.slabs[slab as usize];
        Action {
            kind,
            block: BlockId::NONE,
            segment: ordinal,
            stream: StreamId(arena / 2),
            offset_bytes: address - base,
            size_bytes,
            address,
        }
    }

    fn view_action(&self, kind: ActionKind, id: u32) -> Action {
        let view = &self.heap.views[id as usize];
        Action {
            kind,
            block: BlockId::NONE,
            segment: view.ordinal,
            stream: StreamId(view.arena / 2),
            offset_bytes: 0,
            size_bytes: view.size_bytes,
            address: view.address,
        }
    }
}
