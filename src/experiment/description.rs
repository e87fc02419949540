//! What an experiment is: which cells, and what is made of their results. Plain data, as
//! [`read_description`](super::read_description) gives it.

use super::filter::Filter;
use super::fleet::FleetSpec;
use super::rows::{Column, ColumnKind};

/// An experiment.
#[derive(Clone, Debug)]
pub struct Description {
    /// Its name: files are called by it.
    pub name: String,
    /// One line above the report.
    pub title: String,
    /// What the report says first, in Markdown.
    pub text: String,
    /// When its committed results were made, as the person who committed them wrote it.
    pub date: Option<String>,
    /// What is measured.
    pub kind: Kind,
    /// Parameters that cells are multiplied by.
    pub axes: Vec<Axis>,
    /// The figures.
    pub figures: Vec<FigureSpec>,
    /// The tables of the report.
    pub tables: Vec<TableSpec>,
    /// How traces are ranks of a fleet, which is then summed up.
    pub fleet: Option<FleetSpec>,
    /// The text that was read, for errors that show later.
    pub(super) source: String,
}

/// What is measured.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Traces through allocators.
    Replay(Vec<Block>),
    /// What the device calls of cost profiles cost.
    DeviceLatency(Latency),
}

/// Cells of one kind: every trace through every allocator on every device.
#[derive(Clone, Debug)]
pub struct Block {
    /// Name of the block, empty where there is only one.
    pub set: String,
    /// The traces.
    pub traces: Vec<TraceTemplate>,
    /// The allocators.
    pub allocators: Vec<AllocatorTemplate>,
    /// Device memory.
    pub capacities: Vec<Size>,
    /// The allocator's own limit.
    pub limits: Vec<Size>,
    /// Look for the smallest capacity too, where the capacity is that of the trace.
    pub smallest_capacity: bool,
    /// Cost profile.
    pub profile: String,
    /// First steps that allocators which plan ahead learn from.
    pub profile_steps: Option<u64>,
    /// Settings string of PyTorch's allocator in place of the recorded one.
    pub settings: Option<String>,
}

/// Where traces come from; `{key}` stands for the value of a parameter.
#[derive(Clone, Debug)]
pub struct TraceTemplate {
    /// A file of traces or the description of a job.
    pub path: String,
    /// It is the description of a job, from which the trace is generated.
    pub is_job: bool,
    /// Keys that replace those of the job.
    pub set: Vec<(String, String)>,
    /// What it is called in results.
    pub label: Option<String>,
    /// Where it stands in the text, in bytes.
    pub(super) at: usize,
}

/// An allocator; `{key}` stands for the value of a parameter.
#[derive(Clone, Debug)]
pub struct AllocatorTemplate {
    /// Its specification, as on the command line.
    pub spec: String,
    /// What it is called in figures.
    pub label: Option<String>,
    /// Where it stands in the text, in bytes.
    pub(super) at: usize,
}

/// A parameter.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Its values.
    pub values: Vec<AxisValue>,
}

impl Axis {
    /// Whether its values replace keys of a job whether or not the job names the parameter.
    pub(super) fn sets(&self) -> bool {
        self.values.iter().any(|value| !value.set.is_empty())
    }
}

/// A value of a parameter.
#[derive(Clone, Debug)]
pub struct AxisValue {
    /// What stands in place of `{key}`, and in results.
    pub text: String,
    /// Keys that replace those of a generated trace's job.
    pub set: Vec<(String, String)>,
}

/// A size of a device or limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Size {
    /// As written.
    pub text: String,
    /// What it means.
    pub kind: SizeKind,
}

/// What a size means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SizeKind {
    /// That of the trace.
    OfTrace,
    /// Bytes.
    Bytes(u64),
    /// A multiple of the trace's requested peak, rounded up to whole units of device memory.
    OfPeak(f64),
}

/// Cost profiles to be laid side by side.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Their names.
    pub profiles: Vec<String>,
    /// Sizes of one piece in bytes.
    pub sizes_bytes: Vec<u64>,
    /// Bytes that are made of such pieces.
    pub total_bytes: Option<u64>,
    pub(super) at: usize,
}

