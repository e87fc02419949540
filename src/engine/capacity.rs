//! The smallest device on which an allocator takes a trace to its end.
//!
//! A device charges whole units of 2 MiB ([`GRANULARITY_BYTES`]), so only multiples of it are
//! looked at; the trace is replayed on each until the first refusal, without anything that a result
//! holds. The one design decision: bisection, and then a look at what lies below its answer. An
//! allocator that empties its cache under pressure may live on less than what it fails on, so
//! whether a trace completes need not rise with the capacity:
//!
//! ```text
//!   requested peak                                                    reserved peak, no end
//!   ├─ refused ─┼─ completes ─┼────── refused ──────┼─ completes ──────────────┤
//!   lowest                    ·  ·  ·  ·  ·  ·  ·  ·│← bisection ends here
//!               ╰─ a check point that completes; bisection again below it
//! ```
//!
//! Which points are looked at hangs on nothing but earlier answers, so the result is the same on any
//! number of threads.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde::Serialize;

use super::prepared::{DeviceSize, Prepared};
use super::replay::{RunError, Watched, watch};
use crate::alloc::spec::AllocSpec;
use crate::chunk;
use crate::device::GRANULARITY_BYTES;
use crate::metrics::NoSink;
use crate::units::Bytes;

/// Points just below an answer that are always looked at.
const POINTS_BELOW: u64 = 8;

/// How often an answer may be replaced by a lower one.
const ROUNDS_MAX: u32 = 8;

/// How far above the reserved peak a device is looked for: 1 PiB, in units.
const EXCESS_UNITS_MAX: u64 = 1 << 29;

/// How hard to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacitySearch {
    /// Points spread evenly between the lower bound and an answer that are looked at beside the 8
    /// just below it.
    pub check_points: u16,
}

impl Default for CapacitySearch {
    /// 16 points.
    fn default() -> Self {
        CapacitySearch { check_points: 16 }
    }
}

/// The smallest capacity found, or why there is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SmallestCapacity {
    /// Multiple of 2 MiB at which every request is met; with 2 MiB less some is refused, or what
    /// was held when the history begins does not fit. Absent if no capacity is enough.
    pub capacity_bytes: Option<u64>,
    /// How far that is above the requested peak.
    pub over_requested_bytes: Option<u64>,
    /// The same as a share of the requested peak; absent if nothing counts in that.
    pub over_requested: Option<f64>,
    /// Some larger capacity is not enough.
    pub non_monotone: bool,
    /// The largest capacity that was looked at and is not enough.
    pub refused_bytes_max: Option<u64>,
    /// Devices that the trace was replayed on, the unlimited one not counted.
    pub probes: u64,
    /// Why there is no answer.
    pub message: Option<String>,
}

/// Looks for the smallest multiple of 2 MiB of device memory at which the allocator meets every
/// request of the trace. The options of `prepared` hold but for their capacity.
///
/// None is smaller than the requested peak: what is live is charged, and in whole units. Nor than
/// what was held when the history begins, where the allocator takes that over.
///
/// # Errors
/// If the allocator cannot be built. That no capacity is enough is a result: an injected failure,
/// the allocator's limit, or a point that the real allocator does not survive.
pub fn smallest_capacity(
    prepared: &Prepared<'_>,
    spec: &AllocSpec,
    search: CapacitySearch,
) -> Result<SmallestCapacity, RunError> {
    let (unlimited, _) = watch(prepared, spec, DeviceSize::Unlimited, true, NoSink)?;
    if let Some(message) = refused_for_good(&unlimited) {
        return Ok(SmallestCapacity { message: Some(message), ..SmallestCapacity::default() });
    }
    let mut probing = Probing { prepared, spec, probes: BTreeMap::new() };
    // What the chunk manager keeps on the host is not live on the device.
    let managed = spec.name == chunk::NAME;
    let lowest = if managed { 1 } else { lowest_units(prepared, &unlimited) };
    let reserved = units(unlimited.peaks.reserved_bytes_peak).max(lowest);
    let Some(enough) = probing.enough(reserved)? else {
        let message = format!(
            "no capacity up to {} is enough, but one without end is",
            Bytes(bytes(reserved.saturating_add(EXCESS_UNITS_MAX)))
        );
        return Ok(probing.result(None, Some(message)));
    };
    let answer = probing.smallest(lowest, enough, search)?;
    Ok(probing.result(Some(answer), None))
}

/// Why the run does not even complete on a device without end.
fn refused_for_good(unlimited: &Watched) -> Option<String> {
    if let Some(failure) = &unlimited.failure {
        return Some(failure.clone());
    }
    let refusal = unlimited.refusal?;
    let message = refusal.message(&unlimited.bounds);
    // What the device did not refuse, the allocator's limit did.
    let by_limit = refusal.refused_call.is_none() && unlimited.bounds.limit_bytes.is_some();
    let hint = if by_limit { "; give a larger --limit" } else { "" };
    Some(format!("refused on a device without end too: {message}{hint}"))
}

fn lowest_units(prepared: &Prepared<'_>, unlimited: &Watched) -> u64 {
    let start = prepared.trace().start.as_ref().filter(|_| unlimited.layout_kept);
    let held_bytes = start.map_or(0, |start| start.reserved_bytes());
    units(prepared.summary().requested_bytes_peak.max(held_bytes))
}

