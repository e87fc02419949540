//! best-fit, first-fit and bfc: layouts worked out by hand, and random programs against a model
//! that keeps a plain list of ranges and looks at all of them each time.

use fraglab::alloc::best_fit::{BestFit, FirstFit};
use fraglab::alloc::bfc::Bfc;
use fraglab::alloc::spec::{AllocSpec, Params};
use fraglab::alloc::{Allocator, BlockState, BuildInputs, Levels, Request};
use fraglab::device::{Device, DeviceCall};
use fraglab::units::{BlockId, MIB, StreamId};

use crate::model::device::{Bases, TestDevice};
use crate::model::driver::Driver;
use crate::model::random::Random;

/// Operations of all programs of an allocator together. Unoptimized builds do fewer.
const OPERATIONS: u64 = if cfg!(debug_assertions) { 10_000 } else { 150_000 };

fn params(text: &str) -> Params {
    Params::new(&text.parse::<AllocSpec>().expect("a specification"))
}

fn inputs(total_bytes: u64, limit_bytes: Option<u64>) -> BuildInputs {
    BuildInputs {
        limit_bytes,
        device_total_bytes: Some(total_bytes),
        stream_handles: vec![0, 7, 9],
        ..BuildInputs::default()
    }
}

fn best_fit(capacity_mib: u64) -> Driver<BestFit> {
    let inputs = inputs(capacity_mib * MIB, None);
    let allocator = BestFit::build(params("best-fit"), &inputs).expect("builds");
    Driver::new(allocator, TestDevice::new(capacity_mib * MIB, Bases::Ascending))
}

fn bfc(text: &str, capacity_mib: u64, limit_mib: u64) -> Driver<Bfc> {
    let inputs = inputs(1000 * MIB, Some(limit_mib * MIB));
    let allocator = Bfc::build(params(text), &inputs).expect("builds");
    Driver::new(allocator, TestDevice::new(capacity_mib * MIB, Bases::Ascending))
}

/// Asks for a block and says whether it was granted.
fn ask<A: Allocator>(driver: &mut Driver<A>, block: u32, size_bytes: u64, stream: u32) -> bool {
    let (block, stream) = (BlockId(block), StreamId(stream));
    driver.malloc(Request { block, size_bytes, stream }).is_ok()
}

/// The layout as (offset from the first block, size, block or stream) in MiB.
fn shown<A: Allocator>(driver: &Driver<A>) -> Vec<String> {
    let layout = driver.layout();
    let base = layout.first().map_or(0, |block| block.address);
    let show = |block: &fraglab::alloc::LayoutBlock| {
        let start = (block.address - base) as f64 / MIB as f64;
        let end = start + block.size_bytes as f64 / MIB as f64;
        let what = match (block.state, block.stream) {
            (BlockState::Free, StreamId::NONE) => "free".to_owned(),
            (BlockState::Free, StreamId(stream)) => format!("free s{stream}"),
            (BlockState::Allocated, _) => format!("b{}", block.block.0),
            (BlockState::Deferred, _) => format!("waits b{}", block.block.0),
        };
        format!("{start}..{end} {what}")
    };
    layout.iter().map(show).collect()
}

#[test]
fn the_range_grows_by_what_is_short() {
    let mut driver = best_fit(100);
    // 3 MiB take two units, 1 MiB is left.
    assert!(ask(&mut driver, 0, 3 * MIB, 0));
    assert_eq!(shown(&driver), ["0..3 b0", "3..4 free"]);
    // Half a MiB more than is left: one unit, not two.
    assert!(ask(&mut driver, 1, 3 * MIB / 2, 0));
    assert_eq!(shown(&driver), ["0..3 b0", "3..4.5 b1", "4.5..6 free"]);
    // Nothing at the end that stream 0 may use: b1's memory joins the rest as stream 0's.
    driver.free(BlockId(1));
    assert_eq!(shown(&driver), ["0..3 b0", "3..6 free s0"]);
    assert!(ask(&mut driver, 2, 3 * MIB + 1, 1));
    assert_eq!(shown(&driver)[2], "6..9.00048828125 b2");
    let device = driver.device();
    let calls = [DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess];
    assert_eq!(calls.map(|call| device.calls(call)), [3; 3], "one call of each a growth");
    assert_eq!(device.calls(DeviceCall::AddressReserve), 1);
    assert_eq!(device.used_bytes(), 10 * MIB);
}

