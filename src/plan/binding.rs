//! When a lower bound is reached, in ticks.
//!
//! Solvers know instants, one for each tick at which something begins to be needed; whatever ends
//! ends for them at the next one. What is told to people ends when it ends:
//!
//! ```text
//!   ticks     3    5     8         instants 0 (tick 3) and 1 (tick 8), both with 4 bytes live:
//!             ├─4──┤     ├─4──┤    the bound is reached in [3, 5) and in [8, ..), not in [3, ..)
//! ```

use std::ops::Range;

use super::core::PoolCores;
use super::problem::{BINDING_MAX, Binding, Problem};

/// A run of instants of one stretch at which the bound is reached.
pub(super) struct Run {
    /// Which stretch of the pool.
    pub(super) stretch: usize,
    /// The instants.
    pub(super) instants: Range<u32>,
    /// Buffers that are live in it.
    pub(super) buffers: u64,
}

/// The first [`BINDING_MAX`] intervals of some runs, which are in order of time.
pub(super) fn intervals(
    problem: &Problem,
    pool: &PoolCores,
    runs: impl Iterator<Item = Run>,
) -> Vec<Binding> {
    let ends = ends(problem, pool.pool);
    let mut found: Vec<Binding> = Vec::new();
    for Run { stretch, instants, buffers } in runs {
        for instant in instants {
            let start = pool.tick(stretch, instant);
            // Something is live at an instant, so something ends after it.
            let first = ends.partition_point(|&end| end <= start);
            let born = pool.tick(stretch, instant + 1);
            let end = ends.get(first).map_or(born, |&end| end.min(born));
            let full = found.len() == BINDING_MAX;
            match found.last_mut() {
                Some(last) if last.end == start && last.buffers == buffers => last.end = end,
                _ if full => return found,
                _ => found.push(Binding { start, end, buffers }),
            }
        }
    }
    found
}

/// Ticks at which anything in a pool may begin to need less, ascending.
fn ends(problem: &Problem, pool: u32) -> Vec<u64> {
    let buffers = problem.buffers.iter().filter(|buffer| buffer.pool() == pool);
    let mut ends: Vec<u64> = buffers
        .flat_map(|buffer| {
            let gaps = buffer.extra.iter().flat_map(|extra| &extra.gaps);
            gaps.flat_map(|gap| [gap.start, gap.end]).chain([buffer.end])
        })
        .collect();
    ends.sort_unstable();
    ends
}
