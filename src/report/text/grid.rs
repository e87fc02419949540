//! A table of short cells: columns as wide as their content, numbers to the right.

use super::{Style, Tone, WIDTH};

/// Which way the cells of a column lean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// A cell and what it means.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(super) fn toned(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: text.into(), tone }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::toned(text, Tone::Plain)
    }
}

/// Rows under a head of one line or several.
///
/// Columns stand two spaces apart, or one where two would make the table wider than it should be. A
/// first cell that would still make it wider stands on a line of its own above the rest of its row.
pub(super) struct Grid {
    aligns: Vec<Align>,
    head: Vec<Vec<Cell>>,
    rows: Vec<Row>,
    /// How wide it should be.
    width: usize,
}

struct Row {
    cells: Vec<Cell>,
    note: String,
}

impl Grid {
    pub(super) fn new(aligns: &[Align]) -> Grid {
        Grid { aligns: aligns.to_vec(), head: Vec::new(), rows: Vec::new(), width: WIDTH }
    }

    /// So many columns that lean left, and behind them so many of numbers.
    pub(super) fn of_columns(left: usize, right: usize) -> Grid {
        let left = std::iter::repeat_n(Align::Left, left);
        let aligns: Vec<Align> = left.chain(std::iter::repeat_n(Align::Right, right)).collect();
        Grid::new(&aligns)
    }

    /// The same, wider than a screen of [`WIDTH`].
    pub(super) fn of_width(self, width: usize) -> Grid {
        Grid { width, ..self }
    }

    /// Adds a line to the head.
    pub(super) fn head<T: Into<String>>(&mut self, titles: impl IntoIterator<Item = T>) {
        let cells = titles.into_iter().map(|title| Cell::toned(title, Tone::Heading));
        self.head.push(cells.collect());
    }

    /// Adds a row. `note` follows it as it stands, whole lines, or nothing.
    pub(super) fn row<T: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = T>, note: String) {
        self.rows.push(Row { cells: cells.into_iter().map(Into::into).collect(), note });
    }

    /// Adds a row for each of `items`; of more than `most`, those in the middle are left out, and a
    /// line says how many.
    pub(super) fn rows_at_most<I, T: Into<Cell>, R: IntoIterator<Item = T>>(
        &mut self,
        items: &[I],
        most: usize,
        cells: impl Fn(&I) -> R,
    ) {
        let left_out = items.len().saturating_sub(most);
        for (at, item) in items.iter().enumerate() {
            if left_out > 0 && (most / 2..most / 2 + left_out).contains(&at) {
                continue;
            }
            let is_cut = left_out > 0 && at + 1 == most / 2;
            let note = if is_cut { format!("  ... {left_out} rows\n") } else { String::new() };
            self.row(cells(item), note);
        }
    }

    /// The finished table, every line ended.
    pub(super) fn render(&self, style: Style) -> String {
        let (widths, gap) = self.layout();
        let mut out = String::new();
        for cells in &self.head {
            self.line(cells, &widths, gap, style, &mut out);
        }
        for row in &self.rows {
            self.line(&row.cells, &widths, gap, style, &mut out);
            out.push_str(&row.note);
        }
        out
    }

    /// Width of every column and of the gaps between them.
    fn layout(&self) -> (Vec<usize>, usize) {
        let lines = || self.head.iter().chain(self.rows.iter().map(|row| &row.cells));
        let width_of = |column: usize| {
            lines().filter_map(|cells| cells.get(column)).map(Cell::width).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.aligns.len()).map(width_of).collect();
        let gaps = widths.len().saturating_sub(1);
        let gap = if widths.iter().sum::<usize>() + 2 * gaps <= self.width { 2 } else { 1 };
        let others: usize = widths.iter().skip(1).sum::<usize>() + gap * gaps;
        if let Some(first) = widths.first_mut()
            && *first + others > self.width
        {
            let titles = self.head.iter().filter_map(|cells| cells.first()).map(Cell::width);
            let room = titles.max().unwrap_or(0).max(self.width.saturating_sub(others));
            let fitting = lines().filter_map(|cells| cells.first()).map(Cell::width);
            *first = fitting.filter(|&width| width <= room).max().unwrap_or(0);
        }
        (widths, gap)
    }

    fn line(&self, cells: &[Cell], widths: &[usize], gap: usize, style: Style, out: &mut String) {
        let mut line = String::new();
        let mut pending = 0;
        for ((cell, &width), align) in cells.iter().zip(widths).zip(&self.aligns) {
            let missing = width.saturating_sub(cell.width());
            if cell.width() > width {
                line.push_str(&style.paint(cell.tone, &cell.text));
                line.push('\n');
                pending = width + gap;
                continue;
            }
            let (before, after) = match align {
                Align::Left => (0, missing),
                Align::Right => (missing, 0),
            };
            if cell.text.is_empty() {
                pending += width + gap;
                continue;
            }
            line.extend(std::iter::repeat_n(' ', pending + before));
            line.push_str(&style.paint(cell.tone, &cell.text));
            pending = after + gap;
        }
        out.push_str(&line);
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(names: &[&str], filler: &str) -> String {
        let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
        grid.head(["name", "count", "wide"]);
        for name in names {
            grid.row([*name, "7", filler].map(str::to_owned), String::new());
        }
        grid.render(Style::default())
    }

    #[test]
    fn numbers_lean_right_and_lines_do_not_trail() {
        assert_eq!(
            grid(&["a", "bcdef"], ""),
            "name   count  wide\n\
             a          7\n\
             bcdef      7\n"
        );
    }

    #[test]
    fn gaps_shrink_before_the_table_grows_too_wide() {
        let filler = "x".repeat(80 - 5 - 5 - 2);
        let text = grid(&["bcdef"], &filler);
        assert_eq!(text.lines().last().map(str::len), Some(80), "{text}");
    }

    #[test]
    fn a_long_name_gets_a_line_of_its_own() {
        let filler = "x".repeat(60);
        let text = grid(&["short", "a-name-that-is-too-long"], &filler);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2], "a-name-that-is-too-long");
        assert_eq!(lines[3].trim_start(), format!("7 {filler}"));
        assert!(lines[3].len() <= WIDTH && lines[1].len() == lines[3].len(), "{text}");
    }

    #[test]
    fn the_head_stays_in_one_line_whatever_the_width() {
        let text = grid(&["a-name-that-is-too-long"], &"x".repeat(90));
        assert!(text.starts_with("name count"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }

    #[test]
    fn colour_changes_no_column() {
        let mut grid = Grid::new(&[Align::Left, Align::Right]);
        grid.row([Cell::toned("ok", Tone::Good), "1".to_owned().into()], String::new());
        grid.row([Cell::toned("oom", Tone::Bad), "2".to_owned().into()], String::new());
        let colored = grid.render(Style { color: true });
        assert!(colored.contains("\x1b[32mok\x1b[0m"), "{colored}");
        let plain = ["\x1b[32m", "\x1b[1;31m", "\x1b[0m"]
            .iter()
            .fold(colored, |text, code| text.replace(code, ""));
        assert_eq!(plain, grid.render(Style::default()));
    }
}
