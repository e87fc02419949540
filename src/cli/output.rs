//! Files that a command writes: whole or not at all, and never over what it reads.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::console::Console;
use super::input::is_stdio;
use crate::trace::OutputFile;

/// Writes a text file, or standard output for `-`.
///
/// # Errors
/// If the file cannot be written; none is left half written.
pub(super) fn save_text(path: &Path, text: &str, console: &Console) -> anyhow::Result<()> {
    if is_stdio(path) {
        console.print(text)?;
        return Ok(());
    }
    save(path, |file| Ok(file.write_all(text.as_bytes())?))
}

/// Writes a file through `write`; it appears only if that succeeds.
///
/// # Errors
/// If it fails or the file cannot be put in place.
pub(super) fn save(
    path: &Path,
    write: impl FnOnce(&mut OutputFile) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut file = OutputFile::create(path)?;
    write(&mut file).with_context(|| path.display().to_string())?;
    file.commit()?;
    Ok(())
}

/// Refuses outputs that would overwrite an input or each other.
///
/// # Errors
/// If an output is the same file as an input or another output.
pub(super) fn check_places<'a>(
    inputs: &[PathBuf],
    outputs: impl Iterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    let mut earlier: Vec<&Path> = Vec::new();
    for output in outputs {
        refuse_overwrite(inputs, output)?;
        anyhow::ensure!(
            !earlier.iter().any(|other| same_place(other, output)),
            "{}: is named for two outputs: give each a file of its own",
            output.display()
        );
        earlier.push(output);
    }
    Ok(())
}

/// Whether two names lead to one file, there already or not.
fn same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        if let Ok(there) = path.canonicalize() {
            return there;
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        match (folder.canonicalize(), path.file_name()) {
            (Ok(folder), Some(name)) => folder.join(name),
            _ => path.to_owned(),
        }
    };
    place(one) == place(other)
}

/// Refuses to write over a file that is read.
///
/// # Errors
/// If `output` is the same file as one of `inputs`.
pub(super) fn refuse_overwrite(inputs: &[PathBuf], output: &Path) -> anyhow::Result<()> {
    if is_stdio(output) {
        return Ok(());
    }
    let Ok(written) = output.canonicalize() else {
        return Ok(());
    };
    for input in inputs.iter().filter(|input| !is_stdio(input)) {
        let same = input.canonicalize().is_ok_and(|read| read == written);
        anyhow::ensure!(
            !same,
            "{}: would overwrite the input: choose another name",
            output.display()
        );
    }
    Ok(())
}
