//! The device behind the allocators: a real GPU, or simulated memory for trials and tests, below a
//! ceiling that PyTorch may set while the program runs (`set_per_process_memory_fraction`).
//!
//! ```text
//!   Counting<Gpu>
//!       └── Gpu: ceiling ──┬── Sim     FRAGLAB_DEVICE=sim:8GiB
//!                          └── Measured<Cuda>
//! ```
//!
//! The ceiling is the device's and not the allocator's, as every allocator takes a refusal of the
//! device for what it is: it gives its cache back and asks once more.
//!
//! The same holds while a graph is captured: what only a GPU that was waited for can give up, it
//! refuses, and the allocators keep it and offer it again later.

use std::collections::{BTreeMap, BTreeSet};

use super::stream_events::StreamEvents;
use crate::device::cuda::{Cuda, CudaError, Relaxed};
use crate::device::sim::addresses::Addresses;
use crate::device::{
    Device, DeviceCall, DeviceError, Extent, Measured, MemoryInfo, PhysicalHandle, Sim,
};

/// Which devices to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GpuChoice {
    /// Those of the CUDA driver.
    Cuda,
    /// Simulated memory of so many bytes each.
    Sim {
        /// Physical bytes.
        capacity_bytes: u64,
    },
}

/// One device.
pub(super) struct Gpu {
    kind: Kind,
    /// Bytes that may be held.
    ceiling_bytes: u64,
    /// Bytes that are held.
    held_bytes: u64,
    /// Captures of graphs under way.
    captures: u32,
    /// The GPU was waited for since the program's call began.
    has_waited: bool,
    /// What was mapped since the program's call began, and is mapped still: sizes by address.
    fresh_mappings: BTreeMap<u64, u64>,
    /// What was created since then.
    fresh_handles: BTreeSet<PhysicalHandle>,
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURING: u32 = 900;
/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

enum Kind {
    Sim(Box<Sim>),
    Cuda(Box<Measured<Cuda>>),
}

/// The same call of whichever device it is.
macro_rules! delegate {
    ($gpu:expr, $device:ident => $call:expr) => {
        match &mut $gpu.kind {
            Kind::Sim($device) => $call,
            Kind::Cuda($device) => $call,
        }
    };
}

impl Gpu {
    /// Opens the device of this number.
    ///
    /// # Errors
    /// One line: no driver, no such device.
    pub(super) fn open(choice: GpuChoice, ordinal: u32) -> Result<Gpu, String> {
        let kind = match choice {
            GpuChoice::Sim { capacity_bytes } => {
                let addresses = Addresses::ascending();
                Kind::Sim(Box::new(Sim::new(Some(capacity_bytes), None, addresses)))
            }
            GpuChoice::Cuda => {
                let cuda = Cuda::open(ordinal).map_err(|error| error.to_string())?;
                Kind::Cuda(Box::new(Measured::new(cuda)))
            }
        };
        Ok(Gpu::of(kind))
    }

    fn of(kind: Kind) -> Gpu {
        Gpu {
            kind,
            ceiling_bytes: u64::MAX,
            held_bytes: 0,
            captures: 0,
            has_waited: false,
            fresh_mappings: BTreeMap::new(),
            fresh_handles: BTreeSet::new(),
        }
    }

    /// `cuda` or `sim`.
    pub(super) fn kind_name(&self) -> &'static str {
        match self.kind {
            Kind::Sim(_) => "sim",
            Kind::Cuda(_) => "cuda",
        }
    }

    /// Events on its streams.
    pub(super) fn events(&self) -> StreamEvents {
        match &self.kind {
            Kind::Sim(_) => StreamEvents::Sim,
            Kind::Cuda(cuda) => StreamEvents::Cuda(cuda.inner().events()),
        }
    }

    /// Name of the GPU; nothing for a simulated device.
    pub(super) fn name(&self) -> Option<String> {
        match &self.kind {
            Kind::Sim(_) => None,
            Kind::Cuda(cuda) => Some(cuda.inner().info().name.clone()),
        }
    }

    /// Version of the driver; nothing for a simulated device.
    pub(super) fn driver(&self) -> Option<String> {
        match &self.kind {
            Kind::Sim(_) => None,
            Kind::Cuda(cuda) => Some(cuda.inner().info().driver.clone()),
        }
    }

