//! Deferred frees in a replay: which blocks wait, which have ended, in what order they complete.

use std::collections::VecDeque;

use crate::alloc::Handle;
use crate::units::BlockId;

/// Where a deferred block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not deferred, or completed.
    Idle,
    /// Its use has not ended.
    Waiting,
    /// Its use has ended; the allocator has not looked yet.
    Ended,
}

/// Deferred blocks. [`Completions::ended`] gives those whose use ended, in the order in which they
/// did; [`Completions::wait`] gives those first, then all others in the order of their frees.
#[derive(Clone, Debug, Default)]
pub(super) struct Completions {
    /// State by block; covers the blocks so far once anything was deferred.
    states: Vec<State>,
    /// Blocks whose use has ended, oldest first.
    ended: VecDeque<(BlockId, Handle)>,
    /// Deferred blocks in the order of their frees; entries may be stale.
    waiting: VecDeque<(BlockId, Handle)>,
}

impl Completions {
    /// The program freed a block that is still in use elsewhere.
    pub(super) fn defer(&mut self, block: BlockId, handle: Handle, blocks: usize) {
        if self.states.len() < blocks {
            self.states.resize(blocks, State::Idle);
        }
        self.states[block.index()] = State::Waiting;
        self.waiting.push_back((block, handle));
    }

    /// The use of a block has ended. Does nothing if a wait completed it before.
    pub(super) fn done(&mut self, block: BlockId, handle: Handle) {
        let Some(state) = self.states.get_mut(block.index()) else { return };
        if *state == State::Waiting {
            *state = State::Ended;
            self.ended.push_back((block, handle));
        }
    }

    /// The next block whose use has ended.
    #[inline]
    pub(super) fn ended(&mut self) -> Option<Handle> {
        let (block, handle) = self.ended.pop_front()?;
        self.states[block.index()] = State::Idle;
        Some(handle)
    }

    /// The next block that is wanted when the device is waited for its own uses only.
    pub(super) fn wait_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        if let Some(at) = self.ended.iter().position(|&(_, handle)| wanted(handle)) {
            let (block, handle) = self.ended.remove(at)?;
            self.states[block.index()] = State::Idle;
            return Some(handle);
        }
        let states = &self.states;
        let is_stale = |&(block, _): &(BlockId, Handle)| states[block.index()] != State::Waiting;
        while self.waiting.front().is_some_and(is_stale) {
            self.waiting.pop_front();
        }
        let at = self.waiting.iter().position(|&(block, handle)| {
            states[block.index()] == State::Waiting && wanted(handle)
        })?;
        let (block, handle) = self.waiting.remove(at)?;
        self.states[block.index()] = State::Idle;
        Some(handle)
    }

    /// The next block when the device is waited for.
    pub(super) fn wait(&mut self) -> Option<Handle> {
        if let Some(handle) = self.ended() {
            return Some(handle);
        }
        while let Some((block, handle)) = self.waiting.pop_front() {
            let state = &mut self.states[block.index()];
            if *state == State::Waiting {
                *state = State::Idle;
                return Some(handle);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_end_in_order_and_a_wait_takes_the_rest() {
        let mut completions = Completions::default();
        for block in 0..4 {
            completions.defer(BlockId(block), Handle(10 + block), 4);
        }
        completions.done(BlockId(2), Handle(12));
        completions.done(BlockId(0), Handle(10));
        assert_eq!(completions.ended(), Some(Handle(12)));
        assert_eq!(completions.wait(), Some(Handle(10)), "ended ones come first");
        assert_eq!(completions.wait(), Some(Handle(11)));
        assert_eq!(completions.wait(), Some(Handle(13)));
        assert_eq!(completions.wait(), None);
        completions.done(BlockId(1), Handle(11));
        assert_eq!(completions.ended(), None, "a wait completed it before");
    }
}
