//! What an experiment says of a fleet: settings side by side, and which is best for all ranks.

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, duration, grouped, percent, printable, wrapped};
use crate::experiment::{Decision, Fleet, FleetGroup, FleetSetting, OwnBest, Spread};
use crate::units::Bytes;

/// Times the baseline's device time from which a setting's is told beside what it saves.
const DEARER_FROM: f64 = 1.5;

/// Ranks that are named; of more, how many there are.
const RANKS_NAMED: usize = 5;

/// The summary: two tables for each device, and what follows from them.
pub fn fleet(fleet: &Fleet, style: Style) -> String {
    let mut out = String::new();
    for group in &fleet.groups {
        let names = group.names.iter().map(|(name, value)| format!(", {name} {value}"));
        let ranks = counted(group.ranks as u64, "rank");
        let title = format!("fleet of {ranks}{}", names.collect::<String>());
        out.push_str(&style.paint(Tone::Heading, &printable(&title)));
        out.push('\n');
        out.push_str(&peaks(group).render(style));
        out.push('\n');
        out.push_str(&sums(group).render(style));
        out.push('\n');
        for sentence in fleet_sentences(group) {
            out.push_str(&wrapped("  ", &printable(&sentence), "    "));
        }
        out.push('\n');
    }
    out.pop();
    out
}

/// The name of a setting, green if it is best of several.
fn name(group: &FleetGroup, at: usize) -> Cell {
    let is_best = group.best.contains(&at) && group.settings.len() > 1;
    let tone = if is_best { Tone::Good } else { Tone::Plain };
    Cell::toned(printable(&group.settings[at].label), tone)
}

/// How many ranks run to their end, and what they hold.
fn peaks(group: &FleetGroup) -> Grid {
    let has_failed = group.settings.iter().any(|setting| !setting.failed.is_empty());
    let largest = group.settings.iter().filter_map(|setting| setting.reserved);
    let unit = SizeUnit::fitting(largest.map(|spread| spread.max).max().unwrap_or(0));
    let has_retries = has_retries(group);
    let mut counts = vec!["ok"];
    counts.extend(has_retries.then_some("retried"));
    counts.push("OOM");
    counts.extend(has_failed.then_some("failed"));
    let figures = ["min", "median", "p95", "p99", "max", "spread"];
    let mut aligns = vec![Align::Right; counts.len() + figures.len()];
    aligns.insert(0, Align::Left);
    aligns.push(Align::Left);
    let mut grid = Grid::new(&aligns);
    let mut head = vec!["reserved peak"];
    head.extend(counts.iter().chain(&figures));
    head.push("worst rank");
    grid.head(head);
    let mut units = vec![unit.name];
    units.extend(counts.iter().map(|_| ""));
    grid.head(units);
    for (at, setting) in group.settings.iter().enumerate() {
        let mut cells = vec![name(group, at), grouped(setting.ok as u64).into()];
        cells.extend(has_retries.then(|| grouped(setting.retry_ranks as u64).into()));
        let bad = |count: usize| {
            let tone = if count > 0 { Tone::Bad } else { Tone::Plain };
            Cell::toned(grouped(count as u64), tone)
        };
        cells.push(bad(setting.oom.len()));
        cells.extend(has_failed.then(|| bad(setting.failed.len())));
        let size = |read: fn(&Spread) -> u64| match &setting.reserved {
            Some(spread) => unit.cell(read(spread)).into(),
            None => Cell::from("-".to_owned()),
        };
        cells.extend([
            size(|spread| spread.min),
            size(|spread| spread.median),
            size(|spread| spread.p95),
            size(|spread| spread.p99),
            size(|spread| spread.max),
            size(|spread| spread.max - spread.min),
            printable(&worst_ranks(setting)).into_owned().into(),
        ]);
        grid.row(cells, String::new());
    }
    grid
}

/// Whether a rank had to give cached memory back to go on.
fn has_retries(group: &FleetGroup) -> bool {
    group.settings.iter().any(|setting| setting.retry_ranks > 0)
}

