//! Which addresses a simulated device gives out.
//!
//! Addresses decide ties between free blocks of equal size, so they change what an allocator does.
//! The default is a model of what a driver was seen to do on an H200 (specs/pytorch_caching.md
//! 13.4):
//!
//! ```text
//!   low                                                                    high
//!        ┌ chunk 3 ────┬─left─┐┌ chunk 2 ──────────┐┌ chunk 1 ───┬─leftover─┐
//!        │ 40 MiB      │24 MiB││ 32 MiB            ││ 22 MiB     │ 10 MiB   │
//!        └─────────────┴──────┘└───────────────────┘└────────────┴──────────┘
//!   new chunks go below all others, in multiples of 32 MiB ◄──
//!   a range goes to the start of the lowest leftover that holds it
//! ```

use std::collections::{BTreeMap, VecDeque};

use super::super::{DeviceError, GRANULARITY_BYTES};
use crate::trace::{RecordedKind, Recording};

/// Chunks are multiples of this.
const CHUNK_BYTES: u64 = 32 << 20;
/// First address above the simulated chunks, which descend from here as a driver's do.
const TOP: u64 = 0x7f00_0000_0000;
/// First address of the ascending policy.
const BOTTOM: u64 = 1 << 44;
/// First address above everything that mallocs get, and above the descending policy's first range.
/// Far more than a process has, since these policies never reuse an address.
const MALLOC_TOP: u64 = 1 << 62;
/// Ranges of reservations start here, above all mallocs, and end at 2^63.
const RESERVATION_BOTTOM: u64 = MALLOC_TOP;
const RESERVATION_TOP: u64 = 1 << 63;
/// All addresses that reservations may take together: 2^50 bytes.
const RESERVATION_LIMIT_BYTES: u64 = 1 << 50;
/// Mallocs are aligned to this when they share a 2 MiB unit.
const SMALL_ALIGNMENT_BYTES: u64 = 512;

/// The policy and its state.
#[derive(Clone, Debug)]
pub struct Addresses {
    policy: Policy,
    next_reservation: u64,
    reserved_bytes: u64,
}

#[derive(Clone, Debug)]
enum Policy {
    Ascending { next: u64 },
    Descending { last: u64 },
    Chunks(Chunks),
    Recorded(Recorded),
}

impl Addresses {
    fn with(policy: Policy) -> Addresses {
        Addresses { policy, next_reservation: RESERVATION_BOTTOM, reserved_bytes: 0 }
    }

    /// Each range above all earlier ones; never reused.
    pub fn ascending() -> Addresses {
        Addresses::with(Policy::Ascending { next: BOTTOM })
    }

    /// Each range below all earlier ones; never reused.
    pub fn descending() -> Addresses {
        Addresses::with(Policy::Descending { last: MALLOC_TOP })
    }

    /// The driver model of the [module docs](self).
    pub fn chunks() -> Addresses {
        Addresses::with(Policy::Chunks(Chunks::below(TOP)))
    }

    /// The bases that a recording shows: each malloc takes the next recorded base of its size, and
    /// falls back to the driver model when the recording has no more.
    pub fn recorded(recording: &Recording) -> Addresses {
        let mut bases: BTreeMap<u64, VecDeque<u64>> = BTreeMap::new();
        for action in &recording.actions {
            if action.kind == RecordedKind::SegmentAlloc {
                bases.entry(action.size_bytes).or_default().push_back(action.address);
            }
        }
        Addresses::with(Policy::Recorded(Recorded {
            bases,
            live: BTreeMap::new(),
            fallback: Chunks::below(FALLBACK_TOP),
        }))
    }

    /// An address for a malloc of this size.
    ///
    /// # Errors
    /// When the policy has no addresses left.
    #[inline]
    pub fn take(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let address = match &mut self.policy {
            // Sizes that share a unit and those that do not keep to their own alignment.
            Policy::Ascending { next } => {
                let alignment = alignment(size_bytes);
                let address = next.next_multiple_of(alignment);
                let end = address.checked_add(size_bytes).filter(|&end| end <= MALLOC_TOP);
                end.map(|end| {
                    *next = end.next_multiple_of(alignment);
                    address
                })
            }
            Policy::Descending { last } => last.checked_sub(size_bytes).map(|start| {
                *last = start - start % alignment(size_bytes);
                *last
            }),
            Policy::Chunks(chunks) => chunks.take(size_bytes),
            Policy::Recorded(recorded) => recorded.take(size_bytes),
        };
        address.ok_or(DeviceError::OutOfAddresses { requested_bytes: size_bytes })
    }

    /// The range is free again.
    #[inline]
    pub fn give_back(&mut self, address: u64, size_bytes: u64) {
        match &mut self.policy {
            Policy::Ascending { .. } | Policy::Descending { .. } => {}
            Policy::Chunks(chunks) => chunks.give_back(address, size_bytes),
            Policy::Recorded(recorded) => recorded.give_back(address, size_bytes),
        }
    }

