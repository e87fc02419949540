//! Options of the manager, each by the name that PatrickStar has for it (spec patrickstar 2.4, 5,
//! 5.13), and switches for what its published code does wrong (spec patrickstar 7.1, 7.2).
//!
//! The one design decision: what is wrong is mended unless a switch asks for it, so that figures
//! speak of the design, and the same program can also repeat the published ones.
//!
//! Of the thirteen surprises of spec patrickstar 7.1 these have no switch here:
//! - 10, a cache look-up without a match of sizes, cannot happen: payloads of a kind are all equal;
//! - 11, the check of the chunk size, belongs to the search for one;
//! - 12, ties that go by the chunk's id after the warm-up too, is the order of the spec: only a
//!   comment in the published code says otherwise;
//! - 13, the tracer counts allocated bytes, not reserved ones: free memory that an allocator keeps
//!   is free for chunks too, and `overall_gpu_mem_ratio` is the guard against fragmentation.

use std::collections::BTreeMap;

use crate::alloc::spec::{Params, SpecError};
use crate::units::{Bytes, GIB, MIB};

/// Name of the allocator in specifications.
pub const NAME: &str = "chunk";

/// Host memory where none is given: 240 GiB, as of the machines that PatrickStar's search for a
/// chunk size takes for granted (spec patrickstar 1.5).
pub const HOST_BYTES_DEFAULT: u64 = 240 * GIB;
/// Most elements of a chunk.
pub const CHUNK_ELEMENTS_MAX: u64 = crate::trace::ELEMENTS_MAX;
/// Most bytes of a GPU or host: 1 EiB, so that budgets times ratios stay exact.
pub const MEMORY_BYTES_MAX: u64 = 1 << 60;

/// Size of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSize {
    /// This many elements.
    Elements(u64),
    /// To be searched for by whoever builds the run.
    Auto,
}

/// A share in millionths, so that budgets are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u32);

impl Ratio {
    /// What is 1.
    pub(super) const WHOLE: i128 = 1_000_000;

    /// Reads a decimal of at most six places from 0 to 1.
    pub fn of_text(text: &str) -> Option<Ratio> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || fraction.len() > 6 {
            return None;
        }
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        let millionths: u32 = format!("{fraction:0<6}").parse().ok()?;
        let millionths = whole.checked_mul(1_000_000)?.checked_add(millionths)?;
        (millionths <= 1_000_000).then_some(Ratio(millionths))
    }

    /// In hundredths.
    pub const fn percent(percent: u32) -> Ratio {
        Ratio(percent * 10_000)
    }

    pub(super) fn millionths(self) -> i128 {
        i128::from(self.0)
    }

    /// As a number.
    pub fn value(self) -> f64 {
        f64::from(self.0) / 1e6
    }
}

/// Which of the published code's surprises are repeated (spec patrickstar 7.1; numbers are those of
/// its list). All off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// 1: in collective mode the budget of the backward pass keeps N² chunks free; else N.
    pub bwd_reserve: bool,
    /// 2: when the GPU refuses a payload, the search for chunks to move away stops at the first and
    /// fails; else chunks move to the host, in the order of eviction, until it is granted.
    pub oom_fallback: bool,
    /// 3: without the cache every move to the GPU leaves phantom bytes in the host's count (7.2).
    pub phantom_host: bool,
    /// 4: what else lies on the host is divided by the local ranks once more, and ignored in the
    /// warm-up, in ADAM and with the static partition; else it is always taken off.
    pub host_budget: bool,
    /// 5: a margin of exactly c groups gives c − 1 of them; else c.
    pub margin: bool,
    /// 6: updated parameters go to a chunk on the GPU as fp32, 4 bytes an element, for all but the
    /// last chunk, through an fp32 buffer on the GPU; else as fp16, without the buffer.
    pub write_back: bool,
    /// 7: where the budget is smaller than the need, nothing is evicted and the payload is
    /// allocated all the same; else everything is evicted that may be, before it is.
    pub over_budget: bool,
    /// 8: the warm-up ends with the first step, even if its ADAM was skipped; else with the first
    /// step that ran ADAM.
    pub skipped_adam: bool,
    /// 9: with the cache, a step that skipped ADAM leaves one fp16 buffer in the host's count.
    pub overflow_leak: bool,
}

