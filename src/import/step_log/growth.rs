//! What a curve tells: how well memory is used at the peak, whether it grows, and when it is full.
//!
//! The one design decision: growth is looked for after the first steps, which always grow, and
//! only among reports of one kind, since memory before a backward pass is not comparable with
//! memory after it. A curve grows if its slope adds up to something and its end still rises.
//! `metrics` does the same for replays, whose steps are complete and of one kind; a log's are not.

use serde::Serialize;

use super::{CurveRow, ReferenceCurve};
use crate::import::oom_text::{Amount, NEGLIGIBLE_SHARE};
use crate::units::slope::median_slope;

/// Fewest reports from which growth is told.
const ROWS_MIN: usize = 4;

/// What prevails in a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CurveClass {
    /// What the program holds grows: a leak, or work that grows.
    GrowingLive,
    /// What is reserved grows, and what the program holds does not.
    GrowingStranded,
    /// Steady, and too little is unused to matter.
    NotFragmentation,
    /// Steady, and what is unused waits for other streams.
    Deferred,
    /// Steady, with a part of it unused.
    Fragmentation,
    /// The log does not tell what is reserved.
    Unknown,
}

/// How memory grows from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurveGrowth {
    /// First step looked at.
    pub from_step: u64,
    /// Last step.
    pub to_step: u64,
    /// Reserved, bytes a step.
    pub reserved_bytes_per_step: f64,
    /// Allocated, bytes a step.
    pub allocated_bytes_per_step: f64,
    /// The step at which the device would be full, if its memory is known and the curve grows.
    pub full_at_step: Option<u64>,
}

/// What a curve tells. Peaks are each their own maximum.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CurveDiagnosis {
    /// What prevails.
    pub class: CurveClass,
    /// Most reserved.
    pub reserved_bytes_peak: Option<u64>,
    /// Most active.
    pub active_bytes_peak: Option<u64>,
    /// Most allocated.
    pub allocated_bytes_peak: Option<u64>,
    /// allocated peak / reserved peak.
    pub utilization: Option<f64>,
    /// Whether the steps are numbered by the log, else reports are counted.
    pub is_numbered: bool,
    /// Growth, if there are reports enough.
    pub growth: Option<CurveGrowth>,
}

impl ReferenceCurve {
    /// Reads the curve; with the memory of the device also when it would be full.
    pub fn diagnose(&self, capacity_bytes: Option<u64>) -> CurveDiagnosis {
        let most = |of: fn(&CurveRow) -> Option<Amount>| {
            self.rows.iter().filter_map(of).map(|amount| amount.bytes).max()
        };
        let either = |peak: Option<u64>, now: Option<u64>| peak.max(now);
        let reserved = either(most(|row| row.reserved_peak), most(|row| row.reserved));
        let allocated = either(most(|row| row.allocated_peak), most(|row| row.allocated));
        let active = most(|row| row.active_peak);
        let utilization = allocated
            .zip(reserved)
            .filter(|(_, whole)| *whole > 0)
            .map(|(part, whole)| part as f64 / whole as f64);
        let points = self.points();
        let growth = growth(&points, capacity_bytes);
        let peak = reserved.or(allocated).unwrap_or(0);
        let class = match (reserved, allocated) {
            _ if growth.is_some() && is_growing(&points, peak) => {
                let live = slope(&points, |point| point.allocated);
                let all = slope(&points, |point| point.reserved);
                if reserved.is_none() || live >= all / 2.0 {
                    CurveClass::GrowingLive
                } else {
                    CurveClass::GrowingStranded
                }
            }
            (Some(reserved), Some(allocated)) => steady(reserved, allocated, active),
            _ => CurveClass::Unknown,
        };
        let is_growing = matches!(class, CurveClass::GrowingLive | CurveClass::GrowingStranded);
        let growth = growth.map(|growth| CurveGrowth {
            full_at_step: growth.full_at_step.filter(|_| is_growing),
            ..growth
        });
        CurveDiagnosis {
            class,
            reserved_bytes_peak: reserved,
            active_bytes_peak: active,
            allocated_bytes_peak: allocated,
            utilization,
            is_numbered: self.is_numbered(),
            growth,
        }
    }

