//! Ctrl-C, and what batch systems send in its place: where work has parts that are worth keeping,
//! the first asks for a clean end and the second ends the program at once; elsewhere the first does.
//!
//! A batch system sends one signal, waits half a minute and kills: what does not come to its end in
//! [`GRACE`], as a read of a pipe that nobody writes into, is ended as by a second signal.
//!
//! The one design decision: a command that keeps something takes [`stop`] and gives it to what it
//! calls; every part that was cut then comes back as an error that [`is_interrupt`] knows, and the
//! command tells of all of them in one line. Whichever way the program ends, files that it was
//! writing are gone; files of an earlier run are as they were, for what is kept of an interrupted
//! one goes beside them, under [`partial_path`], until a run is complete.
//!
//! A signal that the program was started to ignore stays ignored, as `nohup` asks it of SIGHUP. A
//! file that would grow beyond `ulimit -f` is an error like a full disk, not the end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;

use super::console::{Console, complain};
use super::input::{ReadFailure, is_stdio};
use super::output;
use crate::engine::{PredictError, RunError};
use crate::experiment::check::CheckError;
use crate::experiment::settings::TrialError;
use crate::report::text;
use crate::trace::abandon_part_files;
use crate::units::Stop;

/// What a shell gives a program that a SIGINT ended: 128 and the signal's number.
pub(super) const EXIT_CODE: u8 = 130;

/// How long a clean end may take. Slurm and Kubernetes kill after 30 seconds.
#[cfg(unix)]
const GRACE: std::time::Duration = std::time::Duration::from_secs(20);

static STOP: LazyLock<Stop> = LazyLock::new(Stop::default);
/// Whether anybody looks at the wish.
static IS_HEARD: AtomicBool = AtomicBool::new(false);

/// The wish that Ctrl-C makes. Whoever takes it must look at it now and then, for Ctrl-C no longer
/// ends the program at once.
pub(super) fn stop() -> Stop {
    IS_HEARD.store(true, Ordering::Relaxed);
    STOP.clone()
}

/// The same wish, for what may look at it whether or not the command hears it.
pub(super) fn wish() -> Stop {
    STOP.clone()
}

/// Whether Ctrl-C asked for a clean end.
pub(super) fn is_asked() -> bool {
    STOP.is_asked()
}

/// Watches for Ctrl-C (SIGINT) from now on, for SIGTERM, with which batch systems end a job, and for
/// SIGHUP of a terminal that is closed.
///
/// # Errors
/// If the system refuses.
#[cfg(unix)]
pub(super) fn watch() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
    use std::sync::Arc;

    // With a handler the write fails in place of ending the program; nobody reads the flag.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let ignored = ignored_signals();
    let watched = [SIGINT, SIGTERM, SIGHUP].into_iter();
    let watched = watched.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = signal_hook::iterator::Signals::new(watched)?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        signals.forever().for_each(|_| interrupt());
    })?;
    Ok(())
}

/// Elsewhere Ctrl-C ends the program at once.
#[cfg(not(unix))]
pub(super) fn watch() -> std::io::Result<()> {
    Ok(())
}

/// The signals that the program was started to ignore, a bit each; none where the system does not
/// tell.
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Asks for a clean end; ends at once if nobody would hear it, or has heard it before.
#[cfg(unix)]
fn interrupt() {
    if STOP.is_asked() || !IS_HEARD.load(Ordering::Relaxed) {
        end();
    }
    STOP.ask();
    complain("fraglab: interrupted: keeping what is done; Ctrl-C again ends at once");
    // Without the thread a second signal still ends the program.
    let _ = std::thread::Builder::new().name("grace".to_owned()).spawn(|| {
        std::thread::sleep(GRACE);
        end();
    });
}

#[cfg(unix)]
fn end() -> ! {
    abandon_part_files();
    std::process::exit(i32::from(EXIT_CODE));
}

/// Whether something was not done because of Ctrl-C: a replay that was cut, or a file that was not
/// read to its end.
pub(super) fn is_interrupt(error: &anyhow::Error) -> bool {
    is_asked() && (error.chain().any(|cause| cause.is::<ReadFailure>()) || cut(error).is_some())
}

/// The replay that was cut.
fn cut(error: &anyhow::Error) -> Option<&RunError> {
    // An error that only passes another on does not name it as its source.
    let run = error.chain().find_map(|cause| {
        if let Some(TrialError::Run(run)) = cause.downcast_ref() {
            return Some(run);
        }
        if let Some(PredictError::Run(run)) = cause.downcast_ref() {
            return Some(run);
        }
        if let Some(CheckError::Run(run)) = cause.downcast_ref() {
            return Some(run);
        }
        cause.downcast_ref::<RunError>()
    });
    run.filter(|run| matches!(run, RunError::Interrupted { .. }))
}

