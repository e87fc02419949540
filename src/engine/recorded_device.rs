//! The device that `verify` gives the allocator: it grants what the recording shows next, at the
//! recorded address, and refuses anything else.

use std::collections::BTreeMap;

use crate::alloc::{Action, ActionKind, Request};
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{Device, DeviceCall, DeviceError, MemoryInfo, PhysicalHandle};
use crate::trace::{EntryKind, RecordedEntry, room_on_device};
use crate::units::{MIB, StreamId};

/// More reservations than this at once do not fit in an address space.
const RESERVATIONS_MAX: usize = 1024;

/// The device of a recording: gives what the recording shows next, else refuses.
#[derive(Clone)]
pub(super) struct Refuser<'a> {
    entries: &'a [RecordedEntry],
    /// The next entry.
    pub(super) position: usize,
    /// Stream of the request under way, and whether it goes to a small pool.
    asked: (StreamId, bool),
    total_bytes: Option<u64>,
    /// Memory given out.
    pub(super) held_bytes: u64,
    /// Segments given out: base → size.
    pub(super) sizes: BTreeMap<u64, u64>,
    /// Reserved ranges: base → size.
    pub(super) reservations: BTreeMap<u64, u64>,
    /// Pieces of memory so far.
    pieces: u64,
    /// Reservations so far that never get memory.
    unseen: u64,
    /// Refusals although the device had room.
    pub(super) unexplained: u64,
}

impl<'a> Refuser<'a> {
    pub(super) fn new(entries: &'a [RecordedEntry], total_bytes: Option<u64>) -> Refuser<'a> {
        Refuser {
            entries,
            position: 0,
            asked: (StreamId::NONE, false),
            total_bytes,
            held_bytes: 0,
            sizes: BTreeMap::new(),
            reservations: BTreeMap::new(),
            pieces: 0,
            unseen: 0,
            unexplained: 0,
        }
    }

    /// A request begins.
    pub(super) fn asks(&mut self, request: Request) {
        self.asked = (request.stream, request.size_bytes <= MIB);
    }

    /// Pages were mapped or unmapped as recorded.
    pub(super) fn note(&mut self, action: Action) {
        match action.kind {
            ActionKind::SegmentMap => {
                self.held_bytes = self.held_bytes.saturating_add(action.size_bytes);
            }
            ActionKind::SegmentUnmap => {
                self.held_bytes = self.held_bytes.saturating_sub(action.size_bytes);
            }
            _ => {}
        }
    }

    /// The next entry, if it is of this kind.
    fn next(&self, kind: EntryKind) -> Option<&'a RecordedEntry> {
        self.entries.get(self.position).filter(|entry| entry.kind == kind)
    }

    fn refuse(&mut self, call: DeviceCall, size_bytes: u64) -> DeviceError {
        let wanted_bytes = self.held_bytes.saturating_add(size_bytes);
        if self.total_bytes.is_some_and(|total| wanted_bytes < room_on_device(total)) {
            self.unexplained += 1;
        }
        let free_bytes = self.memory_info().free_bytes;
        DeviceError::OutOfMemory { call, requested_bytes: size_bytes, free_bytes }
    }

    /// Where a reservation begins: at the first page that the recording maps on this stream outside
    /// the reservations there are. A small pool maps one page of 2 MiB at a time, a large one more.
    fn reservation_base(&mut self) -> u64 {
        let (stream, small) = self.asked;
        let reserved = |address: u64| {
            let below = self.reservations.range(..=address).next_back();
            below.is_some_and(|(&base, &size)| address - base < size)
        };
        let first = self.entries[self.position.min(self.entries.len())..].iter().find(|entry| {
            entry.kind == EntryKind::SegmentMap
                && entry.stream == stream
                && (entry.size_bytes == 2 * MIB) == small
                && !reserved(entry.address)
        });
        if let Some(entry) = first {
            return entry.address;
        }
        // One that never gets memory lies where it disturbs nobody.
        self.unseen += 1;
        (1 << 62) + (self.unseen << 44)
    }
}

impl Device for Refuser<'_> {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let entry = self.next(EntryKind::SegmentAlloc);
        if let Some(entry) = entry.filter(|entry| entry.size_bytes == size_bytes) {
            self.held_bytes = self.held_bytes.saturating_add(size_bytes);
            self.sizes.insert(entry.address, size_bytes);
            return Ok(entry.address);
        }
        Err(self.refuse(DeviceCall::Malloc, size_bytes))
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let Some(size_bytes) = self.sizes.remove(&address) else {
            return Err(DeviceError::Invalid { call: DeviceCall::Free, address, size_bytes: 0 });
        };
        self.held_bytes = self.held_bytes.saturating_sub(size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        if self.reservations.len() >= RESERVATIONS_MAX {
            return Err(DeviceError::OutOfAddresses { requested_bytes: size_bytes });
        }
        let base = self.reservation_base();
        self.reservations.insert(base, size_bytes);
        Ok(base)
    }

    fn address_free(&mut self, address: u64, _size_bytes: u64) -> Result<(), DeviceError> {
        self.reservations.remove(&address);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        if self.next(EntryKind::SegmentMap).is_none() {
            return Err(self.refuse(DeviceCall::Create, size_bytes));
        }
        self.pieces += 1;
        Ok(PhysicalHandle(self.pieces))
    }

    // Memory is counted by the recorded maps, so nothing else needs books.

    fn release(&mut self, _handle: PhysicalHandle) -> Result<u64, DeviceError> {
        Ok(0)
    }

    fn map(&mut self, _address: u64, _handle: PhysicalHandle) -> Result<u64, DeviceError> {
        Ok(0)
    }

    fn unmap(&mut self, _address: u64, _size_bytes: u64) -> Result<u64, DeviceError> {
        Ok(0)
    }

    fn set_access(&mut self, _address: u64, _size_bytes: u64) -> Result<u64, DeviceError> {
        Ok(0)
    }

    fn memory_info(&self) -> MemoryInfo {
        let total_bytes = self.total_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES);
        MemoryInfo { free_bytes: total_bytes.saturating_sub(self.held_bytes), total_bytes }
    }
}
