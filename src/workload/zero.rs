//! ZeRO: what ranks that train on different data share out among themselves.
//!
//! Stage 3 as FSDP2 does it, a layer a group and the rest in the root's. Weights are gathered into
//! one buffer, copied out, and freed when the layer has run; gradients are summed over ranks into
//! one share a group:
//!
//! ```text
//!   gather stream   in out            in out              in out
//!   forward         root copies  | layer 0 copies ... free | layer 1 copies ... free | ...
//!   backward        layer n copies, gather n − 1, ... free, reduce n | layer n − 1 copies ...
//!   reduce stream                                           share n
//! ```
//!
//! A buffer of gathered weights lives until the next group is copied out in the forward pass, and
//! only until its own is in the backward pass; one of gradients until the next is made.
//!
//! Stages 1 and 2 keep all weights. They sum gradients into shares, stage 1 before the update,
//! stage 2 in buckets as they come, and update their share of every weight.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::cx::{Boundary, Cx, ModuleHooks, ParamRef};
use super::emitter::{Tensor, part};
use super::job::Job;
use crate::trace::Role;

/// Stream on which weights are gathered.
const GATHER_STREAM: u64 = 1;
/// Stream on which gradients are reduced.
const REDUCE_STREAM: u64 = 2;
/// Elements of stage 2's buckets (DeepSpeed's `reduce_bucket_size`).
const BUCKET_ELEMENTS: u64 = 500_000_000;

/// The job as its operations see it: FSDP2 casts whole groups of weights when it gathers them, so
/// that nothing is left to autocast.
pub(super) fn computed_as(job: &Job) -> Job {
    let mut computed = job.clone();
    if job.strategy.zero >= 3 {
        computed.train.dtype = job.train.autocast.unwrap_or(job.train.dtype);
        computed.train.autocast = None;
    }
    computed
}

/// A whole weight that is to be shared out.
pub(super) struct Loaded {
    /// Its size.
    pub(super) bytes: u64,
    /// Its memory, if it is there already; else it comes when its group is shared out.
    pub(super) tensor: Option<Tensor>,
}

/// Shares out what the job's stage says. `whole` are the weights that were loaded, for stage 3: in
/// the order of parameters, each of which holds nothing yet.
pub(super) fn begin(cx: &mut Cx, job: &Job, whole: Vec<Loaded>) {
    if job.strategy.zero >= 3 {
        let hooks = Fsdp::new(cx, job, whole);
        cx.hooks = Some(Box::new(hooks));
    } else if job.strategy.zero > 0 {
        cx.hooks = Some(Box::new(Shares {
            ranks: job.parallel.data.max(1),
            stage: job.strategy.zero,
            bucket: Vec::new(),
            bucket_elements: 0,
        }));
    }
}

/// The layer that a module is part of, by the first number in its path.
fn layer_of(module: &str) -> Option<&str> {
    let mut end = 0;
    for name in module.split('.') {
        end += name.len();
        if name.parse::<u64>().is_ok() {
            return module.get(..end);
        }
        end += 1;
    }
    None
}

/// Parameters that are gathered together.
struct Group {
    params: Vec<ParamRef>,
}

impl Group {
    fn share_elements(&self, ranks: u64) -> u64 {
        self.params.iter().map(|param| param.elements.div_ceil(ranks)).sum()
    }
}

struct Fsdp {
    ranks: u64,
    /// Bytes of an element of shares and their gradients, and of gathered weights.
    share_bytes: u64,
    compute_bytes: u64,
    /// The root's, then the layers'.
    groups: Vec<Group>,
    group_of_path: BTreeMap<String, usize>,
    /// Buffer of the group that was copied out last in this forward pass.
    copied: Option<Tensor>,
    /// Buffer of a group that is gathered ahead.
    ahead: Option<(usize, Tensor)>,
    /// Buffer of the gradients that were reduced last.
    reduced: Option<Tensor>,
    /// Whole gradients, by their parameters' names.
    grads: BTreeMap<String, Tensor>,
}

impl Fsdp {
    fn new(cx: &mut Cx, job: &Job, whole: Vec<Loaded>) -> Fsdp {
        let mut hooks = Fsdp {
            ranks: job.parallel.data.max(1),
            share_bytes: job.train.dtype.bytes(),
            compute_bytes: computed_as(job).train.dtype.bytes(),
            groups: vec![Group { params: Vec::new() }],
            group_of_path: BTreeMap::new(),
            copied: None,
            ahead: None,
            reduced: None,
            grads: BTreeMap::new(),
        };
        let mut loaded: Vec<Vec<Loaded>> = vec![Vec::new()];
        for (param, weight) in cx.params().into_iter().zip(whole) {
            let index = match layer_of(&param.name) {
                None => 0,
                Some(layer) => *hooks.group_of_path.entry(layer.to_owned()).or_insert_with(|| {
                    hooks.groups.push(Group { params: Vec::new() });
                    loaded.push(Vec::new());
                    loaded.len() - 1
                }),
            };
            hooks.groups[index].params.push(param);
            loaded[index].push(weight);
        }
        // Layers are shared out before the root.
        let mut root = None;
        for (index, whole) in loaded.into_iter().enumerate() {
            if index == 0 {
                root = Some(whole);
                continue;
            }
            hooks.share_out(cx, index, whole);
        }
        hooks.share_out(cx, 0, root.unwrap_or_default());
        hooks
    }

