//! Folders that stand for the traces in them, and telling of thousands of files in a few lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::console::Console;
use super::input::is_stdio;
use crate::import::{FolderTraces, trace_name, traces_in};
use crate::report::text;
use crate::trace::FileError;
use crate::units::{counted, grouped};

/// Lines of one kind that are told; of more, how many there are.
const LINES_MAX: usize = 10;

/// What the arguments of a command lead to.
pub(super) struct Inputs {
    /// The traces: files as they were given, folders as what is in them.
    pub(super) traces: Vec<PathBuf>,
    /// Files in folders that are no traces.
    pub(super) others: Vec<PathBuf>,
    /// Folders in folders that were not looked into.
    pub(super) folders: u64,
    /// Folders that cannot be read.
    pub(super) unreadable: Vec<FileError>,
}

/// Files as they are, folders as the traces in them.
///
/// # Errors
/// If a folder cannot be read, or none of them has a trace.
pub(super) fn expanded(paths: &[PathBuf], with_subfolders: bool) -> anyhow::Result<Inputs> {
    let mut inputs = readable(paths, with_subfolders)?;
    match inputs.unreadable.is_empty() {
        true => Ok(inputs),
        false => Err(inputs.unreadable.swap_remove(0).into()),
    }
}

/// As [`expanded`], without the folders that cannot be read, which are told beside it.
///
/// # Errors
/// If none of the folders has a trace, and all can be read.
pub(super) fn readable(paths: &[PathBuf], with_subfolders: bool) -> anyhow::Result<Inputs> {
    let mut inputs =
        Inputs { traces: Vec::new(), others: Vec::new(), folders: 0, unreadable: Vec::new() };
    for path in paths {
        if is_stdio(path) || !path.is_dir() {
            inputs.traces.push(path.clone());
            continue;
        }
        match traces_in(path, with_subfolders) {
            Ok(FolderTraces { traces, others, folders }) => {
                inputs.traces.extend(traces);
                inputs.others.extend(others);
                inputs.folders += folders;
            }
            Err(error) => inputs.unreadable.push(error),
        }
    }
    anyhow::ensure!(
        !inputs.traces.is_empty() || !inputs.unreadable.is_empty(),
        "{}: no traces in it: {} of other kinds, {} inside: expected files whose names end in \
         .json, .parquet, .txt, .csv, .log, .pickle or .pkl, perhaps with .gz or .zst",
        shown(paths.first().map(PathBuf::as_path)),
        counted(inputs.others.len() as u64, "file"),
        counted(inputs.folders, "folder")
    );
    Ok(inputs)
}

/// Names the files in folders that are no traces, if there are any: who expects one of them among
/// the traces sees that it is not.
pub(super) fn tell_passed_over(others: &[PathBuf], console: &Console) {
    const NAMED: usize = 5;
    if others.is_empty() {
        return;
    }
    let names = others.iter().take(NAMED).map(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        text::printable(&name.unwrap_or_default()).into_owned()
    });
    let names = names.collect::<Vec<_>>().join(", ");
    let more = match others.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {} more", grouped(more as u64)),
    };
    let files = counted(others.len() as u64, "file");
    console
        .note(&format!("fraglab: passed over {files}, no trace by name or content: {names}{more}"));
}

/// A path for a message.
pub(super) fn shown(path: Option<&Path>) -> String {
    path.map(|path| path.display().to_string()).unwrap_or_default()
}

/// Names of files for a table: without folders and endings, if that still tells them apart.
pub(super) fn short_names<'a>(files: impl Iterator<Item = &'a str> + Clone) -> Vec<String> {
    let short = |file: &str| trace_name(Path::new(file)).unwrap_or_else(|| file.to_owned());
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for file in files.clone() {
        *counts.entry(short(file)).or_default() += 1;
    }
    let name = |file: &str| {
        let short = short(file);
        if counts.get(&short) == Some(&1) { short } else { file.to_owned() }
    };
    files.map(name).collect()
}

/// Tells the first few of many lines, and how many more there are.
pub(super) fn tell_some<T>(lines: &[T], tell: impl Fn(&T), console: &Console) {
    for line in lines.iter().take(LINES_MAX) {
        tell(line);
    }
    if lines.len() > LINES_MAX {
        console.note(&format!("fraglab: and {} more like these", lines.len() - LINES_MAX));
    }
}
