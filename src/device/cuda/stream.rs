//! What runs on the GPU: a stream, and the kernels of a module.
//!
//! Both are owned: dropped, they go. A launch or a copy that fails shows when the stream is waited
//! for, as CUDA has it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Code, Context, done};

/// Threads of a block.
const BLOCK_THREADS: u32 = 256;

/// A stream of our own, which waits for no other.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a stream is a handle that any thread may use; the driver locks inside.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, Code> {
        let _entered = context.enter()?;
        let mut raw: sys::CUstream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one pointer.
        done(unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream { context: Arc::clone(context), raw })
    }

    /// Waits until everything on the stream has ended.
    pub(super) fn synchronize(&self) -> Result<(), Code> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives as long as self.
        done(unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Copies from the GPU and waits for it.
    pub(super) fn copy_to_host(&self, address: u64, to: &mut [u8]) -> Result<(), Code> {
        {
            let _entered = self.context.enter()?;
            let target = to.as_mut_ptr().cast::<c_void>();
            // SAFETY: `to` is borrowed until the copy has ended, which is waited for below; even a
            // failed wait comes after the driver has let go of memory that is not pinned.
            done(unsafe { sys::cuMemcpyDtoHAsync_v2(target, address, to.len(), self.raw) })?;
        }
        self.synchronize()
    }

    /// Copies to the GPU and waits for it.
    pub(super) fn copy_from_host(&self, address: u64, from: &[u8]) -> Result<(), Code> {
        {
            let _entered = self.context.enter()?;
            let source = from.as_ptr().cast::<c_void>();
            // SAFETY: `from` is borrowed until the copy has ended, as above.
            done(unsafe { sys::cuMemcpyHtoDAsync_v2(address, source, from.len(), self.raw) })?;
        }
        self.synchronize()
    }

    /// Starts a kernel of a module on so many blocks, with arguments of 8 bytes each.
    pub(super) fn launch<const N: usize>(
        &self,
        kernel: Kernel<N>,
        blocks: u32,
        arguments: [u64; N],
    ) -> Result<(), Code> {
        let _entered = self.context.enter()?;
        let mut pointers = arguments.each_ref().map(|value| ptr::from_ref(value).cast_mut().cast());
        let (blocks, threads) = (blocks.max(1), BLOCK_THREADS);
        // SAFETY: by `Module::kernel` it takes N arguments of 8 bytes, which the driver copies
        // before the call returns. What it reads and writes is memory of the GPU; a wrong address
        // is the GPU's error 700.
        done(unsafe {
            sys::cuLaunchKernel(
                kernel.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.raw,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created by `new`, destroyed once. An error means that the driver has let go.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A kernel with `N` arguments of 8 bytes each. Lives as long as its module.
#[derive(Clone, Copy)]
pub(super) struct Kernel<const N: usize> {
    raw: sys::CUfunction,
}

/// Kernels that the driver compiled for its GPU.
pub(super) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: a module is a handle that any thread may use; the driver locks inside.
unsafe impl Send for Module {}

impl Module {
    /// Compiles a text of PTX.
    pub(super) fn compile(context: &Arc<Context>, text: &CString) -> Result<Module, Code> {
        let _entered = context.enter()?;
        let mut raw: sys::CUmodule = ptr::null_mut();
        // SAFETY: the text ends with 0, which is how the driver finds its end.
        done(unsafe { sys::cuModuleLoadData(&mut raw, text.as_ptr().cast::<c_void>()) })?;
        Ok(Module { context: Arc::clone(context), raw })
    }

    /// The kernel of that name, which takes `N` arguments of 8 bytes.
    ///
    /// # Safety
    /// The module's text must say so too: the driver reads as many arguments from where
    /// [`Stream::launch`] puts `N` as the kernel takes.
    pub(super) unsafe fn kernel<const N: usize>(&self, name: &CStr) -> Result<Kernel<N>, Code> {
        let _entered = self.context.enter()?;
        let mut raw: sys::CUfunction = ptr::null_mut();
        // SAFETY: the module lives as long as self; the driver writes one pointer.
        done(unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) })?;
        Ok(Kernel { raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded by `compile`, unloaded once. An error means that the driver has let go.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

// SAFETY: a kernel is a handle that any thread may use.
unsafe impl<const N: usize> Send for Kernel<N> {}

/// Blocks that give every word of a range a thread, but no more than keep a GPU busy.
pub(super) fn blocks_for(words: u64, blocks_max: u32) -> u32 {
    let blocks = words.div_ceil(u64::from(BLOCK_THREADS));
    u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, blocks_max.max(1))
}
