//! A history that begins late: the allocator takes over the memory that was there, as it lay.
//!
//! All but two things are then as in the recorded process: the ages of free blocks, which garbage
//! collection looks at, and reservations without any mapped page.
//!
//! A segment starts as one block that is cut into those it had; a reservation as one unmapped block
//! out of which its mapped runs are cut:
//!
//! ```text
//!   base │ unmapped │ run: live │ free │ live │ unmapped │ run: live │ unmapped ...
//! ```

use std::collections::BTreeMap;

use super::expandable::PAGES_MAX;
use super::stats::{Kind, LARGE, SMALL};
use super::{Block, Caching, NONE, State, set_of};
use crate::alloc::Handle;
use crate::trace::{self, StartBlock, StartLayout, StartSegment, StartState};
use crate::units::BlockId;

impl Caching {
    /// Takes over a layout. `blocks` is the block table of the trace. Gives the handles of the
    /// blocks in use in their order; nothing if its runs are not made of this allocator's pages.
    pub(super) fn start_from(
        &mut self,
        start: &StartLayout,
        blocks: &[trace::Block],
    ) -> Option<Vec<Handle>> {
        let reservations = self.reservations_of(start)?;
        let mut handles = Vec::new();
        for (row, of_segment) in start.iter() {
            let kind = if row.large { LARGE } else { SMALL };
            let pool = row.pool.some().map_or(0, |pool| self.pool_sets(pool));
            let set = pool + set_of(row.stream, kind);
            let at = match row.reservation {
                None => self.new_segment(row.address, row.size_bytes, set),
                Some(base) => self.start_run(row, set, kind, base, *reservations.get(&base)?)?,
            };
            self.start_blocks(at, of_segment, blocks, &mut handles);
        }
        // These count what this allocator asks for.
        self.stats.num_device_alloc = 0;
        Some(handles)
    }

    /// Size of every reservation by its base: as one made now, but for at least all runs and up to
    /// what lies above. Nothing if a run does not consist of whole pages, if there are too many of
    /// these, or if something else lies between two runs.
    fn reservations_of(&self, start: &StartLayout) -> Option<BTreeMap<u64, u64>> {
        // Base → bytes that a reservation made now would have, bytes up to its last page, page.
        let mut sizes: BTreeMap<u64, (u64, u64, u64)> = BTreeMap::new();
        // Ordinary segments: address → end.
        let mut ordinary: BTreeMap<u64, u64> = BTreeMap::new();
        let mut pages = 0;
        for row in &start.segments {
            let Some(base) = row.reservation else {
                ordinary.insert(row.address, row.address.checked_add(row.size_bytes)?);
                continue;
            };
            let page_bytes = self.page_bytes(if row.large { LARGE } else { SMALL });
            let offset_bytes = row.address.checked_sub(base)?;
            let whole = |bytes: u64| bytes.is_multiple_of(page_bytes);
            pages += row.size_bytes / page_bytes;
            if !whole(offset_bytes) || !whole(row.size_bytes) || pages > PAGES_MAX {
                return None;
            }
            let end_bytes = offset_bytes.checked_add(row.size_bytes)?;
            let usual_bytes = self.reservation_bytes(page_bytes);
            let (_, used_bytes, _) = sizes.entry(base).or_insert((usual_bytes, 0, page_bytes));
            *used_bytes = end_bytes.max(*used_bytes);
        }
        // Where the first pages were never seen, a base lies too high, and its end would too.
        let nexts = sizes.keys().skip(1).copied().chain([u64::MAX]);
        let fitted = sizes.iter().zip(nexts).map(|((&base, &(usual, used, page)), next)| {
            let above =
                ordinary.range(base..).next().map_or(next, |(&address, _)| address.min(next));
            let clear = ordinary.range(..base).next_back().is_none_or(|(_, &end)| end <= base);
            let room_bytes = (above - base) - (above - base) % page;
            (clear && used <= room_bytes).then(|| (base, usual.max(used).min(room_bytes)))
        });
        fitted.collect()
    }

    /// A run as one block, cut out of its reservation, which is made if it is the first.
    fn start_run(
        &mut self,
        row: StartSegment,
        set: u32,
        kind: Kind,
        base: u64,
        reserved_bytes: u64,
    ) -> Option<u32> {
        let StartSegment { address, size_bytes, .. } = row;
        let tail = self.unmapped[set as usize].range(..=address).next_back();
        let tail = tail.map(|(_, &at)| at).filter(|&at| {
            let segment = self.blocks[at as usize].segment;
            self.segments[segment as usize].address == base
        });
        let tail = match tail {
            Some(tail) => tail,
            None => self.new_reservation(base, reserved_bytes, set, self.page_bytes(kind)),
        };
        let Block { address: begin, size_bytes: room_bytes, .. } = self.blocks[tail as usize];
        let rest_bytes = (begin + room_bytes).checked_sub(address + size_bytes)?;
        let mut at = tail;
        if address > begin {
            at = self.cut(tail, address - begin);
        } else {
            self.unmapped[set as usize].remove(&begin);
        }
        if rest_bytes > 0 {
            let rest = self.cut(at, size_bytes);
            self.unmapped[set as usize].insert(address + size_bytes, rest);
        }
        self.blocks[at as usize].state = State::Free;
        self.gain(set, size_bytes);
        self.stats.mapped(kind, size_bytes);
        Some(at)
    }

    /// Cuts a segment or run into the blocks it had.
    fn start_blocks(
        &mut self,
        mut at: u32,
        of_segment: &[StartBlock],
        blocks: &[trace::Block],
        handles: &mut Vec<Handle>,
    ) {
        let Block { set, expandable, .. } = self.blocks[at as usize];
        let kind = super::kind_of(set);
        for (index, row) in of_segment.iter().enumerate() {
            let next =
                if index + 1 < of_segment.len() { self.cut(at, row.size_bytes) } else { NONE };
            let requested_bytes = blocks.get(row.block.index()).map_or(0, |block| block.size_bytes);
            let size_bytes = row.size_bytes;
            if row.state == StartState::Free {
                self.blocks[at as usize].owner = BlockId::NONE;
                self.put_in(at);
                if !expandable && of_segment.len() > 1 {
                    self.stats.inactive_split.change(kind, 1);
                    self.stats.inactive_split_bytes.change(kind, size_bytes as i64);
                }
            } else {
                let block = &mut self.blocks[at as usize];
                block.owner = row.block;
                block.requested_bytes = requested_bytes;
                block.state = State::Allocated;
                self.stats.alloc(kind, size_bytes, requested_bytes);
                handles.push(Handle(at));
            }
            if row.state == StartState::Deferred {
                self.blocks[at as usize].state = State::Deferred;
                self.stats.free_requested(kind, size_bytes);
                self.stats.defer(kind, size_bytes);
            } else if row.state == StartState::Live
                && size_bytes >= self.config.max_split_size_bytes
            {
                self.stats.oversize_allocations.change(1);
            }
            at = next;
        }
    }
}
