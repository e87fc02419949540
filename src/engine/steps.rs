//! The steps of a job, and what the allocator's device calls take in each.
//!
//! The one design decision: the replay loop reads the device's counters at the marks where a step
//! begins or ends, which are rare, and nothing is counted a step at a time. What a step took is a
//! difference of two readings, so the steps add up to the whole run exactly.
//!
//! ```text
//!   mark       step0.data  step0.forward  step1.data      eval        step2.data
//!   ├─ before ─┼────────── step0 ─────────┼──── step1 ────┼── after ──┼── step2 ──┤ last event
//!   readings   ^                          ^               ^           ^           ^
//! ```

use std::collections::HashMap;

use super::result::StepTime;
use crate::device::{Counting, Device};
use crate::trace::{Op, Trace, step_name};
use crate::units::PhaseId;

/// A device's counters.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    device_ns: u64,
    calls: u64,
    map_calls: u64,
}

impl Reading {
    fn of<D: Device>(device: &Counting<D>) -> Reading {
        let calls = device.calls();
        Reading { device_ns: device.cost_ns(), calls: calls.total(), map_calls: calls.map }
    }
}

/// Where a step begins, or none does.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Index of the mark's event.
    event: usize,
    /// Some phase of the step.
    step: Option<PhaseId>,
    reading: Reading,
}

/// Reads a device's counters where steps begin and end.
#[derive(Clone, Debug)]
pub(super) struct StepMeter {
    /// For every phase the first phase of its step, if it belongs to one.
    step_of_phase: Vec<Option<PhaseId>>,
    current: Option<PhaseId>,
    cuts: Vec<Cut>,
}

impl StepMeter {
    /// For a replay of a trace with these phases.
    pub(super) fn new(phases: &[String]) -> StepMeter {
        let mut steps: HashMap<&str, PhaseId> = HashMap::new();
        let step_of = |(index, mark)| {
            let id = PhaseId(u32::try_from(index).ok()?);
            Some(*steps.entry(step_name(mark)?).or_insert(id))
        };
        let step_of_phase = phases.iter().map(String::as_str).enumerate().map(step_of).collect();
        StepMeter { step_of_phase, current: None, cuts: Vec::new() }
    }

    /// The replay is at a mark, the event of this index.
    #[cold]
    pub(super) fn mark<D: Device>(&mut self, event: u64, phase: PhaseId, device: &Counting<D>) {
        let step = self.step_of_phase.get(phase.index()).copied().flatten();
        if step != self.current {
            self.current = step;
            self.cuts.push(Cut { event: event as usize, step, reading: Reading::of(device) });
        }
    }

    /// What every step took, and what lies between them. `program_ns` is the program's time at
    /// every event; the replay ended with `last_event`.
    pub(super) fn steps<D: Device>(
        &self,
        trace: &Trace,
        program_ns: &[u64],
        last_event: usize,
        device: &Counting<D>,
    ) -> Vec<StepTime> {
        if self.cuts.is_empty() {
            return Vec::new();
        }
        let start = Cut { event: 0, step: None, reading: Reading::default() };
        let end = Cut { event: last_event, step: None, reading: Reading::of(device) };
        let cuts: Vec<Cut> =
            [start].into_iter().chain(self.cuts.iter().copied()).chain([end]).collect();
        let recorded_ns = |event: usize| trace.events.get(event).map_or(0, |event| event.time_ns);
        let program_ns = |event: usize| program_ns.get(event).copied().unwrap_or(0);
        let time = |(index, pair): (usize, &[Cut])| {
            let (from, to) = (pair[0], pair[1]);
            let phase = from.step.and_then(|phase| trace.phases.get(phase.index()));
            let name = phase.and_then(|phase| step_name(phase));
            let outside = if index == 0 { "before" } else { "after" };
            let recorded_ns = recorded_ns(to.event).saturating_sub(recorded_ns(from.event));
            let program_ns = program_ns(to.event).saturating_sub(program_ns(from.event));
            let device_ns = to.reading.device_ns - from.reading.device_ns;
            let share = (recorded_ns > 0).then(|| device_ns as f64 / recorded_ns as f64);
            StepTime {
                name: name.unwrap_or(outside).to_owned(),
                recorded_ns,
                program_ns,
                allocator_device_ns: device_ns,
                simulated_ns: program_ns.saturating_add(device_ns),
                share,
                calls: to.reading.calls - from.reading.calls,
                map_calls: to.reading.map_calls - from.reading.map_calls,
            }
        };
        let steps = cuts.windows(2).enumerate().map(time);
        // A trace that begins with a step has nothing before it.
        steps
            .filter(|step| step.name != "before" || step.recorded_ns > 0 || step.calls > 0)
            .collect()
    }
}

/// Where the steps of a trace begin, and what lies outside of them: event and name.
pub(super) fn step_begins(trace: &Trace) -> Vec<(u64, String)> {
    let mut begins = vec![(0, "before".to_owned())];
    let mut current = None;
    for (event, op) in trace.events.iter().map(|event| event.op).enumerate() {
        let Op::Mark(phase) = op else { continue };
        let name = trace.phases.get(phase.index()).and_then(|phase| step_name(phase));
        if name != current {
            current = name;
            begins.push((event as u64, name.unwrap_or("after").to_owned()));
        }
    }
    begins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_of_one_step_are_one() {
        let phases = ["a", "step1.x", "step2.x", "step1.y"].map(str::to_owned);
        let meter = StepMeter::new(&phases);
        let step1 = Some(PhaseId(1));
        assert_eq!(meter.step_of_phase, [None, step1, Some(PhaseId(2)), step1]);
    }
}
