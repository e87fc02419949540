//! PatrickStar's manager, written down a second time from `specs/patrickstar.md` and from nothing
//! else: slow, literal, with everything that can be derived recomputed each time.
//!
//! ```text
//!   Program ─> acts ─> Model { chunks, tensors' states, blocks } ─> log, S, margin, peaks
//!                         │
//!                         ├─ chunk state   looked up in the states of its tensors
//!                         ├─ bytes         summed over chunks and blocks
//!                         └─ next use      found by scanning all recorded accesses
//! ```
//!
//! Where the spec is silent, the reading taken is marked "Reading".

use std::collections::BTreeMap;

use super::program::{Act, Program, Stage};

/// What is used of PatrickStar's options (spec 2.4, 5), and of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) chunk_elements: u64,
    pub(crate) gpu_bytes: u64,
    pub(crate) host_bytes: u64,
    /// World size.
    pub(crate) ranks: u64,
    /// Ranks that share the host.
    pub(crate) local_ranks: u64,
    pub(crate) rank: u64,
    /// `overall_gpu_mem_ratio`, in thousandths; so are the other ratios.
    pub(crate) overall_gpu: i128,
    /// `overall_cpu_mem_ratio`.
    pub(crate) overall_cpu: i128,
    /// `warmup_gpu_chunk_mem_ratio`.
    pub(crate) warmup: i128,
    /// `margin_use_ratio`.
    pub(crate) margin_use: i128,
    pub(crate) hybrid: bool,
    /// `with_mem_saving_com`.
    pub(crate) saving: bool,
    /// `with_mem_cache`.
    pub(crate) cache: bool,
    /// `with_async_mem_monitor`.
    pub(crate) monitor: bool,
    /// `with_static_partition`.
    pub(crate) fixed_split: bool,
    /// `use_fake_dist`: the local ranks share the GPU.
    pub(crate) shared_gpu: bool,
    pub(crate) quirks: Quirks,
}

/// Behaviour of the real program that a careful reader would call a mistake (spec 7.1, 7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quirks {
    /// 7.1 item 1: N² chunks are kept free in backward.
    pub(crate) backward_reserve: bool,
    /// 7.2: a move to the GPU leaves its bytes behind on the host's books.
    pub(crate) phantom: bool,
    /// 7.1 item 4: the host's non-chunk bytes are divided by W twice.
    pub(crate) host_divided: bool,
    /// 7.1 item 5: an exact margin loses a group.
    pub(crate) strict_margin: bool,
    /// 7.1 item 6: written back as fp32 but for the last chunk, through a buffer on the GPU.
    pub(crate) wide_write_back: bool,
    /// 7.1 item 7: a budget below the need evicts nothing; mended, it evicts all that may go.
    pub(crate) over_budget: bool,
    /// 7.1 item 8: the first step is the whole warm-up, even if its ADAM was skipped; mended, the
    /// warm-up goes on to the end of the first step with ADAM.
    pub(crate) skipped_adam: bool,
    /// 7.1 item 9: with the cache, a step without ADAM leaves a buffer on the host's books.
    pub(crate) leak: bool,
}

impl Quirks {
    pub(crate) const ALL: Quirks = Quirks {
        backward_reserve: true,
        phantom: true,
        host_divided: true,
        strict_margin: true,
        wide_write_back: true,
        over_budget: true,
        skipped_adam: true,
        leak: true,
    };
    pub(crate) const COUNT: usize = 8;

    pub(crate) fn all_mut(&mut self) -> [&mut bool; Quirks::COUNT] {
        [
            &mut self.backward_reserve,
            &mut self.phantom,
            &mut self.host_divided,
            &mut self.strict_margin,
            &mut self.wide_write_back,
            &mut self.over_budget,
            &mut self.skipped_adam,
            &mut self.leak,
        ]
    }

    pub(crate) fn switch_on(&mut self, quirk: usize) {
        *self.all_mut()[quirk] = true;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Host,
    Gpu,
}

impl Place {
    fn other(self) -> Place {
        match self {
            Place::Host => Place::Gpu,
            Place::Gpu => Place::Host,
        }
    }
}

/// State of a tensor (spec 1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    Compute,
    Hold,
    HoldAfterForward,
    HoldAfterBackward,
}

/// State of a chunk (spec 1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkState {
    Released,
    Tensors(State),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Half,
    Single,
    Momentum,
    Variance,
}

/// A chunk. Its index in [`Model::chunks`] is its id.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) kind: Kind,
    /// Position in its list.
    pub(crate) number: usize,
    pub(crate) dummy: bool,
    /// (unit, parameter, elements), in order of their places.
    pub(crate) tensors: Vec<(usize, usize, u64)>,
    pub(crate) states: Vec<State>,
    pub(crate) place: Option<Place>,
    pub(crate) pinned: bool,
    /// Tensors that were HOLD when forward ended (spec 1.3).
    unused: usize,
    /// With memory-saving communication: the other ranks have a copy.
    shared: bool,
}

