//! What PatrickStar's manager did, step by step: under the table of `run`.

use super::grid::{Align, Grid};
use super::{SizeUnit, Style, counted, percent, wrapped};
use crate::chunk::{ChunkSummary, StepSummary};
use crate::engine::RunResult;
use crate::units::{Bytes, Nanos};

/// Rows of the table; of more, those in the middle are left out.
const ROWS_MAX: usize = 16;

/// The chunks in a sentence, the steps in a table, and why training stopped if it did. Nothing for
/// other allocators.
pub(super) fn chunk_steps(result: &RunResult, style: Style) -> String {
    let Some(summary) = &result.chunk else { return String::new() };
    let mut out = wrapped("  ", &chunks_text(summary), "    ");
    if !summary.steps.is_empty() {
        out.push_str(&table(&summary.steps).render(style));
    }
    out
}

/// `145 chunks of 128 MiB (83.9% used), 4 of 8 ranks' ... ; ADAM of 3 chunks on the GPU`
fn chunks_text(summary: &ChunkSummary) -> String {
    let fp16 = summary.lists.first();
    let chunks = fp16.map_or(0, |list| list.chunks);
    let bytes = fp16.map_or(0, |list| list.chunk_bytes);
    let used = percent(summary.utilization);
    let mut text = format!("{} of {} ({used} used)", counted(chunks, "fp16 chunk"), Bytes(bytes));
    if summary.ranks > 1 {
        let local = fp16.map_or(0, |list| list.local_chunks);
        let (rank, ranks) = (summary.rank, summary.ranks);
        text.push_str(&format!(
            ", {local} of them on rank {rank} of {ranks}, whose figures these are"
        ));
    }
    match summary.gpu_adam_groups {
        0 => text.push_str("; ADAM on the host"),
        groups => text.push_str(&format!("; ADAM of {} on the GPU", counted(groups, "chunk"))),
    }
    if summary.steps.iter().any(|step| step.warm_up) {
        text.push_str("; * warms up");
    }
    let over_budget: u64 = summary.steps.iter().map(|step| step.over_budget).sum();
    if over_budget > 0 {
        text.push_str(&format!("; {} over the budget", counted(over_budget, "payload")));
    }
    text
}

fn table(steps: &[StepSummary]) -> Grid {
    let most = steps.iter().map(|step| step.gpu_bytes_peak.max(step.host_bytes_peak)).max();
    let unit = SizeUnit::fitting(most.unwrap_or(0));
    use Align::{Left, Right};
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Right, Right, Right, Right]);
    let up = format!("up {}", unit.name);
    let down = format!("down {}", unit.name);
    let collective = format!("tives {}", unit.name);
    let peak = format!("peak {}", unit.name);
    grid.head(["", "GPU", "chunks", "host", "", "", "collec-", "compute", "step"]);
    grid.head(["  step", &peak, &peak, &peak, &up, &down, &collective, "time", "time"]);
    grid.rows_at_most(steps, ROWS_MAX, |step| cells(step, unit));
    grid
}

fn cells(step: &StepSummary, unit: SizeUnit) -> [String; 9] {
    let moved = [
        step.forward,
        step.backward,
        step.adam,
        step.gradient_reads,
        step.write_backs,
        step.transfers,
    ];
    let up: u64 = moved.iter().map(|traffic| traffic.h2d_bytes).fold(0, u64::saturating_add);
    let down: u64 = moved.iter().map(|traffic| traffic.d2h_bytes).fold(0, u64::saturating_add);
    let told = &step.collectives;
    let collectives =
        [told.all_gather_bytes, told.reduce_scatter_bytes, told.broadcast_bytes, told.reduce_bytes];
    // The steps that the tracer learns from.
    let warm_up = if step.warm_up { "*" } else { "" };
    [
        format!("  step{}{warm_up}", step.step),
        unit.cell(step.gpu_bytes_peak),
        unit.cell(step.gpu_chunk_bytes_peak),
        unit.cell(step.host_bytes_peak),
        unit.cell(up),
        unit.cell(down),
        unit.cell(collectives.into_iter().fold(0, u64::saturating_add)),
        Nanos(step.times.compute_ns).to_string(),
        Nanos(step.times.step_ns).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::{Collectives, StepTimes, Traffic};
    use crate::units::GIB;

    /// Sums of both directions, and every kind of collective, from numbers that tell them apart.
    #[test]
    fn moves_of_all_kinds_are_in_the_row() {
        let traffic =
            |h2d, d2h| Traffic { h2d: 1, h2d_bytes: h2d * GIB, d2h: 1, d2h_bytes: d2h * GIB };
        let step = StepSummary {
            step: 3,
            forward: traffic(1, 0),
            backward: traffic(2, 10),
            adam: traffic(4, 20),
            gradient_reads: traffic(0, 40),
            write_backs: traffic(8, 0),
            transfers: traffic(16, 80),
            collectives: Collectives {
                all_gather_bytes: GIB,
                reduce_scatter_bytes: 2 * GIB,
                broadcast_bytes: 4 * GIB,
                reduce_bytes: 8 * GIB,
                ..Collectives::default()
            },
            gpu_bytes_peak: 30 * GIB,
            gpu_chunk_bytes_peak: 20 * GIB,
            host_bytes_peak: 90 * GIB,
            times: StepTimes {
                compute_ns: 2_000_000_000,
                step_ns: 3_500_000_000,
                ..Default::default()
            },
            ..StepSummary::default()
        };
        let unit = SizeUnit::fitting(90 * GIB);
        let row =
            ["  step3", "30.00", "20.00", "90.00", "31.00", "150.00", "15.00", "2.00 s", "3.50 s"];
        assert_eq!(cells(&step, unit), row.map(str::to_owned));
        let warm_up = StepSummary { warm_up: true, ..step };
        assert_eq!(cells(&warm_up, unit)[0], "  step3*");
    }
}
