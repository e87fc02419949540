//! The TOML of an experiment: what people write becomes a [`Description`], checked.
//!
//! The one design decision: every table is read against the list of keys that it may have, and
//! every value keeps the place where it stands, so that a misspelt key, an unknown column of a
//! figure or an allocator that cannot be built is told with line, column and a caret.
//!
//! All keys stand in `experiments/README.md`.

mod cells;
mod fields;
mod figures;

use toml::de::DeTable;

use super::description::{Description, Kind, Latency};
use super::error::DescriptionError;
use super::folder::{NAME_CHARS_MAX, fits_name};
use fields::{Fields, Source};

/// Keys at the top; those of [`cells::BLOCK_KEYS`] come with them.
const TOP_KEYS: [&str; 15] = [
    "name",
    "title",
    "description",
    "date",
    "kind",
    "parameters",
    "cells",
    "figure",
    "table",
    "fleet",
    "profiles",
    "sizes",
    "total",
    "trace",
    "allocator",
];

/// Most sizes of device calls.
const SIZES_MAX: usize = 1000;

/// Reads the description of an experiment.
///
/// # Errors
/// The first thing that is wrong, and where.
pub fn read_description(text: &str) -> Result<Description, DescriptionError> {
    let source = Source { text };
    let table = DeTable::parse(text).map_err(|error| {
        let message = error.message().lines().map(str::trim).collect::<Vec<_>>().join("; ");
        source.error(error.span().map_or(0, |span| span.start), format!("not TOML: {message}"))
    })?;
    let known: Vec<&str> = TOP_KEYS.iter().chain(&cells::BLOCK_KEYS).copied().collect();
    let top = Fields::new(source, table.get_ref(), "the experiment", 0, &known)?;
    for (key, instead) in [("trace", "traces = [...]"), ("allocator", "allocators = [...]")] {
        if let Some(value) = top.get(key) {
            return Err(source.error(value.at, format!("unknown key {key}: write {instead}")));
        }
    }
    let name = name(&top)?;
    let axes = cells::axes(&top)?;
    let kind = match top.word("kind", &["replay", "device-latency"])? {
        Some("device-latency") => Kind::DeviceLatency(latency(&top)?),
        _ => {
            refuse(&top, &["profiles", "sizes", "total"], "goes with kind = \"device-latency\"")?;
            Kind::Replay(cells::blocks(&top)?)
        }
    };
    let mut description = Description {
        title: top.text("title")?.unwrap_or_else(|| name.clone()),
        name,
        text: top.text("description")?.unwrap_or_default(),
        date: top.text("date")?,
        kind,
        axes,
        figures: Vec::new(),
        tables: Vec::new(),
        fleet: None,
        source: text.to_owned(),
    };
    let columns = description.columns();
    description.figures = figures::figures(&top, &columns)?;
    description.tables = figures::tables(&top, &columns)?;
    description.fleet = figures::fleet(&top, &columns)?;
    Ok(description)
}

fn name(top: &Fields<'_>) -> Result<String, DescriptionError> {
    let name =
        top.required("name", "a name for the files of its results, as in \"oom-frontier\"")?;
    let text = name.text()?;
    if text.is_empty()
        || text.starts_with('.')
        || text.len() > NAME_CHARS_MAX
        || !text.chars().all(fits_name)
    {
        let expected = format!("expected letters, digits and - . _, 1 to {NAME_CHARS_MAX} of them");
        return Err(name.wrong(&expected));
    }
    Ok(text.to_owned())
}

fn refuse(top: &Fields<'_>, keys: &[&str], why: &str) -> Result<(), DescriptionError> {
    match keys.iter().find_map(|key| Some((key, top.get(key)?))) {
        Some((key, value)) => Err(top.source.error(value.at, format!("{key} {why}"))),
        None => Ok(()),
    }
}

