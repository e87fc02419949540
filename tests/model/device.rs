//! A device whose addresses and refusals a test chooses.

use std::collections::BTreeMap;

use fraglab::device::{
    Device, DeviceCall, DeviceError, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle,
};

/// Where segments and reservations lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bases {
    /// Each above all earlier ones, touching the one before; never reused. Reservations do so in a
    /// range of their own below all segments.
    Ascending,
    /// Each below all earlier ones, touching the one before; never reused.
    Descending,
    /// In no order; never reused.
    Scrambled,
    /// The lowest gap that fits, so that addresses come back.
    LowestFree,
}

/// First address of [`Bases::Ascending`] for reservations.
const LOW_RESERVED: u64 = 0x2000_0000_0000;
/// First address of [`Bases::Ascending`] for segments, and of [`Bases::LowestFree`].
const LOW: u64 = 0x7f00_0000_0000;
/// End of the addresses of [`Bases::Descending`].
const HIGH: u64 = 0x7fff_0000_0000;
/// Distance between the places of [`Bases::Scrambled`]: the largest reservation fits.
const SCRAMBLED_STEP: u64 = 1 << 37;
/// Number of the places of [`Bases::Scrambled`].
const SCRAMBLED_PLACES: u64 = 1 << 11;

/// An address range that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    pub(crate) address: u64,
    /// It is a reservation, not a malloc.
    pub(crate) reserved: bool,
}

/// Physical memory that was created.
#[derive(Clone, Copy, Debug)]
struct Piece {
    size_bytes: u64,
    /// Its handle was not released.
    held: bool,
}

