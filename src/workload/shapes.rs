//! Shapes of models by their usual names.
//!
//! The one design decision: a name is a shape and nothing else. Lengths, batches and strategies
//! are the job's.

use super::{Family, Head, Shape};

/// Entries of BERT's token embedding (spec patrickstar 1.4).
const BERT_VOCABULARY: u64 = 30_522;
/// Entries of GPT-2's token embedding (spec patrickstar 1.4).
const GPT_VOCABULARY: u64 = 50_257;

/// Every named shape: the public models, then PatrickStar's (spec patrickstar 1.4) as BERT type.
const NAMED: &[(&str, Shape)] = &[
    ("llama-tiny", llama(4, 256, 4, 4, 688, 32_000)),
    ("llama-1b", llama(24, 2048, 16, 16, 5504, 32_000)),
    ("llama-3b", llama(26, 3200, 32, 32, 8640, 32_000)),
    ("llama-7b", llama(32, 4096, 32, 32, 11_008, 32_000)),
    ("llama-13b", llama(40, 5120, 40, 40, 13_824, 32_000)),
    ("llama-70b", llama(80, 8192, 64, 8, 28_672, 32_000)),
    ("llama3-8b", llama(32, 4096, 32, 8, 14_336, 128_256)),
    ("llama3-70b", llama(80, 8192, 64, 8, 28_672, 128_256)),
    ("mixtral-small", mixtral(12, 1024, 16, 3584)),
    ("mixtral-8x7b", mixtral(32, 4096, 32, 14_336)),
    ("gpt2-small", gpt2(12, 768, 12)),
    ("gpt2-medium", gpt2(24, 1024, 16)),
    ("gpt2-large", gpt2(36, 1280, 20)),
    ("gpt2-xl", gpt2(48, 1600, 25)),
    ("opt-125m", opt(12, 768, 12)),
    ("opt-1.3b", opt(24, 2048, 32)),
    ("opt-2.7b", opt(32, 2560, 32)),
    ("opt-6.7b", opt(32, 4096, 32)),
    ("opt-13b", opt(40, 5120, 40)),
    ("opt-30b", opt(48, 7168, 56)),
    ("opt-66b", opt(64, 9216, 72)),
    ("bert-base", bert(12, 768, 12)),
    ("bert-large", bert(24, 1024, 16)),
    ("GPT2small", benchmark(24, 1536, 16, 128)),
    ("GPT2_1B", benchmark(20, 2048, 16, 1024)),
    ("GPT2_2B", benchmark(40, 2048, 16, 1024)),
    ("GPT2_4B", benchmark(64, 2304, 16, 1024)),
    ("GPT3_6B", benchmark(53, 3072, 16, 1024)),
    ("GPT3_8B", benchmark(72, 3072, 16, 1024)),
    ("GPT3_10B", benchmark(50, 4096, 16, 1024)),
    ("GPT3_11B", benchmark(55, 4096, 16, 1024)),
    ("GPT3_12B", benchmark(60, 4096, 16, 1024)),
    ("GPT3_13B", benchmark(65, 4096, 16, 1024)),
    ("GPT3_15B", benchmark(78, 4096, 16, 1024)),
    ("GPT3_18B", benchmark(90, 4096, 16, 1024)),
    ("GPT_NV_18B", benchmark(40, 6144, 16, 1024)),
    ("GPT_NV_39B", benchmark(48, 8192, 16, 1024)),
    ("GPT_NV_76B", benchmark(60, 10_240, 16, 1024)),
    ("GPT_DS_20B", benchmark(25, 8192, 16, 1024)),
    ("GPT_DS_40B", benchmark(50, 8192, 16, 1024)),
    ("GPT_DS_50B", benchmark(62, 8192, 16, 1024)),
    ("GPT_DS_60B", benchmark(75, 8192, 16, 1024)),
    ("GPT_DS_68B", benchmark(66, 9216, 16, 1024)),
    ("GPT_175B", benchmark(96, 12_288, 96, 1024)),
];

