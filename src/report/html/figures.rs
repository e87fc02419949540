//! Static figures of a page, as SVG: they stand in it for readers without scripts, and beside it in
//! the size of a printed page.
//!
//! The one design decision: a figure is drawn once a medium with the same strokes, and colours are
//! those of the page in daylight. In the page each of them is then replaced by the page's variable
//! of that name ([`for_page`]), so that a figure follows a dark page too.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Cell, text_of};
use crate::engine::Status;
use crate::metrics::{EnvelopePoint, FourLevels, MemoryMap};
use crate::report::figure::{FigureError, nice_step, round_marks};
use crate::report::text::{SizeUnit, grouped, percent};
use crate::trace::{Op, Trace, step_name};
use crate::units::Bytes;

/// Fonts by name: what is there first is taken.
const FONTS: &str = "Helvetica, Arial, Liberation Sans, sans-serif";
/// Drawing units a pixel: coordinates are whole numbers.
const UNITS: f64 = 4.0;
/// Stretches of the time line that are drawn.
const STRETCHES_MAX: usize = 900;
/// Rectangles of a static map, the largest first.
pub(super) const RECTANGLES_MAX: usize = 4_000;

const CARD: RGBColor = RGBColor(0xff, 0xff, 0xff);
const INK: RGBColor = RGBColor(0x1b, 0x1f, 0x27);
const SOFT: RGBColor = RGBColor(0x5c, 0x65, 0x73);
const GRID: RGBColor = RGBColor(0xe7, 0xea, 0xef);
const HELD: RGBColor = RGBColor(0xe6, 0xe9, 0xee);
const REQUESTED: RGBColor = RGBColor(0x2f, 0x7f, 0xc1);
const RESERVED: RGBColor = RGBColor(0xd9, 0x82, 0x2b);
const WASTE: RGBColor = RGBColor(0xf4, 0xd7, 0xb3);
/// The page's variables for these.
const VARIABLES: [(RGBColor, &str); 8] = [
    (CARD, "card"),
    (INK, "ink"),
    (SOFT, "soft"),
    (GRID, "grid"),
    (HELD, "held"),
    (REQUESTED, "requested"),
    (RESERVED, "reserved"),
    (WASTE, "waste"),
];
/// From short lives to long ones, as in the script of the page.
const LIVES: [RGBColor; 6] = [
    RGBColor(0xfd, 0xcc, 0x5c),
    RGBColor(0xf5, 0x91, 0x42),
    RGBColor(0xdb, 0x54, 0x61),
    RGBColor(0x8c, 0x47, 0x8f),
    RGBColor(0x4a, 0x52, 0x96),
    RGBColor(0x29, 0x76, 0x8e),
];

/// Where a figure is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// In a page, as wide as that.
    Page,
    /// On paper, over two columns: 180 mm.
    Paper,
}

impl Medium {
    /// Width in pixels of a screen; what is as large on paper are points there.
    fn width(self) -> f64 {
        match self {
            Medium::Page => 1200.0,
            Medium::Paper => 620.0,
        }
    }

    /// Puts the finished drawing into its medium.
    fn finish(self, svg: &str, height: f64) -> String {
        let (width_units, height_units) = (self.width() * UNITS, height * UNITS);
        let size = format!("width=\"{width_units:.0}\" height=\"{height_units:.0}\" ");
        match self {
            Medium::Page => for_page(&svg.replacen(&size, "", 1)),
            Medium::Paper => {
                let mm = 180.0 * height / self.width();
                svg.replacen(&size, &format!("width=\"180mm\" height=\"{mm:.1}mm\" "), 1)
            }
        }
    }
}

/// Replaces colours by the page's variables. In text a quote is written otherwise, so attributes
/// alone are met.
fn for_page(svg: &str) -> String {
    VARIABLES.iter().fold(svg.to_owned(), |svg, (RGBColor(red, green, blue), name)| {
        let colour = format!("=\"#{red:02X}{green:02X}{blue:02X}\"");
        svg.replace(&colour, &format!("=\"var(--{name})\""))
    })
}

type DrawingError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;
type Drawn<'a> = Result<(), DrawingError<'a>>;

