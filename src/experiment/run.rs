//! Doing the cells: one trace after the other is read, its cells run in parallel.
//!
//! The one design decision: a trace is read only if one of its cells is not kept from before, and
//! every cell is kept as soon as it is done. What a cell gives hangs on nothing but itself, so that
//! the results are the same in whatever order and on however many threads they came about.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::cells::{Cell, TraceSource};
use super::description::{
    CHUNK_COLUMNS, Description, Kind, Latency, RESULT_COLUMNS, Size, SizeKind,
};
use super::error::{CellError, DescriptionError, TraceError};
use super::rows::{ColumnKind, Rows, Value};
use super::store::{Key, KeyBuilder, Store};
use crate::alloc::planned;
use crate::alloc::spec::SpecError;
use crate::device::{CostProfile, DeviceCall, GRANULARITY_BYTES};
use crate::engine::{self, CapacitySearch, CompareCell, Compared, Prepared, RunError, RunOptions};
use crate::import::{ReadOptions, read_trace, trace_name};
use crate::trace::{Trace, write_native};
use crate::workload::{generate, read_job, write_job};

/// Columns of a result, from `capacity_bytes` on.
const RESULTS: usize = RESULT_COLUMNS.len() + CHUNK_COLUMNS.len();

/// How cells are done.
#[derive(Debug)]
pub struct CellRunner<'a> {
    store: &'a Store,
    program: &'a str,
    options: &'a RunOptions,
    /// A key of each profile and plan in the options: of all that was read, not of where it lies.
    named: BTreeMap<(&'static str, &'a str), Key>,
}

/// What became of a cell.
#[derive(Debug)]
pub struct CellOutcome {
    /// Its values, from `capacity_bytes` on.
    pub values: Vec<Value>,
    /// Why it could not be done.
    pub error: Option<CellError>,
    /// It was kept from an earlier run.
    pub is_kept: bool,
}

impl CellOutcome {
    fn failed(status: &str, error: CellError) -> CellOutcome {
        let message = error.to_string();
        let mut values = vec![Value::None; RESULTS];
        let mut put = |name: &str, text: &str| {
            let column = RESULT_COLUMNS.iter().position(|(column, _)| *column == name);
            if let Some(column) = column {
                values[column] = Value::of_word(text);
            }
        };
        put("status", status);
        put("message", &message);
        CellOutcome { values, error: Some(error), is_kept: false }
    }
}

/// What became of the cells of one trace.
#[derive(Debug, Default)]
pub struct TraceOutcome {
    /// One a cell, in their order.
    pub cells: Vec<CellOutcome>,
    /// What should be known of the trace; nothing if it was not read.
    pub warnings: Vec<String>,
}

/// The traces of cells, each with the places of its cells, in the order of their first cells.
pub fn by_trace(cells: &[Cell]) -> Vec<(&TraceSource, Vec<usize>)> {
    let mut places: BTreeMap<&TraceSource, usize> = BTreeMap::new();
    let mut traces: Vec<(&TraceSource, Vec<usize>)> = Vec::new();
    for (at, cell) in cells.iter().enumerate() {
        let place = *places.entry(&cell.source).or_insert(traces.len());
        match traces.get_mut(place) {
            Some((_, cells)) => cells.push(at),
            None => traces.push((&cell.source, vec![at])),
        }
    }
    traces
}

impl<'a> CellRunner<'a> {
    /// A runner with the results of earlier runs. `program` identifies the program: results of
    /// another one are not taken up. The options hold for every cell and have the files that
    /// allocators name.
    ///
    /// # Errors
    /// If a profile cannot be written into a key.
    pub fn new(store: &'a Store, program: &'a str, options: &'a RunOptions) -> io::Result<Self> {
        let mut named = BTreeMap::new();
        for (name, trace) in &options.profiles {
            let mut key = KeyBuilder::default();
            write_native(trace, &mut key)?;
            named.insert(("trace", name.as_str()), key.key());
        }
        for (name, plan) in &options.plans {
            let mut key = KeyBuilder::default();
            write!(key, "{:?} {:?} {:?}", plan.plan, plan.cross, plan.intra)?;
            named.insert(("plan", name.as_str()), key.key());
        }
        Ok(CellRunner { store, program, options, named })
    }

