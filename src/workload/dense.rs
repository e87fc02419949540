//! Layers of GPT-2, OPT and BERT as PyTorch's nodes: weights, linears, norms, functions, scores.
//!
//! The one design decision: a weight is a value with a node behind it, so that a cast under
//! autocast, or a second use of a tied table, needs no rule of its own. The node of a parameter is
//! made right before the operation that uses it, hence it runs right after that operation's
//! backward node, as PyTorch's `AccumulateGrad` does, which never waits:
//!
//! ```text
//!   forward    x ── view ──────────┐
//!              weight ── (cast) ───┼── addmm ──> y
//!              bias ──── (cast) ───┘
//!   backward   addmm, bias' cast and gradient, weight's, then the view of x
//! ```

use std::rc::Rc;

use super::autocast;
use super::cx::{Cx, ParamRef, Saved, Var};
use super::job::Job;
use super::lora;
use super::ops::{self, column_sum, element_bytes, only};

/// A weight, and the value that operations read.
pub(super) struct Operand {
    /// The value: the parameter, or its cast.
    pub(super) var: Var,
    /// The parameter, if the value is not a cast of it.
    param: Option<ParamRef>,
}

impl Operand {
    /// Keeps it for the backward pass; `transposed` if the node saves another order of its
    /// elements than that in memory, so that a copy on the host takes a copy on the device first.
    fn save(&self, cx: &mut Cx, transposed: bool) -> Option<Saved> {
        if transposed {
            copy_for_host(cx, self.var.bytes());
        }
        match &self.param {
            Some(param) => cx.save_param(param),
            None => Some(cx.save(&self.var.tensor)),
        }
    }
}

/// `save_on_cpu` copies what does not lie in order on the device before it copies it to the host.
pub(super) fn copy_for_host(cx: &mut Cx, bytes: u64) {
    if cx.saves_on_host() {
        cx.workspace("contiguous", bytes);
    }
}

/// A parameter as a value, whose node adds to the parameter's gradient.
pub(super) fn leaf(cx: &mut Cx, path: &str, name: &str) -> Option<Operand> {
    let param = ops::param(cx, path, name)?;
    let tensor = param.tensor()?;
    let held = Rc::clone(&param);
    let [var] = cx.node(&[], param.trainable, [(tensor, param.elements)], |_| {
        Box::new(move |cx, grads| {
            let grad = only(&grads);
            drop(grads);
            if let Some(grad) = grad {
                cx.accumulate(&held, grad);
            }
            Vec::new()
        })
    });
    Some(Operand { var, param: Some(param) })
}

/// The weight as a matrix product takes it.
fn narrow(cx: &mut Cx, path: &str, name: &str, weight: Operand) -> Operand {
    if !autocast::active(cx) {
        return weight;
    }
    let var = autocast::narrow_weight(cx, &format!("{path}.{name}"), &weight.var);
    Operand { var, param: None }
}

/// A value in other dimensions, through which its gradient comes as a view.
pub(super) fn view(cx: &mut Cx, x: &Var) -> Var {
    let [y] = cx.node(&[x], false, [(Rc::clone(&x.tensor), x.elements)], |_| {
        Box::new(|_, grads| {
            let grad = only(&grads);
            if let Some(grad) = &grad {
                grad.becomes_view();
            }
            vec![grad]
        })
    });
    y
}

