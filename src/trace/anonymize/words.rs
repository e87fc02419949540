//! Which words of a name may stay, and what stands for the others.
//!
//! Phases and modules have names of words with dots between. Every word that is not known here gets
//! a number, the same one wherever it stands, so that what was equal stays equal and what was
//! different stays different: allocators that plan ahead compare such names, and know a few words.

use std::collections::HashMap;

use crate::trace::{HookedModule, step_name};

/// Parts of a step that nearly every job has; with a number behind them too (`chunk1`).
const PHASE_WORDS: [&str; 19] = [
    "backward",
    "checkpoint",
    "chunk",
    "data",
    "decode",
    "end",
    "eval",
    "forward",
    "head",
    "init",
    "load",
    "loss",
    "microbatch",
    "optimizer",
    "prefill",
    "save",
    "train",
    "warmup",
    "zero_grad",
];

/// Words of a module's path that allocators act on, wherever they stand in a word
/// (specs/stalloc.md 1.3).
const PATH_MARKERS: [&str; 3] = ["local_experts", "shared_expert", "router"];

/// Paths of modules that end in this word are mixtures of experts.
const MIXTURE: &str = "mlp";

/// Classes of modules that allocators act on.
const CLASSES: [&str; 4] = ["MoELayer", "ParallelMLP", "SequentialMLP", "SwitchMLP"];

/// Parts of a class's name that they act on.
const CLASS_MARKERS: [&str; 3] = ["Model", "Router", "RowParallelLinear"];

/// Strategies as our own traces name them.
const STRATEGIES: [&str; 17] = [
    "activation-offload",
    "checkpoint-offload",
    "cpu-embedding",
    "ddp",
    "fsdp",
    "lora",
    "moe",
    "offload",
    "pipeline",
    "recompute",
    "selective-recompute",
    "tensor",
    "tiled-linear",
    "variable-lengths",
    "zero1",
    "zero2",
    "zero3",
];

/// Whether a strategy is one of the usual words.
pub(super) fn is_usual_strategy(word: &str) -> bool {
    STRATEGIES.contains(&word)
}

fn is_number(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// Gives words their numbers.
#[derive(Default)]
pub(super) struct Words {
    numbers: HashMap<String, usize>,
}

impl Words {
    fn number(&mut self, word: &str) -> usize {
        let next = self.numbers.len();
        *self.numbers.entry(word.to_owned()).or_insert(next)
    }

    /// A phase: `step3.my-model.backward` becomes `step3.phase0.backward`.
    pub(super) fn phase(&mut self, phase: &str) -> String {
        let step = step_name(phase);
        let rest = step.map_or(Some(phase), |name| phase[name.len()..].strip_prefix('.'));
        let words = rest.iter().flat_map(|rest| rest.split('.'));
        let words = words.map(|word| {
            let bare = word.trim_end_matches(|c: char| c.is_ascii_digit());
            if is_number(word) || PHASE_WORDS.contains(&bare) {
                return word.to_owned();
            }
            format!("phase{}", self.number(word))
        });
        let words: Vec<String> = step.map(str::to_owned).into_iter().chain(words).collect();
        words.join(".")
    }

    /// A module as hooks name it: `actor.layers.3.mlp->MyMlp : F` becomes `m0.m1.3.mlp->Class2 : F`.
    pub(super) fn module(&mut self, name: &str) -> String {
        let HookedModule { path, class, backward } = HookedModule::of_name(name);
        let path = self.path(path);
        let class = if class.is_empty() { String::new() } else { self.class(class) };
        HookedModule { path: &path, class: &class, backward }.name()
    }

    /// A path, of a module or of a parameter.
    pub(super) fn path(&mut self, path: &str) -> String {
        let words = path.split('.').map(|word| {
            if is_number(word) || word == MIXTURE || word.is_empty() {
                return word.to_owned();
            }
            // The plural is told from the singular.
            if word == "shared_experts" || PATH_MARKERS.contains(&word) {
                return word.to_owned();
            }
            format!("{}{}", marked(word, &PATH_MARKERS, "m"), self.number(word))
        });
        words.collect::<Vec<_>>().join(".")
    }

    fn class(&mut self, class: &str) -> String {
        if CLASSES.contains(&class) || CLASS_MARKERS.contains(&class) {
            return class.to_owned();
        }
        format!("{}{}", marked(class, &CLASS_MARKERS, "Class"), self.number(class))
    }
}

/// What a name without its number begins with: the markers that are in the word, so that whoever
/// looks for them finds them.
fn marked(word: &str, markers: &[&str], other: &str) -> String {
    let found: Vec<&str> = markers.iter().copied().filter(|marker| word.contains(marker)).collect();
    if found.is_empty() { other.to_owned() } else { format!("{}_", found.join("_")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_usual_words_stay() {
        let mut words = Words::default();
        let same = ["step3", "step0.forward", "head", "step1.backward.4.chunk1", "step2.zero_grad"];
        for phase in same {
            assert_eq!(words.phase(phase), phase);
        }
        assert_eq!(words.phase("step3.secret.backward"), "step3.phase0.backward");
        assert_eq!(words.phase("alice"), "phase1");
        assert_eq!(words.phase("step4.secret"), "step4.phase0");
        // A name that looks like ours is a word like any other.
        assert_eq!(words.phase("phase0"), "phase2");
        assert_eq!(words.phase("step.1"), "phase3.1");
    }

    #[test]
    fn modules_keep_what_allocators_look_for() {
        let mut words = Words::default();
        assert_eq!(words.module("actor.layers.3.mlp->MyMoE : F"), "m0.m1.3.mlp->Class2 : F");
        assert_eq!(words.module("actor.layers.3.mlp->MoELayer : B"), "m0.m1.3.mlp->MoELayer : B");
        assert_eq!(words.module("actor.shared_experts"), "m0.shared_experts");
        assert_eq!(words.module("x_router_y->TopKRouter"), "router_3->Router_4");
        assert_eq!(words.module(""), "");
        assert_eq!(words.path("actor.weight"), "m0.m5");
    }
}
