//! The chunk size for a model and a machine (spec patrickstar 1.5).
//!
//! The one design decision: a size is judged by three rules side by side, because the search that
//! PatrickStar ships and the manager that then runs do not ask for the same:
//!
//! ```text
//!             one chunk on a GPU in warm-up        all model data
//!   searched  2·CS bytes                           14·CS·n             in one GPU's warm-up room
//!                                                                      and the host's
//!   corrected two fp16 chunks, 4·CS bytes          14·CS·ceil(n/N)·W   in W GPUs' warm-up room
//!                                                                      and the host's
//!   managed   the budgets of the manager on the busiest rank: model construction, working memory
//!             beside two chunks, 14·CS·ceil(n/N) from the first ADAM on
//! ```
//!
//! n chunks of CS elements on N ranks, W of them on a host. Model data is 14 bytes an element: fp16
//! and fp32 parameters, momentum, variance (spec patrickstar 1.2).

use serde::Serialize;

use super::layout::{Cursor, MI, dummies, smallest_chunk_elements, utilization};
use crate::trace::ModelUnit;

/// Bytes of model data an element (spec patrickstar 1.2).
pub const MODEL_DATA_BYTES: u64 = 14;
/// Of which fp16.
const HALF_BYTES: u64 = 2;
/// Of which exist when the model is built: fp16 and fp32 parameters.
const BUILT_BYTES: u64 = 6;
/// What the manager keeps free on the GPU during ADAM (spec patrickstar 2.3).
const ADAM_RESERVE_BYTES: u64 = 16;
/// The end of the fine grid in Mi elements; where the smallest chunk is larger, how far it goes
/// beyond that one.
const FINE_GRID_MI: u64 = 400;

/// What a model is put on, and the manager's options that decide about room. Ratios as spec
/// patrickstar 2.4.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Memory of a GPU.
    pub gpu_bytes: u64,
    /// Memory of a host.
    pub host_bytes: u64,
    /// Ranks that share the chunks, one GPU each.
    pub ranks: u32,
    /// Ranks on one host.
    pub local_ranks: u32,
    /// Share of a GPU that may be used at all (`overall_gpu_mem_ratio`).
    pub gpu_ratio: f64,
    /// Share of the host that may be used at all (`overall_cpu_mem_ratio`).
    pub host_ratio: f64,
    /// Share of that share that chunks may take in warm-up (`warmup_gpu_chunk_mem_ratio`).
    pub warmup_ratio: f64,
    /// A remote chunk at a time instead of a group (`with_mem_saving_com`).
    pub memory_saving: bool,
    /// GPU memory of a rank beside chunks, at its peak.
    pub working_bytes: u64,
    /// Host memory of a rank beside chunks, at its peak.
    pub host_working_bytes: u64,
}

impl Default for Machine {
    /// What PatrickStar's search has written in: one GPU of 32 GiB, a host of 240 GiB; and what
    /// its script passes to it.
    fn default() -> Self {
        Machine {
            gpu_bytes: 32 << 30,
            host_bytes: 240 << 30,
            ranks: 1,
            local_ranks: 1,
            gpu_ratio: 0.9,
            host_ratio: 0.9,
            warmup_ratio: 0.1,
            memory_saving: true,
            working_bytes: 0,
            host_working_bytes: 0,
        }
    }
}

/// By which rule a chunk size is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// PatrickStar's search as it is: it takes bytes for elements in the first rule, and knows one
    /// GPU (spec patrickstar 7.1, item 11).
    Searched,
    /// The same rules with two whole chunks, and with every GPU of a host.
    Corrected,
    /// The budgets that the manager has when it runs.
    Managed,
}

/// What there is too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Room {
    /// A GPU's room for chunks in warm-up, for one chunk or two.
    Warmup,
    /// The room for chunks on GPUs and host together, for all model data.
    Together,
    /// The host's, for fp16 and fp32 parameters when the model is built.
    HostAtStart,
    /// A GPU's, for working memory and the chunks in use.
    Gpu,
}

/// Why a chunk size will not do: this room has so many bytes, and so many are needed. On one rank,
/// but for [`Room::Together`] of the corrected rule, which is a whole host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Misfit {
    /// What there is too little of.
    pub room: Room,
    /// Bytes needed.
    pub need_bytes: u64,
    /// Bytes there.
    pub have_bytes: u64,
}

impl Misfit {
    /// Bytes that are missing.
    pub fn lacking_bytes(&self) -> u64 {
        self.need_bytes.saturating_sub(self.have_bytes)
    }
}

