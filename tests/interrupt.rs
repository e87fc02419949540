//! Ctrl-C and SIGKILL: what is kept, how it is marked, and that nothing else is left.
//!
//! A pipe with a name in place of a trace says where a program stands: to open it for writing waits
//! until the program opens it for reading, and then the program waits for what is written.

#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunError, RunOptions, run};
use fraglab::trace::read_text;
use serde_json::Value;

use crate::common::program::{Folder, assert_code, code, fraglab, stderr, stdout};
use crate::common::{Rng, fake_driver};

const TRACE: &str = "capacity 1GiB\nalloc a 100MiB\nalloc b 300MiB\nfree a b\n";

/// Longest wait for anything, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program under way.
struct Running {
    child: Child,
    errors: BufReader<ChildStderr>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("starts");
        let errors = BufReader::new(child.stderr.take().expect("piped"));
        Running { child, errors }
    }

    fn fraglab(args: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
        command.args(args);
        Running::start(command)
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.expect("runs").success(), "it has ended already");
    }

    /// Sends a signal and waits until the program says that it has heard it.
    fn ask(&mut self, name: &str) {
        self.signal(name);
        let mut line = String::new();
        self.errors.read_line(&mut line).expect("reads");
        let told = "fraglab: interrupted: keeping what is done; Ctrl-C again ends at once\n";
        assert_eq!(line, told);
    }

    /// Waits until it has worked for so many hundredths of a second of a processor.
    fn work(&mut self, ticks: u64) {
        let path = format!("/proc/{}/stat", self.child.id());
        let used = || {
            let stat = fs::read_to_string(&path).expect("runs");
            let mut fields = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace();
            fields.nth(11).expect("a field").parse::<u64>().expect("a count")
        };
        wait(|| used() >= ticks);
        assert!(self.child.try_wait().expect("asked").is_none(), "it has ended already");
    }

    /// What it says until it ends, the lines that were read already left out.
    fn end(mut self) -> Output {
        let mut told = Vec::new();
        std::io::Read::read_to_end(&mut self.errors, &mut told).expect("reads");
        Output { stderr: told, ..self.child.wait_with_output().expect("ends") }
    }
}

fn wait(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "nothing happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pipe(folder: &Folder) -> String {
    let path = folder.path("pipe");
    let made = Command::new("mkfifo").arg(&path).status().expect("runs");
    assert!(made.success());
    path
}

fn open(pipe: &str) -> File {
    File::options().write(true).open(pipe).expect("opens")
}

fn names_in(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.path("")).expect("there");
    let names = entries.map(|entry| entry.expect("read").file_name().into_string().expect("UTF-8"));
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn value(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("there")).expect("JSON")
}

/// Runs a command over a trace, a pipe that says nothing, and another trace, on one thread, and
/// interrupts it at the pipe.
fn cut_at_the_pipe(folder: &Folder, signal: &str, args: &[&str]) -> Output {
    folder.file("one.txt", TRACE);
    folder.file("two.txt", TRACE);
    let traces = [folder.path("one.txt"), pipe(folder), folder.path("two.txt")];
    let traces = traces.each_ref().map(String::as_str);
    let mut running = Running::fraglab(&[&["--threads", "1"], args, &traces].concat());
    let writer = open(traces[1]);
    running.ask(signal);
    drop(writer);
    let output = running.end();
    assert_eq!(code(&output), 130, "{}", stderr(&output));
    output
}

#[test]
fn cells_that_are_done_are_shown_and_kept_as_partial() {
    for signal in ["-INT", "-TERM", "-HUP"] {
        let folder = Folder::new();
        let old = "[] of an earlier run\n";
        let [json, csv] = ["a.json", "a.csv"].map(|name| folder.file(name, old));
        let outputs = ["--json", &json, "--timeline", &csv];
        let run = ["run", "--alloc", "caching,native"];
        let output = cut_at_the_pipe(&folder, signal, &[&run[..], &outputs].concat());
        let shown = stdout(&output);
        assert!(shown.starts_with("partial: interrupted after 2 of 6 cells\n"), "{shown}");
        assert!(shown.contains("\ncaching ") && shown.contains("\nnative "), "{shown}");
        let kept = [folder.path("a.partial.json"), folder.path("a.partial.csv")];
        assert_eq!(
            stderr(&output),
            format!(
                "fraglab: interrupted after 2 of 6 cells: what is done is kept in {}, {}; the same \
                 command begins anew\n",
                kept[0], kept[1]
            )
        );
        let results = value(&kept[0]);
        let results = results.as_array().expect("an array");
        assert_eq!(results.len(), 2);
        for result in results {
            assert_eq!(result["partial"], true);
            assert_eq!(result["peaks"]["requested_bytes_peak"], 400 << 20);
        }
        for path in [json, csv] {
            assert_eq!(fs::read_to_string(path).expect("there"), old);
        }
        let names = ["a.csv", "a.json", "a.partial.csv", "a.partial.json", "one.txt", "pipe"];
        assert_eq!(names_in(&folder), [&names[..], &["two.txt"]].concat());
    }
}

