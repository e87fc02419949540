//! What an allocator may ask of a GPU.
//!
//! [`Device`] is the driver's own vocabulary and nothing more: `cudaMalloc` and `cudaFree`, and the
//! virtual memory calls (reserve addresses, create physical memory, map, set access). The same
//! allocator code runs on [`sim`] and, later, on a real GPU. Whatever cuts across devices is a
//! device around a device:
//!
//! ```text
//!   allocator ──> Counting<D>   counts and costs every call
//!                     └──> Faulty<D>   refuses the calls that a trace names
//!                              └──> Sim   capacity, addresses
//! ```

mod counting;
mod faulty;
mod profile;
pub mod sim;

pub use counting::{CallCounts, Counting, RefusedCall};
pub use faulty::Faulty;
pub use profile::{CostProfile, ProfileError};
pub use sim::Sim;

pub use crate::trace::DeviceCall;

/// The unit in which a driver hands out physical memory: 2 MiB.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

/// Physical memory obtained with [`Device::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalHandle(pub u64);

/// Why a device refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No physical memory is left for this call.
    #[error("the device has no {requested_bytes} bytes left for {call:?}: {free_bytes} are free")]
    OutOfMemory {
        /// The refused call.
        call: DeviceCall,
        /// Bytes asked for.
        requested_bytes: u64,
        /// Physical bytes that were free.
        free_bytes: u64,
    },
    /// No address range is left.
    #[error("no address range of {requested_bytes} bytes is left")]
    OutOfAddresses {
        /// Bytes asked for.
        requested_bytes: u64,
    },
    /// The process has as many mappings as it may have.
    #[error("{mappings_max} mappings are there already, the most that the device allows")]
    TooManyMappings {
        /// The most that may be there.
        mappings_max: u64,
    },
    /// The call makes no sense: an address that was never handed out, a range mapped twice.
    #[error("invalid {call:?} of address {address:#x}, {size_bytes} bytes")]
    Invalid {
        /// The refused call.
        call: DeviceCall,
        /// The address given.
        address: u64,
        /// The size given.
        size_bytes: u64,
    },
}

/// What a driver offers.
///
/// Addresses are plain integers. All sizes are bytes; sizes of virtual memory calls are multiples
/// of [`GRANULARITY_BYTES`].
pub trait Device {
    /// `cudaMalloc`: physical memory with an address of its own.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the capacity does not hold it,
    /// [`DeviceError::OutOfAddresses`].
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError>;

    /// `cudaFree` of an address that [`Self::malloc`] gave. Returns the size it was given for.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if it did not.
    fn free(&mut self, address: u64) -> Result<u64, DeviceError>;

    /// Reserves a range of addresses, without memory behind it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfAddresses`].
    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError>;

    /// Gives a reserved range back. Nothing may be mapped in it.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`].
    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError>;

    /// Creates physical memory, without an address.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError>;

    /// Drops the handle. The memory returns when its last mapping is gone too. Returns its size.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`].
    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError>;

    /// Maps the whole of a physical piece at an address inside a reserved range. The same piece may
    /// be mapped at several addresses. Returns its size.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] outside reservations or over another mapping,
    /// [`DeviceError::TooManyMappings`].
    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError>;

    /// Removes all mappings in the range; it must begin and end at borders of mappings. Returns how
    /// many they were.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`].
    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError>;

    /// Makes a mapped range readable and writable. Returns how many mappings it consists of.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if part of it is not mapped.
    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError>;

    /// [`Self::create`], `count` times. Those that came before a failure are in `handles` too.
    ///
    /// # Errors
    /// As [`Self::create`].
    fn create_each(
        &mut self,
        piece_bytes: u64,
        count: u64,
        handles: &mut Vec<PhysicalHandle>,
    ) -> Result<(), DeviceError> {
        create_one_by_one(self, piece_bytes, count, handles)
    }

    /// Maps pieces of `piece_bytes` each, one behind the other, and makes each accessible by a call
    /// of its own before the next is mapped. Adds to `mapped` how many were mapped, also if it
    /// fails in between.
    ///
    /// # Errors
    /// As [`Self::map`] and [`Self::set_access`].
    fn map_each(
        &mut self,
        address: u64,
        piece_bytes: u64,
        handles: &[PhysicalHandle],
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        map_one_by_one(self, address, piece_bytes, handles, mapped)
    }

    /// What physical memory lies behind a range, in the order of its addresses, from the device's
    /// own books. Says whether there is memory behind all of it. A device that keeps no such books
    /// knows no memory but what is at the address.
    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        visit(Extent { piece: None, offset_bytes: address, size_bytes });
        true
    }

    /// Free and total physical bytes, as `cudaMemGetInfo` reports them.
    fn memory_info(&self) -> MemoryInfo;
}

/// [`Device::create_each`] for a device that has to see every call.
fn create_one_by_one<D: Device + ?Sized>(
    device: &mut D,
    piece_bytes: u64,
    count: u64,
    handles: &mut Vec<PhysicalHandle>,
) -> Result<(), DeviceError> {
    for _ in 0..count {
        handles.push(device.create(piece_bytes)?);
    }
    Ok(())
}

/// [`Device::map_each`] for a device that has to see every call.
fn map_one_by_one<D: Device + ?Sized>(
    device: &mut D,
    address: u64,
    piece_bytes: u64,
    handles: &[PhysicalHandle],
    mapped: &mut usize,
) -> Result<(), DeviceError> {
    let mut at = address;
    for &handle in handles {
        device.map(at, handle)?;
        *mapped += 1;
        device.set_access(at, piece_bytes)?;
        at += piece_bytes;
    }
    Ok(())
}

/// A stretch of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// The piece it lies in; none for memory of [`Device::malloc`], which has but one address.
    pub piece: Option<PhysicalHandle>,
    /// Where it begins in the piece; without a piece, its address.
    pub offset_bytes: u64,
    /// Its size.
    pub size_bytes: u64,
}

/// Free and total memory of a device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can still be obtained.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
}