/// Holes of 6 and 4 MiB: 4 go into the 4 by best fit, into the 6 by first fit.
#[test]
fn best_fit_and_first_fit_differ_in_the_hole_they_take() {
    fn run<A: Allocator>(allocator: A) -> Vec<String> {
        let mut driver = Driver::new(allocator, TestDevice::new(100 * MIB, Bases::Ascending));
        for (block, mib) in [(0, 6), (1, 2), (2, 4), (3, 2)] {
            assert!(ask(&mut driver, block, mib * MIB, 0));
        }
        driver.free(BlockId(0));
        driver.free(BlockId(2));
        assert!(ask(&mut driver, 4, 4 * MIB, 0));
        shown(&driver)
    }
    let inputs = inputs(100 * MIB, None);
    let best = run(BestFit::build(params("best-fit"), &inputs).expect("builds"));
    assert_eq!(best, ["0..6 free s0", "6..8 b1", "8..12 b4", "12..14 b3"]);
    let first = run(FirstFit::build(params("first-fit"), &inputs).expect("builds"));
    assert_eq!(first, ["0..4 b4", "4..6 free s0", "6..8 b1", "8..12 free s0", "12..14 b3"]);
}

/// 20 MiB in all. What stream 0 left serves stream 1 only after a wait, which the refusal of more
/// memory brings about; the wait completes the deferred block too, and everything joins.
#[test]
fn memory_stays_on_its_stream_until_a_wait() {
    let mut driver = best_fit(20);
    assert!(ask(&mut driver, 0, 8 * MIB, 0));
    assert!(ask(&mut driver, 1, 4 * MIB, 0));
    driver.free(BlockId(0));
    driver.defer(BlockId(1));
    assert!(ask(&mut driver, 2, 8 * MIB, 1), "8 of 20 MiB are left to grow by");
    assert_eq!(shown(&driver), ["0..8 free s0", "8..12 waits b1", "12..20 b2"]);
    assert!(ask(&mut driver, 3, 10 * MIB, 1));
    assert_eq!(shown(&driver), ["0..10 b3", "10..12 free", "12..20 b2"]);
    let counter = |driver: &Driver<BestFit>, name| {
        let counters = driver.allocator.counters();
        counters.iter().find(|(known, _)| *known == name).map(|&(_, count)| count)
    };
    assert_eq!(counter(&driver, "device_syncs"), Some(1));
    assert_eq!(counter(&driver, "alloc_retries"), Some(1));
    assert_eq!(counter(&driver, "ooms"), Some(0));
    assert!(!ask(&mut driver, 4, 3 * MIB, 2));
    assert_eq!(counter(&driver, "ooms"), Some(1));
    assert!(ask(&mut driver, 5, 2 * MIB, 2), "usable after a refusal");
}

/// Only pieces at the end go back, and only whole ones.
#[test]
fn emptying_gives_back_free_pieces_at_the_end() {
    let mut driver = best_fit(100);
    for block in 0..5 {
        assert!(ask(&mut driver, block, 4 * MIB, 0));
    }
    for block in [1, 3, 4] {
        driver.free(BlockId(block));
    }
    driver.empty_cache();
    assert_eq!(shown(&driver), ["0..4 b0", "4..8 free", "8..12 b2"]);
    assert_eq!(driver.device().used_bytes(), 12 * MIB);
    assert_eq!(driver.device().calls(DeviceCall::Unmap), 1, "one call for two pieces");
    assert!(ask(&mut driver, 5, 6 * MIB, 0));
    assert!(ask(&mut driver, 6, 3 * MIB, 0));
    driver.free(BlockId(5));
    driver.free(BlockId(2));
    driver.empty_cache();
    // The free end begins inside of b6's piece, which stays; those of b2 and b5 go.
    assert_eq!(shown(&driver), ["0..4 b0", "4..7 b6", "7..8 free"]);
    driver.free(BlockId(0));
    driver.free(BlockId(6));
    driver.empty_cache();
    assert_eq!(driver.device().used_bytes(), 0);
    assert_eq!(driver.allocator.levels(), Levels::default());
    assert!(ask(&mut driver, 7, 1, 0), "the range is still there");
    assert_eq!(driver.device().calls(DeviceCall::AddressReserve), 1);
}

