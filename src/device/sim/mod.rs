//! A simulated device: capacity, addresses, and the books of a driver.
//!
//! Physical memory is charged in units of 2 MiB ([`GRANULARITY_BYTES`]). Mallocs under 1 MiB share
//! units: together they are charged their sum rounded up, as a driver packs small ranges into
//! pages.
//!
//! ```text
//!   charged = ⌈Σ small mallocs / 2 MiB⌉ + Σ ⌈large malloc / 2 MiB⌉ + Σ created physical pieces
//! ```
//!
//! Which address a range gets is the business of the [address policy](addresses).

pub mod addresses;

use std::collections::{BTreeMap, HashMap};

use super::{Device, DeviceCall, DeviceError, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle};
use addresses::{Addresses, HostCopy};

/// Mallocs below this many bytes share 2 MiB units.
const SHARED_UNIT_LIMIT_BYTES: u64 = 1 << 20;

/// What an unlimited device reports as its size, and what reservations are made for: 1 TiB.
pub const UNLIMITED_TOTAL_BYTES: u64 = 1 << 40;

type FastMap<V> = HashMap<u64, V, foldhash::fast::FixedState>;

/// A simulated device.
#[derive(Clone, Debug)]
pub struct Sim {
    /// Physical units that may be in use.
    capacity_units: u64,
    /// What [`Device::memory_info`] reports as total.
    total_bytes: u64,
    units_in_use: u64,
    small_bytes: u64,
    addresses: Addresses,
    mallocs: FastMap<u64>,
    pieces: FastMap<Piece>,
    next_piece: u64,
    /// Reserved ranges: base → size.
    reservations: BTreeMap<u64, u64>,
    /// Mapped ranges: base → (size, piece).
    mappings: BTreeMap<u64, Mapping>,
}

/// A piece of physical memory.
#[derive(Clone, Copy, Debug)]
struct Piece {
    size_bytes: u64,
    mappings: u32,
    /// The handle has not been released.
    held: bool,
}

/// A mapped range.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    size_bytes: u64,
    piece: u64,
}

impl Sim {
    /// A device with `capacity_bytes` of physical memory (unlimited if absent), that reports
    /// `total_bytes` (the capacity if absent) and gives out `addresses`.
    pub fn new(capacity_bytes: Option<u64>, total_bytes: Option<u64>, addresses: Addresses) -> Sim {
        Sim {
            capacity_units: capacity_bytes.map_or(u64::MAX, |bytes| bytes / GRANULARITY_BYTES),
            total_bytes: total_bytes.or(capacity_bytes).unwrap_or(UNLIMITED_TOTAL_BYTES),
            units_in_use: 0,
            small_bytes: 0,
            addresses,
            mallocs: FastMap::default(),
            pieces: FastMap::default(),
            next_piece: 0,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
        }
    }

    /// The program begins to compute; see [`Addresses::load_kernels`].
    pub fn load_kernels(&mut self, last_copy: HostCopy) {
        self.addresses.load_kernels(last_copy);
    }