/// Draws in pixels.
struct Pen<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
}

fn units((x, y): (f64, f64)) -> (i32, i32) {
    ((x * UNITS).round() as i32, (y * UNITS).round() as i32)
}

impl<'a> Pen<'a> {
    fn rect(&self, from: (f64, f64), to: (f64, f64), colour: RGBColor) -> Drawn<'a> {
        self.area.draw(&Rectangle::new([units(from), units(to)], colour.filled()))
    }

    fn area(&self, points: impl IntoIterator<Item = (f64, f64)>, colour: RGBColor) -> Drawn<'a> {
        let points: Vec<(i32, i32)> = points.into_iter().map(units).collect();
        self.area.draw(&Polygon::new(points, colour.filled()))
    }

    fn line(
        &self,
        points: impl IntoIterator<Item = (f64, f64)>,
        colour: RGBColor,
        width: f64,
    ) -> Drawn<'a> {
        let points: Vec<(i32, i32)> = points.into_iter().map(units).collect();
        self.area.draw(&PathElement::new(points, colour.stroke_width((width * UNITS) as u32)))
    }

    fn text(&self, text: &str, at: (f64, f64), lean: HPos, colour: RGBColor) -> Drawn<'a> {
        // The drawing library takes a size of its own, larger by this factor.
        let size = 12.0 * UNITS * 1.24;
        let style = (FONTS, size).into_font().color(&colour).pos(Pos::new(lean, VPos::Center));
        self.area.draw(&Text::new(text.to_owned(), units(at), style))
    }

    /// A coloured field and what it stands for; gives where the next may begin.
    fn key(&self, text: &str, at: (f64, f64), colour: RGBColor) -> Result<f64, DrawingError<'a>> {
        self.rect((at.0, at.1 - 5.0), (at.0 + 10.0, at.1 + 5.0), colour)?;
        self.text(text, (at.0 + 15.0, at.1), HPos::Left, SOFT)?;
        Ok(at.0 + 35.0 + 6.4 * text.chars().count() as f64)
    }
}

/// Draws a figure of this height in pixels.
fn figure(
    medium: Medium,
    height: f64,
    draw: impl for<'a> FnOnce(&Pen<'a>) -> Drawn<'a>,
) -> Result<String, FigureError> {
    let mut svg = String::new();
    let size = ((medium.width() * UNITS) as u32, (height * UNITS) as u32);
    let pen = Pen { area: SVGBackend::with_string(&mut svg, size).into_drawing_area() };
    let drawn = pen
        .area
        .fill(&CARD)
        .and_then(|()| draw(&pen))
        .and_then(|()| pen.area.present())
        .map_err(FigureError::new);
    drop(pen);
    drawn?;
    Ok(medium.finish(&svg, height))
}

/// A plot between axes, in pixels.
struct Plot {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    /// What the axes end at: events, and bytes.
    events: f64,
    bytes: f64,
}

impl Plot {
    fn x(&self, event: u64) -> f64 {
        self.left + self.width * (event as f64 / self.events).min(1.0)
    }

    fn y(&self, bytes: u64) -> f64 {
        self.top + self.height * (1.0 - bytes as f64 / self.bytes)
    }

    fn axes<'a>(&self, pen: &Pen<'a>) -> Drawn<'a> {
        let unit = SizeUnit::fitting(self.bytes as u64);
        let bottom = self.top + self.height;
        let marks = round_marks(self.bytes / unit.bytes as f64, (self.height / 30.0).max(2.0));
        for (index, mark) in marks.iter().enumerate() {
            let y = self.top + self.height * (1.0 - mark * unit.bytes as f64 / self.bytes);
            pen.line([(self.left, y), (self.left + self.width, y)], GRID, 1.0)?;
            let last = index + 1 == marks.len();
            let text = if last { format!("{mark} {}", unit.name) } else { mark.to_string() };
            pen.text(&text, (self.left - 6.0, y), HPos::Right, SOFT)?;
        }
        let marks = round_marks(self.events, self.width / 100.0);
        for mark in &marks {
            let x = self.left + self.width * mark / self.events;
            let lean = if *mark == 0.0 { HPos::Left } else { HPos::Center };
            if x < self.left + self.width - 50.0 {
                pen.text(&grouped(*mark as u64), (x, bottom + 12.0), lean, SOFT)?;
            }
        }
        pen.text("event", (self.left + self.width, bottom + 12.0), HPos::Right, SOFT)
    }
}