/// The first growth is refused half-way, the second one works.
#[test]
fn a_growth_that_fails_half_way_leaves_nothing_behind() {
    for call in [DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess] {
        let device = TestDevice::new(100 * MIB, Bases::Ascending).failing(call, 1);
        let allocator = BestFit::build(params("best-fit"), &inputs(100 * MIB, None));
        let mut driver = Driver::new(allocator.expect("builds"), device);
        assert!(ask(&mut driver, 0, 3 * MIB, 0), "{call:?}");
        assert_eq!(driver.device().used_bytes(), 4 * MIB, "{call:?}");
        assert_eq!(driver.device().memory().len(), 1, "{call:?}");
    }
}

/// A range that the device refuses is asked for again, twice a request.
#[test]
fn a_refused_reservation_is_asked_for_again() {
    let device = TestDevice::new(100 * MIB, Bases::Ascending).refusing(1);
    let allocator = BestFit::build(params("best-fit"), &inputs(100 * MIB, None));
    let mut driver = Driver::new(allocator.expect("builds"), device);
    for requests in 1..4 {
        assert!(!ask(&mut driver, 0, MIB, 0));
        assert_eq!(driver.device().calls(DeviceCall::AddressReserve), 2 * requests);
    }
    assert_eq!(driver.allocator.levels(), Levels::default());
}

/// Regions of 2 MiB, of 4 after that, and of 8 doubled until 50 MiB fit. 1.5 of 2 and 50 of 64 MiB
/// are not cut, since less than as much again would be left.
#[test]
fn bfc_regions_double() {
    let mut driver = bfc("bfc", 1000, 1000);
    assert!(ask(&mut driver, 0, 3 * MIB / 2, 0));
    assert!(ask(&mut driver, 1, MIB, 0));
    assert!(ask(&mut driver, 2, 50 * MIB, 0));
    let sizes: Vec<u64> = driver.device().memory().iter().map(|&(_, bytes)| bytes / MIB).collect();
    assert_eq!(sizes, [2, 4, 64]);
    assert_eq!(shown(&driver), ["0..2 b0", "2..3 b1", "3..6 free", "6..70 b2"]);
    // The request doubled the last region, so the next one is no larger. Of 192 MiB, 64 are in
    // use: 128 left would be split off from 63, and are from 64.
    assert!(ask(&mut driver, 3, 64 * MIB, 0));
    assert_eq!(shown(&driver)[4], "70..134 b3");
    assert_eq!(driver.allocator.levels().allocated_bytes, (2 + 1 + 64 + 64) * MIB);
}

/// A rest of 128 MiB is split off although it is smaller than the request; one unit less is not.
#[test]
fn bfc_splits_off_a_large_rest() {
    for (asked_bytes, handed_bytes) in
        [(384 * MIB, 384 * MIB), (384 * MIB + 512, 512 * MIB), (256 * MIB, 256 * MIB)]
    {
        let mut driver = bfc("bfc", 1000, 512);
        // Doubled to 512 MiB, which all are given.
        let first = 512 * MIB - 512;
        assert!(ask(&mut driver, 0, first, 0));
        driver.free(BlockId(0));
        assert!(ask(&mut driver, 1, asked_bytes, 0));
        assert_eq!(driver.allocator.levels().allocated_bytes, handed_bytes);
    }
}

/// 16 MiB are held of 76; 64 are refused. Nine tenths of 64 MiB, rounded up to 512 bytes, are
/// 60,398,080: enough for 50 MiB, not for 58.
#[test]
fn bfc_asks_for_nine_tenths() {
    let mut driver = bfc("bfc", 76, 1000);
    assert!(ask(&mut driver, 0, 10 * MIB, 0));
    assert!(!ask(&mut driver, 1, 58 * MIB, 0));
    assert!(ask(&mut driver, 2, 50 * MIB, 0));
    assert_eq!(driver.allocator.levels().reserved_bytes, 16 * MIB + 60_398_080);
}

