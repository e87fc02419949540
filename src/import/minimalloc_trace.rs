//! Buffers with lifetimes as a trace: what an allocator would see that is asked for them in time.

use super::minimalloc_csv::MinimallocCsv;
use crate::trace::{Block, Event, Header, Op, Role, Source, SourceKind, Trace};
use crate::units::{BlockId, NameId, SiteId};

/// The buffers of a file in the order of time, on one stream; a tick is a nanosecond. At one tick
/// what ends is freed before what begins is asked for, each in the order of the file. Also returns
/// what a reader of the trace should know, a line each.
pub fn trace_from_minimalloc(csv: &MinimallocCsv) -> (Trace, Vec<String>) {
    let header = Header {
        source: Source { kind: SourceKind::MinimallocCsv, version: None },
        ..Header::default()
    };
    let mut trace = Trace { header, ..Trace::default() };
    let stream = trace.stream_with_handle(0);
    // At one tick, frees (0) stand before allocs (1).
    let mut order: Vec<(u64, u8, usize)> = Vec::new();
    let mut roomless = 0u64;
    for (index, row) in csv.rows.iter().enumerate() {
        if row.size_bytes == 0 || row.lower == row.upper {
            roomless += 1;
            continue;
        }
        order.push((row.lower, 1, index));
        order.push((row.upper, 0, index));
    }
    order.sort_unstable();
    let mut block_of = vec![BlockId::NONE; csv.rows.len()];
    for (tick, kind, index) in order {
        let op = if kind == 1 {
            let row = &csv.rows[index];
            block_of[index] = BlockId(trace.blocks.len() as u32);
            let name = NameId(trace.names.len() as u32);
            trace.names.push(row.id.clone());
            trace.blocks.push(Block {
                size_bytes: row.size_bytes,
                stream,
                site: SiteId::NONE,
                name,
                role: Role::Unknown,
            });
            Op::Alloc(block_of[index])
        } else {
            Op::Free(block_of[index])
        };
        trace.events.push(Event { time_ns: tick, op });
    }
    let start_ns = trace.events.first().map_or(0, |event| event.time_ns);
    trace.events.iter_mut().for_each(|event| event.time_ns -= start_ns);
    trace.header.history.allocs = trace.blocks.len() as u64;
    let mut warnings = csv.warnings();
    if roomless > 0 {
        warnings.push(format!("{roomless} buffers without bytes or life are left out"));
    }
    let special = |row: &&super::MinimallocRow| row.alignment_bytes > 1 || !row.gaps.is_empty();
    if csv.rows.iter().any(|row| special(&row)) {
        let text = "alignments and gaps of buffers mean nothing to an allocator: only \
                    `fraglab plan` uses them";
        warnings.push(text.to_owned());
    }
    (trace, warnings)
}
