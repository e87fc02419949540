//! The mode `stalloc`: the run time of STAlloc (EuroSys '26; specs/stalloc.md 3), with its
//! surprises, or without them.
//!
//! A plan gives every *static* request of one training iteration its place in a pool that is
//! obtained in one call. Requests are known by their position in the sequence and their exact size,
//! and by nothing else:
//!
//! ```text
//!   requests   w │ a0  b0  c0 │ a1  b1  c1 │ a2  b2  c2 │ ...
//!   plan       0   1   2   3    4   5   6    4   5   6    the second iteration stands for all later
//!              └── n0 = 4 ──┘   └ n1 = 3 ┘
//!
//!   memory     │ static pool: weights │ optimizer │ activations │      one device malloc
//!              │ var pool: slots of 512 bytes │                        2 x the peak of the plan
//!              │ inner allocator: whatever is not where and what the plan says ...
//! ```
//!
//! A malloc goes this way, the first that applies (spec 3.3):
//!
//! 1. at most 512 bytes: a slot of the var pool (`var.rs`);
//! 2. never freed in the profile (a line of the plan): inner;
//! 3. during evaluation: the best fit in the static pool, else inner;
//! 4. in a layer of a mixture of experts (`layers.rs`): perhaps free space of the pool, else inner;
//! 5. the next place of the plan. Another size: *mismatched*. Taken: *overlapping*. Both: inner.
//!
//! # STAlloc's modes and variables, and what to say here
//!
//! ```text
//!   STALLOC_MODE=Torch            --alloc caching (with --log-style stalloc for its lines)
//!   STALLOC_MODE=Trace            any recording of the program; mem_log_dev0.txt is one
//!   STALLOC_TRACE_FAST_MODE       nothing: how a trace was recorded does not matter here
//!   STALLOC_MODE=Alloc            --alloc planned+mode=stalloc
//!   Synthesizer/main.py           made from the profile: trace=FILE, profile_steps=N; or plan=DIR
//!   STALLOC_MODEL_INFO_PATH       plan=DIR
//!   STALLOC_DYNAMIC               nothing: layers are known if the trace has modules
//!   STALLOC_STATIC_FALLBACK       static_fallback=1
//!   STALLOC_REUSE_STATIC          reuse_static=1
//!   EXPERT_PER_GPU                expert_per_gpu=N
//!   STALLOC_DYNAMIC_UTILIZATION   dynamic_utilization=PERCENT
//!   STALLOC_DYNAMIC_DIFF          dynamic_diff_mb=MIB
//!   STALLOC_LOG_LEVEL             nothing: mismatches are counted, step by step
//!   STALLOC_RECORD_ALLOC          --decisions FILE
//!   PYTORCH_CUDA_ALLOC_CONF       inner=[caching+max_split_size_mb=N]
//! ```
//!
//! # Surprises, and how to be without them (spec 4.2)
//!
//! ```text
//!   1  one request more, and everything mismatches for ever    realign=iteration
//!   2  static_fallback=1 leaves places blocked for ever        leak=false
//!   3  experts reuse nothing unless their number is given      expert_per_gpu=all
//!      the first expert of a later layer never reuses          expert_counter=layer
//!      what a mixture's forward pass asks for never reuses     reuse_static=all
//!   4  blocks that cross iterations collide in steady state    a plan made with faithful=false
//!   7  memory goes to another stream without a wait            streams=kept
//! ```
//!
//! `faithful=false` stands for all of these, and for `rescue=true`.
//!
//! # Where this differs from the published code
//!
//! - The inner allocator is [`Caching`](crate::alloc::caching) with the rules of spec 3.4 that it
//!   has: segments in multiples of 512 bytes, `max_split_size` of 128 MiB, the trimming of the
//!   cache. It is today's in all else. The settings string of a recording is not taken over: it
//!   belongs to another allocator, and STAlloc's own ends the process over most of them.
//! - A deferred block is reused when its use has ended, never before: our contract. STAlloc reuses
//!   it when the host frees it (surprise 7), which corrupts the program.
//! - Where the process would end with an exception, the replay goes on and is reported as failed; a
//!   pool that the device does not have is asked for again at the next request.
//! - `empty_cache` gives back pools in which nothing is in use, so that all bytes come back. With
//!   weights in the pool this never happens before the end.
//! - With a memory limit the var pool does not grow: what it cannot hold goes to the inner
//!   allocator. STAlloc knows no limit.
//! - Evaluation is a mark `eval`, `evaluate` or `evaluation`, alone or behind the dot of a step.

