//! fraglab: a discrete-event simulator and benchmarking laboratory for GPU memory allocators.
#![deny(unsafe_code)]

pub mod alloc;
#[cfg(feature = "cli")]
pub mod cli;
pub mod device;
pub mod engine;
pub mod import;
pub mod metrics;
pub mod report;
pub mod trace;
pub mod units;
