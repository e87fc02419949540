//! The plug-in as PyTorch loads it: the shared library is built as users build it, and a program in
//! C++ loads it and calls it through its C interface, on a simulated device.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use fraglab::import::{MemoryText, ReadOptions, read_trace};
use fraglab::trace::{Op, Trace};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::program::{Folder, assert_code, fraglab, fraglab_reading, json, stderr, stdout};
use crate::common::{Rng, WITHOUT_PROFILE, fake_driver};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What is built once for all tests.
struct Built {
    folder: TempDir,
    library: PathBuf,
}

impl Built {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(build)
}

fn build() -> Built {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugin");
    let compile = |output: &str, source: &str, more: &[&str]| {
        let mut command = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
        command.args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-o"]);
        command.arg(folder.path().join(output)).arg(sources.join(source)).args(more);
        succeed(&mut command);
    };
    compile("driver", "driver.cpp", &["-ldl", "-pthread"]);
    let search = format!("-L{}", folder.path().display());
    let run_path = format!("-Wl,-rpath,{}", folder.path().display());
    compile("libc10.so", "c10.cpp", &["-shared", "-Wl,-soname,libc10.so"]);
    compile(
        "libtorch_python.so",
        "catcher.cpp",
        &["-shared", "-Wl,-soname,libtorch_python.so", &search, &run_path, "-lc10"],
    );
    Built { library: build_library(), folder }
}

/// The library, without optimisation, which builds four times as fast.
fn build_library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder");
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    command
        .args(["rustc", "--quiet", "--lib", "--no-default-features", "--features", "plugin"])
        .args(["--crate-type", "cdylib", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    succeed(&mut command);
    target.join("debug/libfraglab.so")
}

fn succeed(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; these tests need a C++ compiler"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
}

/// Calls the plug-in as a script says, with these environment variables. A line of answer a line.
fn drive(variables: &[(&str, &str)], script: &str) -> (Vec<String>, String) {
    let output = driven(variables, script);
    assert_code(&output, 0);
    let answers: Vec<String> = stdout(&output).lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), script.lines().count(), "{answers:?} {}", stderr(&output));
    (answers, stderr(&output))
}

fn driven(variables: &[(&str, &str)], script: &str) -> Output {
    let mut command = Command::new(built().path("driver"));
    command.arg(&built().library).stdin(Stdio::piped()).stdout(Stdio::piped());
    for name in fake_driver::settings_around() {
        command.env_remove(name);
    }
    for name in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"] {
        command.env_remove(name);
    }
    command.env("FRAGLAB_DEVICE", "sim:8GiB").envs(variables.iter().copied());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the driver starts");
    let mut input = child.stdin.take().expect("a pipe");
    let script = script.to_owned();
    let writer = std::thread::spawn(move || {
        use std::io::Write as _;
        // The driver may have ended before it read everything.
        drop(input.write_all(script.as_bytes()));
    });
    let output = child.wait_with_output().expect("the driver ends");
    writer.join().expect("no panic");
    output
}

