//! The modules of a job's model that have parameters of their own, on one rank.
//!
//! The one design decision: what a rank holds follows from the widths it holds. Tensor parallelism
//! divides queries, keys and values, the feed-forward part and the vocabulary; every linear is then
//! written down once, by its local widths, and its bias and adapters follow:
//!
//! ```text
//!               h          q/t, kv/t        h            ffn/t         h          vocabulary/t
//!   embedding ──┴─ q k v ──────┴────── o ───┴─ up, gate ───┴── down ───┴─ lm_head ──────┴
//! ```
//!
//! Names and order are those of the transformers library (spec patrickstar 1.4: the order in which
//! constructors finish).

use std::ops::Range;

use super::{Family, Head, Job, LoraTarget, Shape};
use crate::trace::{ModelParameter, ModelUnit};

/// Tiles of a tiled linear (spec patrickstar 5.4).
const TILES: u64 = 4;
/// Entries that OPT's position embedding has in front of the first position.
const OPT_POSITION_OFFSET: u64 = 2;
/// Classes of a classifier (spec patrickstar 1.4).
const CLASSES: u64 = 2;

/// Modules with parameters of their own that this job's rank holds, in the order in which their
/// constructors finish; adapters, which are put in when the model is there, after the others.
///
/// - Embeddings are `leaf`: they read ids. With `cpu_embedding` they are `host`.
/// - With LoRA everything but the adapters is `frozen`. GPT-2 has one linear for queries, keys and
///   values; each of these targets adapts it, once.
/// - A tied head has no parameter, unless the embedding is on another pipeline stage: then it is a
///   copy.
/// - Only BERT's linears are tiled, as PatrickStar's are.
pub fn units(job: &Job) -> Vec<ModelUnit> {
    let mut modules = Modules::new(job);
    match job.shape.family {
        Family::Bert => modules.bert(),
        Family::Gpt => modules.gpt(),
        Family::Opt => modules.opt(),
        Family::Llama | Family::Moe => modules.llama(),
    }
    modules.units.append(&mut modules.adapters);
    modules.units
}

/// The layers that this job's pipeline stage holds: one range for each of its virtual stages, in
/// the order in which a batch passes them. Stage s of S holds the parts s, s + S, s + 2S ...; a
/// part may be empty where there are fewer layers than parts.
pub fn stage_layers(job: &Job) -> Vec<Range<u64>> {
    let parallel = &job.parallel;
    let parts = parallel.pipeline.saturating_mul(parallel.virtual_stages).max(1);
    let start = |part: u64| {
        let layers = u128::from(part) * u128::from(job.shape.layers) / u128::from(parts);
        u64::try_from(layers).unwrap_or(u64::MAX)
    };
    let part = |round: u64| {
        let part = round.saturating_mul(parallel.pipeline).saturating_add(parallel.stage);
        start(part)..start(part.saturating_add(1))
    };
    (0..parallel.virtual_stages).map(part).collect()
}

/// The units so far, and the widths that this rank holds.
struct Modules<'a> {
    job: &'a Job,
    shape: &'a Shape,
    hidden: u64,
    queries: u64,
    keys: u64,
    ffn: u64,
    vocabulary: u64,
    units: Vec<ModelUnit>,
    adapters: Vec<ModelUnit>,
}

impl<'a> Modules<'a> {
    fn new(job: &'a Job) -> Self {
        let shape = &job.shape;
        let ranks = job.parallel.tensor.max(1);
        let head = shape.head_elements();
        Modules {
            job,
            shape,
            hidden: shape.hidden,
            queries: head.saturating_mul(shape.heads.div_ceil(ranks)),
            keys: head.saturating_mul(shape.kv_heads.div_ceil(ranks)),
            ffn: shape.ffn.div_ceil(ranks),
            vocabulary: shape.vocabulary.div_ceil(ranks),
            units: Vec::new(),
            adapters: Vec::new(),
        }
    }

    fn first_stage(&self) -> bool {
        self.job.parallel.stage == 0
    }

    fn last_stage(&self) -> bool {
        self.job.parallel.stage + 1 == self.job.parallel.pipeline
    }

    fn bert(&mut self) {
        if self.first_stage() {
            let embeddings = "bert.embeddings";
            self.embedding(&format!("{embeddings}.word_embeddings"), self.vocabulary);
            self.embedding(&format!("{embeddings}.position_embeddings"), self.shape.positions);
            self.embedding(&format!("{embeddings}.token_type_embeddings"), 2);
            self.norm(&format!("{embeddings}.LayerNorm"), true);
        }
        self.layers("bert.encoder.layer", Self::bert_layer);
        if !self.last_stage() {
            return;
        }
        match self.shape.head {
            Head::Classifier => {
                self.linear("bert.pooler.dense", self.hidden, self.hidden, true, &[]);
                self.linear("classifier", self.hidden, CLASSES, true, &[]);
            }
            Head::Lm => {
                let head = "cls.predictions";
                let transform = format!("{head}.transform");
                self.linear(&format!("{transform}.dense"), self.hidden, self.hidden, true, &[]);
                self.norm(&format!("{transform}.LayerNorm"), true);
                self.vocabulary_head(&format!("{head}.decoder"), true);
            }
        }
    }

