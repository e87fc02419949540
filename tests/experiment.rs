//! `fraglab experiment`: descriptions in; results, figures and reports out. And that what is
//! committed under `reports/` is what the program gives.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::common::program::*;
use crate::common::shared_dir;

/// Two traces, three allocators of which one is multiplied, two devices: 2 × (1 + 1 + 2) × 2 cells.
const MATRIX: &str = r#"
name = "matrix"
title = "A | matrix"
description = "What comes of it."
date = "2026-12-01"
traces = ["one.txt", { file = "two.txt", label = "second" }]
allocators = ["native", "caching", { spec = "stitch+policy={policy}", label = "stitch, {policy}" }]
capacities = ["auto", "256MiB"]
smallest_capacity = true

[parameters]
policy = ["paper", "best"]

[[figure]]
name = "bars"
kind = "grouped bars"
x = "trace"
y = "reserved_bytes_peak"
unit = "MiB"
group = "label"
filter = "capacity=auto"

[[figure]]
name = "ran"
kind = "frontier"
x = "capacity"
y = "label"

[[table]]
title = "Reserved"
rows = "trace"
columns = "label"
value = "reserved_bytes_peak"
unit = "MiB"
filter = "capacity=256MiB"
"#;

/// 400 MiB live at once: more than 256 MiB.
const ONE: &str = "capacity 1GiB\nalloc a 100MiB\nalloc b 300MiB\nfree a b\n";
/// 64 MiB live at once, of 8 and 4 blocks that do not fit each other's places.
const TWO: &str = "\
capacity 1GiB
alloc a 32MiB
alloc b 32MiB
free a b
alloc c 64MiB
free c
";

fn matrix(text: &str) -> Folder {
    let folder = Folder::new();
    folder.file("one.txt", ONE);
    folder.file("two.txt", TWO);
    folder.file("matrix.toml", text);
    folder
}

/// Runs the description of a folder into its folder `out`, with the store in `cache`.
fn experiment(folder: &Folder, more: &[&str]) -> Output {
    let paths = [folder.path("matrix.toml"), folder.path("out"), folder.path("cache")];
    let args = ["experiment", &paths[0], "-o", &paths[1], "--cache", &paths[2]];
    fraglab(&[&args[..], more].concat())
}

fn out(folder: &Folder, name: &str) -> String {
    fs::read_to_string(Path::new(&folder.path("out")).join(name)).expect(name)
}

/// The rows of a CSV as fields by name.
fn rows(csv: &str) -> Vec<std::collections::BTreeMap<String, String>> {
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let names = reader.headers().expect("names").clone();
    let row = |record: csv::StringRecord| {
        names.iter().map(str::to_owned).zip(record.iter().map(str::to_owned)).collect()
    };
    reader.records().map(|record| row(record.expect("a row"))).collect()
}

#[test]
fn every_cell_has_a_row_and_files_are_written() {
    let folder = matrix(MATRIX);
    let output = experiment(&folder, &[]);
    assert_code(&output, 0);
    let csv = out(&folder, "matrix.csv");
    let rows = rows(&csv);
    assert_eq!(rows.len(), 16);
    // In the order of traces, allocators, parameters, capacities.
    let names: Vec<String> = rows[..8]
        .iter()
        .map(|row| {
            format!("{} {} {} {}", row["trace"], row["policy"], row["label"], row["capacity"])
        })
        .collect();
    assert_eq!(
        names,
        [
            "one  native auto",
            "one  native 256MiB",
            "one  caching auto",
            "one  caching 256MiB",
            "one paper stitch, paper auto",
            "one paper stitch, paper 256MiB",
            "one best stitch, best auto",
            "one best stitch, best 256MiB",
        ]
    );
    // By hand: one malloc a tensor holds what is asked for; 300 MiB more do not fit 256 MiB.
    let mib = |mib: u64| (mib << 20).to_string();
    assert_eq!((&*rows[0]["status"], &rows[0]["reserved_bytes_peak"]), ("ok", &mib(400)));
    assert_eq!(rows[0]["smallest_capacity_bytes"], mib(400));
    assert_eq!((&*rows[1]["status"], &*rows[1]["smallest_capacity_bytes"]), ("oom", ""));
    // PyTorch's allocator keeps the two blocks of 32 MiB apart and takes 64 MiB beside them.
    assert_eq!(rows[10]["trace"], "second");
    assert_eq!((&*rows[10]["label"], &rows[10]["reserved_bytes_peak"]), ("caching", &mib(128)));
    assert_eq!(rows[10]["waste_removed"], "0");
    assert_eq!(rows[8]["waste_removed"], "1");
    let report = out(&folder, "matrix.md");
    assert!(report.starts_with("# A \\| matrix\n\nWhat comes of it.\n"), "{report}");
    assert!(report.contains("on 2026-12-01") && report.contains("(matrix.csv)"), "{report}");
    assert!(report.contains("| one | OOM | OOM | OOM | OOM |"), "{report}");
    assert!(report.contains("| second | 64.00 | 128.00 |"), "{report}");
    for figure in ["matrix-bars.svg", "matrix-ran.svg"] {
        assert!(report.contains(&format!("({figure})")), "{report}");
        let svg = out(&folder, figure);
        assert!(svg.starts_with("<svg width=\"88mm\" height=\""), "{figure}");
        assert!(svg.trim_end().ends_with("</svg>"), "{figure}");
    }
    // Of 1 GiB everything ran; of 256 MiB the 400 MiB did not, whoever was asked.
    let crosses = |svg: &str| svg.matches("stroke=\"#D55E00\"").count() / 2;
    assert_eq!(crosses(&out(&folder, "matrix-ran.svg")), 1 + 4);
    assert_eq!(crosses(&out(&folder, "matrix-bars.svg")), 0);
}

