//! The one replay loop, its clock and completions; `verify` and `predict`.
//!
//! [`run`] takes a trace through one allocator on a simulated device. [`verify`] takes a recording
//! through `caching` and compares every decision with what the recorded allocator did. [`predict`]
//! compares the same without taking anything from what that allocator did.
mod clock;
mod completions;
mod loading;
mod predict;
mod recorded_device;
mod replay;
mod result;
mod steps;
mod verify;

pub use predict::{Misprediction, PredictError, PredictResult, PredictedPeaks, predict};
pub use replay::{Observe, Observed, RunError, RunOptions, run};
pub use result::*;
pub use verify::{Difference, VerifyError, VerifyResult, verify};
