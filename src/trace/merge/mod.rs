//! Several traces on one device and one clock: what a GPU would need if these ranks shared it.
//!
//! The one design decision: ranks share the device and nothing else. Every stream, pool, block,
//! module and transfer of a rank stays its own under a new id; only call sites, which say where in a
//! program something happened, are joined where they are equal. An allocator that keeps freed memory
//! on its stream therefore never hands memory of one rank to another, and what the merged trace does
//! to one rank is what its own trace does.
//!
//! ```text
//!   rank0   0 ── b0 ──── b1 ───────────── free b0      ids, streams, pools: as they are
//!   rank1   0 ─────── b0 ────── free b0                 + as many as the ranks before have
//!           │         │         │
//!   merged  0 ── b0 ─ b7 b1 ─── free b7 ── free b0      by time; ties in turn, by progress
//! ```
//!
//! An allocator is in one private pool at a time, a rank may be in its own while another is in none.
//! Where the turn passes from one to the other, the merged trace leaves and enters pools
//! ([`pools`]). Marks get a form in which the steps of one rank stay steps ([`tables`]).

mod clock;
mod header;
mod labels;
mod pools;
mod tables;

use super::{InvalidTrace, Op, StartLayout, StartState, Trace, step_name, validate};
use crate::units::{BlockId, PoolId};
use clock::{Turn, Turns};
pub use labels::rank_labels;
use pools::Entered;
use tables::{Tables, too_many};

/// How the clocks of ranks are laid over each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Align {
    /// All begin together.
    #[default]
    Start,
    /// All end together.
    End,
    /// As the clocks of their machines said when they were recorded.
    Clock,
    /// Times are left out: ranks take turns, each as often as it has events.
    Turns,
}

/// How to merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeOptions {
    /// How clocks are laid over each other.
    pub align: Align,
    /// Every rank begins so much later than the one before it, in nanoseconds.
    pub stagger_ns: u64,
    /// Leave `empty_cache` events out: in the merged trace they would empty the cache of all ranks.
    pub without_empty_cache: bool,
}

/// A trace that is merged with others.
#[derive(Clone, Copy, Debug)]
pub struct RankTrace<'a> {
    /// What it is called in names of phases, modules, pools and blocks.
    pub label: &'a str,
    /// The trace, [valid](super::validate).
    pub trace: &'a Trace,
}

/// A merged trace and what should be known of it.
#[derive(Clone, Debug)]
pub struct Merged {
    /// The trace, validated. It has no name.
    pub trace: Trace,
    /// One line each.
    pub warnings: Vec<String>,
}

/// Traces cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Ids of a trace have 32 bits.
    #[error(
        "these ranks have more than {} {table} together, which a trace cannot hold: merge fewer of \
         them",
        u32::MAX - 1
    )]
    TooMany {
        /// What there is too much of.
        table: &'static str,
    },
    /// A rank does not tell when it began.
    #[error(
        "{rank} does not tell when it was recorded, so its clock cannot be laid over the others': \
         use --align start"
    )]
    NoClock {
        /// What it is called.
        rank: String,
    },
    /// Each makes sense, all together do not.
    #[error("these ranks do not fit into one trace: {0}")]
    Invalid(#[from] InvalidTrace),
}

