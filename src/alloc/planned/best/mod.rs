//! The mode `best`: a plan of our own, and what happens when the program does something else.
//!
//! The design decision is that a place is a wish, never a promise. All memory is one range
//! ([`memory`]) that knows what is free; a planned request names its place in it, and takes it if it
//! is free. So no mistake of the plan, of the matching or of the program can break the contract:
//! whatever finds its place taken is placed on line, in the same range.
//!
//! ```text
//!   profile ──course──> sections, requests, lives
//!                          │ plan: the profile, then one steady step, closed to a circle
//!                          v
//!   request ──follower──> position ──track──> place ── free? ──> there
//!                          │                    └── taken, or another size ──> on line
//!                          └── nothing like it ───────────────────────────────> on line
//! ```
//!
//! - **Course** ([`course`]) and **plan** ([`plan`]): every block of the profile and of the steps
//!   that follow it is packed off line. All memory of the plan is mapped at the first request, in
//!   one piece.
//! - **Follower** ([`follower`]): requests are matched in order; extra, missing and changed ones cost
//!   a few places, not the rest of the run. Marks set it right at once.
//! - **Shapes** ([`shapes`]): steps of other lengths are planned anew when their first requests tell
//!   their sizes. **Groups** ([`groups`]): blocks of which only the sum is known share a place.
//! - **Learning** ([`recorder`]): a step that was much unlike the plan is the template of those after
//!   it.
//! - **Waits** ([`waits`]): streams share memory between a few planned waits for the device. Half of
//!   the waits of a step are kept for deferred blocks that come back later than in the profile.
//!
//! # On line
//!
//! A request without a place goes down these steps until one gives it memory:
//!
//! 1. the smallest free range that the plan does not need while the block lives (as long as the
//!    request at its position does, or a little while; where there are several streams, to the next
//!    wait after that, since only then others may use the memory);
//! 2. if blocks are deferred, or memory is another stream's, and the step has a wait left: a wait, then
//!    its place or 1 once more;
//! 3. new memory behind the plan;
//! 4. any free range, or new memory behind what there is;
//! 5. a wait for the device, then 4; else out of memory.
//!
//! # Figures
//!
//! `fraglab compare --alloc caching,planned` on the recordings: of the 14 regular jobs on one stream
//! every request takes its planned place, memory is mapped once, and 99 % or more of the waste of
//! caching goes. Of jobs with side streams 93 to 100 % goes, with at most 8 waits a step; of steps of
//! any length and of experts 99 %. Where the profile is a single step whose sizes vary, nothing says
//! how, and the step after it goes on line in large part.

mod course;
mod follower;
mod groups;
mod memory;
mod plan;
mod recorder;
mod shapes;
mod waits;

use std::ops::Range;
use std::sync::Arc;

use super::Profile;
use super::summary::{PlanSummary, StepLevels, StepLog};
use crate::alloc::heap::round_up;
use crate::alloc::spec::{Params, SpecError};
use crate::alloc::{
    Action, ActionKind, Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels, OutOfMemory,
    Request,
};
use crate::trace::step_name;
use crate::units::{BlockId, StreamId};
use course::{Course, part_of_step};
use follower::{Follower, Found};
use memory::{Freed, Memory, Ranges, Tag};
use plan::{
    NOWHERE, Place, Plan, Present, Span, Step, Track, expected_sizes, plan_profile, plan_step,
};
use recorder::Recorder;
use shapes::Shapes;

/// Work that planning a step anew may take, if memory would have to grow.
const REPLAN_WORK_UNITS: u64 = 4_000_000;
/// The plan is made anew after a step of which more than one request in so many was unexpected, and
/// at least so many.
const LEARN_ONE_IN: u64 = 10;
const LEARN_MIN: u64 = 8;
/// Most waits in a step unless it is said.
const SYNCS: usize = 8;
/// Most that may be asked for: each more is tried.
const SYNCS_MAX: usize = 64;
/// How many requests a block is expected to outlive of which nothing is known.
const UNKNOWN_LIFE: u32 = 64;

