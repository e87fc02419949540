//! The textbook baselines: best fit and first fit with coalescing, in one virtual range.
//!
//! The design decision is to be a heap as of old, with a top and nothing else: addresses are
//! reserved once, memory is added at the end of what is there, and only `empty_cache` takes memory
//! away, at the end. So there is one block list, free neighbours always join, and what
//! fragmentation is left is the policy's own. No segment borders, size classes or pools share the
//! blame.
//!
//! ```text
//!   range: 1.125 x the device, reserved at the first request
//!   ┌ piece 0 ─────────────────┬ piece 1 ──────┬ piece 2 ────┬──────────────────────────────┐
//!   │ A   │ free │ B                 │ C │ free               │ addresses without memory ... │
//!   └─────┴──────┴───────────────────┴───┴────────────────────┴──────────────────────────────┘
//!           a request that fits nowhere: ──┤ gets the free end, and a new piece for the rest ├──
//! ```
//!
//! A piece is one physical allocation of just the 2 MiB units that are short: one `create`, `map`
//! and `set_access` however large the request. `best-fit` takes the smallest block that is large
//! enough, among equal ones the lowest address; `first-fit` takes the lowest address. Memory stays
//! on its stream, see the heap (`heap.rs`).
//!
//! To the split of waste (DESIGN 2) a page of this range is its unit, 2 MiB, not the piece: free
//! units between live blocks are soft, as those of an expandable segment are, although a piece
//! could only go as a whole.
//!
//! A request goes down these steps until one gives it memory:
//!
//! 1. a free block, of its stream or shared;
//! 2. growth: the limit, the range and the device permitting;
//! 3. a wait for the device, which completes every deferred free and shares all memory (counted in
//!    `device_syncs` and `alloc_retries`); then 1 and 2 once more;
//! 4. out of memory. Nothing is given back: holes below the top are what this heap cannot return.

use super::first_fit::AddressTree;
use super::free_set::FreeSet;
use super::heap::{FreeOrder, Heap, round_up};
use super::pieces::Pieces;
use super::spec::{Params, SpecError};
use super::{
    Action, ActionKind, Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels, OutOfMemory,
    Request,
};
use crate::device::GRANULARITY_BYTES;
use crate::units::{BlockId, StreamId};

/// Takes the smallest block that fits.
pub type BestFit = OneRange<FreeSet>;
/// Takes the lowest address that fits.
pub type FirstFit = OneRange<AddressTree>;

/// Ordinal of the only segment.
const RANGE: u32 = 0;

/// The allocator.
#[derive(Clone, Debug)]
pub struct OneRange<F> {
    heap: Heap<F>,
    pieces: Pieces,
    retries: u64,
    ooms: u64,
    device_syncs: u64,
}

impl<F: FreeOrder> OneRange<F> {
    /// Builds the allocator; it has no parameters.
    ///
    /// # Errors
    /// If a parameter is given.
    pub fn build(params: Params, inputs: &BuildInputs) -> Result<Self, SpecError> {
        params.finish()?;
        Ok(OneRange {
            heap: Heap::new(inputs.stream_handles.len(), GRANULARITY_BYTES),
            pieces: Pieces::new(inputs),
            retries: 0,
            ooms: 0,
            device_syncs: 0,
        })
    }

    /// A block for a request that no free block fits: steps 2 to 4 of the [module docs](self).
    #[cold]
    #[inline(never)]
    fn obtain<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> Result<u32, OutOfMemory> {
        let stream = request.stream;
        if let Some(at) = self.grow(env, size_bytes, stream) {
            return Ok(at);
        }
        if E::LOG {
            env.log(Action::notice(ActionKind::DeviceRefused, request.block, stream, size_bytes));
        }
        self.retries += 1;
        self.wait(env);
        if let Some(at) = self.heap.take_fit(stream, size_bytes) {
            return Ok(at);
        }
        self.grow(env, size_bytes, stream).ok_or_else(|| self.refuse(env, size_bytes, request))
    }

    #[cold]
    fn refuse<E: Env>(&mut self, env: &mut E, size_bytes: u64, request: Request) -> OutOfMemory {
        self.ooms += 1;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    /// Makes the end of the heap a free block of at least `size_bytes`, in no set. Nothing changes
    /// but the range's being reserved if the limit, the range or the device refuse.
    fn grow<E: Env>(&mut self, env: &mut E, size_bytes: u64, stream: StreamId) -> Option<u32> {
        let held_bytes = self.heap.levels().reserved_bytes;
        let is_reserved = self.pieces.base().is_some();
        // What there is at the end is too small, or it had been taken.
        let tail_bytes = if is_reserved { self.heap.free_tail_bytes(RANGE, stream) } else { 0 };
        let short_bytes = size_bytes.checked_sub(tail_bytes)?;
        let piece_bytes = short_bytes.checked_next_multiple_of(GRANULARITY_BYTES)?;
        let address = self.pieces.grow(env.device(), held_bytes, piece_bytes);
        if let Some(base) = self.pieces.base().filter(|_| !is_reserved) {
            self.heap.add_segment(base, self.pieces.span_bytes());
        }
        let address = address?;
        if E::LOG {
            let kind = ActionKind::SegmentMap;
            env.log(self.heap.segment_action(kind, RANGE, stream, address, piece_bytes));
        }
        Some(self.heap.grow(RANGE, stream, piece_bytes))
    }

    /// Waits for the device: deferred frees complete and all free memory is shared.
    fn wait<E: Env>(&mut self, env: &mut E) {
        self.device_syncs += 1;
        while let Some(handle) = env.wait_completed() {
            self.heap.complete(env, handle.0);
        }
        self.heap.share_all();
    }

    /// Gives back the pieces at the end that are wholly free; all free memory is shared.
    fn shrink<E: Env>(&mut self, env: &mut E) {
        if self.pieces.base().is_none() {
            return;
        }
        let held_bytes = self.heap.levels().reserved_bytes;
        let free_bytes = self.heap.free_tail_bytes(RANGE, StreamId::NONE);
        let gone = self.pieces.shrink(env.device(), held_bytes, free_bytes);
        let Some((address, gone_bytes)) = gone else { return };
        self.heap.shrink(RANGE, gone_bytes);
        if E::LOG {
            let kind = ActionKind::SegmentUnmap;
            env.log(self.heap.segment_action(kind, RANGE, StreamId::NONE, address, gone_bytes));
        }
    }
}

impl<F: FreeOrder> Allocator for OneRange<F> {
    // All that is compared are addresses of one range.
    const ADDRESSES_MATTER: bool = false;

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
        self.heap.hand_out(env, at, size_bytes, request);
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
        self.shrink(env);
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.heap.levels()
    }

    fn largest_hole(&self, request: Request) -> u64 {
        self.heap.largest_bytes(request.stream)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.pieces.limit_bytes()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (growths, shrinks) = self.pieces.growths_and_shrinks();
        vec![
            ("segment_allocs", growths),
            ("segment_frees", shrinks),
            ("alloc_retries", self.retries),
            ("ooms", self.ooms),
            ("device_syncs", self.device_syncs),
        ]
    }

    fn params(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        self.heap.layout(visit);
    }
}
