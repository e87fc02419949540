//! Free blocks by address, for the lowest one that is large enough.
//!
//! A treap: a search tree by address that is a heap by random priorities, so that its depth is
//! logarithmic whatever the program does. Each node knows the largest block below it, so one walk
//! down finds the answer without looking at blocks that are too small:
//!
//! ```text
//!                  ┌──────── 0x4000: 2 MiB, largest 8 ────────┐
//!   0x1000: 1 MiB, largest 4                      0x9000: 8 MiB, largest 8
//!        └──── 0x2000: 4 MiB, largest 4
//!
//!   lowest of at least 3 MiB: left of the root lies a 4, so left; 1 is too small, so right
//! ```

use super::free_set::Entry;
use super::heap::FreeOrder;

/// No node.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    entry: Entry,
    /// Largest size of this node and those below it, in bytes.
    largest_bytes: u64,
    /// Lower addresses.
    left: u32,
    /// Higher addresses.
    right: u32,
    /// No node below has a higher one.
    priority: u32,
}

/// Free blocks; the lowest address that fits is taken.
#[derive(Clone, Debug)]
pub struct AddressTree {
    nodes: Vec<Node>,
    /// Ids of `nodes` that stand for nothing.
    spare: Vec<u32>,
    root: u32,
    /// State of the generator of priorities. They do not depend on addresses or sizes.
    seed: u32,
}

impl Default for AddressTree {
    fn default() -> Self {
        AddressTree { nodes: Vec::new(), spare: Vec::new(), root: NONE, seed: 0x9e37_79b9 }
    }
}

impl FreeOrder for AddressTree {
    fn insert(&mut self, entry: Entry) {
        let at = self.new_node(entry);
        self.root = self.insert_below(self.root, at);
    }

    fn remove(&mut self, entry: Entry) {
        self.root = self.remove_below(self.root, entry.address);
    }

    fn fit(&self, size_bytes: u64) -> Option<Entry> {
        let mut at = self.root;
        while self.largest_below(at) >= size_bytes {
            let node = self.nodes.get(at as usize)?;
            if self.largest_below(node.left) >= size_bytes {
                at = node.left;
            } else if node.entry.size_bytes >= size_bytes {
                return Some(node.entry);
            } else {
                at = node.right;
            }
        }
        None
    }

    fn prefers(one: Entry, other: Entry) -> bool {
        one.address < other.address
    }

    fn is_empty(&self) -> bool {
        self.root == NONE
    }

    fn largest_bytes(&self) -> u64 {
        self.largest_below(self.root)
    }
}

impl AddressTree {
    fn new_node(&mut self, entry: Entry) -> u32 {
        // Xorshift.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 17;
        self.seed ^= self.seed << 5;
        let largest_bytes = entry.size_bytes;
        let node = Node { entry, largest_bytes, left: NONE, right: NONE, priority: self.seed };
        match self.spare.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    fn largest_below(&self, at: u32) -> u64 {
        self.nodes.get(at as usize).map_or(0, |node| node.largest_bytes)
    }

    /// Corrects what a node knows of those below it.
    fn update(&mut self, at: u32) {
        let Node { entry, left, right, .. } = self.nodes[at as usize];
        let below = self.largest_below(left).max(self.largest_below(right));
        self.nodes[at as usize].largest_bytes = below.max(entry.size_bytes);
    }

    /// Adds a node to a tree; gives the tree's root.
    fn insert_below(&mut self, root: u32, at: u32) -> u32 {
        let Node { entry: Entry { address, .. }, priority, .. } = self.nodes[at as usize];
        let Some(&top) = self.nodes.get(root as usize) else { return at };
        if priority > top.priority {
            let (left, right) = self.split(root, address);
            self.nodes[at as usize].left = left;
            self.nodes[at as usize].right = right;
            self.update(at);
            return at;
        }
        if address < top.entry.address {
            self.nodes[root as usize].left = self.insert_below(top.left, at);
        } else {
            self.nodes[root as usize].right = self.insert_below(top.right, at);
        }
        self.update(root);
        root
    }

    /// Parts a tree in the nodes below an address and the others.
    fn split(&mut self, root: u32, address: u64) -> (u32, u32) {
        let Some(&top) = self.nodes.get(root as usize) else { return (NONE, NONE) };
        let parts = if top.entry.address < address {
            let (low, high) = self.split(top.right, address);
            self.nodes[root as usize].right = low;
            (root, high)
        } else {
            let (low, high) = self.split(top.left, address);
            self.nodes[root as usize].left = high;
            (low, root)
        };
        self.update(root);
        parts
    }

    /// Takes the node of an address out of a tree; gives the tree's root.
    fn remove_below(&mut self, root: u32, address: u64) -> u32 {
        let Some(&top) = self.nodes.get(root as usize) else { return NONE };
        if top.entry.address == address {
            self.spare.push(root);
            return self.join(top.left, top.right);
        }
        if address < top.entry.address {
            self.nodes[root as usize].left = self.remove_below(top.left, address);
        } else {
            self.nodes[root as usize].right = self.remove_below(top.right, address);
        }
        self.update(root);
        root
    }

    /// Joins two trees, all addresses of the first below those of the second.
    fn join(&mut self, low: u32, high: u32) -> u32 {
        let (Some(&low_top), Some(&high_top)) =
            (self.nodes.get(low as usize), self.nodes.get(high as usize))
        else {
            return if low == NONE { high } else { low };
        };
        let root = if low_top.priority > high_top.priority {
            self.nodes[low as usize].right = self.join(low_top.right, high);
            low
        } else {
            self.nodes[high as usize].left = self.join(low, high_top.left);
            high
        };
        self.update(root);
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn finds_what_a_walk_over_an_ordered_map_finds() {
        let mut tree = AddressTree::default();
        let mut model: BTreeMap<u64, Entry> = BTreeMap::new();
        let mut state = 7u64;
        let mut random = move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for block in 0..30_000u32 {
            let address = random(400) * 512;
            match model.remove(&address) {
                Some(entry) => tree.remove(entry),
                None => {
                    let size_bytes = 512 << random(20);
                    let entry = Entry { size_bytes, address, block };
                    tree.insert(entry);
                    model.insert(address, entry);
                }
            }
            let size_bytes = 512 << random(21);
            let fit = model.values().find(|entry| entry.size_bytes >= size_bytes);
            assert_eq!(tree.fit(size_bytes), fit.copied());
            let largest = model.values().map(|entry| entry.size_bytes).max();
            assert_eq!(tree.largest_bytes(), largest.unwrap_or(0));
        }
    }

    /// Addresses in order are the worst case of a plain tree.
    #[test]
    fn ascending_addresses_do_not_make_a_list() {
        let mut tree = AddressTree::default();
        for block in 0..100_000u32 {
            let address = u64::from(block) * 1024;
            tree.insert(Entry { size_bytes: 512, address, block });
        }
        let depth = |tree: &AddressTree| {
            let mut level = vec![tree.root];
            let mut depth = 0;
            while !level.is_empty() {
                depth += 1;
                let nodes = level.iter().filter_map(|&at| tree.nodes.get(at as usize));
                level = nodes.flat_map(|node| [node.left, node.right]).collect();
            }
            depth
        };
        // Random trees of n nodes are about 4.3 ln n deep at most: 50.
        assert!(depth(&tree) < 80, "{}", depth(&tree));
        assert_eq!(tree.fit(1024), None);
    }
}
