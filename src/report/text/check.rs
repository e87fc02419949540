//! The answer of `check`: on a screen a line a figure that moved, and for a pull request a table.
//!
//! The one design decision: what holds is counted, what moved is told, regressions first. Sizes
//! that would look the same are written to the byte.

use super::{SizeUnit, Style, Tone, counted, grouped, printable, wrapped};
use crate::experiment::check::{
    CheckReport, Delta, EntryCheck, EntryFailure, FigureCheck, FigureName, FigureValue,
    FigureVerdict, Place,
};
use crate::units::Bytes;

/// The verdicts that a screen tells of.
const TOLD: [FigureVerdict; 3] =
    [FigureVerdict::Regression, FigureVerdict::Improvement, FigureVerdict::Tolerated];

/// Figures that a screen tells of, verdict by verdict.
fn moved(report: &CheckReport) -> Vec<(&EntryCheck, &FigureCheck)> {
    let of = |verdict| {
        report.entries.iter().flat_map(move |entry| entry.with(verdict).map(move |it| (entry, it)))
    };
    TOLD.into_iter().flat_map(of).collect()
}

/// Traces that ask for something else than they did, once each.
fn changed_traces(report: &CheckReport) -> Vec<String> {
    let changed = report.entries.iter().filter(|entry| entry.trace_changed);
    let mut notes: Vec<String> = changed.map(trace_note).collect();
    notes.dedup();
    notes
}

/// The whole answer as a screen of text.
pub fn check(report: &CheckReport, style: Style) -> String {
    let mut out = String::new();
    for (entry, figure) in moved(report) {
        out.push_str(&figure_lines(entry, figure, report.updated, style));
    }
    for note in changed_traces(report) {
        out.push_str(&wrapped("note: ", &note, "  "));
    }
    out.push_str(&summary(report));
    out
}

fn figure_lines(entry: &EntryCheck, figure: &FigureCheck, updated: bool, style: Style) -> String {
    let (word, tone) = match figure.verdict {
        _ if updated => ("updated   ", Tone::Plain),
        FigureVerdict::Regression => ("REGRESSION", Tone::Bad),
        FigureVerdict::Improvement => ("improved  ", Tone::Good),
        _ => ("tolerated ", Tone::Plain),
    };
    let (before, after) = values(figure);
    let mut out = format!(
        "{} {}, {}: {} {before} -> {after}{}\n",
        style.paint(tone, word),
        printable(&entry.trace),
        printable(&entry.case()),
        figure_words(figure.figure),
        change(figure).map(|change| format!(" ({change})")).unwrap_or_default(),
    );
    if let Some(place) = figure.place.as_ref().map(|place| place_words(place, figure.figure)) {
        out.push_str(&wrapped("  ", &place, "    "));
    }
    out
}

/// A figure, before, after and where, in one line.
pub fn figure_line(figure: &FigureCheck) -> String {
    let (before, after) = values(figure);
    let change = change(figure).map(|change| format!(" ({change})")).unwrap_or_default();
    let place = figure.place.as_ref().map(|place| place_words(place, figure.figure));
    let place = place.map(|place| format!("; {place}")).unwrap_or_default();
    format!("{} {before} -> {after}{change}{place}", figure_words(figure.figure))
}

/// A figure in words.
fn figure_words(figure: FigureName) -> &'static str {
    match figure {
        FigureName::Status => "status",
        FigureName::Fragmentation => "fragmentation",
        FigureName::ReservedBytesPeak => "reserved peak",
        FigureName::SmallestCapacityBytes => "smallest capacity",
        FigureName::AllocRetries => "retries",
        FigureName::RequestedBytesPeak => "requested peak",
    }
}

