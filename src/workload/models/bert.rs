//! BERT as PatrickStar's benchmarks train it: norms last, attention with its scores, dropout
//! everywhere, a classifier on the first token (spec patrickstar 1.4 and 5).
//!
//! ```text
//!   x ─┬─ q k v ─ scores ─ dense ─ dropout ─ + ─ norm ─┬─ dense ─ gelu ─ dense ─ dropout ─ + ─ norm
//!      └─────────────────────────────────────┘         └───────────────────────────────────┘
//! ```

use std::rc::Rc;

use super::super::autocast;
use super::super::cx::{Cx, Var};
use super::super::dense::{dropout, layer_norm, linear};
use super::super::emitter::Tensor;
use super::super::job::{Head, Job};
use super::super::ops;
use super::super::scores::core;
use super::super::tables::{self, Table};
use super::super::tensor_parallel::{fork, join};
use super::super::tiles;
use super::{Batch, Part, layers};

/// A part of the model; see [`forward`](super::forward).
pub(super) fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: &Var) -> Var {
    let job = Rc::new(job.clone());
    autocast::region(cx, &job, |cx| {
        let words = Table::new(cx, &job, "bert.embeddings.word_embeddings");
        let x = match part.first {
            true => embeddings(cx, &job, batch, input, &words),
            false => input.clone(),
        };
        let x = layers(cx, &job, part, "bert.encoder.layer", x, {
            let job = Rc::clone(&job);
            move |cx, path, x| layer(cx, &job, path, batch, x)
        });
        if !part.last {
            return x;
        }
        match job.shape.head {
            Head::Classifier => classify(cx, &job, batch, x),
            Head::Lm => predict(cx, &job, batch, x, &words, &input.tensor),
        }
    })
}

fn embeddings(cx: &mut Cx, job: &Job, batch: Batch, ids: &Var, words: &Table) -> Var {
    let path = "bert.embeddings";
    cx.module(path, "BertEmbeddings", |cx| {
        let kinds = cx.new_tensor("gather", 8 * batch.sequence);
        let words = words.look_up_input(cx, job, ids);
        let expanded = Var::constant(Rc::clone(&kinds), batch.tokens());
        let kinds_table = Table::new(cx, job, &format!("{path}.token_type_embeddings"));
        let kind = kinds_table.look_up(cx, job, &expanded);
        drop(expanded);
        let sum = ops::add(cx, &words, &kind);
        // Positions are rows of a table of the model, made when it was loaded.
        let positions = Var::constant(tables::nothing(cx), batch.sequence);
        let places_table = Table::new(cx, job, &format!("{path}.position_embeddings"));
        let places = places_table.look_up(cx, job, &positions);
        let together = ops::add(cx, &sum, &places);
        drop(sum);
        let normed = layer_norm(cx, &format!("{path}.LayerNorm"), &together);
        drop(together);
        let dropped = dropout(cx, job, &normed);
        drop(normed);
        drop((words, kind, places, kinds));
        dropped
    })
}

fn layer(cx: &mut Cx, job: &Rc<Job>, path: &str, batch: Batch, x: &Var) -> Var {
    cx.module(path, "BertLayer", |cx| {
        let (attended, weights) = cx.module(&format!("{path}.attention"), "BertAttention", |cx| {
            let self_path = format!("{path}.attention.self");
            let forked = fork(cx, job, x.clone());
            let (context, weights) = attention(cx, job, &self_path, batch, &forked);
            drop(forked);
            let output = format!("{path}.attention.output");
            let attended = cx.module(&output, "BertSelfOutput", |cx| {
                let dense = linear(cx, job, &format!("{output}.dense"), &context, batch.tokens());
                let dense = join(cx, job, dense);
                residual_norm(cx, job, &output, dense, x)
            });
            (attended, weights)
        });
        let output = feed_forward(cx, job, path, batch, &attended);
        drop((attended, weights));
        output
    })
}

fn attention(cx: &mut Cx, job: &Rc<Job>, path: &str, batch: Batch, x: &Var) -> (Var, Option<Var>) {
    cx.module(path, "BertSelfAttention", |cx| {
        let heads = ["query", "key", "value"].map(|name| {
            let projected = linear(cx, job, &format!("{path}.{name}"), x, batch.tokens());
            ops::reshape(cx, &projected, true)
        });
        core(cx, job, batch, heads, None)
    })
}

fn feed_forward(cx: &mut Cx, job: &Job, path: &str, batch: Batch, x: &Var) -> Var {
    let intermediate = format!("{path}.intermediate");
    let bent = cx.module(&intermediate, "BertIntermediate", |cx| {
        let forked = fork(cx, job, x.clone());
        let up = tiles::up(cx, job, &format!("{intermediate}.dense"), &forked, batch.tokens());
        drop(forked);
        ops::unary(cx, "gelu", &up)
    });
    let output = format!("{path}.output");
    cx.module(&output, "BertOutput", |cx| {
        let down = tiles::down(cx, job, &format!("{output}.dense"), &bent, batch.tokens());
        let down = join(cx, job, down);
        residual_norm(cx, job, &output, down, x)
    })
}

/// Dropout, the sum with what the part began with, and its norm.
fn residual_norm(cx: &mut Cx, job: &Job, path: &str, dense: Var, x: &Var) -> Var {
    let dropped = dropout(cx, job, &dense);
    drop(dense);
    let sum = ops::add(cx, &dropped, x);
    let normed = layer_norm(cx, &format!("{path}.LayerNorm"), &sum);
    drop(sum);
    drop(dropped);
    normed
}

/// Pooler and classifier on the first token of every sample.
fn classify(cx: &mut Cx, job: &Job, batch: Batch, x: Var) -> Var {
    let hidden = job.shape.hidden;
    let first = tables::rows_of(cx, &x, batch.batch * hidden);
    let pooled = cx.module("bert.pooler", "BertPooler", |cx| {
        let dense = linear(cx, job, "bert.pooler.dense", &first, batch.batch);
        ops::of_result(cx, "tanh", &dense)
    });
    let dropped = dropout(cx, job, &pooled);
    let logits = linear(cx, job, "classifier", &dropped, batch.batch);
    tables::classes_loss(cx, &logits)
}

/// The head of masked language models.
fn predict(cx: &mut Cx, job: &Job, batch: Batch, x: Var, words: &Table, labels: &Tensor) -> Var {
    let path = "cls.predictions.transform";
    let normed = cx.module(path, "BertPredictionHeadTransform", |cx| {
        let dense = linear(cx, job, &format!("{path}.dense"), &x, batch.tokens());
        let bent = ops::unary(cx, "gelu", &dense);
        layer_norm(cx, &format!("{path}.LayerNorm"), &bent)
    });
    let logits = tables::logits(cx, job, "cls.predictions.decoder", &normed, batch.tokens(), words);
    drop(normed);
    tables::labels_loss(cx, &logits, labels)
}