/// Statistics of device 0 after a script.
fn stats_after(variables: &[(&str, &str)], script: &str) -> Value {
    let (answers, _) = drive(variables, &format!("{script}stats 0\n"));
    parsed(answers.last().expect("an answer"))
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

mod calls {
    use super::*;

    /// By hand, from PyTorch's rules: 1000 bytes go to a small segment of 2 MiB, 5 MiB to one of
    /// 20 MiB, 100 MiB to one of its own.
    #[test]
    fn blocks_are_those_of_the_allocator() {
        let script = "version\ninit\nalloc none 0 0 0\nalloc a 1000 0 0\nalloc b 5242880 0 0\n\
                      alloc c 104857600 0 0\nfree b\nbase c 4096\nbase c 104857600\n";
        let (answers, errors) = drive(&[], &format!("{script}stats 0\n"));
        assert_eq!(answers[0], format!("{} 1", env!("CARGO_PKG_VERSION")));
        assert_eq!(answers[2], "0", "size 0");
        assert_eq!(answers[7], format!("{} 104857600", answers[5]));
        assert_eq!(answers[8], "0 0", "behind the block");
        assert_eq!(errors, "");
        let stats = parsed(&answers[9]);
        let current = &stats["current"];
        assert_eq!(current["requested_bytes"], 1000 + 100 * MIB);
        assert_eq!(current["allocated_bytes"], 1024 + 100 * MIB);
        assert_eq!(current["reserved_bytes"], 122 * MIB);
        let peaks = &stats["peaks"];
        assert_eq!(peaks["requested_bytes_peak"], 1000 + 105 * MIB);
        assert_eq!(peaks["reserved_bytes_peak"], 122 * MIB);
        assert_eq!(stats["requests"]["allocs"], 3);
        assert_eq!(stats["requests"]["frees"], 1);
        assert_eq!(stats["calls"]["malloc"], 3);
        assert_eq!(stats["torch_stats"]["reserved_bytes.all.peak"], 122 * MIB);
        assert_eq!(stats["device"]["kind"], "sim");
        assert_eq!(stats["device"]["total_bytes"], 8 * GIB);
    }

    #[test]
    fn empty_cache_gives_back_and_peaks_begin_anew() {
        let script = "alloc a 104857600 0 0\nalloc b 209715200 0 0\nfree b\nreset\n";
        let stats = stats_after(&[], script);
        assert_eq!(stats["current"]["reserved_bytes"], 100 * MIB);
        assert_eq!(stats["peaks"]["reserved_bytes_peak"], 300 * MIB);
        let stats = stats_after(&[], &format!("{script}reset_peaks -1\n"));
        assert_eq!(stats["peaks"]["reserved_bytes_peak"], 100 * MIB);
        assert_eq!(stats["peaks"]["requested_bytes_peak"], 100 * MIB);
    }

    #[test]
    fn each_device_has_its_own_memory() {
        let script = "alloc a 104857600 0 0\nalloc b 209715200 3 0\nstats -1\nstats 1\n";
        let (answers, _) = drive(&[], script);
        let all = parsed(&answers[2]);
        let told: Vec<(u64, u64)> = all
            .as_array()
            .expect("an array")
            .iter()
            .map(|it| (&it["device"]["index"], &it["current"]["reserved_bytes"]))
            .map(|(index, bytes)| (index.as_u64().expect("index"), bytes.as_u64().expect("bytes")))
            .collect();
        assert_eq!(told, [(0, 100 * MIB), (3, 200 * MIB)]);
        assert!(parsed(&answers[3])["error"].as_str().expect("text").contains("not in use"));
    }

    #[test]
    fn pointers_that_are_not_ours_are_warned_of_once() {
        let script = "free_address 4096 0\nalloc a 1000 0 0\nfree_address 4096 0\nfree a\nfree a\n\
                      free_address 4096 -7\nfree_address 4096 99\nrecord_stream a 7\n";
        let (answers, errors) = drive(&[], &format!("{script}stats 0\n"));
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.starts_with("fraglab: 0x1000 on device 0 is no block"), "{errors}");
        let stats = parsed(&answers[8]);
        assert_eq!(stats["requests"]["frees"], 1);
        assert_eq!(stats["current"]["requested_bytes"], 0);
    }

    /// Torch's rule: a block that another stream uses waits, and completes in the next request.
    #[test]
    fn a_block_that_another_stream_uses_waits() {
        let script = "alloc a 10485760 0 0\nalloc b 10485760 0 0\nrecord_stream a 0\n\
                      record_stream b 7\nrecord_stream b 7\nfree a\nfree b\n";
        let stats = stats_after(&[], script);
        assert_eq!(stats["requests"]["deferred"], 1, "its own stream is no other");
        assert_eq!(stats["waiting"], 1);
        assert_eq!(stats["current"]["allocated_bytes"], 0);
        assert_eq!(stats["current"]["active_bytes"], 10 * MIB);
        let stats = stats_after(&[], &format!("{script}alloc c 1000 0 0\n"));
        assert_eq!(stats["waiting"], 0);
        assert_eq!(stats["current"]["active_bytes"], 1024);
        let stats = stats_after(&[], &format!("{script}reset\n"));
        assert_eq!(stats["current"]["active_bytes"], 0, "emptying the cache waits");
        assert_eq!(stats["current"]["reserved_bytes"], 0);
    }

    /// Memory freed on a stream is for that stream; streams that come up later get their own.
    #[test]
    fn streams_come_as_they_are_used() {
        for allocator in WITHOUT_PROFILE {
            let script = "alloc a 10485760 0 0\nalloc b 10485760 0 900\nalloc c 10485760 0 300\n\
                          free a\nfree b\nfree c\nalloc d 10485760 0 300\nalloc e 10485760 0 900\n";
            let (answers, _) = drive(&[("FRAGLAB_ALLOC", allocator)], script);
            let unique: std::collections::BTreeSet<&String> = answers[..3].iter().collect();
            assert_eq!(unique.len(), 3, "{allocator}: {answers:?}");
            assert_ne!(answers[6], answers[0], "{allocator}");
            if allocator != "native" {
                assert_eq!((&answers[6], &answers[7]), (&answers[2], &answers[1]), "{allocator}");
            }
        }
    }

    #[test]
    fn many_threads_on_two_devices() {
        for allocator in ["caching", "expandable", "stitch", "best-fit"] {
            let variables = [("FRAGLAB_ALLOC", allocator)];
            let (answers, errors) = drive(&variables, "hammer 8 5000\nreset\nstats -1\n");
            assert_eq!(answers[0], "refused 0, overlapping 0", "{allocator}");
            assert_eq!(errors, "", "{allocator}");
            for device in parsed(&answers[2]).as_array().expect("an array") {
                assert_eq!(device["requests"]["allocs"], device["requests"]["frees"]);
                assert_eq!(device["current"]["requested_bytes"], 0);
                assert_eq!(device["current"]["active_bytes"], 0);
                assert_eq!(device["waiting"], 0);
            }
        }
    }
}

mod out_of_memory {
    use super::*;