/// The ranks that hold most, the first by name.
pub(in crate::report) fn worst_ranks(setting: &FleetSetting) -> String {
    match setting.worst_rank_ties {
        0 => setting.worst_rank.clone(),
        more => format!("{} and {} more", setting.worst_rank, grouped(more as u64)),
    }
}

/// What all ranks hold and cost together.
fn sums(group: &FleetGroup) -> Grid {
    let largest = group.settings.iter().map(|setting| setting.reserved_bytes_sum).max();
    let unit = SizeUnit::fitting(largest.unwrap_or(0));
    let has_retries = has_retries(group);
    let mut grid = Grid::of_columns(1, if has_retries { 9 } else { 8 });
    let head = ["all ranks", "reserved", "excess", "waste", "frag", "frag", "device"];
    let below = ["", unit.name, unit.name, "removed", "median", "worst", "calls"];
    let retries = has_retries.then_some(["", "retries"]);
    grid.head(head.into_iter().chain(["time", "time"]).chain(retries.map(|it| it[0])));
    grid.head(below.into_iter().chain(["sum", "worst"]).chain(retries.map(|it| it[1])));
    for (at, setting) in group.settings.iter().enumerate() {
        let share = |share: Option<f64>| share.map_or("-".to_owned(), percent).into();
        let worst = setting.fragmentation_worst.as_ref().map(|(worst, _)| *worst);
        let device_ns = setting.device_ns_worst.as_ref().map(|(worst, _)| *worst);
        let mut cells = vec![
            name(group, at),
            unit.cell(setting.reserved_bytes_sum).into(),
            unit.signed_cell(setting.excess_bytes_sum).into(),
            share(setting.waste_removed),
            share(setting.fragmentation_median),
            share(worst),
            grouped(setting.device_calls_sum).into(),
            duration(setting.device_ns_sum).into(),
            device_ns.map_or("-".to_owned(), duration).into(),
        ];
        cells.extend(has_retries.then(|| grouped(setting.retries_sum).into()));
        grid.row(cells, String::new());
    }
    grid
}

/// What follows from the figures of a group, one sentence each.
pub(in crate::report) fn fleet_sentences(group: &FleetGroup) -> Vec<String> {
    let mut sentences = Vec::new();
    sentences.extend(best(group));
    sentences.extend(own_best(group));
    let unfit = |setting: &FleetSetting| (setting.oom.clone(), setting.failed.clone());
    if group.settings.iter().any(|setting| unfit(setting) != unfit(&group.settings[0])) {
        sentences.push(
            "sums are over different ranks: each of those that run to their end under its setting; \
             waste removed is over those that do so under both"
                .to_owned(),
        );
    }
    for setting in &group.settings {
        let FleetSetting { label, oom, failed, .. } = setting;
        if setting.retry_ranks > 0 {
            let ranks = counted(setting.retry_ranks as u64, "rank");
            let times = match setting.retries_sum {
                1 => "1 retry".to_owned(),
                more => format!("{} retries", grouped(more)),
            };
            let verb = if setting.retry_ranks == 1 { "goes" } else { "go" };
            sentences.push(format!(
                "under {label} {ranks} {verb} on only by giving cached memory back, with {times} in \
                 all"
            ));
        }
        if !oom.is_empty() {
            sentences.push(format!("out of memory under {label}: {}", few(oom)));
        }
        if !failed.is_empty() {
            sentences.push(format!("no result under {label}: {}", few(failed)));
        }
        if let Some((worst, rank)) = setting.fragmentation_worst.as_ref()
            && *worst > 0.0
            && *rank != setting.worst_rank
        {
            let worst_rank = &setting.worst_rank;
            sentences.push(format!(
                "under {label} {rank} is the most fragmented, {worst_rank} holds most"
            ));
        }
    }
    sentences
}

