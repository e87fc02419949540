//! Does `caching` reproduce what a recording's real allocator did?
//!
//! The procedure of specs/pytorch_caching.md 13.2. The recorded entries drive the allocator: its
//! log is compared with them entry by entry. Only what no allocator can know is taken from the
//! recording: base addresses of segments, when deferred blocks complete, and whether the physical
//! device refused. Refusals by a memory limit are predicted.
//!
//! ```text
//!   recorded   freq A │ fdone B  segment_free S  segment_alloc T  alloc C │ freq ...
//!                     └──────────────── group ───────────────────────────┘
//!   readings of the group, until one reproduces it:
//!     (i)   malloc C          its flush waits for B, releases S, obtains T
//!     (ii)  B ends, malloc C  (garbage collection or targeted release gives S back)
//!     (iii) empty_cache, malloc C
//!     (iv)  some completions come first, the flush waits for the others
//! ```
//!
//! A free right before such a group, completed at once as it seems, may have waited for the flush
//! too.
//!
//! Where several readings reproduce a group, the one that needs the fewest refusals by a device
//! that had room is taken. Entering, leaving and deleting private pools and new settings leave no
//! entries: the trace's events say where they stand.
//!
//! A history that begins late starts from the layout that the importer found. Two things of the
//! recorded process are then not known: the ages of free blocks, and now and then the size of a
//! block; a difference names them where they may be its cause.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::recorded_device::Refuser;
use crate::alloc::caching::{Caching, TorchVersion};
use crate::alloc::spec::{AllocSpec, Params, SpecError};
use crate::alloc::{Action, ActionKind, Allocator, BuildInputs, Env, Handle, LayoutBlock, Request};
use crate::trace::{
    EntryKind, Event, Op, RecordedEntry, StartLayout, Trace, Truth, recorded_entries,
};

/// The first place where the simulated allocator did something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Index of the event.
    pub event_index: u64,
    /// What the recording shows.
    pub expected: String,
    /// What the simulation did.
    pub got: String,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyResult {
    /// Name of the trace or file.
    pub file: String,
    /// Everything compared was the same.
    pub exact: bool,
    /// Events in the trace.
    pub events: u64,
    /// Segment events compared.
    pub segment_events: u64,
    /// Blocks whose segment and offset were compared.
    pub blocks: u64,
    /// Refusals (out of memory) compared.
    pub refusals: u64,
    /// Statistics of the truth file compared.
    pub statistics: u64,
    /// Groups of entries that more than one reading reproduces.
    pub ambiguous_groups: u64,
    /// Version of the allocator that recorded, where known.
    pub version: Option<String>,
    /// Release of PyTorch whose rules were applied.
    pub rules: String,
    /// Share of the run's allocs that the history holds, 0 to 1.
    pub history_share: f64,
    /// That share is only an upper bound.
    #[serde(skip)]
    pub share_is_bound: bool,
    /// The first difference.
    pub first_difference: Option<Difference>,
    /// What may be the cause of the difference other than a fault of the model.
    pub possible_causes: Vec<String>,
    /// What was compared.
    pub compared: Vec<String>,
    /// What was not, and why.
    pub not_compared: Vec<String>,
    /// What no allocator can know and was therefore taken from the recording.
    pub taken_from_recording: Vec<String>,
    /// The blocks of the simulated allocator after the last entry compared, in address order.
    #[serde(skip)]
    pub layout: Vec<LayoutBlock>,
}

/// A recording cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is nothing to compare with.
    #[error(
        "the trace has no record of what its allocator did, so there is nothing to compare; \
         verify needs a snapshot recorded by PyTorch, a trace converted from one, or one that the \
         library for PyTorch recorded under caching or expandable"
    )]
    NoRecording,
    /// The history begins in the middle, and the layout at its start cannot be found.
    #[error(
        "the history begins late ({frees_without_alloc} blocks were freed whose alloc is not in it), \
         and the snapshot does not tell what was there: it needs the blocks of its segments, as \
         torch.cuda.memory._dump_snapshot writes them, or a history from the first allocation"
    )]
    LateHistory {
        /// Frees of blocks whose alloc is missing.
        frees_without_alloc: u64,
    },
    /// The layout at the start is not one of this allocator.
    #[error(
        "the layout when the history begins is none that this allocator can have: pages that are not \
         whole under the recorded settings, too many, or overlapping; expected the settings that the \
         run was recorded with"
    )]
    StartLayout,
    /// Its settings are not understood or not supported.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Compares `caching` with the recording.
