//! Events at the time at which they were recorded.
//!
//! The one design decision: most of a wait is slept and its end is spun, because a sleep ends late.

use std::time::{Duration, Instant};

use crate::trace::Event;
use crate::units::Stop;

/// A sleep may last longer than it should by this: the rest of a wait is spun.
const SLEEP_MARGIN: Duration = Duration::from_micros(500);

/// Longest sleep without a look whether to stop.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// When an event of a replay takes place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// As soon as the one before it is done.
    #[default]
    Fast,
    /// Not before its recorded time.
    Recorded,
}

/// Waits until it is time for an event.
pub(super) struct Pacer {
    /// When the first event took place, and its recorded time; nothing if events do not wait.
    begun: Option<(Instant, u64)>,
    pub(super) spent: Duration,
}

impl Pacer {
    pub(super) fn new(pace: Pace, events: &[Event]) -> Pacer {
        let first_ns = events.first().map_or(0, |event| event.time_ns);
        let begun = (pace == Pace::Recorded).then(|| (Instant::now(), first_ns));
        Pacer { begun, spent: Duration::ZERO }
    }

    /// Waits for an event of this time, but no longer than until somebody asks to stop; says whether
    /// it slept.
    #[inline]
    pub(super) fn wait(&mut self, time_ns: u64, stop: &Stop) -> bool {
        let Some((begun, first_ns)) = self.begun else { return false };
        let due = Duration::from_nanos(time_ns.saturating_sub(first_ns));
        let now = begun.elapsed();
        let Some(left) = due.checked_sub(now) else { return false };
        let slept = left > SLEEP_MARGIN;
        while let Some(left) = due.checked_sub(begun.elapsed() + SLEEP_MARGIN)
            && !left.is_zero()
            && !stop.is_asked()
        {
            std::thread::sleep(left.min(SLEEP_MAX));
        }
        while begun.elapsed() < due && !stop.is_asked() {
            std::hint::spin_loop();
        }
        self.spent += begun.elapsed() - now;
        slept
    }
}
