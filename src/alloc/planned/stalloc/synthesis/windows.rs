//! When space of the static pool is spare for mixtures of experts, and which (specs/stalloc.md 2.6).
//!
//! ```text
//!   bytes   │ activation │          │ activation │
//!     ^     └────────────┘          └────────────┘       spare throughout the window: the rest
//!     │  ┌──────────────────────────────────────────┐
//!     │  │ activation                               │
//!     └──┴──────────────────────────────────────────┴──> time
//!         mlp-F-0  [══════ cross window ══════] mlp-B-7
//!                               moe-B-7  [═ intra ═]
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use super::Activations;
use super::job::{Class, Iteration, Job, LabelKind, Phase, Request};
use crate::plan::stalloc::files::{Interval, IntervalFile, SpareFile, SpareWindow};
use crate::plan::stalloc::size_classes::rounded;

/// Iterations that have windows.
const ITERATIONS: [u32; 2] = [0, 1];

/// Windows across passes and within them.
pub(super) fn find(job: &Job, faithful: bool) -> (IntervalFile, IntervalFile) {
    let finder = Finder { job };
    let pairs = if faithful { finder.pairs_by_number() } else { finder.pairs_by_module() };
    let cross = IntervalFile {
        layers: Some((finder.experts_of(0), finder.experts_of(1))),
        intervals: pairs.into_iter().filter_map(|pair| finder.cross(pair)).collect(),
    };
    let intervals = if faithful { finder.intra_as_the_tool() } else { finder.intra() };
    (cross, IntervalFile { layers: None, intervals })
}

struct Finder<'a> {
    job: &'a Job,
}

/// Labels of an expert layer in its forward and its backward pass.
type Pair = (u32, u32);

impl Finder<'_> {
    fn labels_of(&self, iteration: u32) -> impl Iterator<Item = u32> {
        let labels = self.job.labels.iter().enumerate();
        labels
            .filter(move |(_, label)| label.iteration == Iteration::Step(iteration))
            .map(|(at, _)| at as u32)
    }

    /// Labels `mlp` of an iteration.
    fn experts_of(&self, iteration: u32) -> u64 {
        let is_expert = |at: &u32| matches!(self.kind(*at), LabelKind::Mlp { .. });
        self.labels_of(iteration).filter(is_expert).count() as u64
    }

    fn kind(&self, label: u32) -> LabelKind {
        self.job.labels[label as usize].kind
    }

    /// The label `mlp` of a pass with this number.
    fn expert(&self, backward: bool, id: i64) -> Option<u32> {
        let wanted = LabelKind::Mlp { backward, id };
        let at = self.job.labels.iter().position(|label| label.kind == wanted)?;
        Some(at as u32)
    }

    /// Pairs by the numbers of layers, as the tool finds them: the k-th forward with the k-th
    /// backward pass, of which the *first* r layers are recomputed.
    fn pairs_by_number(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for iteration in ITERATIONS {
            let mut ids: BTreeMap<Phase, BTreeSet<i64>> = BTreeMap::new();
            for at in self.labels_of(iteration) {
                if let LabelKind::Mlp { id, .. } = self.kind(at) {
                    ids.entry(self.job.labels[at as usize].phase).or_default().insert(id);
                }
            }
            for (phase, forward) in &ids {
                let Phase::Pass { backward: false, index } = *phase else { continue };
                let Some(backward) = ids.get(&Phase::Pass { backward: true, index }) else {
                    continue;
                };
                let count = forward.len() as i64;
                let recomputed = backward.len() as i64 - count;
                let first = |ids: &BTreeSet<i64>| ids.first().copied().unwrap_or(0);
                let (min_forward, min_backward) = (first(forward), first(backward));
                for layer in 0..count {
                    let (forward, backward) = if layer < recomputed {
                        let forward = min_backward + count + recomputed - 2 * layer - 2;
                        (forward, forward + 1)
                    } else {
                        (min_forward + layer, min_backward + count - 1 - layer)
                    };
                    pairs.extend(self.expert(false, forward).zip(self.expert(true, backward)));
                }
            }
        }
        pairs
    }

    /// Pairs by the modules that opened the layers: a backward pass belongs to the forward pass of
    /// its module that was recomputed in its own phase, else to the oldest that had none yet.
    fn pairs_by_module(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for iteration in ITERATIONS {
            let mut waiting: BTreeMap<&str, VecDeque<u32>> = BTreeMap::new();
            for at in self.labels_of(iteration) {
                let label = &self.job.labels[at as usize];
                let LabelKind::Mlp { backward, .. } = label.kind else { continue };
                let waiting = waiting.entry(&label.path).or_default();
                if !backward {
                    waiting.push_back(at);
                    continue;
                }
                let last = waiting.back().copied();
                let recomputed =
                    last.filter(|&last| self.job.labels[last as usize].phase == label.phase);
                if recomputed.is_some() {
                    waiting.pop_back();
                }
                // What was recomputed has been run forward before: that run is over as well.
                let oldest = waiting.pop_front();
                pairs.extend(recomputed.or(oldest).map(|forward| (forward, at)));
            }
        }
        pairs
    }

    /// From the first malloc in the forward layer to the last free in the backward layer.
    fn cross(&self, (forward, backward): Pair) -> Option<Interval> {
        let experts = || self.job.requests.iter().filter(|it| it.class == Class::DynamicMlp);
        let start = experts().filter(|it| it.layer == Some(forward)).map(|it| it.start).min()?;
        let end = experts().filter(|it| it.end_layer == Some(backward)).map(|it| it.end).max()?;
        let name = |at: u32| self.job.labels[at as usize].name.clone();
        Some(Interval { label: name(forward), backward_label: Some(name(backward)), start, end })
    }

    /// Requests of mixtures in the first two iterations, by start.
    fn mixtures(&self) -> impl Iterator<Item = &Request> {
        self.job.requests.iter().filter(|request| {
            request.class == Class::DynamicMoe
                && matches!(request.iteration, Iteration::Step(0 | 1))
        })
    }

    /// Every layer under which a mixture's request is made or freed, none also being one. A layer
    /// with one request gets the end 0.
    fn intra_as_the_tool(&self) -> Vec<Interval> {
        let mut windows: BTreeMap<Option<u32>, (u64, u64, u64)> = BTreeMap::new();
        let mut order = Vec::new();
        for request in self.mixtures() {
            let labels = [request.layer, request.end_layer];
            let labels = if labels[0] == labels[1] { &labels[..1] } else { &labels[..] };
            for &label in labels {
                let window = windows.entry(label).or_insert_with(|| {
                    order.push(label);
                    (request.start, 0, 0)
                });
                window.1 = window.1.max(request.end);
                window.2 += 1;
            }
        }
        let interval = |label: Option<u32>| {
            let (start, end, requests) = windows[&label];
            let name = label.map(|at| self.job.labels[at as usize].name.clone());
            let end = if requests == 1 { 0 } else { end };
            Interval { label: name.unwrap_or_default(), backward_label: None, start, end }
        };
        order.into_iter().map(interval).collect()
    }

    /// Every layer of a mixture, from its first malloc to the last free of what was made in it.
    fn intra(&self) -> Vec<Interval> {
        let mut windows: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for request in self.mixtures() {
            let Some(label) = request.layer else { continue };
            let window = windows.entry(label).or_insert((request.start, 0));
            window.1 = window.1.max(request.end);
        }
        let interval = |(label, (start, end)): (u32, (u64, u64))| Interval {
            label: self.job.labels[label as usize].name.clone(),
            backward_label: None,
            start,
            end,
        };
        windows.into_iter().map(interval).collect()
    }
}

