//! The answers of `gen`: what was generated, and what there is to choose from.

use super::grid::{Align, Grid};
use super::{Style, Tone, counted, grouped, printable, wrapped};
use crate::trace::{LiveByRole, Op, Role, Trace};
use crate::units::{Bytes, nearest_rank};
use crate::workload::gpus::{GPUS, REACHED};
use crate::workload::{Job, family_name, read_job, shapes, strategy_words, units};

/// What was generated: the model, the size of the trace, and what its live bytes are for.
pub fn generated(job: &Job, trace: &Trace, style: Style) -> String {
    let model = trace.header.model.clone().unwrap_or_default();
    let parameters = model.elements();
    let modules = counted(model.units.len() as u64, "module");
    let mut out = style.paint(Tone::Heading, &printable(&job.name)) + "\n";
    let words = strategy_words(job);
    let strategies = if words.is_empty() { "no strategy".to_owned() } else { words.join(", ") };
    let accesses = trace.events.iter().filter(|event| matches!(event.op, Op::Access(_))).count();
    let events = format!(
        "events: {}, {}, {} accesses, {}",
        grouped(trace.events.len() as u64),
        counted(trace.blocks.len() as u64, "block"),
        grouped(accesses as u64),
        counted(job.train.steps, "step")
    );
    let on_rank =
        if job.parallel.pipeline > 1 || job.parallel.tensor > 1 { " on this rank" } else { "" };
    let lines = [
        format!("model: {} parameters{on_rank} in {modules}", grouped(parameters)),
        format!("strategies: {strategies}"),
        events,
    ];
    for line in lines {
        out.push_str(&wrapped("  ", &line, "    "));
    }
    let live = LiveByRole::of(trace);
    let peak_bytes = live.at_peak_bytes.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
    out.push_str(&roles(&live, peak_bytes, style));
    let gpu_bytes = job.hardware.gpu_bytes;
    if peak_bytes > gpu_bytes {
        let text = format!(
            "more than the {} of {}: it cannot run as it is ({} is another matter: it keeps model \
             data on the host)",
            Bytes(gpu_bytes),
            printable(&job.hardware.gpu),
            crate::chunk::NAME
        );
        out.push_str(&wrapped("  ", &text, "    "));
    }
    out
}

/// What the trace of one rank is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankFacts {
    /// Events.
    pub events: u64,
    /// Most bytes that are asked for and not freed at one instant.
    pub requested_bytes_peak: u64,
    /// Size of its file in bytes.
    pub file_bytes: u64,
}

impl RankFacts {
    /// Of a trace in a file of this size.
    pub fn of(trace: &Trace, file_bytes: u64) -> RankFacts {
        let peak = LiveByRole::of(trace).at_peak_bytes;
        RankFacts {
            events: trace.events.len() as u64,
            requested_bytes_peak: peak.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes)),
            file_bytes,
        }
    }
}

/// What was generated for many ranks: how many traces, and between which bounds they lie. Nothing
/// is told of `kept` files that were there before but their number; the bounds leave them out.
pub fn generated_ranks(job: &Job, made: &[RankFacts], kept: usize, style: Style) -> String {
    let mut out = style.paint(Tone::Heading, &printable(&job.name)) + "\n";
    let mut ranks = format!("ranks: {} made", grouped(made.len() as u64));
    if kept > 0 {
        ranks += &format!(", {} kept from before", grouped(kept as u64));
        if !made.is_empty() {
            ranks += "; of those made now:";
        }
    }
    out.push_str(&wrapped("  ", &ranks, "    "));
    let size = |bytes| Bytes(bytes).to_string();
    let spreads = [
        ("events", spread(made.iter().map(|rank| rank.events), grouped)),
        ("requested peak", spread(made.iter().map(|rank| rank.requested_bytes_peak), size)),
        ("file", spread(made.iter().map(|rank| rank.file_bytes), size)),
    ];
    for (name, spread) in spreads {
        if let Some(spread) = spread {
            out.push_str(&wrapped("  ", &format!("{name}: {spread}"), "    "));
        }
    }
    if !made.is_empty() {
        let events = made.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.events));
        let bytes = made.iter().fold(0u64, |sum, rank| sum.saturating_add(rank.file_bytes));
        let all = format!("in all: {} events, {}", grouped(events), Bytes(bytes));
        out.push_str(&wrapped("  ", &all, "    "));
    }
    out
}

