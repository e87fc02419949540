//! A job becomes a trace: parameters first, then step after step.
//!
//! ```text
//!   load       parameters, a block each
//!   step0      .forward  .backward   (once for every micro-batch)
//!              .optimizer            clip, update, gradients dropped
//!   step1      ...
//! ```

use std::collections::BTreeMap;
use std::rc::Rc;

use super::cx::{Boundary, Cx, Speeds};
use super::emitter::{Emitter, Tensor};
use super::gpu::Gpu;
use super::gpus::gpu_named;
use super::job::{Family, Head, Job};
use super::units::units;
use super::words::strategy_words;
use super::zero::{self, Loaded};
use super::{ddp, lora, offload, optimizer, schedule};
use crate::trace::{Model, ModelParameter, ModelUnit, Trace, validate};

/// A trace could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The job is one that is not modelled.
    #[error("{0}")]
    NotModelled(String),
    /// The trace would contradict itself: a mistake of this program.
    #[error("the generated trace is not valid: {0}")]
    Invalid(String),
}

/// Makes the trace of a job.
///
/// # Errors
/// If strategies are combined that are not modelled together.
pub fn generate(job: &Job) -> Result<Trace, GenerateError> {
    let head_uses_table = job.shape.tied_head && job.shape.head == Head::Lm;
    if job.strategy.cpu_embedding && head_uses_table {
        let why = "cpu_embedding keeps the table on the host, which the tied head needs on the \
                   device: untie the head, or leave the table there";
        return Err(GenerateError::NotModelled(why.to_owned()));
    }
    let emitter = Emitter::shared();
    let speeds = Speeds {
        flops: job.hardware.flops,
        memory_bytes_per_s: job.hardware.memory_bytes_per_s,
        link_bytes_per_s: job.hardware.link_bytes_per_s,
        peer_bytes_per_s: job.hardware.peer_bytes_per_s,
    };
    let units = units(job);
    let gpu = Gpu::named(&job.hardware.gpu);
    let mut cx = Cx::new(Rc::clone(&emitter), speeds, gpu);
    let computed = zero::computed_as(job);
    offload::begin(&mut cx, &computed);
    cx.emitter.borrow_mut().mark("load");
    let whole = load(&mut cx, job, &units);
    ddp::wrap(&mut cx, job);
    zero::begin(&mut cx, job, whole);
    let mut state = optimizer::State::new(&computed);
    for step in 0..job.train.steps {
        schedule::step(&mut cx, &computed, step);
        cx.emitter.borrow_mut().mark(&format!("step{step}.optimizer"));
        cx.reach(Boundary::Update);
        state.step(&mut cx, &computed);
        cx.reach(Boundary::Updated);
    }
    let mut trace = emitter.borrow_mut().finish();
    trace.header.model = Some(Model {
        ranks: u32::try_from(job.parallel.data).unwrap_or(u32::MAX),
        local_ranks: u32::try_from(job.parallel.data.min(job.hardware.gpus_per_host)).unwrap_or(1),
        units,
        options: chunk_options(job),
    });
    trace.header.name = job.name.clone();
    trace.header.strategies = strategy_words(job);
    trace.header.device.name = Some(job.hardware.gpu.clone());
    trace.header.device.total_bytes = Some(job.hardware.gpu_bytes);
    validate(&trace).map_err(|error| GenerateError::Invalid(error.to_string()))?;
    Ok(trace)
}

/// Moves the model to the device, tensor by tensor, as `.to(device)` does. Then adapters, which are
/// put in when the model is there and are turned to fp32 one by one. With ZeRO's stage 3 gives what
/// is to be shared out then; else parameters hold it.
fn load(cx: &mut Cx, job: &Job, units: &[ModelUnit]) -> Vec<Loaded> {
    let shared = job.strategy.zero >= 3;
    let at_once = shared && job.strategy.zero_loads_whole;
    let load = |cx: &mut Cx, bytes: u64| {
        let tensor = at_once.then(|| cx.new_tensor("parameter", bytes));
        Loaded { bytes, tensor }
    };
    let mut whole = Vec::new();
    let rotary = matches!(job.shape.family, Family::Llama | Family::Moe);
    let is_adapter = |unit: &ModelUnit| unit.module.ends_with(".default");
    let base: Vec<&ModelUnit> = units.iter().filter(|unit| !is_adapter(unit)).collect();
    for unit in &base {
        if rotary && unit.module == "lm_head" {
            // Frequencies of rotary positions, twice, belong to the model in front of the head.
            for _ in 0..2 {
                let frequencies = cx.new_tensor("inv_freq", 2 * job.shape.head_elements());
                cx.buffers.push(frequencies);
            }
        }
        for parameter in &unit.parameters {
            let all = if unit.host { 0 } else { parameter.elements * job.train.dtype.bytes() };
            let bytes = if shared { 0 } else { all };
            let trained = !parameter.frozen;
            cx.add_param(&unit.module, &parameter.name, parameter.elements, trained, bytes);
            if shared {
                whole.push(load(cx, all));
            }
        }
    }
    let adapters: Vec<(&ModelUnit, &ModelParameter)> = units
        .iter()
        .filter(|unit| is_adapter(unit))
        .flat_map(|unit| unit.parameters.iter().map(move |parameter| (unit, parameter)))
        .collect();
    let narrow: Vec<Tensor> = adapters
        .iter()
        .map(|(_, parameter)| {
            cx.new_tensor("adapter", parameter.elements * job.train.dtype.bytes())
        })
        .collect();
    for ((unit, parameter), narrow) in adapters.into_iter().zip(narrow) {
        let all = parameter.elements * lora::adapter_element_bytes(job);
        let bytes = if shared { 0 } else { all };
        cx.add_param(&unit.module, &parameter.name, parameter.elements, true, bytes);
        if shared {
            whole.push(load(cx, all));
        }
        drop(narrow);
    }
    whole
}

/// The GPU whose link was measured (`reports/link_costs.md`).
const MEASURED: &str = "h200";

/// Options for allocators that manage model data: those of the description, the host's memory, and
/// how fast bytes move.
fn chunk_options(job: &Job) -> BTreeMap<String, String> {
    let mut options = job.options.clone();
    let mut tell = |key: &str, value: u64| {
        options.entry(key.to_owned()).or_insert_with(|| value.to_string());
    };
    tell("host", job.hardware.host_bytes);
    // Of the machine that was measured more is known than two rates.
    if gpu_named(MEASURED).is_none_or(|measured| job.hardware.gpu != measured.device) {
        tell("link_bandwidth", job.hardware.link_bytes_per_s as u64);
        tell("peer_bandwidth", job.hardware.peer_bytes_per_s as u64);
    }
    options
}
