//! The scripts of experiments/cluster, without a cluster: what they run, and what they do about a
//! task that was killed. `experiments/cluster/slurm_test.sh` runs them in a real Slurm.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::program::{Folder, assert_code, stderr, stdout};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments").join(name)
}

/// A program in `folder/bin` that writes its name and arguments, one a line, and ends as told.
fn stub(folder: &Folder, name: &str, said: &str, code: i32) -> String {
    fs::create_dir_all(folder.path("bin")).expect("a folder");
    let log = folder.path("calls");
    let text = format!("#!/bin/sh\nprintf '%s\\n' {name} \"$@\" >>{log}\n{said}\nexit {code}\n");
    let path = folder.file(&format!("bin/{name}"), &text);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    path
}

/// Runs a script with the stubs in front of everything else.
fn run(folder: &Folder, name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let path = format!("{}:{}", folder.path("bin"), std::env::var("PATH").unwrap_or_default());
    Command::new("bash")
        .arg(script(name))
        .args(arguments)
        .env("PATH", path)
        .env_remove("SLURM_RESTART_COUNT")
        .envs(variables.iter().copied())
        .output()
        .expect("bash runs")
}

fn calls(folder: &Folder) -> Vec<String> {
    let text = fs::read_to_string(folder.path("calls")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn every_script_is_bash() {
    let folders = [script(""), script("cluster")];
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).expect("there"));
    let mut checked = 0;
    for path in files.map(|file| file.expect("an entry").path()) {
        let ending = path.extension().and_then(|ending| ending.to_str());
        if matches!(ending, Some("sh" | "sbatch")) {
            let output = Command::new("bash").arg("-n").arg(&path).output().expect("bash runs");
            assert!(output.status.success(), "{}: {}", path.display(), stderr(&output));
            checked += 1;
        }
    }
    assert!(checked >= 10, "{checked}");
}

#[test]
fn a_task_runs_its_shard() {
    let folder = Folder::new();
    let program = stub(&folder, "fraglab", "", 0);
    let arguments = ["8", "/out", "a b.toml", "--alloc", "caching,expandable"];
    let variables =
        [("FRAGLAB", &*program), ("SLURM_ARRAY_TASK_ID", "3"), ("SLURM_CPUS_PER_TASK", "2")];
    assert_code(&run(&folder, "cluster/slurm.sbatch", &arguments, &variables), 0);
    let expected = [
        "fraglab",
        "experiment",
        "a b.toml",
        "--alloc",
        "caching,expandable",
        "--shard",
        "3/8",
        "-o",
        "/out/shards-of-8",
        "--cache",
        "/out/cache-of-8/3",
        "--threads",
        "2",
    ];
    assert_eq!(calls(&folder), expected);
}

#[test]
fn a_task_that_was_killed_is_requeued_a_few_times() {
    // Killed with SIGKILL, with restarts left and without; asked to end; and what cannot be done.
    let tasks = [(137, "0", true), (137, "5", false), (130, "0", false), (2, "0", false)];
    for (code, restarts, is_requeued) in tasks {
        let folder = Folder::new();
        let program = stub(&folder, "fraglab", "", code);
        stub(&folder, "scontrol", "", 0);
        stub(&folder, "sleep", "", 0);
        let variables = [
            ("FRAGLAB", &*program),
            ("SLURM_ARRAY_TASK_ID", "1"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_RESTART_COUNT", restarts),
        ];
        let output = run(&folder, "cluster/slurm.sbatch", &["2", "out", "x.toml"], &variables);
        assert_code(&output, code);
        let calls = calls(&folder);
        let requeue = ["scontrol", "requeue", "77"];
        assert_eq!(calls.windows(3).any(|call| call == requeue), is_requeued, "{calls:?}");
    }
}

#[test]
fn a_job_array_and_its_merge_are_submitted() {
    let folder = Folder::new();
    stub(&folder, "sbatch", "case \"$*\" in *dependency*) echo 12 ;; *) echo 11 ;; esac", 0);
    let out = folder.path("out");
    let output = run(&folder, "cluster/submit.sh", &["4", &out, "x.toml", "--fresh"], &[]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "array 11, merge 12\n");
    let calls = calls(&folder).join(" ");
    let expected = [
        format!("sbatch --parsable --array=1-4 {}", script("cluster/slurm.sbatch").display()),
        format!("4 {out} x.toml --fresh sbatch --parsable --dependency=afterok:11"),
        format!("{} 4 {out} x.toml --fresh", script("cluster/slurm_merge.sbatch").display()),
    ];
    for part in expected {
        assert!(calls.contains(&part), "{part}: {calls}");
    }
    for wrong in [&["4", "out"][..], &["0", "out", "x.toml"], &["x.toml", "out", "4"]] {
        let output = run(&folder, "cluster/submit.sh", wrong, &[]);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("submit.sh N OUT X.toml"), "{}", stderr(&output));
    }
}

#[test]
fn the_merge_reads_what_the_tasks_wrote() {
    let folder = Folder::new();
    let program = stub(&folder, "fraglab", "", 0);
    let variables = [("FRAGLAB", &*program)];
    let output = run(&folder, "cluster/slurm_merge.sbatch", &["8", "/out", "x.toml"], &variables);
    assert_code(&output, 0);
    let expected = ["fraglab", "experiment", "x.toml", "--merge", "/out/shards-of-8", "-o", "/out"];
    assert_eq!(calls(&folder), expected);
}

/// The same number of shards stands wherever Kubernetes is told it.
#[test]
fn the_manifest_names_one_number_of_shards() {
    let text = fs::read_to_string(script("cluster/kubernetes.yaml")).expect("ships");
    let code = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    for line in code {
        for mark in ["completions: ", " + 1))/", "-of-"] {
            for (at, _) in line.match_indices(mark) {
                let rest = &line[at + mark.len()..];
                let digits = rest.chars().take_while(char::is_ascii_digit).collect();
                *numbers.entry(digits).or_default() += 1;
            }
        }
    }
    assert_eq!(numbers, BTreeMap::from([("64".to_owned(), 5)]));
    let parse = "import sys, yaml; print([d['kind'] for d in yaml.safe_load_all(sys.stdin)])";
    let python = Command::new("python3")
        .args(["-c", parse])
        .stdin(fs::File::open(script("cluster/kubernetes.yaml")).expect("ships"))
        .output();
    match python {
        Ok(output) if output.status.success() => {
            assert_eq!(stdout(&output).trim(), "['PersistentVolumeClaim', 'Job', 'Job']");
        }
        Ok(output) if !stderr(&output).contains("No module named") => panic!("{}", stderr(&output)),
        _ => eprintln!("skipped: no python3 with yaml"),
    }
}
