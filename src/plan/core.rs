//! One pool's problem in the form that solvers take, and the way back.
//!
//! ```text
//!   Problem ─ pools apart ─ aliases merged ─ units ─ births only ─ cut where nothing lives ─┐
//!                                                                                           v
//!   offsets <── placed below, put together <── offsets of its items <── solver <── Core, Core, ...
//! ```
//!
//! Nothing of this changes the optimum:
//!
//! - **units**: every size, alignment and fixed offset is divided by their common divisor;
//! - **births only**: time keeps only instants at which something begins, since live bytes are at a
//!   maximum there; what ends between two of them ends at the second;
//! - **cut**: where nothing is live, what comes before and after does not meet. Each such stretch
//!   is a [`Core`] of its own;
//! - **floor**: what is live throughout a stretch lies at its bottom, if nothing there is fixed,
//!   aligned or shaped: whatever lies below it in some packing can be moved above it. What is left
//!   may fall apart once more: steps of a training run above its weights.

use std::collections::BTreeMap;

use super::problem::{BYTES_MAX, BadProblem, Buffer, Extra, Problem};

/// How often a stretch is cut above a floor, and its pieces above theirs.
const FLOORS_MAX: u32 = 4;
/// Most pools of a problem.
const POOLS_MAX: u32 = 1 << 16;

/// A rectangle: `[start, end)` in instants by `[low, high)` in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    /// First instant.
    pub start: u32,
    /// First instant after it.
    pub end: u32,
    /// Lowest unit.
    pub low: u64,
    /// First unit above it.
    pub high: u64,
}

/// Something to place: what moves as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// First instant at which any of it is live.
    pub start: u32,
    /// First instant at which none of it is.
    pub end: u32,
    /// Units from its offset to the end of its highest part.
    pub size: u64,
    /// Its offset is a multiple of this many units.
    pub align: u64,
    /// Where it would like to lie, in units; `u64::MAX` for no wish.
    pub hint: u64,
    /// Its parts in [`Core::parts`], first and one past the last. None for a plain rectangle.
    pub parts: (u32, u32),
}

impl Item {
    /// Whether it is one rectangle.
    pub fn plain(&self) -> bool {
        self.parts.0 == self.parts.1
    }
}

/// A stretch of one pool's time for solvers: all in units and instants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Core {
    /// Instants: `0..instants`.
    pub instants: u32,
    /// What is to be placed.
    pub items: Vec<Item>,
    /// Parts of the items that are not plain, relative to the item's offset, disjoint in time.
    pub parts: Vec<Rect>,
    /// What is fixed, disjoint.
    pub obstacles: Vec<Rect>,
}

impl Core {
    /// The rectangles of an item relative to its offset.
    pub fn rects(&self, index: usize) -> impl Iterator<Item = Rect> + '_ {
        let item = &self.items[index];
        let whole = Rect { start: item.start, end: item.end, low: 0, high: item.size };
        let parts = &self.parts[item.parts.0 as usize..item.parts.1 as usize];
        item.plain().then_some(whole).into_iter().chain(parts.iter().copied())
    }

    /// Whether every item is a plain rectangle without alignment and nothing is fixed.
    pub fn simple(&self) -> bool {
        let simple = |item: &Item| item.plain() && item.align == 1;
        self.obstacles.is_empty() && self.items.iter().all(simple)
    }

    /// Units that are live at every instant, obstacles included.
    pub fn loads(&self) -> impl Iterator<Item = u64> {
        let mut change = vec![0u64; self.instants as usize + 1];
        let mut add = |rect: &Rect| {
            let units = rect.high - rect.low;
            // Sums may pass 0 on their way: what is live is never negative.
            change[rect.start as usize] = change[rect.start as usize].wrapping_add(units);
            change[rect.end as usize] = change[rect.end as usize].wrapping_sub(units);
        };
        (0..self.items.len()).for_each(|index| self.rects(index).for_each(|rect| add(&rect)));
        self.obstacles.iter().for_each(add);
        change.truncate(self.instants as usize);
        change.into_iter().scan(0u64, |live, change| {
            *live = live.wrapping_add(change);
            Some(*live)
        })
    }

    /// Units from 0 to the end of the highest item or obstacle.
    pub fn height(&self, offsets: &[u64]) -> u64 {
        let tops = self.items.iter().zip(offsets).map(|(item, offset)| offset + item.size);
        tops.chain(self.obstacles.iter().map(|fixed| fixed.high)).max().unwrap_or(0)
    }
}

