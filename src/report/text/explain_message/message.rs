//! One out-of-memory message: the answer, the figures, what to do.

use super::super::grid::{Align, Grid};
use super::super::{Style, wrapped};
use super::advice::advice;
use super::{LINES_FOR_OTHERS, LINES_MAX, class_words, heading, share_words, verdict};
use crate::import::{
    Advice, Amount, Certainty, Class, Contradiction, Diagnosis, IsFragmentation, OomMessage,
    Severity, Wording,
};
use crate::units::{Bytes, counted, grouped};

type Explained<'a> = (&'a OomMessage, &'a Diagnosis);

/// A message in full.
pub(super) fn message(file: &str, explained: Explained<'_>, is_full: bool, style: Style) -> String {
    let (message, diagnosis) = explained;
    let mut out = format!("{file}, line {}: {}\n", message.line, what_ran_out(message));
    let (words, rest) = answer(message, diagnosis);
    let is_good = diagnosis.is_fragmentation == IsFragmentation::No;
    out.push_str(&verdict(words, &rest, is_good, style));
    for contradiction in &diagnosis.contradictions {
        out.push_str(&wrapped("Note: ", contradiction_words(*contradiction), "  "));
    }
    if diagnosis.certainty == Certainty::Rounded && diagnosis.class != Class::Undecided {
        let text = "the figures are rounded; within that it could as well be fragmentation whole \
                    instead of partly, or the other way round.";
        if matches!(diagnosis.class, Class::Fragmentation | Class::Partly) {
            out.push_str(&wrapped("Note: ", text, "  "));
        }
    }
    let figures = figures(message, diagnosis);
    if !figures.is_empty() {
        out.push('\n');
        out.push_str(&figures);
    }
    out.push_str(&format!("\n{}\n", heading("what to do", style)));
    for paragraph in advice(message, diagnosis) {
        let paragraph = wrapped("- ", &paragraph, "  ");
        let lines = out.lines().count() + paragraph.lines().count();
        if is_full || lines + LINES_FOR_OTHERS <= LINES_MAX {
            out.push_str(&paragraph);
        }
    }
    if is_full {
        out.push_str(&arithmetic(message, diagnosis, style));
    }
    out
}

/// A message in a line.
pub(super) fn summed_up((message, diagnosis): Explained<'_>) -> String {
    let wanted = message.requested.map(|size| format!(", {} wanted", shown(size)));
    let stranded = message.unallocated.map(|size| format!(", {} stranded", shown(size)));
    format!(
        "line {}: {}: {}{}{}",
        message.line,
        what_ran_out(message),
        class_words(diagnosis.class),
        wanted.unwrap_or_default(),
        stranded.unwrap_or_default(),
    )
}

/// `CUDA out of memory on GPU 0, rank 3, 4 times`
fn what_ran_out(message: &OomMessage) -> String {
    let mut text = match (message.device_kind, message.wording) {
        (_, Wording::TorchHost) => "out of memory of the host".to_owned(),
        (_, Wording::Jax) => "XLA out of memory".to_owned(),
        (_, Wording::TensorFlow) => "TensorFlow out of memory".to_owned(),
        (_, Wording::Rmm) => "RMM out of memory".to_owned(),
        (Some(kind), _) => format!("{kind} out of memory"),
        (None, _) => "out of memory".to_owned(),
    };
    if message.wording == Wording::TorchAsync {
        text.push_str(" (cudaMallocAsync)");
    }
    if let Some(index) = message.device_index {
        let noun = match message.device_kind {
            Some("CUDA" | "HIP" | "XPU") | None => "GPU",
            Some(_) => "device",
        };
        text.push_str(&format!(" on {noun} {index}"));
    }
    if let Some(rank) = message.rank {
        text.push_str(&format!(", rank {rank}"));
    }
    if message.times > 1 {
        text.push_str(&format!(", {}", counted(u64::from(message.times), "time")));
    }
    text
}

fn shown(amount: Amount) -> String {
    Bytes(amount.bytes).to_string()
}

fn told(amount: Option<Amount>) -> String {
    amount.map_or_else(|| "an unknown size".to_owned(), shown)
}

