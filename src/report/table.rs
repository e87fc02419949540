//! Logs and comparisons as tables: CSV, and Parquet where the feature `analytics` is on.
//!
//! A table is described once, as a list of columns, and both formats follow from it. Rows of
//! several runs go into one table; the columns `trace` and `allocator` then stand first and tell
//! them apart.

use std::fmt::{Display, Write as _};
use std::io::{self, Write};
use std::path::Path;

use crate::engine::{Compared, SmallestCapacity};
use crate::metrics::{DecisionRow, TimelineRow};

/// A table could not be written.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The name does not say which format.
    #[error("the name must end in .csv or .parquet to say which table to write")]
    Name,
    /// Parquet was left out of this program.
    #[error(
        "this fraglab was built without the feature `analytics`, which writes Parquet: choose a \
         name that ends in .csv"
    )]
    NoParquet,
    /// The file could not be written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The Parquet writer failed.
    #[error("cannot write Parquet: {0}")]
    Parquet(String),
}

impl From<csv::Error> for TableError {
    fn from(error: csv::Error) -> Self {
        TableError::Io(error.into())
    }
}

/// In which form a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// Comma separated, with a line of column names.
    Csv,
    /// Apache Parquet.
    Parquet,
}

impl TableFormat {
    /// The form that a file name asks for.
    ///
    /// # Errors
    /// If it ends in neither `.csv` nor `.parquet`, or if this program cannot write Parquet.
    pub fn from_path(path: &Path) -> Result<TableFormat, TableError> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("csv") => Ok(TableFormat::Csv),
            Some("parquet") => TableFormat::Parquet.check(),
            _ => Err(TableError::Name),
        }
    }

    /// This form, if this program can write it.
    ///
    /// # Errors
    /// If it is Parquet and that was left out.
    pub fn check(self) -> Result<TableFormat, TableError> {
        match self {
            TableFormat::Parquet if !cfg!(feature = "analytics") => Err(TableError::NoParquet),
            form => Ok(form),
        }
    }
}

/// The rows of one run.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, R> {
    /// Name of the trace, for the column `trace`.
    pub trace: &'a str,
    /// The allocator as on the command line, for the column `allocator`.
    pub allocator: &'a str,
    /// Phase names of the trace, which rows name by index.
    pub phases: &'a [String],
    /// The rows, in order.
    pub rows: &'a [R],
}

/// How the value of a column is read off a row.
enum Read<R> {
    Number(fn(&R) -> Option<u64>),
    Difference(fn(&R) -> Option<i64>),
    Fraction(fn(&R) -> Option<f64>),
    Flag(fn(&R) -> Option<bool>),
    Word(for<'a> fn(&Part<'a, R>, &'a R) -> &'a str),
}

struct Column<R> {
    name: &'static str,
    read: Read<R>,
}

fn number<R>(name: &'static str, read: fn(&R) -> Option<u64>) -> Column<R> {
    Column { name, read: Read::Number(read) }
}

fn fraction<R>(name: &'static str, read: fn(&R) -> Option<f64>) -> Column<R> {
    Column { name, read: Read::Fraction(read) }
}

fn word<R>(name: &'static str, read: for<'a> fn(&Part<'a, R>, &'a R) -> &'a str) -> Column<R> {
    Column { name, read: Read::Word(read) }
}

/// The leading columns of a table that holds more than one run.
fn labels<R>(labelled: bool) -> Vec<Column<R>> {
    if !labelled {
        return Vec::new();
    }
    vec![word("trace", |part, _| part.trace), word("allocator", |part, _| part.allocator)]
}

fn decision_columns(labelled: bool) -> Vec<Column<DecisionRow>> {
    let mut columns = labels(labelled);
    columns.extend([
        number("event_index", |row: &DecisionRow| Some(row.event_index)),
        word("action", |_, row| row.action),
        number("block_id", |row| row.block_id.map(u64::from)),
        number("segment_id", |row| row.segment_id.map(u64::from)),
        number("offset_bytes", |row| row.offset_bytes),
        number("size_bytes", |row| Some(row.size_bytes)),
        number("address", |row| row.address),
    ]);
    columns
}

