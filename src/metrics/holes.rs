//! Holes: free ranges, by the stream and pool that may use them (DESIGN 2).

use std::collections::BTreeMap;

use crate::alloc::{BlockState, LayoutBlock};
use crate::units::StreamId;

/// The holes of one stream and pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoleGroup {
    /// The stream; [`StreamId::NONE`] if any may use them.
    pub stream: StreamId,
    /// The allocator's number of the pool.
    pub pool: u32,
    /// Number of holes.
    pub holes: u64,
    /// Their sizes together in bytes.
    pub size_bytes: u64,
    /// The largest in bytes.
    pub largest_bytes: u64,
    /// Bytes in holes that lie in segments, or on pages, without any block in use.
    pub whole_bytes: u64,
    /// Holes by size: `(exponent, holes, bytes)` of those in [2^exponent, 2^(exponent + 1)).
    pub by_size: Vec<(u32, u64, u64)>,
}

/// The holes of a layout, by stream and pool: the groups in the order of their bytes, largest first.
pub fn holes(layout: &[LayoutBlock]) -> Vec<HoleGroup> {
    let mut groups: BTreeMap<(u32, u32), HoleGroup> = BTreeMap::new();
    for segment in layout.chunk_by(|a, b| a.segment == b.segment) {
        let pinned = segment.iter().any(|block| block.state != BlockState::Free);
        for block in segment.iter().filter(|block| block.state == BlockState::Free) {
            let whole_bytes = match block.page_bytes {
                0 if pinned => 0,
                0 => block.size_bytes,
                _ => super::split::whole_page_bytes(block),
            };
            let group = groups.entry((block.stream.0, block.pool));
            let group = group.or_insert_with(|| HoleGroup::new(block.stream, block.pool));
            group.add(block.size_bytes, whole_bytes);
        }
    }
    let mut groups: Vec<HoleGroup> = groups.into_values().collect();
    // Stable: groups of equal size stay in the order of stream and pool.
    groups.sort_by_key(|group| std::cmp::Reverse(group.size_bytes));
    groups
}

impl HoleGroup {
    fn new(stream: StreamId, pool: u32) -> HoleGroup {
        HoleGroup {
            stream,
            pool,
            holes: 0,
            size_bytes: 0,
            largest_bytes: 0,
            whole_bytes: 0,
            by_size: Vec::new(),
        }
    }

    fn add(&mut self, size_bytes: u64, whole_bytes: u64) {
        self.holes += 1;
        self.size_bytes += size_bytes;
        self.largest_bytes = self.largest_bytes.max(size_bytes);
        self.whole_bytes += whole_bytes;
        let exponent = size_bytes.checked_ilog2().unwrap_or(0);
        match self.by_size.binary_search_by_key(&exponent, |class| class.0) {
            Ok(index) => {
                self.by_size[index].1 += 1;
                self.by_size[index].2 += size_bytes;
            }
            Err(index) => self.by_size.insert(index, (exponent, 1, size_bytes)),
        }
    }
}
