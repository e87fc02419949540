//! `fraglab compare`: the matrix, its formats, its order and what is added to a run.

use std::fs;

use serde_json::Value;

use crate::common::program::*;

/// `caching` keeps 40 and 60 MiB when 100 MiB are asked for: 200 MiB for 100. With sizes rounded to
/// halves of powers of two it is 48 + 64 + 128 = 240 MiB. `native` holds one block at a time.
const GROWING: &str = "\
capacity 1GiB
alloc a 40MiB
free a
alloc b 60MiB
free b
alloc c 100MiB
";

const ROUNDED: &str = "caching+roundup_power2_divisions=2";

/// A profile of which a malloc takes 1 ms and nothing else takes any time.
fn profile() -> String {
    let calls = [
        "free",
        "address_reserve",
        "address_free",
        "create",
        "release",
        "map",
        "unmap",
        "set_access",
    ];
    let calls: Vec<String> = calls.iter().map(|call| format!("\"{call}\": [[2.0, 0.0]]")).collect();
    format!(
        "{{\"name\": \"ms\", \"gpu\": \"\", \"driver\": \"\", \"date\": \"\", \"method\": \"\", \
         \"calls\": {{\"malloc\": [[2.0, 1000.0]], {}}}}}",
        calls.join(", ")
    )
}

/// Rows as JSON, without what a clock measured.
fn rows(args: &[&str]) -> Vec<Value> {
    let output = fraglab(&[&["compare", "--format", "json"], args].concat());
    assert_code(&output, 0);
    let mut rows = json(&output).as_array().expect("an array").clone();
    for row in &mut rows {
        row.as_object_mut().expect("an object").remove("wall");
    }
    rows
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["allocator"]["name"].as_str().expect("named")).collect()
}

fn mib(value: &Value) -> f64 {
    value.as_f64().expect("a number") / f64::from(1 << 20)
}

/// The figures that only a comparison has, by hand.
#[test]
fn rows_hold_a_run_its_smallest_capacity_and_the_waste_removed() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let allocs = format!("{ROUNDED},caching,native");
    let rows = rows(&["--trace", &trace, "--alloc", &allocs]);
    assert_eq!(names(&rows), ["native", "caching", ROUNDED], "by reserved peak");
    let reserved: Vec<f64> =
        rows.iter().map(|row| mib(&row["peaks"]["reserved_bytes_peak"])).collect();
    assert_eq!(reserved, [100.0, 200.0, 240.0]);
    let waste: Vec<&Value> = rows.iter().map(|row| &row["waste_removed"]).collect();
    // 1 - 0/100, 1 - 100/100, 1 - 140/100.
    assert_eq!(waste[0], 1.0);
    assert_eq!(waste[1], 0.0);
    assert!((waste[2].as_f64().expect("a number") + 0.4).abs() < 1e-12);
    let smallest: Vec<f64> =
        rows.iter().map(|row| mib(&row["smallest_capacity"]["capacity_bytes"])).collect();
    // With the cache emptied only the last block stands: 100, or 128 as rounded.
    assert_eq!(smallest, [100.0, 100.0, 128.0]);
    assert_eq!(mib(&rows[2]["smallest_capacity"]["over_requested_bytes"]), 28.0);
    assert_eq!(rows[2]["smallest_capacity"]["over_requested"], 0.28);
    assert_eq!(rows[2]["smallest_capacity"]["non_monotone"], false);
    assert_eq!(rows[2]["smallest_capacity"]["message"], Value::Null);
}

#[test]
fn a_cell_is_what_run_gives() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let row = rows(&["--trace", &trace, "--alloc", "caching"]).remove(0);
    let mut run = json(&fraglab(&["run", "--trace", &trace, "--json", "-"]));
    run.as_object_mut().expect("an object").remove("wall");
    for (key, value) in run.as_object().expect("an object") {
        assert_eq!(&row[key], value, "{key}");
    }
}

