//! What a results table says of a fleet: many ranks of a job, a few settings to choose from.
//!
//! The one design decision: ranks are compared, not averaged. A job runs as long as its worst rank
//! does, so a setting is as good as what it does to the worst one; and only settings on the same
//! device, limit and costs stand side by side.
//!
//! ```text
//!   Rows ──by capacity, limit, profile, block──> a group ──by allocator──> a setting ──> its ranks
//!                                                  │ best: fewest ranks that do not fit, then the
//!                                                  │   smallest worst reserved peak, then the
//!                                                  │   smallest sum of them, then device time
//!                                                  └ and if every rank had the best for itself
//! ```

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::cells::Cell;
use super::description::Description;
use super::filter::Filter;
use super::rows::{Column, ColumnKind, Rows, Value};
use crate::units::{natural_order, nearest_rank};

/// How the ranks of a results table are found: the key `[fleet]` of a description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSpec {
    /// The column whose values are the ranks.
    pub over: String,
    /// Which rows.
    pub filters: Vec<Filter>,
    /// The setting against whose waste that of the others is measured.
    pub baseline: Filter,
}

impl Default for FleetSpec {
    /// Every trace is a rank, measured against plain `caching`.
    fn default() -> FleetSpec {
        let baseline = Filter::one("allocator", "caching");
        FleetSpec { over: "trace".to_owned(), filters: Vec::new(), baseline }
    }
}

/// The rows are no fleet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// A rank has several rows under one setting.
    #[error(
        "[fleet]: several rows have {over} = {rank} under {setting}: one is expected; add a filter, \
         or name another column with over"
    )]
    Several {
        /// Column of the ranks.
        over: String,
        /// The rank.
        rank: String,
        /// The setting.
        setting: String,
    },
    /// No row is left.
    #[error("[fleet]: no row of the results passes its filter")]
    Nothing,
    /// Nothing to measure against.
    #[error("[fleet]: no setting has {baseline}, its baseline: the settings are {settings}")]
    NoBaseline {
        /// The condition that none meets.
        baseline: Filter,
        /// What there is.
        settings: String,
    },
}

/// A fleet under several settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    /// Settings on one device each, in the order of the rows.
    pub groups: Vec<FleetGroup>,
}

/// Settings on the same device, limit and costs.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetGroup {
    /// What tells it from other groups, column and value; empty if there is only one.
    pub names: Vec<(String, String)>,
    /// Number of different ranks under any of the settings.
    pub ranks: usize,
    /// The settings, in the order of the rows.
    pub settings: Vec<FleetSetting>,
    /// Places of the best settings among them: several only if nothing tells them apart, none if no
    /// rank runs to its end under any.
    pub best: Vec<usize>,
    /// The place of the setting that comes after the best, if there are more.
    pub next: Option<usize>,
    /// The best of those that are settings of PyTorch's allocator, if none of the best is.
    pub best_of_pytorch: Option<usize>,
    /// The setting against which the others are measured, if it is there.
    pub baseline: Option<usize>,
    /// What told the best from that one.
    pub decided_by: Decision,
    /// What if every rank had the setting that is best for it.
    pub own_best: OwnBest,
}

/// What tells the best setting from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// There is no other.
    Alone,
    /// No rank runs to its end under any setting, so that none is best.
    NoneFits,
    /// More ranks run to their end.
    Fits,
    /// The worst rank holds less.
    WorstReserved,
    /// All ranks together hold less.
    SumReserved,
    /// Its device calls cost less.
    DeviceTime,
    /// Nothing: all are best.
    Tie,
}

/// A figure of all ranks, as nearest ranks: each is the value of some rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// The smallest.
    pub min: u64,
    /// 50th percentile.
    pub median: u64,
    /// 95th percentile.
    pub p95: u64,
    /// 99th percentile.
    pub p99: u64,
    /// The largest.
    pub max: u64,
}