/// Levels over events: what one allocator reserved, and what was requested of it.
pub(super) fn timeline(
    trace: &Trace,
    cell: &Cell<'_>,
    medium: Medium,
) -> Result<String, FigureError> {
    let points = &cell.observed.envelope;
    let height = 230.0;
    figure(medium, height, |pen| {
        let top_bytes =
            points.iter().map(|p| p.max.reserved_bytes.max(p.max.requested_bytes)).max();
        let plot = Plot {
            left: 58.0,
            top: 44.0,
            width: medium.width() - 70.0,
            height: height - 44.0 - 26.0,
            events: cell.events(trace).max(1) as f64,
            bytes: 1.05 * top_bytes.unwrap_or(0).max(1) as f64,
        };
        let peaks = &cell.observed.result.peaks;
        let reserved =
            format!("reserved by {}, peak {}", cell.label, Bytes(peaks.reserved_bytes_peak));
        let at = pen.key(&text_of(&reserved), (plot.left, 12.0), RESERVED)?;
        let requested = format!("requested, peak {}", Bytes(peaks.requested_bytes_peak));
        pen.key(&requested, (at, 12.0), REQUESTED)?;
        plot.axes(pen)?;
        if cell.events(trace) == trace.events.len() as u64 {
            steps(pen, &plot, trace)?;
        }
        let points = thinned(points);
        let reserved = trail(&plot, &points, |levels| levels.reserved_bytes);
        let requested = trail(&plot, &points, |levels| levels.requested_bytes);
        pen.area(closed(&plot, &reserved), WASTE)?;
        pen.area(closed(&plot, &requested), REQUESTED)?;
        pen.line(reserved, RESERVED, 1.5)
    })
}

/// Names of steps above the plot, where there is room for them, and a line where each begins.
fn steps<'a>(pen: &Pen<'a>, plot: &Plot, trace: &Trace) -> Drawn<'a> {
    let mut begins: Vec<(u64, Option<&str>)> = Vec::new();
    for (event, op) in (0u64..).zip(trace.events.iter().map(|event| event.op)) {
        let Op::Mark(phase) = op else { continue };
        let step = trace.phases.get(phase.index()).and_then(|phase| step_name(phase));
        if begins.last().is_none_or(|(_, before)| *before != step) {
            begins.push((event, step));
        }
    }
    let ends = begins.iter().skip(1).map(|begin| begin.0).chain([trace.events.len() as u64]);
    let mut named: Vec<(f64, f64, &str)> = Vec::new();
    for ((from, step), to) in begins.iter().zip(ends) {
        let (from, to) = (plot.x(*from), plot.x(to));
        if to - from >= 4.0 {
            pen.line([(from, plot.top - 14.0), (from, plot.top + plot.height)], GRID, 1.0)?;
        }
        named.extend(step.map(|step| (from, to, step)));
    }
    for (middle, step) in every_nth(&named, (plot.left, plot.left + plot.width)) {
        pen.text(&text_of(step), (middle, plot.top - 8.0), HPos::Center, SOFT)?;
    }
    Ok(())
}

/// Where names of steps stand, given from where to where each lasts: where there is no room for
/// every name, that of each second, fifth, tenth step.
fn every_nth<'s>(steps: &[(f64, f64, &'s str)], (left, right): (f64, f64)) -> Vec<(f64, &'s str)> {
    let wide = |name: &str| 6.6 * name.chars().count() as f64;
    let widest = steps.iter().map(|(_, _, name)| wide(name)).fold(0.0, f64::max);
    let mut rooms: Vec<f64> = steps.iter().map(|(from, to, _)| to - from).collect();
    rooms.sort_by(f64::total_cmp);
    let room = rooms.get(rooms.len() / 2).copied().unwrap_or(1.0).max(0.01);
    let nth = nice_step((widest + 4.0) / room).max(1.0) as usize;
    let mut free = left;
    let mut places = Vec::new();
    for (from, to, name) in steps.iter().step_by(nth) {
        let half = wide(name) / 2.0;
        let middle = ((from + to) / 2.0).min(right - half).max(left + half);
        if middle - half >= free {
            places.push((middle, *name));
            free = middle + half + 4.0;
        }
    }
    places
}

