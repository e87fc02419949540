//! What an out-of-memory message means: is it fragmentation, and if not, what is it?
//!
//! The one design decision: the answer is a ladder of comparisons of five sizes, and it is climbed
//! once with the figures as printed and once for every corner of their rounding. If the corners
//! disagree on whether it is fragmentation, the figures do not tell, and that is the answer.
//!
//! Before it gives up, PyTorch has returned every segment that was wholly free (pytorch#13751), so
//! that what is still reserved and unallocated lies beside live blocks or in private pools.
//!
//! ```text
//!   capacity  |<- allocated ->|<- unallocated ->|<--- outside --->|<- free ->|
//!                                    S                  O              F
//!   not even S + F serves the request: no allocator could         not fragmentation
//!   S serves it, F does not: one piece would have been enough     fragmentation
//!   only S and F together serve it                                partly
//!   F serves it: the allocator was not asked                      limit, driver
//! ```

mod contradictions;
mod devices;

use serde::Serialize;

pub use contradictions::Contradiction;

use super::amount::Amount;
use super::message::{OomMessage, Wording};
use crate::units::{GIB, MIB};
use contradictions::contradictions;
use devices::{diagnose_async, diagnose_mps};

/// Below this share of the device, stranded memory is no reason to look at the allocator. People
/// who were told in vain to tune it had gaps of 0.02 to 0.17 GiB on cards of 6 to 80 GiB
/// (taming-transformers#194, autotrain-advanced#737); the smallest gap that a setting closed was
/// 2.3 % (compressed-tensors#587).
pub const NEGLIGIBLE_SHARE: f64 = 0.02;

/// What a process takes of a device for its context, kernels and libraries, which no setting
/// gives back.
const CONTEXT_BYTES: i128 = 512 * MIB as i128;

/// The most that a process takes beside its allocator with reason: a context, kernels of many
/// libraries and NCCL's buffers.
const OWN_BYTES_MAX: i128 = 2 * GIB as i128;

/// What others hold on a device is worth naming from this size and this share of the device on.
const OUTSIDE_BYTES_MIN: i128 = GIB as i128;
const OUTSIDE_SHARE_MIN: f64 = 0.05;

/// Devices give memory in whole pieces of this size, so that a request can fail although the free
/// bytes are counted enough.
const GRANULARITY_BYTES: i128 = 2 * MIB as i128;

/// A request below this share of the device that fails tells of a full device, not of a near miss.
const NEAR_MISS_SHARE: f64 = 0.01;

/// A limit this close to the whole device is none.
const LIMIT_SHARE: f64 = 0.995;

/// Sums may exceed the device by this share through rounding and memory that the driver does not
/// count.
const SUM_SLACK_SHARE: f64 = 0.01;

/// What explains a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Memory is short whatever the allocator does.
    NotFragmentation,
    /// Memory is short, and would not be without what others hold on the device.
    Outside,
    /// The device was short by bytes, not GiB.
    NearMiss,
    /// What is stranded would have served the request in one piece.
    Fragmentation,
    /// Stranded and free memory would have served it together, neither alone.
    Partly,
    /// Private pools (CUDA graphs, MemPool) hold free memory that would have served it.
    PrivatePool,
    /// The device has room and the limit of the process has none.
    Limit,
    /// The device has room and the driver refused.
    Driver,
    /// The device's own pool (cudaMallocAsync) or others hold what is missing.
    DriverPool,
    /// The request exceeds the whole device.
    LargerThanDevice,
    /// The program holds more than the device has: the driver lends memory of the host.
    Oversubscribed,
    /// The answer lies within the rounding of the figures.
    Undecided,
    /// The message has no figures that would tell.
    Unknown,
}

/// Whether it is fragmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IsFragmentation {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// It is one of two causes.
    Partly,
    /// The text does not tell.
    CannotBeTold,
}

/// Whether the rounding of the figures could change the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    /// No figure within its rounding changes it.
    Sure,
    /// It could be the other of two classes with the same answer.
    Rounded,
}

