//! The answer of `plan`: a paragraph for one problem, a table for several.

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, duration, grouped, printable, wrapped};
use crate::engine::{BindingInstant, CapacityAnswer, CapacityReason, PlanResult};
use crate::units::Bytes;

/// Buffers of a reason that are named.
const NAMED_MAX: usize = 12;

/// One problem: height, bound, gap, where the bound is reached, time.
pub fn plan(result: &PlanResult, style: Style) -> String {
    let source = &result.source;
    let mut text = style.paint(Tone::Heading, &printable(&source.name));
    let rounding = match result.granularity_bytes {
        1 => String::new(),
        bytes => format!(", sizes in multiples of {}", Bytes(bytes)),
    };
    text.push_str(&format!(": {}{rounding}\n", counted(result.buffers, "buffer")));
    let mut line = |name: &str, value: String| text.push_str(&format!("  {name:<13}{value}\n"));
    line("height", exact_size(result.height_bytes));
    line("lower bound", exact_size(result.lower_bound_bytes));
    line("gap", gap(result, style));
    if result.full_span_bytes > 0 && !result.proven {
        let above = percent_of_gap(result.gap_above_full_span);
        let span = Bytes(result.full_span_bytes);
        line("", format!("{above} without the {span} that live from first to last"));
    }
    if result.partial {
        line("partial", "interrupted: a longer search might find a lower packing".to_owned());
    }
    let used = result.pools.iter().filter(|pool| pool.height_bytes > 0).count();
    if used > 1 {
        for (pool, packing) in result.pools.iter().enumerate() {
            let size = exact_size(packing.height_bytes);
            line(&format!("pool {pool}"), format!("{size}, {}", packing.found_by));
        }
    } else if let Some(pool) = result.pools.iter().find(|pool| pool.height_bytes > 0) {
        line("found by", pool.found_by.clone());
    }
    if let Some(first) = result.binding.first() {
        line("bound at", binding(first, source.tick, result.binding.len()));
    }
    line("time", time(result));
    if let Some(capacity) = &result.capacity {
        line("capacity", capacity_answer(capacity, style));
    }
    text
}

/// Why a capacity cannot be met, with the names of the buffers.
pub fn capacity_reason(
    result: &PlanResult,
    answer: &CapacityAnswer,
    reason: &CapacityReason,
    name_of: impl Fn(u64) -> String,
) -> String {
    let capacity = exact_size(answer.capacity_bytes);
    let count = counted(reason.buffers.len() as u64, "buffer");
    let head = match (reason.kind, reason.tick, reason.bytes) {
        ("load", Some(tick), Some(bytes)) => {
            let at = result.binding.iter().find(|at| at.binding.start == tick);
            let all = at.map_or_else(String::new, |at| {
                let live = counted(at.binding.buffers, "buffer");
                let short = result.lower_bound_bytes.saturating_sub(answer.capacity_bytes);
                let need = exact_size(result.lower_bound_bytes);
                format!("{live} live at once need {need}, {} too much; ", exact_size(short))
            });
            let tick_name = result.source.tick;
            format!(
                "at {tick_name} {}: {all}already these {} of them need {}",
                grouped(tick),
                grouped(reason.buffers.len() as u64),
                exact_size(bytes),
            )
        }
        ("shape", _, _) => {
            format!("these {count} cannot be packed into {capacity}, though any one less could")
        }
        ("reduced", _, _) => format!(
            "these {count} cannot be packed into {capacity}; whether all are needed for that was \
             not settled in the time given"
        ),
        _ if result.planner != "best" => {
            format!("{} found no packing within {capacity}; another planner may", result.planner)
        }
        _ => format!(
            "no packing within {capacity} was found in the time given; that there is none is not \
             proven: give more --time"
        ),
    };
    let mut text = wrapped("  why          ", &head, "               ");
    if !reason.buffers.is_empty() {
        let named = reason.buffers.iter().take(NAMED_MAX).map(|&buffer| name_of(buffer));
        let mut names: Vec<String> = named.map(|name| printable(&name).into_owned()).collect();
        if reason.buffers.len() > NAMED_MAX {
            names.push(format!("and {} more", reason.buffers.len() - NAMED_MAX));
        }
        text.push_str(&wrapped("               ", &names.join(", "), "               "));
    }
    text
}

