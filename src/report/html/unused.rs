//! What is held and not used: the five kinds of it, and the blocks that pin it.

use super::sections::of_cell;
use super::tables::{Entry, table};
use super::{Cell, escaped, size};
use crate::metrics::{Moment, NamedPin, PinGroup, Split, SplitAt};
use crate::report::text::{SizeUnit, counted, grouped, percent};
use crate::trace::Role;
use crate::units::Bytes;

/// Rows of the table of pins.
const PINS_MAX: usize = 25;
/// Rows of the table of sites that pin.
const GROUPS_MAX: usize = 10;

/// What the unused memory is made of, and which blocks keep it.
pub(super) fn unused(index: usize, cell: &Cell<'_>, several: bool) -> String {
    let result = &cell.observed.result;
    let Some(split) = &result.split else { return String::new() };
    let (attributes, name) = of_cell(index, cell, several);
    let at = match split.at {
        SplitAt::ReservedPeak => "the reserved peak",
        SplitAt::Oom => "the first refusal",
        SplitAt::Event => "this event",
    };
    let phase = cell.moment.as_ref().and_then(|moment| moment.request.phase.as_deref());
    let phase = phase.map(|phase| format!(" ({})", escaped(phase))).unwrap_or_default();
    let mut out = format!(
        "<section{attributes}>\n<h2>What is held and not used{name}</h2>\n\
         <p class=\"lead\">At {at}, event {}{phase}, for the request made there.</p>\n{}",
        grouped(split.at_event),
        split_bar(split)
    );
    if let Some(moment) = &cell.moment {
        out.push_str(&pins(moment));
    }
    out.push_str("</section>\n");
    out
}

fn split_bar(split: &Split) -> String {
    let kinds = [
        ("internal", split.internal_bytes, "internal", "rounding, inside of blocks in use"),
        ("deferred", split.deferred_bytes, "deferred", "freed, but another stream still uses it"),
        (
            "stream",
            split.stream_bytes,
            "other stream or pool",
            "free, but this request may not have it",
        ),
        ("hard", split.hard_bytes, "hard", "free, beside a block in use that keeps its segment"),
        ("soft-free", split.soft_bytes, "soft", "free, in segments that could be given back"),
    ];
    let total_bytes: u64 = kinds.iter().map(|kind| kind.1).sum();
    if total_bytes == 0 {
        return "<p>Nothing: all that is held was requested.</p>\n".to_owned();
    }
    let share = |bytes: u64| bytes as f64 / total_bytes as f64;
    let mut bar = String::from("<div class=\"split\" aria-hidden=\"true\">");
    let mut rows = String::new();
    for (colour, bytes, name, meaning) in kinds {
        if bytes > 0 {
            bar.push_str(&format!(
                "<i style=\"width:{:.3}%;background:var(--{colour})\" title=\"{name}: {}\"></i>",
                100.0 * share(bytes),
                Bytes(bytes)
            ));
        }
        rows.push_str(&format!(
            "<tr><td><i class=\"swatch\" style=\"background:var(--{colour})\"></i>{name}</td>\
             <td>{}</td><td>{}</td><td class=\"left wrap\">{meaning}</td></tr>\n",
            size(bytes),
            percent(share(bytes))
        ));
    }
    format!(
        "{bar}</div>\n<div class=\"table narrow\"><table>\n<caption class=\"sr\">Unused memory by \
         kind</caption>\n<thead><tr><th scope=\"col\">kind</th><th scope=\"col\">size</th>\
         <th scope=\"col\">share</th><th scope=\"col\" class=\"left\">what it is</th></tr></thead>\n\
         <tbody>\n{rows}</tbody></table></div>\n"
    )
}