/// How much of a device is stranded, as a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Below 2 %.
    Negligible,
    /// Below 5 %.
    Small,
    /// Below 10 %.
    Notable,
    /// Below 25 %.
    Large,
    /// From 25 % on.
    Severe,
}

impl Severity {
    /// The word for a share of one.
    pub fn of_share(share: f64) -> Severity {
        match share {
            s if s < NEGLIGIBLE_SHARE => Severity::Negligible,
            s if s < 0.05 => Severity::Small,
            s if s < 0.10 => Severity::Notable,
            s if s < 0.25 => Severity::Large,
            _ => Severity::Severe,
        }
    }
}

/// What a message means.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// What explains the refusal.
    pub class: Class,
    /// Whether it is fragmentation.
    pub is_fragmentation: IsFragmentation,
    /// Whether rounding could change the class.
    pub certainty: Certainty,
    /// Reserved and not allocated, as a share of the device or of the limit.
    pub stranded_share: Option<f64>,
    /// The share as a word.
    pub severity: Option<Severity>,
    /// What the request lacks even if all that is free were in one piece; negative if there would
    /// be room left.
    pub missing_bytes: Option<i64>,
    /// What the device, within the limit, still had to give.
    pub room_bytes: Option<u64>,
    /// In use on the device, but not by this allocator: other processes, this process's context
    /// and libraries.
    pub outside: Option<Amount>,
    /// The smallest device that would have served this request, with no fragmentation at all and
    /// everything else as it was.
    pub capacity_needed_bytes: Option<u64>,
    /// Figures that contradict each other.
    pub contradictions: Vec<Contradiction>,
}

/// The figures that the ladder compares, in bytes.
#[derive(Clone, Copy, Debug)]
struct Figures {
    requested: i128,
    /// What the device was asked for to serve it.
    asked: i128,
    /// What the device can give.
    free: i128,
    stranded: i128,
    capacity: i128,
    reserved: i128,
    private_pools: i128,
    /// What the limit leaves at least, if there is one.
    limit_room: Option<i128>,
    /// What other processes hold, as listed.
    others: i128,
    /// What lies outside the allocator beyond what a process needs itself.
    avoidable: i128,
}

/// Tells what a message means.
pub fn diagnose(message: &OomMessage) -> Diagnosis {
    let mut diagnosis = match message.wording {
        Wording::Mps => diagnose_mps(message),
        Wording::TorchAsync => diagnose_async(message),
        Wording::TorchHost => Some(bare(Class::Unknown, IsFragmentation::No)),
        Wording::Jax | Wording::TensorFlow | Wording::Rmm | Wording::Driver => None,
        _ => diagnose_caching(message),
    }
    .unwrap_or_else(|| bare(Class::Unknown, IsFragmentation::CannotBeTold));
    diagnosis.contradictions = contradictions(message);
    diagnosis
}

fn bare(class: Class, is_fragmentation: IsFragmentation) -> Diagnosis {
    Diagnosis {
        class,
        is_fragmentation,
        certainty: Certainty::Sure,
        stranded_share: None,
        severity: None,
        missing_bytes: None,
        room_bytes: None,
        outside: None,
        capacity_needed_bytes: None,
        contradictions: Vec::new(),
    }
}