    #[test]
    fn a_request_that_is_refused_throws_and_the_process_goes_on() {
        for allocator in WITHOUT_PROFILE {
            let script = "alloc a 3221225472 0 0\nalloc b 9663676416 0 0\nalloc c 9663676416 0 0\n\
                          free a\nalloc d 4294967296 0 0\nstats 0\n";
            let variables = [("FRAGLAB_ALLOC", allocator)];
            let (answers, _) = drive(&variables, script);
            for refused in &answers[1..3] {
                let begins = "runtime_error CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a \
                              total capacity of 8 GiB of which ";
                assert!(refused.starts_with(begins), "{allocator}: {refused}");
                assert!(refused.contains(allocator), "{allocator}: {refused}");
            }
            assert!(answers[4].parse::<u64>().is_ok_and(|it| it > 0), "{allocator}: {answers:?}");
            assert_eq!(parsed(&answers[5])["requests"]["refused"], 2, "{allocator}");
        }
    }

    /// By hand: four segments of 512 MiB and one of 256 MiB fill the limit; of one of the four the
    /// second half is free.
    #[test]
    fn the_message_names_what_was_in_the_way_and_fraglab_reads_it() {
        let block = 512 * MIB;
        let mut script: String = (0..4).map(|at| format!("alloc b{at} {block} 0 0\n")).collect();
        script.push_str("alloc pin 268435456 0 0\nfree b1\nalloc part 268435456 0 0\n");
        script.push_str("alloc large 1610612736 0 0\n");
        let (answers, _) = drive(&[("FRAGLAB_LIMIT", "2304MiB")], &script);
        let message = answers[7].strip_prefix("runtime_error ").expect("refused");
        for part in [
            "Tried to allocate 1.50 GiB.",
            " 2.25 GiB allowed;",
            "2 GiB is allocated by PyTorch",
            "256 MiB is reserved by PyTorch but unallocated (2.25 GiB reserved in total by PyTorch)",
            "The largest hole that could serve the request is 256 MiB.",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        let text = MemoryText::read(message);
        let [read] = &text.messages[..] else { panic!("{:?}", text.messages) };
        let bytes = [read.requested, read.allowed, read.allocated, read.unallocated, read.reserved]
            .map(|amount| amount.expect("told").bytes);
        assert_eq!(bytes, [1536, 2304, 2048, 256, 2304].map(|mib| mib * MIB));
        assert_eq!(read.largest_hole.map(|it| it.bytes), Some(256 * MIB));
        let output = fraglab_reading(message, &["explain", "-"]);
        assert_code(&output, 0);
        assert!(stdout(&output).contains("largest hole that could serve"), "{}", stdout(&output));
    }

    #[test]
    fn pytorch_gets_an_exception_of_its_own() {
        let catcher = built().path("libtorch_python.so");
        let script =
            format!("torch_alloc {0} 9663676416\ntorch_alloc {0} 1000\n", catcher.display());
        let (answers, _) = drive(&[], &script);
        let begins =
            "OutOfMemoryError from fraglab_torch_alloc in fraglab: CUDA out of memory. Tried";
        assert!(answers[0].starts_with(begins), "{}", answers[0]);
        assert_eq!(answers[1], "granted");
    }

    #[test]
    fn a_fraction_of_the_device_is_a_limit_before_and_after_the_first_request() {
        let more = "alloc a 3221225472 0 0\nalloc b 2147483648 0 0\n";
        let (answers, _) = drive(&[], &format!("memory_fraction 0.5 0\n{more}stats 0\n"));
        assert!(answers[2].contains("4 GiB allowed;"), "{}", answers[2]);
        let stats = parsed(&answers[3]);
        assert_eq!(stats["allocator"]["limit_bytes"], 4 * GIB);
        let (answers, _) =
            drive(&[], &format!("alloc z 1 0 0\nmemory_fraction 0.5 0\n{more}stats 0\n"));
        assert!(answers[3].contains("4 GiB allowed;"), "{}", answers[3]);
        assert_eq!(parsed(&answers[4])["allocator"]["ceiling_bytes"], 4 * GIB);
    }
}

mod settings {
    use super::*;

    #[test]
    fn the_program_configures_before_the_first_request() {
        let script = "configure alloc=best-fit\\nlimit=1GiB\nconfigure {\"limit\": \"2GiB\", \"log\": null}\n\
                      alloc a 1000 0 0\nstats 0\nconfigure alloc=native\n";
        let (answers, _) = drive(&[("FRAGLAB_ALLOC", "stitch")], script);
        assert_eq!(answers[..2], ["null", "null"]);
        let stats = parsed(&answers[3]);
        assert_eq!(stats["allocator"]["name"], "best-fit");
        assert_eq!(stats["allocator"]["limit_bytes"], 2 * GIB);
        assert!(answers[4].contains("in use already"), "{}", answers[4]);
    }

    #[test]
    fn settings_of_pytorch_are_those_of_caching() {
        let variables = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
        let stats = stats_after(&variables, "alloc a 1000 0 0\n");
        assert_eq!(stats["allocator"]["params"]["expandable_segments"], "True");
        assert_eq!(stats["calls"]["map"], 1);
    }