/// Neighbouring points as one, so that a figure has no more than can be seen.
fn thinned(points: &[EnvelopePoint]) -> Vec<(u64, u64, FourLevels)> {
    let each = points.len().div_ceil(STRETCHES_MAX).max(1);
    let stretch = |points: &[EnvelopePoint]| {
        let highest =
            |of: fn(&FourLevels) -> u64| points.iter().map(|p| of(&p.max)).max().unwrap_or(0);
        let levels = FourLevels {
            requested_bytes: highest(|levels| levels.requested_bytes),
            allocated_bytes: highest(|levels| levels.allocated_bytes),
            active_bytes: highest(|levels| levels.active_bytes),
            reserved_bytes: highest(|levels| levels.reserved_bytes),
        };
        (points[0].event_begin, points[points.len() - 1].event_end, levels)
    };
    points.chunks(each).map(stretch).collect()
}

/// A level as steps.
fn trail(
    plot: &Plot,
    points: &[(u64, u64, FourLevels)],
    level: fn(&FourLevels) -> u64,
) -> Vec<(f64, f64)> {
    let step = |(begin, end, levels): &(u64, u64, FourLevels)| {
        let y = plot.y(level(levels));
        [(plot.x(*begin), y), (plot.x(*end), y)]
    };
    points.iter().flat_map(step).collect()
}

/// The field below a line.
fn closed(plot: &Plot, line: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let foot = plot.top + plot.height;
    let ends = [line.last(), line.first()].into_iter().flatten().map(|&(x, _)| (x, foot));
    line.iter().copied().chain(ends).collect()
}

