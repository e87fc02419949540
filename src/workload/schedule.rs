//! In which order forward and backward passes of a step run on this rank.
//!
//! ```text
//!   one stage, 2 micro-batches        F0 B0 F1 B1
//!   1F1B, stage 0 of 4                F0 F1 F2 | F3 B0 F4 B1 ... | B.. B.. B..
//!   interleaved, stage 0 of 4 × 2     F0.0 .. F3.0 F4.1 .. F7.1 F8.0 F9.0 | F10.0 B0.1 ... |
//!                                     warm-up                               steady          drain
//! ```
//!
//! The steady part begins after as many forward passes as it takes the first micro-batch to come
//! back (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021,
//! section 2.2): stages − stage − 1, and twice that plus the turns of the earlier virtual stages
//! where a stage holds several parts.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::cx::{Boundary, Cx, Graph, Var};
use super::job::Job;
use super::models::{self, Batch, Part};
use super::ops;
use super::units::stage_layers;
use crate::trace::Role;
use crate::units::random::Random;

/// A forward pass that waits for its backward pass.
struct Pending {
    graph: Graph,
    output: Var,
    input: Var,
}

/// Forward and backward passes of one step.
pub(super) fn step(cx: &mut Cx, job: &Job, step: u64) {
    let batch = batch_of_step(job, step);
    let parts = parts(job);
    if job.parallel.pipeline == 1 {
        for _ in 0..job.train.micro_batches {
            cx.emitter.borrow_mut().mark(&format!("step{step}.data"));
            let ids = token_ids(cx, batch);
            cx.emitter.borrow_mut().mark(&format!("step{step}.forward"));
            let pending = forward(cx, job, batch, &parts[0], ids);
            cx.emitter.borrow_mut().mark(&format!("step{step}.backward"));
            backward(cx, pending, &parts[0]);
        }
        return;
    }
    let schedule = Schedule::of(job);
    // Passes that wait, by their part and micro-batch.
    let mut waiting: BTreeMap<(usize, u64), Pending> = BTreeMap::new();
    for turn in schedule.turns() {
        let (part, micro_batch) = schedule.place(turn);
        let (pass, index) = match turn {
            Turn::Forward(index) => ("forward", index),
            Turn::Backward(index) => ("backward", index),
        };
        cx.emitter.borrow_mut().mark(&format!("step{step}.{pass}.{index}.chunk{part}"));
        match turn {
            Turn::Forward(_) => {
                cx.graph = Graph::default();
                let input = if parts[part].first {
                    token_ids(cx, batch)
                } else {
                    receive_hidden(cx, job, batch)
                };
                let pending = forward(cx, job, batch, &parts[part], input);
                waiting.insert((part, micro_batch), pending);
            }
            Turn::Backward(_) => {
                if let Some(pending) = waiting.remove(&(part, micro_batch)) {
                    backward(cx, pending, &parts[part]);
                }
            }
        }
    }
}

/// Samples and length of a step's batches: as told, or drawn.
fn batch_of_step(job: &Job, step: u64) -> Batch {
    let Some(lengths) = &job.lengths else {
        return Batch { batch: job.train.batch, sequence: job.train.sequence };
    };
    let mut random = Random::of(&[job.train.seed, step]);
    let sequence = lengths.min + random.below(lengths.max - lengths.min + 1);
    Batch { batch: (lengths.tokens / sequence).max(1), sequence }
}

/// The parts of the model that this rank holds, in the order in which a batch passes them.
fn parts(job: &Job) -> Vec<Part> {
    let (stage, stages) = (job.parallel.stage, job.parallel.pipeline);
    let held = stage_layers(job);
    let count = held.len();
    let part = |(index, layers)| Part {
        layers,
        first: stage == 0 && index == 0,
        last: stage + 1 == stages && index + 1 == count,
    };
    held.into_iter().enumerate().map(part).collect()
}

/// A batch of random tokens, which are the labels too.
fn token_ids(cx: &mut Cx, batch: Batch) -> Var {
    let ids = cx.new_tensor("input_ids", 8 * batch.tokens());
    Var::constant(ids, batch.tokens())
}

/// A forward pass, as a training loop runs it: `loss = model(input_ids=ids, labels=ids).loss`.
fn forward(cx: &mut Cx, job: &Job, batch: Batch, part: &Part, input: Var) -> Pending {
    cx.reach(Boundary::ForwardBegins);
    let output = models::forward(cx, job, batch, part, &input);
    let output = cx.output(output);
    Pending { graph: std::mem::take(&mut cx.graph), output, input }
}

/// Its backward pass: `(loss / micro_batches).backward(); del loss, ids`, or from a gradient that
/// the next stage sends.
fn backward(cx: &mut Cx, pending: Pending, part: &Part) {
    let Pending { graph, output, input } = pending;
    if part.last {
        cx.graph = graph;
        let loss = ops::scale(cx, "div", &output);
        let root = cx.new_tensor("ones_like", loss.bytes());
        let graph = std::mem::take(&mut cx.graph);
        cx.backward(graph, &loss, Rc::clone(&root));
        cx.reach(Boundary::BackwardEnds);
        drop(root);
        drop(loss);
    } else {
        let bytes = output.bytes();
        cx.receive(bytes);
        let grad = cx.new_tensor_of("receive", bytes, Role::Communication);
        cx.backward(graph, &output, grad);
        cx.reach(Boundary::BackwardEnds);
    }
    cx.drop_leaves();
    drop(output);
    drop(input);
}

