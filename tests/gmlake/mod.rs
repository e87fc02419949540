//! GMLake as shipped, a second time: a slow model that shares nothing with the allocator `stitch`,
//! so that agreement between both means something.
//!
//! ```text
//!   text cases ──┐                    ┌─> golden: what the model must give by the specification
//!                ├─> replay on model ─┼─> cases: the `expect` lines of traces/cases/gmlake-*.txt
//!   random ──────┘                    └─> property: what `stitch+policy=shipped` must give
//! ```
//!
//! The rules are those of the project's notes on GMLake, section by section; where they are silent,
//! the [readings](model) say what was chosen.

mod cases;
mod device;
mod golden;
mod model;
mod property;
mod replay;
mod settings;
