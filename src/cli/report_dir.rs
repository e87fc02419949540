//! `run|compare --report DIR`: a page a trace, and its figures beside it.
//!
//! One trace has `DIR/index.html`. Several have a folder each, and the index leads to them. Files
//! appear whole, pages before the index that names them; whatever else is in DIR stays.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::{input, output};
use crate::alloc::spec::AllocSpec;
use crate::engine::{self, Compared, Observe, Observed, Prepared, RunError, RunOptions, When};
use crate::import::trace_name;
use crate::metrics::{ENVELOPE_POINTS, Moment, SplitAt};
use crate::report::html::{self, IndexEntry, Page, PageFiles, blocks_per_map};
use crate::trace::Trace;

/// What is shown at the beginning if it is among the allocators.
const SHOWN_FIRST: &str = "caching";
/// What a page and its figures are called.
const FILES: [&str; 4] = ["index.html", "timeline.svg", "comparison.svg", "map.svg"];

/// The flag.
#[derive(Debug, clap::Args)]
pub(super) struct ReportArgs {
    /// Write a page for a browser to DIR/index.html: time line, memory map, pins, comparison
    ///
    /// One file that asks no network, and beside it timeline.svg, map.svg and, with several
    /// allocators, comparison.svg, 180 mm wide for print. Several traces have a folder each, and DIR/index.html leads to them. DIR is
    /// made if it is not there; files of these names in it are replaced, others stay.
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// Where pages go.
pub(super) struct ReportDir {
    dir: PathBuf,
    /// The folder of each trace, relative to `dir`; empty for a single one.
    folders: Vec<String>,
}

/// An allocator for a page.
pub(super) struct ReportCell<'a> {
    pub(super) spec: &'a AllocSpec,
    /// The device asked for, if not the trace's.
    pub(super) capacity_bytes: Option<u64>,
    pub(super) label: String,
    pub(super) observed: &'a Observed,
    pub(super) compared: Option<&'a Compared>,
}

impl ReportArgs {
    /// Where the pages of these traces go; nothing if none are asked for.
    ///
    /// # Errors
    /// If it is no place for a folder.
    pub(super) fn plan(self, traces: &[PathBuf]) -> anyhow::Result<Option<ReportDir>> {
        let Some(dir) = self.report else { return Ok(None) };
        anyhow::ensure!(
            !input::is_stdio(&dir),
            "--report -: a report is a folder of files: name one, as in --report report"
        );
        anyhow::ensure!(
            !dir.exists() || dir.is_dir(),
            "{}: is a file, and a report is a folder: name another",
            dir.display()
        );
        let report = ReportDir { dir, folders: folders(traces) };
        if let Some(taken) = report.paths().iter().find(|path| path.is_dir()) {
            anyhow::bail!(
                "{}: is a folder where a file of the report goes: name another folder for it",
                taken.display()
            );
        }
        Ok(Some(report))
    }
}

/// A folder a trace, named after it and told apart; none is needed for one trace.
fn folders(traces: &[PathBuf]) -> Vec<String> {
    if let [_] = traces {
        return vec![String::new()];
    }
    let mut folders: Vec<String> = Vec::new();
    for path in traces {
        let name = trace_name(path).unwrap_or_else(|| "stdin".to_owned());
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        let name: String = name.chars().map(plain).collect();
        let name = name.trim_matches('.');
        let name = if name.is_empty() { "trace" } else { name };
        let others = (2..).map(|count| format!("{name}-{count}"));
        // A folder must not take the place of the index.
        let is_free = |name: &String| !folders.contains(name) && !FILES.contains(&name.as_str());
        let free = [name.to_owned()].into_iter().chain(others).find(is_free);
        folders.extend(free);
    }
    folders
}

