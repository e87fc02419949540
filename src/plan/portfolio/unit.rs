//! Offsets in 32 bits where they fit, in 64 where they do not: half the memory to read.

use std::fmt::Debug;
use std::ops::{Add, Sub};

/// A number of units.
pub(super) trait Unit:
    Copy + Ord + Add<Output = Self> + Sub<Output = Self> + Debug + Send + Sync
{
    /// Highest end of an item for which no sum made on the way overflows.
    const HEIGHT_MAX: u64;

    /// From 64 bits; the caller knows that it fits.
    fn of(units: u64) -> Self;

    /// To 64 bits.
    fn wide(self) -> u64;

    /// The next multiple.
    fn up_to(self, multiple: Self) -> Self;
}

impl Unit for u32 {
    const HEIGHT_MAX: u64 = 1 << 30;

    fn of(units: u64) -> u32 {
        units as u32
    }

    fn wide(self) -> u64 {
        u64::from(self)
    }

    fn up_to(self, multiple: u32) -> u32 {
        if multiple == 1 { self } else { self.div_ceil(multiple) * multiple }
    }
}

impl Unit for u64 {
    const HEIGHT_MAX: u64 = 1 << 62;

    fn of(units: u64) -> u64 {
        units
    }

    fn wide(self) -> u64 {
        self
    }

    fn up_to(self, multiple: u64) -> u64 {
        if multiple == 1 { self } else { self.div_ceil(multiple) * multiple }
    }
}
