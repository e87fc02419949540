//! Two results of `run --json` or `compare --json`, figure by figure.
//!
//! The one design decision: a result is read as JSON, not as a type of this program, so that
//! results of other versions can be compared, and new figures need nothing here. What a clock
//! measured is left out.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::engine::SCHEMA_VERSION;

/// Nesting beyond this is no result.
const DEPTH_MAX: u32 = 16;

/// A file of results makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// It is no JSON.
    #[error("{0}; expected a result of `fraglab run --json` or `compare --json`")]
    Json(#[from] serde_json::Error),
    /// It is another JSON.
    #[error(
        "result {place} has no {missing}; expected a result of `fraglab run --json` or `compare \
         --json`"
    )]
    NoResult {
        /// Which one, from 1.
        place: usize,
        /// What it lacks.
        missing: &'static str,
    },
    /// There is nothing in it.
    #[error("holds no result")]
    Empty,
}

/// Reads results: an object, or an array of them.
///
/// # Errors
/// If it is something else.
pub fn parse_results(text: &str) -> Result<Vec<Value>, ResultsError> {
    let results = match serde_json::from_str(text)? {
        Value::Array(results) => results,
        one => vec![one],
    };
    for (index, result) in results.iter().enumerate() {
        for missing in ["trace", "allocator", "peaks"] {
            if !result.get(missing).is_some_and(Value::is_object) {
                return Err(ResultsError::NoResult { place: index + 1, missing });
            }
        }
    }
    if results.is_empty() { Err(ResultsError::Empty) } else { Ok(results) }
}

/// A figure that is not the same in both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureDiff {
    /// Its path: `peaks.reserved_bytes_peak`.
    pub figure: String,
    /// In A; nothing if it is not there.
    pub a: Option<Value>,
    /// In B.
    pub b: Option<Value>,
    /// b − a, of numbers.
    pub delta: Option<f64>,
    /// That as a share of a; nothing where a is 0 or no number.
    pub relative: Option<f64>,
}

/// One cell of both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CellDiff {
    /// Name in A: trace, allocator and device.
    pub a: String,
    /// Name in B.
    pub b: String,
    /// Figures that are the same.
    pub same: u64,
    /// Those that are not, largest relative change first.
    pub figures: Vec<FigureDiff>,
}

/// Two files of results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResultDiff {
    /// Version of this layout.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: &'static str,
    /// `results`.
    pub kind: &'static str,
    /// Cells that are in both, in the order of A.
    pub cells: Vec<CellDiff>,
    /// Cells that only A has.
    pub only_a: Vec<String>,
    /// Cells that only B has.
    pub only_b: Vec<String>,
}

/// Compares results. One with one are compared whatever they are called; of several, those that
/// agree in trace, allocator and capacity.
pub fn diff_results(a: &[Value], b: &[Value]) -> ResultDiff {
    let mut diff = ResultDiff {
        schema_version: SCHEMA_VERSION,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        kind: "results",
        cells: Vec::new(),
        only_a: Vec::new(),
        only_b: Vec::new(),
    };
    if let ([a], [b]) = (a, b) {
        diff.cells.push(cell(a, b));
        return diff;
    }
    let mut unmatched: Vec<&Value> = b.iter().collect();
    for one in a {
        match unmatched.iter().position(|other| name(other) == name(one)) {
            Some(place) => diff.cells.push(cell(one, unmatched.remove(place))),
            None => diff.only_a.push(name(one)),
        }
    }
    diff.only_b = unmatched.into_iter().map(name).collect();
    diff
}

/// `TRACE, ALLOCATOR, capacity N`
fn name(result: &Value) -> String {
    let text = |object: &str, key: &str| result[object][key].as_str().unwrap_or("?").to_owned();
    let capacity = result["device"]["capacity_bytes"].as_u64();
    let capacity = capacity.map(|bytes| format!(", {}", crate::units::Bytes(bytes)));
    let (trace, allocator) = (text("trace", "name"), text("allocator", "name"));
    format!("{trace}, {allocator}{}", capacity.unwrap_or_default())
}

