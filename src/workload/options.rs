//! PatrickStar's option page: every option by its own name, what it takes, what it is by default.
//!
//! The one design decision: one table serves the reader of job descriptions (`[options]`), the
//! flags of the command line and the tests of the documentation, so that none of them can lack an
//! option. Four of the options are strategies of the job; the others are told to the allocator
//! that manages model data and change no event of a generated trace.
//!
//! ```text
//!   use_ckp, with_activation_offload, ─────> Job::strategy ──> events of the trace
//!   use_cpu_embedding, with_tiling_linear
//!   all others ────────────────────────────> Job::options ──> header.model.options ──> chunk
//! ```

/// What an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// True or false.
    Switch,
    /// A share: above 0, at most 1.
    Ratio,
    /// Elements of a chunk: a whole number, with `Mi` for 2^20 of them, or `auto`.
    Elements,
}

/// Where an option goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionUse {
    /// It sets this key of `[strategy]`.
    Strategy(&'static str),
    /// It is a parameter of the allocator `chunk`.
    Chunk,
}

/// One option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionInfo {
    /// PatrickStar's name, or ours where it has none.
    pub name: &'static str,
    /// What it takes.
    pub kind: OptionKind,
    /// Where it goes.
    pub used: OptionUse,
    /// What it is if nothing is said (spec patrickstar 5.13, the library's column).
    pub default: &'static str,
    /// One line about it.
    pub summary: &'static str,
}

/// Every option, in the order of the option page (spec patrickstar 5); those that are not on it
/// stand last.
pub const OPTIONS: [OptionInfo; 18] = [
    strategy(
        "use_ckp",
        "recompute",
        "Recompute the activations of every layer in the backward pass",
    ),
    strategy(
        "with_activation_offload",
        "activation_offload",
        "Keep the inputs of recomputed layers on the host; needs use_ckp",
    ),
    strategy("use_cpu_embedding", "cpu_embedding", "Keep and use embedding tables on the host"),
    strategy(
        "with_tiling_linear",
        "tiled_linear",
        "Cut the feed-forward linears of BERT into four tiles: smaller units to pack",
    ),
    switch(
        "with_mem_saving_com",
        "false",
        "Fetch chunks of other ranks one by one (broadcast, reduce), not a group at once",
    ),
    switch("with_mem_cache", "false", "Keep up to two idle payloads a device for reuse"),
    switch("use_hybrid_adam", "true", "Update on the GPU what the margin has room for"),
    switch(
        "with_async_mem_monitor",
        "true",
        "Sample memory between hooks too while warming up, so that transients are seen",
    ),
    switch(
        "with_static_partition",
        "false",
        "Give chunks a fixed share of the GPU instead of what each moment leaves free",
    ),
    switch(
        "release_after_init",
        "false",
        "Drop the other ranks' parameters after the whole model is built, not module by module",
    ),
    ratio(
        "warmup_gpu_chunk_mem_ratio",
        "0.1",
        "Share of the GPU budget for chunks in the first step, and with a static partition",
    ),
    ratio("overall_gpu_mem_ratio", "0.8", "Share of the GPU's memory that may be used"),
    ratio("overall_cpu_mem_ratio", "0.8", "Share of the host's memory that may be used"),
    ratio(
        "margin_use_ratio",
        "0.8",
        "Share of what the GPU has left that optimizer state may take",
    ),
    switch("use_fake_dist", "false", "Let the ranks of a host share one GPU, for debugging"),
    OptionInfo {
        name: "chunk_size",
        kind: OptionKind::Elements,
        used: OptionUse::Chunk,
        default: "auto",
        summary: "Elements of a chunk, as in 64Mi (2^20 each); auto searches the best",
    },
    switch("with_async_move", "false", "Move chunks beside the computation; one GPU only"),
    switch("quirks", "false", "Behave as the published code does where that looks like a mistake"),
];

const fn strategy(name: &'static str, key: &'static str, summary: &'static str) -> OptionInfo {
    let used = OptionUse::Strategy(key);
    OptionInfo { name, kind: OptionKind::Switch, used, default: "false", summary }
}

const fn switch(name: &'static str, default: &'static str, summary: &'static str) -> OptionInfo {
    OptionInfo { name, kind: OptionKind::Switch, used: OptionUse::Chunk, default, summary }
}

const fn ratio(name: &'static str, default: &'static str, summary: &'static str) -> OptionInfo {
    OptionInfo { name, kind: OptionKind::Ratio, used: OptionUse::Chunk, default, summary }
}

/// The option of that name. `with_mem_saving_comm`, the spelling of PatrickStar's code, is the
/// page's `with_mem_saving_com` (spec patrickstar 5.5).
pub fn option_named(name: &str) -> Option<&'static OptionInfo> {
    let name = if name == "with_mem_saving_comm" { "with_mem_saving_com" } else { name };
    OPTIONS.iter().find(|option| option.name == name)
}
