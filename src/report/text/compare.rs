//! The answer of `compare`: a table a trace for a screen, one table of all for Markdown.
//!
//! The one design decision: a figure is described once, as a column with its heads, its text and
//! which way is better, and both tables follow from the columns. A column of which no row says
//! anything is left out.

use std::borrow::Cow;

use super::grid::{Align, Cell, Grid};
use super::run::{calls_cell, capacity, note, setup, status_cell, trace_line};
use super::{SizeUnit, Style, Tone, duration, percent, printable, wrapped};
use crate::engine::{Compared, SmallestCapacity, Status};
use crate::units::Bytes;

/// How wide the table should be: what is compared stands side by side.
const TABLE_WIDTH: usize = 100;

/// The rows of one trace.
#[derive(Clone, Copy, Debug)]
pub struct TraceComparison<'a> {
    /// The settings string (`PYTORCH_CUDA_ALLOC_CONF`) in force, if any.
    pub settings: Option<&'a str>,
    /// The share of the run that the history holds is only an upper bound.
    pub share_is_bound: bool,
    /// A row a cell, in the order in which to show them.
    pub rows: &'a [Compared],
}

/// One trace as a screen of text; empty if there are no rows. The best figure of a column among the
/// rows of one capacity that completed is coloured.
pub fn compare(comparison: &TraceComparison<'_>, style: Style) -> String {
    let rows = comparison.rows;
    let Some(first) = rows.first() else { return String::new() };
    let mut out = trace_line(&first.result, comparison.share_is_bound, style);
    out.push_str(&setup_line(comparison, first));
    out.push('\n');
    out.push_str(&table(rows).render(style));
    out
}

/// `requested peak 31.97 GiB; device: sim 139.80 GiB, costs of h200; settings ...`
fn setup_line(comparison: &TraceComparison<'_>, first: &Compared) -> String {
    let rows = comparison.rows;
    let result = &first.result;
    let capacity = (!has_several_capacities(rows)).then(|| capacity(result));
    // A limit that only some have stands under their rows if it matters.
    let limit_bytes = result.allocator.limit_bytes;
    let shared = rows.iter().all(|row| row.result.allocator.limit_bytes == limit_bytes);
    let limit_bytes = limit_bytes.filter(|_| shared);
    let peak = Bytes(result.trace.requested_bytes_peak);
    let mut parts = vec![format!("requested peak {peak}")];
    parts.extend(setup(result, capacity.as_deref(), comparison.settings, limit_bytes));
    wrapped("", &parts.join("; "), "  ")
}

fn has_several_capacities(rows: &[Compared]) -> bool {
    rows.iter().any(|row| row.group != rows[0].group)
}

fn table(rows: &[Compared]) -> Grid {
    let peaks = rows.iter().map(|row| row.result.peaks.reserved_bytes_peak);
    let requested = rows.iter().map(|row| row.result.trace.requested_bytes_peak);
    let unit = SizeUnit::fitting(peaks.chain(requested).max().unwrap_or(0));
    let sizes = Sizes::Of(unit);
    let columns = columns(rows, |column| match column.title {
        "trace" | "requested peak" => false,
        "capacity" => has_several_capacities(rows),
        _ => true,
    });
    let aligns: Vec<Align> = columns.iter().map(|column| column.align).collect();
    let mut grid = Grid::new(&aligns).of_width(TABLE_WIDTH);
    grid.head(columns.iter().map(|column| column.head.0));
    grid.head(columns.iter().map(|column| match column.head.1 {
        "" => unit.name.to_owned(),
        "peak" => format!("peak {}", unit.name),
        text => text.to_owned(),
    }));
    for row in rows {
        let cells = columns.iter().map(|column| match column.title {
            "status" => status_cell(row.result.outcome.status),
            _ => column.cell(row, rows, sizes),
        });
        grid.row(cells, note(&row.result) + &capacity_note(row));
    }
    grid
}