/// PyTorch's caching allocator on any device.
fn diagnose_caching(message: &OomMessage) -> Option<Diagnosis> {
    let requested = message.requested?;
    let mut capacity = message.capacity.filter(|capacity| capacity.bytes > 0)?;
    let reserved = message.reserved?;
    let stranded = message.unallocated?;
    // Where free memory is not told it is at most what the allocator has not reserved.
    let free = message.free.unwrap_or(capacity.minus(reserved));
    if free.bytes > capacity.bytes {
        // A GPU that shares the memory of the host tells its own part only.
        capacity = free.plus(reserved);
    }
    let outside = capacity.minus(reserved).minus(free);
    let limit = message.allowed.filter(|limit| share(limit.bytes, capacity.bytes) < LIMIT_SHARE);
    let figures = Figures {
        requested: i128::from(requested.bytes),
        asked: asked(message.wording, i128::from(requested.bytes)),
        free: i128::from(free.bytes),
        stranded: i128::from(stranded.bytes),
        capacity: i128::from(capacity.bytes),
        reserved: i128::from(reserved.bytes),
        private_pools: message.private_pools.map_or(0, |pools| i128::from(pools.bytes)),
        limit_room: limit.map(|limit| (limit.low() - reserved.high()).max(0)),
        others: other_processes(message).map(|in_use| i128::from(in_use.bytes)).sum(),
        avoidable: avoidable(message, outside),
    };
    let (class, certainty) = classify(message.wording, &figures, [requested, free, stranded]);
    let room =
        figures.free.min(limit.map_or(i128::MAX, |limit| limit.minus(reserved).bytes.into()));
    let missing = figures.requested - room - figures.stranded;
    let whole = limit.map_or(capacity.bytes, |limit| limit.bytes);
    let stranded_share = share(stranded.bytes, whole);
    let mut diagnosis = bare(class, is_fragmentation(class, &figures, stranded_share));
    diagnosis.certainty = certainty;
    diagnosis.stranded_share = Some(stranded_share);
    diagnosis.severity = Some(Severity::of_share(stranded_share));
    diagnosis.missing_bytes = Some(clamped(missing));
    diagnosis.room_bytes = u64::try_from(room).ok();
    diagnosis.outside = message.free.map(|_| outside);
    let needed = figures.capacity + missing;
    diagnosis.capacity_needed_bytes =
        u64::try_from(needed).ok().filter(|_| limit.is_none() && missing > 0);
    Some(diagnosis)
}

/// What the device is asked for. PyTorch prints that since 1.4; before, it printed the request,
/// which comes in segments (pytorch_caching: 2 MiB up to 1 MiB, 20 MiB below 10 MiB, else whole
/// 2 MiB).
fn asked(wording: Wording, requested: i128) -> i128 {
    const MI: i128 = MIB as i128;
    match requested {
        r if wording != Wording::TorchCached => r,
        r if r <= MI => 2 * MI,
        r if r < 10 * MI => 20 * MI,
        r => (r + 2 * MI - 1) / (2 * MI) * (2 * MI),
    }
}

/// What lies outside the allocator beyond what this process needs itself, as the message tells it,
/// or as a context usually takes.
fn avoidable(message: &OomMessage, outside: Amount) -> i128 {
    let own = match (own_process(message), message.reserved) {
        (Some((_, in_use)), Some(reserved)) => i128::from(in_use.minus(reserved).bytes),
        _ => CONTEXT_BYTES,
    };
    (i128::from(outside.bytes) - own.min(OWN_BYTES_MAX)).max(0)
}

/// What this process has in use with everything beside PyTorch, and where it stands in the list of
/// processes. In a container the driver lists it under a number of the host; it is then the process
/// that holds at least what is reserved, and as little more as possible. Less than what is reserved
/// is no figure (WSL tells 0).
fn own_process(message: &OomMessage) -> Option<(Option<usize>, Amount)> {
    let reserved = message.reserved?;
    let holds = |in_use: &Amount| in_use.high() >= reserved.low();
    if let Some(in_use) = message.in_use_by_process {
        return Some((None, in_use)).filter(|(_, in_use)| holds(in_use));
    }
    let listed = message.processes.iter().map(|process| process.in_use).enumerate();
    let holders = listed.filter(|(_, in_use)| holds(in_use));
    holders.min_by_key(|(_, in_use)| in_use.bytes).map(|(index, in_use)| (Some(index), in_use))
}

/// What the listed processes but this one have in use.
fn other_processes(message: &OomMessage) -> impl Iterator<Item = Amount> {
    let own = own_process(message).and_then(|(index, _)| index);
    let listed = message.processes.iter().enumerate();
    listed.filter(move |(index, _)| Some(*index) != own).map(|(_, process)| process.in_use)
}

