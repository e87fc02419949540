//! A small autograd: operations leave nodes behind, a backward pass runs them in reverse.
//!
//! It moves no numbers, only sizes, but it follows PyTorch's rules of lifetime, since those decide
//! what is live when:
//!
//! - a node holds what its operation saved until it has run, then lets go;
//! - a node's function first lets go of what was copied or computed again for it, then of its
//!   gradients, then of what it saved;
//! - the gradient that arrives first at a node's output is kept as it is, the next one is added in
//!   place if nobody else holds the first and it is no view, else into new memory;
//! - the first gradient of a parameter becomes its `.grad`, later ones are added to it in place;
//! - hooks on saved values may put something else in their place: a copy on the host
//!   (`save_on_cpu`), or nothing at all, to be computed again (non-reentrant checkpointing, which
//!   stops once the last saved value is there).
//!
//! ```text
//!   forward    x ── node 0 ──> a ── node 1 ──> b ── node 2 ──> loss
//!                    │ saved          │ saved
//!   backward   grads <── node 0 <───── node 1 <───── node 2 <── 1
//! ```

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::autocast::Autocast;
use super::ddp::FirstBucket;
use super::emitter::{SharedEmitter, Tensor, named_tensor, part, tensor};
use super::gpu::Gpu;
use crate::trace::{Direction, HookedModule, Role};
use crate::units::ModuleId;

/// Which output of which node a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Edge {
    node: usize,
    output: usize,
}

/// A value of the program: memory, and where its gradient goes.
#[derive(Clone, Debug)]
pub(super) struct Var {
    /// Its memory.
    pub(super) tensor: Tensor,
    /// Number of elements.
    pub(super) elements: u64,
    edge: Option<Edge>,
}

impl Var {
    /// A value that needs no gradient.
    pub(super) fn constant(tensor: Tensor, elements: u64) -> Var {
        Var { tensor, elements, edge: None }
    }

    /// Whether a gradient flows back through it.
    pub(super) fn needs_grad(&self) -> bool {
        self.edge.is_some()
    }

    /// Its size in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.tensor.bytes()
    }
}

/// A parameter on this rank.
#[derive(Debug)]
pub(super) struct Param {
    /// Its name.
    pub(super) name: String,
    /// Elements of the whole parameter.
    pub(super) elements: u64,
    /// Elements of this rank's share, where it holds no more.
    pub(super) share_elements: Cell<Option<u64>>,
    /// It is trained.
    pub(super) trainable: bool,
    /// What this rank holds of it for good: all of it, or a share. Nothing if it is on the host.
    pub(super) held: RefCell<Option<Tensor>>,
    /// What operations read, where that is another memory than `held`: gathered from all ranks.
    pub(super) gathered: RefCell<Option<Tensor>>,
    /// Its gradient, while there is one.
    pub(super) grad: RefCell<Option<Tensor>>,
}

impl Param {
    /// The memory that operations read.
    pub(super) fn tensor(&self) -> Option<Tensor> {
        self.gathered.borrow().clone().or_else(|| self.held.borrow().clone())
    }

    /// Elements of the gradient that the optimizer sees: of this rank's share.
    pub(super) fn grad_elements(&self) -> u64 {
        self.share_elements.get().unwrap_or(self.elements)
    }
}

/// A reference to a parameter.
pub(super) type ParamRef = Rc<Param>;

/// What a node kept of a value.
pub(super) enum Saved {
    /// The value.
    Here(Tensor),
    /// A copy on the host, of so many bytes.
    OnHost(u64),
    /// A parameter that is gathered again before it is used again.
    Gathered(ParamRef),
    /// Nothing; it is the k-th saved value of a region that is computed again.
    Again(Rc<RefCell<Region>>, usize),
}

/// A checkpointed region: what it saved, once it was computed again.
#[derive(Default)]
pub(super) struct Region {
    /// Values that it saved in the forward pass.
    count: usize,
    /// The values, each taken once.
    values: Vec<Option<Tensor>>,
    /// Runs it again; taken when that is done.
    again: Option<Again>,
    /// What it runs and its inputs, which live until the last of its nodes has run.
    _body: Option<Rc<RegionBody>>,
    inputs: Vec<Var>,
}

