//! The program as people and scripts call it: arguments in; text, JSON, files and exit codes out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::common::program::*;
use crate::common::shared_dir;

/// 100 MiB, then 300 MiB more, then all freed: `native` reserves exactly what is asked for.
const SMALL: &str = "\
capacity 1GiB
alloc a 100MiB
alloc b 300MiB
free a b
";

/// The second request does not fit.
const TIGHT: &str = "\
capacity 256MiB
alloc a 100MiB
alloc b 300MiB
free a
";

mod help {
    use super::*;

    #[test]
    fn every_command_has_help_with_examples_and_exit_codes() {
        for command in ["run", "compare", "plan", "verify", "info", "convert", "lint-conf", "list"]
        {
            for flag in ["-h", "--help"] {
                let output = fraglab(&[command, flag]);
                assert_code(&output, 0);
                let text = stdout(&output);
                assert!(text.contains("Examples:"), "{command} {flag}: {text}");
                assert!(text.contains(&format!("fraglab {command}")), "{command} {flag}: {text}");
            }
        }
        for command in ["run", "compare", "plan", "verify", "info", "lint-conf"] {
            assert!(stdout(&fraglab(&[command, "-h"])).contains("Exit codes:"), "{command}");
        }
    }

    #[test]
    fn long_help_explains_the_units_of_sizes() {
        let text = stdout(&fraglab(&["run", "--help"]));
        assert!(text.contains("powers of 1024") && text.contains("1.5GiB"), "{text}");
        let short = stdout(&fraglab(&["run", "-h"]));
        assert!(short.lines().count() < text.lines().count());
    }

    #[test]
    fn the_program_alone_shows_its_commands() {
        let output = fraglab(&[]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("Commands:"), "{}", stderr(&output));
    }

    #[test]
    fn the_version_is_the_package_s() {
        let output = fraglab(&["--version"]);
        assert_code(&output, 0);
        assert_eq!(stdout(&output), format!("fraglab {}\n", env!("CARGO_PKG_VERSION")));
    }
}

mod list {
    use super::*;

    #[test]
    fn names_allocators_profiles_and_formats() {
        let output = fraglab(&["list"]);
        assert_code(&output, 0);
        let text = stdout(&output);
        for name in ["caching", "native", "h200", "NVIDIA H200", "pickle", "parquet"] {
            assert!(text.contains(name), "{name} is missing in {text}");
        }
    }

    #[test]
    fn json_holds_what_a_script_needs() {
        let listing = json(&fraglab(&["list", "--json"]));
        let names = |key: &str| -> Vec<String> {
            let entries = listing[key].as_array().expect("an array");
            entries.iter().map(|entry| entry["name"].as_str().expect("named").to_owned()).collect()
        };
        assert!(names("allocators").contains(&"native".to_owned()), "{listing}");
        assert!(names("profiles").contains(&"h200".to_owned()));
        assert!(names("formats").contains(&"json".to_owned()));
        let caching = listing["allocators"]
            .as_array()
            .and_then(|entries| entries.iter().find(|entry| entry["name"] == "caching"))
            .expect("caching is there");
        let keys: Vec<&Value> =
            caching["params"].as_array().expect("params").iter().map(|p| &p["name"]).collect();
        assert!(keys.iter().any(|key| *key == "max_split_size_mb"), "{keys:?}");
    }
}

mod lint_conf {
    use super::*;

    #[test]
    fn traps_are_information() {
        let output = fraglab(&["lint-conf", "max_split_size_mb:128,expandable_segments:True"]);
        assert_code(&output, 0);
        let text = stdout(&output);
        assert!(text.starts_with("max_split_size_mb:128,expandable_segments:True (torch 2.11)\n"));
        assert!(text.contains("max-split-with-expandable: "), "{text}");
        assert!(text.contains("https://github.com/pytorch/pytorch/issues/123548\n"), "{text}");
        assert!(stderr(&output).is_empty(), "{}", stderr(&output));
        let plain = fraglab(&["lint-conf", ""]);
        assert_code(&plain, 0);
        assert!(stdout(&plain).contains("none known"), "{}", stdout(&plain));
    }

