//! What became of a plan: for the results, step by step.
//!
//! ```text
//!   mark       step0.forward          step1.forward          end
//!   ── before ─┼──────── step0 ───────┼──────── step1 ───────┼── after ──
//!   rows       one each: requests by where they went, peaks of the levels inside it
//! ```

use serde::Serialize;

use crate::trace::step_name;

/// What an allocator that plans ahead planned, and what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlanSummary {
    /// Memory that the plan needs, in bytes.
    pub planned_bytes: u64,
    /// Most bytes that the planned requests have live at once: no plan needs less.
    pub lower_bound_bytes: u64,
    /// What the plan was made from, in words: `2 steps of llama-1b-varlen`.
    pub source: String,
    /// A row a step, in order; `before` and `after` are no steps.
    pub steps: Vec<StepSummary>,
}

/// What became of the requests of one step. Every request counts in `planned` or in `online`; those
/// that missed their place count in `online` and, by the reason, in `mismatched` or `overlapping`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepSummary {
    /// `stepN`, or `before` or `after`, which are no steps.
    pub name: String,
    /// Requests that got the place planned for them.
    pub planned: u64,
    /// Requests that are not what the plan expects at this point.
    pub mismatched: u64,
    /// Requests whose place was not free.
    pub overlapping: u64,
    /// Requests that got a place found at run time.
    pub online: u64,
    /// Most bytes that blocks outside the plan's memory had at once, at their rounded sizes.
    pub fallback_bytes_peak: u64,
    /// Most memory that was reserved for such blocks at once, in bytes.
    pub fallback_reserved_bytes_peak: u64,
    /// Most bytes that the program had live at once, as it asked for them.
    pub live_bytes_peak: u64,
    /// How often the plan was made anew.
    pub replans: u64,
}

/// Levels at one moment, for the peaks of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepLevels {
    /// Live bytes as the program asked for them.
    pub(super) live_bytes: u64,
    /// Live bytes outside the plan's memory, as rounded.
    pub(super) fallback_bytes: u64,
    /// Memory reserved for such blocks.
    pub(super) fallback_reserved_bytes: u64,
}

/// Keeps the rows of a replay: the last is the one under way.
#[derive(Clone, Debug)]
pub(super) struct StepLog {
    rows: Vec<StepSummary>,
}

impl Default for StepLog {
    fn default() -> Self {
        StepLog { rows: vec![StepSummary { name: "before".to_owned(), ..StepSummary::default() }] }
    }
}

impl StepLog {
    /// A phase begins. Says whether another step does, or the first part outside of any.
    pub(super) fn mark(&mut self, phase: &str, now: StepLevels) -> bool {
        let name = step_name(phase);
        let current = self.now().name.as_str();
        let same = match name {
            Some(name) => name == current,
            None => matches!(current, "before" | "after"),
        };
        if same {
            return false;
        }
        let name = name.unwrap_or("after").to_owned();
        self.rows.push(StepSummary { name, ..StepSummary::default() });
        self.observe(now);
        true
    }

    /// The row of the step under way.
    #[inline]
    pub(super) fn now(&mut self) -> &mut StepSummary {
        // There is one from the beginning on, and none is ever taken away.
        let last = self.rows.len() - 1;
        &mut self.rows[last]
    }

    /// Raises the peaks of the step under way.
    #[inline]
    pub(super) fn observe(&mut self, levels: StepLevels) {
        let row = self.now();
        row.live_bytes_peak = row.live_bytes_peak.max(levels.live_bytes);
        row.fallback_bytes_peak = row.fallback_bytes_peak.max(levels.fallback_bytes);
        row.fallback_reserved_bytes_peak =
            row.fallback_reserved_bytes_peak.max(levels.fallback_reserved_bytes);
    }

    /// A count of all rows together.
    pub(super) fn total(&self, count: fn(&StepSummary) -> u64) -> u64 {
        self.rows.iter().map(count).sum()
    }

    /// The highest of a peak in all rows.
    pub(super) fn peak(&self, level: fn(&StepSummary) -> u64) -> u64 {
        self.rows.iter().map(level).max().unwrap_or(0)
    }

    /// All rows; without `before` if nothing came before the first step.
    pub(super) fn rows(&self) -> Vec<StepSummary> {
        let is_empty =
            |row: &StepSummary| row.planned + row.online == 0 && row.live_bytes_peak == 0;
        let skipped = usize::from(self.rows.len() > 1 && is_empty(&self.rows[0]));
        self.rows[skipped..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_of_a_step_share_a_row() {
        let mut log = StepLog::default();
        let levels = StepLevels { live_bytes: 7, ..StepLevels::default() };
        assert!(log.mark("step0.forward", levels), "the first step");
        log.now().planned += 1;
        assert!(!log.mark("step0.backward", levels));
        log.observe(StepLevels { live_bytes: 9, fallback_bytes: 2, fallback_reserved_bytes: 3 });
        assert!(log.mark("step1.forward", levels));
        assert!(log.mark("eval", levels));
        assert!(!log.mark("eval2", levels), "outside of any step, still");
        let rows = log.rows();
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["step0", "step1", "after"], "nothing came before");
        let peaks = |row: &StepSummary| (row.live_bytes_peak, row.fallback_bytes_peak);
        assert_eq!(peaks(&rows[0]), (9, 2));
        assert_eq!(peaks(&rows[1]), (7, 0), "what is live when a step begins is live in it");
        assert_eq!(rows[0].planned, 1);
    }
}
