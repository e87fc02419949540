//! The answer of `run`: a head about the trace, then a row an allocator.

use super::chunk_steps::chunk_steps;
use super::grid::{Align, Cell, Grid};
use super::hardware::hardware;
use super::plan_steps::plan_steps;
use super::{SizeUnit, Style, Tone, counted, duration, grouped, percent, printable, rate, wrapped};
use crate::engine::{CardSummary, Outcome, RunResult, SimulatedTime, Status, StepTime};
use crate::metrics::{Split, SplitAt};
use crate::units::Bytes;

/// The runs of one trace.
#[derive(Clone, Copy, Debug)]
pub struct TraceRuns<'a> {
    /// The settings string (`PYTORCH_CUDA_ALLOC_CONF`) in force, if any.
    pub settings: Option<&'a str>,
    /// The share of the run that the history holds is only an upper bound.
    pub share_is_bound: bool,
    /// Event and bytes of the first request that the recorded run was refused, if any.
    pub recorded_refusal: Option<(u64, u64)>,
    /// The most that the recorded allocator held, in bytes, unless another device, limit or
    /// settings were asked for.
    pub recorded_reserved_bytes_peak: Option<u64>,
    /// A result an allocator, in the order asked for.
    pub results: &'a [&'a RunResult],
}

/// The runs of one trace as a screen of text; empty if there are none.
pub fn run(runs: &TraceRuns<'_>, style: Style) -> String {
    let Some(first) = runs.results.first() else {
        return String::new();
    };
    let mut out = trace_line(first, runs.share_is_bound, style);
    out.push_str(&device_line(first, runs.settings));
    out.push('\n');
    out.push_str(&table(runs.results).render(style));
    // With several allocators the screen belongs to the comparison; the JSON has every split.
    if let ([_], Some(split)) = (runs.results, &first.split) {
        out.push_str(&split_line(split));
    }
    if let [result] = runs.results {
        out.push_str(&steps_line(&result.time));
        out.push_str(&plan_steps(result, style));
        out.push_str(&chunk_steps(result, style));
    }
    out.push_str(&hardware(runs.results, style));
    let recorded = runs.results.iter().find(|result| result.allocator.name == "caching");
    if let (Some(result), Some(bytes)) = (recorded, runs.recorded_reserved_bytes_peak)
        && result.peaks.reserved_bytes_peak != bytes
    {
        out.push_str(&recorded_line(bytes, &result.trace.source));
    }
    if let Some(note) = refusal_note(runs.recorded_refusal, runs.results.iter().copied()) {
        out.push_str(&under_row(&[note]));
    }
    out
}

/// What to think of a run that is no copy of the recorded one.
fn recorded_line(recorded_bytes: u64, source: &str) -> String {
    let why = match source.split(' ').next() {
        Some("kineto") => "a profile shows neither its streams nor sizes before rounding",
        _ => {
            "its limit or device may not be known here, or it hangs on addresses (--address-seeds)"
        }
    };
    let text = format!("the recorded run reserved {}: {why}", Bytes(recorded_bytes));
    wrapped("  ", &text, "    ")
}

/// What an `ok` is worth if the recorded run was refused something: event and bytes. Nothing if it
/// was not, or no result is `ok`.
pub(in crate::report) fn refusal_note<'a>(
    refusal: Option<(u64, u64)>,
    mut results: impl Iterator<Item = &'a RunResult>,
) -> Option<String> {
    let (event, bytes) = refusal?;
    let result = results.find(|result| result.outcome.status == Status::Ok)?;
    let unlimited =
        result.device.capacity_bytes.is_none() && result.allocator.limit_bytes.is_none();
    let meaning = if unlimited {
        "neither limit nor capacity is known, so nothing is refused here: give --limit or --capacity"
    } else {
        "ok means that it is met here, and it counts in the reserved peak but not in the requested \
         one; the trace ends where the recorded run did"
    };
    Some(format!(
        "the recorded run was refused {} at event {} of {}; {meaning}",
        Bytes(bytes),
        grouped(event),
        grouped(result.trace.events),
    ))
}

