//! Quantities and identifiers: byte counts, times, and dense ids.
//!
//! Domain integers that cross a module border are newtypes or carry their unit in the name
//! (`size_bytes`, `time_ns`). Byte counts inside structures that the replay loop touches stay plain
//! `u64` with a `_bytes` suffix; [`Bytes`] is for values that people write and read.

pub(crate) mod random;
mod ranks;
pub(crate) mod slope;
mod stop;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use ranks::nearest_rank;
pub use stop::Stop;

/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// A number of bytes as people write it: `4096`, `91MiB`, `45.5MiB`, `80GiB`.
///
/// Units are binary (`KiB MiB GiB TiB`) or decimal (`KB MB GB TB`); letter case and a space before
/// the unit do not matter. A fraction of a byte rounds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// Why a text is not a byte count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    /// No digits where the number should be.
    #[error(
        "{0:?} is not a size: expected a number with an optional unit, as in 4096, 91MiB or 1.5GiB"
    )]
    Number(String),
    /// The letters after the number are no unit we know.
    #[error("{unit:?} in {text:?} is not a unit: expected B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")]
    Unit {
        /// The whole text.
        text: String,
        /// The part read as unit.
        unit: String,
    },
    /// More than 2^63 − 1 bytes.
    #[error("{0:?} is too large: sizes end at 8 EiB")]
    TooLarge(String),
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let number_end = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(number_end);
        let unit_bytes: u128 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => {
                return Err(ParseBytesError::Unit {
                    text: text.to_owned(),
                    unit: unit.trim().to_owned(),
                });
            }
        };
        let number = number.replace('_', "");
        let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
            return Err(ParseBytesError::Number(text.to_owned()));
        }
        let too_large = || ParseBytesError::TooLarge(text.to_owned());
        let whole: u128 =
            if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
        let mut bytes = whole.checked_mul(unit_bytes).ok_or_else(too_large)?;
        // Exact decimal arithmetic: 0.1MiB must not depend on binary rounding.
        let fraction = fraction.trim_end_matches('0');
        if !fraction.is_empty() {
            if fraction.len() > 18 {
                return Err(ParseBytesError::Number(text.to_owned()));
            }
            let scale = 10u128.pow(fraction.len() as u32);
            let part: u128 = fraction.parse().map_err(|_| too_large())?;
            bytes = bytes.checked_add((part * unit_bytes).div_ceil(scale)).ok_or_else(too_large)?;
        }
        u64::try_from(bytes).ok().filter(|&b| b < 1 << 63).map(Bytes).ok_or_else(too_large)
    }
}

impl fmt::Display for Bytes {
    /// Exact where the value is a whole number of a unit, else two or three digits: `220 MiB`,
    /// `38.46 GiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..=1023 => return f.pad(&format!("{} B", self.0)),
            1024..=1_048_575 => (1u64 << 10, "KiB"),
            MIB..=1_073_741_823 => (MIB, "MiB"),
            GIB..=1_099_511_627_775 => (GIB, "GiB"),
            _ => (1u64 << 40, "TiB"),
        };
        let text = if self.0.is_multiple_of(unit) {
            format!("{} {name}", self.0 / unit)
        } else {
            format!("{:.2} {name}", self.0 as f64 / unit as f64)
        };
        f.pad(&text)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        u64::deserialize(deserializer).map(Bytes)
    }
}

/// A count with a comma at every thousand: `231,791`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun: `1 stream`, `3 streams`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// Whether JSON allows a character that a terminal may obey: the second set of control characters,
/// and what turns the direction of text.
pub(crate) fn is_obeyed(c: char) -> bool {
    matches!(c, '\u{7f}'..='\u{9f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// JSON, or a part of its texts, with escapes for what [`is_obeyed`]. It stands inside texts only.
pub(crate) fn harmless_json(json: &str) -> Cow<'_, str> {
    if !json.contains(is_obeyed) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if is_obeyed(c) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

/// b − a, held within what an `i64` can tell.
pub fn signed_difference(a: u64, b: u64) -> i64 {
    let difference = i128::from(b) - i128::from(a);
    i64::try_from(difference).unwrap_or(if difference < 0 { i64::MIN } else { i64::MAX })
}

/// How names stand in a list that people read: digits by the number that they spell, so that `rank2`
/// comes before `rank10`. Only equal names are equal.
pub fn natural_order(one: &str, other: &str) -> Ordering {
    let (mut a, mut b) = (one, other);
    while let (Some(first), Some(second)) = (a.chars().next(), b.chars().next()) {
        let order = if first.is_ascii_digit() && second.is_ascii_digit() {
            let (number, rest) = leading_digits(a);
            let (other_number, other_rest) = leading_digits(b);
            (a, b) = (rest, other_rest);
            // Without zeros in front, more digits are a larger number.
            let length = number.len().cmp(&other_number.len());
            length.then_with(|| number.cmp(other_number))
        } else {
            (a, b) = (&a[first.len_utf8()..], &b[second.len_utf8()..]);
            first.cmp(&second)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len()).then_with(|| one.cmp(other))
}

/// The digits at the beginning of a text, without zeros in front, and the rest.
fn leading_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    (digits.trim_start_matches('0'), rest)
}

/// A duration or an instant in nanoseconds, printed with a fitting unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        let text = match self.0 {
            0..=999 => format!("{} ns", self.0),
            1_000..=999_999 => format!("{:.1} µs", ns / 1e3),
            1_000_000..=999_999_999 => format!("{:.1} ms", ns / 1e6),
            _ => format!("{:.2} s", ns / 1e9),
        };
        f.pad(&text)
    }
}

