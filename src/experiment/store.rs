//! Results that are kept between runs, so that an experiment that was stopped goes on where it was.
//!
//! The one design decision: a line a cell, appended in one write when the cell is done, and found
//! again by a hash of everything that the result hangs on: the bytes of the trace (or its whole
//! job), the allocator, the options and the program. A line that was torn or changed, or that no
//! longer applies, is as if it were not there; nothing is ever changed in place.
//!
//! ```text
//!   {"key":"9f…","values":["ok", …],"check":"41…"}\n   <- of all in front of it
//!   {"key":"03…","val            <- torn when the process was killed: left alone
//! ```
//!
//! Memory holds where each line stands, not what it says: a million cells are 50 MB of places. Parts
//! of an experiment that run at once write a file each and read all of them.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::quality::FixedState;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::rows::Value;

/// Longest line in bytes: what is longer is some other file.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// What a result hangs on, as 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u128);

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for Key {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Key, Self::Err> {
        u128::from_str_radix(text, 16).map(Key)
    }
}

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

    /// Takes in a key.
    #[must_use]
    pub fn with_key(self, key: Key) -> KeyBuilder {
        self.with(key.0.to_be_bytes())
    }

    /// The key.
    #[must_use]
    pub fn key(self) -> Key {
        let [high, low] = self.0.map(|hasher| hasher.finish());
        Key(u128::from(high) << 64 | u128::from(low))
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

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    values: Vec<Value>,
}

/// What stands between a line and its checksum.
const CHECK_BEGIN: &str = ",\"check\":\"";

/// Whether a line is as it was written: a digit that a disk or a hand changed is a result that no
/// run gave.
fn is_intact(line: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(line) else { return false };
    let Some((content, check)) = text.rsplit_once(CHECK_BEGIN) else { return false };
    check.trim_end().strip_suffix("\"}") == Some(&checksum(content))
}

/// The checksum of what stands in front of it.
fn checksum(content: &str) -> String {
    format!("{:016x}", xxh3_64(content.as_bytes()))
}

/// A line that is well formed, its values not looked at.
#[derive(Deserialize)]
struct Head {
    key: String,
    #[serde(rename = "values")]
    _values: IgnoredAny,
}

/// Where a line stands.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Which file.
    file: u32,
    length_bytes: u32,
    start_bytes: u64,
}

/// Results of earlier runs and of this one, and where new ones are kept.
#[derive(Debug)]
pub struct Store(Option<Mutex<Kept>>);

/// Files of results, and where each stands in them.
#[derive(Debug)]
struct Kept {
    places: HashMap<u128, Place>,
    /// The first is written.
    files: Vec<File>,
    /// An earlier result could not be written, so that more behind it would be torn too.
    is_broken: bool,
}

impl Store {
    /// A store that knows nothing and keeps nothing.
    pub fn forgetful() -> Store {
        Store(None)
    }

    /// Opens the results that are kept in a folder, which is made if it is not there: those of all
    /// runs of the experiment `name`, whole or in parts. New ones go to `STEM.jsonl`.
    ///
    /// # Errors
    /// If a file cannot be read, or that of this run not be written; it tells which.
    pub fn open(folder: &Path, name: &str, stem: &str) -> io::Result<Store> {
        let told = |path: &Path, error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        std::fs::create_dir_all(folder).map_err(|error| told(folder, error))?;
        let own = folder.join(format!("{stem}.jsonl"));
        let mut kept = Kept { places: HashMap::new(), files: Vec::new(), is_broken: false };
        kept.add_own(&own).map_err(|error| told(&own, error))?;
        for other in files_of(folder, name).map_err(|error| told(folder, error))? {
            if other != own {
                let file = File::open(&other);
                file.and_then(|file| kept.add(file)).map_err(|error| told(&other, error))?;
            }
        }
        Ok(Store(Some(Mutex::new(kept))))
    }

    /// The values of a cell that was done before.
    pub fn get(&self, key: Key) -> Option<Vec<Value>> {
        self.lock()?.read(key)
    }

