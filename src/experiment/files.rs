//! From names in a description to files.
//!
//! The one design decision: a name is looked for beside the description first, then in the folder
//! around it, never where the program happens to run; the same description means the same files
//! wherever it is called from.

use std::path::{Path, PathBuf};

use super::cells::Folders;
use super::filter::fits;
use super::template;

/// Where names are looked for, in words.
const WHERE: &str = "names are looked for beside the description and in the folder around it";

/// The files that a name means: one, or all that fit stars in its last part, in order.
pub(super) fn find(name: &str, folders: &Folders) -> Result<Vec<PathBuf>, String> {
    for whole in places(name, folders) {
        let found = match whole.file_name().and_then(|name| name.to_str()) {
            Some(pattern) if pattern.contains('*') => fitting(&whole, pattern)?,
            _ => whole.is_file().then(|| whole.clone()).into_iter().collect(),
        };
        if !found.is_empty() {
            return Ok(found);
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
        if is_meant && entry.path().is_file() {
            found.push(path.with_file_name(entry.file_name()));
        }
    }
    found.sort();
    Ok(found)
}