impl Quirks {
    /// Every one.
    pub const ALL: Quirks = Quirks {
        bwd_reserve: true,
        oom_fallback: true,
        phantom_host: true,
        host_budget: true,
        margin: true,
        write_back: true,
        over_budget: true,
        skipped_adam: true,
        overflow_leak: true,
    };
}

/// All options.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkConfig {
    /// Size of a chunk.
    pub chunk_size: ChunkSize,
    /// ADAM of as many chunks as leave room for it runs on the GPU.
    pub use_hybrid_adam: bool,
    /// Chunks are broadcast one by one; else gathered by groups of as many as there are ranks.
    pub with_mem_saving_comm: bool,
    /// Released payloads are kept for the next, two of a kind and device.
    pub with_mem_cache: bool,
    /// The tracer sees the peak between two moments; else only what is allocated at a moment.
    pub with_async_mem_monitor: bool,
    /// The budget of the warm-up holds for ever.
    pub with_static_partition: bool,
    /// Parameters of other ranks stay on the host until the model is built.
    pub release_after_init: bool,
    /// A chunk's copy waits for that chunk only, not for the whole device. One GPU only.
    pub with_async_move: bool,
    /// The GPU is shared among the local ranks.
    pub use_fake_dist: bool,
    /// Share of the GPU's quota that chunks may have in the warm-up.
    pub warmup_gpu_chunk_mem_ratio: Ratio,
    /// Share of the GPU that is its quota.
    pub overall_gpu_mem_ratio: Ratio,
    /// Share of the host that is the ranks' quota.
    pub overall_cpu_mem_ratio: Ratio,
    /// Share of what is left of the GPU at the peak that ADAM's chunks may have.
    pub margin_use_ratio: Ratio,
    /// Bytes of the GPU; without it what the trace says.
    pub gpu_bytes: Option<u64>,
    /// Bytes of the host, shared by the local ranks.
    pub host_bytes: u64,
    /// The allocator that serves payloads and everything else on the GPU.
    pub inner: String,
    /// The rank that is simulated.
    pub rank: u32,
    /// ADAM on the GPU takes 12 bytes an element of the largest tensor for results in between.
    pub adam_temporaries: bool,
    /// Gradients are checked for overflow one by one, through an fp32 copy of each (spec
    /// patrickstar 2.2).
    pub loss_scaler: bool,
    /// Page-locked memory comes in powers of two, as from PyTorch 1.11 on (spec patrickstar 7.4).
    /// Budgets do not know of it.
    pub pinned_power_of_two: bool,
    /// Bytes a second between host and GPU, both ways, in place of what was measured; a quarter of
    /// it for pageable memory.
    pub link_bandwidth: Option<u64>,
    /// Bytes a second between GPUs, in place of what was measured.
    pub peer_bandwidth: Option<u64>,
    /// Surprises that are repeated.
    pub quirks: Quirks,
}

impl Default for ChunkConfig {
    /// As the library has them (spec patrickstar 5.13), but for the chunk size: the library's 32 Mi
    /// elements hold hardly any of today's models.
    fn default() -> Self {
        ChunkConfig {
            chunk_size: ChunkSize::Auto,
            use_hybrid_adam: true,
            with_mem_saving_comm: false,
            with_mem_cache: false,
            with_async_mem_monitor: true,
            with_static_partition: false,
            release_after_init: false,
            with_async_move: false,
            use_fake_dist: false,
            warmup_gpu_chunk_mem_ratio: Ratio::percent(10),
            overall_gpu_mem_ratio: Ratio::percent(80),
            overall_cpu_mem_ratio: Ratio::percent(80),
            margin_use_ratio: Ratio::percent(80),
            gpu_bytes: None,
            host_bytes: HOST_BYTES_DEFAULT,
            inner: "caching".to_owned(),
            rank: 0,
            adam_temporaries: true,
            loss_scaler: false,
            pinned_power_of_two: false,
            link_bandwidth: None,
            peer_bandwidth: None,
            quirks: Quirks::default(),
        }
    }
}

