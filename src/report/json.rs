//! Results as JSON: pretty, one object for one result, an array for anything more.

use serde::Serialize;

use crate::engine::{AllocatorSummary, DeviceSummary, Outcome, SCHEMA_VERSION, TraceSummary};
use crate::experiment::advise::Advice;
use crate::experiment::explain::Explanation;
use crate::metrics::Peaks;

/// One value as pretty JSON with a final line end.
///
/// # Errors
/// If the value cannot be serialised; plain data always can.
pub fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = harmless(serde_json::to_string_pretty(value)?);
    text.push('\n');
    Ok(text)
}

/// Writes as escapes what JSON allows but a terminal may obey: the second set of control
/// characters, and those that turn the direction of text. They stand inside strings only.
fn harmless(text: String) -> String {
    let turns = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let obeyed = |c: char| matches!(c, '\u{7f}'..='\u{9f}') || turns(c);
    if !text.contains(obeyed) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if obeyed(c) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// Results as pretty JSON. `single` says that exactly one was asked for: it then stands as an
/// object of its own. The shape follows the question, never how many answers came out.
///
/// # Errors
/// If a value cannot be serialised; plain data always can.
pub fn one_or_many<T: Serialize>(values: &[T], single: bool) -> Result<String, serde_json::Error> {
    match values {
        [one] if single => pretty(one),
        many => pretty(&many),
    }
}

/// What `explain --json` says of a trace.
#[derive(Serialize)]
struct ExplainDocument<'a> {
    schema_version: u32,
    fraglab_version: &'static str,
    kind: &'static str,
    trace: &'a TraceSummary,
    allocator: &'a AllocatorSummary,
    device: &'a DeviceSummary,
    outcome: &'a Outcome,
    peaks: &'a Peaks,
    fragmentation: f64,
    #[serde(flatten)]
    explanation: &'a Explanation,
}

/// What `advise --json` says.
#[derive(Serialize)]
struct AdviceDocument<'a> {
    schema_version: u32,
    fraglab_version: &'static str,
    kind: &'static str,
    trace: &'a TraceSummary,
    /// The settings string advised; absent if none is better.
    advised_settings: Option<&'a str>,
    #[serde(flatten)]
    advice: &'a Advice,
}

/// Advice as pretty JSON: `kind` is `advice`.
///
/// # Errors
/// If it cannot be serialised; plain data always can.
pub fn advice(trace: &TraceSummary, advice: &Advice) -> Result<String, serde_json::Error> {
    let advised = advice.advised.and_then(|index| advice.tried.get(index));
    pretty(&AdviceDocument {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        kind: "advice",
        trace,
        advised_settings: advised.map(|tried| tried.settings.as_str()),
        advice,
    })
}

/// An explanation as pretty JSON: `kind` is `trace`.
///
/// # Errors
/// If it cannot be serialised; plain data always can.
pub fn explanation(explanation: &Explanation) -> Result<String, serde_json::Error> {
    let result = &explanation.result;
    pretty(&ExplainDocument {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        kind: "trace",
        trace: &result.trace,
        allocator: &result.allocator,
        device: &result.device,
        outcome: &result.outcome,
        peaks: &result.peaks,
        fragmentation: result.fragmentation,
        explanation,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        let name = "a\u{9b}31m b\u{202e}c ü";
        let text = pretty(&name).unwrap();
        assert_eq!(text, "\"a\\u009b31m b\\u202ec ü\"\n");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), name);
    }

    #[test]
    fn the_shape_follows_the_question() {
        assert_eq!(one_or_many(&[7], true).unwrap(), "7\n");
        assert_eq!(one_or_many(&[7], false).unwrap(), "[\n  7\n]\n");
        assert_eq!(one_or_many(&[7, 8], false).unwrap(), "[\n  7,\n  8\n]\n");
    }
}
