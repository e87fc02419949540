//! The shipped class, slow and literal.
//!
//! The one design decision: nothing is stored that can be looked up. There are no pools, no
//! counters and no lists of who maps what; only flags of chunks, and searches through everything:
//!
//! ```text
//!   physical    chunk 0    chunk 1    chunk 2    chunk 3      each 2 MiB, free or busy
//!                  │          │          │          │
//!   primitive   [── a: 0 1 ──────────][── b: 2 3 ─────────]   every chunk in exactly one
//!   stitched                  [── s: 3 0 ─────────────────]   any chunk in any number
//!   tensor                    [ first k chunks of s       ]   every busy chunk in exactly one
//!
//!   pooled primitive    all its chunks are free
//!   reusable stitched   no tensor has it, all its chunks are free
//!   fragmented          no tensor has it, some chunk is busy
//! ```
//!
//! Numbers in comments are sections of the notes on GMLake; defects are fixed as they say (4.3).
//!
//! # Readings
//!
//! Where the notes are silent or can be read in two ways, this model
//!
//! 1. maps a segment in up to 8 rounds (2.1, with B2 fixed: what failed once may succeed in the next
//!    round), each with a reservation of its own, for stitched blocks and new segments alike; a
//!    refused reservation is a failed round;
//! 2. makes up to 3 attempts at a stitch or a new segment and collects after *each* failed one, also
//!    after the last, at levels 0, 1, 2 (2.6, 2.7);
//! 3. compares, before it collects for a new segment, free device memory (more than) and idle
//!    stitched bytes of the stream (at least) with the size of the *segment*, which is the wanted
//!    size too;
//! 4. goes through phase A of all streams and then through phase B of all (3.3), streams by ascending
//!    handle; one sum over the streams is looked at after each victim of phase A, and reaching it ends
//!    that stream only;
//! 5. subtracts whatever is destroyed from the sum of stitched addresses that `autoGC` watches; what
//!    the shipped sum would keep of it (B8) is a figure beside, and stitches count as segments (B9),
//!    with `quirks` only;
//! 6. checks the limit with the size of the whole segment, also where `reAlloc` would allocate less
//!    (2.7: it comes first), and again with the shortfall's, which may be larger; neither tries the
//!    device;
//! 7. lets `reAlloc` apply if the pool is the large one, the feature is on and the request is at
//!    least `fragLimit`, whatever `defragLevel` says (its stitch is attempt 4);
//! 8. obtains for the shortfall what 2.3 says for so many bytes (20 MiB below 10), hands that segment
//!    out alone if it is large enough, and leaves it pooled if the stitch fails;
//! 9. stitches the largest primitive alone where it is enough (the oversize rule alone may have
//!    refused it before), as long as the stream has two;
//! 10. gives a new stitched block the newest event of the primitives that went into it (2.6); parts of
//!     a cut inherit the event, a merged primitive has the newer one;
//! 11. counts the age of a cached block for `garbage_collection_threshold` as searches of its pool
//!     since it entered the pool, whatever way it came in; a merge and a cut enter anew, and only the
//!     search for a primitive counts, once a request;
//! 12. counts `allocated` by the rounded request, also where a primitive is larger (oversize blocks
//!     are not split); `active` by the whole primitives that are busy;
//! 13. passes over primitives that it must not release (cut ones, and those an active stitched block
//!     maps) as if they were not there: in the age-based release, the oversize release and the flush.
//!     Stock PyTorch relies on oversize blocks never being cut, which stitching breaks;
//! 14. releases pooled primitives by ascending (stream, size, address), the large pool first, and
//!     destroys the idle stitched blocks of each before it, chunk by chunk, oldest first;
//! 15. collects stitched blocks at the program's `empty_cache`, not in the flush before the last
//!     attempt, which 3.3 does not name among the callers;
//! 16. restores everything when a stitch fails, also the primitive that was to be cut (B1), and keeps
//!     what the collections between the attempts destroyed;
//! 17. tests `autoGC` after the new block counts as active, so that it is never its victim;
//! 18. keeps what the device does not take back: a segment or an idle stitched block that it does not
//!     unmap or free stays in use as if nothing had happened (and so does the segment below such a
//!     stitched block); what it kept of one that is unmapped, or of a failed mapping, is a
//!     [`Leftover`], which each flush tries first;
//! 19. looks for a stitched block only with the smallest that is large enough: if `reuseLimit`
//!     refuses that one, no larger one is tried.

use std::collections::{BTreeMap, BTreeSet};

use fraglab::alloc::Levels;
use fraglab::units::MIB;

use super::device::{SlowDevice, UNIT};
use super::settings::Settings;
use crate::model::settings::rounded as rounded_by_divisions;

