//! `fraglab plan` as people and scripts call it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::program::*;

/// A packing whose optimum is plain to see: `c` fits above `b` once `a` is gone.
const BUFFERS: &str = "\
id,lower,upper,size
a,0,4,6
b,0,9,4
c,4,9,6
";

/// Offsets by id from a CSV that `plan` wrote.
fn offsets(csv: &str) -> Vec<(String, u64)> {
    let mut lines = csv.lines();
    let head: Vec<&str> = lines.next().expect("a head").split(',').collect();
    let at = head.iter().position(|name| *name == "offset").expect("an offset column");
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        (fields[0].to_owned(), fields[at].parse().expect("an offset"))
    };
    lines.map(row).collect()
}

fn json_of(arguments: &[&str]) -> Value {
    let output = fraglab(arguments);
    assert_code(&output, 0);
    serde_json::from_str(&stdout(&output)).expect("JSON and nothing else")
}

#[test]
fn a_csv_gets_its_offsets_in_the_same_columns() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.csv"), folder.path().join("out.csv"));
    fs::write(&input, BUFFERS).unwrap();
    let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
    assert_code(&fraglab(&["plan", input, "-o", output, "-q"]), 0);
    let text = fs::read_to_string(output).unwrap();
    assert!(text.starts_with("id,lower,upper,size,offset\na,0,4,6,"), "{text}");
    let offsets = offsets(&text);
    // a and c have one place, b the other; a and b may change places.
    assert_eq!(offsets[0].1, offsets[2].1);
    assert!([(0, 6), (4, 0)].contains(&(offsets[0].1, offsets[1].1)), "{offsets:?}");
}

#[test]
fn json_has_the_promised_names() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.csv");
    fs::write(&input, BUFFERS).unwrap();
    let result = json_of(&["plan", input.to_str().unwrap(), "--json", "-"]);
    assert_eq!(result["height_bytes"], 10);
    assert_eq!(result["lower_bound_bytes"], 10);
    assert_eq!(result["proven"], true);
    assert_eq!(result["buffers"], 3);
    assert_eq!(result["schema_version"], 1);
    assert!(result["wall"]["seconds"].as_f64().unwrap() >= 0.0);
    let first = &result["binding"][0];
    assert_eq!((&first["start"], &first["buffers"]), (&Value::from(0), &Value::from(2)));
}

#[test]
fn what_is_live_at_once_and_too_much_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.csv");
    fs::write(&input, BUFFERS).unwrap();
    let output = fraglab(&["plan", input.to_str().unwrap(), "--capacity", "9"]);
    assert_code(&output, 1);
    let text = stdout(&output);
    assert!(text.contains("cannot fit into 9 B"), "{text}");
    let said = "at tick 0: 2 buffers live at once need 10 B, 1 B too much; already these 2 of them";
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(said), "{text}");
    let output = fraglab(&["plan", input.to_str().unwrap(), "--capacity", "10"]);
    assert_code(&output, 0);
    assert!(stdout(&output).contains("fits into 10 B"), "{}", stdout(&output));
}

#[test]
fn a_trace_is_packed_in_units_of_512_bytes_and_streams_may_be_kept_apart() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("t.txt");
    fs::write(&input, "alloc a 100\nfree a\nalloc b 600 stream=1\nmark step0\n").unwrap();
    let path = input.to_str().unwrap();
    let together = json_of(&["plan", path, "--json", "-"]);
    assert_eq!((&together["height_bytes"], &together["buffers"]), (&1024.into(), &2.into()));
    let apart = json_of(&["plan", path, "--streams", "apart", "--json", "-"]);
    assert_eq!(apart["height_bytes"], 1536);
    let bytes = json_of(&["plan", path, "--granularity", "1", "--json", "-"]);
    assert_eq!(bytes["height_bytes"], 600);
}

