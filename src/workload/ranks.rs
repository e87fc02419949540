//! The jobs of data-parallel ranks: one description, and a seed of its own for each rank.
//!
//! Ranks of a data-parallel job run the same program on other data. What a job draws (lengths of
//! sequences, tokens of experts) is what differs between them, so that a rank is its number and a
//! seed; everything else stays as it is described.

use super::Job;
use crate::units::random::Random;

/// Sets the seeds of ranks apart from everything else that is drawn from a job's seed.
const RANKS: u64 = 0x72_61_6e_6b;
/// Seeds are written in TOML, whose integers have 63 bits.
const SEED_BITS: u64 = i64::MAX as u64;

impl Job {
    /// The job of one data-parallel rank, called `NAME.rankNUMBER`. Its seed hangs on the job's seed
    /// and the number of the rank, from 0, alone; `shown` is that number as it is to be written.
    #[must_use]
    pub fn of_rank(&self, rank: u64, shown: &str) -> Job {
        let mut job = self.clone();
        job.name = format!("{}.rank{shown}", without_rank(&self.name));
        job.train.seed = Random::of(&[self.train.seed, RANKS, rank]).bits() & SEED_BITS;
        job
    }

    /// Whether anything in the job's traces hangs on its seed. Otherwise all ranks are alike.
    pub fn is_drawn(&self) -> bool {
        let draws_lengths = self.lengths.as_ref().is_some_and(|lengths| lengths.min < lengths.max);
        draws_lengths || (self.shape.experts > 0 && self.expert_imbalance > 0.0)
    }
}

/// A name without the rank that it may end in, as in `llama-1b-zero3.rank0`.
fn without_rank(name: &str) -> &str {
    match name.rsplit_once(".rank") {
        Some((stem, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => stem,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{generate, read_job};
    use super::*;

    fn job(extra: &str) -> Job {
        let text = format!(
            "name = \"j\"\n[model]\ntype = \"moe\"\nlayers = 1\nhidden = 128\nvocabulary = 100\n\
             [train]\nbatch = 1\nsequence = 64\nsteps = 2\nseed = 7\n{extra}"
        );
        read_job(&text, &[]).expect("a job")
    }

    #[test]
    fn ranks_have_seeds_of_their_own_that_hang_on_the_jobs() {
        let job = job("");
        let seeds: BTreeSet<u64> = (0..1000).map(|r| job.of_rank(r, "x").train.seed).collect();
        assert_eq!(seeds.len(), 1000);
        assert!(seeds.iter().all(|&seed| seed <= SEED_BITS));
        let mut other = job.clone();
        other.train.seed += 1;
        assert_ne!(other.of_rank(0, "0").train.seed, job.of_rank(0, "0").train.seed);
        let rank = job.of_rank(3, "03");
        assert_eq!(rank.name, "j.rank03");
        assert_eq!(Job { name: job.name.clone(), train: job.train.clone(), ..rank }, job);
    }

    #[test]
    fn a_rank_in_the_name_is_replaced() {
        assert_eq!(without_rank("llama-1b-zero3.rank0"), "llama-1b-zero3");
        assert_eq!(without_rank("a.ranked"), "a.ranked");
        assert_eq!(without_rank("a"), "a");
    }

    /// `is_drawn` is checked against the traces themselves.
    #[test]
    fn ranks_differ_where_something_is_drawn() {
        let extras = [
            ("", false),
            ("[lengths]\nmin = 8\nmax = 64\n", true),
            ("[lengths]\nmin = 64\nmax = 64\n", false),
            ("[moe]\nimbalance = 1.0\n", true),
        ];
        for (extra, differ) in extras {
            let job = job(extra);
            assert_eq!(job.is_drawn(), differ, "{extra}");
            let blocks = |rank| generate(&job.of_rank(rank, "")).expect("a trace").blocks;
            let first = blocks(0);
            assert_eq!((1..6).any(|rank| blocks(rank) != first), differ, "{extra}");
        }
    }
}
