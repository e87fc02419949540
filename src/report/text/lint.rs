//! The answer of `lint-conf`: what a settings string does, and its traps.

use serde::Serialize;

use super::{Style, Tone, grouped, printable, wrapped};
use crate::alloc::caching::{Config, GivenOption, Lint};
use crate::units::{Bytes, MIB};

/// Requests below this many bytes share the first entry of the rounding table.
const FIRST_ENTRY_BYTES: u64 = 2 * MIB;
/// Rounding to divisions begins above this many bytes for each division.
const DIVISION_BYTES_MIN: u64 = 512;

/// An option that is not at its default. Field names are the JSON names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Effect {
    /// Its name.
    pub option: String,
    /// Its value, as written.
    pub value: String,
    /// What that does, in words.
    pub effect: String,
}

/// The options of a string that are not at their defaults, in the order in which they were last
/// given, with what they do.
pub fn effects(lint: &Lint) -> Vec<Effect> {
    let given = lint.given.iter().enumerate();
    let counts = given
        .filter(|&(at, option)| !lint.given[at + 1..].iter().any(|later| later.key == option.key));
    let effects = counts.filter_map(|(_, option)| {
        let (option, value) = (option, printable(&option.value).into_owned());
        effect(lint, option).map(|effect| Effect { option: option.key.clone(), value, effect })
    });
    effects.collect()
}

/// What an option does; nothing if it is at its default.
fn effect(lint: &Lint, option: &GivenOption) -> Option<String> {
    let (config, default) = (&lint.config, Config::default());
    let (changed, text) = match option.key.as_str() {
        "large_segment_size_mb" => (
            config.large_segment_size_bytes != default.large_segment_size_bytes,
            large_segment(config),
        ),
        "max_split_size_mb" => {
            (config.max_split_size_bytes != default.max_split_size_bytes, max_split(config))
        }
        "max_non_split_rounding_mb" => (
            config.max_non_split_rounding_bytes != config.large_segment_size_bytes,
            max_non_split(config),
        ),
        "garbage_collection_threshold" => (true, garbage_collection(lint)),
        "roundup_power2_divisions" => (
            config.roundup_power2_divisions.iter().any(|&divisions| divisions > 0),
            rounding(&config.roundup_power2_divisions),
        ),
        "expandable_segments" => (config.expandable_segments, expandable(config)),
        "per_process_memory_fraction" => (config.per_process_memory_fraction < 1.0, fraction(lint)),
        other => (option.value != elsewhere_default(other), elsewhere(other).to_owned()),
    };
    changed.then_some(text)
}

/// The default of an option without effect on placement, as it is written.
fn elsewhere_default(key: &str) -> &'static str {
    match key {
        "backend" => "native",
        "pinned_num_register_threads" => "1",
        "pinned_reserve_segment_size_mb" => "0",
        _ => "False",
    }
}

/// What the options without effect on placement do.
fn elsewhere(key: &str) -> &'static str {
    match key {
        "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
            "other threads may use the allocator while the device is asked for memory; nothing \
             changes for a single thread"
        }
        "graph_capture_record_stream_reuse" => {
            "while a graph is captured, memory that other streams used comes back earlier; nothing \
             changes outside captures"
        }
        "pinned_use_background_threads"
        | "pinned_use_cuda_host_register"
        | "pinned_use_hip_host_register"
        | "pinned_num_register_threads"
        | "pinned_reserve_segment_size_mb"
        | "pinned_free_catch_all" => "pinned memory of the host only; nothing changes on the GPU",
        _ => "no effect on where memory is placed",
    }
}

fn large_segment(config: &Config) -> String {
    let size = Bytes(config.large_segment_size_bytes);
    if config.expandable_segments {
        format!("memory for requests above 1 MiB comes in pages of {size} instead of 20 MiB")
    } else {
        format!("requests above 1 MiB and below 10 MiB come from segments of {size}, not of 20 MiB")
    }
}

