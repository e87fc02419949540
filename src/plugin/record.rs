//! The recorder: what the program asks for, as a native trace, and what the allocator did beside it.
//!
//! Everything is kept in memory until the trace is written, 64 bytes a block from its request to its
//! free (two events of 16, a row of 24, an address of 8), up to twice that while the tables grow: a
//! job of 100,000 requests a step takes some 10 MB a step. A table that is full ends the recording.
//!
//! Completions stand where DESIGN 4 wants them: those that a request finds stand before it, those
//! that a flush waited for stand behind it.
//!
//! ```text
//!   malloc: next_completed -> A                    done A, alloc B, done C
//!           device full: wait_completed -> C       actions of B: segment_free, free_completed C, ...
//! ```

use std::time::Instant;

use super::entry::warn;
use crate::alloc::{Action, ActionKind};
use crate::trace::{
    BLOCK_BYTES_MAX, Block, Event, Header, Op, Pool, PoolKind, RecordedAction, RecordedKind,
    Recording, Role, Trace,
};
use crate::units::{BlockId, ModuleId, NameId, PhaseId, PoolId, SiteId, StreamId};

/// Most blocks and events of a recording: ids are 32 bits.
const LENGTH_MAX: usize = u32::MAX as usize - 1;

/// What an allocator did during one call.
#[derive(Clone, Debug, Default)]
pub(super) struct Deeds {
    /// Blocks whose use had ended when a request looked.
    pub(super) ended: Vec<BlockId>,
    /// Blocks whose use was waited for.
    pub(super) waited: Vec<BlockId>,
    /// Segments and refusals.
    pub(super) actions: Vec<Action>,
}

/// Records the requests of one device.
pub(super) struct Recorder {
    trace: Trace,
    actions: Vec<RecordedAction>,
    addresses: Vec<u64>,
    started: Instant,
    /// Pools of the captures under way, the newest last.
    captures: Vec<PoolId>,
    /// What the allocator does is kept too.
    with_actions: bool,
    full: bool,
}

impl Recorder {
    /// Begins a trace with this head. `with_actions`: what the allocator does is what `verify`
    /// compares with, which makes sense for PyTorch's own allocator alone.
    pub(super) fn new(header: Header, with_actions: bool) -> Recorder {
        Recorder {
            trace: Trace { header, ..Trace::default() },
            actions: Vec::new(),
            addresses: Vec::new(),
            started: Instant::now(),
            captures: Vec::new(),
            with_actions,
            full: false,
        }
    }

    /// Events so far.
    pub(super) fn events(&self) -> usize {
        self.trace.events.len()
    }

    /// A table is full, and nothing more is recorded.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// The number of the next block.
    pub(super) fn next_block(&self) -> BlockId {
        BlockId(self.trace.blocks.len() as u32)
    }

    /// Bytes that the tables take.
    pub(super) fn bytes_in_memory(&self) -> usize {
        self.trace.events.capacity() * size_of::<Event>()
            + self.trace.blocks.capacity() * size_of::<Block>()
            + self.addresses.capacity() * size_of::<u64>()
            + self.actions.capacity() * size_of::<RecordedAction>()
    }

    /// A stream that the program began to use; streams are numbered as they come.
    pub(super) fn stream(&mut self, handle: u64) {
        self.trace.streams.push(crate::trace::Stream { handle });
    }

    /// A request; `address` is absent if it was refused. Its block is [`Self::next_block`].
    pub(super) fn request(
        &mut self,
        size_bytes: u64,
        stream: StreamId,
        address: Option<u64>,
        deeds: &mut Deeds,
    ) {
        for block in deeds.ended.drain(..) {
            self.push(Op::Done(block));
        }
        let block = self.next_block();
        if self.trace.blocks.len() >= LENGTH_MAX {
            self.end();
        }
        if !self.full {
            self.trace.blocks.push(Block {
                // One absurd request, which is refused, must not cost the whole trace.
                size_bytes: size_bytes.min(BLOCK_BYTES_MAX),
                stream,
                site: SiteId::NONE,
                name: NameId::NONE,
                role: Role::Unknown,
            });
            self.addresses.push(address.unwrap_or(0));
        }
        self.push(match address {
            Some(_) => Op::Alloc(block),
            None => Op::Attempt(block),
        });
        self.finish_call(deeds);
    }

    /// The program frees a block; `deferred` if another stream still uses its memory.
    pub(super) fn free(&mut self, block: BlockId, deferred: bool) {
        self.push(if deferred { Op::Defer(block) } else { Op::Free(block) });
    }

    /// The program asked for the cache to be emptied.
    pub(super) fn empty_cache(&mut self, deeds: &mut Deeds) {
        self.push(Op::EmptyCache);
        self.finish_call(deeds);
    }

    /// A phase begins.
    pub(super) fn mark(&mut self, phase: &str) {
        let id = PhaseId(number_of(&mut self.trace.phases, phase));
        self.push(Op::Mark(id));
    }

