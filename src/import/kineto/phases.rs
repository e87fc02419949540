//! Phases from what the program annotated: `ProfilerStep#N` and `record_function` ranges.
//!
//! The one design decision: ranges nest and phases do not, so only the outermost ranges of a step
//! count, of the thread that runs the steps, and a phase lasts until the next one begins, as in
//! snapshots.
//!
//! ```text
//!   ProfilerStep#3  ├──────────────────────────────────────────┤├─ ProfilerStep#4 ─
//!   ranges            ├ forward ─┤  ├ backward ┤ ├ Optimizer.step#AdamW.step ┤
//!                       ├ attn ┤
//!   marks           step3  step3.forward  step3.backward  step3.optimizer
//! ```

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::read::{Annotation, Profile};

/// A phase begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) time_ns: i64,
    /// `step3`, `step3.forward`, or `forward` where the profiler was not told of steps.
    pub(super) phase: String,
}

/// What a range is.
enum Range<'a> {
    Step(u64),
    Inner(Cow<'a, str>),
}

/// The marks of a profile by time.
pub(super) fn marks(profile: &Profile) -> Vec<Mark> {
    let range = |annotation: &Annotation| Range::of(profile.names.text(annotation.name));
    let Some(thread) = thread_of_steps(profile) else { return Vec::new() };
    let of_thread = profile.annotations.iter().filter(|range| range.thread == thread);
    let mut ranges: Vec<&Annotation> = of_thread.collect();
    // A range that holds others comes before them.
    ranges.sort_by_key(|range| (range.begin_ns, Reverse(range.end_ns)));
    let mut marks = Vec::new();
    let mut step: Option<(u64, i64)> = None;
    let mut outer_end_ns = i64::MIN;
    for annotation in ranges {
        let time_ns = annotation.begin_ns;
        step = step.filter(|&(_, end_ns)| time_ns < end_ns);
        match range(annotation) {
            Range::Step(number) => {
                step = Some((number, annotation.end_ns));
                outer_end_ns = i64::MIN;
                marks.push(Mark { time_ns, phase: format!("step{number}") });
            }
            Range::Inner(name) if time_ns >= outer_end_ns => {
                outer_end_ns = annotation.end_ns;
                let step = step.map_or_else(String::new, |(number, _)| format!("step{number}."));
                marks.push(Mark { time_ns, phase: format!("{step}{name}") });
            }
            Range::Inner(_) => {}
        }
    }
    marks
}

/// The thread with the most steps; without steps, the one with the most ranges. The first in the
/// file of several.
fn thread_of_steps(profile: &Profile) -> Option<u64> {
    let mut threads: BTreeMap<u64, (u64, u64, Reverse<usize>)> = BTreeMap::new();
    for (place, annotation) in profile.annotations.iter().enumerate() {
        let (steps, ranges, _) = threads.entry(annotation.thread).or_insert((0, 0, Reverse(place)));
        let name = profile.names.text(annotation.name);
        *steps += u64::from(matches!(Range::of(name), Range::Step(_)));
        *ranges += 1;
    }
    threads.into_iter().max_by_key(|&(_, counts)| counts).map(|(thread, _)| thread)
}

impl<'a> Range<'a> {
    /// Decorations go, and what PyTorch annotates by itself gets the names that people use.
    fn of(name: Cow<'a, str>) -> Range<'a> {
        let number = name.strip_prefix("ProfilerStep#").and_then(|digits| digits.parse().ok());
        if let Some(number) = number {
            return Range::Step(number);
        }
        let by_itself = [
            ("Optimizer.step#", "optimizer"),
            ("Optimizer.zero_grad#", "zero_grad"),
            ("enumerate(DataLoader)#", "data"),
        ];
        let known = by_itself.iter().find(|(begin, _)| name.starts_with(begin));
        Range::Inner(match known {
            Some((_, phase)) => Cow::Borrowed(*phase),
            None => {
                let bare = name.trim_matches(|c: char| c == '#' || c.is_whitespace());
                Cow::Owned(bare.to_owned())
            }
        })
    }
}
