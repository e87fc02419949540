//! What a synthesis says of itself.

use std::fmt::Write as _;

/// Requests of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSummary {
    /// The class, as STAlloc's report calls it.
    pub name: &'static str,
    /// How many.
    pub requests: u64,
    /// The most that they take at once, in bytes, each rounded up to 512.
    pub peak_bytes: u64,
}

/// Counts, peaks and how good the plan is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SynthesisReport {
    /// The planner.
    pub planner: &'static str,
    /// Every class.
    pub classes: Vec<ClassSummary>,
    /// Peak of all static and dynamic requests, in bytes, each rounded up to 512.
    pub max_allocated_bytes: u64,
    /// The pool, and what the dynamic requests are assumed to need beside it, in bytes.
    pub max_reserved_bytes: u64,
    /// Peak of the dynamic requests, in bytes.
    pub dynamic_bytes_peak: u64,
    /// Peak of the activations that were planned, in bytes: no plan of them is lower.
    pub activation_live_bytes_peak: u64,
    /// What their plan needs, in bytes.
    pub activation_planned_bytes: u64,
    /// What the tool only warns of, a line each.
    pub warnings: Vec<String>,
}

impl SynthesisReport {
    /// STAlloc's utilization, in percent; 100 if nothing is reserved.
    pub fn utilization_percent(&self) -> f64 {
        percent(self.max_allocated_bytes, self.max_reserved_bytes)
    }

    /// Live peak ÷ planned peak of the activations (E_act), in percent; 100 if there are none.
    pub fn activation_efficiency_percent(&self) -> f64 {
        percent(self.activation_live_bytes_peak, self.activation_planned_bytes)
    }

    /// As the tool's `trace_analysis` file: a line a class, then the line with the utilization.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        for class in &self.classes {
            let ClassSummary { name, requests, peak_bytes } = class;
            let _ = writeln!(text, "{name}: number={requests}, peak={peak_bytes}");
        }
        for warning in &self.warnings {
            let _ = writeln!(text, "warning: {warning}");
        }
        let _ = writeln!(
            text,
            "max_allocated={}, max_reserved={}, utilization={:.2}%",
            self.max_allocated_bytes,
            self.max_reserved_bytes,
            self.utilization_percent()
        );
        text
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 100.0 } else { part as f64 / whole as f64 * 100.0 }
}
