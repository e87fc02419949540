//! What the recorded allocator made of sizes, as far as its settings tell.

use super::super::torch_snapshot::RawSettings;
use super::super::truth::number_in;
use crate::units::MIB;

/// Blocks are multiples of this many bytes.
pub(super) const MIN_BLOCK_BYTES: u64 = 512;
/// The largest rounded size that small pools serve; also the largest rest of a large block that
/// is left in it when it is handed out.
pub(super) const SMALL_BYTES_MAX: u64 = MIB;
/// Entries of the power-of-two table (specs/pytorch_caching.md 2.2).
const ROUNDUP_ENTRIES: usize = 16;

/// The sizes of specs/pytorch_caching.md 2 under the settings at the end of the history.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    roundup: [u64; ROUNDUP_ENTRIES],
    /// Blocks of at least this are never split.
    pub(super) max_split_bytes: u64,
    /// A free block is too large for an oversize request by this many bytes.
    pub(super) max_non_split_rounding_bytes: u64,
    /// A page of a large pool, in bytes.
    pub(super) large_page_bytes: u64,
    /// New memory comes in pages, and blocks are split to the last 512 bytes.
    pub(super) expandable: bool,
    /// The allocator may give back single blocks before it asks for memory.
    pub(super) collects: bool,
}

impl Sizes {
    pub(super) fn new(settings: Option<&RawSettings>) -> Self {
        let mut roundup = [0; ROUNDUP_ENTRIES];
        for &(mib, divisions) in settings.map_or(&[][..], |s| &s.roundup_divisions) {
            if mib.is_power_of_two() {
                roundup[(mib.ilog2() as usize).min(ROUNDUP_ENTRIES - 1)] = divisions;
            }
        }
        let mb_of = |key| {
            let mb = settings.and_then(|s| number_in(&s.conf, key));
            mb.filter(|mb| (11.0..1e9).contains(mb))
        };
        let large_mb = mb_of("large_segment_size_mb").unwrap_or(20.0);
        let rounding_mb = mb_of("max_non_split_rounding_mb").unwrap_or(large_mb);
        Sizes {
            roundup,
            max_split_bytes: settings.and_then(|s| s.max_split_bytes).unwrap_or(u64::MAX),
            max_non_split_rounding_bytes: rounding_mb as u64 * MIB,
            large_page_bytes: large_mb as u64 * MIB,
            expandable: settings.is_some_and(|s| s.expandable),
            collects: settings.is_some_and(|s| s.gc_threshold > 0.0),
        }
    }

    /// The size of a block that is split off for a request of at most 2^60 − 1 bytes.
    pub(super) fn round(&self, request_bytes: u64) -> u64 {
        let class = request_bytes.max(1).ilog2();
        let entry = (class as usize).saturating_sub(20).min(ROUNDUP_ENTRIES - 1);
        let divisions = self.roundup[entry];
        let step = match divisions {
            0 | 1 => MIN_BLOCK_BYTES,
            // A power of two is a multiple of the step.
            _ if request_bytes > MIN_BLOCK_BYTES.saturating_mul(divisions) => {
                (1 << class) / divisions
            }
            _ => MIN_BLOCK_BYTES,
        };
        request_bytes.max(1).next_multiple_of(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_as_the_settings_say() {
        let plain = Sizes::new(None);
        assert_eq!(plain.round(1), 512);
        assert_eq!(plain.round(513), 1024);
        assert_eq!(plain.large_page_bytes, 20 * MIB);
        let settings = RawSettings {
            conf: "large_segment_size_mb:40,roundup_power2_divisions:[4:2,8:4]".to_owned(),
            roundup_divisions: vec![(1, 2), (2, 2), (4, 2), (8, 4)],
            ..RawSettings::default()
        };
        let sizes = Sizes::new(Some(&settings));
        assert_eq!(sizes.large_page_bytes, 40 * MIB);
        // Steps of half and of a quarter of the power of two below.
        assert_eq!(sizes.round(5 * MIB), 6 * MIB);
        assert_eq!(sizes.round(9 * MIB), 10 * MIB);
        assert_eq!(sizes.round(8 * MIB), 8 * MIB);
        assert_eq!(sizes.round(16 * MIB + 1), 16 * MIB + 512);
        // Divisions need steps of more than 512 bytes to matter.
        assert_eq!(sizes.round(1025), 1536);
        assert_eq!(sizes.round(700), 1024);
    }
}
