//! Profiles for allocators that plan ahead: where the steps of a trace are, and its first ones.
//!
//! Marks tell where steps are. A trace without them is searched for what repeats: the period of the
//! longest end of it in which the same sizes are asked for on the same streams again and again.
//!
//! ```text
//!   allocs   w w w a b c x a b c d a b c d a b c d
//!                         └──────┴───────┴─────── the end that repeats itself, after 4
//! ```
//!
//! It is cut where least is live, so that few blocks cross from one step into the next. What comes
//! before is the beginning, the first step included, which differs in most jobs. The whole trace is
//! looked at to find the cuts, as whoever sets marks knows the whole program; a profile holds the
//! first steps alone. Steps whose sizes vary are not found: mark them.

use std::ops::Range;

use super::replay::RunOptions;
use crate::alloc::planned::{self, Profile};
use crate::alloc::spec::AllocSpec;
use crate::trace::{Event, Op, Trace, step_name};
use crate::units::{BlockId, ModuleId, PhaseId, counted};

/// Where a profile comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ProfileKey {
    /// So many first steps of the trace that is replayed; nothing for [`steps_to_profile`].
    FirstSteps(Option<u64>),
    /// All steps of another trace, by its name in [`RunOptions::profiles`].
    Other(String),
}

impl ProfileKey {
    /// What a specification asks for, if its allocator plans ahead.
    pub(super) fn of(spec: &AllocSpec, options: &RunOptions) -> Option<ProfileKey> {
        if spec.name != planned::NAME {
            return None;
        }
        let value = |key: &str| {
            let found = spec.params.iter().find(|(name, _)| name == key);
            found.map(|(_, value)| value.as_str())
        };
        if let Some(name) = value("trace") {
            return Some(ProfileKey::Other(name.to_owned()));
        }
        let steps = value("profile_steps").and_then(|steps| steps.parse().ok());
        Some(ProfileKey::FirstSteps(steps.or(options.profile_steps)))
    }

    /// The profile, if there is one.
    pub(super) fn cut(self, trace: &Trace, options: &RunOptions) -> Option<Profile> {
        match self {
            ProfileKey::Other(name) => {
                let other = options.profiles.get(&name)?;
                Some(first_steps(other, usize::MAX))
            }
            ProfileKey::FirstSteps(steps) => {
                let steps = steps.map_or_else(
                    || steps_to_profile(steps_of(trace).len()),
                    |steps| usize::try_from(steps).unwrap_or(usize::MAX),
                );
                (steps > 0).then(|| first_steps(trace, steps)).filter(|it| !it.steps.is_empty())
            }
        }
    }
}

/// How many of a trace's steps are its profile unless it is said: two, of which the first tells of
/// the beginning and the second of what repeats; one if there are only two; none if there is one.
pub fn steps_to_profile(steps: usize) -> usize {
    match steps {
        0 | 1 => 0,
        2 => 1,
        _ => 2,
    }
}

/// Events of each step of a trace, by its marks `stepN`, `stepN.…`; events under other marks belong
/// to no step. Without such marks, what repeats itself, see the module docs.
pub fn steps_of(trace: &Trace) -> Vec<Range<usize>> {
    match trace.phases.iter().any(|phase| step_name(phase).is_some()) {
        true => marked_steps(trace),
        false => repeated_steps(trace),
    }
}

fn marked_steps(trace: &Trace) -> Vec<Range<usize>> {
    let mut steps: Vec<Range<usize>> = Vec::new();
    let mut current: Option<(&str, usize)> = None;
    for (index, event) in trace.events.iter().enumerate() {
        let Op::Mark(phase) = event.op else { continue };
        let name = step_name(&trace.phases[phase.index()]);
        if name == current.map(|(name, _)| name) {
            continue;
        }
        if let Some((_, start)) = current {
            steps.push(start..index);
        }
        current = name.map(|name| (name, index));
    }
    if let Some((_, start)) = current {
        steps.push(start..trace.events.len());
    }
    steps
}

/// Fewer requests than this that repeat themselves are no step.
const STEP_REQUESTS_MIN: usize = 8;

/// An alloc: its event, what it asks for, and what is live before it.
struct Asked {
    event: usize,
    request: (u64, u32),
    live_bytes: u64,
}

