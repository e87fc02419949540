//! What STAlloc's parser makes of a profile: requests with iterations, phases, layers and classes
//! (specs/stalloc.md 1.5, 1.6).
//!
//! ```text
//!   time      0  1  2 │ 3  4  5  6  7 │ 8  9 ...      counts mallocs and frees, nothing else
//!   iteration   head  │ 0             │ 1             head, 0, 1, ..., tail
//!   phase       init  │ init 0F  1F 0B│ init 0F ...   kept through the optimizer's step
//! ```

use std::collections::{BTreeMap, HashMap};

use super::{Aborts, SynthesisError};
use crate::alloc::planned::Profile;
use crate::plan::stalloc::size_classes::rounded;
use crate::trace::{HookedModule, Op, StartState, backward_phase};
use crate::units::BlockId;

/// Requests of at most this many bytes are small: they are not planned one by one.
pub(super) const SMALL_BYTES: u64 = 512;
/// Most bytes that may never be freed, together.
const UNRELEASED_BYTES_MAX: u64 = 128 << 20;

/// The part of the run that an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Iteration {
    Head,
    Step(u32),
    Tail,
}

/// The phase of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Init,
    /// The k-th forward or backward pass of the iteration.
    Pass {
        backward: bool,
        index: u32,
    },
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// At most 512 bytes.
    Small,
    /// In a layer's experts.
    DynamicMlp,
    /// In a mixture of experts, outside the experts.
    DynamicMoe,
    /// Left to the caching allocator: made before the iterations and freed in one, or never freed.
    Unreleased,
    /// Weight or gradient: from before the iterations to after them.
    Weight,
    /// Only before the iterations.
    Init,
    /// Optimizer state: from the first iteration to after the last.
    Optimizer,
    /// An activation that is freed in another phase.
    Scoped,
    /// An activation that is freed in its own phase.
    Transient,
}

impl Class {
    pub(super) const ALL: [Class; 9] = [
        Class::Weight,
        Class::Init,
        Class::Optimizer,
        Class::Scoped,
        Class::Transient,
        Class::DynamicMlp,
        Class::DynamicMoe,
        Class::Unreleased,
        Class::Small,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Class::Small => "var",
            Class::DynamicMlp => "dynamic mlp",
            Class::DynamicMoe => "dynamic moe",
            Class::Unreleased => "unreleased",
            Class::Weight => "weight & gradient",
            Class::Init => "init phase",
            Class::Optimizer => "optimizer state",
            Class::Scoped => "activation group",
            Class::Transient => "activation temporary",
        }
    }

    /// Whether its requests have lines in the plan.
    pub(super) fn is_static(self) -> bool {
        !matches!(self, Class::Small | Class::DynamicMlp | Class::DynamicMoe | Class::Unreleased)
    }

    pub(super) fn is_activation(self) -> bool {
        matches!(self, Class::Scoped | Class::Transient)
    }
}

/// A malloc with its free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Number among the mallocs of more than 512 bytes.
    pub(super) malloc_id: Option<u64>,
    pub(super) size_bytes: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) iteration: Iteration,
    pub(super) end_iteration: Iteration,
    pub(super) phase: Phase,
    pub(super) end_phase: Phase,
    /// Layers in which it is made and freed, in [`Job::labels`].
    pub(super) layer: Option<u32>,
    pub(super) end_layer: Option<u32>,
    pub(super) class: Class,
}

/// A layer, as the parser calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// `mlp-F-3`, `moe-B-7`, `shared`, `topk_router`.
    pub(super) name: String,
    pub(super) kind: LabelKind,
    /// Path of the module that opened it first.
    pub(super) path: String,
    /// When it was opened first.
    pub(super) iteration: Iteration,
    pub(super) phase: Phase,
}

/// What kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LabelKind {
    Moe {
        backward: bool,
        id: i64,
    },
    Mlp {
        backward: bool,
        id: i64,
    },
    /// Static all the same.
    Other,
}

/// A profile as STAlloc's parser sees it.
#[derive(Clone, Debug, Default)]
pub(super) struct Job {
    /// By start.
    pub(super) requests: Vec<Request>,
    pub(super) labels: Vec<Label>,
    /// Time at which every iteration begins, and at which the last ends.
    pub(super) iteration_starts: Vec<u64>,
    pub(super) end: u64,
}