fn max_split(config: &Config) -> String {
    let size = Bytes(config.max_split_size_bytes);
    let slack = Bytes(config.max_non_split_rounding_bytes);
    let share = format!("smaller requests do not get them, larger ones only if less than {slack}");
    if config.expandable_segments {
        return format!("blocks of {size} and more are for large requests: {share} is left over");
    }
    format!(
        "blocks of {size} and more are never split: {share} is left over; when the device is full \
         they are given back first"
    )
}

fn max_non_split(config: &Config) -> String {
    if config.max_split_size_bytes == u64::MAX {
        return "no effect without max_split_size_mb".to_owned();
    }
    let slack = Bytes(config.max_non_split_rounding_bytes);
    format!("a block that is never split serves a request if less than {slack} is left over")
}

fn garbage_collection(lint: &Lint) -> String {
    let share = lint.config.garbage_collection_threshold;
    let from = match lint.garbage_collection_bytes {
        Some(bytes) => {
            format!("{} ({} bytes, {share} of the limit)", Bytes(bytes), grouped(bytes))
        }
        None if lint.has_limit() => format!("{share} of the memory limit"),
        None => return "no effect: there is no memory limit".to_owned(),
    };
    format!(
        "while more than {from} is reserved, large segments that are wholly free are given back, \
         those unused for longest first, before the device is asked for a new one"
    )
}

fn expandable(config: &Config) -> String {
    let page = Bytes(config.large_segment_size_bytes);
    format!(
        "memory comes in segments that grow, one for each stream and pool, by pages of {page} (2 \
         MiB for requests up to 1 MiB), and every remainder of 512 bytes or more is split off"
    )
}

fn fraction(lint: &Lint) -> String {
    let share = lint.config.per_process_memory_fraction;
    let limit = match (lint.limit_bytes, lint.device_total_bytes) {
        (Some(bytes), _) if lint.limit_is_set_otherwise => {
            return format!("no effect: the limit is set otherwise, to {}", Bytes(bytes));
        }
        (Some(bytes), Some(total_bytes)) => format!(
            "{} ({} bytes, {share} of {})",
            Bytes(bytes),
            grouped(bytes),
            Bytes(total_bytes)
        ),
        _ => format!("{share} of the device's total memory"),
    };
    format!("at most {limit} is reserved; more is refused as by a full device")
}

/// The ranges of sizes that are rounded, each with its number of divisions.
fn rounding(divisions: &[u64]) -> String {
    let mut ranges: Vec<(u64, Option<u64>, u64)> = Vec::new();
    for (entry, &count) in divisions.iter().enumerate() {
        let Some(from_bytes) = (count > 1).then(|| count.checked_mul(DIVISION_BYTES_MIN)).flatten()
        else {
            continue;
        };
        let entry_begins_bytes = if entry == 0 { 0 } else { FIRST_ENTRY_BYTES << (entry - 1) };
        let ends = FIRST_ENTRY_BYTES << entry;
        let ends_bytes = (entry + 1 < divisions.len()).then_some(ends);
        let begins_bytes = entry_begins_bytes.max(from_bytes);
        if ends_bytes.is_some_and(|end| begins_bytes >= end) {
            continue;
        }
        match ranges.last_mut() {
            Some((_, last_ends, last_count))
                if *last_count == count && *last_ends == Some(begins_bytes) =>
            {
                *last_ends = ends_bytes;
            }
            _ => ranges.push((begins_bytes, ends_bytes, count)),
        }
    }
    if ranges.is_empty() {
        return "no effect: sizes are rounded to 512 bytes, as without it".to_owned();
    }
    let range = |&(begins, ends, count): &(u64, Option<u64>, u64)| {
        let to = ends.map(|end| format!(" to {}", Bytes(end))).unwrap_or_default();
        format!("from {}{to} in {count} steps (at most 1/{count} more)", Bytes(begins))
    };
    let ranges: Vec<String> = ranges.iter().map(range).collect();
    format!(
        "sizes between two powers of two are rounded up: {}; all others to 512 bytes",
        ranges.join(", ")
    )
}

