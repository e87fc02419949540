//! STAlloc's planner by phases: groups of activations, fused in pairs (`group`, the paper's HomoPhase
//! groups).
//!
//! What is allocated in one phase and freed in another is live together, so it is one group: a
//! trapezoid in time. A group that begins where another ends can lie over it:
//!
//! ```text
//!   bytes   base: freed last in, first out          fused: the second starts where the first has
//!     ^  ┌────────┐                                 ended, from the bottom up
//!     │  ├────────┴──┐           ┌──────┐              ┌────────┐┌──────────────┐
//!     │  ├───────────┴──┐   ┌────┴──────┤   ──>        ├────────┴──┐┌───────────┤
//!     │  └──────────────┘   └───────────┘              ├───────────┴──┐┌────────┤
//!     └──────────────────────────────────> time        └──────────────┘└────────┘
//! ```
//!
//! Groups of one size are then chained into layers, smaller ones put into what larger layers leave
//! free, and whatever belongs to no group goes through the [planner by size](super::size_classes)
//! above and inside those layers.
//!
//! The description of the tool leaves three orders open; here fused groups come before others,
//! requests dissolved out of groups after those that never were in one, and a group is fused within
//! the height of its base.

use std::collections::{BTreeMap, BinaryHeap};

use super::files::ListedRequest;
use super::size_classes::{
    Former, Layers, Life, Placement, Settings, plan, plan_in_order, rounded,
};

/// Groups smaller than this share of the largest, with few members, are dissolved.
const SMALL_GROUP_SHARE: f64 = 0.1;
const SMALL_GROUP_MEMBERS: usize = 5;
/// Groups that fill less than this share of their rectangle are dissolved.
const SPARSE_GROUP_SHARE: f64 = 0.7;

/// How to plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSettings {
    /// What the planner by size takes.
    pub base: Settings,
    /// With the tool's faults: candidates skipped while a list is changed, a group fused twice,
    /// climbs that stop early.
    pub faithful: bool,
}

/// The tool would stop here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// Members of a group that are never all live at once: the tool asserts that they are.
    #[error("group {group}: its requests are never all live at once; expected that of one group")]
    NotTogether {
        /// Number of the group as given.
        group: u32,
    },
    /// The tool fused groups into several others; its caller finds more requests than it gave.
    #[error(
        "the group planner placed {duplicates} requests twice (it goes on after a group was fused); \
         expected each once"
    )]
    Duplicates {
        /// Requests that came out more often than they went in.
        duplicates: u64,
    },
}

/// Plans requests by groups. `groups` has the number of each request's group, of those that are
/// allocated in one phase and freed in another; groups are numbered by iteration, then by first
/// appearance.
///
/// # Errors
/// Where the tool would abort, if its faults are wanted.
pub fn plan_groups(
    requests: &[ListedRequest],
    groups: &[Option<u32>],
    settings: &GroupSettings,
) -> Result<Placement, GroupError> {
    let sorter = Sorter { requests, faithful: settings.faithful };
    let (mut groups, mut loose) = sorter.collect(groups)?;
    sorter.dissolve_small(&mut groups, &mut loose);
    sorter.promote(&mut groups, &mut loose);
    sorter.dissolve_sparse(&mut groups, &mut loose);
    if groups.is_empty() {
        return Ok(plan(requests, &settings.base));
    }
    let blocks = Fuser { requests, faithful: settings.faithful }.fuse(groups);
    let placed: usize = blocks.iter().map(|block| block.members.len()).sum();
    let duplicates = (placed + loose.len()).saturating_sub(requests.len()) as u64;
    if duplicates > 0 {
        return Err(GroupError::Duplicates { duplicates });
    }
    let mut layers = Layers::new(requests, &settings.base);
    let former = layers.former();
    let stripes = Stacker { blocks: &blocks, former, faithful: settings.faithful }.stack();
    for stripe in &stripes {
        stripe.settle(&blocks, requests, &mut layers);
    }
    let order = class_order(requests, &loose, settings.faithful);
    Ok(plan_in_order(requests, &order, layers))
}

