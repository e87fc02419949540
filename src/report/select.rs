//! Which numbers of a results table a figure or table shows.
//!
//! The one design decision: a place is one row unless the description says what is made of several.
//! A bar that silently averages runs is worse than no bar.

use std::collections::{BTreeMap, BTreeSet};

use crate::experiment::{Aggregate, Filter, FleetError, Rows, Shown, Unit, Value};
use crate::units::{Bytes, GIB, MIB};

/// The rows do not give what is asked for.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// Several rows where one is expected.
    #[error(
        "{count} rows have {place}: one is expected there; add a filter, or say what is made of \
         them with aggregate = \"mean\", \"median\", \"min\" or \"max\""
    )]
    Several {
        /// Number of rows.
        count: usize,
        /// Where.
        place: String,
    },
    /// Several rows that a figure could be relative to.
    #[error(
        "{count} rows with {place} fit relative_to = {filter:?} and differ in {column}: one is \
         expected; name a column in which only one of them has the value"
    )]
    SeveralBases {
        /// Number of rows.
        count: usize,
        /// Where.
        place: String,
        /// What they fit.
        filter: String,
        /// The figure.
        column: String,
    },
    /// No row passes.
    #[error("no row of the results is left for {0}")]
    Nothing(String),
    /// The rows are no fleet.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// Not a number.
    #[error("{column} is {value:?}, which is no number: this axis needs numbers")]
    NoNumber {
        /// The column.
        column: String,
        /// What was found.
        value: String,
    },
}

/// What is shown at a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Point {
    /// A number, in the unit of the axis.
    Number(f64),
    /// The cell ran out of memory.
    Oom,
    /// The figure does not apply.
    Missing,
}

impl Point {
    pub(super) fn number(self) -> Option<f64> {
        if let Point::Number(number) = self { Some(number) } else { None }
    }
}

/// Figures that hold whether or not a request was refused.
const ALWAYS: [&str; 4] =
    ["requested_bytes_peak", "smallest_capacity_bytes", "over_requested_bytes", "over_requested"];

/// Rows that pass all conditions.
pub(super) fn passing<'r>(rows: &'r Rows, filters: &[Filter]) -> Vec<&'r [Value]> {
    let passes = |row: &&Vec<Value>| {
        filters.iter().all(|filter| filter.passes(&word(rows.get(row, &filter.column))))
    };
    rows.rows.iter().filter(passes).map(Vec::as_slice).collect()
}

/// A value as a name.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::None => String::new(),
        Value::Word(word) => word.clone(),
        Value::Number(number) => number.to_string(),
        Value::Difference(number) => number.to_string(),
        Value::Fraction(number) => number.to_string(),
    }
}

/// A name of a column as people read it: sizes with their unit.
pub(super) fn shown_name(column: &str, name: &str) -> String {
    let bytes = column.contains("bytes").then(|| name.parse().ok().map(Bytes)).flatten();
    bytes.map_or_else(|| name.to_owned(), |bytes| bytes.to_string())
}

/// The names in a column, in the order of the rows; numbers in their own.
pub(super) fn names(rows: &Rows, passing: &[&[Value]], column: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut seen = BTreeSet::new();
    for row in passing {
        let name = word(rows.get(row, column));
        if seen.insert(name.clone()) {
            names.push(name);
        }
    }
    let number = |name: &String| name.parse::<f64>().ok().filter(|number| number.is_finite());
    if names.iter().all(|name| number(name).is_some()) {
        names.sort_by(|a, b| number(a).unwrap_or(0.0).total_cmp(&number(b).unwrap_or(0.0)));
    }
    names
}

/// How a unit scales what the table holds.
pub(super) fn scaled(number: f64, unit: Unit) -> f64 {
    match unit {
        Unit::Plain | Unit::Times => number,
        Unit::KiB => number / 1024.0,
        Unit::MiB => number / MIB as f64,
        Unit::GiB => number / GIB as f64,
        Unit::Percent => number * 100.0,
        Unit::Us => number / 1e3,
        Unit::Ms => number / 1e6,
        Unit::S => number / 1e9,
    }
}

/// What stands behind a number of this unit.
fn unit_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Plain => "",
        Unit::KiB => "KiB",
        Unit::MiB => "MiB",
        Unit::GiB => "GiB",
        Unit::Percent => "%",
        Unit::Us => "µs",
        Unit::Ms => "ms",
        Unit::S => "s",
        Unit::Times => "×",
    }
}

