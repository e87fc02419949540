//! Modules and parameters of models: counts that are known of the public models, and what
//! strategies make of them.

use std::collections::BTreeSet;

use fraglab::trace::{ModelParameter, ModelUnit};
use fraglab::workload::shapes::{named, named_as};
use fraglab::workload::{Family, Head, Job, Lora, LoraTarget, Shape, stage_layers, units};

use crate::common::jobs::job;

/// The jobs of this module are whole models without any strategy, but for what a test changes.
fn shaped(name: &str, change: impl FnOnce(&mut Job)) -> Vec<ModelUnit> {
    let mut job = job(named(name).expect("a named shape"));
    change(&mut job);
    units(&job)
}

fn elements(units: &[ModelUnit]) -> u64 {
    units.iter().map(ModelUnit::elements).sum()
}

fn paths(units: &[ModelUnit]) -> Vec<&str> {
    units.iter().map(|unit| unit.module.as_str()).collect()
}

fn unit<'a>(units: &'a [ModelUnit], module: &str) -> &'a ModelUnit {
    units.iter().find(|unit| unit.module == module).expect("a module of the model")
}

/// Parameter counts as the models' cards and the transformers library give them; those of
/// PatrickStar's models as its logs do (spec patrickstar 6.1).
#[test]
fn parameters_of_known_models_are_as_many_as_their_authors_say() {
    for (name, expected) in [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("opt-125m", 125_239_296),
        ("opt-1.3b", 1_315_758_080),
        ("opt-6.7b", 6_658_473_984),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("bert-base", 109_514_298),
        ("GPT2small", 729_404_930),
        ("GPT_DS_20B", 20_460_912_642),
        ("GPT_DS_40B", 40_596_234_242),
    ] {
        assert_eq!(elements(&shaped(name, |_| ())), expected, "{name}");
    }
}

/// Spec patrickstar 1.4: both formulas, and the units of a layer.
#[test]
fn benchmark_models_follow_the_formulas() {
    for name in ["GPT2_1B", "GPT2_4B", "GPT3_8B", "GPT_DS_68B", "GPT_175B"] {
        let shape = named(name).unwrap();
        let (h, s, l) = (shape.hidden, shape.positions, shape.layers);
        let layers = l * (12 * h * h + 13 * h);
        let bert = 30_522 * h + s * h + 4 * h + layers + h * h + 3 * h + 2;
        let gpt = (50_257 + s) * h + layers + 4 * h;
        assert_eq!(elements(&units(&job(shape))), bert, "{name}");
        assert_eq!(elements(&units(&job(named_as(name, Family::Gpt).unwrap()))), gpt, "{name}");
    }
    let units = shaped("GPT3_8B", |_| ());
    let h = 3072;
    let sizes: Vec<u64> = units[4..12].iter().map(ModelUnit::elements).collect();
    let (square, up, down) = (h * h + h, 4 * h * h + 4 * h, 4 * h * h + h);
    assert_eq!(sizes, [square, square, square, square, 2 * h, up, down, 2 * h]);
    assert_eq!(units.len(), 4 + 8 * 72 + 2);
    assert_eq!(
        paths(&units[..13]),
        [
            "bert.embeddings.word_embeddings",
            "bert.embeddings.position_embeddings",
            "bert.embeddings.token_type_embeddings",
            "bert.embeddings.LayerNorm",
            "bert.encoder.layer.0.attention.self.query",
            "bert.encoder.layer.0.attention.self.key",
            "bert.encoder.layer.0.attention.self.value",
            "bert.encoder.layer.0.attention.output.dense",
            "bert.encoder.layer.0.attention.output.LayerNorm",
            "bert.encoder.layer.0.intermediate.dense",
            "bert.encoder.layer.0.output.dense",
            "bert.encoder.layer.0.output.LayerNorm",
            "bert.encoder.layer.1.attention.self.query",
        ]
    );
    assert_eq!(paths(&units[units.len() - 2..]), ["bert.pooler.dense", "classifier"]);
}