    #[test]
    fn what_is_wrong_is_said_at_once_and_can_be_mended() {
        let script = "configure alloc=stitchy\nconfigure speed=fast\nconfigure nonsense\n\
                      configure {\"alloc\": [1]}\nconfigure {alloc\nconfigure mode=fast\n\
                      configure limit=much\nconfigure device=tpu\nconfigure trace=x.parquet\n\
                      configure alloc=planned\nconfigure profile=/nowhere/x.json\n\
                      configure alloc=planned\\nprofile=/nowhere/x.json\n\
                      configure alloc=caching\nalloc a 1000 0 0\n";
        let (answers, errors) = drive(&[], script);
        let expected = [
            "no allocator \"stitchy\"",
            "no setting \"speed\"; there are: alloc, mode, ",
            "expected key=value",
            "alloc: expected a text",
            "no JSON object",
            "expected alloc or trace",
            "FRAGLAB_LIMIT=much",
            "expected cuda, or sim:SIZE",
            "expected a name that ends in .json",
            "planned needs a profile",
            "FRAGLAB_PROFILE is for the allocator planned",
            "/nowhere/x.json",
        ];
        for (answer, part) in answers.iter().zip(expected) {
            assert!(answer.contains(part), "{part}: {answer}");
        }
        assert_eq!(answers[12], "null");
        assert_ne!(answers[13], "0");
        assert_eq!(errors, "");
    }

    #[test]
    fn a_wrong_variable_is_an_exception_of_the_first_request() {
        let script =
            "alloc a 1000 0 0\nalloc b 1000 0 0\nconfigure alloc=caching\nalloc c 1000 0 0\n";
        let (answers, _) = drive(&[("FRAGLAB_ALLOC", "nope")], script);
        for answer in &answers[..2] {
            assert!(answer.starts_with("runtime_error FRAGLAB_ALLOC: no allocator"), "{answer}");
        }
        assert_eq!(answers[2], "null");
        assert!(answers[3].parse::<u64>().is_ok(), "{answers:?}");
    }

    #[test]
    fn devices_that_cannot_be_are_an_exception() {
        let (answers, _) = drive(&[], "alloc a 1 -1 0\nalloc a 1 64 0\n");
        for answer in answers {
            assert!(answer.contains("fraglab serves devices 0 to 63"), "{answer}");
        }
    }
}

mod graphs {
    use super::*;

    /// A graph owns what was allocated on its streams while it was captured, until it is gone.
    #[test]
    fn memory_of_a_graph_is_given_to_nobody_else() {
        for allocator in ["caching", "stitch", "best-fit"] {
            let script = "alloc before 4194304 0 5\nfree before\n\
                          pool_begin 0 1 2 5\n\
                          alloc a 4194304 0 5\nalloc other 4194304 0 6\nfree a\nalloc again 4194304 0 5\n\
                          free again\nfree other\n\
                          pool_end 0 1 2\n\
                          alloc outside 4194304 0 5\nalloc other2 4194304 0 6\n\
                          pool_release 0 1 2\nfree outside\nalloc after 4194304 0 5\n\
                          alloc after2 4194304 0 5\nstats 0\n";
            let (answers, errors) = drive(&[("FRAGLAB_ALLOC", allocator)], script);
            let [a, other, again] = [3, 4, 6].map(|line| &answers[line]);
            assert_eq!(a, again, "{allocator}: a graph uses its own memory again");
            let [outside, other2] = [10, 11].map(|line| &answers[line]);
            assert_ne!(a, outside, "{allocator}");
            assert_eq!(other, other2, "{allocator}: the filter did not pick this stream");
            let [after, after2] = [14, 15].map(|line| &answers[line]);
            assert!(after == a || after2 == a, "{allocator}: it comes back: {answers:?}");
            assert_eq!(errors, "");
        }
    }

    /// During a capture no event may be recorded or asked for.
    #[test]
    fn what_is_freed_in_a_capture_waits_till_its_end() {
        let script = "alloc a 4194304 0 0\nrecord_stream a 7\npool_begin 0 1 2 5\nfree a\n\
                      alloc b 1000 0 0\nstats 0\npool_end 0 1 2\nalloc c 1000 0 0\nstats 0\n";
        let (answers, _) = drive(&[], script);
        assert_eq!(parsed(&answers[5])["waiting"], 1);
        assert_eq!(parsed(&answers[8])["waiting"], 0);
    }
}

mod traces {
    use super::*;

    /// Streams, deferred frees, a phase, modules, a refusal, an emptied cache.
    const PROGRAM: &str = "alloc w 104857600 0 0\nmark step0.forward\nmodule_enter layer\n\
        alloc a 5242880 0 0\nalloc b 5242880 0 7\nrecord_stream b 0\nmodule_leave layer\nfree a\n\
        mark step1.forward\nfree b\nalloc c 3145728 0 7\nalloc huge 9663676416 0 0\nfree c\nreset\n\
        alloc d 31457280 0 0\n";

