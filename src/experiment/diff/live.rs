//! The live blocks at an event, in groups: a pure function of a trace.
//!
//! Phases are named as seen from the event, so that peaks in different steps can be compared:
//!
//! ```text
//!   step0.optimizer ... step3.forward ... step3.backward ^ event
//!   "an earlier step: optimizer"   "this step: forward"   "this step: backward"
//! ```

use std::collections::BTreeMap;

use serde::Serialize;

use crate::trace::{Op, Role, StartState, Trace, step_name};
use crate::units::{BlockId, Bytes, PhaseId, SiteId};

/// By what live blocks are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBy {
    /// Where in the program they were asked for.
    Site,
    /// The phase in which they were asked for, as seen from the event.
    Phase,
    /// What they hold.
    Role,
    /// Their size, in classes from a power of two to the next.
    Size,
    /// Phase and size.
    PhaseAndSize,
}

/// Live blocks: how many, and what was asked for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Live {
    /// Number of blocks.
    pub blocks: u64,
    /// Their sizes as asked for, together, in bytes.
    pub bytes: u64,
}

impl Live {
    fn add(&mut self, size_bytes: u64) {
        self.blocks += 1;
        self.bytes += size_bytes;
    }
}

/// Live blocks that have something in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveGroup {
    /// What.
    pub group: String,
    /// The blocks.
    pub live: Live,
}

/// What is live at one event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveMoment {
    /// Every live block with the phase that it was asked for in, in the order of the ids.
    blocks: Vec<(BlockId, PhaseId)>,
    /// The step of the event, if it is in one.
    step: Option<String>,
}

/// The blocks that are live after an event; with no event, those from before the first. Attempts do
/// not count, nor what the program has freed while another stream still uses it.
pub fn live_at(trace: &Trace, event: Option<u64>) -> LiveMoment {
    let mut live: Vec<Option<PhaseId>> = vec![None; trace.blocks.len()];
    let at_start = trace.start.iter().flat_map(|start| &start.blocks);
    for block in at_start.filter(|block| block.state == StartState::Live) {
        if let Some(slot) = live.get_mut(block.block.index()) {
            *slot = Some(PhaseId::NONE);
        }
    }
    let mut phase = PhaseId::NONE;
    let end = event.map_or(0, |event| (event as usize).saturating_add(1));
    for event in &trace.events[..end.min(trace.events.len())] {
        let (block, state) = match event.op {
            Op::Mark(mark) => {
                phase = mark;
                continue;
            }
            Op::Alloc(block) => (block, Some(phase)),
            Op::Free(block) | Op::Defer(block) => (block, None),
            _ => continue,
        };
        if let Some(slot) = live.get_mut(block.index()) {
            *slot = state;
        }
    }
    let blocks = (0_u32..).zip(live).filter_map(|(id, phase)| Some((BlockId(id), phase?)));
    let step = trace.phases.get(phase.index()).and_then(|name| step_name(name));
    LiveMoment { blocks: blocks.collect(), step: step.map(str::to_owned) }
}

/// The event at which most bytes are live for the first time; nothing if that is before the first.
pub fn requested_peak_event(trace: &Trace) -> Option<u64> {
    let size = |block: BlockId| trace.blocks.get(block.index()).map_or(0, |it| it.size_bytes);
    let at_start = trace.start.iter().flat_map(|start| &start.blocks);
    let at_start = at_start.filter(|block| block.state == StartState::Live);
    let mut live_bytes = at_start.fold(0_u64, |sum, it| sum.saturating_add(size(it.block)));
    let mut peak = (live_bytes, None);
    for (index, event) in (0_u64..).zip(&trace.events) {
        match event.op {
            Op::Alloc(block) => live_bytes = live_bytes.saturating_add(size(block)),
            Op::Free(block) | Op::Defer(block) => {
                live_bytes = live_bytes.saturating_sub(size(block));
            }
            _ => {}
        }
        if live_bytes > peak.0 {
            peak = (live_bytes, Some(index));
        }
    }
    peak.1
}

impl LiveMoment {
    /// All of them.
    pub fn total(&self, trace: &Trace) -> Live {
        let mut total = Live::default();
        for &(block, _) in &self.blocks {
            total.add(trace.blocks[block.index()].size_bytes);
        }
        total
    }

    /// In groups, by name. Together they are the total.
    pub fn groups(&self, trace: &Trace, by: GroupBy) -> Vec<LiveGroup> {
        // Names are made once a key, not once a block.
        let mut by_key: BTreeMap<(PhaseId, SiteId, u32), Live> = BTreeMap::new();
        for &(id, phase) in &self.blocks {
            let block = &trace.blocks[id.index()];
            let class = block.size_bytes.max(1).ilog2();
            let key = match by {
                GroupBy::Site => (PhaseId::NONE, block.site, 0),
                GroupBy::Phase => (phase, SiteId::NONE, 0),
                GroupBy::Role => (PhaseId::NONE, SiteId::NONE, block.role as u32),
                GroupBy::Size => (PhaseId::NONE, SiteId::NONE, class),
                GroupBy::PhaseAndSize => (phase, SiteId::NONE, class),
            };
            by_key.entry(key).or_default().add(block.size_bytes);
        }
        let mut groups: BTreeMap<String, Live> = BTreeMap::new();
        for ((phase, site, class), live) in by_key {
            let name = match by {
                GroupBy::Site => site_name(trace, site),
                GroupBy::Phase => self.phase_name(trace, phase),
                GroupBy::Role => Role::ALL[class as usize].name().to_owned(),
                GroupBy::Size => class_name(class),
                GroupBy::PhaseAndSize => {
                    format!("{}, {}", self.phase_name(trace, phase), class_name(class))
                }
            };
            let group = groups.entry(name).or_default();
            group.blocks += live.blocks;
            group.bytes += live.bytes;
        }
        groups.into_iter().map(|(group, live)| LiveGroup { group, live }).collect()
    }

