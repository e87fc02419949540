//! The answer of `info --all`: a row a trace, and what they are together.

use super::grid::{Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, grouped, percent, printable, wrapped};
use crate::engine::Status;
use crate::experiment::survey::{ReplayFacts, TraceFacts, alike, distinct};
use crate::units::nearest_rank;

/// From so many traces on their smallest, middle and largest figures are worth a row each.
const SPREAD_MIN: usize = 3;
/// Groups of traces that are alike which the last lines count.
const GROUPS_SHOWN: usize = 8;

/// What lies in the folders beside the traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassedOver {
    /// Files that are no traces.
    pub others: u64,
    /// Folders that were not looked into.
    pub folders: u64,
}

/// Traces as a table, in the order given, with the files' names as they are to be shown.
pub fn survey(
    facts: &[TraceFacts],
    names: &[String],
    passed_over: PassedOver,
    style: Style,
) -> String {
    let groups = alike(facts);
    let columns = Columns::of(facts, &groups);
    let mut out = String::new();
    if !facts.is_empty() {
        let mut grid = Grid::of_columns(if columns.source { 2 } else { 1 }, columns.numbers());
        columns.head(&mut grid);
        for ((facts, name), group) in facts.iter().zip(names).zip(&groups) {
            grid.row(columns.row(facts, &printable(name), *group), String::new());
        }
        if facts.len() >= SPREAD_MIN {
            for (title, share) in [("smallest", 0), ("median", 50), ("largest", 100)] {
                grid.row(columns.spread(facts, title, share), String::new());
            }
        }
        out.push_str(&grid.render(style));
        out.push('\n');
    }
    for line in about(facts, &columns, &groups, passed_over) {
        out.push_str(&wrapped("", &line, "  "));
    }
    out
}

/// Which columns say anything.
struct Columns {
    source: bool,
    recorded: bool,
    history: bool,
    alike: bool,
    unit: SizeUnit,
}

impl Columns {
    fn of(facts: &[TraceFacts], groups: &[Option<usize>]) -> Columns {
        let first = facts.first().map(|facts| kind(&facts.source));
        let recorded = |facts: &TraceFacts| facts.recorded_reserved_bytes_peak;
        let sizes = facts.iter().flat_map(|facts| {
            let replayed = facts.replay.map(|replay| replay.reserved_bytes_peak);
            [Some(facts.requested_bytes_peak), recorded(facts), replayed].into_iter().flatten()
        });
        Columns {
            source: facts.iter().any(|facts| Some(kind(&facts.source)) != first),
            recorded: facts.iter().any(|facts| recorded(facts).is_some()),
            history: facts.iter().any(|facts| facts.history_share < 1.0),
            alike: groups.iter().any(Option::is_some),
            unit: SizeUnit::fitting(sizes.max().unwrap_or(0)),
        }
    }

    fn numbers(&self) -> usize {
        4 + [self.recorded, self.history, self.alike].iter().filter(|shown| **shown).count()
    }

    /// The cells that are shown, of all.
    fn shown<T>(&self, cells: [T; 9]) -> Vec<T> {
        let shown =
            [true, self.source, true, true, self.recorded, true, true, self.history, self.alike];
        cells.into_iter().zip(shown).filter(|(_, shown)| *shown).map(|(cell, _)| cell).collect()
    }

    fn head(&self, grid: &mut Grid) {
        let unit = self.unit.name;
        grid.head(self.shown([
            "trace", "source", "events", "request", "recorded", "caching", "frag", "seen", "like",
        ]));
        grid.head(self.shown(["", "", "", unit, unit, unit, "", "", ""]));
    }