    #[test]
    fn a_recorded_trace_gives_the_same_peaks_and_verifies() {
        for (allocator, conf) in
            [("caching", ""), ("expandable", ""), ("caching", "max_split_size_mb:40")]
        {
            let folder = Folder::new();
            let pattern = folder.path("run-%d.json.zst");
            let variables = [
                ("FRAGLAB_ALLOC", allocator),
                ("FRAGLAB_MODE", "trace"),
                ("FRAGLAB_TRACE", &pattern),
                ("PYTORCH_ALLOC_CONF", conf),
            ];
            let stats = stats_after(&variables, PROGRAM);
            let path = folder.path("run-0.json.zst");
            assert_eq!(stats["trace"]["path"], path.as_str());
            let addresses = ["--addresses", "ascending", "--json", "-"];
            let run = fraglab(
                &[&["run", "--trace", &path, "--alloc", allocator], &addresses[..]].concat(),
            );
            assert_code(&run, 1);
            let result = json(&run);
            for (name, peak) in stats["peaks"].as_object().expect("peaks") {
                assert_eq!(&result["peaks"][name], peak, "{allocator} {name}");
            }
            assert_eq!(result["outcome"]["requested_bytes"], 9 * GIB);
            let verified = fraglab(&["verify", &path]);
            assert_code(&verified, 0);
            assert!(stdout(&verified).contains("1 of 1 file exact"), "{}", stdout(&verified));
        }
    }

    #[test]
    fn a_trace_tells_what_the_program_did() {
        let folder = Folder::new();
        let path = folder.path("run.json");
        let log = folder.path("log-%p.json");
        let variables =
            [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str()), ("FRAGLAB_LOG", &log)];
        drive(&variables, PROGRAM);
        let trace = read(&path);
        let ops: String = trace.events.iter().map(|event| letter(event.op)).collect();
        // b is deferred by its free and done when c looks; the refused request is an attempt.
        assert_eq!(ops, "aM>aa<fMdDaxfea", "{ops}");
        assert_eq!(trace.phases, ["step0.forward", "step1.forward"]);
        assert_eq!(trace.modules, ["layer"]);
        let sizes: Vec<u64> = trace.blocks.iter().map(|block| block.size_bytes).collect();
        assert_eq!(sizes, [100 * MIB, 5 * MIB, 5 * MIB, 3 * MIB, 9 * GIB, 30 * MIB]);
        let handles: Vec<u64> = trace.streams.iter().map(|stream| stream.handle).collect();
        assert_eq!(handles, [0, 7]);
        assert_eq!(trace.header.device.total_bytes, Some(8 * GIB));
        let logs: Vec<PathBuf> = fs::read_dir(Path::new(&path).parent().expect("a folder"))
            .expect("a folder")
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.to_string_lossy().contains("log-"))
            .collect();
        let [log] = &logs[..] else { panic!("{logs:?}") };
        let stats = parsed(&fs::read_to_string(log).expect("a log"));
        assert_eq!(stats["requests"]["allocs"], 5);
    }

    fn letter(op: Op) -> char {
        match op {
            Op::Alloc(_) => 'a',
            Op::Attempt(_) => 'x',
            Op::Free(_) => 'f',
            Op::Defer(_) => 'd',
            Op::Done(_) => 'D',
            Op::Mark(_) => 'M',
            Op::EmptyCache => 'e',
            Op::ModuleEnter(_) => '>',
            Op::ModuleLeave(_) => '<',
            _ => '?',
        }
    }

    /// Traces have no blocks beyond 2^60 - 1 bytes; a program may ask for more all the same.
    #[test]
    fn an_absurd_request_does_not_cost_the_trace() {
        let folder = Folder::new();
        let path = folder.path("run.json");
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str())];
        let script = "alloc a 1000 0 0\nalloc huge 4611686018427387904 0 0\nalloc b 1000 0 0\n";
        let (answers, errors) = drive(&variables, script);
        assert!(answers[1].starts_with("runtime_error CUDA out of memory."), "{}", answers[1]);
        assert_eq!(errors, "");
        let ops: String = read(&path).events.iter().map(|event| letter(event.op)).collect();
        assert_eq!(ops, "axa");
    }

    /// Captures may end in any order and share a pool; in a trace pools lie one inside the other.
    #[test]
    fn captures_that_overlap_are_a_valid_trace() {
        let folder = Folder::new();
        let path = folder.path("run.json");
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str())];
        let script = "pool_begin 0 1 1 5\nalloc a 1000 0 5\npool_begin 0 2 2 6\npool_begin 0 1 1 5\n\
                      pool_end 0 1 1\npool_end 0 1 1\nalloc b 1000 0 6\npool_end 0 2 2\n\
                      pool_begin 0 3 3 5\npool_release 0 3 3\npool_end 0 3 3\npool_release 0 2 2\n";
        let (_, errors) = drive(&variables, script);
        assert_eq!(errors, "");
        let told = read(&path).events.into_iter().map(|event| match event.op {
            Op::PoolEnter(pool) => format!("({}", pool.0),
            Op::PoolLeave(pool) => format!("){}", pool.0),
            Op::PoolDelete(pool) => format!("-{}", pool.0),
            op => letter(op).to_string(),
        });
        assert_eq!(told.collect::<Vec<_>>().join(" "), "(0 a (1 )1 )0 (1 a )1 (2 )2 -2 -1");
    }

    #[test]
    fn a_trace_that_cannot_be_written_is_told() {
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", "/nowhere/run.json")];
        let (answers, errors) = drive(&variables, "alloc a 1000 0 0\nfinish\n");
        assert!(answers[0].contains("the folder /nowhere cannot be written"), "{}", answers[0]);
        assert_eq!(errors, "", "nothing was recorded");
    }

    #[test]
    fn a_trace_that_can_no_longer_be_written_is_told_at_the_end() {
        let folder = Folder::new();
        let path = folder.path("run.json");
        std::fs::create_dir(&path).expect("a folder in the trace's place");
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str())];
        let (answers, errors) = drive(&variables, "alloc a 1000 0 0\nfinish\n");
        assert!(answers[1].contains(&path), "{}", answers[1]);
        assert!(errors.starts_with(&format!("fraglab: {path}")), "at the end again: {errors}");
    }

    #[test]
    fn requests_and_captures_that_no_trace_can_hold_as_they_were_do_not_cost_it() {
        let folder = Folder::new();
        let path = folder.path("run.json");
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str())];
        // Two captures share pool 1; one of pool 2 begins inside and ends after them; the pool is
        // let go twice while it is captured into.
        let script = "alloc a 18446744073709551615 0 0\npool_begin 0 0 1 7\npool_begin 0 0 1 8\n\
                      pool_begin 0 0 2 9\npool_end 0 0 1\npool_end 0 0 1\npool_release 0 0 2\n\
                      pool_end 0 0 2\npool_end 0 0 2\npool_release 0 0 1\npool_release 0 0 1\n\
                      finish\n";
        let (answers, errors) = drive(&variables, script);
        assert_eq!(answers.last().map(String::as_str), Some("null"), "{answers:?} {errors}");
        let trace = read(&path);
        assert_eq!(trace.blocks[0].size_bytes, (1 << 60) - 1, "the most that a trace holds");
        let pools = trace.events.iter().filter_map(|event| match event.op {
            Op::PoolEnter(pool) => Some(('+', pool.0)),
            Op::PoolLeave(pool) => Some(('-', pool.0)),
            Op::PoolDelete(pool) => Some(('x', pool.0)),
            _ => None,
        });
        let entered = [('+', 0), ('+', 1), ('-', 1), ('-', 0), ('+', 1), ('-', 1)];
        let expected = [&entered[..], &[('x', 1), ('x', 0)]].concat();
        assert_eq!(pools.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn every_device_has_a_trace_of_its_own() {
        let folder = Folder::new();
        let path = folder.path("run.json.gz");
        let variables = [("FRAGLAB_MODE", "trace"), ("FRAGLAB_TRACE", path.as_str())];
        let script = "alloc a 1000 1 0\nalloc b 2000 0 0\nstats 0\nfinish\n";
        let (answers, _) = drive(&variables, script);
        let beside = folder.path("run-0.json.gz");
        assert!(answers[2].contains(&format!("\"path\":\"{beside}\"")), "{}", answers[2]);
        assert_eq!(read(&path).blocks[0].size_bytes, 1000, "of the device used first");
        assert_eq!(read(&beside).blocks[0].size_bytes, 2000);
    }
}