/// What the log tells of; the names are those of the manager's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    ToGpu,
    ToHost,
    Allocate,
    Drop,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    GradientRead,
    WriteBack,
    OverBudget,
    CannotMove,
}

/// A line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) step: u32,
    pub(crate) stage: Stage,
    pub(crate) moment: usize,
    pub(crate) what: What,
    pub(crate) chunk: usize,
    pub(crate) bytes: u64,
    /// Where it happened or where it went.
    pub(crate) place: Place,
}

/// Training stopped: a chunk fits neither here nor there (spec 2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// A count of thousandths of thousandths of bytes, so that two ratios multiply exactly.
const BYTE: i128 = 1_000_000;

/// Non-model data on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Other {
    Block(usize),
    /// Temporary fp16 gradient of (unit, parameter) (spec 1.2).
    Gradient(usize, usize),
    /// Buffer of ADAM for fp32 parameters (spec 3.3). Reading: it never goes through the cache, for
    /// else more than six chunks would be evicted in spec 5.12.
    WriteBuffer,
}

/// Peaks in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peaks {
    pub(crate) gpu: u64,
    pub(crate) gpu_chunks: u64,
    pub(crate) host: u64,
}

pub(crate) struct Model {
    pub(crate) options: Options,
    program: Program,
    pub(crate) chunks: Vec<Chunk>,
    /// Chunks of the fp16 list, dummies with them.
    pub(crate) halves: usize,
    others: BTreeMap<Other, u64>,
    /// Idle payloads that the memory cache keeps (spec 4.5), as (place, bytes).
    idle: Vec<(Place, u64)>,
    /// Buffers of ADAM while it runs (spec 3.3), as (place, bytes), that go through the cache.
    buffers: Vec<(Place, u64)>,
    /// Torch-based parameters on the host.
    torch_bytes: u64,
    phantom_bytes: u64,
    /// What is on the host's books and nowhere else.
    leaked_bytes: u64,
    pub(crate) step: u32,
    pub(crate) stage: Stage,
    pub(crate) moment: usize,
    /// Moments of the iteration before; nothing in the first.
    pub(crate) length: Option<usize>,
    warmup: bool,
    /// ADAM has run in this step.
    updated: bool,
    /// S of spec 2.2, by moment.
    pub(crate) gpu_list: Vec<i128>,
    host_list: Vec<i128>,
    /// Highest total since the last tick.
    high_bytes: u64,
    /// (chunk, place, moment), in warm-up.
    accesses: Vec<(usize, Place, usize)>,
    /// m as (numerator, denominator), after each backward pass.
    pub(crate) margins: Vec<(i128, i128)>,
    pub(crate) log: Vec<Entry>,
    pub(crate) peaks: Peaks,
    /// Peaks since the step began.
    pub(crate) step_peaks: Vec<Peaks>,
    pub(crate) stopped: bool,
}

/// Packs units into chunks of one list (spec 1.4): tensors of each chunk.
///
/// Nothing if a unit does not fit an empty chunk.
pub(crate) fn pack(program: &Program, capacity: u64) -> Option<Vec<Vec<(usize, usize, u64)>>> {
    let mut chunks: Vec<Vec<(usize, usize, u64)>> = Vec::new();
    for (unit, module) in program.units.iter().enumerate().filter(|(_, module)| !module.host) {
        let list: u64 = module.parameters.iter().sum();
        if list > capacity {
            return None;
        }
        let end: Option<u64> = chunks.last().map(|last| last.iter().map(|tensor| tensor.2).sum());
        if end.is_none_or(|end| end + list > capacity) {
            chunks.push(Vec::new());
        }
        let tensors = module.parameters.iter().enumerate();
        let tensors = tensors.map(|(parameter, &elements)| (unit, parameter, elements));
        chunks.last_mut().expect("pushed if there was none").extend(tensors);
    }
    Some(chunks)
}

