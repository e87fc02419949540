//! The committed file: which traces through which allocators, and what they needed.
//!
//! The one design decision: it is made for the diff of a pull request. Entries are sorted, every
//! figure has a line, nothing in it depends on when or where it was written, and a key that is not
//! known is an error, so that a slip of the pen never opens the gate.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::alloc::spec::AllocSpec;
use crate::engine::Status;
use crate::units::Bytes;

/// Version of the file's layout.
pub const BASELINE_SCHEMA_VERSION: u32 = 1;

/// Fragmentation is kept and compared in millionths: a difference of two of them is exact.
const MILLIONTHS: f64 = 1e6;

/// A baseline makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// It is no JSON, or not of this layout.
    #[error("{0}; expected a baseline as `fraglab check --init` writes it")]
    Json(#[from] serde_json::Error),
    /// It is of another version.
    #[error(
        "schema_version {found}: this fraglab knows {BASELINE_SCHEMA_VERSION}; write it anew with \
         --init"
    )]
    Version {
        /// The version found.
        found: u32,
    },
    /// Two entries are the same.
    #[error("{entry} stands in it twice: remove one")]
    Twice {
        /// The entry.
        entry: String,
    },
    /// A tolerance is no number from 0 up.
    #[error("{of}: a tolerance of {percent:?} percent: expected a number from 0 up")]
    Tolerance {
        /// Whose.
        of: String,
        /// What was found.
        percent: f64,
    },
    /// An entry has no figures of a replay.
    #[error(
        "{entry}: status failed: expected ok or oom: remove it, and add it with --update --trace"
    )]
    Failed {
        /// The entry.
        entry: String,
    },
    /// A fragmentation is no fraction.
    #[error("{entry}: fragmentation {found:?}: expected a fraction from 0 to 1")]
    Fragmentation {
        /// The entry.
        entry: String,
        /// What was found.
        found: f64,
    },
}

/// A figure of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureName {
    /// Whether every request was met on the entry's device.
    Status,
    /// 1 − requested peak / reserved peak, on the entry's device.
    Fragmentation,
    /// Most bytes held at once, on the entry's device.
    ReservedBytesPeak,
    /// The smallest device on which every request is met.
    SmallestCapacityBytes,
    /// Device calls tried again after a flush, on the entry's device.
    AllocRetries,
    /// Most bytes that the program asked for at once: the job, not the allocator.
    RequestedBytesPeak,
}

impl FigureName {
    /// Every figure, in the order in which they are told.
    pub const ALL: [FigureName; 6] = [
        FigureName::Status,
        FigureName::Fragmentation,
        FigureName::ReservedBytesPeak,
        FigureName::SmallestCapacityBytes,
        FigureName::AllocRetries,
        FigureName::RequestedBytesPeak,
    ];

    /// The name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            FigureName::Status => "status",
            FigureName::Fragmentation => "fragmentation",
            FigureName::ReservedBytesPeak => "reserved_bytes_peak",
            FigureName::SmallestCapacityBytes => "smallest_capacity_bytes",
            FigureName::AllocRetries => "alloc_retries",
            FigureName::RequestedBytesPeak => "requested_bytes_peak",
        }
    }

    /// Whether it is gated where an entry does not say which are.
    fn by_default(self) -> bool {
        self != FigureName::RequestedBytesPeak
    }
}

/// What a gated figure may grow by: a growth within either of the two is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    /// Bytes. For fragmentation: the share of the reserved peak that they are.
    #[serde(default)]
    pub bytes: u64,
    /// Percent of the figure before, compared at a millionth of a percent. For fragmentation:
    /// percentage points.
    #[serde(default)]
    pub percent: f64,
}

impl Tolerance {
    fn check(self, of: &str) -> Result<(), BaselineError> {
        let Tolerance { percent, .. } = self;
        if percent.is_finite() && percent >= 0.0 {
            return Ok(());
        }
        Err(BaselineError::Tolerance { of: of.to_owned(), percent })
    }
}

/// The figures of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Whether every request was met.
    pub status: Status,
    /// In millionths, as a fraction of 1; nothing if some request was refused.
    pub fragmentation: Option<f64>,
    /// Bytes.
    pub reserved_bytes_peak: u64,
    /// Bytes; nothing if no capacity is enough, or it was not looked for.
    pub smallest_capacity_bytes: Option<u64>,
    /// Times.
    pub alloc_retries: u64,
    /// Bytes.
    pub requested_bytes_peak: u64,
}

impl Figures {
    /// Of an entry that was never measured.
    pub const UNKNOWN: Figures = Figures {
        status: Status::Failed,
        fragmentation: None,
        reserved_bytes_peak: 0,
        smallest_capacity_bytes: None,
        alloc_retries: 0,
        requested_bytes_peak: 0,
    };

    /// The fragmentation in millionths.
    pub fn fragmentation_millionths(&self) -> Option<i64> {
        self.fragmentation.map(|fraction| (fraction * MILLIONTHS).round() as i64)
    }

    /// A fraction as these figures keep it.
    pub(super) fn kept(fraction: f64) -> f64 {
        (fraction * MILLIONTHS).round() / MILLIONTHS
    }
}

