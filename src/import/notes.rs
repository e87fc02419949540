//! What a program noted beside the history of its allocator: phases, modules, `empty_cache`,
//! settings, limits. They stand in the truth file that our own recorder writes.
//!
//! The one design decision: a note names its place by PyTorch's own statistics. Every entry of a
//! history raises exactly one of six sums, so that these sums tell one place, whatever threads run
//! and whatever the clocks say:
//!
//! ```text
//!   sums        alloc  free_requested  free_completed  oom  segment bytes got, given back
//!   entries     alloc │ alloc │ free_requested │ free_completed │ segment_free │ alloc
//!   sums after  1       2       2 1              2 1 1            2 1 1 0 .. 2M  3 1 1 0 .. 2M
//!                       ^ mark               empty_cache ^──────────────^ before, after
//! ```
//!
//! A history whose beginning is lost counts from its end: the last sums are noted too.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, SeqAccess, Visitor};

use super::torch_snapshot::{RawAction, RawEntry};

/// Allocs, frees requested, frees completed, refusals, bytes of segments obtained and given back.
pub(super) type Sums = [u64; 6];

/// By the index of the device.
type Place = BTreeMap<u32, Sums>;

/// What is noted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NoteKind {
    /// A phase begins.
    Mark(String),
    /// A module is entered.
    Enter(String),
    /// A module is left.
    Leave(String),
    /// The program called `empty_cache`.
    EmptyCache,
    /// The program gave another settings string.
    Settings(String),
    /// The program set a memory limit, as a share of the total of a device.
    Limit {
        /// Index of the device.
        device: u32,
        /// The share, 0 to 1.
        fraction: f64,
    },
    /// Anything else, which a later recorder may write.
    Other,
}

/// A note of the file.
#[derive(Clone, Debug)]
pub(super) struct Note {
    kind: NoteKind,
    time_us: u64,
    before: Place,
    /// Only for what takes entries of its own.
    after: Option<Place>,
}

/// A note and its place in a history.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlacedNote {
    pub(super) kind: NoteKind,
    /// Unix time in microseconds.
    pub(super) time_us: u64,
    /// Index of the entry that it stands before.
    pub(super) at: usize,
    /// Index of the entry before which it ends.
    pub(super) end: usize,
}

/// The notes of a history, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Placed {
    pub(super) notes: Vec<PlacedNote>,
    /// How many stand at no place that their sums name exactly.
    pub(super) inexact: u64,
}

/// Puts notes where their sums say. `sums_at_end` are those after the last entry.
pub(super) fn place<'a>(
    notes: &[Note],
    device: u32,
    sums_at_end: Option<&Sums>,
    entries: impl Iterator<Item = &'a RawEntry> + Clone,
) -> Placed {
    let mut placed = Placed::default();
    let mut sums = sums_at_end.map_or([0; 6], |end| sums_before(end, entries.clone()));
    let (mut entries, mut at) = (entries, 0);
    let mut advance_to = |wanted: &Sums| {
        while (0..wanted.len()).any(|i| sums[i] < wanted[i])
            && let Some(entry) = entries.next()
        {
            count(entry, &mut sums);
            at += 1;
        }
        (at, sums == *wanted)
    };
    for note in notes {
        let sums_of = |place: &Place| place.get(&device).copied().unwrap_or_default();
        let before = sums_of(&note.before);
        let (at, mut exact) = advance_to(&before);
        let mut end = at;
        if let Some(after) = note.after.as_ref().map(sums_of).filter(|after| *after != before) {
            let (place, is_exact) = advance_to(&after);
            (end, exact) = (place, exact && is_exact);
        }
        let is_before_history = !exact && at == 0;
        let still_holds =
            matches!(note.kind, NoteKind::Mark(_) | NoteKind::Settings(_) | NoteKind::Limit { .. });
        if is_before_history && !still_holds {
            continue;
        }
        placed.inexact += u64::from(!exact && !is_before_history);
        let (kind, time_us) = (note.kind.clone(), note.time_us);
        placed.notes.push(PlacedNote { kind, time_us, at, end });
    }
    placed
}

/// The sums before the first of these entries.
fn sums_before<'a>(end: &Sums, entries: impl Iterator<Item = &'a RawEntry>) -> Sums {
    let mut seen = [0; 6];
    for entry in entries {
        count(entry, &mut seen);
    }
    std::array::from_fn(|i| end[i].saturating_sub(seen[i]))
}

/// Raises the one sum that an entry raises.
fn count(entry: &RawEntry, sums: &mut Sums) {
    let (index, amount) = match entry.action {
        RawAction::Alloc => (0, 1),
        RawAction::FreeRequested => (1, 1),
        RawAction::FreeCompleted => (2, 1),
        RawAction::Oom => (3, 1),
        RawAction::SegmentAlloc | RawAction::SegmentMap => (4, entry.size_bytes),
        RawAction::SegmentFree | RawAction::SegmentUnmap => (5, entry.size_bytes),
        RawAction::Snapshot | RawAction::Unknown => return,
    };
    sums[index] = sums[index].saturating_add(amount);
}

