//! `fraglab diff`: differences that are known by hand, or from recordings.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::program::*;
use crate::common::shared_dir;

const MIB: u64 = 1 << 20;

/// 50 MiB at the peak, all of it live at the end.
const A: &str = "\
capacity 1GiB
mark step0.forward
alloc w 10MiB role=parameter
alloc x 30MiB role=activation
free x
mark step1.forward
alloc y 40MiB role=activation
";

/// 20 MiB more of activations and 5 MiB of something new.
const B: &str = "\
capacity 1GiB
mark step0.forward
alloc w 10MiB role=parameter
alloc x 30MiB role=activation
free x
mark step1.forward
alloc y 60MiB role=activation
mark step1.backward
alloc z 5MiB role=temporary
";

fn pair() -> (Folder, String, String) {
    let folder = Folder::new();
    let (a, b) = (folder.file("a.txt", A), folder.file("b.txt", B));
    (folder, a, b)
}

fn diff(args: &[&str]) -> Value {
    let output = fraglab(&[&["diff", "--json", "-"], args].concat());
    assert_code(&output, 0);
    json(&output)
}

/// Group, bytes of A, of B and the difference in MiB.
fn groups(answer: &Value, table: usize) -> Vec<(String, u64, u64, i64)> {
    let groups = answer["tables"][table]["groups"].as_array().expect("an array").iter();
    let group = |it: &Value| {
        let mib = |side: &str| it[side]["bytes"].as_u64().expect("bytes") / MIB;
        let delta = it["delta_bytes"].as_i64().expect("bytes") / MIB as i64;
        (it["group"].as_str().expect("a name").to_owned(), mib("a"), mib("b"), delta)
    };
    groups.map(group).collect()
}

#[track_caller]
fn assert_groups(found: &[(String, u64, u64, i64)], expected: &[(&str, u64, u64, i64)]) {
    let found: Vec<(&str, u64, u64, i64)> =
        found.iter().map(|(name, a, b, delta)| (&**name, *a, *b, *delta)).collect();
    assert_eq!(found, expected);
}

/// The groups of every table add up to what is live, and their differences to the difference.
fn assert_sums(answer: &Value) {
    for table in answer["tables"].as_array().expect("an array") {
        let groups = table["groups"].as_array().expect("an array");
        for (side, live) in [("a", "live_a"), ("b", "live_b")] {
            for figure in ["blocks", "bytes"] {
                let sum: u64 =
                    groups.iter().map(|it| it[side][figure].as_u64().expect("there")).sum();
                assert_eq!(answer[live][figure], sum, "{} {side} {figure}", table["by"]);
            }
        }
        let deltas: i64 = groups.iter().map(|it| it["delta_bytes"].as_i64().expect("there")).sum();
        let bytes = |live: &str| answer[live]["bytes"].as_i64().expect("there");
        assert_eq!(deltas, bytes("live_b") - bytes("live_a"));
    }
}

#[test]
fn the_groups_that_differ_are_known_by_hand() {
    let (_folder, a, b) = pair();
    let by = "role,phase,size,phase-and-size";
    let answer = diff(&[&a, &b, "--alloc", "native", "--by", by]);
    assert_eq!(answer["kind"], "traces");
    assert_eq!(answer["same_requests"], false);
    let peaks = |side: &str| &answer[side]["peaks"];
    assert_eq!(peaks("a")["requested_bytes_peak"], 50 * MIB);
    assert_eq!(peaks("b")["requested_bytes_peak"], 75 * MIB);
    assert_eq!(peaks("b")["reserved_bytes_peak"], 75 * MIB);
    assert_eq!(answer["a"]["at_event"], 5);
    assert_eq!(answer["a"]["at_phase"], "step1.forward");
    assert_eq!(answer["b"]["at_event"], 7);
    assert_sums(&answer);
    let roles = [("activation", 40, 60, 20), ("temporary", 0, 5, 5), ("parameter", 10, 10, 0)];
    assert_groups(&groups(&answer, 0), &roles);
    let phases = [
        ("this step: forward", 40, 60, 20),
        ("this step: backward", 0, 5, 5),
        ("an earlier step: forward", 10, 10, 0),
    ];
    assert_groups(&groups(&answer, 1), &phases);
    // 40 and 60 MiB are of one class; 5 MiB is from 4 to 8.
    let sizes = [("32 to 64 MiB", 40, 60, 20), ("4 to 8 MiB", 0, 5, 5), ("8 to 16 MiB", 10, 10, 0)];
    assert_groups(&groups(&answer, 2), &sizes);
    assert_eq!(groups(&answer, 3)[0].0, "this step: forward, 32 to 64 MiB");
    assert_eq!(answer["sizes_only_a"], json!([{"size_bytes": 40 * MIB, "allocs": 1}]));
    let only_b =
        json!([{"size_bytes": 60 * MIB, "allocs": 1}, {"size_bytes": 5 * MIB, "allocs": 1}]);
    assert_eq!(answer["sizes_only_b"], only_b);
    let step = &answer["steps"][1];
    assert_eq!(step["step"], "step1");
    assert_eq!(step["a"]["requested_bytes_peak"], 50 * MIB);
    assert_eq!(step["b"]["requested_bytes_peak"], 75 * MIB);
}