/// A [`Core`] and whose its items are.
#[derive(Clone, Debug, Default)]
pub struct Stretch {
    /// The problem.
    pub core: Core,
    /// Owner of every item of the core.
    owners: Vec<u32>,
    /// Owners that lie below everything else, lowest first, with their offsets in units.
    pub floor: Vec<(u32, u64)>,
    /// Units below the core: what its offsets are counted from.
    pub floor_units: u64,
    /// Owners below the core, whether they stand in `floor` here or in a stretch before.
    pub floor_owners: u64,
    /// First tick of every instant.
    ticks: std::ops::Range<usize>,
}

/// One pool in the form that solvers take.
#[derive(Clone, Debug)]
pub struct PoolCores {
    /// Number of the pool.
    pub pool: u32,
    /// Stretches between which nothing is live, in order of time.
    pub stretches: Vec<Stretch>,
    /// Tick of every instant, all stretches one after the other.
    births: Vec<u64>,
}

/// A whole problem in the form that solvers take.
#[derive(Clone, Debug)]
pub struct Normal {
    /// Pools that hold anything, by number.
    pub pools: Vec<PoolCores>,
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Owner of every buffer: what it moves with.
    owner_of: Owners,
    /// Offsets that are known from the start: fixed ones, and those of buffers without room.
    known_bytes: Vec<(u32, u64)>,
    buffers: usize,
}

/// Who moves with whom.
#[derive(Clone, Debug)]
enum Owners {
    /// Everyone alone: buffer and owner have one number.
    Alone,
    /// The first buffer of its group, for every buffer.
    Groups(Vec<u32>),
}

/// Owners that take part in placing, with what they ask for together.
struct Owned {
    owner: u32,
    pool: u32,
    align_bytes: u64,
    fixed_bytes: Option<u64>,
    hint_bytes: Option<u64>,
    /// In ticks and bytes, disjoint; one rectangle from 0 for most.
    rects: Rects,
}

/// One rectangle without a heap allocation, or several.
enum Rects {
    One(Span),
    Several(Vec<Span>),
}

/// A rectangle in ticks and bytes, relative to the owner's offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: u64,
    end: u64,
    low: u64,
    high: u64,
}

impl Rects {
    fn as_slice(&self) -> &[Span] {
        match self {
            Rects::One(span) => std::slice::from_ref(span),
            Rects::Several(spans) => spans,
        }
    }
}

impl Normal {
    /// Brings a problem into the form that solvers take.
    ///
    /// # Errors
    /// If the problem contradicts itself.
    pub fn of(problem: &Problem) -> Result<Normal, BadProblem> {
        check(problem)?;
        let owner_of = owners(problem)?;
        let mut known_bytes = Vec::new();
        let owned = owned(problem, &owner_of, &mut known_bytes)?;
        let unit_bytes = unit_bytes(problem.granularity_bytes, &owned);
        let fixed = owned.iter().filter_map(|one| Some((one.owner, one.fixed_bytes?)));
        known_bytes.extend(fixed);
        let pools =
            by_pool(owned).into_iter().map(|(pool, owned)| pool_cores(pool, owned, unit_bytes));
        let pools = pools.collect::<Result<_, _>>()?;
        let buffers = problem.buffers.len();
        Ok(Normal { pools, unit_bytes, owner_of, known_bytes, buffers })
    }

    /// Offsets in bytes for every buffer of the problem, from those in units for every stretch of
    /// every pool.
    pub fn offsets_bytes(&self, solved: &[Vec<Vec<u64>>]) -> Vec<u64> {
        let mut offsets = vec![0; self.buffers];
        for &(owner, offset) in &self.known_bytes {
            offsets[owner as usize] = offset;
        }
        for (pool, solved) in self.pools.iter().zip(solved) {
            for (stretch, solved) in pool.stretches.iter().zip(solved) {
                for &(owner, offset) in &stretch.floor {
                    offsets[owner as usize] = offset * self.unit_bytes;
                }
                for (&owner, &offset) in stretch.owners.iter().zip(solved) {
                    offsets[owner as usize] = (stretch.floor_units + offset) * self.unit_bytes;
                }
            }
        }
        if let Owners::Groups(owner_of) = &self.owner_of {
            for (buffer, &owner) in owner_of.iter().enumerate() {
                offsets[buffer] = offsets[owner as usize];
            }
        }
        offsets
    }
}