#[test]
fn a_list_of_capacities_gives_a_row_each_and_running_out_is_a_result() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let allocs = format!("caching,{ROUNDED}");
    let rows =
        rows(&["--trace", &trace, "--alloc", &allocs, "--capacity", "auto,220MiB,120MiB,220MiB"]);
    let cells: Vec<(&str, f64, &str)> = rows
        .iter()
        .map(|row| {
            let status = row["outcome"]["status"].as_str().expect("a word");
            let name = row["allocator"]["name"].as_str().expect("a name");
            (name, mib(&row["device"]["capacity_bytes"]), status)
        })
        .collect();
    assert_eq!(
        cells,
        [
            ("caching", 1024.0, "ok"),
            (ROUNDED, 1024.0, "ok"),
            // 48 and 64 are let go before the 128.
            (ROUNDED, 220.0, "ok"),
            ("caching", 220.0, "ok"),
            ("caching", 120.0, "ok"),
            (ROUNDED, 120.0, "oom"),
        ]
    );
    assert!(rows[0].get("smallest_capacity").is_some());
    assert!(rows[2..].iter().all(|row| row.get("smallest_capacity").is_none()));
    // Against the excess of caching on the same device: 1 - 28/100; none of 100 - 100; none at oom.
    assert_eq!(rows[2]["waste_removed"], 0.72);
    assert_eq!(rows[4]["waste_removed"], Value::Null);
    assert_eq!(rows[5]["waste_removed"], Value::Null);
}

#[test]
fn rows_stand_in_the_order_asked_for() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let profile = folder.file("ms.json", &profile());
    // Mallocs: native 3, caching 3, caching that keeps its first 128 MiB 1.
    let allocs = format!("native,{ROUNDED},caching,caching+roundup_power2_divisions=1");
    let order = |sort: &str| {
        let args = ["--trace", &trace, "--alloc", &allocs, "--profile", &profile, "--sort", sort];
        let rows = rows(&args);
        names(&rows).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let plain = "caching+roundup_power2_divisions=1";
    assert_eq!(order("given"), ["native", ROUNDED, "caching", plain]);
    assert_eq!(order("name"), ["caching", plain, ROUNDED, "native"]);
    // A tie goes to the device time, then to the name: one division rounds nothing.
    assert_eq!(order("reserved"), ["native", "caching", plain, ROUNDED]);
    assert_eq!(order("capacity"), ["native", "caching", plain, ROUNDED]);
    assert_eq!(order("time"), ["native", "caching", plain, ROUNDED]);
}

#[test]
fn rows_that_completed_stand_before_those_that_did_not() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", &GROWING.replace("capacity 1GiB", "capacity 120MiB"));
    // Refused, it never holds more than 48 + 64 MiB; caching that completes holds 100.
    let allocs = format!("{ROUNDED},caching");
    let rows = rows(&["--trace", &trace, "--alloc", &allocs, "--sort", "time"]);
    assert_eq!(names(&rows), ["caching", ROUNDED]);
    assert_eq!(rows[1]["outcome"]["status"], "oom");
}

#[test]
fn device_time_is_a_share_of_the_recorded_time() {
    let folder = Folder::new();
    let trace = folder.file("timed.txt", "alloc a 100MiB\n@4ms free a\n");
    let profile = folder.file("ms.json", &profile());
    let args = ["compare", &trace, "--alloc", "native", "--profile", &profile, "--format", "csv"];
    let output = fraglab(&args);
    assert_code(&output, 0);
    // One malloc of 1 ms beside 4 ms of the program.
    assert_eq!(column(&stdout(&output), "time_share"), ["0.25"]);
    assert_eq!(column(&stdout(&output), "simulated_ns"), ["5000000"]);
    let untimed = folder.file("growing.txt", GROWING);
    let output = fraglab(&["compare", &untimed, "--alloc", "native", "--format", "csv"]);
    assert_eq!(column(&stdout(&output), "time_share"), [""]);
}

/// The fields of a column of a CSV table without quotes.
fn column(csv: &str, name: &str) -> Vec<String> {
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let headers = reader.headers().expect("a head").clone();
    let at = headers.iter().position(|header| header == name);
    let at = at.unwrap_or_else(|| panic!("{name} is no column of {headers:?}"));
    reader.records().map(|record| record.expect("a row")[at].to_owned()).collect()
}