/// Hidden states from the stage before: they are kept like any activation, and their gradient is
/// sent back.
fn receive_hidden(cx: &mut Cx, job: &Job, batch: Batch) -> Var {
    let elements = batch.tokens() * job.shape.hidden;
    let bytes = elements * job.train.autocast.unwrap_or(job.train.dtype).bytes();
    cx.receive(bytes);
    let buffer = cx.new_tensor_of("receive", bytes, Role::Activation);
    let [hidden] = cx.node(&[], true, [(buffer, elements)], |_| {
        Box::new(|cx, grads| {
            let sent = grads.iter().flatten().map(|grad| grad.bytes()).sum();
            cx.receive(sent);
            Vec::new()
        })
    });
    hidden
}

/// One pass of a pipeline stage, counted over all of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Forward(u64),
    Backward(u64),
}

/// The order of a pipeline stage's passes.
struct Schedule {
    stages: u64,
    stage: u64,
    virtual_stages: u64,
    micro_batches: u64,
}

impl Schedule {
    fn of(job: &Job) -> Schedule {
        Schedule {
            stages: job.parallel.pipeline,
            stage: job.parallel.stage,
            virtual_stages: job.parallel.virtual_stages,
            micro_batches: job.train.micro_batches,
        }
    }

    /// Forward passes before the first backward pass follows one.
    fn warm_up(&self) -> u64 {
        let later = self.stages - self.stage - 1;
        let warm_up = if self.virtual_stages == 1 {
            later
        } else {
            2 * later + (self.virtual_stages - 1) * self.stages
        };
        warm_up.min(self.passes())
    }

    fn passes(&self) -> u64 {
        self.micro_batches * self.virtual_stages
    }

    fn turns(&self) -> Vec<Turn> {
        let (warm_up, passes) = (self.warm_up(), self.passes());
        let mut turns: Vec<Turn> = (0..warm_up).map(Turn::Forward).collect();
        for backward in 0..passes {
            if warm_up + backward < passes {
                turns.push(Turn::Forward(warm_up + backward));
            }
            turns.push(Turn::Backward(backward));
        }
        turns
    }

    /// Which of the stage's parts a pass belongs to, and which micro-batch. Micro-batches go through
    /// part after part in groups of as many as there are stages; backward passes take the parts
    /// the other way round.
    fn place(&self, turn: Turn) -> (usize, u64) {
        let (Turn::Forward(index) | Turn::Backward(index)) = turn;
        let group = self.stages * self.virtual_stages;
        let part = index % group / self.stages;
        let micro_batch = index / group * self.stages + index % self.stages;
        match turn {
            Turn::Forward(_) => (part as usize, micro_batch),
            Turn::Backward(_) => ((self.virtual_stages - 1 - part) as usize, micro_batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(stages: u64, stage: u64, virtual_stages: u64, micro_batches: u64) -> Schedule {
        Schedule { stages, stage, virtual_stages, micro_batches }
    }

    /// The order in which `pipeline-1f1b` was recorded: rank 0 of 4 stages of two parts.
    #[test]
    fn interleaved_passes_come_in_the_recorded_order() {
        let schedule = schedule(4, 0, 2, 8);
        let name = |turn| {
            let (part, _) = schedule.place(turn);
            match turn {
                Turn::Forward(index) => format!("f{index}.{part}"),
                Turn::Backward(index) => format!("b{index}.{part}"),
            }
        };
        let names: Vec<String> = schedule.turns().into_iter().map(name).collect();
        let recorded = "f0.0 f1.0 f2.0 f3.0 f4.1 f5.1 f6.1 f7.1 f8.0 f9.0 f10.0 b0.1 f11.0 b1.1 \
                        f12.1 b2.1 f13.1 b3.1 f14.1 b4.0 f15.1 b5.0 b6.0 b7.0 b8.1 b9.1 b10.1 \
                        b11.1 b12.0 b13.0 b14.0 b15.0";
        assert_eq!(names.join(" "), recorded);
    }

    /// Whatever the shape, every pass of every micro-batch runs once, forward before backward, and
    /// no more forward passes wait than the warm-up and one.
    #[test]
    fn every_pass_runs_once_and_in_order() {
        for (stages, virtual_stages) in [(2, 1), (4, 1), (4, 2), (3, 3), (8, 1)] {
            for stage in 0..stages {
                for micro_batches in [stages, 2 * stages, 5 * stages] {
                    let schedule = schedule(stages, stage, virtual_stages, micro_batches);
                    let mut waiting = std::collections::BTreeSet::new();
                    let mut done = 0;
                    for turn in schedule.turns() {
                        let place = schedule.place(turn);
                        assert!(place.1 < micro_batches);
                        match turn {
                            Turn::Forward(_) => assert!(waiting.insert(place)),
                            Turn::Backward(_) => {
                                assert!(waiting.remove(&place), "{place:?}");
                                done += 1;
                            }
                        }
                        assert!(waiting.len() as u64 <= schedule.warm_up() + 1);
                    }
                    assert_eq!(done, micro_batches * virtual_stages);
                }
            }
        }
    }
}
