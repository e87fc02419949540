//! One device malloc per tensor: what the program would get without any allocator.
//!
//! The design decision is to have none: a block is a `cudaMalloc`, a free is a `cudaFree`. Nothing
//! is cached and nothing is rounded beyond 512 bytes, so memory is never fragmented inside the
//! allocator; the price is a device call for every event.
//!
//! ```text
//!   ┌ a ┐  ┌ b ───────┐  ┌ c ┐       each its own range, nothing between
//! ```

use super::spec::{Params, SpecError};
use super::{
    ALIGNMENT_BYTES, Action, ActionKind, Allocator, BlockState, BuildInputs, Env, Handle,
    LayoutBlock, Levels, OutOfMemory, Request,
};
use crate::device::Device;
use crate::units::{BlockId, StreamId};

/// A block in use.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    size_bytes: u64,
    request: Request,
    /// Ordinal of the device malloc.
    segment: u32,
    state: BlockState,
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Native {
    limit_bytes: Option<u64>,
    blocks: Vec<Block>,
    /// Ids of `blocks` that stand for nothing.
    spare: Vec<u32>,
    /// Free blocks whose range the device did not take back; asked again by `empty_cache`.
    refused: Vec<Handle>,
    levels: Levels,
    mallocs: u64,
    frees: u64,
    ooms: u64,
}

impl Native {
    /// Builds the allocator; it has no parameters.
    ///
    /// # Errors
    /// If a parameter is given.
    pub fn build(params: Params, inputs: &BuildInputs) -> Result<Native, SpecError> {
        params.finish()?;
        Ok(Native {
            limit_bytes: inputs.limit_bytes.or(inputs.recorded_limit_bytes),
            blocks: Vec::new(),
            spare: Vec::new(),
            refused: Vec::new(),
            levels: Levels::default(),
            mallocs: 0,
            frees: 0,
            ooms: 0,
        })
    }

    #[inline]
    fn action(&self, kind: ActionKind, block: &Block) -> Action {
        let segment_event = matches!(kind, ActionKind::SegmentAlloc | ActionKind::SegmentFree);
        Action {
            kind,
            block: if segment_event { BlockId::NONE } else { block.request.block },
            segment: block.segment,
            stream: block.request.stream,
            offset_bytes: 0,
            size_bytes: if segment_event { block.size_bytes } else { block.request.size_bytes },
            address: block.address,
        }
    }

    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let block = self.blocks[handle.0 as usize];
        if E::LOG {
            env.log(self.action(ActionKind::FreeCompleted, &block));
        }
        self.levels.active_bytes -= block.size_bytes;
        self.blocks[handle.0 as usize].state = BlockState::Free;
        if !self.give_back(env, handle) {
            self.refused.push(handle);
        }
    }

    /// Returns the range of a free block. Says whether the device took it.
    #[inline]
    fn give_back<E: Env>(&mut self, env: &mut E, handle: Handle) -> bool {
        let block = self.blocks[handle.0 as usize];
        if env.device().free(block.address).is_err() {
            return false;
        }
        self.levels.reserved_bytes -= block.size_bytes;
        self.frees += 1;
        self.spare.push(handle.0);
        if E::LOG {
            env.log(self.action(ActionKind::SegmentFree, &block));
        }
        true
    }

    #[inline]
    fn begin_free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let block = &self.blocks[handle.0 as usize];
        self.levels.allocated_bytes -= block.size_bytes;
        if E::LOG {
            let action = self.action(ActionKind::FreeRequested, block);
            env.log(action);
        }
    }

    #[inline]
    fn device_malloc<E: Env>(&mut self, env: &mut E, size_bytes: u64) -> Option<u64> {
        let within_limit = self
            .limit_bytes
            .is_none_or(|limit| self.levels.reserved_bytes.saturating_add(size_bytes) <= limit);
        if within_limit { env.device().malloc(size_bytes).ok() } else { None }
    }

    /// Takes back every range that waits for another stream. Says whether there was any.
    fn wait<E: Env>(&mut self, env: &mut E) -> bool {
        let mut any = false;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
            any = true;
        }
        any
    }

    #[cold]
    fn out_of_memory<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> OutOfMemory {
        self.ooms += 1;
        if E::LOG {
            for kind in [ActionKind::DeviceRefused, ActionKind::Oom] {
                env.log(Action::notice(kind, request.block, request.stream, size_bytes));
            }
        }
        OutOfMemory { size_bytes }
    }
}

impl Allocator for Native {
    const ADDRESSES_MATTER: bool = false;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle);
        }
        let Some(size_bytes) = request.size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES) else {
            return Err(self.out_of_memory(env, request.size_bytes, request));
        };
        let mut address = self.device_malloc(env, size_bytes);
        if address.is_none() && self.wait(env) {
            address = self.device_malloc(env, size_bytes);
        }
        let Some(address) = address else {
            return Err(self.out_of_memory(env, size_bytes, request));
        };
        let segment = self.mallocs as u32;
        self.mallocs += 1;
        self.levels.allocated_bytes += size_bytes;
        self.levels.active_bytes += size_bytes;
        self.levels.reserved_bytes += size_bytes;
        let block = Block { address, size_bytes, request, segment, state: BlockState::Allocated };
        let at = match self.spare.pop() {
            Some(at) => {
                self.blocks[at as usize] = block;
                at
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        };
        if E::LOG {
            env.log(self.action(ActionKind::SegmentAlloc, &block));
            env.log(self.action(ActionKind::Alloc, &block));
        }
        Ok(Handle(at))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.complete(env, handle);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.blocks[handle.0 as usize].state = BlockState::Deferred;
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        self.wait(env);
        for handle in std::mem::take(&mut self.refused) {
            if !self.give_back(env, handle) {
                self.refused.push(handle);
            }
        }
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.levels
    }

    fn largest_hole(&self, _request: Request) -> u64 {
        0
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("segment_allocs", self.mallocs),
            ("segment_frees", self.frees),
            ("alloc_retries", 0),
            ("ooms", self.ooms),
        ]
    }

    fn params(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut live: Vec<&Block> =
            self.blocks.iter().filter(|block| block.state != BlockState::Free).collect();
        live.sort_by_key(|block| block.address);
        for block in live {
            visit(LayoutBlock {
                block: block.request.block,
                segment: block.segment,
                segment_address: block.address,
                segment_bytes: block.size_bytes,
                page_bytes: 0,
                address: block.address,
                size_bytes: block.size_bytes,
                requested_bytes: block.request.size_bytes,
                stream: block.request.stream,
                pool: 0,
                state: block.state,
            });
        }
    }
}