/// The first words of the answer, and the sentence with the deciding number.
fn answer(message: &OomMessage, diagnosis: &Diagnosis) -> (&'static str, String) {
    let wanted = told(message.requested);
    let free = diagnosis.room_bytes.map_or_else(|| told(message.free), |b| Bytes(b).to_string());
    let stranded = told(message.unallocated);
    let share = diagnosis.stranded_share.map(share_words).unwrap_or_default();
    match diagnosis.class {
        Class::NotFragmentation => ("Not fragmentation.", not_fragmentation(message, diagnosis)),
        Class::Outside => ("Not fragmentation.", outside(message, diagnosis)),
        Class::NearMiss => ("Short by bytes, not GiB.", near_miss(message, diagnosis)),
        Class::Fragmentation => (
            "Fragmentation.",
            format!(
                "{stranded} are reserved and hold nothing ({share} of the device, {}): {wanted} in \
                 one piece would have been enough. {}",
                severity_word(diagnosis),
                where_stranded(message)
            ),
        ),
        Class::Partly => (
            "Partly fragmentation.",
            format!(
                "{free} free on the device and {stranded} stranded in the allocator ({share} of \
                 the device, {}) make {} for a request of {wanted}; neither alone is enough.",
                severity_word(diagnosis),
                sum(message.free.or(Some(Amount::exact(0))), message.unallocated),
            ),
        ),
        Class::PrivatePool => (
            "Private pools hold it.",
            format!(
                "{} are free inside private pools (CUDA graphs, MemPool), where {wanted} cannot be \
                 taken from; {free} are free on the device.",
                told(message.private_pools)
            ),
        ),
        Class::Limit => ("A limit, not the device.", limit(message, diagnosis)),
        Class::Driver => ("The driver refused.", driver(message)),
        Class::DriverPool => (
            "The driver's own pool, or others.",
            format!(
                "{} of the device are neither allocated by PyTorch nor free, and {wanted} were \
                 wanted: the pool of cudaMallocAsync is in pieces, or others hold it.",
                told(diagnosis.outside)
            ),
        ),
        Class::LargerThanDevice => ("Not fragmentation.", larger(message)),
        Class::Oversubscribed => (
            "Not fragmentation.",
            format!(
                "The program holds {} on a device of {}: the rest lies in memory of the host.",
                told(message.reserved.or(message.allocated)),
                told(message.capacity)
            ),
        ),
        Class::Undecided => (
            "Cannot be told from rounded figures.",
            format!(
                "{wanted} wanted, {free} free, {stranded} stranded: within half of the last digits \
                 it is fragmentation or it is not."
            ),
        ),
        Class::Unknown if message.wording == Wording::TorchHost => (
            "Not the GPU.",
            format!("The machine's own memory had no {wanted} left; no GPU allocator was asked."),
        ),
        Class::Unknown => ("Too few figures to tell.", unknown(message)),
    }
}

/// Where memory is stranded when PyTorch fails. It gives back wholly free segments before, unless a
/// graph is being captured; private pools in a message tell that graphs are in use.
fn where_stranded(message: &OomMessage) -> &'static str {
    if message.private_pools.is_some() {
        "They lie beside live blocks, or could not be given back while a CUDA graph was captured."
    } else {
        "They lie beside live blocks, since PyTorch gives back wholly free segments before it \
         fails."
    }
}

fn severity_word(diagnosis: &Diagnosis) -> &'static str {
    match diagnosis.severity {
        Some(Severity::Negligible) | None => "negligible",
        Some(Severity::Small) => "small",
        Some(Severity::Notable) => "notable",
        Some(Severity::Large) => "large",
        Some(Severity::Severe) => "severe",
    }
}

fn sum(one: Option<Amount>, other: Option<Amount>) -> String {
    one.zip(other).map_or_else(|| "an unknown sum".to_owned(), |(a, b)| shown(a.plus(b)))
}

fn not_fragmentation(message: &OomMessage, diagnosis: &Diagnosis) -> String {
    let wanted = told(message.requested);
    let missing = diagnosis.missing_bytes.and_then(|bytes| u64::try_from(bytes).ok());
    let stranded = match (message.unallocated, diagnosis.stranded_share) {
        (Some(size), Some(share)) => format!(
            "Stranded in the allocator are {} ({} of the device, {}).",
            shown(size),
            share_words(share),
            severity_word(diagnosis)
        ),
        _ => String::new(),
    };
    match missing.filter(|&bytes| bytes > 0) {
        Some(missing) => format!(
            "Even if everything free were in one piece, {} of the {wanted} would be missing. \
             {stranded}",
            Bytes(missing)
        ),
        None => format!(
            "The device is full of live memory; {wanted} were wanted. {stranded} In one piece that \
             would serve this request, and hardly another."
        ),
    }
}

