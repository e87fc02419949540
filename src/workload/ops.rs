//! Operations that several families share, with what PyTorch's nodes save and make for each.
//!
//! The one design decision: an operation here is a node of PyTorch's autograd, not a layer, since
//! what is live when depends on the order in which single nodes ask and let go. Rules that hold for
//! all of them: inputs are saved before the operation runs, results after; a node with two
//! gradients makes that of the second operand first (PyTorch's generated code goes by name:
//! `mat2` before `self`, `other` before `self`).

use std::rc::Rc;

use super::cx::{Cx, ParamRef, Saved, Var};
use super::emitter::Tensor;
use super::gpu;

/// Gradient of the only output of a node.
pub(super) fn only(grads: &[Option<Tensor>]) -> Option<Tensor> {
    grads.first().cloned().flatten()
}

/// Bytes of an element.
pub(super) fn element_bytes(x: &Var) -> u64 {
    x.bytes() / x.elements.max(1)
}

/// A sum of two values of one shape. Saves nothing; its gradient goes to both as it is.
pub(super) fn add(cx: &mut Cx, a: &Var, b: &Var) -> Var {
    let bytes = a.bytes().max(b.bytes());
    let output = cx.new_tensor("add", bytes);
    cx.compute(0.0, 3.0 * bytes as f64);
    let inputs = [(a.needs_grad(), a.bytes()), (b.needs_grad(), b.bytes())];
    let [sum] = cx.node(&[a, b], false, [(output, a.elements.max(b.elements))], |_| {
        Box::new(move |cx, grads| {
            let grad = only(&grads);
            // A narrower input gets a gradient of its own width.
            let narrow = |cx: &mut Cx, grad: &Tensor, bytes: u64| match bytes < grad.bytes() {
                true => cx.new_tensor("to", bytes),
                false => Rc::clone(grad),
            };
            let of = |(needed, bytes): (bool, u64)| {
                grad.as_ref().filter(|_| needed).map(|grad| narrow(cx, grad, bytes))
            };
            inputs.map(of).into()
        })
    });
    sum
}

/// `x · Wᵀ (+ b)`: `mm` or `addmm` of a linear layer, whose module is entered by the caller. Saves
/// `x` if the weight is trained, the weight if `x` needs a gradient. The gradient of `x` is a view:
/// the product is of matrices, `x` has a batch dimension more.
///
/// How wide the output is follows from the weight, which is this tensor-parallel rank's share.
pub(super) fn matmul(
    cx: &mut Cx,
    x: &Var,
    rows: u64,
    weight: &ParamRef,
    bias: Option<&ParamRef>,
) -> Var {
    let input = (x.elements / rows.max(1)).max(1);
    let element_bytes = element_bytes(x);
    let elements = rows * (weight.elements / input);
    let flops = 2.0 * elements as f64 * input as f64;
    let param = Rc::clone(weight);
    let has_bias = bias.is_some();
    let bias = bias.filter(|bias| bias.trainable).cloned();
    let trained = param.trainable || bias.is_some();
    let (x_needs_grad, x_bytes) = (x.needs_grad(), x.bytes());
    let mut saved: Vec<Saved> = Vec::new();
    if cx.wanted(&[x], trained) {
        if x_needs_grad {
            saved.extend(cx.save_param(&param));
        }
        if param.trainable {
            saved.push(cx.save(&x.tensor));
        }
    }
    let output = cx.new_tensor("linear", elements * element_bytes);
    cx.cublas();
    cx.compute(flops, 0.0);
    let [product] = cx.node(&[x], trained, [(output, elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let of_weight = |cx: &mut Cx| {
                cx.compute(flops, 0.0);
                let grad = cx.new_tensor("linear_grad_weight", param.elements * element_bytes);
                cx.cublas();
                grad
            };
            let of_input = |cx: &mut Cx| {
                cx.compute(flops, 0.0);
                let grad = cx.new_tensor("linear_grad_input", x_bytes);
                grad.becomes_view();
                cx.cublas();
                grad
            };
            // `addmm` has its matrices by other names, so that their order is the other one.
            let early = (has_bias && x_needs_grad).then(|| of_input(cx));
            let made = param.trainable.then(|| of_weight(cx));
            let late = (!has_bias && x_needs_grad).then(|| of_input(cx));
            let grad_x = early.or(late);
            let made_bias = saved.done_after(grads, || {
                let bias = bias?;
                let grad = column_sum(cx, rows, bias.elements, element_bytes);
                Some((bias, grad))
            });
            if let Some((bias, grad)) = made_bias {
                cx.accumulate(&bias, grad);
            }
            if let Some(made) = made {
                cx.accumulate(&param, made);
            }
            vec![grad_x]
        })
    });
    product
}