/// The shape of this name, upper and lower case alike; nothing if there is none.
///
/// PatrickStar's benchmark models, which it trains as either type, are BERT type here;
/// [`named_as`] gives the other.
pub fn named(name: &str) -> Option<Shape> {
    let mut shapes = NAMED.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name));
    shapes.next().map(|(_, shape)| shape.clone())
}

/// The shape of this name in this family: PatrickStar's benchmark models as BERT or as GPT type,
/// with that type's vocabulary (spec patrickstar 1.4). Nothing if there is no such shape.
pub fn named_as(name: &str, family: Family) -> Option<Shape> {
    let shape = named(name)?;
    match (shape.head, family) {
        (_, family) if family == shape.family => Some(shape),
        (Head::Classifier, Family::Gpt) => {
            Some(Shape { family, vocabulary: GPT_VOCABULARY, ..shape })
        }
        _ => None,
    }
}

/// Every name that [`named`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    NAMED.iter().map(|(name, _)| *name)
}

const fn llama(
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    ffn: u64,
    vocabulary: u64,
) -> Shape {
    Shape {
        family: Family::Llama,
        layers,
        hidden,
        heads,
        kv_heads,
        ffn,
        vocabulary,
        positions: 0,
        experts: 0,
        top_k: 0,
        head: Head::Lm,
        tied_head: false,
        dropout: 0.0,
    }
}

const fn mixtral(layers: u64, hidden: u64, heads: u64, ffn: u64) -> Shape {
    let dense = llama(layers, hidden, heads, 8, ffn, 32_000);
    Shape { family: Family::Moe, experts: 8, top_k: 2, ..dense }
}

const fn gpt2(layers: u64, hidden: u64, heads: u64) -> Shape {
    Shape {
        family: Family::Gpt,
        positions: 1024,
        tied_head: true,
        dropout: 0.1,
        ..llama(layers, hidden, heads, heads, 4 * hidden, GPT_VOCABULARY)
    }
}

const fn opt(layers: u64, hidden: u64, heads: u64) -> Shape {
    Shape {
        family: Family::Opt,
        positions: 2048,
        tied_head: true,
        ..llama(layers, hidden, heads, heads, 4 * hidden, 50_272)
    }
}

const fn bert(layers: u64, hidden: u64, heads: u64) -> Shape {
    Shape {
        family: Family::Bert,
        positions: 512,
        tied_head: true,
        dropout: 0.1,
        ..llama(layers, hidden, heads, heads, 4 * hidden, BERT_VOCABULARY)
    }
}

/// A model of PatrickStar's benchmarks, as BERT type.
const fn benchmark(layers: u64, hidden: u64, heads: u64, positions: u64) -> Shape {
    Shape { positions, head: Head::Classifier, tied_head: false, ..bert(layers, hidden, heads) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_name_is_one_shape_whose_heads_divide_it() {
        let lower: BTreeSet<String> = names().map(str::to_ascii_lowercase).collect();
        assert_eq!(lower.len(), names().count());
        for name in names() {
            let shape = named(&name.to_uppercase()).unwrap();
            assert_eq!(shape.hidden % shape.heads, 0, "{name}");
            assert_eq!(shape.heads % shape.kv_heads, 0, "{name}");
        }
        assert_eq!(named("llama-1"), None);
    }

    #[test]
    fn benchmark_models_are_of_either_type() {
        let bert = named("GPT3_8B").unwrap();
        assert_eq!((bert.family, bert.vocabulary), (Family::Bert, 30_522));
        assert_eq!(named_as("GPT3_8B", Family::Bert), Some(bert.clone()));
        let gpt = named_as("GPT3_8B", Family::Gpt).unwrap();
        assert_eq!(gpt, Shape { family: Family::Gpt, vocabulary: 50_257, ..bert });
        assert_eq!(named_as("GPT3_8B", Family::Llama), None);
        assert_eq!(named_as("bert-base", Family::Gpt), None);
    }
}
