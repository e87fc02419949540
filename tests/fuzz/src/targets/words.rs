//! Option strings, small languages, and texts that people paste.

use fraglab::alloc::caching::{Circumstances, Config, TorchVersion, lint};
use fraglab::alloc::spec::AllocSpec;
use fraglab::experiment::settings::SettingsLine;
use fraglab::experiment::{Filter, fits};
use fraglab::import::{MemorySummary, MemoryText, diagnose};
use fraglab::plan::synthetic::Shape;
use fraglab::report::text::{self, ExplainedText, Style};
use fraglab::trace::{Trace, read_text};
use fraglab::units::{Bytes, GIB, caret_under, whole_number};

use super::traces::{assert_printable, assert_said, options, replay, replay_with};
use super::{as_text, in_two};

/// Settings and allocators meet this program: sizes of every pool, splits, a release, a refusal.
const PROGRAM: &str = "capacity 300MiB\n\
    alloc a 512\nalloc b 100000\nalloc c 1MiB\nalloc d 1.5MiB\nalloc e 9MiB\nalloc f 21MiB\n\
    alloc g 70MiB stream=1\nfree c\nfree e\nalloc h 5MiB\ndefer g\nalloc i 33MiB\ndone g\n\
    empty_cache\nfree f\nalloc j 16MiB\nfree i\nalloc k 250MiB\nfree a b d h j\nempty_cache\n";

fn the_program() -> Trace {
    read_text(PROGRAM).expect("a valid program")
}

/// A list of allocators, as `--alloc` takes it.
pub(super) fn specification(data: &[u8]) {
    let Some(text) = as_text(data) else { return };
    let specs = match AllocSpec::parse_list(text) {
        Ok(specs) => specs,
        Err(error) => return assert_said(&error),
    };
    let trace = the_program();
    for spec in specs.iter().take(4) {
        replay_with(&trace, spec, &options());
    }
}

/// A string for `PYTORCH_CUDA_ALLOC_CONF`; behind a byte 0, one that the program gives later, and
/// behind another the release that reads it.
pub(super) fn settings(data: &[u8]) {
    let (first, rest) = in_two(data);
    let (later, version) = in_two(rest);
    let (Some(first), Some(later), Some(version)) =
        (as_text(first), as_text(later), as_text(version))
    else {
        return;
    };
    let version: TorchVersion = version.parse().unwrap_or_default();
    for (device_total_bytes, limit_bytes) in [(None, None), (Some(80 * GIB), Some(GIB))] {
        let circumstances =
            Circumstances { version, device_total_bytes, limit_bytes, variable: None };
        match lint(first, &circumstances) {
            Ok(lint) => assert_printable(&text::lint(first, &lint, Style::default())),
            Err(error) => {
                assert_said(&error);
                error.excerpt();
            }
        }
    }
    let Ok(config) = Config::parse_for(version, first) else { return };
    for size_bytes in [1, 513, 1_300_000, 20 << 20, (1 << 60) - 1] {
        assert!(config.round_size(size_bytes) >= size_bytes, "{first:?}: {size_bytes}");
    }
    if let Ok(line) = SettingsLine::parse(first, version) {
        for shorter in line.shorter() {
            SettingsLine::parse(&shorter.to_string(), version).expect("a shorter line is one too");
        }
    }
    let mut trace = the_program();
    trace.header.settings = Some(first.to_owned());
    replay(&trace, "caching", &options());
    replay(&trace, "expandable", &options());
    if !later.is_empty() && config.change(later).is_ok() {
        let settings = serde_json::Value::from(later).to_string();
        let (before, after) = PROGRAM.split_at(PROGRAM.find("defer").unwrap_or_default());
        if let Ok(mut trace) = read_text(&format!("{before}settings {settings}\n{after}")) {
            trace.header.settings = Some(first.to_owned());
            replay(&trace, "caching", &options());
        }
    }
}

/// Sizes, counts, releases, conditions, shapes and excerpts: a line of the input each.
pub(super) fn words(data: &[u8]) {
    let Some(text) = as_text(data) else { return };
    for line in text.lines() {
        match line.parse::<Bytes>() {
            Ok(bytes) => {
                assert!(bytes.0 < 1 << 63, "{line:?}");
                assert_eq!(bytes.0.to_string().parse::<Bytes>(), Ok(bytes));
                // The largest sizes may be rounded beyond what is read.
                if bytes.0 < 1 << 62 {
                    let shown = bytes.to_string();
                    shown.parse::<Bytes>().unwrap_or_else(|error| panic!("{line:?}: {error}"));
                }
            }
            Err(error) => assert_said(&error),
        }
        if let Some(number) = whole_number(line) {
            assert_eq!(whole_number(&number.to_string()), Some(number));
        }
        match line.parse::<TorchVersion>() {
            Ok(version) => assert_eq!(version.to_string().parse(), Ok(version)),
            Err(error) => assert_said(&error),
        }
        match line.parse::<Filter>() {
            Ok(filter) => {
                assert_eq!(filter.to_string().parse(), Ok(filter.clone()));
                let passes = filter.passes("llama-1b-varlen");
                assert_eq!(passes, filter.passes("llama-1b-varlen"));
            }
            Err(error) => assert_said(&error),
        }
        match line.parse::<Shape>() {
            Ok(shape) => assert_eq!(shape.to_string().parse(), Ok(shape)),
            Err(error) => assert_said(&error),
        }
        if let Some((pattern, name)) = line.split_once(' ') {
            // A name fits itself, and everything fits a star.
            assert!(fits(name, name) && fits("*", name) && fits(&format!("*{name}"), name));
            fits(pattern, name);
        }
        for column in [0, 1, 7, u32::MAX] {
            caret_under(line, column);
        }
    }
}

/// An out-of-memory message, a table of `memory_summary()`, a log with memory lines.
pub(super) fn memory_text(data: &[u8]) {
    let decoded = MemoryText::decode(data);
    let found = MemoryText::read(&decoded);
    let messages: Vec<_> = found.messages.iter().map(diagnose).collect();
    let summaries: Vec<_> = found.summaries.iter().map(MemorySummary::diagnose).collect();
    for capacity_bytes in [None, Some(1), Some(80 * GIB)] {
        let curves: Vec<_> =
            found.curves.iter().map(|curve| curve.diagnose(capacity_bytes)).collect();
        for is_full in [false, true] {
            assert_printable(&text::explain_text(
                &ExplainedText {
                    file: "-",
                    text: &found,
                    messages: &messages,
                    summaries: &summaries,
                    curves: &curves,
                    capacity_bytes,
                    is_full,
                },
                Style::default(),
            ));
        }
    }
    let mut of_first = found.clone();
    of_first.keep_device(0);
    assert!(of_first.messages.len() <= found.messages.len());
}
