//! The table that `torch.cuda.memory_summary()` prints, and how what it holds splits up.
//!
//! The one design decision: only figures of one column that describe one moment are subtracted.
//! `Cur Usage` is such a moment. Each figure of `Peak Usage` has its own moment, so that from two
//! of them only a bound follows: when most was reserved, no more was allocated than at most ever.
//!
//! ```text
//!   reserved  |<--------------- active ---------------->|<-- non-releasable -->|<-- rest -->|
//!             |<-------- allocated -------->| deferred  |         hard         |    soft    |
//!             |<-- requested -->| internal  |
//! ```

use serde::Serialize;

use super::oom_text::{Amount, NEGLIGIBLE_SHARE, plain, split_number};

/// A row of the table: what there is now, and the most there ever was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SummaryRow {
    /// At the time of printing.
    pub current: Amount,
    /// Its own maximum.
    pub peak: Amount,
}

/// One table. Rows that an older or abbreviated table lacks are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemorySummary {
    /// Line of the text that it begins in, from 1.
    pub line: u32,
    /// Which device.
    pub device_index: Option<u32>,
    /// Requests that failed for good.
    pub ooms: Option<u64>,
    /// Times that the cache was flushed because the device had no more.
    pub retries: Option<u64>,
    /// Sizes as the allocator rounded them.
    pub allocated: Option<SummaryRow>,
    /// Allocated or waiting for another stream.
    pub active: Option<SummaryRow>,
    /// Sizes as the program asked for them (since PyTorch 2.1).
    pub requested: Option<SummaryRow>,
    /// Reserved by the allocator in total.
    pub reserved: Option<SummaryRow>,
    /// Free, in a segment that also holds a block.
    pub non_releasable: Option<SummaryRow>,
    /// Segments at the time of printing.
    pub segments: Option<u64>,
    /// Blocks at the time of printing.
    pub allocations: Option<u64>,
}

/// What prevails of the reserved memory that holds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SummaryClass {
    /// Too little of it to matter.
    NotFragmentation,
    /// Beside live blocks.
    Hard,
    /// In segments that are wholly free.
    Soft,
    /// Freed by the program, not yet by another stream.
    Deferred,
    /// Rounding inside blocks.
    Internal,
    /// The table lacks the rows that would tell.
    Unknown,
}

/// What a table means.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SummaryDiagnosis {
    /// What prevails.
    pub class: SummaryClass,
    /// allocated / reserved at the time of printing.
    pub utilization: Option<f64>,
    /// Rounding inside blocks.
    pub internal_bytes: Option<u64>,
    /// Waiting for another stream.
    pub deferred_bytes: Option<u64>,
    /// Free beside live blocks.
    pub hard_bytes: Option<u64>,
    /// Free in segments that `empty_cache()` gives back.
    pub soft_bytes: Option<u64>,
    /// When most was reserved, at least so much of it was not allocated.
    pub unallocated_bytes_at_peak_min: Option<u64>,
    /// allocated peak / reserved peak, each its own maximum.
    pub utilization_of_peaks: Option<f64>,
    /// The figures are rounded down, each by less than this.
    pub error_bytes: u64,
}

impl MemorySummary {
    /// How the reserved memory splits up, and what prevails.
    pub fn diagnose(&self) -> SummaryDiagnosis {
        let rows =
            [self.allocated, self.active, self.requested, self.reserved, self.non_releasable];
        let [allocated, active, requested, reserved, non_releasable] =
            rows.map(|row| row.map(|row| row.current.bytes));
        let peaks = self.allocated.zip(self.reserved);
        let soft = reserved
            .zip(active)
            .zip(non_releasable)
            .map(|((reserved, active), hard)| reserved.saturating_sub(active).saturating_sub(hard));
        let mut diagnosis = SummaryDiagnosis {
            class: SummaryClass::Unknown,
            utilization: allocated.zip(reserved).and_then(|(part, whole)| ratio(part, whole)),
            internal_bytes: allocated.zip(requested).map(|(a, r)| a.saturating_sub(r)),
            deferred_bytes: active.zip(allocated).map(|(a, b)| a.saturating_sub(b)),
            hard_bytes: non_releasable,
            soft_bytes: soft,
            unallocated_bytes_at_peak_min: peaks
                .map(|(low, high)| high.peak.bytes.saturating_sub(low.peak.bytes)),
            utilization_of_peaks: peaks
                .and_then(|(low, high)| ratio(low.peak.bytes, high.peak.bytes)),
            error_bytes: rows
                .iter()
                .flatten()
                .map(|row| row.current.error_bytes.max(row.peak.error_bytes))
                .max()
                .unwrap_or(0),
        };
        diagnosis.class = class_of(&diagnosis, reserved);
        diagnosis
    }

    fn is_empty(&self) -> bool {
        self.allocated.is_none() && self.reserved.is_none()
    }
}

