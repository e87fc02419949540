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
//! ```

pub mod expect;
pub mod json;
pub mod table;
pub mod text;
