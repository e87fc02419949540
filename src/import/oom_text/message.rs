//! Out-of-memory messages: their wordings and the figures in them.
//!
//! The one design decision: a message is not matched as a whole. An anchor says that one begins,
//! and every figure is then looked for by the words beside it, so that a wording nobody has met
//! yet still gives up the figures that it shares with the others.

use std::collections::HashMap;

use serde::Serialize;

use super::amount::{Amount, Printed, leading, split_number, trailing};
use super::clean::Squeezed;

/// Which program words a message so, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wording {
    /// PyTorch 1.0 to 1.3: `... already allocated; ... free; ... cached)`. Cached is what the
    /// allocator holds beside what is allocated (pytorch#13751).
    TorchCached,
    /// PyTorch 1.4 to 2.0, and devices that follow it: `... reserved in total by PyTorch)`.
    TorchReserved,
    /// PyTorch since 2.1: `... is reserved by PyTorch but unallocated`.
    TorchUnallocated,
    /// PyTorch with `backend:cudaMallocAsync`: four lines from `Currently allocated` on.
    TorchAsync,
    /// PyTorch on Apple's GPUs: `MPS backend out of memory`.
    Mps,
    /// PyTorch about memory of the host: `DefaultCPUAllocator: ... you tried to allocate`.
    TorchHost,
    /// JAX and XLA: `RESOURCE_EXHAUSTED: Out of memory`.
    Jax,
    /// TensorFlow's allocator: `ran out of memory trying to allocate`.
    TensorFlow,
    /// RAPIDS' memory manager: `std::bad_alloc`.
    Rmm,
    /// Only that a driver refused: `CUDA error: out of memory`.
    Driver,
}

/// What a message tells people to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// `max_split_size_mb`.
    MaxSplitSize,
    /// `expandable_segments:True`.
    ExpandableSegments,
    /// `empty_cache`.
    EmptyCache,
    /// `PYTORCH_MPS_HIGH_WATERMARK_RATIO`.
    HighWatermark,
}

/// Memory that a process listed in a message has in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ProcessUse {
    /// The process, as the driver numbers it.
    pub process: u64,
    /// What it has in use.
    pub in_use: Amount,
}

/// One message. Figures that it does not tell are absent.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct OomMessage {
    /// Line of the text that it begins in, from 1.
    pub line: u32,
    /// How often it stands in the text with the same figures.
    pub times: u32,
    /// The rank that the line names in front.
    pub rank: Option<u32>,
    /// Which wording.
    pub wording: Wording,
    /// What ran out: `CUDA`, `HIP`, `XPU`, `NPU`, `MPS`, ...
    pub device_kind: Option<&'static str>,
    /// Which of them.
    pub device_index: Option<u32>,
    /// What was tried to allocate. Since PyTorch 1.0 this is what the device was asked for: a
    /// segment of 2 MiB for requests up to 1 MiB, of 20 MiB below 10 MiB, else whole 2 MiB.
    pub requested: Option<Amount>,
    /// All memory of the device.
    pub capacity: Option<Amount>,
    /// Free memory, as the driver tells it.
    pub free: Option<Amount>,
    /// Allocated to the program.
    pub allocated: Option<Amount>,
    /// Allocated or waiting for another stream.
    pub active: Option<Amount>,
    /// Reserved by the allocator in total.
    pub reserved: Option<Amount>,
    /// Reserved and not allocated: what is stranded in the allocator.
    pub unallocated: Option<Amount>,
    /// The limit of the process, if it has one.
    pub allowed: Option<Amount>,
    /// Free memory inside private pools, which only their owners can use. PyTorch counts it as
    /// allocated in this message (pytorch#124673).
    pub private_pools: Option<Amount>,
    /// The largest free range that could serve the request, as fraglab's plug-in tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_hole: Option<Amount>,
    /// What this process has in use with everything beside PyTorch.
    pub in_use_by_process: Option<Amount>,
    /// Other processes, or this one as the driver of a container's host numbers it.
    pub processes: Vec<ProcessUse>,
    /// MPS: what others have allocated.
    pub other_allocations: Option<Amount>,
    /// JAX: what the compiled program needs at once.
    pub planned_total: Option<Amount>,
    /// JAX: how much of that is lost to fragmentation in the compiler's own plan.
    pub planned_fragmentation: Option<Amount>,
    /// The platform allows no block of this size, whatever is free.
    pub is_block_limit: bool,
    /// RMM: the pool may not grow any more.
    pub is_pool_full: bool,
    /// What the message advises.
    pub advice: Vec<Advice>,
    /// The text names `expandable_segments:True` beside the advice: it may be on already.
    pub names_expandable_segments: bool,
}

