//! The answer of `diff`: what sets two runs apart, in words first, then figures side by side.

use serde_json::Value;

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, WIDTH, counted, grouped, percent, printable, wrapped};
use crate::experiment::diff::{
    CellDiff, DiffSide, FigureDiff, GroupBy, GroupDiff, GroupTable, Live, ResultDiff, SizeCount,
    StepDiff, StepLevels, TraceDiff,
};
use crate::metrics::Split;
use crate::units::{Bytes, signed_difference};

/// Most steps that are shown.
const STEPS_MAX: usize = 12;

/// Most sizes that are named.
const SIZES_MAX: usize = 6;

/// Two traces. `top` rows of each table are shown.
pub fn diff_traces(diff: &TraceDiff, top: usize, style: Style) -> String {
    let mut out = side_line("A", &diff.a, style);
    out.push_str(&side_line("B", &diff.b, style));
    out.push('\n');
    out.push_str(&wrapped("", &verdict(diff), "  "));
    out.push('\n');
    out.push_str(&peaks_table(diff, style));
    out.push('\n');
    out.push_str(&group_tables(diff, top, style));
    out.push_str(&steps_table(&diff.steps, style));
    out.push_str(&sizes_line("only A asks for", &diff.sizes_only_a));
    out.push_str(&sizes_line("only B asks for", &diff.sizes_only_b));
    out
}

fn side_line(letter: &str, side: &DiffSide, style: Style) -> String {
    let settings = side.settings.as_deref().filter(|settings| !settings.is_empty());
    let settings = settings.map(|text| format!(", settings {}", printable(text)));
    let text = format!(
        "{}: {}, {}{}; through {} on {}",
        printable(&side.name),
        counted(side.events, "event"),
        printable(&side.source),
        settings.unwrap_or_default(),
        printable(&side.allocator),
        side.capacity_bytes.map_or_else(
            || "a device without end".to_owned(),
            |bytes| { Bytes(bytes).to_string() }
        ),
    );
    let first = format!("{} ", style.paint(Tone::Heading, letter));
    let mut out = wrapped(&first, &text, "  ");
    if let Some(message) = &side.outcome.message {
        out.push_str(&wrapped("  ", &format!("out of memory: {}", printable(message)), "    "));
    }
    out
}

/// What a person wants to know first.
fn verdict(diff: &TraceDiff) -> String {
    let [a, b] = [&diff.a, &diff.b];
    let same_peak = a.requested_bytes_peak == b.requested_bytes_peak;
    let asked = match (diff.same_requests, same_peak) {
        (true, _) => "the program asked for the same in both".to_owned(),
        (false, true) if diff.same_sizes => {
            "the program asked for the same in both, though not in the same order".to_owned()
        }
        (false, true) => format!(
            "both programs need {} at their requested peak, though not by the same requests",
            Bytes(b.requested_bytes_peak)
        ),
        (false, false) => format!(
            "B asks for {} at its requested peak{}",
            more_or_less(a.requested_bytes_peak, b.requested_bytes_peak),
            causes(diff)
        ),
    };
    let held = match (a.peaks.reserved_bytes_peak, b.peaks.reserved_bytes_peak) {
        (a, b) if a == b => format!("the allocators hold the same, {}", Bytes(a)),
        (a, b) => {
            format!("B's allocator holds {} ({} -> {})", more_or_less(a, b), Bytes(a), Bytes(b))
        }
    };
    format!("{asked}; {held}.")
}

