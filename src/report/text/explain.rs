//! The answer of `explain` for a trace: at most 25 lines, the rest on demand.
//!
//! ```text
//!   what was replayed
//!   the verdict: class, how much, of how much
//!     what it is made of, at one moment     the request of that moment     what pins
//!   what was replayed and helps
//!   how much would have been enough without any change; growth
//! ```

use super::grid::{Cell, Grid};
use super::{SizeUnit, Style, Tone, counted, duration, grouped, percent, printable, wrapped};
use crate::engine::Status;
use crate::experiment::explain::{
    Class, Explanation, Fix, FixKind, MomentFigures, RefusalFigures, SEVERE_SHARE,
};
use crate::metrics::PinGroup;
use crate::trace::Role;
use crate::units::Bytes;

/// How much room the parts of an answer have.
#[derive(Clone, Copy)]
struct Room {
    /// Groups of pins.
    pins: usize,
    /// What helps.
    fixes: usize,
    /// The reserved peak beside a refusal.
    peak: bool,
    /// Everything, however long.
    full: bool,
}

impl Room {
    const fn of(pins: usize, fixes: usize, peak: bool) -> Room {
        Room { pins, fixes, peak, full: false }
    }
}

/// Lines of a short answer.
const SHORT_LINES: usize = 25;
/// From roomy to narrow: the first that gives a short answer is taken.
const SHORT_ROOMS: [Room; 5] = [
    Room::of(3, 4, true),
    Room::of(2, 3, true),
    Room::of(2, 3, false),
    Room::of(1, 2, false),
    Room::of(0, 1, false),
];
/// Longest name from a file in a short answer, in characters.
const NAME_CHARS_MAX: usize = 60;

/// What an explanation says, in at most 25 lines or in full.
pub fn explain(explanation: &Explanation, full: bool, style: Style) -> String {
    if full {
        let room = Room { pins: usize::MAX, fixes: usize::MAX, peak: true, full };
        return answer(explanation, room, style);
    }
    let mut text = String::new();
    for room in SHORT_ROOMS {
        text = answer(explanation, room, style);
        if text.lines().count() <= SHORT_LINES {
            break;
        }
    }
    text
}

fn answer(explanation: &Explanation, room: Room, style: Style) -> String {
    let mut text = heading(explanation);
    text.push_str(&verdict(explanation, style));
    if let Some(refusal) = &explanation.refusal {
        text.push_str(&refused(refusal));
        text.push_str(&moment(&refusal.moment, "at the refusal", explanation, room));
    }
    let is_short = explanation.refusal.is_some() && !room.full;
    match &explanation.peak {
        Some(peak) if is_short && room.peak => {
            text.push_str(&wrapped("  ", &held_line(peak, "at the reserved peak", false), "    "));
        }
        Some(peak) if !is_short => {
            text.push_str(&moment(peak, "at the reserved peak", explanation, room));
        }
        _ => {}
    }
    if let Some(asked) = &explanation.asked {
        text.push_str(&moment(asked, "as asked for", explanation, room));
    }
    if let Some(hint) = hint(explanation) {
        text.push_str(&wrapped("  ", hint, "    "));
    }
    text.push_str(&fixes(explanation, room, style));
    text.push_str(&enough(explanation));
    text.push_str(&growth(explanation));
    if room.full {
        for (at, moment) in [
            ("the refusal", explanation.refusal.as_ref().map(|refusal| &refusal.moment)),
            ("the reserved peak", explanation.peak.as_ref()),
            ("the event asked for", explanation.asked.as_ref()),
        ] {
            text.push_str(&moment.map_or_else(String::new, |moment| holes(moment, at)));
        }
    }
    text
}

/// The name of a trace; what came through a pipe has none.
fn trace_named(name: &str) -> String {
    if name.is_empty() { "trace".to_owned() } else { named(name) }
}

/// A name from a file, fit for a terminal and not too long.
fn named(name: &str) -> String {
    let name = printable(name);
    match name.char_indices().nth(NAME_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.into_owned(),
    }
}

fn heading(explanation: &Explanation) -> String {
    let result = &explanation.result;
    let trace = &result.trace;
    let mut parts = vec![
        format!("{}: {}", trace_named(&trace.name), counted(trace.events, "event")),
        named(&trace.source),
    ];
    if let Some(bytes) = result.device.capacity_bytes {
        parts.push(format!("device {}", Bytes(bytes)));
    }
    if let Some(bytes) = result.allocator.limit_bytes {
        parts.push(format!("limit {}", Bytes(bytes)));
    }
    parts.push(match explanation.settings.as_str() {
        "" => "default settings".to_owned(),
        settings => named(settings),
    });
    if trace.history_share < 1.0 {
        parts.push(format!("{} of the run seen", percent(trace.history_share)));
    }
    wrapped("", &parts.join(", "), "  ")
}

