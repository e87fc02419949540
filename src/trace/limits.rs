//! How much a reader takes before it gives up: so many events, so much memory.
//!
//! A file of kilobytes may unpack to terabytes, and a line of text may ask for billions of events.
//! Whoever reads it gets one line that says so, and never a machine without memory.
//!
//! The one design decision: memory is measured, not estimated. What a file needs depends on its
//! format and on what is done with it; the resident size of the process is what runs out. Where the
//! system does not tell it (elsewhere than on Linux) only events are counted.

use std::fs;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::units::{Bytes, GIB, grouped};

/// Most events of a trace where nothing else is said: at 50 bytes or so an event with its block,
/// 10 GB.
pub const EVENTS_MAX_DEFAULT: u64 = 200_000_000;
/// Most events that any trace has: their indices are 32-bit numbers.
pub const EVENTS_MAX: u64 = u32::MAX as u64;

/// Share of the free memory that is used where nothing else is said, in percent.
const MEMORY_PERCENT: u64 = 80;
/// Bytes that are read between two looks at the memory of the process.
const STRIDE_BYTES: usize = 1 << 20;

/// The most that is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Events of a trace, repeats counted out.
    pub events_max: u64,
    /// Resident memory of the process in bytes; nothing if it is not watched.
    pub memory_bytes_max: Option<u64>,
}

impl Default for Limits {
    /// [`EVENTS_MAX_DEFAULT`] events, and no look at memory.
    fn default() -> Self {
        Limits { events_max: EVENTS_MAX_DEFAULT, memory_bytes_max: None }
    }
}

/// A limit is reached. The message names the flag that raises it, and a value to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// More events than are taken.
    #[error("more than {} events: {}", grouped(*events_max), more_events(*events_max, *events))]
    Events {
        /// The limit.
        events_max: u64,
        /// Events that were told so far; there may be more.
        events: u64,
    },
    /// More memory than is taken.
    #[error(
        "needs more than {} of memory: --max-memory {}GiB lets it take more",
        Bytes(*bytes_max),
        whole_gib(bytes_max.saturating_mul(2))
    )]
    Memory {
        /// The limit in bytes.
        bytes_max: u64,
    },
}

fn more_events(events_max: u64, events: u64) -> String {
    if events > EVENTS_MAX {
        return format!("no trace has more than {}", grouped(EVENTS_MAX));
    }
    let next = events_max.saturating_mul(2).max(events).min(EVENTS_MAX);
    format!("--max-events {next} takes more")
}

fn whole_gib(bytes: u64) -> u64 {
    bytes.div_ceil(GIB)
}

impl From<OverLimit> for io::Error {
    fn from(over: OverLimit) -> Self {
        io::Error::new(io::ErrorKind::OutOfMemory, over)
    }
}

impl Limits {
    /// Whether so many events are taken.
    ///
    /// # Errors
    /// If they are too many.
    pub fn check_events(&self, events: u64) -> Result<(), OverLimit> {
        let events_max = self.events_max;
        if events > events_max { Err(OverLimit::Events { events_max, events }) } else { Ok(()) }
    }

    /// Whether the process is within its memory.
    ///
    /// # Errors
    /// If it has more.
    pub fn check_memory(&self) -> Result<(), OverLimit> {
        let Some(bytes_max) = self.memory_bytes_max else { return Ok(()) };
        match resident_bytes() {
            Some(bytes) if bytes > bytes_max => Err(OverLimit::Memory { bytes_max }),
            _ => Ok(()),
        }
    }

    /// A reader that fails when the process has grown beyond its memory, and leaves word in
    /// `reached`: whoever reads may put the error into words of its own.
    pub(super) fn watch(
        &self,
        reader: Box<dyn BufRead + Send>,
        reached: Arc<OnceLock<OverLimit>>,
    ) -> Box<dyn BufRead + Send> {
        match self.memory_bytes_max {
            None => reader,
            Some(_) => Box::new(Watched { reader, limits: self.clone(), unseen_bytes: 0, reached }),
        }
    }
}

/// Looks at the memory of the process while something is read.
struct Watched {
    reader: Box<dyn BufRead + Send>,
    limits: Limits,
    /// Bytes read since the last look.
    unseen_bytes: usize,
    reached: Arc<OnceLock<OverLimit>>,
}

impl Watched {
    fn passed(&mut self, bytes: usize) -> io::Result<()> {
        self.unseen_bytes += bytes;
        if self.unseen_bytes >= STRIDE_BYTES {
            self.unseen_bytes = 0;
            self.limits.check_memory().inspect_err(|&over| {
                self.reached.get_or_init(|| over);
            })?;
        }
        Ok(())
    }
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Never more at once: whoever reads to the end offers as much room as there already is.
        let length = buffer.len().min(STRIDE_BYTES);
        let count = self.reader.read(&mut buffer[..length])?;
        self.passed(count)?;
        Ok(count)
    }
}