/// `, of which 980 MiB are of model.py:12 forward and ...`: the groups that moved most in the
/// direction of the whole, each at least a tenth of it, if live blocks are compared at the requested
/// peak.
fn causes(diff: &TraceDiff) -> String {
    let whole = signed_difference(diff.live_a.bytes, diff.live_b.bytes);
    let groups = diff.tables.first().filter(|_| diff.at == "requested_peak");
    let groups = groups.iter().flat_map(|table| &table.groups);
    let enough = (whole.unsigned_abs() / 10).max(1);
    let moved = groups.filter(|it| {
        it.delta_bytes.signum() == whole.signum() && it.delta_bytes.unsigned_abs() >= enough
    });
    let named = moved.take(2).map(|it| {
        format!("{} in \"{}\"", Bytes(it.delta_bytes.unsigned_abs()), printable(&it.group))
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() { String::new() } else { format!(", {}", named.join(" and ")) }
}

/// `23.3 GiB less`
fn more_or_less(a: u64, b: u64) -> String {
    let word = if b < a { "less" } else { "more" };
    format!("{} {word}", Bytes(a.abs_diff(b)))
}

/// How differences are written: in a unit of their own, so that small ones of large sizes show.
#[derive(Clone, Copy)]
struct Deltas {
    unit: SizeUnit,
    all_zero: bool,
}

impl Deltas {
    fn fitting(deltas: impl Iterator<Item = i64>) -> Deltas {
        let largest_bytes = deltas.map(i64::unsigned_abs).max().unwrap_or(0);
        Deltas { unit: SizeUnit::fitting(largest_bytes), all_zero: largest_bytes == 0 }
    }

    fn head(self) -> String {
        if self.all_zero { "B - A".to_owned() } else { format!("B - A {}", self.unit.name) }
    }

    fn cell(self, delta: i64) -> String {
        match self.unit.signed_cell(delta).as_str() {
            "0.00" | "-0.00" if delta == 0 => "0".to_owned(),
            "-0.00" => "-<0.01".to_owned(),
            "0.00" => "<0.01".to_owned(),
            text => text.to_owned(),
        }
    }
}

/// A row of the table of peaks: bytes of both.
type SizeRow = (&'static str, u64, u64);

fn peaks_table(diff: &TraceDiff, style: Style) -> String {
    let [a, b] = [&diff.a.peaks, &diff.b.peaks];
    let mut rows: Vec<SizeRow> = vec![
        ("requested peak", a.requested_bytes_peak, b.requested_bytes_peak),
        ("allocated peak", a.allocated_bytes_peak, b.allocated_bytes_peak),
        ("active peak", a.active_bytes_peak, b.active_bytes_peak),
        ("reserved peak", a.reserved_bytes_peak, b.reserved_bytes_peak),
    ];
    if let (Some(a), Some(b)) = (&diff.a.split, &diff.b.split) {
        let kinds = split_rows(a, b).into_iter();
        rows.extend(kinds.filter(|&(_, a, b)| a > 0 || b > 0));
    }
    let unit = SizeUnit::fitting(rows.iter().map(|&(_, a, b)| a.max(b)).max().unwrap_or(0));
    let mut grid =
        Grid::new(&[Align::Left, Align::Right, Align::Right, Align::Right, Align::Right]);
    let deltas = Deltas::fitting(rows.iter().map(|&(_, a, b)| signed_difference(a, b)));
    let (head_a, head_b) = (format!("A {}", unit.name), format!("B {}", unit.name));
    grid.head(["", &head_a, &head_b, &deltas.head(), "change"]);
    for (name, a, b) in rows {
        let cells = [
            name.to_owned(),
            unit.cell(a),
            unit.cell(b),
            deltas.cell(signed_difference(a, b)),
            change(a as f64, b as f64),
        ];
        grid.row(cells, String::new());
    }
    let [a, b] = [&diff.a, &diff.b];
    let points = 100.0 * (b.fragmentation - a.fragmentation);
    let fragmentation = [percent(a.fragmentation), percent(b.fragmentation)];
    let [before, after] = fragmentation;
    grid.row(
        ["fragmentation".to_owned(), before, after, format!("{points:.1}"), "points".to_owned()],
        String::new(),
    );
    for (name, a, b) in [
        ("retries", a.alloc_retries, b.alloc_retries),
        ("device calls", a.device_calls, b.device_calls),
    ] {
        let delta = signed_difference(a, b);
        let sign = if delta < 0 { "-" } else { "" };
        let delta = format!("{sign}{}", grouped(delta.unsigned_abs()));
        let cells = [name.to_owned(), grouped(a), grouped(b), delta, change(a as f64, b as f64)];
        grid.row(cells, String::new());
    }
    grid.render(style)
}

/// The kinds of unused memory, each at its own reserved peak or first refusal.
fn split_rows(a: &Split, b: &Split) -> [SizeRow; 5] {
    [
        ("  unused: internal", a.internal_bytes, b.internal_bytes),
        ("  unused: deferred", a.deferred_bytes, b.deferred_bytes),
        ("  unused: stream", a.stream_bytes, b.stream_bytes),
        ("  unused: hard", a.hard_bytes, b.hard_bytes),
        ("  unused: soft", a.soft_bytes, b.soft_bytes),
    ]
}

/// `-32.1%`, `+1,030%`; `new` where there was nothing.
fn change(a: f64, b: f64) -> String {
    match b / a {
        _ if a == b => percent(0.0),
        _ if a == 0.0 => "new".to_owned(),
        times => relative(times - 1.0),
    }
}

/// A growth as percent with its sign, from ten times on in whole ones.
fn relative(fraction: f64) -> String {
    let sign = if fraction < 0.0 { "-" } else { "+" };
    match 100.0 * fraction.abs() {
        0.0 => percent(0.0),
        small @ ..0.05 if small > 0.0 => format!("{sign}<0.1%"),
        large @ 999.95.. => format!("{sign}{}%", grouped(large.round() as u64)),
        usual => format!("{sign}{usual:.1}%"),
    }
}

/// The live blocks by every criterion; a line if they are the same by all of them.
fn group_tables(diff: &TraceDiff, top: usize, style: Style) -> String {
    let groups = || diff.tables.iter().flat_map(|table| &table.groups);
    if groups().all(|group| group.a == group.b) {
        let live = counted(diff.live_a.blocks, "block");
        let text = format!("{}: {live} of {} in both", moment(diff), Bytes(diff.live_a.bytes));
        return wrapped("", &text, "  ");
    }
    let tables = diff.tables.iter().map(|table| group_table(diff, table, top, style));
    tables.collect::<Vec<_>>().join("\n")
}

/// `live at the requested peak (A event 7; B event 9 in step1.backward)`
fn moment(diff: &TraceDiff) -> String {
    let at = match diff.at {
        "requested_peak" => "at the requested peak",
        "reserved_peak" => "at the reserved peak",
        _ => "there",
    };
    let place = |letter: &str, side: &DiffSide| match (side.at_event, &side.at_phase) {
        (None, _) => format!("{letter} before the first event"),
        (Some(event), None) => format!("{letter} event {}", grouped(event)),
        (Some(event), Some(phase)) => {
            format!("{letter} event {} in {}", grouped(event), printable(phase))
        }
    };
    format!("live {at} ({}; {})", place("A", &diff.a), place("B", &diff.b))
}

fn group_table(diff: &TraceDiff, table: &GroupTable, top: usize, style: Style) -> String {
    let what = match table.by {
        GroupBy::Site => "site",
        GroupBy::Phase => "phase of the alloc",
        GroupBy::Role => "role",
        GroupBy::Size => "size",
        GroupBy::PhaseAndSize => "phase of the alloc, size",
    };
    let text = format!("{}, by {what}:", moment(diff));
    let mut out = wrapped("", &text, "  ");
    let unit = SizeUnit::fitting(diff.live_a.bytes.max(diff.live_b.bytes));
    let mut grid = Grid::of_columns(1, 5);
    let (head_a, head_b) = (format!("A {}", unit.name), format!("B {}", unit.name));
    let all = summed(&table.groups);
    let moved = table.groups.iter().map(|it| it.delta_bytes).chain([all.delta_bytes]);
    let units = (unit, Deltas::fitting(moved));
    grid.head([what, "blocks", &head_a, "blocks", &head_b, &units.1.head()]);
    let shown = table.groups.len().min(top);
    let (first, rest) = table.groups.split_at(shown);
    for group in first {
        let tone = if group.delta_bytes == 0 { Tone::Plain } else { Tone::Heading };
        grid.row(group_cells(&shortened(&group.group), group, units, tone), String::new());
    }
    if !rest.is_empty() {
        let name = format!("others ({})", grouped(rest.len() as u64));
        grid.row(group_cells(&name, &summed(rest), units, Tone::Plain), String::new());
    }
    grid.row(group_cells("all", &all, units, Tone::Plain), String::new());
    out.push_str(&grid.render(style));
    out
}

/// A name that leaves room for the numbers.
fn shortened(name: &str) -> String {
    const CHARS_MAX: usize = WIDTH - 42;
    let name = printable(name);
    match name.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.into_owned(),
    }
}

fn group_cells(
    name: &str,
    group: &GroupDiff,
    (unit, deltas): (SizeUnit, Deltas),
    tone: Tone,
) -> [Cell; 6] {
    [
        name.to_owned().into(),
        grouped(group.a.blocks).into(),
        unit.cell(group.a.bytes).into(),
        grouped(group.b.blocks).into(),
        unit.cell(group.b.bytes).into(),
        Cell::toned(deltas.cell(group.delta_bytes), tone),
    ]
}

/// Groups as one.
fn summed(groups: &[GroupDiff]) -> GroupDiff {
    let sum = |of: fn(&GroupDiff) -> Live| {
        groups.iter().map(of).fold(Live::default(), |sum, it| Live {
            blocks: sum.blocks + it.blocks,
            bytes: sum.bytes + it.bytes,
        })
    };
    let (a, b) = (sum(|it| it.a), sum(|it| it.b));
    let delta_bytes = signed_difference(a.bytes, b.bytes);
    GroupDiff { group: String::new(), a, b, delta_bytes }
}

/// Peaks step by step; nothing without steps.
fn steps_table(steps: &[StepDiff], style: Style) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let levels = || steps.iter().flat_map(|step| step.a.iter().chain(&step.b));
    let unit = SizeUnit::fitting(levels().map(|it| it.reserved_bytes_peak).max().unwrap_or(0));
    let mut grid = Grid::of_columns(1, 6);
    let both = || steps.iter().filter_map(|step| Some((step.a?, step.b?)));
    let reserved = |(a, b): (StepLevels, StepLevels)| {
        signed_difference(a.reserved_bytes_peak, b.reserved_bytes_peak)
    };
    let requested = |(a, b): (StepLevels, StepLevels)| {
        signed_difference(a.requested_bytes_peak, b.requested_bytes_peak)
    };
    let deltas = Deltas::fitting(both().map(reserved).chain(both().map(requested)));
    let unit_name = unit.name;
    grid.head(["", "requested", "", "", "reserved", "", ""]);
    let heads = [format!("A {unit_name}"), "B".to_owned(), deltas.head()];
    grid.head(["step".to_owned()].into_iter().chain(heads.clone()).chain(heads));
    grid.rows_at_most(steps, STEPS_MAX, |step| {
        let pair = |of: fn(&StepLevels) -> u64| {
            let (a, b) = (step.a.as_ref().map(of), step.b.as_ref().map(of));
            let cell =
                |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |it| unit.cell(it));
            let delta = a.zip(b).map(|(a, b)| signed_difference(a, b));
            let delta = delta.map_or_else(|| "-".to_owned(), |delta| deltas.cell(delta));
            [cell(a), cell(b), delta]
        };
        let requested = pair(|it| it.requested_bytes_peak);
        let reserved = pair(|it| it.reserved_bytes_peak);
        [printable(&step.step).into_owned()].into_iter().chain(requested).chain(reserved)
    });
    format!("\n{}", grid.render(style))
}

