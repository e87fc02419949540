//! What the script of a page reads: JSON whose columns of numbers are packed.
//!
//! A page of a million events holds hundreds of thousands of blocks. Each is a few small numbers,
//! most of them differences, in columns of their own; strings stand once and are named by number.

use std::collections::BTreeMap;

use serde::Serialize;

use super::pack::{chosen, column, rising, wandering};
use super::{Cell, Page};
use crate::metrics::{EnvelopePoint, FourLevels, MapBlock, MemoryMap, Shade};
use crate::report::text::printable;
use crate::trace::{Op, Role, Trace};
use crate::units::{NameId, SiteId, StreamId};

/// Callers of a site that are told.
const CALLERS_MAX: usize = 4;
/// Longest text of a frame, phase or name, in characters.
const TEXT_CHARS_MAX: usize = 120;

#[derive(Serialize)]
pub(super) struct Data {
    events: u64,
    /// The allocator shown at the beginning.
    shown: usize,
    /// Whether the time line shows every allocator.
    overlay: bool,
    marks: Marks,
    phases: Vec<String>,
    frames: Vec<String>,
    /// Frames of each site: its own, then its callers; the innermost last if it is another.
    sites: Vec<Vec<u64>>,
    names: Vec<String>,
    roles: Vec<&'static str>,
    streams: Vec<u64>,
    cells: Vec<CellData>,
}

#[derive(Serialize)]
struct Marks {
    n: usize,
    event: String,
    phase: String,
}

#[derive(Serialize)]
struct CellData {
    name: String,
    /// Events that its figures go over: the trace's, but for `chunk`.
    events: u64,
    /// The event of the first refusal.
    oom: Option<u64>,
    timeline: Option<Timeline>,
    map: Option<Map>,
}

#[derive(Serialize)]
struct Timeline {
    n: usize,
    has_deferred: bool,
    event: String,
    requested: String,
    allocated: String,
    active: String,
    reserved: String,
}

#[derive(Serialize)]
struct Map {
    n: usize,
    height: u64,
    lanes: Vec<u64>,
    /// Positions, and sizes of memory held, are in units of two to this power.
    shift: u32,
    parts: bool,
    from: String,
    life: String,
    wait: String,
    pos: String,
    sizes: String,
    sizes_n: usize,
    size: String,
    id: String,
    site: String,
    name: String,
    role: String,
    stream: String,
    held_n: usize,
    held_from: String,
    held_life: String,
    held_pos: String,
    held_size: String,
    shade: Option<Raster>,
    held_shade: Option<Raster>,
}

#[derive(Serialize)]
struct Raster {
    rows: u64,
    columns: u64,
    n: usize,
    runs: String,
}

/// Numbers given to what is named, in order of first use; 0 stands for nothing.
#[derive(Default)]
struct Numbers {
    numbers: BTreeMap<u32, u64>,
    order: Vec<u32>,
}

impl Numbers {
    fn of(&mut self, id: Option<u32>) -> u64 {
        let Some(id) = id else { return 0 };
        let next = self.order.len() as u64 + 1;
        *self.numbers.entry(id).or_insert_with(|| {
            self.order.push(id);
            next
        })
    }
}

impl Data {
    pub(super) fn of(page: &Page<'_>) -> Data {
        let trace = page.trace;
        let (mut sites, mut names) = (Numbers::default(), Numbers::default());
        let cells =
            page.cells.iter().map(|cell| cell_data(trace, cell, &mut sites, &mut names)).collect();
        let mut frames = Frames::default();
        let sites = sites.order.iter().map(|&site| frames.of_site(trace, SiteId(site))).collect();
        let name = |&name: &u32| trace.names.get(NameId(name).index()).map_or("", String::as_str);
        Data {
            events: trace.events.len() as u64,
            shown: page.shown,
            overlay: page.cells.len() > 1,
            marks: marks(trace),
            phases: trace.phases.iter().map(|phase| shown(phase)).collect(),
            frames: frames.texts,
            sites,
            names: names.order.iter().map(name).map(shown).collect(),
            roles: Role::ALL.iter().map(|role| role.name()).collect(),
            streams: trace.streams.iter().map(|stream| stream.handle).collect(),
            cells,
        }
    }

    /// As JSON that may stand inside a `<script>`: whatever the strings are, nothing in it ends the
    /// element, begins a comment or ends a line of JavaScript.
    pub(super) fn json(&self) -> Result<String, serde_json::Error> {
        Ok(in_script(&serde_json::to_string(self)?))
    }
}

/// Escapes JSON for a `<script>` element: these characters stand in strings only.
fn in_script(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => out.push(c),
        }
    }
    out
}

