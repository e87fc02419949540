//! Traces that may be shown: nothing of whose they are is left, and nothing that decides is gone.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;
use std::path::Path;

use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunOptions, run, verify};
use fraglab::import::{ReadOptions, read_stalloc_log, read_trace};
use fraglab::trace::{
    AnonymizeOptions, Anonymized, Expectation, Frame, Model, ModelParameter, ModelUnit, Op, Trace,
    Truth, anonymize, read_native, read_text, step_name, validate, write_native, write_text,
};
use fraglab::units::{FrameId, NameId, SiteId};
use fraglab::workload::{generate, read_job};
use proptest::prelude::*;

use crate::common::program::*;
use crate::common::shared_dir;
use crate::common::stalloc_job::{Dense, Log};
use crate::common::trace_gen::any_traces;

fn anonymous(trace: &Trace) -> (Trace, Anonymized) {
    let mut trace = trace.clone();
    let found = anonymize(&mut trace, AnonymizeOptions::default());
    validate(&trace).unwrap_or_else(|error| panic!("{error}"));
    (trace, found)
}

fn recording(name: &str) -> Option<Trace> {
    let path = shared_dir()?.join(format!("{name}.pickle.gz"));
    Some(read_trace(&path, &ReadOptions::default()).unwrap_or_else(|e| panic!("{e}")).trace)
}

fn native(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_native(trace, &mut bytes).unwrap();
    bytes
}

/// What an allocator decides on both, event by event, and what it holds.
fn assert_decides_alike(trace: &Trace, allocators: &[&str]) {
    let (clean, _) = anonymous(trace);
    let options = RunOptions::new(CostProfile::shipped("h200").unwrap());
    let observe = Observe { decisions: true, ..Observe::default() };
    for allocator in allocators {
        let spec = allocator.parse().unwrap();
        let run = |trace| {
            run(trace, &spec, &options, observe).unwrap_or_else(|e| panic!("{allocator}: {e}"))
        };
        let (before, after) = (run(trace), run(&clean));
        assert!(!before.decisions.is_empty());
        let name = &trace.header.name;
        assert_eq!(before.result.peaks, after.result.peaks, "{name}, {allocator}");
        let differ = before.decisions.iter().zip(&after.decisions).find(|(a, b)| a != b);
        assert_eq!(differ, None, "{name}, {allocator}");
        assert_eq!(before.decisions.len(), after.decisions.len(), "{name}, {allocator}");
        assert_eq!(before.result.counters, after.result.counters, "{name}, {allocator}");
        assert_eq!(before.chunk_log, after.chunk_log, "{name}, {allocator}");
    }
}

mod decisions {
    use super::*;

    const ALLOCATORS: [&str; 9] = [
        "caching",
        "expandable",
        "best-fit",
        "first-fit",
        "bfc",
        "native",
        "stitch",
        "stitch+policy=shipped",
        "stitch+policy=best",
    ];

    /// Several streams, pools, refusals, and a history that begins late, each among them.
    #[test]
    fn of_every_allocator_are_the_same_on_recordings() {
        let names = [
            "tiny.stacks",
            "mempool",
            "graph-train",
            "random.default",
            "llama-1b-plain.oom40.stacks",
            "llama-3b-recompute.overflow",
        ];
        for name in names {
            let Some(trace) = recording(name) else { return };
            assert_decides_alike(&trace, &ALLOCATORS);
        }
    }

    #[test]
    fn of_one_that_plans_ahead_are_the_same() {
        let Some(trace) = recording("tiny.stacks") else { return };
        assert_decides_alike(&trace, &["planned"]);
        let Some(trace) = recording("gpt2-small") else { return };
        assert_decides_alike(&trace, &["planned", "planned+mode=stalloc+faithful=false"]);
    }

    #[test]
    fn of_stalloc_are_the_same_where_it_knows_the_modules() {
        let dense = Dense { layers: 2, micro_batches: 3, iterations: 4 };
        let (trace, _) = read_stalloc_log(dense.log().as_bytes()).unwrap();
        assert_decides_alike(&trace, &["planned+mode=stalloc", "planned"]);
        let (trace, _) = read_stalloc_log(experts().as_bytes()).unwrap();
        for parameters in ["", "+faithful=false"] {
            assert_decides_alike(&trace, &[&format!("planned+mode=stalloc{parameters}")]);
        }
        let (clean, found) = anonymous(&trace);
        assert_eq!(found.modules, trace.modules.len() as u64, "no layer keeps its path");
        assert!(clean.modules.iter().any(|name| name.ends_with(".mlp->MoELayer : F")));
    }