/// `only A asks for 3 sizes: 512 B (4 times), ...`; nothing if there are none.
fn sizes_line(lead: &str, sizes: &[SizeCount]) -> String {
    if sizes.is_empty() {
        return String::new();
    }
    let named = sizes.iter().take(SIZES_MAX).map(|it| {
        let times = if it.allocs == 1 {
            "once".to_owned()
        } else {
            format!("{} times", grouped(it.allocs))
        };
        format!("{} ({times})", Bytes(it.size_bytes))
    });
    let mut named: Vec<String> = named.collect();
    if sizes.len() > SIZES_MAX {
        named.push("...".to_owned());
    }
    let text = format!("{}: {}", counted(sizes.len() as u64, "size"), named.join(", "));
    wrapped(&format!("{lead} "), &text, "  ")
}

/// Two files of results. `top` figures of each cell are shown.
pub fn diff_results(diff: &ResultDiff, top: usize, style: Style) -> String {
    let cells: Vec<String> = diff.cells.iter().map(|cell| cell_table(cell, top, style)).collect();
    let mut out = cells.join("\n");
    for (letter, names) in [("A", &diff.only_a), ("B", &diff.only_b)] {
        for name in names {
            out.push_str(&wrapped(&format!("only in {letter}: "), &printable(name), "  "));
        }
    }
    out
}

