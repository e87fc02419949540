//! Low-rank adapters on linear layers, as peft 0.21 runs them.
//!
//! ```text
//!   x ─┬─ base (frozen) ───────────────────────────────── + ── to ──> y
//!      └─ to fp32 ── dropout ── A ── B ── · scaling ──────┘
//! ```
//!
//! Adapters are in fp32 whatever the base's type (`autocast_adapter_dtype`), so their input is too.

use super::cx::{Cx, Var};
use super::job::Job;
use super::ops::{self, add, dropout, matmul, param, scale, to_type};

/// Bytes of an element of an adapter. Weights that are gathered together are of one type.
pub(super) fn adapter_element_bytes(job: &Job) -> u64 {
    if job.strategy.zero >= 3 { job.train.dtype.bytes() } else { 4 }
}

/// A linear layer, adapted if the job adapts it.
pub(super) fn linear(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64) -> Var {
    cx.module(path, "Linear", |cx| {
        let Some(weight) = param(cx, path, "weight") else { return x.clone() };
        let bias = param(cx, path, "bias");
        let base = matmul(cx, x, rows, &weight, bias.as_ref());
        adapt(cx, job, path, x, rows, base)
    })
}

/// A layer's result with that of its adapter, if it has one.
pub(super) fn adapt(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64, base: Var) -> Var {
    let [down, up] = ["lora_A", "lora_B"].map(|matrix| format!("{path}.{matrix}.default"));
    let Some(lora) = &job.strategy.lora else { return base };
    if param(cx, &down, "weight").is_none() {
        return base;
    }
    let wide = to_type(cx, x, adapter_element_bytes(job));
    let dropped = if lora.dropout > 0.0 { dropout(cx, &wide) } else { wide.clone() };
    let low = ops::linear(cx, &down, &dropped, rows);
    drop(dropped);
    let high = ops::linear(cx, &up, &low, rows);
    drop(low);
    let scaled = scale(cx, "mul", &high);
    drop(high);
    let sum = add(cx, &base, &scaled);
    drop(scaled);
    let element_bytes = ops::element_bytes(&base);
    drop(base);
    to_type(cx, &sum, element_bytes)
}
