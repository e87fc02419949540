//! Small files that would become large: each ends with one line that names the flag, and the
//! process never grows far beyond its limit.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const MIB: usize = 1 << 20;
/// Memory that the bombs below may take: enough for the program itself.
const MEMORY_MAX: &str = "96MiB";
/// Bytes that every bomb unpacks to: many times as much.
const BOMB_BYTES: usize = 256 * MIB;

/// Name of a file, its beginning, what is repeated in it, and its end.
type Bomb<'a> = (&'a str, &'a [u8], &'a [u8], &'a [u8]);

fn fraglab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fraglab")).args(args).output().expect("runs")
}

/// `head`, `unit` again and again, `tail`, as zstd.
fn bomb(path: &Path, head: &[u8], unit: &[u8], tail: &[u8]) {
    use std::io::Write as _;

    let file = fs::File::create(path).expect("a file");
    let mut encoder = zstd::Encoder::new(file, 1).expect("an encoder");
    encoder.write_all(head).expect("writes");
    let chunk = unit.repeat(MIB / unit.len());
    for _ in 0..BOMB_BYTES / chunk.len() {
        encoder.write_all(&chunk).expect("writes");
    }
    encoder.write_all(tail).expect("writes");
    encoder.finish().expect("ends");
}

/// The one line that a command which could not be done says.
fn line_of(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    text.lines().next().unwrap_or_default().to_owned()
}

#[test]
#[cfg(target_os = "linux")]
fn what_unpacks_to_much_ends_at_the_limit() {
    let folder = tempfile::tempdir().expect("a folder");
    let bombs: [Bomb<'_>; 4] = [
        ("comment.txt.zst", b"alloc a 512\n# ", b"#", b"\n"),
        ("native.json.zst", b"{\"fraglab_trace\":3,\"events\":{\"ops\":\"", b"e", b"\"}}"),
        ("items.pickle.zst", b"\x80\x02](", b"N", b"e."),
        ("buffers.csv.zst", b"id,lower,upper,size\n", b"1,0,9,5\n", b""),
    ];
    for (name, head, unit, tail) in bombs {
        let path = folder.path().join(name);
        bomb(&path, head, unit, tail);
        assert!(fs::metadata(&path).expect("is there").len() < MIB as u64, "{name} is small");
        let shown = path.to_str().expect("a name");
        let line = line_of(&fraglab(&["info", shown, "--max-memory", MEMORY_MAX]));
        let expected = "needs more than 96 MiB of memory: --max-memory 1GiB lets it take more";
        assert_eq!(line, format!("fraglab: {shown}: {expected}"));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn work_that_grows_without_a_file_ends_too() {
    let output = fraglab(&["plan", "--synthetic", "dense:30000000", "--max-memory", MEMORY_MAX]);
    let line = line_of(&output);
    assert!(line.starts_with("fraglab: needs more than 96 MiB of memory: --max-memory "), "{line}");
    assert!(output.stdout.is_empty());
}

#[test]
fn every_kind_of_file_keeps_within_the_events() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = folder.path().join("steps.txt");
    // Two events a turn: 200 in all.
    fs::write(&text, "repeat 100\nalloc a 512\nfree a\nend\n").expect("writes");
    let native = folder.path().join("steps.json.zst");
    let [text, native] = [&text, &native].map(|path| path.to_str().expect("a name"));
    assert!(fraglab(&["convert", text, native]).status.success());
    let log = folder.path().join("rmm.csv");
    let row = "1,1.0,allocate,0x7,5,0x0\n1,1.0,free,0x7,5,0x0\n";
    fs::write(&log, format!("Thread,Time,Action,Pointer,Size,Stream\n{}", row.repeat(100)))
        .expect("writes");
    let log = log.to_str().expect("a name");
    for path in [text, native, log] {
        assert!(fraglab(&["info", path, "--max-events", "200"]).status.success(), "{path}");
        let line = line_of(&fraglab(&["--max-events", "199", "info", path]));
        let expected = "more than 199 events: --max-events 398 takes more";
        assert!(line.starts_with(&format!("fraglab: {path}:")), "{line}");
        assert!(line.ends_with(expected), "{line}");
    }
}

#[test]
fn a_job_tells_how_many_events_it_would_have() {
    let folder = tempfile::tempdir().expect("a folder");
    let example = fraglab(&["gen", "--example", "llama"]);
    assert!(example.status.success());
    let job = folder.path().join("job.toml");
    fs::write(&job, &example.stdout).expect("writes");
    let out = folder.path().join("job.json");
    let [job, out] = [&job, &out].map(|path| path.to_str().expect("a name"));
    let args = ["gen", job, "--set", "train.steps=1000000", "--max-events", "1000", "-o", out];
    let line = line_of(&fraglab(&args));
    assert!(line.contains("more than 1,000 events: "), "{line}");
    // Nothing of experts, which a Llama has none of; the number as it is, not in whole millions.
    assert!(line.ends_with("or lower train.steps = 1000000 or model.layers = 24"), "{line}");
    let small = ["gen", job, "--set", "train.steps=3", "--max-events", "1000", "-o", out];
    let line = line_of(&fraglab(&small));
    let about = line.split("about ").nth(1).and_then(|rest| rest.split(" events").next());
    let about = about.expect("a number").replace(',', "").parse::<u64>().expect("a number");
    assert!((1_000..1_000_000).contains(&about), "{line}");
    assert!(!Path::new(out).exists());
}

#[test]
#[cfg(target_os = "linux")]
fn files_without_an_end_are_not_read_for_ever() {
    let folder = tempfile::tempdir().expect("a folder");
    let [trace, profile] = ["one.txt", "zero.json"].map(|name| folder.path().join(name));
    fs::write(&trace, "alloc a 1MiB\n").expect("writes");
    std::os::unix::fs::symlink("/dev/zero", &profile).expect("a link");
    let [trace, profile] = [&trace, &profile].map(|path| path.to_str().expect("a name"));
    let replay = ["run", "--trace", trace, "--alloc"];
    let commands = [
        (vec!["check", "--baseline", "/dev/zero"], "has more than 256 MiB: expected the JSON"),
        (
            [&replay[..], &["caching", "--profile", profile]].concat(),
            "has more than 16 MiB: expected a profile",
        ),
        (
            [&replay[..], &["planned+mode=stalloc+plan=/dev/zero"]].concat(),
            "has more than 1 GiB: expected a plan of STAlloc",
        ),
    ];
    for (args, expected) in commands {
        let line = line_of(&fraglab(&args));
        assert!(line.contains(expected), "{args:?}: {line}");
    }
}

#[test]
fn a_trace_on_a_terminal_holds_nothing_that_it_obeys() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (first, again) = (path("first.txt"), path("again.json"));
    fs::write(&first, "name \"n\\u009b\\u007f\"\nalloc \"a\\u009b31m\\u202eb\" 1MiB\n")
        .expect("writes");
    let converted = |file: &str, to: &str| {
        let output = fraglab(&["convert", file, "-", "--to", to]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(output.status.success(), "{text}");
        let obeyed = ['\u{9b}', '\u{7f}', '\u{202e}'];
        assert!(!text.contains(obeyed) && text.contains("a\\u009b31m\\u202eb"), "{text}");
        text
    };
    let (json, text) = (converted(&first, "json"), converted(&first, "text"));
    fs::write(&again, json).expect("writes");
    assert_eq!(converted(&again, "text"), text);
}