#[test]
fn every_allocator_that_needs_only_a_name_is_the_default() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let listing = json(&fraglab(&["list", "--json"]));
    let known = listing["allocators"].as_array().expect("an array");
    let known: Vec<&str> =
        known.iter().map(|entry| entry["name"].as_str().expect("named")).collect();
    let rows = rows(&["--trace", &trace, "--sort", "given"]);
    let run = names(&rows);
    for name in ["caching", "expandable", "native"] {
        assert!(run.contains(&name), "{run:?}");
    }
    assert!(run.iter().all(|name| known.contains(name)), "{run:?} of {known:?}");
}

#[test]
fn csv_holds_the_raw_numbers_of_the_json() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let args = ["--trace", &trace, "--alloc", "native,caching", "--capacity", "auto,120MiB"];
    let rows = rows(&args);
    let output = fraglab(&[&["compare", "--format", "csv"], &args[..]].concat());
    assert_code(&output, 0);
    let csv = stdout(&output);
    let head = "trace,allocator,profile,capacity_bytes,limit_bytes,address_bytes_max,mappings_max,\
                status,requested_bytes_peak,\
                allocated_bytes_peak,active_bytes_peak,reserved_bytes_peak,excess_bytes,\
                fragmentation,utilization,active_utilization,waste_removed,device_calls,\
                address_bytes_peak,mappings_peak,allocator_device_ns,recorded_ns,simulated_ns,time_share,smallest_capacity_bytes,\
                over_requested_bytes,over_requested,non_monotone,probes,message,\
                smallest_capacity_message";
    assert_eq!(csv.lines().next(), Some(head));
    for (name, path) in [
        ("allocator", "/allocator/name"),
        ("capacity_bytes", "/device/capacity_bytes"),
        ("status", "/outcome/status"),
        ("reserved_bytes_peak", "/peaks/reserved_bytes_peak"),
        ("excess_bytes", "/excess_bytes"),
        ("fragmentation", "/fragmentation"),
        ("waste_removed", "/waste_removed"),
        ("smallest_capacity_bytes", "/smallest_capacity/capacity_bytes"),
        ("non_monotone", "/smallest_capacity/non_monotone"),
    ] {
        let fields = column(&csv, name);
        assert_eq!(fields.len(), 4);
        for (field, row) in fields.iter().zip(&rows) {
            let value = match row.pointer(path) {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(word)) => word.clone(),
                Some(Value::Number(number)) if number.is_f64() => {
                    number.as_f64().expect("a float").to_string()
                }
                Some(other) => other.to_string(),
            };
            assert_eq!(*field, value, "{name}");
        }
    }
}

