//! A real NVIDIA GPU, through its driver.
//!
//! The driver is loaded when the first GPU is opened, so the same program runs where there is none.
//! What the driver gives out is entered in books of our own, and whatever those hold when a
//! [`Cuda`] is dropped goes back in the right order: mappings, handles, addresses, mallocs. So an
//! early return or a panic leaves nothing behind; what a killed process held the driver takes back.
//!
//! ```text
//!   Cuda ─────── Books        sizes, reservations, mappings, pieces
//!     │
//!     ├─ CudaTouch ── Stream, Module     fills, checks and copies, by two kernels
//!     ├─ CudaEvents           "has what was started on that stream ended?"
//!     │
//!     └──── Arc<Context> ──── the primary context, released when the last of these is gone
//! ```
//!
//! The driver is spoken to in `driver.rs`, `stream.rs`, `events.rs` and `capture.rs` alone; there lies
//! all the unsafe code but the promise of `touch.rs` that its kernels take what it gives them.
//!
//! Two rules of CUDA's hold here as they do everywhere: `free` waits until the GPU has nothing left
//! to do; `unmap` does not, and taking memory away from under a running kernel makes it fail. Whoever
//! unmaps waits first ([`Cuda::synchronize`], [`CudaEvents`]), as the allocators' contexts do.

mod books;
mod capture;
mod driver;
mod events;
mod stream;
mod touch;

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{
    Device, DeviceCall, DeviceError, Extent, GRANULARITY_BYTES, MemoryInfo, PhysicalHandle,
};
use books::Books;
pub use capture::Relaxed;
use driver::{Code, Context, OUT_OF_MEMORY};
pub use events::{CudaEvents, EventId};
pub use touch::CudaTouch;

/// Where the kernel module of the driver says its version.
const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// Why a GPU cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library could not be loaded.
    #[error(
        "no NVIDIA driver here: libcuda.so.1 cannot be loaded; install the driver, or add its \
         folder to LD_LIBRARY_PATH; the simulated device needs none"
    )]
    NoDriver,
    /// The driver knows no GPU.
    #[error(
        "the NVIDIA driver finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES; the \
         simulated device needs none"
    )]
    NoGpu,
    /// There is no GPU of that number.
    #[error("there is no GPU {ordinal}: {}", numbers(*.count))]
    NoSuchGpu {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// Physical memory does not come in units that we can work with.
    #[error(
        "GPU {ordinal} hands out physical memory in units of {granularity_bytes} bytes; the \
         allocators here need units that divide {GRANULARITY_BYTES}"
    )]
    Granularity {
        /// The GPU.
        ordinal: u32,
        /// Its unit in bytes.
        granularity_bytes: u64,
    },
    /// The driver refused a call.
    #[error("the NVIDIA driver answered {call} with error {code}{}", meaning(*.code))]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's number for the error (`CUresult`).
        code: u32,
    },
}

/// Which GPUs there are.
fn numbers(count: u32) -> String {
    match count {
        1 => "the only one is GPU 0".to_owned(),
        _ => format!("there are {count}, 0 to {}", count.saturating_sub(1)),
    }
}

/// What the errors mean that a user can do something about.
fn meaning(code: u32) -> &'static str {
    match code {
        2 => " (out of memory: is another program using the GPU?)",
        3 => " (not initialized)",
        34 => " (this libcuda is a stub for linking, not a driver)",
        46 => " (the GPU is in use by a program that lets no other in)",
        101 => " (no such GPU)",
        700 => " (an address that is not mapped)",
        803 => " (the driver's library and its kernel module are of different versions)",
        _ => "",
    }
}

/// What a GPU says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// Its name: `NVIDIA H200`.
    pub name: String,
    /// The driver: `580.159.04` where the system says, else the version of CUDA it speaks.
    pub driver: String,
    /// Physical memory in bytes, as `cuMemGetInfo` reports it.
    pub total_bytes: u64,
    /// The unit of physical memory in bytes; 0 on a GPU without virtual memory calls.
    pub granularity_bytes: u64,
    /// Its number in this process.
    pub ordinal: u32,
    /// Compute capability: major, minor.
    pub compute_capability: (u32, u32),
}