/// The order in which each class is given: the tool keeps a class as the array of a heap by start.
fn class_order(requests: &[ListedRequest], loose: &[usize], faithful: bool) -> Vec<usize> {
    if !faithful {
        let mut order = loose.to_vec();
        order.sort_by_key(|&index| (requests[index].start, index));
        return order;
    }
    let mut classes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for &index in loose {
        classes.entry(rounded(requests[index].size_bytes)).or_default().push(index);
    }
    let heap = |class: Vec<usize>| heap_order(class, |&index| requests[index].start);
    classes.into_values().flat_map(heap).collect()
}

/// The array of a binary heap with the least key on top, into which these were put one by one.
fn heap_order<T>(items: Vec<T>, key: impl Fn(&T) -> u64) -> Vec<T> {
    let mut heap = BinaryHeap::new();
    for (at, item) in items.iter().enumerate() {
        heap.push(Entry { key: key(item), at });
    }
    let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
    heap.into_vec().into_iter().filter_map(|entry| items[entry.at].take()).collect()
}

/// An entry of a heap that only knows keys, so that equal ones stay where they are put.
struct Entry {
    key: u64,
    at: usize,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.key == other.key
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        other.key.cmp(&self.key)
    }
}

/// Requests that are live together, and how they lie in each other's company.
#[derive(Clone, Debug)]
struct Block {
    /// Requests with their heights above the block's bottom.
    members: Vec<(usize, u64)>,
    size: u64,
    start: u64,
    end: u64,
}

impl Block {
    fn life(&self, index: usize) -> Life {
        Life { index, start: self.start, end: self.end }
    }
}

/// A share of a rectangle that is in use (TMP).
fn filled(requests: &[ListedRequest], members: &[usize], size: u64, start: u64, end: u64) -> f64 {
    let area = |&index: &usize| {
        let request = &requests[index];
        rounded(request.size_bytes) as f64 * (request.end - request.start) as f64
    };
    members.iter().map(area).sum::<f64>() / (size as f64 * (end - start) as f64)
}

fn span(requests: &[ListedRequest], members: &[usize]) -> (u64, u64) {
    let start = members.iter().map(|&index| requests[index].start).min().unwrap_or(0);
    let end = members.iter().map(|&index| requests[index].end).max().unwrap_or(0);
    (start, end)
}

fn size(requests: &[ListedRequest], members: &[usize]) -> u64 {
    members.iter().map(|&index| rounded(requests[index].size_bytes)).sum()
}

/// Decides what is a group.
struct Sorter<'a> {
    requests: &'a [ListedRequest],
    faithful: bool,
}

type Group = Vec<usize>;

