//! The statistics lines that STAlloc prints after every training step (specs/stalloc.md 3.6), for
//! scripts that read its logs.
//!
//! GB are 2^30 bytes here, with two decimals, and every line has its peaks since the one before.

use super::printable;
use crate::engine::RunResult;
use crate::metrics::StepPeaks;
use crate::units::GIB;

/// Two peaks in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Peaks {
    reserved_bytes: u64,
    allocated_bytes: u64,
}

impl Peaks {
    fn max(self, other: Peaks) -> Peaks {
        Peaks {
            reserved_bytes: self.reserved_bytes.max(other.reserved_bytes),
            allocated_bytes: self.allocated_bytes.max(other.allocated_bytes),
        }
    }

    /// `max_reserved:9.13, max_allocated:8.97, utilization:98.28%`. Where nothing was reserved,
    /// nothing was wasted: 100 %.
    fn text(self) -> String {
        let gb = |bytes: u64| bytes as f64 / GIB as f64;
        let share = match self.reserved_bytes {
            0 => 1.0,
            bytes => self.allocated_bytes as f64 / bytes as f64,
        };
        format!(
            "max_reserved:{:.2}, max_allocated:{:.2}, utilization:{:.2}%",
            gb(self.reserved_bytes),
            gb(self.allocated_bytes),
            100.0 * share
        )
    }
}

/// The lines of one replay on device `device`: one a step, and for allocators that plan three more
/// above it, as STAlloc's own modes do. A trace without steps has one line, without a step's number.
///
/// `max_allocated` is what STAlloc takes for it: the blocks as rounded, but for allocators that
/// plan the requests as they were made.
pub fn stalloc_log(result: &RunResult, steps: &[StepPeaks], device: u32) -> String {
    let plans = result.plan.is_some();
    let total = |row: &StepPeaks| Peaks {
        reserved_bytes: row.reserved_bytes_peak,
        allocated_bytes: match plans {
            true => row.requested_bytes_peak,
            false => row.allocated_bytes_peak,
        },
    };
    let totals = by_step(steps.iter().map(|row| (row.name.as_str(), total(row))));
    let rows = result.plan.iter().flat_map(|plan| &plan.steps);
    let dynamic = by_step(rows.map(|row| {
        let peaks = Peaks {
            reserved_bytes: row.fallback_reserved_bytes_peak,
            allocated_bytes: row.fallback_bytes_peak,
        };
        (row.name.as_str(), peaks)
    }));
    if totals.is_empty() {
        let whole = steps.iter().map(total).fold(Peaks::default(), Peaks::max);
        return format!("dev{device} : {}\n", whole.text());
    }
    let mut out = String::new();
    for (at, (name, total)) in totals.iter().enumerate() {
        if let Some(plan) = &result.plan {
            let of_plan = Peaks {
                reserved_bytes: plan.planned_bytes,
                allocated_bytes: plan.lower_bound_bytes,
            };
            let dynamic = dynamic.get(at).map_or(Peaks::default(), |(_, peaks)| *peaks);
            out.push_str(&format!("{}, dev{device}:\n", printable(&result.allocator.name)));
            out.push_str(&format!("static : {}\n", of_plan.text()));
            out.push_str(&format!("dynamic : {}\n", dynamic.text()));
        }
        let number = name.strip_prefix("step").unwrap_or(name);
        out.push_str(&format!("dev{device}, iter{number} : {}\n", total.text()));
    }
    out
}

/// Peaks since the step before: what lies outside of steps counts in the next one.
fn by_step<'a>(rows: impl Iterator<Item = (&'a str, Peaks)>) -> Vec<(&'a str, Peaks)> {
    let mut steps = Vec::new();
    let mut outside = Peaks::default();
    for (name, peaks) in rows {
        outside = outside.max(peaks);
        if !matches!(name, "before" | "after") {
            steps.push((name, std::mem::take(&mut outside)));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::run::tests::sample;
    use super::*;
    use crate::alloc::planned::{PlanSummary, StepSummary};
    use crate::units::MIB;

    fn step(name: &str, requested: u64, allocated: u64, reserved: u64) -> StepPeaks {
        StepPeaks {
            name: name.to_owned(),
            requested_bytes_peak: requested * MIB,
            allocated_bytes_peak: allocated * MIB,
            reserved_bytes_peak: reserved * MIB,
        }
    }

    #[test]
    fn a_line_a_step_with_the_peaks_since_the_last() {
        let result = sample("caching", GIB);
        let steps = [step("before", 900, 950, 2000), step("step3", 500, 512, 1024)];
        let expected = "dev1, iter3 : max_reserved:1.95, max_allocated:0.93, utilization:47.50%\n";
        assert_eq!(stalloc_log(&result, &steps, 1), expected);
        let expected = "dev0 : max_reserved:1.95, max_allocated:0.93, utilization:47.50%\n";
        assert_eq!(stalloc_log(&result, &steps[..1], 0), expected, "no steps");
        let expected = "dev0 : max_reserved:0.00, max_allocated:0.00, utilization:100.00%\n";
        assert_eq!(stalloc_log(&result, &[], 0), expected, "nothing at all");
    }

    #[test]
    fn what_plans_shows_its_parts() {
        let mut result = sample("planned+mode=stalloc", GIB);
        let row = |name: &str, fallback_bytes_peak| StepSummary {
            name: name.to_owned(),
            fallback_bytes_peak,
            fallback_reserved_bytes_peak: 2 * fallback_bytes_peak,
            ..StepSummary::default()
        };
        result.plan = Some(PlanSummary {
            planned_bytes: GIB,
            lower_bound_bytes: GIB / 2,
            source: String::new(),
            steps: vec![row("step0", 0), row("after", GIB), row("step1", 0)],
        });
        let steps = [step("step0", 512, 513, 1024), step("step1", 1024, 1025, 3072)];
        expect![[r#"
            planned+mode=stalloc, dev0:
            static : max_reserved:1.00, max_allocated:0.50, utilization:50.00%
            dynamic : max_reserved:0.00, max_allocated:0.00, utilization:100.00%
            dev0, iter0 : max_reserved:1.00, max_allocated:0.50, utilization:50.00%
            planned+mode=stalloc, dev0:
            static : max_reserved:1.00, max_allocated:0.50, utilization:50.00%
            dynamic : max_reserved:2.00, max_allocated:1.00, utilization:50.00%
            dev0, iter1 : max_reserved:3.00, max_allocated:1.00, utilization:33.33%
        "#]]
        .assert_eq(&stalloc_log(&result, &steps, 0));
    }
}