    /// Does cells of one trace; `done` is called after each.
    pub fn run(&self, cells: &[&Cell], done: impl Fn(&Cell) + Sync) -> TraceOutcome {
        let Some(first) = cells.first() else { return TraceOutcome::default() };
        let content = match content(&first.source) {
            Ok(content) => content,
            Err(error) => return refused(cells, error, &done),
        };
        let keys: Vec<Key> = cells.iter().map(|cell| self.key(cell, &content.key)).collect();
        let mut outcomes: Vec<Option<CellOutcome>> = Vec::new();
        for (cell, key) in cells.iter().zip(&keys) {
            let kept = self.get(key);
            outcomes.push(kept.map(|values| {
                done(cell);
                CellOutcome { values: values.to_vec(), error: None, is_kept: true }
            }));
        }
        if outcomes.iter().all(Option::is_some) {
            let cells = outcomes.into_iter().flatten().collect();
            return TraceOutcome { cells, warnings: Vec::new() };
        }
        let (trace, warnings) = match content.trace() {
            Ok(read) => read,
            Err(error) => return refused(cells, error, &done),
        };
        let missing: Vec<usize> =
            outcomes.iter().enumerate().filter(|(_, it)| it.is_none()).map(|(at, _)| at).collect();
        let options = self.options_of(&missing, cells, &trace);
        let prepared: BTreeMap<&String, Result<Prepared<'_>, &str>> = options
            .iter()
            .map(|(name, options)| match options {
                Ok(options) => (name, Ok(Prepared::new(&trace, options))),
                Err(message) => (name, Err(message.as_str())),
            })
            .collect();
        let fresh: Vec<CellOutcome> = missing
            .par_iter()
            .map(|&at| {
                let outcome = match &prepared[&options_name(cells[at])] {
                    Ok(prepared) => self.run_cell(cells[at], &keys[at], prepared, &trace),
                    Err(_) => unknown_profile(cells[at]),
                };
                done(cells[at]);
                outcome
            })
            .collect();
        for (at, outcome) in missing.into_iter().zip(fresh) {
            outcomes[at] = Some(outcome);
        }
        TraceOutcome { cells: outcomes.into_iter().flatten().collect(), warnings }
    }

    /// Which cells of one trace are kept from earlier runs.
    pub fn kept(&self, cells: &[&Cell]) -> Vec<bool> {
        let content = cells.first().and_then(|cell| content(&cell.source).ok());
        let is_kept = |cell: &&Cell| {
            content.as_ref().is_some_and(|it| self.get(&self.key(cell, &it.key)).is_some())
        };
        cells.iter().map(is_kept).collect()
    }

    /// The values of a cell that was done before, if they are as many as now.
    fn get(&self, key: &Key) -> Option<&[Value]> {
        self.store.get(key).filter(|values| values.len() == RESULTS)
    }

    /// Everything that the values of a cell hang on.
    fn key(&self, cell: &Cell, content: &Key) -> Key {
        let mut key = KeyBuilder::default()
            .with(self.program)
            .with(content)
            .with(cell.allocator.to_string())
            .with(&cell.capacity.text)
            .with(&cell.limit.text)
            .with([u8::from(cell.searches)])
            .with(&cell.profile)
            .with(format!("{:?} {:?}", cell.profile_steps, cell.settings));
        // Without its file a cell gives an error, which is not kept.
        for named in planned::files(&cell.resolved).filter_map(|file| self.named.get(&file)) {
            key = key.with(named);
        }
        key.key()
    }