    /// A group's parameters hold their shares from here on, and its whole weights go.
    fn share_out(&self, cx: &mut Cx, index: usize, weights: Vec<Loaded>) {
        let mut bring =
            |Loaded { bytes, tensor }| tensor.unwrap_or_else(|| cx.new_tensor("parameter", bytes));
        let whole: Vec<Tensor> = weights.into_iter().map(&mut bring).collect();
        for param in &self.groups[index].params {
            let share = param.elements.div_ceil(self.ranks);
            param.share_elements.set(Some(share));
            cx.hold(param, share * self.share_bytes);
        }
        whole.into_iter().for_each(drop);
    }

    /// Gathers a group's weights into a buffer.
    fn gather(&self, cx: &mut Cx, index: usize) -> Tensor {
        let bytes = self.groups[index].share_elements(self.ranks) * self.compute_bytes;
        let before = cx.emitter.borrow_mut().use_stream(GATHER_STREAM);
        let input = cx.new_tensor_of("all_gather_input", bytes, Role::Communication);
        let whole = self.ranks * bytes;
        let output = cx.new_tensor_of("all_gather_output", whole, Role::Communication);
        cx.receive(whole - bytes);
        drop(input);
        cx.emitter.borrow_mut().use_stream(before);
        output
    }

    /// Copies gathered weights out of their buffer, one by one.
    fn copy_out(&self, cx: &mut Cx, index: usize) {
        let params = &self.groups[index].params;
        for param in params {
            let bytes = param.elements.div_ceil(self.ranks) * self.ranks * self.compute_bytes;
            let copy = cx.new_tensor_of("all_gather_copy_out", bytes, Role::Communication);
            *param.gathered.borrow_mut() = Some(copy);
            cx.compute(0.0, 2.0 * bytes as f64);
        }
        cx.workspace("split_with_sizes_copy", split_scratch_bytes(params.len() as u64));
    }

    fn free_gathered(&self, index: usize) {
        for param in &self.groups[index].params {
            param.gathered.borrow_mut().take();
        }
    }

    /// Before a group runs forward. A group that runs again for its backward pass is there already.
    fn before_forward(&mut self, cx: &mut Cx, index: usize) {
        let output = self.gather(cx, index);
        self.copy_out(cx, index);
        self.copied = Some(output);
    }

    fn before_backward(&mut self, cx: &mut Cx, index: usize) {
        let output = match self.ahead.take() {
            Some((ahead, output)) if ahead == index => output,
            _ => self.gather(cx, index),
        };
        self.copy_out(cx, index);
        drop(output);
        if index > 1 {
            self.ahead = Some((index - 1, self.gather(cx, index - 1)));
        }
    }

    /// Frees a group's weights and reduces its gradients to this rank's share.
    fn after_backward(&mut self, cx: &mut Cx, index: usize) {
        self.free_gathered(index);
        let trained: Vec<ParamRef> = self.groups[index].params.to_vec();
        let mut grads: Vec<(ParamRef, Tensor)> = trained
            .into_iter()
            .filter_map(|param| self.grads.remove(&param.name).map(|grad| (param, grad)))
            .collect();
        if grads.is_empty() {
            return;
        }
        let share = |param: &ParamRef| param.elements.div_ceil(self.ranks) * self.share_bytes;
        let shares: u64 = grads.iter().map(|(param, _)| share(param)).sum();
        let count = grads.len() as u64;
        self.reduced = None;
        let whole = self.ranks * shares;
        let input = cx.new_tensor_of("reduce_scatter_input", whole, Role::Communication);
        cx.workspace("chunk_cat", chunk_cat_scratch_bytes(whole, count));
        cx.compute(0.0, 2.0 * whole as f64);
        let params: Vec<ParamRef> = grads.iter().map(|(param, _)| Rc::clone(param)).collect();
        // The last one is still in a loop's variable when the list goes, the last first.
        let last = grads.pop();
        while grads.pop().is_some() {}
        let before = cx.emitter.borrow_mut().use_stream(REDUCE_STREAM);
        let output = cx.new_tensor_of("reduce_scatter_output", shares, Role::Gradient);
        cx.receive(whole - shares);
        cx.emitter.borrow_mut().use_stream(before);
        drop(last);
        for param in params {
            let bytes = share(&param);
            let mut held = param.grad.borrow_mut();
            if held.is_none() {
                *held = Some(part(&cx.emitter, &output, bytes));
            }
        }
        self.reduced = Some(input);
    }
}

