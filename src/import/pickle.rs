//! A reader for pickles that hold plain data: protocols 2 to 5, as CPython and PyTorch's C++
//! `torch::jit::Pickler` write them.
//!
//! A pickle is a program for a small stack machine. This one runs only the opcodes that build
//! dicts, lists, tuples, texts, numbers, booleans, bytes and `None`; every opcode that would
//! import, call or build anything else ends the reading with its name and position. Nothing is
//! ever executed.
//!
//! The design decision: a value is one 64-bit word. Numbers sit in it, texts and containers are
//! ids, and what a container holds is kept by a [`Build`]er that sees each batch of items when it
//! arrives and may pack it. So sharing (two lists that hold the same dict), later filling of a
//! shared container and cycles are all just ids, no step recurses, and the memo costs 4 bytes an
//! entry:
//!
//! ```text
//!   stack   [ dict#7 | "action" "alloc" "addr" 140243843940352 "size" 512 ... ]
//!                    ^ mark      SETITEMS: the builder gets dict#7 and the pairs, keeps a record
//!   memo    [ dict#0, "segments", list#1, ... ]
//! ```
//!
//! No length field of the file is trusted: long texts are read piece by piece, memo indices beyond
//! the dense part go to a map.

use std::collections::HashMap;
use std::io::{self, Read};

use super::intern::Interner;

/// Size of the read buffer; every short token is looked at in place.
const BUFFER_BYTES: usize = 64 << 10;
/// Texts up to this length are read in place, longer ones piece by piece.
const TEXT_IN_PLACE_MAX: u64 = 16 << 10;
/// Open marks at a time. Snapshots nest five deep; CPython's own pickler ends near a thousand.
const MARKS_MAX: usize = 1000;
/// A memo index may run this far ahead of the dense memo before it goes to the map.
const MEMO_GAP_MAX: usize = 1024;
/// Longest module or class name that is read to name it in an error.
const NAME_BYTES_MAX: usize = 512;

/// What the C++ writer puts around containers; Python's versions return their first argument.
const INERT_MODULE: &[u8] = b"torch.jit._pickle";
const INERT_NAMES: [&[u8]; 4] =
    [b"restore_type_tag", b"build_intlist", b"build_doublelist", b"build_boollist"];

/// A pickle cannot be read. Offsets count bytes of the decompressed stream.
#[derive(Debug, thiserror::Error)]
pub enum PickleError {
    /// The underlying reader failed, as for a damaged gzip file.
    #[error("byte {offset}: cannot read on: {source}; expected an undamaged file")]
    Io {
        /// Where.
        offset: u64,
        /// What the reader said.
        #[source]
        source: io::Error,
    },
    /// The stream ends inside the pickle.
    #[error("byte {offset}: the file ends here; expected {expected}: it is cut short")]
    Truncated {
        /// Length of the stream.
        offset: u64,
        /// What should have followed.
        expected: &'static str,
    },
    /// The pickle would import or call something, or holds what no snapshot holds.
    #[error(
        "byte {offset}: {what}: nothing in a snapshot needs {needless}, this file is refused; \
         expected only dicts, lists, tuples, texts and numbers"
    )]
    Refused {
        /// Position of the opcode.
        offset: u64,
        /// Opcode, with the class or function that it names.
        what: String,
        /// `code`, or another thing that snapshots do without.
        needless: &'static str,
    },
    /// The stream is no pickle, or a damaged one.
    #[error("byte {offset}: {found}; expected {expected}")]
    Malformed {
        /// Position of the opcode.
        offset: u64,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
}

/// A value in one word: four bits of kind, sixty of number or id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value(u64);

/// What a [`Value`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An integer of up to 60 bits.
    Int(i64),
    /// A longer integer: index into [`Atoms`].
    Wide(u32),
    /// A float: index into [`Atoms`].
    Float(u32),
    /// A text: id in [`Atoms::strings`].
    Text(u32),
    /// `True` or `False`.
    Bool(bool),
    /// `None`.
    None,
    /// A dict, list or tuple: the builder's id.
    Object(u32),
    /// Bytes or an integer beyond 128 bits: read over, not kept.
    Opaque,
    /// One of the functions that return their first argument.
    Inert,
    /// No value: a hole in the memo.
    Absent,
}

