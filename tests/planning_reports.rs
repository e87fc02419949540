//! The tables on planning in `reports/` are still what the program gives: rows that are cheap to
//! make again. What a clock measured stands in files of its own, which are not looked at.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use serde_json::Value;

use crate::common::program::{assert_code, fraglab, stdout};
use crate::common::shared;

/// A file of `reports/`.
fn report(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports").join(name);
    std::fs::read_to_string(path).expect("kept in the repository")
}

/// Rows of `planning.csv`, by column.
struct Packed {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Packed {
    fn read() -> Packed {
        let text = report("planning.csv");
        let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(text.as_bytes());
        let fields = |row: csv::StringRecord| row.iter().map(str::to_owned).collect();
        let mut rows: Vec<Vec<String>> = reader.records().map(|row| fields(row.unwrap())).collect();
        Packed { columns: rows.remove(0), rows }
    }

    fn field<'a>(&self, row: &'a [String], column: &str) -> &'a str {
        let at = self.columns.iter().position(|name| name == column);
        &row[at.expect("a column")]
    }

    /// The row of a set and problem that is packed with the best planner, streams together, with
    /// so much work and this capacity.
    fn row(&self, set: &str, problem: &str, work: &str, capacity: &str) -> &[String] {
        let wanted = [
            ("set", set),
            ("problem", problem),
            ("planner", "best"),
            ("streams", "together"),
            ("capacity_bytes", capacity),
            ("work_max_units", work),
        ];
        let is_it =
            |row: &&Vec<String>| wanted.iter().all(|(name, value)| self.field(row, name) == *value);
        self.rows.iter().find(is_it).unwrap_or_else(|| panic!("no row of {set} {problem}"))
    }

    /// A row holds what the program now says.
    fn assert_holds(&self, row: &[String], result: &Value) {
        let problem = self.field(row, "problem");
        assert_eq!(result["source"]["name"], problem);
        let numbers = ["buffers", "height_bytes", "lower_bound_bytes", "full_span_bytes", "proven"];
        for name in numbers {
            let kept = self.field(row, name);
            assert_eq!(kept, result[name].to_string(), "{problem}: {name}: run planning.sh");
        }
        let work = result["wall"]["work_units"].to_string();
        assert_eq!(self.field(row, "work_units"), work, "{problem}: work_units: run planning.sh");
    }
}

fn planned(arguments: &[&str]) -> Value {
    let output = fraglab(&[&["plan", "--quiet", "--json", "-"], arguments].concat());
    assert_code(&output, 0);
    serde_json::from_str(&stdout(&output)).expect("JSON and nothing else")
}

/// The height that MiniMalloc's problems are published with.
const CAPACITY: &str = "1048576";

/// As `planning.sh` calls it.
#[test]
fn packings_of_published_problems_are_those_of_the_report() {
    let Some(dir) = shared("data/minimalloc") else { return };
    let kept = Packed::read();
    for instance in 'A'..='K' {
        let problem = format!("{instance}.{CAPACITY}");
        let path = dir.join("challenging").join(format!("{problem}.csv"));
        let work = "4500000000";
        let path = path.to_str().expect("UTF-8");
        let result = planned(&["--work", work, "--capacity", CAPACITY, path]);
        kept.assert_holds(kept.row("minimalloc", &problem, work, CAPACITY), &result);
    }
}

#[test]
fn packings_of_synthetic_problems_are_those_of_the_report() {
    let kept = Packed::read();
    for shape in ["dense:10000", "moe:10000,seed=1", "thin:100000,seed=2"] {
        let work = "40000000";
        let result = planned(&["--work", work, "--synthetic", shape]);
        kept.assert_holds(kept.row("synthetic", shape, work, ""), &result);
    }
}

#[test]
fn packings_of_recordings_are_those_of_the_report() {
    let Some(dir) = shared("recordings") else { return };
    let kept = Packed::read();
    for trace in ["tiny", "graph-train", "streams-offload", "pipeline-1f1b"] {
        let path = dir.join(format!("{trace}.pickle.gz"));
        let work = "100000000";
        let result = planned(&["--work", work, path.to_str().expect("UTF-8")]);
        kept.assert_holds(kept.row("recording", trace, work, ""), &result);
    }
}

/// The device of the recorded jobs.
const H200_BYTES: &str = "150109880320";

/// Rows of `planned.csv`, one by one: a job with a plan that holds, one whose requests change, one
/// with streams, and one whose profile STAlloc refuses.
#[test]
fn replays_of_plans_are_those_of_the_report() {
    let Some(dir) = shared("recordings") else { return };
    let kept = report("planned.csv");
    let all = "caching,planned,planned+mode=stalloc,planned+mode=stalloc+faithful=false";
    let one_step = "caching,planned,planned+mode=stalloc+faithful=false";
    for (trace, allocators) in [
        ("opt-1-3b-recompute-offload", all),
        ("mixtral-moe", all),
        ("streams-offload", all),
        ("tiny", one_step),
    ] {
        let path = dir.join(format!("{trace}.pickle.gz"));
        let path = path.to_str().expect("UTF-8");
        let args = ["compare", "--trace", path, "--alloc", allocators];
        let options = ["--capacity", H200_BYTES, "--sort", "given", "--format", "csv"];
        let output = fraglab(&[&args[..], &options].concat());
        assert_code(&output, 0);
        let given = stdout(&output);
        assert_eq!(given.lines().count(), allocators.split(',').count() + 1, "{given}");
        for row in given.lines().skip(1) {
            assert!(kept.lines().any(|line| line == row), "run planning.sh; lacks {row}");
        }
    }
}
