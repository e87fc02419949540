//! From the course of a profile to places: a packing problem, and what its solution says.
//!
//! The design decision is the time axis: the profile as it was, then one *steady* step, which stands
//! for all later ones and is closed to a circle.
//!
//! ```text
//!   offsets │ weights ──────────────────────────────────────────────────────┐
//!           │           │ optimizer state, made in a step ─────────────────┤
//!           │           │  ┌─┐  ┌───┐   │  ┌─┐  ┌───┐   │  ┌─┐  ┌───┐      │ ╲
//!           │           │ ─┘ └──┘   └─  │ ─┘ └──┘   └─  │ ─┘ └──┘   └─ c ──┘   c again
//!           └ beginning │ step 0        │ step 1        │ steady step
//! ```
//!
//! - The steady step has the requests of the last step of the profile, with places of its own. So a
//!   profile of one step will do: what it made late and never freed is there from the beginning.
//! - A block that a step leaves to the next (`c` above) is live at the end *and* at the beginning
//!   of the steady step. If it is freed before it is asked for again, it gets one place, free
//!   between the two; else two places in turn.
//! - Each stream has a pool of its own, one above the other; where that costs much, they share
//!   memory between planned waits for the device ([`waits`](super::waits)).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::course::{Course, Life, Section};
use super::groups::{Group, groups};
use super::shapes::Shapes;
use super::waits::{self, Load};
use crate::alloc::ALIGNMENT_BYTES;
use crate::plan::bound::load_bytes;
use crate::plan::{Buffer, Extra, Gap, Packing, Problem, SolveOptions, solve};
use crate::units::StreamId;

/// What crosses from one step into the next is little if it is no more than one part in so many of
/// what is live at most.
const LITTLE_ONE_IN: u64 = 256;

/// Work that planning a profile may take: so many units, and so many more for each block.
const PLAN_WORK_UNITS: u64 = 1_000_000;
const PLAN_WORK_UNITS_EACH: u64 = 2_000;

/// A new plan for a step may need one part in so many more than the least there can be.
const CLOSE_ONE_IN: u64 = 2048;

/// No place.
pub(super) const NOWHERE: u64 = u64::MAX;

/// A request that is expected, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// What is expected to be asked for, in bytes.
    pub(super) size_bytes: u64,
    /// On which stream.
    pub(super) stream: StreamId,
    /// Bytes that the place holds.
    pub(super) room_bytes: u64,
    /// Where, or [`NOWHERE`].
    pub(super) offset: u64,
    /// A second place, taken if the first is still in use, or [`NOWHERE`].
    pub(super) other_offset: u64,
    /// The position in its track before which the block is freed; [`u32::MAX`] if it lives longer.
    pub(super) freed_before: u32,
    /// Another size will do as well.
    pub(super) any_size: bool,
    /// The group whose place it is, among those of the track, or [`u32::MAX`].
    pub(super) group: u32,
}

impl Place {
    /// Whether a request of this size may belong here although it is not as large as expected.
    #[inline]
    pub(super) fn may_be(&self, size_bytes: u64) -> bool {
        self.any_size && size_bytes / SIZES_WITHIN < self.size_bytes && size_bytes > 0
    }
}

/// Where any size will do, none is so many times as large as expected.
const SIZES_WITHIN: u64 = 16;

/// The requests of a section in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Track {
    /// The requests.
    pub(super) places: Vec<Place>,
    /// Phases: what they are called inside the step, and the position they begin at.
    pub(super) marks: Vec<(String, u32)>,
    /// Positions before which the device is waited for, in order.
    pub(super) waits: Vec<u32>,
    /// How many groups share places.
    pub(super) groups: usize,
}

impl Track {
    /// How many requests it has.
    pub(super) fn len(&self) -> u32 {
        self.places.len() as u32
    }
}

/// Tracks for the whole program.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// One for each section of the profile: whether it is a step.
    pub(super) sections: Vec<(bool, Arc<Track>)>,
    /// For every later step.
    pub(super) steady: Option<Arc<Track>>,
    /// What that is made from.
    pub(super) template: Arc<Template>,
    /// How sizes of that step hang together.
    pub(super) shapes: Shapes,
    /// What is expected of that step before its shape is known.
    pub(super) sizes: Vec<u64>,
    /// Memory that it needs, in bytes.
    pub(super) height_bytes: u64,
    /// No packing of its blocks needs less, in bytes.
    pub(super) lower_bound_bytes: u64,
}