    /// The program enters a module, or leaves it.
    pub(super) fn module(&mut self, module: &str, enters: bool) {
        let id = ModuleId(number_of(&mut self.trace.modules, module));
        self.push(if enters { Op::ModuleEnter(id) } else { Op::ModuleLeave(id) });
    }

    /// The pool of a graph that is captured. Its memory is kept beside the allocator, so what the
    /// allocator does is no longer what PyTorch's own would do, and is not kept.
    pub(super) fn new_pool(&mut self) -> PoolId {
        self.with_actions = false;
        let name = format!("graph{}", self.trace.pools.len());
        let pool = Pool { name, kind: PoolKind::Capture, no_split: false, use_on_oom: false };
        self.trace.pools.push(pool);
        PoolId((self.trace.pools.len() - 1) as u32)
    }

    /// A capture into a pool begins or ends, or the pool is gone. In a trace pools lie one inside the
    /// other, which captures need not: what was entered after a pool that is left is entered anew.
    pub(super) fn pool(&mut self, op: Op) {
        let before = first_of_each(&self.captures);
        match op {
            Op::PoolEnter(pool) => self.captures.push(pool),
            Op::PoolLeave(pool) => {
                let newest = self.captures.iter().rposition(|&it| it == pool);
                if let Some(at) = newest {
                    self.captures.remove(at);
                }
            }
            Op::PoolDelete(pool) => self.captures.retain(|&it| it != pool),
            _ => {}
        }
        let after = first_of_each(&self.captures);
        let kept = before.iter().zip(&after).take_while(|(before, after)| before == after).count();
        for &pool in before[kept..].iter().rev() {
            self.push(Op::PoolLeave(pool));
        }
        for &pool in &after[kept..] {
            self.push(Op::PoolEnter(pool));
        }
        if matches!(op, Op::PoolDelete(_)) {
            self.push(op);
        }
    }

    /// The trace so far, as it is written.
    pub(super) fn trace(&mut self) -> &Trace {
        let allocs = self.trace.events.iter().filter(|event| matches!(event.op, Op::Alloc(_)));
        self.trace.header.history.allocs = allocs.count() as u64;
        let recording = Recording {
            block_addresses: self.addresses.clone(),
            actions: self.actions.clone(),
            truth: None,
        };
        self.trace.recording = self.with_actions.then_some(recording);
        &self.trace
    }

    /// What belongs to the event that was just pushed.
    fn finish_call(&mut self, deeds: &mut Deeds) {
        let event = self.trace.events.len().saturating_sub(1) as u32;
        for action in deeds.actions.drain(..).filter(|_| self.with_actions && !self.full) {
            self.actions.extend(recorded(event, &action, &deeds.waited));
        }
        for block in deeds.waited.drain(..) {
            self.push(Op::Done(block));
        }
    }

    /// Records nothing more.
    #[cold]
    fn end(&mut self) {
        if !self.full {
            warn("the trace is full: what comes now is not recorded");
        }
        self.full = true;
    }

    fn push(&mut self, op: Op) {
        if self.trace.events.len() >= LENGTH_MAX {
            self.end();
        }
        if !self.full {
            let time_ns = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.trace.events.push(Event { time_ns, op });
        }
    }
}

/// Pools in their order, each once: two captures may share one.
fn first_of_each(captures: &[PoolId]) -> Vec<PoolId> {
    let mut pools = Vec::with_capacity(captures.len());
    for &pool in captures {
        if !pools.contains(&pool) {
            pools.push(pool);
        }
    }
    pools
}

/// The number of a name, which is added if it is new. Names are few.
fn number_of(names: &mut Vec<String>, name: &str) -> u32 {
    let found = names.iter().rposition(|known| known == name);
    found.unwrap_or_else(|| {
        names.push(name.to_owned());
        names.len() - 1
    }) as u32
}

/// An action as a recording keeps it, if it does. Of completions those that were waited for, as the
/// others are events of their own.
fn recorded(event: u32, action: &Action, waited: &[BlockId]) -> Option<RecordedAction> {
    let (kind, block) = match action.kind {
        ActionKind::SegmentAlloc => (RecordedKind::SegmentAlloc, BlockId::NONE),
        ActionKind::SegmentFree => (RecordedKind::SegmentFree, BlockId::NONE),
        ActionKind::SegmentMap => (RecordedKind::SegmentMap, BlockId::NONE),
        ActionKind::SegmentUnmap => (RecordedKind::SegmentUnmap, BlockId::NONE),
        ActionKind::Oom => (RecordedKind::Oom, BlockId::NONE),
        ActionKind::FreeCompleted if waited.contains(&action.block) => {
            (RecordedKind::FreeCompleted, action.block)
        }
        _ => return None,
    };
    let Action { stream, address, size_bytes, .. } = *action;
    Some(RecordedAction { event, kind, block, stream, address, size_bytes })
}
