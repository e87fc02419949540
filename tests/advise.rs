//! `advise` and `explain` on recordings: what they foretell of other settings is what the same jobs
//! did with those settings.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;

use crate::common::shared_dir;

fn fraglab(args: &[&str], files: &[&Path]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    let output = command.args(args).args(files).assert().success().get_output().clone();
    String::from_utf8(output.stdout).expect("text")
}

fn json(args: &[&str], files: &[&Path]) -> Value {
    serde_json::from_str(&fraglab(&[args, &["--json", "-"]].concat(), files)).expect("JSON")
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(name)
}

/// What the real allocator reported for a recording.
fn reserved_by_pytorch(dir: &Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(dir.join(format!("{name}.truth.json"))).expect("a truth");
    let truth: Value = serde_json::from_str(&text).expect("JSON");
    truth["stats"]["reserved_bytes.all.peak"].as_u64().expect("a number")
}

fn tried<'a>(advice: &'a Value, settings: &str) -> &'a Value {
    let tried = advice["tried"].as_array().expect("a list");
    tried.iter().find(|tried| tried["settings"] == settings).expect(settings)
}

/// Five runs of one job with five settings: the advice on one of them foretells the others.
#[test]
fn what_is_foretold_is_what_other_recordings_did() {
    let Some(dir) = shared_dir() else { return };
    let recording = dir.join("llama-1b-varlen.pickle.gz");
    let args = ["advise", "--no-capacity", "--no-what-ifs", "--quiet"];
    let advice = json(&args, &[&recording]);
    let reserved = |tried: &Value| tried["reserved_bytes_peak"].as_u64().expect("bytes");
    assert_eq!(reserved(&advice["recorded"]), reserved_by_pytorch(&dir, "llama-1b-varlen"));
    for (settings, name) in [
        ("expandable_segments:True", "llama-1b-varlen.expandable"),
        ("roundup_power2_divisions:4", "llama-1b-varlen.roundup4"),
    ] {
        let tried = reserved(tried(&advice, settings));
        let told = reserved_by_pytorch(&dir, name);
        assert!(tried.abs_diff(told) <= told / 1000, "{settings}: {tried}, PyTorch {told}");
    }
    // This one filled the card, of which contexts and libraries have some, too.
    let split = reserved(tried(&advice, "max_split_size_mb:128"));
    let told = reserved_by_pytorch(&dir, "llama-1b-varlen.split128");
    assert!(split > told && split - told < told / 100, "{split}, PyTorch {told}");
    assert_eq!(advice["advised_settings"], "expandable_segments:True");
    // Neither refused anything, and no advice may be worse than what was recorded.
    let tried = advice["tried"].as_array().expect("a list");
    let best = tried.iter().map(reserved).min().expect("some");
    assert!(reserved(&advice["recorded"]) > best);
    let live = advice["trace"]["requested_bytes_peak"].as_u64().expect("bytes");
    assert!(tried.iter().all(|tried| reserved(tried) >= live));
}

#[test]
fn advice_is_the_same_on_any_number_of_threads() {
    let trace = shipped("opt-1-3b-act-offload.json.zst");
    let on = |threads: &str, goal: &str| {
        let args = ["advise", "--threads", threads, "--for", goal, "--no-what-ifs", "--json", "-"];
        fraglab(&args, &[&trace])
    };
    assert_eq!(on("1", "reserved"), on("3", "reserved"));
    assert_eq!(on("1", "capacity"), on("2", "capacity"));
}

/// The smallest capacity told is enough, and 2 MiB less is not.
#[test]
fn the_smallest_capacity_of_the_advised_settings_is_one() {
    let trace = shipped("opt-1-3b-act-offload.json.zst");
    let advice = json(&["advise", "--no-what-ifs", "--quiet"], &[&trace]);
    let settings = advice["advised_settings"].as_str().expect("some");
    let bytes = tried(&advice, settings)["smallest_capacity_bytes"].as_u64().expect("bytes");
    let status = |bytes: u64| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
        let command = command.args(["run", "--quiet", "--pytorch-conf", settings, "--trace"]);
        command.arg(&trace).arg("--capacity").arg(bytes.to_string()).output().expect("runs").status
    };
    assert_eq!(status(bytes).code(), Some(0));
    assert_eq!(status(bytes - (2 << 20)).code(), Some(1));
}

/// The line to paste does what it says: the run with it holds what is told.
#[test]
fn the_advised_line_can_be_pasted() {
    let trace = shipped("llama-3b-recompute.json.zst");
    let text = fraglab(&["advise", "--no-capacity", "--quiet"], &[&trace]);
    assert_eq!(text, "", "quiet means nothing on standard output");
    let text = fraglab(&["advise", "--no-capacity"], &[&trace]);
    let line = text.lines().find_map(|line| line.trim().strip_prefix("export ")).expect("a line");
    let settings = line.strip_prefix("PYTORCH_CUDA_ALLOC_CONF=").expect("the variable");
    let advice = json(&["advise", "--no-capacity"], &[&trace]);
    assert_eq!(advice["advised_settings"], settings);
    let run = json(&["run", "--pytorch-conf", settings], &[&trace]);
    let told = &tried(&advice, settings)["reserved_bytes_peak"];
    assert_eq!(&run["peaks"]["reserved_bytes_peak"], told);
}

