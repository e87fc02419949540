//! Reports for a browser: maps against a slow model, pages as text, and pages in a real Chromium.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use fraglab::alloc::registry;
use fraglab::device::CostProfile;
use fraglab::engine::{self, Observe, Observed, RunOptions};
use fraglab::import::{ReadOptions, read_trace};
use fraglab::metrics::{MapBlock, MemoryMap};
use fraglab::trace::{Trace, read_text};
use fraglab::units::MIB;

use crate::common::{Rng, shared_dir};

fn observed(trace: &Trace, alloc: &str, map_blocks: usize) -> Observed {
    let options = RunOptions::new(CostProfile::shipped("h200").expect("ships"));
    let observe = Observe {
        decisions: true,
        timeline: true,
        map_blocks: Some(map_blocks),
        ..Observe::default()
    };
    engine::run(trace, &alloc.parse().expect("a specification"), &options, observe)
        .unwrap_or_else(|error| panic!("{alloc}: {error}"))
}

/// Lives of blocks as the decision log tells them: block → from, freed, to, bytes.
fn lives(observed: &Observed, events: u64) -> BTreeMap<u32, (u64, u64, u64, u64)> {
    let mut lives = BTreeMap::new();
    for row in &observed.decisions {
        let Some(block) = row.block_id else { continue };
        let event = row.event_index;
        match row.action {
            "alloc" => {
                lives.insert(block, (event, events, events, row.size_bytes));
            }
            "free" => {
                lives.entry(block).and_modify(|life| life.1 = event);
            }
            "free_completed" => {
                lives.entry(block).and_modify(|life| {
                    life.1 = life.1.min(event);
                    life.2 = event;
                });
            }
            _ => {}
        }
    }
    // A granted attempt is freed at once and takes no room in a map.
    lives.retain(|_, life| life.0 < life.2);
    lives
}

/// Everything that a complete map must keep to, against the decision log and the time line.
fn check_map(observed: &Observed, events: u64, name: &str) {
    let map = observed.map.as_ref().expect("asked for");
    assert_eq!(map.blocks.len() as u64, map.blocks_total, "{name}");
    assert!(map.block_shade.cover.is_empty() && map.stretch_shade.cover.is_empty(), "{name}");
    let mut parts: BTreeMap<u32, Vec<&MapBlock>> = BTreeMap::new();
    for block in &map.blocks {
        parts.entry(block.block.0).or_default().push(block);
    }
    let told = lives(observed, events);
    let shown: BTreeSet<u32> = parts.keys().copied().collect();
    assert_eq!(shown, told.keys().copied().collect(), "{name}");
    for (block, (from, freed, to, bytes)) in told {
        let parts = &parts[&block];
        assert!(map.has_parts || parts.len() == 1, "{name}: block {block}");
        assert_eq!(parts.iter().map(|part| part.size_bytes).sum::<u64>(), bytes, "{name}: {block}");
        for part in parts {
            let shown = (part.from_event, part.freed_event, part.to_event);
            assert_eq!(shown, (from, freed, to), "{name}: block {block}");
        }
    }
    check_places(map, name);
    check_levels(observed, map, name);
}

/// At every event: no two blocks share a byte, and each lies in memory that is held.
fn check_places(map: &MemoryMap, name: &str) {
    let mut changes: Vec<(u64, bool, bool, usize)> = Vec::new();
    for (index, block) in map.blocks.iter().enumerate() {
        changes
            .extend([(block.to_event, false, true, index), (block.from_event, true, true, index)]);
        assert!(block.position_bytes + block.size_bytes <= map.height_bytes, "{name}");
    }
    for (index, held) in map.stretches.iter().enumerate() {
        changes
            .extend([(held.to_event, false, false, index), (held.from_event, true, false, index)]);
        assert!(held.position_bytes + held.size_bytes <= map.height_bytes, "{name}");
    }
    // Ends before beginnings; memory is obtained before blocks come, and goes after them.
    changes.sort_by_key(|&(event, begins, is_block, index)| {
        (event, begins, if begins { is_block } else { !is_block }, index)
    });
    let mut held: BTreeMap<u64, u64> = BTreeMap::new();
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    for (event, begins, is_block, index) in changes {
        let (from, bytes) = match is_block {
            true => (map.blocks[index].position_bytes, map.blocks[index].size_bytes),
            false => (map.stretches[index].position_bytes, map.stretches[index].size_bytes),
        };
        let ranges = if is_block { &mut live } else { &mut held };
        if !begins {
            assert_eq!(ranges.remove(&from), Some(from + bytes), "{name}, event {event}");
            continue;
        }
        let below = ranges.range(..from + bytes).next_back();
        assert!(below.is_none_or(|(_, &end)| end <= from), "{name}, event {event}: two at {from}");
        ranges.insert(from, from + bytes);
        if is_block {
            let mut at = from;
            while at < from + bytes {
                let stretch = held.range(..=at).next_back().filter(|(_, end)| **end > at);
                at = *stretch.unwrap_or_else(|| panic!("{name}, event {event}: not held")).1;
            }
        }
    }
}

