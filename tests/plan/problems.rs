//! Random problems with everything that a problem may have, never contradictory.

use std::collections::BTreeMap;

use fraglab::plan::{Buffer, Gap, Problem};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;

use super::{are_aliases, extra, needs, ticks};

/// A gap before it is known whether it lies in the buffer: ticks after what is before it, ticks,
/// and a window.
type RawGap = (u64, u64, Option<(u64, u64)>);

/// A buffer before it is known what others allow.
#[derive(Clone, Debug)]
struct Raw {
    start: u64,
    ticks: u64,
    size_bytes: u64,
    alignment_bytes: u64,
    fixed_offset_bytes: Option<u64>,
    alias: Option<u32>,
    gaps: Vec<RawGap>,
    pool: u32,
    hint_offset_bytes: Option<u64>,
}

/// How large problems are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) buffers: usize,
    pub(super) ticks: u64,
    pub(super) size_bytes: u64,
    /// Percent of the buffers with each special wish; with 0 there is none.
    pub(super) special: u32,
}

/// Problems for exhaustive search.
pub(super) const SMALL: Limits = Limits { buffers: 6, ticks: 7, size_bytes: 6, special: 20 };

/// Valid problems.
pub(super) fn problems(limits: Limits) -> impl Strategy<Value = Problem> {
    let granularity = prop_oneof![3 => Just(1u64), 1 => Just(2), 1 => Just(4)];
    (vec(raw(limits), 0..=limits.buffers), granularity)
        .prop_map(move |(raws, granularity)| problem(raws, granularity, limits.special > 0))
}

fn raw(limits: Limits) -> impl Strategy<Value = Raw> {
    // Proptest takes no probability of 0.
    let special = f64::from(limits.special.max(1)) / 100.0;
    let life = (0..limits.ticks, prop_oneof![1 => Just(0), 3 => Just(1), 9 => 1..=limits.ticks]);
    let size = prop_oneof![1 => Just(0), 12 => 1..=limits.size_bytes];
    let alignment = prop_oneof![5 => Just(1u64), 1 => Just(2), 1 => Just(3), 1 => Just(4)];
    let offset = 0..3 * limits.size_bytes;
    let window = weighted(0.6, (0..=limits.size_bytes, 0..=limits.size_bytes));
    let gap = (0..3u64, 1..3u64, window);
    let gaps = prop_oneof![2 => Just(Vec::new()), 1 => vec(gap, 1..3)];
    let pool = prop_oneof![4 => Just(0u32), 1 => Just(1), 1 => Just(3)];
    let wishes = (
        weighted(special, alignment),
        weighted(special / 2.0, offset.clone()),
        weighted(special, 0..3u32),
        weighted(special * 2.0, gaps),
        weighted(special, pool),
        weighted(special, offset),
    );
    (life, size, wishes).prop_map(|((start, ticks), size_bytes, wishes)| Raw {
        start,
        ticks,
        size_bytes,
        alignment_bytes: wishes.0.unwrap_or(1),
        fixed_offset_bytes: wishes.1,
        alias: wishes.2,
        gaps: wishes.3.unwrap_or_default(),
        pool: wishes.4.unwrap_or(0),
        hint_offset_bytes: wishes.5,
    })
}

/// Makes the wishes agree: aliases get the pool and the fixed offset of their first, fixed offsets
/// are rounded up to what all alignments allow, and what would then overlap is not fixed.
fn problem(raws: Vec<Raw>, granularity_bytes: u64, special: bool) -> Problem {
    let mut problem = Problem { granularity_bytes, ..Problem::default() };
    let mut firsts: BTreeMap<u32, (u32, Option<u64>)> = BTreeMap::new();
    for raw in &raws {
        let mut buffer = Buffer::new(raw.start, raw.start + raw.ticks, raw.size_bytes);
        let gaps = gaps(raw);
        let plain = !special
            || raw.alignment_bytes == 1
                && raw.fixed_offset_bytes.is_none()
                && raw.alias.is_none()
                && gaps.is_empty()
                && raw.pool == 0
                && raw.hint_offset_bytes.is_none();
        if !plain {
            let own = (raw.pool, raw.fixed_offset_bytes);
            let (pool, fixed) = raw.alias.map_or(own, |alias| *firsts.entry(alias).or_insert(own));
            // 12 is a multiple of every alignment and granularity here.
            let fixed = fixed.map(|offset| offset.next_multiple_of(12));
            buffer = buffer.with(|extra| {
                extra.alignment_bytes = raw.alignment_bytes;
                extra.fixed_offset_bytes = fixed;
                extra.alias = raw.alias;
                extra.gaps = gaps;
                extra.pool = pool;
                extra.hint_offset_bytes = raw.hint_offset_bytes;
            });
        }
        problem.buffers.push(buffer);
    }
    loosen(&mut problem);
    problem
}

fn gaps(raw: &Raw) -> Vec<Gap> {
    let mut from = raw.start;
    let mut gaps = Vec::new();
    for &(wait, ticks, window) in &raw.gaps {
        let (start, end) = (from + wait, from + wait + ticks);
        if end > raw.start + raw.ticks {
            break;
        }
        let window_bytes = window.map(|(one, other)| {
            (one.min(other).min(raw.size_bytes), one.max(other).min(raw.size_bytes))
        });
        gaps.push(Gap { start, end, window_bytes });
        from = end;
    }
    gaps
}

/// Takes the fixed offset from whatever would overlap another fixed buffer, and from its aliases.
fn loosen(problem: &mut Problem) {
    for at in 0..problem.buffers.len() {
        let fixed = |buffer: &Buffer| extra(buffer).fixed_offset_bytes;
        let Some(offset) = fixed(&problem.buffers[at]) else { continue };
        let in_the_way = (0..at).any(|other| {
            fixed(&problem.buffers[other])
                .is_some_and(|theirs| collide(problem, (other, theirs), (at, offset)).is_some())
        });
        if in_the_way {
            let loose = problem.buffers[at].clone();
            for (index, buffer) in problem.buffers.iter_mut().enumerate() {
                if index == at || are_aliases(buffer, &loose) {
                    *buffer = buffer.clone().with(|extra| extra.fixed_offset_bytes = None);
                }
            }
        }
    }
}

/// The first tick at which two buffers at given offsets need a byte in common.
pub(super) fn collide(problem: &Problem, one: (usize, u64), other: (usize, u64)) -> Option<u64> {
    let (first, second) = (&problem.buffers[one.0], &problem.buffers[other.0]);
    if first.pool() != second.pool() || are_aliases(first, second) {
        return None;
    }
    ticks(problem).into_iter().find(|&tick| {
        let needs = |buffer, offset| {
            needs(problem, buffer, tick).map(|(low, high)| (offset + low, offset + high))
        };
        match (needs(first, one.1), needs(second, other.1)) {
            (Some(first), Some(second)) => first.0 < second.1 && second.0 < first.1,
            _ => false,
        }
    })
}