    /// Nanoseconds in calls so far, by call; nothing for a simulated device.
    pub(super) fn measured_ns(&self) -> Option<BTreeMap<&'static str, u64>> {
        match &self.kind {
            Kind::Sim(_) => None,
            Kind::Cuda(cuda) => {
                let calls = cuda.calls().each();
                Some(calls.map(|(call, time)| (call.name(), time.ns + time.refused_ns)).collect())
            }
        }
    }

    /// A call of the program begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.has_waited = false;
        self.fresh_mappings.clear();
        self.fresh_handles.clear();
    }

    /// Whether the program's call mapped all of a range itself. No kernel can use it yet: its
    /// addresses are handed out when the call ends.
    fn is_fresh(&self, address: u64, size_bytes: u64) -> bool {
        let (mut at, end) = (address, address.saturating_add(size_bytes));
        while at < end {
            let Some(&mapped_bytes) = self.fresh_mappings.get(&at) else { return false };
            at += mapped_bytes;
        }
        true
    }

    /// Waits for the GPU, once a call of the program: memory that is about to be unmapped is free,
    /// but kernels that were started before it was freed may still run.
    ///
    /// # Errors
    /// While a graph is captured, as to wait then is forbidden and spoils the capture; and whatever
    /// the driver says to it, because then nobody knows that the kernels have ended.
    fn wait_for_kernels(&mut self) -> Result<(), DeviceError> {
        let refused = |code| DeviceError::Driver { call: DeviceCall::Unmap, code };
        if self.captures > 0 {
            return Err(refused(CAPTURING));
        }
        if let (false, Kind::Cuda(cuda)) = (self.has_waited, &self.kind) {
            cuda.inner().synchronize().map_err(|error| match error {
                CudaError::Driver { code, .. } => refused(code),
                _ => refused(UNKNOWN),
            })?;
        }
        self.has_waited = true;
        Ok(())
    }

    /// Lets the driver take calls while a graph is captured.
    fn relaxed(&self) -> Option<Relaxed> {
        match &self.kind {
            Kind::Cuda(cuda) if self.captures > 0 => Some(cuda.inner().relax()),
            _ => None,
        }
    }

    /// A graph is captured from here on.
    pub(super) fn capture_begins(&mut self) {
        self.captures += 1;
    }

    /// The capture is over.
    pub(super) fn capture_ends(&mut self) {
        self.captures = self.captures.saturating_sub(1);
    }

    /// From here on no more than so many bytes may be held; what is held already stays.
    pub(super) fn set_ceiling(&mut self, bytes: u64) {
        self.ceiling_bytes = bytes;
    }

    /// Bytes that may be held, if that has an end.
    pub(super) fn ceiling_bytes(&self) -> Option<u64> {
        (self.ceiling_bytes < u64::MAX).then_some(self.ceiling_bytes)
    }

    fn check(&self, call: DeviceCall, requested_bytes: u64) -> Result<(), DeviceError> {
        let free_bytes = self.ceiling_bytes.saturating_sub(self.held_bytes);
        if requested_bytes > free_bytes {
            return Err(DeviceError::OutOfMemory { call, requested_bytes, free_bytes });
        }
        Ok(())
    }

    fn take(&mut self, size_bytes: u64) {
        self.held_bytes = self.held_bytes.saturating_add(size_bytes);
    }

    fn give(&mut self, size_bytes: u64) {
        self.held_bytes = self.held_bytes.saturating_sub(size_bytes);
    }
}

impl Device for Gpu {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.check(DeviceCall::Malloc, size_bytes)?;
        let _relaxed = self.relaxed();
        let address = delegate!(self, device => device.malloc(size_bytes))?;
        self.take(size_bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let _relaxed = self.relaxed();
        let size_bytes = delegate!(self, device => device.free(address))?;
        self.give(size_bytes);
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let _relaxed = self.relaxed();
        delegate!(self, device => device.address_reserve(size_bytes))
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        let _relaxed = self.relaxed();
        delegate!(self, device => device.address_free(address, size_bytes))
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        self.check(DeviceCall::Create, size_bytes)?;
        let _relaxed = self.relaxed();
        let handle = delegate!(self, device => device.create(size_bytes))?;
        self.take(size_bytes);
        self.fresh_handles.insert(handle);
        Ok(handle)
    }