/// Bytes that a request takes.
pub(super) fn rounded(size_bytes: u64) -> u64 {
    size_bytes.next_multiple_of(ALIGNMENT_BYTES)
}

/// How long the block of a request lives in a step that repeats itself, in ticks from the beginning
/// of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// Freed in the same step.
    Inside(u64, u64),
    /// Asked for at the first tick, freed at the second of the next step, before it is asked for
    /// again.
    Crosses(u64, u64),
    /// Asked for at this tick, freed in the next step after it is asked for again.
    Overlaps(u64),
}

impl Span {
    /// Tick of the request.
    pub(super) fn start(self) -> u64 {
        match self {
            Span::Inside(start, _) | Span::Crosses(start, _) | Span::Overlaps(start) => start,
        }
    }
}

/// A request of the step that repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// What is asked for, in bytes.
    pub(super) size_bytes: u64,
    /// On which stream.
    pub(super) stream: StreamId,
    /// How long it lives.
    pub(super) span: Span,
}

/// The step that repeats itself: the last of the profile without what it made to stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Template {
    /// Its requests in order.
    pub(super) items: Vec<Item>,
    /// Its length.
    pub(super) ticks: u64,
    /// Phases, as those of a [`Track`].
    pub(super) marks: Vec<(String, u32)>,
}

impl Template {
    /// That of a profile, and for every request of its last step the position it has here.
    fn of(course: &Course) -> (Template, Vec<Option<u32>>) {
        let Some(step) = course.last_step() else { return Default::default() };
        let start = step.ticks.start;
        let crossings = crossings(course, step);
        let kept_bytes: u64 =
            crossings.keys().map(|at| course.lives[step.requests.start + at].size_bytes).sum();
        // Where little crosses, its place is kept free of others: such blocks are freed whenever a
        // copy or a collector ends, at another moment in every step.
        let is_little = kept_bytes <= course.live_bytes_peak() / LITTLE_ONE_IN;
        let mut template = Template { ticks: step.ticks.end - start, ..Template::default() };
        let mut positions = Vec::new();
        // How many requests are kept before each.
        let mut kept = vec![0];
        for (at, life) in course.lives[step.requests.clone()].iter().enumerate() {
            let from = life.start - start;
            let span = match (life.end, crossings.get(&at)) {
                (Some(end), _) if end <= step.ticks.end => Some(Span::Inside(from, end - start)),
                // It ends in a section behind the last step, or not at all.
                (_, None) => None,
                (_, Some(&freed)) if freed <= from => {
                    Some(Span::Crosses(from, if is_little { from } else { freed }))
                }
                (_, Some(_)) => Some(Span::Overlaps(from)),
            };
            positions.push(span.map(|_| template.items.len() as u32));
            let (size_bytes, stream) = (life.size_bytes, life.stream);
            template.items.extend(span.map(|span| Item { size_bytes, stream, span }));
            kept.push(template.items.len() as u32);
        }
        let marks = step.marks.iter();
        template.marks = marks.map(|(part, at)| (part.clone(), kept[*at as usize])).collect();
        (template, positions)
    }

    /// Whether all requests are on one stream.
    pub(super) fn has_one_stream(&self) -> bool {
        self.items.windows(2).all(|pair| pair[0].stream == pair[1].stream)
    }

    /// The position before which a block is freed in its own step.
    pub(super) fn freed_before(&self, span: Span) -> u32 {
        let Span::Inside(_, end) = span else { return u32::MAX };
        self.items.partition_point(|item| item.span.start() < end) as u32
    }
}

/// What is there when a step is planned.
#[derive(Clone, Debug, Default)]
pub(super) struct Present {
    /// Requests of this step that have their memory: position and offset.
    pub(super) of_this: Vec<(u32, u64)>,
    /// Blocks from the step before that this one will free: position and offset.
    pub(super) of_last: Vec<(u32, u64)>,
    /// All others: offset and bytes.
    pub(super) others: Vec<(u64, u64)>,
}

