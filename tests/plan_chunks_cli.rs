//! `fraglab plan-chunks` as people and scripts call it, and the report that it makes.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::program::*;

const MI: u64 = 1 << 20;

/// A model of two layers whose units are easily added up: hidden 64, ffn 256, vocabulary 1000.
const SMALL: &str = "\
[model]
type = \"bert\"
layers = 2
hidden = 64
heads = 2
vocabulary = 1000
positions = 32
head = \"classifier\"
[train]
batch = 1
sequence = 32
[hardware]
memory = \"1GiB\"
host_memory = \"2GiB\"
";

fn plan(arguments: &[&str], code: i32) -> Value {
    let output = fraglab(&[&["plan-chunks"], arguments, &["--json", "-"]].concat());
    assert_code(&output, code);
    serde_json::from_str(&stdout(&output)).expect("JSON and nothing else")
}

fn row(plan: &Value, mi: u64) -> &Value {
    let rows = plan["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["chunk_elements"] == mi * MI);
    &row.expect("a row of that size")["candidate"]
}

/// Spec patrickstar 8.1 and 8.2, as JSON.
#[test]
fn a_named_model_needs_no_file() {
    let bert = plan(&["--model", "GPT3_8B", "--use_ckp"], 0);
    assert_eq!(bert["schema_version"], 1);
    assert_eq!(bert["model"]["name"], "GPT3_8B");
    assert_eq!(bert["model"]["elements"], 8_262_970_370_u64);
    assert_eq!(bert["model"]["model_data_bytes"], 14 * 8_262_970_370_u64);
    assert_eq!(bert["model"]["largest_module"], "bert.embeddings.word_embeddings");
    assert_eq!(bert["rows"].as_array().unwrap().len(), 8);
    assert_eq!(row(&bert, 184)["chunks"], 44);
    assert_eq!(row(&bert, 88), &Value::Null);
    assert_eq!(row(&bert, 184)["searched"], Value::Null);
    assert_eq!(bert["fine"]["tightest"]["chunk_elements"], 397 * MI);
    assert_eq!(bert["machine"]["gpu_bytes"], 32_u64 << 30);
    assert_eq!(bert["machine"]["host_bytes"], 240_u64 << 30);

    // As GPT type nothing below 147.237 Mi holds it; the names are the same in small letters.
    let gpt = plan(&["--model", "gpt3_8b", "--type", "gpt", "--use_ckp"], 0);
    assert_eq!(gpt["model"]["largest_module"], "transformer.wte");
    assert_eq!(row(&gpt, 120), &Value::Null);
    assert_ne!(row(&gpt, 152), &Value::Null);
}

#[test]
fn a_size_that_is_asked_for_stands_below_the_grid() {
    let tiled =
        ["--model", "GPT_DS_20B", "--with_tiling_linear", "--use_cpu_embedding", "--use_ckp"];
    let asked = plan(&[&tiled[..], &["--chunk_size", "88Mi", "--ranks", "8"]].concat(), 0);
    assert_eq!(asked["rows"].as_array().unwrap().len(), 8);
    assert_eq!(row(&asked, 88)["chunks"], 301);
    let new = plan(&["--model", "GPT3_8B", "--use_cpu_embedding", "--chunk_size", "64Mi"], 1);
    let rows = new["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 9);
    assert_eq!(
        (&rows[8]["chunk_elements"], &rows[8]["candidate"]["chunks"]),
        (&(64 * MI).into(), &145.into())
    );
}

/// Batch 8 and sequence 512 without checkpointing hold more than a GPU has.
#[test]
fn exit_code_1_says_that_nothing_fits() {
    let none = plan(&["--model", "GPT3_8B"], 1);
    assert_eq!(none["fine"]["managed"]["best"], Value::Null);
    assert_eq!(none["fine"]["managed"]["misfit"]["room"], "gpu");
    assert_eq!(row(&none, 184)["searched"], Value::Null);
}

#[test]
fn flags_replace_what_a_description_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("small.toml");
    fs::write(&file, SMALL).unwrap();
    let file = file.to_str().unwrap();
    let told = plan(&[file], 0);
    // 1000 + 32 + 2 + 2 + per layer 4 · 65 + 2 + 4 · 65 + 4 · 64 + 1 + 2 + 65 times 64, and 130.
    let layer = 64 * (4 * 65 + 2 + 4 * 65 + 4 * 64 + 1 + 2);
    assert_eq!(told["model"]["elements"], 64 * (1000 + 32 + 2 + 2 + 65) + 2 * layer + 130);
    assert_eq!(told["model"]["smallest_chunk_elements"], 64 * 1000);
    assert_eq!(told["machine"]["gpu_bytes"], 1_u64 << 30);
    let flags = ["--gpu", "3GiB", "--host", "5GiB", "--ranks", "4", "--local-ranks", "2"];
    let options =
        ["--overall_gpu_mem_ratio", "0.5", "--with_mem_saving_com=false", "--working", "1MiB"];
    let all = plan(&[&[file], &flags[..], &options[..]].concat(), 0);
    let machine = &all["machine"];
    assert_eq!(machine["gpu_bytes"], 3_u64 << 30);
    assert_eq!(machine["host_bytes"], 5_u64 << 30);
    assert_eq!((&machine["ranks"], &machine["local_ranks"]), (&4.into(), &2.into()));
    assert_eq!(machine["gpu_ratio"], 0.5);
    assert_eq!(machine["memory_saving"], false);
    assert_eq!(machine["working_bytes"], 1_u64 << 20);
    // One chunk of 88 Mi for four ranks.
    assert_eq!(row(&all, 88)["chunks"], 1);
    assert_eq!(row(&all, 88)["dummies"], 3);
    assert_eq!(row(&all, 88)["rank_bytes"], 14 * 88 * MI);
}

#[test]
fn the_screen_tells_sizes_the_best_and_what_is_short() {
    let output = fraglab(&["plan-chunks", "--model", "GPT3_15B", "--use_ckp"]);
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.starts_with("GPT3_15B: bert, 78 layers of 4096, batch 8 x 512"), "{text}");
    for line in [
        "parameters in 630 modules",
        "chunks of 119.227Mi and more hold it",
        // Spec patrickstar 8.2: no size of the grid, but 193 Mi; 242.5 GB and 223.8 GB.
        "nearest 280Mi: model data on GPUs and host together needs 225.8",
    ] {
        let flowing = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flowing.contains(line), "{line}: {text}");
    }
    let columns = |begin: &str| -> Vec<Vec<String>> {
        let lines = text.lines().filter(|line| line.trim_start().starts_with(begin));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    assert_eq!(columns("280Mi")[0][..3], ["280Mi", "59", "91.5%"]);
    assert_eq!(columns("88Mi")[0], ["88Mi", "too", "small"]);
    let searched = columns("searched");
    assert_eq!(searched[0], ["searched", "88..312Mi", "none"]);
    assert_eq!(searched[1][..6], ["searched", "every", "Mi", "193Mi", "79", "99.2%"]);
    assert!(
        text.lines().all(|line| line.chars().count() <= 80 && line.trim_end() == line),
        "{text}"
    );
}

