//! The driver's calls, each as a function that is safe to call.
//!
//! A [`Context`] keeps the primary context of a GPU,
//! the one that PyTorch and every program of the CUDA runtime use, so that memory obtained here is
//! theirs to use. It is never reset.
//!
//! A call makes the context current on its thread if another one is, and gives the thread back the
//! one it had: whoever lives in the same process finds its own GPU current afterwards. A thread that
//! had none keeps that of GPU 0, so that calls of a program of our own cost a comparison and no more:
//! the CUDA runtime would have taken GPU 0 too. Of another GPU nothing stays, as the runtime would take
//! it for the one that the program chose on that thread.
//!
//! Errors are the driver's numbers (`CUresult`); what they mean is decided above.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::CudaError;

/// A number of the driver for what went wrong (`CUresult`).
pub(super) type Code = u32;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: Code = 100;
/// `CUDA_ERROR_NOT_READY`: what was asked for has not ended.
pub(super) const NOT_READY: Code = 600;

/// Longest name of a GPU that is asked for, in bytes.
const NAME_BYTES: usize = 128;

/// What the driver answered, as a result.
pub(super) fn done(answer: sys::CUresult) -> Result<(), Code> {
    match answer {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        refused => Err(refused as Code),
    }
}

/// An error of a call that opens a GPU.
fn refused(call: &'static str) -> impl Fn(Code) -> CudaError {
    move |code| CudaError::Driver { call, code }
}

/// Loads the driver and says how many GPUs it knows.
pub(super) fn start() -> Result<u32, CudaError> {
    // SAFETY: loading the driver runs its initialisers, as in every program that uses CUDA.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: the library is there; no flags are defined for this call.
    match done(unsafe { sys::cuInit(0) }) {
        Ok(()) => {}
        Err(NO_DEVICE) => return Err(CudaError::NoGpu),
        Err(code) => return Err(refused("cuInit")(code)),
    }
    let mut count: c_int = 0;
    // SAFETY: the driver writes one integer.
    done(unsafe { sys::cuDeviceGetCount(&mut count) }).map_err(refused("cuDeviceGetCount"))?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(CudaError::NoGpu),
    }
}

/// The version of CUDA that the driver speaks: major and minor.
pub(super) fn cuda_version() -> Result<(u32, u32), CudaError> {
    let mut version: c_int = 0;
    // SAFETY: the driver writes one integer.
    done(unsafe { sys::cuDriverGetVersion(&mut version) })
        .map_err(refused("cuDriverGetVersion"))?;
    let version = version.max(0) as u32;
    Ok((version / 1000, version % 1000 / 10))
}

/// The primary context of one GPU, held until the last of its users is gone.
pub(super) struct Context {
    ordinal: c_int,
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context is a handle that any thread may make current; the driver locks inside.
unsafe impl Send for Context {}
// SAFETY: as above; no call changes the handle.
unsafe impl Sync for Context {}

/// A call under way on this thread; ends by giving the thread back its own context.
pub(super) struct Entered {
    /// What was current before, which may be null; nothing if ours may stay.
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread a moment ago. If it is gone by now, the driver
            // says so and there is nothing to give back. Null leaves the thread without any.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

impl Context {
    /// Retains the primary context of GPU `ordinal`; the driver has been started.
    pub(super) fn retain(ordinal: u32) -> Result<Arc<Context>, CudaError> {
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device: sys::CUdevice = 0;
        // SAFETY: the driver writes one integer.
        done(unsafe { sys::cuDeviceGet(&mut device, ordinal) }).map_err(refused("cuDeviceGet"))?;
        let mut raw: sys::CUcontext = ptr::null_mut();
        // SAFETY: the device is the driver's; it writes one pointer.
        done(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })
            .map_err(refused("cuDevicePrimaryCtxRetain"))?;
        Ok(Arc::new(Context { ordinal, device, raw }))
    }

    /// Makes the context current for as long as the answer lives.
    pub(super) fn enter(&self) -> Result<Entered, Code> {
        let mut current: sys::CUcontext = ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        done(unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current == self.raw {
            return Ok(Entered { before: None });
        }
        // SAFETY: the context is retained as long as self lives.
        done(unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        let stays = current.is_null() && self.ordinal == 0;
        Ok(Entered { before: (!stays).then_some(current) })
    }

    /// The name that the driver gives the GPU.
    pub(super) fn name(&self) -> Result<String, Code> {
        let mut name = [0; NAME_BYTES];
        // SAFETY: the driver writes at most so many bytes, the last of them 0.
        done(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int, self.device) })?;
        let bytes = name.map(|byte| byte as u8);
        let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// An attribute of the GPU.
    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, Code> {
        let mut value: c_int = 0;
        // SAFETY: the driver writes one integer.
        done(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) })?;
        Ok(value)
    }

