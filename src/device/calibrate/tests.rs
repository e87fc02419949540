//! A simulated device whose calls take a known time by a clock that only they move: what is
//! measured must give that law back.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::*;
use crate::device::sim::addresses::Addresses;
use crate::device::{CostProfile, Counting, Extent, MemoryInfo, PhysicalHandle, Sim};

/// What calls take beyond their law by size.
#[derive(Clone, Copy)]
struct Law {
    /// Of the mallocs of 256 MiB and more of memory that was freed in the last 50 ms, every
    /// so-manieth of a size waits 7 ms; 0 is never.
    wait_every: u64,
    /// One call in all of so many takes 20 ms more; 0 is never.
    outlier_every: u64,
    /// The first call after so many ns takes a minute; 0 is never.
    freak_at_ns: u64,
    /// Every call before this time takes twice as long.
    cold_ns: u64,
}

const PLAIN: Law = Law { wait_every: 0, outlier_every: 0, freak_at_ns: 0, cold_ns: 0 };

/// A device that moves the clock.
struct Timed {
    sim: Sim,
    clock_ns: Rc<Cell<u64>>,
    law: Law,
    calls: u64,
    /// Of every size the mallocs of memory that was freed before, in parts of one.
    again: BTreeMap<u64, f64>,
    freed_bytes: u64,
    freed_at_ns: u64,
    held_bytes: u64,
    peak_bytes: u64,
}

impl Timed {
    fn new(capacity_bytes: u64, law: Law) -> (Timed, Rc<Cell<u64>>) {
        let clock_ns = Rc::new(Cell::new(0));
        let sim = Sim::new(Some(capacity_bytes), None, Addresses::ascending());
        let timed = Timed {
            sim,
            clock_ns: Rc::clone(&clock_ns),
            law,
            calls: 0,
            again: BTreeMap::new(),
            freed_bytes: 0,
            freed_at_ns: 0,
            held_bytes: 0,
            peak_bytes: 0,
        };
        (timed, clock_ns)
    }

    fn takes(&mut self, ns: u64) {
        self.calls += 1;
        let every = self.law.outlier_every;
        let late_ns = if every > 0 && self.calls.is_multiple_of(every) { 20_000_000 } else { 0 };
        let mut freak_ns = 0;
        if self.law.freak_at_ns > 0 && self.clock_ns.get() >= self.law.freak_at_ns {
            freak_ns = 60_000_000_000;
            self.law.freak_at_ns = 0;
        }
        let cold_ns = if self.clock_ns.get() < self.law.cold_ns { ns } else { 0 };
        self.clock_ns.set(self.clock_ns.get() + ns + late_ns + freak_ns + cold_ns);
    }

    fn holds(&mut self, size_bytes: u64) {
        self.held_bytes += size_bytes;
        self.peak_bytes = self.peak_bytes.max(self.held_bytes);
    }

    /// What a malloc waits for memory to be cleared.
    fn waits_ns(&mut self, size_bytes: u64) -> u64 {
        if self.clock_ns.get() - self.freed_at_ns >= 50_000_000 {
            self.freed_bytes = 0;
        }
        let again_bytes = size_bytes.min(self.freed_bytes);
        self.freed_bytes -= again_bytes;
        let every = self.law.wait_every;
        if every == 0 || size_bytes < 256 * MIB {
            return 0;
        }
        let again = self.again.entry(size_bytes).or_default();
        let before = *again;
        *again += again_bytes as f64 / size_bytes as f64;
        let is_late = (*again / every as f64).floor() > (before / every as f64).floor();
        if is_late { WAIT_NS } else { 0 }
    }
}

const WAIT_NS: u64 = 7_000_000;

/// 3 µs for small sizes, which share a page; then 40 µs and 250 ns a MiB.
fn malloc_ns(size_bytes: u64) -> u64 {
    if size_bytes < 2 * MIB { 3000 } else { 40_000 + 250 * (size_bytes / MIB) }
}

fn free_ns(size_bytes: u64) -> u64 {
    malloc_ns(size_bytes) / 2
}

fn create_ns(size_bytes: u64) -> u64 {
    10_000 + 200 * (size_bytes / MIB)
}

