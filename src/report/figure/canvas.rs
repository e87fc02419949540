//! A sheet of paper, in tenths of a millimetre, and what may be drawn on it.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::FigureError;
use crate::report::text::printable;

/// Tenths of a millimetre in a millimetre.
pub(super) const MM: i32 = 10;
/// Fonts that PDF readers and browsers have.
const FONT: &str = "Helvetica, Arial, sans-serif";
/// Size of letters: 7 pt, what journals ask for.
pub(super) const LETTERS: i32 = 25;
/// Size of small letters: 6 pt, for numbers in fields.
pub(super) const SMALL: i32 = 21;
/// The drawing library takes sizes of letters in units that are smaller by this.
const SIZE_FACTOR: f64 = 1.24;

/// Ink of axes and letters.
pub(super) const INK: RGBColor = RGBColor(34, 34, 34);
/// Lines across the drawing.
pub(super) const FAINT: RGBColor = RGBColor(221, 221, 221);
/// Where something ran out of memory.
pub(super) const ALARM: RGBColor = RGBColor(213, 94, 0);

/// Colours that people with any kind of colour vision tell apart (Okabe and Ito; the yellow is
/// darker than theirs, so that a line of it shows on white).
pub(super) const SERIES: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(90, 90, 90),
    RGBColor(190, 170, 20),
];

/// A point on the sheet.
pub(super) type At = (i32, i32);

/// Which side of a text stands at its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Middle,
    Right,
}

/// A text as it is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Letters {
    pub(super) side: Side,
    pub(super) size: i32,
    pub(super) color: RGBColor,
    /// Reads upwards.
    pub(super) is_upright: bool,
}

impl Letters {
    pub(super) fn new(side: Side) -> Letters {
        Letters { side, size: LETTERS, color: INK, is_upright: false }
    }

    pub(super) fn upright(self) -> Letters {
        Letters { is_upright: true, ..self }
    }

    pub(super) fn small(self) -> Letters {
        Letters { size: SMALL, ..self }
    }
}

/// The sheet.
pub(super) struct Canvas<'s> {
    area: DrawingArea<SVGBackend<'s>, Shift>,
    pub(super) width: i32,
    pub(super) height: i32,
}

/// Draws on a white sheet of this size and gives it as SVG that prints at this size.
pub(super) fn sheet(
    (width, height): At,
    draw: impl FnOnce(&Canvas<'_>) -> Result<(), FigureError>,
) -> Result<String, FigureError> {
    let mut svg = String::new();
    {
        let size = (width.unsigned_abs(), height.unsigned_abs());
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(FigureError::new)?;
        let canvas = Canvas { area, width, height };
        draw(&canvas)?;
        canvas.area.present().map_err(FigureError::new)?;
    }
    let mm = |tenths: i32| f64::from(tenths) / f64::from(MM);
    let pixels = format!("width=\"{width}\" height=\"{height}\" viewBox");
    let printed = format!("width=\"{}mm\" height=\"{}mm\" viewBox", mm(width), mm(height));
    Ok(svg.replacen(&pixels, &printed, 1))
}

impl Canvas<'_> {
    pub(super) fn text(&self, text: &str, at: At, letters: Letters) -> Result<(), FigureError> {
        let side = match letters.side {
            Side::Left => HPos::Left,
            Side::Middle => HPos::Center,
            Side::Right => HPos::Right,
        };
        let mut font = (FONT, f64::from(letters.size) * SIZE_FACTOR).into_font();
        if letters.is_upright {
            font = font.transform(FontTransform::Rotate270);
        }
        // The library centres small letters; numbers and capitals are higher by a fifth.
        let down = letters.size / 10;
        let at = if letters.is_upright { (at.0 + down, at.1) } else { (at.0, at.1 + down) };
        let style = TextStyle::from(font).color(&letters.color).pos(Pos::new(side, VPos::Center));
        self.area.draw_text(&printable(text), &style, at).map_err(FigureError::new)
    }

    pub(super) fn line(
        &self,
        points: Vec<At>,
        color: RGBColor,
        width: u32,
    ) -> Result<(), FigureError> {
        let path = PathElement::new(points, color.stroke_width(width));
        self.area.draw(&path).map_err(FigureError::new)
    }

    pub(super) fn fill(&self, from: At, to: At, color: RGBColor) -> Result<(), FigureError> {
        self.area.draw(&Rectangle::new([from, to], color.filled())).map_err(FigureError::new)
    }

    /// A cross: out of memory.
    pub(super) fn cross(&self, (x, y): At, half: i32) -> Result<(), FigureError> {
        self.line(vec![(x - half, y - half), (x + half, y + half)], ALARM, 4)?;
        self.line(vec![(x - half, y + half), (x + half, y - half)], ALARM, 4)
    }

    /// A marker whose shape tells series apart where colours do not.
    pub(super) fn marker(&self, series: usize, (x, y): At) -> Result<(), FigureError> {
        const R: i32 = 8;
        let color = SERIES[series % SERIES.len()];
        let corners: &[At] = match series % 6 {
            0 => {
                let circle = Circle::new((x, y), R, color.filled());
                return self.area.draw(&circle).map_err(FigureError::new);
            }
            1 => &[(-R, -R), (R, -R), (R, R), (-R, R)],
            2 => &[(0, -R - 2), (R + 1, R), (-R - 1, R)],
            3 => &[(0, -R - 3), (R + 3, 0), (0, R + 3), (-R - 3, 0)],
            4 => &[(0, R + 2), (R + 1, -R), (-R - 1, -R)],
            _ => &[(-R, -4), (R, -4), (R, 4), (-R, 4)],
        };
        let corners: Vec<At> = corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
        self.area.draw(&Polygon::new(corners, color.filled())).map_err(FigureError::new)
    }
}

