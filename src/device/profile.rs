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

/// Microseconds per call by size, measured on a GPU or derived from figures that others published.
///
/// Linear between the points, flat below the first, straight on above the last, but never falling
/// there. Sizes are those of one piece of memory; see [`super::Counting`] for ranges of several.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CostProfile {
    /// Name on the command line.
    pub name: String,
    /// The GPU whose calls it costs.
    pub gpu: String,
    /// Driver version.
    pub driver: String,
    /// When it was measured or derived.
    pub date: String,
    /// Nobody measured these points: they follow from published figures, as `method` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub derived: bool,
    /// How the figures came about: for derived ones from what, and what is assumed.
    pub method: String,
    /// Points (size in MiB, microseconds) by call.
    pub calls: BTreeMap<DeviceCall, Vec<(f64, f64)>>,
    /// The same as lines in bytes and nanoseconds, by call number.
    #[serde(skip)]
    lines: Vec<Vec<Point>>,
}

/// A point and the slope of the line to the next.
#[derive(Clone, Copy, Debug)]
struct Point {
    size_bytes: f64,
    cost_ns: f64,
    slope: f64,
}

/// Profiles that ship: name and text.
const SHIPPED: [(&str, &str); 2] = [
    ("h200", include_str!("profiles/h200.json")),
    ("a100-80g", include_str!("profiles/a100-80g.json")),
];

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
    use crate::units::MIB;

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

    /// One native allocation of 2 GB in microseconds, and all calls of one kind that build 2 GB of
    /// pieces of a size, in units of it.
    fn in_units_of_native(profile: &CostProfile, call: DeviceCall, piece_mib: u64) -> f64 {
        let native = profile.cost_ns(DeviceCall::Malloc, 2048 * MIB);
        let (size, count) = match call {
            // Addresses are reserved once, for all pieces.
            DeviceCall::AddressReserve => (2048 * MIB, 1),
            _ => (piece_mib * MIB, 2048 / piece_mib),
        };
        profile.cost_ns(call, size) * count as f64 / native
    }

    /// GMLake, Table 1 (specs/gmlake.md 6.3): 2 GB built of pieces of 2, 128 and 1024 MB, at the
    /// precision printed.
    #[test]
    fn a100_gives_back_the_published_ratios() {
        let a100 = CostProfile::shipped("a100-80g").expect("ships");
        let calls = [
            (DeviceCall::AddressReserve, [(0.003, 3), (0.003, 3), (0.002, 3)]),
            (DeviceCall::Create, [(18.1, 1), (0.89, 2), (0.79, 2)]),
            (DeviceCall::Map, [(0.70, 2), (0.01, 2), (0.002, 3)]),
            (DeviceCall::SetAccess, [(96.8, 1), (8.2, 1), (0.7, 1)]),
        ];
        let mut totals = [0.0; 3];
        for (call, published) in calls {
            for (at, (ratio, decimals)) in published.into_iter().enumerate() {
                let got = in_units_of_native(&a100, call, [2, 128, 1024][at]);
                totals[at] += got;
                let half_step = 0.5 * 10f64.powi(-decimals) + 1e-6;
                assert!((got - ratio).abs() <= half_step, "{call:?} {at}: {got}, not {ratio}");
            }
        }
        // The first column of the table adds up to 115.6; the paper prints 115.4.
        for (total, published) in totals.into_iter().zip([115.6, 9.1, 1.5]) {
            assert!((total - published).abs() <= 0.05, "{total}, not {published}");
        }
    }

    /// Issue 22 of GMLake: stitches of 256 and 477 pieces of 2 MB took 20.435 and 40.207 ms.
    #[test]
    fn a100_stitches_as_fast_as_the_log_of_a_real_run() {
        let a100 = CostProfile::shipped("a100-80g").expect("ships");
        let us = |call, size| a100.cost_ns(call, size) / 1000.0;
        let per_piece = |pieces: u64| {
            us(DeviceCall::AddressReserve, pieces * 2 * MIB) / pieces as f64
                + us(DeviceCall::Map, 2 * MIB)
                + us(DeviceCall::SetAccess, 2 * MIB)
        };
        for pieces in [256, 477] {
            let us = per_piece(pieces);
            assert!((20_435.0 / 256.0..=40_207.0 / 477.0).contains(&us), "{us}");
        }
    }

    /// vAttention, Table 3, pages of 2 MB; beyond it the shapes are those of `h200`.
    #[test]
    fn a100_follows_the_rules_that_its_method_states() {
        let a100 = CostProfile::shipped("a100-80g").expect("ships");
        let h200 = CostProfile::shipped("h200").expect("ships");
        for (call, us) in [
            (DeviceCall::AddressReserve, 2.0),
            (DeviceCall::AddressFree, 1.0),
            (DeviceCall::Unmap, 34.0),
            (DeviceCall::Release, 23.0),
        ] {
            assert_eq!(a100.cost_ns(call, 2 * MIB), 1000.0 * us, "{call:?}");
        }
        let ratio = |call, size| a100.cost_ns(call, size) / h200.cost_ns(call, size);
        for (call, like) in [
            (DeviceCall::Malloc, (DeviceCall::Malloc, 2048 * MIB)),
            (DeviceCall::Free, (DeviceCall::Malloc, 2048 * MIB)),
            (DeviceCall::Unmap, (DeviceCall::Unmap, 2 * MIB)),
            (DeviceCall::Release, (DeviceCall::Release, 2 * MIB)),
        ] {
            let wanted = ratio(like.0, like.1);
            for mib in [1, 2, 20, 100, 2048, 4096] {
                let got = ratio(call, mib * MIB);
                assert!((got / wanted - 1.0).abs() < 1e-4, "{call:?} {mib}: {got}, not {wanted}");
            }
        }
        assert!(a100.derived && !h200.derived);
    }

    #[test]
    fn unknown_profile_names_the_known() {
        let error = CostProfile::shipped("b300").expect_err("does not ship").to_string();
        assert!(error.contains("b300") && error.contains("h200"), "{error}");
    }
}
