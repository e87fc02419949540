//! What `fraglab explain` must say of the cases that were rebuilt from public threads.
//!
//! The table was written from the threads and from the arithmetic in the cases' headers, not from
//! the program. A size counts as said in any usual form, so that wording may change.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::program::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Longest answer without `--full`.
const LINES_MAX: usize = 25;

/// One case and what its answer must contain.
struct Expected {
    /// File under `traces/cases`, without its ending.
    case: &'static str,
    /// `class` of the JSON.
    class: &'static str,
    /// Sizes that must all be said.
    sizes: &'static [u64],
    /// Of these at least one, if there are any.
    one_size_of: &'static [u64],
    /// Words that must all be said.
    words: &'static [&'static str],
    /// Of these fixes at least one must be named, if there are any.
    one_fix_of: &'static [&'static str],
}

/// A case of which only the class matters.
const fn only(case: &'static str, class: &'static str) -> Expected {
    Expected { case, class, sizes: &[], one_size_of: &[], words: &[], one_fix_of: &[] }
}

const EXPANDABLE: &str = "expandable_segments:True";

/// E. Yang's devlog on the caching allocator.
const DEVLOG: [Expected; 5] = [
    // 128 MiB in 8 segments of 16 MiB, none of 32; with expandable segments 140 in either order.
    Expected {
        sizes: &[128 * MIB],
        one_size_of: &[16 * MIB, 32 * MIB, 256 * MIB],
        one_fix_of: &[EXPANDABLE],
        ..only("pytorch-devlog-order-small-first", "soft")
    },
    // 128 of 128 MiB in use.
    only("pytorch-devlog-order-large-first", "none"),
    // 32 of 32 MiB in use.
    only("pytorch-devlog-split-and-merge", "none"),
    // Two whole segments of 16 MiB for 32 MiB wanted. Expandable segments take 100 MiB, not 96.
    Expected { sizes: &[32 * MIB], ..only("pytorch-devlog-survivors", "soft") },
    // "hard: 2 live blocks pin": 16 + 8 MiB beside t1, 8 beside t3, 4 beside the last.
    Expected {
        sizes: &[36 * MIB],
        words: &["t1", "t3"],
        ..only("pytorch-devlog-survivors-expandable", "hard")
    },
];

/// max_split_size_mb with expandable segments (pytorch#123548, #193400).
const TWO_OPTIONS: [Expected; 4] = [
    // 703 pages of 20 MiB for 402.5 MiB; either option alone: 422 or 420 MiB.
    Expected {
        sizes: &[14_060 * MIB],
        one_size_of: &[422 * MIB, 420 * MIB],
        words: &["max_split_size_mb", "expandable_segments"],
        ..only("pytorch-123548-recorded", "settings")
    },
    // Without options: 18 of 422 MiB beside the 101st kept block, 4.3 %.
    Expected { sizes: &[18 * MIB], ..only("pytorch-123548-cycles", "hard") },
    // 18 of 222 MiB, 8.1 %.
    Expected { sizes: &[18 * MIB], ..only("pytorch-123548-one-cycle", "hard") },
    // 71,680,000 of 57,671,680,000 B, 0.12 %, on a device that is just large enough.
    only("pytorch-123548-first-post", "none"),
];

