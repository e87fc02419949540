//! What a search may spend, and what it knows of others.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::units::Stop;

/// Looks at the clock once for so many units of work.
const CLOCK_EVERY_UNITS: u64 = 1 << 14;

/// The lowest height that is known, shared by all that search for a lower one.
///
/// Whoever picks among results of one height goes by rank (which method found it), never by who came
/// first, so that the winner does not depend on threads.
#[derive(Debug)]
pub struct Incumbent {
    height: AtomicU64,
    stop: AtomicBool,
}

impl Default for Incumbent {
    fn default() -> Self {
        Incumbent { height: AtomicU64::new(u64::MAX), stop: AtomicBool::new(false) }
    }
}

impl Incumbent {
    /// The lowest height known, in units; `u64::MAX` if there is none.
    pub fn height(&self) -> u64 {
        self.height.load(Ordering::Relaxed)
    }

    /// Tells of a height that was reached.
    pub fn tell(&self, height: u64) {
        self.height.fetch_min(height, Ordering::Relaxed);
    }

    /// Nobody needs to search on.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether to stop.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// What one search may still spend.
///
/// A unit is about one item looked at; 10^7 to 10^8 of them take a second. With a limit in units
/// and no deadline a search is a function of its input alone.
#[derive(Clone, Debug)]
pub struct Work<'a> {
    left_units: u64,
    spent_units: u64,
    next_clock_units: u64,
    deadline: Option<Instant>,
    stop: Option<&'a AtomicBool>,
    wish: Option<&'a Stop>,
    over: bool,
}

impl<'a> Work<'a> {
    /// So many units, and no longer than to the deadline.
    pub fn new(units: u64, deadline: Option<Instant>) -> Work<'a> {
        Work {
            left_units: units,
            spent_units: 0,
            next_clock_units: 0,
            deadline,
            stop: None,
            wish: None,
            over: false,
        }
    }

    /// As much as it takes.
    pub fn unlimited() -> Work<'a> {
        Work::new(u64::MAX, None)
    }

    /// Also ends when the incumbent says so.
    #[must_use]
    pub fn until(mut self, incumbent: &'a Incumbent) -> Work<'a> {
        self.stop = Some(&incumbent.stop);
        self
    }

    /// Also ends when somebody asks to stop.
    #[must_use]
    pub fn unless_asked(mut self, wish: &'a Stop) -> Work<'a> {
        self.wish = Some(wish);
        self
    }

    /// Spends; false if there is nothing left and the search must end.
    pub fn spend(&mut self, units: u64) -> bool {
        self.spent_units += units;
        if self.over || self.spent_units > self.left_units {
            self.over = true;
            return false;
        }
        if self.spent_units >= self.next_clock_units {
            self.next_clock_units = self.spent_units + CLOCK_EVERY_UNITS;
            let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let stopped = self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
            let asked = self.wish.is_some_and(Stop::is_asked);
            self.over = late || stopped || asked;
        }
        !self.over
    }

    /// Looks at the clock now; false if the search must end.
    pub fn go_on(&mut self) -> bool {
        self.next_clock_units = self.spent_units;
        self.spend(0)
    }

    /// Units spent so far.
    pub fn spent_units(&self) -> u64 {
        self.spent_units
    }

    /// Units that may still be spent.
    pub fn left_units(&self) -> u64 {
        self.left_units.saturating_sub(self.spent_units)
    }

    /// Whether [`Self::spend`] has said no.
    pub fn over(&self) -> bool {
        self.over
    }

    /// A part of what is left, for a search inside this one.
    pub fn part(&self, units: u64) -> Work<'a> {
        let left_units = units.min(self.left_units());
        Work { left_units, spent_units: 0, next_clock_units: 0, ..self.clone() }
    }
}
