//! Fields of names by names: a heat map, and the frontier of what runs.

use plotters::style::RGBColor;

use super::FigureError;
use super::canvas::{
    At, Canvas, INK, LETTERS, Letters, MM, SERIES, SMALL, Side, sheet, short, text_width, widest,
};
use super::legend::{Legend, Sign, oom_entry};
use crate::experiment::{FigureSpec, Rows, Shown, Unit, Value};
use crate::report::select::{self, Point, Points, SelectError, described};

const MARGIN: i32 = 15;
/// Height of a field.
const ROW: i32 = 42;
/// Length of the bar that tells what colours mean, and steps in it.
const BAR: i32 = 420;
const BAR_STEPS: i32 = 42;

/// Less than what it is measured against.
const LESS: RGBColor = RGBColor(0, 114, 178);
/// More than it.
const MORE: RGBColor = RGBColor(213, 94, 0);

/// Names on both axes and how the sheet is divided among them.
struct Board {
    columns: Vec<String>,
    rows: Vec<String>,
    left: i32,
    top: i32,
    field: f64,
    are_upright: bool,
    width: i32,
}

impl Board {
    /// `above` is what stands over the names of the columns.
    fn new(spec: &FigureSpec, columns: Vec<String>, rows: Vec<String>, above: i32) -> Board {
        let width = spec.width.millimetres() as i32 * MM;
        let left = MARGIN + widest(rows.iter().map(String::as_str), LETTERS) + 12;
        let field = f64::from(width - MARGIN - left) / columns.len().max(1) as f64;
        let names = widest(columns.iter().map(String::as_str), LETTERS);
        let are_upright = f64::from(names) > field - 8.0;
        let top = MARGIN + above + if are_upright { names } else { LETTERS } + 14;
        Board { columns, rows, left, top, field, are_upright, width }
    }

    fn check(&self, spec: &FigureSpec) -> Result<(), FigureError> {
        if self.field >= 20.0 {
            return Ok(());
        }
        Err(FigureError::TooMuch(format!(
            "figure {}: {} columns do not fit beside its names: choose size = \"page\", add a \
             filter, or exchange x and y",
            spec.name,
            self.columns.len()
        )))
    }

    fn bottom(&self) -> i32 {
        self.top + self.rows.len() as i32 * ROW
    }

    /// Corners of a field.
    fn corners(&self, column: usize, row: usize) -> (At, At) {
        let x = |column: usize| (f64::from(self.left) + column as f64 * self.field).round() as i32;
        let y = |row: usize| self.top + row as i32 * ROW;
        ((x(column), y(row)), (x(column + 1), y(row + 1)))
    }

    fn draw_names(&self, canvas: &Canvas<'_>) -> Result<(), FigureError> {
        for (row, name) in self.rows.iter().enumerate() {
            let at = (self.left - 10, self.top + row as i32 * ROW + ROW / 2);
            canvas.text(name, at, Letters::new(Side::Right))?;
        }
        for (column, name) in self.columns.iter().enumerate() {
            let (from, to) = self.corners(column, 0);
            let x = (from.0 + to.0) / 2;
            if self.are_upright {
                canvas.text(name, (x, self.top - 10), Letters::new(Side::Left).upright())?;
            } else {
                let at = (x, self.top - 8 - LETTERS / 2);
                canvas.text(name, at, Letters::new(Side::Middle))?;
            }
        }
        Ok(())
    }
}

fn axis(spec: &FigureSpec) -> Result<&str, FigureError> {
    spec.y.as_deref().ok_or_else(|| SelectError::Nothing(spec.name.clone()).into())
}

/// How colours follow numbers.
enum Colors {
    /// From pale at the least to dark at the most.
    Rising(f64, f64),
    /// The same by ratios.
    Tenfold(f64, f64),
    /// Pale at 1, so far to both sides.
    AroundOne(f64),
}

impl Colors {
    fn new(points: &Points, shown: &Shown, is_log: bool) -> Colors {
        let numbers: Vec<f64> = points.numbers().collect();
        if shown.unit == Unit::Times && shown.relative_to.is_some() {
            let away = numbers.iter().map(|number| (number - 1.0).abs()).fold(0.0, f64::max);
            return Colors::AroundOne(away.clamp(0.05, 0.5));
        }
        let positive = numbers.iter().copied().filter(|number| *number > 0.0);
        if let (true, Some(least)) = (is_log, positive.clone().reduce(f64::min)) {
            let most = positive.fold(least, f64::max);
            return Colors::Tenfold(least, if most > least { most } else { least * 10.0 });
        }
        let least = numbers.iter().copied().reduce(f64::min).unwrap_or(0.0).min(0.0);
        let most = numbers.iter().copied().reduce(f64::max).unwrap_or(1.0);
        Colors::Rising(least, if most > least { most } else { least + 1.0 })
    }

