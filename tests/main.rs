//! All integration tests, in one binary so that linking is paid for once.

mod best;
mod best_fit;
mod caching;
mod caching_faults;
mod caching_property;
mod capacity;
mod cases;
mod cli;
mod common;
mod compare;
mod conformance;
mod costs;
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
mod stitch;
mod strategies;
mod trace_files;
