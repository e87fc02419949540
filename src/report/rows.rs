//! Results tables of experiments as CSV and Parquet, and CSV back again.
//!
//! What is read back prints as the same bytes: figures can be drawn from a committed file alone.

use std::io::{Read, Write};

use super::table::{TableError, TableFormat};
use crate::experiment::{Column, ColumnKind, Rows, Value};

/// A CSV is not the results of this experiment.
#[derive(Debug, thiserror::Error)]
pub enum ReadRowsError {
    /// It cannot be read as CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// It has other columns.
    #[error("has the columns {found}: expected {expected}; run the experiment again")]
    Columns {
        /// What it has.
        found: String,
        /// What the description asks for.
        expected: String,
    },
    /// A value is not what its column holds.
    #[error("line {line}: {column} is {text:?}: expected {expected}")]
    Value {
        /// Line of the file, from 1.
        line: u64,
        /// The column.
        column: String,
        /// What was found.
        text: String,
        /// What was expected.
        expected: &'static str,
    },
}

/// Writes a results table, raw numbers: bytes, nanoseconds, fractions of one.
///
/// # Errors
/// If the writer fails or this program cannot write Parquet.
pub fn write_rows(
    rows: &Rows,
    format: TableFormat,
    writer: &mut (impl Write + Send),
) -> Result<(), TableError> {
    match format {
        TableFormat::Csv => write_csv(rows, writer),
        #[cfg(feature = "analytics")]
        TableFormat::Parquet => parquet::write(rows, writer),
        #[cfg(not(feature = "analytics"))]
        TableFormat::Parquet => Err(TableError::NoParquet),
    }
}

fn write_csv(rows: &Rows, writer: &mut impl Write) -> Result<(), TableError> {
    let mut csv = csv::Writer::from_writer(writer);
    csv.write_record(rows.columns.iter().map(|column| &column.name))?;
    for row in &rows.rows {
        csv.write_record(row.iter().map(super::select::word))?;
    }
    csv.flush()?;
    Ok(())
}

/// Rows as objects whose keys are the columns; null where a figure does not apply.
pub fn row_objects(rows: &Rows) -> Vec<serde_json::Map<String, serde_json::Value>> {
    let json = |value: &Value| match value {
        Value::None => serde_json::Value::Null,
        Value::Word(word) => word.as_str().into(),
        Value::Number(number) => (*number).into(),
        Value::Difference(number) => (*number).into(),
        Value::Fraction(number) => (*number).into(),
    };
    let object = |row: &Vec<Value>| {
        let pairs = rows.columns.iter().zip(row);
        pairs.map(|(column, value)| (column.name.clone(), json(value))).collect()
    };
    rows.rows.iter().map(object).collect()
}

/// Reads a results table with these columns.
///
/// # Errors
/// If it is no CSV, has other columns, or a value is of another kind.
pub fn read_rows(columns: Vec<Column>, reader: impl Read) -> Result<Rows, ReadRowsError> {
    let mut csv = csv::Reader::from_reader(reader);
    let found: Vec<String> = csv.headers()?.iter().map(str::to_owned).collect();
    let expected: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    if found != expected {
        return Err(ReadRowsError::Columns {
            found: found.join(","),
            expected: expected.join(","),
        });
    }
    let mut rows = Vec::new();
    for record in csv.records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        let values = columns.iter().zip(record.iter());
        let row: Result<Vec<Value>, ReadRowsError> =
            values.map(|(column, text)| value(column, text, line)).collect();
        rows.push(row?);
    }
    Ok(Rows { columns, rows })
}

fn value(column: &Column, text: &str, line: u64) -> Result<Value, ReadRowsError> {
    if text.is_empty() {
        return Ok(Value::None);
    }
    let wrong = |expected| ReadRowsError::Value {
        line,
        column: column.name.clone(),
        text: text.chars().take(60).collect(),
        expected,
    };
    match column.kind {
        ColumnKind::Word => Ok(Value::of_word(text)),
        ColumnKind::Number => text.parse().map(Value::Number).map_err(|_| wrong("a whole number")),
        ColumnKind::Difference => {
            text.parse().map(Value::Difference).map_err(|_| wrong("a difference"))
        }
        ColumnKind::Fraction => {
            let number = text.parse().ok().filter(|number: &f64| number.is_finite());
            number.map(Value::Fraction).ok_or_else(|| wrong("a number"))
        }
    }
}

#[cfg(feature = "analytics")]
pub(super) mod parquet {
    use std::io::Write;

