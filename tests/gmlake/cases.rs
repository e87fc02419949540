//! The text cases of the golden traces on the model: their `expect` lines must hold there too.

use std::fs;
use std::path::{Path, PathBuf};

use fraglab::report::expect::check;
use fraglab::trace::read_text;

use super::replay::replay;
use super::settings::Settings;

/// Golden traces of the notes (8.1): every one has a case at least.
const GOLDEN: [&str; 10] = ["g01", "g02", "g03", "g04", "g06", "g07", "g08", "g11", "g13", "g14"];

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/cases");
    let entries = fs::read_dir(folder).expect("the folder of cases");
    let mut cases: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    cases.retain(|case| name(case).starts_with("gmlake-"));
    cases.sort();
    cases
}

fn name(case: &Path) -> &str {
    case.file_stem().and_then(|name| name.to_str()).expect("UTF-8")
}

#[test]
fn every_golden_trace_has_a_case() {
    for golden in GOLDEN {
        let prefix = format!("gmlake-{golden}-");
        assert!(cases().iter().any(|case| name(case).starts_with(&prefix)), "{golden}");
    }
}

#[test]
fn the_model_gives_what_the_cases_expect() {
    for case in cases() {
        let trace = read_text(&fs::read_to_string(&case).expect("readable")).expect("a trace");
        let mut checked = 0;
        for expectation in &trace.header.expectations {
            // Other allocators are not the model's business.
            let Some(settings) = Settings::of_spec(&expectation.allocator) else { continue };
            let run = replay(&trace, &settings);
            run.model.check();
            let place = format!("{}:{}", name(&case), expectation.line);
            let found = check(&run.json(), expectation).unwrap_or_else(|e| panic!("{place}: {e}"));
            assert!(found.holds, "{place}: {} is {}", found.path, found.got);
            checked += 1;
        }
        assert!(checked >= 3, "{}: {checked} expectations for the model", name(&case));
    }
}