/// `at the reserved peak, event 9: internal 12 MiB, hard 1.50 GiB, soft 20 MiB`
fn split_line(split: &Split) -> String {
    let at = match split.at {
        SplitAt::ReservedPeak => "the reserved peak",
        SplitAt::Oom => "the first refusal",
        SplitAt::Event => "the moment asked for",
    };
    let kinds = [
        (split.internal_bytes, "internal"),
        (split.deferred_bytes, "deferred"),
        (split.stream_bytes, "other stream or pool"),
        (split.hard_bytes, "hard"),
        (split.soft_bytes, "soft"),
    ];
    let kinds = kinds.into_iter().filter(|(bytes, _)| *bytes > 0);
    let parts: Vec<String> =
        kinds.map(|(bytes, kind)| format!("{kind} {}", Bytes(bytes))).collect();
    let unused = if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") };
    let text = format!("unused at {at}, event {}: {unused}", grouped(split.at_event));
    wrapped("  ", &text, "    ")
}

/// `device time a step: step0 41.2 ms (1.2%), then 1.20 ms (0.2%) on average`; nothing without
/// steps.
fn steps_line(time: &SimulatedTime) -> String {
    let (steps, outside): (Vec<&StepTime>, Vec<&StepTime>) =
        time.steps.iter().partition(|step| step.is_step());
    let Some((first, others)) = steps.split_first() else {
        return String::new();
    };
    let mut text = format!("device time a step: {} {}", printable(&first.name), cost(&[first]));
    if let [_, ..] = others {
        let average = if others.len() > 1 { " on average" } else { "" };
        text.push_str(&format!(", then {}{average}", cost(others)));
    }
    let outside_ns: u64 = outside.iter().map(|part| part.allocator_device_ns).sum();
    if outside_ns > 0 {
        text.push_str(&format!("; outside the steps {} in all", duration(outside_ns)));
    }
    wrapped("  ", &text, "    ")
}

/// Mean device time of these steps, and its share of their recorded time if there is one.
fn cost(steps: &[&StepTime]) -> String {
    let device_ns: u64 = steps.iter().map(|step| step.allocator_device_ns).sum();
    let recorded_ns: u64 = steps.iter().map(|step| step.recorded_ns).sum();
    let each = duration(device_ns / (steps.len() as u64).max(1));
    match recorded_ns {
        0 => each,
        _ => format!("{each} ({})", percent(device_ns as f64 / recorded_ns as f64)),
    }
}

/// `llama-1b: 231,791 events, 1 stream, torch_snapshot 2.11.0+cu130, 71.2% of its history`
pub(in crate::report) fn trace_line(
    result: &RunResult,
    share_is_bound: bool,
    style: Style,
) -> String {
    let trace = &result.trace;
    let mut parts = vec![counted(trace.events, "event"), counted(trace.streams, "stream")];
    if !trace.source.is_empty() {
        parts.push(printable(&trace.source).into_owned());
    }
    if trace.history_share < 1.0 {
        let bound = if share_is_bound { "at most " } else { "" };
        parts.push(format!("{bound}{} of its history", percent(trace.history_share)));
    }
    if let Some(start) = &result.start {
        parts.push(format!(
            "{} ({}) there at its start",
            counted(start.blocks, "block"),
            Bytes(start.requested_bytes)
        ));
    }
    let name = printable(&trace.name);
    let name = if name.is_empty() { "trace".into() } else { name };
    let line = wrapped("", &format!("{name}: {}", parts.join(", ")), "  ");
    // Painted after wrapping: colour codes have no width.
    match line.strip_prefix(&*name) {
        Some(rest) => style.paint(Tone::Heading, &name) + rest,
        None => line,
    }
}

/// `device: sim 139.80 GiB, costs of h200; settings max_split_size_mb:128; limit 60 GiB`
fn device_line(result: &RunResult, settings: Option<&str>) -> String {
    let capacity = capacity(result);
    let limit = result.allocator.limit_bytes;
    wrapped("", &setup(result, Some(&capacity), settings, limit).join("; "), "  ")
}

/// `139.80 GiB`, or `unlimited`
pub(in crate::report) fn capacity(result: &RunResult) -> String {
    let bytes = result.device.capacity_bytes;
    bytes.map_or_else(|| "unlimited".to_owned(), |bytes| Bytes(bytes).to_string())
}