#[test]
fn the_first_line_says_what_explains_it() {
    let (_folder, a, b) = pair();
    let output = fraglab(&["diff", &a, &b, "--alloc", "native", "--by", "role"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains(
            "B asks for 25 MiB more at its requested peak, 20 MiB in \"activation\" and 5 MiB in \
             \"temporary\"; B's allocator holds 25 MiB more (50 MiB -> 75 MiB)."
        ),
        "{text}"
    );
    assert!(words.contains("only A asks for 1 size: 40 MiB (once)"), "{text}");
    let output = fraglab(&["diff", &a, &b, "--alloc", "native", "--by", "role", "--top", "1"]);
    let text = stdout(&output);
    let row = text.lines().find(|line| line.starts_with("others (2)")).expect("a row");
    let cells: Vec<&str> = row.split_whitespace().skip(2).collect();
    assert_eq!(cells, ["1", "10.00", "2", "15.00", "5.00"], "{text}");
}

#[test]
fn another_moment_can_be_asked_for() {
    let (_folder, a, b) = pair();
    // Event 2 of A: w and x; event 1 of B: w.
    let answer = diff(&[&a, &b, "--at", "2,1", "--by", "role"]);
    assert_eq!(answer["live_a"], json!({"blocks": 2, "bytes": 40 * MIB}));
    assert_eq!(answer["live_b"], json!({"blocks": 1, "bytes": 10 * MIB}));
    assert_groups(&groups(&answer, 0), &[("activation", 30, 0, -30), ("parameter", 10, 10, 0)]);
    let answer = diff(&[&a, &b, "--at", "reserved", "--by", "role"]);
    assert_eq!(answer["at"], "reserved_peak");
    assert_eq!(answer["a"]["at_event"], answer["a"]["peaks"]["reserved_event"]);
    let line = assert_one_error(&fraglab(&["diff", &a, &b, "--at", "3,99"]));
    assert!(line.contains("b.txt: has no event 99: expected one from 0 to 7"), "{line}");
}

/// Call sites: the innermost frame that is not PyTorch's own names a group.
#[test]
fn sites_explain_a_difference() {
    let folder = Folder::new();
    let trace = |name: &str, sizes: [u64; 3]| {
        let text = json!({
            "fraglab_trace": 3,
            "header": {"name": name},
            "streams": [0],
            "sites": {
                "frames": [
                    ["empty", "/env/site-packages/torch/functional.py", 9],
                    ["attention", "/home/me/model.py", 12],
                    ["mlp", "/home/me/model.py", 40],
                ],
                "stacks": [[0, 1], [2]],
            },
            "blocks": {"size_bytes": sizes, "site": [0, 1, null]},
            "events": {"ops": "aaa"},
        });
        folder.file(&format!("{name}.json"), &format!("{{\"fraglab_trace\": 3,{}", &rest(&text)))
    };
    let a = trace("a", [3 * MIB, 2 * MIB, MIB]);
    let b = trace("b", [7 * MIB, 2 * MIB, MIB]);
    let answer = diff(&[&a, &b]);
    assert_eq!(answer["tables"][0]["by"], "site");
    assert_eq!(answer["tables"][1]["by"], "phase");
    assert_sums(&answer);
    let sites =
        [("model.py:12 attention", 3, 7, 4), ("model.py:40 mlp", 2, 2, 0), ("no site", 1, 1, 0)];
    assert_groups(&groups(&answer, 0), &sites);
}

/// A JSON object without its brace and version, which must stand first.
fn rest(object: &Value) -> String {
    let mut object = object.clone();
    object.as_object_mut().expect("an object").remove("fraglab_trace");
    object.to_string()[1..].to_owned()
}

#[test]
fn one_trace_with_itself_differs_in_nothing() {
    let (_folder, a, _) = pair();
    let answer = diff(&[&a, &a, "--full"]);
    assert_eq!(answer["same_requests"], true);
    assert_eq!(answer["tables"].as_array().map(Vec::len), Some(4));
    assert_sums(&answer);
    let text = stdout(&fraglab(&["diff", &a, &a]));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("the program asked for the same in both; the allocators hold the same"));
    assert!(words.contains("2 blocks of 50 MiB in both"), "{text}");
}

