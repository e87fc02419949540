//! `fraglab explain` for texts, as people and scripts call it.

use std::fs;

use serde_json::Value;

use super::posted;
use crate::common::program::*;

fn text_of(class: &str) -> String {
    posted().into_iter().find(|message| message.class == class).expect("posted").text
}

fn explained(text: &str, args: &[&str]) -> Value {
    let output = fraglab_reading(text, &[&["explain", "-", "--json", "-"], args].concat());
    assert_code(&output, 0);
    json(&output)
}

#[test]
fn standard_input_and_files_give_the_same_answer() {
    let folder = Folder::new();
    let text = text_of("fragmentation");
    let file = folder.file("oom.txt", &text);
    let (piped, read) = (fraglab_reading(&text, &["explain", "-"]), fraglab(&["explain", &file]));
    assert_code(&piped, 0);
    assert_code(&read, 0);
    let answer = stdout(&piped);
    assert!(
        answer.starts_with("-, line 1: CUDA out of memory on GPU 0\nFragmentation. "),
        "{answer}"
    );
    assert_eq!(
        stdout(&read).split_once(", line").expect("head").1,
        answer.split_once(", line").expect("head").1
    );
}

#[test]
fn json_holds_the_class_the_figures_and_their_rounding() {
    let found = explained(&text_of("partly"), &[]);
    assert_eq!(found["schema_version"], 1);
    assert_eq!(found["kind"], "oom_message");
    assert_eq!((&found["class"], &found["is_fragmentation"]), (&"partly".into(), &"partly".into()));
    let message = &found["messages"][0];
    assert_eq!(message["diagnosis"]["class"], "partly");
    // FalkonML#53: 21.00 GiB wanted.
    assert_eq!(message["requested"]["bytes"], 21_u64 << 30);
    assert_eq!(message["requested"]["error_bytes"], 5_368_710);
    assert_eq!(message["wording"], "torch_reserved");
}

#[test]
fn json_goes_to_a_file_and_quiet_prints_nothing() {
    let folder = Folder::new();
    let (input, answer) = (folder.file("oom.txt", &text_of("driver")), folder.path("answer.json"));
    let output = fraglab(&["explain", &input, "--json", &answer, "--quiet"]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "");
    let value: Value =
        serde_json::from_str(&fs::read_to_string(&answer).expect("written")).expect("JSON");
    assert_eq!(value["class"], "driver");
    let same = fraglab(&["explain", &input, "--json", &input]);
    assert!(assert_one_error(&same).contains("would overwrite the input"));
}

#[test]
fn full_adds_figures_and_arithmetic() {
    let text = text_of("not_fragmentation");
    let (short, full) = (
        fraglab_reading(&text, &["explain", "-"]),
        fraglab_reading(&text, &["explain", "-", "--full"]),
    );
    assert!(!stdout(&short).contains("arithmetic"));
    assert!(
        stdout(&full).contains("figures as read") && stdout(&full).contains("+- "),
        "{}",
        stdout(&full)
    );
}

#[test]
fn one_gpu_of_several() {
    let on_1 =
        posted().into_iter().find(|message| message.text.contains("(GPU 1; 7.79")).expect("posted");
    let text = format!("{}\n{}", text_of("fragmentation"), on_1.text);
    let found = explained(&text, &["--gpu", "1"]);
    assert_eq!(found["messages"].as_array().expect("messages").len(), 1);
    assert_eq!(found["messages"][0]["device_index"], 1);
    let none = fraglab_reading(&text, &["explain", "-", "--gpu", "5"]);
    assert!(assert_one_error(&none).contains("GPU 5"));
}

#[test]
fn logs_and_tables_name_their_kind() {
    let log: String = (0..8)
        .map(|step| {
            format!(
                "after {step} iterations memory (MB) | allocated: 1024.0 | max allocated: 1024.0 | \
                 reserved: {0}.0 | max reserved: {0}.0\n",
                2048 + 512 * step
            )
        })
        .collect();
    let found = explained(&log, &["--capacity", "10GiB"]);
    assert_eq!((&found["kind"], &found["class"]), (&"step_log".into(), &"growing_stranded".into()));
    // 5632 MB at step 7; 4608 more at 512 a step take nine steps.
    assert_eq!(found["step_logs"][0]["diagnosis"]["growth"]["full_at_step"], 16);
    assert_eq!(found["step_logs"][0]["rows"].as_array().expect("rows").len(), 8);
    let table = "| Allocated memory | 10 MiB | 10 MiB | 0 B | 0 B |\n\
                 | GPU reserved memory | 20 MiB | 20 MiB | 0 B | 0 B |\n";
    assert_eq!(explained(table, &[])["kind"], "memory_summary");
}

