//! Writes the trace: blocks, events, times. Tensors free themselves.
//!
//! The one design decision: a [`Tensor`] is a counted reference, and the block behind it is freed
//! when the last one goes, as in PyTorch. The models in this room then read like the programs they
//! stand for: what a function holds in a local variable lives as long as that function, what
//! autograd saved lives until its node has run, and nobody writes down a `free`.
//!
//! ```text
//!   Tensor ──┐
//!   Saved  ──┼─ Rc ──> Storage ── drop ──> Emitter: `free(block)` at the clock's time
//!   Param  ──┘
//! ```

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use crate::trace::{Block, Direction, Event, Frame, Op, Role, SourceKind, Stream, Trace, Transfer};
use crate::units::{BlockId, FrameId, ModuleId, NameId, PhaseId, SiteId, StreamId, TransferId};

/// The trace that is being written, shared by all tensors.
pub(super) type SharedEmitter = Rc<RefCell<Emitter>>;

/// Memory on the device; freed with its last reference. Empty ones have none.
pub(super) type Tensor = Rc<Storage>;

/// A block of the trace, freed when this goes.
#[derive(Debug)]
pub(super) struct Storage {
    block: BlockId,
    bytes: u64,
    view: Cell<bool>,
    /// What it is a part of: that owns the block.
    part_of: Option<Tensor>,
    emitter: SharedEmitter,
}

impl Storage {
    /// From here on it is known through a view only, as a reshaped gradient is. PyTorch's views
    /// hold the tensor that they look into, so that nothing is added to them in place.
    pub(super) fn becomes_view(&self) {
        self.view.set(true);
    }

    /// Whether it is known through a view.
    pub(super) fn is_view(&self) -> bool {
        self.view.get()
    }

    /// Its size in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its block; [`BlockId::NONE`] if it has none.
    pub(super) fn block(&self) -> BlockId {
        self.part_of.as_ref().map_or(self.block, |whole| whole.block())
    }

    /// Says what it holds, unless that is said already by more than `temporary`.
    pub(super) fn holds(&self, role: Role) {
        if let Some(block) = self.block().some() {
            let mut emitter = self.emitter.borrow_mut();
            let known = &mut emitter.trace.blocks[block.index()].role;
            if *known == Role::Temporary {
                *known = role;
            }
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(block) = self.block.some() {
            self.emitter.borrow_mut().push(Op::Free(block));
        }
    }
}

/// The writer.
#[derive(Debug)]
pub(super) struct Emitter {
    trace: Trace,
    /// Nanoseconds since the start.
    clock_ns: u64,
    stream: StreamId,
    /// Nothing is written while above 0: what runs is not run by the program.
    muted: u32,
    /// Of each module that is entered: whether that was written.
    entered: Vec<bool>,
    phases: HashMap<String, PhaseId>,
    modules: HashMap<String, ModuleId>,
    transfers: HashMap<(u64, bool), TransferId>,
    frames: HashMap<(&'static str, ModuleId), SiteId>,
    /// Names of the modules by path only, which frames show as their files.
    paths: Vec<String>,
}

impl Emitter {
    /// An empty trace on the default stream.
    pub(super) fn shared() -> SharedEmitter {
        let mut trace = Trace::default();
        trace.header.source.kind = SourceKind::Generated;
        trace.streams.push(Stream { handle: 0 });
        Rc::new(RefCell::new(Emitter {
            trace,
            clock_ns: 0,
            stream: StreamId(0),
            muted: 0,
            entered: Vec::new(),
            phases: HashMap::new(),
            modules: HashMap::new(),
            transfers: HashMap::new(),
            frames: HashMap::new(),
            paths: Vec::new(),
        }))
    }

    fn push(&mut self, op: Op) {
        self.trace.events.push(Event { time_ns: self.clock_ns, op });
    }

    /// Lets time pass, in nanoseconds.
    pub(super) fn pass(&mut self, ns: u64) {
        if self.muted == 0 {
            self.clock_ns = self.clock_ns.saturating_add(ns);
        }
    }

    /// From here on nothing is written, until [`Self::unmute`] as often.
    pub(super) fn mute(&mut self) {
        self.muted += 1;
    }

    /// Takes back one [`Self::mute`].
    pub(super) fn unmute(&mut self) {
        self.muted = self.muted.saturating_sub(1);
    }

    /// Whether nothing is written.
    pub(super) fn muted(&self) -> bool {
        self.muted > 0
    }

    /// The handle of the stream in use.
    pub(super) fn stream_handle(&self) -> u64 {
        self.trace.streams[self.stream.index()].handle
    }

    /// The stream of this handle is used from here on. Gives the one before.
    pub(super) fn use_stream(&mut self, handle: u64) -> u64 {
        let before = self.stream_handle();
        self.stream = self.trace.stream_with_handle(handle);
        before
    }

