//! The replay on a card, with a simulated device in its place and a slow model of its memory.
//!
//! The model remembers for every 512 bytes of physical memory who wrote them last, by the device's
//! own books; it shares no code with the sink that it serves.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use super::*;
use crate::alloc::{Action, ActionKind, Env, Handle, LayoutBlock, Levels, OutOfMemory, Request};
use crate::device::sim::addresses::Addresses;
use crate::device::{CostProfile, DeviceError, Extent, Measured, Mismatch, PhysicalHandle, Sim};
use crate::engine::{MemorySample, RunOptions};
use crate::trace::read_text;
use crate::units::MIB;

/// Bytes that the model keeps as one.
const UNIT_BYTES: u64 = 512;

/// A simulated device that its memory can be asked about.
#[derive(Clone)]
struct Shared {
    sim: Rc<RefCell<Sim>>,
    /// `create` fails as no driver should.
    is_broken: bool,
}

impl Device for Shared {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        if self.is_broken {
            return Err(DeviceError::Driver { call: DeviceCall::Malloc, code: 700 });
        }
        self.sim.borrow_mut().malloc(size_bytes)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().free(address)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().address_reserve(size_bytes)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.sim.borrow_mut().address_free(address, size_bytes)
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        self.sim.borrow_mut().create(size_bytes)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().release(handle)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().map(address, handle)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().unmap(address, size_bytes)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        self.sim.borrow_mut().set_access(address, size_bytes)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.sim.borrow().backing(address, size_bytes, visit)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.sim.borrow().memory_info()
    }
}

/// Who wrote a unit: a seed, and which unit of its range.
type Written = (u64, u64);

/// The memory of a [`Shared`].
struct ModelMemory {
    sim: Rc<RefCell<Sim>>,
    units: HashMap<(Option<PhysicalHandle>, u64), Written>,
}

impl ModelMemory {
    fn places(&self, address: u64, size_bytes: u64) -> Option<Vec<(Option<PhysicalHandle>, u64)>> {
        let mut places = Vec::new();
        let is_whole = self.sim.borrow().backing(address, size_bytes, &mut |extent| {
            let first = extent.offset_bytes / UNIT_BYTES;
            let end = (extent.offset_bytes + extent.size_bytes).div_ceil(UNIT_BYTES);
            places.extend((first..end).map(|unit| (extent.piece, unit)));
        });
        is_whole.then_some(places)
    }

    fn unmapped(what: &'static str, address: u64, size_bytes: u64) -> TouchError {
        TouchError { what, address, size_bytes, code: 700 }
    }
}

impl Touch for ModelMemory {
    fn fill(&mut self, address: u64, size_bytes: u64, seed: u64) -> Result<(), TouchError> {
        let places = self.places(address, size_bytes);
        let places = places.ok_or_else(|| Self::unmapped("write", address, size_bytes))?;
        self.units.extend((0..).zip(places).map(|(nth, place)| (place, (seed, nth))));
        Ok(())
    }

    fn check(
        &mut self,
        address: u64,
        size_bytes: u64,
        seed: u64,
    ) -> Result<Option<Mismatch>, TouchError> {
        let places = self.places(address, size_bytes);
        let places = places.ok_or_else(|| Self::unmapped("read", address, size_bytes))?;
        let differs = |&(nth, place): &(u64, _)| self.units.get(&place) != Some(&(seed, nth));
        let different: Vec<u64> = (0..).zip(places).filter(differs).map(|(nth, _)| nth).collect();
        Ok(different.first().map(|nth| Mismatch {
            words: different.len() as u64 * UNIT_BYTES / 4,
            offset_bytes: nth * UNIT_BYTES,
            expected: 1,
            found: 2,
        }))
    }

    fn copy_to_host(&mut self, address: u64, to: &mut [u8]) -> Result<(), TouchError> {
        Err(Self::unmapped("read", address, to.len() as u64))
    }

    fn copy_from_host(&mut self, address: u64, from: &[u8]) -> Result<(), TouchError> {
        Err(Self::unmapped("write", address, from.len() as u64))
    }
}

/// A card that is simulated, with ascending addresses.
struct SimCard {
    total_bytes: u64,
    is_broken: bool,
    /// How often it was made ready.
    warm_ups: Cell<u32>,
    /// What a clock says of every kind of call by pass; without it, a real one does.
    pass_ns: Vec<u64>,
    /// The device that is open, or was last.
    newest: RefCell<Rc<RefCell<Sim>>>,
}