/// What the program asks for is told, also where the replay refuses it.
#[test]
fn a_refused_request_was_asked_for_all_the_same() {
    let (_folder, a, b) = pair();
    let args = ["--alloc", "native", "--capacity", "60MiB", "--by", "role"];
    let answer = diff(&[&[&*a, &*b], &args[..]].concat());
    // A fits into 60 MiB; B is refused its 60 MiB beside the 10 of w, and then meets 5 MiB.
    assert_eq!(answer["a"]["outcome"]["status"], "ok");
    assert_eq!(answer["b"]["outcome"]["status"], "oom");
    assert_eq!(answer["b"]["requested_bytes_peak"], 75 * MIB);
    assert_eq!(answer["b"]["peaks"]["requested_bytes_peak"], 40 * MIB);
    assert_sums(&answer);
    let text = stdout(&fraglab(&[&["diff", &*a, &*b], &args[..]].concat()));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("B asks for 25 MiB more at its requested peak"), "{text}");
    assert!(words.contains("out of memory: event 5 asked for 60 MiB"), "{text}");
}

#[test]
fn threads_change_nothing() {
    let (_folder, a, b) = pair();
    let of =
        |threads: &str| fraglab(&["diff", &a, &b, "--full", "--json", "-", "--threads", threads]);
    let (one, two) = (of("1"), of("2"));
    assert_code(&one, 0);
    assert_eq!(stdout(&one), stdout(&two));
}

mod results {
    use super::*;

    #[test]
    fn figures_stand_side_by_side_by_their_relative_change() {
        let (folder, a, b) = pair();
        let (one, other) = (folder.path("a.json"), folder.path("b.json"));
        for (trace, file) in [(&a, &one), (&b, &other)] {
            assert_code(
                &fraglab(&["run", "--trace", trace, "--alloc", "native", "--json", file]),
                0,
            );
        }
        let answer = diff(&[&one, &other]);
        assert_eq!(answer["kind"], "results");
        let figures = answer["cells"][0]["figures"].as_array().expect("an array");
        let reserved = figures.iter().find(|it| it["figure"] == "peaks.reserved_bytes_peak");
        let reserved = reserved.expect("differs");
        assert_eq!(reserved["delta"], 25.0 * MIB as f64);
        assert_eq!(reserved["relative"], 0.5);
        assert!(
            !figures.iter().any(|it| it["figure"].as_str().is_some_and(|f| f.contains("wall")))
        );
        let shares: Vec<f64> = figures
            .iter()
            .map(|it| it["relative"].as_f64().map_or(f64::INFINITY, f64::abs))
            .collect();
        assert!(shares.is_sorted_by(|one, other| one >= other), "{shares:?}");
        let text = stdout(&fraglab(&["diff", &one, &other, "--full"]));
        assert!(text.starts_with("a, native, 1 GiB -> b, native, 1 GiB\n"), "{text}");
        let row = text.lines().find(|line| line.starts_with("peaks.reserved_bytes_peak"));
        let row: Vec<&str> = row.expect("a row").split_whitespace().skip(1).collect();
        assert_eq!(row, ["50", "MiB", "75", "MiB", "25", "MiB", "+50.0%"], "{text}");
    }

