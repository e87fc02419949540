//! Many ranks at a glance: `info --all`, and what an experiment says of a fleet.

use std::collections::BTreeMap;
use std::fs;

use fraglab::experiment::{
    Column, ColumnKind, Decision, Fleet, FleetError, FleetSpec, OwnBest, Rows, Spread, Value,
    fleet, fleet_rows,
};
use fraglab::report::text::{self, Style};
use serde_json::Value as Json;

use crate::common::Rng;
use crate::common::program::*;

const GIB: u64 = 1 << 30;

/// A row of results: rank, setting, capacity, how it ended, reserved and requested peak in GiB, cost
/// of device calls in ns.
type Cell<'a> = (&'a str, &'a str, &'a str, &'a str, u64, u64, u64);

fn results(cells: &[Cell<'_>]) -> Rows {
    let word = |name: &str| Column::new(name, ColumnKind::Word);
    let number = |name: &str| Column::new(name, ColumnKind::Number);
    let columns = vec![
        word("trace"),
        word("label"),
        word("allocator"),
        word("profile"),
        word("capacity"),
        word("limit"),
        word("status"),
        number("reserved_bytes_peak"),
        Column::new("excess_bytes", ColumnKind::Difference),
        Column::new("fragmentation", ColumnKind::Fraction),
        number("device_calls"),
        number("allocator_device_ns"),
    ];
    let row = |&(rank, allocator, capacity, status, reserved, requested, ns): &Cell<'_>| {
        let words = [rank, allocator, allocator, "h200", capacity, "auto", status];
        let mut row: Vec<Value> = words.map(Value::of_word).to_vec();
        let fragmentation = 1.0 - requested as f64 / reserved as f64;
        row.extend([
            Value::Number(reserved * GIB),
            Value::Difference((reserved * GIB) as i64 - (requested * GIB) as i64),
            Value::Fraction(fragmentation),
            Value::Number(ns / 10),
            Value::Number(ns),
        ]);
        row
    };
    Rows { columns, rows: cells.iter().map(row).collect() }
}

