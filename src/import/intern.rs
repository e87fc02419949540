//! Interning: equal slices get one id, and all slices lie in one buffer.
//!
//! A snapshot names the same strings and stacks millions of times. A map from boxed slices would
//! hold each twice and pay an allocation apiece; here a table of 32-bit ids points into one arena.

use std::hash::{BuildHasher, Hash};

use foldhash::fast::RandomState;

/// The table's mark for a free slot.
const FREE: u32 = u32::MAX;
/// Ids stay below this, so that they fit every packed form.
const IDS_MAX: u32 = u32::MAX - 1;

/// Slices of `T`, each kept once; ids count up from 0 in order of first appearance.
#[derive(Clone, Debug)]
pub(super) struct Interner<T> {
    items: Vec<T>,
    /// End of slice `i` in `items`; it begins where slice `i - 1` ends.
    ends: Vec<usize>,
    /// Open addressing with linear probing; a power of two long, at most half full.
    table: Vec<u32>,
    /// Seeded afresh for each process: files cannot aim at collisions. Ids do not depend on it.
    hasher: RandomState,
}

impl<T: Copy + Eq + Hash> Interner<T> {
    pub(super) fn new() -> Self {
        Interner {
            items: Vec::new(),
            ends: Vec::new(),
            table: vec![FREE; 64],
            hasher: RandomState::default(),
        }
    }

    /// The id of `slice`, new or old; nothing once ids run out.
    pub(super) fn intern(&mut self, slice: &[T]) -> Option<u32> {
        let mut slot = self.first_slot(slice);
        while self.table[slot] != FREE {
            let id = self.table[slot];
            if self.get(id) == slice {
                return Some(id);
            }
            slot = (slot + 1) & (self.table.len() - 1);
        }
        let id = u32::try_from(self.ends.len()).ok().filter(|&id| id < IDS_MAX)?;
        self.items.extend_from_slice(slice);
        self.ends.push(self.items.len());
        self.table[slot] = id;
        if self.ends.len() * 2 > self.table.len() {
            self.grow();
        }
        Some(id)
    }

    /// The slice with this id; empty for an id that was never given.
    pub(super) fn get(&self, id: u32) -> &[T] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.items[start..end]
    }

    fn first_slot(&self, slice: &[T]) -> usize {
        self.hasher.hash_one(slice) as usize & (self.table.len() - 1)
    }

    fn grow(&mut self) {
        self.table = vec![FREE; self.table.len() * 2];
        for id in 0..self.ends.len() as u32 {
            let mut slot = self.first_slot(self.get(id));
            while self.table[slot] != FREE {
                slot = (slot + 1) & (self.table.len() - 1);
            }
            self.table[slot] = id;
        }
    }
}

impl Interner<u8> {
    /// The text with this id. Bytes that are not UTF-8 (Python's lone surrogates) become U+FFFD.
    pub(super) fn text(&self, id: u32) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(self.get(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_slices_share_an_id_through_growth() {
        let mut interner = Interner::new();
        let name = |i: u32| format!("name {}", i % 1000).into_bytes();
        for i in 0..5000 {
            assert_eq!(interner.intern(&name(i)), Some(i % 1000));
        }
        assert_eq!(interner.text(999), "name 999");
        assert_eq!(interner.intern(b""), Some(1000), "an empty slice is a slice");
        assert_eq!(interner.get(1000), b"");
        assert_eq!(interner.get(77_777), b"", "unknown ids read as empty");
    }
}