    #[test]
    fn what_pytorch_refuses_is_an_error_with_its_place() {
        let output = fraglab(&["lint-conf", "max_split_size_mb:64,expandable_segments:true"]);
        assert_code(&output, 2);
        assert!(output.stdout.is_empty(), "{}", stdout(&output));
        let text = stderr(&output);
        let lines: Vec<&str> = text.lines().collect();
        let [message, settings, caret] = lines[..] else { panic!("three lines: {text}") };
        assert!(message.starts_with("fraglab: settings, character 42: "), "{text}");
        assert!(message.contains("expected True or False, found \"true\""), "{text}");
        assert_eq!(settings, "  max_split_size_mb:64,expandable_segments:true");
        let place = settings.find("true").expect("the word");
        assert_eq!(caret, format!("{}^", " ".repeat(place)));
        for args in [
            &["lint-conf", "--torch", "2.9", "per_process_memory_fraction:0.5"][..],
            &["lint-conf", "throw_on_cudamalloc_oom:True"],
            &["lint-conf", "max_split_size_mb:19"],
        ] {
            assert_code(&fraglab(args), 2);
        }
        assert_code(&fraglab(&["lint-conf", "--torch", "2.12", "throw_on_cudamalloc_oom:True"]), 0);
    }

    #[test]
    fn an_assignment_is_read_as_a_shell_reads_it() {
        for (typed, variable) in [
            ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "PYTORCH_CUDA_ALLOC_CONF"),
            ("export PYTORCH_ALLOC_CONF='max_split_size_mb:128'", "PYTORCH_ALLOC_CONF"),
            ("export PYTORCH_HIP_ALLOC_CONF=\"max_split_size_mb:128\"", "PYTORCH_HIP_ALLOC_CONF"),
        ] {
            let answer = json(&fraglab(&["lint-conf", "--json", typed]));
            assert_eq!(answer["settings"], "max_split_size_mb:128", "{typed}");
            assert_eq!(answer["variable"], variable, "{typed}");
        }
        let typed = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128";
        let answer = json(&fraglab(&["lint-conf", "--json", "--env", "PYTORCH_ALLOC_CONF", typed]));
        assert_eq!(answer["variable"], "PYTORCH_ALLOC_CONF", "what is given wins");
        assert_code(&fraglab(&["lint-conf", "PATH=max_split_size_mb:128"]), 2);
    }

    #[test]
    fn a_slip_of_the_pen_is_named() {
        let output = fraglab(&["lint-conf", "expandable_segment:True"]);
        assert!(stderr(&output).contains("did you mean expandable_segments?"));
        for (spec, meant) in
            [("cachng", "caching?"), ("caching+max_split_size=128", "max_split_size_mb?")]
        {
            let line = assert_one_error(&fraglab(&["run", "--trace", "-", "--alloc", spec]));
            assert!(line.trim_end().ends_with(&format!("; did you mean {meant}")), "{line}");
        }
    }

    #[test]
    fn bad_arguments_are_refused() {
        for (args, word) in [
            (["--torch", "1.13"], "2.MINOR"),
            (["--total", "0"], "above 0"),
            (["--limit", "lots"], "lots"),
            (["--env", "PATH"], "PYTORCH_ALLOC_CONF"),
        ] {
            let output = fraglab(&[&["lint-conf", ""], &args[..]].concat());
            assert_code(&output, 2);
            assert!(stderr(&output).contains(word), "{args:?}: {}", stderr(&output));
        }
        let long = "x".repeat((1 << 20) + 1);
        let line = assert_one_error(&fraglab_reading(&long, &["lint-conf", "-"]));
        assert!(line.contains("1 MiB"), "{line}");
    }

    #[test]
    fn json_holds_settings_effects_and_traps() {
        let settings = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5";
        let args = ["lint-conf", "-", "--json", "--total", "80GiB", "--torch", "2.11.0+cu130"];
        let answer = json(&fraglab_reading(&format!("{settings}\n"), &args));
        assert_eq!(answer["settings"], settings);
        assert_eq!(answer["torch"], "2.11");
        assert_eq!(answer["variable"], Value::Null);
        assert_eq!(answer["effective"]["limit_bytes"], 40u64 << 30);
        assert_eq!(answer["effective"]["garbage_collection_bytes"], 32u64 << 30);
        assert_eq!(answer["effective"]["max_split_size_bytes"], Value::Null);
        assert_eq!(answer["effective"]["expandable_segments"], false);
        assert_eq!(answer["changed"][0]["option"], "garbage_collection_threshold");
        assert_eq!(answer["changed"][0]["value"], "0.8");
        assert_eq!(answer["changed"].as_array().map(Vec::len), Some(2));
        assert_eq!(answer["differences"].as_array().map(Vec::len), Some(0));
        let traps = answer["traps"].as_array().expect("an array");
        let find = |id: &str| traps.iter().find(|trap| trap["id"] == id);
        assert!(find("garbage-collection-without-limit").is_none(), "there is a limit: {answer}");
        assert_eq!(find("fraction-read-once").expect("there")["address"], Value::Null);
        let with_address = find("environment-read-once").expect("there");
        assert!(with_address["address"].as_str().is_some_and(|a| a.starts_with("https://")));
        assert!(with_address["text"].is_string() && with_address["reason"].is_string());
        let limited = ["lint-conf", "--json", "--limit", "60GiB", "--env", "PYTORCH_ALLOC_CONF"];
        let answer = json(&fraglab(&[&limited[..], &["--torch", "2.9.1", ""]].concat()));
        assert_eq!(answer["effective"]["limit_bytes"], 60u64 << 30);
        assert_eq!(answer["variable"], "PYTORCH_ALLOC_CONF");
        assert!(!answer["differences"].as_array().expect("an array").is_empty());
    }
}

