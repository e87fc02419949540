//! States that are known to lead nowhere, by fingerprint, in bounded memory.

use crate::units::random::mix;

/// Slots of a new table.
const SLOTS_MIN: usize = 1 << 10;

/// A set of fingerprints that forgets when it is full.
#[derive(Clone, Debug)]
pub(super) struct Nogoods {
    /// Pairs: the first of each is kept, the second makes room.
    slots: Vec<u128>,
    used: usize,
    slots_max: usize,
}

impl Nogoods {
    /// An empty set of at most so many fingerprints of 16 bytes.
    pub(super) fn new(slots_max: usize) -> Nogoods {
        Nogoods { slots: vec![0; SLOTS_MIN], used: 0, slots_max: slots_max.max(SLOTS_MIN) }
    }

    fn pair(&self, print: u128) -> usize {
        (print as usize & (self.slots.len() - 1)) & !1
    }

    /// Whether a fingerprint is in the set.
    pub(super) fn has(&self, print: u128) -> bool {
        let at = self.pair(print);
        self.slots[at] == print || self.slots[at + 1] == print
    }

    /// Adds a fingerprint.
    pub(super) fn add(&mut self, print: u128) {
        if self.used * 2 > self.slots.len() && self.slots.len() * 2 <= self.slots_max {
            let grown = Nogoods { slots: vec![0; self.slots.len() * 2], used: 0, ..*self };
            let old = std::mem::replace(self, grown);
            old.slots.into_iter().filter(|&print| print != 0).for_each(|print| self.put(print));
        }
        self.put(print);
    }

    fn put(&mut self, print: u128) {
        let at = self.pair(print);
        let slot = if self.slots[at] == 0 { at } else { at + 1 };
        self.used += usize::from(self.slots[slot] == 0);
        self.slots[slot] = print;
    }
}

/// What one piece with one key adds to a fingerprint; sums of these do not depend on order.
pub(super) fn print(kind: u32, key: u64) -> u128 {
    let seed = (u64::from(kind) << 32) ^ u64::from(kind).rotate_left(17) ^ key.rotate_left(7);
    let low = mix(seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_add(mix(key ^ 0x2545_f491_4f6c_dd1d));
    let high = mix(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ key);
    (u128::from(mix(low)) << 64) | u128::from(high)
}