impl ModuleHooks for Fsdp {
    fn entered(&mut self, cx: &mut Cx, path: &str, backward: bool) {
        let Some(&index) = self.group_of_path.get(path) else { return };
        if backward {
            self.before_backward(cx, index);
        } else if !cx.runs_again() {
            self.before_forward(cx, index);
        }
    }

    fn left(&mut self, cx: &mut Cx, path: &str, backward: bool) {
        let Some(&index) = self.group_of_path.get(path) else { return };
        if backward {
            self.after_backward(cx, index);
        } else if !cx.runs_again() {
            self.free_gathered(index);
        }
    }

    fn gradient(&mut self, cx: &mut Cx, param: &ParamRef, grad: Tensor) -> Option<Tensor> {
        if self.grads.contains_key(&param.name) {
            cx.compute(0.0, 3.0 * grad.bytes() as f64);
        } else {
            grad.holds(Role::Gradient);
            self.grads.insert(param.name.clone(), grad);
        }
        None
    }

    fn reached(&mut self, cx: &mut Cx, boundary: Boundary) {
        match boundary {
            Boundary::ForwardBegins => self.before_forward(cx, 0),
            Boundary::ForwardEnds => self.copied = None,
            Boundary::BackwardBegins => {
                let last = self.groups.len() - 1;
                if last > 0 {
                    self.ahead = Some((last, self.gather(cx, last)));
                }
            }
            Boundary::BackwardEnds => {
                self.after_backward(cx, 0);
                self.reduced = None;
            }
            Boundary::Update | Boundary::Updated => {}
        }
    }
}

/// Scratch of the kernel that copies so many weights out of a buffer: where each block of threads
/// begins and what it copies, 196 bytes a weight of two ranks.
fn split_scratch_bytes(params: u64) -> u64 {
    31_524 + 196 * params
}

/// Scratch of the kernel that puts gradients together: four bytes for every 2 KiB, some more for
/// each of them.
fn chunk_cat_scratch_bytes(bytes: u64, grads: u64) -> u64 {
    bytes / 512 + 48 * grads + 16
}

/// Stages 1 and 2.
struct Shares {
    ranks: u64,
    stage: u64,
    /// Whole gradients that wait for their bucket to fill.
    bucket: Vec<(ParamRef, Tensor)>,
    bucket_elements: u64,
}

impl Shares {
    /// Sums whole gradients over ranks into this rank's share of each.
    fn reduce(&self, cx: &mut Cx, grads: Vec<(ParamRef, Tensor)>) {
        for (param, whole) in grads {
            let share = param.elements.div_ceil(self.ranks);
            let bytes = whole.bytes() / param.elements * share;
            param.share_elements.set(Some(share));
            cx.receive(whole.bytes().saturating_sub(bytes));
            if param.grad.borrow().is_none() {
                let share = cx.new_tensor_of("reduce_scatter_output", bytes, Role::Gradient);
                *param.grad.borrow_mut() = Some(share);
            }
            drop(whole);
        }
    }

    fn flush(&mut self, cx: &mut Cx) {
        self.bucket_elements = 0;
        let bucket = std::mem::take(&mut self.bucket);
        self.reduce(cx, bucket);
    }
}

impl ModuleHooks for Shares {
    fn entered(&mut self, _: &mut Cx, _: &str, _: bool) {}

    fn left(&mut self, _: &mut Cx, _: &str, _: bool) {}

    fn gradient(&mut self, cx: &mut Cx, param: &ParamRef, grad: Tensor) -> Option<Tensor> {
        if self.stage < 2 {
            return Some(grad);
        }
        grad.holds(Role::Gradient);
        if self.bucket.iter().any(|(waiting, _)| Rc::ptr_eq(waiting, param)) {
            cx.compute(0.0, 3.0 * grad.bytes() as f64);
            return None;
        }
        self.bucket_elements += param.elements;
        self.bucket.push((Rc::clone(param), grad));
        if self.bucket_elements >= BUCKET_ELEMENTS {
            self.flush(cx);
        }
        None
    }

    fn reached(&mut self, cx: &mut Cx, boundary: Boundary) {
        match boundary {
            Boundary::BackwardEnds => self.flush(cx),
            Boundary::Update if self.stage < 2 => {
                let mut whole = Vec::new();
                for param in cx.params() {
                    let grad = param.grad.borrow_mut().take();
                    whole.extend(grad.map(|grad| (param, grad)));
                }
                self.reduce(cx, whole);
            }
            Boundary::Updated => {
                // Every rank sends the weights that it has updated, in place.
                let bytes: u64 = cx
                    .params()
                    .iter()
                    .filter(|param| param.trainable)
                    .filter_map(|param| param.held.borrow().as_ref().map(|held| held.bytes()))
                    .sum();
                cx.receive(bytes - bytes / self.ranks);
            }
            Boundary::ForwardBegins
            | Boundary::ForwardEnds
            | Boundary::BackwardBegins
            | Boundary::Update => {}
        }
    }
}
