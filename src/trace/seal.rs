//! The checksum that a Parquet file of ours carries in its own metadata.
//!
//! A damaged run length in a page makes polars ask for 2^61 bytes, which ends the process and
//! cannot be caught. So a checksum of the whole file stands in the metadata, and is compared before
//! polars sees the first byte.

use std::ops::Range;

const CHECKSUM_KEY: &str = "fraglab_checksum";
/// Stands for the checksum while it is computed.
const CHECKSUM_BLANK: &str = "00000000";

/// A file is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    /// CRC-32 of the file in hexadecimal.
    pub(crate) found: String,
    /// What its metadata says.
    pub(crate) expected: String,
}

/// The metadata that stands for the checksum until the file is whole. It comes last.
pub(crate) fn blank() -> (String, String) {
    (CHECKSUM_KEY.to_owned(), CHECKSUM_BLANK.to_owned())
}

/// Puts the checksum of a whole file in place.
pub(crate) fn set(bytes: &mut [u8]) {
    if let Some(place) = checksum_place(bytes) {
        let sum = checksum(bytes, &place);
        bytes[place].copy_from_slice(sum.as_bytes());
    }
}

/// Whether a file carries a checksum.
pub(crate) fn is_there(bytes: &[u8]) -> bool {
    checksum_place(bytes).is_some()
}

/// Compares the checksum that a file carries, if it does.
///
/// # Errors
/// If the file is damaged.
pub(crate) fn check(bytes: &[u8]) -> Result<(), Broken> {
    let Some(place) = checksum_place(bytes) else { return Ok(()) };
    let found = checksum(bytes, &place);
    let expected = String::from_utf8_lossy(&bytes[place]).into_owned();
    if found == expected { Ok(()) } else { Err(Broken { found, expected }) }
}

/// Where in a file its checksum stands. In the footer's encoding the value follows its key after
/// two bytes: the type of the field and its length.
fn checksum_place(bytes: &[u8]) -> Option<Range<usize>> {
    let key = CHECKSUM_KEY.as_bytes();
    let after_key = bytes.windows(key.len()).rposition(|window| window == key)? + key.len();
    let start = after_key + 2;
    let place = start..start + CHECKSUM_BLANK.len();
    let is_ours = bytes.get(after_key..start)? == [0x18, CHECKSUM_BLANK.len() as u8];
    (is_ours && place.end <= bytes.len()).then_some(place)
}

/// The checksum of a file, its own place taken as blank.
fn checksum(bytes: &[u8], place: &Range<usize>) -> String {
    let mut crc = flate2::Crc::new();
    crc.update(&bytes[..place.start]);
    crc.update(CHECKSUM_BLANK.as_bytes());
    crc.update(&bytes[place.end..]);
    format!("{:08x}", crc.sum())
}
