//! Where a request goes, and what comes back: the [module docs](super) in the same order.

use std::ops::Range;

use super::blocks::{Block, Place};
use super::config::Reuse;
use super::layers::{Label, Op};
use super::var::SLOT_BYTES;
use super::{INNER_FIRST, POOL, Stalloc};
use crate::alloc::planned::inner::{Inner, InnerEnv};
use crate::alloc::planned::summary::StepLevels;
use crate::alloc::{
    ALIGNMENT_BYTES, Action, ActionKind, BlockState, Env, Handle, OutOfMemory, Request,
};
use crate::device::Device;
use crate::units::{BlockId, StreamId};

impl Stalloc {
    /// Finds a block for a request.
    pub(super) fn route<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        if !self.has_begun {
            self.begin(env, request)?;
        }
        if request.size_bytes <= SLOT_BYTES {
            return self.malloc_var(env, request);
        }
        let number = self.sequence.mallocs;
        self.sequence.mallocs += 1;
        if self.unreleased.contains(&number) {
            self.counts.unreleased += 1;
            return self.malloc_inner(env, request, request.stream);
        }
        if self.is_evaluating {
            self.counts.evaluation += 1;
            let fit = self.free.best_fit(pool_size(request.size_bytes));
            return self.malloc_online(env, request, fit);
        }
        match self.layers.dynamic() {
            Some(label) => self.malloc_dynamic(env, request, label),
            None => self.malloc_static(env, request),
        }
    }

    /// Obtains the pools at the first request. Without the static one the published code goes no
    /// further; here the next request asks again, or, mended, goes without.
    #[cold]
    fn begin<E: Env>(&mut self, env: &mut E, request: Request) -> Result<(), OutOfMemory> {
        if self.pool.is_none() && self.pool_bytes > 0 && !self.without_pool {
            self.pool = self.obtain_pool(env, request);
            if self.pool.is_none() && self.config.faithful {
                return Err(self.refuse(env, request));
            }
            self.without_pool = self.pool.is_none();
        }
        self.has_begun = true;
        if !self.var.is_begun() {
            // If the device refuses, the first small request asks again.
            self.grow_var(env);
        }
        Ok(())
    }

    fn obtain_pool<E: Env>(&mut self, env: &mut E, request: Request) -> Option<u64> {
        let fits = self.leaves_room(self.pool_bytes);
        let address = if fits { env.device().malloc(self.pool_bytes).ok() } else { None };
        let Some(address) = address else {
            let kind = ActionKind::DeviceRefused;
            if E::LOG {
                env.log(Action::notice(kind, request.block, request.stream, self.pool_bytes));
            }
            return None;
        };
        self.counts.pool_allocs += 1;
        if E::LOG {
            env.log(segment_action(ActionKind::SegmentAlloc, POOL, address, self.pool_bytes));
        }
        Some(address)
    }

    /// Whether the limit allows so many bytes more.
    fn leaves_room(&self, bytes: u64) -> bool {
        let held_bytes = self.own_reserved_bytes() + self.inner.levels().reserved_bytes;
        self.limit_bytes.is_none_or(|limit| held_bytes.saturating_add(bytes) <= limit)
    }

    /// Memory held for the pools, in bytes.
    pub(super) fn own_reserved_bytes(&self) -> u64 {
        self.pool.map_or(0, |_| self.pool_bytes) + self.var.reserved_bytes()
    }

    fn refuse<E: Env>(&mut self, env: &mut E, request: Request) -> OutOfMemory {
        self.counts.ooms += 1;
        let size_bytes = request.size_bytes;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    /// A slot, or, where the pool of slots cannot grow, the inner allocator.
    fn malloc_var<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        let slot = match self.var.take() {
            Some(slot) => Some(slot),
            None if self.grow_var(env) => self.var.take(),
            None => None,
        };
        let Some(slot) = slot else {
            return self.malloc_inner(env, request, request.stream);
        };
        self.log.now().planned += 1;
        Ok(self.hand_out(env, request, Place::Var(slot), SLOT_BYTES))
    }

    /// Obtains the next chunk of slots. Under a limit there is only the first, which the inner
    /// allocator's own limit allows for.
    fn grow_var<E: Env>(&mut self, env: &mut E) -> bool {
        let is_bounded = self.limit_bytes.is_some() && !self.var.chunks().is_empty();
        if is_bounded || !self.leaves_room(self.var.next_chunk_bytes()) {
            return false;
        }
        let Some(chunk) = self.var.grow(env.device()) else { return false };
        self.counts.pool_allocs += 1;
        if E::LOG {
            let kind = ActionKind::SegmentAlloc;
            env.log(segment_action(kind, chunk.segment, chunk.address, chunk.size_bytes));
        }
        true
    }

    /// A request of a mixture of experts (spec 3.3 step 5).
    fn malloc_dynamic<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
        label: Label,
    ) -> Result<Handle, OutOfMemory> {
        let fit = self.space_for(label, pool_size(request.size_bytes));
        let handle = self.malloc_online(env, request, fit)?;
        match self.blocks.get(handle).place {
            Place::Pool { .. } => self.counts.dynamic_reused += 1,
            _ => self.counts.dynamic_fallbacks += 1,
        }
        Ok(handle)
    }

    /// Free space of the pool that a layer may use.
    fn space_for(&mut self, label: Label, size_bytes: u64) -> Option<u64> {
        if self.config.reuse == Reuse::Off {
            return None;
        }
        match label.op {
            Op::Row | Op::Mlp if !self.layers.expert_may_reuse() => None,
            Op::Row => self.free.best_fit(size_bytes),
            Op::Mlp => match self.cross.get(label) {
                Some(listed) => self.free.best_fit_in(listed, size_bytes),
                None => self.free.best_fit(size_bytes),
            },
            Op::Moe if label.is_forward && self.config.reuse == Reuse::Shipped => None,
            Op::Moe => match self.intra.get(label) {
                Some(listed) => self.free.best_fit_in(listed, size_bytes),
                None => {
                    if self.config.faithful {
                        self.fail("a layer has no line in the intra file, which ends STAlloc");
                    }
                    None
                }
            },
            Op::Shared | Op::Router => None,
        }
    }

    /// A place in the pool that was found at run time, or else the inner allocator.
    fn malloc_online<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
        fit: Option<u64>,
    ) -> Result<Handle, OutOfMemory> {
        let size_bytes = pool_size(request.size_bytes);
        if let Some(offset_bytes) = fit
            && self.pool.is_some()
            && self.claim(offset_bytes..offset_bytes + size_bytes, request.stream)
        {
            self.log.now().online += 1;
            let place = Place::Pool { offset_bytes, planned: false };
            return Ok(self.hand_out(env, request, place, size_bytes));
        }
        self.malloc_inner(env, request, request.stream)
    }

    /// The next request of the plan (spec 3.3 step 6).
    fn malloc_static<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        // What falls back from here does so on the default stream.
        let stream = if self.config.keeps_streams { request.stream } else { self.default_stream };
        let Some(offset_bytes) = self.next_place(request.size_bytes) else {
            self.log.now().mismatched += 1;
            return self.malloc_inner(env, request, stream);
        };
        let size_bytes = pool_size(request.size_bytes);
        let range = offset_bytes..offset_bytes + size_bytes;
        if self.pool.is_none() || !self.take_planned(range, request.stream) {
            self.log.now().overlapping += 1;
            return self.malloc_inner(env, request, stream);
        }
        self.log.now().planned += 1;
        let place = Place::Pool { offset_bytes, planned: true };
        Ok(self.hand_out(env, request, place, size_bytes))
    }

    /// Steps on in the plan: the place of the request that it expects, if this is of its size.
    fn next_place(&mut self, size_bytes: u64) -> Option<u64> {
        let plan = &self.files.plan;
        let planned = plan.first_requests.saturating_add(plan.steady_requests);
        let next = self.sequence.event.map_or(0, |event| event + 1);
        // The second iteration stands for all later ones.
        let event = if next == planned { plan.first_requests } else { next };
        self.sequence.event = Some(event);
        if event >= planned {
            return None;
        }
        let expected = plan.requests.get(usize::try_from(event).ok()?)?;
        expected.offset_bytes.filter(|_| expected.size_bytes == size_bytes)
    }

    /// Takes a planned place, if nothing is in the way: planned blocks first, if asked, then
    /// whatever else is in the pool.
    fn take_planned(&mut self, range: Range<u64>, stream: StreamId) -> bool {
        if !self.config.static_fallback {
            return self.claim(range, stream);
        }
        let below = self.remembered.range(..range.end).next_back();
        if below.is_some_and(|(_, &end)| end > range.start) {
            return false;
        }
        let is_taken = self.claim(range.clone(), stream);
        if is_taken || self.config.leak {
            self.remembered.insert(range.start, range.end);
        }
        is_taken
    }

    /// Takes a range of the pool if all of it is free, and free for this stream.
    fn claim(&mut self, range: Range<u64>, stream: StreamId) -> bool {
        if let Some(uses) = &mut self.last_uses {
            if !self.free.holds(&range) || !uses.allow(&range, stream) {
                return false;
            }
            uses.forget(&range);
        }
        self.free.claim(&range)
    }

    /// Whatever the pools do not serve.
    fn malloc_inner<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
        stream: StreamId,
    ) -> Result<Handle, OutOfMemory> {
        let before_bytes = self.inner.levels().reserved_bytes;
        let allocated =
            self.with_inner(env, |inner, env| inner.malloc(env, Request { stream, ..request }));
        let inner = match allocated {
            Ok(inner) => inner,
            Err(_) => {
                let rescued = self.rescue(env, request);
                return rescued.ok_or_else(|| self.refuse(env, request));
            }
        };
        self.log.now().online += 1;
        let handle = self.blocks.add(Block {
            place: Place::Inner(inner),
            requested_bytes: request.size_bytes,
            size_bytes: 0,
            stream: request.stream,
            owner: request.block,
            state: BlockState::Allocated,
        });
        if self.inner.levels().reserved_bytes > before_bytes {
            self.trim(env);
        }
        Ok(handle)
    }

    /// A request that was refused goes anywhere in the pool, if that is asked.
    #[cold]
    fn rescue<E: Env>(&mut self, env: &mut E, request: Request) -> Option<Handle> {
        self.pool.filter(|_| self.config.rescue)?;
        let size_bytes = pool_size(request.size_bytes);
        let offset_bytes = self.free.best_fit(size_bytes)?;
        if !self.claim(offset_bytes..offset_bytes + size_bytes, request.stream) {
            return None;
        }
        self.counts.rescued += 1;
        self.log.now().online += 1;
        let place = Place::Pool { offset_bytes, planned: false };
        Some(self.hand_out(env, request, place, size_bytes))
    }

    /// After a new segment of the inner allocator: empties its cache if it holds far more than it
    /// needed since the last step began (spec 3.4).
    #[cold]
    fn trim<E: Env>(&mut self, env: &mut E) {
        let percent = self.config.utilization_percent;
        let reserved_bytes = self.inner.levels().reserved_bytes;
        let peak_bytes = self.log.now().fallback_bytes_peak.min(reserved_bytes);
        let used_percent = u128::from(peak_bytes) * 100 / u128::from(reserved_bytes.max(1));
        let is_wasteful = used_percent <= u128::from(percent);
        if percent > 0 && is_wasteful && reserved_bytes - peak_bytes >= self.config.difference_bytes
        {
            self.counts.trims += 1;
            self.with_inner(env, |inner, env| inner.empty_cache(env));
        }
    }

    /// Enters a block in the books of the pools.
    fn hand_out<E: Env>(
        &mut self,
        env: &mut E,
        request: Request,
        place: Place,
        size_bytes: u64,
    ) -> Handle {
        let handle = self.blocks.add(Block {
            place,
            requested_bytes: request.size_bytes,
            size_bytes,
            stream: request.stream,
            owner: request.block,
            state: BlockState::Allocated,
        });
        self.own.allocated_bytes += size_bytes;
        self.own.active_bytes += size_bytes;
        self.log_block(env, ActionKind::Alloc, handle);
        handle
    }

    /// The program frees a block, at once or later.
    pub(super) fn begin_free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let block = *self.blocks.get(handle);
        self.live_bytes -= block.requested_bytes;
        self.own.allocated_bytes -= block.size_bytes;
        self.log_block(env, ActionKind::FreeRequested, handle);
    }

    /// The memory of a block of the pools is reusable.
    pub(super) fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.log_block(env, ActionKind::FreeCompleted, handle);
        let block = *self.blocks.get(handle);
        self.blocks.remove(handle);
        self.own.active_bytes -= block.size_bytes;
        match block.place {
            Place::Pool { offset_bytes, planned } => {
                let range = offset_bytes..offset_bytes + block.size_bytes;
                if let Some(uses) = &mut self.last_uses {
                    uses.note(&range, block.stream);
                }
                if planned {
                    self.remembered.remove(&offset_bytes);
                }
                self.free.release(range);
            }
            Place::Var(slot) => self.var.give(slot),
            Place::Inner(_) | Place::Nowhere => {}
        }
    }

    /// The use of a deferred block has ended. The inner allocator looks when it is next asked.
    pub(super) fn use_ended<E: Env>(&mut self, env: &mut E, handle: Handle) {
        match self.blocks.get(handle).place {
            Place::Inner(inner) => {
                self.ended.push_back(inner);
                self.blocks.remove(handle);
            }
            _ => self.complete(env, handle),
        }
    }

    /// Waits for the device.
    pub(super) fn wait<E: Env>(&mut self, env: &mut E) {
        self.counts.device_syncs += 1;
        while let Some(handle) = env.wait_completed() {
            self.use_ended(env, handle);
        }
        if let Some(uses) = &mut self.last_uses {
            uses.clear();
        }
    }

    /// Calls the inner allocator, and takes note of what it waited for.
    pub(super) fn with_inner<E: Env, R>(
        &mut self,
        env: &mut E,
        call: impl FnOnce(&mut Inner, &mut InnerEnv<'_, E>) -> R,
    ) -> R {
        let mut inner_env = InnerEnv::new(env, &self.blocks, &mut self.ended, INNER_FIRST);
        let result = call(&mut self.inner, &mut inner_env);
        let InnerEnv { completed, returned, waited, .. } = inner_env;
        for handle in completed {
            self.complete(env, handle);
        }
        for handle in returned {
            self.blocks.remove(handle);
        }
        if let Some(uses) = self.last_uses.as_mut().filter(|_| waited) {
            uses.clear();
        }
        result
    }

    /// Gives back pools in which nothing is in use. What the device does not take stays.
    pub(super) fn release_pools<E: Env>(&mut self, env: &mut E) {
        for chunk in self.var.shrink(env.device()) {
            self.counts.pool_frees += 1;
            if E::LOG {
                let kind = ActionKind::SegmentFree;
                env.log(segment_action(kind, chunk.segment, chunk.address, chunk.size_bytes));
            }
        }
        if self.without_pool {
            (self.without_pool, self.has_begun) = (false, false);
        }
        let is_empty = self.free.holds(&(0..self.pool_bytes));
        if let Some(address) = self.pool.filter(|_| is_empty)
            && env.device().free(address).is_ok()
        {
            self.pool = None;
            self.has_begun = false;
            self.counts.pool_frees += 1;
            if E::LOG {
                env.log(segment_action(ActionKind::SegmentFree, POOL, address, self.pool_bytes));
            }
        }
    }

    /// A phase of the program begins.
    pub(super) fn begin_phase(&mut self, phase: &str) {
        let name = phase.rsplit('.').next().unwrap_or(phase);
        self.is_evaluating = matches!(name, "eval" | "evaluate" | "evaluation");
        self.layers.begin_phase(phase);
        let levels = self.step_levels();
        let begins = self.log.mark(phase, levels);
        if !begins || crate::trace::step_name(phase).is_none() {
            return;
        }
        self.steps += 1;
        if self.config.realign && self.steps > 1 {
            // The next static request is the first of the second iteration.
            self.sequence.event = self.files.plan.first_requests.checked_sub(1);
            self.layers.realign();
        }
    }

    fn step_levels(&self) -> StepLevels {
        let inner = self.inner.levels();
        StepLevels {
            live_bytes: self.live_bytes,
            fallback_bytes: inner.allocated_bytes,
            fallback_reserved_bytes: inner.reserved_bytes,
        }
    }

    /// Raises the peaks of the step.
    pub(super) fn observe(&mut self) {
        let levels = self.step_levels();
        self.log.observe(levels);
    }

    /// Notes what the process would not have survived.
    pub(super) fn fail(&mut self, what: &str) {
        self.failure.get_or_insert_with(|| what.to_owned());
    }

    /// Logs what happens to a block of the pools; the inner allocator logs its own.
    fn log_block<E: Env>(&self, env: &mut E, kind: ActionKind, handle: Handle) {
        if !E::LOG {
            return;
        }
        let block = self.blocks.get(handle);
        let (segment, offset_bytes, address) = match block.place {
            Place::Pool { offset_bytes, .. } => {
                (POOL, offset_bytes, self.pool.unwrap_or(0) + offset_bytes)
            }
            Place::Var(slot) => (slot.segment, slot.offset_bytes, slot.address()),
            Place::Inner(_) | Place::Nowhere => return,
        };
        env.log(Action {
            kind,
            block: block.owner,
            segment,
            stream: block.stream,
            offset_bytes,
            size_bytes: block.requested_bytes,
            address,
        });
    }
}

/// What a request takes of the pool; too much for any if it cannot be rounded.
fn pool_size(size_bytes: u64) -> u64 {
    size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES).unwrap_or(u64::MAX)
}

fn segment_action(kind: ActionKind, segment: u32, address: u64, size_bytes: u64) -> Action {
    Action {
        kind,
        block: BlockId::NONE,
        segment,
        stream: StreamId::NONE,
        offset_bytes: 0,
        size_bytes,
        address,
    }
}
