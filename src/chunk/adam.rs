//! ADAM: which groups run where, and the copies of gradients and parameters (spec patrickstar 3.2,
//! 3.3).
//!
//! ```text
//!   order of local chunks   0 .. k-1 on the GPU │ k .. on the host
//!   group i:  fp16 ──read──> buffer ─┐
//!             fp32, momentum, variance ─ADAM─> fp32
//!   group i + 1: the same, and then the fp32 of group i ──write back──> its fp16
//! ```
//!
//! ADAM never moves the fp16 payload itself. A write-back is put off until the next group's first
//! tensor is done, the last one to the end of the pass.

use super::manager::{Halt, Manager};
use super::memory::{Held, Purpose};
use super::states::{ChunkList, Device, Payload, TensorState};
use super::summary::{ChunkEventKind, Stage};
use crate::trace::Direction;

/// Lists of ADAM's own, in the order in which it uses them.
const STATE: [ChunkList; 3] = [ChunkList::Fp32, ChunkList::Momentum, ChunkList::Variance];

/// Buffers of one pass of ADAM.
struct Buffers {
    /// Counted as chunks, with the cache: with their bytes.
    cached: Vec<(Payload, u64)>,
    /// Ordinary GPU memory.
    plain: Vec<Held>,
    /// Page-locked memory, without the cache.
    pinned_bytes: u64,
}

/// A tensor in a group of ADAM.
#[derive(Clone, Copy)]
struct Tensor {
    number: u32,
    position: u32,
    elements: u64,
}

