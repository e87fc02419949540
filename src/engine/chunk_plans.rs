//! Which chunk size suits a model on a machine: the answer of `plan-chunks`.
//!
//! The one design decision: both grids are searched and all rules asked, so that what a person
//! reads off PatrickStar's search stands beside what it leaves on the table.

use serde::Serialize;

use super::result::SCHEMA_VERSION;
use crate::chunk::layout::smallest_chunk_elements;
use crate::chunk::search::{
    Candidate, MODEL_DATA_BYTES, Machine, Misfit, Row, Rule, best, fine_grid, nearest, search,
    shipped_grid, tightest,
};
use crate::trace::ModelUnit;

/// Bytes an element of model data and gradients that DeepSpeed holds (spec patrickstar 1.2).
const DEEPSPEED_BYTES: u64 = 18;

/// Chunk sizes for a model on a machine. Field names are the JSON names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkPlan {
    /// Version of this form.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// What is put into chunks.
    pub model: ChunkedModel,
    /// What it is put on.
    pub machine: Machine,
    /// PatrickStar's grid, largest first, then the size that was asked for.
    pub rows: Vec<Row>,
    /// The best of PatrickStar's grid.
    pub shipped: BestChunks,
    /// The best of every whole number of Mi elements.
    pub fine: BestChunks,
}

/// The model of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkedModel {
    /// Its name.
    pub name: String,
    /// Its family and strategies in words.
    pub description: String,
    /// Modules with parameters of their own.
    pub modules: u64,
    /// Elements of all parameters.
    pub elements: u64,
    /// Of which on the host, in no chunk.
    pub host_elements: u64,
    /// Model data without any waste: 14 bytes an element.
    pub model_data_bytes: u64,
    /// What DeepSpeed holds in its place: 18 bytes an element.
    pub deepspeed_bytes: u64,
    /// The module with most elements that is put into a chunk; empty if there is none.
    pub largest_module: String,
    /// Its elements: the smallest chunk that holds the model.
    pub smallest_chunk_elements: u64,
}

/// The best chunk sizes of a grid; nothing where none will do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BestChunks {
    /// Least memory, whether it fits or not.
    pub tightest: Option<Candidate>,
    /// Least memory by each rule.
    pub searched: Choice,
    /// By the corrected rules.
    pub corrected: Choice,
    /// By the manager's budgets.
    pub managed: Choice,
}

/// The best chunk size by a rule, or what is lacking for the one that comes nearest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// The best.
    pub best: Option<Candidate>,
    /// Chunk size of the nearest.
    pub nearest_elements: Option<u64>,
    /// What that one lacks.
    pub misfit: Option<Misfit>,
}

/// Searches chunk sizes; `asked_elements` is one more to look at.
pub fn plan_chunks(
    name: String,
    description: String,
    units: &[ModelUnit],
    asked_elements: Option<u64>,
    machine: Machine,
) -> ChunkPlan {
    let shipped = search(units, shipped_grid(), &machine);
    let fine = search(units, fine_grid(units), &machine);
    let best_of_grids = (BestChunks::of(&shipped), BestChunks::of(&fine));
    let mut rows = shipped;
    let new = asked_elements.filter(|asked| !rows.iter().any(|row| row.chunk_elements == *asked));
    rows.extend(search(units, new, &machine));
    ChunkPlan {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        model: ChunkedModel::of(name, description, units),
        machine,
        rows,
        shipped: best_of_grids.0,
        fine: best_of_grids.1,
    }
}

impl ChunkedModel {
    fn of(name: String, description: String, units: &[ModelUnit]) -> ChunkedModel {
        let sum = |host: bool| {
            let units = units.iter().filter(|unit| unit.host || !host).map(ModelUnit::elements);
            units.fold(0, u64::saturating_add)
        };
        let smallest = smallest_chunk_elements(units);
        let mut largest = units.iter().filter(|unit| !unit.host && unit.elements() == smallest);
        ChunkedModel {
            name,
            description,
            modules: units.len() as u64,
            elements: sum(false),
            host_elements: sum(true),
            model_data_bytes: sum(false).saturating_mul(MODEL_DATA_BYTES),
            deepspeed_bytes: sum(false).saturating_mul(DEEPSPEED_BYTES),
            largest_module: largest.next().map(|unit| unit.module.clone()).unwrap_or_default(),
            smallest_chunk_elements: smallest,
        }
    }
}

impl BestChunks {
    /// What this rule chooses.
    pub fn choice(&self, rule: Rule) -> &Choice {
        match rule {
            Rule::Searched => &self.searched,
            Rule::Corrected => &self.corrected,
            Rule::Managed => &self.managed,
        }
    }

    fn of(rows: &[Row]) -> BestChunks {
        let choice = |rule| {
            let nearest = nearest(rows, rule);
            Choice {
                best: best(rows, rule).cloned(),
                nearest_elements: nearest.map(|(candidate, _)| candidate.chunk_elements),
                misfit: nearest.map(|(_, misfit)| misfit),
            }
        };
        BestChunks {
            tightest: tightest(rows).cloned(),
            searched: choice(Rule::Searched),
            corrected: choice(Rule::Corrected),
            managed: choice(Rule::Managed),
        }
    }
}