/// What runs in a region.
type RegionBody = dyn Fn(&mut Cx, &[Var]) -> Var;

/// What a node saved, while it runs. Dropped, it lets go of that, in the order in which it was
/// saved: pass values in the order of their names in PyTorch's node.
pub(super) struct Unpacked {
    values: Vec<Tensor>,
    /// Whether each was made for this node's run.
    fresh: Vec<bool>,
    /// Regions that live until the last node that saved something in them has run.
    regions: Vec<Rc<RefCell<Region>>>,
}

impl Unpacked {
    /// The node's function returns: what was made for its run goes, the last first.
    fn returned(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        let mut kept = Vec::new();
        for fresh in std::mem::take(&mut self.fresh).into_iter().rev() {
            let value = self.values.pop();
            if !fresh {
                kept.extend(value);
            }
        }
        kept.reverse();
        self.values = kept;
    }

    /// The node has run: what was made for its run goes, then its gradients, then what it saved.
    pub(super) fn done(mut self, grads: Vec<Option<Tensor>>) {
        self.returned();
        drop(grads);
        drop(self.values);
        drop(self.regions);
    }

    /// As [`Self::done`], with `made` done after the function has returned and before its
    /// gradients go, as the engine reduces broadcast gradients.
    pub(super) fn done_after<R>(
        mut self,
        grads: Vec<Option<Tensor>>,
        made: impl FnOnce() -> R,
    ) -> R {
        self.returned();
        let result = made();
        self.done(grads);
        result
    }
}

/// Runs a region again.
type Again = Box<dyn FnOnce(&mut Cx)>;

/// What a node does with the gradients of its outputs: it gives those of its inputs.
type Backward = Box<dyn FnOnce(&mut Cx, Vec<Option<Tensor>>) -> Vec<Option<Tensor>>>;

struct Node {
    /// Where the gradients of the inputs go, one each.
    inputs: Vec<Option<Edge>>,
    /// Gradients that have arrived, one an output.
    grads: Vec<Option<Tensor>>,
    backward: Option<Backward>,
    /// Modules it was made in, outermost first.
    modules: Rc<[usize]>,
}

/// The nodes of one forward pass.
#[derive(Default)]
pub(super) struct Graph {
    nodes: Vec<Node>,
}

/// What becomes of values that autograd saves.
enum SaveMode {
    /// They are kept.
    Keep,
    /// They are copied to the host.
    Host,
    /// Only counted.
    Count(Rc<RefCell<Region>>),
    /// Kept for a region that runs again.
    Collect(Rc<RefCell<Region>>),
}

/// A module that can be entered.
struct Module {
    path: String,
    forward: ModuleId,
    backward: ModuleId,
    /// Its own parameters, accessed whenever it is entered.
    params: Vec<ParamRef>,
}

/// Something that runs when modules are entered and left, as FSDP's hooks do.
pub(super) trait ModuleHooks {
    /// A module is about to run.
    fn entered(&mut self, cx: &mut Cx, path: &str, backward: bool);
    /// It has run.
    fn left(&mut self, cx: &mut Cx, path: &str, backward: bool);
    /// A gradient of a parameter is there. Gives it back if the parameter is to have it.
    fn gradient(&mut self, cx: &mut Cx, param: &ParamRef, grad: Tensor) -> Option<Tensor>;
    /// The whole model begins or ends something.
    fn reached(&mut self, cx: &mut Cx, boundary: Boundary);
}

/// Where the whole model begins or ends something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// Its forward pass is about to run.
    ForwardBegins,
    /// It has run.
    ForwardEnds,
    /// The gradient of its output is there.
    BackwardBegins,
    /// Its backward pass has run.
    BackwardEnds,
    /// Gradients are about to be used.
    Update,
    /// Weights are new.
    Updated,
}

