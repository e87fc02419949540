//! The part of a description that says what is made of the results.

use super::super::description::{
    Aggregate, FigureKind, FigureSpec, Shown, TableLayout, TableSpec, Unit, Width,
};
use super::super::error::DescriptionError;
use super::super::filter::Filter;
use super::super::fleet::FleetSpec;
use super::super::rows::{Column, ColumnKind};
use super::super::template;
use super::fields::{Field, Fields};
use crate::workload::meant;

const FIGURE_KEYS: [&str; 18] = [
    "name",
    "title",
    "kind",
    "x",
    "y",
    "value",
    "group",
    "filter",
    "unit",
    "x_unit",
    "log",
    "x_title",
    "y_title",
    "size",
    "height",
    "horizontal",
    "relative_to",
    "aggregate",
];

const TABLE_KEYS: [&str; 9] =
    ["title", "filter", "rows", "columns", "value", "unit", "show", "relative_to", "aggregate"];

const FLEET_KEYS: [&str; 3] = ["over", "filter", "baseline"];

/// Widths and heights of figures in millimetres.
const MILLIMETRES: std::ops::RangeInclusive<u64> = 30..=600;

const KINDS: [(&str, FigureKind); 6] = [
    ("bars", FigureKind::Bars),
    ("grouped bars", FigureKind::Bars),
    ("lines", FigureKind::Lines),
    ("scatter", FigureKind::Scatter),
    ("frontier", FigureKind::Frontier),
    ("heatmap", FigureKind::Heatmap),
];

const UNITS: [(&str, Unit); 9] = [
    ("plain", Unit::Plain),
    ("KiB", Unit::KiB),
    ("MiB", Unit::MiB),
    ("GiB", Unit::GiB),
    ("%", Unit::Percent),
    ("us", Unit::Us),
    ("ms", Unit::Ms),
    ("s", Unit::S),
    ("x", Unit::Times),
];

const AGGREGATES: [(&str, Aggregate); 4] = [
    ("mean", Aggregate::Mean),
    ("median", Aggregate::Median),
    ("min", Aggregate::Min),
    ("max", Aggregate::Max),
];

pub(super) fn figures(
    top: &Fields<'_>,
    columns: &[Column],
) -> Result<Vec<FigureSpec>, DescriptionError> {
    let mut figures: Vec<FigureSpec> = Vec::new();
    for field in top.tables("figure")? {
        let figure = figure(&field.table(&FIGURE_KEYS)?, columns)?;
        if figures.iter().any(|other| other.name == figure.name) {
            let message = format!("two figures are called {}: give each its name", figure.name);
            return Err(field.error(message));
        }
        figures.push(figure);
    }
    Ok(figures)
}

fn figure(fields: &Fields<'_>, columns: &[Column]) -> Result<FigureSpec, DescriptionError> {
    let name = fields.required("name", "name = \"reserved\", which its file is called by")?;
    let text = name.text()?;
    if !template::is_name(&text.replace('-', "_")) {
        return Err(name.wrong("expected letters, digits, - and _"));
    }
    let required = "one of bars, lines, scatter, frontier, heatmap";
    fields.required("kind", required)?;
    let kind = of_words(fields, "kind", &KINDS)?.unwrap_or(FigureKind::Bars);
    let x = fields.required("x", "the column of the horizontal axis, as in x = \"trace\"")?;
    let named = |key| fields.get(key).map(|field| column(&field, columns)).transpose();
    let y = fields.required("y", "the column of the vertical axis")?;
    let (y, value) = match kind {
        FigureKind::Heatmap => {
            let value = fields.required("value", "value = \"COLUMN\": what colours the fields")?;
            (Some(column(&y, columns)?), Some(shown(fields, &value, columns)?))
        }
        FigureKind::Frontier => (Some(column(&y, columns)?), None),
        _ => (None, Some(shown(fields, &y, columns)?)),
    };
    let only_for = |key, right: bool, what: &str| match fields.get(key) {
        Some(field) if !right => Err(field.error(format!("{key} goes with {what}"))),
        _ => Ok(()),
    };
    only_for("value", kind == FigureKind::Heatmap, "a heatmap: others show y")?;
    only_for("horizontal", kind == FigureKind::Bars, "bars")?;
    let fields_only = matches!(kind, FigureKind::Heatmap | FigureKind::Frontier);
    only_for("group", !fields_only, "bars, lines and scatter")?;
    only_for("log", kind != FigureKind::Frontier, "bars, lines, scatter and heatmap")?;
    let x = column(&x, columns)?;
    let logs: &[&str] = if kind == FigureKind::Heatmap { &["value"] } else { &["x", "y", "both"] };
    let log = fields.word("log", logs)?;
    Ok(FigureSpec {
        name: text.to_owned(),
        title: fields.text("title")?.unwrap_or_default(),
        kind,
        x_unit: unit(fields, "x_unit", &x, columns)?,
        x,
        y,
        value,
        group: named("group")?,
        filters: filters(fields, columns)?,
        x_log: matches!(log, Some("x" | "both")),
        y_log: matches!(log, Some("y" | "both" | "value")),
        x_title: fields.text("x_title")?,
        y_title: fields.text("y_title")?,
        width: width(fields)?,
        height_mm: fields
            .whole("height", *MILLIMETRES.start(), *MILLIMETRES.end())?
            .map(|height| height as u32),
        horizontal: fields.switch("horizontal")?.unwrap_or(false),
    })
}

