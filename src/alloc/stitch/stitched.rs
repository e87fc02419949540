//! Stitched blocks: made, handed out once more, destroyed.
//!
//! ```text
//!   runs       │ chunks 50..150 │ chunks 7..40 │ chunks 300..317 │      the block's own addresses
//!   in use     ├───── parts: primitive blocks ────┤ unused tail ─┤      `shipped` hands out in part
//! ```
//!
//! In use, a stitched block has a list of the primitive blocks that are busy for it, its *parts*:
//! they cannot be split or merged meanwhile. Idle, it has nothing but its runs of chunks, and
//! whatever primitive blocks they belong to at the time are cut to measure when it is taken.

use std::collections::BTreeMap;

use super::chunks::{Bits, CHUNK_BYTES, Chunks, Run};
use super::config::Policy;
use super::gmlake::Gmlake;
use super::idle::IdleSet;
use super::segments::{ATTEMPTS, Remains, map_round, segment_action};
use crate::alloc::free_set::Entry;
use crate::alloc::{Action, ActionKind, BlockState, Env};
use crate::device::Device;
use crate::units::{BlockId, StreamId};

/// A range of addresses over chunks of several primitive blocks.
#[derive(Clone, Debug)]
pub(super) struct Stitched {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) requested_bytes: u64,
    /// Its chunks in the order of its addresses; empty in a slot that stands for nothing.
    pub(super) runs: Vec<Run>,
    /// The primitive blocks that are busy for it, in the same order; none while idle.
    pub(super) parts: Vec<u32>,
    /// When it was last freed, not counting deferred frees (spec 3.1, 2).
    pub(super) event: u64,
    /// When it was last freed.
    pub(super) last_use: u64,
    pub(super) ordinal: u32,
    pub(super) stream: StreamId,
    pub(super) owner: BlockId,
    pub(super) state: BlockState,
}

impl Stitched {
    /// One of its chunks that is busy, if any is.
    #[inline]
    pub(super) fn busy_chunk(&self, chunks: &Chunks) -> Option<u32> {
        self.runs.iter().find_map(|&run| chunks.first_busy(run))
    }
}

impl Gmlake {
    /// Takes free blocks out of their set, the last one cut so that together they have
    /// `size_bytes`.
    pub(super) fn gather(&mut self, entries: &[Entry], size_bytes: u64) -> Vec<u32> {
        let mut left_bytes = size_bytes;
        let mut parts = Vec::with_capacity(entries.len() + 1);
        for entry in entries {
            let at = entry.block;
            self.take(at);
            if entry.size_bytes > left_bytes {
                let rest = self.cut(at, left_bytes);
                self.pool(rest);
            }
            left_bytes -= self.blocks[at as usize].size_bytes;
            parts.push(at);
        }
        parts
    }

    /// Makes a stitched block of free primitive blocks of one stream that are in no set; they are
    /// its parts and become busy once it is mapped (spec 2.6, 6). If it cannot be mapped they are
    /// back in their sets, merged as they were (B1).
    pub(super) fn stitch<E: Env>(
        &mut self,
        env: &mut E,
        stream: StreamId,
        parts: Vec<u32>,
        size_bytes: u64,
    ) -> Option<u32> {
        let runs = parts.iter().filter_map(|&at| self.blocks[at as usize].run());
        let runs: Vec<Run> = runs.collect();
        let Some(address) = self.map_runs(env, &runs, size_bytes) else {
            parts.into_iter().for_each(|at| self.merge_into_pool(at));
            return None;
        };
        parts.iter().for_each(|&at| self.occupy(at));
        let events = parts.iter().map(|&at| self.blocks[at as usize].event);
        let stitched = Stitched {
            address,
            size_bytes,
            requested_bytes: 0,
            runs,
            event: events.max().unwrap_or(0),
            parts,
            last_use: self.clock,
            ordinal: self.next_ordinal(),
            stream,
            owner: BlockId::NONE,
            state: BlockState::Allocated,
        };
        let id = self.spare_stitched.pop().unwrap_or(self.stitched.len() as u32);
        match self.stitched.get_mut(id as usize) {
            Some(place) => *place = stitched,
            None => self.stitched.push(stitched),
        }
        self.stitched_bytes += size_bytes;
        let peak_bytes = &mut self.counters.stitched_bytes_peak;
        *peak_bytes = (*peak_bytes).max(self.stitched_bytes);
        self.counters.stitches += 1;
        if E::LOG {
            env.log(self.range_action(ActionKind::Stitch, id));
        }
        Some(id)
    }

