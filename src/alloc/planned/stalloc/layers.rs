//! Which layer of a mixture-of-experts model the program is in, as the run time follows it
//! (specs/stalloc.md 1.3, 3.3).
//!
//! ```text
//!   enter layers.1.mlp->MoELayer : F                 moe-F-1        id 0 -> 1
//!     enter ...local_experts.0->RowParallelLinear    row-F-1        any free space
//!     leave                                                         the expert is counted
//!   leave
//! ```
//!
//! Modules are called as [`HookedModule`] says. A name without a direction belongs to the phase.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::alloc::ALIGNMENT_BYTES;
use crate::plan::stalloc::files::SpareFile;
use crate::trace::HookedModule;

/// What a hooked module does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Op {
    /// The whole mixture: routing, experts and what lies between.
    Moe,
    /// The second matrix of an expert, with which the expert ends.
    Row,
    /// The experts.
    Mlp,
    /// An expert that serves every token: static.
    Shared,
    /// Static as well.
    Router,
}

/// A layer, as labels name it: `mlp-F-3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Label {
    pub(super) op: Op,
    pub(super) is_forward: bool,
    pub(super) id: u64,
}

impl Label {
    /// Reads a label of a file; nothing if no layer is called like that at run time.
    fn parse(text: &str) -> Option<Label> {
        let mut parts = text.split('-');
        let op = match parts.next()? {
            "moe" => Op::Moe,
            "mlp" => Op::Mlp,
            _ => return None,
        };
        let is_forward = match parts.next()? {
            "F" => true,
            "B" => false,
            _ => return None,
        };
        let id = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Label { op, is_forward, id })
    }
}

/// What a module does, and whether this is its forward pass, if its name says so; nothing for
/// modules without a hook.
fn hooked(module: &str) -> Option<(Op, Option<bool>)> {
    let HookedModule { path, class, backward } = HookedModule::of_name(module);
    if class.contains("Model") {
        return None;
    }
    let last = path.rsplit('.').next().unwrap_or(path);
    let op = if matches!(class, "SwitchMLP" | "MoELayer") {
        Op::Moe
    } else if class.contains("RowParallelLinear") && path.contains("local_experts") {
        Op::Row
    } else if matches!(class, "ParallelMLP" | "SequentialMLP") {
        Op::Mlp
    } else if last.contains("shared_expert") {
        Op::Shared
    } else if path.contains("router") {
        Op::Router
    } else {
        return None;
    };
    Some((op, backward.map(|backward| !backward)))
}

/// A module is left that was not the last entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unbalanced;

/// The stack of layers, and the count of experts.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    stack: Vec<Label>,
    /// Id of the mixture entered last.
    id: Option<u64>,
    /// Mixtures of the first iteration and of the second, which stands for all later ones.
    first: u64,
    steady: u64,
    /// Experts done.
    experts: u64,
    /// Experts a layer; 0 if it was not said.
    experts_per_layer: u64,
    /// Count experts from 0 in every layer.
    counts_by_layer: bool,
    /// The phase is a backward pass.
    is_backward: bool,
}

impl Layers {
    /// For a plan with so many mixtures in its first and second iteration.
    pub(super) fn new(layers: (u64, u64), experts_per_layer: u64, counts_by_layer: bool) -> Layers {
        let (first, steady) = layers;
        Layers {
            stack: Vec::new(),
            id: None,
            first,
            steady,
            experts: 0,
            experts_per_layer,
            counts_by_layer,
            is_backward: false,
        }
    }

    /// A phase begins.
    pub(super) fn begin_phase(&mut self, phase: &str) {
        self.is_backward = phase.split('.').nth(1) == Some("backward");
    }

    /// The program enters a module.
    pub(super) fn enter(&mut self, module: &str) {
        let Some((op, is_forward)) = hooked(module) else { return };
        let is_forward = is_forward.unwrap_or(!self.is_backward);
        if op == Op::Moe {
            let next = self.id.map_or(0, |id| id + 1);
            self.id = Some(if next == self.first + self.steady { self.first } else { next });
            if self.counts_by_layer {
                self.experts = 0;
            }
        }
        self.stack.push(Label { op, is_forward, id: self.id.unwrap_or(0) });
    }

    /// The program leaves it.
    ///
    /// # Errors
    /// If another was entered last. Nothing happens then.
    pub(super) fn leave(&mut self, module: &str) -> Result<(), Unbalanced> {
        let Some((op, is_forward)) = hooked(module) else { return Ok(()) };
        let is_left =
            |top: &Label| top.op == op && is_forward.is_none_or(|it| it == top.is_forward);
        if !self.stack.last().is_some_and(is_left) {
            return Err(Unbalanced);
        }
        self.stack.pop();
        if op == Op::Row {
            self.experts += 1;
            // With the count carried on, the first expert of every later layer finds it full.
            if self.experts > self.experts_per_layer && !self.counts_by_layer {
                self.experts = 1;
            }
        }
        Ok(())
    }

    /// The layer that decides where a request goes; nothing if it is a static one.
    pub(super) fn dynamic(&self) -> Option<Label> {
        self.stack.last().copied().filter(|top| !matches!(top.op, Op::Shared | Op::Router))
    }

    /// Whether the expert at work may have space of the static pool.
    pub(super) fn expert_may_reuse(&self) -> bool {
        self.experts < self.experts_per_layer
    }

    /// The second or a later iteration begins: its mixtures are called as those of the second.
    pub(super) fn realign(&mut self) {
        self.id = self.first.checked_sub(1);
    }
}