/// Plans a profile, with at most `syncs` waits for the device in each section.
pub(super) fn plan_profile(course: &Course, syncs: usize) -> Plan {
    let (template, positions) = Template::of(course);
    let observed = observations(course, &template);
    let shapes = Shapes::learn(&observed);
    let groups = groups(&template, &shapes, &observed);
    let sizes = expected_sizes(&observed, &shapes);
    let step = Step { template: &template, shapes: &shapes, sizes: &sizes, groups: &groups };
    let mut draft = Draft::new(course.ticks + template.ticks);
    // What is not freed is there to the end.
    for life in &course.lives {
        draft.push(life.start, life.end.unwrap_or(draft.end), life.size_bytes, life.stream);
    }
    let carried = draft.carry_over(course, &template, &positions);
    let steady = draft.push_step(step, course.ticks, &carried);
    // Where blocks come back late, half of the waits are kept for those that come too late.
    let most = if course.defers { syncs.div_ceil(2) } else { syncs };
    let Some(solved) = draft.solve_profile(course, most) else { return Plan::default() };
    Plan {
        sections: course.sections.iter().map(|it| solved.section(course, it)).collect(),
        steady: course.last_step().map(|_| Arc::new(solved.track(step, &steady, course.ticks))),
        template: Arc::new(template),
        shapes,
        sizes,
        height_bytes: solved.height_bytes,
        lower_bound_bytes: solved.lower_bound_bytes,
    }
}

/// Plans a step of one stream with these sizes around what is there. Gives its track and the height; nothing if
/// what is there contradicts the template. The search ends when no more than `enough_bytes` are needed.
pub(super) fn plan_step(
    step: Step<'_>,
    present: &Present,
    enough_bytes: u64,
    work_units: u64,
) -> Option<(Track, u64)> {
    let Step { template, sizes, .. } = step;
    // Of one stream there is one pool.
    let mut draft = Draft::new(template.ticks);
    draft.enough_bytes = Some(enough_bytes);
    let end = draft.end;
    for &(offset, size_bytes) in &present.others {
        draft.push_fixed(0, end, size_bytes, offset);
    }
    for &(at, offset) in &present.of_last {
        if let Span::Crosses(_, freed) = template.items.get(at as usize)?.span {
            draft.push_fixed(0, freed, sizes[at as usize], offset);
        }
    }
    let steady = draft.push_step(step, 0, &[]);
    for &(at, offset) in &present.of_this {
        let [wish, _] = *steady.get(at as usize)?;
        draft.wishes[wish].fixed = Some(offset);
    }
    let solved = draft.solve_apart(&[], work_units)?;
    Some((solved.track(step, &steady, 0), solved.height_bytes))
}

/// Sizes of the template's requests in the steps of the profile, as far as these ask alike: as often
/// and on the same streams, but for what stays to the end.
fn observations(course: &Course, template: &Template) -> Vec<Vec<u64>> {
    let steps = course.sections.iter().filter(|section| section.is_step);
    let last = course.last_step();
    let observed = steps.filter(|step| Some(*step) != last).filter_map(|step| {
        let lives = course.lives[step.requests.clone()].iter().filter(|life| life.end.is_some());
        let (sizes, streams): (Vec<u64>, Vec<StreamId>) =
            lives.map(|life| (life.size_bytes, life.stream)).unzip();
        let same = streams.iter().eq(template.items.iter().map(|item| &item.stream));
        same.then_some(sizes)
    });
    let of_last = template.items.iter().map(|item| item.size_bytes).collect();
    observed.chain([of_last]).collect()
}

/// No buffer.
const NONE: usize = usize::MAX;

/// What is expected of a step.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    /// Its requests.
    pub(super) template: &'a Template,
    /// How their sizes hang together.
    pub(super) shapes: &'a Shapes,
    /// Their sizes by position.
    pub(super) sizes: &'a [u64],
    /// Which of them share places.
    pub(super) groups: &'a [Group],
}

impl Step<'_> {
    /// The group of every position, or [`u32::MAX`].
    fn group_of(&self) -> Vec<u32> {
        let mut group_of = vec![u32::MAX; self.template.items.len()];
        for (group, id) in self.groups.iter().zip(0..) {
            for &member in &group.members {
                group_of[member as usize] = id;
            }
        }
        group_of
    }

    /// Bytes that the place of a position holds: some more where nothing is known ahead.
    fn room_bytes(&self, at: usize) -> u64 {
        let size_bytes = self.sizes[at];
        match self.shapes.is_free(at) {
            true => rounded(size_bytes + size_bytes / FREE_ROOM_ONE_IN),
            false => rounded(size_bytes),
        }
    }
}

