//! What several test modules share.

pub(crate) mod fake_driver;
pub(crate) mod jobs;
pub(crate) mod program;
pub(crate) mod stalloc_job;
pub(crate) mod trace_gen;

use std::path::{Path, PathBuf};

/// Every allocator that needs no profile, with the published variants.
pub(crate) const WITHOUT_PROFILE: [&str; 9] = [
    "caching",
    "expandable",
    "stitch",
    "stitch+policy=shipped",
    "stitch+policy=best",
    "best-fit",
    "first-fit",
    "bfc",
    "native",
];

/// The folder with the recordings, beside the repository. Where it is missing the caller returns;
/// on CI that is a failure.
pub(crate) fn shared_dir() -> Option<PathBuf> {
    shared("recordings")
}

/// A folder of what several repositories share. Where it is missing the caller returns; on CI that
/// is a failure.
pub(crate) fn shared(folder: &str) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(folder);
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{} is missing", dir.display());
    eprintln!("skipped: {} is missing", dir.display());
    None
}

/// A small deterministic generator of random numbers (SplitMix64).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
