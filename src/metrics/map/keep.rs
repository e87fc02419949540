//! The largest lives exactly, the others as shade.

use std::cmp::Reverse;

use super::Life;
use super::shade::Cells;

/// Fewest lives between two sweeps: each sweep looks at all that are kept.
const SWEEP_MIN: usize = 1024;

/// Keeps the lives with the largest area. Which ones does not hang on when it sweeps: the order is
/// total.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    lives_max: usize,
    lives: Vec<Life>,
    count: u64,
    rest: Cells,
}

impl Keep {
    pub(super) fn new(events: u64, lives_max: usize) -> Keep {
        Keep { lives_max, lives: Vec::new(), count: 0, rest: Cells::new(events) }
    }

    /// How many there were in all.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Takes a life; one that began and ended at the same event has no area and is left out.
    pub(super) fn add(&mut self, life: Life) {
        if life.from_event >= life.to_event || life.size_bytes == 0 {
            return;
        }
        self.count += 1;
        self.lives.push(life);
        if self.lives.len() >= 2 * self.lives_max + SWEEP_MIN {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        if self.lives.len() <= self.lives_max {
            return;
        }
        self.lives.select_nth_unstable_by_key(self.lives_max, |life| {
            let events = u128::from(life.to_event - life.from_event);
            let area = u128::from(life.size_bytes) * events;
            // Of equals those that are kept lie all over the map.
            let shuffled = life.from_event.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (Reverse(area), shuffled, life.from_event, life.spot, life.block)
        });
        for life in self.lives.drain(self.lives_max..) {
            self.rest.add(&life);
        }
    }

    /// The lives kept, in order of their beginnings, and the shade of the others.
    pub(super) fn finish(mut self) -> (Vec<Life>, Cells) {
        self.sweep();
        self.lives.sort_unstable_by_key(|life| (life.from_event, life.block, life.spot));
        (self.lives, self.rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::map::Spot;
    use crate::units::BlockId;

    fn life(block: u32, from_event: u64, to_event: u64, size_bytes: u64) -> Life {
        let spot = Spot { lane: 0, offset_bytes: u64::from(block) * 1000 };
        let block = BlockId(block);
        Life { block, from_event, freed_event: to_event, to_event, spot, size_bytes }
    }

    #[test]
    fn the_largest_areas_stay_whatever_the_order() {
        let mut lives: Vec<Life> =
            (0..5000).map(|n| life(n, 0, 1 + u64::from(n) % 7, 1 + u64::from(n))).collect();
        let kept = |lives: &[Life]| {
            let mut keep = Keep::new(10, 100);
            lives.iter().for_each(|&life| keep.add(life));
            assert_eq!(keep.count(), 5000);
            keep.finish().0
        };
        let mut by_area: Vec<u64> =
            lives.iter().map(|life| life.size_bytes * life.to_event).collect();
        by_area.sort_unstable_by(|a, b| b.cmp(a));
        let one = kept(&lives);
        lives.reverse();
        assert_eq!(one, kept(&lives));
        assert_eq!(one.len(), 100);
        let least = one.iter().map(|life| life.size_bytes * life.to_event).min();
        assert_eq!(least, Some(by_area[99]));
    }

    #[test]
    fn what_has_no_area_is_no_life() {
        let mut keep = Keep::new(10, 100);
        keep.add(life(0, 3, 3, 5));
        assert_eq!(keep.count(), 0);
    }
}
