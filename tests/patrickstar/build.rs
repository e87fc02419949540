//! A program as a trace: what the manager is given.

use std::collections::BTreeMap;

use fraglab::trace::{
    Block, Event, Header, HookedModule, Model, ModelParameter, ModelUnit, Op, Role, Source,
    SourceKind, Stream, Trace, validate,
};
use fraglab::units::{BlockId, ModuleId, NameId, PhaseId, SiteId, StreamId};

use super::model::Options;
use super::program::{Act, Program, Stage, Unit};

/// Nanoseconds between two events.
const GAP_NS: u64 = 1000;

#[derive(Default)]
struct Builder {
    trace: Trace,
    /// Parameter blocks of each unit.
    parameters: Vec<Vec<BlockId>>,
    blocks: BTreeMap<usize, BlockId>,
    modules: BTreeMap<String, ModuleId>,
}

fn unit_name(unit: usize) -> String {
    format!("layers.{unit}")
}

fn parameter_name(unit: usize, parameter: usize) -> String {
    format!("layers.{unit}.parameter{parameter}")
}

fn model_unit(index: usize, unit: &Unit) -> ModelUnit {
    let parameters = unit.parameters.iter().enumerate();
    let parameters = parameters.map(|(parameter, &elements)| ModelParameter {
        name: parameter_name(index, parameter),
        elements,
        frozen: false,
    });
    ModelUnit {
        module: unit_name(index),
        leaf: unit.leaf,
        host: unit.host,
        parameters: parameters.collect(),
    }
}

impl Builder {
    fn push(&mut self, op: Op) {
        let time_ns = GAP_NS * self.trace.events.len() as u64;
        self.trace.events.push(Event { time_ns, op });
    }

    fn block(&mut self, size_bytes: u64, role: Role, name: Option<String>) -> BlockId {
        let name = name.map_or(NameId::NONE, |name| {
            self.trace.names.push(name);
            NameId(self.trace.names.len() as u32 - 1)
        });
        let block = Block { size_bytes, stream: StreamId(0), site: SiteId::NONE, name, role };
        self.trace.blocks.push(block);
        BlockId(self.trace.blocks.len() as u32 - 1)
    }

    fn parameters(&mut self, program: &Program) {
        for (index, unit) in program.units.iter().enumerate() {
            let mut blocks = Vec::new();
            for (parameter, elements) in unit.parameters.iter().enumerate() {
                let name = parameter_name(index, parameter);
                let block = self.block(2 * elements, Role::Parameter, Some(name));
                self.push(Op::Alloc(block));
                blocks.push(block);
            }
            self.parameters.push(blocks);
        }
    }

    fn module(&mut self, unit: usize, backward: bool) -> ModuleId {
        let path = unit_name(unit);
        let name = HookedModule { path: &path, class: "Module", backward: Some(backward) }.name();
        let modules = &mut self.trace.modules;
        *self.modules.entry(name).or_insert_with_key(|name| {
            modules.push(name.clone());
            ModuleId(modules.len() as u32 - 1)
        })
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Stage(step, stage) => {
                let stage = match stage {
                    Stage::Forward => "forward",
                    Stage::Backward => "backward",
                    Stage::Adam | Stage::Init => "optimizer",
                };
                self.trace.phases.push(format!("step{step}.{stage}"));
                let phase = PhaseId(self.trace.phases.len() as u32 - 1);
                self.push(Op::Mark(phase));
            }
            Act::Enter { unit, backward } => {
                let module = self.module(unit, backward);
                self.push(Op::ModuleEnter(module));
                for block in self.parameters[unit].clone() {
                    self.push(Op::Access(block));
                }
            }
            Act::Leave { unit, backward } => {
                let module = self.module(unit, backward);
                self.push(Op::ModuleLeave(module));
            }
            Act::Alloc { block, bytes } => {
                let id = self.block(bytes, Role::Activation, None);
                self.blocks.insert(block, id);
                self.push(Op::Alloc(id));
            }
            Act::Free { block } => self.push(Op::Free(self.blocks[&block])),
        }
    }
}

/// The trace of a program on the ranks of `options`.
pub(crate) fn trace(program: &Program, options: &Options) -> Trace {
    let mut builder = Builder::default();
    let units = program.units.iter().enumerate();
    builder.trace.header = Header {
        name: "program".to_owned(),
        source: Source { kind: SourceKind::Generated, version: None },
        model: Some(Model {
            ranks: options.ranks as u32,
            local_ranks: options.local_ranks as u32,
            units: units.map(|(index, unit)| model_unit(index, unit)).collect(),
            options: BTreeMap::new(),
        }),
        ..Header::default()
    };
    builder.trace.streams.push(Stream { handle: 0 });
    builder.parameters(program);
    program.acts().into_iter().for_each(|act| builder.act(act));
    validate(&builder.trace).expect("traces of programs are valid");
    builder.trace
}