fn repeated_steps(trace: &Trace) -> Vec<Range<usize>> {
    let asked = allocs_of(trace);
    let requests: Vec<(u64, u32)> = asked.iter().rev().map(|asked| asked.request).collect();
    let matches = matches_with_start(&requests);
    let periods = STEP_REQUESTS_MIN..=requests.len() / 2;
    // At least two rounds; the longest end, among equals the shortest period.
    let repeats = periods.filter(|&period| matches[period] >= period);
    let best = repeats.max_by_key(|&period| (matches[period], usize::MAX - period));
    let Some(period) = best else { return Vec::new() };
    let first = asked.len() - (matches[period] + period);
    let round = first..(first + period).min(asked.len() + 1 - period);
    let Some(start) = round.min_by_key(|&at| (asked[at].live_bytes, at)) else {
        return Vec::new();
    };
    let event = |at: usize| asked.get(at).map_or(trace.events.len(), |asked| asked.event);
    let starts = (start..).step_by(period).take_while(|at| at + period <= asked.len());
    starts.map(|at| event(at)..event(at + period)).collect()
}

fn allocs_of(trace: &Trace) -> Vec<Asked> {
    let mut asked = Vec::new();
    let mut live_bytes = 0u64;
    for (event, op) in trace.events.iter().map(|event| event.op).enumerate() {
        match op {
            Op::Alloc(block) => {
                let block = trace.blocks[block.index()];
                let request = (block.size_bytes, block.stream.0);
                asked.push(Asked { event, request, live_bytes });
                live_bytes = live_bytes.saturating_add(block.size_bytes);
            }
            Op::Free(block) | Op::Defer(block) => {
                let size_bytes = trace.blocks[block.index()].size_bytes;
                live_bytes = live_bytes.saturating_sub(size_bytes);
            }
            _ => {}
        }
    }
    asked
}

/// For every index how many items from there on are the same as those from the start on (the
/// Z function, in linear time).
fn matches_with_start<T: PartialEq>(items: &[T]) -> Vec<usize> {
    let mut matches = vec![items.len(); items.len().max(1)];
    // The match that reaches furthest: where it begins and ends.
    let (mut start, mut end) = (0, 0);
    for at in 1..items.len() {
        let known = if at < end { matches[at - start].min(end - at) } else { 0 };
        let more = (known..items.len() - at).take_while(|&it| items[it] == items[at + it]);
        matches[at] = known + more.count();
        if at + matches[at] > end {
            (start, end) = (at, at + matches[at]);
        }
    }
    matches
}

/// The beginning of a trace up to the end of its `count`-th step.
pub fn first_steps(trace: &Trace, count: usize) -> Profile {
    let mut steps = steps_of(trace);
    let all = steps.len();
    steps.truncate(count);
    let end = if count == usize::MAX {
        trace.events.len()
    } else {
        steps.last().map_or(0, |step| step.end)
    };
    let mut cutter = Cutter::new(trace);
    let mut event_at = Vec::with_capacity(end + 1);
    for event in &trace.events[..end] {
        event_at.push(cutter.cut.events.len());
        cutter.event(trace, *event);
    }
    event_at.push(cutter.cut.events.len());
    for step in &mut steps {
        *step = event_at[step.start]..event_at[step.end];
    }
    let name = &trace.header.name;
    let source = match steps.len() {
        some if some < all => format!("{some} of {all} steps of {name}"),
        _ => format!("all of {name}, {}", counted(all as u64, "step")),
    };
    Profile { source, trace: cutter.cut, steps, ..Profile::default() }
}

/// Copies a trace event by event, and only what the events name.
struct Cutter {
    cut: Trace,
    /// New ids by old ones; [`u32::MAX`] where nothing named them yet.
    blocks: Vec<u32>,
    phases: Vec<u32>,
    modules: Vec<u32>,
}

impl Cutter {
    fn new(trace: &Trace) -> Cutter {
        let mut cut = Trace {
            header: trace.header.clone(),
            streams: trace.streams.clone(),
            pools: trace.pools.clone(),
            ..Trace::default()
        };
        cut.header.expectations.clear();
        let none = |count| vec![u32::MAX; count];
        let mut cutter = Cutter {
            cut,
            blocks: none(trace.blocks.len()),
            phases: none(trace.phases.len()),
            modules: none(trace.modules.len()),
        };
        if let Some(start) = &trace.start {
            let mut start = start.clone();
            for row in &mut start.blocks {
                if row.block != BlockId::NONE {
                    row.block = cutter.block(trace, row.block);
                }
            }
            cutter.cut.start = Some(start);
        }
        cutter
    }

    fn block(&mut self, trace: &Trace, block: BlockId) -> BlockId {
        let new = &mut self.blocks[block.index()];
        if *new == u32::MAX {
            *new = self.cut.blocks.len() as u32;
            let mut copy = trace.blocks[block.index()];
            copy.site = crate::units::SiteId::NONE;
            copy.name = crate::units::NameId::NONE;
            self.cut.blocks.push(copy);
        }
        BlockId(*new)
    }