mod errors {
    use super::*;

    #[test]
    fn a_missing_file_is_one_line_that_names_it() {
        for args in [
            &["run", "--trace", "no/such.json"][..],
            &["info", "no/such.json"],
            &["convert", "no/such.json", "out.json"],
        ] {
            let line = assert_one_error(&fraglab(args));
            assert!(line.starts_with("fraglab: no/such.json: "), "{line}");
        }
        let output = fraglab(&["verify", "no/such.json"]);
        assert_code(&output, 2);
        assert!(stderr(&output).starts_with("fraglab: no/such.json: "), "{}", stderr(&output));
        assert_eq!(stderr(&output).lines().count(), 1);
    }

    #[test]
    fn an_unknown_allocator_names_the_known() {
        let line = assert_one_error(&fraglab(&["run", "--trace", "x", "--alloc", "cashing"]));
        assert!(line.contains("cashing") && line.contains("caching"), "{line}");
        assert!(line.contains("native"), "{line}");
    }

    #[test]
    fn an_unknown_parameter_names_the_known() {
        let alloc = "caching+max_split=128";
        let line = assert_one_error(&fraglab(&["run", "--trace", "x", "--alloc", alloc]));
        assert!(line.contains("max_split") && line.contains("max_split_size_mb"), "{line}");
    }

    #[test]
    fn an_unknown_profile_names_the_known() {
        let line = assert_one_error(&fraglab(&["run", "--trace", "x", "--profile", "b300"]));
        assert!(line.contains("b300") && line.contains("h200"), "{line}");
    }

    #[test]
    fn a_profile_file_must_be_a_profile() {
        let folder = Folder::new();
        let profile = folder.file("p.json", "{}");
        let line = assert_one_error(&fraglab(&["run", "--trace", "x", "--profile", &profile]));
        assert!(line.contains("p.json: not a cost profile"), "{line}");
    }

    #[test]
    fn wrong_arguments_exit_with_2_and_say_what_is_expected() {
        let capacity = fraglab(&["run", "--trace", "x", "--capacity", "lots"]);
        assert_code(&capacity, 2);
        assert!(stderr(&capacity).contains("is not a unit"), "{}", stderr(&capacity));
        let unit = fraglab(&["run", "--trace", "x", "--capacity", "80 parsecs"]);
        assert_code(&unit, 2);
        assert!(stderr(&unit).contains("GiB"), "{}", stderr(&unit));
        assert_code(&fraglab(&["run", "--trace", "x", "--limit", "0"]), 2);
        assert_code(&fraglab(&["run"]), 2);
        assert_code(&fraglab(&["defragment"]), 2);
        let addresses = fraglab(&["run", "--trace", "x", "--addresses", "up"]);
        assert_code(&addresses, 2);
        assert!(stderr(&addresses).contains("ascending"), "{}", stderr(&addresses));
    }

    #[test]
    fn a_table_needs_a_name_that_says_its_format() {
        let line = assert_one_error(&fraglab(&["run", "--trace", "x", "--decisions", "log.txt"]));
        assert!(line.contains("log.txt") && line.contains(".csv"), "{line}");
    }

