//! Whether a trace makes sense: every rule that the replay loop relies on, checked once so that the
//! loop need not.
//!
//! ```text
//!              ┌── free ────────────────────────> gone
//!   new ─ alloc ─> live ─ defer ─> deferred ─ done ─> gone
//!              │                   │  ^ a recorded completion inside a flush may come first
//!              └ access            └──┘
//!   new ─ attempt ─> gone
//! ```
//!
//! Blocks of the layout at the start are live or deferred before the first event.
//!
//! Not checked, because nothing relies on it: that modules nest, and that every block is asked for
//! (a trace cut short keeps its tables). Pools may still be entered when a trace ends.

use std::collections::BTreeMap;

use super::{
    Event, FaultWhen, Model, Op, Pool, PoolKind, RecordedKind, Recording, StartBlock, StartLayout,
    StartSegment, StartState, Trace, Transfer,
};
use crate::units::{BlockId, PoolId};

/// Largest size of a block in bytes: rounding up by any allocator stays within 64 bits.
pub const BLOCK_BYTES_MAX: u64 = (1 << 60) - 1;

/// Largest sum of the blocks that are live or deferred at once, in bytes.
pub const LIVE_BYTES_MAX: u64 = (1 << 63) - 1;

/// Addresses and sizes of the layout at the start are multiples of this many bytes.
const START_UNIT_BYTES: u64 = 512;

/// A trace contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTrace {
    /// An entry of a table is wrong.
    #[error("{table} {index}: {message}")]
    Table {
        /// Name of the table, as in the native format.
        table: &'static str,
        /// Index of the entry.
        index: u64,
        /// What is wrong.
        message: String,
    },
    /// An event is wrong.
    #[error("event {event}: {message}")]
    Event {
        /// Index of the event.
        event: u64,
        /// What is wrong.
        message: String,
    },
    /// An action of the recording is wrong.
    #[error("recorded action {action}: {message}")]
    Action {
        /// Index of the action.
        action: u64,
        /// What is wrong.
        message: String,
    },
}

/// Checks every rule that the replay loop relies on. Time and memory are linear in the trace, but
/// for the sorting of streams and reservations.
///
/// # Errors
/// The first rule broken.
pub fn validate(trace: &Trace) -> Result<(), InvalidTrace> {
    check_lengths(trace)?;
    check_sizes(trace)?;
    check_streams(trace)?;
    check_sites(trace)?;
    check_blocks(trace)?;
    if let Some(recording) = &trace.recording {
        check_actions(trace, recording)?;
    }
    let mut lives = Lives::new(trace);
    if let Some(start) = &trace.start {
        check_start(trace, start)?;
        lives.begin(start)?;
    }
    let mut actions = trace.recording.as_ref().map_or(&[][..], |r| &r.actions).iter().enumerate();
    let mut next_action = actions.next();
    let mut time_ns = 0;
    for (index, event) in trace.events.iter().enumerate() {
        while let Some((position, action)) = next_action.filter(|(_, a)| a.event as usize == index)
        {
            if action.kind == RecordedKind::FreeCompleted {
                lives
                    .complete_inside(action.block)
                    .map_err(|message| InvalidTrace::Action { action: position as u64, message })?;
            }
            next_action = actions.next();
        }
        let at = |message| InvalidTrace::Event { event: index as u64, message };
        if event.time_ns < time_ns {
            let before = time_ns;
            return Err(at(format!("time {} ns is before {before} ns", event.time_ns)));
        }
        time_ns = event.time_ns;
        lives.apply(event).map_err(at)?;
    }
    Ok(())
}

fn table(table: &'static str, index: usize, message: String) -> InvalidTrace {
    InvalidTrace::Table { table, index: index as u64, message }
}

