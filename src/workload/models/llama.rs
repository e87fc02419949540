//! Llama as transformers 5 runs it: RMSNorm in fp32, rotary positions, SwiGLU, fused attention.
//!
//! Functions read as the Python they stand for, node for node: what a local variable holds there, a
//! local variable holds here.

use std::rc::Rc;

use super::super::attention::{attend, copies_value_gradients};
use super::super::cx::{Cx, Var};
use super::super::emitter::Tensor;
use super::super::job::{Family, Job, Recompute};
use super::super::lora;
use super::super::ops::{
    self, add, column_sum, element_bytes, linear, multiply, multiply_constant, param, pass_on,
    power, reshape, stateless, to_type, unary,
};
use super::super::tables::Table;
use super::super::tensor_parallel::{fork, join};
use super::{Batch, Part, moe};

/// What all layers are given: sines and cosines of positions, and these; the first goes first.
#[derive(Clone)]
pub(super) struct Rotary {
    sin: Tensor,
    cos: Tensor,
    _ids: Tensor,
}

/// A part of the model; see [`forward`](super::forward).
pub(super) fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: &Var) -> Var {
    let job = Rc::new(job.clone());
    let mut x = if part.first { embed(cx, &job, input) } else { input.clone() };
    let inputs_embeds = x.clone();
    let position_ids = positions(cx, batch);
    let rotary = rotary_tables(cx, &job, batch, position_ids);
    for layer in part.layers.clone() {
        x = decoder_layer(cx, &job, layer, batch, x, &rotary);
    }
    if !part.last {
        return x;
    }
    let last = x;
    let x = rms_norm(cx, "model.norm", &last);
    drop(last);
    drop(rotary);
    drop(inputs_embeds);
    let logits = linear(cx, "lm_head", &x, batch.tokens());
    let loss = ops::loss(cx, &logits, batch.batch, batch.sequence);
    drop(x);
    drop(logits);
    loss
}

/// Token embeddings.
pub(super) fn embed(cx: &mut Cx, job: &Job, ids: &Var) -> Var {
    Table::new(cx, job, "model.embed_tokens").look_up_input(cx, job, ids)
}

/// Position ids; on the way, what `create_causal_mask` computes to find packed sequences.
pub(super) fn positions(cx: &mut Cx, batch: Batch) -> Tensor {
    let Batch { batch: samples, sequence } = batch;
    let all_bytes = 8 * batch.tokens();
    let range = cx.new_tensor("arange", 8 * sequence);
    let ids = cx.new_tensor("position_ids", 8 * sequence);
    drop(range);
    let first = cx.new_tensor("first_dummy_value", 8 * samples);
    let extended = cx.new_tensor("cat", 8 * samples * (sequence + 1));
    let differences = cx.new_tensor("diff", all_bytes);
    drop(extended);
    let jumps = cx.new_tensor("ne", batch.tokens());
    let packed = cx.new_tensor("cumsum", all_bytes);
    cx.workspace("to", all_bytes);
    drop(jumps);
    let last = cx.new_tensor("eq", samples);
    let all = cx.new_tensor("all", 1);
    drop(last);
    drop(all);
    drop(first);
    drop(differences);
    drop(packed);
    ids
}

/// Cosines and sines in fp32, then in the type of the model.
pub(super) fn rotary_tables(cx: &mut Cx, job: &Job, batch: Batch, ids: Tensor) -> Rotary {
    let entries = batch.sequence * job.shape.head_elements();
    let element_bytes = job.train.dtype.bytes();
    cx.no_grad(|cx| {
        let positions = cx.new_tensor("float", 4 * batch.sequence);
        let frequencies = cx.new_tensor("freqs", 2 * entries);
        cx.cublas();
        let both = cx.new_tensor("emb", 4 * entries);
        let scaled = [0, 1].map(|_| {
            let plain = cx.new_tensor("cos", 4 * entries);
            let scaled = cx.new_tensor("mul", 4 * entries);
            drop(plain);
            scaled
        });
        let [cos, sin] = if element_bytes == 4 {
            scaled.clone()
        } else {
            scaled.clone().map(|_| cx.new_tensor("to", element_bytes * entries))
        };
        drop(positions);
        drop(frequencies);
        drop(both);
        let [wide_cos, wide_sin] = scaled;
        drop(wide_cos);
        drop(wide_sin);
        Rotary { sin, cos, _ids: ids }
    })
}

