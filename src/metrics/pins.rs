//! Pins: the live blocks that keep free memory from being given back or joined (DESIGN 2).
//!
//! The one design decision: the hard bytes of a place are divided evenly among the live blocks that
//! hold it, so that what pins strand adds up to the hard bytes exactly, and so does any grouping of
//! them. A place is a segment, or a page where memory is mapped page by page:
//!
//! ```text
//!   segment   │ live a │    free 6    │ live b │      a and b strand 3 each; freeing one is no use
//!   segment   │ live c │         free 8         │     c strands 8, and freeing it alone frees them
//!   pages     │ d  free 3 │ free 4  │ free 2  e │     d strands 3, e strands 2; the page between is soft
//! ```

use super::split::{is_foreign, whole_page_bytes};
use crate::alloc::{BlockState, LayoutBlock};
use crate::units::StreamId;

/// A block in use and the free memory that it strands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The block as it lies.
    pub block: LayoutBlock,
    /// Its share of the hard bytes of the places that it holds.
    pub stranded_bytes: u64,
    /// The hard bytes of those places that it holds alone: what freeing it would make whole.
    pub alone_bytes: u64,
}

/// The pins of a layout for a request on `stream` and `pool`, those that strand most first, then in
/// address order. Their stranded bytes add up to the hard bytes of [`split`](super::split).
pub fn pins(layout: &[LayoutBlock], stream: StreamId, pool: u32) -> Vec<Pin> {
    let mut pins = Vec::new();
    for segment in layout.chunk_by(|a, b| a.segment == b.segment) {
        let is_free = |block: &&LayoutBlock| block.state == BlockState::Free;
        let live = segment.iter().filter(|block| block.state != BlockState::Free);
        let mut shares: Vec<Pin> =
            live.map(|&block| Pin { block, stranded_bytes: 0, alone_bytes: 0 }).collect();
        if shares.is_empty() {
            continue;
        }
        let stranded = segment.iter().filter(|b| is_free(b) && !is_foreign(b, stream, pool));
        if segment[0].page_bytes == 0 {
            let hard_bytes = stranded.map(|block| block.size_bytes).sum();
            divide(&mut shares, hard_bytes);
        } else {
            share_pages(stranded, &mut shares);
        }
        pins.extend(shares.into_iter().filter(|pin| pin.stranded_bytes > 0));
    }
    pins.sort_by_key(|pin| (std::cmp::Reverse(pin.stranded_bytes), pin.block.address));
    pins
}

/// Divides bytes evenly; what is left over goes to the first ones.
fn divide(pins: &mut [Pin], hard_bytes: u64) {
    let count = pins.len() as u64;
    for (index, pin) in (0_u64..).zip(pins.iter_mut()) {
        pin.stranded_bytes += hard_bytes / count + u64::from(index < hard_bytes % count);
        if count == 1 {
            pin.alone_bytes += hard_bytes;
        }
    }
}

/// Divides the free parts of pages that are not wholly free among the blocks on each page.
fn share_pages<'a>(free: impl Iterator<Item = &'a LayoutBlock>, pins: &mut [Pin]) {
    let mut pages: Vec<(u64, u64)> = Vec::new();
    for block in free {
        let start = block.address - block.segment_address;
        let end = start + block.size_bytes;
        let whole_bytes = whole_page_bytes(block);
        let first = start / block.page_bytes;
        let last = (end - 1) / block.page_bytes;
        let page_end = (first + 1) * block.page_bytes;
        let head = if start % block.page_bytes == 0 && page_end <= end {
            0
        } else {
            page_end.min(end) - start
        };
        let tail = block.size_bytes - whole_bytes - head;
        pages.extend([(first, head), (last, tail)].into_iter().filter(|&(_, bytes)| bytes > 0));
    }
    // Blocks come in address order, so pages do, and two parts of one page stand together.
    for parts in pages.chunk_by(|a, b| a.0 == b.0) {
        let hard_bytes = parts.iter().map(|part| part.1).sum();
        let (from, to) = pins_on(pins, parts[0].0);
        if from < to {
            divide(&mut pins[from..to], hard_bytes);
        }
    }
}

