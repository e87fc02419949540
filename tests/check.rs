//! `fraglab check`: the gate opens and shuts to the byte, and says why.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::program::*;

const MIB: u64 = 1 << 20;

/// `caching` keeps 40 and 60 MiB when 100 MiB are asked for: 200 MiB reserved for 100. With its
/// cache emptied only the last block stands: 100 MiB are enough.
const GROWING: &str = "\
capacity 1GiB
alloc a 40MiB
free a
alloc b 60MiB
free b
mark step0.last
alloc c 100MiB
";

/// A folder with the trace and a baseline of it through `caching` and `native`.
fn prepared() -> (Folder, String) {
    let folder = Folder::new();
    folder.file("growing.txt", GROWING);
    let baseline = folder.path("baseline.json");
    let trace = folder.path("growing.txt");
    let args = ["check", "--baseline", &baseline, "--init", "--trace", &trace];
    let output = fraglab(&[&args[..], &["--alloc", "caching,native"]].concat());
    assert_code(&output, 0);
    (folder, baseline)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).expect("there")
}

fn value(path: &str) -> Value {
    serde_json::from_str(&read(path)).expect("JSON")
}

/// Changes a baseline by hand.
fn edit(path: &str, change: impl FnOnce(&mut Value)) {
    let mut baseline = value(path);
    change(&mut baseline);
    fs::write(path, serde_json::to_string_pretty(&baseline).expect("JSON")).expect("written");
}

fn check(baseline: &str, more: &[&str]) -> std::process::Output {
    fraglab(&[&["check", "--baseline", baseline], more].concat())
}

/// Figures by hand: see [`GROWING`].
#[test]
fn a_baseline_holds_what_the_traces_need() {
    let (_folder, path) = prepared();
    let baseline = value(&path);
    assert_eq!(baseline["schema_version"], 1);
    assert_eq!(baseline["tolerance"], json!({"bytes": 0, "percent": 0.0}));
    let entries = baseline["entries"].as_array().expect("an array");
    let [caching, native] = &entries[..] else { panic!("two: {baseline}") };
    assert_eq!(caching["trace"], "growing.txt", "relative to the baseline");
    assert_eq!(caching["allocator"], "caching");
    assert_eq!(
        caching["figures"],
        json!({
            "status": "ok",
            "fragmentation": 0.5,
            "reserved_bytes_peak": 200 * MIB,
            "smallest_capacity_bytes": 100 * MIB,
            "alloc_retries": 0,
            "requested_bytes_peak": 100 * MIB,
        })
    );
    assert_eq!(native["allocator"], "native");
    assert_eq!(native["figures"]["fragmentation"], 0.0);
    assert_eq!(native["figures"]["reserved_bytes_peak"], 100 * MIB);
    assert_eq!(caching["trace_fingerprint"], native["trace_fingerprint"]);
    let output = check(&path, &[]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "all 10 figures hold; 2 entries of 1 trace\n");
}

/// Every gated figure, worse by the least that there is, shuts the gate and is named.
#[test]
fn each_figure_is_gated_by_itself() {
    // What the baseline says in place of the truth, and how it then reads.
    let cases = [
        ("fragmentation", json!(0.499_999), "fragmentation 49.9999% -> 50.0000% (+<0.01 points)"),
        (
            "reserved_bytes_peak",
            json!(200 * MIB - 1),
            "reserved peak 209,715,199 B -> 209,715,200 B",
        ),
        ("smallest_capacity_bytes", json!(100 * MIB - 1), "smallest capacity 104,857,599 B"),
    ];
    for (figure, before, text) in cases {
        let (_folder, path) = prepared();
        edit(&path, |it| it["entries"][0]["figures"][figure] = before.clone());
        let output = check(&path, &[]);
        assert_code(&output, 1);
        let screen = stdout(&output);
        let line = screen.lines().next().unwrap_or_default();
        assert!(line.starts_with("REGRESSION growing.txt, caching: "), "{screen}");
        assert!(line.contains(text), "{screen}");
        assert!(screen.contains("1 of 10 figures regressed, 0 improved, 9 hold"), "{screen}");
        let answer = json(&check(&path, &["--json", "-"]));
        assert_eq!(answer["verdict"], "regression");
        assert_eq!(answer["regressions"], 1);
        let figures = answer["entries"][0]["figures"].as_array().expect("an array");
        let regressed: Vec<&Value> =
            figures.iter().filter(|it| it["verdict"] == "regression").collect();
        assert_eq!(regressed.len(), 1, "{answer}");
        assert_eq!(regressed[0]["figure"], figure);
        assert_eq!(regressed[0]["before"], before);
    }
}

