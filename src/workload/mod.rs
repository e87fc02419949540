//! Jobs that nobody has run yet: a model description and strategies become a trace.
//!
//! ```text
//!   TOML ──read──> Job ──┬─ units ──> the model's modules and parameters (header.model)
//!                        └─ generate ──> Trace
//! ```

mod activations;
mod attention;
mod autocast;
mod cx;
mod ddp;
mod dense;
mod emitter;
mod generate;
mod gpu;
pub mod gpus;
mod job;
mod lora;
mod models;
mod offload;
mod ops;
mod optimizer;
pub mod options;
mod ranks;
mod read;
mod schedule;
mod scores;
pub mod shapes;
mod tables;
mod tensor_parallel;
#[cfg(test)]
mod tests;
mod tiles;
mod units;
mod words;
mod write;
mod zero;

pub use activations::{ActivationEstimate, activation_estimate};
pub use generate::{GenerateError, generate};
pub use job::{
    ActivationOffload, Dtype, Family, Hardware, Head, Job, Lengths, Lora, LoraTarget, Optimizer,
    OptimizerOffload, Parallel, Recompute, Shape, Strategy, Train,
};
pub(crate) use read::meant;
pub use read::{JOB_KEYS, JobError, JobFault, JobKey, Place, read_job, read_job_within};
pub use units::{stage_layers, units};
pub use words::{family_name, strategy_words};
pub use write::{example_job, write_job};