/// Large blocks that were carved up or never fit again.
const LARGE_BLOCKS: [Expected; 9] = [
    // pytorch#35901: 11,144,173,568 of 11,643,387,904 B of the segment are free: 95.7 %.
    Expected {
        sizes: &[11_643_387_904, 11_125_982_208],
        one_size_of: &[11_144_173_568],
        words: &["95.7 %"],
        one_fix_of: &["max_split_size_mb:200", EXPANDABLE],
        ..only("pytorch-35901", "hard")
    },
    // transformers#37436: 784 MiB wanted, 747.375 MiB in the warm-up block and 736 on the device.
    // The thread's class is soft; the hole lies behind live parameters, which DESIGN calls hard.
    Expected {
        sizes: &[784 * MIB, 747 * MIB + 3 * MIB / 8],
        one_size_of: &[736 * MIB],
        one_fix_of: &[EXPANDABLE],
        ..only("transformers-37436", "hard")
    },
    // 3.6 of 14,120 MiB, 0.03 %.
    only("transformers-37436-smaller", "none"),
    // pytorch#124260: 4 x 64 + 3 x 172 + 262 + 344 MiB of one-off temporaries; expandable 1,562.
    Expected {
        sizes: &[1_378 * MIB, 2_562 * MIB],
        one_fix_of: &[EXPANDABLE],
        ..only("pytorch-124260", "soft")
    },
    // pytorch#95823: a request of 1 MiB took a block of 4 GiB.
    Expected {
        sizes: &[4_293_918_208, 8 * GIB],
        one_fix_of: &["max_split_size_mb", EXPANDABLE],
        ..only("pytorch-95823-large", "hard")
    },
    // 4,096 of 4,098 MiB in use.
    only("pytorch-95823", "none"),
    // pytorch#137151: 3 x 226 + 440 MiB that are too small for the gathered unit of 450.3.
    Expected {
        sizes: &[1_118 * MIB, 2_248 * MIB],
        one_fix_of: &[EXPANDABLE],
        ..only("pytorch-137151", "soft")
    },
    // 5 of 1,816 MiB, 0.3 %.
    only("pytorch-137151-larger-batch", "none"),
    // vllm#41268: four holes of 260 MiB behind live weights, 2,120 MiB wanted of 3,300.
    Expected {
        sizes: &[1_040 * MIB, 2_120 * MIB],
        one_fix_of: &["max_split_size_mb:20", EXPANDABLE],
        ..only("vllm-41268", "hard")
    },
];

/// Memory of a private pool (pytorch#159674, vllm#49151).
const POOLS: [Expected; 4] = [
    // All 60 GiB are free, but the pool gives nothing back while it is entered.
    Expected {
        sizes: &[60 * GIB, 70 * GIB],
        words: &["pool"],
        one_fix_of: &["outside", "native"],
        ..only("pytorch-159674-inside", "stream")
    },
    // 70 of 70 GiB in use.
    only("pytorch-159674-outside", "none"),
    // 3 x 1,212 MiB replaced and kept, 1,346 wanted.
    Expected {
        sizes: &[3_636 * MIB, 1_346 * MIB],
        words: &["pool"],
        one_fix_of: &["outside", "native"],
        ..only("vllm-49151", "stream")
    },
    // It fits, with one retry; before that two old layers of 1,212 MiB are cached.
    Expected { sizes: &[2_424 * MIB], ..only("vllm-49151-outside", "soft") },
];

/// Memory that waits for a stream.
const DEFERRED: [Expected; 3] = [
    // pytorch#189504: a hole of exactly the 30 MiB that are refused, found by a second search.
    Expected {
        sizes: &[30 * MIB],
        one_fix_of: &["research_after_flush", EXPANDABLE],
        ..only("pytorch-189504", "deferred")
    },
    // llama-cookbook#120: 63 - 42 = 21 GiB, of which 17 wait and 4 are cached.
    Expected { sizes: &[17 * GIB, 4 * GIB], ..only("llama-cookbook-120", "deferred") },
    // modular#6801: 5,722 + 9,536 MiB wait at the peak, 12,398 more at the refusal of 11.9 GB.
    Expected {
        sizes: &[11_900_000_000],
        one_size_of: &[15_258 * MIB, 27_656 * MIB],
        ..only("modular-6801", "deferred")
    },
];

/// torchrec#4584 has a vocabulary of three kinds.
const TORCHREC: [Expected; 5] = [
    // Four segments of 4 GiB do not hold 16; 77 live, 93 reserved.
    Expected {
        sizes: &[16 * GIB, 93 * GIB],
        one_fix_of: &[EXPANDABLE],
        ..only("torchrec-4584", "soft")
    },
    // Nine holes of 1 GiB do not hold 9. Pages move: 18,580 MiB.
    Expected { sizes: &[9 * GIB], one_fix_of: &[EXPANDABLE], ..only("torchrec-4584-hard", "hard") },
    // 16 GiB of the main stream; no setting lets another stream have them.
    Expected { sizes: &[16 * GIB, 93 * GIB], ..only("torchrec-4584-stream", "stream") },
    only("torchrec-4584-empty-cache", "none"),
    only("torchrec-4584-preallocation", "none"),
];