impl PoolCores {
    /// The tick of an instant of a stretch; of the one past its last instant, where it ends.
    pub fn tick(&self, stretch: usize, instant: u32) -> u64 {
        let at = self.stretches[stretch].ticks.start + instant as usize;
        self.births.get(at).copied().unwrap_or(u64::MAX)
    }
}

/// Rounds up to a multiple. Sizes are below [`BYTES_MAX`], so nothing overflows.
fn round_up(bytes: u64, multiple: u64) -> u64 {
    bytes.div_ceil(multiple) * multiple
}

/// Greatest common divisor; with 0 the other number.
pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Least common multiple, or nothing if it is beyond [`BYTES_MAX`].
fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b).filter(|&multiple| multiple <= BYTES_MAX)
}

/// Checks what can be seen of one buffer at a time.
fn check(problem: &Problem) -> Result<(), BadProblem> {
    if problem.granularity_bytes == 0 || problem.granularity_bytes > BYTES_MAX {
        return Err(BadProblem::Whole("the granularity is 0 or above 2^60 bytes"));
    }
    if u32::try_from(problem.buffers.len()).is_err() {
        return Err(BadProblem::Whole("more than 2^32 buffers"));
    }
    for (index, buffer) in problem.buffers.iter().enumerate() {
        let too_large = |what| Err(BadProblem::TooLarge { buffer: index, what });
        if buffer.pool() >= POOLS_MAX {
            return Err(BadProblem::Whole("a pool number above 65535"));
        }
        if buffer.end < buffer.start {
            let (start, end) = (buffer.start, buffer.end);
            return Err(BadProblem::Backwards { buffer: index, start, end });
        }
        if buffer.size_bytes > BYTES_MAX {
            return too_large("the size");
        }
        let Some(extra) = &buffer.extra else { continue };
        if extra.alignment_bytes == 0 {
            return Err(BadProblem::NoAlignment { buffer: index });
        }
        if extra.alignment_bytes > BYTES_MAX {
            return too_large("the alignment");
        }
        if extra.fixed_offset_bytes.is_some_and(|offset| offset > BYTES_MAX) {
            return too_large("the fixed offset");
        }
        check_gaps(index, buffer, extra)?;
    }
    Ok(())
}

fn check_gaps(index: usize, buffer: &Buffer, extra: &Extra) -> Result<(), BadProblem> {
    let mut from = buffer.start;
    for (at, gap) in extra.gaps.iter().enumerate() {
        let inside = from <= gap.start && gap.start < gap.end && gap.end <= buffer.end;
        let (low, high) = gap.window_bytes.unwrap_or((0, 0));
        if !inside || low > high || high > buffer.size_bytes {
            return Err(BadProblem::Gap { buffer: index, gap: at });
        }
        from = gap.end;
    }
    Ok(())
}

/// Groups aliases under their first buffer.
fn owners(problem: &Problem) -> Result<Owners, BadProblem> {
    let alias = |buffer: &Buffer| buffer.extra.as_ref().and_then(|extra| extra.alias);
    if !problem.buffers.iter().any(|buffer| alias(buffer).is_some()) {
        return Ok(Owners::Alone);
    }
    let mut first_of: BTreeMap<u32, u32> = BTreeMap::new();
    let mut owner_of = Vec::with_capacity(problem.buffers.len());
    let mut fixed_of: BTreeMap<u32, (usize, u64)> = BTreeMap::new();
    for (index, buffer) in problem.buffers.iter().enumerate() {
        let Some(group) = alias(buffer) else {
            owner_of.push(index as u32);
            continue;
        };
        let owner = *first_of.entry(group).or_insert(index as u32);
        owner_of.push(owner);
        let first = owner as usize;
        let conflict = |first| Err(BadProblem::AliasConflict { first, second: index });
        if buffer.pool() != problem.buffers[first].pool() {
            return conflict(first);
        }
        if let Some(offset) = buffer.extra.as_ref().and_then(|extra| extra.fixed_offset_bytes) {
            let (first, known) = *fixed_of.entry(group).or_insert((index, offset));
            if known != offset {
                return conflict(first);
            }
        }
    }
    Ok(Owners::Groups(owner_of))
}

