//! A table of `memory_summary()`: how the reserved memory splits up.

use super::super::grid::{Align, Grid};
use super::super::{Style, percent, wrapped};
use super::{heading, summary_words, verdict};
use crate::import::{MemorySummary, SummaryClass, SummaryDiagnosis, SummaryRow};
use crate::units::{Bytes, counted, grouped};

type Explained<'a> = (&'a MemorySummary, &'a SummaryDiagnosis);

/// A table in full.
pub(super) fn table(file: &str, explained: Explained<'_>, is_full: bool, style: Style) -> String {
    let (summary, diagnosis) = explained;
    let mut out = format!("{file}, line {}: {}\n", summary.line, what(summary));
    let is_good = diagnosis.class == SummaryClass::NotFragmentation;
    out.push_str(&verdict(
        first_words(diagnosis.class),
        &sentence(summary, diagnosis),
        is_good,
        style,
    ));
    let split = split(summary, diagnosis);
    if !split.is_empty() {
        out.push_str(&format!("\n{}\n", heading("reserved now", style)));
        out.push_str(&split);
    }
    if let Some(peak) = peak_sentence(diagnosis) {
        out.push('\n');
        out.push_str(&wrapped("", &peak, ""));
    }
    out.push_str(&format!("\n{}\n", heading("what to do", style)));
    for paragraph in advice(diagnosis.class) {
        out.push_str(&wrapped("- ", paragraph, "  "));
    }
    if is_full {
        out.push_str(&rows(summary, diagnosis, style));
    }
    out
}

/// A table in a line.
pub(super) fn summed_up((summary, diagnosis): Explained<'_>) -> String {
    let parts = [
        (diagnosis.hard_bytes, "beside live blocks"),
        (diagnosis.soft_bytes, "in unused segments"),
        (diagnosis.deferred_bytes, "waiting for streams"),
        (diagnosis.internal_bytes, "rounding"),
    ];
    let parts = parts.iter().filter_map(|(bytes, name)| Some((bytes.filter(|&b| b > 0)?, name)));
    let parts: Vec<String> =
        parts.map(|(bytes, name)| format!("{} {name}", Bytes(bytes))).collect();
    let split = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
    let peak = match (split.is_empty(), diagnosis.unallocated_bytes_at_peak_min) {
        (true, Some(bytes)) => format!(": at least {} unallocated at its peak", Bytes(bytes)),
        _ => String::new(),
    };
    format!(
        "line {}: {}: {}{split}{peak}",
        summary.line,
        what(summary),
        summary_words(diagnosis.class)
    )
}

/// `memory_summary() of GPU 0, 1 OOM, 1 flush`
fn what(summary: &MemorySummary) -> String {
    let mut text = "memory_summary()".to_owned();
    if let Some(index) = summary.device_index {
        text.push_str(&format!(" of GPU {index}"));
    }
    if let Some(ooms) = summary.ooms {
        text.push_str(&format!(", {}", counted(ooms, "refusal")));
    }
    if let Some(retries) = summary.retries {
        text.push_str(&format!(" after {}", counted(retries, "flushed cache")));
    }
    text
}

fn first_words(class: SummaryClass) -> &'static str {
    match class {
        SummaryClass::NotFragmentation => "Not fragmentation.",
        SummaryClass::Hard => "Fragmentation beside live blocks.",
        SummaryClass::Soft => "Unused segments.",
        SummaryClass::Deferred => "Memory waits for other streams.",
        SummaryClass::Internal => "Rounding inside blocks.",
        SummaryClass::Unknown => "The table does not tell.",
    }
}

fn sentence(summary: &MemorySummary, diagnosis: &SummaryDiagnosis) -> String {
    let (Some(reserved), Some(utilization)) = (summary.reserved, diagnosis.utilization) else {
        return "Rows are missing, or nothing is reserved any more.".to_owned();
    };
    let text = format!(
        "Of {} reserved, {} hold tensors.",
        Bytes(reserved.current.bytes),
        percent(utilization)
    );
    let largest = match diagnosis.class {
        SummaryClass::Hard => diagnosis.hard_bytes,
        SummaryClass::Soft => diagnosis.soft_bytes,
        SummaryClass::Deferred => diagnosis.deferred_bytes,
        SummaryClass::Internal => diagnosis.internal_bytes,
        SummaryClass::NotFragmentation | SummaryClass::Unknown => None,
    };
    match largest {
        Some(bytes) => format!("{text} {} are {}.", Bytes(bytes), meaning(diagnosis.class)),
        None if diagnosis.class == SummaryClass::Unknown => {
            format!("{text} The rows that would tell why are missing.")
        }
        None => text,
    }
}

