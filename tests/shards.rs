//! Experiments over many traces: folders, parts that are joined again, kills and Ctrl-C.

use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::program::*;

/// A trace that keeps blocks of this many MiB, so that ranks differ.
fn rank(size_mib: usize) -> String {
    format!("alloc a {size_mib}MiB\nalloc b 3MiB\nfree a\nalloc c {}MiB\nfree b c\n", size_mib + 1)
}

/// A folder `ranks` of so many traces.
fn ranks(count: usize) -> Folder {
    let folder = Folder::new();
    fs::create_dir(folder.path("ranks")).expect("a folder");
    for number in 0..count {
        folder.file(&format!("ranks/rank{number}.txt"), &rank(20 + number));
    }
    folder
}

/// Runs the folder `ranks` through two allocators, with results in the folder `to`.
fn run(folder: &Folder, to: &str, more: &[&str]) -> Output {
    let (input, to, cache) = (folder.path("ranks"), folder.path(to), folder.path("cache"));
    let mut args = vec!["experiment", &input, "--alloc", "caching,expandable", "-o", &to];
    if !more.contains(&"--fresh") && !more.contains(&"--merge") {
        args.extend(["--cache", &cache]);
    }
    args.extend(more);
    fraglab(&args)
}

/// Every file in a folder, by name.
fn files(folder: &Folder, name: &str) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(folder.path(name))
        .expect("a folder")
        .map(|entry| {
            let entry = entry.expect("a file");
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).expect("read"))
        })
        .collect();
    files.sort();
    files
}

#[track_caller]
fn assert_same_files(folder: &Folder, one: &str, other: &str) {
    let (one, other) = (files(folder, one), files(folder, other));
    let names = |files: &[(String, Vec<u8>)]| -> Vec<String> {
        files.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&one), names(&other));
    for ((name, one), (_, other)) in one.iter().zip(&other) {
        assert!(one == other, "{name} differs");
    }
}

/// What `COUNT cells, KEPT of them kept from before` says.
#[track_caller]
fn told(output: &Output) -> (usize, usize) {
    let text = stderr(output);
    let line = text.lines().find(|line| line.contains("kept from before")).expect(&text);
    let words: Vec<&str> = line.split(' ').collect();
    let at = words.iter().position(|word| *word == "cells,").expect("cells");
    let number = |word: &str| word.parse().expect("a number");
    (number(words[at - 1]), number(words[at + 1]))
}

#[test]
fn a_folder_stands_for_its_traces() {
    let folder = ranks(11);
    folder.file("ranks/README.md", "# Not a trace\n");
    folder.file("ranks/rank0.truth.json", "{}");
    let output = run(&folder, "out", &[]);
    assert_code(&output, 0);
    let csv = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    let rows: Vec<Vec<&str>> = csv.lines().skip(1).map(|line| line.split(',').collect()).collect();
    let traces: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    let expected: Vec<String> =
        (0..11).flat_map(|number| vec![format!("rank{number}"); 2]).collect();
    assert_eq!(traces, expected, "rank2 before rank10, each through both");
    assert_eq!((rows[0][2], rows[1][2]), ("caching", "expandable"));
    let report = fs::read_to_string(folder.path("out/ranks.md")).expect("a report");
    assert!(report.contains("/ranks --alloc caching,expandable`"), "{report}");
    // By hand: `caching` holds a (30), b (a segment of 20) and c (31, rounded to 32 by segments of
    // 2 MiB), and nothing of a serves c. The largest of all ranks is that of the last.
    assert!(report.contains("## A fleet of 11 ranks"), "{report}");
    let peak = |row: &[&str]| row[12].parse::<u64>().expect("a number");
    assert_eq!(csv.lines().next().expect("names").split(',').nth(12), Some("reserved_bytes_peak"));
    assert_eq!(peak(&rows[20]), (30 + 20 + 32) << 20);
    // The same without --alloc; and a description names its own.
    let input = folder.path("ranks");
    let to = folder.path("default");
    assert_code(&fraglab(&["experiment", &input, "-o", &to, "--cache", &folder.path("cache")]), 0);
    assert_same_files(&folder, "out", "default");
    let toml = folder.file(
        "x.toml",
        "name = \"ranks\"\ntraces = [\"ranks/\"]\nallocators = [\"caching\", \"expandable\"]\n",
    );
    let error = assert_one_error(&fraglab(&["experiment", &toml, "--alloc", "native"]));
    assert!(error.contains("--alloc goes with a folder"), "{error}");
    assert_code(&fraglab(&["experiment", &toml, "-o", &folder.path("toml"), "--fresh"]), 0);
    assert_eq!(fs::read_to_string(folder.path("toml/ranks.csv")).expect("results"), csv);
    fs::create_dir(folder.path("empty")).expect("a folder");
    let error = fraglab(&["experiment", &folder.path("empty"), "--fresh"]);
    let told = assert_one_error(&error);
    assert!(told.contains("empty: no trace in this folder: expected files"), "{told}");
    assert!(!told.contains(":1:1") && !told.contains('^'), "no place in a text: {told}");
}

