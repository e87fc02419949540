//! The answer of `calibrate`: what calls cost by size, in the common case and on average, and what it
//! costs to build memory of pieces, beside what was published.

use std::fmt::Write as _;

use super::grid::Grid;
use super::{Style, Tone, counted, grouped, printable, wrapped};
use crate::device::calibrate::{
    BUILT_BYTES, BuiltRatios, Calibration, CostRow, GMLAKE, LeftOut, PublishedRatios, built_ratios,
};
use crate::device::{CostPoints, CostProfile, DeviceCall};
use crate::units::Bytes;

/// Bytes of a MiB, the unit of sizes in a profile.
const MIB: f64 = 1_048_576.0;

/// A profile's tables.
pub fn cost_profile(profile: &CostProfile, style: Style) -> String {
    let CostProfile { name, gpu, driver, date, method, .. } = profile;
    let mut text = style.paint(Tone::Heading, &printable(name));
    let origin = if profile.derived { "derived for" } else { "measured on" };
    let by = profile.fraglab_version.iter().map(|version| format!(", by fraglab {version}"));
    let facts = format!(": {origin} {gpu}, driver {driver}, {date}{}", by.collect::<String>());
    text.push_str(&printable(&facts));
    text.push('\n');
    text.push_str(&wrapped("  ", &printable(method), "  "));
    let has_tails = !profile.tails.is_empty();
    let common = if has_tails { ": medians" } else { "" };
    text.push_str(&format!("\nµs a call, by the size of the piece{common}\n"));
    text.push_str(&by_size(&profile.calls).render(style));
    if has_tails {
        text.push_str("\nµs a call on average, on memory freed just before\n");
        text.push_str(&by_size(&means(profile)).render(style));
    }
    text.push('\n');
    text.push_str(&ratios(profile, style));
    text
}

fn size(mib: f64) -> String {
    Bytes((mib * MIB) as u64).to_string()
}

/// What calls cost on average, at the sizes of their points.
fn means(profile: &CostProfile) -> CostPoints {
    let of_call = |(&call, points): (&DeviceCall, &Vec<(f64, f64)>)| {
        let tails = profile.tails.get(&call).into_iter().flatten();
        let mut sizes: Vec<f64> = points.iter().chain(tails).map(|point| point.0).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let mean_us = |mib: f64| profile.cost_ns(call, (mib * MIB) as u64) / 1000.0;
        (call, sizes.into_iter().map(|mib| (mib, mean_us(mib))).collect())
    };
    profile.calls.iter().map(of_call).collect()
}

/// A row a size, a column a call that has points.
fn by_size(table: &CostPoints) -> Grid {
    let calls: Vec<DeviceCall> =
        DeviceCall::ALL.into_iter().filter(|call| table.contains_key(call)).collect();
    let mut sizes: Vec<f64> = table.values().flatten().map(|point| point.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let mut grid = Grid::of_columns(0, 1 + calls.len());
    // `address_reserve` on two lines.
    let split = |call: &DeviceCall| call.name().split_once('_').unwrap_or(("", call.name()));
    let head = |part: fn((&'static str, &'static str)) -> &'static str| {
        calls.iter().map(move |call| part(split(call)))
    };
    if head(|parts| parts.0).any(|part| !part.is_empty()) {
        grid.head(std::iter::once("").chain(head(|parts| parts.0)));
    }
    grid.head(std::iter::once("size").chain(head(|parts| parts.1)));
    for mib in sizes {
        let cost = |call: &DeviceCall| {
            let point = table[call].iter().find(|point| point.0 == mib);
            point.map_or_else(|| "-".to_owned(), |&(_, us)| microseconds(us))
        };
        let cells = std::iter::once(size(mib)).chain(calls.iter().map(cost));
        grid.row(cells, String::new());
    }
    grid
}

/// Two decimals below 10, one below 1000, else none.
fn microseconds(us: f64) -> String {
    match us {
        us if us < 9.995 => format!("{us:.2}"),
        us if us < 999.95 => format!("{us:.1}"),
        us => grouped(us.round() as u64),
    }
}