impl Model {
    /// The model built: chunks have their ids, nothing has a payload. Nothing if a unit fits no
    /// chunk.
    pub(crate) fn new(program: &Program, options: &Options) -> Option<Model> {
        let packed = pack(program, options.chunk_elements)?;
        let real = packed.len();
        let halves = real.next_multiple_of(options.ranks as usize);
        let chunk = |kind, number, tensors: &[(usize, usize, u64)]| Chunk {
            kind,
            number,
            dummy: tensors.is_empty(),
            tensors: tensors.to_vec(),
            states: vec![State::Free; tensors.len().max(1)],
            place: None,
            pinned: false,
            unused: 0,
            shared: false,
        };
        let mut chunks = Vec::new();
        for (number, tensors) in packed.iter().enumerate() {
            chunks.push(chunk(Kind::Half, number, tensors));
            chunks.push(chunk(Kind::Single, number, tensors));
        }
        chunks.extend((real..halves).map(|number| chunk(Kind::Half, number, &[])));
        for (number, tensors) in packed.iter().enumerate() {
            chunks.push(chunk(Kind::Momentum, number, tensors));
            chunks.push(chunk(Kind::Variance, number, tensors));
        }
        let host_units = program.units.iter().filter(|unit| unit.host);
        let elements: u64 = host_units.flat_map(|unit| &unit.parameters).sum();
        Some(Model {
            options: options.clone(),
            program: program.clone(),
            chunks,
            halves,
            others: BTreeMap::new(),
            idle: Vec::new(),
            buffers: Vec::new(),
            torch_bytes: 16 * elements,
            phantom_bytes: 0,
            leaked_bytes: 0,
            step: 0,
            stage: Stage::Init,
            moment: 0,
            length: None,
            warmup: true,
            updated: false,
            gpu_list: Vec::new(),
            host_list: Vec::new(),
            high_bytes: 0,
            accesses: Vec::new(),
            margins: Vec::new(),
            log: Vec::new(),
            peaks: Peaks::default(),
            step_peaks: Vec::new(),
            stopped: false,
        })
    }

    /// Runs all acts, or up to where training stops.
    pub(crate) fn run(&mut self) {
        let acts = self.program.acts();
        let outcome =
            self.construct().and_then(|()| acts.iter().try_for_each(|&act| self.act(act)));
        self.stopped = outcome.is_err();
        if self.stage == Stage::Backward {
            self.end_backward();
        }
    }

    fn act(&mut self, act: Act) -> Result<(), Stopped> {
        match act {
            Act::Stage(step, Stage::Forward) => return self.begin_forward(step),
            Act::Stage(_, Stage::Backward) => self.begin_backward(),
            Act::Stage(_, Stage::Adam) => return self.adam(),
            Act::Stage(_, Stage::Init) => {}
            Act::Enter { unit, backward } => return self.enter(unit, backward),
            Act::Leave { unit, backward } => return self.leave(unit, backward),
            Act::Alloc { block, bytes } => self.other_alloc(Other::Block(block), bytes),
            Act::Free { block } => self.other_free(Other::Block(block)),
        }
        Ok(())
    }

    // -- bytes ---------------------------------------------------------------------------------

    /// F of the spec.
    pub(crate) fn half_bytes(&self) -> u64 {
        2 * self.options.chunk_elements
    }

    fn payload_bytes(&self, chunk: usize) -> u64 {
        let wide = self.chunks[chunk].kind != Kind::Half;
        self.half_bytes() * if wide { 2 } else { 1 }
    }

    fn owned(&self, chunk: usize) -> bool {
        self.chunks[chunk].number as u64 % self.options.ranks == self.options.rank
    }

    /// Bytes of payloads in a place.
    pub(crate) fn chunk_bytes(&self, place: Place) -> u64 {
        let there = (0..self.chunks.len()).filter(|&id| self.chunks[id].place == Some(place));
        there.map(|id| self.payload_bytes(id)).sum()
    }

    fn idle_bytes(&self, place: Place) -> u64 {
        self.idle.iter().filter(|idle| idle.0 == place).map(|idle| idle.1).sum()
    }

    /// Bytes of ADAM's buffers in a place.
    fn buffer_bytes(&self, place: Place) -> u64 {
        self.buffers.iter().filter(|buffer| buffer.0 == place).map(|buffer| buffer.1).sum()
    }

    /// Chunk bytes as budgets count them: with the memory cache, with all that went through it.
    pub(crate) fn counted_bytes(&self, place: Place) -> u64 {
        let chunks = self.chunk_bytes(place);
        if !self.options.cache {
            return chunks;
        }
        let leaked = if place == Place::Host { self.leaked_bytes } else { 0 };
        chunks + self.idle_bytes(place) + self.buffer_bytes(place) + leaked
    }

    fn place_bytes(&self, place: Place) -> u64 {
        self.chunk_bytes(place) + self.idle_bytes(place) + self.buffer_bytes(place)
    }

    pub(crate) fn gpu_bytes(&self) -> u64 {
        self.place_bytes(Place::Gpu) + self.others.values().sum::<u64>()
    }

    fn host_bytes(&self) -> u64 {
        self.place_bytes(Place::Host) + self.torch_bytes
    }

    /// Called after whatever may have grown.
    fn note_peaks(&mut self) {
        let now = Peaks {
            gpu: self.gpu_bytes(),
            gpu_chunks: self.counted_bytes(Place::Gpu),
            host: self.host_bytes(),
        };
        self.high_bytes = self.high_bytes.max(now.gpu);
        let Model { peaks, step_peaks, .. } = self;
        for peaks in std::iter::once(peaks).chain(step_peaks.last_mut()) {
            peaks.gpu = peaks.gpu.max(now.gpu);
            peaks.gpu_chunks = peaks.gpu_chunks.max(now.gpu_chunks);
            peaks.host = peaks.host.max(now.host);
        }
    }

