//! A packing: time to the right, offsets upwards, a rectangle a buffer, coloured by how long it
//! lives; above it the height, the bound, and the bytes that are live.

use plotters::prelude::*;

use super::FigureError;
use crate::plan::{Buffer, Packing, Problem};
use crate::report::text::printable;
use crate::units::{Bytes, GIB, MIB};

/// Size of a figure in pixels.
const SIZE: (u32, u32) = (1200, 700);
/// Buffers smaller than this share of a pixel are left out: nobody could see them.
const VISIBLE_PIXELS: f64 = 0.05;
/// Most rectangles in a figure, the largest first: browsers become slow above.
const RECTANGLES_MAX: usize = 40_000;
/// Points of the line of live bytes.
const LOAD_POINTS: usize = 2_000;

/// From short lives to long ones.
const LIVES: [RGBColor; 6] = [
    RGBColor(253, 204, 92),
    RGBColor(245, 145, 66),
    RGBColor(219, 84, 97),
    RGBColor(140, 71, 143),
    RGBColor(74, 82, 150),
    RGBColor(41, 118, 142),
];

/// What a figure says in words.
#[derive(Clone, Debug, Default)]
pub struct PackingLabels {
    /// Above the figure.
    pub title: String,
    /// Under the axis of time.
    pub tick: String,
}

/// Draws one pool of a packing.
///
/// # Errors
/// If the drawing library refuses.
pub fn packing_svg(
    problem: &Problem,
    packing: &Packing,
    pool: u32,
    labels: &PackingLabels,
) -> Result<String, FigureError> {
    let mut svg = String::new();
    draw(&mut svg, problem, packing, pool, labels).map_err(FigureError::new)?;
    Ok(svg)
}

type DrawingError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw<'a>(
    svg: &'a mut String,
    problem: &Problem,
    packing: &Packing,
    pool: u32,
    labels: &PackingLabels,
) -> Result<(), DrawingError<'a>> {
    let summary = packing.pools.get(pool as usize).cloned().unwrap_or_default();
    let buffers: Vec<(&Buffer, u64)> = problem
        .buffers
        .iter()
        .zip(packing.offsets_bytes.iter().copied())
        .filter(|(buffer, _)| buffer.pool() == pool && buffer.start < buffer.end)
        .collect();
    let first = buffers.iter().map(|(buffer, _)| buffer.start).min().unwrap_or(0);
    let last = buffers.iter().map(|(buffer, _)| buffer.end).max().unwrap_or(1).max(first + 1);
    let (unit, unit_name) = match summary.height_bytes {
        GIB.. => (GIB as f64, "GiB"),
        MIB.. => (MIB as f64, "MiB"),
        _ => (1.0, "bytes"),
    };
    let top = (summary.height_bytes.max(1) as f64 / unit) * 1.04;
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(printable(&labels.title), ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(first as f64..last as f64, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_desc(printable(&labels.tick))
        .y_desc(format!("offset, {unit_name}"))
        .x_label_formatter(&|tick| format!("{tick:.0}"))
        .draw()?;
    let span = (last - first) as f64;
    let pixel_area = (SIZE.0 as f64 / span) * (SIZE.1 as f64 / top);
    chart.draw_series(largest(&buffers, pixel_area, unit).into_iter().map(
        |(buffer, offset)| {
            let (low, high) = (offset as f64 / unit, (offset + buffer.size_bytes) as f64 / unit);
            let corners = [(buffer.start as f64, low), (buffer.end as f64, high)];
            Rectangle::new(corners, color(buffer, span).filled())
        },
    ))?;
    let height = summary.height_bytes as f64 / unit;
    let bound = summary.lower_bound_bytes as f64 / unit;
    let level = |bytes: f64| [(first as f64, bytes), (last as f64, bytes)];
    chart
        .draw_series(LineSeries::new(level(height), RED.stroke_width(2)))?
        .label(format!("height {}", Bytes(summary.height_bytes)))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], RED.stroke_width(2)));
    chart
        .draw_series(LineSeries::new(level(bound), BLUE.stroke_width(1)))?
        .label(format!("lower bound {}", Bytes(summary.lower_bound_bytes)))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLUE));
    chart
        .draw_series(LineSeries::new(load(&buffers, first, last, unit), BLACK.stroke_width(1)))?
        .label("live bytes")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK)
        .draw()?;
    area.present()
}

