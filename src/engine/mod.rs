//! The one replay loop, its clock and completions; `verify`, `predict` and `compare`.
//!
//! [`run`] takes a trace through one allocator on a simulated device. [`verify`] takes a recording
//! through `caching` and compares every decision with what the recorded allocator did. [`predict`]
//! compares the same without taking anything from what that allocator did. [`compare`] runs many
//! cells of one [`Prepared`] trace; [`smallest_capacity`] tells how small a device may be.
mod capacity;
mod clock;
mod compare;
mod completions;
mod loading;
mod predict;
mod prepared;
mod recorded_device;
mod replay;
mod result;
mod steps;
mod verify;

pub use capacity::{CapacitySearch, SmallestCapacity, smallest_capacity};
pub use compare::{CompareCell, Compared, Order, compare};
pub use predict::{Misprediction, PredictError, PredictResult, PredictedPeaks, predict};
pub use prepared::Prepared;
pub use replay::{Observe, Observed, RunError, RunOptions, run};
pub use result::*;
pub use verify::{Difference, VerifyError, VerifyResult, verify};