    fn other_alloc(&mut self, other: Other, bytes: u64) {
        assert!(self.others.insert(other, bytes).is_none());
        self.note_peaks();
    }

    fn other_free(&mut self, other: Other) {
        assert!(self.others.remove(&other).is_some());
    }

    fn note(&mut self, what: What, chunk: usize, bytes: u64, place: Place) {
        let Model { step, stage, moment, .. } = *self;
        self.log.push(Entry { step, stage, moment, what, chunk, bytes, place });
    }

    // -- budgets (spec 2.3) --------------------------------------------------------------------

    /// G in units of [`BYTE`].
    fn gpu_quota(&self) -> i128 {
        let sharers = if self.options.shared_gpu { self.options.local_ranks } else { 1 };
        i128::from(self.options.gpu_bytes) * self.options.overall_gpu * 1000 / i128::from(sharers)
    }

    fn gpu_budget(&self) -> i128 {
        let quota = self.gpu_quota();
        let half = i128::from(self.half_bytes()) * BYTE;
        match self.stage {
            Stage::Init => quota,
            Stage::Adam => quota - 8 * half,
            Stage::Forward | Stage::Backward => {
                if self.warmup || self.options.fixed_split {
                    return quota * self.options.warmup / 1000;
                }
                let now = self.gpu_list[self.moment];
                let next = self.gpu_list[self.wrapped(self.moment + 1)];
                let copies = if self.options.saving { 1 } else { self.options.ranks as i128 };
                let doubled = self.stage == Stage::Backward && self.options.quirks.backward_reserve;
                let reserve = half * if doubled { copies * copies } else { copies };
                (quota - now * BYTE).min(quota - next * BYTE) - reserve
            }
        }
    }

    /// Reading: every moment from T on is moment 0, also after ADAM's own tick.
    fn wrapped(&self, moment: usize) -> usize {
        if moment >= self.length.expect("after warm-up") { 0 } else { moment }
    }

    fn host_budget(&self) -> i128 {
        let Options { host_bytes, overall_cpu, local_ranks, .. } = self.options;
        let quota = i128::from(host_bytes) * overall_cpu * 1000 / i128::from(local_ranks);
        let most = self.host_most() * BYTE;
        if !self.options.quirks.host_divided {
            return quota - most;
        }
        let passes = matches!(self.stage, Stage::Forward | Stage::Backward);
        if !passes || self.warmup || self.options.fixed_split {
            return quota;
        }
        quota - most / i128::from(local_ranks)
    }

    /// What the host's budget takes for non-chunk memory, in bytes.
    pub(crate) fn host_most(&self) -> i128 {
        self.host_list.iter().copied().max().unwrap_or(0)
    }

    pub(crate) fn budget(&self, place: Place) -> i128 {
        match place {
            Place::Gpu => self.gpu_budget(),
            Place::Host => self.host_budget(),
        }
    }

    fn remaining(&self, place: Place) -> i128 {
        self.budget(place) - i128::from(self.counted_bytes(place)) * BYTE
    }

    // -- eviction (spec 2.5, 3.1) --------------------------------------------------------------

    pub(crate) fn chunk_state(&self, chunk: usize) -> ChunkState {
        let Chunk { place, states, .. } = &self.chunks[chunk];
        if place.is_none() {
            return ChunkState::Released;
        }
        let order =
            [State::Compute, State::Hold, State::HoldAfterForward, State::HoldAfterBackward];
        let first = order.into_iter().find(|state| states.contains(state));
        ChunkState::Tensors(first.unwrap_or(State::Free))
    }

    fn next_use(&self, chunk: usize, place: Place) -> usize {
        if self.warmup {
            return 0;
        }
        let length = self.length.expect("after warm-up");
        let here = self.accesses.iter().filter(|access| (access.0, access.1) == (chunk, place));
        let moments: Vec<usize> = here.map(|access| access.2).collect();
        let later = moments.iter().copied().filter(|&moment| moment > self.moment).min();
        let again = moments.iter().min().map(|first| length + first);
        later.or(again).unwrap_or(2 * length)
    }

    /// Chunks that may leave a place, the first to leave first.
    fn candidates(&self, place: Place) -> Vec<usize> {
        let movable = |&chunk: &usize| {
            let state = self.chunk_state(chunk);
            self.chunks[chunk].place == Some(place)
                && !self.chunks[chunk].pinned
                && !matches!(
                    state,
                    ChunkState::Released
                        | ChunkState::Tensors(State::Compute)
                        | ChunkState::Tensors(State::Free)
                )
        };
        let mut list: Vec<usize> = (0..self.chunks.len()).filter(movable).collect();
        list.sort_by_key(|&chunk| (std::cmp::Reverse(self.next_use(chunk, place)), chunk));
        list
    }

