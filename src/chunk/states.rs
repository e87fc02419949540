//! Chunks and the states of the tensors in them (spec patrickstar 1.1, 1.3).
//!
//! A chunk's state is never stored: it follows from those of its tensors, first that applies.
//!
//! ```text
//!   no payload > any Compute > any Hold > any HoldAfterForward > any HoldAfterBackward > Free
//!   (Released)    immovable    └──────────── movable ──────────────────┘               never moved
//! ```

use serde::Serialize;

use super::memory::Held;

/// Where a payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// Page-locked memory of the host.
    Host,
    /// Memory of the GPU.
    Gpu,
}

impl Device {
    /// The other one: there are two tiers and no third.
    pub(super) fn other(self) -> Device {
        match self {
            Device::Host => Device::Gpu,
            Device::Gpu => Device::Host,
        }
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// What a chunk holds (spec patrickstar 1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkList {
    /// fp16 parameters; the same memory later holds the fp16 gradients.
    Fp16,
    /// fp32 master parameters.
    Fp32,
    /// First moments, fp32.
    Momentum,
    /// Second moments, fp32.
    Variance,
}

impl ChunkList {
    /// Every list.
    pub const ALL: [ChunkList; 4] =
        [ChunkList::Fp16, ChunkList::Fp32, ChunkList::Momentum, ChunkList::Variance];

    /// Bytes of an element.
    pub fn element_bytes(self) -> u64 {
        match self {
            ChunkList::Fp16 => 2,
            _ => 4,
        }
    }
}

/// State of a tensor in a chunk (spec patrickstar 1.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TensorState {
    /// Its content is worthless.
    #[default]
    Free,
    /// In use, so that its chunk must stay where it is.
    Compute,
    /// Its content is needed.
    Hold,
    /// Needed, and its forward pass is over.
    HoldAfterForward,
    /// Needed, and its backward pass is over: it holds the gradient.
    HoldAfterBackward,
}

/// State of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkState {
    /// It has no payload.
    Released,
    /// The first of its tensors' states in the order of this module.
    Of(TensorState),
}

impl ChunkState {
    /// Whether the chunk may be evicted. A free payload is never reclaimed.
    pub(super) fn movable(self) -> bool {
        use TensorState::{Hold, HoldAfterBackward, HoldAfterForward};
        matches!(self, ChunkState::Of(Hold | HoldAfterForward | HoldAfterBackward))
    }
}

/// A payload: one contiguous buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payload {
    pub(super) device: Device,
    /// The block on the GPU, if it lies there.
    pub(super) held: Option<Held>,
}

/// A chunk: its tensors, and its payload if it has one.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) list: ChunkList,
    /// Number of its fp16 chunk in the order of creation; the four of a number make a group.
    pub(super) number: u32,
    pub(super) bytes: u64,
    pub(super) payload: Option<Payload>,
    /// Part of a running collective: must stay.
    pub(super) pinned: bool,
    /// With memory-saving communication: its content has been broadcast and not yet dropped.
    pub(super) fetched: bool,
    /// Tensors that the forward pass of this step left in `Hold`.
    pub(super) unused: usize,
    /// When the last operation on it ended, in nanoseconds on the clock.
    pub(super) last_use_ns: u64,
    states: Vec<TensorState>,
    counts: [usize; 5],
}

impl Chunk {
    pub(super) fn new(list: ChunkList, number: u32, bytes: u64, tensors: usize) -> Chunk {
        let mut counts = [0; 5];
        counts[TensorState::Free as usize] = tensors;
        Chunk {
            list,
            number,
            bytes,
            payload: None,
            pinned: false,
            fetched: false,
            unused: 0,
            last_use_ns: 0,
            states: vec![TensorState::Free; tensors],
            counts,
        }
    }

    pub(super) fn state(&self) -> ChunkState {
        use TensorState::{Compute, Free, Hold, HoldAfterBackward, HoldAfterForward};
        if self.payload.is_none() {
            return ChunkState::Released;
        }
        let order = [Compute, Hold, HoldAfterForward, HoldAfterBackward];
        let first = order.into_iter().find(|&state| self.count(state) > 0);
        ChunkState::Of(first.unwrap_or(Free))
    }

    pub(super) fn tensor(&self, position: usize) -> TensorState {
        self.states[position]
    }

    pub(super) fn count(&self, state: TensorState) -> usize {
        self.counts[state as usize]
    }

    pub(super) fn set(&mut self, position: usize, state: TensorState) {
        self.counts[self.states[position] as usize] -= 1;
        self.counts[state as usize] += 1;
        self.states[position] = state;
    }

    pub(super) fn set_all(&mut self, state: TensorState) {
        self.states.fill(state);
        self.counts = [0; 5];
        self.counts[state as usize] = self.states.len();
    }

    /// Whether every tensor that this step used has come to the state.
    pub(super) fn all_done(&self, state: TensorState) -> bool {
        self.count(state) + self.unused >= self.states.len()
    }

    /// The reset at the end of the forward pass: without it, a recompute would make a whole group
    /// look finished.
    pub(super) fn end_forward(&mut self) {
        self.unused = self.count(TensorState::Hold);
        for position in 0..self.states.len() {
            if self.states[position] == TensorState::HoldAfterForward {
                self.set(position, TensorState::Hold);
            }
        }
    }

    pub(super) fn is_on(&self, device: Device) -> bool {
        self.payload.is_some_and(|payload| payload.device == device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_host(states: &[TensorState]) -> Chunk {
        let mut chunk = Chunk::new(ChunkList::Fp16, 0, 200, states.len());
        chunk.payload = Some(Payload { device: Device::Host, held: None });
        for (position, &state) in states.iter().enumerate() {
            chunk.set(position, state);
        }
        chunk
    }

    #[test]
    fn the_state_of_a_chunk_is_the_first_of_its_tensors_in_the_order_of_the_spec() {
        use TensorState::{Compute, Free, Hold, HoldAfterBackward, HoldAfterForward};
        let cases: [(&[TensorState], TensorState, bool); 6] = [
            (&[HoldAfterBackward, Compute, Hold], Compute, false),
            (&[HoldAfterForward, Hold, HoldAfterBackward], Hold, true),
            (&[HoldAfterBackward, HoldAfterForward, Free], HoldAfterForward, true),
            (&[Free, HoldAfterBackward], HoldAfterBackward, true),
            (&[Free, Free], Free, false),
            (&[], Free, false),
        ];
        for (tensors, state, movable) in cases {
            let chunk = on_host(tensors);
            assert_eq!(chunk.state(), ChunkState::Of(state), "{tensors:?}");
            assert_eq!(chunk.state().movable(), movable, "{tensors:?}");
        }
        let released = Chunk::new(ChunkList::Fp32, 0, 400, 1);
        assert_eq!(released.state(), ChunkState::Released);
        assert!(!released.state().movable());
    }

    #[test]
    fn tensors_that_a_forward_pass_left_alone_do_not_keep_a_chunk_from_being_done() {
        use TensorState::{Hold, HoldAfterBackward, HoldAfterForward};
        let mut chunk = on_host(&[Hold, HoldAfterForward]);
        assert!(!chunk.all_done(HoldAfterForward), "one was not used yet");
        chunk.end_forward();
        assert_eq!((chunk.unused, chunk.count(Hold)), (1, 2));
        chunk.set(1, HoldAfterBackward);
        assert!(chunk.all_done(HoldAfterBackward));
    }
}
