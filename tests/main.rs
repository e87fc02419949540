//! All integration tests, in one binary so that linking is paid for once.

mod common;
mod import;
mod trace_files;
