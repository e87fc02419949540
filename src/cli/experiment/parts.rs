//! `--shard` and `--merge`: parts of an experiment as files, and joined again.

use std::path::{Path, PathBuf};

use super::{Args, Experiment, Ran};
use crate::cli::console::Console;
use crate::experiment::Shard;
use crate::report::table::TableFormat;

/// Whether this program can write and read parts.
///
/// # Errors
/// If it was built without Parquet.
pub(super) fn check_build() -> anyhow::Result<()> {
    anyhow::ensure!(
        TableFormat::Parquet.check().is_ok(),
        "--shard and --merge: parts are Parquet, and this fraglab was built without the feature \
         `analytics`, which writes it: build it with its default features"
    );
    Ok(())
}

#[cfg(not(feature = "analytics"))]
pub(super) fn write(
    _experiment: &Experiment<'_>,
    _ran: &Ran,
    _shard: Shard,
    folder: &Path,
) -> anyhow::Result<PathBuf> {
    check_build().map(|()| folder.to_owned())
}

#[cfg(not(feature = "analytics"))]
pub(super) fn merge(
    _experiment: &Experiment<'_>,
    _folder: &Path,
    _args: &Args,
    _console: &Console,
) -> anyhow::Result<Ran> {
    Err(TableFormat::Parquet.check().err().map_or_else(|| anyhow::anyhow!("--merge"), Into::into))
}

#[cfg(feature = "analytics")]
pub(super) use with_parquet::{merge, write};

#[cfg(feature = "analytics")]
mod with_parquet {
    use std::collections::BTreeSet;

    use anyhow::Context as _;

    use super::super::{Rows, Verdict, output, program, tell_some};
    use super::*;
    use crate::experiment::{MergeError, PartHeader, Value, check_cells, check_parts};
    use crate::report::parts::{Part, join, write_part};
    use crate::units::{counted, natural_order};

    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Writes the rows of a part; the file that it wrote.
    ///
    /// # Errors
    /// If it cannot be written; then none is left half written.
    pub(in super::super) fn write(
        experiment: &Experiment<'_>,
        ran: &Ran,
        shard: Shard,
        folder: &Path,
    ) -> anyhow::Result<PathBuf> {
        let Experiment { description, cells, .. } = experiment;
        let header = PartHeader::new(description, cells, shard, VERSION, program()?, ran.is_whole);
        let path = folder.join(shard.file_name(&description.name));
        output::save(&path, |file| Ok(write_part(&header, &ran.rows, &ran.of_rows, file)?))?;
        Ok(path)
    }

    /// The rows of all parts in a folder.
    ///
    /// # Errors
    /// If they make no whole. Cells that could not be done are told.
    pub(in super::super) fn merge(
        experiment: &Experiment<'_>,
        folder: &Path,
        args: &Args,
        console: &Console,
    ) -> anyhow::Result<Ran> {
        let description = &experiment.description;
        let files = files(folder, &description.name)?;
        let mut parts = Vec::with_capacity(files.len());
        for file in &files {
            let name = || file.display().to_string();
            let is_file = file.metadata().with_context(name)?.is_file();
            anyhow::ensure!(is_file, "{}: is no file, expected a part", name());
            let bytes = std::fs::read(file).with_context(name)?;
            parts.push(Part::read(bytes).with_context(name)?);
        }
        let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let headers: Vec<(String, PartHeader)> =
            names.iter().cloned().zip(parts.iter().map(|part| part.header.clone())).collect();
        check_parts(description, VERSION, &headers, args.allow_mixed_builds)
            .map_err(|error| told(experiment, folder, &error))?;
        let mut cells = Vec::with_capacity(parts.len());
        for (name, part) in names.into_iter().zip(&parts) {
            let places = part.cells().with_context(|| name.clone())?;
            cells.push((name, places));
        }
        let cells_all = headers.first().map_or(0, |(_, header)| header.cells_all);
        check_cells(&cells, cells_all).map_err(|error| told(experiment, folder, &error))?;
        let is_whole = headers.iter().all(|(_, header)| header.is_whole);
        let rows = join(parts, description.columns());
        let rows = rows.with_context(|| folder.display().to_string())?;
        let verdict = tell_failures(experiment, &rows, console);
        if !args.quiet {
            let parts = counted(headers.len() as u64, "part");
            let cells = counted(cells_all, "cell");
            console.note(&format!("fraglab: {}: {parts} merged, {cells}", description.name));
        }
        Ok(Ran { verdict, is_whole, ..Ran::whole(rows) })
    }

    /// Files in a folder that are called as parts are.
    fn files(folder: &Path, name: &str) -> anyhow::Result<Vec<PathBuf>> {
        let begin = format!("{name}.shard-");
        let mut names = Vec::new();
        let shown = || folder.display().to_string();
        for entry in std::fs::read_dir(folder).with_context(shown)? {
            let name = entry.with_context(shown)?.file_name().to_string_lossy().into_owned();
            if name.starts_with(&begin) && name.ends_with(".parquet") {
                names.push(name);
            }
        }
        names.sort_by(|one, other| natural_order(one, other));
        Ok(names.into_iter().map(|name| folder.join(name)).collect())
    }

    /// What is wrong, and for parts that are missing the command that makes the first.
    fn told(experiment: &Experiment<'_>, folder: &Path, error: &MergeError) -> anyhow::Error {
        let Some(shard) = error.missing().first() else {
            return anyhow::anyhow!("{}: {error}", folder.display());
        };
        let mut command = format!("fraglab experiment {}", experiment.path.display());
        if !experiment.allocators.is_empty() {
            let allocators = experiment.allocators.iter().map(ToString::to_string);
            command += &format!(" --alloc {}", allocators.collect::<Vec<_>>().join(","));
        }
        anyhow::anyhow!(
            "{}: {error}: `{command} --shard {shard} -o {}` makes the first",
            folder.display(),
            folder.display()
        )
    }

    /// Tells of cells that could not be done, each reason once.
    fn tell_failures(experiment: &Experiment<'_>, rows: &Rows, console: &Console) -> Verdict {
        let failed =
            rows.rows.iter().filter(|row| *rows.get(row, "status") == Value::of_word("failed"));
        let word = |row: &[Value], column| match rows.get(row, column) {
            Value::Word(word) => word.clone(),
            _ => String::new(),
        };
        let messages = failed.map(|row| word(row, "message"));
        // The message of a trace that cannot be read is that of all its cells.
        let mut seen = BTreeSet::new();
        let messages: Vec<String> = messages.filter(|it| seen.insert(it.clone())).collect();
        tell_some(&messages, |it| console.error(&experiment.failure(it)), console);
        if messages.is_empty() { Verdict::Good } else { Verdict::Failed }
    }
}