    fn row(&self, facts: &TraceFacts, name: &str, group: Option<usize>) -> Vec<Cell> {
        let size = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |it| self.unit.cell(it));
        let (reserved, fragmentation) = match facts.replay {
            Some(ReplayFacts { status, reserved_bytes_peak, fragmentation }) => {
                let fragmentation = match status {
                    Status::Ok => percent(fragmentation).into(),
                    Status::Oom => Cell::toned("OOM", Tone::Bad),
                    Status::Failed => Cell::toned("failed", Tone::Bad),
                };
                (size(Some(reserved_bytes_peak)), fragmentation)
            }
            None => ("-".to_owned(), "-".to_owned().into()),
        };
        self.shown([
            name.to_owned().into(),
            kind(&facts.source).to_owned().into(),
            grouped(facts.events).into(),
            size(Some(facts.requested_bytes_peak)).into(),
            size(facts.recorded_reserved_bytes_peak).into(),
            reserved.into(),
            fragmentation,
            percent(facts.history_share).into(),
            group.map_or_else(String::new, letters).into(),
        ])
    }

    /// The value of every column at this percentile; of replays that met every request.
    fn spread(&self, facts: &[TraceFacts], title: &str, share: u32) -> Vec<Cell> {
        let number = |read: &dyn Fn(&TraceFacts) -> Option<u64>| {
            let mut numbers: Vec<u64> = facts.iter().filter_map(read).collect();
            numbers.sort_unstable();
            nearest_rank(&numbers, share)
        };
        let size = |read: &dyn Fn(&TraceFacts) -> Option<u64>| {
            number(read).map_or("-".to_owned(), |bytes| self.unit.cell(bytes))
        };
        let fraction = |read: &dyn Fn(&TraceFacts) -> Option<f64>| {
            let mut fractions: Vec<f64> = facts.iter().filter_map(read).collect();
            fractions.sort_by(f64::total_cmp);
            nearest_rank(&fractions, share).map_or("-".to_owned(), percent)
        };
        let done = |facts: &TraceFacts| facts.replay.filter(|it| it.status == Status::Ok);
        let cells = [
            title.to_owned(),
            String::new(),
            number(&|facts| Some(facts.events)).map_or_else(String::new, grouped),
            size(&|facts| Some(facts.requested_bytes_peak)),
            size(&|facts| facts.recorded_reserved_bytes_peak),
            size(&|facts| Some(done(facts)?.reserved_bytes_peak)),
            fraction(&|facts| Some(done(facts)?.fragmentation)),
            fraction(&|facts| Some(facts.history_share)),
            String::new(),
        ];
        self.shown(cells.map(|cell| Cell::toned(cell, Tone::Heading)))
    }
}

/// `torch` of `torch_snapshot 2.11.0+cu130`: enough to tell sources apart.
fn kind(source: &str) -> &str {
    source.split(['_', ' ']).next().unwrap_or(source)
}

/// A, B, ... Z, AA, AB, ...
fn letters(mut number: usize) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(b'A' + (number % 26) as u8);
        match number / 26 {
            0 => break,
            rest => number = rest - 1,
        }
    }
    letters.iter().rev().map(|&letter| char::from(letter)).collect()
}

fn about(
    facts: &[TraceFacts],
    columns: &Columns,
    groups: &[Option<usize>],
    passed_over: PassedOver,
) -> Vec<String> {
    let mut lines = Vec::new();
    let events = facts.iter().fold(0u64, |sum, facts| sum.saturating_add(facts.events));
    let mut line =
        format!("{}, {} in all", counted(facts.len() as u64, "trace"), counted(events, "event"));
    if let Some(first) = facts.first().filter(|_| !columns.source) {
        let is_same = facts.iter().all(|facts| facts.source == first.source);
        let source = if is_same { &first.source } else { kind(&first.source) };
        line.push_str(&format!(", source {}", printable(source)));
    }
    lines.push(line);
    if columns.alike {
        lines.push(match distinct(facts) {
            1 => "all ask for the same".to_owned(),
            count => {
                format!("{} different traces; alike: {}", grouped(count as u64), sizes_of(groups))
            }
        });
    } else if facts.len() > 1 {
        lines.push("no two ask for the same".to_owned());
    }
    let out_of_memory =
        facts.iter().filter_map(|facts| facts.replay).filter(|it| it.status == Status::Oom).count();
    if out_of_memory > 0 {
        lines.push(format!(
            "{} out of memory under caching: the table has what it held till the end",
            counted(out_of_memory as u64, "trace")
        ));
    }
    let PassedOver { others, folders } = passed_over;
    if others > 0 {
        let hold = if others == 1 { "holds" } else { "hold" };
        lines.push(format!("passed over: {} that {hold} no trace", counted(others, "file")));
    }
    if folders > 0 {
        lines.push(format!(
            "not looked into: {} inside, which --recursive takes in",
            counted(folders, "folder")
        ));
    }
    lines
}

/// `A 8, B 2`
fn sizes_of(groups: &[Option<usize>]) -> String {
    let count = groups.iter().flatten().max().map_or(0, |largest| largest + 1);
    let mut sizes = vec![0u64; count];
    for &group in groups.iter().flatten() {
        sizes[group] += 1;
    }
    let shown = sizes.iter().enumerate().take(GROUPS_SHOWN);
    let mut shown: Vec<String> =
        shown.map(|(group, size)| format!("{} {}", letters(group), grouped(*size))).collect();
    if count > GROUPS_SHOWN {
        shown.push(format!("and {} more groups", count - GROUPS_SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_letters_without_end() {
        let names = [(0, "A"), (25, "Z"), (26, "AA"), (27, "AB"), (701, "ZZ"), (702, "AAA")];
        for (number, name) in names {
            assert_eq!(letters(number), name);
        }
    }

    #[test]
    fn sources_are_short_and_told_apart() {
        assert_eq!(kind("torch_snapshot 2.11.0+cu130"), "torch");
        assert_eq!(kind("generated"), "generated");
        assert_eq!(kind("kineto 2.9"), "kineto");
    }
}
