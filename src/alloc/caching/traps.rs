//! What is known to go wrong with settings strings that PyTorch accepts.
//!
//! The one design decision: a table. Each trap is a row with a name, a function that says whether
//! it applies and, if so, what it means for this string, the reason, and where it was reported.
//! Traps without an address were seen on the 2.11 binary, or follow from its rules (spec 2 to 7).

use std::collections::BTreeMap;

use super::config::{
    Config, ConfigError, GivenOption, given_options, list_text, real_prefix, whole_prefix,
};
use super::version::{LATER_KEYS, RECENT_KEYS, TorchVersion};
use crate::device::GRANULARITY_BYTES;
use crate::units::{Bytes, MIB};

/// Options that a CUDA build reads from other variables than the rest (table B of spec 7).
const CUDA_KEYS: [&str; 9] = [
    "backend",
    "per_process_memory_fraction",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
];
/// Options that a later settings string resets unless it gives them again (spec 7.1).
const RESET_KEYS: [&str; 4] = [
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
];
/// Options whose values may have a fraction.
const REAL_KEYS: [&str; 2] = ["garbage_collection_threshold", "per_process_memory_fraction"];

/// The environment variable that a settings string is given in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SettingsVariable {
    /// `PYTORCH_ALLOC_CONF`
    Alloc,
    /// `PYTORCH_CUDA_ALLOC_CONF`
    CudaAlloc,
    /// `PYTORCH_HIP_ALLOC_CONF`
    HipAlloc,
}

impl SettingsVariable {
    /// Its name in the environment.
    pub fn name(self) -> &'static str {
        match self {
            SettingsVariable::Alloc => "PYTORCH_ALLOC_CONF",
            SettingsVariable::CudaAlloc => "PYTORCH_CUDA_ALLOC_CONF",
            SettingsVariable::HipAlloc => "PYTORCH_HIP_ALLOC_CONF",
        }
    }
}

/// Where a settings string is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Circumstances {
    /// Release of PyTorch.
    pub version: TorchVersion,
    /// Total memory that the device reports, in bytes.
    pub device_total_bytes: Option<u64>,
    /// Memory limit set by other means, in bytes; it stands in place of the string's.
    pub limit_bytes: Option<u64>,
    /// The variable that holds the string.
    pub variable: Option<SettingsVariable>,
}

/// One thing that goes wrong with a string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trap {
    /// A name that stays.
    pub id: &'static str,
    /// What it means for this string.
    pub text: String,
    /// Why that is so.
    pub reason: &'static str,
    /// Where it was reported, if it was.
    pub address: Option<&'static str>,
}

/// What a settings string amounts to.
#[derive(Clone, Debug, PartialEq)]
pub struct Lint {
    /// The settings in force.
    pub config: Config,
    /// The options as they stand in the string, repeated ones too.
    pub given: Vec<GivenOption>,
    /// Total memory that the device reports, in bytes, where known.
    pub device_total_bytes: Option<u64>,
    /// Whether the limit is not the string's.
    pub limit_is_set_otherwise: bool,
    /// The memory limit in bytes, where there is one and its size is known.
    pub limit_bytes: Option<u64>,
    /// Reserved memory in bytes above which garbage collection starts, where it can be known.
    pub garbage_collection_bytes: Option<u64>,
    /// The traps, those that change what happens most first.
    pub traps: Vec<Trap>,
}

impl Lint {
    /// Whether there is a memory limit, known in bytes or not.
    pub fn has_limit(&self) -> bool {
        self.limit_is_set_otherwise || self.config.per_process_memory_fraction < 1.0
    }
}