///
/// # Errors
/// If there is no recording, it begins late without a layout to start from, or its settings cannot
/// be modelled.
pub fn verify(trace: &Trace) -> Result<VerifyResult, VerifyError> {
    let Some(recording) = trace.segments_recorded() else { return Err(VerifyError::NoRecording) };
    let frees_without_alloc = trace.header.history.frees_without_alloc;
    if frees_without_alloc > 0 && trace.start.is_none() {
        return Err(VerifyError::LateHistory { frees_without_alloc });
    }
    let entries: Vec<RecordedEntry> = recorded_entries(trace).collect();
    let mut driver = Driver::new(trace, &entries)?;
    driver.run();
    Ok(driver.result(trace, recording.truth.as_ref()))
}

/// The allocator and everything around it; cloned to try a reading.
#[derive(Clone)]
struct State<'a> {
    caching: Caching,
    env: Script<'a>,
}

/// Takes the entries one by one.
struct Driver<'a> {
    trace: &'a Trace,
    entries: &'a [RecordedEntry],
    /// Indices of the events that may leave no entries of their own: pools, settings, and
    /// `empty_cache` where every call is noted.
    silent: VecDeque<u32>,
    state: State<'a>,
    /// The state before a free that completed at once, where a flush may follow: the flush may have
    /// waited for it.
    before_free: Option<State<'a>>,
    rules: TorchVersion,
    ambiguous_groups: u64,
    /// Private pools that end.
    pools_deleted: u64,
}

/// How a group came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// The malloc's own flush waited for the completions.
    InsideFlush,
    /// The completions came first.
    CompletionsFirst,
    /// The program called `empty_cache` first.
    EmptyCacheFirst,
    /// So many completions came first, the flush waited for the others.
    SomeFirst(usize),
}

impl Reading {
    /// In the order in which they are tried.
    const ALL: [Reading; 3] =
        [Reading::InsideFlush, Reading::CompletionsFirst, Reading::EmptyCacheFirst];
    /// How many ways of taking only some completions first are tried.
    const SOME_MAX: usize = 64;
}

/// What came of the readings of a group.
#[derive(Default)]
struct Tried<'a> {
    /// Reproduces the group with the fewest unexplained refusals.
    best: Option<State<'a>>,
    /// Got furthest of those that do not.
    furthest: Option<State<'a>>,
    reproducing: u64,
}

impl<'a> Tried<'a> {
    /// Tries readings of the group that ends at `end`, and where none reproduces it those in which
    /// only some completions came first. These are rarely needed, and can be many.
    fn all(&mut self, from: &State<'a>, readings: &[Reading], end: usize, request: Request) {
        for &reading in readings {
            self.one(from, reading, end, request);
        }
        let is_completion = |entry: &&RecordedEntry| entry.kind == EntryKind::FreeCompleted;
        let group = &from.env.entries[from.env.position..end];
        let leading = group.iter().take_while(is_completion).count();
        for count in 1..leading.min(Reading::SOME_MAX) {
            if self.best.is_none() {
                self.one(from, Reading::SomeFirst(count), end, request);
            }
        }
    }

    fn one(&mut self, from: &State<'a>, reading: Reading, end: usize, request: Request) {
        let mut state = from.clone();
        state.malloc(reading, end, request);
        let env = &state.env;
        if env.mismatch.is_none() && env.position == end + 1 {
            let refusals = env.device.unexplained;
            self.reproducing += 1;
            if self.best.as_ref().is_none_or(|best| refusals < best.env.device.unexplained) {
                self.best = Some(state);
            }
        } else if self.furthest.as_ref().is_none_or(|far| env.position > far.env.position) {
            self.furthest = Some(state);
        }
    }
}