/// Ids are 32 bits with the last value taken for "none"; recorded actions count events in 32 bits.
fn check_lengths(trace: &Trace) -> Result<(), InvalidTrace> {
    let lengths = [
        ("blocks", trace.blocks.len()),
        ("streams", trace.streams.len()),
        ("pools", trace.pools.len()),
        ("settings_changes", trace.settings_changes.len()),
        ("phases", trace.phases.len()),
        ("modules", trace.modules.len()),
        ("transfers", trace.transfers.len()),
        ("names", trace.names.len()),
        ("sites.frames", trace.sites.frames.len()),
        ("sites.stacks", trace.sites.stacks.len()),
        ("events", trace.events.len()),
    ];
    let start = trace.start.iter();
    let start = start.flat_map(|start| {
        [("start.segments", start.segments.len()), ("start.blocks", start.blocks.len())]
    });
    for (name, length) in lengths.into_iter().chain(start) {
        if length >= u32::MAX as usize {
            return Err(table(name, length, format!("more than {} entries", u32::MAX - 1)));
        }
    }
    Ok(())
}

fn is_size(size_bytes: u64) -> bool {
    (1..=BLOCK_BYTES_MAX).contains(&size_bytes)
}

fn bad_size(size_bytes: u64) -> String {
    format!("{size_bytes} is not between 1 and 2^60 - 1 bytes")
}

/// The numbers of the header, and the transfers.
fn check_sizes(trace: &Trace) -> Result<(), InvalidTrace> {
    let header = &trace.header;
    let sizes = [
        ("header.device.capacity_bytes", header.device.capacity_bytes),
        ("header.device.total_bytes", header.device.total_bytes),
        ("header.device.address_bytes_max", header.device.address_bytes_max),
        ("header.limit_bytes", header.limit_bytes),
    ];
    for (name, size) in sizes {
        if let Some(size_bytes) = size.filter(|&size_bytes| !is_size(size_bytes)) {
            return Err(table(name, 0, bad_size(size_bytes)));
        }
    }
    if let Some(index) = header.faults.iter().position(|fault| fault.when == FaultWhen::Nth(0)) {
        return Err(table("header.faults", index, "calls are counted from 1".to_owned()));
    }
    if let Some((index, why)) = header.model.as_ref().and_then(Model::fault) {
        return Err(table("header.model.units", index, why));
    }
    let size = |transfer: &Transfer| !is_size(transfer.size_bytes);
    if let Some(index) = trace.transfers.iter().position(size) {
        return Err(table("transfers", index, bad_size(trace.transfers[index].size_bytes)));
    }
    Ok(())
}

fn check_streams(trace: &Trace) -> Result<(), InvalidTrace> {
    let mut handles: Vec<(u64, usize)> =
        trace.streams.iter().enumerate().map(|(index, s)| (s.handle, index)).collect();
    handles.sort_unstable();
    match handles.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(()),
        Some(pair) => {
            let message = format!("handle {:#x} is also that of stream {}", pair[1].0, pair[0].1);
            Err(table("streams", pair[1].1, message))
        }
    }
}

fn check_sites(trace: &Trace) -> Result<(), InvalidTrace> {
    let frames = trace.sites.frames.len();
    for (index, stack) in trace.sites.stacks.iter().enumerate() {
        if let Some(frame) = stack.iter().find(|frame| frame.index() >= frames) {
            return Err(table("sites.stacks", index, out_of_range("frame", frame.0, frames)));
        }
    }
    Ok(())
}

fn check_blocks(trace: &Trace) -> Result<(), InvalidTrace> {
    let (streams, sites) = (trace.streams.len(), trace.sites.stacks.len());
    let names = trace.names.len();
    for (index, block) in trace.blocks.iter().enumerate() {
        let message = if !is_size(block.size_bytes) {
            bad_size(block.size_bytes)
        } else if block.stream.index() >= streams {
            out_of_range("stream", block.stream.0, streams)
        } else if block.site.some().is_some_and(|site| site.index() >= sites) {
            out_of_range("site", block.site.0, sites)
        } else if block.name.some().is_some_and(|name| name.index() >= names) {
            out_of_range("name", block.name.0, names)
        } else {
            continue;
        };
        return Err(table("blocks", index, message));
    }
    Ok(())
}

