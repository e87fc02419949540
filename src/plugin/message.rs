//! What a program is told when memory is out. Worded as PyTorch words it, so that whatever reads
//! such messages reads this one (`fraglab explain -` among them), with what PyTorch leaves out: the
//! largest hole, and what is reserved in total.

use crate::alloc::Levels;
use crate::device::MemoryInfo;
use crate::units::Bytes;

/// A request that was refused.
pub(super) struct Refusal<'a> {
    pub(super) requested_bytes: u64,
    pub(super) largest_hole_bytes: u64,
    pub(super) ordinal: u32,
    pub(super) info: MemoryInfo,
    pub(super) levels: Levels,
    pub(super) limit_bytes: Option<u64>,
    pub(super) allocator: &'a str,
    pub(super) failure: Option<String>,
}

/// The message, one line.
pub(super) fn out_of_memory(refusal: &Refusal<'_>) -> String {
    let Refusal { requested_bytes, largest_hole_bytes, ordinal, info, levels, .. } = *refusal;
    let unallocated_bytes = levels.reserved_bytes.saturating_sub(levels.allocated_bytes);
    let mut text = format!(
        "CUDA out of memory. Tried to allocate {}. GPU {ordinal} has a total capacity of {} of \
         which {} is free.",
        Bytes(requested_bytes),
        Bytes(info.total_bytes),
        Bytes(info.free_bytes),
    );
    if let Some(limit_bytes) = refusal.limit_bytes {
        text.push_str(&format!(" {} allowed;", Bytes(limit_bytes)));
    }
    text.push_str(&format!(
        " Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but \
         unallocated ({} reserved in total by PyTorch). The largest hole that could serve the \
         request is {}. The allocator is {} of fraglab.",
        Bytes(levels.allocated_bytes),
        Bytes(unallocated_bytes),
        Bytes(levels.reserved_bytes),
        Bytes(largest_hole_bytes),
        refusal.allocator,
    ));
    if let Some(failure) = &refusal.failure {
        text.push_str(&format!(" Besides: {failure}."));
    }
    text.push_str(
        " What pins the memory, and which allocator would have saved the run: record it with \
         FRAGLAB_MODE=trace and give the trace to fraglab explain.",
    );
    text
}