/// Retries that are no longer there, and those that came.
#[test]
fn retries_are_gated() {
    let folder = Folder::new();
    // With 150 MiB the third request finds 100 MiB kept and must flush: one retry.
    let trace = folder.file("tight.txt", &GROWING.replace("1GiB", "150MiB"));
    let path = folder.path("baseline.json");
    assert_code(&check(&path, &["--init", "--trace", &trace]), 0);
    assert_eq!(value(&path)["entries"][0]["figures"]["alloc_retries"], 1);
    edit(&path, |it| it["entries"][0]["figures"]["alloc_retries"] = json!(0));
    let output = check(&path, &[]);
    assert_code(&output, 1);
    assert!(stdout(&output).contains("retries 0 -> 1 (+1)"), "{}", stdout(&output));
}

#[test]
fn a_new_peak_is_told_with_its_event_and_phase() {
    let (_folder, path) = prepared();
    edit(&path, |it| it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(190 * MIB));
    let screen = stdout(&check(&path, &[]));
    assert!(screen.contains("190 MiB -> 200 MiB (+10 MiB, +5.26%)"), "{screen}");
    let place = "the peak is reached at event 5 in step0.last, which asks for 100 MiB";
    assert!(screen.contains(place), "{screen}");
}

#[test]
fn memory_that_runs_out_is_a_regression_and_tells_which_request() {
    let (folder, path) = prepared();
    folder.file("growing.txt", &GROWING.replace("capacity 1GiB", "capacity 90MiB"));
    let output = check(&path, &["--only", "/caching"]);
    assert_code(&output, 1);
    let screen = stdout(&output);
    assert!(screen.contains("status ok -> oom"), "{screen}");
    assert!(screen.contains("refused first at event 5 in step0.last, which asks for 100 MiB"));
    assert!(screen.contains("trace changed: growing.txt"), "{screen}");
    assert!(!screen.contains("reserved peak"), "its peak is another figure now: {screen}");
    // And the other way round it is an improvement, which passes.
    assert_code(&check(&path, &["--update"]), 0);
    folder.file("growing.txt", GROWING);
    let output = check(&path, &[]);
    assert_code(&output, 0);
    assert!(stdout(&output).contains("improved   growing.txt, caching: status oom -> ok"));
    assert!(stdout(&output).contains("--update records what improved"), "{}", stdout(&output));
}

#[test]
fn a_device_of_the_old_smallest_size_says_what_is_refused_now() {
    let (folder, path) = prepared();
    folder.file("growing.txt", &GROWING.replace("c 100MiB", "c 120MiB"));
    let screen = stdout(&check(&path, &["--only", "/native"]));
    assert!(screen.contains("smallest capacity 100 MiB -> 120 MiB (+20 MiB, +20.00%)"), "{screen}");
    assert!(
        screen.replace("\n    ", " ").contains(
            "on the smallest device of before refused first at event 5 in step0.last, which asks \
             for 120 MiB"
        ),
        "{screen}"
    );
}

#[test]
fn a_job_that_asks_for_more_is_told_as_such() {
    let (folder, path) = prepared();
    // 10 MiB more at the peak, but small enough for what `caching` keeps: nothing else moves.
    folder.file("growing.txt", &format!("{GROWING}alloc d 10MiB\n"));
    let output = check(&path, &["--only", "/caching"]);
    let screen = stdout(&output).replace("\n  ", " ");
    assert!(screen.contains("requested peak 100 MiB -> 110 MiB (+10 MiB, +10.00%)"), "{screen}");
    assert!(!screen.contains("reserved peak"), "{screen}");
    let answer = json(&check(&path, &["--only", "/caching", "--json", "-"]));
    assert_eq!(answer["entries"][0]["trace_changed"], true);
    // 1 - 110/200: better, and the smallest capacity is 110 MiB: worse.
    assert_eq!(answer["improvements"], 1);
    assert_eq!(answer["regressions"], 1);
    assert_code(&output, 1);
}

