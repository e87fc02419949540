//! A device around a device that counts and costs every call.
//!
//! A call is one call however many pieces its range is made of, but it costs what the pieces cost.

use std::fmt;

use serde::Serialize;

use super::{
    CostMeter, CostProfile, Device, DeviceCall, DeviceError, Extent, MemoryInfo, PhysicalHandle,
};
use crate::units::Bytes;

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

impl CallCounts {
    /// All calls together.
    pub fn total(&self) -> u64 {
        let CallCounts {
            malloc,
            free,
            address_reserve,
            address_free,
            create,
            release,
            map,
            unmap,
            set_access,
        } = *self;
        [malloc, free, address_reserve, address_free, create, release, map, unmap, set_access]
            .into_iter()
            .sum()
    }
}

/// A call that the device refused, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedCall {
    /// The call.
    pub call: DeviceCall,
    /// What the device said.
    pub error: DeviceError,
}

impl fmt::Display for RefusedCall {
    /// A few words: `map (no mapping left)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.call.name())?;
        match self.error {
            DeviceError::OutOfMemory { requested_bytes, free_bytes, .. } => {
                write!(f, "{} of {} free", Bytes(free_bytes), Bytes(requested_bytes))?;
            }
            DeviceError::OutOfAddresses { requested_bytes } => {
                write!(f, "no addresses left for {}", Bytes(requested_bytes))?;
            }
            DeviceError::TooManyMappings { .. } => f.write_str("no mapping left")?,
            DeviceError::Driver { code, .. } => write!(f, "driver error {code}")?,
            DeviceError::Invalid { address, .. } => write!(f, "invalid address {address:#x}")?,
        }
        f.write_str(")")
    }
}

/// Counts the calls that succeed and adds up their cost.
///
/// Refused calls are neither counted nor costed: what a driver takes to refuse was not measured.
#[derive(Clone, Debug)]
pub struct Counting<D> {
    inner: D,
    meter: CostMeter,
    cost_ns: f64,
    /// The same by kind of call.
    cost_ns_of: [f64; DeviceCall::ALL.len()],
    calls: CallCounts,
    refusals: u64,
    refused: Option<RefusedCall>,
    driver_error: Option<RefusedCall>,
}

impl<D: Device> Counting<D> {
    /// Counts the calls of `inner`, with costs from `profile`.
    pub fn new(inner: D, profile: CostProfile) -> Self {
        let calls = CallCounts::default();
        let cost_ns_of = [0.0; DeviceCall::ALL.len()];
        let meter = CostMeter::new(profile);
        Counting {
            inner,
            meter,
            cost_ns: 0.0,
            cost_ns_of,
            calls,
            refusals: 0,
            refused: None,
            driver_error: None,
        }
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

    /// Cost of the calls of one kind so far in nanoseconds.
    pub fn cost_ns_of(&self, call: DeviceCall) -> u64 {
        self.cost_ns_of[call as usize].round() as u64
    }

    /// How many calls were refused so far.
    #[inline]
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// The last call that was refused.
    pub fn refused(&self) -> Option<RefusedCall> {
        self.refused
    }

    /// The first call to which a driver answered with an error that is no lack of anything
    /// ([`DeviceError::Driver`]). Others may have been refused since.
    pub fn driver_error(&self) -> Option<RefusedCall> {
        self.driver_error
    }

    /// Remembers the call if it was refused.
    #[inline(always)]
    fn told<T>(&mut self, call: DeviceCall, end: Result<T, DeviceError>) -> Result<T, DeviceError> {
        match end {
            Ok(done) => Ok(done),
            Err(error) => Err(self.note(call, error)),
        }
    }

    #[cold]
    fn note(&mut self, call: DeviceCall, error: DeviceError) -> DeviceError {
        self.refusals += 1;
        let refused = RefusedCall { call, error };
        self.refused = Some(refused);
        if matches!(error, DeviceError::Driver { .. }) {
            self.driver_error.get_or_insert(refused);
        }
        error
    }

    /// The cost of `count` calls of one size.
    #[inline]
    fn charge(&mut self, call: DeviceCall, size_bytes: u64, count: u64) {
        let cost_ns = self.meter.next_ns(call, size_bytes, count);
        self.cost_ns += cost_ns;
        self.cost_ns_of[call as usize] += cost_ns;
    }

    /// The cost of one call for a range of several pieces: the driver takes as long as for a call
    /// each (measured, `reports/vmm_ranges.md`). Pieces of different sizes count at their mean.
    fn charge_range(&mut self, call: DeviceCall, size_bytes: u64, pieces: u64) {
        let pieces = pieces.max(1);
        self.charge(call, size_bytes / pieces, pieces);
    }
}

impl<D: Device> Device for Counting<D> {
    #[inline]
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let end = self.inner.malloc(size_bytes);
        let address = self.told(DeviceCall::Malloc, end)?;
        self.calls.malloc += 1;
        self.charge(DeviceCall::Malloc, size_bytes, 1);
        Ok(address)
    }