/// Regions of 2 and 4 MiB, both free, and a limit of 10: 6 MiB fit only when they are gone.
#[test]
fn bfc_collects_garbage_before_it_gives_up() {
    for (text, granted) in [("bfc", true), ("bfc+garbage_collection=false", false)] {
        let mut driver = bfc(text, 1000, 10);
        assert!(ask(&mut driver, 0, 2 * MIB, 0));
        assert!(ask(&mut driver, 1, 4 * MIB, 0));
        driver.free(BlockId(0));
        driver.free(BlockId(1));
        assert_eq!(ask(&mut driver, 2, 6 * MIB, 0), granted, "{text}");
        let reserved_mib = if granted { 8 } else { 6 };
        assert_eq!(driver.allocator.levels().reserved_bytes, reserved_mib * MIB, "{text}");
        // 11 MiB are more than the limit: nothing goes.
        assert!(!ask(&mut driver, 3, 11 * MIB, 0));
        assert_eq!(driver.allocator.levels().reserved_bytes, reserved_mib * MIB, "{text}");
    }
}

#[test]
fn bfc_preallocates_a_share_and_no_more() {
    // Three quarters of 1,000 MiB.
    let mut driver = bfc("bfc+preallocate=0.75", 1000, 1000);
    assert!(ask(&mut driver, 0, 1, 0));
    assert_eq!(driver.allocator.levels().reserved_bytes, 750 * MIB);
    assert!(!ask(&mut driver, 1, 750 * MIB, 0), "512 bytes are taken");
    assert!(ask(&mut driver, 2, 750 * MIB - 512, 0));
    assert_eq!(driver.device().calls(DeviceCall::Malloc), 1);
    for text in ["bfc+preallocate=0", "bfc+preallocate=1.5", "bfc+garbage_collection=1"] {
        assert!(Bfc::build(params(text), &inputs(MIB, None)).is_err(), "{text}");
    }
    assert!(Bfc::build(params("bfc+preallocate=0.5"), &BuildInputs::default()).is_err());
}

/// Which rules a model follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Best,
    First,
    Bfc { collects: bool },
}

/// What a range of the model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Free for the stream, or for any.
    Free(Option<u32>),
    Live,
    Waits,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    bytes: u64,
    of: Use,
    /// Of a block: its id, stream and requested bytes.
    block: (u32, u32, u64),
}

/// Memory that ranges cover from end to end.
#[derive(Clone, Debug, Default)]
struct Region {
    start: u64,
    ranges: Vec<Range>,
    /// Bytes and handles of the physical pieces behind it; none for a malloc.
    pieces: Vec<(u64, fraglab::device::PhysicalHandle)>,
}

impl Region {
    fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.bytes).sum()
    }
}

struct Model {
    policy: Policy,
    device: TestDevice,
    regions: Vec<Region>,
    /// Blocks whose use goes on, and those whose use has ended, in that order.
    pending: Vec<u32>,
    ended: Vec<u32>,
    /// Most bytes to hold: the limit, and for a range its span.
    most_bytes: u64,
    /// Addresses to reserve; bytes of the next region.
    next_bytes: u64,
}

fn usable(of: Use, stream: u32) -> bool {
    of == Use::Free(None) || of == Use::Free(Some(stream))
}

impl Model {
    fn find(&self, bytes: u64, stream: u32) -> Option<(usize, usize)> {
        let mut found: Option<((u64, u64), (usize, usize))> = None;
        for (at, region) in self.regions.iter().enumerate() {
            for (index, range) in region.ranges.iter().enumerate() {
                let size_key = if self.policy == Policy::First { 0 } else { range.bytes };
                let key = (size_key, range.start);
                let better = found.is_none_or(|(known, _)| key < known);
                if usable(range.of, stream) && range.bytes >= bytes && better {
                    found = Some((key, (at, index)));
                }
            }
        }
        found.map(|(_, place)| place)
    }

    fn malloc(&mut self, block: u32, requested: u64, stream: u32) -> bool {
        for ended in std::mem::take(&mut self.ended) {
            self.complete(ended);
        }
        let bytes = requested.next_multiple_of(512);
        let place = self.find(bytes, stream).or_else(|| self.grow(bytes, stream)).or_else(|| {
            self.wait();
            self.find(bytes, stream).or_else(|| match self.policy {
                Policy::Bfc { collects } => {
                    (collects && self.collect(bytes)).then(|| self.grow(bytes, stream))?
                }
                _ => self.grow(bytes, stream),
            })
        });
        let Some((region, index)) = place else { return false };
        let range = self.regions[region].ranges[index];
        let rest = range.bytes - bytes;
        let whole = matches!(self.policy, Policy::Bfc { .. }) && rest < bytes && rest < 128 * MIB;
        let taken = if whole { range.bytes } else { bytes };
        let block = (block, stream, requested);
        self.regions[region].ranges[index] =
            Range { start: range.start, bytes: taken, of: Use::Live, block };
        if taken < range.bytes {
            let rest = Range { start: range.start + taken, bytes: range.bytes - taken, ..range };
            self.regions[region].ranges.insert(index + 1, rest);
        }
        true
    }

