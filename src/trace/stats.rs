//! Statistics of a trace: what the program asked for, whatever allocator serves it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Event, Op, RecordedKind, Recording, StartLayout, StartState, Trace};

/// Statistics of a trace. Sums of sizes over a whole trace stop at 2^64 − 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TraceStats {
    /// Number of events.
    pub events: u64,
    /// Number of `alloc` events.
    pub allocs: u64,
    /// Number of `attempt` events. Attempts count in no other figure.
    pub attempts: u64,
    /// Number of `free` events.
    pub frees: u64,
    /// Number of `defer` events.
    pub defers: u64,
    /// Number of `done` events.
    pub dones: u64,
    /// Number of `empty_cache` events.
    pub empty_caches: u64,
    /// Number of `settings` events.
    pub settings_changes: u64,
    /// Number of streams that blocks were asked on.
    pub streams: u64,
    /// Number of `mark` events.
    pub phases: u64,
    /// Number of steps: different numbers N in phases named `stepN` or `stepN.…`.
    pub steps: u64,
    /// Time of the last event in nanoseconds.
    pub duration_ns: u64,
    /// Most bytes that the program had asked for and not freed at one instant, blocks of the layout
    /// at the start included.
    pub requested_bytes_peak: u64,
    /// Index of the event that first reached it; nothing if that was before the first event.
    pub requested_peak_event: Option<u64>,
    /// The phase then.
    pub requested_peak_phase: Option<String>,
    /// Bytes asked for and not freed at the end.
    pub requested_bytes_final: u64,
    /// Most blocks that were live at one instant.
    pub live_blocks_peak: u64,
    /// Blocks that are live at the end.
    pub never_freed_blocks: u64,
    /// Sum of the sizes of all allocs in bytes. Only events count, here and in what follows.
    pub alloc_bytes_total: u64,
    /// How large allocs are.
    pub sizes: SizeStats,
    /// What each stream asked for, in the order of the streams' handles.
    pub by_stream: Vec<StreamStats>,
    /// Share of the run's allocs that the trace shows, 0 to 1; an upper bound where the number of
    /// all is not known.
    pub history_share: f64,
    /// What was there before the first event, if the history begins late.
    pub at_start: Option<StartStats>,
    /// What the recorded allocator did, if the trace tells.
    pub recorded: Option<RecordedStats>,
}

/// How large allocs are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SizeStats {
    /// Number of different sizes.
    pub distinct: u64,
    /// The middle size in bytes; of an even number of allocs the lower of the two.
    pub median_bytes: u64,
    /// The largest size in bytes.
    pub largest_bytes: u64,
    /// Classes with at least one alloc, by size.
    pub classes: Vec<SizeClass>,
}

/// Allocs of `min_bytes` up to, not including, twice that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SizeClass {
    /// A power of two.
    pub min_bytes: u64,
    /// Number of allocs.
    pub allocs: u64,
    /// Their sum in bytes.
    pub bytes: u64,
}

/// What one stream asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StreamStats {
    /// The stream's handle.
    pub handle: u64,
    /// Number of allocs.
    pub allocs: u64,
    /// Their sum in bytes.
    pub bytes: u64,
    /// That sum as a share of all streams', 0 to 1.
    pub share: f64,
}

/// What was there before the first event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StartStats {
    /// Segments and mapped runs.
    pub segments: u64,
    /// Their sizes in bytes.
    pub reserved_bytes: u64,
    /// Blocks in the program's hands.
    pub live_blocks: u64,
    /// What the program asked for them, in bytes.
    pub requested_bytes: u64,
    /// Blocks freed by the program that wait for another stream.
    pub deferred_blocks: u64,
    /// What the program asked for these, in bytes.
    pub deferred_bytes: u64,
    /// Blocks in use whose size is a guess.
    pub guessed_blocks: u64,
}

