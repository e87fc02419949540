//! What an entry needs now: one replay on its device, and the search for the smallest.

use std::num::NonZeroU64;

use serde::Serialize;

use super::CheckError;
use super::baseline::{Entry, Figures};
use crate::alloc::spec::AllocSpec;
use crate::engine::{
    CapacitySearch, Observe, Outcome, Prepared, RunOptions, Status, smallest_capacity,
};
use crate::trace::{Op, Trace, fingerprint};

/// The moment that made a figure what it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Index of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_index: Option<u64>,
    /// The phase then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// What the event asks for in bytes, if it asks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested_bytes: Option<u64>,
    /// One line for people where there is more to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Place {
    fn at(trace: &Trace, event_index: u64, message: Option<String>) -> Place {
        let block = match trace.events.get(event_index as usize).map(|event| event.op) {
            Some(Op::Alloc(block) | Op::Attempt(block)) => trace.blocks.get(block.index()),
            _ => None,
        };
        Place {
            event_index: Some(event_index),
            phase: trace.phase_at(event_index).map(str::to_owned),
            requested_bytes: block.map(|block| block.size_bytes),
            message,
        }
    }

    fn of_refusal(trace: &Trace, outcome: &Outcome) -> Option<Place> {
        let event = outcome.event_index.filter(|_| outcome.status == Status::Oom)?;
        Some(Place::at(trace, event, outcome.message.clone()))
    }
}

/// The figures of an entry as they are now.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// What the trace asks for: `xxh3:` and 16 digits.
    pub fingerprint: String,
    /// The figures.
    pub figures: Figures,
    /// Where the reserved peak was first reached.
    pub reserved_peak: Place,
    /// The first refusal, if there was one.
    pub refusal: Option<Place>,
    /// Why no capacity is enough, if none is.
    pub no_capacity: Option<Place>,
}

impl Measured {
    /// The entry with the figures of now.
    pub fn recorded_in(&self, entry: &Entry) -> Entry {
        Entry {
            trace_fingerprint: self.fingerprint.clone(),
            figures: self.figures,
            ..entry.clone()
        }
    }
}

/// Replays a trace on the device that the options ask for and, if asked to, looks for the smallest
/// one.
///
/// # Errors
/// If the replay cannot be done, or ends where the real allocator would not have survived.
pub fn measure(
    trace: &Trace,
    spec: &AllocSpec,
    options: &RunOptions,
    with_capacity: bool,
) -> Result<Measured, CheckError> {
    let prepared = Prepared::new(trace, options);
    let result = prepared.run(spec, None, Observe::default())?.result;
    if result.outcome.status == Status::Failed {
        let message = result.outcome.message.unwrap_or_else(|| "the replay failed".to_owned());
        return Err(CheckError::Failed(message));
    }
    let search = || smallest_capacity(&prepared, spec, CapacitySearch::default());
    let smallest = with_capacity.then(search).transpose()?.unwrap_or_default();
    let completed = result.outcome.status == Status::Ok;
    let figures = Figures {
        status: result.outcome.status,
        fragmentation: completed.then(|| Figures::kept(result.fragmentation)),
        reserved_bytes_peak: result.peaks.reserved_bytes_peak,
        smallest_capacity_bytes: smallest.capacity_bytes,
        alloc_retries: result.counters.get("alloc_retries").copied().unwrap_or(0),
        requested_bytes_peak: result.trace.requested_bytes_peak,
    };
    let no_capacity =
        smallest.message.map(|text| Place { message: Some(text), ..Place::default() });
    Ok(Measured {
        fingerprint: format!("xxh3:{:016x}", fingerprint(trace)),
        figures,
        reserved_peak: Place::at(trace, result.peaks.reserved_event, None),
        refusal: Place::of_refusal(trace, &result.outcome),
        no_capacity,
    })
}

/// What is refused first on a device of this size, if anything is.
///
/// # Errors
/// If the replay cannot be done.
pub fn refusal_at(
    trace: &Trace,
    spec: &AllocSpec,
    options: &RunOptions,
    capacity_bytes: NonZeroU64,
) -> Result<Option<Place>, CheckError> {
    let prepared = Prepared::new(trace, options);
    let result = prepared.run(spec, Some(capacity_bytes.get()), Observe::default())?.result;
    Ok(Place::of_refusal(trace, &result.outcome))
}
