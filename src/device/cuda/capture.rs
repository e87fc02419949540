//! Calls for memory while some stream of the program captures a graph.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cudarc::driver::sys;

use super::Cuda;

/// While this lives, the driver takes calls for memory on this thread though a graph is captured, as
/// none of them concerns a stream: so PyTorch does it. The mode is the thread's, and so is this.
#[derive(Debug)]
pub struct Relaxed {
    /// The mode that the thread had before.
    mode: sys::CUstreamCaptureMode,
    /// Not to be sent to another thread.
    _of_thread: PhantomData<*const ()>,
}

impl Cuda {
    /// Lets the driver take calls on this thread while a graph is captured.
    pub fn relax(&self) -> Relaxed {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver, which is loaded as a GPU is open, swaps this value and the thread's own.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Relaxed { mode, _of_thread: PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.mode) };
    }
}
