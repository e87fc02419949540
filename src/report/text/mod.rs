//! One screen of text for people: numbers to the right, sizes with two decimals, at most 80 columns
//! wide where the content allows, colour only when asked for.

mod advise;
mod anonymize;
mod calibrate;
mod check;
mod chunk_steps;
mod chunks;
mod compare;
mod diff;
mod explain;
mod explain_message;
mod fleet;
mod grid;
mod hardware;
mod info;
mod job;
mod lint;
mod list;
mod plan;
mod plan_steps;
mod run;
mod stalloc;
mod survey;
mod verify;

pub use advise::{Warning, advise};
pub use anonymize::anonymized;
pub use calibrate::{calibration_csv, calibration_notes, cost_profile};
pub use check::{check, check_markdown, figure_line};
pub use chunks::chunks;
pub use compare::{TraceComparison, compare, compare_markdown};
pub use diff::{diff_results, diff_traces};
pub use explain::explain;
pub use explain_message::{ExplainedText, explain_text};
pub use fleet::fleet;
pub(super) use fleet::{fleet_sentences, worst_ranks};
pub use info::{FileFacts, info};
pub use job::{RankFacts, generated, generated_ranks, job_choices};
pub use lint::{Effect, effects, lint};
pub use list::{TraceFormatInfo, list};
pub use plan::{capacity_reason, plan, plans};
pub use run::{TraceRuns, run};
#[cfg(feature = "figures")]
pub(super) use run::{capacity, notes, refusal_note, setup, trace_line};
pub use stalloc::stalloc_log;
pub use survey::{PassedOver, survey};
pub use verify::{VerifyTally, predictions, verify, verify_legend, verify_summary};

use std::borrow::Cow;

use crate::units::{GIB, MIB};
pub use crate::units::{counted, grouped};

/// `3 of 12 cells`
pub fn share_of(done: u64, all: u64, noun: &str) -> String {
    format!("{} of {}", grouped(done), counted(all, noun))
}

/// The line above what is known of work that was interrupted.
pub fn partial(done: u64, all: u64, noun: &str, style: Style) -> String {
    let text = format!("partial: interrupted after {}", share_of(done, all, noun));
    style.paint(Tone::Bad, &text) + "\n"
}

/// How wide a text should be where its content allows.
pub const WIDTH: usize = 80;

/// Whether to colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Write ANSI colours.
    pub color: bool,
}

/// What a piece of text means, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Heading,
    Good,
    Bad,
}

impl Style {
    fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            _ if !self.color => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Heading => "1",
            Tone::Good => "32",
            Tone::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Text from a file, without the control characters that could drive a terminal, the marks that turn
/// the direction of writing, and what nobody sees.
pub fn printable(text: &str) -> Cow<'_, str> {
    let drives_terminal = |c: char| {
        let is_turn = matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        // Many scripts need the joiners, U+200C and U+200D.
        let is_unseen = matches!(
            c,
            '\u{ad}' | '\u{200b}' | '\u{2028}' | '\u{2029}' | '\u{2060}'..='\u{2064}'
                | '\u{e0000}'..='\u{e007f}'
        );
        // No letters: a mark of byte order, and what stands for none.
        let is_mark = matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}');
        c.is_control() || is_turn || is_unseen || is_mark
    };
    if text.contains(drives_terminal) {
        Cow::Owned(text.replace(drives_terminal, ""))
    } else {
        Cow::Borrowed(text)
    }
}

/// A fraction of one as percent: `34.2%`.
pub(super) fn percent(fraction: f64) -> String {
    format!("{:.1}%", 100.0 * fraction)
}

/// A rate in three digits: `20.1M`, `512`; `-` for one that was not measured.
fn rate(per_second: f64) -> String {
    if !per_second.is_finite() || per_second <= 0.0 {
        return "-".to_owned();
    }
    let (scale, letter) = match per_second {
        p if p < 999.5 => (1.0, ""),
        p if p < 999.5e3 => (1e3, "k"),
        p if p < 999.5e6 => (1e6, "M"),
        _ => (1e9, "G"),
    };
    format!("{}{letter}", three_digits(per_second / scale, letter.is_empty()))
}

