//! What a trace asks for, as a packing problem: every block a buffer, its life counted in events.
//!
//! ```text
//!   event     0        1        2        3        4
//!           alloc a  alloc b  free a   alloc c  free b
//!   a       [─────────────────)
//!   b                [──────────────────────────)
//!   c                                  [────────────────)  never freed: to the end
//! ```

use crate::plan::{Buffer, Problem};
use crate::trace::{Op, StartState, Trace};
use crate::units::BlockId;

/// How blocks of different streams may lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamRule {
    /// In one memory, as if streams waited for each other: the least that any allocator could need.
    #[default]
    Together,
    /// Each stream in a memory of its own, so that none ever waits for another.
    Apart,
}

/// A trace as a packing problem.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// The problem. A tick is the index of an event; blocks of the start begin at tick 0.
    pub problem: Problem,
    /// The block behind every buffer.
    pub blocks: Vec<BlockId>,
}

/// The lives of all blocks of a trace. A block whose free was deferred lives until that use is
/// done. Refused requests (`attempt`) take no part.
pub fn lifetimes(trace: &Trace, granularity_bytes: u64, streams: StreamRule) -> Lifetimes {
    const NONE: u32 = u32::MAX;
    let end = trace.events.len() as u64;
    let mut buffer_of = vec![NONE; trace.blocks.len()];
    let mut lives = Lifetimes {
        problem: Problem { granularity_bytes, ..Problem::default() },
        blocks: Vec::new(),
    };
    let mut begin = |lives: &mut Lifetimes, block: BlockId, tick: u64| {
        let row = &trace.blocks[block.index()];
        let buffer = Buffer::new(tick, end, row.size_bytes);
        let pool = match streams {
            StreamRule::Together => 0,
            StreamRule::Apart => row.stream.0,
        };
        let buffer = if pool == 0 { buffer } else { buffer.with(|extra| extra.pool = pool) };
        buffer_of[block.index()] = lives.problem.buffers.len() as u32;
        lives.problem.buffers.push(buffer);
        lives.blocks.push(block);
    };
    for row in trace.start.iter().flat_map(|start| &start.blocks) {
        if row.state != StartState::Free {
            begin(&mut lives, row.block, 0);
        }
    }
    let mut ends: Vec<(BlockId, u64)> = Vec::new();
    for (tick, event) in (0u64..).zip(&trace.events) {
        match event.op {
            Op::Alloc(block) => begin(&mut lives, block, tick),
            Op::Free(block) | Op::Done(block) => ends.push((block, tick)),
            _ => {}
        }
    }
    for (block, tick) in ends {
        // The uses of a block that was never granted end too.
        if let Some(buffer) = lives.problem.buffers.get_mut(buffer_of[block.index()] as usize) {
            buffer.end = buffer.end.min(tick);
        }
    }
    lives
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::read_text;

    #[test]
    fn lives_end_at_the_free_or_when_the_last_use_is_done() {
        let trace = read_text(
            "alloc a 1MiB\nalloc b 2MiB stream=7\ndefer b\nalloc c 4MiB\ndone b\nfree a\n",
        )
        .expect("a trace");
        let lives = lifetimes(&trace, 512, StreamRule::Together);
        let spans: Vec<_> = lives.problem.buffers.iter().map(|b| (b.start, b.end)).collect();
        assert_eq!(spans, [(0, 5), (1, 4), (3, 6)]);
        let apart = lifetimes(&trace, 512, StreamRule::Apart);
        let pools: Vec<u32> = apart.problem.buffers.iter().map(Buffer::pool).collect();
        assert_eq!(pools, [0, 1, 0]);
    }
}
