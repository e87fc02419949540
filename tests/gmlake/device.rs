//! A slow driver: capacity in units of 2 MiB, addresses that only rise, calls that fail on demand.
//!
//! ```text
//!   mallocs       1, 2, 3, ...  above one another in units of 2 MiB from MALLOC_BASE
//!   reservations  1, 2, 3, ...  the same from RESERVATION_BASE, above all mallocs
//!   pieces        mapped anywhere, any number of times; gone with handle and last mapping
//! ```
//!
//! A call that makes no sense is a mistake of the model and panics. Any call can be made to fail; it
//! does nothing then.

use std::collections::BTreeMap;

use fraglab::trace::{DeviceCall, Fault, FaultWhen};

/// The unit of physical memory and of addresses.
pub(super) const UNIT: u64 = 2 << 20;
/// First address of a malloc.
pub(super) const MALLOC_BASE: u64 = 1 << 44;
/// First address of a reservation.
pub(super) const RESERVATION_BASE: u64 = 1 << 62;
/// What a device without a capacity reports as its size.
const UNLIMITED_BYTES: u64 = 1 << 40;

/// A piece of physical memory of one unit.
#[derive(Clone, Debug)]
struct Piece {
    held: bool,
    mappings: u64,
}

/// The driver.
#[derive(Clone, Debug)]
pub(super) struct SlowDevice {
    capacity_units: Option<u64>,
    faults: Vec<Fault>,
    /// Calls of each kind, refused ones included.
    tried: [u64; DeviceCall::ALL.len()],
    /// Calls of each kind that succeeded.
    made: [u64; DeviceCall::ALL.len()],
    /// Sizes of mallocs by address.
    mallocs: BTreeMap<u64, u64>,
    /// Sizes of reservations by address.
    reservations: BTreeMap<u64, u64>,
    pieces: Vec<Piece>,
    /// Pieces that have a handle or a mapping.
    pieces_alive: u64,
    /// Piece by address.
    mappings: BTreeMap<u64, usize>,
    next_malloc: u64,
    next_reservation: u64,
    /// Most bytes of addresses of mallocs and reservations together.
    address_bytes_max: u64,
    /// Most mappings at once.
    mappings_max: u64,
}

impl SlowDevice {
    /// A device with this capacity in bytes (without end if absent) that refuses these calls.
    pub(super) fn new(capacity: Option<u64>, faults: &[Fault]) -> SlowDevice {
        SlowDevice {
            capacity_units: capacity.map(|bytes| bytes / UNIT),
            faults: faults.to_vec(),
            tried: [0; DeviceCall::ALL.len()],
            made: [0; DeviceCall::ALL.len()],
            mallocs: BTreeMap::new(),
            reservations: BTreeMap::new(),
            pieces: Vec::new(),
            pieces_alive: 0,
            mappings: BTreeMap::new(),
            next_malloc: MALLOC_BASE,
            next_reservation: RESERVATION_BASE,
            address_bytes_max: u64::MAX,
            mappings_max: u64::MAX,
        }
    }

    /// The same device with so many bytes of addresses and mappings at most.
    pub(super) fn capped(self, address_bytes: Option<u64>, mappings: Option<u64>) -> SlowDevice {
        SlowDevice {
            address_bytes_max: address_bytes.unwrap_or(u64::MAX),
            mappings_max: mappings.unwrap_or(u64::MAX),
            ..self
        }
    }

    /// Calls of this kind that succeeded.
    pub(super) fn calls(&self, call: DeviceCall) -> u64 {
        self.made[call as usize]
    }

    /// Calls of this kind, refused ones included.
    pub(super) fn tries(&self, call: DeviceCall) -> u64 {
        self.tried[call as usize]
    }

    /// Physical memory that can still be had, in bytes.
    pub(super) fn free_bytes(&self) -> u64 {
        let capacity = self.capacity_units.map_or(UNLIMITED_BYTES, |units| units * UNIT);
        capacity.saturating_sub(self.used_units() * UNIT)
    }

    /// Units in use: mallocs below 1 MiB share units, all others have their own.
    pub(super) fn used_units(&self) -> u64 {
        let (small, large): (Vec<u64>, Vec<u64>) =
            self.mallocs.values().partition(|&&bytes| bytes < 1 << 20);
        small.iter().sum::<u64>().div_ceil(UNIT)
            + large.iter().map(|bytes| bytes.div_ceil(UNIT)).sum::<u64>()
            + self.pieces_alive
    }

    /// Reservations that were not given back.
    pub(super) fn reservations(&self) -> usize {
        self.reservations.len()
    }