#[test]
fn markdown_is_one_table_of_all_traces_with_a_unit_a_column() {
    let folder = Folder::new();
    let one = folder.file("one.txt", GROWING);
    let two = folder.file("two.txt", "alloc a 6MiB\n");
    let output = fraglab(&["compare", &one, &two, "--alloc", "caching", "--format", "md"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.ends_with("|\n\n- costs of h200\n"), "{text}");
    let lines: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
    assert!(lines[1].iter().all(|cell| cell.trim_end_matches(':') == "---"), "{text}");
    let cell = |row: usize, title: &str| {
        let at = lines[0].iter().position(|head| *head == title).expect("a column");
        lines[row][at]
    };
    assert_eq!((cell(2, "trace"), cell(3, "trace")), ("one", "two"));
    assert_eq!((cell(2, "capacity GiB"), cell(3, "capacity GiB")), ("1.00", "unlimited"));
    assert_eq!(cell(2, "reserved peak MiB"), "200.00");
    // A request of 1 to 10 MiB takes a segment of 20 MiB.
    assert_eq!(cell(3, "reserved peak MiB"), "20.00");
    assert_eq!(cell(3, "smallest capacity MiB"), "20.00");
    assert_eq!(cell(3, "over requested MiB"), "14.00");
}

/// On 120 MiB the 128 of `ROUNDED` do not fit: its peaks are those of a run without its end.
#[test]
fn a_row_that_was_refused_shows_no_excess_and_markdown_says_why() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let args = ["compare", &trace, "--alloc", &format!("caching,{ROUNDED}")];
    let args = [&args[..], &["--capacity", "120MiB,220MiB", "--profile", "a100-80g"]].concat();
    let screen = stdout(&fraglab(&args));
    let row = screen.lines().find(|line| line.contains(" oom ")).expect("a row");
    // Capacity, status, reserved, excess, frag, util, waste.
    let cells: Vec<&str> = row.split_whitespace().skip_while(|cell| *cell != "120.00").collect();
    assert_eq!(cells[..7], ["120.00", "oom", "112.00", "-", "-", "-", "-"], "{screen}");
    let text = stdout(&fraglab(&[&args[..], &["--format", "md"]].concat()));
    let (table, notes) = text.split_once("\n\n").expect("a list below the table");
    let row = table.lines().find(|line| line.contains(" oom ")).expect("a row");
    let begin = format!("| growing | {ROUNDED} | 120.00 | oom | 100.00 | 112.00 | - | - | - | - |");
    assert!(row.starts_with(&begin), "{row}");
    let notes: Vec<&str> = notes.lines().collect();
    assert_eq!(notes[0], "- costs of a100-80g (derived)");
    let begin = format!("- growing, {ROUNDED}, 120 MiB: event 4 asked for 100 MiB: largest hole ");
    assert!(notes[1].starts_with(&begin), "{notes:?}");
    assert_eq!(notes.len(), 2, "{notes:?}");
    let raw = stdout(&fraglab(&[&args[..], &["--format", "csv", "--sort", "given"]].concat()));
    assert_eq!(column(&raw, "excess_bytes")[1], (52 << 20).to_string(), "112 - 60 MiB");
}

/// 200 MiB hold the 80 beside the 40, 50 do not.
#[test]
fn what_the_recorded_run_was_refused_is_told() {
    let folder = Folder::new();
    let trace = folder.file("refused.txt", "limit 200MiB\nalloc a 40MiB\nattempt b 80MiB\n");
    let said = "the recorded run was refused 80 MiB at event 1 of 2; ok means that it is met here";
    let screen = stdout(&fraglab(&["compare", &trace, "--alloc", "native"]));
    let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(said), "{words}");
    let text = stdout(&fraglab(&["compare", &trace, "--alloc", "native", "--format", "md"]));
    assert!(text.contains(&format!("\n- refused: {said}")), "{text}");
    let trace = folder.file("limited.txt", "limit 50MiB\nalloc a 40MiB\nattempt b 80MiB\n");
    let screen = stdout(&fraglab(&["compare", &trace, "--alloc", "native"]));
    assert!(!screen.contains("ok means"), "{screen}");
}

#[test]
fn the_table_tells_the_best_and_the_refused() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", &GROWING.replace("capacity 1GiB", "capacity 220MiB"));
    let half = "caching+per_process_memory_fraction=0.4";
    let args = ["compare", &trace, "--alloc", &format!("native,caching,{half}")];
    let output = fraglab(&args);
    assert_code(&output, 0);
    let plain = stdout(&output);
    assert!(plain.starts_with("growing: 5 events, 1 stream, text\n"), "{plain}");
    // The limit is that of one row, and stands there.
    let setup = "\nrequested peak 100 MiB; device: sim 220 MiB, costs of h200\n";
    assert!(plain.contains(setup), "{plain}");
    assert!(!plain.contains('\x1b'), "{plain}");
    assert!(plain.lines().all(|line| line.chars().count() <= 100), "{plain}");
    // Two fifths of 220 MiB hold the 60 but not the 100; those of 250 MiB do.
    assert!(plain.contains("event 4 asked for 100 MiB"), "{plain}");
    assert!(plain.contains("limit 88 MiB"), "{plain}");
    let colored = stdout(&fraglab(&[&args[..], &["--color", "always"]].concat()));
    let oom: Vec<&str> =
        colored.lines().filter(|line| line.contains("\x1b[1;31moom\x1b[0m")).collect();
    assert_eq!(oom.len(), 1, "{colored}");
    assert_eq!(oom[0].matches('\x1b').count(), 2, "nothing of it is best: {colored}");
    // native reserves 100 MiB, caching 200.
    assert!(colored.contains("\x1b[32m100.00\x1b[0m"), "{colored}");
    assert!(!colored.contains("\x1b[32m200.00\x1b[0m"), "{colored}");
}