/// What a setting does to the ranks. But for the counts, figures are of the ranks that ran to their
/// end: what the others held when they ran out says nothing of what they need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetSetting {
    /// What it is called.
    pub label: String,
    /// Ranks that ran to their end.
    pub ok: usize,
    /// Ranks that ran out of memory, by name with numbers in their own order.
    pub oom: Vec<String>,
    /// Ranks without a result: it could not be done, was skipped, or there is no row.
    pub failed: Vec<String>,
    /// Reserved peaks in bytes; nothing if no rank ran to its end.
    pub reserved: Option<Spread>,
    /// The rank of the largest reserved peak; of several the first by name.
    pub worst_rank: String,
    /// Number of other ranks that hold as much.
    pub worst_rank_ties: usize,
    /// Sum of the reserved peaks in bytes.
    pub reserved_bytes_sum: u64,
    /// Sum of reserved peak − requested peak in bytes.
    pub excess_bytes_sum: i64,
    /// The middle fragmentation.
    pub fragmentation_median: Option<f64>,
    /// The largest fragmentation and its rank.
    pub fragmentation_worst: Option<(f64, String)>,
    /// 1 − excess / excess of the baseline, each summed over the ranks that ran to their end under
    /// both; nothing without a baseline that has excess.
    pub waste_removed: Option<f64>,
    /// Cost of device calls / that under the baseline, each summed over the ranks that ran to their
    /// end under both; nothing without a baseline that has some.
    pub device_time_ratio: Option<f64>,
    /// Times that ranks gave their cached memory back to have a request met.
    pub retries_sum: u64,
    /// Ranks that ran to their end only so.
    pub retry_ranks: usize,
    /// Device calls of all ranks.
    pub device_calls_sum: u64,
    /// What they cost in nanoseconds, of all ranks.
    pub device_ns_sum: u64,
    /// What they cost the rank that they cost most, and that rank.
    pub device_ns_worst: Option<(u64, String)>,
}

/// What if every rank had the setting that is best for it, instead of the one that is best for the
/// fleet: ranks that run to their end, then the smaller reserved peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnBest {
    /// Ranks for which another setting is better.
    pub ranks: usize,
    /// Those of them that run to their end only then.
    pub rescued: usize,
    /// Sum of the reserved bytes that the others would save.
    pub saved_bytes: u64,
}

/// The result of one rank under one setting.
#[derive(Clone, Debug)]
struct RankResult {
    status: Status,
    reserved_bytes: u64,
    excess_bytes: i64,
    fragmentation: f64,
    device_calls: u64,
    device_ns: u64,
    retries: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    Oom,
    Failed,
}

/// Columns that tell groups apart.
const GROUP_COLUMNS: [&str; 4] = ["set", "capacity", "limit", "profile"];

/// A setting while its ranks are collected.
struct Collected {
    /// Its specification and its label.
    key: [String; 2],
    is_baseline: bool,
    ranks: BTreeMap<usize, RankResult>,
}

struct CollectedGroup {
    key: Vec<String>,
    settings: Vec<Collected>,
}

/// What the rows of a results table say of a fleet.
///
/// # Errors
/// If no row is left, or a rank has several under one setting.
pub fn fleet(rows: &Rows, spec: &FleetSpec) -> Result<Fleet, FleetError> {
    let passing = rows.rows.iter().filter(|row| {
        spec.filters.iter().all(|filter| filter.passes(&word(rows.get(row, &filter.column))))
    });
    let mut ranks = Ranks::default();
    let mut groups: Vec<CollectedGroup> = Vec::new();
    for row in passing {
        let name = |column: &str| word(rows.get(row, column));
        let rank = ranks.place(name(&spec.over));
        let key: Vec<String> = GROUP_COLUMNS.iter().map(|column| name(column)).collect();
        let group = found_or_new(
            &mut groups,
            |it| it.key == key,
            || CollectedGroup { key: key.clone(), settings: Vec::new() },
        );
        let key = [name("allocator"), name("label")];
        let setting = found_or_new(
            &mut group.settings,
            |it| it.key == key,
            || Collected {
                is_baseline: spec.baseline.passes(&name(&spec.baseline.column)),
                ranks: BTreeMap::new(),
                key: key.clone(),
            },
        );
        if setting.ranks.insert(rank, result(rows, row)).is_some() {
            let [_, setting] = key;
            let (over, rank) = (spec.over.clone(), ranks.names[rank].clone());
            return Err(FleetError::Several { over, rank, setting });
        }
    }
    if groups.is_empty() {
        return Err(FleetError::Nothing);
    }
    let varies = |at: usize| groups.iter().any(|group| group.key[at] != groups[0].key[at]);
    let varying: Vec<usize> = (0..GROUP_COLUMNS.len()).filter(|&at| varies(at)).collect();
    let finished = groups.iter().map(|group| {
        let named = varying.iter().map(|&at| (GROUP_COLUMNS[at].to_owned(), group.key[at].clone()));
        finished(group, named.collect(), &ranks.names)
    });
    Ok(Fleet { groups: finished.collect() })
}