/// Merges ranks into one trace.
///
/// Blocks that were there at the start become allocs where their rank begins. What the recorded
/// allocators did is left out.
///
/// # Errors
/// If there are more events, blocks or names than a trace can hold, or a clock that is asked for is
/// not known.
pub fn merge(ranks: &[RankTrace<'_>], options: MergeOptions) -> Result<Merged, MergeError> {
    let mut warnings = Vec::new();
    let (mut header, dropped) = header::merged(ranks);
    if options.align != Align::Clock {
        // The common clock is none of a machine's.
        header.start_unix_ns = None;
    }
    let mut merger = Merger {
        ranks,
        options,
        lead: lead(ranks),
        lead_step: None,
        tables: Tables::new(ranks)?,
        entered: Entered::new(ranks),
        trace: Trace { header, ..Trace::default() },
        empty_caches: 0,
        settings_changes: 0,
    };
    merger.tables.fill(ranks, &mut merger.trace);
    let turns = Turns::new(ranks, options, &mut warnings)?;
    merger.trace.events.reserve(events_of(ranks));
    for turn in turns {
        merger.turn(turn)?;
    }
    warnings.extend(merger.warnings());
    warnings.extend(dropped);
    let trace = merger.trace;
    validate(&trace)?;
    Ok(Merged { trace, warnings })
}

fn events_of(ranks: &[RankTrace<'_>]) -> usize {
    ranks.iter().map(|rank| rank.trace.events.len()).sum()
}

/// The rank whose steps are the steps of the merged trace: the first that has any.
fn lead(ranks: &[RankTrace<'_>]) -> Option<usize> {
    let has_steps =
        |rank: &RankTrace<'_>| rank.trace.phases.iter().any(|phase| step_name(phase).is_some());
    ranks.iter().position(has_steps)
}

struct Merger<'a> {
    ranks: &'a [RankTrace<'a>],
    options: MergeOptions,
    lead: Option<usize>,
    /// The step that the leading rank is in.
    lead_step: Option<&'a str>,
    tables: Tables,
    entered: Entered,
    trace: Trace,
    empty_caches: u64,
    settings_changes: u64,
}

impl Merger<'_> {
    fn turn(&mut self, turn: Turn) -> Result<(), MergeError> {
        let trace = self.ranks[turn.rank].trace;
        match turn.event {
            None => trace.start.as_ref().map_or(Ok(()), |start| self.begin(turn, start)),
            Some(event) => self.event(turn, trace.events[event].op),
        }
    }

    /// What a rank holds when it begins: first what waits for another stream, so that no more is
    /// live at once than in its own trace.
    fn begin(&mut self, turn: Turn, start: &StartLayout) -> Result<(), MergeError> {
        for state in [StartState::Deferred, StartState::Live] {
            for (segment, blocks) in start.iter() {
                let pool = segment.pool.some().map(|pool| self.tables.pool(turn.rank, pool));
                for row in blocks.iter().filter(|row| row.state == state) {
                    let block = self.tables.block(turn.rank, row.block);
                    let pools = pool.as_slice();
                    self.entered.be_in(pools, turn.time_ns, &mut self.trace.events);
                    self.put(turn, Op::Alloc(block))?;
                    if state == StartState::Deferred {
                        self.put(turn, Op::Defer(block))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn event(&mut self, turn: Turn, op: Op) -> Result<(), MergeError> {
        let Turn { rank, .. } = turn;
        let block = |id: BlockId| self.tables.block(rank, id);
        let pool = |id: PoolId| self.tables.pool(rank, id);
        let op = match op {
            Op::Alloc(id) => Op::Alloc(block(id)),
            Op::Attempt(id) => Op::Attempt(block(id)),
            Op::Free(id) => Op::Free(block(id)),
            Op::Defer(id) => Op::Defer(block(id)),
            Op::Done(id) => Op::Done(block(id)),
            Op::Access(id) => Op::Access(block(id)),
            Op::PoolEnter(id) => Op::PoolEnter(pool(id)),
            Op::PoolLeave(id) => Op::PoolLeave(pool(id)),
            Op::PoolDelete(id) => Op::PoolDelete(pool(id)),
            Op::ModuleEnter(id) => Op::ModuleEnter(self.tables.module(rank, id)),
            Op::ModuleLeave(id) => Op::ModuleLeave(self.tables.module(rank, id)),
            Op::Transfer(id) => Op::Transfer(self.tables.transfer(rank, id)),
            Op::Settings(id) => {
                self.settings_changes += 1;
                Op::Settings(self.tables.settings(rank, id))
            }
            Op::EmptyCache => {
                self.empty_caches += 1;
                if self.options.without_empty_cache {
                    return Ok(());
                }
                op
            }
            Op::Mark(id) => {
                let ranks = self.ranks;
                let own = &ranks[rank].trace.phases[id.index()];
                if self.lead == Some(rank) {
                    self.lead_step = step_name(own);
                }
                let label = ranks[rank].label;
                let phases = &mut self.trace.phases;
                Op::Mark(self.tables.phase((rank, id), self.lead_step, (label, own), phases)?)
            }
        };
        let hangs_on_pools = matches!(
            op,
            Op::Alloc(_)
                | Op::Attempt(_)
                | Op::EmptyCache
                | Op::PoolEnter(_)
                | Op::PoolLeave(_)
                | Op::PoolDelete(_)
        );
        if hangs_on_pools {
            self.entered.be_in_those_of(rank, turn.time_ns, &mut self.trace.events);
        }
        self.entered.apply(rank, op);
        self.put(turn, op)
    }

    fn put(&mut self, turn: Turn, op: Op) -> Result<(), MergeError> {
        let events = &mut self.trace.events;
        if events.len() >= u32::MAX as usize - 1 {
            return Err(too_many("events"));
        }
        events.push(super::Event { time_ns: turn.time_ns, op });
        Ok(())
    }

    /// What should be known of the events.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.ranks.len() > 1 && self.empty_caches > 0 {
            let count = self.empty_caches;
            warnings.push(if self.options.without_empty_cache {
                format!("{count} empty_cache events are left out, as asked for")
            } else {
                format!(
                    "{count} empty_cache events empty the cache of all ranks here, as in one \
                     process; ranks in processes of their own: --without-empty-cache is nearer"
                )
            });
        }
        if self.ranks.len() > 1 && self.settings_changes > 0 {
            let count = self.settings_changes;
            warnings.push(format!("{count} changes of the settings by one rank hold for all here"));
        }
        if self.entered.switches > 0 {
            warnings.push(format!(
                "ranks use private pools at the same time: {} times pools are left and entered \
                 where the turn passes to another rank",
                self.entered.switches
            ));
        }
        warnings
    }
}