/// Before and after, so exact that they differ where they do.
fn values(figure: &FigureCheck) -> (String, String) {
    let exact = match (figure.before, figure.after) {
        (Some(FigureValue::Count(before)), Some(FigureValue::Count(after))) => {
            let unit = SizeUnit::fitting(before.max(after));
            unit.cell(before) == unit.cell(after)
        }
        (Some(FigureValue::Fraction(before)), Some(FigureValue::Fraction(after))) => {
            format!("{:.2}", 100.0 * before) == format!("{:.2}", 100.0 * after)
        }
        _ => false,
    };
    let exact = exact && figure.before != figure.after;
    let [before, after] =
        [figure.before, figure.after].map(|value| value_words(figure.figure, value, exact));
    (before, after)
}

fn value_words(figure: FigureName, value: Option<FigureValue>, exact: bool) -> String {
    match value {
        None => "none".to_owned(),
        Some(FigureValue::Status(status)) => status.name().to_owned(),
        Some(FigureValue::Fraction(fraction)) if exact => format!("{:.4}%", 100.0 * fraction),
        Some(FigureValue::Fraction(fraction)) => format!("{:.2}%", 100.0 * fraction),
        Some(FigureValue::Count(count)) if figure == FigureName::AllocRetries => grouped(count),
        Some(FigureValue::Count(count)) if exact => format!("{} B", grouped(count)),
        Some(FigureValue::Count(count)) => Bytes(count).to_string(),
    }
}

/// `+2 MiB, +0.01%`
fn change(figure: &FigureCheck) -> Option<String> {
    let sign = |negative: bool| if negative { "-" } else { "+" };
    let percent = figure.delta_percent.map(|percent| {
        let shown = format!("{:.2}", percent.abs());
        let small = shown == "0.00" && percent != 0.0;
        format!("{}{}", sign(percent < 0.0), if small { "<0.01" } else { &shown })
    });
    Some(match figure.delta? {
        Delta::Fraction(_) => format!("{} points", percent?),
        Delta::Count(count) => {
            let amount = match figure.figure {
                FigureName::AllocRetries => grouped(count.unsigned_abs()),
                _ => Bytes(count.unsigned_abs()).to_string(),
            };
            let percent = percent.map(|percent| format!(", {percent}%")).unwrap_or_default();
            format!("{}{amount}{percent}", sign(count < 0))
        }
    })
}

/// Where and why a figure is what it is.
fn place_words(place: &Place, figure: FigureName) -> String {
    let message = place.message.as_deref().map(printable);
    let Some(event) = place.event_index else { return message.unwrap_or_default().into_owned() };
    let lead = match figure {
        FigureName::Status => "refused first at",
        FigureName::SmallestCapacityBytes => "on the smallest device of before refused first at",
        _ => "the peak is reached at",
    };
    let phase = place.phase.as_ref().map(|phase| format!(" in {}", printable(phase)));
    let asks = place.requested_bytes.map(|bytes| format!(", which asks for {}", Bytes(bytes)));
    let mut text = format!(
        "{lead} event {}{}{}",
        grouped(event),
        phase.unwrap_or_default(),
        asks.unwrap_or_default()
    );
    if let Some(message) = message {
        // Event and size stand in front already.
        let asked = Bytes(place.requested_bytes.unwrap_or(0));
        let said = format!("event {} asked for {asked}: ", grouped(event));
        text.push_str(": ");
        text.push_str(message.strip_prefix(&said).unwrap_or(&message));
    }
    text
}

/// `TRACE changed since ...: requested peak 1 GiB -> 2 GiB`
fn trace_note(entry: &EntryCheck) -> String {
    let peak = entry.figures.iter().find(|it| it.figure == FigureName::RequestedBytesPeak);
    let peak = peak.map_or_else(String::new, |peak| match peak.verdict {
        FigureVerdict::Same => "its requested peak is the same".to_owned(),
        _ => {
            let (before, after) = values(peak);
            let change = change(peak).map(|change| format!(" ({change})")).unwrap_or_default();
            format!("requested peak {before} -> {after}{change}")
        }
    });
    format!(
        "trace changed: {} asks for something else than when the baseline was written ({peak}), so \
         that its figures speak of the job too",
        printable(&entry.trace)
    )
}