    /// The options of every kind of cell; the message if its profile is not known.
    fn options_of(
        &self,
        missing: &[usize],
        cells: &[&Cell],
        trace: &Trace,
    ) -> BTreeMap<String, Result<RunOptions, String>> {
        let mut all = BTreeMap::new();
        for &at in missing {
            let cell = cells[at];
            all.entry(options_name(cell)).or_insert_with(|| {
                let profile = CostProfile::shipped(&cell.profile).map_err(|e| e.to_string())?;
                Ok(RunOptions {
                    profile,
                    limit_bytes: bytes_of(&cell.limit, trace),
                    profile_steps: cell.profile_steps,
                    settings: cell.settings.clone(),
                    ..self.options.clone()
                })
            });
        }
        all
    }

    fn run_cell(
        &self,
        cell: &Cell,
        key: &Key,
        prepared: &Prepared<'_>,
        trace: &Trace,
    ) -> CellOutcome {
        let compared = CompareCell {
            spec: cell.resolved.clone(),
            capacity_bytes: bytes_of(&cell.capacity, trace),
            search: cell.searches.then(CapacitySearch::default),
        };
        let result = engine::compare(prepared, &[compared], |_| {}).into_iter().next();
        match result {
            Some(Ok(compared)) => {
                let values = values(&compared);
                let kept = self.store.keep(key, &values);
                CellOutcome { values, error: kept.err().map(CellError::Store), is_kept: false }
            }
            Some(Err(error @ RunError::Spec(SpecError::NoProfile { .. }))) => {
                CellOutcome { error: None, ..CellOutcome::failed("skipped", error.into()) }
            }
            Some(Err(error)) => CellOutcome::failed("failed", error.into()),
            None => unknown_profile(cell),
        }
    }
}

fn unknown_profile(cell: &Cell) -> CellOutcome {
    let unknown = CostProfile::shipped(&cell.profile).err();
    let error = unknown.map_or_else(
        || CellError::Store(std::io::Error::other("the cell gave no result")),
        CellError::Profile,
    );
    CellOutcome::failed("failed", error)
}

/// All cells of a trace that cannot be had.
fn refused(cells: &[&Cell], error: TraceError, done: &(impl Fn(&Cell) + Sync)) -> TraceOutcome {
    let error = Arc::new(error);
    let refuse = |cell: &&Cell| {
        done(cell);
        CellOutcome::failed("failed", Arc::clone(&error).into())
    };
    TraceOutcome { cells: cells.iter().map(refuse).collect(), warnings: Vec::new() }
}

/// Cells of one name share a prepared trace.
fn options_name(cell: &Cell) -> String {
    format!("{} {} {:?} {:?}", cell.limit.text, cell.profile, cell.profile_steps, cell.settings)
}

/// Bytes of a device or limit; nothing for those of the trace.
fn bytes_of(size: &Size, trace: &Trace) -> Option<u64> {
    match size.kind {
        SizeKind::OfTrace => None,
        SizeKind::Bytes(bytes) => Some(bytes),
        SizeKind::OfPeak(factor) => {
            let units = trace.requested_bytes_peak() as f64 * factor / GRANULARITY_BYTES as f64;
            Some((units.ceil().max(1.0) as u64).saturating_mul(GRANULARITY_BYTES))
        }
    }
}

/// What a trace is made of, with a key of all of it.
struct Content<'a> {
    source: &'a TraceSource,
    key: Key,
    job: Option<crate::workload::Job>,
}

fn content(source: &TraceSource) -> Result<Content<'_>, TraceError> {
    let path = source.path();
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(io)?;
    let key = KeyBuilder::default();
    match source {
        TraceSource::File(path) => {
            // What lies beside a snapshot tells what it lacks.
            let mut key = key.with(bytes);
            if let Some(truth) = truth_beside(path)? {
                key = key.with(truth);
            }
            Ok(Content { source, key: key.key(), job: None })
        }
        TraceSource::Job(path, beside) => {
            let text = String::from_utf8_lossy(&bytes);
            let job = read_job(&text, beside);
            let job = job.map_err(|source| TraceError::Job { path: path.clone(), source })?;
            Ok(Content { source, key: key.with(write_job(&job)).key(), job: Some(job) })
        }
    }
}