    /// A range that was in use before this policy began: nothing is given out where it lies, now or
    /// once it is free. Only before the first address is taken.
    pub fn hold(&mut self, address: u64, size_bytes: u64) {
        match &mut self.policy {
            Policy::Ascending { next } => {
                let end = address.saturating_add(size_bytes);
                *next = (*next).max(end.next_multiple_of(GRANULARITY_BYTES));
            }
            Policy::Descending { last } => *last = (*last).min(address - address % CHUNK_BYTES),
            Policy::Chunks(chunks) => chunks.stay_below(address),
            Policy::Recorded(recorded) => recorded.hold(address, size_bytes),
        }
    }

    /// A reservation that was there before.
    pub fn hold_reservation(&mut self, size_bytes: u64) {
        self.reserved_bytes = self.reserved_bytes.saturating_add(size_bytes);
    }

    /// A range of addresses without memory.
    ///
    /// # Errors
    /// When 2^50 bytes are reserved together.
    pub fn reserve(&mut self, size_bytes: u64) -> Result<u64, DeviceError> {
        let requested_bytes = size_bytes;
        let end = size_bytes
            .checked_next_multiple_of(GRANULARITY_BYTES)
            .and_then(|size| self.next_reservation.checked_add(size))
            .filter(|&end| end <= RESERVATION_TOP);
        let (Some(end), true) =
            (end, size_bytes <= RESERVATION_LIMIT_BYTES.saturating_sub(self.reserved_bytes))
        else {
            return Err(DeviceError::OutOfAddresses { requested_bytes });
        };
        self.reserved_bytes += size_bytes;
        Ok(std::mem::replace(&mut self.next_reservation, end))
    }

    /// A reserved range is given back.
    pub fn unreserve(&mut self, size_bytes: u64) {
        self.reserved_bytes -= size_bytes;
    }
}

/// Ranges that share a 2 MiB unit are aligned to 512 bytes, all others to 2 MiB.
#[inline]
fn alignment(size_bytes: u64) -> u64 {
    if size_bytes < 1 << 20 { SMALL_ALIGNMENT_BYTES } else { GRANULARITY_BYTES }
}

/// The driver model.
#[derive(Clone, Debug)]
struct Chunks {
    /// End of the highest chunk ever made.
    top: u64,
    /// Start of the lowest chunk ever made.
    lowest: u64,
    /// Chunks in use: base → size.
    chunks: BTreeMap<u64, u64>,
    /// Free ranges inside chunks: base → size. Adjacent ones are joined within a chunk.
    leftovers: BTreeMap<u64, u64>,
    /// The largest leftover that begins in each slot of 32 MiB, slots counted downwards from `top`.
    largest: MaxTree,
    /// Whole chunks that came back: base → size. Adjacent ones are joined.
    holes: BTreeMap<u64, u64>,
}

impl Chunks {
    /// Chunks below `top`, a multiple of 32 MiB.
    fn below(top: u64) -> Chunks {
        Chunks {
            top,
            lowest: top,
            chunks: BTreeMap::new(),
            leftovers: BTreeMap::new(),
            largest: MaxTree::default(),
            holes: BTreeMap::new(),
        }
    }

    /// Makes all chunks below an address.
    fn stay_below(&mut self, address: u64) {
        self.top = self.top.min(address - address % CHUNK_BYTES);
        self.lowest = self.top;
    }

    fn take(&mut self, size_bytes: u64) -> Option<u64> {
        let size_bytes = size_bytes.checked_next_multiple_of(alignment(size_bytes))?;
        let (base, room) = match self.lowest_leftover(size_bytes) {
            Some((base, room)) => {
                self.remove_leftover(base);
                (base, room)
            }
            None => {
                let room = size_bytes.checked_next_multiple_of(CHUNK_BYTES)?;
                let base = self.new_chunk(room)?;
                self.chunks.insert(base, room);
                (base, room)
            }
        };
        if room > size_bytes {
            self.insert_leftover(base + size_bytes, room - size_bytes);
        }
        Some(base)
    }

    /// The leftover with the lowest address that holds this size: base and size.
    fn lowest_leftover(&self, size_bytes: u64) -> Option<(u64, u64)> {
        let slot = self.largest.last_at_least(size_bytes)?;
        let fits = |&(_, &size): &(&u64, &u64)| size >= size_bytes;
        self.leftovers.range(self.slot_range(slot)).find(fits).map(|(&base, &size)| (base, size))
    }

    fn slot(&self, base: u64) -> usize {
        ((self.top - 1 - base) / CHUNK_BYTES) as usize
    }

