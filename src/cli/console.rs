//! Standard output and standard error: what goes where, in colour or not, and closed pipes.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use clap::ValueEnum;

use super::input::ReadFailure;
use crate::report::text::{Style, printable};
use crate::trace::unwritten;

/// When to colour: `auto` means on a terminal and without NO_COLOR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ColorWhen {
    Auto,
    Always,
    Never,
}

/// Where a command prints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Console {
    style: Style,
}

impl Console {
    pub(super) fn new(color: ColorWhen) -> Console {
        let color = match color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            ColorWhen::Auto => {
                let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
                let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                io::stdout().is_terminal() && !set("NO_COLOR") && !dumb
            }
        };
        Console { style: Style { color } }
    }

    /// How to colour what goes to standard output.
    pub(super) fn style(&self) -> Style {
        self.style
    }

    /// Writes to standard output at once, so that a closed pipe is noticed.
    ///
    /// # Errors
    /// If it is closed or full.
    pub(super) fn print(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|error| {
            let kind = error.kind();
            io::Error::new(kind, format!("standard output cannot be written: {}", unwritten(error)))
        })
    }

    /// One line about what was done, on standard error.
    pub(super) fn note(&self, text: &str) {
        complain(&printable(text));
    }

    /// One line about what should be known of a file.
    pub(super) fn warn(&self, file: &Path, text: &str) {
        self.note(&format!("fraglab: warning: {}: {text}", file.display()));
    }

    /// One line about what could not be done; for a text also the line it is about.
    pub(super) fn error(&self, error: &anyhow::Error) {
        self.note(&format!("fraglab: {}", one_line(error)));
        if let Some(excerpt) = error.downcast_ref::<ReadFailure>().and_then(ReadFailure::excerpt) {
            for line in excerpt.lines() {
                complain(&format!("  {}", printable(&line.replace('\t', " "))));
            }
        }
    }
}

/// An error and its causes, without those that it already spells out.
pub(super) fn one_line(error: &anyhow::Error) -> String {
    let mut causes = error.chain().map(ToString::to_string);
    let first = causes.next().unwrap_or_default();
    causes.fold(
        first,
        |text, cause| {
            if text.contains(&cause) { text } else { format!("{text}: {cause}") }
        },
    )
}

/// Longest line on standard error, in characters: a message may quote a word of a file, and a file
/// may have words of megabytes.
const LINE_CHARS_MAX: usize = 1000;

/// Nothing can be done about a closed standard error.
pub(super) fn complain(text: &str) {
    let shown = match text.char_indices().nth(LINE_CHARS_MAX) {
        Some((end, _)) => format!("{}… (cut)", &text[..end]),
        None => text.to_owned(),
    };
    let _ = writeln!(io::stderr().lock(), "{shown}");
}

/// Whether the reader of our output has left: `fraglab info x | head -1`.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    fn denied() -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, "permission denied")
    }

    #[test]
    fn causes_are_told_once() {
        let error = Err::<(), _>(denied()).context("out.csv").unwrap_err();
        assert_eq!(one_line(&error), "out.csv: permission denied");
        let error = Err::<(), _>(denied()).context("out.csv: permission denied").unwrap_err();
        assert_eq!(one_line(&error), "out.csv: permission denied");
    }

    #[test]
    fn a_closed_pipe_is_seen_under_any_context() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&Err::<(), _>(closed).context("-").unwrap_err()));
        assert!(!is_closed_pipe(&denied().into()));
    }
}