/// What `fraglab list` says about the parameters.
pub(super) fn help() -> Vec<(&'static str, &'static str)> {
    vec![(
        "syncs",
        "most waits for the device in a step, so that streams can share memory; 8, 0 for none",
    )]
}

/// What is counted beside the rows of the steps.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    alloc_retries: u64,
    ooms: u64,
    device_syncs: u64,
}

/// What a profile gives before anything is asked for.
#[derive(Clone, Debug)]
struct Planned {
    plan: Plan,
    has_marks: bool,
    /// It has several streams.
    has_streams: bool,
}

impl Planned {
    fn of(profile: &Profile, syncs: usize) -> Planned {
        let course = Course::of(profile);
        Planned {
            plan: plan_profile(&course, syncs),
            has_marks: course.has_marks,
            has_streams: course.lives.windows(2).any(|pair| pair[0].stream != pair[1].stream),
        }
    }
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Best {
    memory: Memory,
    plan: Plan,
    source: String,
    has_marks: bool,
    /// The profile has several streams.
    has_streams: bool,
    /// The section under way, among those of the plan; beyond them, what comes later.
    section: usize,
    /// Sections so far.
    sections: u32,
    /// Sizes of the step under way as long as its shape is not known, or nothing.
    probe: Option<Vec<u64>>,
    /// The next of the track's waits.
    next_wait: usize,
    /// The step under way as it was asked for.
    recorder: Recorder,
    /// The first section that went by the plan's template.
    template_since: u32,
    /// Unexpected requests so far.
    mismatches: u64,
    /// Those before the section under way.
    mismatches_before: u64,
    /// What is used of each group of the track, in bytes.
    fills: Vec<u64>,
    /// Waits that this step may make beside the planned ones.
    waits_left: usize,
    /// Most waits in a step.
    syncs: usize,
    /// The step under way, by its name.
    step: Option<String>,
    track: Arc<Track>,
    follower: Follower,
    counts: Counts,
    log: StepLog,
    live: StepLevels,
}

impl Best {
    /// Builds the allocator and plans the profile.
    ///
    /// # Errors
    /// A parameter that it does not know.
    pub(super) fn build(
        mut params: Params,
        inputs: &BuildInputs,
        profile: &Profile,
    ) -> Result<Best, SpecError> {
        let syncs = match params.take("syncs") {
            None => SYNCS,
            Some(text) => text.parse().ok().filter(|&it| it <= SYNCS_MAX).ok_or_else(|| {
                params.value_error(format!("syncs={text}: expected a number up to {SYNCS_MAX}"))
            })?,
        };
        params.finish()?;
        let made = profile.made.get(&format!("best {syncs}"), || Planned::of(profile, syncs));
        let Planned { plan, has_marks, has_streams } = Planned::clone(&made);
        let track = plan.sections.first().map(|(_, track)| Arc::clone(track)).unwrap_or_default();
        Ok(Best {
            memory: Memory::new(inputs),
            plan,
            source: profile.source.clone(),
            has_marks,
            has_streams,
            section: 0,
            sections: 0,
            probe: None,
            next_wait: 0,
            waits_left: 0,
            recorder: Recorder::default(),
            template_since: 0,
            mismatches: 0,
            mismatches_before: 0,
            fills: Vec::new(),
            syncs,
            step: None,
            track,
            follower: Follower::default(),
            counts: Counts::default(),
            log: StepLog::default(),
            live: StepLevels::default(),
        })
    }

    /// The next section begins: a step or not.
    fn enter_section(&mut self, is_step: bool) {
        self.learn();
        self.recorder.begin();
        self.mismatches_before = self.mismatches;
        let later = self.plan.sections.iter().enumerate().skip(self.section + 1);
        let next = later.into_iter().find(|(_, (step, _))| *step || !is_step);
        self.track = match next {
            Some((at, (step, track))) if *step == is_step => {
                self.section = at;
                Arc::clone(track)
            }
            Some(_) => Arc::default(),
            None if is_step => {
                self.section = self.plan.sections.len();
                self.plan.steady.clone().unwrap_or_default()
            }
            None => Arc::default(),
        };
        self.follower.start();
        self.next_wait = 0;
        self.fills.clear();
        self.fills.resize(self.track.groups, 0);
        self.waits_left = self.syncs.saturating_sub(self.track.waits.len());
        self.sections += 1;
        let is_steady = next.is_none() && is_step;
        self.probe = (is_steady && self.plan.shapes.last_feature().is_some()).then(Vec::<u64>::new);
    }

