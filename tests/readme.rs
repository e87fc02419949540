//! The tables of README.md and traces/README.md say what the program says.

use std::path::Path;

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, RunResult, run};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::units::GIB;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Results of `caching` on every trace that ships.
fn results() -> Vec<RunResult> {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let spec: AllocSpec = "caching".parse().expect("a name");
    let files = std::fs::read_dir(root().join("traces")).expect("the folder ships");
    let paths = files.map(|file| file.expect("an entry").path());
    let traces = paths.filter(|path| path.to_string_lossy().ends_with(".json.zst"));
    let run_one = |path: std::path::PathBuf| {
        let imported = read_trace(&path, &ReadOptions::default()).expect("a trace that ships");
        run(&imported.trace, &spec, &options, Observe::default()).expect("runs").result
    };
    traces.map(run_one).collect()
}

fn grouped(number: u64) -> String {
    fraglab::report::text::grouped(number)
}

/// The row of a table that is about a trace: its cells.
fn row(text: &str, name: &str) -> Vec<String> {
    let begins = |line: &&str| {
        let first = line.split('|').nth(1).unwrap_or_default().trim().replace('`', "");
        line.starts_with('|') && first.split(' ').next() == Some(name)
    };
    let line = text.lines().find(begins);
    let line = line.unwrap_or_else(|| panic!("{name} has no row"));
    line.split('|').map(|cell| cell.trim().to_owned()).collect()
}

#[test]
fn the_tables_hold_what_runs_give() {
    let read = |name: &str| std::fs::read_to_string(root().join(name)).expect("ships");
    let (readme, traces) = (read("README.md"), read("traces/README.md"));
    let results = results();
    assert_eq!(results.len(), 8);
    for result in results {
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB as f64);
        let name = &result.trace.name;
        let figures = [
            grouped(result.trace.events),
            gib(result.peaks.requested_bytes_peak),
            gib(result.peaks.reserved_bytes_peak),
        ];
        for (file, text) in [("README.md", &readme), ("traces/README.md", &traces)] {
            let cells = row(text, name);
            for figure in &figures {
                assert!(cells.contains(figure), "{file}: {name} gives {figure}: {cells:?}");
            }
        }
        let fragmentation = format!("{:.1} %", 100.0 * result.fragmentation);
        assert!(row(&readme, name).contains(&fragmentation), "{name} gives {fragmentation}");
    }
}

fn printed(args: &[&str]) -> String {
    let output = assert_cmd::Command::cargo_bin("fraglab")
        .expect("the program is built")
        .current_dir(root())
        .args(args)
        .output()
        .expect("it runs");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_comparison_shows_what_is_printed() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let trace = "traces/llama-1b-varlen.json.zst";
    let printed = printed(&["compare", "--trace", trace, "--alloc", "caching,expandable,native"]);
    assert!(readme.contains(&printed), "README.md lacks:\n{printed}");
}

/// All but the time, which is that of one machine.
#[test]
fn the_plan_shows_what_is_printed() {
    let text = printed(&["plan", "traces/llama-3b-recompute.json.zst"]);
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("time "));
    for line in lines {
        assert!(readme.contains(line), "{line}");
    }
}

/// The first screen of README.md shows what its first command prints, but for what a clock
/// measured.
#[test]
fn the_first_screen_shows_what_is_printed() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let printed = printed(&[
        "run",
        "--trace",
        "traces/llama-3b-recompute.json.zst",
        "--alloc",
        "caching,native",
    ]);
    for line in printed.lines().filter(|line| !line.is_empty()) {
        // The event rate stands last in a row, in whichever unit, and differs from run to run.
        let is_row = line.contains(" ok ");
        let steady = if is_row { line.rsplit_once(' ').expect("columns").0 } else { line };
        assert!(readme.contains(steady.trim_end()), "README.md lacks: {steady}");
    }
}

/// The keys of job descriptions are documented as the reader has them.
#[test]
fn every_key_of_a_job_has_its_row() {
    let text = std::fs::read_to_string(root().join("traces/README.md")).expect("ships");
    for key in fraglab::workload::JOB_KEYS {
        let cells = row(&text, key.path);
        assert_eq!(&cells[2..4], [key.default, key.summary], "{}", key.path);
    }
}

