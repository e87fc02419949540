//! An independent judge of packings: shares no code with what makes them.
//!
//! A sweep over time holds the bytes that are in use and looks, whenever a buffer begins to need
//! some, whether another one has them. Most bytes are held by one buffer alone, in a map of disjoint
//! ranges. Buffers of one alias group may lie over each other in any way, so theirs are held in a
//! segment tree that knows whether the holders of a range are one group or several.
//!
//! ```text
//!   bytes           now
//!     ^      ┌───────┊─┐
//!     │  ┌───┤   b   ┊ │ ┌────────┐     in use now: b and a window of a; c is about to be asked
//!     │  │   └───────┊─┘ │   c    │     for and must find its bytes free
//!     │  │ a  ┌╌╌╌╌╌╌┊╌┐ └────────┘
//!     │  │    ┊ gap  ┊ ┊ │
//!     │  │    ├──────┊─┤ │              O(n log n) in pieces: a buffer with gaps is several
//!     │  └────┴──────┊─┴─┘
//!     └──────────────┊────────────> ticks
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use super::problem::{Buffer, Problem};

/// Highest number that a pool may have: what is returned has an entry for every lower one.
const POOL_MAX: u32 = 65_535;

/// What is wrong with a packing. Buffers are named by their index, the lower one first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Not one offset for every buffer.
    #[error("{offsets} offsets for {buffers} buffers")]
    Count {
        /// Buffers of the problem.
        buffers: usize,
        /// Offsets of the packing.
        offsets: usize,
    },
    /// An offset that its alignment or the granularity does not allow.
    #[error("buffer {buffer}: its offset {offset_bytes} is no multiple of {multiple_bytes}")]
    Misaligned {
        /// The buffer.
        buffer: usize,
        /// Where it lies.
        offset_bytes: u64,
        /// What that must be a multiple of.
        multiple_bytes: u64,
    },
    /// A fixed buffer elsewhere.
    #[error("buffer {buffer}: it lies at {offset_bytes} and is fixed at {fixed_bytes}")]
    Moved {
        /// The buffer.
        buffer: usize,
        /// Where it lies.
        offset_bytes: u64,
        /// Where it must lie.
        fixed_bytes: u64,
    },
    /// Aliases that begin at different offsets or lie in different pools.
    #[error(
        "buffers {first} and {second} are aliases and lie at {first_bytes} and {second_bytes}, in \
         pools {first_pool} and {second_pool}"
    )]
    Apart {
        /// The first buffer of the group.
        first: usize,
        /// One that is elsewhere.
        second: usize,
        /// Offset of the first.
        first_bytes: u64,
        /// Offset of the second.
        second_bytes: u64,
        /// Pool of the first.
        first_pool: u32,
        /// Pool of the second.
        second_pool: u32,
    },
    /// Two buffers need the same bytes at the same time.
    #[error(
        "buffers {first} and {second} both need bytes {low_bytes} to {high_bytes} of pool {pool} \
         at tick {tick}"
    )]
    Overlap {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
        /// Where.
        pool: u32,
        /// First tick at which any two buffers of the pool do.
        tick: u64,
        /// First byte that both need.
        low_bytes: u64,
        /// First byte above that not both need.
        high_bytes: u64,
    },
    /// An end that is no number of 64 bits.
    #[error("buffer {buffer}: its {size_bytes} bytes at {offset_bytes} end beyond 2^64")]
    TooHigh {
        /// The buffer.
        buffer: usize,
        /// Where it lies.
        offset_bytes: u64,
        /// Its size, not yet rounded up.
        size_bytes: u64,
    },
    /// A pool that cannot be numbered.
    #[error("buffer {buffer}: pool {pool} is above {POOL_MAX}")]
    Pool {
        /// The buffer.
        buffer: usize,
        /// Its pool.
        pool: u32,
    },
}

