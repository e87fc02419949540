//! Growth from step to step, and the step at which it would run out of memory.
//!
//! The one design decision: a slope that no single step can bend. It is the median of the slopes
//! between all pairs of steps (Theil and Sen), taken over the second half of the steps, since what a
//! job does first (optimizer state, caches that fill) is no trend. Live memory that grows is a leak,
//! reserved memory that grows over live memory that does not is fragmentation.

use super::StepPeaks;
use crate::units::slope::median_slope;

/// Fewest steps that show a trend.
const STEPS_MIN: usize = 6;

/// What grows from step to step, in bytes a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Steps that it was taken over: the later half.
    pub steps: u64,
    /// Number of the last of them, counted from 0 among all steps.
    pub last_step: u64,
    /// Growth of the peak of live requests; 0 if it does not grow.
    pub requested_bytes_per_step: u64,
    /// Growth of the reserved peak; 0 if it does not grow.
    pub reserved_bytes_per_step: u64,
    /// The reserved peak of the last step in bytes.
    pub reserved_bytes_last: u64,
}

impl Growth {
    /// The growth over the steps of a job; nothing if they are fewer than six, or if nothing grew in
    /// the later half.
    pub fn of(rows: &[StepPeaks]) -> Option<Growth> {
        let steps: Vec<&StepPeaks> = rows.iter().filter(|row| row.is_step()).collect();
        if steps.len() < STEPS_MIN {
            return None;
        }
        let later = &steps[steps.len() / 2..];
        let slope = |peak: fn(&StepPeaks) -> u64| {
            let peaks = (0..).zip(later.iter().map(|step| peak(step)));
            // Rounded down; a slope below 0 becomes 0.
            median_slope(&peaks.collect::<Vec<_>>()) as u64
        };
        let growth = Growth {
            steps: later.len() as u64,
            last_step: steps.len() as u64 - 1,
            requested_bytes_per_step: slope(|step| step.requested_bytes_peak),
            reserved_bytes_per_step: slope(|step| step.reserved_bytes_peak),
            reserved_bytes_last: later[later.len() - 1].reserved_bytes_peak,
        };
        let grows = growth.requested_bytes_per_step > 0 || growth.reserved_bytes_per_step > 0;
        grows.then_some(growth)
    }

    /// The first step, counted from 0, whose reserved peak would be above `capacity_bytes` if it
    /// went on like this. Nothing if reserved memory does not grow.
    pub fn runs_out_at(&self, capacity_bytes: u64) -> Option<u64> {
        let per_step =
            (self.reserved_bytes_per_step > 0).then_some(self.reserved_bytes_per_step)?;
        let room = capacity_bytes.saturating_sub(self.reserved_bytes_last);
        Some(self.last_step + room / per_step + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(reserved: &[u64], live: &[u64]) -> Vec<StepPeaks> {
        let step = |(index, (&reserved, &live)): (usize, (&u64, &u64))| StepPeaks {
            name: format!("step{index}"),
            requested_bytes_peak: live,
            allocated_bytes_peak: live,
            reserved_bytes_peak: reserved,
        };
        reserved.iter().zip(live).enumerate().map(step).collect()
    }

    #[test]
    fn a_steady_growth_is_told_and_when_it_ends() {
        let rows = steps(&[10, 50, 52, 54, 56, 58, 60, 62], &[8; 8]);
        let growth = Growth::of(&rows).unwrap();
        assert_eq!((growth.reserved_bytes_per_step, growth.requested_bytes_per_step), (2, 0));
        // 62 at step 7; 64, 66 at 8 and 9, 68 at 10.
        assert_eq!(growth.runs_out_at(66), Some(10));
        assert_eq!(growth.runs_out_at(67), Some(10));
        assert_eq!(growth.runs_out_at(61), Some(8));
    }

    #[test]
    fn one_jump_is_no_trend() {
        assert_eq!(Growth::of(&steps(&[10, 20, 20, 20, 20, 20, 20, 90], &[8; 8])), None);
        assert_eq!(Growth::of(&steps(&[10, 20, 30, 40, 50], &[8; 5])), None);
        let shrinking = steps(&[90, 80, 70, 60, 50, 40], &[8; 6]);
        assert_eq!(Growth::of(&shrinking), None);
    }

    #[test]
    fn a_leak_grows_in_live_memory() {
        let live = [5, 6, 7, 8, 9, 10];
        let growth = Growth::of(&steps(&live, &live)).unwrap();
        assert_eq!((growth.requested_bytes_per_step, growth.reserved_bytes_per_step), (1, 1));
    }
}