#[test]
fn where_no_capacity_is_enough_the_row_says_why() {
    let folder = Folder::new();
    let trace = folder.file("limited.txt", "limit 50MiB\nalloc a 40MiB\nalloc b 40MiB\n");
    let output = fraglab(&["compare", &trace, "--alloc", "native"]);
    assert_code(&output, 0);
    let words = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("no smallest capacity: refused on a device without end"), "{words}");
    assert!(words.contains("limit 50 MiB; give a larger --limit"), "{words}");
    assert!(!words.contains("the device refused"), "{words}");
    let row = rows(&[&trace, "--alloc", "native"]).remove(0);
    assert_eq!(row["smallest_capacity"]["capacity_bytes"], Value::Null);
    assert_eq!(row["smallest_capacity"]["over_requested"], Value::Null);
    assert!(row["smallest_capacity"]["message"].is_string());
}

/// 100 MiB are 5 pages of an expandable segment, and 2 GiB more than 1 GiB of addresses.
#[test]
fn a_refusal_by_a_cap_names_call_and_cap() {
    let folder = Folder::new();
    let trace = folder.file("large.txt", "alloc a 100MiB\nalloc b 2GiB\n");
    let cases = [
        ("expandable", "--mappings", "3", "map (no mapping left)", "at most 3 mappings"),
        (
            "native",
            "--address-space",
            "1GiB",
            "malloc (no addresses left for 2 GiB)",
            "1 GiB of addresses",
        ),
    ];
    for (alloc, cap, size, call, bound) in cases {
        let args = [&*trace, "--alloc", alloc, cap, size];
        let row = rows(&args).remove(0);
        assert_eq!(row["outcome"]["refused_call"], call);
        for path in ["/outcome/message", "/smallest_capacity/message"] {
            let message = row.pointer(path).and_then(Value::as_str).expect("a message");
            assert!(message.contains(&format!("the device refused {call}, {bound}")), "{message}");
            assert!(!message.contains("--limit"), "{message}");
        }
        let screen = stdout(&fraglab(&[&["compare"], &args[..]].concat()));
        let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words.matches(&format!("the device refused {call}")).count(), 2, "{words}");
        assert_eq!(words.matches(bound).count(), 3, "in the head and in both notes: {words}");
        let csv = stdout(&fraglab(&[&["compare", "--format", "csv"], &args[..]].concat()));
        let caps = [column(&csv, "address_bytes_max"), column(&csv, "mappings_max")].concat();
        let expected = if cap == "--mappings" { ["", "3"] } else { ["1073741824", ""] };
        assert_eq!(caps, expected);
    }
}

#[test]
fn output_is_the_same_on_any_number_of_threads() {
    let folder = Folder::new();
    let traces: Vec<String> =
        (0..3).map(|at| folder.file(&format!("t{at}.txt"), GROWING)).collect();
    let traces: Vec<&str> = traces.iter().map(String::as_str).collect();
    for format in ["csv", "md", "table"] {
        let on = |threads: &str| {
            let args = ["compare", "--format", format, "--threads", threads];
            stdout(&fraglab(&[&args[..], &traces].concat()))
        };
        assert_eq!(on("1"), on("2"), "{format}");
    }
    let on = |threads: &str| rows(&[&["--threads", threads], &traces[..]].concat());
    assert_eq!(on("1"), on("2"));
}

