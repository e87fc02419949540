//! The answer of `info`: what a file is, what is known of the job, and its statistics.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::grid::{Align, Grid};
use super::{Style, Tone, counted, duration, grouped, percent, printable, wrapped};
use crate::trace::{Header, RecordedKind, Recording, SourceKind, Trace, TraceStats, stats};
use crate::units::Bytes;

/// Rows of a table that the text shows; the JSON has all.
const ROWS_MAX: usize = 12;

/// What `info` tells of one file. Field names are the JSON names.
#[derive(Clone, Debug, Serialize)]
pub struct FileFacts {
    /// The path as given.
    pub file: String,
    /// Size of the file as it lies on the disk; absent for standard input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// The head of the trace.
    pub header: Header,
    /// Share of the job's blocks whose alloc the history shows, 0 to 1.
    pub history_share: f64,
    /// Statistics.
    pub stats: TraceStats,
    /// What the allocator of the recorded run did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordedFacts>,
    /// What should be known about how the file was read, one line each.
    pub warnings: Vec<String>,
}

/// What the allocator of a recorded run did, in figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RecordedFacts {
    /// Segments obtained from the device.
    pub segment_allocs: u64,
    /// Segments given back.
    pub segment_frees: u64,
    /// Ranges of pages mapped.
    pub segment_maps: u64,
    /// Ranges of pages unmapped.
    pub segment_unmaps: u64,
    /// Refused requests.
    pub ooms: u64,
    /// How the run ended, where a truth file says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// The run reset its peak statistics: its peaks count from an unknown moment.
    pub peak_stats_reset: bool,
    /// What the allocator reported of itself at the end, under its own names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub stats: BTreeMap<String, i64>,
}

impl FileFacts {
    /// The facts of a trace that was read from `file`.
    pub fn new(
        file: String,
        file_bytes: Option<u64>,
        trace: &Trace,
        warnings: Vec<String>,
    ) -> Self {
        FileFacts {
            file,
            file_bytes,
            header: trace.header.clone(),
            history_share: trace.header.history.share(),
            stats: stats(trace),
            recorded: trace.recording.as_ref().map(RecordedFacts::new),
            warnings,
        }
    }
}

impl RecordedFacts {
    fn new(recording: &Recording) -> Self {
        let mut facts = RecordedFacts::default();
        for action in &recording.actions {
            match action.kind {
                RecordedKind::SegmentAlloc => facts.segment_allocs += 1,
                RecordedKind::SegmentFree => facts.segment_frees += 1,
                RecordedKind::SegmentMap => facts.segment_maps += 1,
                RecordedKind::SegmentUnmap => facts.segment_unmaps += 1,
                RecordedKind::Oom => facts.ooms += 1,
                RecordedKind::FreeCompleted => {}
            }
        }
        if let Some(truth) = &recording.truth {
            facts.outcome = truth.outcome.clone();
            facts.peak_stats_reset = truth.peak_stats_reset;
            facts.stats = truth.stats.clone();
        }
        facts
    }
}

/// One file as text.
pub fn info(facts: &FileFacts, style: Style) -> String {
    let file = printable(&facts.file);
    let mut out = style.paint(Tone::Heading, &file) + "\n";
    let mut lines = Lines::default();
    about_file(facts, &mut lines);
    about_job(&facts.header, &mut lines);
    about_history(facts, &mut lines);
    if let Some(recorded) = &facts.recorded {
        about_recorded(recorded, &mut lines);
    }
    let stats = serde_json::to_value(&facts.stats).unwrap_or_default();
    let tables = about_stats(&stats, &mut lines);
    out.push_str(&lines.render());
    for (name, rows) in tables {
        out.push('\n');
        out.push_str(&style.paint(Tone::Heading, &spaced(name)));
        out.push('\n');
        out.push_str(&table(rows, style));
    }
    out
}

/// Labelled lines, the labels as wide as the widest.
#[derive(Default)]
struct Lines(Vec<(String, String)>);

impl Lines {
    fn add(&mut self, label: &str, value: impl Into<String>) {
        self.0.push((label.to_owned(), value.into()));
    }

    fn render(&self) -> String {
        let width = self.0.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        let indent = " ".repeat(width + 4);
        let line = |(label, value): &(String, String)| {
            let padding = " ".repeat(width - label.chars().count());
            wrapped(&format!("  {label}{padding}  "), value, &indent)
        };
        self.0.iter().map(line).collect()
    }
}

fn about_file(facts: &FileFacts, lines: &mut Lines) {
    let kind = match facts.header.source.kind {
        SourceKind::Unknown => "trace of unknown source",
        SourceKind::TorchSnapshot => "snapshot of PyTorch's CUDA caching allocator",
        SourceKind::RmmCsv => "log of RMM's logging resource adaptor",
        SourceKind::Text => "text trace, written by a person",
        SourceKind::Generated => "trace generated from a model description",
    };
    let mut what = kind.to_owned();
    if let Some(version) = &facts.header.source.version {
        what.push_str(&format!(", version {}", printable(version)));
    }
    if let Some(bytes) = facts.file_bytes {
        what.push_str(&format!(", {} on disk", Bytes(bytes)));
    }
    lines.add("what", what);
    if !facts.header.name.is_empty() {
        lines.add("name", printable(&facts.header.name));
    }
}

