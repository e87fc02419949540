//! The lowest height by trying every offset.

use fraglab::plan::Problem;

use super::{are_aliases, extra, needs, ticks};

/// Bits of a byte mask: what is searched through must be lower.
const BYTES_MAX: u64 = 128;

/// Buffers that share an offset.
struct Owner {
    /// Bytes needed from the offset, as bits, at every tick of [`ticks`].
    needs: Vec<u128>,
    /// Bytes to its highest byte ever needed.
    top: u64,
    /// Its offset is a multiple of all of these.
    multiples: Vec<u64>,
    fixed: Option<u64>,
}

/// The lowest height of one pool in bytes, given the height of some packing of it.
pub(super) fn optimum(problem: &Problem, pool: u32, known_bytes: u64) -> u64 {
    assert!(known_bytes <= BYTES_MAX, "too high for the masks: {known_bytes}");
    let owners = owners(problem, pool);
    let mut taken = vec![0u128; ticks(problem).len()];
    let mut best = known_bytes;
    while place(&owners, &mut taken, best) {
        best -= 1;
    }
    best
}

/// Whether a pool can be packed into `capacity_bytes`.
pub(super) fn fits(problem: &Problem, pool: u32, capacity_bytes: u64) -> bool {
    assert!(capacity_bytes < BYTES_MAX, "too high for the masks: {capacity_bytes}");
    let mut taken = vec![0u128; ticks(problem).len()];
    place(&owners(problem, pool), &mut taken, capacity_bytes + 1)
}

/// Whether the owners can be packed strictly below `height`, where others have taken some bytes.
fn place(owners: &[Owner], taken: &mut Vec<u128>, height: u64) -> bool {
    let Some((owner, others)) = owners.split_first() else { return height > 0 };
    for offset in 0..height.saturating_sub(owner.top) {
        let allowed = owner.multiples.iter().all(|&multiple| offset.is_multiple_of(multiple))
            && owner.fixed.is_none_or(|fixed| fixed == offset);
        let free = || {
            let mut both = owner.needs.iter().zip(taken.iter());
            both.all(|(needs, taken)| (needs << offset) & taken == 0)
        };
        if !allowed || !free() {
            continue;
        }
        let flip = |taken: &mut Vec<u128>| {
            let both = owner.needs.iter().zip(taken.iter_mut());
            both.for_each(|(needs, taken)| *taken ^= needs << offset);
        };
        flip(taken);
        let placed = place(others, taken, height);
        flip(taken);
        if placed {
            return true;
        }
    }
    false
}

/// The owners of a pool: buffers alone, and alias groups. What needs nothing is left out, because
/// it can lie at 0, or where it is fixed, whatever the others do.
fn owners(problem: &Problem, pool: u32) -> Vec<Owner> {
    let ticks = ticks(problem);
    let mut owners = Vec::new();
    for (index, buffer) in problem.buffers.iter().enumerate() {
        let earlier = &problem.buffers[..index];
        if buffer.pool() != pool || earlier.iter().any(|other| are_aliases(buffer, other)) {
            continue;
        }
        let members: Vec<_> = problem
            .buffers
            .iter()
            .enumerate()
            .filter(|(at, other)| *at == index || are_aliases(buffer, other))
            .map(|(_, other)| other)
            .collect();
        let needs: Vec<u128> = ticks
            .iter()
            .map(|&tick| {
                let ranges = members.iter().filter_map(|member| needs(problem, member, tick));
                ranges.flat_map(|(low, high)| low..high).fold(0, |mask, byte| mask | 1 << byte)
            })
            .collect();
        let top = needs.iter().map(|mask| u128::BITS - mask.leading_zeros()).max().unwrap_or(0);
        if top > 0 {
            let alignments = members.iter().map(|member| extra(member).alignment_bytes);
            let multiples = alignments.chain([problem.granularity_bytes]).collect();
            let fixed = members.iter().find_map(|member| extra(member).fixed_offset_bytes);
            owners.push(Owner { needs, top: u64::from(top), multiples, fixed });
        }
    }
    owners
}
