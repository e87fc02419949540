//! Lowers a packing and raises the lower bound, until they meet or the work is done.
//!
//! ```text
//!   height of the packing ─ ─ ─ ─
//!                a bit below it ─
//!              lower bound + 8 ──   each rung is a search at its own height, which goes on from
//!              lower bound + 4 ──   round to round. The first that finds a packing makes those
//!              lower bound + 2 ──   above it useless; one that proves that there is none makes
//!              lower bound + 1 ──   itself and those below it useless.
//!              lower bound     ──
//! ```
//!
//! A round looks at the rungs from below, so that the outcome does not depend on whether those above
//! the lowest success were searched at the same time by another thread.

use rayon::prelude::*;

use super::Outcome;
use super::board::Board;
use super::rounds::Rounds;
use crate::plan::core::Core;
use crate::plan::portfolio::Placed;
use crate::plan::work::Work;

/// Most items of a core that is searched as a whole.
const ITEMS_MAX: usize = 2000;

/// Rungs besides the lowest.
const RUNGS_MAX: u32 = 6;

/// Within so many units of the lower bound every height is a rung.
const EVERY_HEIGHT_UNITS: u64 = 6;

/// Rounds of the lowest rung for one of every other: it alone can prove.
const LOWEST_ROUNDS: usize = 2;

/// Most units up to which sums of sizes are worked out.
const SUMS_UNITS_MAX: u64 = 1 << 20;

/// Lowers `placed`, which is a packing, as far as the work allows; asks for `lower_bound` first.
/// Gives the lower bound as far as it could be raised: that of `placed.height` is a proof.
///
/// Does nothing for a core of more than some thousand items. With work in units the result does not
/// depend on the number of threads.
pub fn minimize(
    core: &Core,
    placed: &mut Placed,
    lower_bound: u64,
    seed: u64,
    threads: usize,
    work: &mut Work<'_>,
) -> u64 {
    if core.items.len() > ITEMS_MAX || placed.height <= lower_bound {
        return lower_bound;
    }
    let Some(board) = Board::of(core) else { return lower_bound };
    let sums = Sums::of(core, placed.height);
    let mut ladder =
        Ladder { core, board: &board, seed, bound: sums.at_least(lower_bound), rungs: Vec::new() };
    while ladder.bound < placed.height && work.go_on() {
        ladder.set_rungs(placed.height);
        let ended = ladder.round(threads, work);
        // From below: what is found makes all above it useless, whether searched or not.
        let mut raised = None;
        for (cap, outcome) in ended {
            match outcome {
                Outcome::Infeasible => raised = Some(cap + 1),
                Outcome::Unknown => {}
                Outcome::Found(offsets) => {
                    let height = core.height(&offsets);
                    *placed = Placed { offsets, height, found_by: "exact" };
                    break;
                }
            }
        }
        if let Some(above) = raised {
            ladder.bound = sums.at_least(above).min(placed.height);
        }
    }
    ladder.bound
}

/// Searches at several heights.
struct Ladder<'a> {
    core: &'a Core,
    board: &'a Board,
    seed: u64,
    /// No packing is lower.
    bound: u64,
    /// From the lowest up.
    rungs: Vec<Rounds<'a>>,
}

impl Ladder<'_> {
    /// Keeps the rungs that are still of use, adds those that are missing.
    fn set_rungs(&mut self, height: u64) {
        let wanted = heights(self.bound, height);
        let mut old = std::mem::take(&mut self.rungs).into_iter().peekable();
        for cap in wanted {
            while old.next_if(|rung| rung.cap < cap).is_some() {}
            let rung = old.next_if(|rung| rung.cap == cap);
            let rung = rung.unwrap_or_else(|| Rounds::new(self.core, self.board, cap, self.seed));
            self.rungs.push(rung);
        }
    }

    /// One round of every rung, up to the first that finds a packing; their outcomes from below.
    fn round(&mut self, threads: usize, work: &mut Work<'_>) -> Vec<(u64, Outcome)> {
        let count = self.rungs.len() as u64;
        let share = (work.left_units() / count).saturating_add(1);
        let bound = self.bound;
        let part = work.part(share);
        let one = |rung: &mut Rounds<'_>| {
            let mut part = part.clone();
            let times = if rung.cap == bound { LOWEST_ROUNDS } else { 1 };
            let mut outcome = Outcome::Unknown;
            for _ in 0..times {
                if outcome == Outcome::Unknown && !part.over() {
                    outcome = rung.round(&mut part);
                }
            }
            (rung.cap, outcome, part.spent_units())
        };
        let found = |outcome: &Outcome| matches!(outcome, Outcome::Found(_));
        let ended: Vec<_> = if threads > 1 {
            self.rungs.par_iter_mut().map(one).collect()
        } else {
            let mut ended = Vec::new();
            for rung in &mut self.rungs {
                ended.push(one(rung));
                if ended.last().is_some_and(|(_, outcome, _)| found(outcome)) {
                    break;
                }
            }
            ended
        };
        let used = ended.iter().position(|(_, outcome, _)| found(outcome));
        let used = used.map_or(ended.len(), |at| at + 1);
        work.spend(ended[..used].iter().map(|(.., units)| units).sum());
        ended.into_iter().take(used).map(|(cap, outcome, _)| (cap, outcome)).collect()
    }
}

/// Heights to search at, from the lower bound to below that of a packing: ascending.
fn heights(bound: u64, height: u64) -> Vec<u64> {
    let gap = height - bound;
    if gap <= EVERY_HEIGHT_UNITS {
        return (bound..height).collect();
    }
    // The largest power of two that is below the gap, and smaller ones.
    let largest = (gap - 1).ilog2();
    let smallest = (largest + 1).saturating_sub(RUNGS_MAX);
    let above = (smallest..=largest).map(|power| bound + (1 << power));
    // A small step down from what is there, for when all else is hard.
    let near = height - (gap / 8).max(1);
    let mut heights: Vec<u64> = std::iter::once(bound).chain(above).chain([near]).collect();
    heights.sort_unstable();
    heights.dedup();
    heights
}

/// Heights that a packing could have at all.
///
/// In a packing in which nothing can be lowered, the highest item lies on another, and so on to the
/// ground: the height is a sum of sizes. Nothing is said if offsets are not free.
struct Sums {
    reached: Vec<u64>,
}

impl Sums {
    fn of(core: &Core, height: u64) -> Sums {
        if height > SUMS_UNITS_MAX || !core.simple() {
            return Sums { reached: Vec::new() };
        }
        let words = (height / 64 + 1) as usize;
        let mut reached = vec![0u64; words];
        reached[0] = 1;
        for item in &core.items {
            let (skip, shift) = ((item.size / 64) as usize, (item.size % 64) as u32);
            for word in (skip..words).rev() {
                let mut moved = reached[word - skip] << shift;
                if shift > 0 && word > skip {
                    moved |= reached[word - skip - 1] >> (64 - shift);
                }
                reached[word] |= moved;
            }
        }
        Sums { reached }
    }

    /// The lowest height of at least `height` that a packing could have.
    fn at_least(&self, height: u64) -> u64 {
        let reached = |sum: u64| {
            let word = self.reached.get((sum / 64) as usize);
            word.is_none_or(|word| word >> (sum % 64) & 1 == 1)
        };
        (height..).find(|&sum| reached(sum)).unwrap_or(height)
    }
}
