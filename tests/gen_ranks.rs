//! `fraglab gen --ranks`: the traces of many ranks, however often it is stopped on the way.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fraglab::import::{ReadOptions, read_trace};
use fraglab::workload::{generate, read_job};

use crate::common::program::{
    Folder, assert_code, assert_one_error, code, fraglab, stderr, stdout,
};

const JOB: &str = "\
name = \"tiny\"
[model]
type = \"llama\"
layers = 2
hidden = 256
heads = 4
vocabulary = 1000
[train]
batch = 2
sequence = 128
steps = 4
seed = 5
[lengths]
min = 16
max = 128
";

/// The files of a folder by name, without hidden ones, which are not finished.
fn files(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .map(|entry| entry.expect("readable"))
        .map(|entry| (entry.file_name().into_string().expect("readable"), entry.path()))
        .filter(|(name, _)| !name.starts_with('.'))
        .map(|(name, path)| (name, fs::read(path).expect("readable")))
        .collect()
}

/// Makes `ranks` traces of the job in a folder of their own, which is made with them.
fn make(folder: &Folder, name: &str, arguments: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let spec = folder.file("job.toml", JOB);
    let pattern = folder.path(&format!("{name}/t.rank{{rank}}.json.zst"));
    assert_code(&fraglab(&[&["gen", &spec, "-o", &pattern], arguments].concat()), 0);
    files(&folder.path(name))
}

#[test]
fn every_rank_is_the_job_with_a_seed_of_its_own() {
    let folder = Folder::new();
    let made = make(&folder, "ranks", &["--ranks", "11"]);
    let names: Vec<String> = (0..11).map(|rank| format!("t.rank{rank:02}.json.zst")).collect();
    assert_eq!(made.keys().cloned().collect::<Vec<_>>(), names);
    let job = read_job(JOB, &[]).expect("a job");
    for (rank, name) in names.iter().enumerate() {
        let path = folder.path(&format!("ranks/{name}"));
        let trace = read_trace(Path::new(&path), &ReadOptions::default()).expect("a trace").trace;
        let shown = format!("{rank:02}");
        assert_eq!(trace.header.name, format!("tiny.rank{shown}"));
        let expected = generate(&job.of_rank(rank as u64, &shown)).expect("a trace");
        assert_eq!((&trace.events, &trace.blocks), (&expected.events, &expected.blocks));
    }
    let different: std::collections::BTreeSet<&Vec<u8>> = made.values().collect();
    assert_eq!(different.len(), 11);
}

#[test]
fn files_are_the_same_on_any_number_of_threads_and_whichever_are_made_together() {
    let folder = Folder::new();
    let all = make(&folder, "one", &["--ranks", "10", "--threads", "1"]);
    assert!(make(&folder, "seven", &["--ranks", "10", "--threads", "7"]) == all);
    make(&folder, "parts", &["--ranks", "10", "--last", "3"]);
    let middle = make(&folder, "middle", &["--ranks", "10", "--first", "4", "--last", "6"]);
    assert_eq!(middle.len(), 3);
    make(&folder, "parts", &["--ranks", "10", "--first", "4", "--last", "6"]);
    assert!(make(&folder, "parts", &["--ranks", "10", "--first", "7"]) == all);
    let seeded = make(&folder, "seeded", &["--ranks", "10", "--seed", "5"]);
    assert!(seeded == all, "--seed is train.seed");
    let other = make(&folder, "other", &["--ranks", "10", "--seed", "6"]);
    assert!(other.iter().all(|(name, bytes)| all[name] != *bytes));
}

#[test]
fn the_level_changes_bytes_on_disk_only() {
    let folder = Folder::new();
    let ranks = |name, level| make(&folder, name, &["--ranks", "1", "--level", level]);
    let (fast, small) = (ranks("fast", "1"), ranks("small", "19"));
    assert!(make(&folder, "default", &["--ranks", "1"]) == fast);
    let name = "t.rank0.json.zst";
    assert!(small[name].len() < fast[name].len());
    let plain = |bytes: &[u8]| zstd::decode_all(bytes).expect("Zstandard");
    assert!(plain(&small[name]) == plain(&fast[name]));
    // One trace alone is written for keeps.
    let spec = folder.path("job.toml");
    let one = |name: &str, arguments: &[&str]| {
        let path = folder.path(name);
        assert_code(&fraglab(&[&["gen", &spec, "-o", &path], arguments].concat()), 0);
        fs::read(path).unwrap()
    };
    let alone = one("alone.json.zst", &[]);
    assert!(one("19.json.zst", &["--level", "19"]) == alone);
    assert!(one("1.json.zst", &["--level", "1"]).len() > alone.len());
}

