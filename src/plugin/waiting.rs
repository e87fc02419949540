//! Freed blocks whose memory other streams still use: an event on each of these streams tells when
//! that has ended (specs/pytorch_caching.md 4.2 to 4.4, PyTorch's own rules).
//!
//! ```text
//!   stream 7   event of A ── event of B ── ...     oldest first; the first that is not done
//!   stream 9   event of A ── ...                   stops its stream only
//!
//!   A: 2 events outstanding ──> 1 ──> 0: its use has ended
//! ```
//!
//! While a graph is captured no event can be recorded or asked for: what is freed meanwhile waits
//! without events, which are recorded when the capture is over.

use std::collections::VecDeque;

use crate::alloc::Handle;
use crate::units::BlockId;

/// Events on streams of the device.
pub(super) trait Events {
    /// An event that was recorded and is not yet released.
    type Id: Copy;

    /// Records an event behind the work that was given to the stream so far; nothing if the driver
    /// does not take it.
    fn record(&mut self, stream: u64) -> Option<Self::Id>;

    /// Whether that work is done. Releases the event if so.
    fn is_done(&mut self, event: Self::Id) -> bool;

    /// Waits for that work and releases the event.
    fn wait(&mut self, event: Self::Id);

    /// Waits for everything that was given to the device.
    fn wait_for_all(&mut self);
}

/// A freed block that waits.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    handle: Handle,
    block: BlockId,
    /// Events outstanding.
    left: u32,
}

/// A block whose use has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The allocator's name for it.
    pub(super) handle: Handle,
    /// Its number.
    pub(super) block: BlockId,
}

/// Events of one stream, oldest first, each with the ticket that it belongs to.
struct Queue<I> {
    stream: u64,
    events: VecDeque<(I, u32)>,
}

/// Blocks that wait.
pub(super) struct Waiting<E: Events> {
    events: E,
    queues: Vec<Queue<E::Id>>,
    /// Tickets by number; those in `spare` stand for nothing.
    tickets: Vec<Ticket>,
    spare: Vec<u32>,
    /// Tickets without events yet, with the streams that they wait for.
    unrecorded: Vec<(u32, Vec<u64>)>,
    ended: VecDeque<Ended>,
    /// Graph captures under way.
    captures: u32,
    /// Streams were asked since [`Self::begin`].
    polled: bool,
}

impl<E: Events> Waiting<E> {
    /// Nothing waits.
    pub(super) fn new(events: E) -> Waiting<E> {
        Waiting {
            events,
            queues: Vec::new(),
            tickets: Vec::new(),
            spare: Vec::new(),
            unrecorded: Vec::new(),
            ended: VecDeque::new(),
            captures: 0,
            polled: false,
        }
    }

    /// A request begins: streams are asked once for each.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.polled = false;
    }

    /// A capture of a graph begins.
    pub(super) fn capture_begins(&mut self) {
        self.captures += 1;
    }

    /// It ends.
    pub(super) fn capture_ends(&mut self) {
        self.captures = self.captures.saturating_sub(1);
    }

    /// A freed block waits for what these streams were given so far.
    pub(super) fn add(&mut self, handle: Handle, block: BlockId, streams: Vec<u64>) {
        let ticket = Ticket { handle, block, left: 0 };
        let number = match self.spare.pop() {
            Some(number) => {
                self.tickets[number as usize] = ticket;
                number
            }
            None => {
                self.tickets.push(ticket);
                (self.tickets.len() - 1) as u32
            }
        };
        if self.captures > 0 {
            self.unrecorded.push((number, streams));
        } else {
            self.record(number, &streams);
        }
    }

    /// The next block whose use has ended, as streams tell without being waited for.
    #[inline]
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        if self.tickets.len() == self.spare.len() && self.ended.is_empty() {
            return None;
        }
        self.poll();
        self.ended.pop_front()
    }

    /// The next block when everything is waited for. Nothing during a capture, which forbids it.
    pub(super) fn wait(&mut self) -> Option<Ended> {
        self.wait_of(&mut |_| true)
    }

    /// As [`Self::wait`], of the wanted blocks only.
    pub(super) fn wait_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Ended> {
        if let Some(at) = self.ended.iter().position(|ended| wanted(ended.handle)) {
            return self.ended.remove(at);
        }
        if self.captures > 0 {
            return None;
        }
        self.record_late();
        if let Some(at) = self.ended.iter().position(|ended| wanted(ended.handle)) {
            return self.ended.remove(at);
        }
        let oldest = self.queues.iter().flat_map(|queue| &queue.events).map(|&(_, ticket)| ticket);
        let tickets = &self.tickets;
        let number = oldest.into_iter().find(|&it| wanted(tickets[it as usize].handle))?;
        for at in 0..self.queues.len() {
            let queue = &mut self.queues[at].events;
            while let Some(place) = queue.iter().position(|&(_, ticket)| ticket == number) {
                let Some((event, _)) = queue.remove(place) else { break };
                self.events.wait(event);
                self.tickets[number as usize].left -= 1;
            }
        }
        Some(self.end(number))
    }

    /// Blocks that wait.
    pub(super) fn len(&self) -> usize {
        self.tickets.len() - self.spare.len() + self.ended.len()
    }

    /// Records an event on every stream. Where the driver does not take one, as for a stream that
    /// is gone, the whole device is waited for instead.
    fn record(&mut self, number: u32, streams: &[u64]) {
        for &stream in streams {
            let Some(event) = self.events.record(stream) else {
                self.events.wait_for_all();
                continue;
            };
            self.tickets[number as usize].left += 1;
            let at = self.queues.iter().position(|queue| queue.stream == stream);
            let at = at.unwrap_or_else(|| {
                self.queues.push(Queue { stream, events: VecDeque::new() });
                self.queues.len() - 1
            });
            self.queues[at].events.push_back((event, number));
        }
        if self.tickets[number as usize].left == 0 {
            let ended = self.end(number);
            self.ended.push_back(ended);
        }
    }

    /// Records what could not be recorded during captures.
    fn record_late(&mut self) {
        for (number, streams) in std::mem::take(&mut self.unrecorded) {
            self.record(number, &streams);
        }
    }

    fn poll(&mut self) {
        if self.polled || self.captures > 0 {
            return;
        }
        self.polled = true;
        self.record_late();
        for at in 0..self.queues.len() {
            while let Some(&(event, number)) = self.queues[at].events.front() {
                if !self.events.is_done(event) {
                    break;
                }
                self.queues[at].events.pop_front();
                let ticket = &mut self.tickets[number as usize];
                ticket.left -= 1;
                if ticket.left == 0 {
                    let ended = self.end(number);
                    self.ended.push_back(ended);
                }
            }
        }
    }

    fn end(&mut self, number: u32) -> Ended {
        self.spare.push(number);
        let ticket = self.tickets[number as usize];
        Ended { handle: ticket.handle, block: ticket.block }
    }
}
