//! The update: clipping, AdamW over lists of tensors, gradients dropped.
//!
//! ```text
//!   clip    norms of all gradients ── stack ──> norm of norms ──> factor      (in place after that)
//!   first   two moments of every parameter, by parameter
//!   every   roots of all second moments at once, freed the last first
//!   zero    gradients, by parameter
//! ```

use std::collections::BTreeMap;

use super::cx::{Cx, ParamRef};
use super::emitter::Tensor;
use super::job::{Job, Optimizer, OptimizerOffload};
use super::offload;
use crate::trace::Role;

/// What the optimizer keeps between steps.
pub(super) struct State {
    optimizer: Optimizer,
    clip: bool,
    /// Gradients are DTensors, as FSDP2 makes them.
    distributed: bool,
    /// Two moments of each parameter, by name. Counts of steps are on the host.
    moments: BTreeMap<String, [Tensor; 2]>,
}

impl State {
    /// Nothing yet: PyTorch makes state at the first update.
    pub(super) fn new(job: &Job) -> State {
        State {
            optimizer: job.train.optimizer,
            clip: job.train.clip,
            distributed: job.strategy.zero >= 3,
            moments: BTreeMap::new(),
        }
    }

    /// One update, after which gradients are dropped.
    pub(super) fn step(&mut self, cx: &mut Cx, job: &Job) {
        if job.strategy.optimizer_offload != OptimizerOffload::None {
            return offload::update(cx);
        }
        let params = cx.params();
        let trained: Vec<ParamRef> =
            params.iter().filter(|param| param.grad.borrow().is_some()).cloned().collect();
        if self.clip {
            clip(cx, &trained, self.distributed);
        }
        if matches!(self.optimizer, Optimizer::Adamw | Optimizer::AdamwFused) {
            self.make_moments(cx, &trained);
        }
        let bytes: u64 = trained.iter().map(grad_bytes).fold(0, u64::saturating_add);
        if self.optimizer == Optimizer::Adamw {
            let mut roots: Vec<Tensor> = trained
                .iter()
                .map(|param| cx.new_tensor("foreach_sqrt", grad_bytes(param)))
                .collect();
            while roots.pop().is_some() {}
        }
        if self.optimizer != Optimizer::None {
            // Weight, gradient and both moments are read, all but the gradient written.
            cx.compute(0.0, 7.0 * bytes as f64);
        }
        for param in &params {
            param.grad.borrow_mut().take();
        }
    }

    fn make_moments(&mut self, cx: &mut Cx, trained: &[ParamRef]) {
        for param in trained {
            if !self.moments.contains_key(&param.name) {
                let bytes = grad_bytes(param);
                let made = [0, 1].map(|_| cx.new_tensor_of("zeros_like", bytes, Role::Optimizer));
                self.moments.insert(param.name.clone(), made);
            }
        }
    }
}

/// Bytes of a parameter's gradient, as large as what is updated with it.
fn grad_bytes(param: &ParamRef) -> u64 {
    param.grad.borrow().as_ref().map_or(0, |grad| grad.bytes())
}

/// Bytes of an element of a parameter's gradient.
fn element_bytes(param: &ParamRef) -> u64 {
    let elements = param.grad_elements();
    grad_bytes(param).checked_div(elements).unwrap_or(0).max(1)
}

/// `clip_grad_norm_`: norms of all gradients in one launch, each summed in pieces of 65,536
/// elements; gradients are scaled in place.
fn clip(cx: &mut Cx, trained: &[ParamRef], distributed: bool) {
    const PIECE_ELEMENTS: u64 = 65_536;
    let Some(first) = trained.first() else { return };
    let width = element_bytes(first);
    let count = trained.len() as u64;
    let most = trained.iter().map(|param| grad_bytes(param) / width).max().unwrap_or(0);
    let pieces = cx.new_tensor("norm_pieces", 4 * count * most.div_ceil(PIECE_ELEMENTS));
    let mut norms: Vec<Tensor> = trained.iter().map(|_| cx.new_tensor("norm", width)).collect();
    drop(pieces);
    let stacked = cx.new_tensor("stack", width * count);
    // Norms of shares are summed over ranks: raised to their power, sent, and rooted.
    let summed = distributed.then(|| {
        let [power, sent, summed] =
            ["pow", "all_reduce", "root"].map(|op| cx.new_tensor(op, width * count));
        drop(power);
        drop(sent);
        summed
    });
    let total = cx.new_tensor("norm", width);
    drop(summed);
    drop(stacked);
    while norms.pop().is_some() {}
    let sum = cx.new_tensor("add", width);
    let inverse = cx.new_tensor("reciprocal", width);
    let factor = cx.new_tensor("mul", width);
    drop(inverse);
    drop(sum);
    let clamped = cx.new_tensor("clamp", width);
    drop(factor);
    let bytes: u64 = trained.iter().map(grad_bytes).fold(0, u64::saturating_add);
    cx.compute(0.0, 3.0 * bytes as f64);
    drop(clamped);
    drop(total);
}