/// What `fraglab list` says about the parameters.
pub fn parameter_help() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "chunk_size",
            "elements of a chunk: 64Mi, 67108864, or auto, which wastes least; default auto",
        ),
        ("use_hybrid_adam", "false: ADAM runs on the host only; default true"),
        (
            "with_mem_saving_comm",
            "true: broadcast chunks one by one, not by groups (also with_mem_saving_com); default \
             false",
        ),
        ("with_mem_cache", "true: keep two released payloads of a kind and device; default false"),
        (
            "with_async_mem_monitor",
            "false: see only what is allocated when a module starts, not the peak before; default \
             true",
        ),
        ("with_static_partition", "true: the budget of the warm-up holds for ever; default false"),
        (
            "release_after_init",
            "true: other ranks' parameters stay on the host until the model is built; default false",
        ),
        ("with_async_move", "true: copies wait for their chunk only; one GPU; default false"),
        ("use_fake_dist", "true: the local ranks share the GPU; default false"),
        (
            "warmup_gpu_chunk_mem_ratio",
            "share of the GPU's quota for chunks in the warm-up; default 0.1",
        ),
        ("overall_gpu_mem_ratio", "share of the GPU that is its quota; default 0.8"),
        ("overall_cpu_mem_ratio", "share of the host that is the ranks' quota; default 0.8"),
        ("margin_use_ratio", "share of the GPU's rest that ADAM's chunks may have; default 0.8"),
        ("gpu", "size of the GPU; default what the trace says"),
        ("host", "memory of the host; default 240GiB"),
        ("inner", "allocator that serves payloads and all else: NAME or [NAME+key=value]"),
        ("rank", "the rank that is simulated; default 0"),
        (
            "adam_temporaries",
            "false: leave out the results in between of ADAM on the GPU; default true",
        ),
        (
            "loss_scaler",
            "true: each gradient is checked for overflow through an fp32 copy; default false",
        ),
        (
            "pinned_power_of_two",
            "true: page-locked memory comes in powers of two, as from PyTorch 1.11 on; default false",
        ),
        ("link_bandwidth", "bytes a second between host and GPU, as 25GB; default as measured"),
        ("peer_bandwidth", "bytes a second between GPUs; default as measured"),
        ("quirks", "true: all quirk_ switches, as the published code; default false"),
        ("quirk_bwd_reserve", "true: the backward pass keeps N*N chunks free, not N"),
        ("quirk_oom_fallback", "true: a refused payload moves nothing away"),
        ("quirk_phantom_host", "true: moves to the GPU leave phantom bytes on the host"),
        ("quirk_host_budget", "true: the host's budget is too large with several local ranks"),
        ("quirk_margin", "true: a margin of exactly c groups gives c - 1"),
        ("quirk_write_back", "true: parameters go to the GPU as fp32, but for the last chunk"),
        ("quirk_over_budget", "true: no eviction where the budget is smaller than the need"),
        ("quirk_skipped_adam", "true: the warm-up ends with step 0, even without its ADAM"),
        ("quirk_overflow_leak", "true: with the cache, a step without ADAM leaks a buffer's count"),
    ]
}