/// Pools of RMM and of the driver.
const RMM: [Expected; 4] = [
    // rmm#1969: 22,124 MiB free in holes of 8,000, 8,000 and 6,124; 10,872 wanted.
    Expected {
        sizes: &[10_872 * MIB, 8_000 * MIB, 22_124 * MIB],
        one_fix_of: &[EXPANDABLE],
        ..only("rmm-1969", "hard")
    },
    // rmm#1245: refused by the driver at 53.5 GB; the replay grants it at 51,766 MiB.
    Expected {
        sizes: &[132_870_728],
        one_size_of: &[53_514_136_688, 54_280_585_216],
        ..only("rmm-1245", "driver")
    },
    // rmm#1421: 12,900 MiB live + 12,880 wanted of 25,760; 86 x 25 MiB more every step.
    Expected {
        sizes: &[2_150 * MIB, 12_880 * MIB],
        one_size_of: &[12_900 * MIB, 25_780 * MIB],
        ..only("rmm-1421", "leak")
    },
    // ucx-py#578: 370,000 B refused by a pool of 16 GB; the replay has 2 MiB.
    Expected { sizes: &[370_000], ..only("ucx-py-578", "driver") },
];

fn table() -> impl Iterator<Item = &'static Expected> {
    const TABLES: [&[Expected]; 7] =
        [&DEVLOG, &TWO_OPTIONS, &LARGE_BLOCKS, &POOLS, &DEFERRED, &TORCHREC, &RMM];
    TABLES.into_iter().flatten()
}

/// Whether a class means that the allocator's memory was fragmented. Memory that waits for a stream
/// is not, nor is a refusal that the allocator cannot explain, nor a program that needs too much.
fn is_fragmentation(class: &str) -> bool {
    match class {
        "hard" | "soft" | "stream" | "internal" | "settings" => true,
        "deferred" | "driver" | "leak" | "none" => false,
        other => panic!("{other} is no class"),
    }
}

fn case_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/cases")
}

fn explain(case: &str, args: &[&str]) -> std::process::Output {
    let file = case_dir().join(format!("{case}.txt"));
    let output = fraglab(&[&["explain", file.to_str().expect("UTF-8")], args].concat());
    assert_code(&output, 0);
    output
}

/// A whole number with a comma at every thousand.
fn with_commas(number: u64) -> String {
    if number < 1000 {
        return number.to_string();
    }
    format!("{},{:03}", with_commas(number / 1000), number % 1000)
}

/// The usual ways to write a size: in bytes, whole in a unit, or with two decimals.
fn forms(bytes: u64) -> Vec<String> {
    let mut forms = vec![format!("{bytes} B"), format!("{} B", with_commas(bytes))];
    for (unit, name) in [(KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")] {
        if bytes < unit {
            continue;
        }
        forms.push(format!("{:.2} {name}", bytes as f64 / unit as f64));
        if bytes.is_multiple_of(unit) {
            forms.push(format!("{} {name}", bytes / unit));
            forms.push(format!("{} {name}", with_commas(bytes / unit)));
        }
    }
    forms
}

/// Whether a text says a size, and not as the end of a longer number.
fn mentions(text: &str, bytes: u64) -> bool {
    forms(bytes).iter().any(|form| {
        text.match_indices(form.as_str()).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            let after = text[at + form.len()..].chars().next();
            !before.is_some_and(|c| c.is_ascii_digit() || c == '.' || c == ',')
                && !after.is_some_and(|c| c.is_ascii_alphanumeric())
        })
    })
}

/// A text with no space before a percent sign.
fn tight(text: &str) -> String {
    text.replace(" %", "%")
}