/// Speeds of the device, for the clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// Floating-point operations a second.
    pub(super) flops: f64,
    /// Bytes a second of element-wise operations.
    pub(super) memory_bytes_per_s: f64,
    /// Bytes a second between host and device.
    pub(super) link_bytes_per_s: f64,
    /// Bytes a second between devices.
    pub(super) peer_bytes_per_s: f64,
}

/// Workspace that PyTorch gives cuBLASLt for each thread and stream.
const CUBLAS_LT_WORKSPACE_BYTES: u64 = 1 << 20;

/// Time between the starts of two short kernels.
const LAUNCH_NS: f64 = 4_000.0;

/// The program under way.
pub(super) struct Cx {
    /// The trace.
    pub(super) emitter: SharedEmitter,
    /// The forward pass that operations belong to.
    pub(super) graph: Graph,
    /// Speeds.
    pub(super) speeds: Speeds,
    /// What else happens at modules.
    pub(super) hooks: Option<Box<dyn ModuleHooks>>,
    /// Gradients of parameters go to the host as they are made.
    pub(super) gradients_to_host: bool,
    /// Facts about the GPU.
    pub(super) gpu: Gpu,
    /// Draws of what varies from layer to layer.
    pub(super) draws: u64,
    /// Casts that are in force.
    pub(super) autocast: Autocast,
    /// Where gradients are summed over ranks at first.
    pub(super) first_bucket: Option<FirstBucket>,
    /// Inputs of checkpointed regions go to the host.
    pub(super) checkpoints_to_host: bool,
    /// Workspaces of cuBLASLt by thread and stream.
    cublas_lt_workspaces: BTreeMap<(bool, u64), Tensor>,
    /// Memory of the model that is no parameter.
    pub(super) buffers: Vec<Tensor>,
    /// Leaves of the graph that are no parameters, and their gradients.
    leaves: Vec<Tensor>,
    leaf_grads: Vec<Tensor>,
    /// Workspaces of cuBLAS by thread (autograd's own?) and stream.
    cublas_workspaces: BTreeMap<(bool, u64), Tensor>,
    /// Autograd's thread runs.
    autograd_thread: bool,
    modules: Vec<Module>,
    module_of_path: HashMap<String, usize>,
    stack: Vec<usize>,
    params: Vec<ParamRef>,
    param_of_name: HashMap<String, ParamRef>,
    save_mode: SaveMode,
    /// Operations leave nodes behind.
    grad_enabled: bool,
    /// A backward pass runs.
    in_backward: bool,
}

impl Cx {
    /// A program that has not begun.
    pub(super) fn new(emitter: SharedEmitter, speeds: Speeds, gpu: Gpu) -> Cx {
        Cx {
            emitter,
            graph: Graph::default(),
            speeds,
            hooks: None,
            gradients_to_host: false,
            gpu,
            draws: 0,
            autocast: Autocast::default(),
            first_bucket: None,
            checkpoints_to_host: false,
            cublas_lt_workspaces: BTreeMap::new(),
            buffers: Vec::new(),
            leaves: Vec::new(),
            leaf_grads: Vec::new(),
            cublas_workspaces: BTreeMap::new(),
            autograd_thread: false,
            modules: Vec::new(),
            module_of_path: HashMap::new(),
            stack: Vec::new(),
            params: Vec::new(),
            param_of_name: HashMap::new(),
            save_mode: SaveMode::Keep,
            grad_enabled: true,
            in_backward: false,
        }
    }

    /// Adds a parameter that holds `held_bytes` on this device (0: none).
    pub(super) fn add_param(
        &mut self,
        module: &str,
        name: &str,
        elements: u64,
        trainable: bool,
        held_bytes: u64,
    ) -> ParamRef {
        let held = (held_bytes > 0).then(|| named_tensor(&self.emitter, name, held_bytes));
        let param = Rc::new(Param {
            name: name.to_owned(),
            elements,
            share_elements: Cell::new(None),
            trainable,
            held: RefCell::new(held),
            gathered: RefCell::new(None),
            grad: RefCell::new(None),
        });
        self.params.push(Rc::clone(&param));
        self.param_of_name.insert(name.to_owned(), Rc::clone(&param));
        let module = self.module_index(module, "");
        self.modules[module].params.push(Rc::clone(&param));
        param
    }