const RELEASE_NS: u64 = 7000;
const RESERVE_NS: u64 = 900;
const ADDRESS_FREE_NS: u64 = 800;
const MAP_NS: u64 = 1100;
const ACCESS_NS: u64 = 27_000;
const UNMAP_NS: u64 = 19_000;

impl Device for Timed {
    fn malloc(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self.sim.malloc(size_bytes)?;
        self.holds(size_bytes);
        let waits_ns = self.waits_ns(size_bytes);
        self.takes(malloc_ns(size_bytes) + waits_ns);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<u64, DeviceError> {
        let size_bytes = self.sim.free(address)?;
        self.held_bytes -= size_bytes;
        self.freed_bytes += size_bytes;
        self.takes(free_ns(size_bytes));
        // Those of 2 MiB keep the GPU awake while memory settles.
        if size_bytes > 2 * MIB {
            self.freed_at_ns = self.clock_ns.get();
        }
        Ok(size_bytes)
    }

    fn address_reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = self.sim.address_reserve(size_bytes)?;
        self.takes(RESERVE_NS);
        Ok(address)
    }

    fn address_free(&mut self, address: u64, size_bytes: u64) -> Result<(), DeviceError> {
        self.sim.address_free(address, size_bytes)?;
        self.takes(ADDRESS_FREE_NS);
        Ok(())
    }

    fn create(&mut self, size_bytes: u64) -> Result<PhysicalHandle, DeviceError> {
        let handle = self.sim.create(size_bytes)?;
        self.holds(size_bytes);
        self.takes(create_ns(size_bytes));
        Ok(handle)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.sim.release(handle)?;
        self.held_bytes -= size_bytes;
        self.takes(RELEASE_NS);
        Ok(size_bytes)
    }

    fn map(&mut self, address: u64, handle: PhysicalHandle) -> Result<u64, DeviceError> {
        let size_bytes = self.sim.map(address, handle)?;
        self.takes(MAP_NS);
        Ok(size_bytes)
    }

    fn unmap(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let pieces = self.sim.unmap(address, size_bytes)?;
        self.takes(UNMAP_NS * pieces);
        Ok(pieces)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64) -> Result<u64, DeviceError> {
        let pieces = self.sim.set_access(address, size_bytes)?;
        self.takes(ACCESS_NS * pieces);
        Ok(pieces)
    }

    fn backing(&self, address: u64, size_bytes: u64, visit: &mut dyn FnMut(Extent)) -> bool {
        self.sim.backing(address, size_bytes, visit)
    }

    fn memory_info(&self) -> MemoryInfo {
        self.sim.memory_info()
    }
}

fn names() -> ProfileNames {
    let [name, gpu, driver, date] = ["made-up", "no GPU", "none", "2026-01-01"].map(str::to_owned);
    ProfileNames { name, gpu, driver, date }
}

fn options() -> CalibrateOptions {
    CalibrateOptions { size_bytes_max: GIB, settle_ns: 60_000_000, ..CalibrateOptions::quick() }
}

fn measured(capacity_bytes: u64, law: Law) -> (Calibration, Timed) {
    let (mut device, clock_ns) = Timed::new(capacity_bytes, law);
    let clock = || clock_ns.get();
    // Means of few calls that wait say little.
    let rounds = if law.wait_every > 0 { 30 } else { 3 };
    let options = CalibrateOptions { rounds_min: rounds, rounds_max: rounds, ..options() };
    let options = CalibrateOptions { budget_ns: u64::MAX, ..options };
    let calibration = calibrate(&mut device, clock, &options, &mut |_| {}).expect("measures");
    (calibration, device)
}

fn profile(law: Law) -> CostProfile {
    measured(64 * GIB, law).0.profile(names()).expect("a profile")
}

#[track_caller]
fn assert_near(got_ns: f64, expected_ns: f64) {
    assert!((got_ns - expected_ns).abs() <= expected_ns / 100.0 + 1.0, "{got_ns}, {expected_ns}");
}