#[test]
fn a_file_gets_the_format_of_its_name_and_the_screen_the_table() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    for (name, begin) in [("r.csv", "trace,"), ("r.md", "| trace |"), ("r.JSON", "[\n")] {
        let out = folder.path(name);
        let output = fraglab(&["compare", &trace, "-o", &out]);
        assert_code(&output, 0);
        assert!(stdout(&output).starts_with("growing: "), "{}", stdout(&output));
        assert!(fs::read_to_string(&out).expect("written").starts_with(begin), "{name}");
    }
    let out = folder.path("table");
    let args = ["compare", &trace, "-o", &out, "--format", "table", "--quiet", "--color", "always"];
    let output = fraglab(&args);
    assert_code(&output, 0);
    assert!(output.stdout.is_empty() && output.stderr.is_empty());
    let table = fs::read_to_string(&out).expect("written");
    assert!(table.starts_with("growing: ") && !table.contains('\x1b'), "{table}");
    let out = folder.path("beside.json");
    assert_code(&fraglab(&["compare", &trace, "--format", "csv", "--json", &out]), 0);
    let value: Value = serde_json::from_str(&fs::read_to_string(&out).expect("written")).unwrap();
    assert!(value.is_array());
    let output = fraglab(&["compare", &trace, "--alloc", "native", "--json", "-"]);
    assert_eq!(json(&output).as_array().map(Vec::len), Some(1), "an array even of one");
}

#[test]
fn errors_name_what_was_expected() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let same = folder.path("r.csv");
    for (args, word) in [
        (&["--alloc", "cashing"][..], "caching"),
        (&["-o", "r.xlsx"], ".csv, .parquet, .md, .json or .txt"),
        (&["--format", "parquet"], "--output FILE.parquet"),
        (&["--format", "csv", "--json", "-"], "both write to standard output"),
        (&["-o", &same, "--json", &same], "two outputs"),
        (&["-o", &trace], "would overwrite"),
    ] {
        let line = assert_one_error(&fraglab(&[&["compare", &trace], args].concat()));
        assert!(line.contains(word), "{args:?}: {line}");
    }
    let capacity = fraglab(&["compare", &trace, "--capacity", "auto,lots"]);
    assert_code(&capacity, 2);
    assert!(stderr(&capacity).contains("or `auto`"), "{}", stderr(&capacity));
    assert_code(&fraglab(&["compare", &trace, "--sort", "size"]), 2);
    assert_code(&fraglab(&["compare"]), 2);
}

#[cfg(not(feature = "analytics"))]
#[test]
fn parquet_without_its_feature_names_the_feature() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let out = folder.path("r.parquet");
    let line = assert_one_error(&fraglab(&["compare", &trace, "-o", &out]));
    assert!(line.contains("r.parquet") && line.contains("analytics"), "{line}");
}

#[cfg(feature = "analytics")]
#[test]
fn parquet_is_written_to_a_file() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let out = folder.path("r.parquet");
    assert_code(&fraglab(&["compare", &trace, "-o", &out]), 0);
    assert!(fs::read(out).expect("written").starts_with(b"PAR1"));
}

#[test]
fn one_bad_trace_does_not_keep_the_others() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    let bad = folder.file("bad.txt", "alloc a\n");
    let output = fraglab(&["compare", &bad, &trace, "--alloc", "native"]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("bad.txt:1:"), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("growing: "), "{}", stdout(&output));
}

#[test]
fn traces_of_one_name_are_called_by_their_paths() {
    let folder = Folder::new();
    fs::create_dir(folder.path("one")).expect("made");
    fs::create_dir(folder.path("two")).expect("made");
    let traces = ["one/t.txt", "two/t.txt"].map(|name| folder.file(name, GROWING));
    let rows = rows(&[&traces[0], &traces[1], "--alloc", "native"]);
    let names: Vec<&Value> = rows.iter().map(|row| &row["trace"]["name"]).collect();
    assert_eq!(names, [traces[0].as_str(), traces[1].as_str()]);
}

#[test]
fn a_closed_pipe_is_no_error() {
    let folder = Folder::new();
    let trace = folder.file("growing.txt", GROWING);
    for format in ["table", "md", "csv", "json"] {
        let output = unread(&["compare", &trace, "--format", format]);
        assert_code(&output, 0);
        assert!(output.stderr.is_empty(), "{format}: {}", stderr(&output));
    }
}
