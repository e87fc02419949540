//! Where a program stops loading weights and begins to compute. Only the model of a driver's
//! addresses is told: the host's copies and the first kernels take addresses then, which decides
//! where later segments lie.

use crate::device::sim::addresses::HostCopy;
use crate::trace::{Op, Trace};
use crate::units::BlockId;

/// How a program begins that loads its weights before it computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loading {
    /// Events until it computes.
    pub(super) events: usize,
    /// The host's copy of the last block loaded that is a range of its own there.
    pub(super) last_copy: HostCopy,
}

/// Smaller requests come from the heap of the host.
const HOST_HEAP_BYTES: u64 = 128 << 10;

impl Loading {
    /// A program computes from the alloc of the first block that is freed while the program still
    /// allocates; what comes before stays. None if even its first block is freed.
    pub(super) fn of(trace: &Trace) -> Option<Loading> {
        let allocs = || {
            trace.events.iter().enumerate().filter_map(|(index, event)| match event.op {
                Op::Alloc(block) => Some((index, block)),
                _ => None,
            })
        };
        let (last_alloc, _) = allocs().next_back()?;
        let mut freed = vec![false; trace.blocks.len()];
        for event in &trace.events[..last_alloc] {
            if let Op::Free(block) | Op::Defer(block) = event.op {
                freed[block.index()] = true;
            }
        }
        let stays =
            |(index, block): (usize, BlockId)| (!freed[block.index()]).then_some((index, block));
        let mut last_copy = None;
        let mut largest_bytes = 0;
        let mut events = 0;
        for (index, block) in allocs().map_while(stays) {
            events = index + 1;
            let size_bytes = trace.blocks[block.index()].size_bytes;
            if size_bytes >= HOST_HEAP_BYTES {
                last_copy = Some(HostCopy { size_bytes, alone: size_bytes > largest_bytes });
                largest_bytes = largest_bytes.max(size_bytes);
            }
        }
        last_copy.map(|last_copy| Loading { events, last_copy })
    }
}
