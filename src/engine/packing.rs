//! Packing problems from what importers give.

use crate::import::{MinimallocCsv, MinimallocGap, MinimallocRow};
use crate::plan::{Buffer, Extra, Gap, Problem};

/// The problem that rows of MiniMalloc's CSV pose; buffers keep their order. An offset is the only
/// one that its buffer may have, as it is for MiniMalloc. The rows have no pools, aliases,
/// granularity or capacity.
///
/// Every packing that MiniMalloc calls valid is valid for this problem, with one height for both
/// unless a buffer never needs its highest bytes. The reverse is not true: two buffers with windows
/// may change places in time here, where MiniMalloc wants one of them above the other throughout.
pub fn problem_from_minimalloc(rows: &[MinimallocRow]) -> Problem {
    let buffers = rows.iter().map(|row| buffer(row, row.offset_bytes)).collect();
    Problem { buffers, ..Problem::default() }
}

/// The problem and the packing of it that the rows hold, if every row has an offset: what
/// MiniMalloc writes. The offsets are then no part of the problem.
pub fn packing_from_minimalloc(rows: &[MinimallocRow]) -> Option<(Problem, Vec<u64>)> {
    let offsets_bytes = rows.iter().map(|row| row.offset_bytes).collect::<Option<_>>()?;
    let buffers = rows.iter().map(|row| buffer(row, None)).collect();
    Some((Problem { buffers, ..Problem::default() }, offsets_bytes))
}

/// Rows for a problem that comes from elsewhere: buffers are called by their index. Pools and
/// aliases have no column.
pub fn minimalloc_rows(problem: &Problem) -> MinimallocCsv {
    let row = |(index, buffer): (usize, &Buffer)| {
        let extra = buffer.extra.as_deref();
        let gap = |gap: &Gap| MinimallocGap {
            lower: gap.start,
            upper: gap.end,
            window_bytes: gap.window_bytes,
        };
        MinimallocRow {
            id: index.to_string(),
            lower: buffer.start,
            upper: buffer.end,
            size_bytes: buffer.size_bytes,
            alignment_bytes: extra.map_or(1, |extra| extra.alignment_bytes),
            hint_bytes: extra.and_then(|extra| extra.hint_offset_bytes),
            gaps: extra.map_or_else(Vec::new, |extra| extra.gaps.iter().map(gap).collect()),
            offset_bytes: extra.and_then(|extra| extra.fixed_offset_bytes),
            others: Vec::new(),
        }
    };
    MinimallocCsv::of(problem.buffers.iter().enumerate().map(row).collect())
}

fn buffer(row: &MinimallocRow, fixed_offset_bytes: Option<u64>) -> Buffer {
    let extra = Extra {
        alignment_bytes: row.alignment_bytes,
        fixed_offset_bytes,
        gaps: row.gaps.iter().map(gap).collect(),
        hint_offset_bytes: row.hint_bytes,
        ..Extra::default()
    };
    let extra = (extra != Extra::default()).then(|| Box::new(extra));
    Buffer { extra, ..Buffer::new(row.lower, row.upper, row.size_bytes) }
}

fn gap(gap: &MinimallocGap) -> Gap {
    // A window without bytes is no window.
    let window_bytes = gap.window_bytes.filter(|(low, high)| low < high);
    Gap { start: gap.lower, end: gap.upper, window_bytes }
}
