//! Private pools of several ranks in one trace.
//!
//! Requests go to the pool that was entered last, whoever asks. So where a rank asks, pools of other
//! ranks are left and its own are entered, just before it does:
//!
//! ```text
//!   rank0    enter p   alloc a                         alloc b   leave p
//!   rank1                                   alloc x
//!   merged   enter p   alloc a   leave p    alloc x    enter p   alloc b   leave p
//! ```

use super::RankTrace;
use crate::trace::{Event, Op};
use crate::units::PoolId;

/// Which pools are entered, by rank and in the merged trace; innermost last.
pub(super) struct Entered {
    of_rank: Vec<Vec<PoolId>>,
    merged: Vec<PoolId>,
    /// How often pools were left or entered that no rank left or entered then.
    pub(super) switches: u64,
}

impl Entered {
    pub(super) fn new(ranks: &[RankTrace<'_>]) -> Entered {
        Entered { of_rank: vec![Vec::new(); ranks.len()], merged: Vec::new(), switches: 0 }
    }

    /// Follows an event of a rank, whose pools are entered.
    pub(super) fn apply(&mut self, rank: usize, op: Op) {
        match op {
            Op::PoolEnter(pool) => {
                self.of_rank[rank].push(pool);
                self.merged.push(pool);
            }
            Op::PoolLeave(_) => {
                self.of_rank[rank].pop();
                self.merged.pop();
            }
            _ => {}
        }
    }

    /// Leaves and enters pools until they are those that a rank is in.
    pub(super) fn be_in_those_of(&mut self, rank: usize, time_ns: u64, events: &mut Vec<Event>) {
        if self.of_rank[rank] != self.merged {
            let pools = self.of_rank[rank].clone();
            self.be_in(&pools, time_ns, events);
        }
    }

    /// Leaves and enters pools until they are these.
    pub(super) fn be_in(&mut self, pools: &[PoolId], time_ns: u64, events: &mut Vec<Event>) {
        if self.merged == pools {
            return;
        }
        self.switches += 1;
        let same = self.merged.iter().zip(pools).take_while(|(one, other)| one == other).count();
        let left = self.merged.drain(same..).rev().map(Op::PoolLeave);
        let entered = pools[same..].iter().copied().map(Op::PoolEnter);
        events.extend(left.chain(entered).map(|op| Event { time_ns, op }));
        self.merged.extend_from_slice(&pools[same..]);
    }
}
