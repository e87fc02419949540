//! What the live bytes of a trace are for.

use super::{Op, Role, StartState, Trace};
use crate::units::PhaseId;

/// Live bytes by role, in the order of [`Role::ALL`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveByRole {
    /// Bytes of each role when most bytes of all roles are live; their sum is the requested peak.
    pub at_peak_bytes: [u64; Role::ALL.len()],
    /// The most bytes that each role has live, each at its own time.
    pub peak_bytes: [u64; Role::ALL.len()],
    /// The phase at the requested peak, if one began before.
    pub peak_phase: Option<String>,
}

impl LiveByRole {
    /// Counts them. The trace must be [valid](super::validate). Attempts do not count.
    pub fn of(trace: &Trace) -> LiveByRole {
        let mut found = LiveByRole::default();
        let mut live_bytes = [0u64; Role::ALL.len()];
        let mut total_bytes = 0u64;
        let mut top_bytes = 0u64;
        let mut phase = PhaseId::NONE;
        let mut peak_phase = PhaseId::NONE;
        let at_start = trace.start.iter().flat_map(|start| &start.blocks);
        let at_start = at_start.filter(|block| block.state == StartState::Live);
        let at_start = at_start.map(|block| Op::Alloc(block.block));
        for op in at_start.chain(trace.events.iter().map(|event| event.op)) {
            let (block, is_alloc) = match op {
                Op::Mark(mark) => {
                    phase = mark;
                    continue;
                }
                Op::Alloc(block) => (block, true),
                Op::Free(block) | Op::Defer(block) => (block, false),
                _ => continue,
            };
            let Some(block) = trace.blocks.get(block.index()) else { continue };
            let role = block.role as usize;
            if !is_alloc {
                live_bytes[role] = live_bytes[role].saturating_sub(block.size_bytes);
                total_bytes = total_bytes.saturating_sub(block.size_bytes);
                continue;
            }
            live_bytes[role] = live_bytes[role].saturating_add(block.size_bytes);
            total_bytes = total_bytes.saturating_add(block.size_bytes);
            found.peak_bytes[role] = found.peak_bytes[role].max(live_bytes[role]);
            if total_bytes > top_bytes {
                top_bytes = total_bytes;
                peak_phase = phase;
                found.at_peak_bytes = live_bytes;
            }
        }
        found.peak_phase = trace.phases.get(peak_phase.index()).cloned();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::read_text;

    #[test]
    fn every_role_has_its_own_peak() {
        let text = "mark a\nalloc w 10 role=parameter\nalloc x 5 role=activation\nfree x\n\
                    mark b\nalloc t 4 role=temporary\nalloc u 3 role=temporary\nfree t\n";
        let found = LiveByRole::of(&read_text(text).expect("a trace"));
        let of = |bytes: [u64; 8], role: Role| bytes[role as usize];
        assert_eq!(found.peak_phase.as_deref(), Some("b"));
        assert_eq!(found.at_peak_bytes.iter().sum::<u64>(), 17);
        assert_eq!(of(found.at_peak_bytes, Role::Activation), 0);
        assert_eq!(of(found.peak_bytes, Role::Activation), 5);
        assert_eq!(of(found.peak_bytes, Role::Temporary), 7);
        assert_eq!(of(found.peak_bytes, Role::Parameter), 10);
    }
}