    /// While a graph is captured, refuses as [`Self::unmap`] does: most allocators release first,
    /// and memory without a handle, which is mapped still, could serve less than it did.
    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        if self.captures > 0 && !self.fresh_handles.contains(&handle) {
            return Err(DeviceError::Driver { call: DeviceCall::Release, code: CAPTURING });
        }
        let _relaxed = self.relaxed();
        let size_bytes = delegate!(self, device => device.release(handle))?;
        self.fresh_handles.remove(&handle);
        self.give(size_bytes);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let _relaxed = self.relaxed();
        let size_bytes = delegate!(self, device => device.map(address, handle))?;
        self.fresh_mappings.insert(address, size_bytes);
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        if !self.is_fresh(address, size_bytes) {
            self.wait_for_kernels()?;
        }
        let _relaxed = self.relaxed();
        let pieces = delegate!(self, device => device.unmap(address, size_bytes))?;
        self.fresh_mappings.retain(|at, _| at.wrapping_sub(address) >= size_bytes);
        Ok(pieces)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let _relaxed = self.relaxed();
        delegate!(self, device => device.set_access(address, size_bytes))
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        match &self.kind {
            Kind::Sim(sim) => sim.backing(address, size_bytes, visit),
            Kind::Cuda(cuda) => cuda.backing(address, size_bytes, visit),
        }
    }

    fn memory_info(&self) -> MemoryInfo {
        match &self.kind {
            Kind::Sim(sim) => sim.memory_info(),
            Kind::Cuda(cuda) => cuda.memory_info(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn gpu() -> Gpu {
        Gpu::open(GpuChoice::Sim { capacity_bytes: 64 * MIB }, 0).expect("simulated memory")
    }

    fn mapped(gpu: &mut Gpu, address: u64) -> PhysicalHandle {
        let handle = gpu.create(2 * MIB).expect("memory");
        gpu.map(address, handle).expect("a mapping");
        handle
    }

    #[test]
    fn a_capture_keeps_what_was_there_before_the_call() {
        let mut gpu = gpu();
        gpu.begin();
        let address = gpu.address_reserve(4 * MIB).expect("addresses");
        let handles = [address, address + 2 * MIB].map(|at| mapped(&mut gpu, at));
        gpu.capture_begins();
        gpu.begin();
        let refused = |call| DeviceError::Driver { call, code: 900 };
        assert_eq!(gpu.unmap(address, 4 * MIB), Err(refused(DeviceCall::Unmap)));
        assert_eq!(gpu.release(handles[0]), Err(refused(DeviceCall::Release)));
        gpu.capture_ends();
        gpu.begin();
        assert_eq!(gpu.unmap(address, 4 * MIB), Ok(2));
        assert_eq!(handles.map(|handle| gpu.release(handle)), [Ok(2 * MIB); 2]);
        assert_eq!((gpu.held_bytes, gpu.memory_info().free_bytes), (0, 64 * MIB));
    }

    /// What an allocator cannot finish it undoes in the same call, also during a capture.
    #[test]
    fn a_capture_takes_back_what_the_call_itself_began() {
        let mut gpu = gpu();
        let address = gpu.address_reserve(6 * MIB).expect("addresses");
        gpu.begin();
        let old = mapped(&mut gpu, address);
        gpu.capture_begins();
        gpu.begin();
        let new = [address + 2 * MIB, address + 4 * MIB].map(|at| mapped(&mut gpu, at));
        assert!(gpu.unmap(address, 6 * MIB).is_err(), "begins with what was there");
        assert_eq!(gpu.unmap(address + 2 * MIB, 4 * MIB), Ok(2));
        assert_eq!(new.map(|handle| gpu.release(handle)), [Ok(2 * MIB); 2]);
        assert_eq!(gpu.held_bytes, 2 * MIB);
        // The same addresses, in the next call, are no longer new.
        gpu.map(address + 2 * MIB, old).expect("a second mapping");
        gpu.begin();
        assert!(gpu.unmap(address + 2 * MIB, 2 * MIB).is_err());
    }
}