    #[cfg(not(feature = "analytics"))]
    #[test]
    fn parquet_without_its_feature_names_the_feature() {
        let args = ["run", "--trace", "x", "--timeline", "t.parquet"];
        let line = assert_one_error(&fraglab(&args));
        assert!(line.contains("`analytics`"), "{line}");
    }

    #[test]
    fn standard_input_is_read_only_once() {
        let line = assert_one_error(&fraglab(&["info", "-", "-"]));
        assert!(line.contains("only once"), "{line}");
    }

    #[test]
    fn a_text_trace_error_shows_the_line_and_a_caret() {
        let folder = Folder::new();
        let path = folder.file("bad.txt", "alloc a 1MiB\nalloc b 10parsecs\n");
        let output = fraglab(&["info", &path]);
        assert_code(&output, 2);
        let text = stderr(&output);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with(&format!("fraglab: {path}:")), "{text}");
        assert!(lines[0].contains("2:9: "), "line 2, column 9 is wrong: {text}");
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].contains("alloc b 10parsecs"), "{text}");
        assert_eq!(lines[2].trim(), "^", "{text}");
    }
}

mod run {
    use super::*;

    #[test]
    fn a_text_trace_from_standard_input() {
        let args = ["run", "--trace", "-", "--alloc", "native", "--json", "-"];
        let output = fraglab_reading("alloc a 100MiB\nalloc b 50MiB\nfree a\n", &args);
        assert_code(&output, 0);
        let result = json(&output);
        assert_eq!(result["schema_version"], 1);
        assert_eq!(result["peaks"]["requested_bytes_peak"], 150 << 20);
        assert_eq!(result["final"]["requested_bytes"], 50 << 20);
        assert_eq!(result["outcome"]["status"], "ok");
        assert_eq!(result["calls"]["malloc"], 2);
        assert_eq!(result["calls"]["free"], 1);
        assert_eq!(result["allocator"]["name"], "native");
        assert_eq!(result["device"]["profile"], "h200");
        assert!(output.stderr.is_empty(), "silent in a pipe: {}", stderr(&output));
    }

    #[test]
    fn one_cell_is_an_object_and_more_are_an_array_in_the_order_asked_for() {
        let folder = Folder::new();
        let (small, other) = (folder.file("small.txt", SMALL), folder.file("other.txt", SMALL));
        let one = json(&fraglab(&["run", "--trace", &small, "--json", "-"]));
        assert_eq!(one["allocator"]["name"], "caching", "the default");
        let args = [
            "run",
            "--trace",
            &other,
            "--trace",
            &small,
            "--alloc",
            "native,caching",
            "--json",
            "-",
        ];
        let many = json(&fraglab(&args));
        let cells: Vec<(&str, &str)> = many
            .as_array()
            .expect("an array")
            .iter()
            .map(|r| {
                let name = |part: &str| r[part]["name"].as_str().expect("named");
                (name("trace"), name("allocator"))
            })
            .collect();
        assert_eq!(
            cells,
            [("other", "native"), ("other", "caching"), ("small", "native"), ("small", "caching")]
        );
    }

    fn without_wall(mut value: Value) -> Value {
        for result in value.as_array_mut().expect("an array") {
            result.as_object_mut().expect("an object").remove("wall");
        }
        value
    }

    #[test]
    fn results_are_the_same_on_any_number_of_threads() {
        let folder = Folder::new();
        let traces: Vec<String> =
            (0..5).map(|n| folder.file(&format!("t{n}.txt"), SMALL)).collect();
        let results = |threads: &str| {
            let mut args = vec!["run", "--threads", threads, "--json", "-", "--alloc"];
            args.extend(["caching,native", "--trace"]);
            args.extend(traces.iter().map(String::as_str));
            without_wall(json(&fraglab(&args)))
        };
        assert_eq!(results("1"), results("4"));
    }