/// A place for a size that is not known ahead holds one part in so many more than any that was seen.
const FREE_ROOM_ONE_IN: u64 = 8;

/// Sizes of a step before anything is known of it: the last that was observed; where nothing will be
/// known, the largest.
pub(super) fn expected_sizes(observed: &[Vec<u64>], shapes: &Shapes) -> Vec<u64> {
    let Some(last) = observed.last() else { return Vec::new() };
    let largest = |at: usize| observed.iter().map(|sizes| sizes[at]).max().unwrap_or(0);
    let sizes = last.iter().enumerate();
    sizes.map(|(at, &size)| if shapes.is_free(at) { largest(at) } else { size }).collect()
}

/// A block that needs a place.
#[derive(Clone, Debug)]
struct Wish {
    start: u64,
    end: u64,
    size_bytes: u64,
    stream: StreamId,
    /// When less than its place is needed.
    gaps: Vec<Gap>,
    /// The only place that it may have.
    fixed: Option<u64>,
}

/// A problem in the making.
#[derive(Default)]
struct Draft {
    wishes: Vec<Wish>,
    /// The last tick.
    end: u64,
    /// A packing that needs no more than this is good enough.
    enough_bytes: Option<u64>,
}

impl Draft {
    fn new(end: u64) -> Draft {
        Draft { wishes: Vec::new(), end, enough_bytes: None }
    }

    fn push(&mut self, start: u64, end: u64, size_bytes: u64, stream: StreamId) -> usize {
        let size_bytes = rounded(size_bytes);
        self.wishes.push(Wish { start, end, size_bytes, stream, gaps: Vec::new(), fixed: None });
        self.wishes.len() - 1
    }

    fn push_fixed(&mut self, start: u64, end: u64, size_bytes: u64, offset: u64) {
        let at = self.push(start, end, size_bytes, StreamId::NONE);
        self.wishes[at].fixed = Some(offset);
    }

    /// What crosses from the last step of a profile has one place there and in all steps after: for
    /// each request of the template its wish there, or [`NONE`]. Wishes are those of the profile's
    /// requests so far.
    fn carry_over(
        &mut self,
        course: &Course,
        template: &Template,
        positions: &[Option<u32>],
    ) -> Vec<usize> {
        let mut carried = vec![NONE; template.items.len()];
        let first = course.last_step().map_or(0, |step| step.requests.start);
        for (request, position) in (first..).zip(positions) {
            let Some(position) = *position else { continue };
            let wish = &mut self.wishes[request];
            match template.items[position as usize].span {
                Span::Inside(..) => continue,
                Span::Crosses(from, freed) => {
                    wish.free_between(course.ticks + freed, course.ticks + from);
                }
                Span::Overlaps(_) => (),
            }
            wish.end = self.end;
            carried[position as usize] = request;
        }
        carried
    }

    /// The requests of a step that begins at a tick and repeats itself to the end: for each its
    /// first and second place. Those that the step before carried over have their first.
    fn push_step(&mut self, step: Step<'_>, start: u64, carried: &[usize]) -> Vec<[usize; 2]> {
        let group_of = step.group_of();
        let groups: Vec<usize> =
            step.groups.iter().map(|group| self.push_group(step, group, start)).collect();
        let carried_to = |at: usize| carried.get(at).copied().filter(|&wish| wish != NONE);
        let items = step.template.items.iter().enumerate();
        let push = |(at, item): (usize, &Item)| {
            let size = step.room_bytes(at);
            match item.span {
                _ if group_of[at] != u32::MAX => [groups[group_of[at] as usize], NONE],
                Span::Inside(from, to) => {
                    [self.push(start + from, start + to, size, item.stream), NONE]
                }
                Span::Crosses(from, freed) => {
                    let place = carried_to(at).unwrap_or_else(|| {
                        let wish = self.push(start, self.end, size, item.stream);
                        self.wishes[wish].free_between(start + freed, start + from);
                        wish
                    });
                    [place, NONE]
                }
                Span::Overlaps(_) => {
                    let mut whole = || self.push(start, self.end, size, item.stream);
                    [carried_to(at).unwrap_or_else(&mut whole), whole()]
                }
            }
        };
        items.map(push).collect()
    }

