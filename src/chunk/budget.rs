//! How much of each device chunks may have (spec patrickstar 2.3, 2.4).
//!
//! ```text
//!   GPU  ├──────────────── capacity ────────────────┤
//!        ├────────── G = capacity · rg ───────┤ context, fragmentation
//!        ├─ chunks ─┤─ reserve ─┤─ S[moment] ─┤
//! ```
//!
//! The one design decision: budgets are whole bytes, rounded down from exact fractions. A need is
//! whole too, so that comparing them is as comparing the real numbers.

use super::config::{ChunkConfig, Ratio};
use super::world::World;

/// What stays free for remote chunks, or for the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reserve {
    Forward,
    Backward,
}

/// The budgets of a run, before the tracer's samples.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    /// Capacity of the GPU times its ratio, in millionths of a byte times `gpu_shares`.
    gpu_millionths: i128,
    /// Ranks that share the GPU.
    gpu_shares: i128,
    /// Memory of the host times its ratio, in millionths of a byte times `host_shares`.
    host_millionths: i128,
    /// Ranks that share the host.
    host_shares: i128,
    warm_up: Ratio,
    margin: Ratio,
    /// Bytes of an fp16 chunk.
    fp16_bytes: i128,
    /// fp16 chunks that stay free in the forward and in the backward pass.
    reserves: [i128; 2],
    strict_margin: bool,
}

/// Room for ADAM on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Margin {
    /// The margin in groups of fp32, momentum and variance chunks; may be negative.
    pub(super) groups: f64,
    /// How many groups run on the GPU if there are so many.
    pub(super) gpu_groups: u64,
}

impl Budget {
    pub(super) fn new(
        config: &ChunkConfig,
        world: World,
        gpu_bytes: u64,
        fp16_bytes: u64,
    ) -> Budget {
        let gpu_shares = if config.use_fake_dist { i128::from(world.local_ranks) } else { 1 };
        let host_millionths =
            i128::from(config.host_bytes) * config.overall_cpu_mem_ratio.millionths();
        let live = if config.with_mem_saving_comm { 1 } else { i128::from(world.ranks) };
        let backward = if config.quirks.bwd_reserve { live * live } else { live };
        Budget {
            gpu_millionths: i128::from(gpu_bytes) * config.overall_gpu_mem_ratio.millionths(),
            gpu_shares,
            host_millionths,
            host_shares: i128::from(world.local_ranks),
            warm_up: config.warmup_gpu_chunk_mem_ratio,
            margin: config.margin_use_ratio,
            fp16_bytes: i128::from(fp16_bytes),
            reserves: [live, backward],
            strict_margin: config.quirks.margin,
        }
    }

    /// G: the GPU's quota in bytes.
    pub(super) fn gpu_quota_bytes(&self) -> i128 {
        self.gpu_millionths.div_euclid(Ratio::WHOLE * self.gpu_shares)
    }

    /// C, the host's quota of a rank in bytes, less what else the rank has there.
    pub(super) fn host_bytes(&self, other_bytes: u64) -> i128 {
        let quota = self.host_millionths.div_euclid(Ratio::WHOLE * self.host_shares);
        quota - i128::from(other_bytes)
    }

    /// C less a share of what else the rank has on the host (spec patrickstar 7.1.4).
    pub(super) fn host_bytes_shared(&self, other_bytes: u64) -> i128 {
        let left = self.host_millionths - i128::from(other_bytes) * Ratio::WHOLE;
        left.div_euclid(Ratio::WHOLE * self.host_shares)
    }

    /// Forward and backward pass in the warm-up, or with the static partition.
    pub(super) fn gpu_warm_up_bytes(&self) -> i128 {
        let scaled = self.gpu_millionths.saturating_mul(self.warm_up.millionths());
        scaled.div_euclid(Ratio::WHOLE * Ratio::WHOLE * self.gpu_shares)
    }

    /// Forward and backward pass later, where the program itself needs `other_bytes`.
    pub(super) fn gpu_pass_bytes(&self, reserve: Reserve, other_bytes: i64) -> i128 {
        let chunks = self.reserves[reserve as usize];
        self.gpu_quota_bytes() - i128::from(other_bytes) - self.fp16_bytes.saturating_mul(chunks)
    }

    /// In ADAM: 16 bytes for each element of a chunk stay free for its buffers.
    pub(super) fn gpu_adam_bytes(&self) -> i128 {
        self.gpu_quota_bytes() - 8 * self.fp16_bytes
    }

