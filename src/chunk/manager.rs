//! The manager's state, and how a chunk comes to be where it is needed (spec patrickstar 1, 2.5,
//! 3).
//!
//! ```text
//!   hook ── access(chunk, device) ──> on the device ────────────────────────> use it
//!                                ├──> on the other: prepare, move ──────────────┘
//!                                └──> nowhere: prepare, allocate ───────────────┘
//!   prepare: budget − chunk bytes counted there < need ──> evict, farthest next use first
//! ```
//!
//! The one design decision: this file knows no model and no trace, only chunks, tensors and
//! moments; hooks, collectives and ADAM are further `impl` blocks in files of their own.

use super::budget::{Budget, Margin, Reserve};
use super::cache::Cache;
use super::clock::Clock;
use super::config::ChunkConfig;
use super::memory::{Held, Memory, Purpose, Refused};
use super::states::{Chunk, ChunkList, Device, Payload, TensorState};
use super::summary::{ChunkEvent, ChunkEventKind, HardStop, Stage, StepSummary, Traffic};
use super::tracer::{NoSample, Tracer};
use super::world::Ids;
use crate::trace::Direction;

/// Why a run ends before its trace.
#[derive(Clone, Copy, Debug)]
pub(super) enum Halt {
    /// Training stops.
    Stop(HardStop),
    /// A step is longer than the warm-up was.
    NoSample(NoSample),
}

impl From<NoSample> for Halt {
    fn from(no_sample: NoSample) -> Halt {
        Halt::NoSample(no_sample)
    }
}

/// A parameter in chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parameter {
    /// Number of its fp16 chunk.
    pub(super) number: u32,
    /// Its place among the chunk's tensors.
    pub(super) position: u32,
    pub(super) elements: u64,
    pub(super) frozen: bool,
    pub(super) forward_uses: u32,
    pub(super) backward_uses: u32,
    /// Its temporary gradient, ordinary GPU memory.
    pub(super) gradient: Option<Held>,
}

/// Everything that a rank's manager knows.
pub(super) struct Manager<'a> {
    pub(super) config: &'a ChunkConfig,
    pub(super) ids: Ids,
    pub(super) budget: Budget,
    pub(super) tracer: Tracer,
    /// By id.
    pub(super) chunks: Vec<Chunk>,
    /// Whether any tensor of the fp16 chunk with this number is trained.
    pub(super) trained: Vec<bool>,
    pub(super) parameters: Vec<Parameter>,
    pub(super) memory: Memory<'a>,
    pub(super) cache: Option<Cache>,
    pub(super) fp16_bytes: u64,
    /// Chunk bytes on each device as the tracer counts them: payloads, and with the cache also what
    /// it keeps and ADAM's buffers.
    pub(super) counted_bytes: [u64; 2],
    /// Bytes on the host that are no chunks' and come from torch.
    pub(super) torch_host_bytes: u64,
    /// Elements of parameters on the host that torch's own ADAM trains.
    pub(super) torch_elements: u64,
    /// Page-locked memory as the host sees it: payloads and ADAM's buffer, each as it was rounded.
    pub(super) pinned_bytes: u64,
    pub(super) phantom_bytes: u64,
    pub(super) margin: Option<Margin>,
    pub(super) stage: Stage,
    pub(super) step: StepSummary,
    /// Moves while the model is built.
    pub(super) construction: Traffic,
    pub(super) log: Vec<ChunkEvent>,
    pub(super) payload_allocations: u64,
    pub(super) cache_hits: u64,
}

