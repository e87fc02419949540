//! What device calls cost: tables of measured points.
//!
//! The one design decision: a cost goes by the call and the size of the piece, and by nothing else. Of
//! what else could matter, a real card showed nothing worth a table: not how many mallocs, handles
//! and mappings there are, nor whether a piece lies in a range beside others. What does matter is the tail: a large malloc mostly takes a fraction of a
//! millisecond, and now and then 7 ms, when the driver waits for freed memory that is being cleared.
//! The time of a run is a sum, and sums are made of means; so a profile says both.
//!
//! ```text
//!   calls   what a call takes in the common case: the median; of malloc and create, the median for
//!           memory that lay free for a while
//!   tails   what it takes beyond that on average: the mean of all calls, less the median; of malloc
//!           and create, the mean for memory that was freed just before
//!   a replay is charged both, but malloc and create their tail only for as much memory as it gave
//!   back before; a call on a range of several pieces costs what its pieces cost
//! ```
//!
//! As JSON, with points `[size in MiB, microseconds]`, all nine calls in `calls`, and any of them in
//! `tails`, which may be missing:
//!
//! ```json
//! {"name": "mine", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-12-01", "method": "...",
//!  "calls": {"malloc": [[2.0, 49.09], [4.0, 48.01]], "set_access": [[2.0, 43.0]], "...": []},
//!  "tails": {"malloc": [[2.0, 3.5], [1024.0, 2500.0]]}}
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::DeviceCall;

/// A cost table is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not the JSON of a profile.
    #[error("not a cost profile: {0}")]
    Json(#[from] serde_json::Error),
    /// Points out of order, or none, or too many, or a negative or endless cost.
    #[error(
        "cost profile {profile}: the points of {call} must have rising sizes and costs from 0 to \
         1e12 \u{b5}s"
    )]
    Points {
        /// Name of the profile.
        profile: String,
        /// The call, with the table unless it is `calls`: `malloc`, `tails.unmap`.
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

/// Points (size in MiB, microseconds) by call.
pub type CostPoints = BTreeMap<DeviceCall, Vec<(f64, f64)>>;

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
    /// The version of this program that measured it; none for those made otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraglab_version: Option<String>,
    /// Nobody measured these points: they follow from published figures, as `method` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub derived: bool,
    /// How the figures came about: for derived ones from what, and what is assumed.
    pub method: String,
    /// What every call takes in the common case: the median.
    pub calls: CostPoints,
    /// What a call takes beyond that on average; malloc and create for memory freed before. Without a table `calls` is all there is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tails: CostPoints,
    /// The same as lines in bytes and nanoseconds.
    #[serde(skip)]
    pub(super) curves: Curves,
}

/// The tables as lines.
#[derive(Clone, Debug, Default)]
pub(super) struct Curves {
    /// By call number; all are there.
    calls: Vec<Curve>,
    tails: Vec<Option<Curve>>,
}

/// A line through points of rising places.
#[derive(Clone, Debug)]
struct Curve(Vec<Point>);

/// A point and the slope of the line to the next.
#[derive(Clone, Copy, Debug)]
struct Point {
    at: f64,
    cost_ns: f64,
    slope: f64,
}

/// Profiles that ship: name and text.
const SHIPPED: [(&str, &str); 3] = [
    ("h200", include_str!("profiles/h200.json")),
    ("h200-calibrated", include_str!("profiles/h200-calibrated.json")),
    ("a100-80g", include_str!("profiles/a100-80g.json")),
];