#[test]
fn a_law_by_size_comes_back_and_nothing_else() {
    let profile = profile(PLAIN);
    for size_bytes in [512, 100 << 10, 2 * MIB, 3 * MIB, 100 * MIB, 700 * MIB, GIB, 3 * GIB] {
        let cost = |call| profile.cost_ns(call, size_bytes);
        assert_near(cost(DeviceCall::Malloc), malloc_ns(size_bytes) as f64);
        assert_near(cost(DeviceCall::Free), free_ns(size_bytes) as f64);
        // Flat below the smallest piece of virtual memory.
        assert_near(cost(DeviceCall::Create), create_ns(size_bytes.max(2 * MIB)) as f64);
        assert_near(cost(DeviceCall::Release), RELEASE_NS as f64);
        assert_near(cost(DeviceCall::AddressReserve), RESERVE_NS as f64);
        assert_near(cost(DeviceCall::AddressFree), ADDRESS_FREE_NS as f64);
        assert_near(cost(DeviceCall::Map), MAP_NS as f64);
        assert_near(cost(DeviceCall::Unmap), UNMAP_NS as f64);
        assert_near(cost(DeviceCall::SetAccess), ACCESS_NS as f64);
        assert_near(
            profile.median_ns(DeviceCall::Malloc, size_bytes),
            malloc_ns(size_bytes) as f64,
        );
    }
    assert!(profile.tails.values().flatten().all(|point| point.1 == 0.0), "{profile:?}");
    for points in profile.calls.values().chain(profile.tails.values()) {
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "{points:?}");
    }
    let text = profile.to_json().expect("plain data");
    assert!(CostProfile::from_json(&text).is_ok(), "{text}");
}

/// One call in 37 takes 20 ms more: 541 µs a call on average, which medians do not see and means
/// must.
#[test]
fn outliers_move_means_and_no_medians() {
    let profile = profile(Law { outlier_every: 37, ..PLAIN });
    let late_ns = 20_000_000.0 / 37.0;
    let mut tail_ns = Vec::new();
    for size_bytes in [MIB, 2 * MIB, 8 * MIB, 20 * MIB, 64 * MIB, 128 * MIB] {
        for (call, ns) in [
            (DeviceCall::Malloc, malloc_ns(size_bytes)),
            (DeviceCall::SetAccess, ACCESS_NS),
            (DeviceCall::Map, MAP_NS),
        ] {
            assert_near(profile.median_ns(call, size_bytes), ns as f64);
            tail_ns.push(profile.cost_ns(call, size_bytes) - ns as f64);
        }
    }
    // Whose call it is, chance decides.
    let mean_ns = tail_ns.iter().sum::<f64>() / tail_ns.len() as f64;
    assert!((mean_ns / late_ns - 1.0).abs() < 0.2, "{mean_ns}, not {late_ns}");
}

/// Every fourth large malloc of memory that was freed just before waits 7 ms: 1.75 ms on average.
#[test]
fn a_tail_of_two_modes_comes_back_as_a_mean() {
    // 16 GiB may be held, which 40 blocks do not fit into: what is taken was freed before, but for
    // what the first to come of a round find unused.
    let measured = measured(32 * GIB, Law { wait_every: 4, ..PLAIN }).0;
    let profile = measured.profile(names()).expect("a profile");
    for mib in [256, 512, 768, 1024] {
        let malloc = (DeviceCall::Malloc, mib * MIB);
        assert_near(profile.median_ns(malloc.0, malloc.1), malloc_ns(malloc.1) as f64);
        let expected_ns = (malloc_ns(malloc.1) + WAIT_NS / 4) as f64;
        let got_ns = profile.cost_ns(malloc.0, malloc.1);
        assert!((got_ns / expected_ns - 1.0).abs() < 0.05, "{mib}: {got_ns}, not {expected_ns}");
    }
    for mib in [2, 20, 192] {
        assert_near(profile.cost_ns(DeviceCall::Malloc, mib * MIB), malloc_ns(mib * MIB) as f64);
        assert_near(profile.cost_ns(DeviceCall::Create, mib * MIB), create_ns(mib * MIB) as f64);
    }
}