    /// Says whether it was enough. Reading: if all that may leave are too few, all leave.
    fn evict(&mut self, place: Place, extra: i128) -> Result<bool, Stopped> {
        let mut left = extra;
        for chunk in self.candidates(place) {
            if left <= 0 {
                break;
            }
            left -= i128::from(self.payload_bytes(chunk)) * BYTE;
            let bytes = self.payload_bytes(chunk);
            if self.remaining(place.other()) < i128::from(bytes) * BYTE {
                self.note(What::CannotMove, chunk, bytes, place.other());
                return Err(Stopped);
            }
            self.relocate(chunk, place.other());
        }
        Ok(left <= 0)
    }

    fn prepare(&mut self, place: Place, chunk: usize) -> Result<(), Stopped> {
        let bytes = self.payload_bytes(chunk);
        let need = i128::from(bytes) * BYTE;
        if self.budget(place) < need {
            self.note(What::OverBudget, chunk, bytes, place);
            if self.options.quirks.over_budget {
                return Ok(());
            }
            self.evict(place, i128::MAX)?;
            return Ok(());
        }
        // Reading: too little that may leave is a warning too, and no error.
        let extra = need - self.remaining(place);
        if !self.evict(place, extra)? {
            self.note(What::OverBudget, chunk, bytes, place);
        }
        Ok(())
    }

    /// Spec 2.5: makes room for the peak of the next moment.
    fn adjust(&mut self) -> Result<(), Stopped> {
        if self.warmup {
            return Ok(());
        }
        let next = self.gpu_list[self.wrapped(self.moment + 1)];
        let room = self.gpu_quota() - next * BYTE;
        self.evict(Place::Gpu, i128::from(self.counted_bytes(Place::Gpu)) * BYTE - room)?;
        Ok(())
    }

    // -- payloads ------------------------------------------------------------------------------

    fn take(&mut self, place: Place, bytes: u64) {
        let found = self.idle.iter().position(|&idle| idle == (place, bytes));
        if let Some(found) = found {
            self.idle.remove(found);
        }
    }

    fn give(&mut self, place: Place, bytes: u64) {
        let alike = self.idle.iter().filter(|&&idle| idle == (place, bytes)).count();
        if self.options.cache && alike < 2 {
            self.idle.push((place, bytes));
        }
    }

    fn allocate(&mut self, chunk: usize, place: Place) {
        let bytes = self.payload_bytes(chunk);
        self.take(place, bytes);
        self.chunks[chunk].place = Some(place);
        self.note(What::Allocate, chunk, bytes, place);
        self.note_peaks();
    }

    fn drop_payload(&mut self, chunk: usize) {
        let bytes = self.payload_bytes(chunk);
        let place = self.chunks[chunk].place.take().expect("only payloads are dropped");
        self.give(place, bytes);
        self.chunks[chunk].states.fill(State::Free);
        self.note(What::Drop, chunk, bytes, place);
    }

    /// Both payloads exist while the copy is made.
    fn relocate(&mut self, chunk: usize, to: Place) {
        let bytes = self.payload_bytes(chunk);
        let from = self.chunks[chunk].place.expect("only payloads move");
        assert_ne!(from, to);
        self.take(to, bytes);
        self.chunks[chunk].place = Some(to);
        self.note_peaks();
        self.give(from, bytes);
        if to == Place::Gpu && !self.options.cache {
            self.phantom_bytes += bytes;
        }
        let what = if to == Place::Gpu { What::ToGpu } else { What::ToHost };
        self.note(what, chunk, bytes, to);
        self.note_peaks();
    }

    /// Brings a chunk to a place, or allocates it there.
    fn bring(&mut self, chunk: usize, place: Place) -> Result<(), Stopped> {
        match self.chunks[chunk].place {
            Some(there) if there == place => {}
            Some(_) => {
                self.prepare(place, chunk)?;
                self.relocate(chunk, place);
            }
            None => {
                self.prepare(place, chunk)?;
                self.allocate(chunk, place);
            }
        }
        Ok(())
    }

    // -- moments (spec 2.1, 2.2) ---------------------------------------------------------------

    fn record(&mut self, chunk: usize, place: Place) {
        if self.warmup {
            self.accesses.push((chunk, place, self.moment));
        }
    }

    fn tick(&mut self) {
        let now = self.gpu_bytes();
        if self.warmup {
            let seen = if self.options.monitor { now.max(self.high_bytes) } else { now };
            let chunks = self.counted_bytes(Place::Gpu);
            let phantom = if self.options.quirks.phantom { self.phantom_bytes } else { 0 };
            let slot = self.moment;
            self.gpu_list.resize(self.gpu_list.len().max(slot + 1), 0);
            self.host_list.resize(self.gpu_list.len(), 0);
            self.gpu_list[slot] = i128::from(seen) - i128::from(chunks);
            self.host_list[slot] = i128::from(self.torch_bytes + phantom);
        }
        self.high_bytes = now;
        self.moment += 1;
    }

