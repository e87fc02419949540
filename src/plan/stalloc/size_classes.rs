//! STAlloc's default planner: size classes and skylines (`split-and-fuse`, `allocator.py`).
//!
//! Requests of one rounded size are a class. Classes come from the largest to the smallest; each
//! fills what the layers built so far leave free above their *skylines*, and forms new layers of
//! what is left over:
//!
//! ```text
//!   bytes                                      a skyline only rises: what lies under a block is
//!     ^  ┌─────┐   top of layer 1, later       lost for its time, and so is the hole here
//!     │  └─────┘   classes
//!     │ ───────────────────────── layer 1: height of its class
//!     │  ┌──────┐  ┌─────────┐    skyline of layer 0:  ▔▔▔▔▔▁▁▔▔▔
//!     │  │ 4096 │..│  4096   │    what fits a layer goes on top of the skyline there
//!     └──┴──────┴──┴─────────┴──> time
//! ```
//!
//! Faithful to the tool in every quirk unless [`Settings::wrap_safe`] is set: six rehearsals that
//! forget to remove what they place, positions taken for elements when the order is changed,
//! replicas that only guard a layer of the same class.
//!
//! The one design decision: a rehearsal asks only *which* requests fit somewhere, and layers do not
//! meet in it. So a layer is gone through only while some request that could fit it is not yet
//! known to fit, and a request could fit only if its life lies inside a gap of the skyline. The
//! tool's own queries, one for each request and layer and pass on arrays as long as the trace, are
//! quadratic; these give the same answer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::files::{ALIGNMENT_BYTES, ListedRequest};

/// The second iteration, which stands for all later ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteadyIteration {
    /// First event: the tool takes the first malloc of an activation in it.
    pub start: u64,
    /// Last event: the tool takes the last free in it.
    pub end: u64,
}

impl SteadyIteration {
    fn period(self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// How to plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The second iteration.
    pub steady: SteadyIteration,
    /// Keep free, in every layer, what a request of the second iteration will take one iteration
    /// later, so that the plan can be replayed for ever. The tool does not.
    pub wrap_safe: bool,
}

/// What a planner of STAlloc gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Offset of every request in bytes, in the order they were given; multiples of 512.
    pub offsets_bytes: Vec<u64>,
    /// End of the highest layer in bytes.
    pub peak_bytes: u64,
    /// Layers that were formed.
    pub layers: usize,
}

/// Rounds a size up as the tool does. Saturates at the top of 64 bits.
pub fn rounded(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(ALIGNMENT_BYTES).saturating_mul(ALIGNMENT_BYTES)
}

/// Plans requests, which may come in any order; times of mallocs and frees are all different.
pub fn plan(requests: &[ListedRequest], settings: &Settings) -> Placement {
    let mut by_start: Vec<usize> = (0..requests.len()).collect();
    by_start.sort_by_key(|&index| (requests[index].start, index));
    plan_in_order(requests, &by_start, Layers::new(requests, settings))
}

/// Plans the requests that `order` names, above the layers that are there. Within a class the order
/// stands.
pub(super) fn plan_in_order(
    requests: &[ListedRequest],
    order: &[usize],
    mut layers: Layers,
) -> Placement {
    let mut classes: BTreeMap<u64, Vec<Life>> = BTreeMap::new();
    for &index in order {
        let class = classes.entry(rounded(requests[index].size_bytes)).or_default();
        class.push(Life::of(index, &requests[index]));
    }
    let mut offsets_bytes = std::mem::take(&mut layers.offsets_bytes);
    let former = layers.former;
    for (&size, class) in classes.iter().rev() {
        let formed = former.form(class);
        let mut class = Class::new(size, formed.into_iter().flatten().collect(), &layers);
        class.rehearse(&layers.list);
        class.place(&mut layers.list, &mut offsets_bytes);
        let mut left = class.left_over();
        left.sort_by_key(|life| life.start);
        for formed in former.form(&left) {
            let offset = layers.push(size, &formed);
            for life in &formed {
                offsets_bytes[life.index] = offset;
            }
        }
    }
    Placement { offsets_bytes, peak_bytes: layers.top, layers: layers.list.len() }
}

