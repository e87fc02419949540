//! Notes of the program among the entries of its history: see [`super::super::notes`].
//!
//! ```text
//!   entries   ... free_requested  free_completed │ segment_free  segment_free │ alloc ...
//!   notes                            empty_cache ^────── its entries ─────────^
//!   events    ... Free                             EmptyCache                   Alloc ...
//! ```
//!
//! Where the calls of `empty_cache` are noted, a group that releases and obtains memory is a malloc
//! that flushed; unless the statistics say that none did: then C++ code emptied the cache, whose
//! calls nobody hears.

use super::super::notes::{NoteKind, Placed, PlacedNote};
use super::super::torch_snapshot::{RawAction, RawEntry, SnapshotError};
use super::{FastMap, HistoryReader, Notes, dense_id};
use crate::trace::Op;
use crate::units::{ModuleId, PhaseId, PoolId, SettingsId};

/// The notes while a history is read.
#[derive(Default)]
pub(super) struct Noted {
    notes: std::vec::IntoIter<PlacedNote>,
    next: Option<PlacedNote>,
    /// The `empty_cache` whose entries are being read.
    emptying: Option<PlacedNote>,
    /// Whether any malloc flushed, where the statistics say so and the calls of `empty_cache` are
    /// noted.
    pub(super) flushes: Option<bool>,
    /// Phases are noted, so that those of the entries, which not every thread has, do not count.
    pub(super) phases: bool,
    inexact: u64,
    phase_ids: FastMap<String, PhaseId>,
    module_ids: FastMap<String, ModuleId>,
    /// Limits in bytes, and settings, that hold from before the first entry.
    pub(super) limit_bytes: Option<u64>,
    pub(super) settings: Option<String>,
    settings_later: bool,
    settings_at_start: Option<String>,
}

impl Noted {
    /// The notes of a device. `is_own`: what else the truth file says is about this one, and not
    /// about another GPU of the same program.
    pub(super) fn new(placed: Placed, notes: &Notes, is_own: bool) -> Noted {
        let phases = placed.notes.iter().any(|note| matches!(note.kind, NoteKind::Mark(_)));
        let mut notes_in_order = placed.notes.into_iter();
        let next = notes_in_order.next();
        Noted {
            notes: notes_in_order,
            next,
            flushes: notes.flushes.filter(|_| is_own),
            phases,
            inexact: placed.inexact,
            settings_at_start: notes.settings.clone(),
            limit_bytes: notes.limit_bytes.filter(|_| is_own),
            ..Noted::default()
        }
    }

    /// What to know of the notes.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.inexact > 0 {
            warnings.push(format!(
                "{} notes of the recorder stand where no entry ends: the history misses entries, or \
                 another thread was in between",
                self.inexact
            ));
        }
        warnings
    }

    /// The settings at the start, where they changed later: a snapshot has the last.
    pub(super) fn settings_of_start(&mut self) -> Option<String> {
        let settings = self.settings.take();
        settings.or_else(|| self.settings_at_start.take().filter(|_| self.settings_later))
    }
}