#[test]
fn modules_come_in_the_order_of_their_constructors() {
    let llama = shaped("llama-tiny", |_| ());
    let layer = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ];
    let mut expected = vec!["model.embed_tokens".to_owned()];
    for index in 0..4 {
        expected.extend(layer.map(|name| format!("model.layers.{index}.{name}")));
    }
    expected.extend(["model.norm", "lm_head"].map(str::to_owned));
    assert_eq!(paths(&llama), expected);

    let opt = shaped("opt-125m", |_| ());
    let expected = [
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.final_layer_norm",
        "model.decoder.layers.0.self_attn.k_proj",
        "model.decoder.layers.0.self_attn.v_proj",
        "model.decoder.layers.0.self_attn.q_proj",
        "model.decoder.layers.0.self_attn.out_proj",
        "model.decoder.layers.0.self_attn_layer_norm",
        "model.decoder.layers.0.fc1",
        "model.decoder.layers.0.fc2",
        "model.decoder.layers.0.final_layer_norm",
        "model.decoder.layers.1.self_attn.k_proj",
    ];
    assert_eq!(paths(&opt)[..12], expected);

    let gpt = shaped("gpt2-small", |_| ());
    let expected = [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0.ln_1",
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
        "transformer.h.0.ln_2",
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
    ];
    assert_eq!(paths(&gpt)[..8], expected);
    assert_eq!(paths(&gpt).last(), Some(&"transformer.ln_f"));

    let moe = shaped("mixtral-small", |_| ());
    let experts = unit(&moe, "model.layers.3.mlp.experts");
    let parameter = |name: &str, elements| ModelParameter {
        name: format!("model.layers.3.mlp.experts.{name}"),
        elements,
        frozen: false,
    };
    let matrix = 8 * 1024 * 3584;
    assert_eq!(
        experts.parameters,
        [parameter("gate_up_proj", 2 * matrix), parameter("down_proj", matrix)]
    );
    assert_eq!(unit(&moe, "model.layers.3.mlp.gate").elements(), 8 * 1024);
    // Half as many heads of keys and values.
    assert_eq!(unit(&moe, "model.layers.3.self_attn.k_proj").elements(), 1024 * 512);
}

#[test]
fn heads_are_the_familys() {
    let classifier = |name| shaped(name, |job| job.shape.head = Head::Classifier);
    assert_eq!(classifier("llama-tiny").last().unwrap().module, "score");
    assert_eq!(classifier("gpt2-small").last().unwrap().elements(), 2 * 768);
    let untied = shaped("bert-base", |job| job.shape.tied_head = false);
    assert_eq!(untied.last().unwrap().elements(), 30_522 * 768 + 30_522);
    let tied = shaped("bert-base", |_| ());
    assert_eq!(tied.last().unwrap().parameters[0].name, "cls.predictions.decoder.bias");
    assert_eq!(tied.last().unwrap().elements(), 30_522);
}

#[test]
fn embeddings_are_leaves_and_may_stay_on_the_host() {
    for (name, tables) in [("GPT3_8B", 3), ("gpt2-small", 2), ("opt-125m", 2), ("llama-1b", 1)] {
        let device = shaped(name, |_| ());
        let host = shaped(name, |job| job.strategy.cpu_embedding = true);
        assert_eq!(device.iter().filter(|unit| unit.leaf).count(), tables, "{name}");
        assert!(device.iter().all(|unit| !unit.host));
        for (index, unit) in host.iter().enumerate() {
            assert_eq!((unit.leaf, unit.host), (index < tables, index < tables), "{name}");
        }
    }
}

/// Spec patrickstar 5.4 and 2.1: four tiles each; 14 modules a layer instead of 8.
#[test]
fn tiles_add_up_to_the_linear_but_for_their_biases() {
    let plain = shaped("GPT_DS_20B", |_| ());
    let tiled = shaped("GPT_DS_20B", |job| job.strategy.tiled_linear = true);
    let h = 8192;
    assert_eq!(tiled.len() - plain.len(), 6 * 25);
    assert_eq!(elements(&tiled), elements(&plain));
    let layer = "bert.encoder.layer.7";
    let up = unit(&tiled, &format!("{layer}.intermediate.dense.linears.0.3"));
    assert_eq!(up.elements(), h * h + h);
    let down = |tile| unit(&tiled, &format!("{layer}.output.dense.linears.{tile}.0")).elements();
    assert_eq!([down(0), down(1), down(2), down(3)], [h * h, h * h, h * h, h * h + h]);
}