#[test]
fn the_same_bytes_on_any_number_of_threads() {
    let (one, two) = (matrix(MATRIX), matrix(MATRIX));
    assert_code(&experiment(&one, &["--threads", "1", "--json", &one.path("rows.json")]), 0);
    assert_code(&experiment(&two, &["--threads", "2", "--json", &two.path("rows.json")]), 0);
    for name in ["matrix.csv", "matrix-bars.svg", "matrix-ran.svg"] {
        assert_eq!(out(&one, name), out(&two, name), "{name}");
    }
    let json = |folder: &Folder| fs::read(folder.path("rows.json")).expect("rows");
    assert_eq!(json(&one), json(&two));
    let rows: Value = serde_json::from_slice(&json(&one)).expect("JSON");
    assert_eq!(rows.as_array().expect("an array").len(), 16);
    assert_eq!(rows[0]["reserved_bytes_peak"], 400 << 20);
    assert_eq!(rows[0]["policy"], Value::Null);
}

#[test]
fn what_was_done_is_not_done_again_and_a_torn_line_is() {
    let folder = matrix(MATRIX);
    let kept = |output: &Output| {
        let told = stderr(output);
        let line = told.lines().find(|line| line.contains("kept from before")).expect("told");
        let words: Vec<&str> = line.split(' ').collect();
        let at = words.iter().position(|word| *word == "cells,").expect("cells");
        (words[at - 1].to_owned(), words[at + 1].to_owned())
    };
    let pair = |cells: &str, kept: &str| (cells.to_owned(), kept.to_owned());
    assert_eq!(kept(&experiment(&folder, &[])), pair("16", "0"));
    let first = out(&folder, "matrix.csv");
    let store = Path::new(&folder.path("cache")).join("matrix.jsonl");
    let lines = fs::read_to_string(&store).expect("kept");
    assert_eq!(lines.lines().count(), 16);
    // As if it had been killed within the tenth line.
    let tenth: usize = lines.lines().take(9).map(|line| line.len() + 1).sum();
    fs::write(&store, &lines[..tenth + 20]).expect("torn");
    assert_eq!(kept(&experiment(&folder, &[])), pair("16", "9"));
    assert_eq!(out(&folder, "matrix.csv"), first);
    assert_eq!(kept(&experiment(&folder, &[])), pair("16", "16"));
    // Nine whole lines, the torn one, seven new ones.
    assert_eq!(fs::read_to_string(&store).expect("kept").lines().count(), 17);
    // Another trace of the same name is another trace.
    folder.file("two.txt", &TWO.replace("32MiB", "48MiB"));
    assert_eq!(kept(&experiment(&folder, &[])), pair("16", "8"));
    assert_ne!(out(&folder, "matrix.csv"), first);
}

/// Cells of one run that were kept from before it.
fn kept(folder: &Folder) -> usize {
    let output = experiment(folder, &[]);
    assert_code(&output, 0);
    let told = stderr(&output);
    let line = told.lines().find(|line| line.contains("kept from before")).expect("told");
    let (_, kept) = line.split_once(" cells, ").expect("cells");
    kept.split(' ').next().expect("a number").parse().expect("a number")
}