/// A minute, of which 50 ms count.
#[test]
fn a_freak_does_not_rule_a_mean() {
    let law = Law { freak_at_ns: 300_000_000, ..PLAIN };
    let (mut device, clock_ns) = Timed::new(64 * GIB, law);
    let options = CalibrateOptions { warm_ns: 0, settle_ns: 0, ..options() };
    let calibration = calibrate(&mut device, || clock_ns.get(), &options, &mut |_| {});
    let calibration = calibration.expect("measures");
    let slowest = calibration.rows.iter().max_by(|a, b| a.max_ns.total_cmp(&b.max_ns));
    let slowest = slowest.expect("rows");
    assert!(slowest.max_ns > 6e9, "{slowest:?}");
    let tail_ns = slowest.mean_ns - slowest.median_ns;
    let expected_ns = (50e6 - slowest.median_ns) / slowest.samples as f64;
    assert!((tail_ns - expected_ns).abs() < 1.0 + expected_ns / 1e6, "{slowest:?}");
}

/// A GPU that was idle answers slowly for its first 20 ms.
#[test]
fn an_idle_gpu_is_warm_before_anything_counts() {
    let profile = profile(Law { cold_ns: 20_000_000, ..PLAIN });
    for size_bytes in [2 * MIB, 20 * MIB, 512 * MIB] {
        assert_near(profile.cost_ns(DeviceCall::Malloc, size_bytes), malloc_ns(size_bytes) as f64);
    }
}

/// Large blocks come often enough for their tail to show.
#[test]
fn large_blocks_come_often_and_fill_the_card() {
    let (mut device, clock_ns) = Timed::new(128 * GIB, PLAIN);
    let options = CalibrateOptions { rounds_max: 5, settle_ns: 0, ..CalibrateOptions::default() };
    let measured = calibrate(&mut device, || clock_ns.get(), &options, &mut |_| {});
    let rows = measured.expect("measures").rows;
    for mib in [256, 1024, 2048, 4096] {
        for call in [DeviceCall::Malloc, DeviceCall::Free, DeviceCall::Create, DeviceCall::Release]
        {
            let is_of = |row: &&CostRow| row.call == call && row.size_bytes == mib * MIB;
            let row = rows.iter().find(is_of).expect("a row");
            assert!(row.case == Case::Mixed && row.samples >= 40, "{row:?}");
        }
    }
    // In two of five rounds three of each: some of them at once, 60% of the card held.
    for gib in [8, 16, 32, 64] {
        let is_of = |row: &&CostRow| row.call == DeviceCall::Malloc && row.size_bytes == gib * GIB;
        assert_eq!(rows.iter().filter(is_of).map(|row| row.samples).sum::<u64>(), 6, "{gib}");
    }
    let peak_gib = device.peak_bytes as f64 / GIB as f64;
    assert!((64.0..=76.8).contains(&peak_gib), "{peak_gib}");
}

/// Allocators that do all that matters: mallocs small and large, many ranges.
fn program(device: &mut impl Device) {
    let mut mallocs = Vec::new();
    for turn in 0..1200u64 {
        let size_bytes = [20 * MIB, 2 * MIB, 100 * MIB, 512, 640 * MIB][turn as usize % 5];
        mallocs.push(device.malloc(size_bytes).expect("fits"));
        if turn % 3 == 2 {
            device.free(mallocs.swap_remove(turn as usize / 3 % mallocs.len())).expect("held");
        }
    }
    for turn in 0..40u64 {
        let (piece_bytes, pieces) =
            [(2 * MIB, 100), (20 * MIB, 7), (128 * MIB, 1)][turn as usize % 3];
        let total_bytes = piece_bytes * pieces;
        let range = device.address_reserve(total_bytes).expect("addresses");
        let mut handles = Vec::new();
        device.create_each(piece_bytes, pieces, &mut handles).expect("fits");
        device.map_each(range, piece_bytes, &handles, &mut 0).expect("maps");
        device.unmap(range, total_bytes).expect("mapped");
        for handle in handles {
            device.release(handle).expect("held");
        }
        device.address_free(range, total_bytes).expect("reserved");
    }
}

