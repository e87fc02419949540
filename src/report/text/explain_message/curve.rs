//! The memory lines of a log: utilization at the peak, growth, and when the device would be full.

use super::super::grid::{Align, Grid};
use super::super::{Style, counted, percent, printable, wrapped};
use super::{curve_words, heading, verdict};
use crate::import::{Amount, CurveClass, CurveDiagnosis, CurveGrowth, CurveRow, ReferenceCurve};
use crate::units::Bytes;

type Explained<'a> = (&'a ReferenceCurve, &'a CurveDiagnosis);

/// Most rows of a log that `--full` shows.
const ROWS_SHOWN_MAX: usize = 40;

/// A curve in full.
pub(super) fn curve(
    file: &str,
    explained: Explained<'_>,
    capacity_bytes: Option<u64>,
    is_full: bool,
    style: Style,
) -> String {
    let (curve, diagnosis) = explained;
    let line = curve.rows.first().map_or(1, |row| row.line);
    let mut out = format!("{file}, line {line}: {}\n", what(curve));
    let is_good = diagnosis.class == CurveClass::NotFragmentation;
    let (words, rest) = sentence(diagnosis);
    out.push_str(&verdict(words, &rest, is_good, style));
    out.push('\n');
    out.push_str(&peaks(diagnosis));
    if let Some(growth) = &diagnosis.growth {
        out.push('\n');
        out.push_str(&wrapped("", &growth_sentence(growth, diagnosis), ""));
        out.push_str(&forecast(growth, diagnosis, capacity_bytes));
    }
    out.push_str(&format!("\n{}\n", heading("what to do", style)));
    for paragraph in advice(diagnosis.class) {
        out.push_str(&wrapped("- ", paragraph, "  "));
    }
    if is_full {
        out.push_str(&rows(curve, style));
    }
    out
}

/// A curve in a line.
pub(super) fn summed_up((curve, diagnosis): Explained<'_>) -> String {
    let line = curve.rows.first().map_or(1, |row| row.line);
    let peak = diagnosis.reserved_bytes_peak.map(|bytes| format!(", {} reserved", Bytes(bytes)));
    let share = diagnosis.utilization.map(|share| format!(", {} of it used", percent(share)));
    format!(
        "line {line}: {}: {}{}{}",
        what(curve),
        curve_words(diagnosis.class),
        peak.unwrap_or_default(),
        share.unwrap_or_default()
    )
}

/// `Megatron's memory lines, rank 0, 12 reports`
fn what(curve: &ReferenceCurve) -> String {
    let rank = curve.rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
    let reports = counted(curve.rows.len() as u64, "report");
    format!("memory lines of {}{rank}, {reports}", curve.framework.name())
}

fn sentence(diagnosis: &CurveDiagnosis) -> (&'static str, String) {
    let unused = diagnosis
        .reserved_bytes_peak
        .zip(diagnosis.allocated_bytes_peak)
        .map(|(reserved, allocated)| reserved.saturating_sub(allocated));
    let unused =
        unused.map_or_else(|| "an unknown part".to_owned(), |bytes| Bytes(bytes).to_string());
    match diagnosis.class {
        CurveClass::GrowingLive => (
            "Live memory grows.",
            "What the program holds grows from step to step: a leak, or work that grows. \
             Fragmentation comes second."
                .to_owned(),
        ),
        CurveClass::GrowingStranded => (
            "Fragmentation grows.",
            "What is reserved grows from step to step, and what the program holds does not."
                .to_owned(),
        ),
        CurveClass::NotFragmentation => {
            ("Not fragmentation.", format!("Only {unused} of the reserved peak are unused."))
        }
        CurveClass::Deferred => (
            "Memory waits for other streams.",
            format!(
                "{unused} of the reserved peak hold no tensors, and at least half of that was \
                 freed by the program and still in use by another stream, if the peaks coincide."
            ),
        ),
        CurveClass::Fragmentation => (
            "Steady, with a part unused.",
            format!("At least {unused} of the reserved peak hold no tensors when it is reached."),
        ),
        CurveClass::Unknown => (
            "The log does not tell.",
            "What is reserved is not in these lines, only what is allocated.".to_owned(),
        ),
    }
}

