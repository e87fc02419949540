//! Offline packing: judged by a slow model that goes tick by tick and by exhaustive search.

mod brute;
mod check;
mod csv;
mod problems;
mod reason;
mod solve;

use fraglab::plan::{Buffer, Extra, Problem};

/// Bytes that a buffer needs at a tick, from its offset and rounded out to the granularity.
fn needs(problem: &Problem, buffer: &Buffer, tick: u64) -> Option<(u64, u64)> {
    if tick < buffer.start || tick >= buffer.end {
        return None;
    }
    let gaps = buffer.extra.iter().flat_map(|extra| &extra.gaps);
    let gap = gaps.into_iter().find(|gap| gap.start <= tick && tick < gap.end);
    let (low, high) = match gap {
        None => (0, buffer.size_bytes),
        Some(gap) => gap.window_bytes.unwrap_or((0, 0)),
    };
    let granularity = problem.granularity_bytes;
    (low < high).then(|| (low / granularity * granularity, high.next_multiple_of(granularity)))
}

/// Ticks at which something may change: between two neighbours nothing does.
fn ticks(problem: &Problem) -> Vec<u64> {
    let gaps = |buffer: &Buffer| buffer.extra.clone().unwrap_or_default().gaps;
    let of_buffer = |buffer: &Buffer| {
        let gaps = gaps(buffer).into_iter().flat_map(|gap| [gap.start, gap.end]);
        gaps.chain([buffer.start, buffer.end]).collect::<Vec<_>>()
    };
    let mut ticks: Vec<u64> = problem.buffers.iter().flat_map(of_buffer).collect();
    ticks.sort_unstable();
    ticks.dedup();
    ticks
}

fn extra(buffer: &Buffer) -> Extra {
    buffer.extra.as_deref().cloned().unwrap_or_default()
}

/// Whether two buffers are of one alias group.
fn are_aliases(one: &Buffer, other: &Buffer) -> bool {
    extra(one).alias.is_some() && extra(one).alias == extra(other).alias
}