impl OomMessage {
    fn new(wording: Wording, squeezed: &Squeezed, offset: usize) -> OomMessage {
        OomMessage {
            line: squeezed.number_at(offset),
            times: 1,
            rank: squeezed.rank_at(offset),
            wording,
            device_kind: None,
            device_index: None,
            requested: None,
            capacity: None,
            free: None,
            allocated: None,
            active: None,
            reserved: None,
            unallocated: None,
            allowed: None,
            private_pools: None,
            largest_hole: None,
            in_use_by_process: None,
            processes: Vec::new(),
            other_allocations: None,
            planned_total: None,
            planned_fragmentation: None,
            is_block_limit: false,
            is_pool_full: false,
            advice: Vec::new(),
            names_expandable_segments: false,
        }
    }
}

/// Longest message, in bytes without spaces. Lists of processes make them long.
const MESSAGE_BYTES_MAX: usize = 4000;
/// How far in front of its request a message begins, in bytes without spaces.
const HEAD_BYTES_MAX: usize = 160;

/// Words that begin a message with figures, without spaces.
const ANCHORS: [(&str, Wording); 7] = [
    ("triedtoallocate", Wording::TorchUnallocated),
    ("currentlyallocated:", Wording::TorchAsync),
    ("resource_exhausted:outofmemory", Wording::Jax),
    ("resourceexhausted:outofmemory", Wording::Jax),
    ("ranoutofmemorytryingtoallocate", Wording::TensorFlow),
    ("std::bad_alloc:", Wording::Rmm),
    ("rmm_error_out_of_memory", Wording::Rmm),
];

/// Words of a refusal without figures.
const BARE: [(&str, &str); 9] = [
    ("cudaerror:outofmemory", "CUDA"),
    ("cudaoutofmemory", "CUDA"),
    ("cuda_error_out_of_memory", "CUDA"),
    ("cudaerrormemoryallocation", "CUDA"),
    ("cudaruntimeerror(2):outofmemory", "CUDA"),
    ("cudaruntimeerr(2):outofmemory", "CUDA"),
    ("hiperror:outofmemory", "HIP"),
    ("hiperroroutofmemory", "HIP"),
    ("hipoutofmemory", "HIP"),
];

/// What may run out of memory, as it is written without spaces, and its name.
const KINDS: [(&str, &str); 9] = [
    ("cuda", "CUDA"),
    ("hip", "HIP"),
    ("xpu", "XPU"),
    ("npu", "NPU"),
    ("mpsbackend", "MPS"),
    ("mlu", "MLU"),
    ("musa", "MUSA"),
    ("hpu", "HPU"),
    ("gcu", "GCU"),
];

/// Most different messages that are kept of a text.
const MESSAGES_MAX: usize = 1000;

/// Every message of a text, each once, in the order of their first lines, and how many more there
/// are than are kept.
pub(super) fn read_messages(squeezed: &Squeezed) -> (Vec<OomMessage>, u64) {
    let mut anchors: Vec<(usize, Wording)> = Vec::new();
    for (words, wording) in ANCHORS {
        anchors.extend(squeezed.text.match_indices(words).map(|(at, _)| (at, wording)));
    }
    anchors.sort_by_key(|&(at, _)| at);
    let mut collected = Collected::default();
    for (index, &(at, wording)) in anchors.iter().enumerate() {
        let next = anchors.get(index + 1).map_or(usize::MAX, |&(next, _)| next);
        let from = if index == 0 { 0 } else { anchors[index - 1].0 };
        let Some(message) = read_message(squeezed, wording, from, at, next) else { continue };
        collected.push(message);
    }
    if collected.messages.is_empty() {
        for (words, kind) in BARE {
            for (at, _) in squeezed.text.match_indices(words) {
                let mut message = OomMessage::new(Wording::Driver, squeezed, at);
                message.device_kind = Some(kind);
                collected.push(message);
            }
        }
        collected.messages.sort_by_key(|message| message.line);
    }
    let Collected { mut messages, left_out, .. } = collected;
    let names_expandable = names_expandable_segments(&squeezed.text);
    for message in &mut messages {
        message.names_expandable_segments = names_expandable;
    }
    (messages, left_out)
}

/// Messages, each once.
#[derive(Default)]
struct Collected {
    messages: Vec<OomMessage>,
    /// Where each stands; the keys are messages without their place.
    places: HashMap<OomMessage, usize>,
    left_out: u64,
}

