//! A device call that fails, at every place of small programs: the allocator must stay consistent,
//! serve requests again and return everything in the end.

use std::ops::RangeInclusive;

use fraglab::alloc::{Allocator, BlockState, LayoutBlock, Levels, Request};
use fraglab::device::DeviceCall;
use fraglab::units::{BlockId, MIB, StreamId};

use crate::caching_property::{Case, Op, Program, apply};
use crate::model::Mutation;
use crate::model::device::TestDevice;
use crate::model::driver::Driver;
use crate::model::random::Random;

/// Small programs. Unoptimized builds run fewer.
const PROGRAMS: u64 = if cfg!(debug_assertions) { 10 } else { 80 };
/// Device calls of a small program, by the model.
const CALLS: RangeInclusive<u64> = 8..=60;
/// First of the ids of the requests after the program; its own are below.
const LATER_BLOCK: u32 = 1000;
/// The largest page of the cases: what a refused release may hold back.
const PAGE_BYTES_MAX: u64 = 64 * MIB;

/// A program for any allocator on any device.
struct SmallProgram {
    case: Case,
    ops: Vec<Op>,
    /// What comes when all blocks are free.
    ending: Vec<Op>,
}

impl SmallProgram {
    /// The program of this seed, if it makes neither too few nor too many device calls.
    fn new(seed: u64) -> Option<SmallProgram> {
        let mut random = Random::new(seed);
        let case = Case::small(&mut random);
        let mut program = Program::new(&case, random);
        let mut model = Driver::new(case.model(), case.device.clone());
        let mut ops = Vec::new();
        for _ in 0..case.operations {
            let op = program.next(&model);
            apply(&mut model, op);
            ops.push(op);
        }
        let ending = program.ending();
        let calls = DeviceCall::ALL.iter().map(|&call| model.device().calls(call)).sum();
        let usable = CALLS.contains(&calls) && model.allocator.failure().is_none();
        usable.then_some(SmallProgram { case, ops, ending })
    }

    /// Runs on this device, of whose calls one of the kind `fault` may fail. Gives what is left, or
    /// nothing if the real allocator would not have survived.
    ///
    /// # Errors
    /// The first thing that is not as it must be.
    fn run<A: Allocator>(
        &self,
        build: impl Fn(&Case) -> A,
        device: TestDevice,
        fault: Option<DeviceCall>,
    ) -> Result<Option<Driver<A>>, String> {
        let mut driver = Driver::new(build(&self.case), device);
        for &op in &self.ops {
            let about_nothing = match op {
                Op::Free(block) | Op::Defer(block) => !driver.live().contains(&block),
                _ => false,
            };
            if about_nothing {
                continue;
            }
            apply(&mut driver, op);
            if driver.allocator.failure().is_some() {
                return Ok(None);
            }
            check(&driver, fault).map_err(|what| format!("after {op:?}: {what}"))?;
        }
        self.end(&mut driver, &self.ending, fault)?;
        self.serve_again(build, &mut driver, fault)?;
        Ok(Some(driver))
    }

    /// Frees everything: all memory must go back to the device.
    fn end<A: Allocator>(
        &self,
        driver: &mut Driver<A>,
        ending: &[Op],
        fault: Option<DeviceCall>,
    ) -> Result<(), String> {
        let frees = driver.live().into_iter().map(Op::Free);
        // What the device refused to take is offered once more.
        let ops: Vec<Op> = frees.chain(ending.iter().copied()).chain([Op::EmptyCache]).collect();
        for op in ops {
            apply(driver, op);
            check(driver, fault).map_err(|what| format!("after {op:?} at the end: {what}"))?;
        }
        let (levels, device) = (driver.allocator.levels(), driver.device());
        let reservations = if device.refused() == 0 { device.reservations() } else { 0 };
        if levels != Levels::default() || !device.memory().is_empty() || reservations != 0 {
            let memory = device.memory();
            return Err(format!("{levels:?}, {memory:x?}, {reservations} reservations at the end"));
        }
        Ok(())
    }

