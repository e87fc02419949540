//! Fields of a JSON result by name, and what a trace's `expect` lines ask of them.
//!
//! # How a field is found
//!
//! Every number, word and flag of the result has a path, its keys joined by dots:
//! `peaks.reserved_bytes_peak`, `calls.malloc`, `torch_stats.reserved_bytes.all.peak`. A name
//! stands for the paths that are equal to it or end in it after a dot. If there are several, a path
//! equal to the name wins, then the first section of [`PREFERRED_SECTIONS`] that has one; what is
//! still ambiguous is an error that names the candidates. What a clock measured (`wall`) is never
//! found.
//!
//! # How values are compared
//!
//! | the result holds | written as | compared |
//! |---|---|---|
//! | an integer | `230686720`, `220MiB`, `-512` | exactly |
//! | a fraction | `0.342`, `34.2%` | at the precision written |
//! | a word or flag | `oom`, `true` | letter by letter |
//! | nothing (`null`) | `none` | |

use serde_json::Value;

use crate::trace::Expectation;
use crate::units::Bytes;

/// Where a bare name is looked up first, in this order.
pub const PREFERRED_SECTIONS: [&str; 5] = ["peaks", "final", "counters", "torch_stats", "calls"];

/// An expectation cannot be checked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpectError {
    /// The result has no such field.
    #[error(
        "the result has no field {field:?}: expected a name of the JSON result, as in \
         reserved_bytes_peak, status or calls.malloc"
    )]
    UnknownField {
        /// The name.
        field: String,
    },
    /// The name stands for several fields.
    #[error("{field:?} may be any of {candidates}: write the path of one of them")]
    Ambiguous {
        /// The name.
        field: String,
        /// The paths, with commas.
        candidates: String,
    },
    /// The value cannot be compared with what the field holds.
    #[error("{value:?} cannot be compared with {field}: expected {wanted}")]
    Value {
        /// The value as written.
        value: String,
        /// The path of the field.
        field: String,
        /// What may stand there.
        wanted: &'static str,
    },
}

/// How an expectation turned out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// Path of the field that was compared.
    pub path: String,
    /// Whether it held what was expected.
    pub holds: bool,
    /// What it held, as text.
    pub got: String,
}

/// Compares one field of a result, given as JSON, with what a trace expects of it.
///
/// # Errors
/// If there is no such field, if the name stands for several, or if the value makes no sense for
/// it.
pub fn check(result: &Value, expectation: &Expectation) -> Result<Checked, ExpectError> {
    let (path, value) = find(result, &expectation.field)?;
    let bad_value = |wanted| ExpectError::Value {
        value: expectation.value.clone(),
        field: path.clone(),
        wanted,
    };
    let text = expectation.value.trim();
    let (holds, got) = match value {
        Value::Number(number) => match number.as_i128() {
            Some(got) => {
                let expected = integer(text).ok_or_else(|| {
                    bad_value("an integer or a size with a unit, as in 3 or 220MiB")
                })?;
                (got == expected, integer_like(got, text))
            }
            None => {
                let got = number.as_f64().unwrap_or(f64::NAN);
                let (expected, half_step) =
                    fraction(text).ok_or_else(|| bad_value("a number, as in 0.342 or 34.2%"))?;
                ((got - expected).abs() <= half_step, got.to_string())
            }
        },
        Value::String(got) => (got == text, got.clone()),
        Value::Null => (matches!(text, "none" | "null"), "none".to_owned()),
        other => {
            let got = other.to_string();
            (got == text, got)
        }
    };
    Ok(Checked { path, holds, got })
}

/// The field that a name stands for: its path and value.
///
/// # Errors
/// If there is none, or more than one that no rule prefers.
pub fn find<'a>(result: &'a Value, name: &str) -> Result<(String, &'a Value), ExpectError> {
    let mut fields = Vec::new();
    leaves(result, String::new(), &mut fields);
    fields.retain(|(path, _)| stands_for(name, path) && section(path) != "wall");
    if let Some(exact) = fields.iter().position(|(path, _)| path == name) {
        return Ok(fields.swap_remove(exact));
    }
    let preferred = PREFERRED_SECTIONS
        .into_iter()
        .find(|preferred| fields.iter().any(|(path, _)| section(path) == *preferred));
    if let Some(preferred) = preferred {
        fields.retain(|(path, _)| section(path) == preferred);
    }
    match fields.pop() {
        None => Err(ExpectError::UnknownField { field: name.to_owned() }),
        Some(only) if fields.is_empty() => Ok(only),
        Some(last) => {
            let paths: Vec<&str> =
                fields.iter().chain([&last]).map(|(path, _)| path.as_str()).collect();
            Err(ExpectError::Ambiguous { field: name.to_owned(), candidates: paths.join(", ") })
        }
    }
}

/// Every value that is no object, with its path. Results nest three deep: recursion is bounded.
fn leaves<'a>(value: &'a Value, path: String, into: &mut Vec<(String, &'a Value)>) {
    let Value::Object(fields) = value else {
        into.push((path, value));
        return;
    };
    for (key, value) in fields {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        leaves(value, path, into);
    }
}