/// Reads a settings string as PyTorch does, and looks for traps.
///
/// # Errors
/// The first word that PyTorch would refuse, with its position.
pub fn lint(text: &str, circumstances: &Circumstances) -> Result<Lint, ConfigError> {
    let config = Config::parse_for(circumstances.version, text)?;
    let given = given_options(text)?;
    let of_string = circumstances.device_total_bytes.and_then(|total| config.limit_bytes(total));
    let limit_bytes = circumstances.limit_bytes.or(of_string);
    let threshold = config.garbage_collection_threshold;
    let garbage_collection_bytes =
        limit_bytes.filter(|_| threshold > 0.0).map(|limit| (threshold * limit as f64) as u64);
    let mut lint = Lint {
        config,
        given,
        device_total_bytes: circumstances.device_total_bytes,
        limit_is_set_otherwise: circumstances.limit_bytes.is_some(),
        limit_bytes,
        garbage_collection_bytes,
        traps: Vec::new(),
    };
    let facts = Facts { lint: &lint, variable: circumstances.variable };
    let traps = RULES.iter().filter_map(|rule| {
        let Rule { id, reason, address, .. } = *rule;
        (rule.applies)(&facts).map(|text| Trap { id, text, reason, address })
    });
    lint.traps = traps.collect();
    Ok(lint)
}

/// What the rules look at.
struct Facts<'a> {
    lint: &'a Lint,
    variable: Option<SettingsVariable>,
}

impl Facts<'_> {
    fn config(&self) -> &Config {
        &self.lint.config
    }

    fn has_max_split(&self) -> bool {
        self.config().max_split_size_bytes != u64::MAX
    }

    fn collects_garbage(&self) -> bool {
        self.config().garbage_collection_threshold > 0.0
    }

    /// The last value of an option: the one that counts.
    fn given(&self, key: &str) -> Option<&GivenOption> {
        self.lint.given.iter().rev().find(|option| option.key == key)
    }

    /// The options of a list that the string gives, in the list's order, joined.
    fn given_of(&self, keys: &[&str]) -> Option<String> {
        let given: Vec<&str> =
            keys.iter().copied().filter(|key| self.given(key).is_some()).collect();
        (!given.is_empty()).then(|| given.join(", "))
    }

    /// The list behind `roundup_power2_divisions`, if one counts.
    fn rounding_list(&self) -> Option<&[(String, String)]> {
        let option = self.given("roundup_power2_divisions")?;
        (!option.items.is_empty()).then_some(option.items.as_slice())
    }
}

