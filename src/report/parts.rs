//! Parts of an experiment as Parquet, and joined again.
//!
//! The one design decision: a part holds its rows as the whole holds them, names and all, with the
//! place of each cell in front. So joining is sorting, needs no trace, and what comes of it prints
//! as the same bytes.

use std::io::{Cursor, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use polars::prelude::{
    Column as Series, DataFrame, KeyValueMetadata, NamedFrom, ParquetReader, ParquetWriter,
    PolarsError, SerReader, Series as Values, SortMultipleOptions,
};

use super::rows::parquet::series;
use crate::experiment::{Column, ColumnKind, Key, PartHeader, Rows, Value};
use crate::trace::seal;

const HEADER_KEY: &str = "fraglab_part";
/// Place of a row's cell among all cells, from 0.
const CELL_COLUMN: &str = "cell_index";
/// A key of the content of its trace; nothing if it could not be read.
const CONTENT_COLUMN: &str = "trace_key";

/// A part could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The bytes could not be written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Not as it was written.
    #[error("damaged: {0}; expected what `fraglab experiment --shard` wrote: run its part again")]
    Damaged(String),
    /// Parquet, but no part.
    #[error("no part of an experiment: expected what `fraglab experiment --shard` wrote")]
    Foreign,
}

impl From<PolarsError> for PartError {
    fn from(error: PolarsError) -> Self {
        match error {
            PolarsError::IO { error, .. } => {
                PartError::Io(std::io::Error::new(error.kind(), error.to_string()))
            }
            other => PartError::Damaged(other.to_string()),
        }
    }
}

/// A row's place among all cells, and a key of the content of its trace.
pub type PartRow = (u64, Option<Key>);

/// Writes a part: its rows, with what is known of each.
///
/// # Errors
/// If the writer fails.
pub fn write_part(
    header: &PartHeader,
    rows: &Rows,
    of_rows: &[PartRow],
    writer: &mut impl Write,
) -> Result<(), PartError> {
    let cells: Vec<u64> = of_rows.iter().map(|(cell, _)| *cell).collect();
    let contents = of_rows.iter().map(|(_, key)| key.map(|key| key.to_string()));
    let contents: Vec<Option<String>> = contents.collect();
    let mut columns = vec![
        Series::from(Values::new(CELL_COLUMN.into(), cells)),
        Series::from(Values::new(CONTENT_COLUMN.into(), contents)),
    ];
    columns.extend(series(rows));
    let mut frame = DataFrame::new(rows.rows.len(), columns)?;
    let header = serde_json::to_string(header).map_err(std::io::Error::from)?;
    let metadata = vec![(HEADER_KEY.to_owned(), header), seal::blank()];
    let mut bytes = Vec::new();
    ParquetWriter::new(&mut bytes)
        .with_key_value_metadata(Some(KeyValueMetadata::from_static(metadata)))
        .finish(&mut frame)?;
    seal::set(&mut bytes);
    writer.write_all(&bytes)?;
    Ok(())
}

/// A part that was read.
pub struct Part {
    /// What it says of itself.
    pub header: PartHeader,
    frame: DataFrame,
}

impl Part {
    /// Reads a part.
    ///
    /// # Errors
    /// If it is damaged or something else.
    pub fn read(bytes: Vec<u8>) -> Result<Part, PartError> {
        let damaged = |what: &str| PartError::Damaged(what.to_owned());
        if !bytes.starts_with(b"PAR1") {
            return Err(PartError::Foreign);
        }
        seal::check(&bytes).map_err(|broken| {
            let seal::Broken { found, expected } = broken;
            PartError::Damaged(format!("its checksum is {found}, not {expected}"))
        })?;
        // Without the checksum polars would see bytes that nobody vouches for.
        if !seal::is_there(&bytes) {
            let ends = bytes.ends_with(b"PAR1");
            return Err(if ends { PartError::Foreign } else { damaged("it is cut short") });
        }
        let read = catch_unwind(AssertUnwindSafe(|| {
            let mut reader = ParquetReader::new(Cursor::new(bytes));
            let pairs = reader.get_metadata()?.key_value_metadata.clone().unwrap_or_default();
            let header = pairs.into_iter().find(|pair| pair.key == HEADER_KEY);
            Ok::<_, PartError>((header.and_then(|pair| pair.value), reader.finish()?))
        }));
        let (header, frame) = read.unwrap_or_else(|_| Err(damaged("it is no good Parquet")))?;
        let header = serde_json::from_str(&header.ok_or(PartError::Foreign)?);
        let header = header.map_err(|error| PartError::Damaged(error.to_string()))?;
        Ok(Part { header, frame })
    }

    /// The places of its rows among all cells.
    ///
    /// # Errors
    /// If it has none.
    pub fn cells(&self) -> Result<Vec<u64>, PartError> {
        let cells = self.frame.column(CELL_COLUMN)?.u64()?;
        Ok(cells.iter().flatten().collect())
    }
}

/// The rows of parts in the order of their cells, in columns that are those of the whole.
///
/// # Errors
/// If a part has other columns.
pub fn join(parts: Vec<Part>, columns: Vec<Column>) -> Result<Rows, PartError> {
    let mut frames = parts.into_iter().map(|part| part.frame);
    let Some(mut whole) = frames.next() else { return Ok(Rows { columns, rows: Vec::new() }) };
    for frame in frames {
        whole.vstack_mut_owned(frame)?;
    }
    let whole = whole.sort([CELL_COLUMN], SortMultipleOptions::default())?;
    let mut rows: Vec<Vec<Value>> = Vec::new();
    rows.resize_with(whole.height(), || Vec::with_capacity(columns.len()));
    for column in &columns {
        let values = whole.column(&column.name)?.as_materialized_series().clone();
        match column.kind {
            ColumnKind::Word => fill(&mut rows, values.str()?.iter(), Value::of_word),
            ColumnKind::Number => fill(&mut rows, values.u64()?.iter(), Value::Number),
            ColumnKind::Difference => fill(&mut rows, values.i64()?.iter(), Value::Difference),
            ColumnKind::Fraction => fill(&mut rows, values.f64()?.iter(), Value::Fraction),
        }
    }
    Ok(Rows { columns, rows })
}

/// Puts the values of a column behind those that the rows have.
fn fill<T>(
    rows: &mut [Vec<Value>],
    values: impl Iterator<Item = Option<T>>,
    make: impl Fn(T) -> Value,
) {
    for (row, value) in rows.iter_mut().zip(values) {
        row.push(value.map_or(Value::None, &make));
    }
}
