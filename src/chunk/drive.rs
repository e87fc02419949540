//! The driver: a trace's events as calls of the manager.
//!
//! ```text
//!   mark stepN.forward...   a forward pass begins      enter M : F, accesses   before, tick
//!   mark stepN.backward...  the backward pass begins   enter M : B, accesses   before, tick
//!   mark stepN.<other>      after it: ADAM, once       leave M                 after
//!
//!   blocks of parameters, gradients, optimizer state, collectives, and all of the optimizer's
//!     phases: dropped, the manager has its own         every other block: to the GPU as it comes
//! ```
//!
//! Gaps between the trace's events are the program's operations, but for those of the optimizer's
//! phases, which ADAM's costs stand for, and for the trace's transfers, whose time lies in the gap
//! behind them and is taken out of it. Collectives of the trace are no events: what time they took
//! stays in the gaps.

use super::budget::Budget;
use super::cache::Cache;
use super::clock::{Clock, LinkCosts, StepTimes};
use super::config::ChunkConfig;
use super::error::ChunkError;
use super::gpu::Gpu;
use super::job::{Job, Module, derived, whole};
use super::manager::{Halt, Manager};
use super::memory::{Held, Memory};
use super::states::{ChunkList, Device};
use super::summary::{
    ChunkEvent, ChunkSummary, HardStop, ListSummary, RefusedRequest, Stage, StepSummary, Traffic,
};
use super::tracer::Tracer;
use crate::trace::{Block, Direction, Event, Op, Role, StartState, Trace, step_name};
use crate::units::{BlockId, ModuleId};

/// What a run gives.
#[derive(Clone, Debug)]
pub struct ChunkRun {
    /// What the GPU's allocator was asked for: chunks, buffers, temporary gradients and the
    /// program's other blocks, on the simulated clock. Any allocator can replay it.
    pub trace: Trace,
    /// Figures.
    pub summary: ChunkSummary,
    /// The manager's decisions in order.
    pub log: Vec<ChunkEvent>,
}

/// Runs a job's trace through PatrickStar's manager.
///
/// A GPU that refuses a request does not end the run: the block is simply not there. A chunk that
/// must move and may not does ([`ChunkSummary::hard_stop`]); the derived trace ends there.
///
/// # Errors
/// If the trace lacks what the manager needs, runs more than one forward and backward pass in a
/// step, or contradicts the options.
pub fn run(
    trace: &Trace,
    config: &ChunkConfig,
    costs: &LinkCosts,
    gpu: &mut dyn Gpu,
) -> Result<ChunkRun, ChunkError> {
    let job = Job::new(trace, config)?;
    let mut driver = Driver::new(&job, costs, gpu)?;
    let outcome = driver.run();
    let hard_stop = match outcome {
        Ok(()) => None,
        Err(Failure::Halt(Halt::Stop(stop))) if stop.stage == Stage::Init => {
            return Err(job.host_too_small(&driver.manager.budget));
        }
        Err(Failure::Halt(Halt::Stop(stop))) => Some(stop),
        Err(Failure::Halt(Halt::NoSample(missing))) => {
            let step = driver.manager.step.step;
            return Err(ChunkError::LongStep { step, known: missing.known });
        }
        Err(Failure::Error(error)) => return Err(error),
    };
    Ok(driver.finish(hard_stop))
}

/// Why the driver ends early.
enum Failure {
    Halt(Halt),
    Error(ChunkError),
}

impl From<Halt> for Failure {
    fn from(halt: Halt) -> Failure {
        Failure::Halt(halt)
    }
}

impl From<ChunkError> for Failure {
    fn from(error: ChunkError) -> Failure {
        Failure::Error(error)
    }
}

/// What a phase of a step is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Forward,
    Backward,
    Other,
}

/// The N of `stepN.phase`, and what the phase is; nothing for phases of no step.
fn phase_of(name: &str) -> Option<(u32, Phase)> {
    let step = step_name(name)?.strip_prefix("step")?;
    let phase = match name.split('.').nth(1) {
        Some("forward") => Phase::Forward,
        Some("backward") => Phase::Backward,
        _ => Phase::Other,
    };
    Some((step.parse().unwrap_or(u32::MAX), phase))
}