    fn begin_forward(&mut self, step: u32) -> Result<(), Stopped> {
        if step > 0 {
            if !self.updated {
                self.skip()?;
            }
            self.length = Some(self.moment);
            self.warmup &= !self.updated && !self.options.quirks.skipped_adam;
            if self.warmup {
                self.gpu_list.clear();
                self.host_list.clear();
                self.accesses.clear();
            }
        }
        self.updated = false;
        self.step = step;
        self.stage = Stage::Forward;
        self.moment = 0;
        self.high_bytes = self.gpu_bytes();
        self.step_peaks.push(Peaks::default());
        self.note_peaks();
        Ok(())
    }

    /// A step ends without ADAM. Reading: as after an overflow, the optimizer was called and its
    /// moment ended, and what was stuck is released.
    fn skip(&mut self) -> Result<(), Stopped> {
        self.end_backward();
        self.begin_adam()?;
        if self.options.cache && self.options.quirks.leak {
            self.leaked_bytes += self.half_bytes();
        }
        Ok(())
    }

    /// The reset of spec 1.3.
    fn begin_backward(&mut self) {
        for chunk in &mut self.chunks {
            if chunk.kind == Kind::Half {
                chunk.unused = chunk.states.iter().filter(|&&s| s == State::Hold).count();
                for state in &mut chunk.states {
                    if *state == State::HoldAfterForward {
                        *state = State::Hold;
                    }
                }
            }
        }
        self.stage = Stage::Backward;
    }

    // -- passes --------------------------------------------------------------------------------

