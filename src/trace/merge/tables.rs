//! Ids of several ranks in one trace.
//!
//! Where nothing is shared, the ids of a rank are its own and as many more as the ranks before it
//! have. Frames and stacks are joined where they are equal.
//!
//! The step of a phase is what stands before its first dot ([`step_name`]), and steps are what much
//! else is built on: tables of steps, profiles of allocators that plan ahead. So the merged trace has
//! the steps of one rank, and every mark stands in the step that this rank is in:
//!
//! ```text
//!   rank0 marks step1.forward        step1.rank0.forward
//!   rank1 marks step1.forward        step1.rank1.forward
//!   rank0 marks step2.forward        step2.rank0.forward
//!   rank1 marks step1.backward       step2.rank1.step1.backward     it lags behind
//!   rank0 marks end                  rank0.end
//! ```

use std::collections::HashMap;

use super::{MergeError, RankTrace};
use crate::trace::{Block, HookedModule, Pool, Sites, Stream, Trace, step_name};
use crate::units::{
    BlockId, FrameId, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
};

/// As many of each as the ranks before have.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    blocks: u32,
    streams: u32,
    pools: u32,
    settings: u32,
    modules: u32,
    transfers: u32,
    names: u32,
}

pub(super) fn too_many(table: &'static str) -> MergeError {
    MergeError::TooMany { table }
}

/// Where the ids of each rank begin, and the phases that were named so far.
pub(super) struct Tables {
    before: Vec<Before>,
    /// By step of the leading rank, rank and the rank's own phase.
    phases: HashMap<(Option<String>, usize, PhaseId), PhaseId>,
}

