//! Which orders are tried at one cap, and for how long.
//!
//! What a search of valleys costs depends on the order in which branches are tried, and the best
//! order differs from problem to problem by factors of a thousand, as does luck. So all orders get a
//! few nodes each, with other draws every time, and sometimes many (Luby, Sinclair and Zuckerman
//! 1993: within a logarithm of the best that restarts can do). States that were searched to their
//! end stay known, so that a round does not do again what an earlier one has done.

use super::Outcome;
use super::board::Board;
use super::pairs;
use super::tree::{End, First, Order, Pick, Snug, Tree};
use crate::plan::core::Core;
use crate::plan::work::Work;
use crate::units::random::mix;

/// Nodes of an order in the shortest rounds.
const NODES_MIN: u64 = 1000;

/// Most fingerprints that are kept, of 16 bytes each.
const SLOTS_MAX: usize = 1 << 21;

/// Units of work in the first round for shapes that overhang, as they are.
const PAIRS_UNITS_FIRST: u64 = 1 << 20;

/// What comes first, in the order in which it is tried.
const FIRSTS: [First; 6] =
    [First::Area, First::Width, First::Size, First::SizeTwice, First::Narrow, First::Small];

/// Which section is next, in turn.
const PICKS: [Pick; 2] = [Pick::Lowest, Pick::Conflicts];

/// What fits well, in turn.
const SNUGS: [Snug; 3] = [Snug::Sides, Snug::Corners, Snug::No];

/// A search at one cap that goes on from round to round.
pub(super) struct Rounds<'a> {
    core: &'a Core,
    board: &'a Board,
    /// The cap.
    pub(super) cap: u64,
    seed: u64,
    round: u32,
    /// Nothing once it is searched to its end: a board of shapes taken down may have no packing
    /// where the core has one.
    tree: Option<Tree<'a>>,
}

impl<'a> Rounds<'a> {
    /// A search that has not begun.
    pub(super) fn new(core: &'a Core, board: &'a Board, cap: u64, seed: u64) -> Rounds<'a> {
        let tree = Tree::new(board, cap, SLOTS_MAX).ok();
        Rounds { core, board, cap, seed, round: 0, tree }
    }

    /// Every order once.
    pub(super) fn round(&mut self, work: &mut Work<'_>) -> Outcome {
        let round = self.round;
        self.round += 1;
        if let Some(tree) = &mut self.tree {
            match one_round(tree, round, self.seed, work) {
                End::Found => return Outcome::Found(offsets(self.board, tree)),
                End::None => self.tree = None,
                End::Limit => {}
            }
        }
        match (&self.tree, self.board.exact) {
            (None, true) => Outcome::Infeasible,
            (Some(_), true) => Outcome::Unknown,
            (_, false) => {
                let mut part = work.part(PAIRS_UNITS_FIRST << round.min(40));
                let outcome = pairs::search(self.core, self.cap, &mut part);
                work.spend(part.spent_units());
                outcome
            }
        }
    }
}

fn one_round(tree: &mut Tree<'_>, round: u32, seed: u64, work: &mut Work<'_>) -> End {
    // 1, 2, 1, 4, 1, 2, 1, 8, ... times the least: as much time for long runs as for short ones.
    let nodes_max = NODES_MIN << (round + 1).trailing_zeros();
    for (at, &first) in FIRSTS.iter().enumerate() {
        let run = u64::from(round) * FIRSTS.len() as u64 + at as u64;
        let order = Order {
            first,
            pick: PICKS[(at + round as usize) % PICKS.len()],
            snug: SNUGS[(at + round as usize) % SNUGS.len()],
            chance: if round == 0 { 0 } else { 8 },
            seed: mix(seed ^ mix(run)),
        };
        let end = tree.run(order, nodes_max, work);
        if end != End::Limit || work.over() {
            return end;
        }
    }
    End::Limit
}

/// Offsets by item of the core.
fn offsets(board: &Board, tree: &Tree<'_>) -> Vec<u64> {
    let mut offsets = vec![0; board.pieces.len()];
    for (piece, &offset) in board.pieces.iter().zip(&tree.state.offsets) {
        offsets[piece.item as usize] = offset;
    }
    offsets
}