    /// Every parameter, in order of construction.
    pub(super) fn params(&self) -> Vec<ParamRef> {
        self.params.clone()
    }

    /// The parameter of that name.
    pub(super) fn param(&self, name: &str) -> Option<ParamRef> {
        self.param_of_name.get(name).cloned()
    }

    fn module_index(&mut self, path: &str, class: &str) -> usize {
        let next = self.modules.len();
        let index = *self.module_of_path.entry(path.to_owned()).or_insert(next);
        if index == next {
            let none = ModuleId::NONE;
            let path = path.to_owned();
            self.modules.push(Module { path, forward: none, backward: none, params: Vec::new() });
        }
        let module = &mut self.modules[index];
        if !class.is_empty() && module.forward.is_none() {
            let mut emitter = self.emitter.borrow_mut();
            let mut id = |backward| {
                let name = HookedModule { path, class, backward: Some(backward) }.name();
                emitter.module(&name, path)
            };
            (module.forward, module.backward) = (id(false), id(true));
        }
        index
    }

    /// Runs a module's forward pass: enters it, accesses its own parameters, leaves it.
    pub(super) fn module<R>(
        &mut self,
        path: &str,
        class: &str,
        body: impl FnOnce(&mut Cx) -> R,
    ) -> R {
        let index = self.module_index(path, class);
        // A recomputation runs inside the backward pass of the same modules.
        self.enter(index, false);
        self.stack.push(index);
        let result = body(self);
        self.stack.pop();
        self.leave(index, false);
        result
    }

    fn enter(&mut self, index: usize, backward: bool) {
        let module = &self.modules[index];
        let id = if backward { module.backward } else { module.forward };
        self.emitter.borrow_mut().enter(id);
        // Hooks may gather what is then accessed.
        self.run_hooks(index, |hooks, cx, path| hooks.entered(cx, path, backward));
        let mut emitter = self.emitter.borrow_mut();
        for param in &self.modules[index].params {
            if let Some(held) = &*param.held.borrow() {
                emitter.access(held.block());
            }
        }
    }

    fn leave(&mut self, index: usize, backward: bool) {
        self.run_hooks(index, |hooks, cx, path| hooks.left(cx, path, backward));
        let module = &self.modules[index];
        let id = if backward { module.backward } else { module.forward };
        self.emitter.borrow_mut().leave(id);
    }

    fn run_hooks(
        &mut self,
        index: usize,
        run: impl FnOnce(&mut Box<dyn ModuleHooks>, &mut Cx, &str),
    ) {
        if self.emitter.borrow().muted() {
            return;
        }
        if let Some(mut hooks) = self.hooks.take() {
            let path = self.modules[index].path.clone();
            run(&mut hooks, self, &path);
            self.hooks = Some(hooks);
        }
    }

    /// The innermost module that runs.
    fn current_module(&self) -> Option<ModuleId> {
        let module = &self.modules[*self.stack.last()?];
        Some(if self.in_backward { module.backward } else { module.forward })
    }

    /// New memory of an operation. What it holds shows later: an activation if it is saved.
    pub(super) fn new_tensor(&mut self, op: &'static str, bytes: u64) -> Tensor {
        self.new_tensor_of(op, bytes, Role::Temporary)
    }

    /// New memory that holds this.
    pub(super) fn new_tensor_of(&mut self, op: &'static str, bytes: u64, role: Role) -> Tensor {
        tensor(&self.emitter, op, self.current_module(), bytes, role)
    }

    /// A matrix product is about to run: cuBLAS gets a workspace of its own for each thread and
    /// stream that uses it, for good.
    pub(super) fn cublas(&mut self) {
        let key = (self.autograd_thread, self.emitter.borrow().stream_handle());
        if self.emitter.borrow().muted() || self.cublas_workspaces.contains_key(&key) {
            return;
        }
        let workspace = self.new_tensor("cublas_workspace", self.gpu.cublas_workspace_bytes);
        self.cublas_workspaces.insert(key, workspace);
    }