mod blocks;
mod config;
mod intervals;
mod layers;
mod runtime;
pub mod synthesis;
mod var;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::Profile;
use super::inner::Inner;
use super::summary::{PlanSummary, StepLog};
use crate::alloc::spec::{Params, SpecError};
use crate::alloc::{
    ALIGNMENT_BYTES, Allocator, BlockState, BuildInputs, Env, Handle, LayoutBlock, Levels,
    OutOfMemory, Request,
};
use crate::plan::stalloc::files::{PlanFile, SpareFile};
use crate::units::{BlockId, PoolId, StreamId};
use blocks::{Block, Blocks, Place};
use config::Config;
use intervals::{FreeIntervals, LastUses};
use layers::{Layers, Windows};
use synthesis::{Synthesis, SynthesisOptions};
use var::VarPool;

pub(super) use config::help;

/// Number of the pool's segment.
const POOL: u32 = 0;
/// Number of the first segment of the var pool, which doubles and so has fewer than 63.
const VAR_FIRST: u32 = 1;
/// Segments of the inner allocator are numbered from here.
const INNER_FIRST: u32 = 64;

/// Number of the pool of small requests in layouts; everything else is one pool.
const VAR_POOL: u32 = 1;

/// A plan of STAlloc with what belongs to it, as its files say it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanFiles {
    /// Where it comes from, in words.
    pub source: String,
    /// The plan.
    pub plan: PlanFile,
    /// Space that is free from an expert's forward to its backward pass.
    pub cross: SpareFile,
    /// Space that is free during a mixture's pass.
    pub intra: SpareFile,
}

/// Where the program stands in the plan.
#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    /// Requests of more than 512 bytes so far.
    mallocs: u64,
    /// Position of the last static request; none before the first.
    event: Option<u64>,
}

/// Counts that the steps do not have.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    pool_allocs: u64,
    pool_frees: u64,
    ooms: u64,
    device_syncs: u64,
    unreleased: u64,
    evaluation: u64,
    dynamic_reused: u64,
    dynamic_fallbacks: u64,
    rescued: u64,
    trims: u64,
}

/// The allocator.
#[derive(Clone, Debug)]
pub struct Stalloc {
    config: Config,
    limit_bytes: Option<u64>,
    files: Arc<PlanFiles>,
    cross: Windows,
    intra: Windows,
    /// Size of the static pool in bytes; 0 if there is none.
    pool_bytes: u64,
    /// Its first address, once it is obtained.
    pool: Option<u64>,
    /// The device refused the pool, and it goes without.
    without_pool: bool,
    /// Both pools were asked for.
    has_begun: bool,
    /// Numbers of requests that the plan leaves to the inner allocator.
    unreleased: BTreeSet<u64>,
    free: FreeIntervals,
    /// Who used free memory last, if that is asked.
    last_uses: Option<LastUses>,
    /// Planned blocks in use, and those that leaked: start to end. With `static_fallback` only.
    remembered: BTreeMap<u64, u64>,
    var: VarPool,
    inner: Inner,
    /// Blocks of the inner allocator whose use has ended, which it has not looked at.
    ended: VecDeque<Handle>,
    blocks: Blocks,
    sequence: Sequence,
    layers: Layers,
    is_evaluating: bool,
    /// Steps that have begun.
    steps: u64,
    /// The stream that static requests fall back on.
    default_stream: StreamId,
    /// Live bytes as the program asked for them.
    live_bytes: u64,
    /// Levels of the pools alone: allocated and active are kept, reserved is computed.
    own: Levels,
    log: StepLog,
    counts: Counts,
    failure: Option<String>,
}