    /// Whether anything is planned for steps after the section under way.
    fn has_later_steps(&self) -> bool {
        let later = self.plan.sections.iter().skip(self.section + 1);
        self.plan.steady.is_some() || later.into_iter().any(|(is_step, _)| *is_step)
    }

    /// The position of a request in a step whose shape is not known yet; nothing if it is not what
    /// such a step asks for.
    #[cold]
    fn probe(&mut self, request: Request) -> Option<Found> {
        let mut sizes = self.probe.take()?;
        let at = sizes.len();
        let shapes = &self.plan.shapes;
        let size = request.size_bytes;
        let item = self.plan.template.items.get(at);
        let fits =
            shapes.is_feature(at) || shapes.is_free(at) || shapes.size(at, &sizes) == Some(size);
        self.follower.go_to(at as u32);
        if !fits || item.is_none_or(|item| item.stream != request.stream) {
            return None;
        }
        sizes.push(size);
        if shapes.last_feature() == Some(at as u32) {
            self.settle(&sizes);
        } else {
            self.probe = Some(sizes);
        }
        self.follower.go_to(at as u32 + 1);
        Some(Found::Exact(at as u32))
    }

    /// The shape of the step is known by its first sizes: all others follow. Plans it anew if a
    /// request would not fit its place.
    fn settle(&mut self, first: &[u64]) {
        let template = Arc::clone(&self.plan.template);
        if !template.has_one_stream() {
            return;
        }
        let size = |at: usize| {
            let known = self.plan.shapes.size(at, first).or(first.get(at).copied());
            known.unwrap_or(self.plan.sizes[at])
        };
        let sizes: Vec<u64> = (0..template.items.len()).map(size).collect();
        let fits = |(place, &size): (&Place, &u64)| size <= place.room_bytes;
        if self.track.places.iter().zip(&sizes).all(fits) {
            let mut track = Track::clone(&self.track);
            for (place, &size) in track.places.iter_mut().zip(&sizes) {
                place.size_bytes = size;
            }
            self.track = Arc::new(track);
            return;
        }
        let shapes = &self.plan.shapes;
        let step = Step { template: &template, shapes, sizes: &sizes, groups: &[] };
        if let Some(planned) = self.plan_anew(step, &self.present()) {
            self.take_over(planned);
            self.track = self.plan.steady.clone().unwrap_or_default();
        }
    }

    /// A plan for a step around what is there, and its height: the first that does without new
    /// memory, else the best.
    fn plan_anew(&self, step: Step<'_>, present: &Present) -> Option<(Track, u64)> {
        plan_step(step, present, self.memory.levels().reserved_bytes, REPLAN_WORK_UNITS)
    }

    /// From now on steps go by this track.
    fn take_over(&mut self, (track, height_bytes): (Track, u64)) {
        self.log.now().replans += 1;
        self.plan.height_bytes = self.plan.height_bytes.max(height_bytes);
        self.plan.steady = Some(Arc::new(track));
    }