impl ChunkConfig {
    /// Reads the parameters of a specification; `options` (those of the trace's model) stand for
    /// what it does not say.
    ///
    /// # Errors
    /// An unknown parameter, or a value that is not accepted.
    pub fn build(
        mut params: Params,
        options: &BTreeMap<String, String>,
    ) -> Result<ChunkConfig, SpecError> {
        for (key, value) in options {
            if !params.has(key) && !other_name(key).is_some_and(|other| params.has(other)) {
                params.preset(key, value);
            }
        }
        let default = ChunkConfig::default();
        let mut reader = Reader { params: &mut params };
        let quirks = reader.quirks()?;
        let spellings = ["with_mem_saving_com", "with_mem_saving_comm"];
        let [com, comm] = spellings.map(|key| reader.flag(key, false));
        let mem_saving = com? | comm?;
        let config = ChunkConfig {
            chunk_size: reader.read("chunk_size", default.chunk_size, chunk_size)?,
            use_hybrid_adam: reader.flag("use_hybrid_adam", true)?,
            with_mem_saving_comm: mem_saving,
            with_mem_cache: reader.flag("with_mem_cache", false)?,
            with_async_mem_monitor: reader.flag("with_async_mem_monitor", true)?,
            with_static_partition: reader.flag("with_static_partition", false)?,
            release_after_init: reader.flag("release_after_init", false)?,
            with_async_move: reader.flag("with_async_move", false)?,
            use_fake_dist: reader.flag("use_fake_dist", false)?,
            warmup_gpu_chunk_mem_ratio: reader
                .ratio("warmup_gpu_chunk_mem_ratio", default.warmup_gpu_chunk_mem_ratio)?,
            overall_gpu_mem_ratio: reader
                .ratio("overall_gpu_mem_ratio", default.overall_gpu_mem_ratio)?,
            overall_cpu_mem_ratio: reader
                .ratio("overall_cpu_mem_ratio", default.overall_cpu_mem_ratio)?,
            margin_use_ratio: reader.ratio("margin_use_ratio", default.margin_use_ratio)?,
            gpu_bytes: reader.read("gpu", None, |text| memory(text).map(Some))?,
            host_bytes: reader.read("host", default.host_bytes, memory)?,
            inner: reader.read("inner", default.inner, |text| Ok(text.to_owned()))?,
            rank: reader.read("rank", 0, |text| {
                text.parse().map_err(|_| "expected a rank, counted from 0".to_owned())
            })?,
            adam_temporaries: reader.flag("adam_temporaries", true)?,
            loss_scaler: reader.flag("loss_scaler", false)?,
            pinned_power_of_two: reader.flag("pinned_power_of_two", false)?,
            link_bandwidth: reader.read("link_bandwidth", None, |text| memory(text).map(Some))?,
            peer_bandwidth: reader.read("peer_bandwidth", None, |text| memory(text).map(Some))?,
            quirks,
        };
        params.finish()?;
        Ok(config)
    }
}

impl ChunkConfig {
    /// The options in force, by their names, as they could be given again.
    pub fn params(&self) -> Vec<(String, String)> {
        let elements = match self.chunk_size {
            ChunkSize::Elements(elements) => elements.to_string(),
            ChunkSize::Auto => "auto".to_owned(),
        };
        let flags = [
            ("use_hybrid_adam", self.use_hybrid_adam),
            ("with_mem_saving_com", self.with_mem_saving_comm),
            ("with_mem_cache", self.with_mem_cache),
            ("with_async_mem_monitor", self.with_async_mem_monitor),
            ("with_static_partition", self.with_static_partition),
            ("release_after_init", self.release_after_init),
            ("with_async_move", self.with_async_move),
            ("use_fake_dist", self.use_fake_dist),
            ("adam_temporaries", self.adam_temporaries),
            ("loss_scaler", self.loss_scaler),
            ("pinned_power_of_two", self.pinned_power_of_two),
            ("quirk_bwd_reserve", self.quirks.bwd_reserve),
            ("quirk_oom_fallback", self.quirks.oom_fallback),
            ("quirk_phantom_host", self.quirks.phantom_host),
            ("quirk_host_budget", self.quirks.host_budget),
            ("quirk_margin", self.quirks.margin),
            ("quirk_write_back", self.quirks.write_back),
            ("quirk_over_budget", self.quirks.over_budget),
            ("quirk_skipped_adam", self.quirks.skipped_adam),
            ("quirk_overflow_leak", self.quirks.overflow_leak),
        ];
        let ratios = [
            ("warmup_gpu_chunk_mem_ratio", self.warmup_gpu_chunk_mem_ratio),
            ("overall_gpu_mem_ratio", self.overall_gpu_mem_ratio),
            ("overall_cpu_mem_ratio", self.overall_cpu_mem_ratio),
            ("margin_use_ratio", self.margin_use_ratio),
        ];
        let sizes = [
            ("gpu", self.gpu_bytes.map(|bytes| bytes.to_string())),
            ("host", Some(self.host_bytes.to_string())),
            ("inner", Some(self.inner.clone())),
            ("rank", Some(self.rank.to_string())),
            ("link_bandwidth", self.link_bandwidth.map(|bytes| bytes.to_string())),
            ("peer_bandwidth", self.peer_bandwidth.map(|bytes| bytes.to_string())),
        ];
        let flags = flags.map(|(key, value)| (key, value.to_string()));
        let ratios = ratios.map(|(key, ratio)| (key, ratio.value().to_string()));
        let sizes = sizes.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let rows = [("chunk_size", elements)].into_iter().chain(flags).chain(ratios).chain(sizes);
        rows.map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

/// The other spelling of a parameter that has two.
fn other_name(key: &str) -> Option<&'static str> {
    match key {
        "with_mem_saving_com" => Some("with_mem_saving_comm"),
        "with_mem_saving_comm" => Some("with_mem_saving_com"),
        _ => None,
    }
}

/// Reads parameters of one specification.
struct Reader<'a> {
    params: &'a mut Params,
}

