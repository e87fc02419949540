//! Blocks whose sizes are not known ahead, but whose sum is: the tokens of a batch, as a router
//! spreads them over experts.
//!
//! No place fits such a block: with room for the largest of each, a layer of eight experts would take
//! a quarter more than it ever needs. What lives long is therefore planned as *groups* of requests
//! that follow each other and add up to the same in every observed step. A group has one place, and
//! its blocks lie in it as they come, each behind the one before:
//!
//! ```text
//!   step 1   │ e0   │ e1      │ e2 │ e3    │
//!   step 2   │ e0 │ e1    │ e2      │ e3   │     the same end
//! ```
//!
//! While the group fills, and while it is freed from its end, the plan counts only what is used in
//! the worst of the observed steps.

use super::plan::{Span, Template, rounded};
use super::shapes::Shapes;
use crate::plan::Gap;

/// Blocks that are freed before so many later requests are no members: a place of their own with
/// some room costs little.
const LONG_LIFE: u32 = 24;
/// A group that is filled or freed in part may hold one part in so many of its room more than was
/// observed.
const MARGIN_ONE_IN: u64 = 8;
/// Sums may differ by so much a member: its rounding.
const SLACK_BYTES: u64 = 1024;

/// Requests that share one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    /// Their positions, in order.
    pub(super) members: Vec<u32>,
    /// Where each ends at most, in bytes from the group's offset.
    ends: Vec<u64>,
}

/// The groups of a template, by what was observed.
pub(super) fn groups(template: &Template, shapes: &Shapes, observed: &[Vec<u64>]) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut group = Group::default();
    let mut sums = vec![0u64; observed.len()];
    for (at, item) in template.items.iter().enumerate() {
        let position = at as u32;
        let until = template.freed_before(item.span);
        let is_long = matches!(item.span, Span::Inside(..)) && until - position > LONG_LIFE;
        if !shapes.is_free(at) || !is_long {
            continue;
        }
        for (sum, sizes) in sums.iter_mut().zip(observed) {
            *sum += rounded(sizes[at]);
        }
        let most = sums.iter().copied().max().unwrap_or(0);
        let least = sums.iter().copied().min().unwrap_or(0);
        group.members.push(position);
        group.ends.push(most);
        let members = group.members.len() as u64;
        if members > 1 && most - least <= members * SLACK_BYTES {
            // Later steps may round the other way.
            if let Some(end) = group.ends.last_mut() {
                *end += members * SLACK_BYTES;
            }
            groups.push(std::mem::take(&mut group));
            sums.fill(0);
        }
    }
    groups
}

impl Group {
    /// Bytes that it needs in all.
    pub(super) fn room_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// When it needs memory, in ticks of the step, and when less than all.
    pub(super) fn life(&self, template: &Template) -> (u64, u64, Vec<Gap>) {
        let mut spans: Vec<(u64, u64, u64)> = Vec::new();
        for (&member, &end) in self.members.iter().zip(&self.ends) {
            if let Span::Inside(from, to) = template.items[member as usize].span {
                spans.push((from, to, end));
            }
        }
        let mut ticks: Vec<u64> = spans.iter().flat_map(|&(from, to, _)| [from, to]).collect();
        ticks.sort_unstable();
        ticks.dedup();
        let mut gaps: Vec<Gap> = Vec::new();
        for pair in ticks.windows(2) {
            let live = spans.iter().filter(|&&(from, to, _)| from <= pair[0] && pair[0] < to);
            let used = live.map(|&(.., end)| end).max().unwrap_or(0);
            let margin = if used > 0 { rounded(self.room_bytes() / MARGIN_ONE_IN) } else { 0 };
            let used = (used + margin).min(self.room_bytes());
            if used == self.room_bytes() {
                continue;
            }
            let window_bytes = (used > 0).then_some((0, used));
            match gaps.last_mut() {
                Some(gap) if gap.end == pair[0] && gap.window_bytes == window_bytes => {
                    gap.end = pair[1];
                }
                _ => gaps.push(Gap { start: pair[0], end: pair[1], window_bytes }),
            }
        }
        let (start, end) = (ticks.first().copied(), ticks.last().copied());
        (start.unwrap_or(0), end.unwrap_or(0), gaps)
    }
}