impl<'a> Driver<'a> {
    fn new(trace: &'a Trace, entries: &'a [RecordedEntry]) -> Result<Self, VerifyError> {
        // A limit that the settings give as a share stands in the header where it can be known.
        let total_bytes = trace.header.device.total_bytes;
        let inputs = BuildInputs {
            settings: trace.header.settings.clone(),
            recorded_settings: trace.header.settings.clone(),
            limit_bytes: None,
            recorded_limit_bytes: trace.header.limit_bytes,
            // What reservations are made for.
            device_total_bytes: total_bytes
                .or_else(|| trace.recording.as_ref()?.device_total_from_reservations()),
            costs: None,
            stream_handles: trace.streams.iter().map(|stream| stream.handle).collect(),
            pools: trace.pools.clone(),
            settings_changes: trace.settings_changes.clone(),
            profile: None,
            plan_files: None,
        };
        let version = trace.header.source.version.as_deref();
        let rules: TorchVersion =
            version.and_then(|version| version.parse().ok()).unwrap_or_default();
        let params = vec![("torch".to_owned(), rules.to_string())];
        let spec = AllocSpec { name: "caching".to_owned(), params };
        let caching = Caching::build(Params::new(&spec), &inputs)?;
        let env = Script {
            entries,
            position: 0,
            event: 0,
            ended: VecDeque::new(),
            handles: vec![Handle::NONE; trace.blocks.len()],
            device: Refuser::new(entries, total_bytes),
            mismatch: None,
        };
        let truth = trace.recording.as_ref().and_then(|recording| recording.truth.as_ref());
        let calls_noted = truth.is_some_and(|truth| truth.calls_noted);
        let is_silent = |op: Op| match op {
            Op::PoolEnter(_) | Op::PoolLeave(_) | Op::PoolDelete(_) | Op::Settings(_) => true,
            Op::EmptyCache => calls_noted,
            _ => false,
        };
        let events = (0u32..).zip(&trace.events);
        let silent = events.filter(|(_, event)| is_silent(event.op)).map(|(at, _)| at).collect();
        let mut state = State { caching, env };
        if let Some(start) = &trace.start {
            state.start_from(start, trace)?;
        }
        let is_end = |event: &&Event| matches!(event.op, Op::PoolDelete(_));
        let pools_deleted = trace.events.iter().filter(is_end).count() as u64;
        Ok(Driver {
            trace,
            entries,
            silent,
            state,
            before_free: None,
            rules,
            ambiguous_groups: 0,
            pools_deleted,
        })
    }

    /// Drives the allocator until the entries end or something differs.
    fn run(&mut self) {
        while self.state.env.position < self.entries.len() && self.state.env.mismatch.is_none() {
            let at = self.state.env.position;
            let RecordedEntry { kind, event, .. } = self.entries[at];
            if let Some(&silent) = self.silent.front().filter(|&&silent| silent <= event) {
                // Only a deleted pool and an empty_cache have entries, of what they give back.
                self.silent.pop_front();
                self.silent_event(silent);
                if silent < event || self.state.env.position > at {
                    continue;
                }
            } else if kind == EntryKind::FreeRequested {
                self.free(at);
            } else {
                self.group(at);
            }
            // An action of the allocator that advances nothing would loop forever.
            if self.state.env.position == at && self.state.env.mismatch.is_none() {
                self.state.env.expected_but(at, "nothing");
            }
        }
        if self.state.env.mismatch.is_none() {
            while let Some(silent) = self.silent.pop_front() {
                self.silent_event(silent);
            }
        }
    }

    /// Pools and settings, where the trace says they change.
    fn silent_event(&mut self, event: u32) {
        let State { caching, env } = &mut self.state;
        env.event = u64::from(event);
        match self.trace.events[event as usize].op {
            Op::PoolEnter(pool) => caching.pool_enter(env, pool),
            Op::PoolLeave(pool) => caching.pool_leave(env, pool),
            Op::PoolDelete(pool) => caching.pool_delete(env, pool),
            Op::Settings(settings) => caching.change_settings(env, settings),
            Op::EmptyCache => caching.empty_cache(env),
            _ => {}
        }
    }