/// The driver on a given capacity, charged in units of 2 MiB.
#[derive(Clone, Debug)]
pub(crate) struct TestDevice {
    capacity_bytes: u64,
    bases: Bases,
    /// One call in so many is refused whatever is free; 0 for none.
    refuse_one_in: u64,
    /// This call is refused, counted from 1 for its kind.
    failing: Option<(DeviceCall, u64)>,
    /// Live mallocs: bytes asked for by address.
    mallocs: BTreeMap<u64, u64>,
    /// Reserved ranges: bytes by address.
    reservations: BTreeMap<u64, u64>,
    pieces: BTreeMap<u64, Piece>,
    /// Mapped ranges: bytes and piece by address.
    mappings: BTreeMap<u64, (u64, u64)>,
    pieces_made: u64,
    /// Every call by its kind, also the refused ones.
    calls: [u64; DeviceCall::ALL.len()],
    /// Refused calls.
    refused: u64,
    /// Address ranges in the order in which they were given out.
    pub(crate) given: Vec<Given>,
    next_reserved: u64,
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
            failing: None,
            mallocs: BTreeMap::new(),
            reservations: BTreeMap::new(),
            pieces: BTreeMap::new(),
            mappings: BTreeMap::new(),
            pieces_made: 0,
            calls: [0; DeviceCall::ALL.len()],
            refused: 0,
            given: Vec::new(),
            next_reserved: LOW_RESERVED,
            next_up: LOW,
            next_down: HIGH,
        }
    }

    /// Refuses about one call in `one_in` of the kinds that obtain memory or take a reservation
    /// back, by its number alone: two allocators see the same refusals only if they make the same
    /// calls.
    pub(crate) fn refusing(mut self, one_in: u64) -> TestDevice {
        self.refuse_one_in = one_in;
        self
    }

    /// Refuses the call of this kind with this number, counted from 1 over all calls of the kind.
    pub(crate) fn failing(mut self, call: DeviceCall, number: u64) -> TestDevice {
        self.failing = Some((call, number));
        self
    }

    /// Physical memory in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        let mallocs: u64 = self.mallocs.values().map(|&bytes| charged(bytes)).sum();
        let pieces: u64 = self.pieces.values().map(|piece| piece.size_bytes).sum();
        mallocs + pieces
    }

    /// Calls of this kind so far, also the refused ones.
    pub(crate) fn calls(&self, call: DeviceCall) -> u64 {
        self.calls[call as usize]
    }

    /// Calls that were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }

    /// Reserved ranges that were not given back.
    pub(crate) fn reservations(&self) -> usize {
        self.reservations.len()
    }

    /// The memory that has an address, as ranges of (address, bytes): mallocs and mapped pages.
    pub(crate) fn memory(&self) -> Vec<(u64, u64)> {
        let mappings = self.mappings.iter().map(|(&address, &(bytes, _))| (address, bytes));
        let mallocs = self.mallocs.iter().map(|(&address, &bytes)| (address, bytes));
        let mut ranges: Vec<(u64, u64)> = mappings.chain(mallocs).collect();
        ranges.sort_unstable();
        ranges
    }

    /// Physical memory that was created and is mapped nowhere.
    pub(crate) fn unmapped_bytes(&self) -> u64 {
        let mapped = |piece| self.mappings.values().any(|&(_, other)| other == piece);
        let unmapped = self.pieces.iter().filter(|&(&piece, _)| !mapped(piece));
        unmapped.map(|(_, piece)| piece.size_bytes).sum()
    }

    /// Counts a call and refuses it if it is one of those to refuse.
    fn count(&mut self, call: DeviceCall, requested_bytes: u64) -> Result<(), DeviceError> {
        self.calls[call as usize] += 1;
        let number = self.calls[call as usize];
        let refusable = !matches!(call, DeviceCall::Free | DeviceCall::Release | DeviceCall::Unmap);
        let by_number = self.refuse_one_in != 0
            && refusable
            && scrambled(number * DeviceCall::ALL.len() as u64 + call as u64)
                .is_multiple_of(self.refuse_one_in);
        if by_number || self.failing == Some((call, number)) {
            return Err(self.out_of_memory(call, requested_bytes));
        }
        Ok(())
    }

    fn out_of_memory(&mut self, call: DeviceCall, requested_bytes: u64) -> DeviceError {
        self.refused += 1;
        let free_bytes = self.memory_info().free_bytes;
        DeviceError::OutOfMemory { call, requested_bytes, free_bytes }
    }

    fn charge(&mut self, call: DeviceCall, size_bytes: u64) -> Result<(), DeviceError> {
        if charged(size_bytes) > self.memory_info().free_bytes {
            return Err(self.out_of_memory(call, size_bytes));
        }
        Ok(())
    }

    /// Chooses and notes an address.
    fn give(&mut self, bytes: u64, reserved: bool) -> u64 {
        let address = match self.bases {
            Bases::Ascending => {
                let next = if reserved { &mut self.next_reserved } else { &mut self.next_up };
                *next += bytes;
                *next - bytes
            }
            Bases::Descending => {
                self.next_down -= bytes;
                self.next_down
            }
            Bases::Scrambled => {
                let number = self.given.len() as u64;
                assert!(number < SCRAMBLED_PLACES && bytes <= SCRAMBLED_STEP, "out of places");
                // An odd factor permutes the places; the first is not 0.
                (1 + number.wrapping_mul(0x9e37_79b9) % SCRAMBLED_PLACES) * SCRAMBLED_STEP
            }
            Bases::LowestFree => {
                let mallocs = self.mallocs.iter().map(|(&start, &bytes)| (start, charged(bytes)));
                let reserved = self.reservations.iter().map(|(&start, &bytes)| (start, bytes));
                let mut taken: Vec<(u64, u64)> = mallocs.chain(reserved).collect();
                taken.sort_unstable();
                let mut at = LOW;
                for (start, length) in taken {
                    if at + bytes <= start {
                        break;
                    }
                    at = start + length;
                }
                at
            }
        };
        self.given.push(Given { address, reserved });
        address
    }

    /// The mappings that exactly tile the range, or nothing.
    fn tiles(&self, address: u64, size_bytes: u64) -> Option<Vec<u64>> {
        let mut at = address;
        let mut bases = Vec::new();
        while at < address + size_bytes {
            bases.push(at);
            at += self.mappings.get(&at)?.0;
        }
        (at == address + size_bytes && !bases.is_empty()).then_some(bases)
    }

    fn drop_if_unused(&mut self, piece: u64) {
        let mapped = self.mappings.values().any(|&(_, other)| other == piece);
        if !mapped && !self.pieces[&piece].held {
            self.pieces.remove(&piece);
        }
    }
}

