//! The pool of small requests: slots of 512 bytes, the one that came back last first.
//!
//! ```text
//!   chunk 0: 2 x the peak of the plan     chunk 1: as large as all before
//!   │ slot │ slot │ slot │ slot │          │ slot │ slot │ fresh ...      │
//!                                                         ^ slots that were never used
//! ```
//!
//! The slots that were never used are not listed: they would come after all others anyway, and how
//! many there are is a number from a file.

use crate::alloc::ALIGNMENT_BYTES;
use crate::device::Device;

/// Size of every slot, and the largest request that gets one.
pub(super) const SLOT_BYTES: u64 = ALIGNMENT_BYTES;

/// One device malloc.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Number of its segment.
    pub(super) segment: u32,
    /// First address.
    pub(super) address: u64,
    /// Size in bytes, a multiple of a slot.
    pub(super) size_bytes: u64,
    /// Where the slots that were never used begin.
    fresh_bytes: u64,
}

/// A slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    /// Number of its chunk's segment.
    pub(super) segment: u32,
    /// First address of the chunk.
    pub(super) chunk_address: u64,
    /// Where it begins in the chunk.
    pub(super) offset_bytes: u64,
}

impl Slot {
    /// Its first address.
    pub(super) fn address(self) -> u64 {
        self.chunk_address + self.offset_bytes
    }
}

/// The pool.
#[derive(Clone, Debug)]
pub(super) struct VarPool {
    /// Size of the first chunk in bytes.
    first_bytes: u64,
    /// Number of the first segment that it may use.
    first_segment: u32,
    chunks: Vec<Chunk>,
    /// Slots that came back, the last on top.
    returned: Vec<Slot>,
    live: u64,
}

impl VarPool {
    /// A pool for requests that have `peak_bytes` at once; twice as much is obtained.
    pub(super) fn new(peak_bytes: u64, first_segment: u32) -> VarPool {
        let first_bytes = peak_bytes.saturating_mul(2).next_multiple_of(SLOT_BYTES);
        VarPool { first_bytes, first_segment, chunks: Vec::new(), returned: Vec::new(), live: 0 }
    }

    /// Memory held, in bytes.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.size_bytes).sum()
    }

    /// Number of slots in use.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// The chunks, in the order of their segments.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Whether the first chunk is there, or none is wanted before a request comes.
    pub(super) fn is_begun(&self) -> bool {
        !self.chunks.is_empty() || self.first_bytes == 0
    }

    /// Size of the next chunk in bytes: at first what the plan says, then as much as there is. A
    /// plan without small requests begins with one slot, since nothing does not double.
    pub(super) fn next_chunk_bytes(&self) -> u64 {
        match self.reserved_bytes() {
            0 => self.first_bytes.max(SLOT_BYTES),
            held_bytes => held_bytes,
        }
    }

    /// Obtains the next chunk, if the device has it.
    pub(super) fn grow<D: Device>(&mut self, device: &mut D) -> Option<Chunk> {
        let size_bytes = self.next_chunk_bytes();
        let address = device.malloc(size_bytes).ok()?;
        let mut at = 0;
        while self.chunks.get(at).is_some_and(|chunk| chunk.segment == self.segment(at)) {
            at += 1;
        }
        let chunk = Chunk { segment: self.segment(at), address, size_bytes, fresh_bytes: 0 };
        self.chunks.insert(at, chunk);
        Some(chunk)
    }

    fn segment(&self, at: usize) -> u32 {
        self.first_segment + at as u32
    }

    /// Hands out a slot, if there is one.
    pub(super) fn take(&mut self) -> Option<Slot> {
        let slot = self.returned.pop().or_else(|| self.take_fresh())?;
        self.live += 1;
        Some(slot)
    }

    fn take_fresh(&mut self) -> Option<Slot> {
        let chunk = self.chunks.iter_mut().find(|chunk| chunk.fresh_bytes < chunk.size_bytes)?;
        let offset_bytes = chunk.fresh_bytes;
        chunk.fresh_bytes += SLOT_BYTES;
        Some(Slot { segment: chunk.segment, chunk_address: chunk.address, offset_bytes })
    }

    /// Takes a slot back.
    pub(super) fn give(&mut self, slot: Slot) {
        self.live -= 1;
        self.returned.push(slot);
    }

    /// Gives chunks back to the device if nothing is in use. Those that it does not take stay.
    /// Gives the others.
    pub(super) fn shrink<D: Device>(&mut self, device: &mut D) -> Vec<Chunk> {
        if self.live > 0 {
            return Vec::new();
        }
        self.returned.clear();
        let (gone, kept) = std::mem::take(&mut self.chunks)
            .into_iter()
            .map(|chunk| Chunk { fresh_bytes: 0, ..chunk })
            .partition(|chunk| device.free(chunk.address).is_ok());
        self.chunks = kept;
        gone
    }

    /// Parts of a chunk that hold nothing: slots that came back, and the fresh end; start and size.
    pub(super) fn free_parts(&self, chunk: &Chunk) -> Vec<(u64, u64)> {
        let of_chunk = |slot: &&Slot| slot.segment == chunk.segment;
        let returned = self.returned.iter().filter(of_chunk);
        let mut parts: Vec<(u64, u64)> =
            returned.map(|slot| (slot.offset_bytes, SLOT_BYTES)).collect();
        let fresh_bytes = chunk.size_bytes - chunk.fresh_bytes;
        parts.extend((fresh_bytes > 0).then_some((chunk.fresh_bytes, fresh_bytes)));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Sim;
    use crate::device::sim::addresses::Addresses;

    #[test]
    fn the_slot_that_came_back_last_goes_first_and_the_pool_doubles() {
        let mut sim = Sim::new(None, None, Addresses::ascending());
        let mut pool = VarPool::new(512, 1);
        assert!(!pool.is_begun() && pool.take().is_none());
        assert_eq!(
            pool.grow(&mut sim).map(|chunk| (chunk.segment, chunk.size_bytes)),
            Some((1, 1024))
        );
        let slots: Vec<Slot> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(slots.iter().map(|slot| slot.offset_bytes).collect::<Vec<_>>(), [0, 512]);
        pool.give(slots[1]);
        pool.give(slots[0]);
        assert_eq!([pool.take(), pool.take(), pool.take()], [Some(slots[0]), Some(slots[1]), None]);
        for (segment, size_bytes) in [(2, 1024), (3, 2048)] {
            let chunk = pool.grow(&mut sim).expect("there is room");
            assert_eq!((chunk.segment, chunk.size_bytes), (segment, size_bytes));
        }
        assert_eq!(pool.reserved_bytes(), 4096);
        assert!(pool.shrink(&mut sim).is_empty(), "two slots are in use");
        slots.into_iter().for_each(|slot| pool.give(slot));
        assert_eq!(pool.shrink(&mut sim).len(), 3);
        assert_eq!((pool.reserved_bytes(), pool.next_chunk_bytes()), (0, 1024));
    }

    #[test]
    fn a_plan_without_small_requests_begins_with_one_slot() {
        let mut sim = Sim::new(None, None, Addresses::ascending());
        let mut pool = VarPool::new(0, 1);
        assert!(pool.is_begun());
        let sizes: Vec<u64> =
            (0..3).filter_map(|_| pool.grow(&mut sim)).map(|chunk| chunk.size_bytes).collect();
        assert_eq!(sizes, [512, 512, 1024]);
    }
}
