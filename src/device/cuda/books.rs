//! What a real device holds, by our own count.
//!
//! The driver does not say what a range is made of nor how large an address's malloc was, and it
//! must not be asked for what makes no sense: so everything it gave out is entered here, and calls
//! are judged here before it sees them. Handles are slots with a generation, as those of the
//! simulated device.
//!
//! ```text
//!   reservations   [base ........................................)
//!   mappings            [slot 3 )[slot 7      )      [slot 3 )
//!   pieces         slot 3: 2 MiB, held, mapped twice    slot 7: 4 MiB, released, mapped once
//! ```

use std::collections::BTreeMap;

use crate::device::{DeviceCall, DeviceError, Extent, GRANULARITY_BYTES, PhysicalHandle};

/// A piece of physical memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The driver's handle.
    pub(super) raw: u64,
    /// Its size in bytes.
    pub(super) size_bytes: u64,
    mappings: u32,
    generation: u32,
    held: bool,
}

impl Piece {
    fn handle(&self, slot: u32) -> PhysicalHandle {
        PhysicalHandle(u64::from(self.generation) << 32 | u64::from(slot))
    }
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    slot: u32,
    size_bytes: u64,
}

/// Everything that is held.
#[derive(Debug, Default)]
pub(super) struct Books {
    /// Sizes of mallocs by address.
    mallocs: BTreeMap<u64, u64>,
    /// Sizes of reservations by base.
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    pieces: Vec<Piece>,
    /// Slots of `pieces` that stand for nothing.
    spare: Vec<u32>,
}

/// What is left, in the order in which it has to go.
pub(super) struct Remains {
    /// Address and size of every mapping.
    pub(super) mappings: Vec<(u64, u64)>,
    /// The driver's handles that were not released.
    pub(super) handles: Vec<u64>,
    /// Address and size of every reservation.
    pub(super) reservations: Vec<(u64, u64)>,
    /// Address of every malloc.
    pub(super) mallocs: Vec<u64>,
}

impl Books {
    pub(super) fn enter_malloc(&mut self, address: u64, size_bytes: u64) {
        self.mallocs.insert(address, size_bytes);
    }

    /// The size of a malloc.
    pub(super) fn malloc_bytes(&self, address: u64) -> Result<u64, DeviceError> {
        let invalid = DeviceError::Invalid { call: DeviceCall::Free, address, size_bytes: 0 };
        self.mallocs.get(&address).copied().ok_or(invalid)
    }

    pub(super) fn strike_malloc(&mut self, address: u64) {
        self.mallocs.remove(&address);
    }

    pub(super) fn enter_reservation(&mut self, address: u64, size_bytes: u64) {
        self.reservations.insert(address, size_bytes);
    }

    /// Says whether the range is one whole reservation with nothing mapped in it.
    pub(super) fn check_address_free(
        &self,
        address: u64,
        size_bytes: u64,
    ) -> Result<(), DeviceError> {
        let whole = self.reservations.get(&address) == Some(&size_bytes);
        if whole && self.is_unmapped(address, size_bytes) {
            return Ok(());
        }
        Err(DeviceError::Invalid { call: DeviceCall::AddressFree, address, size_bytes })
    }

    pub(super) fn strike_reservation(&mut self, address: u64) {
        self.reservations.remove(&address);
    }

    /// Enters a piece that is held.
    pub(super) fn enter_piece(&mut self, raw: u64, size_bytes: u64) -> PhysicalHandle {
        let piece = Piece { raw, size_bytes, mappings: 0, generation: 0, held: true };
        let slot = match self.spare.pop() {
            Some(slot) => {
                let gone = &mut self.pieces[slot as usize];
                *gone = Piece { generation: gone.generation.wrapping_add(1), ..piece };
                slot
            }
            None => {
                self.pieces.push(piece);
                (self.pieces.len() - 1) as u32
            }
        };
        self.pieces[slot as usize].handle(slot)
    }

    /// The piece of a handle that is held.
    pub(super) fn held(
        &self,
        call: DeviceCall,
        address: u64,
        handle: PhysicalHandle,
    ) -> Result<Piece, DeviceError> {
        let slot = handle.0 as u32;
        let piece = self.pieces.get(slot as usize).copied();
        piece
            .filter(|piece| piece.held && piece.handle(slot) == handle)
            .ok_or(DeviceError::Invalid { call, address, size_bytes: 0 })
    }

    /// The handle is gone; the piece stays as long as it is mapped.
    pub(super) fn strike_handle(&mut self, handle: PhysicalHandle) {
        let slot = handle.0 as u32;
        self.pieces[slot as usize].held = false;
        self.drop_if_unused(slot);
    }

