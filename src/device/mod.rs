//! What an allocator may ask of a GPU.
//!
//! [`Device`] is the driver's own vocabulary and nothing more: `cudaMalloc` and `cudaFree`, and the
//! virtual memory calls (reserve addresses, create physical memory, map, set access). The same
//! allocator code runs on [`sim`] and on a real GPU ([`cuda`]). Whatever cuts across devices is a
//! device around a device:
//!
//! ```text
//!   allocator ──> Counting<D>   counts and costs every call
//!                     └──> Faulty<D>   refuses the calls that a trace names
//!                              ├──> Sim                          capacity, addresses
//!                              └──> Limited<D>                   refuses what exceeds a capacity
//!                                      └──> Measured<D>          what a clock says of every call
//!                                              └──> Cuda         the driver of an NVIDIA GPU
//! ```
//!
//! What is in the memory is not a device's business: [`Touch`] writes it, checks it and moves it.
//! What a call costs stands in a [`CostProfile`], which [`calibrate`] makes on a real GPU.

pub mod calibrate;
mod charge;
mod counting;
pub mod cuda;
mod faulty;
mod limited;
mod measured;
mod meter;
mod profile;
pub mod sim;
mod warm_up;

pub use counting::{CallCounts, Counting, RefusedCall};
pub use faulty::Faulty;
pub use limited::Limited;
pub use measured::{CallTime, Measured, MeasuredCalls};
pub(crate) use meter::CostMeter;
pub use profile::{CostPoints, CostProfile, ProfileError};
pub use sim::Sim;
pub use warm_up::{WARM_UP_TIME, warm_up};

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
    /// The driver of a real GPU answered with an error that is neither of the above.
    #[error("the driver answered {call:?} with error {code}")]
    Driver {
        /// The refused call.
        call: DeviceCall,
        /// The driver's number for the error (`CUresult`).
        code: u32,
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

impl DeviceError {
    /// Whether nothing works on the GPU any more until the process ends: the errors of which CUDA's
    /// description of `CUresult` says that all further work returns the same.
    pub fn is_lasting(&self) -> bool {
        // ECC, NVLink; illegal address, timeout, destroyed context, assert; faults of instructions
        // and the hardware, a failed launch; a leak of tensor memory.
        let lasts = |code| matches!(code, 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 721);
        matches!(*self, DeviceError::Driver { code, .. } if lasts(code))
    }
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

/// What is in a device's memory: written, checked and moved. Serves checks of allocators on real
/// hardware. All calls have taken effect when they return.
pub trait Touch {
    /// Writes a pattern that hangs on `seed` and on the place in the range, so that two ranges of
    /// different seeds that share memory, and two parts of one range that do, show.
    ///
    /// The range begins at a multiple of 4 bytes, and what it has beyond a multiple of 4 is written
    /// up to the next.
    ///
    /// # Errors
    /// [`TouchError`] if the hardware refuses, as for a range that is not mapped; nothing works
    /// after that.
    fn fill(&mut self, address: u64, size_bytes: u64, seed: u64) -> Result<(), TouchError>;

    /// Reads the pattern that [`Self::fill`] wrote with this address, size and seed. Gives where and
    /// how it differs, or nothing if all of it is there.
    ///
    /// # Errors
    /// As [`Self::fill`].
    fn check(
        &mut self,
        address: u64,
        size_bytes: u64,
        seed: u64,
    ) -> Result<Option<Mismatch>, TouchError>;

    /// Copies memory of the device into `to`.
    ///
    /// # Errors
    /// As [`Self::fill`].
    fn copy_to_host(&mut self, address: u64, to: &mut [u8]) -> Result<(), TouchError>;

    /// Copies `from` into memory of the device.
    ///
    /// # Errors
    /// As [`Self::fill`].
    fn copy_from_host(&mut self, address: u64, from: &[u8]) -> Result<(), TouchError>;
}

/// Memory does not hold what was written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Words of 4 bytes that differ.
    pub words: u64,
    /// Where the first of them lies, in bytes from the beginning of the range.
    pub offset_bytes: u64,
    /// The word that was written there.
    pub expected: u32,
    /// The word that is there.
    pub found: u32,
}

/// The hardware could not read or write memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the GPU could not {what} {size_bytes} bytes at {address:#x}: driver error {code}")]
pub struct TouchError {
    /// `write`, `read`.
    pub what: &'static str,
    /// First address of the range.
    pub address: u64,
    /// Its size.
    pub size_bytes: u64,
    /// The driver's number for the error (`CUresult`); 700 is an address that is not mapped.
    pub code: u32,
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
