//! MiniMalloc's CSV of buffers: `id,lower,upper,size[,alignment,hint,gaps,offset]`.
//!
//! Columns may stand in any order and under the other names that MiniMalloc takes: `buffer` and
//! `buffer_id` for `id`, `begin` and `start` for `lower`, `end` for `upper`. Under the name `end` the
//! last tick is part of the life, of gaps too; under `upper` it is not. Whatever the file says,
//! [`MinimallocRow`] is half-open.
//!
//! | column | what MiniMalloc makes of it |
//! |---|---|
//! | `alignment` | the offset is a multiple of it |
//! | `hint` | where the buffer would like to lie; negative for no wish |
//! | `gaps` | intervals of the life in which nothing is needed, `a-b`, or only the bytes `lo..hi` counted from the buffer's offset, `a-b@lo:hi`; separated by blanks |
//! | `offset` | the only offset that the buffer may have; when a finished packing is validated, the packing |
//!
//! Here an empty field means that there is none, where MiniMalloc wants a number; columns that it
//! does not know are kept, as it allows them, and told of. It ends at an empty line and takes no
//! quotes; here empty lines are skipped and quotes are those of CSV. Times below 0 are refused: the
//! `-` of a gap leaves no room for them.

use std::collections::HashMap;
use std::io::{Read, Write};

/// Largest number in a file: MiniMalloc keeps them in 64 bits with a sign.
const NUMBER_MAX: u64 = i64::MAX as u64;

/// A buffer, as its line has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinimallocRow {
    /// Its name.
    pub id: String,
    /// First tick at which it is live.
    pub lower: u64,
    /// First tick at which it is no longer live.
    pub upper: u64,
    /// Bytes.
    pub size_bytes: u64,
    /// Its offset is a multiple of this; at least 1.
    pub alignment_bytes: u64,
    /// Where it would like to lie.
    pub hint_bytes: Option<u64>,
    /// When it needs less than its size, as the file lists them; none is empty.
    pub gaps: Vec<MinimallocGap>,
    /// Its offset: the only one it may have, or what a packing gave it.
    pub offset_bytes: Option<u64>,
    /// Fields of the columns that MiniMalloc does not know, in their order.
    pub others: Vec<String>,
}

/// A time in which a buffer needs only a window of its bytes, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinimallocGap {
    /// First tick.
    pub lower: u64,
    /// First tick after it.
    pub upper: u64,
    /// What is needed all the same: bytes from the buffer's offset, half-open.
    pub window_bytes: Option<(u64, u64)>,
}

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MinimallocField {
    /// The name.
    Id,
    /// First tick.
    Lower,
    /// First tick after the life.
    Upper,
    /// Last tick of the life; then the ends of gaps are last ticks as well.
    End,
    /// Bytes.
    Size,
    /// Alignment.
    Alignment,
    /// The wish.
    Hint,
    /// Gaps.
    Gaps,
    /// The offset.
    Offset,
    /// Something that MiniMalloc does not know.
    Other,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinimallocColumn {
    /// Its name in the file.
    pub name: String,
    /// What it holds.
    pub field: MinimallocField,
}

/// A file: buffers, and in which form they were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinimallocCsv {
    /// Columns in the order of the file.
    pub columns: Vec<MinimallocColumn>,
    /// Buffers in the order of the file.
    pub rows: Vec<MinimallocRow>,
}

/// A file is wrong at a line.
#[derive(Debug, thiserror::Error)]
#[error("line {line}, {column}{found}; expected {expected}")]
pub struct MinimallocError {
    /// Line in the file, from 1.
    pub line: u64,
    /// `column NAME: `, or nothing where the line as a whole is wrong.
    pub column: String,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: &'static str,
}