fn read(path: &str) -> Trace {
    read_trace(Path::new(path), &ReadOptions::default()).expect("a trace").trace
}

/// The events of a trace as a program's calls. Completions are the plug-in's own business.
fn script_of(trace: &Trace) -> String {
    let mut script = String::new();
    let mut names: BTreeMap<u32, u64> = BTreeMap::new();
    for event in &trace.events {
        let line = match event.op {
            Op::Alloc(block) => {
                let row = trace.blocks[block.index()];
                let stream = trace.streams[row.stream.index()].handle;
                names.insert(block.0, row.size_bytes);
                format!("alloc {} {} 0 {stream}\n", block.0, row.size_bytes)
            }
            Op::Free(block) => format!("free {}\n", block.0),
            Op::Mark(phase) => format!("mark {}\n", trace.phases[phase.index()]),
            Op::EmptyCache => "reset\n".to_owned(),
            other => panic!("{other:?}: not in this test"),
        };
        script.push_str(&line);
    }
    script
}

mod on_a_gpu {
    use super::*;

    /// Blocks are written, freed and asked for again on two streams; what is live stays as it was.
    fn program() -> String {
        let mut script = String::new();
        let mut live: Vec<(usize, usize)> = Vec::new();
        let mut rng = Rng(7);
        for name in 0..300 {
            if live.len() > 30 {
                let (freed, value) = live.swap_remove(rng.below(live.len()));
                script.push_str(&format!("filled {freed} {value}\n"));
                if rng.below(4) == 0 {
                    script.push_str(&format!("record_stream {freed} 4096\n"));
                }
                script.push_str(&format!("free {freed}\n"));
            }
            let size = if rng.below(3) == 0 { 1 + rng.below(1 << 19) } else { rng.below(12 << 20) };
            let (size, value, stream) = (size + 1, name % 100, rng.below(2) * 256);
            script.push_str(&format!("alloc {name} {size} 0 {stream}\nfill {name} {value}\n"));
            live.push((name, value));
            if name % 100 == 99 {
                script.push_str("reset\n");
            }
        }
        for (name, value) in live {
            script.push_str(&format!("filled {name} {value}\nfree {name}\n"));
        }
        script.push_str("alloc last 1 0 0\nfree last\nreset\nstats 0\n");
        script
    }