    #[inline]
    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let end = self.inner.free(address);
        let size_bytes = self.told(DeviceCall::Free, end)?;
        self.calls.free += 1;
        self.charge(DeviceCall::Free, size_bytes, 1);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let end = self.inner.address_reserve(size_bytes);
        let address = self.told(DeviceCall::AddressReserve, end)?;
        self.calls.address_reserve += 1;
        self.charge(DeviceCall::AddressReserve, size_bytes, 1);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let end = self.inner.address_free(address, size_bytes);
        self.told(DeviceCall::AddressFree, end)?;
        self.calls.address_free += 1;
        self.charge(DeviceCall::AddressFree, size_bytes, 1);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let end = self.inner.create(size_bytes);
        let handle = self.told(DeviceCall::Create, end)?;
        self.calls.create += 1;
        self.charge(DeviceCall::Create, size_bytes, 1);
        Ok(handle)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let end = self.inner.release(handle);
        let size_bytes = self.told(DeviceCall::Release, end)?;
        self.calls.release += 1;
        self.charge(DeviceCall::Release, size_bytes, 1);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let end = self.inner.map(address, handle);
        let size_bytes = self.told(DeviceCall::Map, end)?;
        self.calls.map += 1;
        self.charge(DeviceCall::Map, size_bytes, 1);
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let end = self.inner.unmap(address, size_bytes);
        let pieces = self.told(DeviceCall::Unmap, end)?;
        self.calls.unmap += 1;
        self.charge_range(DeviceCall::Unmap, size_bytes, pieces);
        Ok(pieces)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let end = self.inner.set_access(address, size_bytes);
        let pieces = self.told(DeviceCall::SetAccess, end)?;
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
        let created = (handles.len() - before) as u64;
        self.calls.create += created;
        self.charge(DeviceCall::Create, piece_bytes, created);
        self.told(DeviceCall::Create, end)
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
        let (accesses, last) = match end {
            Err(DeviceError::Invalid { call: DeviceCall::SetAccess, .. })
            | Err(DeviceError::OutOfMemory { call: DeviceCall::SetAccess, .. })
            | Err(DeviceError::Driver { call: DeviceCall::SetAccess, .. }) => {
                (maps - 1, DeviceCall::SetAccess)
            }
            _ => (maps, DeviceCall::Map),
        };
        self.calls.map += maps as u64;
        self.calls.set_access += accesses as u64;
        self.charge(DeviceCall::Map, piece_bytes, maps as u64);
        self.charge(DeviceCall::SetAccess, piece_bytes, accesses as u64);
        self.told(last, end)
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
        // By kind: 4 maps, and access to the 4 pieces one by one and once more together.
        let of = |call| device.cost_ns_of(call) as f64;
        assert_eq!(of(DeviceCall::Map), (4.0 * one_ns(DeviceCall::Map)).round());
        assert_eq!(of(DeviceCall::SetAccess), (8.0 * one_ns(DeviceCall::SetAccess)).round());
        assert_eq!(of(DeviceCall::Malloc), 0.0);
    }

    /// 5 pieces on a device that allows 3 mappings and 100 MiB of addresses.
    #[test]
    fn the_last_refused_call_is_remembered() {
        let profile = CostProfile::shipped("h200").expect("ships");
        let sim = Sim::new(Some(20 * MIB), None, Addresses::ascending());
        let mut device = Counting::new(sim.capped(Some(100 * MIB), Some(3)), profile);
        assert_eq!((device.refusals(), device.refused()), (0, None));
        let told = |device: &Counting<Sim>| device.refused().map(|call| call.to_string());
        let range = device.address_reserve(10 * MIB).expect("addresses");
        let mut pieces = Vec::new();
        device.create_each(2 * MIB, 5, &mut pieces).expect("fits");
        device.map_each(range, 2 * MIB, &pieces, &mut 0).expect_err("the fourth");
        assert_eq!(told(&device).as_deref(), Some("map (no mapping left)"));
        device.malloc(12 * MIB).expect_err("10 MiB are left");
        assert_eq!(told(&device).as_deref(), Some("malloc (10 MiB of 12 MiB free)"));
        device.address_reserve(200 * MIB).expect_err("90 MiB are left");
        let expected = "address_reserve (no addresses left for 200 MiB)";
        assert_eq!(told(&device).as_deref(), Some(expected));
        assert_eq!(device.refusals(), 3);
    }
}