/// A file could not be written.
#[derive(Debug, thiserror::Error)]
pub enum MinimallocWriteError {
    /// Not one offset for every buffer.
    #[error("{offsets} offsets for {rows} buffers")]
    Count {
        /// Buffers.
        rows: usize,
        /// Offsets.
        offsets: usize,
    },
    /// The writer failed.
    #[error(transparent)]
    Csv(#[from] csv::Error),
}

impl MinimallocCsv {
    /// The plainest form that holds some rows: columns that none of them needs are left out, as
    /// MiniMalloc does. Fields that MiniMalloc does not know are dropped.
    pub fn of(mut rows: Vec<MinimallocRow>) -> MinimallocCsv {
        rows.iter_mut().for_each(|row| row.others.clear());
        let any = |needs: fn(&MinimallocRow) -> bool| rows.iter().any(needs);
        let columns = [
            ("id", MinimallocField::Id, true),
            ("lower", MinimallocField::Lower, true),
            ("upper", MinimallocField::Upper, true),
            ("size", MinimallocField::Size, true),
            ("alignment", MinimallocField::Alignment, any(|row| row.alignment_bytes != 1)),
            ("hint", MinimallocField::Hint, any(|row| row.hint_bytes.is_some())),
            ("gaps", MinimallocField::Gaps, any(|row| !row.gaps.is_empty())),
            ("offset", MinimallocField::Offset, any(|row| row.offset_bytes.is_some())),
        ];
        let needed = columns.into_iter().filter(|&(_, _, needed)| needed);
        let columns = needed
            .map(|(name, field, _)| MinimallocColumn { name: name.to_owned(), field })
            .collect();
        MinimallocCsv { columns, rows }
    }

    /// What a reader should know, a line each.
    pub fn warnings(&self) -> Vec<String> {
        let others = self.columns.iter().filter(|column| column.field == MinimallocField::Other);
        others.map(|column| format!("the column {:?} is not used", column.name)).collect()
    }