/// One layer, recomputed in the backward pass if the strategy says so. The caller's reference to
/// its input goes with the layer's end.
pub(super) fn decoder_layer(
    cx: &mut Cx,
    job: &Rc<Job>,
    layer: u64,
    batch: Batch,
    x: Var,
    rotary: &Rotary,
) -> Var {
    let again = match job.strategy.recompute {
        Recompute::Every(every) => layer.is_multiple_of(every),
        Recompute::None | Recompute::Selective => false,
    };
    let path = format!("model.layers.{layer}");
    let counts = experts_of_layer(cx, job, batch);
    let (job, rotary) = (Rc::clone(job), rotary.clone());
    let body = move |cx: &mut Cx, inputs: &[Var]| {
        cx.module(&path, "LlamaDecoderLayer", |cx| {
            layer_body(cx, &job, &path, batch, &counts, &inputs[0], &rotary)
        })
    };
    if again { cx.checkpoint(vec![x], body) } else { body(cx, &[x]) }
}

/// Tokens of a layer's experts, drawn once: a layer that runs again has the same.
fn experts_of_layer(cx: &mut Cx, job: &Job, batch: Batch) -> Vec<u64> {
    if job.shape.family != Family::Moe {
        return Vec::new();
    }
    cx.draws += 1;
    moe::tokens_of_experts(job, batch.tokens(), cx.draws)
}

fn layer_body(
    cx: &mut Cx,
    job: &Job,
    path: &str,
    batch: Batch,
    experts: &[u64],
    residual: &Var,
    rotary: &Rotary,
) -> Var {
    let normed = rms_norm(cx, &format!("{path}.input_layernorm"), residual);
    let normed = fork(cx, job, normed);
    let attended = attention(cx, job, &format!("{path}.self_attn"), batch, &normed, rotary);
    let attended = join(cx, job, attended);
    drop(normed);
    let x = add(cx, residual, &attended);
    drop(attended);
    let residual = x;
    let normed = rms_norm(cx, &format!("{path}.post_attention_layernorm"), &residual);
    let normed = fork(cx, job, normed);
    let fed = if job.shape.family == Family::Moe {
        moe::block(cx, job, &format!("{path}.mlp"), batch, experts, &normed)
    } else {
        mlp(cx, job, &format!("{path}.mlp"), batch, &normed)
    };
    drop(normed);
    let fed = join(cx, job, fed);
    let x = add(cx, &residual, &fed);
    drop(fed);
    drop(residual);
    x
}

/// `weight · (x · rsqrt(mean(x²) + ε)).to(type)`, all but the last product in fp32.
pub(super) fn rms_norm(cx: &mut Cx, path: &str, x: &Var) -> Var {
    cx.module(path, "LlamaRMSNorm", |cx| {
        let Some(weight) = param(cx, path, "weight") else { return x.clone() };
        let rows = x.elements / weight.elements;
        let wide = to_type(cx, x, 4);
        let square = power(cx, &wide);
        let variance = stateless(cx, "mean", &square, 4 * rows, rows);
        drop(square);
        let shifted = pass_on(cx, "add", &variance);
        let root = reciprocal_root(cx, &shifted);
        drop(shifted);
        let normed = multiply_rows(cx, &wide, &root);
        drop((root, wide));
        let narrow = to_type(cx, &normed, element_bytes(x));
        let output = multiply_weight(cx, &weight, &narrow);
        drop((narrow, normed, variance));
        output
    })
}

/// `rsqrt`: saves its result.
fn reciprocal_root(cx: &mut Cx, x: &Var) -> Var {
    let bytes = x.bytes();
    let output = cx.new_tensor("rsqrt", bytes);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&output]);
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let cube = cx.new_tensor("pow", bytes);
            let scaled = cx.new_tensor("mul", bytes);
            let grad = cx.new_tensor("rsqrt_grad", bytes);
            drop(scaled);
            drop(cube);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// A product with one number a row: the gradient of the rows is as large as `x` before it is
/// summed.
fn multiply_rows(cx: &mut Cx, x: &Var, rows: &Var) -> Var {
    let (bytes, rows_bytes) = (x.bytes(), rows.bytes());
    let wanted = cx.wanted(&[x, rows], false);
    let saved = cx.save_if(wanted, &[&rows.tensor, &x.tensor]);
    let output = cx.new_tensor("mul", bytes);
    cx.compute(0.0, 2.0 * bytes as f64);
    let [y] = cx.node(&[x, rows], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let full = cx.new_tensor("mul_grad", bytes);
            let grad = cx.new_tensor("mul_grad", bytes);
            cx.compute(0.0, 5.0 * bytes as f64);
            let of_rows = saved.done_after(grads, || {
                let of_rows = cx.new_tensor("sum", rows_bytes);
                drop(full);
                of_rows
            });
            vec![Some(grad), Some(of_rows)]
        })
    });
    y
}

