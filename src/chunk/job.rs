//! What a run needs of a trace: the model in chunks, and which of the trace's modules and blocks
//! are whose.

use std::collections::BTreeMap;

use super::budget::Budget;
use super::config::{ChunkConfig, ChunkSize};
use super::error::ChunkError;
use super::layout::{Layout, pack};
use super::manager::Parameter;
use super::states::{Chunk, ChunkList};
use super::world::{Ids, World};
use crate::trace::{Header, HookedModule, Model, Op, Role, Source, SourceKind, Trace};
use crate::units::{BlockId, ModuleId};

/// Most ranks of a job: each has a chunk of every group here.
pub const RANKS_MAX: u32 = 1 << 13;

/// A trace and what its model says.
pub(super) struct Job<'a> {
    pub(super) trace: &'a Trace,
    pub(super) config: &'a ChunkConfig,
    pub(super) model: &'a Model,
    pub(super) layout: Layout,
    pub(super) ids: Ids,
    pub(super) gpu_bytes: u64,
    /// Parameters of each unit: indices into the manager's.
    pub(super) unit_parameters: Vec<Vec<u32>>,
    pub(super) parameters: Vec<Parameter>,
    /// By module of the trace: its unit, whether the name says which pass.
    pub(super) modules: Vec<Module>,
    /// By name of the trace: the parameter in chunks that is called so.
    pub(super) named: Vec<Option<u32>>,
}

/// A module of the trace.
#[derive(Clone, Copy)]
pub(super) struct Module {
    pub(super) unit: Option<u32>,
    pub(super) backward: Option<bool>,
}