/// One trace through one allocator on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Path of the trace, relative to the folder of the baseline, with `/` between its parts.
    pub trace: String,
    /// What the trace asked for when the figures were written, as [`Measured::fingerprint`].
    ///
    /// [`Measured::fingerprint`]: super::Measured::fingerprint
    pub trace_fingerprint: String,
    /// The allocator, as on the command line.
    pub allocator: String,
    /// Which GPU of a snapshot with several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// Physical memory of the device; else that of the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The allocator's limit; else that of the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The settings string; else that of the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// What device calls cost, for allocators that weigh it; else `h200`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Figures that may not grow; else all but the requested peak. The status always counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<BTreeSet<FigureName>>,
    /// By how much they may; else that of the baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<Tolerance>,
    /// What they were.
    pub figures: Figures,
}

impl Entry {
    /// Whether a growth of this figure is a regression.
    pub fn gates(&self, figure: FigureName) -> bool {
        let asked = self.gate.as_ref().map(|gate| gate.contains(&figure));
        figure == FigureName::Status || asked.unwrap_or_else(|| figure.by_default())
    }

    /// What tells it from other entries of its trace and allocator, in words.
    pub fn variant(&self) -> String {
        let gpu = self.gpu.map(|gpu| format!("GPU {gpu}"));
        let capacity = self.capacity_bytes.map(|bytes| format!("capacity {}", exact(bytes)));
        let limit = self.limit_bytes.map(|bytes| format!("limit {}", exact(bytes)));
        let settings = self.settings.as_ref().map(|text| format!("settings {text:?}"));
        let profile = self.profile.as_ref().map(|name| format!("costs of {name}"));
        let parts = [gpu, capacity, limit, settings, profile];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// `ALLOCATOR`, and what else tells it from other entries of its trace in brackets.
    pub fn case(&self) -> String {
        super::case(&self.allocator, &self.variant())
    }

    /// `TRACE/ALLOCATOR`, and what else tells it from others in brackets.
    pub fn name(&self) -> String {
        format!("{}/{}", self.trace, self.case())
    }

    /// Whether both speak of the same replay.
    pub fn is_same_replay(&self, other: &Entry) -> bool {
        self.key() == other.key()
    }

    fn key(&self) -> impl Ord + '_ {
        (
            &self.trace,
            // One allocator may be written in several ways.
            self.allocator
                .parse::<AllocSpec>()
                .map_or_else(|_| self.allocator.clone(), |spec| spec.to_string()),
            self.gpu,
            self.capacity_bytes,
            self.limit_bytes,
            &self.settings,
            &self.profile,
        )
    }
}

/// A size that reads back as itself: with a unit where it is a whole number of it.
fn exact(bytes: u64) -> String {
    let text = Bytes(bytes).to_string();
    if text.contains('.') { format!("{bytes} B") } else { text }
}

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Version of the layout.
    pub schema_version: u32,
    /// Version of the program that wrote it.
    pub fraglab_version: String,
    /// For entries without one of their own.
    #[serde(default)]
    pub tolerance: Tolerance,
    /// Sorted by trace, then allocator, then what else tells them apart.
    pub entries: Vec<Entry>,
}

impl Default for Baseline {
    /// Without entries and without tolerance.
    fn default() -> Self {
        Baseline {
            schema_version: BASELINE_SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION").to_owned(),
            tolerance: Tolerance::default(),
            entries: Vec::new(),
        }
    }
}

/// Only the version, whatever else there is.
#[derive(Deserialize)]
struct VersionOnly {
    schema_version: u32,
}

impl Baseline {
    /// Reads a baseline.
    ///
    /// # Errors
    /// If it is not of this layout and version, or contradicts itself.
    pub fn parse(text: &str) -> Result<Baseline, BaselineError> {
        let VersionOnly { schema_version } = serde_json::from_str(text)?;
        if schema_version != BASELINE_SCHEMA_VERSION {
            return Err(BaselineError::Version { found: schema_version });
        }
        let mut baseline: Baseline = serde_json::from_str(text)?;
        baseline.sort();
        baseline.check()?;
        Ok(baseline)
    }

    /// Puts the entries in their order.
    pub fn sort(&mut self) {
        self.entries.sort_by(|a, b| a.key().cmp(&b.key()));
    }

    fn check(&self) -> Result<(), BaselineError> {
        self.tolerance.check("tolerance")?;
        for pair in self.entries.windows(2) {
            if pair[0].is_same_replay(&pair[1]) {
                return Err(BaselineError::Twice { entry: pair[0].name() });
            }
        }
        for entry in &self.entries {
            if let Some(tolerance) = entry.tolerance {
                tolerance.check(&entry.name())?;
            }
            if entry.figures.status == Status::Failed {
                return Err(BaselineError::Failed { entry: entry.name() });
            }
            let found = entry.figures.fragmentation.unwrap_or(0.0);
            // Where every request is met, live blocks lie in the memory held.
            if !(0.0..=1.0).contains(&found) {
                return Err(BaselineError::Fragmentation { entry: entry.name(), found });
            }
        }
        Ok(())
    }
}
