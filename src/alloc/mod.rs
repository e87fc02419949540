//! The allocators: one file or folder each, one trait, one line in the [`registry`].
//!
//! # Adding an allocator
//!
//! 1. Write `src/alloc/NAME.rs` with a type that implements [`Allocator`], and add `pub mod NAME;`
//!    below. `native.rs` is the small one to copy; `best_fit.rs` shows one that cuts memory up.
//! 2. Give it `build(params, inputs)` that takes every parameter it knows with
//!    [`Params::take`](spec::Params::take) and ends with [`Params::finish`](spec::Params::finish),
//!    so that unknown ones are refused.
//! 3. Write [`Allocator::check_invariants`] if it keeps anything twice: tests and `--paranoid` call
//!    it after every event, and it finds what the contract below cannot see.
//! 4. In `src/alloc/registry.rs` add the `use` and one line to `allocators!`.
//! 5. Add a row to the table of allocators in `README.md`.
//!
//! The conformance suite (`tests/conformance.rs`) runs on every registered allocator; nothing else
//! has to be written for the command line, the results or the figures.
//!
//! # What an allocator sees
//!
//! ```text
//!   engine ── malloc, free, defer, empty_cache ──> Allocator
//!                                                    │ everything from outside through Env:
//!                                                    ├─ device()          driver calls
//!                                                    ├─ next_completed()  deferred frees that ended
//!                                                    ├─ wait_completed()  wait for the device
//!                                                    └─ log()             what it did
//! ```
//!
//! An allocator never reads files, clocks or the environment, and never learns of the future. Two
//! parts wait for those that cut memory into blocks: `free_set`, free blocks by size and address,
//! and `heap`, blocks that split, join and stay on their stream. A third, `pieces`, is for those
//! that keep all memory in one range: how it grows at its end and shrinks there.
//!
//! # The contract
//!
//! Checked after every event by an independent shadow map in tests and with `--paranoid`: no two
//! live blocks overlap, neither in addresses nor in physical memory; every live block lies in
//! memory the allocator holds, and the memory behind it stays the same; addresses are multiples of
//! 512 bytes; reserved ≥ active; all bytes come back at the end; after an
//! out-of-memory error the allocator is consistent and usable; a clone behaves as the original.

pub mod best_fit;
pub mod bfc;
pub mod caching;
mod first_fit;
mod free_set;
mod heap;
pub mod native;
mod pieces;
pub mod planned;
pub mod registry;
pub mod spec;
pub mod stitch;

use std::sync::Arc;

use serde::Serialize;

use crate::device::{CostProfile, Device};
use crate::trace::{Block, Pool, StartLayout};
use crate::units::{BlockId, PoolId, SettingsId, StreamId};
use planned::{PlanFiles, PlanSummary, Profile};

/// Every block that an allocator hands out starts at a multiple of this many bytes.
pub const ALIGNMENT_BYTES: u64 = 512;

/// An allocator's own name for a block it handed out. Dense, reused after the block is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u32);

impl Handle {
    /// No block: the request was refused.
    pub const NONE: Handle = Handle(u32::MAX);
}

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The block of the trace that it is for; goes into the log only.
    pub block: BlockId,
    /// Bytes asked for, not 0.
    pub size_bytes: u64,
    /// Stream it is asked on.
    pub stream: StreamId,
}

/// The request could not be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {size_bytes} bytes asked for")]
pub struct OutOfMemory {
    /// The size that could not be had, as the allocator rounded it.
    pub size_bytes: u64,
}

/// What an allocator holds at this moment, in bytes. See DESIGN 2 for the words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Levels {
    /// Live blocks at their rounded size.
    pub allocated_bytes: u64,
    /// Allocated, plus blocks whose memory still waits for another stream.
    pub active_bytes: u64,
    /// Physical memory held.
    pub reserved_bytes: u64,
}

/// What the allocator did, for the decision log and for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActionKind {
    /// A block was handed out.
    Alloc,
    /// The program freed a block.
    FreeRequested,
    /// A freed block became reusable.
    FreeCompleted,
    /// Device memory obtained.
    SegmentAlloc,
    /// Device memory returned.
    SegmentFree,
    /// Pages mapped.
    SegmentMap,
    /// Pages unmapped.
    SegmentUnmap,
    /// Memory held got a second range of addresses: address and size of that range.
    Stitch,
    /// That range is gone, the memory stays.
    Unstitch,
    /// A request was refused for good.
    Oom,
    /// The program asked to give memory back.
    EmptyCache,
    /// The device, or the memory limit, refused a call.
    DeviceRefused,
}

