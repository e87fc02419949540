//! A device around a device that refuses the calls a trace names.

use super::{
    Device, DeviceCall, DeviceError, Extent, MemoryInfo, PhysicalHandle, create_one_by_one,
    map_one_by_one,
};
use crate::trace::{Fault, FaultWhen};

/// Refuses chosen calls as out of memory, before they reach the device inside.
///
/// Calls are counted from 1 for each kind, refused ones included.
#[derive(Clone, Debug)]
pub struct Faulty<D> {
    inner: D,
    faults: Vec<Fault>,
    seen: [u64; DeviceCall::ALL.len()],
}

impl<D: Device> Faulty<D> {
    /// Refuses the calls that `faults` names.
    pub fn new(inner: D, faults: Vec<Fault>) -> Self {
        Faulty { inner, faults, seen: [0; DeviceCall::ALL.len()] }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The device inside.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    #[inline]
    fn check(&mut self, call: DeviceCall, requested_bytes: u64) -> Result<(), DeviceError> {
        if self.faults.is_empty() {
            return Ok(());
        }
        let seen = &mut self.seen[call as usize];
        *seen += 1;
        let nth = *seen;
        let hit = self.faults.iter().any(|fault| {
            fault.call == call
                && match fault.when {
                    FaultWhen::All => true,
                    FaultWhen::Nth(n) => n == nth,
                }
        });
        if !hit {
            return Ok(());
        }
        let free_bytes = self.inner.memory_info().free_bytes;
        Err(match call {
            DeviceCall::AddressReserve => DeviceError::OutOfAddresses { requested_bytes },
            _ => DeviceError::OutOfMemory { call, requested_bytes, free_bytes },
        })
    }
}

impl<D: Device> Device for Faulty<D> {
    #[inline]
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Malloc, size_bytes)?;
        self.inner.malloc(size_bytes)
    }

    #[inline]
    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Free, 0)?;
        self.inner.free(address)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::AddressReserve, size_bytes)?;
        self.inner.address_reserve(size_bytes)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.check(DeviceCall::AddressFree, size_bytes)?;
        self.inner.address_free(address, size_bytes)
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        self.check(DeviceCall::Create, size_bytes)?;
        self.inner.create(size_bytes)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Release, 0)?;
        self.inner.release(handle)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Map, 0)?;
        self.inner.map(address, handle)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Unmap, size_bytes)?;
        self.inner.unmap(address, size_bytes)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::SetAccess, size_bytes)?;
        self.inner.set_access(address, size_bytes)
    }

    fn create_each(
        &mut self,
        piece_bytes: u64,
        count: u64,
        handles: &mut Vec<PhysicalHandle>,
    ) -> Result<(), DeviceError> {
        if self.faults.is_empty() {
            return self.inner.create_each(piece_bytes, count, handles);
        }
        create_one_by_one(self, piece_bytes, count, handles)
    }

    fn map_each(
        &mut self,
        address: u64,
        piece_bytes: u64,
        handles: &[PhysicalHandle],
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        if self.faults.is_empty() {
            return self.inner.map_each(address, piece_bytes, handles, mapped);
        }
        map_one_by_one(self, address, piece_bytes, handles, mapped)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.inner.backing(address, size_bytes, visit)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.inner.memory_info()
    }
}