#[test]
fn other_encodings_and_compression_are_read() {
    let text = text_of("near_miss");
    let folder = Folder::new();
    let utf16: Vec<u8> =
        [0xff, 0xfe].into_iter().chain(text.encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let latin1 = [b"caf\xe9\n", text.as_bytes()].concat();
    for (name, bytes) in [("utf16.txt", utf16), ("latin1.txt", latin1)] {
        let path = folder.path(name);
        fs::write(&path, bytes).expect("written");
        let output = fraglab(&["explain", &path]);
        assert_code(&output, 0);
        assert!(stdout(&output).contains("Short by bytes"), "{name}: {}", stdout(&output));
    }
}

#[test]
fn logs_of_json_objects_are_texts() {
    let message = serde_json::to_string(&text_of("limit")).expect("a string");
    let log = format!(
        "{{\"level\": \"info\", \"text\": \"starts\"}}\n{{\"level\": \"error\", \"text\": {message}}}\n"
    );
    let found = explained(&log, &[]);
    assert_eq!((&found["class"], &found["messages"][0]["line"]), (&"limit".into(), &2.into()));
}

/// Every first line that a trace in text form may have, also one with a time.
#[test]
fn traces_in_text_form_are_known_by_any_first_line() {
    let firsts = [
        "@1ms alloc a 3MiB",
        "@+5us  alloc a 3MiB # a comment",
        "empty_cache#flush",
        "name job",
        "option a 1",
        "limit 3GiB",
        "repeat 2\nalloc _ 1KiB\nend",
    ];
    for first in firsts {
        let text = format!("# a trace\n\n{first}\nalloc b 1MiB\n");
        let output = fraglab_reading(&text, &["explain", "-", "--json", "-"]);
        assert_code(&output, 0);
        assert_eq!(json(&output)["kind"], "trace", "{first}");
    }
    // One that is wrong gets the errors of a trace, with the line.
    for wrong in ["@1ms alloc a", "@soon alloc a 1MiB", "ranks", "unit"] {
        let output = fraglab_reading(wrong, &["explain", "-"]);
        assert_code(&output, 2);
        assert!(stderr(&output).starts_with("fraglab: -:1:"), "{wrong}: {}", stderr(&output));
    }
    let log = "@alice: the job died\n";
    let error = assert_one_error(&fraglab_reading(log, &["explain", "-"]));
    assert!(error.contains("memory_summary()"), "{error}");
}

/// What `export_memory_timeline` writes, as `.raw.json` and as `.json`, names what to give instead;
/// a log that begins alike is still read.
#[test]
fn memory_timelines_are_told_apart() {
    let timelines = [
        "[[1700000000000000, 0, 512, 3], [1700000000000100, 1, 1024, 0]]",
        "[ [-1, 0, 512, 3]]",
        "[[1, 2, 3], [[0, 0], [0, 5], [0, 9]]]",
    ];
    for text in timelines {
        for command in ["explain", "info"] {
            let error = assert_one_error(&fraglab_reading(text, &[command, "-"]));
            for word in ["memory timeline", "export_chrome_trace", "profile_memory=True"] {
                assert!(error.contains(word), "{command} {text}: {error}");
            }
        }
    }
    for head in ["[[0.5, 1.0], [2.0, 3.0]]", "[[1, 2], [3, 4]]", "[[2024-01-01 12:00]]"] {
        let log = format!("{head}\n{}\n", text_of("fragmentation"));
        assert_eq!(explained(&log, &[])["class"], "fragmentation", "{head}");
    }
}

#[test]
fn the_help_gives_every_example_once() {
    let help = stdout(&fraglab(&["--help"]));
    let examples: Vec<&str> = help.lines().filter(|line| line.starts_with("  fraglab ")).collect();
    assert!(examples.len() > 8, "{help}");
    for example in &examples {
        assert_eq!(examples.iter().filter(|other| *other == example).count(), 1, "{example}");
    }
}

#[test]
fn what_is_not_understood_is_refused_with_what_would_be() {
    let error = assert_one_error(&fraglab_reading("hello\nworld\n", &["explain", "-"]));
    for word in ["CUDA", "HIP", "memory_summary()", "DeepSpeed", "trace"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert!(assert_one_error(&fraglab(&["explain", "/none/such"])).contains("/none/such"));
    assert_one_error(&fraglab_reading("", &["explain", "-"]));
}

/// A comment may quote a message: what parses as a trace is one.
#[test]
fn a_trace_that_quotes_a_message_stays_a_trace() {
    let trace =
        format!("# {}\nalloc a 1MiB\nfree a\n", text_of("driver").trim().replace('\n', " "));
    let output = fraglab_reading(&trace, &["explain", "-"]);
    assert_code(&output, 0);
    assert!(!stdout(&output).contains("The driver refused"), "{}", stdout(&output));
}

/// Also in one line, and if it is called after a message.
#[test]
fn a_native_trace_stays_a_trace() {
    let folder = Folder::new();
    let text =
        folder.file("t.txt", "name \"CUDA out of memory\"\ncapacity 1GiB\nalloc a 1MiB\nfree a\n");
    let json = folder.path("t.json");
    assert_code(&fraglab(&["convert", &text, &json]), 0);
    let line = fs::read_to_string(&json).expect("written").replace('\n', " ") + "\n";
    for output in [fraglab(&["explain", &json]), fraglab_reading(&line, &["explain", "-"])] {
        assert_code(&output, 0);
        assert!(!stdout(&output).contains("figures"), "{}", stdout(&output));
    }
}

#[test]
fn what_a_text_holds_cannot_drive_a_terminal() {
    let text = format!(
        "[x:see_memory_usage] \u{9b}31mevil\u{202e}\n[x:see_memory_usage] MA 1 GB Max_MA 1 GB CA 2 \
         GB Max_CA 2 GB\n{}",
        ""
    );
    let output = fraglab_reading(&text, &["explain", "-", "--full"]);
    assert_code(&output, 0);
    assert!(!stdout(&output).contains(['\u{9b}', '\u{202e}']), "{}", stdout(&output));
}

#[test]
fn help_has_examples_and_exit_codes() {
    let output = fraglab(&["explain", "--help"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("Examples:") && text.contains("Exit codes:"), "{text}");
}
