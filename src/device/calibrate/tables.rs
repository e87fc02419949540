//! From what was measured to the tables of a profile.

use super::{Calibration, Case, CostRow};
use crate::device::profile::{CostPoints, CostProfile, Curves, ProfileError};
use crate::units::MIB;

/// What a profile says of itself.
#[derive(Clone, Debug)]
pub struct ProfileNames {
    /// Its name.
    pub name: String,
    /// The GPU.
    pub gpu: String,
    /// Its driver.
    pub driver: String,
    /// The day.
    pub date: String,
}

impl Calibration {
    /// The profile that follows from what was measured: `calls` are medians, of malloc and create
    /// those of [`Case::Settled`]; `tails` what the means of [`Case::Mixed`] are beyond them.
    ///
    /// # Errors
    /// [`ProfileError`] if a call was not measured.
    pub fn profile(&self, names: ProfileNames) -> Result<CostProfile, ProfileError> {
        let ProfileNames { name, gpu, driver, date } = names;
        let method = format!(
            "fraglab calibrate: every call timed in mixes of sizes that come and go, {} rounds, on \
             an idle GPU; calls are medians, of malloc and create for memory that lay free for 0.2 s; \
             tails are means of all calls (50 ms at most each), on memory freed just before, less \
             the medians",
            self.rounds
        );
        let (mut calls, mut tails) = (CostPoints::new(), CostPoints::new());
        for row in self.rows.iter().filter(|row| row.case == Case::Mixed) {
            let point = |ns| (row.size_bytes as f64 / MIB as f64, microseconds(ns));
            let is_settled = |other: &&CostRow| {
                let of = |row: &CostRow| (row.call, row.size_bytes);
                other.case == Case::Settled && of(other) == of(row)
            };
            let common_ns = self.rows.iter().find(is_settled).unwrap_or(row).median_ns;
            calls.entry(row.call).or_default().push(point(common_ns));
            tails.entry(row.call).or_default().push(point(row.mean_ns - common_ns));
        }
        CostProfile {
            name,
            gpu,
            driver,
            date,
            fraglab_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            derived: false,
            method,
            calls,
            tails,
            curves: Curves::default(),
        }
        .checked()
    }
}

/// Whole nanoseconds as microseconds; no mean below the median takes anything off.
fn microseconds(ns: f64) -> f64 {
    ns.max(0.0).round() / 1000.0
}