    /// A range of addresses with these chunks behind it. After each attempt that fails idle
    /// stitched blocks are destroyed, more every time (spec 2.6, 5).
    fn map_runs<E: Env>(&mut self, env: &mut E, runs: &[Run], size_bytes: u64) -> Option<u64> {
        for level in 0..ATTEMPTS {
            if let Some(address) = self.try_map_runs(env, runs, size_bytes) {
                return Some(address);
            }
            self.destroy_idle(env, level, size_bytes);
        }
        None
    }

    fn try_map_runs<E: Env>(&mut self, env: &mut E, runs: &[Run], size_bytes: u64) -> Option<u64> {
        for _ in 0..self.mapping_rounds() {
            let pieces = runs.iter().map(|&run| self.chunks.handles(run));
            match map_round(env.device(), pieces, size_bytes) {
                Ok(address) => return Some(address),
                Err(remains) => self.bury_range(env, remains),
            }
        }
        None
    }

    /// Takes an idle stitched block, whose first `size_bytes` are free: the primitive blocks behind
    /// these are cut to measure and become busy (spec 2.5 b).
    pub(super) fn take_stitched(&mut self, id: u32, size_bytes: u64) {
        let stitched = &mut self.stitched[id as usize];
        self.idle[stitched.stream.index()].remove(stitched);
        let runs = std::mem::take(&mut stitched.runs);
        let mut parts = std::mem::take(&mut stitched.parts);
        let mut left = (size_bytes / CHUNK_BYTES) as u32;
        for run in &runs {
            let mut first = run.first;
            let end = run.end().min(first + left);
            left -= end - first;
            while first < end {
                let at = self.carve(Run { first, count: end - first });
                self.occupy(at);
                parts.push(at);
                first += self.blocks[at as usize].run().map_or(end - first, |run| run.count);
            }
        }
        let stitched = &mut self.stitched[id as usize];
        stitched.runs = runs;
        stitched.parts = parts;
        self.counters.stitch_reuses += 1;
    }

    /// A free block in no set that begins with the first chunk of a run and has no chunk beyond it,
    /// cut out of the one that is there.
    fn carve(&mut self, run: Run) -> u32 {
        let mut at = self.chunks.block_of(run.first);
        self.take(at);
        let skipped = u64::from(run.first - self.blocks[at as usize].chunk);
        if skipped > 0 {
            let rest = self.cut(at, skipped * CHUNK_BYTES);
            self.pool(at);
            at = rest;
        }
        let wanted_bytes = u64::from(run.count) * CHUNK_BYTES;
        if self.blocks[at as usize].size_bytes > wanted_bytes {
            let rest = self.cut(at, wanted_bytes);
            self.pool(rest);
        }
        at
    }

    /// Destroys idle stitched blocks to make room for `wanted_bytes` of addresses: some at level 0,
    /// more at 1, all at 2.
    pub(super) fn destroy_idle<E: Env>(&mut self, env: &mut E, level: u32, wanted_bytes: u64) {
        match self.config.policy {
            Policy::Shipped => {
                self.collect_idle(env, level, wanted_bytes);
            }
            Policy::Paper => self.evict_oldest(env, level, wanted_bytes),
        }
    }

    /// Destroys all idle stitched blocks.
    pub(super) fn destroy_all_idle<E: Env>(&mut self, env: &mut E) {
        self.destroy_idle(env, 2, 0);
    }