#[test]
fn what_is_there_is_kept_if_it_is_of_this_description() {
    let folder = Folder::new();
    let all = make(&folder, "ranks", &["--ranks", "6"]);
    let path = |rank: usize| folder.path(&format!("ranks/t.rank{rank}.json.zst"));
    let inode = |rank: usize| fs::metadata(path(rank)).unwrap().ino();
    let before = [inode(0), inode(3), inode(5)];
    fs::remove_file(path(1)).unwrap();
    fs::remove_file(path(4)).unwrap();
    // What a machine may leave that lost power.
    fs::write(path(2), "").unwrap();
    let spec = folder.path("job.toml");
    let pattern = folder.path("ranks/t.rank{rank}.json.zst");
    let keep = ["gen", &spec, "-o", &pattern, "--ranks", "6", "--keep"];
    let output = fraglab(&keep);
    assert_code(&output, 0);
    assert!(
        stdout(&output).contains("ranks: 3 made, 3 kept from before; of those made now:\n"),
        "{}",
        stdout(&output)
    );
    assert!(files(&folder.path("ranks")) == all);
    assert_eq!([inode(0), inode(3), inode(5)], before, "kept files are not written again");
    for other in [["--seed", "6"], ["--level", "19"], ["--set", "train.steps=3"]] {
        let said = assert_one_error(&fraglab(&[&keep[..], &other].concat()));
        assert!(said.contains("t.rank0.json.zst: --keep: is not what "), "{said}");
    }
    // Without it all are made again.
    let output = fraglab(&keep[..keep.len() - 1]);
    assert!(stdout(&output).contains("ranks: 6 made\n"), "{}", stdout(&output));
    assert!(files(&folder.path("ranks")) == all && inode(0) != before[0]);
}

/// Starts the program and waits until it has finished some traces.
fn begun(arguments: &[&str], folder: &str) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let begin = Instant::now();
    while files(folder).len() < 3 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no trace after a minute");
        assert!(child.try_wait().expect("asked").is_none(), "ended before it could be stopped");
        sleep(Duration::from_millis(2));
    }
    child
}

/// Ranks enough that the program is not done before it is stopped.
const MANY: &str = "200";

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_files() {
    let folder = Folder::new();
    let all = make(&folder, "whole", &["--ranks", MANY]);
    let spec = folder.path("job.toml");
    let pattern = folder.path("killed/t.rank{rank}.json.zst");
    let arguments = ["gen", &spec, "-o", &pattern, "--ranks", MANY, "--threads", "1", "--keep"];
    let mut child = begun(&arguments, &folder.path("killed"));
    child.kill().expect("SIGKILL");
    child.wait().expect("ends");
    let some = files(&folder.path("killed"));
    assert!(some.len() < all.len());
    assert!(some.iter().all(|(name, bytes)| all[name] == *bytes), "a file is whole or not there");
    assert_code(&fraglab(&arguments), 0);
    assert!(files(&folder.path("killed")) == all);
}

#[test]
fn ctrl_c_ends_with_whole_files_and_says_how_to_go_on() {
    let folder = Folder::new();
    let spec = folder.file("job.toml", JOB);
    let pattern = folder.path("ranks/t.rank{rank}.json.zst");
    let arguments = ["gen", &spec, "-o", &pattern, "--ranks", MANY, "--threads", "1", "--keep"];
    let child = begun(&arguments, &folder.path("ranks"));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill runs").success());
    let output = child.wait_with_output().expect("ends");
    assert_eq!(code(&output), 130, "{}", stderr(&output));
    let there = files(&folder.path("ranks")).len();
    let said = format!("interrupted: {there} of {MANY} traces are there: --keep makes the others");
    assert!(stderr(&output).contains(&said), "{}", stderr(&output));
    let hidden = fs::read_dir(folder.path("ranks")).unwrap().count() - there;
    assert_eq!(hidden, 0, "no unfinished file stays");
    assert_code(&fraglab(&arguments), 0);
    assert_eq!(files(&folder.path("ranks")).len().to_string(), MANY);
}

#[test]
fn what_makes_no_sense_is_one_line() {
    let folder = Folder::new();
    let spec = folder.file("job.toml", JOB);
    let pattern = folder.path("t.rank{rank}.json.zst");
    let plain = folder.path("t.json.zst");
    let ranks = ["--ranks", "8"];
    let lines: [(&str, &[&str], &str); 7] = [
        (&plain, &ranks, "t.json.zst: --ranks writes a file a rank: expected {rank} in the name"),
        (&pattern, &[], "{rank} is the number of a rank: say how many ranks there are, as in --r"),
        (&pattern, &["--ranks", "8", "--last", "8"], "--last 8: there are 8 ranks, from 0: exp"),
        (&pattern, &["--ranks", "8", "--first", "8"], "--first 8: expected at most 7, the last"),
        (&pattern, &["--ranks", "8", "--first", "3", "--last", "2"], "--first 3: expected at m"),
        (&folder.path("{rank}.json"), &["--ranks", "8", "--level", "3"], "--level is of Zstandard"),
        (&folder.path("{rank}.xyz"), &ranks, "the name does not say which format"),
    ];
    for (output, arguments, expected) in lines {
        let said = assert_one_error(&fraglab(&[&["gen", &spec, "-o", output], arguments].concat()));
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    for arguments in [&["--keep"][..], &["--first", "1"], &["--ranks", "0"], &["--level", "20"]] {
        assert_code(&fraglab(&[&["gen", &spec, "-o", &plain], arguments].concat()), 2);
    }
    assert_eq!(files(Path::new(&spec).parent().unwrap().to_str().unwrap()).len(), 1);
}

#[test]
fn ranks_that_are_all_alike_are_told() {
    let folder = Folder::new();
    let spec = folder.file("job.toml", JOB.split("[lengths]").next().unwrap());
    let pattern = folder.path("{rank}/t.json");
    let output = fraglab(&["gen", &spec, "-o", &pattern, "--ranks", "2"]);
    assert_code(&output, 0);
    assert!(stderr(&output).contains("all ranks are alike: [lengths] or"), "{}", stderr(&output));
    let events = |rank| {
        let path = folder.path(&format!("{rank}/t.json"));
        read_trace(Path::new(&path), &ReadOptions::default()).expect("a trace").trace.events
    };
    assert_eq!(events(0), events(1), "folders are made, and the warning is true");
}