/// Whether the rows of these cells will make a fleet: told before any of them is run. A condition on
/// results is known only then.
///
/// # Errors
/// If no cell passes the filters, a rank would have several rows under one setting, or none of the
/// settings is the baseline that was asked for.
pub fn check_fleet(description: &Description, cells: &[Cell]) -> Result<(), FleetError> {
    let Some(spec) = &description.fleet else { return Ok(()) };
    let rows: Vec<Vec<Value>> = cells.iter().map(|cell| cell.names(description)).collect();
    let Some(first) = rows.first() else { return Ok(()) };
    let columns: Vec<Column> = description.columns().into_iter().take(first.len()).collect();
    let named = Rows { columns, rows };
    let is_known =
        |filter: &Filter| named.columns.iter().any(|column| column.name == filter.column);
    if !spec.filters.iter().all(is_known) {
        return Ok(());
    }
    let settings = fleet(&named, spec)?.groups.into_iter().flat_map(|group| group.settings);
    let mut labels: Vec<String> = settings.map(|setting| setting.label).collect();
    // Without a word of it the baseline is `caching`, which need not be there.
    let is_asked_for = spec.baseline != FleetSpec::default().baseline;
    let is_baseline =
        |row: &Vec<Value>| spec.baseline.passes(&word(named.get(row, &spec.baseline.column)));
    if is_known(&spec.baseline) && is_asked_for && !named.rows.iter().any(is_baseline) {
        labels.sort();
        labels.dedup();
        let settings = labels.join(", ");
        return Err(FleetError::NoBaseline { baseline: spec.baseline.clone(), settings });
    }
    Ok(())
}

fn found_or_new<T>(
    items: &mut Vec<T>,
    is_it: impl Fn(&T) -> bool,
    new: impl FnOnce() -> T,
) -> &mut T {
    let at = items.iter().position(is_it).unwrap_or_else(|| {
        items.push(new());
        items.len() - 1
    });
    &mut items[at]
}

/// Ranks in the order of the rows.
#[derive(Default)]
struct Ranks {
    names: Vec<String>,
    places: BTreeMap<String, usize>,
}

impl Ranks {
    fn place(&mut self, name: String) -> usize {
        let Ranks { names, places } = self;
        *places.entry(name).or_insert_with_key(|name| {
            names.push(name.clone());
            names.len() - 1
        })
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::Word(word) => word.clone(),
        _ => String::new(),
    }
}

fn result(rows: &Rows, row: &[Value]) -> RankResult {
    let whole = |column: &str| match rows.get(row, column) {
        Value::Number(number) => *number,
        _ => 0,
    };
    RankResult {
        status: match word(rows.get(row, "status")).as_str() {
            "ok" => Status::Ok,
            "oom" => Status::Oom,
            _ => Status::Failed,
        },
        reserved_bytes: whole("reserved_bytes_peak"),
        excess_bytes: match rows.get(row, "excess_bytes") {
            Value::Difference(excess) => *excess,
            _ => 0,
        },
        fragmentation: rows.get(row, "fragmentation").number().unwrap_or(0.0),
        device_calls: whole("device_calls"),
        device_ns: whole("allocator_device_ns"),
        retries: whole("alloc_retries"),
    }
}