fn cell_table(cell: &CellDiff, top: usize, style: Style) -> String {
    let (a, b) = (printable(&cell.a), printable(&cell.b));
    let title = if a == b { a.into_owned() } else { format!("{a} -> {b}") };
    let mut out = style.paint(Tone::Heading, &title) + "\n";
    let mut grid =
        Grid::new(&[Align::Left, Align::Right, Align::Right, Align::Right, Align::Right]);
    if !cell.figures.is_empty() {
        grid.head(["figure", "A", "B", "B - A", "change"]);
    }
    let (first, rest) = cell.figures.split_at(cell.figures.len().min(top));
    for figure in first {
        let change = figure.relative.map_or_else(String::new, relative);
        let [a, b] = values(figure);
        let cells = [printable(&figure.figure).into_owned(), a, b, figure_delta(figure), change];
        grid.row(cells, String::new());
    }
    out.push_str(&grid.render(style));
    let more = match rest.len() as u64 {
        0 => String::new(),
        count => format!("{} more differ (--full shows them); ", grouped(count)),
    };
    let same = counted(cell.same, "figure");
    out.push_str(&wrapped("", &format!("{more}{same} the same"), "  "));
    out
}

/// Both values: bytes in units, unless they would then look the same.
fn values(figure: &FigureDiff) -> [String; 2] {
    let both = [figure.a.as_ref(), figure.b.as_ref()];
    let size = |it: Option<&Value>| it?.as_u64().map(|bytes| Bytes(bytes).to_string());
    let sizes = both.map(|it| size(it).filter(|_| is_bytes(&figure.figure)));
    if sizes[0] != sizes[1] {
        let mut sizes = sizes.into_iter();
        return both.map(|it| sizes.next().flatten().unwrap_or_else(|| value(it)));
    }
    both.map(value)
}

