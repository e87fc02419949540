//! A model of the recorded allocator's books that only follows: it is told every address and every
//! segment, and settles the sizes of blocks by the splitting rules (specs/pytorch_caching.md 3.8
//! and 4.5). It shares no code with the importer and panics at whatever cannot be.

use std::collections::{BTreeMap, BTreeSet};

use fraglab::alloc::caching::Config;
use fraglab::import::{RawBlock, RawBlockState, RawSegment};
use fraglab::trace::{EntryKind, StartLayout, StartState, Trace, recorded_entries};

const MIB: u64 = 1 << 20;

/// State of a block, as in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Live,
    Pending,
    Free,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) size_bytes: u64,
    /// 0 if free.
    pub(crate) request_bytes: u64,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) end: u64,
    pub(crate) stream: u64,
    pub(crate) expandable: bool,
}

/// The layout at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Forward {
    config: Config,
    /// Segments, and mapped runs, by address.
    pub(crate) memory: BTreeMap<u64, Memory>,
    /// Blocks by address; free neighbours are one.
    pub(crate) blocks: BTreeMap<u64, Held>,
    /// Where ordinary segments begin and end: nothing merges across.
    borders: BTreeSet<u64>,
    /// Segments whose blocks are never split.
    pub(crate) whole: BTreeSet<u64>,
}

/// The settings of a trace as `caching` reads them.
fn config_of(trace: &Trace) -> Config {
    Config::parse(trace.header.settings.as_deref().unwrap_or("")).expect("settings are read")
}

impl Forward {
    /// Before any event of a trace.
    pub(crate) fn at_start(trace: &Trace) -> Forward {
        let mut forward = Forward {
            config: config_of(trace),
            memory: BTreeMap::new(),
            blocks: BTreeMap::new(),
            borders: BTreeSet::new(),
            whole: BTreeSet::new(),
        };
        if let Some(start) = &trace.start {
            forward.begin(trace, start);
        }
        forward
    }

    fn begin(&mut self, trace: &Trace, start: &StartLayout) {
        for (segment, blocks) in start.iter() {
            let stream = trace.streams[segment.stream.index()].handle;
            let expandable = segment.reservation.is_some();
            self.add_memory(segment.address, segment.size_bytes, stream, expandable);
            if segment.pool.some().is_some_and(|pool| trace.pools[pool.index()].no_split) {
                self.whole.insert(segment.address);
            }
            let mut address = segment.address;
            for block in blocks {
                let state = match block.state {
                    StartState::Live => State::Live,
                    StartState::Deferred => State::Pending,
                    StartState::Free => State::Free,
                };
                let request_bytes =
                    block.block.some().map_or(0, |block| trace.blocks[block.index()].size_bytes);
                let held = Held { size_bytes: block.size_bytes, request_bytes, state };
                assert!(self.blocks.insert(address, held).is_none());
                address += block.size_bytes;
            }
            assert_eq!(address, segment.address + segment.size_bytes, "covered by its blocks");
        }
    }

    /// The layouts before every entry of a trace that `wanted` names, and after the last one.
    pub(crate) fn follow(trace: &Trace, wanted: &[usize]) -> (Vec<Forward>, Forward) {
        let mut forward = Forward::at_start(trace);
        let mut seen = Vec::new();
        for (index, entry) in recorded_entries(trace).enumerate() {
            if wanted.contains(&index) {
                seen.push(forward.clone());
            }
            let stream = trace.streams[entry.stream.index()].handle;
            forward.apply(entry.kind, entry.address, entry.size_bytes, stream);
        }
        (seen, forward)
    }

    fn apply(&mut self, kind: EntryKind, address: u64, size_bytes: u64, stream: u64) {
        let end = address + size_bytes;
        match kind {
            EntryKind::Alloc => self.alloc(address, size_bytes),
            EntryKind::FreeRequested => self.turn(address, size_bytes, State::Live, State::Pending),
            EntryKind::FreeCompleted => {
                self.turn(address, size_bytes, State::Pending, State::Free);
                let held = self.blocks.remove(&address).expect("just turned");
                self.add_free(address, address + held.size_bytes);
            }
            EntryKind::SegmentAlloc | EntryKind::SegmentMap => {
                self.add_memory(address, size_bytes, stream, kind == EntryKind::SegmentMap);
                self.add_free(address, end);
            }
            EntryKind::SegmentFree => {
                let memory = self.memory.remove(&address).expect("a segment");
                assert_eq!((memory.end, memory.expandable, memory.stream), (end, false, stream));
                let held = self.blocks.remove(&address).expect("a block");
                assert_eq!((held.size_bytes, held.state), (size_bytes, State::Free));
                self.borders.remove(&address);
                self.borders.remove(&end);
                self.restore_borders();
            }
            EntryKind::SegmentUnmap => self.unmap(address, end, stream),
            EntryKind::Oom => {}
        }
    }

    /// A border that two segments share stays while one of them is there.
    fn restore_borders(&mut self) {
        let ordinary = self.memory.iter().filter(|(_, memory)| !memory.expandable);
        self.borders.extend(ordinary.flat_map(|(&address, memory)| [address, memory.end]));
    }

