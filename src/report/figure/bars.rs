//! Bars: a category each, or a category and group. They stand, or lie where names are long.

use super::canvas::{
    At, Canvas, FAINT, INK, LETTERS, Letters, MM, SERIES, SMALL, Side, TitleSide, sheet, short,
    text_width, widest,
};
use super::legend::{Legend, Sign, oom_entry};
use super::scale::{Scale, ScaleKind};
use super::{FigureError, Grouped, grouped};
use crate::experiment::{FigureSpec, Rows, Unit};
use crate::report::select::{self, Point, Points, described};

/// Room around everything.
const MARGIN: i32 = 15;
/// Length of a tick, and the room between it and its letters.
const TICK: i32 = 8;
/// Height of a bar that lies, and the room between categories.
const LYING_BAR: i32 = 24;
const LYING_GAP: i32 = 20;
/// Height of a drawing where none is asked for.
const DRAWING: i32 = 380;
/// Share of the room of a category that bars fill.
const FILLED: f64 = 0.8;

/// What is drawn.
struct Bars<'a> {
    spec: &'a FigureSpec,
    categories: Vec<String>,
    groups: Vec<String>,
    points: Points,
    scale: Scale,
    value_title: String,
    name_title: String,
}

impl Bars<'_> {
    fn point(&self, category: &str, group: &str) -> Point {
        match self.spec.group {
            Some(_) => self.points.at(&[category, group]),
            None => self.points.at(&[category]),
        }
    }

    fn legend(&self, width: i32) -> Legend {
        let mut entries = Vec::new();
        if self.spec.group.is_some() {
            let groups = self.groups.iter().enumerate();
            entries.extend(groups.map(|(at, group)| (Sign::Bar(at), group.clone())));
        }
        if self.points.has_oom() {
            entries.push(oom_entry());
        }
        Legend::new(entries, width)
    }

    fn tick_labels(&self) -> impl Iterator<Item = &str> {
        self.scale.ticks.iter().map(|(_, label)| label.as_str())
    }
}

pub(super) fn draw(spec: &FigureSpec, rows: &Rows) -> Result<String, FigureError> {
    let Grouped { shown, passing, points, groups } = grouped(spec, rows, "groups")?;
    let kind = if spec.y_log { ScaleKind::Decades } else { ScaleKind::FromZero };
    let numbers: Vec<f64> = points.numbers().collect();
    let given = |title: &Option<String>, other: String| title.clone().unwrap_or(other);
    let bars = Bars {
        spec,
        categories: select::names(rows, &passing, &spec.x),
        groups,
        scale: Scale::new(numbers.into_iter(), kind, if spec.horizontal { 6 } else { 5 }),
        points,
        value_title: given(
            &spec.y_title,
            described(&shown.column, shown.unit, shown.relative_to.as_ref()),
        ),
        name_title: given(&spec.x_title, select::described(&spec.x, spec.x_unit, None)),
    };
    if spec.horizontal { lying(&bars) } else { standing(&bars) }
}

/// Where one stands: a line across at the number itself is what relative figures are read against.
fn reference(bars: &Bars<'_>) -> Option<f64> {
    let shown = bars.spec.value.as_ref()?;
    (shown.unit == Unit::Times && shown.relative_to.is_some()).then_some(1.0)
}

