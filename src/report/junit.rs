//! A check as JUnit's XML, which every CI server shows: a suite a trace, a case an allocator and
//! gated figure.
//!
//! The one design decision: what comes from a file is written as characters that XML 1.0 allows,
//! whatever it holds; and nothing is written that a clock measured.

use std::fmt::Write as _;

use super::text::figure_line;
use crate::experiment::check::{CheckReport, EntryCheck, FigureCheck, FigureVerdict};

/// One test case.
struct Case<'a> {
    suite: &'a str,
    name: String,
    outcome: Outcome,
}

enum Outcome {
    Passed,
    Failed(String),
    Error(String),
}

/// The whole check.
pub fn check_junit(report: &CheckReport) -> String {
    let mut cases: Vec<Case<'_>> = report.entries.iter().flat_map(cases_of).collect();
    cases.extend(report.failures.iter().map(|failure| Case {
        suite: &failure.trace,
        name: failure.case.clone(),
        outcome: Outcome::Error(failure.message.clone()),
    }));
    // Stable: cases of a suite stay in their order.
    cases.sort_by_key(|case| case.suite);
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(out, "<testsuites name=\"fraglab check\"{}>", counts(&cases));
    for suite in cases.chunk_by(|a, b| a.suite == b.suite) {
        let name = escaped(suite[0].suite);
        let _ = writeln!(out, "  <testsuite name=\"{name}\"{}>", counts(suite));
        for case in suite {
            out.push_str(&case_lines(case));
        }
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn cases_of(entry: &EntryCheck) -> Vec<Case<'_>> {
    let case_of_entry = entry.case();
    let gated = entry.figures.iter().filter(|figure| figure.gated);
    let case = |figure: &FigureCheck| Case {
        suite: &entry.trace,
        name: format!("{case_of_entry}: {}", figure.figure.name()),
        outcome: match figure.verdict {
            FigureVerdict::Regression => Outcome::Failed(figure_line(figure)),
            _ => Outcome::Passed,
        },
    };
    gated.map(case).collect()
}

fn counts(cases: &[Case<'_>]) -> String {
    let failures = cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_))).count();
    let errors = cases.iter().filter(|case| matches!(case.outcome, Outcome::Error(_))).count();
    format!(" tests=\"{}\" failures=\"{failures}\" errors=\"{errors}\"", cases.len())
}

fn case_lines(case: &Case<'_>) -> String {
    let head = format!(
        "    <testcase classname=\"{}\" name=\"{}\"",
        escaped(case.suite),
        escaped(&case.name)
    );
    let (element, kind, message) = match &case.outcome {
        Outcome::Passed => return format!("{head}/>\n"),
        Outcome::Failed(message) => ("failure", "regression", message),
        Outcome::Error(message) => ("error", "could not be done", message),
    };
    let message = escaped(message);
    let start = format!("<{element} type=\"{kind}\" message=\"{message}\">");
    format!("{head}>\n      {start}{message}</{element}>\n    </testcase>\n")
}

/// Text for an attribute or between tags: what XML 1.0 does not allow becomes U+FFFD, line breaks
/// and tabs spaces.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' | '\r' | '\t' => out.push(' '),
            '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}' => {
                out.push('\u{fffd}');
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_xml_forbids_gets_through() {
        assert_eq!(
            escaped("a<b>&\"'\n\u{0}\u{1b}\u{ffff}é"),
            "a&lt;b&gt;&amp;&quot;&apos; \u{fffd}\u{fffd}\u{fffd}é"
        );
    }
}
