//! What several test modules share.

pub(crate) mod trace_gen;