fn meaning(class: SummaryClass) -> &'static str {
    match class {
        SummaryClass::Hard => "free beside live blocks, where only smaller requests fit",
        SummaryClass::Soft => "free in segments without any live block, too small for what came",
        SummaryClass::Deferred => "freed by the program and still in use by another stream",
        _ => "lost to rounding",
    }
}

/// The reserved memory, part by part.
fn split(summary: &MemorySummary, diagnosis: &SummaryDiagnosis) -> String {
    let Some(reserved) = summary.reserved.map(|row| row.current.bytes).filter(|&bytes| bytes > 0)
    else {
        return String::new();
    };
    let held = summary.requested.or(summary.allocated).map(|row| row.current.bytes);
    let parts = [
        ("held by tensors", held),
        ("internal: rounding", diagnosis.internal_bytes),
        ("deferred: other streams", diagnosis.deferred_bytes),
        ("hard: beside live blocks", diagnosis.hard_bytes),
        ("soft: wholly free segments", diagnosis.soft_bytes),
        ("reserved", Some(reserved)),
    ];
    let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
    for (name, bytes) in parts.iter().filter_map(|&(name, bytes)| Some((name, bytes?))) {
        let share = percent(bytes as f64 / reserved as f64);
        grid.row([format!("  {name}"), Bytes(bytes).to_string(), share], String::new());
    }
    grid.render(Style::default())
}

fn peak_sentence(diagnosis: &SummaryDiagnosis) -> Option<String> {
    let (bytes, share) =
        (diagnosis.unallocated_bytes_at_peak_min?, diagnosis.utilization_of_peaks?);
    Some(format!(
        "When most was reserved, at least {} of it were not allocated (allocated peak / reserved \
         peak = {}; the peaks have each their own moment, so this is a bound).",
        Bytes(bytes),
        percent(share)
    ))
}

fn advice(class: SummaryClass) -> Vec<&'static str> {
    const SNAPSHOT: &str = "See what pins it: torch.cuda.memory._record_memory_history() at the \
        start, torch.cuda.memory._dump_snapshot(\"snapshot.pickle\"), then `fraglab explain \
        snapshot.pickle`.";
    match class {
        SummaryClass::NotFragmentation => {
            vec!["No setting of the allocator helps: need less at once, or a larger device."]
        }
        SummaryClass::Hard => vec![
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before torch is imported, lets \
             these holes serve any request.",
            SNAPSHOT,
        ],
        SummaryClass::Soft => vec![
            "empty_cache() gives these segments back, and so does PyTorch itself before it fails: \
             they cost other programs memory, not this one. One call after loading or a checkpoint \
             is enough; expandable_segments:True avoids them.",
        ],
        SummaryClass::Deferred => vec![
            "Tensors are kept for other streams (record_stream): \
             TORCH_NCCL_AVOID_RECORD_STREAMS=1, or FSDP's limit_all_gathers, let them go earlier. \
             No allocator setting does.",
        ],
        SummaryClass::Internal => {
            vec!["roundup_power2_divisions rounds sizes up: leave it out, or divide more finely."]
        }
        SummaryClass::Unknown => vec![SNAPSHOT],
    }
}

fn rows(summary: &MemorySummary, diagnosis: &SummaryDiagnosis, style: Style) -> String {
    let mut out = format!("\n{}\n", heading("figures as read, in bytes", style));
    let rows: [(&str, Option<SummaryRow>); 5] = [
        ("requested", summary.requested),
        ("allocated", summary.allocated),
        ("active", summary.active),
        ("reserved", summary.reserved),
        ("non-releasable", summary.non_releasable),
    ];
    let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
    grid.head(["", "now", "peak"]);
    for (name, row) in rows.iter().filter_map(|&(name, row)| Some((name, row?))) {
        let (now, peak) = (grouped(row.current.bytes), grouped(row.peak.bytes));
        grid.row([format!("  {name}"), now, peak], String::new());
    }
    out.push_str(&grid.render(style));
    let text = format!(
        "each rounded down by at most {} bytes; internal = allocated - requested, deferred = \
         active - allocated, hard = non-releasable, soft = reserved - active - non-releasable",
        grouped(diagnosis.error_bytes)
    );
    out.push_str(&wrapped("  ", &text, "  "));
    out
}