    /// Chunk and place in it of each parameter of a unit in a list.
    fn places(&self, unit: usize, kind: Kind) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        for (id, chunk) in self.chunks.iter().enumerate().filter(|(_, c)| c.kind == kind) {
            for (slot, tensor) in chunk.tensors.iter().enumerate() {
                if tensor.0 == unit {
                    places.push((id, slot));
                }
            }
        }
        places
    }

    fn enter(&mut self, unit: usize, backward: bool) -> Result<(), Stopped> {
        let places = self.places(unit, Kind::Half);
        if places.is_empty() {
            return Ok(());
        }
        for (chunk, slot) in places {
            self.record(chunk, Place::Gpu);
            self.fetch(chunk)?;
            self.bring(chunk, Place::Gpu)?;
            self.chunks[chunk].states[slot] = State::Compute;
            let (_, parameter, elements) = self.chunks[chunk].tensors[slot];
            if backward {
                self.other_alloc(Other::Gradient(unit, parameter), 2 * elements);
            }
        }
        self.tick();
        self.adjust()
    }

    fn leave(&mut self, unit: usize, backward: bool) -> Result<(), Stopped> {
        if backward && self.program.units[unit].leaf {
            return Ok(());
        }
        let target = if backward { State::HoldAfterBackward } else { State::HoldAfterForward };
        for (chunk, slot) in self.places(unit, Kind::Half) {
            self.release(chunk, slot, target)?;
        }
        Ok(())
    }

    fn release(&mut self, chunk: usize, slot: usize, target: State) -> Result<(), Stopped> {
        if target == State::HoldAfterBackward {
            let (unit, parameter, _) = self.chunks[chunk].tensors[slot];
            self.other_free(Other::Gradient(unit, parameter));
        }
        self.chunks[chunk].states[slot] = target;
        self.finish(chunk, target)
    }

    // -- ranks (spec 4) ------------------------------------------------------------------------

    /// Ids of the fp16 chunks that are gathered together with this one.
    fn group(&self, chunk: usize) -> Vec<usize> {
        let ranks = self.options.ranks as usize;
        let number = self.chunks[chunk].number / ranks;
        let halves = (0..self.chunks.len()).filter(|&id| self.chunks[id].kind == Kind::Half);
        halves.filter(|&id| self.chunks[id].number / ranks == number).collect()
    }

    fn hold(&mut self, chunk: usize) {
        for state in &mut self.chunks[chunk].states {
            if *state != State::Compute {
                *state = State::Hold;
            }
        }
    }

    fn fetch(&mut self, chunk: usize) -> Result<(), Stopped> {
        match (self.options.ranks, self.options.saving) {
            (1, _) => Ok(()),
            (_, true) => self.broadcast(chunk),
            (_, false) => self.gather(chunk),
        }
    }

    /// Reading: "accesses before collectives" are those of all chunks that take part.
    fn gather(&mut self, chunk: usize) -> Result<(), Stopped> {
        let group = self.group(chunk);
        if group.iter().all(|&id| self.chunks[id].place.is_some()) {
            return Ok(());
        }
        let (local, remote): (Vec<usize>, Vec<usize>) =
            group.iter().partition(|&&id| self.owned(id));
        for id in local.iter().copied().chain(remote) {
            self.record(id, Place::Gpu);
            self.bring(id, Place::Gpu)?;
            self.chunks[id].pinned = true;
        }
        for &id in &group {
            self.hold(id);
            self.chunks[id].pinned = false;
        }
        let bytes = self.half_bytes() * self.options.ranks;
        self.note(What::AllGather, local[0], bytes, Place::Gpu);
        Ok(())
    }

    fn broadcast(&mut self, chunk: usize) -> Result<(), Stopped> {
        if self.chunks[chunk].shared {
            return Ok(());
        }
        self.bring(chunk, Place::Gpu)?;
        self.hold(chunk);
        self.chunks[chunk].shared = true;
        self.note(What::Broadcast, chunk, self.half_bytes(), Place::Gpu);
        Ok(())
    }

    fn done(&self, chunk: usize, target: State) -> bool {
        let Chunk { states, unused, .. } = &self.chunks[chunk];
        let held = states.iter().filter(|&&state| state == State::Hold).count();
        let others = states.iter().all(|&state| state == target || state == State::Hold);
        others && (held == 0 || held == *unused)
    }

    /// A tensor was released: if that ends the use of its chunk or group, other ranks' are dropped.
    fn finish(&mut self, chunk: usize, target: State) -> Result<(), Stopped> {
        if self.options.ranks == 1 {
            return Ok(());
        }
        let backward = target == State::HoldAfterBackward;
        let group = if self.options.saving { vec![chunk] } else { self.group(chunk) };
        let real: Vec<usize> = group.iter().copied().filter(|&id| !self.chunks[id].dummy).collect();
        if !real.iter().all(|&id| self.done(id, target)) {
            return Ok(());
        }
        if backward {
            self.reduce(chunk, &group)?;
        }
        for id in group {
            self.chunks[id].shared = false;
            if !self.owned(id) {
                self.drop_payload(id);
            }
        }
        Ok(())
    }

    /// Reading: each chunk is pinned when it has come back, not before, as when a group is gathered.
    fn reduce(&mut self, chunk: usize, group: &[usize]) -> Result<(), Stopped> {
        if self.options.saving {
            self.record(chunk, Place::Gpu);
            self.note(What::Reduce, chunk, self.half_bytes(), Place::Gpu);
            return Ok(());
        }
        for &id in group {
            self.record(id, Place::Gpu);
            self.bring(id, Place::Gpu)?;
            self.chunks[id].pinned = true;
        }
        group.iter().for_each(|&id| self.chunks[id].pinned = false);
        let local = group.iter().copied().find(|&id| self.owned(id));
        let bytes = self.half_bytes() * self.options.ranks;
        self.note(What::ReduceScatter, local.expect("every group has one"), bytes, Place::Gpu);
        Ok(())
    }

    // -- construction and ADAM -----------------------------------------------------------------

    fn construct(&mut self) -> Result<(), Stopped> {
        for id in 0..self.chunks.len() {
            let kept = matches!(self.chunks[id].kind, Kind::Half | Kind::Single);
            if kept && !self.chunks[id].dummy && self.owned(id) {
                self.bring(id, Place::Host)?;
                self.chunks[id].states.fill(State::Hold);
            }
        }
        Ok(())
    }

    pub(crate) fn last_margin(&self) -> Option<(i128, i128)> {
        self.margins.last().copied()
    }

    /// m as (numerator, denominator) (spec 2.3).
    fn margin(&self) -> (i128, i128) {
        let Options { ranks, saving, chunk_elements, margin_use, .. } = self.options;
        let half = self.half_bytes() as i128;
        let most = self.gpu_list.iter().copied().max().unwrap_or(0);
        let fetched = if saving { 1 } else { i128::from(ranks) - 1 };
        let need = half * (self.halves as i128 / i128::from(ranks) + fetched);
        let free = self.gpu_quota() - (most + need) * BYTE;
        (margin_use * free, 12 * i128::from(chunk_elements) * BYTE * 1000)
    }

    /// Local fp16 chunks whose ADAM runs, in order.
    pub(crate) fn locals(&self) -> Vec<usize> {
        let real = (0..self.chunks.len()).filter(|&id| {
            self.chunks[id].kind == Kind::Half && !self.chunks[id].dummy && self.owned(id)
        });
        real.collect()
    }

    /// k: groups whose ADAM runs on the GPU.
    pub(crate) fn gpu_groups(&self, margin: (i128, i128)) -> usize {
        let below = |&count: &usize| {
            let count = count as i128 * margin.1;
            if self.options.quirks.strict_margin { count < margin.0 } else { count <= margin.0 }
        };
        (1..=self.locals().len()).filter(below).count()
    }

    fn end_backward(&mut self) -> (i128, i128) {
        let margin = if self.options.hybrid { self.margin() } else { (0, 1) };
        self.margins.push(margin);
        margin
    }

    fn begin_adam(&mut self) -> Result<(), Stopped> {
        self.stage = Stage::Adam;
        self.tick();
        self.adjust()?;
        self.release_stuck()
    }

    fn adam(&mut self) -> Result<(), Stopped> {
        let margin = self.end_backward();
        self.begin_adam()?;
        self.take_buffers(margin.0 > 0);
        let locals = self.locals();
        let groups = self.gpu_groups(margin);
        for (index, &half) in locals.iter().enumerate() {
            let place = if index < groups { Place::Gpu } else { Place::Host };
            let before = index.checked_sub(1).map(|before| locals[before]);
            self.update(half, place, before)?;
        }
        if let Some(&last) = locals.last() {
            self.write_back(last, true);
        }
        for (place, bytes) in std::mem::take(&mut self.buffers) {
            self.give(place, bytes);
        }
        self.others.remove(&Other::WriteBuffer);
        self.updated = true;
        Ok(())
    }

    fn take_buffers(&mut self, reads_to_gpu: bool) {
        let half = self.half_bytes();
        if self.options.quirks.wide_write_back {
            self.other_alloc(Other::WriteBuffer, 2 * half);
        }
        for (used, place) in [(true, Place::Host), (reads_to_gpu, Place::Gpu)] {
            if used {
                self.take(place, half);
                self.buffers.push((place, half));
                self.note_peaks();
            }
        }
    }

    /// Tensors whose post-backward hook never came (spec 1.3, the quirk).
    fn release_stuck(&mut self) -> Result<(), Stopped> {
        for unit in 0..self.program.units.len() {
            for (chunk, slot) in self.places(unit, Kind::Half) {
                if self.chunks[chunk].states[slot] == State::Compute {
                    self.release(chunk, slot, State::HoldAfterBackward)?;
                }
            }
        }
        Ok(())
    }

    /// The chunk of another list that mirrors an fp16 chunk.
    fn mirror(&self, half: usize, kind: Kind) -> usize {
        let number = self.chunks[half].number;
        let mut ids = 0..self.chunks.len();
        ids.find(|&id| self.chunks[id].kind == kind && self.chunks[id].number == number)
            .expect("the lists mirror each other")
    }

    /// ADAM of one group (spec 3.3). Reading: as the last chunk of a pass is written back at its
    /// end, each other is once the first tensor of the next is done.
    fn update(&mut self, half: usize, place: Place, before: Option<usize>) -> Result<(), Stopped> {
        if self.chunks[half].place != Some(place) {
            self.note(What::GradientRead, half, self.half_bytes(), place);
        }
        let trio = [Kind::Single, Kind::Momentum, Kind::Variance];
        let trio = trio.map(|kind| self.mirror(half, kind));
        for slot in 0..self.chunks[half].tensors.len() {
            for id in trio {
                self.record(id, place);
                self.bring(id, place)?;
                self.chunks[id].states[slot] = State::Compute;
            }
            for id in trio {
                self.chunks[id].states[slot] = State::Hold;
            }
            if let Some(before) = before.filter(|_| slot == 0) {
                self.write_back(before, false);
            }
        }
        Ok(())
    }

    fn write_back(&mut self, half: usize, last: bool) {
        let from = self.chunks[self.mirror(half, Kind::Single)].place;
        let to = self.chunks[half].place.expect("local chunks have payloads");
        if from != Some(to) {
            let wide = self.options.quirks.wide_write_back && to == Place::Gpu && !last;
            let bytes = self.half_bytes() * if wide { 2 } else { 1 };
            self.note(What::WriteBack, half, bytes, to);
        }
    }

    /// Whether the chunks of the built model found room, on the host or with it on the GPU; asked
    /// after the run.
    pub(crate) fn can_be_built(&self) -> bool {
        let halves = self.locals().len() as u64;
        let needed = i128::from(3 * halves * self.half_bytes()) * BYTE;
        let Options { host_bytes, overall_cpu, local_ranks, .. } = self.options;
        let quota = i128::from(host_bytes) * overall_cpu * 1000 / i128::from(local_ranks);
        let stopped = self.stopped && self.stage == Stage::Init;
        !stopped && needed <= quota + self.gpu_quota()
    }

    // -- for tests -----------------------------------------------------------------------------

    /// The first two fp16 chunks on the GPU and HOLD, used at moments 0 and 1 of an iteration of
    /// one moment.
    pub(crate) fn two_used_at_moments_0_and_1(&mut self) -> [usize; 2] {
        let ids = [0, 2];
        for (moment, id) in ids.into_iter().enumerate() {
            self.chunks[id].place = Some(Place::Gpu);
            self.chunks[id].states.fill(State::Hold);
            self.accesses.push((id, Place::Gpu, moment));
        }
        self.length = Some(1);
        self.warmup = false;
        ids
    }

    pub(crate) fn leaves_first_at(&mut self, moment: usize) -> usize {
        self.moment = moment;
        self.candidates(Place::Gpu)[0]
    }
}