impl HistoryReader<'_> {
    /// What is noted before the entry of that index.
    pub(super) fn notes_before(
        &mut self,
        index: usize,
        entry: Option<&RawEntry>,
    ) -> Result<(), SnapshotError> {
        let ends = |note: &mut PlacedNote| {
            let outside = entry.is_none_or(|entry| {
                matches!(entry.action, RawAction::Alloc | RawAction::Oom | RawAction::FreeRequested)
            });
            note.end <= index || outside
        };
        if let Some(note) = self.noted.emptying.take_if(ends) {
            self.emptied(&note)?;
        }
        if self.noted.emptying.is_some() {
            return Ok(());
        }
        while let Some(note) = self.noted.next.take_if(|note| note.at <= index) {
            self.noted.next = self.noted.notes.next();
            self.note(note, index, entry)?;
            if self.noted.emptying.is_some() {
                break;
            }
        }
        Ok(())
    }

    fn note(
        &mut self,
        note: PlacedNote,
        index: usize,
        entry: Option<&RawEntry>,
    ) -> Result<(), SnapshotError> {
        // Clocks differ by a little; the order of entries is what holds.
        let latest_us = entry.map_or(u64::MAX, |entry| entry.time_us);
        let now = RawEntry::at_time(note.time_us.min(latest_us));
        self.close_group()?;
        match &note.kind {
            NoteKind::Mark(name) => {
                let phase = self.noted_phase(name)?;
                self.emit(&now, Op::Mark(phase))
            }
            NoteKind::Enter(name) => {
                let module = self.noted_module(name)?;
                self.emit(&now, Op::ModuleEnter(module))
            }
            NoteKind::Leave(name) => {
                let module = self.noted_module(name)?;
                self.emit(&now, Op::ModuleLeave(module))
            }
            NoteKind::EmptyCache if note.end > index => {
                self.noted.emptying = Some(note);
                Ok(())
            }
            // With nothing allocated there is nothing to release.
            NoteKind::EmptyCache if self.is_at_start() => Ok(()),
            NoteKind::EmptyCache => self.emptied(&PlacedNote { time_us: now.time_us, ..note }),
            NoteKind::Settings(text) => self.noted_settings(text, &now),
            NoteKind::Limit { device, fraction } => self.noted_limit(*device, *fraction, &now),
            NoteKind::Other => Ok(()),
        }
    }

    fn is_at_start(&self) -> bool {
        self.time_first_us.is_none() && self.trace.start.is_none()
    }

    /// An `empty_cache` and what was released in it.
    fn emptied(&mut self, note: &PlacedNote) -> Result<(), SnapshotError> {
        let group = self.end_pools()?;
        let time_us = group.first().map_or(note.time_us, |first| first.entry().time_us);
        let now = RawEntry::at_time(time_us);
        self.be_in(PoolId::NONE, &now)?;
        self.emit_with(&group, &now, Op::EmptyCache)?;
        self.done(&group)
    }

    fn noted_phase(&mut self, name: &str) -> Result<PhaseId, SnapshotError> {
        if let Some(&phase) = self.noted.phase_ids.get(name) {
            return Ok(phase);
        }
        let phase = PhaseId(dense_id(self.trace.phases.len(), "phases")?);
        self.trace.phases.push(name.to_owned());
        self.noted.phase_ids.insert(name.to_owned(), phase);
        Ok(phase)
    }

    fn noted_module(&mut self, name: &str) -> Result<ModuleId, SnapshotError> {
        if let Some(&module) = self.noted.module_ids.get(name) {
            return Ok(module);
        }
        let module = ModuleId(dense_id(self.trace.modules.len(), "modules")?);
        self.trace.modules.push(name.to_owned());
        self.noted.module_ids.insert(name.to_owned(), module);
        Ok(module)
    }

    /// Settings given before the first allocation are those of the run.
    fn noted_settings(&mut self, text: &str, now: &RawEntry) -> Result<(), SnapshotError> {
        if self.is_at_start() {
            let before =
                self.noted.settings.take().or_else(|| self.noted.settings_at_start.clone());
            self.noted.settings = Some(followed_by(before.as_deref().unwrap_or_default(), text));
            return Ok(());
        }
        self.noted.settings_later = true;
        self.change_settings(text, now)
    }

    fn change_settings(&mut self, text: &str, now: &RawEntry) -> Result<(), SnapshotError> {
        let settings = SettingsId(dense_id(self.trace.settings_changes.len(), "settings")?);
        self.trace.settings_changes.push(text.to_owned());
        self.emit(now, Op::Settings(settings))
    }

    fn noted_limit(
        &mut self,
        device: u32,
        fraction: f64,
        now: &RawEntry,
    ) -> Result<(), SnapshotError> {
        let Some(total_bytes) = self.device_total_bytes.filter(|_| device == self.device) else {
            return Ok(());
        };
        let limit_bytes = super::super::truth::share_of(total_bytes, fraction);
        let limit_bytes = Some(limit_bytes).filter(|_| fraction < 1.0);
        if self.is_at_start() {
            self.noted.limit_bytes = limit_bytes;
            return Ok(());
        }
        let limit = limit_bytes.map_or("none".to_owned(), |bytes| bytes.to_string());
        self.change_settings(&format!("limit:{limit}"), now)
    }
}

/// What holds when one settings string follows another before anything is allocated: the later,
/// and of the earlier what a later one does not reset (specs/pytorch_caching.md 7.1).
fn followed_by(before: &str, text: &str) -> String {
    const RESET: [&str; 4] = [
        "max_split_size_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
        "max_non_split_rounding_mb",
    ];
    let kept = before.split(',').filter(|item| {
        let key = item.split_once(':').map(|(key, _)| key.trim());
        // The items of a list in brackets are no settings of their own.
        key.is_some_and(|key| {
            !RESET.contains(&key) && key.bytes().next().is_some_and(|b| b.is_ascii_lowercase())
        })
    });
    let mut items: Vec<&str> = kept.map(str::trim).collect();
    items.extend(Some(text.trim()).filter(|text| !text.is_empty()));
    items.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_and_limit_are_those_of_one_gpu() {
        let notes = Notes { flushes: Some(true), limit_bytes: Some(7), ..Notes::default() };
        let told = |is_own| {
            let noted = Noted::new(Placed::default(), &notes, is_own);
            (noted.flushes, noted.limit_bytes)
        };
        assert_eq!(told(true), (Some(true), Some(7)));
        assert_eq!(told(false), (None, None));
    }

    #[test]
    fn what_is_not_reset_outlives_a_settings_string() {
        let follows = |before, text| followed_by(before, text);
        assert_eq!(follows("", "max_split_size_mb:40"), "max_split_size_mb:40");
        assert_eq!(
            follows("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:40"),
            "expandable_segments:True,max_split_size_mb:40"
        );
        assert_eq!(follows("roundup_power2_divisions:[4:2,8:4,>:16]", ""), "");
        assert_eq!(follows("garbage_collection_threshold:0.5", ""), "");
    }
}