    fn ends(&self) -> [f64; 3] {
        match *self {
            Colors::Rising(least, most) => [least, (least + most) / 2.0, most],
            Colors::Tenfold(least, most) => [least, (least * most).sqrt(), most],
            Colors::AroundOne(away) => [1.0 - away, 1.0, 1.0 + away],
        }
    }

    /// The number so far along the bar that tells what colours mean.
    fn along(&self, share: f64) -> f64 {
        let [least, _, most] = self.ends();
        match self {
            Colors::Tenfold(..) => least * (most / least).powf(share),
            _ => least + share * (most - least),
        }
    }

    fn of(&self, number: f64) -> RGBColor {
        match *self {
            Colors::Rising(least, most) => mixed(LESS, (number - least) / (most - least)),
            Colors::Tenfold(least, most) => {
                mixed(LESS, (number.max(least) / least).ln() / (most / least).ln())
            }
            Colors::AroundOne(away) => {
                let share = (number - 1.0) / away;
                mixed(if share < 0.0 { LESS } else { MORE }, share.abs())
            }
        }
    }
}

/// Nearly white at 0, so that fields show on paper, the colour at 1.
fn mixed(color: RGBColor, share: f64) -> RGBColor {
    const PAPER: f64 = 246.0;
    let share = share.clamp(0.0, 1.0) * 0.85;
    let part = |part: u8| (PAPER - (PAPER - f64::from(part)) * share).round() as u8;
    RGBColor(part(color.0), part(color.1), part(color.2))
}

/// Black or white, whichever is easier to read on a colour (by its luminance).
fn readable_on(color: RGBColor) -> RGBColor {
    let luminance =
        0.299 * f64::from(color.0) + 0.587 * f64::from(color.1) + 0.114 * f64::from(color.2);
    if luminance < 130.0 { RGBColor(255, 255, 255) } else { INK }
}

pub(super) fn heatmap(spec: &FigureSpec, rows: &Rows) -> Result<String, FigureError> {
    let Some(shown) = &spec.value else {
        return Err(SelectError::Nothing(spec.name.clone()).into());
    };
    let y = axis(spec)?;
    let passing = select::passing(rows, &spec.filters);
    if passing.is_empty() {
        return Err(SelectError::Nothing(spec.name.clone()).into());
    }
    let points = Points::new(rows, &passing, &[&spec.x, y], shown)?;
    let names = |column: &str| select::names(rows, &passing, column);
    let board = Board::new(spec, names(&spec.x), names(y), 0);
    board.check(spec)?;
    let colors = Colors::new(&points, shown, spec.y_log);
    let height = board.bottom() + 16 + LETTERS + 10 + 24 + LETTERS + 14 + MARGIN;
    sheet((board.width, height), |canvas| {
        board.draw_names(canvas)?;
        for (row, row_name) in board.rows.iter().enumerate() {
            for (column, column_name) in board.columns.iter().enumerate() {
                let (from, to) = board.corners(column, row);
                field(canvas, (from, to), points.at(&[column_name, row_name]), &colors)?;
            }
        }
        color_bar(canvas, &board, &colors, shown, spec, points.has_oom())
    })
}

fn field(
    canvas: &Canvas<'_>,
    (from, to): (At, At),
    point: Point,
    colors: &Colors,
) -> Result<(), FigureError> {
    let middle = ((from.0 + to.0) / 2, (from.1 + to.1) / 2);
    let inner = (to.0 - 2, to.1 - 2);
    match point {
        Point::Number(number) => {
            let color = colors.of(number);
            canvas.fill(from, inner, color)?;
            let text = short(number);
            if text_width(&text, SMALL) > to.0 - from.0 - 4 {
                return Ok(());
            }
            let letters = Letters { color: readable_on(color), ..Letters::new(Side::Middle) };
            canvas.text(&text, middle, letters.small())
        }
        Point::Oom => {
            canvas.fill(from, inner, RGBColor(240, 240, 240))?;
            canvas.cross(middle, 9)
        }
        Point::Missing => {
            canvas.fill(from, inner, RGBColor(248, 248, 248))?;
            canvas.text("–", middle, Letters::new(Side::Middle).small())
        }
    }
}