/// When a request, or a group of them, is live. Both ends count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    /// Whose it is.
    pub(super) index: usize,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Life {
    pub(super) fn of(index: usize, request: &ListedRequest) -> Life {
        Life { index, start: request.start, end: request.end }
    }

    /// Lives that merely touch do not overlap.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

/// Forms layers: chains of requests of one class that are never live together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Former {
    pub(super) settings: Settings,
    /// Last end of any request (T).
    pub(super) last_end: u64,
}

/// A layer as it is formed.
#[derive(Default)]
struct Chain {
    lives: Vec<Life>,
    /// Its members one iteration later, ascending: they are members of a chain, all moved alike.
    replicas: Vec<(u64, u64)>,
}

impl Former {
    /// A request one iteration later, if it will come again before the last end.
    pub(super) fn replica(&self, life: &Life) -> Option<(u64, u64)> {
        let Settings { steady, .. } = self.settings;
        let period = steady.period();
        let start = life.start.saturating_add(period);
        (life.start >= steady.start && start <= self.last_end)
            .then(|| (start, life.end.saturating_add(period).min(self.last_end)))
    }

    /// Puts each request behind the chain that ended last before it and has no replica there, or
    /// begins a new chain.
    pub(super) fn form(&self, lives: &[Life]) -> Vec<Vec<Life>> {
        let mut chains: Vec<Chain> = Vec::new();
        let mut tails: BTreeSet<(u64, Reverse<usize>)> = BTreeSet::new();
        for life in lives {
            let mut ended = tails.range(..=(life.start, Reverse(0))).rev();
            let found = ended.find(|(_, Reverse(at))| chains[*at].takes(life)).copied();
            let at = match found {
                Some(tail) => {
                    tails.remove(&tail);
                    tail.1.0
                }
                None => {
                    chains.push(Chain::default());
                    chains.len() - 1
                }
            };
            tails.insert((life.end, Reverse(at)));
            chains[at].lives.push(*life);
            chains[at].replicas.extend(self.replica(life));
        }
        chains.into_iter().map(|chain| chain.lives).collect()
    }
}

impl Chain {
    /// Whether no replica overlaps the request. Its members do not: they end before it starts.
    fn takes(&self, life: &Life) -> bool {
        let at = self.replicas.partition_point(|&(_, end)| end <= life.start);
        self.replicas.get(at).is_none_or(|&(start, end)| !life.overlaps(start, end))
    }
}

/// Heights over time, as `(first time, height)` up to the next; the first is at 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Skyline(Vec<(u64, u64)>);

impl Skyline {
    fn flat() -> Skyline {
        Skyline(vec![(0, 0)])
    }

    /// The step that holds at a time.
    fn at(&self, time: u64) -> usize {
        self.0.partition_point(|&(start, _)| start <= time) - 1
    }

    /// The greatest height from `start` to `end`, both counted; or any that is above `limit`.
    fn highest(&self, start: u64, end: u64, limit: u64) -> u64 {
        let mut highest = 0;
        for &(from, height) in &self.0[self.at(start)..] {
            if from > end {
                break;
            }
            highest = highest.max(height);
            if highest > limit {
                break;
            }
        }
        highest
    }

    /// Sets the height from `start` to `end`, both counted.
    fn set(&mut self, start: u64, end: u64, height: u64) {
        let first = self.at(start);
        let last = first + self.0[first..].partition_point(|&(from, _)| from <= end) - 1;
        let after = self.0[last].1;
        let next = self.0.get(last + 1).map(|&(from, _)| from);
        let then = end.saturating_add(1);
        let steps = [(start, height), (then, after)];
        let steps = if next == Some(then) { &steps[..1] } else { &steps[..] };
        let kept = first + usize::from(self.0[first].0 != start);
        self.0.splice(kept..last + 1, steps.iter().copied());
    }

    /// Raises the height to at least `height` from `start` to `end`, both counted.
    fn raise(&mut self, start: u64, end: u64, height: u64) {
        let mut from = start;
        let mut at = self.at(start);
        let mut raised: Vec<(u64, u64)> = Vec::new();
        while from <= end {
            let until = self.0.get(at + 1).map_or(end, |&(next, _)| (next - 1).min(end));
            if self.0[at].1 < height {
                raised.push((from, until));
            }
            from = until + 1;
            at += 1;
        }
        for (from, until) in raised {
            self.set(from, until, height);
        }
    }

