//! Figures before against figures now.
//!
//! The one design decision: everything is compared in whole numbers, percent included, so that an
//! allowance is met to the byte and no rounding opens or shuts the gate.

use serde::Serialize;

use super::baseline::{Entry, FigureName, Figures, Tolerance};
use super::measure::{Measured, Place};
use crate::engine::Status;
use crate::units::signed_difference;

/// Percent are compared in millionths.
const PERCENT_PARTS: f64 = 1e6;

/// What to think of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureVerdict {
    /// Gated, and worse by more than the tolerance.
    Regression,
    /// Better by more than the tolerance.
    Improvement,
    /// Not the same, but within the tolerance.
    Tolerated,
    /// Not the same, and not gated.
    Told,
    /// One of the two is not there: another figure says why.
    Incomparable,
    /// The same.
    Same,
}

/// A figure's value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum FigureValue {
    /// How a replay ended.
    Status(Status),
    /// Bytes or times.
    Count(u64),
    /// A fraction of one, to a millionth.
    Fraction(f64),
}

/// By how much a figure grew.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Delta {
    /// Bytes or times.
    Count(i64),
    /// A difference of two fractions, to a millionth.
    Fraction(f64),
}

/// One figure before and now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureCheck {
    /// Which.
    pub figure: FigureName,
    /// Whether a growth is a regression.
    pub gated: bool,
    /// What to think of it.
    pub verdict: FigureVerdict,
    /// What the baseline says.
    pub before: Option<FigureValue>,
    /// What it is.
    pub after: Option<FigureValue>,
    /// after − before.
    pub delta: Option<Delta>,
    /// That in percent of before; for fragmentation in percentage points. Nothing for a status, and
    /// where before is 0.
    pub delta_percent: Option<f64>,
    /// The moment that makes it what it is, if it is not the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
}

/// Judges every figure of an entry, in the order of [`FigureName::ALL`].
pub fn judge(entry: &Entry, tolerance: Tolerance, measured: &Measured) -> Vec<FigureCheck> {
    let judge = Judge { entry, tolerance, measured };
    FigureName::ALL.into_iter().map(|figure| judge.figure(figure)).collect()
}

struct Judge<'a> {
    entry: &'a Entry,
    tolerance: Tolerance,
    measured: &'a Measured,
}

/// How a figure moved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Move {
    Worse,
    Better,
    Within,
    Nowhere,
    Unknown,
}

