//! The knobs of GMLake (2.2), with the defaults of the code as it was shipped.

use fraglab::alloc::spec::AllocSpec;
use fraglab::units::{Bytes, GIB, MIB};

/// The knobs, in bytes where they are sizes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// `fragLimit`: the smallest request that may create a stitched block.
    pub(super) frag_limit: u64,
    /// `reuseLimit`: a stitched block serves a request up to this many times smaller.
    pub(super) reuse_limit: f64,
    /// `defragLevel`: the first attempt at which stitching is allowed.
    pub(super) defrag_level: u32,
    /// `autoGC` in bytes of stitched addresses.
    pub(super) auto_gc: u64,
    /// `reAlloc`: allocate only what is missing, and stitch.
    pub(super) re_alloc: bool,
    /// `vmmDefragment`: off means plain device mallocs and no stitching.
    pub(super) vmm_defragment: bool,
    /// `max_split_size_mb`; `u64::MAX` is unlimited.
    pub(super) max_split_size: u64,
    /// `garbage_collection_threshold`; 0 is off, and it does nothing without a limit.
    pub(super) gc_threshold: f64,
    /// `roundup_power2_divisions` for every size; 0 is off.
    pub(super) roundup_divisions: u64,
    /// The memory limit.
    pub(super) limit: Option<u64>,
    /// Reproduce the defects that touch statistics only (B8, B9).
    pub(super) quirks: bool,
}

impl Settings {
    /// The defaults of the branch `master`.
    pub(super) fn shipped() -> Settings {
        Settings {
            frag_limit: 512 * MIB,
            reuse_limit: 10.0,
            defrag_level: 0,
            auto_gc: 1000 * GIB,
            re_alloc: false,
            vmm_defragment: true,
            max_split_size: u64::MAX,
            gc_threshold: 0.0,
            roundup_divisions: 0,
            limit: None,
            quirks: false,
        }
    }

    /// The knobs of `stitch+policy=shipped+...`, or nothing if it is another allocator.
    pub(super) fn of_spec(text: &str) -> Option<Settings> {
        let spec: AllocSpec = text.parse().expect("a specification");
        let mut settings = Settings::shipped();
        let mut shipped = false;
        for (key, value) in &spec.params {
            let size = || value.parse::<Bytes>().expect("a size").0;
            let flag = || value.parse::<bool>().expect("true or false");
            match key.as_str() {
                "policy" => shipped = value == "shipped",
                "frag_limit" => settings.frag_limit = size(),
                "reuse_limit" => settings.reuse_limit = value.parse().expect("a number"),
                "defrag_level" => settings.defrag_level = value.parse().expect("a level"),
                "auto_gc" => settings.auto_gc = size(),
                "re_alloc" => settings.re_alloc = flag(),
                "vmm_defragment" => settings.vmm_defragment = flag(),
                "max_split_size_mb" => {
                    settings.max_split_size = value.parse::<u64>().expect("a number") * MIB;
                }
                "garbage_collection_threshold" => {
                    settings.gc_threshold = value.parse().expect("a fraction");
                }
                "roundup_power2_divisions" => {
                    settings.roundup_divisions = value.parse().expect("one number");
                }
                "quirks" => settings.quirks = flag(),
                _ => panic!("{text}: the model has no knob {key}"),
            }
        }
        (spec.name == "stitch" && shipped).then_some(settings)
    }
}