fn finished(group: &CollectedGroup, names: Vec<(String, String)>, ranks: &[String]) -> FleetGroup {
    let mut present: Vec<usize> =
        group.settings.iter().flat_map(|setting| setting.ranks.keys().copied()).collect();
    present.sort_unstable();
    present.dedup();
    present.sort_by(|&one, &other| natural_order(&ranks[one], &ranks[other]));
    let baseline_at = group.settings.iter().position(|setting| setting.is_baseline);
    let baseline = baseline_at.map(|at| &group.settings[at]);
    let labels: Vec<&String> = group.settings.iter().map(|setting| &setting.key[1]).collect();
    let summed = |setting: &Collected| {
        let [allocator, label] = &setting.key;
        // One label for two allocators tells nobody which is which.
        let is_clear = labels.iter().filter(|other| **other == label).count() == 1;
        let label = if is_clear { label } else { allocator };
        summed(setting, label, &present, ranks, baseline)
    };
    let settings: Vec<FleetSetting> = group.settings.iter().map(summed).collect();
    let (best, next, decided_by) = best(&settings, present.len());
    let own_best = own_best(&group.settings, best.first().copied().unwrap_or(0), &present);
    let of_pytorch = |&at: &usize| is_of_pytorch(&group.settings[at].key[0]);
    let best_of_pytorch = (0..settings.len())
        .filter(|at| of_pytorch(at) && settings[*at].ok > 0 && !best.iter().any(of_pytorch))
        .min_by(|&one, &other| compared(&settings[one], &settings[other], present.len()).0);
    FleetGroup {
        names,
        ranks: present.len(),
        settings,
        best,
        next,
        best_of_pytorch,
        baseline: baseline_at,
        decided_by,
        own_best,
    }
}

/// Whether a specification is of PyTorch's allocator, which a job can have by a settings string.
fn is_of_pytorch(allocator: &str) -> bool {
    let name = allocator.split('+').next().unwrap_or(allocator);
    ["caching", "expandable"].contains(&name)
}

fn summed(
    setting: &Collected,
    label: &str,
    present: &[usize],
    ranks: &[String],
    baseline: Option<&Collected>,
) -> FleetSetting {
    let mut summed = FleetSetting { label: label.to_owned(), ..FleetSetting::default() };
    let mut reserved = Vec::new();
    let mut fragmentations = Vec::new();
    let mut worst_bytes = None;
    for &rank in present {
        let name = &ranks[rank];
        let result = match setting.ranks.get(&rank) {
            Some(result) if result.status == Status::Ok => result,
            Some(result) if result.status == Status::Oom => {
                summed.oom.push(name.clone());
                continue;
            }
            _ => {
                summed.failed.push(name.clone());
                continue;
            }
        };
        let RankResult { reserved_bytes, device_ns, fragmentation, .. } = *result;
        summed.ok += 1;
        reserved.push(reserved_bytes);
        fragmentations.push(fragmentation);
        match worst_bytes.map_or(Ordering::Greater, |worst| reserved_bytes.cmp(&worst)) {
            Ordering::Greater => {
                worst_bytes = Some(reserved_bytes);
                summed.worst_rank.clone_from(name);
                summed.worst_rank_ties = 0;
            }
            Ordering::Equal => summed.worst_rank_ties += 1,
            Ordering::Less => {}
        }
        summed.retries_sum = summed.retries_sum.saturating_add(result.retries);
        summed.retry_ranks += usize::from(result.retries > 0);
        if summed.fragmentation_worst.as_ref().is_none_or(|(worst, _)| fragmentation > *worst) {
            summed.fragmentation_worst = Some((fragmentation, name.clone()));
        }
        if summed.device_ns_worst.as_ref().is_none_or(|(worst, _)| device_ns > *worst) {
            summed.device_ns_worst = Some((device_ns, name.clone()));
        }
        summed.reserved_bytes_sum = summed.reserved_bytes_sum.saturating_add(reserved_bytes);
        summed.excess_bytes_sum = summed.excess_bytes_sum.saturating_add(result.excess_bytes);
        summed.device_calls_sum = summed.device_calls_sum.saturating_add(result.device_calls);
        summed.device_ns_sum = summed.device_ns_sum.saturating_add(device_ns);
    }
    reserved.sort_unstable();
    fragmentations.sort_by(f64::total_cmp);
    summed.reserved = spread(&reserved);
    summed.fragmentation_median = nearest_rank(&fragmentations, 50);
    let against = |read: fn(&RankResult) -> i128| shared_ratio(setting, baseline?, read);
    summed.waste_removed = against(|it| i128::from(it.excess_bytes)).map(|left| 1.0 - left);
    summed.device_time_ratio = against(|it| i128::from(it.device_ns));
    summed
}