    fn slot_range(&self, slot: usize) -> std::ops::Range<u64> {
        let end = self.top - slot as u64 * CHUNK_BYTES;
        end - CHUNK_BYTES..end
    }

    fn insert_leftover(&mut self, base: u64, size_bytes: u64) {
        self.leftovers.insert(base, size_bytes);
        self.largest.raise(self.slot(base), size_bytes);
    }

    fn remove_leftover(&mut self, base: u64) -> Option<u64> {
        let size_bytes = self.leftovers.remove(&base)?;
        let slot = self.slot(base);
        if self.largest.get(slot) == size_bytes {
            let rest = self.leftovers.range(self.slot_range(slot)).map(|(_, &size)| size).max();
            self.largest.set(slot, rest.unwrap_or(0));
        }
        Some(size_bytes)
    }

    /// The top of the highest hole that holds a chunk, else below all others.
    fn new_chunk(&mut self, size_bytes: u64) -> Option<u64> {
        let hole = self.holes.iter().rev().find(|&(_, &size)| size >= size_bytes);
        if let Some((&base, &size)) = hole {
            self.holes.remove(&base);
            if size > size_bytes {
                self.holes.insert(base, size - size_bytes);
            }
            return Some(base + size - size_bytes);
        }
        self.lowest = self.lowest.checked_sub(size_bytes)?;
        Some(self.lowest)
    }

    fn give_back(&mut self, address: u64, size_bytes: u64) {
        let size_bytes = size_bytes.next_multiple_of(alignment(size_bytes));
        let below = self.chunks.range(..=address).next_back();
        // What was held before this model began lies in no chunk.
        let Some((&chunk_base, &chunk_size)) =
            below.filter(|&(&base, &size)| address < base + size)
        else {
            return;
        };
        let chunk_end = chunk_base + chunk_size;
        let (mut base, mut size) = (address, size_bytes);
        let before = self.leftovers.range(chunk_base..address).next_back();
        if let Some((&left, &left_size)) = before.filter(|&(&left, &len)| left + len == address) {
            self.remove_leftover(left);
            base = left;
            size += left_size;
        }
        let end = base + size;
        if end < chunk_end
            && let Some(right_size) = self.remove_leftover(end)
        {
            size += right_size;
        }
        if base == chunk_base && size == chunk_size {
            self.chunks.remove(&chunk_base);
            self.add_hole(base, size);
        } else {
            self.insert_leftover(base, size);
        }
    }

    fn add_hole(&mut self, mut base: u64, mut size: u64) {
        let before = self.holes.range(..base).next_back();
        if let Some((&left, &left_size)) = before.filter(|&(&left, &len)| left + len == base) {
            self.holes.remove(&left);
            base = left;
            size += left_size;
        }
        if let Some(right_size) = self.holes.remove(&(base + size)) {
            size += right_size;
        }
        self.holes.insert(base, size);
    }
}

/// A number for each slot, and the last slot that has at least so much: a binary tree of maxima.
///
/// ```text
///            9             last slot with at least 5: go right where the right half has it,
///        9       5         else left
///      2   9   5   1
/// ```
#[derive(Clone, Debug, Default)]
struct MaxTree {
    /// Slots, a power of two; 0 while nothing was stored.
    slots: usize,
    /// The root at 1, children of `i` at `2 i` and `2 i + 1`, slots from `slots` on.
    maxima: Vec<u64>,
}

impl MaxTree {
    fn get(&self, slot: usize) -> u64 {
        self.maxima.get(self.slots + slot).copied().unwrap_or(0)
    }

    fn set(&mut self, slot: usize, value: u64) {
        if slot >= self.slots {
            self.grow(slot);
        }
        let mut at = self.slots + slot;
        self.maxima[at] = value;
        while at > 1 {
            at /= 2;
            self.maxima[at] = self.maxima[2 * at].max(self.maxima[2 * at + 1]);
        }
    }

    fn raise(&mut self, slot: usize, value: u64) {
        if value > self.get(slot) {
            self.set(slot, value);
        }
    }

    fn grow(&mut self, slot: usize) {
        let slots = (slot + 1).next_power_of_two().max(64);
        let mut maxima = vec![0; 2 * slots];
        maxima[slots..slots + self.slots].copy_from_slice(&self.maxima[self.slots..]);
        for at in (1..slots).rev() {
            maxima[at] = maxima[2 * at].max(maxima[2 * at + 1]);
        }
        *self = MaxTree { slots, maxima };
    }

    fn last_at_least(&self, value: u64) -> Option<usize> {
        if self.maxima.get(1).is_none_or(|&most| most < value) {
            return None;
        }
        let mut at = 1;
        while at < self.slots {
            at = if self.maxima[2 * at + 1] >= value { 2 * at + 1 } else { 2 * at };
        }
        Some(at - self.slots)
    }
}