fn check_actions(trace: &Trace, recording: &Recording) -> Result<(), InvalidTrace> {
    let (addresses, blocks) = (recording.block_addresses.len(), trace.blocks.len());
    if addresses != blocks {
        let message = format!("{addresses} addresses for {blocks} blocks");
        return Err(table("recording.address", addresses.min(blocks), message));
    }
    let (events, streams) = (trace.events.len(), trace.streams.len());
    let mut last = 0;
    for (index, action) in recording.actions.iter().enumerate() {
        let message = if action.event as usize >= events {
            out_of_range("event", action.event, events)
        } else if action.event < last {
            format!("event {} comes after event {last}: actions must ascend", action.event)
        } else if action.stream.index() >= streams {
            out_of_range("stream", action.stream.0, streams)
        } else if action.kind != RecordedKind::FreeCompleted && !action.block.is_none() {
            format!("names block {}, which only free_completed may do", action.block.0)
        } else {
            last = action.event;
            continue;
        };
        return Err(InvalidTrace::Action { action: index as u64, message });
    }
    Ok(())
}

/// The layout at the start. Blocks and actions have been checked.
fn check_start(trace: &Trace, start: &StartLayout) -> Result<(), InvalidTrace> {
    let listed: u64 = start.segments.iter().map(|segment| u64::from(segment.blocks)).sum();
    if listed != start.blocks.len() as u64 {
        let message = format!("the segments list {listed} of {} blocks", start.blocks.len());
        return Err(table("start.segments", start.segments.len(), message));
    }
    let (mut end, mut total_bytes, mut blocks_before) = (0u64, 0u64, 0);
    // The first run of each reservation.
    let mut reservations: BTreeMap<u64, (usize, StartSegment)> = BTreeMap::new();
    for (index, (segment, blocks)) in start.iter().enumerate() {
        let at = |message| table("start.segments", index, message);
        let begin_min = end;
        end = check_segment(trace, &segment, blocks).map_err(at)?;
        if segment.address < begin_min {
            let address = segment.address;
            return Err(at(format!(
                "address {address:#x} is below {begin_min:#x}, where the segment before ends"
            )));
        }
        // Segments that do not overlap have fewer than 2^64 bytes in all.
        total_bytes += segment.size_bytes;
        if total_bytes > LIVE_BYTES_MAX {
            return Err(at("more than 2^63 - 1 bytes in segments".to_owned()));
        }
        if let Some(base) = segment.reservation {
            let (first, run) = *reservations.entry(base).or_insert((index, segment));
            let key = |run: &StartSegment| (run.stream, run.pool, run.large);
            if key(&run) != key(&segment) {
                return Err(at(format!(
                    "differs in stream, pool or large from segment {first} of its reservation"
                )));
            }
        }
        check_start_blocks(trace, &segment, blocks)
            .map_err(|(block, message)| table("start.blocks", blocks_before + block, message))?;
        blocks_before += blocks.len();
    }
    Ok(())
}

/// Checks a segment by itself and gives the address at which it ends.
fn check_segment(
    trace: &Trace,
    segment: &StartSegment,
    blocks: &[StartBlock],
) -> Result<u64, String> {
    let StartSegment { address, size_bytes, .. } = *segment;
    in_range("stream", segment.stream.0, trace.streams.len())?;
    if let Some(pool) = segment.pool.some() {
        in_range("pool", pool.0, trace.pools.len())?;
    }
    if !is_start_unit(address) {
        return Err(format!("address {address:#x} is no multiple of {START_UNIT_BYTES} above 0"));
    }
    if let Some(base) = segment.reservation.filter(|&base| base > address) {
        return Err(format!("address {address:#x} is below its reservation, {base:#x}"));
    }
    let covered = blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.size_bytes));
    if size_bytes == 0 || covered != Some(size_bytes) {
        let covered = covered.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
        let count = blocks.len();
        return Err(format!("has {size_bytes} bytes, but its {count} blocks have {covered}"));
    }
    address.checked_add(size_bytes).ok_or_else(|| "ends beyond address 2^64".to_owned())
}

fn is_start_unit(number: u64) -> bool {
    number != 0 && number.is_multiple_of(START_UNIT_BYTES)
}

