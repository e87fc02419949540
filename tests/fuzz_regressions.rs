//! Every input that fuzzing found, and the seeds, through the bodies of the fuzz targets
//! (`tests/fuzz`): on a stable toolchain and with every test run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

// Public for the fuzz package, which has the same files.
#[allow(unreachable_pub)]
#[path = "fuzz/src/targets/mod.rs"]
mod targets;

/// The files of a target's folder, in order; none if there is no such folder.
fn inputs(kind: &str, target: &str) -> Vec<PathBuf> {
    let folder = folder_of(kind).join(target);
    let Ok(entries) = fs::read_dir(&folder) else { return Vec::new() };
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.into_iter().collect()
}

fn folder_of(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz").join(kind)
}

fn run_all(kind: &str) -> usize {
    let mut count = 0;
    for (target, _) in targets::TARGETS {
        for path in inputs(kind, target) {
            // Said only if it fails: the test harness keeps it back until then.
            eprintln!("{}", path.display());
            targets::run(target, &fs::read(&path).expect("reads"));
            count += 1;
        }
    }
    count
}

#[test]
fn what_fuzzing_found_stays_found() {
    assert!(run_all("found") > 0, "no input is kept: the folders have other names");
}

#[test]
fn seeds_hold() {
    run_all("seeds");
    for (target, _) in targets::TARGETS {
        assert!(!inputs("seeds", target).is_empty(), "{target} has no seed to begin with");
    }
}

/// A folder whose name is no target's would never be run.
#[test]
fn every_folder_is_a_targets() {
    // The target that needs polars, in builds without.
    let known: BTreeSet<&str> =
        targets::TARGETS.iter().map(|(name, _)| *name).chain(["parquet"]).collect();
    for kind in ["found", "seeds"] {
        for entry in fs::read_dir(folder_of(kind)).expect("a folder") {
            let name = entry.expect("an entry").file_name();
            let name = name.to_str().expect("a plain name");
            assert!(known.contains(name), "tests/fuzz/{kind}/{name}: no target has that name");
        }
    }
}
