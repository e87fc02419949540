//! The TOML of a job as keys with values, each with the place where it stands.
//!
//! The one design decision: tables are flattened into paths (`train.batch`) before anything is
//! read from them. Keys of a file and keys that are given beside it then are the same thing, an
//! unknown one is told at its own place, and no path is longer than the longest that is known.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use super::keys::{self, Word};
use super::{JobError, JobFault, Place};
use crate::units::Bytes;

/// Characters of a file's words that a message shows.
const WORD_CHARS_MAX: usize = 60;

/// A value that is no table.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A whole number; nothing if it is below 0 or too large.
    Whole(Option<u64>, String),
    /// A number with a point or an exponent.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(String),
    /// Texts in brackets.
    Texts(Vec<String>),
    /// What no key takes.
    Other(&'static str),
}

impl Value {
    fn from_toml(value: &DeValue<'_>) -> Value {
        match value {
            DeValue::String(text) => Value::Text(text.as_ref().to_owned()),
            DeValue::Integer(digits) => {
                let whole = u64::from_str_radix(digits.as_str(), digits.radix()).ok();
                Value::Whole(whole, digits.to_string())
            }
            DeValue::Float(digits) => Value::Float(digits.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Boolean(value) => Value::Bool(*value),
            DeValue::Datetime(_) => Value::Other("a date"),
            DeValue::Array(values) => {
                let texts = values.iter().map(|value| match value.get_ref() {
                    DeValue::String(text) => Some(text.as_ref().to_owned()),
                    _ => None,
                });
                let texts: Option<Vec<String>> = texts.collect();
                texts.map_or(Value::Other("a list of other things than texts"), Value::Texts)
            }
            DeValue::Table(_) => Value::Other("a table"),
        }
    }

    /// What a person typed for a key: TOML where it is TOML, else a text.
    fn typed(text: &str) -> Value {
        match DeValue::parse(text.trim()) {
            Ok(value) => Value::from_toml(value.get_ref()),
            Err(_) => Value::Text(text.trim().to_owned()),
        }
    }

    fn shown(&self) -> String {
        match self {
            Value::Whole(_, digits) => shortened(digits),
            Value::Float(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Text(text) => format!("\"{}\"", shortened(text)),
            Value::Texts(_) => "a list".to_owned(),
            Value::Other(what) => (*what).to_owned(),
        }
    }
}

/// Where a key was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// At this byte of the text.
    Text(usize),
    /// Beside the text, as this value.
    Beside(String),
}

/// A key's value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// Every key that was given.
#[derive(Debug)]
pub(super) struct Document<'t> {
    text: &'t str,
    entries: BTreeMap<String, Entry>,
    tables: BTreeMap<String, usize>,
}