    /// Destroys an idle stitched block: one unmap, one range freed. The device may refuse the first
    /// and then the block stays; says whether it went.
    pub(super) fn destroy<E: Env>(&mut self, env: &mut E, id: u32) -> bool {
        let stitched = &self.stitched[id as usize];
        let (address, size_bytes) = (stitched.address, stitched.size_bytes);
        if env.device().unmap(address, size_bytes).is_err() {
            return false;
        }
        if E::LOG {
            env.log(self.range_action(ActionKind::Unstitch, id));
        }
        let stitched = &mut self.stitched[id as usize];
        self.idle[stitched.stream.index()].remove(stitched);
        stitched.runs.clear();
        self.spare_stitched.push(id);
        self.stitched_bytes -= size_bytes;
        self.counters.stitch_evictions += 1;
        let range = Some((address, size_bytes));
        self.bury(env, Remains { range, mapped_bytes: 0, handles: Vec::new(), segment: None });
        true
    }

    /// Destroys an idle stitched block that has chunks of a segment which is to go, unless it went
    /// before. Says whether it is gone.
    pub(super) fn unstitch<E: Env>(&mut self, env: &mut E, id: u32) -> bool {
        let Stitched { ref runs, size_bytes, .. } = self.stitched[id as usize];
        if runs.is_empty() {
            return true;
        }
        let gone = self.destroy(env, id);
        self.counters.forgotten_bytes += if gone { size_bytes } else { 0 };
        gone
    }

    /// The idle stitched blocks that have chunks of these free blocks, which are whole segments: by
    /// block, in the order in which the published code meets them (spec 3.4: chunk by chunk, and
    /// at a chunk the oldest first).
    pub(super) fn idle_over(&self, going: &[u32]) -> BTreeMap<u32, Vec<u32>> {
        let mut met: BTreeMap<u32, Vec<(u32, u32, u32)>> =
            going.iter().map(|&at| (at, Vec::new())).collect();
        for id in self.idle_ids() {
            let stitched = &self.stitched[id as usize];
            for run in &stitched.runs {
                if let Some(met) = met.get_mut(&self.chunks.block_of(run.first)) {
                    met.push((run.first, stitched.ordinal, id));
                }
            }
        }
        let ids = met.into_iter().map(|(at, mut met)| {
            met.sort_unstable();
            (at, met.into_iter().map(|(_, _, id)| id).collect())
        });
        ids.collect()
    }

    /// The chunks that stitched blocks in use have in their unused tails: as long as they are
    /// mapped there, the device would not get them back (B4).
    pub(super) fn kept_chunks(&self) -> Bits {
        let mut kept = Bits::for_count(self.chunks.len());
        for stitched in self.stitched.iter().filter(|it| it.state != BlockState::Free) {
            self.unused_tail(stitched).for_each(|run| kept.set(run));
        }
        kept
    }

    /// The idle stitched blocks.
    pub(super) fn idle_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.idle.iter().flat_map(IdleSet::iter)
    }

    /// The chunks of a stitched block in use behind those that are used.
    pub(super) fn unused_tail<'a>(
        &'a self,
        stitched: &'a Stitched,
    ) -> impl Iterator<Item = Run> + 'a {
        let parts = stitched.parts.iter().filter_map(|&at| self.blocks[at as usize].run());
        let mut used: u32 = parts.map(|run| run.count).sum();
        stitched.runs.iter().filter_map(move |run| {
            let skipped = used.min(run.count);
            used -= skipped;
            let tail = Run { first: run.first + skipped, count: run.count - skipped };
            (tail.count > 0).then_some(tail)
        })
    }

    /// A log entry about the block that a stitched block is in use for.
    pub(super) fn stitched_action(&self, kind: ActionKind, id: u32) -> Action {
        let stitched = &self.stitched[id as usize];
        Action {
            block: stitched.owner,
            size_bytes: stitched.requested_bytes,
            ..self.range_action(kind, id)
        }
    }

    /// A log entry about its range of addresses.
    fn range_action(&self, kind: ActionKind, id: u32) -> Action {
        let &Stitched { ordinal, stream, address, size_bytes, .. } = &self.stitched[id as usize];
        segment_action(kind, ordinal, stream, address, size_bytes)
    }
}