fn class_of(diagnosis: &SummaryDiagnosis, reserved_bytes: Option<u64>) -> SummaryClass {
    let Some(reserved_bytes) = reserved_bytes else { return SummaryClass::Unknown };
    let parts = [
        (SummaryClass::Hard, diagnosis.hard_bytes),
        (SummaryClass::Soft, diagnosis.soft_bytes),
        (SummaryClass::Deferred, diagnosis.deferred_bytes),
        (SummaryClass::Internal, diagnosis.internal_bytes),
    ];
    let known = parts.iter().filter_map(|&(class, bytes)| Some((class, bytes?)));
    let total: u64 = known.clone().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes));
    if diagnosis.utilization.is_none() || diagnosis.soft_bytes.is_none() {
        return SummaryClass::Unknown;
    }
    if (total as f64) < NEGLIGIBLE_SHARE * reserved_bytes as f64 {
        return SummaryClass::NotFragmentation;
    }
    // The first of equals: hard before soft, as DESIGN 2 has it.
    let mut prevailing = (SummaryClass::NotFragmentation, 0);
    for (class, bytes) in known {
        if bytes > prevailing.1 {
            prevailing = (class, bytes);
        }
    }
    prevailing.0
}

fn ratio(part_bytes: u64, whole_bytes: u64) -> Option<f64> {
    (whole_bytes > 0).then(|| part_bytes as f64 / whole_bytes as f64)
}

/// Most tables that are kept of a text.
const SUMMARIES_MAX: usize = 1000;

/// Every table of a text, in order. Prefixes of loggers, quoting marks and colours do not matter.
pub(super) fn read_memory_summaries(text: &str) -> Vec<MemorySummary> {
    let mut summaries: Vec<MemorySummary> = Vec::new();
    let mut open: Option<MemorySummary> = None;
    for (index, line) in text.split('\n').enumerate() {
        // Whatever stands in front of the first bar is no part of the table.
        let Some(bar) = line.find('|') else { continue };
        let line = plain(&line[bar..]);
        if let Some(at) = line.find("memory summary") {
            summaries.extend(open.take().filter(|open| !open.is_empty()));
            open = Some(MemorySummary {
                line: u32::try_from(index + 1).unwrap_or(u32::MAX),
                device_index: device_of(&line[at..]),
                ..MemorySummary::default()
            });
        } else {
            // A table without its head, as people cut it out.
            if is_first_row(&line) && open.as_ref().is_none_or(|open| open.allocated.is_some()) {
                summaries.extend(open.take().filter(|open| !open.is_empty()));
                open = Some(MemorySummary {
                    line: u32::try_from(index + 1).unwrap_or(u32::MAX),
                    ..MemorySummary::default()
                });
            }
            let Some(open) = &mut open else { continue };
            read_row(open, &line);
        }
        if summaries.len() >= SUMMARIES_MAX {
            return summaries;
        }
    }
    summaries.extend(open.filter(|open| !open.is_empty()));
    summaries
}

/// `device ID 0` in the head of a table.
fn device_of(head: &str) -> Option<u32> {
    let rest = head[head.find("device ID")? + "device ID".len()..].trim_start();
    split_number(rest)?.0.parse().ok()
}

/// Whether a row stands above all other figures of its table.
fn is_first_row(line: &str) -> bool {
    line.contains("OOMs:") || line.contains("Allocated memory")
}

fn read_row(summary: &mut MemorySummary, line: &str) {
    let cells: Vec<&str> = line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
    match cells[..] {
        [name, current, peak, ..] => {
            let row = || Some(SummaryRow { current: size(current)?, peak: size(peak)? });
            // The first of a name: further rows without a beginning are another table's.
            let keep = |place: &mut Option<SummaryRow>| *place = place.or_else(row);
            let keep_count = |place: &mut Option<u64>| *place = place.or(current.parse().ok());
            match name {
                "Allocated memory" => keep(&mut summary.allocated),
                "Active memory" => keep(&mut summary.active),
                "Requested memory" => keep(&mut summary.requested),
                "GPU reserved memory" => keep(&mut summary.reserved),
                "Non-releasable memory" => keep(&mut summary.non_releasable),
                "GPU reserved segments" => keep_count(&mut summary.segments),
                "Allocations" => keep_count(&mut summary.allocations),
                _ => {}
            }
        }
        [ooms, retries] if ooms.contains("OOMs:") => {
            let count = |cell: &str| cell.rsplit(':').next()?.trim().parse().ok();
            summary.ooms = summary.ooms.or_else(|| count(ooms));
            summary.retries = summary.retries.or_else(|| count(retries));
        }
        _ => {}
    }
}

