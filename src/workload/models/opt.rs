//! OPT as transformers 5 runs it: norms first, three linears for queries, keys and values, ReLU,
//! learned positions counted from the attention mask.
//!
//! ```text
//!   x ─┬─ norm ─ q k v ─ attention ─ out ─ + ── as one row of tokens ─┬─ norm ─ fc1 ─ relu ─ fc2 ─ +
//!      └───────────────────────────────────┘                          └────────────────────────────┘
//! ```

use std::rc::Rc;

use super::super::autocast;
use super::super::cx::{Cx, Var};
use super::super::dense::{dropout, layer_norm, linear, view};
use super::super::emitter::Tensor;
use super::super::job::Job;
use super::super::ops;
use super::super::scores::core;
use super::super::tables::{self, Table};
use super::super::tensor_parallel::{fork, join};
use super::{Batch, Part, layers};

/// A part of the model; see [`forward`](super::forward).
pub(super) fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: &Var) -> Var {
    let job = Rc::new(job.clone());
    autocast::region(cx, &job, |cx| {
        let words = Table::new(cx, &job, "model.decoder.embed_tokens");
        let hidden = body(cx, &job, batch, part, input, &words);
        if part.last { tables::decoder_loss(cx, &job, batch, hidden, &words) } else { hidden }
    })
}

fn body(cx: &mut Cx, job: &Rc<Job>, batch: Batch, part: &Part, input: &Var, words: &Table) -> Var {
    let words = part.first.then(|| words.look_up_input(cx, job, input));
    let (attended, positions) = positions(cx, batch);
    let mask = tables::mask_of_scores(cx, job, batch);
    let (x, places) = match &words {
        Some(words) => {
            let places = look_up_positions(cx, job, batch);
            (ops::add(cx, words, &places), Some(places))
        }
        None => (input.clone(), None),
    };
    let x = layers(cx, job, part, "model.decoder.layers", x, {
        // Layers are given the positions, though they do not use them.
        let given = (mask.clone(), Rc::clone(&positions));
        let job = Rc::clone(job);
        move |cx, path, x| {
            let (mask, _positions) = &given;
            layer(cx, &job, path, batch, mask.as_ref(), x)
        }
    });
    let norm = "model.decoder.final_layer_norm";
    let output = if part.last { layer_norm(cx, norm, &x) } else { x.clone() };
    drop(x);
    drop((attended, words, positions, places));
    output
}

/// Rows of positions, which are counted from an offset.
fn look_up_positions(cx: &mut Cx, job: &Job, batch: Batch) -> Var {
    let shifted = cx.new_tensor("add", 8 * batch.tokens());
    let shifted = Var::constant(shifted, batch.tokens());
    Table::new(cx, job, "model.decoder.embed_positions").look_up(cx, job, &shifted)
}

/// A mask of ones in fp32 and the positions that are counted from it; then whether it masks
/// anything at all.
fn positions(cx: &mut Cx, batch: Batch) -> (Tensor, Tensor) {
    let tokens = batch.tokens();
    let ones = cx.new_tensor("ones", 4 * tokens);
    let counted = cx.new_tensor("cumsum", 4 * tokens);
    let masked = cx.new_tensor("mul", 4 * tokens);
    let shifted = cx.new_tensor("sub", 4 * tokens);
    drop(masked);
    let positions = cx.new_tensor("to", 8 * tokens);
    drop(shifted);
    drop(counted);
    let truths = cx.new_tensor("to", tokens);
    let sum = cx.new_tensor("sum", 8);
    cx.workspace("to", 8 * tokens);
    let equal = cx.new_tensor("eq", 1);
    drop(sum);
    drop(equal);
    drop(truths);
    (ones, positions)
}

fn layer(
    cx: &mut Cx,
    job: &Rc<Job>,
    path: &str,
    batch: Batch,
    mask: Option<&Tensor>,
    x: &Var,
) -> Var {
    let tokens = batch.tokens();
    cx.module(path, "OPTDecoderLayer", |cx| {
        let normed = layer_norm(cx, &format!("{path}.self_attn_layer_norm"), x);
        let normed = fork(cx, job, normed);
        let projected = attention(cx, job, &format!("{path}.self_attn"), batch, mask, &normed);
        drop(normed);
        let attended = dropout(cx, job, &projected);
        drop(projected);
        let sum = ops::add(cx, x, &attended);
        drop(attended);
        let rows = view(cx, &sum);
        drop(sum);
        let normed = layer_norm(cx, &format!("{path}.final_layer_norm"), &rows);
        let normed = fork(cx, job, normed);
        let up = linear(cx, job, &format!("{path}.fc1"), &normed, tokens);
        drop(normed);
        let bent = ops::of_result(cx, "relu", &up);
        drop(up);
        let down = linear(cx, job, &format!("{path}.fc2"), &bent, tokens);
        let down = join(cx, job, down);
        drop(bent);
        let forwarded = dropout(cx, job, &down);
        drop(down);
        let sum = ops::add(cx, &rows, &forwarded);
        drop(forwarded);
        let output = view(cx, &sum);
        drop(rows);
        output
    })
}

fn attention(
    cx: &mut Cx,
    job: &Rc<Job>,
    path: &str,
    batch: Batch,
    mask: Option<&Tensor>,
    x: &Var,
) -> Var {
    let tokens = batch.tokens();
    // Values that come back from the host lie in another order than their gradients go on in.
    let copied = cx.saves_on_host();
    cx.module(path, "OPTAttention", |cx| {
        let q = linear(cx, job, &format!("{path}.q_proj"), x, tokens);
        let scaled = ops::scale(cx, "mul", &q);
        drop(q);
        let q = ops::reshape(cx, &scaled, copied);
        drop(scaled);
        let k = linear(cx, job, &format!("{path}.k_proj"), x, tokens);
        let v = linear(cx, job, &format!("{path}.v_proj"), x, tokens);
        let [k, v] = [k, v].map(|x| ops::reshape(cx, &x, copied));
        let (context, weights) = core(cx, job, batch, [q.clone(), k.clone(), v.clone()], mask);
        let projected = linear(cx, job, &format!("{path}.out_proj"), &context, tokens);
        let projected = join(cx, job, projected);
        drop((context, weights, q, k, v));
        projected
    })
}