    #[test]
    fn running_out_of_memory_exits_with_1_and_says_where() {
        let folder = Folder::new();
        let tight = folder.file("tight.txt", TIGHT);
        let output = fraglab(&["run", "--trace", &tight, "--alloc", "native"]);
        assert_code(&output, 1);
        let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("oom"), "{text}");
        assert!(text.contains("event 1 asked for 300 MiB"), "{text}");
        assert!(text.contains("capacity 256 MiB"), "{text}");
        let roomy = ["run", "--trace", &tight, "--alloc", "native", "--capacity", "1GiB"];
        assert_code(&fraglab(&roomy), 0);
        let limited = ["run", "--trace", &tight, "--alloc", "native", "--capacity", "1GiB"];
        assert_code(&fraglab(&[&limited[..], &["--limit", "128MiB"]].concat()), 1);
    }

    #[test]
    fn errors_win_over_no_and_the_rest_is_still_told() {
        let folder = Folder::new();
        let tight = folder.file("tight.txt", TIGHT);
        let output = fraglab(&["run", "--alloc", "native", "--trace", &tight, "no/such.txt"]);
        assert_code(&output, 2);
        assert!(stdout(&output).contains("oom"), "{}", stdout(&output));
        assert!(stderr(&output).starts_with("fraglab: no/such.txt: "), "{}", stderr(&output));
    }

    #[test]
    fn the_screen_holds_trace_device_and_a_row_an_allocator() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        let output = fraglab(&["run", "--trace", &small, "--alloc", "caching,native"]);
        assert_code(&output, 0);
        let text = stdout(&output);
        assert!(text.starts_with("small: 4 events, 1 stream"), "{text}");
        assert!(text.contains("device: sim 1 GiB, costs of h200"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("caching") && line.contains(" ok ")));
        assert!(text.lines().any(|line| line.starts_with("native") && line.contains("400.00")));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(!text.contains('\x1b'), "no colour in a pipe");
        let args = ["run", "--trace", &small, "--alloc", "native", "--color", "always"];
        assert!(stdout(&fraglab(&args)).contains("\x1b[32mok"));
        let quiet = fraglab(&["run", "--trace", &small, "--alloc", "native", "--quiet"]);
        assert!(quiet.stdout.is_empty(), "{}", stdout(&quiet));
    }

    #[test]
    fn json_goes_to_a_file_beside_the_text() {
        let folder = Folder::new();
        let (small, out) = (folder.file("small.txt", SMALL), folder.path("r.json"));
        let output = fraglab(&["run", "--trace", &small, "--alloc", "native", "--json", &out]);
        assert_code(&output, 0);
        assert!(stdout(&output).contains("native"));
        let result: Value = serde_json::from_str(&fs::read_to_string(out).unwrap()).unwrap();
        assert_eq!(result["peaks"]["reserved_bytes_peak"], 400 << 20);
    }

    #[test]
    fn an_output_never_overwrites_an_input() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        let line = assert_one_error(&fraglab(&["run", "--trace", &small, "--json", &small]));
        assert!(line.contains("would overwrite the input"), "{line}");
        assert_eq!(fs::read_to_string(small).unwrap(), SMALL);
    }

    fn decisions(folder: &Folder, allocs: &str) -> Vec<String> {
        let (small, out) = (folder.file("small.txt", SMALL), folder.path("log.csv"));
        let args = ["run", "--trace", &small, "--alloc", allocs, "--decisions", &out];
        assert_code(&fraglab(&args), 0);
        fs::read_to_string(out).expect("written").lines().map(str::to_owned).collect()
    }

    #[test]
    fn decisions_have_exactly_the_promised_columns() {
        let folder = Folder::new();
        let lines = decisions(&folder, "native");
        assert_eq!(
            lines[0],
            "event_index,action,block_id,segment_id,offset_bytes,size_bytes,address"
        );
        // One device malloc per tensor: a segment and a block for each request, at offset 0.
        assert!(lines.iter().any(|line| line.starts_with("0,segment_alloc,")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("0,alloc,0,0,0,104857600,")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("3,free,1,")), "{lines:?}");
    }

    #[test]
    fn decisions_of_several_allocators_name_trace_and_allocator_first() {
        let folder = Folder::new();
        let lines = decisions(&folder, "native,caching");
        assert!(lines[0].starts_with("trace,allocator,event_index,action,"), "{}", lines[0]);
        assert!(lines[1].starts_with("small,native,0,"), "{}", lines[1]);
        assert!(lines.last().unwrap().starts_with("small,caching,3,"), "{lines:?}");
    }

    #[test]
    fn a_time_line_follows_the_levels() {
        let folder = Folder::new();
        let (small, out) = (folder.file("small.txt", SMALL), folder.path("levels.csv"));
        let args = ["run", "--trace", &small, "--alloc", "native", "--timeline", &out];
        assert_code(&fraglab(&args), 0);
        let text = fs::read_to_string(out).unwrap();
        let mut lines = text.lines();
        assert_eq!(
            lines.next(),
            Some(
                "event_index,time_ns,phase,requested_bytes,allocated_bytes,active_bytes,\
                 reserved_bytes"
            )
        );
        let levels = |line: &str| line.split(',').skip(3).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(levels(lines.next().unwrap())[0], "104857600");
        assert_eq!(levels(lines.next().unwrap()), vec!["419430400"; 4]);
        assert_eq!(levels(lines.last().unwrap()), vec!["0"; 4]);
    }

    #[cfg(feature = "analytics")]
    #[test]
    fn decisions_as_parquet() {
        let folder = Folder::new();
        let (small, out) = (folder.file("small.txt", SMALL), folder.path("log.parquet"));
        let args = ["run", "--trace", &small, "--alloc", "native", "--decisions", &out];
        assert_code(&fraglab(&args), 0);
        let bytes = fs::read(out).unwrap();
        assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
    }

    #[test]
    fn a_settings_string_takes_the_place_of_the_recorded_one() {
        let folder = Folder::new();
        let path = folder.file("c.txt", &format!("conf max_split_size_mb:40\n{SMALL}"));
        let text = stdout(&fraglab(&["run", "--trace", &path]));
        assert!(text.contains("settings max_split_size_mb:40"), "{text}");
        let conf = "max_split_size_mb:64";
        let text = stdout(&fraglab(&["run", "--trace", &path, "--pytorch-conf", conf]));
        assert!(text.contains("settings max_split_size_mb:64"), "{text}");
        let text = stdout(&fraglab(&["run", "--trace", &path, "--pytorch-conf", ""]));
        assert!(!text.contains("settings"), "{text}");
    }
}

