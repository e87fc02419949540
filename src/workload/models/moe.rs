//! Mixtral's experts as transformers 5 runs them eagerly: a loop over the experts that got tokens.
//!
//! ```text
//!   x ──┬─ router ── softmax ── top k ── shares ──────────────────────┐
//!       └─ for every expert: rows of x ── gate, up ── down ── · share ┴─ to ── added to the output
//! ```
//!
//! All experts' weights are two tensors. A slice of one has a gradient as large as the whole, zero
//! elsewhere, which is then added to that of the experts before.

use std::rc::Rc;

use super::super::cx::{Cx, ParamRef, Var};
use super::super::emitter::{Tensor, part};
use super::super::gpu;
use super::super::job::Job;
use super::super::ops::{
    element_bytes, linear, multiply, only, param, sort_scratch_bytes, to_type, unary,
};
use super::Batch;
use crate::units::random::Random;

/// Bytes of an index, and of an element in fp32.
const INDEX_BYTES: u64 = 8;
const FP32_BYTES: u64 = 4;
/// Scratch of `nonzero` for some ten thousand values, and of its last step.
const NONZERO_SCRATCH_BYTES: [u64; 2] = [21_503, 1023];

/// How many tokens each expert gets in one layer: `tokens · top_k` in all, none more than `tokens`.
///
/// Shares are alike without imbalance; else powers of exponentially distributed numbers, drawn
/// from the job's seed and `draw`.
pub(super) fn tokens_of_experts(job: &Job, tokens: u64, draw: u64) -> Vec<u64> {
    let (experts, total) = (job.shape.experts, tokens * job.shape.top_k);
    let mut random = Random::of(&[job.train.seed, draw, experts]);
    let imbalance = job.expert_imbalance;
    let weights: Vec<f64> =
        (0..experts).map(|_| (-(1.0 - random.unit()).ln()).max(1e-12).powf(imbalance)).collect();
    let sum: f64 = weights.iter().sum();
    let mut counts: Vec<u64> =
        weights.iter().map(|weight| ((weight / sum * total as f64) as u64).min(tokens)).collect();
    let mut rest = total.saturating_sub(counts.iter().sum());
    // What rounding and the limit left over goes to the first experts with room.
    while rest > 0 {
        let room = counts.iter().filter(|count| **count < tokens).count() as u64;
        let each = rest.div_ceil(room.max(1));
        for count in &mut counts {
            let more = each.min(rest).min(tokens - *count);
            *count += more;
            rest -= more;
        }
        if room == 0 {
            break;
        }
    }
    counts
}

/// What the router gives: shares of the chosen experts, and what is dropped with it.
struct Routed {
    logits: Var,
    shares: Var,
}

/// The sparse part of a layer. `counts` are the experts' tokens.
pub(super) fn block(
    cx: &mut Cx,
    job: &Job,
    path: &str,
    batch: Batch,
    counts: &[u64],
    x: &Var,
) -> Var {
    let Routed { logits, shares } = route(cx, job, &format!("{path}.gate"), batch, x);
    let output = experts(cx, job, &format!("{path}.experts"), batch, counts, x, &shares);
    drop(logits);
    drop(shares);
    output
}

fn route(cx: &mut Cx, job: &Job, path: &str, batch: Batch, x: &Var) -> Routed {
    let tokens = batch.tokens();
    let logits = linear(cx, path, x, tokens);
    let wide = to_type(cx, &logits, FP32_BYTES);
    let probabilities = softmax(cx, &wide);
    drop(wide);
    let chosen = tokens * job.shape.top_k;
    let top = top_k(cx, &probabilities, chosen);
    drop(probabilities);
    let shares = divide_by_sum(cx, top, tokens);
    Routed { logits, shares }
}

/// Saves its result.
fn softmax(cx: &mut Cx, x: &Var) -> Var {
    let bytes = x.bytes();
    let output = cx.new_tensor("softmax", bytes);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&output]);
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = cx.new_tensor("softmax_grad", bytes);
            cx.workspace("mul", bytes);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// The largest probabilities of every token: saves which they are.
