//! Measures what the calls of a device take, and makes a cost profile of it.
//!
//! The one design decision: calls are measured as a replay makes them. Memory of all sizes comes and
//! goes in random order, hundreds of mallocs or dozens of ranges at a time; a piece is created,
//! mapped and made accessible before the next one is; and between calls the host walks through other
//! memory, a few microseconds, so that its caches are as cold as behind an allocator. In batches of
//! one call, a real card answers up to a third faster. Every call is a sample, and none is thrown
//! away: the median says what the call takes in the common case, the mean what it adds to a run.
//!
//! ```text
//!   warm-up (an idle GPU answers slowly)                 not sampled
//!   rounds:
//!     mallocs below 256 MiB, up to 300 held           ┐  wait 200 ms, fill (Settled), then give
//!     mallocs from 256 MiB to 4 GiB                   │  one back at random for every one that is
//!     ranges of pieces below 256 MiB, up to 64 held   │  taken, then give back all (Mixed)
//!     pieces from 256 MiB to 4 GiB                    │
//!     every fourth round mallocs and pieces from 8 GiB┘
//! ```
//!
//! Large blocks have a mix of their own: the driver clears memory that was freed, and what comes next
//! may have to wait for it, up to milliseconds. So there are two figures of a malloc or create: of
//! memory that lay free for a while, and of memory that was given back a moment ago.
//!
//! The clock comes in from outside, and all device calls go through [`Device`], so that tests need
//! neither a GPU nor time.

mod bench;
mod ratios;
mod tables;

use serde::Serialize;

use super::{Device, DeviceCall, DeviceError};
use crate::units::{GIB, MIB};
use bench::{Bench, Failed, Item, Key, Mix};
pub use ratios::{BUILT_BYTES, BuiltRatios, GMLAKE, PublishedRatios, built_ratios};
pub use tables::ProfileNames;

/// How long and how large to measure.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateOptions {
    /// No piece larger than this, in bytes.
    pub size_bytes_max: u64,
    /// At least so many rounds, unless the time is up.
    pub rounds_min: u64,
    /// At most so many rounds.
    pub rounds_max: u64,
    /// No round begins when so many nanoseconds are gone.
    pub budget_ns: u64,
    /// So many nanoseconds of calls come first that do not count: an idle GPU answers slowly.
    pub warm_ns: u64,
    /// So many nanoseconds memory lies free before it counts as cleared.
    pub settle_ns: u64,
}

impl Default for CalibrateOptions {
    /// Pieces to 64 GiB, 20 to 101 rounds, 45 s after half a second to get warm.
    fn default() -> Self {
        CalibrateOptions {
            size_bytes_max: 64 * GIB,
            rounds_min: 20,
            rounds_max: 101,
            budget_ns: 45_000_000_000,
            warm_ns: 500_000_000,
            settle_ns: 200_000_000,
        }
    }
}

impl CalibrateOptions {
    /// For a first look: 3 to 9 rounds, 8 s.
    pub fn quick() -> Self {
        CalibrateOptions {
            rounds_min: 3,
            rounds_max: 9,
            budget_ns: 8_000_000_000,
            ..CalibrateOptions::default()
        }
    }
}

/// Circumstances under which a call was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// A malloc or a piece among others of all sizes that come and go.
    Mixed,
    /// A malloc or create before anything was given back, of memory that lay free for a while.
    Settled,
    /// A piece of a range that becomes accessible, or goes, in one call for the whole range.
    Whole,
}

impl Case {
    /// The name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Case::Mixed => "mixed",
            Case::Settled => "settled",
            Case::Whole => "whole",
        }
    }
}

/// What one call took under some circumstances. All times in nanoseconds a piece.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostRow {
    /// The circumstances.
    pub case: Case,
    /// The call.
    pub call: DeviceCall,
    /// Size of a piece.
    pub size_bytes: u64,
    /// Pieces in the call.
    pub pieces: u64,
    /// How many samples there are, a call each.
    pub samples: u64,
    /// The middle one.
    pub median_ns: f64,
    /// A tenth of them are below.
    pub p10_ns: f64,
    /// A tenth of them are above.
    pub p90_ns: f64,
    /// Their mean; what took more than 50 ms counts as 50 ms.
    pub mean_ns: f64,
    /// The largest.
    pub max_ns: f64,
}

/// No driver takes longer for a call, but a host may be busy with something else: one such call
/// must not rule the mean of hundreds.
const CALL_NS_MAX: f64 = 50e6;

