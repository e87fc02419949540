//! Disks that are full or read-only, files that may not grow, and pipes that nobody reads: one clear
//! error, and what was there before is as it was.

#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::fake_driver::settings_around;
use crate::common::program::{
    Folder, assert_code, assert_one_error, code, fraglab, stderr, stdout, unread,
};

const TRACE: &str = "capacity 1GiB\nalloc a 100MiB\nalloc b 300MiB\nfree a b\n";

const EXPERIMENT: &str = r#"
name = "full"
traces = ["one.txt"]
allocators = ["caching", "native"]
[[figure]]
name = "bars"
kind = "grouped bars"
x = "trace"
y = "reserved_bytes_peak"
group = "label"
"#;

/// Every way to have a file written: `IN` stands for the folder with what is read, `OUT` for the one
/// with the files. The files are there already; a command that ends in `/` gets a folder.
const WRITERS: [(&str, &[&str]); 25] = [
    ("run IN/one.txt --json OUT/a.json", &["a.json"]),
    ("run IN/one.txt --json OUT/a.json.gz", &["a.json.gz"]),
    ("run IN/one.txt --decisions OUT/a.csv", &["a.csv"]),
    ("run IN/one.txt --timeline OUT/a.csv", &["a.csv"]),
    ("run IN/one.txt --report OUT/report", &["report/index.html", "report/timeline.svg"]),
    ("compare IN/one.txt --alloc caching,native -o OUT/a.csv", &["a.csv"]),
    ("compare IN/one.txt --alloc caching,native -o OUT/a.md", &["a.md"]),
    ("compare IN/one.txt --alloc caching --json OUT/a.json", &["a.json"]),
    ("experiment IN/full.toml --fresh --quiet -o OUT", &["full.csv", "full-bars.svg", "full.md"]),
    ("gen --example llama -o OUT/job.toml", &["job.toml"]),
    ("gen IN/job.toml --set train.steps=1 -o OUT/job.json", &["job.json"]),
    ("convert IN/one.txt OUT/one.json", &["one.json"]),
    ("convert IN/one.txt OUT/one.json.zst", &["one.json.zst"]),
    ("convert IN/one.txt OUT/one.log --to stalloc", &["one.log"]),
    ("anonymize IN/one.txt OUT/one.json", &["one.json"]),
    ("plan IN/one.txt -o OUT/plan.json", &["plan.json"]),
    ("plan IN/one.txt -o OUT/plan.csv --figure OUT/plan.svg", &["plan.csv", "plan.svg"]),
    ("plan IN/one.txt --json OUT/a.json", &["a.json"]),
    ("plan-chunks --model GPT3_8B --json OUT/a.json", &["a.json"]),
    ("check --baseline IN/b.json --junit OUT/a.xml", &["a.xml"]),
    ("check --baseline IN/b.json --summary OUT/a.md --json OUT/a.json", &["a.md", "a.json"]),
    ("advise IN/one.txt --json OUT/a.json", &["a.json"]),
    ("diff IN/one.txt IN/two.txt --json OUT/a.json", &["a.json"]),
    ("calibrate --show h200 --json OUT/a.json", &["a.json"]),
    ("python -o OUT/fraglab_torch.py", &["fraglab_torch.py"]),
];

/// What keeps a file from being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// A disk without a free block.
    Full,
    /// A disk that can only be read.
    ReadOnly,
    /// `ulimit -f 0`.
    FileSize,
}

impl Trouble {
    /// What the error says.
    fn says(self) -> &'static str {
        match self {
            Trouble::Full => "the disk is full: free some space",
            Trouble::ReadOnly => "the disk can only be read: name a file on another disk",
            Trouble::FileSize => "the file would be larger than is allowed here",
        }
    }
}

/// Runs the program with $DIR in trouble, and lists what then is in $DIR. Mounts are of a name space
/// that ends with the script. $1 is the trouble, the rest the program's.
const SCRIPT: &str = r#"
if [ "$1" != FileSize ]; then
    mount -t tmpfs -o size=256k none "$DIR" || exit 99
    cp -R "$OLD/." "$DIR"
fi
case "$1" in
    Full) cat /dev/zero > "$DIR/filler" 2> /dev/null ;;
    ReadOnly) mount -o remount,ro "$DIR" ;;
esac
trouble=$1
shift
if [ "$trouble" = FileSize ]; then (ulimit -f 0; "$@"); else "$@"; fi
code=$?
cd "$DIR" && find . -type f ! -name filler -exec cksum {} + | sort > "$LISTING"
exit $code
"#;