#[test]
fn a_damaged_rank_is_a_failed_one_and_what_is_no_trace_is_named() {
    let folder = ranks(2);
    folder.file("ranks/README.md", "# Not a trace\n");
    folder.file("ranks/notes.txt", "Ran on two nodes.\n");
    folder.file("ranks/baseline.json", "{\"entries\": []}\n");
    fs::write(folder.path("ranks/rank2.json.zst"), [0; 64]).expect("written");
    folder.file("ranks/rank3.json", "{\"f");
    let output = run(&folder, "out", &[]);
    assert_code(&output, 2);
    let told = stderr(&output);
    let passed_over = "passed over 3 files, no trace by name or content: README.md, baseline.json, \
                       notes.txt\n";
    assert!(told.contains(passed_over), "{told}");
    assert!(told.contains("rank2.json.zst: not a trace: begins with the bytes 00"), "{told}");
    assert!(told.contains("rank3.json"), "{told}");
    let csv = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    assert_eq!((csv.matches(",ok,").count(), csv.matches(",failed,").count()), (4, 4), "{csv}");
    let out = folder.path("merged.json");
    let merged = fraglab(&["merge-ranks", &folder.path("ranks"), "-o", &out]);
    assert_code(&merged, 2);
    assert!(stderr(&merged).contains("rank2.json.zst: not a trace"), "{}", stderr(&merged));
    assert!(!std::path::Path::new(&out).exists());
}

#[cfg(unix)]
#[test]
fn a_rank_behind_a_link_that_leads_nowhere_is_a_failed_one() {
    let folder = ranks(2);
    std::os::unix::fs::symlink("gone.txt", folder.path("ranks/rank2.txt")).expect("linked");
    let output = run(&folder, "out", &[]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("rank2.txt: No such file"), "{}", stderr(&output));
    let csv = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    assert_eq!((csv.matches(",ok,").count(), csv.matches(",failed,").count()), (4, 2), "{csv}");
}

#[test]
fn traces_that_cannot_be_read_fail_alone_and_are_told_in_few_lines() {
    let folder = ranks(3);
    for number in 10..30 {
        folder.file(&format!("ranks/rank{number}.txt"), "alloc a\n");
    }
    let output = run(&folder, "out", &[]);
    assert_code(&output, 2);
    let errors = stderr(&output);
    assert_eq!(errors.matches("rank10.txt:1:").count(), 1, "{errors}");
    assert!(errors.contains("and 10 more like these"), "{errors}");
    let csv = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    assert_eq!(csv.matches(",ok,").count(), 6, "{csv}");
    assert_eq!(csv.matches(",failed,").count(), 40, "{csv}");
}

#[test]
fn equal_traces_are_computed_once() {
    let folder = ranks(1);
    for number in 1..6 {
        folder.file(&format!("ranks/rank{number}.txt"), &rank(20));
    }
    let output = run(&folder, "out", &["--threads", "1"]);
    assert_code(&output, 0);
    // Ten of the twelve cells are those of the first rank.
    assert_eq!(told(&output), (12, 10));
    let kept = fs::read_to_string(folder.path("cache/ranks.jsonl")).expect("kept");
    assert_eq!(kept.lines().count(), 2);
    let csv = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    let results: Vec<&str> =
        csv.lines().skip(1).map(|line| line.split_once(',').expect("a name").1).collect();
    assert!(results.chunks(2).all(|pair| pair == &results[..2]), "{csv}");
}

