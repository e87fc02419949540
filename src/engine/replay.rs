//! The replay loop.
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::device::CostProfile;
use crate::metrics::{DecisionRow, TimelineRow};
use crate::trace::{AddressPolicy, Trace};

use super::RunResult;

/// How to run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Physical capacity; else the trace's, else the recorded device's total, else unlimited.
    pub capacity_bytes: Option<u64>,
    /// The allocator's own limit; else the trace's.
    pub limit_bytes: Option<u64>,
    /// The settings string; else the trace's.
    pub settings: Option<String>,
    /// What device calls cost.
    pub profile: CostProfile,
    /// Where addresses come from; else the trace's, else `chunks`.
    pub address_policy: Option<AddressPolicy>,
    /// End at the first refused request.
    pub stop_on_oom: bool,
    /// Check the contract after every event with an independent shadow map.
    pub paranoid: bool,
}

impl RunOptions {
    /// Everything from the trace, costs from `profile`.
    pub fn new(profile: CostProfile) -> Self {
        RunOptions {
            capacity_bytes: None,
            limit_bytes: None,
            settings: None,
            profile,
            address_policy: None,
            stop_on_oom: false,
            paranoid: false,
        }
    }
}

/// What to watch beside the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observe {
    /// Keep a row an action.
    pub decisions: bool,
    /// Keep a row an event.
    pub timeline: bool,
}

/// A result and what was watched.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The result.
    pub result: RunResult,
    /// A row an action, empty unless asked for.
    pub decisions: Vec<DecisionRow>,
    /// A row an event, empty unless asked for.
    pub timeline: Vec<TimelineRow>,
}

/// A run could not be done.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The allocator could not be built.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The allocator broke its contract (`paranoid`).
    #[error("{allocator} broke the contract at event {event}: {message}")]
    Contract {
        /// The allocator.
        allocator: String,
        /// Index of the event.
        event: u64,
        /// What was broken.
        message: String,
    },
}

/// Takes a trace through one allocator on a simulated device.
///
/// # Errors
/// If the allocator cannot be built from its specification. Running out of memory is a result, not an
/// error.
pub fn run(
    _trace: &Trace,
    _spec: &AllocSpec,
    _options: &RunOptions,
    _observe: Observe,
) -> Result<Observed, RunError> {
    unimplemented!()
}