/// A chunk size that holds the model, and what comes of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Elements of a chunk.
    pub chunk_elements: u64,
    /// Chunks of fp16 parameters, and as many of each other list.
    pub chunks: u64,
    /// Empty ones that make their number a multiple of the ranks.
    pub dummies: u64,
    /// Share of the chunks that is used.
    pub utilization: f64,
    /// Model data of all ranks: four lists of chunks.
    pub bytes: u64,
    /// Model data of the rank that has most.
    pub rank_bytes: u64,
    /// Why the search that PatrickStar ships would not take it; nothing if it would.
    pub searched: Option<Misfit>,
    /// Why the corrected rules do not allow it.
    pub corrected: Option<Misfit>,
    /// Why the manager cannot run with it.
    pub managed: Option<Misfit>,
}

impl Candidate {
    /// Why this rule does not allow it; nothing if it does.
    pub fn misfit(&self, rule: Rule) -> Option<Misfit> {
        match rule {
            Rule::Searched => self.searched,
            Rule::Corrected => self.corrected,
            Rule::Managed => self.managed,
        }
    }
}

/// Sizes of PatrickStar's grid in elements: 312 Mi down to 88 Mi in steps of 32 Mi (spec
/// patrickstar 1.5).
pub fn shipped_grid() -> impl Iterator<Item = u64> {
    (88..=312).rev().step_by(32).map(|mi: u64| mi * MI)
}

/// Every whole number of Mi elements that holds the model, up to 400 Mi; of a model that needs
/// larger chunks, 400 sizes from the smallest.
pub fn fine_grid(units: &[ModelUnit]) -> impl Iterator<Item = u64> {
    let smallest = smallest_chunk_elements(units).div_ceil(MI).max(1);
    let end = if smallest > FINE_GRID_MI { smallest + FINE_GRID_MI - 1 } else { FINE_GRID_MI };
    (smallest..=end).map(|mi| mi.saturating_mul(MI))
}

/// A chunk size, and what comes of it; nothing if it does not hold the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Elements of a chunk.
    pub chunk_elements: u64,
    /// What comes of it.
    pub candidate: Option<Candidate>,
}

/// What comes of every chunk size, in the order of `sizes`.
pub fn search(
    units: &[ModelUnit],
    sizes: impl IntoIterator<Item = u64>,
    machine: &Machine,
) -> Vec<Row> {
    let chunked = units.iter().filter(|unit| !unit.host);
    let elements: Vec<u64> = chunked.map(ModelUnit::elements).collect();
    let row = |chunk_elements| {
        let chunks = count(&elements, chunk_elements);
        let candidate = chunks.map(|chunks| judge(&elements, chunk_elements, chunks, machine));
        Row { chunk_elements, candidate }
    };
    sizes.into_iter().map(row).collect()
}

/// The candidate with least memory on its busiest rank, whether it fits or not; of equals the one
/// with smaller chunks.
pub fn tightest(rows: &[Row]) -> Option<&Candidate> {
    let candidates = rows.iter().filter_map(|row| row.candidate.as_ref());
    candidates.min_by_key(|candidate| (candidate.rank_bytes, candidate.chunk_elements))
}

/// The candidate with least memory on its busiest rank among those that this rule allows; of equals
/// the one with smaller chunks.
pub fn best(rows: &[Row], rule: Rule) -> Option<&Candidate> {
    let candidates = rows.iter().filter_map(|row| row.candidate.as_ref());
    let allowed = candidates.filter(|candidate| candidate.misfit(rule).is_none());
    allowed.min_by_key(|candidate| (candidate.rank_bytes, candidate.chunk_elements))
}

/// The candidate that this rule comes nearest to allowing, and what it lacks; nothing if one is
/// allowed, or none holds the model.
pub fn nearest(rows: &[Row], rule: Rule) -> Option<(&Candidate, Misfit)> {
    if best(rows, rule).is_some() {
        return None;
    }
    let candidates = rows.iter().filter_map(|row| row.candidate.as_ref());
    let refused = candidates.filter_map(|found| found.misfit(rule).map(|misfit| (found, misfit)));
    refused.min_by_key(|(found, misfit)| (misfit.lacking_bytes(), found.chunk_elements))
}

/// Chunks of this size for units of these sizes; nothing if one is larger.
fn count(elements: &[u64], chunk_elements: u64) -> Option<u64> {
    let mut cursor = Cursor::new(chunk_elements).ok()?;
    for &unit in elements {
        cursor.place(unit)?;
    }
    Some(cursor.chunks as u64)
}

