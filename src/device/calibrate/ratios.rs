//! What it costs to build a range of pieces, in units of one native allocation of its size: GMLake's
//! Table 1 for any profile, by its medians: the means of large mallocs depend on what was freed just
//! before.

use serde::Serialize;

use crate::device::{CostProfile, DeviceCall};
use crate::units::{GIB, MIB};

/// Size of the range that is built.
pub const BUILT_BYTES: u64 = 2 * GIB;

/// Costs in units of one native allocation of [`BUILT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BuiltRatios {
    /// Size of the pieces that the range is made of.
    pub piece_bytes: u64,
    /// Reserving the addresses, once.
    pub address_reserve: f64,
    /// Creating all pieces.
    pub create: f64,
    /// Mapping them all.
    pub map: f64,
    /// Making them all accessible.
    pub set_access: f64,
    /// All of it.
    pub total: f64,
}

/// Ratios that somebody published, at the precision printed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedRatios {
    /// The figures.
    pub ratios: BuiltRatios,
    /// Decimals of address_reserve, create, map, set_access and total.
    pub decimals: [usize; 5],
}

const fn published(piece_mib: u64, values: [f64; 5], decimals: [usize; 5]) -> PublishedRatios {
    let [address_reserve, create, map, set_access, total] = values;
    let piece_bytes = piece_mib * MIB;
    let ratios = BuiltRatios { piece_bytes, address_reserve, create, map, set_access, total };
    PublishedRatios { ratios, decimals }
}

/// GMLake (ASPLOS 2024), Table 1. The paper names no GPU with it; its evaluation runs on A100-80GB
/// with CUDA 11.4. It prints 115.4 as the total of the first row, which adds up to 115.6.
pub const GMLAKE: [PublishedRatios; 3] = [
    published(2, [0.003, 18.1, 0.70, 96.8, 115.4], [3, 1, 2, 1, 1]),
    published(128, [0.003, 0.89, 0.01, 8.2, 9.1], [3, 2, 2, 1, 1]),
    published(1024, [0.002, 0.79, 0.002, 0.7, 1.5], [3, 2, 3, 1, 1]),
];

/// What a profile says to GMLake's table: 2 GiB built of pieces of 2, 128 and 1024 MiB.
pub fn built_ratios(profile: &CostProfile) -> [BuiltRatios; 3] {
    GMLAKE.map(|published| built(profile, published.ratios.piece_bytes))
}

fn built(profile: &CostProfile, piece_bytes: u64) -> BuiltRatios {
    let native_ns = profile.median_ns(DeviceCall::Malloc, BUILT_BYTES);
    let in_units = |ns: f64| if native_ns > 0.0 { ns / native_ns } else { 0.0 };
    let pieces = (BUILT_BYTES / piece_bytes) as f64;
    let all = |call| in_units(pieces * profile.median_ns(call, piece_bytes));
    let address_reserve = in_units(profile.median_ns(DeviceCall::AddressReserve, BUILT_BYTES));
    let create = all(DeviceCall::Create);
    let map = all(DeviceCall::Map);
    let set_access = all(DeviceCall::SetAccess);
    let total = address_reserve + create + map + set_access;
    BuiltRatios { piece_bytes, address_reserve, create, map, set_access, total }
}