/// How a figure looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// A bar a category, or one a category and group.
    Bars,
    /// Lines over a number.
    Lines,
    /// Points.
    Scatter,
    /// A square where a cell ran, a cross where it ran out of memory.
    Frontier,
    /// A coloured field for each pair of categories.
    Heatmap,
}

/// Unit of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// As it is.
    Plain,
    /// Powers of 1024 bytes.
    KiB,
    /// Powers of 1024 bytes.
    MiB,
    /// Powers of 1024 bytes.
    GiB,
    /// Fractions as hundredths.
    Percent,
    /// Nanoseconds as microseconds.
    Us,
    /// Nanoseconds as milliseconds.
    Ms,
    /// Nanoseconds as seconds.
    S,
    /// A ratio.
    Times,
}

impl Unit {
    /// The unit that a column is shown in unless another is asked for: bytes in GiB, times in
    /// milliseconds, shares in hundredths.
    pub fn of_column(name: &str, kind: ColumnKind) -> Unit {
        match kind {
            ColumnKind::Word => Unit::Plain,
            _ if name.contains("bytes") => Unit::GiB,
            _ if name.ends_with("_ns") => Unit::Ms,
            ColumnKind::Fraction => Unit::Percent,
            ColumnKind::Number | ColumnKind::Difference => Unit::Plain,
        }
    }
}

/// What is made of several rows at one place of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregate {
    /// Their mean.
    Mean,
    /// The middle one.
    Median,
    /// The smallest.
    Min,
    /// The largest.
    Max,
}

/// How wide a figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// A column of a paper: 88 mm.
    Column,
    /// A page: 180 mm.
    Page,
    /// So many millimetres.
    Millimetres(u32),
}

impl Width {
    /// In millimetres.
    pub fn millimetres(self) -> u32 {
        match self {
            Width::Column => 88,
            Width::Page => 180,
            Width::Millimetres(width) => width,
        }
    }
}

/// Which number of a row is shown, and how.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The column.
    pub column: String,
    /// Its unit.
    pub unit: Unit,
    /// Divided by the same figure of the row of this trace, capacity and limit that passes.
    pub relative_to: Option<Filter>,
    /// What is made of several rows; without it there must be one.
    pub aggregate: Option<Aggregate>,
}

/// A figure.
#[derive(Clone, Debug)]
pub struct FigureSpec {
    /// Its name: its file is called by it.
    pub name: String,
    /// What it shows, for the report.
    pub title: String,
    /// How it looks.
    pub kind: FigureKind,
    /// Column of the horizontal axis (of the vertical one where bars lie).
    pub x: String,
    /// Unit of a number there.
    pub x_unit: Unit,
    /// Column of the vertical axis where that holds names.
    pub y: Option<String>,
    /// The number that is shown; a frontier shows none.
    pub value: Option<Shown>,
    /// Column that tells bars, lines or points apart.
    pub group: Option<String>,
    /// Which rows.
    pub filters: Vec<Filter>,
    /// The horizontal axis is logarithmic.
    pub x_log: bool,
    /// The vertical axis, or what colours a heat map, is logarithmic.
    pub y_log: bool,
    /// What stands at the horizontal axis; else the column's name and unit.
    pub x_title: Option<String>,
    /// What stands at the numbers: the vertical axis, or below a heat map.
    pub y_title: Option<String>,
    /// How wide.
    pub width: Width,
    /// How high, in millimetres; else as the kind needs.
    pub height_mm: Option<u32>,
    /// Bars lie.
    pub horizontal: bool,
}

/// A table of the report.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// What it shows.
    pub title: String,
    /// Which rows.
    pub filters: Vec<Filter>,
    /// What stands in it.
    pub layout: TableLayout,
}

/// What stands in a table.
#[derive(Clone, Debug)]
pub enum TableLayout {
    /// A number for each pair of names.
    Pivot {
        /// Column whose names stand in front.
        rows: String,
        /// Column whose names stand on top.
        columns: String,
        /// The number.
        value: Shown,
    },
    /// Columns as they are.
    List(Vec<String>),
}

