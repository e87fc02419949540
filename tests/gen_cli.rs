//! `fraglab gen` and the descriptions that it reads: every key, every mistake by its place and its
//! words, and what the program does with them.

use std::fs;
use std::path::{Path, PathBuf};

use fraglab::import::{ReadOptions, read_trace};
use fraglab::trace::{SourceKind, Trace};
use fraglab::units::GIB;
use fraglab::workload::gpus::{GPUS, REACHED};
use fraglab::workload::options::{OPTIONS, OptionUse};
use fraglab::workload::{
    ActivationOffload, Dtype, Family, Head, JOB_KEYS, Job, Lengths, LoraTarget, Optimizer,
    OptimizerOffload, Place, Recompute, example_job, read_job, write_job,
};
use proptest::prelude::*;

use crate::common::program::{
    Folder, assert_code, assert_one_error, fraglab, fraglab_reading, stderr, stdout, unread,
};

const TINY: &str = "[model]\ntype = \"llama\"\nlayers = 2\nhidden = 128\nvocabulary = 1000\n\
                    [train]\nbatch = 2\nsequence = 64\nsteps = 1\n";

fn beside(keys: &[(&str, &str)]) -> Vec<(String, String)> {
    keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[track_caller]
fn job(text: &str) -> Job {
    read_job(text, &[]).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

#[track_caller]
fn tiny_with(keys: &[(&str, &str)]) -> Job {
    read_job(TINY, &beside(keys)).unwrap_or_else(|error| panic!("{error}"))
}

/// The error of a text: its place and message.
#[track_caller]
fn wrong(text: &str) -> String {
    read_job(text, &[]).expect_err(text).to_string()
}

/// The folder with the descriptions that ship, each with its name.
fn descriptions() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/models");
    let files = fs::read_dir(folder).expect("ships").map(|file| file.expect("an entry").path());
    let stem = |path: &Path| path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
    let mut named: Vec<(String, PathBuf)> =
        files.map(|path| (stem(&path).expect("a name"), path)).collect();
    named.sort();
    named
}

fn shipped(name: &str) -> Job {
    let (_, path) = descriptions().into_iter().find(|(found, _)| found == name).expect(name);
    job(&fs::read_to_string(path).expect("ships"))
}

#[test]
fn every_description_that_ships_is_read_and_has_its_own_name() {
    let all = descriptions();
    assert_eq!(all.len(), 14);
    for (name, path) in all {
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(job(&text).name, name);
        assert!(text.starts_with("# "), "{name} says what it is");
        let printed = fraglab(&["gen", "--example", &name]);
        assert_code(&printed, 0);
        assert_eq!(stdout(&printed), text, "{name} is what --example prints");
    }
}

/// The figures are those of the recorded jobs' list.
#[test]
fn descriptions_say_what_the_recorded_jobs_were() {
    let sizes = |name: &str| {
        let job = shipped(name);
        let shape = &job.shape;
        let train = &job.train;
        ([shape.layers, shape.hidden, shape.ffn], [train.batch, train.sequence, train.steps])
    };
    assert_eq!(sizes("llama-1b-plain"), ([24, 2048, 5504], [8, 2048, 4]));
    assert_eq!(sizes("llama-3b-recompute"), ([26, 3200, 8640], [8, 2048, 3]));
    assert_eq!(sizes("llama-7b-lora"), ([32, 4096, 11008], [4, 2048, 3]));
    assert_eq!(sizes("llama-7b-lora-recompute"), ([32, 4096, 11008], [16, 2048, 3]));
    assert_eq!(sizes("gpt2-xl-plain"), ([48, 1600, 6400], [8, 1024, 3]));
    assert_eq!(sizes("opt-1-3b-act-offload"), ([24, 2048, 8192], [8, 1024, 3]));
    assert_eq!(sizes("opt-1-3b-recompute-offload"), ([24, 2048, 8192], [16, 2048, 3]));
    assert_eq!(sizes("mixtral-moe"), ([12, 1024, 3584], [8, 2048, 4]));
    assert_eq!(sizes("llama-1b-zero3.rank0"), ([24, 2048, 5504], [8, 2048, 4]));
    assert_eq!(sizes("pipeline-1f1b"), ([32, 4096, 11008], [2, 2048, 3]));
    assert_eq!(sizes("pipeline-1f1b-recompute"), ([32, 4096, 11008], [4, 4096, 3]));
    let gpt = shipped("gpt2-xl-plain");
    assert_eq!((gpt.train.dtype, gpt.train.autocast), (Dtype::Fp32, Some(Dtype::Bf16)));
    assert_eq!((gpt.shape.dropout, gpt.shape.tied_head, gpt.shape.positions), (0.1, true, 1024));
    assert_eq!(shipped("opt-1-3b-act-offload").shape.dropout, 0.0);
    let lora = shipped("llama-7b-lora").strategy.lora.expect("adapters");
    let targets = vec![LoraTarget::Q, LoraTarget::K, LoraTarget::V, LoraTarget::O];
    assert_eq!((lora.rank, lora.targets, lora.dropout), (16, targets, 0.05));
    let lengths = Lengths { min: 256, max: 4096, tokens: 16384 };
    assert_eq!(shipped("llama-1b-varlen").lengths, Some(lengths));
    let pipeline = shipped("pipeline-1f1b");
    assert_eq!((pipeline.train.micro_batches, pipeline.train.clip), (8, false));
    assert_eq!((pipeline.parallel.pipeline, pipeline.parallel.virtual_stages), (4, 2));
    let offload = shipped("opt-1-3b-recompute-offload");
    assert_eq!(offload.strategy.optimizer_offload, OptimizerOffload::Gradients);
    assert_eq!(offload.train.optimizer, Optimizer::Sgd);
}

#[test]
fn what_is_not_said_follows_the_family() {
    let of = |family: &str, hidden: u64| {
        job(&format!("[model]\ntype = \"{family}\"\nlayers = 3\nhidden = {hidden}\n"))
    };
    let llama = of("llama", 4096);
    assert_eq!((llama.shape.heads, llama.shape.kv_heads, llama.shape.ffn), (32, 32, 11008));
    assert_eq!((llama.shape.vocabulary, llama.shape.positions), (32_000, 0));
    assert_eq!((llama.train.batch, llama.train.sequence, llama.train.steps), (8, 2048, 3));
    assert_eq!((llama.train.dtype, llama.train.optimizer), (Dtype::Bf16, Optimizer::Adamw));
    assert!(llama.train.clip && !llama.shape.tied_head);
    assert_eq!(llama.name, "llama");
    let gpt = of("gpt", 1600);
    assert_eq!((gpt.shape.heads, gpt.shape.ffn, gpt.shape.positions), (25, 6400, 1024));
    assert_eq!((gpt.shape.vocabulary, gpt.shape.dropout), (50_257, 0.1));
    assert!(gpt.shape.tied_head && gpt.train.sequence == 1024);
    let bert = of("bert", 1024);
    assert_eq!((bert.shape.heads, bert.shape.positions, bert.train.sequence), (16, 512, 512));
    let opt = of("opt", 2048);
    assert_eq!((opt.shape.heads, opt.shape.vocabulary, opt.shape.dropout), (32, 50_272, 0.0));
    let moe = of("moe", 1024);
    assert_eq!((moe.shape.experts, moe.shape.top_k, moe.shape.ffn), (8, 2, 3584));
    let hardware = llama.hardware;
    assert_eq!(hardware.gpu, "NVIDIA H200");
    assert_eq!(hardware.gpu_bytes, 150_109_880_320);
    assert_eq!(hardware.flops, 989e12 * REACHED.flops);
    assert_eq!(hardware.gpus_per_host, 8);
}

#[test]
fn a_preset_gives_a_shape_and_other_keys_change_it() {
    let plain = job("[model]\npreset = \"llama3-8b\"\n");
    assert_eq!((plain.shape.heads, plain.shape.kv_heads, plain.shape.vocabulary), (32, 8, 128_256));
    assert_eq!(plain.name, "llama3-8b");
    let other = job("[model]\npreset = \"llama3-8b\"\nlayers = 4\nheads = 16\nvocabulary = 50\n");
    assert_eq!((other.shape.layers, other.shape.heads), (4, 16));
    assert_eq!(other.shape.kv_heads, 16, "the preset's kv_heads go with the preset's heads");
    assert_eq!((other.shape.vocabulary, other.shape.ffn), (50, 14336));
    let narrow = job("[model]\npreset = \"llama3-8b\"\nhidden = 2048\n");
    assert_eq!(narrow.shape.ffn, 5632, "the preset's ffn goes with the preset's hidden");
    let bert = job("[model]\npreset = \"GPT3_8B\"\n").shape;
    assert_eq!((bert.family, bert.vocabulary, bert.head), (Family::Bert, 30_522, Head::Classifier));
    let gpt = job("[model]\npreset = \"gpt3_8b\"\ntype = \"gpt\"\n").shape;
    assert_eq!((gpt.family, gpt.vocabulary, gpt.head), (Family::Gpt, 50_257, Head::Classifier));
    let lm = job("[model]\npreset = \"GPT3_8B\"\nhead = \"lm\"\n").shape;
    assert!(lm.tied_head, "the preset's tied_head goes with the preset's head");
}

#[test]
fn a_gpu_may_be_named_and_its_figures_replaced() {
    let v100 = tiny_with(&[("hardware.gpu", "v100-32g")]);
    assert_eq!(v100.hardware.gpu_bytes, 32_510 << 20);
    assert_eq!(v100.hardware.host_bytes, 240 * GIB);
    assert_eq!(v100.train.dtype, Dtype::Fp16, "it has no bf16");
    let other = job(&format!(
        "{TINY}[hardware]\nmemory = \"40GiB\"\nhost_memory = 1_000_000\ngpus_per_host = 4\n\
         flops = 1e14\nmemory_bandwidth = \"2TB\"\nlink_bandwidth = 25_000_000_000\n\
         peer_bandwidth = 3e11\n"
    ));
    let hardware = other.hardware;
    assert_eq!((hardware.gpu_bytes, hardware.host_bytes), (40 * GIB, 1_000_000));
    assert_eq!((hardware.flops, hardware.memory_bytes_per_s), (1e14, 2e12));
    assert_eq!((hardware.link_bytes_per_s, hardware.peer_bytes_per_s), (25e9, 3e11));
    let slow = tiny_with(&[("train.dtype", "fp32")]);
    let fast = tiny_with(&[("train.dtype", "fp32"), ("train.autocast", "bf16")]);
    assert_eq!(slow.hardware.flops, 67e12 * REACHED.flops, "products of 32 bits");
    assert_eq!(fast.hardware.flops, 989e12 * REACHED.flops);
}

#[test]
fn strategies_are_read() {
    let strategy =
        |key: &str, value: &str| job(&format!("{TINY}[strategy]\n{key} = {value}\n")).strategy;
    assert_eq!(strategy("recompute", "\"full\"").recompute, Recompute::Every(1));
    assert_eq!(strategy("recompute", "2").recompute, Recompute::Every(2));
    assert_eq!(strategy("recompute", "\"selective\"").recompute, Recompute::Selective);
    assert_eq!(strategy("recompute", "\"none\"").recompute, Recompute::None);
    let saved = strategy("activation_offload", "\"saved\"");
    assert_eq!(saved.activation_offload, ActivationOffload::Saved);
    assert_eq!(strategy("lora", "\"none\"").lora, None);
    let lora = strategy("lora", "{}").lora.expect("a table, if an empty one");
    assert_eq!((lora.rank, lora.dropout), (16, 0.0));
    assert_eq!(lora.targets, [LoraTarget::Q, LoraTarget::V]);
    let lora = strategy("lora", "{ targets = [\"down\", \"q\", \"q\"], rank = 4 }").lora.unwrap();
    assert_eq!(lora.targets, [LoraTarget::Q, LoraTarget::Down], "ascending, each once");
    let table = job(&format!("{TINY}[strategy.lora]\nrank = 4\n")).strategy.lora.unwrap();
    assert_eq!(table.rank, 4);
}

#[test]
fn keys_beside_the_text_replace_it() {
    let text = format!("{TINY}[strategy]\nlora = {{ rank = 8 }}\n");
    let read = |keys: &[(&str, &str)]| read_job(&text, &beside(keys)).expect("a job");
    assert_eq!(read(&[("train.batch", "5")]).train.batch, 5);
    assert_eq!(read(&[("train.batch", "5"), ("train.batch", "6")]).train.batch, 6);
    assert_eq!(read(&[("strategy.recompute", "full")]).strategy.recompute, Recompute::Every(1));
    assert_eq!(read(&[("strategy.lora", "none")]).strategy.lora, None);
    assert_eq!(read(&[("strategy.lora.rank", "2")]).strategy.lora.unwrap().rank, 2);
    let targets = read(&[("strategy.lora.targets", "q, o")]).strategy.lora.unwrap().targets;
    assert_eq!(targets, [LoraTarget::Q, LoraTarget::O]);
    assert_eq!(read(&[("hardware.memory", "1.5GiB")]).hardware.gpu_bytes, GIB + GIB / 2);
    assert_eq!(read(&[("name", "7")]).name, "7");
    assert!(!read(&[("train.clip", "false")]).train.clip);
    let none = format!("{TINY}[strategy]\nlora = \"none\"\n");
    let lora = read_job(&none, &beside(&[("strategy.lora.rank", "3")])).unwrap().strategy.lora;
    assert_eq!(lora.unwrap().rank, 3);
    let alone = read_job("", &beside(&[("model.preset", "llama-tiny")])).expect("no file needed");
    assert_eq!(alone.shape.layers, 4);
}

#[test]
fn four_options_are_strategies_and_the_others_go_on_as_texts() {
    let bert = "[model]\ntype = \"bert\"\nlayers = 2\nhidden = 128\nhead = \"classifier\"\n";
    let job = job(&format!(
        "{bert}[options]\nuse_ckp = true\nwith_activation_offload = true\n\
         use_cpu_embedding = true\n\
         with_tiling_linear = true\nwith_mem_saving_comm = true\noverall_gpu_mem_ratio = 1\n\
         margin_use_ratio = 0.75\nchunk_size = \"64Mi\"\nuse_hybrid_adam = false\n"
    ));
    let strategy = &job.strategy;
    assert_eq!(strategy.recompute, Recompute::Every(1));
    assert_eq!(strategy.activation_offload, ActivationOffload::Checkpoints);
    assert!(strategy.cpu_embedding && strategy.tiled_linear);
    let options: Vec<(&str, &str)> =
        job.options.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let expected = [
        ("chunk_size", "64Mi"),
        ("margin_use_ratio", "0.75"),
        ("overall_gpu_mem_ratio", "1"),
        ("use_hybrid_adam", "false"),
        ("with_mem_saving_com", "true"),
    ];
    assert_eq!(options, expected);
}

#[test]
fn an_option_and_a_strategy_may_agree_but_not_contradict() {
    let text = |strategy: &str, option: &str| {
        format!("{TINY}[strategy]\n{strategy}\n[options]\n{option}\n")
    };
    let fine = job(&text("recompute = 2", "use_ckp = true"));
    assert_eq!(fine.strategy.recompute, Recompute::Every(2));
    job(&text("recompute = \"none\"", "use_ckp = false"));
    assert_eq!(
        wrong(&text("recompute = \"none\"", "use_ckp = true")),
        "13:1: option use_ckp = true contradicts strategy.recompute, which says otherwise: leave \
         one of the two away"
    );
    assert!(wrong(&text("recompute = \"full\"", "use_ckp = false")).starts_with("13:1: option"));
    assert!(wrong(&text("recompute = \"selective\"", "use_ckp = false")).starts_with("13:1: opt"));
    let saved = "activation_offload = \"saved\"";
    assert!(wrong(&text(saved, "with_activation_offload = true")).starts_with("13:1: option"));
    assert!(
        wrong(&text("cpu_embedding = false", "use_cpu_embedding = true")).contains("leave one")
    );
    // Of the text and what stands beside it the latter counts, whichever of the two names it uses.
    let full = text("recompute = \"full\"", "");
    let off = read_job(&full, &beside(&[("options.use_ckp", "false")])).expect("replaced");
    assert_eq!(off.strategy.recompute, Recompute::None);
    let option = text("", "use_ckp = true");
    let off = read_job(&option, &beside(&[("strategy.recompute", "none")])).expect("replaced");
    assert_eq!(off.strategy.recompute, Recompute::None);
}

/// What is wrong with one line put behind a small description, and where.
#[test]
fn mistakes_are_told_with_their_place_what_was_expected_and_what_to_do() {
    let llama = "[model]\ntype = \"llama\"\nlayers = 4\nhidden = 256\n";
    let bert = "[model]\ntype = \"bert\"\nlayers = 4\nhidden = 256\nhead = \"classifier\"\n";
    let cases: [(&str, &str, &str); 61] = [
        // Not TOML, or not ours.
        ("", "[model\n", "1:7: not TOML: unclosed table, expected `]`"),
        (
            llama,
            "batch = \n",
            "5:9: not TOML: string values must be quoted, expected literal string",
        ),
        (llama, "[train]\nbtach = 4\n", "6:1: unknown key train.btach; did you mean batch?"),
        (llama, "[trian]\nbatch = 4\n", "5:2: unknown table trian; did you mean train?"),
        (llama, "batch = 4\n", "5:1: unknown key model.batch; did you mean train.batch?"),
        (llama, "[moe]\nxyz = 4\n", "6:1: unknown key moe.xyz; expected one of imbalance"),
        (
            llama,
            "[options]\nuse_ckpt = true\n",
            "unknown key options.use_ckpt; did you mean use_ckp?",
        ),
        // Missing.
        ("", "", "1:1: model.type is missing: say which family the model is of"),
        (
            "[model]\ntype = \"llama\"\n",
            "",
            "1:2: model.layers is missing: say it, or name a preset",
        ),
        (
            "[model]\ntype = \"gpt\"\nlayers = 2\nhidden = 100\n",
            "",
            "4:1: model.heads is missing: hidden",
        ),
        // The wrong kind or out of range.
        (
            llama,
            "heads = \"four\"\n",
            "5:1: model.heads is \"four\": expected a whole number from 1 to",
        ),
        (llama, "heads = 0\n", "5:1: model.heads is 0: expected a whole number from 1"),
        (llama, "heads = -1\n", "5:1: model.heads is -1: expected a whole number"),
        (
            llama,
            "ffn = 99999999999999999999\n",
            "5:1: model.ffn is 99999999999999999999: expected a whole",
        ),
        (llama, "heads = 2.5\n", "5:1: model.heads is 2.5: expected a whole number"),
        (llama, "dropout = 1.0\n", "5:1: model.dropout is 1: expected a probability, 0 to below 1"),
        (llama, "dropout = nan\n", "5:1: model.dropout is NaN: expected a probability"),
        (llama, "tied_head = 1\n", "5:1: model.tied_head is 1: expected true or false"),
        (llama, "head = \"lmm\"\n", "expected \"lm\" or \"classifier\"; did you mean lm?"),
        (
            "[model]\ntype = \"lama\"\n",
            "",
            "2:1: model.type is \"lama\": expected \"bert\", \"gpt\"",
        ),
        ("[model]\ntype = \"lama\"\n", "", "\"llama\" or \"moe\"; did you mean llama?"),
        (
            "[model]\npreset = \"llama-8b\"\n",
            "",
            "2:1: model.preset is \"llama-8b\": expected the name",
        ),
        (
            "[model]\ntype = \"llama\"\nlayers = 0\n",
            "",
            "3:1: model.layers is 0: expected a whole number",
        ),
        (
            llama,
            "[train]\ndtype = \"int8\"\n",
            "6:1: train.dtype is \"int8\": expected \"bf16\", \"fp16\"",
        ),
        (
            llama,
            "[train]\nsteps = 1979-05-27\n",
            "6:1: train.steps is a date: expected a whole number",
        ),
        (
            llama,
            "[train]\nsteps = [1]\n",
            "train.steps is a list of other things than texts: expected",
        ),
        (llama, "[train]\nsteps.x = 1\n", "6:1: train.steps is a table: expected a whole number"),
        ("model = 3\n", "", "1:1: model is 3: expected a table: [model]"),
        ("train = [\"a\"]\n", llama, "1:1: train is a list: expected a table: [train]"),
        (
            llama,
            "[strategy]\nrecompute = 0\n",
            "6:1: strategy.recompute is 0: expected \"none\", \"full\"",
        ),
        (llama, "[strategy]\nrecompute = true\n", "or \"selective\", or k for every k-th layer"),
        (
            llama,
            "[strategy]\nlora = 8\n",
            "6:1: strategy.lora is 8: expected a table {rank, targets",
        ),
        (
            llama,
            "[strategy]\nlora = { rank = 0 }\n",
            "6:10: strategy.lora.rank is 0: expected a whole",
        ),
        (
            llama,
            "[strategy]\nlora = { targets = [\"x\"] }\n",
            "6:10: strategy.lora.targets is \"x\": exp",
        ),
        (
            llama,
            "[strategy]\nlora = { targets = [] }\n",
            "strategy.lora.targets is a list: expected a l",
        ),
        (
            llama,
            "[strategy]\nzero = 4\n",
            "6:1: strategy.zero is 4: expected a whole number from 0 to 3",
        ),
        (
            llama,
            "[hardware]\ngpu = \"h300\"\n",
            "6:1: hardware.gpu is \"h300\": expected \"h200\", \"h100",
        ),
        (
            llama,
            "[hardware]\nmemory = \"lots\"\n",
            "6:1: hardware.memory is \"lots\": expected a size as",
        ),
        (llama, "[hardware]\nflops = 0\n", "6:1: hardware.flops is 0: expected a number above 0"),
        (
            llama,
            "[hardware]\nlink_bandwidth = \"fast\"\n",
            "expected bytes a second above 0, as in",
        ),
        (llama, "[options]\nmargin_use_ratio = 1.5\n", "expected a share above 0, at most 1"),
        (
            llama,
            "[options]\nchunk_size = \"64MiB\"\n",
            "expected elements of a chunk, as in \"64Mi\"",
        ),
        // What does not go together.
        (
            llama,
            "heads = 3\n",
            "5:1: heads = 3 do not divide hidden = 256: expected a divisor, as 2",
        ),
        (
            llama,
            "heads = 4\nkv_heads = 3\n",
            "6:1: kv_heads = 3 do not divide heads = 4: expected a",
        ),
        (
            llama,
            "experts = 8\n",
            "5:1: model.experts is for type moe, and this model is of type llama",
        ),
        (llama, "[moe]\nimbalance = 1\n", "6:1: moe.imbalance is for type moe"),
        (llama, "positions = 64\n", "5:1: positions are rotary in this family and have no table"),
        (llama, "[strategy]\ntiled_linear = true\n", "6:1: tiled linears are for type bert only"),
        (
            llama,
            "[train]\nautocast = \"bf16\"\n",
            "6:1: autocast casts weights of 32 bits: say dtype =",
        ),
        (
            llama,
            "[strategy]\nactivation_offload = \"checkpoints\"\n",
            "6:1: only recomputed layers have checkpoints to keep on the host: say recompute = ",
        ),
        (llama, "[strategy]\nrecompute = 5\n", "6:1: every 5th layer of 4 is the first only"),
        (
            llama,
            "[strategy]\nzero = 3\n",
            "6:1: ZeRO shares model data out among data-parallel ranks",
        ),
        (
            llama,
            "[strategy]\nzero = 3\n[parallel]\ndata = 2\npipeline = 2\n",
            "6:1: ZeRO with a pipeline is not modelled",
        ),
        (
            llama,
            "[parallel]\ntensor = 3\n",
            "6:1: tensor = 3 ranks do not divide heads = 2: expected",
        ),
        (
            llama,
            "[parallel]\npipeline = 8\n",
            "6:1: layers = 4 are fewer than pipeline x virtual_stages",
        ),
        (
            llama,
            "[parallel]\nvirtual_stages = 2\n",
            "6:1: virtual_stages = 2 need a pipeline of several",
        ),
        (
            llama,
            "[parallel]\npipeline = 2\nstage = 2\n",
            "7:1: stage = 2 does not exist: stages are",
        ),
        (
            llama,
            "[lengths]\nmin = 9\nmax = 8\n",
            "6:1: the shortest sequence, min = 9, is longer than",
        ),
        (
            llama,
            "[lengths]\nmax = 9\ntokens = 8\n",
            "7:1: tokens = 8 of a batch do not hold one sequence",
        ),
        (
            bert,
            "[strategy.lora]\ntargets = [\"gate\"]\n",
            "7:1: a model of type bert has no gate to adapt",
        ),
        (
            bert,
            "positions = 64\n[train]\nsequence = 65\n",
            "8:1: sequences of 65 tokens are longer than",
        ),
    ];
    for (head, tail, expected) in cases {
        let told = wrong(&format!("{head}{tail}"));
        assert!(told.contains(expected), "{tail:?}\n told {told}\n want {expected}");
    }
}

#[test]
fn more_that_does_not_go_together() {
    let told =
        |keys: &[(&str, &str)]| read_job(TINY, &beside(keys)).expect_err("refused").to_string();
    let moe = [("model.type", "moe"), ("strategy.lora.targets", "q,up")];
    assert_eq!(
        told(&moe),
        "strategy.lora.targets=q,up: experts are not adapted: expected targets among q, k, v, o \
         for type moe"
    );
    let top = [("model.type", "moe"), ("model.top_k", "9")];
    assert!(told(&top).starts_with("model.top_k=9: top_k = 9 is more than there are experts, 8"));
    let interleaved = [
        ("parallel.pipeline", "2"),
        ("parallel.virtual_stages", "2"),
        ("model.layers", "4"),
        ("train.micro_batches", "3"),
    ];
    assert!(told(&interleaved).contains("interleaved schedule (virtual_stages) needs: expected 4"));
    let host = [("strategy.optimizer_offload", "state"), ("train.optimizer", "none")];
    assert!(
        told(&host)
            .ends_with("there is no optimizer to keep on the host (train.optimizer = \"none\")")
    );
    let clip = [("strategy.optimizer_offload", "gradients"), ("train.clip", "true")];
    assert!(told(&clip).starts_with("train.clip=true: gradients go to the host as they are made"));
    let tied = [("model.type", "gpt"), ("model.heads", "2"), ("strategy.cpu_embedding", "true")];
    assert!(told(&tied).contains("say tied_head = false or head = \"classifier\""));
    let tiles = [
        ("model.type", "bert"),
        ("model.ffn", "6"),
        ("options.with_tiling_linear", "true"),
        ("model.heads", "2"),
    ];
    assert!(told(&tiles).contains("cut ffn = 6 into four"));
    let family = [("model.preset", "gpt2-xl")];
    assert!(told(&family).contains("preset gpt2-xl is of type gpt, not llama: leave type away"));
    assert!(told(&[("train.batch", "x")]).starts_with("train.batch=x: train.batch is \"x\": exp"));
    assert!(
        told(&[("batch", "1")]).starts_with("batch=1: unknown key batch; did you mean train.batch")
    );
    assert!(told(&[("train", "1")]).starts_with("train=1: unknown key train"));
    assert!(told(&[("name", " ")]).contains("expected a text of 1 to 200 characters"));
}

#[test]
fn jobs_too_large_to_be_written_down_are_refused_with_what_to_lower() {
    let told =
        |keys: &[(&str, &str)]| read_job(TINY, &beside(keys)).expect_err("refused").to_string();
    let wide =
        [("model.hidden", "16777216"), ("model.layers", "100000"), ("model.ffn", "67108864")];
    assert!(told(&wide).contains("more than 2^56 parameters: lower model.layers, hidden, ffn"));
    let long = [("train.sequence", "16777216"), ("train.batch", "1048576")];
    assert!(told(&long).contains("more than 2^58 bytes: lower train.batch or train.sequence"));
    let many = [("train.steps", "1000000"), ("train.micro_batches", "1000")];
    let text = told(&many);
    assert!(
        text.contains("more than 200,000,000 events: no trace has more than 4,294,967,295; or lower train.steps = 1000000")
    );
    assert!(
        text.starts_with(
            "train.steps=1000000: the trace would have about 2,100,000,000,000 events"
        )
    );
}

#[test]
fn columns_count_characters_and_the_excerpt_points_there() {
    let text = "name = \"ä\"\n[strategy]\nlora = { targets = [\"ß\"], rang = 3 }\n";
    let error = read_job(text, &[]).expect_err("rang");
    assert_eq!(error.place, Place::Text { line: 3, column: 27 });
    let excerpt = error.excerpt().expect("a line");
    let (line, caret) = excerpt.split_once('\n').unwrap();
    assert_eq!(line, "lora = { targets = [\"ß\"], rang = 3 }");
    assert_eq!(caret.chars().count(), 27);
    let error = read_job(text, &beside(&[("x", "1")])).expect_err("first the text's");
    assert_eq!(error.place, Place::Text { line: 3, column: 27 });
    assert_eq!(read_job("", &beside(&[("x", "1")])).expect_err("x").excerpt(), None);
}

#[test]
fn what_is_written_is_read_as_the_same_job() {
    for (name, path) in descriptions() {
        let first = job(&fs::read_to_string(path).unwrap());
        assert_eq!(job(&write_job(&first)), first, "{name}");
    }
    let odd = tiny_with(&[("name", "a \"b\" \\ \t c"), ("strategy.recompute", "2")]);
    assert_eq!(job(&write_job(&odd)), odd);
}

/// Lines of an example that are comments say what holds without them: switched on, one by one, they
/// change nothing.
#[test]
fn examples_show_every_key_and_what_holds_without_it() {
    for family in [Family::Bert, Family::Gpt, Family::Opt, Family::Llama, Family::Moe] {
        let text = example_job(family).expect("made");
        let plain = job(&text);
        assert_eq!(plain.shape.family, family);
        let (mut table, mut tried) = (String::new(), 0);
        for line in text.lines() {
            let code = line.trim_start_matches("# ");
            if let Some(name) = code.strip_prefix('[') {
                table = name.trim_end_matches(']').to_owned();
            }
            let Some((key, rest)) = code.split_once(" = ") else { continue };
            let path = format!("{table}.{key}");
            let alone = ["model.preset", "strategy.lora.", "lengths."];
            if !line.starts_with("# ") || alone.iter().any(|key| path.starts_with(key)) {
                continue;
            }
            let value = rest.split("  #").next().unwrap().trim().trim_matches('"');
            let mut same = read_job(&text, &beside(&[(&path, value)]))
                .unwrap_or_else(|error| panic!("{error}"));
            same.options.clear();
            assert_eq!(same, plain, "{path}");
            tried += 1;
        }
        assert!(tried > 40, "{tried}");
        for key in JOB_KEYS {
            let name = key.path.rsplit('.').next().unwrap();
            let of_others = ["positions", "experts", "top_k", "imbalance"].contains(&name);
            let shown =
                text.lines().any(|l| l.trim_start_matches("# ").starts_with(&format!("{name} = ")));
            assert!(shown || of_others, "{family:?} lacks {}", key.path);
        }
        for option in OPTIONS {
            assert!(text.contains(&format!("# {} = ", option.name)), "{}", option.name);
        }
    }
}

fn generated(folder: &Folder, name: &str, arguments: &[&str]) -> Trace {
    let path = folder.path(name);
    let output = fraglab(&[&["gen", "-o", &path], arguments].concat());
    assert_code(&output, 0);
    read_trace(Path::new(&path), &ReadOptions::default()).expect("a trace").trace
}

#[test]
fn a_trace_is_written_with_its_head_and_a_summary() {
    let folder = Folder::new();
    let spec = folder.file("tiny.toml", TINY);
    let path = folder.path("tiny.json.zst");
    let arguments = ["gen", &spec, "-o", &path, "--set", "strategy.recompute=full", "--set=name=t"];
    let output = fraglab(&[&arguments[..], &["--with_mem_cache", "--chunk_size", "1Mi"]].concat());
    assert_code(&output, 0);
    assert!(
        stderr(&output).starts_with(&format!("fraglab: wrote {path}: ")),
        "{}",
        stderr(&output)
    );
    assert_eq!(stderr(&output).lines().count(), 1);
    let summary = stdout(&output);
    for words in ["t\n", " parameters in ", "strategies: recompute", "live peak: ", "parameter  "] {
        assert!(summary.contains(words), "{words}: {summary}");
    }
    let trace = read_trace(Path::new(&path), &ReadOptions::default()).expect("a trace").trace;
    let header = &trace.header;
    assert_eq!((header.name.as_str(), header.source.kind), ("t", SourceKind::Generated));
    assert_eq!(header.device.name.as_deref(), Some("NVIDIA H200"));
    assert_eq!(header.device.total_bytes, Some(150_109_880_320));
    assert_eq!(header.strategies, ["recompute"]);
    let model = header.model.as_ref().expect("a model");
    assert_eq!(model.options.get("with_mem_cache").map(String::as_str), Some("true"));
    assert_eq!(model.options.get("chunk_size").map(String::as_str), Some("1Mi"));
    assert_eq!(model.options["host"], (2048 * GIB).to_string());
    assert!(!model.options.contains_key("use_ckp"), "a strategy is no option of an allocator");
}

/// Every option is a flag by its own name, with underscores and with dashes.
#[test]
fn every_option_is_a_flag() {
    let help = stdout(&fraglab(&["gen", "--help"]));
    let folder = Folder::new();
    let bert = folder.file("bert.toml", &example_job(Family::Bert).unwrap());
    for option in OPTIONS {
        assert!(help.contains(&format!("--{}", option.name)), "{}", option.name);
        for name in [option.name.to_owned(), option.name.replace('_', "-")] {
            let set = format!("--{name}={}", option.default);
            let set_on = "--set=options.use_ckp=true";
            let output = fraglab(&["gen", &bert, "--resolve", set_on, &set]);
            assert_code(&output, 0);
            let resolved = stdout(&output);
            if option.used == OptionUse::Chunk {
                assert!(resolved.contains(&format!("\n{} = ", option.name)), "{name}: {resolved}");
            }
        }
    }
    let resolved = |flags: &[&str]| {
        let output = fraglab(&[&["gen", &bert, "--resolve"], flags].concat());
        assert_code(&output, 0);
        job(&stdout(&output))
    };
    let flags = ["--use_ckp", "--with-activation-offload", "--with_tiling_linear=true"];
    let job = resolved(&flags);
    assert_eq!(job.strategy.activation_offload, ActivationOffload::Checkpoints);
    assert!(job.strategy.tiled_linear && job.strategy.recompute == Recompute::Every(1));
    let job = resolved(&["--set", "strategy.recompute=full", "--use_ckp=true"]);
    assert_eq!(job.strategy.recompute, Recompute::Every(1));
    let job = resolved(&["--with_mem_saving_comm", "--margin_use_ratio=0.5"]);
    assert_eq!(job.options["with_mem_saving_com"], "true");
    assert_eq!(job.options["margin_use_ratio"], "0.5");
}

#[test]
fn the_same_description_gives_the_same_bytes_however_many_threads_there_are() {
    let folder = Folder::new();
    let moe = TINY.replace("llama", "moe") + "[moe]\nimbalance = 1.0\n";
    let spec = folder.file("job.toml", &moe);
    let bytes = |name: &str, threads: &str| {
        let path = folder.path(name);
        assert_code(&fraglab(&["gen", &spec, "-o", &path, "--threads", threads]), 0);
        fs::read(path).unwrap()
    };
    let one = bytes("1.json", "1");
    assert!(bytes("2.json", "2") == one && bytes("7.json", "7") == one);
}

#[test]
fn pipes_go_in_and_out() {
    let folder = Folder::new();
    let output = fraglab_reading(TINY, &["gen", "-", "-o", "-", "--to", "json"]);
    assert_code(&output, 0);
    let path = folder.file("out.json", &stdout(&output));
    let piped = read_trace(Path::new(&path), &ReadOptions::default()).expect("only a trace").trace;
    let spec = folder.file("tiny.toml", TINY);
    assert_eq!(generated(&folder, "file.json", &[&spec]).events, piped.events);
    let text = fraglab(&["gen", &spec, "-o", "-", "--to", "text"]);
    assert!(stdout(&text).contains("\nalloc "), "{}", stdout(&text));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let folder = Folder::new();
    let spec = folder.file("tiny.toml", TINY);
    let every: [&[&str]; 4] = [
        &["gen", &spec, "-o", "-", "--to", "json"],
        &["gen", "--list"],
        &["gen", "--example", "moe"],
        &["gen", &spec, "--resolve"],
    ];
    for arguments in every {
        let output = unread(arguments);
        assert_code(&output, 0);
        assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
    }
}

#[test]
fn what_cannot_be_done_is_one_line_and_leaves_no_file() {
    let folder = Folder::new();
    let spec = folder.file("tiny.toml", TINY);
    let bad = folder.file("bad.toml", "[model]\ntype = \"llama\"\nlayers = 2\nhidden = \"x\"\n");
    let out = folder.path("out.json");
    let output = fraglab(&["gen", &bad, "-o", &out]);
    assert_code(&output, 2);
    let said = stderr(&output);
    let place =
        format!("fraglab: {bad}:4:1: model.hidden is \"x\": expected a whole number from 1");
    assert!(said.starts_with(&place), "{said}");
    assert_eq!(said.lines().skip(1).collect::<Vec<_>>(), ["  hidden = \"x\"", "  ^"]);
    let missing = folder.path("missing.toml");
    let binary = folder.path("binary.toml");
    fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    let no_format = folder.path("out.xyz");
    let nowhere = folder.path("none/out.json");
    let lines: [(&[&str], &str); 9] = [
        (&["gen", &missing, "-o", &out], "missing.toml: No such file"),
        (
            &["gen", &binary, "-o", &out],
            "is no text in UTF-8: expected the description of a job: TOML, as",
        ),
        (
            &["gen", &spec, "-o", &out, "--set", "train.zero=3"],
            "unknown key train.zero; did you mean st",
        ),
        (
            &["gen", &spec, "-o", &out, "--use_ckp=maybe"],
            "options.use_ckp=maybe: options.use_ckp is",
        ),
        (&["gen", &spec, "-o", "-"], "standard output has no name that says the format: add --to"),
        (&["gen", &spec, "-o", &out, "--to", "text"], "the name of a file says its format"),
        (&["gen", &spec, "-o", &spec], "would overwrite the input"),
        (&["gen", &spec, "-o", &nowhere], "none/out.json"),
        (
            &["gen", "--example", "lama"],
            "--example lama: no such description: expected one of bert",
        ),
    ];
    for (arguments, expected) in lines {
        let said = assert_one_error(&fraglab(arguments));
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    assert_code(&fraglab(&["gen", &spec, "-o", &no_format]), 2);
    for arguments in [&["gen"][..], &["gen", &spec], &["gen", &spec, "-o", &out, "--set", "x"]] {
        let output = fraglab(arguments);
        assert_code(&output, 2);
        assert!(stderr(&output).contains("Usage") || stderr(&output).contains("KEY=VALUE"));
    }
    let left = fs::read_dir(Path::new(&spec).parent().unwrap()).unwrap().count();
    assert_eq!(left, 3, "the three descriptions and nothing else");
}

#[test]
fn choices_are_listed() {
    let text = stdout(&fraglab(&["gen", "--list"]));
    for name in fraglab::workload::shapes::names() {
        assert!(text.contains(name), "{name}");
    }
    for gpu in GPUS {
        assert!(text.contains(gpu.name), "{}", gpu.name);
    }
    // 6,738,415,616 parameters are what Llama 7 B is known to have.
    assert!(text.contains("6,738,415,616"), "{text}");
    for (name, _) in descriptions() {
        assert!(text.contains(&name), "{name}");
    }
}

/// A value that may stand behind a key: good, nearly good, or of another kind.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        (0u64..40).prop_map(|n| n.to_string()),
        any::<u64>().prop_map(|n| n.to_string()),
        any::<i64>().prop_map(|n| n.to_string()),
        (-2.0f64..3.0).prop_map(|x| format!("{x:?}")),
        any::<f64>().prop_map(|x| format!("{x:?}")),
        any::<bool>().prop_map(|b| b.to_string()),
        Just("\"80GiB\"".to_owned()),
        Just("{ rank = 3, targets = [\"q\", \"up\"] }".to_owned()),
        Just("[\"q\", \"gate\"]".to_owned()),
        prop_oneof![
            Just("none"),
            Just("full"),
            Just("selective"),
            Just("llama"),
            Just("moe"),
            Just("bert"),
            Just("gpt"),
            Just("opt"),
            Just("fp32"),
            Just("bf16"),
            Just("checkpoints"),
            Just("saved"),
            Just("gradients"),
            Just("classifier"),
            Just("GPT3_8B"),
            Just("llama-tiny"),
            Just("v100-32g"),
            Just("64Mi"),
        ]
        .prop_map(|word| format!("\"{word}\"")),
    ]
}