fn about_job(header: &Header, lines: &mut Lines) {
    let device = &header.device;
    let mut parts = Vec::new();
    if let Some(name) = &device.name {
        parts.push(printable(name).into_owned());
    }
    if let Some(index) = device.index {
        parts.push(format!("index {index}"));
    }
    if let Some(bytes) = device.total_bytes {
        parts.push(format!("{} in total", Bytes(bytes)));
    }
    if let Some(bytes) = device.capacity_bytes {
        parts.push(format!("capacity {}", Bytes(bytes)));
    }
    if !parts.is_empty() {
        lines.add("device", parts.join(", "));
    }
    if let Some(settings) = &header.settings {
        let settings = printable(settings);
        lines.add("settings", if settings.is_empty() { "default".into() } else { settings });
    }
    if let Some(bytes) = header.limit_bytes {
        lines.add("limit", Bytes(bytes).to_string());
    }
    if !header.strategies.is_empty() {
        lines.add("strategies", printable(&header.strategies.join(", ")));
    }
    if !header.faults.is_empty() {
        lines.add("injected failures", grouped(header.faults.len() as u64));
    }
    if !header.expectations.is_empty() {
        lines.add("expectations", grouped(header.expectations.len() as u64));
    }
}

fn about_history(facts: &FileFacts, lines: &mut Lines) {
    let text = if facts.history_share < 1.0 {
        let unseen = facts.header.history.frees_without_alloc;
        format!(
            "{} of all known blocks; {} without an alloc",
            percent(facts.history_share),
            counted(unseen, "free"),
        )
    } else {
        "whole".to_owned()
    };
    lines.add("history", text);
}

fn about_recorded(recorded: &RecordedFacts, lines: &mut Lines) {
    let mut parts = Vec::new();
    let mut add = |count: u64, noun: &str| {
        if count > 0 {
            parts.push(counted(count, noun));
        }
    };
    add(recorded.segment_allocs, "segment alloc");
    add(recorded.segment_frees, "segment free");
    add(recorded.segment_maps, "segment map");
    add(recorded.segment_unmaps, "segment unmap");
    add(recorded.ooms, "refusal");
    if parts.is_empty() {
        parts.push("block addresses only".to_owned());
    }
    lines.add("recorded allocator", parts.join(", "));
    let since = if recorded.peak_stats_reset { " since its statistics were reset" } else { "" };
    let peaks = [
        ("recorded allocated peak", "allocated_bytes.all.peak"),
        ("recorded reserved peak", "reserved_bytes.all.peak"),
    ];
    for (label, key) in peaks {
        if let Some(bytes) = recorded.stats.get(key).and_then(|&bytes| u64::try_from(bytes).ok()) {
            lines.add(label, format!("{}{since}", Bytes(bytes)));
        }
    }
    if let Some(&retries) = recorded.stats.get("num_alloc_retries").filter(|&&retries| retries > 0)
    {
        lines.add("recorded retries", retries.to_string());
    }
    if let Some(outcome) = &recorded.outcome {
        lines.add("recorded outcome", printable(outcome));
    }
}

/// Statistics are shown field by field, by name and in the unit that the name ends in: a new one needs
/// no line here. Gives back the fields that are tables.
fn about_stats<'a>(stats: &'a Value, lines: &mut Lines) -> Vec<(&'a str, &'a [Value])> {
    let mut tables = Vec::new();
    let Value::Object(fields) = stats else { return tables };
    for (name, value) in sorted(fields) {
        match value {
            Value::Null => {}
            Value::Array(rows) if rows.iter().any(Value::is_object) => {
                tables.push((name, rows.as_slice()));
            }
            Value::Array(items) => {
                let shown: Vec<String> =
                    items.iter().take(ROWS_MAX).map(|item| cell(name, item)).collect();
                let more = if items.len() > shown.len() { ", ..." } else { "" };
                lines.add(
                    &spaced(name),
                    format!("{}: {}{more}", grouped(items.len() as u64), shown.join(", ")),
                );
            }
            value => lines.add(&spaced(name), cell(name, value)),
        }
    }
    tables
}

/// Fields by name: the order of a JSON map depends on how the program was built.
fn sorted(fields: &serde_json::Map<String, Value>) -> BTreeMap<&str, &Value> {
    fields.iter().map(|(name, value)| (name.as_str(), value)).collect()
}

fn table(rows: &[Value], style: Style) -> String {
    let Some(Value::Object(first)) = rows.first() else { return String::new() };
    let names: Vec<&str> = sorted(first).into_keys().collect();
    let aligns: Vec<Align> = names
        .iter()
        .map(|name| if first[*name].is_string() { Align::Left } else { Align::Right })
        .collect();
    let mut grid = Grid::new(&aligns);
    grid.head(names.iter().map(|name| spaced(name)));
    for row in rows.iter().take(ROWS_MAX) {
        grid.row(names.iter().map(|name| cell(name, &row[*name])), String::new());
    }
    let mut out = grid.render(style);
    if rows.len() > ROWS_MAX {
        out.push_str(&format!("... and {} more; --json has all\n", rows.len() - ROWS_MAX));
    }
    out
}

/// `requested_bytes_peak` as a label: the unit shows in the value.
fn spaced(name: &str) -> String {
    let words = name.split('_').filter(|word| !matches!(*word, "bytes" | "ns"));
    words.collect::<Vec<_>>().join(" ")
}

fn cell(name: &str, value: &Value) -> String {
    match value {
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if name.split('_').any(|word| word == "bytes") => Bytes(bytes).to_string(),
            Some(ns) if name.ends_with("_ns") => duration(ns),
            Some(count) => grouped(count),
            None => {
                number.as_f64().map_or_else(|| number.to_string(), |value| format!("{value:.3}"))
            }
        },
        Value::String(text) => printable(text).into_owned(),
        Value::Null => "-".to_owned(),
        other => printable(&other.to_string()).into_owned(),
    }
}
