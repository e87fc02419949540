//! What a step asked for, so that it can be the template of the steps after it.
//!
//! A program may go on otherwise than its profile: other shapes, another phase of the training. Each
//! step after the profile is recorded as it runs, and if much of it was not what was expected, the
//! next one is planned after it.

use std::collections::BTreeMap;

use super::plan::{Item, Span, Template};
use crate::units::StreamId;

/// A request of the step and its block's life, in ticks of the step.
#[derive(Clone, Copy, Debug)]
struct Asked {
    size_bytes: u64,
    stream: StreamId,
    start: u64,
    end: Option<u64>,
}

/// A step that is being recorded, and what is left of the one before.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorder {
    /// Requests and frees so far.
    ticks: u64,
    asked: Vec<Asked>,
    marks: Vec<(String, u32)>,
    /// Of the blocks that the step before left: how many of each size and stream were freed in this
    /// one, and the last tick of them.
    left: BTreeMap<(u64, StreamId), (usize, u64)>,
    /// Requests of the step before.
    before: Vec<Asked>,
}

impl Recorder {
    /// Another step begins.
    pub(super) fn begin(&mut self) {
        self.before = std::mem::take(&mut self.asked);
        self.ticks = 0;
        self.marks.clear();
        self.left.clear();
    }

    /// A request; gives its number in the step.
    #[inline]
    pub(super) fn ask(&mut self, size_bytes: u64, stream: StreamId) -> u32 {
        let start = self.ticks;
        self.ticks += 1;
        self.asked.push(Asked { size_bytes, stream, start, end: None });
        self.asked.len() as u32 - 1
    }

    /// The memory of a request of this step is free again.
    #[inline]
    pub(super) fn free(&mut self, number: u32) {
        if let Some(asked) = self.asked.get_mut(number as usize) {
            asked.end = Some(self.ticks);
            self.ticks += 1;
        }
    }

    /// That of a request of the step before.
    pub(super) fn free_of_last(&mut self, number: u32) {
        if let Some(asked) = self.before.get(number as usize) {
            let (count, freed) = self.left.entry((asked.size_bytes, asked.stream)).or_default();
            *count += 1;
            *freed = self.ticks;
            self.ticks += 1;
        }
    }

    /// A phase of the step begins, by its name in the step.
    pub(super) fn mark(&mut self, part: &str) {
        self.marks.push((part.to_owned(), self.asked.len() as u32));
    }

    /// How many requests came.
    pub(super) fn requests(&self) -> usize {
        self.asked.len()
    }

    /// The step as a template: without what it left for good, as far as the step before tells.
    pub(super) fn template(&self) -> Template {
        let mut left = self.left.clone();
        let mut template = Template { ticks: self.ticks, ..Template::default() };
        let mut kept = vec![0];
        for &Asked { size_bytes, stream, start, end } in &self.asked {
            let span = match end {
                Some(end) => Some(Span::Inside(start, end)),
                None => left.get_mut(&(size_bytes, stream)).filter(|(count, _)| *count > 0).map(
                    |(count, freed)| {
                        *count -= 1;
                        // Free from its own request on: that is, never in between.
                        if *freed <= start {
                            Span::Crosses(start, start)
                        } else {
                            Span::Overlaps(start)
                        }
                    },
                ),
            };
            template.items.extend(span.map(|span| Item { size_bytes, stream, span }));
            kept.push(template.items.len() as u32);
        }
        let marks = self.marks.iter();
        template.marks = marks.map(|(part, at)| (part.clone(), kept[*at as usize])).collect();
        template
    }
}
