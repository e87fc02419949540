//! Turns results into text, JSON and tables. Nothing else in the crate does.
//!
//! The one design decision: a printer takes finished values and gives back a `String` (or writes a
//! table into a writer it is handed); it opens no file, knows no flag and no terminal. Whether
//! colour is wanted comes in as a [`text::Style`].
//!
//! ```text
//!   Compared ───┬─> text    a table of cells side by side, also as Markdown
//!               └─> table   a row a cell
//!   RunResult ──┬─> text    one screen for people
//!               ├─> json    what scripts rely on (DESIGN 7)
//!               └─> expect  fields by name, against the trace's `expect` lines
//!   rows ─────────> table   CSV and Parquet
//!   Planned ────┬─> text    a paragraph or a table
//!               ├─> plan_file  offsets as JSON
//!               └─> figure  the packing as SVG
//!   ChunkPlan ────> text    chunk sizes: a table and the best
//! ```

pub mod expect;
#[cfg(feature = "figures")]
pub mod figure;
pub mod json;
pub mod plan_file;
pub mod table;
pub mod text;