    /// A step after the profile has ended: if much of it was not what was expected, the next is
    /// planned after it. Only programs of one stream are: where streams share memory, a plan hangs
    /// on waits that are chosen for the whole course.
    fn learn(&mut self) {
        let unexpected = self.mismatches - self.mismatches_before;
        let requests = self.recorder.requests();
        let is_much = unexpected >= LEARN_MIN && unexpected * LEARN_ONE_IN > requests as u64;
        if self.section < self.plan.sections.len() || !is_much {
            return;
        }
        let template = self.recorder.template();
        if template.items.is_empty() || !template.has_one_stream() {
            return;
        }
        let known = &self.plan.template;
        let asks_alike = known.items.len() == template.items.len()
            && known.has_one_stream()
            && known.items[0].stream == template.items[0].stream;
        let sizes = |items: &[plan::Item]| items.iter().map(|item| item.size_bytes).collect();
        let earlier = asks_alike.then(|| sizes(&known.items));
        let observed: Vec<Vec<u64>> = earlier.into_iter().chain([sizes(&template.items)]).collect();
        let shapes = Shapes::learn(&observed);
        let groups = groups::groups(&template, &shapes, &observed);
        let sizes = expected_sizes(&observed, &shapes);
        let step = Step { template: &template, shapes: &shapes, sizes: &sizes, groups: &groups };
        let others = self.memory.in_use().map(|(_, offset, size_bytes)| (offset, size_bytes));
        let present = Present { others: others.collect(), ..Present::default() };
        let Some(planned) = self.plan_anew(step, &present) else { return };
        self.take_over(planned);
        self.plan.template = Arc::new(template);
        self.template_since = self.sections + 1;
        self.plan.shapes = shapes;
        self.plan.sizes = sizes;
    }

    /// What is there, by where it belongs in the step under way.
    fn present(&self) -> Present {
        let mut present = Present::default();
        let items = &self.plan.template.items;
        for (tag, offset, size_bytes) in self.memory.in_use() {
            let span = items.get(tag.position as usize).map(|item| item.span);
            match span {
                Some(_) if tag.section == self.sections => {
                    present.of_this.push((tag.position, offset));
                }
                Some(Span::Crosses(..))
                    if tag.section + 1 == self.sections && tag.section >= self.template_since =>
                {
                    present.of_last.push((tag.position, offset));
                }
                _ => present.others.push((offset, size_bytes)),
            }
        }
        present
    }

    /// Memory for a request: its place, else one found on line.
    #[inline]
    fn place<E: Env>(&mut self, env: &mut E, size_bytes: u64, request: Request) -> Option<u32> {
        if !self.has_marks && self.follower.is_at_end(&self.track) && self.has_later_steps() {
            self.enter_section(true);
        }
        let number = self.recorder.ask(request.size_bytes, request.stream);
        let probed = if self.probe.is_some() { self.probe(request) } else { None };
        let found = match probed {
            Some(found) => found,
            None => self.follower.next(&self.track, request.size_bytes, request.stream),
        };
        let position = match found {
            Found::Exact(at) | Found::Guess(at) | Found::Similar(at) => Some(at),
            Found::Nowhere => None,
        };
        if !matches!(found, Found::Exact(_)) {
            self.log.now().mismatched += 1;
            self.mismatches += 1;
        }
        if let Some(at) = position {
            self.wait_as_planned(env, at);
            let place = self.track.places[at as usize];
            let tag = self.tag(at, number, false);
            if let Some(block) = self.take_planned(env, &place, size_bytes, request, tag) {
                self.log.now().planned += 1;
                return Some(block);
            }
            self.log.now().overlapping += 1;
        }
        self.take_online(env, position, number, size_bytes, request)
    }

    fn tag(&self, position: u32, number: u32, online: bool) -> Tag {
        Tag { section: self.sections, position, number, online }
    }

    /// Waits for the device if the plan has it before a position.
    #[inline]
    fn wait_as_planned<E: Env>(&mut self, env: &mut E, position: u32) {
        if self.track.waits.get(self.next_wait).is_some_and(|&before| before <= position) {
            let waits = &self.track.waits;
            self.next_wait = waits.partition_point(|&before| before <= position);
            self.wait(env);
        }
    }

    /// The place that is planned, if the request fits it and it is free.
    #[inline]
    fn take_planned<E: Env>(
        &mut self,
        env: &mut E,
        place: &Place,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        if size_bytes > place.room_bytes {
            return None;
        }
        if let Some(&used) = self.fills.get(place.group as usize) {
            let end = used + size_bytes;
            let offset = place.offset + used;
            let fits = end <= place.room_bytes;
            let block = fits.then(|| self.take_at(env, offset, size_bytes, request, tag))?;
            if block.is_some() {
                self.fills[place.group as usize] = end;
            }
            return block;
        }
        let offsets = [place.offset, place.other_offset].into_iter();
        let mut offsets = offsets.take_while(|&offset| offset != NOWHERE);
        offsets.find_map(|offset| self.take_at(env, offset, size_bytes, request, tag))
    }

