//! `torch.autocast`: matrix products run in the narrow type, sums and norms in fp32.
//!
//! The one design decision: what PyTorch caches is cached here, and nothing else. A weight is cast
//! once and its copy lives until the outermost region ends; an activation is cast wherever an
//! operation asks for another type:
//!
//! ```text
//!   enter ── linear: weight cast, kept ── linear: x cast, saved ── ... ── leave: casts dropped
//!                                                     (those that nodes saved live on)
//! ```

use super::cx::{Cx, Var};
use super::job::Job;
use super::ops::to_type;

/// What is cast to, and the weights that are cast already.
#[derive(Default)]
pub(super) struct Autocast {
    /// Bytes of an element of the narrow type, inside a region.
    narrow_bytes: Option<u64>,
    /// Casts of weights, by name, in the order in which they were made.
    casts: Vec<(String, Var)>,
}

/// Runs something under the job's autocast, if it has one. A region inside another shares its
/// casts; a recomputation in the backward pass makes its own.
pub(super) fn region<R>(cx: &mut Cx, job: &Job, body: impl FnOnce(&mut Cx) -> R) -> R {
    let outer = cx.autocast.narrow_bytes;
    cx.autocast.narrow_bytes = job.train.autocast.map(|dtype| dtype.bytes());
    let result = body(cx);
    cx.autocast.narrow_bytes = outer;
    if outer.is_none() {
        let casts = std::mem::take(&mut cx.autocast.casts);
        casts.into_iter().for_each(drop);
    }
    result
}

/// Whether a region runs.
pub(super) fn active(cx: &Cx) -> bool {
    cx.autocast.narrow_bytes.is_some()
}

/// The value as a matrix product takes it.
pub(super) fn narrow(cx: &mut Cx, x: &Var) -> Var {
    match cx.autocast.narrow_bytes {
        Some(bytes) => to_type(cx, x, bytes),
        None => x.clone(),
    }
}

/// The value as an operation takes it that runs in fp32.
pub(super) fn wide(cx: &mut Cx, x: &Var) -> Var {
    if active(cx) { to_type(cx, x, 4) } else { x.clone() }
}

/// A weight as a matrix product takes it: cast once in a region.
pub(super) fn narrow_weight(cx: &mut Cx, name: &str, weight: &Var) -> Var {
    let Some(bytes) = cx.autocast.narrow_bytes else { return weight.clone() };
    if let Some((_, cast)) = cx.autocast.casts.iter().find(|(known, _)| known == name) {
        return cast.clone();
    }
    let cast = to_type(cx, weight, bytes);
    cx.autocast.casts.push((name.to_owned(), cast.clone()));
    cast
}