/// What every owner asks for. Fixed owners whose aligned offset is wrong are an error; owners
/// without room get an offset at once.
fn owned(
    problem: &Problem,
    owner_of: &Owners,
    known_bytes: &mut Vec<(u32, u64)>,
) -> Result<Vec<Owned>, BadProblem> {
    let mut owned = Vec::with_capacity(problem.buffers.len());
    let mut add = |owner: u32, members: &[u32]| -> Result<(), BadProblem> {
        let one = ask(problem, owner, members)?;
        if one.rects.as_slice().is_empty() {
            let offset = one.fixed_bytes.or(one.hint_bytes.filter(|at| at % one.align_bytes == 0));
            known_bytes.push((owner, offset.unwrap_or(0)));
        } else {
            owned.push(one);
        }
        Ok(())
    };
    match owner_of {
        Owners::Alone => {
            for owner in 0..problem.buffers.len() as u32 {
                add(owner, &[owner])?;
            }
        }
        Owners::Groups(owner_of) => {
            let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
            for (buffer, &owner) in owner_of.iter().enumerate() {
                members.entry(owner).or_default().push(buffer as u32);
            }
            for (owner, members) in members {
                add(owner, &members)?;
            }
        }
    }
    Ok(owned)
}

/// What buffers that share an offset ask for together.
fn ask(problem: &Problem, owner: u32, members: &[u32]) -> Result<Owned, BadProblem> {
    let mut align_bytes = problem.granularity_bytes;
    let (mut fixed_bytes, mut hint_bytes) = (None, None);
    let mut spans = Vec::new();
    let mut plain = None;
    for &member in members {
        let index = member as usize;
        let buffer = &problem.buffers[index];
        let size = round_up(buffer.size_bytes, problem.granularity_bytes);
        if size > BYTES_MAX {
            return Err(BadProblem::TooLarge { buffer: index, what: "the rounded size" });
        }
        if let Some(extra) = &buffer.extra {
            let too_large = BadProblem::TooLarge { buffer: index, what: "the common alignment" };
            align_bytes = lcm(align_bytes, extra.alignment_bytes).ok_or(too_large)?;
            fixed_bytes = fixed_bytes.or(extra.fixed_offset_bytes);
            hint_bytes = hint_bytes.or(extra.hint_offset_bytes);
        }
        let gaps = buffer.extra.as_ref().map_or(&[][..], |extra| &extra.gaps);
        let whole = Span { start: buffer.start, end: buffer.end, low: 0, high: size };
        if members.len() == 1 && gaps.is_empty() {
            plain = Some(whole);
        } else {
            spans_of(whole, gaps, problem.granularity_bytes, &mut spans);
        }
    }
    if let Some(offset) = fixed_bytes
        && offset % align_bytes != 0
    {
        let buffer = members[0] as usize;
        return Err(BadProblem::FixedAlignment { buffer, offset, alignment: align_bytes });
    }
    let empty = |span: &Span| span.start == span.end || span.low == span.high;
    let rects = match plain {
        Some(whole) if !empty(&whole) => Rects::One(whole),
        Some(_) => Rects::Several(Vec::new()),
        None => {
            spans.retain(|span| !empty(span));
            one_or_several(union(spans))
        }
    };
    let pool = problem.buffers[owner as usize].pool();
    Ok(Owned { owner, pool, align_bytes, fixed_bytes, hint_bytes, rects })
}

/// The rectangles of a buffer with gaps. Windows are widened to whole granules.
fn spans_of(whole: Span, gaps: &[super::Gap], granularity_bytes: u64, spans: &mut Vec<Span>) {
    let mut from = whole.start;
    for gap in gaps {
        spans.push(Span { start: from, end: gap.start, ..whole });
        if let Some((low, high)) = gap.window_bytes.filter(|(low, high)| low < high) {
            let low = low / granularity_bytes * granularity_bytes;
            let high = round_up(high, granularity_bytes);
            spans.push(Span { start: gap.start, end: gap.end, low, high });
        }
        from = gap.end;
    }
    spans.push(Span { start: from, end: whole.end, ..whole });
}

fn one_or_several(spans: Vec<Span>) -> Rects {
    match spans[..] {
        [span] if span.low == 0 => Rects::One(span),
        _ => Rects::Several(spans),
    }
}

