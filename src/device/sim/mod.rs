//! A simulated device: capacity, addresses, and the books of a driver.
//!
//! Physical memory is charged in units of 2 MiB ([`GRANULARITY_BYTES`]), which mallocs under 1 MiB
//! share. Which address a range gets is the business of the [address policy](addresses). A driver process
//! tolerates only so many addresses and mappings; [`Sim::capped`] sets where that ends.

pub mod addresses;

use std::collections::{BTreeMap, HashMap};

use super::charge::Charge;
use super::{
    Device, DeviceCall, DeviceError, Extent, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle,
};
use addresses::{Addresses, HostCopy};

/// What an unlimited device reports as its size, and what reservations are made for: 1 TiB.
pub const UNLIMITED_TOTAL_BYTES: u64 = 1 << 40;

type FastMap<V> = HashMap<u64, V, foldhash::fast::FixedState>;

/// A simulated device.
#[derive(Clone, Debug)]
pub struct Sim {
    /// Physical memory in use, and how much may be.
    charge: Charge,
    /// What [`Device::memory_info`] reports as total.
    total_bytes: u64,
    addresses: Addresses,
    mallocs: FastMap<u64>,
    pieces: Vec<Piece>,
    /// Slots of `pieces` that stand for nothing.
    spare_pieces: Vec<u32>,
    /// Reserved ranges by base.
    reservations: BTreeMap<u64, Reservation>,
    reservation_bytes: u64,
    reservation_bytes_peak: u64,
    mappings: u64,
    mappings_peak: u64,
    /// Bytes of reservations and mallocs that may still be made; below 0 if more was held at the
    /// start than may be.
    address_room_bytes: i64,
    /// Mappings that there may be.
    mappings_max: u64,
}

/// A piece of physical memory. Its handle is the slot, and above it the generation, so that a
/// handle of a piece that is gone stands for nothing.
#[derive(Clone, Copy, Debug)]
struct Piece {
    size_bytes: u64,
    mappings: u32,
    generation: u32,
    /// The handle has not been released.
    held: bool,
}

impl Piece {
    fn handle(&self, slot: u32) -> PhysicalHandle {
        PhysicalHandle(u64::from(self.generation) << 32 | u64::from(slot))
    }
}

/// A reserved range and its page table.
///
/// ```text
///   pages  │ piece 7 │ rest │ rest │ free │ piece 9 │ (free to the end)
///          base      +2 MiB
/// ```
#[derive(Clone, Debug)]
struct Reservation {
    size_bytes: u64,
    /// What is mapped at each unit of 2 MiB: the slot of a piece where it begins. As long as the
    /// highest page that was ever mapped asks for.
    pages: Vec<u32>,
    mappings: u64,
}

/// A page where nothing is mapped.
const FREE_PAGE: u32 = u32::MAX;
/// A page behind the first of its piece.
const REST_OF_PIECE: u32 = u32::MAX - 1;

impl Reservation {
    fn new(size_bytes: u64) -> Reservation {
        Reservation { size_bytes, pages: Vec::new(), mappings: 0 }
    }

    fn page(&self, index: usize) -> u32 {
        self.pages.get(index).copied().unwrap_or(FREE_PAGE)
    }

    /// Fills `count` free pages with a piece. Says whether they were free.
    fn map(&mut self, first: usize, count: usize, slot: u32) -> bool {
        let end = first + count;
        if self.pages.len() < end {
            self.pages.resize(end, FREE_PAGE);
        }
        let pages = &mut self.pages[first..end];
        if pages.iter().any(|&page| page != FREE_PAGE) {
            return false;
        }
        pages.fill(REST_OF_PIECE);
        pages[0] = slot;
        self.mappings += 1;
        true
    }
}

impl Sim {
    /// A device with `capacity_bytes` of physical memory (unlimited if absent), that reports
    /// `total_bytes` (the capacity if absent) and gives out `addresses`.
    pub fn new(capacity_bytes: Option<u64>, total_bytes: Option<u64>, addresses: Addresses) -> Sim {
        Sim {
            charge: Charge::new(capacity_bytes),
            total_bytes: total_bytes.or(capacity_bytes).unwrap_or(UNLIMITED_TOTAL_BYTES),
            addresses,
            mallocs: FastMap::default(),
            pieces: Vec::new(),
            spare_pieces: Vec::new(),
            reservations: BTreeMap::new(),
            reservation_bytes: 0,
            reservation_bytes_peak: 0,
            mappings: 0,
            mappings_peak: 0,
            address_room_bytes: i64::MAX,
            mappings_max: u64::MAX,
        }
    }

