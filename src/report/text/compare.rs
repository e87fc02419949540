//! The answer of `compare`: a table a trace for a screen, one table of all for Markdown.
//!
//! The one design decision: a figure is described once, as a column with its heads, its text and
//! which way is better, and both tables follow from the columns. A column of which no row says
//! anything is left out. What a peak means in the end is not told of a row that was refused
//! something: excess, fragmentation and the like need the whole trace.

use std::borrow::Cow;

use super::grid::{Align, Cell, Grid};
use super::run::{
    calls_cell, capacity, costs, notes, refusal_note, setup, status_cell, trace_line, under_row,
};
use super::{SizeUnit, Style, Tone, duration, percent, printable, wrapped};
use crate::engine::{Compared, RunResult, SmallestCapacity, Status};
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
    /// Event and bytes of the first request that the recorded run was refused, if any.
    pub recorded_refusal: Option<(u64, u64)>,
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
    out.push_str(&under_row(&comparison.notes()));
    out
}

impl TraceComparison<'_> {
    /// What to know about all rows.
    fn notes(&self) -> Vec<String> {
        let results = self.rows.iter().map(|row| &row.result);
        refusal_note(self.recorded_refusal, results).into_iter().collect()
    }
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
    let units = Units::fitting(rows);
    let columns = columns(rows, |column| match column.title {
        "trace" | "requested peak" => false,
        "capacity" => has_several_capacities(rows),
        _ => true,
    });
    let aligns: Vec<Align> = columns.iter().map(|column| column.align).collect();
    let mut grid = Grid::new(&aligns).of_width(TABLE_WIDTH);
    grid.head(columns.iter().map(|column| column.head.0));
    grid.head(columns.iter().map(|column| match column.head.1 {
        "" => units.of(column).name.to_owned(),
        "peak" => format!("peak {}", units.of(column).name),
        text => text.to_owned(),
    }));
    for row in rows {
        let cells = columns.iter().map(|column| match column.title {
            "status" => status_cell(row.result.outcome.status),
            _ => column.cell(row, rows, units.of(column)),
        });
        grid.row(cells, under_row(&row_notes(row)));
    }
    grid
}

/// What to know about one row.
fn row_notes(row: &Compared) -> Vec<String> {
    let mut notes = notes(&row.result);
    notes.extend(capacity_note(row));
    notes
}

/// What to know about the smallest capacity.
fn capacity_note(row: &Compared) -> Option<String> {
    let smallest = row.smallest_capacity.as_ref()?;
    match (smallest.capacity_bytes, smallest.refused_bytes_max) {
        (None, _) => {
            let message = smallest.message.as_deref().unwrap_or("not found");
            Some(format!("no smallest capacity: {}", printable(message)))
        }
        (Some(enough), Some(refused)) if smallest.non_monotone => Some(format!(
            "completes with {} but not with every capacity above it: not with {}",
            Bytes(enough),
            Bytes(refused)
        )),
        _ => None,
    }
}

