//! What an experiment says as Markdown: its report, and the list of its cells.
//!
//! The one design decision: everything is made from the results table and the description. No clock
//! is read; the date of a report is what its description says.

use std::fmt::Write as _;

use super::select::{self, Point, Points, SelectError, described, scaled};
use super::text::{fleet_sentences, worst_ranks};
use crate::experiment::{
    Cell, ColumnKind, Description, Fleet, FleetGroup, Kind, Rows, Shown, Spread, TableLayout,
    TableSpec, Unit, Value, fleet,
};
use crate::units::{counted, grouped};

/// What a report is about, beside the results.
#[derive(Clone, Copy, Debug)]
pub struct ReportNames<'a> {
    /// The command that makes it.
    pub command: &'a str,
    /// Version of the program.
    pub version: &'a str,
    /// Files of the figures, one each.
    pub figures: &'a [String],
    /// File of the results.
    pub results: &'a str,
}

/// The report of an experiment.
///
/// # Errors
/// If a table asks for one row where there are several, or for rows that are not there.
pub fn experiment_markdown(
    description: &Description,
    rows: &Rows,
    names: ReportNames<'_>,
) -> Result<String, SelectError> {
    let mut text = format!("# {}\n\n", inline(&description.title));
    let paragraph = description.text.trim();
    if !paragraph.is_empty() {
        text.push_str(paragraph);
        text.push_str("\n\n");
    }
    text.push_str(&made_by(description, rows, names));
    for (figure, file) in description.figures.iter().zip(names.figures) {
        let title = if figure.title.is_empty() { &figure.name } else { &figure.title };
        // Writing into a String cannot fail.
        let _ = write!(text, "\n## {}\n\n![{}]({file})\n", inline(title), inline(title));
    }
    for table in &description.tables {
        if !table.title.is_empty() {
            let _ = write!(text, "\n## {}\n", inline(&table.title));
        }
        text.push('\n');
        text.push_str(&table_markdown(table, rows)?);
    }
    if let Some(spec) = &description.fleet {
        text.push_str(&fleet_markdown(&fleet(rows, spec)?));
    }
    text.push_str(&not_done(rows));
    Ok(text)
}

fn made_by(description: &Description, rows: &Rows, names: ReportNames<'_>) -> String {
    let mut text = format!("Made by `{}` with fraglab {}", names.command, names.version);
    if let Some(date) = &description.date {
        let _ = write!(text, " on {}", inline(date));
    }
    let profiles = match &description.kind {
        Kind::Replay(_) => {
            let passing = select::passing(rows, &[]);
            let profiles = select::names(rows, &passing, "profile");
            format!(", device calls at the costs of {}", inline(&profiles.join(", ")))
        }
        Kind::DeviceLatency(_) => String::new(),
    };
    let count = counted(rows.rows.len() as u64, "row");
    let _ = writeln!(
        text,
        "{profiles}. All {count}, in bytes and nanoseconds: [`{}`]({}).",
        names.results, names.results
    );
    text
}

/// What the results say of a fleet: a table for each device, and what follows from it.
fn fleet_markdown(fleet: &Fleet) -> String {
    let mut text = String::new();
    for group in &fleet.groups {
        let names: Vec<String> =
            group.names.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let of = if names.is_empty() { String::new() } else { format!(", {}", names.join(", ")) };
        let ranks = counted(group.ranks as u64, "rank");
        let _ = writeln!(text, "\n## A fleet of {ranks}{}\n", inline(&of));
        text.push_str(&grid(&fleet_lines(group), 1));
        text.push_str(
            "\nReserved peaks in GiB; percentiles by nearest rank, of the ranks that ran to their \
             end. Excess is reserved − requested peak.\n\n",
        );
        for sentence in fleet_sentences(group) {
            let _ = writeln!(text, "- {}", inline(&sentence));
        }
    }
    text
}