    /// On the memory of a driver, though not a real one: what overlaps or is not mapped shows.
    #[test]
    fn memory_stays_as_the_program_wrote_it() {
        let Some(folder) = fake_driver::library_dir() else { return };
        let script = program();
        let checks = script.lines().filter(|line| line.starts_with("filled")).count();
        assert!(checks > 250);
        for allocator in WITHOUT_PROFILE {
            let variables = [
                ("FRAGLAB_ALLOC", allocator),
                ("FRAGLAB_DEVICE", "cuda"),
                ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8")),
                ("FAKE_CUDA_MEMORY", "1073741824"),
                ("FAKE_CUDA_BUSY", "2"),
            ];
            let (answers, errors) = drive(&variables, &script);
            assert_eq!(errors, "", "{allocator}");
            for (line, answer) in script.lines().zip(&answers) {
                let is_wrong = answer.starts_with("differs") || answer.starts_with("runtime_error");
                assert!(!is_wrong, "{allocator}: {line}: {answer}");
            }
            assert_eq!(answers.iter().filter(|it| *it == "whole").count(), checks, "{allocator}");
            let stats = parsed(answers.last().expect("statistics"));
            assert_eq!(stats["device"]["kind"], "cuda");
            assert!(stats["device"]["name"].as_str().is_some_and(|name| !name.is_empty()));
            assert_eq!(stats["current"]["active_bytes"], 0, "{allocator}");
            assert!(stats["requests"]["deferred"].as_u64().is_some_and(|it| it > 20));
            let timed = stats["device_ns"].as_object().expect("times");
            assert!(timed.values().any(|ns| ns.as_u64() > Some(0)), "{allocator}");
        }
    }

    /// By hand, from PyTorch's rules, where every event says "not yet" twice: a block waits for the
    /// slowest of its streams; a request asks the oldest event of a stream until one is not done;
    /// freeing asks nobody; emptying the cache waits.
    #[test]
    fn events_are_asked_as_pytorch_asks() {
        let Some(folder) = fake_driver::library_dir() else { return };
        let variables = [
            ("FRAGLAB_DEVICE", "cuda"),
            ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8")),
            ("FAKE_CUDA_BUSY", "2"),
        ];
        let two = "alloc a 1000 0 0\nalloc b 1000 0 0\nrecord_stream a 16\nrecord_stream a 32\n\
                   record_stream b 16\nfree a\nfree b\n";
        let waiting = |requests: usize, more: &str| {
            let script = format!("{two}{}{more}", "alloc x 1 0 0\n".repeat(requests));
            stats_after(&variables, &script)["waiting"].as_u64().expect("a number")
        };
        // a after the third request, when b is first asked; b after two more.
        let after: Vec<u64> = (0..6).map(|requests| waiting(requests, "")).collect();
        assert_eq!(after, [2, 2, 2, 1, 1, 0]);
        assert_eq!(waiting(0, "reset\n"), 0);
    }

    const EVICTION: &str = "alloc p 20971520 0 0\nalloc x 4194304 0 0\nalloc q 20971520 0 0\n\
        alloc y 4194304 0 0\nalloc u 31457280 0 0\nalloc z 4194304 0 0\nalloc v 31457280 0 0\n\
        free p\nfree q\nalloc s 41943040 0 0\nkernel s\nfree s\nfree u\nfree v\n\
        alloc t 62914560 0 0\n";

    /// A kernel that still runs on a block when the block's memory is unmapped is an error of the
    /// fake driver, as of a real one, after which it gives nothing out.
    #[test]
    fn the_gpu_is_waited_for_before_memory_is_unmapped() {
        let Some(folder) = fake_driver::library_dir() else { return };
        let after = |allocator: &str, script: &str| {
            let variables = [
                ("FRAGLAB_ALLOC", allocator),
                ("FRAGLAB_DEVICE", "cuda"),
                ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8")),
            ];
            let script = format!("{script}stats 0\nalloc last 50331648 0 0\nsynchronizes\n");
            let (answers, _) = drive(&variables, &script);
            let [.., stats, last, waits] = &answers[..] else { panic!("{answers:?}") };
            assert!(last.parse::<u64>().is_ok(), "{allocator}: {last}");
            (parsed(stats), waits.parse::<u64>().expect("a number"))
        };
        let flush = "alloc a 41943040 0 0\nkernel a\nfree a\nreset\n";
        for allocator in ["expandable", "stitch", "stitch+policy=best"] {
            let (stats, waits) = after(allocator, flush);
            assert_eq!(stats["current"]["reserved_bytes"], 0, "{allocator}");
            assert!(stats["calls"]["unmap"].as_u64() > Some(0), "{allocator}");
            assert_eq!(waits, 1, "{allocator}: once a call, however much is unmapped");
        }
        // Nothing is mapped, and cudaFree waits by itself.
        let (stats, waits) = after("caching", flush);
        assert_eq!((&stats["current"]["reserved_bytes"], waits), (&Value::from(0), 0));
        // 40 MiB of two free blocks are used by a kernel, and evicted for 60 MiB of two others.
        let paper = "stitch+frag_limit=2MiB+stitch_limit=64MiB";
        for allocator in [paper, "stitch+policy=best+view_limit=64MiB"] {
            let (stats, waits) = after(allocator, EVICTION);
            assert!(stats["counters"]["stitch_evictions"].as_u64() > Some(0), "{stats}");
            assert!(waits > 0, "{allocator}");
        }
    }

