//! Patterns in the GPU's memory, by two small kernels.
//!
//! The kernels are a text of PTX (`kernels.ptx`) that the driver compiles for whatever GPU it has;
//! so no compiler of CUDA's is needed, here or on the user's machine. Seeds are mixed before they
//! become keys: ranges of seeds 1 and 2 have nothing in common.
//!
//! ```text
//!   fill    word[i] = mix(key, i)                      for every word of the range
//!   check   words that differ, smallest such i   ──>   result (16 bytes on the GPU) ──> Mismatch
//! ```
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::driver::{Code, Context};
use super::stream::{Kernel, Module, Stream, blocks_for};
use super::{Cuda, CudaError};
use crate::device::{Mismatch, Touch, TouchError};
use crate::units::random::Random;

/// Bytes of a word of the pattern.
const WORD_BYTES: u64 = 4;
/// What a check answers: how many words differ, and the smallest index of one.
const RESULT_BYTES: u64 = 16;
/// Blocks of a launch for each multiprocessor: as many as one holds at once.
const BLOCKS_EACH: u32 = 8;

/// Writes, checks and copies what is in a GPU's memory.
///
/// Works on a stream of its own that waits for no other: what the program has going on in the same
/// memory is the caller's business.
pub struct CudaTouch {
    context: Arc<Context>,
    stream: Stream,
    /// Where the kernels live.
    _module: Module,
    fill: Kernel<3>,
    check: Kernel<4>,
    /// Memory of the GPU for the answer of a check.
    result: u64,
    blocks_max: u32,
}

impl fmt::Debug for CudaTouch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaTouch").field("blocks_max", &self.blocks_max).finish_non_exhaustive()
    }
}

impl Cuda {
    /// What writes and checks the memory of this GPU. Goes on working after this [`Cuda`] is gone.
    /// Takes 16 bytes of the GPU's memory, which it asks the driver for itself.
    ///
    /// # Errors
    /// [`CudaError::Driver`], as if the driver cannot compile the kernels (222: it is older than
    /// CUDA 11.0).
    pub fn toucher(&self) -> Result<CudaTouch, CudaError> {
        CudaTouch::new(&self.context)
    }
}

impl CudaTouch {
    fn new(context: &Arc<Context>) -> Result<CudaTouch, CudaError> {
        let asked = |call| move |code| CudaError::Driver { call, code };
        let processors = context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(asked("cuDeviceGetAttribute"))?;
        let text = CString::new(include_str!("kernels.ptx")).unwrap_or_default();
        let module = Module::compile(context, &text).map_err(asked("cuModuleLoadData"))?;
        // SAFETY: in kernels.ptx it takes address, words and key, of 8 bytes each.
        let fill: Result<Kernel<3>, Code> = unsafe { module.kernel(c"fraglab_fill") };
        // SAFETY: it takes these and where its result goes, of 8 bytes too.
        let check: Result<Kernel<4>, Code> = unsafe { module.kernel(c"fraglab_check") };
        let fill = fill.map_err(asked("cuModuleGetFunction"))?;
        let check = check.map_err(asked("cuModuleGetFunction"))?;
        let stream = Stream::new(context).map_err(asked("cuStreamCreate"))?;
        let result = context.malloc(RESULT_BYTES).map_err(asked("cuMemAlloc"))?;
        Ok(CudaTouch {
            context: Arc::clone(context),
            stream,
            _module: module,
            fill,
            check,
            result,
            blocks_max: processors.max(1) as u32 * BLOCKS_EACH,
        })
    }

    fn write_pattern(&self, address: u64, words: u64, key: u64) -> Result<(), Code> {
        let blocks = blocks_for(words, self.blocks_max);
        self.stream.launch(self.fill, blocks, [address, words, key])?;
        self.stream.synchronize()
    }

    /// How many words differ and the smallest index of one, with the word found there.
    fn find_mismatch(
        &self,
        address: u64,
        words: u64,
        key: u64,
    ) -> Result<Option<(u64, u64, u32)>, Code> {
        let mut answer = [0; RESULT_BYTES as usize];
        answer[8..].fill(u8::MAX);
        self.stream.copy_from_host(self.result, &answer)?;
        let blocks = blocks_for(words, self.blocks_max);
        self.stream.launch(self.check, blocks, [address, words, key, self.result])?;
        self.stream.copy_to_host(self.result, &mut answer)?;
        let [differ, first] = [0, 8].map(|at| {
            let mut number = [0; 8];
            number.copy_from_slice(&answer[at..at + 8]);
            u64::from_le_bytes(number)
        });
        if differ == 0 {
            return Ok(None);
        }
        let mut found = [0; WORD_BYTES as usize];
        self.stream.copy_to_host(address + first * WORD_BYTES, &mut found)?;
        Ok(Some((differ, first, u32::from_le_bytes(found))))
    }
}

impl Touch for CudaTouch {
    fn fill(&mut self, address: u64, size_bytes: u64, seed: u64) -> Result<(), TouchError> {
        if size_bytes == 0 {
            return Ok(());
        }
        self.write_pattern(address, size_bytes.div_ceil(WORD_BYTES), key_of(seed))
            .map_err(|code| TouchError { what: "write", address, size_bytes, code })
    }

    fn check(
        &mut self,
        address: u64,
        size_bytes: u64,
        seed: u64,
    ) -> Result<Option<Mismatch>, TouchError> {
        if size_bytes == 0 {
            return Ok(None);
        }
        let key = key_of(seed);
        let mismatch = self
            .find_mismatch(address, size_bytes.div_ceil(WORD_BYTES), key)
            .map_err(|code| TouchError { what: "read", address, size_bytes, code })?;
        Ok(mismatch.map(|(words, first, found)| Mismatch {
            words,
            offset_bytes: first * WORD_BYTES,
            expected: word_at(key, first),
            found,
        }))
    }

    fn copy_to_host(&mut self, address: u64, to: &mut [u8]) -> Result<(), TouchError> {
        let size_bytes = to.len() as u64;
        self.stream.copy_to_host(address, to).map_err(|code| TouchError {
            what: "read",
            address,
            size_bytes,
            code,
        })
    }

    fn copy_from_host(&mut self, address: u64, from: &[u8]) -> Result<(), TouchError> {
        let size_bytes = from.len() as u64;
        self.stream.copy_from_host(address, from).map_err(|code| TouchError {
            what: "write",
            address,
            size_bytes,
            code,
        })
    }
}

impl Drop for CudaTouch {
    fn drop(&mut self) {
        // After a fault of a kernel the driver refuses every call and takes all of it back itself.
        let _ = self.context.free(self.result);
    }
}

/// The key of a seed: near seeds have far keys.
fn key_of(seed: u64) -> u64 {
    Random::new(seed).bits()
}

/// The word at an index of a range, as the kernels compute it.
fn word_at(key: u64, index: u64) -> u32 {
    let x = key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (x ^ (x >> 32)) as u32
}