    /// A phase as seen from the event.
    fn phase_name(&self, trace: &Trace, phase: PhaseId) -> String {
        let Some(name) = phase.some().and_then(|phase| trace.phases.get(phase.index())) else {
            return "before any phase".to_owned();
        };
        let Some(step) = step_name(name) else { return name.clone() };
        let which =
            if self.step.as_deref() == Some(step) { "this step" } else { "an earlier step" };
        match name[step.len()..].strip_prefix('.') {
            Some(rest) if !rest.is_empty() => format!("{which}: {rest}"),
            _ => which.to_owned(),
        }
    }
}

/// Where in the program, as `model.py:12 attention`. A site without a line is an operation of a
/// module: `linear in model.layers.*.mlp`, one for all modules that only a number tells apart.
fn site_name(trace: &Trace, site: SiteId) -> String {
    let Some(name) = trace.site_in_model(site) else { return "no site".to_owned() };
    let Some((module, operation)) = name.split_once(":0 ") else { return name };
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = module.split('.').map(|part| if number(part) { "*" } else { part });
    match parts.collect::<Vec<_>>().join(".") {
        module if module.is_empty() => operation.to_owned(),
        module => format!("{operation} in {module}"),
    }
}

/// `64 to 128 MiB`: from a power of two up to, not including, the next.
fn class_name(class: u32) -> String {
    let from = 1_u64 << class.min(63);
    let to = from.checked_mul(2).map_or_else(|| "any".to_owned(), |to| Bytes(to).to_string());
    let from = Bytes(from).to_string();
    match (from.split_once(' '), to.split_once(' ')) {
        (Some((number, unit)), Some((_, next))) if unit == next => format!("{number} to {to}"),
        _ => format!("{from} to {to}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Frame, read_text};
    use crate::units::FrameId;

    const TEXT: &str = "\
alloc w 10MiB role=parameter
mark step0.optimizer
alloc m 6MiB role=optimizer
mark step1.forward
alloc x 3MiB role=activation
alloc y 3MiB role=activation
attempt t 100MiB
free x
mark step1.backward
alloc g 1MiB role=gradient
defer y
";

    fn groups(event: Option<u64>, by: GroupBy) -> Vec<(String, u64, u64)> {
        let trace = read_text(TEXT).expect("a trace");
        let groups = live_at(&trace, event).groups(&trace, by);
        let mib = |bytes| bytes >> 20;
        groups.into_iter().map(|it| (it.group, it.live.blocks, mib(it.live.bytes))).collect()
    }

    fn named(groups: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
        groups.iter().map(|&(name, blocks, mib)| (name.to_owned(), blocks, mib)).collect()
    }

    #[test]
    fn the_peak_is_where_most_is_live() {
        let trace = read_text(TEXT).expect("a trace");
        // 10 + 6 + 3 + 3 at the alloc of y, event 5.
        assert_eq!(requested_peak_event(&trace), Some(5));
        let total = live_at(&trace, Some(5)).total(&trace);
        assert_eq!(total, Live { blocks: 4, bytes: trace.requested_bytes_peak() });
        assert_eq!(live_at(&trace, None).total(&trace), Live::default());
    }

    #[test]
    fn phases_are_seen_from_the_event() {
        let at_peak = [("an earlier step: optimizer", 1, 6), ("before any phase", 1, 10)];
        let forward = ("this step: forward", 2, 6);
        assert_eq!(groups(Some(5), GroupBy::Phase), named(&[at_peak[0], at_peak[1], forward]));
        let at_end = [at_peak[0], at_peak[1], ("this step: backward", 1, 1)];
        assert_eq!(groups(Some(999), GroupBy::Phase), named(&at_end));
    }

    #[test]
    fn layers_of_a_model_are_one_site() {
        let frame = |name: &str, filename: &str, line| Frame {
            name: name.to_owned(),
            filename: filename.to_owned(),
            line,
        };
        let mut trace = Trace::default();
        trace.sites.frames = vec![
            frame("linear", "model.layers.3.mlp", 0),
            frame("linear", "model.layers.12.mlp", 0),
            frame("log_softmax", "", 0),
            frame("attention", "/home/me/model.py", 12),
        ];
        trace.sites.stacks = (0..4).map(|id| vec![FrameId(id)]).collect();
        let names: Vec<String> = (0..4).map(|id| site_name(&trace, SiteId(id))).collect();
        let mlp = "linear in model.layers.*.mlp";
        assert_eq!(names, [mlp, mlp, "log_softmax", "model.py:12 attention"]);
        assert_eq!(site_name(&trace, SiteId::NONE), "no site");
    }

    #[test]
    fn roles_and_sizes_have_names() {
        let roles = [("activation", 2, 6), ("optimizer", 1, 6), ("parameter", 1, 10)];
        assert_eq!(groups(Some(5), GroupBy::Role), named(&roles));
        let sizes = [("2 to 4 MiB", 2, 6), ("4 to 8 MiB", 1, 6), ("8 to 16 MiB", 1, 10)];
        assert_eq!(groups(Some(5), GroupBy::Size), named(&sizes));
        assert_eq!(groups(Some(5), GroupBy::Site), named(&[("no site", 4, 22)]));
        assert_eq!(class_name(19), "512 KiB to 1 MiB");
    }
}
