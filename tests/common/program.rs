//! The program as people and scripts call it.

use std::fs;
use std::io::Read;
use std::process::{Output, Stdio};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn fraglab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(args)
        .env_remove("NO_COLOR")
        .output()
        .expect("runs")
}

pub(crate) fn fraglab_reading(stdin: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(args)
        .write_stdin(stdin)
        .output()
        .expect("runs")
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().expect("no signal")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output))
        .unwrap_or_else(|error| panic!("{error}: {}{}", stdout(output), stderr(output)))
}

#[track_caller]
pub(crate) fn assert_code(output: &Output, expected: i32) {
    assert_eq!(code(output), expected, "{}{}", stdout(output), stderr(output));
}

/// Exit code 2 and exactly one line, which begins as every error does.
#[track_caller]
pub(crate) fn assert_one_error(output: &Output) -> String {
    assert_code(output, 2);
    let text = stderr(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("fraglab: "), "{text}");
    assert!(output.stdout.is_empty(), "{}", stdout(output));
    text
}

/// A folder with files of its own.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).expect("written");
        path
    }
}

/// Starts the program with a standard output that nobody reads.
pub(crate) fn unread(args: &[&str]) -> Output {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_fraglab"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    drop(child.stdout.take());
    let mut errors = Vec::new();
    child.stderr.take().expect("piped").read_to_end(&mut errors).expect("read");
    let status = child.wait().expect("ends");
    Output { status, stdout: Vec::new(), stderr: errors }
}
