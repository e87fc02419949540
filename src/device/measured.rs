//! A device around a device that takes the time of every call.
//!
//! Belongs directly around the device that does the work, so that nothing else is timed. Pieces are
//! created and mapped one by one here, as a driver does it, so that each is timed by itself.

use std::time::{Duration, Instant};

use super::{Device, DeviceCall, DeviceError, Extent, MemoryInfo, PhysicalHandle};

/// What a clock said of the calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTime {
    /// Calls that succeeded.
    pub count: u64,
    /// Their time in nanoseconds, all together.
    pub ns: u64,
    /// Calls that were refused.
    pub refused: u64,
    /// The time of the refused calls in nanoseconds.
    pub refused_ns: u64,
}

impl CallTime {
    fn add(&mut self, other: CallTime) {
        self.count += other.count;
        self.ns += other.ns;
        self.refused += other.refused;
        self.refused_ns += other.refused_ns;
    }
}

/// What a clock said of all calls, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredCalls {
    by_call: [CallTime; DeviceCall::ALL.len()],
}

impl MeasuredCalls {
    /// The calls of one kind.
    pub fn of(&self, call: DeviceCall) -> CallTime {
        self.by_call[call as usize]
    }

    /// Every kind of call with its times, in the order of [`DeviceCall::ALL`].
    pub fn each(&self) -> impl Iterator<Item = (DeviceCall, CallTime)> + '_ {
        DeviceCall::ALL.into_iter().map(|call| (call, self.of(call)))
    }

    /// All kinds together.
    pub fn total(&self) -> CallTime {
        let mut total = CallTime::default();
        for &times in &self.by_call {
            total.add(times);
        }
        total
    }
}

/// Takes the time of every call of the device inside.
#[derive(Clone, Debug)]
pub struct Measured<D> {
    inner: D,
    calls: MeasuredCalls,
}

impl<D: Device> Measured<D> {
    /// Times the calls of `inner`.
    pub fn new(inner: D) -> Self {
        Measured { inner, calls: MeasuredCalls::default() }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The device inside. Calls made on it are not timed.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// The device inside, without the clock.
    pub fn into_inner(self) -> D {
        self.inner
    }

    /// The times so far.
    pub fn calls(&self) -> &MeasuredCalls {
        &self.calls
    }

    #[inline]
    fn timed<T>(
        &mut self,
        call: DeviceCall,
        ask: impl FnOnce(&mut D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let begin = Instant::now();
        let end = ask(&mut self.inner);
        let ns = nanoseconds(begin.elapsed());
        let times = &mut self.calls.by_call[call as usize];
        match end {
            Ok(_) => {
                times.count += 1;
                times.ns += ns;
            }
            Err(_) => {
                times.refused += 1;
                times.refused_ns += ns;
            }
        }
        end
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl<D: Device> Device for Measured<D> {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::Malloc, |device| device.malloc(size_bytes))
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::Free, |device| device.free(address))
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::AddressReserve, |device| device.address_reserve(size_bytes))
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.timed(DeviceCall::AddressFree, |device| device.address_free(address, size_bytes))
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        self.timed(DeviceCall::Create, |device| device.create(size_bytes))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::Release, |device| device.release(handle))
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::Map, |device| device.map(address, handle))
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::Unmap, |device| device.unmap(address, size_bytes))
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.timed(DeviceCall::SetAccess, |device| device.set_access(address, size_bytes))
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.inner.backing(address, size_bytes, visit)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.inner.memory_info()
    }
}
