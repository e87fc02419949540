//! All integration tests, in one binary so that linking is paid for once.

mod cli;
mod common;
mod trace_files;