    /// Three layers of experts, whose sizes differ from step to step, beside shared ones.
    fn experts() -> String {
        let mut log = Log::default();
        let weights: Vec<_> = (1..9).map(|i| log.malloc(i << 20)).collect();
        for step in 0..4u64 {
            log.line(&format!("Iteration Index : {step}"));
            for pass in ["F", "B"] {
                log.line(&format!("micro-batch : {pass}"));
                let mut held = Vec::new();
                for layer in 0..3u64 {
                    let edge = |log: &mut Log, module: &str, edge: &str| {
                        log.line(&format!("acme.{layer}.{module} Layer : {pass}-{edge}"));
                    };
                    edge(&mut log, "mlp->MoELayer", "start");
                    held.push(log.malloc(3 << 20));
                    edge(&mut log, "mlp.acme_router->AcmeRouter", "start");
                    log.brief(1 << 20);
                    edge(&mut log, "mlp.acme_router->AcmeRouter", "end");
                    edge(&mut log, "mlp.experts->SequentialMLP", "start");
                    for expert in 0..2u64 {
                        let linear = format!(
                            "mlp.experts.local_experts.{expert}.fc2->AcmeRowParallelLinear"
                        );
                        edge(&mut log, &linear, "start");
                        log.brief((1 + (step + layer + expert) % 3) << 20);
                        edge(&mut log, &linear, "end");
                    }
                    edge(&mut log, "mlp.experts->SequentialMLP", "end");
                    edge(&mut log, "mlp.shared_experts->AcmeMlp", "start");
                    held.push(log.malloc(2 << 20));
                    edge(&mut log, "mlp.shared_experts->AcmeMlp", "end");
                    edge(&mut log, "mlp->MoELayer", "end");
                }
                held.into_iter().rev().for_each(|block| log.free(block));
            }
        }
        log.line("Iteration Index : end");
        weights.into_iter().for_each(|block| log.free(block));
        log.text
    }

    #[test]
    fn of_chunk_are_the_same_though_parameters_have_other_names() {
        let job = "name = \"acme\"\n[model]\ntype = \"bert\"\nlayers = 3\nhidden = 256\nheads = 4\n\
                   vocabulary = 1000\nhead = \"classifier\"\n[train]\nbatch = 2\nsequence = 64\n\
                   steps = 3\ndtype = \"fp16\"\n[hardware]\ngpu = \"a100-40g\"\n[options]\n\
                   use_ckp = true\n";
        let trace = generate(&read_job(job, &[]).unwrap()).unwrap();
        assert_decides_alike(&trace, &["chunk+chunk_size=1Mi", "caching", "planned"]);
        let (clean, found) = anonymous(&trace);
        let units = &clean.header.model.as_ref().unwrap().units;
        let parameters: usize = units.iter().map(|unit| unit.parameters.len()).sum();
        assert_eq!(found.parameters, parameters as u64);
        let text = String::from_utf8(native(&clean)).unwrap();
        assert!(!text.contains("bert") && !text.contains("Bert"), "{text}");
    }

    #[test]
    fn verify_finds_the_same() {
        for name in ["tiny.stacks", "tiny.expandable", "mempool", "graph-train", "random.default"] {
            let Some(trace) = recording(name) else { return };
            let (clean, _) = anonymous(&trace);
            let (before, after) = (verify(&trace).unwrap(), verify(&clean).unwrap());
            assert!(before.exact, "{name}");
            assert_eq!(after.first_difference, None, "{name}");
            assert_eq!(after, before_named(before, &after.file), "{name}");
            let without = AnonymizeOptions { drop_recording: true, ..Default::default() };
            let mut bare = trace.clone();
            anonymize(&mut bare, without);
            assert!(verify(&bare).is_err());
        }
    }

    /// The same result but for the name of the trace.
    fn before_named(
        mut result: fraglab::engine::VerifyResult,
        file: &str,
    ) -> fraglab::engine::VerifyResult {
        result.file = file.to_owned();
        result
    }
}

mod secrets {
    use super::*;

