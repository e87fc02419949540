//! The one replay loop, its clock and completions; `verify`.
//!
//! [`run`] takes a trace through one allocator on a simulated device. [`verify`] takes a recording
//! through `caching` and compares every decision with what the recorded allocator did.
mod clock;
mod completions;
mod replay;
mod result;
mod verify;

pub use replay::{Observe, Observed, RunError, RunOptions, run};
pub use result::*;
pub use verify::{Difference, VerifyError, VerifyResult, verify};