    /// Requests that a new allocator serves must be served still, on every stream.
    fn serve_again<A: Allocator>(
        &self,
        build: impl Fn(&Case) -> A,
        driver: &mut Driver<A>,
        fault: Option<DeviceCall>,
    ) -> Result<(), String> {
        let mut fresh = Driver::new(build(&self.case), self.case.device.clone());
        for &op in self.ops.iter().filter(|op| matches!(op, Op::Settings(_))) {
            apply(&mut fresh, op);
        }
        let lost = driver.device().unmapped_bytes() > 0;
        for stream in (0..self.case.stream_handles().len() as u32).map(StreamId) {
            for (at, size_bytes) in [1000, 3 * MIB, 30 * MIB].into_iter().enumerate() {
                let block = BlockId(LATER_BLOCK + 10 * stream.0 + at as u32);
                let request = Request { block, size_bytes, stream };
                let (expected, found) = (fresh.malloc(request), driver.malloc(request));
                if found != expected && !lost {
                    return Err(format!("{request:?} gives {found:?}, at first {expected:?}"));
                }
                check(driver, fault).map_err(|what| format!("after {request:?}: {what}"))?;
            }
        }
        self.end(driver, &[Op::EmptyCache], fault)
    }
}

/// Whether what the allocator says of itself agrees with what the device holds.
fn check<A: Allocator>(driver: &Driver<A>, fault: Option<DeviceCall>) -> Result<(), String> {
    let layout = driver.layout();
    for pair in layout.windows(2) {
        if pair[0].address + pair[0].size_bytes > pair[1].address {
            return Err(format!("blocks overlap: {pair:#?}"));
        }
    }
    for of_segment in layout.chunk_by(|a, b| a.segment == b.segment) {
        check_segment(of_segment)?;
    }
    let blocks = joined(layout.iter().map(|block| (block.address, block.size_bytes)));
    let memory = joined(driver.device().memory().into_iter());
    if blocks != memory {
        return Err(format!("the layout covers {blocks:x?}, the device holds {memory:x?}"));
    }
    let lost = driver.device().unmapped_bytes();
    if lost > if fault == Some(DeviceCall::Release) { PAGE_BYTES_MAX } else { 0 } {
        return Err(format!("{lost} bytes are created and not mapped"));
    }
    check_figures(driver, &layout)
}

/// Blocks lie in their segment and cover it, or whole pages of it.
fn check_segment(blocks: &[LayoutBlock]) -> Result<(), String> {
    let LayoutBlock { segment_address: start, segment_bytes, page_bytes, .. } = blocks[0];
    let covered = joined(blocks.iter().map(|block| (block.address, block.size_bytes)));
    let fits = |&(address, bytes): &(u64, u64)| {
        let inside = address >= start && address + bytes <= start + segment_bytes;
        let whole = match page_bytes {
            0 => bytes == segment_bytes,
            page => (address - start).is_multiple_of(page) && bytes.is_multiple_of(page),
        };
        inside && whole
    };
    if covered.iter().all(fits) {
        return Ok(());
    }
    Err(format!("a segment is covered by {covered:x?}: {blocks:#?}"))
}

/// Levels and statistics are those of the layout, and its blocks those of the program.
fn check_figures<A: Allocator>(driver: &Driver<A>, layout: &[LayoutBlock]) -> Result<(), String> {
    let of_state = |state| layout.iter().filter(move |block| block.state == state);
    for (state, mut expected) in
        [(BlockState::Allocated, driver.live()), (BlockState::Deferred, driver.waiting())]
    {
        let mut found: Vec<BlockId> = of_state(state).map(|block| block.block).collect();
        found.sort_unstable();
        expected.sort_unstable();
        if found != expected {
            return Err(format!("{state:?} are {found:?}, expected {expected:?}"));
        }
    }
    let bytes_of = |state| of_state(state).map(|block| block.size_bytes).sum::<u64>();
    let allocated_bytes = bytes_of(BlockState::Allocated);
    let active_bytes = allocated_bytes + bytes_of(BlockState::Deferred);
    let reserved_bytes = active_bytes + bytes_of(BlockState::Free);
    let levels = driver.allocator.levels();
    if levels != (Levels { allocated_bytes, active_bytes, reserved_bytes }) {
        return Err(format!("{levels:?} are not those of the layout: {layout:#?}"));
    }
    let segments = layout.chunk_by(|a, b| a.segment == b.segment);
    let ordinary = segments.filter(|blocks| blocks[0].page_bytes == 0).count();
    let requested_bytes: u64 = layout.iter().map(|block| block.requested_bytes).sum();
    let stats = driver.stats();
    for (name, expected) in [
        ("allocated_bytes", allocated_bytes),
        ("active_bytes", active_bytes),
        ("reserved_bytes", reserved_bytes),
        ("requested_bytes", requested_bytes),
        ("allocation", driver.live().len() as u64),
        ("active", (driver.live().len() + driver.waiting().len()) as u64),
        ("segment", ordinary as u64),
    ] {
        let found = stats[&format!("{name}.all.current")];
        if found != expected as i64 {
            return Err(format!("statistic {name} is {found}, expected {expected}"));
        }
    }
    Ok(())
}