/// The same area as disjoint rectangles: columns of time, joined where neighbours are alike.
fn union(spans: Vec<Span>) -> Vec<Span> {
    let mut cuts: Vec<u64> = spans.iter().flat_map(|span| [span.start, span.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut by_start = spans;
    by_start.sort_unstable_by_key(|span| span.start);
    let mut waiting = by_start.into_iter().peekable();
    let mut live: Vec<Span> = Vec::new();
    let mut whole: Vec<Span> = Vec::new();
    // Ranges of the column before, as a range of `whole`.
    let mut column_before = 0..0;
    for pair in cuts.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        live.retain(|span| span.end > start);
        while let Some(span) = waiting.next_if(|span| span.start == start) {
            live.push(span);
        }
        live.sort_unstable_by_key(|span| span.low);
        let first = whole.len();
        for span in &live {
            let last = whole.len();
            match whole[first..last].last_mut() {
                Some(range) if range.high >= span.low => range.high = range.high.max(span.high),
                _ => whole.push(Span { start, end, ..*span }),
            }
        }
        let alike = {
            let (before, column) = (&whole[column_before.clone()], &whole[first..]);
            before.len() == column.len()
                && before
                    .iter()
                    .zip(column)
                    .all(|(a, b)| a.end == b.start && a.low == b.low && a.high == b.high)
        };
        if alike {
            whole.truncate(first);
            whole[column_before.clone()].iter_mut().for_each(|range| range.end = end);
        } else {
            column_before = first..whole.len();
        }
    }
    whole
}

/// Owners by their pool.
fn by_pool(owned: Vec<Owned>) -> BTreeMap<u32, Vec<Owned>> {
    let mut pools: BTreeMap<u32, Vec<Owned>> = BTreeMap::new();
    match owned.first().map(|one| one.pool) {
        Some(pool) if owned.iter().all(|one| one.pool == pool) => {
            pools.insert(pool, owned);
        }
        _ => owned.into_iter().for_each(|one| pools.entry(one.pool).or_default().push(one)),
    }
    pools
}

/// What every size and every offset worth trying is a multiple of, in bytes. Offsets worth trying
/// are sums of sizes, rounded up to alignments; the granularity itself is kept by any such sum.
fn unit_bytes(granularity_bytes: u64, owned: &[Owned]) -> u64 {
    let mut unit = 0;
    for one in owned {
        if one.align_bytes != granularity_bytes {
            unit = gcd(unit, one.align_bytes);
        }
        unit = gcd(unit, one.fixed_bytes.unwrap_or(0));
        let spans = one.rects.as_slice().iter();
        unit = spans.fold(unit, |unit, span| gcd(gcd(unit, span.low), span.high));
        if unit == granularity_bytes {
            break;
        }
    }
    unit.max(1)
}

/// Maps ticks to instants.
struct Births {
    /// All births, in order.
    ticks: Vec<u64>,
    /// First of all ticks.
    first: u64,
    /// For every tick from the first birth to the last, how many births are before it. Empty if
    /// the ticks lie too far apart: then births are searched.
    before: Vec<u32>,
}

/// Ticks are counted, not sorted, if there are at most so many for each rectangle.
const TICKS_PER_RECT_MAX: u64 = 4;

impl Births {
    fn of(owned: &[Owned]) -> Births {
        let starts = || owned.iter().flat_map(|one| one.rects.as_slice()).map(|span| span.start);
        let (mut first, mut last, mut count) = (u64::MAX, 0, 0);
        for start in starts() {
            (first, last, count) = (first.min(start), last.max(start), count + 1);
        }
        if count == 0 || (last - first) / TICKS_PER_RECT_MAX >= count {
            let mut ticks: Vec<u64> = starts().collect();
            ticks.sort_unstable();
            ticks.dedup();
            return Births { ticks, first: 0, before: Vec::new() };
        }
        let mut before = vec![0; (last - first) as usize + 1];
        starts().for_each(|start| before[(start - first) as usize] = 1);
        let mut ticks = Vec::new();
        for (at, before) in before.iter_mut().enumerate() {
            let born = *before == 1;
            *before = ticks.len() as u32;
            if born {
                ticks.push(first + at as u64);
            }
        }
        Births { ticks, first, before }
    }

    /// The first birth at or after a tick.
    fn at_or_after(&self, tick: u64) -> u32 {
        if self.before.is_empty() {
            return self.ticks.partition_point(|&birth| birth < tick) as u32;
        }
        let at = tick.saturating_sub(self.first);
        // A table has no more entries than memory has bytes.
        let all = self.ticks.len() as u32;
        usize::try_from(at).ok().and_then(|at| self.before.get(at)).copied().unwrap_or(all)
    }
}

/// The core of one pool, cut where nothing is live.
fn pool_cores(pool: u32, mut owned: Vec<Owned>, unit_bytes: u64) -> Result<PoolCores, BadProblem> {
    let births = Births::of(&owned);
    if births.ticks.len() >= u32::MAX as usize {
        return Err(BadProblem::Whole("more than 2^32 instants"));
    }
    let by_start = |one: &Owned| (first_tick(one), one.owner);
    if !owned.is_sorted_by_key(by_start) {
        owned.sort_unstable_by_key(by_start);
    }
    let mut stretches = Vec::new();
    let mut from = 0;
    let mut end = 0;
    for at in 0..owned.len() {
        let start = births.at_or_after(first_tick(&owned[at]));
        if at > from && start >= end {
            stretch(&owned[from..at], &births, unit_bytes)?.settle(&mut stretches);
            from = at;
        }
        end = end.max(births.at_or_after(last_tick(&owned[at])));
    }
    if from < owned.len() {
        stretch(&owned[from..], &births, unit_bytes)?.settle(&mut stretches);
    }
    Ok(PoolCores { pool, stretches, births: births.ticks })
}

fn first_tick(one: &Owned) -> u64 {
    one.rects.as_slice().iter().map(|span| span.start).min().unwrap_or(0)
}

fn last_tick(one: &Owned) -> u64 {
    one.rects.as_slice().iter().map(|span| span.end).max().unwrap_or(0)
}

/// Owners whose lives hang together, by start.
fn stretch(owned: &[Owned], births: &Births, unit_bytes: u64) -> Result<Stretch, BadProblem> {
    let first = births.at_or_after(first_tick(&owned[0]));
    let mut core = Core { items: Vec::with_capacity(owned.len()), ..Core::default() };
    let mut owners = Vec::with_capacity(owned.len());
    let mut fixed: Vec<(Rect, u32)> = Vec::new();
    for one in owned {
        let rect = |span: &Span| Rect {
            start: births.at_or_after(span.start) - first,
            end: births.at_or_after(span.end) - first,
            low: span.low / unit_bytes,
            high: span.high / unit_bytes,
        };
        let spans = one.rects.as_slice();
        let end = births.at_or_after(last_tick(one)) - first;
        core.instants = core.instants.max(end);
        if let Some(offset) = one.fixed_bytes {
            let offset = offset / unit_bytes;
            let moved =
                |rect: Rect| Rect { low: rect.low + offset, high: rect.high + offset, ..rect };
            fixed.extend(spans.iter().map(|span| (moved(rect(span)), one.owner)));
            continue;
        }
        let parts_from = core.parts.len() as u32;
        if let Rects::Several(spans) = &one.rects {
            core.parts.extend(spans.iter().map(rect));
        }
        core.items.push(Item {
            start: births.at_or_after(first_tick(one)) - first,
            end,
            size: spans.iter().map(|span| span.high / unit_bytes).max().unwrap_or(0),
            align: (one.align_bytes / unit_bytes).max(1),
            hint: one.hint_bytes.map_or(u64::MAX, |hint| hint / unit_bytes),
            parts: (parts_from, core.parts.len() as u32),
        });
        owners.push(one.owner);
    }
    overlap_of_fixed(&mut fixed)?;
    core.obstacles = fixed.into_iter().map(|(rect, _)| rect).collect();
    let ticks = first as usize..first as usize + core.instants as usize;
    let stretch = Stretch { core, owners, ticks, ..Stretch::default() };
    check_live(&stretch)?;
    Ok(stretch)
}

/// Finds two fixed rectangles that overlap. Leaves them ordered by start.
fn overlap_of_fixed(fixed: &mut [(Rect, u32)]) -> Result<(), BadProblem> {
    fixed.sort_unstable_by_key(|(rect, owner)| (rect.start, rect.low, *owner));
    // Live ranges by low end: only neighbours can overlap.
    let mut live: BTreeMap<u64, (Rect, u32)> = BTreeMap::new();
    for &(rect, owner) in fixed.iter() {
        let clash = |found: Option<(&u64, &(Rect, u32))>| {
            found
                .map(|(_, &found)| found)
                .filter(|(other, _)| other.low < rect.high && rect.low < other.high)
        };
        loop {
            let above = clash(live.range(rect.low..).next());
            let Some((other, first)) = above.or_else(|| clash(live.range(..rect.low).next_back()))
            else {
                break;
            };
            if other.end > rect.start {
                let (first, second) = (first as usize, owner as usize);
                return Err(BadProblem::FixedOverlap {
                    first: first.min(second),
                    second: first.max(second),
                });
            }
            live.remove(&other.low);
        }
        live.insert(rect.low, (rect, owner));
    }
    Ok(())
}

/// Sums must stay far from the end of 64 bits.
fn check_live(stretch: &Stretch) -> Result<(), BadProblem> {
    let mut sum = 0u64;
    for (item, &owner) in stretch.core.items.iter().zip(&stretch.owners) {
        sum = sum.saturating_add(item.size).saturating_add(item.align);
        if sum > BYTES_MAX {
            return Err(BadProblem::TooLarge {
                buffer: owner as usize,
                what: "the sum of sizes up to it",
            });
        }
    }
    Ok(())
}

impl Stretch {
    /// Lays floors and cuts above them, as often as it helps, and puts what is left of itself at
    /// the end of `settled`.
    fn settle(mut self, settled: &mut Vec<Stretch>) {
        let mut waiting = Vec::new();
        self.lay_floor();
        waiting.push((0, self));
        while let Some((depth, stretch)) = waiting.pop() {
            let cuts = if depth < FLOORS_MAX { stretch.cuts() } else { Vec::new() };
            if cuts.is_empty() {
                settled.push(stretch);
                continue;
            }
            // The earliest comes off the end first.
            let pieces = stretch.cut(&cuts);
            waiting.extend(pieces.into_iter().rev().map(|mut piece| {
                piece.lay_floor();
                (depth + 1, piece)
            }));
        }
    }

    /// Items, by number, at whose start nothing is live any more. None without a floor: then it
    /// has been cut before.
    fn cuts(&self) -> Vec<usize> {
        let mut cuts = Vec::new();
        if self.floor_owners == 0 || !self.core.simple() {
            return cuts;
        }
        let mut end = 0;
        for (at, item) in self.core.items.iter().enumerate() {
            if at > 0 && item.start >= end {
                cuts.push(at);
            }
            end = end.max(item.end);
        }
        cuts
    }

    /// Its pieces between cuts, earliest first; the first keeps the floor's owners.
    fn cut(mut self, cuts: &[usize]) -> Vec<Stretch> {
        let mut pieces = Vec::with_capacity(cuts.len() + 1);
        for &at in cuts.iter().rev() {
            let piece = self.split_off(at);
            pieces.push(piece);
        }
        self.shift();
        pieces.push(self);
        pieces.reverse();
        pieces
    }

    /// Takes off what begins with an item.
    fn split_off(&mut self, at: usize) -> Stretch {
        let mut piece = Stretch {
            core: Core { items: self.core.items.split_off(at), ..Core::default() },
            owners: self.owners.split_off(at),
            floor: Vec::new(),
            floor_units: self.floor_units,
            floor_owners: self.floor_owners,
            ticks: self.ticks.clone(),
        };
        piece.shift();
        self.core.items.shrink_to_fit();
        self.owners.shrink_to_fit();
        piece
    }

    /// Lets its time be that of its items alone.
    fn shift(&mut self) {
        let first = self.core.items.iter().map(|item| item.start).min().unwrap_or(0);
        let end = self.core.items.iter().map(|item| item.end).max().unwrap_or(first);
        for item in &mut self.core.items {
            item.start -= first;
            item.end -= first;
        }
        self.core.instants = end - first;
        let from = self.ticks.start + first as usize;
        self.ticks = from..from + self.core.instants as usize;
    }

    /// Takes what is live throughout out of the core.
    fn lay_floor(&mut self) {
        let instants = self.core.instants;
        let throughout = |item: &Item| item.start == 0 && item.end == instants;
        if !self.core.simple() || !self.core.items.iter().any(throughout) {
            return;
        }
        let mut top = self.floor_units;
        for (item, &owner) in self.core.items.iter().zip(&self.owners) {
            if throughout(item) {
                self.floor.push((owner, top));
                self.floor_owners += 1;
                top += item.size;
            }
        }
        let laid = top - self.floor_units;
        self.floor_units = top;
        let items = std::mem::take(&mut self.core.items);
        let mut kept = items.iter().map(|item| !throughout(item));
        self.owners.retain(|_| kept.next().unwrap_or(true));
        self.core.items = items;
        self.core.items.retain(|item| !throughout(item));
        self.core.items.iter_mut().for_each(|item| item.hint = item.hint_above(laid));
    }
}

impl Item {
    /// The wish counted from a floor.
    fn hint_above(&self, floor_units: u64) -> u64 {
        if self.hint == u64::MAX { self.hint } else { self.hint.saturating_sub(floor_units) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{Kind, Shape, problem};
    use super::*;

    fn normal(buffers: Vec<Buffer>) -> Normal {
        Normal::of(&Problem { buffers, ..Problem::default() }).expect("not contradictory")
    }

    /// ```text
    ///   size   c ┌──┐  ┌──┐ d           above both floors
    ///          b └──┴──┴──┘ ┌──┐ e      b: a floor of the first half alone
    ///          a ───────────┴──┴──
    ///            0  2  4   6   8  10
    /// ```
    #[test]
    fn what_is_above_a_floor_is_cut_and_floored_again() {
        let a = Buffer::new(0, 10, 8);
        let b = Buffer::new(0, 6, 4);
        let (c, d, e) = (Buffer::new(0, 2, 2), Buffer::new(4, 6, 6), Buffer::new(7, 9, 2));
        let normal = normal(vec![e, d, c, b, a]);
        let stretches = &normal.pools[0].stretches;
        // In units of 2 bytes: c and d above a and b, and e above a; all of them are floors.
        let floors: Vec<_> =
            stretches.iter().map(|stretch| (stretch.floor_units, stretch.floor_owners)).collect();
        assert_eq!(floors, [(7, 3), (9, 3), (5, 2)]);
        assert!(stretches.iter().all(|stretch| stretch.core.items.is_empty()));
        let offsets = normal.offsets_bytes(&[vec![Vec::new(); 3]]);
        assert_eq!(offsets, [8, 12, 12, 8, 0]);
    }

    #[test]
    fn nothing_is_cut_above_what_is_fixed_or_aligned() {
        let weights = Buffer::new(0, 10, 8).with(|extra| extra.alignment_bytes = 4);
        let normal = normal(vec![weights, Buffer::new(0, 2, 2), Buffer::new(4, 6, 6)]);
        assert_eq!(normal.pools[0].stretches.len(), 1);
        assert_eq!(normal.pools[0].stretches[0].floor_units, 0);
    }

    /// Ticks far apart are sorted, close ones are counted: the instants are the same.
    #[test]
    fn instants_do_not_depend_on_how_far_ticks_lie_apart() {
        for kind in [Kind::Dense, Kind::Moe, Kind::Thin] {
            let near = problem(&Shape::preset(kind, 3000));
            let mut far = near.clone();
            for buffer in &mut far.buffers {
                (buffer.start, buffer.end) = (1000 + 997 * buffer.start, 1000 + 997 * buffer.end);
            }
            let near = Normal::of(&near).expect("not contradictory");
            let far = Normal::of(&far).expect("not contradictory");
            let cores = |normal: &Normal| {
                let stretches = normal.pools[0].stretches.iter();
                stretches.map(|stretch| stretch.core.clone()).collect::<Vec<_>>()
            };
            assert_eq!(cores(&near), cores(&far));
            assert_eq!(far.pools[0].tick(0, 1), 1000 + 997 * near.pools[0].tick(0, 1));
        }
    }

    #[test]
    fn instants_come_in_any_order_of_buffers() {
        let forward = problem(&Shape::preset(Kind::Dense, 3000));
        let mut backward = forward.clone();
        backward.buffers.reverse();
        let [forward, backward] = [forward, backward].map(|problem| Normal::of(&problem));
        let (forward, backward) = (forward.expect("good"), backward.expect("good"));
        for (one, other) in forward.pools[0].stretches.iter().zip(&backward.pools[0].stretches) {
            let sorted = |stretch: &Stretch| {
                let mut items: Vec<_> = stretch.core.items.clone();
                items.sort_by_key(|item| (item.start, item.end, item.size));
                (stretch.core.instants, stretch.floor_units, items)
            };
            assert_eq!(sorted(one), sorted(other));
        }
    }
}
