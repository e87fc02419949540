//! What was handed out: one numbering for the engine, whoever's memory it is.

use super::var::Slot;
use crate::alloc::planned::inner::Handles;
use crate::alloc::{BlockState, Handle};
use crate::units::{BlockId, StreamId};

/// Whose memory a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The static pool, from this offset in bytes.
    Pool {
        offset_bytes: u64,
        /// It is where the plan says.
        planned: bool,
    },
    /// A slot of the pool of small requests.
    Var(Slot),
    /// The inner allocator, which knows it by this handle.
    Inner(Handle),
    /// Nobody's: the number is spare.
    Nowhere,
}

/// A block handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) place: Place,
    /// What the program asked for.
    pub(super) requested_bytes: u64,
    /// What it takes of the pool it lies in; 0 for the inner allocator's, which counts for itself.
    pub(super) size_bytes: u64,
    pub(super) stream: StreamId,
    pub(super) owner: BlockId,
    pub(super) state: BlockState,
}

/// All of them, by the handles that the engine knows.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    blocks: Vec<Block>,
    spare: Vec<u32>,
}

impl Blocks {
    /// Numbers a block.
    pub(super) fn add(&mut self, block: Block) -> Handle {
        match self.spare.pop() {
            Some(at) => {
                self.blocks[at as usize] = block;
                Handle(at)
            }
            None => {
                self.blocks.push(block);
                Handle(self.blocks.len() as u32 - 1)
            }
        }
    }

    /// The block of a handle.
    pub(super) fn get(&self, handle: Handle) -> &Block {
        &self.blocks[handle.0 as usize]
    }

    /// The block of a handle, to change.
    pub(super) fn get_mut(&mut self, handle: Handle) -> &mut Block {
        &mut self.blocks[handle.0 as usize]
    }

    /// The block is gone.
    pub(super) fn remove(&mut self, handle: Handle) {
        self.get_mut(handle).place = Place::Nowhere;
        self.spare.push(handle.0);
    }

    /// Those that are there.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.place != Place::Nowhere)
    }
}

impl Handles for Blocks {
    fn inner(&self, handle: Handle) -> Option<Handle> {
        match self.get(handle).place {
            Place::Inner(inner) => Some(inner),
            _ => None,
        }
    }
}
