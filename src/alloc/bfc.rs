//! The allocator of TensorFlow and JAX: best fit with coalescing, in regions that double.
//!
//! Rebuilt from what `tensorflow/core/common_runtime/bfc_allocator.cc` does (today
//! `xla/tsl/framework/bfc_allocator.cc`); constants are from there. A region is one device malloc.
//! The design decision of that allocator is to ask the device seldom: each region is twice as large
//! as the one before, and chunks are cut from it.
//!
//! ```text
//!   region 0, 2 MiB  │ A │ B │ free │      region 1, 4 MiB  │ C        │ free          │
//!   region 2, 64 MiB │ D 50 MiB (asked for 50: 8 MiB doubled until it fits)  │ free    │
//!                      chunks join inside of a region, never across
//! ```
//!
//! - Chunks. The smallest that fits is taken, among equal ones the lowest address. TensorFlow keeps
//!   21 bins by powers of two of 256 bytes, each in that order, and looks upwards from the bin of
//!   the request: the first that fits is the same chunk as here, where one ordered set does it.
//! - Splits. A chunk is cut if it is twice as large as the request or more, or if 128 MiB or more
//!   would be left; else the request gets all of it.
//! - Growth. The next region has 2 MiB at first (less if the limit is less), is doubled until it
//!   holds the request, and never exceeds what the limit leaves. What the device refuses is asked
//!   for again at nine tenths, down to the request. If the request did not double it, it doubles
//!   after. The limit is the size of the device unless one is set; `preallocate=0.75` makes it that
//!   share of the device and the first region all of it, as JAX does unless told otherwise.
//! - Garbage. Regions that are wholly free go back to the device only if the request cannot be met
//!   otherwise and they and the rest of the limit would hold it; then the region is asked for once
//!   more. `garbage_collection=false` is JAX, the default TensorFlow.
//!
//! Deviations: chunks are multiples of 512 bytes, as the contract of this crate asks, not of 256;
//! nine tenths are exact. TensorFlow has one compute stream; here a chunk stays on its stream as in
//! the heap (`heap.rs`), and when growth fails, the device is waited for, which shares all free
//! chunks, before garbage is looked for. `empty_cache`, which TensorFlow lacks, waits and gives
//! back every region that is wholly free. A program that waits ten seconds for others to free is
//! not modelled: a trace is one thread.

use super::free_set::FreeSet;
use super::heap::{Heap, round_up};
use super::spec::{Params, SpecError};
use super::{
    ALIGNMENT_BYTES, Action, ActionKind, Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels,
    OutOfMemory, Request,
};
use crate::device::Device;
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::units::{BlockId, MIB, StreamId};

/// Size of the first region.
const FIRST_REGION_BYTES: u64 = 2 * MIB;
/// A rest of this many bytes is always split off (kMaxInternalFragmentation).
const LARGEST_REST_BYTES: u64 = 128 * MIB;

/// What `fraglab list` says about the parameters.
pub(super) fn parameter_help() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "preallocate",
            "share of the device to take at the first request, and no more: 0.75 is JAX",
        ),
        ("garbage_collection", "false: free regions never go back (JAX); true, the default: TF"),
    ]
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Bfc {
    heap: Heap<FreeSet>,
    /// What was asked for by name or recorded.
    limit_bytes: Option<u64>,
    /// Most bytes of all regions.
    most_bytes: u64,
    /// Size of the next region, before it is fitted to the request and to what is left.
    region_bytes: u64,
    preallocate: Option<f64>,
    garbage_collection: bool,
    mallocs: u64,
    frees: u64,
    retries: u64,
    ooms: u64,
    device_syncs: u64,
}

fn take_share(params: &mut Params) -> Result<Option<f64>, SpecError> {
    let Some(text) = params.take("preallocate") else { return Ok(None) };
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(Some(share)),
        _ => {
            let message = format!("preallocate={text}: expected a share above 0, at most 1");
            Err(params.value_error(message))
        }
    }
}