    fn push_group(&mut self, step: Step<'_>, group: &Group, start: u64) -> usize {
        let (from, to, mut gaps) = group.life(step.template);
        for gap in &mut gaps {
            gap.start += start;
            gap.end += start;
        }
        let stream = group.members.first().map(|&at| step.template.items[at as usize].stream);
        let stream = stream.unwrap_or(StreamId::NONE);
        let at = self.push(start + from, start + to, group.room_bytes(), stream);
        self.wishes[at].gaps = gaps;
        at
    }

    /// A profile and its steady step: with waits if they are worth it, at most `most` a section.
    fn solve_profile(&self, course: &Course, most: usize) -> Option<SolvedDraft> {
        let streams = streams_by_peak(course);
        let mut sections: Vec<Range<u64>> =
            course.sections.iter().map(|section| section.ticks.clone()).collect();
        if self.end > course.ticks {
            sections.push(course.ticks..self.end);
        }
        let work_units = PLAN_WORK_UNITS + self.wishes.len() as u64 * PLAN_WORK_UNITS_EACH;
        let apart = self.solve_apart(&streams, work_units);
        let waits = waits::choose(&self.loads(&streams), streams.len(), &sections, most);
        let together = waits.zip(streams.last()).and_then(|(waits, &main)| {
            let solved = self.solve_with_waits(main, waits, work_units)?;
            // Whole windows may take what sharing saves.
            let worth =
                |apart: &SolvedDraft| waits::are_worth(apart.height_bytes, solved.height_bytes);
            apart.as_ref().is_none_or(worth).then_some(solved)
        });
        together.or(apart)
    }

    /// Each stream in a pool of its own, one above the other.
    fn solve_apart(&self, streams: &[StreamId], work_units: u64) -> Option<SolvedDraft> {
        let buffers = self.wishes.iter().map(|wish| {
            let pool = streams.iter().position(|&it| it == wish.stream).unwrap_or(0) as u32;
            wish.buffer(|extra| extra.pool = pool, pool > 0)
        });
        let (packing, problem) = packed(buffers.collect(), self.enough_bytes, work_units)?;
        let mut bases = vec![0];
        for pool in &packing.pools {
            bases.push(bases[bases.len() - 1] + pool.height_bytes);
        }
        let offsets = packing.offsets_bytes.iter().zip(&problem.buffers);
        let offsets = offsets.map(|(offset, buffer)| offset + bases[buffer.pool() as usize]);
        Some(SolvedDraft {
            offsets: offsets.collect(),
            height_bytes: packing.height_bytes(),
            lower_bound_bytes: packing.lower_bound_bytes(),
            waits: Vec::new(),
        })
    }

    /// All streams in one memory, which changes its stream at these ticks.
    fn solve_with_waits(
        &self,
        main: StreamId,
        waits: Vec<u64>,
        work_units: u64,
    ) -> Option<SolvedDraft> {
        let mut buffers = Vec::new();
        // For each wish its buffer, and its offset in it.
        let mut places = vec![(NONE, 0); self.wishes.len()];
        // Wishes of side streams by the window that they lie in.
        let mut inside: BTreeMap<(usize, StreamId), Vec<usize>> = BTreeMap::new();
        let window = |tick: u64| waits.partition_point(|&wait| wait <= tick).saturating_sub(1);
        let end_of = |window: usize| waits.get(window + 1).copied().unwrap_or(self.end);
        for (at, wish) in self.wishes.iter().enumerate() {
            let (first, last) = (window(wish.start), window(wish.end.saturating_sub(1)));
            if wish.stream == main {
                places[at].0 = buffers.len();
                buffers.push(wish.buffer(|_| (), false));
            } else if first == last {
                inside.entry((first, wish.stream)).or_default().push(at);
            } else {
                places[at].0 = buffers.len();
                buffers.push(Buffer::new(waits[first], end_of(last), wish.size_bytes));
            }
        }
        for ((window, _), members) in inside {
            let parts = members.iter().map(|&at| self.wishes[at].buffer(|_| (), false));
            let (packing, _) = packed(parts.collect(), None, work_units / 16)?;
            for (&at, &offset) in members.iter().zip(&packing.offsets_bytes) {
                places[at] = (buffers.len(), offset);
            }
            buffers.push(Buffer::new(waits[window], end_of(window), packing.height_bytes()));
        }
        let (packing, _) = packed(buffers, None, work_units)?;
        let offset = |(buffer, offset): (usize, u64)| packing.offsets_bytes[buffer] + offset;
        Some(SolvedDraft {
            offsets: places.into_iter().map(offset).collect(),
            height_bytes: packing.height_bytes(),
            lower_bound_bytes: packing.lower_bound_bytes(),
            waits,
        })
    }