    /// Says whether so many bytes may be mapped at an address.
    pub(super) fn check_map(&self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let inside = self
            .reservation_of(address, size_bytes)
            .is_some_and(|base| (address - base).is_multiple_of(GRANULARITY_BYTES));
        if inside && self.is_unmapped(address, size_bytes) {
            return Ok(());
        }
        Err(DeviceError::Invalid { call: DeviceCall::Map, address, size_bytes })
    }

    pub(super) fn enter_mapping(&mut self, address: u64, handle: PhysicalHandle) {
        let slot = handle.0 as u32;
        let piece = &mut self.pieces[slot as usize];
        piece.mappings += 1;
        self.mappings.insert(address, Mapping { slot, size_bytes: piece.size_bytes });
    }

    /// How many mappings make up the range, if they do so exactly.
    pub(super) fn tiles(
        &self,
        call: DeviceCall,
        address: u64,
        size_bytes: u64,
    ) -> Result<u64, DeviceError> {
        let invalid = DeviceError::Invalid { call, address, size_bytes };
        let end = address.checked_add(size_bytes).ok_or(invalid)?;
        let (mut at, mut count) = (address, 0);
        if self.reservation_of(address, size_bytes).is_some() {
            for (&begin, mapping) in self.mappings.range(address..end) {
                if begin != at {
                    break;
                }
                at += mapping.size_bytes;
                count += 1;
            }
        }
        if count > 0 && at == end { Ok(count) } else { Err(invalid) }
    }

    /// Removes the mappings that make up the range.
    pub(super) fn strike_mappings(&mut self, address: u64, size_bytes: u64) {
        let range = address..address + size_bytes;
        let gone: Vec<u64> = self.mappings.range(range).map(|(&begin, _)| begin).collect();
        for begin in gone {
            if let Some(mapping) = self.mappings.remove(&begin) {
                self.pieces[mapping.slot as usize].mappings -= 1;
                self.drop_if_unused(mapping.slot);
            }
        }
    }

    /// See [`crate::device::Device::backing`].
    pub(super) fn backing(
        &self,
        address: u64,
        size_bytes: u64,
        visit: &mut dyn FnMut(Extent),
    ) -> bool {
        if self.reservation_of(address, 0).is_none() {
            visit(Extent { piece: None, offset_bytes: address, size_bytes });
            return true;
        }
        if self.reservation_of(address, size_bytes).is_none() {
            return false;
        }
        let end = address.saturating_add(size_bytes);
        let mut at = address;
        while at < end {
            let below = self.mappings.range(..=at).next_back();
            let Some((&begin, mapping)) =
                below.filter(|(begin, mapping)| at - *begin < mapping.size_bytes)
            else {
                return false;
            };
            let upto = end.min(begin + mapping.size_bytes);
            visit(Extent {
                piece: Some(self.pieces[mapping.slot as usize].handle(mapping.slot)),
                offset_bytes: at - begin,
                size_bytes: upto - at,
            });
            at = upto;
        }
        true
    }

    /// Empties the books.
    pub(super) fn close(&mut self) -> Remains {
        let books = std::mem::take(self);
        let held = books.pieces.iter().filter(|piece| piece.held);
        Remains {
            handles: held.map(|piece| piece.raw).collect(),
            mappings: books.mappings.iter().map(|(&at, found)| (at, found.size_bytes)).collect(),
            reservations: books.reservations.into_iter().collect(),
            mallocs: books.mallocs.into_keys().collect(),
        }
    }

    /// The base of the reservation that holds all of the range.
    fn reservation_of(&self, address: u64, size_bytes: u64) -> Option<u64> {
        let end = address.checked_add(size_bytes)?;
        let (&base, &reserved_bytes) = self.reservations.range(..=address).next_back()?;
        let last = base + reserved_bytes;
        (address < last && end <= last).then_some(base)
    }

    /// Whether no mapping touches the range. No mapping reaches out of its reservation.
    fn is_unmapped(&self, address: u64, size_bytes: u64) -> bool {
        let below = self.mappings.range(..address.saturating_add(size_bytes)).next_back();
        below.is_none_or(|(begin, mapping)| begin + mapping.size_bytes <= address)
    }

    /// Frees the slot of a piece of which neither a handle nor a mapping is left.
    fn drop_if_unused(&mut self, slot: u32) {
        let piece = self.pieces[slot as usize];
        if !piece.held && piece.mappings == 0 {
            self.spare.push(slot);
        }
    }
}