impl CostRow {
    fn new(key: Key, samples: &[f64]) -> CostRow {
        let mut samples = samples.to_vec();
        samples.sort_by(f64::total_cmp);
        let Key { case, call, size_bytes, pieces } = key;
        let sum_ns: f64 = samples.iter().map(|ns| ns.min(CALL_NS_MAX)).sum();
        CostRow {
            case,
            call,
            size_bytes,
            pieces,
            samples: samples.len() as u64,
            median_ns: quantile(&samples, 0.5),
            p10_ns: quantile(&samples, 0.1),
            p90_ns: quantile(&samples, 0.9),
            mean_ns: sum_ns / samples.len().max(1) as f64,
            max_ns: samples.last().copied().unwrap_or(0.0),
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Calibration {
    /// Every call under every circumstance.
    pub rows: Vec<CostRow>,
    /// How many rounds there were.
    pub rounds: u64,
    /// Medians that still moved when the time was up.
    pub unsettled: u64,
    /// What did not fit into the memory that was free: `mallocs of 4 GiB`.
    pub left_out: Vec<LeftOut>,
}

/// What the memory of the device did not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// `mallocs` or `pieces`.
    pub what: &'static str,
    /// Size of a piece.
    pub size_bytes: u64,
    /// How many of them there had to be room for.
    pub pieces: u64,
}

/// How far the measuring is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CalibrateProgress {
    /// Rounds that are done.
    pub rounds: u64,
    /// Rounds that there will be at most.
    pub rounds_max: u64,
}

/// Measuring ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CalibrateError {
    /// A call that must not fail did.
    #[error("while measuring {what} of {size_bytes} bytes: {error}")]
    Device {
        /// `mallocs` or `pieces`.
        what: &'static str,
        /// Size of a piece.
        size_bytes: u64,
        /// What the device said.
        error: DeviceError,
    },
    /// Not even the smallest pieces fit.
    #[error(
        "{free_bytes} bytes of the device are free: too little to measure; 256 MiB are enough for a \
         start"
    )]
    TooLittleMemory {
        /// Free bytes of the device.
        free_bytes: u64,
    },
}

/// Measures every call of a device. `clock` gives nanoseconds that never go back; `tell` hears how
/// far it is.
///
/// What it needs of the device's memory it takes from what is free, at most half of it at a time,
/// for the largest pieces 60%; all of it is given back at the end, also if it fails.
///
/// # Errors
/// [`CalibrateError`]. Running out of memory is none: what does not fit is left out.
pub fn calibrate<D: Device>(
    device: &mut D,
    clock: impl FnMut() -> u64,
    options: &CalibrateOptions,
    tell: &mut dyn FnMut(CalibrateProgress),
) -> Result<Calibration, CalibrateError> {
    let free_bytes = device.memory_info().free_bytes;
    let mut bench = Bench::new(device, clock);
    let measured = measure(&mut bench, free_bytes, options, tell);
    bench.give_back();
    let calibration = measured?;
    let has = |call: &DeviceCall| {
        calibration.rows.iter().any(|row| row.case == Case::Mixed && row.call == *call)
    };
    if DeviceCall::ALL.iter().all(has) {
        Ok(calibration)
    } else {
        Err(CalibrateError::TooLittleMemory { free_bytes })
    }
}

fn measure<D: Device, C: FnMut() -> u64>(
    bench: &mut Bench<'_, D, C>,
    free_bytes: u64,
    options: &CalibrateOptions,
    tell: &mut dyn FnMut(CalibrateProgress),
) -> Result<Calibration, CalibrateError> {
    /// Should the clock stand still.
    const WARM_ROUNDS_MAX: u64 = 1000;
    let (mixes, mut left_out) = mixes(options.size_bytes_max.max(2 * MIB), free_bytes);
    let mut round = |bench: &mut Bench<'_, D, C>, number: u64| {
        for mix in mixes.iter().filter(|mix| number.is_multiple_of(mix.every)) {
            let end = bench.run(&mix.mix, options.settle_ns);
            let without_room = end.map_err(|Failed { item, error }| {
                let (what, size_bytes) = item.named();
                CalibrateError::Device { what, size_bytes, error }
            })?;
            without_room.into_iter().for_each(|item| leave_out(&mut left_out, item, 1));
        }
        Ok(())
    };
    let start_ns = bench.now_ns();
    for _ in 0..WARM_ROUNDS_MAX {
        if bench.now_ns().saturating_sub(start_ns) >= options.warm_ns {
            break;
        }
        round(bench, 1)?;
    }
    bench.forget();
    let start_ns = bench.now_ns();
    let (mut rounds, mut unsettled) = (0, 0);
    while rounds < options.rounds_max {
        round(bench, rounds)?;
        rounds += 1;
        tell(CalibrateProgress { rounds, rounds_max: options.rounds_max });
        let is_late = bench.now_ns().saturating_sub(start_ns) >= options.budget_ns;
        if is_late || rounds >= options.rounds_min {
            let samples = bench.samples().iter();
            let mixed = samples.filter(|(key, _)| key.case == Case::Mixed);
            unsettled = mixed.filter(|(_, samples)| !stands_still(samples)).count() as u64;
            if is_late || unsettled == 0 {
                break;
            }
        }
    }
    let rows = bench.samples().iter().map(|(key, samples)| CostRow::new(*key, samples));
    Ok(Calibration { rows: rows.collect(), rounds, unsettled, left_out })
}