/// Checks that `offsets_bytes` packs `problem`, by the rules of [`Problem`] and its parts, and gives
/// the height of every pool in bytes, by its number.
///
/// A height is the end of the highest byte that any buffer needs at any time, sizes and windows
/// rounded out to the granularity. Whether it is within the pool's capacity is another question:
/// [`beyond_capacity`].
///
/// Takes O(n log n) time and about 100 bytes a buffer.
///
/// # Errors
/// The first breach: of the rules for one buffer and for aliases in the order of the buffers, then
/// overlaps, by pool and tick.
pub fn check(problem: &Problem, offsets_bytes: &[u64]) -> Result<Vec<u64>, Broken> {
    let (buffers, offsets) = (problem.buffers.len(), offsets_bytes.len());
    if buffers != offsets {
        return Err(Broken::Count { buffers, offsets });
    }
    let granularity = problem.granularity_bytes.max(1);
    let mut pieces = Vec::with_capacity(buffers);
    let mut groups = HashMap::new();
    for (index, (buffer, &offset)) in problem.buffers.iter().zip(offsets_bytes).enumerate() {
        check_place(index, buffer, offset, granularity)?;
        if let Some(alias) = alias(buffer) {
            let first = *groups.entry(alias).or_insert(index);
            check_together(problem, offsets_bytes, first, index)?;
        }
        push_pieces(&mut pieces, index, buffer, offset, granularity)?;
    }
    pieces.sort_unstable_by_key(|piece| (piece.pool, piece.start, piece.buffer));
    let mut heights = Vec::new();
    for pool in pieces.chunk_by(|one, next| one.pool == next.pool) {
        heights.resize(pool[0].pool as usize, 0);
        heights.push(pool.iter().map(|piece| piece.high).max().unwrap_or(0));
        sweep(problem, &groups, pool)?;
    }
    Ok(heights)
}

/// Pools whose height is above their capacity, by number. `heights_bytes` as [`check`] gives them.
pub fn beyond_capacity(problem: &Problem, heights_bytes: &[u64]) -> Vec<usize> {
    let pools = heights_bytes.iter().zip(&problem.capacities_bytes).enumerate();
    let beyond = pools.filter(|(_, (height, cap))| cap.is_some_and(|cap| **height > cap));
    beyond.map(|(pool, _)| pool).collect()
}

fn alias(buffer: &Buffer) -> Option<u32> {
    buffer.extra.as_ref().and_then(|extra| extra.alias)
}

/// What can be seen of one buffer alone.
fn check_place(
    buffer: usize,
    asks: &Buffer,
    offset_bytes: u64,
    granularity: u64,
) -> Result<(), Broken> {
    let misaligned = |multiple_bytes| Broken::Misaligned { buffer, offset_bytes, multiple_bytes };
    if !offset_bytes.is_multiple_of(granularity) {
        return Err(misaligned(granularity));
    }
    let Some(extra) = &asks.extra else { return Ok(()) };
    // An alignment of 0 has no multiple but 0; such problems are refused before they are solved.
    if !offset_bytes.is_multiple_of(extra.alignment_bytes) {
        return Err(misaligned(extra.alignment_bytes));
    }
    match extra.fixed_offset_bytes {
        Some(fixed_bytes) if fixed_bytes != offset_bytes => {
            Err(Broken::Moved { buffer, offset_bytes, fixed_bytes })
        }
        _ if extra.pool > POOL_MAX => Err(Broken::Pool { buffer, pool: extra.pool }),
        _ => Ok(()),
    }
}

/// Members of one group begin at one offset of one pool.
fn check_together(
    problem: &Problem,
    offsets_bytes: &[u64],
    first: usize,
    second: usize,
) -> Result<(), Broken> {
    let place = |index: usize| (offsets_bytes[index], problem.buffers[index].pool());
    let ((first_bytes, first_pool), (second_bytes, second_pool)) = (place(first), place(second));
    if (first_bytes, first_pool) == (second_bytes, second_pool) {
        return Ok(());
    }
    Err(Broken::Apart { first, second, first_bytes, second_bytes, first_pool, second_pool })
}

/// Bytes that a buffer needs for a time: `[low, high)` of its pool in `[start, end)`.
#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    end: u64,
    low: u64,
    high: u64,
    buffer: usize,
    pool: u32,
}

