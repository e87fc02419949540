//! All integration tests in one binary, so that linking is paid once.

mod caching_property;
mod golden;
mod model;
