//! What device calls cost: tables of measured points.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::DeviceCall;

/// A cost table is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not the JSON of a profile.
    #[error("not a cost profile: {0}")]
    Json(#[from] serde_json::Error),
    /// Points out of order, or none, or a negative or infinite cost.
    #[error("cost profile {profile}: the points of {call} must have rising sizes and finite costs")]
    Points {
        /// Name of the profile.
        profile: String,
        /// The call.
        call: String,
    },
    /// No such profile ships.
    #[error("no cost profile {name:?} ships with fraglab; there are: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names that exist.
        known: String,
    },
}

/// Microseconds per call by size, from a measurement on a GPU.
///
/// Linear between measured points, flat below the first, straight on above the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CostProfile {
    /// Name on the command line.
    pub name: String,
    /// The GPU it was measured on.
    pub gpu: String,
    /// Driver version.
    pub driver: String,
    /// Day of the measurement.
    pub date: String,
    /// How the figures came about.
    pub method: String,
    /// Points (size in MiB, microseconds) by call.
    pub calls: BTreeMap<DeviceCall, Vec<(f64, f64)>>,
    /// The same as lines in bytes and nanoseconds, by call number.
    #[serde(skip)]
    lines: Vec<Vec<Point>>,
}

/// A measured point and the slope of the line to the next.
#[derive(Clone, Copy, Debug)]
struct Point {
    size_bytes: f64,
    cost_ns: f64,
    slope: f64,
}

/// Profiles that ship: name and text.
const SHIPPED: [(&str, &str); 1] = [("h200", include_str!("profiles/h200.json"))];

impl CostProfile {
    /// A profile that ships with fraglab.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] names those that exist.
    pub fn shipped(name: &str) -> Result<CostProfile, ProfileError> {
        match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
            Some((_, text)) => CostProfile::from_json(text),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                known: CostProfile::shipped_names().join(", "),
            }),
        }
    }

    /// Names of the profiles that ship.
    pub fn shipped_names() -> Vec<&'static str> {
        SHIPPED.iter().map(|(name, _)| *name).collect()
    }

    /// Reads a profile from its JSON text.
    ///
    /// # Errors
    /// If it is not the JSON of a profile or its points make no sense.
    pub fn from_json(text: &str) -> Result<CostProfile, ProfileError> {
        let mut profile: CostProfile = serde_json::from_str(text)?;
        for call in DeviceCall::ALL {
            let points = profile.calls.get(&call).map_or(&[][..], |points| points);
            let bad = points.is_empty()
                || points.iter().any(|&(mib, us)| !mib.is_finite() || !us.is_finite() || us < 0.0)
                || points.windows(2).any(|pair| pair[0].0 >= pair[1].0);
            if bad {
                return Err(ProfileError::Points {
                    profile: profile.name,
                    call: call.name().to_owned(),
                });
            }
            profile.lines.push(lines(points));
        }
        Ok(profile)
    }

    /// Cost of one call in nanoseconds.
    #[inline]
    pub fn cost_ns(&self, call: DeviceCall, size_bytes: u64) -> f64 {
        let line = &self.lines[call as usize];
        let size = size_bytes as f64;
        // Few points (about a dozen), most calls small: a forward scan ends early.
        let mut at = line[0];
        if size <= at.size_bytes {
            return at.cost_ns;
        }
        for &point in &line[1..] {
            if size < point.size_bytes {
                break;
            }
            at = point;
        }
        at.cost_ns + (size - at.size_bytes) * at.slope
    }
}

/// Points in bytes and nanoseconds with slopes; the last slope is that of the last two points.
fn lines(points: &[(f64, f64)]) -> Vec<Point> {
    let scaled: Vec<(f64, f64)> =
        points.iter().map(|&(mib, us)| (mib * 1_048_576.0, us * 1000.0)).collect();
    let slope = |pair: &[(f64, f64)]| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0);
    let slopes: Vec<f64> = scaled.windows(2).map(slope).collect();
    let last = slopes.last().copied().unwrap_or(0.0).max(0.0);
    let with_slope = scaled.iter().enumerate().map(|(index, &(size_bytes, cost_ns))| Point {
        size_bytes,
        cost_ns,
        slope: slopes.get(index).copied().unwrap_or(last),
    });
    with_slope.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h200_interpolates_the_measured_table() {
        let h200 = CostProfile::shipped("h200").expect("ships");
        let us = |call, mib: f64| h200.cost_ns(call, (mib * 1_048_576.0) as u64) / 1000.0;
        // Points of device_latency.h200.csv.
        assert_eq!(us(DeviceCall::Malloc, 2.0), 49.09);
        assert!((us(DeviceCall::Malloc, 512.0) - 175.39).abs() < 1e-9);
        // Between 512 (175.39) and 1024 (277.50): the middle.
        assert!((us(DeviceCall::Malloc, 768.0) - (175.39 + 277.50) / 2.0).abs() < 1e-6);
        // Flat below the first point, straight on above the last (2048: 509.38, 4096: 988.06).
        assert_eq!(us(DeviceCall::Malloc, 0.5), 49.09);
        assert!((us(DeviceCall::Malloc, 6144.0) - (988.06 + (988.06 - 509.38))).abs() < 1e-6);
    }

    #[test]
    fn unknown_profile_names_the_known() {
        let error = CostProfile::shipped("b300").expect_err("does not ship").to_string();
        assert!(error.contains("b300") && error.contains("h200"), "{error}");
    }
}
