//! The model behind a trace: which parameters there are, in which modules, on how many ranks.
//!
//! Blocks say how many bytes of what kind a rank holds; a shard does not say what it is a shard of.
//! This table does, for allocators that manage model data themselves (`chunk`). It names things
//! instead of pointing at them, so that people can write it and traces can be cut without it:
//!
//! ```text
//!   unit  "layers.0.self_attn.q_proj"  <── enter / leave("layers.0.self_attn.q_proj->Linear : F")
//!     └─ parameter "layers.0.self_attn.q_proj.weight", 16777216 elements
//!                        <── access(block of that name and role `parameter`)
//! ```

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Most elements of a parameter: 2^56, so that a few hundred bytes for each still fit in 64 bits.
pub const ELEMENTS_MAX: u64 = 1 << 56;

/// The model of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Data-parallel ranks: those that may share model data out among them. At least 1.
    #[serde(default = "one")]
    pub ranks: u32,
    /// Those of them that share a host's memory. At least 1, at most `ranks`.
    #[serde(default = "one")]
    pub local_ranks: u32,
    /// Modules with parameters of their own, in the order in which their constructors finish.
    #[serde(default)]
    pub units: Vec<ModelUnit>,
    /// Options that the description of the job gives to allocators that manage model data, by the
    /// allocator's own names (`chunk+KEY=VALUE`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// A module with parameters of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelUnit {
    /// Dotted path in the model, as in the names of modules that are entered and left
    /// ([`HookedModule::path`](super::HookedModule)).
    pub module: String,
    /// Its inputs need no gradient, as token ids: PyTorch calls no hook when its backward pass
    /// ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaf: bool,
    /// Kept and used on the host: its parameters never come to the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub host: bool,
    /// Its own parameters, without those of modules inside it. At least one.
    pub parameters: Vec<ModelParameter>,
}

/// A parameter, whole: not a rank's share of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelParameter {
    /// Its name, by which blocks of the role `parameter` are known to hold it or a rank's share.
    pub name: String,
    /// Number of elements. At least 1.
    pub elements: u64,
    /// It is not trained.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
}

fn one() -> u32 {
    1
}

impl Default for Model {
    fn default() -> Self {
        Model { ranks: 1, local_ranks: 1, units: Vec::new(), options: BTreeMap::new() }
    }
}

impl Model {
    /// Elements of all parameters.
    pub fn elements(&self) -> u64 {
        self.units.iter().map(ModelUnit::elements).fold(0, u64::saturating_add)
    }

    /// What is wrong with it: index of the unit, and why.
    pub(super) fn fault(&self) -> Option<(usize, String)> {
        if self.ranks == 0 || self.local_ranks == 0 || self.local_ranks > self.ranks {
            let (ranks, local) = (self.ranks, self.local_ranks);
            let why = format!("{local} of {ranks} ranks on a host: expected 1 <= local <= ranks");
            return Some((0, why));
        }
        let mut modules = BTreeSet::new();
        let mut parameters = BTreeSet::new();
        let mut elements = 0u64;
        for (index, unit) in self.units.iter().enumerate() {
            let module = &unit.module;
            if !modules.insert(module.as_str()) {
                return Some((index, format!("module `{module}` is there twice")));
            }
            if unit.parameters.is_empty() {
                return Some((index, format!("module `{module}` has no parameters")));
            }
            for parameter in &unit.parameters {
                let name = &parameter.name;
                if !parameters.insert(name.as_str()) {
                    return Some((index, format!("parameter `{name}` is there twice")));
                }
                elements = elements.saturating_add(parameter.elements);
                if parameter.elements == 0 || elements > ELEMENTS_MAX {
                    let why = format!(
                        "parameter `{name}` has {} elements: expected 1 or more, and no more than \
                         2^56 of all parameters",
                        parameter.elements
                    );
                    return Some((index, why));
                }
            }
        }
        None
    }
}

impl ModelUnit {
    /// Elements of its parameters.
    pub fn elements(&self) -> u64 {
        let elements = self.parameters.iter().map(|parameter| parameter.elements);
        elements.fold(0, u64::saturating_add)
    }
}