#[test]
fn a_comparison_is_kept_in_the_form_that_was_asked_for() {
    let folder = Folder::new();
    let csv = folder.path("a.csv");
    let args = ["compare", "--alloc", "caching,native", "-o", &csv];
    let output = cut_at_the_pipe(&folder, "-INT", &args);
    let shown = stdout(&output);
    assert!(shown.starts_with("partial: interrupted after 2 of 6 cells\n"), "{shown}");
    let rows = fs::read_to_string(folder.path("a.partial.csv")).expect("written");
    assert_eq!(rows.lines().count(), 3, "{rows}");
    assert!(!Path::new(&csv).exists());
}

#[test]
fn a_run_that_is_whole_removes_what_an_interrupted_one_left() {
    let folder = Folder::new();
    let trace = folder.file("one.txt", TRACE);
    let [json, csv, base] = ["a.json", "a.csv", "base.json"].map(|name| folder.path(name));
    let init = ["check", "--baseline", &base, "--init", "--trace", &trace];
    assert_eq!(code(&fraglab(&init)), 0);
    let commands: [&[&str]; 5] = [
        &["run", "--trace", &trace, "--alloc", "caching", "--json", &json, "--timeline", &csv],
        &["compare", "--trace", &trace, "--json", &json, "-o", &csv],
        &["advise", &trace, "--json", &json],
        &["check", "--baseline", &base, "--json", &json],
        &["plan", &trace, "-o", &json],
    ];
    for command in commands {
        let left = ["a.partial.json", "a.partial.csv"].map(|name| folder.file(name, "cut"));
        let output = fraglab(command);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        for (whole, left) in [&json, &csv].into_iter().zip(&left) {
            // What was not asked for is not touched.
            assert_eq!(Path::new(left).exists(), !command.contains(&whole.as_str()), "{command:?}");
        }
    }
}

#[test]
fn a_run_that_is_whole_is_not_called_partial() {
    let folder = Folder::new();
    let trace = folder.file("one.txt", TRACE);
    let json = folder.path("a.json");
    assert_code(&fraglab(&["run", &trace, "--json", &json]), 0);
    assert_eq!(value(&json).get("partial"), None);
}

#[test]
fn nothing_is_kept_where_nothing_is_done() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let json = folder.path("a.json");
    let mut running = Running::fraglab(&["run", &pipe, "--json", &json]);
    let writer = open(&pipe);
    running.ask("-INT");
    drop(writer);
    let output = running.end();
    assert_eq!(code(&output), 130);
    assert_eq!(stdout(&output), "");
    let told = "fraglab: interrupted after 0 of 1 cell: nothing is kept; the same command begins \
        anew\n";
    assert_eq!(stderr(&output), told);
    assert_eq!(names_in(&folder), ["pipe"]);
}

/// The program waits for what nobody writes: it has heard the first, and cannot do anything.
#[test]
fn the_second_ends_at_once() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let mut running = Running::fraglab(&["run", &pipe]);
    let _writer = open(&pipe);
    running.ask("-INT");
    running.signal("-INT");
    let output = running.end();
    assert_eq!((code(&output), stderr(&output)), (130, String::new()));
}

#[test]
fn a_command_that_keeps_nothing_ends_with_the_first() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let running = Running::fraglab(&["info", &pipe]);
    let _writer = open(&pipe);
    running.signal("-TERM");
    let output = running.end();
    assert_eq!((code(&output), stderr(&output)), (130, String::new()));
}