#[test]
fn counted_work_gives_the_same_file_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |name: &str, threads: &str| {
        let path = folder.path().join(name);
        let path = path.to_str().unwrap();
        let arguments = ["plan", "--synthetic", "dense:3000,seed=5", "--work", "3e6", "-q"];
        let output = fraglab(&[&arguments[..], &["--threads", threads, "-o", path]].concat());
        assert_code(&output, 0);
        fs::read(path).unwrap()
    };
    let one = plan("one.json", "1");
    assert!(plan("two.json", "2") == one && plan("four.json", "4") == one);
    let file: Value = serde_json::from_slice(&one).expect("a plan is JSON");
    assert_eq!(file["fraglab_plan"], 1);
    let rows = file["buffers"].as_array().expect("buffers");
    let numbers = |row: &Value| {
        let row = row.as_array().expect("a row").iter();
        row.map(|field| field.as_u64().expect("a number")).collect::<Vec<_>>()
    };
    let top = rows.iter().map(numbers).map(|row| row[2] + row[4]).max();
    assert_eq!(top, file["height_bytes"].as_u64());
}

#[test]
fn a_figure_is_an_svg_with_a_rectangle_a_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let (input, svg) = (folder.path().join("in.csv"), folder.path().join("p.svg"));
    fs::write(&input, BUFFERS).unwrap();
    let arguments = ["plan", input.to_str().unwrap(), "--figure", svg.to_str().unwrap()];
    assert_code(&fraglab(&arguments), 0);
    let text = fs::read_to_string(&svg).unwrap();
    assert!(text.starts_with("<svg") && text.contains("lower bound 10 B"), "{text}");
}

#[test]
fn wrong_input_is_told_with_its_line_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.csv"), folder.path().join("out.csv"));
    fs::write(&input, "id,lower,upper,size\na,0,4,6\nb,5,3,1\n").unwrap();
    let output = fraglab(&["plan", input.to_str().unwrap(), "-o", out.to_str().unwrap()]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("in.csv: line 3"), "{}", stderr(&output));
    assert!(!out.exists() && stdout(&output).is_empty());
    let output = fraglab(&["plan", input.to_str().unwrap(), "-o", input.to_str().unwrap()]);
    assert_code(&output, 2);
    assert!(stderr(&output).contains("would overwrite the input"), "{}", stderr(&output));
    for (arguments, said) in [
        (&["plan", "--synthetic", "sparse:9"][..], "expected dense, moe or thin"),
        (&["plan", "x.csv", "-o", "plan.txt"], "must end in .json or .csv"),
        (&["plan", "x.csv", "--time", "ten"], "as in 500ms, 10s"),
        (&["plan", "x.csv", "--work", "0"], "a whole number above 0"),
        (&["plan", "--synthetic", "thin:9", "x.csv"], "cannot be used with"),
    ] {
        let output = fraglab(arguments);
        assert_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn several_problems_make_a_table_and_one_that_fails_does_not_hide_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, bad) = (write("good.csv", BUFFERS), write("bad.csv", "id,lower,upper,size\nx\n"));
    let output = fraglab(&["plan", &good, &bad, &good]);
    assert_code(&output, 2);
    let text = stdout(&output);
    assert_eq!(text.matches("proven").count(), 3, "two rows and the summary: {text}");
    assert!(text.contains("1 could not be read"), "{text}");
    assert!(Path::new(&good).exists());
}

#[test]
fn minimalloc_files_can_be_replayed_as_traces() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.csv");
    fs::write(&input, "id,lower,upper,size\na,0,4,4096\nb,2,9,4096\nc,4,9,4096\n").unwrap();
    let arguments = ["run", "--trace", input.to_str().unwrap(), "--alloc", "native"];
    let output = fraglab(&[&arguments[..], &["--json", "-"]].concat());
    assert_code(&output, 0);
    let result: Value = serde_json::from_str(&stdout(&output)).unwrap();
    // a is gone when c comes: ends are no part of a life.
    assert_eq!(result["peaks"]["requested_bytes_peak"], 8192);
    assert_eq!(result["trace"]["allocs"], 3);
}
