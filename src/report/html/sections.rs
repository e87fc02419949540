//! What a page says without its script.

use super::tables::{Entry, table_head, table_row};
use super::unused::unused;
use super::{Cell, IndexEntry, Page, escaped, size};
use crate::engine::{RunResult, Status, StepTime};
use crate::metrics::{MemoryMap, StepPeaks};
use crate::report::text::{
    SizeUnit, Style, capacity, counted, duration, grouped, notes, percent, printable, refusal_note,
    setup, trace_line,
};

/// Blocks of a figure that stands still.
const STILL_MAX: u64 = super::figures::RECTANGLES_MAX as u64;
/// Rows of the table of steps, of which those in the middle are left out.
const STEPS_MAX: usize = 400;

/// The figures of a page.
pub(super) struct Figures {
    pub(super) timeline: String,
    pub(super) comparison: Option<String>,
    pub(super) map: Option<String>,
}

/// What the window is called.
pub(super) fn title(page: &Page<'_>) -> String {
    format!("{} - fraglab", name_of(shown(page)))
}

fn shown<'a>(page: &Page<'a>) -> &'a RunResult {
    &page.cells[page.shown].observed.result
}

fn name_of(result: &RunResult) -> String {
    let name = printable(&result.trace.name);
    if name.is_empty() { "trace".to_owned() } else { name.into_owned() }
}

/// The whole body but for the data and the script.
pub(super) fn body(page: &Page<'_>, figures: &Figures) -> String {
    let mut out = header(page);
    out.push_str("<main>\n");
    if let Some(comparison) = &figures.comparison {
        out.push_str(&allocators(page, comparison));
    }
    out.push_str(&timeline(page, &figures.timeline));
    if page.cells.iter().any(|cell| cell.observed.map.is_some()) {
        out.push_str(&map(page, figures.map.as_deref()));
    }
    for (index, cell) in page.cells.iter().enumerate() {
        out.push_str(&unused(index, cell, page.cells.len() > 1));
        out.push_str(&steps(index, cell, page.cells.len() > 1));
    }
    out.push_str("</main>\n");
    out.push_str(&footer(page));
    out.push_str("<div id=\"tip\" role=\"status\" hidden></div>\n");
    out
}

fn header(page: &Page<'_>) -> String {
    let result = shown(page);
    let share_is_bound = page.trace.header.history.share_is_bound();
    let line = trace_line(result, share_is_bound, Style::default());
    let facts = line.split_once(": ").map_or("", |(_, facts)| facts.trim_end()).to_owned();
    let capacity = capacity(result);
    let limit_bytes = result.allocator.limit_bytes;
    let device = setup(result, Some(&capacity), page.settings, limit_bytes).join("; ");
    let mut out = format!(
        "<header>\n<h1>{}</h1>\n<p class=\"facts\">{}<br>{}</p>\n<p class=\"headline\">{}</p>\n",
        escaped(&name_of(result)),
        escaped(&facts.split_whitespace().collect::<Vec<_>>().join(" ")),
        escaped(&device),
        headline(page),
    );
    let results = || page.cells.iter().map(|cell| &cell.observed.result);
    let mut remarks: Vec<String> = Vec::new();
    for cell in page.cells {
        let of = if page.cells.len() > 1 { format!("{}: ", cell.label) } else { String::new() };
        remarks.extend(notes(&cell.observed.result).iter().map(|note| format!("{of}{note}")));
    }
    remarks.extend(refusal_note(page.trace.first_attempt(), results()));
    for remark in remarks {
        out.push_str(&format!("<p class=\"note\">{}</p>\n", escaped(&remark)));
    }
    out.push_str(&cards(result));
    out.push_str("</header>\n");
    out
}

