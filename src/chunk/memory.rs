//! The GPU's memory, the clock, and the trace that a run leaves behind.
//!
//! Everything that the manager or the program asks of the GPU goes through here, so that the
//! derived trace is exactly what the [`Gpu`] saw:
//!
//! ```text
//!   chunks, ADAM's buffers, temporary gradients ──┐             ┌──> Gpu (an allocator)
//!                                                 ├── Memory ───┤
//!   the program's other blocks ───────────────────┘      │      └──> derived trace, on the clock
//!                                                        └── peak since the tracer last looked
//! ```

use super::clock::Clock;
use super::gpu::{Gpu, GpuBlock};
use super::states::ChunkList;
use crate::trace::{Block, Direction, Event, Frame, Op, Role, Sites, Trace, Transfer};
use crate::units::{BlockId, FrameId, NameId, SiteId, StreamId, TransferId};

/// What stands for the file of the manager's sites.
const SITE_FILE: &str = "chunk manager";

/// What the manager wants memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A chunk's payload, of this rank's or another's chunk.
    Chunk { list: ChunkList, remote: bool },
    /// A temporary gradient.
    Gradient,
    /// A buffer of one pass of ADAM.
    Buffer,
    /// A result in between of ADAM on the GPU.
    Result,
}

impl Purpose {
    /// What the block is called in the derived trace: the function of its site.
    const NAMES: [&str; 7] = [
        "fp16 chunk",
        "fp32 chunk",
        "momentum chunk",
        "variance chunk",
        "temporary gradient",
        "ADAM buffer",
        "ADAM result",
    ];

    fn name(self) -> usize {
        match self {
            Purpose::Chunk { list, .. } => list as usize,
            Purpose::Gradient => 4,
            Purpose::Buffer => 5,
            Purpose::Result => 6,
        }
    }

    fn role(self) -> Role {
        match self {
            Purpose::Chunk { list: ChunkList::Fp16, remote: false } => Role::Parameter,
            Purpose::Chunk { list: ChunkList::Fp16, remote: true } => Role::Communication,
            Purpose::Chunk { .. } => Role::Optimizer,
            Purpose::Gradient => Role::Gradient,
            Purpose::Buffer | Purpose::Result => Role::Temporary,
        }
    }
}

/// A block that was asked for; the GPU may have refused it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    block: BlockId,
    gpu: Option<GpuBlock>,
}

/// A block that was refused, until it is known whether the manager finds another way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    held: Held,
    size_bytes: u64,
    event: usize,
}

/// The GPU and what is known of it.
pub(super) struct Memory<'a> {
    gpu: &'a mut dyn Gpu,
    pub(super) clock: Clock,
    pub(super) trace: Trace,
    /// The manager's own transfers, with their entries in the derived trace.
    transfers: Vec<(Transfer, TransferId)>,
    /// Stream of what the manager asks for.
    stream: StreamId,
    /// The first of the sites of the manager's own blocks.
    first_site: u32,
    /// Highest allocated bytes since the tracer last looked.
    tick_peak_bytes: u64,
    /// Highest allocated bytes since the last [`Memory::begin_step`].
    pub(super) step_peak_bytes: u64,
    /// Event of the derived trace and bytes of the first request refused for good.
    pub(super) first_refused: Option<(u64, u64)>,
    /// Requests that the GPU was asked for, and those refused for good.
    pub(super) mallocs: u64,
    pub(super) refusals: u64,
}