    /// A trace that says `acme` wherever a text can stand.
    fn secret() -> Trace {
        let text = "device NVIDIA-H200\nlimit 50MiB\nconf max_split_size_mb:40\n\
                    mark step0.acme-pretrain.forward\nmark \"acme warmup\"\n\
                    pool enter acme no_split\nalloc acme_w 1MiB role=parameter\n\
                    alloc acme_x 2MiB stream=0x55acde0\nalloc other 3MiB stream=0x55acd00\n\
                    pool leave acme\nenter \"acme.3.mlp->AcmeMlp : F\"\nfree acme_x\n\
                    leave \"acme.3.mlp->AcmeMlp : F\"\nmark step0.acme-pretrain.backward\n";
        let mut trace = read_text(text).unwrap();
        let header = &mut trace.header;
        header.name = "acme-70b".to_owned();
        header.strategies = vec!["lora".to_owned(), "acme-sharding".to_owned()];
        header.source.version = Some("2.12.0a0+acme1".to_owned());
        header.start_unix_ns = Some(1_796_117_712_142_739_000);
        header.device.index = Some(6);
        let expect = |allocator: &str| Expectation {
            allocator: allocator.to_owned(),
            field: "reserved_bytes_peak".to_owned(),
            value: "20MiB".to_owned(),
            line: 1,
        };
        header.expectations =
            vec![expect("caching"), expect("planned+trace=/home/acme/profile.json")];
        let parameter = ModelParameter { name: "acme_w".to_owned(), elements: 512, frozen: false };
        let unit = ModelUnit {
            module: "acme.3.mlp".to_owned(),
            parameters: vec![parameter],
            ..ModelUnit::default()
        };
        header.model = Some(Model { units: vec![unit], ..Model::default() });
        let frame = |name: &str| Frame {
            name: name.to_owned(),
            filename: "/home/acme/train.py".to_owned(),
            line: 7,
        };
        trace.sites.frames = vec![frame("acme_step"), frame("forward")];
        trace.sites.stacks = vec![vec![FrameId(0), FrameId(1)]];
        trace.blocks[0].site = SiteId(0);
        let stats = [("reserved_bytes.all.peak", 1), ("Acme run", 2)];
        let truth = Truth {
            stats: stats.map(|(name, value)| (name.to_owned(), value)).into(),
            outcome: Some("CUDA out of memory in /home/acme/train.py".to_owned()),
            ..Truth::default()
        };
        trace.recording = Some(fraglab::trace::Recording {
            block_addresses: vec![512; trace.blocks.len()],
            actions: Vec::new(),
            truth: Some(truth),
        });
        validate(&trace).unwrap();
        trace
    }

    #[test]
    fn are_gone_from_every_place() {
        let (trace, found) = anonymous(&secret());
        let text = String::from_utf8(native(&trace)).unwrap();
        for word in ["acme", "Acme", "train.py", "1796117712", "pretrain"] {
            assert!(!text.contains(word), "{word} in {text}");
        }
        let expected = Anonymized {
            name: true,
            frames: 2,
            call_sites: 1,
            // acme_x and other: acme_w is a parameter's.
            block_names: 2,
            // The warm-up, and both parts of the step.
            phases: 3,
            modules: 1,
            parameters: 1,
            pools: 1,
            streams: 2,
            strategies: 1,
            expectations: 1,
            times: false,
            date: true,
            device_index: true,
            version: true,
            message: true,
            recording: false,
        };
        assert_eq!(found, expected);
        assert_eq!(trace.phases, ["step0.phase0.forward", "phase1", "step0.phase0.backward"]);
        // A word has one number, in a path as in a phase; classes and markers of their own stay.
        assert_eq!(trace.modules, ["m2.3.mlp->Class3 : F"]);
        let model = trace.header.model.as_ref().unwrap();
        assert_eq!(model.units[0].module, "m2.3.mlp");
        let name = trace.blocks[0].name.some().map(|name| trace.names[name.index()].as_str());
        assert_eq!(name, Some(model.units[0].parameters[0].name.as_str()));
        assert!(trace.blocks[1].name == NameId::NONE && trace.blocks[0].site == SiteId::NONE);
        assert_eq!(trace.header.strategies, ["lora"]);
        assert_eq!(trace.header.settings.as_deref(), Some("max_split_size_mb:40"));
        assert_eq!(trace.header.source.version.as_deref(), Some("2.12.0a0"));
        // 0x55acd00 before 0x55acde0, both after the default stream.
        let handles: Vec<u64> = trace.streams.iter().map(|stream| stream.handle).collect();
        assert_eq!(handles, [0, 2, 1]);
        let truth = trace.recording.as_ref().unwrap().truth.as_ref().unwrap();
        assert_eq!(truth.outcome.as_deref(), Some("out of memory"));
        assert_eq!(truth.stats.len(), 1);
    }