/// Text of a trace, without what drives terminals or turns the direction of writing, and not too
/// long.
fn shown(text: &str) -> String {
    let text = printable(text);
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

/// Every frame once.
#[derive(Default)]
struct Frames {
    texts: Vec<String>,
    numbers: BTreeMap<u32, u64>,
}

impl Frames {
    fn of_site(&mut self, trace: &Trace, site: SiteId) -> Vec<u64> {
        let Some((stack, own)) = trace.sites.in_model(site) else { return Vec::new() };
        let inner = stack.first().filter(|_| own > 0);
        let shown_frames = stack.iter().skip(own).take(1 + CALLERS_MAX).chain(inner);
        let mut numbers = Vec::new();
        for id in shown_frames {
            let Some(frame) = trace.sites.frames.get(id.index()) else { continue };
            let next = self.texts.len() as u64;
            let number = *self.numbers.entry(id.0).or_insert_with(|| {
                self.texts.push(shown(&frame.short()));
                next
            });
            numbers.push(number);
        }
        numbers
    }
}

fn marks(trace: &Trace) -> Marks {
    let marks = trace.events.iter().enumerate().filter_map(|(index, event)| match event.op {
        Op::Mark(phase) => Some((index as u64, u64::from(phase.0))),
        _ => None,
    });
    let (events, phases): (Vec<u64>, Vec<u64>) = marks.unzip();
    Marks { n: events.len(), event: rising(events), phase: column(phases) }
}

fn cell_data(trace: &Trace, cell: &Cell<'_>, sites: &mut Numbers, names: &mut Numbers) -> CellData {
    let points = &cell.observed.envelope;
    let map = cell.observed.map.as_ref();
    CellData {
        name: shown(&cell.label),
        events: cell.events(trace),
        oom: cell.observed.result.outcome.event_index,
        timeline: (!points.is_empty()).then(|| timeline(points)),
        map: map.map(|map| map_data(map, sites, names)),
    }
}

fn timeline(points: &[EnvelopePoint]) -> Timeline {
    let level = |of: fn(&FourLevels) -> u64| wandering(points.iter().map(|point| of(&point.max)));
    Timeline {
        n: points.len(),
        has_deferred: points.iter().any(|p| p.max.active_bytes > p.max.allocated_bytes),
        event: rising(points.iter().map(|point| point.event_begin)),
        requested: level(|levels| levels.requested_bytes),
        allocated: level(|levels| levels.allocated_bytes),
        active: level(|levels| levels.active_bytes),
        reserved: level(|levels| levels.reserved_bytes),
    }
}

fn map_data(map: &MemoryMap, sites: &mut Numbers, names: &mut Numbers) -> Map {
    let blocks = || map.blocks.iter();
    let stretches = || map.stretches.iter();
    // Blocks begin at multiples of 512 bytes, segments end there; odd ones would still be exact.
    let positions = blocks().map(|block| block.position_bytes);
    let places = positions.chain(stretches().flat_map(|s| [s.position_bytes, s.size_bytes]));
    let shift = places.fold(0, |bits, place| bits | place).trailing_zeros().min(20);
    let sizes: Vec<u64> = blocks().map(|block| block.size_bytes).collect();
    let (different, size) = chosen(&sizes);
    let site = |block: &MapBlock| sites.of(block.site.some().map(|site| site.0));
    let site: Vec<u64> = blocks().map(site).collect();
    let name = |block: &MapBlock| names.of(block.name.some().map(|name| name.0));
    let name: Vec<u64> = blocks().map(name).collect();
    let stream = |block: &MapBlock| block.stream.some().map_or(0, |StreamId(id)| u64::from(id));
    Map {
        n: map.blocks.len(),
        height: map.height_bytes,
        lanes: map.lane_ends_bytes.clone(),
        shift,
        parts: map.has_parts,
        from: rising(blocks().map(|block| block.from_event)),
        life: column(blocks().map(|block| block.to_event - block.from_event)),
        wait: column(blocks().map(|block| block.to_event - block.freed_event)),
        pos: column(blocks().map(|block| block.position_bytes >> shift)),
        sizes_n: different.len(),
        sizes: column(different),
        size,
        id: wandering(blocks().map(|block| u64::from(block.block.0))),
        site: column(site),
        name: column(name),
        role: column(blocks().map(|block| block.role as u64)),
        stream: column(blocks().map(stream)),
        held_n: map.stretches.len(),
        held_from: rising(stretches().map(|held| held.from_event)),
        held_life: column(stretches().map(|held| held.to_event - held.from_event)),
        held_pos: column(stretches().map(|held| held.position_bytes >> shift)),
        held_size: column(stretches().map(|held| held.size_bytes >> shift)),
        shade: raster(&map.block_shade),
        held_shade: raster(&map.stretch_shade),
    }
}

fn raster(shade: &Shade) -> Option<Raster> {
    if shade.cover.is_empty() {
        return None;
    }
    let runs: Vec<u64> = shade
        .cover
        .chunk_by(|a, b| a == b)
        .flat_map(|run| [run.len() as u64, u64::from(run[0])])
        .collect();
    Some(Raster { rows: shade.rows, columns: shade.columns, n: runs.len() / 2, runs: column(runs) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_string_ends_the_script_that_holds_it() {
        let hostile = "</script><script>alert(1)</script> <!-- ]]> &amp; \u{2028}\u{2029} \"";
        let json = in_script(&serde_json::to_string(hostile).unwrap());
        assert!(!json.contains(['<', '>', '&', '\u{2028}', '\u{2029}']), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), hostile);
    }
}
