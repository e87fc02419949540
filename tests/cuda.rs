//! The device room on a GPU: on the fake driver everywhere, on a real one when asked.
//!
//! A driver is loaded once in a process, from where `LD_LIBRARY_PATH` pointed when it started. So
//! each test starts itself again in a process of its own, with the fake driver, and afterwards looks
//! at what the driver says was left behind.
//!
//! On a machine with a GPU: `cargo test --test main cuda:: -- --ignored`.

use std::path::Path;
use std::process::Command;

use fraglab::device::cuda::{Cuda, CudaError, CudaEvents, CudaTouch, EventId};
use fraglab::device::sim::addresses::Addresses;
use fraglab::device::{
    Device, DeviceCall, DeviceError, Extent, Limited, Measured, PhysicalHandle, Sim, Touch,
};
use fraglab::units::MIB;

use crate::common::{Rng, fake_driver};

/// Set in the process that a test starts.
const INSIDE: &str = "FRAGLAB_TEST_INSIDE";
/// What the driver says when everything came back.
const NOTHING: &str = "mallocs 0 handles 0 mappings 0 reservations 0 contexts 0 modules 0 \
                       streams 0 events 0";
/// A page of the virtual memory calls.
const PAGE: u64 = 2 * MIB;

/// Which driver the process of a test gets.
#[derive(PartialEq)]
enum Driver {
    Fake,
    Real,
    Missing,
}

/// A process of its own for a test.
struct Process {
    test: &'static str,
    driver: Driver,
    settings: Vec<(&'static str, &'static str)>,
    leaves: &'static str,
}

impl Process {
    fn of(test: &'static str) -> Process {
        Process { test, driver: Driver::Fake, settings: Vec::new(), leaves: NOTHING }
    }

    fn with(mut self, name: &'static str, value: &'static str) -> Process {
        self.settings.push((name, value));
        self
    }

    fn on(self, driver: Driver) -> Process {
        Process { driver, ..self }
    }

    /// What is left behind, if not nothing.
    fn leaving(self, leaves: &'static str) -> Process {
        Process { leaves, ..self }
    }

    /// Runs the body in a process of its own.
    fn run(self, body: impl FnOnce()) {
        if std::env::var_os(INSIDE).is_some() {
            return body();
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let leaks = folder.path().join("leaks");
        let (_, module) = module_path!().split_once("::").expect("the test binary's name first");
        let mut child = Command::new(std::env::current_exe().expect("this test binary"));
        for name in fake_driver::settings_around() {
            child.env_remove(name);
        }
        child
            .args([&format!("{module}::{}", self.test), "--exact", "--nocapture"])
            .arg("--include-ignored")
            .env(INSIDE, "1")
            .env("FAKE_CUDA_LEAK_CHECK", &leaks)
            .envs(self.settings);
        match self.driver {
            Driver::Fake => match fake_driver::library_dir() {
                Some(dir) => child.env("LD_LIBRARY_PATH", dir),
                None => return,
            },
            Driver::Real => &mut child,
            Driver::Missing => child.env_remove("LD_LIBRARY_PATH"),
        };
        let output = child.output().expect("starts");
        let (text, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}{text}{errors}", output.status);
        assert!(text.contains("1 passed"), "the test was not found: {text}");
        if self.driver == Driver::Fake {
            let left = std::fs::read_to_string(&leaks).expect("the driver was used");
            assert_eq!(left.trim_end(), self.leaves);
        }
    }
}

fn open() -> Cuda {
    Cuda::open(0).expect("a GPU")
}

/// A range of `pieces`, mapped one behind the other.
fn range_of<D: Device>(device: &mut D, pieces: &[PhysicalHandle]) -> u64 {
    let range = device.address_reserve(PAGE * pieces.len() as u64).expect("addresses");
    let mut mapped = 0;
    device.map_each(range, PAGE, pieces, &mut mapped).expect("maps");
    range
}

fn pieces_of<D: Device>(device: &mut D, count: u64) -> Vec<PhysicalHandle> {
    let mut pieces = Vec::new();
    device.create_each(PAGE, count, &mut pieces).expect("fits");
    pieces
}

// ------------------------------------------------------------------------------------------------
// Two devices that are asked the same.

/// A result without addresses, which differ.
fn shape<T>(result: &Result<T, DeviceError>) -> String
where
    T: std::fmt::Debug,
{
    match result {
        Ok(answer) => format!("{answer:?}"),
        Err(DeviceError::Invalid { call, size_bytes, .. }) => {
            format!("invalid {call:?} of {size_bytes}")
        }
        Err(error) => format!("{error:?}"),
    }
}

/// Two devices and what they gave out, at the same index.
struct Twins<'a, A, B> {
    one: &'a mut A,
    other: &'a mut B,
    mallocs: Vec<(u64, u64)>,
    /// Bases and pages.
    ranges: Vec<(u64, u64, u64)>,
    handles: Vec<PhysicalHandle>,
    /// Handles that were released: their slots may be in use again.
    gone: Vec<PhysicalHandle>,
}