/// What the class means.
fn meaning(class: Class) -> &'static str {
    match class {
        Class::None => "not fragmentation",
        Class::Hard => "fragmentation, hard: live blocks lie between what is free",
        Class::Soft => "fragmentation, soft: what is free lies in pieces that cannot join",
        Class::Stream => {
            "fragmentation by stream or pool: what is free belongs to another one, or to a pool \
             that cannot give it back"
        }
        Class::Internal => "fragmentation, internal: rounding inside of allocated blocks",
        Class::Deferred => "deferred frees: freed memory was still in use by another stream",
        Class::Driver => "not the allocator: the device refused although it had room",
        Class::Settings => "the settings: without one of them half of it is gone, or all",
        Class::Leak => "not fragmentation: live memory grows from step to step",
    }
}

fn verdict(explanation: &Explanation, style: Style) -> String {
    let tone = match explanation.class {
        Class::None | Class::Driver | Class::Leak => Tone::Heading,
        _ => Tone::Bad,
    };
    let text = format!("{}. {}", meaning(explanation.class), amount(explanation));
    let mut letters = text.chars();
    let first = letters.next().map_or_else(String::new, |letter| letter.to_uppercase().to_string());
    let text = wrapped("", &(first + letters.as_str()), "  ");
    match text.split_once('.') {
        Some((class, rest)) => format!("{}.{rest}", style.paint(tone, class)),
        None => text,
    }
}

/// How much it is, and of how much.
fn amount(explanation: &Explanation) -> String {
    if let Some(refusal) = &explanation.refusal
        && let (Some(short), Some(bound)) = (refusal.short_bytes, refusal.bound_bytes)
    {
        let moment = &refusal.moment;
        return format!(
            "Live memory of {} and the request of {} are {} more than the {} there are: no \
             allocator and no setting can help; {} of it was unused ({})",
            Bytes(moment.requested_bytes),
            Bytes(moment.request_bytes),
            Bytes(short),
            Bytes(bound),
            Bytes(unused(moment)),
            percent(explanation.unused_share),
        );
    }
    let deciding = explanation.refusal.as_ref().map(|refusal| &refusal.moment);
    let Some(moment) = deciding.or(explanation.peak.as_ref()) else {
        return "Nothing was held.".to_owned();
    };
    if explanation.class == Class::None && explanation.refusal.is_none() {
        let result = &explanation.result;
        return format!(
            "{} held at most for {} live at most: {} more ({}), too little to tune",
            Bytes(result.peaks.reserved_bytes_peak),
            Bytes(result.peaks.requested_bytes_peak),
            Bytes(u64::try_from(result.excess_bytes).unwrap_or(0)),
            percent(result.fragmentation),
        );
    }
    let severity = match explanation.unused_share {
        _ if explanation.class == Class::None => "too little to tune",
        share if share >= SEVERE_SHARE => "severe",
        _ => "moderate",
    };
    format!(
        "{} of {} held were unused ({}, {severity})",
        Bytes(unused(moment)),
        Bytes(moment.reserved_bytes),
        percent(explanation.unused_share),
    )
}

/// What can be done in the program, beside settings.
fn hint(explanation: &Explanation) -> Option<&'static str> {
    let deciding = explanation.refusal.as_ref().map(|refusal| &refusal.moment);
    let deciding = deciding.or(explanation.peak.as_ref())?;
    Some(match explanation.class {
        Class::Stream if deciding.split.stream_bytes < deciding.split.soft_bytes => {
            "while a pool is entered nothing is given back: outside of the pool, or without one, \
             what is wholly free would be"
        }
        Class::Stream => "free memory serves its own stream and pool only, until it is given back",
        Class::Deferred => {
            "record_stream keeps memory until the other stream is done: fewer copies in flight, or \
             an event to wait for instead (TORCH_NCCL_AVOID_RECORD_STREAMS=1 for collectives)"
        }
        Class::Driver => {
            "look outside of the allocator: other processes, contexts and libraries, limits of the \
             driver or the container"
        }
        Class::Leak => "find what the program keeps from one step to the next: see the pins",
        _ => return None,
    })
}

fn unused(moment: &MomentFigures) -> u64 {
    moment.reserved_bytes.saturating_sub(moment.requested_bytes)
}