/// `costs of a100-80g (derived)`
pub(super) fn costs(result: &RunResult) -> String {
    let device = &result.device;
    let derived = if device.profile_derived { " (derived)" } else { "" };
    format!("costs of {}{derived}", printable(&device.profile))
}

/// What was replayed on, in parts: device, settings, limit.
pub(in crate::report) fn setup(
    result: &RunResult,
    capacity: Option<&str>,
    settings: Option<&str>,
    limit_bytes: Option<u64>,
) -> Vec<String> {
    let device = &result.device;
    let capacity = capacity.map(|capacity| format!(" {capacity}")).unwrap_or_default();
    let name = match &device.card {
        Some(CardSummary { name, driver, ordinal }) => {
            format!("{} (cuda:{ordinal}, driver {})", printable(name), printable(driver))
        }
        None => device.kind.to_owned(),
    };
    let mut parts = vec![format!("device: {name}{capacity}, {}", costs(result))];
    parts.extend(device.caps());
    if let Some(settings) = settings.filter(|settings| !settings.is_empty()) {
        parts.push(format!("settings {}", printable(settings)));
    }
    if let Some(limit) = limit_bytes {
        parts.push(format!("limit {}", Bytes(limit)));
    }
    parts
}

fn table(results: &[&RunResult]) -> Grid {
    let peaks = results
        .iter()
        .map(|result| result.peaks.reserved_bytes_peak.max(result.peaks.requested_bytes_peak));
    let unit = SizeUnit::fitting(peaks.max().unwrap_or(0));
    let peak = format!("peak {}", unit.name);
    use Align::{Left, Right};
    let mut grid = Grid::new(&[Left, Left, Right, Right, Right, Right, Right, Right, Right, Right]);
    grid.head([
        "",
        "",
        "requested",
        "allocated",
        "reserved",
        "excess",
        "",
        "device",
        "device",
        "event",
    ]);
    grid.head([
        "allocator",
        "status",
        &peak,
        &peak,
        &peak,
        unit.name,
        "frag",
        "calls",
        "time",
        "rate",
    ]);
    for result in results {
        let peaks = &result.peaks;
        let cells = [
            printable(&result.allocator.name).into_owned().into(),
            status_cell(result.outcome.status),
            unit.cell(peaks.requested_bytes_peak).into(),
            unit.cell(peaks.allocated_bytes_peak).into(),
            unit.cell(peaks.reserved_bytes_peak).into(),
            unit.signed_cell(result.excess_bytes).into(),
            percent(result.fragmentation).into(),
            calls_cell(result.calls.total()).into(),
            duration(result.time.allocator_device_ns).into(),
            rate(result.wall.events_per_second).into(),
        ];
        grid.row(cells, under_row(&notes(result)) + &spread_note(result));
    }
    grid
}

pub(super) fn status_cell(status: Status) -> Cell {
    let tone = match status {
        Status::Ok => Tone::Good,
        Status::Oom | Status::Failed => Tone::Bad,
    };
    Cell::toned(status.name(), tone)
}

/// Exact while it is short: the JSON has every digit.
pub(super) fn calls_cell(calls: u64) -> String {
    if calls < 100_000 { grouped(calls) } else { rate(calls as f64) }
}

/// What went wrong, in sentences.
pub(in crate::report) fn notes(result: &RunResult) -> Vec<String> {
    match result.outcome.status {
        Status::Ok => start(result),
        Status::Oom => [start(result), vec![oom(result)]].concat(),
        Status::Failed => {
            let message =
                result.outcome.message.as_deref().unwrap_or("the replay could not be done");
            vec![printable(message).into_owned()]
        }
    }
}

/// Sentences under a row.
pub(super) fn under_row(notes: &[String]) -> String {
    notes.iter().map(|note| wrapped("  ", note, "    ")).collect()
}

