//! What several test modules share.

pub(crate) mod trace_gen;

use std::path::{Path, PathBuf};

/// The folder with the recordings of real jobs, which lies beside the package and not in it. Nothing,
/// with a message, where it is missing; with `CI=true` that is a failure.
pub(crate) fn shared_dir() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    if folder.join("recordings").is_dir() {
        return Some(folder);
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{} is missing: the recordings must be there in CI",
        folder.display()
    );
    eprintln!("skipped: {} is missing", folder.display());
    None
}