    /// The same device that allows no more than `address_bytes_max` bytes of reservations and
    /// mallocs together, and no more than `mappings_max` mappings. What is there at the start of a
    /// replay may exceed both.
    pub fn capped(self, address_bytes_max: Option<u64>, mappings_max: Option<u64>) -> Sim {
        Sim {
            address_room_bytes: address_bytes_max
                .and_then(|bytes| i64::try_from(bytes).ok())
                .unwrap_or(i64::MAX),
            mappings_max: mappings_max.unwrap_or(u64::MAX),
            ..self
        }
    }

    /// Most bytes of addresses that were reserved at once.
    pub fn reservation_bytes_peak(&self) -> u64 {
        self.reservation_bytes_peak
    }

    /// Most mappings that there were at once.
    pub fn mappings_peak(&self) -> u64 {
        self.mappings_peak
    }

    /// The program begins to compute; see [`Addresses::load_kernels`].
    pub fn load_kernels(&mut self, last_copy: HostCopy) {
        self.addresses.load_kernels(last_copy);
    }

    /// Takes over a malloc that was there before, beyond any capacity. For the start of a replay.
    pub fn hold(&mut self, address: u64, size_bytes: u64) {
        self.charge.malloc(size_bytes);
        self.mallocs.insert(address, size_bytes);
        self.address_room_bytes = self.address_room_bytes.saturating_sub_unsigned(size_bytes);
        self.addresses.hold(address, size_bytes);
    }

    /// Takes over a reservation that was there before.
    pub fn hold_reservation(&mut self, address: u64, size_bytes: u64) {
        self.add_reservation(address, size_bytes);
        self.addresses.hold_reservation(address, size_bytes);
    }

    /// Takes over a page that was mapped before, in a reservation that is held; the handle of its
    /// memory is gone.
    pub fn hold_page(&mut self, address: u64, size_bytes: u64) {
        let units = Charge::piece_units(size_bytes);
        self.charge.create(size_bytes);
        let slot = self.new_piece(size_bytes);
        self.pieces[slot as usize].mappings = 1;
        self.pieces[slot as usize].held = false;
        if let Some((&base, reservation)) = self.reservations.range_mut(..=address).next_back() {
            let first = page_index(address - base);
            reservation.map(first, units as usize, slot);
            self.count_mappings(1);
        }
    }

    fn add_reservation(&mut self, address: u64, size_bytes: u64) {
        self.reservations.insert(address, Reservation::new(size_bytes));
        self.address_room_bytes = self.address_room_bytes.saturating_sub_unsigned(size_bytes);
        self.reservation_bytes += size_bytes;
        self.reservation_bytes_peak = self.reservation_bytes_peak.max(self.reservation_bytes);
    }

    fn count_mappings(&mut self, more: u64) {
        self.mappings += more;
        self.mappings_peak = self.mappings_peak.max(self.mappings);
    }

    /// Enters a piece that is held into the books; its units are the caller's business.
    fn new_piece(&mut self, size_bytes: u64) -> u32 {
        let piece = Piece { size_bytes, mappings: 0, generation: 0, held: true };
        match self.spare_pieces.pop() {
            Some(slot) => {
                let gone = &mut self.pieces[slot as usize];
                *gone = Piece { generation: gone.generation.wrapping_add(1), ..piece };
                slot
            }
            None => {
                self.pieces.push(piece);
                (self.pieces.len() - 1) as u32
            }
        }
    }

    /// The slot of a piece whose handle is held.
    fn held_slot(&self, handle: PhysicalHandle) -> Option<u32> {
        let slot = handle.0 as u32;
        let piece = self.pieces.get(slot as usize)?;
        (piece.held && piece.handle(slot) == handle).then_some(slot)
    }

    #[inline]
    fn check_units(
        &self,
        call: DeviceCall,
        requested_bytes: u64,
        units: u64,
    ) -> Result<(), DeviceError> {
        if !self.charge.holds(units) {
            let free_bytes = self.memory_info().free_bytes;
            return Err(DeviceError::OutOfMemory { call, requested_bytes, free_bytes });
        }
        Ok(())
    }

    /// Whether so many more bytes may have addresses.
    #[inline]
    fn check_addresses(&self, requested_bytes: u64) -> Result<(), DeviceError> {
        if i64::try_from(requested_bytes).is_ok_and(|bytes| bytes > self.address_room_bytes) {
            return Err(DeviceError::OutOfAddresses { requested_bytes });
        }
        Ok(())
    }