/// A bar an allocator: what was requested, and what is reserved beyond it.
pub(super) fn comparison(cells: &[Cell<'_>], medium: Medium) -> Result<String, FigureError> {
    let (row, top) = (26.0, 30.0);
    let height = top + row * cells.len() as f64 + 8.0;
    figure(medium, height, |pen| {
        let longest = cells.iter().map(|cell| text_of(&cell.label).chars().count()).max();
        let left = (12.0 + 6.9 * longest.unwrap_or(0) as f64).min(0.4 * medium.width());
        let room = medium.width() - left - 150.0;
        let peaks = |cell: &Cell<'_>| cell.observed.result.peaks;
        let most =
            cells.iter().map(|c| peaks(c).reserved_bytes_peak.max(peaks(c).requested_bytes_peak));
        let most = most.max().unwrap_or(0).max(1) as f64;
        let at = pen.key("requested peak", (left, 12.0), REQUESTED)?;
        pen.key("reserved beyond it", (at, 12.0), RESERVED)?;
        for (index, cell) in cells.iter().enumerate() {
            let middle = top + row * (index as f64 + 0.5);
            let peaks = peaks(cell);
            let x = |bytes: u64| left + room * bytes as f64 / most;
            let inside = peaks.requested_bytes_peak.min(peaks.reserved_bytes_peak);
            pen.text(&text_of(&cell.label), (left - 8.0, middle), HPos::Right, INK)?;
            pen.rect((left, middle - 8.0), (x(inside), middle + 8.0), REQUESTED)?;
            let reserved = x(peaks.reserved_bytes_peak);
            pen.rect((x(inside), middle - 8.0), (reserved, middle + 8.0), RESERVED)?;
            let result = &cell.observed.result;
            let told = match result.outcome.status {
                Status::Ok => percent(result.fragmentation),
                Status::Oom => "out of memory".to_owned(),
                Status::Failed => "failed".to_owned(),
            };
            let text = format!("{}, {told}", Bytes(peaks.reserved_bytes_peak));
            pen.text(&text, (reserved + 8.0, middle), HPos::Left, SOFT)?;
        }
        Ok(())
    })
}

/// Where lives are told apart: by powers of ten, the last one more finely (as in script/data.js).
fn life_steps(events: u64) -> [f64; 5] {
    let power = (events as f64 / 2.0).max(1.0).log10().floor().max(3.0);
    let top = 10f64.powf(power);
    [top / 1000.0, top / 100.0, top / 10.0, 0.3 * top, top]
}

/// Where blocks lay over time: the largest ones.
pub(super) fn map(map: &MemoryMap, medium: Medium) -> Result<String, FigureError> {
    let height = if medium == Medium::Page { 440.0 } else { 300.0 };
    figure(medium, height, |pen| {
        let plot = Plot {
            left: 58.0,
            top: 12.0,
            width: medium.width() - 70.0,
            height: height - 12.0 - 26.0,
            events: map.events.max(1) as f64,
            bytes: map.height_bytes.max(1) as f64,
        };
        plot.axes(pen)?;
        let rect = |from_event, to_event, position: u64, size: u64, colour| {
            let from = (plot.x(from_event), plot.y(position.saturating_add(size)));
            pen.rect(from, (plot.x(to_event), plot.y(position)), colour)
        };
        let area = |from: u64, to: u64, size: u64| u128::from(to - from) * u128::from(size);
        let mut held: Vec<_> = map.stretches.iter().collect();
        held.sort_by_key(|held| {
            std::cmp::Reverse(area(held.from_event, held.to_event, held.size_bytes))
        });
        for held in held.into_iter().take(RECTANGLES_MAX) {
            rect(held.from_event, held.to_event, held.position_bytes, held.size_bytes, HELD)?;
        }
        let mut blocks: Vec<_> = map.blocks.iter().collect();
        blocks.sort_by_key(|block| {
            std::cmp::Reverse(area(block.from_event, block.to_event, block.size_bytes))
        });
        let life_steps = life_steps(map.events);
        for block in blocks.into_iter().take(RECTANGLES_MAX) {
            let life = block.to_event - block.from_event;
            let class = life_steps.iter().filter(|&&step| life as f64 >= step).count();
            let colour = LIVES[class];
            let (from, to) = (block.from_event, block.to_event);
            rect(from, to, block.position_bytes, block.size_bytes, colour)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_steps_go_on_to_the_end() {
        // 24 steps of 23 pixels: "step10" takes 39.6 and a gap of 4, so every second has room.
        let names: Vec<String> = (0..24).map(|step| format!("step{step}")).collect();
        let at = |step: usize| 58.0 + 23.0 * step as f64;
        let steps: Vec<(f64, f64, &str)> =
            names.iter().enumerate().map(|(i, name)| (at(i), at(i + 1), &**name)).collect();
        let places = every_nth(&steps, (58.0, at(24)));
        let told: Vec<&str> = places.iter().map(|place| place.1).collect();
        let even: Vec<&str> = names.iter().step_by(2).map(|name| &**name).collect();
        assert_eq!(told, even);
        // With room for all, all are named; the first of two too narrow ones is.
        assert_eq!(every_nth(&[(0.0, 50.0, "step0"), (50.0, 90.0, "step1")], (0.0, 90.0)).len(), 2);
        assert_eq!(every_nth(&[(0.0, 9.0, "step0"), (9.0, 18.0, "step1")], (0.0, 90.0)).len(), 1);
        assert!(every_nth(&[], (0.0, 90.0)).is_empty());
    }

    #[test]
    fn figures_in_a_page_follow_its_colours() {
        let svg = figure(Medium::Page, 10.0, |pen| {
            pen.text("a=\"#FFFFFF\"", (1.0, 1.0), HPos::Left, INK)
        });
        let svg = svg.expect("a figure");
        assert!(svg.starts_with("<svg viewBox=\"0 0 4800 40\""), "{svg}");
        assert!(
            svg.contains("fill=\"var(--ink)\"") && svg.contains("a=&quot;#FFFFFF&quot;"),
            "{svg}"
        );
        let svg = figure(Medium::Paper, 310.0, |_| Ok(())).expect("a figure");
        assert!(svg.starts_with("<svg width=\"180mm\" height=\"90.0mm\""), "{svg}");
    }
}