    /// What each stream has live, for the choice of waits.
    fn loads(&self, streams: &[StreamId]) -> Vec<Load> {
        let load = |wish: &Wish| Load {
            start: wish.start,
            end: wish.end,
            size_bytes: wish.size_bytes,
            stream: streams.iter().position(|&it| it == wish.stream).unwrap_or(0),
        };
        self.wishes.iter().map(load).collect()
    }
}

impl Wish {
    /// The place is free between two ticks, if the first comes before the second.
    fn free_between(&mut self, start: u64, end: u64) {
        let gap = Gap { start, end, window_bytes: None };
        self.gaps.extend((start < end).then_some(gap));
    }

    fn buffer(&self, change: impl FnOnce(&mut Extra), changed: bool) -> Buffer {
        let buffer = Buffer::new(self.start, self.end, self.size_bytes);
        if self.gaps.is_empty() && self.fixed.is_none() && !changed {
            return buffer;
        }
        buffer.with(|extra| {
            extra.gaps.clone_from(&self.gaps);
            extra.fixed_offset_bytes = self.fixed;
            change(extra);
        })
    }
}

/// Lives are in order and sizes those of a valid trace: only blocks that are there can contradict
/// each other, and then there is no packing.
///
/// The search ends when a packing needs no more than `enough_bytes`; where that is less than what is
/// live at once, when it is close to that.
fn packed(
    buffers: Vec<Buffer>,
    enough_bytes: Option<u64>,
    work_units: u64,
) -> Option<(Packing, Problem)> {
    let capacities_bytes = Vec::new();
    let mut problem = Problem { buffers, granularity_bytes: ALIGNMENT_BYTES, capacities_bytes };
    if let Some(enough_bytes) = enough_bytes {
        let least_bytes = load_bytes(&problem).ok()?;
        let is_too_little = enough_bytes < least_bytes;
        let close_bytes = least_bytes + least_bytes / CLOSE_ONE_IN;
        problem.capacities_bytes =
            vec![Some(if is_too_little { close_bytes } else { enough_bytes })];
    }
    let work_units = Some(work_units);
    let options = SolveOptions { time: None, work_units, ..SolveOptions::default() };
    let packing = solve(&problem, &options).ok()?.packing;
    Some((packing, problem))
}

/// Offsets by wish.
struct SolvedDraft {
    offsets: Vec<u64>,
    height_bytes: u64,
    lower_bound_bytes: u64,
    /// Ticks at which to wait for the device.
    waits: Vec<u64>,
}

impl SolvedDraft {
    fn place(
        &self,
        buffers: [usize; 2],
        size_bytes: u64,
        stream: StreamId,
        freed_before: u32,
    ) -> Place {
        let [offset, other_offset] =
            buffers.map(|buffer| self.offsets.get(buffer).copied().unwrap_or(NOWHERE));
        Place {
            size_bytes,
            stream,
            room_bytes: rounded(size_bytes),
            offset,
            other_offset,
            freed_before,
            any_size: false,
            group: u32::MAX,
        }
    }

    /// A section of the profile, and whether it is a step. Its requests are the first wishes.
    fn section(&self, course: &Course, section: &Section) -> (bool, Arc<Track>) {
        let place = |request: usize| {
            let Life { size_bytes, stream, end, .. } = course.lives[request];
            let freed_before = freed_before(course, section, end);
            self.place([request, NONE], size_bytes, stream, freed_before)
        };
        let places = section.requests.clone().map(place).collect();
        let lives = &course.lives[section.requests.clone()];
        let starts: Vec<u64> = lives.iter().map(|life| life.start).collect();
        let waits = self.waits_in(&section.ticks, &starts);
        let marks = section.marks.clone();
        (section.is_step, Arc::new(Track { places, marks, waits, groups: 0 }))
    }