impl Stalloc {
    /// Builds the allocator, from a plan in files if `plan` names one, else from the profile.
    ///
    /// # Errors
    /// Parameters that are not accepted; no profile to plan from; a profile that cannot be planned.
    pub(super) fn build(mut params: Params, inputs: &BuildInputs) -> Result<Stalloc, SpecError> {
        let config = Config::take(&mut params)?;
        let files = plan(&config, &mut params, inputs)?;
        let limit_bytes = inputs.limit_bytes.or(inputs.recorded_limit_bytes);
        let pool_bytes = files.plan.static_reserved_bytes.next_multiple_of(ALIGNMENT_BYTES);
        let var = VarPool::new(files.plan.var_peak_bytes, VAR_FIRST);
        // A pool that the limit forbids will never be: mended, it goes without from the beginning.
        let fits = limit_bytes.is_none_or(|limit_bytes| pool_bytes <= limit_bytes);
        let without_pool = !fits && !config.faithful;
        let held_bytes = if without_pool { 0 } else { pool_bytes };
        let held_bytes = held_bytes.saturating_add(var.next_chunk_bytes());
        let inner_limit_bytes = limit_bytes.map(|limit| limit.saturating_sub(held_bytes));
        let inner = build_inner(&config, inputs, inner_limit_bytes)?;
        params.finish()?;
        let default_stream = inputs.stream_handles.iter().position(|&handle| handle == 0);
        Ok(Stalloc {
            limit_bytes,
            cross: Windows::new(&files.cross),
            intra: Windows::new(&files.intra),
            pool_bytes,
            pool: None,
            without_pool,
            has_begun: false,
            unreleased: files.plan.unreleased.iter().copied().collect(),
            free: FreeIntervals::whole(pool_bytes),
            last_uses: config.keeps_streams.then(LastUses::default),
            remembered: BTreeMap::new(),
            var,
            inner,
            ended: VecDeque::new(),
            blocks: Blocks::default(),
            sequence: Sequence::default(),
            layers: Layers::new(
                files.cross.layers.unwrap_or_default(),
                config.experts_per_layer,
                config.counts_by_layer,
            ),
            is_evaluating: false,
            steps: 0,
            default_stream: StreamId(default_stream.unwrap_or(0) as u32),
            live_bytes: 0,
            own: Levels::default(),
            log: StepLog::default(),
            counts: Counts::default(),
            failure: None,
            files,
            config,
        })
    }
}

/// The plan that is asked for.
fn plan(
    config: &Config,
    params: &mut Params,
    inputs: &BuildInputs,
) -> Result<Arc<PlanFiles>, SpecError> {
    if let Some(name) = &config.plan {
        let files = inputs.plan_files.clone();
        return files.ok_or_else(|| params.value_error(format!("plan={name}: not read")));
    }
    let Some(profile) = &inputs.profile else {
        return Err(SpecError::NoProfile { allocator: params.allocator().to_owned() });
    };
    if profile.trace.events.is_empty() {
        // Nothing is known yet but the parameters.
        return Ok(Arc::default());
    }
    let name = format!("stalloc {:?}", config.synthesis());
    let made = profile.made.get(&name, || synthesized(profile, &config.synthesis()));
    made.as_ref().clone().map_err(|message| params.value_error(message))
}

/// The plan of a profile, or why there is none.
fn synthesized(profile: &Profile, options: &SynthesisOptions) -> Result<Arc<PlanFiles>, String> {
    let Synthesis { plan, cross, intra, .. } =
        synthesis::synthesize(profile, options).map_err(|error| error.to_string())?;
    Ok(Arc::new(PlanFiles { source: profile.source.clone(), plan, cross, intra }))
}

/// The inner allocator, which may hold what the pools leave of a limit. The built-in one takes no
/// settings of the recorded run and knows no private pools; nor does any take later settings.
fn build_inner(
    config: &Config,
    inputs: &BuildInputs,
    limit_bytes: Option<u64>,
) -> Result<Inner, SpecError> {
    let mut inner_inputs = BuildInputs {
        limit_bytes,
        recorded_limit_bytes: None,
        settings_changes: Vec::new(),
        profile: None,
        plan_files: None,
        ..inputs.clone()
    };
    if config.is_built_in() {
        inner_inputs.pools = Vec::new();
        inner_inputs.settings = None;
        inner_inputs.recorded_settings = None;
    }
    Inner::build(&config.inner, &inner_inputs)
}