#[test]
fn adapters_come_after_the_model_and_alone_are_trained() {
    let lora =
        |targets: &[LoraTarget]| Some(Lora { rank: 16, targets: targets.to_vec(), dropout: 0.0 });
    let all = [LoraTarget::Q, LoraTarget::K, LoraTarget::V, LoraTarget::O];
    let base = shaped("llama-7b", |_| ());
    let adapted = shaped("llama-7b", |job| job.strategy.lora = lora(&all));
    assert_eq!(paths(&adapted)[..base.len()], paths(&base));
    let adapters = &adapted[base.len()..];
    assert_eq!(
        adapters[0].parameters[0].name,
        "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    );
    assert_eq!(adapters[1].module, "model.layers.0.self_attn.q_proj.lora_B.default");
    // 4 linears of 4096 by 4096, 32 layers: what PEFT counts for rank 16.
    assert_eq!(elements(adapters), 16_777_216);
    let frozen = |unit: &ModelUnit| unit.parameters.iter().all(|parameter| parameter.frozen);
    assert!(adapted[..base.len()].iter().all(frozen) && !adapters.iter().any(frozen));

    // GPT-2's one linear for queries, keys and values is adapted once.
    let gpt = shaped("gpt2-small", |job| job.strategy.lora = lora(&all[..3]));
    let adapters: Vec<_> = gpt.iter().filter(|unit| !frozen(unit)).collect();
    assert_eq!(adapters.len(), 2 * 12);
    assert_eq!([adapters[0].elements(), adapters[1].elements()], [16 * 768, 16 * 3 * 768]);
}

#[test]
fn tensor_ranks_divide_what_they_divide() {
    let t4 = shaped("opt-1.3b", |job| job.parallel.tensor = 4);
    let sizes = |module: &str| -> Vec<u64> {
        let unit = unit(&t4, &format!("model.decoder.{module}"));
        unit.parameters.iter().map(|parameter| parameter.elements).collect()
    };
    assert_eq!(sizes("embed_tokens"), [12_568 * 2048]);
    assert_eq!(sizes("embed_positions"), [2050 * 2048]);
    assert_eq!(sizes("layers.0.self_attn.q_proj"), [2048 * 512, 512]);
    assert_eq!(sizes("layers.0.self_attn.out_proj"), [512 * 2048, 2048]);
    assert_eq!(sizes("layers.0.fc1"), [2048 * 2048, 2048]);
    assert_eq!(sizes("layers.0.fc2"), [2048 * 2048, 2048]);
    assert_eq!(sizes("layers.0.final_layer_norm"), [2048, 2048]);
    // Fewer heads of keys than ranks: each rank has one.
    let t16 = shaped("llama3-8b", |job| job.parallel.tensor = 16);
    assert_eq!(unit(&t16, "model.layers.0.self_attn.k_proj").elements(), 4096 * 128);
    assert_eq!(unit(&t16, "model.layers.0.self_attn.q_proj").elements(), 4096 * 256);
}

#[test]
fn pipeline_stages_share_the_model_out() {
    let stage = |name: &str, stage| {
        let mut job = job(named(name).unwrap());
        job.parallel.pipeline = 4;
        job.parallel.virtual_stages = 2;
        job.parallel.stage = stage;
        job
    };
    // The recorded pipeline: rank 0 of 4 stages × 2, eight layers of 32 in two parts, embedding.
    let first = stage("llama-7b", 0);
    assert_eq!(stage_layers(&first), [0..4, 16..20]);
    let held = units(&first);
    assert_eq!(held.len(), 1 + 8 * 9);
    assert_eq!(held[0].module, "model.embed_tokens");
    let last = units(&stage("llama-7b", 3));
    assert_eq!(paths(&last)[last.len() - 2..], ["model.norm", "lm_head"]);

    // Together they hold the model once; a tied head has a copy of the embedding.
    for (name, copy) in [("llama-7b", 0), ("gpt2-small", 50_257 * 768), ("bert-base", 30_522 * 768)]
    {
        let stages: Vec<_> = (0..4).map(|rank| units(&stage(name, rank))).collect();
        let whole = elements(&shaped(name, |_| ()));
        assert_eq!(stages.iter().map(|units| elements(units)).sum::<u64>(), whole + copy, "{name}");
        let modules: BTreeSet<_> = stages.iter().flatten().map(|unit| &unit.module).collect();
        assert_eq!(modules.len(), stages.iter().map(Vec::len).sum::<usize>(), "{name}");
    }
    // Six layers in eight parts.
    let few = Job { shape: Shape { layers: 6, ..first.shape.clone() }, ..first };
    assert_eq!(stage_layers(&few), [0..0, 3..3]);
}
