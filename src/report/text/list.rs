//! The answer of `list`: allocators with their parameters, cost profiles, trace formats.

use serde::Serialize;

use super::grid::{Align, Grid};
use super::{Style, Tone, wrapped};
use crate::alloc::registry::AllocatorInfo;
use crate::device::CostProfile;

/// A file format that traces are read from or written to. Field names are the JSON names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TraceFormatInfo {
    /// Its name; what `convert --to` takes, where it can be written.
    pub name: &'static str,
    /// How its files are usually called.
    pub files: &'static str,
    /// Whether this program reads it.
    pub read: bool,
    /// Whether this program writes it.
    pub written: bool,
    /// One line about it.
    pub summary: &'static str,
}

/// Everything there is to choose from, as text.
pub fn list(
    allocators: &[AllocatorInfo],
    profiles: &[CostProfile],
    formats: &[TraceFormatInfo],
    style: Style,
) -> String {
    let mut out = style.paint(Tone::Heading, "allocators (--alloc NAME[+key=value]...)") + "\n";
    for allocator in allocators {
        out.push_str(&wrapped("  ", &format!("{}: {}", allocator.name, allocator.summary), "    "));
        for (key, summary) in &allocator.params {
            out.push_str(&wrapped("      ", &format!("{key}: {summary}"), "          "));
        }
    }
    out.push('\n');
    out.push_str(&style.paint(Tone::Heading, "cost profiles (--profile NAME)"));
    out.push('\n');
    for profile in profiles {
        let CostProfile { name, gpu, driver, date, derived, method, .. } = profile;
        let origin = if *derived { "derived for" } else { "measured on" };
        let text = format!("{name}: {origin} {gpu}, driver {driver}, {date}; {method}");
        out.push_str(&wrapped("  ", &text, "    "));
    }
    out.push('\n');
    out.push_str(&style.paint(Tone::Heading, "trace formats (told by content; .gz and .zst too)"));
    out.push('\n');
    out.push_str(&formats_table(formats).render(style));
    out
}

fn formats_table(formats: &[TraceFormatInfo]) -> Grid {
    let mut grid = Grid::new(&[Align::Left; 4]);
    for format in formats {
        let uses = match (format.read, format.written) {
            (true, true) => "read, written",
            (true, false) => "read",
            (false, true) => "written",
            (false, false) => "left out",
        };
        let cells = [&format!("  {}", format.name), format.files, uses, format.summary];
        grid.row(cells.map(str::to_owned), String::new());
    }
    grid
}
