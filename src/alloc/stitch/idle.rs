//! Stitched blocks of one stream in nobody's hands, by size and address.
//!
//! Most searches pass over many whose chunks are busy. Each keeps the busy chunk that was seen last,
//! which is likely to be busy still: one bit instead of the runs of the block.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::chunks::Chunks;
use super::stitched::Stitched;

/// A stitched block in nobody's hands.
#[derive(Clone, Copy, Debug)]
struct Idle {
    address: u64,
    id: u32,
    /// One of its chunks: the one that was busy when somebody looked last.
    hint: u32,
}

/// Those of one stream.
#[derive(Clone, Debug, Default)]
pub(super) struct IdleSet {
    /// By size, then in the order of their addresses.
    sizes: BTreeMap<u64, Vec<Idle>>,
    bytes: u64,
}

impl IdleSet {
    /// The bytes of their addresses.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a block.
    pub(super) fn insert(&mut self, id: u32, stitched: &Stitched) {
        let hint = stitched.runs.first().map_or(0, |run| run.first);
        let idle = Idle { address: stitched.address, id, hint };
        let equals = self.sizes.entry(stitched.size_bytes).or_default();
        let at = equals.partition_point(|other| other.address < idle.address);
        equals.insert(at, idle);
        self.bytes += stitched.size_bytes;
    }

    /// Takes a block out. Says whether it was there.
    pub(super) fn remove(&mut self, stitched: &Stitched) -> bool {
        let Some(equals) = self.sizes.get_mut(&stitched.size_bytes) else { return false };
        let at = equals.binary_search_by_key(&stitched.address, |other| other.address);
        let Ok(at) = at else { return false };
        equals.remove(at);
        self.bytes -= stitched.size_bytes;
        true
    }

    /// Whether a block is there.
    pub(super) fn contains(&self, id: u32, stitched: &Stitched) -> bool {
        let equals = self.sizes.get(&stitched.size_bytes);
        equals.is_some_and(|equals| equals.iter().any(|other| other.id == id))
    }

    /// The smallest block of the sizes all of whose chunks are free, with the lowest address.
    pub(super) fn find_free(
        &mut self,
        sizes: RangeInclusive<u64>,
        stitched: &[Stitched],
        chunks: &Chunks,
    ) -> Option<u32> {
        if sizes.is_empty() {
            return None;
        }
        for idle in self.sizes.range_mut(sizes).flat_map(|(_, equals)| equals) {
            if chunks.is_busy(idle.hint) {
                continue;
            }
            match stitched[idle.id as usize].busy_chunk(chunks) {
                None => return Some(idle.id),
                Some(busy) => idle.hint = busy,
            }
        }
        None
    }

    /// All in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.sizes.values().flatten().map(|idle| idle.id)
    }
}
