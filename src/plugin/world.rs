//! The world around an allocator in a running program: its GPU, streams that still use freed memory,
//! and a log from which the address of a block is taken.

use super::gpu::Gpu;
use super::record::Deeds;
use super::stream_events::StreamEvents;
use super::waiting::Waiting;
use crate::alloc::{Action, ActionKind, Env, Handle};
use crate::device::Counting;

/// The world.
pub(super) struct World {
    pub(super) device: Counting<Gpu>,
    pub(super) waiting: Waiting<StreamEvents>,
    /// Address of the last block that was handed out.
    pub(super) address: u64,
    /// What the allocator did; kept while a trace is recorded.
    pub(super) deeds: Deeds,
    pub(super) records: bool,
}

impl World {
    /// A call of the program begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.waiting.begin();
        self.device.inner_mut().begin();
    }
}

impl Env for World {
    type Device = Counting<Gpu>;
    /// Addresses come with the log.
    const LOG: bool = true;

    #[inline]
    fn device(&mut self) -> &mut Counting<Gpu> {
        &mut self.device
    }

    #[inline]
    fn next_completed(&mut self) -> Option<Handle> {
        let ended = self.waiting.next_ended()?;
        if self.records {
            self.deeds.ended.push(ended.block);
        }
        Some(ended.handle)
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        let ended = self.waiting.wait()?;
        if self.records {
            self.deeds.waited.push(ended.block);
        }
        Some(ended.handle)
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let ended = self.waiting.wait_of(wanted)?;
        if self.records {
            self.deeds.waited.push(ended.block);
        }
        Some(ended.handle)
    }

    #[inline]
    fn log(&mut self, action: Action) {
        if action.kind == ActionKind::Alloc {
            self.address = action.address;
        }
        if self.records {
            self.deeds.actions.push(action);
        }
    }
}