/// Where the fallback of the recorded policy starts: below every address a process shows.
const FALLBACK_TOP: u64 = 0x0800_0000_0000;

/// The bases of a recording.
#[derive(Clone, Debug)]
struct Recorded {
    /// Bases not yet used, by size, in recorded order.
    bases: BTreeMap<u64, VecDeque<u64>>,
    /// Ranges in use at recorded bases.
    live: BTreeMap<u64, u64>,
    fallback: Chunks,
}

impl Recorded {
    fn hold(&mut self, address: u64, size_bytes: u64) {
        self.live.insert(address, size_bytes);
    }

    fn take(&mut self, size_bytes: u64) -> Option<u64> {
        let next = self.bases.get_mut(&size_bytes).and_then(VecDeque::pop_front);
        // A counterfactual can hold a range longer than the recorded run did; then its base, or one
        // that overlaps it, may come up again while it is still in use.
        match next {
            Some(base) if !self.overlaps(base, size_bytes) => {
                self.live.insert(base, size_bytes);
                Some(base)
            }
            _ => self.fallback.take(size_bytes),
        }
    }

    fn overlaps(&self, base: u64, size_bytes: u64) -> bool {
        let below = self.live.range(..base.saturating_add(size_bytes)).next_back();
        below.is_some_and(|(&live, &size)| live.saturating_add(size) > base)
    }

    fn give_back(&mut self, address: u64, size_bytes: u64) {
        if self.live.remove(&address).is_none() {
            self.fallback.give_back(address, size_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    fn take(addresses: &mut Addresses, mib: u64) -> u64 {
        addresses.take(mib * MIB).expect("addresses are left")
    }

    #[test]
    fn chunks_descend_and_leftovers_fill_from_below() {
        let mut addresses = Addresses::chunks();
        let a = take(&mut addresses, 22);
        let b = take(&mut addresses, 40);
        assert_eq!(a, TOP - 32 * MIB);
        assert_eq!(b, TOP - 96 * MIB, "a 64 MiB chunk below the first");
        // Leftovers: 24 MiB behind b (lower), 10 MiB behind a.
        assert_eq!(take(&mut addresses, 10), b + 40 * MIB, "lowest leftover first");
        assert_eq!(take(&mut addresses, 10), b + 50 * MIB);
        assert_eq!(take(&mut addresses, 10), a + 22 * MIB);
    }

    #[test]
    fn whole_chunks_return_and_the_highest_hole_is_used_first() {
        let mut addresses = Addresses::chunks();
        let a = take(&mut addresses, 22);
        let b = take(&mut addresses, 32);
        let c = take(&mut addresses, 32);
        addresses.give_back(a, 22 * MIB);
        addresses.give_back(b, 32 * MIB);
        // a and b are one hole of 64 MiB now, above c.
        assert_eq!(take(&mut addresses, 32), a);
        assert_eq!(take(&mut addresses, 32), b);
        assert_eq!(take(&mut addresses, 32), c - 32 * MIB);
    }

    /// Against the plain scan that the model describes: the lowest leftover that fits, if any.
    #[test]
    fn the_lowest_fitting_leftover_is_found() {
        let mut chunks = Chunks::below(TOP);
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let random = state >> 33;
            let size_bytes = [2, 3, 10, 20, 22, 40, 90][random as usize % 7] * MIB;
            let scan = chunks.leftovers.iter().find(|&(_, &size)| size >= size_bytes);
            let expected = scan.map(|(&base, &size)| (base, size));
            assert_eq!(chunks.lowest_leftover(size_bytes), expected);
            if random % 5 < 3 || live.is_empty() {
                let base = chunks.take(size_bytes).expect("addresses are left");
                live.push((base, size_bytes));
            } else {
                let (base, size) = live.swap_remove(random as usize / 7 % live.len());
                chunks.give_back(base, size);
            }
        }
    }

    #[test]
    fn ascending_and_descending_never_reuse() {
        let mut up = Addresses::ascending();
        let first = take(&mut up, 2);
        up.give_back(first, 2 * MIB);
        assert_eq!(take(&mut up, 3), first + 2 * MIB);
        assert_eq!(take(&mut up, 2), first + 6 * MIB, "3 MiB take two units of addresses");
        let mut down = Addresses::descending();
        let high = take(&mut down, 2);
        assert_eq!(take(&mut down, 2), high - 2 * MIB);
    }

    #[test]
    fn exhausted_addresses_are_an_error() {
        for mut addresses in [Addresses::ascending(), Addresses::descending(), Addresses::chunks()]
        {
            let huge = 1 << 60;
            let granted = (0..20).take_while(|_| addresses.take(huge).is_ok()).count();
            assert!(granted < 5, "2^62 addresses hold no five ranges of 2^60");
            assert!(addresses.take(u64::MAX).is_err());
        }
    }
}
