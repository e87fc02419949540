//! A small program for the manager: units in a row, forward, backward, optimizer.
//!
//! Sizes are those of the spec's tiny cases: a chunk has 100 elements, so that one fp16 chunk, F,
//! has 200 bytes.

use std::fmt::Write;
use std::ops::Range;

use fraglab::alloc::spec::{AllocSpec, Params};
use fraglab::chunk::{ChunkConfig, ChunkRun, Exact, LinkCosts, run};
use fraglab::trace::{Trace, read_text, validate};

/// Elements of a chunk.
pub(crate) const CHUNK_ELEMENTS: u64 = 100;
/// Bytes of an fp16 chunk.
pub(crate) const F: u64 = 2 * CHUNK_ELEMENTS;

/// A module with parameters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unit {
    /// Elements of each parameter.
    pub(crate) elements: Vec<u64>,
    /// Its inputs need no gradient.
    pub(crate) leaf: bool,
    /// None of it is trained.
    pub(crate) frozen: bool,
    /// Used on the host.
    pub(crate) host: bool,
    /// Kept from its forward pass, in checkpointed layers from the recomputed one, to the end of
    /// its backward pass.
    pub(crate) saved_bytes: u64,
}

/// What a job does in each of its steps.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) units: Vec<Unit>,
    pub(crate) ranks: u32,
    pub(crate) local_ranks: u32,
    /// Units of each checkpointed layer; a unit in none is run once.
    pub(crate) checkpointed: Vec<Range<usize>>,
    /// Kept from a checkpointed layer's forward pass to the end of its backward pass.
    pub(crate) checkpoint_bytes: u64,
    /// Checkpoints go to the host and come back.
    pub(crate) offloads: bool,
    /// Taken and given back inside of each pass of each unit.
    pub(crate) working_bytes: u64,
    /// Taken before the first step and never given back.
    pub(crate) constant_bytes: u64,
    pub(crate) steps: u32,
    /// Steps without an optimizer phase.
    pub(crate) skipped_adam: Vec<u32>,
    /// Time of a unit's pass in nanoseconds.
    pub(crate) pass_ns: u64,
}

impl Program {
    /// `count` units of one parameter that fills a chunk.
    pub(crate) fn equal(count: usize) -> Program {
        let unit = Unit { elements: vec![CHUNK_ELEMENTS], ..Unit::default() };
        Program::of(vec![unit; count])
    }

    /// Units, and nothing but their parameters and gradients.
    pub(crate) fn of(units: Vec<Unit>) -> Program {
        Program {
            units,
            ranks: 1,
            local_ranks: 1,
            checkpointed: Vec::new(),
            checkpoint_bytes: 0,
            offloads: false,
            working_bytes: 0,
            constant_bytes: 0,
            steps: 5,
            skipped_adam: Vec::new(),
            pass_ns: 0,
        }
    }

    /// Every `units` of them are a checkpointed layer.
    pub(crate) fn checkpointed(mut self, units: usize, checkpoint_bytes: u64) -> Program {
        let starts = (0..self.units.len()).step_by(units);
        self.checkpointed = starts.map(|at| at..(at + units).min(self.units.len())).collect();
        self.checkpoint_bytes = checkpoint_bytes;
        self
    }

    pub(crate) fn trace(&self) -> Trace {
        let text = Text { program: self, text: String::new() }.write();
        let trace = read_text(&text).expect("a well-formed text");
        validate(&trace).expect("a valid trace");
        trace
    }

    /// Every unit saves so many bytes for its backward pass.
    pub(crate) fn saving(mut self, saved_bytes: u64) -> Program {
        for unit in &mut self.units {
            unit.saved_bytes = saved_bytes;
        }
        self
    }

    /// Runs it with an exact GPU: `spec` has parameters of `chunk` beside the sizes.
    pub(crate) fn run(&self, gpu_bytes: u64, spec: &str) -> ChunkRun {
        self.run_on(gpu_bytes, gpu_bytes, spec)
    }

    /// The same where the GPU has another capacity than the manager is told.
    pub(crate) fn run_on(&self, capacity_bytes: u64, gpu_bytes: u64, spec: &str) -> ChunkRun {
        let mut size = format!("chunk_size={CHUNK_ELEMENTS}+");
        if spec.contains("chunk_size=") {
            size.clear();
        }
        let config = config(&format!("{size}gpu={gpu_bytes}+{spec}"));
        let mut gpu = Exact::new(capacity_bytes);
        let result = run(&self.trace(), &config, &LinkCosts::default(), &mut gpu);
        let result = result.expect("the manager can run it");
        validate(&result.trace).expect("a valid derived trace");
        result
    }
}

