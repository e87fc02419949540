//! The answer of `info`: what a file is, what is known of the job, and its statistics.

use serde::Serialize;

use super::grid::{Align, Grid};
use super::{Style, Tone, counted, duration, grouped, percent, printable, wrapped};
use crate::trace::{
    Header, Pool, PoolKind, RecordedStats, SizeClass, SizeStats, SourceKind, StartStats,
    StreamStats, Trace, TraceStats, Truth, stats,
};
use crate::units::Bytes;

/// Kinds of phases that the text names; the JSON has all phases.
const PHASES_SHOWN: usize = 8;
/// Pools that the text names; the JSON has all.
const POOLS_SHOWN: usize = 6;
/// Different settings strings that the text shows; the JSON has all.
const SETTINGS_SHOWN: usize = 4;
/// Streams that the text shows; the JSON has all.
const STREAMS_SHOWN: usize = 8;
/// The text joins this many neighbouring size classes into one row, so that they fit a screen.
const CLASSES_PER_ROW: u32 = 3;
/// Classes below this power of two share the first row: allocators round such sizes up anyway.
const FIRST_POWER: u32 = 9;
/// The text shows this many characters of how a run ended; the JSON has all.
const OUTCOME_SHOWN: usize = 200;

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
    /// Names of the phases, each once, in the order in which they first began.
    pub phases: Vec<String>,
    /// Private pools.
    pub pools: Vec<Pool>,
    /// Settings strings given while the program ran, each once.
    pub settings_changes: Vec<String>,
    /// Statistics.
    pub stats: TraceStats,
    /// What the recorded allocator reported of itself at the end, where a truth file tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reported: Option<Truth>,
    /// What should be known about how the file was read, one line each.
    pub warnings: Vec<String>,
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
            phases: trace.phases.clone(),
            pools: trace.pools.clone(),
            settings_changes: trace.settings_changes.clone(),
            stats: stats(trace),
            reported: trace.recording.as_ref().and_then(|recording| recording.truth.clone()),
            warnings,
        }
    }
}

/// One file as text.
pub fn info(facts: &FileFacts, style: Style) -> String {
    let mut lines = Lines::default();
    lines.add("what", what(facts));
    lines.add_some("name", &facts.header.name);
    about_job(facts, &mut lines);
    lines.add("history", history(facts));
    if let Some(at_start) = &facts.stats.at_start {
        lines.add("at start", layout_at_start(at_start));
    }
    about_events(facts, &mut lines);
    if let Some(recorded) = &facts.stats.recorded {
        lines.add("recorded", recorded_allocator(recorded));
    }
    if let Some(reported) = &facts.reported {
        about_reported(reported, &mut lines);
    }
    let mut out = style.paint(Tone::Heading, &printable(&facts.file)) + "\n";
    out.push_str(&lines.render());
    if !facts.stats.sizes.classes.is_empty() {
        out.push('\n');
        out.push_str(&size_table(&facts.stats.sizes).render(style));
    }
    if facts.stats.by_stream.len() > 1 {
        out.push('\n');
        out.push_str(&stream_table(&facts.stats.by_stream, style));
    }
    out
}

