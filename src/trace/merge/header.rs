//! The head of a merged trace: what all ranks say alike holds, what they say differently is left
//! out with a word about it.

use super::RankTrace;
use crate::trace::{
    AddressPolicy, BLOCK_BYTES_MAX, DeviceInfo, Header, History, Source, SourceKind,
};
use crate::units::Bytes;

/// The head, and what is not in it, one line each. It has no name.
pub(super) fn merged(ranks: &[RankTrace<'_>]) -> (Header, Vec<String>) {
    let mut dropped = Vec::new();
    let mut header = Header {
        source: Source {
            kind: match ranks {
                [alone] => alone.trace.header.source.kind,
                _ => SourceKind::Merged,
            },
            version: common(ranks, |header| header.source.version.clone()).flatten(),
        },
        device: device(ranks, &mut dropped),
        settings: agreed(ranks, "settings", |it| it.settings.clone(), show_text, &mut dropped),
        limit_bytes: limit(ranks, &mut dropped),
        // What is recorded of addresses is of one rank.
        address_policy: common(ranks, |header| header.address_policy)
            .flatten()
            .filter(|&policy| policy != AddressPolicy::Recorded),
        history: history(ranks),
        start_unix_ns: ranks.iter().filter_map(|rank| rank.trace.header.start_unix_ns).min(),
        ..Header::default()
    };
    for strategy in ranks.iter().flat_map(|rank| &rank.trace.header.strategies) {
        if !header.strategies.contains(strategy) {
            header.strategies.push(strategy.clone());
        }
    }
    let mut leave_out = |what: &str, has: fn(&RankTrace<'_>) -> bool| {
        let count = ranks.iter().filter(|rank| has(rank)).count();
        if count > 0 {
            dropped.push(format!("left out of {count} of {} ranks: {what}", ranks.len()));
        }
    };
    leave_out("what the recorded allocator did", |rank| rank.trace.recording.is_some());
    leave_out("injected failures, which count the calls of one rank", |rank| {
        !rank.trace.header.faults.is_empty()
    });
    leave_out("what runs are expected to give", |rank| !rank.trace.header.expectations.is_empty());
    leave_out("the model, which `chunk` needs", |rank| rank.trace.header.model.is_some());
    (header, dropped)
}

/// What all ranks say alike.
fn common<T: PartialEq>(ranks: &[RankTrace<'_>], read: impl Fn(&Header) -> T) -> Option<T> {
    let mut values = ranks.iter().map(|rank| read(&rank.trace.header));
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

/// What all ranks say alike; where they differ nothing, and a word about two that do.
fn agreed<T: PartialEq>(
    ranks: &[RankTrace<'_>],
    what: &str,
    read: impl Fn(&Header) -> Option<T>,
    show: impl Fn(&T) -> String,
    dropped: &mut Vec<String>,
) -> Option<T> {
    if let Some(value) = common(ranks, &read) {
        return value;
    }
    let shown = |rank: &RankTrace<'_>| match read(&rank.trace.header) {
        Some(value) => format!("{} has {}", rank.label, show(&value)),
        None => format!("{} has none", rank.label),
    };
    let first = ranks.first()?;
    let other = ranks.iter().find(|rank| read(&rank.trace.header) != read(&first.trace.header))?;
    dropped.push(format!("no {what}: {}, {}", shown(first), shown(other)));
    None
}

fn show_text(text: &String) -> String {
    format!("{text:?}")
}

fn show_bytes(bytes: &u64) -> String {
    Bytes(*bytes).to_string()
}

fn device(ranks: &[RankTrace<'_>], dropped: &mut Vec<String>) -> DeviceInfo {
    let mut bytes = |what, read: fn(&DeviceInfo) -> Option<u64>| {
        agreed(ranks, what, |header| read(&header.device), show_bytes, dropped)
    };
    let total_bytes = bytes("total memory of the device", |device| device.total_bytes);
    let capacity_bytes = bytes("capacity of the device", |device| device.capacity_bytes);
    let address_bytes_max = bytes("cap on addresses", |device| device.address_bytes_max);
    let count = |count: &u64| count.to_string();
    DeviceInfo {
        name: agreed(ranks, "name of the device", |it| it.device.name.clone(), show_text, dropped),
        // Ranks of a node differ in it, and it says nothing of the device.
        index: common(ranks, |header| header.device.index).flatten(),
        total_bytes,
        capacity_bytes,
        address_bytes_max,
        mappings_max: agreed(
            ranks,
            "cap on mappings",
            |header| header.device.mappings_max,
            count,
            dropped,
        ),
    }
}

/// A limit is that of one rank's allocator: together they may hold as much as all limits.
fn limit(ranks: &[RankTrace<'_>], dropped: &mut Vec<String>) -> Option<u64> {
    let limits = || ranks.iter().map(|rank| rank.trace.header.limit_bytes);
    let sum = limits().try_fold(0u64, |sum, limit| Some(sum.saturating_add(limit?)));
    let sum = sum.map(|sum| sum.min(BLOCK_BYTES_MAX));
    if let Some(sum) = sum.filter(|_| ranks.len() > 1) {
        dropped.push(format!("the limits of all ranks hold as one of {}, their sum", Bytes(sum)));
    } else if limits().any(|limit| limit.is_some()) && ranks.len() > 1 {
        dropped.push("no limit: not every rank has one".to_owned());
    }
    sum
}

fn history(ranks: &[RankTrace<'_>]) -> History {
    let all = || ranks.iter().map(|rank| rank.trace.header.history);
    let sum = |read: fn(&History) -> u64| all().map(|it| read(&it)).fold(0, u64::saturating_add);
    History {
        frees_without_alloc: sum(|history| history.frees_without_alloc),
        allocs: sum(|history| history.allocs),
        blocks_at_start: sum(|history| history.blocks_at_start),
        allocs_of_run: all().try_fold(0u64, |sum, it| sum.checked_add(it.allocs_of_run?)),
    }
}
