//! Exact search: a packing of at most a given height, or the proof that there is none.
//!
//! ```text
//!   Core ──board──> who meets whom, by section of time
//!                    │
//!                    ├─ state:  lower bounds of offsets, and what follows from them
//!                    ├─ tree:   branches on what lies at the floor of a valley
//!                    ├─ nogood: states that are known to lead nowhere
//!                    ├─ rounds: many orders, each for a while
//!                    ├─ pairs:  for shapes that overhang: which of two is the upper one
//!                    └─ ladder: heights from the lower bound up, each by rounds
//! ```
//!
//! A search with little slack is fast because nothing may be lost, and one far above the bound is
//! fast because much may; between them it is hard. So the lower bound is asked for first, and what
//! lies above it on a ladder of growing steps.

mod board;
mod ladder;
mod nogood;
mod pairs;
mod rounds;
mod state;
#[cfg(test)]
mod tests;
mod tree;

use board::Board;
pub use ladder::minimize;
use rounds::Rounds;

use super::core::Core;
use super::work::Work;

/// What a search comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Offsets in units, by item.
    Found(Vec<u64>),
    /// There is no packing of this height.
    Infeasible,
    /// The work was done before the search was.
    Unknown,
}

/// Seeks a packing of at most `cap` units.
///
/// Complete: with enough work the answer is [`Outcome::Unknown`] only for a core of some millions
/// of pairs of items that live together, which would take too much memory.
/// A function of its arguments alone as long as `work` counts units.
pub fn search(core: &Core, cap: u64, seed: u64, work: &mut Work<'_>) -> Outcome {
    let Some(board) = Board::of(core) else { return Outcome::Unknown };
    let mut rounds = Rounds::new(core, &board, cap, seed);
    loop {
        let outcome = rounds.round(work);
        if outcome != Outcome::Unknown || work.over() {
            return outcome;
        }
    }
}