/// A folder with what is read, and files of earlier runs in `out`.
fn prepared(files: &[&str]) -> Folder {
    let folder = Folder::new();
    let input = folder.path("in");
    let out = folder.path("out");
    fs::create_dir_all(&input).expect("made");
    folder.file("in/one.txt", TRACE);
    folder.file("in/two.txt", "capacity 1GiB\nalloc a 64MiB\nfree a\n");
    folder.file("in/full.toml", EXPERIMENT);
    let job = fraglab(&["gen", "--example", "llama"]);
    folder.file("in/job.toml", &stdout(&job));
    let args = ["check", "--baseline", &folder.path("in/b.json"), "--init"];
    let init = fraglab(&[&args[..], &["--trace", &folder.path("in/one.txt")]].concat());
    assert_code(&init, 0);
    for name in files {
        let path = Path::new(&out).join(name);
        fs::create_dir_all(path.parent().expect("in a folder")).expect("made");
        fs::write(path, format!("{name} of an earlier run\n")).expect("written");
    }
    folder
}

/// The command of a row, as words.
fn words(row: &str, folder: &Folder) -> Vec<String> {
    let input = folder.path("in");
    let place = |word: &str| word.replace("IN", &input).replace("OUT", &folder.path("out"));
    row.split(' ').map(place).collect()
}

/// Whether this user may mount: as root, or in a name space of his own. On CI one of them must work.
fn can_mount() -> Option<&'static str> {
    let works = |flags: &&&str| {
        let try_mount = "mount -t tmpfs none /mnt";
        let tried = Command::new("unshare").args([**flags, "sh", "-c", try_mount]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let flags = ["-m", "-Urm"].iter().find(works).copied();
    if flags.is_none() {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "no file system can be mounted");
        eprintln!("skipped: no file system can be mounted here");
    }
    flags
}

/// What `cksum` says of the files of a folder.
fn listing(folder: &Path) -> String {
    let script = "cd \"$0\" && find . -type f -exec cksum {} + | sort";
    let output = Command::new("sh").args(["-c", script]).arg(folder).output().expect("runs");
    stdout(&output)
}

fn in_trouble(trouble: Trouble, mount: Option<&str>, row: &str, files: &[&str]) {
    let folder = prepared(files);
    let out = folder.path("out");
    let old = folder.path("old");
    let before = listing(Path::new(&out));
    assert_eq!(before.lines().count(), files.len());
    fs::rename(&out, &old).expect("renamed");
    fs::create_dir(&out).expect("made");
    let mut command = match mount {
        Some(flags) => {
            let mut command = Command::new("unshare");
            command.args([flags, "sh"]);
            command
        }
        None => {
            fs::remove_dir(&out).expect("removed");
            fs::rename(&old, &out).expect("renamed");
            Command::new("sh")
        }
    };
    for name in settings_around() {
        command.env_remove(name);
    }
    let output = command
        .args(["-c", SCRIPT, "sh", &format!("{trouble:?}"), env!("CARGO_BIN_EXE_fraglab")])
        .args(words(row, &folder))
        .envs([("DIR", &out), ("OLD", &old), ("LISTING", &folder.path("listing"))])
        .output()
        .expect("runs");
    let told = stderr(&output);
    assert_eq!(code(&output), 2, "{trouble:?}: {row}: {told}");
    let error = told.lines().filter(|line| line.starts_with("fraglab: ")).collect::<Vec<_>>();
    assert_eq!(error.len(), 1, "{trouble:?}: {row}: {told}");
    assert!(error[0].contains(trouble.says()), "{trouble:?}: {row}: {told}");
    assert!(error[0].starts_with(&format!("fraglab: {out}")), "{trouble:?}: {row}: {told}");
    let after = fs::read_to_string(folder.path("listing")).expect("listed");
    assert_eq!(after, before, "{trouble:?}: {row}: {told}");
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_not_the_end() {
    for (row, files) in WRITERS {
        in_trouble(Trouble::FileSize, None, row, files);
    }
}

#[test]
fn a_full_disk_leaves_old_files_as_they_are() {
    let Some(flags) = can_mount() else { return };
    for (row, files) in WRITERS {
        in_trouble(Trouble::Full, Some(flags), row, files);
    }
}

#[test]
fn a_disk_that_can_only_be_read_is_named() {
    let Some(flags) = can_mount() else { return };
    for (row, files) in WRITERS {
        in_trouble(Trouble::ReadOnly, Some(flags), row, files);
    }
}

/// A baseline is read and written: it stays the old one.
#[test]
fn a_baseline_that_cannot_be_written_stays() {
    let folder = prepared(&[]);
    let baseline = folder.path("in/b.json");
    let before = fs::read(&baseline).expect("there");
    let update = ["check", "--baseline", &baseline, "--update", "--tolerance-bytes", "2MiB"];
    let script = r#"ulimit -f 0; exec "$0" "$@""#;
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_fraglab")])
        .args(update)
        .output()
        .expect("runs");
    let error = assert_one_error(&output);
    assert!(error.contains(Trouble::FileSize.says()), "{error}");
    assert_eq!(fs::read(&baseline).expect("there"), before);
    assert_code(&fraglab(&update), 0);
    assert_ne!(fs::read(&baseline).expect("there"), before, "else nothing is shown");
}

/// Every command that prints: `IN` stands for the folder with what is read.
const PRINTERS: [&str; 25] = [
    "run IN/one.txt",
    "run IN/one.txt --json -",
    "compare IN/one.txt --alloc caching",
    "compare IN/one.txt --alloc caching --format csv",
    "compare IN/one.txt --alloc caching --json -",
    "explain IN/one.txt",
    "explain IN/one.txt --json -",
    "advise IN/one.txt",
    "advise IN/one.txt --json -",
    "check --baseline IN/b.json",
    "check --baseline IN/b.json --json -",
    "diff IN/one.txt IN/two.txt",
    "diff IN/one.txt IN/two.txt --json -",
    "experiment IN/full.toml --fresh --list",
    "experiment IN/full.toml --fresh --only allocator=caching",
    "plan IN/one.txt",
    "plan IN/one.txt --json -",
    "plan-chunks --model GPT3_8B",
    "python",
    "info IN/one.txt",
    "gen --example llama",
    "convert IN/one.txt - --to json",
    "calibrate --show h200",
    "lint-conf max_split_size_mb:128",
    "list",
];

fn printing(row: &str, folder: &Folder, stdout: Stdio) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(words(row, folder))
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::piped())
        .output()
        .expect("runs")
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_named() {
    let folder = prepared(&[]);
    for row in PRINTERS {
        let full = fs::File::options().write(true).open("/dev/full").expect("there");
        let output = printing(row, &folder, full.into());
        assert_eq!(code(&output), 2, "{row}: {}", stderr(&output));
        let error = assert_one_error(&output);
        let names = error.contains("standard output") || error.starts_with("fraglab: -: ");
        assert!(names && error.contains("the disk is full"), "{row}: {error}");
    }
}