/// A column in words, with its unit: `reserved peak, GiB`.
pub(super) fn described(column: &str, unit: Unit, relative_to: Option<&Filter>) -> String {
    let bare = ["_bytes_peak", "_bytes", "_ns"].iter().find_map(|end| {
        let rest = column.strip_suffix(end)?;
        Some(if *end == "_bytes_peak" { format!("{rest} peak") } else { rest.to_owned() })
    });
    let words = bare.unwrap_or_else(|| column.to_owned()).replace('_', " ");
    match (relative_to, unit_name(unit)) {
        (Some(filter), _) => format!("{words} relative to {}", filter.values()),
        (None, "") => words,
        (None, unit) => format!("{words}, {unit}"),
    }
}

/// The point at each place: places are told apart by these columns.
pub(super) struct Points {
    /// In the order of the rows.
    points: Vec<(Vec<String>, Point)>,
    /// Where each place stands among them.
    order: BTreeMap<Vec<String>, usize>,
}

impl Points {
    /// # Errors
    /// If several rows stand at one place and nothing says what to make of them, or a figure could
    /// be relative to several.
    pub(super) fn new(
        rows: &Rows,
        passing: &[&[Value]],
        places: &[&str],
        shown: &Shown,
    ) -> Result<Points, SelectError> {
        let bases = shown.relative_to.as_ref().map(|filter| Bases::new(rows, filter, shown));
        let mut order: BTreeMap<Vec<String>, usize> = BTreeMap::new();
        let mut found: Vec<(Vec<String>, Vec<Point>)> = Vec::new();
        for row in passing {
            let place = words(rows, row, places);
            let point = point(rows, row, shown, bases.as_ref())?;
            let at = *order.entry(place.clone()).or_insert(found.len());
            match found.get_mut(at) {
                Some((_, points)) => points.push(point),
                None => found.push((place, vec![point])),
            }
        }
        let mut points = Vec::new();
        for (place, several) in found {
            let point = match (&several[..], shown.aggregate) {
                (&[one], _) => one,
                (several, Some(aggregate)) => aggregated(several, aggregate),
                (several, None) => {
                    let place = told(places, &place);
                    return Err(SelectError::Several { count: several.len(), place });
                }
            };
            points.push((place, point));
        }
        Ok(Points { points, order })
    }

    /// The point at a place.
    pub(super) fn at(&self, place: &[&str]) -> Point {
        let place: Vec<String> = place.iter().map(|name| (*name).to_owned()).collect();
        let found = self.order.get(&place).and_then(|&at| self.points.get(at));
        found.map_or(Point::Missing, |(_, point)| *point)
    }
}

/// What figures need beside.
#[cfg(feature = "figures")]
impl Points {
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[String], Point)> {
        self.points.iter().map(|(place, point)| (place.as_slice(), *point))
    }

    /// All numbers.
    pub(super) fn numbers(&self) -> impl Iterator<Item = f64> {
        self.points.iter().filter_map(|(_, point)| point.number())
    }

    pub(super) fn has_oom(&self) -> bool {
        self.points.iter().any(|(_, point)| *point == Point::Oom)
    }
}

/// The values of a row in some columns, as names.
fn words(rows: &Rows, row: &[Value], columns: &[&str]) -> Vec<String> {
    columns.iter().map(|column| word(rows.get(row, column))).collect()
}

/// A place in words: `trace = one, label = native`.
fn told(columns: &[&str], names: &[String]) -> String {
    let parts = columns.iter().zip(names).map(|(column, name)| format!("{column} = {name}"));
    parts.collect::<Vec<_>>().join(", ")
}

/// What figures are relative to, by place.
struct Bases<'a> {
    filter: &'a Filter,
    columns: Vec<&'static str>,
    bases: BTreeMap<Vec<String>, Base>,
}

/// A row that figures are relative to.
struct Base {
    point: Point,
    /// Number of rows that fit.
    count: usize,
    /// They do not all have one figure.
    differs: bool,
}