    /// Whether every report names a step, later ones higher ones.
    fn is_numbered(&self) -> bool {
        let steps: Option<Vec<u64>> = self.rows.iter().map(|row| row.step).collect();
        steps.is_some_and(|steps| steps.windows(2).all(|pair| pair[0] < pair[1]))
    }

    /// The reports that are comparable, the first steps left out.
    fn points(&self) -> Vec<Point> {
        let is_numbered = self.is_numbered();
        let label = self.commonest_label();
        let rows = self.rows.iter().enumerate();
        let rows = rows.filter(|(_, row)| label.is_none() || row.label.as_deref() == label);
        let points: Vec<Point> = rows
            .filter_map(|(index, row)| {
                let reserved = row.reserved.or(row.reserved_peak);
                let allocated = row.allocated.or(row.allocated_peak)?;
                let counted = index as u64 + 1;
                Some(Point {
                    step: if is_numbered { row.step? } else { counted },
                    reserved: reserved.unwrap_or(allocated).bytes,
                    allocated: allocated.bytes,
                })
            })
            .collect();
        let warm_up = (points.len() / 10).max(1);
        points.get(warm_up..).unwrap_or_default().to_vec()
    }

    /// The label of most reports, the first of equals; nothing if too few share one.
    fn commonest_label(&self) -> Option<&str> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for label in self.rows.iter().filter_map(|row| row.label.as_deref()) {
            if let Some((_, count)) = counts.iter_mut().find(|(known, _)| *known == label) {
                *count += 1;
            } else if counts.len() < LABELS_MAX {
                // Labels with a number in them are all different.
                counts.push((label, 1));
            }
        }
        let mut best: Option<(&str, usize)> = None;
        for (label, count) in counts {
            if best.is_none_or(|(_, most)| count > most) {
                best = Some((label, count));
            }
        }
        best.filter(|(_, count)| *count > ROWS_MIN).map(|(label, _)| label)
    }
}

/// Most labels that are told apart.
const LABELS_MAX: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Point {
    step: u64,
    reserved: u64,
    allocated: u64,
}

/// A curve that does not grow.
fn steady(reserved_bytes: u64, allocated_bytes: u64, active_bytes: Option<u64>) -> CurveClass {
    let unused = reserved_bytes.saturating_sub(allocated_bytes);
    if (unused as f64) < NEGLIGIBLE_SHARE * reserved_bytes as f64 {
        return CurveClass::NotFragmentation;
    }
    let waiting = active_bytes.map_or(0, |active| active.saturating_sub(allocated_bytes));
    if waiting >= unused.div_ceil(2) { CurveClass::Deferred } else { CurveClass::Fragmentation }
}

fn growth(points: &[Point], capacity_bytes: Option<u64>) -> Option<CurveGrowth> {
    let (first, last) = (points.first()?, points.last()?);
    if points.len() < ROWS_MIN - 1 {
        return None;
    }
    let reserved = slope(points, |point| point.reserved);
    let full_at_step = capacity_bytes.filter(|_| reserved > 0.0).map(|capacity| {
        let steps = (capacity.saturating_sub(last.reserved) as f64 / reserved).ceil();
        // A float beyond all integers becomes the largest one.
        last.step.saturating_add(steps as u64)
    });
    Some(CurveGrowth {
        from_step: first.step,
        to_step: last.step,
        reserved_bytes_per_step: reserved,
        allocated_bytes_per_step: slope(points, |point| point.allocated),
        full_at_step,
    })
}

