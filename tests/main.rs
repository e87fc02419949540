//! All integration tests, in one binary so that linking is paid for once.

mod common;
mod trace_files;
