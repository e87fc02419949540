//! Columns of numbers as text that a page can hold: seven bits a byte, then base64.
//!
//! ```text
//!   71, 300  ──>  47 | AC 02  ──>  "R6wC"        the lowest seven bits first, the eighth: more follow
//! ```

use std::collections::BTreeMap;

/// Packs numbers; none, or nothing but zeros, give an empty text.
pub(super) fn column(values: impl IntoIterator<Item = u64>) -> String {
    let mut bytes = Vec::new();
    let mut any = false;
    for mut value in values {
        any |= value != 0;
        while value > 127 {
            bytes.push(value as u8 | 128);
            value >>= 7;
        }
        bytes.push(value as u8);
    }
    if any { base64(&bytes) } else { String::new() }
}

/// Numbers that never fall, as differences.
pub(super) fn rising(values: impl IntoIterator<Item = u64>) -> String {
    let mut before = 0;
    column(values.into_iter().map(|value| {
        let step = value.saturating_sub(before);
        before = value;
        step
    }))
}

/// Numbers that stay close to each other: differences, with the sign in the lowest bit.
pub(super) fn wandering(values: impl IntoIterator<Item = u64>) -> String {
    let mut before = 0;
    column(values.into_iter().map(|value| {
        let (step, sign) = match value.checked_sub(before) {
            Some(step) => (step << 1, 0),
            // The other half of the numbers: one less, so that zero is there once.
            None => ((before - value - 1) << 1, 1),
        };
        before = value;
        step | sign
    }))
}

/// Numbers of which few are different: these, and for each number which one it is.
pub(super) fn chosen(values: &[u64]) -> (Vec<u64>, String) {
    let mut places: BTreeMap<u64, u64> = BTreeMap::new();
    let mut different = Vec::new();
    let choices: Vec<u64> = values
        .iter()
        .map(|&value| {
            *places.entry(value).or_insert_with(|| {
                different.push(value);
                different.len() as u64 - 1
            })
        })
        .collect();
    (different, column(choices))
}

pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |index: usize| u32::from(three.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let value = (bits >> (18 - 6 * digit)) & 63;
            // A byte more than there are bytes has no digit of its own.
            let shown = if digit <= three.len() { DIGITS[value as usize] } else { b'=' };
            text.push(char::from(shown));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        // The examples of RFC 4648, section 10.
        let pairs = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (text, packed) in pairs {
            assert_eq!(base64(text.as_bytes()), packed);
        }
    }

    #[test]
    fn numbers_take_seven_bits_a_byte() {
        assert_eq!(column([71, 300]), base64(&[71, 0xac, 2]));
        assert_eq!(column([0, 0]), "");
        assert_eq!(column([u64::MAX]), base64(&[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]));
    }

    #[test]
    fn differences_know_their_sign() {
        assert_eq!(rising([3, 3, 10]), base64(&[3, 0, 7]));
        assert_eq!(wandering([3, 2, 2, 12, 2]), base64(&[6, 1, 0, 20, 19]));
        assert_eq!(chosen(&[7, 9, 7]), (vec![7, 9], base64(&[0, 1, 0])));
    }
}
