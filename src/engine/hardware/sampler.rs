//! What the driver says is used, while a replay goes on.
//!
//! The one design decision: it is asked only when more is reserved than ever, and not for every
//! such event of a trace with many.

use std::time::{Duration, Instant};

use super::super::result::MemorySample;
use super::Card;
use crate::device::MemoryInfo;
use crate::units::signed_difference;

/// Most looks at the card's free memory that are taken for every new peak; from then on only where
/// the peak has grown by [`SAMPLE_SHARE`] of the card. A look takes the driver microseconds.
const SAMPLES_MAX: u32 = 1000;

/// See [`SAMPLES_MAX`].
const SAMPLE_SHARE: u64 = 1024;

/// Looks at the card's free memory when more is reserved than ever.
pub(super) struct Sampler {
    before: MemoryInfo,
    pub(super) at_peak: MemorySample,
    samples: u32,
    pub(super) spent: Duration,
}

impl Sampler {
    pub(super) fn new(before: MemoryInfo) -> Sampler {
        Sampler { before, at_peak: MemorySample::default(), samples: 0, spent: Duration::ZERO }
    }

    /// The allocator holds so much after an event.
    #[inline]
    pub(super) fn after<C: Card>(&mut self, card: &C, event_index: u64, reserved_bytes: u64) {
        if reserved_bytes > self.at_peak.reserved_bytes {
            self.at_new_peak(card, event_index, reserved_bytes);
        }
    }

    #[cold]
    fn at_new_peak<C: Card>(&mut self, card: &C, event_index: u64, reserved_bytes: u64) {
        let grown_bytes = reserved_bytes - self.at_peak.reserved_bytes;
        if self.samples < SAMPLES_MAX || grown_bytes >= self.before.total_bytes / SAMPLE_SHARE {
            self.samples += 1;
            self.at_peak = self.sample(card, event_index, reserved_bytes);
        }
    }

    pub(super) fn sample<C: Card>(
        &mut self,
        card: &C,
        event_index: u64,
        reserved_bytes: u64,
    ) -> MemorySample {
        let begun = Instant::now();
        let free_bytes = card.memory_info().free_bytes;
        self.spent += begun.elapsed();
        let used_bytes = signed_difference(free_bytes, self.before.free_bytes);
        MemorySample { event_index, reserved_bytes, used_bytes }
    }
}