fn standing(bars: &Bars<'_>) -> Result<String, FigureError> {
    let width = bars.spec.width.millimetres() as i32 * MM;
    // Of a height that is asked for about half is drawing.
    let length = bars.spec.height_mm.map_or(DRAWING, |height| height as i32 * MM / 2);
    let side = TitleSide::of(&bars.value_title, length);
    let left = MARGIN + side.width() + widest(bars.tick_labels(), LETTERS) + TICK + 6;
    let right = width - MARGIN;
    let slot = f64::from(right - left) / bars.categories.len().max(1) as f64;
    let names = widest(bars.categories.iter().map(String::as_str), LETTERS);
    let are_upright = f64::from(names) > slot - 10.0;
    let below = if are_upright { names } else { LETTERS } + 16;
    let legend = bars.legend(width - 2 * MARGIN);
    let top = MARGIN + legend.height() + 8 + side.height();
    let has_title = !bars.name_title.is_empty();
    let title = if has_title { LETTERS + 12 } else { 0 };
    let drawing = bars
        .spec
        .height_mm
        .map_or(DRAWING, |height| (height as i32 * MM - top - below - title - MARGIN).max(100));
    let bottom = top + drawing;
    let height = bottom + below + title + MARGIN;
    let y = |number: f64| bottom - (bars.scale.place(number) * f64::from(drawing)).round() as i32;
    sheet((width, height), |canvas| {
        legend.draw(canvas, (MARGIN, MARGIN))?;
        for (number, label) in &bars.scale.ticks {
            canvas.line(vec![(left, y(*number)), (right, y(*number))], FAINT, 1)?;
            canvas.text(label, (left - TICK, y(*number)), Letters::new(Side::Right))?;
        }
        side.draw(canvas, &bars.value_title, (top, bottom), MARGIN)?;
        let bar = slot * FILLED / bars.groups.len() as f64;
        for (at, category) in bars.categories.iter().enumerate() {
            let begin = f64::from(left) + at as f64 * slot;
            for (series, group) in bars.groups.iter().enumerate() {
                let from = begin + slot * (1.0 - FILLED) / 2.0 + series as f64 * bar;
                let (from, to) = (from.round() as i32, (from + bar).round() as i32);
                let color = SERIES[series];
                match bars.point(category, group) {
                    Point::Number(number) => {
                        let (base, end) = (y(bars.scale.base()), y(number));
                        canvas.fill((from, end.min(base)), (to - 1, end.max(base)), color)?;
                    }
                    other => absent(canvas, other, ((from + to) / 2, bottom - 16), to - from)?,
                }
            }
            let center = (begin + slot / 2.0).round() as i32;
            if are_upright {
                let letters = Letters::new(Side::Right).upright();
                canvas.text(category, (center, bottom + 10), letters)?;
            } else {
                let letters = Letters::new(Side::Middle);
                canvas.text(category, (center, bottom + 12 + LETTERS / 2), letters)?;
            }
        }
        if let Some(one) = reference(bars) {
            canvas.line(vec![(left, y(one)), (right, y(one))], INK, 1)?;
        }
        let base = y(bars.scale.base());
        canvas.line(vec![(left, base), (right, base)], INK, 2)?;
        let at = ((left + right) / 2, height - MARGIN - LETTERS / 2);
        canvas.text(&bars.name_title, at, Letters::new(Side::Middle))
    })
}

/// A place without a number.
fn absent(canvas: &Canvas<'_>, point: Point, at: At, room: i32) -> Result<(), FigureError> {
    match point {
        Point::Oom => canvas.cross(at, (room / 2 - 2).clamp(4, 9)),
        _ => canvas.text("–", at, Letters::new(Side::Middle).small()),
    }
}

fn lying(bars: &Bars<'_>) -> Result<String, FigureError> {
    let width = bars.spec.width.millimetres() as i32 * MM;
    let names = widest(bars.categories.iter().map(String::as_str), LETTERS);
    let left = MARGIN + names + 14;
    // Behind the longest bar stands its number.
    let right = width - MARGIN - text_width("00.0", SMALL) - 8;
    if right - left < 200 {
        return Err(FigureError::TooMuch(format!(
            "figure {}: its names leave no room for bars: choose size = \"page\" or shorter labels",
            bars.spec.name
        )));
    }
    let legend = bars.legend(width - 2 * MARGIN);
    let top = MARGIN + legend.height() + 6;
    let slot = bars.groups.len() as i32 * LYING_BAR + LYING_GAP;
    let bottom = top + bars.categories.len() as i32 * slot;
    let height = bottom + 14 + LETTERS + 12 + LETTERS + MARGIN;
    let span = f64::from(right - left);
    let x = |number: f64| left + (bars.scale.place(number) * span).round() as i32;
    sheet((width, height), |canvas| {
        legend.draw(canvas, (MARGIN, MARGIN))?;
        for (number, label) in &bars.scale.ticks {
            canvas.line(vec![(x(*number), top), (x(*number), bottom)], FAINT, 1)?;
            let at = (x(*number), bottom + 12 + LETTERS / 2);
            canvas.text(label, at, Letters::new(Side::Middle))?;
        }
        for (at, category) in bars.categories.iter().enumerate() {
            let begin = top + at as i32 * slot;
            let middle = (left - 12, begin + slot / 2);
            canvas.text(category, middle, Letters::new(Side::Right))?;
            for (series, group) in bars.groups.iter().enumerate() {
                let y = begin + LYING_GAP / 2 + series as i32 * LYING_BAR;
                lying_bar(canvas, bars, bars.point(category, group), series, (y, &x))?;
            }
        }
        if let Some(one) = reference(bars) {
            canvas.line(vec![(x(one), top), (x(one), bottom)], INK, 1)?;
        }
        let base = x(bars.scale.base());
        canvas.line(vec![(base, top), (base, bottom)], INK, 2)?;
        let at = ((left + right) / 2, height - MARGIN - LETTERS / 2);
        canvas.text(&bars.value_title, at, Letters::new(Side::Middle))
    })
}

