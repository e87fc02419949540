//! fraglab: a discrete-event simulator and benchmarking laboratory for GPU memory allocators.
//!
//! It replays the allocation events of recorded LLM jobs through interchangeable allocators on a
//! simulated device or a real one, and says how much memory each would have reserved, where the
//! fragmentation comes from, and what it costs in time.
//!
//! # The house
//!
//! Arrows point down only: a room may use any room below it, never one above.
//!
//! ```text
//!   cli       strings in, text and files out; the only place that prints; one file per subcommand
//!   plugin    the C interface that PyTorch loads (feature `plugin`): an allocator a device in a running
//!             program, with locks and streams; beside `cli`, which it does not know
//!   report    formats results: text tables, JSON, CSV, Parquet, figures, pages for a browser
//!   experiment  many replays at once: tables and figures from a description, whole or in parts; a
//!             fleet of ranks summed up; a gate for CI, what sets two runs apart, advice, explanations
//!   engine    the one replay loop, its clock and completions; verify, predict, compare; the
//!             smallest capacity; profiles for those that plan ahead, traces as packing problems
//!   chunk     PatrickStar's manager: model data in equal chunks on GPU and host, a link between them
//!   metrics   sinks that watch a replay (peaks, decisions, time line, map, shadow map); what a layout
//!             says: splits, holes, pins; growth
//!   alloc     the allocators: native, caching, best_fit, bfc, stitch, planned; their trait,
//!             registry
//!   plan      offline packing (dynamic storage allocation): problem, bound, solvers, validator;
//!             knows nothing of what is above or below it
//!   device    what an allocator may ask a GPU: a simulated one, or an NVIDIA GPU through its driver;
//!             wrappers that count, time, limit and refuse
//!   workload  model description and strategies -> trace (recompute, offload, ZeRO, LoRA, pipeline,
//!             MoE): a small autograd whose tensors free themselves
//!   import    other people's files -> trace: torch snapshots (with what our recorder noted), the
//!             profiler's traces, RMM logs, STAlloc's logs, MiniMalloc's buffers; texts about memory: out-of-memory messages,
//!             memory_summary tables, memory lines of logs
//!   trace     events, blocks, sites, phases; native JSON, text and Parquet files; ranks merged; what
//!             is read at most
//!   units     byte counts, times, dense ids
//! ```
//!
//! # One replay
//!
//! ```text
//!   TOML ──workload──┐
//!   text ──import──> MemoryText ──> its diagnosis ──report──> an explanation without a trace
//!   file ──import──> Trace ──engine::run──> RunResult ──report──> table, JSON, CSV, Parquet
//!                      │         │
//!                      │         ├─ registry::build makes it and calls a visitor with its type
//!                      │         └─ the loop, compiled for <allocator, device, sink>:
//!                      │              for event in trace { allocator.malloc(..) / free / .. }
//!                      ├─ Prepared ──engine::compare──> Compared: many cells side by side
//!                      ├─ engine::moments ──> Moment: split, holes, pins at one event
//!                      │      └─ experiment::explain, advise ──> class, what helps, the line to paste
//!                      ├─ chunk::run ──> what PatrickStar's manager would ask for: a Trace again
//!                      ├─ Recording (what the real one did) ──engine::verify──> VerifyResult
//!                      └─ engine::lifetimes ──> Problem ──engine::plan──> Planned (offsets, bound)
//! ```
//!
//! # Invariants of absence
//!
//! - `alloc` never reads files, clocks or the environment, and never learns of the future.
//! - `engine` never prints. It reads a clock only for the `wall` figures, which are never compared, and
//!   to give a GPU the events at their recorded times.
//! - Importers never panic, never execute what they read, size no allocation by an unchecked field,
//!   and return the trace with its warnings.
//! - Only `report` turns numbers into text; only `cli` knows flags.
//! - `unsafe` lives where the driver is spoken to ([`device::cuda`]) and in `plugin`, each block with
//!   its reason.
//! - The order of a hash map never reaches an output: same input, same bytes out, on any number of
//!   threads.
//! - The replay loop hashes nothing: blocks have dense ids. Logs, time lines and the paranoid
//!   checker are sinks, compiled out when not asked for.
//!
//! How to add an allocator stands in [`alloc`]; the file formats in `traces/README.md`.

pub mod alloc;
pub mod chunk;
#[cfg(feature = "cli")]
pub mod cli;
pub mod device;
pub mod engine;
pub mod experiment;
pub mod import;
pub mod metrics;
pub mod plan;
#[cfg(feature = "plugin")]
pub mod plugin;
pub mod report;
pub mod trace;
pub mod units;
pub mod workload;