fn cell(a: &Value, b: &Value) -> CellDiff {
    let (flat_a, flat_b) = (flat(a), flat(b));
    let paths: std::collections::BTreeSet<&String> = flat_a.keys().chain(flat_b.keys()).collect();
    let all = paths.len() as u64;
    let figures = paths.into_iter().filter(|path| flat_a.get(*path) != flat_b.get(*path));
    let mut figures: Vec<FigureDiff> = figures
        .map(|path| figure(path, flat_a.get(path).copied(), flat_b.get(path).copied()))
        .collect();
    // Stable: figures of one change stay in the order of their paths. What has no share stands
    // first: it came, went or was nothing.
    let share = |it: &FigureDiff| it.relative.map_or(f64::INFINITY, f64::abs);
    figures.sort_by(|one, other| share(other).total_cmp(&share(one)));
    CellDiff { a: name(a), b: name(b), same: all - figures.len() as u64, figures }
}

fn figure(path: &str, a: Option<&Value>, b: Option<&Value>) -> FigureDiff {
    let numbers = a.and_then(Value::as_f64).zip(b.and_then(Value::as_f64));
    let delta = numbers.map(|(a, b)| b - a);
    let relative = numbers.filter(|&(a, _)| a != 0.0).map(|(a, b)| (b - a) / a.abs());
    FigureDiff { figure: path.to_owned(), a: a.cloned(), b: b.cloned(), delta, relative }
}

/// Every plain value by its path. Lists are left out: their places mean nothing from one run to
/// another.
fn flat(result: &Value) -> BTreeMap<String, &Value> {
    let mut values = BTreeMap::new();
    collect(result, "", 0, &mut values);
    values
}

fn collect<'v>(value: &'v Value, path: &str, depth: u32, out: &mut BTreeMap<String, &'v Value>) {
    match value {
        Value::Object(fields) if depth < DEPTH_MAX => {
            for (key, value) in fields {
                if depth == 0 && matches!(&**key, "wall" | "schema_version" | "fraglab_version") {
                    continue;
                }
                let path = if depth == 0 { key.clone() } else { format!("{path}.{key}") };
                collect(value, &path, depth + 1, out);
            }
        }
        Value::Object(_) | Value::Array(_) | Value::Null => {}
        plain => drop(out.insert(path.to_owned(), plain)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn result(allocator: &str, reserved: u64, status: &str) -> Value {
        json!({
            "schema_version": 1,
            "trace": {"name": "t"},
            "allocator": {"name": allocator},
            "device": {"capacity_bytes": 1 << 30},
            "outcome": {"status": status, "event_index": null},
            "peaks": {"reserved_bytes_peak": reserved, "requested_bytes_peak": 50},
            "counters": {"ooms": 0},
            "wall": {"seconds": reserved},
        })
    }

    #[test]
    fn the_largest_change_comes_first_and_clocks_do_not_count() {
        let (a, b) = (result("x", 100, "ok"), result("y", 75, "oom"));
        let diff = diff_results(&[a], &[b]);
        let cell = &diff.cells[0];
        assert_eq!((&*cell.a, &*cell.b), ("t, x, 1 GiB", "t, y, 1 GiB"));
        let paths: Vec<&str> = cell.figures.iter().map(|it| &*it.figure).collect();
        assert_eq!(paths, ["allocator.name", "outcome.status", "peaks.reserved_bytes_peak"]);
        assert_eq!(cell.figures[2].delta, Some(-25.0));
        assert_eq!(cell.figures[2].relative, Some(-0.25));
        // trace.name, device.capacity_bytes, peaks.requested_bytes_peak, counters.ooms.
        assert_eq!(cell.same, 4);
    }

    #[test]
    fn of_several_those_of_one_name_are_compared() {
        let a = [result("x", 100, "ok"), result("y", 100, "ok")];
        let b = [result("z", 100, "ok"), result("x", 100, "ok")];
        let diff = diff_results(&a, &b);
        assert_eq!(diff.cells.len(), 1);
        assert!(diff.cells[0].figures.is_empty());
        assert_eq!((&*diff.only_a[0], &*diff.only_b[0]), ("t, y, 1 GiB", "t, z, 1 GiB"));
    }
}
