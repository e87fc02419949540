//! The traces of a folder.
//!
//! The one design decision: the end of a name says that a file is a trace, and only first bytes that
//! are clearly of something else take it back. So a README, a truth file or a baseline beside the
//! traces is passed over and can be named, and a trace that is damaged, empty or behind a link that
//! leads nowhere is not: whoever reads it tells what is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use crate::trace::{FileError, Input};
use crate::units::natural_order;

/// How names of traces end, compressed with `.gz` or `.zst` or not.
const ENDINGS: [&str; 7] = [".json", ".parquet", ".txt", ".csv", ".pickle", ".pkl", ".log"];

/// What lies in a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderTraces {
    /// The traces by name, numbers in their own order: `rank2` before `rank10`.
    pub traces: Vec<PathBuf>,
    /// Files that are no traces, in the same order.
    pub others: Vec<PathBuf>,
    /// Number of folders inside that were not looked into.
    pub folders: u64,
}

/// The traces of a folder, and if asked for of the folders inside. Hidden files, whose names begin
/// with a dot, and folders behind links are passed over.
///
/// # Errors
/// If a folder cannot be read.
pub fn traces_in(folder: &Path, with_subfolders: bool) -> Result<FolderTraces, FileError> {
    let mut found = FolderTraces::default();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let wrong = |source| FileError { path: folder.display().to_string(), source };
        for entry in fs::read_dir(&folder).map_err(wrong)? {
            let entry = entry.map_err(wrong)?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if name.starts_with('.') {
                continue;
            }
            if entry.file_type().map_err(wrong)?.is_dir() {
                match with_subfolders {
                    true => folders.push(path),
                    false => found.folders += 1,
                }
            } else if is_named_as_trace(&name) && is_file_or_lost(&path) && !is_foreign(&path) {
                found.traces.push(path);
            } else {
                found.others.push(path);
            }
        }
    }
    let order = |one: &PathBuf, other: &PathBuf| {
        natural_order(&one.to_string_lossy(), &other.to_string_lossy())
    };
    found.traces.sort_by(order);
    found.others.sort_by(order);
    Ok(found)
}

fn is_named_as_trace(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let bare = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    !bare.ends_with(".truth.json") && ENDINGS.iter().any(|end| bare.ends_with(end))
}

/// Whether it is a file, or a link that leads nowhere: what it was to lead to is missing.
pub(crate) fn is_file_or_lost(path: &Path) -> bool {
    path.metadata().map_or(true, |metadata| metadata.is_file())
}

/// What cannot be opened is left to whoever reads it.
fn is_foreign(path: &Path) -> bool {
    Input::open(path).is_ok_and(|input| input.is_foreign())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_found_by_name_and_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = "alloc a 1MiB\n";
        let files = [
            ("rank10.txt", text),
            ("rank9.txt", text),
            ("notes.txt", "Ran on two nodes.\n"),
            ("README.md", "# Ranks\n"),
            ("rank9.truth.json", "{}"),
            ("baseline.json", "{\"entries\": []}"),
            ("cut.json", "{\"fraglab_trace\": 1, \"blo"),
            ("cut.json.gz", ""),
            ("begun.json", "{\"f"),
            ("three.json.zst", "abc"),
            ("three.txt", "abc"),
            ("zeros.json", "\0\0\0\0\0\0\0\0\0\0\0\0"),
            ("zeros.csv", "\0\0\0\0\0\0\0\0\0\0\0\0"),
            ("words.pickle", "Ran on two nodes.\n"),
            ("words.json", "Ran on two nodes.\n"),
            ("results.csv", "trace,label,status\nrank9,caching,ok\n"),
            (".hidden.txt", text),
            ("inner/rank1.txt", text),
        ];
        fs::create_dir(folder.path().join("inner")).expect("made");
        for (name, content) in files {
            fs::write(folder.path().join(name), content).expect("written");
        }
        let names = |paths: &[PathBuf]| -> Vec<String> {
            let name =
                |path: &PathBuf| path.strip_prefix(folder.path()).expect("inside").to_owned();
            paths.iter().map(|path| name(path).display().to_string()).collect()
        };
        let found = traces_in(folder.path(), false).expect("read");
        let damaged =
            "begun.json cut.json cut.json.gz three.json.zst three.txt words.json words.pickle";
        let good = "rank9.txt rank10.txt";
        let mut expected: Vec<&str> = damaged.split(' ').chain(good.split(' ')).collect();
        expected.extend(["zeros.csv", "zeros.json"]);
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names
        };
        assert_eq!(
            sorted(names(&found.traces)),
            sorted(expected.iter().map(|it| it.to_string()).collect())
        );
        let others = ["README.md", "baseline.json", "notes.txt", "rank9.truth.json", "results.csv"];
        assert_eq!(sorted(names(&found.others)), others);
        assert_eq!(found.folders, 1);
        let place = |name: &str| names(&found.traces).iter().position(|it| it == name);
        assert!(place("rank9.txt") < place("rank10.txt"), "numbers in their own order");
        let found = traces_in(folder.path(), true).expect("read");
        assert!(names(&found.traces).contains(&"inner/rank1.txt".to_owned()));
        assert!(traces_in(&folder.path().join("none"), false).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_that_leads_nowhere_is_a_trace_that_is_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let link = folder.path().join("rank1.json.zst");
        std::os::unix::fs::symlink("gone/rank1.json.zst", &link).expect("linked");
        assert_eq!(traces_in(folder.path(), false).expect("read").traces, [link]);
    }
}