fn timeline_columns(labelled: bool) -> Vec<Column<TimelineRow>> {
    let mut columns = labels(labelled);
    columns.extend([
        number("event_index", |row: &TimelineRow| Some(row.event_index)),
        number("time_ns", |row| Some(row.time_ns)),
        word("phase", phase_name),
        number("requested_bytes", |row| Some(row.requested_bytes)),
        number("allocated_bytes", |row| Some(row.allocated_bytes)),
        number("active_bytes", |row| Some(row.active_bytes)),
        number("reserved_bytes", |row| Some(row.reserved_bytes)),
    ]);
    columns
}

/// The phase of a row, empty before the first begins.
fn phase_name<'a>(part: &Part<'a, TimelineRow>, row: &'a TimelineRow) -> &'a str {
    let phase = row.phase.and_then(|phase| part.phases.get(phase as usize));
    phase.map_or("", String::as_str)
}

/// Writes decision logs, a row an action. `labelled` puts `trace` and `allocator` first.
///
/// # Errors
/// If the writer fails or this program cannot write Parquet.
pub fn write_decisions(
    parts: &[Part<'_, DecisionRow>],
    labelled: bool,
    format: TableFormat,
    writer: &mut (impl Write + Send),
) -> Result<(), TableError> {
    write(&decision_columns(labelled), parts, format, writer)
}

/// Writes time lines, a row an event. `labelled` puts `trace` and `allocator` first.
///
/// # Errors
/// If the writer fails or this program cannot write Parquet.
pub fn write_timeline(
    parts: &[Part<'_, TimelineRow>],
    labelled: bool,
    format: TableFormat,
    writer: &mut (impl Write + Send),
) -> Result<(), TableError> {
    write(&timeline_columns(labelled), parts, format, writer)
}

fn comparison_columns<'r>() -> Vec<Column<&'r Compared>> {
    fn smallest(row: &Compared) -> Option<&SmallestCapacity> {
        row.smallest_capacity.as_ref()
    }
    vec![
        word("trace", |_, row: &&Compared| &row.result.trace.name),
        word("allocator", |_, row| &row.result.allocator.name),
        word("profile", |_, row| &row.result.device.profile),
        number("capacity_bytes", |row| row.result.device.capacity_bytes),
        number("limit_bytes", |row| row.result.allocator.limit_bytes),
        number("address_bytes_max", |row| row.result.device.address_bytes_max),
        number("mappings_max", |row| row.result.device.mappings_max),
        word("status", |_, row| row.result.outcome.status.name()),
        number("requested_bytes_peak", |row| Some(row.result.peaks.requested_bytes_peak)),
        number("allocated_bytes_peak", |row| Some(row.result.peaks.allocated_bytes_peak)),
        number("active_bytes_peak", |row| Some(row.result.peaks.active_bytes_peak)),
        number("reserved_bytes_peak", |row| Some(row.result.peaks.reserved_bytes_peak)),
        Column {
            name: "excess_bytes",
            read: Read::Difference(|row| Some(row.result.excess_bytes)),
        },
        fraction("fragmentation", |row| Some(row.result.fragmentation)),
        fraction("utilization", |row| Some(row.result.utilization)),
        fraction("active_utilization", |row| Some(row.result.active_utilization)),
        fraction("waste_removed", |row| row.waste_removed),
        number("device_calls", |row| Some(row.result.calls.total())),
        number("address_bytes_peak", |row| row.result.device.address_bytes_peak),
        number("mappings_peak", |row| row.result.device.mappings_peak),
        number("allocator_device_ns", |row| Some(row.result.time.allocator_device_ns)),
        number("recorded_ns", |row| Some(row.result.time.recorded_ns)),
        number("simulated_ns", |row| Some(row.result.time.simulated_ns)),
        fraction("time_share", |row| row.time_share()),
        number("smallest_capacity_bytes", |row| smallest(row)?.capacity_bytes),
        number("over_requested_bytes", |row| smallest(row)?.over_requested_bytes),
        fraction("over_requested", |row| smallest(row)?.over_requested),
        Column { name: "non_monotone", read: Read::Flag(|row| Some(smallest(row)?.non_monotone)) },
        number("probes", |row| Some(smallest(row)?.probes)),
        word("message", |_, row| row.result.outcome.message.as_deref().unwrap_or_default()),
        word("smallest_capacity_message", |_, row| {
            smallest(row).and_then(|smallest| smallest.message.as_deref()).unwrap_or_default()
        }),
    ]
}

/// Writes a comparison, a row a cell, raw numbers: bytes, nanoseconds, fractions of one.
///
/// # Errors
/// If the writer fails or this program cannot write Parquet.
pub fn write_comparison(
    rows: &[&Compared],
    format: TableFormat,
    writer: &mut (impl Write + Send),
) -> Result<(), TableError> {
    let part = Part { trace: "", allocator: "", phases: &[], rows };
    write(&comparison_columns(), &[part], format, writer)
}

fn write<R>(
    columns: &[Column<R>],
    parts: &[Part<'_, R>],
    format: TableFormat,
    writer: &mut (impl Write + Send),
) -> Result<(), TableError> {
    match format {
        TableFormat::Csv => write_csv(columns, parts, writer),
        #[cfg(feature = "analytics")]
        TableFormat::Parquet => parquet::write(columns, parts, writer),
        #[cfg(not(feature = "analytics"))]
        TableFormat::Parquet => Err(TableError::NoParquet),
    }
}

/// A value, or nothing where there is none.
fn spell(value: Option<impl Display>, field: &mut String) {
    if let Some(value) = value {
        // Writing into a String cannot fail.
        let _ = write!(field, "{value}");
    }
}

fn write_csv<R>(
    columns: &[Column<R>],
    parts: &[Part<'_, R>],
    writer: &mut impl Write,
) -> Result<(), TableError> {
    let mut csv = csv::Writer::from_writer(writer);
    csv.write_record(columns.iter().map(|column| column.name))?;
    let mut field = String::new();
    for part in parts {
        for row in part.rows {
            for column in columns {
                field.clear();
                match column.read {
                    Read::Word(read) => field.push_str(read(part, row)),
                    Read::Number(read) => spell(read(row), &mut field),
                    Read::Difference(read) => spell(read(row), &mut field),
                    Read::Fraction(read) => spell(read(row), &mut field),
                    Read::Flag(read) => spell(read(row), &mut field),
                }
                csv.write_field(&field)?;
            }
            csv.write_record(None::<&[u8]>)?;
        }
    }
    csv.flush()?;
    Ok(())
}

#[cfg(feature = "analytics")]
mod parquet {
    use std::io::Write;

    use polars::prelude::{
        Column as Series, DataFrame, NamedFrom, ParquetWriter, PolarsError, Series as Values,
    };

    use super::{Column, Part, Read, TableError};

    /// Rows in a row group: bounds the memory of a long log to tens of megabytes.
    const GROUP_ROWS: usize = 1 << 18;

    impl From<PolarsError> for TableError {
        fn from(error: PolarsError) -> Self {
            TableError::Parquet(error.to_string())
        }
    }

    pub(super) fn write<R>(
        columns: &[Column<R>],
        parts: &[Part<'_, R>],
        writer: &mut (impl Write + Send),
    ) -> Result<(), TableError> {
        let nothing = Part { trace: "", allocator: "", phases: &[], rows: &[] };
        let schema = frame(columns, &nothing, &[])?;
        let mut batched = ParquetWriter::new(writer).batched(schema.schema())?;
        for part in parts {
            for rows in part.rows.chunks(GROUP_ROWS) {
                batched.write_batch(&frame(columns, part, rows)?)?;
            }
        }
        batched.finish()?;
        Ok(())
    }

    fn frame<'a, R>(
        columns: &[Column<R>],
        part: &Part<'a, R>,
        rows: &'a [R],
    ) -> Result<DataFrame, PolarsError> {
        let series = columns.iter().map(|column| {
            let name = column.name.into();
            let values = match column.read {
                Read::Number(read) => {
                    Values::new(name, rows.iter().map(read).collect::<Vec<Option<u64>>>())
                }
                Read::Difference(read) => {
                    Values::new(name, rows.iter().map(read).collect::<Vec<Option<i64>>>())
                }
                Read::Fraction(read) => {
                    Values::new(name, rows.iter().map(read).collect::<Vec<Option<f64>>>())
                }
                Read::Flag(read) => {
                    Values::new(name, rows.iter().map(read).collect::<Vec<Option<bool>>>())
                }
                Read::Word(read) => {
                    Values::new(name, rows.iter().map(|row| read(part, row)).collect::<Vec<&str>>())
                }
            };
            Series::from(values)
        });
        DataFrame::new(rows.len(), series.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decisions() -> [DecisionRow; 2] {
        let alloc = DecisionRow {
            event_index: 3,
            action: "alloc",
            block_id: Some(2),
            segment_id: Some(0),
            offset_bytes: Some(512),
            size_bytes: 1000,
            address: Some(0x7f00),
        };
        let refused = DecisionRow {
            event_index: 4,
            action: "device_refused",
            block_id: None,
            segment_id: None,
            offset_bytes: None,
            size_bytes: 2_097_152,
            address: None,
        };
        [alloc, refused]
    }

    fn part<'a, R>(rows: &'a [R], phases: &'a [String]) -> Part<'a, R> {
        Part { trace: "job, one", allocator: "native", phases, rows }
    }

    fn decisions_csv(labelled: bool) -> String {
        let mut bytes = Vec::new();
        let rows = decisions();
        write_decisions(&[part(&rows, &[])], labelled, TableFormat::Csv, &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn one_run_has_exactly_the_columns_that_scripts_rely_on() {
        assert_eq!(
            decisions_csv(false),
            "event_index,action,block_id,segment_id,offset_bytes,size_bytes,address\n\
             3,alloc,2,0,512,1000,32512\n\
             4,device_refused,,,,2097152,\n"
        );
    }

    #[test]
    fn several_runs_are_told_apart_by_leading_columns() {
        let text = decisions_csv(true);
        assert!(text.starts_with("trace,allocator,event_index,action,"), "{text}");
        assert!(text.contains("\n\"job, one\",native,3,alloc,2,0,512,1000,32512\n"), "{text}");
    }

    fn timeline() -> [TimelineRow; 2] {
        let row = |event_index, phase| TimelineRow {
            event_index,
            time_ns: 10 * event_index,
            phase,
            requested_bytes: 1,
            allocated_bytes: 2,
            active_bytes: 3,
            reserved_bytes: 4,
        };
        [row(0, None), row(1, Some(0))]
    }

    #[test]
    fn a_time_line_names_its_phases() {
        let mut bytes = Vec::new();
        let (rows, phases) = (timeline(), ["step0.forward".to_owned()]);
        write_timeline(&[part(&rows, &phases)], false, TableFormat::Csv, &mut bytes).unwrap();
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            "event_index,time_ns,phase,requested_bytes,allocated_bytes,active_bytes,\
             reserved_bytes\n0,0,,1,2,3,4\n1,10,step0.forward,1,2,3,4\n"
        );
    }

    #[cfg(feature = "analytics")]
    #[test]
    fn parquet_holds_the_same_rows() {
        use polars::prelude::{ParquetReader, SerReader};

        let mut bytes = Vec::new();
        let rows = decisions();
        let parts = [part(&rows, &[]), part(&rows, &[])];
        write_decisions(&parts, true, TableFormat::Parquet, &mut bytes).unwrap();
        let frame = ParquetReader::new(io::Cursor::new(bytes)).finish().unwrap();
        assert_eq!(frame.shape(), (4, 9));
        let address = frame.column("address").unwrap().u64().unwrap().get(2);
        assert_eq!(address, Some(0x7f00));
        assert_eq!(frame.column("block_id").unwrap().null_count(), 2);
        let trace = frame.column("trace").unwrap().str().unwrap().get(3).map(str::to_owned);
        assert_eq!(trace.as_deref(), Some("job, one"));
    }

    #[cfg(feature = "analytics")]
    #[test]
    fn an_empty_log_is_still_a_parquet_table() {
        use polars::prelude::{ParquetReader, SerReader};

        let mut bytes = Vec::new();
        write_timeline(&[], false, TableFormat::Parquet, &mut bytes).unwrap();
        let frame = ParquetReader::new(io::Cursor::new(bytes)).finish().unwrap();
        assert_eq!(frame.shape(), (0, 7));
    }

    #[test]
    fn the_name_says_the_format() {
        let format = |name: &str| TableFormat::from_path(Path::new(name));
        assert_eq!(format("log.csv").unwrap(), TableFormat::Csv);
        assert_eq!(format("log.CSV").unwrap(), TableFormat::Csv);
        assert!(matches!(format("log.xlsx"), Err(TableError::Name)));
        assert!(matches!(format("csv"), Err(TableError::Name)));
        if cfg!(feature = "analytics") {
            assert_eq!(format("log.parquet").unwrap(), TableFormat::Parquet);
        } else {
            assert!(matches!(format("log.parquet"), Err(TableError::NoParquet)));
        }
    }
}
