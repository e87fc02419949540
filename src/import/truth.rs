//! `NAME.truth.json` beside `NAME.pickle*`: what a snapshot lacks. The recordings' README describes
//! it; our own recorder writes it too.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::notes::{Note, Sums};
use super::torch_history::{KnownMemory, Notes};
use crate::trace::{BLOCK_BYTES_MAX, Trace, Truth, room_on_device};
use crate::units::GIB;

/// A truth file that is there cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TruthError {
    /// It cannot be read.
    #[error("{path}: {source}; expected a readable truth file, or none", path = path.display())]
    Read {
        /// The truth file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is no truth file.
    #[error(
        "{path}: {source}; expected the JSON object of a truth file: mend it or move it away",
        path = path.display()
    )]
    Json {
        /// The truth file.
        path: PathBuf,
        /// What is wrong, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// A number makes no sense.
    #[error("{path}: {key} is {found}; expected {expected}", path = path.display())]
    Value {
        /// The truth file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// The keys that are used; others are read over.
#[derive(Debug, Default, Deserialize)]
pub(super) struct TruthFile {
    #[serde(default)]
    stats: BTreeMap<String, i64>,
    total_memory: Option<u64>,
    /// Memory limit in GiB; 0 is none.
    cap_gib: Option<f64>,
    conf: Option<String>,
    torch: Option<String>,
    gpu: Option<String>,
    outcome: Option<String>,
    #[serde(default)]
    peak_stats_reset: bool,
    /// Memory limit as a share of the device's total, as the recorder noted it: exact.
    memory_fraction: Option<f64>,
    /// The device that all this is about.
    device: Option<u32>,
    /// What the program noted of its own calls, and their form.
    #[serde(default)]
    notes_version: u32,
    #[serde(default)]
    notes: Vec<Note>,
    /// The sums of [`super::notes`] after the last entry.
    sums_at_end: Option<Sums>,
}

/// The form of the notes that is read.
const NOTES_VERSION: u32 = 1;

impl TruthFile {
    /// Reads the truth file beside a snapshot, if there is one.
    pub(super) fn beside(snapshot: &Path) -> Result<Option<TruthFile>, TruthError> {
        let Some(path) = truth_path(snapshot) else { return Ok(None) };
        // Nobody named it: a pipe that is called so must not be waited for.
        let opened = path.metadata().and_then(|metadata| match metadata.is_file() {
            true => File::open(&path),
            false => Err(io::Error::other("is no file, expected JSON")),
        });
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TruthError::Read { path, source }),
        };
        let truth: TruthFile = match serde_json::from_reader(BufReader::new(file)) {
            Ok(truth) => truth,
            Err(source) => return Err(TruthError::Json { path, source }),
        };
        if let Some(cap) = truth.cap_gib.filter(|cap| !(0.0..1e9).contains(cap)) {
            let (key, found) = ("cap_gib", cap.to_string());
            return Err(TruthError::Value { path, key, found, expected: "GiB, or 0 for none" });
        }
        if let Some(total) = truth.total_memory.filter(|total| !(1..1 << 60).contains(total)) {
            let (key, found) = ("total_memory", total.to_string());
            return Err(TruthError::Value { path, key, found, expected: "bytes of the device" });
        }
        let fraction = truth.memory_fraction;
        if let Some(fraction) = fraction.filter(|fraction| !(0.0..=1.0).contains(fraction)) {
            let (key, found) = ("memory_fraction", fraction.to_string());
            return Err(TruthError::Value { path, key, found, expected: "a share, 0 to 1" });
        }
        if truth.notes_version > NOTES_VERSION {
            let (key, found) = ("notes_version", truth.notes_version.to_string());
            let expected = "1: a newer recorder wrote it, read it with a newer fraglab";
            return Err(TruthError::Value { path, key, found, expected });
        }
        Ok(Some(truth))
    }

    /// Whether the program's calls are noted.
    fn has_notes(&self) -> bool {
        self.notes_version > 0
    }

    /// What the program noted of its own calls, where a recorder listened.
    pub(super) fn take_notes(&mut self) -> Option<Notes> {
        self.has_notes().then(|| Notes {
            notes: std::mem::take(&mut self.notes),
            device: self.device,
            sums_at_end: self.sums_at_end,
            settings: self.conf.clone(),
            limit_bytes: self.limit_bytes(),
            flushes: self.stats.get("num_alloc_retries").map(|&retries| retries > 0),
        })
    }

    /// The memory limit. The recording scripts set it as a fraction, of which the allocator takes
    /// the floor.
    fn limit_bytes(&self) -> Option<u64> {
        if let (Some(fraction), Some(total)) = (self.memory_fraction, self.total_memory) {
            return (fraction < 1.0).then(|| share_of(total, fraction));
        }
        let (cap, total) = (self.cap_gib.filter(|&cap| cap > 0.0)?, self.total_memory?);
        Some(share_of(total, cap * GIB as f64 / total as f64))
    }

    /// What it tells of the memory of the recorded run.
    pub(super) fn known_memory(&self) -> KnownMemory {
        let physical_bytes = self.total_memory.map(room_on_device);
        let limit_bytes = self.limit_bytes();
        KnownMemory {
            room_bytes: physical_bytes
                .map(|bytes| limit_bytes.map_or(bytes, |limit| limit.min(bytes))),
            device_total_bytes: self.total_memory,
        }
    }

    /// Puts what the file tells into the trace.
    pub(super) fn complete(self, trace: &mut Trace) {
        let calls_noted = self.has_notes();
        // The notes tell of later limits too.
        let limit_bytes = self.limit_bytes().filter(|_| !calls_noted);
        let header = &mut trace.header;
        if self.device.is_some() && self.device != header.device.index {
            header.source.version = self.torch;
            return;
        }
        header.device.total_bytes = self.total_memory;
        header.device.name = self.gpu;
        header.source.version = self.torch;
        if header.settings.is_none() {
            header.settings = self.conf;
        }
        header.limit_bytes = limit_bytes.or(header.limit_bytes);
        let late = header.history.frees_without_alloc > 0 || header.history.blocks_at_start > 0;
        if late && let Some(&allocs) = self.stats.get("allocation.all.allocated") {
            header.history.allocs_of_run = u64::try_from(allocs).ok();
        }
        if let Some(recording) = &mut trace.recording {
            recording.truth = Some(Truth {
                stats: self.stats,
                outcome: self.outcome,
                peak_stats_reset: self.peak_stats_reset,
                calls_noted,
            });
        }
    }
}

