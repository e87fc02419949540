//! Why a capacity cannot be met: few buffers that alone do not fit.
//!
//! ```text
//!   bytes                             bytes
//!     ^                                 ^     ┌──┐
//!     │·····┌────┐····· capacity        │·····│  │····· capacity
//!     │ ┌───┤ c  ├──┐                   │┌────┤c ├─────┐
//!     │ │ b └┬───┴──┴┐                  ││ a  └──┤  b  │    every instant has room for what is
//!     │ └────┤   a   │                  │└───────┴─────┘    live, and yet no order of the three
//!     └──────┴───────┴──> ticks         └────────────> ticks fits: proven by exact search
//!         load                              irreducible
//! ```
//!
//! Whatever fits still fits with a buffer less. So buffers are taken away, many at a time and then
//! one by one, as long as the rest does not fit: what remains is a set that fits without any one of
//! its members, a smallest one by inclusion though not always by number.

use super::bound::load_bound;
use super::core::{Normal, PoolCores, Stretch};
use super::exact::{self, Outcome};
use super::portfolio::largest_first;
use super::problem::{BadProblem, Buffer, Problem};
use super::work::Work;

/// Units that a test whether fewer buffers fit may take beside those that the first proof took.
const TEST_UNITS: u64 = 1_000_000;

/// Why a pool cannot be packed into a capacity. Buffers are named by their index, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// These need more than the capacity at one tick, and without any one of them would not.
    Load {
        /// The tick: the first one of those at which all buffers together need most.
        tick: u64,
        /// The buffers.
        buffers: Vec<usize>,
        /// What they need at that tick together, sizes rounded up to the granularity.
        bytes: u64,
    },
    /// These cannot be packed into the capacity, and without any one of them can.
    Irreducible {
        /// The buffers.
        buffers: Vec<usize>,
    },
    /// These cannot be packed into the capacity. Whether all of them are needed for that was not
    /// settled within the work.
    Reduced {
        /// The buffers.
        buffers: Vec<usize>,
    },
    /// No packing was found within the work, and that there is none was not proven.
    Unknown,
    /// There is a packing.
    Fits,
}

/// Finds out why the buffers of `pool` do not fit into `capacity_bytes`. What the problem says of
/// capacities does not matter.
///
/// With a limit of work in units the answer depends on the arguments alone.
///
/// # Errors
/// If the problem contradicts itself.
pub fn irreducible(
    problem: &Problem,
    pool: u32,
    capacity_bytes: u64,
    work: &mut Work<'_>,
) -> Result<Reason, BadProblem> {
    let normal = Normal::of(problem)?;
    let Some(cores) = normal.pools.iter().find(|cores| cores.pool == pool) else {
        return Ok(Reason::Fits);
    };
    let mut search =
        Search { problem, pool, capacity_bytes, work, test_units: u64::MAX, settled: true };
    let (load_units, tick) = heaviest(cores);
    if load_units > capacity_bytes / normal.unit_bytes {
        return search.by_load(tick);
    }
    let mut unknown = false;
    for at in 0..cores.stretches.len() {
        let spent_units = search.work.spent_units();
        match search.stretch_fits(&cores.stretches[at], normal.unit_bytes) {
            Some(true) => {}
            None => unknown = true,
            Some(false) => {
                let proof_units = search.work.spent_units() - spent_units;
                search.test_units = proof_units.saturating_mul(4).saturating_add(TEST_UNITS);
                let buffers = search.live_in(cores, at);
                return search.by_shape(buffers);
            }
        }
    }
    Ok(if unknown { Reason::Unknown } else { Reason::Fits })
}

/// The most that is live at one instant of a pool, in units, and its first tick.
fn heaviest(cores: &PoolCores) -> (u64, u64) {
    let mut heaviest = (0, 0);
    for (at, stretch) in cores.stretches.iter().enumerate() {
        // A floor may be all there is: then the core has no instants of its own that count.
        let loads = stretch.core.loads().chain((stretch.core.instants == 0).then_some(0));
        for (instant, load) in (0..).zip(loads) {
            let load_units = stretch.floor_units + load;
            if load_units > heaviest.0 {
                heaviest = (load_units, cores.tick(at, instant));
            }
        }
    }
    heaviest
}