/// Three steps of one block.
const STEPS: &str = "\
mark step0.a\nalloc a 4MiB\nfree a\nmark step1.a\nalloc a 4MiB\nfree a\n\
mark step2.a\nalloc a 4MiB\nfree a\n";
/// What STAlloc plans for them: an offset and a size a request.
const PLAN: &str = "\n4194304 67108864 1 1 0\n0 4194304\n0 4194304\n";
/// A window of time in which 1 KiB is free.
const SPARE: &str = "0 0\nmlp-F-0 (0,1024)\n";

/// Files that allocators name are looked for beside the description, and what is in them counts.
#[test]
fn other_plans_and_profiles_are_other_cells() {
    let folder = matrix(
        "name = \"matrix\"\ntraces = [\"steps.txt\"]\nallocators = [\n\
         \"planned+mode=stalloc+plan=plans\", \"planned+trace=other.txt\", \"caching\"]\n",
    );
    folder.file("steps.txt", STEPS);
    folder.file("other.txt", STEPS);
    fs::create_dir_all(folder.path("plans/output/plan")).expect("a folder");
    let plan = "plans/output/plan/dev_0.txt";
    folder.file(plan, PLAN);
    assert_eq!(kept(&folder), 0);
    let csv = out(&folder, "matrix.csv");
    assert!(csv.contains(",planned+mode=stalloc+plan=plans,"), "as it is written: {csv}");
    assert_eq!(kept(&folder), 3);
    folder.file(plan, &PLAN.replace("67108864", "134217728"));
    assert_eq!(kept(&folder), 2, "another plan in a folder of the same name");
    folder.file("other.txt", &STEPS.replace("4MiB", "6MiB"));
    assert_eq!(kept(&folder), 2, "another profile of the same name");
    let spare = "plans/output/activations_memlog/dynamic_intervals";
    fs::create_dir_all(folder.path(spare)).expect("a folder");
    folder.file(&format!("{spare}/dev0_cross_interval_spare_addr.txt"), SPARE);
    assert_eq!(kept(&folder), 2, "space to spare beside the plan");
    assert_eq!(kept(&folder), 3);
    fs::remove_file(folder.path("other.txt")).expect("removed");
    let output = experiment(&folder, &[]);
    assert_code(&output, 2);
    let error = stderr(&output);
    assert!(
        error.contains("matrix.toml:4:36: ") && error.contains("other.txt: no such file or folder"),
        "{error}"
    );
}

/// Blocks with other settings are measured by their own `caching`: it removes nothing of its own.
#[test]
fn waste_is_measured_by_caching_with_the_same_settings() {
    let block = |set: &str, more: &str| {
        format!(
            "[[cells]]\nset = \"{set}\"\ntraces = [\"two.txt\"]\n\
             allocators = [\"caching\", \"native\"]\n{more}"
        )
    };
    let expandable = "settings = \"expandable_segments:True\"\n";
    let folder =
        matrix(&format!("name = \"matrix\"\n{}{}", block("one", expandable), block("two", "")));
    // Plain: 30 + 20 + 32 MiB are held for 34.
    folder.file("two.txt", "alloc a 30MiB\nalloc b 3MiB\nfree a\nalloc c 31MiB\n");
    assert_code(&experiment(&folder, &[]), 0);
    let rows = rows(&out(&folder, "matrix.csv"));
    let of = |set: &str, label: &str| {
        let row = rows.iter().find(|row| row["set"] == set && row["label"] == label);
        row.expect("a row").clone()
    };
    assert_eq!(of("two", "caching")["excess_bytes"], (48u64 << 20).to_string());
    assert_ne!(of("one", "caching")["excess_bytes"], of("two", "caching")["excess_bytes"]);
    for set in ["one", "two"] {
        let number =
            |label: &str| -> f64 { of(set, label)["waste_removed"].parse().expect("some") };
        assert_eq!((number("caching"), number("native")), (0.0, 1.0), "{set}");
    }
}

#[test]
fn the_plan_is_told_without_running_it() {
    let folder = matrix(MATRIX);
    let listed = |folder: &Folder| {
        let output = experiment(folder, &["--list"]);
        assert_code(&output, 0);
        stdout(&output)
    };
    let text = listed(&folder);
    assert_eq!(text.lines().count(), 17, "{text}");
    assert!(text.ends_with("matrix: 16 cells, 16 to run\n"), "{text}");
    assert!(!Path::new(&folder.path("out")).exists());
    assert_code(&experiment(&folder, &["--only", "trace=one", "--quiet"]), 0);
    assert!(listed(&folder).ends_with("matrix: 16 cells, 8 to run\n"));
}

