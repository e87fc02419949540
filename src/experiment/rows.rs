//! A results table whose columns are known when the program runs: a row a cell, typed values.
//!
//! The one design decision: values keep their types until they are printed. What is kept between
//! runs, what goes into files and what figures are drawn from is this table and nothing else, so
//! that a figure can be drawn again from the file alone.

use serde::{Deserialize, Serialize};

/// A value of a results table: bytes, nanoseconds and counts are whole numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// Does not apply.
    #[default]
    None,
    /// A name.
    Word(String),
    /// A whole number.
    Number(u64),
    /// A difference of whole numbers.
    Difference(i64),
    /// A share or ratio. Kept as text, which gives back the same number to the last bit.
    Fraction(#[serde(with = "exact")] f64),
}

impl Value {
    /// The value as a finite number, if it is one or a word that spells one.
    pub fn number(&self) -> Option<f64> {
        let number = match self {
            Value::None => None,
            Value::Word(word) => word.trim().parse().ok(),
            Value::Number(number) => Some(*number as f64),
            Value::Difference(number) => Some(*number as f64),
            Value::Fraction(number) => Some(*number),
        };
        number.filter(|number| number.is_finite())
    }

    /// Nothing where there is no number.
    pub fn of_number(number: Option<u64>) -> Value {
        number.map_or(Value::None, Value::Number)
    }

    /// Nothing where there is no fraction.
    pub fn of_fraction(number: Option<f64>) -> Value {
        number.map_or(Value::None, Value::Fraction)
    }

    /// A word.
    pub fn of_word(word: &str) -> Value {
        Value::Word(word.to_owned())
    }
}

mod exact {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// What the values of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnKind {
    /// Names, or what the description wrote there.
    Word,
    /// Whole numbers.
    Number,
    /// Differences.
    Difference,
    /// Shares and ratios.
    Fraction,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name, unit and qualifier last.
    pub name: String,
    /// What its values are.
    pub kind: ColumnKind,
}

impl Column {
    /// A column.
    pub fn new(name: &str, kind: ColumnKind) -> Column {
        Column { name: name.to_owned(), kind }
    }
}

/// A results table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows, each with a value a column.
    pub rows: Vec<Vec<Value>>,
}

impl Rows {
    /// Place of a column.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name == name)
    }

    /// The value of a row in a column; nothing if there is no such column.
    pub fn get<'a>(&self, row: &'a [Value], name: &str) -> &'a Value {
        self.column(name).and_then(|at| row.get(at)).unwrap_or(&Value::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_fractions_come_back_to_the_last_bit() {
        for number in [0.1 + 0.2, 1.0 / 3.0, 0.342_699_999_999_999_97, 5e-324] {
            let text = serde_json::to_string(&Value::Fraction(number)).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), Value::Fraction(number));
        }
    }

    #[test]
    fn words_that_spell_numbers_are_numbers_too() {
        assert_eq!(Value::of_word("4096").number(), Some(4096.0));
        assert_eq!(Value::of_word("none").number(), None);
        assert_eq!(Value::of_word("inf").number(), None);
    }
}