/// What the recorded allocator did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordedStats {
    /// Times that it obtained device memory: segments, or runs of pages mapped.
    pub segment_allocs: u64,
    /// Times that it gave device memory back.
    pub segment_frees: u64,
    /// Most bytes that its segments had at one instant. Of segments that were there before the
    /// recording began only those count that stand in the layout at the start.
    pub reserved_bytes_peak: u64,
    /// Requests that it refused.
    pub ooms: u64,
    /// Blocks whose address is known.
    pub addresses: u64,
}

/// Computes them. The trace must be [valid](super::validate).
pub fn stats(trace: &Trace) -> TraceStats {
    let mut stats = TraceStats {
        events: trace.events.len() as u64,
        duration_ns: trace.events.last().map_or(0, |event| event.time_ns),
        history_share: trace.header.history.share(),
        at_start: trace.start.as_ref().map(|start| start_stats(trace, start)),
        ..Default::default()
    };
    let at_start = stats.at_start.unwrap_or_default();
    stats.recorded = trace.recording.as_ref().map(|recording| recorded_stats(trace, recording));
    stats.requested_bytes_peak = at_start.requested_bytes;
    stats.live_blocks_peak = at_start.live_blocks;
    let mut watch = Watch {
        requested_bytes: at_start.requested_bytes,
        live_blocks: at_start.live_blocks,
        ..Default::default()
    };
    for (index, event) in trace.events.iter().enumerate() {
        watch.event(trace, &mut stats, index as u64, event);
    }
    stats.requested_bytes_final = watch.requested_bytes;
    stats.never_freed_blocks = watch.live_blocks;
    stats.steps = watch.steps.len() as u64;
    stats.requested_peak_phase = watch.peak_phase.map(|phase| trace.phases[phase].clone());
    stats.alloc_bytes_total = sum(watch.sizes.iter().copied());
    stats.streams = watch.by_stream.len() as u64;
    stats.by_stream = by_stream(&watch, stats.alloc_bytes_total);
    stats.sizes = size_stats(watch.sizes);
    stats
}

fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// What changes from event to event.
#[derive(Default)]
struct Watch {
    requested_bytes: u64,
    live_blocks: u64,
    phase: Option<usize>,
    peak_phase: Option<usize>,
    steps: BTreeSet<u64>,
    sizes: Vec<u64>,
    /// Allocs and bytes by handle.
    by_stream: BTreeMap<u64, (u64, u64)>,
}

impl Watch {
    fn event(&mut self, trace: &Trace, stats: &mut TraceStats, index: u64, event: &Event) {
        match event.op {
            Op::Alloc(block) => {
                stats.allocs += 1;
                let block = &trace.blocks[block.index()];
                self.requested_bytes = self.requested_bytes.saturating_add(block.size_bytes);
                self.live_blocks += 1;
                self.sizes.push(block.size_bytes);
                let handle = trace.streams[block.stream.index()].handle;
                let (allocs, bytes) = self.by_stream.entry(handle).or_default();
                *allocs += 1;
                *bytes = bytes.saturating_add(block.size_bytes);
                stats.live_blocks_peak = stats.live_blocks_peak.max(self.live_blocks);
                if self.requested_bytes > stats.requested_bytes_peak {
                    stats.requested_bytes_peak = self.requested_bytes;
                    stats.requested_peak_event = Some(index);
                    self.peak_phase = self.phase;
                }
            }
            Op::Free(block) | Op::Defer(block) => {
                *if matches!(event.op, Op::Free(_)) {
                    &mut stats.frees
                } else {
                    &mut stats.defers
                } += 1;
                let size_bytes = trace.blocks[block.index()].size_bytes;
                // A trace that is not valid may free what was never there.
                self.requested_bytes = self.requested_bytes.saturating_sub(size_bytes);
                self.live_blocks = self.live_blocks.saturating_sub(1);
            }
            Op::Attempt(_) => stats.attempts += 1,
            Op::Done(_) => stats.dones += 1,
            Op::EmptyCache => stats.empty_caches += 1,
            Op::Settings(_) => stats.settings_changes += 1,
            Op::Mark(phase) => {
                stats.phases += 1;
                self.phase = Some(phase.index());
                self.steps.extend(step_of(&trace.phases[phase.index()]));
            }
            _ => {}
        }
    }
}