/// Reads a profile; with `faithful`, stops where STAlloc's parser would.
pub(super) fn read(profile: &Profile, faithful: bool) -> Result<Job, SynthesisError> {
    let mut reader = Reader::new(profile, faithful);
    for start in profile.trace.start.iter().flat_map(|start| &start.blocks) {
        if start.state != StartState::Free {
            reader.malloc(start.block);
        }
    }
    for (at, event) in profile.trace.events.iter().enumerate() {
        reader.event(at, event.op)?;
    }
    reader.finish()
}

struct Reader<'a> {
    profile: &'a Profile,
    faithful: bool,
    job: Job,
    time: u64,
    iteration: Iteration,
    phase: Phase,
    /// Forward and backward passes of this iteration so far, and most of any.
    passes: [u32; 2],
    passes_max: [u32; 2],
    malloc_ids: u64,
    /// Layers entered; nothing for those without a label.
    stack: Vec<u32>,
    label_ids: HashMap<String, u32>,
    layer_id: i64,
    /// Live blocks' requests.
    live: HashMap<BlockId, usize>,
}

impl<'a> Reader<'a> {
    fn new(profile: &'a Profile, faithful: bool) -> Reader<'a> {
        Reader {
            profile,
            faithful,
            job: Job::default(),
            time: 0,
            iteration: Iteration::Head,
            phase: Phase::Init,
            passes: [0; 2],
            passes_max: [0; 2],
            malloc_ids: 0,
            stack: Vec::new(),
            label_ids: HashMap::new(),
            layer_id: 0,
            live: HashMap::new(),
        }
    }

    fn event(&mut self, at: usize, op: Op) -> Result<(), SynthesisError> {
        let steps = &self.profile.steps;
        let begun = self.job.iteration_starts.len();
        if steps.get(begun).is_some_and(|step| step.start <= at) {
            self.begin(Iteration::Step(begun as u32));
            self.job.iteration_starts.push(self.time);
        } else if self.iteration != Iteration::Tail
            && steps.len() == begun
            && steps.last().is_some_and(|step| step.end <= at)
        {
            self.job.end = self.time;
            self.begin(Iteration::Tail);
        }
        match op {
            Op::Alloc(block) => self.malloc(block),
            Op::Free(block) | Op::Done(block) => self.free(block),
            Op::Mark(phase) => self.mark(&self.profile.trace.phases[phase.index()]),
            Op::ModuleEnter(module) => self.enter(&self.profile.trace.modules[module.index()]),
            Op::ModuleLeave(module) => {
                return self.leave(at, &self.profile.trace.modules[module.index()]);
            }
            // A deferred block's memory is free when its use ends.
            Op::Defer(_)
            | Op::Attempt(_)
            | Op::EmptyCache
            | Op::Settings(_)
            | Op::PoolEnter(_)
            | Op::PoolLeave(_)
            | Op::PoolDelete(_)
            | Op::Access(_)
            | Op::Transfer(_) => {}
        }
        Ok(())
    }

    fn begin(&mut self, iteration: Iteration) {
        self.iteration = iteration;
        self.phase = Phase::Init;
        self.passes = [0; 2];
    }

    fn mark(&mut self, phase: &str) {
        if self.iteration == Iteration::Tail {
            return;
        }
        if let Some(backward) = backward_phase(phase) {
            let index = self.passes[usize::from(backward)];
            self.phase = Phase::Pass { backward, index };
            self.passes[usize::from(backward)] += 1;
            let most = &mut self.passes_max[usize::from(backward)];
            *most = (*most).max(index + 1);
        }
    }

    fn malloc(&mut self, block: BlockId) {
        let size_bytes = self.profile.trace.blocks[block.index()].size_bytes;
        let start = self.time;
        self.time += 1;
        if self.iteration == Iteration::Tail {
            return;
        }
        let malloc_id = (size_bytes > SMALL_BYTES).then_some(self.malloc_ids);
        self.malloc_ids += u64::from(size_bytes > SMALL_BYTES);
        let layer = self.stack.last().copied();
        self.live.insert(block, self.job.requests.len());
        self.job.requests.push(Request {
            malloc_id,
            size_bytes,
            start,
            end: u64::MAX,
            iteration: self.iteration,
            end_iteration: Iteration::Tail,
            phase: self.phase,
            end_phase: Phase::Init,
            layer,
            end_layer: None,
            class: Class::Small,
        });
    }

    fn free(&mut self, block: BlockId) {
        let end = self.time;
        self.time += 1;
        let Some(request) = self.live.remove(&block) else { return };
        let request = &mut self.job.requests[request];
        request.end = end;
        request.end_iteration = self.iteration;
        request.end_phase = self.phase;
        request.end_layer = self.stack.last().copied();
    }

    fn enter(&mut self, module: &str) {
        if self.iteration == Iteration::Tail {
            return;
        }
        let module = HookedModule::of_name(module);
        let Some(kind) = self.layer_kind(&module) else { return };
        let name = match kind {
            LabelKind::Moe { backward, id } => format!("moe-{}-{id}", pass(backward)),
            LabelKind::Mlp { backward, id } => format!("mlp-{}-{id}", pass(backward)),
            LabelKind::Other if is_shared(module.path) => "shared".to_owned(),
            LabelKind::Other => "topk_router".to_owned(),
        };
        if matches!(kind, LabelKind::Moe { .. }) {
            self.layer_id += 1;
        }
        let labels = &mut self.job.labels;
        let (iteration, phase) = (self.iteration, self.phase);
        let label = *self.label_ids.entry(name).or_insert_with_key(|name| {
            let (name, path) = (name.clone(), module.path.to_owned());
            labels.push(Label { name, kind, path, iteration, phase });
            labels.len() as u32 - 1
        });
        self.stack.push(label);
    }

    fn leave(&mut self, at: usize, module: &str) -> Result<(), SynthesisError> {
        let hooked = HookedModule::of_name(module);
        if self.iteration == Iteration::Tail || self.layer_kind(&hooked).is_none() {
            return Ok(());
        }
        if self.stack.pop().is_none() && self.faithful {
            return Err(Aborts::Unbalanced { event: at, module: module.to_owned() }.into());
        }
        Ok(())
    }

    /// What a module's layer is; nothing if it has none. The first rule that applies.
    fn layer_kind(&self, module: &HookedModule<'_>) -> Option<LabelKind> {
        let in_backward = matches!(self.phase, Phase::Pass { backward: true, .. });
        let backward = module.backward.unwrap_or(in_backward);
        if module.path.ends_with(".mlp") {
            Some(LabelKind::Moe { backward, id: self.layer_id })
        } else if is_shared(module.path) {
            Some(LabelKind::Other)
        } else if matches!(module.class, "ParallelMLP" | "SequentialMLP") {
            Some(LabelKind::Mlp { backward, id: self.layer_id - 1 })
        } else {
            module.class.contains("Router").then_some(LabelKind::Other)
        }
    }

    fn finish(mut self) -> Result<Job, SynthesisError> {
        if self.job.iteration_starts.is_empty() {
            return Err(SynthesisError::NoIteration);
        }
        let whole = self.iteration == Iteration::Tail;
        if !whole {
            self.job.end = self.time;
        }
        let [forward, backward] = self.passes_max;
        if self.faithful && forward != backward {
            return Err(Aborts::Passes { forward, backward }.into());
        }
        if !self.faithful {
            self.repeat_single();
            self.carry_over();
        }
        let never_freed = self.end_lives();
        self.classify()?;
        if whole && self.faithful {
            self.release_never_freed(&never_freed)?;
        }
        Ok(self.job)
    }

    /// A profile of one iteration is followed by the same once more, without what stays.
    fn repeat_single(&mut self) {
        if self.job.iteration_starts.len() != 1 {
            return;
        }
        let period = self.job.end - self.job.iteration_starts[0];
        let once_more = |request: &Request| Request {
            malloc_id: None,
            start: request.start + period,
            end: request.end + period,
            iteration: Iteration::Step(1),
            end_iteration: Iteration::Step(1),
            ..*request
        };
        let own = |request: &&Request| {
            (request.iteration, request.end_iteration) == (Iteration::Step(0), Iteration::Step(0))
        };
        let copies: Vec<Request> = self.job.requests.iter().filter(own).map(once_more).collect();
        // What happens after the iteration happens after both.
        for request in &mut self.job.requests {
            if request.end != u64::MAX && request.end >= self.job.end {
                request.end += period;
            }
        }
        self.job.requests.extend(copies);
        self.job.iteration_starts.push(self.job.end);
        self.job.end += period;
        self.time += period;
    }

    /// A request of the last iteration that is still live at a cut goes the way of its like in the
    /// iteration before: freed as far into the next one.
    fn carry_over(&mut self) {
        let starts = &self.job.iteration_starts;
        let [.., before, last] = starts[..] else { return };
        let period = last - before;
        let count = starts.len() as u32;
        let crossing = |request: &Request, from: u32| {
            request.iteration == Iteration::Step(from) && request.size_bytes > SMALL_BYTES
        };
        let key = |request: &Request| (request.size_bytes, request.phase);
        let mut models: BTreeMap<_, std::collections::VecDeque<u64>> = BTreeMap::new();
        for request in self.job.requests.iter().filter(|request| crossing(request, count - 2)) {
            if request.end_iteration == Iteration::Step(count - 1) {
                models.entry(key(request)).or_default().push_back(request.end);
            }
        }
        for request in &mut self.job.requests {
            if crossing(request, count - 1)
                && request.end == u64::MAX
                && let Some(end) = models.get_mut(&key(request)).and_then(|ends| ends.pop_front())
            {
                request.end = end + period;
                self.time = self.time.max(request.end + 1);
            }
        }
    }

    /// What is still live is freed at the end, in the order of allocation. Gives those requests.
    fn end_lives(&mut self) -> Vec<usize> {
        let mut never_freed = Vec::new();
        for (at, request) in self.job.requests.iter_mut().enumerate() {
            if request.end == u64::MAX {
                request.end = self.time;
                self.time += 1;
                never_freed.push(at);
            }
        }
        never_freed
    }

    fn classify(&mut self) -> Result<(), SynthesisError> {
        for request in &mut self.job.requests {
            let layer = request.layer.map(|layer| self.job.labels[layer as usize].kind);
            request.class = class_of(request, layer);
            let crosses = request.iteration != request.end_iteration;
            if request.class == Class::DynamicMlp && crosses && self.faithful {
                return Err(Aborts::ExpertCrosses { start: request.start }.into());
            }
        }
        Ok(())
    }

    /// Whole runs of the tool leave what is never freed to the caching allocator, if it is little
    /// and of the first iteration.
    fn release_never_freed(&mut self, never_freed: &[usize]) -> Result<(), SynthesisError> {
        let mut bytes = 0u64;
        for &at in never_freed {
            let request = &mut self.job.requests[at];
            if request.size_bytes <= SMALL_BYTES {
                continue;
            }
            if request.iteration != Iteration::Step(0) {
                return Err(Aborts::NeverFreed { start: request.start }.into());
            }
            request.class = Class::Unreleased;
            bytes = bytes.saturating_add(request.size_bytes);
        }
        if bytes > UNRELEASED_BYTES_MAX {
            return Err(Aborts::UnreleasedBytes { bytes }.into());
        }
        Ok(())
    }
}

fn pass(backward: bool) -> char {
    if backward { 'B' } else { 'F' }
}

fn is_shared(path: &str) -> bool {
    path.ends_with(".shared_expert") || path.ends_with(".shared_experts")
}

/// The first class that applies.
fn class_of(request: &Request, layer: Option<LabelKind>) -> Class {
    use Iteration::{Head, Step, Tail};
    match (layer, request.iteration, request.end_iteration) {
        _ if request.size_bytes <= SMALL_BYTES => Class::Small,
        (Some(LabelKind::Mlp { .. }), ..) => Class::DynamicMlp,
        (Some(LabelKind::Moe { .. }), ..) => Class::DynamicMoe,
        (_, Head, Step(_)) => Class::Unreleased,
        (_, Head, Tail) => Class::Weight,
        (_, Head, Head) => Class::Init,
        (_, Step(0), Tail) => Class::Optimizer,
        _ if request.phase == request.end_phase => Class::Transient,
        _ => Class::Scoped,
    }
}

/// The most that requests take at once, each at its rounded size.
pub(super) fn peak_bytes<'a>(requests: impl Iterator<Item = &'a Request>) -> u64 {
    let mut changes: Vec<(u64, bool, u64)> = Vec::new();
    for request in requests {
        let bytes = rounded(request.size_bytes);
        changes.push((request.start, true, bytes));
        changes.push((request.end, false, bytes));
    }
    // Frees first, should a free and a malloc share a time.
    changes.sort_unstable();
    let (mut live, mut peak) = (0u64, 0);
    for (_, starts, bytes) in changes {
        live = if starts { live.saturating_add(bytes) } else { live.saturating_sub(bytes) };
        peak = peak.max(live);
    }
    peak
}