impl Reader<'_> {
    fn read<T>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        match self.params.take(key) {
            None => Ok(default),
            Some(text) => parse(&text)
                .map_err(|expected| self.params.value_error(format!("{key}={text}: {expected}"))),
        }
    }

    fn flag(&mut self, key: &'static str, default: bool) -> Result<bool, SpecError> {
        self.read(key, default, |text| match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err("expected true or false".to_owned()),
        })
    }

    fn ratio(&mut self, key: &'static str, default: Ratio) -> Result<Ratio, SpecError> {
        let expected = "expected a share from 0 to 1 of at most six decimals, as 0.8";
        self.read(key, default, |text| Ratio::of_text(text).ok_or_else(|| expected.to_owned()))
    }

    fn quirks(&mut self) -> Result<Quirks, SpecError> {
        let all = self.flag("quirks", false)?;
        Ok(Quirks {
            bwd_reserve: self.flag("quirk_bwd_reserve", all)?,
            oom_fallback: self.flag("quirk_oom_fallback", all)?,
            phantom_host: self.flag("quirk_phantom_host", all)?,
            host_budget: self.flag("quirk_host_budget", all)?,
            margin: self.flag("quirk_margin", all)?,
            write_back: self.flag("quirk_write_back", all)?,
            over_budget: self.flag("quirk_over_budget", all)?,
            skipped_adam: self.flag("quirk_skipped_adam", all)?,
            overflow_leak: self.flag("quirk_overflow_leak", all)?,
        })
    }
}

fn memory(text: &str) -> Result<u64, String> {
    let bytes: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    match bytes.0 {
        1..=MEMORY_BYTES_MAX => Ok(bytes.0),
        _ => Err("expected a size of 1 byte to 1 EiB".to_owned()),
    }
}

/// `auto`, or elements: a plain number, or one with `Ki`, `Mi`, `Gi` behind it.
fn chunk_size(text: &str) -> Result<ChunkSize, String> {
    if text == "auto" {
        return Ok(ChunkSize::Auto);
    }
    let units = [("Ki", 1 << 10), ("Mi", MIB), ("Gi", GIB), ("", 1)];
    let unit = units.into_iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let elements = unit.and_then(|(number, scale)| elements(number, scale));
    let elements = elements.filter(|elements| (1..=CHUNK_ELEMENTS_MAX).contains(elements));
    elements.map(ChunkSize::Elements).ok_or_else(|| {
        "expected a number of elements, as 64Mi or 67108864 (at most 2^56), or auto".to_owned()
    })
}