/// A sum over rows: the gradient of something that was broadcast to them.
pub(super) fn column_sum(cx: &mut Cx, rows: u64, outputs: u64, element_bytes: u64) -> Tensor {
    let sum = cx.new_tensor("sum", outputs * element_bytes);
    if let Some(scratch) = gpu::column_sum_scratch(cx.gpu, rows, outputs) {
        let [partial, semaphores] = scratch.map(|bytes| cx.new_tensor("sum_scratch", bytes));
        drop(semaphores);
        drop(partial);
    }
    cx.compute(0.0, (rows * outputs * element_bytes) as f64);
    sum
}

/// The parameter `NAME` of a module.
pub(super) fn param(cx: &Cx, path: &str, name: &str) -> Option<ParamRef> {
    cx.param(&format!("{path}.{name}"))
}

/// Most tokens whose rows are summed without sorting them first (`embedding_dense_backward`).
const UNSORTED_TOKENS: u64 = 3072;

/// Rows of a table by token ids, which are saved; the gradient is as large as the table. Ids that
/// are held once for all samples are copied before they are used.
pub(super) fn rows(cx: &mut Cx, table: &Var, hidden: u64, ids: &Var) -> Var {
    let (element_bytes, tokens) = (element_bytes(table), ids.elements);
    let elements = table.elements;
    let expanded = ids.bytes() > 0 && ids.bytes() < 8 * tokens;
    let copy = expanded.then(|| cx.new_tensor("contiguous", 8 * tokens));
    let wanted = cx.wanted(&[table], false);
    let saved = cx.save_if(wanted, &[&ids.tensor]);
    let bytes = tokens * hidden * element_bytes;
    let output = cx.new_tensor("embedding", bytes);
    drop(copy);
    cx.compute(0.0, 2.0 * bytes as f64);
    let [x] = cx.node(&[table], false, [(output, tokens * hidden)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let copy = expanded.then(|| cx.new_tensor("contiguous", 8 * tokens));
            let grad = embedding_grad(cx, elements, hidden, tokens, element_bytes);
            drop(copy);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    x
}

/// Gradient of a table: rows of one id are summed in pieces of ten, after the ids are sorted.
fn embedding_grad(
    cx: &mut Cx,
    elements: u64,
    hidden: u64,
    tokens: u64,
    element_bytes: u64,
) -> Tensor {
    const ROWS_OF_A_PIECE: u64 = 10;
    let bytes = elements * element_bytes;
    cx.compute(0.0, (2 * bytes) as f64);
    if tokens <= UNSORTED_TOKENS {
        return cx.new_tensor("embedding_grad", bytes);
    }
    let ids_bytes = 8 * tokens;
    let sorted = [0, 1].map(|_| cx.new_tensor("sort", ids_bytes));
    let range = cx.new_tensor("arange", ids_bytes);
    cx.workspace("sort_scratch", sort_scratch_bytes(tokens, 64));
    drop(range);
    let grad = cx.new_tensor("embedding_grad", bytes);
    let [offsets, count] = [ids_bytes, 8].map(|bytes| cx.new_tensor("segment_offsets", bytes));
    let unique = cx.new_tensor("unique", ids_bytes);
    cx.workspace("unique_scratch", UNIQUE_SCRATCH_BYTES);
    drop(unique);
    let segments = tokens.min(elements / hidden.max(1));
    let pieces = [0, 1].map(|_| cx.new_tensor("partials_per_segment", 8 * segments));
    cx.workspace("scan_scratch", SCAN_SCRATCH_BYTES);
    let pieces_count = cx.new_tensor("partial_segments", 8);
    let most_pieces = tokens / ROWS_OF_A_PIECE + segments;
    let piece_offsets = cx.new_tensor("partial_segment_offset", 8 * most_pieces);
    let sums = cx.new_tensor("grad_weight_per_segment", 4 * most_pieces * hidden);
    drop(sums);
    drop(piece_offsets);
    drop(pieces_count);
    let [first, second] = pieces;
    drop(second);
    drop(first);
    drop(count);
    drop(offsets);
    let [first, second] = sorted;
    drop(second);
    drop(first);
    grad
}

/// Scratch of CUB's radix sort of 64-bit ids with their places, by so many bits of the ids: a
/// second copy of both; for each pass of eight bits 256 counts of the whole, for each tile 256.
pub(super) fn sort_scratch_bytes(items: u64, bits: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    const TILE_ITEMS: u64 = 4608;
    const DIGITS: u64 = 256;
    let copies = 2 * (8 * items).next_multiple_of(ALIGNMENT);
    let counts = bits.div_ceil(8) * DIGITS * 8 + items.div_ceil(TILE_ITEMS) * DIGITS * 4;
    copies + counts + ALIGNMENT + (ALIGNMENT - 1)
}

/// Scratch of `unique_by_key` and of an exclusive sum over some ten thousand ids.
const UNIQUE_SCRATCH_BYTES: u64 = 1279;
const SCAN_SCRATCH_BYTES: u64 = 1535;

/// A linear layer with its module, of so many rows (tokens). LoRA's adapters are the caller's.
pub(super) fn linear(cx: &mut Cx, path: &str, x: &Var, rows: u64) -> Var {
    cx.module(path, "Linear", |cx| {
        let Some(weight) = param(cx, path, "weight") else { return x.clone() };
        let bias = param(cx, path, "bias");
        matmul(cx, x, rows, &weight, bias.as_ref())
    })
}

/// A product of two values: each saves the other if it needs a gradient. Its result has the wider
/// type; each gradient is cast to the type of its value.
pub(super) fn multiply(cx: &mut Cx, a: &Var, b: &Var) -> Var {
    let needs = [a.needs_grad(), b.needs_grad()];
    let bytes = [a.bytes(), b.bytes()];
    let result_bytes = bytes[0].max(bytes[1]);
    let mut saved = Vec::new();
    if cx.wanted(&[a, b], false) {
        saved.extend(needs[0].then(|| cx.save(&b.tensor)));
        saved.extend(needs[1].then(|| cx.save(&a.tensor)));
    }
    let output = cx.new_tensor("mul", result_bytes);
    cx.compute(0.0, 3.0 * result_bytes as f64);
    let [y] = cx.node(&[a, b], false, [(output, a.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let of_b = needs[1].then(|| cx.new_tensor("mul_grad", result_bytes));
            let of_a = needs[0].then(|| cx.new_tensor("mul_grad", result_bytes));
            cx.compute(0.0, 6.0 * result_bytes as f64);
            let mut cast = |grad: Option<Tensor>, bytes| {
                grad.map(
                    |grad| {
                        if grad.bytes() > bytes { cx.new_tensor("to", bytes) } else { grad }
                    },
                )
            };
            saved.done_after(grads, || vec![cast(of_a, bytes[0]), cast(of_b, bytes[1])])
        })
    });
    y
}

/// A product with something that needs no gradient and is broadcast: saves that.
pub(super) fn multiply_constant(cx: &mut Cx, x: &Var, constant: &Tensor) -> Var {
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[constant]);
    let output = cx.new_tensor("mul", x.bytes());
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    elementwise(cx, x, (output, x.elements), saved, ("mul_grad", 2))
}