fn width(fields: &Fields<'_>) -> Result<Width, DescriptionError> {
    let Some(size) = fields.get("size") else { return Ok(Width::Column) };
    match size.text() {
        Ok("column") => Ok(Width::Column),
        Ok("page") => Ok(Width::Page),
        Ok(_) => Err(size.wrong("expected \"column\", \"page\" or a width in millimetres")),
        Err(_) => {
            let width = fields.whole("size", *MILLIMETRES.start(), *MILLIMETRES.end())?;
            Ok(width.map_or(Width::Column, |width| Width::Millimetres(width as u32)))
        }
    }
}

fn shown(
    fields: &Fields<'_>,
    field: &Field<'_>,
    columns: &[Column],
) -> Result<Shown, DescriptionError> {
    let name = column(field, columns)?;
    let relative_to = fields.get("relative_to").map(|it| filter(&it, columns)).transpose()?;
    let unit = match relative_to {
        Some(_) => of_words(fields, "unit", &UNITS)?.unwrap_or(Unit::Times),
        None => unit(fields, "unit", &name, columns)?,
    };
    let aggregate = of_words(fields, "aggregate", &AGGREGATES)?;
    Ok(Shown { column: name, unit, relative_to, aggregate })
}

/// The unit that is asked for, else one by the name of the column.
fn unit(
    fields: &Fields<'_>,
    key: &'static str,
    column: &str,
    columns: &[Column],
) -> Result<Unit, DescriptionError> {
    if let Some(unit) = of_words(fields, key, &UNITS)? {
        return Ok(unit);
    }
    let found = columns.iter().find(|known| known.name == column);
    let kind = found.map_or(ColumnKind::Word, |known| known.kind);
    Ok(Unit::of_column(column, kind))
}

fn of_words<T: Copy>(
    fields: &Fields<'_>,
    key: &'static str,
    words: &[(&str, T)],
) -> Result<Option<T>, DescriptionError> {
    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
    let found = fields.word(key, &names)?;
    Ok(found.and_then(|found| Some(words.iter().find(|(name, _)| *name == found)?.1)))
}

/// The name of a column that there is.
fn column(field: &Field<'_>, columns: &[Column]) -> Result<String, DescriptionError> {
    let name = field.text()?;
    check_column(field, name, columns)?;
    Ok(name.to_owned())
}

fn check_column(field: &Field<'_>, name: &str, columns: &[Column]) -> Result<(), DescriptionError> {
    if columns.iter().any(|column| column.name == name) {
        return Ok(());
    }
    let names = || columns.iter().map(|column| column.name.as_str());
    let hint = match meant(name, names()) {
        hint if hint.is_empty() => {
            format!("; there are {}", names().collect::<Vec<_>>().join(", "))
        }
        hint => hint,
    };
    Err(field.error(format!("{name:?} is no column of the results{hint}")))
}

fn filters(fields: &Fields<'_>, columns: &[Column]) -> Result<Vec<Filter>, DescriptionError> {
    let Some(given) = fields.get("filter") else { return Ok(Vec::new()) };
    given.texts()?.iter().map(|field| filter(field, columns)).collect()
}

fn filter(field: &Field<'_>, columns: &[Column]) -> Result<Filter, DescriptionError> {
    let filter: Filter = field.text()?.parse().map_err(|error| field.error(format!("{error}")))?;
    check_column(field, &filter.column, columns)?;
    Ok(filter)
}

/// The summary over ranks, if it is asked for.
pub(super) fn fleet(
    top: &Fields<'_>,
    columns: &[Column],
) -> Result<Option<FleetSpec>, DescriptionError> {
    let Some(field) = top.get("fleet") else { return Ok(None) };
    let fields = field.table(&FLEET_KEYS)?;
    let mut fleet = FleetSpec { filters: filters(&fields, columns)?, ..FleetSpec::default() };
    let words: Vec<Column> =
        columns.iter().filter(|column| column.kind == ColumnKind::Word).cloned().collect();
    if let Some(over) = fields.get("over") {
        fleet.over = column(&over, &words)?;
    }
    if let Some(baseline) = fields.get("baseline") {
        fleet.baseline = filter(&baseline, &words)?;
    }
    Ok(Some(fleet))
}

pub(super) fn tables(
    top: &Fields<'_>,
    columns: &[Column],
) -> Result<Vec<TableSpec>, DescriptionError> {
    let mut tables = Vec::new();
    for field in top.tables("table")? {
        let fields = field.table(&TABLE_KEYS)?;
        let layout = match fields.get("show") {
            Some(show) => {
                if let Some(other) = ["rows", "columns", "value"].iter().find_map(|k| fields.get(k))
                {
                    let message = "a table has either show or rows, columns and value".to_owned();
                    return Err(other.error(message));
                }
                let names = show.list()?;
                TableLayout::List(
                    names.iter().map(|name| column(name, columns)).collect::<Result<_, _>>()?,
                )
            }
            None => pivot(&fields, columns)?,
        };
        tables.push(TableSpec {
            title: fields.text("title")?.unwrap_or_default(),
            filters: filters(&fields, columns)?,
            layout,
        });
    }
    Ok(tables)
}

fn pivot(fields: &Fields<'_>, columns: &[Column]) -> Result<TableLayout, DescriptionError> {
    let example =
        "rows = \"trace\", columns = \"label\", value = \"COLUMN\", or show = [\"COLUMN\"]";
    let of = |key| fields.required(key, example);
    Ok(TableLayout::Pivot {
        rows: column(&of("rows")?, columns)?,
        columns: column(&of("columns")?, columns)?,
        value: shown(fields, &of("value")?, columns)?,
    })
}