fn judge(elements: &[u64], chunk_elements: u64, chunks: u64, machine: &Machine) -> Candidate {
    let used = elements.iter().fold(0u64, |sum, &unit| sum.saturating_add(unit));
    let ranks = u64::from(machine.ranks.max(1));
    let need = Need { machine, chunk_elements, chunks, rank_chunks: chunks.div_ceil(ranks), ranks };
    Candidate {
        chunk_elements,
        chunks,
        dummies: dummies(chunks, machine.ranks),
        utilization: utilization(used, chunks, chunk_elements),
        bytes: need.bytes(MODEL_DATA_BYTES, chunks),
        rank_bytes: need.bytes(MODEL_DATA_BYTES, need.rank_chunks),
        searched: need.searched().err(),
        corrected: need.corrected().err(),
        managed: need.managed().err(),
    }
}

/// A chunk size on a machine.
struct Need<'a> {
    machine: &'a Machine,
    chunk_elements: u64,
    chunks: u64,
    /// Of the busiest rank.
    rank_chunks: u64,
    ranks: u64,
}

impl Need<'_> {
    /// Bytes of so many chunks at so many bytes an element.
    fn bytes(&self, element_bytes: u64, chunks: u64) -> u64 {
        self.chunk_elements.saturating_mul(element_bytes).saturating_mul(chunks)
    }

    /// Bytes of so many fp16 chunks.
    fn half(&self, chunks: u64) -> u64 {
        self.bytes(HALF_BYTES, chunks)
    }

    fn local_ranks(&self) -> u64 {
        u64::from(self.machine.local_ranks.max(1))
    }

    fn gpu(&self) -> u64 {
        share(self.machine.gpu_bytes, self.machine.gpu_ratio)
    }

    fn warmup_room(&self) -> u64 {
        share(self.machine.gpu_bytes, self.machine.gpu_ratio * self.machine.warmup_ratio)
    }

    fn host(&self) -> u64 {
        share(self.machine.host_bytes, self.machine.host_ratio)
    }

    fn searched(&self) -> Result<(), Misfit> {
        within(Room::Warmup, self.half(1), self.warmup_room())?;
        let all = self.bytes(MODEL_DATA_BYTES, self.chunks);
        within(Room::Together, all, self.warmup_room().saturating_add(self.host()))
    }

    fn corrected(&self) -> Result<(), Misfit> {
        within(Room::Warmup, self.half(2), self.warmup_room())?;
        let local = self.rank_chunks.saturating_mul(self.local_ranks());
        let gpus = self.warmup_room().saturating_mul(self.local_ranks());
        let all = self.bytes(MODEL_DATA_BYTES, local);
        within(Room::Together, all, gpus.saturating_add(self.host()))
    }

    /// Spec patrickstar 2.3: the budgets of one rank. When the host is full, ADAM's chunks move on
    /// to the GPU and fp16 chunks come back, so what counts is that all of them have room together;
    /// that moves are of whole chunks may cost a chunk more.
    fn managed(&self) -> Result<(), Misfit> {
        let host = self.host() / self.local_ranks();
        let host = host.saturating_sub(self.machine.host_working_bytes);
        within(Room::HostAtStart, self.bytes(BUILT_BYTES, self.rank_chunks), host)?;
        let working = self.machine.working_bytes;
        let in_use = self.half(self.fetched().saturating_add(1));
        within(Room::Gpu, working.saturating_add(in_use), self.gpu())?;
        let reserve = working.saturating_add(self.half(self.fetched()));
        let reserve = reserve.max(self.bytes(ADAM_RESERVE_BYTES, 1));
        let room = host.saturating_add(self.gpu().saturating_sub(reserve));
        within(Room::Together, self.bytes(MODEL_DATA_BYTES, self.rank_chunks), room)
    }

    /// Chunks that are there at once because of communication: the reserve b.
    fn fetched(&self) -> u64 {
        if self.machine.memory_saving { 1 } else { self.ranks }
    }
}

fn within(room: Room, need_bytes: u64, have_bytes: u64) -> Result<(), Misfit> {
    if need_bytes <= have_bytes { Ok(()) } else { Err(Misfit { room, need_bytes, have_bytes }) }
}

/// A share of so many bytes, rounded down.
fn share(bytes: u64, ratio: f64) -> u64 {
    (bytes as f64 * ratio) as u64
}
