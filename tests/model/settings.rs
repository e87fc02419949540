//! What the options come to (7), and the rounding they ask for (2).

use fraglab::units::MIB;

/// The options in force, in bytes where they are sizes (7.2, 7.3).
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// `max_split_size_mb`; `u64::MAX` is unlimited.
    pub(crate) max_split_size: u64,
    /// `max_non_split_rounding_mb`.
    pub(crate) max_non_split_rounding: u64,
    /// `garbage_collection_threshold`; 0 is off.
    pub(crate) gc_threshold: f64,
    /// Divisions by power of two, 1 MiB first (2.2).
    pub(crate) roundup: [u64; 16],
    /// `large_segment_size_mb`.
    pub(crate) large_segment_size: u64,
    /// `expandable_segments`.
    pub(crate) expandable: bool,
    /// Memory limit; no settings string changes it once the allocator is there.
    pub(crate) limit: Option<u64>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            max_split_size: u64::MAX,
            max_non_split_rounding: 20 * MIB,
            gc_threshold: 0.0,
            roundup: [0; 16],
            large_segment_size: 20 * MIB,
            expandable: false,
            limit: None,
        }
    }
}

/// What one settings string gives; sizes in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    pub(crate) max_split_size: Option<u64>,
    pub(crate) max_non_split_rounding: Option<u64>,
    pub(crate) gc_threshold: Option<f64>,
    pub(crate) roundup: Option<[u64; 16]>,
    pub(crate) large_segment_size: Option<u64>,
    pub(crate) expandable: Option<bool>,
}

impl Settings {
    /// A settings string is given: some options fall back unless it gives them again, the others
    /// keep their values (7.1).
    pub(crate) fn give(&mut self, options: Options) {
        self.large_segment_size = options.large_segment_size.unwrap_or(self.large_segment_size);
        self.expandable = options.expandable.unwrap_or(self.expandable);
        self.max_split_size = options.max_split_size.unwrap_or(u64::MAX);
        self.max_non_split_rounding =
            options.max_non_split_rounding.unwrap_or(self.large_segment_size);
        self.gc_threshold = options.gc_threshold.unwrap_or(0.0);
        self.roundup = options.roundup.unwrap_or([0; 16]);
    }
}

/// A request rounded (2.1, 2.2).
pub(crate) fn rounded(request: u64, roundup: &[u64; 16]) -> u64 {
    if request < 512 {
        return 512;
    }
    let log2 = (0..64).rev().find(|&bit| request >> bit & 1 == 1).expect("not 0");
    let entry = if log2 < 20 { 0 } else { (log2 - 20).min(15) };
    let divisions = roundup[entry];
    if divisions > 1 && request > 512 * divisions {
        let floor = 1u64 << log2;
        return if request == floor { request } else { round_up(request, floor / divisions) };
    }
    round_up(request, 512)
}

/// The next multiple of `unit`.
pub(super) fn round_up(bytes: u64, unit: u64) -> u64 {
    bytes.div_ceil(unit) * unit
}
