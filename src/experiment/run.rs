//! Doing the cells: threads take traces from a queue, read each once and do its cells.
//!
//! The one design decision: a trace is read only if one of its cells is not kept from before, and
//! every cell is kept as soon as it is done. What a cell gives hangs on nothing but itself, so that
//! the results are the same in whatever order and on however many threads they came about; and
//! never more traces are in memory than there are threads.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Cursor, Read, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::cells::{Cell, TraceSource};
use super::description::{
    CHUNK_COLUMNS, Description, Kind, Latency, RESULT_COLUMNS, Size, SizeKind,
};
use super::error::{CellError, DescriptionError, TraceError};
use super::queue::{Spare, each_trace};
use super::rows::{ColumnKind, Rows, Value};
use super::store::{Key, KeyBuilder, Store};
use crate::alloc::planned;
use crate::alloc::spec::{AllocSpec, SpecError};
use crate::device::{CostProfile, DeviceCall, GRANULARITY_BYTES, ProfileError};
use crate::engine::{self, CapacitySearch, CompareCell, Compared, Prepared, RunError, RunOptions};
use crate::import::{ImportError, ReadOptions, input_of, read_input, read_trace, trace_name};
use crate::trace::{Limits, Trace, write_native};
use crate::workload::{generate, read_job_within, write_job};

/// Files up to this size are read in one go, hashed, and parsed from memory; larger ones are read
/// twice, so that their bytes are not held beside what they become.
const BUFFER_BYTES_MAX: u64 = 64 << 20;

/// Columns of a result, from `capacity_bytes` on.
const RESULTS: usize = RESULT_COLUMNS.len() + CHUNK_COLUMNS.len();

/// How cells are done.
#[derive(Debug)]
pub struct CellRunner<'a> {
    store: &'a Store,
    program: Key,
    options: &'a RunOptions,
    read: ReadOptions,
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

/// What became of all cells.
#[derive(Debug)]
pub struct Outcomes {
    /// One a cell, in their order; nothing where somebody asked to stop before it was done.
    pub cells: Vec<Option<CellOutcome>>,
    /// What should be known of traces, with the places of these among the traces, in order.
    pub warnings: Vec<(usize, String)>,
    /// A key of the content of each trace, by its place; nothing if it could not be read.
    pub contents: Vec<Option<Key>>,
    /// Why results could not be kept: nothing was begun after that.
    pub store_error: Option<io::Error>,
}