/// Requests up to this belong to the small pool (2.1).
const SMALL_MAX: u64 = MIB;
/// Segments of the small pool, and the unit of large ones.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Requests from here on get segments of their own size.
const LARGE_MIN: u64 = 10 * MIB;
/// Segments of smaller large requests, and the slack of the oversize rule.
const LARGE_SEGMENT: u64 = 20 * MIB;
/// Rounds to map one segment (2.1).
const MAPPING_ROUNDS: u64 = 8;
/// Attempts at a stitch or a new segment (2.1).
const ATTEMPTS: u32 = 3;
/// The attempt number under which `reAlloc` stitches (2.7).
const RE_ALLOC_ATTEMPT: u32 = 4;

/// Something that the decision log shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    Alloc,
    SegmentAlloc,
    SegmentFree,
    Stitch,
    Unstitch,
}

/// One thing done: a range of addresses, for `Alloc` with the bytes that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) deed: Deed,
    pub(super) address: u64,
    pub(super) size: u64,
}

/// What is counted on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) stitches: u64,
    pub(super) stitched_bytes_peak: u64,
    pub(super) stitch_reuses: u64,
    pub(super) stitch_evictions: u64,
    /// Bytes of stitched blocks that the release of a segment destroyed (B8).
    pub(super) forgotten_bytes: u64,
    pub(super) segment_allocs: u64,
    pub(super) segment_frees: u64,
    pub(super) alloc_retries: u64,
    pub(super) ooms: u64,
}

/// One 2 MiB piece of physical memory.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    piece: usize,
    free: bool,
}

/// What was obtained from the device at once.
#[derive(Clone, Copy, Debug)]
struct Segment {
    stream: u64,
    large: bool,
    address: u64,
    size: u64,
}

/// A primitive block: part of a segment.
#[derive(Clone, Debug)]
struct Primitive {
    id: u64,
    segment: u64,
    address: u64,
    size: u64,
    /// Its chunks in address order; none in a device malloc.
    chunks: Vec<usize>,
    /// Of a device malloc: a tensor has it.
    taken: bool,
    event: u64,
    /// Searches of its pool since it entered it.
    age: u64,
}

/// A stitched block.
#[derive(Clone, Debug)]
struct Stitched {
    id: u64,
    stream: u64,
    address: u64,
    size: u64,
    chunks: Vec<usize>,
    /// A tensor has it, or it waits for another stream.
    active: bool,
    event: u64,
}

/// What the device did not take back.
#[derive(Clone, Debug)]
struct Leftover {
    /// Base of a range of addresses.
    range: Option<u64>,
    /// Bytes of the range that are mapped.
    mapped: u64,
    pieces: Vec<usize>,
    /// Address and size of the segment that its pieces were; it is reserved until they are gone.
    segment: Option<(u64, u64)>,
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Primitive(u64),
    Stitched(u64),
}

/// A block in the hands of the program, or deferred.
#[derive(Clone, Debug)]
struct Tensor {
    place: Place,
    stream: u64,
    /// The rounded request (`actual_size`).
    rounded: u64,
    /// Chunks it keeps busy: all of a primitive, the first ones of a stitched block.
    chunks: Vec<usize>,
    deferred: bool,
}

/// A request, prepared (2.3).
#[derive(Clone, Copy, Debug)]
struct Ask {
    stream: u64,
    size: u64,
    large: bool,
    segment: u64,
}

/// The allocator.
#[derive(Clone, Debug)]
pub(super) struct Model {
    settings: Settings,
    pub(super) device: SlowDevice,
    chunks: Vec<Chunk>,
    segments: BTreeMap<u64, Segment>,
    primitives: Vec<Primitive>,
    stitched: Vec<Stitched>,
    tensors: BTreeMap<u64, Tensor>,
    /// Deferred tensors whose use has ended, oldest first.
    ended: Vec<u64>,
    /// Deferred tensors whose use has not ended, in the order of their frees.
    waiting: Vec<u64>,
    /// The last event of each stream.
    events: BTreeMap<u64, u64>,
    leftovers: Vec<Leftover>,
    next_id: u64,
    pub(super) counters: Counters,
    /// What was done and not fetched yet.
    log: Vec<Done>,
}

impl Model {
    /// Nothing allocated, on this device.
    pub(super) fn new(settings: Settings, device: SlowDevice) -> Model {
        Model {
            settings,
            device,
            chunks: Vec::new(),
            segments: BTreeMap::new(),
            primitives: Vec::new(),
            stitched: Vec::new(),
            tensors: BTreeMap::new(),
            ended: Vec::new(),
            waiting: Vec::new(),
            events: BTreeMap::new(),
            leftovers: Vec::new(),
            next_id: 0,
            counters: Counters::default(),
            log: Vec::new(),
        }
    }

    // What a program can do.

    /// Asks for memory; gives a handle unless it is refused.
    pub(super) fn malloc(&mut self, bytes: u64, stream: u64) -> Option<u64> {
        self.drain();
        let ask = self.prepare(bytes, stream);
        let Some(place) = self.find(ask) else {
            self.counters.ooms += 1;
            return None;
        };
        Some(self.hand_out(ask, place, bytes))
    }

