//! The `fraglab` program.
fn main() {}