impl ActionKind {
    /// The name in files: `alloc`, `free`, `free_completed`, `segment_alloc`, ...
    pub fn name(self) -> &'static str {
        match self {
            ActionKind::Alloc => "alloc",
            ActionKind::FreeRequested => "free",
            ActionKind::FreeCompleted => "free_completed",
            ActionKind::SegmentAlloc => "segment_alloc",
            ActionKind::SegmentFree => "segment_free",
            ActionKind::SegmentMap => "segment_map",
            ActionKind::SegmentUnmap => "segment_unmap",
            ActionKind::Stitch => "stitch",
            ActionKind::Unstitch => "unstitch",
            ActionKind::Oom => "oom",
            ActionKind::EmptyCache => "empty_cache",
            ActionKind::DeviceRefused => "device_refused",
        }
    }
}

/// One entry of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// What happened.
    pub kind: ActionKind,
    /// The block concerned, or [`BlockId::NONE`].
    pub block: BlockId,
    /// Ordinal of the segment in order of creation, or `u32::MAX`.
    pub segment: u32,
    /// Stream of the block or segment.
    pub stream: StreamId,
    /// Offset of the block or page in its segment.
    pub offset_bytes: u64,
    /// For blocks what the program asked for, for segments their size, for `Oom` the rounded size.
    pub size_bytes: u64,
    /// Address of the block, segment or page; 0 for `Oom`, `EmptyCache` and `DeviceRefused`.
    pub address: u64,
}

impl Action {
    /// An entry that concerns no place in memory: a refusal, or a cache that is emptied.
    pub fn notice(kind: ActionKind, block: BlockId, stream: StreamId, size_bytes: u64) -> Action {
        Action { kind, block, segment: u32::MAX, stream, offset_bytes: 0, size_bytes, address: 0 }
    }
}

/// The world around an allocator. Static dispatch: a replay that wants no log pays nothing for it.
pub trait Env {
    /// The device.
    type Device: Device;

    /// Whether [`Self::log`] does anything; allocators may skip preparing actions if not.
    const LOG: bool;

    /// The device to call.
    fn device(&mut self) -> &mut Self::Device;

    /// The next deferred block whose use has ended, in the order in which uses ended, or nothing.
    /// An allocator looks at the start of every malloc.
    fn next_completed(&mut self) -> Option<Handle>;

    /// Waits for the device: gives every deferred block, one a call, then nothing.
    fn wait_completed(&mut self) -> Option<Handle>;

    /// Waits for the deferred blocks that `wanted` picks, as [`Self::wait_completed`] does for all.
    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle>;

    /// Takes an entry for the log.
    fn log(&mut self, action: Action);
}

/// A GPU memory allocator. The contract is in the [module docs](self).
pub trait Allocator: Clone {
    /// Whether anything but the addresses in the log depends on the addresses that the device gives
    /// out. If not, the engine may use the cheapest address policy.
    const ADDRESSES_MATTER: bool;

    /// Hands out a block.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the allocator stays usable.
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory>;