    fn bert_layer(&mut self, layer: &str) {
        let attention = format!("{layer}.attention");
        for (name, target) in
            [("query", LoraTarget::Q), ("key", LoraTarget::K), ("value", LoraTarget::V)]
        {
            self.projection(&format!("{attention}.self.{name}"), target, true);
        }
        self.projection(&format!("{attention}.output.dense"), LoraTarget::O, true);
        self.norm(&format!("{attention}.output.LayerNorm"), true);
        self.tiled(&format!("{layer}.intermediate.dense"), LoraTarget::Up);
        self.tiled(&format!("{layer}.output.dense"), LoraTarget::Down);
        self.norm(&format!("{layer}.output.LayerNorm"), true);
    }

    /// A linear into or out of BERT's feed-forward part: four tiles of its wide side where tiling
    /// is on. Tiles of the output have a bias each, of those of the input only the last (spec
    /// patrickstar 5.4).
    fn tiled(&mut self, path: &str, target: LoraTarget) {
        let up = target == LoraTarget::Up;
        let tiles = if self.job.strategy.tiled_linear { TILES } else { 1 };
        for tile in 0..tiles {
            let wide = self.ffn / tiles + u64::from(tile < self.ffn % tiles);
            let name = match (tiles, up) {
                (1, _) => path.to_owned(),
                (_, true) => format!("{path}.linears.0.{tile}"),
                (_, false) => format!("{path}.linears.{tile}.0"),
            };
            let (input, output) = if up { (self.hidden, wide) } else { (wide, self.hidden) };
            self.linear(&name, input, output, up || tile + 1 == tiles, &[target]);
        }
    }

    fn gpt(&mut self) {
        if self.first_stage() {
            self.embedding("transformer.wte", self.vocabulary);
            self.embedding("transformer.wpe", self.shape.positions);
        }
        self.layers("transformer.h", Self::gpt_layer);
        if self.last_stage() {
            self.norm("transformer.ln_f", true);
            self.decoder_head();
        }
    }

    fn gpt_layer(&mut self, layer: &str) {
        let together = self.queries.saturating_add(self.keys.saturating_mul(2));
        let targets = [LoraTarget::Q, LoraTarget::K, LoraTarget::V];
        self.norm(&format!("{layer}.ln_1"), true);
        self.linear(&format!("{layer}.attn.c_attn"), self.hidden, together, true, &targets);
        self.projection(&format!("{layer}.attn.c_proj"), LoraTarget::O, true);
        self.norm(&format!("{layer}.ln_2"), true);
        self.projection(&format!("{layer}.mlp.c_fc"), LoraTarget::Up, true);
        self.projection(&format!("{layer}.mlp.c_proj"), LoraTarget::Down, true);
    }

    fn opt(&mut self) {
        if self.first_stage() {
            let positions = self.shape.positions.saturating_add(OPT_POSITION_OFFSET);
            self.embedding("model.decoder.embed_tokens", self.vocabulary);
            self.embedding("model.decoder.embed_positions", positions);
        }
        if self.last_stage() {
            // Built before the layers that it follows.
            self.norm("model.decoder.final_layer_norm", true);
        }
        self.layers("model.decoder.layers", Self::opt_layer);
        if self.last_stage() {
            self.decoder_head();
        }
    }

    fn opt_layer(&mut self, layer: &str) {
        for (name, target) in [
            ("k_proj", LoraTarget::K),
            ("v_proj", LoraTarget::V),
            ("q_proj", LoraTarget::Q),
            ("out_proj", LoraTarget::O),
        ] {
            self.projection(&format!("{layer}.self_attn.{name}"), target, true);
        }
        self.norm(&format!("{layer}.self_attn_layer_norm"), true);
        self.projection(&format!("{layer}.fc1"), LoraTarget::Up, true);
        self.projection(&format!("{layer}.fc2"), LoraTarget::Down, true);
        self.norm(&format!("{layer}.final_layer_norm"), true);
    }

    /// Llama, and Mixtral with experts in place of the feed-forward part.
    fn llama(&mut self) {
        if self.first_stage() {
            self.embedding("model.embed_tokens", self.vocabulary);
        }
        self.layers("model.layers", Self::llama_layer);
        if self.last_stage() {
            self.norm("model.norm", false);
            self.decoder_head();
        }
    }