impl Value {
    pub(super) const ABSENT: Value = Value(9);
    const NONE: Value = Value(5);
    const OPAQUE: Value = Value(7);
    const INERT: Value = Value(8);

    fn tagged(tag: u64, payload: u32) -> Value {
        Value(u64::from(payload) << 4 | tag)
    }

    /// A small integer, if it fits.
    fn small_int(int: i64) -> Option<Value> {
        let word = (int as u64) << 4;
        ((word as i64) >> 4 == int).then_some(Value(word))
    }

    pub(super) fn text(id: u32) -> Value {
        Value::tagged(3, id)
    }

    pub(super) fn object(id: u32) -> Value {
        Value::tagged(6, id)
    }

    #[inline]
    pub(super) fn kind(self) -> Kind {
        let payload = (self.0 >> 4) as u32;
        match self.0 & 15 {
            0 => Kind::Int((self.0 as i64) >> 4),
            1 => Kind::Wide(payload),
            2 => Kind::Float(payload),
            3 => Kind::Text(payload),
            4 => Kind::Bool(payload != 0),
            5 => Kind::None,
            6 => Kind::Object(payload),
            7 => Kind::Opaque,
            8 => Kind::Inert,
            _ => Kind::Absent,
        }
    }
}

/// The values that do not fit a word.
#[derive(Debug)]
pub(super) struct Atoms {
    /// Every text once.
    pub(super) strings: Interner<u8>,
    wide: Vec<i128>,
    floats: Vec<f64>,
}

impl Atoms {
    /// Atoms whose first texts are `known`: their ids are their indices.
    pub(super) fn with_known(known: &[&str]) -> Atoms {
        let mut strings = Interner::new();
        for text in known {
            strings.intern(text.as_bytes());
        }
        Atoms { strings, wide: Vec::new(), floats: Vec::new() }
    }

    /// The integer, if it is one. A bool counts, as in Python.
    #[inline]
    pub(super) fn int(&self, value: Value) -> Option<i128> {
        match value.kind() {
            Kind::Int(int) => Some(i128::from(int)),
            Kind::Bool(truth) => Some(i128::from(truth)),
            Kind::Wide(index) => self.wide.get(index as usize).copied(),
            _ => None,
        }
    }

    /// The integer in two's complement, if it has at most 64 bits.
    #[inline]
    pub(super) fn word(&self, value: Value) -> Option<u64> {
        if let Kind::Int(int) = value.kind() {
            return Some(int as u64);
        }
        let fits = i128::from(i64::MIN)..=i128::from(u64::MAX);
        self.int(value).filter(|int| fits.contains(int)).map(|int| int as u64)
    }

    /// The integer, if it lies from 0 to 2^64 - 1.
    #[inline]
    pub(super) fn unsigned(&self, value: Value) -> Option<u64> {
        if let Kind::Int(int) = value.kind() {
            return u64::try_from(int).ok();
        }
        self.int(value).and_then(|int| u64::try_from(int).ok())
    }

    /// The number as a float, if it is one.
    pub(super) fn float(&self, value: Value) -> Option<f64> {
        match value.kind() {
            Kind::Float(index) => self.floats.get(index as usize).copied(),
            _ => self.int(value).map(|int| int as f64),
        }
    }

    /// What a value is, for messages.
    pub(super) fn describe(&self, value: Value) -> String {
        match value.kind() {
            Kind::Int(int) => int.to_string(),
            Kind::Wide(_) => self.int(value).unwrap_or_default().to_string(),
            Kind::Float(_) => self.float(value).unwrap_or_default().to_string(),
            Kind::Text(id) => format!("{:?}", shorten(&self.strings.text(id))),
            Kind::Bool(truth) => if truth { "True" } else { "False" }.to_owned(),
            Kind::None => "None".to_owned(),
            Kind::Object(_) => "a container".to_owned(),
            Kind::Opaque | Kind::Inert | Kind::Absent => "bytes".to_owned(),
        }
    }

    #[inline]
    fn make_int(&mut self, int: i64) -> Option<Value> {
        Value::small_int(int).or_else(|| self.make_wide(i128::from(int)))
    }