/// Whether the accesses behind this event are not those of the module entered before it.
fn ends_accesses(op: Op) -> bool {
    matches!(op, Op::ModuleEnter(_) | Op::ModuleLeave(_) | Op::Mark(_))
}

/// A module that is entered and has parameters in chunks.
struct Entered {
    module: ModuleId,
    parameters: Vec<u32>,
    backward: bool,
    /// PyTorch calls no hook after its backward pass.
    leaf: bool,
}

/// A run on its way.
struct Driver<'a, 'g> {
    job: &'a Job<'a>,
    manager: Manager<'g>,
    /// Blocks of the program that went to the GPU, by id.
    blocks: Vec<Option<Held>>,
    entered: Vec<Entered>,
    /// Whether the optimizer's phases of this step run.
    in_optimizer: bool,
    /// Whether a step has begun, and whether it ran ADAM.
    in_step: bool,
    ran_adam: bool,
    steps: Vec<StepSummary>,
    /// Time before the first step.
    construction_times: StepTimes,
    /// Moments of the warm-up.
    moments: u32,
    last_ns: u64,
    /// Time of the transfer that is the last event, if it is one.
    transfer_ns: u64,
}

impl<'a, 'g> Driver<'a, 'g> {
    fn new(
        job: &'a Job<'a>,
        costs: &LinkCosts,
        gpu: &'g mut dyn Gpu,
    ) -> Result<Driver<'a, 'g>, ChunkError>
    where
        'a: 'g,
    {
        let config = job.config;
        let clock = Clock::new(costs.clone(), config.with_async_move);
        let fp16_bytes = job.fp16_bytes();
        let chunks = job.chunks();
        let manager = Manager {
            config,
            ids: job.ids,
            budget: Budget::new(config, job.ids.world, job.gpu_bytes, fp16_bytes),
            tracer: Tracer::new(chunks.len()),
            chunks,
            trained: job.trained(),
            parameters: job.parameters.clone(),
            memory: Memory::new(gpu, clock, derived(job.trace)),
            cache: config.with_mem_cache.then(Cache::default),
            fp16_bytes,
            counted_bytes: [0; 2],
            torch_host_bytes: job.torch_host_bytes(),
            torch_elements: job.torch_elements(),
            pinned_bytes: 0,
            phantom_bytes: 0,
            margin: None,
            stage: Stage::Init,
            step: StepSummary::default(),
            construction: Traffic::default(),
            log: Vec::new(),
            payload_allocations: 0,
            cache_hits: 0,
        };
        let room = manager.budget.host_bytes(0).max(0) + manager.budget.gpu_quota_bytes().max(0);
        if room < i128::from(job.built_bytes()) {
            return Err(job.host_too_small(&manager.budget));
        }
        Ok(Driver {
            job,
            manager,
            blocks: vec![None; job.trace.blocks.len()],
            entered: Vec::new(),
            in_optimizer: false,
            in_step: false,
            ran_adam: false,
            steps: Vec::new(),
            construction_times: StepTimes::default(),
            moments: 0,
            last_ns: job.trace.events.first().map_or(0, |event| event.time_ns),
            transfer_ns: 0,
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        self.manager.construct()?;
        self.begin_blocks();
        let events = &self.job.trace.events;
        let mut index = 0;
        while let Some(event) = events.get(index) {
            self.pass_time(event);
            match event.op {
                Op::ModuleEnter(module) => {
                    let accesses = events[index + 1..].iter();
                    self.enter(module, accesses)?;
                }
                Op::ModuleLeave(module) => self.leave(module)?,
                Op::Mark(phase) => {
                    self.manager.memory.push(event.op);
                    let name = self.job.trace.phases.get(phase.index());
                    self.mark(name.map_or("", String::as_str))?;
                }
                _ => self.other(event.op),
            }
            index += 1;
        }
        Ok(())
    }

    /// Blocks that were there before the first event.
    fn begin_blocks(&mut self) {
        for start in self.job.trace.start.iter().flat_map(|start| &start.blocks) {
            if start.state == StartState::Free || start.block.is_none() {
                continue;
            }
            self.alloc(start.block);
            if start.state == StartState::Deferred {
                self.give(start.block, Memory::defer);
            }
        }
    }

    /// What ran since the event before.
    fn pass_time(&mut self, event: &Event) {
        let gap_ns = event.time_ns.saturating_sub(self.last_ns);
        let gap_ns = gap_ns.saturating_sub(std::mem::take(&mut self.transfer_ns));
        self.last_ns = self.last_ns.max(event.time_ns);
        if !self.in_optimizer && gap_ns > 0 {
            self.manager.clock().compute(gap_ns);
        }
    }

    /// Events that the manager has no part in.
    fn other(&mut self, op: Op) {
        let memory = &mut self.manager.memory;
        match op {
            Op::Alloc(block) => self.alloc(block),
            Op::Attempt(block) => {
                if let Some(block) = self.kept(block) {
                    self.manager.memory.attempt(block);
                }
            }
            Op::Free(block) => {
                self.give(block, Memory::free);
                self.forget(block);
            }
            Op::Defer(block) => self.give(block, Memory::defer),
            Op::Done(block) => {
                self.give(block, Memory::done);
                self.forget(block);
            }
            Op::Access(block) => self.give(block, Memory::access),
            Op::EmptyCache => {
                memory.push(op);
                memory.gpu().empty_cache();
            }
            Op::Settings(settings) => {
                memory.push(op);
                memory.gpu().settings(settings);
            }
            Op::PoolEnter(pool) => {
                memory.push(op);
                memory.gpu().pool_enter(pool);
            }
            Op::PoolLeave(pool) => {
                memory.push(op);
                memory.gpu().pool_leave(pool);
            }
            Op::PoolDelete(pool) => {
                memory.push(op);
                memory.gpu().pool_delete(pool);
            }
            Op::Transfer(transfer) => self.transfer(transfer.index()),
            Op::Mark(_) | Op::ModuleEnter(_) | Op::ModuleLeave(_) => {}
        }
    }

    fn transfer(&mut self, index: usize) {
        let Some(transfer) = self.job.trace.transfers.get(index) else { return };
        if self.in_optimizer {
            return;
        }
        let (bytes, direction) = (transfer.size_bytes, transfer.direction);
        self.manager.memory.push_transfer(bytes, direction);
        self.transfer_ns = self.manager.clock().transfer(bytes, direction);
        let to = match direction {
            Direction::HostToDevice => Device::Gpu,
            Direction::DeviceToHost => Device::Host,
        };
        self.manager.step.transfers.add(to, bytes);
    }

    /// The block, if it is not one that the manager replaces.
    fn kept(&self, block: BlockId) -> Option<Block> {
        let block = self.job.trace.blocks.get(block.index())?;
        let replaced = matches!(
            block.role,
            Role::Parameter | Role::Gradient | Role::Optimizer | Role::Communication
        );
        (!replaced && !self.in_optimizer).then_some(*block)
    }

    fn alloc(&mut self, id: BlockId) {
        let Some(block) = self.kept(id) else { return };
        let memory = &mut self.manager.memory;
        let held = memory.ask_block(block).unwrap_or_else(|refused| memory.lose(refused));
        self.blocks[id.index()] = Some(held);
    }

    fn give(&mut self, block: BlockId, give: impl FnOnce(&mut Memory<'g>, Held)) {
        if let Some(held) = self.blocks.get(block.index()).copied().flatten() {
            give(&mut self.manager.memory, held);
        }
    }

    fn forget(&mut self, block: BlockId) {
        if let Some(held) = self.blocks.get_mut(block.index()) {
            *held = None;
        }
    }

    /// A phase begins.
    fn mark(&mut self, name: &str) -> Result<(), Failure> {
        let Some((step, phase)) = phase_of(name) else {
            self.in_optimizer = false;
            return Ok(());
        };
        let is_same = self.in_step && self.manager.step.step == step;
        match (phase, self.manager.stage) {
            (Phase::Forward, Stage::Forward) if is_same => {}
            (Phase::Backward, Stage::Backward) if is_same => {}
            (Phase::Forward, _) if !is_same => self.begin_step(step)?,
            (Phase::Backward, Stage::Forward) if is_same => self.manager.begin_backward(),
            (Phase::Other, Stage::Backward) if is_same => {
                self.manager.end_backward();
                self.ran_adam = true;
                self.in_optimizer = true;
                self.manager.adam()?;
            }
            (Phase::Other, stage) => {
                self.in_optimizer = is_same && stage == Stage::Adam;
            }
            _ => return Err(ChunkError::Passes { step, phase: name.to_owned() }.into()),
        }
        if phase != Phase::Other {
            self.in_optimizer = false;
        }
        Ok(())
    }

    /// A forward pass begins, and a step with it.
    fn begin_step(&mut self, step: u32) -> Result<(), Failure> {
        if self.in_step {
            self.end_step()?;
            let quirks = self.job.config.quirks;
            self.manager.tracer.next_step(self.ran_adam || quirks.skipped_adam);
        } else {
            self.construction_times = self.manager.clock().end_step();
        }
        self.in_step = true;
        self.ran_adam = false;
        let manager = &mut self.manager;
        manager.memory.begin_step();
        manager.step = StepSummary {
            step,
            warm_up: manager.tracer.is_warm_up(),
            gpu_chunk_bytes_peak: manager.counted_bytes[Device::Gpu.index()],
            ..StepSummary::default()
        };
        manager.note_host();
        manager.begin_forward();
        Ok(())
    }

    /// A step is over. One without an optimizer's phase is taken for one whose gradients had
    /// overflown: the optimizer was called, and did not go on.
    fn end_step(&mut self) -> Result<(), Failure> {
        if !self.ran_adam && self.manager.stage == Stage::Backward {
            self.manager.end_backward();
            self.manager.begin_adam()?;
            if self.job.config.quirks.overflow_leak && self.manager.cache.is_some() {
                self.manager.count(Device::Host, self.manager.fp16_bytes);
            }
        }
        self.note_step();
        Ok(())
    }

    fn note_step(&mut self) {
        let manager = &mut self.manager;
        manager.step.moments = manager.tracer.moment();
        manager.step.gpu_bytes_peak = manager.memory.step_peak_bytes;
        manager.step.times = manager.clock().end_step();
        self.steps.push(manager.step.clone());
    }

    /// A module is entered; `next` are the events behind.
    fn enter<'e>(
        &mut self,
        module: ModuleId,
        next: impl Iterator<Item = &'e Event>,
    ) -> Result<(), Failure> {
        self.manager.memory.push(Op::ModuleEnter(module));
        let Some(&Module { unit, backward }) = self.job.modules.get(module.index()) else {
            return Ok(());
        };
        let mut parameters =
            unit.map_or_else(Vec::new, |unit| self.job.unit_parameters[unit as usize].clone());
        // Parameters of other modules that this one uses too, as tied weights.
        for event in next.take_while(|event| !ends_accesses(event.op)) {
            let Op::Access(block) = event.op else { continue };
            let parameter = self.job.parameter_of(block);
            parameters.extend(parameter.filter(|parameter| !parameters.contains(parameter)));
        }
        if parameters.is_empty() {
            return Ok(());
        }
        let stage = self.manager.stage;
        let backward = backward.unwrap_or(stage == Stage::Backward);
        let in_pass = stage == Stage::Backward || (stage == Stage::Forward && !backward);
        if !in_pass {
            let module = self.job.trace.modules[module.index()].clone();
            return Err(ChunkError::OutsidePass { module, backward }.into());
        }
        if backward {
            self.manager.pre_backward(&parameters)?;
        } else {
            self.manager.pre_forward(&parameters)?;
        }
        let leaf = unit.is_some_and(|unit| self.job.model.units[unit as usize].leaf);
        self.entered.push(Entered { module, parameters, backward, leaf });
        Ok(())
    }

    fn leave(&mut self, module: ModuleId) -> Result<(), Failure> {
        self.manager.memory.push(Op::ModuleLeave(module));
        let Some(at) = self.entered.iter().rposition(|entered| entered.module == module) else {
            return Ok(());
        };
        let entered = self.entered.remove(at);
        match (entered.backward, entered.leaf) {
            (false, _) => self.manager.post_forward(&entered.parameters)?,
            (true, false) => self.manager.post_backward(&entered.parameters)?,
            (true, true) => {}
        }
        Ok(())
    }

    fn finish(mut self, hard_stop: Option<HardStop>) -> ChunkRun {
        if self.in_step {
            if self.manager.stage == Stage::Backward {
                self.manager.end_backward();
            }
            self.note_step();
        }
        self.moments = self.manager.tracer.gpu_samples_bytes().len() as u32;
        let summary = self.summary(hard_stop);
        let Manager { memory, log, .. } = self.manager;
        ChunkRun { trace: memory.trace, summary, log }
    }

    fn summary(&mut self, hard_stop: Option<HardStop>) -> ChunkSummary {
        let manager = &self.manager;
        let steps = std::mem::take(&mut self.steps);
        let mut moves = manager.construction;
        let mut adam_copies = Traffic::default();
        let mut transfers = Traffic::default();
        for step in &steps {
            for traffic in [step.forward, step.backward, step.adam] {
                moves.join(traffic);
            }
            adam_copies.join(step.gradient_reads);
            adam_copies.join(step.write_backs);
            transfers.join(step.transfers);
        }
        let peak = |of: fn(&StepSummary) -> u64| steps.iter().map(of).max().unwrap_or(0);
        let refused = manager.memory.first_refused;
        ChunkSummary {
            chunk_elements: self.job.layout.chunk_elements,
            lists: self.lists(),
            dummy_chunks: u64::from(manager.ids.dummies),
            utilization: self.job.layout.utilization(),
            ranks: manager.ids.world.ranks,
            rank: manager.ids.world.rank,
            gpu_quota_bytes: whole(manager.budget.gpu_quota_bytes()),
            host_quota_bytes: whole(manager.budget.host_bytes(0)),
            moments: self.moments,
            other_gpu_bytes: manager.tracer.gpu_samples_bytes().to_vec(),
            other_host_bytes_max: manager.tracer.host_bytes_max(),
            margin: manager.margin.map(|margin| margin.groups),
            gpu_adam_groups: manager.gpu_adam_groups(),
            construction_host_bytes_peak: self.job.construction_bytes(),
            torch_host_bytes: manager.torch_host_bytes,
            phantom_host_bytes: manager.phantom_bytes,
            gpu_chunk_bytes_final: manager.counted_bytes[Device::Gpu.index()],
            host_chunk_bytes_final: manager.counted_bytes[Device::Host.index()],
            gpu_bytes_peak: peak(|step| step.gpu_bytes_peak),
            gpu_chunk_bytes_peak: peak(|step| step.gpu_chunk_bytes_peak),
            host_bytes_peak: peak(|step| step.host_bytes_peak),
            construction: manager.construction,
            construction_times: self.construction_times,
            steps,
            moves,
            adam_copies,
            transfers,
            gpu_mallocs: manager.memory.mallocs,
            payload_allocations: manager.payload_allocations,
            cache_hits: manager.cache_hits,
            refusals: manager.memory.refusals,
            first_refused: refused.map(|(event_index, requested_bytes)| RefusedRequest {
                event_index,
                requested_bytes,
            }),
            hard_stop,
        }
    }

    fn lists(&self) -> Vec<ListSummary> {
        let numbers = || (0u32..).zip(&self.manager.trained);
        let list = |list: ChunkList| {
            let has = |trained: bool| trained || list == ChunkList::Fp16;
            let all = numbers().filter(|&(_, &trained)| has(trained));
            let local = all.clone().filter(|&(number, _)| self.job.ids.is_local(number));
            ListSummary {
                list,
                chunks: all.count() as u64,
                local_chunks: local.count() as u64,
                chunk_bytes: self.job.layout.chunk_elements.saturating_mul(list.element_bytes()),
            }
        };
        ChunkList::ALL.map(list).to_vec()
    }
}
