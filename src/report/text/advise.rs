//! The answer of `advise`: the line to paste, what it saves and costs, and what else was tried.

use super::grid::{Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, duration, grouped, percent, printable, wrapped};
use crate::engine::{Status, TraceSummary};
use crate::experiment::advise::{Advice, Goal};
use crate::experiment::settings::Tried;
use crate::units::Bytes;

/// How many rows of what was tried the short answer shows.
const SHORT_ROWS: usize = 8;
/// How many traps of the advised settings it names.
const SHORT_WARNINGS: usize = 3;

/// From this share of live memory on there is little that settings could free.
const NEARLY_ALL: f64 = 0.9;

/// A warning about the advised settings: what it means, why, and where it was reported.
#[derive(Clone, Debug)]
pub struct Warning<'a> {
    /// What it means.
    pub text: &'a str,
    /// Where it was reported.
    pub address: Option<&'a str>,
}

/// Advice in one screen; with `full` every settings string that was tried.
pub fn advise(
    trace: &TraceSummary,
    advice: &Advice,
    warnings: &[Warning<'_>],
    full: bool,
    style: Style,
) -> String {
    let recorded = &advice.recorded;
    let mut text = String::new();
    if advice.partial {
        let tried = counted(advice.replays, "replay");
        let line = format!("partial: interrupted after {tried}, the best of these");
        text.push_str(&(style.paint(Tone::Bad, &line) + "\n"));
    }
    text.push_str(&wrapped("", &heading(trace, advice), "  "));
    text.push_str(&table(advice, full, style));
    if let Some(note) = left_out(advice, full) {
        text.push_str(&wrapped("  ", &note, "  "));
    }
    text.push('\n');
    if let Some(note) = ends_early(trace, advice) {
        text.push_str(&wrapped("", &note, "  "));
        text.push('\n');
    }
    match advice.advised.and_then(|index| advice.tried.get(index)) {
        Some(tried) => {
            let line = match tried.settings.as_str() {
                "" => "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF".to_owned(),
                settings => format!("export PYTORCH_CUDA_ALLOC_CONF={settings}"),
            };
            text.push_str(&format!("  {}\n\n", style.paint(Tone::Good, &printable(&line))));
            text.push_str(&wrapped("", &gain(advice, recorded, tried), "  "));
            let told = if full { warnings.len() } else { SHORT_WARNINGS };
            for warning in warnings.iter().take(told) {
                let address = warning.address.map_or_else(String::new, |a| format!(" ({a})"));
                text.push_str(&wrapped("- ", &format!("{}{address}", warning.text), "  "));
            }
            if warnings.len() > told {
                let more = counted((warnings.len() - told) as u64, "more trap");
                let command = format!("fraglab lint-conf {}", printable(&tried.settings));
                text.push_str(&wrapped("- ", &format!("{more}: {command}"), "  "));
            }
        }
        None => text.push_str(&wrapped("", &nothing_gained(trace, advice), "  ")),
    }
    text
}

fn heading(trace: &TraceSummary, advice: &Advice) -> String {
    let recorded = &advice.recorded;
    let goal = match advice.goal {
        Goal::Reserved => "least memory held",
        Goal::Retries => "fewest retries",
        Goal::Capacity => "smallest device",
    };
    let unused = recorded.reserved_bytes_peak.saturating_sub(trace.requested_bytes_peak);
    let held = match recorded.refusals {
        0 => format!(": {} too much ({})", Bytes(unused), percent(recorded.fragmentation)),
        refusals => format!(", {} refused", counted(refusals, "request")),
    };
    format!(
        "{}: {}; {} live at most, {} held{held}. Searched for the {goal}: {}, {} pairs of options \
         left out",
        printable(if trace.name.is_empty() { "trace" } else { &trace.name }),
        counted(trace.events, "event"),
        Bytes(trace.requested_bytes_peak),
        Bytes(recorded.reserved_bytes_peak),
        counted(advice.replays, "replay"),
        grouped(advice.pruned),
    )
}

fn table(advice: &Advice, full: bool, style: Style) -> String {
    let recorded = &advice.recorded;
    let largest = advice.tried.iter().chain([recorded]).map(|tried| tried.reserved_bytes_peak);
    let unit = SizeUnit::fitting(largest.max().unwrap_or(0));
    let mut grid = Grid::of_columns(1, 6);
    grid.head(["settings", "held", "saved", "", "smallest", "device", "device"]);
    let unit_name = unit.name;
    grid.head(["", unit_name, unit_name, "retries", unit_name, "calls", "time"]);
    let row = |tried: &Tried, name: &str, tone: Tone| {
        let smallest = tried.smallest_capacity_bytes.map_or_else(String::new, |b| unit.cell(b));
        let saved = match std::ptr::eq(tried, recorded) && tried.status == Status::Ok {
            true => String::new(),
            false => saved(recorded, tried.status, tried.reserved_bytes_peak, unit),
        };
        [
            Cell::toned(printable(name), tone),
            Cell::from(unit.cell(tried.reserved_bytes_peak)),
            Cell::from(saved),
            Cell::from(grouped(tried.alloc_retries)),
            Cell::from(smallest),
            Cell::from(grouped(tried.device_calls)),
            Cell::from(duration(tried.device_ns)),
        ]
    };
    let base = format!("as it was ({})", named(&recorded.settings));
    grid.row(row(recorded, &base, Tone::Plain), String::new());
    for index in shown(advice, full) {
        let tried = &advice.tried[index];
        let tone = if advice.advised == Some(index) { Tone::Good } else { Tone::Plain };
        grid.row(row(tried, named(&tried.settings), tone), String::new());
    }
    for what_if in &advice.what_ifs {
        let name = format!("[{}]", printable(&what_if.allocator));
        let Some(status) = what_if.status else {
            let why = what_if.message.as_deref().filter(|_| full);
            let note = why.map_or_else(String::new, |why| wrapped("    ", &printable(why), "    "));
            let empty = [""; 5].map(str::to_owned);
            grid.row([name, "-".to_owned()].into_iter().chain(empty), note);
            continue;
        };
        grid.row(
            [
                name,
                unit.cell(what_if.reserved_bytes_peak),
                saved(recorded, status, what_if.reserved_bytes_peak, unit),
                String::new(),
                String::new(),
                grouped(what_if.device_calls),
                duration(what_if.device_ns),
            ],
            String::new(),
        );
    }
    grid.render(style)
}

/// What is held less, or whether every request is met where that cannot be compared.
fn saved(recorded: &Tried, status: Status, reserved_bytes: u64, unit: SizeUnit) -> String {
    match (status, recorded.status) {
        (Status::Ok, Status::Ok) => {
            unit.signed_cell(recorded.reserved_bytes_peak as i64 - reserved_bytes as i64)
        }
        (Status::Ok, _) => "meets all".to_owned(),
        (Status::Oom, _) => "refused".to_owned(),
        (Status::Failed, _) => "failed".to_owned(),
    }
}

/// The rows to show: in short the best of each set of options, and what is advised.
fn shown(advice: &Advice, full: bool) -> Vec<usize> {
    if full {
        return (0..advice.tried.len()).collect();
    }
    let mut sets: Vec<&Vec<String>> = Vec::new();
    let mut shown = Vec::new();
    for (index, tried) in advice.tried.iter().enumerate() {
        let is_new = shown.len() < SHORT_ROWS && !sets.contains(&&tried.keys);
        if is_new || advice.advised == Some(index) {
            sets.push(&tried.keys);
            shown.push(index);
        }
    }
    shown
}

/// The defaults have a name, an empty string has none.
fn named(settings: &str) -> &str {
    if settings.is_empty() { "defaults" } else { settings }
}

fn left_out(advice: &Advice, full: bool) -> Option<String> {
    let more = (advice.tried.len() - shown(advice, full).len()) as u64;
    let mut parts = Vec::new();
    if more > 0 {
        parts.push(format!("{} more were tried (--full)", grouped(more)));
    }
    if !advice.what_ifs.is_empty() {
        parts.push("[in brackets]: other allocators, no settings of PyTorch's".to_owned());
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn gain(advice: &Advice, recorded: &Tried, tried: &Tried) -> String {
    let mut parts = Vec::new();
    if tried.refusals < recorded.refusals {
        parts.push(match recorded.refusals {
            1 => "meets the request that was refused".to_owned(),
            refusals => format!("meets all {} requests that were refused", grouped(refusals)),
        });
    } else if tried.reserved_bytes_peak < recorded.reserved_bytes_peak {
        let saved = recorded.reserved_bytes_peak - tried.reserved_bytes_peak;
        parts.push(format!(
            "saves {} of {} held ({})",
            Bytes(saved),
            Bytes(recorded.reserved_bytes_peak),
            percent(saved as f64 / recorded.reserved_bytes_peak.max(1) as f64),
        ));
    }
    if tried.alloc_retries != recorded.alloc_retries {
        parts.push(format!(
            "retries {} instead of {}",
            grouped(tried.alloc_retries),
            grouped(recorded.alloc_retries)
        ));
    }
    if let (Some(new), Some(old)) =
        (tried.smallest_capacity_bytes, recorded.smallest_capacity_bytes)
    {
        parts.push(format!("runs on a device of {} instead of {}", Bytes(new), Bytes(old)));
    }
    parts.push(cost(advice, recorded, tried));
    parts.join("; ")
}

/// What it costs in device calls and their time.
fn cost(advice: &Advice, recorded: &Tried, tried: &Tried) -> String {
    let more = |new: u64, old: u64| if new < old { "fewer" } else { "more" };
    let share = match advice.recorded_ns {
        0 => String::new(),
        ns => format!(
            " ({} of the recorded time)",
            percent(tried.device_ns.abs_diff(recorded.device_ns) as f64 / ns as f64)
        ),
    };
    format!(
        "takes {} {} and {} {}{share}",
        counted(tried.device_calls.abs_diff(recorded.device_calls), "device call"),
        more(tried.device_calls, recorded.device_calls),
        duration(tried.device_ns.abs_diff(recorded.device_ns)),
        if tried.device_ns < recorded.device_ns { "less" } else { "more" },
    )
}

/// Why nothing is advised.
fn nothing_gained(trace: &TraceSummary, advice: &Advice) -> String {
    let recorded = &advice.recorded;
    if let Some(bound) = advice.bound_bytes.filter(|&bound| trace.requested_bytes_peak > bound) {
        return format!(
            "No setting can help: live memory of {} is more than the {} there are",
            Bytes(trace.requested_bytes_peak),
            Bytes(bound)
        );
    }
    if recorded.refusals > 0 {
        let best = advice.tried.first().map_or(recorded.refusals, |tried| tried.refusals);
        return format!(
            "No setting of PyTorch's allocator meets every request: {} refused as it was, {} at \
             best; see `fraglab explain`",
            counted(recorded.refusals, "request"),
            grouped(best.min(recorded.refusals)),
        );
    }
    "No setting of PyTorch's allocator is better than what it has by a thousandth".to_owned()
}

/// What the advice is worth for a run that was refused a request.
fn ends_early(trace: &TraceSummary, advice: &Advice) -> Option<String> {
    let event = advice.refused_event?;
    let bound = advice.bound_bytes.unwrap_or(advice.recorded.reserved_bytes_peak).max(1);
    let live = trace.requested_bytes_peak as f64 / bound as f64;
    let text = format!(
        "The recorded run was refused a request at event {} of {} and ends there: what meets every \
         request here need not have met those that would have followed",
        grouped(event),
        grouped(trace.events),
    );
    Some(if live > NEARLY_ALL {
        format!(
            "{text}; {} of what there was were live, so no setting carries the job much further",
            percent(live)
        )
    } else {
        text
    })
}