    /// Positions before which to wait in a section, whose requests come at these ticks.
    fn waits_in(&self, section: &Range<u64>, starts: &[u64]) -> Vec<u32> {
        let inside = self.waits.iter().filter(|wait| section.contains(wait));
        inside.map(|wait| starts.partition_point(|start| start < wait) as u32).collect()
    }

    /// The track of the step that begins at a tick.
    fn track(&self, step: Step<'_>, steady: &[[usize; 2]], start: u64) -> Track {
        let Step { template, groups, .. } = step;
        let starts: Vec<u64> =
            template.items.iter().map(|item| start + item.span.start()).collect();
        let group_of = step.group_of();
        let place = |(at, item): (usize, &Item)| {
            let freed_before = template.freed_before(item.span);
            let place = self.place(steady[at], step.sizes[at], item.stream, freed_before);
            let group = group_of[at];
            let room_bytes = match groups.get(group as usize) {
                Some(group) => group.room_bytes(),
                None => step.room_bytes(at),
            };
            Place { room_bytes, group, any_size: step.shapes.is_free(at), ..place }
        };
        Track {
            places: template.items.iter().enumerate().map(place).collect(),
            marks: template.marks.clone(),
            waits: self.waits_in(&(start..start + template.ticks), &starts),
            groups: groups.len(),
        }
    }
}

/// The position of a section before which a tick lies; [`u32::MAX`] if it lies behind the section.
fn freed_before(course: &Course, section: &Section, end: Option<u64>) -> u32 {
    let Some(end) = end.filter(|end| *end < section.ticks.end) else { return u32::MAX };
    let lives = &course.lives[section.requests.clone()];
    lives.partition_point(|life| life.start < end) as u32
}

/// Streams, the one that has most bytes live at once last: the others' pools are small and lie below
/// it, so that memory can be added above the large one.
fn streams_by_peak(course: &Course) -> Vec<StreamId> {
    let mut changes: Vec<(u64, StreamId, i64)> = Vec::new();
    for life in &course.lives {
        let bytes = rounded(life.size_bytes) as i64;
        changes.push((life.start, life.stream, bytes));
        changes.extend(life.end.map(|end| (end, life.stream, -bytes)));
    }
    changes.sort_unstable();
    let mut by_stream: Vec<(i64, i64, StreamId)> = Vec::new();
    for (_, stream, bytes) in changes {
        let at = by_stream.iter().position(|(_, _, it)| *it == stream).unwrap_or_else(|| {
            by_stream.push((0, 0, stream));
            by_stream.len() - 1
        });
        let (peak, live, _) = &mut by_stream[at];
        *live += bytes;
        *peak = (*peak).max(*live);
    }
    by_stream.sort_unstable_by_key(|&(peak, _, stream)| (peak, stream));
    by_stream.into_iter().map(|(_, _, stream)| stream).collect()
}

/// Which requests of the last step are freed in the step after, and by which of its ticks: as those
/// of their size and stream that the step before left were in the last, the latest of them counting
/// for all.
fn crossings(course: &Course, last: &Section) -> BTreeMap<usize, u64> {
    let steps = course.sections.iter().filter(|section| section.is_step);
    let Some(before) = steps.rev().nth(1) else { return BTreeMap::new() };
    // By size and stream: how many that step left, and the last tick at which one was freed.
    let mut left: BTreeMap<(u64, StreamId), (usize, u64)> = BTreeMap::new();
    for life in &course.lives[before.requests.clone()] {
        if let Some(end) = life.end.filter(|end| last.ticks.contains(end)) {
            let (count, freed) = left.entry((life.size_bytes, life.stream)).or_default();
            *count += 1;
            *freed = (*freed).max(end - last.ticks.start);
        }
    }
    let mut crossings = BTreeMap::new();
    for (position, request) in last.requests.clone().enumerate() {
        let life = course.lives[request];
        if life.end.is_some_and(|end| end < last.ticks.end) {
            continue;
        }
        if let Some((count, freed)) = left.get_mut(&(life.size_bytes, life.stream))
            && *count > 0
        {
            *count -= 1;
            crossings.insert(position, *freed);
        }
    }
    crossings
}
