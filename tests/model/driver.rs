//! Runs an allocator by the trace's block ids, with a world around it that a test controls.

use std::collections::{BTreeMap, VecDeque};

use fraglab::alloc::{
    Action, ActionKind, Allocator, Env, Handle, LayoutBlock, OutOfMemory, Request,
};
use fraglab::device::Device;
use fraglab::units::{BlockId, PoolId, SettingsId};

use super::device::TestDevice;

/// Device, log and completions, as the engine would keep them.
#[derive(Clone, Debug)]
struct World<D> {
    device: D,
    log: Vec<Action>,
    /// Deferred blocks whose use goes on, in the order in which they were deferred.
    pending: Vec<(BlockId, Handle)>,
    /// Deferred blocks whose use has ended, in that order.
    ready: VecDeque<(BlockId, Handle)>,
}

impl<D> World<D> {
    fn waits(&self, handle: Handle) -> bool {
        self.pending.iter().chain(&self.ready).any(|&(_, other)| other == handle)
    }
}

impl<D: Device> Env for World<D> {
    type Device = D;
    const LOG: bool = true;

    fn device(&mut self) -> &mut D {
        &mut self.device
    }

    fn next_completed(&mut self) -> Option<Handle> {
        self.ready.pop_front().map(|(_, handle)| handle)
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.ready.extend(self.pending.drain(..));
        self.next_completed()
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let in_ready = self.ready.iter().position(|&(_, handle)| wanted(handle));
        if let Some(at) = in_ready {
            return self.ready.remove(at).map(|(_, handle)| handle);
        }
        let at = self.pending.iter().position(|&(_, handle)| wanted(handle))?;
        Some(self.pending.remove(at).1)
    }

    fn log(&mut self, action: Action) {
        self.log.push(action);
    }
}

/// An allocator with its world. Blocks are named by their ids, never by the allocator's handles.
#[derive(Clone, Debug)]
pub(crate) struct Driver<A, D = TestDevice> {
    pub(crate) allocator: A,
    world: World<D>,
    live: BTreeMap<BlockId, Handle>,
}

impl<A: Allocator, D: Device> Driver<A, D> {
    pub(crate) fn new(allocator: A, device: D) -> Driver<A, D> {
        let world = World { device, log: Vec::new(), pending: Vec::new(), ready: VecDeque::new() };
        Driver { allocator, world, live: BTreeMap::new() }
    }

    pub(crate) fn malloc(&mut self, request: Request) -> Result<(), OutOfMemory> {
        let handle = self.allocator.malloc(&mut self.world, request)?;
        let taken = self.live.values().any(|&other| other == handle) || self.world.waits(handle);
        assert!(!taken && handle != Handle::NONE, "{handle:?} is still in use");
        self.live.insert(request.block, handle);
        Ok(())
    }

    pub(crate) fn free(&mut self, block: BlockId) {
        let handle = self.take(block);
        self.allocator.free(&mut self.world, handle);
    }

    pub(crate) fn defer(&mut self, block: BlockId) {
        let handle = self.take(block);
        self.world.pending.push((block, handle));
        self.allocator.defer(&mut self.world, handle);
    }

    /// The use of a deferred block has ended; nothing happens if a wait completed it already.
    pub(crate) fn done(&mut self, block: BlockId) {
        if let Some(at) = self.world.pending.iter().position(|&(other, _)| other == block) {
            let ended = self.world.pending.remove(at);
            self.world.ready.push_back(ended);
        }
    }

    pub(crate) fn empty_cache(&mut self) {
        self.allocator.empty_cache(&mut self.world);
    }

    pub(crate) fn change_settings(&mut self, settings: SettingsId) {
        self.allocator.change_settings(&mut self.world, settings);
    }

    pub(crate) fn pool_enter(&mut self, pool: PoolId) {
        self.allocator.pool_enter(&mut self.world, pool);
    }

    pub(crate) fn pool_leave(&mut self, pool: PoolId) {
        self.allocator.pool_leave(&mut self.world, pool);
    }

    pub(crate) fn pool_delete(&mut self, pool: PoolId) {
        self.allocator.pool_delete(&mut self.world, pool);
    }

    fn take(&mut self, block: BlockId) -> Handle {
        self.live.remove(&block).expect("the block is live")
    }

    /// Blocks in the program's hands.
    pub(crate) fn live(&self) -> Vec<BlockId> {
        self.live.keys().copied().collect()
    }

    /// Deferred blocks whose use goes on.
    pub(crate) fn pending(&self) -> Vec<BlockId> {
        self.world.pending.iter().map(|&(block, _)| block).collect()
    }

    /// All deferred blocks that the allocator has not taken back.
    pub(crate) fn waiting(&self) -> Vec<BlockId> {
        self.world.pending.iter().chain(&self.world.ready).map(|&(block, _)| block).collect()
    }

    pub(crate) fn device(&self) -> &D {
        &self.world.device
    }

    /// The log since the last call: the entries of a PyTorch trace. Segments and refused requests
    /// concern no block, and a refusal has no place.
    pub(crate) fn take_log(&mut self) -> Vec<Action> {
        let mut log = std::mem::take(&mut self.world.log);
        log.retain(|a| !matches!(a.kind, ActionKind::EmptyCache | ActionKind::DeviceRefused));
        for action in &mut log {
            let of_block = matches!(
                action.kind,
                ActionKind::Alloc | ActionKind::FreeRequested | ActionKind::FreeCompleted
            );
            if !of_block {
                action.block = BlockId::NONE;
            }
        }
        log
    }

    /// All blocks in address order.
    pub(crate) fn layout(&self) -> Vec<LayoutBlock> {
        let mut blocks = Vec::new();
        self.allocator.layout(&mut |block| blocks.push(block));
        assert!(blocks.is_sorted_by_key(|block| block.address), "layout out of address order");
        blocks
    }

    pub(crate) fn stats(&self) -> BTreeMap<String, i64> {
        let stats = self.allocator.torch_stats().expect("keeps PyTorch's statistics");
        let count = stats.len();
        let by_name: BTreeMap<String, i64> = stats.into_iter().collect();
        assert_eq!(by_name.len(), count, "a statistic appears twice");
        by_name
    }
}