    #[test]
    fn what_is_asked_for_is_kept() {
        let mut trace = recording_like();
        let original = trace.clone();
        let options =
            AnonymizeOptions { keep_times: true, keep_phases: true, drop_recording: true };
        let found = anonymize(&mut trace, options);
        assert_eq!(trace.phases, original.phases);
        assert_eq!(trace.events, original.events);
        assert!(found.recording && trace.recording.is_none());
        assert!(!found.times && found.phases == 0);
    }

    /// Times as a recording has them: uneven, and some of them equal.
    fn recording_like() -> Trace {
        let mut trace =
            read_text("mark acme\nalloc a 1MiB\nalloc b 1MiB\nfree a\nfree b\n").unwrap();
        let times = [5, 5, 1_000_005, 1_000_005, 9_999_999];
        trace.events.iter_mut().zip(times).for_each(|(event, ns)| event.time_ns = ns);
        trace.header.source.kind = fraglab::trace::SourceKind::TorchSnapshot;
        let block_addresses = vec![512, 1024];
        trace.recording = Some(fraglab::trace::Recording { block_addresses, ..Default::default() });
        trace
    }

    #[test]
    fn times_become_ticks_and_equal_ones_stay_equal() {
        let (trace, found) = anonymous(&recording_like());
        let times: Vec<u64> = trace.events.iter().map(|event| event.time_ns).collect();
        assert_eq!(times, [0, 0, 1000, 1000, 2000]);
        assert!(found.times);
    }

    /// Every text of a real recording with stacks, looked for in every format.
    #[test]
    fn of_a_recording_leave_no_trace_in_any_file() {
        let Some(original) = recording("gpt2-small.stacks") else { return };
        let mut texts: BTreeSet<&str> = BTreeSet::new();
        for frame in &original.sites.frames {
            texts.insert(&frame.name);
            texts.insert(&frame.filename);
            texts.extend(frame.filename.split('/'));
        }
        texts.extend([original.header.name.as_str()]);
        texts.retain(|text| text.len() > 3);
        assert!(texts.len() > 50, "{}", texts.len());
        // Words that the formats, phases and statistics have of themselves.
        let common = [
            "forward",
            "backward",
            "step",
            "data",
            "memory",
            "optimizer",
            "optim",
            "name",
            "torch",
        ];
        texts.retain(|text| !common.contains(text));
        let (clean, _) = anonymous(&original);
        let mut text_form = Vec::new();
        write_text(&clean, &mut text_form).unwrap();
        let mut files = vec![("json", native(&clean)), ("text", text_form)];
        if cfg!(feature = "analytics") {
            let folder = Folder::new();
            let path = folder.path("clean.parquet");
            fraglab::trace::write_trace(&clean, Path::new(&path)).unwrap();
            files.push(("parquet", std::fs::read(&path).unwrap()));
        }
        for (format, bytes) in files {
            let file = String::from_utf8_lossy(&bytes);
            let left: Vec<&&str> = texts.iter().filter(|text| file.contains(**text)).collect();
            assert!(left.is_empty(), "{format}: {left:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn any_trace_stays_a_trace_of_the_same_requests(original in any_traces()) {
            let (trace, _) = anonymous(&original);
            let ops = |trace: &Trace| -> Vec<Op> { trace.events.iter().map(|e| e.op).collect() };
            prop_assert_eq!(ops(&trace), ops(&original));
            let sizes = |trace: &Trace| -> Vec<u64> {
                trace.blocks.iter().map(|block| block.size_bytes).collect()
            };
            prop_assert_eq!(sizes(&trace), sizes(&original));
            prop_assert_eq!(&trace.start, &original.start);
            // What was different stays different, what was equal stays equal.
            for (new, old) in [(&trace.phases, &original.phases), (&trace.modules, &original.modules)] {
                for i in 0..old.len() {
                    for j in 0..i {
                        prop_assert_eq!(new[i] == new[j], old[i] == old[j], "{} {}", &old[i], &old[j]);
                    }
                }
            }
            for (new, old) in trace.phases.iter().zip(&original.phases) {
                prop_assert_eq!(step_name(new), step_name(old));
            }
            let read = read_native(native(&trace).as_slice()).unwrap();
            prop_assert_eq!(read, trace);
        }
    }
}

mod program {
    use super::*;

