//! The time line of a replay of any length in bounded memory.
//!
//! The one design decision: a point stands for a stretch of events and keeps the highest of each
//! level in it, so that the peaks of the whole run are exact whatever is drawn. When the points are
//! used up, each two neighbours become one and stretches are twice as long from then on:
//!
//! ```text
//!   events   0 1 2 3 4 5 6 7        8 points at most
//!   points   │ │ │ │ │ │ │ │        a stretch is 1 event
//!   event 8  │ 0-1 │ 2-3 │ 4-5 │ 6-7 │ 8          a stretch is 2 events
//! ```

use super::{Sink, TimelineRow};
use crate::alloc::Levels;

/// The four levels of DESIGN 2, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FourLevels {
    /// Sum of live requests.
    pub requested_bytes: u64,
    /// Live blocks at rounded size.
    pub allocated_bytes: u64,
    /// Allocated and deferred.
    pub active_bytes: u64,
    /// Physical memory held.
    pub reserved_bytes: u64,
}

impl FourLevels {
    fn max(self, other: FourLevels) -> FourLevels {
        FourLevels {
            requested_bytes: self.requested_bytes.max(other.requested_bytes),
            allocated_bytes: self.allocated_bytes.max(other.allocated_bytes),
            active_bytes: self.active_bytes.max(other.active_bytes),
            reserved_bytes: self.reserved_bytes.max(other.reserved_bytes),
        }
    }
}

/// A stretch of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnvelopePoint {
    /// Its first event.
    pub event_begin: u64,
    /// One beyond its last event.
    pub event_end: u64,
    /// Simulated nanoseconds from the first event of the trace to the last of the stretch. Until the
    /// engine adds the program's own time, the device's alone.
    pub time_ns: u64,
    /// The phase of its last event, as an index into the trace's phases; set by the engine.
    pub phase: Option<u32>,
    /// The highest of each level in it, each for itself.
    pub max: FourLevels,
    /// The levels after its last event.
    pub last: FourLevels,
}

impl EnvelopePoint {
    /// The highest levels of the stretch as one row, at its last event.
    pub fn row(&self) -> TimelineRow {
        TimelineRow {
            event_index: self.event_end - 1,
            time_ns: self.time_ns,
            phase: self.phase,
            requested_bytes: self.max.requested_bytes,
            allocated_bytes: self.max.allocated_bytes,
            active_bytes: self.max.active_bytes,
            reserved_bytes: self.max.reserved_bytes,
        }
    }
}

/// Most points of an [`Envelope`] unless asked otherwise.
pub const ENVELOPE_POINTS: usize = 4096;

/// Keeps at most so many points, whatever the number of events.
#[derive(Clone, Debug)]
pub struct Envelope {
    points: Vec<EnvelopePoint>,
    points_max: usize,
    /// Events of a stretch: a power of two.
    stretch: u64,
}

impl Envelope {
    /// For at most `points_max` points, at least 2.
    pub fn new(points_max: usize) -> Envelope {
        Envelope { points: Vec::new(), points_max: points_max.max(2), stretch: 1 }
    }

    /// The points in order; stretches follow each other without a gap.
    pub fn into_points(self) -> Vec<EnvelopePoint> {
        self.points
    }

    /// Makes one point of each two neighbours.
    fn halve(&mut self) {
        self.stretch *= 2;
        let pairs = self.points.chunks(2).map(|pair| match pair {
            &[first, second] => EnvelopePoint {
                event_begin: first.event_begin,
                max: first.max.max(second.max),
                ..second
            },
            _ => pair[0],
        });
        self.points = pairs.collect();
    }
}

impl Sink for Envelope {
    const LOG: bool = false;
    const LEVELS: bool = true;

    fn after_event(&mut self, event: u64, requested_bytes: u64, levels: Levels, device_ns: u64) {
        let now = FourLevels {
            requested_bytes,
            allocated_bytes: levels.allocated_bytes,
            active_bytes: levels.active_bytes,
            reserved_bytes: levels.reserved_bytes,
        };
        if let Some(point) = self.points.last_mut()
            && event < point.event_begin + self.stretch
        {
            point.max = point.max.max(now);
            (point.event_end, point.time_ns, point.last) = (event + 1, device_ns, now);
            return;
        }
        if self.points.len() == self.points_max {
            self.halve();
            // An odd number of points leaves the last stretch half full.
            return self.after_event(event, requested_bytes, levels, device_ns);
        }
        self.points.push(EnvelopePoint {
            event_begin: event,
            event_end: event + 1,
            time_ns: device_ns,
            phase: None,
            max: now,
            last: now,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::random::Random;

    /// Every stretch against the events themselves.
    #[test]
    fn points_are_few_and_their_peaks_exact() {
        let mut random = Random::new(3);
        for (events, points_max) in [(1, 2), (7, 8), (9, 8), (1000, 7), (5000, 64)] {
            let rows: Vec<[u64; 4]> =
                (0..events).map(|_| [(); 4].map(|()| random.below(1000))).collect();
            let mut envelope = Envelope::new(points_max);
            for (event, row) in (0..).zip(&rows) {
                let levels = Levels {
                    allocated_bytes: row[1],
                    active_bytes: row[2],
                    reserved_bytes: row[3],
                };
                envelope.after_event(event, row[0], levels, 10 * event);
            }
            let points = envelope.into_points();
            assert!(points.len() <= points_max && 2 * points.len() + 1 >= points_max.min(events));
            let mut begin = 0;
            for point in &points {
                assert_eq!(point.event_begin, begin);
                let of = &rows[begin as usize..point.event_end as usize];
                let max = |level: usize| of.iter().map(|row| row[level]).max();
                assert_eq!(Some(point.max.requested_bytes), max(0));
                assert_eq!(Some(point.max.allocated_bytes), max(1));
                assert_eq!(Some(point.max.active_bytes), max(2));
                assert_eq!(Some(point.max.reserved_bytes), max(3));
                assert_eq!(point.last.reserved_bytes, of[of.len() - 1][3]);
                assert_eq!(point.time_ns, 10 * (point.event_end - 1));
                begin = point.event_end;
            }
            assert_eq!(begin, events as u64);
        }
    }
}
