//! Sizes as programs print them for people: rounded, with a unit, sometimes nonsense.
//!
//! The one design decision: a size keeps how far it may be off, so that whoever compares two of
//! them can tell whether the figures decide.

use serde::Serialize;

use crate::units::{GIB, MIB};

/// A size as it was printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Amount {
    /// As printed, in bytes.
    pub bytes: u64,
    /// The true size is at most this far off, in bytes: half of the last digit printed.
    pub error_bytes: u64,
}

impl Amount {
    /// A size that is known to the byte.
    pub fn exact(bytes: u64) -> Amount {
        Amount { bytes, error_bytes: 0 }
    }

    /// The least that it may have been.
    pub fn low(self) -> i128 {
        i128::from(self.bytes) - i128::from(self.error_bytes)
    }

    /// The most that it may have been.
    pub fn high(self) -> i128 {
        i128::from(self.bytes) + i128::from(self.error_bytes)
    }

    /// Sum of two sizes, each with its error.
    pub fn plus(self, other: Amount) -> Amount {
        Amount {
            bytes: self.bytes.saturating_add(other.bytes),
            error_bytes: self.error_bytes.saturating_add(other.error_bytes),
        }
    }

    /// What is left of a size, nothing if the other is larger. Errors add up.
    pub fn minus(self, other: Amount) -> Amount {
        Amount {
            bytes: self.bytes.saturating_sub(other.bytes),
            error_bytes: self.error_bytes.saturating_add(other.error_bytes),
        }
    }
}

/// A printed size, or one that no machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Printed {
    /// A size.
    Size(Amount),
    /// Beyond [`PRINTED_BYTES_MAX`]: stands for "not known" or "no limit" where PyTorch prints a
    /// count of all ones (17179869184.00 GiB).
    Absurd,
}

impl Printed {
    /// The size if it may be one.
    pub(crate) fn size(self) -> Option<Amount> {
        match self {
            Printed::Size(amount) => Some(amount),
            Printed::Absurd => None,
        }
    }
}

/// No device and no request is larger: an exbibyte.
const PRINTED_BYTES_MAX: u128 = 1 << 60;

/// Units in small letters, longer ones before those that they end in. PyTorch has always counted in
/// powers of 1024, also when it wrote `GB` (MPS until 2.5, `memory_summary()` until 1.13).
const UNITS: [(&str, u64); 12] = [
    ("bytes", 1),
    ("byte", 1),
    ("kib", 1 << 10),
    ("mib", MIB),
    ("gib", GIB),
    ("tib", 1 << 40),
    ("kb", 1 << 10),
    ("mb", MIB),
    ("gb", GIB),
    ("tb", 1 << 40),
    ("pib", 1 << 50),
    ("b", 1),
];

/// The size that a text without spaces begins with.
pub(super) fn leading(text: &str) -> Option<Printed> {
    let (number, rest) = split_number(text)?;
    let (_, unit_bytes) = UNITS.iter().find(|(unit, _)| rest.starts_with(unit))?;
    amount(number, *unit_bytes)
}

/// The size that a text without spaces ends in.
pub(super) fn trailing(text: &str) -> Option<Printed> {
    let (unit, unit_bytes) = UNITS.iter().find(|(unit, _)| text.ends_with(unit))?;
    let before = text.strip_suffix(unit)?;
    let is_digit = |c: char| c.is_ascii_digit() || c == '.';
    let number = &before[before.trim_end_matches(is_digit).len()..];
    // A full stop before the number ends the sentence before it.
    amount(number.trim_start_matches('.'), *unit_bytes)
}

/// The number that a text begins with, and what follows it.
pub(crate) fn split_number(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    number.starts_with(|c: char| c.is_ascii_digit()).then_some((number, rest))
}

/// A printed number of units; nothing if it is no number.
pub(crate) fn amount(number: &str, unit_bytes: u64) -> Option<Printed> {
    const DECIMALS_MAX: usize = 9;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    let fraction = &fraction[..fraction.len().min(DECIMALS_MAX)];
    let scale = 10u128.pow(fraction.len() as u32);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let Ok(whole) = whole.parse::<u64>() else { return Some(Printed::Absurd) };
    let unit = u128::from(unit_bytes);
    let bytes = u128::from(whole) * unit + part * unit / scale;
    if bytes > PRINTED_BYTES_MAX {
        return Some(Printed::Absurd);
    }
    let error = if unit == 1 { 0 } else { unit.div_ceil(2 * scale) };
    let narrow = |value: u128| u64::try_from(value).unwrap_or(u64::MAX);
    Some(Printed::Size(Amount { bytes: narrow(bytes), error_bytes: narrow(error) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(bytes: u64, error_bytes: u64) -> Option<Printed> {
        Some(Printed::Size(Amount { bytes, error_bytes }))
    }

    #[test]
    fn sizes_keep_half_of_their_last_digit() {
        // 0.01 GiB are 10,737,418.24 bytes, half of it rounded up.
        assert_eq!(leading("1.50gib(gpu0"), size(3 * GIB / 2, 5_368_710));
        assert_eq!(trailing("ofwhich448.00kib"), size(448 << 10, 6));
        assert_eq!(trailing("has0bytes"), size(0, 0));
        assert_eq!(leading("6gbx"), size(6 * GIB, GIB / 2));
        assert_eq!(trailing("gpu.12.50mib"), size(12 * MIB + MIB / 2, 5_243));
    }

    #[test]
    fn what_no_machine_has_is_told_apart_from_what_is_no_size() {
        assert_eq!(leading("17179869184.00gib"), Some(Printed::Absurd));
        assert_eq!(leading("99999999999999999999999999999gib"), Some(Printed::Absurd));
        assert_eq!(leading("gib"), None);
        assert_eq!(leading("1.2.3gib"), None);
        assert_eq!(trailing("free"), None);
        assert_eq!(trailing("..gib"), None);
    }
}