impl<'a> Memory<'a> {
    /// `trace` has the tables that events of the program refer to, and no events.
    pub(super) fn new(gpu: &'a mut dyn Gpu, clock: Clock, mut trace: Trace) -> Memory<'a> {
        let stream = trace.stream_with_handle(0);
        let first_site = trace.sites.stacks.len() as u32;
        for name in Purpose::NAMES {
            add_site(&mut trace.sites, name);
        }
        Memory {
            gpu,
            clock,
            trace,
            transfers: Vec::new(),
            stream,
            first_site,
            tick_peak_bytes: 0,
            step_peak_bytes: 0,
            first_refused: None,
            mallocs: 0,
            refusals: 0,
        }
    }

    pub(super) fn gpu(&mut self) -> &mut dyn Gpu {
        self.gpu
    }

    pub(super) fn allocated_bytes(&self) -> u64 {
        self.gpu.allocated_bytes()
    }

    /// Highest allocated bytes since the last call.
    pub(super) fn take_peak(&mut self) -> u64 {
        std::mem::replace(&mut self.tick_peak_bytes, self.gpu.allocated_bytes())
    }

    pub(super) fn begin_step(&mut self) {
        self.step_peak_bytes = self.gpu.allocated_bytes();
    }

    /// An event of the derived trace, now.
    pub(super) fn push(&mut self, op: Op) {
        self.trace.events.push(Event { time_ns: self.clock.now_ns(), op });
    }

    /// Bytes cross the link: an event of the derived trace.
    pub(super) fn push_transfer(&mut self, size_bytes: u64, direction: Direction) {
        let transfer = Transfer { size_bytes, direction };
        // Chunks have a few sizes: the table stays short.
        let known = self.transfers.iter().find(|(known, _)| *known == transfer);
        let id = known.map_or(TransferId(self.trace.transfers.len() as u32), |&(_, id)| id);
        if known.is_none() {
            self.transfers.push((transfer.clone(), id));
            self.trace.transfers.push(transfer);
        }
        self.push(Op::Transfer(id));
    }

    /// Asks for a block of the manager's own.
    pub(super) fn ask(&mut self, size_bytes: u64, purpose: Purpose) -> Result<Held, Refused> {
        let site = SiteId(self.first_site + purpose.name() as u32);
        let (name, stream, role) = (NameId::NONE, self.stream, purpose.role());
        self.ask_block(Block { size_bytes, stream, site, name, role })
    }

    /// Asks for a block.
    pub(super) fn ask_block(&mut self, block: Block) -> Result<Held, Refused> {
        let id = BlockId(self.trace.blocks.len() as u32);
        let event = self.trace.events.len();
        self.trace.blocks.push(block);
        self.push(Op::Alloc(id));
        self.mallocs += 1;
        match self.gpu.malloc(block.size_bytes, block.stream) {
            Ok(gpu) => {
                let allocated_bytes = self.gpu.allocated_bytes();
                self.tick_peak_bytes = self.tick_peak_bytes.max(allocated_bytes);
                self.step_peak_bytes = self.step_peak_bytes.max(allocated_bytes);
                Ok(Held { block: id, gpu: Some(gpu) })
            }
            Err(_) => {
                let held = Held { block: id, gpu: None };
                Err(Refused { held, size_bytes: block.size_bytes, event })
            }
        }
    }

    /// Another way was found: the refused request was only an attempt.
    pub(super) fn forget(&mut self, refused: Refused) {
        self.trace.events[refused.event].op = Op::Attempt(refused.held.block);
    }

    /// There is no other way. The request stands in the trace, the run goes on without the block.
    pub(super) fn lose(&mut self, refused: Refused) -> Held {
        self.refusals += 1;
        self.first_refused.get_or_insert((refused.event as u64, refused.size_bytes));
        refused.held
    }

    /// Asks for a block of the manager's own for which there is no other way.
    pub(super) fn ask_or_lose(&mut self, size_bytes: u64, purpose: Purpose) -> Held {
        self.ask(size_bytes, purpose).unwrap_or_else(|refused| self.lose(refused))
    }

    /// An attempt of the program: granted or not, it is gone before the next event.
    pub(super) fn attempt(&mut self, block: Block) {
        match self.ask_block(block) {
            Err(refused) => self.forget(refused),
            Ok(held) => {
                if let Some(event) = self.trace.events.last_mut() {
                    event.op = Op::Attempt(held.block);
                }
                if let Some(gpu) = held.gpu {
                    self.gpu.free(gpu);
                }
            }
        }
    }

    pub(super) fn free(&mut self, held: Held) {
        self.push(Op::Free(held.block));
        if let Some(gpu) = held.gpu {
            self.gpu.free(gpu);
        }
    }

    pub(super) fn defer(&mut self, held: Held) {
        self.push(Op::Defer(held.block));
        if let Some(gpu) = held.gpu {
            self.gpu.defer(gpu);
        }
    }

    pub(super) fn done(&mut self, held: Held) {
        self.push(Op::Done(held.block));
        if let Some(gpu) = held.gpu {
            self.gpu.done(gpu);
        }
    }

    pub(super) fn access(&mut self, held: Held) {
        self.push(Op::Access(held.block));
    }
}

fn add_site(sites: &mut Sites, name: &str) {
    let frame = FrameId(sites.frames.len() as u32);
    sites.frames.push(Frame { name: name.to_owned(), filename: SITE_FILE.to_owned(), line: 0 });
    sites.stacks.push(vec![frame]);
}
