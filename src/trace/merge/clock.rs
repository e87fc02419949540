//! In which order events of several ranks stand.
//!
//! The one design decision: by time, and at the same time whoever has done the smaller part of its
//! events goes first. So ranks that tell no times take turns, each as often as it has events, and no
//! rank is done long before another.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::{Align, MergeError, MergeOptions, RankTrace};
use crate::trace::Trace;
use crate::units::Nanos;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Whose.
    pub(super) rank: usize,
    /// Which event; nothing where the rank begins.
    pub(super) event: Option<usize>,
    /// When, by the common clock.
    pub(super) time_ns: u64,
}

/// The clock of a rank.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// When the rank begins, by the common clock.
    begin_ns: u64,
    /// Its events are spread evenly over so much time, whatever times they have.
    spread_ns: Option<u64>,
}

/// The place of a rank in its own trace: its beginning, then event after event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Next {
    time_ns: u64,
    done: u64,
    all: u64,
    rank: usize,
}

impl Ord for Next {
    fn cmp(&self, other: &Next) -> Ordering {
        // Fewer than 2^32 events each, so that products fit in 64 bits.
        let progress = || (self.done * other.all).cmp(&(other.done * self.all));
        let time = self.time_ns.cmp(&other.time_ns);
        time.then_with(progress).then_with(|| self.rank.cmp(&other.rank))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Next) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// All turns in order.
pub(super) struct Turns<'a> {
    ranks: &'a [RankTrace<'a>],
    clocks: Vec<Clock>,
    next: BinaryHeap<Reverse<Next>>,
}

impl<'a> Turns<'a> {
    /// # Errors
    /// If a clock that is asked for is not known.
    pub(super) fn new(
        ranks: &'a [RankTrace<'a>],
        options: MergeOptions,
        warnings: &mut Vec<String>,
    ) -> Result<Turns<'a>, MergeError> {
        let clocks = clocks(ranks, options, warnings)?;
        let mut turns = Turns { ranks, clocks, next: BinaryHeap::with_capacity(ranks.len()) };
        for rank in 0..ranks.len() {
            let next = turns.place(rank, 0);
            turns.next.push(Reverse(next));
        }
        Ok(turns)
    }

    fn place(&self, rank: usize, done: u64) -> Next {
        let events = &self.ranks[rank].trace.events;
        let all = events.len() as u64 + 1;
        let Clock { begin_ns, spread_ns } = self.clocks[rank];
        let own_ns = match (spread_ns, done.checked_sub(1)) {
            (_, None) => 0,
            (Some(spread_ns), _) => {
                (u128::from(spread_ns) * u128::from(done) / u128::from(all)) as u64
            }
            (None, Some(event)) => events[event as usize].time_ns,
        };
        Next { time_ns: begin_ns.saturating_add(own_ns), done, all, rank }
    }
}

impl Iterator for Turns<'_> {
    type Item = Turn;

    fn next(&mut self) -> Option<Turn> {
        let Reverse(Next { time_ns, done, all, rank }) = self.next.pop()?;
        if done + 1 < all {
            let next = self.place(rank, done + 1);
            self.next.push(Reverse(next));
        }
        let event = done.checked_sub(1).map(|event| event as usize);
        Some(Turn { rank, event, time_ns })
    }
}

fn duration_ns(trace: &Trace) -> u64 {
    trace.events.last().map_or(0, |event| event.time_ns)
}

fn clocks(
    ranks: &[RankTrace<'_>],
    options: MergeOptions,
    warnings: &mut Vec<String>,
) -> Result<Vec<Clock>, MergeError> {
    if options.align == Align::Turns {
        return Ok(vec![Clock { begin_ns: 0, spread_ns: Some(0) }; ranks.len()]);
    }
    let longest_ns = ranks.iter().map(|rank| duration_ns(rank.trace)).max().unwrap_or(0);
    // A rank of one event has no times either, but one event needs none.
    let is_timeless =
        |rank: &&RankTrace<'_>| duration_ns(rank.trace) == 0 && rank.trace.events.len() > 1;
    let timeless = ranks.iter().filter(is_timeless).count();
    if longest_ns > 0 && timeless > 0 {
        warnings.push(format!(
            "{timeless} of {} ranks tell no times: their events are spread evenly over the {} of \
             the longest",
            ranks.len(),
            Nanos(longest_ns)
        ));
    }
    let first_unix_ns = ranks.iter().filter_map(|rank| rank.trace.header.start_unix_ns).min();
    let mut clocks = Vec::with_capacity(ranks.len());
    for (nth, rank) in ranks.iter().enumerate() {
        let spread_ns = is_timeless(&rank).then_some(longest_ns);
        let own_ns = spread_ns.unwrap_or(duration_ns(rank.trace));
        let begin_ns = match options.align {
            Align::End => longest_ns - own_ns,
            Align::Clock => {
                let start_ns = rank.trace.header.start_unix_ns;
                let start_ns =
                    start_ns.ok_or_else(|| MergeError::NoClock { rank: rank.label.to_owned() })?;
                start_ns - first_unix_ns.unwrap_or(start_ns)
            }
            Align::Start | Align::Turns => 0,
        };
        let stagger_ns = options.stagger_ns.saturating_mul(nth as u64);
        clocks.push(Clock { begin_ns: begin_ns.saturating_add(stagger_ns), spread_ns });
    }
    Ok(clocks)
}