/// Whether the slope adds up to more than rounding and the last third still lies above the one
/// before it.
fn is_growing(points: &[Point], peak_bytes: u64) -> bool {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return false };
    let least = NEGLIGIBLE_SHARE * peak_bytes as f64;
    let total = slope(points, |point| point.reserved) * (last.step - first.step) as f64;
    let third = points.len() / 3;
    let mean = |part: &[Point]| {
        part.iter().map(|point| point.reserved as f64).sum::<f64>() / part.len().max(1) as f64
    };
    let end = mean(&points[points.len() - third..]);
    let middle = mean(&points[third..points.len() - third]);
    total > least && end - middle > least / 6.0
}

fn slope(points: &[Point], of: fn(&Point) -> u64) -> f64 {
    let points: Vec<(u64, u64)> = points.iter().map(|point| (point.step, of(point))).collect();
    median_slope(&points)
}

#[cfg(test)]
mod tests {
    use super::super::Framework;
    use super::*;
    use crate::units::GIB;

    fn curve(sizes: &[(u64, u64)]) -> ReferenceCurve {
        let rows = sizes.iter().enumerate().map(|(index, &(allocated, reserved))| CurveRow {
            step: Some(10 * index as u64),
            allocated: Some(Amount::exact(allocated * GIB)),
            reserved: Some(Amount::exact(reserved * GIB)),
            ..CurveRow::default()
        });
        ReferenceCurve { framework: Framework::Megatron, rank: None, rows: rows.collect() }
    }

    #[test]
    fn a_straight_line_is_full_where_it_meets_the_capacity() {
        let sizes: Vec<(u64, u64)> = (0..8).map(|step| (20, 30 + 2 * step)).collect();
        let diagnosis = curve(&sizes).diagnose(Some(80 * GIB));
        assert_eq!(diagnosis.class, CurveClass::GrowingStranded);
        let growth = diagnosis.growth.expect("rows enough");
        // 2 GiB in 10 steps; 44 GiB at step 70, so 36 GiB more take 180 steps.
        assert!((growth.reserved_bytes_per_step - 0.2 * GIB as f64).abs() < 1.0, "{growth:?}");
        assert_eq!(growth.allocated_bytes_per_step, 0.0);
        assert_eq!((growth.from_step, growth.full_at_step), (10, Some(250)));
    }

    #[test]
    fn live_memory_that_grows_is_no_fragmentation() {
        let sizes: Vec<(u64, u64)> = (0..8).map(|step| (20 + 2 * step, 30 + 2 * step)).collect();
        assert_eq!(curve(&sizes).diagnose(None).class, CurveClass::GrowingLive);
    }

    /// One report in the middle of a phase, say.
    #[test]
    fn a_single_odd_report_bends_no_slope() {
        let mut sizes: Vec<(u64, u64)> = (0..9).map(|step| (20, 30 + step)).collect();
        sizes[5] = (20, 70);
        let growth = curve(&sizes).diagnose(None).growth.expect("rows enough");
        assert!((growth.reserved_bytes_per_step - 0.1 * GIB as f64).abs() < 1.0, "{growth:?}");
    }

    #[test]
    fn one_early_jump_is_no_growth() {
        let mut sizes = vec![(20, 20), (20, 20), (20, 30)];
        sizes.extend([(20, 30); 12]);
        let diagnosis = curve(&sizes).diagnose(Some(80 * GIB));
        assert_eq!(diagnosis.class, CurveClass::Fragmentation);
        assert_eq!(diagnosis.growth.expect("rows enough").full_at_step, None);
    }

    /// llama-cookbook#120: 42 live, 59 active, 63 reserved.
    #[test]
    fn waiting_for_streams_is_told_apart() {
        let mut curve = curve(&[(42, 63)]);
        curve.rows[0].active_peak = Some(Amount::exact(59 * GIB));
        let diagnosis = curve.diagnose(None);
        assert_eq!((diagnosis.class, diagnosis.growth), (CurveClass::Deferred, None));
        curve.rows[0].active_peak = Some(Amount::exact(45 * GIB));
        assert_eq!(curve.diagnose(None).class, CurveClass::Fragmentation);
        assert_eq!(self::curve(&[(62, 63)]).diagnose(None).class, CurveClass::NotFragmentation);
    }
}
