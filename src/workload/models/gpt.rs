//! GPT-2 as transformers 5 runs it: norms first, one linear for queries, keys and values, GELU
//! written out in single operations, learned positions.
//!
//! ```text
//!   x ─┬─ ln_1 ─ c_attn ─ split ─ attention ─ c_proj ─ dropout ─ + ─┬─ ln_2 ─ c_fc ─ gelu ─ c_proj ─ dropout ─ +
//!      └────────────────────────────────────────────────────────────┘└────────────────────────────────────────┘
//! ```

use std::rc::Rc;

use super::super::autocast;
use super::super::cx::{Cx, Var};
use super::super::dense::{conv1d, dropout, gelu_new, layer_norm, split};
use super::super::emitter::Tensor;
use super::super::job::Job;
use super::super::ops;
use super::super::scores::{core, has_scores};
use super::super::tables::{self, Table};
use super::super::tensor_parallel::{fork, join};
use super::{Batch, Part, layers};

/// A part of the model; see [`forward`](super::forward).
pub(super) fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: &Var) -> Var {
    let job = Rc::new(job.clone());
    autocast::region(cx, &job, |cx| {
        let words = Table::new(cx, &job, "transformer.wte");
        let hidden = body(cx, &job, batch, part, input, &words);
        if part.last { tables::decoder_loss(cx, &job, batch, hidden, &words) } else { hidden }
    })
}

fn body(cx: &mut Cx, job: &Rc<Job>, batch: Batch, part: &Part, input: &Var, words: &Table) -> Var {
    let parts = part.first.then(|| embed(cx, job, batch, input, words));
    let mask = tables::causal_mask(cx, job, batch);
    let (x, parts) = match parts {
        Some([sum, words, places]) => (dropout(cx, job, &sum), Some([words, places])),
        None => (input.clone(), None),
    };
    let x = layers(cx, job, part, "transformer.h", x, {
        let (job, mask) = (Rc::clone(job), mask.clone());
        move |cx, path, x| block(cx, &job, path, batch, mask.as_ref(), x)
    });
    let output = if part.last { layer_norm(cx, "transformer.ln_f", &x) } else { x.clone() };
    drop(x);
    drop(parts);
    output
}

/// The sum of embeddings of tokens and of positions, and these.
fn embed(cx: &mut Cx, job: &Rc<Job>, batch: Batch, ids: &Var, words: &Table) -> [Var; 3] {
    let words = words.look_up_input(cx, job, ids);
    let range = cx.new_tensor("arange", 8 * batch.sequence);
    let positions = cx.new_tensor("add", 8 * batch.sequence);
    drop(range);
    let positions = Var::constant(positions, batch.sequence);
    let places = Table::new(cx, job, "transformer.wpe").look_up(cx, job, &positions);
    [ops::add(cx, &words, &places), words, places]
}

fn block(
    cx: &mut Cx,
    job: &Rc<Job>,
    path: &str,
    batch: Batch,
    mask: Option<&Tensor>,
    x: &Var,
) -> Var {
    cx.module(path, "GPT2Block", |cx| {
        let normed = layer_norm(cx, &format!("{path}.ln_1"), x);
        let normed = fork(cx, job, normed);
        let attention_path = format!("{path}.attn");
        let (attended, weights) = attention(cx, job, &attention_path, batch, mask, &normed);
        let hidden = ops::add(cx, &attended, x);
        drop(normed);
        let normed = layer_norm(cx, &format!("{path}.ln_2"), &hidden);
        let normed = fork(cx, job, normed);
        let forwarded = mlp(cx, job, &format!("{path}.mlp"), batch, &normed);
        let output = ops::add(cx, &hidden, &forwarded);
        drop((normed, weights, attended, forwarded));
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
) -> (Var, Option<Var>) {
    cx.module(path, "GPT2Attention", |cx| {
        let together = conv1d(cx, job, &format!("{path}.c_attn"), x, batch.tokens());
        let [q, k, v] = split(cx, &together, [together.elements / 3; 3]);
        drop(together);
        // Scores' gradients of queries and values come in another order than these lie in.
        let copied = has_scores(job);
        let v = ops::reshape(cx, &v, copied);
        let q = ops::reshape(cx, &q, copied);
        let (context, weights) = core(cx, job, batch, [q.clone(), k.clone(), v.clone()], mask);
        let projected = conv1d(cx, job, &format!("{path}.c_proj"), &context, batch.tokens());
        let projected = join(cx, job, projected);
        let dropped = dropout(cx, job, &projected);
        drop((projected, context, q, k, v));
        (dropped, weights)
    })
}

fn mlp(cx: &mut Cx, job: &Job, path: &str, batch: Batch, x: &Var) -> Var {
    cx.module(path, "GPT2MLP", |cx| {
        let up = conv1d(cx, job, &format!("{path}.c_fc"), x, batch.tokens());
        let bent = gelu_new(cx, &up);
        drop(up);
        let down = conv1d(cx, job, &format!("{path}.c_proj"), &bent, batch.tokens());
        let down = join(cx, job, down);
        drop(bent);
        dropout(cx, job, &down)
    })
}
