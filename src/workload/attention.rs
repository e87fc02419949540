//! Fused attention (`scaled_dot_product_attention`), as PyTorch chooses its kernel.
//!
//! cuDNN's is the first choice from Hopper on, for heads of a multiple of 8 elements. Flash
//! attention stands in for it elsewhere; it pads heads to a multiple of 8:
//!
//! ```text
//!   q k v ── pad ──> q' k' v' ── flash ──> output' ── cut ──> output
//! ```
//!
//! In fp32 it is the memory-efficient kernel instead, which keeps no random numbers on the device.
//!
//! Either saves queries, keys, values, output, the log-sum-exp of every row and two random numbers.

use std::rc::Rc;

use super::cx::{Cx, Var};
use super::dense::copy_for_host;
use super::emitter::Tensor;
use super::job::Job;
use super::models::Batch;
use super::ops::{element_bytes, stateless};

/// Heads on this rank and their width.
#[derive(Clone, Copy)]
struct Heads {
    queries: u64,
    keys: u64,
    elements: u64,
}

impl Heads {
    fn of(job: &Job) -> Heads {
        let ranks = job.parallel.tensor.max(1);
        Heads {
            queries: job.shape.heads.div_ceil(ranks),
            keys: job.shape.kv_heads.div_ceil(ranks),
            elements: job.shape.head_elements(),
        }
    }
}

/// Whether heads of this many elements are padded first.
fn pads(elements: u64) -> bool {
    !elements.is_multiple_of(8)
}

/// Whether gradients of the values come in another order than the values themselves, so that they
/// are copied.
pub(super) fn copies_value_gradients(job: &Job) -> bool {
    pads(job.shape.head_elements())
}

/// Attention of every token to those before it.
pub(super) fn attend(cx: &mut Cx, job: &Job, batch: Batch, q: &Var, k: &Var, v: &Var) -> Var {
    let heads = Heads::of(job);
    if element_bytes(q) > 2 {
        return efficient(cx, heads, batch, [q, k, v]);
    }
    if pads(heads.elements) {
        let [q, k, v] = [q, k, v].map(|x| pad(cx, heads.elements, x));
        let output = fused(cx, heads, batch, false, &q, &k, &v);
        drop(v);
        drop(k);
        drop(q);
        return cut(cx, heads.elements, output);
    }
    fused(cx, heads, batch, cx.gpu.cudnn_attention, q, k, v)
}

/// Heads padded with zeros. The gradient is cut, which copies it.
fn pad(cx: &mut Cx, head_elements: u64, x: &Var) -> Var {
    let padded = x.elements / head_elements * head_elements.next_multiple_of(8);
    let bytes = padded * element_bytes(x);
    stateless(cx, "pad", x, bytes, padded)
}

/// Heads without their padding, copied so that they lie side by side.
fn cut(cx: &mut Cx, head_elements: u64, x: Var) -> Var {
    let elements = x.elements / head_elements.next_multiple_of(8) * head_elements;
    let bytes = elements * element_bytes(&x);
    stateless(cx, "contiguous", &x, bytes, elements)
}

fn fused(cx: &mut Cx, heads: Heads, batch: Batch, cudnn: bool, q: &Var, k: &Var, v: &Var) -> Var {
    let wanted = cx.wanted(&[q, k, v], false);
    if wanted {
        // Heads lie between each other in memory.
        for x in [k, q, v] {
            copy_for_host(cx, x.bytes());
        }
    }
    let mut saved = cx.save_if(wanted, &[&k.tensor, &q.tensor, &v.tensor]);
    let lse_bytes = 4 * batch.tokens() * heads.queries;
    let flops = 2.0 * q.elements as f64 * batch.sequence as f64;
    let (output, others);
    if cudnn {
        let random = [0, 1].map(|_| cx.new_tensor("philox", 8));
        output = cx.new_tensor("cudnn_attention", q.bytes());
        let lse = cx.new_tensor("logsumexp", lse_bytes);
        cx.workspace("cudnn_workspace", 256);
        let [seed, offset] = random;
        others = [lse, Rc::clone(&output), offset, seed];
    } else {
        output = cx.new_tensor("flash_attention", q.bytes());
        let lse = cx.new_tensor("logsumexp", lse_bytes);
        let state = cx.new_tensor("rng_state", 16);
        let unused = cx.new_tensor("unused", 8);
        others = [lse, Rc::clone(&output), state, unused];
    }
    cx.compute(flops, 0.0);
    if wanted {
        copy_for_host(cx, output.bytes());
    }
    saved.extend(cx.save_if(wanted, &others.each_ref()));
    let [lse, _, first, second] = others;
    drop(lse);
    let (first, second) = if cudnn { (second, first) } else { (first, second) };
    drop(first);
    drop(second);
    let bytes = [q.bytes(), k.bytes(), v.bytes()];
    let expanded_bytes = 2 * q.bytes();
    let scratch = Scratch { heads, batch, lse_bytes, cudnn, expanded_bytes };
    let [context] = cx.node(&[q, k, v], false, [(output, q.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            cx.compute(2.5 * flops, 0.0);
            let made = scratch.backward(cx, bytes);
            saved.done(grads);
            made.into_iter().map(Some).collect()
        })
    });
    context
}

