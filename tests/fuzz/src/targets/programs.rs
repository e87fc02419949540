//! Programs made of bytes, through every allocator.
//!
//! Four bytes are an event, so that a change of one byte changes one thing and taking four away takes
//! one event away. The first four say what the device and the allocators are told, the next which
//! allocators run: all of them take too long for one input. What would make no sense (a free of
//! nothing) is left out: every input is a valid program.

use std::sync::Arc;

use fraglab::alloc::planned::PlanFiles;
use fraglab::alloc::registry;
use fraglab::alloc::spec::AllocSpec;
use fraglab::engine::RunOptions;
use fraglab::plan::stalloc::files::{PlanFile, PlannedRequest};
use fraglab::trace::{
    AddressPolicy, Block, DeviceCall, Event, Fault, FaultWhen, Op, Pool, PoolKind, Role, Trace,
    validate,
};
use fraglab::units::{BlockId, MIB, NameId, PhaseId, PoolId, SettingsId, SiteId};

use super::traces::{options, replay_with};

/// Longer inputs are cut.
const EVENTS_MAX: usize = 120;

/// One input runs every so manyth allocator.
const GROUPS: usize = 4;

/// Sizes around every border that allocators care about; a byte of the event changes them a little.
const SIZES: [u64; 16] = [
    1,
    511,
    513,
    4096,
    100_000,
    MIB - 512,
    MIB,
    MIB + 1,
    2 * MIB,
    5 * MIB,
    10 * MIB - 1,
    10 * MIB,
    20 * MIB + 1,
    33 * MIB,
    64 * MIB,
    130 * MIB,
];

/// Allocators with parameters under which they are something else.
const VARIANTS: [&str; 12] = [
    "caching+max_split_size_mb=21+garbage_collection_threshold=0.5",
    "caching+roundup_power2_divisions=4+max_non_split_rounding_mb=30",
    "expandable+garbage_collection_threshold=0.3",
    "stitch+policy=best",
    "stitch+policy=best+piece=2MiB+slack=0+view_limit=0",
    "stitch+policy=shipped",
    "stitch+frag_limit=2MiB",
    "stitch+policy=shipped+frag_limit=2MiB+re_alloc=true+auto_gc=200MiB",
    "planned+trace=itself",
    "planned+mode=stalloc+plan=itself",
    "planned+mode=stalloc+plan=itself+faithful=false+inner=caching",
    "chunk",
];

/// Settings that a program may give.
const SETTINGS: [&str; 4] =
    ["", "max_split_size_mb:40", "garbage_collection_threshold:0.4", "expandable_segments:True"];

/// A program through some of the allocators, with a checker that shares no code with any of them.
pub(super) fn program(data: &[u8]) {
    let Some((&[size, limit, fault, flags, group], events)) = data.split_first_chunk() else {
        return;
    };
    let trace = Builder::default().build(events);
    validate(&trace).expect("the builder makes valid programs");
    let mut options = options();
    options.capacity_bytes = Some(u64::from(size) * 8 * MIB + 2 * MIB);
    options.limit_bytes = (limit & 1 == 1).then(|| u64::from(limit >> 1) * 8 * MIB);
    options.address_policy = Some(
        [AddressPolicy::Chunks, AddressPolicy::Ascending, AddressPolicy::Descending]
            [usize::from(flags) % 3],
    );
    options.mappings_max = (flags & 8 == 8).then(|| u64::from(flags >> 4) * 4);
    options.stop_on_oom = flags & 4 == 4;
    know_itself(&mut options, &trace);
    let trace = with_fault(trace, fault);
    let names = registry::list().into_iter().map(|info| info.name);
    for spec in names.chain(VARIANTS).skip(usize::from(group) % GROUPS).step_by(GROUPS) {
        let spec: AllocSpec = spec.parse().expect("a specification");
        replay_with(&trace, &spec, &options);
    }
}

/// Allocators that plan ahead know the program, and a plan that puts its requests one behind the
/// other, round and round.
fn know_itself(options: &mut RunOptions, trace: &Trace) {
    let static_reserved_bytes = 200 * MIB;
    let mut end = 0;
    let mut place = |block: &Block| {
        let size_bytes = block.size_bytes;
        let rounded_bytes = size_bytes.next_multiple_of(512);
        let start = if end + rounded_bytes > static_reserved_bytes { 0 } else { end };
        end = start + rounded_bytes;
        PlannedRequest { offset_bytes: Some(start), size_bytes }
    };
    let requests: Vec<PlannedRequest> = trace.blocks.iter().map(&mut place).collect();
    let steady_requests = requests.len() as u64 / 2;
    let plan = PlanFile {
        unreleased: vec![0],
        static_max_allocated_bytes: static_reserved_bytes,
        static_reserved_bytes,
        first_requests: requests.len() as u64 - steady_requests,
        steady_requests,
        var_peak_bytes: 4096,
        requests,
    };
    let plan = PlanFiles { source: "input".to_owned(), plan, ..PlanFiles::default() };
    options.plans.insert("itself".to_owned(), Arc::new(plan));
    options.profiles.insert("itself".to_owned(), Arc::new(trace.clone()));
}