#[test]
fn some_cells_go_to_standard_output() {
    let folder = matrix(MATRIX);
    let output = experiment(&folder, &["--only", "trace=sec*", "--only", "label=native|caching"]);
    assert_code(&output, 0);
    let rows = rows(&stdout(&output));
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|row| row["trace"] == "second"));
    assert!(!Path::new(&folder.path("out")).exists());
    let none = experiment(&folder, &["--only", "trace=third"]);
    assert!(assert_one_error(&none).contains("no cell passes"));
    let unknown = experiment(&folder, &["--only", "status=ok"]);
    assert!(assert_one_error(&unknown).contains("expected one of"));
}

#[test]
fn figures_come_from_the_results_alone() {
    let folder = matrix(MATRIX);
    assert_code(&experiment(&folder, &[]), 0);
    let names = ["matrix.md", "matrix-bars.svg", "matrix-ran.svg"];
    let before = names.map(|name| out(&folder, name));
    for file in names.map(|name| Path::new(&folder.path("out")).join(name)) {
        fs::remove_file(file).expect("removed");
    }
    fs::remove_file(folder.path("one.txt")).expect("removed");
    assert_code(&experiment(&folder, &["--figures-only"]), 0);
    assert_eq!(names.map(|name| out(&folder, name)), before);
    // Another description needs other results.
    folder.file("matrix.toml", &MATRIX.replace("policy", "way").replace("+way", "+policy"));
    let error = assert_one_error(&experiment(&folder, &["--figures-only"]));
    assert!(error.contains("matrix.csv") && error.contains("run the experiment again"), "{error}");
}

/// The error and what stands below it.
fn fault(from: &str, to: &str) -> String {
    assert!(MATRIX.contains(from), "{from}");
    let folder = matrix(&MATRIX.replacen(from, to, 1));
    let output = experiment(&folder, &[]);
    assert_code(&output, 2);
    assert!(output.stdout.is_empty() && !Path::new(&folder.path("out")).exists());
    stderr(&output).replace(&folder.path("matrix.toml"), "matrix.toml")
}

#[test]
fn faults_are_told_with_place_and_caret() {
    assert_eq!(
        fault("smallest_capacity =", "smalest_capacity ="),
        "fraglab: matrix.toml:9:1: unknown key smalest_capacity; did you mean smallest_capacity?\n  \
         smalest_capacity = true\n  ^\n"
    );
    let text = fault("\"native\"", "\"nativ\"");
    assert!(text.starts_with("fraglab: matrix.toml:7:15: no allocator \"nativ\""), "{text}");
    assert!(text.ends_with("\n                ^\n"), "{text}");
    let text = fault("\"one.txt\"", "\"none.txt\"");
    assert!(text.starts_with("fraglab: matrix.toml:6:11: \"none.txt\": no such file"), "{text}");
    let text = fault("kind = \"frontier\"", "kind = \"pie\"");
    assert!(text.contains("matrix.toml:25:8: kind is \"pie\": expected one of bars,"), "{text}");
    // Two capacities at one place of a figure.
    let text = fault("filter = \"capacity=auto\"\n", "");
    assert!(text.contains("2 rows have trace = one, label = native"), "{text}");
}

/// The results of an experiment called as one of its traces would be written over that.
#[test]
fn no_input_is_written_over() {
    let folder = matrix(&MATRIX.replace("\"one.txt\"", "\"out/matrix.csv\""));
    fs::create_dir(folder.path("out")).expect("a folder");
    folder.file("out/matrix.csv", "id,lower,upper,size\na,0,2,4096\n");
    let error = assert_one_error(&experiment(&folder, &[]));
    assert!(error.contains("would overwrite the input"), "{error}");
    assert_eq!(out(&folder, "matrix.csv").lines().count(), 2);
}