/// Labelled lines, the labels as wide as the widest. Values are made printable.
#[derive(Default)]
struct Lines(Vec<(&'static str, String)>);

impl Lines {
    fn add(&mut self, label: &'static str, value: impl Into<String>) {
        self.0.push((label, value.into()));
    }

    fn add_some(&mut self, label: &'static str, value: &str) {
        if !value.is_empty() {
            self.add(label, value);
        }
    }

    fn render(&self) -> String {
        let width = self.0.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
        let indent = " ".repeat(width + 4);
        let line = |(label, value): &(&str, String)| {
            wrapped(&format!("  {label:width$}  "), &printable(value), &indent)
        };
        self.0.iter().map(line).collect()
    }
}

fn what(facts: &FileFacts) -> String {
    let kind = match facts.header.source.kind {
        SourceKind::Unknown => "trace of unknown source",
        SourceKind::TorchSnapshot => "snapshot of PyTorch's CUDA caching allocator",
        SourceKind::Kineto => "trace of PyTorch's profiler",
        SourceKind::MinimallocCsv => "buffers in MiniMalloc's CSV",
        SourceKind::RmmCsv => "log of RMM's logging resource adaptor",
        SourceKind::StallocLog => "log of STAlloc's recorder",
        SourceKind::Text => "text trace, written by a person",
        SourceKind::Generated => "trace generated from a model description",
        SourceKind::Merged => "traces of several ranks, merged",
    };
    let mut what = kind.to_owned();
    if let Some(version) = &facts.header.source.version {
        what.push_str(&format!(", version {version}"));
    }
    if let Some(bytes) = facts.file_bytes {
        what.push_str(&format!(", {} on disk", Bytes(bytes)));
    }
    what
}

fn about_job(facts: &FileFacts, lines: &mut Lines) {
    let header = &facts.header;
    let device = &header.device;
    let mut parts: Vec<String> = device.name.iter().cloned().collect();
    parts.extend(device.index.map(|index| format!("index {index}")));
    parts.extend(device.total_bytes.map(|bytes| format!("{} in total", Bytes(bytes))));
    parts.extend(device.capacity_bytes.map(|bytes| format!("capacity {}", Bytes(bytes))));
    parts.extend(device.address_bytes_max.map(|bytes| format!("{} of addresses", Bytes(bytes))));
    parts.extend(device.mappings_max.map(|count| format!("at most {}", counted(count, "mapping"))));
    lines.add_some("device", &parts.join(", "));
    if let Some(settings) = &header.settings {
        lines.add("settings", settings_or_default(settings));
    }
    if facts.stats.settings_changes > 0 {
        lines.add("changed to", settings_changes(facts));
    }
    if !facts.pools.is_empty() {
        lines.add("pools", pools(&facts.pools));
    }
    if let Some(bytes) = header.limit_bytes {
        lines.add("limit", Bytes(bytes).to_string());
    }
    lines.add_some("strategies", &header.strategies.join(", "));
    let mut checks = Vec::new();
    if !header.faults.is_empty() {
        checks.push(counted(header.faults.len() as u64, "injected failure"));
    }
    if !header.expectations.is_empty() {
        checks.push(counted(header.expectations.len() as u64, "expectation"));
    }
    lines.add_some("for tests", &checks.join(", "));
}

fn settings_or_default(settings: &str) -> &str {
    if settings.is_empty() { "default" } else { settings }
}

/// `expandable_segments:True; default (3 changes)`
fn settings_changes(facts: &FileFacts) -> String {
    let strings = &facts.settings_changes;
    let shown = strings.iter().take(SETTINGS_SHOWN).map(|text| settings_or_default(text));
    let mut shown: Vec<&str> = shown.collect();
    if strings.len() > SETTINGS_SHOWN {
        shown.push("...");
    }
    format!("{} ({})", shown.join("; "), counted(facts.stats.settings_changes, "change"))
}

/// `2: mempool (0, 1) (MemPool, no_split), graph (1, 0) (graph capture)`
fn pools(pools: &[Pool]) -> String {
    let shown = pools.iter().take(POOLS_SHOWN).map(|pool| {
        let mut properties = vec![match pool.kind {
            PoolKind::MemPool => "MemPool",
            PoolKind::Capture => "graph capture",
        }];
        properties.extend(pool.no_split.then_some("no_split"));
        properties.extend(pool.use_on_oom.then_some("use_on_oom"));
        format!("{} ({})", pool.name, properties.join(", "))
    });
    let mut shown: Vec<String> = shown.collect();
    if pools.len() > POOLS_SHOWN {
        shown.push("...".to_owned());
    }
    format!("{}: {}", grouped(pools.len() as u64), shown.join(", "))
}

fn history(facts: &FileFacts) -> String {
    let share = facts.stats.history_share;
    let history = &facts.header.history;
    if share >= 1.0 && facts.stats.at_start.is_none() {
        return "whole".to_owned();
    }
    let mut text = match history.allocs_of_run {
        Some(allocs) => format!("{} of the run's {}", percent(share), counted(allocs, "alloc")),
        None => format!("at most {} of the run's allocs", percent(share)),
    };
    if facts.stats.at_start.is_none() {
        let unseen = counted(history.frees_without_alloc, "free");
        text.push_str(&format!("; {unseen} without an alloc"));
    }
    text
}

fn layout_at_start(at_start: &StartStats) -> String {
    let StartStats { segments, live_blocks, deferred_blocks, guessed_blocks, .. } = *at_start;
    let live = counted(live_blocks, "live block");
    let mut parts = vec![format!("{live} of {}", Bytes(at_start.requested_bytes))];
    if deferred_blocks > 0 {
        let deferred = counted(deferred_blocks, "deferred block");
        parts.push(format!("{deferred} of {}", Bytes(at_start.deferred_bytes)));
    }
    let reserved = Bytes(at_start.reserved_bytes);
    parts.push(format!("{} of {reserved}", counted(segments, "segment")));
    if guessed_blocks > 0 {
        parts.push(format!("{} guessed", counted(guessed_blocks, "size")));
    }
    parts.join(", ")
}

fn about_events(facts: &FileFacts, lines: &mut Lines) {
    let stats = &facts.stats;
    let counts = [
        (stats.allocs, "alloc"),
        (stats.attempts, "attempt"),
        (stats.frees, "free"),
        (stats.defers, "defer"),
        (stats.dones, "done"),
        (stats.empty_caches, "empty_cache"),
        (stats.settings_changes, "settings"),
    ];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    let counts: Vec<String> =
        counts.map(|(count, name)| format!("{} {name}", grouped(count))).collect();
    let mut events = grouped(stats.events);
    if stats.duration_ns > 0 {
        events.push_str(&format!(" in {}", duration(stats.duration_ns)));
    }
    if !counts.is_empty() {
        events.push_str(&format!(": {}", counts.join(", ")));
    }
    lines.add("events", events);
    if !facts.phases.is_empty() {
        lines.add("phases", phases(facts));
    }
    let mut requested = format!("peak {}", Bytes(stats.requested_bytes_peak));
    match stats.requested_peak_event {
        Some(event) => requested.push_str(&format!(" at event {}", grouped(event))),
        None if stats.requested_bytes_peak > 0 => requested.push_str(" at the start"),
        None => {}
    }
    if let Some(phase) = &stats.requested_peak_phase {
        requested.push_str(&format!(" ({phase})"));
    }
    requested.push_str(&format!(", {} at the end", Bytes(stats.requested_bytes_final)));
    lines.add("requested", requested);
    lines.add(
        "blocks",
        format!(
            "{} live at most, {} never freed",
            grouped(stats.live_blocks_peak),
            grouped(stats.never_freed_blocks)
        ),
    );
    let SizeStats { distinct, median_bytes, largest_bytes, .. } = stats.sizes;
    let (median, largest) = (Bytes(median_bytes), Bytes(largest_bytes));
    let total = Bytes(stats.alloc_bytes_total);
    lines.add(
        "sizes",
        format!(
            "{} different, median {median}, largest {largest}, {total} in all",
            grouped(distinct)
        ),
    );
}

/// `13 marks, 3 steps: prefetch, forward, backward, optimizer`
fn phases(facts: &FileFacts) -> String {
    let mut text = counted(facts.stats.phases, "mark");
    if facts.stats.steps > 0 {
        text.push_str(&format!(", {}", counted(facts.stats.steps, "step")));
    }
    let mut kinds: Vec<&str> = Vec::new();
    for kind in facts.phases.iter().map(|phase| without_step(phase)) {
        if kinds.len() > PHASES_SHOWN {
            break;
        }
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    if kinds.len() > PHASES_SHOWN {
        kinds[PHASES_SHOWN] = "...";
    }
    format!("{text}: {}", kinds.join(", "))
}

/// `forward` of `step3.forward`; other names as they are.
fn without_step(phase: &str) -> &str {
    let parts = phase.strip_prefix("step").and_then(|rest| rest.split_once('.'));
    match parts {
        Some((number, kind)) if number.bytes().all(|byte| byte.is_ascii_digit()) => kind,
        _ => phase,
    }
}

fn recorded_allocator(recorded: &RecordedStats) -> String {
    let RecordedStats { segment_allocs, segment_frees, reserved_bytes_peak, ooms, addresses } =
        *recorded;
    let reserved = Bytes(reserved_bytes_peak);
    let mut parts = Vec::new();
    // Logs of blocks alone show no segments.
    if segment_allocs > 0 || segment_frees > 0 || reserved_bytes_peak > 0 {
        parts.push(format!("segments reserve {reserved} at most"));
        parts.push(counted(segment_allocs, "segment alloc"));
        parts.push(counted(segment_frees, "segment free"));
    }
    parts.push(format!("addresses of {}", counted(addresses, "block")));
    if ooms > 0 {
        parts.push(counted(ooms, "refused request"));
    }
    parts.join(", ")
}

fn about_reported(reported: &Truth, lines: &mut Lines) {
    let bytes = |key: &str| {
        let value = reported.stats.get(key).and_then(|&value| u64::try_from(value).ok());
        value.map(|bytes| Bytes(bytes).to_string())
    };
    let mut parts = Vec::new();
    parts.extend(bytes("allocated_bytes.all.peak").map(|peak| format!("allocated peak {peak}")));
    parts.extend(bytes("reserved_bytes.all.peak").map(|peak| format!("reserved peak {peak}")));
    if reported.peak_stats_reset {
        parts.push("peaks since a reset".to_owned());
    }
    let retries = reported.stats.get("num_alloc_retries").copied().unwrap_or(0);
    if retries > 0 {
        parts.push(format!("retries {retries}"));
    }
    lines.add_some("reported", &parts.join(", "));
    let outcome = reported.outcome.as_deref().unwrap_or_default();
    match outcome.char_indices().nth(OUTCOME_SHOWN) {
        Some((end, _)) => lines.add("outcome", format!("{}...", &outcome[..end])),
        None => lines.add_some("outcome", outcome),
    }
}

fn size_table(sizes: &SizeStats) -> Grid {
    let (allocs, bytes) = sizes.classes.iter().fold((0u64, 0u64), |(allocs, bytes), class| {
        (allocs.saturating_add(class.allocs), bytes.saturating_add(class.bytes))
    });
    let share = |part: u64, whole: u64| percent(part as f64 / whole.max(1) as f64);
    let first_power = |class: &SizeClass| match class.min_bytes.max(1).ilog2() {
        0..FIRST_POWER => 0,
        power => power / CLASSES_PER_ROW * CLASSES_PER_ROW,
    };
    let mut grid = Grid::new(&[Align::Right; 6]);
    grid.head(["  sizes from", "below", "allocs", "", "bytes", ""]);
    for row in sizes.classes.chunk_by(|a, b| first_power(a) == first_power(b)) {
        let power = first_power(&row[0]);
        let below = 1u64.checked_shl((power + CLASSES_PER_ROW).max(FIRST_POWER));
        let row_allocs = row.iter().fold(0, |sum: u64, class| sum.saturating_add(class.allocs));
        let row_bytes = row.iter().fold(0, |sum: u64, class| sum.saturating_add(class.bytes));
        let cells = [
            Bytes(1 << power).to_string(),
            below.map_or_else(String::new, |below| Bytes(below).to_string()),
            grouped(row_allocs),
            share(row_allocs, allocs),
            Bytes(row_bytes).to_string(),
            share(row_bytes, bytes),
        ];
        grid.row(cells, String::new());
    }
    grid
}

fn stream_table(streams: &[StreamStats], style: Style) -> String {
    let mut grid = Grid::new(&[Align::Right; 4]);
    grid.head(["  stream", "allocs", "bytes", ""]);
    for stream in streams.iter().take(STREAMS_SHOWN) {
        let cells = [
            format!("{:#x}", stream.handle),
            grouped(stream.allocs),
            Bytes(stream.bytes).to_string(),
            percent(stream.share),
        ];
        grid.row(cells, String::new());
    }
    let mut out = grid.render(style);
    let more = streams.len().saturating_sub(STREAMS_SHOWN);
    if more > 0 {
        out.push_str(&format!("  and {}; --json has all\n", counted(more as u64, "more stream")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::text::WIDTH;
    use crate::trace::{DeviceInfo, History, Source};
    use crate::units::{GIB, MIB};

    fn facts() -> FileFacts {
        let class = |min_bytes, allocs, bytes| SizeClass { min_bytes, allocs, bytes };
        FileFacts {
            file: "runs/llama.pickle.gz".to_owned(),
            file_bytes: Some(3 * MIB),
            header: Header {
                name: "llama".to_owned(),
                source: Source {
                    kind: SourceKind::TorchSnapshot,
                    version: Some("2.11.0+cu130".to_owned()),
                },
                device: DeviceInfo {
                    name: Some("NVIDIA H200".to_owned()),
                    total_bytes: Some(140 * GIB),
                    ..DeviceInfo::default()
                },
                settings: Some("max_split_size_mb:128".to_owned()),
                limit_bytes: Some(60 * GIB),
                history: History { frees_without_alloc: 1, allocs: 3, ..History::default() },
                ..Header::default()
            },
            phases: ["step0.forward", "step0.backward", "step1.forward", "save"]
                .map(str::to_owned)
                .into(),
            stats: TraceStats {
                events: 231_791,
                allocs: 100,
                frees: 90,
                phases: 4,
                steps: 2,
                duration_ns: 12_300_000_000,
                requested_bytes_peak: 48 * GIB,
                requested_peak_event: Some(1234),
                requested_peak_phase: Some("step1.forward".to_owned()),
                history_share: 0.75,
                sizes: SizeStats {
                    distinct: 4,
                    median_bytes: 512,
                    largest_bytes: 64 * MIB,
                    classes: vec![
                        class(1, 1, 1),
                        class(256, 2, 600),
                        class(512, 57, 29_696),
                        class(1024, 20, 20_480),
                        class(4096, 10, 40_960),
                        class(64 * MIB, 10, 640 * MIB),
                    ],
                },
                recorded: Some(RecordedStats {
                    segment_allocs: 30,
                    segment_frees: 1,
                    reserved_bytes_peak: 72 * GIB,
                    ooms: 0,
                    addresses: 100,
                }),
                ..TraceStats::default()
            },
            pools: Vec::new(),
            settings_changes: Vec::new(),
            reported: Some(Truth {
                stats: [("reserved_bytes.all.peak".to_owned(), 72 << 30)].into(),
                outcome: Some("ok".to_owned()),
                peak_stats_reset: true,
                calls_noted: false,
            }),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn a_recording_fits_a_screen_and_tells_what_matters() {
        let text = info(&facts(), Style::default());
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.lines().count() <= 24, "{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "snapshot of PyTorch's CUDA caching allocator, version 2.11.0+cu130, 3 MiB on disk",
            "NVIDIA H200, 140 GiB in total",
            "max_split_size_mb:128",
            "at most 75.0% of the run's allocs; 1 free without an alloc",
            "231,791 in 12.3 s: 100 alloc, 90 free",
            "4 marks, 2 steps: forward, backward, save",
            "peak 48 GiB at event 1,234 (step1.forward)",
            "segments reserve 72 GiB at most, 30 segment allocs, 1 segment free",
            "reserved peak 72 GiB, peaks since a reset",
        ] {
            assert!(words.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_late_history_tells_what_was_there() {
        let mut facts = facts();
        facts.header.history = History {
            frees_without_alloc: 1,
            allocs: 3,
            blocks_at_start: 5,
            allocs_of_run: Some(12),
        };
        facts.stats.history_share = facts.header.history.share();
        facts.stats.at_start = Some(StartStats {
            segments: 2,
            reserved_bytes: 4 * GIB,
            live_blocks: 4,
            requested_bytes: 3 * GIB,
            deferred_blocks: 1,
            deferred_bytes: MIB,
            guessed_blocks: 2,
        });
        facts.stats.requested_peak_event = None;
        facts.stats.requested_peak_phase = None;
        let text = info(&facts, Style::default());
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "history 25.0% of the run's 12 allocs at start",
            "4 live blocks of 3 GiB, 1 deferred block of 1 MiB, 2 segments of 4 GiB",
            "2 sizes guessed",
            "peak 48 GiB at the start, 0 B at the end",
        ] {
            assert!(words.contains(part), "{part} is missing in {text}");
        }
        facts.header.history.allocs_of_run = None;
        facts.stats.history_share = facts.header.history.share();
        assert_eq!(history(&facts), "at most 37.5% of the run's allocs");
    }

    #[test]
    fn pools_and_settings_changes_are_told() {
        let mut facts = facts();
        let pool = |name: &str, kind, no_split| Pool {
            name: name.to_owned(),
            kind,
            no_split,
            use_on_oom: no_split,
        };
        facts.pools = vec![
            pool("mempool (0, 1)", PoolKind::MemPool, true),
            pool("graph (1, 0)", PoolKind::Capture, false),
        ];
        assert_eq!(
            pools(&facts.pools),
            "2: mempool (0, 1) (MemPool, no_split, use_on_oom), graph (1, 0) (graph capture)"
        );
        facts.settings_changes = vec!["expandable_segments:True".to_owned(), String::new()];
        facts.stats.settings_changes = 3;
        let changes = "expandable_segments:True; default (3 changes)";
        assert_eq!(settings_changes(&facts), changes);
        let text = info(&facts, Style::default());
        for part in ["changed to", changes, "pools", "3 settings"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        facts.pools = vec![pool("p", PoolKind::MemPool, false); 9];
        assert!(pools(&facts.pools).starts_with("9: p (MemPool), "));
        assert!(pools(&facts.pools).ends_with(", p (MemPool), ..."), "{}", pools(&facts.pools));
        facts.settings_changes = vec!["x".to_owned(); 5];
        assert_eq!(settings_changes(&facts), "x; x; x; x; ... (3 changes)");
    }

    #[test]
    fn many_kinds_of_phases_are_cut_short() {
        let mut facts = facts();
        facts.phases = (0..20).map(|number| format!("phase{number}")).collect();
        assert!(phases(&facts).ends_with("phase6, phase7, ..."), "{}", phases(&facts));
    }

    #[test]
    fn neighbouring_size_classes_share_a_row() {
        let text = size_table(&facts().stats.sizes).render(Style::default());
        let rows: Vec<String> =
            text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(rows[1], "1 B 512 B 3 3.0% 601 B 0.0%");
        assert_eq!(rows[2], "512 B 4 KiB 77 77.0% 49 KiB 0.0%");
        assert_eq!(rows[3], "4 KiB 32 KiB 10 10.0% 40 KiB 0.0%");
        assert_eq!(rows[4], "16 MiB 128 MiB 10 10.0% 640 MiB 100.0%");
    }

    #[test]
    fn the_largest_class_has_no_upper_end() {
        let sizes = SizeStats {
            classes: vec![SizeClass { min_bytes: 1 << 63, allocs: 1, bytes: 1 << 63 }],
            ..SizeStats::default()
        };
        assert!(size_table(&sizes).render(Style::default()).contains("TiB"));
    }

    #[test]
    fn streams_are_told_apart_where_there_are_several() {
        let mut facts = facts();
        let stream = |handle| StreamStats { handle, allocs: 5, bytes: MIB, share: 0.1 };
        facts.stats.by_stream = (0..10).map(stream).collect();
        let text = info(&facts, Style::default());
        assert!(text.contains("0x7"), "{text}");
        assert!(text.contains("and 2 more streams; --json has all"), "{text}");
        facts.stats.by_stream.truncate(1);
        assert!(!info(&facts, Style::default()).contains("0x0"));
    }

    #[test]
    fn names_from_files_cannot_drive_the_terminal() {
        let mut facts = facts();
        facts.header.settings = Some("\x1b[2J".to_owned());
        facts.phases = vec!["\x1b]0;x\x07".to_owned()];
        facts.file = "a\x1b".to_owned();
        assert!(!info(&facts, Style::default()).contains('\x1b'));
    }
}