#[test]
fn tolerances_hold_to_the_byte_and_an_entry_s_own_comes_first() {
    let (_folder, path) = prepared();
    edit(&path, |it| {
        it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(200 * MIB - 1000);
        it["entries"][0]["gate"] = json!(["reserved_bytes_peak"]);
    });
    assert_code(&check(&path, &[]), 1);
    assert_code(&check(&path, &["--tolerance-bytes", "1000"]), 0);
    assert_code(&check(&path, &["--tolerance-bytes", "999"]), 1);
    edit(&path, |it| it["tolerance"]["bytes"] = json!(1000));
    let output = check(&path, &[]);
    assert_code(&output, 0);
    assert!(stdout(&output).starts_with("tolerated "), "{}", stdout(&output));
    edit(&path, |it| it["entries"][0]["tolerance"] = json!({"bytes": 999}));
    assert_code(&check(&path, &[]), 1);
    // 160 MiB and a quarter of them are the 200 MiB that there are.
    edit(&path, |it| {
        it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(160 * MIB);
        it["entries"][0]["tolerance"] = json!({"percent": 25.0});
    });
    assert_code(&check(&path, &[]), 0);
    edit(&path, |it| it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(160 * MIB - 1));
    assert_code(&check(&path, &[]), 1);
}

#[test]
fn figures_that_are_not_gated_pass() {
    let (_folder, path) = prepared();
    edit(&path, |it| {
        it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(1);
        it["entries"][0]["gate"] = json!(["fragmentation"]);
        it["entries"][0]["figures"]["smallest_capacity_bytes"] = Value::Null;
    });
    let output = check(&path, &["--only", "/caching"]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "all 2 figures hold; 1 entry of 1 trace\n");
}

mod update {
    use super::*;

    #[test]
    fn takes_the_figures_of_now_and_then_changes_nothing_more() {
        let (folder, path) = prepared();
        let first = read(&path);
        assert_code(&check(&path, &["--update"]), 0);
        assert_eq!(read(&path), first, "nothing moved");
        folder.file("growing.txt", &GROWING.replace("b 60MiB", "b 80MiB"));
        assert_code(&check(&path, &[]), 1);
        assert_eq!(read(&path), first, "a check writes nothing");
        let output = check(&path, &["--update"]);
        assert_code(&output, 0);
        let screen = stdout(&output);
        let line = "updated    growing.txt, caching: reserved peak 200 MiB -> 220 MiB";
        assert!(screen.contains(line), "{screen}");
        let second = read(&path);
        assert_ne!(second, first);
        assert_code(&check(&path, &["--update"]), 0);
        assert_eq!(read(&path), second);
        assert_eq!(stdout(&check(&path, &[])), "all 10 figures hold; 2 entries of 1 trace\n");
    }

    #[test]
    fn adds_entries_and_leaves_the_others() {
        let (folder, path) = prepared();
        edit(&path, |it| it["entries"][1]["figures"]["reserved_bytes_peak"] = json!(7));
        let other = folder.file("other.txt", "capacity 1GiB\nalloc a 3MiB\n");
        let args = ["--update", "--trace", &other, "--capacity", "40MiB", "--alloc", "native"];
        let output = check(&path, &args);
        assert_code(&output, 0);
        assert!(stdout(&output).contains("1 entry added"), "{}", stdout(&output));
        let baseline = value(&path);
        let entries = baseline["entries"].as_array().expect("an array");
        assert_eq!(entries.len(), 3);
        assert_eq!(entries[1]["figures"]["reserved_bytes_peak"], 7, "not asked for");
        assert_eq!(entries[2]["trace"], "other.txt");
        assert_eq!(entries[2]["capacity_bytes"], 40 * MIB);
        let screen = stdout(&check(&path, &["--only", "other"]));
        assert_eq!(screen, "all 5 figures hold; 1 entry of 1 trace\n");
    }

    #[test]
    fn writes_the_whole_file_or_leaves_the_old_one() {
        let (folder, path) = prepared();
        fs::remove_file(folder.path("growing.txt")).expect("was there");
        let first = read(&path);
        let output = check(&path, &["--update"]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("left as it is"), "{}", stderr(&output));
        assert_eq!(read(&path), first);
    }

    /// The folder takes no new file, so that the old baseline must survive.
    #[cfg(unix)]
    #[test]
    fn a_folder_that_cannot_be_written_keeps_the_old_baseline() {
        use std::os::unix::fs::PermissionsExt as _;
        let (folder, path) = prepared();
        folder.file("growing.txt", &GROWING.replace("b 60MiB", "b 80MiB"));
        let first = read(&path);
        let dir = Path::new(&path).parent().expect("a folder").to_owned();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o555)).expect("changed");
        let is_root = fs::write(dir.join("probe"), "").is_ok();
        let output = check(&path, &["--update"]);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("changed");
        if is_root {
            eprintln!("skipped: permissions do not bind this user");
            return;
        }
        assert_one_error(&output);
        assert_eq!(read(&path), first);
    }
}