impl SimCard {
    fn new(total_bytes: u64) -> SimCard {
        let newest = RefCell::new(Rc::new(RefCell::new(SimCard::sim(total_bytes))));
        let (warm_ups, pass_ns) = (Cell::new(0), Vec::new());
        SimCard { total_bytes, is_broken: false, warm_ups, pass_ns, newest }
    }

    fn sim(bytes: u64) -> Sim {
        Sim::new(Some(bytes), Some(bytes), Addresses::ascending())
    }
}

impl Card for SimCard {
    type Device = Measured<Shared>;

    fn open(&self, capacity_bytes: Option<u64>) -> Result<Self::Device, HardwareError> {
        let bytes = capacity_bytes.unwrap_or(self.total_bytes);
        let sim = Rc::new(RefCell::new(SimCard::sim(bytes)));
        *self.newest.borrow_mut() = Rc::clone(&sim);
        Ok(Measured::new(Shared { sim, is_broken: self.is_broken }))
    }

    fn warm_up(&self) {
        self.warm_ups.set(self.warm_ups.get() + 1);
    }

    fn toucher(&self, device: &Self::Device) -> Result<Box<dyn Touch>, HardwareError> {
        let sim = Rc::clone(&device.inner().sim);
        Ok(Box::new(ModelMemory { sim, units: HashMap::new() }))
    }

    fn measured(&self, device: &Self::Device, call: DeviceCall) -> CallTime {
        let time = device.calls().of(call);
        let pass = self.warm_ups.get() as usize - 1;
        self.pass_ns.get(pass).map_or(time, |&ns| CallTime { ns, ..time })
    }

    fn memory_info(&self) -> MemoryInfo {
        self.newest.borrow().borrow().memory_info()
    }

    fn summary(&self) -> CardSummary {
        CardSummary { name: "model".to_owned(), driver: "0".to_owned(), ordinal: 0 }
    }
}

/// A program whose blocks split, join, wait for streams, and leave holes.
const STEP: &str = "\
alloc a 3MiB
alloc b 2MiB stream=7
alloc c 700KiB
alloc d 5
free a
alloc e 1MiB
alloc f 1MiB
defer b
alloc g 5MiB
free e
done b
alloc h 3MiB
free f
empty_cache
alloc i 4MiB stream=7
free c g
alloc j 6MiB
alloc _ 100KiB
free h i j d
";

/// Three steps of it, for those that plan ahead.
fn program() -> Trace {
    let steps = (0..3).map(|step| format!("mark step{step}\n{STEP}"));
    let text = format!("addresses ascending\n{}", steps.collect::<String>());
    read_text(&text).expect("a trace")
}

fn options() -> RunOptions {
    RunOptions::new(CostProfile::shipped("h200").expect("ships"))
}

fn bench<C>(card: &C, touch: TouchMode) -> Bench<'_, C> {
    let passes = NonZeroU32::MIN;
    Bench { card, touch, pace: Pace::Fast, passes, split: true, progress: &|_, _| {} }
}

fn on_card(trace: &Trace, spec: &str, card: &SimCard) -> Result<Observed, RunError> {
    let options = options();
    let prepared = Prepared::new(trace, &options);
    let spec: AllocSpec = spec.parse().expect("a specification");
    run_on_hardware(&prepared, &spec, &bench(card, TouchMode::Full), Observe::default())
}

/// The trace through an allocator that is not registered.
fn visited<A: Allocator + Send + 'static>(
    allocator: A,
    card: &SimCard,
) -> Result<Observed, RunError> {
    let trace = read_text("alloc a 1MiB\nalloc b 2MiB\nfree a b\n").expect("a trace");
    let options = options();
    let prepared = Prepared::new(&trace, &options);
    let spec: AllocSpec = "native".parse().expect("a specification");
    let total_bytes = card.memory_info().total_bytes;
    let size = DeviceSize::Card { capacity_bytes: total_bytes, total_bytes };
    let simulated = simulated(&prepared, &spec, size).expect("runs");
    let (runner, _) = prepare(&prepared, &spec, size, Observe::default());
    let passes = NonZeroU32::MIN.saturating_add(2);
    let bench = Bench { passes, ..bench(card, TouchMode::Full) };
    let limited_bytes = None;
    let on_card = OnCard { runner, spec: &spec, bench: &bench, limited_bytes, simulated };
    registry::Visitor::visit(on_card, allocator)
}

/// What is wrong with a [`Broken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The second block begins inside the first.
    Overlap,
    /// Blocks lie in addresses without memory.
    Unmapped,
}

/// An allocator that hands out what it should not.
#[derive(Clone, Debug)]
struct Broken {
    fault: Fault,
    base: Option<u64>,
    blocks: Vec<(Request, u64)>,
}