/// `x · W (+ b)`: PyTorch's `addmm`, or `mm` without a bias.
fn product(
    cx: &mut Cx,
    x: &Var,
    rows: u64,
    weight: &Operand,
    bias: Option<&Operand>,
    transposed: bool,
) -> Var {
    let unit = element_bytes(x);
    let x_bytes = x.bytes();
    let input = (x.elements / rows.max(1)).max(1);
    // A tensor-parallel rank's share of the weight says how wide the result is.
    let columns = weight.var.elements / input;
    let elements = rows * columns;
    let flops = 2.0 * elements as f64 * input as f64;
    let of_bias = bias.map(|bias| bias.var.needs_grad());
    let needs = [x.needs_grad(), weight.var.needs_grad(), of_bias.unwrap_or(false)];
    let weight_bytes = weight.var.elements * unit;
    let mut inputs = vec![x, &weight.var];
    inputs.extend(bias.map(|bias| &bias.var));
    let mut saved = Vec::new();
    if cx.wanted(&inputs, false) {
        let of_x = needs[1].then(|| cx.save(&x.tensor));
        let of_weight = if needs[0] { weight.save(cx, transposed) } else { None };
        // By name: `mat1`, `mat2` of `addmm`; `mat2`, `self` of `mm`.
        let [first, second] = if bias.is_some() { [of_x, of_weight] } else { [of_weight, of_x] };
        saved.extend(first.into_iter().chain(second));
    }
    let output = cx.new_tensor(if bias.is_some() { "addmm" } else { "mm" }, elements * unit);
    if bias.is_some() {
        cx.cublas_lt()
    } else {
        cx.cublas()
    }
    cx.compute(flops, 0.0);
    let with_bias = bias.is_some();
    let [y] = cx.node(&inputs, false, [(output, elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let of = |cx: &mut Cx, needed: bool, bytes: u64| {
                needed.then(|| {
                    cx.compute(flops, 0.0);
                    let grad = cx.new_tensor("mm", bytes);
                    cx.cublas();
                    grad
                })
            };
            let of_weight = |cx: &mut Cx| {
                let grad = of(cx, needs[1], weight_bytes);
                // Turned round again as a view.
                grad.iter().filter(|_| transposed).for_each(|grad| grad.becomes_view());
                grad
            };
            let (grad_x, grad_weight);
            if with_bias {
                grad_x = of(cx, needs[0], x_bytes);
                grad_weight = of_weight(cx);
            } else {
                grad_weight = of_weight(cx);
                grad_x = of(cx, needs[0], x_bytes);
            }
            let grad_bias =
                saved.done_after(grads, || needs[2].then(|| column_sum(cx, rows, columns, unit)));
            if with_bias { vec![grad_x, grad_weight, grad_bias] } else { vec![grad_x, grad_weight] }
        })
    });
    y
}

/// `nn.Linear`: its module is entered, its weight is used transposed.
pub(super) fn linear(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64) -> Var {
    cx.module(path, "Linear", |cx| {
        let base = linear_of(cx, path, x, rows);
        lora::adapt(cx, job, path, x, rows, base)
    })
}

fn linear_of(cx: &mut Cx, path: &str, x: &Var, rows: u64) -> Var {
    if !autocast::active(cx) {
        let x = view(cx, x);
        let Some(weight) = leaf(cx, path, "weight") else { return x };
        let bias = leaf(cx, path, "bias");
        return product(cx, &x, rows, &weight, bias.as_ref(), true);
    }
    // Autocast casts arguments from the last to the first.
    let bias = leaf(cx, path, "bias").map(|bias| narrow(cx, path, "bias", bias));
    let Some(weight) = leaf(cx, path, "weight") else { return x.clone() };
    let weight = narrow(cx, path, "weight", weight);
    let x = autocast::narrow(cx, x);
    let x = view(cx, &x);
    product(cx, &x, rows, &weight, bias.as_ref(), true)
}

/// A linear without bias whose weight is this table.
pub(super) fn tied_linear(cx: &mut Cx, path: &str, x: &Var, rows: u64, table: &Operand) -> Var {
    cx.module(path, "Linear", |cx| {
        if let Some(param) = &table.param {
            cx.access_param(param);
        }
        let cast = autocast::narrow_weight(cx, path, &table.var);
        let narrowed = autocast::active(cx);
        let weight =
            Operand { var: cast, param: if narrowed { None } else { table.param.clone() } };
        let x = autocast::narrow(cx, x);
        let x = view(cx, &x);
        let bias = leaf(cx, path, "bias").map(|bias| narrow(cx, path, "bias", bias));
        product(cx, &x, rows, &weight, bias.as_ref(), true)
    })
}

/// GPT-2's `Conv1D`: a linear whose weight is kept as it is used.
pub(super) fn conv1d(cx: &mut Cx, job: &Job, path: &str, x: &Var, rows: u64) -> Var {
    cx.module(path, "Conv1D", |cx| {
        let base = conv1d_of(cx, path, x, rows);
        lora::adapt(cx, job, path, x, rows, base)
    })
}

fn conv1d_of(cx: &mut Cx, path: &str, x: &Var, rows: u64) -> Var {
    let x = view(cx, x);
    let Some(weight) = leaf(cx, path, "weight") else { return x };
    let weight = narrow(cx, path, "weight", weight);
    let x = autocast::narrow(cx, &x);
    let bias = leaf(cx, path, "bias").map(|bias| narrow(cx, path, "bias", bias));
    product(cx, &x, rows, &weight, bias.as_ref(), false)
}