impl Judge<'_> {
    fn figure(&self, figure: FigureName) -> FigureCheck {
        let (before, after) = (self.value(figure, &self.entry.figures), self.now(figure));
        let gated = self.entry.gates(figure);
        let verdict = match self.movement(figure) {
            Move::Nowhere => FigureVerdict::Same,
            Move::Unknown => FigureVerdict::Incomparable,
            _ if !gated => FigureVerdict::Told,
            Move::Within => FigureVerdict::Tolerated,
            Move::Worse => FigureVerdict::Regression,
            Move::Better => FigureVerdict::Improvement,
        };
        let delta = delta(before, after);
        FigureCheck {
            figure,
            gated,
            verdict,
            before,
            after,
            delta,
            delta_percent: delta.and_then(|delta| in_percent(delta, before)),
            place: self.place(figure).filter(|_| verdict != FigureVerdict::Same),
        }
    }

    fn value(&self, figure: FigureName, figures: &Figures) -> Option<FigureValue> {
        match figure {
            FigureName::Status => Some(FigureValue::Status(figures.status)),
            FigureName::Fragmentation => figures.fragmentation.map(FigureValue::Fraction),
            FigureName::ReservedBytesPeak => Some(FigureValue::Count(figures.reserved_bytes_peak)),
            FigureName::SmallestCapacityBytes => {
                let asked = self.entry.gates(figure);
                figures.smallest_capacity_bytes.filter(|_| asked).map(FigureValue::Count)
            }
            FigureName::AllocRetries => Some(FigureValue::Count(figures.alloc_retries)),
            FigureName::RequestedBytesPeak => {
                Some(FigureValue::Count(figures.requested_bytes_peak))
            }
        }
    }

    fn now(&self, figure: FigureName) -> Option<FigureValue> {
        self.value(figure, &self.measured.figures)
    }

    fn movement(&self, figure: FigureName) -> Move {
        let (before, after) = (&self.entry.figures, &self.measured.figures);
        let same_status = before.status == after.status;
        match figure {
            FigureName::Status if same_status => Move::Nowhere,
            FigureName::Status if after.status == Status::Ok => Move::Better,
            FigureName::Status => Move::Worse,
            // A peak of a run that was refused something is another figure.
            FigureName::Fragmentation if same_status => self.fragmentation(before, after),
            FigureName::ReservedBytesPeak if same_status => {
                self.count(before.reserved_bytes_peak, after.reserved_bytes_peak, true)
            }
            FigureName::Fragmentation | FigureName::ReservedBytesPeak => Move::Unknown,
            FigureName::SmallestCapacityBytes => self.capacity(before, after),
            FigureName::AllocRetries => {
                self.count(before.alloc_retries, after.alloc_retries, false)
            }
            FigureName::RequestedBytesPeak => {
                self.count(before.requested_bytes_peak, after.requested_bytes_peak, true)
            }
        }
    }

    fn capacity(&self, before: &Figures, after: &Figures) -> Move {
        if !self.entry.gates(FigureName::SmallestCapacityBytes) {
            return Move::Nowhere;
        }
        match (before.smallest_capacity_bytes, after.smallest_capacity_bytes) {
            (Some(before), Some(after)) => self.count(before, after, true),
            (Some(_), None) => Move::Worse,
            (None, Some(_)) => Move::Better,
            (None, None) => Move::Nowhere,
        }
    }

    fn count(&self, before: u64, after: u64, is_bytes: bool) -> Move {
        let moved = before.abs_diff(after);
        let parts = (self.tolerance.percent * PERCENT_PARTS).round() as u128;
        let whole = 100 * PERCENT_PARTS as u128;
        let within_percent = u128::from(moved) * whole <= parts.saturating_mul(before.into());
        let within_bytes = is_bytes && moved <= self.tolerance.bytes;
        moved_by(i128::from(after) - i128::from(before), within_percent || within_bytes)
    }

    fn fragmentation(&self, before: &Figures, after: &Figures) -> Move {
        let millionths = |figures: &Figures| figures.fragmentation_millionths();
        let (Some(from), Some(to)) = (millionths(before), millionths(after)) else {
            let both_absent = millionths(before).is_none() && millionths(after).is_none();
            return if both_absent { Move::Nowhere } else { Move::Unknown };
        };
        let moved = i128::from(to) - i128::from(from);
        let points = (self.tolerance.percent * 1e4).round() as i128;
        let within = moved.abs() <= points || moved.abs() <= self.share_of_reserved(after);
        moved_by(moved, within)
    }

    /// The tolerance in bytes as millionths of the reserved peak; as much more as two roundings may
    /// add.
    fn share_of_reserved(&self, after: &Figures) -> i128 {
        let bytes = u128::from(self.tolerance.bytes);
        if bytes == 0 {
            return 0;
        }
        let reserved = u128::from(after.reserved_bytes_peak.max(1));
        i128::try_from((bytes * 1_000_000).div_ceil(reserved) + 1).unwrap_or(i128::MAX)
    }

    fn place(&self, figure: FigureName) -> Option<Place> {
        match figure {
            FigureName::Status => self.measured.refusal.clone(),
            FigureName::Fragmentation | FigureName::ReservedBytesPeak => {
                Some(self.measured.reserved_peak.clone())
            }
            FigureName::SmallestCapacityBytes => self.measured.no_capacity.clone(),
            FigureName::AllocRetries | FigureName::RequestedBytesPeak => None,
        }
    }
}

fn moved_by(delta: i128, within: bool) -> Move {
    match delta {
        0 => Move::Nowhere,
        _ if within => Move::Within,
        1.. => Move::Worse,
        _ => Move::Better,
    }
}

fn delta(before: Option<FigureValue>, after: Option<FigureValue>) -> Option<Delta> {
    match (before?, after?) {
        (FigureValue::Count(before), FigureValue::Count(after)) => {
            Some(Delta::Count(signed_difference(before, after)))
        }
        (FigureValue::Fraction(before), FigureValue::Fraction(after)) => {
            Some(Delta::Fraction(Figures::kept(after - before)))
        }
        _ => None,
    }
}