mod outputs {
    use super::*;

    fn written(name: &str) -> (Folder, String) {
        let (folder, path) = prepared();
        edit(&path, |it| {
            it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(190 * MIB);
            it["entries"][1]["figures"]["reserved_bytes_peak"] = json!(300 * MIB);
        });
        let file = folder.path(name);
        let flag = if name.ends_with("xml") { "--junit" } else { "--summary" };
        assert_code(&check(&path, &[flag, &file]), 1);
        let text = read(&file);
        (folder, text)
    }

    #[test]
    fn the_summary_is_a_table_with_regressions_first() {
        let (_folder, text) = written("summary.md");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "### fraglab check: ❌ 1 regression");
        assert!(
            lines[4].starts_with("| ❌ regression | `growing.txt` | `caching` | reserved peak |")
        );
        assert!(
            lines[4].contains("| 190 MiB | 200 MiB | +10 MiB, +5.26% | `the peak is reached at")
        );
        assert!(lines[5].starts_with("| ✅ improvement | `growing.txt` | `native` |"), "{text}");
        for line in &lines[2..6] {
            assert_eq!(line.matches('|').count(), 9, "{line}");
        }
    }

    #[test]
    fn the_summary_of_a_good_check_is_a_line() {
        let (_folder, path) = prepared();
        let output = check(&path, &["--summary", "-"]);
        assert_code(&output, 0);
        let text = "### fraglab check: ✅ passed\n\nall 10 figures hold; 2 entries of 1 trace\n";
        assert_eq!(stdout(&output), text);
    }

    #[test]
    fn junit_has_a_suite_a_trace_and_a_case_a_figure() {
        let (_folder, text) = written("check.xml");
        let tags = xml_tags(&text);
        let of = |name: &str| tags.iter().filter(|tag| tag.split(' ').next() == Some(name)).count();
        assert_eq!(
            (of("testsuites"), of("testsuite"), of("testcase"), of("failure")),
            (1, 1, 10, 1)
        );
        assert!(
            text.contains(
                "<testsuite name=\"growing.txt\" tests=\"10\" failures=\"1\" errors=\"0\">"
            )
        );
        assert!(text.contains("name=\"caching: reserved_bytes_peak\">"), "{text}");
        assert!(text.contains("message=\"reserved peak 190 MiB -&gt; 200 MiB (+10 MiB, +5.26%);"));
    }

    /// Phases and names that would break XML, Markdown or a terminal.
    #[test]
    fn what_a_trace_is_called_breaks_nothing() {
        let folder = Folder::new();
        let text = GROWING.replace("step0.last", "\"<b>&'|` \\u0001\\u001b[31m\\uffff\"");
        let trace = folder.file("a&b'<c>|`d.txt", &text);
        let path = folder.path("baseline.json");
        assert_code(&check(&path, &["--init", "--trace", &trace]), 0);
        edit(&path, |it| it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(1));
        let (junit, summary) = (folder.path("check.xml"), folder.path("summary.md"));
        let output = check(&path, &["--junit", &junit, "--summary", &summary]);
        assert_code(&output, 1);
        assert!(!stdout(&output).contains('\u{1b}'), "{}", stdout(&output));
        xml_tags(&read(&junit));
        let row = read(&summary);
        let row = row.lines().nth(4).expect("a row");
        let bars = row.replace("\\|", "").matches('|').count();
        assert_eq!(bars, 9, "{row}");
    }

    #[test]
    fn one_answer_at_most_goes_to_standard_output() {
        let (_folder, path) = prepared();
        let line = assert_one_error(&check(&path, &["--json", "-", "--junit", "-"]));
        assert!(line.contains("two outputs"), "{line}");
        assert!(stdout(&check(&path, &["--junit", "-"])).starts_with("<?xml"));
        assert!(stdout(&check(&path, &["--quiet"])).is_empty());
    }

    #[test]
    fn threads_change_nothing() {
        let (_folder, path) = prepared();
        edit(&path, |it| it["entries"][0]["figures"]["reserved_bytes_peak"] = json!(190 * MIB));
        for flag in ["--json", "--junit", "--summary"] {
            let one = check(&path, &[flag, "-", "--threads", "1"]);
            let two = check(&path, &[flag, "-", "--threads", "2"]);
            assert_code(&one, 1);
            assert_eq!(stdout(&one), stdout(&two));
        }
    }

    /// The tags of a text that is well-formed XML as far as this program uses it: declared, nested,
    /// attributes quoted, and no character that XML 1.0 forbids.
    fn xml_tags(text: &str) -> Vec<String> {
        let rest =
            text.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>").expect("declared");
        let control = |c: char| c < ' ' && !matches!(c, '\t' | '\n' | '\r');
        let forbidden = |c: char| control(c) || matches!(c, '\u{fffe}' | '\u{ffff}');
        assert!(!rest.contains(forbidden), "{text}");
        let mut open: Vec<String> = Vec::new();
        let mut tags = Vec::new();
        for part in rest.split('<').skip(1) {
            let (tag, content) = part.split_once('>').expect("a tag ends");
            for piece in [tag, content] {
                for entity in piece.split('&').skip(1) {
                    let known = ["amp;", "lt;", "gt;", "quot;", "apos;"];
                    assert!(known.iter().any(|name| entity.starts_with(name)), "{part}");
                }
            }
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "{text}");
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.trim_end_matches('/').split(' ').next().expect("a name");
            if !tag.ends_with('/') {
                open.push(name.to_owned());
            }
            tags.push(tag.trim_end_matches('/').to_owned());
        }
        assert!(open.is_empty(), "{open:?}");
        tags
    }
}