fn leave_out(left_out: &mut Vec<LeftOut>, item: Item, pieces: u64) {
    let (what, size_bytes) = item.named();
    let item = LeftOut { what, size_bytes, pieces };
    if !left_out.contains(&item) {
        left_out.push(item);
    }
}

/// Blocks from this size on may have to wait for memory that is being cleared.
const LARGE_BYTES: u64 = 256 * MIB;

/// Blocks from this size on are measured a few times, one or two held.
const HUGE_BYTES: u64 = 8 * GIB;

/// A mix that comes in every so-manieth round.
struct Turn {
    mix: Mix,
    every: u64,
}

/// The mixes, and what they leave out: sizes of which not two fit into half of the memory, and of
/// the largest not one into 60%.
fn mixes(size_bytes_max: u64, free_bytes: u64) -> (Vec<Turn>, Vec<LeftOut>) {
    const KIB: u64 = 1 << 10;
    /// In KiB: mallocs that may share a page of the driver, and one that hardly can.
    const SMALL: [u64; 7] = [1, 4, 64, 256, 512, 1024, 1536];
    /// In MiB: powers of two, and sizes as allocators ask for.
    const SIZES: [u64; 24] = [
        2, 4, 8, 10, 16, 20, 22, 24, 32, 48, 64, 90, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
        2048, 3072, 4096,
    ];
    /// How often a malloc of each size comes in a round, a range, a large block, and the largest.
    const TIMES: [usize; 4] = [32, 6, 16, 3];
    let (half_bytes, most_bytes) = (free_bytes / 2, free_bytes / 5 * 3);
    let mut left_out = Vec::new();
    let doubled = (13..).map(|power| 1 << power);
    let sizes = SIZES.into_iter().chain(doubled).map(|mib: u64| mib * MIB);
    // No device comes near a TiB.
    let sizes = sizes.take_while(|&size_bytes| size_bytes <= size_bytes_max.min(1 << 40));
    let (huge, sizes): (Vec<u64>, Vec<u64>) = sizes.partition(|&bytes| bytes >= HUGE_BYTES);
    let (large, middle): (Vec<u64>, Vec<u64>) =
        sizes.into_iter().partition(|&bytes| bytes >= LARGE_BYTES);
    let malloc: fn(u64) -> Item = |size_bytes| Item::Malloc { size_bytes };
    let piece: fn(u64) -> Item =
        |piece_bytes| Item::Range { piece_bytes, pieces: 1, is_whole: false };
    let ranges = middle.iter().flat_map(|&piece_bytes| {
        let pieces = (64 * MIB / piece_bytes).clamp(1, 8);
        let several = [false, true].map(|is_whole| Item::Range { piece_bytes, pieces, is_whole });
        std::iter::once(piece(piece_bytes)).chain(several.into_iter().filter(move |_| pieces > 1))
    });
    let small = SMALL.into_iter().map(|kib| kib * KIB);
    let all = |sizes: &[u64], item: fn(u64) -> Item| sizes.iter().copied().map(item).collect();
    let decks: [(Vec<Item>, usize, usize); 6] = [
        (small.chain(middle.iter().copied()).map(malloc).collect(), TIMES[0], 300),
        (all(&large, malloc), TIMES[2], 300),
        (ranges.collect(), TIMES[1], 64),
        (all(&large, piece), TIMES[2], 64),
        (all(&huge, malloc), TIMES[3], 300),
        (all(&huge, piece), TIMES[3], 64),
    ];
    let turns = decks.into_iter().map(|(mut items, times, count_max)| {
        let is_huge = times == TIMES[3];
        let (count, memory_bytes) = if is_huge { (1, most_bytes) } else { (2, half_bytes) };
        items.retain(|item| {
            let fits = item.bytes().saturating_mul(count) <= memory_bytes;
            if !fits {
                leave_out(&mut left_out, *item, count);
            }
            fits
        });
        let deck = items.repeat(times);
        // So that something is given back before the end.
        let count_max = count_max.min(deck.len() / 2).max(1);
        Turn { mix: Mix { deck, count_max, memory_bytes }, every: if is_huge { 4 } else { 1 } }
    });
    (turns.collect(), left_out)
}

/// Whether the second half of the samples has left the median where the first had it, within a
/// fiftieth or the resolution of clocks.
fn stands_still(samples: &[f64]) -> bool {
    const RESOLUTION_NS: f64 = 30.0;
    let median = |samples: &[f64]| {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        quantile(&sorted, 0.5)
    };
    let (before, now) = (median(&samples[..samples.len().div_ceil(2)]), median(samples));
    (before - now).abs() <= (now / 50.0).max(RESOLUTION_NS)
}

/// The value below which a fraction of the sorted samples lies, between two of them on the line.
fn quantile(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = fraction * last as f64;
    let low = place.floor() as usize;
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}

#[cfg(test)]
mod tests;