#[test]
fn a_cell_that_cannot_be_done_is_told_and_the_others_go_on() {
    // A trace without steps is nothing to plan from: that is skipped. A trace that is none fails.
    let text = MATRIX.replace("\"native\", ", "\"native\", \"planned\", ");
    let folder = matrix(&text);
    folder.file("two.txt", "alloc a\n");
    let output = experiment(&folder, &[]);
    assert_code(&output, 2);
    let told = stderr(&output);
    assert_eq!(told.matches("two.txt:1:").count(), 1, "{told}");
    let rows = rows(&out(&folder, "matrix.csv"));
    let statuses = |label: &str, trace: &str| -> Vec<String> {
        let rows = rows.iter().filter(|row| row["label"] == label && row["trace"] == trace);
        rows.map(|row| row["status"].clone()).collect()
    };
    assert_eq!(statuses("planned", "one"), ["skipped", "skipped"]);
    assert_eq!(statuses("native", "one"), ["ok", "oom"]);
    assert_eq!(statuses("native", "second"), ["failed", "failed"]);
    assert!(out(&folder, "matrix.md").contains("Cells without a result:"));
    // But nothing takes the place of what an earlier run found.
    folder.file("two.txt", "alloc a 3MiB\n");
    assert_code(&experiment(&folder, &[]), 0);
    let whole = out(&folder, "matrix.csv");
    folder.file("two.txt", "alloc a\n");
    let output = experiment(&folder, &[]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("left as they are"), "{}", stderr(&output));
    assert_eq!(out(&folder, "matrix.csv"), whole);
}