mod errors {
    use super::*;

    #[test]
    fn a_trace_that_is_gone_is_told_once_and_the_others_are_checked() {
        let (folder, path) = prepared();
        let other = folder.file("other.txt", "capacity 1GiB\nalloc a 3MiB\n");
        assert_code(&check(&path, &["--update", "--trace", &other]), 0);
        fs::remove_file(folder.path("growing.txt")).expect("was there");
        let junit = folder.path("check.xml");
        let output = check(&path, &["--junit", &junit]);
        assert_code(&output, 2);
        let errors = stderr(&output);
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.contains("growing.txt"), "{errors}");
        let screen = stdout(&output);
        assert_eq!(
            screen,
            "2 entries could not be checked; all 5 figures hold; 1 entry of 1 trace\n"
        );
        assert!(
            read(&junit).contains("tests=\"7\" failures=\"0\" errors=\"2\""),
            "{}",
            read(&junit)
        );
        assert!(read(&junit).contains("<error type=\"could not be done\""));
    }

    #[test]
    fn what_is_wrong_in_a_baseline_is_told_with_its_place() {
        let folder = Folder::new();
        let entry = "{\"trace\": \"t\", \"trace_fingerprint\": \"\", \"allocator\": \"caching\", \
                     \"figures\": {\"status\": \"ok\", \"fragmentation\": 0.5, \
                     \"reserved_bytes_peak\": 2, \"smallest_capacity_bytes\": 2, \
                     \"alloc_retries\": 0, \"requested_bytes_peak\": 1}}";
        let of = |entries: &str| {
            format!(
                "{{\"schema_version\": 1, \"fraglab_version\": \"0\", \"entries\": [{entries}]}}"
            )
        };
        let cases = [
            (String::new(), "line 1 column 0"),
            ("{".to_owned(), "line 1 column 1"),
            ("{\"schema_version\": 9}".to_owned(), "schema_version 9"),
            (of(""), "no entries"),
            (of(&format!("{entry},{entry}")), "t/caching stands in it twice"),
            (of(&entry.replace("0.5", "1.5")), "fragmentation 1.5"),
            (of(&entry.replace("0.5", "-1e300")), "fragmentation -1e300: expected a fraction"),
            (of(&entry.replace("\"ok\"", "\"failed\"")), "status failed"),
            (of(&entry.replace("alloc_retries", "retries")), "unknown field `retries`"),
            (
                of(&entry.replace("\"figures\"", "\"tolerance\": {\"percent\": -1}, \"figures\"")),
                "-1",
            ),
        ];
        for (text, message) in cases {
            let path = folder.file("baseline.json", &text);
            let line = assert_one_error(&check(&path, &[]));
            assert!(line.starts_with(&format!("fraglab: {path}: ")), "{line}");
            assert!(line.contains(message), "{message}: {line}");
        }
    }

    /// 40 and 400 MiB do not fit into 100 MiB.
    #[test]
    fn an_entry_that_runs_out_of_memory_is_not_added_in_silence() {
        let (folder, path) = prepared();
        let big = folder.file("big.txt", "alloc a 40MiB\nalloc b 400MiB\n");
        let args = ["--update", "--trace", &big, "--capacity", "100MiB"];
        let output = check(&path, &args);
        assert_code(&output, 0);
        let warning = stderr(&output);
        assert_eq!(warning.lines().count(), 1, "{warning}");
        let start = "fraglab: warning: big.txt: caching (capacity 100 MiB) runs out of memory";
        assert!(warning.starts_with(start), "{warning}");
        assert!(warning.contains("event 1 asked for 400 MiB"), "{warning}");
        let again = check(&path, &args);
        assert!(stderr(&again).is_empty(), "known already: {}", stderr(&again));
    }

    #[test]
    fn a_failure_names_its_trace_once() {
        let (folder, path) = prepared();
        fs::remove_file(folder.path("growing.txt")).expect("was there");
        let summary = folder.path("summary.md");
        let output = check(&path, &["--summary", &summary]);
        assert_code(&output, 2);
        assert_eq!(stdout(&output), "2 entries could not be checked\n");
        let text = read(&summary);
        let row = text.lines().find(|line| line.contains("growing.txt, caching: ")).expect("a row");
        assert_eq!(row.matches("growing.txt").count(), 1, "{text}");
    }

    #[test]
    fn slips_are_told_with_what_was_expected() {
        let (folder, path) = prepared();
        let line = assert_one_error(&check(&path, &["--only", "zzz"]));
        assert!(line.contains("--only zzz; there are: growing.txt/caching, growing.txt/native"));
        let binary = folder.path("trace.zst");
        fs::write(&binary, [0x28, 0xb5, 0x2f, 0xfd, 0x80, 0xff]).expect("written");
        let line = assert_one_error(&check(&binary, &[]));
        assert!(
            line.contains("is no text in UTF-8: expected the JSON that `fraglab check --init`")
        );
        let output = check(&path, &["--tolerance-percent", "-1"]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("expected a number from 0 up"), "{}", stderr(&output));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let (folder, path) = prepared();
        let trace = folder.path("growing.txt");
        let cases: [(&[&str], &str); 6] = [
            (&["--init", "--trace", &trace], "is there already"),
            (&["--trace", &trace], "--init"),
            (&["--only", "nothing"], "no entry matches"),
            (&["--update", "--trace", "no/such.txt"], "no/such.txt"),
            (&["--update", "--trace", &trace, "--alloc", "cachin"], "no allocator \"cachin\""),
            (&["--json", &path], "would overwrite the input"),
        ];
        for (args, message) in cases {
            let line = assert_one_error(&check(&path, args));
            assert!(line.contains(message), "{args:?}: {line}");
        }
        let line = assert_one_error(&check(&folder.path("none.json"), &[]));
        assert!(line.contains("none.json") && line.contains("--init"), "{line}");
    }
}