/// 47.84 GiB are live at once: no setting runs that below 40 GiB, and none may be advised.
#[test]
fn what_is_live_cannot_be_tuned_away() {
    let Some(dir) = shared_dir() else { return };
    let recording = dir.join("llama-1b-plain.pickle.gz");
    let args = ["advise", "--limit", "40GiB", "--no-capacity", "--no-what-ifs"];
    let advice = json(&args, &[&recording]);
    assert_eq!(advice["advised_settings"], Value::Null);
    let text = fraglab(&args, &[&recording]);
    assert!(text.contains("No setting can help") && !text.contains("export"), "{text}");
    // Nor of the run that was refused at 40 GiB, where next to nothing was unused.
    let recording = dir.join("llama-1b-plain.oom40.stacks.pickle.gz");
    let explained = json(&["explain", "--quiet"], &[&recording]);
    assert_eq!(explained["class"], "none");
    assert_eq!(explained["is_fragmentation"], "no");
    let text = fraglab(&["explain"], &[&recording]);
    assert!(text.contains("Not fragmentation") && text.contains("ForCausalLMLoss"), "{text}");
    let text = fraglab(&["advise", "--no-what-ifs"], &[&recording]);
    assert!(text.contains("ends there"), "{text}");
}

/// Refused at 55 GiB; the same job ran below 49 GiB with expandable segments.
#[test]
fn a_refusal_by_fragmentation_names_the_setting_that_ran() {
    let Some(dir) = shared_dir() else { return };
    let explained = json(&["explain"], &[&dir.join("llama-1b-varlen.cap55.pickle.gz")]);
    assert_eq!(explained["class"], "hard");
    let moment = &explained["refusal"]["moment"];
    let bytes = |name: &str| moment[name].as_u64().expect(name);
    // Live memory and the request would have fitted, by far.
    assert!(bytes("requested_bytes") + bytes("request_bytes") < 48 << 30);
    assert_eq!(explained["refusal"]["limit_bytes"], 55_u64 << 30);
    let fixes = explained["fixes"].as_array().expect("a list");
    let fix = fixes.iter().find(|fix| fix["what"] == "expandable_segments:True").expect("a fix");
    assert_eq!(fix["status"], "ok");
    assert!(fix["reserved_bytes_peak"].as_u64().expect("bytes") <= 49 << 30);
}

/// The settings of the recording made it worse: 139 GiB for what took 73 without.
#[test]
fn settings_that_do_harm_are_told() {
    let Some(dir) = shared_dir() else { return };
    let recording = dir.join("llama-1b-varlen.split128.pickle.gz");
    let explained = json(&["explain"], &[&recording]);
    assert_eq!(explained["class"], "settings");
    assert_eq!(explained["settings"], "max_split_size_mb:128");
}

/// Whatever the recording, the short answer is one screen, and what is told adds up.
#[test]
fn explanations_are_short_and_add_up() {
    let Some(dir) = shared_dir() else { return };
    for name in [
        "tiny",
        "tiny.expandable",
        "tiny.stacks",
        "mempool",
        "graph-train",
        "streams-offload",
        "gpt2-small.roundup4",
        "random.default",
        "random.expandable.gc30",
        "random.split40",
        "llama-3b-recompute.overflow",
    ] {
        let path = dir.join(format!("{name}.pickle.gz"));
        let text = fraglab(&["explain"], &[&path]);
        assert!(text.lines().count() <= 25, "{name}: {text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{name}: {text}");
        let full = fraglab(&["explain", "--full"], &[&path]);
        assert!(full.lines().count() >= text.lines().count(), "{name}");
        let explained = json(&["explain"], &[&path]);
        for moment in [&explained["peak"], &explained["refusal"]["moment"]] {
            let Some(split) = moment["split"].as_object() else { continue };
            let parts = split.iter().filter(|(name, _)| name.ends_with("_bytes"));
            let sum: u64 = parts.map(|(_, bytes)| bytes.as_u64().expect("bytes")).sum();
            let of = |name: &str| moment[name].as_u64().expect("bytes");
            assert_eq!(sum, of("reserved_bytes") - of("requested_bytes"), "{name}");
        }
    }
}

#[test]
fn nothing_and_next_to_nothing_are_explained() {
    let of = |text: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
        let output = command.args(["explain", "-"]).write_stdin(text).output().expect("runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    let (code, text) = of("mark step0.forward\n");
    assert_eq!(code, Some(0));
    assert!(text.starts_with("trace: 1 event"), "{text}");
    assert!(text.contains("Not fragmentation"), "{text}");
    let (code, text) = of("alloc a 100MiB\nfree a\n");
    assert_eq!(code, Some(0));
    assert!(text.contains("Not fragmentation") && text.contains("0.0%"), "{text}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    let output =
        command.args(["advise", "-"]).write_stdin("alloc a 1MiB\n").output().expect("runs");
    assert_eq!(output.status.code(), Some(0));
}