/// Every option has a row with its default; that each is a flag stands in `gen_cli`.
#[test]
fn every_option_has_its_row_and_each_row_an_option() {
    use fraglab::workload::options::{OPTIONS, OptionUse};

    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let start = readme.find("### PatrickStar's options").expect("the chapter");
    let chapter = &readme[start..];
    let chapter = &chapter[..chapter.find("\n## ").expect("another chapter")];
    for option in OPTIONS {
        let cells = row(chapter, option.name);
        let (default, place) = (&cells[5], &cells[6]);
        assert!(default.starts_with(option.default), "{}: {default}", option.name);
        let expected = match option.used {
            OptionUse::Strategy(key) => format!("flag, `strategy.{key}"),
            OptionUse::Chunk => format!("flag, `chunk+{}`", option.name),
        };
        assert!(place.starts_with(&expected), "{}: {place}", option.name);
    }
    let rows = chapter.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, OPTIONS.len());
}

/// The description that README.md shows is the one that ships.
#[test]
fn the_description_shown_is_the_one_that_ships() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let file = "traces/models/llama-7b-lora-zero3-8.toml";
    let shipped = std::fs::read_to_string(root().join(file)).expect("ships");
    let shown = readme.split(&format!("$ cat {file}\n")).nth(1).expect("shown");
    let shown = shown.split("\n$ ").next().expect("up to the next command");
    assert!(shown.lines().count() > 10);
    for line in shown.lines() {
        assert!(shipped.lines().any(|found| found == line), "{line}");
    }
}

/// What is shown of `explain` and `advise` is what they print for the trace that ships.
#[test]
fn the_answers_show_what_is_printed() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let trace = "traces/llama-1b-varlen.json.zst";
    for command in ["explain", "advise"] {
        let printed = printed(&[command, trace]);
        assert!(readme.contains(&printed), "README.md lacks:\n{printed}");
    }
}

/// The same for the recording that was refused, where the recordings are at hand.
#[test]
fn the_answers_to_a_refusal_show_what_is_printed() {
    let Some(dir) = crate::common::shared_dir() else { return };
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let recording = dir.join("llama-1b-plain.oom40.stacks.pickle.gz");
    let recording = recording.to_str().expect("a path");
    let explained = printed(&["explain", recording, "--limit", "40GiB"]);
    assert!(readme.contains(&explained), "README.md lacks:\n{explained}");
    let advised = printed(&["advise", recording, "--limit", "40GiB"]);
    let begin = advised.find("  export ").expect("advice");
    assert!(readme.contains(&advised[begin..]), "README.md lacks:\n{advised}");
}

/// The table of ratios that README.md shows is that of the profile that ships.
#[test]
fn the_ratios_show_what_is_printed() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let printed = printed(&["calibrate", "--show", "h200-calibrated"]);
    let begin = printed.find("2 GiB built of pieces").expect("the ratios");
    assert_eq!(printed[begin..].lines().count(), 11, "as many lines as `tail` is asked for");
    assert!(readme.contains(&printed[begin..]), "README.md lacks:\n{}", &printed[begin..]);
}

/// What is shown of a fleet is what its commands print, where it is not cut.
#[test]
fn the_fleet_shows_what_is_printed() {
    let folder = tempfile::tempdir().expect("a folder");
    let ranks = folder.path().join("ranks");
    let place = ranks.join("rank{rank}.json.zst");
    let text = |path: &Path| path.to_str().expect("a path").to_owned();
    let job = "traces/models/llama-1b-varlen.toml";
    printed(&["gen", job, "--ranks", "12", "--set", "train.steps=8", "-o", &text(&place)]);
    let out = text(&folder.path().join("out"));
    let allocators = "caching,expandable,caching+roundup_power2_divisions=4";
    let fleet =
        printed(&["experiment", &text(&ranks), "--alloc", allocators, "-o", &out, "--fresh"]);
    let table = printed(&["info", "--all", &text(&ranks)]);
    let readme = std::fs::read_to_string(root().join("README.md")).expect("ships");
    let chapter = readme.split("\n## A fleet of ranks\n").nth(1).expect("the chapter");
    let shown = chapter.split("\n**However many.**").next().expect("its beginning");
    let blocks: Vec<&str> = shown.split("```").skip(1).step_by(2).collect();
    let lines = blocks.iter().flat_map(|block| block.lines().skip(1));
    let mut count = 0;
    for line in lines.filter(|line| !line.starts_with("$ ") && *line != "[...]") {
        let is_printed = fleet.lines().chain(table.lines()).any(|printed| printed == line);
        assert!(is_printed, "README.md has a line that is not printed: {line}");
        count += 1;
    }
    assert!(count > 30, "{count}");
}