/// `20 address policies: reserved peak 24.82 to 25.10 GiB, 3 of them out of memory`
fn spread_note(result: &RunResult) -> String {
    let Some(spread) = result.address_spread else { return String::new() };
    if !spread.addresses_matter {
        let text = "does the same whatever addresses the device gives out";
        return wrapped("  ", text, "    ");
    }
    let (min, max) = (spread.reserved_bytes_peak_min, spread.reserved_bytes_peak_max);
    let mut text = format!("{} address policies: reserved peak {}", spread.seeds, Bytes(min));
    if min == max {
        text.push_str(" under all");
    } else {
        text.push_str(&format!(" to {}", Bytes(max)));
        if Bytes(min).to_string() == Bytes(max).to_string() {
            text.push_str(&format!(" ({} more)", Bytes(max - min)));
        }
    }
    if spread.seeds_with_oom > 0 {
        text.push_str(&format!(", {} of them out of memory, ", grouped(spread.seeds_with_oom)));
        if spread.ooms_min < spread.ooms_max {
            text.push_str(&format!("{} to ", grouped(spread.ooms_min)));
        }
        text.push_str(&format!("{} refused", counted(spread.ooms_max, "request")));
    }
    wrapped("  ", &text, "    ")
}

/// What is odd about how a history that begins late was begun.
fn start(result: &RunResult) -> Vec<String> {
    let Some(start) = &result.start else { return Vec::new() };
    if !start.layout_kept {
        let why = match result.hardware {
            Some(_) => "a GPU begins with nothing",
            None => "the recorded layout fits PyTorch's allocator with the recorded settings only",
        };
        return vec![format!(
            "was first asked for the blocks that were there, and its calls count these: {why}"
        )];
    }
    let bounds =
        [("capacity", result.device.capacity_bytes), ("limit", result.allocator.limit_bytes)];
    let exceeded = bounds.into_iter().filter_map(|(name, bound)| {
        let bound = bound.filter(|&bytes| bytes < start.reserved_bytes)?;
        let held = Bytes(start.reserved_bytes);
        Some(format!("began with {held} held already, more than the {name} of {}", Bytes(bound)))
    });
    exceeded.collect()
}