/// A whole number, plain or with an exponent: `100000`, `1e5`.
pub fn whole_number(text: &str) -> Option<u64> {
    let Some((digits, exponent)) = text.split_once(['e', 'E']) else { return text.parse().ok() };
    let power = 10u64.checked_pow(exponent.parse().ok()?)?;
    digits.parse::<u64>().ok()?.checked_mul(power)
}

/// A line of a text and, below it, a caret at the column, counted in characters from 1. Of a very
/// long line only the part around it.
pub fn caret_under(line: &str, column: u32) -> String {
    const AROUND: usize = 60;
    let caret = (column as usize).saturating_sub(1);
    let skipped = caret.saturating_sub(AROUND);
    let shown: String = line.chars().skip(skipped).take(2 * AROUND).collect();
    // Tabs stay tabs, so that the caret stands right whatever their width.
    let indent: String = shown
        .chars()
        .chain(std::iter::repeat(' '))
        .take(caret - skipped)
        .map(|c| if c == '\t' { '\t' } else { ' ' })
        .collect();
    format!("{shown}\n{indent}^")
}

/// Defines a dense 32-bit id: an index into one of the tables of a trace.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// Stands for "none" where an id is optional.
            pub const NONE: $name = $name(u32::MAX);

            /// The id as an index into its table.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// Whether this is [`Self::NONE`].
            #[inline]
            pub fn is_none(self) -> bool {
                self == Self::NONE
            }

            /// The id, or nothing if it is [`Self::NONE`].
            #[inline]
            pub fn some(self) -> Option<Self> {
                (!self.is_none()).then_some(self)
            }
        }
    };
}

id!(
    /// A block: one request for memory and its life. Index into `Trace::blocks`.
    BlockId
);
id!(
    /// A stream. Index into `Trace::streams`, where its handle stands.
    StreamId
);
id!(
    /// A private pool or graph capture. Index into `Trace::pools`.
    PoolId
);
id!(
    /// A settings string given while the program ran. Index into `Trace::settings_changes`.
    SettingsId
);
id!(
    /// A phase such as `step3.backward`. Index into `Trace::phases`.
    PhaseId
);
id!(
    /// A module of the model. Index into `Trace::modules`.
    ModuleId
);
id!(
    /// A transfer between host and device. Index into `Trace::transfers`.
    TransferId
);
id!(
    /// A call site: a stack of frames. Index into `Sites::stacks`.
    SiteId
);
id!(
    /// One stack frame. Index into `Sites::frames`.
    FrameId
);
id!(
    /// A name that a person gave to blocks in a text trace. Index into `Trace::names`.
    NameId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_exactly_and_fractions_round_up() {
        let ok = |text: &str| text.parse::<Bytes>().map(|b| b.0);
        assert_eq!(ok("4096"), Ok(4096));
        assert_eq!(ok("91MiB"), Ok(91 * MIB));
        assert_eq!(ok("45.5 mib"), Ok(45 * MIB + MIB / 2));
        assert_eq!(ok("0.1KiB"), Ok(103), "102.4 bytes round up");
        assert_eq!(ok("1.5GB"), Ok(1_500_000_000));
        assert_eq!(ok("80GiB"), Ok(80 * GIB));
        assert_eq!(ok("1_000"), Ok(1000));
    }

    #[test]
    fn bad_sizes_name_what_is_wrong() {
        let err = |text: &str| text.parse::<Bytes>().expect_err("must fail").to_string();
        assert!(err("MiB").contains("not a size"));
        assert!(err("-1").contains("not a unit") || err("-1").contains("not a size"));
        assert!(err("10 parsecs").contains("parsecs"));
        assert!(err("9000000TiB").contains("too large"));
        assert!(err("1.2.3MiB").contains("not a size"));
    }

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names = ["rank10", "rank2", "rank", "rank02", "a9b10", "a9b9", "Rank1", "rank2.b"];
        names.sort_by(|one, other| natural_order(one, other));
        let expected = ["Rank1", "a9b9", "a9b10", "rank", "rank02", "rank2", "rank2.b", "rank10"];
        assert_eq!(names, expected);
        // Longer than any number type.
        let long = |last: char| format!("r{}{last}", "9".repeat(60));
        assert_eq!(natural_order(&long('1'), &long('2')), Ordering::Less);
    }

    #[test]
    fn sizes_print_exact_when_whole() {
        assert_eq!(Bytes(220 * MIB).to_string(), "220 MiB");
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(GIB + GIB / 2).to_string(), "1.50 GiB");
    }
}