impl Allocator for Stalloc {
    const ADDRESSES_MATTER: bool = true;

    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        while let Some(handle) = env.next_completed() {
            self.use_ended(env, handle);
        }
        let handle = self.route(env, request)?;
        self.live_bytes += request.size_bytes;
        self.observe();
        Ok(handle)
    }

    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        match self.blocks.get(handle).place {
            Place::Inner(inner) => {
                self.with_inner(env, |it, env| it.free(env, inner));
                self.blocks.remove(handle);
            }
            _ => self.complete(env, handle),
        }
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        self.begin_free(env, handle);
        self.blocks.get_mut(handle).state = BlockState::Deferred;
        if let Place::Inner(inner) = self.blocks.get(handle).place {
            self.with_inner(env, |it, env| it.defer(env, inner));
        }
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        // Whatever the inner allocator would wait for, it now finds among those that have ended.
        self.wait(env);
        self.with_inner(env, |it, env| it.empty_cache(env));
        self.release_pools(env);
    }

    fn pool_enter<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        if !self.config.is_built_in() {
            self.with_inner(env, |it, env| it.pool_enter(env, pool));
        }
    }

    fn pool_leave<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        if !self.config.is_built_in() {
            self.with_inner(env, |it, env| it.pool_leave(env, pool));
        }
    }

    fn pool_delete<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        if !self.config.is_built_in() {
            self.with_inner(env, |it, env| it.pool_delete(env, pool));
        }
    }

    fn mark<E: Env>(&mut self, _env: &mut E, phase: &str) {
        self.begin_phase(phase);
    }

    fn stream_added(&mut self, stream: StreamId, handle: u64) {
        self.inner.stream_added(stream, handle);
    }

    fn module_enter<E: Env>(&mut self, _env: &mut E, module: &str) {
        self.layers.enter(module);
    }

    fn module_leave<E: Env>(&mut self, _env: &mut E, module: &str) {
        if self.layers.leave(module).is_err() {
            self.fail("a module was left that was not the last entered, which ends STAlloc");
        }
    }

    fn levels(&self) -> Levels {
        let inner = self.inner.levels();
        Levels {
            allocated_bytes: self.own.allocated_bytes + inner.allocated_bytes,
            active_bytes: self.own.active_bytes + inner.active_bytes,
            reserved_bytes: self.own_reserved_bytes() + inner.reserved_bytes,
        }
    }

    fn pool_of(&self, request: Request) -> u32 {
        if request.size_bytes <= var::SLOT_BYTES { VAR_POOL } else { 0 }
    }

    fn largest_hole(&self, request: Request) -> u64 {
        let pool_bytes = match self.config.rescue || self.is_evaluating {
            true if self.pool.is_some() => self.free.largest_bytes(),
            _ => 0,
        };
        self.inner.largest_hole(request).max(pool_bytes)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    fn failure(&self) -> Option<String> {
        self.failure.clone().or_else(|| self.inner.failure())
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.check_pool()?;
        self.check_levels()?;
        self.inner.check_invariants()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let inner = self.inner.counters();
        let of_inner = |wanted: &str| {
            inner.iter().find(|(name, _)| *name == wanted).map_or(0, |&(_, count)| count)
        };
        let log = &self.log;
        let Counts { pool_allocs, pool_frees, ooms, device_syncs, .. } = self.counts;
        vec![
            ("segment_allocs", pool_allocs + of_inner("segment_allocs")),
            ("segment_frees", pool_frees + of_inner("segment_frees")),
            ("alloc_retries", of_inner("alloc_retries")),
            ("ooms", ooms),
            ("device_syncs", device_syncs + of_inner("device_syncs")),
            ("planned", log.total(|row| row.planned)),
            ("online", log.total(|row| row.online)),
            ("mismatches", log.total(|row| row.mismatched)),
            ("overlaps", log.total(|row| row.overlapping)),
            ("unreleased", self.counts.unreleased),
            ("evaluation", self.counts.evaluation),
            ("dynamic_reused", self.counts.dynamic_reused),
            ("dynamic_fallbacks", self.counts.dynamic_fallbacks),
            ("rescued", self.counts.rescued),
            ("trims", self.counts.trims),
            ("fallback_bytes_peak", log.peak(|row| row.fallback_bytes_peak)),
            ("fallback_reserved_bytes_peak", log.peak(|row| row.fallback_reserved_bytes_peak)),
            ("fallback_segments", of_inner("segment_allocs")),
        ]
    }

    fn plan_summary(&self) -> Option<PlanSummary> {
        Some(PlanSummary {
            planned_bytes: self.files.plan.static_reserved_bytes,
            lower_bound_bytes: self.files.plan.static_max_allocated_bytes,
            source: self.files.source.clone(),
            steps: self.log.rows(),
        })
    }

    fn params(&self) -> Vec<(String, String)> {
        let inner = self.inner.params().into_iter();
        let inner = inner.map(|(key, value)| (format!("inner.{key}"), value));
        self.config.params().into_iter().chain(inner).collect()
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        let mut rows = Vec::new();
        self.own_layout(&mut rows);
        self.inner.layout(&mut |block| {
            rows.push(LayoutBlock { segment: block.segment + INNER_FIRST, pool: 0, ..block });
        });
        rows.sort_by_key(|row| (row.segment_address, row.address));
        rows.into_iter().for_each(visit);
    }
}

