//! The `expect` lines of traces: which hold, which fail, which make no sense.

use std::path::Path;

use super::Verdict;
use super::console::Console;
use crate::alloc::spec::AllocSpec;
use crate::engine::{RunResult, Status};
use crate::report::expect::{self, Checked};
use crate::report::text;
use crate::trace::Expectation;

/// A result and the lines of its trace, those about other allocators included.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a> {
    pub(super) path: &'a Path,
    pub(super) spec: &'a AllocSpec,
    pub(super) result: &'a RunResult,
    pub(super) lines: &'a [Expectation],
}

/// How the expectations of all traces turned out.
#[derive(Default)]
pub(super) struct ExpectReport {
    held: usize,
    /// A line for every one that failed.
    failures: Vec<String>,
    /// Those that could not be checked.
    errors: Vec<anyhow::Error>,
}

impl ExpectReport {
    /// Checks every result against the lines about its allocator.
    pub(super) fn of<'a>(results: impl Iterator<Item = Expected<'a>>) -> ExpectReport {
        let mut report = ExpectReport::default();
        for result in results {
            report.check(result);
        }
        report
    }

    pub(super) fn verdict(&self) -> Verdict {
        match (self.errors.is_empty(), self.failures.is_empty()) {
            (false, _) => Verdict::Failed,
            (true, false) => Verdict::No,
            (true, true) => Verdict::Good,
        }
    }

    fn check(&mut self, expected: Expected<'_>) {
        let Expected { path, spec, result, lines } = expected;
        let json = match serde_json::to_value(result) {
            Ok(json) => json,
            Err(error) => {
                self.errors.push(anyhow::Error::from(error).context(path.display().to_string()));
                return;
            }
        };
        let mut oom_expected = false;
        let about_it = |line: &&Expectation| {
            line.allocator.parse::<AllocSpec>().is_ok_and(|named| named == *spec)
        };
        for line in lines.iter().filter(about_it) {
            match expect::check(&json, line) {
                Ok(checked) => {
                    oom_expected |= is_about_oom(&checked);
                    if checked.holds {
                        self.held += 1;
                    } else {
                        self.failures.push(failure(path, line, &checked));
                    }
                }
                Err(error) => {
                    self.errors.push(anyhow::Error::from(error).context(place(path, line)));
                }
            }
        }
        if result.outcome.status == Status::Oom && !oom_expected {
            self.failures.push(format!(
                "{}: {spec} ran out of memory, which no expectation asks for",
                path.display()
            ));
        }
    }

    /// Failures are the answer: they go to standard output unless JSON stands there.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub(super) fn print(
        &self,
        quiet: bool,
        json_on_stdout: bool,
        console: &Console,
    ) -> std::io::Result<()> {
        for error in &self.errors {
            console.error(error);
        }
        let mut lines = self.failures.clone();
        if self.verdict() == Verdict::Good && self.held > 0 && !quiet {
            let (noun, verb) =
                if self.held == 1 { ("expectation", "holds") } else { ("expectations", "hold") };
            lines.push(format!("{} {noun} {verb}", text::grouped(self.held as u64)));
        }
        for line in lines {
            if json_on_stdout {
                console.note(&line);
            } else {
                console.print(&format!("{}\n", text::printable(&line)))?;
            }
        }
        Ok(())
    }
}

/// Whether an expectation asks how requests were refused.
fn is_about_oom(checked: &Checked) -> bool {
    checked.path.starts_with("outcome.") || checked.path.ends_with("ooms")
}

fn failure(path: &Path, expectation: &Expectation, checked: &Checked) -> String {
    format!(
        "{}: {} {}: expected {}, got {}",
        place(path, expectation),
        expectation.allocator,
        checked.path,
        expectation.value,
        checked.got
    )
}

/// `FILE:LINE`, or the file alone where an expectation comes from no text.
pub(super) fn place(path: &Path, expectation: &Expectation) -> String {
    match expectation.line {
        0 => path.display().to_string(),
        line => format!("{}:{line}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expectation(line: u32) -> Expectation {
        Expectation {
            allocator: "native".to_owned(),
            field: "reserved_bytes_peak".to_owned(),
            value: "2MiB".to_owned(),
            line,
        }
    }

    #[test]
    fn a_failed_expectation_names_line_expected_and_got() {
        let checked = Checked {
            path: "peaks.reserved_bytes_peak".to_owned(),
            holds: false,
            got: "4 MiB (4194304)".to_owned(),
        };
        assert_eq!(
            failure(Path::new("t.txt"), &expectation(7), &checked),
            "t.txt:7: native peaks.reserved_bytes_peak: expected 2MiB, got 4 MiB (4194304)"
        );
        assert_eq!(place(Path::new("t.json"), &expectation(0)), "t.json");
    }
}