    /// A matrix product with a bias is about to run: cuBLASLt gets a workspace of its own beside
    /// that of cuBLAS.
    pub(super) fn cublas_lt(&mut self) {
        self.cublas();
        let key = (self.autograd_thread, self.emitter.borrow().stream_handle());
        if self.emitter.borrow().muted() || self.cublas_lt_workspaces.contains_key(&key) {
            return;
        }
        let workspace = self.new_tensor("cublas_lt_workspace", CUBLAS_LT_WORKSPACE_BYTES);
        self.cublas_lt_workspaces.insert(key, workspace);
    }

    /// A parameter of another module is used.
    pub(super) fn access_param(&mut self, param: &ParamRef) {
        if let Some(held) = &*param.held.borrow() {
            self.emitter.borrow_mut().access(held.block());
        }
    }

    /// A part of a value, as a view.
    pub(super) fn part(&self, of: &Tensor, bytes: u64) -> Tensor {
        part(&self.emitter, of, bytes)
    }

    /// Whether saved values go to the host.
    pub(super) fn saves_on_host(&self) -> bool {
        matches!(self.save_mode, SaveMode::Host)
    }

    /// A value that becomes a leaf which wants a gradient, as `requires_grad_` makes one. The
    /// gradient stays with it until [`Self::drop_leaves`].
    pub(super) fn leaf(&mut self, value: &Var) -> Var {
        let (tensor, elements) = (Rc::clone(&value.tensor), value.elements);
        self.leaves.push(Rc::clone(&tensor));
        let [leaf] = self.node(&[], true, [(tensor, elements)], |_| {
            Box::new(|cx, grads| {
                cx.leaf_grads.extend(grads.into_iter().flatten());
                Vec::new()
            })
        });
        leaf
    }

    /// A backward pass has gone: so do its leaves, gradients first.
    pub(super) fn drop_leaves(&mut self) {
        self.leaf_grads.clear();
        self.leaves.clear();
    }

    /// Workspace of an operation: asked for and freed at once.
    pub(super) fn workspace(&mut self, op: &'static str, bytes: u64) {
        drop(self.new_tensor(op, bytes));
    }

    /// An operation of so many floating-point operations that moves so many bytes runs.
    pub(super) fn compute(&mut self, flops: f64, bytes: f64) {
        let seconds = (flops / self.speeds.flops).max(bytes / self.speeds.memory_bytes_per_s);
        self.emitter.borrow_mut().pass((seconds * 1e9 + LAUNCH_NS) as u64);
    }

    /// Moves bytes between host and device and waits.
    pub(super) fn transfer(&mut self, bytes: u64, direction: Direction) {
        let mut emitter = self.emitter.borrow_mut();
        emitter.transfer(bytes, direction);
        emitter.pass((bytes as f64 / self.speeds.link_bytes_per_s * 1e9 + LAUNCH_NS) as u64);
    }

    /// A collective in which this rank receives so many bytes.
    pub(super) fn receive(&mut self, bytes: u64) {
        let ns = bytes as f64 / self.speeds.peer_bytes_per_s * 1e9 + LAUNCH_NS;
        self.emitter.borrow_mut().pass(ns as u64);
    }

    /// Runs something whose operations leave no nodes behind, as under `torch.no_grad`.
    pub(super) fn no_grad<R>(&mut self, body: impl FnOnce(&mut Cx) -> R) -> R {
        let before = std::mem::replace(&mut self.grad_enabled, false);
        let result = body(self);
        self.grad_enabled = before;
        result
    }

    /// Runs something whose saved values go to the host, as under `save_on_cpu`.
    pub(super) fn saved_on_host<R>(&mut self, body: impl FnOnce(&mut Cx) -> R) -> R {
        let before = std::mem::replace(&mut self.save_mode, SaveMode::Host);
        let result = body(self);
        self.save_mode = before;
        result
    }

    /// Whether an operation on these inputs leaves a node behind, so that it saves something.
    pub(super) fn wanted(&self, inputs: &[&Var], also_needed: bool) -> bool {
        self.grad_enabled && (also_needed || inputs.iter().any(|input| input.needs_grad()))
    }

