//! Names of modules as hooks record them: path, class, and which pass.
//!
//! A trace has one name for a module that is entered. Where the recording tells more, it stands in
//! that name as `PATH->CLASS : F` or `PATH->CLASS : B`, so that a forward pass recomputed inside a
//! backward phase is not taken for a backward pass.

/// What a module's name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookedModule<'a> {
    /// Dotted path in the model, as `decoder.layers.3.mlp`.
    pub path: &'a str,
    /// Class, as `MoELayer`; empty if the name has none.
    pub class: &'a str,
    /// The backward pass; nothing if the name does not say.
    pub backward: Option<bool>,
}

impl<'a> HookedModule<'a> {
    /// Reads a name. Any name is one: what is not said stays empty.
    pub fn of_name(name: &'a str) -> HookedModule<'a> {
        let (name, backward) = match name.rsplit_once(" : ") {
            Some((name, "F")) => (name, Some(false)),
            Some((name, "B")) => (name, Some(true)),
            _ => (name, None),
        };
        let (path, class) = name.split_once("->").unwrap_or((name, ""));
        HookedModule { path, class, backward }
    }

    /// The name that says all this.
    pub fn name(&self) -> String {
        let pass = match self.backward {
            Some(true) => " : B",
            Some(false) => " : F",
            None => "",
        };
        if self.class.is_empty() {
            return format!("{}{pass}", self.path);
        }
        format!("{}->{}{pass}", self.path, self.class)
    }
}

/// Whether a phase is a backward pass (`step3.backward`, `step0.backward.4.chunk1`) or a forward
/// pass; nothing if it is neither.
pub fn backward_phase(phase: &str) -> Option<bool> {
    match phase.split('.').nth(1)? {
        "forward" => Some(false),
        "backward" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_and_put_together() {
        let module = HookedModule::of_name("decoder.layers.0.mlp->MoELayer : B");
        assert_eq!((module.path, module.class), ("decoder.layers.0.mlp", "MoELayer"));
        assert_eq!(module.backward, Some(true));
        for name in ["decoder.mlp->MoELayer : B", "a->B : F", "layer3", "", "x->y", "m : F"] {
            assert_eq!(HookedModule::of_name(name).name(), name);
        }
    }
}