impl Sorter<'_> {
    /// Groups by number, and what belongs to none, by start.
    fn collect(&self, keys: &[Option<u32>]) -> Result<(Vec<Group>, Vec<usize>), GroupError> {
        let mut by_start: Vec<usize> = (0..self.requests.len()).collect();
        by_start.sort_by_key(|&index| (self.requests[index].start, index));
        let mut groups: BTreeMap<u32, Group> = BTreeMap::new();
        let mut loose = Vec::new();
        for index in by_start {
            match keys.get(index).copied().flatten() {
                Some(group) => groups.entry(group).or_default().push(index),
                None => loose.push(index),
            }
        }
        let mut together = Vec::new();
        for (group, members) in groups {
            let lives = || members.iter().map(|&index| &self.requests[index]);
            let last_start = lives().map(|request| request.start).max();
            let first_end = lives().map(|request| request.end).min();
            if last_start < first_end {
                together.push(members);
            } else if self.faithful {
                return Err(GroupError::NotTogether { group });
            } else {
                loose.extend(members);
            }
        }
        Ok((together, loose))
    }

    fn dissolve_small(&self, groups: &mut Vec<Group>, loose: &mut Vec<usize>) {
        let largest = groups.iter().map(|group| size(self.requests, group)).max().unwrap_or(0);
        self.dissolve(groups, loose, |group| {
            let share = size(self.requests, group) as f64 / largest as f64;
            share < SMALL_GROUP_SHARE && group.len() < SMALL_GROUP_MEMBERS
        });
    }

    fn dissolve_sparse(&self, groups: &mut Vec<Group>, loose: &mut Vec<usize>) {
        self.dissolve(groups, loose, |group| {
            let (start, end) = span(self.requests, group);
            let size = size(self.requests, group);
            filled(self.requests, group, size, start, end) < SPARSE_GROUP_SHARE
        });
    }

    fn dissolve(
        &self,
        groups: &mut Vec<Group>,
        loose: &mut Vec<usize>,
        doomed: impl Fn(&Group) -> bool,
    ) {
        let (dissolved, kept) = std::mem::take(groups).into_iter().partition(doomed);
        *groups = kept;
        loose.extend(dissolved.into_iter().flatten());
    }

    /// Makes groups of large loose requests. The tool removes from the list that it goes through, so
    /// that the one behind each it takes is never looked at.
    fn promote(&self, groups: &mut Vec<Group>, loose: &mut Vec<usize>) {
        let Some(least) = groups.iter().map(|group| size(self.requests, group)).min() else {
            return;
        };
        let mut skip = false;
        loose.retain(|&index| {
            let skipped = std::mem::take(&mut skip);
            let stays = skipped || rounded(self.requests[index].size_bytes) < least;
            if !stays {
                groups.push(vec![index]);
                skip = self.faithful;
            }
            stays
        });
    }
}

/// Fuses groups in pairs.
struct Fuser<'a> {
    requests: &'a [ListedRequest],
    faithful: bool,
}

/// Two groups in one rectangle, and what of the smaller did not fit.
struct Fused {
    block: Block,
    rest: Group,
}

