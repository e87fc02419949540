//! What became of a plan, step by step: under the table of `run`.

use super::grid::{Align, Grid};
use super::{SizeUnit, Style, grouped, percent, printable, wrapped};
use crate::alloc::planned::{PlanSummary, StepSummary};
use crate::engine::RunResult;
use crate::units::Bytes;

/// Rows of the table; of more, those in the middle are left out.
const ROWS_MAX: usize = 16;

/// The plan in a sentence, the steps in a table, and STAlloc's own measure. Nothing without a plan.
pub(super) fn plan_steps(result: &RunResult, style: Style) -> String {
    let Some(plan) = &result.plan else { return String::new() };
    let mut out = wrapped("  ", &plan_text(plan), "    ");
    if !plan.steps.is_empty() {
        out.push_str(&table(&plan.steps).render(style));
    }
    let wasted = Bytes(result.wasted_bytes);
    let text = format!("STAlloc's measure: E {}, W {wasted}", percent(result.utilization));
    out + &wrapped("  ", &text, "    ")
}

/// `plan of 9.13 GiB for 8.97 GiB live at once (98.3%), from 2 steps of llama-1b`
fn plan_text(plan: &PlanSummary) -> String {
    let mut text = format!("plan of {}", Bytes(plan.planned_bytes));
    if plan.planned_bytes > 0 {
        let share = plan.lower_bound_bytes as f64 / plan.planned_bytes as f64;
        let live = Bytes(plan.lower_bound_bytes);
        text.push_str(&format!(" for {live} live at once ({})", percent(share)));
    }
    if !plan.source.is_empty() {
        text.push_str(&format!(", from {}", printable(&plan.source)));
    }
    text
}

/// A row for each run of steps that are alike.
fn table(steps: &[StepSummary]) -> Grid {
    let most = steps.iter().map(|row| row.live_bytes_peak.max(row.fallback_bytes_peak)).max();
    let unit = SizeUnit::fitting(most.unwrap_or(0));
    use Align::{Left, Right};
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Right, Right, Right]);
    let head = ["", "", "mis-", "over-", "", "live", "fallback", "re-"];
    grid.head(head);
    let peak = format!("peak {}", unit.name);
    grid.head(["  step", "planned", "matched", "lapping", "online", &peak, &peak, "plans"]);
    let runs: Vec<&[StepSummary]> = steps.chunk_by(alike).collect();
    grid.rows_at_most(&runs, ROWS_MAX, |run| cells(run, unit));
    grid
}

fn alike(one: &StepSummary, other: &StepSummary) -> bool {
    let is_step = |row: &StepSummary| !matches!(row.name.as_str(), "before" | "after");
    let nameless = |row: &StepSummary| StepSummary { name: String::new(), ..row.clone() };
    is_step(one) && is_step(other) && nameless(one) == nameless(other)
}

fn cells(run: &[StepSummary], unit: SizeUnit) -> [String; 8] {
    let (first, last) = (&run[0], &run[run.len() - 1]);
    let name = match run {
        [one] => printable(&one.name).into_owned(),
        _ => format!("{} to {}", printable(&first.name), printable(&last.name)),
    };
    [
        format!("  {name}"),
        grouped(first.planned),
        grouped(first.mismatched),
        grouped(first.overlapping),
        grouped(first.online),
        unit.cell(first.live_bytes_peak),
        unit.cell(first.fallback_bytes_peak),
        grouped(first.replans),
    ]
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::run::tests::sample;
    use super::*;
    use crate::units::{GIB, MIB};

    #[test]
    fn steps_that_are_alike_share_a_row() {
        let mut result = sample("planned", GIB);
        result.wasted_bytes = 5 * MIB;
        let row = |name: &str, planned, overlapping| StepSummary {
            name: name.to_owned(),
            planned,
            overlapping,
            online: overlapping,
            live_bytes_peak: 900 * MIB,
            fallback_bytes_peak: overlapping * MIB,
            ..StepSummary::default()
        };
        result.plan = Some(PlanSummary {
            planned_bytes: GIB,
            lower_bound_bytes: 1000 * MIB,
            source: "2 steps of job".to_owned(),
            steps: vec![
                row("before", 1, 0),
                row("step0", 3000, 0),
                row("step1", 3000, 0),
                row("step2", 2998, 2),
            ],
        });
        let screen = format!("screen\n{}", plan_steps(&result, Style::default()));
        expect![[r#"
            screen
              plan of 1 GiB for 1000 MiB live at once (97.7%), from 2 steps of job
                                          mis-    over-              live  fallback    re-
              step            planned  matched  lapping  online  peak MiB  peak MiB  plans
              before                1        0        0       0    900.00      0.00      0
              step0 to step1    3,000        0        0       0    900.00      0.00      0
              step2             2,998        0        2       2    900.00      2.00      0
              STAlloc's measure: E 66.0%, W 5 MiB
        "#]]
        .assert_eq(&screen);
    }
}
