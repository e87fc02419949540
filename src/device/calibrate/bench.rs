//! A device under a clock: memory that comes and goes in a mix of sizes, and what every call takes.

use std::collections::BTreeMap;
use std::hint::black_box;

use super::Case;
use crate::device::{Device, DeviceCall, DeviceError, PhysicalHandle};
use crate::units::MIB;
use crate::units::random::Random;

/// What a sample is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) case: Case,
    pub(super) call: DeviceCall,
    pub(super) size_bytes: u64,
    pub(super) pieces: u64,
}

/// What is taken, and later given back, as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Malloc {
        size_bytes: u64,
    },
    /// A range of pieces. If `is_whole`, access and unmap are one call for all of them.
    Range {
        piece_bytes: u64,
        pieces: u64,
        is_whole: bool,
    },
}

impl Item {
    /// Memory that it holds.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Item::Malloc { size_bytes } => size_bytes,
            Item::Range { piece_bytes, pieces, .. } => piece_bytes.saturating_mul(pieces),
        }
    }

    /// What it is called, and the size of a piece.
    pub(super) fn named(self) -> (&'static str, u64) {
        match self {
            Item::Malloc { size_bytes } => ("mallocs", size_bytes),
            Item::Range { piece_bytes, .. } => ("pieces", piece_bytes),
        }
    }
}

/// Items that take turns, and how much is held at most.
#[derive(Clone, Debug)]
pub(super) struct Mix {
    pub(super) deck: Vec<Item>,
    pub(super) count_max: usize,
    pub(super) memory_bytes: u64,
}

/// What is held of an item, which may be half made.
struct Held {
    item: Item,
    address: u64,
    /// Of a range, by address: the first `mapped` of them are mapped.
    handles: Vec<PhysicalHandle>,
    mapped: u64,
}

/// A call failed that must not.
pub(super) struct Failed {
    pub(super) item: Item,
    pub(super) error: DeviceError,
}

/// Memory of the host that is walked through between calls, as an allocator walks through its own.
struct HostMemory {
    words: Vec<u64>,
    at: usize,
}

impl HostMemory {
    const WORDS: usize = (2 * MIB / 8) as usize;
    const LINE_WORDS: usize = 8;
    /// 64 KiB a time: more than the nearest cache holds, and a few microseconds.
    const LINES: usize = 1024;

    fn walk(&mut self) {
        for _ in 0..Self::LINES {
            self.words[self.at] = self.words[self.at].wrapping_add(1);
            self.at = (self.at + Self::LINE_WORDS) % Self::WORDS;
        }
        black_box(&self.words);
    }
}

/// The device, the clock, and what is held.
pub(super) struct Bench<'a, D, C> {
    device: &'a mut D,
    clock: C,
    host: HostMemory,
    random: Random,
    samples: BTreeMap<Key, Vec<f64>>,
    held: Vec<Held>,
    held_bytes: u64,
    /// Nothing was given back since nothing was held.
    is_growing: bool,
}

impl<'a, D: Device, C: FnMut() -> u64> Bench<'a, D, C> {
    pub(super) fn new(device: &'a mut D, clock: C) -> Self {
        Bench {
            device,
            clock,
            host: HostMemory { words: vec![0; HostMemory::WORDS], at: 0 },
            random: Random::new(1),
            samples: BTreeMap::new(),
            held: Vec::new(),
            held_bytes: 0,
            is_growing: true,
        }
    }

    pub(super) fn now_ns(&mut self) -> u64 {
        (self.clock)()
    }

    /// All samples in nanoseconds a piece, in the order in which they came.
    pub(super) fn samples(&self) -> &BTreeMap<Key, Vec<f64>> {
        &self.samples
    }

    /// Forgets what was sampled so far.
    pub(super) fn forget(&mut self) {
        self.samples.clear();
    }

