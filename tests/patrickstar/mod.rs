//! PatrickStar's manager, a second time: a slow model that shares nothing with the room `chunk`, so
//! that agreement between both means something.
//!
//! ```text
//!                          ┌─> golden: what the model must give by the specification, section 8
//!   program ──> model ─────┤
//!      │                   └─> property: line by line what the manager must do
//!      └─> trace ──> chunk::run ──> invariants: what must hold of every run
//! ```
//!
//! The rules are those of `specs/patrickstar.md`; where it is silent, the [model] says what was
//! read.

mod build;
mod golden;
mod invariants;
mod model;
mod program;
mod property;
mod random;