    /// The smallest unit of physical memory in bytes.
    pub(super) fn granularity(&self) -> Result<u64, Code> {
        let _entered = self.enter()?;
        let mut bytes: usize = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the properties outlive the call; the driver writes one integer.
        done(unsafe {
            sys::cuMemGetAllocationGranularity(&mut bytes, &self.properties(), minimum)
        })?;
        Ok(bytes as u64)
    }

    /// Free and total physical bytes.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), Code> {
        let _entered = self.enter()?;
        let (mut free, mut total): (usize, usize) = (0, 0);
        // SAFETY: the driver writes two integers.
        done(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits until everything that was started on the GPU in this context has ended.
    pub(super) fn synchronize(&self) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a context is current.
        done(unsafe { sys::cuCtxSynchronize() })
    }

    /// `cuMemAlloc`.
    pub(super) fn malloc(&self, size_bytes: u64) -> Result<u64, Code> {
        let _entered = self.enter()?;
        let mut address: sys::CUdeviceptr = 0;
        // SAFETY: the driver writes one integer.
        done(unsafe { sys::cuMemAlloc_v2(&mut address, size_bytes as usize) })?;
        Ok(address)
    }

    /// `cuMemFree`.
    pub(super) fn free(&self, address: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a number to the driver, which knows its addresses; no memory of the host's.
        done(unsafe { sys::cuMemFree_v2(address) })
    }

    /// `cuMemAddressReserve`, wherever the driver likes.
    pub(super) fn address_reserve(&self, size_bytes: u64, align_bytes: u64) -> Result<u64, Code> {
        let _entered = self.enter()?;
        let mut address: sys::CUdeviceptr = 0;
        let (size, align) = (size_bytes as usize, align_bytes as usize);
        // SAFETY: the driver writes one integer.
        done(unsafe { sys::cuMemAddressReserve(&mut address, size, align, 0, 0) })?;
        Ok(address)
    }

    /// `cuMemAddressFree`.
    pub(super) fn address_free(&self, address: u64, size_bytes: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a range of the GPU's addresses, which the driver checks.
        done(unsafe { sys::cuMemAddressFree(address, size_bytes as usize) })
    }

    /// `cuMemCreate`: memory of this GPU.
    pub(super) fn create(&self, size_bytes: u64) -> Result<u64, Code> {
        let _entered = self.enter()?;
        let mut handle: sys::CUmemGenericAllocationHandle = 0;
        let properties = self.properties();
        // SAFETY: the properties outlive the call; the driver writes one integer.
        done(unsafe { sys::cuMemCreate(&mut handle, size_bytes as usize, &properties, 0) })?;
        Ok(handle)
    }

    /// `cuMemRelease`.
    pub(super) fn release(&self, handle: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a handle that `create` gave and that was not released: the books keep count.
        done(unsafe { sys::cuMemRelease(handle) })
    }

    /// `cuMemMap`, the whole of a handle.
    pub(super) fn map(&self, address: u64, size_bytes: u64, handle: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a handle that is held, at a free range of a reservation: the books say so.
        done(unsafe { sys::cuMemMap(address, size_bytes as usize, 0, handle, 0) })
    }

    /// `cuMemUnmap`.
    pub(super) fn unmap(&self, address: u64, size_bytes: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        // SAFETY: a range of whole mappings: the books say so. That no kernel uses it is what the
        // caller of `Device::unmap` promises; otherwise the kernel fails, not the host.
        done(unsafe { sys::cuMemUnmap(address, size_bytes as usize) })
    }

    /// `cuMemSetAccess`: this GPU may read and write.
    pub(super) fn set_access(&self, address: u64, size_bytes: u64) -> Result<(), Code> {
        let _entered = self.enter()?;
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description, which outlives the call.
        done(unsafe { sys::cuMemSetAccess(address, size_bytes as usize, &access, 1) })
    }

    /// Where memory is created and who may use it: this GPU.
    fn location(&self) -> sys::CUmemLocation {
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        sys::CUmemLocation { type_, id: self.ordinal }
    }

    fn properties(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: ptr::null_mut::<c_void>(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`, released once here. An error means that the driver is
        // shutting down and has let go of it already.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