struct Search<'a, 'w> {
    problem: &'a Problem,
    pool: u32,
    capacity_bytes: u64,
    work: &'a mut Work<'w>,
    /// What one test may take.
    test_units: u64,
    /// Every test so far had an answer.
    settled: bool,
}

impl Search<'_, '_> {
    /// More is live at `tick` than there is room for: the largest of it, until it is too much.
    fn by_load(&mut self, tick: u64) -> Result<Reason, BadProblem> {
        let mut parts = self.live_at(tick);
        parts.sort_by_key(|part| (std::cmp::Reverse(part.bytes()), part.buffers[0]));
        let mut bytes = 0;
        let mut taken = 0;
        while bytes <= self.capacity_bytes && taken < parts.len() {
            bytes += parts[taken].bytes();
            taken += 1;
        }
        parts.truncate(taken);
        for part in &mut parts {
            bytes -= part.lessen(bytes - self.capacity_bytes);
        }
        let mut buffers: Vec<usize> = parts.into_iter().flat_map(|part| part.buffers).collect();
        buffers.sort_unstable();
        let load = Reason::Load { tick, buffers: buffers.clone(), bytes };
        let plain = |&index: &usize| {
            self.problem.buffers[index].extra.as_ref().is_none_or(|extra| {
                extra.alignment_bytes == 1
                    && extra.fixed_offset_bytes.is_none()
                    && extra.alias.is_none()
                    && extra.gaps.is_empty()
            })
        };
        // Plain buffers whose sum fits can be stacked. Others may not fit even so, and then some of
        // them are reason enough.
        if buffers.iter().all(plain) {
            return Ok(load);
        }
        self.test_units = TEST_UNITS;
        let fewer = self.without_each(buffers.clone(), 1)?;
        Ok(match (fewer == buffers, self.settled) {
            (true, _) => load,
            (false, true) => Reason::Irreducible { buffers: fewer },
            (false, false) => Reason::Reduced { buffers: fewer },
        })
    }

    /// These do not fit, although there is room for what is live at every tick.
    fn by_shape(&mut self, mut buffers: Vec<usize>) -> Result<Reason, BadProblem> {
        // Neighbours in time go together: what does not fit is often in one place.
        let by_start = |&index: &usize| (self.problem.buffers[index].start, index);
        buffers.sort_by_key(by_start);
        let mut chunk = buffers.len() / 2;
        while chunk > 1 {
            buffers = self.without_each(buffers, chunk)?;
            chunk = chunk.min(buffers.len()) / 2;
        }
        self.settled = true;
        buffers = self.without_each(buffers, 1)?;
        buffers.sort_unstable();
        Ok(if self.settled { Reason::Irreducible { buffers } } else { Reason::Reduced { buffers } })
    }

    /// Takes away every run of `chunk` buffers without which the rest still does not fit.
    fn without_each(
        &mut self,
        buffers: Vec<usize>,
        chunk: usize,
    ) -> Result<Vec<usize>, BadProblem> {
        let mut kept: Vec<usize> = Vec::new();
        for (at, run) in buffers.chunks(chunk).enumerate() {
            let after = &buffers[((at + 1) * chunk).min(buffers.len())..];
            let rest = [&kept[..], after].concat();
            match self.fit(&rest)? {
                Some(false) => {}
                Some(true) => kept.extend(run),
                None => {
                    self.settled = false;
                    kept.extend(run);
                }
            }
        }
        Ok(kept)
    }

    /// Whether some buffers fit; nothing if that is not settled within the work.
    fn fit(&mut self, buffers: &[usize]) -> Result<Option<bool>, BadProblem> {
        let part = Problem {
            buffers: buffers.iter().map(|&index| self.problem.buffers[index].clone()).collect(),
            granularity_bytes: self.problem.granularity_bytes,
            capacities_bytes: Vec::new(),
        };
        let normal = Normal::of(&part)?;
        let mut answer = Some(true);
        for stretch in normal.pools.iter().flat_map(|cores| &cores.stretches) {
            match self.stretch_fits(stretch, normal.unit_bytes) {
                Some(true) => {}
                Some(false) => return Ok(Some(false)),
                None => answer = None,
            }
        }
        Ok(answer)
    }