#[test]
fn nobody_who_stops_reading_sees_an_error() {
    let folder = prepared(&[]);
    for row in PRINTERS {
        let words = words(row, &folder);
        let output = unread(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let told = stderr(&output);
        assert_eq!(code(&output), 0, "{row}: {told}");
        assert!(!told.contains("panicked") && !told.contains("pipe"), "{row}: {told}");
    }
}

/// Without standard streams: the answer is the same, whoever may not see it.
#[test]
fn closed_streams_change_no_answer() {
    let folder = prepared(&[]);
    let run = words("run IN/one.txt --json OUT/a.json", &folder);
    fs::create_dir(folder.path("out")).expect("made");
    let closed = |script: &str, args: &[String]| {
        let mut command = Command::new("sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_fraglab")]).args(args);
        command.output().expect("runs")
    };
    for script in [
        r#"exec "$0" "$@" >&-"#,
        r#"exec "$0" "$@" 2>&-"#,
        r#"exec "$0" "$@" <&- >&- 2>&-"#,
        r#"exec "$0" "$@" 2>/dev/full"#,
    ] {
        assert_eq!(code(&closed(script, &run)), 0, "{script}");
        let text = fs::read_to_string(folder.path("out/a.json")).expect("written");
        let result: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(result["peaks"]["requested_bytes_peak"], 400 << 20, "{script}");
        fs::remove_file(folder.path("out/a.json")).expect("removed");
        let missing = words("run IN/no.txt", &folder);
        assert_eq!(code(&closed(script, &missing)), 2, "{script}");
    }
    // Nothing can be read from a standard input that is closed.
    let output = closed(r#"exec "$0" "$@" <&-"#, &["info".to_owned(), "-".to_owned()]);
    let error = assert_one_error(&output);
    assert!(error.contains("-: the file is empty"), "{error}");
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let folder = prepared(&[]);
    let output = fraglab(&["run", &folder.path("in/one.txt"), "--json", &folder.path("no/a.json")]);
    let error = assert_one_error(&output);
    assert!(error.contains(&format!("the folder {} is not there", folder.path("no"))), "{error}");
}