/// The answer in a sentence or two.
fn headline(page: &Page<'_>) -> String {
    let result = shown(page);
    let name = format!("<strong>{}</strong>", escaped(&page.cells[page.shown].label));
    let peaks = &result.peaks;
    let reserved = size(peaks.reserved_bytes_peak);
    let requested = size(peaks.requested_bytes_peak);
    let mut out = match result.outcome.status {
        Status::Ok if result.excess_bytes > 0 => format!(
            "{name} holds <strong>{reserved}</strong> for blocks that never need more than \
             <strong>{requested}</strong> at once: {}, <strong>{}</strong>, is fragmentation.",
            size(result.excess_bytes.unsigned_abs()),
            percent(result.fragmentation),
        ),
        Status::Ok => format!(
            "{name} holds <strong>{reserved}</strong> for <strong>{requested}</strong> of blocks: \
             nothing is lost to fragmentation."
        ),
        Status::Oom => format!(
            "{name} <strong class=\"bad\">runs out of memory</strong>{}, with {reserved} reserved at \
             its peak.",
            asked(result)
        ),
        Status::Failed => format!("{name} <strong class=\"bad\">could not be replayed</strong>."),
    };
    let best = page
        .cells
        .iter()
        .filter(|cell| cell.observed.result.outcome.status == Status::Ok)
        // Nobody can pay for one device call a block; it shows what there is to win.
        .filter(|cell| cell.observed.result.allocator.name != "native")
        .min_by_key(|cell| cell.observed.result.peaks.reserved_bytes_peak);
    if let Some(best) = best
        && best.observed.result.peaks.reserved_bytes_peak < peaks.reserved_bytes_peak
    {
        out.push_str(&format!(
            " With <strong>{}</strong> it is <strong>{}</strong>.",
            escaped(&best.label),
            size(best.observed.result.peaks.reserved_bytes_peak),
        ));
    }
    out
}

/// ` at event 4,012, asked for 1.95 GiB`
fn asked(result: &RunResult) -> String {
    let outcome = &result.outcome;
    let event = outcome.event_index.map(|event| format!(" at event {}", grouped(event)));
    let bytes = outcome.requested_bytes.map(|bytes| format!(", asked for {}", size(bytes)));
    event.unwrap_or_default() + &bytes.unwrap_or_default()
}

fn cards(result: &RunResult) -> String {
    let peaks = &result.peaks;
    let sized = |bytes: u64| size(bytes);
    let whole = result.outcome.status == Status::Ok;
    let cards = [
        ("requested", "requested peak", sized(peaks.requested_bytes_peak)),
        ("allocated", "allocated peak", sized(peaks.allocated_bytes_peak)),
        ("reserved", "reserved peak", sized(peaks.reserved_bytes_peak)),
        ("", "fragmentation", if whole { percent(result.fragmentation) } else { "-".to_owned() }),
        ("", "device calls", grouped(result.calls.total())),
        ("", "cost of these calls", duration(result.time.allocator_device_ns)),
    ];
    let mut out = String::from("<ul class=\"cards\">\n");
    for (level, label, value) in cards {
        let dot = match level {
            "" => String::new(),
            level => format!("<i style=\"background:var(--{level})\"></i>"),
        };
        out.push_str(&format!("<li><b>{value}</b><span>{dot}{label}</span></li>\n"));
    }
    out.push_str("</ul>\n");
    out
}

/// The allocators side by side.
fn allocators(page: &Page<'_>, figure: &str) -> String {
    let peaks = page.cells.iter().map(|cell| cell.observed.result.peaks.reserved_bytes_peak);
    let unit = SizeUnit::fitting(peaks.max().unwrap_or(0));
    let compared = page.cells.iter().any(|cell| cell.compared.is_some());
    let sized = |what: &str| format!("{what}, {}", unit.name);
    let titles = [sized("reserved peak"), sized("excess"), sized("smallest device")];
    let mut heads: Vec<(&str, &str)> = vec![
        ("allocator", ""),
        ("status", "left"),
        (&titles[0], ""),
        (&titles[1], ""),
        ("fragmentation", ""),
        ("utilization", ""),
    ];
    if compared {
        heads.push(("waste removed", ""));
    }
    heads.extend([("device calls", ""), ("their cost", "")]);
    if compared {
        heads.extend([(&*titles[2], ""), ("over requested", "")]);
    }
    let mut out = String::from("<section>\n<h2>Allocators</h2>\n");
    out.push_str(&format!(
        "<p class=\"lead\">{}<span class=\"needs-script\" hidden>Choose a row, and the figures below \
         are of that allocator.</span></p>\n",
        same_requests(page)
    ));
    out.push_str(&format!("<figure class=\"chart\">{figure}</figure>\n"));
    out.push_str("<div class=\"table\">");
    out.push_str(&table_head(&heads, "Allocators side by side"));
    for (index, cell) in page.cells.iter().enumerate() {
        let entries = allocator_row(cell, unit, compared);
        let attributes = format!(" data-cell=\"{index}\" style=\"cursor:pointer\"");
        out.push_str(&table_row(&heads, &entries, &attributes));
    }
    out.push_str("</tbody></table></div>\n</section>\n");
    out
}