    const SECRET: &str = "name acme\nmark acme.forward\nalloc acme_w 1MiB\nalloc x 2MiB stream=7\n\
                          free acme_w x\n";

    #[test]
    fn writes_what_can_be_shown_and_tells_what_is_gone() {
        let folder = Folder::new();
        let (input, output) = (folder.file("acme.txt", SECRET), folder.path("shown.json"));
        let done = fraglab(&["anonymize", &input, &output]);
        assert_code(&done, 0);
        let text = stdout(&done);
        assert!(text.contains("gone") && text.contains("2 names of blocks"), "{text}");
        assert!(text.contains("1 phase renamed, 1 stream handle renumbered"), "{text}");
        assert!(text.contains("left") && text.contains("2 blocks in 5 events"), "{text}");
        assert!(stderr(&done).contains("wrote"), "{}", stderr(&done));
        let written = std::fs::read_to_string(&output).unwrap();
        assert!(!written.contains("acme"), "{written}");
        let facts = json(&fraglab(&["info", "--json", &output]));
        assert_eq!(facts["header"]["name"], "shown", "the file's own name");
        assert_eq!(facts["stats"]["requested_bytes_peak"], 3 << 20);
    }

    #[test]
    fn goes_through_pipes_and_tells_json() {
        let folder = Folder::new();
        let report = folder.path("report.json");
        let args = ["anonymize", "-", "-", "--to", "text", "--name", "case-7", "--json", &report];
        let done = fraglab_reading(SECRET, &args);
        assert_code(&done, 0);
        assert!(stdout(&done).contains("name case-7") && !stdout(&done).contains("acme"));
        let report: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
        assert_eq!(report["file"], "-");
        assert_eq!(report["gone"]["block_names"], 2);
        assert_eq!(report["gone"]["name"], true);
        let output = folder.path("out.txt");
        let done = fraglab_reading(SECRET, &["anonymize", "-", &output, "--json", "-"]);
        assert_eq!(json(&done)["output"], output.as_str());
    }

    #[test]
    fn keeps_phases_and_is_quiet_when_told() {
        let folder = Folder::new();
        let input = folder.file("acme.txt", SECRET);
        let output = folder.path("kept.txt");
        let done = fraglab(&["anonymize", "--keep-phases", "-q", &input, &output]);
        assert_code(&done, 0);
        assert!(done.stdout.is_empty() && done.stderr.is_empty(), "{}", stderr(&done));
        assert!(std::fs::read_to_string(&output).unwrap().contains("mark acme.forward"));
    }

    #[test]
    fn refuses_to_write_over_what_it_reads_and_formats_that_nothing_says() {
        let folder = Folder::new();
        let input = folder.file("acme.txt", SECRET);
        assert!(assert_one_error(&fraglab(&["anonymize", &input, &input])).contains("overwrite"));
        let error = assert_one_error(&fraglab(&["anonymize", &input, "-"]));
        assert!(error.contains("--to"), "{error}");
        let (output, report) = (folder.path("a.json"), folder.path("a.json"));
        let error = assert_one_error(&fraglab(&["anonymize", &input, &output, "--json", &report]));
        assert!(error.contains("two outputs"), "{error}");
        assert!(!Path::new(&output).exists());
        let help = stdout(&fraglab(&["anonymize", "--help"]));
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }

    /// The files that people would look at are the same, byte for byte.
    #[test]
    fn decisions_are_the_same_files() {
        let Some(dir) = shared_dir() else { return };
        let folder = Folder::new();
        let input = dir.join("gpt2-small.stacks.pickle.gz").display().to_string();
        let clean = folder.path("clean.json.gz");
        assert_code(&fraglab(&["anonymize", &input, &clean]), 0);
        let decisions = |trace: &str, name: &str| {
            let file = folder.path(name);
            let args = ["run", trace, "--alloc", "caching", "--decisions", &file, "--quiet"];
            assert_code(&fraglab(&args), 0);
            std::fs::read(file).unwrap()
        };
        let (before, after) = (decisions(&input, "a.csv"), decisions(&clean, "b.csv"));
        assert!(before.len() > 10_000);
        assert!(before == after, "the decisions differ");
        assert_code(&fraglab(&["verify", &clean]), 0);
    }
}
