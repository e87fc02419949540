//! What `caching` does with a recorded program, without anything of what the recorded allocator
//! did.
//!
//! [`verify`](super::verify()) takes base addresses and refusals from the recording; this takes
//! nothing but the program's own acts: its requests, streams and frees, in which order uses ended,
//! its calls of `empty_cache`, its settings, limit and device. The trace is replayed on the
//! simulated device with the model of the driver's addresses, exactly as [`run`](super::run) does,
//! and what comes out is compared with the recording:
//!
//! ```text
//!   program ──events──> run, addresses of the model ──> log ─────┐
//!      └──── recording: segment events, addresses ───────────────┴─> same segment events?
//!                                                                    same segment and offset?
//!                                                                    same peaks, same refusals?
//! ```
//!
//! Segments are compared by their ordinal in order of creation, each life of a segment counting
//! anew: base addresses differ from process to process. A reservation of an expandable segment
//! counts once, when its first page is mapped; what is mapped within its range belongs to it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::prepared::Prepared;
use super::replay::{RunError, RunOptions, watch};
use super::verify::action_kind;
use crate::alloc::spec::AllocSpec;
use crate::alloc::{Action, ActionKind};
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::metrics::Sink;
use crate::trace::{Trace, recorded_entries, reservation_span_bytes};
use crate::units::{BlockId, StreamId};

/// The first segment event that was predicted wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Misprediction {
    /// Index of the event: of the recorded one, or of the predicted one where the recording shows
    /// no more.
    pub event_index: u64,
    /// Which of the recording's segment events it is, from 0.
    pub segment_event: u64,
    /// Phase of the program at that event, where one has begun.
    pub phase: Option<String>,
    /// What the recording shows.
    pub expected: String,
    /// What was predicted.
    pub got: String,
}

/// Peaks in bytes; nothing where a side does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PredictedPeaks {
    /// Sum of live requests.
    pub requested_bytes_peak: Option<u64>,
    /// Live blocks at their rounded size.
    pub allocated_bytes_peak: Option<u64>,
    /// Allocated and deferred.
    pub active_bytes_peak: Option<u64>,
    /// Physical memory held.
    pub reserved_bytes_peak: Option<u64>,
}

/// A prediction beside what happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictResult {
    /// Name of the trace or file.
    pub file: String,
    /// All segment events have the same kind, size and stream, in the same order and at the same
    /// events of the program.
    pub identical: bool,
    /// Events in the trace.
    pub events: u64,
    /// Segment events (alloc, free, map, unmap) of the recording.
    pub segment_events: u64,
    /// Segment events predicted.
    pub segment_events_predicted: u64,
    /// The first of them that differs.
    pub first_difference: Option<Misprediction>,
    /// Blocks that the recorded allocator handed out.
    pub blocks: u64,
    /// Of them, those predicted in the same segment at the same offset.
    pub blocks_placed_same: u64,
    /// The share of these, 0 to 1; 1 if there are no blocks.
    pub same_placement: f64,
    /// Requests that the recorded allocator refused.
    pub refusals: u64,
    /// Requests that were predicted to be refused.
    pub refusals_predicted: u64,
    /// The same requests were refused, with the same rounded size.
    pub refusals_identical: bool,
    /// Peaks of the recording: requested and reserved from its entries, allocated and active from
    /// the truth file if there is one that counts from the start.
    pub recorded: PredictedPeaks,
    /// Peaks predicted.
    pub predicted: PredictedPeaks,
    /// What was taken from the recording.
    pub taken_from_recording: Vec<String>,
}

/// A prediction cannot be made or compared.
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    /// There is nothing to compare with.
    #[error(
        "the trace has no record of what its allocator did, so there is nothing to compare; \
         verify --predict needs a snapshot recorded by PyTorch, or a trace converted from one"
    )]
    NoRecording,
    /// The history begins in the middle, so the first layout is not known.
    #[error(
        "the history begins late ({frees_without_alloc} blocks were freed whose alloc is not in it), \
         so the layout at its start is not known; verify --predict needs a history from the first \
         allocation"
    )]
    LateHistory {
        /// Frees of blocks whose alloc is missing.
        frees_without_alloc: u64,
    },
    /// The real allocator would not have survived this.
    #[error("the replay came to a point that the real allocator does not survive: {0}")]
    Failed(String),
    /// The replay could not be done.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Predicts what `caching` does with the trace's program and compares that with the recording. The