    /// Takes over a malloc that was there before, beyond any capacity. For the start of a replay.
    pub fn hold(&mut self, address: u64, size_bytes: u64) {
        self.units_in_use = self.units_in_use.saturating_add(self.malloc_units(size_bytes));
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            self.small_bytes += size_bytes;
        }
        self.mallocs.insert(address, size_bytes);
        self.addresses.hold(address, size_bytes);
    }

    /// Takes over a reservation that was there before.
    pub fn hold_reservation(&mut self, address: u64, size_bytes: u64) {
        self.reservations.insert(address, size_bytes);
        self.addresses.hold_reservation(address, size_bytes);
    }

    /// Takes over a page that was mapped before, in a reservation that is held; the handle of its
    /// memory is gone.
    pub fn hold_page(&mut self, address: u64, size_bytes: u64) {
        let units = size_bytes.div_ceil(GRANULARITY_BYTES);
        self.units_in_use = self.units_in_use.saturating_add(units);
        let piece = self.next_piece;
        self.next_piece += 1;
        self.pieces.insert(piece, Piece { size_bytes, mappings: 1, held: false });
        self.mappings.insert(address, Mapping { size_bytes, piece });
    }

    /// Physical units that `size_bytes` more would take from a malloc.
    #[inline]
    fn malloc_units(&self, size_bytes: u64) -> u64 {
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            let units = |bytes: u64| bytes.div_ceil(GRANULARITY_BYTES);
            units(self.small_bytes + size_bytes) - units(self.small_bytes)
        } else {
            size_bytes.div_ceil(GRANULARITY_BYTES)
        }
    }

    #[inline]
    fn check_units(
        &self,
        call: DeviceCall,
        requested_bytes: u64,
        units: u64,
    ) -> Result<(), DeviceError> {
        if units > self.capacity_units.saturating_sub(self.units_in_use) {
            let free_bytes = self.memory_info().free_bytes;
            return Err(DeviceError::OutOfMemory { call, requested_bytes, free_bytes });
        }
        Ok(())
    }

    /// Drops a piece of which neither a handle nor a mapping is left.
    fn drop_if_unused(&mut self, piece_id: u64) {
        let unused =
            self.pieces.get(&piece_id).filter(|piece| !piece.held && piece.mappings == 0).copied();
        if let Some(piece) = unused {
            self.pieces.remove(&piece_id);
            self.units_in_use -= piece.size_bytes.div_ceil(GRANULARITY_BYTES);
        }
    }

    /// Whether [base, base + size) lies in one reservation.
    fn is_reserved(&self, address: u64, size_bytes: u64) -> bool {
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(&base, &size)| {
            address.checked_add(size_bytes).is_some_and(|end| end <= base + size)
        })
    }

    /// Bases of the mappings that exactly tile the range; any other range makes the call invalid.
    fn mappings_in(
        &self,
        call: DeviceCall,
        address: u64,
        size_bytes: u64,
    ) -> Result<Vec<u64>, DeviceError> {
        let invalid = DeviceError::Invalid { call, address, size_bytes };
        let end = address.checked_add(size_bytes).ok_or(invalid)?;
        let mut at = address;
        let mut bases = Vec::new();
        for (&base, mapping) in self.mappings.range(address..end) {
            if base != at {
                return Err(invalid);
            }
            at = base + mapping.size_bytes;
            bases.push(base);
        }
        if at == end && !bases.is_empty() { Ok(bases) } else { Err(invalid) }
    }
}

fn is_whole_units(size_bytes: u64) -> bool {
    size_bytes != 0 && size_bytes.is_multiple_of(GRANULARITY_BYTES)
}

