//! Chunks of other ranks: fetched, and dropped when they are done (spec patrickstar 4).
//!
//! Only one rank is simulated. The others are taken to be as far, with whatever this rank needs.
//!
//! ```text
//!   collective      a group = one chunk of each rank, all at once
//!     fetch   [0 1 2 3] <── all-gather ── own chunk           first access after a drop
//!     forward done:  [0 . . .]                                the others' are dropped
//!     backward done: [0 1 2 3] ── reduce-scatter ──> own chunk, the others' are dropped
//!
//!   memory-saving   a chunk at a time: broadcast from its owner, reduce to its owner
//! ```

use super::manager::{Halt, Manager};
use super::states::{ChunkList, Device, TensorState};
use super::summary::ChunkEventKind;

impl Manager<'_> {
    fn fp16(&self, number: u32) -> u32 {
        self.ids.of(ChunkList::Fp16, number)
    }

    /// Before a tensor of the fp16 chunk is used: its content comes from wherever it is kept.
    pub(super) fn fetch(&mut self, number: u32) -> Result<(), Halt> {
        if self.ids.world.ranks == 1 {
            return Ok(());
        }
        if self.config.with_mem_saving_comm {
            return self.fetch_chunk(number);
        }
        let group = self.ids.group(number);
        let is_here = |number| self.chunks[self.fp16(number) as usize].payload.is_some();
        // The own chunk always is, but for a dummy.
        if group.clone().all(is_here) {
            return Ok(());
        }
        self.fetch_group(group)
    }

    fn fetch_group(&mut self, group: std::ops::Range<u32>) -> Result<(), Halt> {
        let own = self.fp16(group.start + self.ids.world.rank);
        self.hold_on_gpu(own)?;
        for number in self.ids.remote(group.clone()) {
            self.hold_on_gpu(self.fp16(number))?;
        }
        let bytes = self.group_bytes();
        self.clock().collective(bytes, true, group.len() as u32);
        self.step.collectives.all_gathers += 1;
        add(&mut self.step.collectives.all_gather_bytes, bytes);
        self.log(ChunkEventKind::AllGather, own, bytes);
        for number in group {
            let id = self.fp16(number) as usize;
            self.chunks[id].pinned = false;
            self.chunks[id].set_all(TensorState::Hold);
        }
        Ok(())
    }

    fn fetch_chunk(&mut self, number: u32) -> Result<(), Halt> {
        let id = self.fp16(number);
        if self.chunks[id as usize].fetched {
            return Ok(());
        }
        self.hold_on_gpu(id)?;
        let (bytes, ranks) = (self.fp16_bytes, self.ids.world.ranks);
        self.clock().collective(bytes, false, ranks);
        self.step.collectives.broadcasts += 1;
        add(&mut self.step.collectives.broadcast_bytes, bytes);
        self.log(ChunkEventKind::Broadcast, id, bytes);
        let chunk = &mut self.chunks[id as usize];
        chunk.pinned = false;
        chunk.fetched = true;
        chunk.set_all(TensorState::Hold);
        Ok(())
    }

    /// Brings a chunk that takes part in a collective to the GPU and keeps it there.
    fn hold_on_gpu(&mut self, id: u32) -> Result<(), Halt> {
        self.access(id, Device::Gpu)?;
        self.chunks[id as usize].pinned = true;
        Ok(())
    }

    /// Bytes that a collective over a group hands each rank.
    fn group_bytes(&self) -> u64 {
        self.fp16_bytes.saturating_mul(u64::from(self.ids.world.ranks))
    }

    /// After a tensor of the fp16 chunk came to the state: if that was the last one, forward passes
    /// drop what is another rank's, backward passes sum the gradients first.
    pub(super) fn drop_if_done(&mut self, number: u32, state: TensorState) -> Result<(), Halt> {
        use TensorState::{HoldAfterBackward, HoldAfterForward};
        if self.ids.world.ranks == 1 || !matches!(state, HoldAfterForward | HoldAfterBackward) {
            return Ok(());
        }
        let sums = state == HoldAfterBackward;
        if self.config.with_mem_saving_comm {
            if self.chunks[self.fp16(number) as usize].all_done(state) {
                self.drop_chunk(number, sums)?;
            }
            return Ok(());
        }
        let group = self.ids.group(number);
        let is_done = |number| {
            number >= self.ids.real || self.chunks[self.fp16(number) as usize].all_done(state)
        };
        if group.clone().all(is_done) {
            self.drop_group(group, sums)?;
        }
        Ok(())
    }

    fn drop_group(&mut self, group: std::ops::Range<u32>, sums: bool) -> Result<(), Halt> {
        let is_trained = |number| self.trained.get(number as usize).is_some_and(|&trained| trained);
        if sums && group.clone().any(is_trained) {
            self.reduce_scatter(group.clone())?;
        }
        for number in self.ids.remote(group) {
            self.release(self.fp16(number));
        }
        Ok(())
    }

    fn reduce_scatter(&mut self, group: std::ops::Range<u32>) -> Result<(), Halt> {
        for number in group.clone() {
            self.hold_on_gpu(self.fp16(number))?;
        }
        let bytes = self.group_bytes();
        self.clock().collective(bytes, true, group.len() as u32);
        self.step.collectives.reduce_scatters += 1;
        add(&mut self.step.collectives.reduce_scatter_bytes, bytes);
        let own = self.fp16(group.start + self.ids.world.rank);
        self.log(ChunkEventKind::ReduceScatter, own, bytes);
        for number in group {
            let id = self.fp16(number) as usize;
            self.chunks[id].pinned = false;
        }
        Ok(())
    }

    fn drop_chunk(&mut self, number: u32, sums: bool) -> Result<(), Halt> {
        let id = self.fp16(number);
        if sums && self.trained[number as usize] {
            self.hold_on_gpu(id)?;
            let (bytes, ranks) = (self.fp16_bytes, self.ids.world.ranks);
            self.clock().collective(bytes, false, ranks);
            self.step.collectives.reduces += 1;
            add(&mut self.step.collectives.reduce_bytes, bytes);
            self.log(ChunkEventKind::Reduce, id, bytes);
            self.chunks[id as usize].pinned = false;
        }
        self.chunks[id as usize].fetched = false;
        if !self.ids.is_local(number) {
            self.release(id);
        }
        Ok(())
    }
}

fn add(sum: &mut u64, bytes: u64) {
    *sum = sum.saturating_add(bytes);
}