/// Units that so many bytes take.
fn units(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(GRANULARITY_BYTES)
}

fn bytes(units: u64) -> u64 {
    units.saturating_mul(GRANULARITY_BYTES)
}

/// Capacities in units of 2 MiB, and whether each is enough.
struct Probing<'a> {
    prepared: &'a Prepared<'a>,
    spec: &'a AllocSpec,
    probes: BTreeMap<u64, bool>,
}

impl Probing<'_> {
    /// Whether the trace completes on a device of this size.
    fn completes(&self, units: u64) -> Result<bool, RunError> {
        let size = DeviceSize::Bytes(bytes(units));
        let (run, _) = watch(self.prepared, self.spec, size, true, NoSink)?;
        Ok(run.refusal.is_none() && run.failure.is_none())
    }

    fn probe(&mut self, units: u64) -> Result<bool, RunError> {
        if let Some(&completes) = self.probes.get(&units) {
            return Ok(completes);
        }
        let completes = self.completes(units)?;
        self.probes.insert(units, completes);
        Ok(completes)
    }

    /// A capacity that is enough, from the reserved peak up: what is charged may be more than what
    /// is reserved, and an allocator may hold back with an eye on the device's size.
    fn enough(&mut self, reserved: u64) -> Result<Option<u64>, RunError> {
        let mut excess = 0_u64;
        while excess <= EXCESS_UNITS_MAX {
            let units = reserved.saturating_add(excess);
            if self.probe(units)? {
                return Ok(Some(units));
            }
            excess = (2 * excess).max(1);
        }
        Ok(None)
    }

    /// The smallest capacity from `lowest` on, as far as it can be told from some of them.
    fn smallest(
        &mut self,
        lowest: u64,
        enough: u64,
        search: CapacitySearch,
    ) -> Result<u64, RunError> {
        let mut answer = self.bisect(lowest, enough)?;
        for _ in 0..ROUNDS_MAX {
            let Some(lower) = self.check_below(lowest, answer, search)? else { break };
            let refused_below = self.probes.range(..lower).next_back();
            let from = refused_below.map_or(lowest, |(&units, _)| units + 1);
            answer = self.bisect(from, lower)?;
        }
        Ok(answer)
    }

    /// A capacity in [lowest, enough] that is enough while the one before is not, or `lowest`.
    fn bisect(&mut self, mut lowest: u64, mut enough: u64) -> Result<u64, RunError> {
        while lowest < enough {
            let middle = lowest + (enough - lowest) / 2;
            if self.probe(middle)? {
                enough = middle;
            } else {
                lowest = middle + 1;
            }
        }
        Ok(enough)
    }

    /// Looks at points of [lowest, answer) and gives the lowest that is enough.
    fn check_below(
        &mut self,
        lowest: u64,
        answer: u64,
        search: CapacitySearch,
    ) -> Result<Option<u64>, RunError> {
        let points = check_points(lowest, answer, search.check_points);
        let unknown = points.iter().filter(|units| !self.probes.contains_key(units));
        let unknown: Vec<u64> = unknown.copied().collect();
        let completes = unknown.par_iter().map(|&units| self.completes(units));
        let completes = completes.collect::<Result<Vec<bool>, RunError>>()?;
        self.probes.extend(unknown.into_iter().zip(completes));
        let enough = self.probes.range(lowest..answer).find(|&(_, &completes)| completes);
        Ok(enough.map(|(&units, _)| units))
    }

    fn result(&self, answer: Option<u64>, message: Option<String>) -> SmallestCapacity {
        let requested_bytes_peak = self.prepared.summary().requested_bytes_peak;
        let capacity_bytes = answer.map(bytes);
        let over = capacity_bytes.map(|bytes| bytes.saturating_sub(requested_bytes_peak));
        let refused = self.probes.iter().rev().find(|&(_, &completes)| !completes);
        let refused_bytes_max = refused.map(|(&units, _)| bytes(units));
        SmallestCapacity {
            capacity_bytes,
            over_requested_bytes: over,
            over_requested: over
                .filter(|_| requested_bytes_peak > 0)
                .map(|bytes| bytes as f64 / requested_bytes_peak as f64),
            non_monotone: capacity_bytes.is_some() && refused_bytes_max > capacity_bytes,
            refused_bytes_max,
            probes: self.probes.len() as u64,
            message,
        }
    }
}

/// Points of [lowest, answer): so many spread evenly from `lowest` on, and those just below the
/// answer.
fn check_points(lowest: u64, answer: u64, spread: u16) -> BTreeSet<u64> {
    let span = answer.saturating_sub(lowest);
    let spread = u64::from(spread).min(span);
    // A span is below 2^43 units, and a spread below 2^16: the product is a u64.
    let evenly = (0..spread).map(|index| lowest + span * index / spread);
    let below = answer.saturating_sub(POINTS_BELOW).max(lowest)..answer;
    evenly.chain(below).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_cover_a_short_span_and_spread_over_a_long_one() {
        assert_eq!(check_points(5, 5, 16), BTreeSet::new());
        assert_eq!(check_points(5, 21, 16), (5..21).collect());
        assert_eq!(check_points(0, 9, 0), (1..9).collect());
        let long = check_points(100, 1700, 16);
        let spread = (100..1700).step_by(100);
        assert_eq!(long, spread.chain(1692..1700).collect());
    }
}