/// A product of every row with a weight.
fn multiply_weight(cx: &mut Cx, weight: &super::super::cx::ParamRef, x: &Var) -> Var {
    let weight = Rc::clone(weight);
    let (bytes, x_needs_grad) = (x.bytes(), x.needs_grad());
    let (rows, width) = (x.elements / weight.elements, element_bytes(x));
    let mut saved = Vec::new();
    if cx.wanted(&[x], weight.trainable) {
        if weight.trainable {
            saved.push(cx.save(&x.tensor));
        }
        if x_needs_grad {
            saved.extend(cx.save_param(&weight));
        }
    }
    let output = cx.new_tensor("mul", bytes);
    cx.compute(0.0, 2.0 * bytes as f64);
    let trained = weight.trainable;
    let [y] = cx.node(&[x], trained, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = x_needs_grad.then(|| cx.new_tensor("mul_grad", bytes));
            let full = weight.trainable.then(|| cx.new_tensor("mul_grad", bytes));
            cx.compute(0.0, 4.0 * bytes as f64);
            let of_weight = saved.done_after(grads, || {
                full.map(|full| {
                    let sum = column_sum(cx, rows, weight.elements, width);
                    drop(full);
                    sum
                })
            });
            if let Some(of_weight) = of_weight {
                cx.accumulate(&weight, of_weight);
            }
            vec![grad]
        })
    });
    y
}

/// Attention with rotary positions.
pub(super) fn attention(
    cx: &mut Cx,
    job: &Job,
    path: &str,
    batch: Batch,
    x: &Var,
    rotary: &Rotary,
) -> Var {
    let tokens = batch.tokens();
    let mut project = |name: &str, copied: bool| {
        let projected = lora::linear(cx, job, &format!("{path}.{name}"), x, tokens);
        reshape(cx, &projected, copied)
    };
    let q = project("q_proj", true);
    let k = project("k_proj", true);
    let v = project("v_proj", copies_value_gradients(job));
    let rotated = [&q, &k].map(|x| rotate(cx, x, rotary));
    drop(q);
    drop(k);
    let [q, k] = rotated;
    let context = match job.strategy.recompute {
        Recompute::Selective => {
            let shared = Rc::new(job.clone());
            cx.checkpoint(vec![q.clone(), k.clone(), v.clone()], move |cx, heads| {
                attend(cx, &shared, batch, &heads[0], &heads[1], &heads[2])
            })
        }
        Recompute::None | Recompute::Every(_) => attend(cx, job, batch, &q, &k, &v),
    };
    let output = lora::linear(cx, job, &format!("{path}.o_proj"), &context, tokens);
    drop(context);
    drop(q);
    drop(k);
    drop(v);
    output
}

/// `x · cos + rotate_half(x) · sin`.
fn rotate(cx: &mut Cx, x: &Var, rotary: &Rotary) -> Var {
    let straight = multiply_constant(cx, x, &rotary.cos);
    let half = rotate_half(cx, x);
    let turned = multiply_constant(cx, &half, &rotary.sin);
    drop(half);
    let sum = add(cx, &straight, &turned);
    drop(straight);
    drop(turned);
    sum
}

/// The second half of every head, negated, and the first. Gradients of the halves are as large as
/// `x`, zero elsewhere.
fn rotate_half(cx: &mut Cx, x: &Var) -> Var {
    let bytes = x.bytes();
    let negative = cx.new_tensor("neg", bytes / 2);
    let output = cx.new_tensor("cat", bytes);
    drop(negative);
    cx.compute(0.0, 3.0 * bytes as f64);
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let negative = cx.new_tensor("neg", bytes / 2);
            let second = cx.new_tensor("slice_grad", bytes);
            drop(negative);
            let first = cx.new_tensor("slice_grad", bytes);
            drop(grads);
            drop(first);
            cx.compute(0.0, 8.0 * bytes as f64);
            vec![Some(second)]
        })
    });
    y
}

/// SwiGLU.
fn mlp(cx: &mut Cx, job: &Job, path: &str, batch: Batch, x: &Var) -> Var {
    let tokens = batch.tokens();
    let gate = lora::linear(cx, job, &format!("{path}.gate_proj"), x, tokens);
    let active = unary(cx, "silu", &gate);
    drop(gate);
    let up = lora::linear(cx, job, &format!("{path}.up_proj"), x, tokens);
    let product = multiply(cx, &active, &up);
    drop(active);
    drop(up);
    lora::linear(cx, job, &format!("{path}.down_proj"), &product, tokens)
}
