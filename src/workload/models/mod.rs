//! What the families run: their modules, operations and losses, as PyTorch programs run them.

mod bert;
mod gpt;
mod llama;
mod moe;
mod opt;

use std::ops::Range;
use std::rc::Rc;

use super::autocast;
use super::cx::{Cx, Var};
use super::ddp;
use super::job::{Family, Job, Recompute};
use super::offload;

/// Samples and their length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    /// Samples.
    pub(super) batch: u64,
    /// Tokens of each.
    pub(super) sequence: u64,
}

impl Batch {
    /// Tokens in all.
    pub(super) fn tokens(self) -> u64 {
        self.batch * self.sequence
    }
}

/// The part of a model that runs in one go: all of it, or what a pipeline stage holds of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its layers.
    pub(super) layers: Range<u64>,
    /// It begins with the embedding.
    pub(super) first: bool,
    /// It ends with the loss.
    pub(super) last: bool,
}

/// A part of a model: from token ids, which are the labels too, or from hidden states of the part
/// before, to the loss, or to the hidden states that the next part wants.
pub(super) fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: &Var) -> Var {
    ddp::before_forward(cx);
    offload::forward(cx, job, |cx| match job.shape.family {
        Family::Llama | Family::Moe => llama::forward(cx, job, batch, part, input),
        Family::Gpt => gpt::forward(cx, job, batch, part, input),
        Family::Opt => opt::forward(cx, job, batch, part, input),
        Family::Bert => bert::forward(cx, job, batch, part, input),
    })
}

/// Runs the layers of a part one after the other, those that the job recomputes without what they
/// save.
fn layers(
    cx: &mut Cx,
    job: &Rc<Job>,
    part: &Part,
    prefix: &str,
    mut x: Var,
    layer: impl Fn(&mut Cx, &str, &Var) -> Var + Clone + 'static,
) -> Var {
    for index in part.layers.clone() {
        let path = format!("{prefix}.{index}");
        let again = match job.strategy.recompute {
            Recompute::Every(every) => index.is_multiple_of(every),
            Recompute::None | Recompute::Selective => false,
        };
        x = if again {
            let (layer, job) = (layer.clone(), Rc::clone(job));
            cx.checkpoint(vec![x], move |cx, inputs| {
                autocast::region(cx, &job, |cx| layer(cx, &path, &inputs[0]))
            })
        } else {
            layer(cx, &path, &x)
        };
    }
    x
}