    /// Drops a piece of which neither a handle nor a mapping is left.
    fn drop_if_unused(&mut self, slot: u32) {
        let piece = self.pieces[slot as usize];
        if !piece.held && piece.mappings == 0 {
            self.spare_pieces.push(slot);
            self.charge.drop_piece(piece.size_bytes);
        }
    }

    /// Slots of the pieces that exactly tile the range; any other range makes the call invalid.
    /// Takes them out of the page table if `remove`.
    fn tiles(
        &mut self,
        call: DeviceCall,
        address: u64,
        size_bytes: u64,
        remove: bool,
    ) -> Result<Vec<u32>, DeviceError> {
        let invalid = DeviceError::Invalid { call, address, size_bytes };
        if !is_whole_units(size_bytes) {
            return Err(invalid);
        }
        let (base, reservation) =
            reservation_of(&mut self.reservations, address, size_bytes).ok_or(invalid)?;
        let first = page_index(address - base);
        let end = first + page_index(size_bytes);
        let at_border = (address - base).is_multiple_of(GRANULARITY_BYTES)
            && reservation.page(first) != REST_OF_PIECE
            && reservation.page(end) != REST_OF_PIECE;
        if !at_border || end > reservation.pages.len() {
            return Err(invalid);
        }
        let pages = &mut reservation.pages[first..end];
        if pages.contains(&FREE_PAGE) {
            return Err(invalid);
        }
        let slots: Vec<u32> = pages.iter().copied().filter(|&page| page != REST_OF_PIECE).collect();
        if remove {
            pages.fill(FREE_PAGE);
            reservation.mappings -= slots.len() as u64;
        }
        Ok(slots)
    }

    /// Maps pieces one behind the other; they must be held. Adds to `mapped` how many it mapped.
    fn map_slots(
        &mut self,
        address: u64,
        slots: &[u32],
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        let size = |&slot: &u32| self.pieces[slot as usize].size_bytes;
        let size_bytes = slots.iter().map(size).sum();
        let invalid = DeviceError::Invalid { call: DeviceCall::Map, address, size_bytes };
        let mappings_max = self.mappings_max;
        let room = mappings_max.saturating_sub(self.mappings);
        let (base, reservation) =
            reservation_of(&mut self.reservations, address, size_bytes).ok_or(invalid)?;
        if !(address - base).is_multiple_of(GRANULARITY_BYTES) {
            return Err(invalid);
        }
        let mut first = page_index(address - base);
        let mut count = 0;
        let mut refusal = None;
        for &slot in slots {
            let pages = page_index(size(&slot));
            if count as u64 >= room {
                refusal = Some(DeviceError::TooManyMappings { mappings_max });
                break;
            }
            if !reservation.map(first, pages, slot) {
                refusal = Some(invalid);
                break;
            }
            first += pages;
            count += 1;
        }
        for &slot in &slots[..count] {
            self.pieces[slot as usize].mappings += 1;
        }
        self.count_mappings(count as u64);
        *mapped += count;
        refusal.map_or(Ok(()), Err)
    }
}

/// The reservation that holds all of [address, address + size), and its base.
fn reservation_of(
    reservations: &mut BTreeMap<u64, Reservation>,
    address: u64,
    size_bytes: u64,
) -> Option<(u64, &mut Reservation)> {
    let end = address.checked_add(size_bytes)?;
    let (&base, reservation) = reservations.range_mut(..=address).next_back()?;
    (end <= base + reservation.size_bytes).then_some((base, reservation))
}

/// Units of 2 MiB in a number of bytes. The caller knows that so many exist.
fn page_index(size_bytes: u64) -> usize {
    (size_bytes / GRANULARITY_BYTES) as usize
}

fn is_whole_units(size_bytes: u64) -> bool {
    size_bytes != 0 && size_bytes.is_multiple_of(GRANULARITY_BYTES)
}

