//! Invariants (gmlake spec 1.4), looked up from scratch: for tests and `--paranoid`.

use super::blocks::Block;
use super::chunks::{Bits, Run};
use super::gmlake::{Gmlake, NONE};
use super::stitched::Stitched;
use crate::alloc::BlockState;

/// Says what is broken unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(format!($($message)*));
        }
    };
}

/// Sums over all blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    reserved_bytes: u64,
    active_bytes: u64,
    free_blocks: usize,
    /// Busy blocks, those for stitched blocks included.
    busy_blocks: usize,
}

impl Gmlake {
    /// Checks everything that holds between operations.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut sums = Sums::default();
        let mut held = Bits::for_count(self.chunks.len());
        for segment in self.segments.iter().filter(|segment| segment.first != NONE) {
            let (mut at, mut prev, mut address) = (segment.first, NONE, segment.address);
            while at != NONE {
                let block = &self.blocks[at as usize];
                ensure!(block.prev == prev, "block {at} has another before it");
                ensure!(block.address == address, "block {at} does not follow the one before it");
                let merged =
                    prev == NONE || !block.is_free() || !self.blocks[prev as usize].is_free();
                ensure!(merged, "free blocks {prev} and {at} are not merged");
                self.check_block(at, block)?;
                if let Some(run) = block.run() {
                    ensure!(held.has_none_of(run), "block {at} has chunks of another");
                    held.set(run);
                }
                sums.add(block);
                address += block.size_bytes;
                prev = at;
                at = block.next;
            }
            let end = segment.address + segment.size_bytes;
            ensure!(address == end, "blocks do not cover segment {}", segment.ordinal);
            sums.reserved_bytes += segment.size_bytes;
        }
        let remains = self.remains.iter().filter(|remains| remains.segment.is_some());
        let remains = remains.filter_map(|remains| remains.range);
        sums.reserved_bytes += remains.map(|(_, size_bytes)| size_bytes).sum::<u64>();
        self.check_sums(&sums)?;
        self.check_stitched(&held, &sums)
    }

    /// All chunks of a primitive block are free, then it is in its set, or all are busy. That no other
    /// is in a set follows from the number of free blocks.
    fn check_block(&self, at: u32, block: &Block) -> Result<(), String> {
        if let Some(run) = block.run() {
            ensure!(self.chunks.is_block(run, at), "the chunks of block {at} say otherwise");
            let agree = if block.is_free() {
                self.chunks.all_free(run)
            } else {
                self.chunks.busy().has_all_of(run)
            };
            ensure!(agree, "chunks of block {at}, which is {:?}, say otherwise", block.state);
        }
        if block.is_free() {
            let equals = self.free[block.set as usize].at_least(block.size_bytes);
            let mut equals = equals.take_while(|entry| entry.size_bytes == block.size_bytes);
            ensure!(equals.any(|entry| entry == block.entry(at)), "free block {at} is in no set");
        }
        Ok(())
    }

    fn check_sums(&self, sums: &Sums) -> Result<(), String> {
        let levels = self.levels;
        let (reserved_bytes, active_bytes) = (levels.reserved_bytes, levels.active_bytes);
        ensure!(sums.reserved_bytes == reserved_bytes, "reserved is {}", sums.reserved_bytes);
        ensure!(sums.active_bytes == active_bytes, "active is {}", sums.active_bytes);
        let pooled: usize = self.free.iter().map(|set| set.iter().count()).sum();
        ensure!(pooled == sums.free_blocks, "sets have {pooled} of {} blocks", sums.free_blocks);
        Ok(())
    }

    fn check_stitched(&self, held: &Bits, sums: &Sums) -> Result<(), String> {
        let mut used = Bits::for_count(self.chunks.len());
        let (mut bytes, mut idle, mut parts) = (0, 0, 0);
        let live = self.stitched.iter().zip(0u32..).filter(|(it, _)| !it.runs.is_empty());
        for (stitched, id) in live {
            let all_held = stitched.runs.iter().all(|&run| held.has_all_of(run));
            ensure!(all_held, "stitched block {id} has chunks that went");
            bytes += stitched.size_bytes;
            parts += stitched.parts.len();
            let pooled = self.idle[stitched.stream.index()].contains(id, stitched);
            let is_idle = stitched.state == BlockState::Free;
            ensure!(pooled == is_idle, "stitched block {id} is {:?}", stitched.state);
            ensure!(stitched.parts.is_empty() == is_idle, "stitched block {id} has parts");
            idle += usize::from(is_idle);
            self.check_parts(id, stitched, &mut used)?;
        }
        ensure!(bytes == self.stitched_bytes, "stitched addresses are {bytes}");
        let pooled = self.idle_ids().count();
        ensure!(pooled == idle, "{pooled} idle stitched blocks of {idle} are in sets");
        ensure!(parts <= sums.busy_blocks, "{parts} parts, {} busy blocks", sums.busy_blocks);
        Ok(())
    }

    /// The parts of a stitched block in use are the beginning of its chunks, in order, and nobody
    /// else's.
    fn check_parts(&self, id: u32, stitched: &Stitched, used: &mut Bits) -> Result<(), String> {
        let chunks = |run: Run| run.first..run.end();
        let mut expected = stitched.runs.iter().flat_map(|&run| chunks(run));
        let mut part_bytes = 0;
        for &part in &stitched.parts {
            let block = &self.blocks[part as usize];
            ensure!(block.state == stitched.state, "part {part} of {id} is {:?}", block.state);
            ensure!(block.owner == stitched.owner, "part {part} of {id} has another owner");
            let Some(run) = block.run() else { return Err(format!("part {part} has no chunks")) };
            ensure!(used.has_none_of(run), "part {part} is used twice");
            used.set(run);
            let follows = chunks(run).all(|chunk| expected.next() == Some(chunk));
            ensure!(follows, "part {part} of stitched block {id} is not in order");
            part_bytes += block.size_bytes;
        }
        let size_bytes = self.config.round_size(stitched.requested_bytes.max(1));
        let holds = stitched.parts.is_empty() || part_bytes == size_bytes;
        ensure!(holds, "stitched block {id} uses {part_bytes} bytes for {size_bytes}");
        let tail_bytes: u64 = stitched.runs.iter().map(|run| u64::from(run.count)).sum();
        let whole = tail_bytes * super::chunks::CHUNK_BYTES == stitched.size_bytes;
        ensure!(whole, "stitched block {id} has {tail_bytes} chunks");
        Ok(())
    }
}

impl Sums {
    fn add(&mut self, block: &Block) {
        if block.is_free() {
            self.free_blocks += 1;
        } else {
            self.busy_blocks += 1;
            self.active_bytes += block.size_bytes;
        }
    }
}