/// `nn.LayerNorm`: keeps its input, and mean and deviation of every row in fp32. Under autocast it
/// runs in fp32.
pub(super) fn layer_norm(cx: &mut Cx, path: &str, x: &Var) -> Var {
    cx.module(path, "LayerNorm", |cx| {
        let x = autocast::wide(cx, x);
        let bias = leaf(cx, path, "bias");
        let (Some(weight), Some(bias)) = (leaf(cx, path, "weight"), bias) else { return x };
        let (bytes, unit) = (x.bytes(), element_bytes(&x));
        let width = weight.var.elements;
        let rows = x.elements / width.max(1);
        let inputs = [&x, &weight.var, &bias.var];
        let wanted = cx.wanted(&inputs, false);
        let mut saved = Vec::new();
        if wanted {
            saved.extend(bias.save(cx, false));
            saved.push(cx.save(&x.tensor));
            saved.extend(weight.save(cx, false));
        }
        let output = cx.new_tensor("layer_norm", bytes);
        let rows_kept = [0, 1].map(|_| cx.new_tensor("layer_norm_rows", 4 * rows));
        cx.compute(0.0, 2.0 * bytes as f64);
        saved.extend(cx.save_if(wanted, &[&rows_kept[0], &rows_kept[1]]));
        drop(rows_kept);
        let needs = [weight.var.needs_grad(), bias.var.needs_grad()];
        let x_needs_grad = x.needs_grad();
        let [y] = cx.node(&inputs, false, [(output, x.elements)], |_| {
            Box::new(move |cx, grads| {
                let saved = cx.unpack_all(saved);
                let grad_x = x_needs_grad.then(|| cx.new_tensor("layer_norm_grad", bytes));
                let [grad_weight, grad_bias] = needs
                    .map(|needed| needed.then(|| cx.new_tensor("layer_norm_grad", width * unit)));
                cx.compute(0.0, 4.0 * bytes as f64);
                saved.done(grads);
                vec![grad_x, grad_weight, grad_bias]
            })
        });
        y
    })
}

/// Dropout, which is nothing at probability 0.
pub(super) fn dropout(cx: &mut Cx, job: &Job, x: &Var) -> Var {
    if job.shape.dropout > 0.0 { ops::dropout(cx, x) } else { x.clone() }
}

/// A sum with a number: its gradient passes.
fn add_number(cx: &mut Cx, x: &Var) -> Var {
    let sum = ops::pass_on(cx, "add", x);
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    sum
}

/// A power with a number. Under autocast it runs in fp32.
fn power(cx: &mut Cx, x: &Var) -> Var {
    let x = autocast::wide(cx, x);
    ops::power(cx, &x)
}

/// GPT-2's GELU, written out in single operations:
/// `0.5 · x · (1 + tanh(c · (x + d · x³)))`.
pub(super) fn gelu_new(cx: &mut Cx, x: &Var) -> Var {
    let half = ops::scale(cx, "mul", x);
    let inner = {
        let cube = power(cx, x);
        let scaled = ops::scale(cx, "mul", &cube);
        drop(cube);
        ops::add(cx, x, &scaled)
    };
    let scaled = ops::scale(cx, "mul", &inner);
    drop(inner);
    let bent = ops::of_result(cx, "tanh", &scaled);
    drop(scaled);
    let shifted = add_number(cx, &bent);
    drop(bent);
    ops::multiply(cx, &half, &shifted)
}

/// Parts of a value along its last dimension, as views of so many elements; their gradients are put
/// together.
pub(super) fn split<const PARTS: usize>(cx: &mut Cx, x: &Var, parts: [u64; PARTS]) -> [Var; PARTS] {
    let (bytes, unit) = (x.bytes(), element_bytes(x));
    let outputs = parts.map(|elements| (cx.part(&x.tensor, elements * unit), elements));
    cx.node(&[x], false, outputs, |_| {
        Box::new(move |cx, grads| {
            let together = cx.new_tensor("cat", bytes);
            cx.compute(0.0, 2.0 * bytes as f64);
            drop(grads);
            vec![Some(together)]
        })
    })
}