mod expectations {
    use super::*;

    fn check(text: &str, more: &[&str]) -> Output {
        let folder = Folder::new();
        let path = folder.file("t.txt", text);
        fraglab(&[&["run", "--trace", &path, "--check-expect"], more].concat())
    }

    #[test]
    fn those_that_hold_are_counted() {
        let text = format!(
            "{SMALL}expect native reserved_bytes_peak 400MiB\nexpect native calls.malloc 2\n\
             expect native status ok\nexpect caching status ok\n"
        );
        let output = check(&text, &[]);
        assert_code(&output, 0);
        assert!(stdout(&output).ends_with("4 expectations hold\n"), "{}", stdout(&output));
        assert!(check(&text, &["--quiet"]).stdout.is_empty());
    }

    #[test]
    fn one_that_fails_names_line_expected_and_got() {
        let text = format!("{SMALL}expect native reserved_bytes_peak 300MiB\n");
        let output = check(&text, &["--quiet"]);
        assert_code(&output, 1);
        let text = stdout(&output);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("t.txt:5: native peaks.reserved_bytes_peak"), "{text}");
        assert!(text.contains("expected 300MiB, got 400 MiB (419430400)"), "{text}");
    }

    #[test]
    fn running_out_of_memory_as_expected_is_good() {
        assert_code(&check(&format!("{TIGHT}expect native status oom\n"), &[]), 0);
        assert_code(&check(&format!("{TIGHT}expect native calls.malloc 1\n"), &[]), 1);
    }

    #[test]
    fn json_on_standard_output_stays_alone() {
        let text = format!("{SMALL}expect native calls.malloc 3\n");
        let output = check(&text, &["--json", "-"]);
        assert_code(&output, 1);
        assert_eq!(json(&output)["calls"]["malloc"], 2);
        assert!(stderr(&output).contains("expected 3, got 2"), "{}", stderr(&output));
    }

    #[test]
    fn allocators_asked_for_run_too() {
        let text = format!("{SMALL}expect native status ok\n");
        let output = check(&text, &["--alloc", "caching", "--json", "-"]);
        assert_code(&output, 0);
        let names: Vec<Value> = json(&output)
            .as_array()
            .expect("an array")
            .iter()
            .map(|result| result["allocator"]["name"].clone())
            .collect();
        assert_eq!(names, ["native", "caching"]);
    }

    #[test]
    fn a_trace_without_any_is_an_error() {
        let line = assert_one_error(&check(SMALL, &[]));
        assert!(line.contains("no expect lines"), "{line}");
    }

    #[test]
    fn a_field_that_is_not_there_is_an_error_with_its_line() {
        let output = check(&format!("{SMALL}expect native reserved_peak 1\n"), &["--quiet"]);
        let line = assert_one_error(&output);
        assert!(line.contains("t.txt:5: ") && line.contains("no field"), "{line}");
    }
}