/// Work that takes a second or more in a build without optimisation, cell by cell.
fn long_ranks(count: usize) -> Folder {
    let folder = ranks(0);
    for number in 0..count {
        let text = format!(
            "repeat 2000\n  alloc a {}MiB\n  alloc b 3MiB\n  free a\n  alloc c 41MiB\n  free b c\nend\n",
            20 + number
        );
        folder.file(&format!("ranks/rank{number}.txt"), &text);
    }
    folder
}

fn start(folder: &Folder, to: &str, more: &[&str]) -> Child {
    std::process::Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(["experiment", &folder.path("ranks"), "--alloc", "caching,expandable", "-o"])
        .args([&folder.path(to), "--cache", &folder.path("cache")])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts")
}

/// Waits until so many lines are kept, or the program has ended.
fn wait_for_lines(folder: &Folder, child: &mut Child, lines: usize) {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until && child.try_wait().expect("asked").is_none() {
        let kept = fs::read(folder.path("cache/ranks.jsonl")).unwrap_or_default();
        if kept.iter().filter(|&&byte| byte == b'\n').count() >= lines {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Cells that are still to run, as `--list` says.
fn to_run(folder: &Folder) -> usize {
    let output = run(folder, "out", &["--list"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    let last = text.lines().last().expect("a line").to_owned();
    let (before, _) = last.split_once(" to run").expect(&last);
    before.rsplit(' ').next().and_then(|word| word.parse().ok()).expect(&last)
}

#[test]
fn what_was_killed_goes_on_and_comes_out_the_same() {
    let folder = long_ranks(20);
    assert_code(&run(&folder, "reference", &["--fresh", "--quiet"]), 0);
    let mut kills = 0;
    let mut done_before = 0;
    for lines in [1, 7, 15, 24, 33] {
        let mut child = start(&folder, "out", &["--threads", "2"]);
        wait_for_lines(&folder, &mut child, lines);
        // SIGKILL: nothing of the program runs after it.
        let _ = child.kill();
        kills += usize::from(!child.wait().expect("ends").success());
        let done = 40 - to_run(&folder);
        assert!(done >= done_before, "what was kept stays: {done} {done_before}");
        done_before = done;
        // No file of results appears before all cells are done.
        assert!(done == 40 || !Path::new(&folder.path("out/ranks.csv")).exists());
    }
    assert!(kills > 0, "no run was long enough to be killed");
    let kept = |folder: &Folder| {
        let text = fs::read(folder.path("cache/ranks.jsonl")).expect("kept");
        text.iter().filter(|&&byte| byte == b'\n').count()
    };
    let (left, lines) = (to_run(&folder), kept(&folder));
    let output = run(&folder, "out", &[]);
    assert_code(&output, 0);
    assert_eq!(told(&output), (40, 40 - left), "no cell that was kept ran again");
    // A line each was added, and one that ends what was torn at most.
    let added = kept(&folder) - lines;
    assert!(added == left || added == left + 1, "{added} {left}");
    assert_same_files(&folder, "reference", "out");
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_is_done_and_leaves_older_files() {
    let folder = long_ranks(30);
    fs::create_dir(folder.path("out")).expect("a folder");
    folder.file("out/ranks.csv", "what an earlier run found\n");
    let json = folder.path("rows.json");
    let mut child = start(&folder, "out", &["--threads", "2", "--json", &json]);
    wait_for_lines(&folder, &mut child, 5);
    let id = child.id().to_string();
    let sent = std::process::Command::new("kill").args(["-INT", &id]).status().expect("runs");
    assert!(sent.success());
    let output = child.wait_with_output().expect("ends");
    assert_code(&output, 130);
    let text = stderr(&output);
    let line = text.lines().find(|line| line.contains(" interrupted: ") && line.contains("cells"));
    let line = line.expect(&text);
    let (_, counts) = line.split_once("interrupted: ").expect("counts");
    let done: usize = counts.split(' ').next().and_then(|it| it.parse().ok()).expect(line);
    assert!(
        counts.contains(" of 60 cells done, in ") && line.contains("ranks.partial.csv"),
        "{line}"
    );
    assert!(line.ends_with("the same command goes on from there"), "{line}");
    assert!((5..60).contains(&done), "{line}");
    let partial = fs::read_to_string(folder.path("out/ranks.partial.csv")).expect("rows");
    assert_eq!(partial.lines().count(), 1 + done);
    assert!(!Path::new(&json).exists(), "only beside it");
    let objects = fs::read_to_string(folder.path("rows.partial.json")).expect("rows");
    let objects: Vec<serde_json::Value> = serde_json::from_str(&objects).expect("an array");
    assert_eq!(objects.iter().filter(|it| it["partial"] == true).count(), done);
    assert_eq!(
        fs::read_to_string(folder.path("out/ranks.csv")).expect("there"),
        "what an earlier run found\n"
    );
    // Every row that was told is among those of the whole, and none of them is computed again.
    let output = run(&folder, "out", &[]);
    assert_code(&output, 0);
    assert_eq!(told(&output), (60, done));
    assert!(!Path::new(&folder.path("out/ranks.partial.csv")).exists(), "whole now");
    let whole = fs::read_to_string(folder.path("out/ranks.csv")).expect("results");
    assert!(partial.lines().all(|line| whole.lines().any(|other| other == line)));
}

/// As in `fraglab experiment ranks/ | head -1`.
#[cfg(unix)]
#[test]
fn what_is_partial_goes_although_the_reader_has_left() {
    let folder = ranks(2);
    fs::create_dir(folder.path("out")).expect("a folder");
    let partial = folder.file("out/ranks.partial.csv", "rows of a run that was interrupted\n");
    let mut child = start(&folder, "out", &[]);
    drop(child.stdout.take());
    child.wait().expect("ends");
    assert!(Path::new(&folder.path("out/ranks.csv")).exists(), "whole");
    assert!(!Path::new(&partial).exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_error_and_tears_nothing() {
    let folder = ranks(4);
    assert_code(&run(&folder, "out", &["--quiet"]), 0);
    let before = files(&folder, "out");
    fs::remove_file(folder.path("cache/ranks.jsonl")).expect("removed");
    std::os::unix::fs::symlink("/dev/full", folder.path("cache/ranks.jsonl")).expect("a link");
    folder.file("ranks/rank0.txt", &rank(99));
    let error = assert_one_error(&run(&folder, "out", &["--quiet"]));
    assert!(
        error.contains("ranks.jsonl: cannot keep results: ") && error.contains("--fresh"),
        "{error}"
    );
    assert_eq!(files(&folder, "out"), before);
}

#[test]
fn parts_that_make_no_sense_are_refused() {
    let folder = ranks(2);
    for shard in ["0/4", "5/4", "1", "x/2"] {
        let output = run(&folder, "out", &["--shard", shard]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("I from 1 to N"), "{}", stderr(&output));
    }
    for other in [&["--only", "trace=rank1"][..], &["--figures-only"], &["--merge", "parts"]] {
        let output = run(&folder, "out", &[&["--shard", "1/2"][..], other].concat());
        assert_code(&output, 2);
        assert!(stderr(&output).contains("cannot be used with"), "{}", stderr(&output));
    }
    assert!(!Path::new(&folder.path("out")).exists());
}

#[cfg(not(feature = "analytics"))]
#[test]
fn parts_need_parquet() {
    let folder = ranks(2);
    for more in [&["--shard", "1/2"][..], &["--merge", "parts"]] {
        let error = assert_one_error(&run(&folder, "out", more));
        assert!(error.contains("without the feature `analytics`"), "{error}");
    }
}

#[cfg(feature = "analytics")]
mod joined {
    use fraglab::alloc::spec::AllocSpec;
    use fraglab::experiment::{Description, KeyBuilder};
    use fraglab::report::parts::{Part, join, write_part};

    use super::*;

    fn shard(folder: &Folder, number: usize, count: usize) -> Output {
        run(folder, "parts", &["--shard", &format!("{number}/{count}")])
    }

    fn merge(folder: &Folder, more: &[&str]) -> Output {
        let parts = folder.path("parts");
        run(folder, "merged", &[&["--merge", &parts][..], more].concat())
    }

    /// All parts of eleven traces, one of which runs out of memory.
    fn divided(count: usize) -> Folder {
        let folder = ranks(10);
        folder.file("ranks/rank10.txt", "capacity 64MiB\nalloc a 40MiB\nalloc b 40MiB\n");
        for number in 1..=count {
            assert_code(&shard(&folder, number, count), 0);
        }
        folder
    }

    fn name(number: usize, count: usize) -> String {
        format!("parts/ranks.shard-{number}-of-{count}.parquet")
    }

    #[test]
    fn parts_join_to_the_files_of_the_whole() {
        let folder = divided(4);
        let names: Vec<String> =
            files(&folder, "parts").into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            names,
            (1..=4).map(|it| format!("ranks.shard-{it}-of-4.parquet")).collect::<Vec<_>>()
        );
        assert_code(&run(&folder, "whole", &["--fresh"]), 0);
        // No trace is needed to merge.
        fs::rename(folder.path("ranks"), folder.path("elsewhere")).expect("moved");
        let output = merge(&folder, &[]);
        assert_code(&output, 0);
        assert!(stderr(&output).contains("4 parts merged, 22 cells"), "{}", stderr(&output));
        assert_same_files(&folder, "whole", "merged");
        let parquet = fs::read(folder.path("merged/ranks.parquet")).expect("Parquet too");
        assert!(parquet.starts_with(b"PAR1"));
    }

    #[test]
    fn more_parts_than_traces_are_empty_ones() {
        let folder = ranks(2);
        for number in 1..=3 {
            assert_code(&shard(&folder, number, 3), 0);
        }
        assert_code(&merge(&folder, &[]), 0);
        assert_code(&run(&folder, "whole", &["--fresh"]), 0);
        assert_same_files(&folder, "whole", "merged");
    }

    #[test]
    fn each_part_takes_up_what_others_kept() {
        let folder = divided(4);
        let kept: Vec<String> = files(&folder, "cache").into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            kept,
            (1..=4).map(|it| format!("ranks.shard-{it}-of-4.jsonl")).collect::<Vec<_>>()
        );
        assert_eq!(told(&run(&folder, "whole", &[])), (22, 22));
        // Of another division too: the first of 3 has traces 0, 3, 6 and 9.
        assert_eq!(told(&shard(&folder, 1, 3)), (8, 8));
    }

    #[test]
    fn failed_cells_are_told_when_parts_are_joined_too() {
        let folder = ranks(3);
        folder.file("ranks/rank1.txt", "alloc a\n");
        for (number, code) in [(1, 0), (2, 2)] {
            assert_code(&shard(&folder, number, 2), code);
        }
        let output = merge(&folder, &[]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("rank1.txt:1:"), "{}", stderr(&output));
        assert_code(&run(&folder, "whole", &["--fresh"]), 2);
        assert_same_files(&folder, "whole", "merged");
    }

    #[track_caller]
    fn refused(folder: &Folder, more: &[&str]) -> String {
        let error = assert_one_error(&merge(folder, more));
        assert!(!Path::new(&folder.path("merged")).exists(), "nothing is written");
        error
    }

    #[test]
    fn parts_that_make_no_whole_are_refused() {
        let folder = divided(4);
        fs::remove_file(folder.path(&name(2, 4))).expect("removed");
        let error = refused(&folder, &[]);
        assert!(error.contains("1 of 4 parts missing: ranks.shard-2-of-4.parquet"), "{error}");
        assert!(error.contains("--shard 2/4 -o "), "{error}");
        fs::copy(folder.path(&name(1, 4)), folder.path(&name(2, 4))).expect("copied");
        let error = refused(&folder, &[]);
        assert!(error.contains("are both part 1/4"), "{error}");
        assert_code(&shard(&folder, 2, 4), 0);
        assert_code(&shard(&folder, 1, 3), 0);
        let error = refused(&folder, &[]);
        assert!(error.contains("the number of parts"), "{error}");
        fs::remove_file(folder.path(&name(1, 3))).expect("removed");
        // Cut short, and a byte changed.
        let bytes = fs::read(folder.path(&name(3, 4))).expect("read");
        fs::write(folder.path(&name(3, 4)), &bytes[..bytes.len() / 2]).expect("written");
        let error = refused(&folder, &[]);
        assert!(error.contains("shard-3-of-4.parquet: damaged"), "{error}");
        let mut changed = bytes.clone();
        changed[bytes.len() / 3] ^= 1;
        fs::write(folder.path(&name(3, 4)), &changed).expect("written");
        let error = refused(&folder, &[]);
        assert!(error.contains("shard-3-of-4.parquet: damaged: its checksum"), "{error}");
        fs::write(folder.path(&name(3, 4)), "what is this").expect("written");
        let error = refused(&folder, &[]);
        assert!(error.contains("no part of an experiment"), "{error}");
        fs::write(folder.path(&name(3, 4)), bytes).expect("written");
        assert_code(&merge(&folder, &[]), 0);
        // Other allocators are another description.
        let (input, parts) = (folder.path("ranks"), folder.path("parts"));
        let args = ["experiment", &input, "--alloc", "native", "--merge", &parts];
        let error = assert_one_error(&fraglab(&args));
        assert!(error.contains("another description"), "{error}");
    }

    /// Writes a part anew with another header or other places of its cells.
    fn forge(folder: &Folder, number: usize, build: Option<&str>, first_cell: Option<u64>) {
        let path = folder.path(&name(number, 4));
        let part = Part::read(fs::read(&path).expect("read")).expect("a part");
        let mut header = part.header.clone();
        header.program = build.map_or(header.program, str::to_owned);
        let mut cells = part.cells().expect("places");
        cells[0] = first_cell.unwrap_or(cells[0]);
        let of_rows: Vec<_> =
            cells.iter().map(|&cell| (cell, Some(KeyBuilder::default().key()))).collect();
        let allocators = AllocSpec::parse_list("caching,expandable").expect("allocators");
        let columns = Description::of_folder("ranks", &allocators).columns();
        let rows = join(vec![part], columns).expect("rows");
        let mut bytes = Vec::new();
        write_part(&header, &rows, &of_rows, &mut bytes).expect("written");
        fs::write(path, bytes).expect("written");
    }

    #[test]
    fn cells_that_are_in_two_parts_or_none_are_refused() {
        let folder = divided(4);
        // The first part has cells 0, 1, 8, ...; the second 2, 3, 10, ...
        forge(&folder, 2, None, Some(0));
        let error = refused(&folder, &[]);
        assert!(error.contains("cell 0 is in both") && error.contains("shard-2-of-4"), "{error}");
        forge(&folder, 2, None, Some(1000));
        let error = refused(&folder, &[]);
        assert!(error.contains("shard-2-of-4.parquet has cell 1000 of 22"), "{error}");
        forge(&folder, 2, None, Some(3));
        let error = refused(&folder, &[]);
        assert!(error.contains("cell 3 is in both"), "{error}");
    }

    #[test]
    fn parts_of_different_builds_are_joined_only_on_demand() {
        let folder = divided(4);
        forge(&folder, 2, Some(&"ab".repeat(16)), None);
        let error = refused(&folder, &[]);
        assert!(error.contains("the build") && error.contains("abababab"), "{error}");
        assert!(error.contains("--allow-mixed-builds"), "{error}");
        assert_code(&merge(&folder, &["--allow-mixed-builds"]), 0);
        assert_code(&run(&folder, "whole", &["--fresh"]), 0);
        assert_same_files(&folder, "whole", "merged");
    }

    #[test]
    fn a_part_that_was_killed_goes_on() {
        let folder = long_ranks(12);
        let mut child = start(&folder, "parts", &["--shard", "1/2", "--threads", "1"]);
        let kept = folder.path("cache/ranks.shard-1-of-2.jsonl");
        let until = Instant::now() + Duration::from_secs(60);
        while fs::read(&kept).unwrap_or_default().len() < 1500 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = child.kill();
        let is_done = child.wait().expect("ends").success();
        let part = folder.path(&name(1, 2));
        assert_eq!(Path::new(&part).exists(), is_done, "a part appears whole or not at all");
        let output = shard(&folder, 1, 2);
        assert_code(&output, 0);
        assert!(told(&output).1 > 0, "{}", stderr(&output));
        assert_code(&shard(&folder, 2, 2), 0);
        assert_code(&merge(&folder, &[]), 0);
        assert_code(&run(&folder, "whole", &["--fresh"]), 0);
        assert_same_files(&folder, "whole", "merged");
    }
}