/// An NVIDIA GPU, as a device.
///
/// Answers of the driver become [`DeviceError`]s: out of memory is
/// [`OutOfMemory`](DeviceError::OutOfMemory) with what the driver then reports as free, whichever
/// call ran into it (a map can, for its page tables); for addresses it is
/// [`OutOfAddresses`](DeviceError::OutOfAddresses). A driver names no largest number of mappings, so
/// [`TooManyMappings`](DeviceError::TooManyMappings) does not occur. All else is
/// [`Driver`](DeviceError::Driver) with the driver's number. What the books know to make no sense is
/// [`Invalid`](DeviceError::Invalid), and the driver is not asked.
pub struct Cuda {
    context: Arc<Context>,
    info: CudaInfo,
    books: Books,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Cuda {
    /// How many GPUs there are.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoGpu`].
    pub fn device_count() -> Result<u32, CudaError> {
        driver::start()
    }

    /// Opens GPU `ordinal`, counted from 0 as CUDA counts them in this process.
    ///
    /// # Errors
    /// [`CudaError`]: no driver, no such GPU, or one that does not work.
    pub fn open(ordinal: u32) -> Result<Cuda, CudaError> {
        let count = driver::start()?;
        if ordinal >= count {
            return Err(CudaError::NoSuchGpu { ordinal, count });
        }
        let context = Context::retain(ordinal)?;
        let info = describe(&context, ordinal)?;
        Ok(Cuda { context, info, books: Books::default() })
    }

    /// What the GPU says of itself.
    pub fn info(&self) -> &CudaInfo {
        &self.info
    }

    /// Waits until everything that was started on the GPU by this process has ended.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also with the error of what had been started.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let call = "cuCtxSynchronize";
        self.context.synchronize().map_err(|code| CudaError::Driver { call, code })
    }

    /// Refuses virtual memory calls on a GPU that has none.
    fn check_virtual(&self, call: DeviceCall) -> Result<(), DeviceError> {
        match self.info.granularity_bytes {
            0 => Err(DeviceError::Driver { call, code: NOT_SUPPORTED }),
            _ => Ok(()),
        }
    }

    /// What an answer of the driver means.
    #[cold]
    fn refusal(&self, call: DeviceCall, requested_bytes: u64, code: Code) -> DeviceError {
        match (code, call) {
            (OUT_OF_MEMORY, DeviceCall::AddressReserve) => {
                DeviceError::OutOfAddresses { requested_bytes }
            }
            (OUT_OF_MEMORY, _) => {
                let free_bytes = self.memory_info().free_bytes;
                DeviceError::OutOfMemory { call, requested_bytes, free_bytes }
            }
            _ => DeviceError::Driver { call, code },
        }
    }
}

/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Code = 801;

/// Asks a GPU for what it is.
fn describe(context: &Context, ordinal: u32) -> Result<CudaInfo, CudaError> {
    let asked = |call| move |code| CudaError::Driver { call, code };
    let attribute = |attribute| context.attribute(attribute).map_err(asked("cuDeviceGetAttribute"));
    let virtual_memory =
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? != 0;
    let granularity_bytes = if virtual_memory {
        context.granularity().map_err(asked("cuMemGetAllocationGranularity"))?
    } else {
        0
    };
    if virtual_memory
        && (granularity_bytes == 0 || !GRANULARITY_BYTES.is_multiple_of(granularity_bytes))
    {
        return Err(CudaError::Granularity { ordinal, granularity_bytes });
    }
    let capability = [
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    let [major, minor] = capability.map(|number| number.max(0) as u32);
    let (_, total_bytes) = context.memory_info().map_err(asked("cuMemGetInfo"))?;
    let driver = match module_version() {
        Some(version) => version,
        None => {
            let (major, minor) = driver::cuda_version()?;
            format!("CUDA {major}.{minor}")
        }
    };
    Ok(CudaInfo {
        name: context.name().map_err(asked("cuDeviceGetName"))?,
        driver,
        total_bytes,
        granularity_bytes,
        ordinal,
        compute_capability: (major, minor),
    })
}

/// The version of the driver's kernel module, where the system says it.
fn module_version() -> Option<String> {
    version_in(&std::fs::read_to_string(VERSION_FILE).ok()?).map(str::to_owned)
}

/// The first word of digits and dots in the module's line: `580.159.04`.
fn version_in(text: &str) -> Option<&str> {
    let version = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        let is_number =
            |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        parts.len() > 1 && parts.iter().all(is_number)
    };
    text.lines().next()?.split_whitespace().find(version)
}

