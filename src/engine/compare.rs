//! One trace through many allocators on devices of many sizes, side by side.
//!
//! The one design decision: a cell is what [`run`](super::run) gives, and what only shows beside
//! others is added to it. What `caching` wastes on the same device is the measure of waste.

use rayon::prelude::*;
use serde::Serialize;

use super::capacity::{CapacitySearch, SmallestCapacity, smallest_capacity};
use super::prepared::Prepared;
use super::replay::{Observe, RunError};
use super::result::{RunResult, Status};
use crate::alloc::spec::AllocSpec;

/// The allocator that others are measured against (DESIGN 2).
const MEASURE: &str = "caching";

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompareCell {
    /// The allocator.
    pub spec: AllocSpec,
    /// Physical memory of the device in bytes; else that of the trace.
    pub capacity_bytes: Option<u64>,
    /// Look for the smallest capacity too.
    pub search: Option<CapacitySearch>,
}

/// One cell of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// What [`run`](super::run) gives.
    #[serde(flatten)]
    pub result: RunResult,
    /// The smallest capacity, if it was looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smallest_capacity: Option<SmallestCapacity>,
    /// 1 − excess / excess of `caching` on a device of the same size; absent if either was refused
    /// something, `caching` is not there or has no excess.
    pub waste_removed: Option<f64>,
    /// Place of its capacity among those asked for: cells of one group share a device.
    #[serde(skip)]
    pub group: usize,
}

impl Compared {
    /// Simulated time of the allocator's device calls / time of the recorded run, as
    /// [`StepTime::share`](super::StepTime::share) of a step; absent for a trace without times.
    pub fn time_share(&self) -> Option<f64> {
        let time = &self.result.time;
        let has_times = time.recorded_ns > 0;
        has_times.then(|| time.allocator_device_ns as f64 / time.recorded_ns as f64)
    }

    fn is_ok(&self) -> bool {
        self.result.outcome.status == Status::Ok
    }
}

/// In which order rows of one trace stand. Rows of one capacity stand together, capacities in the
/// order asked for; rows that say nothing about a figure stand last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Completed first, then by reserved peak, device time, name.
    Reserved,
    /// By smallest capacity, then as `Reserved`.
    Capacity,
    /// Completed first, then by device time, then as `Reserved`.
    Time,
    /// By name.
    Name,
    /// As asked for.
    Given,
}

impl Order {
    /// Sorts the rows of one trace.
    pub fn sort(self, rows: &mut [Compared]) {
        let status = |row: &Compared| match row.result.outcome.status {
            Status::Ok => 0,
            Status::Oom => 1,
            Status::Failed => 2,
        };
        let time = |row: &Compared| row.result.time.allocator_device_ns;
        let name = |row: &Compared| row.result.allocator.name.clone();
        let usual = |row: &Compared| {
            (status(row), row.result.peaks.reserved_bytes_peak, time(row), name(row))
        };
        match self {
            Order::Reserved => rows.sort_by_cached_key(|row| (row.group, usual(row))),
            Order::Capacity => rows.sort_by_cached_key(|row| {
                let smallest = row.smallest_capacity.as_ref().and_then(|s| s.capacity_bytes);
                (row.group, smallest.unwrap_or(u64::MAX), usual(row))
            }),
            Order::Time => {
                rows.sort_by_cached_key(|row| (row.group, status(row), time(row), usual(row)));
            }
            Order::Name => rows.sort_by_cached_key(|row| (row.group, name(row))),
            Order::Given => {}
        }
    }
}

/// Runs the cells of one trace in parallel. Gives a row a cell, in the order of the cells; `done` is
/// called after each.
pub fn compare(
    prepared: &Prepared<'_>,
    cells: &[CompareCell],
    done: impl Fn(&CompareCell) + Sync,
) -> Vec<Result<Compared, RunError>> {
    let mut capacities: Vec<Option<u64>> = Vec::new();
    for cell in cells {
        if !capacities.contains(&cell.capacity_bytes) {
            capacities.push(cell.capacity_bytes);
        }
    }
    let group = |cell: &CompareCell| {
        let place = capacities.iter().position(|&bytes| bytes == cell.capacity_bytes);
        place.unwrap_or(capacities.len())
    };
    let rows = cells.par_iter().map(|cell| {
        let row = run_cell(prepared, cell, group(cell));
        done(cell);
        row
    });
    let mut rows: Vec<Result<Compared, RunError>> = rows.collect();
    add_waste_removed(&mut rows);
    rows
}

fn run_cell(
    prepared: &Prepared<'_>,
    cell: &CompareCell,
    group: usize,
) -> Result<Compared, RunError> {
    let observed = prepared.run(&cell.spec, cell.capacity_bytes, Observe::default())?;
    let search = cell.search.map(|search| smallest_capacity(prepared, &cell.spec, search));
    let smallest_capacity = search.transpose()?;
    Ok(Compared { result: observed.result, smallest_capacity, waste_removed: None, group })
}

fn add_waste_removed(rows: &mut [Result<Compared, RunError>]) {
    let measures = rows.iter().flatten().filter(|row| {
        row.result.allocator.name == MEASURE && row.is_ok() && row.result.excess_bytes > 0
    });
    let measures: Vec<(usize, i64)> =
        measures.map(|row| (row.group, row.result.excess_bytes)).collect();
    for row in rows.iter_mut().flatten().filter(|row| row.is_ok()) {
        let measure = measures.iter().find(|(group, _)| *group == row.group);
        row.waste_removed =
            measure.map(|&(_, excess)| 1.0 - row.result.excess_bytes as f64 / excess as f64);
    }
}