#[test]
fn help_has_examples_and_exit_codes() {
    for command in ["check", "diff"] {
        for flag in ["-h", "--help"] {
            let text = stdout(&fraglab(&[command, flag]));
            assert!(text.contains("Examples:") && text.contains("Exit codes:"), "{text}");
            assert!(text.contains(&format!("fraglab {command}")), "{text}");
        }
    }
}

/// The baseline of the traces that ship, on the two that take least time; `.ci/run` checks all.
#[test]
fn the_shipped_baseline_holds() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/baseline.json");
    let path = path.to_str().expect("UTF-8");
    let only = ["--only", "llama-3b-recompute", "--only", "opt-1-3b-recompute-offload"];
    let output = check(path, &only);
    assert_code(&output, 0);
    assert!(stdout(&output).starts_with("all "), "{}", stdout(&output));
    assert_eq!(stderr(&output), "");
    // What PyTorch itself reserved stands in the table of traces/README.md: 39.03 GiB.
    let baseline = value(path);
    let entries = baseline["entries"].as_array().expect("an array");
    let entry = entries.iter().find(|entry| {
        entry["trace"] == "llama-3b-recompute.json.zst" && entry["allocator"] == "caching"
    });
    let reserved = entry.expect("there")["figures"]["reserved_bytes_peak"].as_u64();
    let gib = reserved.expect("a number") as f64 / f64::from(1 << 30);
    assert_eq!(format!("{gib:.2}"), "39.03");
}