    /// Takes a block back; its memory is reusable at once.
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle);

    /// The program freed the block, but another stream still uses the memory. It comes back through
    /// [`Env::next_completed`] or [`Env::wait_completed`].
    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle);

    /// The program asks to give back what can be given back. Waits for the device.
    fn empty_cache<E: Env>(&mut self, env: &mut E);

    /// Takes over the memory that the recorded allocator held when its history begins, as it lies.
    /// Gives the handles of all blocks in use, in the order of [`StartLayout::blocks_in_use`];
    /// nothing if it cannot, and is then asked for these blocks one by one. `blocks` is the block
    /// table of the trace. Only called before
    /// anything else. The engine sees to it that the device holds what [`Self::layout`] then shows.
    fn adopt(&mut self, _start: &StartLayout, _blocks: &[Block]) -> Option<Vec<Handle>> {
        None
    }

    /// The program gives the allocator another settings string. Allocators without settings ignore
    /// it.
    fn change_settings<E: Env>(&mut self, _env: &mut E, _settings: SettingsId) {}

    /// Allocations go to this private pool from here on. Allocators without pools ignore it.
    fn pool_enter<E: Env>(&mut self, _env: &mut E, _pool: PoolId) {}

    /// The pool is left.
    fn pool_leave<E: Env>(&mut self, _env: &mut E, _pool: PoolId) {}

    /// The pool's owner lets it go.
    fn pool_delete<E: Env>(&mut self, _env: &mut E, _pool: PoolId) {}

    /// The program begins to use a stream that was not there when the allocator was built: the next
    /// id after those that are known, and the handle that orders it among the others. Traces tell
    /// all their streams beforehand; a running program does not. Allocators that keep no table of
    /// streams ignore it.
    fn stream_added(&mut self, _stream: StreamId, _handle: u64) {}

    /// A phase of the program begins: `step3.backward`. Allocators that do not follow the program's
    /// course ignore it.
    fn mark<E: Env>(&mut self, _env: &mut E, _phase: &str) {}

    /// The program enters a module, by the name in the trace.
    fn module_enter<E: Env>(&mut self, _env: &mut E, _module: &str) {}

    /// The program leaves it.
    fn module_leave<E: Env>(&mut self, _env: &mut E, _module: &str) {}

    /// What it holds now.
    fn levels(&self) -> Levels;

    /// The pool that a request belongs to, as [`LayoutBlock::pool`] numbers pools.
    fn pool_of(&self, _request: Request) -> u32 {
        0
    }

    /// What people call the pool of this number: `small`, `large`, `weights, large`. Nothing for an
    /// allocator with one pool only.
    fn pool_name(&self, _pool: u32) -> Option<String> {
        None
    }

    /// Size in bytes of the largest free range that could serve a request like this one without a
    /// device call: same stream and pool. 0 if there is none.
    fn largest_hole(&self, request: Request) -> u64;

    /// The memory limit in force, in bytes.
    fn limit_bytes(&self) -> Option<u64>;

    /// What the real allocator would not have survived, if that came to pass: the replay is then
    /// no prediction.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Checks what the allocator promises itself between events, from scratch. Slow: for tests and
    /// `--paranoid`.
    ///
    /// # Errors
    /// What is broken.
    fn check_invariants(&self) -> Result<(), String> {
        Ok(())
    }

    /// Counters for the results, by name. Always `segment_allocs`, `segment_frees`, `alloc_retries`
    /// and `ooms`; others as the allocator likes.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// PyTorch's own statistics under PyTorch's names, for allocators that keep them.
    fn torch_stats(&self) -> Option<Vec<(String, i64)>> {
        None
    }

    /// What was planned ahead and what became of it, for allocators that plan.
    fn plan_summary(&self) -> Option<PlanSummary> {
        None
    }

    /// Effective parameters for the results, by name.
    fn params(&self) -> Vec<(String, String)>;

    /// Calls `visit` for every block in address order, segment by segment, free ones included.
    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock));
}

/// What state a block of the layout is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// In the program's hands.
    Allocated,
    /// Freed by the program, waiting for another stream.
    Deferred,
    /// Free.
    Free,
}

/// One block of an allocator's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutBlock {
    /// The trace's block, or [`BlockId::NONE`] if free.
    pub block: BlockId,
    /// Ordinal of its segment in order of creation.
    pub segment: u32,
    /// First address of its segment.
    pub segment_address: u64,
    /// Size of its segment in bytes: what was obtained at once, or the addresses reserved.
    pub segment_bytes: u64,
    /// For memory that is mapped page by page, the size of a page; pages begin at multiples of it
    /// from the segment's first address. 0 for a segment that is obtained as a whole.
    pub page_bytes: u64,
    /// First address.
    pub address: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// What the program asked for; 0 if free.
    pub requested_bytes: u64,
    /// The stream it belongs to; [`StreamId::NONE`] if it is free for any.
    pub stream: StreamId,
    /// Pool that requests must belong to in order to use it: an allocator's own number.
    pub pool: u32,
    /// State.
    pub state: BlockState,
}

/// What an allocator may know from outside when it is built.
#[derive(Clone, Debug, Default)]
pub struct BuildInputs {
    /// The settings string of the trace or of `--pytorch-conf`.
    pub settings: Option<String>,
    /// The settings string of the trace, whatever is asked for.
    pub recorded_settings: Option<String>,
    /// Memory limit of the allocator in bytes, asked for by name; it never holds more.
    pub limit_bytes: Option<u64>,
    /// The limit of the recorded run: stands unless another is asked for, by name or in settings.
    pub recorded_limit_bytes: Option<u64>,
    /// Total memory that the device reports, where there is an end to it.
    pub device_total_bytes: Option<u64>,
    /// What device calls cost, for allocators that weigh calls against memory.
    pub costs: Option<CostProfile>,
    /// Raw handles of the trace's streams, by [`StreamId`].
    pub stream_handles: Vec<u64>,
    /// The trace's private pools, by [`PoolId`].
    pub pools: Vec<Pool>,
    /// Settings strings that the program gives while it runs, by [`SettingsId`]. Empty if other
    /// settings than the recorded ones are asked for.
    pub settings_changes: Vec<String>,
    /// What an earlier run of the program showed, for allocators that plan ahead.
    pub profile: Option<Arc<Profile>>,
    /// A plan that is there already, for those that read the files of STAlloc (`plan=NAME`).
    pub plan_files: Option<Arc<PlanFiles>>,
}