/// Options from `key=value+key=value`.
pub(crate) fn config(params: &str) -> ChunkConfig {
    let params = params.trim_end_matches('+');
    let spec: AllocSpec = format!("chunk+{params}").parse().expect("a specification");
    ChunkConfig::build(Params::new(&spec), &Default::default()).expect("known parameters")
}

struct Text<'a> {
    program: &'a Program,
    text: String,
}

impl Text<'_> {
    fn line(&mut self, line: impl AsRef<str>) {
        writeln!(self.text, "{}", line.as_ref()).expect("writing to a text");
    }

    fn write(mut self) -> String {
        let (ranks, local) = (self.program.ranks, self.program.local_ranks);
        self.line(format!("ranks {ranks} {local}"));
        for (index, unit) in self.program.units.iter().enumerate() {
            let mut line = format!("unit u{index}");
            line += if unit.leaf { " leaf" } else { "" };
            line += if unit.host { " host" } else { "" };
            for (parameter, elements) in unit.elements.iter().enumerate() {
                let frozen = if unit.frozen { ":frozen" } else { "" };
                write!(line, " u{index}.p{parameter}={elements}{frozen}").expect("a text");
            }
            self.line(line);
        }
        for (index, unit) in self.program.units.iter().enumerate() {
            for (parameter, elements) in unit.elements.iter().enumerate() {
                let bytes = 2 * elements;
                self.line(format!("alloc u{index}.p{parameter} {bytes} role=parameter"));
            }
        }
        self.keep("constant".to_owned(), self.program.constant_bytes, "temporary");
        for step in 0..self.program.steps {
            self.step(step);
        }
        self.text
    }

    fn step(&mut self, step: u32) {
        let parts = self.parts();
        self.line(format!("mark step{step}.forward"));
        for part in &parts {
            self.forward(part);
        }
        self.line(format!("mark step{step}.backward"));
        for part in parts.iter().rev() {
            self.backward(part);
        }
        if !self.program.skipped_adam.contains(&step) {
            self.line(format!("mark step{step}.optimizer"));
        }
    }

    /// Checkpointed layers, and the units outside of them one by one.
    fn parts(&self) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::new();
        let mut at = 0;
        while at < self.program.units.len() {
            let layer = self.program.checkpointed.iter().find(|layer| layer.start == at);
            let part = layer.map_or((at..at + 1, false), |layer| (layer.clone(), true));
            at = part.0.end;
            parts.push(part);
        }
        parts
    }

    fn forward(&mut self, (units, checkpointed): &(Range<usize>, bool)) {
        for unit in units.clone() {
            self.pass(unit, "F", !checkpointed);
        }
        if *checkpointed {
            let (name, bytes) = (format!("check{}", units.start), self.program.checkpoint_bytes);
            if self.program.offloads {
                self.line(format!("transfer {bytes} d2h"));
            } else {
                self.keep(name, bytes, "checkpoint");
            }
        }
    }

    fn backward(&mut self, (units, checkpointed): &(Range<usize>, bool)) {
        if *checkpointed {
            for unit in units.clone() {
                self.pass(unit, "F", true);
            }
        }
        for unit in units.clone().rev() {
            self.pass(unit, "B", false);
            if self.program.units[unit].saved_bytes > 0 {
                self.line(format!("free saved{unit}"));
            }
        }
        if *checkpointed && !self.program.offloads && self.program.checkpoint_bytes > 0 {
            self.line(format!("free check{}", units.start));
        }
        if *checkpointed && self.program.offloads {
            self.line(format!("transfer {} h2d", self.program.checkpoint_bytes));
        }
    }

    fn keep(&mut self, name: String, bytes: u64, role: &str) {
        if bytes > 0 {
            self.line(format!("alloc {name} {bytes} role={role}"));
        }
    }

    /// A unit's pass; what it saves is taken inside of it.
    fn pass(&mut self, unit: usize, pass: &str, saves: bool) {
        self.line(format!("enter \"u{unit}->Unit : {pass}\""));
        for parameter in 0..self.program.units[unit].elements.len() {
            self.line(format!("access u{unit}.p{parameter}"));
        }
        self.keep("work".to_owned(), self.program.working_bytes, "temporary");
        let pass_ns = self.program.pass_ns;
        if self.program.working_bytes > 0 {
            self.line(format!("@+{pass_ns}ns free work"));
        }
        if saves {
            let saved_bytes = self.program.units[unit].saved_bytes;
            self.keep(format!("saved{unit}"), saved_bytes, "activation");
        }
        self.line(format!("leave \"u{unit}->Unit : {pass}\""));
    }
}