mod pipes {
    use super::*;

    #[test]
    fn a_closed_pipe_is_no_error() {
        for args in [&["list"][..], &["list", "--json"], &["--help"], &["run", "--help"]] {
            let output = unread(args);
            assert_code(&output, 0);
            assert!(output.stderr.is_empty(), "{args:?}: {}", stderr(&output));
        }
    }

    #[test]
    fn a_closed_pipe_is_no_error_while_traces_are_written() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        for args in [&["info", &small][..], &["convert", &small, "-", "--to", "text"]] {
            assert_code(&unread(args), 0);
        }
    }
}

mod convert {
    use super::*;

    fn result_of(trace: &str) -> Value {
        let mut result =
            json(&fraglab(&["run", "--trace", trace, "--alloc", "caching", "--json", "-"]));
        let fields = result.as_object_mut().expect("an object");
        fields.remove("wall");
        fields.remove("trace");
        result
    }

    #[test]
    fn a_trace_survives_the_round_trip() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        let mut names = vec!["b.json", "c.json.zst", "d.txt", "e.json.gz"];
        if cfg!(feature = "analytics") {
            names.push("f.parquet");
        }
        for name in names {
            let out = folder.path(name);
            let output = fraglab(&["convert", &small, &out, "--name", "renamed"]);
            assert_code(&output, 0);
            assert!(output.stdout.is_empty());
            let line = stderr(&output);
            assert!(line.contains(&format!("wrote {out}: 4 events, ")), "{line}");
            assert_eq!(result_of(&out), result_of(&small), "{name}");
            let facts = json(&fraglab(&["info", "--json", &out]));
            assert_eq!(facts["stats"]["events"], 4, "{name}");
        }
        let facts = json(&fraglab(&["info", "--json", &folder.path("b.json")]));
        assert_eq!(facts["header"]["name"], "renamed");
    }

    #[test]
    fn standard_input_and_output() {
        let json_text = fraglab_reading(SMALL, &["convert", "-", "-", "--to", "json"]);
        assert_code(&json_text, 0);
        let trace = stdout(&json_text);
        let back = fraglab_reading(&trace, &["convert", "-", "-", "--to", "text"]);
        assert_code(&back, 0);
        let text = stdout(&back);
        assert!(text.contains("capacity 1GiB") || text.contains("capacity 1024MiB"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("alloc ")).count(), 2, "{text}");
    }

    #[test]
    fn standard_output_needs_a_format_and_a_file_has_one() {
        let line = assert_one_error(&fraglab_reading(SMALL, &["convert", "-", "-"]));
        assert!(line.contains("--to"), "{line}");
        let args = ["convert", "-", "x.json", "--to", "json"];
        assert_one_error(&fraglab_reading(SMALL, &args));
        assert!(!Path::new("x.json").exists());
    }

    #[test]
    fn the_input_is_never_overwritten() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        let line = assert_one_error(&fraglab(&["convert", &small, &small]));
        assert!(line.contains("would overwrite the input"), "{line}");
        #[cfg(unix)]
        {
            let link = folder.path("link.json");
            std::os::unix::fs::symlink(&small, &link).unwrap();
            assert_one_error(&fraglab(&["convert", &small, &link]));
        }
        assert_eq!(fs::read_to_string(&small).unwrap(), SMALL);
    }
}

mod info {
    use super::*;