impl BufRead for Watched {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        // Looked at here too: who reads through the buffer never calls `read`.
        self.passed(0)?;
        self.reader.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.unseen_bytes = self.unseen_bytes.saturating_add(count);
        self.reader.consume(count);
    }
}

/// Memory that the process has now, in bytes; nothing where the system does not tell.
pub fn resident_bytes() -> Option<u64> {
    kib_of(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The most memory that the process had so far, in bytes; nothing where the system does not tell.
pub fn resident_bytes_peak() -> Option<u64> {
    kib_of(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory that is taken where nothing else is said: 80 % of what the machine, and the control
/// groups that the process is in, have left. Nothing where the system does not tell.
pub fn memory_bytes_default() -> Option<u64> {
    let machine = kib_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = left_in_groups(Path::new("/sys/fs/cgroup"), &groups);
    let bytes = left.map_or(machine, |left| left.min(machine));
    Some(bytes / 100 * MEMORY_PERCENT)
}

/// The value of a line `NAME  1234 kB` in bytes.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least that any group around the process has left, of both generations of control groups:
/// `0::/path` below the mount, `4:memory:/path` below its `memory` folder. A container may see its
/// own group as the root, so that the root is asked as well.
fn left_in_groups(mount: &Path, groups: &str) -> Option<u64> {
    let folders = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (mount, names): (PathBuf, _) = if controllers.is_empty() {
            (mount.to_owned(), ["memory.max", "memory.current"])
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (mount.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
        } else {
            return None;
        };
        let depth = mount.components().count();
        let inner = mount.join(path.trim_start_matches('/'));
        let around: Vec<PathBuf> = inner.ancestors().map(Path::to_owned).collect();
        let around = around.into_iter().filter(move |folder| folder.components().count() >= depth);
        Some(around.filter_map(move |folder| left_in_group(&folder, names)))
    });
    folders.flatten().min()
}

/// What one group has left; nothing if it has no limit (`max`).
fn left_in_group(folder: &Path, [limit, usage]: [&str; 2]) -> Option<u64> {
    let number =
        |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    Some(number(limit)?.saturating_sub(number(usage)?))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn messages_name_the_flag_and_a_value_that_is_accepted() {
        let told = |events_max, events| {
            let limits = Limits { events_max, ..Limits::default() };
            limits.check_events(events).unwrap_err().to_string()
        };
        let text = told(200_000_000, 200_000_001);
        assert_eq!(text, "more than 200,000,000 events: --max-events 400000000 takes more");
        assert!(told(10, 12_345).contains("--max-events 12345 "));
        assert!(told(3_000_000_000, 3_000_000_001).contains("--max-events 4294967295 "));
        let text = told(10, EVENTS_MAX + 1);
        assert_eq!(text, "more than 10 events: no trace has more than 4,294,967,295");
        let memory = OverLimit::Memory { bytes_max: 3 * GIB / 2 }.to_string();
        assert_eq!(
            memory,
            "needs more than 1.50 GiB of memory: --max-memory 3GiB lets it take more"
        );
    }

    #[test]
    fn a_reader_ends_where_the_memory_does() {
        // Every process has more than a byte.
        let read = |memory_bytes_max| {
            let limits = Limits { memory_bytes_max, ..Limits::default() };
            let bytes = vec![7; 3 * STRIDE_BYTES];
            let reached = Arc::default();
            let mut watched = limits.watch(Box::new(Cursor::new(bytes)), Arc::clone(&reached));
            let read = io::copy(&mut watched, &mut io::sink());
            assert_eq!(read.is_err(), reached.get().is_some());
            read
        };
        assert_eq!(read(None).unwrap(), 3 * STRIDE_BYTES as u64);
        assert_eq!(read(Some(u64::MAX)).unwrap(), 3 * STRIDE_BYTES as u64);
        if resident_bytes().is_some() {
            let error = read(Some(1)).unwrap_err();
            assert!(error.to_string().contains("--max-memory"), "{error}");
        }
    }

    #[test]
    fn the_tightest_group_counts() {
        let folder = tempfile::tempdir().unwrap();
        let group = |path: &str, files: [(&str, &str); 2]| {
            let path = folder.path().join(path);
            fs::create_dir_all(&path).unwrap();
            for (name, value) in files {
                fs::write(path.join(name), format!("{value}\n")).unwrap();
            }
        };
        let left = |groups| left_in_groups(folder.path(), groups);
        assert_eq!(left("0::/job/step"), None);
        group("job/step", [("memory.max", "max"), ("memory.current", "10")]);
        assert_eq!(left("0::/job/step"), None);
        group("job", [("memory.max", "1000"), ("memory.current", "300")]);
        assert_eq!(left("0::/job/step"), Some(700));
        assert_eq!(left("0::/other"), None);
        let first = [("memory.limit_in_bytes", "500"), ("memory.usage_in_bytes", "600")];
        group("memory/batch", first);
        assert_eq!(left("4:cpu,memory:/batch\n0::/job/step"), Some(0));
    }
}
