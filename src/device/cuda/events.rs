//! "Has what was started on that stream until now ended?"
//!
//! One event of CUDA's for each question, taken from a pool and given back when the answer is yes:
//! making one costs more than asking.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Code, Context, NOT_READY, done};
use super::{Cuda, CudaError};

/// A moment on a stream. Names nothing once the moment is known to have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId {
    slot: u32,
    turn: u32,
}

struct Event {
    raw: sys::CUevent,
    /// How often the event was given back: an [`EventId`] of another turn has passed.
    turn: u32,
}

/// Moments on the streams of one GPU.
///
/// Once a moment is known to have passed ([`Self::is_done`], [`Self::wait`]), its event serves the
/// next, and the [`EventId`] counts as passed for good.
pub struct CudaEvents {
    context: Arc<Context>,
    events: Vec<Event>,
    /// Slots of `events` that nobody waits for.
    spare: Vec<u32>,
}

// SAFETY: an event is a handle that any thread may use; the driver locks inside.
unsafe impl Send for CudaEvents {}

impl fmt::Debug for CudaEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (events, spare) = (self.events.len(), self.spare.len());
        f.debug_struct("CudaEvents")
            .field("events", &events)
            .field("spare", &spare)
            .finish_non_exhaustive()
    }
}

/// An error of a call for an event.
fn refused(call: &'static str) -> impl Fn(Code) -> CudaError {
    move |code| CudaError::Driver { call, code }
}

impl Cuda {
    /// Moments on the streams of this GPU. Goes on working after this [`Cuda`] is gone.
    pub fn events(&self) -> CudaEvents {
        CudaEvents { context: Arc::clone(&self.context), events: Vec::new(), spare: Vec::new() }
    }
}

impl CudaEvents {
    /// The moment up to which work has been started on `stream` (`cudaStream_t` as a number; 0 is
    /// the default stream).
    ///
    /// # Safety
    /// `stream` is 0 or a stream of this GPU that has not been destroyed: the driver follows it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn record(&mut self, stream: u64) -> Result<EventId, CudaError> {
        let slot = match self.spare.last() {
            Some(&slot) => slot,
            None => self.create().map_err(refused("cuEventCreate"))?,
        };
        let event = &self.events[slot as usize];
        let _entered = self.context.enter().map_err(refused("cuCtxSetCurrent"))?;
        let stream = stream as usize as sys::CUstream;
        // SAFETY: the event is ours; the stream lives, as the caller promises.
        done(unsafe { sys::cuEventRecord(event.raw, stream) }).map_err(refused("cuEventRecord"))?;
        let turn = event.turn;
        self.spare.pop();
        Ok(EventId { slot, turn })
    }

    /// Whether the moment has passed.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also with the error of what had been started.
    pub fn is_done(&mut self, id: EventId) -> Result<bool, CudaError> {
        let Some(raw) = self.pending(id) else { return Ok(true) };
        let answer = {
            let _entered = self.context.enter().map_err(refused("cuCtxSetCurrent"))?;
            // SAFETY: the event is ours and was recorded.
            done(unsafe { sys::cuEventQuery(raw) })
        };
        match answer {
            Ok(()) => {
                self.give_back(id);
                Ok(true)
            }
            Err(NOT_READY) => Ok(false),
            Err(code) => Err(refused("cuEventQuery")(code)),
        }
    }

    /// Waits until the moment has passed.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also with the error of what had been started.
    pub fn wait(&mut self, id: EventId) -> Result<(), CudaError> {
        let Some(raw) = self.pending(id) else { return Ok(()) };
        {
            let _entered = self.context.enter().map_err(refused("cuCtxSetCurrent"))?;
            // SAFETY: the event is ours and was recorded.
            done(unsafe { sys::cuEventSynchronize(raw) }).map_err(refused("cuEventSynchronize"))?;
        }
        self.give_back(id);
        Ok(())
    }

    /// Waits until everything that was started on the GPU has ended.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn wait_for_all(&self) -> Result<(), CudaError> {
        self.context.synchronize().map_err(refused("cuCtxSynchronize"))
    }

    /// The event of a moment that is not known to have passed.
    fn pending(&self, id: EventId) -> Option<sys::CUevent> {
        let event = self.events.get(id.slot as usize)?;
        (event.turn == id.turn).then_some(event.raw)
    }

    fn give_back(&mut self, id: EventId) {
        let event = &mut self.events[id.slot as usize];
        event.turn = event.turn.wrapping_add(1);
        self.spare.push(id.slot);
    }

    /// A new event, entered as spare.
    fn create(&mut self) -> Result<u32, Code> {
        let _entered = self.context.enter()?;
        let mut raw: sys::CUevent = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the driver writes one pointer.
        done(unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        let slot = self.events.len() as u32;
        self.events.push(Event { raw, turn: 0 });
        self.spare.push(slot);
        Ok(slot)
    }
}

impl Drop for CudaEvents {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            for event in &self.events {
                // SAFETY: ours, destroyed once; the driver keeps it until its moment has passed.
                let _ = unsafe { sys::cuEventDestroy_v2(event.raw) };
            }
        }
    }
}