fn fleet_lines(group: &FleetGroup) -> Vec<Vec<String>> {
    let head = [
        "setting",
        "ok",
        "out of memory",
        "failed",
        "min",
        "median",
        "p95",
        "p99",
        "max",
        "worst rank",
        "sum",
        "excess, sum",
        "waste removed, %",
        "fragmentation, median, %",
        "worst, %",
        "device calls",
        "device time, s",
        "retries",
        "ranks with retries",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let gib = |bytes: f64| spelled(scaled(bytes, Unit::GiB), Unit::GiB);
    let share = |share: Option<f64>| {
        let share = share.map(|share| spelled(scaled(share, Unit::Percent), Unit::Percent));
        share.unwrap_or_else(|| "–".to_owned())
    };
    for (at, setting) in group.settings.iter().enumerate() {
        let label = inline(&setting.label);
        let is_best = group.best.contains(&at) && group.settings.len() > 1;
        let peak = |read: fn(&Spread) -> u64| {
            setting.reserved.map_or("–".to_owned(), |spread| gib(read(&spread) as f64))
        };
        let count = |count: usize| grouped(count as u64);
        lines.push(vec![
            if is_best { format!("**{label}**") } else { label },
            count(setting.ok),
            count(setting.oom.len()),
            count(setting.failed.len()),
            peak(|spread| spread.min),
            peak(|spread| spread.median),
            peak(|spread| spread.p95),
            peak(|spread| spread.p99),
            peak(|spread| spread.max),
            inline(&worst_ranks(setting)),
            gib(setting.reserved_bytes_sum as f64),
            gib(setting.excess_bytes_sum as f64),
            share(setting.waste_removed),
            share(setting.fragmentation_median),
            share(setting.fragmentation_worst.as_ref().map(|(worst, _)| *worst)),
            grouped(setting.device_calls_sum),
            spelled(scaled(setting.device_ns_sum as f64, Unit::S), Unit::S),
            grouped(setting.retries_sum),
            count(setting.retry_ranks),
        ]);
    }
    lines
}

/// Cells that gave no result, with the reasons.
fn not_done(rows: &Rows) -> String {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for row in &rows.rows {
        let (status, message) = (rows.get(row, "status"), rows.get(row, "message"));
        let Value::Word(status) = status else { continue };
        if status != "failed" && status != "skipped" {
            continue;
        }
        let cell = format!(
            "{} on {}",
            select::word(rows.get(row, "label")),
            select::word(rows.get(row, "trace"))
        );
        let reason = format!("{status}: {}", select::word(message));
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, cells)) if cells.contains(&cell) => {}
            Some((_, cells)) => cells.push(cell),
            None => reasons.push((reason, vec![cell])),
        }
    }
    let mut text = String::new();
    if !reasons.is_empty() {
        text.push_str("\nCells without a result:\n\n");
        for (reason, cells) in reasons {
            let _ = writeln!(text, "- {} ({})", inline(&reason), inline(&cells.join("; ")));
        }
    }
    text
}

fn table_markdown(table: &TableSpec, rows: &Rows) -> Result<String, SelectError> {
    let passing = select::passing(rows, &table.filters);
    if passing.is_empty() {
        return Err(SelectError::Nothing(format!("the table {:?}", table.title)));
    }
    match &table.layout {
        TableLayout::Pivot { rows: front, columns, value } => {
            pivot(rows, &passing, (front, columns), value)
        }
        TableLayout::List(columns) => Ok(list(rows, &passing, columns)),
    }
}

fn pivot(
    rows: &Rows,
    passing: &[&[Value]],
    (front, top): (&str, &str),
    value: &Shown,
) -> Result<String, SelectError> {
    let points = Points::new(rows, passing, &[front, top], value)?;
    let columns = select::names(rows, passing, top);
    let corner = described(&value.column, value.unit, value.relative_to.as_ref());
    let mut lines = Vec::new();
    let head = columns.iter().map(|name| inline(&select::shown_name(top, name)));
    lines.push([inline(&corner)].into_iter().chain(head).collect::<Vec<_>>());
    for name in select::names(rows, passing, front) {
        let cells = columns.iter().map(|column| match points.at(&[&name, column]) {
            Point::Number(number) => spelled(number, value.unit),
            Point::Oom => "OOM".to_owned(),
            Point::Missing => "–".to_owned(),
        });
        let name = inline(&select::shown_name(front, &name));
        lines.push([name].into_iter().chain(cells).collect());
    }
    Ok(grid(&lines, 1))
}

