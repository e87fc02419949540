//! The answer of `verify`: a line a file, then one about all of them; with `--predict` a table.

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, grouped, percent, printable, wrapped};
use crate::engine::{PredictResult, PredictedPeaks, VerifyResult};

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
        let bound = if result.share_is_bound { "at most " } else { "" };
        parts.push(format!("{bound}{} of the run's allocs seen", percent(result.history_share)));
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

/// A row a file, then one line about all.
pub fn predictions(results: &[PredictResult], unreadable: u64, style: Style) -> String {
    let peaks = results.iter().filter_map(|result| result.recorded.reserved_bytes_peak);
    let unit = SizeUnit::fitting(peaks.max().unwrap_or(0));
    let peak = format!("peak {}", unit.name);
    use Align::{Left, Right};
    let mut grid = Grid::new(&[Left, Left, Right, Right, Right, Right, Right]);
    grid.head(["", "segment", "segment", "", "same", "reserved", "predicted"]);
    grid.head(["recording", "events", "events", "blocks", "place", &peak, &peak]);
    for result in results {
        let agrees = if result.identical {
            Cell::toned("same", Tone::Good)
        } else {
            Cell::toned("DIFFER", Tone::Bad)
        };
        let peak_cell = |peaks: &PredictedPeaks| {
            peaks.reserved_bytes_peak.map_or_else(String::new, |bytes| unit.cell(bytes))
        };
        let cells = [
            printable(file_name(&result.file)).into_owned().into(),
            agrees,
            grouped(result.segment_events).into(),
            grouped(result.blocks).into(),
            percent(result.same_placement).into(),
            peak_cell(&result.recorded).into(),
            peak_cell(&result.predicted).into(),
        ];
        grid.row(cells, prediction_note(result));
    }
    let mut out = if results.is_empty() { String::new() } else { grid.render(style) + "\n" };
    out.push_str(&predictions_summary(results, unreadable, style));
    out
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// What was predicted wrong, under the row.
fn prediction_note(result: &PredictResult) -> String {
    let mut note = String::new();
    if let Some(difference) = &result.first_difference {
        let phase = difference.phase.as_ref().map(|phase| format!(" ({phase})"));
        let text = format!(
            "event {}{}: expected {}, got {}",
            grouped(difference.event_index),
            phase.unwrap_or_default(),
            difference.expected,
            difference.got,
        );
        note.push_str(&wrapped("  ", &printable(&text), "    "));
    }
    if !result.refusals_identical {
        let text = format!(
            "{} recorded, {} predicted",
            counted(result.refusals, "refusal"),
            grouped(result.refusals_predicted)
        );
        note.push_str(&wrapped("  ", &text, "    "));
    }
    note
}

/// `41 of 42 files have the predicted segment events; same place: 74.1% at least, 96.0% on average`
fn predictions_summary(results: &[PredictResult], unreadable: u64, style: Style) -> String {
    let identical = results.iter().filter(|result| result.identical).count() as u64;
    let all = results.len() as u64 + unreadable;
    let verb = if all == 1 { "has" } else { "have" };
    let mut text = format!(
        "{} of {} {verb} the predicted segment events",
        grouped(identical),
        counted(all, "file")
    );
    if unreadable > 0 {
        text.push_str(&format!(", {} could not be predicted", grouped(unreadable)));
    }
    let shares = || results.iter().map(|result| result.same_placement);
    if let Some(least) = shares().reduce(f64::min) {
        let mean = shares().sum::<f64>() / results.len() as f64;
        text.push_str(&format!("; blocks in the same place: {}", percent(least)));
        if results.len() > 1 {
            text.push_str(&format!(" at least, {} on average", percent(mean)));
        }
    }
    let tone = if identical == all { Tone::Good } else { Tone::Bad };
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
            share_is_bound: false,
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