impl Collected {
    /// Adds a message, or counts it if it is there already.
    fn push(&mut self, message: OomMessage) {
        let key = OomMessage { line: 0, ..message.clone() };
        if let Some(&place) = self.places.get(&key) {
            let times = &mut self.messages[place].times;
            *times = times.saturating_add(1);
        } else if self.messages.len() < MESSAGES_MAX {
            self.places.insert(key, self.messages.len());
            self.messages.push(message);
        } else {
            self.left_out += 1;
        }
    }
}

/// Whether the option is named anywhere but in PyTorch's own advice.
fn names_expandable_segments(text: &str) -> bool {
    const OPTION: &str = "expandable_segments:true";
    let mut places = text.match_indices(OPTION);
    places.any(|(at, _)| !text[at + OPTION.len()..].starts_with("toavoidfragmentation"))
}

/// The message of an anchor, between the anchors before and after it.
fn read_message(
    squeezed: &Squeezed,
    wording: Wording,
    from: usize,
    at: usize,
    next: usize,
) -> Option<OomMessage> {
    let body = squeezed.after(at, MESSAGE_BYTES_MAX.min(next - at));
    let head = squeezed.before(at, HEAD_BYTES_MAX.min(at - from));
    let mut message = OomMessage::new(wording, squeezed, at);
    match wording {
        Wording::TorchAsync => read_async(&mut message, body, head)?,
        Wording::Jax => read_jax(&mut message, body),
        Wording::TensorFlow => {
            message.requested = Some(saturated(after(body, "tryingtoallocate")?));
        }
        Wording::Rmm => read_rmm(&mut message, body),
        _ => read_torch(&mut message, body, head)?,
    }
    Some(message)
}

/// `Tried to allocate ...`, in all wordings of PyTorch but that of cudaMallocAsync.
fn read_torch(message: &mut OomMessage, body: &str, head: &str) -> Option<()> {
    message.requested = Some(saturated(after(body, "triedtoallocate")?));
    if head.contains("defaultcpuallocator") {
        message.wording = Wording::TorchHost;
        return Some(());
    }
    message.device_kind = kind_of(head);
    message.is_block_limit = head.contains("cannotallocatememoryblockwithsizelargerthan");
    if message.device_kind == Some("MPS") {
        message.wording = Wording::Mps;
        let head = &head[head.rfind("mpsbackend")?..];
        message.allocated = size_after(head, "mpsallocated:");
        message.other_allocations = size_after(head, "otherallocations:");
        message.allowed = size_after(head, "maxallowed:");
        message.advice = advice(body);
        return Some(());
    }
    if message.is_block_limit {
        message.device_kind = message.device_kind.or(Some("XPU"));
    }
    message.device_index = device_index(body);
    let place = body.find("isreservedbypytorchbutunallocated");
    message.wording = match (place, body.find("cached)")) {
        (Some(_), _) => Wording::TorchUnallocated,
        (None, Some(_)) => Wording::TorchCached,
        (None, None) => Wording::TorchReserved,
    };
    message.capacity = size_before(body, "totalcapacity")
        .or_else(|| size_after(body, "atotalcapacityof"))
        // So spelt in 2.1.
        .or_else(|| size_after(body, "atotalcapactyof"));
    message.free = size_before(body, "isfree").or_else(|| size_before(body, "free;"));
    message.allocated =
        size_before(body, "isallocatedbypytorch").or_else(|| size_before(body, "alreadyallocated"));
    message.active = size_before(body, "currentactive");
    message.allowed = size_before(body, "allowed;");
    message.private_pools = size_before(body, "allocatedinprivatepools");
    message.largest_hole = size_after(body, "largestholethatcouldservetherequestis");
    message.reserved = size_before(body, "reservedintotalbypytorch");
    message.unallocated = size_before(body, "isreservedbypytorchbutunallocated")
        .or_else(|| size_before(body, "cached)"));
    complete_sums(message);
    read_processes(message, body);
    message.advice = advice(body);
    Some(())
}

/// Of allocated, reserved and unallocated, the third from the two that are told.
fn complete_sums(message: &mut OomMessage) {
    match (message.allocated, message.reserved, message.unallocated) {
        (Some(allocated), Some(reserved), None) => {
            message.unallocated = Some(reserved.minus(allocated));
        }
        (Some(allocated), None, Some(unallocated)) => {
            message.reserved = Some(allocated.plus(unallocated));
        }
        _ => {}
    }
}