#[test]
fn sizes_are_recognised_in_the_usual_forms_only() {
    let said = |text: &str, bytes: u64| mentions(text, bytes);
    assert!(said("wanted 10.62 GiB, no more", 10_872 * MIB));
    assert!(said("wanted 10,872 MiB", 10_872 * MIB));
    assert!(said("wanted 11,400,118,272 B.", 10_872 * MIB));
    assert!(said("16 GiB", 16 * GIB) && said("16.00 GiB", 16 * GIB));
    assert!(!said("116 GiB", 16 * GIB) && !said("3.16 GiB", 16 * GIB));
    assert!(!said("16 MiB", 16 * GIB) && !said("1,016 GiB", 16 * GIB));
}

#[test]
fn classes_are_those_of_the_threads() {
    for expected in table() {
        let answer = json(&explain(expected.case, &["--json", "-"]));
        assert_eq!(answer["class"], expected.class, "{}: {answer}", expected.case);
        let fragmented = is_fragmentation(expected.class);
        let fragmented = if fragmented { "yes" } else { "no" };
        assert_eq!(answer["is_fragmentation"], fragmented, "{}: {answer}", expected.case);
    }
}

#[test]
fn answers_hold_the_decisive_numbers() {
    for expected in table() {
        let text = stdout(&explain(expected.case, &[]));
        for &size in expected.sizes {
            assert!(mentions(&text, size), "{}: no {:?} in\n{text}", expected.case, forms(size));
        }
        let sizes = expected.one_size_of;
        let one = sizes.is_empty() || sizes.iter().any(|&size| mentions(&text, size));
        assert!(one, "{}: none of {sizes:?} in\n{text}", expected.case);
        for word in expected.words {
            assert!(
                tight(&text).contains(&tight(word)),
                "{}: no {word:?} in\n{text}",
                expected.case
            );
        }
    }
}

#[test]
fn answers_name_what_helps() {
    for expected in table().filter(|expected| !expected.one_fix_of.is_empty()) {
        let text = stdout(&explain(expected.case, &[]));
        let fixes = expected.one_fix_of;
        let named = fixes.iter().any(|fix| text.contains(fix));
        assert!(named, "{}: none of {fixes:?} in\n{text}", expected.case);
    }
}

#[test]
fn answers_are_at_most_25_lines() {
    for expected in table() {
        let text = stdout(&explain(expected.case, &[]));
        let lines = text.lines().count();
        assert!((1..=LINES_MAX).contains(&lines), "{}: {lines} lines\n{text}", expected.case);
    }
}

/// Where nothing is stranded no setting may be named: most people who ask are in this place.
#[test]
fn nothing_is_advised_where_nothing_is_stranded() {
    for expected in table().filter(|expected| expected.class == "none") {
        let text = stdout(&explain(expected.case, &[]));
        assert!(!text.contains(EXPANDABLE), "{}:\n{text}", expected.case);
    }
}

/// All cases of the threads that the table is about.
#[test]
fn the_table_has_every_case_of_its_threads() {
    const THREADS: [&str; 16] = [
        "llama-cookbook-120",
        "modular-6801",
        "pytorch-123548",
        "pytorch-124260",
        "pytorch-137151",
        "pytorch-159674",
        "pytorch-189504",
        "pytorch-35901",
        "pytorch-95823",
        "pytorch-devlog",
        "rmm-",
        "torchrec-4584",
        "transformers-37436",
        "ucx-py-578",
        "vllm-41268",
        "vllm-49151",
    ];
    let mut found: Vec<String> = fs::read_dir(case_dir())
        .expect("the folder of cases")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8"))
        .filter_map(|name| name.strip_suffix(".txt").map(str::to_owned))
        .filter(|name| THREADS.iter().any(|thread| name.starts_with(thread)))
        .collect();
    found.sort();
    let mut listed: Vec<&str> = table().map(|expected| expected.case).collect();
    listed.sort_unstable();
    assert_eq!(listed, found);
}