/// Checks the blocks of a segment, whose sizes add up to its own. An error comes with the index.
fn check_start_blocks(
    trace: &Trace,
    segment: &StartSegment,
    blocks: &[StartBlock],
) -> Result<(), (usize, String)> {
    let mut address = segment.address;
    let mut free_before = false;
    for (index, block) in blocks.iter().enumerate() {
        let free = block.state == StartState::Free;
        if free && free_before {
            let message = "is free as the block before it is: together they are one block";
            return Err((index, message.to_owned()));
        }
        free_before = free;
        check_start_block(trace, segment, address, block).map_err(|message| (index, message))?;
        address += block.size_bytes;
    }
    Ok(())
}

fn check_start_block(
    trace: &Trace,
    segment: &StartSegment,
    address: u64,
    block: &StartBlock,
) -> Result<(), String> {
    let size_bytes = block.size_bytes;
    if !is_start_unit(size_bytes) {
        return Err(format!("size {size_bytes} is no multiple of {START_UNIT_BYTES} above 0"));
    }
    let id = match (block.state, block.block.some()) {
        (StartState::Free, None) => return Ok(()),
        (StartState::Free, Some(id)) => return Err(format!("is free, but names block {}", id.0)),
        (_, None) => return Err("is in use, but names no block".to_owned()),
        (_, Some(id)) => id,
    };
    in_range("block", id.0, trace.blocks.len())?;
    let asked = &trace.blocks[id.index()];
    if asked.size_bytes > size_bytes {
        let asked_bytes = asked.size_bytes;
        return Err(format!("has {size_bytes} bytes, but block {} asked for {asked_bytes}", id.0));
    }
    if asked.stream != segment.stream {
        let (stream, other) = (asked.stream.0, segment.stream.0);
        return Err(format!("block {} is of stream {stream}, its segment of {other}", id.0));
    }
    let recorded = trace.recording.as_ref().map(|r| r.block_addresses[id.index()]);
    if let Some(recorded) = recorded.filter(|&recorded| recorded != address) {
        return Err(format!("block {} is at {address:#x}, but recorded at {recorded:#x}", id.0));
    }
    Ok(())
}

fn out_of_range(what: &str, id: u32, length: usize) -> String {
    format!("{what} {id} does not exist: there are {length}")
}

/// How far a block has come in its life.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    New,
    Live,
    Deferred,
    /// Deferred, and the recorded run completed it inside a flush.
    Completed,
    Gone,
}

/// The state that events change.
struct Lives<'a> {
    trace: &'a Trace,
    lives: Vec<Life>,
    live_bytes: u64,
    entered: EnteredPools,
}

impl<'a> Lives<'a> {
    fn new(trace: &'a Trace) -> Self {
        let lives = vec![Life::New; trace.blocks.len()];
        Lives { trace, lives, live_bytes: 0, entered: EnteredPools::new(trace.pools.len()) }
    }

    /// What the layout at the start, which has been checked, leaves in use.
    fn begin(&mut self, start: &StartLayout) -> Result<(), InvalidTrace> {
        for (index, block) in start.blocks.iter().enumerate() {
            let life = match block.state {
                StartState::Live => Life::Live,
                StartState::Deferred => Life::Deferred,
                StartState::Free => continue,
            };
            let before = std::mem::replace(&mut self.lives[block.block.index()], life);
            if before != Life::New {
                let message = format!("block {} stands in two places", block.block.0);
                return Err(table("start.blocks", index, message));
            }
            // No block asks for more than it has, and all together have at most 2^63 - 1 bytes.
            self.live_bytes += self.trace.blocks[block.block.index()].size_bytes;
        }
        Ok(())
    }

    fn apply(&mut self, event: &Event) -> Result<(), String> {
        let trace = self.trace;
        match event.op {
            Op::Alloc(block) => self.born(block, Life::Live),
            Op::Attempt(block) => self.born(block, Life::Gone),
            Op::Free(block) => self.advance(block, "free", &[Life::Live], Life::Gone),
            Op::Defer(block) => self.advance(block, "defer", &[Life::Live], Life::Deferred),
            Op::Done(block) => {
                self.advance(block, "done", &[Life::Deferred, Life::Completed], Life::Gone)
            }
            Op::Access(block) => self.advance(block, "access", &[Life::Live], Life::Live),
            Op::EmptyCache => Ok(()),
            Op::Mark(phase) => in_range("phase", phase.0, trace.phases.len()),
            Op::ModuleEnter(module) | Op::ModuleLeave(module) => {
                in_range("module", module.0, trace.modules.len())
            }
            Op::Transfer(transfer) => in_range("transfer", transfer.0, trace.transfers.len()),
            Op::Settings(settings) => {
                in_range("settings", settings.0, trace.settings_changes.len())
            }
            Op::PoolEnter(pool) | Op::PoolLeave(pool) | Op::PoolDelete(pool) => {
                in_range("pool", pool.0, trace.pools.len())?;
                self.entered.apply(event.op, &trace.pools, |pool| format!("pool {}", pool.0))
            }
        }
    }