impl Fuser<'_> {
    /// Every group as a block, alone or fused.
    fn fuse(&self, groups: Vec<Group>) -> Vec<Block> {
        let mut clusters: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, group) in groups.iter().enumerate() {
            clusters.entry(size(self.requests, group)).or_default().push(at);
        }
        let clusters: Vec<Vec<usize>> = clusters.into_values().rev().collect();
        let mut used = vec![false; groups.len()];
        let mut blocks = Vec::new();
        let mut rests = Vec::new();
        for (rank, cluster) in clusters.iter().enumerate() {
            for &at in cluster {
                for &base in clusters[..rank].iter().flatten() {
                    if used[base] {
                        continue;
                    }
                    let Some(fused) = self.pair(&groups[base], &groups[at]) else { continue };
                    (used[base], used[at]) = (true, true);
                    blocks.push(fused.block);
                    if !fused.rest.is_empty() {
                        rests.push(fused.rest);
                    }
                    // The tool goes on and may fuse the same group into another base as well.
                    if !self.faithful {
                        break;
                    }
                }
            }
        }
        let alone = groups.into_iter().zip(used).filter(|(_, used)| !used);
        let alone = alone.map(|(group, _)| group).chain(rests);
        blocks.extend(alone.map(|group| self.stacked(group)));
        blocks
    }

    /// A group by itself, the longest life at the bottom.
    fn stacked(&self, mut group: Group) -> Block {
        let life = |&index: &usize| self.requests[index].end - self.requests[index].start;
        group.sort_by_key(|index| std::cmp::Reverse(life(index)));
        let (start, end) = span(self.requests, &group);
        let (members, size) = self.pile(&group);
        Block { members, size, start, end }
    }

    /// Requests one upon the other, and their height.
    fn pile(&self, group: &[usize]) -> (Vec<(usize, u64)>, u64) {
        let mut height = 0;
        let member = |&index: &usize| {
            let at = height;
            height += rounded(self.requests[index].size_bytes);
            (index, at)
        };
        let members = group.iter().map(member).collect();
        (members, height)
    }

    /// Fuses a smaller group into a larger if they overlap without one containing the other, and if
    /// the rectangle is fuller for it.
    fn pair(&self, base: &Group, small: &Group) -> Option<Fused> {
        let (base_start, base_end) = span(self.requests, base);
        let (small_start, small_end) = span(self.requests, small);
        let base_first = base_start < small_start && base_end < small_end;
        let small_first = small_start < base_start && small_end < base_end;
        let overlap = base_start < small_end && small_start < base_end;
        if !overlap || !(base_first || small_first) {
            return None;
        }
        let request = |index: usize| &self.requests[index];
        let (mut base, mut small) = (base.clone(), small.clone());
        if base_first {
            base.sort_by_key(|&index| std::cmp::Reverse(request(index).end));
            small.sort_by_key(|&index| request(index).start);
        } else {
            base.sort_by_key(|&index| request(index).start);
            small.sort_by_key(|&index| std::cmp::Reverse(request(index).end));
        }
        let (mut members, size) = self.pile(&base);
        let (inserted, rest) = self.insert(&members, size, &small, base_first);
        if inserted.is_empty() {
            return None;
        }
        members.extend(inserted);
        let (start, end) = (base_start.min(small_start), base_end.max(small_end));
        let all: Vec<usize> = members.iter().map(|&(index, _)| index).collect();
        let alone = |group: &[usize]| {
            let (start, end) = span(self.requests, group);
            filled(self.requests, group, self::size(self.requests, group), start, end)
        };
        let merged = filled(self.requests, &all, size, start, end);
        let left = if rest.is_empty() { merged } else { alone(&rest) };
        let better = merged * left > alone(&base) * alone(&small);
        better.then_some(Fused { block: Block { members, size, start, end }, rest })
    }

    /// Puts members of the smaller group beside those of the base, from the bottom up: at each
    /// height the first that does not meet the base's member there. Above it the base only shrinks.
    fn insert(
        &self,
        base: &[(usize, u64)],
        top: u64,
        small: &[usize],
        base_first: bool,
    ) -> (Vec<(usize, u64)>, Group) {
        let mut rest = small.to_vec();
        let mut inserted = Vec::new();
        let mut height = 0;
        while height < top && !rest.is_empty() {
            let at = base.partition_point(|&(_, low)| low <= height) - 1;
            let there = &self.requests[base[at].0];
            let fits = |&index: &usize| {
                let request = &self.requests[index];
                let clear = if base_first {
                    there.end <= request.start
                } else {
                    request.end <= there.start
                };
                clear && height + rounded(request.size_bytes) <= top
            };
            match rest.iter().position(fits) {
                Some(position) => {
                    let index = rest.remove(position);
                    inserted.push((index, height));
                    height += rounded(self.requests[index].size_bytes);
                }
                None => height = base.get(at + 1).map_or(top, |&(_, low)| low),
            }
        }
        (inserted, rest)
    }
}

/// A layer of blocks: stripes of its own size and less.
struct Stripe {
    size: u64,
    subs: Vec<Sub>,
}

/// A part of a layer's height for all time.
struct Sub {
    low: u64,
    size: u64,
    blocks: Vec<usize>,
}

impl Stripe {
    /// Makes a layer of it.
    fn settle(&self, blocks: &[Block], requests: &[ListedRequest], layers: &mut Layers) {
        let mut held = Vec::new();
        for sub in &self.subs {
            for &block in &sub.blocks {
                for &(index, height) in &blocks[block].members {
                    let low = sub.low + height;
                    held.push((Life::of(index, &requests[index]), low));
                }
            }
        }
        let tops: Vec<(Life, u64)> = held
            .iter()
            .map(|&(life, low)| (life, low + rounded(requests[life.index].size_bytes)))
            .collect();
        let offset = layers.push_stack(self.size, &tops);
        for (life, low) in held {
            layers.settle(life.index, offset + low);
        }
    }
}