fn refused(refusal: &RefusalFigures) -> String {
    let moment = &refusal.moment;
    let mut text = format!(
        "refused: {} at event {}{}{}",
        Bytes(moment.request_bytes),
        grouped(moment.request_event),
        place(" of ", moment.request_phase.as_deref()),
        place(", ", moment.request_site.as_deref()),
    );
    match (refusal.replayed, refusal.recorded) {
        (true, true) => text.push_str(", as in the recorded run"),
        (false, _) => text.push_str(" of the recorded run; the replay met it"),
        (true, false) => {}
    }
    let bounds = [("limit", refusal.limit_bytes), ("capacity", refusal.capacity_bytes)];
    for (name, bytes) in bounds.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))) {
        text.push_str(&format!("; {name} {}", Bytes(bytes)));
    }
    if refusal.refusals > 1 {
        text.push_str(&format!("; {} refused in all", grouped(refusal.refusals)));
    }
    wrapped("  ", &text, "    ")
}

fn place(before: &str, place: Option<&str>) -> String {
    place.map_or_else(String::new, |place| format!("{before}{}", named(place)))
}

/// What is held at a moment, what it is looked at for, and what pins.
fn moment(moment: &MomentFigures, at: &str, explanation: &Explanation, room: Room) -> String {
    let mut text = wrapped("  ", &held_line(moment, at, room.full), "    ");
    text.push_str(&wrapped("  ", &request_line(moment, explanation), "    "));
    text.push_str(&pins(moment, room));
    text
}

/// What is held, and what of it is unused and why; kinds of which there is nothing only in full.
fn held_line(moment: &MomentFigures, at: &str, full: bool) -> String {
    let split = &moment.split;
    let kinds = [
        (split.internal_bytes, "internal"),
        (split.deferred_bytes, "deferred"),
        (split.stream_bytes, "other stream or pool"),
        (split.hard_bytes, "hard"),
        (split.soft_bytes, "soft"),
    ];
    let kinds = kinds.into_iter().filter(|(bytes, _)| full || *bytes > 0);
    let parts: Vec<String> =
        kinds.map(|(bytes, kind)| format!("{kind} {}", Bytes(bytes))).collect();
    format!(
        "{at} (event {}): {} held, {} live; {}",
        grouped(split.at_event),
        Bytes(moment.reserved_bytes),
        Bytes(moment.requested_bytes),
        if parts.is_empty() { "nothing unused".to_owned() } else { parts.join(", ") },
    )
}

fn request_line(moment: &MomentFigures, explanation: &Explanation) -> String {
    let free: u64 = moment.holes.iter().map(|group| group.size_bytes).sum();
    let holes: u64 = moment.holes.iter().map(|group| group.holes).sum();
    let refusal = explanation.refusal.as_ref().filter(|refusal| refusal.moment == *moment);
    let hole = format!("largest hole for it {}", Bytes(moment.largest_hole_bytes));
    let hole = match moment.request_bytes.saturating_sub(moment.largest_hole_bytes) {
        0 => hole,
        short if moment.largest_hole_bytes > 0 => format!("{hole}, {} too small", Bytes(short)),
        _ => "no hole for it".to_owned(),
    };
    let mut text = match refusal {
        Some(_) => hole,
        None => format!(
            "wanted then: {}{}{}; {hole}",
            Bytes(moment.request_bytes),
            place(" in ", moment.request_phase.as_deref()),
            place(", ", moment.request_site.as_deref()),
        ),
    };
    if let Some(bytes) = moment.device_free_bytes.filter(|_| refusal.is_some()) {
        text.push_str(&format!("; the device had {}", Bytes(bytes)));
    }
    text.push_str(&format!(
        "; {} free in {} of {}, {} wholly free",
        Bytes(free),
        counted(holes, "piece"),
        counted(moment.segments, "segment"),
        moment.whole_segments,
    ));
    text
}

fn pins(moment: &MomentFigures, room: Room) -> String {
    let shown = room.pins.min(moment.pins.len());
    let mut text = String::new();
    for pin in moment.pins.iter().take(shown) {
        text.push_str(&wrapped("    pinned by ", &pin_line(pin), "      "));
    }
    if moment.pins.len() > shown {
        let rest: u64 = moment.pins[shown..].iter().map(|pin| pin.stranded_bytes).sum();
        let groups = moment.pins.len() - shown;
        text.push_str(&format!("    and by {} more (--full): {}\n", groups, Bytes(rest)));
    }
    text
}