    fn grow(&mut self, bytes: u64, stream: u32) -> Option<(usize, usize)> {
        match self.policy {
            Policy::Bfc { .. } => self.new_region(bytes),
            _ => self.new_piece(bytes, stream),
        }
    }

    fn new_piece(&mut self, bytes: u64, stream: u32) -> Option<(usize, usize)> {
        let held = self.reserved();
        let last = self.regions.first().and_then(|region| region.ranges.last());
        let tail = last.filter(|range| usable(range.of, stream)).map_or(0, |range| range.bytes);
        let piece = (bytes - tail).next_multiple_of(2 * MIB);
        if held + piece > self.most_bytes {
            return None;
        }
        if self.regions.is_empty() {
            let start = self.device.address_reserve(self.next_bytes).ok()?;
            self.regions.push(Region { start, ..Region::default() });
        }
        let region = &mut self.regions[0];
        let start = region.start + held;
        let handle = self.device.create(piece).ok()?;
        if self.device.map(start, handle).is_err() {
            self.device.release(handle).expect("held");
            return None;
        }
        if self.device.set_access(start, piece).is_err() {
            self.device.unmap(start, piece).expect("mapped");
            self.device.release(handle).expect("held");
            return None;
        }
        region.pieces.push((piece, handle));
        if tail > 0 {
            region.ranges.last_mut().expect("the tail").bytes += piece;
        } else {
            let of = Use::Free(None);
            region.ranges.push(Range { start, bytes: piece, of, block: (0, 0, 0) });
        }
        Some((0, region.ranges.len() - 1))
    }

    fn new_region(&mut self, bytes: u64) -> Option<(usize, usize)> {
        let left = self.most_bytes - self.reserved();
        if bytes > left {
            return None;
        }
        let enough = self.next_bytes >= bytes;
        while self.next_bytes < bytes {
            self.next_bytes *= 2;
        }
        let mut size = self.next_bytes.min(left);
        let start = loop {
            if let Ok(start) = self.device.malloc(size) {
                break start;
            }
            // Sizes are multiples of 512, so units of 512 in nine tenths, rounded up.
            let units = (size / 512 * 9).div_ceil(10);
            size = if units * 512 == size { size - 512 } else { units * 512 };
            if size < bytes {
                return None;
            }
        };
        if enough {
            self.next_bytes *= 2;
        }
        let range = Range { start, bytes: size, of: Use::Free(None), block: (0, 0, 0) };
        self.regions.push(Region { start, ranges: vec![range], pieces: Vec::new() });
        Some((self.regions.len() - 1, 0))
    }

    fn collect(&mut self, bytes: u64) -> bool {
        let free = self.regions.iter().filter(|region| region_is_free(region));
        let free_bytes: u64 = free.map(Region::bytes).sum();
        if free_bytes == 0 || self.most_bytes - self.reserved() + free_bytes < bytes {
            return false;
        }
        self.return_regions();
        true
    }

    fn return_regions(&mut self) {
        for region in self.regions.iter().filter(|region| region_is_free(region)) {
            self.device.free(region.start).expect("a malloc");
        }
        self.regions.retain(|region| !region_is_free(region));
    }

    fn mark(&mut self, block: u32, of: Use) {
        for range in self.regions.iter_mut().flat_map(|region| &mut region.ranges) {
            if range.block.0 == block && matches!(range.of, Use::Live | Use::Waits) {
                range.of = of;
                if let Use::Free(stream) = &mut range.of {
                    *stream = Some(range.block.1);
                }
            }
        }
    }

    fn complete(&mut self, block: u32) {
        self.mark(block, Use::Free(None));
        self.join();
    }

    /// Joins free neighbours that are not of two different streams.
    fn join(&mut self) {
        for region in &mut self.regions {
            let mut joined: Vec<Range> = Vec::new();
            for range in region.ranges.drain(..) {
                match (joined.last_mut(), range.of) {
                    (Some(Range { of: Use::Free(before), bytes, .. }), Use::Free(stream))
                        if before.is_none() || stream.is_none() || *before == stream =>
                    {
                        *before = before.or(stream);
                        *bytes += range.bytes;
                    }
                    _ => joined.push(range),
                }
            }
            region.ranges = joined;
        }
    }