/// Asks both devices the same and compares the answers, addresses aside.
macro_rules! both {
    ($twins:expr, $call:ident($($argument:expr),*)) => {{
        let (first, second) = ($twins.one.$call($($argument.0),*), $twins.other.$call($($argument.1),*));
        assert_eq!(shape(&first), shape(&second), stringify!($call));
        (first, second)
    }};
}

/// The same number for both.
fn twice<T: Copy>(value: T) -> (T, T) {
    (value, value)
}

impl<A: Device, B: Device> Twins<'_, A, B> {
    fn malloc(&mut self, rng: &mut Rng) {
        let size = [512, 4096, MIB / 2, MIB, 3 * MIB, 20 * MIB][rng.below(6)];
        let (first, second) = (self.one.malloc(size), self.other.malloc(size));
        let fits = first.is_ok();
        assert_eq!(shape(&first.map(|_| ())), shape(&second.map(|_| ())), "malloc {size}");
        if fits {
            self.mallocs.push((first.expect("fits"), second.expect("fits")));
        }
    }

    fn free(&mut self, rng: &mut Rng) {
        if self.mallocs.is_empty() {
            return;
        }
        let at = rng.below(self.mallocs.len());
        let address = self.mallocs[at];
        if rng.below(8) == 0 {
            both!(self, free((address.0 + 64, address.1 + 64))).0.expect_err("unknown");
            return;
        }
        self.mallocs.swap_remove(at);
        both!(self, free(address)).0.expect("known");
        both!(self, free(address)).0.expect_err("free already");
    }

    fn reserve(&mut self, rng: &mut Rng) {
        let pages = 1 + rng.below(12) as u64;
        let bases =
            (self.one.address_reserve(pages * PAGE), self.other.address_reserve(pages * PAGE));
        self.ranges.push((bases.0.expect("room"), bases.1.expect("room"), pages));
    }

    fn create(&mut self, rng: &mut Rng) {
        let size = [PAGE, PAGE, PAGE, 3 * PAGE, 8 * PAGE, MIB][rng.below(6)];
        if let (Ok(handle), _) = both!(self, create(twice(size))) {
            self.handles.push(handle);
        }
    }

    fn release(&mut self, rng: &mut Rng) {
        if self.handles.is_empty() {
            return;
        }
        let handle = self.handles.swap_remove(rng.below(self.handles.len()));
        both!(self, release(twice(handle))).0.expect("held");
        self.gone.push(handle);
        let gone = self.gone[rng.below(self.gone.len())];
        both!(self, release(twice(gone))).0.expect_err("released already");
    }

    /// A range of pages of a reservation, sometimes one that ends outside.
    fn pages(&self, rng: &mut Rng) -> Option<((u64, u64), u64)> {
        if self.ranges.is_empty() {
            return None;
        }
        let (one, other, pages) = self.ranges[rng.below(self.ranges.len())];
        let first = rng.below(pages as usize) as u64 * PAGE;
        let size = (1 + rng.below(4) as u64) * PAGE;
        Some(((one + first, other + first), size))
    }

    fn map(&mut self, rng: &mut Rng) {
        let Some((address, _)) = self.pages(rng) else { return };
        if self.handles.is_empty() {
            return;
        }
        let handle = self.handles[rng.below(self.handles.len())];
        both!(self, map(address, twice(handle))).0.ok();
    }

    fn change(&mut self, rng: &mut Rng) {
        let Some((address, size)) = self.pages(rng) else { return };
        if rng.below(2) == 0 {
            both!(self, set_access(address, twice(size))).0.ok();
        } else {
            both!(self, unmap(address, twice(size))).0.ok();
        }
    }

    fn look(&self, rng: &mut Rng) {
        assert_eq!(self.one.memory_info(), self.other.memory_info());
        let Some((address, size)) = self.pages(rng) else { return };
        let (half, size) = (MIB * rng.below(2) as u64, size.min(PAGE));
        let first = memory(self.one, address.0 + half, size);
        let second = memory(self.other, address.1 + half, size);
        assert_eq!(first, second);
    }

    fn unreserve(&mut self, rng: &mut Rng) {
        if self.ranges.is_empty() {
            return;
        }
        let at = rng.below(self.ranges.len());
        let (one, other, pages) = self.ranges[at];
        if both!(self, address_free((one, other), twice(pages * PAGE))).0.is_ok() {
            self.ranges.swap_remove(at);
        }
    }
}

