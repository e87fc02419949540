//! What stands above a drawing: which colour, marker or sign means what.

use super::FigureError;
use super::canvas::{ALARM, At, Canvas, LETTERS, Letters, SERIES, Side, text_width};

/// Height of a row of a legend.
const ROW: i32 = 38;
/// Room of a sign and the space behind it.
const SIGN: i32 = 34;
/// Room between entries.
const GAP: i32 = 34;

/// How an entry looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    /// A field in the colour of a series.
    Bar(usize),
    /// A line with the marker of a series.
    Line(usize),
    /// The marker of a series.
    Marker(usize),
    /// A cross.
    Oom,
    /// A square: it ran.
    Ran,
}

/// A legend: its entries in rows.
#[derive(Debug)]
pub(super) struct Legend {
    rows: Vec<Vec<(Sign, String, i32)>>,
}

impl Legend {
    /// Lays entries out in rows of this width.
    pub(super) fn new(entries: Vec<(Sign, String)>, width: i32) -> Legend {
        let mut rows: Vec<Vec<(Sign, String, i32)>> = Vec::new();
        let mut used = 0;
        for (sign, text) in entries {
            let needed = SIGN + text_width(&text, LETTERS) + GAP;
            match rows.last_mut() {
                Some(row) if used + needed - GAP <= width => {
                    row.push((sign, text, used));
                    used += needed;
                }
                _ => {
                    rows.push(vec![(sign, text, 0)]);
                    used = needed;
                }
            }
        }
        Legend { rows }
    }

    /// Its height, with the room below it.
    pub(super) fn height(&self) -> i32 {
        match self.rows.len() as i32 {
            0 => 0,
            rows => rows * ROW + 8,
        }
    }

    /// Draws it with its upper left corner here.
    pub(super) fn draw(&self, canvas: &Canvas<'_>, (left, top): At) -> Result<(), FigureError> {
        for (row, entries) in self.rows.iter().enumerate() {
            let middle = top + row as i32 * ROW + ROW / 2;
            for (sign, text, offset) in entries {
                let x = left + offset;
                draw_sign(canvas, *sign, (x, middle))?;
                canvas.text(text, (x + SIGN, middle), Letters::new(Side::Left))?;
            }
        }
        Ok(())
    }
}

fn draw_sign(canvas: &Canvas<'_>, sign: Sign, (x, y): At) -> Result<(), FigureError> {
    let color = |series: usize| SERIES[series % SERIES.len()];
    match sign {
        Sign::Bar(series) => canvas.fill((x, y - 9), (x + 24, y + 9), color(series)),
        Sign::Line(series) => {
            canvas.line(vec![(x, y), (x + 26, y)], color(series), 4)?;
            canvas.marker(series, (x + 13, y))
        }
        Sign::Marker(series) => canvas.marker(series, (x + 13, y)),
        Sign::Oom => canvas.cross((x + 13, y), 8),
        Sign::Ran => canvas.fill((x + 4, y - 9), (x + 22, y + 9), SERIES[0]),
    }
}

/// The entry of a cross.
pub(super) fn oom_entry() -> (Sign, String) {
    debug_assert_ne!(ALARM, SERIES[0]);
    (Sign::Oom, "out of memory".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_do_not_fit_begin_a_row() {
        let entries = |count: usize| vec![(Sign::Bar(0), "abcde".to_owned()); count];
        // a, b, d, e 556 and c 500 thousandths of 25: 69 rounded up, with the sign 103.
        assert_eq!(Legend::new(entries(2), 103 + 34 + 103).rows.len(), 1);
        assert_eq!(Legend::new(entries(2), 103 + 34 + 102).rows.len(), 2);
        assert_eq!(Legend::new(Vec::new(), 100).height(), 0);
    }
}