    fn free(&mut self, at: usize) {
        let entry = self.entries[at];
        let at_once = self
            .entries
            .get(at + 1)
            .is_some_and(|next| next.kind == EntryKind::FreeCompleted && next.block == entry.block);
        if at_once {
            let length = self.entries[at + 2..].iter().position(is_closing);
            let flushes = length.is_some_and(|length| {
                let (group, rest) = self.entries[at + 2..].split_at(length);
                rest[0].kind == EntryKind::Oom || releases(group) && obtains(group)
            });
            self.before_free = flushes.then(|| self.state.clone());
        }
        self.state.free(entry, at_once);
    }

    /// Everything up to the next alloc, refusal or free.
    fn group(&mut self, start: usize) {
        let length = self.entries[start..].iter().position(is_closing);
        let mut end = length.map_or(self.entries.len(), |length| start + length);
        // What lies before a change of pool or settings is a group without an end.
        let mut cut = false;
        if let Some(&silent) = self.silent.front() {
            let until = self.entries.len().min(end + 1);
            let behind = |entry: &RecordedEntry| entry.event >= silent;
            if let Some(length) = self.entries[start..until].iter().position(behind) {
                end = start + length;
                cut = true;
            }
        }
        let group = &self.entries[start..end];
        let (releases, obtains) = (releases(group), obtains(group));
        let closing =
            self.entries.get(end).filter(|entry| !cut && entry.kind != EntryKind::FreeRequested);
        self.state.env.event = group.first().or(closing).map_or(0, |entry| u64::from(entry.event));
        match closing {
            None if releases => self.state.empty_cache(),
            None => self.state.complete_until(end),
            Some(closing) => {
                let flushes = closing.kind == EntryKind::Oom || (releases && obtains);
                let readings: &[Reading] = match (flushes, releases) {
                    (true, _) => &Reading::ALL,
                    (false, true) => &[Reading::EmptyCacheFirst],
                    (false, false) => &[Reading::CompletionsFirst],
                };
                self.malloc(end, *closing, readings);
            }
        }
    }

    /// The malloc that closes a group, in the reading that fits best.
    fn malloc(&mut self, end: usize, closing: RecordedEntry, readings: &[Reading]) {
        let Some(request) = self.request(&closing) else {
            self.state.env.expected_but(end, "no request that could cause it");
            return;
        };
        if let [only] = readings {
            self.state.malloc(*only, end, request);
            return;
        }
        let start = self.state.env.position;
        let mut tried = Tried::default();
        tried.all(&self.state, readings, end, request);
        if tried.best.is_none()
            && let Some(mut state) = self.before_free.take().filter(|s| s.env.position + 2 == start)
        {
            state.free(self.entries[start - 2], false);
            tried.all(&state, &[Reading::InsideFlush], end, request);
        }
        if tried.reproducing > 1 {
            self.ambiguous_groups += 1;
        }
        match tried.best.or(tried.furthest) {
            Some(state) => self.state = state,
            None => self.state.env.expected_but(end, "nothing"),
        }
    }

    /// What the program asked for at a closing entry; a refusal names no block, but its event does.
    fn request(&self, closing: &RecordedEntry) -> Option<Request> {
        let block = match self.trace.events.get(closing.event as usize)?.op {
            Op::Alloc(block) | Op::Attempt(block) => block,
            _ => return None,
        };
        let size_bytes = self.trace.blocks.get(block.index())?.size_bytes;
        Some(Request { block, size_bytes, stream: closing.stream })
    }