    /// Keeps a value for the backward pass, in the way that is in force. Call it once for every
    /// value that PyTorch's node saves, and only if the operation leaves a node behind.
    pub(super) fn save(&mut self, value: &Tensor) -> Saved {
        match &self.save_mode {
            SaveMode::Keep => {
                value.holds(Role::Activation);
                Saved::Here(Rc::clone(value))
            }
            SaveMode::Host => {
                let bytes = value.bytes();
                self.transfer(bytes, Direction::DeviceToHost);
                Saved::OnHost(bytes)
            }
            SaveMode::Count(region) => {
                let region = Rc::clone(region);
                let index = region.borrow().count;
                region.borrow_mut().count += 1;
                Saved::Again(region, index)
            }
            SaveMode::Collect(region) => {
                value.holds(Role::Activation);
                let region = Rc::clone(region);
                let mut collected = region.borrow_mut();
                collected.values.push(Some(Rc::clone(value)));
                // PyTorch stops here: whatever follows in the region is not run again.
                if collected.values.len() == collected.count {
                    self.emitter.borrow_mut().mute();
                }
                Saved::Here(Rc::clone(value))
            }
        }
    }

    /// Keeps values in the way that is in force, if a node is left behind at all. Call it where
    /// PyTorch saves: inputs before the operation runs, outputs after.
    pub(super) fn save_if(&mut self, wanted: bool, values: &[&Tensor]) -> Vec<Saved> {
        if !wanted {
            return Vec::new();
        }
        values.iter().map(|value| self.save(value)).collect()
    }

    /// Keeps a parameter, which [`Self::save`] would keep gathered.
    pub(super) fn save_param(&mut self, param: &ParamRef) -> Option<Saved> {
        let gathered = param.gathered.borrow().is_some();
        if gathered && matches!(self.save_mode, SaveMode::Keep) {
            return Some(Saved::Gathered(Rc::clone(param)));
        }
        let value = param.tensor()?;
        Some(self.save(&value))
    }

    /// Gives back what a node saved.
    pub(super) fn unpack_all(&mut self, saved: Vec<Saved>) -> Unpacked {
        let mut unpacked = Unpacked { values: Vec::new(), fresh: Vec::new(), regions: Vec::new() };
        for saved in saved {
            unpacked.fresh.push(!matches!(saved, Saved::Here(_)));
            if let Saved::Again(region, _) = &saved {
                unpacked.regions.push(Rc::clone(region));
            }
            let value = self.unpack(saved);
            unpacked.values.push(value);
        }
        unpacked
    }

    /// Gives a saved value back: as it was, copied from the host, or computed again.
    pub(super) fn unpack(&mut self, saved: Saved) -> Tensor {
        match saved {
            Saved::Here(value) => value,
            Saved::Gathered(param) => {
                param.tensor().unwrap_or_else(|| self.new_tensor("unpack", 0))
            }
            Saved::OnHost(bytes) => {
                let value = self.new_tensor_of("unpack", bytes, Role::Activation);
                self.transfer(bytes, Direction::HostToDevice);
                value
            }
            Saved::Again(region, index) => {
                let again = region.borrow_mut().again.take();
                if let Some(again) = again {
                    again(self);
                }
                let value = region.borrow_mut().values.get_mut(index).and_then(Option::take);
                value.unwrap_or_else(|| self.new_tensor("unpack", 0))
            }
        }
    }