    /// What must be added to an end in the file to make it half-open.
    fn addend(&self) -> u64 {
        u64::from(self.columns.iter().any(|column| column.field == MinimallocField::End))
    }
}

/// Reads MiniMalloc's CSV.
///
/// # Errors
/// The first malformed line.
pub fn read_minimalloc_csv(reader: impl Read) -> Result<MinimallocCsv, MinimallocError> {
    let mut records =
        csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(reader);
    let columns = read_columns(records.headers().map_err(|error| csv_error(&error))?)?;
    let mut csv = MinimallocCsv { columns, rows: Vec::new() };
    let addend = csv.addend();
    let mut record = csv::StringRecord::new();
    while records.read_record(&mut record).map_err(|error| csv_error(&error))? {
        let row = read_row(&record, &csv.columns, addend)?;
        csv.rows.push(row);
    }
    Ok(csv)
}

/// Writes the same columns in the same order and form, with `offsets_bytes` in the offset column,
/// which is added at the end if there is none. Without them the rows' own offsets are written.
///
/// # Errors
/// If the number of offsets is not that of the rows, or the writer fails.
pub fn write_minimalloc_csv(
    csv: &MinimallocCsv,
    offsets_bytes: Option<&[u64]>,
    writer: impl Write,
) -> Result<(), MinimallocWriteError> {
    let rows = csv.rows.len();
    if let Some(offsets) = offsets_bytes.map(<[u64]>::len).filter(|&offsets| offsets != rows) {
        return Err(MinimallocWriteError::Count { rows, offsets });
    }
    let has_offset = csv.columns.iter().any(|column| column.field == MinimallocField::Offset);
    let added = (offsets_bytes.is_some() && !has_offset)
        .then(|| MinimallocColumn { name: "offset".to_owned(), field: MinimallocField::Offset });
    let columns: Vec<&MinimallocColumn> = csv.columns.iter().chain(&added).collect();
    let mut writer = csv::Writer::from_writer(writer);
    writer.write_record(columns.iter().map(|column| &column.name))?;
    let addend = csv.addend();
    let mut field = String::new();
    for (index, row) in csv.rows.iter().enumerate() {
        let offset = offsets_bytes.map_or(row.offset_bytes, |offsets| Some(offsets[index]));
        let mut others = row.others.iter();
        for column in &columns {
            field.clear();
            if column.field == MinimallocField::Other {
                field.push_str(others.next().map_or("", String::as_str));
            } else {
                write_field(&mut field, column.field, row, offset, addend);
            }
            writer.write_field(&field)?;
        }
        writer.write_record(None::<&[u8]>)?;
    }
    writer.flush().map_err(csv::Error::from)?;
    Ok(())
}

fn csv_error(error: &csv::Error) -> MinimallocError {
    let line = error.position().map_or(0, csv::Position::line);
    let expected = "lines of text with fields between commas";
    MinimallocError { line, column: String::new(), found: error.to_string(), expected }
}

fn read_columns(header: &csv::StringRecord) -> Result<Vec<MinimallocColumn>, MinimallocError> {
    const EXPECTED: &str = "id,lower,upper,size[,alignment,hint,gaps,offset], each once";
    let wrong =
        |found| MinimallocError { line: 1, column: String::new(), found, expected: EXPECTED };
    let columns: Vec<_> = header
        .iter()
        .map(|name| MinimallocColumn { name: name.to_owned(), field: field_of(name) })
        .collect();
    let mut seen = HashMap::new();
    for column in &columns {
        let one = canonical(column);
        if let Some(other) = seen.insert(one, &column.name) {
            return Err(wrong(format!("the columns {other:?} and {:?}", column.name)));
        }
    }
    for required in ["id", "lower", "upper", "size"] {
        if !seen.contains_key(required) {
            return Err(wrong(format!("no column {required:?}")));
        }
    }
    Ok(columns)
}

/// One name for every name of what may be there once. An inclusive end is an end.
fn canonical(column: &MinimallocColumn) -> &str {
    match column.field {
        MinimallocField::Id => "id",
        MinimallocField::Lower => "lower",
        MinimallocField::Upper | MinimallocField::End => "upper",
        _ => &column.name,
    }
}

fn field_of(name: &str) -> MinimallocField {
    match name {
        "id" | "buffer" | "buffer_id" => MinimallocField::Id,
        "lower" | "begin" | "start" => MinimallocField::Lower,
        "upper" => MinimallocField::Upper,
        "end" => MinimallocField::End,
        "size" => MinimallocField::Size,
        "alignment" => MinimallocField::Alignment,
        "hint" => MinimallocField::Hint,
        "gaps" => MinimallocField::Gaps,
        "offset" => MinimallocField::Offset,
        _ => MinimallocField::Other,
    }
}

fn read_row(
    record: &csv::StringRecord,
    columns: &[MinimallocColumn],
    addend: u64,
) -> Result<MinimallocRow, MinimallocError> {
    let line = record.position().map_or(0, csv::Position::line);
    if record.len() != columns.len() {
        let found = format!("{} fields", record.len());
        let expected = "as many fields as the header has";
        return Err(MinimallocError { line, column: String::new(), found, expected });
    }
    let mut row = MinimallocRow {
        id: String::new(),
        lower: 0,
        upper: 0,
        size_bytes: 0,
        alignment_bytes: 1,
        hint_bytes: None,
        gaps: Vec::new(),
        offset_bytes: None,
        others: Vec::new(),
    };
    for (column, text) in columns.iter().zip(record) {
        read_field(&mut row, column.field, text, addend).map_err(|expected| {
            let column = format!("column {:?}: ", column.name);
            MinimallocError { line, column, found: format!("{text:?}"), expected }
        })?;
    }
    if row.upper < row.lower {
        let found = format!("a life from {} to {}", row.lower, row.upper);
        let expected = "an end that is not before the start";
        return Err(MinimallocError { line, column: String::new(), found, expected });
    }
    Ok(row)
}

const TICK: &str = "a whole number of ticks, from 0 to 2^63 - 1";
const BYTES: &str = "a whole number of bytes, from 0 to 2^63 - 1";
const BYTES_OR_NONE: &str = "a whole number of bytes, from 0 to 2^63 - 1, or nothing";
const HINT: &str = "a whole number of bytes below 2^63, or for no wish a negative one or nothing";
const LAST_TICK: &str = "a whole number of ticks, from -1 (none) to 2^63 - 2";
const ALIGNMENT: &str = "a whole number of bytes, from 1 to 2^63 - 1, or nothing";
const GAPS: &str = "gaps FIRST-LAST or FIRST-LAST@LOW:HIGH that are not empty, between blanks";

/// Reads one field into a row; says what was expected if it is something else.
fn read_field(
    row: &mut MinimallocRow,
    field: MinimallocField,
    text: &str,
    addend: u64,
) -> Result<(), &'static str> {
    match field {
        MinimallocField::Id => text.clone_into(&mut row.id),
        MinimallocField::Lower => row.lower = number(text).ok_or(TICK)?,
        MinimallocField::Upper => row.upper = number(text).ok_or(TICK)?,
        // A life of no ticks from the start of time ends before it.
        MinimallocField::End if text == "-1" => row.upper = 0,
        MinimallocField::End => row.upper = end(text, addend).ok_or(LAST_TICK)?,
        MinimallocField::Size => row.size_bytes = number(text).ok_or(BYTES)?,
        MinimallocField::Alignment if text.is_empty() => row.alignment_bytes = 1,
        MinimallocField::Alignment => {
            row.alignment_bytes =
                number(text).filter(|&alignment| alignment > 0).ok_or(ALIGNMENT)?;
        }
        MinimallocField::Hint => {
            row.hint_bytes = match text.strip_prefix('-') {
                None => number_or_none(text).ok_or(HINT)?,
                Some(digits) => number(digits).map(|_| None).ok_or(HINT)?,
            };
        }
        MinimallocField::Gaps => {
            let gaps = text.split_ascii_whitespace().map(|text| gap(text, addend));
            row.gaps = gaps.collect::<Option<_>>().ok_or(GAPS)?;
        }
        MinimallocField::Offset => {
            row.offset_bytes = number_or_none(text).ok_or(BYTES_OR_NONE)?;
        }
        MinimallocField::Other => row.others.push(text.to_owned()),
    }
    Ok(())
}