/// `event 4,012 asked for 1.95 GiB: largest hole 120 MiB, reserved peak 38.49 GiB, capacity ...`
fn oom(result: &RunResult) -> String {
    if let Some(stop) = result.chunk.as_ref().and_then(|chunk| chunk.hard_stop)
        && result.outcome.event_index.is_none()
    {
        return stop.to_string();
    }
    let Outcome { event_index, requested_bytes, largest_hole_bytes, ref refused_call, .. } =
        result.outcome;
    let mut text = match event_index {
        Some(event) => format!("event {}", grouped(event)),
        None => "a request".to_owned(),
    };
    if let Some(bytes) = requested_bytes {
        text.push_str(&format!(" asked for {}", Bytes(bytes)));
    }
    let mut parts = Vec::new();
    if let Some(bytes) = largest_hole_bytes {
        parts.push(format!("largest hole {}", Bytes(bytes)));
    }
    parts.push(format!("reserved peak {}", Bytes(result.peaks.reserved_bytes_peak)));
    parts.extend(refused_call.as_ref().map(|call| format!("the device refused {call}")));
    if let Some(bytes) = result.device.capacity_bytes {
        parts.push(format!("capacity {}", Bytes(bytes)));
    }
    if let Some(bytes) = result.allocator.limit_bytes {
        parts.push(format!("limit {}", Bytes(bytes)));
    }
    parts.extend(result.device.caps());
    let refusals = result.counters.get("ooms").copied().unwrap_or(1);
    if refusals > 1 {
        parts.push(format!("{} requests refused in all", grouped(refusals)));
    }
    format!("{text}: {}", parts.join(", "))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use expect_test::expect;
    use serde_json::Value;

    use super::*;
    use crate::device::CallCounts;
    use crate::engine::{
        AllocatorSummary, DeviceSummary, FinalLevels, SCHEMA_VERSION, TraceSummary, Wall,
    };
    use crate::metrics::Peaks;
    use crate::report::text::WIDTH;
    use crate::trace::AddressPolicy;
    use crate::units::{GIB, MIB};

    /// A result as the engine would give it, with a reserved peak of `reserved_bytes`.
    pub(crate) fn sample(allocator: &str, reserved_bytes: u64) -> RunResult {
        let requested = 47 * GIB + 850 * MIB;
        RunResult {
            schema_version: SCHEMA_VERSION,
            fraglab_version: env!("CARGO_PKG_VERSION"),
            trace: TraceSummary {
                name: "llama-1b-varlen".to_owned(),
                events: 231_791,
                allocs: 115_000,
                requested_bytes_peak: requested,
                streams: 1,
                source: "torch_snapshot 2.11.0+cu130".to_owned(),
                history_share: 1.0,
            },
            allocator: AllocatorSummary {
                name: allocator.to_owned(),
                params: BTreeMap::new(),
                limit_bytes: None,
            },
            device: DeviceSummary {
                kind: "sim",
                card: None,
                profile: "h200".to_owned(),
                profile_derived: false,
                capacity_bytes: Some(150_109_880_320),
                address_bytes_max: None,
                mappings_max: None,
                address_policy: Some(AddressPolicy::Chunks),
                address_bytes_peak: Some(0),
                mappings_peak: Some(0),
            },
            outcome: Outcome {
                status: Status::Ok,
                event_index: None,
                requested_bytes: None,
                largest_hole_bytes: None,
                refused_call: None,
                message: None,
            },
            peaks: Peaks {
                requested_bytes_peak: requested,
                allocated_bytes_peak: requested + 10 * MIB,
                active_bytes_peak: requested + 10 * MIB,
                reserved_bytes_peak: reserved_bytes,
                ..Peaks::default()
            },
            start: None,
            final_levels: FinalLevels::default(),
            efficiency: requested as f64 / reserved_bytes as f64,
            fragmentation: 1.0 - requested as f64 / reserved_bytes as f64,
            excess_bytes: reserved_bytes as i64 - requested as i64,
            utilization: 0.66,
            wasted_bytes: 340 * MIB,
            active_utilization: 0.66,
            split: Some(Split {
                at_event: 9,
                at: SplitAt::ReservedPeak,
                internal_bytes: 1,
                deferred_bytes: 2,
                hard_bytes: 3,
                soft_bytes: 4,
                stream_bytes: 5,
            }),
            address_spread: None,
            calls: CallCounts { malloc: 1200, free: 34, ..CallCounts::default() },
            counters: BTreeMap::from([("ooms".to_owned(), 0)]),
            torch_stats: Some(BTreeMap::from([("num_ooms".to_owned(), 0)])),
            plan: None,
            transfers: None,
            chunk: None,
            time: SimulatedTime { allocator_device_ns: 1_234_567_890, ..SimulatedTime::default() },
            wall: Wall {
                events_per_second: 20_123_456.0,
                seconds: 0.01,
                peak_rss_bytes: 7,
                hardware: None,
            },
            hardware: None,
        }
    }

    fn refused(mut result: RunResult) -> RunResult {
        result.outcome.status = Status::Oom;
        result.outcome.event_index = Some(4012);
        result.outcome.requested_bytes = Some(1950 * MIB);
        result.outcome.largest_hole_bytes = Some(120 * MIB);
        result.counters.insert("ooms".to_owned(), 3);
        result
    }

    fn screen(results: &[&RunResult], settings: Option<&str>) -> String {
        let runs = TraceRuns {
            settings,
            share_is_bound: true,
            recorded_refusal: None,
            recorded_reserved_bytes_peak: None,
            results,
        };
        run(&runs, Style::default())
    }

    #[test]
    fn a_trace_and_its_allocators_read_well() {
        let caching = sample("caching", 72 * GIB + 700 * MIB);
        let expandable = sample("expandable", 49 * GIB + 360 * MIB);
        let native = refused(sample("native", 139 * GIB));
        let text = screen(&[&caching, &expandable, &native], Some("max_split_size_mb:128"));
        expect![[r#"
            llama-1b-varlen: 231,791 events, 1 stream, torch_snapshot 2.11.0+cu130
            device: sim 139.80 GiB, costs of h200; settings max_split_size_mb:128

                              requested allocated reserved excess       device device event
            allocator  status  peak GiB  peak GiB peak GiB    GiB  frag  calls   time  rate
            caching    ok         47.83     47.84    72.68  24.85 34.2%  1,234 1.23 s 20.1M
            expandable ok         47.83     47.84    49.35   1.52  3.1%  1,234 1.23 s 20.1M
            native     oom        47.83     47.84   139.00  91.17 65.6%  1,234 1.23 s 20.1M
              event 4,012 asked for 1.90 GiB: largest hole 120 MiB, reserved peak 139 GiB,
                capacity 139.80 GiB, 3 requests refused in all
        "#]]
        .assert_eq(&text);
    }

    #[test]
    fn six_allocators_fit_one_screen() {
        let names = ["caching", "expandable", "stitch+policy=shipped", "planned", "best-fit", "x"];
        let mut results: Vec<RunResult> =
            names.iter().map(|name| refused(sample(name, 172 * GIB))).collect();
        results[0].calls.malloc = 154_200;
        results[0].time.allocator_device_ns = 36_200_000;
        let results: Vec<&RunResult> = results.iter().collect();
        let text = screen(&results, Some("garbage_collection_threshold:0.8"));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.lines().count() <= 24, "{text}");
        assert!(text.contains("\nstitch+policy=shipped\n"), "{text}");
        assert!(text.contains(" 154k "), "{text}");
    }

    #[test]
    fn a_cut_history_and_a_limit_are_told() {
        let mut result = sample("caching", 3 * MIB);
        result.trace.history_share = 0.712;
        result.allocator.limit_bytes = Some(60 * GIB);
        result.device.capacity_bytes = None;
        result.peaks.requested_bytes_peak = 2 * MIB;
        let text = screen(&[&result], None);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(", at most 71.2% of its history"), "{text}");
        assert!(text.contains("device: sim unlimited, costs of h200; limit 60 GiB"), "{text}");
        assert!(text.contains("peak MiB"), "small sizes in small units: {text}");
    }

    #[test]
    fn names_from_files_cannot_drive_the_terminal() {
        let mut result = sample("caching", GIB);
        result.trace.name = "evil\x1b[2J".to_owned();
        assert!(!screen(&[&result], Some("\x1b]0;x\x07")).contains('\x1b'));
    }

    #[test]
    fn a_single_allocator_shows_where_its_fragmentation_comes_from() {
        let mut one = sample("caching", 72 * GIB);
        let line = "unused at the reserved peak, event 9: internal 1 B, deferred 2 B, other \
                    stream or pool 5 B, \
                    hard 3 B, soft 4 B";
        let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(screen(&[&one], None)).ends_with(line), "{}", screen(&[&one], None));
        assert!(!screen(&[&one, &one], None).contains("unused"));
        one.split = None;
        assert!(!screen(&[&one], None).contains("unused"));
    }

    fn step(name: &str, recorded_ms: u64, device_us: u64) -> StepTime {
        StepTime {
            name: name.to_owned(),
            recorded_ns: recorded_ms * 1_000_000,
            program_ns: 0,
            allocator_device_ns: device_us * 1000,
            simulated_ns: 0,
            share: None,
            calls: 0,
            map_calls: 0,
        }
    }

    #[test]
    fn a_single_allocator_shows_what_its_calls_take_a_step() {
        let line = |steps: &[StepTime]| {
            let mut result = sample("caching", GIB);
            result.split = None;
            result.time.steps = steps.to_vec();
            let text = screen(&[&result], None);
            assert!(!screen(&[&result, &result], None).contains("a step"), "{text}");
            text.lines().skip_while(|line| !line.contains("device time a step")).collect::<String>()
        };
        let first = step("step0", 1000, 31_000);
        assert_eq!(
            line(std::slice::from_ref(&first)),
            "  device time a step: step0 31.0 ms (3.1%)"
        );
        // 1 and 3 ms of 200 and 200 ms: 2 ms each, 4 of 400 ms.
        let steps = [
            step("before", 10, 5_000),
            first,
            step("step1", 200, 1_000),
            step("step2", 200, 3_000),
            step("after", 0, 500),
        ];
        assert_eq!(
            line(&steps),
            "  device time a step: step0 31.0 ms (3.1%), then 2.00 ms (1.0%) on average;    \
             outside the steps 5.50 ms in all"
        );
        // No times recorded, no shares.
        let untimed = [step("step7", 0, 10), step("step8", 0, 20)];
        assert_eq!(line(&untimed), "  device time a step: step7 10.0 µs, then 20.0 µs");
        assert_eq!(line(&[]), "");
    }

    #[test]
    fn a_derived_profile_is_told() {
        let mut result = sample("caching", GIB);
        result.device.profile = "a100-80g".to_owned();
        result.device.profile_derived = true;
        let text = screen(&[&result], None);
        assert!(text.contains("costs of a100-80g (derived)"), "{text}");
    }

    #[test]
    fn caps_of_the_device_are_told() {
        let mut result = sample("caching", GIB);
        result.device.address_bytes_max = Some(2 * GIB);
        result.device.mappings_max = Some(5000);
        let text = screen(&[&result], None);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("h200; 2 GiB of addresses; at most 5,000 mappings"), "{text}");
    }

    #[test]
    fn no_runs_no_text() {
        assert_eq!(screen(&[], None), "");
    }

    /// The names that scripts rely on: DESIGN 7, word for word.
    #[test]
    fn the_json_has_exactly_the_promised_names() {
        let json = crate::report::json::pretty(&sample("caching", GIB)).unwrap();
        let value: Value = serde_json::from_str(&json).unwrap();
        let has = |path: &str, names: &str| {
            let part = path.split('.').filter(|key| !key.is_empty()).fold(&value, |v, k| &v[k]);
            for name in names.split(", ") {
                assert!(part.get(name).is_some(), "{path}.{name} is missing in {json}");
            }
        };
        has(
            "",
            "schema_version, fraglab_version, trace, allocator, device, outcome, peaks, final, \
             efficiency, fragmentation, excess_bytes, utilization, active_utilization, split, \
             calls, counters, torch_stats, time, wall",
        );
        has("trace", "name, events, allocs, requested_bytes_peak, streams, source, history_share");
        has("allocator", "name, params, limit_bytes");
        has("device", "kind, profile, capacity_bytes, address_policy");
        has("outcome", "status, event_index, requested_bytes, largest_hole_bytes, message");
        has(
            "peaks",
            "requested_bytes_peak, allocated_bytes_peak, active_bytes_peak, reserved_bytes_peak",
        );
        has("final", "requested_bytes, allocated_bytes, active_bytes, reserved_bytes");
        has(
            "split",
            "at_event, at, internal_bytes, deferred_bytes, hard_bytes, soft_bytes, stream_bytes",
        );
        has(
            "calls",
            "malloc, free, address_reserve, address_free, create, release, map, unmap, set_access",
        );
        has("time", "allocator_device_ns, recorded_ns, recorded_device_ns, simulated_ns, steps");
        has("wall", "events_per_second, seconds, peak_rss_bytes");
        assert_eq!(value["outcome"]["status"], "ok");
        assert_eq!(value["split"]["at"], "reserved_peak");
    }

    #[test]
    fn a_run_that_is_no_copy_of_the_recorded_one_says_so() {
        let result = sample("caching", 39 * GIB);
        let text = |recorded_bytes| {
            let runs = TraceRuns {
                settings: None,
                share_is_bound: false,
                recorded_refusal: None,
                recorded_reserved_bytes_peak: Some(recorded_bytes),
                results: &[&result],
            };
            run(&runs, Style::default())
        };
        assert!(text(33 * GIB).contains("the recorded run reserved 33 GiB:"));
        assert!(!text(39 * GIB).contains("the recorded run reserved"));
    }

    #[test]
    fn an_ok_beside_a_recorded_refusal_says_what_it_is_worth() {
        let mut result = sample("caching", 40 * GIB);
        result.trace.events = 2_522;
        let text = |result: &RunResult| {
            let runs = TraceRuns {
                settings: None,
                share_is_bound: false,
                recorded_refusal: Some((1_836, 2 * GIB)),
                recorded_reserved_bytes_peak: None,
                results: &[result],
            };
            run(&runs, Style::default())
        };
        result.device.capacity_bytes = Some(80 * GIB);
        let limited = text(&result);
        assert!(limited.contains("was refused 2 GiB at event 1,836 of 2,522"), "{limited}");
        assert!(limited.contains("the trace ends where the recorded run did"), "{limited}");
        result.device.capacity_bytes = None;
        result.allocator.limit_bytes = None;
        assert!(text(&result).contains("give --limit or --capacity"));
        result.outcome.status = Status::Oom;
        assert!(!text(&result).contains("recorded run"), "an oom speaks for itself");
    }
}