/// A row of the table.
struct Rule {
    id: &'static str,
    /// What the trap means for this string, if it applies.
    applies: fn(&Facts<'_>) -> Option<String>,
    reason: &'static str,
    address: Option<&'static str>,
}

/// The text, if the condition holds.
fn when(condition: bool, text: impl Into<String>) -> Option<String> {
    condition.then(|| text.into())
}

/// All traps, those that change what happens most first.
const RULES: [Rule; 28] = [
    Rule {
        id: "max-split-with-expandable",
        applies: |facts| {
            when(
                facts.has_max_split() && facts.config().expandable_segments,
                "max_split_size_mb and expandable_segments together can let reserved memory grow \
                 without bound: drop one of them",
            )
        },
        reason: "a growing segment is one block that soon exceeds max_split_size_mb, and smaller \
                 requests may not use such blocks, so new pages are mapped instead; on ROCm live \
                 memory was overwritten (https://github.com/ROCm/legacy-rocm-build/issues/6603)",
        address: Some("https://github.com/pytorch/pytorch/issues/123548"),
    },
    Rule {
        id: "limit-below-a-segment",
        applies: |facts| {
            let limit_bytes = match facts.lint.limit_bytes {
                None if facts.config().per_process_memory_fraction == 0.0 => Some(0),
                known => known,
            };
            limit_bytes
                .filter(|&bytes| bytes < 2 * MIB)
                .map(|bytes| format!("the memory limit of {} refuses every request", Bytes(bytes)))
        },
        reason: "the smallest segment has 2 MiB",
        address: None,
    },
    Rule {
        id: "garbage-collection-without-limit",
        applies: |facts| {
            when(
                facts.collects_garbage() && !facts.lint.has_limit(),
                "garbage_collection_threshold does nothing here: there is no memory limit",
            )
        },
        reason: "it is a share of the limit that per_process_memory_fraction or \
                 torch.cuda.set_per_process_memory_fraction sets, not of the device's memory",
        address: Some("https://github.com/pytorch/pytorch/issues/106660"),
    },
    Rule {
        id: "garbage-collection-with-expandable",
        applies: |facts| {
            when(
                facts.collects_garbage() && facts.config().expandable_segments,
                "garbage_collection_threshold gives back nothing of expandable segments",
            )
        },
        reason: "it passes over blocks of growing segments; only empty_cache and a failed request \
                 unmap them",
        address: None,
    },
    Rule {
        id: "variable-not-read",
        applies: |facts| {
            let ignored = facts.variable == Some(SettingsVariable::Alloc)
                && facts.config().expandable_segments
                && facts.config().version.is_older();
            when(
                ignored,
                "expandable_segments may be ignored in PYTORCH_ALLOC_CONF: set \
                 PYTORCH_CUDA_ALLOC_CONF",
            )
        },
        reason: "2.9.1 was seen to ignore it without a message, 2.11 reads it; where between them \
                 that changed is not established",
        address: Some("https://github.com/pytorch/pytorch/issues/183387"),
    },
    Rule {
        id: "variable-of-hip",
        applies: |facts| {
            let keys = facts.given_of(&CUDA_KEYS)?;
            when(
                facts.variable == Some(SettingsVariable::HipAlloc),
                format!("a CUDA build does not read from PYTORCH_HIP_ALLOC_CONF: {keys}"),
            )
        },
        reason: "it reads these only from PYTORCH_CUDA_ALLOC_CONF, or else from PYTORCH_ALLOC_CONF",
        address: None,
    },
    Rule {
        id: "variable-hides-others",
        applies: |facts| {
            let variable = facts.variable?.name();
            when(
                facts.lint.given.is_empty(),
                format!("{variable} counts as set although it is empty, and can hide another one"),
            )
        },
        reason: "the first variable that is set is taken, in the order PYTORCH_CUDA_ALLOC_CONF, \
                 PYTORCH_HIP_ALLOC_CONF, PYTORCH_ALLOC_CONF; unset it instead",
        address: None,
    },
    Rule {
        id: "variable-hidden",
        applies: |facts| {
            let variable = facts.variable.filter(|&v| v != SettingsVariable::CudaAlloc)?.name();
            when(
                !facts.config().version.is_older(),
                format!("{variable} is not read where PYTORCH_CUDA_ALLOC_CONF is set too"),
            )
        },
        reason: "in 2.11 the older name wins, even when it is empty",
        address: None,
    },
    Rule {
        id: "variable-deprecated",
        applies: |facts| {
            when(
                facts.variable == Some(SettingsVariable::CudaAlloc),
                "PYTORCH_CUDA_ALLOC_CONF is deprecated: a warning may say so, but it is in effect",
            )
        },
        reason: "in 2.11 it even wins over PYTORCH_ALLOC_CONF, the new name, which 2.9.1 ignores \
                 for expandable_segments",
        address: Some("https://github.com/pytorch/pytorch/issues/183387"),
    },
    Rule {
        id: "max-split-first",
        applies: |facts| {
            when(
                facts.has_max_split() && !facts.config().expandable_segments,
                "max_split_size_mb is not the first thing to try: see whether \
                 expandable_segments:True alone is enough",
            )
        },
        reason: "a PyTorch developer took it out of the out-of-memory message's first place, \
                 because it costs device frees, which wait for the GPU, later in the job",
        address: Some("https://github.com/pytorch/pytorch/pull/113481"),
    },
    Rule {
        id: "max-split-while-running",
        applies: |facts| {
            when(facts.has_max_split(), "max_split_size_mb must not change while the program runs")
        },
        reason: "a block that was split under another value may then count as never split; 2.11 \
                 hands such a part of a segment to the device, which fails or corrupts memory",
        address: None,
    },
    Rule {
        id: "max-non-split-alone",
        applies: |facts| {
            when(
                facts.given("max_non_split_rounding_mb").is_some() && !facts.has_max_split(),
                "max_non_split_rounding_mb does nothing without max_split_size_mb",
            )
        },
        reason: "it says how much larger than the request a block that is never split may be, and \
                 without max_split_size_mb there are no such blocks",
        address: None,
    },
    Rule {
        id: "rounding-waste",
        applies: |facts| {
            let divisions = facts.config().roundup_power2_divisions;
            let least = divisions.into_iter().filter(|&divisions| divisions > 1).min()?;
            Some(format!(
                "roundup_power2_divisions makes blocks up to 1/{least} larger than asked for: \
                 compare requested_bytes with allocated_bytes in torch.cuda.memory_stats()"
            ))
        },
        reason: "equal sizes leave fewer odd holes, but the rounding itself can waste more than \
                 that saves; a list (https://github.com/pytorch/pytorch/pull/87290) can leave \
                 large blocks out",
        address: Some("https://github.com/pytorch/pytorch/pull/88575"),
    },
    Rule {
        id: "rounding-by-one",
        applies: idle_divisions,
        reason: "only 2 divisions and more round; 1 and 0 both leave the multiple of 512 bytes",
        address: Some("https://github.com/pytorch/pytorch/issues/161139"),
    },
    Rule {
        id: "rounding-gap",
        applies: rounding_gaps,
        reason: "a key of the list is for one power of two; the first also fills all below it, > \
                 all above the last, nothing what lies between two keys",
        address: None,
    },
    Rule {
        id: "rounding-rest",
        applies: |facts| {
            let items = facts.rounding_list()?;
            let under = |version| rounding_table(items, version);
            when(
                under(TorchVersion::OLDER) != under(TorchVersion::REFERENCE),
                "> in roundup_power2_divisions does not mean the same in every release",
            )
        },
        reason: "in 2.11 it begins after the last key's power of two; in older releases at it, and \
                 so replaces that key's value",
        address: None,
    },
    Rule {
        id: "expandable-odd-page",
        applies: |facts| {
            let config = facts.config();
            let odd = !config.large_segment_size_bytes.is_multiple_of(GRANULARITY_BYTES);
            when(
                config.expandable_segments && odd,
                "large_segment_size_mb is odd, and with expandable_segments it is the size of a \
                 page: the first request above 1 MiB fails with an error of the driver",
            )
        },
        reason: "the driver creates memory for pages in multiples of 2 MiB only (cuMemCreate)",
        address: None,
    },
    Rule {
        id: "expandable-memory-pool",
        applies: |facts| {
            when(
                facts.config().expandable_segments,
                "expandable_segments can clash with memory pools that have an allocator \
                 of their own, as vLLM's sleep mode has: sleeping then freed 0 bytes \
                 (https://github.com/vllm-project/vllm/pull/11743)",
            )
        },
        reason: "where that was reported, growing segments were used in place of the pool's \
                 allocator; 2.11 uses the pool's",
        address: Some("https://github.com/pytorch/pytorch/issues/147851"),
    },
    Rule {
        id: "expandable-ipc",
        applies: |facts| {
            when(
                facts.config().expandable_segments,
                "expandable_segments can break what shares tensors between processes by CUDA IPC \
                 handles",
            )
        },
        reason: "a handle stands for one piece of device memory, and a growing segment is many; \
                 custom all-reduce fails so, and RL frameworks switch the option by worker \
                 (https://github.com/NovaSky-AI/SkyRL/pull/1768)",
        address: Some("https://github.com/vllm-project/vllm/issues/42609"),
    },
    Rule {
        id: "expandable-nixl",
        applies: |facts| {
            when(
                facts.config().expandable_segments,
                "expandable_segments is not compatible with vLLM's NIXL connector",
            )
        },
        reason: "vLLM's developers say so there, and set max_split_size_mb while a model loads \
                 instead",
        address: Some("https://github.com/vllm-project/vllm/pull/41268"),
    },
    Rule {
        id: "expandable-advice",
        applies: |facts| {
            when(
                facts.config().expandable_segments,
                "the out-of-memory message still recommends expandable_segments:True: that is no \
                 sign that it is off",
            )
        },
        reason: "the advice is printed whatever the settings are",
        address: Some("https://github.com/pytorch/pytorch/issues/173049"),
    },
    Rule {
        id: "fraction-read-once",
        applies: |facts| {
            when(
                facts.given("per_process_memory_fraction").is_some(),
                "per_process_memory_fraction counts at the start only",
            )
        },
        reason: "a later settings string does not change the limit; \
                 torch.cuda.set_per_process_memory_fraction does",
        address: None,
    },
    Rule {
        id: "later-string-resets",
        applies: |facts| {
            let keys = facts.given_of(&RESET_KEYS)?;
            Some(format!(
                "any later settings string that does not repeat them resets to the default: {keys}"
            ))
        },
        reason: "max_split_size_mb, max_non_split_rounding_mb, garbage_collection_threshold and \
                 roundup_power2_divisions start afresh with every string, all other options keep \
                 their values; libraries give such strings: vLLM does around its memory pool",
        address: Some("https://github.com/vllm-project/vllm/pull/40812"),
    },
    Rule {
        id: "environment-read-once",
        applies: |facts| {
            when(
                !facts.lint.given.is_empty(),
                "set the variable before the program starts: set after torch has read it, it is \
                 without effect and without a message",
            )
        },
        reason: "the environment is read once; one project reserved 37 GB until it set the \
                 variable earlier, then 27 GB (see also \
                 https://github.com/meta-pytorch/torchrec/pull/4375)",
        address: Some("https://github.com/axolotl-ai-cloud/axolotl/pull/2183"),
    },
    Rule {
        id: "number-by-prefix",
        applies: numbers_cut_short,
        reason: "numbers are read up to the first character that does not fit, without a message; \
                 sizes are whole MiB and take no unit",
        address: None,
    },
    Rule {
        id: "key-twice",
        applies: |facts| {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for option in &facts.lint.given {
                *counts.entry(&option.key).or_default() += 1;
            }
            let repeated = counts.into_iter().filter(|&(_, count)| count > 1);
            let value = |key: &str| facts.given(key).map(|option| option.value.clone());
            let texts: Vec<String> = repeated
                .filter_map(|(key, _)| {
                    Some(format!("{key} is given more than once: {}", value(key)?))
                })
                .collect();
            when(!texts.is_empty(), format!("{} counts", texts.join("; ")))
        },
        reason: "the last of equal keys wins, without a message",
        address: None,
    },
    Rule {
        id: "recent-option",
        applies: |facts| {
            let keys = facts.given_of(&RECENT_KEYS)?;
            Some(format!("older releases refuse the whole string because of: {keys}"))
        },
        reason: "2.11 knows it, older ones need not; the release in which it came is not \
                 established",
        address: None,
    },
    Rule {
        id: "later-option",
        applies: |facts| {
            let keys = facts.given_of(&LATER_KEYS)?;
            Some(format!("2.11 and older releases refuse the whole string because of: {keys}"))
        },
        reason: "an unknown option is an error",
        address: None,
    },
];

/// The rounding table of a list under the rules of a release.
fn rounding_table(items: &[(String, String)], version: TorchVersion) -> Option<Vec<u64>> {
    let text = format!("roundup_power2_divisions:{}", list_text(items));
    let config = Config::parse_for(version, &text).ok()?;
    Some(config.roundup_power2_divisions.to_vec())
}

/// Numbers of divisions that round nothing.
fn idle_divisions(facts: &Facts<'_>) -> Option<String> {
    let option = facts.given("roundup_power2_divisions")?;
    let is_idle = |divisions: &str| matches!(whole_prefix(divisions).parse::<u64>(), Ok(0 | 1));
    if option.items.is_empty() {
        let text = format!("roundup_power2_divisions:{} does nothing", option.value);
        return when(is_idle(&option.value), text);
    }
    let idle = option.items.iter().filter(|(_, divisions)| is_idle(divisions));
    let idle: Vec<String> = idle.map(|(size, divisions)| format!("{size}:{divisions}")).collect();
    when(
        !idle.is_empty(),
        format!("in roundup_power2_divisions these round nothing: {}", idle.join(", ")),
    )
}

/// Entries of the rounding table that a list passes over, although it rounds others.
fn rounding_gaps(facts: &Facts<'_>) -> Option<String> {
    let items = facts.rounding_list()?;
    if facts.config().roundup_power2_divisions.iter().all(|&divisions| divisions <= 1) {
        return None;
    }
    // With 1 for every value, what is still 0 was not reached.
    let ones: Vec<(String, String)> =
        items.iter().map(|(size, _)| (size.clone(), "1".to_owned())).collect();
    let reached = rounding_table(&ones, facts.config().version)?;
    let last = reached.len() - 1;
    let gaps = reached.iter().enumerate().filter(|&(_, &count)| count == 0);
    let range = |(entry, _): (usize, _)| {
        let from = Bytes(MIB << entry);
        match entry {
            0 => format!("below {}", Bytes(2 * MIB)),
            _ if entry == last => format!("from {from}"),
            _ => format!("from {from} to {}", Bytes((2 * MIB) << entry)),
        }
    };
    let ranges: Vec<String> = gaps.map(range).collect();
    when(
        !ranges.is_empty(),
        format!("roundup_power2_divisions does not round sizes {}", ranges.join(", ")),
    )
}

/// Numbers that PyTorch does not read to their end.
fn numbers_cut_short(facts: &Facts<'_>) -> Option<String> {
    let mut cut = Vec::new();
    for option in &facts.lint.given {
        let real = REAL_KEYS.contains(&option.key.as_str());
        let words = option.items.iter().flat_map(|(size, divisions)| [size, divisions]);
        let single = option.items.is_empty().then_some(&option.value);
        for word in words.chain(single) {
            let read = if real { real_prefix(word) } else { whole_prefix(word) };
            if !read.is_empty() && read != word {
                cut.push(format!("{}: {word} is read as {read}", option.key));
            }
        }
    }
    when(!cut.is_empty(), cut.join("; "))
}

#[cfg(test)]
mod tests {
    use super::super::config::REFUSED;
    use super::*;
    use crate::units::GIB;