fn take_garbage_collection(params: &mut Params) -> Result<bool, SpecError> {
    match params.take("garbage_collection").as_deref() {
        None | Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(other) => {
            let message = format!("garbage_collection={other}: expected true or false");
            Err(params.value_error(message))
        }
    }
}

impl Bfc {
    /// Builds the allocator.
    ///
    /// # Errors
    /// Unknown parameters, values that make no sense, and `preallocate` where the size of the
    /// device is not known.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Bfc, SpecError> {
        let preallocate = take_share(&mut params)?;
        let garbage_collection = take_garbage_collection(&mut params)?;
        let limit_bytes = inputs.limit_bytes.or(inputs.recorded_limit_bytes);
        let device_bytes = match (preallocate, inputs.device_total_bytes) {
            (Some(share), Some(total_bytes)) => (total_bytes as f64 * share) as u64,
            (None, total_bytes) => total_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES),
            (Some(_), None) => {
                let message = "preallocate is a share of the device, whose size is not known \
                               here: give --capacity";
                return Err(params.value_error(message));
            }
        };
        params.finish()?;
        let most_bytes = limit_bytes.unwrap_or(u64::MAX).min(device_bytes);
        let most_bytes = most_bytes - most_bytes % ALIGNMENT_BYTES;
        let first_bytes =
            if preallocate.is_some() { most_bytes } else { most_bytes.min(FIRST_REGION_BYTES) };
        Ok(Bfc {
            heap: Heap::new(inputs.stream_handles.len(), 0),
            limit_bytes,
            most_bytes,
            // 0 would never double.
            region_bytes: first_bytes.max(ALIGNMENT_BYTES),
            preallocate,
            garbage_collection,
            mallocs: 0,
            frees: 0,
            retries: 0,
            ooms: 0,
            device_syncs: 0,
        })
    }

    /// A chunk for a request that no free chunk fits.
    #[cold]
    #[inline(never)]
    fn obtain<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> Result<u32, OutOfMemory> {
        if let Some(at) = self.extend(env, size_bytes, request.stream) {
            return Ok(at);
        }
        if E::LOG {
            let kind = ActionKind::DeviceRefused;
            env.log(Action::notice(kind, request.block, request.stream, size_bytes));
        }
        self.retries += 1;
        self.wait(env);
        if let Some(at) = self.heap.take_fit(request.stream, size_bytes) {
            return Ok(at);
        }
        if self.collect_garbage(env, size_bytes)
            && let Some(at) = self.extend(env, size_bytes, request.stream)
        {
            return Ok(at);
        }
        Err(self.refuse(env, size_bytes, request))
    }

    #[cold]
    fn refuse<E: Env>(&mut self, env: &mut E, size_bytes: u64, request: Request) -> OutOfMemory {
        self.ooms += 1;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    /// A new region as one free chunk, in no set (`Extend`).
    fn extend<E: Env>(&mut self, env: &mut E, size_bytes: u64, stream: StreamId) -> Option<u32> {
        let left_bytes = self.most_bytes - self.heap.levels().reserved_bytes;
        if size_bytes > left_bytes {
            return None;
        }
        let doubles_after = size_bytes <= self.region_bytes;
        while size_bytes > self.region_bytes {
            self.region_bytes = self.region_bytes.saturating_mul(2);
        }
        let region_bytes = self.region_bytes.min(left_bytes);
        let (address, region_bytes) = malloc_at_least(env.device(), region_bytes, size_bytes)?;
        if doubles_after {
            self.region_bytes = self.region_bytes.saturating_mul(2);
        }
        self.mallocs += 1;
        let region = self.heap.add_segment(address, region_bytes);
        if E::LOG {
            let kind = ActionKind::SegmentAlloc;
            env.log(self.heap.segment_action(kind, region, stream, address, region_bytes));
        }
        Some(self.heap.grow(region, stream, region_bytes))
    }

    /// Waits for the device: deferred frees complete and all free chunks are shared.
    fn wait<E: Env>(&mut self, env: &mut E) {
        self.device_syncs += 1;
        while let Some(handle) = env.wait_completed() {
            self.heap.complete(env, handle.0);
        }
        self.heap.share_all();
    }

    /// Gives free regions back if that can help a request (`DeallocateFreeRegions`). Says whether
    /// any went.
    fn collect_garbage<E: Env>(&mut self, env: &mut E, size_bytes: u64) -> bool {
        if !self.garbage_collection {
            return false;
        }
        let free_bytes: u64 = self.heap.free_segments().iter().map(|&(.., bytes)| bytes).sum();
        let left_bytes = self.most_bytes - self.heap.levels().reserved_bytes;
        free_bytes > 0 && size_bytes <= left_bytes + free_bytes && self.give_back(env)
    }

    /// Gives every free region back; all free chunks are shared. Says whether any went.
    fn give_back<E: Env>(&mut self, env: &mut E) -> bool {
        let before = self.frees;
        for (region, address, region_bytes) in self.heap.free_segments() {
            // What the device does not take stays, free.
            if env.device().free(address).is_err() {
                continue;
            }
            self.frees += 1;
            if E::LOG {
                let (kind, stream) = (ActionKind::SegmentFree, StreamId::NONE);
                env.log(self.heap.segment_action(kind, region, stream, address, region_bytes));
            }
            self.heap.remove_segment(region);
        }
        self.frees > before
    }

    /// How much of a chunk a request of `size_bytes` gets.
    #[inline]
    fn handed_bytes(chunk_bytes: u64, size_bytes: u64) -> u64 {
        let rest_bytes = chunk_bytes - size_bytes;
        let splits = rest_bytes >= size_bytes || rest_bytes >= LARGEST_REST_BYTES;
        if splits { size_bytes } else { chunk_bytes }
    }
}

