//! Tensor parallelism: what ranks that share a layer out exchange (Shoeybi et al., "Megatron-LM",
//! 2019, section 3).
//!
//! How much of a layer a rank holds stands in its units; here is only where ranks wait for each
//! other. Sums are made in place, so that they take time and no memory:
//!
//! ```text
//!             ┌─ q k v, up ──> core ──> o, down ─┐
//!   x ─ fork ─┤  (this rank's heads, columns)    ├─ join ─> sum of all ranks
//!             └─ ...                             ┘
//!   backward: fork sums gradients                  join passes them on
//! ```
//!
//! Embeddings and the head, which are divided by words, exchange too little to count.

use std::rc::Rc;

use super::cx::{Cx, Var};
use super::job::Job;
use super::ops::only;

/// What all ranks have alike goes into layers that they share out: its gradient is summed.
pub(super) fn fork(cx: &mut Cx, job: &Job, x: Var) -> Var {
    let received = received_bytes(job, x.bytes());
    if received == 0 {
        return x;
    }
    let same = [(Rc::clone(&x.tensor), x.elements)];
    let [forked] = cx.node(&[&x], false, same, |_| {
        Box::new(move |cx, grads| {
            cx.receive(received);
            vec![only(&grads)]
        })
    });
    forked
}

/// Every rank's part of a sum becomes the sum.
pub(super) fn join(cx: &mut Cx, job: &Job, x: Var) -> Var {
    let received = received_bytes(job, x.bytes());
    if received > 0 {
        cx.receive(received);
    }
    x
}

/// What a rank receives when so many bytes are summed in a ring: its share twice from each other.
fn received_bytes(job: &Job, bytes: u64) -> u64 {
    let ranks = u128::from(job.parallel.tensor.max(1));
    u64::try_from(2 * u128::from(bytes) * (ranks - 1) / ranks).unwrap_or(u64::MAX)
}