/// GMLake's table for this profile, and as it was published.
fn ratios(profile: &CostProfile, style: Style) -> String {
    let native_us = profile.median_ns(DeviceCall::Malloc, BUILT_BYTES) / 1000.0;
    let mut text = format!(
        "{} built of pieces, in units of one malloc of {} ({} µs)\n",
        Bytes(BUILT_BYTES),
        Bytes(BUILT_BYTES),
        microseconds(native_us)
    );
    let mut grid = Grid::of_columns(1, 6);
    let built = built_ratios(profile);
    let pieces = built.iter().map(|built| format!("{} MiB", built.piece_bytes >> 20));
    let titles = pieces.flat_map(|title| [title, String::new()]);
    grid.head(std::iter::once(String::new()).chain(titles));
    let second = ["here", "GMLake"].into_iter().cycle().take(6);
    grid.head(std::iter::once("call").chain(second));
    for (at, name) in ["address_reserve", "create", "map", "set_access", "total"].iter().enumerate()
    {
        let cells = built.iter().zip(&GMLAKE).flat_map(|(here, published)| {
            [ratio(values(here)[at]), published_ratio(published, at)]
        });
        grid.row(std::iter::once((*name).to_owned()).chain(cells), String::new());
    }
    text.push_str(&grid.render(style));
    text.push_str(&wrapped(
        "  ",
        "GMLake: Table 1 of the paper (ASPLOS 2024). It names no GPU beside the table; A100-80GB \
         with CUDA 11.4, on which the paper evaluates, is assumed. Its first total adds up to 115.6.",
        "  ",
    ));
    text
}

fn values(ratios: &BuiltRatios) -> [f64; 5] {
    let BuiltRatios { address_reserve, create, map, set_access, total, .. } = *ratios;
    [address_reserve, create, map, set_access, total]
}

fn published_ratio(published: &PublishedRatios, at: usize) -> String {
    let decimals = published.decimals[at];
    format!("{:.decimals$}", values(&published.ratios)[at])
}

fn ratio(value: f64) -> String {
    match value {
        value if value < 0.0995 => format!("{value:.3}"),
        value if value < 9.995 => format!("{value:.2}"),
        value => format!("{value:.1}"),
    }
}

/// What should be known of a measurement, a line each; nothing if all went well.
pub fn calibration_notes(calibration: &Calibration) -> Vec<String> {
    let mut notes = Vec::new();
    if !calibration.left_out.is_empty() {
        notes.push(format!("left out, too little memory is free: {}", left_out(calibration)));
    }
    if calibration.unsettled > 0 {
        notes.push(format!(
            "{} still moved by more than 2% after {} rounds",
            counted(calibration.unsettled, "median"),
            calibration.rounds
        ));
    }
    notes
}

/// Of each kind the smallest that did not fit: `mallocs from 2 x 512 MiB on`.
fn left_out(calibration: &Calibration) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut told = Vec::new();
    let mut by_memory = calibration.left_out.clone();
    by_memory.sort_by_key(|left| left.size_bytes.saturating_mul(left.pieces));
    for LeftOut { what, size_bytes, pieces } in by_memory {
        if !told.contains(&what) {
            told.push(what);
            parts.push(format!("{what} from {} x {} on", grouped(pieces), Bytes(size_bytes)));
        }
    }
    parts.join(", ")
}

/// All that was measured as CSV: a row a call and circumstance, times in microseconds.
pub fn calibration_csv(rows: &[CostRow]) -> String {
    let mut text = String::from(
        "case,call,size_bytes,pieces,samples,median_us,p10_us,p90_us,mean_us,max_us\n",
    );
    for row in rows {
        let CostRow { case, call, size_bytes, pieces, samples, .. } = row;
        let times = [row.median_ns, row.p10_ns, row.p90_ns, row.mean_ns, row.max_ns];
        let (case, call) = (case.name(), call.name());
        text.push_str(&format!("{case},{call},{size_bytes},{pieces},{samples}"));
        for ns in times {
            // Writing into a string cannot fail.
            let _ = write!(text, ",{:.3}", ns / 1000.0);
        }
        text.push('\n');
    }
    text
}