    fn add_memory(&mut self, address: u64, size_bytes: u64, stream: u64, expandable: bool) {
        let (mut start, mut end) = (address, address + size_bytes);
        let overlap = self.memory.range(..end).next_back().filter(|(_, m)| m.end > address);
        assert!(overlap.is_none(), "{address:#x} overlaps {overlap:x?}");
        if expandable {
            let joins = |memory: &Memory| memory.expandable && memory.stream == stream;
            if let Some((&first, before)) = self.memory.range(..start).next_back()
                && before.end == start
                && joins(before)
            {
                start = first;
            }
            if let Some(after) = self.memory.get(&end).copied().filter(joins) {
                self.memory.remove(&end);
                end = after.end;
            }
        } else {
            self.borders.extend([start, end]);
        }
        self.memory.insert(start, Memory { end, stream, expandable });
    }

    fn unmap(&mut self, address: u64, end: u64, stream: u64) {
        let (&first, &memory) = self.memory.range(..=address).next_back().expect("a run");
        assert!(memory.expandable && memory.end >= end && memory.stream == stream);
        self.memory.remove(&first);
        for (from, to) in [(first, address), (end, memory.end)] {
            if from < to {
                self.memory.insert(from, Memory { end: to, ..memory });
            }
        }
        let (&first, &held) = self.blocks.range(..=address).next_back().expect("a block");
        let block_end = first + held.size_bytes;
        assert!(held.state == State::Free && block_end >= end, "{address:#x} is not free");
        self.blocks.remove(&first);
        for (from, to) in [(first, address), (end, block_end)] {
            if from < to {
                self.blocks.insert(from, Held { size_bytes: to - from, ..held });
            }
        }
    }

    fn alloc(&mut self, address: u64, request_bytes: u64) {
        let held = self.blocks.remove(&address);
        let held = held.filter(|held| held.state == State::Free);
        let held = held.unwrap_or_else(|| panic!("no free block begins at {address:#x}"));
        let rounded = self.config.round_size(request_bytes);
        assert!(held.size_bytes >= rounded, "{request_bytes} bytes do not fit at {address:#x}");
        let (&first, memory) = self.memory.range(..=address).next_back().expect("memory");
        let exact = memory.expandable
            || memory.end - first == 2 * MIB
            || (self.config.expandable_segments && !self.whole.contains(&first));
        let rest = held.size_bytes - rounded;
        let split = !self.whole.contains(&first)
            && if exact {
                rest >= 512
            } else {
                rounded < self.config.max_split_size_bytes && rest > MIB
            };
        let size_bytes = if split { rounded } else { held.size_bytes };
        self.blocks.insert(address, Held { size_bytes, request_bytes, state: State::Live });
        if split {
            let (request_bytes, state) = (0, State::Free);
            let rest = Held { size_bytes: rest, request_bytes, state };
            assert!(self.blocks.insert(address + size_bytes, rest).is_none());
        }
    }

    fn turn(&mut self, address: u64, request_bytes: u64, from: State, to: State) {
        let held = self.blocks.get_mut(&address);
        let held = held.unwrap_or_else(|| panic!("no block at {address:#x}"));
        assert_eq!((held.state, held.request_bytes), (from, request_bytes), "at {address:#x}");
        held.state = to;
    }

    fn add_free(&mut self, mut start: u64, mut end: u64) {
        let is_free = |held: &Held| held.state == State::Free;
        if let Some((&before, held)) = self.blocks.range(..start).next_back()
            && is_free(held)
            && before + held.size_bytes == start
            && !self.borders.contains(&start)
        {
            start = before;
        }
        if !self.borders.contains(&end)
            && let Some(after) = self.blocks.get(&end).copied().filter(is_free)
        {
            self.blocks.remove(&end);
            end += after.size_bytes;
        }
        let held = Held { size_bytes: end - start, request_bytes: 0, state: State::Free };
        self.blocks.insert(start, held);
    }

    /// Panics unless the segments of a snapshot are exactly this, blocks included.
    pub(crate) fn expect(&self, segments: &[RawSegment], name: &str) {
        let listed: BTreeMap<u64, Memory> = segments
            .iter()
            .map(|segment| {
                let end = segment.address + segment.total_bytes;
                let (stream, expandable) = (segment.stream_handle, segment.expandable);
                (segment.address, Memory { end, stream, expandable })
            })
            .collect();
        assert_eq!(self.memory, listed, "{name}: segments");
        let blocks: BTreeMap<u64, Held> = segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .map(|block| {
                let state = match block.state {
                    RawBlockState::Allocated => State::Live,
                    RawBlockState::Pending => State::Pending,
                    RawBlockState::Inactive => State::Free,
                };
                let request_bytes = if state == State::Free { 0 } else { block.requested_bytes };
                (block.address, Held { size_bytes: block.size_bytes, request_bytes, state })
            })
            .collect();
        for (address, held) in &self.blocks {
            assert_eq!(blocks.get(address), Some(held), "{name}: block at {address:#x}");
        }
        assert_eq!(self.blocks.len(), blocks.len(), "{name}: number of blocks");
    }

    /// Fills the block lists of a snapshot that was stored without them.
    pub(crate) fn fill(&self, segments: &mut [RawSegment]) {
        for segment in segments {
            let end = segment.address + segment.total_bytes;
            segment.blocks = Vec::new();
            for (&address, held) in self.blocks.range(segment.address..end) {
                let mut block = RawBlock::default();
                block.address = address;
                block.size_bytes = held.size_bytes;
                block.requested_bytes = held.request_bytes;
                block.state = match held.state {
                    State::Live => RawBlockState::Allocated,
                    State::Pending => RawBlockState::Pending,
                    State::Free => RawBlockState::Inactive,
                };
                segment.blocks.push(block);
            }
        }
    }
}