    /// Maximal times, both ends counted, at which the height is at most `limit`.
    fn gaps(&self, limit: u64, gaps: &mut Vec<(u64, u64)>) {
        let mut open = None;
        for &(from, height) in &self.0 {
            match (height <= limit, open) {
                (true, None) => open = Some(from),
                (false, Some(start)) => {
                    gaps.push((start, from - 1));
                    open = None;
                }
                _ => {}
            }
        }
        gaps.extend(open.map(|start| (start, u64::MAX)));
    }
}

/// A stripe of memory for all time.
#[derive(Clone, Debug)]
struct Layer {
    offset: u64,
    height: u64,
    skyline: Skyline,
}

/// The layers so far, from the bottom.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    list: Vec<Layer>,
    top: u64,
    former: Former,
    /// Offsets of requests that lie in the layers from the start.
    offsets_bytes: Vec<u64>,
}

impl Layers {
    /// No layers yet.
    pub(super) fn new(requests: &[ListedRequest], settings: &Settings) -> Layers {
        let last_end = requests.iter().map(|request| request.end).max().unwrap_or(0);
        let former = Former { settings: *settings, last_end };
        let offsets_bytes = vec![0; requests.len()];
        Layers { list: Vec::new(), top: 0, former, offsets_bytes }
    }

    /// A new layer at the top that holds these; gives its offset.
    fn push(&mut self, height: u64, lives: &[Life]) -> u64 {
        let blocks: Vec<(Life, u64)> = lives.iter().map(|&life| (life, height)).collect();
        self.push_stack(height, &blocks)
    }

    /// A new layer at the top with these inside, each with its upper end above the layer's bottom;
    /// gives the layer's offset.
    pub(super) fn push_stack(&mut self, height: u64, blocks: &[(Life, u64)]) -> u64 {
        let mut skyline = Skyline::flat();
        let mut occupy = |start: u64, end: u64, top| {
            // One event early, as in the tool.
            skyline.raise(start.saturating_sub(1), end.saturating_sub(1), top);
        };
        for (life, top) in blocks {
            occupy(life.start, life.end, *top);
            if let Some((start, end)) = self.former.replica(life).filter(|_| self.wrap_safe()) {
                occupy(start, end, *top);
            }
        }
        let offset = self.top;
        self.list.push(Layer { offset, height, skyline });
        self.top = self.top.saturating_add(height);
        offset
    }

    /// Says where a request lies that a layer holds from the start.
    pub(super) fn settle(&mut self, index: usize, offset_bytes: u64) {
        self.offsets_bytes[index] = offset_bytes;
    }

    pub(super) fn former(&self) -> Former {
        self.former
    }

    fn wrap_safe(&self) -> bool {
        self.former.settings.wrap_safe
    }
}

/// Rehearsals before the placement, as many as the tool's stop rule comes to.
const REHEARSALS: usize = 6;

/// The requests of one rounded size, and which layers could hold them.
struct Class {
    size: u64,
    /// In the order of the layers that they would form; when each is live, and when it would be one
    /// iteration later if that counts.
    lives: Vec<(Life, Option<(u64, u64)>)>,
    /// Elements of `lives` in the order in which they are tried.
    order: Vec<u32>,
    placed: Vec<bool>,
    /// For every layer the elements that its skyline as it stands leaves room for, one by one.
    fitting: Vec<Vec<u32>>,
}