impl<'de> Deserialize<'de> for Note {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(NoteVisitor)
    }
}

/// What stands in the second place of a note.
#[derive(Deserialize)]
#[serde(untagged)]
enum What {
    Text(String),
    Limit(u32, f64),
    Other(IgnoredAny),
}

struct NoteVisitor;

impl<'de> Visitor<'de> for NoteVisitor {
    type Value = Note;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a note: [kind, what, time_us, {device: sums}]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Note, A::Error> {
        let missing = |index| A::Error::invalid_length(index, &self);
        let kind: String = seq.next_element()?.ok_or_else(|| missing(0))?;
        let what: What = seq.next_element()?.ok_or_else(|| missing(1))?;
        let time_us = seq.next_element()?.ok_or_else(|| missing(2))?;
        let before = seq.next_element()?.ok_or_else(|| missing(3))?;
        let after = seq.next_element()?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        let kind = match (kind.as_str(), what) {
            ("mark", What::Text(text)) => NoteKind::Mark(text),
            ("enter", What::Text(text)) => NoteKind::Enter(text),
            ("leave", What::Text(text)) => NoteKind::Leave(text),
            ("settings", What::Text(text)) => NoteKind::Settings(text),
            ("empty_cache", _) => NoteKind::EmptyCache,
            ("limit", What::Limit(device, fraction)) if (0.0..=1.0).contains(&fraction) => {
                NoteKind::Limit { device, fraction }
            }
            ("mark" | "enter" | "leave" | "settings" | "limit", _) => {
                let message = format!("a note {kind:?} with something else than it takes");
                return Err(A::Error::custom(message));
            }
            _ => NoteKind::Other,
        };
        Ok(Note { kind, time_us, before, after })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: RawAction) -> RawEntry {
        RawEntry::new(action, 0x1000, 2 << 20, 0)
    }

    fn notes(json: &str) -> Vec<Note> {
        serde_json::from_str(json).expect("notes")
    }

    #[test]
    fn sums_name_one_place() {
        use RawAction::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree, Snapshot};
        let actions =
            [SegmentAlloc, Alloc, Snapshot, FreeRequested, FreeCompleted, SegmentFree, Alloc];
        let entries: Vec<RawEntry> = actions.map(entry).to_vec();
        let notes = notes(
            r#"[["mark", "a", 1, {}],
                ["empty_cache", null, 1, {}, {}],
                ["mark", "b", 2, {"0": [1, 0, 0, 0, 2097152, 0], "1": [9, 9, 9, 9, 9, 9]}],
                ["empty_cache", null, 3, {"0": [1, 1, 1, 0, 2097152, 0]},
                                         {"0": [1, 1, 1, 0, 2097152, 2097152]}],
                ["newer", {"x": []}, 4, {"0": [1, 1, 1, 0, 2097152, 2097152]}]]"#,
        );
        let placed = place(&notes, 0, None, entries.iter());
        let places: Vec<_> = placed.notes.iter().map(|note| (note.at, note.end)).collect();
        assert_eq!(places, [(0, 0), (0, 0), (2, 2), (5, 6), (6, 6)]);
        assert_eq!(placed.inexact, 0);
        // The first three entries are lost: the sums at the end tell where it begins. The phase
        // that ran goes on, the empty_cache is past.
        let end = [2, 1, 1, 0, 2 << 20, 2 << 20];
        let late = place(&notes, 0, Some(&end), entries[3..].iter());
        let places: Vec<_> = late.notes.iter().map(|note| (note.at, note.end)).collect();
        assert_eq!(places, [(0, 0), (0, 0), (2, 3), (3, 3)]);
        assert_eq!(late.inexact, 0);
    }

    #[test]
    fn sums_that_no_place_has_are_counted() {
        let entries = [entry(RawAction::Alloc), entry(RawAction::Alloc)];
        let notes = notes(r#"[["mark", "a", 1, {"0": [1, 1, 0, 0, 0, 0]}]]"#);
        let placed = place(&notes, 0, None, entries.iter());
        assert_eq!((placed.notes[0].at, placed.inexact), (2, 1));
    }

    #[test]
    fn a_note_that_is_none_is_refused() {
        for json in [
            r#"[["mark"]]"#,
            r#"[["mark", 3, 1, {}]]"#,
            r#"[["limit", [0, 1.5], 1, {}]]"#,
            r#"[["mark", "a", 1, {"0": [1, 2]}]]"#,
            r#"[["mark", "a", -1, {}]]"#,
        ] {
            assert!(serde_json::from_str::<Vec<Note>>(json).is_err(), "{json}");
        }
    }
}