/// A bar from its base at this height, with its number behind it.
fn lying_bar(
    canvas: &Canvas<'_>,
    bars: &Bars<'_>,
    point: Point,
    series: usize,
    (y, x): (i32, &dyn Fn(f64) -> i32),
) -> Result<(), FigureError> {
    let base = x(bars.scale.base());
    let Point::Number(number) = point else {
        return absent(canvas, point, (base + 18, y + LYING_BAR / 2), LYING_BAR);
    };
    let end = x(number);
    let color = SERIES[series];
    canvas.fill((base.min(end), y + 1), (base.max(end), y + LYING_BAR - 2), color)?;
    let text = short(number);
    let behind = end.max(base) + 6;
    let fits = behind + text_width(&text, SMALL) < canvas.width - 4;
    let (side, from) = if fits { (Side::Left, behind) } else { (Side::Right, canvas.width - 4) };
    canvas.text(&text, (from, y + LYING_BAR / 2), Letters::new(side).small())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{FigureKind, Width};
    use crate::report::select::tests::{reserved, table};

    fn spec(horizontal: bool) -> FigureSpec {
        FigureSpec {
            name: "reserved".to_owned(),
            title: String::new(),
            kind: FigureKind::Bars,
            x: "trace".to_owned(),
            x_unit: Unit::Plain,
            y: None,
            value: Some(reserved()),
            group: Some("label".to_owned()),
            filters: Vec::new(),
            x_log: false,
            y_log: false,
            x_title: None,
            y_title: None,
            width: Width::Column,
            height_mm: None,
            horizontal,
        }
    }

    /// Heights of the filled rectangles of a colour.
    fn extents(svg: &str, color: &str, extent: &str) -> Vec<i32> {
        let of = |line: &str, key: &str| {
            let rest = line.split_once(&format!(" {key}=\""))?.1;
            rest.split_once('"')?.0.parse::<i32>().ok()
        };
        let rects = svg.lines().filter(|line| line.starts_with("<rect") && line.contains(color));
        rects.filter_map(|line| of(line, extent)).collect()
    }

    #[test]
    fn bars_are_as_long_as_their_numbers() {
        // The axis ends at 20 GiB; a drawing is 380 high. The first is the sign of the legend.
        let svg = draw(&spec(false), &table()).expect("drawn");
        assert_eq!(extents(&svg, "#0072B2", "height"), [18, 190, 380]);
        // 5 GiB of `stitch`; its other cell ran out of memory and has a cross instead.
        assert_eq!(extents(&svg, "#E69F00", "height"), [18, 95]);
        assert!(svg.contains("out of memory") && svg.contains("reserved peak, GiB"), "{svg}");
        let lying = draw(&spec(true), &table()).expect("drawn");
        let widths = extents(&lying, "#0072B2", "width");
        assert_eq!(widths.len(), 3);
        assert!((widths[2] - 2 * widths[1]).abs() <= 1, "{widths:?}");
    }

    #[test]
    fn more_groups_than_colours_are_refused() {
        let mut rows = table();
        let row = rows.rows[0].clone();
        for at in 0..9 {
            let mut row = row.clone();
            row[1] = crate::experiment::Value::Word(format!("allocator {at}"));
            rows.rows.push(row);
        }
        let error = draw(&spec(false), &rows).expect_err("refused").to_string();
        assert!(error.contains("11 groups"), "{error}");
    }

    #[test]
    fn no_rows_are_no_figure() {
        let none =
            FigureSpec { filters: vec!["trace=three".parse().expect("a filter")], ..spec(false) };
        let error = draw(&none, &table()).expect_err("refused").to_string();
        assert!(error.contains("no row"), "{error}");
    }
}