    /// Takes memory back (3.1).
    pub(super) fn free(&mut self, handle: u64) {
        let (place, stream) = (self.tensors[&handle].place, self.tensors[&handle].stream);
        let event = self.events.entry(stream).or_insert(0);
        *event += 1;
        let event = *event;
        match place {
            Place::Primitive(id) => self.primitive_mut(id).event = event,
            Place::Stitched(id) => self.stitched_mut(id).event = event,
        }
        self.finish(handle);
    }

    /// The program freed it, but another stream still uses it.
    pub(super) fn defer(&mut self, handle: u64) {
        self.tensors.get_mut(&handle).expect("live").deferred = true;
        self.waiting.push(handle);
    }

    /// That use has ended. Does nothing if a wait completed it before.
    pub(super) fn complete(&mut self, handle: u64) {
        if let Some(at) = self.waiting.iter().position(|&other| other == handle) {
            self.waiting.remove(at);
            self.ended.push(handle);
        }
    }

    /// Gives back what can be given back (3.4).
    pub(super) fn empty_cache(&mut self) {
        self.flush();
        self.collect(2, 0);
    }

    /// Waits for every deferred tensor and releases what is cached (3.4).
    fn flush(&mut self) {
        self.drain();
        for handle in std::mem::take(&mut self.waiting) {
            self.finish(handle);
        }
        for leftover in std::mem::take(&mut self.leftovers) {
            self.give_back(leftover);
        }
        for large in [true, false] {
            for id in self.pool(large, None) {
                if self.may_release(id) {
                    self.release(id);
                }
            }
        }
    }

    // What can be seen.

    /// Levels by definition (1.4, 5).
    pub(super) fn levels(&self) -> Levels {
        let live = self.tensors.values().filter(|tensor| !tensor.deferred);
        let busy = self.primitives.iter().filter(|primitive| !self.is_free(primitive));
        let left = self.leftovers.iter().filter_map(|leftover| leftover.segment);
        Levels {
            allocated_bytes: live.map(|tensor| tensor.rounded).sum(),
            active_bytes: busy.map(|primitive| primitive.size).sum(),
            reserved_bytes: self.segments.values().map(|segment| segment.size).sum::<u64>()
                + left.map(|(_, size)| size).sum::<u64>(),
        }
    }

    /// Whether statistics err as the shipped ones do.
    pub(super) fn quirks(&self) -> bool {
        self.settings.quirks
    }

    /// Bytes of all stitched address ranges.
    pub(super) fn stitched_bytes(&self) -> u64 {
        self.stitched.iter().map(|stitched| stitched.size).sum()
    }