#[test]
fn errors_say_what_to_do() {
    let failed = |arguments: &[&str], part: &str| {
        let output = fraglab(&[&["plan-chunks"], arguments].concat());
        assert_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(part), "{text}");
    };
    failed(&[], "MODEL.toml");
    failed(&["--model", "GPT3_9B"], "GPT3_9B");
    failed(&["--model", "llama-7b", "--type", "gpt"], "leave type away");
    failed(&["--model", "GPT3_8B", "--ranks", "0"], "parallel.data");
    failed(&["--model", "GPT3_8B", "--gpu", "32GB!"], "32GB!");
    failed(&["missing.toml"], "missing.toml");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.toml");
    fs::write(&file, SMALL).unwrap();
    let name = file.to_str().unwrap();
    failed(&[name, "--json", name], name);
    assert_eq!(fs::read_to_string(Path::new(name)).unwrap(), SMALL);
}

/// Rows of `reports/largest_model.csv` are what the program gives.
#[test]
fn the_report_on_the_largest_model_is_still_true() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/largest_model.csv");
    let mut reader = csv::Reader::from_path(path).unwrap();
    let head = reader.headers().unwrap().clone();
    let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 9 * 5 * 17);
    for (platform, ranks, model) in
        [("V100", "1", "GPT3_12B"), ("V100", "8", "GPT3_18B"), ("A100", "32", "GPT_175B")]
    {
        let is_it = |row: &&csv::StringRecord| {
            row[0] == *platform && row[1] == *ranks && &row[5] == "batch8" && row[6] == *model
        };
        let kept = rows.iter().find(is_it).unwrap();
        let field = |name: &str| &kept[head.iter().position(|title| title == name).unwrap()];
        let local = field("local_ranks");
        let common = "--set train.sequence=1024 --set train.batch=8 --use_ckp --chunk_size 384Mi";
        let mut arguments = vec!["--model", model, "--gpu", field("gpu_bytes"), "--host"];
        arguments.extend([field("host_bytes"), "--ranks", ranks, "--local-ranks", local]);
        arguments.extend(common.split(' '));
        let now = plan(&arguments, if field("managed_fine_elements").is_empty() { 1 } else { 0 });
        let spelled = |value: &Value| value.as_u64().map(|n| n.to_string()).unwrap_or_default();
        assert_eq!(spelled(&now["machine"]["working_bytes"]), field("working_bytes"), "{model}");
        for rule in ["searched", "corrected", "managed"] {
            for grid in ["shipped", "fine"] {
                let best = &now[grid][rule]["best"];
                for (column, name) in [("elements", "chunk_elements"), ("bytes", "rank_bytes")] {
                    let kept = field(&format!("{rule}_{grid}_{column}"));
                    assert_eq!(spelled(&best[name]), kept, "{model} {rule} {grid} {column}");
                }
            }
        }
    }
}