/// The step that a phase belongs to, as it is called: what stands before its first dot, if that is
/// `step` and digits.
pub fn step_name(phase: &str) -> Option<&str> {
    let name = phase.split_once('.').map_or(phase, |(name, _)| name);
    let digits = name.strip_prefix("step")?;
    let numbered = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    numbered.then_some(name)
}

/// The N of `stepN` or `stepN.backward`.
fn step_of(phase: &str) -> Option<u64> {
    step_name(phase)?.strip_prefix("step")?.parse().ok()
}

fn by_stream(watch: &Watch, total_bytes: u64) -> Vec<StreamStats> {
    watch
        .by_stream
        .iter()
        .map(|(&handle, &(allocs, bytes))| StreamStats {
            handle,
            allocs,
            bytes,
            share: bytes as f64 / total_bytes as f64,
        })
        .collect()
}

fn size_stats(mut sizes: Vec<u64>) -> SizeStats {
    sizes.sort_unstable();
    let (Some(&largest_bytes), Some(middle)) = (sizes.last(), sizes.len().checked_sub(1)) else {
        return SizeStats::default();
    };
    let classes = sizes.chunk_by(|a, b| a.ilog2() == b.ilog2()).map(|class| SizeClass {
        min_bytes: 1 << class[0].ilog2(),
        allocs: class.len() as u64,
        bytes: sum(class.iter().copied()),
    });
    SizeStats {
        distinct: sizes.chunk_by(u64::eq).count() as u64,
        median_bytes: sizes[middle / 2],
        largest_bytes,
        classes: classes.collect(),
    }
}

fn start_stats(trace: &Trace, start: &StartLayout) -> StartStats {
    let mut stats = StartStats {
        segments: start.segments.len() as u64,
        reserved_bytes: start.reserved_bytes(),
        ..Default::default()
    };
    for block in &start.blocks {
        let (blocks, bytes) = match block.state {
            StartState::Live => (&mut stats.live_blocks, &mut stats.requested_bytes),
            StartState::Deferred => (&mut stats.deferred_blocks, &mut stats.deferred_bytes),
            StartState::Free => continue,
        };
        *blocks += 1;
        *bytes += trace.blocks[block.block.index()].size_bytes;
        stats.guessed_blocks += u64::from(block.guessed);
    }
    stats
}

fn recorded_stats(trace: &Trace, recording: &Recording) -> RecordedStats {
    let mut stats = RecordedStats {
        addresses: recording.block_addresses.iter().filter(|&&address| address != 0).count() as u64,
        reserved_bytes_peak: trace
            .segments_recorded()
            .and_then(|_| trace.recorded_reserved_bytes_peak())
            .unwrap_or(0),
        ..Default::default()
    };
    for action in &recording.actions {
        match action.kind {
            RecordedKind::SegmentAlloc | RecordedKind::SegmentMap => stats.segment_allocs += 1,
            RecordedKind::SegmentFree | RecordedKind::SegmentUnmap => stats.segment_frees += 1,
            RecordedKind::Oom => stats.ooms += 1,
            RecordedKind::FreeCompleted => {}
        }
    }
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_step_and_digits_before_the_first_dot() {
        assert_eq!(step_name("step0.forward"), Some("step0"));
        assert_eq!(step_name("step12"), Some("step12"));
        assert_eq!(step_name("step1.forward.layer3"), Some("step1"));
        let others =
            ["end", "step", "step.forward", "stepA", "steps1", "warmup.step1", "", ".step1"];
        for other in others {
            assert_eq!(step_name(other), None, "{other:?}");
        }
    }
}
