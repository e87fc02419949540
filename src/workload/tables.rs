//! Embeddings, heads and losses of GPT-2, OPT and BERT: what knows the vocabulary.
//!
//! The one design decision: a table is taken up once, and lookups and a tied head share that value,
//! so that gradients of both meet before they reach the parameter, as in PyTorch:
//!
//! ```text
//!   table ──┬── look up ──> x ── layers ──> y ──┐
//!           └──────────────────────────────── tied head ──> logits ──> loss
//! ```
//!
//! Tables on the host (spec patrickstar 5.3) take ids down, rows up in fp32, gradients down.

use std::rc::Rc;

use super::autocast;
use super::cx::{Cx, Var};
use super::dense::{Operand, leaf, linear, tied_linear};
use super::emitter::Tensor;
use super::job::{Head, Job};
use super::models::Batch;
use super::ops;
use super::scores::has_scores;
use crate::trace::Direction;

/// Classes of a classifier (spec patrickstar 1.4).
pub(super) const CLASSES: u64 = 2;

/// An embedding.
pub(super) struct Table {
    path: String,
    /// The table; nothing if it is on the host.
    weight: Option<Operand>,
}

impl Table {
    /// The table of a module.
    pub(super) fn new(cx: &mut Cx, job: &Job, path: &str) -> Table {
        let weight = if job.strategy.cpu_embedding { None } else { leaf(cx, path, "weight") };
        Table { path: path.to_owned(), weight }
    }

    /// A row for each token of a batch. Over a frozen base these become leaves that want gradients
    /// (`enable_input_require_grads`), so that what follows may be computed again.
    pub(super) fn look_up_input(&self, cx: &mut Cx, job: &Job, ids: &Var) -> Var {
        let x = self.look_up(cx, job, ids);
        if job.strategy.lora.is_some() { cx.leaf(&x) } else { x }
    }

    /// A row for each id.
    pub(super) fn look_up(&self, cx: &mut Cx, job: &Job, ids: &Var) -> Var {
        cx.module(&self.path, "Embedding", |cx| match &self.weight {
            Some(weight) => ops::rows(cx, &weight.var, job.shape.hidden, ids),
            None => from_host(cx, job, ids),
        })
    }
}

/// Rows of a table on the host: they come in fp32 and are cast here (spec patrickstar 5.3).
fn from_host(cx: &mut Cx, job: &Job, ids: &Var) -> Var {
    let elements = ids.elements * job.shape.hidden;
    let (wide_bytes, bytes) = (4 * elements, elements * job.train.dtype.bytes());
    cx.transfer(8 * ids.elements, Direction::DeviceToHost);
    let wide = cx.new_tensor("from_host", wide_bytes);
    cx.transfer(wide_bytes, Direction::HostToDevice);
    let output = if bytes < wide_bytes { cx.new_tensor("to", bytes) } else { Rc::clone(&wide) };
    drop(wide);
    let [x] = cx.node(&[], true, [(output, elements)], |_| {
        Box::new(move |cx, grads| {
            if bytes < wide_bytes {
                let wide = cx.new_tensor("to", wide_bytes);
                drop(grads);
                cx.transfer(wide_bytes, Direction::DeviceToHost);
                drop(wide);
            } else {
                cx.transfer(wide_bytes, Direction::DeviceToHost);
                drop(grads);
            }
            Vec::new()
        })
    });
    x
}

/// Ids that the model holds as part of its weights, which are not counted.
pub(super) fn nothing(cx: &mut Cx) -> Tensor {
    cx.new_tensor("buffer", 0)
}

/// What transformers makes before the first layer: it looks whether samples are packed behind each
/// other, and, where scores are in memory, writes down which of them count.
pub(super) fn causal_mask(cx: &mut Cx, job: &Job, batch: Batch) -> Option<Tensor> {
    packed_samples(cx, batch);
    mask_of_scores(cx, job, batch)
}

/// What is added to scores that do not count, where scores are in memory.
pub(super) fn mask_of_scores(cx: &mut Cx, job: &Job, batch: Batch) -> Option<Tensor> {
    if !has_scores(job) {
        return None;
    }
    let Batch { batch: samples, sequence } = batch;
    let places = [8 * samples, 8].map(|bytes| cx.new_tensor("arange", bytes));
    let [rows, columns] = [0, 1].map(|_| {
        let range = cx.new_tensor("arange", 8 * sequence);
        let shifted = cx.new_tensor("add", 8 * sequence);
        drop(range);
        shifted
    });
    let truths = cx.new_tensor("le", sequence * sequence);
    drop((places, rows, columns));
    let unit = job.train.autocast.unwrap_or(job.train.dtype).bytes();
    let numbers = [0, 1].map(|_| cx.new_tensor("scalar", unit));
    let mask = cx.new_tensor("where", samples * sequence * sequence * unit);
    let [first, second] = numbers;
    drop(second);
    drop(first);
    drop(truths);
    Some(mask)
}