/// `NAME.truth.json` beside `NAME.pickle.gz`, if there is one.
fn truth_beside(path: &Path) -> Result<Option<Vec<u8>>, TraceError> {
    let Some(name) = trace_name(path) else { return Ok(None) };
    let path = path.with_file_name(format!("{name}.truth.json"));
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TraceError::Io { path, source }),
    }
}

impl Content<'_> {
    /// The trace, and what should be known of it.
    fn trace(&self) -> Result<(Trace, Vec<String>), TraceError> {
        let path = self.source.path();
        if let Some(job) = &self.job {
            let trace = generate(job)
                .map_err(|source| TraceError::Generate { path: path.to_owned(), source })?;
            return Ok((trace, Vec::new()));
        }
        let imported = read_trace(path, &ReadOptions::default())?;
        Ok((imported.trace, imported.warnings))
    }
}

/// The values of a result, in the order of its columns.
fn values(row: &Compared) -> Vec<Value> {
    let result = &row.result;
    let smallest = row.smallest_capacity.as_ref();
    let peaks = &result.peaks;
    let message = result.outcome.message.as_deref();
    let message = message.or_else(|| smallest.and_then(|it| it.message.as_deref()));
    let mut values = vec![
        Value::of_number(result.device.capacity_bytes),
        Value::of_number(result.allocator.limit_bytes),
        Value::of_word(result.outcome.status.name()),
        Value::Number(peaks.requested_bytes_peak),
        Value::Number(peaks.allocated_bytes_peak),
        Value::Number(peaks.active_bytes_peak),
        Value::Number(peaks.reserved_bytes_peak),
        Value::Difference(result.excess_bytes),
        Value::Fraction(result.efficiency),
        Value::Fraction(result.fragmentation),
        Value::Fraction(result.utilization),
        Value::Fraction(result.active_utilization),
        // What shows only beside other cells is put in when all are there.
        Value::None,
        Value::Number(result.calls.total()),
        Value::Number(result.time.allocator_device_ns),
        Value::of_fraction(row.time_share()),
        Value::of_number(result.counters.get("alloc_retries").copied()),
        Value::of_number(smallest.and_then(|it| it.capacity_bytes)),
        Value::of_number(smallest.and_then(|it| it.over_requested_bytes)),
        Value::of_fraction(smallest.and_then(|it| it.over_requested)),
        message.map_or(Value::None, Value::of_word),
    ];
    values.extend(chunk_values(row));
    values
}

fn chunk_values(row: &Compared) -> Vec<Value> {
    let Some(chunk) = &row.result.chunk else { return vec![Value::None; CHUNK_COLUMNS.len()] };
    let last = chunk.steps.last();
    let of_last =
        |number: &dyn Fn(&crate::chunk::StepSummary) -> u64| Value::of_number(last.map(number));
    let traffic = |step: &crate::chunk::StepSummary| {
        let mut all = step.forward;
        let others = [step.backward, step.adam, step.gradient_reads];
        for other in others.into_iter().chain([step.write_backs, step.transfers]) {
            all.join(other);
        }
        all
    };
    let collected = |step: &crate::chunk::StepSummary| {
        let all = &step.collectives;
        let parts = [all.all_gather_bytes, all.reduce_scatter_bytes, all.broadcast_bytes];
        parts.iter().sum::<u64>() + all.reduce_bytes + all.host_all_reduce_bytes
    };
    vec![
        Value::Number(chunk.gpu_chunk_bytes_peak),
        Value::Number(chunk.host_bytes_peak),
        Value::Number(chunk.construction_host_bytes_peak),
        of_last(&|step| traffic(step).h2d_bytes),
        of_last(&|step| traffic(step).d2h_bytes),
        of_last(&collected),
        of_last(&|step| step.times.step_ns),
    ]
}

/// The results table of cells and what became of them, in the order of the cells.
pub fn rows(description: &Description, cells: &[Cell], outcomes: &[CellOutcome]) -> Rows {
    let columns = description.columns();
    let mut rows = Vec::new();
    for (cell, outcome) in cells.iter().zip(outcomes) {
        let mut row = cell.names(description);
        row.extend(outcome.values.iter().cloned());
        row.truncate(columns.len());
        rows.push(row);
    }
    let mut rows = Rows { columns, rows };
    add_waste_removed(&mut rows, cells);
    rows
}

