//! All integration tests in one binary, so that linking is paid once.

mod common;
mod import;
