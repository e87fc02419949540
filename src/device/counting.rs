//! A device around a device that counts and costs every call.
//!
//! A call is one call however many pieces its range is made of, but it costs what the pieces cost.

use serde::Serialize;

use super::{CostProfile, Device, DeviceCall, DeviceError, Extent, MemoryInfo, PhysicalHandle};

/// Calls that succeeded, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CallCounts {
    /// `cudaMalloc`.
    pub malloc: u64,
    /// `cudaFree`.
    pub free: u64,
    /// `cuMemAddressReserve`.
    pub address_reserve: u64,
    /// `cuMemAddressFree`.
    pub address_free: u64,
    /// `cuMemCreate`.
    pub create: u64,
    /// `cuMemRelease`.
    pub release: u64,
    /// `cuMemMap`.
    pub map: u64,
    /// `cuMemUnmap`.
    pub unmap: u64,
    /// `cuMemSetAccess`.
    pub set_access: u64,
}

/// Counts the calls that succeed and adds up their cost.
///
/// Refused calls are neither counted nor costed: what a driver takes to refuse was not measured.
#[derive(Clone, Debug)]
pub struct Counting<D> {
    inner: D,
    profile: CostProfile,
    calls: CallCounts,
    cost_ns: f64,
}

impl<D: Device> Counting<D> {
    /// Counts the calls of `inner`, with costs from `profile`.
    pub fn new(inner: D, profile: CostProfile) -> Self {
        Counting { inner, profile, calls: CallCounts::default(), cost_ns: 0.0 }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The device inside.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Calls so far.
    pub fn calls(&self) -> CallCounts {
        self.calls
    }

    /// Cost of the calls so far in nanoseconds.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns.round() as u64
    }

    #[inline]
    fn charge(&mut self, call: DeviceCall, size_bytes: u64) {
        self.cost_ns += self.profile.cost_ns(call, size_bytes);
    }

    /// The cost of `count` calls of one size.
    fn charge_each(&mut self, call: DeviceCall, size_bytes: u64, count: usize) {
        self.cost_ns += self.profile.cost_ns(call, size_bytes) * count as f64;
    }

    /// The cost of one call for a range of several pieces: the driver takes as long as for a call
    /// each (measured, `reports/vmm_ranges.md`). Pieces of different sizes count at their mean.
    fn charge_range(&mut self, call: DeviceCall, size_bytes: u64, pieces: u64) {
        let pieces = pieces.max(1);
        self.charge_each(call, size_bytes / pieces, pieces as usize);
    }
}

impl<D: Device> Device for Counting<D> {
    #[inline]
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self.inner.malloc(size_bytes)?;
        self.calls.malloc += 1;
        self.charge(DeviceCall::Malloc, size_bytes);
        Ok(address)
    }

    #[inline]
    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.free(address)?;
        self.calls.free += 1;
        self.charge(DeviceCall::Free, size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self.inner.address_reserve(size_bytes)?;
        self.calls.address_reserve += 1;
        self.charge(DeviceCall::AddressReserve, size_bytes);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.inner.address_free(address, size_bytes)?;
        self.calls.address_free += 1;
        self.charge(DeviceCall::AddressFree, size_bytes);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let handle = self.inner.create(size_bytes)?;
        self.calls.create += 1;
        self.charge(DeviceCall::Create, size_bytes);
        Ok(handle)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.release(handle)?;
        self.calls.release += 1;
        self.charge(DeviceCall::Release, size_bytes);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.inner.map(address, handle)?;
        self.calls.map += 1;
        self.charge(DeviceCall::Map, size_bytes);
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let pieces = self.inner.unmap(address, size_bytes)?;
        self.calls.unmap += 1;
        self.charge_range(DeviceCall::Unmap, size_bytes, pieces);
        Ok(pieces)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let pieces = self.inner.set_access(address, size_bytes)?;
        self.calls.set_access += 1;
        self.charge_range(DeviceCall::SetAccess, size_bytes, pieces);
        Ok(pieces)
    }

    fn create_each(
        &mut self,
        piece_bytes: u64,
        count: u64,
        handles: &mut Vec<PhysicalHandle>,
    ) -> Result<(), DeviceError> {
        let before = handles.len();
        let end = self.inner.create_each(piece_bytes, count, handles);
        let created = handles.len() - before;
        self.calls.create += created as u64;
        self.charge_each(DeviceCall::Create, piece_bytes, created);
        end
    }

    fn map_each(
        &mut self,
        address: u64,
        piece_bytes: u64,
        handles: &[PhysicalHandle],
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        let before = *mapped;
        let end = self.inner.map_each(address, piece_bytes, handles, mapped);
        let maps = *mapped - before;
        // If it ended early, a refused map came before its set_access, or a set_access was refused.
        let accesses = match end {
            Err(DeviceError::Invalid { call: DeviceCall::SetAccess, .. })
            | Err(DeviceError::OutOfMemory { call: DeviceCall::SetAccess, .. }) => maps - 1,
            _ => maps,
        };
        self.calls.map += maps as u64;
        self.calls.set_access += accesses as u64;
        self.charge_each(DeviceCall::Map, piece_bytes, maps);
        self.charge_each(DeviceCall::SetAccess, piece_bytes, accesses);
        end
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.inner.backing(address, size_bytes, visit)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.inner.memory_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Sim;
    use crate::device::sim::addresses::Addresses;
    use crate::units::MIB;

    #[test]
    fn a_call_for_a_range_costs_what_its_pieces_cost() {
        let profile = CostProfile::shipped("h200").expect("ships");
        let one_ns = |call| profile.cost_ns(call, 2 * MIB);
        let sim = Sim::new(None, None, Addresses::ascending());
        let mut device = Counting::new(sim, profile.clone());
        let range = device.address_reserve(8 * MIB).expect("addresses");
        let mut pieces = Vec::new();
        device.create_each(2 * MIB, 4, &mut pieces).expect("fits");
        device.map_each(range, 2 * MIB, &pieces, &mut 0).expect("maps");
        let before_ns = device.cost_ns;
        device.set_access(range, 8 * MIB).expect("mapped");
        device.unmap(range, 8 * MIB).expect("mapped");
        let cost_ns = device.cost_ns - before_ns;
        let expected_ns = 4.0 * (one_ns(DeviceCall::SetAccess) + one_ns(DeviceCall::Unmap));
        assert!((cost_ns - expected_ns).abs() < 1e-6, "{cost_ns} {expected_ns}");
        let calls = device.calls();
        assert_eq!((calls.create, calls.map, calls.set_access, calls.unmap), (4, 4, 5, 1));
    }
}