impl Device for TestDevice {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.count(DeviceCall::Malloc, size_bytes)?;
        self.charge(DeviceCall::Malloc, size_bytes)?;
        let address = self.give(charged(size_bytes), false);
        self.mallocs.insert(address, size_bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        self.count(DeviceCall::Free, 0)?;
        self.mallocs.remove(&address).ok_or(invalid(DeviceCall::Free, address, 0))
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::AddressReserve;
        self.count(call, size_bytes)?;
        if !whole_units(size_bytes) {
            return Err(invalid(call, 0, size_bytes));
        }
        let address = self.give(size_bytes, true);
        self.reservations.insert(address, size_bytes);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let call = DeviceCall::AddressFree;
        self.count(call, size_bytes)?;
        let known = self.reservations.get(&address) == Some(&size_bytes);
        let mapped = self.mappings.range(address..address + size_bytes).next().is_some();
        if !known || mapped {
            return Err(invalid(call, address, size_bytes));
        }
        self.reservations.remove(&address);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let call = DeviceCall::Create;
        self.count(call, size_bytes)?;
        if !whole_units(size_bytes) {
            return Err(invalid(call, 0, size_bytes));
        }
        self.charge(call, size_bytes)?;
        self.pieces_made += 1;
        self.pieces.insert(self.pieces_made, Piece { size_bytes, held: true });
        Ok(PhysicalHandle(self.pieces_made))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let call = DeviceCall::Release;
        self.count(call, 0)?;
        let piece = self.pieces.get_mut(&handle.0).filter(|piece| piece.held);
        let piece = piece.ok_or(invalid(call, 0, 0))?;
        piece.held = false;
        let size_bytes = piece.size_bytes;
        self.drop_if_unused(handle.0);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let call = DeviceCall::Map;
        self.count(call, 0)?;
        let piece = self.pieces.get(&handle.0).filter(|piece| piece.held);
        let size_bytes = piece.ok_or(invalid(call, address, 0))?.size_bytes;
        let end = address + size_bytes;
        let overlaps = self
            .mappings
            .iter()
            .any(|(&start, &(bytes, _))| start < end && address < start + bytes);
        let inside = self
            .reservations
            .iter()
            .any(|(&start, &bytes)| start <= address && end <= start + bytes);
        if overlaps || !inside {
            return Err(invalid(call, address, size_bytes));
        }
        self.mappings.insert(address, (size_bytes, handle.0));
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::Unmap;
        self.count(call, size_bytes)?;
        let bases = self.tiles(address, size_bytes).ok_or(invalid(call, address, size_bytes))?;
        let count = bases.len() as u64;
        for base in bases {
            let (_, piece) = self.mappings.remove(&base).expect("just found");
            self.drop_if_unused(piece);
        }
        Ok(count)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::SetAccess;
        self.count(call, size_bytes)?;
        let bases = self.tiles(address, size_bytes).ok_or(invalid(call, address, size_bytes))?;
        Ok(bases.len() as u64)
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

fn whole_units(size_bytes: u64) -> bool {
    size_bytes != 0 && size_bytes.is_multiple_of(GRANULARITY_BYTES)
}

fn scrambled(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

fn invalid(call: DeviceCall, address: u64, size_bytes: u64) -> DeviceError {
    DeviceError::Invalid { call, address, size_bytes }
}