/// Several problems: a row each, then one line about all.
pub fn plans(results: &[PlanResult], unreadable: u64, style: Style) -> String {
    use Align::{Left, Right};
    let largest = results.iter().map(|result| result.height_bytes).max().unwrap_or(0);
    let unit = SizeUnit::fitting(largest);
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Left, Right]);
    let (height, bound) = (format!("height {}", unit.name), format!("bound {}", unit.name));
    grid.head(["problem", "buffers", &height, &bound, "gap", "found by", "time"]);
    for result in results {
        let pool = result.pools.iter().max_by_key(|pool| pool.height_bytes);
        let gap = if result.proven {
            Cell::toned("proven", Tone::Good)
        } else {
            Cell::from(percent_of_gap(result.gap))
        };
        let cells = [
            Cell::from(printable(&result.source.name).into_owned()),
            grouped(result.buffers).into(),
            unit.cell(result.height_bytes).into(),
            unit.cell(result.lower_bound_bytes).into(),
            gap,
            pool.map_or_else(String::new, |pool| pool.found_by.clone()).into(),
            duration(nanoseconds(result.wall.seconds)).into(),
        ];
        let note = match &result.capacity {
            Some(capacity) if !capacity.fits => {
                format!("    {}\n", capacity_answer(capacity, style))
            }
            _ => String::new(),
        };
        grid.row(cells, note);
    }
    let mut text = grid.render(style);
    let proven = results.iter().filter(|result| result.proven).count() as u64;
    let all = counted(results.len() as u64, "problem");
    let answers = results.iter().filter_map(|result| result.capacity.as_ref());
    if answers.clone().next().is_some() {
        let fit = answers.filter(|answer| answer.fits).count() as u64;
        text.push_str(&format!("{} of {all} fit, ", grouped(fit)));
    }
    text.push_str(&format!("{} of {all} proven lowest", grouped(proven)));
    if unreadable > 0 {
        text.push_str(&format!(", {} could not be read", grouped(unreadable)));
    }
    text.push('\n');
    text
}

/// `47.78 GiB (51,304,759,296 B)`
fn exact_size(bytes: u64) -> String {
    let (short, long) = (Bytes(bytes).to_string(), grouped(bytes));
    if bytes < 1024 { short } else { format!("{short} ({long} B)") }
}

fn gap(result: &PlanResult, style: Style) -> String {
    if result.proven {
        return style.paint(Tone::Good, "none: proven to be the lowest");
    }
    let short = result.height_bytes - result.lower_bound_bytes;
    format!("{} ({}), not proven", percent_of_gap(result.gap), Bytes(short))
}

/// Gaps are small: `0.0042%`.
fn percent_of_gap(gap: f64) -> String {
    if gap == 0.0 { "0%".to_owned() } else { format!("{:.4}%", 100.0 * gap) }
}

fn binding(first: &BindingInstant, tick: &str, count: usize) -> String {
    let binding = &first.binding;
    let mut text = format!("{tick} {}", grouped(binding.start));
    if let Some(phase) = &first.phase {
        text.push_str(&format!(" ({})", printable(phase)));
    }
    text.push_str(&format!(", {} live", counted(binding.buffers, "buffer")));
    if count > 1 {
        text.push_str(&format!("; {} more intervals", count - 1));
    }
    text
}

fn time(result: &PlanResult) -> String {
    let wall = &result.wall;
    let mut text = duration(nanoseconds(wall.seconds));
    // The system counts in hundredths of a second.
    if let Some(cpu) = wall.cpu_seconds.filter(|&cpu| cpu >= 0.01) {
        text.push_str(&format!(", {} of a processor", duration(nanoseconds(cpu))));
    }
    text
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn capacity_answer(answer: &CapacityAnswer, style: Style) -> String {
    let capacity = exact_size(answer.capacity_bytes);
    if answer.fits {
        return style.paint(Tone::Good, &format!("fits into {capacity}"));
    }
    let text = if answer.impossible { "cannot fit into" } else { "does not fit into" };
    style.paint(Tone::Bad, &format!("{text} {capacity}"))
}
