//! The gate for CI: traces that must not need more memory than a committed baseline says.
//!
//! The one design decision: a check is a replay from a cold start, so that every figure is the same
//! on any machine and with any number of threads, and the tolerance is nothing unless somebody asks
//! for one. What a clock measured is no figure.
//!
//! ```text
//!   baseline.json ──> Entry ──measure──> Figures ──judge──> FigureCheck: before, after, verdict
//!                       ^                   │
//!                       └────── update ─────┘
//! ```

mod baseline;
mod judge;
mod measure;

use std::num::NonZeroU64;

use serde::Serialize;

pub use baseline::{
    BASELINE_SCHEMA_VERSION, Baseline, BaselineError, Entry, FigureName, Figures, Tolerance,
};
pub use judge::{Delta, FigureCheck, FigureValue, FigureVerdict, judge};
pub use measure::{Measured, Place, measure, refusal_at};

use crate::alloc::spec::{AllocSpec, SpecError};
use crate::engine::{RunError, RunOptions, SCHEMA_VERSION};
use crate::trace::Trace;

/// An entry could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The allocator's specification is not understood.
    #[error("allocator: {0}")]
    Spec(#[from] SpecError),
    /// The replay could not be done.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The replay ended where the real allocator would not have survived.
    #[error("{0}")]
    Failed(String),
}

/// What became of one entry of a baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EntryCheck {
    /// The trace, as the baseline names it.
    pub trace: String,
    /// The allocator, as the baseline names it.
    pub allocator: String,
    /// What else tells it from other entries of this trace and allocator, in words; empty if
    /// nothing does.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub variant: String,
    /// It was not in the baseline before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_new: bool,
    /// The trace asks for something else than it did when the figures were written.
    pub trace_changed: bool,
    /// Every figure, in the order of [`FigureName::ALL`].
    pub figures: Vec<FigureCheck>,
    /// What the figures are now.
    #[serde(skip)]
    pub measured: Measured,
}

impl EntryCheck {
    /// `ALLOCATOR`, and what else tells it from other entries of its trace in brackets.
    pub fn case(&self) -> String {
        case(&self.allocator, &self.variant)
    }

    /// Figures with this verdict.
    pub fn with(&self, verdict: FigureVerdict) -> impl Iterator<Item = &FigureCheck> {
        self.figures.iter().filter(move |figure| figure.verdict == verdict)
    }
}

/// `ALLOCATOR`, and what else tells an entry from others in brackets.
fn case(allocator: &str, variant: &str) -> String {
    if variant.is_empty() { allocator.to_owned() } else { format!("{allocator} ({variant})") }
}

/// An entry that could not be checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EntryFailure {
    /// The trace, as the baseline names it.
    pub trace: String,
    /// The allocator and what else tells the entry from others, as [`EntryCheck::case`].
    pub case: String,
    /// Why, in one line.
    pub message: String,
}

/// How a check ended, in rising weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckVerdict {
    /// Nothing regressed, or everything was written into the baseline.
    Passed,
    /// A gated figure grew by more than its tolerance.
    Regression,
    /// Some entry could not be checked.
    Failed,
}

/// The whole check: the JSON that scripts rely on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    /// Version of this layout.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// How it ended.
    pub verdict: CheckVerdict,
    /// The figures of now were written into the baseline.
    pub updated: bool,
    /// Entries that were not in it before.
    pub added: u64,
    /// Gated figures that grew by more than their tolerance.
    pub regressions: u64,
    /// Gated figures that shrank by more than it.
    pub improvements: u64,
    /// Gated figures that hold, within the tolerance.
    pub held: u64,
    /// Every entry that was checked, in the order of the baseline.
    pub entries: Vec<EntryCheck>,
    /// Entries that could not be checked, in the same order.
    pub failures: Vec<EntryFailure>,
}

impl CheckReport {
    /// Sums up. A gated figure that cannot be compared counts nowhere: the status tells why.
    pub fn new(entries: Vec<EntryCheck>, failures: Vec<EntryFailure>, updated: bool) -> Self {
        let added = entries.iter().filter(|entry| entry.is_new).count() as u64;
        let figures = || entries.iter().flat_map(|entry| &entry.figures);
        let count = |is: fn(&FigureCheck) -> bool| figures().filter(|it| is(it)).count() as u64;
        let regressions = count(|it| it.verdict == FigureVerdict::Regression);
        let verdict = match (failures.is_empty(), regressions) {
            (false, _) => CheckVerdict::Failed,
            (true, 1..) if !updated => CheckVerdict::Regression,
            _ => CheckVerdict::Passed,
        };
        CheckReport {
            schema_version: SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION"),
            verdict,
            updated,
            added,
            regressions,
            improvements: count(|it| it.verdict == FigureVerdict::Improvement),
            held: count(|it| match it.verdict {
                FigureVerdict::Tolerated => true,
                FigureVerdict::Same => it.gated,
                _ => false,
            }),
            entries,
            failures,
        }
    }
}

/// Checks one entry on its trace. `options` hold what the entry says of device, limit, settings and
/// costs. One without figures is measured only, and nothing of it moved.
///
/// # Errors
/// If the replay could not be done. That memory ran out is a figure.
pub fn check_entry(
    trace: &Trace,
    entry: &Entry,
    spec: &AllocSpec,
    tolerance: Tolerance,
    options: &RunOptions,
) -> Result<EntryCheck, CheckError> {
    let measured = measure(trace, spec, options, entry.gates(FigureName::SmallestCapacityBytes))?;
    let is_new = entry.figures == Figures::UNKNOWN;
    let known = is_new.then(|| measured.recorded_in(entry));
    let entry = known.as_ref().unwrap_or(entry);
    let mut figures = judge(entry, entry.tolerance.unwrap_or(tolerance), &measured);
    let grown = figures.iter_mut().find(|figure| {
        figure.figure == FigureName::SmallestCapacityBytes
            && figure.verdict == FigureVerdict::Regression
    });
    if let Some(figure) = grown {
        let before = entry.figures.smallest_capacity_bytes.and_then(NonZeroU64::new);
        let refused = before.map(|bytes| refusal_at(trace, spec, options, bytes)).transpose()?;
        figure.place = refused.flatten().or_else(|| figure.place.take());
    }
    Ok(EntryCheck {
        trace: entry.trace.clone(),
        allocator: entry.allocator.clone(),
        variant: entry.variant(),
        is_new,
        trace_changed: entry.trace_fingerprint != measured.fingerprint,
        figures,
        measured,
    })
}
