//! Fuzz targets for everything that fraglab reads: `README.md` says how to run them.
//!
//! The bodies are in `targets/`, which the crate's own tests share. Only fuzzing has the limit of
//! memory below.

use std::alloc::System;

use cap::Cap;

pub mod targets;

pub use targets::run;

/// Most bytes that a target may have at once. Inputs are a few hundred kilobytes at most: more than
/// this for one of them is a finding, however little of it is touched.
const MEMORY_BYTES_MAX: usize = 1 << 30;

/// Refuses what goes beyond, which ends the process as a crash does.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);
