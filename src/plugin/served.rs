//! One allocator that serves one device of a running program.
//!
//! ```text
//!   address ──blocks──> Live {handle, size, stream, pool}      PyTorch frees by address
//!   stream handle ──streams──> StreamId                        numbered as they come
//! ```
//!
//! The levels and peaks are those of a replay (DESIGN 2): requested falls when the program frees,
//! also where another stream still uses the memory.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::graphs::{Filter, Freed, Graphs, NO_POOL, PoolName};
use super::message;
use super::record::{Deeds, Recorder};
use super::stats::{Current, Requests, Snapshot};
use super::waiting::Waiting;
use super::world::World;
use crate::alloc::{Allocator, Handle, Request};
use crate::device::{Counting, Device};
use crate::metrics::PeakTracker;
use crate::trace::{Op, Trace};
use crate::units::{BlockId, StreamId};

type Map<K, V> = HashMap<K, V, FixedState>;

/// What a device's mutex guards.
pub(super) trait Server: Send {
    /// Hands out a block of `size_bytes`, which is not 0: its address.
    ///
    /// # Errors
    /// The message for the program if memory is out.
    fn alloc(&mut self, size_bytes: u64, stream: u64) -> Result<u64, String>;

    /// Takes a block back. Says no if there is none at this address.
    fn free(&mut self, address: u64) -> bool;

    /// The stream uses the block too. Says no if there is none at this address.
    fn record_stream(&mut self, address: u64, stream: u64) -> bool;

    /// First address and size in bytes of the block that holds this address.
    fn base(&self, address: u64) -> Option<(u64, u64)>;

    /// The program asks for the cache to be emptied.
    fn empty_cache(&mut self);

    /// A phase begins.
    fn mark(&mut self, phase: &str);

    /// The program enters a module, or leaves it.
    fn module(&mut self, module: &str, enters: bool);

    /// A graph is captured into a pool.
    fn pool_begin(&mut self, name: PoolName, filter: Box<dyn Filter + Send>);

    /// The capture ends.
    fn pool_end(&mut self, name: PoolName);

    /// The graph is gone.
    fn pool_release(&mut self, name: PoolName);

    /// No more than this share of the device may be held from here on.
    fn set_fraction(&mut self, fraction: f64);

    /// Peaks begin anew.
    fn reset_peaks(&mut self);

    /// The figures. `asks_device`: the driver may be asked, which it may not at the end of a process.
    fn snapshot(&self, asks_device: bool) -> Snapshot;

    /// The trace that was recorded, if one is.
    fn trace(&mut self) -> Option<&Trace>;
}

/// A block in the program's hands.
#[derive(Clone, Copy, Debug)]
struct Live {
    handle: Handle,
    block: BlockId,
    size_bytes: u64,
    stream: StreamId,
    /// The pool of a graph, or [`NO_POOL`].
    pool: u32,
    /// Other streams use it; which ones stands in `uses`.
    shared: bool,
}

/// An allocator and what goes on around it.
pub(super) struct Served<A> {
    allocator: A,
    world: World,
    ordinal: u32,
    /// The specification of the allocator.
    name: String,
    blocks: Map<u64, Live>,
    /// Other streams that use a block, by its address.
    uses: Map<u64, Vec<u64>>,
    streams: Map<u64, StreamId>,
    /// The stream of the last request, which is mostly that of the next.
    last_stream: (u64, StreamId),
    graphs: Graphs,
    recorder: Option<Recorder>,
    peaks: PeakTracker,
    requested_bytes: u64,
    requests: Requests,
    total_bytes: u64,
    device_name: Option<String>,
}

/// What a server is made of, beside its allocator.
pub(super) struct Equipment {
    /// The world.
    pub(super) world: World,
    /// Number of the device.
    pub(super) ordinal: u32,
    /// The specification of the allocator.
    pub(super) name: String,
    /// The recorder, if a trace is recorded.
    pub(super) recorder: Option<Recorder>,
    /// Name of the GPU.
    pub(super) device_name: Option<String>,
}

/// The stream that every device has from the beginning; allocators are built with it.
pub(super) const DEFAULT_STREAM: u64 = 0;

impl<A: Allocator> Served<A> {
    /// The allocator, which was built for [`DEFAULT_STREAM`] alone, goes to work.
    pub(super) fn new(allocator: A, equipment: Equipment) -> Served<A> {
        let Equipment { world, ordinal, name, mut recorder, device_name } = equipment;
        let first = StreamId(0);
        let mut streams = Map::default();
        streams.insert(DEFAULT_STREAM, first);
        if let Some(recorder) = &mut recorder {
            recorder.stream(DEFAULT_STREAM);
        }
        Served {
            allocator,
            total_bytes: world.device.memory_info().total_bytes,
            world,
            ordinal,
            name,
            blocks: Map::default(),
            uses: Map::default(),
            streams,
            last_stream: (DEFAULT_STREAM, first),
            graphs: Graphs::default(),
            recorder,
            peaks: PeakTracker::default(),
            requested_bytes: 0,
            requests: Requests { streams: 1, ..Requests::default() },
            device_name,
        }
    }