impl Manager<'_> {
    pub(super) fn clock(&mut self) -> &mut Clock {
        &mut self.memory.clock
    }

    pub(super) fn log(&mut self, kind: ChunkEventKind, chunk: u32, bytes: u64) {
        let (step, moment) = (self.step.step, self.tracer.moment());
        self.log.push(ChunkEvent { step, stage: self.stage, moment, kind, chunk, bytes });
    }

    /// The parameters of the model are copied into the chunks of this rank, on the host (spec
    /// patrickstar 1.2).
    pub(super) fn construct(&mut self) -> Result<(), Halt> {
        let ids = self.ids;
        for number in (0..ids.real).filter(|&number| ids.is_local(number)) {
            self.construct_chunk(self.ids.of(ChunkList::Fp16, number))?;
            if self.trained[number as usize] {
                self.construct_chunk(self.ids.of(ChunkList::Fp32, number))?;
            }
        }
        Ok(())
    }

    fn construct_chunk(&mut self, id: u32) -> Result<(), Halt> {
        self.allocate(id, Device::Host)?;
        self.chunks[id as usize].set_all(TensorState::Hold);
        Ok(())
    }

    /// Brings a chunk's payload to the device (spec patrickstar 3.2).
    pub(super) fn access(&mut self, id: u32, device: Device) -> Result<(), Halt> {
        self.tracer.record(id, device);
        let chunk = &self.chunks[id as usize];
        match chunk.payload {
            None => self.allocate(id, device),
            Some(payload) if payload.device != device => {
                self.prepare(id, device)?;
                self.relocate(id, device)
            }
            Some(_) => Ok(()),
        }
    }

    /// Brings a tensor's chunk to the device and takes the tensor into use.
    pub(super) fn access_tensor(
        &mut self,
        id: u32,
        position: u32,
        device: Device,
    ) -> Result<(), Halt> {
        self.access(id, device)?;
        self.chunks[id as usize].set(position as usize, TensorState::Compute);
        Ok(())
    }

    /// Gives a chunk without payload one on the device.
    pub(super) fn allocate(&mut self, id: u32, device: Device) -> Result<(), Halt> {
        self.prepare(id, device)?;
        let (bytes, purpose) = (self.chunks[id as usize].bytes, self.purpose(id));
        let payload = self.obtain(device, bytes, purpose)?;
        self.chunks[id as usize].payload = Some(payload);
        self.log(ChunkEventKind::Allocate, id, bytes);
        Ok(())
    }

    fn purpose(&self, id: u32) -> Purpose {
        let chunk = &self.chunks[id as usize];
        Purpose::Chunk { list: chunk.list, remote: !self.ids.is_local(chunk.number) }
    }

    /// Drops a chunk's payload.
    pub(super) fn release(&mut self, id: u32) {
        let chunk = &mut self.chunks[id as usize];
        let bytes = chunk.bytes;
        chunk.set_all(TensorState::Free);
        if let Some(payload) = chunk.payload.take() {
            self.give(payload, bytes);
            self.log(ChunkEventKind::Drop, id, bytes);
        }
    }

    /// Copies a payload to the other device, where room is taken for granted.
    fn relocate(&mut self, id: u32, device: Device) -> Result<(), Halt> {
        let (bytes, purpose) = (self.chunks[id as usize].bytes, self.purpose(id));
        let new = self.obtain(device, bytes, purpose)?;
        // The search for room above may have had to give up every other chunk, not this one: it is
        // on the other device.
        let old = self.chunks[id as usize].payload.replace(new);
        let (kind, direction) = match device {
            Device::Gpu => (ChunkEventKind::ToGpu, Direction::HostToDevice),
            Device::Host => (ChunkEventKind::ToHost, Direction::DeviceToHost),
        };
        self.memory.push_transfer(bytes, direction);
        let last_use_ns = self.chunks[id as usize].last_use_ns;
        self.clock().move_chunk(bytes, direction, last_use_ns);
        if let Some(old) = old {
            self.give(old, bytes);
        }
        if device == Device::Gpu && self.config.quirks.phantom_host && self.cache.is_none() {
            self.phantom_bytes = self.phantom_bytes.saturating_add(bytes);
        }
        self.stage_traffic().add(device, bytes);
        self.log(kind, id, bytes);
        Ok(())
    }

    fn stage_traffic(&mut self) -> &mut Traffic {
        match self.stage {
            Stage::Init => &mut self.construction,
            Stage::Forward => &mut self.step.forward,
            Stage::Backward => &mut self.step.backward,
            Stage::Adam => &mut self.step.adam,
        }
    }

    /// A buffer: one that the cache has, or a new one.
    pub(super) fn obtain(
        &mut self,
        device: Device,
        bytes: u64,
        purpose: Purpose,
    ) -> Result<Payload, Halt> {
        if let Some(payload) = self.cache.as_mut().and_then(|cache| cache.pop(device, bytes)) {
            self.cache_hits += 1;
            return Ok(payload);
        }
        let held = match device {
            Device::Host => None,
            Device::Gpu => Some(match self.memory.ask(bytes, purpose) {
                Ok(held) => held,
                Err(refused) => self.ask_again(refused, bytes, purpose)?,
            }),
        };
        self.clock().allocate(bytes, device == Device::Gpu);
        self.payload_allocations += 1;
        self.count(device, bytes);
        if device == Device::Host {
            self.pin(bytes);
        }
        Ok(Payload { device, held })
    }

    /// The GPU refused a payload (spec patrickstar 7.1.2): gives up idle payloads, then moves
    /// chunks to the host one by one until it is granted, or none is left that may go.
    fn ask_again(
        &mut self,
        mut refused: Refused,
        bytes: u64,
        purpose: Purpose,
    ) -> Result<Held, Halt> {
        if self.config.quirks.oom_fallback {
            return Ok(self.memory.lose(refused));
        }
        let mut made_room = self.flush_cache(Device::Gpu);
        while made_room || self.move_one_away()? {
            made_room = false;
            self.memory.forget(refused);
            match self.memory.ask(bytes, purpose) {
                Ok(held) => return Ok(held),
                Err(again) => refused = again,
            }
        }
        Ok(self.memory.lose(refused))
    }

    /// Moves the first chunk of the eviction order from the GPU to the host; says whether one could
    /// go.
    fn move_one_away(&mut self) -> Result<bool, Halt> {
        let Some(&id) = self.eviction_order(Device::Gpu).first() else { return Ok(false) };
        if self.remaining(Device::Host)? < i128::from(self.chunks[id as usize].bytes) {
            return Ok(false);
        }
        self.relocate(id, Device::Host)?;
        self.flush_cache(Device::Gpu);
        Ok(true)
    }

    /// Frees what the cache keeps on the device; says whether that was anything.
    fn flush_cache(&mut self, device: Device) -> bool {
        let idle = self.cache.as_mut().map(|cache| cache.drain(device)).unwrap_or_default();
        for &(bytes, payload) in &idle {
            self.discard(payload, bytes);
        }
        !idle.is_empty()
    }

    /// Gives a buffer back, to the cache if it has room.
    pub(super) fn give(&mut self, payload: Payload, bytes: u64) {
        if self.cache.as_mut().is_some_and(|cache| cache.push(payload, bytes)) {
            self.clock().fill(bytes, payload.device == Device::Gpu);
            return;
        }
        self.discard(payload, bytes);
    }

    fn discard(&mut self, payload: Payload, bytes: u64) {
        if let Some(held) = payload.held {
            self.memory.free(held);
        }
        self.clock().release(bytes, payload.device == Device::Gpu);
        let counted = &mut self.counted_bytes[payload.device.index()];
        *counted = counted.saturating_sub(bytes);
        if payload.device == Device::Host {
            self.unpin(bytes);
        }
    }

    /// Page-locked memory of the host is taken.
    pub(super) fn pin(&mut self, bytes: u64) {
        self.pinned_bytes = self.pinned_bytes.saturating_add(self.rounded(bytes));
        self.note_host();
    }

    /// And given back.
    pub(super) fn unpin(&mut self, bytes: u64) {
        self.pinned_bytes = self.pinned_bytes.saturating_sub(self.rounded(bytes));
    }

    fn rounded(&self, bytes: u64) -> u64 {
        let rounds = self.config.pinned_power_of_two;
        if rounds { bytes.checked_next_power_of_two().unwrap_or(u64::MAX) } else { bytes }
    }

    /// Counts chunk bytes that come to the device.
    pub(super) fn count(&mut self, device: Device, bytes: u64) {
        let counted = &mut self.counted_bytes[device.index()];
        *counted = counted.saturating_add(bytes);
        let gpu_bytes = self.counted_bytes[Device::Gpu.index()];
        self.step.gpu_chunk_bytes_peak = self.step.gpu_chunk_bytes_peak.max(gpu_bytes);
    }

    /// Notes the host's peak.
    pub(super) fn note_host(&mut self) {
        let host_bytes = self.pinned_bytes.saturating_add(self.torch_host_bytes);
        self.step.host_bytes_peak = self.step.host_bytes_peak.max(host_bytes);
    }

    /// What chunks may have of the device now (spec patrickstar 2.3), in bytes.
    fn available(&self, device: Device) -> Result<i128, Halt> {
        match device {
            Device::Gpu => self.gpu_available(),
            Device::Host => Ok(self.host_available()),
        }
    }

    fn gpu_available(&self) -> Result<i128, Halt> {
        let budget = &self.budget;
        let reserve = match self.stage {
            Stage::Init => return Ok(budget.gpu_quota_bytes()),
            Stage::Adam => return Ok(budget.gpu_adam_bytes()),
            Stage::Forward => Reserve::Forward,
            Stage::Backward => Reserve::Backward,
        };
        if self.tracer.is_warm_up() || self.config.with_static_partition {
            return Ok(budget.gpu_warm_up_bytes());
        }
        Ok(budget.gpu_pass_bytes(reserve, self.tracer.gpu_bytes_now_or_next()?))
    }

    fn host_available(&self) -> i128 {
        let other_bytes = self.tracer.host_bytes_max();
        if !self.config.quirks.host_budget {
            return self.budget.host_bytes(other_bytes);
        }
        let in_pass = matches!(self.stage, Stage::Forward | Stage::Backward);
        if !in_pass || self.tracer.is_warm_up() || self.config.with_static_partition {
            return self.budget.host_bytes(0);
        }
        self.budget.host_bytes_shared(other_bytes)
    }

    /// What is left of the budget, in bytes; may be negative.
    fn remaining(&self, device: Device) -> Result<i128, Halt> {
        Ok(self.available(device)? - i128::from(self.counted_bytes[device.index()]))
    }

    /// Makes room on the device for a chunk (spec patrickstar 2.5).
    fn prepare(&mut self, id: u32, device: Device) -> Result<(), Halt> {
        let need_bytes = self.chunks[id as usize].bytes;
        let need = i128::from(need_bytes);
        let never_fits = self.available(device)? < need;
        if never_fits {
            self.over_budget(id, need_bytes);
            if self.config.quirks.over_budget {
                return Ok(());
            }
        }
        let extra = need - self.remaining(device)?;
        let enough = self.make_room(device, extra)?;
        if !enough && !never_fits {
            self.over_budget(id, need_bytes);
        }
        Ok(())
    }

    fn over_budget(&mut self, id: u32, need_bytes: u64) {
        self.step.over_budget += 1;
        self.log(ChunkEventKind::OverBudget, id, need_bytes);
    }

    /// Evicts chunks from the device, at least so many bytes of them; says whether there were
    /// enough.
    fn make_room(&mut self, device: Device, extra_bytes: i128) -> Result<bool, Halt> {
        if extra_bytes <= 0 {
            return Ok(true);
        }
        let mut moved_bytes = 0i128;
        for id in self.eviction_order(device) {
            self.evict(id, device.other())?;
            moved_bytes += i128::from(self.chunks[id as usize].bytes);
            if moved_bytes >= extra_bytes {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Chunks that may leave the device: farthest next use first, then the smallest id (spec
    /// patrickstar 3.1).
    fn eviction_order(&self, device: Device) -> Vec<u32> {
        let may_leave =
            |chunk: &Chunk| chunk.is_on(device) && !chunk.pinned && chunk.state().movable();
        let chunks = (0u32..).zip(&self.chunks).filter(|(_, chunk)| may_leave(chunk));
        let mut order: Vec<(u64, u32)> =
            chunks.map(|(id, _)| (self.tracer.next_use(id, device), id)).collect();
        order.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        order.into_iter().map(|(_, id)| id).collect()
    }

    /// Moves a chunk to the other device, if that one's budget has room.
    fn evict(&mut self, id: u32, to: Device) -> Result<(), Halt> {
        let chunk_bytes = self.chunks[id as usize].bytes;
        let remaining = self.remaining(to)?;
        if remaining >= i128::from(chunk_bytes) {
            return self.relocate(id, to);
        }
        self.log(ChunkEventKind::CannotMove, id, chunk_bytes);
        let limits = i128::from(i64::MIN)..=i128::from(i64::MAX);
        Err(Halt::Stop(HardStop {
            step: self.step.step,
            stage: self.stage,
            moment: self.tracer.moment(),
            chunk: id,
            chunk_bytes,
            from: to.other(),
            to,
            remaining_bytes: remaining.clamp(*limits.start(), *limits.end()) as i64,
        }))
    }

    /// A moment ends: samples, counts on, and makes room for what the program needs in the next
    /// (spec patrickstar 2.1, 2.2, 2.5).
    pub(super) fn tick(&mut self) -> Result<(), Halt> {
        let peak_bytes = self.memory.take_peak();
        let used_bytes = match self.config.with_async_mem_monitor {
            true => peak_bytes,
            false => self.memory.allocated_bytes(),
        };
        let chunk_bytes = self.counted_bytes[Device::Gpu.index()];
        let other_bytes = i128::from(used_bytes) - i128::from(chunk_bytes);
        let other_bytes = other_bytes.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
        let host_bytes = self.torch_host_bytes.saturating_add(self.phantom_bytes);
        self.tracer.tick(other_bytes, host_bytes)?;
        if self.tracer.is_warm_up() {
            return Ok(());
        }
        let quota_bytes = self.budget.gpu_quota_bytes();
        let room_bytes = quota_bytes - i128::from(self.tracer.gpu_bytes_next()?);
        self.make_room(Device::Gpu, i128::from(chunk_bytes) - room_bytes)?;
        Ok(())
    }
}