    /// Runs a region without keeping what it saves; the backward pass runs it again. `inputs` are
    /// kept.
    pub(super) fn checkpoint(
        &mut self,
        inputs: Vec<Var>,
        body: impl Fn(&mut Cx, &[Var]) -> Var + 'static,
    ) -> Var {
        let offload = self.checkpoints_to_host || self.saves_on_host();
        for input in &inputs {
            input.tensor.holds(Role::Checkpoint);
        }
        let body: Rc<RegionBody> = Rc::new(body);
        let region = Region { _body: Some(Rc::clone(&body)), ..Region::default() };
        let region = Rc::new(RefCell::new(region));
        let before = std::mem::replace(&mut self.save_mode, SaveMode::Count(Rc::clone(&region)));
        let output = body(self, &inputs);
        self.save_mode = before;
        let kept: Vec<Kept> = inputs
            .into_iter()
            .map(|input| if offload { self.send_input(&input) } else { Kept::Here(input) })
            .collect();
        let modules: Rc<[usize]> = self.stack.as_slice().into();
        let weak = Rc::downgrade(&region);
        let again = move |cx: &mut Cx| {
            let Some(region) = weak.upgrade() else { return };
            let inputs: Vec<Var> = kept.into_iter().map(|kept| cx.fetch_input(kept)).collect();
            cx.run_again(&region, &modules, |cx| drop(body(cx, &inputs)));
            region.borrow_mut().inputs = inputs;
        };
        region.borrow_mut().again = Some(Box::new(again));
        output
    }

    fn send_input(&mut self, input: &Var) -> Kept {
        self.transfer(input.bytes(), Direction::DeviceToHost);
        Kept::OnHost { bytes: input.bytes(), elements: input.elements, edge: input.edge }
    }

    fn fetch_input(&mut self, kept: Kept) -> Var {
        match kept {
            Kept::Here(input) => input,
            Kept::OnHost { bytes, elements, edge } => {
                let tensor = self.new_tensor_of("unpack", bytes, Role::Checkpoint);
                self.transfer(bytes, Direction::HostToDevice);
                Var { tensor, elements, edge }
            }
        }
    }

    /// Runs a region again inside the backward pass. The nodes that it leaves behind are dropped.
    fn run_again(
        &mut self,
        region: &Rc<RefCell<Region>>,
        modules: &[usize],
        body: impl FnOnce(&mut Cx),
    ) {
        let mode = SaveMode::Collect(Rc::clone(region));
        let mode = std::mem::replace(&mut self.save_mode, mode);
        let graph = std::mem::take(&mut self.graph);
        let stack = std::mem::replace(&mut self.stack, modules.to_vec());
        let grad_enabled = std::mem::replace(&mut self.grad_enabled, true);
        let in_backward = std::mem::replace(&mut self.in_backward, false);
        let nothing_to_save = region.borrow().count == 0;
        if !nothing_to_save {
            body(self);
            let stopped = self.emitter.borrow().muted();
            if stopped {
                self.emitter.borrow_mut().unmute();
            }
        }
        (self.save_mode, self.graph, self.stack) = (mode, graph, stack);
        (self.grad_enabled, self.in_backward) = (grad_enabled, in_backward);
    }

    /// A value that an operation made of `inputs`. `backward` gets the gradients of its outputs and
    /// gives those of the inputs, one each, none where none is wanted; it is only kept if a
    /// gradient is wanted at all. `make` saves what is saved and builds it.
    pub(super) fn node<const OUTPUTS: usize>(
        &mut self,
        inputs: &[&Var],
        also_needed: bool,
        outputs: [(Tensor, u64); OUTPUTS],
        make: impl FnOnce(&mut Cx) -> Backward,
    ) -> [Var; OUTPUTS] {
        if !self.wanted(inputs, also_needed) {
            return outputs.map(|(tensor, elements)| Var { tensor, elements, edge: None });
        }
        let backward = make(self);
        let node = self.graph.nodes.len();
        self.graph.nodes.push(Node {
            inputs: inputs.iter().map(|input| input.edge).collect(),
            grads: vec![None; OUTPUTS],
            backward: Some(backward),
            modules: self.stack.as_slice().into(),
        });
        let mut output = 0;
        outputs.map(|(tensor, elements)| {
            let edge = Some(Edge { node, output });
            output += 1;
            Var { tensor, elements, edge }
        })
    }

    /// A parameter holds this many bytes on the device from here on.
    pub(super) fn hold(&mut self, param: &ParamRef, bytes: u64) {
        let held = named_tensor(&self.emitter, &param.name, bytes);
        *param.held.borrow_mut() = Some(held);
    }

    /// A region runs again inside a backward pass.
    pub(super) fn runs_again(&self) -> bool {
        self.autograd_thread
    }