/// A limit that the settings themselves give: floor(fraction × total) for fractions below 1
/// (specs/pytorch_caching.md 7.3). Returns a warning if the total is not known.
pub(super) fn limit_from_settings(trace: &mut Trace) -> Option<String> {
    let settings = trace.header.settings.as_deref()?;
    let fraction = number_in(settings, "per_process_memory_fraction");
    let fraction = fraction.filter(|fraction| (0.0..1.0).contains(fraction))?;
    match trace.header.device.total_bytes {
        Some(total) => {
            trace.header.limit_bytes = Some(share_of(total, fraction));
            None
        }
        None => Some(format!(
            "the settings limit memory to {fraction} of the device, whose total is not known: \
             give --limit"
        )),
    }
}

/// The number that a settings string gives for a key; given twice, the last holds (7.1).
pub(super) fn number_in(settings: &str, wanted: &str) -> Option<f64> {
    let value = settings.split(',').rev().find_map(|item| {
        let (key, value) = item.split_once(':')?;
        (key.trim() == wanted).then_some(value)
    });
    value?.trim().parse().ok()
}

/// The limit in bytes. One byte stands for 0, which the header would take for nonsense; both refuse
/// everything.
pub(super) fn share_of(total_bytes: u64, fraction: f64) -> u64 {
    ((fraction * total_bytes as f64).floor() as u64).clamp(1, BLOCK_BYTES_MAX)
}

/// `dir/NAME.pickle.gz` → `dir/NAME.truth.json`.
fn truth_path(snapshot: &Path) -> Option<PathBuf> {
    let name = trace_name(snapshot)?;
    Some(snapshot.with_file_name(format!("{name}.truth.json")))
}

/// The NAME of `NAME.pickle.gz` or of any other file; nothing for standard input.
pub fn trace_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    if file == "-" {
        return None;
    }
    let stem = [".gz", ".zst"].iter().find_map(|end| file.strip_suffix(end)).unwrap_or(file);
    let name = match stem.rsplit_once('.') {
        Some((name, _)) if !name.is_empty() => name,
        _ => stem,
    };
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_truth_lies_beside_the_snapshot() {
        let path = |text: &str| truth_path(Path::new(text));
        let expected = Some(PathBuf::from("runs/llama.cap34.truth.json"));
        assert_eq!(path("runs/llama.cap34.pickle.gz"), expected);
        assert_eq!(path("runs/llama.cap34.pickle"), expected);
        assert_eq!(path("runs/llama.cap34.pkl.zst"), expected);
        assert_eq!(path("-"), None);
    }

    #[test]
    fn a_fraction_is_found_among_other_settings() {
        let fraction_in = |settings| number_in(settings, "per_process_memory_fraction");
        let settings = "garbage_collection_threshold:0.4, per_process_memory_fraction : 0.5";
        assert_eq!(fraction_in(settings), Some(0.5));
        assert_eq!(fraction_in("max_split_size_mb:40"), None);
        assert_eq!(
            fraction_in("per_process_memory_fraction:0.5,per_process_memory_fraction:0.7"),
            Some(0.7)
        );
    }
}
