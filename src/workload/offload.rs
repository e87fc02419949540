//! What goes to the host: saved values, inputs of recomputed layers, gradients, the optimizer.
//!
//! ```text
//!   forward      saved values, or inputs of recomputed layers    ── down ──>
//!   backward     the same as copies                              <── up ────
//!                each gradient as it is made, freed at once      ── down ──>
//!   optimizer    (gradients that are still here                  ── down ──>)
//!                weights in fp32, cast here                      <── up ────
//! ```
//!
//! The one design decision: the host's side is not modelled; only what passes and what the device
//! holds for it meanwhile.

use std::rc::Rc;

use super::cx::{Cx, Var};
use super::job::{ActivationOffload, Job, OptimizerOffload};
use crate::trace::Direction;

/// Sets up what a job keeps on the host.
pub(super) fn begin(cx: &mut Cx, job: &Job) {
    cx.checkpoints_to_host = job.strategy.activation_offload == ActivationOffload::Checkpoints;
    cx.gradients_to_host = job.strategy.optimizer_offload == OptimizerOffload::Gradients;
}

/// Runs a forward pass, under `save_on_cpu` if the job's saved values go to the host.
pub(super) fn forward(cx: &mut Cx, job: &Job, body: impl FnOnce(&mut Cx) -> Var) -> Var {
    match job.strategy.activation_offload {
        ActivationOffload::Saved => cx.saved_on_host(body),
        ActivationOffload::None | ActivationOffload::Checkpoints => body(cx),
    }
}

/// An update on the host: gradients that are still on the device go down, then the host's fp32
/// weights come up one by one and are cast to those of the device.
pub(super) fn update(cx: &mut Cx) {
    let params = cx.params();
    for param in &params {
        if let Some(grad) = param.grad.borrow_mut().take() {
            cx.transfer(grad.bytes(), Direction::DeviceToHost);
        }
    }
    for param in params.iter().filter(|param| param.trainable) {
        let Some(held) = param.held.borrow().as_ref().map(Rc::clone) else { continue };
        let wide_bytes = 4 * param.elements;
        if held.bytes() < wide_bytes {
            let wide = cx.new_tensor("to_device", wide_bytes);
            cx.transfer(wide_bytes, Direction::HostToDevice);
            drop(wide);
        } else {
            cx.transfer(held.bytes(), Direction::HostToDevice);
        }
    }
}