    /// Begins a phase.
    pub(super) fn mark(&mut self, phase: &str) {
        let next = PhaseId(self.trace.phases.len() as u32);
        let id = *self.phases.entry(phase.to_owned()).or_insert(next);
        if id == next {
            self.trace.phases.push(phase.to_owned());
        }
        self.push(Op::Mark(id));
    }

    /// The id of a module's name, as [`HookedModule`](crate::trace::HookedModule) writes it.
    pub(super) fn module(&mut self, name: &str, path: &str) -> ModuleId {
        if let Some(id) = self.modules.get(name) {
            return *id;
        }
        let id = ModuleId(self.trace.modules.len() as u32);
        self.trace.modules.push(name.to_owned());
        self.paths.push(path.to_owned());
        self.modules.insert(name.to_owned(), id);
        id
    }

    /// Enters a module.
    pub(super) fn enter(&mut self, module: ModuleId) {
        let written = self.muted == 0;
        self.entered.push(written);
        if written {
            self.push(Op::ModuleEnter(module));
        }
    }

    /// Leaves it, if its enter was written: what is entered is left, even where nothing else is
    /// written any more.
    pub(super) fn leave(&mut self, module: ModuleId) {
        if self.entered.pop().unwrap_or(false) {
            self.push(Op::ModuleLeave(module));
        }
    }

    /// The program uses a block.
    pub(super) fn access(&mut self, block: BlockId) {
        if self.muted == 0 {
            self.push(Op::Access(block));
        }
    }

    /// Moves bytes between host and device; passes no time.
    pub(super) fn transfer(&mut self, size_bytes: u64, direction: Direction) {
        if self.muted > 0 || size_bytes == 0 {
            return;
        }
        let key = (size_bytes, direction == Direction::HostToDevice);
        let next = TransferId(self.trace.transfers.len() as u32);
        let id = *self.transfers.entry(key).or_insert(next);
        if id == next {
            self.trace.transfers.push(Transfer { size_bytes, direction });
        }
        self.push(Op::Transfer(id));
    }

    /// The site of an operation in a module.
    fn site(&mut self, op: &'static str, module: Option<ModuleId>) -> SiteId {
        let key = (op, module.unwrap_or(ModuleId::NONE));
        if let Some(site) = self.frames.get(&key) {
            return *site;
        }
        let filename = module.and_then(|id| self.paths.get(id.index())).cloned();
        let frame = Frame { name: op.to_owned(), filename: filename.unwrap_or_default(), line: 0 };
        let sites = &mut self.trace.sites;
        let site = SiteId(sites.stacks.len() as u32);
        sites.stacks.push(vec![FrameId(sites.frames.len() as u32)]);
        sites.frames.push(frame);
        self.frames.insert(key, site);
        site
    }

    /// Names a block, as parameters are.
    fn name(&mut self, block: BlockId, name: &str) {
        let id = NameId(self.trace.names.len() as u32);
        self.trace.names.push(name.to_owned());
        self.trace.blocks[block.index()].name = id;
    }

    /// The finished trace. What is still live in it stays live; frees from here on go nowhere.
    pub(super) fn finish(&mut self) -> Trace {
        std::mem::take(&mut self.trace)
    }
}

/// Asks for a block of `bytes` on the current stream.
pub(super) fn tensor(
    emitter: &SharedEmitter,
    op: &'static str,
    module: Option<ModuleId>,
    bytes: u64,
    role: Role,
) -> Tensor {
    let mut writer = emitter.borrow_mut();
    let mut block = BlockId::NONE;
    if !writer.muted() && bytes > 0 {
        block = BlockId(writer.trace.blocks.len() as u32);
        let (site, stream) = (writer.site(op, module), writer.stream);
        let row = Block { size_bytes: bytes, stream, site, name: NameId::NONE, role };
        writer.trace.blocks.push(row);
        writer.push(Op::Alloc(block));
    }
    drop(writer);
    let (view, part_of) = (Cell::new(false), None);
    Rc::new(Storage { block, bytes, view, part_of, emitter: Rc::clone(emitter) })
}

/// A part of a value, of so many bytes. The whole lives as long as its parts.
pub(super) fn part(emitter: &SharedEmitter, whole: &Tensor, bytes: u64) -> Tensor {
    Rc::new(Storage {
        block: BlockId::NONE,
        bytes,
        view: Cell::new(true),
        part_of: Some(Rc::clone(whole)),
        emitter: Rc::clone(emitter),
    })
}

/// Asks for a block that holds a parameter, or a rank's share of it.
pub(super) fn named_tensor(emitter: &SharedEmitter, name: &str, bytes: u64) -> Tensor {
    let made = tensor(emitter, "parameter", None, bytes, Role::Parameter);
    if let Some(block) = made.block().some() {
        emitter.borrow_mut().name(block, name);
    }
    made
}