    fn wait(&mut self) {
        for block in [std::mem::take(&mut self.ended), std::mem::take(&mut self.pending)].concat() {
            self.complete(block);
        }
        for range in self.regions.iter_mut().flat_map(|region| &mut region.ranges) {
            if let Use::Free(stream) = &mut range.of {
                *stream = None;
            }
        }
        self.join();
    }

    fn empty_cache(&mut self) {
        self.wait();
        if matches!(self.policy, Policy::Bfc { .. }) {
            return self.return_regions();
        }
        let Some(region) = self.regions.first_mut() else { return };
        let mut gone = 0;
        while let (Some(&(piece, handle)), Some(range)) =
            (region.pieces.last(), region.ranges.last_mut())
            && range.of == Use::Free(None)
            && range.bytes >= piece
        {
            self.device.release(handle).expect("held");
            region.pieces.pop();
            range.bytes -= piece;
            gone += piece;
            if range.bytes == 0 {
                region.ranges.pop();
            }
        }
        if gone > 0 {
            let end = region.start + region.bytes();
            self.device.unmap(end, gone).expect("mapped");
        }
    }

    fn reserved(&self) -> u64 {
        self.regions.iter().map(Region::bytes).sum()
    }

    fn levels(&self) -> Levels {
        let ranges = || self.regions.iter().flat_map(|region| &region.ranges);
        let sum = |of| ranges().filter(|range| range.of == of).map(|range| range.bytes).sum();
        let (allocated_bytes, waiting_bytes): (u64, u64) = (sum(Use::Live), sum(Use::Waits));
        let active_bytes = allocated_bytes + waiting_bytes;
        Levels { allocated_bytes, active_bytes, reserved_bytes: self.reserved() }
    }

    /// All ranges by address: address, size, state, stream, block, requested bytes.
    fn layout(&self) -> Vec<(u64, u64, BlockState, StreamId, BlockId, u64)> {
        let mut rows: Vec<_> = self.regions.iter().flat_map(|region| &region.ranges).collect();
        rows.sort_by_key(|range| range.start);
        let row = |range: &Range| {
            let (block, stream, requested) = range.block;
            let (state, stream, block, requested) = match range.of {
                Use::Free(stream) => {
                    let stream = stream.map_or(StreamId::NONE, StreamId);
                    (BlockState::Free, stream, BlockId::NONE, 0)
                }
                Use::Live => (BlockState::Allocated, StreamId(stream), BlockId(block), requested),
                Use::Waits => (BlockState::Deferred, StreamId(stream), BlockId(block), requested),
            };
            (range.start, range.bytes, state, stream, block, requested)
        };
        rows.into_iter().map(row).collect()
    }
}

fn region_is_free(region: &Region) -> bool {
    region.ranges.iter().all(|range| matches!(range.of, Use::Free(_)))
}

/// The world of one random program.
struct World {
    device: TestDevice,
    total_bytes: u64,
    limit_bytes: Option<u64>,
    sizes: Vec<u64>,
    streams: u64,
    defers: u64,
    blocks_max: usize,
}

impl World {
    fn new(random: &mut Random) -> World {
        let capacity_bytes = random.range(10..=200) * MIB;
        let bases = random.pick(&[Bases::Ascending, Bases::Descending, Bases::LowestFree]);
        let mut device = TestDevice::new(capacity_bytes, bases);
        if random.percent(30) {
            device = device.refusing(random.range(3..=30));
        }
        let largest = random.pick(&[3 * MIB, 12 * MIB, 60 * MIB]);
        let size = |random: &mut Random| match random.range(0..=3) {
            0 => random.range(1..=4096),
            1 => random.range(1..=MIB),
            2 => 2 * MIB * random.range(1..=largest / MIB),
            _ => random.range(1..=largest),
        };
        World {
            device,
            // A range that may be smaller than the device.
            total_bytes: capacity_bytes * random.range(5..=12) / 10,
            limit_bytes: random.percent(30).then(|| random.range(0..=capacity_bytes)),
            sizes: (0..random.range(2..=12)).map(|_| size(random)).collect(),
            streams: random.range(1..=3),
            defers: random.pick(&[0, 10, 50]),
            blocks_max: random.pick(&[6, 20, 60]),
        }
    }