/// What colours mean, below the fields.
fn color_bar(
    canvas: &Canvas<'_>,
    board: &Board,
    colors: &Colors,
    shown: &Shown,
    spec: &FigureSpec,
    has_oom: bool,
) -> Result<(), FigureError> {
    let title = spec.y_title.clone();
    let title =
        title.unwrap_or_else(|| described(&shown.column, shown.unit, shown.relative_to.as_ref()));
    // Beside the names if there is room, else as far to the left as it needs.
    let room = board.width - MARGIN - text_width(&title, LETTERS).max(BAR);
    let left = board.left.min(room).max(MARGIN);
    let middle = board.bottom() + 16 + LETTERS / 2;
    canvas.text(&title, (left, middle), Letters::new(Side::Left))?;
    let top = middle + LETTERS / 2 + 10;
    let ends = colors.ends();
    let step = BAR / BAR_STEPS;
    for at in 0..BAR_STEPS {
        let share = (f64::from(at) + 0.5) / f64::from(BAR_STEPS);
        let number = colors.along(share);
        let x = left + at * step;
        // Each field reaches under the next, so that no line shows between them.
        let end = (x + 2 * step).min(left + BAR);
        canvas.fill((x, top), (end, top + 22), colors.of(number))?;
    }
    for (at, number) in ends.iter().enumerate() {
        let x = left + at as i32 * BAR / 2;
        let at = (x, top + 24 + 8 + LETTERS / 2);
        let side = if x == left { Side::Left } else { Side::Middle };
        canvas.text(&short(*number), at, Letters::new(side))?;
    }
    if has_oom {
        let at = (left + BAR + 40, top - 8);
        Legend::new(vec![oom_entry()], board.width).draw(canvas, at)?;
    }
    Ok(())
}

pub(super) fn frontier(spec: &FigureSpec, rows: &Rows) -> Result<String, FigureError> {
    let y = axis(spec)?;
    let passing = select::passing(rows, &spec.filters);
    if passing.is_empty() {
        return Err(SelectError::Nothing(spec.name.clone()).into());
    }
    let names = |column: &str| select::names(rows, &passing, column);
    let width = spec.width.millimetres() as i32 * MM;
    let entries = vec![(Sign::Ran, "ran".to_owned()), oom_entry()];
    let legend = Legend::new(entries, width - 2 * MARGIN);
    let board = Board::new(spec, names(&spec.x), names(y), legend.height() + LETTERS + 10);
    board.check(spec)?;
    let title = spec.x_title.clone().unwrap_or_else(|| described(&spec.x, spec.x_unit, None));
    sheet((board.width, board.bottom() + MARGIN), |canvas| {
        legend.draw(canvas, (MARGIN, MARGIN))?;
        let middle =
            (board.left + (board.width - MARGIN - board.left) / 2, MARGIN + legend.height());
        canvas.text(&title, middle, Letters::new(Side::Middle))?;
        board.draw_names(canvas)?;
        for (row, row_name) in board.rows.iter().enumerate() {
            for (column, column_name) in board.columns.iter().enumerate() {
                let (from, to) = board.corners(column, row);
                let middle = ((from.0 + to.0) / 2, (from.1 + to.1) / 2);
                canvas.fill(from, (to.0 - 2, to.1 - 2), RGBColor(246, 246, 246))?;
                match ran(rows, &passing, [(&spec.x, column_name), (y, row_name)]) {
                    Some(true) => {
                        let corner = |sign: i32| (middle.0 + sign * 11, middle.1 + sign * 11);
                        canvas.fill(corner(-1), corner(1), SERIES[0])?;
                    }
                    Some(false) => canvas.cross(middle, 11)?,
                    None => canvas.text("–", middle, Letters::new(Side::Middle).small())?,
                }
            }
        }
        Ok(())
    })
}

/// Whether every row at a place ran; nothing where there is none.
fn ran(rows: &Rows, passing: &[&[Value]], place: [(&str, &String); 2]) -> Option<bool> {
    let stands_there = |row: &&&[Value]| {
        place.iter().all(|(column, name)| select::word(rows.get(row, column)) == **name)
    };
    let mut all = None;
    for row in passing.iter().filter(stands_there) {
        match rows.get(row, "status") {
            Value::Word(status) if status == "ok" => all = Some(all.unwrap_or(true)),
            Value::Word(status) if status == "oom" => all = Some(false),
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::select::tests::table;

    #[test]
    fn colours_are_pale_at_one_and_opposite_beside_it() {
        let colors = Colors::AroundOne(0.5);
        assert_eq!(colors.of(1.0), RGBColor(246, 246, 246));
        assert_eq!(colors.of(0.2), colors.of(0.5));
        let (less, more) = (colors.of(0.5), colors.of(1.5));
        assert!(less.2 > less.0 && more.0 > more.2, "{less:?} {more:?}");
    }

    #[test]
    fn colours_by_ratios_are_half_way_at_the_geometric_mean() {
        let colors = Colors::Tenfold(1.0, 10_000.0);
        assert_eq!(colors.ends(), [1.0, 100.0, 10_000.0]);
        assert_eq!(colors.of(100.0), Colors::Rising(0.0, 2.0).of(1.0));
        assert_eq!(colors.of(0.0), colors.of(1.0));
    }

    #[test]
    fn a_place_ran_if_all_its_rows_did() {
        let table = table();
        let rows = select::passing(&table, &[]);
        let at = |trace: &str, label: &str| {
            ran(&table, &rows, [("trace", &trace.to_owned()), ("label", &label.to_owned())])
        };
        assert_eq!(at("one", "stitch"), Some(true));
        assert_eq!(at("two", "stitch"), Some(false));
        assert_eq!(at("two", "native"), None);
    }
}