    fn make_wide(&mut self, int: i128) -> Option<Value> {
        let index = u32::try_from(self.wide.len()).ok()?;
        self.wide.push(int);
        Some(Value::tagged(1, index))
    }

    fn make_float(&mut self, float: f64) -> Option<Value> {
        let index = u32::try_from(self.floats.len()).ok()?;
        self.floats.push(float);
        Some(Value::tagged(2, index))
    }
}

/// At most the first sixty characters.
pub(super) fn shorten(text: &str) -> &str {
    text.char_indices().nth(60).map_or(text, |(end, _)| &text[..end])
}

/// Why a builder does not take a batch.
#[derive(Debug)]
pub(super) struct Complaint {
    pub(super) found: String,
    pub(super) expected: &'static str,
}

/// Keeps what containers hold. Ids are the builder's own; ids run out as `None`.
pub(super) trait Build {
    /// An empty dict.
    fn new_dict(&mut self) -> Option<u32>;
    /// An empty list.
    fn new_list(&mut self) -> Option<u32>;
    /// A tuple of these items.
    fn new_tuple(&mut self, items: &[Value]) -> Option<u32>;
    /// Appends to a list. Fails if `list` is none.
    fn append(&mut self, list: u32, items: &[Value]) -> Result<(), Complaint>;
    /// Sets items of a dict: key, value, key, value, ... Fails if `dict` is none.
    fn set_items(&mut self, dict: u32, pairs: &[Value], atoms: &Atoms) -> Result<(), Complaint>;
    /// The first item of a tuple that has one.
    fn first_of_tuple(&self, tuple: u32) -> Option<Value>;
}

/// A pickle that was read to its STOP.
#[derive(Debug)]
pub(super) struct Pickle<B> {
    /// The value that remained.
    pub(super) top: Value,
    /// Texts and numbers that values refer to.
    pub(super) atoms: Atoms,
    /// Keeper of the containers.
    pub(super) builder: B,
}

/// Reads one pickle, which must be all there is: whatever checks the stream behind it (the checksum
/// of a compressed file) has then seen its end.
pub(super) fn read_pickle<R: Read, B: Build>(
    reader: R,
    atoms: Atoms,
    builder: B,
) -> Result<Pickle<B>, PickleError> {
    let mut machine = Machine {
        source: Source::new(reader),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Memo::default(),
        atoms,
        builder,
        opcode_at: 0,
    };
    let top = machine.run().map_err(|error| *error)?;
    Ok(Pickle { top, atoms: machine.atoms, builder: machine.builder })
}

/// Errors are boxed inside the machine: a result then fits two registers, at every opcode.
type Outcome<T> = Result<T, Box<PickleError>>;

/// The stream, with a window in which short tokens lie whole.
struct Source<R> {
    reader: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Offset in the stream of `buffer[0]`.
    base: u64,
}