/// Says so if all allocators met the same requests, which one that ran out of memory did not, nor
/// does `chunk`, which asks for its own.
fn same_requests(page: &Page<'_>) -> String {
    let peak = |cell: &Cell<'_>| cell.observed.result.peaks.requested_bytes_peak;
    let first = peak(&page.cells[0]);
    if page.cells.iter().any(|cell| peak(cell) != first) {
        return String::new();
    }
    format!("All see the same requests, {} at once at the most. ", size(first))
}

fn allocator_row(cell: &Cell<'_>, unit: SizeUnit, compared: bool) -> Vec<Entry> {
    let result = &cell.observed.result;
    let status = result.outcome.status;
    // What a peak means in the end is told of a whole replay only.
    let whole = (status == Status::Ok).then_some(());
    let status_text = format!("<span class=\"{0}\">{0}</span>", status.name());
    let excess = |_| {
        let text = unit.signed_cell(result.excess_bytes);
        let title = format!("{} bytes", result.excess_bytes);
        Entry { text, value: result.excess_bytes.to_string(), title }
    };
    let mut entries = vec![
        Entry::text(&cell.label),
        Entry { text: status_text, value: String::new(), title: String::new() },
        Entry::bytes(unit, result.peaks.reserved_bytes_peak),
        Entry::maybe(whole, excess),
        Entry::maybe(whole, |()| Entry::share(result.fragmentation)),
        Entry::maybe(whole, |()| Entry::share(result.utilization)),
    ];
    if compared {
        let removed = cell.compared.and_then(|compared| compared.waste_removed);
        entries.push(Entry::maybe(removed, Entry::share));
    }
    entries.push(Entry::count(result.calls.total()));
    entries.push(Entry::time(result.time.allocator_device_ns));
    if compared {
        let smallest = cell.compared.and_then(|compared| compared.smallest_capacity.as_ref());
        let bytes = smallest.and_then(|smallest| smallest.capacity_bytes);
        entries.push(Entry::maybe(bytes, |bytes| Entry::bytes(unit, bytes)));
        let over = smallest.and_then(|smallest| smallest.over_requested);
        entries.push(Entry::maybe(over, Entry::share));
    }
    entries
}

fn timeline(page: &Page<'_>, figure: &str) -> String {
    let chooser = if page.cells.len() > 1 { chooser(page) } else { String::new() };
    format!(
        "<section>\n<h2>Time line</h2>\n\
         <p class=\"lead\">What the allocator reserved, and what of it was requested. Between the \
         two lies what is held and not used.</p>\n\
         <div class=\"bar-row needs-script\" hidden><div class=\"legend\" id=\"line-legend\"></div>\
         <div class=\"tools\">{chooser}</div></div>\n\
         <figure class=\"chart\"><div class=\"without-script\">{figure}</div>\
         <canvas id=\"timeline\" class=\"needs-script\" tabindex=\"0\" role=\"img\" hidden \
         aria-label=\"Memory levels over the events of the trace; plus, minus and the arrow keys move \
         the view\"></canvas></figure>\n</section>\n"
    )
}

fn chooser(page: &Page<'_>) -> String {
    let options: String = page
        .cells
        .iter()
        .enumerate()
        .map(|(index, cell)| format!("<option value=\"{index}\">{}</option>", escaped(&cell.label)))
        .collect();
    format!("<label>allocator <select id=\"cell\">{options}</select></label>")
}