fn spread(sorted: &[u64]) -> Option<Spread> {
    let at = |percent| nearest_rank(sorted, percent);
    Some(Spread { min: at(0)?, median: at(50)?, p95: at(95)?, p99: at(99)?, max: at(100)? })
}

/// What a figure is of that under the baseline, each summed over the ranks that ran to their end
/// under both; nothing if the baseline has none.
fn shared_ratio(
    setting: &Collected,
    baseline: &Collected,
    read: fn(&RankResult) -> i128,
) -> Option<f64> {
    let (mut own, mut base) = (0i128, 0i128);
    for (rank, result) in &setting.ranks {
        let Some(measure) = baseline.ranks.get(rank) else { continue };
        if result.status == Status::Ok && measure.status == Status::Ok {
            own += read(result);
            base += read(measure);
        }
    }
    (base > 0).then(|| own as f64 / base as f64)
}

/// How two settings compare, the better first, and by what.
fn compared(one: &FleetSetting, other: &FleetSetting, ranks: usize) -> (Ordering, Decision) {
    let unfit = |setting: &FleetSetting| ranks - setting.ok;
    let worst = |setting: &FleetSetting| setting.reserved.map_or(u64::MAX, |spread| spread.max);
    let orders = [
        (unfit(one).cmp(&unfit(other)), Decision::Fits),
        (worst(one).cmp(&worst(other)), Decision::WorstReserved),
        (one.reserved_bytes_sum.cmp(&other.reserved_bytes_sum), Decision::SumReserved),
        (one.device_ns_sum.cmp(&other.device_ns_sum), Decision::DeviceTime),
    ];
    let decided = orders.into_iter().find(|(order, _)| order.is_ne());
    decided.unwrap_or((Ordering::Equal, Decision::Tie))
}

/// The best settings, the one after them if there is one, and what tells it from them.
fn best(settings: &[FleetSetting], ranks: usize) -> (Vec<usize>, Option<usize>, Decision) {
    let mut order: Vec<usize> = (0..settings.len()).collect();
    order.sort_by(|&one, &other| compared(&settings[one], &settings[other], ranks).0);
    let Some(&first) = order.first() else { return (Vec::new(), None, Decision::Alone) };
    if settings[first].ok == 0 {
        return (Vec::new(), None, Decision::NoneFits);
    }
    let against = |other: usize| compared(&settings[first], &settings[other], ranks);
    let is_tied = |&other: &usize| against(other).0.is_eq();
    let ties: Vec<usize> = order.iter().copied().take_while(is_tied).collect();
    match order.get(ties.len()) {
        None if ties.len() > 1 => (ties, None, Decision::Tie),
        None => (ties, None, Decision::Alone),
        Some(&next) => (ties, Some(next), against(next).1),
    }
}

fn own_best(settings: &[Collected], fleet_best: usize, present: &[usize]) -> OwnBest {
    let mut own = OwnBest::default();
    let Some(fleet_best) = settings.get(fleet_best) else { return own };
    for rank in present {
        let reserved = |setting: &Collected| {
            let result = setting.ranks.get(rank).filter(|result| result.status == Status::Ok)?;
            Some(result.reserved_bytes)
        };
        let least = settings.iter().filter_map(reserved).min();
        match (reserved(fleet_best), least) {
            (None, Some(_)) => {
                own.ranks += 1;
                own.rescued += 1;
            }
            (Some(now), Some(least)) if least < now => {
                own.ranks += 1;
                own.saved_bytes = own.saved_bytes.saturating_add(now - least);
            }
            _ => {}
        }
    }
    own
}

