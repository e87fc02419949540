//! Lines and points over numbers.

use super::canvas::{
    At, FAINT, INK, LETTERS, Letters, MM, SERIES, Side, TitleSide, sheet, text_width, widest,
};
use super::legend::{Legend, Sign, oom_entry};
use super::scale::{Scale, ScaleKind};
use super::{FigureError, Grouped, grouped};
use crate::experiment::{FigureKind, FigureSpec, Rows, Unit};
use crate::report::select::{Point, SelectError, described, scaled};

const MARGIN: i32 = 15;
/// Height of a drawing where none is asked for.
const DRAWING: i32 = 420;

/// One line or cloud of points, in the order of its numbers.
struct Series {
    name: String,
    points: Vec<(f64, Point)>,
}

pub(super) fn draw(spec: &FigureSpec, rows: &Rows) -> Result<String, FigureError> {
    let series = series(spec, rows)?;
    let Some(shown) = &spec.value else {
        return Err(SelectError::Nothing(spec.name.clone()).into());
    };
    let all = || series.iter().flat_map(|series| &series.points);
    let ys = all().filter_map(|(_, point)| point.number());
    let x_kind = if spec.x_log { log_kind(spec.x_unit) } else { ScaleKind::Fitted };
    let y_kind = if spec.y_log { log_kind(shown.unit) } else { ScaleKind::FromZero };
    let y_scale = Scale::new(ys, y_kind, 6);
    let width = spec.width.millimetres() as i32 * MM;
    let labels = widest(y_scale.ticks.iter().map(|(_, label)| label.as_str()), LETTERS);
    let relative = shown.relative_to.as_ref();
    let y_title =
        spec.y_title.clone().unwrap_or_else(|| described(&shown.column, shown.unit, relative));
    let length = spec.height_mm.map_or(DRAWING, |height| height as i32 * MM / 2);
    let side = TitleSide::of(&y_title, length);
    let (left, right) = (MARGIN + side.width() + labels + 14, width - MARGIN - 25);
    let x_scale = Scale::new(all().map(|(x, _)| *x), x_kind, ticks_across(right - left));
    let has_oom = all().any(|(_, point)| *point == Point::Oom);
    let legend = legend(spec, &series, has_oom, width - 2 * MARGIN);
    let top = MARGIN + legend.height() + 10 + side.height();
    let below = 14 + LETTERS + 12 + LETTERS + MARGIN;
    let drawing = spec.height_mm.map_or(DRAWING, |mm| (mm as i32 * MM - top - below).max(100));
    let bottom = top + drawing;
    let place =
        |share: f64, from: i32, to: i32| from + (share * f64::from(to - from)).round() as i32;
    let x = |number: f64| place(x_scale.place(number), left, right);
    let y = |number: f64| place(y_scale.place(number), bottom, top);
    let x_title = spec.x_title.clone().unwrap_or_else(|| described(&spec.x, spec.x_unit, None));
    sheet((width, bottom + below), |canvas| {
        legend.draw(canvas, (MARGIN, MARGIN))?;
        for (number, label) in &y_scale.ticks {
            canvas.line(vec![(left, y(*number)), (right, y(*number))], FAINT, 1)?;
            canvas.text(label, (left - 12, y(*number)), Letters::new(Side::Right))?;
        }
        for (number, label) in &x_scale.ticks {
            canvas.line(vec![(x(*number), bottom), (x(*number), bottom + 8)], INK, 2)?;
            let at = (x(*number), bottom + 14 + LETTERS / 2);
            canvas.text(label, at, Letters::new(Side::Middle))?;
        }
        canvas.line(vec![(left, top), (left, bottom), (right, bottom)], INK, 2)?;
        side.draw(canvas, &y_title, (top, bottom), MARGIN)?;
        let middle = ((left + right) / 2, canvas.height - MARGIN - LETTERS / 2);
        canvas.text(&x_title, middle, Letters::new(Side::Middle))?;
        for (at, series) in series.iter().enumerate() {
            let drawn = series.points.iter();
            let drawn = drawn.filter_map(|(at, point)| Some((x(*at), y(point.number()?))));
            let drawn: Vec<At> = drawn.collect();
            if spec.kind == FigureKind::Lines {
                canvas.line(drawn.clone(), SERIES[at], 4)?;
            }
            for point in drawn {
                canvas.marker(at, point)?;
            }
            for (number, _) in series.points.iter().filter(|(_, point)| *point == Point::Oom) {
                canvas.cross((x(*number), top + 4), 9)?;
            }
        }
        Ok(())
    })
}

fn series(spec: &FigureSpec, rows: &Rows) -> Result<Vec<Series>, FigureError> {
    let Grouped { points, groups, .. } = grouped(spec, rows, "lines")?;
    let mut all: Vec<Series> =
        groups.into_iter().map(|name| Series { name, points: Vec::new() }).collect();
    for (place, point) in points.iter() {
        let number: Option<f64> = place[0].parse().ok().filter(|number: &f64| number.is_finite());
        let number = number.ok_or_else(|| SelectError::NoNumber {
            column: spec.x.clone(),
            value: place[0].clone(),
        })?;
        let name = place.get(1).map_or("", String::as_str);
        if let Some(series) = all.iter_mut().find(|series| series.name == name) {
            series.points.push((scaled(number, spec.x_unit), point));
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Ok(all)
}

/// Sizes double, other things grow tenfold.
fn log_kind(unit: Unit) -> ScaleKind {
    match unit {
        Unit::KiB | Unit::MiB | Unit::GiB => ScaleKind::Doublings,
        _ => ScaleKind::Decades,
    }
}

/// Ticks that fit without touching: numbers of up to six digits.
fn ticks_across(width: i32) -> usize {
    (width / (text_width("000000", LETTERS) + 20)).clamp(2, 10) as usize
}

fn legend(spec: &FigureSpec, series: &[Series], has_oom: bool, width: i32) -> Legend {
    let mut entries = Vec::new();
    if spec.group.is_some() {
        let sign = if spec.kind == FigureKind::Lines { Sign::Line } else { Sign::Marker };
        let named = series.iter().enumerate();
        entries.extend(named.map(|(at, series)| (sign(at), series.name.clone())));
    }
    if has_oom {
        entries.push(oom_entry());
    }
    Legend::new(entries, width)
}
