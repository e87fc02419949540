//! What a sequence of calls costs by a profile.
//!
//! The one design decision: of what happened before, one number counts. A driver clears memory that
//! was freed before it gives it out again, and a malloc or create that comes soon may wait for that;
//! memory that nobody held has no such tail. So the tail is charged for as much memory as was given
//! back before and not taken again.
//!
//! ```text
//!   free, release      freed += size
//!   malloc, create     again = min(size, freed);  freed -= again
//!                      cost = median + tail * again / size
//!   any other call     cost = median + tail
//! ```

use super::{CostProfile, DeviceCall};

/// Costs calls one after the other.
#[derive(Clone, Debug)]
pub(crate) struct CostMeter {
    profile: CostProfile,
    /// Memory that was given back and not taken again.
    freed_bytes: u64,
}

impl CostMeter {
    /// Before the first call.
    pub(crate) fn new(profile: CostProfile) -> CostMeter {
        CostMeter { profile, freed_bytes: 0 }
    }

    /// What the next `count` calls of one size cost in nanoseconds.
    #[inline]
    pub(crate) fn next_ns(&mut self, call: DeviceCall, size_bytes: u64, count: u64) -> f64 {
        let median_ns = self.profile.median_ns(call, size_bytes);
        let total_bytes = size_bytes.saturating_mul(count);
        let tail_share = match call {
            DeviceCall::Malloc | DeviceCall::Create => {
                let again_bytes = total_bytes.min(self.freed_bytes);
                self.freed_bytes -= again_bytes;
                again_bytes as f64 / total_bytes.max(1) as f64
            }
            DeviceCall::Free | DeviceCall::Release => {
                self.freed_bytes = self.freed_bytes.saturating_add(total_bytes);
                1.0
            }
            _ => 1.0,
        };
        (median_ns + self.profile.tail_ns(call, size_bytes) * tail_share) * count as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    /// Mallocs take 10 µs and have a tail of 100, frees 5 and 1.
    #[test]
    fn a_tail_is_charged_for_memory_that_comes_again() {
        let mut profile = CostProfile::shipped("h200").expect("ships");
        for (call, us, tail_us) in [(DeviceCall::Malloc, 10.0, 100.0), (DeviceCall::Free, 5.0, 1.0)]
        {
            profile.calls.insert(call, vec![(2.0, us)]);
            profile.tails.insert(call, vec![(2.0, tail_us)]);
        }
        let mut meter = CostMeter::new(profile.checked().expect("good"));
        let mut us = |call, mib| meter.next_ns(call, mib * MIB, 1) / 1000.0;
        assert_eq!(us(DeviceCall::Malloc, 8), 10.0);
        assert_eq!(us(DeviceCall::Free, 8), 6.0);
        // 6 of the 8 MiB come again, then 2 of 4, then nothing.
        assert_eq!(us(DeviceCall::Malloc, 6), 110.0);
        assert_eq!(us(DeviceCall::Malloc, 4), 60.0);
        assert_eq!(us(DeviceCall::Malloc, 4), 10.0);
    }
}