/// A number in three digits or so: as many as fit into a figure.
pub(super) fn short(number: f64) -> String {
    match number.abs() {
        0.0 => "0".to_owned(),
        size if size >= 99.95 => format!("{number:.0}"),
        size if size >= 9.995 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// Where the title of a vertical axis stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TitleSide {
    /// Beside the axis, upwards.
    Beside,
    /// Above it, where it is longer than the axis.
    Above,
}

impl TitleSide {
    /// The side for a title beside an axis of this length.
    pub(super) fn of(title: &str, length: i32) -> TitleSide {
        if text_width(title, LETTERS) > length { TitleSide::Above } else { TitleSide::Beside }
    }

    /// Room to the left of the axis' numbers.
    pub(super) fn width(self) -> i32 {
        if self == TitleSide::Beside { LETTERS + 12 } else { 0 }
    }

    /// Room above the drawing.
    pub(super) fn height(self) -> i32 {
        if self == TitleSide::Above { LETTERS + 24 } else { 0 }
    }

    /// Draws the title of an axis from `top` to `bottom`, `margin` from the edge.
    pub(super) fn draw(
        self,
        canvas: &Canvas<'_>,
        title: &str,
        (top, bottom): (i32, i32),
        margin: i32,
    ) -> Result<(), FigureError> {
        let half = LETTERS / 2;
        match self {
            TitleSide::Beside => {
                let letters = Letters::new(Side::Middle).upright();
                canvas.text(title, (margin + half, (top + bottom) / 2), letters)
            }
            TitleSide::Above => {
                canvas.text(title, (margin, top - 24 - half), Letters::new(Side::Left))
            }
        }
    }
}

/// Widths of the letters from space to tilde in thousandths of their size (Helvetica, as its font
/// metrics tell).
const WIDTHS: [u16; 95] = [
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556,
    556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667,
    611, 778, 722, 278, 500, 667, 556, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667,
    667, 611, 278, 278, 278, 469, 556, 333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500,
    222, 833, 556, 556, 556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
];

/// Width of a text in tenths of a millimetre.
pub(super) fn text_width(text: &str, size: i32) -> i32 {
    let width = |letter: char| {
        let place = (letter as usize).checked_sub(32).and_then(|place| WIDTHS.get(place));
        u32::from(place.copied().unwrap_or(600))
    };
    let thousandths: u32 = text.chars().map(width).sum();
    (f64::from(thousandths) * f64::from(size) / 1000.0).ceil() as i32
}

/// Width of the widest of some texts.
pub(super) fn widest<'t>(texts: impl IntoIterator<Item = &'t str>, size: i32) -> i32 {
    texts.into_iter().map(|text| text_width(text, size)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_the_font() {
        // H 722, e 556, l 222 twice, o 556: 2278 thousandths of 1000.
        assert_eq!(text_width("Hello", 1000), 2278);
        assert_eq!(text_width("~ ", 1000), 584 + 278);
        assert_eq!(widest(["i", "W"], 1000), 944);
    }

    #[test]
    fn numbers_have_about_three_digits() {
        let texts = [0.0, 0.004, 0.68, 9.994, 9.996, 72.69, 99.96, 3104.4, -1.5].map(short);
        assert_eq!(texts, ["0", "0.00", "0.68", "9.99", "10.0", "72.7", "100", "3104", "-1.50"]);
    }

    #[test]
    fn titles_that_are_longer_than_their_axis_stand_above_it() {
        // Five letters of 556 thousandths of 25: 69.5.
        assert_eq!(TitleSide::of("aaaaa", 70), TitleSide::Beside);
        assert_eq!(TitleSide::of("aaaaa", 69), TitleSide::Above);
    }

    #[test]
    fn a_sheet_prints_at_its_size() {
        let svg = sheet((880, 500), |canvas| {
            canvas.text("a < b", (10, 10), Letters::new(Side::Left).upright())
        });
        let svg = svg.expect("drawn");
        assert!(svg.contains("width=\"88mm\" height=\"50mm\" viewBox=\"0 0 880 500\""), "{svg}");
        assert!(svg.contains("a &lt; b") && svg.contains("Helvetica, Arial"), "{svg}");
    }
}