/// A duration in three digits: `1.23 s`, `45.6 ms`, `0 ns`.
pub(super) fn duration(ns: u64) -> String {
    let value = ns as f64;
    let (scale, unit) = match value {
        v if v < 999.5 => (1.0, "ns"),
        v if v < 999.5e3 => (1e3, "µs"),
        v if v < 999.5e6 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{} {unit}", three_digits(value / scale, unit == "ns"))
}

fn three_digits(value: f64, whole: bool) -> String {
    let decimals = match value {
        _ if whole => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// The one unit of all sizes in a table, so that they can be compared at a glance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SizeUnit {
    pub(super) name: &'static str,
    pub(super) bytes: u64,
}

impl SizeUnit {
    /// The unit that fits the largest size of a table: GiB from 1 GiB on, else MiB, else KiB.
    pub(super) fn fitting(largest_bytes: u64) -> SizeUnit {
        match largest_bytes {
            GIB.. => SizeUnit { name: "GiB", bytes: GIB },
            MIB.. => SizeUnit { name: "MiB", bytes: MIB },
            _ => SizeUnit { name: "KiB", bytes: 1 << 10 },
        }
    }

    pub(super) fn cell(self, size_bytes: u64) -> String {
        format!("{:.2}", size_bytes as f64 / self.bytes as f64)
    }

    pub(super) fn signed_cell(self, size_bytes: i64) -> String {
        let sign = if size_bytes < 0 { "-" } else { "" };
        format!("{sign}{}", self.cell(size_bytes.unsigned_abs()))
    }
}

/// Breaks a paragraph at spaces: `first` stands before its first line, `indent` before every other.
/// Words longer than a line stand alone.
fn wrapped(first: &str, text: &str, indent: &str) -> String {
    let mut out = first.to_owned();
    let mut column = first.chars().count();
    let mut line_is_empty = true;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if !line_is_empty && column + 1 + length > WIDTH {
            out.push('\n');
            out.push_str(indent);
            column = indent.chars().count();
        } else if !line_is_empty {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
        line_is_empty = false;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_group_by_thousands() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
        assert_eq!(grouped(12_345_678), "12,345,678");
        assert_eq!(counted(1, "stream"), "1 stream");
        assert_eq!(counted(2, "stream"), "2 streams");
    }

    #[test]
    fn rates_and_durations_keep_three_digits() {
        assert_eq!(rate(20_123_456.0), "20.1M");
        assert_eq!(rate(999_600.0), "1.00M");
        assert_eq!(rate(512.0), "512");
        assert_eq!(rate(0.0), "-");
        assert_eq!(rate(f64::NAN), "-");
        assert_eq!(duration(0), "0 ns");
        assert_eq!(duration(1_234_567_890), "1.23 s");
        assert_eq!(duration(45_600_000), "45.6 ms");
        assert_eq!(duration(999_600), "1.00 ms");
    }

    #[test]
    fn one_unit_fits_a_table() {
        let gib = SizeUnit::fitting(72 * GIB);
        assert_eq!((gib.name, gib.cell(GIB + GIB / 2)), ("GiB", "1.50".to_owned()));
        assert_eq!(SizeUnit::fitting(GIB - 1).name, "MiB");
        assert_eq!(SizeUnit::fitting(0).name, "KiB");
        assert_eq!(gib.signed_cell(-(GIB as i64)), "-1.00");
    }

    #[test]
    fn terminals_cannot_be_driven_by_text_from_files() {
        assert_eq!(printable("a\x1b[31mb\n\u{9b}c\u{202e}d"), "a[31mbcd");
        assert_eq!(printable("a\u{200f}b\u{200b}c\u{e0041}d\u{2028}"), "abcd");
        assert!(matches!(printable("plain é \u{200d}"), Cow::Borrowed(_)));
    }

    #[test]
    fn paragraphs_break_at_spaces() {
        let text = wrapped("- ", &["word"; 20].join(" "), "  ");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].len() <= WIDTH && lines[1].starts_with("  word"), "{text}");
        assert!(lines[0].starts_with("- word") && text.ends_with("word\n"), "{text}");
        assert_eq!(text.split_whitespace().count(), 21);
    }
}
