//! Random valid traces that use every kind of event and every table.
//!
//! A trace is built from a list of small commands, so that shrinking takes commands away and what
//! is left is still valid. The builder keeps its own books and shares no code with `validate`.

use fraglab::trace::{
    AddressPolicy, Block, DeviceCall, DeviceInfo, Direction, Event, Expectation, Fault, FaultWhen,
    Frame, Header, History, Model, ModelParameter, ModelUnit, Op, Pool, PoolKind, RecordedAction,
    RecordedKind, Recording, Role, Source, SourceKind, StartBlock, StartLayout, StartSegment,
    StartState, Trace, Transfer, Truth,
};
use fraglab::units::{
    BlockId, FrameId, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
};
use proptest::prelude::*;

use super::Rng;

/// Names that a text has to quote, or must not take for something else.
const ODD_NAMES: [&str; 12] = [
    "a",
    "b0",
    "two words",
    "q\"uote",
    "#x",
    "_",
    "@5ms",
    "stream=1",
    "Größe",
    "back\\slash",
    "",
    "a\nb",
];

/// One step of the builder: what to do, and two numbers to do it with.
pub(crate) type Command = (u8, u64, u64);

/// Traces that the text form holds without loss: no sites, no recording, tables in the order of
/// first use, a name for every block that is spoken of again.
pub(crate) fn text_traces() -> impl Strategy<Value = Trace> {
    commands().prop_map(|(commands, seed)| {
        let mut builder = Builder { text: true, ..Default::default() };
        builder.run(&commands);
        builder.trace.header = header(seed, true);
        name_for_text(&mut builder.trace);
        builder.trace
    })
}

/// Traces with everything: sites, a recording, a layout at the start, unused entries, block ids in
/// no order.
pub(crate) fn any_traces() -> impl Strategy<Value = Trace> {
    commands().prop_map(|(commands, seed)| {
        let mut builder = Builder::default();
        if seed & 128 == 128 {
            builder.begin_late(seed);
        }
        builder.run(&commands);
        builder.trace.header = header(seed, false);
        let mut trace = builder.trace;
        if seed & 1 == 1 {
            let actions = builder.actions;
            let address = |i: usize| {
                if i.is_multiple_of(5) { 0 } else { 0x7f00_0000_0000 + 512 * (i as u64 % 7) }
            };
            let mut block_addresses: Vec<u64> = (0..trace.blocks.len()).map(address).collect();
            for (block, address) in builder.start_addresses {
                block_addresses[block.index()] = address;
            }
            let truth = (seed & 2 == 2).then(|| Truth {
                stats: [("active_bytes.all.peak".to_owned(), -(seed as i64 >> 8))].into(),
                outcome: Some("ok".to_owned()),
                peak_stats_reset: seed & 4 == 4,
                calls_noted: seed & 8 == 8,
            });
            trace.recording = Some(Recording { block_addresses, actions, truth });
        }
        add_unused_and_sites(&mut trace, seed);
        if seed & 8 == 8 {
            scramble(&mut trace);
        }
        trace
    })
}

fn commands() -> impl Strategy<Value = (Vec<Command>, u64)> {
    (prop::collection::vec((0u8..21, any::<u64>(), any::<u64>()), 0..120), any::<u64>())
}