fn memory<D: Device>(device: &D, address: u64, size_bytes: u64) -> Option<Vec<Extent>> {
    let mut extents = Vec::new();
    device.backing(address, size_bytes, &mut |extent| extents.push(extent)).then_some(extents)
}

/// Asks two devices the same `steps` questions, some of which make no sense.
fn ask_both<A: Device, B: Device>(one: &mut A, other: &mut B, seed: u64, steps: u32) {
    let mut rng = Rng(seed);
    let mut twins = Twins {
        one,
        other,
        mallocs: Vec::new(),
        ranges: Vec::new(),
        handles: Vec::new(),
        gone: Vec::new(),
    };
    for _ in 0..steps {
        match rng.below(16) {
            0 | 1 => twins.malloc(&mut rng),
            2 | 3 => twins.free(&mut rng),
            4 => twins.reserve(&mut rng),
            5 | 6 => twins.create(&mut rng),
            7 => twins.release(&mut rng),
            8..=10 => twins.map(&mut rng),
            11 | 12 => twins.change(&mut rng),
            13 => twins.unreserve(&mut rng),
            _ => twins.look(&mut rng),
        }
    }
}

fn sim(capacity_bytes: u64) -> Sim {
    Sim::new(Some(capacity_bytes), None, Addresses::ascending())
}

#[test]
fn a_gpu_answers_as_the_simulated_device_does() {
    let process = Process::of("a_gpu_answers_as_the_simulated_device_does");
    process.with("FAKE_CUDA_MEMORY", "134217728").run(|| {
        for seed in 0..20 {
            ask_both(&mut sim(128 * MIB), &mut open(), seed, 3000);
        }
    });
}

