//! A device whose addresses and refusals a test chooses.

use fraglab::device::{
    Device, DeviceCall, DeviceError, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle,
};

/// Where the segments lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bases {
    /// Each above all earlier ones, touching the one before; never reused.
    Ascending,
    /// Each below all earlier ones, touching the one before; never reused.
    Descending,
    /// In no order; never reused.
    Scrambled,
    /// The lowest gap that fits, so that addresses come back.
    LowestFree,
}

/// First address of [`Bases::Ascending`] and [`Bases::LowestFree`].
const LOW: u64 = 0x7f00_0000_0000;
/// End of the addresses of [`Bases::Descending`].
const HIGH: u64 = 0x7fff_0000_0000;
/// Distance between the places of [`Bases::Scrambled`].
const SCRAMBLED_STEP: u64 = 1 << 32;
/// Number of the places of [`Bases::Scrambled`].
const SCRAMBLED_PLACES: u64 = 1 << 14;

/// `cudaMalloc` and `cudaFree` on a given capacity, charged in units of 2 MiB.
#[derive(Clone, Debug)]
pub(crate) struct TestDevice {
    capacity_bytes: u64,
    bases: Bases,
    /// One call in so many is refused whatever is free; 0 for none.
    refuse_one_in: u64,
    /// Live mallocs: address and bytes asked for, by address.
    live: Vec<(u64, u64)>,
    /// Every `malloc` call, also the refused ones.
    pub(crate) malloc_calls: u64,
    /// Every `free` call.
    pub(crate) free_calls: u64,
    /// Addresses in the order in which they were given out.
    pub(crate) given: Vec<u64>,
    next_up: u64,
    next_down: u64,
}

impl TestDevice {
    /// A device of this capacity.
    pub(crate) fn new(capacity_bytes: u64, bases: Bases) -> TestDevice {
        TestDevice {
            capacity_bytes,
            bases,
            refuse_one_in: 0,
            live: Vec::new(),
            malloc_calls: 0,
            free_calls: 0,
            given: Vec::new(),
            next_up: LOW,
            next_down: HIGH,
        }
    }

    /// Refuses about one `malloc` in `one_in`, by its number alone: two allocators see the same
    /// refusals only if they make the same calls.
    pub(crate) fn refusing(mut self, one_in: u64) -> TestDevice {
        self.refuse_one_in = one_in;
        self
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.live.iter().map(|&(_, bytes)| charged(bytes)).sum()
    }

    fn refuses_call(&self, number: u64) -> bool {
        let scrambled = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.refuse_one_in != 0 && scrambled.is_multiple_of(self.refuse_one_in)
    }

    fn place(&mut self, bytes: u64) -> u64 {
        match self.bases {
            Bases::Ascending => {
                self.next_up += bytes;
                self.next_up - bytes
            }
            Bases::Descending => {
                self.next_down -= bytes;
                self.next_down
            }
            Bases::Scrambled => {
                let number = self.given.len() as u64;
                assert!(number < SCRAMBLED_PLACES && bytes <= SCRAMBLED_STEP, "out of places");
                // An odd factor permutes the places.
                LOW + number.wrapping_mul(0x9e37_79b9) % SCRAMBLED_PLACES * SCRAMBLED_STEP
            }
            Bases::LowestFree => {
                let mut at = LOW;
                for &(start, length) in &self.live {
                    if at + bytes <= start {
                        break;
                    }
                    at = start + charged(length);
                }
                at
            }
        }
    }
}

impl Device for TestDevice {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.malloc_calls += 1;
        let free_bytes = self.memory_info().free_bytes;
        if charged(size_bytes) > free_bytes || self.refuses_call(self.malloc_calls) {
            let call = DeviceCall::Malloc;
            return Err(DeviceError::OutOfMemory { call, requested_bytes: size_bytes, free_bytes });
        }
        let address = self.place(charged(size_bytes));
        let at = self.live.partition_point(|&(start, _)| start < address);
        self.live.insert(at, (address, size_bytes));
        self.given.push(address);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        self.free_calls += 1;
        let at = self.live.iter().position(|&(start, _)| start == address);
        match at {
            Some(at) => Ok(self.live.remove(at).1),
            None => Err(invalid(DeviceCall::Free, address, 0)),
        }
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        Err(invalid(DeviceCall::AddressReserve, 0, size_bytes))
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        Err(invalid(DeviceCall::AddressFree, address, size_bytes))
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        Err(invalid(DeviceCall::Create, 0, size_bytes))
    }

    fn release(&mut self, _handle: PhysicalHandle) -> Result<u64, DeviceError> {
        Err(invalid(DeviceCall::Release, 0, 0))
    }

    fn map(&mut self, address: u64, _handle: PhysicalHandle) -> Result<u64, DeviceError> {
        Err(invalid(DeviceCall::Map, address, 0))
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        Err(invalid(DeviceCall::Unmap, address, size_bytes))
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        Err(invalid(DeviceCall::SetAccess, address, size_bytes))
    }

    fn memory_info(&self) -> MemoryInfo {
        MemoryInfo {
            free_bytes: self.capacity_bytes - self.used_bytes(),
            total_bytes: self.capacity_bytes,
        }
    }
}

/// What an allocation takes from the capacity.
fn charged(size_bytes: u64) -> u64 {
    size_bytes.next_multiple_of(GRANULARITY_BYTES)
}

fn invalid(call: DeviceCall, address: u64, size_bytes: u64) -> DeviceError {
    DeviceError::Invalid { call, address, size_bytes }
}
