//! Offline packing: dynamic storage allocation. Knows nothing of traces, devices or allocators.
//!
//! Buffers have lifetimes and sizes; offsets are sought so that no two that are live together
//! overlap, and the highest end is as low as possible.
//!
//! ```text
//!   bytes
//!     ^      ┌────┐           height ─ ─ ─ ─ ─ ─ ─ ─ ─
//!     │  ┌───┤ c  ├─────┐                       ┐ gap: proven 0, or what is left to doubt
//!     │  │ b └────┤  d  │     lower bound ─ ─ ─ ┘
//!     │  ├────────┴─────┤
//!     │  │      a       │
//!     └──┴──────────────┴──> ticks
//! ```
//!
//! # How a problem is solved
//!
//! ```text
//!   Problem ──core──> Core ──bound──> lower bound
//!                      │
//!                      ├─ portfolio: many orders, each decoded by first fit, cheapest first
//!                      ├─ repair:    what sticks out drives out what is cheapest to place again
//!                      └─ exact:     asks for the lower bound first, then for just above
//!                             │
//!                             └──> offsets ──check──> Packing
//! ```
//!
//! A pool falls into stretches of time that have nothing in common. The highest of them take
//! turns, each with more effort than before, until the pool is as low as its lower bound.
//!
//! Every step may end at any time and leaves the best packing so far. With a budget in units of
//! work instead of seconds the result depends on the problem, the options and nothing else.
//!

mod binding;
pub mod bound;
pub mod check;
pub mod core;
pub mod exact;
pub mod portfolio;
mod problem;
pub mod reason;
pub mod repair;
mod solve;
pub mod stalloc;
pub mod synthetic;
pub mod work;

pub use problem::{
    BINDING_MAX, BYTES_MAX, BadProblem, Binding, Buffer, Extra, Gap, Packing, PoolPacking, Problem,
};
pub use solve::{Planner, SolveOptions, Solved, solve};
