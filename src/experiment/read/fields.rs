//! Tables and values of a TOML, each with the place where it stands.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::super::error::DescriptionError;
use crate::units::Bytes;
use crate::workload::meant;

/// Letters of a wrong value that a message shows.
const SHOWN_CHARS_MAX: usize = 60;

/// The text that is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'t> {
    pub(super) text: &'t str,
}

impl Source<'_> {
    pub(super) fn error(self, at: usize, message: String) -> DescriptionError {
        DescriptionError::at(self.text, at, message)
    }
}

/// A table all of whose keys are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    pub(super) source: Source<'a>,
    table: &'a DeTable<'a>,
    what: &'a str,
    at: usize,
}

impl<'a> Fields<'a> {
    /// # Errors
    /// The first key that is not known.
    pub(super) fn new(
        source: Source<'a>,
        table: &'a DeTable<'a>,
        what: &'a str,
        at: usize,
        known: &[&str],
    ) -> Result<Fields<'a>, DescriptionError> {
        let unknown = table.keys().filter(|key| !known.contains(&key.get_ref().as_ref()));
        if let Some(key) = unknown.min_by_key(|key| key.span().start) {
            let name = shortened(key.get_ref());
            let hint = match meant(key.get_ref(), known.iter().copied()) {
                hint if hint.is_empty() => format!("; {what} takes {}", known.join(", ")),
                hint => hint,
            };
            return Err(source.error(key.span().start, format!("unknown key {name}{hint}")));
        }
        Ok(Fields { source, table, what, at })
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &'a str) -> Option<Field<'a>> {
        let found = self.table.iter().find(|(name, _)| name.get_ref().as_ref() == key)?;
        Some(Field::new(self.source, key, found.1))
    }

    /// # Errors
    /// If the key is not given: `example` says what to write.
    pub(super) fn required(
        &self,
        key: &'a str,
        example: &str,
    ) -> Result<Field<'a>, DescriptionError> {
        self.get(key).ok_or_else(|| {
            self.source.error(self.at, format!("{} has no {key}: write {example}", self.what))
        })
    }

    pub(super) fn text(&self, key: &'a str) -> Result<Option<String>, DescriptionError> {
        self.get(key).map(|field| field.text().map(str::to_owned)).transpose()
    }

    pub(super) fn switch(&self, key: &'a str) -> Result<Option<bool>, DescriptionError> {
        let Some(field) = self.get(key) else { return Ok(None) };
        field.value.as_bool().map(Some).ok_or_else(|| field.wrong("expected true or false"))
    }

    pub(super) fn whole(
        &self,
        key: &'a str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, DescriptionError> {
        let Some(field) = self.get(key) else { return Ok(None) };
        let number = field.whole().filter(|number| (min..=max).contains(number));
        let expected = || field.wrong(&format!("expected a whole number from {min} to {max}"));
        number.map(Some).ok_or_else(expected)
    }

    /// One of some words.
    pub(super) fn word<'w>(
        &self,
        key: &'a str,
        words: &[&'w str],
    ) -> Result<Option<&'w str>, DescriptionError> {
        let Some(field) = self.get(key) else { return Ok(None) };
        let text = field.text()?;
        let found = words.iter().find(|word| **word == text);
        let expected = || {
            let hint = meant(text, words.iter().copied());
            field.wrong(&format!("expected one of {}{hint}", words.join(", ")))
        };
        found.map(|word| Some(*word)).ok_or_else(expected)
    }

    /// The tables of a list of tables.
    pub(super) fn tables(&self, key: &'a str) -> Result<Vec<Field<'a>>, DescriptionError> {
        self.get(key).map_or(Ok(Vec::new()), |field| field.list())
    }
}