    /// Lets memory settle, then takes every item of a mix once, in random order, and gives back
    /// others at random where it must, to hold no more than it may; then gives back all. Returns the
    /// items for which the device had no room even alone.
    ///
    /// # Errors
    /// An error of the device other than running out of something.
    pub(super) fn run(&mut self, mix: &Mix, settle_ns: u64) -> Result<Vec<Item>, Failed> {
        let mut deck = mix.deck.clone();
        for place in (1..deck.len()).rev() {
            deck.swap(place, self.random.below(place as u64 + 1) as usize);
        }
        let mut left_out = Vec::new();
        self.settle(settle_ns);
        self.is_growing = true;
        for item in deck {
            while self.held.len() >= mix.count_max
                || !self.held.is_empty() && self.held_bytes + item.bytes() > mix.memory_bytes
            {
                self.give_one_back()?;
            }
            while let Err(error) = self.take(item) {
                match error {
                    DeviceError::OutOfMemory { .. }
                    | DeviceError::OutOfAddresses { .. }
                    | DeviceError::TooManyMappings { .. } => {}
                    _ => return Err(Failed { item, error }),
                }
                self.drop_half_made();
                if self.held.is_empty() {
                    left_out.push(item);
                    break;
                }
                self.give_one_back()?;
            }
        }
        while !self.held.is_empty() {
            self.give_one_back()?;
        }
        Ok(left_out)
    }

    /// Lets so much time go by that freed memory is cleared, with calls that keep the GPU awake but
    /// free nothing worth the name.
    pub(super) fn settle(&mut self, ns: u64) {
        /// Should the clock stand still.
        const CALLS_MAX: u64 = 1_000_000;
        let start_ns = (self.clock)();
        for _ in 0..CALLS_MAX {
            if (self.clock)().saturating_sub(start_ns) >= ns {
                break;
            }
            // Without room for that there is nothing to be awake for.
            let Ok(address) = self.device.malloc(2 * MIB) else { break };
            let _ = self.device.free(address);
        }
    }

    /// One call under the clock, as a sample of `pieces` pieces.
    fn timed<T>(
        &mut self,
        call: DeviceCall,
        size_bytes: u64,
        pieces: u64,
        make: impl FnOnce(&mut D) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.host.walk();
        let before_ns = (self.clock)();
        let done = make(self.device)?;
        let ns = (self.clock)().saturating_sub(before_ns) as f64 / pieces as f64;
        let takes_memory = matches!(call, DeviceCall::Malloc | DeviceCall::Create);
        let case = match pieces {
            1 if takes_memory && self.is_growing => Case::Settled,
            1 => Case::Mixed,
            _ => Case::Whole,
        };
        let key = Key { case, call, size_bytes, pieces };
        self.samples.entry(key).or_default().push(ns);
        Ok(done)
    }

    fn take(&mut self, item: Item) -> Result<(), DeviceError> {
        let bytes = item.bytes();
        let address = match item {
            Item::Malloc { size_bytes } => {
                self.timed(DeviceCall::Malloc, size_bytes, 1, |device| device.malloc(size_bytes))?
            }
            Item::Range { .. } => self.timed(DeviceCall::AddressReserve, bytes, 1, |device| {
                device.address_reserve(bytes)
            })?,
        };
        self.held_bytes += bytes;
        self.held.push(Held { item, address, handles: Vec::new(), mapped: 0 });
        match item {
            Item::Malloc { .. } => Ok(()),
            Item::Range { piece_bytes, pieces, is_whole } => {
                self.fill(address, piece_bytes, pieces, is_whole)
            }
        }
    }

