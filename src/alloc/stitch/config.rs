//! Parameters of the stitching allocator (gmlake spec 2.2), and what each policy knows of them.

use crate::alloc::caching;
use crate::alloc::spec::{Params, SpecError};
use crate::units::{GIB, MIB};

use super::chunks::CHUNK_BYTES;
use super::gmlake::SMALL_SIZE_BYTES;
use super::parse_size;

/// Whose rules decide where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// The published algorithm (spec 4.1).
    Paper,
    /// The published code (spec 2 and 3).
    Shipped,
}

impl Policy {
    pub(super) fn name(self) -> &'static str {
        match self {
            Policy::Paper => "paper",
            Policy::Shipped => "shipped",
        }
    }
}

/// All parameters. Those that a policy does not know have their defaults and are not looked at.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Config {
    pub(super) policy: Policy,
    /// Shipped: smallest request that may create a stitched block. Paper: smallest block that may
    /// become part of one.
    pub(super) frag_limit_bytes: u64,
    /// A free stitched block serves requests of at least its size divided by this.
    pub(super) reuse_limit: f64,
    /// First attempt at which stitching is allowed: 0, 1 or 2.
    pub(super) defrag_level: u8,
    /// All idle stitched blocks go when stitched addresses exceed this.
    pub(super) auto_gc_bytes: u64,
    /// Allocate the missing part only, and stitch.
    pub(super) re_alloc: bool,
    /// Large memory comes in chunks, and may be stitched.
    pub(super) vmm: bool,
    /// Statistics err as the shipped ones do (spec 4.3 B8, B9).
    pub(super) quirks: bool,
    /// Smallest block that is split.
    pub(super) split_limit_bytes: u64,
    /// Stitched blocks are evicted, the least recently used first, above this.
    pub(super) stitch_limit_bytes: u64,
    /// The options inherited from PyTorch.
    pub(super) torch: caching::Config,
    /// No request is rounded between powers of two.
    rounds_plainly: bool,
}

/// A parameter: its key, the one policy that knows it, if not both, and one line of help.
type Key = (&'static str, Option<Policy>, &'static str);

const PAPER: Option<Policy> = Some(Policy::Paper);
const SHIPPED: Option<Policy> = Some(Policy::Shipped);

const KEYS: [Key; 12] = [
    (
        "frag_limit",
        None,
        "paper: smallest block that is stitched, default 128MiB; shipped: smallest request that is, \
         default 512MiB",
    ),
    ("split_limit", PAPER, "paper: smallest block that is split, default 2MiB"),
    (
        "stitch_limit",
        PAPER,
        "paper: stitched addresses above this go, the least recently used first, default 1000GiB",
    ),
    (
        "reuse_limit",
        SHIPPED,
        "shipped: an idle stitched block serves requests down to its size / this, default 10",
    ),
    (
        "defrag_level",
        SHIPPED,
        "shipped: stitch 0: before new memory (default), 1: after it fails, 2: after a flush",
    ),
    (
        "auto_gc",
        SHIPPED,
        "shipped: stitched addresses above which all idle ones go, default 1000GiB",
    ),
    ("re_alloc", SHIPPED, "shipped: true: get the missing part only, and stitch; default false"),
    ("vmm_defragment", SHIPPED, "shipped: false: no chunks and no stitching; default true"),
    ("quirks", SHIPPED, "shipped: true: statistics err as the shipped ones do; default false"),
    ("max_split_size_mb", SHIPPED, "shipped: as PyTorch: blocks of at least this are never split"),
    ("garbage_collection_threshold", SHIPPED, "shipped: as PyTorch: share of the limit, in (0, 1)"),
    (
        "roundup_power2_divisions",
        None,
        "paper, shipped: as PyTorch; sizes above 1 MiB stay multiples of 2 MiB",
    ),
];

/// Every parameter, and the names of the policies that know it.
pub(super) fn known_by() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    KEYS.iter().map(|&(key, only, _)| {
        let both = [Policy::Paper, Policy::Shipped];
        let policies = both.into_iter().filter(|&policy| only.is_none_or(|only| only == policy));
        (key, policies.map(Policy::name).collect())
    })
}

/// What `fraglab list` says about the parameters of both policies.
pub(super) fn help() -> Vec<(&'static str, &'static str)> {
    KEYS.iter().map(|&(key, _, line)| (key, line)).collect()
}

/// The parameters of one specification, as far as they are read.
struct Reader<'a> {
    params: &'a mut Params,
    policy: Policy,
}