    use polars::prelude::{
        Column as Series, DataFrame, NamedFrom, ParquetWriter, Series as Values,
    };

    use super::{ColumnKind, Rows, TableError, Value};

    pub(super) fn write(rows: &Rows, writer: &mut (impl Write + Send)) -> Result<(), TableError> {
        let mut frame = DataFrame::new(rows.rows.len(), series(rows))?;
        ParquetWriter::new(writer).finish(&mut frame)?;
        Ok(())
    }

    /// The columns of a results table.
    pub(in crate::report) fn series(rows: &Rows) -> Vec<Series> {
        let series = rows.columns.iter().enumerate().map(|(at, column)| {
            let name = column.name.as_str().into();
            let values = rows.rows.iter().map(|row| row.get(at).unwrap_or(&Value::None));
            let values = match column.kind {
                ColumnKind::Word => {
                    Values::new(name, values.map(word).collect::<Vec<Option<&str>>>())
                }
                ColumnKind::Number => {
                    Values::new(name, values.map(number).collect::<Vec<Option<u64>>>())
                }
                ColumnKind::Difference => {
                    Values::new(name, values.map(difference).collect::<Vec<Option<i64>>>())
                }
                ColumnKind::Fraction => {
                    Values::new(name, values.map(fraction).collect::<Vec<Option<f64>>>())
                }
            };
            Series::from(values)
        });
        series.collect()
    }

    fn word(value: &Value) -> Option<&str> {
        if let Value::Word(word) = value { Some(word) } else { None }
    }

    fn number(value: &Value) -> Option<u64> {
        if let Value::Number(number) = value { Some(*number) } else { None }
    }

    fn difference(value: &Value) -> Option<i64> {
        if let Value::Difference(number) = value { Some(*number) } else { None }
    }

    fn fraction(value: &Value) -> Option<f64> {
        if let Value::Fraction(number) = value { Some(*number) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Vec<Column> {
        vec![
            Column::new("trace", ColumnKind::Word),
            Column::new("reserved_bytes_peak", ColumnKind::Number),
            Column::new("excess_bytes", ColumnKind::Difference),
            Column::new("fragmentation", ColumnKind::Fraction),
        ]
    }

    const TEXT: &str = "trace,reserved_bytes_peak,excess_bytes,fragmentation\n\
                        \"a, b\",18446744073709551615,-5,0.30000000000000004\n\
                        c,,,\n";

    #[test]
    fn what_is_read_prints_as_the_same_bytes() {
        let rows = read_rows(columns(), TEXT.as_bytes()).expect("reads");
        assert_eq!(rows.rows[0][1], Value::Number(u64::MAX));
        assert_eq!(rows.rows[1][3], Value::None);
        let mut bytes = Vec::new();
        write_rows(&rows, TableFormat::Csv, &mut bytes).expect("writes");
        assert_eq!(String::from_utf8(bytes).expect("UTF-8"), TEXT);
    }

    #[test]
    fn other_columns_and_other_values_are_refused() {
        let error = |text: &str| read_rows(columns(), text.as_bytes()).expect_err("no").to_string();
        assert!(error("trace,x\n").contains("expected trace,reserved_bytes_peak"));
        let message = error(&TEXT.replace("-5", "five"));
        assert!(message.contains("line 2: excess_bytes is \"five\""), "{message}");
        let message = error(&TEXT.replace("0.30000000000000004", "inf"));
        assert!(message.contains("fragmentation is \"inf\""), "{message}");
        assert!(!error(&TEXT.replace("c,,,", "c,")).is_empty());
    }

    #[cfg(feature = "analytics")]
    #[test]
    fn parquet_holds_the_same_rows() {
        use polars::prelude::{ParquetReader, SerReader};

        let rows = read_rows(columns(), TEXT.as_bytes()).expect("reads");
        let mut bytes = Vec::new();
        write_rows(&rows, TableFormat::Parquet, &mut bytes).expect("writes");
        let frame = ParquetReader::new(std::io::Cursor::new(bytes)).finish().expect("reads");
        assert_eq!(frame.shape(), (2, 4));
        let excess = frame.column("excess_bytes").expect("a column");
        assert_eq!((excess.i64().expect("numbers").get(0), excess.null_count()), (Some(-5), 1));
        let peak = frame.column("reserved_bytes_peak").expect("a column");
        assert_eq!(peak.u64().expect("numbers").get(0), Some(u64::MAX));
    }
}