    /// Keeps the values of a cell.
    ///
    /// # Errors
    /// If the file cannot be written, now or before: nothing is appended to a line that is torn.
    pub fn keep(&self, key: Key, values: &[Value]) -> io::Result<()> {
        let Some(mut kept) = self.lock() else { return Ok(()) };
        let line = Line { key: key.to_string(), values: values.to_vec() };
        let mut text = serde_json::to_string(&line)?;
        // The brace that closes the line comes behind the checksum.
        text.pop();
        let check = checksum(&text);
        text += &format!("{CHECK_BEGIN}{check}\"}}\n");
        kept.append(key, text.as_bytes())
    }

    /// A thread that panicked while it wrote left at worst a torn line.
    fn lock(&self) -> Option<MutexGuard<'_, Kept>> {
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The files of an experiment and its parts, in order.
fn files_of(folder: &Path, name: &str) -> io::Result<Vec<PathBuf>> {
    let (whole, part) = (format!("{name}.jsonl"), format!("{name}.shard-"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let file = entry?.file_name();
        let file = file.to_string_lossy();
        if *file == whole || (file.starts_with(&part) && file.ends_with(".jsonl")) {
            files.push(folder.join(&*file));
        }
    }
    files.sort();
    Ok(files)
}

impl Kept {
    fn add_own(&mut self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path)?;
        let length_bytes = file.seek(SeekFrom::End(0))?;
        if length_bytes > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                // What was torn stays alone on its line.
                file.write_all(b"\n")?;
            }
        }
        file.seek(SeekFrom::Start(0))?;
        self.add(file)
    }

    /// Takes in where the lines of a file stand.
    fn add(&mut self, file: File) -> io::Result<()> {
        // What another process appends meanwhile is not waited for; a device has no length.
        let length_bytes = file.metadata()?.len();
        let mut reader = BufReader::with_capacity(1 << 20, file).take(length_bytes);
        let (mut line, mut start_bytes) = (Vec::new(), 0);
        let number = self.files.len() as u32;
        loop {
            line.clear();
            let read = reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
            if read == 0 {
                break;
            }
            // Without its end it may be torn, or another process is just writing it.
            let is_whole = line.last() == Some(&b'\n') && is_intact(&line);
            let head = serde_json::from_slice::<Head>(&line).ok().filter(|_| is_whole);
            if let Some(Key(key)) = head.and_then(|head| head.key.parse().ok()) {
                let place = Place { file: number, length_bytes: read as u32, start_bytes };
                self.places.insert(key, place);
            }
            start_bytes += read as u64;
        }
        self.files.push(reader.into_inner().into_inner());
        Ok(())
    }

    /// What stands at the place of a key; nothing if that is no longer it.
    fn read(&mut self, key: Key) -> Option<Vec<Value>> {
        let place = self.places.get(&key.0)?;
        let file = self.files.get_mut(place.file as usize)?;
        let mut line = vec![0; place.length_bytes as usize];
        file.seek(SeekFrom::Start(place.start_bytes)).ok()?;
        file.read_exact(&mut line).ok()?;
        let line: Line = serde_json::from_slice(&line).ok().filter(|_| is_intact(&line))?;
        (line.key.parse() == Ok(key)).then_some(line.values)
    }

    fn append(&mut self, key: Key, line: &[u8]) -> io::Result<()> {
        if self.is_broken {
            return Err(io::Error::other("an earlier result could not be written"));
        }
        let Some(file) = self.files.first_mut() else { return Ok(()) };
        let written = file.write_all(line).and_then(|()| file.stream_position());
        self.is_broken = written.is_err();
        // Another process may append to the same file: only behind the write is its place known.
        let start_bytes = written?.saturating_sub(line.len() as u64);
        let place = Place { file: 0, length_bytes: line.len() as u32, start_bytes };
        self.places.insert(key.0, place);
        Ok(())
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
        assert_eq!(whole.to_string().parse(), Ok(whole));
    }

    fn values() -> Vec<Value> {
        vec![Value::of_word("ok"), Value::Number(u64::MAX), Value::Fraction(0.1)]
    }

    #[test]
    fn what_is_kept_comes_back_and_torn_lines_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let open = || Store::open(&cache, "kept", "kept").unwrap();
        let store = open();
        store.keep(key("one"), &values()).unwrap();
        store.keep(key("two"), &values()).unwrap();
        assert_eq!(store.get(key("two")), Some(values()), "within the run that kept it");
        // Killed while it wrote the second, at every byte of it. Only the line's end may be missing:
        // then it is whole.
        let path = cache.join("kept.jsonl");
        let text = std::fs::read(&path).unwrap();
        let first = text.iter().position(|&byte| byte == b'\n').unwrap() + 1;
        for end in first..text.len() - 1 {
            std::fs::write(&path, &text[..end]).unwrap();
            let store = open();
            assert_eq!(store.get(key("one")), Some(values()), "{end}");
            assert_eq!(store.get(key("two")), None, "{end}");
            store.keep(key("three"), &values()).unwrap();
            let store = open();
            assert_eq!(store.get(key("three")), Some(values()), "{end}");
            assert_eq!(store.get(key("one")), Some(values()), "{end}");
        }
    }

    #[test]
    fn a_line_with_any_byte_changed_is_as_if_it_were_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Store::open(folder.path(), "kept", "kept").unwrap();
        let store = open();
        store.keep(key("one"), &values()).unwrap();
        let path = folder.path().join("kept.jsonl");
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut changed = good.clone();
            changed[at] = if changed[at] == b'1' { b'2' } else { b'1' };
            std::fs::write(&path, &changed).unwrap();
            assert_eq!(store.get(key("one")), None, "changed while it was open, at {at}");
            assert_eq!(open().get(key("one")), None, "changed before, at {at}");
        }
        std::fs::write(&path, &good).unwrap();
        assert_eq!(open().get(key("one")), Some(values()));
        // As versions wrote them that kept no checksum.
        let text = String::from_utf8(good).unwrap();
        let (content, _) = text.rsplit_once(CHECK_BEGIN).unwrap();
        std::fs::write(&path, format!("{content}}}\n")).unwrap();
        assert_eq!(open().get(key("one")), None);
    }

    #[test]
    fn parts_write_a_file_each_and_read_all() {
        let folder = tempfile::tempdir().unwrap();
        let open = |stem: &str| Store::open(folder.path(), "ranks", stem).unwrap();
        let stores = ["ranks.shard-1-of-2", "ranks.shard-2-of-2", "ranks", "ranks-other"].map(open);
        for (at, store) in stores.iter().enumerate() {
            store.keep(key(&at.to_string()), &values()).unwrap();
        }
        for stem in ["ranks", "ranks.shard-1-of-2"] {
            let store = open(stem);
            let known = [0, 1, 2, 3].map(|at: i32| store.get(key(&at.to_string())).is_some());
            assert_eq!(known, [true, true, true, false], "{stem}");
        }
    }

    /// Several processes may append to one file; here two stores on it do.
    #[test]
    fn two_writers_of_one_file_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Store::open(folder.path(), "kept", "kept").unwrap();
        let stores = [open(), open()];
        for round in 0..50 {
            for (at, store) in stores.iter().enumerate() {
                store.keep(key(&format!("{at} {round}")), &values()).unwrap();
                assert_eq!(store.get(key(&format!("{at} {round}"))), Some(values()));
            }
        }
        assert_eq!(open().lock().unwrap().places.len(), 100);
    }

    #[test]
    fn bytes_that_are_no_text_are_no_results() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept.jsonl");
        std::fs::write(&path, b"\xff\xfe\n{}\n[1]\n{\"key\":1}\n{\"key\":\"1\"}\n").unwrap();
        let store = Store::open(folder.path(), "kept", "kept").unwrap();
        assert!(store.lock().unwrap().places.is_empty());
    }

    /// A full disk: the first failure is told as it is, and nothing is written behind it.
    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_is_appended_to_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("kept.jsonl")).unwrap();
        let file = OpenOptions::new().append(true).open(folder.path().join("kept.jsonl")).unwrap();
        let kept = Kept { places: HashMap::new(), files: vec![file], is_broken: false };
        let store = Store(Some(Mutex::new(kept)));
        let error = store.keep(key("one"), &values()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(store.keep(key("two"), &values()).unwrap_err().to_string().contains("earlier"));
        assert_eq!(store.get(key("one")), None);
    }
}
