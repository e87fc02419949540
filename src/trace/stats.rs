//! Statistics of a trace.
use super::Trace;

/// Statistics of a trace.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct TraceStats {
    /// Number of events.
    pub events: u64,
}

/// Computes them.
pub fn stats(_trace: &Trace) -> TraceStats {
    unimplemented!()
}