    fn born(&mut self, block: BlockId, life: Life) -> Result<(), String> {
        self.advance(block, "alloc", &[Life::New], life)?;
        if life == Life::Live {
            // Neither addend reaches 2^63, so the sum is exact.
            self.live_bytes += self.trace.blocks[block.index()].size_bytes;
            if self.live_bytes > LIVE_BYTES_MAX {
                return Err(format!("block {}: more than 2^63 - 1 bytes live at once", block.0));
            }
        }
        Ok(())
    }

    fn advance(
        &mut self,
        block: BlockId,
        what: &str,
        from: &[Life],
        to: Life,
    ) -> Result<(), String> {
        let blocks = self.lives.len();
        let Some(life) = self.lives.get_mut(block.index()) else {
            return Err(out_of_range("block", block.0, blocks));
        };
        if !from.contains(life) {
            return Err(format!("{what} of block {}, which {}", block.0, describe(*life)));
        }
        if *life != Life::New && to == Life::Gone {
            self.live_bytes -= self.trace.blocks[block.index()].size_bytes;
        }
        *life = to;
        Ok(())
    }

    fn complete_inside(&mut self, block: BlockId) -> Result<(), String> {
        self.advance(block, "free_completed", &[Life::Deferred], Life::Completed)
    }
}

/// The pools that the program is in.
pub(super) struct EnteredPools {
    /// Innermost last.
    entered: Vec<PoolId>,
    /// By pool.
    inside: Vec<bool>,
}

impl EnteredPools {
    pub(super) fn new(pools: usize) -> Self {
        EnteredPools { entered: Vec::new(), inside: vec![false; pools] }
    }

    /// Follows an event, whose pool is in the table, or says what is wrong with it. PyTorch refuses
    /// to enter a pool twice, and aborts when a `MemPool` is deleted while any pool is entered; a
    /// graph may be deleted then.
    pub(super) fn apply(
        &mut self,
        op: Op,
        pools: &[Pool],
        show: impl Fn(PoolId) -> String,
    ) -> Result<(), String> {
        let innermost = self.entered.last().copied();
        match op {
            Op::PoolEnter(pool) if self.inside[pool.index()] => {
                return Err(format!("enters {}, but is in it already", show(pool)));
            }
            Op::PoolEnter(pool) => {
                self.entered.push(pool);
                self.inside[pool.index()] = true;
            }
            Op::PoolLeave(pool) => match innermost {
                Some(inner) if inner == pool => {
                    self.entered.pop();
                    self.inside[pool.index()] = false;
                }
                Some(inner) => {
                    return Err(format!("leaves {}, but is in {}", show(pool), show(inner)));
                }
                None => return Err(format!("leaves {}, but is in none", show(pool))),
            },
            Op::PoolDelete(pool) if self.inside[pool.index()] => {
                return Err(format!("deletes {} while in it", show(pool)));
            }
            Op::PoolDelete(pool) if pools[pool.index()].kind == PoolKind::MemPool => {
                if let Some(inner) = innermost {
                    return Err(format!("deletes {} while in {}", show(pool), show(inner)));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn describe(life: Life) -> &'static str {
    match life {
        Life::New => "was not asked for yet",
        Life::Live => "is live",
        Life::Deferred => "is already freed and deferred",
        Life::Completed => "is already completed",
        Life::Gone => "is already gone",
    }
}

fn in_range(what: &str, id: u32, length: usize) -> Result<(), String> {
    if id as usize >= length { Err(out_of_range(what, id, length)) } else { Ok(()) }
}