/// The least, the middle and the most of values; of an even number the lower middle.
fn spread(values: impl Iterator<Item = u64>, show: impl Fn(u64) -> String) -> Option<String> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    let (least, most) = (*values.first()?, *values.last()?);
    if least == most {
        return Some(show(least));
    }
    let middle = nearest_rank(&values, 50)?;
    Some(format!("{} to {}, median {}", show(least), show(most), show(middle)))
}

/// Live bytes by role, largest first; roles that never have any are left out.
fn roles(live: &LiveByRole, peak_bytes: u64, style: Style) -> String {
    let phase =
        live.peak_phase.as_deref().map_or_else(String::new, |p| format!(" ({})", printable(p)));
    let mut out = format!("  live peak: {}{phase}\n", Bytes(peak_bytes));
    let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
    grid.head(["    role", "at the peak", "own peak"]);
    let mut rows: Vec<(Role, u64, u64)> = Role::ALL
        .into_iter()
        .map(|role| (role, live.at_peak_bytes[role as usize], live.peak_bytes[role as usize]))
        .filter(|(_, _, own)| *own > 0)
        .collect();
    rows.sort_by_key(|(_, at_peak, own)| std::cmp::Reverse((*at_peak, *own)));
    for (role, at_peak, own) in rows {
        let name = format!("    {}", role.name());
        grid.row([name, Bytes(at_peak).to_string(), Bytes(own).to_string()], String::new());
    }
    out.push_str(&grid.render(style));
    out
}

/// Shapes and GPUs by name, and the descriptions that ship.
pub fn job_choices(descriptions: &[&str], style: Style) -> String {
    let mut out = style.paint(Tone::Heading, "shapes (model.preset)") + "\n";
    out.push_str(&shapes_table().render(style));
    out.push('\n');
    out.push_str(
        &style.paint(Tone::Heading, "GPUs (hardware.gpu), as their data sheets have them"),
    );
    out.push('\n');
    out.push_str(&gpus_table().render(style));
    let reached = format!(
        "A job reaches {} of the matrix rate and {} of the bandwidths (of memory, PCIe and NVLink, \
         one way), unless [hardware] says otherwise: assumptions, which change times and no bytes.",
        REACHED.flops, REACHED.memory
    );
    out.push_str(&wrapped("  ", &reached, "  "));
    out.push('\n');
    out.push_str(&style.paint(Tone::Heading, "descriptions (--example NAME)"));
    out.push('\n');
    out.push_str(&wrapped("  ", &descriptions.join(", "), "  "));
    out
}

fn shapes_table() -> Grid {
    let mut grid = Grid::of_columns(2, 5);
    grid.head(["  name", "type", "layers", "hidden", "heads", "vocabulary", "parameters"]);
    for name in shapes::names() {
        let beside = [("model.preset".to_owned(), name.to_owned())];
        let Ok(job) = read_job("", &beside) else { continue };
        let modules = units(&job);
        let elements = modules.iter().map(|unit| unit.elements());
        let elements = elements.fold(0u64, u64::saturating_add);
        let shape = &job.shape;
        let cells = [
            format!("  {name}"),
            family_name(shape.family).to_owned(),
            shape.layers.to_string(),
            shape.hidden.to_string(),
            shape.heads.to_string(),
            shape.vocabulary.to_string(),
            grouped(elements),
        ];
        grid.row(cells, String::new());
    }
    grid
}

fn gpus_table() -> Grid {
    let mut grid = Grid::of_columns(1, 6);
    grid.head(["  name", "memory", "TFLOPS", "memory", "PCIe", "NVLink", "host"]);
    grid.head(["", "", "16 bit", "GB/s", "GB/s", "GB/s", "memory"]);
    for gpu in &GPUS {
        let giga = |rate: f64| format!("{:.0}", rate / 1e9);
        let cells = [
            format!("  {}", gpu.name),
            Bytes(gpu.memory_bytes).to_string(),
            format!("{:.0}", gpu.flops_16 / 1e12),
            giga(gpu.memory_bytes_per_s),
            giga(gpu.link_bytes_per_s),
            giga(gpu.peer_bytes_per_s),
            Bytes(gpu.host_bytes).to_string(),
        ];
        grid.row(cells, String::new());
    }
    grid
}
