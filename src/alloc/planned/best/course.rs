//! What a profile says of the program's course: its sections, their requests, and how long the
//! blocks live.
//!
//! ```text
//!   sections   beginning │ step 0     │ step 1     │ ...
//!   requests   0 1 2 3   │ 0 1 2 ...  │ 0 1 2 ...  │       a place each, in order
//!   ticks      0 ──────────────── events ─────────>
//! ```
//!
//! A section is a step, or what lies between two. A request is known by its section and its position
//! among the requests of the section.

use std::ops::Range;

use crate::alloc::planned::Profile;
use crate::trace::{Op, Trace, step_name};
use crate::units::StreamId;

/// A stretch of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// It is a step.
    pub(super) is_step: bool,
    /// Ticks: tick 0 is before the first event.
    pub(super) ticks: Range<u64>,
    /// Its requests, among all.
    pub(super) requests: Range<usize>,
    /// Phases that begin in it: their names without the step's, and the position they begin at.
    pub(super) marks: Vec<(String, u32)>,
}

/// A request and its block's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    /// What was asked for, in bytes.
    pub(super) size_bytes: u64,
    /// On which stream.
    pub(super) stream: StreamId,
    /// Tick of the request.
    pub(super) start: u64,
    /// Tick from which the memory is free again; none if the profile ends before.
    pub(super) end: Option<u64>,
}

/// A profile as sections and requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Course {
    /// In order; they cover all ticks.
    pub(super) sections: Vec<Section>,
    /// In order.
    pub(super) lives: Vec<Life>,
    /// Ticks in all.
    pub(super) ticks: u64,
    /// Phases tell where steps begin. Else they follow each other without a sign.
    pub(super) has_marks: bool,
    /// Blocks are freed while another stream uses them.
    pub(super) defers: bool,
}

/// The name of a phase without that of its step.
pub(super) fn part_of_step(phase: &str) -> &str {
    match step_name(phase) {
        Some(name) => phase[name.len()..].trim_start_matches('.'),
        None => phase,
    }
}

impl Course {
    /// Reads a profile.
    pub(super) fn of(profile: &Profile) -> Course {
        let trace = &profile.trace;
        let mut course = Course {
            ticks: trace.events.len() as u64 + 1,
            has_marks: trace.phases.iter().any(|phase| step_name(phase).is_some()),
            defers: trace.events.iter().any(|event| matches!(event.op, Op::Defer(_))),
            ..Course::default()
        };
        for (is_step, events) in sections(profile) {
            // What is there before the first event is asked for at tick 0.
            let start = if course.sections.is_empty() { 0 } else { events.start as u64 + 1 };
            course.sections.push(Section {
                is_step,
                ticks: start..events.end as u64 + 1,
                requests: 0..0,
                marks: Vec::new(),
            });
        }
        course.read(trace);
        course
    }

    fn read(&mut self, trace: &Trace) {
        let mut life_of = vec![usize::MAX; trace.blocks.len()];
        let in_use = trace.start.iter().flat_map(|start| start.blocks_in_use());
        for (_, row) in in_use {
            let Some(block) = trace.blocks.get(row.block.index()) else { continue };
            life_of[row.block.index()] = self.lives.len();
            let (size_bytes, stream) = (block.size_bytes, block.stream);
            self.lives.push(Life { size_bytes, stream, start: 0, end: None });
        }
        let mut sections = std::mem::take(&mut self.sections);
        let mut from = 0;
        let mut events = trace.events.iter().zip(1u64..).peekable();
        for section in &mut sections {
            while let Some((event, tick)) = events.next_if(|(_, tick)| *tick < section.ticks.end) {
                match event.op {
                    Op::Alloc(block) => {
                        life_of[block.index()] = self.lives.len();
                        let block = &trace.blocks[block.index()];
                        let (size_bytes, stream) = (block.size_bytes, block.stream);
                        self.lives.push(Life { size_bytes, stream, start: tick, end: None });
                    }
                    Op::Free(block) | Op::Done(block) => {
                        let life = self.lives.get_mut(life_of[block.index()]);
                        if let Some(life) = life.filter(|life| life.end.is_none()) {
                            life.end = Some(tick);
                        }
                    }
                    Op::Mark(phase) => {
                        let part = part_of_step(&trace.phases[phase.index()]).to_owned();
                        section.marks.push((part, (self.lives.len() - from) as u32));
                    }
                    _ => {}
                }
            }
            section.requests = from..self.lives.len();
            from = self.lives.len();
        }
        self.sections = sections;
    }

    /// Most bytes that are live at once.
    pub(super) fn live_bytes_peak(&self) -> u64 {
        let allocs = self.lives.iter().map(|life| (life.start, life.size_bytes as i64));
        let frees =
            self.lives.iter().filter_map(|life| Some((life.end?, -(life.size_bytes as i64))));
        let mut changes: Vec<(u64, i64)> = allocs.chain(frees).collect();
        changes.sort_unstable();
        let mut live_bytes = 0;
        let levels = changes.into_iter().map(|(_, change)| {
            live_bytes += change;
            live_bytes
        });
        levels.max().map_or(0, |peak| peak.max(0) as u64)
    }

    /// The last step, if there is one.
    pub(super) fn last_step(&self) -> Option<&Section> {
        self.sections.iter().rev().find(|section| section.is_step)
    }
}

/// Sections of a profile, and which of them are steps.
fn sections(profile: &Profile) -> Vec<(bool, Range<usize>)> {
    let mut sections = Vec::new();
    let mut end = 0;
    for step in &profile.steps {
        if step.start > end || sections.is_empty() {
            sections.push((false, end..step.start));
        }
        sections.push((true, step.clone()));
        end = step.end;
    }
    if end < profile.trace.events.len() || sections.is_empty() {
        sections.push((false, end..profile.trace.events.len()));
    }
    sections
}
