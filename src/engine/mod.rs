//! The one replay loop, its clock and completions; `verify`, `predict` and `compare`.
//!
//! [`run`] takes a trace through one allocator on a simulated device. [`verify`] takes a recording
//! through `caching` and compares every decision with what the recorded allocator did. [`predict`]
//! compares the same without taking anything from what that allocator did. [`compare`] runs many
//! cells of one [`Prepared`] trace; [`smallest_capacity`] tells how small a device may be.
mod capacity;
mod chunk_plans;
mod chunked;
mod clock;
mod compare;
mod completions;
mod hardware;
mod lifetimes;
mod loading;
mod packing;
mod planning;
mod predict;
mod prepared;
mod profile;
mod recorded_device;
mod replay;
mod result;
mod stalloc_planning;
mod steps;
mod verify;

use crate::alloc::registry::{self, AllocatorInfo};
use crate::chunk;

pub use capacity::{CapacitySearch, SmallestCapacity, smallest_capacity};
pub use chunk_plans::{BestChunks, Choice, ChunkPlan, ChunkedModel, plan_chunks};
pub use compare::{CompareCell, Compared, Order, compare};
pub use hardware::{Bench, Card, HardwareError, Pace, run_on_hardware};
pub use lifetimes::{Lifetimes, StreamRule, lifetimes};
pub use packing::{minimalloc_rows, packing_from_minimalloc, problem_from_minimalloc};
pub use planning::{
    BindingInstant, CapacityAnswer, CapacityReason, PlanError, PlanResult, PlanSource, PlanWall,
    Planned, plan,
};
pub use predict::{Misprediction, PredictError, PredictResult, PredictedPeaks, predict};
pub use prepared::Prepared;
pub use profile::{first_steps, steps_of, steps_to_profile};
pub use replay::{Brief, Observe, Observed, RunError, RunOptions, When, brief, moments, run};
pub use result::*;
pub use stalloc_planning::{
    StallocHints, StallocPlanError, StallocWay, plan_as_stalloc, stalloc_hints,
};
pub use verify::{Difference, VerifyError, VerifyResult, verify};

/// Every allocator that [`run`] knows: those of the registry, and `chunk`, which drives one of them.
pub fn allocators() -> Vec<AllocatorInfo> {
    let mut allocators = registry::list();
    allocators.push(AllocatorInfo {
        name: chunk::NAME,
        summary: "PatrickStar's manager: model data in equal chunks on GPU and host",
        params: chunk::parameter_help(),
    });
    allocators
}
