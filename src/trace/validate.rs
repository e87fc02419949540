//! Whether a trace makes sense.
use super::Trace;

/// A trace contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {event}: {message}")]
pub struct InvalidTrace {
    /// The event.
    pub event: u64,
    /// What is wrong.
    pub message: String,
}

/// Checks every rule that the replay loop relies on.
///
/// # Errors
/// The first rule broken.
pub fn validate(_trace: &Trace) -> Result<(), InvalidTrace> {
    unimplemented!()
}