/// Digits and nothing else.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().filter(|&number| number <= NUMBER_MAX)
}

fn number_or_none(text: &str) -> Option<Option<u64>> {
    if text.is_empty() { Some(None) } else { number(text).map(Some) }
}

/// An end, made half-open.
fn end(text: &str, addend: u64) -> Option<u64> {
    number(text).map(|end| end + addend).filter(|&end| end <= NUMBER_MAX)
}

fn gap(text: &str, addend: u64) -> Option<MinimallocGap> {
    let (life, window) = match text.split_once('@') {
        None => (text, None),
        Some((life, window)) => (life, Some(window)),
    };
    let (lower, upper) = life.split_once('-')?;
    let (lower, upper) = (number(lower)?, end(upper, addend)?);
    let mut gap = MinimallocGap { lower, upper, window_bytes: None };
    if let Some(window) = window {
        let (low, high) = window.split_once(':')?;
        let (low, high) = (number(low)?, number(high)?);
        if low > high {
            return None;
        }
        gap.window_bytes = Some((low, high));
    }
    (lower < upper).then_some(gap)
}

/// Appends a field as MiniMalloc writes it.
fn write_field(
    text: &mut String,
    field: MinimallocField,
    row: &MinimallocRow,
    offset_bytes: Option<u64>,
    addend: u64,
) {
    use std::fmt::Write as _;
    // Writing to a string cannot fail.
    let _ = match field {
        MinimallocField::Id => write!(text, "{}", row.id),
        MinimallocField::Lower => write!(text, "{}", row.lower),
        MinimallocField::Upper => write!(text, "{}", row.upper),
        MinimallocField::End => write!(text, "{}", i128::from(row.upper) - i128::from(addend)),
        MinimallocField::Size => write!(text, "{}", row.size_bytes),
        MinimallocField::Alignment => write!(text, "{}", row.alignment_bytes),
        MinimallocField::Hint => match row.hint_bytes {
            Some(hint) => write!(text, "{hint}"),
            None => write!(text, "-1"),
        },
        MinimallocField::Gaps => {
            for (at, gap) in row.gaps.iter().enumerate() {
                let blank = if at == 0 { "" } else { " " };
                let _ = write!(text, "{blank}{}-{}", gap.lower, gap.upper - addend.min(gap.upper));
                if let Some((low, high)) = gap.window_bytes {
                    let _ = write!(text, "@{low}:{high}");
                }
            }
            Ok(())
        }
        MinimallocField::Offset => offset_bytes.map_or(Ok(()), |offset| write!(text, "{offset}")),
        MinimallocField::Other => Ok(()),
    };
}