fn best(group: &FleetGroup) -> Option<String> {
    if group.decided_by == Decision::NoneFits {
        return Some(match &group.settings[..] {
            [only] => format!("no rank runs to its end under {}", only.label),
            _ => "no rank runs to its end under any setting".to_owned(),
        });
    }
    let first = group.settings.get(*group.best.first()?)?;
    let worst_rank = worst_ranks(first);
    let labels: Vec<&str> =
        group.best.iter().map(|&at| group.settings[at].label.as_str()).collect();
    let Some(next) = group.next.and_then(|next| group.settings.get(next)) else {
        return (group.decided_by == Decision::Tie)
            .then(|| format!("no setting is best: {} come out the same", labels.join(", ")));
    };
    let (label, its) = match labels.as_slice() {
        [label] => ((*label).to_owned(), "its"),
        labels => (format!("{} (the same)", labels.join(" and ")), "their"),
    };
    let other = &next.label;
    let worst = |setting: &FleetSetting| setting.reserved.map_or(0, |spread| spread.max);
    let sum = |setting: &FleetSetting| setting.reserved_bytes_sum;
    let why = match group.decided_by {
        Decision::Alone | Decision::NoneFits | Decision::Tie => return None,
        Decision::Fits => format!(
            "{} of {} run to their end, {} under the next best, {other}",
            first.ok,
            counted(group.ranks as u64, "rank"),
            next.ok
        ),
        Decision::WorstReserved => format!(
            "{its} worst rank, {worst_rank}, holds {}, {} less than the worst under the next best, \
             {other}",
            Bytes(worst(first)),
            Bytes(worst(next) - worst(first))
        ),
        Decision::SumReserved => format!(
            "{its} worst rank holds {}, as under the next best, {other}; all ranks together hold {} \
             less",
            Bytes(worst(first)),
            Bytes(sum(next) - sum(first))
        ),
        Decision::DeviceTime => format!(
            "peaks are those of the next best, {other}; device calls cost {} less",
            duration(next.device_ns_sum - first.device_ns_sum)
        ),
    };
    let cost = device_cost(group, first).unwrap_or_default();
    let of_pytorch = best_of_pytorch(group).unwrap_or_default();
    Some(format!("best for the fleet: {label}: {why}{cost}{of_pytorch}"))
}

/// What the device calls of a setting cost, if that is far more than under the baseline.
fn device_cost(group: &FleetGroup, setting: &FleetSetting) -> Option<String> {
    let ratio = setting.device_time_ratio.filter(|&ratio| ratio >= DEARER_FROM)?;
    let baseline = &group.settings.get(group.baseline?)?.label;
    let ratio = if ratio < 10.0 { format!("{ratio:.1}") } else { grouped(ratio.round() as u64) };
    Some(format!("; its device calls take {ratio} times as long as under {baseline}"))
}

/// What a job can have without another allocator.
fn best_of_pytorch(group: &FleetGroup) -> Option<String> {
    let setting = group.settings.get(group.best_of_pytorch?)?;
    Some(format!(
        "; of the settings of PyTorch's own allocator {} is best: {} of {} run to their end, the \
         worst holds {}",
        setting.label,
        setting.ok,
        counted(group.ranks as u64, "rank"),
        Bytes(setting.reserved?.max)
    ))
}

fn own_best(group: &FleetGroup) -> Option<String> {
    if group.settings.len() < 2 {
        return None;
    }
    let label = &group.settings.get(*group.best.first()?)?.label;
    let OwnBest { ranks, rescued, saved_bytes } = group.own_best;
    if ranks == 0 {
        return Some(format!("no rank would do better under another setting than {label}"));
    }
    let mut gains = Vec::new();
    if rescued > 0 {
        gains.push(format!("{} of them would run to their end only then", grouped(rescued as u64)));
    }
    if saved_bytes > 0 {
        gains.push(format!("{} less would be held in all", Bytes(saved_bytes)));
    }
    Some(format!(
        "if every rank had the setting that is best for it, {} of {} would leave {label}: {}",
        grouped(ranks as u64),
        counted(group.ranks as u64, "rank"),
        gains.join(", ")
    ))
}

/// The first of many names.
fn few(names: &[String]) -> String {
    let shown = names.iter().take(RANKS_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(RANKS_NAMED) {
        0 => shown,
        more => format!("{shown} and {} more", grouped(more as u64)),
    }
}