impl<R: Read> Source<R> {
    fn new(reader: R) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Source { reader, buffer, start: 0, end: 0, base: 0 }
    }

    #[inline]
    fn offset(&self) -> u64 {
        self.base + self.start as u64
    }

    /// The next `count` bytes; `count` is at most the buffer's size.
    #[inline]
    fn bytes(&mut self, count: usize) -> Outcome<&[u8]> {
        if self.end - self.start < count && !self.fill(count)? {
            return Err(self.truncated());
        }
        let from = self.start;
        self.start += count;
        Ok(&self.buffer[from..from + count])
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    #[inline]
    fn byte(&mut self) -> Outcome<u8> {
        self.array().map(|[byte]| byte)
    }

    /// The byte after this one, not yet taken; nothing at the end of the stream.
    #[inline]
    fn peek(&mut self) -> Outcome<Option<u8>> {
        if self.start == self.end && !self.fill(1)? {
            return Ok(None);
        }
        Ok(Some(self.buffer[self.start]))
    }

    /// Makes `count` bytes lie in the window. False if the stream ends before.
    #[cold]
    fn fill(&mut self, count: usize) -> Outcome<bool> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.base += self.start as u64;
        self.end -= self.start;
        self.start = 0;
        while self.end < count {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(source) => {
                    let offset = self.base + self.end as u64;
                    return Err(Box::new(PickleError::Io { offset, source }));
                }
            }
        }
        Ok(true)
    }

    /// Checks that nothing follows, and that the stream ends as it should.
    fn end(&mut self) -> Outcome<()> {
        let offset = self.offset();
        let mut next = [0];
        while self.start == self.end {
            match self.reader.read(&mut next) {
                Ok(0) => return Ok(()),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(Box::new(PickleError::Io { offset, source })),
            }
        }
        Err(Box::new(PickleError::Malformed {
            offset,
            found: "more bytes behind the pickle's STOP".to_owned(),
            expected: "the end of the file: one snapshot a file",
        }))
    }

    #[cold]
    fn truncated(&self) -> Box<PickleError> {
        Box::new(PickleError::Truncated {
            offset: self.base + self.end as u64,
            expected: "the rest of the pickle, up to its STOP",
        })
    }

    /// Hands the next `count` bytes over piece by piece: memory grows only with what is there.
    fn pieces(&mut self, mut count: u64, mut take: impl FnMut(&[u8])) -> Outcome<()> {
        while count > 0 {
            let piece = count.min(BUFFER_BYTES as u64) as usize;
            take(self.bytes(piece)?);
            count -= piece as u64;
        }
        Ok(())
    }

    /// A name up to its newline, which is taken too.
    fn line(&mut self) -> Outcome<Vec<u8>> {
        let at = self.offset();
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(line),
                _ if line.len() >= NAME_BYTES_MAX => {
                    return Err(Box::new(PickleError::Malformed {
                        offset: at,
                        found: format!("a name of more than {NAME_BYTES_MAX} bytes"),
                        expected: "the name of a module or class and a newline",
                    }));
                }
                byte => line.push(byte),
            }
        }
    }
}

/// Values by memo index. Writers number them from 0 on, and put texts and containers there: those
/// are 32-bit codes in a table, everything else goes to a map.
#[derive(Default)]
struct Memo {
    dense: Vec<u32>,
    sparse: HashMap<u32, Value>,
    /// Indices in use: the next index of MEMOIZE.
    used: u32,
}

/// No code: look in the map.
const NO_CODE: u32 = u32::MAX;

/// A text or container as id and one bit.
#[inline]
fn memo_code(value: Value) -> u32 {
    match value.kind() {
        Kind::Text(id) if id < NO_CODE >> 1 => id << 1,
        Kind::Object(id) if id < NO_CODE >> 1 => id << 1 | 1,
        _ => NO_CODE,
    }
}

impl Memo {
    #[inline]
    fn get(&self, index: u32) -> Option<Value> {
        match self.dense.get(index as usize) {
            None | Some(&NO_CODE) => self.sparse.get(&index).copied(),
            Some(&code) if code & 1 == 0 => Some(Value::text(code >> 1)),
            Some(&code) => Some(Value::object(code >> 1)),
        }
    }

    #[inline]
    fn put(&mut self, index: u32, value: Value) {
        let code = memo_code(value);
        if index as usize == self.dense.len() && self.sparse.is_empty() && code != NO_CODE {
            self.dense.push(code);
            self.used = self.used.saturating_add(1);
        } else {
            self.put_out_of_order(index, value);
        }
    }

    fn put_out_of_order(&mut self, index: u32, value: Value) {
        if self.get(index).is_none() {
            self.used = self.used.saturating_add(1);
        }
        let (position, code) = (index as usize, memo_code(value));
        let near = position <= self.dense.len() + MEMO_GAP_MAX;
        if near {
            if position >= self.dense.len() {
                self.dense.resize(position + 1, NO_CODE);
            }
            self.dense[position] = code;
        }
        if !near || code == NO_CODE {
            self.sparse.insert(index, value);
        }
    }
}

/// The opcodes by their names in Python's `pickletools`.
mod op {
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const POP: u8 = b'0';
    pub(super) const POP_MARK: u8 = b'1';
    pub(super) const DUP: u8 = b'2';
    pub(super) const BINBYTES: u8 = b'B';
    pub(super) const SHORT_BINBYTES: u8 = b'C';
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const NONE: u8 = b'N';
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const DICT: u8 = b'd';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const INST: u8 = b'i';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const LIST: u8 = b'l';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG4: u8 = 0x8b;
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const BINUNICODE8: u8 = 0x8d;
    pub(super) const BINBYTES8: u8 = 0x8e;
    pub(super) const STACK_GLOBAL: u8 = 0x93;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const FRAME: u8 = 0x95;