fn in_percent(delta: Delta, before: Option<FigureValue>) -> Option<f64> {
    match (delta, before?) {
        (Delta::Fraction(fraction), _) => Some(100.0 * fraction),
        (Delta::Count(count), FigureValue::Count(before)) if before > 0 => {
            Some(100.0 * count as f64 / before as f64)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures {
            status: Status::Ok,
            fragmentation: Some(0.25),
            reserved_bytes_peak: 1_000_000,
            smallest_capacity_bytes: Some(2_000_000),
            alloc_retries: 10,
            requested_bytes_peak: 750_000,
        }
    }

    fn entry() -> Entry {
        Entry {
            trace: "t".to_owned(),
            trace_fingerprint: String::new(),
            allocator: "caching".to_owned(),
            gpu: None,
            capacity_bytes: None,
            limit_bytes: None,
            settings: None,
            profile: None,
            gate: None,
            tolerance: None,
            figures: figures(),
        }
    }

    fn verdict(tolerance: Tolerance, figure: FigureName, now: Figures) -> FigureVerdict {
        let measured = Measured {
            fingerprint: String::new(),
            figures: now,
            reserved_peak: Place::default(),
            refusal: None,
            no_capacity: None,
        };
        let figures = judge(&entry(), tolerance, &measured);
        figures.iter().find(|check| check.figure == figure).expect("there").verdict
    }

    /// The verdict on a reserved peak.
    fn reserved(bytes: u64, percent: f64, after: u64) -> FigureVerdict {
        let now = Figures { reserved_bytes_peak: after, ..figures() };
        verdict(Tolerance { bytes, percent }, FigureName::ReservedBytesPeak, now)
    }

    #[test]
    fn an_allowance_is_met_to_the_byte() {
        use FigureVerdict::{Improvement, Regression, Same, Tolerated};
        assert_eq!(reserved(0, 0.0, 1_000_000), Same);
        assert_eq!(reserved(0, 0.0, 1_000_001), Regression);
        assert_eq!(reserved(0, 0.0, 999_999), Improvement);
        assert_eq!(reserved(512, 0.0, 1_000_512), Tolerated);
        assert_eq!(reserved(512, 0.0, 1_000_513), Regression);
        assert_eq!(reserved(512, 0.0, 999_488), Tolerated);
        assert_eq!(reserved(512, 0.0, 999_487), Improvement);
        // 0.3 is no binary fraction: 0.3 % of 1,000,000 are 3,000 all the same.
        assert_eq!(reserved(0, 0.3, 1_003_000), Tolerated);
        assert_eq!(reserved(0, 0.3, 1_003_001), Regression);
        // The wider of the two holds.
        assert_eq!(reserved(4_000, 0.3, 1_004_000), Tolerated);
        assert_eq!(reserved(4_000, 0.3, 1_004_001), Regression);
    }

    #[test]
    fn fragmentation_is_tolerated_in_points() {
        use FigureVerdict::{Improvement, Regression, Tolerated};
        let of = |percent, fragmentation| {
            let now = Figures { fragmentation: Some(fragmentation), ..figures() };
            verdict(Tolerance { bytes: 0, percent }, FigureName::Fragmentation, now)
        };
        assert_eq!(of(0.0, 0.250001), Regression);
        assert_eq!(of(0.0, 0.249999), Improvement);
        assert_eq!(of(1.0, 0.26), Tolerated);
        assert_eq!(of(1.0, 0.260001), Regression);
    }

    /// A reserved peak that grew within its bytes must not fail as fragmentation.
    #[test]
    fn bytes_hold_for_fragmentation_as_a_share() {
        for (requested, before, growth) in [(750_000, 1_000_000, 512), (7, 7, 3), (1, 9, 1)] {
            let fragmentation =
                |reserved: u64| Some(Figures::kept(1.0 - f64::from(requested) / reserved as f64));
            let mut entry = entry();
            entry.figures.fragmentation = fragmentation(before);
            let now = Figures {
                fragmentation: fragmentation(before + growth),
                reserved_bytes_peak: before + growth,
                ..figures()
            };
            let tolerance = Tolerance { bytes: growth, percent: 0.0 };
            let measured = Measured {
                fingerprint: String::new(),
                figures: now,
                reserved_peak: Place::default(),
                refusal: None,
                no_capacity: None,
            };
            let check = &judge(&entry, tolerance, &measured)[1];
            assert_eq!(check.verdict, FigureVerdict::Tolerated, "{requested} {before} {growth}");
        }
    }

    #[test]
    fn retries_know_no_bytes() {
        let of = |bytes, percent, alloc_retries| {
            let now = Figures { alloc_retries, ..figures() };
            verdict(Tolerance { bytes, percent }, FigureName::AllocRetries, now)
        };
        assert_eq!(of(512, 0.0, 11), FigureVerdict::Regression);
        assert_eq!(of(0, 10.0, 11), FigureVerdict::Tolerated);
        assert_eq!(of(0, 10.0, 12), FigureVerdict::Regression);
    }

    #[test]
    fn running_out_of_memory_is_told_once() {
        let now = Figures {
            status: Status::Oom,
            fragmentation: None,
            reserved_bytes_peak: 5_000_000,
            ..figures()
        };
        let of = |figure| verdict(Tolerance::default(), figure, now);
        assert_eq!(of(FigureName::Status), FigureVerdict::Regression);
        assert_eq!(of(FigureName::Fragmentation), FigureVerdict::Incomparable);
        assert_eq!(of(FigureName::ReservedBytesPeak), FigureVerdict::Incomparable);
        assert_eq!(of(FigureName::SmallestCapacityBytes), FigureVerdict::Same);
    }

    #[test]
    fn a_capacity_that_is_gone_is_a_regression() {
        let now = Figures { smallest_capacity_bytes: None, ..figures() };
        let of = |now| verdict(Tolerance::default(), FigureName::SmallestCapacityBytes, now);
        assert_eq!(of(now), FigureVerdict::Regression);
        let grown = Figures { smallest_capacity_bytes: Some(2_000_001), ..figures() };
        assert_eq!(of(grown), FigureVerdict::Regression);
    }

    #[test]
    fn a_job_that_asks_for_more_is_told_only() {
        let now = Figures { requested_bytes_peak: 800_000, ..figures() };
        let of = verdict(Tolerance::default(), FigureName::RequestedBytesPeak, now);
        assert_eq!(of, FigureVerdict::Told);
    }
}