    fn result(&self, trace: &Trace, truth: Option<&Truth>) -> VerifyResult {
        let compared_entries = &self.entries[..self.state.env.position];
        let count = |kinds: &[EntryKind]| {
            compared_entries.iter().filter(|entry| kinds.contains(&entry.kind)).count() as u64
        };
        let mut result = VerifyResult {
            file: trace.header.name.clone(),
            exact: false,
            events: trace.events.len() as u64,
            segment_events: count(&[
                EntryKind::SegmentAlloc,
                EntryKind::SegmentFree,
                EntryKind::SegmentMap,
                EntryKind::SegmentUnmap,
            ]),
            blocks: count(&[EntryKind::Alloc]),
            refusals: count(&[EntryKind::Oom]),
            statistics: 0,
            ambiguous_groups: self.ambiguous_groups,
            version: trace.header.source.version.clone(),
            rules: self.rules.to_string(),
            history_share: trace.header.history.share(),
            share_is_bound: trace.header.history.share_is_bound(),
            first_difference: self.state.env.mismatch.clone(),
            possible_causes: Vec::new(),
            compared: vec![
                "order and size of every segment event".to_owned(),
                "segment and offset of every block".to_owned(),
                "completion of every free".to_owned(),
                "size of every refused request".to_owned(),
            ],
            not_compared: Vec::new(),
            taken_from_recording: vec![
                "base addresses of segments".to_owned(),
                "completion times of deferred frees".to_owned(),
                "refusals by the physical device".to_owned(),
            ],
            layout: Vec::new(),
        };
        self.state.caching.layout(&mut |block| result.layout.push(block));
        match truth.filter(|truth| !truth.stats.is_empty()) {
            Some(truth) if result.first_difference.is_none() => {
                self.compare_statistics(truth, &mut result);
            }
            Some(_) => {}
            None => result.not_compared.push("statistics: no truth file tells them".to_owned()),
        }
        result.exact = result.first_difference.is_none();
        if !result.exact {
            result.possible_causes = self.possible_causes();
        }
        result
    }

    /// What the recording does not tell and may therefore have led astray.
    fn possible_causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        if let Some(failure) = self.state.caching.failure() {
            causes.push(failure);
        }
        let maps = || self.entries.iter().any(|entry| entry.kind == EntryKind::SegmentMap);
        if self.trace.header.device.total_bytes.is_none() && maps() {
            causes.push(
                "the device's total memory, which is not known and was taken from the distance of \
                 its reservations; a truth file tells it, as in {\"total_memory\": BYTES}"
                    .to_owned(),
            );
        }
        if let Some(start) = &self.trace.start {
            if self.state.caching.collects_garbage() {
                causes.push(
                    "garbage collection goes by the ages of free blocks, which are not known for \
                     a history that begins late"
                        .to_owned(),
                );
            }
            let guessed = start.blocks.iter().filter(|block| block.guessed).count();
            if guessed > 0 {
                causes.push(format!(
                    "stale sizes: {guessed} blocks that were there when the history begins were \
                     freed later and may have been larger than their request"
                ));
            }
        }
        if !self.trace.pools.is_empty() {
            causes.push(
                "private pools: entries name none, so the pools of memory that is gone by the end \
                 and of refused requests are told by what the default pools would have done"
                    .to_owned(),
            );
        }
        let differences = self.rules.differences().iter();
        let not_modelled = differences.filter(|line| line.starts_with("not "));
        causes.extend(not_modelled.map(|line| format!("torch {}, {line}", self.rules)));
        causes
    }

    /// Every statistic of the truth file (spec 8).
    fn compare_statistics(&self, truth: &Truth, result: &mut VerifyResult) {
        let ours: BTreeMap<String, i64> =
            self.state.caching.torch_stats().unwrap_or_default().into_iter().collect();
        let mut peaks_left_out = 0;
        let mut unseen = 0;
        for (name, &expected) in &truth.stats {
            if self.trace.start.is_some() && !name.ends_with(".current") {
                unseen += 1;
                continue;
            }
            if truth.peak_stats_reset && name.ends_with(".peak") {
                peaks_left_out += 1;
                continue;
            }
            let Some(&got) = ours.get(name) else {
                result.not_compared.push(format!("{name}: not a statistic of torch 2.11"));
                continue;
            };
            if got == expected {
                result.statistics += 1;
            } else if let Some(reason) = self.excuse(name, expected, got) {
                result
                    .not_compared
                    .push(format!("{name} (recorded {expected}, here {got}): {reason}"));
            } else {
                result.first_difference.get_or_insert(Difference {
                    event_index: result.events.saturating_sub(1),
                    expected: format!("{name} = {expected} at the end"),
                    got: got.to_string(),
                });
            }
        }
        if unseen > 0 {
            result
                .not_compared
                .push(format!("{unseen} sums and peaks that count from the beginning of the run"));
        }
        if peaks_left_out > 0 {
            result.not_compared.push(format!(
                "{peaks_left_out} peak statistics: the job reset them at a moment that is not recorded"
            ));
        }
        result.compared.push("every statistic of the truth file".to_owned());
    }

    /// Why a statistic may differ although every event is the same (spec 13.2, last point).
    fn excuse(&self, name: &str, expected: i64, got: i64) -> Option<&'static str> {
        match name {
            "num_sync_all_streams" if expected > got => {
                Some("an empty_cache that releases nothing leaves no entry")
            }
            "num_sync_all_streams" if got.abs_diff(expected) <= self.pools_deleted => {
                Some("the end of a pool and an empty_cache may look alike here")
            }
            "num_alloc_retries" | "num_sync_all_streams"
                if expected.abs_diff(got) <= self.ambiguous_groups =>
            {
                Some("\"empty_cache, then malloc\" and \"malloc that flushed\" look alike here")
            }
            _ => None,
        }
    }
}

