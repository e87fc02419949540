//! `chunk` in a replay: PatrickStar's manager runs first, then what it asked for is replayed.
//!
//! The manager needs to know how much memory the program's other tensors take, which an allocator's
//! rounding decides. So it runs against a live allocator, and leaves a trace of requests behind:
//!
//! ```text
//!   trace ──> chunk::run ──asks──> inner allocator on a simulated device
//!                  │
//!                  ├──> figures (summary)
//!                  └──> derived trace ──> the one replay loop, with the same inner allocator ──> result
//! ```
//!
//! The one design decision: the second pass. It costs a replay, and in return splits, decisions,
//! time lines, steps and the paranoid checker work on chunks as on anything else.

use super::prepared::{DeviceSize, Prepared};
use super::replay::{Observe, Observed, RunError, Watched, When, live, moments_on, run_on, watch};
use super::result::{Outcome, Status};
use crate::alloc::planned;
use crate::alloc::spec::{AllocSpec, Params};
use crate::chunk::layout::{MI, smallest_chunk_elements};
use crate::chunk::search::{Machine, fine_grid, search, tightest};
use crate::chunk::{self, ChunkConfig, ChunkRun, ChunkSize, ChunkSummary, LinkCosts, Traffic};
use crate::metrics::{Moment, Sink};
use crate::trace::{Direction, Model, Op, Trace};

/// What the program itself moves between host and device; nothing if it moves nothing.
pub(super) fn traffic_of_program(trace: &Trace) -> Option<Traffic> {
    // Most traces tell of no transfer.
    if trace.transfers.is_empty() {
        return None;
    }
    let mut sum = Traffic::default();
    for event in &trace.events {
        let Op::Transfer(id) = event.op else { continue };
        let transfer = &trace.transfers[id.index()];
        let to = match transfer.direction {
            Direction::HostToDevice => chunk::Device::Gpu,
            Direction::DeviceToHost => chunk::Device::Host,
        };
        sum.add(to, transfer.size_bytes);
    }
    (sum != Traffic::default()).then_some(sum)
}

/// What chunks, ADAM and the program moved together.
fn traffic_of(summary: &ChunkSummary) -> Traffic {
    let mut sum = Traffic::default();
    for traffic in [summary.moves, summary.adam_copies, summary.transfers] {
        sum.join(traffic);
    }
    sum
}

/// A trace after the manager.
struct Managed {
    run: ChunkRun,
    inner: AllocSpec,
    params: Vec<(String, String)>,
}

/// Takes a trace through the manager, its requests through the inner allocator.
fn manage(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
) -> Result<Managed, RunError> {
    let trace = prepared.trace();
    let model = trace.header.model.as_ref();
    let options = model.map(|model| model.options.clone()).unwrap_or_default();
    let mut config = ChunkConfig::build(Params::new(spec), &options)?;
    if config.gpu_bytes.is_none() {
        config.gpu_bytes = match size {
            DeviceSize::Bytes(bytes) => Some(bytes),
            DeviceSize::OfTrace | DeviceSize::Card { .. } => size.capacity_and_total_bytes(trace).0,
            DeviceSize::Unlimited => DeviceSize::OfTrace.capacity_and_total_bytes(trace).0,
        };
    }
    if let (ChunkSize::Auto, Some(model)) = (config.chunk_size, model) {
        let rows = search(&model.units, fine_grid(&model.units), &machine(&config, model));
        let least = smallest_chunk_elements(&model.units).next_multiple_of(MI);
        let elements = tightest(&rows).map_or(least, |best| best.chunk_elements);
        config.chunk_size = ChunkSize::Elements(elements);
    }
    let inner = AllocSpec::nested(&config.inner)?;
    // A plan needs to know the program's requests, which the manager makes up as it goes.
    if [chunk::NAME, planned::NAME].contains(&inner.name.as_str()) {
        let name = &inner.name;
        let message =
            format!("inner={name}: expected an allocator without a plan, as caching or stitch");
        return Err(Params::new(spec).value_error(message).into());
    }
    let costs = link_costs(prepared, &config)?;
    let mut run = live(prepared, &inner, size, |gpu| chunk::run(trace, &config, &costs, gpu))??;
    // The device of the second pass fails as that of the first did.
    run.trace.header.faults = trace.header.faults.clone();
    Ok(Managed { run, inner, params: config.params() })
}

