//! From names in a description to files.
//!
//! The one design decision: a name is looked for beside the description first, then in the folder
//! around it, never where the program happens to run; the same description means the same files
//! wherever it is called from.

use std::path::{Path, PathBuf};

use super::cells::Folders;
use super::filter::fits;
use super::template;
use crate::import::{is_file_or_lost, traces_in};

/// Where names are looked for, in words.
const WHERE: &str = "names are looked for beside the description and in the folder around it";

/// The files that a name means, in order.
pub(super) struct Found {
    pub(super) paths: Vec<PathBuf>,
    /// Files of a folder that are no traces.
    pub(super) others: Vec<PathBuf>,
    /// The name is that of a folder, which stands for the traces in it.
    pub(super) is_folder: bool,
}

/// The files that a name means: one, all that fit stars in its last part, or the traces of a
/// folder.
pub(super) fn find(name: &str, folders: &Folders) -> Result<Found, String> {
    for whole in places(name, folders) {
        if whole.is_dir() {
            let found = traces_in(&whole, false).map_err(|error| error.source.to_string())?;
            if found.traces.is_empty() {
                return Err("no trace in this folder: expected files whose names end in .json, \
                     .parquet, .txt, .csv, .log, .pickle or .pkl, perhaps with .gz or .zst"
                    .to_owned());
            }
            return Ok(Found { paths: found.traces, others: found.others, is_folder: true });
        }
        let paths = match whole.file_name().and_then(|name| name.to_str()) {
            Some(pattern) if pattern.contains('*') => fitting(&whole, pattern)?,
            _ => whole.is_file().then(|| whole.clone()).into_iter().collect(),
        };
        if !paths.is_empty() {
            return Ok(Found { paths, others: Vec::new(), is_folder: false });
        }
    }
    Err(format!("no such file; {WHERE}"))
}

/// The file or folder that an allocator's specification means.
pub(super) fn find_place(name: &str, folders: &Folders) -> Result<String, String> {
    let found = places(name, folders).into_iter().find(|place| place.exists());
    let found = found.ok_or_else(|| format!("{name}: no such file or folder; {WHERE}"))?;
    let text = found.to_str().map(str::to_owned);
    text.ok_or_else(|| format!("{}: is no UTF-8", found.display()))
}

/// The paths that a name may stand for.
fn places(name: &str, folders: &Folders) -> Vec<PathBuf> {
    let recordings = folders.recordings.display().to_string();
    let filled = template::filled(name, |name| (name == "recordings").then_some(&recordings));
    // What {recordings} stands for is a path of its own.
    let around = folders.base.join("..");
    let places =
        if filled != name { vec![PathBuf::new()] } else { vec![folders.base.clone(), around] };
    places.iter().map(|place| tidy(&place.join(&filled))).collect()
}

/// Takes `..` away where the part in front of it is a plain name: `a/../b` is `b`.
fn tidy(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut tidied = PathBuf::new();
    for part in path.components() {
        let last = tidied.components().next_back();
        match part {
            Component::ParentDir if matches!(last, Some(Component::Normal(_))) => {
                tidied.pop();
            }
            Component::CurDir => {}
            part => tidied.push(part),
        }
    }
    tidied
}

fn fitting(path: &Path, pattern: &str) -> Result<Vec<PathBuf>, String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| error.to_string())?;
        let is_meant = entry.file_name().to_str().is_some_and(|name| fits(pattern, name));
        if is_meant && is_file_or_lost(&entry.path()) {
            found.push(path.with_file_name(entry.file_name()));
        }
    }
    found.sort();
    Ok(found)
}