/// A device malloc of `wanted_bytes`, or of the first of nine tenths of it, nine tenths of that and
/// so on, down to `least_bytes`, that the device has: address and bytes. Both are multiples of 512.
fn malloc_at_least<D: Device>(
    device: &mut D,
    wanted_bytes: u64,
    least_bytes: u64,
) -> Option<(u64, u64)> {
    let mut bytes = wanted_bytes;
    loop {
        if let Ok(address) = device.malloc(bytes) {
            return Some((address, bytes));
        }
        // Rounding up must not stop a small size from shrinking.
        let less_bytes = (bytes - bytes / 10).next_multiple_of(ALIGNMENT_BYTES);
        bytes = less_bytes.min(bytes - ALIGNMENT_BYTES);
        if bytes < least_bytes {
            return None;
        }
    }
}

impl Allocator for Bfc {
    // Among equal chunks the lowest address is taken.
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.heap.complete(env, handle.0);
        }
        let size_bytes = match round_up(request.size_bytes) {
            Ok(size_bytes) => size_bytes,
            Err(OutOfMemory { size_bytes }) => return Err(self.refuse(env, size_bytes, request)),
        };
        let at = match self.heap.take_fit(request.stream, size_bytes) {
            Some(at) => at,
            None => self.obtain(env, size_bytes, request)?,
        };
        let handed_bytes = Bfc::handed_bytes(self.heap.size_bytes(at), size_bytes);
        self.heap.hand_out(env, at, handed_bytes, request);
        Ok(Handle(at))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.heap.begin_free(env, handle.0);
        self.heap.complete(env, handle.0);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.heap.defer(env, handle.0);
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        self.wait(env);
        self.give_back(env);
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.heap.levels()
    }

    fn largest_hole(&self, request: Request) -> u64 {
        self.heap.largest_bytes(request.stream)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("segment_allocs", self.mallocs),
            ("segment_frees", self.frees),
            ("alloc_retries", self.retries),
            ("ooms", self.ooms),
            ("device_syncs", self.device_syncs),
        ]
    }

    fn params(&self) -> Vec<(String, String)> {
        let mut params = Vec::new();
        if let Some(share) = self.preallocate {
            params.push(("preallocate".to_owned(), share.to_string()));
        }
        if !self.garbage_collection {
            params.push(("garbage_collection".to_owned(), "false".to_owned()));
        }
        params
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        self.heap.layout(visit);
    }
}