/// 1 − excess / excess of plain `caching` on the same trace, device and limit with the same
/// settings and costs, in whatever block, where both met every request.
fn add_waste_removed(rows: &mut Rows, cells: &[Cell]) {
    let columns = ["status", "excess_bytes", "waste_removed"].map(|name| rows.column(name));
    let [Some(status), Some(excess), Some(waste)] = columns else { return };
    let ok = Value::of_word("ok");
    let is_ok = |row: &[Value]| row[status] == ok;
    let place = |cell: &Cell| {
        let Cell { source, capacity, limit, profile, settings, .. } = cell;
        (source.clone(), [&capacity.text, &limit.text, profile].map(Clone::clone), settings.clone())
    };
    let mut measures = BTreeMap::new();
    for (row, cell) in rows.rows.iter().zip(cells) {
        let is_caching = cell.allocator.name == "caching" && cell.allocator.params.is_empty();
        let measure = row[excess].number().filter(|it| is_caching && is_ok(row) && *it > 0.0);
        if let Some(measure) = measure {
            measures.entry(place(cell)).or_insert(measure);
        }
    }
    for (row, cell) in rows.rows.iter_mut().zip(cells).filter(|(row, _)| is_ok(row)) {
        let measure = measures.get(&place(cell));
        let share = measure.zip(row[excess].number()).map(|(of, own)| 1.0 - own / of);
        row[waste] = Value::of_fraction(share);
    }
}

/// The results table of device latencies: a row a profile, call and size.
///
/// # Errors
/// If a profile does not ship.
pub fn latency_rows(description: &Description) -> Result<Rows, DescriptionError> {
    let mut rows = Rows { columns: description.columns(), rows: Vec::new() };
    let Kind::DeviceLatency(latency) = &description.kind else { return Ok(rows) };
    for name in &latency.profiles {
        let profile = CostProfile::shipped(name).map_err(|error| {
            DescriptionError::at(&description.source, latency.at, error.to_string())
        })?;
        for call in DeviceCall::ALL {
            for &size in &latency.sizes_bytes {
                rows.rows.push(latency_row(&profile, call.name(), size, latency, &[call]));
            }
        }
        // A piece of a stitched block: made, mapped, opened.
        let piece = [DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess];
        for &size in &latency.sizes_bytes {
            rows.rows.push(latency_row(
                &profile,
                "create + map + set_access",
                size,
                latency,
                &piece,
            ));
        }
    }
    Ok(rows)
}

fn latency_row(
    profile: &CostProfile,
    name: &str,
    size_bytes: u64,
    latency: &Latency,
    calls: &[DeviceCall],
) -> Vec<Value> {
    let cost_ns: f64 = calls.iter().map(|&call| profile.cost_ns(call, size_bytes)).sum();
    let pieces = latency.total_bytes.map(|total| total.div_ceil(size_bytes));
    vec![
        Value::of_word(&profile.name),
        Value::of_word(&profile.gpu),
        Value::of_word(if profile.derived { "derived" } else { "measured" }),
        Value::of_word(name),
        Value::Number(size_bytes),
        Value::Fraction(cost_ns),
        Value::of_fraction(pieces.map(|pieces| pieces as f64 * cost_ns)),
    ]
}

/// Columns that conditions of `--only` may name: those that are known before a cell is run.
pub fn name_columns(description: &Description) -> BTreeSet<String> {
    let results = RESULT_COLUMNS.map(|(name, _)| name);
    let chunks = CHUNK_COLUMNS.map(|(name, _)| name);
    let columns = description.columns().into_iter();
    let columns = columns.filter(|column| column.kind == ColumnKind::Word);
    let names = columns.map(|column| column.name);
    names
        .filter(|name| !results.contains(&name.as_str()) && !chunks.contains(&name.as_str()))
        .collect()
}