    fn event(&mut self, trace: &Trace, event: Event) {
        let op = match event.op {
            Op::Alloc(block) => Op::Alloc(self.block(trace, block)),
            Op::Free(block) => Op::Free(self.block(trace, block)),
            Op::Defer(block) => Op::Defer(self.block(trace, block)),
            Op::Done(block) => Op::Done(self.block(trace, block)),
            Op::Mark(phase) => {
                let (names, ids) = (&mut self.cut.phases, &mut self.phases);
                Op::Mark(PhaseId(renamed(&trace.phases, names, ids, phase.index())))
            }
            Op::ModuleEnter(module) => {
                let (names, ids) = (&mut self.cut.modules, &mut self.modules);
                Op::ModuleEnter(ModuleId(renamed(&trace.modules, names, ids, module.index())))
            }
            Op::ModuleLeave(module) => {
                let (names, ids) = (&mut self.cut.modules, &mut self.modules);
                Op::ModuleLeave(ModuleId(renamed(&trace.modules, names, ids, module.index())))
            }
            Op::PoolEnter(_) | Op::PoolLeave(_) | Op::PoolDelete(_) | Op::EmptyCache => event.op,
            // A refused request is no part of what the program needs; settings, accesses and
            // transfers say nothing of blocks.
            Op::Attempt(_) | Op::Settings(_) | Op::Access(_) | Op::Transfer(_) => return,
        };
        self.cut.events.push(Event { op, ..event });
    }
}

/// The new id of a name, which is copied when it is first met.
fn renamed(old: &[String], names: &mut Vec<String>, ids: &mut [u32], id: usize) -> u32 {
    if ids[id] == u32::MAX {
        ids[id] = names.len() as u32;
        names.push(old[id].clone());
    }
    ids[id]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::read_text;

    const TWO_STEPS: &str = "\
alloc w 1MiB
mark step0.forward
alloc a 2MiB
mark step0.backward
free a
mark step1.forward
alloc b 3MiB
free b
mark end
alloc late 4MiB
";

    #[test]
    fn steps_end_where_another_phase_begins() {
        let trace = read_text(TWO_STEPS).expect("a trace");
        assert_eq!(steps_of(&trace), [1..5, 5..8]);
    }

    #[test]
    fn a_trace_without_marks_is_cut_where_it_repeats_itself_and_least_is_live() {
        // Least is live before `c1`, when all of the round before is freed.
        let mut text = "alloc w 1MiB\nalloc x 7MiB\nalloc k 4KiB\nfree x\n".to_owned();
        for _ in 0..3 {
            text.push_str("free k\n");
            for size in 1..10 {
                text.push_str(&format!("alloc c{size} {size}MiB\n"));
            }
            text.push_str("alloc k 4KiB\n");
            for size in 1..10 {
                text.push_str(&format!("free c{size}\n"));
            }
        }
        let trace = read_text(&text).expect("a trace");
        let steps = steps_of(&trace);
        // 4 events before, 20 a round; the free of `k` goes before the first alloc of the round.
        assert_eq!(steps, [5..25, 25..45, 45..64]);
        let once = read_text("alloc a 1MiB\nalloc b 2MiB\nfree a b\n").expect("a trace");
        assert!(steps_of(&once).is_empty());
    }

    #[test]
    fn matches_are_those_of_the_definition() {
        let items: Vec<u32> = (0..60u32).map(|at| (at * at + at / 7) % 3).collect();
        let matches = matches_with_start(&items);
        for at in 0..items.len() {
            let same = items.iter().zip(&items[at..]).take_while(|(one, other)| one == other);
            assert_eq!(matches[at], same.count(), "at {at}");
        }
        assert_eq!(matches_with_start::<u32>(&[]).len(), 1);
    }

    #[test]
    fn a_profile_holds_nothing_of_what_comes_after_it() {
        let trace = read_text(TWO_STEPS).expect("a trace");
        let profile = first_steps(&trace, 1);
        assert_eq!(profile.steps, vec![1..5]);
        let sizes: Vec<u64> = profile.trace.blocks.iter().map(|block| block.size_bytes).collect();
        assert_eq!(sizes, [1 << 20, 2 << 20]);
        assert_eq!(profile.trace.phases, ["step0.forward", "step0.backward"]);
        assert_eq!(profile.trace.events.len(), 5);
    }
}