fn header(seed: u64, text: bool) -> Header {
    let some = |bit: u32| seed >> bit & 1 == 1;
    let odd = ODD_NAMES[(seed >> 32) as usize % ODD_NAMES.len()];
    let kinds = [
        SourceKind::Unknown,
        SourceKind::TorchSnapshot,
        SourceKind::RmmCsv,
        SourceKind::StallocLog,
        SourceKind::Text,
        SourceKind::Generated,
        SourceKind::Merged,
    ];
    let policies = [AddressPolicy::Ascending, AddressPolicy::Recorded, AddressPolicy::Chunks];
    Header {
        name: odd.to_owned(),
        source: Source {
            kind: kinds[(seed >> 8) as usize % kinds.len()],
            version: some(9).then(|| "2.11.0+cu130".to_owned()),
        },
        device: DeviceInfo {
            name: some(10).then(|| "NVIDIA H200".to_owned()),
            index: some(11).then_some(3),
            total_bytes: some(12).then_some(150_109_880_320),
            capacity_bytes: some(13).then_some(4000 << 20),
            address_bytes_max: some(24).then_some(2 << 30),
            mappings_max: some(25).then_some(5000),
        },
        settings: some(14)
            .then(|| "max_split_size_mb:40,roundup_power2_divisions:[256:1,>:8]".into()),
        limit_bytes: some(15).then_some((1 << 60) - 1),
        address_policy: some(16).then_some(policies[seed as usize % policies.len()]),
        faults: if some(17) {
            vec![
                Fault { call: DeviceCall::Create, when: FaultWhen::Nth(12) },
                Fault { call: DeviceCall::AddressReserve, when: FaultWhen::All },
            ]
        } else {
            Vec::new()
        },
        strategies: if some(18) { vec!["recompute".into(), "zero3".into()] } else { Vec::new() },
        expectations: if some(19) {
            vec![Expectation {
                allocator: "caching+x=[a:1,b:2]".into(),
                field: "peaks.reserved_bytes_peak".into(),
                value: "220MiB".into(),
                line: if text { 0 } else { 7 },
            }]
        } else {
            Vec::new()
        },
        history: if text {
            History::default()
        } else {
            History {
                frees_without_alloc: 3,
                allocs: 9,
                blocks_at_start: if some(21) { 5 } else { 0 },
                allocs_of_run: some(22).then_some(u64::MAX),
            }
        },
        start_unix_ns: some(20).then_some(1_795_965_079_291_717_000),
        model: some(20).then(any_model),
    }
}

#[derive(Default)]
struct Builder {
    trace: Trace,
    text: bool,
    actions: Vec<RecordedAction>,
    time_ns: u64,
    live: Vec<BlockId>,
    /// Deferred, with whether a recorded completion has come.
    deferred: Vec<(BlockId, bool)>,
    entered: Vec<PoolId>,
    /// Where the blocks of the layout at the start lie.
    start_addresses: Vec<(BlockId, u64)>,
}

fn pick<T: Copy>(from: &[T], number: u64) -> Option<T> {
    (!from.is_empty()).then(|| from[(number % from.len() as u64) as usize])
}

fn intern<T: PartialEq>(table: &mut Vec<T>, value: T) -> u32 {
    let found = table.iter().position(|entry| *entry == value);
    found.unwrap_or_else(|| {
        table.push(value);
        table.len() - 1
    }) as u32
}

impl Builder {
    fn run(&mut self, commands: &[Command]) {
        for &(what, a, b) in commands {
            // Microseconds, nanoseconds, or no time at all between events.
            self.time_ns += [0, 0, 1_000, 17, 2_000_000][(b % 5) as usize] * (a % 40);
            let before = self.trace.events.len();
            let deferred_before = self.deferred.clone();
            self.event(what, a, b);
            if self.trace.events.len() > before {
                self.record(before as u32, &deferred_before, a ^ b);
            }
        }
    }

    /// Some segments, and runs of reservations, with blocks in them.
    fn begin_late(&mut self, seed: u64) {
        let mut random = Rng(seed);
        let mut start = StartLayout::default();
        let mut address = 0x7f00_0000_0000;
        let mut last: Option<StartSegment> = None;
        for _ in 0..random.below(6) {
            // Neighbours touch or leave a gap; a reservation begins in it.
            let end = address;
            address += [0, 512, 2 << 20][random.below(3)];
            let handle = [0, 7, u64::MAX][random.below(3)];
            let mut segment = StartSegment {
                address,
                size_bytes: 0,
                stream: self.trace.stream_with_handle(handle),
                pool: if random.below(2) == 0 { PoolId::NONE } else { self.pool(random.next()) },
                large: random.below(2) == 0,
                reservation: (random.below(2) == 0).then_some(end),
                blocks: 0,
            };
            if let Some(last) = last.filter(|last| last.reservation.is_some()) {
                // Another run of the last reservation.
                let StartSegment { stream, pool, large, reservation, .. } = last;
                segment = StartSegment { stream, pool, large, reservation, ..segment };
            }
            let mut free_before = false;
            for _ in 0..1 + random.below(5) {
                let block = self.start_block(&segment, address, free_before, &mut random);
                free_before = block.state == StartState::Free;
                address += block.size_bytes;
                segment.size_bytes += block.size_bytes;
                segment.blocks += 1;
                start.blocks.push(block);
            }
            last = (random.below(2) == 0).then_some(segment);
            start.segments.push(segment);
        }
        self.trace.start = Some(start);
    }