    fn fails(&mut self, call: DeviceCall) -> bool {
        self.tried[call as usize] += 1;
        let number = self.tried[call as usize];
        self.faults.iter().any(|fault| {
            fault.call == call
                && match fault.when {
                    FaultWhen::All => true,
                    FaultWhen::Nth(nth) => nth == number,
                }
        })
    }

    fn succeed(&mut self, call: DeviceCall) {
        self.made[call as usize] += 1;
    }

    fn over_capacity(&self) -> bool {
        self.capacity_units.is_some_and(|units| self.used_units() > units)
    }

    fn has_addresses(&self, bytes: u64) -> bool {
        let taken = self.mallocs.values().sum::<u64>() + self.reservations.values().sum::<u64>();
        taken + bytes <= self.address_bytes_max
    }

    fn drop_if_unused(&mut self, piece: usize) {
        if !self.pieces[piece].held && self.pieces[piece].mappings == 0 {
            self.pieces_alive -= 1;
        }
    }

    pub(super) fn malloc(&mut self, bytes: u64) -> Option<u64> {
        if self.fails(DeviceCall::Malloc) || !self.has_addresses(bytes) {
            return None;
        }
        let address = self.next_malloc;
        self.mallocs.insert(address, bytes);
        if self.over_capacity() {
            self.mallocs.remove(&address);
            return None;
        }
        self.next_malloc += bytes.next_multiple_of(UNIT);
        self.succeed(DeviceCall::Malloc);
        Some(address)
    }

    pub(super) fn free(&mut self, address: u64) -> bool {
        if self.fails(DeviceCall::Free) {
            return false;
        }
        self.mallocs.remove(&address).expect("a live malloc");
        self.succeed(DeviceCall::Free);
        true
    }

    pub(super) fn reserve(&mut self, bytes: u64) -> Option<u64> {
        if self.fails(DeviceCall::AddressReserve) || !self.has_addresses(bytes) {
            return None;
        }
        let address = self.next_reservation;
        self.next_reservation += bytes.next_multiple_of(UNIT);
        self.reservations.insert(address, bytes);
        self.succeed(DeviceCall::AddressReserve);
        Some(address)
    }

    pub(super) fn free_addresses(&mut self, address: u64) -> bool {
        if self.fails(DeviceCall::AddressFree) {
            return false;
        }
        let bytes = self.reservations.remove(&address).expect("a reservation");
        let mapped = self.mappings.range(address..address + bytes).next();
        assert!(mapped.is_none(), "addresses are given back while mapped");
        self.succeed(DeviceCall::AddressFree);
        true
    }

    pub(super) fn create(&mut self) -> Option<usize> {
        if self.fails(DeviceCall::Create) {
            return None;
        }
        self.pieces_alive += 1;
        if self.over_capacity() {
            self.pieces_alive -= 1;
            return None;
        }
        self.pieces.push(Piece { held: true, mappings: 0 });
        self.succeed(DeviceCall::Create);
        Some(self.pieces.len() - 1)
    }

    pub(super) fn release(&mut self, piece: usize) -> bool {
        if self.fails(DeviceCall::Release) {
            return false;
        }
        assert!(self.pieces[piece].held, "released twice");
        self.pieces[piece].held = false;
        self.drop_if_unused(piece);
        self.succeed(DeviceCall::Release);
        true
    }

    pub(super) fn map(&mut self, address: u64, piece: usize) -> bool {
        if self.fails(DeviceCall::Map) || self.mappings.len() as u64 >= self.mappings_max {
            return false;
        }
        assert!(self.pieces[piece].held, "mapped after its release");
        assert!(self.mappings.insert(address, piece).is_none(), "mapped over another piece");
        self.pieces[piece].mappings += 1;
        self.succeed(DeviceCall::Map);
        true
    }

    pub(super) fn set_access(&mut self, address: u64) -> bool {
        if self.fails(DeviceCall::SetAccess) {
            return false;
        }
        assert!(self.mappings.contains_key(&address), "access to what is not mapped");
        self.succeed(DeviceCall::SetAccess);
        true
    }

    /// One call for a range that is mapped from end to end.
    pub(super) fn unmap(&mut self, address: u64, bytes: u64) -> bool {
        assert!(bytes > 0, "an empty range");
        if self.fails(DeviceCall::Unmap) {
            return false;
        }
        for unit in 0..bytes / UNIT {
            let piece = self.mappings.remove(&(address + unit * UNIT)).expect("mapped");
            self.pieces[piece].mappings -= 1;
            self.drop_if_unused(piece);
        }
        self.succeed(DeviceCall::Unmap);
        true
    }
}