/// The class of a message and whether rounding could change it.
fn classify(
    wording: Wording,
    nominal: &Figures,
    [requested, free, stranded]: [Amount; 3],
) -> (Class, Certainty) {
    let class = ladder(nominal);
    if is_near_miss(nominal, requested, free) {
        return (Class::NearMiss, Certainty::Sure);
    }
    let mut certainty = Certainty::Sure;
    for corner in 0..8u8 {
        let pick = |bit: u8, amount: Amount| {
            if corner & (1 << bit) == 0 { amount.low().max(0) } else { amount.high() }
        };
        let requested = pick(0, requested);
        let other = ladder(&Figures {
            requested,
            asked: asked(wording, requested),
            free: pick(1, free),
            stranded: pick(2, stranded),
            ..*nominal
        });
        if answer(other) != answer(class) {
            return (Class::Undecided, Certainty::Rounded);
        }
        if other != class {
            certainty = Certainty::Rounded;
        }
    }
    (class, certainty)
}

/// Whether a class blames the allocator.
fn answer(class: Class) -> bool {
    matches!(class, Class::Fragmentation | Class::Partly)
}

/// The request and what is free are the same but for rounding and the device's granularity.
fn is_near_miss(figures: &Figures, requested: Amount, free: Amount) -> bool {
    let slack =
        i128::from(requested.error_bytes) + i128::from(free.error_bytes) + GRANULARITY_BYTES;
    let is_large = figures.requested as f64 >= NEAR_MISS_SHARE * figures.capacity as f64;
    let is_limited = figures.limit_room.is_some_and(|room| room < figures.asked);
    is_large && !is_limited && (figures.asked - figures.free).abs() <= slack
}

/// The first rung that holds.
fn ladder(figures: &Figures) -> Class {
    let Figures { requested, asked, free, stranded, capacity, .. } = *figures;
    if requested > capacity {
        return Class::LargerThanDevice;
    }
    if figures.reserved as f64 > capacity as f64 * (1.0 + SUM_SLACK_SHARE) {
        return Class::Oversubscribed;
    }
    if free >= asked {
        let is_limited = figures.limit_room.is_some_and(|room| room < asked);
        return if is_limited { Class::Limit } else { Class::Driver };
    }
    let is_negligible = (stranded as f64) < NEGLIGIBLE_SHARE * capacity as f64;
    let missing = requested - free - stranded;
    if is_negligible || missing > 0 {
        let lacking = if missing > 0 { missing } else { requested - free };
        return if figures.private_pools >= lacking && !is_negligible {
            Class::PrivatePool
        } else if is_outside(figures, lacking) {
            Class::Outside
        } else {
            Class::NotFragmentation
        };
    }
    if stranded >= requested { Class::Fragmentation } else { Class::Partly }
}

/// Whether what others hold explains what is lacking.
fn is_outside(figures: &Figures, lacking: i128) -> bool {
    let is_notable = figures.avoidable >= OUTSIDE_BYTES_MIN
        && figures.avoidable as f64 >= OUTSIDE_SHARE_MIN * figures.capacity as f64;
    figures.others >= lacking || (is_notable && figures.avoidable >= lacking)
}

fn is_fragmentation(class: Class, figures: &Figures, stranded_share: f64) -> IsFragmentation {
    // Within a limit as on a device: what is stranded could serve the request.
    const NOTABLE_SHARE: f64 = 0.10;
    match class {
        Class::Fragmentation => IsFragmentation::Yes,
        Class::Partly => IsFragmentation::Partly,
        Class::NearMiss
            if figures.stranded >= figures.requested && stranded_share >= NEGLIGIBLE_SHARE =>
        {
            IsFragmentation::Yes
        }
        Class::Limit
            if figures.stranded >= figures.requested && stranded_share >= NOTABLE_SHARE =>
        {
            IsFragmentation::Partly
        }
        Class::Undecided | Class::DriverPool | Class::Unknown => IsFragmentation::CannotBeTold,
        _ => IsFragmentation::No,
    }
}

/// A part as a share of a whole.
fn share(part_bytes: u64, whole_bytes: u64) -> f64 {
    if whole_bytes == 0 { 0.0 } else { part_bytes as f64 / whole_bytes as f64 }
}

fn clamped(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}