/// The blocks that strand most, and the sites that do.
fn pins(moment: &Moment) -> String {
    if moment.pins.is_empty() {
        return String::new();
    }
    let unit = SizeUnit::fitting(moment.pins[0].pin.stranded_bytes);
    let groups = moment.pin_groups();
    let mut out = format!(
        "<h2>Pins</h2>\n<p class=\"lead\">{} in use, in {}, {} the {} that \
         are hard. The bytes of a segment are shared among the blocks that hold it.</p>\n",
        counted(moment.pins.len() as u64, "block"),
        counted(pinned_segments(moment), "segment"),
        if moment.pins.len() == 1 { "strands" } else { "strand" },
        size(moment.split.hard_bytes),
    );
    let told = groups.iter().any(|group| group.site.is_some() || group.phase.is_some());
    if told && groups.len() > 1 {
        out.push_str(&pin_groups(&groups));
    }
    let stranded = format!("strands, {}", unit.name);
    let heads: [(&str, &str); 7] = [
        ("block", ""),
        ("what it is", "left wrap"),
        ("phase", "left"),
        ("size", ""),
        (&stranded, ""),
        ("age, events", ""),
        ("since event", ""),
    ];
    let rows = moment.pins.iter().take(PINS_MAX).map(|pin| pin_row(pin, unit)).collect();
    out.push_str(&rest("blocks", moment.pins.iter().map(|pin| pin.pin.stranded_bytes), PINS_MAX));
    out.push_str("<div class=\"table\">");
    out.push_str(&table(&heads, rows, "Blocks that strand free memory"));
    out.push_str("</div>\n");
    out
}

/// What a table of so many rows leaves out, given what each of all its rows strands.
fn rest(what: &str, stranded: impl ExactSizeIterator<Item = u64>, rows: usize) -> String {
    let others = stranded.len().saturating_sub(rows) as u64;
    if others == 0 {
        return String::new();
    }
    format!(
        "<p class=\"note\">The {rows} {what} that strand most are shown; the other {} {} {}.</p>\n",
        grouped(others),
        if others == 1 { "strands" } else { "strand" },
        size(stranded.skip(rows).sum())
    )
}

fn pinned_segments(moment: &Moment) -> u64 {
    let mut segments: Vec<u32> = moment.pins.iter().map(|pin| pin.pin.block.segment).collect();
    segments.sort_unstable();
    segments.dedup();
    segments.len() as u64
}

/// `weights, forward (model.py:12), parameter`, or nothing known.
fn what(names: &[String], site: Option<&str>, role: Role) -> String {
    let role = (role != Role::Unknown).then(|| role.name());
    let names = (!names.is_empty()).then(|| names.join(" "));
    let parts = [names.as_deref(), site, role].into_iter().flatten();
    let text = parts.map(str::to_owned).collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".to_owned() } else { text }
}

fn pin_row(pin: &NamedPin, unit: SizeUnit) -> Vec<Entry> {
    let names: Vec<String> = pin.name.iter().cloned().collect();
    vec![
        Entry::count(u64::from(pin.pin.block.block.0)),
        Entry::text(&what(&names, pin.site.as_deref(), pin.role)),
        Entry::text(pin.phase.as_deref().unwrap_or("-")),
        Entry::size(pin.pin.block.size_bytes),
        Entry::bytes(unit, pin.pin.stranded_bytes),
        Entry::count(pin.age_events),
        match pin.born_event {
            Some(event) => Entry::count(event),
            None => Entry { value: "-1".to_owned(), ..Entry::text("before the first") },
        },
    ]
}

fn pin_groups(groups: &[PinGroup]) -> String {
    let unit = SizeUnit::fitting(groups[0].stranded_bytes);
    let stranded = format!("strand, {}", unit.name);
    let heads: [(&str, &str); 6] = [
        ("asked for at", "left wrap"),
        ("phase", "left"),
        ("blocks", ""),
        ("segments", ""),
        ("size", ""),
        (&stranded, ""),
    ];
    let mut out = rest("sites", groups.iter().map(|group| group.stranded_bytes), GROUPS_MAX);
    out.push_str("<div class=\"table\" style=\"margin-bottom:16px\">");
    let rows = groups.iter().take(GROUPS_MAX).map(|group| {
        vec![
            Entry::text(&what(&group.names, group.site.as_deref(), group.role)),
            Entry::text(group.phase.as_deref().unwrap_or("-")),
            Entry::count(group.blocks),
            Entry::count(group.segments),
            Entry::size(group.size_bytes),
            Entry::bytes(unit, group.stranded_bytes),
        ]
    });
    out.push_str(&table(&heads, rows.collect(), "Sites whose blocks strand free memory"));
    out.push_str("</div>\n");
    out
}