/// Puts blocks into layers, the largest first.
struct Stacker<'a> {
    blocks: &'a [Block],
    former: Former,
    faithful: bool,
}

impl Stacker<'_> {
    fn stack(&self) -> Vec<Stripe> {
        let mut clusters: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, block) in self.blocks.iter().enumerate() {
            clusters.entry(block.size).or_default().push(at);
        }
        let mut stripes: Vec<Stripe> = Vec::new();
        for (size, cluster) in clusters.into_iter().rev() {
            let start = |&at: &usize| self.blocks[at].start;
            let mut left = if stripes.is_empty() && self.faithful {
                heap_order(cluster, start)
            } else {
                let mut cluster = cluster;
                cluster.sort_by_key(start);
                cluster
            };
            for stripe in &mut stripes {
                self.fill(stripe, size, &mut left);
            }
            let lives: Vec<Life> = left.iter().map(|&at| self.blocks[at].life(at)).collect();
            for chain in self.former.form(&lives) {
                let blocks = chain.iter().map(|life| life.index).collect();
                stripes.push(Stripe { size, subs: vec![Sub { low: 0, size, blocks }] });
            }
        }
        // Already by size, the largest first: classes came in that order.
        stripes
    }

    /// Puts what it can of a smaller class into a layer.
    fn fill(&self, stripe: &mut Stripe, size: u64, left: &mut Vec<usize>) {
        let mut at = 0;
        while at < stripe.subs.len() && !left.is_empty() {
            let sub = &stripe.subs[at];
            at += 1;
            if sub.size < size {
                continue;
            }
            // The tool compares with the size of the part, wherever it begins.
            let limit = if self.faithful { sub.size } else { sub.low + sub.size };
            let low = sub.low;
            self.climb(stripe, size, low, limit, left);
        }
        let ends = stripe.subs.iter().map(|sub| sub.low + sub.size);
        let low = ends.filter(|end| end + size < stripe.size).max().unwrap_or(0);
        let limit = stripe.size;
        self.climb(stripe, size, low, limit, left);
    }

    /// Steps upward while a step takes anything.
    fn climb(&self, stripe: &mut Stripe, size: u64, from: u64, limit: u64, left: &mut Vec<usize>) {
        let mut low = from;
        while low + size <= limit && !left.is_empty() {
            let mut busy = Busy::default();
            for sub in &stripe.subs {
                if sub.low < low + size && low < sub.low + sub.size {
                    for &at in &sub.blocks {
                        self.spans(at).for_each(|(start, end)| busy.add(start, end));
                    }
                }
            }
            let mut taken = Vec::new();
            left.retain(|&at| {
                let stays = self.spans(at).any(|(start, end)| busy.meets(start, end));
                if !stays {
                    self.spans(at).for_each(|(start, end)| busy.add(start, end));
                    taken.push(at);
                }
                stays
            });
            if taken.is_empty() {
                break;
            }
            stripe.subs.push(Sub { low, size, blocks: taken });
            low += size;
        }
    }

    /// When a block is live; also one iteration later, if the plan is to be replayed for ever.
    fn spans(&self, at: usize) -> impl Iterator<Item = (u64, u64)> {
        let life = self.blocks[at].life(at);
        let again = self.former.replica(&life).filter(|_| self.former.settings.wrap_safe);
        [(life.start, life.end)].into_iter().chain(again)
    }
}

/// Times that are taken: disjoint intervals, end by start.
#[derive(Default)]
struct Busy(BTreeMap<u64, u64>);

impl Busy {
    /// Whether any taken time lies in it; touching is none.
    fn meets(&self, start: u64, end: u64) -> bool {
        let before = self.0.range(..end).next_back();
        before.is_some_and(|(_, &other_end)| other_end > start)
    }

    fn add(&mut self, start: u64, end: u64) {
        let (mut start, mut end) = (start, end);
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            start = start.min(other);
            end = end.max(other_end);
            self.0.remove(&other);
        }
        self.0.insert(start, end);
    }
}