    fn start_block(
        &mut self,
        segment: &StartSegment,
        address: u64,
        free_before: bool,
        random: &mut Rng,
    ) -> StartBlock {
        let states = [StartState::Live, StartState::Live, StartState::Deferred, StartState::Free];
        let state = states[random.below(if free_before { 3 } else { 4 })];
        let request = 1 + random.next() % (1 << [4, 12, 33][random.below(3)]);
        let size_bytes = request.next_multiple_of(512) + 512 * (random.next() % 3);
        if state == StartState::Free {
            return StartBlock { size_bytes, block: BlockId::NONE, state, guessed: false };
        }
        let block = BlockId(self.trace.blocks.len() as u32);
        self.trace.blocks.push(Block {
            size_bytes: request,
            stream: segment.stream,
            site: SiteId::NONE,
            name: NameId::NONE,
            role: Role::ALL[random.below(Role::ALL.len())],
        });
        match state {
            StartState::Live => self.live.push(block),
            _ => self.deferred.push((block, false)),
        }
        self.start_addresses.push((block, address));
        StartBlock { size_bytes, block, state, guessed: random.below(4) == 0 }
    }

    fn push(&mut self, op: Op) {
        self.trace.events.push(Event { time_ns: self.time_ns, op });
    }

    fn event(&mut self, what: u8, a: u64, b: u64) {
        match what {
            0..=5 => {
                let block = self.block(a, b);
                self.live.push(block);
                self.push(Op::Alloc(block));
            }
            6 => {
                let block = self.block(a, b);
                self.push(Op::Attempt(block));
            }
            7..=9 => {
                if let Some(block) = self.take_live(a) {
                    self.push(Op::Free(block));
                }
            }
            10 => {
                if let Some(block) = self.take_live(a) {
                    self.deferred.push((block, false));
                    self.push(Op::Defer(block));
                }
            }
            11 if !self.deferred.is_empty() => {
                let (block, _) = self.deferred.remove(a as usize % self.deferred.len());
                self.push(Op::Done(block));
            }
            12 => {
                if let Some(block) = pick(&self.live, a) {
                    self.push(Op::Access(block));
                }
            }
            13 => {
                let name = ["step0.forward", "step1.backward", "step1", "odd # name", "init"];
                let id = intern(&mut self.trace.phases, name[a as usize % 5].to_owned());
                self.push(Op::Mark(PhaseId(id)));
            }
            14 => self.push(Op::EmptyCache),
            15 => self.enter_pool(a),
            16 => self.leave_or_delete_pool(a),
            17 | 18 => {
                let name = ODD_NAMES[a as usize % ODD_NAMES.len()].to_owned();
                let module = ModuleId(intern(&mut self.trace.modules, name));
                self.push(if what == 17 {
                    Op::ModuleEnter(module)
                } else {
                    Op::ModuleLeave(module)
                });
            }
            19 => {
                let direction = [Direction::HostToDevice, Direction::DeviceToHost][b as usize % 2];
                let transfer = Transfer { size_bytes: 1 + a % 4096, direction };
                let id = intern(&mut self.trace.transfers, transfer);
                self.push(Op::Transfer(TransferId(id)));
            }
            20 => {
                let known = [
                    "expandable_segments:True",
                    "",
                    "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:20",
                    "max_split_size_mb:20, expandable_segments:False # both",
                    "\"",
                ];
                let settings = known[a as usize % known.len()].to_owned();
                let id = intern(&mut self.trace.settings_changes, settings);
                self.push(Op::Settings(SettingsId(id)));
            }
            _ => {}
        }
    }

    fn take_live(&mut self, number: u64) -> Option<BlockId> {
        let len = self.live.len();
        (len > 0).then(|| self.live.remove(number as usize % len))
    }