    /// Room for ADAM where the program needs at most `other_bytes` and fp16 chunks at most
    /// `fp16_chunks`.
    pub(super) fn margin(&self, other_bytes: i64, fp16_chunks: u64) -> Margin {
        let need = i128::from(fp16_chunks).saturating_mul(self.fp16_bytes);
        let need = need.saturating_add(i128::from(other_bytes));
        let need = need.saturating_mul(Ratio::WHOLE * self.gpu_shares);
        let room = self.gpu_millionths.saturating_sub(need);
        let room = room.saturating_mul(self.margin.millionths());
        // A group has 12 bytes an element, six times an fp16 chunk.
        let group = (6 * self.fp16_bytes).saturating_mul(Ratio::WHOLE * Ratio::WHOLE);
        let group = group.saturating_mul(self.gpu_shares);
        let whole = if self.strict_margin { room.saturating_sub(1) } else { room } / group;
        Margin {
            groups: room as f64 / group as f64,
            gpu_groups: u64::try_from(whole.max(0)).unwrap_or(u64::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: u64 = 200;

    fn budget(gpu_bytes: u64, change: impl FnOnce(&mut ChunkConfig)) -> Budget {
        let mut config = ChunkConfig::default();
        change(&mut config);
        let world = World { ranks: 4, local_ranks: 2, rank: 0 };
        Budget::new(&config, world, gpu_bytes, F)
    }

    #[test]
    fn groups_on_the_gpu_are_those_below_the_margin() {
        // rm · (G − S − Fmax) ÷ 6F with rg = rm = 1: G = 6F · m.
        let cases = [(1.0, 0, 1), (1.01, 1, 1), (2.0, 1, 2), (5.0, 4, 5), (5.3, 5, 5), (0.9, 0, 0)];
        for (margin, strict, mended) in cases {
            for (is_strict, groups) in [(true, strict), (false, mended)] {
                let budget = budget((margin * 1200.0) as u64, |config| {
                    config.overall_gpu_mem_ratio = Ratio::percent(100);
                    config.margin_use_ratio = Ratio::percent(100);
                    config.quirks.margin = is_strict;
                });
                let found = budget.margin(0, 0);
                assert_eq!(found.gpu_groups, groups, "m = {margin}, strict: {is_strict}");
                assert!((found.groups - margin).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn reserves_are_one_chunk_or_one_for_each_rank_or_its_square() {
        let collective = budget(100_000, |_| {});
        assert_eq!(collective.gpu_quota_bytes(), 80_000);
        assert_eq!(collective.gpu_pass_bytes(Reserve::Forward, 1000), 79_000 - 800);
        assert_eq!(collective.gpu_pass_bytes(Reserve::Backward, 1000), 79_000 - 800);
        let quirky = budget(100_000, |config| config.quirks.bwd_reserve = true);
        assert_eq!(quirky.gpu_pass_bytes(Reserve::Backward, 1000), 79_000 - 3200);
        let saving = budget(100_000, |config| config.with_mem_saving_comm = true);
        assert_eq!(saving.gpu_pass_bytes(Reserve::Backward, 1000), 79_000 - 200);
        assert_eq!(saving.gpu_adam_bytes(), 80_000 - 1600);
        assert!(budget(100, |_| {}).gpu_adam_bytes() < 0);
    }

    #[test]
    fn shares_round_down_once() {
        let shared = budget(1001, |config| config.use_fake_dist = true);
        assert_eq!(shared.gpu_quota_bytes(), 400, "1001 · 0.8 ÷ 2");
        assert_eq!(shared.gpu_warm_up_bytes(), 40, "1001 · 0.8 · 0.1 ÷ 2");
        let host = budget(1, |config| config.host_bytes = 1001);
        assert_eq!(host.host_bytes(0), 400);
        assert_eq!(host.host_bytes_shared(3), 398, "400.4 less 1.5");
    }

    #[test]
    fn sizes_at_the_limits_do_not_overflow() {
        let huge = budget(super::super::config::MEMORY_BYTES_MAX, |config| {
            config.use_fake_dist = true;
        });
        assert!(huge.margin(i64::MAX, 1 << 60).groups < 0.0);
        assert!(huge.margin(i64::MIN, 0).groups > 0.0);
        assert!(huge.gpu_warm_up_bytes() > 0);
    }
}
