//! Programs: a model, the passes over it, and what else is allocated meanwhile.
//!
//! A program is written as layers and unrolled to a flat list of [`Act`]s, the only thing that the
//! model and the builder of traces look at:
//!
//! ```text
//!   layer, checkpointed      forward: unit 0, unit 1, keep the checkpoint
//!   units [0, 1]            backward: (again unit 0, unit 1,) back through unit 1, unit 0, drop it
//! ```

/// A module with parameters of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Elements of each parameter.
    pub(crate) parameters: Vec<u64>,
    /// Its inputs need no gradient (spec 1.3, the quirk).
    pub(crate) leaf: bool,
    /// Torch-based, on the host (spec 5.3).
    pub(crate) host: bool,
}

impl Unit {
    pub(crate) fn of(parameters: &[u64]) -> Unit {
        Unit { parameters: parameters.to_vec(), leaf: false, host: false }
    }

    pub(crate) fn leaf(parameters: &[u64]) -> Unit {
        Unit { leaf: true, ..Unit::of(parameters) }
    }
}

/// Units that run after each other and are recomputed together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layer {
    /// Indices of units, in the order of the forward pass.
    pub(crate) units: Vec<usize>,
    /// Its forward pass is run again before its backward pass (spec 5.1).
    pub(crate) recompute: bool,
    /// Bytes kept from its forward pass to the end of its backward pass.
    pub(crate) kept_bytes: u64,
    /// Bytes that each unit saves from its (re)computed forward to its own backward pass.
    pub(crate) saved_bytes: u64,
    /// Bytes that live only inside a unit's pass.
    pub(crate) working_bytes: u64,
}

/// A model and how it is trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Program {
    /// In the order in which their constructors finish.
    pub(crate) units: Vec<Unit>,
    /// In the order of the forward pass.
    pub(crate) layers: Vec<Layer>,
    /// Bytes of a block that lives from the first step to the last; 0 for none.
    pub(crate) constant_bytes: u64,
    /// Steps.
    pub(crate) steps: u32,
    /// Steps whose ADAM is left out, as after an overflow of fp16 gradients.
    pub(crate) skipped: Vec<u32>,
}

/// Part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Init,
    Forward,
    Backward,
    Adam,
}

/// What happens, in order. Blocks are numbered from 0, a new number for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// A stage of a step begins.
    Stage(u32, Stage),
    /// A unit's pass begins: pre-forward or, if `backward`, pre-backward hook.
    Enter { unit: usize, backward: bool },
    /// It ends.
    Leave { unit: usize, backward: bool },
    /// Memory that is no model data.
    Alloc { block: usize, bytes: u64 },
    /// It is freed.
    Free { block: usize },
}

/// Writes acts and numbers blocks.
#[derive(Default)]
struct Unroller {
    acts: Vec<Act>,
    blocks: usize,
}

impl Unroller {
    /// Nothing if there are no bytes.
    fn alloc(&mut self, bytes: u64) -> Option<usize> {
        if bytes == 0 {
            return None;
        }
        let block = self.blocks;
        self.blocks += 1;
        self.acts.push(Act::Alloc { block, bytes });
        Some(block)
    }

    fn free(&mut self, block: Option<usize>) {
        self.acts.extend(block.map(|block| Act::Free { block }));
    }

    fn pass(&mut self, unit: usize, backward: bool, layer: &Layer) {
        self.acts.push(Act::Enter { unit, backward });
        let working = self.alloc(layer.working_bytes);
        self.free(working);
        self.acts.push(Act::Leave { unit, backward });
    }

    /// The forward passes of a layer; what its units save if `save`.
    fn forward(&mut self, layer: &Layer, save: bool) -> Vec<Option<usize>> {
        let mut saved = Vec::new();
        for &unit in &layer.units {
            self.pass(unit, false, layer);
            saved.push(if save { self.alloc(layer.saved_bytes) } else { None });
        }
        saved
    }

    fn backward(&mut self, layer: &Layer, saved: &[Option<usize>]) {
        for (&unit, &saved) in layer.units.iter().zip(saved).rev() {
            self.pass(unit, true, layer);
            self.free(saved);
        }
    }

    fn step(&mut self, program: &Program, step: u32) {
        self.acts.push(Act::Stage(step, Stage::Forward));
        let mut kept = Vec::new();
        for layer in &program.layers {
            let saved = self.forward(layer, !layer.recompute);
            kept.push((self.alloc(layer.kept_bytes), saved));
        }
        self.acts.push(Act::Stage(step, Stage::Backward));
        for (layer, (block, mut saved)) in program.layers.iter().zip(kept).rev() {
            if layer.recompute {
                saved = self.forward(layer, true);
            }
            self.backward(layer, &saved);
            self.free(block);
        }
        if !program.skipped.contains(&step) {
            self.acts.push(Act::Stage(step, Stage::Adam));
        }
    }
}

impl Program {
    /// What happens.
    pub(crate) fn acts(&self) -> Vec<Act> {
        let mut unroller = Unroller::default();
        let constant = unroller.alloc(self.constant_bytes);
        for step in 0..self.steps {
            unroller.step(self, step);
        }
        unroller.free(constant);
        unroller.acts
    }
}