    fn block(&mut self, a: u64, b: u64) -> BlockId {
        let sizes = [1, 512, 100 << 20, (1 << 60) - 1, 1 + a % (1 << 34)];
        // A few blocks of the largest size fit into what may live at once, not any number.
        let huge = self.live.len() + self.deferred.len() >= 7;
        let size_bytes = sizes[if huge { 4 } else { b as usize % sizes.len() }];
        let handles = [0, 0, 1, 0x55aa_0000_1234, u64::MAX];
        let handle = handles[a as usize % handles.len()];
        let block = Block {
            size_bytes,
            stream: self.trace.stream_with_handle(handle),
            site: SiteId::NONE,
            name: NameId::NONE,
            role: Role::ALL[(a ^ b) as usize % Role::ALL.len()],
        };
        self.trace.blocks.push(block);
        BlockId(self.trace.blocks.len() as u32 - 1)
    }

    /// One of eight pools: every mix of kind and properties.
    fn pool(&mut self, number: u64) -> PoolId {
        let pool = Pool {
            name: ODD_NAMES[number as usize % 8].to_owned(),
            kind: if number & 1 == 1 { PoolKind::Capture } else { PoolKind::MemPool },
            no_split: number & 2 == 2,
            use_on_oom: number & 4 == 4,
        };
        PoolId(intern(&mut self.trace.pools, pool))
    }

    fn enter_pool(&mut self, a: u64) {
        let pool = self.pool(a);
        if !self.entered.contains(&pool) {
            self.entered.push(pool);
            self.push(Op::PoolEnter(pool));
        }
    }

    fn leave_or_delete_pool(&mut self, a: u64) {
        let pools = &self.trace.pools;
        // Only graphs may be deleted while another pool is entered.
        let may_go = |pool: &PoolId| match pools[pool.index()].kind {
            PoolKind::MemPool => self.entered.is_empty(),
            PoolKind::Capture => !self.entered.contains(pool),
        };
        match (0..pools.len() as u32).map(PoolId).find(may_go) {
            Some(pool) if a.is_multiple_of(3) => self.push(Op::PoolDelete(pool)),
            _ => {
                if let Some(pool) = self.entered.pop() {
                    self.push(Op::PoolLeave(pool));
                }
            }
        }
    }

    /// What the recorded allocator did inside the event, before what the event itself says.
    fn record(&mut self, event: u32, deferred_before: &[(BlockId, bool)], seed: u64) {
        if self.text {
            return;
        }
        let stream = StreamId(0);
        if seed.is_multiple_of(4) && !self.trace.streams.is_empty() {
            let kinds = [
                RecordedKind::SegmentAlloc,
                RecordedKind::SegmentFree,
                RecordedKind::SegmentMap,
                RecordedKind::SegmentUnmap,
                RecordedKind::Oom,
            ];
            let kind = kinds[(seed >> 4) as usize % kinds.len()];
            let address = seed >> 3;
            let action = RecordedAction {
                event,
                kind,
                block: BlockId::NONE,
                stream,
                address,
                size_bytes: seed,
            };
            self.actions.push(action);
        }
        let open = deferred_before.iter().find(|(_, completed)| !completed);
        if let (true, Some(&(block, _))) = (seed.is_multiple_of(3), open) {
            let kind = RecordedKind::FreeCompleted;
            self.actions.push(RecordedAction {
                event,
                kind,
                block,
                stream,
                address: 4,
                size_bytes: 2,
            });
            if let Some(entry) = self.deferred.iter_mut().find(|entry| entry.0 == block) {
                entry.1 = true;
            }
        }
    }
}