/// The range of pins, in address order, that lie on a page.
fn pins_on(pins: &[Pin], page: u64) -> (usize, usize) {
    let page_bytes = pins[0].block.page_bytes;
    let (start, end) = (page * page_bytes, (page + 1) * page_bytes);
    let at = |pin: &Pin| pin.block.address - pin.block.segment_address;
    let from = pins.partition_point(|pin| at(pin) + pin.block.size_bytes <= start);
    let to = pins.partition_point(|pin| at(pin) < end);
    (from, to.max(from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{SplitAt, split};
    use crate::units::{BlockId, random::Random};

    /// A layout of segments, each of which is blocks of (bytes, free).
    fn layout(page_bytes: u64, segments: &[&[(u64, bool)]]) -> Vec<LayoutBlock> {
        let mut blocks = Vec::new();
        for (ordinal, segment) in (0..).zip(segments) {
            let segment_address = (u64::from(ordinal) + 1) << 40;
            let mut address = segment_address;
            for &(size_bytes, free) in *segment {
                blocks.push(LayoutBlock {
                    block: if free { BlockId::NONE } else { BlockId(blocks.len() as u32) },
                    segment: ordinal,
                    segment_address,
                    segment_bytes: segment.iter().map(|block| block.0).sum(),
                    page_bytes,
                    address,
                    size_bytes,
                    requested_bytes: if free { 0 } else { size_bytes },
                    stream: StreamId(0),
                    pool: 0,
                    state: if free { BlockState::Free } else { BlockState::Allocated },
                });
                address += size_bytes;
            }
        }
        blocks
    }

    fn figures(layout: &[LayoutBlock]) -> Vec<(u32, u64, u64)> {
        let pins = pins(layout, StreamId(0), 0);
        pins.iter().map(|pin| (pin.block.block.0, pin.stranded_bytes, pin.alone_bytes)).collect()
    }

    #[test]
    fn segments_are_shared_evenly_by_those_that_hold_them() {
        let (live, free) = (false, true);
        let layout = layout(
            0,
            &[&[(1, live), (7, free), (1, live)], &[(1, live), (8, free)], &[(20, free)]],
        );
        // Blocks 0 and 2 share 7: the first has one byte more. Block 3 has 8 alone.
        assert_eq!(figures(&layout), [(3, 8, 8), (0, 4, 0), (2, 3, 0)]);
        // For a request elsewhere nothing of it is hard.
        assert_eq!(pins(&layout, StreamId(1), 0), []);
    }

    #[test]
    fn pages_are_held_by_the_blocks_on_them() {
        let (live, free) = (false, true);
        // Pages of 10: live [0, 7), free [7, 32), live [32, 35), free [35, 40).
        let layout = layout(10, &[&[(7, live), (25, free), (3, live), (5, free)]]);
        // [7, 10) is held by block 0; [10, 30) is soft; [30, 32) and [35, 40) by block 2.
        assert_eq!(figures(&layout), [(2, 7, 7), (0, 3, 3)]);
        // A hole inside one page, between two blocks of it.
        let layout = self::layout(10, &[&[(2, live), (5, free), (3, live)]]);
        assert_eq!(figures(&layout), [(0, 3, 0), (2, 2, 0)]);
    }

    /// Byte by byte: a free byte is hard if its segment or page holds a live byte.
    #[test]
    fn stranded_bytes_add_up_to_the_hard_ones() {
        let mut random = Random::new(7);
        for page_bytes in [0, 10] {
            for _ in 0..300 {
                let mut segment = Vec::new();
                let mut free = random.below(2) == 0;
                for _ in 0..=random.below(9) {
                    segment.push((1 + random.below(25), free));
                    free = !free || random.below(3) == 0 && page_bytes == 0;
                    // Free neighbours are one block.
                    free = free && !segment[segment.len() - 1].1;
                }
                let total: u64 = segment.iter().map(|block| block.0).sum();
                if page_bytes > 0 && !total.is_multiple_of(page_bytes) {
                    segment.push((page_bytes - total % page_bytes, false));
                }
                let layout = layout(page_bytes, &[&segment]);
                let bytes: Vec<bool> = segment
                    .iter()
                    .flat_map(|&(size, free)| std::iter::repeat_n(free, size as usize))
                    .collect();
                let place = if page_bytes == 0 { bytes.len() } else { page_bytes as usize };
                let hard = bytes.chunks(place).filter(|place| place.contains(&false));
                let hard: u64 =
                    hard.map(|place| place.iter().filter(|&&free| free).count() as u64).sum();
                let pins = pins(&layout, StreamId(0), 0);
                let stranded: u64 = pins.iter().map(|pin| pin.stranded_bytes).sum();
                assert_eq!(stranded, hard, "{segment:?}");
                let split = split(&layout, StreamId(0), 0, SplitAt::Event, 0);
                assert_eq!(split.hard_bytes, hard, "{segment:?}");
            }
        }
    }
}