/// At every event: what is held in the map is what was reserved, and what lives what was requested.
fn check_levels(observed: &Observed, map: &MemoryMap, name: &str) {
    let mut held: BTreeMap<u64, i64> = BTreeMap::new();
    let mut live: BTreeMap<u64, i64> = BTreeMap::new();
    for stretch in &map.stretches {
        *held.entry(stretch.from_event).or_default() += stretch.size_bytes as i64;
        *held.entry(stretch.to_event).or_default() -= stretch.size_bytes as i64;
    }
    for block in &map.blocks {
        *live.entry(block.from_event).or_default() += block.size_bytes as i64;
        *live.entry(block.freed_event).or_default() -= block.size_bytes as i64;
    }
    let (mut held_bytes, mut live_bytes) = (0, 0);
    for row in &observed.timeline {
        held_bytes += held.get(&row.event_index).copied().unwrap_or(0);
        live_bytes += live.get(&row.event_index).copied().unwrap_or(0);
        assert_eq!(held_bytes, row.reserved_bytes as i64, "{name}, event {}", row.event_index);
        assert_eq!(live_bytes, row.requested_bytes as i64, "{name}, event {}", row.event_index);
    }
}

/// A program that asks, frees, defers and empties its cache at random.
fn random_trace(seed: u64) -> Trace {
    let mut random = Rng(seed);
    let mut text = String::from("capacity 3GiB\n");
    let (mut live, mut waiting, mut next) = (Vec::new(), Vec::new(), 0);
    for _ in 0..600 {
        match random.below(10) {
            0..=4 => {
                let sizes = [700, 40_000, 3 * MIB, 11 * MIB + 5, 60 * MIB];
                let bytes = sizes[random.below(sizes.len())] + random.below(9) as u64 * 4096;
                text.push_str(&format!("alloc b{next} {bytes} stream={}\n", random.below(2)));
                live.push(next);
                next += 1;
            }
            5..=7 if !live.is_empty() => {
                let block = live.swap_remove(random.below(live.len()));
                text.push_str(&format!("free b{block}\n"));
            }
            8 if !live.is_empty() => {
                let block = live.swap_remove(random.below(live.len()));
                text.push_str(&format!("defer b{block}\n"));
                waiting.push(block);
            }
            9 if !waiting.is_empty() => {
                text.push_str(&format!("done b{}\n", waiting.swap_remove(0)));
            }
            _ => text.push_str("empty_cache\n"),
        }
    }
    read_text(&text).expect("parses")
}

#[test]
fn maps_show_what_the_log_and_the_time_line_tell() {
    for info in registry::list() {
        // `planned` has nothing to learn from in a trace without steps.
        if info.name == "planned" {
            continue;
        }
        for seed in 1..4 {
            let trace = random_trace(seed);
            let observed = observed(&trace, info.name, 100_000);
            check_map(&observed, trace.events.len() as u64, &format!("{} of {seed}", info.name));
        }
    }
    for alloc in ["stitch+policy=shipped", "stitch+policy=best"] {
        let trace = random_trace(7);
        let observed = observed(&trace, alloc, 100_000);
        check_map(&observed, trace.events.len() as u64, alloc);
    }
}

#[test]
fn stitched_blocks_lie_in_all_their_pieces() {
    // GMLake's plainest case: t6 needs 400 MiB, of which 100 are free behind t4 and 300 behind t5.
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/cases/gmlake-g01-two-fragments.txt");
    let trace = read_text(&fs::read_to_string(file).expect("a case")).expect("parses");
    let observed = observed(&trace, "stitch+policy=shipped+frag_limit=2MiB", 100);
    check_map(&observed, 8, "stitch");
    let map = observed.map.expect("asked for");
    let parts: Vec<(u64, u64)> = map
        .blocks
        .iter()
        .filter(|block| trace.names[block.name.index()] == "t6")
        .map(|block| (block.position_bytes, block.size_bytes))
        .collect();
    assert_eq!(parts, [(300 * MIB, 100 * MIB), (700 * MIB, 300 * MIB)]);
    assert_eq!((map.height_bytes, map.has_parts), (1000 * MIB, true));
}