    /// Inside a capture a wait spoils it: what would need one stays, and goes when it is over.
    #[test]
    fn a_capture_is_not_spoiled_by_memory_that_goes_back() {
        let Some(folder) = fake_driver::library_dir() else { return };
        let script = "alloc a 41943040 0 0\nalloc b 20971520 0 0\nkernel a\nfree a\n\
                      pool_begin 0 1 1 5\ncapture on\nalloc g 1048576 0 5\nreset\nstats 0\n\
                      alloc c 1048576 0 0\ncapture off\npool_end 0 1 1\nreset\nfree b\nfree c\n\
                      free g\npool_release 0 1 1\nreset\nstats 0\n";
        for allocator in WITHOUT_PROFILE {
            let variables = [
                ("FRAGLAB_ALLOC", allocator),
                ("FRAGLAB_DEVICE", "cuda"),
                ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8")),
            ];
            let (answers, errors) = drive(&variables, script);
            assert_eq!(errors, "", "{allocator}");
            assert_eq!(answers[10], "whole", "{allocator}");
            assert!(answers[9].parse::<u64>().is_ok(), "{allocator}: {}", answers[9]);
            let reserved = |text: &str| parsed(text)["current"]["reserved_bytes"].as_u64();
            assert!(reserved(&answers[8]) >= Some(20 * MIB), "{allocator}");
            if ["expandable", "stitch", "stitch+policy=best"].contains(&allocator) {
                assert!(reserved(&answers[8]) >= Some(60 * MIB), "{allocator}: {}", answers[8]);
            }
            let last = answers.last().expect("statistics");
            assert_eq!(parsed(last)["current"]["allocated_bytes"], 0, "{allocator}");
            assert_eq!(reserved(last), Some(0), "{allocator}");
        }
    }

    #[test]
    fn memory_of_the_gpu_runs_out_and_a_second_gpu_has_more() {
        let Some(folder) = fake_driver::library_dir() else { return };
        let variables = [
            ("FRAGLAB_DEVICE", "cuda"),
            ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8")),
            ("FAKE_CUDA_MEMORY", "1073741824"),
            ("FAKE_CUDA_DEVICES", "2"),
        ];
        let script = "alloc a 734003200 0 0\nalloc b 734003200 0 0\nalloc c 734003200 1 0\n\
                      alloc d 1 2 0\nfree a\nalloc e 943718400 0 0\n";
        let (answers, _) = drive(&variables, script);
        assert!(answers[1].contains("GPU 0 has a total capacity of 1 GiB"), "{}", answers[1]);
        assert!(answers[2].parse::<u64>().is_ok(), "{}", answers[2]);
        assert!(answers[3].contains("there is no GPU 2: there are 2"), "{}", answers[3]);
        assert!(answers[5].parse::<u64>().is_ok(), "{}", answers[5]);
    }

    #[test]
    fn without_a_driver_the_first_request_says_so() {
        let empty = Folder::new();
        let folder = empty.path(".");
        let variables = [("FRAGLAB_DEVICE", "cuda"), ("LD_LIBRARY_PATH", folder.as_str())];
        let (answers, _) = drive(&variables, "alloc a 1 0 0\n");
        let answer = &answers[0];
        // A machine with a driver has memory to give.
        let is_granted = answer.parse::<u64>().is_ok();
        assert!(is_granted || answer.contains("no NVIDIA driver here"), "{answer}");
    }
}

/// The plug-in is the simulator's allocators in another world: the same requests, the same peaks.
#[test]
fn a_real_job_takes_what_the_simulator_says() {
    let path = "traces/mixtral-moe.json.zst";
    let trace = read(path);
    let script = script_of(&trace);
    let planned = format!("planned+trace={path}");
    for allocator in WITHOUT_PROFILE.into_iter().chain([planned.as_str()]) {
        let variables = [("FRAGLAB_ALLOC", allocator), ("FRAGLAB_DEVICE", "sim:140GiB")];
        let stats = stats_after(&variables, &script);
        let run = fraglab(&[
            "run",
            "--trace",
            path,
            "--alloc",
            allocator,
            "--capacity",
            "140GiB",
            "--addresses",
            "ascending",
            "--json",
            "-",
        ]);
        assert_code(&run, 0);
        let result = json(&run);
        for (name, peak) in stats["peaks"].as_object().expect("peaks") {
            assert_eq!(&result["peaks"][name], peak, "{allocator} {name}");
        }
        assert_eq!(stats["counters"], result["counters"], "{allocator}");
        assert_eq!(stats["calls"], result["calls"], "{allocator}");
    }
}