/// No table needs more points; a scan over them stays short.
const POINTS_MAX: usize = 1000;
/// Sizes in MiB beyond the 64 bits of a byte count make no sense.
const PLACE_MAX: f64 = (1u64 << 44) as f64;
/// Nor does a call of twelve days.
const COST_US_MAX: f64 = 1e12;

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
        let profile: CostProfile = serde_json::from_str(text)?;
        profile.checked()
    }

    /// The profile with its tables ready for use, once they are found to make sense.
    ///
    /// # Errors
    /// [`ProfileError::Points`] names the first table that does not.
    pub(super) fn checked(mut self) -> Result<CostProfile, ProfileError> {
        let mut curves = Curves::default();
        for call in DeviceCall::ALL {
            let wrong = |table: &str| ProfileError::Points {
                profile: self.name.clone(),
                call: format!("{table}{}", call.name()),
            };
            let points = self.calls.get(&call).ok_or_else(|| wrong(""))?;
            curves.calls.push(Curve::through(points).ok_or_else(|| wrong(""))?);
            let tail = |points| Curve::through(points).ok_or_else(|| wrong("tails."));
            curves.tails.push(self.tails.get(&call).map(|points| tail(points)).transpose()?);
        }
        self.curves = curves;
        Ok(self)
    }

    /// The JSON text that [`Self::from_json`] reads, a line a call.
    ///
    /// # Errors
    /// If the values cannot be serialised; plain data always can.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let mut text = String::from("{\n");
        let mut field = |key: &str, value: String| {
            let comma = if text.ends_with("{\n") { "" } else { ",\n" };
            text.push_str(&format!("{comma} \"{key}\": {value}"));
        };
        field("name", serde_json::to_string(&self.name)?);
        field("gpu", serde_json::to_string(&self.gpu)?);
        field("driver", serde_json::to_string(&self.driver)?);
        field("date", serde_json::to_string(&self.date)?);
        if let Some(version) = &self.fraglab_version {
            field("fraglab_version", serde_json::to_string(version)?);
        }
        if self.derived {
            field("derived", "true".to_owned());
        }
        field("method", serde_json::to_string(&self.method)?);
        let tables = [("calls", &self.calls), ("tails", &self.tails)].into_iter();
        for (key, table) in tables.filter(|(key, table)| *key == "calls" || !table.is_empty()) {
            // In the order of the calls, not of their names.
            let rows =
                DeviceCall::ALL.into_iter().filter_map(|call| Some((call, table.get(&call)?)));
            let rows = rows.map(|(call, points)| {
                let points: Vec<String> =
                    points.iter().map(|(at, us)| format!("[{at:?}, {us:?}]")).collect();
                format!("  \"{}\": [{}]", call.name(), points.join(", "))
            });
            let rows: Vec<String> = rows.collect();
            field(key, format!("{{\n{}\n }}", rows.join(",\n")));
        }
        text.push_str("\n}\n");
        Ok(text)
    }

    /// What one call of one piece costs in nanoseconds on average, on memory that was freed just
    /// before.
    #[inline]
    pub fn cost_ns(&self, call: DeviceCall, size_bytes: u64) -> f64 {
        self.median_ns(call, size_bytes) + self.tail_ns(call, size_bytes)
    }

    /// What one call of one piece costs in nanoseconds in the common case.
    #[inline]
    pub fn median_ns(&self, call: DeviceCall, size_bytes: u64) -> f64 {
        self.curves.calls[call as usize].at(size_bytes as f64)
    }

    /// What it costs in nanoseconds beyond that on average.
    #[inline]
    pub fn tail_ns(&self, call: DeviceCall, size_bytes: u64) -> f64 {
        let tail = self.curves.tails[call as usize].as_ref();
        tail.map_or(0.0, |tail| tail.at(size_bytes as f64))
    }
}

