//! Ranks, and which chunk has which number (spec patrickstar 1.1, 4.1).
//!
//! Ids come from one counter, in the order in which chunks are created, and break ties of the
//! eviction. Of n fp16 chunks and d dummies:
//!
//! ```text
//!   id    0     1     2     3   ...  2n-1 │ 2n ... 2n+d-1 │ 2n+d      2n+d+1   ...  4n+d-1
//!       fp16  fp32  fp16  fp32  ...  fp32 │    dummies    │ momentum  variance ... variance
//!   no.   0     0     1     1   ...   n-1 │  n ... n+d-1  │  0         0       ...   n-1
//! ```

use std::ops::Range;

use super::states::ChunkList;

/// The ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct World {
    /// Data-parallel ranks, which share the chunks out.
    pub(super) ranks: u32,
    /// Those of them that share a host.
    pub(super) local_ranks: u32,
    /// The one that is simulated.
    pub(super) rank: u32,
}

/// Numbers and ids of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ids {
    pub(super) world: World,
    /// fp16 chunks with tensors.
    pub(super) real: u32,
    /// fp16 chunks that fill the last communication group up.
    pub(super) dummies: u32,
}

impl Ids {
    pub(super) fn new(world: World, real: u32) -> Ids {
        Ids { world, real, dummies: (world.ranks - real % world.ranks) % world.ranks }
    }

    /// fp16 chunks with the dummies.
    pub(super) fn numbers(self) -> u32 {
        self.real + self.dummies
    }

    /// The chunk that holds this of the group with this number.
    pub(super) fn of(self, list: ChunkList, number: u32) -> u32 {
        let behind = 2 * self.real + self.dummies;
        match list {
            ChunkList::Fp16 if number < self.real => 2 * number,
            ChunkList::Fp16 => self.real + number,
            ChunkList::Fp32 => 2 * number + 1,
            ChunkList::Momentum => behind + 2 * number,
            ChunkList::Variance => behind + 2 * number + 1,
        }
    }

    /// fp16 chunks are dealt out one by one.
    pub(super) fn owner(self, number: u32) -> u32 {
        number % self.world.ranks
    }

    pub(super) fn is_local(self, number: u32) -> bool {
        self.owner(number) == self.world.rank
    }

    /// Those of the numbers that are other ranks'.
    pub(super) fn remote(self, numbers: Range<u32>) -> impl Iterator<Item = u32> {
        numbers.filter(move |&number| !self.is_local(number))
    }

    /// Numbers of the communication group of a chunk: one of each rank.
    pub(super) fn group(self, number: u32) -> Range<u32> {
        let first = number - number % self.world.ranks;
        first..first + self.world.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_dense_in_the_order_of_creation() {
        let ids = Ids::new(World { ranks: 4, local_ranks: 4, rank: 1 }, 6);
        assert_eq!((ids.dummies, ids.numbers()), (2, 8));
        let mut all: Vec<u32> = (0..6)
            .flat_map(|number| ChunkList::ALL.map(|list| ids.of(list, number)))
            .chain((6..8).map(|number| ids.of(ChunkList::Fp16, number)))
            .collect();
        all.sort_unstable();
        assert_eq!(all, (0..26).collect::<Vec<u32>>());
        assert_eq!(ids.of(ChunkList::Fp16, 6), 12);
        assert_eq!(ids.of(ChunkList::Momentum, 0), 14);
        assert_eq!(ids.group(5), 4..8);
        assert!(ids.is_local(5) && !ids.is_local(6));
        let single = Ids::new(World { ranks: 1, local_ranks: 1, rank: 0 }, 5);
        assert_eq!((single.dummies, single.group(3)), (0, 3..4));
    }
}