/// `1062 MB`, `18475 KiB`, `0 B`: whole numbers of a unit of powers of 1024, rounded down.
fn size(cell: &str) -> Option<Amount> {
    let (number, unit) = cell.split_once(' ')?;
    let unit_bytes: u64 = match unit.trim() {
        "B" => 1,
        "KB" | "KiB" => 1 << 10,
        "MB" | "MiB" => 1 << 20,
        "GB" | "GiB" => 1 << 30,
        "TB" | "TiB" => 1 << 40,
        _ => return None,
    };
    let bytes = number.parse::<u64>().ok()?.checked_mul(unit_bytes)?;
    Some(Amount { bytes, error_bytes: unit_bytes - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// pytorch#35901, comment of 2020-04-15, before the request that failed.
    const TABLE: &str = "\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 1         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |    1062 MB |    4877 MB |   89299 MB |   88237 MB |
|       from large pool |    1048 MB |    4865 MB |   89263 MB |   88215 MB |
| Active memory         |    1062 MB |    4877 MB |   89299 MB |   88237 MB |
| GPU reserved memory   |   12420 MB |   12420 MB |   16924 MB |    4504 MB |
|       from large pool |   12404 MB |   12";

    #[test]
    fn a_cut_table_gives_what_it_has() {
        let tables = read_memory_summaries(TABLE);
        assert_eq!(tables.len(), 1);
        let table = &tables[0];
        assert_eq!((table.line, table.device_index), (2, Some(0)));
        assert_eq!((table.ooms, table.retries), (Some(1), Some(1)));
        let diagnosis = table.diagnose();
        assert_eq!(diagnosis.class, SummaryClass::Unknown);
        assert_eq!(diagnosis.deferred_bytes, Some(0));
        assert_eq!(diagnosis.unallocated_bytes_at_peak_min, Some((12_420 - 4_877) << 20));
        assert_eq!(diagnosis.error_bytes, (1 << 20) - 1);
    }

    #[test]
    fn prefixes_and_a_missing_head_do_not_matter() {
        let rows = "\
[rank0]: | Allocated memory      |   3595 MB |    4374 MB |    4374 MB |     778 MB |
> | Active memory         |    3595 MB |    4374 MB |    4374 MB |     778 MB |
| GPU reserved memory   |    3614 MB |    4394 MB |    4394 MB |     780 MB |
| Non-releasable memory |   18475 KB |   21051 KB |  446261 KB |  427786 KB |";
        let tables = read_memory_summaries(rows);
        assert_eq!(tables.len(), 1);
        let diagnosis = tables[0].diagnose();
        // 19 MB of 3614 are not allocated: 0.5 %.
        assert_eq!(diagnosis.class, SummaryClass::NotFragmentation);
        assert_eq!(diagnosis.hard_bytes, Some(18_475 << 10));
        assert_eq!(diagnosis.soft_bytes, Some((19 << 20) - (18_475 << 10)));
    }

    /// Figures of one device never stand beside those of another.
    #[test]
    fn a_second_table_without_a_head_is_a_table_of_its_own() {
        let rows = "\
| Allocated memory      |    1062 MB |    4877 MB |   89299 MB |   88237 MB |
| GPU reserved memory   |   12420 MB |   12420 MB |   16924 MB |    4504 MB |
| Allocations           |     300    |     300    |     300    |       0    |
| GPU reserved segments |     100    |     100    |     100    |       0    |
|            CUDA OOMs: 2            |        cudaMalloc retries: 5         |
| Allocated memory      |    9000 MB |    9000 MB |   89299 MB |   88237 MB |
| GPU reserved segments |       7    |       7    |       7    |       0    |
| GPU reserved segments |       8    |       8    |       8    |       0    |
| Allocated memory      |    9100 MB |    9100 MB |   89299 MB |   88237 MB |";
        let tables = read_memory_summaries(rows);
        let [first, second, third] = &tables[..] else { panic!("{tables:?}") };
        let allocated = |table: &MemorySummary| table.allocated.map(|row| row.current.bytes >> 20);
        assert_eq!((first.line, second.line, third.line), (1, 5, 9));
        assert_eq!([first, second, third].map(allocated), [Some(1062), Some(9000), Some(9100)]);
        assert_eq!((first.segments, first.allocations), (Some(100), Some(300)));
        assert_eq!((first.ooms, first.retries), (None, None));
        assert_eq!((second.segments, second.allocations, second.reserved), (Some(7), None, None));
        assert_eq!((second.ooms, second.retries), (Some(2), Some(5)));
        assert_eq!((third.segments, third.ooms), (None, None));
    }

    #[test]
    fn numbers_beyond_all_sizes_are_no_rows() {
        let text = "| memory summary, device ID 99999999999 |\n\
                    | Allocated memory | 99999999999999999999 MB | 1 MB |\n| a |\n|";
        assert!(read_memory_summaries(text).is_empty());
    }
}