/// Ranges of (address, bytes) in order, those that touch made one.
fn joined(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (address, bytes) in ranges {
        match joined.last_mut() {
            Some((last, length)) if *last + *length == address => *length += bytes,
            _ => joined.push((address, bytes)),
        }
    }
    joined
}

/// How many programs ran that have each of these, and how many faults hit each kind of call.
#[derive(Debug, Default)]
struct Coverage {
    limits: u64,
    split_limits: u64,
    pools: u64,
    deferrals: u64,
    settings: u64,
    faults: [u64; DeviceCall::ALL.len()],
}

impl Coverage {
    fn add(&mut self, program: &SmallProgram) {
        let has = |wanted: fn(&Op) -> bool| u64::from(program.ops.iter().any(wanted));
        let settings = program.case.settings();
        self.limits += u64::from(settings.limit.is_some());
        self.split_limits += u64::from(settings.max_split_size != u64::MAX);
        self.pools += has(|op| matches!(op, Op::PoolEnter(_)));
        self.deferrals += has(|op| matches!(op, Op::Defer(_)));
        self.settings += has(|op| matches!(op, Op::Settings(_)));
    }
}

/// Runs small programs on the allocator that `build` makes, each once without a fault and then once
/// with every device call failing that it made.
///
/// # Errors
/// The first thing that is not as it must be.
fn run_with_faults<A: Allocator>(build: impl Fn(&Case) -> A) -> Result<Coverage, String> {
    let mut coverage = Coverage::default();
    for seed in 0..PROGRAMS {
        let Some(program) = SmallProgram::new(seed) else { continue };
        let SmallProgram { case, ops, .. } = &program;
        let told = |what| format!("seed {seed}, no fault: {what}\n{case:#?}\n{ops:#?}");
        let Some(clean) = program.run(&build, case.device.clone(), None).map_err(told)? else {
            continue;
        };
        coverage.add(&program);
        for call in DeviceCall::ALL {
            for number in 1..=clean.device().calls(call) {
                let device = case.device.clone().failing(call, number);
                program.run(&build, device, Some(call)).map_err(|what| {
                    let name = call.name();
                    format!("seed {seed}, {name} {number} fails: {what}\n{case:#?}\n{ops:#?}")
                })?;
                coverage.faults[call as usize] += 1;
            }
        }
    }
    Ok(coverage)
}

/// Fails the test unless the allocator that `build` makes survives a failure of every device call.
pub(crate) fn survive_every_fault<A: Allocator>(build: impl Fn(&Case) -> A) {
    let coverage = run_with_faults(build).unwrap_or_else(|what| panic!("{what}"));
    println!("{coverage:?}");
    let Coverage { limits, split_limits, pools, deferrals, settings, faults } = coverage;
    let least = PROGRAMS / 20;
    let programs = [limits, split_limits, pools, deferrals, settings];
    assert!(programs.iter().all(|&count| count > least), "{programs:?}");
    assert!(faults.iter().all(|&count| count > PROGRAMS), "{faults:?}");
}

#[test]
fn the_model_survives_a_failure_of_any_device_call() {
    survive_every_fault(Case::model);
}

/// Checks that cannot fail prove nothing.
#[test]
fn a_fault_that_is_not_undone_is_found() {
    for mutation in Mutation::FAULTS {
        let found = run_with_faults(|case: &Case| case.model().mutated(mutation)).is_err();
        assert!(found, "{mutation:?} was not seen");
    }
}