fn outside(message: &OomMessage, diagnosis: &Diagnosis) -> String {
    let lacking = diagnosis.missing_bytes.and_then(|bytes| u64::try_from(bytes).ok());
    let outside = told(diagnosis.outside);
    if message.wording == Wording::Mps {
        return format!(
            "{outside} are allocated outside PyTorch's allocator, more than its own {}; {} of the \
             request are missing below the limit.",
            told(message.allocated),
            Bytes(lacking.unwrap_or(0))
        );
    }
    let missing = match lacking.filter(|&bytes| bytes > 0) {
        Some(bytes) => format!("the request lacks {}", Bytes(bytes)),
        None => format!("{} were wanted", told(message.requested)),
    };
    format!(
        "{outside} of the device are held outside this allocator, and {missing}. Stranded in the \
         allocator are {} ({} of the device).",
        told(message.unallocated),
        share_words(diagnosis.stranded_share.unwrap_or(0.0))
    )
}

fn near_miss(message: &OomMessage, diagnosis: &Diagnosis) -> String {
    let same = format!(
        "{} wanted and {} free are the same within what is printed and the 2 MiB that devices give \
         out at once.",
        told(message.requested),
        told(message.free)
    );
    let stranded = told(message.unallocated);
    if diagnosis.is_fragmentation == IsFragmentation::Yes {
        format!(
            "{same} {stranded} lie stranded in the allocator: fragmentation made the difference."
        )
    } else {
        format!("{same} Stranded in the allocator are {stranded}: not fragmentation.")
    }
}

fn limit(message: &OomMessage, diagnosis: &Diagnosis) -> String {
    if message.wording == Wording::Mps {
        return format!(
            "{} are allowed; {} in use by PyTorch, {} by others in this process, {} wanted: {} \
             too much.",
            told(message.allowed),
            told(message.allocated),
            told(message.other_allocations),
            told(message.requested),
            Bytes(diagnosis.missing_bytes.map_or(0, |bytes| u64::try_from(bytes).unwrap_or(0)))
        );
    }
    let held = message.reserved.or(message.allocated);
    format!(
        "The process may hold {} and holds {}; {} were wanted, and the device has {} free. Of what \
         it holds, {} are stranded.",
        told(message.allowed),
        told(held),
        told(message.requested),
        told(message.free),
        told(message.unallocated)
    )
}

fn driver(message: &OomMessage) -> String {
    if message.is_block_limit {
        return format!(
            "{} in one block is more than this platform allows.",
            told(message.requested)
        );
    }
    match message.free {
        Some(free) => format!(
            "{} are free on the device and {} were wanted: not the allocator's doing. Stranded in \
             it are {}.",
            shown(free),
            told(message.requested),
            told(message.unallocated)
        ),
        None => format!(
            "{} were wanted and {} of {} are reserved: what is free is not told, but the allocator \
             does not hold it.",
            told(message.requested),
            told(message.reserved),
            told(message.capacity)
        ),
    }
}

fn larger(message: &OomMessage) -> String {
    let whole = match (message.capacity, message.allowed) {
        (Some(capacity), _) => format!("the whole device has ({})", shown(capacity)),
        (None, allowed) => format!("is allowed in all ({})", told(allowed)),
    };
    format!("One request for {}, more than {whole}.", told(message.requested))
}

fn unknown(message: &OomMessage) -> String {
    let wanted = match message.requested {
        Some(requested) => format!("{} were wanted", shown(requested)),
        None => "Memory was refused".to_owned(),
    };
    match (message.planned_total, message.planned_fragmentation) {
        (Some(total), Some(lost)) => format!(
            "{wanted}. The program as compiled needs {} at once, of which {} are lost between its \
             buffers; what the device had free is not told.",
            shown(total),
            shown(lost)
        ),
        _ => format!("{wanted}; what was free and what was stranded is not told."),
    }
}

/// The figures that decide, a line each.
fn figures(message: &OomMessage, diagnosis: &Diagnosis) -> String {
    let mut rows: Vec<(&str, Option<Amount>)> = vec![
        ("wanted", message.requested),
        ("free on the device", message.free),
        ("stranded in the allocator", message.unallocated),
        ("largest hole that could serve", message.largest_hole),
        ("free in private pools", message.private_pools),
        ("allocated", message.allocated),
        ("outside the allocator", diagnosis.outside),
        ("limit of the process", message.allowed),
        ("device", message.capacity),
    ];
    rows.retain(|(_, amount)| amount.is_some());
    if rows.len() < 2 {
        return String::new();
    }
    let mut grid = Grid::new(&[Align::Left, Align::Right]);
    for (name, amount) in rows {
        grid.row([format!("  {name}"), told(amount)], String::new());
    }
    grid.render(Style::default())
}

