//! All integration tests, in one binary so that linking is paid for once.

mod caching;
mod caching_faults;
mod caching_property;
mod cases;
mod cli;
mod common;
mod conformance;
mod cuts;
mod generated;
mod gmlake;
mod golden;
mod import;
mod model;
mod predict;
mod readme;
mod recordings;
mod starts;
mod trace_files;
