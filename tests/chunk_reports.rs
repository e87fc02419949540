//! Rows of `reports/chunk_options.csv` are what the program gives.

use std::collections::HashMap;
use std::path::Path;

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run};
use fraglab::workload::{generate, read_job};

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(path).expect(name)
}

/// The description that the script begins from.
fn description() -> String {
    let script = file("experiments/chunk_options.sh");
    let (_, rest) = script.split_once("<<'TOML'\n").expect("a description in the script");
    rest.split_once("\nTOML\n").expect("its end").0.to_owned()
}

/// What PatrickStar's scripts switch on, as the script has it.
fn together() -> Vec<String> {
    let script = file("experiments/chunk_options.sh");
    let (_, rest) = script.split_once("together=(").expect("a list in the script");
    rest.split_once(')').expect("its end").0.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn rows_of_the_ablation_are_what_the_program_gives() {
    let description = description();
    let table = file("reports/chunk_options.csv");
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let rows: Vec<HashMap<String, String>> =
        reader.deserialize().collect::<Result<_, _>>().expect("rows");
    let mut checked = 0;
    for row in &rows {
        let options = match (row["model"].as_str(), row["gpus"].as_str(), row["options"].as_str()) {
            ("GPT3_8B", "1", "none") => Vec::new(),
            ("GPT_DS_20B", "8", "together") => together(),
            ("GPT_DS_20B", "1", option @ "use_hybrid_adam=true")
            | ("GPT_DS_20B", "8", option @ "with_mem_saving_com=true") => vec![option.to_owned()],
            _ => continue,
        };
        let mut sets = vec![
            ("model.preset".to_owned(), row["model"].clone()),
            ("parallel.data".to_owned(), row["gpus"].clone()),
        ];
        for option in options {
            let (key, value) = option.split_once('=').expect("KEY=VALUE");
            sets.push((format!("options.{key}"), value.to_owned()));
        }
        let trace = generate(&read_job(&description, &sets).expect("a job")).expect("a trace");
        let profile = CostProfile::shipped("h200").expect("ships");
        let spec = "chunk".parse().expect("a specification");
        let observed = run(&trace, &spec, &RunOptions::new(profile), Observe::default());
        let result = observed.expect("runs").result;
        let chunk = result.chunk.expect("a summary");
        let name = &row["options"];
        let number = |key: &str| row[key].parse::<u64>().expect(key);
        assert_eq!(result.outcome.status.name(), row["status"], "{name}");
        assert_eq!(result.peaks.reserved_bytes_peak, number("reserved_bytes_peak"), "{name}");
        assert_eq!(chunk.host_bytes_peak, number("host_bytes_peak"), "{name}");
        let last = chunk.steps.last().expect("steps");
        assert_eq!(last.times.step_ns, number("step_ns"), "{name}");
        checked += 1;
    }
    assert_eq!(checked, 4, "rows were renamed: this test checks nothing");
    assert_eq!(rows.len(), 2 * (27 + 26), "every option alone and left out, on both machines");
}
