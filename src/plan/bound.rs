//! A height that no packing can be below, and when it is reached.
//!
//! At one instant whatever is live lies side by side, so the sum of sizes is a bound; and what is
//! fixed has its upper end where it is. Where every live item is aligned to a multiple of some
//! `a > 1`, each but the highest also takes its padding up to the next multiple.

use super::core::{Core, Normal, PoolCores, Rect, gcd};
use super::problem::{BadProblem, Problem};

/// The bound of one stretch, in units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// No packing is lower.
    pub height: u64,
    /// Maximal runs of instants at which it is reached, with the number of rectangles live there;
    /// earliest first, at most as many as asked for.
    pub binding: Vec<(std::ops::Range<u32>, u64)>,
}

/// What is live at one instant.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    units: i64,
    padded: i64,
    rects: i64,
}

/// The load bound of a stretch: the most that is live at one instant.
pub fn load_bound(core: &Core, binding_max: usize) -> Bound {
    let align = common_alignment(core);
    let mut changes = vec![Change::default(); core.instants as usize + 1];
    let mut add = |rect: &Rect, padded: u64| {
        let units = (rect.high - rect.low) as i64;
        let padded = padded as i64;
        let (start, end) = (rect.start as usize, rect.end as usize);
        changes[start].units += units;
        changes[start].padded += padded;
        changes[start].rects += 1;
        changes[end].units -= units;
        changes[end].padded -= padded;
        changes[end].rects -= 1;
    };
    for index in 0..core.items.len() {
        for rect in core.rects(index) {
            add(&rect, (rect.high - rect.low).div_ceil(align) * align);
        }
    }
    for rect in &core.obstacles {
        add(rect, rect.high - rect.low);
    }
    let tops = obstacle_tops(core);
    // The padding of the highest may stick out: no alignment pads by more than one less than it.
    let slack = align - 1;
    let mut bound = Bound::default();
    let mut live = Change::default();
    for (instant, change) in changes.iter().enumerate().take(core.instants as usize) {
        live.units += change.units;
        live.padded += change.padded;
        live.rects += change.rects;
        let padded = (live.padded as u64).saturating_sub(slack);
        let top = tops.get(instant).copied().unwrap_or(0);
        let height = padded.max(live.units as u64).max(top);
        let instant = instant as u32;
        if height > bound.height {
            bound.height = height;
            bound.binding.clear();
        }
        // With a height of 0 all there is is a floor below the core: it binds throughout.
        if height == bound.height {
            let full = bound.binding.len() >= binding_max;
            match bound.binding.last_mut() {
                Some((run, rects)) if run.end == instant && *rects == live.rects as u64 => {
                    run.end += 1;
                }
                _ if full => {}
                _ => bound.binding.push((instant..instant + 1, live.rects as u64)),
            }
        }
    }
    bound
}

/// The load bound of a pool: the highest of its stretches', in units.
pub fn pool_load(pool: &PoolCores) -> u64 {
    let stretches = pool.stretches.iter();
    let loads = stretches.map(|part| part.floor_units + load_bound(&part.core, 0).height);
    loads.max().unwrap_or(0)
}

/// The load bound of a problem, all pools together, in bytes: what [`solve`](super::solve) knows
/// before it searches.
///
/// # Errors
/// If the problem contradicts itself.
pub fn load_bytes(problem: &Problem) -> Result<u64, BadProblem> {
    let normal = Normal::of(problem)?;
    Ok(normal.pools.iter().map(pool_load).sum::<u64>() * normal.unit_bytes)
}

/// What divides every item's alignment. 1 if anything is fixed or shaped: those keep no padding,
/// and may lie in that of others.
fn common_alignment(core: &Core) -> u64 {
    if !core.obstacles.is_empty() || !core.parts.is_empty() {
        return 1;
    }
    core.items.iter().fold(0, |common, item| gcd(common, item.align)).max(1)
}

/// End of the highest fixed rectangle at every instant; empty if nothing is fixed.
fn obstacle_tops(core: &Core) -> Vec<u64> {
    if core.obstacles.is_empty() {
        return Vec::new();
    }
    let mut tops = vec![0; core.instants as usize];
    let mut by_end: Vec<&Rect> = core.obstacles.iter().collect();
    by_end.sort_unstable_by_key(|rect| rect.start);
    let mut live: std::collections::BinaryHeap<(u64, u32)> = std::collections::BinaryHeap::new();
    let mut waiting = by_end.into_iter().peekable();
    for (instant, top) in tops.iter_mut().enumerate() {
        while let Some(rect) = waiting.next_if(|rect| rect.start as usize <= instant) {
            live.push((rect.high, rect.end));
        }
        while live.peek().is_some_and(|&(_, end)| end as usize <= instant) {
            live.pop();
        }
        *top = live.peek().map_or(0, |&(high, _)| high);
    }
    tops
}