    #[test]
    fn tells_what_a_text_trace_holds() {
        let folder = Folder::new();
        let text = format!("conf max_split_size_mb:40\nlimit 50MiB\nmark step0.forward\n{SMALL}");
        let path = folder.file("job.txt", &text.replace("mark step0.forward\n", ""));
        let output = fraglab(&["info", &path]);
        assert_code(&output, 0);
        let text = stdout(&output);
        for part in ["text trace", "max_split_size_mb:40", "50 MiB", "400 MiB", "1 GiB"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        let facts = json(&fraglab(&["info", "--json", &path]));
        assert_eq!(facts["stats"]["events"], 4);
        assert_eq!(facts["header"]["limit_bytes"], 50 << 20);
        assert_eq!(facts["file"], path);
        let two = json(&fraglab(&["info", "--json", &path, &path]));
        assert_eq!(two.as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn names_from_files_cannot_drive_the_terminal() {
        let folder = Folder::new();
        let path = folder.file("evil.txt", "mark \x1b[2J\nalloc a\x1b]0;x\x07 1MiB\n");
        let output = fraglab(&["info", &path]);
        assert!(matches!(code(&output), 0 | 2), "{}", stderr(&output));
        assert!(!stdout(&output).contains('\x1b'), "{}", stdout(&output));
        assert!(!stderr(&output).contains('\x1b'), "{}", stderr(&output));
    }
}

mod verify {
    use super::*;

    fn recording(name: &str) -> Option<PathBuf> {
        Some(shared_dir()?.join(name))
    }

    #[test]
    fn a_real_recording_is_reproduced() {
        let Some(path) = recording("tiny.pickle.gz") else { return };
        let path = path.to_str().expect("UTF-8");
        let output = fraglab(&["verify", path]);
        assert_code(&output, 0);
        let text = stdout(&output);
        assert!(text.starts_with(&format!("exact   {path}  ")), "{text}");
        assert!(text.contains("\n1 of 1 file exact\n"), "{text}");
        let result = json(&fraglab(&["verify", "--json", path]));
        assert_eq!(result["exact"], true);
        assert_eq!(result["file"], path);
        for name in ["events", "segment_events", "first_difference", "compared", "not_compared"] {
            assert!(result.get(name).is_some(), "{name} is missing in {result}");
        }
    }

    /// The recording beside a truth that tells of another reserved peak.
    #[test]
    fn a_difference_exits_with_1_and_the_others_are_told() {
        let Some(path) = recording("tiny.pickle.gz") else { return };
        let folder = Folder::new();
        let copy = folder.path("tiny.pickle.gz");
        fs::copy(&path, &copy).unwrap();
        let truth = fs::read_to_string(path.with_file_name("tiny.truth.json")).unwrap();
        assert!(truth.contains("371195904"), "the reserved peak of the recording");
        folder.file("tiny.truth.json", &truth.replace("371195904", "371195392"));
        let good = path.to_str().expect("UTF-8");
        let output = fraglab(&["verify", &copy, good]);
        assert_code(&output, 1);
        let text = stdout(&output);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with(&format!("DIFFERS {copy}: event ")), "{text}");
        assert!(lines[1].starts_with("exact   "), "{text}");
        assert_eq!(lines[2], "1 of 2 files exact, 1 differs");
        let both = fraglab(&["verify", "no/such.pickle", &copy]);
        assert_code(&both, 2);
        assert!(stdout(&both).contains("DIFFERS"), "the others are verified all the same");
    }

    #[test]
    fn a_trace_without_a_recording_cannot_be_verified() {
        let folder = Folder::new();
        let small = folder.file("small.txt", SMALL);
        let output = fraglab(&["verify", &small]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("nothing to compare"), "{}", stderr(&output));
    }
}

mod memory_texts {
    use super::*;

    const MESSAGE: &str = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 \
        MiB. GPU 3 has a total capacity of 79.10 GiB of which 2.00 MiB is free.";

    #[test]
    fn a_message_in_place_of_a_trace_is_told_as_such() {
        let folder = Folder::new();
        let file =
            folder.file("oom.txt", &format!("Traceback (most recent call last):\n{MESSAGE}\n"));
        for command in ["run", "advise", "info", "plan"] {
            let line = assert_one_error(&fraglab(&[command, &file]));
            assert!(line.contains(&format!("`fraglab explain {file}`")), "{command}: {line}");
        }
        assert_code(&fraglab(&["explain", &file]), 0);
    }

    #[test]
    fn a_trace_that_quotes_a_message_has_its_own_errors() {
        let folder = Folder::new();
        let file = folder.file("case.txt", &format!("# {MESSAGE}\nalloc a\n"));
        let text = stderr(&fraglab(&["run", &file]));
        assert!(text.contains("case.txt:2:"), "{text}");
    }
}