    /// What was done since the last call.
    pub(super) fn take_log(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.log)
    }

    /// Used and free chunks of the stitched blocks, oldest block first (1.1).
    pub(super) fn stitched_counts(&self) -> Vec<(usize, usize)> {
        let counts = |stitched: &Stitched| {
            let tensors = self.tensors.values();
            let tensor = tensors.clone().find(|t| t.place == Place::Stitched(stitched.id));
            let used = tensor.map_or(0, |tensor| tensor.chunks.len());
            (used, stitched.chunks.iter().filter(|&&chunk| self.chunks[chunk].free).count())
        };
        self.stitched.iter().map(counts).collect()
    }

    /// Sizes of the pooled large primitives of a stream, smallest first.
    pub(super) fn pooled_sizes(&self, stream: u64) -> Vec<u64> {
        let pool = self.pool(true, Some(stream));
        pool.into_iter().map(|id| self.primitive(id).size).collect()
    }

    /// Where the chunks of a tensor lie in the segments that own them, in the tensor's order.
    pub(super) fn physical(&self, handle: u64) -> Vec<u64> {
        let at = |&chunk: &usize| {
            let owner = self.primitives.iter().find(|p| p.chunks.contains(&chunk)).expect("owned");
            let index = owner.chunks.iter().position(|&other| other == chunk).expect("inside");
            owner.address + index as u64 * UNIT
        };
        self.tensors[&handle].chunks.iter().map(at).collect()
    }

    /// Panics where an invariant (1.4) or the driver's books do not hold.
    pub(super) fn check(&self) {
        let mut owned = BTreeSet::new();
        let mut previous: Option<&Primitive> = None;
        let mut by_place: Vec<&Primitive> = self.primitives.iter().collect();
        by_place.sort_by_key(|primitive| (primitive.segment, primitive.address));
        for primitive in by_place {
            let free = primitive.chunks.iter().filter(|&&chunk| self.chunks[chunk].free).count();
            assert!(free == 0 || free == primitive.chunks.len(), "a mixed primitive");
            for &chunk in &primitive.chunks {
                assert!(owned.insert(chunk), "a chunk of two primitives");
            }
            match previous.filter(|previous| previous.segment == primitive.segment) {
                Some(previous) => {
                    assert_eq!(previous.address + previous.size, primitive.address);
                    assert!(!self.is_free(previous) || !self.is_free(primitive), "not merged");
                }
                None => assert_eq!(primitive.address, self.segments[&primitive.segment].address),
            }
            previous = Some(primitive);
        }
        let mut busy = BTreeSet::new();
        for tensor in self.tensors.values() {
            for &chunk in &tensor.chunks {
                assert!(busy.insert(chunk), "a chunk of two tensors");
            }
        }
        for &chunk in &owned {
            assert_eq!(self.chunks[chunk].free, !busy.contains(&chunk), "chunk {chunk}");
        }
        for stitched in &self.stitched {
            assert!(stitched.chunks.iter().all(|chunk| owned.contains(chunk)), "a lost chunk");
        }
        let levels = self.levels();
        assert!(levels.allocated_bytes <= levels.active_bytes);
        assert!(levels.active_bytes <= levels.reserved_bytes);
        if !self.leftovers.is_empty() {
            // The device holds more than is accounted for.
            return;
        }
        assert_eq!(self.device.used_units() * UNIT, levels.reserved_bytes);
        let ranges = self.segments.values().filter(|segment| self.is_mapped(segment)).count();
        assert_eq!(self.device.reservations(), ranges + self.stitched.len());
    }

    // Sizes (2.3).

    fn rounded(&self, bytes: u64) -> u64 {
        let size = rounded_by_divisions(bytes, &[self.settings.roundup_divisions; 16]);
        // B6 fixed: chunks cannot be cut, however the size came about.
        if size > SMALL_MAX { size.next_multiple_of(UNIT) } else { size }
    }

    fn prepare(&self, bytes: u64, stream: u64) -> Ask {
        let size = self.rounded(bytes);
        let segment = segment_bytes(size);
        Ask { stream, size, large: size > SMALL_MAX, segment }
    }

    // The order of attempts (2.4).

    fn find(&mut self, ask: Ask) -> Option<Place> {
        if let Some(place) = self.reuse(ask) {
            return Some(place);
        }
        if let Some(place) = self.stitch(ask, 0) {
            return Some(place);
        }
        self.release_by_age();
        if let Some(place) = self.new_memory(ask) {
            return Some(place);
        }
        if self.release_oversize(ask)
            && let Some(place) = self.new_memory(ask)
        {
            return Some(place);
        }
        if let Some(place) = self.stitch(ask, 1) {
            return Some(place);
        }
        self.flush();
        self.counters.alloc_retries += 1;
        if let Some(place) = self.new_memory(ask) {
            return Some(place);
        }
        self.stitch(ask, 2)
    }

    /// Best fit among primitives, then among stitched blocks (2.5).
    fn reuse(&mut self, ask: Ask) -> Option<Place> {
        self.grow_older(ask.large);
        let pool = self.pool(ask.large, Some(ask.stream));
        let max_split = self.settings.max_split_size;
        if let Some(id) = pool.into_iter().find(|&id| self.primitive(id).size >= ask.size) {
            let size = self.primitive(id).size;
            let too_large = if ask.size < max_split {
                size >= max_split
            } else {
                size >= ask.size + LARGE_SEGMENT
            };
            return (!too_large).then_some(Place::Primitive(id));
        }
        if !ask.large {
            return None;
        }
        let mut fitting: Vec<&Stitched> = self.stitched.iter().collect();
        fitting.retain(|s| s.stream == ask.stream && s.size >= ask.size && self.is_reusable(s));
        let best = fitting.into_iter().min_by_key(|s| (s.size, s.address))?;
        let close = best.size as f64 <= ask.size as f64 * self.settings.reuse_limit;
        let place = Place::Stitched(best.id);
        close.then(|| {
            self.counters.stitch_reuses += 1;
            place
        })
    }

    /// Stitches pooled primitives, largest first (2.6).
    fn stitch(&mut self, ask: Ask, attempt: u32) -> Option<Place> {
        if !self.may_stitch(ask) || attempt < self.settings.defrag_level {
            return None;
        }
        let pool = self.pool(true, Some(ask.stream));
        if pool.len() < 2 {
            return None;
        }
        let mut chunks = Vec::new();
        let mut event = 0;
        for &id in pool.iter().rev() {
            if chunks.len() as u64 * UNIT >= ask.size {
                break;
            }
            let primitive = self.primitive(id);
            chunks.extend_from_slice(&primitive.chunks);
            event = event.max(primitive.event);
        }
        if (chunks.len() as u64 * UNIT) < ask.size {
            return None;
        }
        chunks.truncate((ask.size / UNIT) as usize);
        for level in 0..ATTEMPTS {
            if let Some(address) = self.map_all(&chunks) {
                return Some(self.add_stitched(ask, address, chunks, event));
            }
            self.collect(level, ask.size);
        }
        None
    }

    fn may_stitch(&self, ask: Ask) -> bool {
        self.settings.vmm_defragment && ask.large && ask.size >= self.settings.frag_limit
    }

    fn add_stitched(&mut self, ask: Ask, address: u64, chunks: Vec<usize>, event: u64) -> Place {
        let id = self.fresh_id();
        let stitched = Stitched {
            id,
            stream: ask.stream,
            address,
            size: ask.size,
            chunks,
            active: true,
            event,
        };
        self.stitched.push(stitched);
        self.note(Deed::Stitch, address, ask.size);
        self.occupy(id, ask.size);
        self.counters.stitches += 1;
        self.counters.stitched_bytes_peak =
            self.counters.stitched_bytes_peak.max(self.stitched_bytes());
        if self.stitched_bytes() > self.settings.auto_gc {
            self.collect(2, 0);
        }
        Place::Stitched(id)
    }

    /// New physical memory (2.7): a whole segment, or with `reAlloc` what is missing.
    fn new_memory(&mut self, ask: Ask) -> Option<Place> {
        if self.over_limit(ask.segment) {
            return None;
        }
        if !ask.large || !self.settings.vmm_defragment {
            return self.malloc_segment(ask).map(Place::Primitive);
        }
        if self.settings.re_alloc && self.may_stitch(ask) {
            let pooled: u64 = self.pooled_sizes(ask.stream).iter().sum();
            if pooled >= ask.size {
                return None;
            }
            if pooled > 0 {
                let missing = segment_bytes(ask.size - pooled);
                if self.over_limit(missing) {
                    return None;
                }
                let new = self.create_segment(ask, missing)?;
                if missing >= ask.size {
                    return Some(Place::Primitive(new));
                }
                return self.stitch(ask, RE_ALLOC_ATTEMPT);
            }
        }
        self.create_segment(ask, ask.segment).map(Place::Primitive)
    }

    fn over_limit(&self, more: u64) -> bool {
        let reserved = self.levels().reserved_bytes;
        self.settings.limit.is_some_and(|limit| reserved + more > limit)
    }

    fn malloc_segment(&mut self, ask: Ask) -> Option<u64> {
        let address = self.device.malloc(ask.segment)?;
        Some(self.add_segment(ask, address, ask.segment, Vec::new()))
    }

    fn create_segment(&mut self, ask: Ask, size: u64) -> Option<u64> {
        for level in 0..ATTEMPTS {
            if let Some((address, chunks)) = self.create_and_map(size) {
                return Some(self.add_segment(ask, address, size, chunks));
            }
            let idle = self.stitched.iter().filter(|s| !s.active && s.stream == ask.stream);
            let idle: u64 = idle.map(|stitched| stitched.size).sum();
            if self.device.free_bytes() <= size || idle < size {
                return None;
            }
            self.collect(level, size);
        }
        None
    }

    /// Creates pieces one by one and maps them; whatever fails leaves nothing behind.
    fn create_and_map(&mut self, size: u64) -> Option<(u64, Vec<usize>)> {
        let mut pieces = Vec::new();
        for _ in 0..size / UNIT {
            match self.device.create() {
                Some(piece) => pieces.push(piece),
                None => break,
            }
        }
        if pieces.len() as u64 == size / UNIT {
            let first = self.chunks.len();
            self.chunks.extend(pieces.iter().map(|&piece| Chunk { piece, free: true }));
            let chunks: Vec<usize> = (first..self.chunks.len()).collect();
            if let Some(address) = self.map_all(&chunks) {
                return Some((address, chunks));
            }
            self.chunks.truncate(first);
        }
        self.give_back(Leftover { range: None, mapped: 0, pieces, segment: None });
        None
    }

    /// Maps chunks in this order at new addresses. A round that fails is undone: what was mapped of
    /// the range is unmapped in one call (B13), and the range is given back.
    fn map_all(&mut self, chunks: &[usize]) -> Option<u64> {
        for _ in 0..MAPPING_ROUNDS {
            let Some(base) = self.device.reserve(chunks.len() as u64 * UNIT) else { continue };
            let mut mapped = 0;
            let mut good = true;
            for &chunk in chunks {
                let address = base + mapped * UNIT;
                good = self.device.map(address, self.chunks[chunk].piece);
                mapped += u64::from(good);
                good = good && self.device.set_access(address);
                if !good {
                    break;
                }
            }
            if good {
                return Some(base);
            }
            let (range, mapped) = (Some(base), mapped * UNIT);
            self.give_back(Leftover { range, mapped, pieces: Vec::new(), segment: None });
        }
        None
    }

    fn add_segment(&mut self, ask: Ask, address: u64, size: u64, chunks: Vec<usize>) -> u64 {
        let segment = self.fresh_id();
        let id = self.fresh_id();
        let Ask { stream, large, .. } = ask;
        self.segments.insert(segment, Segment { stream, large, address, size });
        let (taken, event, age) = (false, 0, 0);
        self.primitives.push(Primitive { id, segment, address, size, chunks, taken, event, age });
        self.counters.segment_allocs += 1;
        self.note(Deed::SegmentAlloc, address, size);
        id
    }

    // Handing out and taking back.

    fn hand_out(&mut self, ask: Ask, place: Place, bytes: u64) -> u64 {
        let (place, address, chunks) = match place {
            Place::Primitive(id) => {
                let id = self.cut_for(ask, id);
                let primitive = self.primitive_mut(id);
                primitive.taken = true;
                let (address, chunks) = (primitive.address, primitive.chunks.clone());
                for &chunk in &chunks {
                    self.chunks[chunk].free = false;
                }
                (Place::Primitive(id), address, chunks)
            }
            Place::Stitched(id) => {
                let chunks = self.occupy(id, ask.size);
                (place, self.stitched_mut(id).address, chunks)
            }
        };
        let handle = self.fresh_id();
        let (stream, rounded) = (ask.stream, ask.size);
        let tensor = Tensor { place, stream, rounded, chunks, deferred: false };
        self.tensors.insert(handle, tensor);
        self.note(Deed::Alloc, address, bytes);
        handle
    }

    /// Splits a primitive for a request if what remains is worth it (2.1); gives the head.
    fn cut_for(&mut self, ask: Ask, id: u64) -> u64 {
        let rest = self.primitive(id).size - ask.size;
        let split = if ask.large {
            rest >= UNIT && ask.size < self.settings.max_split_size
        } else {
            rest >= 512
        };
        if split { self.cut(id, &[ask.size, rest])[0] } else { id }
    }

    /// Marks the first chunks of a stitched block used and cuts the primitives that are then partly
    /// used into runs (2.4). Gives these chunks.
    fn occupy(&mut self, id: u64, bytes: u64) -> Vec<usize> {
        let used = (bytes / UNIT) as usize;
        let stitched = self.stitched_mut(id);
        stitched.active = true;
        let chunks = stitched.chunks[..used].to_vec();
        for &chunk in &chunks {
            self.chunks[chunk].free = false;
        }
        let mixed: Vec<u64> =
            self.primitives.iter().filter(|p| self.is_mixed(p)).map(|p| p.id).collect();
        for id in mixed {
            let flags: Vec<bool> =
                self.primitive(id).chunks.iter().map(|&chunk| self.chunks[chunk].free).collect();
            let runs: Vec<u64> =
                flags.chunk_by(|a, b| a == b).map(|run| run.len() as u64 * UNIT).collect();
            self.cut(id, &runs);
        }
        chunks
    }

    /// Cuts a primitive into parts of these sizes; gives their ids.
    fn cut(&mut self, id: u64, sizes: &[u64]) -> Vec<u64> {
        let at = self.primitives.iter().position(|primitive| primitive.id == id).expect("known");
        let whole = self.primitives.remove(at);
        assert_eq!(sizes.iter().sum::<u64>(), whole.size);
        let mut offset = 0;
        let mut ids = Vec::new();
        for &size in sizes {
            let id = self.fresh_id();
            let (from, to) = ((offset / UNIT) as usize, ((offset + size) / UNIT) as usize);
            let chunks = whole.chunks.get(from..to).unwrap_or_default().to_vec();
            let address = whole.address + offset;
            self.primitives.push(Primitive { id, address, size, chunks, age: 0, ..whole.clone() });
            offset += size;
            ids.push(id);
        }
        ids
    }

    /// The memory of a tensor becomes free (3.1).
    fn finish(&mut self, handle: u64) {
        let tensor = self.tensors.remove(&handle).expect("live");
        for &chunk in &tensor.chunks {
            self.chunks[chunk].free = true;
        }
        match tensor.place {
            Place::Primitive(id) => {
                self.primitive_mut(id).taken = false;
                self.merge(id);
            }
            Place::Stitched(id) => {
                let stitched = self.stitched_mut(id);
                stitched.active = false;
                let event = stitched.event;
                let mut owners = self.primitives.clone();
                owners.retain(|p| p.chunks.iter().any(|chunk| tensor.chunks.contains(chunk)));
                for owner in owners {
                    // An earlier one may have taken it in.
                    if let Some(primitive) = self.primitives.iter_mut().find(|p| p.id == owner.id) {
                        primitive.event = primitive.event.max(event);
                        self.merge(owner.id);
                    }
                }
            }
        }
    }

    /// Joins a free primitive with its free neighbours.
    fn merge(&mut self, id: u64) {
        let segment = self.primitive(id).segment;
        let mut merged = self.primitive(id).clone();
        loop {
            let end = merged.address + merged.size;
            let beside = self.primitives.iter().position(|p| {
                let touches = p.address + p.size == merged.address || p.address == end;
                p.id != id && p.segment == segment && touches && self.is_free(p)
            });
            let Some(at) = beside else { break };
            let other = self.primitives.remove(at);
            if other.address < merged.address {
                merged.address = other.address;
                merged.chunks.splice(0..0, other.chunks);
            } else {
                merged.chunks.extend(other.chunks);
            }
            merged.size += other.size;
            merged.event = merged.event.max(other.event);
        }
        merged.age = 0;
        *self.primitive_mut(id) = merged;
    }

    fn drain(&mut self) {
        for handle in std::mem::take(&mut self.ended) {
            self.finish(handle);
        }
    }

    // Giving memory back.

    /// Destroys idle stitched blocks, longest idle first (3.3).
    fn collect(&mut self, level: u32, wanted: u64) {
        let streams: BTreeSet<u64> = self.stitched.iter().map(|stitched| stitched.stream).collect();
        let enough = wanted << (2 * (level + 1));
        let mut collected = 0;
        for &stream in &streams {
            for (id, size) in self.idle(stream, false) {
                collected += if self.destroy(id) { size } else { 0 };
                if wanted > 0 && level <= 1 && collected >= enough {
                    break;
                }
            }
        }
        for stream in streams {
            if level >= 1 {
                for (id, _) in self.idle(stream, true) {
                    self.destroy(id);
                }
            }
        }
    }

    /// Idle stitched blocks of a stream in release order: the reusable or the fragmented ones.
    fn idle(&self, stream: u64, reusable: bool) -> Vec<(u64, u64)> {
        let mut idle: Vec<&Stitched> = self.stitched.iter().filter(|s| !s.active).collect();
        idle.retain(|s| s.stream == stream && self.is_reusable(s) == reusable);
        idle.sort_by_key(|s| (s.event, s.size, s.address));
        idle.into_iter().map(|s| (s.id, s.size)).collect()
    }

    /// Destroys an idle stitched block, unless the device does not unmap it.
    fn destroy(&mut self, id: u64) -> bool {
        let at = self.stitched.iter().position(|stitched| stitched.id == id).expect("known");
        let stitched = self.stitched[at].clone();
        assert!(!stitched.active, "an active block is destroyed");
        if !self.device.unmap(stitched.address, stitched.size) {
            return false;
        }
        self.stitched.remove(at);
        let range = Some(stitched.address);
        self.give_back(Leftover { range, mapped: 0, pieces: Vec::new(), segment: None });
        self.counters.stitch_evictions += 1;
        self.note(Deed::Unstitch, stitched.address, stitched.size);
        true
    }

    /// Gives back what is left of something, as far as the device takes it.
    fn give_back(&mut self, mut leftover: Leftover) {
        if let Some(base) = leftover.range
            && leftover.mapped > 0
            && self.device.unmap(base, leftover.mapped)
        {
            leftover.mapped = 0;
        }
        if leftover.mapped == 0 {
            leftover.pieces.retain(|&piece| !self.device.release(piece));
        }
        let is_bare = leftover.mapped == 0 && leftover.pieces.is_empty();
        if is_bare && let Some((address, size)) = leftover.segment.take() {
            self.counters.segment_frees += 1;
            self.note(Deed::SegmentFree, address, size);
        }
        if !is_bare || leftover.range.is_some_and(|base| !self.device.free_addresses(base)) {
            self.leftovers.push(leftover);
        }
    }

    /// Whether a pooled primitive is a whole segment that no active stitched block maps (B4).
    fn may_release(&self, id: u64) -> bool {
        let primitive = self.primitive(id);
        let whole = primitive.size == self.segments[&primitive.segment].size;
        let mut active = self.stitched.iter().filter(|stitched| stitched.active);
        whole && !active.any(|s| s.chunks.iter().any(|chunk| primitive.chunks.contains(chunk)))
    }

    /// Returns a whole segment to the device (3.4). Says whether it is no longer in use.
    fn release(&mut self, id: u64) -> bool {
        let primitive = self.primitive(id).clone();
        for chunk in &primitive.chunks {
            let mappers = self.stitched.iter().filter(|s| s.chunks.contains(chunk));
            let mappers: Vec<(u64, u64)> = mappers.map(|s| (s.id, s.size)).collect();
            for (mapper, size) in mappers {
                if !self.destroy(mapper) {
                    return false;
                }
                self.counters.forgotten_bytes += size;
            }
        }
        let Primitive { address, size, .. } = primitive;
        let gone = match primitive.chunks.is_empty() {
            true => self.device.free(address),
            false => self.device.unmap(address, size),
        };
        if gone {
            self.primitives.retain(|other| other.id != id);
            self.segments.remove(&primitive.segment);
            let pieces = primitive.chunks.iter().map(|&chunk| self.chunks[chunk].piece).collect();
            let range = (!primitive.chunks.is_empty()).then_some(address);
            let segment = Some((address, size));
            self.give_back(Leftover { range, mapped: 0, pieces, segment });
        }
        gone
    }

    /// What may be reserved before old blocks are released; nothing if that is off.
    fn age_threshold(&self) -> Option<u64> {
        let limit = self.settings.limit?;
        let threshold = self.settings.gc_threshold;
        (threshold > 0.0).then_some((threshold * limit as f64) as u64)
    }

    fn grow_older(&mut self, large: bool) {
        if self.age_threshold().is_some() {
            for id in self.pool(large, None) {
                self.primitive_mut(id).age += 1;
            }
        }
    }

    /// PyTorch's release of old blocks (2.4, step 5): while too little came back, every block of
    /// the large pool that is at least of average age goes.
    fn release_by_age(&mut self) {
        let Some(threshold) = self.age_threshold() else { return };
        let reserved = self.levels().reserved_bytes;
        if reserved <= threshold {
            return;
        }
        let wanted = reserved - threshold;
        let mut released = 0;
        while released < wanted {
            let mut old = self.pool(true, None);
            old.retain(|&id| self.may_release(id));
            let ages: u64 = old.iter().map(|&id| self.primitive(id).age).sum();
            let average = ages as f64 / old.len() as f64;
            old.retain(|&id| self.primitive(id).age as f64 >= average);
            let before = released;
            for id in old {
                let size = self.primitive(id).size;
                released += if self.release(id) { size } else { 0 };
            }
            if released == before {
                return;
            }
        }
    }

    /// PyTorch's release of oversize blocks (2.4, step 7): one that is large enough, or the largest
    /// ones until they are enough together.
    fn release_oversize(&mut self, ask: Ask) -> bool {
        let max_split = self.settings.max_split_size;
        if max_split == u64::MAX {
            return false;
        }
        let wanted = ask.size.max(max_split);
        let mut pool = self.pool(ask.large, Some(ask.stream));
        pool.retain(|&id| self.may_release(id));
        if let Some(&id) = pool.iter().find(|&&id| self.primitive(id).size >= wanted) {
            return self.release(id);
        }
        let mut released = 0;
        for id in pool.into_iter().rev() {
            let size = self.primitive(id).size;
            if released >= wanted || size < max_split {
                break;
            }
            released += if self.release(id) { size } else { 0 };
        }
        released >= wanted
    }

    // Searches.

    /// Free primitives of a pool by (stream, size, address), of one stream or of all.
    fn pool(&self, large: bool, stream: Option<u64>) -> Vec<u64> {
        let mut pool: Vec<&Primitive> = self.primitives.iter().collect();
        pool.retain(|primitive| {
            let segment = &self.segments[&primitive.segment];
            let wanted = segment.large == large && stream.is_none_or(|s| s == segment.stream);
            wanted && self.is_free(primitive)
        });
        let stream = |primitive: &Primitive| self.segments[&primitive.segment].stream;
        pool.sort_by_key(|primitive| (stream(primitive), primitive.size, primitive.address));
        pool.into_iter().map(|primitive| primitive.id).collect()
    }

    fn is_free(&self, primitive: &Primitive) -> bool {
        if primitive.chunks.is_empty() {
            return !primitive.taken;
        }
        primitive.chunks.iter().all(|&chunk| self.chunks[chunk].free)
    }

    fn is_mixed(&self, primitive: &Primitive) -> bool {
        !self.is_free(primitive) && primitive.chunks.iter().any(|&chunk| self.chunks[chunk].free)
    }

    fn is_reusable(&self, stitched: &Stitched) -> bool {
        !stitched.active && stitched.chunks.iter().all(|&chunk| self.chunks[chunk].free)
    }

    fn is_mapped(&self, segment: &Segment) -> bool {
        segment.large && self.settings.vmm_defragment
    }

    fn primitive(&self, id: u64) -> &Primitive {
        self.primitives.iter().find(|primitive| primitive.id == id).expect("known")
    }

    fn primitive_mut(&mut self, id: u64) -> &mut Primitive {
        self.primitives.iter_mut().find(|primitive| primitive.id == id).expect("known")
    }

    fn stitched_mut(&mut self, id: u64) -> &mut Stitched {
        self.stitched.iter_mut().find(|stitched| stitched.id == id).expect("known")
    }

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn note(&mut self, deed: Deed, address: u64, size: u64) {
        self.log.push(Done { deed, address, size });
    }
}

/// What is obtained from the device for so many bytes (2.3).
fn segment_bytes(bytes: u64) -> u64 {
    match bytes {
        0..=SMALL_MAX => SMALL_SEGMENT,
        _ if bytes < LARGE_MIN => LARGE_SEGMENT,
        _ => bytes.next_multiple_of(UNIT),
    }
}
