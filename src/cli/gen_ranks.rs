//! `fraglab gen --ranks`: the traces of many ranks of one job, in parallel.
//!
//! The one design decision: nothing is noted beside the traces. Every file appears whole, so what
//! is there is done, and a run that was stopped goes on with `--keep`; that the kept files are of
//! this very description is found by making the first and the last of them again.
//!
//! ```text
//!   job ── rank 0 ──> seed 0 ──> trace ──> NAME.rank000.json.zst      a thread has
//!     ├── rank 1 ──> seed 1 ──> trace ──> NAME.rank001.json.zst      one trace at
//!     └── ...                                                        a time
//! ```

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rayon::prelude::*;

use super::console::Console;
use super::convert::{self, Format};
use super::input::size_on_disk;
use super::progress::Progress;
use super::{Verdict, interrupt, output};
use crate::report::text::{self, RankFacts, counted, grouped};
use crate::workload::{Job, generate};

/// Stands for the number of the rank in the name of a file.
pub(super) const PLACE: &str = "{rank}";
/// Level of Zstandard: a fleet is made in minutes at it. Higher levels up to 5 give no smaller files.
const LEVEL: i32 = 1;

/// Which ranks, what becomes of files that are there, and how the others are written.
#[derive(Debug, clap::Args)]
pub(super) struct RanksArgs {
    /// Make the traces of N data-parallel ranks, each with a seed of its own
    ///
    /// {rank} in the name of the output is the number of the rank, from 0, with zeros in front up to
    /// as many digits as N has. The seed of a rank hangs on train.seed and its number. What ranks
    /// differ in is what the description draws: [lengths], and moe.imbalance.
    #[arg(long, value_name = "N", requires = "output")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=RANKS_MAX))]
    ranks: Option<u64>,

    /// The first rank to make, of N
    #[arg(long, value_name = "RANK", requires = "ranks", default_value = "0")]
    #[arg(hide_default_value = true)]
    first: u64,

    /// The last rank to make, of N [default: the last there is]
    #[arg(long, value_name = "RANK", requires = "ranks")]
    last: Option<u64>,

    /// Go on after an interruption: leave files that are there and make the others
    ///
    /// Every file appears whole or not at all. The first and the last that are there are made again
    /// and compared: they must be what this description gives.
    #[arg(long, requires = "ranks")]
    keep: bool,
}

/// As many as a description may have.
const RANKS_MAX: u64 = 1 << 20;

impl RanksArgs {
    /// How many ranks there are, if they were asked for.
    pub(super) fn count(&self) -> Option<u64> {
        self.ranks
    }

    /// The ranks to make, of `count`.
    fn range(&self, count: u64) -> anyhow::Result<Range<u64>> {
        let last = self.last.unwrap_or(count - 1);
        anyhow::ensure!(
            last < count,
            "--last {last}: there are {count} ranks, from 0: expected at most {}",
            count - 1
        );
        anyhow::ensure!(
            self.first <= last,
            "--first {}: expected at most {last}, the last rank to make",
            self.first
        );
        Ok(self.first..last + 1)
    }
}

/// What traces are made of, and where they go.
pub(super) struct Fleet<'a> {
    pub(super) spec: &'a Path,
    pub(super) job: &'a Job,
    /// The name of every file, with [`PLACE`] for the rank.
    pub(super) output: &'a Path,
    pub(super) to: Option<Format>,
    /// Level of Zstandard; nothing for the default.
    pub(super) level: Option<i32>,
}

/// A rank and its file.
struct Rank {
    number: u64,
    shown: String,
    path: PathBuf,
}

/// A trace that was made.
struct Made {
    facts: RankFacts,
    warnings: Vec<String>,
}

