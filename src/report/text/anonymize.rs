//! The answer of `anonymize`: what is gone from a trace, and what a reader of it still sees.

use super::{Style, Tone, counted, grouped, printable, wrapped};
use crate::trace::{Anonymized, Role, Trace};
use crate::units::Bytes;

/// What was taken out of a trace, which is what is left of it.
pub fn anonymized(file: &str, found: &Anonymized, trace: &Trace, style: Style) -> String {
    let mut out = style.paint(Tone::Heading, &printable(file)) + "\n";
    let gone = gone(found);
    let gone = if gone.is_empty() { "nothing: there was nothing".to_owned() } else { gone };
    for (label, text) in [("gone", gone), ("left", left(trace))] {
        out.push_str(&wrapped(&format!("  {label}  "), &printable(&text), "        "));
    }
    out
}

fn gone(found: &Anonymized) -> String {
    let counts = [
        (found.frames, "stack frame", ""),
        (found.call_sites, "call site", ""),
        (found.block_names, "name", " of blocks"),
        (found.phases, "phase", " renamed"),
        (found.modules, "module", " renamed"),
        (found.parameters, "parameter", " renamed"),
        (found.pools, "pool", " renamed"),
        (found.streams, "stream handle", " renumbered"),
        (found.strategies, "strategy word", ""),
        (found.expectations, "expectation", " that name files"),
    ];
    let counts = counts.into_iter().filter(|(count, ..)| *count > 0);
    let counts = counts.map(|(count, noun, rest)| format!("{}{rest}", counted(count, noun)));
    let facts = [
        (found.name, "the trace's name"),
        (found.times, "times (events keep their order)"),
        (found.date, "the date"),
        (found.device_index, "the index of the GPU"),
        (found.version, "the local part of the version"),
        (found.message, "the text of the error"),
        (found.recording, "what the recorded allocator did"),
    ];
    let facts = facts.into_iter().filter(|(is_gone, _)| *is_gone).map(|(_, text)| text.to_owned());
    counts.chain(facts).collect::<Vec<_>>().join(", ")
}

/// What tells something of the job or the machine, and has to stay for the figures to be the same.
fn left(trace: &Trace) -> String {
    let header = &trace.header;
    let sizes = counted(trace.blocks.len() as u64, "block");
    let events = grouped(trace.events.len() as u64);
    let mut parts = vec![format!("sizes, order and streams of {sizes} in {events} events")];
    if trace.blocks.iter().any(|block| block.role != Role::Unknown) {
        parts.push("what blocks hold".to_owned());
    }
    let device = header.device.name.iter().cloned();
    let total = header.device.total_bytes.map(|bytes| format!("GPU memory {}", Bytes(bytes)));
    parts.extend(device.map(|name| format!("GPU {name}")).chain(total));
    parts.extend(header.source.version.iter().map(|version| format!("version {version}")));
    let settings = header.settings.iter().filter(|settings| !settings.is_empty());
    parts.extend(settings.chain(&trace.settings_changes).map(|text| format!("settings {text}")));
    parts.extend(header.limit_bytes.map(|bytes| format!("limit {}", Bytes(bytes))));
    if !trace.phases.is_empty() {
        let phases = counted(trace.phases.len() as u64, "phase");
        parts.push(format!("{phases} as they are called now"));
    }
    if !header.strategies.is_empty() {
        parts.push(format!("strategies {}", header.strategies.join(", ")));
    }
    if let Some(model) = &header.model {
        let parameters = grouped(model.elements());
        parts.push(format!("the model's shape: {parameters} parameters"));
    }
    if !header.expectations.is_empty() {
        parts.push(counted(header.expectations.len() as u64, "expectation"));
    }
    if trace.recording.is_some() {
        parts.push("addresses and decisions of the recorded allocator".to_owned());
    }
    parts.join("; ")
}