impl Class {
    fn new(size: u64, lives: Vec<Life>, layers: &Layers) -> Class {
        let order: Vec<u32> = (0..lives.len() as u32).collect();
        let mut by_start = order.clone();
        by_start.sort_by_key(|&at| lives[at as usize].start);
        let starts: Vec<u64> = by_start.iter().map(|&at| lives[at as usize].start).collect();
        let mut gaps = Vec::new();
        let fitting = layers.list.iter().map(|layer| {
            let mut fitting = Vec::new();
            gaps.clear();
            if let Some(limit) = layer.height.checked_sub(size) {
                layer.skyline.gaps(limit, &mut gaps);
            }
            let mut from = 0;
            for &(start, end) in &gaps {
                from += starts[from..].partition_point(|&other| other < start);
                let inside = starts[from..].partition_point(|&other| other <= end);
                let inside = &by_start[from..from + inside];
                fitting.extend(inside.iter().filter(|&&at| lives[at as usize].end <= end));
            }
            fitting
        });
        let fitting = fitting.collect();
        let placed = vec![false; lives.len()];
        let again = |life: &Life| layers.former.replica(life).filter(|_| layers.wrap_safe());
        let lives = lives.iter().map(|life| (*life, again(life))).collect();
        Class { size, lives, order, placed, fitting }
    }

    /// Puts those first that find no place, several times over.
    fn rehearse(&mut self, layers: &[Layer]) {
        if layers.is_empty() {
            return;
        }
        let mut scratch = Skyline::flat();
        for _ in 0..REHEARSALS {
            let ranks = self.ranks();
            let mut fits = vec![false; self.lives.len()];
            for (layer, fitting) in layers.iter().zip(&self.fitting) {
                let unknown = fitting.iter().filter(|&&at| !fits[at as usize]);
                let Some(last) = unknown.map(|&at| ranks[at as usize]).max() else { continue };
                scratch.0.clone_from(&layer.skyline.0);
                let tried = fitting.iter().map(|&at| ranks[at as usize]);
                let mut tried: Vec<u32> = tried.filter(|&rank| rank <= last).collect();
                tried.sort_unstable();
                for rank in tried {
                    // What has a place stays in: the tool places it again in every later layer.
                    let at = self.order[rank as usize];
                    if self.stack(at, layer.height, &mut scratch).is_some() {
                        fits[at as usize] = true;
                    }
                }
            }
            let order = self.failures_first(&fits);
            if order == self.order {
                // The next rehearsal would be the same.
                break;
            }
            self.order = order;
        }
    }

    /// The order with those in front that did not fit; but as the tool does it, which takes their
    /// positions for elements.
    fn failures_first(&self, fits: &[bool]) -> Vec<u32> {
        let positions = 0..self.order.len() as u32;
        let mut failed: Vec<u32> =
            positions.filter(|&at| !fits[self.order[at as usize] as usize]).collect();
        let mut in_front = vec![false; self.order.len()];
        for &at in &failed {
            in_front[at as usize] = true;
        }
        failed.extend(self.order.iter().filter(|&&at| !in_front[at as usize]));
        failed
    }

    /// Places what fits, layer by layer.
    fn place(&mut self, layers: &mut [Layer], offsets_bytes: &mut [u64]) {
        let ranks = self.ranks();
        for (at, layer) in layers.iter_mut().enumerate() {
            let unplaced = self.fitting[at].iter().filter(|&&at| !self.placed[at as usize]);
            let mut tried: Vec<u32> = unplaced.map(|&at| ranks[at as usize]).collect();
            tried.sort_unstable();
            for rank in tried {
                let element = self.order[rank as usize];
                if let Some(height) = self.stack(element, layer.height, &mut layer.skyline) {
                    let (life, _) = self.lives[element as usize];
                    offsets_bytes[life.index] = layer.offset + height;
                    self.placed[element as usize] = true;
                }
            }
        }
    }

    /// Stacks an element on a skyline if it stays below `limit`; gives its height there.
    fn stack(&self, element: u32, limit: u64, skyline: &mut Skyline) -> Option<u64> {
        let (life, again) = self.lives[element as usize];
        let room = limit - self.size;
        let mut height = skyline.highest(life.start, life.end, room);
        if let Some((start, end)) = again {
            height = height.max(skyline.highest(start, end, room));
        }
        if height > room {
            return None;
        }
        skyline.set(life.start, life.end, height + self.size);
        if let Some((start, end)) = again {
            skyline.set(start, end, height + self.size);
        }
        Some(height)
    }

    /// Position of every element in the order.
    fn ranks(&self) -> Vec<u32> {
        let mut ranks = vec![0; self.order.len()];
        for (rank, &at) in self.order.iter().enumerate() {
            ranks[at as usize] = rank as u32;
        }
        ranks
    }

