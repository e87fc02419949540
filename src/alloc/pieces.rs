//! One range of addresses with memory from its beginning on: what best-fit, first-fit and planned
//! grow at the end and shrink there.
//!
//! ```text
//!   range: 1.125 x the device, reserved at the first request
//!   ┌ piece 0 ─────────────────┬ piece 1 ──────┬ piece 2 ────┬──────────────────────────────┐
//!   │ mapped, without gaps                                   │ addresses without memory ... │
//!   └────────────────────────────────────────────────────────┴──────────────────────────────┘
//!   base                                                     base + held bytes
//! ```
//!
//! Who lies where in it is the owner's business.

use super::BuildInputs;
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{Device, GRANULARITY_BYTES, PhysicalHandle};
use crate::trace::reservation_span_bytes;

/// Physical memory obtained in one call.
#[derive(Clone, Copy, Debug)]
struct Piece {
    size_bytes: u64,
    /// None once it is released; the memory is there as long as it is mapped.
    handle: Option<PhysicalHandle>,
}

/// The range and what is mapped in it.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    limit_bytes: Option<u64>,
    /// Addresses to reserve.
    span_bytes: u64,
    /// First address of the range, once it is reserved.
    base: Option<u64>,
    /// What is mapped, from `base` on without gaps.
    pieces: Vec<Piece>,
    growths: u64,
    shrinks: u64,
}

impl Pieces {
    /// Nothing yet, of a range for the device that the inputs tell of.
    pub(super) fn new(inputs: &BuildInputs) -> Pieces {
        let device_bytes = inputs.device_total_bytes.unwrap_or(UNLIMITED_TOTAL_BYTES);
        let span_bytes = reservation_span_bytes(device_bytes);
        Pieces {
            limit_bytes: inputs.limit_bytes.or(inputs.recorded_limit_bytes),
            // A span too large for whole units is one that no device reserves.
            span_bytes: span_bytes.checked_next_multiple_of(GRANULARITY_BYTES).unwrap_or(u64::MAX),
            base: None,
            pieces: Vec::new(),
            growths: 0,
            shrinks: 0,
        }
    }

    pub(super) fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// Size of the range in bytes.
    pub(super) fn span_bytes(&self) -> u64 {
        self.span_bytes
    }

    /// First address of the range, once it is reserved.
    pub(super) fn base(&self) -> Option<u64> {
        self.base
    }

    /// How often memory was added, and how many pieces went.
    pub(super) fn growths_and_shrinks(&self) -> (u64, u64) {
        (self.growths, self.shrinks)
    }

    /// Bytes that are mapped, added up.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.size_bytes).sum()
    }

    /// Adds a piece of whole units behind the `held_bytes` that are there; gives its address. Nothing
    /// changes but the range's being reserved if the limit, the range or the device refuse.
    pub(super) fn grow<D: Device>(
        &mut self,
        device: &mut D,
        held_bytes: u64,
        size_bytes: u64,
    ) -> Option<u64> {
        let most_bytes = self.limit_bytes.unwrap_or(u64::MAX).min(self.span_bytes);
        if size_bytes > most_bytes.saturating_sub(held_bytes) {
            return None;
        }
        if self.base.is_none() {
            self.base = Some(device.address_reserve(self.span_bytes).ok()?);
        }
        let address = self.base? + held_bytes;
        let handle = map_piece(device, address, size_bytes)?;
        self.pieces.push(Piece { size_bytes, handle: Some(handle) });
        self.growths += 1;
        Some(address)
    }

    /// Gives back the pieces at the end that lie wholly in the last `free_bytes` of the `held_bytes`
    /// that are there; gives their address and size in bytes if any went.
    pub(super) fn shrink<D: Device>(
        &mut self,
        device: &mut D,
        held_bytes: u64,
        free_bytes: u64,
    ) -> Option<(u64, u64)> {
        let base = self.base?;
        let (mut count, mut gone_bytes) = (0, 0);
        for piece in self.pieces.iter_mut().rev() {
            if gone_bytes + piece.size_bytes > free_bytes {
                break;
            }
            // Handles go first: a piece whose handle the device does not take stays as it is.
            if let Some(handle) = piece.handle
                && device.release(handle).is_err()
            {
                break;
            }
            piece.handle = None;
            gone_bytes += piece.size_bytes;
            count += 1;
        }
        let address = base + (held_bytes - gone_bytes);
        if count == 0 || device.unmap(address, gone_bytes).is_err() {
            return None;
        }
        self.pieces.truncate(self.pieces.len() - count);
        self.shrinks += count as u64;
        Some((address, gone_bytes))
    }
}

/// New memory at an address: created, mapped, made accessible. All or nothing.
fn map_piece<D: Device>(device: &mut D, address: u64, size_bytes: u64) -> Option<PhysicalHandle> {
    let handle = device.create(size_bytes).ok()?;
    let mapped = device.map(address, handle).is_ok();
    if mapped && device.set_access(address, size_bytes).is_ok() {
        return Some(handle);
    }
    // A device that refuses these too keeps the memory; there is nobody to tell.
    if mapped {
        let _ = device.unmap(address, size_bytes);
    }
    let _ = device.release(handle);
    None
}