#[test]
fn a_limited_device_answers_as_a_smaller_one_does() {
    for seed in 0..20 {
        let large = Sim::new(None, None, Addresses::ascending());
        ask_both(&mut sim(101 * MIB), &mut Limited::new(large, 101 * MIB), seed, 3000);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_real_gpu_answers_as_the_simulated_device_does() {
    let process = Process::of("a_real_gpu_answers_as_the_simulated_device_does");
    process.on(Driver::Real).run(|| {
        for seed in 0..5 {
            ask_both(&mut sim(128 * MIB), &mut Limited::new(open(), 128 * MIB), seed, 1000);
        }
    });
}

// ------------------------------------------------------------------------------------------------
// What is left behind.

#[test]
fn what_is_held_goes_back_when_the_device_goes() {
    Process::of("what_is_held_goes_back_when_the_device_goes").run(hold_and_drop);
}

fn hold_and_drop() {
    let mut device = open();
    let before = device.memory_info();
    device.malloc(100).expect("fits");
    device.malloc(5 * MIB).expect("fits");
    let pieces = pieces_of(&mut device, 3);
    range_of(&mut device, &[pieces[0], pieces[1], pieces[0]]);
    range_of(&mut device, &pieces[1..]);
    device.release(pieces[2]).expect("held");
    device.address_reserve(PAGE).expect("addresses");
    assert!(device.memory_info().free_bytes < before.free_bytes);
    drop(device);
    assert_eq!(open().memory_info(), before);
}

#[test]
fn a_panic_leaves_nothing_behind() {
    Process::of("a_panic_leaves_nothing_behind").run(|| {
        let end = std::panic::catch_unwind(|| {
            let mut device = open();
            let mut touch = device.toucher().expect("kernels");
            let pieces = pieces_of(&mut device, 2);
            let range = range_of(&mut device, &pieces);
            touch.fill(range, 2 * PAGE, 1).expect("mapped");
            panic!("as an allocator might");
        });
        end.expect_err("panics");
    });
}

/// That the driver's word on leaks can be anything but "nothing".
#[test]
fn what_is_forgotten_shows() {
    let process = Process::of("what_is_forgotten_shows").leaving(
        "mallocs 1 handles 2 mappings 3 reservations 1 contexts 1 modules 0 streams 0 events 0",
    );
    process.run(|| {
        let mut device = open();
        device.malloc(512).expect("fits");
        let pieces = pieces_of(&mut device, 3);
        range_of(&mut device, &pieces);
        device.release(pieces[1]).expect("held");
        std::mem::forget(device);
    });
}

// ------------------------------------------------------------------------------------------------
// What is in the memory.

#[test]
fn memory_that_is_shared_or_changed_shows() {
    Process::of("memory_that_is_shared_or_changed_shows").run(share_and_change);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_that_is_shared_or_changed_shows_on_a_real_gpu() {
    let process = Process::of("memory_that_is_shared_or_changed_shows_on_a_real_gpu");
    process.on(Driver::Real).run(share_and_change);
}

fn share_and_change() {
    let mut device = open();
    let mut touch = device.toucher().expect("kernels");
    let words = PAGE / 4;
    let pieces = pieces_of(&mut device, 4);
    let whole = range_of(&mut device, &pieces[..2]);
    touch.fill(whole, 2 * PAGE, 1).expect("mapped");
    assert_eq!(touch.check(whole, 2 * PAGE, 1), Ok(None));
    let word = |touch: &mut CudaTouch, address| {
        let mut bytes = [0; 4];
        touch.copy_to_host(address, &mut bytes).expect("mapped");
        u32::from_le_bytes(bytes)
    };

    // One bit is another in word 300,000 and in the last.
    let last = 2 * PAGE - 4;
    for at in [1_200_000, last] {
        let flipped = word(&mut touch, whole + at) ^ 0x10;
        touch.copy_from_host(whole + at, &flipped.to_le_bytes()).expect("mapped");
    }
    let found = touch.check(whole, 2 * PAGE, 1).expect("mapped").expect("two words differ");
    assert_eq!((found.words, found.offset_bytes), (2, 1_200_000));
    assert_eq!(found.expected ^ found.found, 0x10);
    assert_eq!(found.found, word(&mut touch, whole + 1_200_000));

    // Its second page is another range's first.
    let other = range_of(&mut device, &[pieces[1], pieces[2]]);
    touch.fill(whole, 2 * PAGE, 1).expect("mapped");
    touch.fill(other, 2 * PAGE, 2).expect("mapped");
    let found = touch.check(whole, 2 * PAGE, 1).expect("mapped").expect("a page is lost");
    assert_eq!(found.offset_bytes, PAGE);
    assert_eq!(found.found, word(&mut touch, other));
    // A word in 2^32 is the same by chance.
    assert!((words - 2..=words).contains(&found.words), "{found:?}");
    assert_eq!(touch.check(other, 2 * PAGE, 2), Ok(None));

    // One page twice in a range.
    let twice = range_of(&mut device, &[pieces[3], pieces[3]]);
    touch.fill(twice, 2 * PAGE, 3).expect("mapped");
    let found = touch.check(twice, 2 * PAGE, 3).expect("mapped").expect("a page is lost");
    assert!((words - 2..=words).contains(&found.words), "{found:?}");
    partial_words(&mut device, &mut touch);
}

/// What a size has beyond a multiple of 4 goes up to the next, and nothing beyond it.
fn partial_words<D: Device, T: Touch>(device: &mut D, touch: &mut T) {
    let address = device.malloc(4096).expect("fits");
    touch.copy_from_host(address, &[0xaa; 4096]).expect("mapped");
    touch.fill(address, 13, 9).expect("mapped");
    assert_eq!(touch.check(address, 13, 9), Ok(None));
    let mut bytes = [0; 4096];
    touch.copy_to_host(address, &mut bytes).expect("mapped");
    assert_eq!(bytes[16..], [0xaa; 4080]);
    assert_ne!(bytes[12..16], [0xaa; 4]);
    touch.fill(address, 0, 10).expect("nothing to do");
    assert_eq!(touch.check(address, 0, 11), Ok(None));
    assert_eq!(touch.check(address, 13, 9), Ok(None));
    assert!(touch.check(address, 12, 10).expect("mapped").is_some(), "another seed");
}

const BROKEN: &str =
    "mallocs 1 handles 1 mappings 1 reservations 1 contexts 0 modules 1 streams 1 events 0";

#[test]
fn an_address_without_memory_is_the_gpus_error() {
    // The driver refuses every call after that, and so everything stays: the toucher's malloc too.
    let process = Process::of("an_address_without_memory_is_the_gpus_error").leaving(BROKEN);
    process.run(touch_nothing);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_address_without_memory_is_a_real_gpus_error() {
    let process = Process::of("an_address_without_memory_is_a_real_gpus_error");
    process.on(Driver::Real).run(touch_nothing);
}

fn touch_nothing() {
    let mut device = open();
    let mut touch = device.toucher().expect("kernels");
    let range = device.address_reserve(2 * PAGE).expect("addresses");
    let piece = device.create(PAGE).expect("fits");
    device.map(range, piece).expect("maps");
    device.set_access(range, PAGE).expect("mapped");
    touch.fill(range, PAGE, 1).expect("mapped");
    let error = touch.fill(range, 2 * PAGE, 1).expect_err("half of it is not mapped");
    assert_eq!(
        (error.what, error.address, error.size_bytes, error.code),
        ("write", range, 2 * PAGE, 700)
    );
    assert_eq!(
        device.malloc(512),
        Err(DeviceError::Driver { call: DeviceCall::Malloc, code: 700 })
    );
    assert!(device.synchronize().expect_err("nothing works").to_string().contains("700"));
}

#[test]
fn memory_that_may_not_be_accessed_is_the_gpus_error() {
    let process = Process::of("memory_that_may_not_be_accessed_is_the_gpus_error").leaving(BROKEN);
    process.run(|| {
        let mut device = open();
        let mut touch = device.toucher().expect("kernels");
        let range = device.address_reserve(PAGE).expect("addresses");
        let piece = device.create(PAGE).expect("fits");
        device.map(range, piece).expect("maps");
        assert_eq!(touch.check(range, PAGE, 1).map_err(|error| error.code), Err(700));
    });
}

// ------------------------------------------------------------------------------------------------
// What cannot be opened, and what the driver refuses.

#[test]
fn without_a_driver_there_is_one_clear_error() {
    let process = Process::of("without_a_driver_there_is_one_clear_error").on(Driver::Missing);
    process.run(|| match Cuda::open(0) {
        Err(CudaError::NoDriver) => {
            assert!(CudaError::NoDriver.to_string().starts_with("no NVIDIA driver here: "));
            assert_eq!(Cuda::device_count(), Err(CudaError::NoDriver));
        }
        end => eprintln!("skipped: this machine has a driver ({end:?})"),
    });
}

#[test]
fn a_gpu_says_what_it_is() {
    Process::of("a_gpu_says_what_it_is").with("FAKE_CUDA_DEVICES", "2").run(|| {
        let device = Cuda::open(1).expect("the second");
        let info = device.info();
        assert_eq!((info.name.as_str(), info.ordinal), ("Fake GPU 1", 1));
        assert_eq!((info.total_bytes, info.granularity_bytes), (8 << 30, PAGE));
        assert_eq!(info.compute_capability, (9, 0));
        assert_eq!(Cuda::device_count(), Ok(2));
        let error = Cuda::open(2).expect_err("there are two").to_string();
        assert_eq!(error, "there is no GPU 2: there are 2, 0 to 1");
    });
}

#[test]
fn no_gpu_is_an_error_of_its_own() {
    let process = Process::of("no_gpu_is_an_error_of_its_own").with("FAKE_CUDA_DEVICES", "0");
    process.run(|| assert!(matches!(Cuda::open(0), Err(CudaError::NoGpu))));
}

#[test]
fn a_unit_that_does_not_divide_ours_is_refused() {
    let process = Process::of("a_unit_that_does_not_divide_ours_is_refused");
    process.with("FAKE_CUDA_GRANULARITY", "4194304").run(|| {
        let granularity_bytes = 4 * MIB;
        let error = CudaError::Granularity { ordinal: 0, granularity_bytes };
        assert_eq!(Cuda::open(0).map(|_| ()), Err(error));
    });
}

#[test]
fn a_smaller_unit_serves() {
    let process = Process::of("a_smaller_unit_serves").with("FAKE_CUDA_GRANULARITY", "65536");
    process.run(|| {
        let mut device = open();
        assert_eq!(device.info().granularity_bytes, 65_536);
        let pieces = pieces_of(&mut device, 2);
        range_of(&mut device, &pieces);
    });
}

#[test]
fn a_gpu_without_virtual_memory_still_has_mallocs() {
    let process = Process::of("a_gpu_without_virtual_memory_still_has_mallocs");
    process.with("FAKE_CUDA_VMM", "off").run(|| {
        let mut device = open();
        assert_eq!(device.info().granularity_bytes, 0);
        let address = device.malloc(100).expect("fits");
        assert_eq!(device.free(address), Ok(100));
        let refused = |call| DeviceError::Driver { call, code: 801 };
        let (create, reserve) = (device.create(PAGE), device.address_reserve(PAGE));
        assert_eq!(create, Err(refused(DeviceCall::Create)));
        assert_eq!(reserve, Err(refused(DeviceCall::AddressReserve)));
    });
}

#[test]
fn answers_of_the_driver_keep_their_meaning() {
    let process = Process::of("answers_of_the_driver_keep_their_meaning").with(
        "FAKE_CUDA_FAIL",
        "malloc 1, address_reserve 1, create 2, map 1, unmap 1 1, set_access 1 999, free 1 4",
    );
    process.run(|| {
        let mut device = open();
        let free_bytes = 8 << 30;
        let none_left = |call, requested_bytes, free_bytes| DeviceError::OutOfMemory {
            call,
            requested_bytes,
            free_bytes,
        };
        let answered = |call, code| DeviceError::Driver { call, code };
        let malloc = device.malloc(100);
        assert_eq!(malloc, Err(none_left(DeviceCall::Malloc, 100, free_bytes)));
        let reserve = device.address_reserve(PAGE);
        assert_eq!(reserve, Err(DeviceError::OutOfAddresses { requested_bytes: PAGE }));
        let mut pieces = Vec::new();
        let create = device.create_each(PAGE, 2, &mut pieces);
        let free_bytes = free_bytes - PAGE;
        assert_eq!(create, Err(none_left(DeviceCall::Create, PAGE, free_bytes)));
        assert_eq!(pieces.len(), 1, "the first is there");

        let range = device.address_reserve(PAGE).expect("addresses");
        let map = device.map(range, pieces[0]);
        assert_eq!(map, Err(none_left(DeviceCall::Map, PAGE, free_bytes)));
        device.map(range, pieces[0]).expect("nothing is mapped there yet");
        let access = device.set_access(range, PAGE);
        assert_eq!(access, Err(answered(DeviceCall::SetAccess, 999)));
        assert_eq!(device.unmap(range, PAGE), Err(answered(DeviceCall::Unmap, 1)));
        assert_eq!(device.unmap(range, PAGE), Ok(1), "it was still mapped");

        let address = device.malloc(100).expect("fits");
        assert_eq!(device.free(address), Err(answered(DeviceCall::Free, 4)));
        assert_eq!(device.free(address), Ok(100), "it was still there");
    });
}

#[test]
fn sizes_and_addresses_beyond_reason_are_refused() {
    Process::of("sizes_and_addresses_beyond_reason_are_refused").run(|| {
        let mut device = open();
        assert!(device.malloc(u64::MAX).is_err());
        assert!(device.malloc(1 << 50).is_err());
        assert!(device.create(u64::MAX / PAGE * PAGE).is_err());
        assert!(device.address_reserve(1 << 62).is_err());
        let piece = device.create(PAGE).expect("fits");
        for address in [0, u64::MAX, u64::MAX - PAGE + 1] {
            assert!(device.map(address, piece).is_err());
            assert!(device.unmap(address, PAGE).is_err());
            assert!(device.set_access(address, u64::MAX).is_err());
            assert!(device.address_free(address, PAGE).is_err());
        }
        assert!(device.release(PhysicalHandle(7)).is_err());
    });
}

// ------------------------------------------------------------------------------------------------
// Time, events, and who else lives in the process.

#[test]
fn the_clock_sees_every_call() {
    let process = Process::of("the_clock_sees_every_call");
    process.with("FAKE_CUDA_LATENCY", "on").with("FAKE_CUDA_FAIL", "malloc 2").run(|| {
        let mut device = Measured::new(open());
        let address = device.malloc(64 * MIB).expect("fits");
        device.malloc(64 * MIB).expect_err("injected");
        device.free(address).expect("known");
        let pieces = pieces_of(&mut device, 3);
        let range = range_of(&mut device, &pieces);
        device.unmap(range, 3 * PAGE).expect("mapped");
        let calls = *device.calls();
        let count = |call| (calls.of(call).count, calls.of(call).refused);
        assert_eq!(count(DeviceCall::Malloc), (1, 1));
        assert_eq!(count(DeviceCall::Create), (3, 0));
        assert_eq!(count(DeviceCall::Map), (3, 0));
        assert_eq!(count(DeviceCall::SetAccess), (3, 0));
        assert_eq!(count(DeviceCall::Unmap), (1, 0));
        // 40 µs and a quarter for each MiB; 30 and 0.15; 8 and 0.05; 15 a piece and 0.01.
        let at_least = |call, us: f64| assert!(calls.of(call).ns as f64 >= 1e3 * us, "{call:?}");
        at_least(DeviceCall::Malloc, 56.0);
        at_least(DeviceCall::Free, 39.6);
        at_least(DeviceCall::Create, 3.0 * 8.1);
        at_least(DeviceCall::Unmap, 45.06);
        let sum: u64 = calls.each().map(|(_, times)| times.ns).sum();
        assert_eq!((calls.total().count, calls.total().ns), (3 * 3 + 4, sum));
    });
}

#[test]
fn a_moment_passes_and_its_event_serves_the_next() {
    let process = Process::of("a_moment_passes_and_its_event_serves_the_next");
    // Two moments at once at most: two events, which are forgotten so that they show.
    let left =
        "mallocs 0 handles 0 mappings 0 reservations 0 contexts 1 modules 0 streams 0 events 2";
    process.with("FAKE_CUDA_BUSY", "2").leaving(left).run(moments);
}

/// The moment that the default stream has come to.
#[allow(unsafe_code)]
fn record(events: &mut CudaEvents) -> EventId {
    // SAFETY: the default stream is always there.
    unsafe { events.record(0) }.expect("recorded")
}

fn moments() {
    let mut events = open().events();
    let first = record(&mut events);
    assert_eq!(events.is_done(first), Ok(false));
    assert_eq!(events.is_done(first), Ok(false));
    let second = record(&mut events);
    assert_eq!(events.is_done(first), Ok(true));
    assert_eq!(events.is_done(second), Ok(false));
    let third = record(&mut events);
    assert_eq!(events.is_done(first), Ok(true), "for good, though its event is in use again");
    assert_eq!(events.is_done(third), Ok(false));
    events.wait(third).expect("waits");
    assert_eq!(events.is_done(third), Ok(true));
    events.wait(second).expect("waits");
    for _ in 0..5 {
        let id = record(&mut events);
        events.wait(id).expect("waits");
    }
    std::mem::forget(events);
}

#[test]
fn a_toucher_and_events_outlive_their_device() {
    let process = Process::of("a_toucher_and_events_outlive_their_device");
    process.run(|| {
        let gone = open();
        let (mut touch, mut events) = (gone.toucher().expect("kernels"), gone.events());
        drop(gone);
        let mut device = open();
        let address = device.malloc(512).expect("fits");
        touch.fill(address, 512, 1).expect("mapped");
        assert_eq!(touch.check(address, 512, 1), Ok(None));
        let moment = record(&mut events);
        assert_eq!(events.is_done(moment), Ok(true));
    });
}

#[test]
fn the_thread_keeps_the_gpu_that_was_current() {
    let process = Process::of("the_thread_keeps_the_gpu_that_was_current");
    process.with("FAKE_CUDA_DEVICES", "2").run(|| {
        let current = || cudarc::driver::result::ctx::get_current().expect("the driver is there");
        let mut first = open();
        first.malloc(512).expect("fits");
        let before = current();
        assert!(before.is_some(), "a thread without a GPU keeps the first it uses");
        let mut second = Cuda::open(1).expect("the second");
        second.malloc(512).expect("fits");
        let mut touch = second.toucher().expect("kernels");
        let piece = second.create(PAGE).expect("fits");
        second.release(piece).expect("held");
        let address = second.malloc(512).expect("fits");
        touch.fill(address, 512, 1).expect("mapped");
        assert_eq!(current(), before);
        assert_eq!(first.memory_info().free_bytes, (8 << 30) - PAGE);
        // A thread that chose no GPU has not chosen the second by using its memory.
        let other = std::thread::spawn(move || {
            second.free(address).expect("known");
            current().is_none()
        });
        assert!(other.join().expect("ends"));
    });
}

#[test]
fn a_device_goes_to_another_thread() {
    Process::of("a_device_goes_to_another_thread").run(|| {
        let mut device = open();
        let address = device.malloc(512).expect("fits");
        let moved = std::thread::spawn(move || {
            assert_eq!(device.free(address), Ok(512));
            device
        });
        drop(moved.join().expect("ends"));
    });
}

// ------------------------------------------------------------------------------------------------
// The kernels' text.

#[test]
fn the_kernels_assemble_for_every_gpu() {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device/cuda/kernels.ptx");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for architecture in ["sm_75", "sm_80", "sm_90", "sm_100"] {
        let mut assembler = Command::new("ptxas");
        assembler
            .arg("-arch")
            .arg(architecture)
            .arg("-o")
            .arg(folder.path().join("out"))
            .arg(&text);
        match assembler.output() {
            Ok(output) => {
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{architecture}: {errors}");
            }
            Err(error) => return eprintln!("skipped: no ptxas here ({error})"),
        }
    }
}