    fn inputs(&self) -> BuildInputs {
        inputs(self.total_bytes, self.limit_bytes)
    }

    fn model(&self, policy: Policy) -> Model {
        let limit_bytes = self.limit_bytes.unwrap_or(u64::MAX);
        let (most_bytes, next_bytes) = match policy {
            Policy::Bfc { .. } => {
                let most = limit_bytes.min(self.total_bytes) / 512 * 512;
                (most, (2 * MIB).min(most).max(512))
            }
            _ => {
                let span = (self.total_bytes + self.total_bytes / 8).next_multiple_of(2 * MIB);
                (limit_bytes.min(span), span)
            }
        };
        Model {
            policy,
            device: self.device.clone(),
            regions: Vec::new(),
            pending: Vec::new(),
            ended: Vec::new(),
            most_bytes,
            next_bytes,
        }
    }
}

/// Random programs: after every operation, answer, levels, layout and device must be the model's.
fn compare<A: Allocator>(policy: Policy, build: impl Fn(&BuildInputs) -> A) {
    let (mut operations, mut seed, mut refusals, mut waited) = (0, 0, 0u64, 0u64);
    while operations < OPERATIONS {
        seed += 1;
        let mut random = Random::new(seed);
        let world = World::new(&mut random);
        let mut model = world.model(policy);
        let mut driver = Driver::new(build(&world.inputs()), world.device.clone());
        for step in 0..500u32 {
            operations += 1;
            let live = driver.live();
            let pending = driver.pending();
            match random.range(0..=99) {
                0..=1 => {
                    waited += 1;
                    driver.empty_cache();
                    model.empty_cache();
                }
                2..=11 if !pending.is_empty() => {
                    let block = random.pick(&pending);
                    driver.done(block);
                    model.pending.retain(|&other| other != block.0);
                    model.ended.push(block.0);
                }
                12..=49 if !live.is_empty() => free(&mut driver, &mut model, &mut random, &world),
                _ if live.len() >= world.blocks_max => {
                    free(&mut driver, &mut model, &mut random, &world);
                }
                _ => {
                    let size_bytes = random.pick(&world.sizes);
                    let stream = random.range(0..=world.streams - 1) as u32;
                    let granted = ask(&mut driver, step, size_bytes, stream);
                    let expected = model.malloc(step, size_bytes, stream);
                    assert_eq!(granted, expected, "seed {seed}, step {step}");
                    refusals += u64::from(!granted);
                }
            }
            let what = || format!("{policy:?}, seed {seed}, step {step}");
            assert_eq!(driver.allocator.levels(), model.levels(), "{}", what());
            let row = |b: &fraglab::alloc::LayoutBlock| {
                (b.address, b.size_bytes, b.state, b.stream, b.block, b.requested_bytes)
            };
            let layout: Vec<_> = driver.layout().iter().map(row).collect();
            assert_eq!(layout, model.layout(), "{}", what());
            assert_eq!(driver.device().memory(), model.device.memory(), "{}", what());
            let calls = |device: &TestDevice| DeviceCall::ALL.map(|call| device.calls(call));
            assert_eq!(calls(driver.device()), calls(&model.device), "{}", what());
        }
    }
    assert!(refusals > 100 && waited > 100, "{refusals} refusals, {waited} waits");
}

fn free<A: Allocator>(
    driver: &mut Driver<A>,
    model: &mut Model,
    random: &mut Random,
    world: &World,
) {
    let block = random.pick(&driver.live());
    if random.percent(world.defers) {
        driver.defer(block);
        model.mark(block.0, Use::Waits);
        model.pending.push(block.0);
    } else {
        driver.free(block);
        model.complete(block.0);
    }
}

#[test]
fn best_fit_does_what_the_model_does() {
    compare(Policy::Best, |inputs| BestFit::build(params("best-fit"), inputs).expect("builds"));
}

#[test]
fn first_fit_does_what_the_model_does() {
    compare(Policy::First, |inputs| FirstFit::build(params("first-fit"), inputs).expect("builds"));
}

#[test]
fn bfc_does_what_the_model_does() {
    for collects in [true, false] {
        let text = format!("bfc+garbage_collection={collects}");
        compare(Policy::Bfc { collects }, |inputs| {
            Bfc::build(params(&text), inputs).expect("builds")
        });
    }
}