    #[inline]
    fn stream(&mut self, handle: u64) -> StreamId {
        if self.last_stream.0 != handle {
            self.last_stream = (handle, self.find_stream(handle));
        }
        self.last_stream.1
    }

    fn find_stream(&mut self, handle: u64) -> StreamId {
        if let Some(&stream) = self.streams.get(&handle) {
            return stream;
        }
        let stream = StreamId(self.streams.len() as u32);
        self.streams.insert(handle, stream);
        self.requests.streams += 1;
        self.allocator.stream_added(stream, handle);
        if let Some(recorder) = &mut self.recorder {
            recorder.stream(handle);
        }
        stream
    }

    /// The next block's number: that of the trace, else one that tells blocks apart for a while.
    #[inline]
    fn next_block(&self) -> BlockId {
        match &self.recorder {
            Some(recorder) => recorder.next_block(),
            None => BlockId((self.requests.allocs % u64::from(u32::MAX)) as u32),
        }
    }

    /// A block from a graph's own, else from the allocator: its handle and address.
    #[inline]
    fn obtain(&mut self, request: Request, pool: u32) -> Option<(Handle, u64)> {
        if pool != NO_POOL
            && let Some(kept) = self.graphs.take(pool, request.stream, request.size_bytes)
        {
            return Some(kept);
        }
        self.world.begin();
        let handle = self.allocator.malloc(&mut self.world, request).ok()?;
        Some((handle, self.world.address))
    }

    #[cold]
    fn refused(&mut self, request: Request) -> String {
        self.requests.refused += 1;
        let info = self.world.device.memory_info();
        let levels = self.allocator.levels();
        self.peaks.observe_reserved(self.requests.allocs, levels);
        let ceiling_bytes = self.world.device.inner().ceiling_bytes();
        let limits = self.allocator.limit_bytes().into_iter().chain(ceiling_bytes);
        message::out_of_memory(&message::Refusal {
            requested_bytes: request.size_bytes,
            largest_hole_bytes: self.allocator.largest_hole(request),
            ordinal: self.ordinal,
            info,
            levels,
            limit_bytes: limits.min(),
            allocator: &self.name,
            failure: self.allocator.failure(),
        })
    }

    /// Gives a block back to the allocator, or lets it wait for the streams that use it.
    fn give_back(&mut self, address: u64, live: Live) -> bool {
        let streams = if live.shared { self.uses.remove(&address) } else { None };
        match streams {
            None => {
                self.allocator.free(&mut self.world, live.handle);
                false
            }
            Some(streams) => {
                self.requests.deferred += 1;
                self.allocator.defer(&mut self.world, live.handle);
                self.world.waiting.add(live.handle, live.block, streams);
                true
            }
        }
    }
}