/// Makes the traces of `count` ranks, or of those that were asked for.
///
/// # Errors
/// If the name of the output has no place for the rank, a kept file is of another description, or a
/// trace cannot be made or written; every file that has appeared is whole.
pub(super) fn execute(
    fleet: &Fleet<'_>,
    args: &RanksArgs,
    count: u64,
    console: &Console,
) -> anyhow::Result<Verdict> {
    let ranks = fleet.ranks(args.range(count)?, count)?;
    if !fleet.job.is_drawn() && ranks.len() > 1 {
        let text = "nothing in this job is drawn, so that all ranks are alike: [lengths] or, with \
                    experts, moe.imbalance make them differ";
        console.warn(fleet.spec, text);
    }
    let asked = ranks.len();
    let (kept, missing): (Vec<Rank>, Vec<Rank>) =
        ranks.into_iter().partition(|rank| args.keep && rank.is_there());
    fleet.check_kept(&kept)?;
    let made = fleet.make(&missing)?;
    let made: Vec<Made> = made.into_iter().flatten().collect();
    // What a format cannot hold it can hold of no rank.
    if let Some(first) = made.iter().find(|made| !made.warnings.is_empty()) {
        for warning in &first.warnings {
            console.warn(fleet.output, warning);
        }
    }
    let there = made.len() + kept.len();
    console.note(&format!(
        "fraglab: wrote {}: {}",
        fleet.output.display(),
        counted(made.len() as u64, "trace")
    ));
    let facts: Vec<RankFacts> = made.iter().map(|made| made.facts).collect();
    console.print(&text::generated_ranks(fleet.job, &facts, kept.len(), console.style()))?;
    if there < asked {
        console.note(&format!(
            "fraglab: interrupted: {} of {} traces are there: --keep makes the others",
            grouped(there as u64),
            grouped(asked as u64)
        ));
        return Ok(Verdict::Interrupted);
    }
    Ok(Verdict::Good)
}

impl Rank {
    /// A file without content is what a machine leaves that lost power.
    fn is_there(&self) -> bool {
        size_on_disk(&self.path).is_some_and(|bytes| bytes > 0)
    }
}

impl Fleet<'_> {
    /// Ranks and their files, whose folders are made.
    fn ranks(&self, range: Range<u64>, count: u64) -> anyhow::Result<Vec<Rank>> {
        let pattern = self.output.to_str().filter(|name| name.contains(PLACE));
        let pattern = pattern.with_context(|| {
            format!(
                "{}: --ranks writes a file a rank: expected {PLACE} in the name, as in \
                 ranks/job.rank{PLACE}.json.zst",
                self.output.display()
            )
        })?;
        let digits = count.to_string().len();
        let ranks: Vec<Rank> = range
            .map(|number| {
                let shown = format!("{number:0digits$}");
                let path = PathBuf::from(pattern.replace(PLACE, &shown));
                Rank { number, shown, path }
            })
            .collect();
        for rank in &ranks {
            output::refuse_overwrite(&[self.spec.to_owned()], &rank.path)?;
            let folder = rank.path.parent().unwrap_or(Path::new(""));
            if !folder.as_os_str().is_empty() {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("{}: cannot be made", folder.display()))?;
            }
        }
        Ok(ranks)
    }

    /// Makes traces until all are there or somebody asks to stop; nothing stands for those that
    /// were not begun.
    fn make(&self, ranks: &[Rank]) -> anyhow::Result<Vec<Option<Made>>> {
        let stop = interrupt::stop();
        let progress = Progress::over_traces(ranks.len());
        ranks
            .par_iter()
            .map(|rank| {
                if stop.is_asked() {
                    return Ok(None);
                }
                let made = self.write(rank, &rank.path)?;
                progress.file_done();
                Ok(Some(made))
            })
            .collect()
    }

    /// Makes the trace of a rank and writes it to `path`.
    fn write(&self, rank: &Rank, path: &Path) -> anyhow::Result<Made> {
        let job = self.job.of_rank(rank.number, &rank.shown);
        let trace =
            generate(&job).map_err(|error| anyhow::anyhow!("{}: {error}", self.spec.display()))?;
        let level = Some(self.level.unwrap_or(LEVEL));
        let (warnings, bytes) = convert::put_quietly(&trace, path, self.to, level)?;
        Ok(Made { facts: RankFacts::of(&trace, bytes.unwrap_or(0)), warnings })
    }

    /// Makes the first and the last of the kept files again and compares them.
    fn check_kept(&self, kept: &[Rank]) -> anyhow::Result<()> {
        let ends = kept.first().into_iter().chain(kept.last().filter(|_| kept.len() > 1));
        for rank in ends {
            let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
            // The end of the name says the format.
            let again = folder.path().join(rank.path.file_name().unwrap_or_default());
            self.write(rank, &again)?;
            let read =
                |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
            anyhow::ensure!(
                read(&again)? == read(&rank.path)?,
                "{}: --keep: is not what {} gives now (another description, seed, level or version \
                 of fraglab made it): delete the old files, leave --keep away, or give the \
                 ranks another place",
                rank.path.display(),
                self.spec.display()
            );
        }
        Ok(())
    }
}
