//! The shared library that PyTorch loads as its own memory allocator (`CUDAPluggableAllocator`).
//!
//! Built on its own, without the command line and without polars:
//!
//! ```text
//!   cargo rustc --release --lib --no-default-features --features plugin --crate-type cdylib
//!   target/release/libfraglab.so
//! ```
//!
//! The allocators are those of the simulator, compiled once more for another device; what differs is
//! the world around them. The one design decision: PyTorch sees a C interface and one mutex a device,
//! and behind it the type of the allocator is hidden once, by a trait object a device, so that a
//! call costs one indirect jump and one look-up of an address.
//!
//! ```text
//!   PyTorch ── pointers, streams ──> entry      catches panics, throws when memory is out
//!                                      │
//!                                      ├─ settings   FRAGLAB_..., configure()
//!                                      └─ Mutex<dyn Server>, one a device
//!                                           Served<A>   address -> block, levels, peaks
//!                                             ├─ A: Allocator
//!                                             ├─ Env: gpu (Counting<..>), waiting (events of streams)
//!                                             ├─ graphs    memory of CUDA graphs
//!                                             └─ recorder  events -> native trace
//! ```
//!
//! # The C interface
//!
//! Version 1 (`fraglab_torch_interface()` gives the number). What PyTorch calls; `stream` is a
//! `cudaStream_t`, `pool` the pair of 64-bit numbers of `c10::MempoolId_t`:
//!
//! | symbol | C signature | given to |
//! |---|---|---|
//! | `fraglab_torch_alloc` | `void *(size_t size, int device, void *stream)` | `CUDAPluggableAllocator(lib, "fraglab_torch_alloc", ...)` |
//! | `fraglab_torch_free` | `void (void *ptr, size_t size, int device, void *stream)` | the same |
//! | `fraglab_torch_init` | `void (int device_count)` | `set_init_fn` |
//! | `fraglab_torch_reset` | `void (void)` | `set_reset_fn`: `torch.cuda.empty_cache()` |
//! | `fraglab_torch_memory_fraction` | `void (double fraction, int device)` | `set_memory_fraction_fn` |
//! | `fraglab_torch_base_alloc` | `void *(void *ptr, size_t *size)` | `set_base_alloc_fn` |
//! | `fraglab_torch_record_stream` | `void (void *ptr, void *stream)` | `set_record_stream_fn` |
//! | `fraglab_torch_pool_begin` | `void (int device, pool, std::function<bool(cudaStream_t)>)` | `set_begin_allocate_to_pool` |
//! | `fraglab_torch_pool_end` | `void (int device, pool)` | `set_end_allocate_to_pool_fn` |
//! | `fraglab_torch_pool_release` | `void (int device, pool)` | `set_release_pool` |
//!
//! What a program calls (through `ctypes`). Texts are UTF-8 and end with a zero byte; those that come
//! back as `char *` are the caller's, who hands them to `fraglab_torch_release_text`:
//!
//! | symbol | C signature | |
//! |---|---|---|
//! | `fraglab_torch_version` | `const char *(void)` | version of fraglab; never released |
//! | `fraglab_torch_interface` | `int (void)` | 1: the version of this interface |
//! | `fraglab_torch_configure` | `char *(const char *settings)` | before the first allocation, after it an error; null, or what is wrong |
//! | `fraglab_torch_stats` | `char *(int device)` | JSON, below; device −1: an array of all that are in use |
//! | `fraglab_torch_reset_peaks` | `void (int device)` | peaks begin anew at the current levels; −1: all |
//! | `fraglab_torch_mark` | `void (const char *phase)` | a phase begins: `step3.backward` |
//! | `fraglab_torch_module_enter` | `void (const char *module)` | the program enters a module |
//! | `fraglab_torch_module_leave` | `void (const char *module)` | it leaves it |
//! | `fraglab_torch_finish` | `char *(void)` | writes the traces and the log now, as at the end of the process; null, or what is wrong |
//! | `fraglab_torch_release_text` | `void (char *)` | null is allowed |
//!
//! `alloc` with size 0 gives null. When memory is out it throws `c10::OutOfMemoryError`, which Python
//! sees as `torch.OutOfMemoryError` (`std::runtime_error`, a `RuntimeError`, where libc10 is not
//! loaded); whatever else is wrong (a bad setting, no GPU) throws a `RuntimeError`. The process can
//! go on after either. `free` of a pointer that is not ours does nothing and warns once.
//!
//! # Settings
//!
//! From the environment when the first block is asked for. `fraglab_torch_configure` takes the same
//! by the names in the second column, as a JSON object of texts or as lines `key=value`, and wins.
//!
//! | variable | key | |
//! |---|---|---|
//! | `FRAGLAB_ALLOC` | `alloc` | the allocator, as on the command line: `stitch+policy=best`; default `caching` |
//! | `FRAGLAB_MODE` | `mode` | `alloc`, or `trace`: record what the program asks for too; default `trace` if a place for traces is given, else `alloc` |
//! | `FRAGLAB_TRACE` | `trace` | where traces go: `.json`, `.json.gz`, `.json.zst`; `%p` is the process, `%d` the device (without it the devices after the first have `-N` before the ending); default `fraglab-%p-%d.json.zst` |
//! | `FRAGLAB_PROFILE` | `profile` | a trace that is the profile of `planned`, as in `planned+trace=FILE` |
//! | `FRAGLAB_LIMIT` | `limit` | most that an allocator may hold a device: `60GiB` |
//! | `FRAGLAB_LOG` | `log` | where statistics go at the end, a line of JSON a device: `stderr` or a file (`%p` is the process); default: nowhere |
//! | `PYTORCH_ALLOC_CONF`, `PYTORCH_CUDA_ALLOC_CONF` | `conf` | settings of `caching` |
//! | `FRAGLAB_DEVICE` | `device` | `cuda` (default), or `sim:8GiB`: simulated memory, whose pointers point to nothing; for trials and tests |
//!
//! # Statistics
//!
//! An object a device. Names and meanings are those of the results of `fraglab run` (DESIGN 7):
//!
//! ```text
//!   schema_version, fraglab_version, mode: "alloc" | "trace"
//!   device:     {index, kind: "cuda" | "sim", name, driver, total_bytes, free_bytes}
//!               (name, driver: null on sim; free_bytes: null in the log at the end)
//!   allocator:  {name, params, limit_bytes, ceiling_bytes}
//!               (ceiling: of set_per_process_memory_fraction after the first allocation)
//!   current:    {requested_bytes, allocated_bytes, active_bytes, reserved_bytes}
//!   peaks:      {requested_bytes_peak, allocated_bytes_peak, active_bytes_peak, reserved_bytes_peak}
//!   efficiency, fragmentation, utilization, active_utilization     of these peaks
//!   requests:   {allocs, frees, deferred, refused, streams, marks}
//!   waiting:    blocks that were freed and are still in use by another stream
//!   calls:      {malloc, free, address_reserve, address_free, create, release, map, unmap, set_access}
//!   device_ns:  measured time in device calls, by call; null on sim
//!   counters:   {segment_allocs, segment_frees, alloc_retries, ooms, ...}
//!   torch_stats: {...}                  PyTorch's own names, caching only, else null
//!   failure:    null, or what PyTorch's own allocator would not have survived
//!   trace:      null, or {events, bytes_in_memory, is_full, path}
//! ```
//!
//! Warnings go to standard error at once; nothing else is printed.
//!
//! # What to know
//!
//! - A request costs a lock, a look-up and what the allocator does: some 80 to 300 ns an alloc and its
//!   free (`reports/performance.md`).
//! - Before memory is unmapped the GPU is waited for, once a call: a block may be freed while kernels
//!   that use it still run on its own stream. Only allocators that unmap pay it (`empty_cache`,
//!   a flush, ranges that `stitch` gives up); `cudaFree` waits by itself. During a capture, when to
//!   wait is forbidden, and where the wait fails, mapped memory stays with the allocator instead.
//! - CUDA graphs need the three hooks for pools. Without them what a captured graph uses may be given
//!   to somebody else between its replays, as with any `CUDAPluggableAllocator`. With them its
//!   memory is kept, at its full size, until the graph is gone; inside a capture freed blocks serve
//!   requests of the same size. Nothing is recorded on streams or asked of them during a capture.
//! - Memory that an allocator maps (all but `native` and `caching` without expandable segments) is for
//!   its own GPU: direct copies between the GPUs of one process need one of those two. Memory cannot
//!   be shared with other processes.
//! - Traces: 64 bytes of memory a block and its free, until they are written. Those of `caching` and
//!   `expandable` hold what the allocator did, so that `fraglab verify` works on them.
//! - Streams are numbered as they come, the default stream first. A profile for `planned` is best
//!   recorded here (`FRAGLAB_MODE=trace`), or with `record` of `fraglab_torch.py`, from the same job.
//! - The traces and the log are written when the process ends in an orderly way; one that is killed
//!   leaves none. Forked children write nothing.
//! - CUDA does not work in a forked child, and neither does this library once its parent used it: a
//!   lock may have been held by a thread that the child does not have. Children that need the GPU
//!   are to be spawned (`multiprocessing` with `spawn`); those of a `DataLoader`, which need none,
//!   may be forked.

#![allow(unsafe_code)]

mod devices;
pub mod entry;
mod gpu;
mod graphs;
mod message;
mod record;
mod served;
mod settings;
mod stats;
mod stream_events;
mod waiting;
mod world;