/// options say what the trace does not: a limit, say.
///
/// # Errors
/// If there is no recording, it begins late and its first layout is not known, or its settings
/// cannot be modelled.
pub fn predict(trace: &Trace, options: &RunOptions) -> Result<PredictResult, PredictError> {
    let Some(recording) = &trace.recording else { return Err(PredictError::NoRecording) };
    let frees_without_alloc = trace.header.history.frees_without_alloc;
    if frees_without_alloc > 0 && trace.start.is_none() {
        return Err(PredictError::LateHistory { frees_without_alloc });
    }
    let spec = AllocSpec { name: "caching".to_owned(), params: Vec::new() };
    let prepared = Prepared::new(trace, options);
    let (run, predicted) =
        watch(&prepared, &spec, prepared.asked_size(), options.stop_on_oom, History::of(trace))?;
    if let Some(failure) = run.failure {
        return Err(PredictError::Failed(failure));
    }
    let recorded = recorded_history(trace);
    let first_difference = first_difference(trace, &recorded, &predicted);
    let same = recorded.places.iter().zip(&predicted.places);
    let blocks_placed_same = same.filter(|(real, ours)| real.is_some() && real == ours).count();
    let blocks = recorded.places.iter().flatten().count();
    let mut taken_from_recording = vec!["order in which uses of deferred blocks ended".to_owned()];
    if trace.start.is_some() {
        taken_from_recording.push("memory held when the history begins".to_owned());
    }
    let truth = recording.truth.as_ref().filter(|truth| !truth.peak_stats_reset);
    let statistic = |name: &str| {
        truth.and_then(|truth| truth.stats.get(name)).and_then(|&bytes| u64::try_from(bytes).ok())
    };
    Ok(PredictResult {
        file: trace.header.name.clone(),
        identical: first_difference.is_none(),
        events: trace.events.len() as u64,
        segment_events: recorded.segment_events.len() as u64,
        segment_events_predicted: predicted.segment_events.len() as u64,
        first_difference,
        blocks: blocks as u64,
        blocks_placed_same: blocks_placed_same as u64,
        same_placement: if blocks == 0 { 1.0 } else { blocks_placed_same as f64 / blocks as f64 },
        refusals: recorded.refusals.len() as u64,
        refusals_predicted: predicted.refusals.len() as u64,
        refusals_identical: recorded.refusals == predicted.refusals,
        recorded: PredictedPeaks {
            requested_bytes_peak: Some(recorded.requested_bytes_peak),
            allocated_bytes_peak: statistic("allocated_bytes.all.peak"),
            active_bytes_peak: statistic("active_bytes.all.peak"),
            reserved_bytes_peak: Some(recorded.reserved_bytes_peak),
        },
        predicted: PredictedPeaks {
            requested_bytes_peak: Some(run.peaks.requested_bytes_peak),
            allocated_bytes_peak: Some(run.peaks.allocated_bytes_peak),
            active_bytes_peak: Some(run.peaks.active_bytes_peak),
            reserved_bytes_peak: Some(run.peaks.reserved_bytes_peak),
        },
        taken_from_recording,
    })
}

/// What one side did, as far as it is compared. Both sides are read by the same rules.
struct History {
    segment_events: Vec<SegmentEvent>,
    /// Segment and offset of every block, by [`BlockId`].
    places: Vec<Option<Place>>,
    /// Event and rounded size of every refusal.
    refusals: Vec<(u64, u64)>,
    requested_bytes: u64,
    requested_bytes_peak: u64,
    reserved_bytes: u64,
    reserved_bytes_peak: u64,
    segments: Segments,
}

/// One segment event as it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SegmentEvent {
    event: u64,
    kind: ActionKind,
    size_bytes: u64,
    stream: StreamId,
}

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    segment: u32,
    offset_bytes: u64,
}

/// Something that either side did.
#[derive(Clone, Copy, Debug)]
struct Act {
    event: u64,
    kind: ActionKind,
    address: u64,
    size_bytes: u64,
    stream: StreamId,
    block: BlockId,
}

impl History {
    fn of(trace: &Trace) -> History {
        let shown = || trace.recording.as_ref()?.device_total_from_reservations();
        let mut segments = Segments::new(trace.header.device.total_bytes.or_else(shown));
        let mut reserved_bytes = 0_u64;
        for segment in trace.start.iter().flat_map(|start| &start.segments) {
            reserved_bytes = reserved_bytes.saturating_add(segment.size_bytes);
            match segment.reservation {
                Some(_) => segments.map(segment.address, segment.size_bytes),
                None => segments.alloc(segment.address, segment.size_bytes),
            }
        }
        History {
            segment_events: Vec::new(),
            places: vec![None; trace.blocks.len()],
            refusals: Vec::new(),
            requested_bytes: 0,
            requested_bytes_peak: 0,
            reserved_bytes,
            reserved_bytes_peak: reserved_bytes,
            segments,
        }
    }

    fn add(&mut self, act: Act) {
        let Act { event, kind, address, size_bytes, stream, block } = act;
        match kind {
            ActionKind::Alloc => {
                if let Some(place) = self.places.get_mut(block.index()) {
                    *place = self.segments.place(address);
                }
                self.requested_bytes = self.requested_bytes.saturating_add(size_bytes);
                self.requested_bytes_peak = self.requested_bytes_peak.max(self.requested_bytes);
            }
            ActionKind::FreeRequested => {
                self.requested_bytes = self.requested_bytes.saturating_sub(size_bytes);
            }
            ActionKind::Oom => self.refusals.push((event, size_bytes)),
            ActionKind::SegmentAlloc => self.segments.alloc(address, size_bytes),
            ActionKind::SegmentFree => self.segments.free(address),
            ActionKind::SegmentMap => self.segments.map(address, size_bytes),
            ActionKind::SegmentUnmap => self.segments.unmap(address, size_bytes),
            ActionKind::FreeCompleted
            | ActionKind::Stitch
            | ActionKind::Unstitch
            | ActionKind::EmptyCache
            | ActionKind::DeviceRefused => {}
        }
        let reserved_bytes = match kind {
            ActionKind::SegmentAlloc | ActionKind::SegmentMap => {
                self.reserved_bytes.saturating_add(size_bytes)
            }
            ActionKind::SegmentFree | ActionKind::SegmentUnmap => {
                self.reserved_bytes.saturating_sub(size_bytes)
            }
            _ => return,
        };
        self.reserved_bytes = reserved_bytes;
        self.reserved_bytes_peak = self.reserved_bytes_peak.max(reserved_bytes);
        self.segment_events.push(SegmentEvent { event, kind, size_bytes, stream });
    }
}

