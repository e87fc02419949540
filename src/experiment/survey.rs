//! Many traces at a glance: what each asks for, what `caching` makes of it, and which are alike.
//!
//! The one design decision: of a trace only its facts are kept, so that ten thousand traces take no
//! more memory than those that are read at the moment. Traces that ask for the same
//! ([`fingerprint`]) are replayed once.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::rows::{Column, ColumnKind, Rows, Value};
use crate::alloc::spec::AllocSpec;
use crate::engine::{Prepared, RunError, RunOptions, Status, brief};
use crate::trace::{Trace, fingerprint, step_name};
use crate::units::signed_difference;

/// What is known of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceFacts {
    /// The path as given.
    pub file: String,
    /// Size of the file as it lies on the disk; nothing for standard input.
    pub file_bytes: Option<u64>,
    /// Name of the job.
    pub name: String,
    /// Kind of source, with version: `torch_snapshot 2.11.0`.
    pub source: String,
    /// Number of events.
    pub events: u64,
    /// Number of allocs.
    pub allocs: u64,
    /// Number of streams.
    pub streams: u64,
    /// Number of different steps that phases name.
    pub steps: u64,
    /// Time of the last event in nanoseconds.
    pub duration_ns: u64,
    /// Share of the run's allocs that the trace shows, 0 to 1.
    pub history_share: f64,
    /// Largest sum of live requests in bytes.
    pub requested_bytes_peak: u64,
    /// The most that the recorded allocator held, where the trace tells.
    pub recorded_reserved_bytes_peak: Option<u64>,
    /// What a replay gives; nothing if it could not be done.
    pub replay: Option<ReplayFacts>,
    /// What it asks for in one number: traces of the same number are alike.
    pub fingerprint: u64,
}

/// What `caching` makes of a trace, with the trace's own settings, limit and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayFacts {
    /// How it ended.
    pub status: Status,
    /// The most that was held, in bytes; of a replay that ran out of memory until its end.
    pub reserved_bytes_peak: u64,
    /// 1 − requested peak / reserved peak, of what was granted.
    pub fragmentation: f64,
}

/// Looks at traces, from any number of threads.
#[derive(Debug)]
pub struct Survey {
    spec: AllocSpec,
    options: RunOptions,
    /// What replays gave, by fingerprint.
    replays: Mutex<BTreeMap<u64, ReplayFacts>>,
}

impl Survey {
    /// A survey whose replays have these options.
    pub fn new(options: RunOptions) -> Survey {
        let spec = AllocSpec { name: "caching".to_owned(), params: Vec::new() };
        Survey { spec, options, replays: Mutex::default() }
    }

    /// The facts of a trace that was read from `file`, and why it could not be replayed.
    pub fn facts(
        &self,
        file: String,
        file_bytes: Option<u64>,
        trace: &Trace,
    ) -> (TraceFacts, Option<RunError>) {
        let prepared = Prepared::new(trace, &self.options);
        let fingerprint = fingerprint(trace);
        let (replay, error) = match self.replay(fingerprint, &prepared) {
            Ok(replay) => (Some(replay), None),
            Err(error) => (None, Some(error)),
        };
        let summary = prepared.summary();
        let mut steps: Vec<&str> =
            trace.phases.iter().filter_map(|phase| step_name(phase)).collect();
        steps.sort_unstable();
        steps.dedup();
        let facts = TraceFacts {
            file,
            file_bytes,
            name: summary.name.clone(),
            source: summary.source.clone(),
            events: summary.events,
            allocs: summary.allocs,
            streams: summary.streams,
            steps: steps.len() as u64,
            duration_ns: trace.events.last().map_or(0, |event| event.time_ns),
            history_share: summary.history_share,
            requested_bytes_peak: summary.requested_bytes_peak,
            recorded_reserved_bytes_peak: trace.recorded_reserved_bytes_peak(),
            replay,
            fingerprint,
        };
        (facts, error)
    }