fn latency(top: &Fields<'_>) -> Result<Latency, DescriptionError> {
    let only = "does not go with kind = \"device-latency\": nothing is replayed";
    refuse(top, &cells::BLOCK_KEYS, only)?;
    refuse(top, &["cells", "parameters", "fleet"], only)?;
    let profiles = top.required("profiles", "cost profiles, as in [\"h200\"]")?;
    let sizes = top.required("sizes", "sizes of a piece, as in [\"2MiB\", \"4MiB\"]")?;
    let mut bytes: Vec<u64> = Vec::new();
    for size in sizes.list()? {
        let size_bytes = size.size()?;
        if bytes.contains(&size_bytes) || bytes.len() == SIZES_MAX {
            return Err(size.wrong(&format!("expected at most {SIZES_MAX} sizes, each once")));
        }
        bytes.push(size_bytes);
    }
    let mut names: Vec<String> = Vec::new();
    for name in profiles.list()? {
        let text = cells::profile(&name)?;
        if names.contains(&text) {
            return Err(name.wrong("expected each profile once"));
        }
        names.push(text);
    }
    Ok(Latency {
        profiles: names,
        sizes_bytes: bytes,
        total_bytes: top.get("total").map(|total| total.size()).transpose()?,
        at: profiles.at,
    })
}

#[cfg(test)]
mod tests {
    use super::super::description::{SizeKind, Unit};
    use super::*;

    const SMALL: &str = r#"
name = "small"
traces = ["a.json"]
allocators = ["caching", { spec = "stitch+policy={policy}", label = "GMLake, {policy}" }]
capacities = ["auto", "80GiB", "1.5x"]
[parameters]
policy = ["paper", "best"]
[[figure]]
name = "reserved"
kind = "bars"
x = "trace"
group = "label"
y = "reserved_bytes_peak"
"#;

    #[test]
    fn a_small_one_reads_as_written() {
        let description = read_description(SMALL).expect("good");
        let Kind::Replay(blocks) = &description.kind else { panic!("a replay") };
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].allocators[1].label.as_deref(), Some("GMLake, {policy}"));
        let kinds: Vec<SizeKind> = blocks[0].capacities.iter().map(|size| size.kind).collect();
        assert_eq!(kinds, [SizeKind::OfTrace, SizeKind::Bytes(80 << 30), SizeKind::OfPeak(1.5)]);
        let shown = description.figures[0].value.as_ref().expect("a number");
        // Bytes are shown in GiB unless something else is asked for.
        assert_eq!(shown.unit, Unit::GiB);
    }

    /// The place of the first fault and its message.
    fn fault(text: &str) -> (u32, u32, String) {
        let error = read_description(text).expect_err("wrong");
        (error.line, error.column, error.message)
    }

    #[test]
    fn unknown_keys_are_told_where_they_stand() {
        let (line, column, message) = fault(&SMALL.replace("capacities", "capacity"));
        assert_eq!((line, column), (5, 1));
        assert!(message.contains("unknown key capacity") && message.contains("capacities"));
        let (line, column, message) = fault(&SMALL.replace("group", "gruop"));
        assert_eq!((line, column), (12, 1));
        assert!(message.contains("did you mean group?"), "{message}");
    }

    #[test]
    fn unknown_columns_are_told_where_they_stand() {
        let (line, column, message) = fault(&SMALL.replace("\"reserved_b", "\"reservd_b"));
        assert_eq!((line, column), (13, 5));
        assert!(message.contains("did you mean reserved_bytes_peak?"), "{message}");
    }

    #[test]
    fn parameters_that_nobody_declared_are_told_where_they_stand() {
        let (line, column, message) = fault(&SMALL.replace("={policy}", "={polcy}"));
        assert_eq!((line, column), (4, 35));
        assert!(message.contains("{polcy}") && message.contains("policy"), "{message}");
    }

    #[test]
    fn values_of_the_wrong_kind_are_told_with_what_was_expected() {
        let (line, column, message) = fault(&SMALL.replace("[\"a.json\"]", "7"));
        assert_eq!((line, column), (3, 10));
        assert!(message.contains("expected a list"), "{message}");
        let (line, _, message) = fault(&SMALL.replace("1.5x", "1.5y"));
        assert_eq!(line, 5);
        assert!(message.contains("1.5y") && message.contains("1.25x"), "{message}");
        let (line, _, message) = fault(&SMALL.replace("\"small\"", "\"../small\""));
        assert_eq!(line, 2);
        assert!(message.contains("expected letters"), "{message}");
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_place() {
        let (line, _, message) = fault("name = \"x\"\ntraces = [\n");
        assert!(line >= 2 && message.starts_with("not TOML"), "{line} {message}");
    }

    #[test]
    fn caret_stands_under_the_fault() {
        let error = read_description(&SMALL.replace("group", "gruop")).expect_err("wrong");
        assert_eq!(error.excerpt(), "gruop = \"label\"\n^");
    }
}