/// Live segments and reservations with their ordinals.
struct Segments {
    /// Addresses that a reservation spans: 1.125 times the device, as PyTorch reserves them.
    reservation_bytes: u64,
    /// Base → segment.
    live: BTreeMap<u64, Segment>,
    next_ordinal: u32,
}

struct Segment {
    ordinal: u32,
    /// Bytes of the segment, or of addresses of the reservation.
    span_bytes: u64,
    /// Bytes of memory in it.
    held_bytes: u64,
}

impl Segments {
    fn new(device_total_bytes: Option<u64>) -> Segments {
        let total_bytes = device_total_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES);
        Segments {
            reservation_bytes: reservation_span_bytes(total_bytes),
            live: BTreeMap::new(),
            next_ordinal: 0,
        }
    }

    /// The segment that an address lies in, with its base.
    fn at(&mut self, address: u64) -> Option<(u64, &mut Segment)> {
        let (&base, segment) = self.live.range_mut(..=address).next_back()?;
        (address - base < segment.span_bytes).then_some((base, segment))
    }

    fn place(&mut self, address: u64) -> Option<Place> {
        let (base, segment) = self.at(address)?;
        Some(Place { segment: segment.ordinal, offset_bytes: address - base })
    }

    fn begin(&mut self, base: u64, span_bytes: u64, held_bytes: u64) {
        let ordinal = self.next_ordinal;
        self.next_ordinal += 1;
        self.live.insert(base, Segment { ordinal, span_bytes, held_bytes });
    }

    fn alloc(&mut self, base: u64, size_bytes: u64) {
        self.begin(base, size_bytes, size_bytes);
    }

    fn free(&mut self, base: u64) {
        self.live.remove(&base);
    }

    fn map(&mut self, address: u64, size_bytes: u64) {
        match self.at(address) {
            Some((_, segment)) => {
                segment.held_bytes = segment.held_bytes.saturating_add(size_bytes);
            }
            None => self.begin(address, self.reservation_bytes, size_bytes),
        }
    }

    /// A reservation of which nothing is mapped any more counts as given back.
    fn unmap(&mut self, address: u64, size_bytes: u64) {
        let Some((base, segment)) = self.at(address) else { return };
        segment.held_bytes = segment.held_bytes.saturating_sub(size_bytes);
        if segment.held_bytes == 0 {
            self.live.remove(&base);
        }
    }
}

/// The recorded side.
fn recorded_history(trace: &Trace) -> History {
    let mut history = History::of(trace);
    for entry in recorded_entries(trace) {
        history.add(Act {
            event: u64::from(entry.event),
            kind: action_kind(entry.kind),
            address: entry.address,
            size_bytes: entry.size_bytes,
            stream: entry.stream,
            block: entry.block,
        });
    }
    history
}

/// The predicted side.
impl Sink for History {
    const LOG: bool = true;
    const LEVELS: bool = false;

    fn action(&mut self, event_index: u64, action: Action) {
        self.add(Act {
            event: event_index,
            kind: action.kind,
            address: action.address,
            size_bytes: action.size_bytes,
            stream: action.stream,
            block: action.block,
        });
    }
}

fn first_difference(trace: &Trace, real: &History, ours: &History) -> Option<Misprediction> {
    let (real, ours) = (&real.segment_events, &ours.segment_events);
    let same = real.iter().zip(ours).take_while(|(real, ours)| real == ours).count();
    let (expected, got) = (real.get(same), ours.get(same));
    let event_index = expected.or(got)?.event;
    Some(Misprediction {
        event_index,
        segment_event: same as u64,
        phase: trace.phase_at(event_index).map(str::to_owned),
        expected: describe(expected, event_index),
        got: describe(got, event_index),
    })
}

/// The event itself is named where it is another than the difference's.
fn describe(event: Option<&SegmentEvent>, at: u64) -> String {
    match event {
        None => "no more segment events".to_owned(),
        Some(SegmentEvent { event, kind, size_bytes, stream }) => {
            let mut text = format!("{} of {size_bytes} bytes", kind.name());
            if stream.0 != 0 {
                text.push_str(&format!(" on stream {}", stream.0));
            }
            if *event != at {
                text.push_str(&format!(" at event {event}"));
            }
            text
        }
    }
}
