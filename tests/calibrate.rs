//! `fraglab calibrate`: profiles that ship against hand arithmetic and published figures, and a GPU
//! that is not there, whose calls take a known time.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fraglab::device::{CostProfile, DeviceCall};
use fraglab::units::MIB;
use serde_json::Value;

use crate::common::fake_driver;
use crate::common::program::*;

/// What the fake driver says when everything came back.
const NOTHING: &str = "mallocs 0 handles 0 mappings 0 reservations 0 contexts 0 modules 0 \
                       streams 0 events 0";

/// `fraglab calibrate` on the fake driver, which is told these settings.
fn command(driver: &Path, settings: &[(&str, &str)], args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fraglab"));
    command.arg("calibrate").args(args).env("LD_LIBRARY_PATH", driver);
    for name in ["MEMORY", "DEVICES", "LATENCY", "FAIL", "LEAK_CHECK", "VMM"] {
        command.env_remove(format!("FAKE_CUDA_{name}"));
    }
    for (name, value) in settings {
        command.env(format!("FAKE_CUDA_{name}"), value);
    }
    command
}

fn calibrate(driver: &Path, settings: &[(&str, &str)], args: &[&str]) -> Output {
    command(driver, settings, args).output().expect("runs")
}

mod show {
    use super::*;

    /// From the points of device_latency.h200.csv, in microseconds. A malloc of 2 GiB: 509.38.
    ///
    /// | piece | pieces | create | map | set_access |
    /// |---|---|---|---|---|
    /// | 2 MiB | 1024 | 13.78 | 1.27 | 28.33 |
    /// | 128 MiB | 16 | 14.79 | 1.35 | 47.24 |
    /// | 1 GiB | 2 | 190.95 | 1.87 | 84.56 |
    ///
    /// and 4.95 for the addresses of 2 GiB.
    #[test]
    fn the_ratios_of_a_profile_are_a_hand_calculation() {
        let shown = json(&fraglab(&["calibrate", "--show", "h200", "--json", "-"]));
        let pieces =
            [(1024.0, 13.78, 1.27, 28.33), (16.0, 14.79, 1.35, 47.24), (2.0, 190.95, 1.87, 84.56)];
        for (row, (count, create, map, access)) in pieces.into_iter().enumerate() {
            let ratios = &shown["ratios"][row];
            let near = |key: &str, us: f64| {
                let got = ratios[key].as_f64().expect("a number");
                assert!((got - us / 509.38).abs() < 1e-9, "{row} {key}: {got}");
            };
            near("address_reserve", 4.95);
            near("create", count * create);
            near("map", count * map);
            near("set_access", count * access);
            near("total", 4.95 + count * (create + map + access));
        }
        let text = stdout(&fraglab(&["calibrate", "--show", "h200"]));
        for line in [
            "2 GiB built of pieces, in units of one malloc of 2 GiB (509.4 µs)",
            "create            27.7    18.1     0.46    0.89      0.75    0.79",
            "set_access        57.0    96.8     1.48     8.2      0.33     0.7",
            "total             87.2   115.4     2.00     9.1      1.10     1.5",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    /// GMLake, Table 1, at the precision printed; the first total adds up to 115.6.
    #[test]
    fn the_derived_profile_gives_the_published_table() {
        let shown = json(&fraglab(&["calibrate", "--show", "a100-80g", "--json", "-"]));
        let published = [
            [(0.003, 3), (18.1, 1), (0.70, 2), (96.8, 1), (115.6, 1)],
            [(0.003, 3), (0.89, 2), (0.01, 2), (8.2, 1), (9.1, 1)],
            [(0.002, 3), (0.79, 2), (0.002, 3), (0.7, 1), (1.5, 1)],
        ];
        let keys = ["address_reserve", "create", "map", "set_access", "total"];
        for (row, published) in published.into_iter().enumerate() {
            for (key, (ratio, decimals)) in keys.into_iter().zip(published) {
                let got = shown["ratios"][row][key].as_f64().expect("a number");
                let half_step = 0.5 * 10f64.powi(-decimals) + 1e-6;
                assert!((got - ratio).abs() <= half_step, "{row} {key}: {got}, not {ratio}");
            }
        }
        let text = stdout(&fraglab(&["calibrate", "--show", "a100-80g"]));
        assert!(text.starts_with("a100-80g: derived for "), "{text}");
    }

    #[test]
    fn what_is_no_profile_is_one_line() {
        let folder = Folder::new();
        let table = |malloc: &str| {
            let rest = DeviceCall::ALL.map(|call| format!("\"{}\": [[2, 1]]", call.name()));
            format!(
                "{{\"name\": \"p\", \"gpu\": \"g\", \"driver\": \"d\", \"date\": \"t\", \
                 \"method\": \"m\", \"calls\": {{{}, \"malloc\": {malloc}}}}}",
                rest[1..].join(", ")
            )
        };
        for (text, said) in [
            (String::new(), "not a cost profile"),
            ("[1, 2]".to_owned(), "not a cost profile"),
            (table("[[2, NaN]]"), "not a cost profile"),
            (table("[[2, 1e999]]"), "not a cost profile"),
            (table("[]"), "the points of malloc"),
            (table("[[4, 1], [2, 1]]"), "the points of malloc"),
            (table("[[2, -1]]"), "the points of malloc"),
            (table("[[2, 1e300]]"), "the points of malloc"),
            (table("[[1e300, 1]]"), "the points of malloc"),
        ] {
            let file = folder.file("bad.json", &text);
            for args in [
                &["calibrate", "--show", &file][..],
                &["run", "--profile", &file, "--trace", "no-such-file"],
            ] {
                let error = assert_one_error(&fraglab(args));
                assert!(error.contains("bad.json") && error.contains(said), "{error}");
            }
        }
        assert_one_error(&fraglab(&["calibrate", "--show", "b300"]));
        let file = folder.file("good.json", &table("[[2, 1]]"));
        assert_code(&fraglab(&["calibrate", "--show", &file]), 0);
        assert_one_error(&fraglab(&["calibrate", "--show", &file, "--json", &file]));
    }
}

/// Microseconds for a call, and for each MiB of it, as fake_cuda.c has them.
const LAW: [(DeviceCall, f64, f64); 9] = [
    (DeviceCall::Malloc, 40.0, 0.25),
    (DeviceCall::Free, 30.0, 0.15),
    (DeviceCall::AddressReserve, 3.0, 0.0),
    (DeviceCall::AddressFree, 2.0, 0.0),
    (DeviceCall::Create, 8.0, 0.05),
    (DeviceCall::Release, 6.0, 0.05),
    (DeviceCall::Map, 1.0, 0.0),
    (DeviceCall::Unmap, 15.0, 0.01),
    (DeviceCall::SetAccess, 20.0, 0.03),
];

/// A clock says no less than what was waited for; how much more, the machine decides.
#[test]
fn a_gpu_whose_calls_take_a_known_time() {
    let Some(driver) = fake_driver::library_dir() else { return };
    let folder = Folder::new();
    let [file, csv, all, leaks] =
        ["p.json", "all.csv", "all.json", "leaks"].map(|n| folder.path(n));
    let args = ["-o", &file, "--csv", &csv, "--json", &all, "--repeats", "3", "--name", "mine"];
    let args: Vec<&str> = args.into_iter().chain(["--max-size", "128MiB"]).collect();
    let output = calibrate(driver, &[("LATENCY", "on"), ("LEAK_CHECK", &leaks)], &args);
    assert_code(&output, 0);
    assert!(stdout(&output).starts_with("mine: measured on Fake GPU 0, driver "), "{output:?}");
    let leaks = fs::read_to_string(leaks).expect("written");
    assert!(leaks.lines().all(|line| line.ends_with(NOTHING)), "{leaks}");

    let profile = CostProfile::from_json(&fs::read_to_string(&file).expect("written"));
    let profile = profile.expect("a profile");
    for (call, us, us_per_mib) in LAW {
        for mib in [2, 20, 128] {
            let least_ns = 1000.0 * (us + us_per_mib * mib as f64);
            let got_ns = profile.median_ns(call, mib * MIB);
            assert!(profile.cost_ns(call, mib * MIB) >= got_ns);
            // Costs are written in whole nanoseconds.
            assert!(got_ns >= least_ns - 1.0, "{call:?} {mib} MiB: {got_ns}, under {least_ns}");
        }
        let points = &profile.calls[&call];
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "{points:?}");
        assert_eq!(points.last().map(|point| point.0), Some(128.0), "{call:?}");
    }
    assert_eq!(profile.fraglab_version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(profile.date.len(), "2026-01-01".len());
    assert_eq!(profile.tails.len(), DeviceCall::ALL.len());

    check_csv(&fs::read_to_string(csv).expect("written"));
    let all: Value =
        serde_json::from_str(&fs::read_to_string(all).expect("written")).expect("JSON");
    assert_eq!(all["schema_version"], 1);
    assert_eq!(all["profile"]["name"], "mine");
    assert_eq!(all["measured"]["rounds"], 3);
    assert!(all["wall"]["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));

    let trace = folder.file("t.txt", "alloc a 128MiB\nfree a\n");
    let run = ["run", "--trace", &trace, "--alloc", "native", "--profile", &file, "--json", "-"];
    let run = json(&fraglab(&run));
    assert_eq!(run["device"]["profile"], "mine");
    // One malloc and one free.
    let device_ns = run["time"]["allocator_device_ns"].as_u64().expect("a number");
    assert!(device_ns >= 72_000 + 49_200, "{run}");
}

/// Every case is there, and its figures are in order.
fn check_csv(text: &str) {
    let mut lines = text.lines();
    let head = "case,call,size_bytes,pieces,samples,median_us,p10_us,p90_us,mean_us,max_us";
    assert_eq!(lines.next(), Some(head));
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    for case in ["mixed", "settled", "whole"] {
        assert!(rows.iter().any(|row| row[0] == case), "{case}");
    }
    for row in &rows {
        assert!(DeviceCall::from_name(row[1]).is_some(), "{row:?}");
        let us: Vec<f64> = row[5..].iter().map(|us| us.parse().expect("a number")).collect();
        assert!(us[1] <= us[0] && us[0] <= us[2] && us[2] <= us[4] && us[3] <= us[4], "{row:?}");
    }
    // 7 sizes under 2 MiB, 14 from 2 to 128 MiB, and access to all pieces of a range in one call: 8 of
    // 2, 4 and 8 MiB, 6 of 10, 4 of 16, 3 of 20, 2 of 22, 24 and 32.
    let count =
        |case: &str, call: &str| rows.iter().filter(|row| row[0] == case && row[1] == call).count();
    assert_eq!((count("mixed", "malloc"), count("mixed", "create")), (21, 14));
    assert_eq!((count("whole", "set_access"), count("whole", "unmap")), (9, 9));
}

#[test]
fn what_does_not_fit_is_told() {
    let Some(driver) = fake_driver::library_dir() else { return };
    let folder = Folder::new();
    let file = folder.path("p.json");
    let args = ["-o", &file, "--repeats", "2"];
    let small = calibrate(driver, &[("MEMORY", "1073741824")], &args);
    assert_code(&small, 0);
    let told = stderr(&small);
    // Half of it may be used: two pieces of 256 MiB just fit; the next size is 384 MiB.
    for part in ["mallocs from 2 x 384 MiB on", "pieces from 2 x 384 MiB on"] {
        assert!(told.contains(part), "{told}");
    }
    assert!(CostProfile::from_json(&fs::read_to_string(&file).expect("written")).is_ok());

    fs::remove_file(&file).expect("there");
    let tiny = assert_one_error(&calibrate(driver, &[("MEMORY", "4194304")], &args));
    assert!(tiny.contains("too little to measure"), "{tiny}");
    assert!(fs::metadata(&file).is_err());
}

#[test]
fn what_goes_wrong_is_one_line_and_leaves_no_file() {
    let Some(driver) = fake_driver::library_dir() else { return };
    let folder = Folder::new();
    let [file, leaks] = ["p.json", "leaks"].map(|name| folder.path(name));
    let args = ["-o", &file, "--repeats", "1"];
    let fails = |settings: &[(&str, &str)], args: &[&str], said: &str| {
        let error = assert_one_error(&calibrate(driver, settings, args));
        assert!(error.contains(said), "{said:?} is not in {error}");
        assert!(fs::metadata(&file).is_err());
    };
    let broken = [("FAIL", "set_access 100 999"), ("LEAK_CHECK", leaks.as_str())];
    fails(&broken, &args, "while measuring ");
    let held = fs::read_to_string(&leaks).expect("written");
    assert!(held.lines().all(|line| line.ends_with(NOTHING)), "{held}");
    fails(&[("DEVICES", "0")], &args, "finds no GPU");
    fails(&[("DEVICES", "2")], &["-o", &file, "--device", "cuda:9"], "there is no GPU 9");
    fails(&[("VMM", "off")], &args, "no virtual memory calls");
    fails(&[], &["-o", &folder.path("no/folder/p.json")], "no/folder/p.json");
    fails(&[], &["-o", &file, "--csv", &file], "two outputs");
    for args in [&["calibrate"][..], &["calibrate", "-o", &file, "--device", "sim"]] {
        assert_code(&fraglab(args), 2);
    }
}

/// As with Ctrl-C, only harder.
#[test]
fn an_end_from_outside_leaves_no_half_file() {
    let Some(driver) = fake_driver::library_dir() else { return };
    let folder = Folder::new();
    let args = ["-o", &folder.path("p.json"), "--csv", &folder.path("all.csv")];
    let mut command = command(driver, &[("LATENCY", "on")], &args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    std::thread::sleep(Duration::from_millis(400));
    child.kill().expect("runs");
    child.wait().expect("ends");
    let left = fs::read_dir(folder.path("")).expect("a folder").count();
    assert_eq!(left, 0);
}
