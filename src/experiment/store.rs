//! Results that are kept between runs, so that an experiment that was stopped goes on where it was.
//!
//! The one design decision: a line a cell, appended in one write when the cell is done, and found
//! again by a hash of everything that the result hangs on: the bytes of the trace (or its whole
//! job), the allocator, the options and the program. A line that was torn, or that no longer
//! applies, is as if it were not there; nothing is ever changed in place.
//!
//! ```text
//!   {"key":"9f…","values":["ok", …]}\n
//!   {"key":"03…","val            <- torn when the process was killed: left alone
//! ```

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use foldhash::quality::FixedState;
use serde::{Deserialize, Serialize};

use super::rows::Value;

/// Largest file of kept results in bytes: what is larger is some other file.
const STORE_BYTES_MAX: u64 = 1 << 30;

/// What a result hangs on, as 128 bits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(String);

/// Hashes what a result hangs on.
pub struct KeyBuilder([<FixedState as BuildHasher>::Hasher; 2]);

impl Default for KeyBuilder {
    fn default() -> Self {
        KeyBuilder([1, 2].map(|seed| FixedState::with_seed(seed).build_hasher()))
    }
}

impl KeyBuilder {
    /// Takes in a part; where it ends counts.
    #[must_use]
    pub fn with(mut self, part: impl AsRef<[u8]>) -> KeyBuilder {
        let bytes = part.as_ref();
        for hasher in &mut self.0 {
            hasher.write_u64(bytes.len() as u64);
            hasher.write(bytes);
        }
        self
    }

    /// The key.
    #[must_use]
    pub fn key(self) -> Key {
        let [high, low] = self.0.map(|hasher| hasher.finish());
        Key(format!("{high:016x}{low:016x}"))
    }
}

/// Takes in what is written without keeping it: for parts that are large.
impl Write for KeyBuilder {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for hasher in &mut self.0 {
            hasher.write(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    values: Vec<Value>,
}

/// Results of earlier runs, and where new ones are kept.
#[derive(Debug)]
pub struct Store {
    known: BTreeMap<String, Vec<Value>>,
    /// Nothing for a store that forgets.
    file: Option<Mutex<File>>,
}

impl Store {
    /// A store that knows nothing and keeps nothing.
    pub fn forgetful() -> Store {
        Store { known: BTreeMap::new(), file: None }
    }

    /// Opens a file of kept results, made with its folder if it is not there.
    ///
    /// # Errors
    /// If it cannot be read or written, or is far too large.
    pub fn open(path: &Path) -> io::Result<Store> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path)?;
        let mut bytes = Vec::new();
        Read::by_ref(&mut file).take(STORE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > STORE_BYTES_MAX {
            let message = "is too large for kept results: delete it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let lines = bytes.split(|&byte| byte == b'\n');
        let lines = lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok());
        let known = lines.map(|line| (line.key, line.values)).collect();
        if bytes.last().is_some_and(|&byte| byte != b'\n') {
            // What was torn stays alone on its line.
            file.write_all(b"\n")?;
        }
        Ok(Store { known, file: Some(Mutex::new(file)) })
    }

    /// The values of a cell that was done before.
    pub fn get(&self, key: &Key) -> Option<&[Value]> {
        self.known.get(&key.0).map(Vec::as_slice)
    }

    /// Keeps the values of a cell.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn keep(&self, key: &Key, values: &[Value]) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let line = Line { key: key.0.clone(), values: values.to_vec() };
        let mut text = serde_json::to_string(&line)?;
        text.push('\n');
        // A thread that panicked while it wrote left at worst a torn line.
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        KeyBuilder::default().with(text).key()
    }

    #[test]
    fn where_a_part_ends_counts() {
        let whole = KeyBuilder::default().with("ab").with("c").key();
        assert_ne!(whole, KeyBuilder::default().with("a").with("bc").key());
        assert_eq!(whole, KeyBuilder::default().with("ab").with("c").key());
    }

    #[test]
    fn what_is_kept_comes_back_and_torn_lines_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache/kept.jsonl");
        let values = vec![Value::of_word("ok"), Value::Number(u64::MAX), Value::Fraction(0.1)];
        let store = Store::open(&path).unwrap();
        store.keep(&key("one"), &values).unwrap();
        store.keep(&key("two"), &values).unwrap();
        // Killed while it wrote the second.
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 9]).unwrap();
        let store = Store::open(&path).unwrap();
        assert_eq!(store.get(&key("one")), Some(&values[..]));
        assert_eq!(store.get(&key("two")), None);
        store.keep(&key("three"), &values).unwrap();
        let store = Store::open(&path).unwrap();
        assert_eq!(store.get(&key("three")), Some(&values[..]));
        assert_eq!(store.get(&key("two")), None);
    }

    #[test]
    fn bytes_that_are_no_text_are_no_results() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept.jsonl");
        std::fs::write(&path, b"\xff\xfe\n{}\n[1]\n{\"key\":1}\n").unwrap();
        let store = Store::open(&path).unwrap();
        assert!(store.known.is_empty());
    }
}