    fn llama_layer(&mut self, layer: &str) {
        for (name, target) in [
            ("q_proj", LoraTarget::Q),
            ("k_proj", LoraTarget::K),
            ("v_proj", LoraTarget::V),
            ("o_proj", LoraTarget::O),
        ] {
            self.projection(&format!("{layer}.self_attn.{name}"), target, false);
        }
        let mlp = format!("{layer}.mlp");
        if self.shape.family == Family::Moe {
            self.experts(&mlp);
        } else {
            self.projection(&format!("{mlp}.gate_proj"), LoraTarget::Gate, false);
            self.projection(&format!("{mlp}.up_proj"), LoraTarget::Up, false);
            self.projection(&format!("{mlp}.down_proj"), LoraTarget::Down, false);
        }
        self.norm(&format!("{layer}.input_layernorm"), false);
        self.norm(&format!("{layer}.post_attention_layernorm"), false);
    }

    /// The router, and all experts as two tensors of one module (transformers 5).
    fn experts(&mut self, mlp: &str) {
        let experts = self.shape.experts;
        let matrix = experts.saturating_mul(self.hidden).saturating_mul(self.ffn);
        self.add(&format!("{mlp}.gate"), &[("weight", experts.saturating_mul(self.hidden))]);
        let tensors = [("gate_up_proj", matrix.saturating_mul(2)), ("down_proj", matrix)];
        self.add(&format!("{mlp}.experts"), &tensors);
    }

    /// A linear of a layer, by its part.
    fn projection(&mut self, path: &str, target: LoraTarget, bias: bool) {
        let (hidden, ffn) = (self.hidden, self.ffn);
        let (input, output) = match target {
            LoraTarget::Q => (hidden, self.queries),
            LoraTarget::K | LoraTarget::V => (hidden, self.keys),
            LoraTarget::O => (self.queries, hidden),
            LoraTarget::Gate | LoraTarget::Up => (hidden, ffn),
            LoraTarget::Down => (ffn, hidden),
        };
        self.linear(path, input, output, bias, &[target]);
    }

    fn decoder_head(&mut self) {
        match self.shape.head {
            Head::Classifier => self.linear("score", self.hidden, CLASSES, false, &[]),
            Head::Lm => self.vocabulary_head("lm_head", false),
        }
    }

    fn vocabulary_head(&mut self, path: &str, bias: bool) {
        if !self.shape.tied_head || !self.first_stage() {
            self.linear(path, self.hidden, self.vocabulary, bias, &[]);
        } else if bias {
            self.add(path, &[("bias", self.vocabulary)]);
        }
    }

    fn layers(&mut self, prefix: &str, layer: fn(&mut Self, &str)) {
        for index in stage_layers(self.job).into_iter().flatten() {
            layer(self, &format!("{prefix}.{index}"));
        }
    }

    fn embedding(&mut self, path: &str, entries: u64) {
        let host = self.job.strategy.cpu_embedding;
        let unit = self.unit(path, &[("weight", entries.saturating_mul(self.hidden))]);
        self.units.push(ModelUnit { leaf: true, host, ..unit });
    }

    fn norm(&mut self, path: &str, bias: bool) {
        let both = [("weight", self.hidden), ("bias", self.hidden)];
        self.add(path, if bias { &both } else { &both[..1] });
    }

    /// A linear of these widths, and its adapter if LoRA has one of these targets.
    fn linear(&mut self, path: &str, input: u64, output: u64, bias: bool, targets: &[LoraTarget]) {
        let both = [("weight", input.saturating_mul(output)), ("bias", output)];
        self.add(path, if bias { &both } else { &both[..1] });
        let Some(lora) = &self.job.strategy.lora else { return };
        if lora.targets.iter().any(|target| targets.contains(target)) {
            for (matrix, width) in [("lora_A", input), ("lora_B", output)] {
                let elements = lora.rank.saturating_mul(width);
                let adapter =
                    unit(&format!("{path}.{matrix}.default"), &[("weight", elements)], false);
                self.adapters.push(adapter);
            }
        }
    }

    fn add(&mut self, path: &str, parameters: &[(&str, u64)]) {
        let unit = self.unit(path, parameters);
        self.units.push(unit);
    }

    /// A module of the base, which is frozen under adapters.
    fn unit(&self, path: &str, parameters: &[(&str, u64)]) -> ModelUnit {
        unit(path, parameters, self.job.strategy.lora.is_some())
    }
}

fn unit(path: &str, parameters: &[(&str, u64)], frozen: bool) -> ModelUnit {
    let parameter = |&(name, elements): &(&str, u64)| ModelParameter {
        name: format!("{path}.{name}"),
        elements,
        frozen,
    };
    ModelUnit {
        module: path.to_owned(),
        leaf: false,
        host: false,
        parameters: parameters.iter().map(parameter).collect(),
    }
}