impl State<'_> {
    /// Lets the allocator begin with what was there.
    fn start_from(&mut self, start: &StartLayout, trace: &Trace) -> Result<(), VerifyError> {
        let handles = self.caching.adopt(start, &trace.blocks).ok_or(VerifyError::StartLayout)?;
        for ((_, block), handle) in start.blocks_in_use().zip(handles) {
            self.env.handles[block.block.index()] = handle;
        }
        let device = &mut self.env.device;
        for row in &start.segments {
            device.held_bytes = device.held_bytes.saturating_add(row.size_bytes);
            if row.reservation.is_none() {
                device.sizes.insert(row.address, row.size_bytes);
            }
        }
        self.caching.layout(&mut |block| {
            if block.page_bytes > 0 {
                device.reservations.insert(block.segment_address, block.segment_bytes);
            }
        });
        Ok(())
    }

    fn free(&mut self, entry: RecordedEntry, at_once: bool) {
        let State { caching, env } = self;
        env.event = u64::from(entry.event);
        let handle = env.handles[entry.block.index()];
        if at_once {
            env.handles[entry.block.index()] = Handle::NONE;
            caching.free(env, handle);
        } else {
            caching.defer(env, handle);
        }
    }

    fn empty_cache(&mut self) {
        self.caching.empty_cache(&mut self.env);
    }

    /// Completions that belong to no malloc: something waited for the device.
    fn complete_until(&mut self, end: usize) {
        while self.env.position < end && self.env.mismatch.is_none() {
            let at = self.env.position;
            let handle = self.env.take_completion(at);
            match handle {
                Some(handle) => self.caching.complete_deferred(&mut self.env, handle),
                None => self.env.expected_but(at, "nothing that could cause it"),
            }
        }
    }

    fn malloc(&mut self, reading: Reading, end: usize, request: Request) {
        if reading == Reading::EmptyCacheFirst {
            self.empty_cache();
        }
        let first = match reading {
            Reading::InsideFlush => 0,
            Reading::SomeFirst(count) => count,
            Reading::CompletionsFirst | Reading::EmptyCacheFirst => end,
        };
        for at in (self.env.position..end).take(first) {
            if let Some(handle) = self.env.take_completion(at) {
                self.env.ended.push_back(handle);
            }
        }
        self.env.event = u64::from(self.env.entries[end].event);
        self.env.device.asks(request);
        if let Ok(handle) = self.caching.malloc(&mut self.env, request) {
            self.env.handles[request.block.index()] = handle;
        }
    }
}

/// The recorded entries as the world around the allocator.
#[derive(Clone)]
struct Script<'a> {
    entries: &'a [RecordedEntry],
    /// How many entries the allocator has reproduced.
    position: usize,
    event: u64,
    /// Completions that the next malloc finds.
    ended: VecDeque<Handle>,
    /// Handles of live and waiting blocks.
    handles: Vec<Handle>,
    device: Refuser<'a>,
    mismatch: Option<Difference>,
}