    /// A planned place, if it is free or new memory.
    #[inline]
    fn take_at<E: Env>(
        &mut self,
        env: &mut E,
        offset: u64,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        let reached = self.memory.reach(env, offset + size_bytes, self.plan.height_bytes);
        reached.then(|| self.memory.claim(env, offset, size_bytes, request, tag))?
    }

    /// A place that the plan does not need while the block lives, else new memory, else any.
    #[cold]
    fn take_online<E: Env>(
        &mut self,
        env: &mut E,
        position: Option<u32>,
        number: u32,
        size_bytes: u64,
        request: Request,
    ) -> Option<u32> {
        self.log.now().online += 1;
        let now = position.map_or(self.follower.position(), |at| at + 1);
        let known = position.and_then(|at| self.track.places.get(at as usize)).copied();
        let freed = known.map_or(now.saturating_add(UNKNOWN_LIFE), |place| place.freed_before);
        let tag = self.tag(position.unwrap_or(u32::MAX), number, true);
        let mut block = self.take_spare(env, now..freed, size_bytes, request, tag);
        if block.is_none() && self.may_wait() {
            // Memory would have to grow while some is only not back yet.
            self.waits_left -= 1;
            self.wait(env);
            let planned = Tag { online: false, ..tag };
            block = known
                .and_then(|place| self.take_planned(env, &place, size_bytes, request, planned))
                .or_else(|| self.take_spare(env, now..freed, size_bytes, request, tag));
        }
        block
            .or_else(|| self.take_new(env, self.plan.height_bytes, size_bytes, request, tag))
            .or_else(|| self.take_any(env, size_bytes, request, tag))
    }

    /// The position from which other streams may use memory that a block takes now and frees before
    /// a position: the next planned wait. With one stream there are no others.
    fn shared_again(&self, now: u32, freed_before: u32) -> u32 {
        if !self.has_streams || freed_before == u32::MAX {
            return freed_before;
        }
        let mut waits = self.track.waits.iter().copied();
        let behind = if self.track.waits.is_empty() { u32::MAX } else { self.track.len() };
        waits.find(|&wait| wait > now && wait >= freed_before).unwrap_or(behind)
    }

    /// Whether a wait could bring memory back, deferred or of another stream, and this step may wait
    /// once more.
    fn may_wait(&self) -> bool {
        let levels = self.memory.levels();
        let is_deferred = levels.active_bytes > levels.allocated_bytes;
        self.waits_left > 0 && (is_deferred || self.has_streams)
    }

    /// The smallest range that fits of those that are free and not needed by the plan while the block
    /// lives; for other streams, before it is shared again.
    fn take_spare<E: Env>(
        &mut self,
        env: &mut E,
        life: Range<u32>,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        let shared_again = self.shared_again(life.start, life.end);
        let mut needs = self.needs_in(life.clone(), |_| true);
        if shared_again > life.end {
            needs.extend(self.needs_in(life.end..shared_again, |it| it != request.stream));
        }
        let free = without(self.memory.free_ranges(request.stream), needs);
        let start = tightest(&free, size_bytes)?;
        self.memory.claim(env, start, size_bytes, request, tag)
    }

    /// Memory that the plan needs for the requests of some streams at these positions of the track;
    /// without an end, also for all later steps.
    fn needs_in(&self, positions: Range<u32>, wanted: impl Fn(StreamId) -> bool) -> Ranges {
        let is_endless = positions.end == u32::MAX;
        let mut ranges = needs(&self.track, positions, &wanted);
        if let Some(steady) = self.plan.steady.as_ref().filter(|_| is_endless) {
            ranges.extend(needs(steady, 0..u32::MAX, &wanted));
        }
        ranges
    }

