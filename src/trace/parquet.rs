//! Parquet: one row an event, denormalised, for people who look at traces with other tools.
//!
//! Rows are the truth for whatever they can hold. The rest (header, tables, the layout at the
//! start, the recording's actions, blocks that no event asks for) stands in the key-value metadata,
//! in the native format, so that its reader and its checks serve here too. The columns are listed
//! in `traces/README.md`.
//!
//! A file carries its own checksum ([`seal`](super::seal)). One without it, as another program may
//! write it, is read all the same.

use std::collections::HashMap;
use std::io::{Cursor, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use polars::prelude::*;

use super::native::{parse, print};
use super::seal;
use super::text::word;
use super::{
    Block, Direction, Event, InvalidTrace, Limits, NativeError, Op, OverLimit, Recording, Role,
    Trace, validate,
};
use crate::units::{
    BlockId, ModuleId, NameId, PhaseId, PoolId, SettingsId, SiteId, StreamId, TransferId,
};

const TABLES_KEY: &str = "fraglab_trace";
const UNUSED_KEY: &str = "fraglab_unused_blocks";

/// A Parquet trace could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ParquetError {
    /// The bytes could not be read or written.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Not Parquet, damaged, or of a kind that polars does not read.
    #[error("not a readable Parquet file: {0}")]
    Polars(String),
    /// Not as it was written.
    #[error(
        "the Parquet file is damaged: its checksum is {found}, expected {expected} (a program that \
         changes a trace must drop `fraglab_checksum` from the metadata)"
    )]
    Checksum {
        /// CRC-32 of the file in hexadecimal.
        found: String,
        /// What the metadata says.
        expected: String,
    },
    /// Parquet, but without what makes it a trace.
    #[error("no trace: the Parquet metadata has no `{0}`, which `fraglab convert` writes")]
    NoMetadata(&'static str),
    /// The metadata is not as it should be.
    #[error("Parquet metadata: {0}")]
    Metadata(#[from] NativeError),
    /// A column is missing or has another type.
    #[error("column `{column}`: {message}")]
    Column {
        /// Name of the column.
        column: &'static str,
        /// What is wrong.
        message: String,
    },
    /// A row makes no sense.
    #[error("row {row}: {message}")]
    Row {
        /// Index of the row, from 0.
        row: usize,
        /// What is wrong.
        message: String,
    },
    /// More events than are taken.
    #[error(transparent)]
    Limit(#[from] OverLimit),
    /// Well-formed, but the trace contradicts itself.
    #[error(transparent)]
    Invalid(#[from] InvalidTrace),
}

impl From<PolarsError> for ParquetError {
    fn from(error: PolarsError) -> Self {
        match error {
            // The kind is kept, so that a closed pipe is still known as one.
            PolarsError::IO { error, .. } => {
                ParquetError::Io(std::io::Error::new(error.kind(), error.to_string()))
            }
            other => ParquetError::Polars(other.to_string()),
        }
    }
}

/// The word for an event, and what kind of thing it speaks of.
fn describe(op: Op) -> (&'static str, Subject) {
    match op {
        Op::Alloc(block) => ("alloc", Subject::Block(block)),
        Op::Attempt(block) => ("attempt", Subject::Block(block)),
        Op::Free(block) => ("free", Subject::Block(block)),
        Op::Defer(block) => ("defer", Subject::Block(block)),
        Op::Done(block) => ("done", Subject::Block(block)),
        Op::Access(block) => ("access", Subject::Block(block)),
        Op::Mark(phase) => ("mark", Subject::Object(phase.0)),
        Op::EmptyCache => ("empty_cache", Subject::None),
        Op::Settings(settings) => ("settings", Subject::Object(settings.0)),
        Op::PoolEnter(pool) => ("pool_enter", Subject::Object(pool.0)),
        Op::PoolLeave(pool) => ("pool_leave", Subject::Object(pool.0)),
        Op::PoolDelete(pool) => ("pool_delete", Subject::Object(pool.0)),
        Op::ModuleEnter(module) => ("module_enter", Subject::Object(module.0)),
        Op::ModuleLeave(module) => ("module_leave", Subject::Object(module.0)),
        Op::Transfer(transfer) => ("transfer", Subject::Object(transfer.0)),
    }
}

enum Subject {
    None,
    Block(BlockId),
    /// Index into the table that the event's word names.
    Object(u32),
}

impl Subject {
    fn block(&self) -> Option<BlockId> {
        match self {
            Subject::Block(block) => Some(*block),
            _ => None,
        }
    }
}

/// The event of a word, given the ids of its row.
fn op_of(event: &str, block: Option<u32>, object: Option<u32>) -> Result<Op, String> {
    let block = || block.map(BlockId).ok_or("has no block_id");
    let object = || object.ok_or("has no object_id");
    Ok(match event {
        "alloc" => Op::Alloc(block()?),
        "attempt" => Op::Attempt(block()?),
        "free" => Op::Free(block()?),
        "defer" => Op::Defer(block()?),
        "done" => Op::Done(block()?),
        "access" => Op::Access(block()?),
        "mark" => Op::Mark(PhaseId(object()?)),
        "empty_cache" => Op::EmptyCache,
        "settings" => Op::Settings(SettingsId(object()?)),
        "pool_enter" => Op::PoolEnter(PoolId(object()?)),
        "pool_leave" => Op::PoolLeave(PoolId(object()?)),
        "pool_delete" => Op::PoolDelete(PoolId(object()?)),
        "module_enter" => Op::ModuleEnter(ModuleId(object()?)),
        "module_leave" => Op::ModuleLeave(ModuleId(object()?)),
        "transfer" => Op::Transfer(TransferId(object()?)),
        other => return Err(format!("unknown event `{other}`")),
    })
}

fn asked_block(op: Op) -> Option<BlockId> {
    match op {
        Op::Alloc(block) | Op::Attempt(block) => Some(block),
        _ => None,
    }
}

// ---- writing ----

/// Writes a Parquet trace.
///
/// # Errors
/// If the trace is not [valid](validate) or writing fails.
pub fn write_parquet(trace: &Trace, mut writer: impl Write) -> Result<(), ParquetError> {
    validate(trace)?;
    let (tables, unused) = tables_of(trace)?;
    let metadata = [(TABLES_KEY, tables), (UNUSED_KEY, unused)];
    let mut metadata = metadata.map(|(key, value)| (key.to_owned(), value)).to_vec();
    metadata.push(seal::blank());
    let mut frame = DataFrame::new(trace.events.len(), columns_of(trace))?;
    let mut bytes = Vec::new();
    ParquetWriter::new(&mut bytes)
        .with_key_value_metadata(Some(KeyValueMetadata::from_static(metadata)))
        .finish(&mut frame)?;
    seal::set(&mut bytes);
    writer.write_all(&bytes)?;
    writer.flush()?;
    Ok(())
}

/// What rows cannot hold, as native JSON, and the ids of the blocks in it.
fn tables_of(trace: &Trace) -> Result<(String, String), ParquetError> {
    let mut used = vec![false; trace.blocks.len()];
    for block in trace.events.iter().filter_map(|event| asked_block(event.op)) {
        used[block.index()] = true;
    }
    let unused: Vec<u32> =
        (0..trace.blocks.len() as u32).filter(|&id| !used[id as usize]).collect();
    let pick = |id: &u32| trace.blocks[*id as usize];
    let recording = trace.recording.as_ref().map(|recording| Recording {
        block_addresses: unused.iter().map(|&id| recording.block_addresses[id as usize]).collect(),
        actions: recording.actions.clone(),
        truth: recording.truth.clone(),
    });
    let tables = Trace {
        header: trace.header.clone(),
        blocks: unused.iter().map(pick).collect(),
        streams: trace.streams.clone(),
        pools: trace.pools.clone(),
        settings_changes: trace.settings_changes.clone(),
        phases: trace.phases.clone(),
        modules: trace.modules.clone(),
        transfers: trace.transfers.clone(),
        names: trace.names.clone(),
        sites: trace.sites.clone(),
        // Block ids in it are those of the whole trace, as in the recording's actions.
        start: trace.start.clone(),
        events: Vec::new(),
        recording,
    };
    let mut json = Vec::new();
    print(&tables, &mut json)?;
    let unused = serde_json::to_string(&unused).map_err(std::io::Error::from)?;
    Ok((String::from_utf8_lossy(&json).into_owned(), unused))
}

fn columns_of(trace: &Trace) -> Vec<Column> {
    let events = &trace.events;
    let words: Vec<(&str, Subject)> = events.iter().map(|event| describe(event.op)).collect();
    let blocks: Vec<Option<&Block>> =
        words.iter().map(|(_, s)| Some(&trace.blocks[s.block()?.index()])).collect();
    let roles = Role::ALL.map(|role| word(&role));
    let site_labels: Vec<Option<String>> =
        (0..trace.sites.stacks.len() as u32).map(|id| trace.site_label(SiteId(id))).collect();
    let of_block = |get: &dyn Fn(&Block) -> Option<u32>| -> Vec<Option<u32>> {
        blocks.iter().map(|block| get((*block)?)).collect()
    };
    let sites = of_block(&|block| block.site.some().map(|site| site.0));
    let mut phase = None;
    let phases = events.iter().map(|event| {
        if let Op::Mark(id) = event.op {
            phase = Some(trace.phases[id.index()].as_str());
        }
        phase
    });
    vec![
        numbers("event_index", (0..events.len() as u32).collect::<Vec<_>>()),
        numbers("time_ns", events.iter().map(|event| event.time_ns).collect::<Vec<_>>()),
        Column::new("event".into(), words.iter().map(|(word, _)| *word).collect::<Vec<_>>()),
        numbers("block_id", words.iter().map(|(_, s)| Some(s.block()?.0)).collect::<Vec<_>>()),
        numbers("size_bytes", events.iter().map(|e| size_of(trace, e.op)).collect::<Vec<_>>()),
        numbers(
            "stream",
            blocks
                .iter()
                .map(|block| Some(trace.streams[(*block)?.stream.index()].handle))
                .collect::<Vec<_>>(),
        ),
        Column::new(
            "site".into(),
            sites.iter().map(|id| site_labels[(*id)? as usize].as_deref()).collect::<Vec<_>>(),
        ),
        numbers("site_id", sites),
        numbers("name_id", of_block(&|block| block.name.some().map(|name| name.0))),
        Column::new(
            "role".into(),
            blocks.iter().map(|b| Some(roles[(*b)?.role as usize].as_str())).collect::<Vec<_>>(),
        ),
        Column::new("phase".into(), phases.collect::<Vec<_>>()),
        numbers("object_id", words.iter().map(|(_, s)| object_id(s)).collect::<Vec<_>>()),
        Column::new(
            "object".into(),
            events.iter().map(|event| object_name(trace, event.op)).collect::<Vec<_>>(),
        ),
        numbers("address", words.iter().map(|(_, s)| address_of(trace, s)).collect::<Vec<_>>()),
    ]
}

fn numbers<T, P>(name: &str, values: T) -> Column
where
    Series: NamedFrom<T, P>,
    T: AsRef<P>,
    P: ?Sized,
{
    Series::new(name.into(), values).into()
}

fn size_of(trace: &Trace, op: Op) -> Option<u64> {
    match op {
        Op::Transfer(transfer) => Some(trace.transfers[transfer.index()].size_bytes),
        _ => Some(trace.blocks[describe(op).1.block()?.index()].size_bytes),
    }
}

fn object_id(subject: &Subject) -> Option<u32> {
    match subject {
        Subject::Object(id) => Some(*id),
        _ => None,
    }
}

fn object_name(trace: &Trace, op: Op) -> Option<&str> {
    match op {
        Op::Mark(phase) => Some(&trace.phases[phase.index()]),
        Op::Settings(settings) => Some(&trace.settings_changes[settings.index()]),
        Op::PoolEnter(pool) | Op::PoolLeave(pool) | Op::PoolDelete(pool) => {
            Some(&trace.pools[pool.index()].name)
        }
        Op::ModuleEnter(module) | Op::ModuleLeave(module) => Some(&trace.modules[module.index()]),
        Op::Transfer(transfer) => Some(match trace.transfers[transfer.index()].direction {
            Direction::HostToDevice => "h2d",
            Direction::DeviceToHost => "d2h",
        }),
        _ => None,
    }
}

fn address_of(trace: &Trace, subject: &Subject) -> Option<u64> {
    let address = trace.recording.as_ref()?.block_addresses[subject.block()?.index()];
    (address != 0).then_some(address)
}

// ---- reading ----

/// Reads a Parquet trace to its end and validates it.
///
/// # Errors
/// What is wrong and where: the column, the row or the event.
pub fn read_parquet(reader: impl Read) -> Result<Trace, ParquetError> {
    read_parquet_within(reader, &Limits::default())
}

/// Reads a Parquet trace of at most so many events to its end and validates it.
///
/// # Errors
/// What is wrong and where: the column, the row or the event.
pub fn read_parquet_within(mut reader: impl Read, limits: &Limits) -> Result<Trace, ParquetError> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    seal::check(&bytes).map_err(|broken| {
        let seal::Broken { found, expected } = broken;
        ParquetError::Checksum { found, expected }
    })?;
    // Polars panics at some files that another program wrote badly.
    let read = catch_unwind(AssertUnwindSafe(|| read_frame(bytes, limits)));
    let (frame, tables, unused) =
        read.unwrap_or_else(|_| Err(ParquetError::Polars("the file is damaged".to_owned())))?;
    let trace = Rows::new(&frame)?.into_trace(tables, &unused)?;
    validate(&trace)?;
    Ok(trace)
}

/// The rows, the tables of the metadata, and the ids of the blocks in them.
fn read_frame(
    bytes: Vec<u8>,
    limits: &Limits,
) -> Result<(DataFrame, Trace, Vec<u32>), ParquetError> {
    let mut reader = ParquetReader::new(Cursor::new(bytes));
    let metadata = reader.get_metadata()?;
    // What the footer says is told before polars makes rows of it: a page of one value repeated
    // may stand for billions.
    limits.check_events(metadata.num_rows as u64)?;
    let pairs = metadata.key_value_metadata.clone().unwrap_or_default();
    let value = |key: &'static str| {
        let found = pairs.iter().find(|pair| pair.key == key).and_then(|pair| pair.value.clone());
        found.ok_or(ParquetError::NoMetadata(key))
    };
    let tables = parse(value(TABLES_KEY)?.as_bytes(), limits)?;
    let unused: Vec<u32> = serde_json::from_str(&value(UNUSED_KEY)?).map_err(NativeError::from)?;
    Ok((reader.finish()?, tables, unused))
}

/// The columns that are read, as long as each other.
struct Rows {
    time_ns: UInt64Chunked,
    event: StringChunked,
    block_id: UInt32Chunked,
    size_bytes: UInt64Chunked,
    stream: UInt64Chunked,
    site_id: UInt32Chunked,
    name_id: UInt32Chunked,
    role: StringChunked,
    object_id: UInt32Chunked,
    address: UInt64Chunked,
}

impl Rows {
    fn new(frame: &DataFrame) -> Result<Rows, ParquetError> {
        let index = u32_column(frame, "event_index")?;
        let order = index.iter().zip(0u32..).position(|(index, row)| index != Some(row));
        if let Some(row) = order {
            let message =
                "is not the event_index: rows must stand in the order of events".to_owned();
            return Err(ParquetError::Row { row, message });
        }
        Ok(Rows {
            time_ns: u64_column(frame, "time_ns")?,
            event: text_column(frame, "event")?,
            block_id: u32_column(frame, "block_id")?,
            size_bytes: u64_column(frame, "size_bytes")?,
            stream: u64_column(frame, "stream")?,
            site_id: u32_column(frame, "site_id")?,
            name_id: u32_column(frame, "name_id")?,
            role: text_column(frame, "role")?,
            object_id: u32_column(frame, "object_id")?,
            address: u64_column(frame, "address")?,
        })
    }

    fn into_trace(self, mut tables: Trace, unused: &[u32]) -> Result<Trace, ParquetError> {
        let events = self.events()?;
        let asked = events.iter().filter(|event| asked_block(event.op).is_some()).count();
        let mut slots = Slots::new(asked + unused.len());
        let addresses = tables.recording.as_ref().map(|r| r.block_addresses.clone());
        if unused.len() != tables.blocks.len()
            || addresses.as_ref().is_some_and(|addresses| addresses.len() != unused.len())
        {
            let message = format!("lists {} of {} blocks", unused.len(), tables.blocks.len());
            return Err(ParquetError::Column { column: UNUSED_KEY, message });
        }
        let wrong_id = |message| ParquetError::Column { column: UNUSED_KEY, message };
        for (position, (&id, &block)) in unused.iter().zip(&tables.blocks).enumerate() {
            let address = addresses.as_ref().map_or(0, |addresses| addresses[position]);
            slots.fill(BlockId(id), block, address).map_err(wrong_id)?;
        }
        let reader = BlockReader::new(&self, &tables);
        for (row, event) in events.iter().enumerate() {
            let Some(id) = asked_block(event.op) else { continue };
            let address = self.address.get(row).unwrap_or(0);
            reader
                .block(row)
                .and_then(|block| slots.fill(id, block, address))
                .map_err(|message| ParquetError::Row { row, message })?;
        }
        // As many blocks as slots and no slot twice: every slot is filled.
        let (blocks, addresses) = slots.filled.into_iter().flatten().unzip();
        tables.blocks = blocks;
        tables.events = events;
        if let Some(recording) = &mut tables.recording {
            recording.block_addresses = addresses;
        }
        Ok(tables)
    }

    fn events(&self) -> Result<Vec<Event>, ParquetError> {
        let ids = self.block_id.iter().zip(self.object_id.iter());
        let rows = self.time_ns.iter().zip(self.event.iter()).zip(ids);
        rows.enumerate()
            .map(|(row, ((time_ns, event), (block, object)))| {
                let wrong = |message| ParquetError::Row { row, message };
                let time_ns = time_ns.ok_or_else(|| wrong("has no time_ns".to_owned()))?;
                let event = event.ok_or_else(|| wrong("has no event".to_owned()))?;
                let op = op_of(event, block, object).map_err(wrong)?;
                Ok(Event { time_ns, op })
            })
            .collect()
    }
}

/// Blocks and their addresses, by id.
struct Slots {
    filled: Vec<Option<(Block, u64)>>,
}

impl Slots {
    fn new(count: usize) -> Slots {
        Slots { filled: vec![None; count] }
    }

    fn fill(&mut self, id: BlockId, block: Block, address: u64) -> Result<(), String> {
        let count = self.filled.len();
        match self.filled.get_mut(id.index()) {
            None => Err(format!("block {} does not exist: there are {count}", id.0)),
            Some(Some(_)) => Err(format!("block {} is asked for twice", id.0)),
            Some(slot) => {
                *slot = Some((block, address));
                Ok(())
            }
        }
    }
}

/// Reads what `alloc` and `attempt` rows say of their blocks.
struct BlockReader<'a> {
    rows: &'a Rows,
    streams: HashMap<u64, StreamId>,
    roles: HashMap<String, Role>,
}