    fn left_over(&self) -> Vec<Life> {
        let left = self.lives.iter().zip(&self.placed).filter(|(_, placed)| !**placed);
        left.map(|((life, _), _)| *life).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(rows: &[(u64, u64, u64)]) -> Vec<ListedRequest> {
        let row = |&(start, end, size_bytes)| ListedRequest { start, end, size_bytes };
        rows.iter().map(row).collect()
    }

    fn settings(start: u64, end: u64) -> Settings {
        Settings { steady: SteadyIteration { start, end }, wrap_safe: false }
    }

    /// Golden vector A of the description of the tool: start, end, size, offset.
    const A: [(u64, u64, u64, u64); 22] = [
        (1, 20, 4000, 0),
        (2, 9, 2000, 4096),
        (3, 5, 1500, 9216),
        (4, 8, 2048, 7168),
        (6, 7, 1025, 9216),
        (10, 15, 1536, 9216),
        (11, 19, 2000, 7168),
        (12, 14, 3000, 4096),
        (13, 30, 1024, 14336),
        (16, 18, 1600, 4096),
        (17, 26, 600, 6144),
        (21, 40, 4096, 0),
        (22, 29, 2000, 7168),
        (23, 25, 1500, 9216),
        (24, 28, 2048, 4096),
        (27, 45, 1025, 11264),
        (31, 35, 1536, 12800),
        (32, 39, 2000, 7168),
        (33, 44, 3000, 4096),
        (34, 50, 1024, 14336),
        (36, 38, 1600, 9216),
        (37, 43, 600, 12800),
    ];

    #[test]
    fn golden_vector_a_of_the_tool() {
        let requests =
            A.map(|(start, end, size_bytes, _)| ListedRequest { start, end, size_bytes });
        for (start, end) in [(21, 40), (1000, 1020)] {
            let placement = plan(&requests, &settings(start, end));
            assert_eq!(placement.offsets_bytes, A.map(|(.., offset)| offset));
            assert_eq!((placement.peak_bytes, placement.layers), (15360, 7));
        }
    }

    #[test]
    fn golden_vector_c_of_the_tool_ignores_the_next_iteration() {
        let requests = listed(&[(1, 2, 4096), (11, 12, 4096), (13, 14, 1024), (18, 25, 1024)]);
        let placement = plan(&requests, &settings(11, 20));
        assert_eq!(placement.offsets_bytes, [0, 0, 0, 0]);
        assert_eq!(placement.peak_bytes, 4096);
        // With the real period of ten events the 4096 bytes of (11, 12) come again at (21, 22), while
        // the last request is live: 5120 bytes are needed, and the last lies above them.
        let safe = Settings { wrap_safe: true, ..settings(11, 21) };
        let placement = plan(&requests, &safe);
        assert_eq!(placement.offsets_bytes, [0, 0, 0, 4096]);
        assert_eq!(placement.peak_bytes, 5120);
    }

    #[test]
    fn steps_of_a_skyline() {
        let mut skyline = Skyline::flat();
        skyline.set(3, 7, 5);
        skyline.set(8, 9, 6);
        assert_eq!(skyline.0, [(0, 0), (3, 5), (8, 6), (10, 0)]);
        skyline.raise(1, 8, 6);
        assert_eq!(skyline.highest(0, 0, 9), 0);
        assert_eq!(skyline.highest(0, 1, 9), 6);
        assert_eq!(skyline.highest(10, 99, 9), 0);
        let mut gaps = Vec::new();
        skyline.gaps(5, &mut gaps);
        assert_eq!(gaps, [(0, 0), (10, u64::MAX)]);
        skyline.set(0, 20, 1);
        assert_eq!(skyline.0, [(0, 1), (21, 0)]);
    }

    #[test]
    fn nothing_and_time_zero_are_planned() {
        assert_eq!(plan(&[], &Settings::default()), Placement::default());
        let placement = plan(&listed(&[(0, 3, 1), (1, 2, 1)]), &Settings::default());
        assert_eq!(placement.peak_bytes, 1024);
    }
}