/// Cuts a buffer at the ends of its gaps. Its pieces are disjoint in time whatever its gaps are.
fn push_pieces(
    pieces: &mut Vec<Piece>,
    index: usize,
    buffer: &Buffer,
    offset: u64,
    granularity: u64,
) -> Result<(), Broken> {
    let too_high =
        || Broken::TooHigh { buffer: index, offset_bytes: offset, size_bytes: buffer.size_bytes };
    let pool = buffer.pool();
    let mut push = |start: u64, end: u64, low: u64, high: u64| {
        if start >= end || low >= high {
            return Ok(());
        }
        let low = low - low % granularity;
        let high = high.checked_next_multiple_of(granularity).ok_or_else(too_high)?;
        let low = offset.checked_add(low).ok_or_else(too_high)?;
        let high = offset.checked_add(high).ok_or_else(too_high)?;
        pieces.push(Piece { start, end, low, high, buffer: index, pool });
        Ok(())
    };
    let mut from = buffer.start;
    for gap in buffer.extra.iter().flat_map(|extra| &extra.gaps) {
        let start = gap.start.clamp(from, buffer.end.max(from));
        let end = gap.end.clamp(start, buffer.end.max(start));
        push(from, start, 0, buffer.size_bytes)?;
        if let Some((low, high)) = gap.window_bytes {
            push(start, end, low, high.min(buffer.size_bytes))?;
        }
        from = end;
    }
    push(from, buffer.end, 0, buffer.size_bytes)
}

/// Finds the first overlap among the pieces of one pool, which are ordered by start.
fn sweep(problem: &Problem, groups: &HashMap<u32, usize>, pieces: &[Piece]) -> Result<(), Broken> {
    // Who may share memory with whom: everyone with the first buffer of its group.
    let owner = |piece: &Piece| alias(&problem.buffers[piece.buffer]).map(|alias| groups[&alias]);
    let shared = pieces.iter().filter(|piece| owner(piece).is_some());
    let mut together = Together::new(shared.flat_map(|piece| [piece.low, piece.high]).collect());
    let mut alone = Alone::default();
    let mut ends = BinaryHeap::new();
    for (at, piece) in pieces.iter().enumerate() {
        while let Some(&Reverse((end, ended))) = ends.peek() {
            if end > piece.start {
                break;
            }
            ends.pop();
            let ended: &Piece = &pieces[ended];
            match owner(ended) {
                None => alone.remove(ended),
                Some(_) => together.remove(ended),
            }
        }
        let owner = owner(piece);
        if alone.holds_any(piece) || together.others_hold_any(piece, owner) {
            return Err(overlap(problem, &pieces[..at], piece));
        }
        match owner {
            None => alone.insert(piece),
            Some(owner) => together.insert(piece, owner),
        }
        ends.push(Reverse((piece.end, at)));
    }
    Ok(())
}

/// Names the first buffer among `earlier` that is in the way of `piece`.
fn overlap(problem: &Problem, earlier: &[Piece], piece: &Piece) -> Broken {
    let group = |piece: &Piece| alias(&problem.buffers[piece.buffer]);
    let in_the_way = |other: &&Piece| {
        let aliases = group(piece).is_some() && group(other) == group(piece);
        other.end > piece.start && other.low < piece.high && piece.low < other.high && !aliases
    };
    let other = earlier.iter().filter(in_the_way).min_by_key(|other| other.buffer);
    // There is one whenever this is called; were there none, the piece would be named with itself.
    let other = other.unwrap_or(piece);
    Broken::Overlap {
        first: other.buffer.min(piece.buffer),
        second: other.buffer.max(piece.buffer),
        pool: piece.pool,
        tick: piece.start,
        low_bytes: other.low.max(piece.low),
        high_bytes: other.high.min(piece.high),
    }
}

/// Ranges that are held by one buffer each: disjoint, their ends by their beginnings.
#[derive(Default)]
struct Alone(BTreeMap<u64, u64>);

impl Alone {
    fn holds_any(&self, piece: &Piece) -> bool {
        // Disjoint ranges end in the order in which they begin: the last to begin below the
        // piece's end is the last to end.
        let last = self.0.range(..piece.high).next_back();
        last.is_some_and(|(_, &high)| high > piece.low)
    }

    fn insert(&mut self, piece: &Piece) {
        self.0.insert(piece.low, piece.high);
    }

    fn remove(&mut self, piece: &Piece) {
        self.0.remove(&piece.low);
    }
}

/// No owner.
const NOBODY: usize = usize::MAX;
/// More than one owner.
const SEVERAL: usize = usize::MAX - 1;