impl Device for Sim {
    #[inline]
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let units = self.malloc_units(size_bytes);
        self.check_units(DeviceCall::Malloc, size_bytes, units)?;
        let address = self.addresses.take(size_bytes)?;
        self.units_in_use += units;
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            self.small_bytes += size_bytes;
        }
        self.mallocs.insert(address, size_bytes);
        Ok(address)
    }

    #[inline]
    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let Some(size_bytes) = self.mallocs.remove(&address) else {
            return Err(DeviceError::Invalid { call: DeviceCall::Free, address, size_bytes: 0 });
        };
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            self.small_bytes -= size_bytes;
        }
        self.units_in_use -= self.malloc_units(size_bytes);
        self.addresses.give_back(address, size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self.addresses.reserve(size_bytes)?;
        self.reservations.insert(address, size_bytes);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let whole = self.reservations.get(&address) == Some(&size_bytes);
        let end = address.saturating_add(size_bytes);
        if !whole || self.mappings.range(address..end).next().is_some() {
            let call = DeviceCall::AddressFree;
            return Err(DeviceError::Invalid { call, address, size_bytes });
        }
        self.reservations.remove(&address);
        self.addresses.unreserve(size_bytes);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let call = DeviceCall::Create;
        if !is_whole_units(size_bytes) {
            return Err(DeviceError::Invalid { call, address: 0, size_bytes });
        }
        let units = size_bytes / GRANULARITY_BYTES;
        self.check_units(call, size_bytes, units)?;
        self.units_in_use += units;
        let handle = self.next_piece;
        self.next_piece += 1;
        self.pieces.insert(handle, Piece { size_bytes, mappings: 0, held: true });
        Ok(PhysicalHandle(handle))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let Some(piece) = self.pieces.get_mut(&handle.0).filter(|piece| piece.held) else {
            let call = DeviceCall::Release;
            return Err(DeviceError::Invalid { call, address: 0, size_bytes: 0 });
        };
        piece.held = false;
        let size_bytes = piece.size_bytes;
        self.drop_if_unused(handle.0);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = match self.pieces.get(&handle.0) {
            Some(piece) if piece.held => piece.size_bytes,
            _ => 0,
        };
        let end = address.saturating_add(size_bytes);
        let overlaps_before = self
            .mappings
            .range(..address)
            .next_back()
            .is_some_and(|(&base, mapping)| base + mapping.size_bytes > address);
        let free = !overlaps_before && self.mappings.range(address..end).next().is_none();
        if size_bytes == 0 || !free || !self.is_reserved(address, size_bytes) {
            return Err(DeviceError::Invalid { call: DeviceCall::Map, address, size_bytes });
        }
        let mapping = Mapping { size_bytes, piece: handle.0 };
        self.mappings.insert(address, mapping);
        if let Some(piece) = self.pieces.get_mut(&handle.0) {
            piece.mappings += 1;
        }
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        for base in self.mappings_in(DeviceCall::Unmap, address, size_bytes)? {
            let Some(mapping) = self.mappings.remove(&base) else { continue };
            if let Some(piece) = self.pieces.get_mut(&mapping.piece) {
                piece.mappings -= 1;
            }
            self.drop_if_unused(mapping.piece);
        }
        Ok(())
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.mappings_in(DeviceCall::SetAccess, address, size_bytes).map(drop)
    }

    fn memory_info(&self) -> MemoryInfo {
        // An unlimited device reports its total less what is in use, and never less than nothing.
        let in_use_bytes = self.units_in_use.saturating_mul(GRANULARITY_BYTES);
        let limit_bytes = self.capacity_units.saturating_mul(GRANULARITY_BYTES);
        let free_bytes = limit_bytes.min(self.total_bytes).saturating_sub(in_use_bytes);
        MemoryInfo { free_bytes, total_bytes: self.total_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    fn sim(capacity_bytes: u64) -> Sim {
        Sim::new(Some(capacity_bytes), None, Addresses::ascending())
    }

    #[test]
    fn capacity_is_charged_in_units_and_small_mallocs_share_them() {
        let mut device = sim(4 * MIB);
        // Four times 512 KiB share one unit, the fifth needs the second.
        let small: Vec<u64> = (0..5).map(|_| device.malloc(MIB / 2).expect("fits")).collect();
        assert_eq!(device.memory_info().free_bytes, 0);
        assert!(matches!(device.malloc(MIB), Err(DeviceError::OutOfMemory { .. })));
        device.free(small[0]).expect("known");
        assert_eq!(device.memory_info().free_bytes, 2 * MIB);
        device.malloc(MIB + 1).expect("one unit is free");
        assert_eq!(device.memory_info().free_bytes, 0);
    }

    #[test]
    fn unknown_and_double_frees_are_refused() {
        let mut device = sim(8 * MIB);
        let address = device.malloc(100).expect("fits");
        assert!(device.free(address + 1).is_err());
        assert_eq!(device.free(address), Ok(100));
        assert!(device.free(address).is_err());
    }

    #[test]
    fn physical_memory_returns_with_its_last_mapping() {
        let mut device = sim(4 * MIB);
        let range = device.address_reserve(8 * MIB).expect("addresses");
        let piece = device.create(4 * MIB).expect("fits");
        device.map(range, piece).expect("mapped");
        device.map(range + 4 * MIB, piece).expect("mapped twice");
        assert!(device.map(range + 2 * MIB, piece).is_err(), "overlaps");
        device.set_access(range, 8 * MIB).expect("all mapped");
        device.release(piece).expect("held");
        assert!(device.create(2 * MIB).is_err(), "still mapped");
        device.unmap(range, 4 * MIB).expect("exact");
        assert!(device.unmap(range + 4 * MIB, 2 * MIB).is_err(), "not at a border");
        assert!(device.address_free(range, 8 * MIB).is_err(), "still mapped");
        device.unmap(range + 4 * MIB, 4 * MIB).expect("exact");
        device.create(4 * MIB).expect("all back");
        device.address_free(range, 8 * MIB).expect("nothing mapped");
    }
}