/// Space of the static pool that is free throughout a layer, by its label.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows {
    free_bytes: BTreeMap<Label, Vec<Range<u64>>>,
}

impl Windows {
    /// The windows of a file; of several with one label the first. Places begin and end at multiples
    /// of 512 bytes, whatever a file says.
    pub(super) fn new(file: &SpareFile) -> Windows {
        let mut free_bytes = BTreeMap::new();
        for window in &file.windows {
            if let Some(label) = Label::parse(&window.label) {
                let aligned = window.free_bytes.iter().map(|range| {
                    let end = range.end - range.end % ALIGNMENT_BYTES;
                    range.start.next_multiple_of(ALIGNMENT_BYTES).min(end)..end
                });
                free_bytes.entry(label).or_insert_with(|| aligned.collect());
            }
        }
        Windows { free_bytes }
    }

    /// What is free throughout a layer, if the file lists it.
    pub(super) fn get(&self, label: Label) -> Option<&[Range<u64>]> {
        self.free_bytes.get(&label).map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOE: &str = "decoder.layers.0.mlp->MoELayer : F";
    const ROW: &str = "decoder.layers.0.mlp.experts.local_experts.1.fc2->RowParallelLinear : F";

    #[test]
    fn hooks_are_told_by_class_then_path() {
        assert_eq!(hooked("a.mlp->SwitchMLP : B"), Some((Op::Moe, Some(false))));
        assert_eq!(hooked("a.mlp->MoELayer : F"), Some((Op::Moe, Some(true))));
        assert_eq!(hooked(ROW), Some((Op::Row, Some(true))));
        assert_eq!(hooked("a.mlp.experts->SequentialMLP"), Some((Op::Mlp, None)));
        assert_eq!(hooked("a.mlp.shared_expert_gate->Linear"), Some((Op::Shared, None)));
        assert_eq!(hooked("a.mlp.router.x->TopKRouter"), Some((Op::Router, None)));
        assert_eq!(hooked("a.router->GPTModel"), None, "models have no hook");
        assert_eq!(hooked("a.linear_fc2->RowParallelLinear"), None, "no expert's");
    }

    #[test]
    fn ids_run_through_the_first_iteration_and_wrap_in_the_second() {
        let mut layers = Layers::new((2, 3), 0, false);
        let ids = (0..9).map(|_| {
            layers.enter(MOE);
            let id = layers.dynamic().map(|label| label.id);
            layers.leave(MOE).expect("entered");
            id.expect("in a mixture")
        });
        assert_eq!(ids.collect::<Vec<_>>(), [0, 1, 2, 3, 4, 2, 3, 4, 2]);
        layers.realign();
        layers.enter(MOE);
        assert_eq!(layers.dynamic().map(|label| label.id), Some(2));
    }

    /// Spec 3.3: in every layer after the first, the first expert never gets any.
    #[test]
    fn the_count_of_experts_is_carried_into_the_next_layer() {
        let reuses = |counts_by_layer, experts_per_layer| {
            let mut layers = Layers::new((8, 8), experts_per_layer, counts_by_layer);
            let mut reuses = Vec::new();
            for _ in 0..3 {
                layers.enter(MOE);
                for _ in 0..2 {
                    reuses.push(layers.expert_may_reuse());
                    layers.enter(ROW);
                    layers.leave(ROW).expect("entered");
                }
                layers.leave(MOE).expect("entered");
            }
            reuses
        };
        assert_eq!(reuses(false, 2), [true, true, false, true, false, true]);
        assert_eq!(reuses(true, 2), [true; 6]);
        assert_eq!(reuses(false, 0), [false; 6], "unset: no expert at all");
    }

    #[test]
    fn static_layers_cover_the_mixture_and_the_stack_must_balance() {
        let mut layers = Layers::new((1, 1), 0, false);
        let router = "decoder.layers.0.mlp.router->TopKRouter : F";
        layers.enter(MOE);
        layers.enter(router);
        assert_eq!(layers.dynamic(), None);
        assert_eq!(layers.leave(MOE), Err(Unbalanced));
        layers.leave(router).expect("entered last");
        assert_eq!(layers.dynamic(), Some(Label { op: Op::Moe, is_forward: true, id: 0 }));
    }

    #[test]
    fn a_name_without_direction_belongs_to_the_phase() {
        let mut layers = Layers::new((1, 1), 0, false);
        layers.begin_phase("step1.backward");
        layers.enter("l.mlp->MoELayer");
        assert_eq!(layers.dynamic().map(|label| label.is_forward), Some(false));
        layers.begin_phase("step1.optimizer");
        assert_eq!(layers.leave("l.mlp->MoELayer"), Ok(()));
    }

    #[test]
    fn labels_of_files_are_read() {
        let file = SpareFile::parse(
            "2 2\nmlp-F-1 (0,700) (1000,2048) (3001,3009)\nshared (0,1)\nmoe-B-3\n",
        );
        let windows = Windows::new(&file.expect("a file"));
        let label = |op, is_forward, id| Label { op, is_forward, id };
        assert_eq!(
            windows.get(label(Op::Mlp, true, 1)),
            Some(&[0..512, 1024..2048, 2560..2560][..])
        );
        assert_eq!(windows.get(label(Op::Moe, false, 3)), Some(&[][..]));
        assert_eq!(windows.get(label(Op::Mlp, false, 1)), None);
    }
}