    /// Makes the pieces of the range that came last, one after the other.
    fn fill(
        &mut self,
        address: u64,
        piece_bytes: u64,
        pieces: u64,
        is_whole: bool,
    ) -> Result<(), DeviceError> {
        for piece in 0..pieces {
            let at = address + piece * piece_bytes;
            let handle = self
                .timed(DeviceCall::Create, piece_bytes, 1, |device| device.create(piece_bytes))?;
            if let Some(held) = self.held.last_mut() {
                held.handles.push(handle);
            }
            self.timed(DeviceCall::Map, piece_bytes, 1, |device| device.map(at, handle))?;
            if let Some(held) = self.held.last_mut() {
                held.mapped += 1;
            }
            if !is_whole {
                let open = |device: &mut D| device.set_access(at, piece_bytes);
                self.timed(DeviceCall::SetAccess, piece_bytes, 1, open)?;
            }
        }
        if is_whole {
            let open = |device: &mut D| device.set_access(address, pieces * piece_bytes);
            self.timed(DeviceCall::SetAccess, piece_bytes, pieces, open)?;
        }
        Ok(())
    }

    /// Gives back one of the items that are held, at random, under the clock.
    fn give_one_back(&mut self) -> Result<(), Failed> {
        self.is_growing = false;
        let place = self.random.below(self.held.len().max(1) as u64) as usize;
        if place >= self.held.len() {
            return Ok(());
        }
        let mut held = self.held.swap_remove(place);
        self.held_bytes -= held.item.bytes();
        let given = match held.item {
            Item::Malloc { size_bytes } => {
                let free = |device: &mut D| device.free(held.address).map(drop);
                self.timed(DeviceCall::Free, size_bytes, 1, free)
            }
            Item::Range { .. } => self.give_range_back(&mut held),
        };
        given.map_err(|error| {
            let item = held.item;
            drop_untimed(self.device, held);
            Failed { item, error }
        })
    }

    fn give_range_back(&mut self, held: &mut Held) -> Result<(), DeviceError> {
        let Item::Range { piece_bytes, pieces, is_whole } = held.item else { return Ok(()) };
        let address = held.address;
        if is_whole {
            let close = |device: &mut D| device.unmap(address, pieces * piece_bytes);
            self.timed(DeviceCall::Unmap, piece_bytes, pieces, close)?;
            held.mapped = 0;
        }
        while let Some(handle) = held.handles.pop() {
            let at = address + held.handles.len() as u64 * piece_bytes;
            if !is_whole {
                let close = |device: &mut D| device.unmap(at, piece_bytes);
                self.timed(DeviceCall::Unmap, piece_bytes, 1, close)?;
                held.mapped -= 1;
            }
            self.timed(DeviceCall::Release, piece_bytes, 1, |device| device.release(handle))?;
        }
        let total_bytes = pieces * piece_bytes;
        let free = |device: &mut D| device.address_free(address, total_bytes);
        self.timed(DeviceCall::AddressFree, total_bytes, 1, free)
    }

    /// Gives back what came last if it is a range that was not finished.
    fn drop_half_made(&mut self) {
        let is_half_made = |held: &mut Held| match held.item {
            Item::Malloc { .. } => false,
            Item::Range { pieces, .. } => held.mapped < pieces,
        };
        if let Some(held) = self.held.pop_if(is_half_made) {
            self.held_bytes -= held.item.bytes();
            drop_untimed(self.device, held);
        }
    }

    /// Gives everything back that is still held.
    pub(super) fn give_back(&mut self) {
        for held in self.held.drain(..) {
            drop_untimed(self.device, held);
        }
        self.held_bytes = 0;
    }
}

/// Gives back what is held of an item, as far as the device goes along: after an error there is
/// nothing more to be done about what it refuses.
fn drop_untimed<D: Device>(device: &mut D, held: Held) {
    match held.item {
        Item::Malloc { .. } => {
            let _ = device.free(held.address);
        }
        Item::Range { piece_bytes, pieces, .. } => {
            if held.mapped > 0 {
                let _ = device.unmap(held.address, held.mapped * piece_bytes);
            }
            for handle in held.handles {
                let _ = device.release(handle);
            }
            let _ = device.address_free(held.address, pieces * piece_bytes);
        }
    }
}