    /// New memory behind what there is and behind `floor`, the free end of that included.
    fn take_new<E: Env>(
        &mut self,
        env: &mut E,
        floor: u64,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        let held_bytes = self.memory.levels().reserved_bytes.max(floor);
        let start = match self.memory.free_ranges(request.stream).last() {
            Some((start, end)) if *end == held_bytes => (*start).max(floor),
            _ => held_bytes,
        };
        let end = start.checked_add(size_bytes)?;
        if !self.memory.reach(env, end, end) {
            return None;
        }
        self.memory.claim(env, start, size_bytes, request, tag)
    }

    /// The smallest free range that fits, whatever the plan says, or new memory at the very end.
    fn take_any<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
        tag: Tag,
    ) -> Option<u32> {
        let free = self.memory.free_ranges(request.stream);
        if let Some(start) = tightest(&free, size_bytes) {
            return self.memory.claim(env, start, size_bytes, request, tag);
        }
        self.take_new(env, 0, size_bytes, request, tag)
    }

    /// What can be had by waiting for the device.
    #[cold]
    fn take_after_wait<E: Env>(
        &mut self,
        env: &mut E,
        size_bytes: u64,
        request: Request,
    ) -> Option<u32> {
        if E::LOG {
            let (block, stream) = (request.block, request.stream);
            env.log(Action::notice(ActionKind::DeviceRefused, block, stream, size_bytes));
        }
        self.counts.alloc_retries += 1;
        self.wait(env);
        let number = self.recorder.requests() as u32 - 1;
        let tag = self.tag(u32::MAX, number, true);
        self.take_any(env, size_bytes, request, tag)
    }

    /// Waits for the device: deferred frees complete and all free memory is shared.
    fn wait<E: Env>(&mut self, env: &mut E) {
        self.counts.device_syncs += 1;
        while let Some(handle) = env.wait_completed() {
            self.complete(env, handle);
        }
        self.memory.share_all();
    }

    #[cold]
    fn refuse<E: Env>(&mut self, env: &mut E, size_bytes: u64, request: Request) -> OutOfMemory {
        self.counts.ooms += 1;
        if E::LOG {
            env.log(Action::notice(ActionKind::Oom, request.block, request.stream, size_bytes));
        }
        OutOfMemory { size_bytes }
    }

    #[inline]
    fn begin_free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let Freed { requested_bytes, size_bytes, tag } = self.memory.begin_free(env, handle.0);
        self.live.live_bytes -= requested_bytes;
        if tag.online {
            self.live.fallback_bytes -= size_bytes;
        }
    }

    /// The memory of a freed block is free again.
    #[inline]
    fn complete<E: Env>(&mut self, env: &mut E, handle: Handle) {
        let tag = self.memory.tag(handle.0);
        if tag.section == self.sections {
            self.recorder.free(tag.number);
        } else if tag.section + 1 == self.sections {
            self.recorder.free_of_last(tag.number);
        }
        self.memory.complete(env, handle.0);
    }
}

/// Memory that a track needs for the requests of some streams at these positions, in order.
fn needs(track: &Track, positions: Range<u32>, wanted: impl Fn(StreamId) -> bool) -> Ranges {
    let end = (positions.end as usize).min(track.places.len());
    let start = (positions.start as usize).min(end);
    let places = track.places[start..end].iter().filter(|place| wanted(place.stream));
    let ranges = places.flat_map(|place| {
        let offsets = [place.offset, place.other_offset].into_iter();
        offsets.filter(|&it| it != NOWHERE).map(|offset| (offset, offset + place.room_bytes))
    });
    ranges.collect()
}

/// Where the smallest of the ranges begins that is large enough, among equal ones the lowest.
fn tightest(ranges: &Ranges, size_bytes: u64) -> Option<u64> {
    let fits = ranges.iter().filter(|(start, end)| end - start >= size_bytes);
    fits.min_by_key(|(start, end)| (end - start, *start)).map(|(start, _)| *start)
}