/// The columns of [`fleet_rows`] behind those that tell groups apart.
const COLUMNS: [(&str, ColumnKind); 27] = [
    ("label", ColumnKind::Word),
    ("is_best", ColumnKind::Number),
    ("ranks", ColumnKind::Number),
    ("ok", ColumnKind::Number),
    ("oom", ColumnKind::Number),
    ("failed", ColumnKind::Number),
    ("reserved_bytes_peak_min", ColumnKind::Number),
    ("reserved_bytes_peak_median", ColumnKind::Number),
    ("reserved_bytes_peak_p95", ColumnKind::Number),
    ("reserved_bytes_peak_p99", ColumnKind::Number),
    ("reserved_bytes_peak_max", ColumnKind::Number),
    ("reserved_worst_rank", ColumnKind::Word),
    ("reserved_bytes_spread", ColumnKind::Number),
    ("reserved_max_over_min", ColumnKind::Fraction),
    ("reserved_bytes_sum", ColumnKind::Number),
    ("excess_bytes_sum", ColumnKind::Difference),
    ("waste_removed", ColumnKind::Fraction),
    ("fragmentation_median", ColumnKind::Fraction),
    ("fragmentation_worst", ColumnKind::Fraction),
    ("fragmentation_worst_rank", ColumnKind::Word),
    ("device_calls_sum", ColumnKind::Number),
    ("allocator_device_ns_sum", ColumnKind::Number),
    ("allocator_device_ns_worst", ColumnKind::Number),
    ("allocator_device_ns_worst_rank", ColumnKind::Word),
    ("allocator_device_ns_ratio", ColumnKind::Fraction),
    ("alloc_retries_sum", ColumnKind::Number),
    ("alloc_retries_ranks", ColumnKind::Number),
];

/// The summary as a table, a row a setting; `is_best` is 1 for the best of its group.
pub fn fleet_rows(fleet: &Fleet) -> Rows {
    let named = fleet.groups.first().map(|group| &group.names[..]).unwrap_or_default();
    let named = named.iter().map(|(column, _)| Column::new(column, ColumnKind::Word));
    let columns = named.chain(COLUMNS.iter().map(|(name, kind)| Column::new(name, *kind)));
    let rows = fleet.groups.iter().flat_map(|group| {
        let settings = group.settings.iter().enumerate();
        settings.map(move |(at, setting)| {
            let names = group.names.iter().map(|(_, value)| Value::of_word(value));
            names.chain(setting_values(setting, group.ranks, group.best.contains(&at))).collect()
        })
    });
    Rows { columns: columns.collect(), rows: rows.collect() }
}

fn setting_values(setting: &FleetSetting, ranks: usize, is_best: bool) -> Vec<Value> {
    let count = |count: usize| Value::Number(count as u64);
    let reserved = |read: fn(&Spread) -> u64| Value::of_number(setting.reserved.as_ref().map(read));
    let worst = |name: Option<&String>| name.map_or(Value::None, |name| Value::of_word(name));
    let fragmentation = setting.fragmentation_worst.as_ref();
    let device = setting.device_ns_worst.as_ref();
    vec![
        Value::of_word(&setting.label),
        Value::Number(u64::from(is_best)),
        count(ranks),
        count(setting.ok),
        count(setting.oom.len()),
        count(setting.failed.len()),
        reserved(|spread| spread.min),
        reserved(|spread| spread.median),
        reserved(|spread| spread.p95),
        reserved(|spread| spread.p99),
        reserved(|spread| spread.max),
        worst(setting.reserved.map(|_| &setting.worst_rank)),
        reserved(|spread| spread.max - spread.min),
        Value::of_fraction(setting.reserved.and_then(Spread::max_over_min)),
        Value::Number(setting.reserved_bytes_sum),
        Value::Difference(setting.excess_bytes_sum),
        Value::of_fraction(setting.waste_removed),
        Value::of_fraction(setting.fragmentation_median),
        Value::of_fraction(fragmentation.map(|(worst, _)| *worst)),
        worst(fragmentation.map(|(_, rank)| rank)),
        Value::Number(setting.device_calls_sum),
        Value::Number(setting.device_ns_sum),
        Value::of_number(device.map(|(worst, _)| *worst)),
        worst(device.map(|(_, rank)| rank)),
        Value::of_fraction(setting.device_time_ratio),
        Value::Number(setting.retries_sum),
        count(setting.retry_ranks),
    ]
}

impl Spread {
    /// How many times the smallest the largest is; nothing where the smallest is 0.
    pub fn max_over_min(self) -> Option<f64> {
        (self.min > 0).then(|| self.max as f64 / self.min as f64)
    }
}