impl Reader<'_> {
    /// The text of a parameter, if given and known to the policy.
    fn text(&mut self, key: &str) -> Option<String> {
        let known = |only: Option<Policy>| only.is_none_or(|only| only == self.policy);
        let &(key, ..) = KEYS.iter().find(|&&(own, only, _)| own == key && known(only))?;
        self.params.take(key)
    }

    fn read<T>(
        &mut self,
        key: &str,
        default: T,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        match self.text(key) {
            None => Ok(default),
            Some(text) => parse(&text)
                .map_err(|expected| self.params.value_error(format!("{key}={text}: {expected}"))),
        }
    }

    fn size(&mut self, key: &str, default_bytes: u64) -> Result<u64, SpecError> {
        self.read(key, default_bytes, parse_size)
    }

    fn switch(&mut self, key: &str, default: bool) -> Result<bool, SpecError> {
        self.read(key, default, |text| match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err("expected true or false".to_owned()),
        })
    }

    /// The options that PyTorch parses, as a settings string of theirs.
    fn torch(&mut self) -> Result<caching::Config, SpecError> {
        let mut settings = Vec::new();
        for key in ["max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"]
        {
            let given = self.read(key, None, |text| Ok(Some(text.to_owned())))?;
            settings.extend(given.map(|text| format!("{key}:{text}")));
        }
        caching::Config::parse(&settings.join(","))
            .map_err(|error| self.params.value_error(error.to_string()))
    }
}

impl Config {
    /// Reads the parameters that the policy knows, but for the policy itself.
    ///
    /// # Errors
    /// A value that is not accepted.
    pub(super) fn take(params: &mut Params, policy: Policy) -> Result<Config, SpecError> {
        let frag_limit_bytes = match policy {
            Policy::Paper => 128 * MIB,
            Policy::Shipped => 512 * MIB,
        };
        let mut reader = Reader { params, policy };
        let torch = reader.torch()?;
        Ok(Config {
            policy,
            frag_limit_bytes: reader.size("frag_limit", frag_limit_bytes)?,
            split_limit_bytes: reader.size("split_limit", CHUNK_BYTES)?,
            stitch_limit_bytes: reader.size("stitch_limit", 1000 * GIB)?,
            reuse_limit: reader.read("reuse_limit", 10.0, |text| {
                let number = text.parse::<f64>().ok();
                let number = number.filter(|number| number.is_finite() && *number >= 0.0);
                number.ok_or_else(|| "expected a number of at least 0".to_owned())
            })?,
            defrag_level: reader.read("defrag_level", 0, |text| match text {
                "0" => Ok(0),
                "1" => Ok(1),
                "2" => Ok(2),
                _ => Err("expected 0, 1 or 2".to_owned()),
            })?,
            auto_gc_bytes: reader.size("auto_gc", 1000 * GIB)?,
            re_alloc: reader.switch("re_alloc", false)?,
            vmm: reader.switch("vmm_defragment", true)?,
            quirks: reader.switch("quirks", false)?,
            rounds_plainly: torch.roundup_power2_divisions.iter().all(|&count| count <= 1),
            torch,
        })
    }

    /// The size that a request is rounded to (spec 2.3; B6 mended: sizes above 1 MiB are multiples
    /// of 2 MiB with power-of-two divisions too). `request_bytes` is not 0 and below 2^60.
    #[inline]
    pub(super) fn round_size(&self, request_bytes: u64) -> u64 {
        let size_bytes = if self.rounds_plainly {
            request_bytes.next_multiple_of(crate::alloc::ALIGNMENT_BYTES)
        } else {
            self.torch.round_size(request_bytes)
        };
        if size_bytes <= SMALL_SIZE_BYTES {
            size_bytes
        } else {
            size_bytes.next_multiple_of(CHUNK_BYTES)
        }
    }

    /// Effective parameters of the policy.
    pub(super) fn params(&self) -> Vec<(String, String)> {
        let torch: Vec<(String, String)> = self.torch.params();
        let value = |key: &str| match key {
            "frag_limit" => self.frag_limit_bytes.to_string(),
            "split_limit" => self.split_limit_bytes.to_string(),
            "stitch_limit" => self.stitch_limit_bytes.to_string(),
            "reuse_limit" => self.reuse_limit.to_string(),
            "defrag_level" => self.defrag_level.to_string(),
            "auto_gc" => self.auto_gc_bytes.to_string(),
            "re_alloc" => self.re_alloc.to_string(),
            "vmm_defragment" => self.vmm.to_string(),
            "quirks" => self.quirks.to_string(),
            _ => {
                let found = torch.iter().find(|(known, _)| known == key);
                found.map(|(_, value)| value.clone()).unwrap_or_default()
            }
        };
        let known = KEYS.iter().filter(|(_, only, _)| only.is_none_or(|it| it == self.policy));
        let policy = ("policy".to_owned(), self.policy.name().to_owned());
        let others = known.map(|&(key, _, _)| (key.to_owned(), value(key)));
        std::iter::once(policy).chain(others).collect()
    }
}
