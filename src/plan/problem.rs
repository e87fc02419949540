//! What is to be packed, and what comes out.

use serde::Serialize;

/// Most bytes that a size, an offset or a sum of them may have: far above any memory, and sums of
/// two stay below 2^63.
pub const BYTES_MAX: u64 = 1 << 60;

/// A buffer: a rectangle whose place in time is given and whose place in memory is sought.
///
/// Time is in ticks of the caller's choice and half-open: `[start, end)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// First tick at which it is live.
    pub start: u64,
    /// First tick at which it is no longer live. A buffer that ends where it starts needs no room.
    pub end: u64,
    /// Bytes; 0 needs no room.
    pub size_bytes: u64,
    /// Whatever most buffers have not.
    pub extra: Option<Box<Extra>>,
}

/// What only some buffers ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extra {
    /// Its offset is a multiple of this many bytes; at least 1.
    pub alignment_bytes: u64,
    /// The only offset it may have: weights already placed, pointers captured in a graph.
    pub fixed_offset_bytes: Option<u64>,
    /// Buffers of one group begin at one offset, whatever their sizes and lifetimes, and may share
    /// memory with each other: views, donated buffers, outputs in place.
    pub alias: Option<u32>,
    /// When it needs less than its size, in order of time and disjoint.
    pub gaps: Vec<Gap>,
    /// The memory it lies in: pools have separate addresses.
    pub pool: u32,
    /// Where it would like to lie, as after a small change to a problem solved before.
    pub hint_offset_bytes: Option<u64>,
}

impl Default for Extra {
    fn default() -> Self {
        Extra {
            alignment_bytes: 1,
            fixed_offset_bytes: None,
            alias: None,
            gaps: Vec::new(),
            pool: 0,
            hint_offset_bytes: None,
        }
    }
}

/// An interval inside a buffer's life in which it needs only a window of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First tick.
    pub start: u64,
    /// First tick after it.
    pub end: u64,
    /// Bytes from the buffer's offset that are in use all the same, half-open; nothing if none are.
    pub window_bytes: Option<(u64, u64)>,
}

/// Buffers to be packed as low as possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The buffers, in an order that means nothing but which offset is whose.
    pub buffers: Vec<Buffer>,
    /// Sizes are rounded up to multiples of this and offsets are multiples of it; at least 1.
    pub granularity_bytes: u64,
    /// Most bytes of each pool, by its number; pools beyond the end have no limit.
    pub capacities_bytes: Vec<Option<u64>>,
}

impl Default for Problem {
    fn default() -> Self {
        Problem { buffers: Vec::new(), granularity_bytes: 1, capacities_bytes: Vec::new() }
    }
}

impl Buffer {
    /// A buffer without anything special.
    pub fn new(start: u64, end: u64, size_bytes: u64) -> Buffer {
        Buffer { start, end, size_bytes, extra: None }
    }

    /// The same with one more wish.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Extra)) -> Buffer {
        change(self.extra.get_or_insert_default());
        self
    }

    /// The pool that it lies in.
    pub fn pool(&self) -> u32 {
        self.extra.as_ref().map_or(0, |extra| extra.pool)
    }
}

/// A problem that contradicts itself. Buffers are named by their index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadProblem {
    /// It ends before it starts.
    #[error("buffer {buffer}: it ends at {end}, before it starts at {start}")]
    Backwards {
        /// The buffer.
        buffer: usize,
        /// Its start.
        start: u64,
        /// Its end.
        end: u64,
    },
    /// A size, offset or alignment beyond [`BYTES_MAX`], or live bytes beyond it.
    #[error("buffer {buffer}: {what} is above 2^60 bytes")]
    TooLarge {
        /// The buffer.
        buffer: usize,
        /// Which figure.
        what: &'static str,
    },
    /// An alignment of 0.
    #[error("buffer {buffer}: an alignment of 0; expected at least 1")]
    NoAlignment {
        /// The buffer.
        buffer: usize,
    },
    /// A gap that is no part of the buffer's life, or out of order, or a window outside the buffer.
    #[error(
        "buffer {buffer}: gap {gap} is outside its life or size, empty, or not after the gap \
         before it"
    )]
    Gap {
        /// The buffer.
        buffer: usize,
        /// Which gap, from 0.
        gap: usize,
    },
    /// A fixed offset that its alignment does not allow.
    #[error("buffer {buffer}: the fixed offset {offset} is no multiple of {alignment}")]
    FixedAlignment {
        /// The buffer.
        buffer: usize,
        /// The offset.
        offset: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// Two fixed buffers that cannot both lie where they must.
    #[error("buffers {first} and {second} are fixed onto the same memory at the same time")]
    FixedOverlap {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
    },
    /// Members of an alias group with different fixed offsets or pools.
    #[error("buffers {first} and {second} are aliases with different fixed offsets or pools")]
    AliasConflict {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A granularity of 0, or more pools, buffers or instants than can be numbered.
    #[error("{0}")]
    Whole(&'static str),
}

impl BadProblem {
    /// The buffers that it names.
    pub fn buffers(&self) -> Vec<usize> {
        match *self {
            BadProblem::Backwards { buffer, .. }
            | BadProblem::TooLarge { buffer, .. }
            | BadProblem::NoAlignment { buffer }
            | BadProblem::Gap { buffer, .. }
            | BadProblem::FixedAlignment { buffer, .. } => vec![buffer],
            BadProblem::FixedOverlap { first, second }
            | BadProblem::AliasConflict { first, second } => vec![first, second],
            BadProblem::Whole(_) => Vec::new(),
        }
    }
}

/// Offsets for a problem, and how good they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Offset of every buffer in bytes, in the order of the problem.
    pub offsets_bytes: Vec<u64>,
    /// What each pool needs, by its number.
    pub pools: Vec<PoolPacking>,
}

/// What one pool needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolPacking {
    /// Bytes from offset 0 to the end of the highest buffer.
    pub height_bytes: u64,
    /// No packing is lower than this.
    pub lower_bound_bytes: u64,
    /// The height is the lowest possible.
    pub proven: bool,
    /// When the lower bound is reached, earliest first: at most [`BINDING_MAX`] intervals.
    pub binding: Vec<Binding>,
    /// What found the height: `largest first`, `repair`, `exact`, ...
    pub found_by: String,
}

/// Most intervals that are kept of those at which a bound is reached.
pub const BINDING_MAX: usize = 16;

/// An interval at which a pool's lower bound is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Binding {
    /// First tick.
    pub start: u64,
    /// First tick after it.
    pub end: u64,
    /// Buffers that are live in it.
    pub buffers: u64,
}

impl Packing {
    /// Heights of all pools together, in bytes.
    pub fn height_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.height_bytes).sum()
    }

    /// Lower bounds of all pools together, in bytes.
    pub fn lower_bound_bytes(&self) -> u64 {
        self.pools.iter().map(|pool| pool.lower_bound_bytes).sum()
    }

    /// Whether no pool can be lower.
    pub fn proven(&self) -> bool {
        self.pools.iter().all(|pool| pool.proven)
    }
}