/// Makes a call of the device fail: which, and the how manyth; or all of a kind.
fn with_fault(mut trace: Trace, byte: u8) -> Trace {
    let call = DeviceCall::ALL[usize::from(byte) % DeviceCall::ALL.len()];
    let nth = byte as u64 / DeviceCall::ALL.len() as u64;
    match nth {
        0 => {}
        1 => trace.header.faults = vec![Fault { call, when: FaultWhen::All }],
        nth => trace.header.faults = vec![Fault { call, when: FaultWhen::Nth(nth - 1) }],
    }
    trace
}

#[derive(Default)]
struct Builder {
    trace: Trace,
    live: Vec<BlockId>,
    deferred: Vec<BlockId>,
    entered: Vec<PoolId>,
}

impl Builder {
    fn build(mut self, events: &[u8]) -> Trace {
        for handle in [0, 1, 0x55aa_0000_1234] {
            self.trace.stream_with_handle(handle);
        }
        self.trace.phases = (0..4).map(|step| format!("step{step}.forward")).collect();
        self.trace.settings_changes = SETTINGS.map(str::to_owned).to_vec();
        for event in events.chunks_exact(4).take(EVENTS_MAX) {
            self.event(event[0], event[1], event[2], event[3]);
        }
        self.trace
    }

    fn push(&mut self, op: Op) {
        let time_ns = 1000 * self.trace.events.len() as u64;
        self.trace.events.push(Event { time_ns, op });
    }

    fn event(&mut self, what: u8, a: u8, b: u8, c: u8) {
        match what % 16 {
            0..=5 => {
                let block = self.block(a, b, c);
                self.live.push(block);
                self.push(Op::Alloc(block));
            }
            6..=8 => {
                if let Some(block) = take(&mut self.live, a) {
                    self.push(Op::Free(block));
                }
            }
            9 => {
                if let Some(block) = take(&mut self.live, a) {
                    self.deferred.push(block);
                    self.push(Op::Defer(block));
                }
            }
            10 => {
                if let Some(block) = take(&mut self.deferred, a) {
                    self.push(Op::Done(block));
                }
            }
            11 => {
                let block = self.block(a, b, c);
                self.push(Op::Attempt(block));
            }
            12 => self.push(Op::EmptyCache),
            13 => self.pool(a, b),
            14 => self.push(Op::Mark(PhaseId(u32::from(a) % 4))),
            _ => self.push(Op::Settings(SettingsId(u32::from(a) % SETTINGS.len() as u32))),
        }
    }

    /// A new block: its size is one of the usual ones, and a little more or less.
    fn block(&mut self, size: u8, more: u8, stream: u8) -> BlockId {
        let usual = SIZES[usize::from(size) % SIZES.len()];
        let size_bytes = match size / 16 {
            0..=7 => usual,
            8..=11 => usual + u64::from(more),
            12 => usual.saturating_sub(u64::from(more)).max(1),
            13 => usual + u64::from(more) * 512,
            14 => usual + u64::from(more) * MIB / 4,
            _ => 1 + u64::from(more) * 100_003,
        };
        // Mostly the default stream: others see each other's memory only after a wait.
        let stream = if stream < 160 { 0 } else { u64::from(stream % 3) };
        let stream = self.trace.stream_with_handle([0, 1, 0x55aa_0000_1234][stream as usize]);
        let block = Block {
            size_bytes,
            stream,
            site: SiteId::NONE,
            name: NameId::NONE,
            role: Role::Unknown,
        };
        self.trace.blocks.push(block);
        BlockId(self.trace.blocks.len() as u32 - 1)
    }

    /// Enters a pool, leaves the innermost, or deletes one.
    fn pool(&mut self, what: u8, which: u8) {
        match what % 3 {
            0 => {
                let pool = self.a_pool(which);
                if !self.entered.contains(&pool) {
                    self.entered.push(pool);
                    self.push(Op::PoolEnter(pool));
                }
            }
            1 => {
                if let Some(pool) = self.entered.pop() {
                    self.push(Op::PoolLeave(pool));
                }
            }
            _ => {
                let pool = self.a_pool(which);
                let kind = self.trace.pools[pool.index()].kind;
                let is_free = match kind {
                    PoolKind::MemPool => self.entered.is_empty(),
                    PoolKind::Capture => !self.entered.contains(&pool),
                };
                if is_free {
                    self.push(Op::PoolDelete(pool));
                }
            }
        }
    }

    /// One of eight pools: every mix of kind and properties.
    fn a_pool(&mut self, which: u8) -> PoolId {
        let which = which % 8;
        let name = format!("p{which}");
        let found = self.trace.pools.iter().position(|pool| pool.name == name);
        let at = found.unwrap_or_else(|| {
            self.trace.pools.push(Pool {
                name,
                kind: if which & 4 == 4 { PoolKind::Capture } else { PoolKind::MemPool },
                no_split: which & 1 == 1,
                use_on_oom: which & 2 == 2,
            });
            self.trace.pools.len() - 1
        });
        PoolId(at as u32)
    }
}

fn take(blocks: &mut Vec<BlockId>, which: u8) -> Option<BlockId> {
    (!blocks.is_empty()).then(|| blocks.remove(usize::from(which) % blocks.len()))
}