impl Device for Sim {
    #[inline]
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check_units(DeviceCall::Malloc, size_bytes, self.charge.malloc_units(size_bytes))?;
        self.check_addresses(size_bytes)?;
        let address = self.addresses.take(size_bytes)?;
        self.address_room_bytes -= size_bytes as i64;
        self.charge.malloc(size_bytes);
        self.mallocs.insert(address, size_bytes);
        Ok(address)
    }

    #[inline]
    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let Some(size_bytes) = self.mallocs.remove(&address) else {
            return Err(DeviceError::Invalid { call: DeviceCall::Free, address, size_bytes: 0 });
        };
        self.address_room_bytes += size_bytes as i64;
        self.charge.free(size_bytes);
        self.addresses.give_back(address, size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check_addresses(size_bytes)?;
        let address = self.addresses.reserve(size_bytes)?;
        self.add_reservation(address, size_bytes);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let whole = |found: &&Reservation| found.size_bytes == size_bytes && found.mappings == 0;
        if self.reservations.get(&address).filter(whole).is_none() {
            let call = DeviceCall::AddressFree;
            return Err(DeviceError::Invalid { call, address, size_bytes });
        }
        self.reservations.remove(&address);
        self.reservation_bytes -= size_bytes;
        self.address_room_bytes = self.address_room_bytes.saturating_add_unsigned(size_bytes);
        self.addresses.unreserve(size_bytes);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let call = DeviceCall::Create;
        if !is_whole_units(size_bytes) {
            return Err(DeviceError::Invalid { call, address: 0, size_bytes });
        }
        self.check_units(call, size_bytes, Charge::piece_units(size_bytes))?;
        self.charge.create(size_bytes);
        let slot = self.new_piece(size_bytes);
        Ok(self.pieces[slot as usize].handle(slot))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let Some(slot) = self.held_slot(handle) else {
            let call = DeviceCall::Release;
            return Err(DeviceError::Invalid { call, address: 0, size_bytes: 0 });
        };
        let piece = &mut self.pieces[slot as usize];
        piece.held = false;
        let size_bytes = piece.size_bytes;
        self.drop_if_unused(slot);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let Some(slot) = self.held_slot(handle) else {
            let call = DeviceCall::Map;
            return Err(DeviceError::Invalid { call, address, size_bytes: 0 });
        };
        self.map_slots(address, &[slot], &mut 0)?;
        Ok(self.pieces[slot as usize].size_bytes)
    }

    fn map_each(
        &mut self,
        address: u64,
        piece_bytes: u64,
        handles: &[PhysicalHandle],
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        let invalid = DeviceError::Invalid { call: DeviceCall::Map, address, size_bytes: 0 };
        let of_size = |slot: &u32| self.pieces[*slot as usize].size_bytes == piece_bytes;
        let slot = |&handle: &PhysicalHandle| self.held_slot(handle).filter(of_size);
        let slots: Option<Vec<u32>> = handles.iter().map(slot).collect();
        self.map_slots(address, &slots.ok_or(invalid)?, mapped)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let slots = self.tiles(DeviceCall::Unmap, address, size_bytes, true)?;
        let count = slots.len() as u64;
        self.mappings -= count;
        for slot in slots {
            self.pieces[slot as usize].mappings -= 1;
            self.drop_if_unused(slot);
        }
        Ok(count)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let slots = self.tiles(DeviceCall::SetAccess, address, size_bytes, false)?;
        Ok(slots.len() as u64)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        let end = address.saturating_add(size_bytes);
        let below = self.reservations.range(..=address).next_back();
        let Some((&base, reservation)) =
            below.filter(|(base, found)| address < *base + found.size_bytes)
        else {
            visit(Extent { piece: None, offset_bytes: address, size_bytes });
            return true;
        };
        let mut at = address;
        while at < end {
            let page = page_index(at - base);
            let Some(head) = (0..=page).rev().find(|&page| reservation.page(page) != REST_OF_PIECE)
            else {
                return false;
            };
            let slot = reservation.page(head);
            if slot == FREE_PAGE {
                return false;
            }
            let piece = self.pieces[slot as usize];
            let piece_base = base + head as u64 * GRANULARITY_BYTES;
            let upto = end.min(piece_base + piece.size_bytes);
            visit(Extent {
                piece: Some(piece.handle(slot)),
                offset_bytes: at - piece_base,
                size_bytes: upto - at,
            });
            at = upto;
        }
        true
    }

    fn memory_info(&self) -> MemoryInfo {
        // An unlimited device reports its total less what is in use, and never less than nothing.
        let limit_bytes = self.charge.capacity_bytes().min(self.total_bytes);
        let free_bytes = limit_bytes.saturating_sub(self.charge.in_use_bytes());
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

    #[test]
    fn one_memory_shows_behind_all_its_addresses() {
        let mut device = sim(64 * MIB);
        let (one, other) = (device.address_reserve(8 * MIB), device.address_reserve(8 * MIB));
        let (one, other) = (one.expect("addresses"), other.expect("addresses"));
        let mut pieces = Vec::new();
        device.create_each(2 * MIB, 2, &mut pieces).expect("fits");
        let mut mapped = 0;
        device.map_each(one, 2 * MIB, &pieces, &mut mapped).expect("maps");
        device.map(other + 2 * MIB, pieces[0]).expect("maps again");
        assert_eq!((mapped, device.mappings_peak()), (2, 3));
        let memory = |address, size_bytes| {
            let mut extents = Vec::new();
            let whole = device.backing(address, size_bytes, &mut |extent| extents.push(extent));
            whole.then_some(extents)
        };
        let extent = |piece, offset_bytes, size_bytes| Extent {
            piece: Some(piece),
            offset_bytes,
            size_bytes,
        };
        assert_eq!(
            memory(one + MIB, 2 * MIB),
            Some(vec![extent(pieces[0], MIB, MIB), extent(pieces[1], 0, MIB)])
        );
        assert_eq!(memory(other + 3 * MIB, MIB), Some(vec![extent(pieces[0], MIB, MIB)]));
        assert_eq!(memory(other, MIB), None, "nothing is mapped there");
        assert_eq!(memory(other + 3 * MIB, 2 * MIB), None, "nothing behind it");
    }

    #[test]
    fn a_released_handle_stands_for_nothing_though_its_slot_is_used_again() {
        let mut device = sim(64 * MIB);
        let range = device.address_reserve(8 * MIB).expect("addresses");
        let gone = device.create(2 * MIB).expect("fits");
        device.release(gone).expect("held");
        let new = device.create(2 * MIB).expect("fits");
        assert_ne!(gone, new);
        assert!(device.release(gone).is_err() && device.map(range, gone).is_err());
        device.map(range, new).expect("held");
    }

    #[test]
    fn mapping_several_pieces_stops_at_the_first_that_is_in_the_way() {
        let mut device = sim(64 * MIB);
        let range = device.address_reserve(8 * MIB).expect("addresses");
        let mut pieces = Vec::new();
        device.create_each(2 * MIB, 3, &mut pieces).expect("fits");
        device.map(range + 2 * MIB, pieces[2]).expect("free");
        let mut mapped = 0;
        assert!(device.map_each(range, 2 * MIB, &pieces[..2], &mut mapped).is_err());
        assert_eq!((mapped, device.mappings_peak()), (1, 2));
        assert!(device.map_each(range + 6 * MIB, 2 * MIB, &pieces[..2], &mut mapped).is_err());
        assert!(device.address_free(range, 8 * MIB).is_err(), "still mapped");
    }

    #[test]
    fn addresses_end_where_the_cap_says() {
        let mut device = sim(100 * MIB).capped(Some(10 * MIB), None);
        let malloc = device.malloc(3 * MIB).expect("addresses");
        let range = device.address_reserve(6 * MIB).expect("addresses");
        let refused = |size| Err(DeviceError::OutOfAddresses { requested_bytes: size });
        assert_eq!(device.address_reserve(2 * MIB), refused(2 * MIB), "9 of 10 MiB are taken");
        assert_eq!(device.malloc(2 * MIB), refused(2 * MIB));
        device.malloc(MIB).expect("fits exactly");
        assert_eq!(device.malloc(1), refused(1));
        // Both kinds give back what they took, and refused calls took nothing.
        device.free(malloc).expect("known");
        device.address_reserve(2 * MIB).expect("3 MiB are free");
        device.address_free(range, 6 * MIB).expect("known");
        device.malloc(7 * MIB).expect("fits exactly");
        assert!(device.address_reserve(2 * MIB).is_err());
    }

    #[test]
    fn mappings_end_where_the_cap_says() {
        let mut device = sim(100 * MIB).capped(None, Some(3));
        let range = device.address_reserve(20 * MIB).expect("addresses");
        let mut pieces = Vec::new();
        device.create_each(2 * MIB, 4, &mut pieces).expect("fits");
        let refused = Err(DeviceError::TooManyMappings { mappings_max: 3 });
        let mut mapped = 0;
        assert_eq!(device.map_each(range, 2 * MIB, &pieces, &mut mapped), refused);
        assert_eq!((mapped, device.mappings_peak()), (3, 3));
        assert_eq!(device.map(range + 6 * MIB, pieces[3]), refused.map(|()| 0));
        device.unmap(range, 2 * MIB).expect("mapped");
        device.map(range + 6 * MIB, pieces[3]).expect("room for one");
        assert_eq!(device.map(range, pieces[0]), refused.map(|()| 0));
    }
}