    /// Name and nature of an opcode that is not run: (name, what it needs).
    pub(super) fn refused(opcode: u8) -> Option<(&'static str, &'static str)> {
        Some(match opcode {
            b'b' => ("BUILD", "code"),
            b'o' => ("OBJ", "code"),
            0x81 => ("NEWOBJ", "code"),
            0x92 => ("NEWOBJ_EX", "code"),
            0x82 => ("EXT1", "code"),
            0x83 => ("EXT2", "code"),
            0x84 => ("EXT4", "code"),
            b'P' => ("PERSID", "persistent ids"),
            b'Q' => ("BINPERSID", "persistent ids"),
            0x8f => ("EMPTY_SET", "sets"),
            0x90 => ("ADDITEMS", "sets"),
            0x91 => ("FROZENSET", "sets"),
            0x96 => ("BYTEARRAY8", "byte arrays"),
            0x97 => ("NEXT_BUFFER", "outside buffers"),
            0x98 => ("READONLY_BUFFER", "outside buffers"),
            b'I' => ("INT", "protocol 0"),
            b'L' => ("LONG", "protocol 0"),
            b'F' => ("FLOAT", "protocol 0"),
            b'S' => ("STRING", "protocol 0"),
            b'V' => ("UNICODE", "protocol 0"),
            b'p' => ("PUT", "protocol 0"),
            b'g' => ("GET", "protocol 0"),
            b'T' => ("BINSTRING", "the strings of Python 2"),
            b'U' => ("SHORT_BINSTRING", "the strings of Python 2"),
            _ => return None,
        })
    }
}

struct Machine<R, B> {
    source: Source<R>,
    stack: Vec<Value>,
    /// Stack heights at the open marks; nothing below the last one may be popped.
    marks: Vec<usize>,
    memo: Memo,
    atoms: Atoms,
    builder: B,
    /// Offset of the opcode that is running, for messages.
    opcode_at: u64,
}

impl<R: Read, B: Build> Machine<R, B> {
    fn run(&mut self) -> Outcome<Value> {
        self.protocol()?;
        loop {
            self.opcode_at = self.source.offset();
            let opcode = self.source.byte()?;
            if opcode == op::STOP {
                let top = self.pop()?;
                self.source.end()?;
                return Ok(top);
            }
            self.step(opcode)?;
        }
    }

    /// PROTO and its number, without which a file is no pickle of protocol 2 or later.
    fn protocol(&mut self) -> Outcome<()> {
        const EXPECTED: &str =
            "a pickle of protocol 2 to 5, which begins with byte 0x80 and 2 to 5";
        match self.source.peek()? {
            Some(op::PROTO) => {}
            Some(byte) => return Err(self.malformed(format!("byte {byte:#04x}"), EXPECTED)),
            None => return Err(self.malformed("an empty file".to_owned(), EXPECTED)),
        }
        match self.source.array::<2>()?[1] {
            2..=5 => Ok(()),
            other => Err(self.malformed(format!("pickle protocol {other}"), EXPECTED)),
        }
    }