/// Positions that do not go up by one would begin a packed sample.
fn packed_samples(cx: &mut Cx, batch: Batch) {
    let (samples, tokens_bytes) = (batch.batch, 8 * batch.tokens());
    let before = cx.new_tensor("sub", 8 * samples);
    let joined = cx.new_tensor("cat", 8 * samples * (batch.sequence + 1));
    let steps = cx.new_tensor("diff", tokens_bytes);
    drop(joined);
    let jumps = cx.new_tensor("ne", batch.tokens());
    let counted = cx.new_tensor("cumsum", tokens_bytes);
    cx.workspace("to", tokens_bytes);
    drop(jumps);
    let last = cx.new_tensor("eq", samples);
    let all = cx.new_tensor("all", 1);
    drop(last);
    drop(all);
    drop(before);
    drop(steps);
    drop(counted);
}

/// The head on a decoder's last hidden state, and its loss.
pub(super) fn decoder_loss(
    cx: &mut Cx,
    job: &Job,
    batch: Batch,
    hidden: Var,
    words: &Table,
) -> Var {
    match job.shape.head {
        Head::Lm => {
            let logits = logits(cx, job, "lm_head", &hidden, batch.tokens(), words);
            let loss = ops::loss(cx, &logits, batch.batch, batch.sequence);
            drop(hidden);
            drop(logits);
            loss
        }
        Head::Classifier => {
            let scores = linear(cx, job, "score", &hidden, batch.tokens());
            let places = last_tokens(cx, batch);
            let pooled = gather(cx, &scores, batch.batch * CLASSES);
            let loss = classes_loss(cx, &pooled);
            drop((hidden, scores, places, pooled));
            loss
        }
    }
}

/// Logits over the vocabulary, by the head's own weight or by the table's.
pub(super) fn logits(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64, words: &Table) -> Var {
    match &words.weight {
        Some(table) if job.shape.tied_head => tied_linear(cx, path, x, rows, table),
        _ => linear(cx, job, path, x, rows),
    }
}

/// Where each sample's last token stands.
fn last_tokens(cx: &mut Cx, batch: Batch) -> Tensor {
    let tokens = batch.tokens();
    let differ = cx.new_tensor("ne", tokens);
    let wide = cx.new_tensor("to", 4 * tokens);
    drop(differ);
    let range = cx.new_tensor("arange", 4 * batch.sequence);
    let product = cx.new_tensor("mul", 4 * tokens);
    let last = cx.new_tensor("argmax", 8 * batch.batch);
    drop((product, range, wide));
    last
}

/// Some rows of a value as a copy; their gradient is spread over zeros.
fn gather(cx: &mut Cx, x: &Var, elements: u64) -> Var {
    let unit = ops::element_bytes(x);
    ops::stateless(cx, "index", x, elements * unit, elements)
}

/// Some rows of a value as a view; their gradient is spread over zeros.
pub(super) fn rows_of(cx: &mut Cx, x: &Var, elements: u64) -> Var {
    let bytes = x.bytes();
    let part = cx.part(&x.tensor, elements * ops::element_bytes(x));
    let [rows] = cx.node(&[x], false, [(part, elements)], |_| {
        Box::new(move |cx, grads| {
            let spread = cx.new_tensor("zeros", bytes);
            cx.compute(0.0, bytes as f64);
            drop(grads);
            vec![Some(spread)]
        })
    });
    rows
}

/// Cross entropy over classes; in fp32 under autocast.
pub(super) fn classes_loss(cx: &mut Cx, logits: &Var) -> Var {
    let labels = cx.new_tensor("labels", 8 * logits.elements / CLASSES);
    let wide = autocast::wide(cx, logits);
    ops::cross_entropy(cx, &wide, &labels)
}

/// Cross entropy over the vocabulary with labels that are there already.
pub(super) fn labels_loss(cx: &mut Cx, logits: &Var, labels: &Tensor) -> Var {
    let wide = autocast::wide(cx, logits);
    ops::cross_entropy(cx, &wide, labels)
}