/// The buffers that can be seen, largest area first, no more than a browser likes; drawn in this
/// order none hides another, since they do not overlap.
fn largest<'b>(
    buffers: &[(&'b Buffer, u64)],
    pixel_area: f64,
    unit: f64,
) -> Vec<(&'b Buffer, u64)> {
    let area = |buffer: &Buffer| {
        (buffer.end - buffer.start) as f64 * (buffer.size_bytes as f64 / unit) * pixel_area
    };
    let seen = buffers.iter().filter(|(buffer, _)| area(buffer) >= VISIBLE_PIXELS);
    let mut seen: Vec<(&Buffer, u64)> = seen.copied().collect();
    seen.sort_by(|(a, _), (b, _)| area(b).total_cmp(&area(a)));
    seen.truncate(RECTANGLES_MAX);
    seen
}

/// Lives are told apart by powers of ten of the whole time.
fn color(buffer: &Buffer, span: f64) -> RGBColor {
    let share = (buffer.end - buffer.start) as f64 / span;
    let class = (LIVES.len() as f64 - 1.0 + share.log10()).round();
    LIVES[class.clamp(0.0, LIVES.len() as f64 - 1.0) as usize]
}

/// Live bytes over time: the most in each of [`LOAD_POINTS`] stretches.
fn load(buffers: &[(&Buffer, u64)], first: u64, last: u64, unit: f64) -> Vec<(f64, f64)> {
    let mut changes: Vec<(u64, i128)> = Vec::with_capacity(2 * buffers.len());
    for (buffer, _) in buffers {
        changes.push((buffer.start, i128::from(buffer.size_bytes)));
        changes.push((buffer.end, -i128::from(buffer.size_bytes)));
    }
    changes.sort_unstable();
    let width = (last - first).div_ceil(LOAD_POINTS as u64).max(1);
    let mut points = vec![0i128; ((last - first) / width) as usize + 1];
    let (mut live, mut at) = (0i128, 0usize);
    for change in changes.chunk_by(|a, b| a.0 == b.0) {
        let stretch = ((change[0].0 - first) / width) as usize;
        for point in &mut points[at..=stretch.max(at)] {
            *point = (*point).max(live);
        }
        at = stretch;
        live += change.iter().map(|(_, bytes)| bytes).sum::<i128>();
        points[at] = points[at].max(live);
    }
    let tick = |index: usize| (first + index as u64 * width) as f64;
    points.iter().enumerate().map(|(at, &live)| (tick(at), live as f64 / unit)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_bytes_are_the_most_of_each_stretch() {
        let buffers = [Buffer::new(0, 10, 3), Buffer::new(2, 4, 5), Buffer::new(4, 6, 1)];
        let placed: Vec<(&Buffer, u64)> = buffers.iter().map(|buffer| (buffer, 0)).collect();
        let at = |tick: f64| {
            let points = load(&placed, 0, 10, 1.0);
            points.into_iter().find(|point| point.0 == tick).expect("a point").1
        };
        assert_eq!([at(0.0), at(2.0), at(3.0), at(5.0), at(9.0)], [3.0, 8.0, 8.0, 4.0, 3.0]);
    }

    #[test]
    fn a_figure_shows_every_buffer_and_both_lines() {
        let problem = Problem {
            buffers: vec![Buffer::new(0, 10, 4 << 30), Buffer::new(3, 5, 1 << 30)],
            ..Problem::default()
        };
        let solved = crate::plan::solve(&problem, &crate::plan::SolveOptions::default());
        let packing = solved.expect("a problem without contradictions").packing;
        // What no XML may hold, from a trace's name.
        let title = "two\u{1b}\u{0}\u{85}\u{ffff}\u{202e} & one".to_owned();
        let labels = PackingLabels { title, tick: "event".to_owned() };
        let svg = packing_svg(&problem, &packing, 0, &labels).expect("a figure");
        assert!(svg.contains("two &amp; one") && svg.contains("height 5 GiB"), "{svg}");
        let [long, short] = [LIVES[5], LIVES[4]]
            .map(|RGBColor(red, green, blue)| format!("#{red:02X}{green:02X}{blue:02X}"));
        assert!(svg.contains(&long) && svg.contains(&short), "{svg}");
    }
}
