//! What physical memory a device charges for what it gives out.
//!
//! Shared by the simulated device and by [`Limited`](super::Limited), so that both refuse the same
//! request. Memory comes in units of 2 MiB; mallocs under 1 MiB share units, and together are charged
//! their sum rounded up, as a driver packs small ranges into pages.
//!
//! ```text
//!   charged = ⌈Σ small mallocs / 2 MiB⌉ + Σ ⌈large malloc / 2 MiB⌉ + Σ created physical pieces
//! ```

use super::GRANULARITY_BYTES;

/// Mallocs below this many bytes share 2 MiB units.
const SHARED_UNIT_LIMIT_BYTES: u64 = 1 << 20;

/// Units in use, and how many may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Charge {
    /// Units that may be in use; `u64::MAX` without a limit.
    capacity_units: u64,
    units_in_use: u64,
    /// Bytes of the mallocs that share units.
    small_bytes: u64,
}

impl Charge {
    /// Nothing in use of `capacity_bytes`, or of an unlimited device.
    pub(super) fn new(capacity_bytes: Option<u64>) -> Charge {
        let capacity_units = capacity_bytes.map_or(u64::MAX, |bytes| bytes / GRANULARITY_BYTES);
        Charge { capacity_units, units_in_use: 0, small_bytes: 0 }
    }

    /// Units of a piece or of a large malloc.
    #[inline]
    pub(super) fn piece_units(size_bytes: u64) -> u64 {
        size_bytes.div_ceil(GRANULARITY_BYTES)
    }

    /// Units that a malloc of `size_bytes` would take more.
    #[inline]
    pub(super) fn malloc_units(&self, size_bytes: u64) -> u64 {
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            Self::piece_units(self.small_bytes + size_bytes) - Self::piece_units(self.small_bytes)
        } else {
            Self::piece_units(size_bytes)
        }
    }

    /// Whether so many more units are there.
    #[inline]
    pub(super) fn holds(&self, units: u64) -> bool {
        units <= self.capacity_units.saturating_sub(self.units_in_use)
    }

    /// Charges a malloc, also beyond the capacity.
    #[inline]
    pub(super) fn malloc(&mut self, size_bytes: u64) {
        self.units_in_use = self.units_in_use.saturating_add(self.malloc_units(size_bytes));
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            self.small_bytes += size_bytes;
        }
    }

    /// Takes back the charge of a malloc.
    #[inline]
    pub(super) fn free(&mut self, size_bytes: u64) {
        if size_bytes < SHARED_UNIT_LIMIT_BYTES {
            self.small_bytes -= size_bytes;
        }
        self.units_in_use -= self.malloc_units(size_bytes);
    }

    /// Charges a piece, also beyond the capacity.
    #[inline]
    pub(super) fn create(&mut self, size_bytes: u64) {
        self.units_in_use = self.units_in_use.saturating_add(Self::piece_units(size_bytes));
    }

    /// Takes back the charge of a piece.
    #[inline]
    pub(super) fn drop_piece(&mut self, size_bytes: u64) {
        self.units_in_use -= Self::piece_units(size_bytes);
    }

    /// Bytes of all units that may be in use.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_units.saturating_mul(GRANULARITY_BYTES)
    }

    /// Bytes of the units in use.
    pub(super) fn in_use_bytes(&self) -> u64 {
        self.units_in_use.saturating_mul(GRANULARITY_BYTES)
    }

    /// Bytes of the units that are left.
    pub(super) fn free_bytes(&self) -> u64 {
        self.capacity_bytes().saturating_sub(self.in_use_bytes())
    }
}