/// What somebody who watches is told.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// The trace of this cell is being read.
    Reads(&'a Cell),
    /// This cell is done, or was before.
    Done(&'a Cell),
}

/// What became of the cells of one trace.
#[derive(Default)]
struct TraceOutcome {
    cells: Vec<Option<CellOutcome>>,
    warnings: Vec<String>,
    content: Option<Key>,
}

/// The traces of cells, each with the places of its cells, in the order of their first cells.
pub fn by_trace(cells: &[Cell]) -> Vec<(&TraceSource, Vec<usize>)> {
    let mut places: HashMap<&TraceSource, usize> = HashMap::new();
    let mut traces: Vec<(&TraceSource, Vec<usize>)> = Vec::new();
    for (at, cell) in cells.iter().enumerate() {
        let place = *places.entry(&*cell.source).or_insert(traces.len());
        match traces.get_mut(place) {
            Some((_, cells)) => cells.push(at),
            None => traces.push((&*cell.source, vec![at])),
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
    pub fn new(
        store: &'a Store,
        program: Key,
        options: &'a RunOptions,
        read: ReadOptions,
    ) -> io::Result<Self> {
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
        // One wish for reading and replaying.
        let read = ReadOptions { stop: options.stop.clone(), ..read };
        Ok(CellRunner { store, program, options, read, named })
    }

    /// Does cells on so many threads, with at most as many traces in memory; `traces` are those of
    /// the cells, as [`by_trace`] gives them, and `watch` is told of each step from all threads.
    /// Whoever asks `options.stop` gets what is done until then.
    pub fn run(
        &self,
        cells: &[Cell],
        traces: &[(&TraceSource, Vec<usize>)],
        threads: usize,
        watch: impl Fn(Step<'_>) + Sync,
    ) -> Outcomes {
        let work = Work {
            runner: self,
            watch: &watch,
            is_halted: AtomicBool::new(false),
            store_error: Mutex::new(None),
        };
        let mut outcomes = Outcomes {
            cells: cells.iter().map(|_| None).collect(),
            warnings: Vec::new(),
            contents: vec![None; traces.len()],
            store_error: None,
        };
        let collected = Mutex::new(&mut outcomes);
        each_trace(traces.len(), threads, |at, spare| {
            let (_, places) = &traces[at];
            let of_trace: Vec<&Cell> = places.iter().map(|&place| &cells[place]).collect();
            let done = work.trace(&of_trace, spare);
            let mut all = collected.lock().unwrap_or_else(PoisonError::into_inner);
            for (&place, outcome) in places.iter().zip(done.cells) {
                all.cells[place] = outcome;
            }
            all.warnings.extend(done.warnings.into_iter().map(|warning| (at, warning)));
            all.contents[at] = done.content;
        });
        // Stable: those of one trace stay in their order.
        outcomes.warnings.sort_by_key(|(at, _)| *at);
        outcomes.store_error =
            work.store_error.into_inner().unwrap_or_else(PoisonError::into_inner);
        outcomes
    }

    /// Which cells of one trace are kept from earlier runs.
    pub fn kept(&self, cells: &[&Cell]) -> Vec<bool> {
        let content = cells.first().and_then(|cell| content(&cell.source, &self.read.limits).ok());
        let is_kept = |cell: &&Cell| {
            content.as_ref().is_some_and(|it| self.get(self.key(cell, it.key)).is_some())
        };
        cells.iter().map(is_kept).collect()
    }

    /// The values of a cell that was done before, if they are as many as now.
    fn get(&self, key: Key) -> Option<Vec<Value>> {
        self.store.get(key).filter(|values| values.len() == RESULTS)
    }

    /// Everything that the values of a cell hang on.
    fn key(&self, cell: &Cell, content: Key) -> Key {
        let mut key = KeyBuilder::default()
            .with_key(self.program)
            .with_key(content)
            .with(cell.allocator.to_string())
            .with(&cell.capacity.text)
            .with(&cell.limit.text)
            .with([u8::from(cell.searches)])
            .with(&*cell.profile)
            .with(format!("{:?} {:?}", cell.profile_steps, cell.settings));
        // Without its file a cell gives an error, which is not kept.
        for &named in planned::files(&cell.resolved).filter_map(|file| self.named.get(&file)) {
            key = key.with_key(named);
        }
        key.key()
    }

    /// The options of every kind of cell; the message if its profile is not known.
    fn options_of(
        &self,
        missing: &[usize],
        cells: &[&Cell],
        trace: &Trace,
    ) -> BTreeMap<String, Result<RunOptions, ProfileError>> {
        let mut all = BTreeMap::new();
        for &at in missing {
            let cell = cells[at];
            all.entry(options_name(cell)).or_insert_with(|| {
                let profile = CostProfile::shipped(&cell.profile)?;
                Ok(RunOptions {
                    profile,
                    limit_bytes: bytes_of(&cell.limit, trace),
                    profile_steps: cell.profile_steps,
                    settings: cell.settings.as_deref().map(str::to_owned),
                    ..self.options.clone()
                })
            });
        }
        all
    }

    /// What a cell gives; nothing if it was cut because somebody asked to stop.
    fn result(
        &self,
        cell: &Cell,
        prepared: &Prepared<'_>,
        trace: &Trace,
    ) -> Option<Result<Vec<Value>, CellOutcome>> {
        let compared = CompareCell {
            spec: AllocSpec::clone(&cell.resolved),
            capacity_bytes: bytes_of(&cell.capacity, trace),
            search: cell.searches.then(CapacitySearch::default),
        };
        let result = engine::compare(prepared, &[compared], |_| {}).into_iter().next();
        // A search that was cut may look like one that found nothing.
        if self.is_asked() && (cell.searches || !matches!(result, Some(Ok(_)))) {
            return None;
        }
        Some(match result {
            Some(Ok(compared)) => Ok(values(&compared)),
            Some(Err(error @ RunError::Spec(SpecError::NoProfile { .. }))) => {
                Err(CellOutcome { error: None, ..CellOutcome::failed("skipped", error.into()) })
            }
            Some(Err(error)) => Err(CellOutcome::failed("failed", error.into())),
            None => Err(CellOutcome::failed("failed", CellError::NoResult)),
        })
    }

    fn is_asked(&self) -> bool {
        self.options.stop.is_asked()
    }
}

/// One run: what all its threads share.
struct Work<'a, W> {
    runner: &'a CellRunner<'a>,
    watch: &'a W,
    /// Nothing new is to be begun.
    is_halted: AtomicBool,
    store_error: Mutex<Option<io::Error>>,
}

impl<W: Fn(Step<'_>) + Sync> Work<'_, W> {
    fn is_over(&self) -> bool {
        self.is_halted.load(Ordering::Relaxed) || self.runner.is_asked()
    }

    /// Does cells of one trace.
    fn trace(&self, cells: &[&Cell], spare: &Spare) -> TraceOutcome {
        let mut outcome =
            TraceOutcome { cells: cells.iter().map(|_| None).collect(), ..Default::default() };
        let Some(first) = cells.first().filter(|_| !self.is_over()) else { return outcome };
        (self.watch)(Step::Reads(first));
        if let Err(error) = self.fill(cells, spare, &mut outcome) {
            // What was not read to its end because somebody asked to stop is no error.
            if !self.runner.is_asked() {
                self.refuse(cells, error, &mut outcome);
            }
        }
        outcome
    }

    fn fill(
        &self,
        cells: &[&Cell],
        spare: &Spare,
        outcome: &mut TraceOutcome,
    ) -> Result<(), TraceError> {
        let runner = self.runner;
        let Some(first) = cells.first() else { return Ok(()) };
        let content = content(&first.source, &self.runner.read.limits)?;
        outcome.content = Some(content.key);
        let keys: Vec<Key> = cells.iter().map(|cell| runner.key(cell, content.key)).collect();
        let mut missing = Vec::new();
        for (at, cell) in cells.iter().enumerate() {
            match runner.get(keys[at]) {
                Some(values) => {
                    outcome.cells[at] = Some(CellOutcome { values, error: None, is_kept: true });
                    (self.watch)(Step::Done(cell));
                }
                None => missing.push(at),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let (trace, warnings) = content.trace(&runner.read)?;
        outcome.warnings = warnings;
        let options = runner.options_of(&missing, cells, &trace);
        let prepared: BTreeMap<&String, Result<Prepared<'_>, &ProfileError>> = options
            .iter()
            .map(|(name, options)| (name, options.as_ref().map(|it| Prepared::new(&trace, it))))
            .collect();
        let fresh: Vec<Mutex<Option<CellOutcome>>> =
            missing.iter().map(|_| Mutex::default()).collect();
        spare.each_cell(missing.len(), |place| {
            let at = missing[place];
            let done = match &prepared[&options_name(cells[at])] {
                Ok(prepared) => self.cell(cells[at], keys[at], prepared, &trace),
                Err(error) => {
                    Some(CellOutcome::failed("failed", CellError::Profile(error.to_string())))
                }
            };
            if done.is_some() {
                (self.watch)(Step::Done(cells[at]));
            }
            *fresh[place].lock().unwrap_or_else(PoisonError::into_inner) = done;
        });
        for (at, done) in missing.into_iter().zip(fresh) {
            outcome.cells[at] = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Does a cell and keeps what it gives.
    fn cell(
        &self,
        cell: &Cell,
        key: Key,
        prepared: &Prepared<'_>,
        trace: &Trace,
    ) -> Option<CellOutcome> {
        if self.is_over() {
            return None;
        }
        let values = match self.runner.result(cell, prepared, trace)? {
            Ok(values) => values,
            Err(failed) => return Some(failed),
        };
        if let Err(error) = self.runner.store.keep(key, &values) {
            self.is_halted.store(true, Ordering::Relaxed);
            let mut first = self.store_error.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        }
        Some(CellOutcome { values, error: None, is_kept: false })
    }

    /// All cells of a trace that cannot be had.
    fn refuse(&self, cells: &[&Cell], error: TraceError, outcome: &mut TraceOutcome) {
        let error = Arc::new(error);
        for (cell, outcome) in cells.iter().zip(&mut outcome.cells) {
            *outcome = Some(CellOutcome::failed("failed", Arc::clone(&error).into()));
            (self.watch)(Step::Done(cell));
        }
    }
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
    made_of: MadeOf,
}

enum MadeOf {
    Job(Box<crate::workload::Job>),
    /// The file as it lies on disk.
    Bytes(Vec<u8>),
    /// A file too large to be held beside what it becomes.
    LargeFile,
}

fn content<'a>(source: &'a TraceSource, limits: &Limits) -> Result<Content<'a>, TraceError> {
    let path = source.path();
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    match source {
        TraceSource::File(path) => {
            let (mut key, bytes) = file_content(path).map_err(io)?;
            // What lies beside a snapshot tells what it lacks.
            if let Some(truth) = truth_beside(path)? {
                key = key.with(truth);
            }
            let made_of = bytes.map_or(MadeOf::LargeFile, MadeOf::Bytes);
            Ok(Content { source, key: key.key(), made_of })
        }
        TraceSource::Job(path, beside) => {
            let bytes = std::fs::read(path).map_err(io)?;
            let text = String::from_utf8_lossy(&bytes);
            let job = read_job_within(&text, beside, limits);
            let job = job.map_err(|source| TraceError::Job { path: path.clone(), source })?;
            let key = KeyBuilder::default().with(write_job(&job)).key();
            Ok(Content { source, key, made_of: MadeOf::Job(Box::new(job)) })
        }
    }
}

/// A key of a file, and its bytes unless there are many.
fn file_content(path: &Path) -> io::Result<(KeyBuilder, Option<Vec<u8>>)> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() <= BUFFER_BYTES_MAX {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        return Ok((KeyBuilder::default().with(&bytes), Some(bytes)));
    }
    let mut key = KeyBuilder::default();
    let mut piece = Vec::new();
    // Pieces of one size: where a piece ends counts.
    while Read::by_ref(&mut file).take(1 << 20).read_to_end(&mut piece)? > 0 {
        key = key.with(&piece);
        piece.clear();
    }
    Ok((key, None))
}

/// `NAME.truth.json` beside `NAME.pickle.gz`, if there is one.
fn truth_beside(path: &Path) -> Result<Option<Vec<u8>>, TraceError> {
    let Some(name) = trace_name(path) else { return Ok(None) };
    let path = path.with_file_name(format!("{name}.truth.json"));
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        // Whoever reads the trace says what is wrong with it.
        return Ok(None);
    }
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TraceError::Io { path, source }),
    }
}

impl Content<'_> {
    /// The trace, and what should be known of it.
    fn trace(self, read: &ReadOptions) -> Result<(Trace, Vec<String>), TraceError> {
        let path = self.source.path();
        let imported = match self.made_of {
            MadeOf::Job(job) => {
                let trace = generate(&job)
                    .map_err(|source| TraceError::Generate { path: path.to_owned(), source })?;
                return Ok((trace, Vec::new()));
            }
            MadeOf::Bytes(bytes) => {
                let input = input_of(path, Box::new(Cursor::new(bytes)), read);
                read_input(path, input.map_err(ImportError::from)?, read)?
            }
            MadeOf::LargeFile => read_trace(path, read)?,
        };
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
pub fn rows(description: &Description, cells: &[&Cell], outcomes: Vec<CellOutcome>) -> Rows {
    let columns = description.columns();
    let mut rows = Vec::with_capacity(cells.len());
    for (cell, outcome) in cells.iter().zip(outcomes) {
        let mut row = cell.names(description);
        row.extend(outcome.values);
        row.truncate(columns.len());
        row.shrink_to_fit();
        rows.push(row);
    }
    let mut rows = Rows { columns, rows };
    add_waste_removed(&mut rows, cells);
    rows
}

/// Where waste is compared: trace, capacity, limit, costs, settings.
type WastePlace<'a> = (&'a TraceSource, [&'a str; 3], Option<&'a str>);

fn waste_place(cell: &Cell) -> WastePlace<'_> {
    let texts = [&*cell.capacity.text, &*cell.limit.text, &*cell.profile];
    (&*cell.source, texts, cell.settings.as_deref())
}

/// 1 − excess / excess of plain `caching` on the same trace, device and limit with the same
/// settings and costs, in whatever block, where both met every request.
fn add_waste_removed(rows: &mut Rows, cells: &[&Cell]) {
    let columns = ["status", "excess_bytes", "waste_removed"].map(|name| rows.column(name));
    let [Some(status), Some(excess), Some(waste)] = columns else { return };
    let ok = Value::of_word("ok");
    let is_ok = |row: &[Value]| row[status] == ok;
    let mut measures: HashMap<WastePlace<'_>, f64> = HashMap::new();
    for (row, cell) in rows.rows.iter().zip(cells) {
        let is_caching = cell.allocator.name == "caching" && cell.allocator.params.is_empty();
        let measure = row[excess].number().filter(|it| is_caching && is_ok(row) && *it > 0.0);
        if let Some(measure) = measure {
            measures.entry(waste_place(cell)).or_insert(measure);
        }
    }
    for (row, cell) in rows.rows.iter_mut().zip(cells).filter(|(row, _)| is_ok(row)) {
        let measure = measures.get(&waste_place(cell)).copied();
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