/// Tells how far a replay got that was cut while it was under way.
pub(super) fn tell_how_far(error: &anyhow::Error, console: &Console) {
    if let Some(RunError::Interrupted { event: 1.., .. }) = cut(error) {
        console.error(error);
    }
}

/// How much of its work a command did before it was interrupted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partial {
    /// Parts that are done.
    pub(super) done: usize,
    /// Parts that were asked for.
    pub(super) all: usize,
    /// What a part is called: `cell`.
    pub(super) part: &'static str,
}

impl Partial {
    /// The line above what is shown.
    pub(super) fn heading(self, console: &Console) -> String {
        text::partial(self.done as u64, self.all as u64, self.part, console.style())
    }

    /// The last line: what was kept where, if anything is, and how to go on.
    pub(super) fn tell<'a>(
        self,
        is_kept: bool,
        files: impl IntoIterator<Item = &'a Path>,
        console: &Console,
    ) {
        let files = files.into_iter().filter(|path| !is_stdio(path));
        let files: Vec<String> = files.map(|path| path.display().to_string()).collect();
        let kept = match files.as_slice() {
            _ if !is_kept => "nothing is kept".to_owned(),
            [] => "what is done is shown".to_owned(),
            files => format!("what is done is kept in {}", files.join(", ")),
        };
        let done = text::share_of(self.done as u64, self.all as u64, self.part);
        console.note(&format!(
            "fraglab: interrupted after {done}: {kept}; the same command begins anew"
        ));
    }
}

/// Where what is kept of interrupted work goes in place of a file that was named:
/// `results.partial.json.gz` for `results.json.gz`. Standard output, pipes and devices stay.
pub(super) fn partial_path(path: &Path) -> PathBuf {
    let is_special = path.metadata().is_ok_and(|metadata| !metadata.is_file());
    if is_stdio(path) || is_special {
        return path.to_owned();
    }
    // The ending of the name says the format, and one behind it the compression.
    let mut stem = path.to_owned();
    let mut endings = OsString::new();
    for _ in 0..2 {
        let Some(extension) = stem.extension().map(ToOwned::to_owned) else { break };
        let is_compression = ["gz", "zst"].iter().any(|ending| extension == *ending);
        let rest = std::mem::take(&mut endings);
        endings.extend([OsString::from("."), extension, rest]);
        stem.set_extension("");
        if !is_compression {
            break;
        }
    }
    let mut name = stem.file_name().map(ToOwned::to_owned).unwrap_or_default();
    name.push(".partial");
    name.push(endings);
    stem.set_file_name(name);
    stem
}

/// Removes what an interrupted run left in place of those of these files that are there, whole now.
/// What is read stays, whatever its name.
///
/// # Errors
/// If one is there and cannot be removed.
pub(super) fn remove_partial<'a>(
    inputs: &[PathBuf],
    files: impl IntoIterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    for file in files {
        let partial = partial_path(file);
        let is_left = partial != file && file.is_file() && partial.is_file();
        if is_left && output::refuse_overwrite(inputs, &partial).is_ok() {
            std::fs::remove_file(&partial).with_context(|| partial.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_partial_goes_beside_under_its_own_name() {
        let name = |path: &str| partial_path(Path::new(path)).to_str().unwrap().to_owned();
        assert_eq!(name("results.json"), "results.partial.json");
        assert_eq!(name("a.b/run.7.json.gz"), "a.b/run.7.partial.json.gz");
        assert_eq!(name("../plan"), "../plan.partial");
        assert_eq!(name("-"), "-");
    }

    #[test]
    fn what_was_partial_goes_and_what_is_read_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let [left, read] =
            ["a.partial.json", "b.partial.json"].map(|name| folder.path().join(name));
        let files = ["a.json", "b.json", "c.json"].map(|name| folder.path().join(name));
        for file in [&left, &read, &files[0], &files[1]] {
            std::fs::write(file, "{}").expect("written");
        }
        let files = files.iter().map(PathBuf::as_path).chain([Path::new("-")]);
        remove_partial(std::slice::from_ref(&read), files).expect("removed");
        assert_eq!((left.exists(), read.exists()), (false, true));
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_not_replaced_by_a_file_beside_it() {
        assert_eq!(partial_path(Path::new("/dev/null")), Path::new("/dev/null"));
    }
}