fn top_k(cx: &mut Cx, x: &Var, chosen: u64) -> Var {
    let bytes = x.bytes();
    let values = cx.new_tensor("topk", FP32_BYTES * chosen);
    let indices = cx.new_tensor("topk_indices", INDEX_BYTES * chosen);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&indices]);
    let [y] = cx.node(&[x], false, [(values, chosen)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = cx.new_tensor("topk_grad", bytes);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// Every token's values divided in place by their sum: a copy of them is saved, as is the sum.
fn divide_by_sum(cx: &mut Cx, x: Var, tokens: u64) -> Var {
    let (bytes, sum_bytes) = (x.bytes(), FP32_BYTES * tokens);
    let wanted = cx.wanted(&[&x], false);
    let sum = cx.new_tensor("sum", sum_bytes);
    let mut saved = Vec::new();
    if wanted {
        let copy = cx.new_tensor("clone", bytes);
        saved = cx.save_if(true, &[&sum, &copy]);
    }
    let [y] = cx.node(&[&x], false, [(Rc::clone(&x.tensor), x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let negative = cx.new_tensor("neg", bytes);
            let quotients = [0, 1].map(|_| cx.new_tensor("div", bytes));
            let of_sum = cx.new_tensor("mul", bytes);
            let [first, second] = quotients;
            drop(second);
            drop(first);
            drop(negative);
            let grad = cx.new_tensor("div_grad", bytes);
            let summed = saved.done_after(grads, || {
                let summed = cx.new_tensor("sum", sum_bytes);
                drop(of_sum);
                summed
            });
            // The gradient of the sum is broadcast and added.
            drop(summed);
            vec![Some(grad)]
        })
    });
    y
}

fn experts(
    cx: &mut Cx,
    job: &Job,
    path: &str,
    batch: Batch,
    counts: &[u64],
    x: &Var,
    shares: &Var,
) -> Var {
    cx.module(path, "MixtralExperts", |cx| {
        let weights = [param(cx, path, "gate_up_proj"), param(cx, path, "down_proj")];
        let [Some(gate_up), Some(down)] = weights else { return x.clone() };
        let output = cx.new_tensor("zeros_like", x.bytes());
        let mut output = Var::constant(output, x.elements);
        let mask = expert_mask(cx, job, batch);
        // What the loop's variable held the turn before goes when it gets its first new value.
        let mut earlier: Option<Var> = None;
        for tokens in counts.iter().copied().filter(|tokens| *tokens > 0) {
            let expert = Expert { job, batch, tokens };
            let places = expert.places(cx);
            let rows = expert.gather(cx, x, &places);
            let both = expert.product(cx, &rows, &gate_up);
            drop(rows);
            let [gate, up] = halves(cx, &both);
            drop(both);
            let active = unary(cx, "silu", &gate);
            let product = multiply(cx, &active, &up);
            drop(active);
            drop(earlier.take());
            let narrow = expert.product(cx, &product, &down);
            drop(product);
            let share = expert.shares(cx, shares, &places);
            let weighted = expert.weigh(cx, &narrow, &share);
            drop((narrow, share));
            let added = to_type(cx, &weighted, element_bytes(x));
            output = index_add(cx, &output, &added, &places);
            earlier = Some(weighted);
        }
        drop(mask);
        drop(earlier);
        output
    })
}

/// One-hot choices of every token, and which experts got any.
fn expert_mask(cx: &mut Cx, job: &Job, batch: Batch) -> [Tensor; 2] {
    let experts = job.shape.experts;
    let chosen = batch.tokens() * job.shape.top_k;
    let mask = cx.new_tensor("one_hot", INDEX_BYTES * chosen * experts);
    let sums = cx.new_tensor("sum", INDEX_BYTES * experts);
    if let Some([partial, semaphores]) = gpu::column_sum_scratch(cx.gpu, chosen, experts) {
        // Sums of integers are twice as wide as those of floats.
        let scratch = [2 * partial, semaphores].map(|bytes| cx.new_tensor("sum_scratch", bytes));
        let [partial, semaphores] = scratch;
        drop(semaphores);
        drop(partial);
    }
    let hit = cx.new_tensor("greater", experts);
    drop(sums);
    let count = cx.new_tensor("nonzero_count", 4);
    cx.workspace("nonzero_scratch", 1);
    let indices = cx.new_tensor("nonzero", INDEX_BYTES * experts);
    cx.workspace("nonzero_scratch", NONZERO_SCRATCH_BYTES[1]);
    drop(count);
    drop(hit);
    [mask, indices]
}

/// Halves of every row, which are views. Their gradients are put together.
fn halves(cx: &mut Cx, x: &Var) -> [Var; 2] {
    let bytes = x.bytes();
    let half = x.elements / 2;
    let views = [0, 1].map(|_| (part(&cx.emitter, &x.tensor, bytes / 2), half));
    cx.node(&[x], false, views, |_| {
        Box::new(move |cx, grads| {
            let grad = cx.new_tensor("cat", bytes);
            drop(grads);
            vec![Some(grad)]
        })
    })
}

/// One expert's turn.
struct Expert<'a> {
    job: &'a Job,
    batch: Batch,
    /// Tokens that it got.
    tokens: u64,
}