impl<'a> Bases<'a> {
    fn new(rows: &Rows, filter: &'a Filter, shown: &Shown) -> Bases<'a> {
        // Blocks may have settings that no column tells: rows of one block belong together, unless
        // it is a block that is measured by.
        let columns = ["set", "trace", "capacity", "limit"].into_iter();
        let columns: Vec<&str> = columns
            .filter(|&column| rows.column(column).is_some())
            .filter(|&column| column != "set" || filter.column != "set")
            .collect();
        let mut bases: BTreeMap<Vec<String>, Base> = BTreeMap::new();
        for row in passing(rows, std::slice::from_ref(filter)) {
            let point = raw(rows, row, &shown.column);
            let base = bases.entry(words(rows, row, &columns));
            let base = base.or_insert(Base { point, count: 0, differs: false });
            base.count += 1;
            base.differs |= base.point != point;
        }
        Bases { filter, columns, bases }
    }

    /// What a row is relative to.
    fn of(&self, rows: &Rows, row: &[Value], shown: &Shown) -> Result<Point, SelectError> {
        let place = words(rows, row, &self.columns);
        match self.bases.get(&place) {
            None => Ok(Point::Missing),
            Some(base) if !base.differs => Ok(base.point),
            Some(base) => Err(SelectError::SeveralBases {
                count: base.count,
                place: told(&self.columns, &place),
                filter: self.filter.to_string(),
                column: shown.column.clone(),
            }),
        }
    }
}

fn point(
    rows: &Rows,
    row: &[Value],
    shown: &Shown,
    bases: Option<&Bases<'_>>,
) -> Result<Point, SelectError> {
    let own = raw(rows, row, &shown.column);
    let Some(bases) = bases else {
        return Ok(match own {
            Point::Number(number) => Point::Number(scaled(number, shown.unit)),
            other => other,
        });
    };
    Ok(match (own, bases.of(rows, row, shown)?) {
        (Point::Number(own), Point::Number(base)) if base != 0.0 => {
            Point::Number(scaled(own / base, shown.unit))
        }
        (Point::Oom, _) => Point::Oom,
        _ => Point::Missing,
    })
}

fn raw(rows: &Rows, row: &[Value], column: &str) -> Point {
    match rows.get(row, "status") {
        Value::Word(status) if status == "oom" && !ALWAYS.contains(&column) => Point::Oom,
        Value::Word(status) if status == "failed" || status == "skipped" => Point::Missing,
        _ => rows.get(row, column).number().map_or(Point::Missing, Point::Number),
    }
}

/// Whatever ran out of memory has no peak that could be averaged.
fn aggregated(points: &[Point], aggregate: Aggregate) -> Point {
    if points.contains(&Point::Oom) {
        return Point::Oom;
    }
    let mut numbers: Vec<f64> = points.iter().filter_map(|point| point.number()).collect();
    numbers.sort_by(f64::total_cmp);
    let (Some(&first), Some(&last)) = (numbers.first(), numbers.last()) else {
        return Point::Missing;
    };
    let middle = numbers.len() / 2;
    Point::Number(match aggregate {
        Aggregate::Mean => numbers.iter().sum::<f64>() / numbers.len() as f64,
        Aggregate::Median if numbers.len().is_multiple_of(2) => {
            (numbers[middle - 1] + numbers[middle]) / 2.0
        }
        Aggregate::Median => numbers[middle],
        Aggregate::Min => first,
        Aggregate::Max => last,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::experiment::{Column, ColumnKind};

    /// Two traces, two allocators; the second trace does not fit `stitch`.
    pub(in crate::report) fn table() -> Rows {
        let word = |name: &str| Column::new(name, ColumnKind::Word);
        let number = |name: &str| Column::new(name, ColumnKind::Number);
        let columns = vec![
            word("trace"),
            word("label"),
            word("status"),
            number("reserved_bytes_peak"),
            number("sequence"),
        ];
        let row = |trace: &str, label: &str, status: &str, gib: u64, sequence: u64| {
            vec![
                Value::of_word(trace),
                Value::of_word(label),
                Value::of_word(status),
                Value::Number(gib << 30),
                Value::Number(sequence),
            ]
        };
        let rows = vec![
            row("one", "caching", "ok", 10, 8192),
            row("one", "stitch", "ok", 5, 8192),
            row("two", "caching", "ok", 20, 1024),
            row("two", "stitch", "oom", 18, 1024),
        ];
        Rows { columns, rows }
    }

    pub(in crate::report) fn reserved() -> Shown {
        Shown {
            column: "reserved_bytes_peak".to_owned(),
            unit: Unit::GiB,
            relative_to: None,
            aggregate: None,
        }
    }

    fn points(places: &[&str], shown: &Shown) -> Result<Points, SelectError> {
        let table = table();
        Points::new(&table, &passing(&table, &[]), places, shown)
    }

    #[test]
    fn a_place_is_one_row() {
        let points = points(&["trace", "label"], &reserved()).unwrap();
        assert_eq!(points.at(&["one", "caching"]), Point::Number(10.0));
        assert_eq!(points.at(&["two", "stitch"]), Point::Oom);
        assert_eq!(points.at(&["three", "stitch"]), Point::Missing);
    }

    #[test]
    fn several_rows_at_a_place_need_a_rule() {
        let error = points(&["label"], &reserved()).err().expect("refused").to_string();
        assert!(error.contains("2 rows have label = caching"), "{error}");
        let of = |aggregate| {
            let shown = Shown { aggregate: Some(aggregate), ..reserved() };
            let points = points(&["label"], &shown).unwrap();
            [points.at(&["caching"]), points.at(&["stitch"])]
        };
        assert_eq!(of(Aggregate::Mean), [Point::Number(15.0), Point::Oom]);
        assert_eq!(of(Aggregate::Max), [Point::Number(20.0), Point::Oom]);
        assert_eq!(of(Aggregate::Median), [Point::Number(15.0), Point::Oom]);
    }

    #[test]
    fn relative_figures_are_of_the_same_trace() {
        let filter = Some("label=caching".parse().unwrap());
        let shown = Shown { unit: Unit::Times, relative_to: filter, ..reserved() };
        let points = points(&["trace", "label"], &shown).unwrap();
        assert_eq!(points.at(&["one", "stitch"]), Point::Number(0.5));
        assert_eq!(points.at(&["two", "caching"]), Point::Number(1.0));
        assert_eq!(points.at(&["two", "stitch"]), Point::Oom);
    }

    #[test]
    fn relative_figures_are_of_the_same_block_and_of_one_row() {
        // The same trace in two blocks; in the second, plain `caching` holds 20 GiB.
        let mut table = table();
        table.columns.push(Column::new("set", ColumnKind::Word));
        for (row, set) in table.rows.iter_mut().zip(["a", "a", "b", "b"]) {
            row[0] = Value::of_word("one");
            row[2] = Value::of_word("ok");
            row.push(Value::of_word(set));
        }
        let of = |filter: &str| {
            let relative_to = Some(filter.parse().unwrap());
            let shown = Shown { unit: Unit::Times, relative_to, ..reserved() };
            Points::new(&table, &passing(&table, &[]), &["set", "label"], &shown)
        };
        let points = of("label=caching").unwrap();
        assert_eq!(points.at(&["a", "stitch"]), Point::Number(0.5));
        assert_eq!(points.at(&["b", "stitch"]), Point::Number(0.9));
        let error = of("trace=one").err().expect("refused").to_string();
        assert!(error.contains("2 rows with set = a, trace = one fit"), "{error}");
        assert!(error.contains("\"trace=one\" and differ in reserved_bytes_peak"), "{error}");
        // What is measured by a block names one row of it.
        assert!(of("set=a").is_err());
    }

    #[test]
    fn numbers_stand_in_their_own_order_and_names_in_that_of_the_rows() {
        let table = table();
        let rows = passing(&table, &[]);
        assert_eq!(names(&table, &rows, "sequence"), ["1024", "8192"]);
        assert_eq!(names(&table, &rows, "trace"), ["one", "two"]);
        let filters = ["trace=two".parse().unwrap()];
        assert_eq!(names(&table, &passing(&table, &filters), "trace"), ["two"]);
    }

    #[test]
    fn axes_are_named_by_their_columns() {
        assert_eq!(described("reserved_bytes_peak", Unit::GiB, None), "reserved peak, GiB");
        assert_eq!(described("allocator_device_ns", Unit::Ms, None), "allocator device, ms");
        assert_eq!(described("sequence", Unit::Plain, None), "sequence");
        let filter = "allocator=stitch+policy=best".parse().ok();
        assert_eq!(
            described("reserved_bytes_peak", Unit::Times, filter.as_ref()),
            "reserved peak relative to stitch+policy=best"
        );
    }
}