/// A decimal times a unit, if that is a whole number.
fn elements(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let parts = 10u128.pow(fraction.len() as u32);
    let all: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scaled = all.checked_mul(u128::from(scale))?;
    scaled.is_multiple_of(parts).then(|| u64::try_from(scaled / parts).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::spec::AllocSpec;

    fn build(spec: &str, options: &[(&str, &str)]) -> Result<ChunkConfig, SpecError> {
        let spec: AllocSpec = spec.parse()?;
        let options = options.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
        ChunkConfig::build(Params::new(&spec), &options.collect())
    }

    #[test]
    fn without_parameters_the_options_are_those_of_the_library() {
        let config = build("chunk", &[]).expect("builds");
        assert_eq!(config, ChunkConfig::default());
        assert_eq!(config.chunk_size, ChunkSize::Auto, "the library has 32Mi");
        assert!(config.use_hybrid_adam && config.with_async_mem_monitor);
        assert_eq!(config.warmup_gpu_chunk_mem_ratio.value(), 0.1);
        assert_eq!(config.overall_cpu_mem_ratio.value(), 0.8);
        assert_eq!(config.quirks, Quirks::default());
    }

    #[test]
    fn what_is_given_wins_over_the_models_options_in_either_spelling() {
        let options = [("chunk_size", "1.5Ki"), ("with_mem_saving_com", "true"), ("rank", "3")];
        let config = build("chunk+chunk_size=64Mi", &options).expect("builds");
        assert_eq!(config.chunk_size, ChunkSize::Elements(64 << 20));
        assert!(config.with_mem_saving_comm);
        assert_eq!(config.rank, 3);
        let config = build("chunk+with_mem_saving_comm=false", &options).expect("builds");
        assert!(!config.with_mem_saving_comm);
        assert_eq!(config.chunk_size, ChunkSize::Elements(1536));
    }

    #[test]
    fn all_quirks_may_be_asked_for_but_one() {
        let config = build("chunk+quirks=true+quirk_margin=false", &[]).expect("builds");
        assert_eq!(config.quirks, Quirks { margin: false, ..Quirks::ALL });
        let config = build("chunk+quirk_phantom_host=true", &[]).expect("builds");
        assert_eq!(config.quirks, Quirks { phantom_host: true, ..Quirks::default() });
    }

    #[test]
    fn every_parameter_is_explained_and_known() {
        for (key, _) in parameter_help() {
            let error = build(&format!("chunk+{key}=?"), &[]).map(|config| config.inner);
            let known = match &error {
                Ok(inner) => key == "inner" && inner == "?",
                Err(error) => error.to_string().contains(&format!("{key}=?: ")),
            };
            assert!(known, "{key}: {error:?}");
        }
        let error = build("chunk+chunksize=4", &[]).expect_err("no such parameter").to_string();
        assert!(error.contains("chunk_size"), "{error}");
    }

    #[test]
    fn the_options_in_force_give_the_same_options_again() {
        let spec = "chunk+chunk_size=5Mi+quirk_margin=true+overall_gpu_mem_ratio=0.123456+gpu=7GiB";
        let spec = format!("{spec}+with_mem_saving_comm=true+loss_scaler=true+rank=3+host=9GiB");
        let spec = format!("{spec}+link_bandwidth=1GB+peer_bandwidth=2GB");
        let config = build(&spec, &[]).expect("builds");
        let params = config.params().into_iter().map(|(key, value)| format!("+{key}={value}"));
        assert_eq!(build(&format!("chunk{}", params.collect::<String>()), &[]), Ok(config.clone()));
        let told: Vec<String> = config.params().into_iter().map(|(key, _)| key).collect();
        for (key, _) in parameter_help() {
            let is_short_for_others = key == "quirks" || key == "with_mem_saving_comm";
            assert!(is_short_for_others || told.iter().any(|told| told == key), "{key}");
        }
    }

    #[test]
    fn ratios_and_sizes_out_of_range_are_refused() {
        for bad in ["1.000001", "-0.1", "0.1234567", "", ".", "1e-1"] {
            assert_eq!(Ratio::of_text(bad), None, "{bad}");
        }
        assert_eq!(Ratio::of_text("1"), Some(Ratio::percent(100)));
        assert_eq!(Ratio::of_text(".25"), Some(Ratio::percent(25)));
        for bad in ["0", "64MB", "1.3", "0.0001Ki", "99999999999Gi", "Mi"] {
            assert!(build(&format!("chunk+chunk_size={bad}"), &[]).is_err(), "{bad}");
        }
        assert!(build("chunk+link_bandwidth=0", &[]).is_err());
        let told = build("chunk+link_bandwidth=25GB+peer_bandwidth=1GB", &[]).expect("rates");
        assert_eq!(
            (told.link_bandwidth, told.peer_bandwidth),
            (Some(25_000_000_000), Some(1_000_000_000))
        );
        assert!(build("chunk+gpu=0", &[]).is_err());
        assert!(build("chunk+host=2000000TiB", &[]).is_err());
    }
}