/// Attention in fp32.
fn efficient(cx: &mut Cx, heads: Heads, batch: Batch, values: [&Var; 3]) -> Var {
    let [q, k, v] = values;
    let wanted = cx.wanted(&values, false);
    if wanted {
        values.iter().for_each(|x| copy_for_host(cx, x.bytes()));
    }
    let mut saved = cx.save_if(wanted, &[&k.tensor, &q.tensor, &v.tensor]);
    let flops = 2.0 * q.elements as f64 * batch.sequence as f64;
    let output = cx.new_tensor("efficient_attention", q.bytes());
    let rows = batch.batch * heads.queries * batch.sequence.next_multiple_of(32);
    let lse = cx.new_tensor("logsumexp", 4 * rows);
    cx.compute(flops, 0.0);
    saved.extend(cx.save_if(wanted, &[&lse, &output]));
    drop(lse);
    let bytes = values.map(Var::bytes);
    let sums_bytes = 4 * batch.tokens() * heads.queries;
    let matrices = batch.batch * heads.queries;
    let [context] = cx.node(&values, false, [(output, q.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            cx.compute(2.5 * flops, 0.0);
            let made = bytes.map(|bytes| cx.new_tensor("efficient_attention_grad", bytes));
            let product = cx.new_tensor("mul", bytes[0]);
            let sum = cx.new_tensor("sum", sums_bytes);
            let delta = cx.new_tensor("contiguous", sums_bytes);
            drop(sum);
            drop(product);
            // Sums of gradients of queries, and a counter for each head.
            let sums = cx.new_tensor("workspace", bytes[0] + 256 * matrices);
            drop(delta);
            drop(sums);
            saved.done(grads);
            made.into_iter().map(Some).collect()
        })
    });
    context
}

/// What a backward pass of attention asks for.
struct Scratch {
    heads: Heads,
    batch: Batch,
    lse_bytes: u64,
    cudnn: bool,
    /// Gradients of keys and values, one for each head of the queries.
    expanded_bytes: u64,
}

impl Scratch {
    /// Gradients of queries, keys and values.
    fn backward(&self, cx: &mut Cx, bytes: [u64; 3]) -> [Tensor; 3] {
        let shared = self.heads.keys < self.heads.queries;
        // Sums of gradients of queries are kept in fp32.
        let sums = |elements: u64| 4 * self.batch.tokens() * self.heads.queries * elements;
        if self.cudnn {
            let made = bytes.map(|bytes| cx.new_tensor("cudnn_attention_grad", bytes));
            let expanded = if shared { self.expanded_bytes } else { 0 };
            let sums = sums(self.heads.elements);
            cx.workspace("cudnn_workspace", sums + self.lse_bytes + expanded + 256);
            return made;
        }
        // Padded heads lie in another order than the kernel wants: gradient and output are copied.
        let copies = pads(self.heads.elements)
            .then(|| [0, 1].map(|_| cx.new_tensor("contiguous", bytes[0])));
        let made = bytes.map(|bytes| cx.new_tensor("flash_attention_grad", bytes));
        let expanded =
            shared.then(|| [0, 1].map(|_| cx.new_tensor("dkv_expanded", self.expanded_bytes / 2)));
        let softmax = cx.new_tensor("softmax_d", self.lse_bytes);
        let width =
            self.heads.elements.next_multiple_of(if self.heads.elements <= 128 { 32 } else { 64 });
        let accumulated = cx.new_tensor("dq_accum", sums(width));
        drop(accumulated);
        drop(softmax);
        drop(expanded);
        if let Some([gradient, output]) = copies {
            drop(output);
            drop(gradient);
        }
        made
    }
}