/// `nohup` and batch scripts start a program so.
#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let mut command = Command::new("sh");
    let script = r#"trap '' HUP INT; exec "$0" "$@""#;
    command.args(["-c", script, env!("CARGO_BIN_EXE_fraglab"), "info", &pipe]);
    let running = Running::start(command);
    let mut writer = open(&pipe);
    running.signal("-HUP");
    running.signal("-INT");
    writer.write_all(TRACE.as_bytes()).expect("writes");
    drop(writer);
    let output = running.end();
    assert_code(&output, 0);
    assert!(stdout(&output).contains("pipe"), "{}", stdout(&output));
}

/// Asks a replay to stop while it is under way: how long that takes differs from machine to machine,
/// so it is asked earlier or later until it is.
#[test]
fn a_replay_that_is_cut_tells_how_far_it_got() {
    const BLOCK_BYTES: u64 = 2 << 20;
    let lines = (0..100_000).map(|block| format!("alloc b{block} {BLOCK_BYTES}\n"));
    let trace = read_text(&lines.collect::<String>()).expect("parses");
    let spec = "caching".parse().expect("a specification");
    let options = || RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let whole = run(&trace, &spec, &options(), Observe::default()).expect("runs").result;
    let begun = Instant::now();
    for tries in 0_u64.. {
        assert!(begun.elapsed() < PATIENCE, "{tries} tries");
        let options = options();
        let stop = options.stop.clone();
        let asker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(200 * (1 + tries % 1000)));
            stop.ask();
        });
        let end = run(&trace, &spec, &options, Observe::default());
        asker.join().expect("ends");
        let Err(RunError::Interrupted { event: event @ 1.., events, reserved_bytes_peak, .. }) =
            end
        else {
            continue;
        };
        assert_eq!(events, 100_000);
        assert!(event < events, "{event}");
        // Every block lives on, so that all before this event are held.
        assert!(reserved_bytes_peak >= event * BLOCK_BYTES, "{event}: {reserved_bytes_peak}");
        assert!(reserved_bytes_peak <= whole.peaks.reserved_bytes_peak, "{reserved_bytes_peak}");
        break;
    }
}

/// MiniMalloc's hardest problem, which nobody proves while a test waits.
fn puzzle() -> Option<String> {
    let file = crate::common::shared("data")?.join("minimalloc/challenging/J.1048576.csv");
    Some(file.to_str().expect("a path").to_owned())
}

#[test]
fn a_search_gives_the_best_packing_so_far() {
    let Some(problem) = puzzle() else { return };
    let folder = Folder::new();
    let plan = folder.file("plan.json", "of an earlier run\n");
    let placed = folder.path("placed.csv");
    for output in [&plan, &placed] {
        let args = ["plan", &problem, "--time", "1h", "-o", output, "--threads", "1"];
        let mut running = Running::fraglab(&args);
        running.work(300);
        running.ask("-INT");
        let ended = running.end();
        assert_eq!(code(&ended), 130, "{}", stderr(&ended));
        assert!(stdout(&ended).contains("partial      interrupted"), "{}", stdout(&ended));
        assert!(stderr(&ended).contains("what is done is kept in "), "{}", stderr(&ended));
    }
    assert_eq!(fs::read_to_string(&plan).expect("there"), "of an earlier run\n");
    let kept = value(&folder.path("plan.partial.json"));
    assert_eq!((&kept["partial"], &kept["proven"]), (&Value::Bool(true), &Value::Bool(false)));
    // Checked without any code of the program: none that live at once overlap.
    let text = fs::read_to_string(folder.path("placed.partial.csv")).expect("written");
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let names = reader.headers().expect("names").clone();
    let column = |name: &str| names.iter().position(|it| it == name).expect("there");
    let columns = ["lower", "upper", "offset", "size"].map(column);
    let rows = reader.records().map(|row| {
        let row = row.expect("a row");
        columns.map(|column| row[column].parse::<u64>().expect("a number"))
    });
    let rows: Vec<[u64; 4]> = rows.collect();
    assert_eq!(rows.len(), 409);
    for (at, [lower, upper, offset, size]) in rows.iter().enumerate() {
        for [other_lower, other_upper, other_offset, other_size] in &rows[..at] {
            let at_once = lower < other_upper && other_lower < upper;
            let overlap = *offset < other_offset + other_size && *other_offset < offset + size;
            assert!(!(at_once && overlap), "row {at}");
        }
    }
}