/// What to know about the smallest capacity, under the row.
fn capacity_note(row: &Compared) -> String {
    let Some(smallest) = &row.smallest_capacity else { return String::new() };
    let text = match (smallest.capacity_bytes, smallest.refused_bytes_max) {
        (None, _) => {
            let message = smallest.message.as_deref().unwrap_or("not found");
            format!("no smallest capacity: {}", printable(message))
        }
        (Some(enough), Some(refused)) if smallest.non_monotone => format!(
            "completes with {} but not with every capacity above it: not with {}",
            Bytes(enough),
            Bytes(refused)
        ),
        _ => return String::new(),
    };
    wrapped("  ", &text, "    ")
}

/// All rows as one GitHub table, with a trace column; empty if there are none.
pub fn compare_markdown(rows: &[Compared]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let columns = columns(rows, |_| true);
    let mut out = String::new();
    let mut line = |cells: Vec<Cow<'_, str>>| {
        out.push_str(&format!("| {} |\n", cells.join(" | ")));
    };
    line(columns.iter().map(|column| column.title.into()).collect());
    line(columns.iter().map(|column| column.align.markdown().into()).collect());
    for row in rows {
        let text = |column: &Column| column.text(row, Sizes::Own).replace('|', "\\|").into();
        line(columns.iter().map(text).collect());
    }
    out
}

impl Align {
    fn markdown(self) -> &'static str {
        match self {
            Align::Left => "---",
            Align::Right => "---:",
        }
    }
}

/// In which unit sizes are written.
#[derive(Clone, Copy)]
enum Sizes {
    /// One for all, which the head names.
    Of(SizeUnit),
    /// Each in its own.
    Own,
}

impl Sizes {
    fn text(self, size_bytes: i64) -> String {
        let sign = if size_bytes < 0 { "-" } else { "" };
        match self {
            Sizes::Of(unit) => unit.signed_cell(size_bytes),
            Sizes::Own => format!("{sign}{}", Bytes(size_bytes.unsigned_abs())),
        }
    }
}

/// A figure of a row. What it is decides how it is written.
enum Figure<'a> {
    Word(Cow<'a, str>),
    Size(i64),
    Fraction(f64),
    Calls(u64),
    Time(u64),
}

impl Figure<'_> {
    fn size(size_bytes: u64) -> Self {
        Figure::Size(i64::try_from(size_bytes).unwrap_or(i64::MAX))
    }

    fn text(&self, sizes: Sizes) -> String {
        match *self {
            Figure::Word(ref word) => printable(word).into_owned(),
            Figure::Size(size_bytes) => sizes.text(size_bytes),
            Figure::Fraction(fraction) => percent(fraction),
            Figure::Calls(calls) => calls_cell(calls),
            Figure::Time(ns) => duration(ns),
        }
    }

    fn value(&self) -> f64 {
        match *self {
            Figure::Word(_) => 0.0,
            Figure::Size(size_bytes) => size_bytes as f64,
            Figure::Fraction(fraction) => fraction,
            Figure::Calls(count) | Figure::Time(count) => count as f64,
        }
    }
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    Lower,
    Higher,
    Neither,
}

/// One figure of all rows.
struct Column {
    /// Head in Markdown.
    title: &'static str,
    /// The two lines of the head on a screen; an empty second one stands for the unit of sizes.
    head: (&'static str, &'static str),
    align: Align,
    better: Better,
    read: fn(&Compared) -> Option<Figure<'_>>,
}

impl Column {
    fn text(&self, row: &Compared, sizes: Sizes) -> String {
        (self.read)(row).map_or_else(|| "-".to_owned(), |figure| figure.text(sizes))
    }

    fn cell(&self, row: &Compared, rows: &[Compared], sizes: Sizes) -> Cell {
        let tone = if self.is_best(row, rows) { Tone::Good } else { Tone::Plain };
        Cell::toned(self.text(row, sizes), tone)
    }