fn pin_line(pin: &PinGroup) -> String {
    let mut text = format!("{} of {}", counted(pin.blocks, "block"), Bytes(pin.size_bytes));
    if pin.role != Role::Unknown {
        text.push_str(&format!(", {}", role(pin.role)));
    }
    if !pin.names.is_empty() {
        let more = if pin.blocks > pin.names.len() as u64 { ", ..." } else { "" };
        text.push_str(&format!(" ({}{more})", named(&pin.names.join(", "))));
    }
    text.push_str(&place(" from ", pin.phase.as_deref()));
    let before = if pin.phase.is_some() { ", " } else { " from " };
    text.push_str(&place(before, pin.site.as_deref()));
    text.push_str(&format!(
        ", {} old: {} in {}",
        match pin.age_ns_max {
            0 => counted(pin.age_events_max, "event"),
            ns => duration(ns),
        },
        Bytes(pin.stranded_bytes),
        counted(pin.segments, "segment"),
    ));
    text
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Unknown => "unknown",
        Role::Parameter => "parameters",
        Role::Gradient => "gradients",
        Role::Optimizer => "optimizer state",
        Role::Activation => "activations",
        Role::Checkpoint => "checkpoints",
        Role::Temporary => "temporaries",
        Role::Communication => "communication buffers",
    }
}

fn fixes(explanation: &Explanation, room: Room, style: Style) -> String {
    if explanation.class == Class::None && !room.full {
        return no_cure(explanation);
    }
    if explanation.fixes.is_empty() {
        let tried = counted(explanation.replays, "replay");
        let gained = match &explanation.refusal {
            Some(_) => "met the request",
            None => "saved a tenth of it",
        };
        let text = format!("in {tried} no setting of PyTorch's allocator {gained}");
        return wrapped("", &text, "  ");
    }
    let result = &explanation.result;
    let peaks = explanation
        .fixes
        .iter()
        .map(|fix| fix.tried.reserved_bytes_peak)
        .chain([result.peaks.reserved_bytes_peak]);
    let unit = SizeUnit::fitting(peaks.max().unwrap_or(0));
    let mut grid = Grid::of_columns(2, 4);
    // A run that goes on where another was refused may well hold more.
    let is_refused = result.outcome.status != Status::Ok;
    let gain = if is_refused { "retries" } else { "saved" };
    let held = format!("held {}", unit.name);
    grid.head(["what helps, replayed", "", &held, gain, "calls", "time"]);
    let retries = result.counters.get("alloc_retries").copied().unwrap_or(0);
    let now = [
        Cell::from("as it was".to_owned()),
        Cell::from(status(
            result.outcome.status,
            result.counters.get("ooms").copied().unwrap_or(0),
        )),
        Cell::from(unit.cell(result.peaks.reserved_bytes_peak)),
        Cell::from(if is_refused { grouped(retries) } else { String::new() }),
        Cell::from(grouped(result.calls.total())),
        Cell::from(duration(result.time.allocator_device_ns)),
    ];
    grid.row(now, String::new());
    for fix in shown_fixes(explanation, room) {
        let tried = &fix.tried;
        let saved = result.peaks.reserved_bytes_peak as i64 - tried.reserved_bytes_peak as i64;
        grid.row(
            [
                Cell::toned(fix_name(explanation, fix), Tone::Good),
                Cell::from(status(tried.status, tried.refusals)),
                Cell::from(unit.cell(tried.reserved_bytes_peak)),
                Cell::from(if is_refused {
                    grouped(tried.alloc_retries)
                } else {
                    unit.signed_cell(saved)
                }),
                Cell::from(grouped(tried.device_calls)),
                Cell::from(duration(tried.device_ns)),
            ],
            String::new(),
        );
    }
    grid.render(style)
}

/// `ok`, or how many requests were refused.
fn status(status: Status, refusals: u64) -> String {
    match status {
        Status::Oom => format!("{} refused", grouped(refusals)),
        status => status.name().to_owned(),
    }
}

/// What settings are worth where next to nothing is unused.
fn no_cure(explanation: &Explanation) -> String {
    let Some(refusal) = &explanation.refusal else { return String::new() };
    let met = explanation.fixes.iter().filter(|fix| fix.tried.status == Status::Ok).count() as u64;
    let mut text = format!(
        "of {} with other settings {} find room for this one request (--full)",
        counted(explanation.replays, "replay"),
        grouped(met),
    );
    if refusal.recorded {
        text.push_str("; the recorded run ends here and would have asked for more");
    }
    text.push_str(": make the batch, the sequence or the model smaller, or take a larger device");
    wrapped("", &text, "  ")
}