/// The claim that matters: what a simulated replay is charged is what the device takes.
#[test]
fn a_program_costs_by_the_profile_what_it_takes() {
    let law = Law { wait_every: 5, ..PLAIN };
    let profile = profile(law);
    let (mut real, clock_ns) = Timed::new(512 * GIB, law);
    program(&mut real);
    let sim = Sim::new(Some(512 * GIB), None, Addresses::ascending());
    let mut simulated = Counting::new(sim, profile);
    program(&mut simulated);
    let (took_ns, charged_ns) = (clock_ns.get() as f64, simulated.cost_ns() as f64);
    assert!((charged_ns / took_ns - 1.0).abs() < 0.03, "{charged_ns}, not {took_ns}");
}

#[test]
fn all_is_given_back_and_what_does_not_fit_is_left_out() {
    let (calibration, device) = measured(GIB, PLAIN);
    assert_eq!(device.sim.memory_info().free_bytes, GIB);
    assert_eq!(device.held_bytes, 0);
    // Beside it 2 MiB that keep the GPU awake are there when nothing else is.
    assert!(device.peak_bytes <= GIB / 2, "{}", device.peak_bytes);
    // Half of it may be used: two mallocs of 256 MiB just fit.
    let left_out = |what, mib| {
        calibration.left_out.iter().any(|left| left.what == what && left.size_bytes == mib * MIB)
    };
    assert!(left_out("mallocs", 512) && left_out("pieces", 1024), "{:?}", calibration.left_out);
    assert!(!left_out("mallocs", 256), "{:?}", calibration.left_out);
    assert!(calibration.profile(names()).is_ok());
}

#[test]
fn a_device_without_memory_is_an_error_with_what_is_free() {
    let (mut device, clock_ns) = Timed::new(4 * MIB, PLAIN);
    let error = calibrate(&mut device, || clock_ns.get(), &options(), &mut |_| {});
    assert_eq!(error, Err(CalibrateError::TooLittleMemory { free_bytes: 4 * MIB }));
}

#[test]
fn time_runs_out() {
    // Cold for half of the first mallocs, so that their medians move.
    let law = Law { cold_ns: 30_000_000, ..PLAIN };
    let (mut device, clock_ns) = Timed::new(64 * GIB, law);
    let options = CalibrateOptions { budget_ns: 1, warm_ns: 0, settle_ns: 0, ..options() };
    let mut told = Vec::new();
    let calibration =
        calibrate(&mut device, || clock_ns.get(), &options, &mut |progress| told.push(progress));
    let calibration = calibration.expect("measures");
    assert_eq!((calibration.rounds, told.len()), (1, 1));
    assert!(calibration.unsettled > 0);
}

#[test]
fn quantiles_lie_on_the_line_between_samples() {
    let sorted = [1.0, 2.0, 3.0, 10.0];
    assert_eq!(quantile(&sorted, 0.5), 2.5);
    assert_eq!(quantile(&sorted, 1.0), 10.0);
    assert_eq!(quantile(&sorted[..1], 0.9), 1.0);
    assert!(stands_still(&[100.0, 100.0, 101.0, 100.0]));
    assert!(!stands_still(&[100.0, 100.0, 9000.0, 9000.0, 9000.0]));
}

/// One native malloc of 2 GiB takes 40 + 2048/4 = 552 µs; 16 pieces of 128 MiB: creates of 35.6 µs,
/// maps of 1.1 µs, accesses of 27 µs. That every fourth malloc waits is not in the medians.
#[test]
fn the_ratio_table_is_what_a_hand_calculation_says() {
    let ratios = built_ratios(&profile(Law { wait_every: 4, ..PLAIN }));
    let row = ratios[1];
    assert_eq!(row.piece_bytes, 128 * MIB);
    for (got, expected) in [
        (row.address_reserve, 0.9 / 552.0),
        (row.create, 16.0 * 35.6 / 552.0),
        (row.map, 16.0 * 1.1 / 552.0),
        (row.set_access, 16.0 * 27.0 / 552.0),
        (row.total, (0.9 + 16.0 * (35.6 + 1.1 + 27.0)) / 552.0),
    ] {
        assert!((got - expected).abs() < 1e-3 * expected, "{got}, not {expected}");
    }
}