/// A baseline of an earlier run stays, and what was not checked is no regression.
#[test]
fn a_check_that_is_cut_changes_no_baseline() {
    let folder = Folder::new();
    let baseline = folder.path("b.json");
    let traces = ["1.txt", "2.txt", "3.txt"].map(|name| folder.file(name, TRACE));
    let traces = traces.each_ref().map(String::as_str);
    let init = ["check", "--baseline", &baseline, "--init", "--trace"];
    assert_code(&fraglab(&[&init[..], &traces].concat()), 0);
    let before = fs::read(&baseline).expect("there");
    fs::remove_file(traces[1]).expect("removed");
    let made = Command::new("mkfifo").arg(traces[1]).status().expect("runs");
    assert!(made.success());
    let json = folder.path("c.json");
    let args = ["--threads", "1", "check", "--baseline", &baseline, "--update", "--json", &json];
    let mut running = Running::fraglab(&args);
    let writer = open(traces[1]);
    running.ask("-INT");
    drop(writer);
    let output = running.end();
    assert_eq!(code(&output), 130, "{}", stderr(&output));
    assert_eq!(fs::read(&baseline).expect("there"), before);
    let kept = value(&folder.path("c.partial.json"));
    assert_eq!(kept["partial"], true);
    assert_eq!(kept["entries"].as_array().expect("entries").len(), 1);
    assert_eq!(kept["failures"].as_array().expect("failures").len(), 2);
    assert!(!Path::new(&json).exists());
}

/// A trace that takes long to write: names of no pattern, which hardly compress.
fn long_trace(folder: &Folder) -> String {
    let mut random = Rng(1);
    let lines = (0..60_000).map(|block| {
        format!("alloc x{:016x}b{block} {}\n", random.next(), 512 + random.below(1 << 24))
    });
    folder.file("long.txt", &lines.collect::<String>())
}

#[test]
fn no_part_file_is_left_by_a_signal_and_the_next_writer_removes_a_dead_one() {
    let folder = Folder::new();
    let trace = long_trace(&folder);
    let target = folder.path("long.json.zst");
    let part = folder.path(".long.json.zst.part");
    let begun = |signal: &str| {
        let running = Running::fraglab(&["convert", &trace, &target]);
        wait(|| Path::new(&part).exists());
        running.signal(signal);
        running.end()
    };
    for signal in ["-INT", "-TERM"] {
        assert_eq!(code(&begun(signal)), 130, "{signal}");
        assert_eq!(names_in(&folder), ["long.txt"], "{signal}");
    }
    // Nobody can clean up after that; whoever writes the same file next does.
    assert_eq!(begun("-KILL").status.code(), None);
    assert_eq!(names_in(&folder), [".long.json.zst.part", "long.txt"]);
    assert_code(&fraglab(&["convert", &trace, &target]), 0);
    assert_eq!(names_in(&folder), ["long.json.zst", "long.txt"]);
}

#[test]
fn a_card_gets_everything_back() {
    let Some(driver) = fake_driver::library_dir() else { return };
    let folder = Folder::new();
    // Ten seconds between two requests: the replay waits for the second.
    let trace = folder.file("slow.txt", "alloc a 100MiB\n@10s alloc b 100MiB\n@20s free a b\n");
    let leaks = folder.path("leaks");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    for name in fake_driver::settings_around() {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", driver).env("FAKE_CUDA_LEAK_CHECK", &leaks);
    command.args(["run", &trace, "--device", "cuda", "--pace", "recorded", "--touch", "full"]);
    let begun = Instant::now();
    let mut running = Running::start(command);
    std::thread::sleep(Duration::from_secs(2));
    running.ask("-INT");
    let output = running.end();
    assert!(begun.elapsed() < Duration::from_secs(9), "it waited for the second request");
    assert_eq!(code(&output), 130, "{}", stderr(&output));
    let told = stderr(&output);
    assert!(told.contains("interrupted at event 1 of 4"), "{told}");
    let leaks = fs::read_to_string(leaks).expect("checked");
    let numbers = leaks.split_ascii_whitespace().filter_map(|word| word.parse::<u64>().ok());
    assert!(numbers.clone().count() > 0 && numbers.sum::<u64>() == 0, "{leaks}");
}
