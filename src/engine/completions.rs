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
///
/// An entry whose block has another state than its queue stands for is stale: it is passed over, so
/// that nothing has to be taken from the middle of a queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Completions {
    /// State by block; covers the blocks so far once anything was deferred.
    states: Vec<State>,
    /// Blocks whose use has ended, oldest first.
    ended: VecDeque<(BlockId, Handle)>,
    /// Deferred blocks in the order of their frees.
    waiting: VecDeque<(BlockId, Handle)>,
    /// Entries of `ended`, then of `waiting`, that the calls of [`Completions::wait_of`] since the
    /// last that found nothing have looked at.
    looked_at: [usize; 2],
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
        loop {
            let (block, handle) = self.ended.pop_front()?;
            self.looked_at[0] = self.looked_at[0].saturating_sub(1);
            if self.take(block, State::Ended) {
                return Some(handle);
            }
        }
    }

    /// Whether a block has the state; it is idle then.
    #[inline]
    fn take(&mut self, block: BlockId, state: State) -> bool {
        let found = &mut self.states[block.index()];
        let takes = *found == state;
        if takes {
            *found = State::Idle;
        }
        takes
    }

    /// The next block that is wanted when the device is waited for its own uses only. What one call
    /// passed over is not looked at again until a call finds nothing: ask until then, for the same.
    pub(super) fn wait_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let queues = [(&self.ended, State::Ended), (&self.waiting, State::Waiting)];
        for ((queue, state), looked_at) in queues.into_iter().zip(&mut self.looked_at) {
            for &(block, handle) in queue.range((*looked_at).min(queue.len())..) {
                *looked_at += 1;
                if self.states[block.index()] == state && wanted(handle) {
                    self.states[block.index()] = State::Idle;
                    return Some(handle);
                }
            }
        }
        self.looked_at = [0; 2];
        let states = &self.states;
        self.ended.retain(|&(block, _)| states[block.index()] == State::Ended);
        self.waiting.retain(|&(block, _)| states[block.index()] == State::Waiting);
        None
    }

    /// The next block when the device is waited for.
    pub(super) fn wait(&mut self) -> Option<Handle> {
        if let Some(handle) = self.ended() {
            return Some(handle);
        }
        while let Some((block, handle)) = self.waiting.pop_front() {
            self.looked_at[1] = self.looked_at[1].saturating_sub(1);
            if self.take(block, State::Waiting) {
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

    /// Those of a pool among as many others: each is looked at once, however many are taken.
    #[test]
    fn waiting_for_some_of_many_looks_at_each_once() {
        const COUNT: u32 = 10_000;
        let mut completions = Completions::default();
        for block in 0..COUNT {
            completions.defer(BlockId(block), Handle(block), COUNT as usize);
        }
        for block in (0..COUNT).rev().step_by(3) {
            completions.done(BlockId(block), Handle(block));
        }
        let mut looks = 0;
        let mut wanted = |handle: Handle| {
            looks += 1;
            handle.0.is_multiple_of(2)
        };
        let taken: Vec<Handle> = std::iter::from_fn(|| completions.wait_of(&mut wanted)).collect();
        let ended = (0..COUNT).rev().step_by(3).filter(|block| block.is_multiple_of(2));
        let waiting = (0..COUNT).filter(|block| block.is_multiple_of(2) && block % 3 != 0);
        assert_eq!(taken, ended.chain(waiting).map(Handle).collect::<Vec<_>>());
        assert_eq!(looks, COUNT);
        // The others are still there, in the same order, and the entries of those are gone.
        assert_eq!(completions.ended(), Some(Handle(COUNT - 1)));
        let left = std::iter::from_fn(|| completions.wait()).count();
        assert_eq!(left, COUNT as usize / 2 - 1);
    }
}
