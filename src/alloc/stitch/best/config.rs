//! Parameters of the policy `best`, and what it takes from the device's costs.

use crate::alloc::BuildInputs;
use crate::alloc::spec::{Params, SpecError};
use crate::alloc::stitch::parse_size;
use crate::device::sim::UNLIMITED_TOTAL_BYTES;
use crate::device::{CostProfile, DeviceCall, GRANULARITY_BYTES};
use crate::units::{Bytes, GIB, MIB};

/// Pieces are tried in powers of two up to this.
const PIECE_BYTES_MAX: u64 = 64 * MIB;
/// Without costs: what the H200's come to.
const PIECE_BYTES_DEFAULT: u64 = 16 * MIB;
/// What memory costs in the segments of PyTorch's allocator is the measure for pieces.
const SEGMENT_BYTES: u64 = 20 * MIB;

/// What idle views may take of addresses at least, before any are evicted.
pub(super) const VIEW_LIMIT_BYTES: u64 = 32 * GIB;

/// All parameters.
#[derive(Clone, Debug)]
pub(super) struct Config {
    /// Memory is obtained in pieces of at most this.
    pub(super) piece_bytes: u64,
    /// Share of the active peak by which memory may grow before anything is stitched.
    pub(super) slack: f64,
    /// Idle views stay until views take this many bytes of addresses. If not given, it is
    /// [`VIEW_LIMIT_BYTES`] or a quarter of what is reserved, whichever is more, and rises where
    /// it proves too small.
    pub(super) view_limit_bytes: Option<u64>,
    /// Larger requests are refused.
    pub(super) request_bytes_max: u64,
    /// The allocator holds no more.
    pub(super) limit_bytes: Option<u64>,
    /// Cost of making one piece accessible at a second address.
    pub(super) map_ns: f64,
    /// What a byte may cost to save: the price of new memory in its smallest unit.
    pub(super) byte_ns: f64,
}

/// Keys and one line each.
pub(in crate::alloc::stitch) fn help() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "piece",
            "best: memory is obtained in pieces of at most this size; default by the device's \
             costs, 16MiB on an H200",
        ),
        (
            "slack",
            "best: grows without stitching up to this share above the active peak so far, \
             default 0.0078125",
        ),
        (
            "view_limit",
            "best: addresses that stitched ranges may take before the least recently used idle ones \
             go; default 32GiB or a quarter of the reserved memory, more if ranges come again",
        ),
    ]
}

impl Config {
    /// Takes the parameters.
    ///
    /// # Errors
    /// A value that is not accepted.
    pub(super) fn take(params: &mut Params, inputs: &BuildInputs) -> Result<Config, SpecError> {
        let costs = inputs.costs.as_ref();
        let piece_bytes = match take_size(params, "piece")? {
            None => costs.map_or(PIECE_BYTES_DEFAULT, piece_bytes_by_cost),
            Some(bytes) if bytes > 0 && bytes.is_multiple_of(GRANULARITY_BYTES) => bytes,
            Some(bytes) => {
                return Err(params.value_error(format!(
                    "piece={} is no multiple of 2 MiB: give one, as in piece=16MiB",
                    Bytes(bytes)
                )));
            }
        };
        let slack = match params.take("slack") {
            None => 1.0 / 128.0,
            Some(text) => match text.parse::<f64>() {
                Ok(slack) if (0.0..=1.0).contains(&slack) => slack,
                _ => {
                    return Err(params.value_error(format!(
                        "slack={text} is no share: expected a number from 0 to 1, as in slack=0.01"
                    )));
                }
            },
        };
        Ok(Config {
            piece_bytes,
            slack,
            view_limit_bytes: take_size(params, "view_limit")?,
            request_bytes_max: inputs
                .device_total_bytes
                .unwrap_or(UNLIMITED_TOTAL_BYTES)
                .max(UNLIMITED_TOTAL_BYTES),
            limit_bytes: inputs.limit_bytes.or(inputs.recorded_limit_bytes),
            map_ns: costs.map_or(0.0, |costs| {
                let map_ns = costs.cost_ns(DeviceCall::Map, piece_bytes);
                map_ns + costs.cost_ns(DeviceCall::SetAccess, piece_bytes)
            }),
            byte_ns: costs.map_or(f64::INFINITY, |costs| made_byte_ns(costs, GRANULARITY_BYTES)),
        })
    }

    /// Effective values by name.
    pub(super) fn shown(&self) -> Vec<(String, String)> {
        let pair = |key: &str, value: String| (key.to_owned(), value);
        vec![
            pair("policy", "best".to_owned()),
            pair("piece", self.piece_bytes.to_string()),
            pair("slack", self.slack.to_string()),
            pair(
                "view_limit",
                self.view_limit_bytes.map_or_else(|| "auto".to_owned(), |bytes| bytes.to_string()),
            ),
        ]
    }
}

fn take_size(params: &mut Params, key: &'static str) -> Result<Option<u64>, SpecError> {
    let Some(text) = params.take(key) else { return Ok(None) };
    match parse_size(&text) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) => Err(params.value_error(format!("{key}={text}: {error}"))),
    }
}

/// What a byte of new memory costs in pieces of a size, in nanoseconds.
fn made_byte_ns(costs: &CostProfile, piece_bytes: u64) -> f64 {
    let calls = [DeviceCall::Create, DeviceCall::Map, DeviceCall::SetAccess];
    calls.iter().map(|&call| costs.cost_ns(call, piece_bytes)).sum::<f64>() / piece_bytes as f64
}

/// The smallest power of two at which memory in pieces costs at most twice what it costs in the
/// segments of PyTorch's allocator: pieces are cheap enough from there on, and smaller ones leave
/// less memory where it cannot be stitched.
fn piece_bytes_by_cost(costs: &CostProfile) -> u64 {
    let segment_ns = costs.cost_ns(DeviceCall::Malloc, SEGMENT_BYTES);
    let wanted_ns = 2.0 * segment_ns / SEGMENT_BYTES as f64;
    let mut piece_bytes = GRANULARITY_BYTES;
    while piece_bytes < PIECE_BYTES_MAX && made_byte_ns(costs, piece_bytes) > wanted_ns {
        piece_bytes *= 2;
    }
    piece_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H200: a device malloc of 20 MiB takes 48.01 µs, 2.40 µs a MiB. Pieces of 8 MiB take 12.56 +
    /// 1.11 + 28.23 µs, 5.24 a MiB, those of 16 MiB 12.68 + 1.16 + 28.36, 2.64.
    #[test]
    fn a_piece_is_as_small_as_its_cost_allows() {
        let costs = CostProfile::shipped("h200").expect("ships");
        assert_eq!(piece_bytes_by_cost(&costs), 16 * MIB);
    }
}
