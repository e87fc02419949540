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
//!   a folder ──of_folder─────┘                           │ Store: what earlier runs gave
//!                                                        └─ Shard: some of the traces, to be merged
//!   trace ──settings::Trial──┬─ explain ──> Explanation: class, moments, what helps
//!                            └─ advise ───> Advice: the settings to paste
//!   Rows ──fleet──> Fleet: the worst rank, the spread, the best setting
//!   traces ──survey──> what each asks for, and which are alike
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
mod fleet;
mod folder;
mod queue;
mod read;
mod rows;
mod run;
pub mod settings;
mod shard;
mod store;
pub mod survey;
mod template;

pub use cells::{Cell, Folders, TraceSource, cells, cells_and_others};
pub use description::{
    Aggregate, AllocatorTemplate, Axis, AxisValue, Block, Description, FigureKind, FigureSpec,
    Kind, Latency, Shown, Size, SizeKind, TableLayout, TableSpec, TraceTemplate, Unit, Width,
};
pub use error::{CellError, DescriptionError, TraceError};
pub use filter::{Filter, FilterError, fits};
pub use fleet::{
    Decision, Fleet, FleetError, FleetGroup, FleetSetting, FleetSpec, OwnBest, Spread, check_fleet,
    fleet, fleet_rows,
};
pub use read::read_description;
pub use rows::{Column, ColumnKind, Rows, Value};
pub use run::{
    CellOutcome, CellRunner, Outcomes, Step, by_trace, latency_rows, name_columns, rows,
};
pub use shard::{MergeError, PartHeader, Shard, ShardError, check_cells, check_parts};
pub use store::{Key, KeyBuilder, Store};
