//! Does `caching` reproduce what a recording's real allocator did?
use serde::Serialize;

use crate::alloc::spec::SpecError;
use crate::trace::Trace;

/// The first place where the simulated allocator did something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Index of the event.
    pub event_index: u64,
    /// What the recording shows.
    pub expected: String,
    /// What the simulation did.
    pub got: String,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyResult {
    /// Name of the trace or file.
    pub file: String,
    /// Everything compared was the same.
    pub exact: bool,
    /// Events in the trace.
    pub events: u64,
    /// Segment events compared.
    pub segment_events: u64,
    /// Blocks whose segment and offset were compared.
    pub blocks: u64,
    /// Version of the allocator that recorded, where known.
    pub version: Option<String>,
    /// The first difference.
    pub first_difference: Option<Difference>,
    /// What was compared.
    pub compared: Vec<String>,
    /// What was not, and why.
    pub not_compared: Vec<String>,
}

/// A recording cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is nothing to compare with.
    #[error("the trace has no recording of what its allocator did")]
    NoRecording,
    /// Its settings are not understood or not supported.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Compares `caching` with the recording.
///
/// # Errors
/// If there is no recording or its settings cannot be modelled.
pub fn verify(_trace: &Trace) -> Result<VerifyResult, VerifyError> {
    unimplemented!()
}
