//! The answer of `verify`: a line a file, then one about all of them.

use super::{Style, Tone, counted, grouped, percent, printable, wrapped};
use crate::engine::VerifyResult;

/// How many files turned out how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyTally {
    /// Files that were reproduced exactly.
    pub exact: u64,
    /// Files with a difference.
    pub different: u64,
    /// Files that could not be read or compared.
    pub unreadable: u64,
}

/// One file as one line.
pub fn verify(result: &VerifyResult, style: Style) -> String {
    let file = printable(&result.file);
    if let Some(difference) = &result.first_difference {
        let mut text = format!(
            "{} {file}: event {}: expected {}, got {} ({})\n",
            style.paint(Tone::Bad, "DIFFERS"),
            grouped(difference.event_index),
            printable(&difference.expected),
            printable(&difference.got),
            versions(result),
        );
        for cause in &result.possible_causes {
            text.push_str(&wrapped("  may be because of ", &printable(cause), "    "));
        }
        return text;
    }
    if !result.exact {
        return format!("{} {file}\n", style.paint(Tone::Bad, "DIFFERS"));
    }
    let mut parts = vec![
        format!("{}   {file}", style.paint(Tone::Good, "exact")),
        counted(result.events, "event"),
        counted(result.segment_events, "segment event"),
        counted(result.blocks, "block"),
    ];
    if result.refusals > 0 {
        parts.push(counted(result.refusals, "refusal"));
    }
    if result.statistics > 0 {
        parts.push(counted(result.statistics, "statistic"));
    }
    if result.history_share < 1.0 {
        parts.push(format!("{} of the run's allocs seen", percent(result.history_share)));
    }
    if !result.not_compared.is_empty() {
        parts.push(format!("not compared: {}", printable(&result.not_compared.join("; "))));
    }
    parts.join("  ") + "\n"
}

/// `recorded by torch 2.11.0+cu130, rules of 2.11`
fn versions(result: &VerifyResult) -> String {
    let recorder = match &result.version {
        Some(version) => format!("torch {}", printable(version)),
        None => "an unknown version of torch".to_owned(),
    };
    format!("recorded by {recorder}, rules of {}", result.rules)
}

/// What the lines of several files have in common: what was compared, and what was taken from the
/// recordings.
pub fn verify_legend(result: &VerifyResult) -> String {
    let compared = wrapped("compared: ", &result.compared.join(", "), "  ");
    let taken = result.taken_from_recording.join(", ");
    compared + &wrapped("taken from the recording: ", &taken, "  ")
}

/// `46 of 51 files exact, 3 differ, 2 could not be verified`
pub fn verify_summary(tally: VerifyTally, style: Style) -> String {
    let all = tally.exact + tally.different + tally.unreadable;
    let mut text = format!("{} of {} exact", grouped(tally.exact), counted(all, "file"));
    if tally.different > 0 {
        let verb = if tally.different == 1 { "differs" } else { "differ" };
        text.push_str(&format!(", {} {verb}", grouped(tally.different)));
    }
    if tally.unreadable > 0 {
        text.push_str(&format!(", {} could not be verified", grouped(tally.unreadable)));
    }
    let tone = if tally.exact == all { Tone::Good } else { Tone::Bad };
    style.paint(tone, &text) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Difference;

    fn result() -> VerifyResult {
        VerifyResult {
            file: "runs/llama.pickle.gz".to_owned(),
            exact: true,
            events: 40_641,
            segment_events: 82,
            blocks: 20_001,
            refusals: 1,
            statistics: 93,
            ambiguous_groups: 0,
            version: Some("2.11.0+cu130".to_owned()),
            rules: "2.11".to_owned(),
            history_share: 1.0,
            possible_causes: Vec::new(),
            first_difference: None,
            compared: vec!["segments".to_owned(), "offsets".to_owned()],
            not_compared: vec!["peaks (reset while recording)".to_owned()],
            taken_from_recording: vec!["base addresses".to_owned()],
            layout: Vec::new(),
        }
    }

    #[test]
    fn an_exact_file_says_how_much_was_compared_and_what_not() {
        assert_eq!(
            verify(&result(), Style::default()),
            "exact   runs/llama.pickle.gz  40,641 events  82 segment events  20,001 blocks  \
             1 refusal  93 statistics  not compared: peaks (reset while recording)\n"
        );
    }

    #[test]
    fn a_difference_names_event_and_both_sides() {
        let mut result = result();
        result.exact = false;
        result.first_difference = Some(Difference {
            event_index: 1234,
            expected: "segment_alloc of 2097152 at 0x7f00".to_owned(),
            got: "alloc at 0x7e00\x1b".to_owned(),
        });
        assert_eq!(
            verify(&result, Style::default()),
            "DIFFERS runs/llama.pickle.gz: event 1,234: expected segment_alloc of 2097152 at \
             0x7f00, got alloc at 0x7e00 (recorded by torch 2.11.0+cu130, rules of 2.11)\n"
        );
        result.possible_causes = vec!["stale sizes: 3 blocks".to_owned()];
        assert!(
            verify(&result, Style::default())
                .ends_with("\n  may be because of stale sizes: 3 blocks\n")
        );
    }

    #[test]
    fn the_summary_counts_every_file() {
        let text = |exact, different, unreadable| {
            verify_summary(VerifyTally { exact, different, unreadable }, Style::default())
        };
        assert_eq!(text(1, 0, 0), "1 of 1 file exact\n");
        assert_eq!(text(4, 1, 2), "4 of 7 files exact, 1 differs, 2 could not be verified\n");
    }
}