fn any_key() -> impl Strategy<Value = String> {
    let options = OPTIONS.iter().map(|option| format!("options.{}", option.name));
    let keys: Vec<String> = JOB_KEYS.iter().map(|key| key.path.to_owned()).chain(options).collect();
    proptest::sample::select(keys)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Reading never panics, every error names a place, and what is read can be written and read.
    #[test]
    fn random_descriptions_are_read_or_refused(
        keys in proptest::collection::vec((any_key(), any_value()), 0..8),
        from_text in any::<bool>(),
    ) {
        let mut text = TINY.to_owned();
        let mut keys_beside = Vec::new();
        for (key, value) in &keys {
            if from_text {
                // Dotted keys need no tables; a key that is given twice is refused as TOML.
                text.insert_str(0, &format!("{key} = {value}\n"));
            } else {
                keys_beside.push((key.clone(), value.clone()));
            }
        }
        match read_job(&text, &keys_beside) {
            Ok(job) => {
                let again = read_job(&write_job(&job), &[]);
                prop_assert_eq!(again.as_ref(), Ok(&job), "{}", write_job(&job));
                prop_assert!(job.shape.hidden.is_multiple_of(job.shape.heads));
            }
            Err(error) => {
                let told = error.to_string();
                prop_assert!(told.contains(": ") && !told.contains('\n'), "{}", told);
            }
        }
    }

    /// Any bytes that are text are read or refused.
    #[test]
    fn random_texts_are_read_or_refused(text in "[\\[\\]{}=\"'#,.a-z0-9\n \u{e9}]{0,80}") {
        let _ = read_job(&text, &[]);
        let _ = read_job(TINY, &[(text.clone(), text)]);
    }

    /// Neither do sizes that no memory holds.
    #[test]
    fn numbers_of_any_size_give_no_panic(
        layers in any::<u64>(), hidden in any::<u64>(), batch in any::<u64>(),
    ) {
        let keys = [("model.layers", layers), ("model.hidden", hidden), ("train.batch", batch)];
        let keys: Vec<_> = keys.iter().map(|(k, v)| ((*k).to_owned(), v.to_string())).collect();
        let _ = read_job(TINY, &keys);
    }
}