impl Script<'_> {
    /// The handle of the block that completes at this entry, if it is a completion.
    fn take_completion(&mut self, at: usize) -> Option<Handle> {
        let entry = self.entries.get(at)?;
        if entry.kind != EntryKind::FreeCompleted {
            return None;
        }
        let handle = std::mem::replace(&mut self.handles[entry.block.index()], Handle::NONE);
        (handle != Handle::NONE).then_some(handle)
    }

    fn expected_but(&mut self, at: usize, got: &str) {
        let expected =
            self.entries.get(at).map_or_else(|| "the end of the recording".to_owned(), describe);
        let event_index = self.entries.get(at).map_or(self.event, |entry| u64::from(entry.event));
        let difference = Difference { event_index, expected, got: got.to_owned() };
        self.mismatch.get_or_insert(difference);
    }
}

impl<'a> Env for Script<'a> {
    type Device = Refuser<'a>;
    const LOG: bool = true;

    fn device(&mut self) -> &mut Refuser<'a> {
        self.device.position = self.position;
        &mut self.device
    }

    fn next_completed(&mut self) -> Option<Handle> {
        self.ended.pop_front()
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.take_completion(self.position)
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let entry = self.entries.get(self.position)?;
        let handle = *self.handles.get(entry.block.index())?;
        if handle == Handle::NONE || !wanted(handle) {
            return None;
        }
        self.take_completion(self.position)
    }

    fn log(&mut self, action: Action) {
        // A recording shows neither calls of empty_cache nor refusals by the device.
        let silent = matches!(action.kind, ActionKind::EmptyCache | ActionKind::DeviceRefused);
        if silent || self.mismatch.is_some() {
            return;
        }
        let matches = self.entries.get(self.position).is_some_and(|entry| {
            action_kind(entry.kind) == action.kind
                && entry.size_bytes == action.size_bytes
                && entry.stream == action.stream
                && (entry.kind == EntryKind::Oom || entry.address == action.address)
        });
        if matches {
            self.position += 1;
            self.device.note(action);
        } else {
            let got = format!(
                "{} of {} bytes at {:#x} (segment {}, offset {})",
                action.kind.name(),
                action.size_bytes,
                action.address,
                action.segment,
                action.offset_bytes,
            );
            self.expected_but(self.position, &got);
        }
    }
}

/// Whether an entry ends a group.
fn is_closing(entry: &RecordedEntry) -> bool {
    matches!(entry.kind, EntryKind::Alloc | EntryKind::Oom | EntryKind::FreeRequested)
}

/// Whether a group gives memory back.
fn releases(group: &[RecordedEntry]) -> bool {
    let kinds = [EntryKind::SegmentFree, EntryKind::SegmentUnmap];
    group.iter().any(|entry| kinds.contains(&entry.kind))
}

/// Whether a group obtains memory.
fn obtains(group: &[RecordedEntry]) -> bool {
    let kinds = [EntryKind::SegmentAlloc, EntryKind::SegmentMap];
    group.iter().any(|entry| kinds.contains(&entry.kind))
}

fn describe(entry: &RecordedEntry) -> String {
    let place = match entry.kind {
        EntryKind::Oom => String::new(),
        _ => format!(" at {:#x}", entry.address),
    };
    format!("{} of {} bytes{place}", action_kind(entry.kind).name(), entry.size_bytes)
}

/// The action that a recorded entry shows.
pub(super) fn action_kind(kind: EntryKind) -> ActionKind {
    match kind {
        EntryKind::Alloc => ActionKind::Alloc,
        EntryKind::FreeRequested => ActionKind::FreeRequested,
        EntryKind::FreeCompleted => ActionKind::FreeCompleted,
        EntryKind::SegmentAlloc => ActionKind::SegmentAlloc,
        EntryKind::SegmentFree => ActionKind::SegmentFree,
        EntryKind::SegmentMap => ActionKind::SegmentMap,
        EntryKind::SegmentUnmap => ActionKind::SegmentUnmap,
        EntryKind::Oom => ActionKind::Oom,
    }
}