/// All rows as one GitHub table, with a trace column, and what to know about them as a list below
/// it; empty if there are no rows.
pub fn compare_markdown(comparisons: &[TraceComparison<'_>]) -> String {
    let rows: Vec<Compared> = comparisons.iter().flat_map(|it| it.rows).cloned().collect();
    let Some(first) = rows.first() else { return String::new() };
    let rows = &*rows;
    let units = Units::fitting(rows);
    let columns = columns(rows, |_| true);
    let mut out = String::new();
    let mut line = |cells: Vec<Cow<'_, str>>| {
        out.push_str(&format!("| {} |\n", cells.join(" | ")));
    };
    let title = |column: &Column| match column.is_size {
        true => format!("{} {}", column.title, units.of(column).name).into(),
        false => column.title.into(),
    };
    line(columns.iter().map(title).collect());
    line(columns.iter().map(|column| column.align.markdown().into()).collect());
    for row in rows {
        let text = |column: &Column| escaped(&column.text(row, units.of(column))).into();
        line(columns.iter().map(text).collect());
    }
    out.push('\n');
    for item in markdown_notes(comparisons, first) {
        out.push_str(&format!("- {}\n", escaped(&item)));
    }
    out
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// What to know, a list item each: the costs, then every row and trace of which there is something.
fn markdown_notes(comparisons: &[TraceComparison<'_>], first: &Compared) -> Vec<String> {
    let mut items = vec![costs(&first.result)];
    for comparison in comparisons {
        let several = has_several_capacities(comparison.rows);
        for row in comparison.rows {
            let result = &row.result;
            let device = if several { format!(", {}", capacity(result)) } else { String::new() };
            let (trace, allocator) = (&result.trace.name, &result.allocator.name);
            let row_name = format!("{}, {}{device}", printable(trace), printable(allocator));
            items.extend(row_notes(row).into_iter().map(|note| format!("{row_name}: {note}")));
        }
        let name = comparison.rows.first().map_or("", |row| &row.result.trace.name);
        let notes = comparison.notes().into_iter();
        items.extend(notes.map(|note| format!("{}: {note}", printable(name))));
    }
    items
}

impl Align {
    fn markdown(self) -> &'static str {
        match self {
            Align::Left => "---",
            Align::Right => "---:",
        }
    }
}

/// In which units sizes are written: one for all but the devices, which may be far larger.
#[derive(Clone, Copy)]
struct Units {
    sizes: SizeUnit,
    capacities: SizeUnit,
}

impl Units {
    fn fitting(rows: &[Compared]) -> Units {
        let peaks = rows.iter().map(|row| row.result.peaks.reserved_bytes_peak);
        let requested = rows.iter().map(|row| row.result.trace.requested_bytes_peak);
        // Devices of nearly one size must differ, so that the smallest decides.
        let capacities = rows.iter().filter_map(|row| row.result.device.capacity_bytes);
        Units {
            sizes: SizeUnit::fitting(peaks.chain(requested).max().unwrap_or(0)),
            capacities: SizeUnit::fitting(capacities.min().unwrap_or(u64::MAX)),
        }
    }

    fn of(self, column: &Column) -> SizeUnit {
        if column.title == "capacity" { self.capacities } else { self.sizes }
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

    fn text(&self, unit: SizeUnit) -> String {
        match *self {
            Figure::Word(ref word) => printable(word).into_owned(),
            Figure::Size(size_bytes) => unit.signed_cell(size_bytes),
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
    /// Its figures are sizes: the head names their unit.
    is_size: bool,
    read: fn(&Compared) -> Option<Figure<'_>>,
}

impl Column {
    fn text(&self, row: &Compared, unit: SizeUnit) -> String {
        (self.read)(row).map_or_else(|| "-".to_owned(), |figure| figure.text(unit))
    }

    fn cell(&self, row: &Compared, rows: &[Compared], unit: SizeUnit) -> Cell {
        let tone = if self.is_best(row, rows) { Tone::Good } else { Tone::Plain };
        Cell::toned(self.text(row, unit), tone)
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
        is_size: false,
        read,
    };
    [
        column("trace", ("", "trace"), |row| Some(Figure::Word((&*row.result.trace.name).into()))),
        column("allocator", ("", "allocator"), |row| {
            Some(Figure::Word((&*row.result.allocator.name).into()))
        }),
        Column {
            align: Align::Right,
            is_size: true,
            ..column("capacity", ("capacity", ""), |row| {
                let bytes = row.result.device.capacity_bytes;
                Some(bytes.map_or(Figure::Word("unlimited".into()), Figure::size))
            })
        },
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
    Column { title, head, align: Align::Right, better, is_size: false, read }
}

/// A column of sizes.
fn sizes(
    title: &'static str,
    head: (&'static str, &'static str),
    better: Better,
    read: fn(&Compared) -> Option<Figure<'_>>,
) -> Column {
    Column { is_size: true, ..numbers(title, head, better, read) }
}

fn memory_columns() -> [Column; 6] {
    use Better::{Higher, Lower, Neither};
    /// The result if it completed.
    fn completed(row: &Compared) -> Option<&RunResult> {
        Some(&row.result).filter(|result| result.outcome.status == Status::Ok)
    }
    [
        sizes("requested peak", ("requested", "peak"), Neither, |row| {
            Some(Figure::size(row.result.trace.requested_bytes_peak))
        }),
        sizes("reserved peak", ("reserved", "peak"), Lower, |row| {
            Some(Figure::size(row.result.peaks.reserved_bytes_peak))
        }),
        sizes("excess", ("excess", ""), Lower, |row| {
            completed(row).map(|result| Figure::Size(result.excess_bytes))
        }),
        numbers("frag", ("", "frag"), Lower, |row| {
            completed(row).map(|result| Figure::Fraction(result.fragmentation))
        }),
        numbers("utilization", ("", "util"), Higher, |row| {
            completed(row).map(|result| Figure::Fraction(result.utilization))
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
        sizes("smallest capacity", ("smallest", "capacity"), Lower, |row| {
            smallest(row)?.capacity_bytes.map(Figure::size)
        }),
        sizes("over requested", ("over", ""), Lower, |row| {
            smallest(row)?.over_requested_bytes.map(Figure::size)
        }),
        numbers("over requested %", ("", "over"), Lower, |row| {
            smallest(row)?.over_requested.map(Figure::Fraction)
        }),
    ]
}