fn stands_for(name: &str, path: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn section(path: &str) -> &str {
    path.split_once('.').map_or("", |(section, _)| section)
}

/// An integer or a size, with a sign or without.
fn integer(text: &str) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    let size: Bytes = digits.parse().ok()?;
    Some(sign * i128::from(size.0))
}

/// A number and half of its last written digit, both as fractions of one.
fn fraction(text: &str) -> Option<(f64, f64)> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number.trim_end(), 100.0),
        None => (text, 1.0),
    };
    let value: f64 = number.parse().ok().filter(|value: &f64| value.is_finite())?;
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    // A little more than half a step: 0.25 written for 0.245 must not depend on binary rounding.
    let half_step = 0.5000001 * 10f64.powi(-i32::try_from(decimals).unwrap_or(i32::MAX));
    Some((value / scale, half_step / scale))
}

/// An integer the way the other side was written: with a unit if that had one.
fn integer_like(got: i128, written: &str) -> String {
    match u64::try_from(got) {
        Ok(bytes) if written.ends_with(|c: char| c.is_ascii_alphabetic()) && bytes >= 1024 => {
            format!("{} ({bytes})", Bytes(bytes))
        }
        _ => got.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result() -> Value {
        json!({
            "schema_version": 1,
            "trace": {"name": "t", "requested_bytes_peak": 7},
            "allocator": {"name": "caching", "limit_bytes": null},
            "outcome": {"status": "oom", "requested_bytes": 99},
            "peaks": {"requested_bytes_peak": 6, "reserved_bytes_peak": 230_686_720u64},
            "final": {"requested_bytes": 0, "reserved_bytes": 12},
            "excess_bytes": -512,
            "fragmentation": 0.3419,
            "calls": {"malloc": 3, "free": 1},
            "counters": {"ooms": 2},
            "torch_stats": {"num_ooms": 2, "reserved_bytes.all.peak": 5, "active_bytes.all.peak": 4},
            "wall": {"seconds": 1.5},
        })
    }

    fn expectation(field: &str, value: &str) -> Expectation {
        Expectation {
            allocator: "caching".to_owned(),
            field: field.to_owned(),
            value: value.to_owned(),
            line: 1,
        }
    }

    fn path_of(field: &str) -> String {
        find(&result(), field).expect("found").0
    }

    fn holds(field: &str, value: &str) -> bool {
        check(&result(), &expectation(field, value)).expect("comparable").holds
    }

    #[test]
    fn bare_and_dotted_names_find_their_field() {
        assert_eq!(path_of("status"), "outcome.status");
        assert_eq!(path_of("malloc"), "calls.malloc");
        assert_eq!(path_of("calls.free"), "calls.free");
        assert_eq!(path_of("num_ooms"), "torch_stats.num_ooms");
        assert_eq!(path_of("reserved_bytes.all.peak"), "torch_stats.reserved_bytes.all.peak");
        assert_eq!(path_of("excess_bytes"), "excess_bytes");
    }

    #[test]
    fn sections_are_preferred_in_order() {
        assert_eq!(path_of("requested_bytes_peak"), "peaks.requested_bytes_peak");
        assert_eq!(path_of("trace.requested_bytes_peak"), "trace.requested_bytes_peak");
        assert_eq!(path_of("requested_bytes"), "final.requested_bytes");
    }

    #[test]
    fn unknown_ambiguous_and_measured_names_are_errors() {
        let error = |field: &str| find(&result(), field).expect_err("must fail").to_string();
        assert!(error("reserved_peak").contains("no field \"reserved_peak\""));
        assert!(error("name").contains("trace.name") && error("name").contains("allocator.name"));
        assert!(error("all.peak").contains("torch_stats.active_bytes.all.peak"));
        assert!(error("wall.seconds").contains("no field"));
        assert!(error("bytes_peak").contains("no field"), "only whole keys count");
    }

    #[test]
    fn integers_compare_exactly_with_units_or_without() {
        assert!(holds("reserved_bytes_peak", "220MiB"));
        assert!(holds("reserved_bytes_peak", "230686720"));
        assert!(!holds("reserved_bytes_peak", "230686721"));
        assert!(holds("excess_bytes", "-512"));
        assert!(!holds("excess_bytes", "512"));
        let off = check(&result(), &expectation("reserved_bytes_peak", "200MiB")).unwrap();
        assert_eq!(off.got, "220 MiB (230686720)");
    }

    #[test]
    fn fractions_compare_at_the_precision_written() {
        assert!(holds("fragmentation", "0.342"));
        assert!(holds("fragmentation", "34.2%"));
        assert!(holds("fragmentation", "0.34"));
        assert!(!holds("fragmentation", "0.343"));
        assert!(!holds("fragmentation", "34.1%"));
    }

    #[test]
    fn words_and_nothing_compare_as_written() {
        assert!(holds("status", "oom"));
        assert!(!holds("status", "ok"));
        assert!(holds("allocator.limit_bytes", "none"));
        assert!(!holds("allocator.limit_bytes", "1GiB"));
    }

    #[test]
    fn values_that_make_no_sense_say_what_was_expected() {
        let error = check(&result(), &expectation("malloc", "many")).expect_err("no number");
        assert!(error.to_string().contains("\"many\" cannot be compared with calls.malloc"));
        assert!(check(&result(), &expectation("fragmentation", "inf")).is_err());
    }
}
