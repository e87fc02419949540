//! Releases of PyTorch, and what is known of how their allocators differ (spec 15).
//!
//! The one design decision: 2.11 is the reference, known exactly; every other release is older or
//! newer than it, and nothing finer is claimed, because it is not established in which release each
//! difference came about. What is modelled and what is not is said in words, by
//! [`TorchVersion::differences`].

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// Options that releases before the reference do not know.
pub(super) const RECENT_KEYS: [&str; 2] = ["large_segment_size_mb", "per_process_memory_fraction"];
/// Options that only releases after the reference know. None bears on placement.
pub(super) const LATER_KEYS: [&str; 2] = ["throw_on_cudamalloc_oom", "pinned_free_catch_all"];

/// What is known of releases before the reference.
const OLDER: [&str; 8] = [
    "not established: the release in which each of these changed",
    "modelled: in roundup_power2_divisions, > fills from the last key's own entry on, not after it",
    "modelled: large_segment_size_mb and per_process_memory_fraction are unknown options",
    "modelled: use_on_oom pools are tried last, after all cached memory has been released",
    "not modelled: expandable_segments may hold for the whole process instead of for each request",
    "not modelled: some refuse max_split_size_mb:20, which 2.11 accepts, and further options",
    "not modelled: no_split pools are missing",
    "not modelled: snapshots lack user_metadata and other fields",
];

/// What is known of releases after the reference.
const NEWER: [&str; 4] = [
    "not established: the release in which each of these changed; none of it was run",
    "modelled: throw_on_cudamalloc_oom and pinned_free_catch_all are accepted, without effect",
    "not modelled: a second search after a flush, unless research_after_flush=true asks for it",
    "not modelled: an interface that reserves memory ahead, and options that are not named here",
];

/// A release of PyTorch 2. Ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TorchVersion {
    minor: u16,
    patch: u16,
}

/// A text is not a version of PyTorch that can be told apart.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version of PyTorch 2: expected 2.MINOR, as in 2.11 or 2.9.1+cu128")]
pub struct ParseVersionError(String);

impl TorchVersion {
    /// The release whose allocator is modelled exactly: 2.11.
    pub const REFERENCE: TorchVersion = TorchVersion { minor: 11, patch: 0 };

    /// Stands for all releases before the reference.
    pub(super) const OLDER: TorchVersion = TorchVersion { minor: 10, patch: 0 };

    /// How its rules stand to those of the reference. Patch releases share the rules.
    fn against_reference(self) -> Ordering {
        self.minor.cmp(&Self::REFERENCE.minor)
    }

    /// Whether it came before the reference.
    pub fn is_older(self) -> bool {
        self.against_reference() == Ordering::Less
    }

    /// Whether it came after the reference.
    pub fn is_newer(self) -> bool {
        self.against_reference() == Ordering::Greater
    }

    /// How its allocator differs from the reference's, one line each: what is modelled, and what is
    /// known to differ but is not modelled. Empty for the reference.
    pub fn differences(self) -> &'static [&'static str] {
        match self.against_reference() {
            Ordering::Less => &OLDER,
            Ordering::Equal => &[],
            Ordering::Greater => &NEWER,
        }
    }

    /// Whether pools registered with `use_on_oom` are tried last, after the flush, instead of
    /// before anything is released (spec 3.3 step 6).
    pub fn overflow_pools_last(self) -> bool {
        self.is_older()
    }

    /// Whether `>` in a rounding list fills from the last key's own entry on (spec 15).
    pub(super) fn rest_includes_last_key(self) -> bool {
        self.is_older()
    }

    /// Whether it may know an option, going by what has come and gone.
    pub(super) fn knows(self, key: &str) -> bool {
        let too_old = self.is_older() && RECENT_KEYS.contains(&key);
        let not_yet = !self.is_newer() && LATER_KEYS.contains(&key);
        !too_old && !not_yet
    }
}

impl Default for TorchVersion {
    fn default() -> Self {
        TorchVersion::REFERENCE
    }
}

impl FromStr for TorchVersion {
    type Err = ParseVersionError;

    /// Reads `2.11`, `2.11.0+cu130`, `2.12.0a0+git1234`, `v2.9.1`. Pre-releases count as the
    /// release that they lead to.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseVersionError(text.chars().take(100).collect());
        let trimmed = text.trim();
        let release = trimmed.split('+').next().unwrap_or_default();
        let mut parts = release.strip_prefix('v').unwrap_or(release).split('.');
        if parts.next() != Some("2") {
            return Err(wrong());
        }
        let minor = parts.next().and_then(leading_number).ok_or_else(wrong)?;
        let patch = match parts.next() {
            Some(part) => leading_number(part).ok_or_else(wrong)?,
            None => 0,
        };
        Ok(TorchVersion { minor, patch })
    }
}

/// The number that a part of a version begins with: 0 of `0rc1`.
fn leading_number(part: &str) -> Option<u16> {
    let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
    part[..end].parse().ok()
}

impl fmt::Display for TorchVersion {
    /// `2.11`, and `2.9.1` where there is a patch number above 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.patch {
            0 => format!("2.{}", self.minor),
            patch => format!("2.{}.{patch}", self.minor),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> TorchVersion {
        text.parse().expect(text)
    }

    #[test]
    fn versions_are_read_as_torch_writes_them() {
        for (text, minor, patch) in [
            ("2.11", 11, 0),
            ("2.11.0+cu130", 11, 0),
            ("2.9.1", 9, 1),
            ("v2.12", 12, 0),
            ("2.12.0.dev20260301+cu130", 12, 0),
            ("2.12.0a0+git1234", 12, 0),
            ("2.10.0rc3", 10, 0),
        ] {
            assert_eq!(version(text), TorchVersion { minor, patch }, "{text}");
        }
        assert_eq!(version("2.11.0+cu130"), TorchVersion::REFERENCE);
        assert!(version("2.9.1") < version("2.11"), "numbers, not letters, are compared");
        assert_eq!(version("2.9.1+cu128").to_string(), "2.9.1");
        assert_eq!(version("2.11.0").to_string(), "2.11");
    }

    #[test]
    fn only_the_second_generation_is_accepted() {
        for text in ["", "2", "2.", "1.13.1", "3.0", "2.x", "2.11.x", "torch", "2.99999", "12.1"] {
            assert!(text.parse::<TorchVersion>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_reference_differs_in_nothing_and_patches_do_not_count() {
        assert!(version("2.11.3").differences().is_empty());
        assert!(!version("2.11").overflow_pools_last());
        assert!(version("2.10").overflow_pools_last());
        assert!(!version("2.12").overflow_pools_last());
        let (older, newer) = (version("2.8").differences(), version("2.12").differences());
        assert_ne!(older, newer);
        for line in older.iter().chain(newer) {
            assert!(line.contains("modelled: ") || line.contains("not established: "), "{line}");
        }
        for keys in [RECENT_KEYS, LATER_KEYS] {
            let told = if keys == RECENT_KEYS { older } else { newer };
            assert!(keys.iter().all(|key| told.iter().any(|line| line.contains(key))));
        }
    }
}