/// How columns that figures name are computed from a result: names and kinds, in order.
pub(super) const RESULT_COLUMNS: [(&str, ColumnKind); 21] = [
    ("capacity_bytes", ColumnKind::Number),
    ("limit_bytes", ColumnKind::Number),
    ("status", ColumnKind::Word),
    ("requested_bytes_peak", ColumnKind::Number),
    ("allocated_bytes_peak", ColumnKind::Number),
    ("active_bytes_peak", ColumnKind::Number),
    ("reserved_bytes_peak", ColumnKind::Number),
    ("excess_bytes", ColumnKind::Difference),
    ("efficiency", ColumnKind::Fraction),
    ("fragmentation", ColumnKind::Fraction),
    ("utilization", ColumnKind::Fraction),
    ("active_utilization", ColumnKind::Fraction),
    ("waste_removed", ColumnKind::Fraction),
    ("device_calls", ColumnKind::Number),
    ("allocator_device_ns", ColumnKind::Number),
    ("time_share", ColumnKind::Fraction),
    ("alloc_retries", ColumnKind::Number),
    ("smallest_capacity_bytes", ColumnKind::Number),
    ("over_requested_bytes", ColumnKind::Number),
    ("over_requested", ColumnKind::Fraction),
    ("message", ColumnKind::Word),
];

/// Further columns where an allocator is `chunk`: of the last step, but for the peaks.
pub(super) const CHUNK_COLUMNS: [(&str, ColumnKind); 7] = [
    ("gpu_chunk_bytes_peak", ColumnKind::Number),
    ("host_bytes_peak", ColumnKind::Number),
    ("construction_host_bytes_peak", ColumnKind::Number),
    ("h2d_bytes", ColumnKind::Number),
    ("d2h_bytes", ColumnKind::Number),
    ("collective_bytes", ColumnKind::Number),
    ("step_ns", ColumnKind::Number),
];

/// Columns of device latencies.
const LATENCY_COLUMNS: [(&str, ColumnKind); 7] = [
    ("profile", ColumnKind::Word),
    ("gpu", ColumnKind::Word),
    ("basis", ColumnKind::Word),
    ("call", ColumnKind::Word),
    ("size_bytes", ColumnKind::Number),
    ("cost_ns", ColumnKind::Fraction),
    ("total_ns", ColumnKind::Fraction),
];

impl Description {
    /// The columns of its results.
    pub fn columns(&self) -> Vec<Column> {
        let named = |columns: &[(&str, ColumnKind)]| {
            columns.iter().map(|(name, kind)| Column::new(name, *kind)).collect::<Vec<_>>()
        };
        if let Kind::DeviceLatency(_) = &self.kind {
            return named(&LATENCY_COLUMNS);
        }
        let word = |name: &str| Column::new(name, ColumnKind::Word);
        let mut columns = Vec::new();
        if self.has_sets() {
            columns.push(word("set"));
        }
        columns.push(word("trace"));
        columns.extend(self.axes.iter().map(|axis| word(&axis.name)));
        columns.extend(["label", "allocator", "profile", "capacity", "limit"].map(word));
        columns.extend(named(&RESULT_COLUMNS));
        if self.has_chunks() {
            columns.extend(named(&CHUNK_COLUMNS));
        }
        columns
    }

    /// Whether there are several blocks, which results tell apart.
    pub(super) fn has_sets(&self) -> bool {
        let Kind::Replay(blocks) = &self.kind else { return false };
        blocks.iter().any(|block| !block.set.is_empty())
    }

    /// Whether some allocator manages model data in chunks.
    pub(super) fn has_chunks(&self) -> bool {
        let Kind::Replay(blocks) = &self.kind else { return false };
        let mut specs = blocks.iter().flat_map(|block| &block.allocators);
        specs.any(|allocator| allocator.spec.split('+').next() == Some(crate::chunk::NAME))
    }
}