    fn examine(text: &str, circumstances: &Circumstances) -> Lint {
        lint(text, circumstances).expect(text)
    }

    fn ids(text: &str, circumstances: &Circumstances) -> Vec<&'static str> {
        examine(text, circumstances).traps.iter().map(|trap| trap.id).collect()
    }

    fn trap(text: &str, id: &str) -> Trap {
        let traps = examine(text, &Circumstances::default()).traps;
        traps.into_iter().find(|trap| trap.id == id).expect(id)
    }

    fn release(text: &str) -> Circumstances {
        Circumstances { version: text.parse().expect("a version"), ..Circumstances::default() }
    }

    fn held_by(variable: SettingsVariable) -> Circumstances {
        Circumstances { variable: Some(variable), ..Circumstances::default() }
    }

    /// For every trap that hangs on the string alone: strings that have it, strings that do not.
    const BY_STRING: [(&str, &[&str], &[&str]); 21] = [
        (
            "max-split-with-expandable",
            &["max_split_size_mb:128,expandable_segments:True"],
            &["max_split_size_mb:128,expandable_segments:False", "expandable_segments:True"],
        ),
        (
            "limit-below-a-segment",
            &["per_process_memory_fraction:0"],
            &["per_process_memory_fraction:0.01", "per_process_memory_fraction:1"],
        ),
        (
            "garbage-collection-without-limit",
            &["garbage_collection_threshold:0.8"],
            &["garbage_collection_threshold:0.8,per_process_memory_fraction:0.9", ""],
        ),
        (
            "garbage-collection-with-expandable",
            &["garbage_collection_threshold:0.8,expandable_segments:True"],
            &["garbage_collection_threshold:0.8", "expandable_segments:True"],
        ),
        (
            "max-split-first",
            &["max_split_size_mb:128"],
            &["max_split_size_mb:128,expandable_segments:True", "large_segment_size_mb:30"],
        ),
        ("max-split-while-running", &["max_split_size_mb:128"], &["expandable_segments:True"]),
        (
            "max-non-split-alone",
            &["max_non_split_rounding_mb:64"],
            &["max_non_split_rounding_mb:64,max_split_size_mb:128", "max_split_size_mb:128"],
        ),
        (
            "rounding-waste",
            &["roundup_power2_divisions:16", "roundup_power2_divisions:[64:0,>:2]"],
            &["roundup_power2_divisions:1", "roundup_power2_divisions:[64:0,>:1]"],
        ),
        (
            "rounding-by-one",
            &["roundup_power2_divisions:1", "roundup_power2_divisions:[64:0,>:2]"],
            &["roundup_power2_divisions:2", "roundup_power2_divisions:[64:4,>:16]"],
        ),
        (
            "rounding-gap",
            &["roundup_power2_divisions:[64:8,256:4]", "roundup_power2_divisions:[>:8]"],
            &[
                "roundup_power2_divisions:[64:8,128:4,>:2]",
                "roundup_power2_divisions:[64:8,128:0,>:2]",
                "roundup_power2_divisions:[64:1]",
                "roundup_power2_divisions:4",
            ],
        ),
        (
            "rounding-rest",
            &["roundup_power2_divisions:[256:1,>:8]"],
            &["roundup_power2_divisions:[256:8,>:8]", "roundup_power2_divisions:[256:8]"],
        ),
        (
            "expandable-odd-page",
            &["expandable_segments:True,large_segment_size_mb:21"],
            &["expandable_segments:True,large_segment_size_mb:22", "large_segment_size_mb:21"],
        ),
        ("expandable-memory-pool", &["expandable_segments:True"], &["expandable_segments:False"]),
        ("expandable-ipc", &["expandable_segments:True"], &["expandable_segments:False"]),
        ("expandable-nixl", &["expandable_segments:True"], &["expandable_segments:False"]),
        ("expandable-advice", &["expandable_segments:True"], &["max_split_size_mb:64"]),
        (
            "fraction-read-once",
            &["per_process_memory_fraction:0.5"],
            &["garbage_collection_threshold:0.5"],
        ),
        (
            "later-string-resets",
            &[
                "max_split_size_mb:128",
                "max_non_split_rounding_mb:64",
                "garbage_collection_threshold:0.5",
                "roundup_power2_divisions:4",
            ],
            &["expandable_segments:True,large_segment_size_mb:30", ""],
        ),
        ("environment-read-once", &["backend:native"], &["", "  "]),
        (
            "number-by-prefix",
            &[
                "max_split_size_mb:100abc",
                "max_split_size_mb:128.5",
                "garbage_collection_threshold:0.8x",
                "roundup_power2_divisions:[256MB:4]",
                "roundup_power2_divisions:4x",
            ],
            &[
                "max_split_size_mb:100,garbage_collection_threshold:0.8",
                "roundup_power2_divisions:[256:4,>:8]",
                "expandable_segments:True",
            ],
        ),
        (
            "key-twice",
            &["max_split_size_mb:64,max_split_size_mb:64"],
            &["max_split_size_mb:64,max_non_split_rounding_mb:64"],
        ),
    ];

