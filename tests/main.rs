//! The one integration binary: a module a topic, so that linking is paid once.

mod cli;
mod common;