/// Ranges that are held by groups: those of one group may overlap, those of two never do.
///
/// A segment tree over the ranges between neighbouring bounds of all pieces. Node 1 is the root,
/// nodes `2n` and `2n + 1` are the halves of node `n`.
struct Together {
    /// Bounds of the pieces, ascending and distinct; leaf `i` is `bounds[i]..bounds[i + 1]`.
    bounds: Vec<u64>,
    nodes: Vec<Node>,
}

#[derive(Clone, Copy)]
struct Node {
    /// Pieces that cover the whole node, and no node around it.
    covers: u32,
    /// Whose they are.
    owner: usize,
    /// Who holds anything in the node by pieces kept in it or below it.
    inside: usize,
}

impl Together {
    fn new(mut bounds: Vec<u64>) -> Together {
        bounds.sort_unstable();
        bounds.dedup();
        let leaves = bounds.len().saturating_sub(1);
        let count = if leaves == 0 { 0 } else { 2 * leaves.next_power_of_two() };
        let free = Node { covers: 0, owner: NOBODY, inside: NOBODY };
        Together { bounds, nodes: vec![free; count] }
    }

    fn insert(&mut self, piece: &Piece, owner: usize) {
        let range = self.leaves(piece);
        self.change(1, (0, self.nodes.len() / 2), range, &mut |node| {
            node.covers += 1;
            node.owner = owner;
        });
    }

    fn remove(&mut self, piece: &Piece) {
        let range = self.leaves(piece);
        self.change(1, (0, self.nodes.len() / 2), range, &mut |node| {
            node.covers -= 1;
            if node.covers == 0 {
                node.owner = NOBODY;
            }
        });
    }

    fn others_hold_any(&self, piece: &Piece, owner: Option<usize>) -> bool {
        let range = self.leaves(piece);
        !self.nodes.is_empty()
            && self.asked(1, (0, self.nodes.len() / 2), range, owner.unwrap_or(NOBODY))
    }

    /// Leaves that have bytes in common with a piece, which need not be one of the pieces here.
    fn leaves(&self, piece: &Piece) -> (usize, usize) {
        let first = self.bounds.partition_point(|&bound| bound <= piece.low).saturating_sub(1);
        let after = self.bounds.partition_point(|&bound| bound < piece.high);
        (first, after.min(self.bounds.len().saturating_sub(1)))
    }

    /// Changes the largest nodes within `range` that cover it together. `node` spans `span`.
    fn change(
        &mut self,
        node: usize,
        span: (usize, usize),
        range: (usize, usize),
        change: &mut impl FnMut(&mut Node),
    ) {
        if span.1 <= range.0 || range.1 <= span.0 {
            return;
        }
        let leaf = span.1 - span.0 == 1;
        if range.0 <= span.0 && span.1 <= range.1 {
            change(&mut self.nodes[node]);
        } else {
            let middle = span.0.midpoint(span.1);
            self.change(2 * node, (span.0, middle), range, change);
            self.change(2 * node + 1, (middle, span.1), range, change);
        }
        let below = |child: usize| if leaf { NOBODY } else { self.nodes[child].inside };
        let below = joined(below(2 * node), below(2 * node + 1));
        self.nodes[node].inside = joined(self.nodes[node].owner, below);
    }

    /// Whether any leaf in `range` is held by someone else than `owner`, who may be nobody.
    fn asked(
        &self,
        node: usize,
        span: (usize, usize),
        range: (usize, usize),
        owner: usize,
    ) -> bool {
        if span.1 <= range.0 || range.1 <= span.0 {
            return false;
        }
        let other = |holder: usize| holder != NOBODY && holder != owner;
        if range.0 <= span.0 && span.1 <= range.1 {
            return other(self.nodes[node].inside);
        }
        let middle = span.0.midpoint(span.1);
        other(self.nodes[node].owner)
            || self.asked(2 * node, (span.0, middle), range, owner)
            || self.asked(2 * node + 1, (middle, span.1), range, owner)
    }
}

/// Who holds anything of two ranges, one of which is held by each.
fn joined(one: usize, other: usize) -> usize {
    match (one, other) {
        (NOBODY, owner) | (owner, NOBODY) => owner,
        (one, other) if one == other => one,
        _ => SEVERAL,
    }
}