/// Everything about a settings string, as text. `settings` is the string itself.
pub fn lint(settings: &str, lint: &Lint, style: Style) -> String {
    let version = lint.config.version;
    let shown = match settings {
        "" => "(empty string)".into(),
        text => printable(text),
    };
    let mut out = wrapped("", &format!("{shown} (torch {version})"), "  ");
    let heading = |out: &mut String, text: &str| {
        out.push('\n');
        out.push_str(&style.paint(Tone::Heading, text));
        out.push('\n');
    };
    heading(&mut out, "what it does");
    let effects = effects(lint);
    if effects.is_empty() {
        out.push_str("  nothing: every option is at its default\n");
    }
    for Effect { option, value, effect } in effects {
        out.push_str(&wrapped("  ", &format!("{option} {value}: {effect}"), "    "));
    }
    heading(&mut out, "traps");
    if lint.traps.is_empty() {
        out.push_str("  none known\n");
    }
    for trap in &lint.traps {
        let text = format!("{}: {}", trap.id, printable(&trap.text));
        out.push_str(&wrapped("  ", &text, "    "));
        out.push_str(&wrapped("    ", &format!("Why: {}", trap.reason), "    "));
        if let Some(address) = trap.address {
            out.push_str(&format!("    {address}\n"));
        }
    }
    let differences = version.differences();
    if !differences.is_empty() {
        heading(&mut out, &format!("torch {version} against 2.11, whose rules are known exactly"));
        for difference in differences {
            out.push_str(&wrapped("  ", difference, "    "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::caching::{self, Circumstances};
    use crate::report::text::WIDTH;
    use crate::units::GIB;

    fn examined(text: &str, circumstances: &Circumstances) -> Lint {
        caching::lint(text, circumstances).expect(text)
    }

    /// The effect of the only option that a string changes.
    fn effect_of(text: &str) -> String {
        let effects = effects(&examined(text, &Circumstances::default()));
        assert_eq!(effects.len(), 1, "{effects:?}");
        effects[0].effect.clone()
    }

    #[test]
    fn options_at_their_defaults_are_left_out() {
        let text = "backend:native,large_segment_size_mb:20,expandable_segments:False,\
                    per_process_memory_fraction:1.0,pinned_num_register_threads:1,\
                    max_non_split_rounding_mb:20,release_lock_on_cudamalloc:False";
        let lint = examined(text, &Circumstances::default());
        assert_eq!(effects(&lint), []);
        assert!(super::lint(text, &lint, Style::default()).contains("every option is at its"));
        let given = "pinned_num_register_threads:8,release_lock_on_cudamalloc:True,\
                     max_split_size_mb:30,max_split_size_mb:40,large_segment_size_mb:30";
        let lint = examined(given, &Circumstances::default());
        let named: Vec<String> = effects(&lint).into_iter().map(|e| e.option + &e.value).collect();
        let expected = [
            "pinned_num_register_threads8",
            "release_lock_on_cudamallocTrue",
            "max_split_size_mb40",
            "large_segment_size_mb30",
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn effects_are_told_in_numbers() {
        let segment = effect_of("large_segment_size_mb:32");
        assert!(segment.contains("segments of 32 MiB, not of 20 MiB"), "{segment}");
        let split = effect_of("max_split_size_mb:128");
        assert!(split.starts_with("blocks of 128 MiB and more are never split"), "{split}");
        assert!(split.contains("less than 20 MiB is left over"), "{split}");
        let pages = "expandable_segments:True,large_segment_size_mb:40";
        let pages = &effects(&examined(pages, &Circumstances::default()))[0].effect;
        assert!(pages.contains("pages of 40 MiB (2 MiB for"), "{pages}");
        let together = "max_split_size_mb:128,expandable_segments:True";
        let together = effects(&examined(together, &Circumstances::default()));
        assert!(!together[0].effect.contains("never split"), "{together:?}");
    }

    /// Spec 2.2: entry k is for sizes from 2^k MiB, the first for all below 2 MiB, and nothing up
    /// to 512 bytes a division is rounded.
    #[test]
    fn rounding_is_told_in_ranges() {
        let four = effect_of("roundup_power2_divisions:4");
        assert!(four.contains("up: from 2 KiB in 4 steps (at most 1/4 more);"), "{four}");
        let list = effect_of("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        let expected = "from 512 MiB to 1 GiB in 2 steps (at most 1/2 more), from 1 GiB to 2 GiB \
                        in 4 steps (at most 1/4 more), from 2 GiB in 8 steps (at most 1/8 more)";
        assert!(list.contains(expected), "{list}");
        // 512 bytes for each of 2^20 divisions are 512 MiB.
        let many = effect_of("roundup_power2_divisions:1048576");
        assert!(many.contains("up: from 512 MiB in 1048576 steps"), "{many}");
        for idle in ["1", "9223372036854775808", "[1:4096,2:0]"] {
            let text = effect_of(&format!("roundup_power2_divisions:{idle}"));
            assert!(text.starts_with("no effect"), "{idle}: {text}");
        }
    }

    #[test]
    fn limits_are_told_in_bytes_where_the_device_is_known() {
        let text = "per_process_memory_fraction:0.5,garbage_collection_threshold:0.25";
        let known = Circumstances { device_total_bytes: Some(80 * GIB), ..Default::default() };
        let [limit, collected] = &effects(&examined(text, &known))[..] else { panic!("two") };
        assert!(limit.effect.contains("40 GiB (42,949,672,960 bytes, 0.5 of 80 GiB)"), "{limit:?}");
        let expected = "10 GiB (10,737,418,240 bytes, 0.25 of the limit)";
        assert!(collected.effect.contains(expected), "{collected:?}");
        let unknown = effects(&examined(text, &Circumstances::default()));
        assert!(unknown[0].effect.contains("0.5 of the device's total memory"), "{unknown:?}");
        assert!(unknown[1].effect.contains("0.25 of the memory limit"), "{unknown:?}");
        let otherwise = Circumstances { limit_bytes: Some(60 * GIB), ..known };
        let otherwise = effects(&examined(text, &otherwise));
        assert!(otherwise[0].effect.contains("set otherwise, to 60 GiB"), "{otherwise:?}");
        assert!(effect_of("garbage_collection_threshold:0.25").starts_with("no effect"));
    }

    #[test]
    fn the_screen_is_narrow_and_cannot_drive_a_terminal() {
        let text = "max_split_size_mb:128\u{9b}31m,expandable_segments:True,\
                    garbage_collection_threshold:0.8,roundup_power2_divisions:[64:8,256:4]";
        let lint = examined(text, &Circumstances::default());
        let screen = super::lint(text, &lint, Style::default());
        assert!(!screen.contains('\u{9b}'), "{screen}");
        // The string and addresses are not broken; everything else is.
        let wide = screen.lines().skip(1).filter(|line| line.chars().count() > WIDTH);
        assert_eq!(wide.filter(|line| !line.contains("https://")).count(), 0, "{screen}");
        assert!(screen.contains("https://github.com/pytorch/pytorch/issues/123548\n"), "{screen}");
    }

    #[test]
    fn other_releases_are_told_apart() {
        let of = |release: &str| {
            let version = release.parse().expect("a version");
            let lint = examined("", &Circumstances { version, ..Default::default() });
            super::lint("", &lint, Style::default())
        };
        assert!(of("2.9.1").contains("torch 2.9.1 against 2.11"));
        assert!(of("2.9.1").contains("not modelled: "));
        assert!(!of("2.11").contains("modelled"));
    }
}
