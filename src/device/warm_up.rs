//! Calls that wake a GPU before a clock runs.
//!
//! The first calls of a process pay for what is set up once, and a GPU that was idle answers slower
//! until its clocks have risen. Whoever measures makes some calls that do not count first.
//!
//! The one design decision: how long it takes is given, not how many calls. Clocks rise with time.

use std::time::{Duration, Instant};

use super::{Device, Touch};
use crate::units::MIB;

/// How long a card is warmed up. On an H200 that was idle, the calls of the first 20 to 30 ms took
/// 1.3 to 1.6 times as long as those that followed.
pub const WARM_UP_TIME: Duration = Duration::from_millis(150);

/// Sizes in which allocators commonly ask for memory, in bytes.
const SIZES_BYTES: [u64; 2] = [2 * MIB, 20 * MIB];

/// Obtains memory of `device` in every way there is and gives it back, over and over for `time`;
/// with `touch`, also writes to it.
///
/// Takes the device and drops it: a refusal ends the warm-up early, and what was held then goes
/// back too. Refusals are not told, as they show again where it matters.
pub fn warm_up<D: Device>(mut device: D, mut touch: Option<&mut dyn Touch>, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        for size_bytes in SIZES_BYTES {
            if round(&mut device, &mut touch, size_bytes).is_none() {
                return;
            }
        }
    }
}

/// Every kind of call once; nothing if one was refused.
fn round<D: Device>(
    device: &mut D,
    touch: &mut Option<&mut dyn Touch>,
    size_bytes: u64,
) -> Option<()> {
    let mut write = |address| match touch {
        Some(touch) => touch.fill(address, size_bytes, 0).ok(),
        None => Some(()),
    };
    let address = device.malloc(size_bytes).ok()?;
    write(address)?;
    device.free(address).ok()?;
    let address = device.address_reserve(size_bytes).ok()?;
    let piece = device.create(size_bytes).ok()?;
    device.map(address, piece).ok()?;
    device.set_access(address, size_bytes).ok()?;
    write(address)?;
    device.unmap(address, size_bytes).ok()?;
    device.release(piece).ok()?;
    device.address_free(address, size_bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::addresses::Addresses;
    use crate::device::{DeviceCall, Measured, Mismatch, Sim, TouchError};

    /// Where it was written.
    #[derive(Default)]
    struct Writes {
        sizes_bytes: Vec<u64>,
    }

    impl Touch for Writes {
        fn fill(&mut self, _address: u64, size_bytes: u64, _seed: u64) -> Result<(), TouchError> {
            self.sizes_bytes.push(size_bytes);
            Ok(())
        }

        fn check(&mut self, _: u64, _: u64, _: u64) -> Result<Option<Mismatch>, TouchError> {
            Ok(None)
        }

        fn copy_to_host(&mut self, _address: u64, _to: &mut [u8]) -> Result<(), TouchError> {
            Ok(())
        }

        fn copy_from_host(&mut self, _address: u64, _from: &[u8]) -> Result<(), TouchError> {
            Ok(())
        }
    }

    fn sim(bytes: u64) -> Measured<Sim> {
        Measured::new(Sim::new(Some(bytes), Some(bytes), Addresses::ascending()))
    }

    #[test]
    fn every_call_is_made_and_all_is_given_back() {
        let mut device = sim(64 * MIB);
        let mut writes = Writes::default();
        let done = round(&mut device, &mut Some(&mut writes), 20 * MIB);
        assert_eq!(done, Some(()));
        for call in DeviceCall::ALL {
            assert_eq!(device.calls().of(call).count, 1, "{}", call.name());
        }
        assert_eq!(device.memory_info().free_bytes, 64 * MIB);
        assert_eq!(writes.sizes_bytes, [20 * MIB, 20 * MIB], "memory of either kind");
    }

    #[test]
    fn it_takes_the_time_that_is_given() {
        let begun = Instant::now();
        warm_up(sim(64 * MIB), None, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
    }

    /// 20 MiB do not fit into 16: an hour is not waited for.
    #[test]
    fn a_refusal_ends_it() {
        assert_eq!(round(&mut sim(16 * MIB), &mut None, 20 * MIB), None);
        warm_up(sim(16 * MIB), None, Duration::from_secs(3600));
    }
}