impl Tables {
    /// # Errors
    /// If there is more of something than ids.
    pub(super) fn new(ranks: &[RankTrace<'_>]) -> Result<Tables, MergeError> {
        let mut sum = Before::default();
        let mut before = Vec::with_capacity(ranks.len());
        for RankTrace { trace, .. } in ranks {
            before.push(sum);
            let add = |sum: &mut u32, count: usize, table| {
                let count = u32::try_from(count).ok();
                let more = count.and_then(|count| sum.checked_add(count));
                *sum = more.filter(|&sum| sum < u32::MAX).ok_or_else(|| too_many(table))?;
                Ok::<(), MergeError>(())
            };
            add(&mut sum.blocks, trace.blocks.len(), "blocks")?;
            add(&mut sum.streams, trace.streams.len(), "streams")?;
            add(&mut sum.pools, trace.pools.len(), "pools")?;
            add(&mut sum.settings, trace.settings_changes.len(), "settings strings")?;
            add(&mut sum.modules, trace.modules.len(), "modules")?;
            add(&mut sum.transfers, trace.transfers.len(), "transfers")?;
            add(&mut sum.names, trace.names.len(), "names")?;
        }
        Ok(Tables { before, phases: HashMap::new() })
    }

    pub(super) fn block(&self, rank: usize, id: BlockId) -> BlockId {
        BlockId(self.before[rank].blocks + id.0)
    }

    pub(super) fn pool(&self, rank: usize, id: PoolId) -> PoolId {
        PoolId(self.before[rank].pools + id.0)
    }

    pub(super) fn settings(&self, rank: usize, id: SettingsId) -> SettingsId {
        SettingsId(self.before[rank].settings + id.0)
    }

    pub(super) fn module(&self, rank: usize, id: ModuleId) -> ModuleId {
        ModuleId(self.before[rank].modules + id.0)
    }

    pub(super) fn transfer(&self, rank: usize, id: TransferId) -> TransferId {
        TransferId(self.before[rank].transfers + id.0)
    }

    /// The phase that a rank's own phase becomes while the leading rank is in a step; the rank is
    /// told with its label and the own phase's name.
    ///
    /// # Errors
    /// If there are more phases than ids.
    pub(super) fn phase(
        &mut self,
        (rank, own): (usize, PhaseId),
        step: Option<&str>,
        (label, name): (&str, &str),
        phases: &mut Vec<String>,
    ) -> Result<PhaseId, MergeError> {
        let key = (step.map(str::to_owned), rank, own);
        if let Some(&phase) = self.phases.get(&key) {
            return Ok(phase);
        }
        let id = u32::try_from(phases.len()).ok().filter(|&id| id < u32::MAX - 1);
        let id = PhaseId(id.ok_or_else(|| too_many("phases"))?);
        phases.push(phase_name(step, label, name));
        self.phases.insert(key, id);
        Ok(id)
    }

    /// Fills the tables of the merged trace, but for its phases.
    pub(super) fn fill(&self, ranks: &[RankTrace<'_>], merged: &mut Trace) {
        let mut sites = SiteTable::default();
        for (RankTrace { label, trace }, before) in ranks.iter().zip(&self.before) {
            let handles = handles(trace, before.streams);
            merged.streams.extend(handles.into_iter().map(|handle| Stream { handle }));
            let named = |name: &String| format!("{label}.{name}");
            merged.names.extend(trace.names.iter().map(named));
            let pools = trace.pools.iter();
            merged.pools.extend(pools.map(|pool| Pool { name: named(&pool.name), ..pool.clone() }));
            merged.settings_changes.extend(trace.settings_changes.iter().cloned());
            merged.transfers.extend(trace.transfers.iter().cloned());
            merged.modules.extend(trace.modules.iter().map(|name| {
                let module = HookedModule::of_name(name);
                HookedModule { path: &format!("{label}.{}", module.path), ..module }.name()
            }));
            let site_of = sites.add(&trace.sites);
            merged.blocks.extend(trace.blocks.iter().map(|block| Block {
                stream: StreamId(before.streams + block.stream.0),
                site: block.site.some().map_or(SiteId::NONE, |site| site_of[site.index()]),
                name: block.name.some().map_or(NameId::NONE, |it| NameId(before.names + it.0)),
                ..*block
            }));
        }
        merged.sites = sites.sites;
    }
}

/// Handles for the streams of a rank, in the order of its own, from `first` on.
fn handles(trace: &Trace, first: u32) -> Vec<u64> {
    let mut order: Vec<usize> = (0..trace.streams.len()).collect();
    order.sort_by_key(|&stream| trace.streams[stream].handle);
    let mut handles = vec![0; order.len()];
    for (handle, stream) in (u64::from(first)..).zip(order) {
        handles[stream] = handle;
    }
    handles
}

/// The name of a mark, see the module docs.
fn phase_name(step: Option<&str>, label: &str, own: &str) -> String {
    let Some(step) = step else { return format!("{label}.{own}") };
    let part = match step_name(own) {
        Some(own_step) if own_step == step => own[own_step.len()..].trim_start_matches('.'),
        _ => own,
    };
    let parts = [step, label, part];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".")
}

/// Frames and stacks, each once. Fewer than those of the ranks, which have ids.
#[derive(Default)]
struct SiteTable {
    sites: Sites,
    frames: HashMap<crate::trace::Frame, FrameId>,
    stacks: HashMap<Vec<FrameId>, SiteId>,
}

impl SiteTable {
    /// Adds the sites of a rank and gives what each becomes.
    fn add(&mut self, rank: &Sites) -> Vec<SiteId> {
        let SiteTable { sites, frames, stacks } = self;
        let frame = |frame: &crate::trace::Frame| {
            if let Some(&id) = frames.get(frame) {
                return id;
            }
            let id = FrameId(sites.frames.len() as u32);
            sites.frames.push(frame.clone());
            frames.insert(frame.clone(), id);
            id
        };
        let frame_of: Vec<FrameId> = rank.frames.iter().map(frame).collect();
        let stack = |stack: &Vec<FrameId>| {
            let stack: Vec<FrameId> = stack.iter().map(|id| frame_of[id.index()]).collect();
            if let Some(&id) = stacks.get(&stack) {
                return id;
            }
            let id = SiteId(sites.stacks.len() as u32);
            sites.stacks.push(stack.clone());
            stacks.insert(stack, id);
            id
        };
        rank.stacks.iter().map(stack).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_stands_in_the_step_of_the_leading_rank() {
        let name = |step, own| phase_name(step, "rank1", own);
        assert_eq!(name(Some("step1"), "step1.forward"), "step1.rank1.forward");
        assert_eq!(name(Some("step2"), "step1.backward.3"), "step2.rank1.step1.backward.3");
        assert_eq!(name(Some("step2"), "step2"), "step2.rank1");
        assert_eq!(name(Some("step2"), "eval"), "step2.rank1.eval");
        assert_eq!(name(None, "step1.forward"), "rank1.step1.forward");
        assert_eq!(name(None, "end"), "rank1.end");
    }

    #[test]
    fn streams_keep_their_order_under_new_handles() {
        let mut trace = Trace::default();
        for handle in [0x7f00, 0, 9] {
            trace.stream_with_handle(handle);
        }
        assert_eq!(handles(&trace, 5), [7, 5, 6]);
    }
}
