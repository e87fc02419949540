//! What each fuzz target does with its bytes. The targets in `fuzz_targets/` call these functions, and
//! so does the crate's own `tests/fuzz_regressions.rs` with every input that is kept, so that what was
//! found once is checked by `cargo test` on a stable toolchain, without a fuzzer.
//!
//! The one design decision: a body states what must hold, it does not only look for panics. What is
//! read is valid; what is written reads back the same; no allocator breaks its contract; no text that
//! goes to a terminal drives it.

mod documents;
mod files;
mod programs;
mod reports;
mod traces;
mod words;

/// A target: its name, and what it does.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: &[Target] = &[
    ("container", files::container),
    ("experiment", documents::experiment),
    ("job", documents::job),
    ("json", documents::json),
    ("kineto", files::kineto),
    ("memory_text", words::memory_text),
    ("minimalloc", files::minimalloc),
    ("native", files::native),
    #[cfg(feature = "analytics")]
    ("parquet", files::parquet),
    ("program", programs::program),
    ("reports", reports::reports),
    ("rmm_csv", files::rmm_csv),
    ("settings", words::settings),
    ("snapshot", files::snapshot),
    ("snapshot_notes", files::snapshot_notes),
    ("specification", words::specification),
    ("stalloc", files::stalloc),
    ("text", files::text),
    ("words", words::words),
];

/// Does what a target does.
///
/// # Panics
/// If what must hold does not, or there is no such target.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, body) = target.unwrap_or_else(|| panic!("{name}: no target has that name"));
    body(data);
}

/// The input as text; nothing if it is none. Programs refuse what is not UTF-8 before it is parsed.
fn as_text(data: &[u8]) -> Option<&str> {
    std::str::from_utf8(data).ok()
}

/// The input in two parts, at the first byte 0; the second part is empty without.
fn in_two(data: &[u8]) -> (&[u8], &[u8]) {
    match data.iter().position(|&byte| byte == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &[]),
    }
}