/// `Process 7 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has ...`.
fn read_processes(message: &mut OomMessage, body: &str) {
    const WORDS: &str = "memoryinuse";
    let end = body.find("oftheallocatedmemory").unwrap_or(body.len());
    let body = &body[..end];
    let mut from = 0;
    for (at, _) in body.match_indices(WORDS) {
        let sentence = &body[from..at];
        from = at + WORDS.len();
        let Some(in_use) = trailing(sentence).and_then(Printed::size) else { continue };
        if sentence.contains("thisprocesshas") {
            message.in_use_by_process = Some(in_use);
        } else if let Some(place) = sentence.rfind("process")
            && let Some((process, _)) = split_number(&sentence[place + "process".len()..])
            && let Ok(process) = process.parse()
        {
            message.processes.push(ProcessUse { process, in_use });
        }
    }
}

/// The lines of cudaMallocAsync. Nothing if no request follows: other programs print
/// `currently allocated` too.
fn read_async(message: &mut OomMessage, body: &str, head: &str) -> Option<()> {
    message.requested = Some(saturated(after(body, "requested:")?));
    message.allocated = size_after(body, "currentlyallocated:");
    message.capacity = size_after(body, "devicelimit:");
    message.free = size_after(body, "free(accordingtocuda):");
    // All ones stand for no limit.
    message.allowed = size_after(body, "pytorchlimit(setbyuser-suppliedmemoryfraction):");
    message.device_kind = Some("CUDA");
    let device = head.rfind("allocationondevice");
    message.device_index = device.and_then(|at| number_after(&head[at..], "allocationondevice"));
    Some(())
}

/// `Out of memory while trying to allocate N bytes`, and the statistics of the compiled program.
fn read_jax(message: &mut OomMessage, body: &str) {
    let request = after(body, "tryingtoallocate").or_else(|| after(body, "memoryallocating"));
    message.requested = request.map(saturated);
    message.planned_total = size_after(body, "totalallocation:");
    message.planned_fragmentation = size_after(body, "totalfragmentation:");
}

/// What RMM says of a refusal.
fn read_rmm(message: &mut OomMessage, body: &str) {
    const NEAR: usize = 600;
    let body = body.get(..NEAR).unwrap_or(body);
    let request = after(body, "failedtoallocate").or_else(|| after(body, "tryingtoallocate"));
    message.requested = request.map(saturated);
    message.is_pool_full = body.contains("maximumpoolsizeexceeded");
    message.device_kind = Some("CUDA");
}

fn kind_of(head: &str) -> Option<&'static str> {
    let at = head.rfind("outofmemory")?;
    let before = &head[..at];
    KINDS.iter().find(|(word, _)| before.ends_with(word)).map(|&(_, name)| name)
}

/// `GPU 0`, `NPU 3` soon after the request.
fn device_index(body: &str) -> Option<u32> {
    const NEAR: usize = 60;
    let near = body.char_indices().nth(NEAR).map_or(body, |(end, _)| &body[..end]);
    ["gpu", "npu", "xpu", "device"].iter().find_map(|word| number_after(near, word))
}

fn number_after(text: &str, words: &str) -> Option<u32> {
    let (number, _) = split_number(&text[text.find(words)? + words.len()..])?;
    number.trim_end_matches('.').parse().ok()
}

fn advice(body: &str) -> Vec<Advice> {
    let words = [
        ("max_split_size_mb", Advice::MaxSplitSize),
        ("expandable_segments:true", Advice::ExpandableSegments),
        ("empty_cache", Advice::EmptyCache),
        ("high_watermark_ratio", Advice::HighWatermark),
    ];
    words.iter().filter(|(word, _)| body.contains(word)).map(|&(_, advice)| advice).collect()
}

/// The size that follows the first occurrence of some words.
fn after(text: &str, words: &str) -> Option<Printed> {
    leading(text[text.find(words)? + words.len()..].trim_start_matches(':'))
}

fn size_after(text: &str, words: &str) -> Option<Amount> {
    after(text, words)?.size()
}

/// The size in front of the first occurrence of some words that has one.
fn size_before(text: &str, words: &str) -> Option<Amount> {
    text.match_indices(words).find_map(|(at, _)| trailing(&text[..at]))?.size()
}

/// A request beyond all sizes is still a request: the largest size there is.
fn saturated(printed: Printed) -> Amount {
    printed.size().unwrap_or(Amount::exact(u64::MAX >> 1))
}