impl Stalloc {
    /// Blocks of the pools, free ones included.
    fn own_layout(&self, rows: &mut Vec<LayoutBlock>) {
        if let Some(address) = self.pool {
            let row = |offset_bytes, size_bytes| LayoutBlock {
                block: BlockId::NONE,
                segment: POOL,
                segment_address: address,
                segment_bytes: self.pool_bytes,
                page_bytes: 0,
                address: address + offset_bytes,
                size_bytes,
                requested_bytes: 0,
                stream: StreamId::NONE,
                pool: 0,
                state: BlockState::Free,
            };
            rows.extend(self.free.iter().map(|free| row(free.start, free.end - free.start)));
            for block in self.blocks.iter() {
                if let Place::Pool { offset_bytes, .. } = block.place {
                    rows.push(in_use(row(offset_bytes, block.size_bytes), block));
                }
            }
        }
        for chunk in self.var.chunks() {
            let row = |offset_bytes, size_bytes| LayoutBlock {
                block: BlockId::NONE,
                segment: chunk.segment,
                segment_address: chunk.address,
                segment_bytes: chunk.size_bytes,
                page_bytes: 0,
                address: chunk.address + offset_bytes,
                size_bytes,
                requested_bytes: 0,
                stream: StreamId::NONE,
                pool: VAR_POOL,
                state: BlockState::Free,
            };
            let free = self.var.free_parts(chunk).into_iter();
            rows.extend(free.map(|(offset_bytes, size_bytes)| row(offset_bytes, size_bytes)));
            for block in self.blocks.iter() {
                if let Place::Var(slot) = block.place
                    && slot.segment == chunk.segment
                {
                    rows.push(in_use(row(slot.offset_bytes, block.size_bytes), block));
                }
            }
        }
    }

    /// The pool is covered by free ranges and blocks, without gaps or overlaps, and every planned
    /// block in use is remembered if that is asked.
    fn check_pool(&self) -> Result<(), String> {
        let in_pool = |block: &Block| match block.place {
            Place::Pool { offset_bytes, planned } => {
                Some((offset_bytes, offset_bytes + block.size_bytes, planned))
            }
            _ => None,
        };
        let taken: Vec<(u64, u64, bool)> = self.blocks.iter().filter_map(in_pool).collect();
        let free = self.free.iter().map(|free| (free.start, free.end));
        let mut parts: Vec<(u64, u64)> =
            taken.iter().map(|&(start, end, _)| (start, end)).chain(free).collect();
        parts.sort_unstable();
        let mut at = 0;
        for (start, end) in parts {
            if start != at {
                return Err(format!("the pool has a gap or an overlap at {at}: next is {start}"));
            }
            at = end;
        }
        if at != self.pool_bytes {
            return Err(format!("the pool's parts end at {at}, not at {}", self.pool_bytes));
        }
        let forgotten = taken.iter().find(|&&(start, end, planned)| {
            let known = self.remembered.get(&start) == Some(&end);
            self.config.static_fallback && planned && !known
        });
        match forgotten {
            Some((start, ..)) => Err(format!("the planned block at {start} is not remembered")),
            None => Ok(()),
        }
    }

    /// Levels of the pools are sums over their blocks.
    fn check_levels(&self) -> Result<(), String> {
        let own = |block: &&Block| !matches!(block.place, Place::Inner(_));
        let blocks = || self.blocks.iter().filter(own);
        let active_bytes: u64 = blocks().map(|block| block.size_bytes).sum();
        let live = blocks().filter(|block| block.state == BlockState::Allocated);
        let allocated_bytes: u64 = live.map(|block| block.size_bytes).sum();
        let slots = blocks().filter(|block| matches!(block.place, Place::Var(_))).count() as u64;
        let found = (allocated_bytes, active_bytes, slots);
        let kept = (self.own.allocated_bytes, self.own.active_bytes, self.var.live());
        if found != kept {
            return Err(format!("allocated, active and slots are {found:?}, not {kept:?}"));
        }
        Ok(())
    }
}

/// A row of the layout with a block in it.
fn in_use(row: LayoutBlock, block: &Block) -> LayoutBlock {
    LayoutBlock {
        block: block.owner,
        requested_bytes: block.requested_bytes,
        stream: block.stream,
        state: block.state,
        ..row
    }
}
