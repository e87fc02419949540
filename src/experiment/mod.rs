//! What is asked of many replays at once: figures and tables from a description, a gate for CI,
//! the settings that need least memory, and what sets two runs apart.
//!
//! The one design decision: everything here is a list of cells, each of which is a pure function of
//! a trace, a specification and a device; so cells run on any number of threads, can be kept and
//! taken up again, and come out the same everywhere.
//!
//! ```text
//!   traces × allocators × settings × capacities ──> cells ──engine──> rows ──report──> CSV, figures
//!
//!   TOML ──read_description──> Description ──cells──> [Cell] ──CellRunner──> Rows
//!                                                        │ Store: what earlier runs gave
//!   trace ──settings::Trial──┬─ explain ──> Explanation: class, moments, what helps
//!                            └─ advise ───> Advice: the settings to paste
//!   baseline ──check──> what grew       two traces, two results ──diff──> what sets them apart
//! ```

pub mod advise;
mod cells;
pub mod check;
mod description;
pub mod diff;
mod error;
pub mod explain;
mod files;
mod filter;
mod read;
mod rows;
mod run;
pub mod settings;
mod store;
mod template;

pub use cells::{Cell, Folders, TraceSource, cells};
pub use description::{
    Aggregate, AllocatorTemplate, Axis, AxisValue, Block, Description, FigureKind, FigureSpec,
    Kind, Latency, Shown, Size, SizeKind, TableLayout, TableSpec, TraceTemplate, Unit, Width,
};
pub use error::{CellError, DescriptionError, TraceError};
pub use filter::{Filter, FilterError, fits};
pub use read::read_description;
pub use rows::{Column, ColumnKind, Rows, Value};
pub use run::{CellOutcome, CellRunner, TraceOutcome, by_trace, latency_rows, name_columns, rows};
pub use store::{Key, KeyBuilder, Store};