    #[test]
    fn every_trap_is_found_where_it_is_and_only_there() {
        for (id, with, without) in BY_STRING {
            for text in with {
                let found = ids(text, &Circumstances::default());
                assert!(found.contains(&id), "{text} has {id}: {found:?}");
            }
            for text in without {
                let found = ids(text, &Circumstances::default());
                assert!(!found.contains(&id), "{text} has no {id}: {found:?}");
            }
        }
    }

    #[test]
    fn traps_of_releases_hang_on_the_release() {
        let (old, new) = (release("2.9.1"), release("2.12"));
        let reference = Circumstances::default();
        let recent = "large_segment_size_mb:30";
        assert!(ids(recent, &reference).contains(&"recent-option"));
        assert!(ids("per_process_memory_fraction:1", &new).contains(&"recent-option"));
        assert!(!ids("max_split_size_mb:30", &reference).contains(&"recent-option"));
        assert!(lint(recent, &old).is_err());
        assert!(ids("pinned_free_catch_all:True", &new).contains(&"later-option"));
        assert!(!ids("max_split_size_mb:30", &new).contains(&"later-option"));
        // In older releases a lone > fills everything.
        assert!(!ids("roundup_power2_divisions:[>:8]", &old).contains(&"rounding-gap"));
    }

    #[test]
    fn traps_of_variables_hang_on_the_variable() {
        let text = "expandable_segments:True";
        let (alloc, cuda, hip) = (
            held_by(SettingsVariable::Alloc),
            held_by(SettingsVariable::CudaAlloc),
            held_by(SettingsVariable::HipAlloc),
        );
        let starts = |id: &&str| id.starts_with("variable-");
        let of = |text: &str, circumstances: &Circumstances| -> Vec<&'static str> {
            ids(text, circumstances).into_iter().filter(starts).collect()
        };
        assert!(of(text, &Circumstances::default()).is_empty());
        assert_eq!(of(text, &alloc), ["variable-hidden"]);
        assert_eq!(of(text, &cuda), ["variable-deprecated"]);
        assert_eq!(of(text, &hip), ["variable-hidden"]);
        let fraction = "per_process_memory_fraction:0.5";
        assert_eq!(of(fraction, &hip), ["variable-of-hip", "variable-hidden"]);
        assert_eq!(of(fraction, &alloc), ["variable-hidden"]);
        assert_eq!(of("", &cuda), ["variable-hides-others", "variable-deprecated"]);
        let old = Circumstances { variable: alloc.variable, ..release("2.9.1") };
        assert_eq!(of(text, &old), ["variable-not-read"]);
        assert!(of("expandable_segments:False", &old).is_empty());
    }

    #[test]
    fn a_limit_set_in_the_program_counts() {
        let text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.25";
        let known =
            Circumstances { device_total_bytes: Some(80 * GIB), ..Circumstances::default() };
        let lint = examine(text, &known);
        assert_eq!(lint.limit_bytes, Some(20 * GIB));
        assert_eq!(lint.garbage_collection_bytes, Some(10 * GIB));
        let limited = Circumstances { limit_bytes: Some(60 * GIB), ..known };
        assert_eq!(examine(text, &limited).limit_bytes, Some(60 * GIB));
        assert_eq!(examine(text, &limited).garbage_collection_bytes, Some(30 * GIB));
        let without = "garbage-collection-without-limit";
        assert!(!ids("garbage_collection_threshold:0.5", &limited).contains(&without));
        assert!(ids("garbage_collection_threshold:0.5", &known).contains(&without));
        let tiny = Circumstances { limit_bytes: Some(2 * MIB - 1), ..known };
        assert!(ids("", &tiny).contains(&"limit-below-a-segment"));
        assert!(ids("", &Circumstances { limit_bytes: Some(2 * MIB), ..known }).is_empty());
        assert_eq!(examine("", &known).limit_bytes, None);
    }

    #[test]
    fn texts_say_what_it_is_in_this_string() {
        let gap = trap("roundup_power2_divisions:[64:8,256:4]", "rounding-gap").text;
        assert!(gap.contains("from 128 MiB to 256 MiB"), "{gap}");
        assert!(gap.contains("from 32 GiB") && !gap.contains("64 MiB to"), "{gap}");
        let below = trap("roundup_power2_divisions:[>:8]", "rounding-gap").text;
        assert!(below.ends_with("sizes below 2 MiB"), "{below}");
        let twice = trap("max_split_size_mb:40,max_split_size_mb:50", "key-twice").text;
        assert!(twice.contains("more than once: 50 counts"), "{twice}");
        let cut = trap("garbage_collection_threshold:0.8.1", "number-by-prefix").text;
        assert_eq!(cut, "garbage_collection_threshold: 0.8.1 is read as 0.8");
        let waste = trap("roundup_power2_divisions:[64:8,>:2]", "rounding-waste").text;
        assert!(waste.contains("1/2 larger"), "the most of all entries: {waste}");
    }

    #[test]
    fn the_table_is_tested_whole_and_its_addresses_are_public() {
        let elsewhere = ["recent-option", "later-option"];
        for rule in &RULES {
            let tested = BY_STRING.iter().any(|(id, ..)| *id == rule.id)
                || elsewhere.contains(&rule.id)
                || rule.id.starts_with("variable-");
            assert!(tested, "{} has no test", rule.id);
            assert_eq!(RULES.iter().filter(|other| other.id == rule.id).count(), 1);
            let public = |address: &str| address.starts_with("https://github.com/");
            assert!(rule.address.is_none_or(public), "{}", rule.id);
        }
    }

    #[test]
    fn what_pytorch_refuses_has_no_answer() {
        for (text, position) in REFUSED {
            let error = lint(text, &Circumstances::default()).expect_err(text);
            assert_eq!(error.position, position, "{text}: {error}");
        }
    }
}