fn list(rows: &Rows, passing: &[&[Value]], columns: &[String]) -> String {
    let kinds: Vec<ColumnKind> = columns
        .iter()
        .map(|name| rows.column(name).map_or(ColumnKind::Word, |at| rows.columns[at].kind))
        .collect();
    let units: Vec<Unit> =
        columns.iter().zip(&kinds).map(|(name, kind)| Unit::of_column(name, *kind)).collect();
    let words = kinds.iter().take_while(|kind| **kind == ColumnKind::Word).count();
    let head = columns.iter().zip(&units).map(|(name, unit)| inline(&described(name, *unit, None)));
    let mut lines = vec![head.collect::<Vec<_>>()];
    for row in passing {
        let cells = columns.iter().zip(kinds.iter().zip(&units)).map(|(name, (kind, unit))| {
            let value = rows.get(row, name);
            match (kind, value.number()) {
                (ColumnKind::Word, _) => inline(&select::word(value)),
                (_, Some(number)) => spelled(scaled(number, *unit), *unit),
                (_, None) => "–".to_owned(),
            }
        });
        lines.push(cells.collect());
    }
    grid(&lines, words)
}

/// A number of a table, whose head tells the unit: sizes and times with two decimals, shares with
/// one, counts as they are.
fn spelled(number: f64, unit: Unit) -> String {
    match unit {
        Unit::Percent => format!("{number:.1}"),
        Unit::Times => format!("{number:.3}"),
        Unit::Plain if number >= 0.0 && number.fract() == 0.0 && number < 1e15 => {
            grouped(number as u64)
        }
        _ => format!("{number:.2}"),
    }
}

/// A GitHub table; the first `left` columns are words.
fn grid(lines: &[Vec<String>], left: usize) -> String {
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        let _ = writeln!(text, "| {} |", line.join(" | "));
        if at == 0 {
            let rule = (0..line.len()).map(|column| if column < left { "---" } else { "---:" });
            let _ = writeln!(text, "|{}|", rule.collect::<Vec<_>>().join("|"));
        }
    }
    text
}

/// A text in one line that breaks no table.
fn inline(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    super::text::printable(&line).replace('|', "\\|")
}

/// The cells of an experiment for people: a line each, those that are kept marked.
pub fn cells_text(description: &Description, cells: &[&Cell], kept: &[bool]) -> String {
    let mut text = String::new();
    let columns = description.columns();
    for (cell, kept) in cells.iter().zip(kept) {
        let names = cell.names(description);
        let named = columns.iter().zip(&names).filter(|(_, value)| **value != Value::None);
        let words = named.map(|(column, value)| format!("{}={}", column.name, select::word(value)));
        let words = words.collect::<Vec<_>>().join("  ");
        let mark = if *kept { "  (kept)" } else { "" };
        let _ = writeln!(text, "{}{mark}", super::text::printable(&words));
    }
    let done = kept.iter().filter(|kept| **kept).count();
    let _ = writeln!(
        text,
        "{}: {}, {} to run",
        description.name,
        counted(cells.len() as u64, "cell"),
        cells.len() - done
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::select::tests::{reserved, table};

    #[test]
    fn a_pivot_has_names_on_both_sides() {
        let spec = TableSpec {
            title: String::new(),
            filters: Vec::new(),
            layout: TableLayout::Pivot {
                rows: "trace".to_owned(),
                columns: "label".to_owned(),
                value: reserved(),
            },
        };
        assert_eq!(
            table_markdown(&spec, &table()).expect("a table"),
            "| reserved peak, GiB | caching | stitch |\n|---|---:|---:|\n\
             | one | 10.00 | 5.00 |\n| two | 20.00 | OOM |\n"
        );
    }

    #[test]
    fn a_list_has_columns_as_they_are() {
        let columns = ["trace", "status", "reserved_bytes_peak", "sequence"];
        let spec = TableSpec {
            title: String::new(),
            filters: vec!["label=stitch".parse().expect("a filter")],
            layout: TableLayout::List(columns.map(str::to_owned).into()),
        };
        assert_eq!(
            table_markdown(&spec, &table()).expect("a table"),
            "| trace | status | reserved peak, GiB | sequence |\n|---|---|---:|---:|\n\
             | one | ok | 5.00 | 8,192 |\n| two | oom | 18.00 | 1,024 |\n"
        );
    }

    #[test]
    fn names_cannot_break_a_table() {
        assert_eq!(inline("a|b\n c\u{1b}[31m").matches('|').count(), 1);
        assert!(!inline("a\n\nb").contains('\n') && !inline("\u{1b}[31m").contains('\u{1b}'));
    }
}