    fn replay(&self, fingerprint: u64, prepared: &Prepared<'_>) -> Result<ReplayFacts, RunError> {
        // A thread that panicked while it held the map left it as it was.
        let known = self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = known.get(&fingerprint) {
            return Ok(known);
        }
        drop(known);
        let brief = brief(prepared, &self.spec, None)?;
        let replay = ReplayFacts {
            status: brief.status(),
            reserved_bytes_peak: brief.peaks.reserved_bytes_peak,
            fragmentation: brief.fragmentation(),
        };
        let mut known = self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(fingerprint, replay);
        Ok(replay)
    }
}

/// Which traces are alike: for each the number of its group, from 0 in the order of their first
/// traces; nothing for a trace like no other.
pub fn alike(facts: &[TraceFacts]) -> Vec<Option<usize>> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for facts in facts {
        *counts.entry(facts.fingerprint).or_default() += 1;
    }
    let mut groups: BTreeMap<u64, usize> = BTreeMap::new();
    let mut group = |facts: &TraceFacts| {
        let number = groups.len();
        (counts[&facts.fingerprint] > 1).then(|| *groups.entry(facts.fingerprint).or_insert(number))
    };
    facts.iter().map(&mut group).collect()
}

/// Number of traces that differ in what they ask for.
pub fn distinct(facts: &[TraceFacts]) -> usize {
    let mut numbers: Vec<u64> = facts.iter().map(|facts| facts.fingerprint).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.len()
}

/// The columns of [`survey_rows`].
const COLUMNS: [(&str, ColumnKind); 18] = [
    ("file", ColumnKind::Word),
    ("file_bytes", ColumnKind::Number),
    ("name", ColumnKind::Word),
    ("source", ColumnKind::Word),
    ("events", ColumnKind::Number),
    ("allocs", ColumnKind::Number),
    ("streams", ColumnKind::Number),
    ("steps", ColumnKind::Number),
    ("duration_ns", ColumnKind::Number),
    ("history_share", ColumnKind::Fraction),
    ("requested_bytes_peak", ColumnKind::Number),
    ("recorded_reserved_bytes_peak", ColumnKind::Number),
    ("status", ColumnKind::Word),
    ("reserved_bytes_peak", ColumnKind::Number),
    ("excess_bytes", ColumnKind::Difference),
    ("fragmentation", ColumnKind::Fraction),
    ("fingerprint", ColumnKind::Word),
    ("same_as", ColumnKind::Word),
];

/// The facts as a table, a row a trace. `same_as` is the file of the first trace that is alike,
/// empty for that one itself.
pub fn survey_rows(facts: &[TraceFacts]) -> Rows {
    let columns = COLUMNS.iter().map(|(name, kind)| Column::new(name, *kind)).collect();
    let mut first: BTreeMap<u64, &str> = BTreeMap::new();
    let mut row = |facts: &TraceFacts, file| -> Vec<Value> {
        let replay = facts.replay.as_ref();
        let reserved_bytes = replay.map(|replay| replay.reserved_bytes_peak);
        let excess =
            |bytes| Value::Difference(signed_difference(facts.requested_bytes_peak, bytes));
        let same_as = *first.entry(facts.fingerprint).or_insert(file);
        vec![
            Value::of_word(&facts.file),
            Value::of_number(facts.file_bytes),
            Value::of_word(&facts.name),
            Value::of_word(&facts.source),
            Value::Number(facts.events),
            Value::Number(facts.allocs),
            Value::Number(facts.streams),
            Value::Number(facts.steps),
            Value::Number(facts.duration_ns),
            Value::Fraction(facts.history_share),
            Value::Number(facts.requested_bytes_peak),
            Value::of_number(facts.recorded_reserved_bytes_peak),
            Value::of_word(replay.map_or(Status::Failed, |replay| replay.status).name()),
            Value::of_number(reserved_bytes),
            reserved_bytes.map_or(Value::None, excess),
            Value::of_fraction(replay.map(|replay| replay.fragmentation)),
            Value::Word(format!("{:016x}", facts.fingerprint)),
            if same_as == file { Value::None } else { Value::of_word(same_as) },
        ]
    };
    let rows = facts.iter().map(|facts| row(facts, &facts.file)).collect();
    Rows { columns, rows }
}