impl<'a> Job<'a> {
    pub(super) fn new(trace: &'a Trace, config: &'a ChunkConfig) -> Result<Job<'a>, ChunkError> {
        let model = trace.header.model.as_ref().ok_or(ChunkError::NoModel)?;
        let world = World { ranks: model.ranks, local_ranks: model.local_ranks, rank: config.rank };
        check_world(world, config)?;
        let ChunkSize::Elements(chunk_elements) = config.chunk_size else {
            return Err(ChunkError::ChunkSizeOpen);
        };
        let device = &trace.header.device;
        let gpu_bytes = config.gpu_bytes.or(device.capacity_bytes).or(device.total_bytes);
        let gpu_bytes = gpu_bytes.ok_or(ChunkError::NoGpuSize)?;
        let layout = pack(&model.units, chunk_elements)?;
        let mut unit_parameters = vec![Vec::new(); model.units.len()];
        let mut parameters = Vec::new();
        let mut by_name = BTreeMap::new();
        for (number, chunk) in (0u32..).zip(&layout.chunks) {
            for (position, tensor) in (0u32..).zip(&chunk.tensors) {
                let parameter = &model.units[tensor.unit as usize].parameters;
                let parameter = &parameter[tensor.parameter as usize];
                let index = parameters.len() as u32;
                unit_parameters[tensor.unit as usize].push(index);
                by_name.insert(parameter.name.as_str(), index);
                parameters.push(Parameter {
                    number,
                    position,
                    elements: tensor.elements,
                    frozen: parameter.frozen,
                    forward_uses: 0,
                    backward_uses: 0,
                    gradient: None,
                });
            }
        }
        if parameters.is_empty() {
            return Err(ChunkError::NoModel);
        }
        let named = trace.names.iter().map(|name| by_name.get(name.as_str()).copied()).collect();
        let ids = Ids::new(world, layout.chunks.len() as u32);
        let modules = modules_of(trace, model);
        let job = Job {
            trace,
            config,
            model,
            layout,
            ids,
            gpu_bytes,
            unit_parameters,
            parameters,
            modules,
            named,
        };
        job.check_hooks()?;
        Ok(job)
    }

    /// The manager lives on hooks: modules that are entered, and accesses.
    fn check_hooks(&self) -> Result<(), ChunkError> {
        let is_unit = |module: ModuleId| {
            self.modules.get(module.index()).is_some_and(|module| module.unit.is_some())
        };
        let mut enters = false;
        let mut accesses = false;
        for event in &self.trace.events {
            match event.op {
                Op::ModuleEnter(module) => enters |= is_unit(module),
                Op::Access(block) => accesses |= self.parameter_of(block).is_some(),
                _ => {}
            }
        }
        match (enters, accesses) {
            (true, true) => Ok(()),
            (false, _) => Err(ChunkError::NoModules),
            (true, false) => Err(ChunkError::NoAccesses),
        }
    }

    /// The parameter in chunks that a block holds.
    pub(super) fn parameter_of(&self, block: BlockId) -> Option<u32> {
        let block = self.trace.blocks.get(block.index())?;
        let name = block.name.some().filter(|_| block.role == Role::Parameter)?;
        *self.named.get(name.index())?
    }

    pub(super) fn fp16_bytes(&self) -> u64 {
        self.layout.chunk_elements.saturating_mul(2)
    }

    /// Whether any tensor of each fp16 chunk is trained.
    pub(super) fn trained(&self) -> Vec<bool> {
        let mut trained = vec![false; self.layout.chunks.len()];
        for parameter in self.parameters.iter().filter(|parameter| !parameter.frozen) {
            trained[parameter.number as usize] = true;
        }
        trained
    }

    pub(super) fn chunks(&self) -> Vec<Chunk> {
        let mut chunks = vec![None; (4 * self.ids.real + self.ids.dummies) as usize];
        for (number, layout) in (0u32..).zip(&self.layout.chunks) {
            for list in ChunkList::ALL {
                let bytes = self.layout.chunk_elements.saturating_mul(list.element_bytes());
                let chunk = Chunk::new(list, number, bytes, layout.tensors.len());
                chunks[self.ids.of(list, number) as usize] = Some(chunk);
            }
        }
        for number in self.ids.real..self.ids.numbers() {
            let dummy = Chunk::new(ChunkList::Fp16, number, self.fp16_bytes(), 1);
            chunks[self.ids.of(ChunkList::Fp16, number) as usize] = Some(dummy);
        }
        chunks.into_iter().flatten().collect()
    }

    /// Bytes of torch's own on the host (spec patrickstar 5.3): parameter, gradient, momentum and
    /// variance in fp32 of what is used there; of what is not trained the parameter alone.
    pub(super) fn torch_host_bytes(&self) -> u64 {
        let host = self.model.units.iter().filter(|unit| unit.host);
        let parameters = host.flat_map(|unit| &unit.parameters);
        let bytes = parameters.map(|parameter| {
            parameter.elements.saturating_mul(if parameter.frozen { 4 } else { 16 })
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// Elements that torch's own ADAM on the host trains.
    pub(super) fn torch_elements(&self) -> u64 {
        let host = self.model.units.iter().filter(|unit| unit.host);
        let trained = host.flat_map(|unit| &unit.parameters).filter(|parameter| !parameter.frozen);
        trained.map(|parameter| parameter.elements).fold(0, u64::saturating_add)
    }

    /// Bytes of this rank's chunks when the model has been built.
    pub(super) fn built_bytes(&self) -> u64 {
        let local = (0u32..).zip(self.trained()).filter(|&(number, _)| self.ids.is_local(number));
        let bytes =
            local.map(|(_, trained)| self.fp16_bytes().saturating_mul(if trained { 3 } else { 1 }));
        bytes.fold(0, u64::saturating_add)
    }

    /// Peak of the host while the model is built (spec patrickstar 4.6): fp32 parameters, this
    /// rank's or, with `release_after_init`, all; chunks; and what torch keeps.
    pub(super) fn construction_bytes(&self) -> u64 {
        let all = self.config.release_after_init;
        let parameters = self.parameters.iter();
        let built = parameters.filter(|parameter| all || self.ids.is_local(parameter.number));
        let elements = built.fold(0u64, |sum, parameter| sum.saturating_add(parameter.elements));
        let host = self.model.units.iter().filter(|unit| unit.host);
        let elements = host.fold(elements, |sum, unit| sum.saturating_add(unit.elements()));
        elements.saturating_mul(4).saturating_add(self.built_bytes())
    }

    pub(super) fn host_too_small(&self, budget: &Budget) -> ChunkError {
        ChunkError::HostTooSmall {
            needed_bytes: self.built_bytes(),
            host_quota_bytes: whole(budget.host_bytes(0)),
            gpu_quota_bytes: whole(budget.gpu_quota_bytes()),
        }
    }
}

pub(super) fn whole(bytes: i128) -> u64 {
    u64::try_from(bytes.max(0)).unwrap_or(u64::MAX)
}

fn check_world(world: World, config: &ChunkConfig) -> Result<(), ChunkError> {
    let World { ranks, local_ranks, rank } = world;
    if ranks == 0 || ranks > RANKS_MAX || local_ranks == 0 || local_ranks > ranks {
        return Err(ChunkError::Ranks { ranks, local_ranks });
    }
    if rank >= ranks {
        return Err(ChunkError::Rank { rank, ranks });
    }
    let fake_only = config.with_async_move && ranks > 1;
    if fake_only { Err(ChunkError::AsyncMove { ranks }) } else { Ok(()) }
}

fn modules_of(trace: &Trace, model: &Model) -> Vec<Module> {
    let units = (0u32..).zip(&model.units).filter(|(_, unit)| !unit.host);
    let units: BTreeMap<&str, u32> =
        units.map(|(index, unit)| (unit.module.as_str(), index)).collect();
    let module = |name: &String| {
        let hooked = HookedModule::of_name(name);
        Module { unit: units.get(hooked.path).copied(), backward: hooked.backward }
    };
    trace.modules.iter().map(module).collect()
}

/// An empty trace with the tables that events of the program refer to.
pub(super) fn derived(trace: &Trace) -> Trace {
    let header = &trace.header;
    Trace {
        header: Header {
            name: header.name.clone(),
            source: Source { kind: SourceKind::Generated, version: header.source.version.clone() },
            device: header.device.clone(),
            settings: header.settings.clone(),
            limit_bytes: header.limit_bytes,
            strategies: header.strategies.clone(),
            ..Header::default()
        },
        streams: trace.streams.clone(),
        pools: trace.pools.clone(),
        settings_changes: trace.settings_changes.clone(),
        phases: trace.phases.clone(),
        modules: trace.modules.clone(),
        names: trace.names.clone(),
        sites: trace.sites.clone(),
        ..Trace::default()
    }
}