fn map(page: &Page<'_>, figure: Option<&str>) -> String {
    let still = format!("Without a script this figure shows the {} largest.", grouped(STILL_MAX));
    let still = format!("<p class=\"hint\">{still}</p>");
    let figure = figure.map(|svg| format!("<div class=\"without-script\">{svg}{still}</div>"));
    let figure = figure.unwrap_or_default();
    let told: String = page
        .cells
        .iter()
        .enumerate()
        .filter_map(|(index, cell)| Some(map_told(index, cell.observed.map.as_ref()?)))
        .collect();
    format!(
        "<section id=\"map-section\">\n<h2>Memory map</h2>\n\
         <p class=\"lead\">Each rectangle is a block: how high it lies and how large it is, from its \
         alloc to its free. Grey is memory that is held and free.{told}</p>\n\
         <div class=\"bar-row needs-script\" hidden>\
         <div class=\"legend\" id=\"map-legend\"></div>\
         <div class=\"tools\">\
         <label>colour by <select id=\"mode\"></select></label>\
         <input id=\"find\" type=\"search\" placeholder=\"find a site, name or phase\" \
         aria-label=\"Find blocks by site, name, phase or number\">\
         <button type=\"button\" id=\"nearer\" aria-label=\"Nearer\">+</button>\
         <button type=\"button\" id=\"farther\" aria-label=\"Farther\">&minus;</button>\
         <button type=\"button\" id=\"whole\">whole</button></div></div>\n\
         <figure class=\"chart\">{figure}\
         <canvas id=\"map\" class=\"needs-script\" tabindex=\"0\" role=\"img\" hidden \
         aria-label=\"Memory map: blocks by event and position; plus, minus and the arrow keys move \
         the view\"></canvas>\n\
         <figcaption class=\"hint needs-script\" hidden>Drag to look nearer, shift-drag to move, \
         double-click for the whole. Once clicked, the wheel and the keys + &minus; 0 and the arrows \
         work too.</figcaption></figure>\n</section>\n"
    )
}

/// What is drawn one by one, and how the memory is set side by side.
fn map_told(index: usize, map: &MemoryMap) -> String {
    let shown = map.blocks.len() as u64;
    let what = if map.has_parts { "block part" } else { "block" };
    let mut text = if map.blocks_total == 0 {
        "There is none here.".to_owned()
    } else if shown == map.blocks_total {
        format!("All {} are drawn.", counted(shown, what))
    } else {
        format!(
            "The {} largest of {} are drawn one by one; the others are a shade, as deep as they are \
             dense.",
            grouped(shown),
            counted(map.blocks_total, what)
        )
    };
    let reserved_lanes = map.lane_ends_bytes.len().saturating_sub(1) as u64;
    let has_shelf = map.lane_ends_bytes.first().is_some_and(|end| *end > 0);
    if has_shelf {
        text.push_str(
            " Segments stand one above the other in order of appearance; one that takes the place \
             of another fits the gap that it left.",
        );
    }
    if reserved_lanes > 0 {
        let above = if has_shelf { " above them" } else { "" };
        text.push_str(&format!(
            " {} mapped page by page{above} {} shown as far as ever mapped.",
            counted(reserved_lanes, "range"),
            if reserved_lanes == 1 { "is" } else { "are" }
        ));
    }
    if map.has_parts {
        text.push_str(
            " A stitched block lies in several pieces of memory, and is drawn in each of them.",
        );
    }
    format!(" <span data-of-cell=\"{index}\">{text}</span>")
}

/// Attributes of a section that belongs to one allocator, and what to add to its title.
pub(super) fn of_cell(index: usize, cell: &Cell<'_>, several: bool) -> (String, String) {
    if !several {
        return (String::new(), String::new());
    }
    (format!(" data-of-cell=\"{index}\""), format!(": {}", escaped(&cell.label)))
}

/// What each step needed and what the allocator's device calls took in it.
fn steps(index: usize, cell: &Cell<'_>, several: bool) -> String {
    let times = &cell.observed.result.time.steps;
    let peaks = &cell.observed.steps;
    if !times.iter().any(StepTime::is_step) {
        return String::new();
    }
    let (attributes, name) = of_cell(index, cell, several);
    let most = peaks.iter().map(|step| step.reserved_bytes_peak).max();
    let unit = SizeUnit::fitting(most.unwrap_or(0));
    let titles = ["requested", "allocated", "reserved"].map(|l| format!("{l} peak, {}", unit.name));
    let heads: [(&str, &str); 8] = [
        ("step", ""),
        (&titles[0], ""),
        (&titles[1], ""),
        (&titles[2], ""),
        ("device calls", ""),
        ("their cost", ""),
        ("recorded time", ""),
        ("cost / time", ""),
    ];
    let mut out = format!(
        "<section{attributes}>\n<h2>Steps{name}</h2>\n<p class=\"lead\">Peaks inside each step, and \
         the allocator's calls of the device.</p>\n<div class=\"table\">"
    );
    out.push_str(&table_head(&heads, "Steps"));
    let left_out = times.len().saturating_sub(STEPS_MAX);
    for (at, step) in times.iter().enumerate() {
        if left_out > 0 && (STEPS_MAX / 2..STEPS_MAX / 2 + left_out).contains(&at) {
            continue;
        }
        let peaks = peaks_of(peaks, times, at);
        out.push_str(&table_row(&heads, &step_row(step, peaks, unit), ""));
    }
    out.push_str("</tbody></table></div>\n");
    if left_out > 0 {
        let rows = counted(left_out as u64, "step");
        out.push_str(&format!("<p class=\"note\">{rows} in the middle are left out.</p>\n"));
    }
    out.push_str("</section>\n");
    out
}