impl<'t> Document<'t> {
    /// Reads the text, then puts what was given beside it in place of what the text says.
    pub(super) fn read(text: &'t str, beside: &[(String, String)]) -> Result<Self, JobError> {
        let mut document = Document { text, entries: BTreeMap::new(), tables: BTreeMap::new() };
        let table = DeTable::parse(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            document.error_at(offset, JobFault::Syntax(sentence(error.message())))
        })?;
        let mut faults = Vec::new();
        document.flatten(table.get_ref(), "", &mut faults);
        if let Some((offset, fault)) = faults.into_iter().min_by_key(|(offset, _)| *offset) {
            return Err(document.error_at(offset, fault));
        }
        for (path, value) in beside {
            document.put(path, value)?;
        }
        Ok(document)
    }

    fn flatten(&mut self, table: &DeTable<'_>, prefix: &str, faults: &mut Vec<(usize, JobFault)>) {
        for (key, value) in table {
            let offset = key.span().start;
            let name = key.get_ref().as_ref();
            let Some(path) = keys::known_path(prefix, name) else {
                let is_table = matches!(value.get_ref(), DeValue::Table(_));
                faults.push((offset, keys::unknown(prefix, name, is_table)));
                continue;
            };
            match value.get_ref() {
                DeValue::Table(inner) if keys::is_table(&path) => {
                    self.flatten(inner, &path, faults);
                    self.tables.insert(path, offset);
                }
                other if !keys::is_key(&path) => {
                    let found = Value::from_toml(other).shown();
                    let expected = format!("a table: [{path}]");
                    faults.push((offset, JobFault::Value { key: path, found, expected }));
                }
                other => {
                    let value = Value::from_toml(other);
                    self.entries.insert(path, Entry { value, origin: Origin::Text(offset) });
                }
            }
        }
    }

    /// Takes a key that was given beside the text.
    fn put(&mut self, path: &str, typed: &str) -> Result<(), JobError> {
        let (prefix, name) = path.rsplit_once('.').unwrap_or(("", path));
        let known = keys::known_path(prefix, name).filter(|path| keys::is_key(path));
        let Some(path) = known else {
            let fault = keys::unknown(prefix, name, false);
            return Err(self.error(Place::beside(path, typed), fault));
        };
        // A table and a word for it, as in `lora = "none"`, put each other out of force.
        let inside = format!("{path}.");
        self.entries.retain(|key, _| !key.starts_with(&inside));
        self.tables.remove(&path);
        if let Some((parent, _)) = path.rsplit_once('.') {
            self.entries.remove(parent);
        }
        let origin = Origin::Beside(typed.to_owned());
        self.entries.insert(path, Entry { value: Value::typed(typed), origin });
        Ok(())
    }

    /// What was given for a key.
    pub(super) fn get(&self, path: &str) -> Option<&Entry> {
        self.entries.get(path)
    }

    /// Whether a key was given.
    pub(super) fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path)
    }

    /// Whether a table was given, or a key of it.
    pub(super) fn has_table(&self, path: &str) -> bool {
        let inside = format!("{path}.");
        self.tables.contains_key(path) || self.entries.keys().any(|key| key.starts_with(&inside))
    }

    /// Keys of `[options]` that were given.
    pub(super) fn options(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().filter_map(|key| key.strip_prefix("options."))
    }

    /// A whole number from `min` to `max`.
    pub(super) fn whole(&self, path: &str, min: u64, max: u64) -> Result<Option<u64>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        match entry.value {
            Value::Whole(Some(value), _) if (min..=max).contains(&value) => Ok(Some(value)),
            _ => Err(self.wrong(path, entry, format!("a whole number from {min} to {max}"))),
        }
    }

    /// True or false.
    pub(super) fn switch(&self, path: &str) -> Result<Option<bool>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        match entry.value {
            Value::Bool(value) => Ok(Some(value)),
            _ => Err(self.wrong(path, entry, "true or false".to_owned())),
        }
    }

    /// A number that `good` takes; `expected` says which are.
    pub(super) fn number(
        &self,
        path: &str,
        good: impl Fn(f64) -> bool,
        expected: &str,
    ) -> Result<Option<f64>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        let value = match entry.value {
            Value::Whole(Some(value), _) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        };
        let value = value.filter(|value| value.is_finite() && good(*value));
        value.map(Some).ok_or_else(|| self.wrong(path, entry, expected.to_owned()))
    }

    /// A text that is not empty.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        let text = match (&entry.value, &entry.origin) {
            // Beside the text there are no quotes that tell a text from a number.
            (_, Origin::Beside(typed)) if !matches!(entry.value, Value::Text(_)) => typed.trim(),
            (Value::Text(text), _) => text.trim(),
            _ => "",
        };
        if text.is_empty() || text.chars().count() > 200 {
            return Err(self.wrong(path, entry, "a text of 1 to 200 characters".to_owned()));
        }
        Ok(Some(text.to_owned()))
    }

    /// A number of bytes, plain or as in `80GiB`, from 1 to `max`.
    pub(super) fn size(&self, path: &str, max: u64) -> Result<Option<u64>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        let bytes = match &entry.value {
            Value::Whole(Some(value), _) => Some(*value),
            Value::Text(text) => text.parse::<Bytes>().ok().map(|size| size.0),
            _ => None,
        };
        let expected = || format!("a size as in \"80GiB\", 1 B to {}", Bytes(max));
        let bytes = bytes.filter(|bytes| (1..=max).contains(bytes));
        bytes.map(Some).ok_or_else(|| self.wrong(path, entry, expected()))
    }

    /// A rate in units a second: a number, or a text as in `3.35TB`.
    pub(super) fn rate(&self, path: &str) -> Result<Option<f64>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        if let Value::Text(text) = &entry.value {
            let bytes = text.parse::<Bytes>().ok().filter(|size| size.0 > 0);
            let expected = "bytes a second above 0, as in 2.6e12 or \"2.6TB\"".to_owned();
            let bytes = bytes.ok_or_else(|| self.wrong(path, entry, expected))?;
            return Ok(Some(bytes.0 as f64));
        }
        self.number(path, |value| value >= 1.0, "a number above 0, as in 2.6e12")
    }

    /// One of some words.
    pub(super) fn word<T: Copy>(
        &self,
        path: &str,
        words: &[Word<T>],
    ) -> Result<Option<T>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        let Value::Text(text) = &entry.value else {
            return Err(self.wrong(path, entry, keys::one_of(words)));
        };
        let found = words.iter().find(|word| word.text == text.as_str());
        let expected = || keys::one_of(words) + &keys::meant(text, words.iter().map(|w| w.text));
        found.map(|word| Some(word.value)).ok_or_else(|| self.wrong(path, entry, expected()))
    }

    /// Some of some words: a list, or a text with commas.
    pub(super) fn words<T: Copy>(
        &self,
        path: &str,
        words: &[Word<T>],
    ) -> Result<Option<Vec<T>>, JobError> {
        let Some(entry) = self.get(path) else { return Ok(None) };
        let given: Vec<&str> = match &entry.value {
            Value::Texts(texts) => texts.iter().map(String::as_str).collect(),
            Value::Text(text) => text.split(',').map(str::trim).collect(),
            _ => Vec::new(),
        };
        let expected = || format!("a list of {}", keys::one_of(words));
        if given.is_empty() {
            return Err(self.wrong(path, entry, expected()));
        }
        let find = |text: &&str| {
            let found = words.iter().find(|word| word.text == *text).map(|word| word.value);
            found.ok_or_else(|| {
                let found = format!("\"{}\"", shortened(text));
                let expected = expected() + &keys::meant(text, words.iter().map(|w| w.text));
                let fault = JobFault::Value { key: path.to_owned(), found, expected };
                self.error(self.place_of(path, entry), fault)
            })
        };
        given.iter().map(find).collect::<Result<Vec<T>, JobError>>().map(Some)
    }

    /// A value that is not what was expected.
    pub(super) fn wrong(&self, path: &str, entry: &Entry, expected: String) -> JobError {
        let found = entry.value.shown();
        let fault = JobFault::Value { key: path.to_owned(), found, expected };
        self.error(self.place_of(path, entry), fault)
    }

    /// An error about several keys: it stands at the first of them that was given, a key or a
    /// table, else at the beginning.
    pub(super) fn conflict(&self, paths: &[&str], message: String) -> JobError {
        self.fault(paths, JobFault::Conflict(message))
    }

    /// The same with any fault.
    pub(super) fn fault(&self, paths: &[&str], fault: JobFault) -> JobError {
        let key = paths.iter().find_map(|path| self.entries.get_key_value(*path));
        if let Some((path, entry)) = key {
            return self.error(self.place_of(path, entry), fault);
        }
        let table = paths.iter().find_map(|path| self.tables.get(*path));
        self.error_at(table.copied().unwrap_or(0), fault)
    }

    fn place_of(&self, path: &str, entry: &Entry) -> Place {
        match &entry.origin {
            Origin::Text(offset) => self.place_at(*offset),
            Origin::Beside(typed) => Place::beside(path, typed),
        }
    }

    fn place_at(&self, offset: usize) -> Place {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Place::Text {
            line: count(before.matches('\n').count() + 1),
            column: count(before[line_start..].chars().count() + 1),
        }
    }

    fn error_at(&self, offset: usize, fault: JobFault) -> JobError {
        self.error(self.place_at(offset), fault)
    }

    fn error(&self, place: Place, fault: JobFault) -> JobError {
        let source_line = match place {
            Place::Text { line, .. } => {
                self.text.split('\n').nth(line as usize - 1).unwrap_or_default().trim_end()
            }
            Place::Beside { .. } => "",
        };
        JobError { place, fault: Box::new(fault), source_line: source_line.to_owned() }
    }
}

/// The first characters of a word.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(WORD_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A parser's message in one line.
fn sentence(message: &str) -> String {
    message.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}