/// Ranges without what is in others.
fn without(free: Ranges, mut needs: Ranges) -> Ranges {
    needs.sort_unstable();
    let mut left = Vec::new();
    let mut needs = needs.into_iter().peekable();
    for (mut start, end) in free {
        while let Some(&(low, high)) = needs.peek() {
            if low >= end {
                break;
            }
            if low > start {
                left.push((start, low));
            }
            start = start.max(high);
            if high > end {
                break;
            }
            needs.next();
        }
        if start < end {
            left.push((start, end));
        }
    }
    left
}

impl Allocator for Best {
    // All that is compared are offsets in one range.
    const ADDRESSES_MATTER: bool = false;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.complete(env, handle);
        }
        let size_bytes = match round_up(request.size_bytes) {
            Ok(size_bytes) => size_bytes,
            Err(OutOfMemory { size_bytes }) => return Err(self.refuse(env, size_bytes, request)),
        };
        let block = match self.place(env, size_bytes, request) {
            Some(block) => block,
            None => match self.take_after_wait(env, size_bytes, request) {
                Some(block) => block,
                None => return Err(self.refuse(env, size_bytes, request)),
            },
        };
        self.live.live_bytes += request.size_bytes;
        if self.memory.tag(block).online {
            self.live.fallback_bytes += size_bytes;
        }
        self.live.fallback_reserved_bytes =
            self.memory.levels().reserved_bytes.saturating_sub(self.plan.height_bytes);
        self.log.observe(self.live);
        Ok(Handle(block))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.complete(env, handle);
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        if E::LOG {
            env.log(Action::notice(ActionKind::EmptyCache, BlockId::NONE, StreamId::NONE, 0));
        }
        self.wait(env);
        self.memory.shrink(env);
    }

    fn mark<E: Env>(&mut self, _env: &mut E, phase: &str) {
        self.log.mark(phase, self.live);
        let step = step_name(phase);
        if step != self.step.as_deref() {
            self.step = step.map(str::to_owned);
            self.enter_section(step.is_some());
        }
        let part = part_of_step(phase);
        self.recorder.mark(part);
        self.follower.mark(&self.track, part);
    }

    fn plan_summary(&self) -> Option<PlanSummary> {
        Some(PlanSummary {
            planned_bytes: self.plan.height_bytes,
            lower_bound_bytes: self.plan.lower_bound_bytes,
            source: self.source.clone(),
            steps: self.log.rows(),
        })
    }

    #[inline]
    fn levels(&self) -> Levels {
        self.memory.levels()
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let ranges = self.memory.free_ranges(request.stream).into_iter();
        ranges.map(|(start, end)| end - start).max().unwrap_or(0)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.memory.limit_bytes()
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.memory.check()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (counts, log) = (&self.counts, &self.log);
        let (growths, shrinks) = self.memory.growths_and_shrinks();
        vec![
            ("segment_allocs", growths),
            ("segment_frees", shrinks),
            ("alloc_retries", counts.alloc_retries),
            ("ooms", counts.ooms),
            ("device_syncs", counts.device_syncs),
            ("planned", log.total(|row| row.planned)),
            ("online", log.total(|row| row.online)),
            ("mismatches", self.mismatches),
            ("overlaps", log.total(|row| row.overlapping)),
            ("resyncs", self.follower.resyncs),
            ("replans", log.total(|row| row.replans)),
            ("fallback_bytes_peak", log.peak(|row| row.fallback_bytes_peak)),
        ]
    }

    fn params(&self) -> Vec<(String, String)> {
        vec![("syncs".to_owned(), self.syncs.to_string())]
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        self.memory.layout(visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_without_others_are_what_is_left() {
        let free = vec![(0, 100), (200, 300)];
        assert_eq!(without(free.clone(), vec![]), free);
        assert_eq!(
            without(free.clone(), vec![(90, 210), (20, 30)]),
            [(0, 20), (30, 90), (210, 300)]
        );
        assert_eq!(without(free.clone(), vec![(0, 250), (10, 20)]), [(250, 300)]);
        assert_eq!(without(free, vec![(0, 1000)]), []);
    }
}
