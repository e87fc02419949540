//! The text cases under `traces/cases`: each says by hand what runs of it must give.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use tempfile::TempDir;

/// Fewest `expect` lines that make a file a case.
const EXPECTATIONS_MIN: usize = 3;

fn case_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/cases")
}

/// All cases, in the order of their names.
fn cases() -> Vec<PathBuf> {
    let entries = fs::read_dir(case_dir()).expect("the folder of cases");
    let mut cases: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    cases.sort();
    assert!(!cases.is_empty());
    cases
}

fn text_of(case: &Path) -> String {
    fs::read_to_string(case).unwrap_or_else(|error| panic!("{}: {error}", case.display()))
}

fn expectations(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| line.starts_with("expect "))
}

fn check_expectations(case: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(["run", "--check-expect", "--trace"])
        .arg(case)
        .args(more)
        .output()
        .expect("runs")
}

fn shown(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Where addresses come from and the contract of allocators are no business of these expectations.
#[test]
fn every_case_gives_what_it_expects() {
    for case in cases() {
        for more in
            [&["--paranoid"][..], &["--addresses", "ascending"], &["--addresses", "descending"]]
        {
            let output = check_expectations(&case, more);
            assert_eq!(
                output.status.code(),
                Some(0),
                "{} {more:?}: {}",
                case.display(),
                shown(&output)
            );
            let held = format!("{} expectations hold", expectations(&text_of(&case)).count());
            assert!(shown(&output).contains(&held), "{}: {}", case.display(), shown(&output));
        }
    }
}

#[test]
fn every_case_names_its_source_and_expects_enough() {
    for case in cases() {
        let name = case.file_name().and_then(|name| name.to_str()).expect("UTF-8").to_owned();
        assert!(name.ends_with(".txt"), "{name} is no text case");
        let text = text_of(&case);
        let header = text.lines().map_while(|line| line.strip_prefix('#'));
        let header = header.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
        let sourced = header.contains("https://");
        let by_hand = header.contains("by hand");
        assert!(sourced || by_hand, "{name}: the header names neither an address nor \"by hand\"");
        let named_by_hand = name.starts_with("hand-") || name.starts_with("vector-");
        assert_eq!(by_hand, named_by_hand, "{name}: name and header disagree");
        let count = expectations(&text).count();
        assert!(count >= EXPECTATIONS_MIN, "{name}: {count} expectations");
    }
}

#[test]
fn the_table_of_cases_is_complete() {
    let readme = text_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/README.md"));
    let listed: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| [")?.split_once("](cases/"))
        .map(|(name, _)| name)
        .collect();
    let mut sorted = listed.clone();
    sorted.sort_unstable();
    sorted.dedup();
    let mut names: Vec<String> = cases()
        .iter()
        .map(|case| case.file_stem().expect("a name").to_str().expect("UTF-8").to_owned())
        .collect();
    names.sort();
    assert_eq!(sorted, names, "the table in traces/README.md and traces/cases differ");
    assert_eq!(listed.len(), names.len(), "a case is listed twice");
}

/// A case whose expectation is off by one byte must fail, and say where.
#[test]
fn a_falsified_expectation_fails() {
    let case = case_dir().join("pytorch-devlog-order-small-first.txt");
    let text = text_of(&case);
    let true_line = "expect caching reserved_bytes_peak 256MiB";
    let line = 1 + text.lines().position(|line| line == true_line).expect("the line");
    let folder = TempDir::new().expect("a folder");
    let falsified = folder.path().join("falsified.txt");
    fs::write(&falsified, text.replace(true_line, "expect caching reserved_bytes_peak 268435457"))
        .expect("written");
    let output = check_expectations(&falsified, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let place =
        format!("falsified.txt:{line}: caching peaks.reserved_bytes_peak: expected 268435457");
    assert!(shown(&output).contains(&place), "{}", shown(&output));
}