/// Keys with their values, in the order of the text.
fn entries<'a>(source: Source<'a>, table: &'a DeTable<'a>) -> Vec<(&'a str, Field<'a>)> {
    let mut entries: Vec<(usize, &str, Field<'a>)> = Vec::new();
    for (key, value) in table {
        let name = key.get_ref().as_ref();
        entries.push((key.span().start, name, Field::new(source, name, value)));
    }
    entries.sort_by_key(|(at, ..)| *at);
    entries.into_iter().map(|(_, key, value)| (key, value)).collect()
}

/// A value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    source: Source<'a>,
    key: &'a str,
    value: &'a DeValue<'a>,
    pub(super) at: usize,
}

impl<'a> Field<'a> {
    fn new(source: Source<'a>, key: &'a str, value: &'a Spanned<DeValue<'a>>) -> Field<'a> {
        Field { source, key, value: value.get_ref(), at: value.span().start }
    }

    pub(super) fn error(&self, message: String) -> DescriptionError {
        self.source.error(self.at, message)
    }

    /// A value that is not what was expected.
    pub(super) fn wrong(&self, expected: &str) -> DescriptionError {
        self.error(format!("{} is {}: {expected}", self.key, self.shown()))
    }

    fn shown(&self) -> String {
        match self.value {
            DeValue::String(text) => format!("{:?}", shortened(text)),
            DeValue::Integer(digits) => shortened(digits.as_str()),
            DeValue::Float(digits) => shortened(digits.as_str()),
            DeValue::Boolean(value) => value.to_string(),
            DeValue::Datetime(_) => "a date".to_owned(),
            DeValue::Array(_) => "a list".to_owned(),
            DeValue::Table(_) => "a table".to_owned(),
        }
    }

    pub(super) fn text(&self) -> Result<&'a str, DescriptionError> {
        self.value.as_str().ok_or_else(|| self.wrong("expected a text in quotes"))
    }

    pub(super) fn is_table(&self) -> bool {
        self.value.is_table()
    }

    pub(super) fn list(&self) -> Result<Vec<Field<'a>>, DescriptionError> {
        let values = self.value.as_array().ok_or_else(|| self.wrong("expected a list"))?;
        Ok(values.iter().map(|value| Field::new(self.source, self.key, value)).collect())
    }

    /// A text or the texts of a list.
    pub(super) fn texts(&self) -> Result<Vec<Field<'a>>, DescriptionError> {
        if self.value.is_str() { Ok(vec![*self]) } else { self.list() }
    }

    pub(super) fn table(&self, known: &[&str]) -> Result<Fields<'a>, DescriptionError> {
        let table = self.value.as_table().ok_or_else(|| self.wrong("expected a table"))?;
        Fields::new(self.source, table, self.key, self.at, known)
    }

    /// A table whose keys may be any.
    pub(super) fn any_table(&self) -> Result<Vec<(&'a str, Field<'a>)>, DescriptionError> {
        let table = self.value.as_table().ok_or_else(|| self.wrong("expected a table"))?;
        Ok(entries(self.source, table))
    }

    fn whole(&self) -> Option<u64> {
        let digits = self.value.as_integer()?;
        u64::from_str_radix(digits.as_str(), digits.radix()).ok()
    }

    /// A text, a number or a switch, spelled out.
    pub(super) fn spelled(&self) -> Result<String, DescriptionError> {
        match self.value {
            DeValue::String(text) => Ok(text.as_ref().to_owned()),
            DeValue::Integer(digits) => match self.whole() {
                Some(number) => Ok(number.to_string()),
                None => Ok(digits.as_str().to_owned()),
            },
            DeValue::Float(digits) => Ok(digits.as_str().to_owned()),
            DeValue::Boolean(value) => Ok(value.to_string()),
            _ => Err(self.wrong("expected a text, a number, true or false")),
        }
    }

    /// Bytes, as a whole number or as in `80GiB`.
    pub(super) fn size(&self) -> Result<u64, DescriptionError> {
        let bytes = self.whole().or_else(|| Some(self.value.as_str()?.parse::<Bytes>().ok()?.0));
        let bytes = bytes.filter(|bytes| *bytes > 0);
        bytes.ok_or_else(|| self.wrong("expected a size above 0, as in \"80GiB\""))
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