impl ReportDir {
    /// Every file that may be written.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let page = |folder: &String| FILES.map(|file| self.dir.join(folder).join(file));
        let index = self.has_index().then(|| self.dir.join(FILES[0]));
        self.folders.iter().flat_map(page).chain(index).collect()
    }

    fn has_index(&self) -> bool {
        self.folders.len() > 1
    }

    /// What a page of so many allocators needs to see of each replay.
    pub(super) fn observe(cells: usize) -> Observe {
        Observe {
            envelope: Some(ENVELOPE_POINTS),
            steps: true,
            map_blocks: Some(blocks_per_map(cells)),
            ..Observe::default()
        }
    }

    /// Writes the page of the trace that was named in this place. Gives its entry in the index;
    /// nothing if no allocator could be replayed.
    ///
    /// # Errors
    /// If it cannot be made or written.
    pub(super) fn write(
        &self,
        place: usize,
        trace: &Trace,
        options: &RunOptions,
        cells: &[ReportCell<'_>],
    ) -> anyhow::Result<Option<IndexEntry>> {
        let Some(first) = cells.first() else { return Ok(None) };
        let name = first.observed.result.trace.name.clone();
        let prepared = Prepared::new(trace, options);
        let shown: Result<Vec<html::Cell<'_>>, RunError> =
            cells.iter().map(|cell| html_cell(&prepared, cell)).collect();
        let shown = shown.context(name.clone())?;
        let files = html::page(&Page {
            trace,
            settings: options.settings.as_deref().or(trace.header.settings.as_deref()),
            cells: &shown,
            shown: cells.iter().position(|cell| cell.label == SHOWN_FIRST).unwrap_or(0),
        });
        let folder = self.folders.get(place).map_or("", String::as_str);
        self.save(folder, &files.context(name.clone())?)?;
        let results = cells.iter().map(|cell| cell.observed.result.clone()).collect();
        Ok(Some(IndexEntry { href: format!("{folder}/{}", FILES[0]), name, results }))
    }

    fn save(&self, folder: &str, files: &PageFiles) -> anyhow::Result<()> {
        let dir = self.dir.join(folder);
        make_dir(&dir)?;
        let texts = [
            (FILES[1], Some(&files.timeline_svg)),
            (FILES[2], files.comparison_svg.as_ref()),
            (FILES[3], files.map_svg.as_ref()),
            (FILES[0], Some(&files.html)),
        ];
        for (name, text) in texts {
            let Some(text) = text else { continue };
            save(&dir.join(name), text)?;
        }
        Ok(())
    }

    /// Writes the page that leads to the others, if there are several.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write_index(&self, entries: &[IndexEntry]) -> anyhow::Result<()> {
        if !self.has_index() || entries.is_empty() {
            return Ok(());
        }
        make_dir(&self.dir)?;
        save(&self.dir.join(FILES[0]), &html::index(entries))
    }
}

fn save(path: &Path, text: &str) -> anyhow::Result<()> {
    output::save(path, |file| Ok(file.write_all(text.as_bytes())?))
}

fn make_dir(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)
        .with_context(|| format!("{}: the folder cannot be made", dir.display()))
}

/// Adds the moment that the split is about.
fn html_cell<'a>(
    prepared: &Prepared<'_>,
    cell: &ReportCell<'a>,
) -> Result<html::Cell<'a>, RunError> {
    let when = cell.observed.result.split.map(|split| match split.at {
        SplitAt::Oom => When::FirstRefusal,
        SplitAt::ReservedPeak => When::ReservedPeak,
        SplitAt::Event => When::Before(split.at_event),
    });
    let moments = match when {
        Some(when) => engine::moments(prepared, cell.spec, cell.capacity_bytes, &[when])?,
        None => Vec::new(),
    };
    let moment: Option<Moment> = moments.into_iter().flatten().next();
    Ok(html::Cell {
        label: cell.label.clone(),
        observed: cell.observed,
        moment,
        compared: cell.compared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_told_apart_and_stay_inside() {
        let names = |paths: &[&str]| folders(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(names(&["a/x.json.zst"]), [""]);
        assert_eq!(names(&["a/x.json.zst", "b/x.json", "-"]), ["x", "x-2", "stdin"]);
        assert_eq!(names(&["../..json", "a b/ü é.txt"]), ["trace", "---"]);
    }
}
