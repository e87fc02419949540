//! What a job does in single words, as in the header of its trace.

use super::read::{FAMILIES, word_of};
use super::{ActivationOffload, Family, Job, OptimizerOffload, Recompute};

/// The name of a family in descriptions.
pub fn family_name(family: Family) -> &'static str {
    word_of(&FAMILIES, family)
}

/// The strategies of a job, in words like those of the traces that ship: `recompute`, `lora`,
/// `zero3`.
pub fn strategy_words(job: &Job) -> Vec<String> {
    let (strategy, parallel) = (&job.strategy, &job.parallel);
    let recompute = match strategy.recompute {
        Recompute::None => "",
        Recompute::Every(_) => "recompute",
        Recompute::Selective => "selective-recompute",
    };
    let activations = match strategy.activation_offload {
        ActivationOffload::None => "",
        ActivationOffload::Saved => "activation-offload",
        ActivationOffload::Checkpoints => "checkpoint-offload",
    };
    let offloads = strategy.optimizer_offload != OptimizerOffload::None;
    let told = [
        ("lora", strategy.lora.is_some()),
        (recompute, !recompute.is_empty()),
        (activations, !activations.is_empty()),
        ("offload", offloads),
        ("cpu-embedding", strategy.cpu_embedding),
        ("tiled-linear", strategy.tiled_linear),
        ("moe", job.shape.family == Family::Moe),
        ("tensor", parallel.tensor > 1),
        ("pipeline", parallel.pipeline > 1),
        ("variable-lengths", job.lengths.is_some()),
    ];
    let words = told.into_iter().filter(|(_, holds)| *holds).map(|(word, _)| word.to_owned());
    let zero = (strategy.zero > 0).then(|| format!("zero{}", strategy.zero));
    words.chain(zero).collect()
}