fn of(cells: &[Cell<'_>]) -> Fleet {
    fleet(&results(cells), &FleetSpec::default()).expect("a fleet")
}

/// A text with its lines joined.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Four ranks; under `caching` one runs out of memory, under `expandable` none.
const FOUR: [Cell<'static>; 8] = [
    ("rank0", "caching", "80GiB", "ok", 50, 40, 300),
    ("rank1", "caching", "80GiB", "ok", 70, 40, 500),
    ("rank2", "caching", "80GiB", "oom", 80, 79, 900),
    ("rank3", "caching", "80GiB", "ok", 48, 40, 100),
    ("rank0", "expandable", "80GiB", "ok", 44, 40, 3000),
    ("rank1", "expandable", "80GiB", "ok", 45, 40, 2000),
    ("rank2", "expandable", "80GiB", "ok", 79, 78, 4000),
    ("rank3", "expandable", "80GiB", "ok", 49, 40, 1000),
];

#[test]
fn four_ranks_by_hand() {
    let fleet = of(&FOUR);
    let [group] = &fleet.groups[..] else { panic!("one device") };
    assert!(group.names.is_empty(), "nothing tells devices apart");
    assert_eq!(group.ranks, 4);
    let [caching, expandable] = &group.settings[..] else { panic!("two settings") };
    assert_eq!((caching.ok, &caching.oom[..], caching.failed.len()), (3, &["rank2".into()][..], 0));
    let peaks = |min, median, p95, p99, max| {
        let [min, median, p95, p99, max] = [min, median, p95, p99, max].map(|gib: u64| gib * GIB);
        Some(Spread { min, median, p95, p99, max })
    };
    // Nearest ranks: of three the second, of four the second; 95 % of four are four.
    assert_eq!(caching.reserved, peaks(48, 50, 70, 70, 70));
    assert_eq!(expandable.reserved, peaks(44, 45, 79, 79, 79));
    assert_eq!((&*caching.worst_rank, &*expandable.worst_rank), ("rank1", "rank2"));
    assert_eq!(caching.reserved_bytes_sum, 168 * GIB);
    assert_eq!(expandable.reserved_bytes_sum, 217 * GIB);
    assert_eq!(caching.excess_bytes_sum, 48 * GIB as i64);
    // Of the ranks that both run: 18 of 48 GiB are left.
    assert_eq!(caching.waste_removed, Some(0.0));
    assert_eq!(expandable.waste_removed, Some(1.0 - 18.0 / 48.0));
    assert_eq!(caching.fragmentation_worst, Some((1.0 - 40.0 / 70.0, "rank1".to_owned())));
    assert_eq!(caching.fragmentation_median, Some(1.0 - 40.0 / 50.0));
    assert_eq!((caching.device_ns_sum, caching.device_calls_sum), (900, 90));
    assert_eq!(expandable.device_ns_worst, Some((4000, "rank2".to_owned())));
    assert_eq!((&group.best[..], group.next), (&[1][..], Some(0)));
    assert_eq!(group.decided_by, Decision::Fits);
    // rank3 holds 1 GiB less under caching.
    assert_eq!(group.own_best, OwnBest { ranks: 1, rescued: 0, saved_bytes: GIB });
    let text = text::fleet(&fleet, Style::default());
    for part in [
        "fleet of 4 ranks",
        "best for the fleet: expandable: 4 of 4 ranks run to their end, 3 under the next",
        "1 of 4 ranks would leave expandable: 1 GiB less would be held in all",
        "out of memory under caching: rank2",
        // 6000 of 900 ns, of the three ranks that both run.
        "; its device calls take 6.7 times as long as under caching",
        "sums are over different ranks",
    ] {
        assert!(words(&text).contains(part), "{part}\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let rows = fleet_rows(&fleet);
    assert_eq!(rows.rows.len(), 2);
    assert_eq!(rows.get(&rows.rows[1], "is_best"), &Value::Number(1));
    assert_eq!(rows.get(&rows.rows[0], "reserved_max_over_min"), &Value::Fraction(70.0 / 48.0));
    assert_eq!(rows.get(&rows.rows[0], "reserved_bytes_spread"), &Value::Number(22 * GIB));
}

#[test]
fn the_best_is_told_by_the_first_figure_that_differs() {
    let decided = |a: [(u64, u64); 2], b: [(u64, u64); 2]| {
        let cell = |setting, rank, (reserved, ns)| (rank, setting, "auto", "ok", reserved, 1, ns);
        let fleet = of(&[
            cell("a", "r0", a[0]),
            cell("a", "r1", a[1]),
            cell("b", "r0", b[0]),
            cell("b", "r1", b[1]),
        ]);
        (fleet.groups[0].best.clone(), fleet.groups[0].decided_by)
    };
    // One rank that needs much is worse than two that need more together.
    let worst = decided([(9, 1), (1, 1)], [(8, 9), (8, 9)]);
    assert_eq!(worst, (vec![1], Decision::WorstReserved));
    assert_eq!(decided([(9, 9), (1, 9)], [(9, 1), (2, 1)]), (vec![0], Decision::SumReserved));
    assert_eq!(decided([(9, 2), (1, 2)], [(1, 1), (9, 2)]), (vec![1], Decision::DeviceTime));
    assert_eq!(decided([(9, 2), (1, 2)], [(1, 2), (9, 2)]), (vec![0, 1], Decision::Tie));
    let tie = of(&[("r", "a", "auto", "ok", 2, 1, 1), ("r", "b", "auto", "ok", 2, 1, 1)]);
    let told = text::fleet(&tie, Style::default());
    assert!(told.contains("no setting is best: a, b come out the same"), "{told}");
}

/// Two settings that come out the same beat a third, and two ranks hold the most under each.
#[test]
fn what_ties_is_told_with_what_it_beats() {
    let mut cells = Vec::new();
    for (setting, reserved) in [("caching", 9), ("native", 5), ("bfc", 5)] {
        cells.extend(["r0", "r1"].map(|rank| (rank, setting, "auto", "ok", reserved, 4, 10)));
        cells.push(("r2", setting, "auto", "ok", 4, 4, 10));
    }
    let fleet = of(&cells);
    let group = &fleet.groups[0];
    assert_eq!((&group.best[..], group.next), (&[1, 2][..], Some(0)));
    assert_eq!((group.decided_by, group.best_of_pytorch), (Decision::WorstReserved, Some(0)));
    let told = words(&text::fleet(&fleet, Style::default()));
    let best = "best for the fleet: native and bfc (the same): their worst rank, r0 and 1 more, \
                holds 5 GiB, 4 GiB less than the worst under the next best, caching; of the \
                settings of PyTorch's own allocator caching is best: 3 of 3 ranks run to their \
                end, the worst holds 9 GiB";
    assert!(told.contains(best), "{told}");
    assert!(!told.contains("device calls take"), "they cost the same: {told}");
    assert!(!told.contains("different ranks"), "{told}");
}

#[test]
fn ranks_that_fit_only_by_giving_memory_back_are_counted() {
    let mut rows = results(&FOUR);
    rows.columns.push(Column::new("alloc_retries", ColumnKind::Number));
    for (row, retries) in rows.rows.iter_mut().zip([0, 3, 7, 1, 0, 0, 0, 0]) {
        row.push(Value::Number(retries));
    }
    let fleet = fleet(&rows, &FleetSpec::default()).expect("a fleet");
    let caching = &fleet.groups[0].settings[0];
    // rank2 ran out of memory all the same.
    assert_eq!((caching.retries_sum, caching.retry_ranks), (4, 2));
    let told = text::fleet(&fleet, Style::default());
    let sentence = "under caching 2 ranks go on only by giving cached memory back, with 4 retries";
    assert!(words(&told).contains(sentence), "{told}");
    assert!(told.contains("retried") && !told.contains("under expandable 0"), "{told}");
    let table = fleet_rows(&fleet);
    assert_eq!(table.get(&table.rows[0], "alloc_retries_sum"), &Value::Number(4));
    assert_eq!(table.get(&table.rows[0], "alloc_retries_ranks"), &Value::Number(2));
}

#[test]
fn settings_on_different_devices_do_not_compete() {
    let mut cells = FOUR.to_vec();
    cells.push(("rank0", "caching", "40GiB", "oom", 40, 40, 1));
    cells.push(("rank0", "expandable", "40GiB", "failed", 1, 1, 1));
    let fleet = of(&cells);
    let names: Vec<_> = fleet.groups.iter().map(|group| group.names.clone()).collect();
    let capacity = |size: &str| vec![("capacity".to_owned(), size.to_owned())];
    assert_eq!(names, [capacity("80GiB"), capacity("40GiB")]);
    assert_eq!((fleet.groups[0].ranks, fleet.groups[1].ranks), (4, 1));
    let small = &fleet.groups[1];
    assert_eq!(small.settings[0].reserved, None);
    assert_eq!(small.settings[1].failed, ["rank0"]);
    assert_eq!((small.decided_by, &small.best[..]), (Decision::NoneFits, &[][..]));
    let told = words(&text::fleet(&fleet, Style::default()));
    assert!(told.contains("no rank runs to its end under any setting"), "{told}");
    let rows = fleet_rows(&fleet);
    let is_best = |at: usize| rows.get(&rows.rows[at], "is_best").clone();
    assert_eq!((is_best(2), is_best(3)), (Value::Number(0), Value::Number(0)));
    // A rank without a row under a setting has no result there.
    let missing = of(&FOUR[..7]);
    assert_eq!(missing.groups[0].settings[1].failed, ["rank3"]);
}

#[test]
fn a_rank_has_one_row_under_a_setting() {
    let twice = [FOUR[0], FOUR[1], FOUR[0]];
    let error = fleet(&results(&twice), &FleetSpec::default()).expect_err("twice");
    assert!(error.to_string().contains("several rows have trace = rank0 under caching"), "{error}");
    let none = FleetSpec {
        filters: vec!["trace=none".parse().expect("a filter")],
        ..FleetSpec::default()
    };
    assert_eq!(fleet(&results(&FOUR), &none), Err(FleetError::Nothing));
    let one = FleetSpec {
        filters: vec!["trace=rank1".parse().expect("a filter")],
        baseline: "allocator=expandable".parse().expect("a filter"),
        ..FleetSpec::default()
    };
    let fleet = fleet(&results(&FOUR), &one).expect("a fleet");
    assert_eq!(fleet.groups[0].ranks, 1);
    // 30 GiB of excess against 5.
    assert_eq!(fleet.groups[0].settings[0].waste_removed, Some(1.0 - 30.0 / 5.0));
}

/// The smallest value of which at least `percent` of a hundred are no larger.
fn percentile(values: &[u64], percent: usize) -> u64 {
    let enough = |value: &&u64| {
        values.iter().filter(|other| other <= value).count() * 100 >= values.len() * percent
    };
    *values.iter().filter(enough).min().expect("one")
}

#[test]
fn random_fleets_are_as_a_slow_model_says() {
    let mut rng = Rng(7);
    for _ in 0..60 {
        let (ranks, settings) = (1 + rng.below(130), 1 + rng.below(4));
        let names: Vec<String> = (0..ranks).map(|rank| format!("rank{rank}")).collect();
        let allocators = ["caching", "expandable", "stitch", "bfc"];
        let mut cells = Vec::new();
        for rank in &names {
            for allocator in &allocators[..settings] {
                let status = if rng.below(40) == 0 { "oom" } else { "ok" };
                // Few different values, so that there are ties.
                let (reserved, ns) = (10 + rng.below(6) as u64, rng.below(3) as u64);
                cells.push((rank.as_str(), *allocator, "auto", status, reserved, 10, ns));
            }
        }
        let fleet = of(&cells);
        let group = &fleet.groups[0];
        let of_setting = |allocator: &str| -> Vec<Cell<'_>> {
            let fits = |cell: &&Cell<'_>| cell.1 == allocator && cell.3 == "ok";
            cells.iter().filter(fits).copied().collect()
        };
        // By what settings are compared: smaller is better, in this order.
        let mut scores = Vec::new();
        for (at, allocator) in allocators[..settings].iter().enumerate() {
            let ok = of_setting(allocator);
            let reserved: Vec<u64> = ok.iter().map(|cell| cell.4 * GIB).collect();
            let setting = &group.settings[at];
            assert_eq!((setting.ok, setting.oom.len()), (ok.len(), ranks - ok.len()));
            let worst = reserved.iter().max().copied();
            if let Some(spread) = setting.reserved {
                let found = [spread.min, spread.median, spread.p95, spread.p99, spread.max];
                assert_eq!(found, [0, 50, 95, 99, 100].map(|at| percentile(&reserved, at)));
                let holders: Vec<_> =
                    ok.iter().filter(|cell| Some(cell.4 * GIB) == worst).collect();
                assert_eq!(setting.worst_rank, holders[0].0);
                assert_eq!(setting.worst_rank_ties, holders.len() - 1);
            }
            let sum: u64 = reserved.iter().sum();
            let ns: u64 = ok.iter().map(|cell| cell.6).sum();
            assert_eq!((setting.reserved_bytes_sum, setting.device_ns_sum), (sum, ns));
            scores.push((ranks - ok.len(), worst.unwrap_or(u64::MAX), sum, ns));
        }
        let least = scores.iter().min().expect("one");
        let best: Vec<usize> = (0..settings).filter(|&at| scores[at] == *least).collect();
        if scores.iter().all(|score| score.0 == ranks) {
            assert_eq!((&group.best[..], group.decided_by), (&[][..], Decision::NoneFits));
            continue;
        }
        assert_eq!(group.best, best);
        // The next is the least of the others.
        let next = scores.iter().filter(|score| *score > least).min();
        assert_eq!(group.next.map(|at| scores[at]), next.copied());
        // Rank by rank: what it holds under the fleet's setting, and the least it could.
        let mut own = OwnBest::default();
        for rank in &names {
            let held: BTreeMap<&str, u64> = allocators[..settings]
                .iter()
                .filter_map(|allocator| {
                    let cell = of_setting(allocator).into_iter().find(|cell| cell.0 == rank)?;
                    Some((*allocator, cell.4 * GIB))
                })
                .collect();
            let Some(&least) = held.values().min() else { continue };
            match held.get(allocators[best[0]]) {
                None => {
                    own.ranks += 1;
                    own.rescued += 1;
                }
                Some(&now) if now > least => {
                    own.ranks += 1;
                    own.saved_bytes += now - least;
                }
                Some(_) => {}
            }
        }
        assert_eq!(group.own_best, own);
    }
}

/// Twelve ranks: of three kinds, told apart by the size of one block.
fn ranks() -> Folder {
    let folder = Folder::new();
    for rank in 0..12 {
        let mib = [30, 30, 40, 50][rank % 4];
        folder.file(
            &format!("job.rank{rank}.txt"),
            &format!("capacity 1GiB\nalloc a 60MiB\nfree a\nalloc b {mib}MiB\nalloc c {mib}MiB\n"),
        );
    }
    folder.file("README.md", "# Ranks\n");
    folder.file("job.rank0.truth.json", "{}");
    fs::create_dir(folder.path("more")).expect("made");
    folder.file("more/late.txt", "capacity 64MiB\nalloc a 100MiB\n");
    folder
}

#[test]
fn a_folder_of_traces_is_one_table() {
    let folder = ranks();
    let output = fraglab(&["info", "--all", &folder.path("")]);
    assert_code(&output, 0);
    let text = stdout(&output);
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["trace", "events", "request", "caching", "frag", "like"]);
    let names: Vec<&str> = lines[2..14].iter().map(|line| line[0]).collect();
    let expected: Vec<String> = (0..12).map(|rank| format!("job.rank{rank}")).collect();
    assert_eq!(names, expected, "numbers in their own order");
    // 30 MiB twice fit into the 60 MiB that are free; 40 MiB take 60 and 40 more, 50 as well.
    let row = |rank: usize| lines[2 + rank][1..].to_vec();
    assert_eq!(row(0), ["4", "60.00", "60.00", "0.0%", "A"]);
    assert_eq!(row(2), ["4", "80.00", "100.00", "20.0%", "B"]);
    assert_eq!(row(3), ["4", "100.00", "110.00", "9.1%", "C"]);
    assert_eq!(lines[14], ["smallest", "4", "60.00", "60.00", "0.0%"]);
    assert_eq!(lines[15], ["median", "4", "60.00", "60.00", "0.0%"]);
    assert_eq!(lines[16], ["largest", "4", "100.00", "110.00", "20.0%"]);
    for part in [
        "12 traces, 48 events in all, source text\n",
        "3 different traces; alike: A 6, B 3, C 3\n",
        "passed over: 2 files that hold no trace\n",
        "not looked into: 1 folder inside, which --recursive takes in\n",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let output = fraglab(&["info", "--all", "--recursive", "--sort", "reserved", &folder.path("")]);
    assert_code(&output, 0);
    let text = stdout(&output);
    assert!(text.lines().nth(2).expect("a row").starts_with("job.rank3 "), "{text}");
    assert!(text.contains("OOM") && text.contains("1 trace out of memory"), "{text}");
}

#[test]
fn the_table_is_also_json_and_csv() {
    let folder = ranks();
    let csv = folder.path("ranks.csv");
    let output = fraglab(&["info", "--all", "--json", "--csv", &csv, &folder.path("")]);
    assert_code(&output, 0);
    let objects = json(&output);
    let objects = objects.as_array().expect("an array");
    assert_eq!(objects.len(), 12);
    let third = &objects[6];
    assert_eq!(third["name"], "job.rank6");
    assert_eq!(third["status"], "ok");
    assert_eq!(third["requested_bytes_peak"], 80 << 20);
    assert_eq!(third["reserved_bytes_peak"], 100 << 20);
    assert_eq!(third["excess_bytes"], 20 << 20);
    assert_eq!(third["same_as"], objects[2]["file"]);
    assert_eq!(third["fingerprint"], objects[2]["fingerprint"]);
    assert_eq!(objects[2]["same_as"], Json::Null);
    assert_eq!(third["recorded_reserved_bytes_peak"], Json::Null);
    let mut reader = csv::Reader::from_path(&csv).expect("there");
    let names: Vec<String> = reader.headers().expect("names").iter().map(str::to_owned).collect();
    let mut keys: Vec<&String> = third.as_object().expect("an object").keys().collect();
    keys.sort();
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort();
    assert_eq!(keys, sorted);
    assert_eq!(reader.records().count(), 12);
}

#[test]
fn files_that_cannot_be_read_are_a_few_lines_and_the_others_are_shown() {
    let folder = ranks();
    for number in 0..13 {
        folder.file(&format!("wrong{number}.txt"), "alloc a\n");
    }
    let output = fraglab(&["info", "--all", &folder.path("")]);
    assert_code(&output, 2);
    let told = stderr(&output);
    let errors = told.lines().filter(|line| line.contains("wrong")).count();
    assert_eq!(errors, 10, "{told}");
    assert!(told.contains("fraglab: and 3 more like these"), "{told}");
    assert!(stdout(&output).contains("12 traces"), "{}", stdout(&output));
    let hint = assert_one_error(&fraglab(&["info", &folder.path("")]));
    assert!(hint.contains("is a folder, expected a trace: `fraglab info --all"), "{hint}");
    let none = assert_one_error(&fraglab(&["info", "--all", &folder.path("none")]));
    assert!(none.contains("none"), "{none}");
}

#[test]
fn every_command_that_takes_a_trace_says_what_to_do_with_a_folder() {
    let folder = Folder::new();
    folder.file("one.txt", "alloc a 1MiB\n");
    let (path, out) = (folder.path(""), folder.path("out.json"));
    let commands: [&[&str]; 9] = [
        &["run", "--trace", &path, "--alloc", "caching"],
        &["compare", "--trace", &path],
        &["advise", &path],
        &["explain", &path],
        &["verify", &path],
        &["convert", &path, &out],
        &["plan", &path],
        &["diff", &path, &path],
        &["anonymize", &path, &out],
    ];
    for command in commands {
        let output = fraglab(command);
        assert_code(&output, 2);
        let told = stderr(&output);
        let expected =
            format!("fraglab: {path}: is a folder, expected a trace: `fraglab info --all {path}`");
        assert!(told.starts_with(&expected) && told.lines().count() == 1, "{command:?}: {told}");
    }
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_read_takes_nothing_from_the_others() {
    use std::os::unix::fs::PermissionsExt as _;

    let folder = Folder::new();
    folder.file("one.txt", "alloc a 1MiB\n");
    let (good, closed) = (folder.path("one.txt"), folder.path("closed"));
    fs::create_dir(&closed).expect("made");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).expect("closed");
    if fs::read_dir(&closed).is_ok() {
        return; // The superuser reads everything.
    }
    for paths in [[&good, &closed], [&closed, &good]] {
        let output = fraglab(&["info", "--all", paths[0], paths[1]]);
        assert_code(&output, 2);
        let told = stderr(&output);
        assert!(told.contains(&closed) && told.lines().count() == 1, "{told}");
        assert!(stdout(&output).contains("1 trace, 1 event in all"), "{}", stdout(&output));
    }
    assert_one_error(&fraglab(&["info", "--all", &closed]));
    assert_one_error(&fraglab(&["merge-ranks", &good, &closed, "-o", &folder.path("m.json")]));
}

const DESCRIPTION: &str = r#"
name = "ranks"
traces = ["job.rank*.txt"]
allocators = ["caching", "native"]
[fleet]
"#;

/// Before any cell is run: a long run must not end with nothing.
#[test]
fn a_fleet_that_cannot_be_is_refused_before_it_runs() {
    let folder = ranks();
    let error = |fleet: &str| {
        let toml = folder.file("ranks.toml", &format!("{DESCRIPTION}{fleet}\n"));
        let cache = folder.path("cache");
        let output = fraglab(&["experiment", &toml, "-o", &folder.path("out"), "--cache", &cache]);
        let told = assert_one_error(&output);
        assert!(!fs::exists(folder.path("out")).expect("known"), "{told}");
        told
    };
    let told = error("baseline = \"allocator=expandable\"");
    let none =
        "no setting has allocator=expandable, its baseline: the settings are caching, native";
    assert!(told.contains(none), "{told}");
    let told = error("filter = [\"allocator=stitch\"]");
    assert!(told.contains("no row of the results passes its filter"), "{told}");
    let told = error("over = \"allocator\"");
    assert!(told.contains("several rows have allocator = caching"), "{told}");
    let twins = fraglab(&["experiment", &folder.path(""), "--alloc", "caching,caching", "--fresh"]);
    assert!(assert_one_error(&twins).contains("--alloc: caching is named twice"));
}

#[test]
fn an_experiment_sums_up_its_ranks() {
    let folder = ranks();
    let toml = folder.file("ranks.toml", DESCRIPTION);
    let (out, cache) = (folder.path("out"), folder.path("cache"));
    let run = |more: &[&str]| {
        fraglab(&[&["experiment", &toml, "-o", &out, "--cache", &cache], more].concat())
    };
    let output = run(&[]);
    assert_code(&output, 0);
    let text = stdout(&output);
    // Under `native` each rank holds what it asks for: 100 MiB at worst, 110 under `caching`.
    let best = "best for the fleet: native: its worst rank, job.rank3 and 2 more, holds 100 MiB, \
                10 MiB less";
    assert!(words(&text).contains(best), "{text}");
    let read = |name: &str| fs::read_to_string(format!("{out}/{name}")).expect(name);
    let report = read("ranks.md");
    assert!(report.contains("\n## A fleet of 12 ranks\n"), "{report}");
    assert!(report.contains(&format!("- {best}")), "{report}");
    let csv = read("ranks-fleet.csv");
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let row: BTreeMap<String, String> = reader.deserialize().next().expect("a row").expect("read");
    assert_eq!((&*row["label"], &*row["is_best"], &*row["ok"]), ("caching", "0", "12"));
    assert_eq!(row["reserved_bytes_peak_max"], (110u64 << 20).to_string());
    // 6 x 60 + 3 x 100 + 3 x 110 MiB.
    assert_eq!(row["reserved_bytes_sum"], (990u64 << 20).to_string());
    assert_eq!(row["reserved_worst_rank"], "job.rank3");
    // Drawn again from the CSV alone it is the same.
    assert_code(&run(&["--figures-only"]), 0);
    assert_eq!((read("ranks.md"), read("ranks-fleet.csv")), (report, csv));
    folder.file("ranks.toml", &DESCRIPTION.replace("[fleet]", "[fleet]\nover = \"rank\""));
    let told = stderr(&run(&["--list"]));
    assert!(told.contains("ranks.toml:6:8: \"rank\" is no column of the results"), "{told}");
    folder.file("ranks.toml", &DESCRIPTION.replace("[fleet]", "[fleet]\novr = \"trace\""));
    assert!(stderr(&run(&["--list"])).contains("did you mean over?"));
}