impl<'a> BlockReader<'a> {
    fn new(rows: &'a Rows, tables: &Trace) -> Self {
        let streams = tables.streams.iter().map(|stream| stream.handle).zip((0..).map(StreamId));
        let roles = Role::ALL.into_iter().map(|role| (word(&role), role));
        BlockReader { rows, streams: streams.collect(), roles: roles.collect() }
    }

    fn block(&self, row: usize) -> Result<Block, String> {
        let rows = self.rows;
        let size_bytes = rows.size_bytes.get(row).ok_or("has no size_bytes")?;
        let handle = rows.stream.get(row).ok_or("has no stream")?;
        let stream = *self.streams.get(&handle).ok_or_else(|| {
            format!("stream {handle:#x} is not among the streams of the metadata")
        })?;
        let role = match rows.role.get(row) {
            None => Role::Unknown,
            Some(word) => *self.roles.get(word).ok_or_else(|| format!("`{word}` is no role"))?,
        };
        let site = rows.site_id.get(row).map_or(SiteId::NONE, SiteId);
        let name = rows.name_id.get(row).map_or(NameId::NONE, NameId);
        Ok(Block { size_bytes, stream, site, name, role })
    }
}

/// A column as long as the others: polars takes the length of each from its own pages.
fn column_of<'f>(frame: &'f DataFrame, column: &'static str) -> Result<&'f Column, ParquetError> {
    let wrong = |message: String| ParquetError::Column { column, message };
    let found = frame.column(column).map_err(|_| wrong("is missing".to_owned()))?;
    let (rows, expected) = (found.len(), frame.height());
    if rows != expected {
        return Err(wrong(format!("has {rows} rows, expected {expected} as in the others")));
    }
    Ok(found)
}