/// In short the best of each option, in full all.
fn shown_fixes(explanation: &Explanation, room: Room) -> Vec<&Fix> {
    let mut shown: Vec<&Fix> = Vec::new();
    let mut options: Vec<String> = Vec::new();
    let any_is_ok = explanation.fixes.iter().any(|fix| fix.tried.status == Status::Ok);
    let worth = |fix: &&Fix| room.full || !any_is_ok || fix.tried.status == Status::Ok;
    for fix in explanation.fixes.iter().filter(worth) {
        let change = fix_name(explanation, fix);
        let option = change.split(':').next().unwrap_or(&change).to_owned();
        if room.full || !options.contains(&option) && shown.len() < room.fixes {
            options.push(option);
            shown.push(fix);
        }
    }
    shown
}

/// What is different from what was recorded.
fn fix_name(explanation: &Explanation, fix: &Fix) -> String {
    match fix.kind {
        FixKind::Settings => named(&settings_change(explanation, &fix.what)),
        FixKind::EmptyCache => "torch.cuda.empty_cache() each step".to_owned(),
        FixKind::ResearchAfterFlush => "a search after the flush (research_after_flush)".to_owned(),
    }
}

/// The options of a settings string that are new or other, and the names of those left out.
fn settings_change(explanation: &Explanation, settings: &str) -> String {
    if settings.is_empty() {
        return "no settings at all".to_owned();
    }
    let options = |text: &str| -> Vec<String> {
        // Commas inside of brackets do not split.
        let mut depth = 0;
        let split = |c: char| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            c == ',' && depth == 0
        };
        text.split(split).map(str::to_owned).collect()
    };
    let key = |option: &String| option.split(':').next().unwrap_or_default().to_owned();
    let (old, new) = (options(&explanation.settings), options(settings));
    let added: Vec<String> = new.iter().filter(|option| !old.contains(option)).cloned().collect();
    if !added.is_empty() {
        return added.join(",");
    }
    let left_out = old.iter().filter(|option| !new.contains(option)).map(key);
    format!("without {}", left_out.collect::<Vec<_>>().join(", "))
}

fn enough(explanation: &Explanation) -> String {
    let Some(bytes) = explanation.smallest_capacity_bytes else {
        return wrapped("", "no device, however large, would have been enough as it was", "  ");
    };
    let live = explanation.result.trace.requested_bytes_peak;
    let text = format!(
        "without any change a device with {} free would have been enough ({} live at most{})",
        Bytes(bytes),
        Bytes(live),
        if explanation.refusal.as_ref().is_some_and(|refusal| refusal.recorded) {
            ", as far as the recorded run went"
        } else {
            ""
        },
    );
    wrapped("", &text, "  ")
}

fn growth(explanation: &Explanation) -> String {
    let Some(growth) = &explanation.growth else { return String::new() };
    let mut text = format!(
        "over the last {} held memory grew by {} a step, live memory by {}",
        counted(growth.steps, "step"),
        Bytes(growth.reserved_bytes_per_step),
        Bytes(growth.requested_bytes_per_step),
    );
    if let Some(step) = growth.runs_out_at_step {
        text.push_str(&format!(": at that rate it runs out at step {}", grouped(step)));
    }
    wrapped("", &text, "  ")
}

/// Free memory by stream and pool.
fn holes(moment: &MomentFigures, at: &str) -> String {
    if moment.holes.is_empty() {
        return String::new();
    }
    let largest = moment.holes.iter().map(|group| group.size_bytes).max().unwrap_or(0);
    let unit = SizeUnit::fitting(largest);
    let mut grid = Grid::of_columns(2, 4);
    let (all, one) = (format!("free {}", unit.name), format!("largest {}", unit.name));
    let whole = format!("whole {}", unit.name);
    grid.head(["stream", "pool", "holes", &all, &one, &whole]);
    for group in &moment.holes {
        let stream = group.stream.map_or_else(|| "any".to_owned(), |handle| format!("{handle:#x}"));
        grid.row(
            [
                stream,
                group.pool.as_deref().map_or_else(String::new, |pool| printable(pool).into_owned()),
                grouped(group.holes),
                unit.cell(group.size_bytes),
                unit.cell(group.largest_bytes),
                unit.cell(group.whole_bytes),
            ],
            String::new(),
        );
    }
    format!("holes at {at}\n{}", grid.render(Style::default()))
}