/// What the search for a chunk size wants to know of a machine.
fn machine(config: &ChunkConfig, model: &Model) -> Machine {
    Machine {
        gpu_bytes: config.gpu_bytes.unwrap_or(0),
        host_bytes: config.host_bytes,
        ranks: model.ranks,
        local_ranks: model.local_ranks,
        gpu_ratio: config.overall_gpu_mem_ratio.value(),
        host_ratio: config.overall_cpu_mem_ratio.value(),
        warmup_ratio: config.warmup_gpu_chunk_mem_ratio.value(),
        memory_saving: config.with_mem_saving_comm,
        working_bytes: 0,
        host_working_bytes: 0,
    }
}

/// Costs of moves: measured where the profile is of the machine that was measured, else assumed;
/// rates that are told replace either.
fn link_costs(prepared: &Prepared<'_>, config: &ChunkConfig) -> Result<LinkCosts, RunError> {
    let mut costs = match prepared.options().profile.name.as_str() {
        "h200" => LinkCosts::shipped("link-h200")?,
        _ => LinkCosts::default(),
    };
    if let Some(bytes_per_s) = config.link_bandwidth {
        costs.set_link(bytes_per_s as f64);
    }
    if let Some(bytes_per_s) = config.peer_bandwidth {
        costs.collective_bytes_per_s = bytes_per_s as f64;
    }
    Ok(costs)
}

/// [`run_on`](super::replay::run_on) for `chunk`.
pub(super) fn run(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    observe: Observe,
) -> Result<Observed, RunError> {
    run_managed(prepared, spec, size, |derived, inner| run_on(derived, inner, size, observe))
}

/// Runs the manager on a simulated device of this size, and what it asked for through `run_inner` with
/// the inner allocator.
pub(super) fn run_managed(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    run_inner: impl FnOnce(&Prepared<'_>, &AllocSpec) -> Result<Observed, RunError>,
) -> Result<Observed, RunError> {
    let Managed { run, inner, params } = manage(prepared, spec, size)?;
    let ChunkRun { trace, summary, log } = run;
    let derived = Prepared::new(&trace, prepared.options());
    let mut observed = run_inner(&derived, &inner)?;
    let result = &mut observed.result;
    result.trace = prepared.summary().clone();
    result.allocator.name = spec.to_string();
    let inner_params = std::mem::take(&mut result.allocator.params).into_iter();
    let inner_params = inner_params.map(|(key, value)| (format!("inner.{key}"), value));
    result.allocator.params = params.into_iter().chain(inner_params).collect();
    result.transfers = Some(traffic_of(&summary));
    if result.outcome.status == Status::Oom && summary.refusals == 0 {
        // The manager made room and asked again.
        result.outcome = Outcome::ok();
        result.split = None;
    }
    if let (Some(stop), Status::Ok) = (summary.hard_stop, result.outcome.status) {
        result.outcome = Outcome {
            status: Status::Oom,
            event_index: None,
            requested_bytes: Some(stop.chunk_bytes),
            largest_hole_bytes: None,
            refused_call: None,
            message: Some(stop.to_string()),
        };
    }
    result.chunk = Some(summary);
    observed.chunk_log = log;
    Ok(observed)
}

/// [`watch`](super::replay::watch) for `chunk`.
pub(super) fn watch_managed<S: Sink>(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    stop_on_oom: bool,
    sink: S,
) -> Result<(Watched, S), RunError> {
    let Managed { run, inner, .. } = manage(prepared, spec, size)?;
    let derived = Prepared::new(&run.trace, prepared.options());
    let refused = run.summary.refusals > 0;
    let (mut watched, sink) = watch(&derived, &inner, size, stop_on_oom && refused, sink)?;
    if !refused {
        (watched.refusal, watched.refusals) = (None, 0);
    }
    if let (Some(stop), None) = (run.summary.hard_stop, &watched.failure) {
        watched.failure = Some(stop.to_string());
    }
    Ok((watched, sink))
}

/// [`moments_on`] for `chunk`: moments of the inner allocator. Events and blocks are those of what the
/// manager asked for, so a moment at an event of the program is nothing here.
pub(super) fn moments(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    size: DeviceSize,
    whens: &[When],
) -> Result<Vec<Option<Moment>>, RunError> {
    let Managed { run, inner, .. } = manage(prepared, spec, size)?;
    let derived = Prepared::new(&run.trace, prepared.options());
    let is_own = |when: &When| matches!(when, When::ReservedPeak | When::FirstRefusal);
    let own: Vec<When> = whens.iter().copied().filter(is_own).collect();
    let mut moments = moments_on(&derived, &inner, size, &own)?.into_iter();
    let of = |when: &When| if is_own(when) { moments.next().flatten() } else { None };
    Ok(whens.iter().map(of).collect())
}