fn peaks(diagnosis: &CurveDiagnosis) -> String {
    let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
    let rows = [
        ("allocated peak", diagnosis.allocated_bytes_peak, diagnosis.utilization),
        ("active peak", diagnosis.active_bytes_peak, None),
        ("reserved peak", diagnosis.reserved_bytes_peak, None),
    ];
    for (name, bytes, share) in rows {
        let Some(bytes) = bytes else { continue };
        let share = share.map(|share| format!("{} of reserved", percent(share)));
        let cells = [format!("  {name}"), Bytes(bytes).to_string(), share.unwrap_or_default()];
        grid.row(cells, String::new());
    }
    grid.render(Style::default())
}

fn growth_sentence(growth: &CurveGrowth, diagnosis: &CurveDiagnosis) -> String {
    let unit = if diagnosis.is_numbered { "step" } else { "report" };
    format!(
        "From {unit} {} to {}: reserved {} a {unit}, allocated {} a {unit}.",
        growth.from_step,
        growth.to_step,
        signed(growth.reserved_bytes_per_step),
        signed(growth.allocated_bytes_per_step)
    )
}

fn forecast(
    growth: &CurveGrowth,
    diagnosis: &CurveDiagnosis,
    capacity_bytes: Option<u64>,
) -> String {
    let unit = if diagnosis.is_numbered { "step" } else { "report" };
    let grows = matches!(diagnosis.class, CurveClass::GrowingLive | CurveClass::GrowingStranded);
    match (capacity_bytes, growth.full_at_step) {
        (Some(capacity), Some(step)) => {
            let text = format!("At this rate {} are full at {unit} {step}.", Bytes(capacity));
            wrapped("", &text, "")
        }
        (None, _) if grows => {
            "Give the device's memory with --capacity to learn when it is full.\n".to_owned()
        }
        _ => String::new(),
    }
}

/// `+1.20 MiB`, `-3 MiB`, `0 B`: bytes a step, whole.
fn signed(bytes: f64) -> String {
    let whole = Bytes(bytes.abs().round() as u64);
    match bytes.round() {
        b if b > 0.0 => format!("+{whole}"),
        b if b < 0.0 => format!("-{whole}"),
        _ => whole.to_string(),
    }
}

fn advice(class: CurveClass) -> Vec<&'static str> {
    const SNAPSHOT: &str = "Record a snapshot over a few steps \
        (torch.cuda.memory._record_memory_history(), then _dump_snapshot) and give it to `fraglab \
        explain`: it names the blocks and where they come from.";
    match class {
        CurveClass::GrowingLive => vec![
            "Look for tensors that outlive their step: losses kept with their graph, caches, \
             growing sequences. No allocator setting helps.",
            SNAPSHOT,
        ],
        CurveClass::GrowingStranded => vec![
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before torch is imported, is \
             the first thing to try.",
            SNAPSHOT,
        ],
        CurveClass::NotFragmentation => {
            vec!["No setting of the allocator helps: need less at once, or a larger device."]
        }
        CurveClass::Deferred => vec![
            "TORCH_NCCL_AVOID_RECORD_STREAMS=1, or FSDP's limit_all_gathers, let memory go \
             earlier.",
            SNAPSHOT,
        ],
        CurveClass::Fragmentation | CurveClass::Unknown => vec![SNAPSHOT],
    }
}

fn rows(curve: &ReferenceCurve, style: Style) -> String {
    let mut out = format!("\n{}\n", heading("reports", style));
    let mut grid = Grid::new(&[
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Left,
    ]);
    grid.head(["line", "step", "allocated", "peak", "reserved", ""]);
    let size = |amount: Option<Amount>| {
        amount.map_or_else(|| "-".to_owned(), |amount| Bytes(amount.bytes).to_string())
    };
    grid.rows_at_most(&curve.rows, ROWS_SHOWN_MAX, |row: &CurveRow| {
        [
            row.line.to_string(),
            row.step.map_or_else(|| "-".to_owned(), |step| step.to_string()),
            size(row.allocated),
            size(row.allocated_peak),
            size(row.reserved.or(row.reserved_peak)),
            printable(row.label.as_deref().unwrap_or_default()).into_owned(),
        ]
    });
    out.push_str(&grid.render(style));
    out
}