impl Device for Cuda {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self
            .context
            .malloc(size_bytes)
            .map_err(|code| self.refusal(DeviceCall::Malloc, size_bytes, code))?;
        self.books.enter_malloc(address, size_bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let size_bytes = self.books.malloc_bytes(address)?;
        self.context
            .free(address)
            .map_err(|code| self.refusal(DeviceCall::Free, size_bytes, code))?;
        self.books.strike_malloc(address);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::AddressReserve;
        self.check_virtual(call)?;
        let address = self
            .context
            .address_reserve(size_bytes, GRANULARITY_BYTES)
            .map_err(|code| self.refusal(call, size_bytes, code))?;
        self.books.enter_reservation(address, size_bytes);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.books.check_address_free(address, size_bytes)?;
        self.context
            .address_free(address, size_bytes)
            .map_err(|code| self.refusal(DeviceCall::AddressFree, size_bytes, code))?;
        self.books.strike_reservation(address);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let call = DeviceCall::Create;
        self.check_virtual(call)?;
        if size_bytes == 0 || !size_bytes.is_multiple_of(GRANULARITY_BYTES) {
            return Err(DeviceError::Invalid { call, address: 0, size_bytes });
        }
        let raw =
            self.context.create(size_bytes).map_err(|code| self.refusal(call, size_bytes, code))?;
        Ok(self.books.enter_piece(raw, size_bytes))
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let call = DeviceCall::Release;
        let piece = self.books.held(call, 0, handle)?;
        self.context
            .release(piece.raw)
            .map_err(|code| self.refusal(call, piece.size_bytes, code))?;
        self.books.strike_handle(handle);
        Ok(piece.size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let call = DeviceCall::Map;
        let piece = self.books.held(call, address, handle)?;
        self.books.check_map(address, piece.size_bytes)?;
        self.context
            .map(address, piece.size_bytes, piece.raw)
            .map_err(|code| self.refusal(call, piece.size_bytes, code))?;
        self.books.enter_mapping(address, handle);
        Ok(piece.size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::Unmap;
        let pieces = self.books.tiles(call, address, size_bytes)?;
        self.context
            .unmap(address, size_bytes)
            .map_err(|code| self.refusal(call, size_bytes, code))?;
        self.books.strike_mappings(address, size_bytes);
        Ok(pieces)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let call = DeviceCall::SetAccess;
        let pieces = self.books.tiles(call, address, size_bytes)?;
        self.context
            .set_access(address, size_bytes)
            .map_err(|code| self.refusal(call, size_bytes, code))?;
        Ok(pieces)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.books.backing(address, size_bytes, visit)
    }

    /// Free and total bytes; none are free if the driver no longer answers.
    fn memory_info(&self) -> MemoryInfo {
        let (free_bytes, total_bytes) =
            self.context.memory_info().unwrap_or((0, self.info.total_bytes));
        MemoryInfo { free_bytes, total_bytes }
    }
}

impl Drop for Cuda {
    /// Gives everything back that is still held. Errors are passed over: after a fault of a kernel,
    /// or when the process ends, the driver refuses every call and takes all of it back by itself.
    fn drop(&mut self) {
        let remains = self.books.close();
        if !remains.mappings.is_empty() {
            let _ = self.context.synchronize();
        }
        for (address, size_bytes) in remains.mappings {
            let _ = self.context.unmap(address, size_bytes);
        }
        for handle in remains.handles {
            let _ = self.context.release(handle);
        }
        for (address, size_bytes) in remains.reservations {
            let _ = self.context.address_free(address, size_bytes);
        }
        for address in remains.mallocs {
            let _ = self.context.free(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_line_of_either_kernel_module() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n\
                      GCC version:  gcc version 12.3.0\n";
        assert_eq!(version_in(closed), Some("535.104.05"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build";
        assert_eq!(version_in(open), Some("580.95"));
        assert_eq!(version_in("NVRM version: none. of . these 12 .5 6."), None);
        assert_eq!(version_in(""), None);
    }

    #[test]
    fn errors_are_one_line_that_says_what_to_do() {
        let text = |error: CudaError| error.to_string();
        assert_eq!(
            text(CudaError::NoSuchGpu { ordinal: 1, count: 1 }),
            "there is no GPU 1: the only one is GPU 0"
        );
        let call = "cuDevicePrimaryCtxRetain";
        assert_eq!(
            text(CudaError::Driver { call, code: 46 }),
            "the NVIDIA driver answered cuDevicePrimaryCtxRetain with error 46 (the GPU is in use by \
             a program that lets no other in)"
        );
        assert_eq!(
            text(CudaError::Driver { call, code: 999 }),
            "the NVIDIA driver answered cuDevicePrimaryCtxRetain with error 999"
        );
    }
}