    /// Tells the hooks that the whole model begins or ends something.
    pub(super) fn reach(&mut self, boundary: Boundary) {
        if let Some(mut hooks) = self.hooks.take() {
            hooks.reached(self, boundary);
            self.hooks = Some(hooks);
        }
    }

    /// The output of the whole model: the hooks are told when its gradient is there.
    pub(super) fn output(&mut self, value: Var) -> Var {
        self.reach(Boundary::ForwardEnds);
        if self.hooks.is_none() {
            return value;
        }
        let same = [(Rc::clone(&value.tensor), value.elements)];
        let [output] = self.node(&[&value], false, same, |_| {
            Box::new(|cx, grads| {
                cx.reach(Boundary::BackwardBegins);
                grads
            })
        });
        output
    }

    /// The gradient of a parameter is there.
    pub(super) fn accumulate(&mut self, param: &ParamRef, mut grad: Tensor) {
        if let Some(mut hooks) = self.hooks.take() {
            let left = hooks.gradient(self, param, grad);
            self.hooks = Some(hooks);
            let Some(left) = left else { return };
            grad = left;
        }
        if let Some(first) = &mut self.first_bucket {
            first.sizes.push(grad.bytes());
        }
        if self.gradients_to_host {
            grad.holds(Role::Gradient);
            self.transfer(grad.bytes(), Direction::DeviceToHost);
            return;
        }
        let mut held = param.grad.borrow_mut();
        match &*held {
            // Added in place; the new one goes.
            Some(_) => self.compute(0.0, 3.0 * grad.bytes() as f64),
            None => {
                grad.holds(Role::Gradient);
                *held = Some(grad);
            }
        }
    }

    /// Runs the backward pass of a graph from one of its values, which gets this gradient.
    pub(super) fn backward(&mut self, mut graph: Graph, from: &Var, grad: Tensor) {
        let Some(edge) = from.edge else { return };
        graph.nodes[edge.node].grads[edge.output] = Some(grad);
        let forward_stack = std::mem::take(&mut self.stack);
        self.in_backward = true;
        self.autograd_thread = true;
        while let Some(node) = graph.nodes.pop() {
            let Node { inputs, grads, backward, modules } = node;
            if grads.iter().all(Option::is_none) {
                continue;
            }
            self.move_to(&modules);
            let Some(backward) = backward else { continue };
            let before = std::mem::replace(&mut self.grad_enabled, false);
            let input_grads = backward(self, grads);
            self.grad_enabled = before;
            for (input, grad) in inputs.into_iter().zip(input_grads) {
                let (Some(edge), Some(grad)) = (input, grad) else { continue };
                self.arrive(&mut graph.nodes[edge.node].grads[edge.output], grad);
            }
        }
        self.move_to(&[]);
        self.in_backward = false;
        self.autograd_thread = false;
        self.stack = forward_stack;
    }

    /// A gradient arrives where one may be already.
    fn arrive(&mut self, slot: &mut Option<Tensor>, grad: Tensor) {
        *slot = match slot.take() {
            None => Some(grad),
            Some(earlier) => {
                self.compute(0.0, 3.0 * grad.bytes() as f64);
                if Rc::strong_count(&earlier) == 1 && !earlier.is_view() {
                    Some(earlier)
                } else {
                    Some(self.new_tensor("accumulate", grad.bytes().max(earlier.bytes())))
                }
            }
        };
    }

    /// Leaves and enters modules until the backward pass is inside these.
    fn move_to(&mut self, modules: &[usize]) {
        let common = self.stack.iter().zip(modules).take_while(|(a, b)| a == b).count();
        while self.stack.len() > common {
            let index = self.stack.len() - 1;
            self.leave(self.stack[index], true);
            self.stack.pop();
        }
        for &module in &modules[common..] {
            self.enter(module, true);
            self.stack.push(module);
        }
    }
}

/// An input of a checkpointed region.
enum Kept {
    Here(Var),
    OnHost { bytes: u64, elements: u64, edge: Option<Edge> },
}