#[test]
fn maps_of_recordings_are_complete() {
    let Some(dir) = shared_dir() else { return };
    let files = [
        "gpt2-small.pickle.gz",
        "tiny.expandable.pickle.gz",
        "streams-offload.pickle.gz",
        "random.expandable.gc30.pickle.gz",
    ];
    for file in files {
        let imported = read_trace(&dir.join(file), &ReadOptions::default()).expect("reads");
        let trace = &imported.trace;
        for alloc in ["caching", "expandable", "stitch", "native"] {
            let observed = observed(trace, alloc, 1_000_000);
            check_map(&observed, trace.events.len() as u64, &format!("{file}, {alloc}"));
        }
    }
}

/// A history that begins late: what was there at its start is in the map from the first event on.
#[test]
fn what_was_there_before_is_in_the_map() {
    let Some(dir) = shared_dir() else { return };
    let path = dir.join("llama-1b-varlen.late.pickle.gz");
    let trace = read_trace(&path, &ReadOptions::default()).expect("reads").trace;
    let observed = observed(&trace, "caching", 1_000_000);
    let map = observed.map.as_ref().expect("asked for");
    check_places(map, "late");
    check_levels(&observed, map, "late");
    let start = trace.start.as_ref().expect("begins late");
    let before = map.blocks.iter().filter(|block| block.from_event == 0).count();
    assert!(before >= start.blocks_in_use().count(), "{before}");
}

/// What is not kept is shaded: both together cover what a complete map does.
#[test]
fn nothing_vanishes_from_a_small_map() {
    let trace = random_trace(11);
    let whole = observed(&trace, "caching", 100_000).map.expect("asked for");
    let small = observed(&trace, "caching", 40).map.expect("asked for");
    assert_eq!((small.blocks.len(), small.blocks_total), (40, whole.blocks_total));
    let area = |block: &MapBlock| (block.to_event - block.from_event) * block.size_bytes;
    let kept: BTreeSet<u32> = small.blocks.iter().map(|block| block.block.0).collect();
    let least = small.blocks.iter().map(area).min();
    let others = || whole.blocks.iter().filter(|block| !kept.contains(&block.block.0));
    assert!(others().map(area).max() <= least, "the largest are kept");
    // Each block that is not drawn lies under fields that are shaded.
    let shade = &small.block_shade;
    let field = |block: &MapBlock| {
        let middle = block.position_bytes + block.size_bytes / 2;
        let row = (middle as u128 * shade.rows as u128 / small.height_bytes as u128) as u64;
        let event = (block.from_event + block.to_event) / 2;
        row * shade.columns + event * shade.columns / small.events
    };
    for block in others() {
        assert!(shade.cover[field(block) as usize] > 0, "block {} vanished", block.block.0);
    }
}

// ---- the command -----------------------------------------------------------------------------

