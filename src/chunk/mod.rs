//! PatrickStar's chunk manager: model data in equal chunks that move between the GPU and the host
//! (specs/patrickstar.md).
//!
//! ```text
//!                 trace ──> driver ──hooks, ADAM──> Manager ───────────────┐
//!                             │                       │ budgets <─ tracer  │ moves over the link
//!     the program's own blocks│                chunks │                    │
//!                             v                       v                    v
//!                          ┌───────────── GPU ────────────────┐      ┌─── host ───┐
//!                          │ blocks │ fp16 fp16 fp32 m v      │ <──> │ fp16 fp32..│
//!                          └──────────────────────────────────┘      └────────────┘
//!                             └──> derived trace, for any allocator
//! ```
//!
//! Parameters are packed into chunks of one size; the fp16 chunks later hold the gradients, and
//! each has an fp32, a momentum and a variance chunk. The first step measures what the program
//! itself needs of the GPU at each moment; in later steps chunks have the rest, and the one that is
//! used last leaves first.
//!
//! The one design decision: the manager does not serve the program's requests. It reads a trace,
//! decides where every chunk is, and asks a [`Gpu`] for memory like the program does; so any
//! allocator can serve under it, and what it asked for is a trace again.

mod adam;
mod budget;
mod cache;
mod clock;
mod comm;
mod config;
mod drive;
mod error;
mod gpu;
mod hooks;
mod job;
pub mod layout;
mod manager;
mod memory;
pub mod search;
mod states;
mod summary;
mod tracer;
mod world;

pub use clock::{Line, LinkCosts, LinkCostsError, StepTimes};
pub use config::{
    CHUNK_ELEMENTS_MAX, ChunkConfig, ChunkSize, HOST_BYTES_DEFAULT, MEMORY_BYTES_MAX, NAME, Quirks,
    Ratio, parameter_help,
};
pub use drive::{ChunkRun, run};
pub use error::ChunkError;
pub use gpu::{Exact, Gpu, GpuBlock};
pub use job::RANKS_MAX;
pub use states::{ChunkList, Device};
pub use summary::{
    ChunkEvent, ChunkEventKind, ChunkSummary, Collectives, HardStop, ListSummary, RefusedRequest,
    Stage, StepSummary, Traffic,
};
