//! What the manager does before and after each module (spec patrickstar 1.2, 1.3, 2.1).
//!
//! ```text
//!   before: access each parameter ─> tick ─> make room for the next moment
//!             └ backward, first visit: attach its temporary gradient
//!   after:  forward: HoldAfterForward
//!           backward, last use: gradient over the parameter, HoldAfterBackward
//! ```
//!
//! Frozen parameters are not PatrickStar's: it trains everything. Here they lie in chunks like the
//! others, have no gradient, and a chunk of only such parameters has no fp32, momentum and variance
//! chunks and no ADAM.

use super::manager::{Halt, Manager};
use super::memory::Purpose;
use super::states::{ChunkList, Device, TensorState};
use super::summary::Stage;

impl Manager<'_> {
    /// A forward pass begins: the first of a step.
    pub(super) fn begin_forward(&mut self) {
        for chunk in &mut self.chunks {
            chunk.unused = 0;
        }
        for parameter in &mut self.parameters {
            parameter.forward_uses = 0;
            parameter.backward_uses = 0;
        }
        self.stage = Stage::Forward;
        self.memory.take_peak();
    }

    /// The forward pass of a step is over, its backward pass begins.
    pub(super) fn begin_backward(&mut self) {
        for number in 0..self.ids.numbers() {
            let id = self.ids.of(ChunkList::Fp16, number);
            self.chunks[id as usize].end_forward();
        }
        self.stage = Stage::Backward;
    }

    /// The backward pass of a step is over: how much of ADAM can run on the GPU (spec patrickstar
    /// 2.3).
    pub(super) fn end_backward(&mut self) {
        let (ranks, numbers) = (self.ids.world.ranks, self.ids.numbers());
        let remote = if self.config.with_mem_saving_comm { 1 } else { ranks - 1 };
        let fp16_chunks = u64::from(numbers / ranks) + u64::from(remote);
        let other_bytes = self.tracer.gpu_bytes_max();
        self.margin = Some(match self.config.use_hybrid_adam {
            true => self.budget.margin(other_bytes, fp16_chunks),
            false => Default::default(),
        });
    }

    /// Before a module's forward pass, also one that is recomputed.
    pub(super) fn pre_forward(&mut self, parameters: &[u32]) -> Result<(), Halt> {
        for &parameter in parameters {
            self.take_into_use(parameter)?;
            if self.stage == Stage::Forward {
                self.parameters[parameter as usize].forward_uses += 1;
            }
        }
        self.tick()
    }

    /// After a module's forward pass.
    pub(super) fn post_forward(&mut self, parameters: &[u32]) -> Result<(), Halt> {
        for &parameter in parameters {
            self.leave(parameter, TensorState::HoldAfterForward)?;
        }
        Ok(())
    }

    /// Before a module's backward pass.
    pub(super) fn pre_backward(&mut self, parameters: &[u32]) -> Result<(), Halt> {
        for &index in parameters {
            self.take_into_use(index)?;
            let parameter = self.parameters[index as usize];
            let is_first = parameter.backward_uses == 0 && parameter.gradient.is_none();
            if is_first && !parameter.frozen {
                let gradient = self
                    .memory
                    .ask_or_lose(parameter.elements.saturating_mul(2), Purpose::Gradient);
                self.parameters[index as usize].gradient = Some(gradient);
            }
        }
        self.tick()
    }

    /// After a module's backward pass. PyTorch does not call this hook for a module whose inputs
    /// need no gradient: its tensors stay in use until ADAM (spec patrickstar 1.3).
    pub(super) fn post_backward(&mut self, parameters: &[u32]) -> Result<(), Halt> {
        for &index in parameters {
            let parameter = &mut self.parameters[index as usize];
            parameter.backward_uses += 1;
            if parameter.backward_uses < parameter.forward_uses {
                self.leave(index, TensorState::Hold)?;
            } else {
                self.finish_gradient(index)?;
            }
        }
        Ok(())
    }

    /// What no hook after a backward pass released, the optimizer does.
    pub(super) fn release_stuck(&mut self) -> Result<(), Halt> {
        for index in 0..self.parameters.len() as u32 {
            let parameter = self.parameters[index as usize];
            let id = self.ids.of(ChunkList::Fp16, parameter.number);
            let state = self.chunks[id as usize].tensor(parameter.position as usize);
            if state == TensorState::Compute || parameter.gradient.is_some() {
                self.finish_gradient(index)?;
            }
        }
        Ok(())
    }

    /// The gradient takes the parameter's place in the chunk, and its temporary goes.
    fn finish_gradient(&mut self, index: u32) -> Result<(), Halt> {
        if let Some(gradient) = self.parameters[index as usize].gradient.take() {
            if self.config.loss_scaler {
                self.check_overflow(index);
            }
            self.memory.free(gradient);
        }
        self.leave(index, TensorState::HoldAfterBackward)
    }

    /// The loss scaler looks at a gradient through an fp32 copy, and waits for what it sees (spec
    /// patrickstar 2.2, 7.4).
    fn check_overflow(&mut self, index: u32) {
        let elements = self.parameters[index as usize].elements;
        let copy = self.memory.ask_or_lose(elements.saturating_mul(4), Purpose::Gradient);
        self.memory.free(copy);
        self.clock().synchronize();
    }

    fn take_into_use(&mut self, index: u32) -> Result<(), Halt> {
        let parameter = self.parameters[index as usize];
        self.fetch(parameter.number)?;
        let id = self.ids.of(ChunkList::Fp16, parameter.number);
        self.access_tensor(id, parameter.position, Device::Gpu)
    }

    fn leave(&mut self, index: u32, state: TensorState) -> Result<(), Halt> {
        let parameter = self.parameters[index as usize];
        let id = self.ids.of(ChunkList::Fp16, parameter.number);
        let launched_ns = self.clock().launched_ns();
        let chunk = &mut self.chunks[id as usize];
        chunk.set(parameter.position as usize, state);
        chunk.last_use_ns = launched_ns;
        self.drop_if_done(parameter.number, state)
    }
}