impl Expert<'_> {
    /// Which tokens it got, and as which of their choices.
    fn places(&self, cx: &mut Cx) -> Tensor {
        let chosen = self.batch.tokens() * self.job.shape.top_k;
        cx.workspace("eq", 1);
        let row = cx.new_tensor("index", INDEX_BYTES * chosen);
        let count = cx.new_tensor("nonzero_count", 4);
        cx.workspace("nonzero_scratch", NONZERO_SCRATCH_BYTES[0]);
        let places = cx.new_tensor("nonzero", 2 * INDEX_BYTES * self.tokens);
        cx.workspace("nonzero_scratch", NONZERO_SCRATCH_BYTES[1]);
        drop(count);
        drop(row);
        places
    }

    /// Its tokens' rows.
    fn gather(&self, cx: &mut Cx, x: &Var, places: &Tensor) -> Var {
        let (tokens, bytes) = (self.tokens, x.bytes());
        let total = self.batch.tokens();
        let elements = x.elements / total * tokens;
        let wanted = cx.wanted(&[x], false);
        let saved = cx.save_if(wanted, &[places]);
        let output = cx.new_tensor("index", elements * element_bytes(x));
        let [y] = cx.node(&[x], false, [(output, elements)], |_| {
            Box::new(move |cx, grads| {
                let saved = cx.unpack_all(saved);
                let grad = cx.new_tensor("index_grad", bytes);
                index_put(cx, tokens, total, 1);
                saved.done(grads);
                vec![Some(grad)]
            })
        });
        y
    }

    /// What its tokens count in the output.
    fn shares(&self, cx: &mut Cx, shares: &Var, places: &Tensor) -> Var {
        let (tokens, bytes) = (self.tokens, shares.bytes());
        let total = shares.elements;
        let wanted = cx.wanted(&[shares], false);
        let saved = cx.save_if(wanted, &[places, places]);
        let output = cx.new_tensor("index", FP32_BYTES * tokens);
        let [y] = cx.node(&[shares], false, [(output, tokens)], |_| {
            Box::new(move |cx, grads| {
                let saved = cx.unpack_all(saved);
                let grad = cx.new_tensor("index_grad", bytes);
                // The shares have a dimension more before they are indexed.
                grad.becomes_view();
                index_put(cx, tokens, total, 2);
                saved.done(grads);
                vec![Some(grad)]
            })
        });
        y
    }

    /// A product with its slice of a weight.
    fn product(&self, cx: &mut Cx, x: &Var, weight: &ParamRef) -> Var {
        let experts = self.job.shape.experts;
        let (rows, width) = (self.tokens, weight.elements / experts);
        let input = x.elements / rows;
        let element_bytes = element_bytes(x);
        let elements = rows * (width / input);
        let flops = 2.0 * rows as f64 * width as f64;
        let (x_needs_grad, x_bytes) = (x.needs_grad(), x.bytes());
        let mut saved = Vec::new();
        if cx.wanted(&[x], weight.trainable) {
            if x_needs_grad {
                saved.extend(cx.save_param(weight));
            }
            if weight.trainable {
                saved.push(cx.save(&x.tensor));
            }
        }
        let output = cx.new_tensor("linear", elements * element_bytes);
        cx.cublas();
        cx.compute(flops, 0.0);
        let weight = Rc::clone(weight);
        let [y] = cx.node(&[x], weight.trainable, [(output, elements)], |_| {
            Box::new(move |cx, grads| {
                let saved = cx.unpack_all(saved);
                let slice = weight.trainable.then(|| {
                    cx.compute(flops, 0.0);
                    let made = cx.new_tensor("linear_grad_weight", width * element_bytes);
                    cx.cublas();
                    made
                });
                let grad_x = x_needs_grad.then(|| {
                    cx.compute(flops, 0.0);
                    let made = cx.new_tensor("linear_grad_input", x_bytes);
                    cx.cublas();
                    made
                });
                saved.done(grads);
                if let Some(slice) = slice {
                    let bytes = weight.elements * element_bytes;
                    let whole = cx.new_tensor("select_grad", bytes);
                    cx.compute(0.0, bytes as f64);
                    drop(slice);
                    cx.accumulate(&weight, whole);
                }
                vec![grad_x]
            })
        });
        y
    }

    /// Rows of its result times their shares, in fp32.
    fn weigh(&self, cx: &mut Cx, x: &Var, shares: &Var) -> Var {
        let (bytes, shares_bytes) = (x.bytes(), shares.bytes());
        let wide_bytes = FP32_BYTES * x.elements;
        let needs = [x.needs_grad(), shares.needs_grad()];
        let mut saved = Vec::new();
        if cx.wanted(&[x, shares], false) {
            if needs[0] {
                saved.push(cx.save(&shares.tensor));
            }
            if needs[1] {
                saved.push(cx.save(&x.tensor));
            }
        }
        let output = cx.new_tensor("mul", wide_bytes);
        cx.compute(0.0, (bytes + wide_bytes) as f64);
        let [y] = cx.node(&[x, shares], false, [(output, x.elements)], |_| {
            Box::new(move |cx, grads| {
                let saved = cx.unpack_all(saved);
                let of_shares = needs[1].then(|| cx.new_tensor("mul_grad", wide_bytes));
                let of_x = needs[0].then(|| cx.new_tensor("mul_grad", wide_bytes));
                cx.compute(0.0, 4.0 * wide_bytes as f64);
                let made = saved.done_after(grads, || {
                    let narrow = of_x.map(|wide| match wide_bytes == bytes {
                        true => wide,
                        false => cx.new_tensor("to", bytes),
                    });
                    let summed = of_shares.map(|wide| {
                        let summed = cx.new_tensor("sum", shares_bytes);
                        drop(wide);
                        summed
                    });
                    [narrow, summed]
                });
                made.into()
            })
        });
        y
    }
}

