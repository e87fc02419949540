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
//!   Explanation, Advice, texts about memory ──> text, json
//!   CostProfile, Calibration ──> text    tables of costs; all that was measured as CSV
//!   EntryCheck ─┬─> text    what moved since a baseline, also as Markdown
//!               └─> junit   the same as JUnit's XML
//!   rows ─────────> table   CSV and Parquet
//!   Observed, Moment ──> html  a page for a browser, with figures as SVG
//!   Planned ────┬─> text    a paragraph or a table
//!               ├─> plan_file  offsets as JSON
//!               └─> figure  the packing as SVG
//!   ChunkPlan ────> text    chunk sizes: a table and the best
//!   Rows ───────┬─> rows    what an experiment found: CSV and Parquet
//!               ├─> figure  bars, lines, heat maps as SVG
//!               ├─> experiment  its report in Markdown
//!               └─> parts   parts of it as Parquet, and joined again
//! ```

pub mod expect;
pub mod experiment;
#[cfg(feature = "figures")]
pub mod figure;
#[cfg(feature = "figures")]
pub mod html;
pub mod json;
pub mod junit;
#[cfg(feature = "analytics")]
pub mod parts;
pub mod plan_file;
pub mod rows;
mod select;
pub mod table;
pub mod text;