/// A new value of the same size through which the gradient passes as it is: a sum with a number, a
/// copy. Takes no time of its own.
pub(super) fn pass_on(cx: &mut Cx, op: &'static str, x: &Var) -> Var {
    let output = cx.new_tensor(op, x.bytes());
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| Box::new(|_, grads| grads));
    y
}

/// A function whose gradient is another value of the input's size and which saves nothing: a
/// product with a number, a sum with one, a mean over a dimension.
pub(super) fn stateless(cx: &mut Cx, op: &'static str, x: &Var, bytes: u64, elements: u64) -> Var {
    let x_bytes = x.bytes();
    let output = cx.new_tensor(op, bytes);
    cx.compute(0.0, (x_bytes + bytes) as f64);
    let [y] = cx.node(&[x], false, [(output, elements)], |_| {
        Box::new(move |cx, grads| {
            let grad = cx.new_tensor("grad", x_bytes);
            cx.compute(0.0, (x_bytes + bytes) as f64);
            drop(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// A product with a number.
pub(super) fn scale(cx: &mut Cx, op: &'static str, x: &Var) -> Var {
    stateless(cx, op, x, x.bytes(), x.elements)
}

/// The value in another type; itself if it has that.
pub(super) fn to_type(cx: &mut Cx, x: &Var, element_bytes: u64) -> Var {
    if x.bytes() == x.elements * element_bytes {
        return x.clone();
    }
    stateless(cx, "to", x, x.elements * element_bytes, x.elements)
}

/// The value in other dimensions. Its gradient is copied if it does not lie as the value does.
pub(super) fn reshape(cx: &mut Cx, x: &Var, copied: bool) -> Var {
    let bytes = x.bytes();
    let [y] = cx.node(&[x], false, [(Rc::clone(&x.tensor), x.elements)], |_| {
        Box::new(move |cx, grads| {
            let grad = if copied {
                cx.compute(0.0, 2.0 * bytes as f64);
                let copy = cx.new_tensor("clone", bytes);
                drop(grads);
                Some(copy)
            } else {
                only(&grads)
            };
            vec![grad]
        })
    });
    y
}

/// The node of an element-wise operation that saved `saved`. Its gradient is as large as `x`; making
/// it passes over so many times its bytes.
fn elementwise(
    cx: &mut Cx,
    x: &Var,
    output: (Tensor, u64),
    saved: Vec<Saved>,
    (grad_op, passes): (&'static str, u64),
) -> Var {
    let bytes = x.bytes();
    let [y] = cx.node(&[x], false, [output], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let grad = cx.new_tensor(grad_op, bytes);
            cx.compute(0.0, passes as f64 * bytes as f64);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// An element-wise function that saves its input.
pub(super) fn unary(cx: &mut Cx, op: &'static str, x: &Var) -> Var {
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&x.tensor]);
    let output = cx.new_tensor(op, x.bytes());
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    elementwise(cx, x, (output, x.elements), saved, ("unary_grad", 3))
}

/// An element-wise function whose gradient is made from its result.
pub(super) fn of_result(cx: &mut Cx, op: &'static str, x: &Var) -> Var {
    let output = cx.new_tensor(op, x.bytes());
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&output]);
    elementwise(cx, x, (output, x.elements), saved, ("result_grad", 3))
}

/// Dropout: makes a mask of a byte an element and saves that.
pub(super) fn dropout(cx: &mut Cx, x: &Var) -> Var {
    let mask = cx.new_tensor("dropout_mask", x.elements);
    let output = cx.new_tensor("dropout", x.bytes());
    cx.compute(0.0, 2.0 * x.bytes() as f64);
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&mask]);
    elementwise(cx, x, (output, x.elements), saved, ("dropout_grad", 2))
}

/// A power with a number: saves its input.
pub(super) fn power(cx: &mut Cx, x: &Var) -> Var {
    let bytes = x.bytes();
    let wanted = cx.wanted(&[x], false);
    let saved = cx.save_if(wanted, &[&x.tensor]);
    let output = cx.new_tensor("pow", bytes);
    cx.compute(0.0, 2.0 * bytes as f64);
    let [y] = cx.node(&[x], false, [(output, x.elements)], |_| {
        Box::new(move |cx, grads| {
            let saved = cx.unpack_all(saved);
            let raised = cx.new_tensor("pow", bytes);
            let scaled = cx.new_tensor("mul", bytes);
            let grad = cx.new_tensor("pow_grad", bytes);
            cx.compute(0.0, 7.0 * bytes as f64);
            drop(scaled);
            drop(raised);
            saved.done(grads);
            vec![Some(grad)]
        })
    });
    y
}

/// Cross entropy as transformers computes it: logits in fp32, labels shifted by one token. `logits`
/// may be dropped by the caller once this returns.
pub(super) fn loss(cx: &mut Cx, logits: &Var, batch: u64, sequence: u64) -> Var {
    let labels_bytes = 8 * batch * sequence;
    let wide = to_type(cx, logits, 4);
    let padded = cx.new_tensor("pad", 8 * batch * (sequence + 1));
    let labels = cx.new_tensor("shift_labels", labels_bytes);
    let likelihood = of_result(cx, "log_softmax", &wide);
    let loss = nll(cx, &likelihood, &labels);
    drop(likelihood);
    drop(wide);
    drop(padded);
    loss
}

/// Cross entropy of logits as they are, with labels that are there.
pub(super) fn cross_entropy(cx: &mut Cx, logits: &Var, labels: &Tensor) -> Var {
    let likelihood = of_result(cx, "log_softmax", logits);
    nll(cx, &likelihood, labels)
}

/// Saves its input, the labels and how many of them count.
fn nll(cx: &mut Cx, x: &Var, labels: &Tensor) -> Var {
    let wanted = cx.wanted(&[x], false);
    let mut saved = cx.save_if(wanted, &[&x.tensor, labels]);
    let unit = element_bytes(x);
    let output = cx.new_tensor("nll_loss", unit);
    let count = cx.new_tensor("total_weight", unit);
    saved.extend(cx.save_if(wanted, &[&count]));
    elementwise(cx, x, (output, 1), saved, ("nll_loss_grad", 2))
}