impl Curve {
    /// Points of (MiB, microseconds) as a line; the last slope is that of the last two points, if
    /// it rises. Nothing if they make no sense.
    fn through(points: &[(f64, f64)]) -> Option<Curve> {
        const MIB: f64 = 1_048_576.0;
        let is_good = |&(at, us): &(f64, f64)| {
            (0.0..=PLACE_MAX).contains(&at) && (0.0..=COST_US_MAX).contains(&us)
        };
        let rises = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if points.is_empty() || points.len() > POINTS_MAX || !rises || !points.iter().all(is_good) {
            return None;
        }
        let scaled: Vec<(f64, f64)> =
            points.iter().map(|&(at, us)| (at * MIB, us * 1000.0)).collect();
        let slope = |pair: &[(f64, f64)]| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0);
        let slopes: Vec<f64> = scaled.windows(2).map(slope).collect();
        let last = slopes.last().copied().unwrap_or(0.0).max(0.0);
        let with_slope = scaled.iter().enumerate().map(|(index, &(at, cost_ns))| Point {
            at,
            cost_ns,
            slope: slopes.get(index).copied().unwrap_or(last),
        });
        let line: Vec<Point> = with_slope.collect();
        // Sizes may lie so close that the line between them is upright.
        line.iter().all(|point| point.slope.is_finite()).then_some(Curve(line))
    }

    #[inline]
    fn at(&self, place: f64) -> f64 {
        let Curve(line) = self;
        if place <= line[0].at {
            return line[0].cost_ns;
        }
        let last = line[line.partition_point(|point| point.at <= place) - 1];
        last.cost_ns + (place - last.at) * last.slope
    }
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

    /// A profile in which malloc has these points and everything else costs 1 µs.
    fn with_malloc(points: &str) -> Result<CostProfile, ProfileError> {
        let rest = DeviceCall::ALL.into_iter().skip(1);
        let rest: Vec<String> = rest.map(|call| format!("\"{}\": [[2, 1]]", call.name())).collect();
        CostProfile::from_json(&format!(
            "{{\"name\": \"p\", \"gpu\": \"g\", \"driver\": \"d\", \"date\": \"t\", \"method\": \"m\",
              \"calls\": {{\"malloc\": {points}, {}}}}}",
            rest.join(", ")
        ))
    }

    #[test]
    fn tables_that_make_no_sense_are_refused_by_name() {
        let many: Vec<String> = (0..2000).map(|at| format!("[{at}, 1]")).collect();
        let many = format!("[{}]", many.join(","));
        for points in [
            "[]",
            "[[4, 1], [2, 1]]",
            "[[2, 1], [2, 3]]",
            "[[2, -1]]",
            "[[-2, 1]]",
            "[[1e300, 1]]",
            "[[2, 1e300]]",
            "[[0, 0], [5e-324, 1e12]]",
            &many,
        ] {
            let error = with_malloc(points).expect_err(points);
            let text = error.to_string();
            assert!(text.starts_with("cost profile p: the points of malloc must have"), "{text}");
        }
        for points in ["[[2, NaN]]", "[[2, 1e999]]", "[[2]]", "\"x\""] {
            let text = with_malloc(points).expect_err(points).to_string();
            assert!(text.starts_with("not a cost profile: ") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut profile = with_malloc("[[0.5, 1.25], [2, 3]]").expect("good");
        let plain = profile.to_json().expect("plain data");
        assert!(!plain.contains("tails"), "{plain}");
        profile.fraglab_version = Some("1.2.3".to_owned());
        profile.tails.insert(DeviceCall::Malloc, vec![(2.0, 0.5), (4.0, 7000.0)]);
        let text = profile.to_json().expect("plain data");
        let read = CostProfile::from_json(&text).expect("what was written");
        assert_eq!(read.to_json().expect("plain data"), text);
        assert_eq!(read.median_ns(DeviceCall::Malloc, MIB), 1250.0 + 1750.0 / 3.0);
        // Flat below the first point, half way between the two, and straight on.
        assert_eq!(read.cost_ns(DeviceCall::Malloc, MIB), 1250.0 + 1750.0 / 3.0 + 500.0);
        let tail_ns = |mib| {
            let size_bytes = mib * MIB;
            let malloc = DeviceCall::Malloc;
            read.cost_ns(malloc, size_bytes) - read.median_ns(malloc, size_bytes)
        };
        assert!((tail_ns(3) - 3_500_250.0).abs() < 1e-6);
        assert!((tail_ns(6) - (7_000_000.0 + 6_999_500.0)).abs() < 1e-6);
        assert_eq!(read.cost_ns(DeviceCall::Free, MIB), read.median_ns(DeviceCall::Free, MIB));
    }

    #[test]
    fn a_bad_further_table_is_named_with_the_table() {
        let mut profile = with_malloc("[[2, 1]]").expect("good");
        profile.tails.insert(DeviceCall::Map, vec![(5.0, 1.0), (1.0, 2.0)]);
        let text = profile.to_json().expect("plain data");
        let error = CostProfile::from_json(&text).expect_err("falling sizes").to_string();
        assert!(error.contains("the points of tails.map must"), "{error}");
    }
}