/// Scratch of `index_put_` with this many places among `total`, by `indices` index tensors: places
/// are turned to offsets, which are sorted.
fn index_put(cx: &mut Cx, places: u64, total: u64, indices: u64) {
    let bytes = INDEX_BYTES * places;
    let wrapped = cx.new_tensor("remainder", bytes);
    let offsets = cx.new_tensor("mul", bytes);
    drop(wrapped);
    for _ in 1..indices {
        let wrapped = cx.new_tensor("remainder", bytes);
        let scaled = cx.new_tensor("mul", bytes);
        drop(wrapped);
        drop(scaled);
    }
    let sorted = [0, 1].map(|_| cx.new_tensor("sort", bytes));
    let range = cx.new_tensor("arange", bytes);
    cx.workspace("sort_scratch", sort_scratch_bytes(places, u64::from(total.ilog2()) + 1));
    drop(range);
    let [first, second] = sorted;
    drop(second);
    drop(first);
    drop(offsets);
}

/// Rows added to the output in place: saves where they go, and the rows.
fn index_add(cx: &mut Cx, output: &Var, rows: &Var, places: &Tensor) -> Var {
    let bytes = rows.bytes();
    let wanted = cx.wanted(&[output, rows], false);
    let saved = cx.save_if(wanted, &[places, &rows.tensor]);
    cx.compute(0.0, 3.0 * bytes as f64);
    let sum = [(Rc::clone(&output.tensor), output.elements)];
    let [y] = cx.node(&[output, rows], false, sum, |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = only(&grads);
            let of_rows = cx.new_tensor("index_select", bytes);
            cx.compute(0.0, 2.0 * bytes as f64);
            saved.done(grads);
            vec![grad, Some(of_rows)]
        })
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::tests::small_job;

    #[test]
    fn every_choice_of_every_token_goes_to_one_expert() {
        let mut job = small_job();
        (job.shape.experts, job.shape.top_k) = (8, 2);
        for imbalance in [0.0, 0.5, 1.0, 3.0, 20.0] {
            job.expert_imbalance = imbalance;
            for draw in 0..50 {
                let counts = tokens_of_experts(&job, 1000, draw);
                assert_eq!(counts.iter().sum::<u64>(), 2000, "{imbalance} {draw}");
                assert!(counts.iter().all(|count| *count <= 1000), "{counts:?}");
                assert_eq!(counts, tokens_of_experts(&job, 1000, draw));
                if imbalance == 0.0 {
                    assert_eq!(counts, [250; 8]);
                }
            }
        }
    }

    #[test]
    fn imbalance_makes_the_largest_share_larger() {
        let mut job = small_job();
        (job.shape.experts, job.shape.top_k) = (8, 1);
        let mean_of_largest = |job: &Job| {
            let largest = |draw| tokens_of_experts(job, 8000, draw).into_iter().max().unwrap();
            (0..100).map(largest).sum::<u64>() / 100
        };
        let mut before = 1000;
        for imbalance in [0.3, 1.0, 2.0] {
            job.expert_imbalance = imbalance;
            let mean = mean_of_largest(&job);
            assert!(mean > before, "{imbalance}: {mean} after {before}");
            before = mean;
        }
    }
}