    /// Whether no other row of the same capacity that completed has a better figure, and some has a
    /// worse one.
    fn is_best(&self, row: &Compared, rows: &[Compared]) -> bool {
        let is_better = |a: f64, b: f64| match self.better {
            Better::Lower => a < b,
            Better::Higher => a > b,
            Better::Neither => false,
        };
        let value = |row: &Compared| {
            let completed = row.result.outcome.status == Status::Ok;
            (self.read)(row).filter(|_| completed).map(|figure| figure.value())
        };
        let Some(own) = value(row) else { return false };
        let others = || rows.iter().filter(|other| other.group == row.group).filter_map(value);
        others().all(|other| !is_better(other, own)) && others().any(|other| is_better(own, other))
    }
}

/// The columns that some row says something of.
fn columns(rows: &[Compared], wanted: impl Fn(&Column) -> bool) -> Vec<Column> {
    let columns = identity_columns().into_iter().chain(memory_columns()).chain(cost_columns());
    let said = |column: &Column| rows.iter().any(|row| (column.read)(row).is_some());
    columns.filter(|column| wanted(column) && said(column)).collect()
}

fn identity_columns() -> [Column; 4] {
    let column = |title, head, read| Column {
        title,
        head,
        align: Align::Left,
        better: Better::Neither,
        read,
    };
    [
        column("trace", ("", "trace"), |row| Some(Figure::Word((&*row.result.trace.name).into()))),
        column("allocator", ("", "allocator"), |row| {
            Some(Figure::Word((&*row.result.allocator.name).into()))
        }),
        column("capacity", ("", "capacity"), |row| {
            Some(Figure::Word(capacity(&row.result).into()))
        }),
        column("status", ("", "status"), |row| {
            Some(Figure::Word(row.result.outcome.status.name().into()))
        }),
    ]
}

/// A column of numbers.
fn numbers(
    title: &'static str,
    head: (&'static str, &'static str),
    better: Better,
    read: fn(&Compared) -> Option<Figure<'_>>,
) -> Column {
    Column { title, head, align: Align::Right, better, read }
}

fn memory_columns() -> [Column; 6] {
    use Better::{Higher, Lower, Neither};
    [
        numbers("requested peak", ("requested", "peak"), Neither, |row| {
            Some(Figure::size(row.result.trace.requested_bytes_peak))
        }),
        numbers("reserved peak", ("reserved", "peak"), Lower, |row| {
            Some(Figure::size(row.result.peaks.reserved_bytes_peak))
        }),
        numbers("excess", ("excess", ""), Lower, |row| Some(Figure::Size(row.result.excess_bytes))),
        numbers("frag", ("", "frag"), Lower, |row| {
            Some(Figure::Fraction(row.result.fragmentation))
        }),
        numbers("utilization", ("", "util"), Higher, |row| {
            Some(Figure::Fraction(row.result.utilization))
        }),
        numbers("waste removed", ("waste", "removed"), Higher, |row| {
            row.waste_removed.map(Figure::Fraction)
        }),
    ]
}

fn cost_columns() -> [Column; 6] {
    use Better::Lower;
    fn smallest(row: &Compared) -> Option<&SmallestCapacity> {
        row.smallest_capacity.as_ref()
    }
    [
        numbers("device calls", ("device", "calls"), Lower, |row| {
            Some(Figure::Calls(row.result.calls.total()))
        }),
        numbers("device time", ("device", "time"), Lower, |row| {
            Some(Figure::Time(row.result.time.allocator_device_ns))
        }),
        numbers("time share", ("time", "share"), Lower, |row| {
            row.time_share().map(Figure::Fraction)
        }),
        numbers("smallest capacity", ("smallest", "capacity"), Lower, |row| {
            smallest(row)?.capacity_bytes.map(Figure::size)
        }),
        numbers("over requested", ("over", ""), Lower, |row| {
            smallest(row)?.over_requested_bytes.map(Figure::size)
        }),
        numbers("over requested %", ("", "over"), Lower, |row| {
            smallest(row)?.over_requested.map(Figure::Fraction)
        }),
    ]
}
