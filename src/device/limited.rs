//! A device around a device that has less memory than the one inside.
//!
//! So that a GPU of 141 GB stands for one of 80 GB. Memory is charged as the simulated device charges
//! it ([`super::sim`]): in units of 2 MiB, which small mallocs share, and for as long as a handle or
//! a mapping of it is left. What exceeds the capacity is refused before the device inside is asked.

use std::collections::BTreeMap;

use super::charge::Charge;
use super::{
    Device, DeviceCall, DeviceError, Extent, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle,
};

/// A piece of physical memory of the device inside.
#[derive(Clone, Copy, Debug)]
struct Piece {
    size_bytes: u64,
    mappings: u64,
    held: bool,
}

/// Refuses what exceeds a capacity.
#[derive(Clone, Debug)]
pub struct Limited<D> {
    inner: D,
    capacity_bytes: u64,
    charge: Charge,
    pieces: BTreeMap<PhysicalHandle, Piece>,
    /// What is mapped at an address.
    mappings: BTreeMap<u64, PhysicalHandle>,
}

impl<D: Device> Limited<D> {
    /// Leaves `capacity_bytes` of the device inside, in whole units of 2 MiB.
    pub fn new(inner: D, capacity_bytes: u64) -> Self {
        let charge = Charge::new(Some(capacity_bytes));
        Limited {
            inner,
            capacity_bytes,
            charge,
            pieces: BTreeMap::new(),
            mappings: BTreeMap::new(),
        }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The device inside. Memory obtained from it directly is not charged.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Refuses so many units more than there are.
    fn check(&self, call: DeviceCall, requested_bytes: u64, units: u64) -> Result<(), DeviceError> {
        if self.charge.holds(units) {
            return Ok(());
        }
        let free_bytes = self.memory_info().free_bytes;
        Err(DeviceError::OutOfMemory { call, requested_bytes, free_bytes })
    }

    /// Gives back the units of a piece of which neither a handle nor a mapping is left.
    fn drop_if_unused(&mut self, handle: PhysicalHandle) {
        let unused = |piece: &&Piece| !piece.held && piece.mappings == 0;
        if let Some(piece) = self.pieces.get(&handle).filter(unused) {
            self.charge.drop_piece(piece.size_bytes);
            self.pieces.remove(&handle);
        }
    }
}

impl<D: Device> Device for Limited<D> {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Malloc, size_bytes, self.charge.malloc_units(size_bytes))?;
        let address = self.inner.malloc(size_bytes)?;
        self.charge.malloc(size_bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.free(address)?;
        self.charge.free(size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.inner.address_reserve(size_bytes)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.inner.address_free(address, size_bytes)
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        // A size that makes no sense is for the device inside to refuse.
        if size_bytes.is_multiple_of(GRANULARITY_BYTES) {
            self.check(DeviceCall::Create, size_bytes, Charge::piece_units(size_bytes))?;
        }
        let handle = self.inner.create(size_bytes)?;
        self.charge.create(size_bytes);
        self.pieces.insert(handle, Piece { size_bytes, mappings: 0, held: true });
        Ok(handle)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.release(handle)?;
        if let Some(piece) = self.pieces.get_mut(&handle) {
            piece.held = false;
        }
        self.drop_if_unused(handle);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.map(address, handle)?;
        if let Some(piece) = self.pieces.get_mut(&handle) {
            piece.mappings += 1;
            self.mappings.insert(address, handle);
        }
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let count = self.inner.unmap(address, size_bytes)?;
        let range = address..address.saturating_add(size_bytes);
        let gone: Vec<u64> = self.mappings.range(range).map(|(&begin, _)| begin).collect();
        for begin in gone {
            if let Some(handle) = self.mappings.remove(&begin) {
                if let Some(piece) = self.pieces.get_mut(&handle) {
                    piece.mappings -= 1;
                }
                self.drop_if_unused(handle);
            }
        }
        Ok(count)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.inner.set_access(address, size_bytes)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.inner.backing(address, size_bytes, visit)
    }

    /// Never more than the capacity leaves, nor than the device inside has.
    fn memory_info(&self) -> MemoryInfo {
        let inner = self.inner.memory_info();
        MemoryInfo {
            free_bytes: inner.free_bytes.min(self.charge.free_bytes()),
            total_bytes: inner.total_bytes.min(self.capacity_bytes),
        }
    }
}