/// `2 of 40 figures regressed, 1 improved (--update records it), 37 hold; 10 entries of 8 traces`;
/// what could not be checked stands in front.
fn summary(report: &CheckReport) -> String {
    let entries = &report.entries;
    let mut traces: Vec<&str> = entries.iter().map(|entry| &*entry.trace).collect();
    traces.dedup();
    let all = report.regressions + report.improvements + report.held;
    if entries.is_empty() && !report.failures.is_empty() {
        return wrapped("", &failed_words(report), "  ");
    }
    let outcome = match (report.updated, report.regressions, report.improvements) {
        (_, 0, 0) => format!("all {} hold", counted(all, "figure")),
        (true, worse, better) => {
            format!("{} of {} updated", worse + better, counted(all, "figure"))
        }
        (false, worse, better) => {
            let hint = if better > 0 { " (--update records what improved)" } else { "" };
            format!(
                "{} of {} regressed, {} improved{hint}, {} hold",
                grouped(worse),
                counted(all, "figure"),
                grouped(better),
                grouped(report.held)
            )
        }
    };
    let failed = match report.failures.len() {
        0 => String::new(),
        _ => format!("{}; ", failed_words(report)),
    };
    let added = match report.added {
        0 => String::new(),
        count => format!("; {} added", entries_words(count)),
    };
    let text = format!(
        "{failed}{outcome}; {} of {}{added}",
        entries_words(entries.len() as u64),
        counted(traces.len() as u64, "trace"),
    );
    wrapped("", &text, "  ")
}

fn failed_words(report: &CheckReport) -> String {
    format!("{} could not be checked", entries_words(report.failures.len() as u64))
}

fn entries_words(count: u64) -> String {
    if count == 1 { "1 entry".to_owned() } else { format!("{} entries", grouped(count)) }
}

/// The answer for a pull request, as GitHub's Markdown: a line if all is good, else a table of what
/// moved, regressions first.
pub fn check_markdown(report: &CheckReport) -> String {
    let verdict = match (report.failures.len(), report.regressions) {
        (0, 0) => "✅ passed".to_owned(),
        (0, count) => format!("❌ {}", counted(count, "regression")),
        _ => "❌ could not be done".to_owned(),
    };
    let mut out = format!("### fraglab check: {verdict}\n\n");
    let moved = moved(report);
    if !moved.is_empty() {
        out.push_str("| | trace | allocator | figure | before | after | change | where |\n");
        out.push_str("|---|---|---|---|---:|---:|---:|---|\n");
    }
    for (entry, figure) in &moved {
        let word = match figure.verdict {
            FigureVerdict::Regression => "❌ regression",
            FigureVerdict::Improvement => "✅ improvement",
            _ => "✅ tolerated",
        };
        let (before, after) = values(figure);
        let place = figure.place.as_ref().map(|place| place_words(place, figure.figure));
        out.push_str(&format!(
            "| {word} | {} | {} | {} | {before} | {after} | {} | {} |\n",
            code(&entry.trace),
            code(&entry.case()),
            figure_words(figure.figure),
            change(figure).unwrap_or_default(),
            place.map(|place| code(&place)).unwrap_or_default(),
        ));
    }
    if !moved.is_empty() {
        out.push('\n');
    }
    let failures = report.failures.iter().map(failure_line);
    for note in changed_traces(report).into_iter().chain(failures) {
        out.push_str(&format!("- {}\n", code(&note)));
    }
    out.push_str(summary(report).replace("\n  ", " ").trim_end());
    out.push('\n');
    out
}

/// Text from a file as a code span of one line, in which nothing of Markdown or HTML has a meaning.
fn code(text: &str) -> String {
    match printable(text).trim() {
        "" => String::new(),
        text => format!("`{}`", text.replace('`', "'").replace('|', "\\|")),
    }
}

/// `TRACE, ALLOCATOR: why`
fn failure_line(failure: &EntryFailure) -> String {
    format!("{}, {}: {}", failure.trace, failure.case, failure.message)
}