/// The peaks that belong to a row of the times: both tell the parts of a run in order, and only what
/// lies before the first step may be absent from the times.
fn peaks_of<'a>(peaks: &'a [StepPeaks], times: &[StepTime], at: usize) -> Option<&'a StepPeaks> {
    let skipped = peaks.len().checked_sub(times.len())?;
    peaks.get(at + skipped).filter(|peaks| peaks.name == times[at].name)
}

fn step_row(step: &StepTime, peaks: Option<&StepPeaks>, unit: SizeUnit) -> Vec<Entry> {
    let level =
        |of: fn(&StepPeaks) -> u64| Entry::maybe(peaks, |peaks| Entry::bytes(unit, of(peaks)));
    let recorded = (step.recorded_ns > 0).then_some(step.recorded_ns);
    vec![
        Entry::text(&step.name),
        level(|peaks| peaks.requested_bytes_peak),
        level(|peaks| peaks.allocated_bytes_peak),
        level(|peaks| peaks.reserved_bytes_peak),
        Entry::count(step.calls),
        Entry::time(step.allocator_device_ns),
        Entry::maybe(recorded, Entry::time),
        Entry::maybe(step.share, Entry::share),
    ]
}

fn footer(page: &Page<'_>) -> String {
    let words = [
        ("requested", "what the program asked for and has not freed"),
        ("allocated", "the same blocks at the size that they were rounded to"),
        ("active", "allocated, and blocks freed by the program that another stream still uses"),
        ("reserved", "device memory that the allocator holds"),
        ("fragmentation", "1 - requested peak / reserved peak"),
        ("excess", "reserved peak - requested peak: what an ideal allocator would save"),
        ("hard", "free, in a segment that a block in use keeps from being given back"),
        ("soft", "free, in segments or pages without any block in use"),
    ];
    let words: String = words
        .iter()
        .map(|(word, meaning)| format!("<dt>{word}</dt><dd>{meaning}</dd>\n"))
        .collect();
    format!(
        "<footer>\n<dl>\n{words}</dl>\n<p>Made by fraglab {}. This page is one file and asks no \
         network; bytes stand under the pointer. {}</p>\n</footer>\n",
        env!("CARGO_PKG_VERSION"),
        match page.cells.len() {
            1 => "timeline.svg and map.svg beside it are for print.",
            _ =>
                "timeline.svg, map.svg (of the allocator shown first) and comparison.svg beside it are \
                  for print.",
        }
    )
}

/// The body of a page that leads to others.
pub(super) fn index(entries: &[IndexEntry]) -> String {
    let heads: [(&str, &str); 6] = [
        ("trace", ""),
        ("allocator", "left"),
        ("status", "left"),
        ("requested peak", ""),
        ("reserved peak", ""),
        ("fragmentation", ""),
    ];
    let mut out = format!(
        "<header>\n<h1>{}</h1>\n<p class=\"facts\">Each name leads to the page of that trace.</p>\n\
         </header>\n<main>\n<section>\n<div class=\"table\">",
        counted(entries.len() as u64, "trace")
    );
    out.push_str(&table_head(&heads, "Traces"));
    for entry in entries {
        for result in &entry.results {
            let status = result.outcome.status;
            let link = format!("<a href=\"{}\">{}</a>", escaped(&entry.href), escaped(&entry.name));
            let whole = (status == Status::Ok).then_some(result.fragmentation);
            let status = format!("<span class=\"{0}\">{0}</span>", status.name());
            let plain = |text: String| Entry { text, value: String::new(), title: String::new() };
            let entries = [
                plain(link),
                Entry::text(&result.allocator.name),
                plain(status),
                Entry::size(result.peaks.requested_bytes_peak),
                Entry::size(result.peaks.reserved_bytes_peak),
                Entry::maybe(whole, Entry::share),
            ];
            out.push_str(&table_row(&heads, &entries, ""));
        }
    }
    out.push_str("</tbody></table></div>\n</section>\n</main>\n");
    out
}