    fn stretch_fits(&mut self, stretch: &Stretch, unit_bytes: u64) -> Option<bool> {
        let Some(cap) = (self.capacity_bytes / unit_bytes).checked_sub(stretch.floor_units) else {
            return Some(false);
        };
        let core = &stretch.core;
        if load_bound(core, 0).height > cap {
            return Some(false);
        }
        if core.items.is_empty() || largest_first(core).height <= cap {
            return Some(true);
        }
        let mut part = self.work.part(self.test_units);
        let outcome = exact::search(core, cap, 0, &mut part);
        self.work.spend(part.spent_units());
        match outcome {
            Outcome::Found(_) => Some(true),
            Outcome::Infeasible => Some(false),
            Outcome::Unknown => None,
        }
    }

    /// What needs anything while a stretch lasts. Ends are those of the next stretch, which is no
    /// matter: nothing but a floor is live in between.
    fn live_in(&self, cores: &PoolCores, at: usize) -> Vec<usize> {
        let start = cores.tick(at, 0);
        let end = cores.tick(at, cores.stretches[at].core.instants.max(1));
        let live = |buffer: &Buffer| {
            let roomy = buffer.size_bytes > 0 && buffer.start < buffer.end;
            roomy && buffer.pool() == self.pool && buffer.start < end && start < buffer.end
        };
        let buffers = self.problem.buffers.iter().enumerate();
        buffers.filter(|(_, buffer)| live(buffer)).map(|(index, _)| index).collect()
    }

    /// What is needed at a tick: buffers one by one, aliases together.
    fn live_at(&self, tick: u64) -> Vec<Part> {
        let granularity = self.problem.granularity_bytes;
        let mut groups = std::collections::BTreeMap::<u32, Part>::new();
        let mut parts = Vec::new();
        for (index, buffer) in self.problem.buffers.iter().enumerate() {
            if buffer.pool() != self.pool {
                continue;
            }
            let Some(range) = needed(buffer, tick, granularity) else { continue };
            match buffer.extra.as_ref().and_then(|extra| extra.alias) {
                Some(alias) => {
                    let group = groups.entry(alias).or_default();
                    group.buffers.push(index);
                    group.ranges.push(range);
                }
                None => parts.push(Part { buffers: vec![index], ranges: vec![range] }),
            }
        }
        parts.extend(groups.into_values());
        parts
    }
}

/// Buffers that lie over each other, and what each needs from their common offset.
#[derive(Default)]
struct Part {
    buffers: Vec<usize>,
    ranges: Vec<(u64, u64)>,
}

impl Part {
    fn bytes(&self) -> u64 {
        union_bytes(self.ranges.iter().copied())
    }

    /// Leaves out buffers while that frees less than `spare_bytes`; gives what it frees.
    fn lessen(&mut self, spare_bytes: u64) -> u64 {
        let before_bytes = self.bytes();
        let mut at = 0;
        while self.buffers.len() > 1 && at < self.buffers.len() {
            let others = self.ranges.iter().enumerate().filter(|&(other, _)| other != at);
            let bytes = union_bytes(others.map(|(_, &range)| range));
            if before_bytes - bytes < spare_bytes {
                self.buffers.remove(at);
                self.ranges.remove(at);
            } else {
                at += 1;
            }
        }
        before_bytes - self.bytes()
    }
}

fn union_bytes(ranges: impl Iterator<Item = (u64, u64)>) -> u64 {
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_unstable();
    let (mut bytes, mut end) = (0, 0);
    for (low, high) in ranges {
        bytes += high.saturating_sub(low.max(end));
        end = end.max(high);
    }
    bytes
}

/// Bytes from its offset that a buffer needs at a tick, rounded out to the granularity.
fn needed(buffer: &Buffer, tick: u64, granularity_bytes: u64) -> Option<(u64, u64)> {
    if !(buffer.start..buffer.end).contains(&tick) {
        return None;
    }
    let mut gaps = buffer.extra.iter().flat_map(|extra| &extra.gaps);
    let (low, high) = match gaps.find(|gap| (gap.start..gap.end).contains(&tick)) {
        None => (0, buffer.size_bytes),
        Some(gap) => gap.window_bytes?,
    };
    let rounded = (low - low % granularity_bytes, high.next_multiple_of(granularity_bytes));
    (low < high).then_some(rounded)
}