#[test]
fn help_has_examples_and_exit_codes() {
    for flag in ["-h", "--help"] {
        let text = stdout(&fraglab(&["experiment", flag]));
        assert!(text.contains("Examples:") && text.contains("Exit codes:"), "{text}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let folder = matrix(MATRIX);
    let output = unread(&["experiment", &folder.path("matrix.toml"), "--list", "--fresh"]);
    assert_code(&output, 0);
}

// What is committed.

fn repository(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

/// The descriptions that ship, by name.
fn shipped() -> Vec<(String, PathBuf)> {
    let files = fs::read_dir(repository("experiments")).expect("there");
    let mut shipped: Vec<(String, PathBuf)> = files
        .map(|file| file.expect("a file").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "toml"))
        .map(|path| (path.file_stem().expect("a name").to_string_lossy().into_owned(), path))
        .collect();
    shipped.sort();
    shipped
}

fn committed(name: &str) -> String {
    let path = repository("reports").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_committed_figure_comes_from_its_committed_results() {
    let shipped = shipped();
    for name in [
        "device-latency",
        "gmlake-strategies",
        "oom-frontier",
        "patrickstar-options",
        "settings-sweep",
        "stalloc-efficiency",
    ] {
        assert!(shipped.iter().any(|(known, _)| known == name), "{name}");
    }
    for (name, path) in shipped {
        let folder = Folder::new();
        folder.file(&format!("{name}.csv"), &committed(&format!("{name}.csv")));
        let path = path.to_str().expect("UTF-8");
        let output = fraglab(&["experiment", path, "--figures-only", "-q", "-o", &folder.path("")]);
        assert_code(&output, 0);
        let made = fs::read_dir(folder.path("")).expect("a folder");
        let made: Vec<PathBuf> = made.map(|file| file.expect("a file").path()).collect();
        assert!(made.len() > 2, "{name}: {made:?}");
        for file in made {
            let file_name = file.file_name().expect("a name").to_string_lossy().into_owned();
            let text = fs::read_to_string(&file).expect("text");
            assert!(text == committed(&file_name), "{file_name} is no longer what its CSV gives");
        }
    }
}

/// Rows of some cells as the program now gives them stand in the committed results.
fn assert_still(name: &str, only: &[&str]) -> Vec<std::collections::BTreeMap<String, String>> {
    let path = repository("experiments").join(format!("{name}.toml"));
    let mut args = vec!["experiment", path.to_str().expect("UTF-8"), "--fresh"];
    for filter in only {
        args.extend(["--only", filter]);
    }
    let output = fraglab(&args);
    assert_code(&output, 0);
    let now = stdout(&output);
    let committed = committed(&format!("{name}.csv"));
    assert_eq!(now.lines().next(), committed.lines().next(), "{name}: columns");
    for line in now.lines() {
        assert!(committed.lines().any(|row| row == line), "{name}: {line}");
    }
    rows(&now)
}

#[test]
fn committed_results_are_what_the_program_gives() {
    let rows = assert_still("oom-frontier", &["set=lora", "sequence=9216", "label=PyTorch"]);
    assert_eq!(rows.len(), 1);
    if shared_dir().is_none() {
        return;
    }
    let sweep = ["set=free", "trace=llama-7b-lora", "label=default|expandable"];
    assert_eq!(assert_still("settings-sweep", &sweep).len(), 2);
    let both = ["trace=Llama 3B*", "label=PyTorch|stitch*"];
    assert_eq!(assert_still("stalloc-efficiency", &both).len(), 2);
}

/// GMLake's figure: what PyTorch's allocator holds is what it held in the recorded run.
#[test]
fn pytorch_reserves_what_the_recordings_say() {
    let Some(dir) = shared_dir() else { return };
    let rows = rows(&committed("gmlake-strategies.csv"));
    for strategy in ["N", "R", "LR", "RO", "LRO"] {
        let truth = dir.join(format!("deepspeed-opt-1-3b-{strategy}.rank0.truth.json"));
        let truth: Value = serde_json::from_slice(&fs::read(truth).expect("there")).expect("JSON");
        let recorded = &truth["stats"]["reserved_bytes.all.peak"];
        let row = rows.iter().find(|row| row["strategy"] == strategy && row["label"] == "PyTorch");
        assert_eq!(row.expect("a row")["reserved_bytes_peak"], recorded.to_string(), "{strategy}");
    }
}

/// The same cells as `stitching.sh` runs through `fraglab compare`.
#[test]
fn strategies_are_those_of_the_script() {
    let script = rows(&committed("stitching_strategies.csv"));
    let mut compared = 0;
    for row in rows(&committed("gmlake-strategies.csv")) {
        let trace = format!("deepspeed-opt-1-3b-{}.rank0", row["strategy"]);
        let theirs = script
            .iter()
            .find(|other| other["trace"] == trace && other["allocator"] == row["allocator"]);
        let Some(theirs) = theirs else { continue };
        for figure in ["reserved_bytes_peak", "active_utilization", "waste_removed", "device_calls"]
        {
            assert_eq!(row[figure], theirs[figure], "{trace} {}: {figure}", row["allocator"]);
        }
        compared += 1;
    }
    assert_eq!(compared, 25);
}

/// The same cells as `chunk_options.sh` runs through `fraglab gen` and `fraglab run`.
#[test]
fn patrickstar_s_options_are_those_of_the_script() {
    let script = rows(&committed("chunk_options.csv"));
    let ours = rows(&committed("patrickstar-options.csv"));
    let mut compared = 0;
    for row in &ours {
        let name = &row["options"];
        let theirs = script.iter().find(|other| {
            let option = other["options"].replace("=true", "").replace(" without", ", no");
            other["model"] == "GPT3_8B"
                && row["gpus"].split(' ').next() == Some(&*other["gpus"])
                && option.replace('=', " ") == *name
        });
        let theirs = theirs.unwrap_or_else(|| panic!("{name} on {}", row["gpus"]));
        for figure in [
            "status",
            "requested_bytes_peak",
            "reserved_bytes_peak",
            "gpu_chunk_bytes_peak",
            "host_bytes_peak",
            "construction_host_bytes_peak",
            "h2d_bytes",
            "d2h_bytes",
            "collective_bytes",
            "step_ns",
        ] {
            assert_eq!(row[figure], theirs[figure], "{name} on {}: {figure}", row["gpus"]);
        }
        compared += 1;
    }
    // None, fifteen options, all together and nine with one left out, on one GPU and eight.
    assert_eq!(compared, 2 * (1 + 15 + 1 + 9));
}

/// The file that the profile was measured into.
#[test]
fn latencies_are_those_that_were_measured() {
    let Some(dir) = shared_dir() else { return };
    let measured = fs::read_to_string(dir.join("device_latency.h200.csv")).expect("there");
    // One table, then others about how memory is written and copied.
    let table = measured.lines().skip(1).take_while(|line| !line.starts_with('#'));
    let text: String = table.map(|line| format!("{line}\n")).collect();
    let measured = rows(&text);
    let ours = rows(&committed("device-latency.csv"));
    let mut compared = 0;
    for (call, column) in [("create", "create"), ("map", "map"), ("malloc", "cuMemAlloc")] {
        for size_mib in [2u64, 64, 2048] {
            let row = ours.iter().find(|row| {
                row["profile"] == "h200"
                    && row["call"] == call
                    && row["size_bytes"] == (size_mib << 20).to_string()
            });
            let theirs = measured.iter().find(|row| row["size_mib"] == size_mib.to_string());
            let us: f64 = theirs.expect("measured")[column].parse().expect("a number");
            let ns: f64 = row.expect("a row")["cost_ns"].parse().expect("a number");
            assert!((ns - us * 1000.0).abs() < 0.01, "{call} {size_mib}: {ns} {us}");
            compared += 1;
        }
    }
    assert_eq!(compared, 9);
}