/// Gives names as a person would: used again once freed, and none where none is needed.
fn name_for_text(trace: &mut Trace) {
    let mut spoken_of = vec![false; trace.blocks.len()];
    for event in &trace.events {
        if let Op::Free(b) | Op::Defer(b) | Op::Done(b) | Op::Access(b) = event.op {
            spoken_of[b.index()] = true;
        }
    }
    let mut free_slots: Vec<usize> = (0..200).rev().collect();
    let mut slot_of = vec![0; trace.blocks.len()];
    for event in &trace.events {
        match event.op {
            Op::Alloc(b) if spoken_of[b.index()] => {
                let slot = free_slots.pop().expect("fewer blocks than slots");
                slot_of[b.index()] = slot;
                let name = match ODD_NAMES.get(slot) {
                    Some(name) => (*name).to_owned(),
                    None => format!("block.{slot}"),
                };
                trace.blocks[b.index()].name = NameId(intern(&mut trace.names, name));
            }
            Op::Free(b) | Op::Done(b) => free_slots.push(slot_of[b.index()]),
            _ => {}
        }
    }
}

/// Entries that no event speaks of, and a site, name and role for some blocks.
fn add_unused_and_sites(trace: &mut Trace, seed: u64) {
    let frame = |i: u32| Frame { name: format!("f{i}"), filename: "m.py".into(), line: i };
    if seed & 16 == 16 {
        trace.sites.frames = (0..4).map(frame).collect();
        trace.sites.stacks = vec![vec![FrameId(1), FrameId(0)], vec![], vec![FrameId(3)]];
        for (i, block) in trace.blocks.iter_mut().enumerate() {
            block.site = if i % 4 == 3 { SiteId::NONE } else { SiteId(i as u32 % 3) };
        }
    }
    if seed & 32 == 32 {
        trace.names = ODD_NAMES.iter().map(|&name| name.to_owned()).collect();
        for (i, block) in trace.blocks.iter_mut().enumerate() {
            block.name = if i % 3 == 2 { NameId::NONE } else { NameId(i as u32 % 12) };
        }
    }
    if seed & 64 == 64 {
        trace.phases.insert(0, "unused".into());
        for event in &mut trace.events {
            if let Op::Mark(phase) = &mut event.op {
                phase.0 += 1;
            }
        }
        trace.settings_changes.insert(0, "unused".into());
        for event in &mut trace.events {
            if let Op::Settings(settings) = &mut event.op {
                settings.0 += 1;
            }
        }
        let stream = trace.stream_with_handle(77);
        let (name, role) = (NameId::NONE, Role::Optimizer);
        trace.blocks.push(Block { size_bytes: 99, stream, site: SiteId::NONE, name, role });
        if let Some(recording) = &mut trace.recording {
            recording.block_addresses.push(0xabc);
        }
    }
}

/// Turns the block ids around, so that they do not ascend with the events.
fn scramble(trace: &mut Trace) {
    let count = trace.blocks.len() as u32;
    let turned = |block: BlockId| BlockId(count - 1 - block.0);
    trace.blocks.reverse();
    if let Some(recording) = &mut trace.recording {
        recording.block_addresses.reverse();
        for action in &mut recording.actions {
            action.block = action.block.some().map_or(BlockId::NONE, turned);
        }
    }
    for block in trace.start.iter_mut().flat_map(|start| &mut start.blocks) {
        block.block = block.block.some().map_or(BlockId::NONE, turned);
    }
    for event in &mut trace.events {
        event.op = match event.op {
            Op::Alloc(b) => Op::Alloc(turned(b)),
            Op::Attempt(b) => Op::Attempt(turned(b)),
            Op::Free(b) => Op::Free(turned(b)),
            Op::Defer(b) => Op::Defer(turned(b)),
            Op::Done(b) => Op::Done(turned(b)),
            Op::Access(b) => Op::Access(turned(b)),
            other => other,
        };
    }
}

/// A model with a unit of every kind, names that need quotes among them.
fn any_model() -> Model {
    let parameter =
        |name: &str, elements, frozen| ModelParameter { name: name.to_owned(), elements, frozen };
    let unit = |module: &str, leaf, host, parameters| ModelUnit {
        module: module.to_owned(),
        leaf,
        host,
        parameters,
    };
    Model {
        ranks: 8,
        local_ranks: 4,
        units: vec![
            unit("embed", true, false, vec![parameter("embed.weight", 7, false)]),
            unit("a b#c", false, true, vec![parameter("w x", 1 << 40, true)]),
        ],
        options: [("chunk_size".to_owned(), "64 Mi".to_owned())].into(),
    }
}
