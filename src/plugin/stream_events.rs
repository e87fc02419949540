//! Events on streams: those of CUDA, or of a simulated device, whose work is done at once.

use super::waiting::Events;
use crate::device::cuda::{CudaEvents, EventId};

/// Events of whichever device it is.
pub(super) enum StreamEvents {
    /// No work is ever under way.
    Sim,
    /// Those of a GPU.
    Cuda(CudaEvents),
}

impl Events for StreamEvents {
    /// Nothing on a simulated device.
    type Id = Option<EventId>;

    fn record(&mut self, stream: u64) -> Option<Option<EventId>> {
        match self {
            StreamEvents::Sim => Some(None),
            // SAFETY: the stream is one that the program gave to `record_stream` for a block that it
            // had not freed then. PyTorch's own streams are never destroyed, and whoever brings
            // another one has to keep it as long as the memory, as with PyTorch's own allocator.
            StreamEvents::Cuda(events) => unsafe { events.record(stream) }.ok().map(Some),
        }
    }

    fn is_done(&mut self, event: Option<EventId>) -> bool {
        match (self, event) {
            // After an error of the GPU nothing is known to be done.
            (StreamEvents::Cuda(events), Some(event)) => events.is_done(event).unwrap_or(false),
            _ => true,
        }
    }

    fn wait(&mut self, event: Option<EventId>) {
        if let (StreamEvents::Cuda(events), Some(event)) = (self, event) {
            // After an error of the GPU there is nothing left to wait for.
            let _ = events.wait(event);
        }
    }

    fn wait_for_all(&mut self) {
        if let StreamEvents::Cuda(events) = self {
            // As above.
            let _ = events.wait_for_all();
        }
    }
}
