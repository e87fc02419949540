//! Files on their way: written beside their place, and moved there when they are whole.
//!
//! ```text
//!   .results.json.part ── sync ── rename ──> results.json
//!        │ locked while it is written
//!        ├─ an error, Ctrl-C   removed at once
//!        └─ SIGKILL            left; without its lock, and removed by the next who writes results.json
//! ```
//!
//! The one design decision: the name of a part file follows from the name of its target, and its
//! writer holds a lock on it. The system takes the lock away however the writer ends, so whoever
//! finds a part file in its way can tell a dead one from one that another program is writing, on
//! any machine that shares the folder, without looking through the folder.
//!
//! # After a power cut
//!
//! The bytes are on the disk before the file gets its name, so that the name leads to the old file
//! or to the whole new one, never to an empty one. Which of both is left to the file system: the
//! folder is not synced, for a result that is lost with the last seconds can be made again. Syncing
//! also is when network disks and quotas tell that there was no room.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Programs that may write the same file at once.
const WRITERS_MAX: u32 = 64;

/// Longest part of a target's name that its part file repeats, in bytes: file systems allow 255.
const NAME_BYTES_MAX: usize = 200;

/// Part files of this process. Files are made, renamed and removed under its lock, so that none
/// appears behind the back of [`abandon_part_files`].
static LIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn live() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    // A thread that panicked left at worst a name of a file that is gone.
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this process has begun to write and not finished. Nothing can be written any more
/// after that: for a process that ends now, without its destructors.
pub fn abandon_part_files() {
    let live = live();
    for path in live.iter() {
        // It is ending: who should be told?
        let _ = fs::remove_file(path);
    }
    std::mem::forget(live);
}

/// A file that is being written. Dropped before it is committed, it leaves nothing behind.
pub(super) struct PartFile {
    file: File,
    path: PathBuf,
    /// Where it goes, symbolic links followed.
    place: PathBuf,
    is_committed: bool,
}

impl PartFile {
    /// A new file beside `place`, in the same folder, readable by whoever may read any new file
    /// there: the user's mask decides, as for every other program.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(super) fn create(place: PathBuf) -> io::Result<PartFile> {
        let folder = match place.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let unwritable = |error: io::Error| {
            // The system's text names the part file, which nobody asked for.
            let kind = error.kind();
            let folder = folder.display();
            let message = match kind {
                io::ErrorKind::NotFound => {
                    format!("the folder {folder} is not there: make it first")
                }
                _ => {
                    let reason = super::unwritten(kind.into());
                    format!("the folder {folder} cannot be written: {reason}")
                }
            };
            io::Error::new(kind, message)
        };
        let mut live = live();
        let mut writer = 1;
        while writer <= WRITERS_MAX {
            let path = folder.join(part_name(&place, writer));
            match create_locked(&path) {
                Ok(Some(file)) => {
                    live.insert(path.clone());
                    return Ok(PartFile { file, path, place, is_committed: false });
                }
                // Another looked whether it was dead, before it was locked.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if !remove_if_dead(&path) {
                        writer += 1;
                    }
                }
                Err(error) => return Err(unwritable(error)),
            }
        }
        let message = format!("{WRITERS_MAX} other programs are writing it");
        Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Moves it to its place.
    ///
    /// # Errors
    /// If its bytes cannot be brought to the disk, or it cannot be renamed.
    pub(super) fn commit(mut self) -> io::Result<()> {
        match self.file.sync_all() {
            // Some file systems have nothing to sync.
            Err(error) if !is_unsupported(&error) => return Err(super::unwritten(error)),
            _ => {}
        }
        let mut live = live();
        fs::rename(&self.path, &self.place).map_err(super::unwritten)?;
        live.remove(&self.path);
        self.is_committed = true;
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.is_committed {
            let mut live = live();
            // Nothing can be done about one that cannot be removed; the next writer tries again.
            let _ = fs::remove_file(&self.path);
            live.remove(&self.path);
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

/// `.results.json.part`, for the second writer at once `.results.json.2.part`.
fn part_name(place: &Path, writer: u32) -> OsString {
    let name = place.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let mut ends = (0..=name.len().min(NAME_BYTES_MAX)).rev();
    let end = ends.find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    let number = if writer == 1 { String::new() } else { format!(".{writer}") };
    format!(".{}{number}.part", &name[..end]).into()
}

/// Makes a file that is not there yet and locks it; nothing if another took it for a dead one
/// before it was locked.
fn create_locked(path: &Path) -> io::Result<Option<File>> {
    let file = File::options().write(true).create_new(true).open(path)?;
    match file.try_lock() {
        Ok(()) if is_at(&file, path) => Ok(Some(file)),
        Ok(()) | Err(TryLockError::WouldBlock) => Ok(None),
        // Without locks nobody can take it for dead.
        Err(TryLockError::Error(_)) => Ok(Some(file)),
    }
}

/// Removes a part file that nobody writes any more; says whether it is gone.
fn remove_if_dead(path: &Path) -> bool {
    let is_file = fs::symlink_metadata(path).map(|metadata| metadata.is_file());
    match is_file {
        Ok(true) => {}
        // A folder or a link is none of ours.
        Ok(false) => return false,
        Err(error) => return error.kind() == io::ErrorKind::NotFound,
    }
    let Ok(file) = File::options().write(true).open(path) else { return false };
    // While its lock is held and it still has the name, nobody else gives the name to another.
    file.try_lock().is_ok() && is_at(&file, path) && fs::remove_file(path).is_ok()
}

/// Whether a path leads to this very file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let found = fs::symlink_metadata(path).map(id);
    file.metadata().map(id).is_ok_and(|own| found.is_ok_and(|found| found == own))
}

/// Whether a path leads to a file; where files have no numbers, no more can be told.
#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_in(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_dead_part_file_is_removed_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("results.json");
        // As if its writer had been killed: nobody holds its lock.
        fs::write(folder.path().join(".results.json.part"), "half of it").unwrap();
        let first = PartFile::create(place.clone()).unwrap();
        assert_eq!(names_in(folder.path()), [".results.json.part"]);
        assert_eq!(first.file().metadata().unwrap().len(), 0, "a new file");
        let second = PartFile::create(place.clone()).unwrap();
        assert_eq!(names_in(folder.path()), [".results.json.2.part", ".results.json.part"]);
        drop(first);
        second.commit().unwrap();
        assert_eq!(names_in(folder.path()), ["results.json"]);
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".a.csv.part")).unwrap();
        PartFile::create(folder.path().join("a.csv")).unwrap().commit().unwrap();
        assert_eq!(names_in(folder.path()), [".a.csv.part", "a.csv"]);
    }

    #[test]
    fn long_names_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let name = "ü".repeat(127);
        PartFile::create(folder.path().join(&name)).unwrap().commit().unwrap();
        assert_eq!(names_in(folder.path()), [name]);
    }
}
