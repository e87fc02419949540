//! Linears in four tiles (spec patrickstar 5.4), which BERT's feed-forward part may have.
//!
//! ```text
//!   up      x ─┬─ tile 0 ─ copy ─┐            down    x ─ split ─┬─ tile 0 ─ copy ─ + ─ + ─ + ──>
//!              ├─ tile 1 ─ copy ─┼─ cat ──>                      ├─ tile 1 ─────────┘   │   │
//!              └─ ...            ┘                               └─ ...  ───────────────┘───┘
//! ```

use super::cx::{Cx, Var};
use super::dense::{linear, split};
use super::job::Job;
use super::ops;

/// Tiles of a linear (spec patrickstar 5.4).
const TILES: u64 = 4;

/// The linear into the feed-forward part: tiles of its output.
pub(super) fn up(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64) -> Var {
    if !job.strategy.tiled_linear {
        return linear(cx, job, path, x, rows);
    }
    let tiles = [0, 1, 2, 3].map(|tile| {
        let made = linear(cx, job, &format!("{path}.linears.0.{tile}"), x, rows);
        copy(cx, &made)
    });
    concatenate(cx, &tiles)
}

/// The linear out of it: tiles of its input, whose results are summed.
pub(super) fn down(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64) -> Var {
    if !job.strategy.tiled_linear {
        return linear(cx, job, path, x, rows);
    }
    let width = x.elements / rows.max(1);
    let parts = [0, 1, 2, 3].map(|tile| rows * (width / TILES + u64::from(tile < width % TILES)));
    let [first, others @ ..] = split(cx, x, parts);
    let made = linear(cx, job, &format!("{path}.linears.0.0"), &first, rows);
    let mut sum = copy(cx, &made);
    drop((first, made));
    for (tile, part) in (1..TILES).zip(&others) {
        let made = linear(cx, job, &format!("{path}.linears.{tile}.0"), part, rows);
        sum = ops::add(cx, &sum, &made);
    }
    sum
}

/// A copy whose gradient passes.
fn copy(cx: &mut Cx, x: &Var) -> Var {
    let copy = cx.new_tensor("clone", x.bytes());
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    let [y] = cx.node(&[x], false, [(copy, x.elements)], |_| Box::new(|_, grads| grads));
    y
}

/// Values side by side; each gets its part of the gradient as a view.
fn concatenate(cx: &mut Cx, values: &[Var]) -> Var {
    let bytes: Vec<u64> = values.iter().map(Var::bytes).collect();
    let together = cx.new_tensor("cat", bytes.iter().sum());
    let inputs: Vec<&Var> = values.iter().collect();
    let elements = values.iter().map(|value| value.elements).sum();
    let [y] = cx.node(&inputs, false, [(together, elements)], |_| {
        Box::new(move |cx, grads| {
            let grad = ops::only(&grads);
            let part = |bytes: &u64| grad.as_ref().map(|grad| cx.part(grad, *bytes));
            bytes.iter().map(part).collect()
        })
    });
    y
}