    #[test]
    fn cells_of_two_comparisons_are_matched_by_name() {
        let (folder, a, _) = pair();
        let (one, other) = (folder.path("a.json"), folder.path("b.json"));
        for (allocs, file) in [("native,caching", &one), ("caching,best-fit", &other)] {
            assert_code(
                &fraglab(&["compare", "--trace", &a, "--alloc", allocs, "--json", file]),
                0,
            );
        }
        let answer = diff(&[&one, &other]);
        assert_eq!(answer["cells"].as_array().map(Vec::len), Some(1));
        // `waste_removed` of caching is 0 in both, and no clock counts.
        assert_eq!(answer["cells"][0]["figures"], json!([]));
        assert_eq!(answer["only_a"], json!(["a, native, 1 GiB"]));
        assert_eq!(answer["only_b"], json!(["a, best-fit, 1 GiB"]));
    }

    #[test]
    fn a_trace_and_a_result_are_no_pair() {
        let (folder, a, _) = pair();
        let result = folder.path("a.json");
        assert_code(&fraglab(&["run", "--trace", &a, "--json", &result]), 0);
        let line = assert_one_error(&fraglab(&["diff", &result, &a]));
        assert!(line.contains("a.txt is a trace and"), "{line}");
        let other = folder.file("other.json", "{\"schema_version\": 1, \"trace\": {}}");
        let line = assert_one_error(&fraglab(&["diff", &other, &result]));
        assert!(line.contains("result 1 has no allocator"), "{line}");
        let empty = folder.file("empty.json", "[]");
        let line = assert_one_error(&fraglab(&["diff", &empty, &result]));
        assert!(line.contains("holds no result"), "{line}");
        let line = assert_one_error(&fraglab(&["diff", &a, "no/such.txt"]));
        assert!(line.contains("no/such.txt"), "{line}");
        assert_one_error(&fraglab(&["diff", "-", "-"]));
    }
}

mod recordings {
    use super::*;

    /// What the recorded allocator itself said.
    fn told(folder: &Path, name: &str, figure: &str) -> u64 {
        let text = fs::read_to_string(folder.join(format!("{name}.truth.json"))).expect("there");
        let truth: Value = serde_json::from_str(&text).expect("JSON");
        truth["stats"][figure].as_u64().unwrap_or_else(|| panic!("{figure} in {truth}"))
    }

    fn diff_of(folder: &Path, a: &str, b: &str, more: &[&str]) -> Value {
        let path = |name: &str| folder.join(format!("{name}.pickle.gz")).display().to_string();
        diff(&[&[&*path(a), &*path(b)], more].concat())
    }

    /// The same job: requests are the same, and what the allocators made of them is what PyTorch
    /// reported of itself.
    #[test]
    fn one_job_with_two_settings_differs_in_what_is_held() {
        let Some(folder) = shared_dir() else { return };
        for other in ["gpt2-small.expandable", "gpt2-small.roundup4"] {
            // What is left of a block that is not split hangs on the block, and that on addresses.
            let args = ["--by", "phase-and-size,phase,size,role", "--addresses", "recorded"];
            let answer = diff_of(&folder, "gpt2-small", other, &args);
            assert_eq!(answer["same_sizes"], true, "{other}");
            assert_sums(&answer);
            assert_eq!(answer["live_a"], answer["live_b"]);
            for (side, name) in [("a", "gpt2-small"), ("b", other)] {
                let peaks = &answer[side]["peaks"];
                let reserved = told(&folder, name, "reserved_bytes.all.peak");
                assert_eq!(peaks["reserved_bytes_peak"], reserved, "{name}");
                let allocated = told(&folder, name, "allocated_bytes.all.peak");
                assert_eq!(peaks["allocated_bytes_peak"], allocated, "{name}");
            }
        }
    }

    /// Two jobs with call sites.
    #[test]
    fn sites_of_two_jobs_add_up() {
        let Some(folder) = shared_dir() else { return };
        let answer = diff_of(&folder, "tiny.stacks", "gpt2-small.stacks", &["--full"]);
        assert_eq!(answer["tables"][0]["by"], "site");
        assert_sums(&answer);
        let peak = |side: &str| &answer[side]["peaks"]["requested_bytes_peak"];
        assert_eq!(&answer["live_a"]["bytes"], peak("a"));
        assert_eq!(&answer["live_b"]["bytes"], peak("b"));
    }
}