impl Manager<'_> {
    /// Groups whose ADAM runs on the GPU.
    pub(super) fn gpu_adam_groups(&self) -> u64 {
        let local = (0u32..).zip(&self.trained);
        let local = local.filter(|&(number, trained)| *trained && self.ids.is_local(number));
        self.margin.map_or(0, |margin| margin.gpu_groups).min(local.count() as u64)
    }

    /// The optimizer is called: its moment ends, and then it releases what no hook did, whose
    /// temporary gradients that moment still saw (spec patrickstar 1.3, 2.1). If a gradient has
    /// overflown, that is all (spec patrickstar 7.1.8, 7.1.9).
    pub(super) fn begin_adam(&mut self) -> Result<(), Halt> {
        self.stage = Stage::Adam;
        self.tick()?;
        self.release_stuck()
    }

    /// The optimizer's step.
    pub(super) fn adam(&mut self) -> Result<(), Halt> {
        self.begin_adam()?;
        self.torch_adam();
        let gpu_groups = self.gpu_adam_groups();
        let buffers = self.take_buffers()?;
        let mut unwritten = None;
        for (group, tensors) in (0u64..).zip(self.groups()) {
            let device = if group < gpu_groups { Device::Gpu } else { Device::Host };
            self.read_gradients(tensors[0].number, device);
            for &tensor in &tensors {
                self.step_tensor(tensor, device)?;
                if let Some(number) = unwritten.take() {
                    self.write_back(number, false);
                }
            }
            unwritten = Some(tensors[0].number);
        }
        if let Some(number) = unwritten {
            self.write_back(number, true);
        }
        self.give_buffers(buffers);
        Ok(())
    }

    /// ADAM of parameters that torch keeps on the host, whole on every rank (spec patrickstar 4.4,
    /// 5.3).
    fn torch_adam(&mut self) {
        let elements = self.torch_elements;
        if elements == 0 {
            return;
        }
        if self.ids.world.ranks > 1 {
            self.step.collectives.host_all_reduce_bytes = elements.saturating_mul(4);
        }
        self.clock().adam(elements, false);
    }

    /// Trained tensors of this rank's chunks, chunk by chunk in the optimizer's order.
    fn groups(&self) -> Vec<Vec<Tensor>> {
        let trained = self
            .parameters
            .iter()
            .filter(|parameter| !parameter.frozen && self.ids.is_local(parameter.number));
        let tensors: Vec<Tensor> = trained
            .map(|parameter| Tensor {
                number: parameter.number,
                position: parameter.position,
                elements: parameter.elements,
            })
            .collect();
        tensors.chunk_by(|a, b| a.number == b.number).map(<[Tensor]>::to_vec).collect()
    }

    /// Updates one tensor on the device.
    fn step_tensor(&mut self, tensor: Tensor, device: Device) -> Result<(), Halt> {
        let on_gpu = device == Device::Gpu;
        for list in STATE {
            self.access_tensor(self.ids.of(list, tensor.number), tensor.position, device)?;
        }
        // fp32 gradient, square root, quotient.
        let temporaries = if on_gpu && self.config.adam_temporaries { 3 } else { 0 };
        let bytes = tensor.elements.saturating_mul(4);
        let held: Vec<Held> =
            (0..temporaries).map(|_| self.memory.ask_or_lose(bytes, Purpose::Result)).collect();
        self.clock().adam(tensor.elements, on_gpu);
        for held in held {
            self.memory.free(held);
        }
        let launched_ns = self.clock().launched_ns();
        for list in STATE {
            let chunk = &mut self.chunks[self.ids.of(list, tensor.number) as usize];
            chunk.set(tensor.position as usize, TensorState::Hold);
            chunk.last_use_ns = launched_ns;
        }
        Ok(())
    }

    /// A pinned buffer for gradients on the host, and one on the GPU if there is a margin, both of
    /// which the cache may have; and on the GPU one for parameters in fp32, if they go there like
    /// that. The last is ordinary memory even with the cache: else chunks would have less room than
    /// they do have in spec patrickstar 5.12 (4 -> 6 evictions).
    fn take_buffers(&mut self) -> Result<Buffers, Halt> {
        let bytes = self.fp16_bytes;
        let mut buffers = Buffers { cached: Vec::new(), plain: Vec::new(), pinned_bytes: 0 };
        if self.config.quirks.write_back {
            let held = self.memory.ask_or_lose(bytes.saturating_mul(2), Purpose::Buffer);
            buffers.plain.push(held);
        }
        let has_margin = self.margin.is_some_and(|margin| margin.groups > 0.0);
        let devices = [(Device::Host, true), (Device::Gpu, has_margin)];
        for (device, _) in devices.into_iter().filter(|&(_, wanted)| wanted) {
            if self.cache.is_some() {
                let payload = self.obtain(device, bytes, Purpose::Buffer)?;
                buffers.cached.push((payload, bytes));
            } else if device == Device::Gpu {
                buffers.plain.push(self.memory.ask_or_lose(bytes, Purpose::Buffer));
            } else {
                self.pin(bytes);
                buffers.pinned_bytes = bytes;
            }
        }
        Ok(buffers)
    }

    fn give_buffers(&mut self, buffers: Buffers) {
        for (payload, bytes) in buffers.cached {
            self.give(payload, bytes);
        }
        for held in buffers.plain {
            self.memory.free(held);
        }
        self.unpin(buffers.pinned_bytes);
    }

    /// A group's gradients come to where its ADAM runs: whole chunks, waste and all.
    fn read_gradients(&mut self, number: u32, to: Device) {
        let id = self.ids.of(ChunkList::Fp16, number);
        let bytes = self.fp16_bytes;
        if self.adam_copy(id, self.device_of(id), to, bytes) {
            self.step.gradient_reads.add(to, bytes);
            self.log(ChunkEventKind::GradientRead, id, bytes);
        }
    }

    /// A group's parameters go from the fp32 chunk to the fp16 chunk (spec patrickstar 3.3, 7.1.6).
    fn write_back(&mut self, number: u32, is_last: bool) {
        let id = self.ids.of(ChunkList::Fp16, number);
        let from = self.device_of(self.ids.of(ChunkList::Fp32, number));
        let to = self.device_of(id);
        let as_fp32 = self.config.quirks.write_back && to == Device::Gpu && !is_last;
        let bytes = self.fp16_bytes.saturating_mul(if as_fp32 { 2 } else { 1 });
        if self.adam_copy(id, from, to, bytes) {
            self.step.write_backs.add(to, bytes);
            self.log(ChunkEventKind::WriteBack, id, bytes);
        }
    }

    fn device_of(&self, id: u32) -> Device {
        self.chunks[id as usize].payload.map_or(Device::Host, |payload| payload.device)
    }

    /// A copy of ADAM's; says whether it crosses the link.
    fn adam_copy(&mut self, id: u32, from: Device, to: Device, bytes: u64) -> bool {
        if from == to {
            self.clock().adam_local_copy(bytes, to == Device::Gpu);
        } else {
            let direction = match to {
                Device::Gpu => Direction::HostToDevice,
                Device::Host => Direction::DeviceToHost,
            };
            self.memory.push_transfer(bytes, direction);
            self.clock().adam_copy(bytes, direction);
        }
        let launched_ns = self.clock().launched_ns();
        self.chunks[id as usize].last_use_ns = launched_ns;
        from != to
    }
}
