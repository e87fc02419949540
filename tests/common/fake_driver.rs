//! A driver for a GPU that is not there, for programs that tests start.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const LIBRARY: &str = "libcuda.so.1";

/// The folder with the library of the fake driver, to be put into `LD_LIBRARY_PATH` of a program
/// before it starts. What can be set is said at the top of `tests/fake_driver/fake_cuda.c`.
///
/// Where there is no C compiler the caller returns, and on CI that is a failure; the caller also
/// returns on systems other than Linux.
pub(crate) fn library_dir() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

/// Names of settings of the fake driver and of fraglab that the tests were started with: programs
/// that tests start must not see them.
pub(crate) fn settings_around() -> impl Iterator<Item = OsString> {
    let is_setting = |name: &OsString| {
        let starts = |prefix| name.as_encoded_bytes().starts_with(prefix);
        starts(b"FAKE_CUDA_".as_slice()) || starts(b"FRAGLAB_")
    };
    std::env::vars_os().map(|(name, _)| name).filter(is_setting)
}

fn build() -> Option<PathBuf> {
    if !cfg!(target_os = "linux") {
        eprintln!("skipped: the fake driver is made of Linux virtual memory");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver/fake_cuda.c");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_driver");
    std::fs::create_dir_all(&dir).expect("a folder for what tests build");
    // Other test runs may build it too: each under a name of its own, and whole when it is in place.
    let unfinished = dir.join(format!("{LIBRARY}.{}", std::process::id()));
    let built = Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"])
        .arg("-o")
        .arg(&unfinished)
        .arg(source)
        .output();
    let output = match built {
        Ok(output) => output,
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no C compiler: {error}");
            eprintln!("skipped: no C compiler for the fake driver ({error})");
            return None;
        }
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the fake driver does not compile: {errors}");
    std::fs::rename(&unfinished, dir.join(LIBRARY)).expect("the folder is ours");
    // Both names are looked for; a real driver of the other name must not be found first.
    match symlink(LIBRARY, dir.join("libcuda.so")) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("no link: {error}"),
        _ => Some(dir),
    }
}
