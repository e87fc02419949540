//! Peaks of every step of a job, each from levels inside that step alone.

use super::Sink;
use crate::alloc::Levels;

/// The peaks of one step in bytes, or of what lies before or after one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPeaks {
    /// `stepN`; `before` and `after` are no steps.
    pub name: String,
    /// Sum of live requests.
    pub requested_bytes_peak: u64,
    /// Live blocks at rounded size.
    pub allocated_bytes_peak: u64,
    /// Physical memory held.
    pub reserved_bytes_peak: u64,
}

impl StepPeaks {
    /// Whether it is a step, not what lies before or after one.
    pub fn is_step(&self) -> bool {
        !matches!(self.name.as_str(), "before" | "after")
    }
}

/// Keeps the peaks of every step.
#[derive(Clone, Debug, Default)]
pub struct StepPeakTracker {
    /// Where the parts of the trace begin, and their names; the last comes next.
    ahead: Vec<(u64, String)>,
    rows: Vec<StepPeaks>,
}

impl StepPeakTracker {
    /// For parts that begin at these events, in order.
    pub fn new(mut begins: Vec<(u64, String)>) -> StepPeakTracker {
        begins.reverse();
        StepPeakTracker { ahead: begins, rows: Vec::new() }
    }

    /// A row a part that was reached.
    pub fn into_rows(self) -> Vec<StepPeaks> {
        self.rows
    }
}

impl Sink for StepPeakTracker {
    const LOG: bool = false;
    const LEVELS: bool = true;

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, _device_ns: u64) {
        while let Some((_, name)) = self.ahead.pop_if(|(begin, _)| *begin <= event) {
            self.rows.push(StepPeaks { name, ..StepPeaks::default() });
        }
        let Some(row) = self.rows.last_mut() else { return };
        row.requested_bytes_peak = row.requested_bytes_peak.max(requested_bytes);
        row.allocated_bytes_peak = row.allocated_bytes_peak.max(levels.allocated_bytes);
        row.reserved_bytes_peak = row.reserved_bytes_peak.max(levels.reserved_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_the_peaks_of_its_own_events() {
        let begins = [(0, "before"), (2, "step0"), (3, "step1")];
        let begins = begins.map(|(event, name)| (event, name.to_owned()));
        let mut tracker = StepPeakTracker::new(begins.to_vec());
        for (event, bytes) in [7, 3, 3, 5, 4].into_iter().enumerate() {
            let levels =
                Levels { allocated_bytes: bytes + 1, active_bytes: 0, reserved_bytes: bytes + 2 };
            tracker.after_event(event as u64, bytes, levels, 0);
        }
        let rows = tracker.into_rows();
        let peaks = |row: &StepPeaks| {
            (row.requested_bytes_peak, row.allocated_bytes_peak, row.reserved_bytes_peak)
        };
        assert_eq!(rows.iter().map(peaks).collect::<Vec<_>>(), [(7, 8, 9), (3, 4, 5), (5, 6, 7)]);
        assert_eq!(rows[2].name, "step1");
    }
}