/// Whether the name of a figure, as in `peaks.reserved_bytes_peak`, says that it counts bytes.
fn is_bytes(figure: &str) -> bool {
    let name = figure.rsplit('.').next().unwrap_or(figure);
    name.split('_').any(|word| word == "bytes")
}

fn value(value: Option<&Value>) -> String {
    match value {
        None => "-".to_owned(),
        Some(Value::String(text)) => shortened(text),
        Some(Value::Number(number)) => match (number.as_u64(), number.as_f64()) {
            (Some(count), _) => grouped(count),
            (None, Some(fraction)) => format!("{fraction:.4}"),
            (None, None) => number.to_string(),
        },
        Some(other) => other.to_string(),
    }
}

fn figure_delta(figure: &FigureDiff) -> String {
    let Some(delta) = figure.delta else { return String::new() };
    let sign = if delta < 0.0 { "-" } else { "" };
    if is_bytes(&figure.figure) {
        return format!("{sign}{}", Bytes(delta.abs() as u64));
    }
    if delta.fract() == 0.0 && delta.abs() < 9e15 {
        format!("{sign}{}", grouped(delta.abs() as u64))
    } else {
        format!("{delta:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_percent_with_a_sign_whatever_their_size() {
        for (a, b, expected) in [
            (100.0, 100.0, "0.0%"),
            (0.0, 5.0, "new"),
            (100.0, 67.9, "-32.1%"),
            (100.0, 396.7, "+296.7%"),
            (100.0, 1390.0, "+1,290%"),
            (1e6, 1e6 + 1.0, "+<0.1%"),
        ] {
            assert_eq!(change(a, b), expected, "{a} -> {b}");
        }
    }

    #[test]
    fn bytes_are_told_by_the_last_part_of_a_name() {
        assert!(is_bytes("peaks.reserved_bytes_peak") && is_bytes("excess_bytes"));
        assert!(!is_bytes("bytes.count") && !is_bytes("time.recorded_ns"));
    }
}