/// A column of any integer type whose values all fit into `dtype`: other tools choose other widths.
fn integer_column(
    frame: &DataFrame,
    column: &'static str,
    dtype: &DataType,
) -> Result<Series, ParquetError> {
    let wrong = |message: String| ParquetError::Column { column, message };
    let found = column_of(frame, column)?;
    // A column of nulls has lost its type in some tools.
    if !found.dtype().is_integer() && found.dtype() != &DataType::Null {
        return Err(wrong(format!("has type {}, expected {dtype}", found.dtype())));
    }
    let cast =
        found.strict_cast(dtype).map_err(|_| wrong(format!("has values that are no {dtype}")))?;
    Ok(cast.take_materialized_series())
}

fn u64_column(frame: &DataFrame, column: &'static str) -> Result<UInt64Chunked, ParquetError> {
    Ok(integer_column(frame, column, &DataType::UInt64)?.u64()?.clone())
}

fn u32_column(frame: &DataFrame, column: &'static str) -> Result<UInt32Chunked, ParquetError> {
    Ok(integer_column(frame, column, &DataType::UInt32)?.u32()?.clone())
}

fn text_column(frame: &DataFrame, column: &'static str) -> Result<StringChunked, ParquetError> {
    let wrong = |message: String| ParquetError::Column { column, message };
    let found = column_of(frame, column)?;
    if found.dtype() == &DataType::Null {
        return Ok(StringChunked::full_null(column.into(), found.len()));
    }
    let text =
        found.str().map_err(|_| wrong(format!("has type {}, expected str", found.dtype())))?;
    Ok(text.clone())
}