/// What of the activations' part of the pool is free throughout each window, from the pool's base.
/// A window without a label becomes a bogus first line, as in the tool.
pub(super) fn spare(
    intervals: &IntervalFile,
    activations: &Activations,
    from_bytes: u64,
) -> SpareFile {
    let mut file = SpareFile { layers: intervals.layers, windows: Vec::new() };
    for interval in &intervals.intervals {
        if interval.label.is_empty() {
            file.layers = Some((interval.start, interval.end));
            continue;
        }
        let listed = activations.listed.iter().zip(&activations.offsets_bytes);
        let live = listed.filter(|(it, _)| it.start <= interval.end && interval.start <= it.end);
        let taken = live.map(|(it, &offset)| offset..offset + rounded(it.size_bytes));
        let free = complement(taken.collect(), activations.peak_bytes);
        let moved = free.into_iter().map(|it| it.start + from_bytes..it.end + from_bytes);
        let label = interval.label.clone();
        file.windows.push(SpareWindow { label, free_bytes: moved.collect() });
    }
    file
}

/// What none of the ranges takes of `0..end`.
fn complement(mut taken: Vec<Range<u64>>, end: u64) -> Vec<Range<u64>> {
    taken.sort_unstable_by_key(|range| range.start);
    let mut free = Vec::new();
    let mut from = 0;
    for range in taken {
        if from < range.start {
            free.push(from..range.start);
        }
        from = from.max(range.end);
    }
    if from < end {
        free.push(from..end);
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_leaves_the_rest() {
        assert_eq!(complement(vec![4..6, 0..2, 5..8], 10), [2..4, 8..10]);
        assert_eq!(complement(vec![3..4, 3..5], 9), [0..3, 5..9]);
        assert!(complement(vec![0..2, 1..3], 3).is_empty());
    }
}
