//! Attention written out in matrix products, whose scores are all there at once.
//!
//! ```text
//!   q k v ── copy ──> q' k' ── bmm ──> scores ── scale, mask ── softmax ── dropout ──> p
//!                                                    p, v' ── bmm ──> context ── copy ──>
//!   kept: q' k' v' (2 u each), softmax, mask of the dropout and its result (5 a S² B), context
//! ```
//!
//! That is the `5 a S²` of 34 u + 5 a S² B bytes a layer (spec patrickstar 5), and what selective
//! recomputation saves.

use std::rc::Rc;

use super::attention::attend;
use super::autocast;
use super::cx::{Cx, Var};
use super::dense::dropout;
use super::emitter::Tensor;
use super::job::{Family, Head, Job, Recompute};
use super::models::Batch;
use super::ops::{self, element_bytes};

/// Whether a job's attention has its scores in memory: BERT's and classifiers', as in
/// PatrickStar's benchmarks (spec patrickstar 5). Others run fused attention, the default of
/// transformers 5.
pub(super) fn has_scores(job: &Job) -> bool {
    job.shape.family == Family::Bert || job.shape.head == Head::Classifier
}

/// The core of attention, from queries, keys and values to the context, and the weights of values
/// if they are there; recomputed in the backward pass where that is asked for. `mask` is added to
/// scores.
pub(super) fn core(
    cx: &mut Cx,
    job: &Rc<Job>,
    batch: Batch,
    heads: [Var; 3],
    mask: Option<&Tensor>,
) -> (Var, Option<Var>) {
    let shared = Rc::clone(job);
    let mask = mask.map(Rc::clone);
    let body = move |cx: &mut Cx, heads: &[Var]| {
        autocast::region(cx, &shared, |cx| match has_scores(&shared) {
            true => {
                let (context, weights) = with_scores(cx, &shared, batch, heads, mask.as_ref());
                (context, Some(weights))
            }
            false => (attend(cx, &shared, batch, &heads[0], &heads[1], &heads[2]), None),
        })
    };
    match job.strategy.recompute {
        Recompute::Selective => {
            (cx.checkpoint(heads.into(), move |cx, heads| body(cx, heads).0), None)
        }
        Recompute::None | Recompute::Every(_) => body(cx, &heads),
    }
}

fn with_scores(
    cx: &mut Cx,
    job: &Job,
    batch: Batch,
    heads: &[Var],
    mask: Option<&Tensor>,
) -> (Var, Var) {
    let matrices = batch.batch * job.shape.heads.div_ceil(job.parallel.tensor.max(1));
    let elements = matrices * batch.sequence * batch.sequence;
    let scaled = {
        let [q, k] = [&heads[0], &heads[1]].map(|x| in_order(cx, x));
        let scores = bmm(cx, &q, &k, elements, job.shape.head_elements());
        drop((q, k));
        ops::scale(cx, "mul", &scores)
    };
    let masked = match mask {
        Some(mask) => ops::add(cx, &scaled, &Var::constant(Rc::clone(mask), 0)),
        None => scaled.clone(),
    };
    drop(scaled);
    let likely = softmax(cx, &masked);
    drop(masked);
    let dropped = dropout(cx, job, &likely);
    drop(likely);
    let weights = autocast::narrow(cx, &dropped);
    let context = {
        let v = in_order(cx, &heads[2]);
        bmm(cx, &weights, &v, heads[2].elements, batch.sequence)
    };
    let bytes = context.bytes();
    (ops::stateless(cx, "contiguous", &context, bytes, context.elements), dropped)
}

/// A copy in the order that a product of many matrices wants. Its gradient passes.
fn in_order(cx: &mut Cx, x: &Var) -> Var {
    let copy = ops::pass_on(cx, "contiguous", x);
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    copy
}

/// Products of many matrices: `elements` results, each a sum of `inner` products.
fn bmm(cx: &mut Cx, a: &Var, b: &Var, elements: u64, inner: u64) -> Var {
    let bytes = [a.bytes(), b.bytes()];
    let needs = [a.needs_grad(), b.needs_grad()];
    let flops = 2.0 * elements as f64 * inner as f64;
    let mut saved = Vec::new();
    if cx.wanted(&[a, b], false) {
        // By name: `mat2`, `self`.
        saved.extend(needs[0].then(|| cx.save(&b.tensor)));
        saved.extend(needs[1].then(|| cx.save(&a.tensor)));
    }
    let output = cx.new_tensor("bmm", elements * element_bytes(a));
    cx.cublas();
    cx.compute(flops, 0.0);
    let [y] = cx.node(&[a, b], false, [(output, elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let of = |cx: &mut Cx, index: usize| {
                needs[index].then(|| {
                    cx.compute(flops, 0.0);
                    let grad = cx.new_tensor("bmm", bytes[index]);
                    cx.cublas();
                    grad
                })
            };
            let of_b = of(cx, 1);
            let of_a = of(cx, 0);
            saved.done(grads);
            vec![of_a, of_b]
        })
    });
    y
}

/// Softmax over the last dimension, which saves its result. Under autocast that is in fp32.
fn softmax(cx: &mut Cx, x: &Var) -> Var {
    let x_bytes = x.bytes();
    let bytes = if autocast::active(cx) { 4 * x.elements } else { x_bytes };
    let output = cx.new_tensor("softmax", bytes);
    cx.compute(0.0, (x_bytes + bytes) as f64);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&output]);
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = cx.new_tensor("softmax_grad", x_bytes);
            cx.workspace("mul", bytes);
            cx.compute(0.0, 3.0 * bytes as f64);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}