impl<A: Allocator + Send> Server for Served<A> {
    fn alloc(&mut self, size_bytes: u64, stream_handle: u64) -> Result<u64, String> {
        let stream = self.stream(stream_handle);
        let pool = self.graphs.pool_for(stream_handle);
        let request = Request { block: self.next_block(), size_bytes, stream };
        let obtained = self.obtain(request, pool);
        if let Some(recorder) = &mut self.recorder {
            let address = obtained.map(|(_, address)| address);
            recorder.request(size_bytes, stream, address, &mut self.world.deeds);
        }
        let Some((handle, address)) = obtained else { return Err(self.refused(request)) };
        let block = request.block;
        let live = Live { handle, block, size_bytes, stream, pool, shared: false };
        self.blocks.insert(address, live);
        self.requests.allocs += 1;
        self.requested_bytes += size_bytes;
        let levels = self.allocator.levels();
        self.peaks.observe(self.requests.allocs, self.requested_bytes, levels);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> bool {
        let Some(live) = self.blocks.remove(&address) else { return false };
        self.world.begin();
        self.requests.frees += 1;
        self.requested_bytes -= live.size_bytes;
        let Live { handle, stream, size_bytes, shared: is_shared, .. } = live;
        let freed = Freed { handle, address, stream, size_bytes, is_shared };
        let deferred = if live.pool != NO_POOL && self.graphs.keep(live.pool, freed) {
            self.uses.remove(&address);
            false
        } else {
            self.give_back(address, live)
        };
        if let Some(recorder) = &mut self.recorder {
            self.world.deeds.actions.clear();
            recorder.free(live.block, deferred);
        }
        true
    }

    fn record_stream(&mut self, address: u64, stream: u64) -> bool {
        let Some(live) = self.blocks.get_mut(&address) else { return false };
        let own = self.streams.get(&stream) == Some(&live.stream);
        if !own {
            live.shared = true;
            let streams = self.uses.entry(address).or_default();
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        true
    }

    fn base(&self, address: u64) -> Option<(u64, u64)> {
        // Asked for when memory is shared with another process, which is rare: no order is kept.
        if let Some(live) = self.blocks.get(&address) {
            return Some((address, live.size_bytes));
        }
        let holds = |&(&first, live): &(&u64, &Live)| {
            address.checked_sub(first).is_some_and(|offset| offset < live.size_bytes)
        };
        let found = self.blocks.iter().find(holds);
        found.map(|(&first, live)| (first, live.size_bytes))
    }

    fn empty_cache(&mut self) {
        self.world.begin();
        self.allocator.empty_cache(&mut self.world);
        if let Some(recorder) = &mut self.recorder {
            recorder.empty_cache(&mut self.world.deeds);
        }
    }

    fn mark(&mut self, phase: &str) {
        self.requests.marks += 1;
        self.world.begin();
        self.allocator.mark(&mut self.world, phase);
        if let Some(recorder) = &mut self.recorder {
            recorder.mark(phase);
        }
    }

    fn module(&mut self, module: &str, enters: bool) {
        self.world.begin();
        if enters {
            self.allocator.module_enter(&mut self.world, module);
        } else {
            self.allocator.module_leave(&mut self.world, module);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.module(module, enters);
        }
    }

    fn pool_begin(&mut self, name: PoolName, filter: Box<dyn Filter + Send>) {
        self.world.waiting.capture_begins();
        self.world.device.inner_mut().capture_begins();
        let (pool, is_new) = self.graphs.begin(name, filter);
        let Some(recorder) = &mut self.recorder else { return };
        let Some(recorded) = self.graphs.recorded(pool) else { return };
        if is_new {
            *recorded = recorder.new_pool();
        }
        recorder.pool(Op::PoolEnter(*recorded));
    }

    fn pool_end(&mut self, name: PoolName) {
        let Some(pool) = self.graphs.end(name) else { return };
        self.world.waiting.capture_ends();
        self.world.device.inner_mut().capture_ends();
        if let (Some(recorder), Some(recorded)) = (&mut self.recorder, self.graphs.recorded(pool)) {
            recorder.pool(Op::PoolLeave(*recorded));
        }
    }

    fn pool_release(&mut self, name: PoolName) {
        let Some((pool, kept)) = self.graphs.release(name) else { return };
        self.world.begin();
        for handle in kept {
            self.allocator.free(&mut self.world, handle);
        }
        self.world.deeds = Deeds::default();
        if let (Some(recorder), Some(recorded)) = (&mut self.recorder, self.graphs.recorded(pool)) {
            recorder.pool(Op::PoolDelete(*recorded));
        }
    }

    fn set_fraction(&mut self, fraction: f64) {
        let ceiling_bytes = (fraction * self.total_bytes as f64) as u64;
        self.world.device.inner_mut().set_ceiling(ceiling_bytes);
    }

    fn reset_peaks(&mut self) {
        self.peaks = PeakTracker::default();
        let levels = self.allocator.levels();
        self.peaks.observe(self.requests.allocs, self.requested_bytes, levels);
    }

    fn snapshot(&self, asks_device: bool) -> Snapshot {
        let device = &self.world.device;
        Snapshot {
            ordinal: self.ordinal,
            device_kind: device.inner().kind_name(),
            device_name: self.device_name.clone(),
            driver: device.inner().driver(),
            total_bytes: self.total_bytes,
            free_bytes: asks_device.then(|| device.memory_info().free_bytes),
            allocator: self.name.clone(),
            params: self.allocator.params(),
            limit_bytes: self.allocator.limit_bytes(),
            ceiling_bytes: device.inner().ceiling_bytes(),
            current: Current {
                requested_bytes: self.requested_bytes,
                levels: self.allocator.levels(),
            },
            peaks: self.peaks.peaks(),
            requests: self.requests,
            waiting: self.world.waiting.len() as u64,
            calls: device.calls(),
            device_ns: device.inner().measured_ns(),
            counters: self.allocator.counters(),
            torch_stats: self.allocator.torch_stats(),
            failure: self.allocator.failure(),
            recorded: self.recorder.as_ref().map(|recorder| {
                (recorder.events() as u64, recorder.bytes_in_memory() as u64, recorder.is_full())
            }),
        }
    }

    fn trace(&mut self) -> Option<&Trace> {
        self.recorder.as_mut().map(Recorder::trace)
    }
}

/// The world of a device at the beginning.
pub(super) fn new_world(
    device: Counting<super::gpu::Gpu>,
    events: super::stream_events::StreamEvents,
    records: bool,
) -> World {
    World { device, waiting: Waiting::new(events), address: 0, deeds: Deeds::default(), records }
}