    /// The opcodes that make up nearly all of a snapshot, run inside the loop.
    #[inline(always)]
    fn step(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            op::LONG_BINGET => {
                let index = u32::from_le_bytes(self.source.array()?);
                self.get(index)?;
            }
            op::BINGET => {
                let index = self.source.byte()?;
                self.get(u32::from(index))?;
            }
            op::MEMOIZE => self.put(self.memo.used)?,
            op::LONG1 => self.long1()?,
            op::SHORT_BINUNICODE => {
                let length = self.source.byte()?;
                self.text(u64::from(length))?;
            }
            op::BININT1 => {
                let int = self.source.byte()?;
                self.int(i64::from(int))?;
            }
            op::BININT2 => {
                let int = u16::from_le_bytes(self.source.array()?);
                self.int(i64::from(int))?;
            }
            op::BININT => {
                let int = i32::from_le_bytes(self.source.array()?);
                self.int(i64::from(int))?;
            }
            op::MARK => self.mark()?,
            op::EMPTY_DICT => self.empty(B::new_dict)?,
            op::EMPTY_LIST => self.empty(B::new_list)?,
            op::SETITEMS => self.set_items_from_mark()?,
            op::APPENDS => self.append_from_mark()?,
            op::BINPUT => {
                let index = self.source.byte()?;
                self.put(u32::from(index))?;
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.source.array()?);
                self.put(index)?;
            }
            _ => return self.step_rare(opcode),
        }
        Ok(())
    }

    #[inline(never)]
    fn step_rare(&mut self, opcode: u8) -> Outcome<()> {
        match opcode {
            op::SETITEM => self.set_items(self.stack.len().wrapping_sub(2))?,
            op::APPEND => self.append(self.stack.len().wrapping_sub(1))?,
            op::NEWTRUE => self.stack.push(Value::tagged(4, 1)),
            op::NEWFALSE => self.stack.push(Value::tagged(4, 0)),
            op::NONE => self.stack.push(Value::NONE),
            op::BINFLOAT => {
                let float = f64::from_be_bytes(self.source.array()?);
                let value = self.atoms.make_float(float);
                self.push(value)?;
            }
            op::BINUNICODE | op::BINUNICODE8 => {
                let length = self.length(opcode)?;
                self.text(length)?;
            }
            op::SHORT_BINBYTES | op::BINBYTES | op::BINBYTES8 => {
                let length = self.length(opcode)?;
                self.opaque(length)?;
            }
            op::LONG4 => self.long4()?,
            op::EMPTY_TUPLE => self.tuple(self.stack.len())?,
            op::TUPLE1 => self.tuple(self.stack.len().wrapping_sub(1))?,
            op::TUPLE2 => self.tuple(self.stack.len().wrapping_sub(2))?,
            op::TUPLE3 => self.tuple(self.stack.len().wrapping_sub(3))?,
            op::TUPLE => {
                let from = self.pop_mark()?;
                self.tuple(from)?;
            }
            op::LIST => {
                self.insert_under_mark(B::new_list)?;
                self.append_from_mark()?;
            }
            op::DICT => {
                self.insert_under_mark(B::new_dict)?;
                self.set_items_from_mark()?;
            }
            op::POP => {
                // Python's unpickler lets POP undo a MARK too.
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    self.pop()?;
                }
            }
            op::POP_MARK => {
                let from = self.pop_mark()?;
                self.stack.truncate(from);
            }
            op::DUP => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // A frame only announces how many bytes follow; nothing depends on it.
            op::FRAME => drop(self.source.array::<8>()?),
            op::PROTO => drop(self.source.byte()?),
            op::GLOBAL | op::INST => self.global(opcode)?,
            op::STACK_GLOBAL => return Err(self.stack_global()),
            op::REDUCE => self.reduce()?,
            _ => return Err(self.not_run(opcode)),
        }
        Ok(())
    }

    /// The length that follows an opcode of a text or bytes.
    fn length(&mut self, opcode: u8) -> Outcome<u64> {
        Ok(match opcode {
            op::SHORT_BINBYTES => u64::from(self.source.byte()?),
            op::BINUNICODE | op::BINBYTES => u64::from(u32::from_le_bytes(self.source.array()?)),
            _ => u64::from_le_bytes(self.source.array()?),
        })
    }

    /// Where the part of the stack begins that opcodes may pop.
    #[inline]
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    #[inline]
    fn push(&mut self, value: Option<Value>) -> Outcome<()> {
        match value {
            Some(value) => {
                self.stack.push(value);
                Ok(())
            }
            None => Err(self.malformed("too many values".to_owned(), "less than four billion")),
        }
    }

    #[inline]
    fn int(&mut self, int: i64) -> Outcome<()> {
        let value = self.atoms.make_int(int);
        self.push(value)
    }

    fn top(&self) -> Outcome<Value> {
        match self.stack.last() {
            Some(&value) if self.stack.len() > self.floor() => Ok(value),
            _ => Err(self.underflow()),
        }
    }

    fn pop(&mut self) -> Outcome<Value> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    fn mark(&mut self) -> Outcome<()> {
        if self.marks.len() >= MARKS_MAX {
            let found = format!("containers nested more than {MARKS_MAX} deep");
            return Err(self.malformed(found, "the five levels of a snapshot"));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    #[inline]
    fn pop_mark(&mut self) -> Outcome<usize> {
        match self.marks.pop() {
            Some(height) => Ok(height),
            None => {
                Err(self.malformed("an opcode that needs a MARK".to_owned(), "a MARK before it"))
            }
        }
    }

    #[inline]
    fn get(&mut self, index: u32) -> Outcome<()> {
        match self.memo.get(index) {
            Some(value) => {
                self.stack.push(value);
                Ok(())
            }
            None => {
                let found = format!("memo entry {index} is asked for before it was put");
                Err(self.malformed(found, "an index given by an earlier PUT or MEMOIZE"))
            }
        }
    }

    #[inline]
    fn put(&mut self, index: u32) -> Outcome<()> {
        let value = self.top()?;
        self.memo.put(index, value);
        Ok(())
    }

    #[inline]
    fn empty(&mut self, new: fn(&mut B) -> Option<u32>) -> Outcome<()> {
        let id = new(&mut self.builder);
        self.push(id.map(Value::object))
    }

    /// Puts a new container under the items of the last mark, so that LIST is APPENDS to it.
    fn insert_under_mark(&mut self, new: fn(&mut B) -> Option<u32>) -> Outcome<()> {
        let from = self.pop_mark()?;
        self.empty(new)?;
        self.stack[from..].rotate_right(1);
        self.marks.push(from + 1);
        Ok(())
    }

    #[inline]
    fn set_items_from_mark(&mut self) -> Outcome<()> {
        let from = self.pop_mark()?;
        self.set_items(from)
    }

    #[inline]
    fn append_from_mark(&mut self) -> Outcome<()> {
        let from = self.pop_mark()?;
        self.append(from)
    }

    /// Sets the pairs from height `from` on in the dict below them.
    fn set_items(&mut self, from: usize) -> Outcome<()> {
        let dict = self.container_below(from)?;
        let pairs = &self.stack[from..];
        if !pairs.len().is_multiple_of(2) {
            return Err(self.malformed("a key without a value".to_owned(), "pairs"));
        }
        if let Err(complaint) = self.builder.set_items(dict, pairs, &self.atoms) {
            return Err(self.malformed(complaint.found, complaint.expected));
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Appends the values from height `from` on to the list below them.
    fn append(&mut self, from: usize) -> Outcome<()> {
        let list = self.container_below(from)?;
        if let Err(complaint) = self.builder.append(list, &self.stack[from..]) {
            return Err(self.malformed(complaint.found, complaint.expected));
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// The container right below height `from`, where both lie above the last open mark.
    #[inline]
    fn container_below(&self, from: usize) -> Outcome<u32> {
        if from > self.stack.len() || from <= self.floor() {
            return Err(self.underflow());
        }
        match self.stack[from - 1].kind() {
            Kind::Object(id) => Ok(id),
            _ => {
                let found = format!("items for {}", self.atoms.describe(self.stack[from - 1]));
                Err(self.malformed(found, "a dict or list below its items"))
            }
        }
    }

    /// Makes a tuple of the values from height `from` on. If the next opcode hands it to a function
    /// that returns its first argument, as the C++ writer does with every container, the tuple is
    /// never made.
    fn tuple(&mut self, from: usize) -> Outcome<()> {
        if from > self.stack.len() || from < self.floor() {
            return Err(self.underflow());
        }
        let is_argument = from < self.stack.len()
            && from > self.floor()
            && self.stack[from - 1] == Value::INERT
            && self.source.peek()? == Some(op::REDUCE);
        if is_argument {
            self.source.byte()?;
            self.stack[from - 1] = self.stack[from];
            self.stack.truncate(from);
            return Ok(());
        }
        let id = self.builder.new_tuple(&self.stack[from..]);
        self.stack.truncate(from);
        self.push(id.map(Value::object))
    }

    /// REDUCE of one of the inert functions; of anything else it is refused.
    fn reduce(&mut self) -> Outcome<()> {
        let arguments = self.pop()?;
        let function = self.pop()?;
        if function != Value::INERT {
            return Err(self.refused("REDUCE, which calls a function".to_owned(), "code"));
        }
        let first = match arguments.kind() {
            Kind::Object(id) => self.builder.first_of_tuple(id),
            _ => None,
        };
        match first {
            Some(value) => {
                self.stack.push(value);
                Ok(())
            }
            None => {
                Err(self.malformed("a type tag without a value".to_owned(), "a tuple of arguments"))
            }
        }
    }

    fn global(&mut self, opcode: u8) -> Outcome<()> {
        let module = self.source.line()?;
        let name = self.source.line()?;
        let inert = module == INERT_MODULE && INERT_NAMES.contains(&name.as_slice());
        if opcode == op::GLOBAL && inert {
            self.stack.push(Value::INERT);
            return Ok(());
        }
        let opcode = if opcode == op::GLOBAL { "GLOBAL" } else { "INST" };
        let module = String::from_utf8_lossy(&module);
        let name = String::from_utf8_lossy(&name);
        let what = format!("{opcode} {:?}", format!("{module}.{name}"));
        Err(self.refused(what, "code"))
    }

    fn stack_global(&self) -> Box<PickleError> {
        let name = |value: &Value| match value.kind() {
            Kind::Text(id) => shorten(&self.atoms.strings.text(id)).to_owned(),
            _ => "?".to_owned(),
        };
        let names: Vec<String> = self.stack.iter().rev().take(2).rev().map(name).collect();
        self.refused(format!("STACK_GLOBAL {:?}", names.join(".")), "code")
    }

    fn not_run(&self, opcode: u8) -> Box<PickleError> {
        match op::refused(opcode) {
            Some((name, needless)) => self.refused(name.to_owned(), needless),
            None => self.malformed(
                format!("byte {opcode:#04x} is no pickle opcode"),
                "an opcode of protocol 2 to 5: the file is damaged",
            ),
        }
    }

    fn long1(&mut self) -> Outcome<()> {
        let length = usize::from(self.source.byte()?);
        if length > 16 {
            self.source.bytes(length)?;
            self.stack.push(Value::OPAQUE);
            return Ok(());
        }
        let bytes = self.source.bytes(length)?;
        let negative = bytes.last().is_some_and(|&top| top & 0x80 != 0);
        let filler = if negative { 0xff } else { 0 };
        if length <= 8 {
            let mut int = [filler; 8];
            int[..length].copy_from_slice(bytes);
            return self.int(i64::from_le_bytes(int));
        }
        let mut int = [filler; 16];
        int[..length].copy_from_slice(bytes);
        let value = self.atoms.make_wide(i128::from_le_bytes(int));
        self.push(value)
    }

    /// An integer with a 32-bit length: no writer uses it for what a snapshot needs.
    fn long4(&mut self) -> Outcome<()> {
        let length = i32::from_le_bytes(self.source.array()?);
        match u64::try_from(length) {
            Ok(length) => self.opaque(length),
            Err(_) => Err(self.malformed(format!("an integer of {length} bytes"), "0 or more")),
        }
    }

    fn opaque(&mut self, length: u64) -> Outcome<()> {
        self.source.pieces(length, |_| {})?;
        self.stack.push(Value::OPAQUE);
        Ok(())
    }

    #[inline]
    fn text(&mut self, length: u64) -> Outcome<()> {
        let id = if length <= TEXT_IN_PLACE_MAX {
            self.atoms.strings.intern(self.source.bytes(length as usize)?)
        } else {
            let mut text = Vec::new();
            self.source.pieces(length, |piece| text.extend_from_slice(piece))?;
            self.atoms.strings.intern(&text)
        };
        self.push(id.map(Value::text))
    }

    #[cold]
    fn malformed(&self, found: String, expected: &'static str) -> Box<PickleError> {
        Box::new(PickleError::Malformed { offset: self.opcode_at, found, expected })
    }

    #[cold]
    fn refused(&self, what: String, needless: &'static str) -> Box<PickleError> {
        Box::new(PickleError::Refused { offset: self.opcode_at, what, needless })
    }

    #[cold]
    fn underflow(&self) -> Box<PickleError> {
        let found = "an opcode that takes more values than there are".to_owned();
        self.malformed(found, "values before it: the file is damaged")
    }
}