impl Broken {
    fn new(fault: Fault) -> Broken {
        Broken { fault, base: None, blocks: Vec::new() }
    }

    fn action(&self, kind: ActionKind, handle: Handle) -> Action {
        let (request, address) = self.blocks[handle.0 as usize];
        Action {
            address,
            ..Action::notice(kind, request.block, request.stream, request.size_bytes)
        }
    }
}

impl Allocator for Broken {
    const ADDRESSES_MATTER: bool = false;

    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        let base = self.base.unwrap_or_else(|| match self.fault {
            Fault::Overlap => env.device().malloc(4 * MIB).expect("fits"),
            Fault::Unmapped => env.device().address_reserve(4 * MIB).expect("addresses"),
        });
        self.base = Some(base);
        let handle = Handle(self.blocks.len() as u32);
        // Half a block further, so half of the first is shared.
        self.blocks.push((request, base + u64::from(handle.0) * MIB / 2));
        env.log(self.action(ActionKind::Alloc, handle));
        Ok(handle)
    }

    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        env.log(self.action(ActionKind::FreeCompleted, handle));
    }

    fn defer<E: Env>(&mut self, _env: &mut E, _handle: Handle) {}

    fn empty_cache<E: Env>(&mut self, _env: &mut E) {}

    fn levels(&self) -> Levels {
        Levels { reserved_bytes: 4 * MIB, ..Levels::default() }
    }

    fn largest_hole(&self, _request: Request) -> u64 {
        0
    }

    fn limit_bytes(&self) -> Option<u64> {
        None
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn params(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn layout(&self, _visit: &mut dyn FnMut(LayoutBlock)) {}
}

#[test]
fn every_allocator_keeps_what_was_written() {
    let trace = program();
    for info in registry::list() {
        let card = SimCard::new(256 * MIB);
        let result = on_card(&trace, info.name, &card).expect("runs").result;
        let hardware = result.hardware.expect("of a card");
        assert_eq!(result.outcome.status, Status::Ok, "{}", info.name);
        assert_eq!(hardware.touch.mismatches, 0, "{}", info.name);
        assert_eq!(hardware.touch.blocks, 33, "all that were ever live: {}", info.name);
        // The card hands out the addresses of the simulated device, so both do the same.
        assert_eq!(hardware.simulated.calls, result.calls, "{}", info.name);
        let simulated = hardware.simulated;
        assert_eq!(simulated.reserved_bytes_peak, result.peaks.reserved_bytes_peak);
        assert_eq!(simulated.allocator_device_ns, result.time.allocator_device_ns);
    }
}

#[test]
fn a_card_tells_what_a_simulated_device_does() {
    let trace = program();
    let options = options();
    let spec: AllocSpec = "caching".parse().expect("a specification");
    let simulated = super::super::run(&trace, &spec, &options, Observe::default());
    let simulated = simulated.expect("runs").result;
    let result = on_card(&trace, "caching", &SimCard::new(256 * MIB)).expect("runs").result;
    assert_eq!(result.peaks, simulated.peaks);
    assert_eq!(result.split, simulated.split);
    assert_eq!(result.counters, simulated.counters);
    assert_eq!((result.device.kind, result.device.capacity_bytes), ("cuda", Some(256 * MIB)));
    let wall = result.wall.hardware.expect("of a card");
    let calls: u64 = wall.device_calls.values().map(|times| times.calls).sum();
    assert_eq!(calls, result.calls.total());
    let costs: u64 = wall.device_calls.values().map(|times| times.simulated_ns).sum();
    assert!(costs.abs_diff(result.time.allocator_device_ns) <= 9, "each kind is rounded");
}

/// 3 and 5 MiB are held at once, in pieces of 2 MiB each: 4 + 6. Then 5 are left.
#[test]
fn the_driver_says_what_is_used() {
    let trace = read_text("alloc a 3MiB\nalloc b 5MiB\nfree a\n").expect("a trace");
    let result = on_card(&trace, "native", &SimCard::new(64 * MIB)).expect("runs").result;
    let memory = result.hardware.expect("of a card").memory;
    let sample = |event_index, reserved, used: u64| MemorySample {
        event_index,
        reserved_bytes: reserved * MIB,
        used_bytes: (used * MIB) as i64,
    };
    assert_eq!((memory.total_bytes, memory.free_bytes), (64 * MIB, 64 * MIB));
    assert_eq!(memory.at_reserved_peak, sample(1, 8, 10));
    assert_eq!(memory.at_end, sample(2, 5, 6));
}

#[test]
fn a_capacity_makes_the_card_smaller() {
    let trace = read_text("capacity 8MiB\nalloc a 6MiB\nalloc b 6MiB\n").expect("a trace");
    let result = on_card(&trace, "native", &SimCard::new(64 * MIB)).expect("runs").result;
    assert_eq!(result.outcome.status, Status::Oom);
    assert_eq!(result.outcome.event_index, Some(1));
    assert_eq!(result.device.capacity_bytes, Some(8 * MIB));
    let hardware = result.hardware.expect("of a card");
    assert_eq!(hardware.simulated.status, Status::Oom);
    assert_eq!((hardware.touch.blocks, hardware.touch.mismatches), (1, 0));
    assert!(result.split.is_some(), "at the refusal");
}

/// The second block is written over the upper half of the first: 512 KiB of 4-byte words.
#[test]
fn two_blocks_in_one_place_are_found() {
    let card = SimCard::new(64 * MIB);
    let result = visited(Broken::new(Fault::Overlap), &card).expect("runs").result;
    assert_eq!(card.warm_ups.get(), 1, "not taken a second time");
    let touch = result.hardware.expect("of a card").touch;
    assert_eq!((touch.blocks, touch.mismatches), (2, 1));
    let first = touch.first.expect("the first block");
    assert_eq!((first.block_id, first.alloc_event_index, first.event_index), (0, 0, 2));
    assert_eq!((first.offset_bytes, first.words), (MIB / 2, MIB / 2 / 4));
    assert_eq!(result.outcome.status, Status::Failed);
    let message = result.outcome.message.expect("told");
    assert!(message.contains("block 0 (1 MiB at 0x"), "{message}");
    assert!(message.contains("offset 524,288 at event 2"), "{message}");
    assert!(message.contains("131,072 words of 4 bytes differ"), "{message}");
}

#[test]
fn a_block_without_memory_ends_the_replay() {
    let error = visited(Broken::new(Fault::Unmapped), &SimCard::new(64 * MIB)).expect_err("none");
    let text = error.to_string();
    assert!(text.starts_with("native at event 0: block 0 has no memory: "), "{text}");
    assert!(text.contains("driver error 700"), "{text}");
}

#[test]
fn an_error_of_the_driver_is_no_lack_of_memory() {
    let trace = read_text("alloc a 3MiB\nalloc b 5MiB\n").expect("a trace");
    let card = SimCard { is_broken: true, ..SimCard::new(64 * MIB) };
    let error = on_card(&trace, "native", &card).expect_err("broken");
    let expected = "native at event 0: the GPU refused malloc (driver error 700)";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn events_wait_for_their_recorded_time() {
    let mut trace = read_text("alloc a 3MiB\nfree a\nalloc b 5MiB\n").expect("a trace");
    for (event, ms) in trace.events.iter_mut().zip([5, 1000, 2005]) {
        event.time_ns = ms * 1_000_000;
    }
    let card = SimCard::new(64 * MIB);
    let (options, spec) = (options(), "native".parse().expect("a specification"));
    let prepared = Prepared::new(&trace, &options);
    let paced = Bench { pace: Pace::Recorded, split: false, ..bench(&card, TouchMode::None) };
    let begun = Instant::now();
    let result = run_on_hardware(&prepared, &spec, &paced, Observe::default());
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    let result = result.expect("runs").result;
    assert!(result.split.is_none());
    // Three events take microseconds; a busy machine may take a second.
    assert!(result.wall.seconds < 1.0, "waiting is no work: {}", result.wall.seconds);
}

/// Of 100, 300, 700 and 900 ns the lesser of the two in the middle.
#[test]
fn the_median_pass_is_told() {
    let trace = read_text("alloc a 3MiB\nalloc b 5MiB\n").expect("a trace");
    let card = SimCard { pass_ns: vec![700, 100, 900, 300], ..SimCard::new(64 * MIB) };
    let (options, spec) = (options(), "native".parse().expect("a specification"));
    let prepared = Prepared::new(&trace, &options);
    let passes = NonZeroU32::MIN.saturating_add(3);
    let repeated = Bench { passes, ..bench(&card, TouchMode::Full) };
    let result = run_on_hardware(&prepared, &spec, &repeated, Observe::default());
    let result = result.expect("runs").result;
    let wall = result.wall.hardware.expect("of a card");
    assert_eq!(wall.allocator_device_ns_measured, 300);
    assert_eq!(wall.repeats, Repeats { count: 4, least_ns: 100, most_ns: 900 });
    assert_eq!(wall.device_calls["malloc"].calls, 2, "of one pass");
    assert_eq!(result.hardware.expect("of a card").touch.blocks, 2);
    assert!(result.split.is_some());
    assert_eq!(card.warm_ups.get(), 4, "once a pass, not for the split");
}
