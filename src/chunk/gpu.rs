//! The GPU as the manager sees it: memory that is asked for block by block, and the one number that
//! the tracer reads.
//!
//! The engine puts a real allocator behind it; [`Exact`] stands for one without any overhead.

use crate::alloc::OutOfMemory;
use crate::units::{PoolId, SettingsId, StreamId};

/// A block on the GPU, by the name that the [`Gpu`] gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuBlock(pub u32);

/// Memory of a GPU behind an allocator.
///
/// The n-th call of [`Gpu::malloc`] is for block n of the derived trace, counted from 0, whether it
/// is granted or not.
pub trait Gpu {
    /// Asks for a block of `size_bytes`, never 0.
    ///
    /// # Errors
    /// If the allocator refuses.
    fn malloc(&mut self, size_bytes: u64, stream: StreamId) -> Result<GpuBlock, OutOfMemory>;

    /// Gives a block back: it may be used again at once.
    fn free(&mut self, block: GpuBlock);

    /// Gives a block back whose memory another stream still uses.
    fn defer(&mut self, block: GpuBlock);

    /// That use has ended.
    fn done(&mut self, block: GpuBlock);

    /// Bytes of the blocks that are neither freed nor deferred, as PyTorch's `memory_allocated`.
    fn allocated_bytes(&self) -> u64;

    /// The program asks the allocator to give back what it can.
    fn empty_cache(&mut self) {}

    /// The program gives the allocator a new settings string.
    fn settings(&mut self, settings: SettingsId) {
        let _ = settings;
    }

    /// Requests go to a private pool from here on.
    fn pool_enter(&mut self, pool: PoolId) {
        let _ = pool;
    }

    /// The innermost entered pool ends.
    fn pool_leave(&mut self, pool: PoolId) {
        let _ = pool;
    }

    /// The pool's owner lets it go.
    fn pool_delete(&mut self, pool: PoolId) {
        let _ = pool;
    }
}

/// A GPU that grants whatever fits its capacity: no rounding and no fragmentation.
#[derive(Clone, Debug)]
pub struct Exact {
    capacity_bytes: u64,
    allocated_bytes: u64,
    /// With the blocks whose memory another stream still uses.
    active_bytes: u64,
    /// Size of every block, 0 once it is gone.
    sizes: Vec<u64>,
    free_names: Vec<u32>,
}

impl Exact {
    /// A GPU of so many bytes.
    pub fn new(capacity_bytes: u64) -> Exact {
        Exact {
            capacity_bytes,
            allocated_bytes: 0,
            active_bytes: 0,
            sizes: Vec::new(),
            free_names: Vec::new(),
        }
    }

    fn size(&self, block: GpuBlock) -> u64 {
        self.sizes.get(block.0 as usize).copied().unwrap_or(0)
    }
}

impl Gpu for Exact {
    fn malloc(&mut self, size_bytes: u64, _: StreamId) -> Result<GpuBlock, OutOfMemory> {
        let active_bytes = self.active_bytes.checked_add(size_bytes);
        let fits = active_bytes.filter(|&bytes| bytes <= self.capacity_bytes);
        self.active_bytes = fits.ok_or(OutOfMemory { size_bytes })?;
        self.allocated_bytes += size_bytes;
        match self.free_names.pop() {
            Some(name) => {
                self.sizes[name as usize] = size_bytes;
                Ok(GpuBlock(name))
            }
            None => {
                self.sizes.push(size_bytes);
                Ok(GpuBlock(self.sizes.len() as u32 - 1))
            }
        }
    }

    fn free(&mut self, block: GpuBlock) {
        self.defer(block);
        self.done(block);
    }

    fn defer(&mut self, block: GpuBlock) {
        self.allocated_bytes -= self.size(block);
    }

    fn done(&mut self, block: GpuBlock) {
        let size_bytes = self.size(block);
        if size_bytes > 0 {
            self.active_bytes -= size_bytes;
            self.sizes[block.0 as usize] = 0;
            self.free_names.push(block.0);
        }
    }

    fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_gpu_is_full_when_every_byte_is_taken_and_deferred_bytes_stay_taken() {
        let mut gpu = Exact::new(100);
        let a = gpu.malloc(60, StreamId(0)).expect("fits");
        let b = gpu.malloc(40, StreamId(0)).expect("fits");
        assert_eq!(gpu.malloc(1, StreamId(0)), Err(OutOfMemory { size_bytes: 1 }));
        gpu.defer(a);
        assert_eq!(gpu.allocated_bytes(), 40);
        assert!(gpu.malloc(1, StreamId(0)).is_err(), "another stream uses it");
        gpu.done(a);
        gpu.free(b);
        assert_eq!(gpu.allocated_bytes(), 0);
        assert!(gpu.malloc(100, StreamId(0)).is_ok());
        assert!(gpu.malloc(u64::MAX, StreamId(0)).is_err());
    }
}
