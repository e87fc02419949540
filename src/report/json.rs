//! Results as JSON: pretty, one object for one result, an array for anything more.

use serde::Serialize;

use crate::engine::{AllocatorSummary, DeviceSummary, Outcome, SCHEMA_VERSION, TraceSummary};
use crate::experiment::advise::Advice;
use crate::experiment::explain::Explanation;
use crate::metrics::Peaks;
use crate::units::harmless_json;

/// One value as pretty JSON with a final line end.
///
/// # Errors
/// If the value cannot be serialised; plain data always can.
pub fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = harmless_json(&serde_json::to_string_pretty(value)?).into_owned();
    text.push('\n');
    Ok(text)
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

/// What is known of work that was interrupted.
#[derive(Serialize)]
struct Partial<'a, T> {
    partial: bool,
    #[serde(flatten)]
    value: &'a T,
}

/// [`pretty`] for work that was interrupted, if `is_partial`: the object begins with `"partial":
/// true`.
///
/// # Errors
/// If the value cannot be serialised or is no object.
pub fn pretty_or_partial(
    value: &impl Serialize,
    is_partial: bool,
) -> Result<String, serde_json::Error> {
    if is_partial { pretty(&Partial { partial: true, value }) } else { pretty(value) }
}

/// [`one_or_many`] for work that was interrupted, if `is_partial`: every object begins with
/// `"partial": true`.
///
/// # Errors
/// If a value cannot be serialised or is no object.
pub fn all_or_partial<T: Serialize>(
    values: &[T],
    single: bool,
    is_partial: bool,
) -> Result<String, serde_json::Error> {
    if !is_partial {
        return one_or_many(values, single);
    }
    let marked: Vec<Partial<'_, T>> =
        values.iter().map(|value| Partial { partial: true, value }).collect();
    one_or_many(&marked, single)
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