fn fraglab(args: &[&str]) -> Output {
    Command::cargo_bin("fraglab").expect("built").args(args).output().expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

const HOSTILE: &str = r#"
mark "step0.<img src=x onerror=alert(2)>"
alloc "</script><script>alert(1)</script>" 30MiB
alloc "\"]]>--><svg onload=alert(3)>" 40MiB
mark step1.forward
free "\"]]>--><svg onload=alert(3)>"
alloc 'b&amp;c' 25MiB
alloc pin 1MiB
"#;

/// A trace in a folder of its own, and where its report goes.
fn setup(name: &str, content: &str) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let trace = dir.path().join(name);
    fs::write(&trace, content).expect("written");
    let report = dir.path().join("report");
    (dir, trace, report)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn names_of_a_trace_are_no_markup() {
    let (_dir, trace, report) = setup("<b>bold.txt", HOSTILE);
    let args = ["run", "--trace", path(&trace), "--alloc", "caching,native", "--quiet"];
    let output = fraglab(&[&args[..], &["--report", path(&report)]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(report.join("index.html")).expect("written");
    assert_eq!(page.matches("<script").count(), 2, "the data and the page's own");
    assert_eq!(page.matches("</script").count(), 2);
    for markup in ["<img", "<svg onload", "<b>bold", "alert(1)</script>", "]]>"] {
        assert!(!page.contains(markup), "{markup} stands in the page");
    }
    assert!(page.contains("&lt;b&gt;bold"), "the name is shown");
    for figure in ["timeline.svg", "map.svg", "comparison.svg"] {
        let svg = fs::read_to_string(report.join(figure)).expect("written");
        assert!(svg.starts_with("<svg width=\"180mm\" height="), "{figure}");
        assert!(!svg.contains("<img") && !svg.contains("<b>") && !svg.contains("<script"));
    }
}

/// Nothing in a page names another place: no address, no source, no import.
#[test]
fn a_page_asks_for_nothing() {
    let (_dir, trace, report) = setup("t.txt", "mark step0.forward\nalloc a 10MiB\n");
    let output = fraglab(&["run", path(&trace), "--report", path(&report), "--quiet"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(report.join("index.html")).expect("written");
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["http:", "https:", " src=", "url(", "@import", "<link", "fetch(", "import("] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'; script-src 'sha256-"));
}

#[test]
fn the_same_question_gives_the_same_bytes() {
    let (_dir, trace, report) = setup("t.txt", HOSTILE);
    let mut pages = Vec::new();
    for threads in ["1", "4"] {
        let args = ["compare", path(&trace), "--alloc", "caching,expandable,native", "--quiet"];
        let args = [&args[..], &["--threads", threads, "--report", path(&report)]].concat();
        assert!(fraglab(&args).status.success());
        let read = |file| fs::read(report.join(file)).expect("written");
        pages.push(["index.html", "timeline.svg", "map.svg", "comparison.svg"].map(read));
    }
    assert!(pages[0] == pages[1]);
}

#[test]
fn a_report_is_a_folder_beside_what_is_read() {
    let (dir, trace, report) = setup("index.html", "alloc a 10MiB\n");
    let refused = |args: &[&str], told: &str| {
        let output = fraglab(args);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
    };
    let trace = path(&trace);
    refused(&["run", trace, "--report", path(dir.path())], "would overwrite the input");
    refused(&["compare", trace, "--report", trace], "is a file, and a report is a folder");
    refused(&["run", trace, "--report", "-"], "name one");
    let json = report.join("index.html");
    refused(&["run", trace, "--report", path(&report), "--json", path(&json)], "two outputs");
    assert_eq!(fs::read_to_string(trace).expect("still there"), "alloc a 10MiB\n");
    // What else is in the folder stays.
    fs::create_dir(&report).expect("made");
    fs::write(report.join("notes.txt"), "mine").expect("written");
    assert!(fraglab(&["run", trace, "--report", path(&report), "-q"]).status.success());
    assert_eq!(fs::read_to_string(report.join("notes.txt")).expect("kept"), "mine");
    let left: Vec<String> = fs::read_dir(&report)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn several_traces_have_a_page_each() {
    let (dir, first, report) = setup("same.txt", "alloc a 10MiB\n");
    fs::create_dir(dir.path().join("b")).expect("made");
    let second = dir.path().join("b/same.txt");
    fs::write(&second, "limit 20MiB\nalloc a 30MiB\n").expect("written");
    let output = fraglab(&["run", path(&first), path(&second), "--report", path(&report), "-q"]);
    assert_eq!(output.status.code(), Some(1), "one is out of memory");
    let index = fs::read_to_string(report.join("index.html")).expect("written");
    for folder in ["same", "same-2"] {
        assert!(index.contains(&format!("href=\"{folder}/index.html\"")), "{index}");
        assert!(report.join(folder).join("index.html").is_file());
    }
    let page = fs::read_to_string(report.join("same-2/index.html")).expect("written");
    assert!(page.contains("runs out of memory"), "the second page says so");
}

/// The figures of the page are those of the result: hand arithmetic on a trace of four blocks.
#[test]
fn a_page_says_the_figures() {
    let content = "alloc a 30MiB\nalloc b 30MiB\nfree a\nalloc c 35MiB\n";
    let (_dir, trace, report) = setup("four.txt", content);
    let output = fraglab(&["run", path(&trace), "--report", path(&report), "-q"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(report.join("index.html")).expect("written");
    // Segments of 30, 30 and 36 MiB (multiples of 2 MiB); 65 MiB live in the end.
    assert!(page.contains("<span title=\"100,663,296 bytes\">96 MiB</span>"));
    assert!(page.contains("<span title=\"68,157,440 bytes\">65 MiB</span>"));
    // 30 MiB free in a whole segment: soft; 1 MiB behind c: hard.
    assert!(page.contains("<span title=\"31,457,280 bytes\">30 MiB</span></td><td>96.8%"));
    assert!(page.contains("<span title=\"1,048,576 bytes\">1 MiB</span></td><td>3.2%"));
}

/// A row is shown for the 25 that strand most, and what the others strand is said.
#[test]
fn pins_left_out_are_added_up() {
    // Each block of 10.5 MiB has a segment of 12 (multiples of 2 MiB), and what is left of it, 1.5,
    // is split off, as it is over 1 MiB: 30 times as much is 45, and 5 times is 7.5.
    let content: String = (0..30).map(|block| format!("alloc b{block} 10.5MiB\n")).collect();
    let (_dir, trace, report) = setup("pins.txt", &content);
    let output = fraglab(&["run", path(&trace), "--report", path(&report), "-q"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(report.join("index.html")).expect("written");
    let all =
        "30 blocks in use, in 30 segments, strand the <span title=\"47,185,920 bytes\">45 MiB";
    assert!(page.contains(all), "{page}");
    let rest = "The 25 blocks that strand most are shown; the other 5 strand \
                <span title=\"7,864,320 bytes\">7.50 MiB</span>.";
    assert!(page.contains(rest), "{page}");
    assert!(!report.join("comparison.svg").exists(), "nothing to compare");
}

/// Names of steps, of two digits too, stand above the time line to its end.
#[test]
fn a_time_line_names_steps_to_the_end() {
    let step = |step| format!("mark step{step}.forward\nalloc a 10MiB\nfree a\n");
    let content: String = (0..24).map(step).collect();
    let (_dir, trace, report) = setup("steps.txt", &content);
    let output = fraglab(&["run", path(&trace), "--report", path(&report), "-q"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let svg = fs::read_to_string(report.join("timeline.svg")).expect("written");
    let told: Vec<u32> =
        svg.lines().filter_map(|line| line.trim().strip_prefix("step")?.parse().ok()).collect();
    // 550 points for 24 steps are 23 a step; "step10" is wider, and two steps have room for it.
    assert_eq!(told, (0..24).step_by(2).collect::<Vec<u32>>());
}

// ---- a real browser ----------------------------------------------------------------------------

/// Chromium, or nothing, which is a failure only where it is required.
fn chromium() -> Option<PathBuf> {
    let named = std::env::var_os("FRAGLAB_CHROMIUM").map(PathBuf::from);
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
    let found = || {
        let folders = std::env::split_paths(&folders);
        let places = folders.flat_map(|folder| names.map(|name| folder.join(name)));
        places.into_iter().find(|place| place.is_file())
    };
    let browser = named.or_else(found);
    let required = std::env::var("FRAGLAB_REQUIRE_CHROMIUM").as_deref() == Ok("1");
    assert!(browser.is_some() || !required, "no Chromium: set FRAGLAB_CHROMIUM to its path");
    if browser.is_none() {
        eprintln!("skipped: no Chromium on PATH, and FRAGLAB_CHROMIUM is not set");
    }
    browser
}

/// Opens a page and gives what became of it, with all that stood on the browser's console.
fn open(browser: &Path, page: &Path, width: u32) -> (String, String) {
    let profile = tempfile::tempdir().expect("a folder");
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--v=0"])
        .args(["--enable-logging=stderr", "--virtual-time-budget=8000"])
        .arg(format!("--window-size={width},1200"))
        .arg(format!("--user-data-dir={}", path(profile.path())))
        .arg(format!("file://{}", path(page)))
        .timeout(std::time::Duration::from_secs(120))
        .output()
        .expect("runs");
    let log = text(&output.stderr);
    let console = log.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned);
    (text(&output.stdout), console.collect::<Vec<_>>().join("\n"))
}

/// A key of the map, which the script makes at once; frames are drawn when somebody looks.
const KEY: &str = "<button type=\"button\" class=\"key\"";

/// What a reader does, told to the page as events; what came of it stands at its end.
const READER: &str = include_str!("html/reader.js");

/// Lets a reader walk about in a page; gives what came of it.
fn walk(browser: &Path, page: &Path, width: u32) -> serde_json::Value {
    let html = fs::read_to_string(page).expect("a page");
    // The page's policy would not let a reader's script in.
    let (before, policy) = html.split_once("<meta http-equiv").expect("a policy");
    let (_, after) = policy.split_once('>').expect("its end");
    // Nobody looks at this page, so that the browser need not draw any frame.
    let frames = "<script>window.requestAnimationFrame = (act) => setTimeout(act, 0);</script>";
    let reader = format!("<script>{READER}</script></body>");
    let html = format!("{before}{frames}{after}").replace("</body>", &reader);
    let read = page.with_file_name("reader.html");
    fs::write(&read, html).expect("written");
    let (dom, console) = open(browser, &read, width);
    assert_eq!(console, "", "errors on the console");
    let told = dom.split_once("<pre id=\"told\">").expect("the reader came to the end").1;
    let told = told.split_once("</pre>").expect("an end").0;
    let told = told.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&told).expect("JSON")
}

fn numbers(told: &serde_json::Value, name: &str) -> Vec<f64> {
    let values = told[name].as_array().unwrap_or_else(|| panic!("{name} in {told}"));
    values.iter().map(|value| value.as_f64().unwrap_or(-1.0)).collect()
}

#[test]
fn a_reader_finds_the_way() {
    let (Some(browser), Some(dir)) = (chromium(), shared_dir()) else { return };
    let temp = tempfile::tempdir().expect("a folder");
    let trace = dir.join("gpt2-small.stacks.pickle.gz");
    let args = ["run", path(&trace), "--alloc", "caching,expandable", "--quiet"];
    let output = fraglab(&[&args[..], &["--report", path(temp.path())]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = temp.path().join("index.html");
    for width in [1400, 400] {
        let (dom, console) = open(&browser, &page, width);
        assert_eq!(console, "", "errors on the console, {width} pixels wide");
        assert!(dom.contains(KEY), "the script ran under the page's own policy");
    }
    let narrow = walk(&browser, &page, 400);
    assert_eq!(narrow["overflow"], 0, "nothing hangs out of a narrow page");
    let told = walk(&browser, &page, 1400);
    let whole = numbers(&told, "whole");
    assert_eq!(whole[..2], [0.0, 7044.0], "all events");
    let inside = |name: &str, sides: usize| {
        let view = numbers(&told, name);
        for side in 0..sides {
            let (all, part) = (&whole[2 * side..2 * side + 2], &view[2 * side..2 * side + 2]);
            assert!(all[0] <= part[0] && part[1] <= all[1], "{name}: {view:?}");
            assert!(part[1] - part[0] < all[1] - all[0], "{name}: {view:?}");
        }
        view
    };
    let wheel = inside("wheel", 2);
    let moved = inside("moved", 2);
    assert!(moved[0] > wheel[0] && moved[2] == wheel[2], "{wheel:?} {moved:?}");
    assert_eq!(numbers(&told, "again"), whole);
    inside("box", 2);
    let line = inside("line", 1);
    assert_eq!(line[2..], whole[2..], "the time line moves the events alone");
    let tips: Vec<&str> =
        told["tips"].as_array().expect("tips").iter().filter_map(|tip| tip.as_str()).collect();
    let of_block = |tip: &&str| tip.contains("modeling_gpt2.py:") && tip.contains("step1.forward");
    assert!(tips.iter().any(of_block), "a block's site and phase: {tips:?}");
    assert!(tips.iter().any(|tip| tip.starts_with("free, but held")), "a hole: {tips:?}");
    assert_eq!(told["modes"], serde_json::json!(["age", "size", "phase", "site"]));
    let (rising, falling) = (numbers(&told, "rising"), numbers(&told, "falling"));
    assert!(rising.len() > 1 && rising.is_sorted(), "{rising:?}");
    assert!(falling.is_sorted_by(|a, b| a >= b) && falling != rising, "{falling:?}");
    assert_eq!(told["sort"], "descending");
    assert_eq!(told["selected"][0], "1");
    assert_ne!(told["selected"][1], told["again"], "another allocator has a map of its own");
    assert_eq!(told["overflow"], 0, "nothing hangs out of the page");
}

#[test]
fn hostile_names_do_nothing_in_a_browser() {
    let Some(browser) = chromium() else { return };
    let (_dir, trace, report) = setup("h.txt", HOSTILE);
    assert!(fraglab(&["run", path(&trace), "--report", path(&report), "-q"]).status.success());
    let (dom, console) = open(&browser, &report.join("index.html"), 1400);
    assert_eq!(console, "");
    assert!(dom.contains(KEY), "the script ran");
    assert!(!dom.contains("onerror=\"") && !dom.contains("<svg onload"), "no markup came to life");
}