fn contradiction_words(contradiction: Contradiction) -> &'static str {
    match contradiction {
        Contradiction::FreeExceedsCapacity => {
            "more is free than the device has: it shares the memory of the host, or the driver \
             counts wrongly."
        }
        Contradiction::SumExceedsCapacity => {
            "reserved and free together exceed the device: the figures are not of one moment, or \
             part of it lies in memory of the host."
        }
        Contradiction::ProcessBelowReserved => {
            "the process is said to use less than its allocator holds: the driver does not tell \
             (WSL, containers)."
        }
        Contradiction::ProcessesExceedCapacity => {
            "the processes together use more than the device has: part of it lies in memory of the \
             host, or is shared between them."
        }
        Contradiction::AllocatedExceedsReserved => "more is allocated than reserved.",
    }
}

/// Every figure with its rounding, and the comparisons.
fn arithmetic(message: &OomMessage, diagnosis: &Diagnosis, style: Style) -> String {
    let mut out = format!("\n{}\n", heading("figures as read, in bytes", style));
    let rows = [
        ("requested", message.requested),
        ("free", message.free),
        ("allocated", message.allocated),
        ("active", message.active),
        ("reserved", message.reserved),
        ("unallocated", message.unallocated),
        ("private pools", message.private_pools),
        ("largest hole", message.largest_hole),
        ("allowed", message.allowed),
        ("capacity", message.capacity),
        ("this process", message.in_use_by_process),
        ("other allocations", message.other_allocations),
        ("outside", diagnosis.outside),
    ];
    let mut grid = Grid::new(&[Align::Left, Align::Right, Align::Right]);
    let amounts = rows.into_iter().filter_map(|(name, amount)| Some((name.to_owned(), amount?)));
    let processes = message.processes.iter();
    let processes = processes.map(|other| (format!("process {}", other.process), other.in_use));
    for (name, amount) in amounts.chain(processes) {
        let error = format!("+- {}", grouped(amount.error_bytes));
        grid.row([format!("  {name}"), grouped(amount.bytes), error], String::new());
    }
    out.push_str(&grid.render(Style::default()));
    out.push_str(&format!("\n{}\n", heading("arithmetic", style)));
    for line in steps(message, diagnosis) {
        out.push_str(&wrapped("  ", &line, "    "));
    }
    out
}

fn steps(message: &OomMessage, diagnosis: &Diagnosis) -> Vec<String> {
    let mut lines = vec![format!(
        "class {}, wording {}",
        class_words(diagnosis.class),
        wording_words(message.wording)
    )];
    if let (Some(share), Some(stranded)) = (diagnosis.stranded_share, message.unallocated) {
        lines.push(format!(
            "stranded {} / {} = {} (below 2 % it does not matter)",
            shown(stranded),
            told(message.allowed.filter(|_| diagnosis.class == Class::Limit).or(message.capacity)),
            share_words(share)
        ));
    }
    if let (Some(missing), Some(room)) = (diagnosis.missing_bytes, diagnosis.room_bytes) {
        let sign = if missing < 0 { "-" } else { "" };
        lines.push(format!(
            "wanted {} - room {} - stranded {} = {sign}{} missing",
            told(message.requested),
            Bytes(room),
            told(message.unallocated.or(Some(Amount::exact(0)))),
            Bytes(missing.unsigned_abs())
        ));
    }
    if let (Some(outside), Some(capacity)) = (diagnosis.outside, message.capacity) {
        lines.push(format!(
            "device {} - held by the allocator {} - free {} = {} outside",
            shown(capacity),
            told(message.reserved.or(message.allocated)),
            told(message.free),
            shown(outside)
        ));
    }
    if !message.advice.is_empty() {
        let named: Vec<&str> = message.advice.iter().map(|&advice| advice_words(advice)).collect();
        lines.push(format!("the message itself advises {}", named.join(", ")));
    }
    lines
}

fn wording_words(wording: Wording) -> &'static str {
    match wording {
        Wording::TorchCached => "of PyTorch 1.0 to 1.3",
        Wording::TorchReserved => "of PyTorch 1.4 to 2.0",
        Wording::TorchUnallocated => "of PyTorch 2.1 and later",
        Wording::TorchAsync => "of PyTorch with cudaMallocAsync",
        Wording::Mps => "of PyTorch on Apple's GPUs",
        Wording::TorchHost => "of PyTorch about the host",
        Wording::Jax => "of XLA",
        Wording::TensorFlow => "of TensorFlow",
        Wording::Rmm => "of RMM",
        Wording::Driver => "of the driver",
    }
}

fn advice_words(advice: Advice) -> &'static str {
    match advice {
        Advice::MaxSplitSize => "max_split_size_mb",
        Advice::ExpandableSegments => "expandable_segments:True",
        Advice::EmptyCache => "empty_cache",
        Advice::HighWatermark => "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    }
}
